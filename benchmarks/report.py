"""The README's table and plots from the result files of `flashkit bench`.

    flashkit bench --output benchmarks/results/cpu.jsonl     measure
    python benchmarks/report.py                              put the table between the README's markers
    python benchmarks/report.py --plots benchmarks/plots     and draw plots (pip install "flashkit[plot]")

Of each file in benchmarks/results the last run counts. The table holds ratios and memory: how long something takes on
one CPU says little about another, how many times as fast it is than a peer that runs in turns with it says more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from flashkit.bench import Line, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README = ROOT / "benchmarks" / "results", ROOT / "README.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"

PEERS = {"numpy": "plain NumPy", "torch": "PyTorch", "jax": "JAX", "onnxruntime": "ONNX Runtime"}


def runs(results: Path = RESULTS) -> list[list[Line]]:
    """The last run of every result file."""
    return [lines for file in sorted(results.glob("*.jsonl")) if (lines := read(file))]


EXPLANATION = """How many times as fast flashkit is: the median over rounds in which all took turns in one process;
"backward" is the pull-back alone. Memory is what resident memory grows by at its peak, results included, in a forward
pass, or in a forward and a backward pass."""


# --- the table --------------------------------------------------------------------------------------------------------


def table(lines: Sequence[Line]) -> str:
    """One run as Markdown."""
    peers = [name for name in PEERS if any(name in line.times_as_fast for line in lines)]
    head = ["problem", "pass", *(f"x {PEERS[name]}" for name in peers), "memory", "plain NumPy's"]
    rows = [head, ["---", "---", *("---:" for _ in peers), "---:", "---:"]]
    for line in lines:
        ratios = [f"{line.times_as_fast[name]['median']:.1f}" if name in line.times_as_fast else "" for name in peers]
        rows.append([line.case.label, line.direction, *ratios, *_memory(line)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _memory(line: Line) -> tuple[str, str]:
    ours, plain = line.memory.get("flashkit"), line.memory.get("numpy")
    if ours is None:
        return "", ""
    theirs = "" if plain is None else f"{plain / 2**20:.0f} MiB, {plain / ours:.0f} times"
    return f"{ours / 2**20:.1f} MiB", theirs


def markdown(results: Path = RESULTS) -> str:
    """What stands between the README's markers."""
    parts = []
    for lines in runs(results):
        machine = lines[0].machine
        versions = machine["versions"]
        packages = [f"{name} {versions[name]}" for name in ("flashkit", *PEERS, "numba", "blas") if name in versions]
        device = f"**{machine['device']}**, {_vectors(machine['features'])}{machine['threads']} threads"
        parts += [f"{device}; {', '.join(packages)}; {lines[0].run[:10]}.", table(lines)]
    return "\n\n".join([*parts, EXPLANATION]) if parts else "No results are stored yet."


def _vectors(features: Sequence[str]) -> str:
    """The widest vectors among a CPU's features, by their usual name."""
    names = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    return next((f"{name}, " for feature, name in names.items() if feature in features), "")


def insert(text: str, content: str) -> str:
    """The text with `content` between its markers. ValueError without them."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the text has no {START} ... {END}")
    return f"{before}{START}\n{content}\n{END}{after}"


# --- plots ------------------------------------------------------------------------------------------------------------


def plots(folder: Path, results: Path = RESULTS) -> list[Path]:
    """speed.svg and memory.svg for each run, named after its result file; returns what was written."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "flashkit", "font.size": 9, "axes.spines.top": False})
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file in sorted(results.glob("*.jsonl")):
        lines = read(file)
        for name, draw in (("speed", _draw_speed), ("memory", _draw_memory)):
            target = folder / f"{file.stem}-{name}.svg"
            figure = draw(lines)
            figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
            written.append(target)
    return written


def _draw_speed(lines: Sequence[Line]):  # type: ignore[no-untyped-def]
    """Bars: how many times as fast as each peer, with the 20 and 80 % quantiles."""
    from matplotlib.figure import Figure

    peers = [name for name in PEERS if any(name in line.times_as_fast for line in lines)]
    figure = Figure(figsize=(8, 0.35 * len(lines) * max(len(peers), 1) + 1))
    axes = figure.subplots()
    height = 0.8 / max(len(peers), 1)
    for index, peer in enumerate(peers):
        shown = [(row, line.times_as_fast[peer]) for row, line in enumerate(lines) if peer in line.times_as_fast]
        middle = [x["median"] for _, x in shown]
        error = [[x["median"] - x["low"] for _, x in shown], [x["high"] - x["median"] for _, x in shown]]
        at = [row + (index - (len(peers) - 1) / 2) * height for row, _ in shown]
        axes.barh(at, middle, height, xerr=error, label=f"x {PEERS[peer]}", error_kw={"elinewidth": 0.8})
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(lines)), [f"{line.case.label}, {line.direction}" for line in lines])
    axes.invert_yaxis()
    axes.set_xlabel("times as fast")
    axes.legend()
    return figure


def _draw_memory(lines: Sequence[Line]):  # type: ignore[no-untyped-def]
    """Growth of resident memory by the number of tokens, for each pass of the float32 cases without a mask."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4))
    axes = figure.subplots()
    for direction, style in (("forward", "-"), ("backward", "--")):
        for name, colour in (("flashkit", "C0"), ("numpy", "C1")):
            points = sorted(
                (line.case.n_q, line.memory[name] / 2**20 / line.case.heads)
                for line in lines
                if line.direction == direction and name in line.memory and line.case.n_q == line.case.keys
                and (line.case.dtype, line.case.head_dim, line.case.causal) == ("float32", 64, False)
            )  # fmt: skip
            if points:
                label = f"{PEERS.get(name, name)}, {direction}"
                axes.plot([n for n, _ in points], [m for _, m in points], f"o{style}", color=colour, label=label)
    if axes.has_data():
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.legend()
    axes.set_xlabel("tokens")
    axes.set_ylabel("MiB a head at the peak")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--readme", type=Path, default=README, help="file to put the table into")
    parser.add_argument("--plots", type=Path, help="folder to draw plots into")
    options = parser.parse_args(arguments)
    content = markdown(options.results)
    try:
        text = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(insert(text, content), encoding="utf-8")
        print(f"table written to {options.readme}")
    except (OSError, ValueError) as error:
        print(f"{content}\n\nnot written to {options.readme}: {error}", file=sys.stderr)
        return 1
    for file in plots(options.plots, options.results) if options.plots else ():
        print(f"plot written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
