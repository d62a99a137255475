"""Every option of every command with values that do not fit: one error, exit status 1 or 2, no traceback."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit.tools import cli, warm
from flashkit.tools.autotune import command as autotune
from flashkit.tools.bench import command as bench
from flashkit.tools.cli import examples

Run = Callable[..., tuple[int, str, str]]

NUMBERS = [
    "", " ", *["x", "-1", "0", "1.5", "1e23", "nan", "inf", "-inf"], "9" * 30, "9" * 5000,
    *["é", "٣", "²", "½", "1,2", "0x1"], "\0",
]  # fmt: skip
NAMES = ["", " ", "x", "-1", ",", "é", "no such", "CPU", "float32 ", "a" * 5000, "\udcff", "\n", "\0"]
LISTS = [*NUMBERS, ",", ",,", "1,", ",1", "none", "1,none", "1,2,3,4,5", "1;2"]
FILES = ["/proc/no/such/file", "/dev/null/x", "/", "é" * 300, "\0", "/etc/passwd/x"]

OPTIONS: dict[str, list[str]] = {
    "explain --shape": [*LISTS, "1,8,64,0", "1,8,64,1025", "9" * 18 + ",1,1,8"], "explain --keys": NUMBERS,
    "explain --kv-heads": NUMBERS, "explain --value-dim": [*NUMBERS, "1025"], "explain --dtype": NAMES,
    "explain --array": NAMES, "explain --layout": NAMES, "explain --window": [*LISTS, "-1,0", "1e9,0"],
    "explain --q-offset": [*NUMBERS, str(2**48 + 1), str(2**63), str(-(2**63) - 1)], "explain --softcap": NUMBERS,
    "explain --dropout": [*NUMBERS, "1", "1.0", "-0.1"], "explain --backend": [*NAMES, "cupy_raw"],
    "profile show": NAMES, "profile validate": [*FILES, "no such file"], "cache warm --dtype": [*NAMES, "float8"],
    "cache warm --head-dim": [*NUMBERS, "1025"], "bench --sizes": LISTS, "bench --suite": NAMES,
    "bench --baselines": NAMES, "bench --device": [*NAMES, "tpu"], "bench --output": FILES, "autotune --dtype": NAMES,
    "autotune --budget": NUMBERS, "autotune --backend": [*NAMES, "reference"], "autotune --output": FILES,
}  # fmt: skip

FIT = {
    "explain --shape": {"1,2"}, "explain --softcap": {"1", "1.5", "1e23", "9" * 30}, "explain --keys": {"0"},
    "explain --q-offset": {"-1", "0"},
    "explain --window": {"1,2", "1,none", "1,", ",1", ","}, "explain --dropout": {"0"},
    "bench --sizes": {"1,2", "1,2,3,4,5"}, "bench --suite": {"float32 "}, "bench --baselines": {"", " ", ",", "\n"},
    "autotune --budget": {"1.5", "1e23", "9" * 30},
}  # fmt: skip
"""Values in these lists that do fit."""


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command, none of which measures: (status, stdout, stderr)."""
    monkeypatch.setattr(bench, "run", lambda *_, **__: iter([SimpleNamespace(machine={}, background_load=0.0)]))
    monkeypatch.setattr(bench, "show", lambda *_: None)
    monkeypatch.setattr(bench, "describe", lambda _: "")
    monkeypatch.setattr(autotune, "_tune", lambda *_: ([], Path("mine.yaml")))
    monkeypatch.setattr(warm, "_one", lambda *call: warm.Warmed(call[0], "", 0.0))
    monkeypatch.setattr(bench, "append", lambda *_: None)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = cli.run(list(arguments))
        out, err = capfd.readouterr()
        return status, out, err

    return call


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.one_in(2)
def test_a_value_that_does_not_fit_is_one_error(run: Run, option: str) -> None:
    words = option.split()
    for value in OPTIONS[option]:
        separate = [*words, value] if not words[-1].startswith("--") else [*words[:-1], f"{words[-1]}={value}"]
        status, _, err = run(*separate)
        case = f"{option} {value[:40]!r}"
        if value in FIT.get(option, ()):
            assert status == 0, (case, err)
            continue
        assert status in (1, 2), (case, status)
        assert ("Traceback" not in err and len(err.strip()) > 10) or option == "profile validate", case
        assert len([line for line in err.splitlines() if line.startswith("error:")]) <= 1, case


@pytest.mark.parametrize("arguments", [
    ["--shape", "1,10000000,16,64"], ["--shape", "10000000,8,16,64", "--causal"], ["--shape", "1,8,10000000,64",
    "--bias"],
    ["--shape", "10000000,10000000,16,64", "--alibi", "--sinks", "--mask", "--bias"],
    ["--shape", "1,8,10000000,64", "--window", "100,0"], ["--shape", "1,10000000,8,64", "--layout", "bnhd", "--mask"],
    ["--shape", "1,8,10000000,64", "--mask", "--causal", "--dropout", "0.5"],
    ["--shape", "1,8,1,512", "--keys", "100000000000"],
], ids=" ".join)  # fmt: skip
def test_explain_takes_no_memory(run: Run, arguments: list[str]) -> None:
    assert run("explain", "--causal")[0] == 0  # imports
    tracemalloc.start()
    try:
        status, out, _ = run("explain", "--json", *arguments)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (status, json.loads(out)["backend"]) == (0, "cpu")
    assert peak < 400 << 20, "as much as the tile lists take, whatever the size"


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (100, 0)}, {"window": (3000, 50)}])
def test_an_estimate_is_near_the_count(options: dict[str, Any]) -> None:
    from flashkit.call import explanation

    n = 12_000
    q = np.broadcast_to(np.float32(1), (1, 1, n, 8))
    assert n * n > explanation.EXACT_PAIRS
    near, far = options.get("window", (n, 0))
    row = np.arange(n)
    exact = (np.minimum(row + (0 if "causal" in options else far), n - 1) - np.maximum(row - near, 0) + 1).sum() / n**2
    assert abs(flashkit.explain(q, q, q, **options).visible_fraction - exact) < 2e-4


def test_an_unsupported_call_is_explained_and_fails(run: Run) -> None:
    status, out, err = run("explain", "--backend", "cupy_raw")
    assert status == 1
    assert "takes cupy arrays, not numpy" in out and err.startswith("error: no backend can compute")


def test_an_output_that_fits_is_left_as_it_was(run: Run, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("{}\n")
    assert run("bench", "--output", str(kept), "--sizes", "64")[0] == 0
    assert kept.read_text() == "{}\n"
    assert run("bench", "--output", str(tmp_path / "new" / "x.jsonl"), "--sizes", "64")[0] == 0
    assert os.listdir(tmp_path / "new") == []


def test_errors_of_the_system_are_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "results.jsonl")

    monkeypatch.setattr(bench, "run", full)
    status, out, err = run("bench", "--sizes", "64", "--baselines", "")
    assert (status, out, err.strip()) == (1, "", "error: [Errno 28] No space left on device: 'results.jsonl'")


@pytest.mark.parametrize("option", ["--limit", "--top", "--batch-size"])
def test_numbers_of_the_demo(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = examples.example("semantic_search").main
    for value in NUMBERS:
        with pytest.raises(SystemExit) as stop:
            main([f"{option}={value}"])
        assert stop.value.code == 2, value
        assert "error: argument" in capsys.readouterr().err, value
