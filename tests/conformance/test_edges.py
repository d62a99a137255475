"""What happens at the edges: rows without keys, empty sizes, NaN and infinity, odd memory, one seed, the same bits.

The rules are in flashkit/reference ("At the edges") and hold for every backend; tests that say `backend` run on all.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import attention, attention_vjp, mods
from flashkit.mods import dropout

pytestmark = pytest.mark.filterwarnings("error")

BACKENDS = [b for b in cases.backends() if not b.marks]
DTYPES = ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float64", "float16", "bfloat16"))]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    cases.skip_unless(request.param)
    cases.compiled(request.param, "float32")
    with flashkit.use_backend(request.param):
        yield request.param


def qkv(
    batch: int = 2, heads: int = 2, n_q: int = 9, n_k: int = 12, d: int = 8, dv: int = 6, group: int = 1,
    dtype: Any = "float32", seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, n_q, d), (batch, heads // group, n_k, d), (batch, heads // group, n_k, dv)
    return tuple(rng.standard_normal(s).astype(dtype) for s in shapes)  # type: ignore[return-value]


def everything(q: Any, k: Any, v: Any, *, dout: Any = None, dlse: Any = None, **options: Any) -> dict[str, np.ndarray]:
    """out, lse and all gradients, for random dout and dlse where none are given."""
    wrt = ("q", "k", "v") + (("sinks",) if options.get("sinks") is not None else ())
    (out, lse), vjp = attention_vjp(q, k, v, return_lse=True, **options)
    rng = np.random.default_rng(1)
    dout = rng.standard_normal(out.shape).astype(out.dtype) if dout is None else dout
    dlse = rng.standard_normal(lse.shape).astype(lse.dtype) if dlse is None else dlse
    return {"out": out, "lse": lse, **{f"d{n}": g for n, g in zip(wrt, vjp(dout, dlse, wrt=wrt))}}


def same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The same numbers, to the last few bits: leaving out what is hidden may add in another order."""
    for name, x in expected.items():
        if x.dtype.itemsize == 2:
            cases.within_a_unit(got[name], x)
        else:
            np.testing.assert_allclose(got[name], x, *[64 * cases.epsilon(x.dtype.name)] * 2, err_msg=name)


# --- rows without keys, and nothing at all ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.zeros((9, 12), bool)}, {"bias": np.full((1, 1, 1, 1), -np.inf, np.float32)},
        {"kv_lengths": np.zeros(2, int)}, {"causal": True, "q_offset": -100}, {"window": (0, 0), "q_offset": 1000},
        {"mask_mod": lambda b, h, q, k: k < 0}, {"score_mod": lambda s, b, h, q, k: s - np.inf},
        {"block_mask": flashkit.BlockMask.from_dense(np.zeros((3, 3), bool), 4, 4, 9, 12)},
    ],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_no_key_at_all(backend: str, options: dict[str, Any]) -> None:
    got = everything(*qkv(), **options)
    assert (got["lse"] == -np.inf).all()
    assert all((got[n] == 0).all() for n in ("out", "dq", "dk", "dv"))


def test_no_key_but_a_sink(backend: str) -> None:
    """The sink takes all the weight: lse is its logit, and the gradient by lse is its gradient."""
    q, k, v = qkv(n_q=70)
    sinks = np.array([0.5, -2.0], np.float32)
    dlse = np.random.default_rng(3).standard_normal((2, 2, 70)).astype(np.float32)
    got = everything(q, k, v, sinks=sinks, mask=np.zeros((1, 1), bool), dlse=dlse)
    np.testing.assert_allclose(got["lse"], np.broadcast_to(sinks[:, None], (2, 2, 70)), rtol=1e-6)
    np.testing.assert_allclose(got["dsinks"], dlse.sum((0, 2)), rtol=1e-5)
    assert all((got[n] == 0).all() for n in ("out", "dq", "dk", "dv"))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["dout", "dlse", "v"])
def test_a_sink_without_weight_has_no_gradient(backend: str, where: str, poison: float) -> None:
    """0 times NaN and 0 times infinity count as 0, in rows that see keys and in those that see none."""
    q, k, v = qkv(n_q=20, n_k=12)
    rng = np.random.default_rng(1)
    given = {"v": v, "dout": rng.standard_normal((2, 2, 20, 6)).astype(np.float32)}
    given["dlse"] = rng.standard_normal((2, 2, 20)).astype(np.float32)
    given[where][1, :, 3:] = poison
    sinks = np.array([-np.inf, 0.5], np.float32)
    with np.errstate(invalid="ignore"):
        got = everything(q, k, given["v"], dout=given["dout"], dlse=given["dlse"], causal=True, sinks=sinks)
    assert got["dsinks"][0] == 0 and not np.isfinite(got["dsinks"][1])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("of", ["float32", "float64"])
def test_the_gradient_of_sinks_has_their_dtype(backend: str, of: str, dtype: str) -> None:
    q, k, v = qkv(dtype=of)
    sinks = np.array([0.5, -1.0]).astype(dtype)
    out, vjp = attention_vjp(q, k, v, sinks=sinks)
    (dsinks,) = vjp(np.ones_like(out), wrt=("sinks",))
    (wide,) = attention_vjp(q, k, v, sinks=sinks.astype(of))[1](np.ones_like(out), wrt=("sinks",))
    assert dsinks.dtype == sinks.dtype
    np.testing.assert_array_equal(dsinks, wide.astype(sinks.dtype))


AXES = {"a": 2, "b": 3, "h": 4, "hk": 2, "nq": 5, "nk": 7}


def empty_calls(axes: str) -> Iterator[dict[str, int]]:
    """Sizes with one or two axes of length 0, "abhn"; without keys' heads there are no queries' heads."""
    names = [name for name in AXES if name[0] in axes]
    for zero in (*itertools.combinations(names, 1), *itertools.combinations(names, 2)):
        sizes = {name: 0 if name in zero or (name == "h" and "hk" in zero) else AXES[name] for name in names}
        yield {"h": 1, "hk": 1, **sizes}


@pytest.mark.parametrize(
    "axes", ["n", "hn", "bnh", "abhn", *(pytest.param(x, marks=pytest.mark.exhaustive) for x in ("nh", "bhn", "abnh"))]
)
@pytest.mark.one_in(2)
def test_empty_sizes(backend: str, axes: str) -> None:
    """Every axis and every two axes of length 0, with a third of the options: results and gradients are empty, or 0."""
    layout = "bnhd" if "nh" in axes else "bhnd"
    for number, n in enumerate(empty_calls(axes)):
        batch = tuple(n[name] for name in axes if name in "ab")

        def array(heads: str, tokens: str, dim: int, n: dict[str, int] = n) -> np.ndarray:
            own = {"h": n[heads], "n": n[tokens]}
            return np.ones((*(own.get(axis, n.get(axis)) for axis in axes), dim), np.float32)

        q, k, v = array("h", "nq", 8), array("hk", "nk", 8), array("hk", "nk", 6)
        pairs = (*batch, *([n["h"]] if "h" in axes else []), n["nq"], n["nk"])
        options: dict[str, dict[str, Any]] = {
            "plain": {}, "causal": {"causal": True, "window": (2, 2), "q_offset": 3}, "softcap": {"softcap": 2.0},
            "bias": {"bias": np.ones(pairs, np.float32)}, "bias of ones": {"bias": np.ones((1,) * len(pairs))},
            "short bias": {"bias": np.ones(pairs[-2:])}, "mask": {"mask": np.ones(pairs, bool)},
            "keys' mask": {"mask": np.ones(pairs[-1:], bool)}, "slopes": {"alibi_slopes": np.ones(n["h"])},
            "slopes of entries": {"alibi_slopes": np.ones((math.prod(batch), n["h"]))},
            "sinks": {"sinks": np.ones(n["h"])},
            "lengths": {"kv_lengths": np.full(batch, n["nk"])}, "dropout": {"dropout_p": 0.5, "seed": 1},
            "block mask": {"block_mask": flashkit.BlockMask.from_mod(mods.causal(), n["nq"], n["nk"])},
            "modification": {"score_mod": mods.score(lambda s, b, h, q, k, *, x: s * x[h], x=np.ones(n["h"]))},
        }  # fmt: skip
        for name, option in itertools.islice(options.items(), number % 3, None, 3):
            case = f"{name}, {n}"
            if name == "lengths" and not batch:
                option = {"kv_lengths": n["nk"]}
            got = everything(q, k, v, layout=layout, **option)
            assert got["out"].shape == (*q.shape[:-1], 6) and got["lse"].shape == pairs[:-1], case
            assert [got[x].shape for x in ("dq", "dk", "dv")] == [q.shape, k.shape, v.shape], case
            assert not any(got[x].any() for x in ("out", "dq", "dk", "dv")), case
            assert (got["lse"] == (1 if name == "sinks" else -np.inf)).all(), case
            if name == "sinks":
                assert got["dsinks"].shape == (n["h"],), case
            again = attention(q, k, v, layout=layout, **option)
            assert again.shape == got["out"].shape and not again.any(), case
            assert flashkit.plan(q, k, v, layout=layout, **option)(q, k, v).shape == got["out"].shape, case


@pytest.mark.parametrize("dtype", DTYPES)
def test_axes_of_length_one(backend: str, dtype: str) -> None:
    """One of everything: the result is v, the log-sum-exp the score."""
    q, k, v = qkv(1, 1, 1, 1, 1, 1, dtype=dtype)
    for options in (
        {}, {"causal": True}, {"mask": np.ones((1, 1, 1, 1), bool)}, {"bias": np.zeros(1, np.float32)},
        {"window": (0, 0)}, {"kv_lengths": [1]},
        {"block_mask": flashkit.BlockMask.from_dense(np.ones((1, 1), bool), 1, 1)},
    ):  # fmt: skip
        got = everything(q, k, v, **options)
        np.testing.assert_array_equal(got["out"], v)
        np.testing.assert_allclose(
            got["lse"].item(), q.item() * k.item(), rtol=4 * cases.epsilon(str(got["lse"].dtype))
        )
    for squeezed in ((0,), (0, 1)):
        np.testing.assert_array_equal(attention(*(x.squeeze(squeezed) for x in (q, k, v))), v.squeeze(squeezed))


# --- what is hidden never shows ---------------------------------------------------------------------------------------

POISON = [np.nan, np.inf, -np.inf]
N_Q, N_K = 70, 130  # more than a tile in the reference backend and in parts of the CPU's


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_past_kv_lengths(backend: str, dtype: str, poison: float) -> None:
    q, k, v = qkv(3, 2, N_Q, N_K, dtype=dtype)
    lengths = np.array([N_K, 50, 0])
    options = {"kv_lengths": lengths, "q_offset": lengths - N_Q, "causal": True}
    clean = everything(q, k, v, **options)
    for b, n in enumerate(lengths):
        k[b, :, n:] = poison
        v[b, :, n:] = poison
    got = everything(q, k, v, **options)
    for name, x in clean.items():
        np.testing.assert_array_equal(got[name], x, err_msg=name)
    assert (got["dk"][1, :, 50:] == 0).all() and (got["dv"][2] == 0).all()


@pytest.mark.parametrize("row", [0, -1])
def test_one_row_of_a_tile_sees_other_keys(backend: str, row: int) -> None:
    """The first or the last of a whole tile: without it the tile would see none of these keys."""
    q, k, v = qkv(1, 2, 128, 128)
    q_ids, kv_ids = np.zeros(128, int), np.arange(128) // 64
    q_ids[row] = 1
    same(everything(q, k, v, mask_mod=mods.document(q_ids, kv_ids)), everything(q, k, v, mask=q_ids[:, None] == kv_ids))


def test_arguments_mean_their_formulas(backend: str) -> None:
    """All of them in one call: the default scale and offset, the order of what changes scores, and of what hides keys.

    Comparisons with the reference do not see this, since both sides get their operands from the same arguments.
    """
    batch, heads, n_q, n_k, d = 2, 4, 20, 33, 8
    q, k, v = qkv(batch, heads, n_q, n_k, d, 6, 2, "float64")
    rng = np.random.default_rng(2)
    slopes, sinks = rng.random(heads), rng.standard_normal(heads)
    bias, added = rng.standard_normal((heads, n_q, n_k)), rng.standard_normal((batch, 1, 1, n_k))
    grid = rng.random((5, 5)) < 0.7
    lengths, window, cap = np.array([33, 27]), (20, 3), 2.0
    seen = dict(
        softcap=cap, alibi_slopes=slopes, bias=bias, mask=added, score_mod=lambda s, b, h, q, k: s * 1.5 + 0.1 * h,
        causal=True, window=window, mask_mod=lambda b, h, q, k: (q + k) % 5 != 0, kv_lengths=lengths, sinks=sinks,
        block_mask=flashkit.BlockMask.from_dense(grid, 4, 7, n_q, n_k),
    )  # fmt: skip
    out, lse = attention(q, k, v, **seen, return_lse=True)
    b, h, row, key = np.ogrid[:batch, :heads, :n_q, :n_k]
    at = row + lengths[:, None, None, None] - n_q
    s = q @ k.repeat(2, axis=1).swapaxes(2, 3) / np.sqrt(d)
    s = cap * np.tanh(s / cap)
    s = s - slopes[:, None, None] * abs(at - key)
    s = s + bias + added
    s = s * 1.5 + 0.1 * h
    shown = (key <= at) & (at - 20 <= key) & (key <= at + 3) & ((at + key) % 5 != 0) & (key < lengths[b])
    shown = shown & grid.repeat(4, 0).repeat(7, 1)[:n_q, :n_k]
    e = np.where(shown, np.exp(s), 0)
    total = e.sum(-1) + np.exp(sinks)[:, None]
    np.testing.assert_allclose(lse, np.log(total), rtol=1e-12)
    np.testing.assert_allclose(out, e @ v.repeat(2, axis=1) / total[..., None], rtol=1e-11, atol=1e-13)


HIDING: dict[str, tuple[dict[str, Any], np.ndarray]] = {}
"""Options by name, and the pairs (row, key) that they show. Not among them is a bias of -inf: it adds, and NaN + -inf
is NaN."""


def _hiding() -> None:
    row, key = np.ogrid[:N_Q, :N_K]
    at = row + N_K - N_Q
    rng = np.random.default_rng(5)
    dense = rng.random((N_Q, N_K)) < 0.5
    grid = rng.random((5, 9)) < 0.5
    HIDING["causal"] = {"causal": True}, key <= at
    HIDING["window"] = {"window": (20, 3)}, (at - 20 <= key) & (key <= at + 3)
    HIDING["bool mask"] = {"mask": dense}, dense
    HIDING["block mask"] = (
        {"block_mask": flashkit.BlockMask.from_dense(grid, 16, 16, N_Q, N_K)},
        grid.repeat(16, 0)[:N_Q].repeat(16, 1)[:, :N_K],
    )
    HIDING["mask mod"] = {"mask_mod": lambda b, h, q, k: (k + q) % 3 != 0}, (key + at) % 3 != 0
    HIDING["score mod"] = (
        {"score_mod": lambda s, b, h, q, k: flashkit.where((q + k) % 2 == 0, s, -np.inf)},
        (at + key) % 2 == 0,
    )


_hiding()


@pytest.mark.parametrize("where", ["k", "v", "k and v"])
@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("hiding", HIDING)
def test_poison_in_masked_keys(backend: str, hiding: str, poison: float, where: str) -> None:
    """Rows that do not see the key have the results that they have without the poison, the gradients too."""
    options, shown = HIDING[hiding]
    q, k, v = qkv(1, 2, N_Q, N_K)
    bad = 61
    blind = ~shown[:, bad]
    assert blind.any() and (~blind).any()
    rng = np.random.default_rng(8)
    dout = rng.standard_normal((1, 2, N_Q, 6)).astype(np.float32)
    dout[:, :, ~blind] = 0  # so that what the others see has no part in the gradients of the keys
    dlse = rng.standard_normal((1, 2, N_Q)).astype(np.float32)
    dlse[:, :, ~blind] = 0
    clean = everything(q, k, v, dout=dout, dlse=dlse, **options)
    for name, x in (("k", k), ("v", v)):
        if name in where:
            x[:, :, bad] = poison
    with np.errstate(invalid="ignore"):
        got = everything(q, k, v, dout=dout, dlse=dlse, **options)
    for name in ("out", "lse", "dq"):
        same({name: got[name][:, :, blind]}, {name: clean[name][:, :, blind]})
    unseen = ~shown[~blind].any(axis=0)  # by any row that sees the bad key
    for name in ("dk", "dv"):
        same({name: got[name][:, :, unseen]}, {name: clean[name][:, :, unseen]})


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("where", ["q", "dout", "dlse"])
@pytest.mark.parametrize("hiding", ["causal", "bool mask", "lengths"])
def test_poison_in_rows_that_see_nothing(backend: str, hiding: str, where: str, poison: float) -> None:
    """Their results are those of any row without keys, and they have no part in the gradients of keys and values.

    One column is enough to harm, the first or the last.
    """
    q, k, v = qkv(2, 2, N_Q, 50)
    blind = np.zeros((2, 2, N_Q), bool)
    column = -1 if hiding == "causal" else 0
    options: dict[str, Any] = {"causal": True}
    if hiding == "causal":
        blind[:, :, : N_Q - 50] = True
    elif hiding == "bool mask":
        blind[:, 1, 5::7] = True
        options = {"mask": ~blind[..., None]}
    else:
        options = {"kv_lengths": np.array([0, 50])}
        blind[0] = True
    rng = np.random.default_rng(8)
    dout, dlse = rng.standard_normal((2, 2, N_Q, 6)).astype(np.float32), rng.standard_normal((2, 2, N_Q))
    given = {"q": q, "dout": dout, "dlse": dlse.astype(np.float32)}
    clean = everything(given["q"], k, v, dout=given["dout"], dlse=given["dlse"], **options)
    assert (clean["lse"][blind] == -np.inf).all() and np.isfinite(clean["lse"][~blind]).all()
    given[where] = given[where].copy()
    given[where][blind if where == "dlse" else (blind, column)] = poison
    with np.errstate(invalid="ignore"):
        got = everything(given["q"], k, v, dout=given["dout"], dlse=given["dlse"], **options)
    same(got, clean)
    assert (got["out"][blind] == 0).all() and (got["dq"][blind] == 0).all()


def test_a_slope_of_nan_at_hidden_pairs(backend: str) -> None:
    """The derivative by a score counts where the pair has a weight."""
    q, k, v = qkv(1, 2, N_Q, N_K)
    shown = np.random.default_rng(5).random((N_Q, N_K)) < 0.5
    factor = np.random.default_rng(6).random((N_Q, N_K)).astype(np.float32)

    def results(factor: np.ndarray) -> dict[str, np.ndarray]:
        score = mods.score(lambda s, b, h, q, k, *, f: s * f[q - (N_K - N_Q), k], f=factor)
        with np.errstate(invalid="ignore"):
            return everything(q, k, v, score_mod=score, mask=shown)

    same(results(np.where(shown, factor, np.float32(np.nan))), results(factor))


def test_poison_behind_dropout_and_sinks(backend: str) -> None:
    """A dropped weight is 0, and 0 leaves its value out whatever that is."""
    q, k, v = qkv(1, 1, 40, 30)
    options = {"dropout_p": 0.5, "seed": 11, "sinks": np.zeros(1, np.float32)}
    kept = dropout.keep(11, 0.5, 0, 0, np.arange(40)[:, None], np.arange(30))
    clean = attention(q, k, v, **options)
    v[0, 0, 7] = np.nan
    got = attention(q, k, v, **options)
    assert np.isnan(got[0, 0, kept[:, 7]]).all()
    np.testing.assert_allclose(got[0, 0, ~kept[:, 7]], clean[0, 0, ~kept[:, 7]], rtol=1e-5, atol=1e-6)


# --- what is visible shows, in its rows alone -------------------------------------------------------------------------


@pytest.mark.parametrize("hiding", [None, *HIDING])
def test_nan_in_a_query_shows_in_its_row(backend: str, hiding: str | None) -> None:
    options, shown = HIDING[hiding] if hiding else ({}, np.ones((N_Q, N_K), bool))
    q, k, v = qkv(1, 2, N_Q, N_K)
    clean = everything(q, k, v, **options)
    row = 33
    q[0, 1, row, 2] = np.nan
    got = everything(q, k, v, **options)
    assert (
        np.isnan(got["out"][0, 1, row]).all()
        and np.isnan(got["lse"][0, 1, row])
        and np.isnan(got["dq"][0, 1, row]).all()
    )
    others = np.arange(N_Q) != row
    for name in ("out", "lse", "dq"):
        same({name: got[name][0, 0]}, {name: clean[name][0, 0]})
        same({name: got[name][0, 1, others]}, {name: clean[name][0, 1, others]})
    for name in ("dk", "dv"):
        same({name: got[name][0, 0]}, {name: clean[name][0, 0]})
        assert np.isnan(got[name][0, 1, shown[row]]).any(axis=-1).all()
        same({name: got[name][0, 1, ~shown[row]]}, {name: clean[name][0, 1, ~shown[row]]})


@pytest.mark.parametrize("hiding", [None, *HIDING])
def test_nan_in_a_key_shows_where_it_is_seen(backend: str, hiding: str | None) -> None:
    options, shown = HIDING[hiding] if hiding else ({}, np.ones((N_Q, N_K), bool))
    q, k, v = qkv(1, 2, N_Q, N_K)
    clean = everything(q, k, v, **options)
    k[0, 0, 61, 5] = np.nan
    got = everything(q, k, v, **options)
    sees = shown[:, 61]
    for name in ("out", "lse", "dq"):
        assert np.isnan(got[name][0, 0, sees]).all()
        same({name: got[name][0, 0, ~sees]}, {name: clean[name][0, 0, ~sees]})
        same({name: got[name][0, 1]}, {name: clean[name][0, 1]})


@pytest.mark.parametrize("hiding", [None, *HIDING])
def test_nan_in_a_value_shows_where_it_is_seen(backend: str, hiding: str | None) -> None:
    """In its column of out, and not in lse, for the weights do not depend on it."""
    options, shown = HIDING[hiding] if hiding else ({}, np.ones((N_Q, N_K), bool))
    q, k, v = qkv(1, 2, N_Q, N_K)
    clean = everything(q, k, v, **options)
    v[0, 0, 61, 4] = np.nan
    got = everything(q, k, v, **options)
    sees, column = shown[:, 61], np.arange(6) == 4
    assert np.isnan(got["out"][0, 0, sees][:, column]).all()
    same({"out": got["out"][0, 0, ~sees]}, {"out": clean["out"][0, 0, ~sees]})
    same({"out": got["out"][0, 0][:, ~column]}, {"out": clean["out"][0, 0][:, ~column]})
    same({n: got[n] for n in ("lse", "dv")}, {n: clean[n] for n in ("lse", "dv")})
    assert np.isnan(got["dq"][0, 0, sees]).all()
    same({"dq": got["dq"][0, 0, ~sees]}, {"dq": clean["dq"][0, 0, ~sees]})


def test_poison_in_values_behind_a_bias(backend: str) -> None:
    """A bias of -inf adds, and so does not hide a NaN score; a weight of 0 hides any value."""
    q, k, v = qkv(1, 2, N_Q, N_K)
    shown = np.random.default_rng(5).random((N_Q, N_K)) < 0.5
    bias = np.where(shown, 0, -np.inf).astype(np.float32)
    clean = attention(q, k, v, bias=bias)
    v[0, 0, 61] = np.nan
    got = attention(q, k, v, bias=bias)
    assert np.isnan(got[0, 0, shown[:, 61]]).all()
    same({"out": got[0, 0, ~shown[:, 61]]}, {"out": clean[0, 0, ~shown[:, 61]]})
    k[0, 0, 61] = np.nan
    assert np.isnan(attention(q, k, v, bias=bias)[0, 0]).all()


@pytest.mark.parametrize("n_q", [3, 20], ids=["decoding", "tiles"])
def test_minus_infinity_is_added_to_a_key_of_nan(backend: str, n_q: int) -> None:
    """Which is NaN. A boolean mask selects, so a key that it masks too does not show."""
    q, k, v = qkv(1, 1, n_q, 30)
    bias = np.zeros((n_q, 30), np.float32)
    bias[:, 4] = -np.inf
    clean = everything(q, k, v, bias=bias)
    k[0, 0, 4] = v[0, 0, 4] = np.nan
    for argument in ("bias", "mask"):
        assert np.isnan(attention(q, k, v, **{argument: bias})).all()
    same(everything(q, k, v, bias=bias, mask=bias == 0), clean)


def test_nan_in_dout(backend: str) -> None:
    q, k, v = qkv(1, 2, N_Q, N_K)
    out, vjp = attention_vjp(q, k, v, causal=True)
    dout = np.ones_like(out)
    clean = vjp(dout)
    dout[0, 1, 20] = np.nan
    dq, dk, dv = vjp(dout)
    seen = np.arange(N_K) <= 20 + N_K - N_Q
    assert np.isnan(dq[0, 1, 20]).all() and np.isnan(dk[0, 1, seen]).all() and np.isnan(dv[0, 1, seen]).all()
    others = np.arange(N_Q) != 20
    same({"dq": dq[0, 1, others]}, {"dq": clean[0][0, 1, others]})
    for got, expected in ((dk, clean[1]), (dv, clean[2])):
        same({"dkv": got[0, 1, ~seen]}, {"dkv": expected[0, 1, ~seen]})
        same({"dkv": got[0, 0]}, {"dkv": expected[0, 0]})


# --- great and infinite scores ----------------------------------------------------------------------------------------


def test_a_score_of_infinity(backend: str) -> None:
    """+inf - inf: its row is NaN, as in the definition; others are not."""
    q, k, v = qkv(1, 1, 20, 30)
    bias = np.zeros((20, 30), np.float32)
    clean = attention(q, k, v, bias=bias, return_lse=True)
    bias[4, 7] = np.inf
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert np.isnan(out[0, 0, 4]).all() and np.isnan(lse[0, 0, 4])
    rest = np.arange(20) != 4
    same({"out": out[:, :, rest], "lse": lse[:, :, rest]}, {"out": clean[0][:, :, rest], "lse": clean[1][:, :, rest]})
    out, lse = attention(q, k, v, bias=bias, mask=bias < np.inf, return_lse=True)  # hidden, it does nothing
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_beyond_the_range_of_exp(backend: str, dtype: str, sign: int) -> None:
    """e^1000 is no float64, but weights are taken relative to the greatest score."""
    q, k, v = qkv(1, 2, 20, 40, dtype=dtype)
    base = everything(q, k, v)
    shifted = everything(q, k, v, bias=np.full((1, 1), sign * 1e4, dtype))
    scale = cases.epsilon(dtype) * 1e4
    np.testing.assert_allclose(shifted["lse"], base["lse"] + sign * 1e4, rtol=2 * cases.epsilon(dtype))
    for name in ("out", "dq", "dk", "dv"):
        np.testing.assert_allclose(shifted[name], base[name], rtol=50 * scale, atol=50 * scale)


@pytest.mark.parametrize("n_q", [3, 20], ids=["decoding", "tiles"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_equal_scores_of_any_size(backend: str, dtype: str, n_q: int) -> None:
    """The weights are equal: a row's greatest score less itself is 0, whatever base and scale kernels compute in."""
    q, k, v = qkv(1, 1, n_q, 40, dtype=dtype)
    host = backend in ("cpu", "reference")
    mean = np.broadcast_to(v.astype(np.float64).mean(2, keepdims=True), (1, 1, n_q, v.shape[3]))
    for size in (1e4, 1e7, 1e10, 1e20, float(np.finfo(np.float32).max) if host else 2e38):
        for sign in (1, -1):
            small = np.where(np.arange(n_q) % 2, 0, sign * size).astype(np.float32)  # rows take turns
            ones = np.ones_like(q)[:, :, :1].repeat(n_q, 2), np.ones_like(k)
            for options in ({"mask": small[:, None]}, {"scale": sign * size / 8}):
                out, lse = attention(*ones, v, return_lse=True, **{"scale": 0.1, "mask": None} | options)
                np.testing.assert_allclose(out.astype(np.float64), mean, atol=4 * cases.epsilon(dtype))
                want = small + 0.8 if "mask" in options else np.full(n_q, sign * size)
                np.testing.assert_allclose(lse[0, 0], want + np.log(40), rtol=8 * cases.epsilon("float32"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_the_backward_pass_within_a_rounding_of_the_lse(dtype: str) -> None:
    """Equal scores, where dv is the weight times the rows; numerics.md has the bounds."""
    n_q, n = 24, 40
    q, k, v = (np.ones((1, 1, rows, 16), np.dtype(dtype)) for rows in (n_q, n, n))
    for size in (1e2, 1e4, 1e6, 1e8, 1e9, 1e20, 1e38):
        for sign in (1, -1):
            mask = np.full((n_q, n), sign * size, np.float32)
            out, vjp = attention_vjp(q, k, v, mask=mask, backend="cpu")
            weight = vjp(np.ones_like(out))[2].astype(np.float64) / n_q
            half_ulp = float(np.spacing(np.float32(size + 10))) / 2
            most, least = min(float(n), np.exp(min(half_ulp, 700))) / n, np.exp(-half_ulp) / n
            slack = 4 * cases.epsilon(dtype)
            assert (weight <= most * (1 + slack)).all() and (weight >= least * (1 - slack)).all(), (size, sign)


def test_scores_that_overflow(backend: str) -> None:
    """A product too great for the computing precision is an infinite score, and the row NaN, never an exception."""
    q, k, v = qkv(1, 1, 5, 6)
    q[0, 0, 2] = k[0, 0, 3] = 1e30
    with np.errstate(all="ignore"):
        out = attention(q, k, v)
    assert np.isnan(out[0, 0, 2]).all() and np.isfinite(out[0, 0, [0, 1, 3, 4]]).all()


def test_scale_of_zero_and_below(backend: str) -> None:
    q, k, v = qkv(1, 2, 9, 12, dtype="float64")
    got = everything(q, k, v, scale=0)
    np.testing.assert_allclose(
        got["out"], np.broadcast_to(v.mean(2, keepdims=True), got["out"].shape), rtol=1e-14, atol=1e-15
    )
    np.testing.assert_allclose(got["lse"], np.log(12), rtol=1e-15)
    assert (got["dq"] == 0).all() and (got["dk"] == 0).all()
    same(
        everything(-q, k, v, scale=-0.5) | {"dq": None},
        {n: x for n, x in everything(q, k, v, scale=0.5).items() if n != "dq"},
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def test_inputs_are_not_changed(backend: str) -> None:
    q, k, v = qkv(2, 4, 40, 50, group=2)
    copies = [x.copy() for x in (q, k, v)]
    everything(q, k, v, causal=True, softcap=2.0, dropout_p=0.2, seed=1, sinks=np.zeros(4, np.float32))
    cases.same((q, k, v), copies)


def far_apart(path: Path, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> np.ndarray:
    """An array whose elements lie gigabytes apart in a file that is all hole: disk and memory hold what is touched."""
    reach = start + sum(abs(s) * (n - 1) for s, n in zip(strides, shape)) + 4096
    with path.open("wb") as file:
        file.truncate(reach)
    memory = np.memmap(path, np.uint8, "r+")
    first = start + sum(-s * (n - 1) for s, n in zip(strides, shape) if s < 0)
    return np.ndarray(shape, dtype, memory, first, strides)


@pytest.mark.skipif(sys.platform != "linux", reason="needs files with holes")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("axis", ["batch", "heads", "tokens", "tokens backwards"])
def test_more_than_2_to_31_bytes_apart(backend: str, tmp_path: Path, axis: str, dtype: str) -> None:
    """Offsets beyond 2^31 bytes and 2^31 elements, for every tensor and every axis."""
    q, k, v = qkv(2, 2, 3, 4, 8, 8, dtype=dtype)
    mask = np.random.default_rng(0).random((2, 2, 3, 4)) < 0.8
    rng = np.random.default_rng(1)
    dout, dlse = rng.standard_normal(q.shape).astype(q.dtype), rng.standard_normal(q.shape[:3]).astype(np.float32)
    expected = everything(q, k, v, mask=mask, dout=dout, dlse=dlse)
    item = q.dtype.itemsize
    far = ((1 << 31) + 4096) * item
    strides = {
        "batch": (far, 256, 64, item), "heads": (256, far, 64, item), "tokens": (512, 256, far, item),
        "tokens backwards": (512, 256, -far, item),
    }[axis]  # fmt: skip
    stored = []
    for i, x in enumerate((q, k, v, dout, np.zeros_like(q))):
        stored.append(far_apart(tmp_path / f"{i}", x.dtype, x.shape, strides))
        stored[-1][...] = x
    far_mask = far_apart(tmp_path / "mask", bool, mask.shape, (*(s // item * 1 for s in strides[:3]), 1))
    far_mask[...] = mask
    *inputs, far_dout, out = stored
    got = everything(*inputs, mask=far_mask, out=out, dout=far_dout, dlse=dlse)
    assert got["out"] is out
    same(got, expected)


# --- the same again ---------------------------------------------------------------------------------------------------

REPEATED = {"causal": {"causal": True}, "dropout": {"dropout_p": 0.3, "seed": 9}, "grouped, softcap": {"softcap": 5.0}}


@pytest.mark.parametrize(("what", "n"), [("causal", 50), ("dropout", 600), ("grouped, softcap", 50)])
def test_the_same_bits_again(backend: str, what: str, n: int) -> None:
    n = n if backend != "reference" else 50  # it has no threads
    q, k, v = qkv(1, 4, n, n, 32, 32, group=2)
    first = everything(q, k, v, **REPEATED[what])
    for _ in range(3):
        for name, x in everything(q, k, v, **REPEATED[what]).items():
            np.testing.assert_array_equal(x, first[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "pages"])
def test_deterministic_decoding_depends_on_its_sequence_alone(paged: bool, dtype: str, monkeypatch: Any) -> None:
    """Neither on the number of threads, nor on how many others there are and how long they are."""
    q, k, v = qkv(5, 4, 2, 5000, 32, 32, group=2, dtype=dtype)
    lengths = np.array([5000, 700, 3000, 0, 1025])
    options: dict[str, Any] = {"causal": True, "return_lse": True, "backend": "cpu"}

    def of(entries: slice, threads: str, **more: Any) -> list[np.ndarray]:
        monkeypatch.setenv("FLASHKIT_NUM_THREADS", threads)
        kv = (k, v) if paged else (k[entries], v[entries])
        if paged:
            kv = tuple(x.reshape(5, 2, 50, 100, 32).transpose(0, 2, 3, 1, 4).reshape(250, 100, 2, 32) for x in kv)
            more["page_table"] = np.arange(250).reshape(5, 50)[entries]
        return list(attention(q[entries], *kv, kv_lengths=lengths[entries], **options, **more))

    every = slice(0, 5)
    expected = of(every, "1", deterministic=True)
    for threads in ("2", "7"):
        cases.same(of(every, threads, deterministic=True), expected)
        for b in (0, 1, 2, 4):
            for got, want in zip(of(slice(b, b + 1), threads, deterministic=True), expected):
                np.testing.assert_array_equal(got[0], want[b])
    assert any((of(every, threads)[0] != expected[0]).any() for threads in ("1", "2", "7"))  # which this is about


@pytest.mark.parametrize("what", REPEATED)
def test_deterministic_gradients_on_any_number_of_threads(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And out and lse of any call."""
    q, k, v = qkv(1, 2, 300, 1500, 32, 32, group=2)
    found: dict[bool, list[dict[str, np.ndarray]]] = {True: [], False: []}
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("FLASHKIT_NUM_THREADS", threads)
        for deterministic, results in found.items():
            results.append(everything(q, k, v, **REPEATED[what], deterministic=deterministic, backend="cpu"))
    for deterministic, (first, *others) in found.items():
        for other in others:
            for name in first if deterministic else ("out", "lse"):
                np.testing.assert_array_equal(other[name], first[name])
    assert any((other["dq"] != found[False][0]["dq"]).any() for other in found[False][1:])  # which this is about


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32, 2**63, 2**64 - 1])
def test_a_seed_drops_the_same_everywhere(seed: int) -> None:
    """With weights and values of 1, out counts the kept weights: exact for any order of adding."""
    n_q, n_k = 37, 131
    q, k = np.zeros((2, 3, n_q, 4), np.float32), np.zeros((2, 3, n_k, 4), np.float32)
    v = np.ones((2, 3, n_k, 1), np.float32)
    kept = dropout.keep(seed, 0.4, *np.ogrid[:2, :3, :n_q, :n_k])
    assert abs(kept.mean() - 0.6) < 0.02
    for backend in (b.values[0] for b in BACKENDS):
        out = attention(q, k, v, dropout_p=0.4, seed=seed, backend=backend)
        np.testing.assert_allclose(out[..., 0], kept.sum(-1) / (0.6 * n_k), rtol=1e-5)


def test_a_chunk_drops_what_the_whole_drops(backend: str) -> None:
    """Gradients of q, k and v too, in every chunk of rows, keys and heads."""
    q, k, v = qkv(2, 3, 45, 45)
    rows, keys, head = slice(9, 40), slice(12, 45), 1
    hidden = np.ones((45, 45), bool)
    hidden[rows, keys] = False
    out, vjp = attention_vjp(q, k, v, mask=~hidden, dropout_p=0.4, seed=5, backend=backend)
    dout = np.zeros_like(out)
    dout[:, head:, rows] = out[:, head:, rows]
    expected = [out[:, head:, rows], *(x[:, head:, at] for x, at in zip(vjp(dout), (rows, keys, keys)))]
    parts = [np.ascontiguousarray(x[:, head:, at]) for x, at in zip((q, k, v, dout), (rows, keys, keys, rows))]
    seed = dropout.ChunkSeed.at(5, 9, 12, head)
    out, vjp = attention_vjp(*parts[:3], dropout_p=0.4, seed=seed, backend=backend)
    cases.near((out, *vjp(parts[3])), expected, rtol=1e-4, atol=1e-5)


def test_without_a_seed_each_call_drops_others(backend: str) -> None:
    q, k, v = qkv(1, 1, 40, 40)
    assert not np.array_equal(attention(q, k, v, dropout_p=0.5), attention(q, k, v, dropout_p=0.5))
    out, vjp = attention_vjp(q, k, v, dropout_p=0.5)  # but the gradients drop what the call dropped
    eye = np.zeros_like(out)
    eye[0, 0, 3, 2] = 1
    _, _, dv = vjp(eye)
    np.testing.assert_allclose((dv * v).sum(), out[0, 0, 3, 2], rtol=1e-4)


@pytest.mark.parametrize("p", [1e-9, 0.999, 1 - 1e-12])
def test_little_and_much_dropout(backend: str, p: float) -> None:
    q, k, v = qkv(1, 1, 20, 30)
    got = everything(q, k, v, dropout_p=p, seed=1)
    assert all(np.isfinite(x).all() for x in got.values())
    np.testing.assert_allclose(
        got["lse"], attention(q, k, v, return_lse=True)[1], rtol=1e-6
    )  # which dropout leaves alone
