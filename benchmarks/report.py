"""Tables, plots and the list of goals from the result files of `flashkit bench`.

    flashkit bench --output benchmarks/results/cpu.jsonl     measure; with --device cuda on a GPU
    python benchmarks/report.py                              write tables to docs/benchmarks.md, a summary to README.md
    python benchmarks/report.py --plots docs/plots           draw the plots as well (pip install ".[plot]")
    python benchmarks/report.py --check                      say which goals are met; exit status 1 if one is not

The last run in each file of benchmarks/results counts. On CPUs the tables hold ratios, errors and memory: a time on one
CPU says little about another, and the ratio to a baseline that was timed in the same rounds says more. GPUs of one name
are alike, so their tables have rates too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cpu_tables
import cuda_tables
import gpt_report
from goals import cpu_goals, cuda_goals
from plots import plots
from stored import CPU_BASELINES, CUDA_BASELINES, RESULTS, ROOT, markdown_table, median, runs

from flashkit.tools.bench.results import Result

README, TABLES, EXPERIMENTS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "experiments.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"


# --- all tables -------------------------------------------------------------------------------------------------------


def markdown(folder: Path = RESULTS) -> str:
    """All tables: the text between the markers of docs/benchmarks.md."""
    parts, explanations = [], dict[str, None]()
    for results in runs(folder):
        cuda = results[0].machine["kind"] == "cuda"
        tables = cuda_tables if cuda else cpu_tables
        explanations[tables.EXPLANATION] = None
        parts.append((_cuda_heading if cuda else _cpu_heading)(results))
        parts += filter(None, (table(results) for table in tables.TABLES))
    return "\n\n".join([*explanations, *parts]) if parts else "No results are stored yet."


def _cpu_heading(results: Sequence[Result]) -> str:
    machine, date = results[0].machine, results[0].run[:10]
    versions = machine["versions"]
    text = ", ".join(f"{x} {versions[x]}" for x in ("flashkit", *CPU_BASELINES, "numba", "blas") if x in versions)
    return f"## {machine['device']}, {_vectors(machine['features'])}{machine['threads']} threads\n\n{text}; {date}."


def _cuda_heading(results: Sequence[Result]) -> str:
    machine = results[0].machine
    versions = {**machine["versions"], "driver": machine["clocks"].get("driver_version")}
    shown = ("flashkit", "cupy", "nvrtc", "torch", "cudnn", "driver")
    text = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
    forced = "".join(f", {name}={value}" for name, value in machine.get("forced", {}).items())
    return f"## {machine['device']}{forced}, {results[0].run[:10]}\n\n{text}."


def _vectors(features: Sequence[str]) -> str:
    """The widest vectors among a CPU's features, by their common name."""
    names = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    return next((f"{name}, " for feature, name in names.items() if feature in features), "")


# --- the summary ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the README's table: a workload on a kind of device, and the fields of its case."""

    workload: str
    kind: str
    direction: str
    case: Mapping[str, object]


SUMMARY_BASELINES = "cudnn", "flash", "torch"


_GPU = {"dtype": "bfloat16", "causal": True, "n_q": 4096, "window": None, "kept": None}
_CPU = {"causal": True, "n_q": 2048, "head_dim": 64, "window": None, "kept": None}
_DECODING = {"n_q": 1, "n_k": 32768, "dtype": "bfloat16", "batch": 1}
SUMMARY = (
    *(
        Row(f"{direction}, bfloat16, causal, 4,096 tokens, head dim {d}", "cuda", direction, {**_GPU, "head_dim": d})
        for direction in ("forward", "backward") for d in (64, 128)
    ),
    *(
        Row(f"forward, {dtype}, causal, 2,048 tokens, head dim 64", kind, "forward", {**_CPU, "dtype": dtype})
        for dtype, kind in (("float32", "cpu"), ("bfloat16", "cpu with AMX"))
    ),
    Row("decoding, bfloat16, 32,768 keys", "cuda", "forward", _DECODING),
)  # fmt: skip


def summary(folder: Path = RESULTS) -> str:
    """The table between the README's markers: of each kind of device, the latest run without a forced generation."""
    latest: dict[str, list[Result]] = {}
    for results in sorted(runs(folder), key=lambda results: results[0].run):
        machine = results[0].machine
        if not machine.get("forced"):
            latest[machine["kind"] + " with AMX" * ("amx_bf16" in machine.get("features", ()))] = results
    rows = []
    for row in SUMMARY:
        for result in latest.get(row.kind, ()):
            matches = all(getattr(result.case, name) == value for name, value in row.case.items())
            if matches and result.direction == row.direction:
                device = result.machine["device"].removeprefix("NVIDIA ").replace("(R)", "")
                device = device.replace(" Processor", " with AMX") if row.kind.endswith("AMX") else device
                ratios = [median(result.times_as_fast, name) for name in SUMMARY_BASELINES]
                rows.append([device, row.workload, _rate(result), *ratios])
    names = {**CPU_BASELINES, **CUDA_BASELINES}
    head = ["device", "workload", "flashkit", *(f"x {names[name]}" for name in SUMMARY_BASELINES)]
    return markdown_table(head, rows, 2) if rows else "No results yet."


def _rate(result: Result) -> str:
    if result.case.n_q == 1:
        return f"{result.bytes / result.timings['flashkit']['median'] / 1e9:.0f} GB/s"
    gflops = result.gflops("flashkit")
    return f"{gflops / 1000:.0f} TFLOP/s" if gflops >= 10_000 else f"{gflops:.0f} GFLOP/s"


def insert(text: str, content: str) -> str:
    """The text with `content` between its markers. ValueError without them."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the text has no {START} ... {END}")
    return f"{before}{START}\n{content}\n{END}{after}"


# --- the command ------------------------------------------------------------------------------------------------------


def check(folder: Path = RESULTS) -> bool:
    """Print which goals are met. Returns whether all are."""
    all_met = True
    for results in runs(folder):
        machine = results[0].machine
        print(f"{machine['device']}, {results[0].run}")
        cuda = machine["kind"] == "cuda"
        for goal in cuda_goals(machine.get("forced", {})) if cuda else cpu_goals(machine["features"]):
            met, text = goal.verdict(results)
            all_met &= met
            print(f"  {text}")
    return all_met


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--readme", type=Path, default=README, help="file for the summary")
    parser.add_argument("--tables", type=Path, default=TABLES, help="file for all tables")
    parser.add_argument("--experiments", type=Path, default=EXPERIMENTS, help="file for those of training")
    parser.add_argument("--plots", type=Path, help="folder to draw plots into")
    parser.add_argument("--check", action="store_true", help="say which goals are met, and write nothing")
    options = parser.parse_args(arguments)
    if options.check:
        return 0 if check(options.results) else 1
    written = [(options.readme, summary(options.results)), (options.tables, markdown(options.results))]
    written.append((options.experiments, gpt_report.markdown(options.results / gpt_report.RESULTS.name)))
    for file, content in written:
        try:
            file.write_text(insert(file.read_text(encoding="utf-8"), content), encoding="utf-8")
            print(f"tables written to {file}")
        except (OSError, ValueError) as error:
            print(f"{content}\n\nnot written to {file}: {error}", file=sys.stderr)
            return 1
    for file in plots(options.plots, options.results) if options.plots else ():
        print(f"plot written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
