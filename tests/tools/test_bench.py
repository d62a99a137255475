"""The benchmark: its cases, what it measures and stores, and its command."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from simulated_bench import SMALL, fake_time, measured

from flashkit.tools import cli
from flashkit.tools.bench import baselines, cases, command, environment, measure, memory, results, yardsticks
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.contender import Entry
from flashkit.tools.bench.results import Result

# --- measuring --------------------------------------------------------------------------------------------------------


def test_a_result_has_flops_ratios_and_memory_and_survives_json() -> None:
    result = measured(Case(32, head_dim=8, heads=2, causal=True))
    assert result.flops == 4 * 8 * 2 * 32 * 33 / 2
    assert result.times_as_fast["numpy"]["median"] == pytest.approx(3.0)
    assert result.gflops("flashkit") == pytest.approx(result.flops / 1e6)
    assert result.memory == {"flashkit": 1 << 20}
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result


GROUPED = Case(16, head_dim=4, heads=4, heads_kv=2, causal=True, n_k=24)
MASKED = [Case(300, 8, 2, causal=True, window=70), Case(600, 8, 2, kept=0.25), Case(300, 8, 2, causal=True, kept=0.5)]
NARROW = Case(17, 12, 2, causal=True, n_k=30, head_dim_v=4)
BOTH_WAYS = [
    (SMALL, "forward"), (SMALL, "backward"), (GROUPED, "backward"), (NARROW, "backward"), (MASKED[0], "backward"),
    (MASKED[1], "forward"), (MASKED[2], "forward"), (Case(9, 8, 1, "float16"), "forward"),
    pytest.param(Case(9, 8, 1, "bfloat16"), "backward", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("case", "direction"), BOTH_WAYS, ids=lambda x: getattr(x, "label", x))
def test_plain_numpy_computes_the_same(case: Case, direction: Any) -> None:
    """With an error against float64, and FLOPs of the pairs that a mask leaves."""
    result = measured(case, direction)
    assert "numpy" in result.timings
    assert result.errors.keys() == {"flashkit", "numpy"}
    for found in result.errors.values():
        assert list(found) == (["out"] if direction == "forward" else ["dq", "dk", "dv"])
        assert all(1e-9 < x < (1e-6 if case.dtype == "float32" else 1e-2) for x in found.values())
    if case in MASKED:
        assert case.visible is not None
        assert result.flops == 4 * 8 * 2 * case.visible.sum() * (1 if direction == "forward" else 2.5)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("baseline", ["torch", "jax", "onnxruntime"])
@pytest.mark.parametrize(
    "case",
    [Case(17, 8, 2), Case(17, 8, 2, causal=True), Case(8, 8, 4, "bfloat16", heads_kv=2), NARROW, *MASKED],
    ids=lambda c: c.label,
)
def test_baselines_compute_the_same(case: Case, baseline: str, direction: Any) -> None:
    if lacking := baselines.missing(baseline):
        pytest.skip(f"needs {lacking[0]}")
    result = measured(case, direction, (baseline,))
    assert baseline in result.timings or result.skipped[baseline].startswith("cannot do this case")


def test_a_share_of_a_yardstick() -> None:
    """flashkit takes 1 ms for a quarter of the pairs, the dense call 3 ms for all."""
    result = measured(MASKED[1])
    visible = result.flops / (4 * 8 * 2 * 600 * 600)
    assert result.yardsticks["dense"]["median"] == pytest.approx(visible * 3)
    assert "dense" in result.timings
    assert "dense" not in result.times_as_fast


def test_the_yardstick_of_long_cases_is_a_matrix_product() -> None:
    pytest.importorskip("torch")
    case = Case(2048, 1, 1)
    (sgemm,) = yardsticks.yardsticks(case, (), "forward", ("torch",), 1).values()
    assert sgemm.work == 2 * 2048**3
    assert not yardsticks.yardsticks(case, (), "forward", ("numpy",), 1)


def test_a_baseline_that_computes_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(case: Case, arrays: cases.Arrays, *rest: Any) -> Entry:
        return Entry(lambda: None, lambda: (np.zeros_like(arrays[0]),))

    monkeypatch.setitem(baselines.BASELINES, "numpy", zeros)
    result = measured()
    assert "numpy" not in result.timings
    assert "does not compute the same" in result.skipped["numpy"]


@pytest.mark.parametrize("stage", ["made", "called"])
def test_a_baseline_that_fails_is_skipped(monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("not on this processor\nmore lines")

    make = refuse if stage == "made" else lambda *_: Entry(refuse, refuse)
    monkeypatch.setitem(baselines.BASELINES, "numpy", make)
    result = measured()
    assert "numpy" not in result.timings
    assert result.skipped["numpy"] == "fails: not on this processor"


def test_timings_under_load_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Load:
        shares = iter((0.5, 0.3, 0.4, 0.9))

        def __enter__(self) -> Load:
            self.share = next(self.shares)
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(environment, "BackgroundLoad", Load)
    assert measured().background_load == 0.3
    Load.shares = iter((0.01,))
    assert measured().background_load == 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_growth_is_the_allocated_memory() -> None:
    case = Case(1024, heads=2, head_dim=16)
    plain, ours = (memory.memory_growth(case, "forward", name) for name in ("numpy", "flashkit"))
    assert plain is not None
    assert ours is not None
    scores = 2 * 1024 * 1024 * 4
    assert 0.9 * scores < plain < 3 * scores  # the kernel counts pages in batches
    assert ours < scores  # its output of 0.1 MiB may be in pages that the process already has


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_appends_results(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    real = measure.measure
    growth = lambda case, direction, name: 1 << 20
    monkeypatch.setattr(measure, "measure", lambda *a, **k: real(*a, **k, time=fake_time, growth=growth))
    file = tmp_path / "new" / "results.jsonl"
    for _ in range(2):
        assert cli.run(["bench", "--quick", "--sizes", "16,32", "--baselines", "numpy", "--output", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "heads 8, 32 x 32, head dim 64, float32, causal" in shown
    assert "3.00" in shown
    stored = [json.loads(result) for result in file.read_text().splitlines()]
    assert len(stored) == 2 * 2 * 2 * 2
    assert {result["schema"] for result in stored} == {results.SCHEMA}
    assert all(math.isclose(result["times_as_fast"]["numpy"]["median"], 3.0) for result in stored)
    stored[-1]["run"] = "later"
    file.write_text("\n".join(map(json.dumps, stored)))
    assert [result.run for result in results.read(file)] == ["later"]


@pytest.mark.parametrize(
    ("option", "name", "status", "problem"),
    [
        ("--baselines", "nump", 2, "got nump"),
        ("--baselines", "jax", 1, "pip install jax"),
        ("--suite", "float23", 2, "--suite: expected all, float32"),
    ],
)
def test_unknown_names_and_missing_packages(
    option: str, name: str, status: int, problem: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert cli.run(["bench", option, name]) == status
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--suite", "bfloat16", "--sizes", "512"],
            [Case(512, d, dtype="bfloat16", causal=causal) for d in (64, 128) for causal in (False, True)],
        ),
        (["--quick", "--suite", "float16"], cases.SUITES["float16"]),
        (["--quick", "--sizes", "64"], [Case(64), Case(64, causal=True)]),
        (["--sizes", "64"], [Case(64, d, causal=causal) for d in (64, 128) for causal in (False, True)]),
        (["--suite", "small", "--sizes", "32,64"], [Case(32), Case(64)]),
        (["--suite", "masks", "--sizes", "1024"], [Case(1024, causal=True, window=512), Case(1024, kept=0.25)]),
        (
            ["--suite", "decode", "--sizes", "4096"],
            [Case(1, 128, heads=32, heads_kv=8, n_k=4096, dtype=dtype) for dtype in ("float32", "bfloat16")],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_sizes_keep_the_rest_of_a_suite(words: list[str], expected: list[Case], monkeypatch: Any, capsys: Any) -> None:
    asked: list[Case] = []
    result = measured()
    monkeypatch.setattr(command, "run", lambda cases, names, **rest: asked.extend(cases) or iter([result]))
    assert cli.run(["bench", "--baselines", "numpy", *words]) == 0
    assert sorted(map(repr, asked)) == sorted(map(repr, expected))


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flashkit.dispatch.registry", dict)
    assert cli.run(["bench", "--device", "cuda"]) == 1
    assert "error: --device: cupy_raw is not installed" in capsys.readouterr().err
    assert cli.run(["bench", "--device", "abacus"]) == 2
    assert "expected cpu, cuda, got abacus" in capsys.readouterr().err


@pytest.mark.gpu
def test_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cases as conditions

    conditions.skip_unless("cupy_raw")
    monkeypatch.setattr(cases, "CUDA_QUICK", [Case(300, 64, 4, "float16", causal=True, batch=2)])
    assert cli.run(["bench", "--device", "cuda", "--quick", "--output", str(tmp_path / "gpu.jsonl")]) == 0
    stored = results.read(tmp_path / "gpu.jsonl")
    assert [result.direction for result in stored] == ["forward", "backward"]
    for result in stored:
        assert result.machine["kind"] == "cuda"
        assert all(error < 2e-3 for error in result.errors["flashkit"].values())
        assert result.timings["flashkit"]["median"] < 1e-2
        assert not result.times_as_fast or min(x["median"] for x in result.times_as_fast.values()) > 0.1
