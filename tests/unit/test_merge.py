"""merge: parts of the keys combine to attention over all of them."""

import warnings
from typing import Any

import numpy as np
import pytest

import flashkit

DTYPES = ["float64", "float32", "float16", "bfloat16"]


def tensors(n_q: int, n_k: int, dtype: str, lead: tuple[int, ...] = (2, 3), d: int = 16) -> list[np.ndarray]:
    import ml_dtypes  # noqa: F401  gives NumPy its bfloat16

    rng = np.random.default_rng(0)
    return [rng.standard_normal((*lead, n, d)).astype(dtype) for n in (n_q, n_k, n_k)]


def split(q: Any, k: Any, v: Any, cuts: tuple[int, ...], **options: Any) -> list[tuple[Any, Any]]:
    """Attention over each part of the keys at their places: `causal` and windows mean those of the whole."""
    n_q, n_k = q.shape[-2], k.shape[-2]
    parts = []
    for first, past in zip((0, *cuts), (*cuts, n_k)):
        part = k[..., first:past, :], v[..., first:past, :]
        parts.append(flashkit.attention(q, *part, q_offset=n_k - n_q - first, return_lse=True, **options))
    return parts


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (3, 1)}, {"scale": 40.0}], ids=str)
def test_parts_make_the_whole(dtype: str, options: dict[str, Any]) -> None:
    """The error is at most twice that of one call, and a rounding for each part and for the result."""
    q, k, v = tensors(20, 30, dtype)
    wide = [x.astype("float64") for x in (q, k, v)]
    exact, exact_lse = flashkit.attention(*wide, return_lse=True, **options)
    whole, whole_lse = flashkit.attention(q, k, v, return_lse=True, **options)
    out, lse = flashkit.merge(*split(q, k, v, (7, 7, 24), **options))
    assert (out.dtype, lse.dtype) == (whole.dtype, whole_lse.dtype)

    unit = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    error = lambda x: np.abs(x.astype("float64") - exact).max()
    assert error(out) <= 2 * error(whole) + 5 * unit * np.abs(exact).max()
    lse_unit = 2.0**-53 if dtype == "float64" else 2.0**-24
    lse_error = lambda x: np.abs(x - exact_lse).max()
    assert lse_error(lse) <= 2 * lse_error(whole_lse) + 5 * lse_unit * np.abs(exact_lse).max()


@pytest.mark.parametrize("shape", ["ND", "HND", "BHND", "ABHND", "bnhd"])
def test_shapes_and_layouts(shape: str) -> None:
    lead = {"ND": (), "HND": (3,), "BHND": (2, 3), "ABHND": (2, 2, 3), "bnhd": (2, 3)}[shape]
    q, k, v = tensors(20, 20, "float32", lead)
    layout = "bnhd" if shape == "bnhd" else "bhnd"
    if shape == "bnhd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    keys = lambda x, part: x[:, part] if layout == "bnhd" else x[..., part, :]
    parts = [
        flashkit.attention(q, keys(k, part), keys(v, part), layout=layout, return_lse=True)
        for part in (slice(0, 4), slice(4, 20))
    ]
    out, lse = flashkit.merge(*parts, layout=layout)
    whole, whole_lse = flashkit.attention(q, k, v, layout=layout, return_lse=True)
    np.testing.assert_allclose(out, whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-6)


def test_one_part_is_itself_bit_for_bit() -> None:
    out, lse = split(*tensors(5, 9, "float16"), ())[0]
    merged, merged_lse = flashkit.merge((out, lse))
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(merged_lse, lse)
    assert not np.shares_memory(merged, out) and not np.shares_memory(merged_lse, lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys(dtype: str) -> None:
    """They are 0 and -inf, without a warning, whatever a part holds there."""
    (out, lse), (other, other_lse) = split(*tensors(4, 8, dtype, (1,)), (4,))
    for x, rows in ((lse, slice(0, 2)), (other_lse, slice(1, 3))):
        x[:, rows] = -np.inf
    out[:, :2], other[:, 1:3] = np.nan, np.inf
    with warnings.catch_warnings(action="error"):
        merged, merged_lse = flashkit.merge((out, lse), (other, other_lse))
    np.testing.assert_array_equal(merged[:, 0], other[:, 0])  # one part sees keys
    np.testing.assert_array_equal(merged[:, 2], out[:, 2])
    np.testing.assert_array_equal(merged_lse[:, [0, 2]], np.stack([other_lse[:, 0], lse[:, 2]], 1))
    assert not merged[:, 1].any() and np.isneginf(merged_lse[:, 1]).all()
    assert np.isfinite(merged.astype("float32")).all()


def test_scores_far_apart() -> None:
    """No overflow for large log-sum-exps; a part far below another leaves it as it is."""
    out = np.full((1, 2), 3.0, np.float32), np.full((1, 2), 5.0, np.float32)
    merged, lse = flashkit.merge((out[0], np.float32([3e38])), (out[1], np.float32([-3e38])))
    assert (merged == 3).all() and lse == np.float32(3e38)
    merged, lse = flashkit.merge((out[0], np.float32([700.0])), (out[1], np.float32([700.0])))
    assert (merged == 4).all() and lse == np.float32(700 + np.log(2))


def test_a_float64_lse_beside_float32_outputs() -> None:
    """Weights are as exact as the log-sum-exps: float32 does not tell these apart."""
    parts = [(np.full((1, 1), out, np.float32), np.array([lse])) for out, lse in ((0, 1e9), (1, 1e9 + 3))]
    for given in (parts, [(parts[0][0], parts[0][1].astype(np.float32)), parts[1]]):
        out, lse = flashkit.merge(*given)
        assert (out.dtype, lse.dtype) == (np.float32, np.float64)
        np.testing.assert_allclose([out[0, 0], lse[0] - 1e9], [1 / (1 + np.exp(-3)), np.logaddexp(0, 3)], rtol=1e-6)


def test_nan_stays_in_its_rows() -> None:
    (out, lse), other = split(*tensors(4, 8, "float32", (1,)), (4,))
    clean = flashkit.merge((out, lse), other)
    out, lse = out.copy(), lse.copy()
    out[:, 0], lse[:, 1] = np.nan, np.nan
    merged, merged_lse = flashkit.merge((out, lse), other)
    assert np.isnan(merged[:, :2]).all() and np.isnan(merged_lse[:, 1]).all()
    np.testing.assert_array_equal(merged[:, 2:], clean[0][:, 2:])
    np.testing.assert_array_equal(merged_lse[:, [0, 2, 3]], clean[1][:, [0, 2, 3]])


def test_many_parts_accumulate_in_float32() -> None:
    """In bfloat16 a sum of 256 equal terms would stop growing."""
    import ml_dtypes

    parts = [(np.full((1, 1), 1.0, ml_dtypes.bfloat16), np.zeros(1, np.float32))] * 1000
    out, lse = flashkit.merge(*parts)
    assert out == 1 and lse == np.float32(np.log(1000))


def test_sinks_belong_to_one_part() -> None:
    q, k, v = tensors(6, 8, "float64", (2,))
    sinks = np.array([0.5, -1.0])
    first, second = (
        flashkit.attention(q, k[:, part], v[:, part], sinks=given, return_lse=True)
        for part, given in ((slice(0, 3), sinks), (slice(3, 8), None))
    )
    np.testing.assert_allclose(flashkit.merge(first, second)[0], flashkit.attention(q, k, v, sinks=sinks))


GOOD = np.zeros((2, 3, 4, 5), np.float32), np.zeros((2, 3, 4), np.float32)


@pytest.mark.parametrize(
    ("parts", "error", "match"),
    [
        ((), TypeError, "got no parts"),
        ((GOOD[0],), TypeError, "part 0: .*as attention.* got an array of shape"),
        ((GOOD, (*GOOD, 1)), TypeError, "part 1: expected"),
        (((GOOD[0].tolist(), GOOD[1]),), TypeError, "out of part 0: expected .* got a builtins.list"),
        ((GOOD, (GOOD[0], None)), TypeError, "lse of part 1"),
        ((GOOD, (GOOD[0].astype("float16"), GOOD[1])), TypeError, "out of part 1: expected .* got float16"),
        (((GOOD[0].astype(int), GOOD[1]),), TypeError, "got int64"),
        (((GOOD[0], GOOD[1].astype("float16")),), TypeError, "lse of part 0: expected .* got float16"),
        ((GOOD, (GOOD[0][:1], GOOD[1][:1])), ValueError, r"part 1: expected .* got \(1, 3, 4, 5\)"),
        (((GOOD[0], GOOD[1][..., None]),), ValueError, r"lse of part 0: expected shape \(2, 3, 4\), one number"),
        (((GOOD[0][0, 0, 0], GOOD[1][0, 0]),), ValueError, "shape"),
    ],
)  # fmt: skip
def test_bad_parts(parts: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        flashkit.merge(*parts)
    for layout, says in (("bhdn", "layout"), ("bnhd", r"\(2, 4, 3\)")):
        with pytest.raises(ValueError, match=says):
            flashkit.merge(GOOD, layout=layout)
