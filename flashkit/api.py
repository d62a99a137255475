"""The public functions: attention, its vector-Jacobian product, cached plans, and explanations of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from .call import arrays
from .call.arguments import Prepared, prepare
from .call.call import Call
from .call.codes import on_codes
from .call.planned import Planned, plan_for
from .call.plans import plan_of
from .call.quantized import Quantized
from .call.statistics import names_of, with_statistics
from .call.tangents import with_tangents
from .call.vjp import Vjp
from .errors import UnsupportedError
from .options import Options, by_position, documented, misplaced
from .spec import Operands

if TYPE_CHECKING:
    from .call.explanation import Explanation

A = TypeVar("A")
"""The array type of a call."""


@overload
def attention(
    q: Any, k: Any, v: Any, *, return_stats: Sequence[str], return_lse: bool = False, out: Any = None,
    backend: str | None = None, **options: Unpack[Options],
) -> tuple[Any, ...]: ...  # fmt: skip
@overload
def attention(
    q: Quantized, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> Any: ...  # fmt: skip
@overload
def attention(
    q: A, k: Any, v: Any, *, return_lse: Literal[False] = False, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> A: ...  # fmt: skip
@overload
def attention(
    q: A, k: Any, v: Any, *, return_lse: Literal[True], out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[A, Any]: ...  # fmt: skip
@overload
def attention(
    q: A, k: Any, v: Any, *, return_lse: bool, out: Any = None, backend: str | None = None, **options: Unpack[Options]
) -> A | tuple[A, Any]: ...
@documented()
def attention(
    q: Any = None, k: Any = None, v: Any = None, *more: Any, return_lse: bool = False,
    return_stats: Sequence[str] = (), out: Any = None, backend: str | None = None, **options: Unpack[Options],
) -> Any:  # fmt: skip
    """Exact attention, softmax(scale * q k^T, modified and masked) v, in memory linear in the number of tokens.

    A score goes through these steps: scale, the options that change scores in the order of the list below, the masks,
    and softmax in float32, or in float64 for float64 inputs.

    Parameters
    ----------
    q, k, v
        Arrays of one library and dtype: float64, float32, float16 or bfloat16. The library is NumPy or CuPy (with
        bfloat16 of ml_dtypes), PyTorch, JAX, or another one that follows the array API standard or has
        __cuda_array_interface__. q is (..., Hq, Nq, D), k (..., Hkv, Nk, D), v (..., Hkv, Nk, Dv), with D and Dv from
        1 to 1024, or 512 on a GPU. Hq is a multiple of Hkv (grouped-query attention). (H, N, D) and (N, D) work too.
        Arrays with a contiguous last axis and aligned elements are read in place, with any strides; others are copied.
        v may be a view of k, such as k[..., :Dv]: then memory is read once. Each may be a flashkit.Quantized instead,
        made from an array of the others' dtype: it counts as that array. It is dequantised for the call, except where a
        kernel reads 8 bits: decoding on a CPU, and e4m3 on Hopper.
    {options}
    return_lse
        Return (out, lse).
    return_stats
        Statistics of the weights before dropout to return behind these, in a dict: (out, stats), or (out, lse, stats).
        Any of "entropy", "max_logit" and "key_weight"; see Returns.
    out
        Array for the result, of its shape and dtype.
    backend
        Name of the backend. By default the fastest one by the profile of the device.

    Returns
    -------
    out : array
        (..., Hq, Nq, Dv), of q's array type and dtype, in q's layout. Rows without a visible key are 0.
    lse : array
        If return_lse: (..., Hq, Nq), the natural logarithm of each row's sum of exponentials, float32 (float64 for
        float64 inputs). -inf for rows without a visible key.
    stats : dict
        If return_stats, arrays by name, of lse's dtype. "entropy", like lse: the entropy of the row's weights in
        natural units, lse - E[score], with a sink as one more outcome; 0 without a visible key. "max_logit", like lse:
        the largest visible score after all modifications, -inf without one. "key_weight", (..., Hq, Nk): the sum of
        the key's weights over the queries, for each query head; sum the heads of a group for one KV head. Packed, it
        is (Hq, Tk), and with a page table (B, Hq, positions of the longest sequence). Keys that no query sees have 0.

    Raises
    ------
    flashkit.UnsupportedError
        No backend can compute it. The message has the reason of each backend.

    Notes
    -----
    "entropy" and "max_logit" are sums and maxima that the forward pass keeps beside its own. "key_weight" takes a
    second pass over queries and keys, without values, about half as long. Calls with "key_weight", and with statistics
    of arrays on the host, are planned each time.

    All arrays of a call are of q's library and on its device; integers of kv_lengths and q_offset may be on the host.
    Tensors of PyTorch on a CUDA device are computed on PyTorch's current stream, through CuPy. Derivatives are not
    recorded: a tensor that requires grad is an error, and `flashkit.torch.attention` is differentiable.

    `attention` caches the plan of a call (see `plan`) and reuses it for later calls on arrays of the same shapes,
    strides and dtypes, unless sinks, dropout, functions, an array of offsets or pages are passed. On NumPy arrays other
    kv_lengths share it, and so do longer slices of a cache that grows; calls of packed sequences do if their
    cu_seqlens are NumPy arrays of the same numbers, or lie on a GPU. The definition is `flashkit.reference`.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, arXiv 2307.08691,
    Algorithm 1. Key weights choose what a cache keeps: Zhang et al., "H2O", 2023, arXiv 2306.14048. The largest logit
    of a head clips its projections: Kimi Team, "Kimi K2", 2025, arXiv 2507.20534, section 2.1.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 256, 64), dtype=np.float32)
    >>> flashkit.attention(q, k, v, causal=True).shape
    (1, 8, 256, 64)
    >>> out, lse = flashkit.attention(q, k[:, :2], v[:, :2], window=(128, 0), return_lse=True)
    >>> lse.shape
    (1, 8, 256)
    >>> out, stats = flashkit.attention(q, k, v, return_stats=("max_logit", "key_weight"))
    >>> stats["max_logit"].shape, bool(np.allclose(stats["key_weight"].sum(-1), 256))
    ((1, 8, 256), True)
    """
    if v is None or more:
        raise misplaced("attention", more, options)
    if return_stats != ():
        names = names_of(return_stats)
        with Call("attention", q, k, v, {**options}, out) as call:
            result, lse, *stats = call.to_caller(with_statistics(call, backend, names))
            own = dict(zip(names, stats))
            return (result, lse, own) if return_lse else (result, own)
    with Call("attention", q, k, v, {**options}, out) as call:
        return call.to_caller(plan_of(call, backend, return_lse).run(call))


@by_position
def plan(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, backend: str | None = None, **options: Unpack[Options]
) -> Planned:
    """Plan a call of `attention` that is repeated on arrays of the same layout.

    Everything that does not depend on the contents of q, k and v happens here: checks, the choice of the backend and of
    its tile, compilation. The planned call costs microseconds more than its kernel, and gives the same bits as
    `attention`.

    Parameters
    ----------
    q, k, v
        Arrays with the shapes, strides, dtypes and kind of those that the planned call will get. No reference to them
        is kept, and their contents do not matter.
    return_lse, backend
        As for `attention`.
    **options
        The other arguments of `attention`, except `out`. kv_lengths, q_offset, page_table, sinks, seed, and arrays of
        integers that modifications index are read once, here. Other arrays (bias, mask, alibi_slopes, those of
        score_mod and mask_mod) are kept by reference and read by each call. They must not be changed: a planned call
        may see the change or not. dropout_p needs a seed, and each call drops the same pairs.

    Returns
    -------
    Planned
        `planned(q, k, v)` computes attention. Of a plan made with kv_lengths, `planned(q, k, v, kv_lengths=lengths)`
        does so for other lengths, with q_offset and page_table as well. Threads may call it at the same time. A pickle
        of it holds the request and its arrays, and is planned again where it is loaded.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, `out` is passed, or dropout_p without seed.
    flashkit.UnsupportedError
        No backend can compute it.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 64, 32), dtype=np.float32)
    >>> planned = flashkit.plan(q, k, v, causal=True)
    >>> bool((planned(q, k, v) == flashkit.attention(q, k, v, causal=True)).all())
    True
    """
    if "out" in options:
        raise TypeError("plan() got an unexpected argument 'out': pass it to the planned call, planned(..., out=out)")
    if options.get("dropout_p") and options.get("seed") is None:
        raise ValueError("seed: expected an integer beside dropout_p for a plan, whose calls drop the same pairs")
    with Call("plan", q, k, v, {**options}) as call:
        fp8 = call.quantised is not None and call.quantised.fp8
        call.dequantise()
        call.require_arrays()
        return plan_for((call.q, call.k, call.v), call.options, backend, return_lse, fp8)


@overload
def attention_vjp(
    q: Quantized, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[Any, Vjp[Any]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, return_lse: Literal[False] = False, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[A, Vjp[A]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, return_lse: Literal[True], out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[tuple[A, Any], Vjp[A]]: ...  # fmt: skip
@overload
def attention_vjp(
    q: A, k: Any, v: Any, *, return_lse: bool, out: Any = None, backend: str | None = None, **options: Unpack[Options]
) -> tuple[A | tuple[A, Any], Vjp[A]]: ...
@by_position
def attention_vjp(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[Any, Vjp[Any]]:  # fmt: skip
    """Attention and its vector-Jacobian product, in memory linear in the number of tokens.

    Parameters
    ----------
    q, k, v, return_lse, out, backend
        As for `attention`. `out` must not share memory with an array that the gradient reads.
    **options
        The other arguments of `attention`.

    Returns
    -------
    out : array or (array, array)
        What `attention` returns: out, or (out, lse).
    vjp : Vjp
        `dq, dk, dv = vjp(dout)`, or `vjp(dout, dlse)`. It reads q, k, v, out and the other arrays among the options
        again, so they must not be changed in between. kv_lengths, q_offset and integers that modifications index are
        copied here. Gradients have the dtype of q, k and v. Those of quantised arrays are the gradients with respect
        to the numbers that they stand for, as if rounding were the identity (straight-through).

    Raises
    ------
    flashkit.UnsupportedError
        No backend can compute it.

    References
    ----------
    The backward pass recomputes the weights from the log-sum-exp: Dao, "FlashAttention-2", 2023, arXiv 2307.08691,
    Algorithm 2.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 64, 32), dtype=np.float32)
    >>> out, vjp = flashkit.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(np.ones_like(out))
    >>> dq.shape
    (1, 8, 64, 32)
    """
    if options.get("page_table") is not None:
        raise UnsupportedError("attention_vjp does not take page_table: keys in pages have no gradients")
    with Call("attention_vjp", q, k, v, {**options}, out) as call:
        planned: Any = plan_of(call, backend, True, recorded=True)
        if out is not None:
            _check_apart(call, planned.operands)
        result = planned.run(call)
        vjp: Vjp[Any] = Vjp(planned.recorded(call, *result), call.options, call.adapters)
        return call.to_caller(result if return_lse else result[0]), vjp


@by_position
def attention_jvp(
    q: Any, k: Any, v: Any, dq: Any = None, dk: Any = None, dv: Any = None, *, return_lse: bool = False,
    out: Any = None, backend: str | None = None, **options: Unpack[Options],
) -> tuple[Any, Any]:  # fmt: skip
    """Attention and its Jacobian-vector product, in one pass and in memory linear in the number of tokens.

    Parameters
    ----------
    q, k, v, return_lse, out, backend
        As for `attention`.
    dq, dk, dv
        Tangents of q, k and v, of their shapes, dtypes and library. None is 0, and costs nothing.
    **options
        The other arguments of `attention`, except page_table. They have no tangents.

    Returns
    -------
    out : array or (array, array)
        What `attention` returns: out, or (out, lse).
    dout : array or (array, array)
        The tangent of that, in its shapes and dtypes: dout, or (dout, dlse). Rows without a visible key have 0.

    Raises
    ------
    flashkit.UnsupportedError
        No backend can compute it. The message has the reason of each backend.

    Notes
    -----
    With dS the tangent of the modified scores, scale * (dq k^T + q dk^T) times the slope of the modification:
    d lse = E[dS] and dout = P (dS - E[dS]) v + P dv. Six matrix products against the two of `attention`. The seed of a
    call without one is drawn, so pass one to repeat dropout.

    References
    ----------
    Consistency and flow models train with such tangents: Lu and Song, "Simplifying, Stabilizing and Scaling
    Continuous-Time Consistency Models", 2024, arXiv 2410.11081, appendix F; Geng et al., "Mean Flows for One-step
    Generative Modeling", 2025, arXiv 2505.13447.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v, dq = np.random.default_rng(0).standard_normal((4, 1, 2, 16, 8))
    >>> out, dout = flashkit.attention_jvp(q, k, v, dq, causal=True)
    >>> h = 1e-6
    >>> after, before = (flashkit.attention(q + x * dq, k, v, causal=True) for x in (h, -h))
    >>> bool(np.allclose(dout, (after - before) / (2 * h), atol=1e-6))
    True
    """
    results, moved = jvp_of(q, k, v, {"dq": dq, "dk": dk, "dv": dv}, out=out, backend=backend, **options)
    return (results, moved) if return_lse else (results[0], moved[0])


def _check_apart(call: Call, operands: Operands) -> None:
    """Check that the caller's `out` shares no memory with what the backward pass reads."""
    named = {"q": call.q, "k": call.k, "v": call.v, **call.options, **operands.arrays}
    for name, array in named.items():
        if arrays.kind_of(array) is not None and arrays.share_memory(call.native_out, array):
            what = "an array of a modification" if name in operands.arrays else name
            raise ValueError(f"out must not share memory with {what}: the backward pass reads it")


def jvp_of(
    q: Any, k: Any, v: Any, tangents: dict[str, Any], *, out: Any = None, backend: str | None = None, **options: Any
) -> Any:
    """(out, lse) and their tangents. tangents: by "dq", "dk" and "dv", and for automatic differentiation "dsinks"."""
    if options.get("page_table") is not None:
        raise UnsupportedError("attention_jvp does not take page_table: keys in pages have no tangents")
    with Call("attention_jvp", q, k, v, {**options}, out) as call:
        result, lse, dout, dlse = with_tangents(call, backend, tangents)
        for adapter in reversed(call.adapters):
            dout, dlse = adapter.from_native("dout", dout), adapter.from_native("lse", dlse)
        return call.to_caller((result, lse)), (dout, dlse)


def vjp_of(q: Any, k: Any, v: Any, out: Any, lse: Any, *, backend: str | None = None, **options: Any) -> Vjp[Any]:
    """The `Vjp` of a call whose results were kept, as automatic differentiation of other libraries keeps them.

    out and lse are those of `attention` for the same arguments, dropout's seed among them.
    """
    with Call("vjp_of", q, k, v, options) as call:
        recorded = plan_of(call, backend, True, recorded=True).recorded(call, out, lse, kept=True)
        return Vjp(recorded, call.options)


@by_position
def explain(
    q: Any, k: Any, v: Any, *, backend: str | None = None, return_lse: bool = False, out: Any = None,
    measure: bool = False, **options: Unpack[Options],
) -> Explanation:  # fmt: skip
    """Explain what a call of `attention` would do and why, without computing it.

    It takes no memory in proportion to the call's sizes, so `numpy.broadcast_to(x, shape)` of one element can stand in
    for an array.

    Parameters
    ----------
    q, k, v, backend
        As for `attention`.
    return_lse, out
        Accepted so that the arguments of a call can be passed; they change nothing.
    measure
        Run both passes on these NumPy arrays, and report their times and the distance from the roofline.
    **options
        The other arguments of `attention`.

    Returns
    -------
    Explanation
        The answer of each backend, the tile and the row of the profile that chose it, bytes, FLOPs and roofline times.
        `str()` of it is a page of text, `.as_dict()` the same as plain data.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid, or `measure` with CuPy arrays.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.zeros((3, 1, 8, 128, 64), np.float32)
    >>> found = flashkit.explain(q, k, v, causal=True)
    >>> found.flops["forward"], round(found.visible_fraction, 3)
    (16908288.0, 0.504)
    """
    from .call.explanation import explain_problem

    with Call("explain", q, k, v, {**options}, out, described=not measure) as call:
        call.require_arrays()
        quantised, why = call.quantised, ""
        if quantised is not None:
            found = on_codes(quantised, call.q, call.k, call.v, call.options, call.out, False, backend, call.described)
            if isinstance(found, Prepared):
                return explain_problem(found.problem, found.operands, backend, measure)
            why = found
        call.dequantise()
        problem, operands, _ = prepare(call.q, call.k, call.v, out=call.out, described=not measure, **call.options)
        explanation = explain_problem(problem, operands, backend, measure)
        if quantised is None:
            return explanation
        return replace(explanation, problem=quantised.described(explanation.problem, why))


__all__: list[str] = ["Planned", "Vjp", "attention", "attention_vjp", "explain", "plan"]
