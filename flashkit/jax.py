"""Attention in JAX programs: under jit, grad and vmap, on CPUs and on NVIDIA GPUs.

    from flashkit.jax import attention, dot_product_attention

The kernels run in a callback of the compiled program (`jax.experimental.buffer_callback`): they read and write XLA's
own buffers, on a GPU in XLA's stream. Importing this module imports JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.experimental.buffer_callback import buffer_callback

from . import api, dispatch, mods
from .call.arguments import prepare
from .call.checks import window_of
from .call.jax_derivatives import bind, evaluated_by
from .call.second_order import second_order
from .call.sequences import check_default_offset
from .call.vjp import DIFFERENTIABLE
from .errors import shown
from .numeric import number
from .options import (
    DEFAULTS,
    NUMBERS,
    OPTIONS,
    Options,
    Role,
    closed,
    documented,
    misplaced,
    ours,
    unknown,
    unknown_of,
    with_axes,
)

__all__ = ["attention", "dot_product_attention"]

Arrays = dict[str, Any]

Static = tuple[tuple[str, Any], ...]
"""What JAX compiles a call for, with names: compared by value, functions and block masks by identity."""

NOT_TAKEN = with_axes("memory")
"""Options of `flashkit.attention` that are not taken here."""

ENTRIES, PAIRS, ARRAYS = with_axes("entries"), with_axes("pairs"), with_axes("entries", "heads", "pairs")


@documented(*NOT_TAKEN)
def attention(
    q: Any = None, k: Any = None, v: Any = None, *more: Any, return_lse: bool = False, backend: str | None = None,
    **options: Unpack[Options],
) -> Any:  # fmt: skip
    """`flashkit.attention` on JAX arrays, differentiable by q, k, v, sinks, bias, alibi_slopes and a floating mask,
    under jit, grad and vmap.

    Parameters
    ----------
    q, k, v
        JAX arrays, traced or not, of one dtype: float64 (with jax_enable_x64), float32, float16 or bfloat16. Shapes as
        for `flashkit.attention`.
    return_lse
        Return (out, lse), both differentiable.
    backend
        Name of the backend; static.
    {options}

    Returns
    -------
    out : jax.Array
        Of q's shape with v's head dim, and of q's dtype.
    lse : jax.Array
        If return_lse: (..., Hq, Nq), as of `flashkit.attention`.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid. What depends on the values of traced arrays is checked when the program runs, and
        raised as JAX's own error with the same message.
    flashkit.UnsupportedError
        No backend can compute it.

    Notes
    -----
    Arrays among the options may be traced, and so may `seed`. Of these the floating ones have gradients. `kv_lengths`
    needs `q_offset` or lengths of the queries where masks or scores depend on positions and there are several queries.
    On a GPU a traced seed is copied to the host by each call, which waits for the stream. dropout_p needs a seed.

    The other options are static: a program is compiled for their values, and for each function and block mask by its
    identity, so make these once. Arrays of modifications are constants of the program.

    `jax.vmap` becomes batch axes of one call where every argument allows that, and one call for each entry otherwise.
    Forward-mode derivatives (`jax.jvp`) are those of `flashkit.attention_jvp`. Second derivatives by q, k and v mix one
    forward and one reverse mode, or two reverse modes; they compute with array operations, block by block.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from flashkit.jax import attention
    >>> q = jax.random.normal(jax.random.key(0), (1, 4, 32, 16))
    >>> loss = jax.jit(lambda q: attention(q, q, q, causal=True).sum())
    >>> jax.grad(loss)(q).shape
    (1, 4, 32, 16)
    """
    if v is None or more:
        raise misplaced("flashkit.jax.attention", more, options)
    if not options.keys() <= DEFAULTS.keys() - {*NOT_TAKEN}:
        known = [name for name in (*DEFAULTS, "return_lse", "backend") if name not in NOT_TAKEN]
        raise unknown("flashkit.jax.attention", [name for name in options if name not in known], known)
    if (key := options.get("seed")) is not None and jnp.issubdtype(getattr(key, "dtype", int), jax.dtypes.prng_key):
        options["seed"] = jax.random.bits(key)
    dispatch.forced(backend)  # which names those that there are
    q, k, v = map(jnp.asarray, (q, k, v))
    arrays = {
        name: jnp.asarray(options[name])  # type: ignore[literal-required]
        for name in (*ARRAYS, "seed")
        if not isinstance(options.get(name), int | np.integer | None)
    }
    chosen = {"backend": backend} | {n: x for n, x in options.items() if n not in arrays and x is not None}
    static = tuple((name, _hashable(name, x)) for name, x in sorted(chosen.items()))
    layout = options.get("layout", "bhnd")
    _check(static, (q, k, v), arrays)
    arrays = {name: _form(name, x, q.shape, layout) for name, x in arrays.items()}
    tensors = {name: _four_axes(x, layout) for name, x in (("q", q), ("k", k), ("v", v))}
    # What is equal on all devices of a `jax.shard_map` becomes part of results that are not: its gradient is their sum.
    cast = _varying_alike(tensors | arrays, _varying_axes(tensors | arrays))
    out, *lse = _attend(static, return_lse, *map(cast.pop, tensors), cast)
    out = out.reshape((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[:-1] if layout == "bhnd" or q.ndim == 2 else (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return (out, lse[0].reshape(rows)) if return_lse else out


@closed
def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None, implementation: str | None = None,
    return_residual: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """`attention` with the arguments of `jax.nn.dot_product_attention`.

    Parameters
    ----------
    query, key, value
        (B, T, N, H), (B, S, K, H) and (B, S, K, H), N a multiple of K; or each without B.
    bias, mask
        Floating, added to the scores, and bool, True = attend; both broadcast to (B, N, T, S).
    scale
        Factor on the scores; 1 / sqrt(H) by default.
    is_causal
        Key j is visible to query i iff j <= i: the top-left alignment, as in JAX.
    query_seq_lengths, key_value_seq_lengths
        (B,) integers: rows past the former are 0, keys past the latter do not exist.
    local_window_size
        (left, right), or one number for both.
    implementation
        Name of a backend of flashkit.
    return_residual
        Return (out, lse), without a gradient by lse.

    Returns
    -------
    out : jax.Array
        Of query's shape. A row without a visible key is 0, where JAX gives the mean of value.
    lse : jax.Array
        If return_residual: (B, T, N), of query's dtype.

    Raises
    ------
    TypeError, ValueError
        An argument is invalid; messages call query, key and value q, k and v.

    Examples
    --------
    >>> import jax
    >>> from flashkit.jax import dot_product_attention
    >>> x = jax.random.normal(jax.random.key(0), (2, 32, 4, 16))
    >>> expected = jax.nn.dot_product_attention(x, x, x, is_causal=True)
    >>> bool(abs(dot_product_attention(x, x, x, is_causal=True) - expected).max() < 1e-5)
    True
    """
    if others:
        raise unknown_of(dot_product_attention, others)
    if isinstance(local_window_size, int):
        local_window_size = (local_window_size, local_window_size)
    attended = attention(
        query, key, value, q_offset=0, layout="bnhd", backend=implementation, return_lse=return_residual,
        **ours(dict(
            bias=bias, mask=mask, scale=scale, is_causal=is_causal, local_window_size=local_window_size,
            query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        )),
    )  # fmt: skip
    if not return_residual:
        return attended
    out, lse = attended
    return out, jax.lax.stop_gradient(lse.swapaxes(-1, -2).astype(out.dtype))


# --- before the program -----------------------------------------------------------------------------------------------


def _hashable(name: str, value: Any) -> Any:
    """A static argument as JAX can compare it."""
    if name == "window":
        return window_of(value)
    return number(name, value) if name in NUMBERS else value


def _numbers_entries(static: Static) -> bool:
    """Whether a result may depend on the number of a batch entry: with dropout, functions and block masks."""
    roles = {OPTIONS[name].role for name, value in static if value and name != "backend"}
    return not roles.isdisjoint((Role.PER_CALL, Role.IDENTITY))


def _check(static: Static, tensors: tuple[Any, Any, Any], arrays: Arrays) -> None:
    """Every check that needs no values of arrays, so that errors come where the call is written."""
    named = dict(static)
    if named.get("dropout_p") and "seed" not in named.keys() | arrays.keys():
        raise ValueError("seed: expected an integer beside dropout_p, traced or not: both passes drop the same pairs")
    if "seed" in arrays and (arrays["seed"].shape != () or arrays["seed"].dtype.kind not in "iu"):
        raise TypeError(f"seed: expected an integer, such as jax.random.bits(key), got {shown(arrays['seed'])}")

    def stand_in(x: Any) -> np.ndarray:
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)

    options: Any = named | {name: stand_in(x) for name, x in arrays.items() if name != "seed"}
    del options["backend"]
    own = [mods.trace(named[f"{kind}_mod"], kind) for kind in ("score", "mask") if f"{kind}_mod" in named]
    if arrays.keys() & ENTRIES:  # indices are checked by positions, which are unknown
        options |= dict(score_mod=None, mask_mod=None)
    problem = prepare(*map(stand_in, tensors), described=True, **options)[0]
    if "kv_lengths" in arrays and len({*arrays, *named}.intersection(ENTRIES)) == 1:
        graphs = problem.spec.score, problem.spec.mask, *(mod.expr for mod in own)
        check_default_offset(None, problem.n_q, graphs)


def _four_axes(x: Any, layout: str) -> Any:
    """q, k or v as (B, H, N, D), or (B, N, H, D) in the other layout."""
    if x.ndim == 2:
        x = x[None] if layout == "bhnd" else x[:, None]
    return x.reshape((math.prod(x.shape[:-3]), *x.shape[-3:]))


def _form(name: str, x: Any, shape: tuple[int, ...], layout: str) -> Any:
    """An argument of any accepted shape in the one that callbacks get; vmap adds axes before these."""
    batch = shape[:-3]
    entries = math.prod(batch)
    if name in ENTRIES:
        return jnp.broadcast_to(x.reshape(-1) if x.ndim else x, (entries,))
    if name in PAIRS:
        if x.ndim > 3 and len(batch) > 1:
            if any(n != 1 for n in x.shape[:-3]):
                x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
            x = x.reshape((math.prod(x.shape[:-3]), *x.shape[-3:]))
        return x.reshape((1,) * (4 - x.ndim) + x.shape)
    return x


# --- the program ------------------------------------------------------------------------------------------------------


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _differentiable(static: Static, with_lse: bool, q: Any, k: Any, v: Any, arrays: Arrays) -> tuple[Any, ...]:
    """(out,) or (out, lse) of four axes each, and three."""
    results = {"out": jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)}
    if with_lse:
        heads_first = dict(static).get("layout", "bhnd") == "bhnd"
        batch, heads, n_q = q.shape[:-1] if heads_first else (q.shape[0], q.shape[2], q.shape[1])
        lse_dtype = np.float64 if q.dtype == np.float64 else np.float32
        results["lse"] = jax.ShapeDtypeStruct((batch, heads, n_q), lse_dtype)
    given = {"q": q, "k": k, "v": v, **arrays}
    found = _varying_alike(_call("forward", static, given, results), _varying_axes(given))
    return tuple(found[name] for name in results)


def _jvp(static: Static, with_lse: bool, primals: Any, tangents: Any) -> Any:
    values, moved = ({"q": q, "k": k, "v": v, **arrays} for q, k, v, arrays in (primals, tangents))
    out, lse = _differentiable(static, True, *primals)
    wanted = {f"d{n}": x for n in DIFFERENTIABLE if n in moved and not isinstance(x := moved[n], SymbolicZero)}
    dout, dlse = jnp.zeros_like(out), jnp.zeros_like(lse)
    if wanted:
        found = bind("tangent", static, {**values, "out": out, "lse": lse, **wanted}, ("dout", "dlse"))
        dout, dlse = found["dout"], found["dlse"]
    return ((out, lse), (dout, dlse)) if with_lse else ((out,), (dout,))


_differentiable.defjvp(_jvp, symbolic_zeros=True)
_attend = jax.jit(_differentiable, static_argnums=(0, 1))


def _call(kind: str, static: Static, arrays: Arrays, results: Arrays, extra: int = 0) -> Arrays:
    """A callback that fills the results by a function of `_RUN`, as "to NAME". extra: axes that vmap has put before."""
    places = {**arrays, **{f"to {name}": x for name, x in results.items()}}
    axes = {name: len(x.shape) - extra for name, x in places.items()}

    def callback(context: Any, out: Any, given: Any) -> None:
        with _views(context, {**given, **{f"to {name}": x for name, x in out.items()}}) as named:
            _each(static, axes, named, partial(_RUN[kind], static))

    method = "expand_dims" if kind == "forward" else None  # derivatives have a rule of their own
    found: Arrays = buffer_callback(callback, results, vmap_method=method)(arrays)
    return found


evaluated_by(_call)


def _varying_axes(arrays: Arrays) -> frozenset[str]:
    """The axes of the mesh of `jax.shard_map` along which one of the arrays may differ."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays.values()))


def _varying_alike(arrays: Arrays, axes: frozenset[str]) -> Arrays:
    """The same arrays, marked as different along these axes of the mesh. Callbacks do not mark their results."""
    missing = {name: tuple(sorted(axes - _varying_axes({name: x}))) for name, x in arrays.items()}
    return {name: jax.lax.pcast(x, missing[name], to="varying") if missing[name] else x for name, x in arrays.items()}


# --- while the program runs -------------------------------------------------------------------------------------------

HOST = 1
"""Type of a CPU in DLPack."""


@contextmanager
def _views(context: Any, buffers: Arrays) -> Iterator[Arrays]:
    """XLA's buffers as arrays of NumPy, or of CuPy in whose current stream XLA runs."""
    kind, device = next(iter(buffers.values())).__dlpack_device__()
    if kind == HOST:
        yield {name: np.asarray(buffer) for name, buffer in buffers.items()}
        return
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.ExternalStream(context.stream, device):
        yield {name: _on_device(cupy, device, buffer) for name, buffer in buffers.items()}


def _on_device(cupy: Any, device: int, buffer: Any) -> Any:
    dtype = np.dtype(buffer.dtype)
    size = math.prod(buffer.shape) * dtype.itemsize
    if not size:
        return cupy.empty(buffer.shape, dtype)
    try:
        address = buffer.__cuda_array_interface__["data"][0]
    except Exception:  # bfloat16 has no name in that interface
        return cupy.from_dlpack(buffer)
    memory = cupy.cuda.UnownedMemory(address, size, buffer, device)
    return cupy.ndarray(buffer.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def _each(static: Static, axes: dict[str, int], arrays: Arrays, run: Callable[[Arrays], None]) -> None:
    """Run on these arrays, with vmap's axes as batch axes or entry by entry; length 1 where all have one array."""
    extra = next(x.ndim - axes[name] for name, x in arrays.items())
    lead = np.broadcast_shapes(*(x.shape[:extra] for x in arrays.values()))
    flat = not _numbers_entries(static) and not arrays.keys() & ("seed", *with_axes("heads"))
    flat &= all(arrays[name].shape[:extra] == lead for name in PAIRS if f"to d{name}" in arrays)
    if not extra or (flat and all(x.shape[:extra] == lead for n, x in arrays.items() if n not in PAIRS)):
        run(arrays)
        return
    for index in np.ndindex(lead):
        places = {
            name: tuple(i if n > 1 else 0 for i, n in zip(index, x.shape[:extra], strict=True))
            for name, x in arrays.items()
        }
        run({name: x[places[name]] for name, x in arrays.items()})


def _options(static: Static, arrays: Arrays) -> Arrays:
    options = dict(static) | {name: arrays[name] for name in ARRAYS if name in arrays}
    if "seed" in arrays:
        options["seed"] = int(arrays["seed"]) % 2**64
    return options


def _run_forward(static: Static, arrays: Arrays) -> None:
    q, k, v, out, lse = (arrays.get(name) for name in ("q", "k", "v", "to out", "to lse"))
    found: Any = api.attention(q, k, v, out=out, return_lse=lse is not None, **_options(static, arrays))
    if lse is not None:
        lse[...] = found[1]


def _put(arrays: Arrays, **results: Any) -> None:
    """Write those of these results that the program asks for."""
    for name, result in results.items():
        if f"to {name}" in arrays:
            arrays[f"to {name}"][...] = result


def _run_tangent(static: Static, arrays: Arrays) -> None:
    q, k, v = (arrays[name] for name in "qkv")
    tangents = {name: arrays.get(name) for name in ("dq", "dk", "dv", "dsinks")}
    _, (dout, dlse) = api.jvp_of(q, k, v, tangents, **_options(static, arrays))
    _put(arrays, dout=dout, dlse=dlse)


def _run_pull_back(static: Static, arrays: Arrays) -> None:
    vjp = api.vjp_of(*(arrays[name] for name in ("q", "k", "v", "out", "lse")), **_options(static, arrays))
    names = tuple(name for name in DIFFERENTIABLE if f"to d{name}" in arrays)
    dout = arrays["dout"] if "dout" in arrays else 0 * arrays["out"]
    vjp.check_names(names)
    found = vjp.gradients(dout, arrays.get("dlse"), names)
    _put(arrays, **{f"d{name}": gradient for name, gradient in zip(names, found, strict=True)})


def _run_second(static: Static, arrays: Arrays) -> None:
    q, k, v = (arrays[name] for name in "qkv")
    direction = {f"d{name}": arrays.get(f"u{name}") for name in "qkv"}
    dout, dlse = arrays["dout"] if "dout" in arrays else 0 * arrays["out"], arrays.get("dlse")
    dq, dk, dv = second_order(q, k, v, direction, dout, dlse, **_options(static, arrays))
    _put(arrays, dq=dq, dk=dk, dv=dv)


_RUN = {"forward": _run_forward, "tangent": _run_tangent, "pull_back": _run_pull_back, "second": _run_second}
