"""`predict`: bytes, time and efficiency of a distributed call, for any number of ranks, computed on one.

The model: a rank's step takes the longer of its attention and the transfer behind it, and then merges what it has got.
Attention runs at the rate of one device, a transfer at the bandwidth between devices; merging, and copies into and out
of the messages of an all-to-all, run at that of memory. A step is as slow as the rank with most visible pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

from .. import api
from ..call import arrays
from ..call.arguments import prepare
from ..call.checks import choice
from ..call.explanation import visible_pairs
from ..devices import profiles
from ..numeric import integer
from ..options import Options
from .collected import check_heads
from .passes import wide_of
from .placement import ORDERS, along, ranges_of
from .whole import Axes, Whole

METHODS = "ring", "heads", "gather"
AGREEMENTS = {"forward": 3, "backward": 2}
"""How often the ranks tell each other of errors and sizes, by two small messages each."""

BACKWARD = 2.5
"""Time of a backward pass, if a forward pass takes 1."""

ALL_RANKS = 16
"""Ranks up to which every rank and step is looked at; beyond, those at powers of two."""


@dataclass(frozen=True)
class Prediction:
    """What a distributed call costs. `str()` of it is a page of text.

    Attributes
    ----------
    problem : str
        What is computed, in words.
    ranks, method, order
        As asked for.
    share : list of float
        Of each step, the visible pairs of the busiest rank, as a part of all pairs.
    bytes : dict
        Of the "forward" and the "backward" pass: what a rank sends, in all.
    bandwidth_gbs : float or None
        Between devices, in 1e9 bytes/s; None if the profile has none.
    one_device : dict
        Seconds of each pass on one device, by the profile; None if it has no rates.
    seconds : dict
        Seconds of each pass on all ranks; None if one of the two is not known.
    efficiency : dict
        The time of one device over that of all ranks times their number.
    """

    problem: str
    ranks: int
    method: str
    order: str
    share: list[float]
    bytes: dict[str, int]
    bandwidth_gbs: float | None
    one_device: dict[str, Any]
    seconds: dict[str, Any]
    efficiency: dict[str, Any]

    def __str__(self) -> str:
        lines = [self.problem, f"  ranks      {self.ranks}, {self.method}, {self.order}"]
        most = max(self.share)
        lines.append(
            f"  steps      {len(self.share)}; the busiest rank has {100 * sum(self.share):.3g} % of the visible pairs, "
            f"{100 * most:.3g} % in its longest step"
        )
        known = f"{self.bandwidth_gbs:.3g} GB/s" if self.bandwidth_gbs else "not known: pass bandwidth_gbs="
        lines.append(f"  bandwidth  {known} between devices")
        for name in ("forward", "backward"):
            seconds, share = self.seconds[name], self.efficiency[name]
            time = "time not known" if seconds is None else f"{seconds:.3g} s, {100 * (share or 0):.3g} % of linear"
            lines.append(f"  {name:<10} {self.bytes[name]:.3g} bytes sent by a rank, {time}")
        return "\n".join(lines)


def predict(
    q: Any, k: Any, v: Any, *, ranks: int, method: str = "ring", order: str = "contiguous",
    bandwidth_gbs: float | None = None, memory_gbs: float | None = None, latency: float = 2e-5,
    seconds: dict[str, Any] | None = None, backend: str | None = None,
    **options: Unpack[Options],
) -> Prediction:  # fmt: skip
    """Predict the cost of a call of `Comm.attention` and its gradient.

    Parameters
    ----------
    q, k, v
        All tokens. Only shapes count: `numpy.broadcast_to(x, shape)` of one element can stand in for an array.
    ranks
        How many devices there are.
    method, order
        As for `Comm.attention`.
    bandwidth_gbs
        What a device sends at a time, in 1e9 bytes/s; by default that of the device's profile.
    memory_gbs
        At what rate partial results are merged; by default the bandwidth of main memory of the profile.
    latency
        Seconds until a small message has arrived.
    seconds
        Time of the "forward" and the "backward" pass on one device; by default that of `flashkit.explain`, and 2.5
        times as much.
    backend, **options
        As for `Comm.attention`.

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit.distributed import predict
    >>> q, k, v = (np.broadcast_to(np.float32(0), (1, heads, 1 << 20, 128)) for heads in (32, 8, 8))
    >>> found = predict(q, k, v, ranks=8, order="contiguous", causal=True, bandwidth_gbs=100, seconds={"forward": 8.0})
    >>> round(found.efficiency["forward"], 2), len(found.share)  # the last rank sees nearly all keys
    (0.53, 8)
    """
    ranks = integer("ranks", ranks, 1)
    choice("method", method, METHODS)
    choice("order", order, ORDERS)
    given: dict[str, Any] = {**options}
    axis = Axes.of(q, given).tokens
    whole = Whole(q, k, v, given, (q.shape[axis], k.shape[axis]), backend)
    found = api.explain(q, k, v, backend=backend, **options)
    profile = profiles.for_device("cuda" if arrays.kind_of(q) == "cupy" else "cpu")
    bandwidth_gbs = profile.interconnect_gbs if bandwidth_gbs is None else bandwidth_gbs
    memory_gbs = memory_gbs or profile.bandwidth_gbs
    one = {**seconds} if seconds else {"forward": found.predicted_seconds}
    one.setdefault("backward", None if one["forward"] is None else BACKWARD * one["forward"])
    share = [flops / found.flops["forward"] for flops in _busiest(whole, (q, k, v), order, ranks, method)]
    # Bytes of a rank's part: queries, outputs, keys with values, and their gradients in float32.
    wide = wide_of(q.dtype).itemsize
    of_q, of_out, of_kv = (n // ranks for n in (q.nbytes, q.nbytes // q.shape[-1] * v.shape[-1], k.nbytes + v.nbytes))
    of_dq, of_sums = (n // q.itemsize * wide for n in (of_q, of_kv))
    hops, away = len(share) - 1, ranks - 1

    def added(n: int) -> int:
        """Bytes read and written where partial results of n bytes in the dtype of q are added to sums."""
        return n // q.itemsize * (q.itemsize + 2 * wide)

    touched = {"forward": hops * added(of_out), "backward": len(share) * added(of_q + of_kv)}
    hidden: dict[str, list[int]] = {"forward": [0] * len(share), "backward": [0] * len(share)}
    if method == "ring":
        hidden = {"forward": [of_kv] * hops + [0], "backward": [of_kv + of_sums] * hops + [0]}
        open_ = {"forward": 0, "backward": of_sums * (hops > 0)}
        copied = {"forward": 0, "backward": hops * 3 * of_sums}  # what arrives is added
        exchanges = {"forward": 0, "backward": 1}
    elif method == "gather":
        open_ = {"forward": of_kv * away, "backward": (of_kv + of_sums) * away}
        exchanges = {"forward": 1, "backward": 2}
        copied = {"forward": 2 * of_kv * ranks, "backward": (2 * of_kv + 5 * of_sums) * ranks + away * added(of_kv)}
    else:
        of_kv, of_sums = (n * max(1, ranks // whole.heads_kv) for n in (of_kv, of_sums))  # copies
        exchanged = {"forward": of_q + of_kv + of_out, "backward": of_q + of_kv + 2 * of_out + of_dq + of_sums}
        open_ = {name: n * away // ranks for name, n in exchanged.items()}
        exchanges = {"forward": 2, "backward": 2}
        copied = {name: 4 * n for name, n in exchanged.items()}  # into messages, and out of them
    sent = {name: sum(hidden[name]) + open_[name] for name in open_}
    times: dict[str, Any] = dict.fromkeys(sent)
    if bandwidth_gbs:
        for name, alone in one.items():
            if alone is not None:
                moving = [latency * (n > 0) + n / bandwidth_gbs / 1e9 for n in hidden[name]]
                steps = sum(max(alone * part, moved) for part, moved in zip(share, moving, strict=True))
                steps += latency * ((2 * AGREEMENTS[name] + exchanges[name]) if ranks > 1 else 0)
                merging = (touched[name] + copied[name]) / memory_gbs / 1e9 if memory_gbs else 0.0
                times[name] = steps + merging + open_[name] / bandwidth_gbs / 1e9
    efficiency = {name: None if t is None else one[name] / t / ranks for name, t in times.items()}
    return Prediction(found.problem, ranks, method, order, share, sent, bandwidth_gbs, one, times, efficiency)


def _busiest(whole: Whole, tensors: Any, order: str, ranks: int, method: str) -> list[float]:
    """FLOPs of the busiest rank in each step of the forward pass, the last of which is not 0."""
    every = range(ranks)
    if ranks > ALL_RANKS:
        every = sorted({0, *(1 << n for n in range((ranks - 1).bit_length())), ranks - 1})  # type: ignore[assignment]
    queries, keys = ([ranges_of(order, n, rank, ranks) for rank in range(ranks)] for n in whole.tokens)
    if method == "heads":
        check_heads(whole, ranks)
        return [_flops(whole, tensors, [range(whole.tokens[0])], [range(whole.tokens[1])]) / ranks]
    if method == "gather":
        step = queries[0][0].step
        return [max(_flops(whole, tensors, queries[rank], [range(0, whole.tokens[1], step)]) for rank in every) * step]
    found: list[float] = []
    for step in range(ranks):
        if step in every:
            pairs = [(rank, (rank - step) % ranks) for rank in every]
            found.append(max(_flops(whole, tensors, queries[rank], keys[source]) for rank, source in pairs))
        else:
            found.append(found[-1])
    while len(found) > 1 and not found[-1]:
        found.pop()
    return found


def _flops(whole: Whole, tensors: Any, queries: list[range], keys: list[range]) -> float:
    """FLOPs of attention between these tokens."""
    total = 0.0
    for rows in queries:
        for each in keys:
            options = whole.chunk(rows, slice(rows.start, rows.stop, rows.step), each)  # bias has all rows here
            if options is not None:
                del options["backend"]
                parts = (along(x, whole.axes.tokens, where) for x, where in zip(tensors, (rows, each, each)))
                problem, operands, _ = prepare(*parts, described=True, **options)
                total += problem.flops("forward", visible_pairs(problem, arrays.operands_on_host(operands)))
    return total
