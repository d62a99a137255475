"""Modifications: the ready-made ones against their formulas pair by pair, combining, and what tracing accepts."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashkit import mods, where
from flashkit.mods import Mod, expr

BATCH, HEADS, ROWS, KEYS, OFFSET = 2, 3, 9, 13, 3
POSITIONS = (BATCH, HEADS, ROWS, KEYS)
rng = np.random.default_rng(3)
SCORES = rng.normal(size=POSITIONS) * 5

IDS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 5, 5, 1, 0])
IDS_BATCH = rng.integers(0, 3, (BATCH, KEYS))
Q_IDS = rng.integers(0, 3, (BATCH, ROWS))
SLOPES = 2.0 ** -np.arange(1, HEADS + 1)
SLOPES_BATCH = rng.uniform(0.1, 1, (BATCH, HEADS)).astype(np.float32)
MASK = rng.random((BATCH, HEADS, ROWS, KEYS)) < 0.5
BIAS = rng.normal(size=(HEADS, ROWS, KEYS))
BIAS[:, 2, 5] = -np.inf


def indexed(array, b, h, row, k):
    """The element of an array that broadcasts to (B, H, Nq, Nk)."""
    return np.broadcast_to(array, POSITIONS)[b, h, row, k]


# name: (the mod, its formula for one pair)
MASKS = {
    "causal": (mods.causal(), lambda b, h, q, k, row: k <= q),
    "window": (mods.sliding_window(3, 1), lambda b, h, q, k, row: q - 3 <= k <= q + 1),
    "window, zero wide": (mods.sliding_window(0, 0), lambda b, h, q, k, row: k == q),
    "window, causal by default": (mods.sliding_window(2), lambda b, h, q, k, row: q - 2 <= k <= q),
    "window, no bound left": (mods.sliding_window(None, 2), lambda b, h, q, k, row: k <= q + 2),
    "window, no bound right": (mods.sliding_window(4, None), lambda b, h, q, k, row: k >= q - 4),
    "window, no bound": (mods.sliding_window(None, None), lambda b, h, q, k, row: True),
    "prefix": (mods.prefix_lm(5), lambda b, h, q, k, row: k < 5 or k <= q),
    "prefix of nothing": (mods.prefix_lm(0), lambda b, h, q, k, row: k <= q),
    "dilated": (mods.dilated(3), lambda b, h, q, k, row: abs(q - k) % 3 == 0),
    "dilated by one": (mods.dilated(1), lambda b, h, q, k, row: True),
    "document": (mods.document(IDS), lambda b, h, q, k, row: 0 <= q < 13 and IDS[q] == IDS[k]),
    "document, list": (mods.document(IDS.tolist()), lambda b, h, q, k, row: 0 <= q < 13 and IDS[q] == IDS[k]),
    "document, too few ids": (
        mods.document(IDS[:7]),
        lambda b, h, q, k, row: 0 <= q < 7 and k < 7 and IDS[q] == IDS[k],
    ),
    "document, batch": (
        mods.document(IDS_BATCH),
        lambda b, h, q, k, row: 0 <= q < 13 and IDS_BATCH[b, q] == IDS_BATCH[b, k],
    ),
    "document, own ids for keys": (
        mods.document(Q_IDS, IDS_BATCH.astype(np.uint8)),
        lambda b, h, q, k, row: Q_IDS[b, row] == IDS_BATCH[b, k],
    ),
    "visible": (mods.visible(MASK), lambda b, h, q, k, row: indexed(MASK, b, h, row, k)),
    "visible, one head": (mods.visible(MASK[:, :1]), lambda b, h, q, k, row: indexed(MASK[:, :1], b, h, row, k)),
    "visible, keys only": (
        mods.visible(MASK[:, :1, :1]),
        lambda b, h, q, k, row: indexed(MASK[:, :1, :1], b, h, row, k),
    ),
    "visible, two axes": (mods.visible(MASK[0, 0].tolist()), lambda b, h, q, k, row: MASK[0, 0, row, k]),
    "function": (mods.mask(lambda b, h, q, k: (k <= q) & (h != 1)), lambda b, h, q, k, row: k <= q and h != 1),
    "function with values": (
        mods.mask(lambda b, h, q, k, *, lengths, n: (k < lengths[b]) | (q % n == 0), lengths=np.array([4, 9]), n=3),
        lambda b, h, q, k, row: k < (4, 9)[b] or q % 3 == 0,
    ),
}
SCORE_MODS = {
    "softcap": (mods.softcap(2.5), lambda s, b, h, q, k, row: 2.5 * math.tanh(s / 2.5)),
    "alibi": (mods.alibi(SLOPES), lambda s, b, h, q, k, row: s - SLOPES[h] * abs(q - k)),
    "alibi, list": (mods.alibi(SLOPES.tolist()), lambda s, b, h, q, k, row: s - SLOPES[h] * abs(q - k)),
    "alibi, batch": (mods.alibi(SLOPES_BATCH), lambda s, b, h, q, k, row: s - float(SLOPES_BATCH[b, h]) * abs(q - k)),
    "bias": (mods.bias(BIAS), lambda s, b, h, q, k, row: s + indexed(BIAS, b, h, row, k)),
    "bias, one row": (mods.bias(BIAS[:, :1]), lambda s, b, h, q, k, row: s + indexed(BIAS[:, :1], b, h, row, k)),
    "bias, two axes": (mods.bias(BIAS[0].tolist()), lambda s, b, h, q, k, row: s + BIAS[0, row, k]),
    "bias of integers": (mods.bias(IDS[None]), lambda s, b, h, q, k, row: s + IDS[k]),
    "bias of bools": (mods.bias(MASK), lambda s, b, h, q, k, row: s + MASK[b, h, row, k]),
    "bias, bfloat16": (
        mods.bias(BIAS.astype(ml_dtypes.bfloat16)),
        lambda s, b, h, q, k, row: s + float(BIAS.astype(ml_dtypes.bfloat16)[h, row, k]),
    ),
    "function": (
        mods.score(lambda s, b, h, q, k, *, temperature: where(k % 2 == 0, s / temperature, -s), temperature=0.5),
        lambda s, b, h, q, k, row: s / 0.5 if k % 2 == 0 else -s,
    ),
}


def on_all_pairs(mod: Mod, offset: int = OFFSET, **more):
    b, h, row, k = np.ogrid[tuple(map(slice, POSITIONS))]
    return np.broadcast_to(mod.evaluate(b, h, row + offset, k, row=row, **more), POSITIONS)


def by_formula(formula, offset: int = OFFSET) -> np.ndarray:
    return np.array([bool(formula(b, h, row + offset, k, row)) for b, h, row, k in np.ndindex(POSITIONS)]).reshape(
        POSITIONS
    )


@pytest.mark.parametrize("offset", [OFFSET, 0, -4])
@pytest.mark.parametrize("name", MASKS)
def test_mask_is_its_formula(name, offset):
    mod, formula = MASKS[name]
    assert mod.kind == "mask"
    assert np.array_equal(on_all_pairs(mod, offset), by_formula(formula, offset))


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_is_its_formula(name):
    mod, formula = SCORE_MODS[name]
    assert mod.kind == "score"
    wanted = np.array([formula(SCORES[i], *i[:2], i[2] + OFFSET, i[3], i[2]) for i in np.ndindex(POSITIONS)]).reshape(
        POSITIONS
    )
    np.testing.assert_allclose(on_all_pairs(mod, s=SCORES), wanted, rtol=1e-14)


@pytest.mark.parametrize("first", MASKS)
@pytest.mark.parametrize("second", ["causal", "window", "document, batch", "visible", "function with values"])
def test_masks_combine(first, second):
    (a, a_formula), (b, b_formula) = MASKS[first], MASKS[second]
    assert np.array_equal(on_all_pairs(a & b), by_formula(lambda *x: a_formula(*x) and b_formula(*x)))
    assert np.array_equal(on_all_pairs(a | b), by_formula(lambda *x: a_formula(*x) or b_formula(*x)))
    assert np.array_equal(on_all_pairs(~a), by_formula(lambda *x: not a_formula(*x)))
    assert np.array_equal(on_all_pairs(~(a & ~b) | b), by_formula(lambda *x: not a_formula(*x) or b_formula(*x)))


@pytest.mark.parametrize("first", SCORE_MODS)
@pytest.mark.parametrize("second", ["softcap", "alibi", "bias", "function"])
def test_scores_chain_in_order(first, second):
    a, b = SCORE_MODS[first][0], SCORE_MODS[second][0]
    wanted = on_all_pairs(b, s=on_all_pairs(a, s=SCORES))
    np.testing.assert_array_equal(on_all_pairs(a.then(b), s=SCORES), wanted)


def test_plain_functions_combine_with_mods():
    def near(b, h, q, k):
        return abs(q - k) < 3

    wanted = on_all_pairs(mods.causal() & mods.mask(near))
    assert np.array_equal(on_all_pairs(mods.causal() & near), wanted)
    assert np.array_equal(on_all_pairs(near & mods.causal()), wanted)
    assert np.array_equal(on_all_pairs(near | ~mods.causal()), on_all_pairs(mods.mask(near) | ~mods.causal()))
    twice = mods.softcap(3.0).then(lambda s, b, h, q, k: s * 2)
    np.testing.assert_array_equal(on_all_pairs(twice, s=SCORES), 2 * on_all_pairs(mods.softcap(3.0), s=SCORES))


# --- names and values -------------------------------------------------------------------------------------------------


def test_values_are_no_part_of_the_key():
    assert mods.sliding_window(3, 1).key == mods.sliding_window(1000, 20).key
    assert mods.prefix_lm(3).key == mods.prefix_lm(4).key
    assert mods.softcap(30).key == mods.softcap(50.0).key
    assert mods.document(IDS).key == mods.document(IDS[:4].astype(np.int32)).key
    assert mods.alibi(SLOPES).key == mods.alibi(SLOPES * 2).key
    assert mods.bias(BIAS).key == mods.bias(BIAS * 2).key
    assert (mods.causal() & mods.sliding_window(3, 1)).key == (mods.causal() & mods.sliding_window(9, 9)).key
    assert mods.mask(lambda b, h, q, k, *, n: k < n, n=1).key == mods.mask(lambda b, h, q, k, *, n: k < n, n=2).key


def test_what_is_compiled_in_is_part_of_the_key():
    assert mods.causal().key != mods.sliding_window(None, 0).key
    assert mods.sliding_window(3, None).key != mods.sliding_window(3, 0).key
    assert mods.bias(BIAS).key != mods.bias(BIAS[:, :1]).key
    assert mods.bias(BIAS).key != mods.bias(BIAS[0]).key
    assert mods.mask(lambda b, h, q, k: k < 1).key != mods.mask(lambda b, h, q, k: k < 2).key
    assert mods.mask(lambda b, h, q, k, *, n: k < n, n=1).key != mods.mask(lambda b, h, q, k, *, n: k < n, n=1.0).key


@pytest.mark.parametrize(
    ("compare", "one"),
    [(lambda b, h, q, k, *, x, y: x < y, 1), (lambda b, h, q, k, *, x, y: x[k] < y[k], np.ones(2, int))],
    ids=["scalars", "arrays"],
)
def test_the_kind_of_values_is_part_of_the_key(compare, one):
    """Also where no conversion in the graph tells integers from floats."""
    assert mods.mask(compare, x=one, y=one).key != mods.mask(compare, x=1.0 * one, y=1.0 * one).key


def test_a_function_is_traced_anew_for_each_mod():
    """What it closes over may have changed in between."""
    width = 2

    def near(b, h, q, k):
        return abs(q - k) < width

    before = mods.mask(near)
    width = 5
    assert before.key != mods.mask(near).key


def test_equal_names_are_told_apart():
    both = mods.sliding_window(2, 0) | mods.sliding_window(0, 4)
    assert sorted(both.params.values()) == [0, 0, 2, 4]
    assert np.array_equal(
        on_all_pairs(both), on_all_pairs(mods.sliding_window(2, 0)) | on_all_pairs(mods.sliding_window(0, 4))
    )
    three = mods.document(IDS) & mods.document(IDS[::-1].copy()) & mods.document(IDS_BATCH)
    assert len(three.arrays) == 3
    wanted = (
        on_all_pairs(mods.document(IDS))
        & on_all_pairs(mods.document(IDS[::-1].copy()))
        & on_all_pairs(mods.document(IDS_BATCH))
    )
    assert np.array_equal(on_all_pairs(three), wanted)
    chained = mods.bias(BIAS).then(mods.softcap(4)).then(mods.bias(BIAS[:, :1])).then(mods.softcap(2))
    step = SCORES
    for mod in (mods.bias(BIAS), mods.softcap(4), mods.bias(BIAS[:, :1]), mods.softcap(2)):
        step = on_all_pairs(mod, s=step)
    np.testing.assert_array_equal(on_all_pairs(chained, s=SCORES), step)


def test_a_scalar_and_an_array_of_one_name_are_told_apart():
    scalar = mods.mask(lambda b, h, q, k, *, n: k < n, n=4)
    array = mods.mask(lambda b, h, q, k, *, n: k < n[b], n=np.array([2, 6]))
    for both in (scalar & array, array & scalar):
        assert np.array_equal(on_all_pairs(both), on_all_pairs(scalar) & on_all_pairs(array))


def test_one_array_used_twice_is_passed_once():
    assert len((mods.document(IDS) & ~mods.document(IDS)).arrays) == 1
    assert len(mods.document(IDS, IDS_BATCH).arrays) == 2


def test_names_stay_apart_when_one_ends_in_an_underscore():
    mod = mods.mask(lambda b, h, q, k, *, k0, k0_: (k0 <= k) & (k < k0_), k0=2, k0_=5)
    assert np.array_equal(on_all_pairs(mod), by_formula(lambda b, h, q, k, row: 2 <= k < 5))


# --- tracing ----------------------------------------------------------------------------------------------------------


def test_trace_takes_mods_functions_and_partials():
    def near(b, h, q, k, *, n=2):
        return abs(q - k) < n

    assert mods.trace(mods.causal(), "mask").key == mods.causal().key
    assert mods.trace(near, "mask").params == {"n": 2}
    assert mods.trace(partial(near, n=7), "mask").params == {"n": 7}
    assert mods.mask(near, n=np.int32(5)).params == {"n": 5}
    assert type(mods.mask(near, n=np.int32(5)).params["n"]) is int
    assert mods.mask(near).key == mods.mask(near, n=8).key
    farther = mods.trace(partial(lambda n, b, h, q, k: q - k >= n, 2), "mask")
    assert farther.evaluate(b=0, h=0, q=2, k=[0, 1, 2]).tolist() == [True, False, False]


def test_values_keep_their_kind():
    def kinds(value):
        (node,) = [
            n for n in expr.walk([mods.score(lambda s, b, h, q, k, *, v: s * v, v=value).expr]) if n.op == "param"
        ]
        return node.kind

    assert kinds(3) == "int"
    assert kinds(3.0) == "float"
    assert kinds(np.float32(3)) == "float"
    assert kinds(True) == "int"


def test_a_score_may_be_any_number():
    for function in (
        lambda s, b, h, q, k: k, lambda s, b, h, q, k: 1, lambda s, b, h, q, k: k <= q, lambda s, b, h, q, k: 0.5,
    ):  # fmt: skip
        assert mods.score(function).expr.kind == "float"
    assert on_all_pairs(mods.score(lambda s, b, h, q, k: k <= q), s=SCORES).dtype == np.float64


def test_a_mask_may_be_a_constant():
    assert on_all_pairs(mods.mask(lambda b, h, q, k: True)).all()
    assert not on_all_pairs(mods.mask(lambda b, h, q, k: False)).any()


closed_over = np.arange(20)
ERRORS: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    TypeError: [
        (
            r"mask_mod <lambda>\(b, h, q, k\): .*no truth value.*where",
            lambda: mods.mask(lambda b, h, q, k: 1 if k <= q else 0),
        ),
        ("expected a bool, got int", lambda: mods.mask(lambda b, h, q, k: q - k)),
        ("NoneType", lambda: mods.mask(lambda b, h, q, k: None)),
        (
            r"keyword argument: flashkit.mods.mask\(<lambda>, name=array\)",
            lambda: mods.mask(lambda b, h, q, k: closed_over[q] == closed_over[k]),
        ),
        ("single value", lambda: mods.score(lambda s, b, h, q, k: math.tanh(s))),
        (r"mask_mod <lambda>\(b, h, q, k\)", lambda: mods.mask(lambda q, k: k <= q)),
        (r"mask_mod <lambda>\(b, h, q, k\)", lambda: mods.mask(lambda s, b, h, q, k: s > 0)),
        ("the first argument|got int", lambda: mods.mask(3)),
        (r"mask_mod: expected a function of \(b, h, q, k\).*got int", lambda: mods.trace(3, "mask")),
        ("mask_mod: .* got a score mod", lambda: mods.trace(mods.softcap(2), "mask")),
        ("score_mod: .* got a mask mod", lambda: mods.trace(mods.causal(), "score")),
        ("mask_mod: .* got a score mod", lambda: mods.softcap(2) & mods.causal()),
        ("mask_mod: .* got a score mod", lambda: ~mods.softcap(2)),
        ("score_mod: .* got a mask mod", lambda: mods.causal().then(mods.softcap(2))),
        ("got int", lambda: mods.causal() & 3),
        ("n of a modification: expected dtype", lambda: mods.mask(lambda b, h, q, k, *, n: k < 3, n="x")),
        ("n of a modification: expected dtype .* got complex", lambda: mods.mask(lambda b, h, q, k, *, n: k < 3, n=1j)),
        (
            "n of a modification: expected dtype .* got object",
            lambda: mods.mask(lambda b, h, q, k, *, n: k < 3, n=None),
        ),
        (
            "a of a modification: expected dtype",
            lambda: mods.mask(lambda b, h, q, k, *, a: a[k] == 1, a=np.array(["x"])),
        ),
        ("mask: expected dtype bool.*float64", lambda: mods.visible(BIAS)),
    ],
    ValueError: [
        ("a: expected 3 indices.*got 1", lambda: mods.score(lambda s, b, h, q, k, *, a: s + a[k], a=BIAS)),
        ("step.*got 0", lambda: mods.dilated(0)),
        ("softcap.*got 0", lambda: mods.softcap(0)),
        (r"ids of a document mask: .* got shape \(1, 2, 3\)", lambda: mods.document(np.zeros((1, 2, 3), int))),
        ("expected integers.*dtype float64", lambda: mods.document(np.zeros(3))),
        ("kv_ids", lambda: mods.document(IDS, np.zeros(3))),
        ("array: expected up to 4 axes", lambda: mods.bias(np.zeros((1, 1, 1, 1, 1)))),
        (r"slopes: .* got \(1, 1, 1\)", lambda: mods.alibi(np.zeros((1, 1, 1)))),
    ],
}


@pytest.mark.parametrize(("error", "text", "make"), [(error, *row) for error, rows in ERRORS.items() for row in rows])
def test_errors_say_what_would_fit(error, text, make):
    with pytest.raises(error, match=text):
        make()
