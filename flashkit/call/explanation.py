"""`flashkit.explain`: the backend of a call, its tile and the row of the profile that chose it, the roofline time, and,
if asked to measure, how far the call is from the roofline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import dispatch
from ..devices import profiles, timing
from ..errors import UnsupportedError
from ..mods import Mod, expr
from ..mods.block_mask import BlockMask
from ..mods.expr import Expr
from ..spec import Gradients, Operands, Problem
from . import arrays


@dataclass(frozen=True)
class Explanation:
    """What attention() would do with a call. `str()` of it is a page of text, `as_dict()` plain data.

    Attributes
    ----------
    problem : str
        What is computed, in words.
    spec_key : str
        Equal for calls that run the same kernels.
    visible_fraction : float
        Visible pairs of all query-key pairs; for a masked head of more than 2^26 pairs an estimate, to about 1e-6.
    flops, bytes : dict
        Of the "forward" and the "backward" pass: of the visible pairs, and the least memory traffic.
    roofline_seconds : dict
        The least time of each pass by the measured peaks; None if these are not known.
    predicted_seconds : float or None
        Time of the forward pass by the profile.
    device : str
        Name of the device.
    candidates : list of dict
        The answer of each backend: name, ok, reason, predicted_seconds.
    backend, tile, why, row
        The backend chosen, its tile, the reason for the tile, and file and line of the profile's row. None if no
        backend can compute it.
    measured_seconds : dict or None
        Measured times of both passes.
    """

    problem: str
    spec_key: str
    visible_fraction: float
    flops: dict[str, float]
    bytes: dict[str, int]
    roofline_seconds: dict[str, float | None]
    predicted_seconds: float | None
    device: str
    candidates: list[dict[str, Any]]
    backend: str | None
    tile: dict[str, Any] | None
    why: str | None
    row: str | None
    measured_seconds: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        """All attributes by name."""
        return dict(self.__dict__)

    def _repr_html_(self) -> str:
        """For notebooks."""
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [self.problem, f"  device     {self.device}", "  backends"]
        for c in self.candidates:
            verdict = _time(c["predicted_seconds"]) if c["ok"] else f"no: {c['reason']}"
            lines.append(f"    {'->' if c['name'] == self.backend else '  '} {c['name']:<12} {verdict}")
        if self.tile is not None:
            tile = ", ".join(f"{name} {value}" for name, value in self.tile.items())
            lines += [
                f"  tile       {tile}",
                f"  because    {self.why}",
                f"  profile    {self.row or 'no row applies: the model in devices/io_model.py chose'}",
            ]
        if self.visible_fraction < 1:
            lines.append(f"  visible    {100 * self.visible_fraction:.3g} % of the query-key pairs")
        for direction in ("forward", "backward"):
            roofline = self.roofline_seconds[direction]
            bound = (
                "peak rate or bandwidth not known; flashkit autotune measures them"
                if roofline is None
                else f"at least {_time(roofline)} (roofline)"
            )
            lines.append(
                f"  {direction:<10} {self.flops[direction]:.3g} FLOPs, {self.bytes[direction]:.3g} bytes, {bound}"
            )
        if self.predicted_seconds is not None and self.roofline_seconds["forward"]:
            ratio = self.predicted_seconds / self.roofline_seconds["forward"]
            lines.append(f"  predicted  {_time(self.predicted_seconds)}, {ratio:.2f} x the roofline")
        for direction, seconds in (self.measured_seconds or {}).items():
            roofline, rate = self.roofline_seconds[direction], self.flops[direction] / seconds / 1e9
            distance = f", {seconds / roofline:.2f} x the roofline" if roofline else ""
            lines.append(f"  measured   {direction} {_time(seconds)}, {rate:.3g} GFLOP/s{distance}")
        return "\n".join(lines)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def _in_entry(mask: Expr, b: int) -> Expr:
    """The mask of one batch entry."""
    return expr.substitute([mask], lambda node: expr.const(b) if node is expr.B else node)[0]


EXACT_PAIRS = 1 << 26
"""Pairs of a head up to which visible pairs are counted one by one where a tile is PARTIAL."""

MAX_TILES = 2048
"""Tiles along the queries and along the keys of a head with more pairs."""


def visible_pairs(problem: Problem, operands: Operands) -> float:
    """Number of visible pairs, counted from the tile lists, or estimated with more than EXACT_PAIRS."""
    if 0 in (problem.batch, problem.heads, problem.n_q, problem.n_k):
        return 0
    spec = problem.spec
    lengths = np.clip(_distinct(operands.kv_lengths), 0, problem.n_k)
    offsets = _distinct(operands.q_offset)
    if spec.mask is None:
        total = lengths.sum() if len(lengths) > 1 else int(lengths[0]) * problem.batch
        return problem.heads * problem.n_q * int(total)
    if len(lengths) == len(offsets) == 1 and not expr.uses(spec.mask, expr.B):
        return problem.batch * _visible_in(problem, operands, spec.mask, int(lengths[0]), int(offsets[0]))
    lengths, offsets = (np.broadcast_to(x, (problem.batch,)) for x in (lengths, offsets))
    return sum(
        _visible_in(problem, operands, _in_entry(spec.mask, b), int(lengths[b]), int(offsets[b]))
        for b in range(problem.batch)
    )


def _distinct(numbers: np.ndarray) -> np.ndarray:
    """One number where all batch entries have the same, else all."""
    return numbers[:1] if numbers.strides[0] == 0 or (numbers == numbers[0]).all() else numbers


def _visible_in(problem: Problem, operands: Operands, mask: Expr, length: int, offset: int) -> float:
    """Number of visible pairs of a batch entry with this mask."""
    if not length:
        return 0
    mod, exact = Mod("mask", mask, operands.params, operands.arrays), problem.n_q * length <= EXACT_PAIRS
    block = 128
    while not exact and block * MAX_TILES < max(problem.n_q, length):
        block *= 2
    seen = BlockMask.from_mod(mod, problem.n_q, length, block, block, offset, heads=problem.heads)
    pairs = seen.visible_pairs if exact else seen.estimated_pairs()
    return pairs * (problem.heads if seen.heads == 1 else 1)


MEASURED_ROUNDS, MEASURED_SECONDS = 10, 1.0
"""Rounds of a measurement, and the seconds after which no further round starts."""


def _measured(problem: Problem, operands: Operands, backend: str | None) -> dict[str, float]:
    """Median seconds of a forward pass and of a backward pass."""
    if problem.array_kind != "numpy":
        raise ValueError(f"measure: expected NumPy arrays for measure=True, got {problem.array_kind} arrays")
    if 0 in (problem.batch, problem.heads, problem.n_q):
        return {}
    chosen, plan = dispatch.plan(problem, backend)
    inputs = operands.q, operands.k, operands.v
    bound: Any = partial(chosen.forward, plan, operands)
    if hasattr(chosen, "bind"):  # what a cached plan runs
        bound = partial(chosen.bind(plan, operands), *inputs, operands.out, operands.lse)
    dq, dk, dv = (np.empty(x.shape, x.dtype) for x in inputs)
    gradients = Gradients(np.ones_like(operands.out), None, dq, dk, dv)
    calls = {"forward": bound, "backward": lambda: chosen.backward(plan, operands, gradients)}
    taken = timing.interleaved(calls, rounds=MEASURED_ROUNDS, budget=MEASURED_SECONDS)
    return {direction: t.median for direction, t in taken.items()}


def explain_problem(problem: Problem, operands: Operands, backend: str | None, measure: bool = False) -> Explanation:
    """See flashkit.explain."""
    operands = arrays.operands_on_host(operands)
    pairs = visible_pairs(problem, operands)
    flops = {d: problem.flops(d, pairs) for d in ("forward", "backward")}
    moved = {d: problem.bytes(d) for d in ("forward", "backward")}
    only = dispatch.forced(backend)
    ranked = dispatch.candidates(problem, only=only)
    share = pairs / problem.pairs if problem.pairs else 0.0
    profile = profiles.for_device("cuda" if problem.array_kind == "cupy" else "cpu")
    peak, bandwidth = profile.peak(problem.spec.dtype), profile.bandwidth_gbs
    # A row's rate is of matrix products, so a call that is bound by memory takes longer.
    least = moved["forward"] / (bandwidth * 1e9) if bandwidth else 0.0
    answers: list[dict[str, Any]] = [
        {
            "name": c.name,
            "ok": c.verdict.ok,
            "reason": c.verdict.reason,
            "predicted_seconds": max(c.seconds * share, least) if c.verdict.ok else None,
        }
        for c in ranked
    ]
    roofline = {
        d: max(flops[d] / (peak * 1e12), moved[d] / (bandwidth * 1e9)) if peak and bandwidth else None for d in flops
    }
    tile: dict[str, Any] | None = None
    name = why = row = None
    predicted: float | None = None
    try:
        chosen, plan = dispatch.plan(problem, backend)
        name, why, predicted = chosen.name, plan.why, answers[0]["predicted_seconds"]
        tile = plan.tile._asdict() if hasattr(plan.tile, "_asdict") else dict(vars(plan.tile))
        row = getattr(getattr(plan, "row", None), "origin", None)
    except UnsupportedError:
        pass  # the candidates have the reasons
    return Explanation(
        problem=problem.describe(), spec_key=problem.spec.key, visible_fraction=share, flops=flops, bytes=moved,
        roofline_seconds=roofline, predicted_seconds=predicted, device=profile.device.name or profile.device.kind,
        candidates=answers, backend=name, tile=tile, why=why, row=row,
        measured_seconds=_measured(problem, operands, backend) if measure and name is not None else None,
    )  # fmt: skip
