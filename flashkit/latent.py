"""`mla`: multi-head latent attention, with the latent and the rotary columns of the keys in two arrays."""

from __future__ import annotations

from typing import Any

from .api import attention
from .call import arrays, interop
from .call.arguments import Memory, prepare
from .call.call import Call
from .call.checks import choice
from .call.planned import Once
from .call.shape import LAYOUTS
from .numeric import number
from .spec import MAX_HEAD_DIM


def mla(
    q_nope: Any, q_pe: Any, ckv: Any, k_pe: Any, *, scale: float, return_lse: bool = False, out: Any = None,
    backend: str | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Multi-head latent attention (DeepSeek's MLA) in its absorbed form: all heads share one latent vector of a token.

    softmax(scale * (q_nope ckv^T + q_pe k_pe^T), modified and masked) ckv. It is `attention` with one key/value head,
    the keys [ckv, k_pe] and the values ckv.

    Parameters
    ----------
    q_nope
        (..., H, Nq, C): queries without position, multiplied by W_UK. C is 512 in DeepSeek's models.
    q_pe
        (..., H, Nq, R): queries with rotary position. R is 64 there.
    ckv
        (..., Nk, C): the latent vectors, without an axis of heads.
    k_pe
        (..., Nk, R): keys with rotary position, which all heads share. C + R is at most 1024.
    scale
        Factor on the scores. There is no default, because it does not follow from C and R: it is 1 / sqrt(128 + 64) in
        DeepSeek's models, of the head dims before W_UK is absorbed, times the square of YaRN's mscale.
    return_lse, out, backend
        As for `attention`; out is (..., H, Nq, C).
    **options
        The other arguments of `attention`. With cu_seqlens q_nope is (T, H, C) and ckv (Tk, C). With page_table ckv is
        (pages, page, C), and k_pe (pages, page, R).

    Returns
    -------
    array or (array, array)
        What `attention` returns: out (..., H, Nq, C), to be multiplied by W_UV, or (out, lse).

    Raises
    ------
    flashkit.UnsupportedError
        No backend can compute it. On GPUs C is at most 512 and C + R at most 576, as in DeepSeek's models.

    Notes
    -----
    Where ckv and k_pe are views of one array, `c[..., :C]` and `c[..., C:]`, keys and values are that array. Otherwise,
    with NumPy, decoding reads both in place, and other calls gather tiles of keys; arrays of CuPy are concatenated, a
    copy of the keys in each call. Queries are concatenated always.

    Gradients: `attention_vjp` of k = [ckv, k_pe] and v = k[..., :C], with the gradient dk[..., :C] + dv of ckv.

    References
    ----------
    DeepSeek-AI, "DeepSeek-V2", 2024, arXiv 2405.04434, section 2.1.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> rng = np.random.default_rng(0)
    >>> q_nope, q_pe = rng.standard_normal((2, 16, 1, 512)), rng.standard_normal((2, 16, 1, 64))
    >>> ckv, k_pe = rng.standard_normal((2, 100, 512)), rng.standard_normal((2, 100, 64))
    >>> flashkit.mla(q_nope, q_pe, ckv, k_pe, scale=(128 + 64) ** -0.5, causal=True).shape
    (2, 16, 1, 512)
    """
    adapter = interop.adapter_of(q_nope)
    with adapter.scope():
        native = adapter.to_native(q_nope=q_nope, q_pe=q_pe, ckv=ckv, k_pe=k_pe, out=out, **options)
        q_nope, q_pe, ckv, k_pe, own_out = (native.pop(name) for name in ("q_nope", "q_pe", "ckv", "k_pe", "out"))
        attended = _mla(q_nope, q_pe, ckv, k_pe, scale, return_lse, own_out, backend, native)
        result, *lse = attended if return_lse else (attended,)
        result = adapter.from_native("out", result) if out is None else out
        return (result, adapter.from_native("lse", *lse)) if return_lse else result


def _mla(
    q_nope: Any, q_pe: Any, ckv: Any, k_pe: Any, scale: Any, return_lse: bool, out: Any, backend: str | None,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """`mla` of arrays of NumPy or CuPy."""
    layout = options.get("layout", "bhnd")
    named = ("q_nope", q_nope), ("q_pe", q_pe), ("ckv", ckv), ("k_pe", k_pe)
    q_nope, q_pe, ckv, k_pe = (arrays.own_form(name, array) for name, array in named)
    kind = _checked(q_nope, q_pe, ckv, k_pe, layout)
    options["scale"] = number("scale", scale)
    # The axis of heads, of length 1.
    tokens_first = layout == "bnhd" or options.get("cu_seqlens") is not None or options.get("page_table") is not None
    ckv, k_pe = (x[..., None, :] if tokens_first else x[..., None, :, :] for x in (ckv, k_pe))
    xp: Any = arrays.namespace(kind)
    q, latent = xp.concatenate([q_nope, q_pe], axis=-1), ckv.shape[-1]
    if _is_one_array(ckv, k_pe):
        k = xp.lib.stride_tricks.as_strided(ckv, (*ckv.shape[:-1], q.shape[-1]), ckv.strides)
    elif kind == "numpy":
        with Call("mla", q, ckv, ckv, options, out) as call:
            prepared = prepare(q, ckv, ckv, out=out, memory=Memory(k_pe=k_pe), **call.options)
            return Once(prepared, backend, return_lse).run(call)
    else:
        k = xp.concatenate([ckv, k_pe], axis=-1)
    return attention(q, k, k[..., :latent], return_lse=return_lse, out=out, backend=backend, **options)


def _checked(q_nope: Any, q_pe: Any, ckv: Any, k_pe: Any, layout: Any) -> str:
    """The kind of the arrays; an error if their shapes or dtypes disagree. `prepare` checks the rest."""
    choice("layout", layout, LAYOUTS)
    named = {"q_nope": q_nope, "q_pe": q_pe, "ckv": ckv, "k_pe": k_pe}
    kind = arrays.require("q_nope", q_nope)
    for name, array in named.items():
        arrays.require(name, array, kind)
        if arrays.dtype_name(name, array) != q_nope.dtype.name:
            raise TypeError(f"{name}: expected dtype {q_nope.dtype} (q_nope's), got {array.dtype}")
    if q_nope.ndim < 3:
        raise ValueError(f"q_nope: expected shape (..., heads, tokens, C), got {q_nope.shape}")
    for name, first in (("q_pe", "q_nope"), ("k_pe", "ckv")):
        if named[name].ndim < 2 or named[name].shape[:-1] != named[first].shape[:-1]:
            expected = f"two axes or more, those of {first} {named[first].shape} but for the last"
            raise ValueError(f"{name}: expected {expected}, got shape {named[name].shape}")
    for name, like in (("ckv", "q_nope"), ("k_pe", "q_pe")):
        if not named[name].shape[-1] == named[like].shape[-1] > 0:
            expected = f"the last axis of {like} {named[like].shape}, 1 or more"
            raise ValueError(f"{name}: expected {expected}, got shape {named[name].shape}")
    if (total := ckv.shape[-1] + k_pe.shape[-1]) > MAX_HEAD_DIM:
        raise ValueError(f"ckv, k_pe: expected 2 to {MAX_HEAD_DIM} columns in all, got {total}")
    return kind


def _is_one_array(ckv: Any, k_pe: Any) -> bool:
    """Whether a row of k_pe follows each row of ckv in memory."""
    size = ckv.dtype.itemsize
    contiguous = ckv.strides[-1] == k_pe.strides[-1] == size
    distance = arrays.address(k_pe) - arrays.address(ckv)
    return contiguous and ckv.strides == k_pe.strides and distance == ckv.shape[-1] * size
