"""The public functions: attention, its vector-Jacobian product, and the account of what a call would do."""

from __future__ import annotations

from typing import Any

from . import dispatch
from .backends.base import Backend
from .call import arrays, planned
from .call.arguments import Shape, prepare
from .call.planned import Planned
from .spec import Gradients, Operands, Problem

WRT = ("q", "k", "v", "sinks")


def attention(
    q: Any, k: Any, v: Any, *, scale: float | None = None, causal: bool = False, q_offset: Any = None,
    window: tuple[int | None, int | None] | None = None, softcap: float | None = None, alibi_slopes: Any = None,
    bias: Any = None, mask: Any = None, block_mask: Any = None, score_mod: Any = None, mask_mod: Any = None,
    kv_lengths: Any = None, dropout_p: float = 0.0, seed: int | None = None, sinks: Any = None, layout: str = "bhnd",
    return_lse: bool = False, out: Any = None, deterministic: bool = False, precision: str | None = None,
    backend: str | None = None,
) -> Any:  # fmt: skip
    """softmax(scale * q k^T, modified and masked) v, exactly, in memory linear in the number of tokens.

    Parameters
    ----------
    q, k, v
        NumPy or CuPy arrays of one dtype: float64, float32, float16 or bfloat16 (ml_dtypes). q (..., Hq, Nq, D), k
        (..., Hkv, Nk, D), v (..., Hkv, Nk, Dv), D and Dv from 1 to 512; Hq is a multiple of Hkv (grouped queries).
        (H, N, D) and (N, D) work too. Any strides are read in place as long as the last axis is contiguous
        and elements are aligned; other arrays are copied.
    scale
        Factor on the products, 1 / sqrt(D) where not given.
    causal
        Key j is visible to query i iff j <= i + q_offset.
    q_offset
        Position of the first query on the key axis, an integer or one for each batch entry. Default: Nk - Nq, or
        kv_lengths - Nq where those are given, so that the last query sees every key; 0 is the top-left alignment of
        PyTorch and ONNX.
    window
        (left, right): key j is visible to query i iff i + q_offset - left <= j <= i + q_offset + right; None is no
        bound.
    softcap
        Scores become softcap * tanh(score / softcap).
    alibi_slopes
        (Hq,) or (B, Hq): the slope of the query's head times |i + q_offset - j| is taken off the score.
    bias
        Floating, broadcasts to (..., Hq, Nq, Nk), added after softcap; -inf hides a key.
    mask
        Bool, broadcasts likewise, True = attend. A floating mask is added like a bias.
    block_mask
        A flashkit.BlockMask: which tiles of the score matrix exist.
    score_mod, mask_mod
        A function (s, b, h, q, k) -> s or (b, h, q, k) -> bool, or a flashkit.mods.Mod; see flashkit.mods.
    kv_lengths
        (B,) integers: keys at or past the length do not exist; what lies there in memory never matters.
    dropout_p, seed
        Weights are dropped with this probability, the rest scaled by 1 / (1 - p). The same seed drops the same
        pairs on every backend; without one a new one is drawn.
    sinks
        (Hq,): one more logit in each row's softmax, without a value.
    layout
        "bhnd", or "bnhd" for (..., N, H, D) arrays.
    return_lse
        Return (out, lse), lse (..., Hq, Nq) the natural log of each row's sum of exponentials, float32 (float64 for
        float64 inputs).
    out
        Where to put the result, of its shape and dtype.
    deterministic
        The forward pass always gives the same bits for the same inputs; with True, or where the process has
        FLASHKIT_DETERMINISTIC=1, the backward pass does so on a GPU too.
    precision
        "tf32" allows one-term TensorFloat-32 products for float32 where the device has them, which only GPUs do; None
        or "highest" is full float32.
    backend
        Name of the backend to use; default: the fastest by the device's profile.

    Returns
    -------
    out (..., Hq, Nq, Dv) of q's array type and dtype, in q's layout. Rows that see no key: out 0, lse -inf.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it, what came and what would fit.
    flashkit.UnsupportedError
        No backend can compute it; the message says what each of them said.

    Order of operations on a score: scale, softcap, ALiBi, bias, score_mod; then the masks; then softmax in float32
    or better. Sources: Dao, "FlashAttention-2", arXiv 2307.08691, Algorithm 1; reference.py in this package is the
    definition.
    """
    key = None
    fixed = score_mod is mask_mod is kv_lengths is sinks is None and _fixed(q_offset, window, dropout_p)
    if fixed and planned.may_keep(block_mask) and (out is None or arrays.contiguous(out)):
        options = scale, causal, q_offset, window, softcap, seed, layout, return_lse, deterministic, precision, backend
        others = () if alibi_slopes is bias is mask is None else (alibi_slopes, bias, mask)
        key = planned.key((q, k, v), others, (*options, block_mask))
        given = [array for array in others if array is not None] if others else ()
        if key is not None and (repeated := planned.kept(key)) is not None:
            return repeated.run(q, k, v, out, *given)
    problem, operands, shape = prepare(
        q, k, v, scale=scale, causal=causal, q_offset=q_offset, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, bias=bias, mask=mask, block_mask=block_mask, score_mod=score_mod, mask_mod=mask_mod,
        kv_lengths=kv_lengths, dropout_p=dropout_p, seed=seed, sinks=sinks, layout=layout, out=out,
        deterministic=deterministic, precision=precision,
    )  # fmt: skip
    if key is not None and (names := planned.names_of(given, operands)) is not None:
        repeated = Planned(problem, operands, shape, (q, k, v), backend, return_lse, names)
        planned.keep(key, repeated)
        return repeated.run(q, k, v, out, *given)
    _forward(problem, operands, backend)
    result = _deliver(operands, shape, out)
    return (result, shape.rows(operands.lse)) if return_lse else result


def _fixed(q_offset: Any, window: Any, dropout_p: Any) -> bool:
    """Whether these, which may be arrays or ask for new random numbers, are numbers that always mean the same."""
    return (
        (q_offset is None or type(q_offset) is int)
        and (window is None or (type(window) is tuple and all(x is None or type(x) is int for x in window)))
        and type(dropout_p) in (float, int)
        and dropout_p == 0
    )


def plan(q: Any, k: Any, v: Any, *, return_lse: bool = False, backend: str | None = None, **options: Any) -> Planned:
    """A call of attention() that is repeated: `planned = plan(q, k, v, causal=True)`, then `out = planned(q, k, v)`.

    Takes attention()'s arguments but `out`. q, k and v show the form of the arrays that the planned call will get:
    their shapes, strides, dtypes and kind. They are not kept, and their contents do not matter. All checks, the choice
    of the backend and of its tile, and all else that does not depend on contents happen here, so that a planned call
    costs microseconds more than its kernel. Equal calls give the same bits as attention().

    kv_lengths, q_offset, sinks, seed, and arrays of integers that modifications look up are read once, here. Of
    other arrays (bias, mask, alibi_slopes, those of score_mod and mask_mod) a reference is kept; they are read by
    each call, and must not be changed: a change may be seen or not. dropout_p needs a seed, and each call drops the
    same pairs.

    The result, a flashkit.Planned, may be called from several threads at once.
    """
    if "out" in options:
        raise TypeError("plan() takes no out; the planned call does, planned(q, k, v, out=out)")
    if options.get("dropout_p") and options.get("seed") is None:
        raise ValueError("dropout_p without seed: a planned call drops the same pairs each time; seed=... fits")
    problem, operands, shape = prepare(q, k, v, **options)
    operands.kv_lengths = operands.kv_lengths.copy()  # on a device they are the caller's
    return Planned(problem, operands, shape, (q, k, v), backend, return_lse)


def attention_vjp(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, backend: str | None = None, **options: Any
) -> tuple[Any, Vjp]:
    """attention() and the function that pulls gradients back through it: `out, vjp = attention_vjp(q, k, v)`, `dq,
    dk, dv = vjp(dout)`.

    Takes attention()'s arguments. With return_lse=True the first result is (out, lse), and vjp(dout, dlse) takes
    the gradient of both. Weights are recomputed from the log-sum-exp, so memory stays linear in the number of
    tokens (FlashAttention-2, Algorithm 2). kv_lengths, q_offset and integers that modifications look up are read once,
    here. q, k, v, the other arrays among the options and the result are read again by vjp: they must not be changed in
    between, and out must not lie in the memory of one of them.
    """
    problem, operands, shape = prepare(q, k, v, out=out, **options)
    operands.kv_lengths = operands.kv_lengths.copy()  # on a device they are the caller's; both passes read the same
    if out is not None:
        read_again = {"q": q, "k": k, "v": v, **options, **operands.arrays}
        for name, array in read_again.items():
            if arrays.kind_of(array) == problem.array_kind and arrays.share_memory(out, array):
                what = "an array of a modification" if name in operands.arrays else name
                raise ValueError(f"out shares memory with {what}, which the gradient reads again; another array fits")
    chosen = _forward(problem, operands, backend)
    result = _deliver(operands, shape, out)
    vjp = Vjp(problem, operands, shape, chosen, options.get("sinks"))
    return (result, shape.rows(operands.lse)) if return_lse else result, vjp


class Vjp:
    """Pulls gradients back through one call of attention; see attention_vjp."""

    def __init__(
        self, problem: Problem, operands: Operands, shape: Shape, chosen: tuple[Backend, Any] | None, sinks: Any
    ) -> None:
        self._problem, self._operands, self._shape, self._chosen = problem, operands, shape, chosen
        self._sinks_dtype = getattr(sinks, "dtype", None)

    def __call__(self, dout: Any, dlse: Any = None, *, wrt: tuple[str, ...] = ("q", "k", "v")) -> tuple[Any, ...]:
        """Gradients of sum(out * dout) + sum(lse * dlse).

        dout: of out's shape and dtype. dlse: of lse's shape and dtype, or None for zero. wrt: what to differentiate
        by, any of "q", "k", "v" and "sinks"; the results come in this order, each of the shape and dtype of its
        input.
        """
        op, shape = self._operands, self._shape
        for name in wrt:
            if name not in WRT or (name == "sinks" and op.sinks is None):
                raise ValueError(
                    f"wrt has {name!r}; {', '.join(map(repr, WRT[: 3 if op.sinks is None else 4]))} fit here"
                )
        dout4 = self._checked("dout", dout, shape.like(op.out).shape, op.q.dtype)
        dlse3 = None if dlse is None else self._checked("dlse", dlse, shape.rows(op.lse).shape, op.lse.dtype)
        xp: Any = arrays.namespace(self._problem.array_kind)
        dq, dk, dv = (xp.empty(x.shape, x.dtype) for x in (op.q, op.k, op.v))
        dsinks = xp.zeros_like(op.sinks) if "sinks" in wrt else None
        gradients = Gradients(
            shape.to_four(dout4),
            None if dlse3 is None else xp.ascontiguousarray(dlse3).reshape(op.lse.shape),
            dq,
            dk,
            dv,
            dsinks,
        )
        if self._chosen is None:
            for tensor in (dq, dk, dv):
                tensor[...] = 0
        else:
            backend, plan = self._chosen
            backend.backward(plan, op, gradients)
        results = {"q": dq, "k": dk, "v": dv}
        if dsinks is not None and self._sinks_dtype is not None:
            dsinks = dsinks.astype(self._sinks_dtype)
        return tuple(dsinks if name == "sinks" else shape.like(results[name]) for name in wrt)

    def _checked(self, name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        arrays.require(name, array, self._problem.array_kind)
        if array.dtype != dtype:
            raise TypeError(f"{name} has dtype {array.dtype}; {dtype} fits")
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; {shape} fits")
        return array


def _forward(problem: Problem, operands: Operands, backend: str | None) -> tuple[Backend, Any] | None:
    """Run the forward pass; None where there is no query and so nothing to run."""
    chosen = dispatch.plan(problem, backend)
    if 0 in operands.q.shape[:3]:
        return None
    chosen[0].forward(chosen[1], operands)
    return chosen


def _deliver(operands: Operands, shape: Shape, out: Any) -> Any:
    """The result in the caller's shape, in the caller's array where one was given."""
    result = shape.like(operands.out)
    if out is None:
        return result
    if not arrays.same_address(out, result):
        out[...] = result
    return out


def explain(
    q: Any, k: Any, v: Any, *, backend: str | None = None, return_lse: bool = False, measure: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """What attention(q, k, v, ...) would do and why: the backends' answers, the tile, the profile's row, bytes,
    FLOPs, roofline time.

    Computes nothing, unless `measure` asks for the time that both passes take on these NumPy arrays, and so for how far
    they are from the roofline. str() of the result is a page for people, `.as_dict()` one for programs.
    """
    from .call.explanation import explain_problem

    problem, operands, _ = prepare(q, k, v, **options)
    return explain_problem(problem, operands, backend, measure)


__all__: list[str] = ["Planned", "Vjp", "attention", "attention_vjp", "explain", "plan"]
