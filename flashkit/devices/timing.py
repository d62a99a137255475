"""Interleaved timing: calls take turns, round by round, so that a noisy machine does not favour one of them.

Programs timed one after the other run at different clocks and beside different other processes. Interleaved, they share
both. The ratio of two calls is the median of the ratios of their rounds.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .host import no_collection

Key = TypeVar("Key", bound=Hashable)

MIN_SAMPLE = 1e-2
"""Seconds of a sample, by repeated calls: the scheduler takes milliseconds to separate threads woken on one core."""

WARM_UP = 0.1
"""Seconds; threads fall asleep while `wait_idle` runs, so a shorter call gets an untimed sample before each sample."""

SIZING_CALLS = 5
"""Calls that set the number of repeats where `wait_idle` is given. The fastest counts: the first wakes threads, and a
sample of one such call would be all waking."""

DECIDING_ROUNDS = 2
"""Rounds after which a slow call may be dropped."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call in each round. repeats: calls in a sample. dropped: too slow for all rounds."""

    rounds: tuple[float, ...]
    repeats: int = 1
    dropped: bool = False

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 20 % and 80 % quantiles."""
        low, high = np.quantile(self.rounds, (0.2, 0.8))
        return float(low), float(high)

    def over(self, other: Timing) -> tuple[float, float, float]:
        """The time relative to `other`: median, 20 % and 80 % quantile of the ratios of the rounds that both have."""
        n = min(len(self.rounds), len(other.rounds))
        ratios = np.divide(self.rounds[:n], other.rounds[:n])
        return float(np.median(ratios)), float(np.quantile(ratios, 0.2)), float(np.quantile(ratios, 0.8))

    def as_dict(self) -> dict[str, Any]:
        """Median, low, high and best in seconds, rounds and repeats: the fields of a benchmark result."""
        low, high = self.spread
        counts = {"rounds": len(self.rounds), "repeats": self.repeats}
        return {"median": self.median, "low": low, "high": high, "best": self.best, **counts}


def interleaved(
    calls: Mapping[Key, Callable[[], object]], *, rounds: int = 10, budget: float = math.inf, min_rounds: int = 1,
    drop: float = math.inf, wait_idle: Callable[[], object] | None = None,
    synchronize: Callable[[], object] = lambda: None, clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, Timing]:  # fmt: skip
    """Time every call in each round, in an order that is shuffled for each round; a Timing for each key.

    Untimed calls of each come first: one that may compile, then one, or with `wait_idle` `SIZING_CALLS`, that set the
    number of repeats of a sample. No further round starts after `budget` seconds, once there are `min_rounds`.

    drop: after `max(DECIDING_ROUNDS, min_rounds)` rounds, a call whose best round takes more than `drop` times the best
    of all calls is dropped. wait_idle: called before each sample, to wait until the threads of the previous call sleep
    (`until_idle`). synchronize: called at the end of each sample and timed with it, to wait for a device that runs
    asynchronously. clock: returns seconds; tests pass a simulated one.
    """
    def sample(call: Callable[[], object], repeats: int = 1) -> float:
        before = clock()
        for _ in range(repeats):
            call()
        synchronize()
        return (clock() - before) / repeats

    start = clock()
    repeats, warm_up = {}, {}
    for key, call in calls.items():
        sample(call)
        if wait_idle is not None:
            wait_idle()
        seconds = sample(call)
        warm_up[key] = wait_idle is not None and seconds < WARM_UP
        if warm_up[key]:
            seconds = min(seconds, *(sample(call) for _ in range(SIZING_CALLS - 1)))
        repeats[key] = max(1, math.ceil(MIN_SAMPLE / max(seconds, 1e-9)))
    taken: dict[Key, list[float]] = {key: [] for key in calls}
    running, order = list(calls), random.Random(0)
    with no_collection():  # a collection would be timed with whichever call happens to run
        for done in range(rounds):
            if done >= min_rounds and clock() - start > budget:
                break
            order.shuffle(running)
            for key in running:
                if wait_idle is not None:
                    wait_idle()
                if warm_up[key]:
                    sample(calls[key], repeats[key])
                taken[key].append(sample(calls[key], repeats[key]))
            if done + 1 >= max(DECIDING_ROUNDS, min_rounds):
                best = min(min(seconds) for seconds in taken.values())
                running = [key for key in running if min(taken[key]) <= drop * best]
    return {key: Timing(tuple(taken[key]), repeats[key], key not in running) for key in calls}


def until_idle(timeout: float = 0.5) -> None:
    """Wait up to `timeout` seconds until no thread runs: idle ones of OpenBLAS and OpenMP spin for a while."""
    end = time.perf_counter() + timeout
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(0.005)
        if time.process_time() - used < 0.001:
            return
