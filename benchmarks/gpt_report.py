"""Tables and plots of the stored results of gpt.py and gpt_experiments.py, for docs/experiments.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import figures
from stored import RESULTS as ALL_RESULTS
from stored import markdown_table

RESULTS = ALL_RESULTS / "gpt"
WAYS = {
    "arrays": "flashkit's example, CuPy arrays", "sparse": "the example, block-sparse", "sdpa": "PyTorch, compiled",
    "flashkit": "PyTorch with flashkit.torch", "naive": "PyTorch, attention by the formula",
}  # fmt: skip
Line = dict[str, Any]


def read(file: Path) -> list[Line]:
    """The last line of each case."""
    found: dict[tuple[Any, ...], Line] = {}
    for text in file.read_text(encoding="utf-8").splitlines():
        line = {"part": "training", **json.loads(text)}
        config = tuple(line["config"].values())
        found[line["part"], line.get("way"), line.get("length"), line.get("block_sparse"), config] = line
    return list(found.values())


def gib(line: Line) -> str:
    return f"{line['memory'] / 2**30:.1f}" if line.get("memory") else ""


def training(lines: Sequence[Line]) -> str:
    head = ["context", "how", "tokens/s", "x PyTorch", "GiB", "steps", "loss, last ten"]
    rows = []
    for line in sorted(lines, key=lambda line: line["config"]["context"]):
        context = line["config"]["context"]
        base = [x for x in lines if (x["way"], x["config"]["context"]) == ("sdpa", context)]
        rate = line["tokens_per_second"]
        ratio = f"{rate / base[0]['tokens_per_second']:.2f}" if base else ""
        last = line["losses"][-10:]
        how = WAYS.get(line["way"], line["way"])
        rows.append(
            [f"{context:,}", how, f"{rate:,}", ratio, gib(line), str(line["steps"]), f"{sum(last) / len(last):.3f}"]
        )
    return markdown_table(head, rows, 2)


def contexts(lines: Sequence[Line]) -> str:
    head = ["context", "tiles kept", "microseconds a token", "GiB", "tokens", "validation loss"]
    rows = []
    for line in lines:
        kept = f"{line['density']:.0%}, block-sparse" if line["block_sparse"] else "causal"
        time, loss = f"{1e6 / line['tokens_per_second']:.2f}", f"{line['curve'][-1][1]:.4f}"
        rows.append([f"{line['context']:,}", kept, time, gib(line), f"{line['tokens']:,}", loss])
    return markdown_table(head, rows, 2)


def paths(lines: Sequence[Line]) -> str:
    head = ["tokens of the image", "context", "probability of the right colour", "chance"]
    rows = [
        [f"{line['length']:,}", f"{line['context']:,}", f"{line['probability']:.3f}", f"{line['chance']:.3f}"]
        for line in lines
    ]
    return markdown_table(head, rows, 2)


def profile(lines: Sequence[Line]) -> str:
    """Milliseconds a step, of the device, of the host, and of the largest kernels."""
    parts = []
    for line in lines:
        title = f"{WAYS.get(line['way'], line['way'])}, context {line['config']['context']:,}"
        rows = [[f"`{name[:60]}`", f"{count:g}", f"{ms:.2f}"] for name, count, ms in line["kernels"][:12]]
        rows += [["all kernels", "", f"{line['device_ms']:.1f}"], ["the host", "", f"{line['host_ms']:.1f}"]]
        parts.append(markdown_table([title, "calls", "ms"], rows, 1))
    return "\n\n".join(parts)


TABLES: dict[str, tuple[str, Callable[[Sequence[Line]], str]]] = {
    "training": ("GPT-2 124M beside PyTorch", training),
    "contexts": ("Contexts, and block-sparse attention", contexts),
    "paths": ("Paths", paths),
    "profile": ("What a step takes", profile),
}


def markdown(folder: Path = RESULTS) -> str:
    """All tables: the text between the markers of docs/experiments.md."""
    parts = []
    for file in sorted(folder.glob("*.jsonl")):
        lines = read(file)
        parts.append(f"## {lines[0]['device']}\n\n![Losses, speeds, contexts and paths](plots/{file.stem}-gpt.svg)")
        for part, (title, table) in TABLES.items():
            if own := [line for line in lines if line["part"] == part]:
                parts.append(f"### {title}\n\n{table(own)}")
    return "\n\n".join(parts) if parts else "No results are stored yet."


# --- the plot ---------------------------------------------------------------------------------------------------------


def plot(file: Path, folder: Path | None = None) -> Path:
    """Draw a result file, a panel for each part that it has; returns the plot, in docs/plots or in this folder."""
    lines = read(file)
    of = {part: [line for line in lines if line["part"] == part] for part in TABLES}
    draw = [d for d in (_losses, _speeds, _contexts, _paths) if of[PANELS[d.__name__]]]
    figure = figures.new(9, 2.9 * -(-len(draw) // 2))
    panels = figure.subplots(-(-len(draw) // 2), 2, squeeze=False).ravel()
    for axes, function in zip(panels, draw):
        function(axes, of[PANELS[function.__name__]])
    for axes in panels[len(draw) :]:
        axes.set_axis_off()
    return figures.save(figure, (folder or figures.PLOTS) / f"{file.stem}-gpt.svg")


PANELS = {"_losses": "training", "_speeds": "training", "_contexts": "contexts", "_paths": "paths"}


def _losses(axes: Any, lines: Sequence[Line]) -> None:
    """Of the run with the most steps."""
    steps = max(line["steps"] for line in lines)
    run = [line for line in lines if line["steps"] == steps]
    context = min(line["config"]["context"] for line in run)
    for line in run:
        if line["config"]["context"] == context:
            axes.plot(line["losses"], label=line["way"], linewidth=0.9)
    axes.set(title=f"training, context {context:,}", xlabel="step", ylabel="loss, nats")
    axes.legend()


def _speeds(axes: Any, lines: Sequence[Line]) -> None:
    for way in dict.fromkeys(line["way"] for line in lines):
        own = sorted((x["config"]["context"], x["tokens_per_second"] / 1e3) for x in lines if x["way"] == way)
        axes.plot(*zip(*own), "o-", label=way, markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(title="speed", xlabel="context", ylabel="thousand tokens/s")
    axes.legend()


def _contexts(axes: Any, lines: Sequence[Line]) -> None:
    for line in lines:
        label = f"{line['context']:,}{', sparse' if line['block_sparse'] else ''}"
        axes.plot(*zip(*((n / 1e6, loss) for n, loss in line["curve"])), "o-", label=label, markersize=3)
    axes.set(title="contexts", xlabel="million tokens", ylabel="validation loss, nats")
    axes.legend()


def _paths(axes: Any, lines: Sequence[Line]) -> None:
    for i, length in enumerate(dict.fromkeys(line["length"] for line in lines)):
        for line in lines:
            if line["length"] == length:
                whole = line["context"] == length
                curve = [(n / 1e6, 2.718281828**-loss) for n, loss in line["curve"]]
                label = f"{length:,} tokens" if whole else f"{length:,}, context {line['context']:,}"
                axes.plot(*zip(*curve), "-" if whole else "--", color=f"C{i}", label=label)
    axes.set_ylim(0, 1)
    axes.set(title="paths", xlabel="million tokens", ylabel="probability of the right colour")
    axes.legend()
