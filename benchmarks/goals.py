"""The goals of the project, as bounds of figures of stored results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stored import CUDA_BASELINES, geometric_mean, in_grid

from flashkit.tools.bench.results import Result

Figure = Callable[[Result], float | None]
"""None if the result lacks what the figure is computed from."""


class Goal(NamedTuple):
    """A bound of a figure. The figure of every result that it applies to must keep it, or, with `of_mean`, their
    geometric mean.
    """

    what: str
    applies: Callable[[Result], bool]
    figure: Figure
    bound: float
    at_most: bool = False
    of_mean: bool = False
    unit: str = ""

    def verdict(self, results: Sequence[Result]) -> tuple[bool, str]:
        """Whether the goal is met, and a sentence about it."""
        measured = [(x, r) for r in results if self.applies(r) and (x := self.figure(r)) is not None]
        bound = f"{'at most' if self.at_most else 'at least'} {self.bound:g}{self.unit}"
        if not measured:
            return False, f"NOT MEASURED  {self.what}: {bound}"
        if self.of_mean:
            figure, where = geometric_mean(x for x, _ in measured), f"mean of {len(measured)}"
        else:
            figure, worst = (max if self.at_most else min)(measured, key=lambda pair: pair[0])
            missed = sum(x > self.bound if self.at_most else x < self.bound for x, _ in measured)
            where = f"{worst.case.label}, {worst.direction}; {len(measured) - missed} of {len(measured)} cases meet it"
        met = figure <= self.bound if self.at_most else figure >= self.bound
        verdict = "met         " if met else "MISSED      "
        return met, f"{verdict}  {self.what}: {figure:.3g}{self.unit}, {bound} ({where})"


# --- which results, and which figure ----------------------------------------------------------------------------------


def every(result: Result) -> bool:
    return True


def masked(result: Result) -> bool:
    return result.case.masked


def decoding(result: Result) -> bool:
    return result.case.n_q == 1


def faster_than(*baselines: str) -> Figure:
    """The speed-up over the fastest of these baselines."""

    def figure(result: Result) -> float | None:
        ratios = result.times_as_fast
        return min((ratios[name]["median"] for name in baselines if name in ratios), default=None)

    return figure


def share_of(yardstick: str) -> Figure:
    """flashkit's rate over that of the yardstick."""
    return lambda result: result.yardsticks[yardstick]["median"] if yardstick in result.yardsticks else None


def time_over_dense(result: Result) -> float | None:
    """The time of a masked case over the visible fraction of the time without the mask."""
    share = share_of("dense")(result)
    return None if share is None else 1 / share


def overhead(name: str, over: str) -> Figure:
    """Microseconds by which one call takes longer than another."""

    def figure(result: Result) -> float | None:
        if not {name, over} <= result.timings.keys():
            return None
        return 1e6 * (result.timings[name]["median"] - result.timings[over]["median"])

    return figure


def largest_error(result: Result) -> float | None:
    return max(result.errors.get("flashkit", {}).values(), default=None)


def error_over(baseline: str) -> Figure:
    """The largest ratio of flashkit's error to the baseline's."""

    def figure(result: Result) -> float | None:
        ours, theirs = result.errors.get("flashkit", {}), result.errors.get(baseline, {})
        return max((ours[name] / theirs[name] for name in ours if theirs.get(name)), default=None)

    return figure


def tflops(result: Result) -> float:
    return result.gflops("flashkit") / 1000


# --- the goals --------------------------------------------------------------------------------------------------------


def cpu_goals(features: Iterable[str]) -> list[Goal]:
    """The goals of the CPU backend; without AMX, bfloat16 must be no slower than PyTorch."""
    amx = "amx_bf16" in features
    speed = [
        ("float32", "forward", 1.15, 1.4), ("float32", "backward", 1.15, 1.4),
        ("bfloat16", "forward", 1.3 if amx else 1.0, 1.8 if amx else 1.0),
        ("bfloat16", "backward", 3.0 if amx else 1.0, 3.0 if amx else 1.0),
        ("float16", "forward", 1.3, 1.3), ("float16", "backward", 1.3, 1.3),
        ("float64", "forward", 1.2, 1.2), ("float64", "backward", 1.2, 1.2),
    ]  # fmt: skip

    def grid(dtype: str, direction: str) -> Callable[[Result], bool]:
        return lambda result: in_grid(result) and (result.case.dtype, result.direction) == (dtype, direction)

    def small(*lengths: int, directions: Sequence[str] = ("forward", "backward")) -> Callable[[Result], bool]:
        return lambda result: result.case.n_q in lengths and result.case.n_k is None and result.direction in directions

    torch, sixteen = faster_than("torch"), small(16, directions=("forward",))
    found = []
    for dtype, direction, each, together in speed:
        without = " without AMX" if dtype == "bfloat16" and not amx else ""
        what = f"{dtype} {direction}{without}, times as fast as PyTorch"
        found.append(Goal(what, grid(dtype, direction), torch, each))
        found.append(Goal(what, grid(dtype, direction), torch, together, of_mean=True))
    microseconds = {"at_most": True, "unit": " us"}
    return [
        *found,
        Goal("float32 forward, share of PyTorch's sgemm", grid("float32", "forward"), share_of("sgemm"), 0.85),
        Goal("masks, time over the visible fraction of dense time", masked, time_over_dense, 1.25, at_most=True),
        Goal("masks, times as fast as PyTorch with the mask", masked, torch, 3.0),
        Goal("decoding, share of a read loop's bandwidth", decoding, share_of("read"), 0.95),
        Goal("decoding, times as fast as PyTorch", decoding, torch, 3.0),
        Goal("64 and 128 tokens, times as fast as PyTorch", small(64, 128), torch, 1.0),
        Goal("16 tokens, overhead over PyTorch", sixteen, overhead("flashkit", "torch"), 5.0, **microseconds),
        Goal("attention, overhead over its kernel", sixteen, overhead("flashkit", "kernel"), 15.0, **microseconds),
        Goal("planned call, overhead over its kernel", sixteen, overhead("planned", "kernel"), 4.0, **microseconds),
        Goal("error over PyTorch's error", every, error_over("torch"), 1.0, at_most=True),
    ]  # fmt: skip


def cuda_goals(forced: Mapping[str, str]) -> list[Goal]:
    """The goals of the CuPy backend on Hopper, or, if the kernel generation sm80 is forced, those of its kernels."""

    def of(dtype: str, direction: str, head_dim: int | None = None, tokens: int = 2) -> Callable[[Result], bool]:
        def applies(result: Result) -> bool:
            case = result.case
            kind = not case.masked and (case.dtype, result.direction) == (dtype, direction)
            return kind and case.n_q >= tokens and head_dim in (None, case.head_dim)

        return applies

    sm80 = "sm80" in forced.values()
    found = []
    for direction in ("forward", "backward"):
        if sm80:
            bounds, baselines, name = (0.95, 1.0), ("flash",), "FlashAttention-2"
        else:
            bounds = (1.0, 1.05 if direction == "forward" else 1.06)
            baselines, name = ("flash", "cudnn"), "the best of PyTorch's"
        what = f"bfloat16 {direction}, times as fast as {name}"
        found.append(Goal(what, of("bfloat16", direction), faster_than(*baselines), bounds[0]))
        found.append(Goal(what, of("bfloat16", direction), faster_than(*baselines), bounds[1], of_mean=True))
        what = f"float32 {direction}, times as fast as the memory-efficient kernels"
        found.append(Goal(what, of("float32", direction), faster_than("efficient"), 1.0 if sm80 else 2.0))
        what = f"float32 {direction}, relative error"
        found.append(Goal(what, of("float32", direction), largest_error, 8e-7, at_most=True))
        if sm80:
            continue
        for d, least in ((64, 80.0), (128, 100.0)) if direction == "forward" else ((64, 70.0), (128, 70.0)):
            what = f"float32 {direction}, head dim {d}, 4096 tokens"
            found.append(Goal(what, of("float32", direction, d, 4096), tflops, least, unit=" TFLOP/s"))
    if not sm80:
        found += [
            Goal("blocks and windows, times as fast as FlexAttention", masked, faster_than("flex"), 1.3),
            Goal("blocks and windows, time over the visible fraction of dense time", masked, time_over_dense, 1.1,
                 at_most=True),
            Goal("time with softcap over plain", every, share_of("softcap"), 1.15, at_most=True),
            Goal("time with ALiBi over plain", every, share_of("alibi"), 1.15, at_most=True),
            Goal("time of a deterministic backward pass over the default", every, share_of("deterministic"), 1 / 0.9,
                 at_most=True),
        ]  # fmt: skip
    found.append(Goal("decoding, times as fast as cuDNN", decoding, faster_than("cudnn"), 1.0))
    for baseline in ("flash", "cudnn"):
        what = f"error over {CUDA_BASELINES[baseline]}'s"
        found.append(Goal(what, every, error_over(baseline), 1.0, at_most=True))
    return found
