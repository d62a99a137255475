"""The table of a benchmark run on the screen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from .results import Result


def table(results: Sequence[Result], baselines: Sequence[str]) -> Table:
    """A row for each result: median time with its 20 and 80 % quantiles, GFLOP/s, the speed-up over each baseline, the
    share of each yardstick's rate, and peak memory of flashkit and of NumPy.
    """
    shown = Table(box=None, padding=(0, 2, 0, 0))
    left = "case", "direction"
    right = "ms (20-80 %)", "GFLOP/s", *(f"x {name}" for name in baselines), "share of", "MiB", "NumPy's"
    for name in (*left, *right):
        shown.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for r in results:
        t = r.timings["flashkit"]
        milliseconds = f"{_digits(t['median'] * 1e3)} ({_digits(t['low'] * 1e3)}-{_digits(t['high'] * 1e3)})"
        ratios = [f"{r.times_as_fast[name]['median']:.2f}" if name in r.times_as_fast else "-" for name in baselines]
        memory = [f"{r.memory[name] / 2**20:.1f}" if name in r.memory else "" for name in ("flashkit", "numpy")]
        shares = ", ".join(f"{name} {share['median']:.2f}" for name, share in r.yardsticks.items())
        gflops = f"{r.gflops('flashkit'):.1f}"
        shown.add_row(r.case.label, r.direction, milliseconds, gflops, *ratios, shares, *memory)
    return shown


def _digits(x: float) -> str:
    """Three significant digits without an exponent."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" if x > 0 else "0"
