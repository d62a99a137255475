"""Timing in turns, on a clock that runs as it is told; benchmark results, their table and their plots."""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import report

from flashkit.devices import timing
from flashkit.devices.timing import Timing, interleaved
from flashkit.tools import cli
from flashkit.tools.bench import baselines
from flashkit.tools.bench import run as bench
from flashkit.tools.bench.baselines import Case
from flashkit.tools.bench.run import Line

ROOT = Path(__file__).resolve().parents[2]


# --- timing -----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds pass only in calls and in sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.order.append("sleep")

    def call(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        """A call that takes seconds(n) the n-th time."""

        def spend() -> None:
            self.now += seconds(self.order.count(name))
            self.order.append(name)

        return spend


def test_calls_take_turns() -> None:
    clock = Clock()
    calls = {name: clock.call(name, lambda n: 1.0) for name in "abc"}
    timings = interleaved(calls, rounds=4, clock=clock)
    assert all(t.rounds == (1.0,) * 4 and t.repeats == 1 and not t.dropped for t in timings.values())
    rounds = ["".join(clock.order[i : i + 3]) for i in range(6, len(clock.order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1


def test_a_device_is_waited_for_at_the_end_of_each_sample() -> None:
    """Calls hand over what takes 4 ms each, and return at once; what a wait takes belongs to its sample."""
    clock, waiting = Clock(), [0.0]

    def hand_over() -> None:
        waiting[0] += 0.004

    def wait() -> None:
        clock.now += waiting[0]
        waiting[0] = 0.0

    t = interleaved({"": hand_over}, rounds=4, finish=wait, clock=clock)[""]
    assert t.repeats == 3  # the least sample is 10 ms
    assert t.rounds == pytest.approx([0.004] * 4)


def test_a_disturbance_of_all_cancels_in_the_ratio() -> None:
    clock = Clock()
    slow = lambda n: 5.0 if n % 3 == 0 else 1.0
    timings = interleaved(
        {"a": clock.call("a", slow), "b": clock.call("b", lambda n: 2 * slow(n))}, rounds=9, clock=clock
    )
    assert timings["b"].over(timings["a"]) == (2.0, 2.0, 2.0)


def test_medians_and_quantiles() -> None:
    t = Timing((5.0, 1.0, 2.0, 3.0, 4.0, 100.0))
    assert (t.median, t.best, t.spread) == (3.5, 1.0, (2.0, 5.0))
    assert t.as_dict() == {"median": 3.5, "low": 2.0, "high": 5.0, "best": 1.0, "rounds": 6, "repeats": 1}


def test_some_rounds_there_are_in_any_case() -> None:
    clock = Clock()
    calls = {"a": clock.call("a", lambda n: 1.0), "b": clock.call("b", lambda n: 9.0)}
    timings = interleaved(calls, rounds=20, budget=0.0, least=3, drop=2.0, clock=clock)
    assert [len(t.rounds) for t in timings.values()] == [3, 3]
    assert timings["b"].dropped


def test_a_call_far_behind_is_dropped() -> None:
    clock = Clock()
    calls = {
        "a": clock.call("a", lambda n: 1.0),
        "b": clock.call("b", lambda n: 1.9),
        "c": clock.call("c", lambda n: 3.0),
    }
    timings = interleaved(calls, rounds=10, drop=2.0, clock=clock)
    assert {name: len(t.rounds) for name, t in timings.items()} == {"a": 10, "b": 10, "c": timing.DECIDING_ROUNDS}
    assert timings["c"].dropped
    assert not timings["b"].dropped
    assert timings["c"].over(timings["a"])[0] == 3.0


def test_the_budget_ends_it_after_a_whole_round() -> None:
    clock = Clock()
    calls = {name: clock.call(name, lambda n: 1.0) for name in "ab"}
    assert {len(t.rounds) for t in interleaved(calls, rounds=100, budget=9.0, clock=clock).values()} == {3}
    assert {len(t.rounds) for t in interleaved(calls, rounds=100, budget=0.0, clock=clock).values()} == {1}


def test_a_short_call_is_repeated_and_compiling_is_not_timed() -> None:
    clock = Clock()
    timings = interleaved({"a": clock.call("a", lambda n: 4.0 if n == 0 else 1e-5)}, rounds=3, clock=clock)
    assert timings["a"].repeats == pytest.approx(1000, abs=1)
    assert timings["a"].median == pytest.approx(1e-5)


def test_a_pause_before_each_sample_and_an_untimed_call_after_it() -> None:
    clock = Clock()
    timings = interleaved(
        {"a": clock.call("a", lambda n: 0.02)}, rounds=3, settle=lambda: clock.sleep(0.5), clock=clock
    )
    assert clock.order == ["a", "a", *["sleep", "a", "a"] * 3]
    assert timings["a"].median == pytest.approx(0.02)


def test_until_idle_ends_while_a_thread_runs() -> None:
    busy = True

    def spin() -> None:
        while busy:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    start = time.perf_counter()
    timing.until_idle(0.05)
    waited = time.perf_counter() - start
    busy = False
    thread.join()
    assert waited >= 0.05
    timing.until_idle(10.0)
    assert time.perf_counter() - start < 5.0


def test_the_machine() -> None:
    machine = timing.machine("pytest", "no-such-distribution")
    assert machine["device"]
    assert machine["threads"] >= 1
    assert {"python", "numpy", "numba", "flashkit", "pytest"} <= set(machine["versions"])
    assert "no-such-distribution" not in machine["versions"]
    json.dumps(machine)


def test_neighbours() -> None:
    with timing.Neighbours() as neighbours:
        sum(range(1000))
    assert neighbours.share is None or 0 <= neighbours.share <= 1
    assert timing.warning(None) == timing.warning(0.01) == ""
    assert "40 %" in timing.warning(0.4)


# --- measuring --------------------------------------------------------------------------------------------------------

SMALL = Case(33, head_dim=8, heads=2)


def fake_time(calls: dict[str, Callable[[], object]], **options: Any) -> dict[str, Timing]:
    """flashkit takes 1 ms, every other 3 ms; each is called once."""
    for call in calls.values():
        call()
    return {name: Timing((1e-3 if name == "flashkit" else 3e-3,) * 3) for name in calls}


def measure(case: Case = SMALL, direction: Any = "forward", who: Sequence[str] = ("numpy",)) -> Line:
    return bench.measure(
        case, direction, who, run="now", rounds=1, budget=1.0, memory=True, threads=1, time=fake_time,
        growth=lambda case, direction, name: {"flashkit": 1 << 20, "numpy": None}[name],
    )  # fmt: skip


def test_a_line() -> None:
    line = measure(Case(32, head_dim=8, heads=2, causal=True))
    assert line.flops == 4 * 8 * 2 * 32 * 33 / 2
    assert line.times_as_fast["numpy"]["median"] == pytest.approx(3.0)
    assert line.gflops("flashkit") == pytest.approx(line.flops / 1e6)
    assert line.memory == {"flashkit": 1 << 20}
    assert msgspec.json.decode(msgspec.json.encode(line), type=Line) == line


GROUPED = Case(16, head_dim=4, heads=4, heads_kv=2, causal=True, n_k=24)
MASKED = [Case(300, 8, 2, causal=True, window=70), Case(600, 8, 2, kept=0.25), Case(300, 8, 2, causal=True, kept=0.5)]
HALVES = [pytest.param(Case(9, 8, 1, dtype), marks=pytest.mark.slow) for dtype in ("float16", "bfloat16")]


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("case", [SMALL, GROUPED, *MASKED, *HALVES], ids=lambda case: case.label)
def test_plain_numpy_computes_the_same(case: Case, direction: Any) -> None:
    assert "numpy" in measure(case, direction).timings


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("peer", ["torch", "jax", "onnxruntime"])
@pytest.mark.parametrize(
    "case",
    [Case(17, 8, 2), Case(17, 8, 2, causal=True), Case(8, 8, 4, "bfloat16", heads_kv=2), *MASKED],
    ids=lambda c: c.label,
)
def test_a_peer_computes_the_same(case: Case, peer: str, direction: Any) -> None:
    if lacking := baselines.missing(peer):
        pytest.skip(f"needs {lacking[0]}")
    line = measure(case, direction, (peer,))
    assert peer in line.timings or line.skipped[peer].startswith("cannot do this case")


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.label)
def test_a_masked_case_counts_what_its_peers_see(case: Case) -> None:
    assert case.visible is not None
    assert measure(case).flops == 4 * 8 * 2 * case.visible.sum()


def test_random_blocks_are_evenly_kept() -> None:
    grid = Case(8192, kept=0.25).grid
    assert grid.shape == (64, 64)
    assert (grid.sum(1) == 16).all()
    assert grid.diagonal().all()


def test_a_share_of_a_yardstick() -> None:
    """flashkit takes 1 ms for a quarter of the pairs, the dense call 3 ms for all."""
    line = measure(MASKED[1])
    visible = line.flops / (4 * 8 * 2 * 600 * 600)
    assert line.yardsticks["dense"]["median"] == pytest.approx(visible * 3)
    assert "dense" in line.timings
    assert "dense" not in line.times_as_fast


def test_small_cases_show_what_a_call_adds_to_its_kernel() -> None:
    assert measure(SMALL).yardsticks.keys() == {"planned", "kernel"}
    assert not measure(SMALL, "backward").yardsticks


def test_the_yardstick_of_long_cases_is_a_matrix_product() -> None:
    pytest.importorskip("torch")
    case = Case(2048, 1, 1)
    (sgemm,) = baselines.yardsticks(case, (), "forward", ("torch",), 1).values()
    assert sgemm.work == 2 * 2048**3
    assert not baselines.yardsticks(case, (), "forward", ("numpy",), 1)


@pytest.mark.parametrize("case", [SMALL, GROUPED, MASKED[0]], ids=lambda case: case.label)
def test_errors_against_float64(case: Case) -> None:
    for direction, names in (("forward", ["out"]), ("backward", ["dq", "dk", "dv"])):
        line = measure(case, direction)
        assert line.errors.keys() == {"flashkit", "numpy"}
        for found in line.errors.values():
            assert list(found) == names
            assert all(1e-9 < x < 1e-6 for x in found.values())


def test_an_error_is_relative_to_the_values() -> None:
    exact = np.full((1, 1, 2, 2), 4.0)
    assert bench.errors([np.full((1, 3, 2, 2), 4.004)], {"out": exact}) == {"out": pytest.approx(1e-3)}


def test_suites() -> None:
    cases = [case for suite in bench.SUITES.values() for case in suite]
    assert len(set(cases)) == len(cases)
    assert len(bench.SUITES["float32"]) == 12
    assert set(bench.QUICK) < set(bench.SUITES["float32"])


def test_a_peer_that_computes_something_else_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def uncalibrated(case: Case, arrays: baselines.Arrays, *rest: Any) -> baselines.Entry:
        return baselines.Entry(lambda: None, lambda: (np.zeros_like(arrays[0]),))

    monkeypatch.setitem(baselines.PEERS, "numpy", uncalibrated)
    line = measure()
    assert "numpy" not in line.timings
    assert "does not compute the same" in line.skipped["numpy"]


@pytest.mark.parametrize("when", ["it is made", "it is called"])
def test_a_peer_that_fails_ends_its_own_measurement_alone(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("not on this processor\nmore lines")

    make = refuse if when == "it is made" else lambda *_: baselines.Entry(refuse, refuse)
    monkeypatch.setitem(baselines.PEERS, "numpy", make)
    line = measure()
    assert "numpy" not in line.timings
    assert line.skipped["numpy"] == "fails: not on this processor"


def test_plain_numpy_is_not_asked_for_a_matrix_of_scores_that_is_too_large() -> None:
    nothing = np.empty(0, np.float32)
    assert baselines.with_numpy(Case(1 << 16), (nothing,) * 4, "forward", 1) is None


def test_a_disturbed_time_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Neighbours:
        shares = iter((0.5, 0.3, 0.4, 0.9))

        def __enter__(self) -> Neighbours:
            self.share = next(self.shares)
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(timing, "Neighbours", Neighbours)
    assert measure().neighbours == 0.3
    Neighbours.shares = iter((0.01,))
    assert measure().neighbours == 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_memory_growth_is_what_is_allocated() -> None:
    case = Case(1024, heads=2, head_dim=16)
    plain, ours = (bench.memory_growth(case, "forward", name) for name in ("numpy", "flashkit"))
    assert plain is not None
    assert ours is not None
    scores = 2 * 1024 * 1024 * 4
    assert scores <= plain < 3 * scores
    assert ours < scores  # its output, 0.1 MiB, may lie in pages that the process already had


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = bench.measure
    growth = lambda case, direction, name: 1 << 20
    monkeypatch.setattr(bench, "measure", lambda *a, **k: real(*a, **k, time=fake_time, growth=growth))
    file = tmp_path / "new" / "results.jsonl"
    for _ in range(2):
        assert cli.run(["bench", "--quick", "--sizes", "16,32", "--peers", "numpy", "--output", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "heads 8, 32 x 32, head dim 64, float32, causal" in shown
    assert "3.00" in shown
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2 * 2 * 2 * 2
    assert {line["schema"] for line in lines} == {bench.SCHEMA}
    assert all(math.isclose(line["times_as_fast"]["numpy"]["median"], 3.0) for line in lines)
    lines[-1]["run"] = "later"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [line.run for line in bench.read(file)] == ["later"]


@pytest.mark.parametrize(
    ("option", "name", "status", "problem"),
    [
        ("--peers", "nump", 2, "nump is none of"),
        ("--peers", "jax", 1, "pip install jax"),
        ("--suite", "float23", 2, "--suite: float23 is none of all, float32"),
    ],
)
def test_what_cannot_be_asked_for(
    option: str, name: str, status: int, problem: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert cli.run(["bench", option, name]) == status
    assert problem in capsys.readouterr().err


def test_absent_peers_are_left_out_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    line = measure()
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "run", lambda cases, names, **rest: asked.append((cases, names)) or iter([line]))
    assert cli.run(["bench", "--suite", "small, decode"]) == 0
    assert asked == [(bench.SUITES["decode"] + bench.SUITES["small"], ["numpy"])]
    assert "jax is not compared with: pip install jax" in capsys.readouterr().err


# --- tables and plots -------------------------------------------------------------------------------------------------


def test_the_table_is_made_of_the_last_run(tmp_path: Path) -> None:
    file = tmp_path / "cpu.jsonl"
    shapes = [Case(512, d, causal=causal) for d in (64, 128) for causal in (False, True)]
    for run, factor in (("first", 1), ("second", 2)):
        for case in (SMALL, *shapes):
            line = measure()
            line.run, line.case, line.memory = run, case, {"flashkit": factor << 20, "numpy": 10 << 20}
            line.times_as_fast["torch"] = {"median": factor + case.head_dim / 1000, "low": 1.0, "high": 3.0}
            line.errors["torch"] = {"out": 2 * line.errors["flashkit"]["out"]}
            bench.append(file, line)
    readme, tables = tmp_path / "README.md", tmp_path / "benchmarks.md"
    for target in (readme, tables):
        target.write_text(f"# Title\n{report.START}\nold\n{report.END}\nend\n")
    assert report.main(["--results", str(tmp_path), "--readme", str(readme), "--tables", str(tables)]) == 0
    assert readme.read_text() == f"# Title\n{report.START}\nNo results yet.\n{report.END}\nend\n"
    text = tables.read_text()
    assert text.startswith(f"# Title\n{report.START}\nOn CPUs: ")
    assert "\n## " in text
    assert text.endswith(f"{report.END}\nend\n")
    assert "| heads 2, 33 x 33, head dim 8, float32 | forward | 3.00 | 2.01 |  |" in text
    assert "| float32 | forward | 512 | 2.06, 2.06, 2.13, 2.13 | 3.0 |  |" in text
    assert "| heads 2, 33 x 33, head dim 8, float32 | forward | 2.0 MiB | 10 MiB, 5 times |" in text
    assert "| float32 | out | " in text
    assert "| 0.50 |" in text
    assert " ms" not in text
    assert report.insert(text, report.markdown(tmp_path)) == text


def test_a_text_without_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("# Title\n")
    tables = tmp_path / "benchmarks.md"
    tables.write_text(f"{report.START}\n{report.END}\n")
    given = ["--results", str(tmp_path), "--readme", str(tmp_path / "README.md"), "--tables", str(tables)]
    assert report.main(given) == 1
    assert "README.md: the text has no <!-- bench:start -->" in capsys.readouterr().err


def test_the_summary_has_a_row_for_each_workload_of_the_latest_unforced_run(tmp_path: Path) -> None:
    """On a CPU and on a GPU; an older run and one of forced kernels do not count."""
    case = Case(4096, 64, 32, "bfloat16", causal=True, batch=4)
    for name, run, rate, forced in (("a", "2", 500.0, {}), ("b", "1", 100.0, {}), ("c", "3", 200.0, {"X": "sm80"})):
        line = cuda_line(case, "forward", rate, flash=1.5, cudnn=1.25)
        line.run, line.machine["forced"] = run, forced
        bench.append(tmp_path / f"{name}.jsonl", line)
        decoding = cuda_line(bench.CUDA_SUITES["decode"][0], "forward", 3000.0, cudnn=1.125)
        decoding.run, decoding.machine["forced"] = run, forced
        bench.append(tmp_path / f"{name}.jsonl", decoding)
    cpu = measure()
    cpu.case, cpu.flops, cpu.timings = Case(2048, 64, 8, causal=True), 10**9, {"flashkit": {"median": 0.01}}
    cpu.times_as_fast = {"torch": {"median": 1.5}, "numpy": {"median": 9.0}}
    bench.append(tmp_path / "cpu.jsonl", cpu)
    rows = [line for line in report.summary(tmp_path).splitlines() if "H200" in line or "head dim" in line]
    assert rows == [
        "| H200 | forward, bfloat16, causal, 4,096 tokens, head dim 64 | 500 TFLOP/s "
        "| 1.25 x cuDNN, 1.50 x FlashAttention-2 |",
        f"| {cpu.machine['device']} | forward, float32, causal, 2,048 tokens, head dim 64 | 100 GFLOP/s "
        "| 1.50 x PyTorch |",
        "| H200 | decoding, bfloat16, 32,768 keys | 3000 GB/s | 1.12 x cuDNN |",
    ]


def test_the_stored_results_fill_the_summary() -> None:
    if not report.runs():
        pytest.skip("no result is stored")
    assert len(report.summary().splitlines()) == 2 + len(report.SUMMARY)


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for direction in ("forward", "backward"):
        line = measure(Case(33, heads=2), direction)
        bench.append(tmp_path / "cpu.jsonl", line)
    grid = measure()
    grid.case = Case(512)
    bench.append(tmp_path / "cpu.jsonl", grid)
    files = report.plots(tmp_path / "plots", tmp_path)
    assert [file.name for file in files] == ["cpu-speed.svg", "cpu-memory.svg"]
    assert all("</svg>" in file.read_text() for file in files)


def test_the_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is met by a run in which all is as it should be, and by none where it was not measured."""

    def stored(case: Case, direction: Any, ratio: float, share: float, late: float, error: float) -> Line:
        line = measure()
        seconds = {"torch": 1e-3, "flashkit": 1e-3 + late, "planned": 1e-3 + late, "kernel": 1e-3}
        line.case, line.direction = case, direction
        line.timings = {name: {"median": x} for name, x in seconds.items()}
        line.times_as_fast = {"torch": {"median": ratio}}
        line.yardsticks = {name: {"median": share} for name in ("sgemm", "dense", "read")}
        line.errors = {"flashkit": {"out": error}, "torch": {"out": 1.0}}
        return line

    cases = [case for suite in bench.SUITES.values() for case in suite]
    for good, figures in ((True, (5.0, 0.96, 3e-6, 0.9)), (False, (0.9, 0.5, 2e-5, 1.1))):
        file = tmp_path / "cpu.jsonl"
        file.write_text("")
        for case in cases:
            for direction in bench.directions(case):
                bench.append(file, stored(case, direction, *figures))
        assert report.main(["--check", "--results", str(tmp_path)]) == (0 if good else 1)
        shown = capsys.readouterr().out
        assert ("MISSED" in shown, "  met" in shown) == (not good, good)
        assert "NOT MEASURED" not in shown
    bench.append(tmp_path / "cpu.jsonl", msgspec.structs.replace(measure(), run="later"))
    assert report.main(["--check", "--results", str(tmp_path)]) == 1
    assert "NOT MEASURED  decoding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "content"), [(report.README, report.summary), (report.TABLES, report.markdown)], ids=["README", "tables"]
)
def test_the_documents_have_the_tables_of_the_stored_results(file: Path, content: Any) -> None:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if report.START not in text or not report.runs():
        pytest.skip(f"there is no {file.name} with markers, or no stored result")
    assert report.insert(text, content()) == text


def test_every_stored_result_reads() -> None:
    for lines in report.runs():
        assert lines
        assert all("flashkit" in line.timings for line in lines)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def cuda_line(case: Case, direction: Any, rate: float, **ratios: float) -> Line:
    """As a run on a GPU stores it."""
    line = measure()
    line.case, line.direction, line.flops, line.bytes = case, direction, 1e12, 10**9
    line.timings = {"flashkit": {"median": 1 / rate}}
    line.times_as_fast = {name: {"median": x, "low": x, "high": x} for name, x in ratios.items()}
    line.errors = {"flashkit": {"out": 2e-7}, **{name: {"out": 4e-7} for name in ratios}}
    line.machine = {"device": "NVIDIA H200", "kind": "cuda", "clocks": {"driver_version": "580"}, "versions": {}}
    line.yardsticks, line.memory = {}, {}
    return line


def test_the_tables_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "h200.jsonl"
    for n, rate in ((4096, 500.0), (1024, 300.0)):
        bench.append(file, cuda_line(Case(n, 128, 16, "bfloat16", batch=16384 // n), "forward", rate, flash=1.5))
    bench.append(file, cuda_line(bench.CUDA_SUITES["decode"][0], "forward", 3000.0, flash=1.25, cudnn=1.125))
    text = report.markdown(tmp_path)
    assert re.search(r"^## NVIDIA H200, .*\n\ndriver 580\.$", text, re.MULTILINE)
    assert "| bfloat16 | forward | 128 | 1024, 4096 | 300, 500 | 1.50, 1.50 |" in text
    assert "| bfloat16 | 1 | 32768 | 3000 | 1.25 | 1.12 |" in text
    assert "| bfloat16 | out | 2e-07 | 4e-07 | 4e-07 |" in text
    assert "TFLOP/s of flashkit" in text
    assert "plain NumPy" not in text
    assert report.main(["--check", "--results", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "met           bfloat16 forward, times as fast as the best of PyTorch's: 1.5, at least 1" in shown
    assert "NOT MEASURED  blocks and windows, times as fast as FlexAttention" in shown
    assert "NOT MEASURED  float32 forward" in shown
    assert report.plots(tmp_path / "plots", tmp_path) == []  # nothing causal


def test_the_plot_of_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for n in (1024, 4096):
        for direction in ("forward", "backward"):
            case = Case(n, 64, 32, "bfloat16", causal=True, batch=16384 // n)
            line = cuda_line(case, direction, 500.0, flash=1.5, cudnn=1.25)
            line.timings |= {"flash": {"median": 1.5 / 500}, "cudnn": {"median": 1.25 / 500}}
            bench.append(tmp_path / "h200.jsonl", line)
    (plot,) = report.plots(tmp_path / "plots", tmp_path)
    assert plot.name == "h200-speed.svg"
    assert "cuDNN" in plot.read_text()
    for line in (lines := bench.read(tmp_path / "h200.jsonl")):
        line.machine["forced"] = {"FLASHKIT_CUDA_GENERATION": "sm80"}
    (tmp_path / "h200.jsonl").unlink()
    for line in lines:
        bench.append(tmp_path / "h200.jsonl", line)
    assert report.plots(tmp_path / "plots", tmp_path) == []


def test_masks_shares_and_what_is_forced_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = cuda_line(bench.CUDA_SUITES["masks"][0], "forward", 500.0, flex=1.5)
    line.yardsticks = {"dense": {"median": 0.95}}
    plain = cuda_line(Case(4096, 128, 16, "bfloat16", batch=4), "backward", 500.0, flash=0.97)
    plain.yardsticks = {"deterministic": {"median": 1.05}}
    for x in (line, plain):
        x.machine["forced"] = {"FLASHKIT_CUDA_GENERATION": "sm80"}
        bench.append(tmp_path / "h200.jsonl", x)
    text = report.markdown(tmp_path)
    assert re.search(r"^## NVIDIA H200, FLASHKIT_CUDA_GENERATION=sm80, .*\n\ndriver 580\.$", text, re.MULTILINE)
    assert "| heads 16, 16384 x 16384, head dim 128, bfloat16, 50% of blocks | forward | 2 | 1.50 | 0.95 |" in text
    assert "| deterministic | bfloat16 | backward | 1 | 1.05 to 1.05 |" in text
    report.check(tmp_path)
    shown = capsys.readouterr().out
    assert "met           bfloat16 backward, times as fast as FlashAttention-2: 0.97, at least 0.95" in shown


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("flashkit.dispatch.registry", dict)
    assert cli.run(["bench", "--device", "cuda"]) == 1
    assert "error: --device: cupy_raw is not installed" in capsys.readouterr().err
    assert cli.run(["bench", "--device", "abacus"]) == 2
    assert "abacus is none of cpu, cuda" in capsys.readouterr().err


@pytest.mark.gpu
def test_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cases

    cases.skip_unless("cupy_raw")
    monkeypatch.setattr(bench, "CUDA_QUICK", [Case(300, 64, 4, "float16", causal=True, batch=2)])
    assert cli.run(["bench", "--device", "cuda", "--quick", "--output", str(tmp_path / "gpu.jsonl")]) == 0
    lines = bench.read(tmp_path / "gpu.jsonl")
    assert [line.direction for line in lines] == ["forward", "backward"]
    for line in lines:
        assert line.machine["kind"] == "cuda"
        assert all(error < 2e-3 for error in line.errors["flashkit"].values())
        assert line.timings["flashkit"]["median"] < 1e-2
        assert not line.times_as_fast or min(x["median"] for x in line.times_as_fast.values()) > 0.1
