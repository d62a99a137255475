"""The report: tables, goals and plots of stored results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import report
from simulated_bench import measured

from flashkit.tools.bench import cases
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.results import Result, append

# --- tables and plots -------------------------------------------------------------------------------------------------


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


def test_a_cell_holds_one_number() -> None:
    for text in (report.summary(), report.markdown()):
        rule: list[str] = []
        for line in filter(lambda line: line.startswith("|"), text.splitlines()):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rule = cells if set(line) <= set("|-: ") else rule
            for cell, kind in zip(cells, rule):
                assert kind != "---:" or len(re.findall(r"(?<![\w-])[\d.]+(?:e-\d+)?", cell)) <= 1, line


def test_every_stored_result_reads() -> None:
    assert len(report.runs()) >= 2
    assert all("flashkit" in result.timings for results in report.runs() for result in results)


# --- on a GPU ---------------------------------------------------------------------------------------------------------
