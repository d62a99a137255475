"""The ONNX operator `Attention` (opsets 23 to 25) as a function of a node's inputs and attributes.

    from flashkit.onnx import attention

Nothing of ONNX is imported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from . import api
from .call import arrays
from .call.arguments import prepare
from .call.compose import modified
from .call.sequences import integers_of
from .errors import shown
from .numeric import integer, number

__all__ = ["Outputs", "attention"]

SOFTMAX_PRECISIONS = {None: None, 1: None, 10: None, 16: None, 11: "float64"}
"""onnx.TensorProto's FLOAT, FLOAT16, BFLOAT16 and DOUBLE: what inputs are converted to. The softmax is at least
float32 regardless."""


class Outputs(NamedTuple):
    """The outputs of a node, in their order.

    Attributes
    ----------
    Y : array
        The result, with as many axes as Q and of its dtype.
    present_key, present_value : array
        (batch, kv_num_heads, past + new tokens, head size). Views of K and V if there is no past.
    qk_matmul_output : array or None
        (batch, q_num_heads, queries, total keys), of Q's dtype; None if no mode was given.
    """

    Y: Any
    present_key: Any
    present_value: Any
    qk_matmul_output: Any


def attention(
    Q: Any, K: Any, V: Any, attn_mask: Any = None, past_key: Any = None, past_value: Any = None,
    nonpad_kv_seqlen: Any = None, *, is_causal: int = 0, kv_num_heads: int | None = None,
    q_num_heads: int | None = None, qk_matmul_output_mode: int | None = None, scale: float | None = None,
    softcap: float = 0.0, softmax_precision: int | None = None, left_window_size: int = -1,
    right_window_size: int = -1, backend: str | None = None,
) -> Outputs:  # fmt: skip
    """Compute a node of ONNX's `Attention` on NumPy or CuPy arrays. Names are those of the operator.

    Parameters
    ----------
    Q, K, V
        (batch, heads, tokens, head size), or (batch, tokens, heads * head size) with q_num_heads and kv_num_heads.
    attn_mask
        Bool, True = attend, or floating, added to the scores. It broadcasts to (batch, q_num_heads, queries, total
        keys). Keys beyond its last axis are masked.
    past_key, past_value
        (batch, kv_num_heads, past tokens, head size): keys and values before K and V.
    nonpad_kv_seqlen
        (batch,) integers: numbers of keys that are no padding. Not together with past_key.
    is_causal
        1: query i sees key j iff j <= i + offset. The offset is the number of past tokens, or nonpad_kv_seqlen -
        queries, or 0.
    kv_num_heads, q_num_heads
        Numbers of heads.
    qk_matmul_output_mode
        What qk_matmul_output is: 0 the scaled scores, 1 after softcap, 2 after the masks too, 3 the weights. None: it
        is not computed. It takes quadratic memory, and nothing else here does. (In mode 0 ONNX's reference evaluator
        gives the scores after softcap.)
    scale
        Factor on the scores, 1 / sqrt(head size) by default.
    softcap
        Scores become softcap * tanh(score / softcap), before the masks. 0: they stay.
    softmax_precision
        An onnx.TensorProto.DataType. The softmax is computed in float32, or float64 for float64 inputs; with DOUBLE
        everything is computed in float64.
    left_window_size, right_window_size
        Opset 25: query i sees keys from i + offset - left to i + offset + right. -1 is no bound.
    backend
        As for `flashkit.attention`.

    Returns
    -------
    Outputs
        (Y, present_key, present_value, qk_matmul_output).

    Notes
    -----
    A row without a visible key is 0 in Y and in the weights, as the operator says since ONNX 1.23.

    References
    ----------
    ONNX, Attention-25, https://onnx.ai/onnx/operators/onnx__Attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from flashkit.onnx import attention
    >>> x = np.random.default_rng(0).standard_normal((2, 10, 4 * 16), dtype=np.float32)
    >>> outputs = attention(x, x, x, is_causal=1, q_num_heads=4, kv_num_heads=4)
    >>> outputs.Y.shape, outputs.present_key.shape
    ((2, 10, 64), (2, 4, 10, 16))
    """
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        arrays.require(name, x)
        if x.ndim not in (3, 4) or x.ndim != Q.ndim:
            raise ValueError(f"{name}: expected three or four axes, as many as Q has, got shape {x.shape}")
    if (past_key is None) != (past_value is None):
        raise ValueError("expected past_key and past_value together or neither")
    if nonpad_kv_seqlen is not None and past_key is not None:
        raise ValueError("expected nonpad_kv_seqlen, for caches outside the node, or past_key and past_value, not both")
    if isinstance(softmax_precision, bool) or softmax_precision not in SOFTMAX_PRECISIONS:
        known = "1 (FLOAT), 10 (FLOAT16), 11 (DOUBLE) or 16 (BFLOAT16)"
        raise ValueError(f"softmax_precision: expected {known}, got {shown(softmax_precision)}")
    if qk_matmul_output_mode is not None:
        qk_matmul_output_mode = integer("qk_matmul_output_mode", qk_matmul_output_mode, 0, 3)
    is_causal = integer("is_causal", int(is_causal) if isinstance(is_causal, bool) else is_causal, 0, 1)
    softcap = number("softcap", softcap)

    q = _heads_of("Q", Q, "q_num_heads", q_num_heads)
    present_key, present_value = (_heads_of(name, x, "kv_num_heads", kv_num_heads) for name, x in (("K", K), ("V", V)))
    offset: Any = 0
    lengths: Any = None
    if past_key is not None:
        present_key = _appended("past_key", past_key, present_key)
        present_value = _appended("past_value", past_value, present_value)
        offset = past_key.shape[2]
    elif nonpad_kv_seqlen is not None:
        what = "integers (batch,)"
        lengths = integers_of("nonpad_kv_seqlen", nonpad_kv_seqlen, str(arrays.kind_of(Q)), what)[0].astype("int64")
        offset = lengths - q.shape[2]

    total = present_key.shape[2]
    keys = total
    if attn_mask is not None:
        arrays.require("attn_mask", attn_mask)
        if not attn_mask.ndim or attn_mask.shape[-1] > total:
            raise ValueError(f"attn_mask: expected a last axis of up to {total}, the keys, got shape {attn_mask.shape}")
        keys = attn_mask.shape[-1]
        lengths = None if lengths is None else lengths.clip(None, keys)
    sizes = {"left_window_size": left_window_size, "right_window_size": right_window_size}
    window = tuple(None if (n := integer(name, size, -1)) == -1 else n for name, size in sizes.items())
    options: dict[str, Any] = dict(
        scale=scale, causal=bool(is_causal), q_offset=offset, window=None if window == (None, None) else window,
        softcap=softcap or None, mask=attn_mask, kv_lengths=lengths, backend=backend,
    )  # fmt: skip
    wide = SOFTMAX_PRECISIONS[softmax_precision]
    tensors = [x if wide is None else x.astype(wide) for x in (q, present_key[:, :, :keys], present_value[:, :, :keys])]
    if Q.ndim == 3:  # the result in the order of Q's axes
        tensors = [x.swapaxes(1, 2) for x in tensors]
    layout: Any = "bnhd" if Q.ndim == 3 else "bhnd"
    out, lse = api.attention(tensors[0], tensors[1], tensors[2], layout=layout, return_lse=True, **options)
    scores = None
    if qk_matmul_output_mode is not None:
        scores = _scores(qk_matmul_output_mode, q, present_key, lse, **options)
    out = out.reshape((*out.shape[:2], -1)) if Q.ndim == 3 else out
    return Outputs(out.astype(Q.dtype, copy=False), present_key, present_value, scores)


def _heads_of(name: str, x: Any, attribute: str, heads: int | None) -> Any:
    """An input as (batch, heads, tokens, head size), a view."""
    if x.ndim == 4:
        if heads is not None and integer(attribute, heads, 0) != x.shape[1]:
            expected = f"{x.shape[1]} or None for {name} of shape {x.shape}"
            raise ValueError(f"{attribute}: expected {expected}, got {shown(heads)}")
        return x
    if heads is None or x.shape[2] % (heads := integer(attribute, heads, 1)):
        raise ValueError(
            f"{attribute}: expected a divisor of the last axis of {name}, of shape {x.shape}, got {shown(heads)}"
        )
    return x.reshape((*x.shape[:2], heads, x.shape[2] // heads)).swapaxes(1, 2)


def _appended(name: str, past: Any, new: Any) -> Any:
    kind = arrays.require(name, past, arrays.kind_of(new))
    if past.ndim != 4 or past.dtype != new.dtype or (past.shape[:2], past.shape[3]) != (new.shape[:2], new.shape[3]):
        batch, heads, _, size = new.shape
        raise ValueError(
            f"{name}: expected shape ({batch}, {heads}, past tokens, {size}) and dtype {new.dtype}, got shape "
            f"{past.shape} and dtype {past.dtype}"
        )
    return arrays.namespace(kind).concatenate((past, new), axis=2)


def _scores(mode: int, q: Any, k: Any, lse: Any, backend: str | None, **options: Any) -> Any:
    """qk_matmul_output: (batch, heads, queries, keys)."""
    masked, wide, n_k = mode >= 2, lse.dtype, k.shape[2]
    if masked and options["mask"] is not None:
        n_k = options["mask"].shape[-1]
    taken = options if masked else {name: options[name] for name in ("scale", "softcap")[: mode + 1]}
    problem, operands, _ = prepare(q, k[:, :, :n_k], k[:, :, :n_k], **taken)
    xp: Any = arrays.namespace(problem.array_kind)
    result = xp.full((*q.shape[:3], k.shape[2]), 0 if mode == 3 else -xp.inf, wide)
    for b in range(len(q)):
        keys = k[b, :, :n_k].astype(wide).repeat(problem.spec.group, axis=0).swapaxes(-1, -2)
        scores, visible = modified(problem.spec, operands, b, operands.scale * xp.matmul(q[b].astype(wide), keys))
        if mode == 3:
            scores = xp.exp(scores - xp.where(lse[b] == -xp.inf, 0, lse[b])[..., None])
        result[b, :, :, :n_k] = xp.where(visible, scores, result[b, :, :, :n_k])
    return result.astype(q.dtype, copy=False)
