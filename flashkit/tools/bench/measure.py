"""One case of the benchmark in one direction: flashkit, baselines and yardsticks, verified and then timed interleaved.

FLOPs are those of the matrix products for the visible pairs (spec.Problem.flops).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ... import reference
from ...call.arguments import prepare
from ...call.explanation import visible_pairs
from ...devices import timing
from ...devices.timing import Timing
from ...spec import AttentionSpec, Direction, Operands
from . import environment, memory
from .cases import Arrays, Case
from .contender import Entry, with_flashkit
from .platforms import Platform, cpu
from .results import Result

MAX_ATTEMPTS = 3
"""How often a case is timed again while other processes load the cores; the attempt with the least load counts."""

DROP = 6.0
"""A contender this many times slower than the fastest is timed in MIN_ROUNDS rounds and then dropped."""

MIN_ROUNDS = 3

MAX_EXACT_PAIRS = 2048 * 2048
"""Pairs of one head up to which errors are measured: the reference stores them in float64."""


def measure(
    case: Case, direction: Direction, baselines: Sequence[str], *, run: str, rounds: int, budget: float,
    threads: int, with_memory: bool, platform: Platform | None = None,
    time: Callable[..., dict[str, Timing]] = timing.interleaved,
    growth: Callable[[Case, Direction, str], int | None] = memory.memory_growth,
) -> Result:  # fmt: skip
    """Measure one case in one direction. A baseline that fails, or whose results differ, is not timed; the result says
    why.

    run: when the run began. rounds, budget: the most rounds, and the seconds for all of them. threads: of flashkit and
    of the baselines that can be limited. with_memory: measure the growth of resident memory, in a process for each
    contender. time, growth: for tests, what times the calls and what measures memory.
    """
    platform = platform or cpu()
    arrays = platform.arrays(case)
    problem, operands, _ = prepare(*arrays[:3], **case.options)
    entries, skipped, errors_ = verified(case, direction, baselines, arrays, threads, platform)
    yardsticks = platform.yardsticks(case, arrays, direction, baselines, threads)
    calls = {name: entry.call for name, entry in entries.items()} | {name: x.call for name, x in yardsticks.items()}
    load, timings = _timed(calls, rounds, budget, platform, time)

    ratios = {name: timings[name].over(timings["flashkit"]) for name in entries if name != "flashkit"}
    measured = [name for name in ("flashkit", "numpy") if with_memory and name in entries]
    grown = {name: growth(case, direction, name) for name in measured}
    flops, moved = problem.flops(direction, visible_pairs(problem, operands)), problem.bytes(direction)
    shares = {}
    for name, yardstick in yardsticks.items():
        own_work = flops if yardstick.unit == "FLOP" else moved
        relative_work = 1.0 if yardstick.work is None else own_work / yardstick.work
        shares[name] = _quantiles(tuple(relative_work * x for x in timings[name].over(timings["flashkit"])))
    return Result(
        run=run,
        case=case,
        direction=direction,
        flops=flops,
        bytes=moved,
        timings={name: t.as_dict() for name, t in timings.items()},
        times_as_fast={name: _quantiles(ratio) for name, ratio in ratios.items()},
        skipped=skipped,
        memory={name: n for name, n in grown.items() if n is not None},
        machine=platform.machine(*baselines),
        background_load=load,
        yardsticks=shares,
        errors=errors_,
    )


def verified(
    case: Case, direction: Direction, baselines: Sequence[str], arrays: Arrays, threads: int, platform: Platform
) -> tuple[dict[str, Entry], dict[str, str], dict[str, dict[str, float]]]:
    """flashkit and the baselines that compute the same; the reasons for the others; the errors of those."""
    flashkit = with_flashkit(case, arrays, direction, threads)
    entries, skipped = {"flashkit": flashkit}, {}
    ours, exact = flashkit.result(), expected(case, arrays, direction)
    by_name = {"flashkit": errors(ours, exact)} if exact else {}
    for name in baselines:
        try:
            entry = platform.baselines[name](case, arrays, direction, threads)
            if entry is None:
                skipped[name] = "cannot do this case, or not in reasonable memory"
                continue
            theirs = entry.result()
        except Exception as failure:  # a library may raise anything; the run goes on with the other baselines
            skipped[name] = f"fails: {str(failure).splitlines()[0] if str(failure) else type(failure).__name__}"
            continue
        if (error := _difference(theirs, ours)) > tolerance(case.dtype):
            skipped[name] = f"does not compute the same: the largest difference is {error:.2g} of the largest value"
            continue
        entries[name] = entry
        if exact:
            by_name[name] = errors(theirs, exact)
    return entries, skipped, by_name


def _timed(
    calls: Mapping[str, Callable[[], object]], rounds: int, budget: float, platform: Platform,
    time: Callable[..., dict[str, Timing]],
) -> tuple[float | None, dict[str, Timing]]:  # fmt: skip
    """The load of other processes (on a CPU) and the timings, of the attempt with the least load."""
    wait_idle = timing.until_idle if platform.is_cpu else None
    attempts: list[tuple[float | None, dict[str, Timing]]] = []
    while len(attempts) < MAX_ATTEMPTS and (not attempts or environment.background_warning(attempts[-1][0])):
        with environment.BackgroundLoad() as load:
            taken = time(
                calls, rounds=rounds, budget=budget, min_rounds=MIN_ROUNDS, drop=DROP, wait_idle=wait_idle,
                synchronize=platform.synchronize,
            )  # fmt: skip
        attempts.append((load.share if platform.is_cpu else None, taken))
    return min(attempts, key=lambda attempt: attempt[0] or 0.0)


def _quantiles(ratio: Sequence[float]) -> dict[str, float]:
    return dict(zip(("median", "low", "high"), ratio))


# --- errors -----------------------------------------------------------------------------------------------------------


def expected(case: Case, arrays: Arrays, direction: Direction) -> dict[str, np.ndarray]:
    """The reference's float64 results for the first heads; empty for float64 and beyond MAX_EXACT_PAIRS."""
    if case.n_q * case.keys > MAX_EXACT_PAIRS or case.dtype == "float64":
        return {}
    parts = (x[:1, : case.group if i in (0, 3) else 1] for i, x in enumerate(arrays))
    q, k, v, dout = ((x if isinstance(x, np.ndarray) else x.get()).astype(np.float64) for x in parts)
    problem, operands, _ = prepare(q, k, v, **case.options)
    exact = by_the_reference(problem.spec, operands, direction, dout)
    return {name: x for name, x in exact.items() if name != "lse"}


def by_the_reference(
    spec: AttentionSpec, operands: Operands, direction: Direction, dout: np.ndarray, dtype: Any = np.float64
) -> dict[str, np.ndarray]:
    """The results of a pass, computed in this dtype, by name: out and lse, or dq, dk and dv."""
    if direction == "forward":
        return dict(zip(("out", "lse"), reference.standard(spec, operands, dtype)))
    grads = reference.standard_gradients(spec, operands, dout, dtype=dtype)
    return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def errors(results: Sequence[np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Root mean square of the error over that of the expected values, for each result by name."""
    return {
        name: float(np.linalg.norm(got[:1, : exact.shape[1]].astype(np.float64) - exact) / np.linalg.norm(exact))
        for (name, exact), got in zip(expected.items(), results, strict=True)
    }


def _difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest difference, relative to the largest value, of arrays in pairs."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(ours, theirs, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) if a.shape == b.shape else math.inf for a, b in pairs)


def tolerance(dtype: str) -> float:
    """Half the digits: it separates another computation from the same one with its sums in another order."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) ** 0.5
