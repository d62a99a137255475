"""The report: tables, goals and plots of stored results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import report
import stored
from simulated_bench import SMALL, measured

from flashkit.tools.bench import cases
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.results import Result, append

# --- tables and plots -------------------------------------------------------------------------------------------------


def test_the_table_is_made_of_the_last_run(tmp_path: Path) -> None:
    file = tmp_path / "cpu.jsonl"
    shapes = [Case(512, d, causal=causal) for d in (64, 128) for causal in (False, True)]
    for run, factor in (("first", 1), ("second", 2)):
        for case in (SMALL, *shapes):
            result = measured()
            result.run, result.case, result.memory = run, case, {"flashkit": factor << 20, "numpy": 10 << 20}
            result.times_as_fast["torch"] = {"median": factor + case.head_dim / 1000, "low": 1.0, "high": 3.0}
            result.errors["torch"] = {"out": 2 * result.errors["flashkit"]["out"]}
            append(file, result)
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n{report.START}\nold\n{report.END}\nend\n")
    assert report.main(["--results", str(tmp_path), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(f"# Title\n{report.START}\n**")
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
    assert report.main(["--results", str(tmp_path), "--readme", str(tmp_path / "README.md")]) == 1
    assert "No results are stored yet." in capsys.readouterr().err


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for direction in ("forward", "backward"):
        result = measured(Case(33, heads=2), direction)
        append(tmp_path / "cpu.jsonl", result)
    grid = measured()
    grid.case = Case(512)
    append(tmp_path / "cpu.jsonl", grid)
    files = report.plots(tmp_path / "plots", tmp_path)
    assert [file.name for file in files] == ["cpu-speed.svg", "cpu-memory.svg"]
    assert all("</svg>" in file.read_text() for file in files)


def test_the_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is met by a run in which all is as it should be, and by none where it was not measured."""

    def stored(case: Case, direction: Any, ratio: float, share: float, late: float, error: float) -> Result:
        result = measured()
        seconds = {"torch": 1e-3, "flashkit": 1e-3 + late, "planned": 1e-3 + late, "kernel": 1e-3}
        result.case, result.direction = case, direction
        result.timings = {name: {"median": x} for name, x in seconds.items()}
        result.times_as_fast = {"torch": {"median": ratio}}
        result.yardsticks = {name: {"median": share} for name in ("sgemm", "dense", "read")}
        result.errors = {"flashkit": {"out": error}, "torch": {"out": 1.0}}
        return result

    cases = [case for suite in cases.SUITES.values() for case in suite]
    for good, figures in ((True, (5.0, 0.96, 3e-6, 0.9)), (False, (0.9, 0.5, 2e-5, 1.1))):
        file = tmp_path / "cpu.jsonl"
        file.write_text("")
        for case in cases:
            for direction in cases.directions(case):
                append(file, stored(case, direction, *figures))
        assert report.main(["--check", "--results", str(tmp_path)]) == (0 if good else 1)
        shown = capsys.readouterr().out
        assert ("MISSED" in shown, "  met" in shown) == (not good, good)
        assert "NOT MEASURED" not in shown
    append(tmp_path / "cpu.jsonl", msgspec.structs.replace(measured(), run="later"))
    assert report.main(["--check", "--results", str(tmp_path)]) == 1
    assert "NOT MEASURED  decoding" in capsys.readouterr().out


def test_the_readme_has_the_table_of_the_stored_results() -> None:
    text = report.README.read_text(encoding="utf-8") if report.README.exists() else ""
    if report.START not in text or not report.runs():
        pytest.skip("there is no README with markers, or no stored result")
    assert report.insert(text, report.markdown()) == text


def test_every_stored_result_reads() -> None:
    for lines in report.runs():
        assert lines
        assert all("flashkit" in result.timings for result in lines)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def cuda_result(case: Case, direction: Any, rate: float, **ratios: float) -> Result:
    """As a run on a GPU stores it."""
    result = measured()
    result.case, result.direction, result.flops, result.bytes = case, direction, 1e12, 10**9
    result.timings = {"flashkit": {"median": 1 / rate}}
    result.times_as_fast = {name: {"median": x, "low": x, "high": x} for name, x in ratios.items()}
    result.errors = {"flashkit": {"out": 2e-7}, **{name: {"out": 4e-7} for name in ratios}}
    result.machine = {"device": "NVIDIA H200", "kind": "cuda", "clocks": {"driver_version": "580"}, "versions": {}}
    result.yardsticks, result.memory = {}, {}
    return result


def test_the_tables_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "h200.jsonl"
    for n, rate in ((4096, 500.0), (1024, 300.0)):
        append(file, cuda_result(Case(n, 128, 16, "bfloat16", batch=16384 // n), "forward", rate, flash=1.5))
    append(file, cuda_result(cases.CUDA_SUITES["decode"][0], "forward", 3000.0, flash=1.25, cudnn=1.125))
    text = report.markdown(tmp_path)
    assert text.startswith("**NVIDIA H200**; driver 580; ")
    assert "| bfloat16 | forward | 128 | 1024, 4096 | 300, 500 | 1.50, 1.50 |" in text
    assert "| bfloat16 | 1 | 32768 | 3000 | 1.25 | 1.12 |" in text
    assert "| bfloat16 | out | 2e-07 | 4e-07 | 4e-07 |\n" in text
    assert "TFLOP/s of flashkit" in text
    assert "plain NumPy" not in text
    assert report.main(["--check", "--results", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "met           bfloat16 forward, times as fast as the best of PyTorch's: 1.5, at least 1" in shown
    assert "NOT MEASURED  blocks and windows, times as fast as FlexAttention" in shown
    assert "NOT MEASURED  float32 forward" in shown
    assert report.plots(tmp_path / "plots", tmp_path) == []


def test_masks_shares_and_what_is_forced_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = cuda_result(cases.CUDA_SUITES["masks"][0], "forward", 500.0, flex=1.5)
    result.yardsticks = {"dense": {"median": 0.95}}
    plain = cuda_result(Case(4096, 128, 16, "bfloat16", batch=4), "backward", 500.0, flash=0.97)
    plain.yardsticks = {"deterministic": {"median": 1.05}}
    for x in (result, plain):
        x.machine["forced"] = {"FLASHKIT_CUDA_GENERATION": "sm80"}
        append(tmp_path / "h200.jsonl", x)
    text = report.markdown(tmp_path)
    assert text.startswith("**NVIDIA H200**, FLASHKIT_CUDA_GENERATION=sm80; driver 580")
    assert "| heads 16, 16384 x 16384, head dim 128, bfloat16, 50% of blocks | forward | 2 | 1.50 | 0.95 |" in text
    assert "| deterministic | bfloat16 | backward | 1 | 1.05 to 1.05 |" in text
    report.check(tmp_path)
    shown = capsys.readouterr().out
    assert "met           bfloat16 backward, times as fast as FlashAttention-2: 0.97, at least 0.95" in shown


