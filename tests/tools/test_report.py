"""The report: tables, goals and plots of stored results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report
from simulated_bench import SMALL, measured

from flashkit.tools.bench import cases
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.results import Result, append

# --- tables and plots -------------------------------------------------------------------------------------------------


@pytest.fixture
def documents(tmp_path: Path) -> list[Path]:
    """A README and a file of tables, with markers."""
    files = [tmp_path / "README.md", tmp_path / "benchmarks.md"]
    for file in files:
        file.write_text(f"# Title\n{report.START}\nold\n{report.END}\nend\n")
    return files


def write(documents: list[Path]) -> int:
    """Run the report on the results beside these documents."""
    readme, tables = documents
    return report.main(["--results", str(readme.parent), "--readme", str(readme), "--tables", str(tables)])


def test_the_tables_are_made_of_the_last_run(tmp_path: Path, documents: list[Path]) -> None:
    file = tmp_path / "cpu.jsonl"
    shapes = [Case(512, d, causal=causal) for d in (64, 128) for causal in (False, True)]
    for run, factor in (("first", 1), ("second", 2)):
        for case in (SMALL, *shapes):
            result = measured()
            result.run, result.case, result.memory = run, case, {"flashkit": factor << 20, "numpy": 10 << 20}
            result.times_as_fast["torch"] = {"median": factor + case.head_dim / 1000, "low": 1.0, "high": 3.0}
            result.errors["torch"] = {"out": 2 * result.errors["flashkit"]["out"]}
            append(file, result)
    assert write(documents) == 0
    text = documents[1].read_text()
    assert text.startswith(f"# Title\n{report.START}\nOn CPUs: ")
    assert text.endswith(f"{report.END}\nend\n")
    assert "\n## " in text
    assert "| heads 2, 33 x 33, head dim 8, float32 | forward | 3.00 | 2.01 |  |" in text
    assert "| float32 | forward | 512 | 2.06, 2.06, 2.13, 2.13 | 3.0 |  |" in text
    assert "| heads 2, 33 x 33, head dim 8, float32 | forward | 2.0 MiB | 10 MiB, 5 times |" in text
    assert "| float32 | out | " in text
    assert "| 0.50 |" in text
    assert " ms" not in text
    assert report.insert(text, report.markdown(tmp_path)) == text


def test_the_summary_has_a_row_for_each_workload_of_the_latest_unforced_run(tmp_path: Path) -> None:
    """On a CPU and on a GPU; an older run and a run with a forced kernel generation do not count."""
    case = Case(4096, 64, 32, "bfloat16", causal=True, batch=4)
    for name, run, rate, forced in (("a", "2", 500.0, {}), ("b", "1", 100.0, {}), ("c", "3", 200.0, {"X": "sm80"})):
        result = cuda_result(case, "forward", rate, flash=1.5, cudnn=1.25)
        decoding = cuda_result(cases.CUDA_SUITES["decode"][0], "forward", 3000.0, cudnn=1.125)
        for each in (result, decoding):
            each.run, each.machine["forced"] = run, forced
            append(tmp_path / f"{name}.jsonl", each)
    cpu = measured()
    cpu.case, cpu.flops, cpu.timings = Case(2048, 64, 8, causal=True), 10**9, {"flashkit": {"median": 0.01}}
    cpu.times_as_fast = {"torch": {"median": 1.5}, "numpy": {"median": 9.0}}
    cpu.machine["features"] = [x for x in cpu.machine["features"] if x != "amx_bf16"]  # whose row is another
    append(tmp_path / "cpu.jsonl", cpu)
    assert report.summary(tmp_path).splitlines()[2:] == [
        "| H200 | forward, bfloat16, causal, 4,096 tokens, head dim 64 | 500 TFLOP/s "
        "| 1.25 x cuDNN, 1.50 x FlashAttention-2 |",
        f"| {cpu.machine['device'].replace('(R)', '')} | forward, float32, causal, 2,048 tokens, head dim 64 "
        "| 100 GFLOP/s | 1.50 x PyTorch |",
        "| H200 | decoding, bfloat16, 32,768 keys | 3000 GB/s | 1.12 x cuDNN |",
    ]


def test_the_stored_results_fill_the_summary() -> None:
    assert len(report.summary().splitlines()) == 2 + len(report.SUMMARY)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_text_without_markers(documents: list[Path], missing: int, capsys: pytest.CaptureFixture[str]) -> None:
    documents[missing].write_text("# Title\n")
    assert write(documents) == 1
    shown = capsys.readouterr().err
    assert ("No results yet.", "No results are stored yet.")[missing] in shown
    assert f"not written to {documents[missing]}" in shown
    assert documents[missing].read_text() == "# Title\n"


def test_plots_of_a_cpu(tmp_path: Path) -> None:
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
    """Good figures meet every goal and bad ones miss some; a figure that was not measured does not count as met."""

    def stored(case: Case, direction: Any, ratio: float, share: float, late: float, error: float) -> Result:
        result = measured()
        seconds = {"torch": 1e-3, "flashkit": 1e-3 + late, "planned": 1e-3 + late, "kernel": 1e-3}
        result.case, result.direction = case, direction
        result.timings = {name: {"median": x} for name, x in seconds.items()}
        result.times_as_fast = {"torch": {"median": ratio}}
        result.yardsticks = {name: {"median": share} for name in ("sgemm", "dense", "read")}
        result.errors = {"flashkit": {"out": error}, "torch": {"out": 1.0}}
        return result

    for good, figures in ((True, (5.0, 0.96, 3e-6, 0.9)), (False, (0.9, 0.5, 2e-5, 1.1))):
        file = tmp_path / "cpu.jsonl"
        file.write_text("")
        for case in (case for suite in cases.SUITES.values() for case in suite):
            for direction in cases.directions(case):
                append(file, stored(case, direction, *figures))
        assert report.main(["--check", "--results", str(tmp_path)]) == (0 if good else 1)
        shown = capsys.readouterr().out
        assert ("MISSED" in shown, "  met" in shown) == (not good, good)
        assert "NOT MEASURED" not in shown
    append(tmp_path / "cpu.jsonl", msgspec.structs.replace(measured(), run="later"))
    assert report.main(["--check", "--results", str(tmp_path)]) == 1
    assert "NOT MEASURED  decoding" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "content"),
    [(report.README, report.summary), (report.TABLES, report.markdown)],
    ids=["README", "benchmarks"],
)
def test_the_documents_have_the_tables_of_the_stored_results(file: Path, content: Callable[[], str]) -> None:
    text = file.read_text(encoding="utf-8")
    assert report.insert(text, content()) == text


def test_every_stored_result_reads() -> None:
    assert len(report.runs()) >= 2
    assert all("flashkit" in result.timings for results in report.runs() for result in results)


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
    assert text.startswith("On GPUs: ")
    assert "\n\n## NVIDIA H200, now\n\ndriver 580.\n\n" in text
    assert "| bfloat16 | forward | 128 | 1024, 4096 | 300, 500 | 1.50, 1.50 |" in text
    assert "| bfloat16 | 1 | 32768 | 3000 | 1.25 | 1.12 |" in text
    assert text.endswith("| bfloat16 | out | 2e-07 | 4e-07 | 4e-07 |")
    assert "TFLOP/s of flashkit" in text
    assert "plain NumPy" not in text
    assert report.main(["--check", "--results", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "met           bfloat16 forward, times as fast as the best of PyTorch's: 1.5, at least 1" in shown
    assert "NOT MEASURED  blocks and windows, times as fast as FlexAttention" in shown
    assert "NOT MEASURED  float32 forward" in shown


def test_the_plot_of_a_gpu_needs_flash_attention_and_no_forced_generation(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = cuda_result(Case(4096, 64, 32, "bfloat16", causal=True, batch=4), "forward", 500.0, flash=1.5)
    result.timings["flash"] = result.timings["flashkit"]
    for run, forced, ratios in (("1", {}, {}), ("2", {"X_GENERATION": "sm80"}, result.times_as_fast)):
        result.run, result.machine["forced"] = run, forced
        append(tmp_path / "h200.jsonl", msgspec.structs.replace(result, times_as_fast=ratios))
        assert report.plots(tmp_path / "plots", tmp_path) == []
    append(tmp_path / "gpu.jsonl", msgspec.structs.replace(result, machine={**result.machine, "forced": {}}))
    assert [file.name for file in report.plots(tmp_path / "plots", tmp_path)] == ["gpu-speed.svg"]


def test_masks_shares_and_a_forced_generation_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = cuda_result(cases.CUDA_SUITES["masks"][0], "forward", 500.0, flex=1.5)
    result.yardsticks = {"dense": {"median": 0.95}}
    plain = cuda_result(Case(4096, 128, 16, "bfloat16", batch=4), "backward", 500.0, flash=0.97)
    plain.yardsticks = {"deterministic": {"median": 1.05}}
    for x in (result, plain):
        x.machine["forced"] = {"FLASHKIT_CUDA_GENERATION": "sm80"}
        append(tmp_path / "h200.jsonl", x)
    text = report.markdown(tmp_path)
    assert "\n\n## NVIDIA H200, FLASHKIT_CUDA_GENERATION=sm80, now\n\ndriver 580.\n\n" in text
    assert "| heads 16, 16384 x 16384, head dim 128, bfloat16, 50% of blocks | forward | 2 | 1.50 | 0.95 |" in text
    assert "| deterministic | bfloat16 | backward | 1 | 1.05 to 1.05 |" in text
    report.check(tmp_path)
    shown = capsys.readouterr().out
    assert "met           bfloat16 backward, times as fast as FlashAttention-2: 0.97, at least 0.95" in shown
