"""What the plots have in common: their look, logarithmic axes over tokens, and files that are the same in each run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLOTS = Path(__file__).resolve().parents[1] / "docs" / "plots"


def new(width: float, height: float) -> Any:
    """An empty figure; sizes in inches."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "flashkit", "font.size": 9, "axes.spines.top": False})
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def over_tokens(axes: Any, **y: Any) -> None:
    """Both axes logarithmic; y: options of the vertical one."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", **y)


def save(figure: Any, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None}, bbox_inches="tight")
    return target
