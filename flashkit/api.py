"""The public functions: attention, its vector-Jacobian product, cached plans, and explanations of calls."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

import numpy as np

from . import dispatch
from .backends.base import Backend
from .call import arrays, foreign, fp8, pickled_plan, plan_cache
from .call.arguments import prepare
from .call.in_place import in_place
from .call.loans import Dequantised, loan_of
from .call.options import Layout, Options, Precision, unknown
from .call.planned import Planned, QuantisingPlan
from .call.positions import queries_of
from .call.quantized import Quantized
from .call.shape import Shape
from .call.views import View
from .call.vjp import Vjp
from .errors import UnsupportedError
from .spec import Operands, Problem

if TYPE_CHECKING:
    from .call.explanation import Explanation

A = TypeVar("A")
"""The array type of a call."""


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
    q: A, k: Any, v: Any, *, return_lse: bool, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> A | tuple[A, Any]: ...  # fmt: skip
def attention(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, q_offset: Any = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    bias: Any = None, mask: Any = None, block_mask: Any = None, score_mod: Any = None, mask_mod: Any = None,
    kv_lengths: Any = None, q_lengths: Any = None, cu_seqlens: Any = None, page_table: Any = None,
    dropout_p: float = 0.0, seed: int | None = None, sinks: Any = None, layout: Layout = "bhnd",
    return_lse: bool = False, out: Any = None, deterministic: bool = False, precision: Precision | None = None,
    backend: str | None = None, **unexpected: Any,
) -> Any:  # fmt: skip
    """Exact attention, softmax(scale * q k^T, modified and masked) v, in memory linear in the number of tokens.

    A score goes through these steps: scale, softcap, ALiBi, bias, score_mod; then the masks; then softmax in float32,
    or in float64 for float64 inputs.

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
        kernel reads 8 bits: decoding on a CPU, and with FLASHKIT_FP8_KERNELS=1 e4m3 on Hopper.
    scale
        Factor on q k^T; 1 / sqrt(D) by default.
    causal
        Key j is visible to query i iff j <= i + q_offset.
    q_offset
        Position of the first query on the key axis: an integer, or one for each batch entry. By default the number of
        keys less that of queries, of each sequence, so that the last query sees every key. 0 is the top-left alignment
        of PyTorch and ONNX, and fits batches that are padded on the right. Masks and scores by position need it where a
        length other than 0 is less than Nq, and where lengths are on a device and Nq is above 1.
    window
        (left, right): key j is visible to query i iff i + q_offset - left <= j <= i + q_offset + right. None is no
        bound.
    softcap
        Scores become softcap * tanh(score / softcap).
    alibi_slopes
        (Hq,) or (B, Hq): slope * |i + q_offset - j| is subtracted from the score.
    bias
        Floating, broadcasts to (..., Hq, Nq, Nk), added after softcap. -inf masks a pair.
    mask
        Bool, broadcasts to (..., Hq, Nq, Nk), True = attend. A floating mask is added like a bias.
    block_mask
        A flashkit.BlockMask for Nq queries and Nk keys.
    score_mod, mask_mod
        A function (s, b, h, q, k) -> s or (b, h, q, k) -> bool, or a flashkit.mods.Mod; see flashkit.mods.
    kv_lengths
        (B,) integers: keys at or past the length do not exist, and the memory there never affects the result.
    q_lengths
        (B,) integers: queries at or past the length see no key, so their rows are 0. The default q_offset is then
        kv_lengths - q_lengths: batches that are padded on the right are right with causal=True.
    cu_seqlens
        Sequences of any length that follow each other, without padding: q (T, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv).
        Integers (sequences + 1,), from 0 to at most T, where each sequence begins and the last one ends; a pair (of q,
        of k) where these differ. Batch entry b of masks, scores and offsets is sequence b, and positions count within
        it. lse is (Hq, T). Rows past the last offset are 0. Integers on a GPU are not read by the host.
    page_table
        Keys and values in pages: k (pages, page, Hkv, D), v (pages, page, Hkv, Dv), any strides. Integers (B, pages of
        a sequence): the page that holds keys i * page to (i + 1) * page - 1 of sequence b is page_table[b, i]. It
        needs kv_lengths, behind which entries do not matter (-1 is customary). q is (B, Hq, Nq, D) by layout, or
        (T, Hq, D) with cu_seqlens.
    dropout_p, seed
        Weights are dropped with this probability, the others scaled by 1 / (1 - dropout_p). The same seed drops the
        same pairs on every backend. Without a seed each call draws one.
    sinks
        (Hq,): one more logit in the softmax of each row, without a value.
    layout
        "bhnd", or "bnhd" for (..., N, H, D) arrays.
    return_lse
        Return (out, lse).
    out
        Array for the result, of its shape and dtype.
    deterministic
        Give the same bits for the same inputs in the backward pass on a GPU too; all other passes always do. On the
        CPU, bits then depend neither on the number of threads nor, in decoding, on the other sequences of the batch.
        The environment variable FLASHKIT_DETERMINISTIC=1 asks for it in every call.
    precision
        "tf32" allows TensorFloat-32 products for float32 inputs on GPUs that have them. None or "highest" is full
        float32; of e4m3 arrays None may round weights to e4m3 as well. "fp8" quantises float16 and bfloat16 to e4m3
        first, each token by itself, q and k rotated: as quantize(x, "e4m3", "token", rotate=True), and for v without
        rotation.
    backend
        Name of the backend. By default the fastest one by the profile of the device.
    **unexpected
        Not accepted: the error says which argument was probably meant.

    Returns
    -------
    out : array
        (..., Hq, Nq, Dv), of q's array type and dtype, in q's layout. Rows without a visible key are 0.
    lse : array
        If return_lse: (..., Hq, Nq), the natural logarithm of each row's sum of exponentials, float32 (float64 for
        float64 inputs). -inf for rows without a visible key.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit. The message names it, what came and what would fit.
    flashkit.UnsupportedError
        No backend can compute it. The message has the reason of each backend.

    Notes
    -----
    All arrays of a call are of q's library and on its device; integers of kv_lengths and q_offset may be on the host.
    Tensors of PyTorch on a CUDA device are computed on PyTorch's current stream, through CuPy. Derivatives are not
    recorded: a tensor that requires grad is an error, and `flashkit.torch.attention` is differentiable.

    `attention` caches the plan of a call (see `plan`) and reuses it for later calls on arrays of the same shapes,
    strides and dtypes, unless sinks, dropout, functions, an array of offsets or pages are passed. On NumPy arrays other
    kv_lengths share it, and so do longer slices of a cache that grows; calls of packed sequences do if their
    cu_seqlens are NumPy arrays of the same numbers, or lie on a GPU. The definition is reference.py of this package.

    References
    ----------
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, arXiv 2307.08691,
    Algorithm 1.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 256, 64), dtype=np.float32)
    >>> flashkit.attention(q, k, v, causal=True).shape
    (1, 8, 256, 64)
    >>> out, lse = flashkit.attention(q, k[:, :2], v[:, :2], window=(128, 0), return_lse=True)
    >>> lse.shape
    (1, 8, 256)
    """
    if unexpected:
        raise unknown(unexpected)
    if type(q) is type(k) is type(v) is np.ndarray:  # as arrays.own_forms, faster
        q, k, v = q.view(), k.view(), v.view()
    entry = packed = None
    if cu_seqlens is not None:
        packed, cu_seqlens = plan_cache.frozen(cu_seqlens)
    others_are_none = score_mod is mask_mod is q_lengths is page_table is sinks is None
    if others_are_none and _is_constant(q_offset, window, dropout_p):
        options = scale, causal, q_offset, window, softcap, seed, return_lse, deterministic, precision, backend
        of_pairs, offsets = (alibi_slopes, bias, mask), (cu_seqlens, packed, q_offset)
        entry = plan_cache.entry((q, k, v), out, of_pairs, block_mask, kv_lengths, layout, options, *offsets)
        if entry is not None and entry.planned is not None:
            return entry.run(q, k, v, out)
    arguments: Any = dict(
        scale=scale, causal=causal, q_offset=q_offset, window=window, softcap=softcap, alibi_slopes=alibi_slopes,
        bias=bias, mask=mask, block_mask=block_mask, score_mod=score_mod, mask_mod=mask_mod, kv_lengths=kv_lengths,
        q_lengths=q_lengths, cu_seqlens=cu_seqlens, page_table=page_table, dropout_p=dropout_p, seed=seed, sinks=sinks,
        layout=layout, out=out, deterministic=deterministic, precision=precision,
    )  # fmt: skip
    if (loan := loan_of(q, k, v, precision)) is not None:
        with loan.scope():
            if isinstance(loan, Dequantised):
                on_codes = in_place(loan, q, k, v, arguments, backend) or (
                    fp8.prepared(loan, q, k, v, backend, **arguments)
                )
                if not isinstance(on_codes, str):
                    return computed(*on_codes, out, return_lse, backend)
            borrowed = loan.lend(q=q, k=k, v=v, **arguments)
            return loan.give_back(attention(**borrowed, return_lse=return_lse, backend=backend), out)
    problem, operands, shape = prepare(q, k, v, **arguments)
    if entry is not None and entry.plan(problem, operands, shape, (q, k, v), q_offset, backend, return_lse):
        return entry.run(q, k, v, out)
    return computed(problem, operands, shape, out, return_lse, backend)


def computed(
    problem: Problem, operands: Operands, shape: Shape, out: Any, return_lse: bool, backend: str | None
) -> Any:  # fmt: skip
    """The result of a prepared call."""
    _forward(problem, operands, backend)
    result = _deliver(operands, shape, out)
    return (result, shape.rows(operands.lse)) if return_lse else result


def _is_constant(q_offset: Any, window: Any, dropout_p: Any) -> bool:
    """Whether these are plain numbers, and not arrays, whose contents can change, or a request for random numbers."""
    return (
        (q_offset is None or type(q_offset) is int)
        and (window is None or (type(window) is tuple and all(x is None or type(x) is int for x in window)))
        and type(dropout_p) in (float, int)
        and dropout_p == 0
    )


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
        of it holds the request and its arrays, and plans anew where it is loaded.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit, `out` is passed, or dropout_p without seed.
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
    q, k, v = arrays.own_forms(q, k, v)
    if "out" in options:
        raise TypeError("plan() takes no out; the planned call does, planned(q, k, v, out=out)")
    if options.get("dropout_p") and options.get("seed") is None:
        raise ValueError("dropout_p without seed: a planned call drops the same pairs each time; seed=... fits")
    if (loan := loan_of(q, k, v, options.get("precision"))) is not None:
        with loan.scope():
            made = plan(**loan.borrow(q=q, k=k, v=v, **options), return_lse=return_lse, backend=backend)
            return QuantisingPlan(made) if isinstance(loan, Dequantised) and loan.fp8 else made
    problem, operands, shape = prepare(q, k, v, **options)
    if not problem.spec.packed:  # whose lengths are new
        operands.kv_lengths = operands.kv_lengths.copy()  # on a device they may be the caller's array
    varies = problem.spec.kv_lengths and not problem.spec.packed
    follows = None
    if varies and options.get("q_offset") is None:
        queries = options.get("q_lengths")
        follows = queries_of(queries, problem.array_kind, shape, problem.batch, problem.n_q, problem.n_q)
    return Planned(problem, operands, shape, (q, k, v), backend, return_lse, varies=varies, follows=follows)


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
    q: A, k: Any, v: Any, *, return_lse: bool, out: Any = None, backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[A | tuple[A, Any], Vjp[A]]: ...  # fmt: skip
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
    TypeError, ValueError
        An argument does not fit.
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
    q, k, v = arrays.own_forms(q, k, v)
    if options.get("page_table") is not None:
        raise UnsupportedError("attention_vjp does not take page_table: keys in pages have no gradients")
    entry = entry_of(q, k, v, backend=backend, **options) if out is None else None
    if entry is not None and entry.planned is not None:
        return _planned_vjp(entry, q, k, v, return_lse)
    if (loan := loan_of(q, k, v, options.get("precision"))) is not None:
        with loan.scope():
            borrowed = loan.borrow(q=q, k=k, v=v, out=out, **options)
            result, lent = attention_vjp(**borrowed, return_lse=return_lse, backend=backend)
            if out is not None and borrowed["out"] is None:
                _check_apart(out, lent.problem, lent.operands, {**options})
            lent._loans = (loan, *lent._loans)
            return loan.give_back(result, out), lent
    problem, operands, shape = prepare(q, k, v, out=out, **options)
    if entry is not None and entry.plan(problem, operands, shape, (q, k, v), options.get("q_offset"), backend, True):
        return _planned_vjp(entry, q, k, v, return_lse)
    if not problem.spec.packed:  # whose lengths are new
        operands.kv_lengths = operands.kv_lengths.copy()  # the caller may change its array between the two passes
    if out is not None:
        _check_apart(out, problem, operands, {"q": q, "k": k, "v": v, **options})
    chosen = _forward(problem, operands, backend)
    result = _deliver(operands, shape, out)
    vjp: Vjp[Any] = Vjp(problem, operands, shape, _backward_of(chosen), options.get("sinks"))
    return (result, shape.rows(operands.lse)) if return_lse else result, vjp


def entry_of(
    q: Any, k: Any, v: Any, *, return_lse: bool = True, recorded: bool = True, scale: Any = None, causal: Any = False,
    q_offset: Any = None, window: Any = None, softcap: Any = None, alibi_slopes: Any = None, bias: Any = None,
    mask: Any = None, block_mask: Any = None, kv_lengths: Any = None, dropout_p: Any = 0.0, seed: Any = None,
    layout: Any = "bhnd", deterministic: Any = False, precision: Any = None, backend: Any = None, **others: Any,
) -> plan_cache.Entry | None:  # fmt: skip
    """The cache's entry for a call; None if its plan cannot be cached. recorded: a backward pass follows."""
    if others or not _is_constant(q_offset, window, dropout_p):
        return None
    return plan_cache.entry(
        (q, k, v), None, (alibi_slopes, bias, mask), block_mask, kv_lengths, layout,
        (scale, causal, q_offset, window, softcap, seed, return_lse, deterministic, precision, backend),
        recorded=recorded,
    )  # fmt: skip


def _planned_vjp(entry: plan_cache.Entry, q: Any, k: Any, v: Any, return_lse: bool) -> tuple[Any, Vjp[Any]]:
    out, lse = entry.run(q, k, v, None)
    vjp = entry.vjp(q, k, v, out, lse)
    return (out, lse) if return_lse else out, vjp


def _backward_of(chosen: tuple[Backend, Any] | None) -> Any:
    """The backward pass of a backend and its plan."""
    return None if chosen is None else partial(chosen[0].backward, chosen[1])


def _check_apart(out: Any, problem: Problem, operands: Operands, given: dict[str, Any]) -> None:
    """Check that `out` shares no memory with these arguments, or with arrays of modifications."""
    for name, array in (given | operands.arrays).items():
        if arrays.kind_of(array) == problem.array_kind and arrays.share_memory(out, array):
            what = "an array of a modification" if name in operands.arrays else name
            raise ValueError(f"out shares memory with {what}, which the gradient reads again; another array fits")


def vjp_of(q: Any, k: Any, v: Any, out: Any, lse: Any, *, backend: str | None = None, **options: Any) -> Vjp[Any]:
    """The `Vjp` of a call whose results were kept, as automatic differentiation of other libraries keeps them.

    out and lse are those of `attention` for the same arguments, dropout's seed among them.
    """
    entry = entry_of(q, k, v, backend=backend, **options)
    if entry is None and type(q) is View:
        q, k, v, out, lse = [foreign.native("an array", x) for x in (q, k, v, out, lse)]
        return vjp_of(q, k, v, out, lse, backend=backend, **options)
    if entry is None or entry.planned is None:
        problem, operands, shape = prepare(q, k, v, out=out, **options)
        given = (q, k, v), options.get("q_offset"), backend
        if entry is None or not entry.plan(problem, operands, shape, *given, True):
            operands.out, operands.lse = shape.to_four(out), lse.reshape(operands.lse.shape)
            chosen = None if 0 in operands.q.shape[:3] else dispatch.plan(problem, backend)
            return Vjp(problem, operands, shape, _backward_of(chosen), options.get("sinks"))
    return entry.vjp(q, k, v, out, lse)


def _forward(problem: Problem, operands: Operands, backend: str | None) -> tuple[Backend, Any] | None:
    """Run the forward pass and return the backend and its plan; None without queries."""
    chosen = dispatch.plan(problem, backend)
    if 0 in operands.q.shape[:3]:
        return None
    chosen[0].forward(chosen[1], operands)
    return chosen


def _deliver(operands: Operands, shape: Shape, out: Any) -> Any:
    """The result in the caller's shape, written to `out` if it is given."""
    result = shape.like(operands.out)
    if out is None:
        return result
    if not arrays.same_address(out, result):
        out[...] = result
    return out


def explain(
    q: Any, k: Any, v: Any, *, backend: str | None = None, return_lse: bool = False, measure: bool = False,
    **options: Unpack[Options],
) -> Explanation:  # fmt: skip
    """Explain what a call of `attention` would do and why, without computing it.

    It takes no memory in proportion to the call's sizes, so `numpy.broadcast_to(x, shape)` of one element can stand in
    for an array.

    Parameters
    ----------
    q, k, v, backend
        As for `attention`.
    return_lse
        Accepted so that the arguments of a call can be passed; it changes nothing.
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
        An argument does not fit, or `measure` with CuPy arrays.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.zeros((3, 1, 8, 128, 64), np.float32)
    >>> found = flashkit.explain(q, k, v, causal=True)
    >>> found.flops["forward"], round(found.visible_fraction, 3)
    (16908288.0, 0.504)
    """
    from .call.explanation import explain_problem

    if (loan := loan_of(q, k, v, options.get("precision"), described=not measure)) is not None:
        with loan.scope():
            on_codes: Any = ""
            if isinstance(loan, Dequantised):
                on_codes = fp8.prepared(loan, q, k, v, backend, not measure, **options)
                if not isinstance(on_codes, str):
                    return explain_problem(on_codes[0], on_codes[1], backend, measure)
            borrowed = loan.borrow(q=q, k=k, v=v, **options)
            found = explain(**borrowed, backend=backend, return_lse=return_lse, measure=measure)
            if isinstance(loan, Dequantised):
                return replace(found, problem=loan.described(found.problem, on_codes))
            return found
    problem, operands, _ = prepare(q, k, v, described=not measure, **options)
    return explain_problem(problem, operands, backend, measure)


pickled_plan.register()

__all__: list[str] = ["Planned", "Vjp", "attention", "attention_vjp", "explain", "plan"]
