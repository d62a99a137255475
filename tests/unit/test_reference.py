"""The definition against finite differences and at its edges; both tiled orders against the definition."""

from typing import Any

import numpy as np
import pytest
from cases import within_a_unit
from operands import FEATURES, featured, make

from flashkit import mods, reference
from flashkit.reference import standard, standard_gradients
from flashkit.spec import AttentionSpec, Operands

ORDERS = {1: reference.flash_attention_1, 2: reference.flash_attention_2}
SIZES = {
    "odd": {"n_q": 13, "n_k": 17},
    "grouped": {"n_q": 9, "n_k": 11, "heads": 4, "group": 2},
    "tall": {"n_q": 19, "n_k": 5, "batch": 1},
    "single": {"n_q": 1, "n_k": 1, "heads": 1, "head_dim": 1, "head_dim_v": 1},
}


def output_gradients(operands: Operands, seed: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(operands.out.shape), rng.standard_normal(operands.lse.shape)


def backward(
    spec: AttentionSpec, operands: Operands, order: int, dout: Any, dlse: Any = None, **kwargs: Any
) -> reference.Grads:
    operands.out, operands.lse = ORDERS[order](spec, operands, **kwargs)
    return reference.flash_attention_backward(spec, operands, dout, dlse, order=order, **kwargs)


def assert_same(got: reference.Grads, expected: reference.Grads, **kwargs: Any) -> None:
    for name, a, b in zip(got._fields, got, expected):
        if b is None:
            assert a is None
        else:
            np.testing.assert_allclose(a, b, err_msg=name, **{"rtol": 1e-9, "atol": 1e-12, **kwargs})


# --- the tiled algorithm is the definition ----------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("feature", FEATURES)
def test_both_orders_equal_the_definition(feature: str, sizes: str, order: int) -> None:
    spec, operands = featured(feature, **SIZES[sizes])
    tile = {"block_q": 4, "block_k": 3}
    out, lse = ORDERS[order](spec, operands, **tile)
    expected_out, expected_lse = standard(spec, operands)
    np.testing.assert_allclose(out, expected_out, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-13)
    assert np.isfinite(out).all()
    dout, dlse = output_gradients(operands)
    assert_same(backward(spec, operands, order, dout, dlse, **tile), standard_gradients(spec, operands, dout, dlse))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tile", [(1, 1), (5, 2), (2, 7), (64, 64)])
def test_the_tile_does_not_matter(tile: tuple[int, int], order: int) -> None:
    spec, operands = featured("all at once", n_q=11, n_k=14, heads=4, group=2)
    dout, dlse = output_gradients(operands)
    got = backward(spec, operands, order, dout, dlse, block_q=tile[0], block_k=tile[1])
    np.testing.assert_allclose(operands.out, standard(spec, operands)[0], rtol=1e-12, atol=1e-13)
    assert_same(got, standard_gradients(spec, operands, dout, dlse))


def test_the_definition_by_another_way() -> None:
    """Plain attention with NumPy's einsum and logaddexp, which share nothing with the reference's steps."""
    spec, o = make(heads=4, group=2, n_q=6, n_k=9, mask=mods.causal(), sinks=[0.5, -1.0, 2.0, 0.0])
    k, v = (np.repeat(x, 2, axis=1) for x in (o.k, o.v))
    s = np.einsum("bhid,bhjd->bhij", o.q, k) * o.scale
    s[..., np.arange(9)[None, :] > np.arange(6)[:, None] + 3] = -np.inf
    lse = np.logaddexp(np.logaddexp.reduce(s, axis=-1), o.sinks[:, None])
    out, got_lse = standard(spec, o)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-13)
    np.testing.assert_allclose(out, np.einsum("bhij,bhjd->bhid", np.exp(s - lse[..., None]), v), rtol=1e-12)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_by_finite_differences(feature: str) -> None:
    spec, operands = featured(feature, n_q=5, n_k=6, heads=4, group=2, head_dim=3, head_dim_v=2)
    dout, dlse = output_gradients(operands)

    def loss() -> float:
        out, lse = standard(spec, operands)
        return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

    grads = standard_gradients(spec, operands, dout, dlse)
    inputs = {"dq": operands.q, "dk": operands.k, "dv": operands.v} | ({"dsinks": operands.sinks} if spec.sinks else {})
    rng = np.random.default_rng(0)
    for name, x in inputs.items():
        step = 1e-5
        # Along random directions, and along one axis, where an error in a single element cannot hide.
        single = np.zeros_like(x)
        single.flat[rng.integers(x.size)] = 1.0
        for direction in (*rng.standard_normal((3, *x.shape)), single):
            x += step * direction
            above = loss()
            x -= 2 * step * direction
            below = loss()
            x += step * direction
            expected = (above - below) / (2 * step)
            assert (getattr(grads, name) * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-7), name


def test_gradient_without_dlse() -> None:
    spec, operands = featured("all at once")
    dout, dlse = output_gradients(operands)
    plain = standard_gradients(spec, operands, dout)
    assert_same(plain, standard_gradients(spec, operands, dout, np.zeros_like(dlse)))
    for order in ORDERS:
        assert_same(backward(spec, operands, order, dout, block_q=4, block_k=3), plain)


# --- other precisions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_plain_computation_in_lower_precision(dtype: str, feature: str) -> None:
    """It stays in its dtype from end to end. How far it is from the definition, conformance tests measure."""
    spec, operands = featured(feature, dtype=dtype)
    kind = np.dtype(dtype)
    dout, dlse = output_gradients(operands)
    out, lse = standard(spec, operands, kind)
    grads = standard_gradients(spec, operands, dout.astype(kind), dlse.astype(np.float32), kind)
    assert (out.dtype, lse.dtype) == (kind, np.float32)
    assert all(x.dtype == kind for x in grads if x is not None)
    flash_out, _ = reference.flash_attention_2(spec, operands, 4, 3)
    assert flash_out.dtype == np.float32
    within_a_unit(flash_out, standard(spec, operands)[0])


def test_sums_of_bfloat16_are_carried_in_float32() -> None:
    """4096 equal weights: carried in bfloat16 their sum would stop at 256."""
    kind = np.dtype("bfloat16")
    assert reference.row_sum(np.ones((1, 4096), kind))[0] == 4096
    assert reference.matmul(np.ones((1, 4096), kind), np.ones((4096, 1), kind))[0, 0] == 4096


# --- which tiles exist ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", FEATURES)
def test_tile_states_agree_with_every_pair(feature: str) -> None:
    spec, operands = featured(feature, n_q=13, n_k=17)
    for head in (head for group in reference.groups(spec, operands, np.float64) for head in group):
        states = reference.tile_states(head, 4, 3)
        for i, rows in enumerate(reference.blocks(head.n_q, 4)):
            for j, keys in enumerate(reference.blocks(head.n_k, 3)):
                visible = True if spec.mask is None else head.evaluate(spec.mask, rows, keys)
                if states[i, j] == reference.EMPTY:
                    assert not np.any(visible)
                if states[i, j] == reference.FULL:
                    assert np.all(visible)


def test_causal_and_window_leave_out_what_they_can() -> None:
    spec, operands = make(n_q=64, n_k=64, batch=1, heads=1, mask=mods.causal())
    head = next(reference.groups(spec, operands, np.float64))[0]
    states = reference.tile_states(head, 16, 16)
    np.testing.assert_array_equal(states, [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [2, 2, 2, 1]])
    spec, operands = make(n_q=64, n_k=64, batch=1, heads=1, mask=mods.sliding_window(16, 0))
    head = next(reference.groups(spec, operands, np.float64))[0]
    assert (reference.tile_states(head, 16, 16) > 0).sum() == 7


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_weighted_sum_selects() -> None:
    w = np.array([[0.0, 1.0, 2.0], [0.5, 0.0, 0.0], [np.nan, 0.0, 1.0]])
    x = np.array([[1.0, 2.0], [np.nan, 3.0], [4.0, -np.inf]])
    with np.errstate(invalid="ignore"):
        got = reference.weighted_sum(w, x)
    np.testing.assert_array_equal(got, [[np.nan, -np.inf], [0.5, 1.0], [np.nan, np.nan]])
