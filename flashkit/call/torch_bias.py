"""The gradient of a bias, by PyTorch's own operations: no backend computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..mods import dropout
from .shape import Shape


def bias_gradient(
    shape: Shape, dout: Any, dlse: Any, out: Any, lse: Any, q: Any, k: Any, v: Any, options: dict[str, Any]
) -> Any:
    """dS of the backward pass, summed to the bias: as large as the scores of one batch entry, and of the bias itself.

    Dao, "FlashAttention-2", 2023, arXiv 2307.08691, Algorithm 2: P = exp(S - lse), dS = P * (dP - delta).
    """
    wide, bias = lse.dtype, options["bias"]
    q, k, v, out, dout = (shape.four_axes(x).to(wide) for x in (q, k, v, out, dout))
    (batch, heads, n_q, d), (heads_k, n_k) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(heads // max(heads_k, 1), 1) for x in (k, v))
    lse = lse.reshape(batch, heads, n_q, 1)
    delta = (dout * out).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape)
    lengths = torch.tensor(n_k) if options["kv_lengths"] is None else options["kv_lengths"]
    offsets = options["q_offsets"] if options["q_offset"] is None else torch.tensor(options["q_offset"])
    offsets = lengths - n_q if offsets is None else offsets
    lengths, offsets = (x.to(q.device).reshape(-1).expand(batch) for x in (lengths, offsets))
    keys = torch.arange(n_k, device=q.device)
    scale = d**-0.5 if options["scale"] is None else options["scale"]

    def part_of(x: Any, b: int) -> Any:
        """The view of a bias or mask, which broadcasts, for a batch entry."""
        axes = x.shape[: max(x.dim() - 3, 0)]
        place = np.unravel_index(b, shape.batch)[len(shape.batch) - len(axes) :] if axes else ()
        return x[tuple(int(i) if n > 1 else 0 for i, n in zip(place, axes, strict=True))]

    total = torch.zeros((), dtype=wide, device=q.device).expand(bias.shape).clone()
    for b in range(batch):
        at = torch.arange(n_q, device=q.device)[:, None] + offsets[b]
        visible = (keys < lengths[b]).expand(n_q, n_k)
        if options["causal"]:
            visible = visible & (keys <= at)
        if options["window_left"] is not None:
            visible = visible & (keys >= at - options["window_left"])
        if options["window_right"] is not None:
            visible = visible & (keys <= at + options["window_right"])
        if options["mask"] is not None:
            visible = visible & part_of(options["mask"], b)
        s = scale * (q[b] @ k[b].mT)
        if options["softcap"] is not None:
            s = options["softcap"] * torch.tanh(s / options["softcap"])
        if options["alibi_slopes"] is not None:
            slopes = options["alibi_slopes"].to(wide).reshape(-1, heads).expand(batch, heads)[b]
            s = s - slopes[:, None, None] * (at - keys).abs()
        s = s + part_of(bias, b).to(wide)
        dp = dout[b] @ v[b].mT
        if options["dropout_p"]:
            kept = dropout.keep(
                int(options["seed"]), options["dropout_p"], b, np.arange(heads)[:, None, None], np.arange(n_q)[:, None],
                np.arange(n_k),
            )  # fmt: skip
            dp = torch.from_numpy(kept).to(q.device) * dp / (1 - options["dropout_p"])
        ds = torch.where(visible & lse[b].isfinite(), torch.exp(s - lse[b]) * (dp - delta[b]), 0)
        part = part_of(total, b)
        part += ds.sum_to_size(part.shape) if part.dim() == 3 else ds.sum(0).sum_to_size(part.shape)
    return total.to(bias.dtype)
