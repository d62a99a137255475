"""Gradients by what a score modification reads: biases, slopes, tables and numbers. Every backend against the
definition, the definition against finite differences.
"""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest

import flashkit
from flashkit import mods, reference
from flashkit.call.arguments import prepare
from flashkit.call.vjp import Recorded, Vjp

Options = dict[str, Any]
slow = pytest.mark.slow


def by_distance_and_head(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any, gain: Any) -> Any:
    """A table by distance and head that is a factor, so that its slope is the score, and a number."""
    return s * gain + s * table[h, flashkit.clip(abs(q - k), 0, 4)]


def by_entry(s: Any, b: Any, h: Any, q: Any, k: Any, *, rows: Any, reach: Any) -> Any:
    """Indices that no axis follows, in two places, under a condition that integers decide."""
    return flashkit.where(q - k < reach, s + rows[b, (q + 9) % 7] * rows[0, k % 7], s)


def build(heads: int, n_q: int, n_k: int, batch: int, what: str, dtype: str) -> tuple[Options, tuple[str, ...]]:
    """Options of a call, and what it is differentiated by."""
    rng = np.random.default_rng(len(what))
    wide = np.float64 if dtype == "float64" else np.float32

    def floats(*shape: int) -> np.ndarray:
        return np.asarray(rng.standard_normal(shape)).astype(wide)

    table = mods.score(by_distance_and_head, table=floats(heads, 5), gain=0.8)
    every = {
        "shared bias": ({"bias": floats(1, heads, n_q, n_k)}, ("bias",)),
        "own bias": ({"bias": floats(batch, heads, n_q, n_k), "causal": True}, ("bias",)),
        "bias of pairs": ({"bias": floats(n_q, n_k), "kv_lengths": [n_k - 2] * batch, "q_offset": 0}, ("bias",)),
        "bias of rows": ({"bias": floats(batch, 1, n_q, 1), "window": (9, 4)}, ("bias",)),
        "a number as a bias": ({"bias": floats(), "causal": True}, ("bias",)),
        "mask of keys": ({"mask": floats(batch, 1, 1, n_k), "bias": floats(heads, 1, n_k)}, ("mask", "bias")),
        "slopes": ({"alibi_slopes": floats(heads) * 0.1, "causal": True}, ("alibi_slopes",)),
        "slopes of entries": (
            {"alibi_slopes": floats(batch, heads) * 0.1, "softcap": 2.0}, ("alibi_slopes", "softcap"),
        ),
        "table": ({"score_mod": table}, ("score.table", "score.gain")),
        "rows": ({"score_mod": mods.score(by_entry, rows=floats(batch, 7), reach=3)}, ("score.rows",)),
        "T5": ({"score_mod": mods.t5_bias(floats(8, heads), max_distance=12)}, ("score.table",)),
        "everything": ({
            "bias": floats(1, heads, n_q, n_k), "alibi_slopes": floats(heads) * 0.1, "mask": floats(n_k),
            "softcap": 3.0, "score_mod": table.then(mods.t5_bias(floats(8, heads), max_distance=12)), "causal": True,
            "window": (30, 2),
            "sinks": floats(heads), "dropout_p": 0.2, "seed": 3, "kv_lengths": [n_k, n_k - 3, n_k - 1][:batch],
            "q_offset": 2,
        }, ("bias", "alibi_slopes", "mask", "softcap", "score.table", "score.gain", "score.table_")),
    }  # fmt: skip
    return every[what]


SMALL, LARGE = (4, 13, 15, 2), (4, 70, 90, 3)
WHATS = (
    "shared bias", "own bias", "bias of pairs", "bias of rows", "a number as a bias", "mask of keys", "slopes",
    "slopes of entries", "table", "rows", "T5", "everything",
)  # fmt: skip


def tensors(sizes: tuple[int, ...], dtype: str, heads_kv: int = 2) -> list[np.ndarray]:
    heads, n_q, n_k, batch = sizes
    rng = np.random.default_rng(0)
    shapes = (heads, n_q, 16), (heads_kv, n_k, 16), (heads_kv, n_k, 24)
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def on(xp: Any, options: Options) -> Options:
    """The options with arrays of a library."""
    moved = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if (mod := options.get("score_mod")) is not None:
        arrays = {name: xp.asarray(x) for name, x in mod.arrays.items()}
        moved["score_mod"] = mods.Mod("score", mod.expr, mod.params, arrays)
    return moved


def definition(
    qkv: list[np.ndarray], options: Options, wrt: tuple[str, ...], dout: np.ndarray, dtype: Any = np.float64
) -> tuple[np.ndarray, ...]:
    """The gradients by the definition in a precision."""
    problem, operands, shape = prepare(*qkv, **options)
    operands.out, operands.lse = reference.standard(problem.spec, operands)

    def run(_: Any, to: Any) -> None:
        for name in to.values:
            to.values[name] = np.zeros(np.shape(operands.arrays.get(name, 0.0)), operands.lse.dtype)
        slots = tuple(sorted(to.values))
        spec = dataclasses.replace(problem.spec, wrt=slots)
        reference.standard_gradients(spec, operands, to.dout, None, dtype, to.values)

    return Vjp[Any](Recorded(problem, operands, shape, run), options).gradients(dout, None, wrt)


def magnitude(head: Any, s: Any, p: Any, ds: Any, rows: Any, keys: Any) -> None:
    """reference.add_value_gradients with all terms by their absolute values."""
    for read in head.spec.reads:
        index = tuple(head.evaluate(i, rows, keys) for i in read.indices)
        terms = reference.select(p != 0, np.abs(ds * head.evaluate(read.slope, rows, keys, s)))
        np.add.at(head.values[read.name], index, terms if index else terms.sum())


@pytest.mark.parametrize(
    ("backend", "what", "dtype"),
    [
        pytest.param(*backend.values, what, dtype, marks=[*backend.marks, *[slow] * (dtype != "float32")])
        for backend in cases.backends()
        for what in WHATS
        for dtype in (("float32", "float64", "bfloat16") if what in ("everything", "rows") else ("float32",))
    ],
)
@pytest.mark.one_in(4)
def test_conforms(backend: str, what: str, dtype: str) -> None:
    """Within twice the error of the plain computation and a unit of the terms' sum."""
    cases.skip_unless(backend)
    sizes = SMALL if backend == "reference" else LARGE
    options, wrt = build(*sizes, what, dtype)
    qkv = tensors(sizes, dtype)
    xp = cases.array_library(backend)
    out, vjp = flashkit.attention_vjp(*map(xp.asarray, qkv), backend=backend, **on(xp, options))
    dout = np.random.default_rng(1).standard_normal(out.shape).astype(qkv[0].dtype)
    found = [cases.to_numpy(x) for x in vjp(xp.asarray(dout), wrt=wrt)]
    exact = definition(qkv, options, wrt, dout)
    plain = definition(qkv, options, wrt, dout, np.float32 if dtype == "float64" else qkv[0].dtype)
    with mock.patch.object(reference.steps, "add_value_gradients", magnitude):
        sums = definition(qkv, options, wrt, dout)
    ratio = cases.epsilon("float64") / cases.epsilon("float32") if dtype == "float64" else 1
    for name, got, right, near, most in zip(wrt, found, exact, plain, sums, strict=True):
        given = options.get(name)
        assert got.shape == (right.shape if given is None else np.shape(given)), name
        allowed = 2 * ratio * np.abs(near.astype(np.float64) - right).max() + cases.epsilon(dtype) * most.max()
        assert np.abs(got.astype(np.float64) - right).max() <= allowed, name


def test_finite_differences() -> None:
    """Of everything at once by the definition, which test_conforms measures by, and of packed sequences."""
    options, wrt = build(*SMALL, "everything", "float64")
    _check_differences(tensors(SMALL, "float64"), options, wrt, ("reference",))
    q, k, v = (np.concatenate([x[0], x[1]], 1).swapaxes(0, 1) for x in tensors(SMALL, "float64"))
    table = mods.score(by_entry, rows=np.random.default_rng(2).standard_normal((3, 7)), reach=3)
    packed = {"cu_seqlens": ([0, 5, 5, 26], [0, 9, 12, 30]), "score_mod": table, "alibi_slopes": np.full(4, 0.1)}
    _check_differences([q, k, v], packed, ("score.rows", "alibi_slopes"), ("reference", "cpu"))


def _check_differences(qkv: list[np.ndarray], options: Options, wrt: tuple[str, ...], backends: Any) -> None:
    rng = np.random.default_rng(5)
    out = flashkit.attention(*qkv, backend="reference", **options)
    dout = rng.standard_normal(out.shape)
    found = [flashkit.attention_vjp(*qkv, backend=b, **options)[1](dout, wrt=wrt) for b in backends]
    for i, name in enumerate(wrt):
        direction = rng.standard_normal(found[0][i].shape)
        low, high = (
            (flashkit.attention(*qkv, backend="reference", **_moved(options, name, step * direction)) * dout).sum()
            for step in (-1e-6, 1e-6)
        )
        for gradients in found:
            assert abs((gradients[i] * direction).sum() - (high - low) / 2e-6) < 1e-5 * (1 + abs(high - low) / 2e-6)


def _moved(options: Options, name: str, by: Any) -> Options:
    if not name.startswith("score."):
        moved = options[name] + by
        return options | {name: float(moved) if np.ndim(options[name]) == 0 else moved}
    mod, key = options["score_mod"], name.removeprefix("score.")
    params = {n: float(x + by) if n == key else x for n, x in mod.params.items()}
    arrays = {n: x + by if n == key else x for n, x in mod.arrays.items()}
    return options | {"score_mod": mods.Mod("score", mod.expr, params, arrays)}


def test_the_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With deterministic=True: sums of their own for each work tile, and elements that a work tile has for itself."""
    q, k, v = tensors((8, 300, 300, 2), "float32", heads_kv=4)
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((1, 8, 300, 300)).astype(np.float32)
    table = mods.t5_bias(rng.standard_normal((32, 8)).astype(np.float32))
    found = []
    for count in (1, 2, 3, 2):
        monkeypatch.setattr("flashkit.backends.cpu.threads.count", lambda count=count: count)
        _, vjp = flashkit.attention_vjp(q, k, v, bias=wide, score_mod=table, deterministic=True, backend="cpu")
        found.append(vjp(np.ones((2, 8, 300, 24), np.float32), wrt=("bias", "score.table")))
    for other in found[1:]:
        cases.same(found[0], other)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_values_that_no_pair_reads_and_hidden_nan(backend: str) -> None:
    """Gradients are 0 where nothing is read, and of masked pairs, even if these hold NaN."""
    q, k, v = tensors(SMALL, "float32")
    k, v = k.copy(), v.copy()
    k[:, :, 10:], v[:, :, 10:] = np.nan, np.nan
    bias = np.zeros((1, 4, 13, 15), np.float32)
    bias[..., 3] = -np.inf
    _, vjp = flashkit.attention_vjp(q, k, v, bias=bias, kv_lengths=[10, 10], q_offset=0, backend=backend)
    (dbias,) = vjp(np.ones((2, 4, 13, 24), np.float32), wrt=("bias",))
    assert np.isfinite(dbias).all() and not dbias[..., 10:].any() and not dbias[..., 3].any() and dbias[..., 0].any()


def _vjp(**options: Any) -> Callable[[str], Any]:
    q, k, v = tensors((2, 3, 4, 1), "float32", heads_kv=1)
    out, vjp = flashkit.attention_vjp(q, k, v, **options)
    return lambda name: vjp(np.ones_like(out), wrt=(name,))


def test_names_without_a_gradient() -> None:
    def odd(s: Any, b: Any, h: Any, q: Any, k: Any, *, numbers: Any, limit: Any, table: Any) -> Any:
        return s + flashkit.where(s > limit[h], table[numbers[k]], 0.0)

    score = mods.score(odd, numbers=np.arange(4) % 2, limit=np.zeros(2), table=np.ones(2))
    every = _vjp(bias=np.zeros((3, 4), np.float32), score_mod=score)
    with pytest.raises(ValueError, match=r"wrt: expected 'q', 'k', 'v', 'bias', .*'score.table', got 'slopes'"):
        every("slopes")
    with pytest.raises(ValueError, match=r"no derivative by 'score\.limit', which a modification only compares"):
        every("score.limit")
    with pytest.raises(TypeError, match=r"'score\.numbers', which is int and has no derivative"):
        every("score.numbers")
    assert every("score.table")[0].shape == (2,)
    with pytest.raises(ValueError, match="'sinks'"):
        every("sinks")
    with pytest.raises(TypeError, match="'mask', got one of bools"):
        _vjp(mask=np.ones((3, 4), bool))("mask")


def test_axes_and_dtypes_are_the_callers() -> None:
    """Batch axes that broadcast, layouts, numbers, and 16 bits."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 5, 4, 8)).astype(np.float16)  # bnhd
    bias = rng.standard_normal((3, 1, 5, 5)).astype(np.float16)
    out, vjp = flashkit.attention_vjp(q, q, q, bias=bias, alibi_slopes=[0.1] * 4, layout="bnhd")
    dbias, dslopes = vjp(np.ones_like(out), wrt=("bias", "alibi_slopes"))
    assert (dbias.shape, dbias.dtype, dslopes.shape, dslopes.dtype) == ((3, 1, 5, 5), bias.dtype, (4,), np.float32)
    flat = q.swapaxes(2, 3).reshape(6, 4, 5, 8)
    wide = np.broadcast_to(bias, (2, 3, 1, 5, 5)).reshape(6, 1, 5, 5)
    _, same = flashkit.attention_vjp(flat, flat, flat, bias=wide, alibi_slopes=[0.1] * 4)
    expected = same(np.ones_like(flat), wrt=("bias",))[0].astype(np.float32).reshape(2, 3, 1, 5, 5).sum(0)
    cases.within_a_unit(dbias, expected)
