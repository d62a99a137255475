"""The plots of stored results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import figures
import gpt_report
import lengths
import several_devices
import traffic
from stored import CPU_BASELINES, CUDA_BASELINES, RESULTS, SHAPES, in_grid

from flashkit.tools.bench.results import Result, read

CPU_PANELS = [("float32", "forward"), ("float32", "backward"), ("bfloat16", "forward"), ("bfloat16", "backward")]


def plots(output: Path, folder: Path = RESULTS) -> list[Path]:
    """Draw all plots of the stored results, each named after its result file; returns what was written."""
    written = []
    for file in sorted(folder.glob("*.jsonl")):
        results = read(file)
        cuda = results[0].machine["kind"] == "cuda"
        drawn = [("speed", _draw_cuda_speed)] if cuda else [("speed", _draw_speed), ("memory", _draw_memory)]
        for name, draw in drawn:
            if (figure := draw(results)) is not None:
                written.append(figures.save(figure, output / f"{file.stem}-{name}.svg"))
    for module in (gpt_report, lengths, several_devices, traffic):
        written += [module.plot(file, output) for file in sorted((folder / module.RESULTS.name).glob("*.jsonl"))]
    return written


def _draw_cuda_speed(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """TFLOP/s over the number of tokens, causal bfloat16: a panel for each pass and head dim. None if FlashAttention-2
    was not timed or a kernel generation was forced."""
    results = [x for x in results if x.case.n_k is None and x.case.causal and x.case.dtype == "bfloat16"]
    panels = [(direction, d) for direction in ("forward", "backward") for d in (64, 128)]
    if not any("flash" in result.times_as_fast for result in results) or results[0].machine.get("forced"):
        return None
    figure = figures.new(9, 2.9)
    handles = {}
    for axes, (direction, d) in zip(figure.subplots(1, len(panels), sharey=True), panels):
        for name, colour in (("flashkit", "C0"), ("cudnn", "C1"), ("flash", "C2")):
            points = sorted(
                (result.case.n_q, result.gflops(name) / 1000)
                for result in results
                if (result.direction, result.case.head_dim) == (direction, d) and name in result.timings
            )
            if points:
                label = CUDA_BASELINES.get(name, name)
                handles[label] = axes.plot(*zip(*points), "o-", color=colour, markersize=3)[0]
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_title(f"{direction}, head dim {d}")
        axes.set_xlabel("tokens")
    figure.axes[0].set_ylim(bottom=0)  # once: it ends the shared axis' own scaling
    figure.axes[0].set_ylabel("TFLOP/s")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    return figure


def _draw_speed(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """How many times as fast as each baseline over the number of tokens: a row of panels for each dtype and pass, a
    column for each head dim and causality."""
    results = [result for result in results if in_grid(result)]
    rows = [key for key in CPU_PANELS if any((result.case.dtype, result.direction) == key for result in results)]
    figure = figures.new(9, 1.7 * max(len(rows), 1) + 0.6)
    if not rows:
        return figure
    panels = figure.subplots(len(rows), len(SHAPES), sharex=True, sharey="row", squeeze=False)
    handles = {}
    for i, key in enumerate(rows):
        for j, (d, causal) in enumerate(SHAPES):
            axes = panels[i, j]
            for colour, baseline in enumerate(CPU_BASELINES):
                points = sorted(
                    (r.case.n_q, r.times_as_fast[baseline]["median"])
                    for r in results
                    if baseline in r.times_as_fast
                    and (r.case.dtype, r.direction, r.case.head_dim, r.case.causal) == (*key, d, causal)
                )
                if points:
                    handles[CPU_BASELINES[baseline]] = axes.plot(*zip(*points), color=f"C{colour}")[0]
            axes.axhline(1, color="black", linewidth=0.8)
            figures.over_tokens(axes, base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            if i == 0:
                axes.set_title(f"head dim {d}{', causal' if causal else ''}")
        panels[i, 0].set_ylabel(" ".join(key))
    figure.supxlabel("tokens")
    figure.supylabel("times as fast as")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    return figure


def _draw_memory(results: Sequence[Result]):  # type: ignore[no-untyped-def]
    """Growth of resident memory by the number of tokens, for each pass of the float32 cases without a mask."""
    figure = figures.new(5, 3.2)
    axes = figure.subplots()
    for direction, style in (("forward", "-"), ("backward", "--")):
        for name, colour in (("flashkit", "C0"), ("numpy", "C1")):
            points = sorted(
                (result.case.n_q, result.memory[name] / 2**20 / result.case.heads)
                for result in results
                if result.direction == direction and name in result.memory and result.case.n_q == result.case.keys
                and (result.case.dtype, result.case.head_dim, result.case.causal) == ("float32", 64, False)
            )  # fmt: skip
            if points:
                label = f"{CPU_BASELINES.get(name, name)}, {direction}"
                axes.plot([n for n, _ in points], [m for _, m in points], f"o{style}", color=colour, label=label)
    if axes.has_data():
        figures.over_tokens(axes, base=2)
        axes.legend()
    axes.set_xlabel("tokens")
    axes.set_ylabel("MiB per head at the peak")
    return figure
