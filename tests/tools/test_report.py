"""The report: tables, goals and plots of stored results, and that what is stored agrees with the IO model."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpt_report
import lengths
import msgspec
import pytest
import report
import traffic
from simulated_bench import measured

from flashkit.tools.bench import cases
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.results import Result, append

# --- tables and plots -------------------------------------------------------------------------------------------------


def test_plots_of_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for direction in ("forward", "backward"):
        append(tmp_path / "cpu.jsonl", measured(Case(33, heads=2), direction))
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
    [(report.README, report.summary), (report.TABLES, report.markdown), (report.EXPERIMENTS, gpt_report.markdown)],
    ids=["README", "benchmarks", "experiments"],
)
def test_the_documents_have_the_tables_of_the_stored_results(file: Path, content: Callable[[], str]) -> None:
    text = file.read_text(encoding="utf-8")
    assert report.insert(text, content()) == text


def test_a_cell_holds_one_number() -> None:
    for text in (report.summary(), report.markdown()):
        rule: list[str] = []
        for line in filter(lambda line: line.startswith("|"), text.splitlines()):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rule = cells if set(line) <= set("|-: ") else rule
            for cell, kind in zip(cells, rule):
                assert kind != "---:" or len(re.findall(r"(?<![\w-])[\d.]+(?:e-\d+)?", cell)) <= 1, line


def test_experiments_fill_the_page(tmp_path: Path) -> None:
    """A line for each case, the last that was stored."""
    pytest.importorskip("matplotlib")
    model = {"device": "some GPU", "config": {"context": 64}, "memory": 2**31, "steps": 3, "tokens": 192}
    curve = [[96, 2.0], [192, 0.5]]
    lines: list[dict[str, Any]] = [
        {**model, "way": "arrays", "tokens_per_second": 100, "losses": [9.0]},
        {**model, "way": "arrays", "tokens_per_second": 600, "losses": [3.0, 2.0, 1.0]},
        {**model, "way": "sdpa", "tokens_per_second": 500, "losses": [3.0, 2.0, 1.5]},
        {**model, "part": "contexts", "context": 64, "block_sparse": True, "density": 0.25, "curve": curve,
         "tokens_per_second": 1000},
        {**model, "part": "paths", "length": 64, "context": 32, "probability": 0.6, "chance": 0.125, "curve": curve},
        {**model, "part": "profile", "way": "arrays", "kernels": [["adamw", 1, 1.25]], "device_ms": 9.0, "host_ms": 4},
    ]  # fmt: skip
    (tmp_path / "gpu.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = gpt_report.markdown(tmp_path)
    for row in (
        "| 64 | flashkit's example, CuPy arrays | 600 | 1.20 | 2.0 | 3 | 2.000 |",
        "| 64 | 25%, block-sparse | 1000.00 | 2.0 | 192 | 0.5000 |",
        "| 64 | 32 | 0.600 | 0.125 |",
        "| `adamw` | 1 | 1.25 |",
    ):
        assert row in text
    assert "| 100 |" not in text
    drawn = gpt_report.plot(tmp_path / "gpu.jsonl", tmp_path)
    assert drawn.name == "gpu-gpt.svg" and all(x in drawn.read_text() for x in ("contexts", "paths", "speed"))
    assert gpt_report.markdown(tmp_path / "none") == "No results are stored yet."


def test_every_stored_result_reads() -> None:
    assert len(report.runs()) >= 2
    assert all("flashkit" in result.timings for results in report.runs() for result in results)


# --- traffic and lengths ----------------------------------------------------------------------------------------------


def lines_of(folder: Path) -> list[Any]:
    lines = [json.loads(text) for file in sorted(folder.glob("*.jsonl")) for text in file.read_text().splitlines()]
    if not lines:
        pytest.skip(f"nothing is stored in {folder.name}")
    return lines


def test_what_multiprocessors_moved_grows_as_the_model_says() -> None:
    """By one factor for both tiles and every length, which is what these kernels fetch twice; docs/theory.md."""
    lines = lines_of(traffic.RESULTS)
    for line in lines:
        if line["who"] in traffic.TILES:
            assert line["model"] == pytest.approx(traffic.modelled(line["tokens"], line["who"])["model"])
            assert 1 <= line["sram"] / line["model"] < 1.6
            assert line["memory"] < line["model"]  # L2 answers for keys that are read again
    of = {(line["tokens"], line["who"]): line for line in lines}
    longest = max(line["tokens"] for line in lines)
    large, small = (of[longest, method]["sram"] for method in traffic.TILES)
    assert small / large == pytest.approx(4, rel=0.02)  # a quarter of the queries a tile
    assert of[longest, "standard"]["memory"] > 100 * of[longest, "128 x 64"]["memory"]


def test_memory_grows_linearly_and_plain_attention_quadratically() -> None:
    of = {(x["who"], x["pass"], x["tokens"]): x for x in lines_of(lengths.RESULTS)}
    assert of["standard", lengths.PASSES[0], 65536]["memory"] is None
    for passes in lengths.PASSES:
        ours, plain = ([of[method, passes, n]["memory"] for n in (8192, 32768)] for method in ("flashkit", "standard"))
        assert ours[1] / ours[0] == pytest.approx(4, rel=0.2)
        assert plain[1] / plain[0] == pytest.approx(16, rel=0.2)
        assert of["flashkit", passes, 65536]["seconds"]["median"] > 0
