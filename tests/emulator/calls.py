"""Calls that tests of the emulated device make, and what is expected of them."""

import re
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

import cases
import numpy as np

import flashkit
from flashkit.call.arguments import prepare


class _Current:
    def __getattr__(self, name: str) -> Any:
        return getattr(import_module("cupy"), name)


cupy: Any = _Current()
"""CuPy as it is at the time: while a test has the emulated device, the one of that."""

FEATURES = cases.with_(
    dtype="float16", batch="3", heads="4:2", sizes="140x330", dims="64", storage="swapped", out="poisoned",
    causal="yes", q_offset="array", kv_lengths="yes", sinks="yes", dlse="yes",
)  # fmt: skip
"""Most features that kernels have code for, in one specification, as each one is compiled by itself."""

SIMT_FEATURES = {**FEATURES, "dtype": "float32", "sizes": "70x330"}

PLAIN = cases.with_(dtype="bfloat16", batch="1", heads="4:2", sizes="200x330", dims="64", dlse="yes")

GROWTH = {"float64": 32, "float32": 32, "float16": 32, "bfloat16": 60}
"""Of scores along the keys, in base e: past what a speculative row maximum admits, three tiles before."""

LESS = 77
"""By how many keys the first batch entry is shorter than the others' memory."""

FIRST_KEY = 150
"""The first key that odd heads see, so that a tile of a packed group is FULL for one head and EMPTY for the other."""


def features(generation: str) -> cases.Choice:
    return SIMT_FEATURES if generation == "simt" else FEATURES


def of_heads(b: object, h: int, q: object, k: int) -> object:
    """A mask: odd heads do not see the first keys."""
    return (h % 2 == 0) | (k >= FIRST_KEY)


def build(choice: cases.Choice, data: str = "random") -> cases.Call:
    """A call on the current device.

    With lengths, keys and values behind them are NaN, or finite in the third batch entry; a causal mask has `of_heads`.
    Lengths lie on the device, where host code cannot check them: one is short, so that one key too many counts; one is
    more than the keys that there are, where all rows see all keys; and half of the rows of the third batch entry, whole
    warp groups among them, see none.

    data: "growing", where the maximum of some of a tile's rows grows from tile to tile, in one direction along the keys
    in the first head and in the other in the last; "NaN", where a key and its value are NaN and half of the rows do not
    see them; or "cancelling", where two tiles of keys add much to a column of dQ that cancels, so that the order of the
    tiles shows in 16 bits.
    """
    call = cases.build(choice, cupy)
    arrays = {name: call.plain[name].copy() for name in "qkv"}
    (batch, heads, n_q, dim), (heads_kv, n_k) = arrays["q"].shape, arrays["k"].shape[1:3]
    if data == "growing":
        b, h, token = np.ogrid[:batch, :heads, :n_q]
        arrays["q"][..., 0] = ((token // 4 + token // 32 + b) % 2 == 0) * dim**0.5 + 0 * h
        growth = np.linspace(0, GROWTH[choice["dtype"]], n_k)
        arrays["k"][..., 0] = growth
        arrays["k"][:, heads_kv // 2 :, :, 0] = growth[::-1]
    elif data == "NaN":
        key = n_k - LESS - 1 - n_q // 2
        arrays["k"][0, 0, key] = arrays["v"][0, 0, key] = np.nan
    elif data == "cancelling":
        arrays["q"][..., 5] = 0
        many = n_k - 256  # keys of the third tile; the first one has the same, the one between shows in what order
        for x in (arrays["k"], arrays["v"]):
            x[:, :, 256:] = x[:, :, :many]
        arrays["k"][..., 5] = 2.0**-6
        arrays["k"][:, :, :many, 5], arrays["k"][:, :, 256:, 5] = 1024, -1024
    if data != "random":
        for name, x in arrays.items():
            call.plain[name] = x
            getattr(call, name)[...] = cupy.asarray(x)
    if choice["alibi"] == "(Hq,)":  # far keys count most in odd heads, near ones in the others
        call.plain["alibi_slopes"] = call.plain["alibi_slopes"] * np.float32(-1) ** np.arange(heads, dtype=np.float32)
        call.options["alibi_slopes"] = cupy.asarray(call.plain["alibi_slopes"])
    if choice["kv_lengths"] == "yes":
        lengths = np.array([n_k - LESS, n_k + 40, 5], np.int32)[:batch]
        call.options["kv_lengths"], call.plain["kv_lengths"] = cupy.asarray(lengths), np.minimum(lengths, n_k)
        if choice["causal"] == "yes":
            offsets = np.array([n_k - LESS - n_q, n_k + 40, -(n_q // 2) - 1])[:batch]
            call.options["q_offset"] = offsets if choice["dtype"] == "float32" else cupy.asarray(offsets)
            call.plain["q_offset"] = offsets
            call.options["mask_mod"] = call.plain["mask_mod"] = of_heads
        for b, n in enumerate(call.plain["kv_lengths"][:2]):
            call.k[b, :, n:] = call.v[b, :, n:] = np.nan
    return call


@lru_cache(maxsize=32)
def _expected(choice: tuple[tuple[str, str], ...], data: str, gradients: bool) -> tuple[cases.Results, cases.Results]:
    call = build(dict(choice), data)
    if data != "NaN":
        return cases.expected(call, gradients=gradients)
    problem, operands, _ = prepare(**call.plain)
    of_results = (call.plain_dout, call.plain_dlse) if gradients else (None, None)
    exact = cases.computed(problem.spec, operands, *of_results, np.float64)
    return exact, _expected(choice, "random", gradients)[1]


def expected(choice: cases.Choice, data: str = "random", gradients: bool = True) -> tuple[cases.Results, cases.Results]:
    """The definition in float64 and the tolerance, as cases.py has them; where data has NaN, of the call without."""
    return _expected(tuple(choice.items()), data, gradients)


def check(choice: cases.Choice, backend: str, data: str = "random", deterministic: bool = False) -> cases.Results:
    """Both passes against the definition; AssertionError where they differ."""
    call = build(choice, data)
    if deterministic:
        call.options["deterministic"] = True
    found = cases.run(call, backend)
    got, (exact, allowed) = found, expected(choice, data)
    if data == "NaN":  # a row whose delta is NaN may make every dK and dV of its tile NaN
        got, exact = (cases.Results(x.out, x.lse, x.dq, x.dq, x.dq, None) for x in (got, exact))
    cases.assert_conforms(got, exact, allowed)
    if data == "random":
        cases.assert_rounded_once(got, exact)
    return found


def check_forward(choice: cases.Choice, backend: str, data: str = "random") -> None:
    """Output and log-sum-exp alone."""
    call = build(choice, data)
    out, lse = flashkit.attention(call.q, call.k, call.v, return_lse=True, backend=backend, **call.options)
    got = cases.Results(call.to_plain(out), call.rows_to_plain(lse), None, None, None, None)
    cases.assert_conforms(got, *expected(choice, data, gradients=False))


def moved(x: Any) -> Any:
    """With arrays on the device, those in tuples and the values of a dictionary, too."""
    if isinstance(x, dict):
        return {name: moved(each) for name, each in x.items()}
    return tuple(map(moved, x)) if isinstance(x, tuple) else cupy.asarray(x) if isinstance(x, np.ndarray) else x


def check_arrays(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray | None = None, *,
    backend: str = "cupy_raw", on_device: bool = False, given: dict[str, Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    """Results, and by dout the gradients, are within rounding of those of the reference in float64.

    on_device: whether arrays among the options lie on the device, too. given: what the device gets for options.
    """
    given = (moved(options) if on_device else options) | (given or {})
    wide = [x.astype(np.float64) for x in (q, k, v)]
    if dout is None:
        found = flashkit.attention(*map(cupy.asarray, (q, k, v)), backend=backend, **given)
        exact = flashkit.attention(*wide, backend="reference", **options)
    else:
        out, vjp = flashkit.attention_vjp(*map(cupy.asarray, (q, k, v)), backend=backend, **given)
        right, right_vjp = flashkit.attention_vjp(*wide, backend="reference", **options)
        found, exact = (out, *vjp(cupy.asarray(dout))), (right, *right_vjp(dout.astype(np.float64)))
    cases.within_a_unit(found, exact)


def normal(dtype: Any, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def generations(launched: Iterable[str]) -> set[str]:
    """The generations of kernels, by the names of those that have one in theirs."""
    return {found[0] for name in launched if (found := re.match(r"sm\d+|simt", name))}
