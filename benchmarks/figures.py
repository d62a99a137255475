"""What the plots share: style, logarithmic axes over tokens, and small files that are the same in each run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PLOTS = Path(__file__).resolve().parents[1] / "docs" / "plots"

STYLE = {
    "svg.hashsalt": "flashkit", "svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
"""Text stays text: glyphs as paths are most of the bytes of a plot."""


def new(width: float, height: float) -> Any:
    """An empty figure; sizes in inches."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def over_tokens(axes: Any, **y: Any) -> None:
    """Both axes logarithmic, with major ticks alone; y: options of the vertical one."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", **y)
    axes.minorticks_off()


def save(figure: Any, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
    target.write_text(compact(target.read_text(encoding="utf-8")), encoding="utf-8")
    return target


def compact(svg: str) -> str:
    """The same picture in fewer bytes: without comments, metadata, indentation and names of groups, coordinates
    to a tenth of a point."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"-?\d+\.\d{2,}", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    svg = re.sub(r' id="(?!axes)[a-z0-9.]+_\d+"', "", svg)
    return re.sub(r"> <", "><", svg).replace('<g id="axes', '\n<g id="axes').strip() + "\n"
