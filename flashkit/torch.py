"""flashkit in PyTorch: differentiable attention that `torch.compile` takes whole.

    from flashkit.torch import Comm, attention, flex_attention, scaled_dot_product_attention

Two functions compute the forward and the backward pass on tensors of CPUs and CUDA devices, without a copy
(`call/torch_passes.py`); an autograd.Function around them records the derivative (`call/torch_autograd.py`). They are
called directly on plain tensors. Whatever looks at operators (`torch.compile`, transforms, modes, profilers) sees them
as two operators of torch.library (`call/torch_operators.py`). Operators cannot take functions, so they get
modifications as text and tensors (`call/torch_mods.py`).
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch.autograd import forward_ad

from .call.checks import sides_of
from .call.interop import is_dual
from .call.quantized import Quantized
from .call.torch_autograd import OfRanks, call, recorded_call
from .call.torch_mods import Mods
from .call.torch_passes import ARRAYS, NAMES, Scalars, Tensors
from .distributed import Comm as NativeComm
from .errors import shown
from .numeric import described, integer, number
from .options import DEFAULTS, NUMBERS, Options, closed, documented, misplaced, unknown, unknown_of

__all__ = ["Comm", "Mods", "attention", "flex_attention", "scaled_dot_product_attention"]


# --- functions --------------------------------------------------------------------------------------------------------


@documented()
def attention(
    q: Any = None, k: Any = None, v: Any = None, *more: Any, mods: Mods | None = None, return_lse: bool = False,
    backend: str | None = None, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """`flashkit.attention` of tensors, differentiable by q, k, v, sinks, bias, a floating mask, alibi_slopes, the scale
    and floating tensors that a score_mod uses.

    Parameters
    ----------
    q, k, v
        As for `flashkit.attention`. Under autocast q, k and v are converted to its dtype.
    mods
        Modifications and a block mask made before, for compiled functions.
    return_lse, backend
        As for `flashkit.attention`.
    {options}

    Returns
    -------
    out : torch.Tensor
        (..., Hq, Nq, Dv), of q's dtype, in q's layout.
    lse : torch.Tensor
        If return_lse: (..., Hq, Nq), float32 or float64. It is differentiable.

    Raises
    ------
    NotImplementedError
        No backend can compute it, or a gradient is requested that does not exist: that of a number other than `scale`
        and of a tensor that a mask_mod uses.

    Notes
    -----
    `scale` may be a tensor of one element, which is multiplied into q and has a gradient. `seed` may be a
    tensor of one integer, and is drawn from PyTorch's generator on the CPU by default. block_mask, score_mod and
    mask_mod may be as `Mods` takes them. torch.use_deterministic_algorithms asks for deterministic results, too.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import attention
    >>> q, k, v = (torch.randn(1, 8, 64, 32, requires_grad=True) for _ in range(3))
    >>> attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 8, 64, 32])
    """
    if v is None or more:
        raise misplaced("flashkit.torch.attention", more, options)
    if not DEFAULTS.keys() >= options.keys():
        raise unknown("flashkit.torch.attention", [n for n in options if n not in DEFAULTS], (*DEFAULTS, "mods"))
    if mods is not None and not isinstance(mods, Mods):
        raise TypeError(f"mods: expected a flashkit.torch.Mods, got {shown(mods)}")
    functions = tuple(map(options.get, FUNCTIONS))
    if functions != (None, None, None):
        if mods is not None:
            raise TypeError("expected mods, or score_mod, mask_mod and block_mask, not both")
        if torch.compiler.is_compiling():
            raise TypeError(
                "expected mods= in a compiled function instead of score_mod, mask_mod or block_mask: make "
                "flashkit.torch.Mods(...) of them outside"
            )
        mods = Mods.of_call(*functions)
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, torch.Tensor))
        remedy = "use flashkit.attention" if isinstance(x, Quantized) else "pass torch.from_numpy(x)"
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}; {remedy}")
    q, tensors, values = _arguments(q, options, backend)
    device = "cuda" if q.is_cuda else q.device.type
    if device not in ("cpu", "cuda"):
        raise TypeError(f"q: expected a tensor on a CPU or a CUDA device, got one on {q.device}")
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    # What a transform of torch.func differentiates by may not say so through the wrappers of other transforms.
    moves = forward_ad._current_level >= 0 and any(map(is_dual, (q, k, v, *tensors.values())))
    if moves or (torch.is_grad_enabled() and (
        torch._C._are_functorch_transforms_active() or q.requires_grad or k.requires_grad or v.requires_grad
        or any(x.requires_grad for x in tensors.values()) or (mods is not None and mods.requires_grad)
    )):  # fmt: skip
        if mods is not None and mods.requires_grad:
            mods.check_differentiable()
        out, lse = recorded_call(q, k, v, tensors, values, mods)
    else:
        out, lse = call(return_lse, q, k, v, tensors, values, mods)
    return (out, lse) if return_lse else out


FUNCTIONS = "score_mod", "mask_mod", "block_mask"
"""Options that operators get as `Mods`."""


def _arguments(q: Any, options: Any, backend: str | None) -> tuple[Any, Tensors, Scalars]:
    """q, times a scale that is a tensor, and the operators' other tensors and arguments."""
    tensors: Tensors = {}
    scalars: dict[str, Any] = {} if backend is None else {"backend": backend}
    for name, x in options.items():
        is_tensor = isinstance(x, torch.Tensor)
        if x is DEFAULTS[name] or name in FUNCTIONS or name == "seed":
            continue
        each = x if isinstance(x, tuple) and name == "cu_seqlens" else (x,)
        if name in ARRAYS and name != "q_offset" and not all(isinstance(tensor, torch.Tensor) for tensor in each):
            raise TypeError(f"{name}: expected a torch.Tensor, got {shown(x)}")
        if name == "window":
            left, right = sides_of(x)
            scalars |= {f"window_{side}": n for side, n in (("left", left), ("right", right)) if n is not None}
        elif name == "bias" or (name == "mask" and x.is_floating_point()):
            tensors["bias"] = tensors["bias"] + x if "bias" in tensors else x
        elif name in ARRAYS and (is_tensor or name != "q_offset"):
            tensors |= zip(NAMES.get(name, (name,)), each)
        elif is_tensor and name == "scale":
            q, scalars["scale"] = _scaled(q, x), 1.0
        elif is_tensor:
            scalars[name] = _number(name, x)
        else:
            scalars[name] = number(name, x) if name in NUMBERS and type(x) not in _PLAIN else x
    if torch.are_deterministic_algorithms_enabled():
        scalars["deterministic"] = True
    if scalars.get("precision") == "fp8":
        raise ValueError("precision: expected None, 'highest' or 'tf32', got 'fp8', which flashkit.attention takes")
    if scalars.get("dropout_p"):
        tensors["seed"] = _seed(options.get("seed"))
    return q, tensors, tuple(scalars.items())


def _scaled(q: Any, scale: Any) -> Any:
    """q times a scale that is a tensor, of which autograd has the gradient and the host needs no copy."""
    if scale.numel() != 1 or not (scale.is_floating_point() or scale.dtype in _INTEGERS):
        raise TypeError(
            f"scale: expected a number, or a tensor of one, got a tensor of shape {tuple(scale.shape)} and "
            f"dtype {scale.dtype}"
        )
    return (q * scale.reshape(())).to(q.dtype)


def _seed(seed: Any) -> Any:
    """The seed as a tensor of 64 bits, drawn if there is none."""
    if seed is None:
        return torch.randint(2**62, ())
    if isinstance(seed, torch.Tensor):
        if seed.numel() != 1 or seed.dtype not in _INTEGERS:
            raise TypeError(f"seed: expected an integer, or a tensor of one, got {described(seed)}")
        return seed
    if not (type(seed) is int and 0 <= seed < 2**63):  # compilers' symbols are such
        seed = integer("seed", seed, 0, 2**64 - 1)
    return torch.tensor(seed if seed < 2**63 else seed - 2**64)


_PLAIN = (float, int, type(None), torch.SymFloat, torch.SymInt)
_INTEGERS = frozenset({
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
})  # fmt: skip


def _number(name: str, x: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{name} requires grad, and has no gradient: pass {name}.detach()")
    return x.item()


@closed
def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False, **others: Any,
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
        An argument is invalid; both attn_mask and is_causal.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import scaled_dot_product_attention
    >>> q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    >>> expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(scaled_dot_product_attention(q, k, v, is_causal=True), expected, atol=1e-5)
    True
    """
    if others:
        raise unknown_of(scaled_dot_product_attention, others)
    if is_causal and attn_mask is not None:
        raise ValueError("expected attn_mask or is_causal=True, not both")
    shape = query.shape
    if len(shape) > 2 and not shape == key.shape == value.shape:
        batches = [x.shape[:-3] for x in (query, key, value)]
        if batches[0] != batches[1] or batches[1] != batches[2]:
            batch = torch.broadcast_shapes(*batches)
            query, key, value = (x.expand(*batch, *x.shape[-3:]) for x in (query, key, value))
        if not enable_gqa and shape[-3] != key.shape[-3]:
            raise ValueError(f"query: expected {key.shape[-3]} heads (key's) or enable_gqa=True, got {shape[-3]}")
    return attention(
        query, key, value, mask=attn_mask, dropout_p=dropout_p, causal=is_causal, q_offset=0 if is_causal else None,
        scale=scale,
    )  # fmt: skip


@closed
def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, *, mods: Mods | None = None, **others: Any,
) -> Any:  # fmt: skip
    """torch.nn.attention.flex_attention.flex_attention, computed by flashkit, compiled or not.

    Parameters
    ----------
    query, key, value
        (B, Hq, Nq, D), (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).
    score_mod
        `score_mod(score, b, h, q_idx, kv_idx) -> score`, with PyTorch's operations; tensors that it indexes are read
        in place. Its derivatives by the score and by floating tensors are exact.
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
        An argument is invalid, or a function cannot be traced.

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
    if others:
        raise unknown_of(flex_attention, others)
    if not enable_gqa and query.shape[-3] != key.shape[-3]:
        raise ValueError(f"query: expected {key.shape[-3]} heads (key's) or enable_gqa=True, got {query.shape[-3]}")
    return attention(
        query, key, value, score_mod=score_mod, block_mask=block_mask, mods=mods, scale=scale, q_offset=0,
        return_lse=return_lse,
    )  # fmt: skip


# --- several processes ------------------------------------------------------------------------------------------------


class Comm(NativeComm):
    """`flashkit.distributed.Comm` of tensors, whose attention is differentiable.

    Parameters
    ----------
    communicator
        A process group of torch.distributed, whose communicator moves the tensors: gloo on CPUs, nccl on GPUs. Or one
        of mpi4py.
    timeout
        As of `flashkit.distributed.Comm`.

    Examples
    --------
    >>> import tempfile, torch
    >>> from torch import distributed
    >>> from flashkit.torch import Comm
    >>> store = distributed.FileStore(tempfile.mkstemp()[1], 1)
    >>> distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> comm = Comm(distributed.group.WORLD)
    >>> q, k, v = (comm.shard(torch.randn(1, 4, 64, 32)).requires_grad_() for _ in range(3))
    >>> comm.attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 4, 64, 32])
    >>> distributed.destroy_process_group()
    """

    def attention(self, q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
        """As `flashkit.distributed.Comm.attention`; differentiable by q, k, v and sinks."""
        sinks = options.get("sinks")
        recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks))
        if not recorded:
            return super().attention(q, k, v, return_lse=return_lse, **options)
        out, lse = OfRanks.apply(super().attention_vjp, options, q, k, v, sinks)
        return (out, lse) if return_lse else out
