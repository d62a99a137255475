"""What the tests of the benchmark and of its report share: cases, and results of simulated timings."""

from collections.abc import Callable, Sequence
from typing import Any

from flashkit.devices.timing import Timing
from flashkit.tools.bench import measure
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.results import Result

SMALL = Case(33, head_dim=8, heads=2)


def fake_time(calls: dict[str, Callable[[], object]], **options: Any) -> dict[str, Timing]:
    """flashkit takes 1 ms, everything else 3 ms; each call runs once."""
    for call in calls.values():
        call()
    return {name: Timing((1e-3 if name == "flashkit" else 3e-3,) * 3) for name in calls}


def measured(case: Case = SMALL, direction: Any = "forward", baselines: Sequence[str] = ("numpy",)) -> Result:
    return measure.measure(
        case, direction, baselines, run="now", rounds=1, budget=1.0, with_memory=True, threads=1, time=fake_time,
        growth=lambda case, direction, name: {"flashkit": 1 << 20, "numpy": None}[name],
    )  # fmt: skip
