"""Interleaved timing, on a simulated clock."""

from collections.abc import Callable

import pytest

from flashkit.devices import timing
from flashkit.devices.timing import Timing, interleaved


class Clock:
    """Seconds pass only in calls and in sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.order.append("sleep")

    def call(self, name: str, seconds: Callable[[int], float]) -> Callable[[], None]:
        """A call that takes seconds(n) the n-th time."""

        def spend() -> None:
            self.now += seconds(self.order.count(name))
            self.order.append(name)

        return spend


def test_calls_are_interleaved_in_a_new_order_each_round() -> None:
    clock = Clock()
    calls = {name: clock.call(name, lambda n: 1.0) for name in "abc"}
    timings = interleaved(calls, rounds=4, clock=clock)
    assert all(t.rounds == (1.0,) * 4 and t.repeats == 1 and not t.dropped for t in timings.values())
    rounds = ["".join(clock.order[i : i + 3]) for i in range(6, len(clock.order), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) > 1


def test_each_sample_ends_with_a_synchronization() -> None:
    """Calls return at once and queue 4 ms of work each; the time of the synchronization belongs to the sample."""
    clock, waiting = Clock(), [0.0]

    def queue() -> None:
        waiting[0] += 0.004

    def wait() -> None:
        clock.now += waiting[0]
        waiting[0] = 0.0

    t = interleaved({"": queue}, rounds=4, synchronize=wait, clock=clock)[""]
    assert t.repeats == 3  # the least sample is 10 ms
    assert t.rounds == pytest.approx([0.004] * 4)


def test_medians_and_quantiles() -> None:
    t = Timing((5.0, 1.0, 2.0, 3.0, 4.0, 100.0))
    assert (t.median, t.best, t.spread) == (3.5, 1.0, (2.0, 5.0))
    assert t.as_dict() == {"median": 3.5, "low": 2.0, "high": 5.0, "best": 1.0, "rounds": 6, "repeats": 1}


def test_a_slow_call_is_dropped() -> None:
    clock = Clock()
    calls = {
        "a": clock.call("a", lambda n: 1.0),
        "b": clock.call("b", lambda n: 1.9),
        "c": clock.call("c", lambda n: 3.0),
    }
    timings = interleaved(calls, rounds=10, drop=2.0, clock=clock)
    assert {name: len(t.rounds) for name, t in timings.items()} == {"a": 10, "b": 10, "c": timing.DECIDING_ROUNDS}
    assert timings["c"].dropped
    assert not timings["b"].dropped
    assert timings["c"].over(timings["a"])[0] == 3.0


def test_the_budget_ends_timing_after_a_whole_round() -> None:
    clock = Clock()
    calls = {name: clock.call(name, lambda n: 1.0) for name in "ab"}
    assert {len(t.rounds) for t in interleaved(calls, rounds=100, budget=9.0, clock=clock).values()} == {3}
    assert {len(t.rounds) for t in interleaved(calls, rounds=100, budget=0.0, clock=clock).values()} == {1}


def test_a_short_call_is_repeated_and_the_first_call_is_not_timed() -> None:
    clock = Clock()
    timings = interleaved({"a": clock.call("a", lambda n: 4.0 if n == 0 else 1e-5)}, rounds=3, clock=clock)
    assert timings["a"].repeats == pytest.approx(1000, abs=1)
    assert timings["a"].median == pytest.approx(1e-5)


def test_wait_idle_precedes_an_untimed_sample_and_a_timed_one() -> None:
    clock = Clock()
    timings = interleaved(
        {"a": clock.call("a", lambda n: 0.02)}, rounds=3, wait_idle=lambda: clock.sleep(0.5), clock=clock
    )
    assert clock.order == ["a", "sleep", *["a"] * timing.SIZING_CALLS, *["sleep", "a", "a"] * 3]
    assert timings["a"].median == pytest.approx(0.02)
