"""flashkit in PyTorch: differentiable attention that `torch.compile` takes whole.

    from flashkit.torch import attention, flex_attention, scaled_dot_product_attention

Two functions compute the forward and the backward pass on tensors of CPUs and CUDA devices, without a copy
(`call/torch_passes.py`); an autograd.Function around them records the derivative (`call/torch_autograd.py`). They are
called directly on plain tensors. Whatever looks at operators (`torch.compile`, transforms, modes, profilers) sees them
as two operators of torch.library (`call/torch_operators.py`). Operators cannot take functions, so they get
modifications as text and tensors (`call/torch_mods.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from .call.quantized import Quantized
from .call.torch_autograd import call, check_differentiable, recorded_call
from .call.torch_mods import Mods
from .call.torch_passes import TENSORS, Tensors
from .numeric import number

__all__ = ["Mods", "attention", "flex_attention", "scaled_dot_product_attention"]


# --- functions --------------------------------------------------------------------------------------------------------


def attention(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, q_offset: Any = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    bias: Any = None, mask: Any = None, block_mask: Any = None, score_mod: Any = None, mask_mod: Any = None,
    mods: Mods | None = None, kv_lengths: Any = None, q_lengths: Any = None, cu_seqlens: Any = None,
    page_table: Any = None, dropout_p: float = 0.0, seed: Any = None, sinks: Any = None,
    layout: str = "bhnd", return_lse: bool = False, deterministic: bool = False, precision: str | None = None,
    backend: str | None = None,
) -> Any:  # fmt: skip
    """`flashkit.attention` of tensors, differentiable by q, k, v, sinks, bias, a floating mask and the scale.

    Parameters
    ----------
    q, k, v
        As for `flashkit.attention`. Under autocast q, k and v are converted to its dtype.
    scale
        As for `flashkit.attention`, or a tensor of one element, which is multiplied into q and has a gradient.
    causal, q_offset, window, softcap, alibi_slopes, bias, mask
        As for `flashkit.attention`.
    kv_lengths, q_lengths, cu_seqlens, page_table, dropout_p, sinks, layout
        As for `flashkit.attention`.
    return_lse, deterministic, precision, backend
        As for `flashkit.attention`; torch.use_deterministic_algorithms asks for deterministic results, too.
    block_mask, score_mod, mask_mod
        As for `flashkit.attention`, or as `Mods` takes them. In a compiled function pass `mods` instead.
    mods
        Modifications and a block mask made before.
    seed
        An integer, or a tensor of one. By default drawn from PyTorch's generator on the CPU.

    Returns
    -------
    out : torch.Tensor
        (..., Hq, Nq, Dv), of q's dtype, in q's layout.
    lse : torch.Tensor
        If return_lse: (..., Hq, Nq), float32 or float64. It is differentiable.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit. The message names it, what came and what would fit.
    NotImplementedError
        No backend can compute it, or a gradient is asked for that there is none of: that of `alibi_slopes`, `softcap`,
        `dropout_p` or a tensor that a modification uses, and that of a bias beside modifications.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import attention
    >>> q, k, v = (torch.randn(1, 8, 64, 32, requires_grad=True) for _ in range(3))
    >>> attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 8, 64, 32])
    """
    if score_mod is not None or mask_mod is not None or block_mask is not None:
        if mods is not None:
            raise TypeError("mods are given beside score_mod, mask_mod or block_mask; one of the two ways fits")
        if torch.compiler.is_compiling():
            raise TypeError(
                "score_mod, mask_mod or block_mask in a compiled function; make flashkit.torch.Mods(...) of them "
                "outside and pass it as mods="
            )
        mods = Mods.of_call(score_mod, mask_mod, block_mask)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, torch.Tensor))
        fits = "flashkit.attention takes it" if isinstance(x, Quantized) else "torch.from_numpy makes one"
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor fits here ({fits})")
    if isinstance(scale, torch.Tensor):
        q, scale = _scaled(q, scale), 1.0
    if isinstance(softcap, torch.Tensor):
        softcap = _number("softcap", softcap)
    if isinstance(dropout_p, torch.Tensor):
        dropout_p = _number("dropout_p", dropout_p)
    elif type(dropout_p) not in (float, int):
        dropout_p = number("dropout_p", dropout_p)
    if precision == "fp8":
        raise ValueError("precision is 'fp8', which flashkit.attention takes; None, 'highest' or 'tf32' fits here")
    if mask is not None and mask.is_floating_point():
        bias, mask = mask if bias is None else bias + mask, None
    offsets = None
    if q_offset is not None and isinstance(q_offset, torch.Tensor):
        offsets, q_offset = q_offset, None
    if not dropout_p:
        seed = None
    elif not isinstance(seed, torch.Tensor):
        seed = torch.randint(2**62, ()) if seed is None else torch.tensor(seed)
    left, right = (None, None) if window is None else window
    device = "cuda" if q.is_cuda else q.device.type
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    cu_q, cu_k = cu_seqlens if isinstance(cu_seqlens, tuple) else (cu_seqlens, None)
    given = bias, mask, alibi_slopes, sinks, kv_lengths, offsets, seed, q_lengths, cu_q, cu_k, page_table
    tensors: Tensors = {}
    if not (bias is mask is alibi_slopes is sinks is kv_lengths is offsets is seed is q_lengths is cu_q is cu_k
            is page_table is None):  # fmt: skip
        tensors = {name: x for name, x in zip(TENSORS, given, strict=True) if x is not None}
    options = scale, causal, q_offset, left, right, softcap, dropout_p, layout, deterministic, precision, backend
    # What a transform of torch.func differentiates by may not say so through the wrappers of other transforms.
    if torch.is_grad_enabled() and (
        torch._C._are_functorch_transforms_active() or q.requires_grad or k.requires_grad or v.requires_grad
        or (sinks is not None and sinks.requires_grad) or (bias is not None and bias.requires_grad)
        or (alibi_slopes is not None and alibi_slopes.requires_grad) or (mods is not None and mods.requires_grad)
    ):  # fmt: skip
        if (bias is not None or alibi_slopes is not None or mods is not None):
            check_differentiable(
                bias is not None and bias.requires_grad, alibi_slopes is not None and alibi_slopes.requires_grad,
                mods is not None, mods is not None and mods.requires_grad,
            )
        out, lse = recorded_call(q, k, v, tensors, options, mods)
    else:
        out, lse = call(return_lse, q, k, v, tensors, options, mods)
    return (out, lse) if return_lse else out


def _scaled(q: Any, scale: Any) -> Any:
    """q times a scale that is a tensor, of which autograd has the gradient and the host needs no copy."""
    if scale.numel() != 1 or not (scale.is_floating_point() or scale.dtype in _INTEGERS):
        raise TypeError(
            f"scale: expected a number, or a tensor of one, got a tensor of shape {tuple(scale.shape)} and "
            f"dtype {scale.dtype}"
        )
    return (q * scale.reshape(())).to(q.dtype)


_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})


def _number(name: str, x: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires grad, and has no gradient: pass {name}.detach()")
    return x.item()


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """torch.nn.functional.scaled_dot_product_attention, computed by flashkit.

    Parameters
    ----------
    query, key, value
        (..., Hq, Nq, D), (..., Hkv, Nk, D) and (..., Hkv, Nk, Dv). Batch axes broadcast.
    attn_mask
        Broadcasts to (..., Hq, Nq, Nk): bool, True = attend, or floating, added to the scores.
    dropout_p
        Probability of dropping a weight; pass 0 for evaluation.
    is_causal
        Query i sees keys 0 to i: top-left alignment, as in PyTorch.
    scale
        1 / sqrt(D) by default.
    enable_gqa
        Whether Hq may be a multiple of Hkv.

    Returns
    -------
    torch.Tensor
        (..., Hq, Nq, Dv). Rows without a visible key are 0.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; both attn_mask and is_causal.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True), expected, atol=1e-5)
    True
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask is given beside is_causal=True; one of them fits")
    shape = query.shape
    if len(shape) > 2 and not shape == key.shape == value.shape:
        batches = [x.shape[:-3] for x in (query, key, value)]
        if batches[0] != batches[1] or batches[1] != batches[2]:
            batch = torch.broadcast_shapes(*batches)
            query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
        if not enable_gqa and shape[-3] != key.shape[-3]:
            raise ValueError(
                f"query has {shape[-3]} heads, key {key.shape[-3]}; equal numbers fit, or enable_gqa=True"
            )
    return attention(
        query, key, value, mask=attn_mask, dropout_p=dropout_p, causal=is_causal, q_offset=0 if is_causal else None,
        scale=scale,
    )  # fmt: skip


def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, *, mods: Mods | None = None,
) -> Any:  # fmt: skip
    """torch.nn.attention.flex_attention.flex_attention, computed by flashkit, compiled or not.

    Parameters
    ----------
    query, key, value
        (B, Hq, Nq, D), (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).
    score_mod
        `score_mod(score, b, h, q_idx, kv_idx) -> score`, with PyTorch's operations; tensors that it indexes are read
        in place. Its derivative by the score is exact; these tensors have none, and must not require grad.
    block_mask
        Made by PyTorch's create_block_mask, or a flashkit.BlockMask.
    scale
        1 / sqrt(D) by default.
    enable_gqa
        Whether Hq may be a multiple of Hkv.
    return_lse
        Return (out, lse).
    mods
        Both modifications, made before, for compiled functions.

    Returns
    -------
    out : torch.Tensor
        (B, Hq, Nq, Dv).
    lse : torch.Tensor
        If return_lse: (B, Hq, Nq), natural logarithm.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit, or a function cannot be traced.

    References
    ----------
    Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024,
    arXiv 2412.05496.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import flex_attention
    >>> q, k, v = (torch.randn(1, 4, 16, 8) for _ in range(3))
    >>> slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    >>> flex_attention(q, k, v, lambda score, b, h, q, k: score - slopes[h] * torch.abs(q - k)).shape
    torch.Size([1, 4, 16, 8])
    """
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(
            f"query has {query.shape[-3]} heads, key {key.shape[-3]}; equal numbers fit, or enable_gqa=True"
        )
    return attention(
        query, key, value, score_mod=score_mod, block_mask=block_mask, mods=mods, scale=scale, q_offset=0,
        return_lse=return_lse,
    )  # fmt: skip
