"""The table of a benchmark run on the screen."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ..console import digits, print_table
from .results import Result


def show(console: Console, results: Sequence[Result], baselines: Sequence[str]) -> None:
    """Print a row for each result: median time with its 20 and 80 % quantiles, GFLOP/s, the speed-up over each
    baseline, the share of each yardstick's rate, and peak memory of flashkit and of NumPy.
    """
    rows = []
    for r in results:
        t = r.timings["flashkit"]
        milliseconds = f"{digits(t['median'] * 1e3)} ({digits(t['low'] * 1e3)}-{digits(t['high'] * 1e3)})"
        ratios = [f"{r.times_as_fast[name]['median']:.2f}" if name in r.times_as_fast else "-" for name in baselines]
        memory = [f"{r.memory[name] / 2**20:.1f}" if name in r.memory else "" for name in ("flashkit", "numpy")]
        shares = ", ".join(f"{name} {share['median']:.2f}" for name, share in r.yardsticks.items())
        gflops = f"{r.gflops('flashkit'):.1f}"
        rows.append([f"{r.case.label}, {r.direction}", milliseconds, gflops, *ratios, shares, *memory])
    numbers = ["ms (20-80 %)", "GFLOP/s", *(f"x {name}" for name in baselines), "share of", "MiB", "NumPy's"]
    print_table(console, ["case"], numbers, rows)
