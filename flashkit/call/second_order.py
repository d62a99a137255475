"""The pull-back of a JVP: gradients of sum(dout * cotangent) + sum(dlse * cotangent), which second derivatives need.

It is computed from array operations on blocks of pairs, in memory linear in the number of tokens, on whatever library
the arrays are of. With x = scale q k^T, s = f(x) its modification, dx = scale (dq k^T + q dk^T), ds = f'(x) dx,
r = ds - E[ds], g and h the cotangents of dout and dlse, and z dropout's factor:

    B = z g v^T      t' = P (B - g . out + h)                    with respect to ds
    A = z g dv^T     s' = P (A - g . dout) + r t'                with respect to s
    x' = s' f'(x) + t' f''(x) dx      dx' = t' f'(x)
    q' = scale (x' k + dx' dk)   k' = scale (x'^T q + dx'^T dq)   v' = (P r z)^T g

The derivative of the gradient of attention along a direction is the same, with the direction in place of the tangents:
second derivatives are symmetric.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..mods import codegen, dropout, expr
from ..spec import Operands, Problem
from . import arrays
from .call import Call
from .planned import Once
from .tangents import own_tangents, prepared_with

_PAIRS = 1 << 21  # that are computed at once, over the heads of a batch entry


def second_order(
    q: Any, k: Any, v: Any, tangents: dict[str, Any], dout: Any, dlse: Any = None, *, backend: str | None = None,
    **options: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The gradients by q, k, v of sum(dout * T[out]) + sum(dlse * T[lse]); T[.]: along `tangents`. dlse: None for 0."""
    if options.get("page_table") is not None:
        raise UnsupportedError("second derivatives do not take page_table: keys in pages have no gradients")
    with Call("second_order", q, k, v, options) as call:
        if call.foreign is not None:
            tangents = call.foreign.to_native(**tangents)
            dout, dlse = call.foreign.to_native(dout=dout, dlse=dlse).values()
        prepared = prepared_with(call, own_tangents(call, tangents))
        Once(prepared, backend, True).run(call)
        problem, operands, shape = prepared
        found = _pull_back(
            problem, operands, shape.to_four(dout), None if dlse is None else dlse.reshape(operands.lse.shape)
        )
        own = [shape.like(x) for x in found]
        for adapter in reversed(call.adapters):
            own = [adapter.from_native(f"d{name}", x) for name, x in zip("qkv", own)]
        return own[0], own[1], own[2]


def _pull_back(problem: Problem, op: Operands, g: Any, h: Any) -> tuple[Any, Any, Any]:
    """The gradients in the axes of backends. op: after the pass with tangents."""
    xp: Any = arrays.namespace(problem.array_kind)
    wide = op.lse.dtype
    results = [xp.zeros(x.shape, wide) for x in (op.q, op.k, op.v)]
    lengths, offsets = arrays.on_host(op.kv_lengths), arrays.on_host(op.q_offset)
    starts: Any = None
    if op.cu_seqlens is not None:
        starts = [arrays.on_host(x) for x in op.cu_seqlens]
    tangents: Any = op.tangents
    heads = op.q.shape[1]
    by_row: list[Any] = [op.q, tangents.q, g, op.out, tangents.out, op.lse, tangents.lse, h, results[0]]
    by_key: list[Any] = [op.k, op.v, tangents.k, tangents.v, *results[1:]]
    for b, n_k in enumerate(lengths.tolist()):
        entry, rows, keys = b, slice(None), slice(0, n_k)
        if starts is not None:
            entry, rows = 0, slice(int(starts[0][b]), int(starts[0][b + 1]))
            keys = slice(int(starts[1][b]), int(starts[1][b]) + n_k)
        own_rows: list[Any] = [None if x is None else x[entry, :, rows] for x in by_row]
        own_keys: list[Any] = [None if x is None else x[entry, :, keys] for x in by_key]
        n_q = own_rows[0].shape[1]
        size = max(16, int((_PAIRS / max(heads, 1)) ** 0.5))
        for row0 in range(0, n_q, size):
            of_rows = [None if x is None else x[:, row0 : row0 + size] for x in own_rows]
            for k0 in range(0, n_k, size):
                of_keys = [None if x is None else x[:, k0 : k0 + size] for x in own_keys]
                _block(xp, problem, op, b, (row0, int(offsets[b]) + row0, k0), of_rows, of_keys)
    dq, dk, dv = (x.astype(op.q.dtype, copy=False) for x in results)
    return dq, dk, dv


def _block(
    xp: Any, problem: Problem, op: Operands, b: int, first: tuple[int, int, int], of_rows: list[Any], of_keys: list[Any]
) -> None:
    """Add what a block of pairs adds. first: row, its position, and key."""
    spec, wide = problem.spec, op.lse.dtype
    group, heads_kv = spec.group, of_keys[0].shape[0]
    row0, position, k0 = first

    def by_group(x: Any) -> Any:
        """(Hkv, group, rows, ..), so that keys broadcast."""
        return None if x is None else x.astype(wide, copy=False).reshape((heads_kv, group, *x.shape[1:]))

    q, tq, g, out, dout, lse, mean, h = map(by_group, of_rows[:-1])
    tensors: list[Any] = [None if x is None else x.astype(wide, copy=False)[:, None] for x in of_keys[:4]]
    k, v, tk, tv = tensors
    n_q, n_k = q.shape[2], k.shape[2]
    scale = wide.type(op.scale)
    x = scale * (q @ k.swapaxes(-1, -2))
    dx = xp.zeros(x.shape, wide)
    if tq is not None:
        dx += scale * (tq @ k.swapaxes(-1, -2))
    if tk is not None:
        dx += scale * (q @ tk.swapaxes(-1, -2))
    row = xp.arange(n_q)[:, None]
    heads = xp.arange(heads_kv * group).reshape((heads_kv, group, 1, 1))
    env = {
        "s": x, "b": b, "h": heads, "row": row0 + row, "q": position + row, "k": k0 + xp.arange(n_k), **op.params,
        **op.arrays,
    }  # fmt: skip
    s, slope, curve = x, None, None
    if spec.score is not None:
        first_derivative = expr.derivative(spec.score)
        s, slope, curve = (
            codegen.evaluate(graph, env, wide)
            for graph in (spec.score, first_derivative, expr.derivative(first_derivative))
        )
    lse = lse[..., None]
    p = xp.exp(s - xp.where(lse == -np.inf, wide.type(0), lse))
    visible = s != -np.inf
    if spec.mask is not None:
        visible = visible & codegen.evaluate(spec.mask, env, wide)
    p = xp.where(visible, p, wide.type(0))
    kept = wide.type(1)
    if op.dropout_p:
        index = np.arange(heads_kv * group).reshape((heads_kv, group, 1, 1))
        keep = dropout.keep(op.seed, op.dropout_p, b, index, row0 + np.arange(n_q)[:, None], k0 + np.arange(n_k))
        kept = xp.asarray(keep / (1 - op.dropout_p), wide)

    def of_row(y: Any) -> Any:
        return y.sum(-1, keepdims=True)

    ds = dx if slope is None else dx * slope
    r = ds - mean[..., None]
    t_bar = kept * (g @ v.swapaxes(-1, -2)) - of_row(g * out)
    if h is not None:
        t_bar += h[..., None]
    a = -of_row(g * dout) if tv is None else kept * (g @ tv.swapaxes(-1, -2)) - of_row(g * dout)
    # A pair without a weight adds nothing, whatever its key and value hold.
    t_bar, s_bar, weight = (xp.where(p != 0, y, wide.type(0)) for y in (p * t_bar, p * (a + r * t_bar), p * r * kept))
    if slope is not None:
        s_bar, t_bar = s_bar * slope + t_bar * curve * dx, t_bar * slope
        s_bar, t_bar = (xp.where(p != 0, y, wide.type(0)) for y in (s_bar, t_bar))
    s_bar, t_bar = s_bar * scale, t_bar * scale
    dq, dk, dv = of_rows[-1], of_keys[4], of_keys[5]
    q_bar = s_bar @ k if tk is None else s_bar @ k + t_bar @ tk
    k_bar = s_bar.swapaxes(-1, -2) @ q
    if tq is not None:
        k_bar += t_bar.swapaxes(-1, -2) @ tq
    dq += q_bar.reshape(dq.shape)
    dk += k_bar.sum(1)
    dv += (weight.swapaxes(-1, -2) @ g).sum(1)
