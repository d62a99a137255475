"""Arrays quantised to 8 bits: their numbers, and calls of attention that take them."""

import itertools
import pickle
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
from cases import same

import flashkit
from flashkit import Quantized, attention, attention_vjp, quantize, reference
from flashkit.call import quantized
from flashkit.call.arguments import prepare

rng = np.random.default_rng(0)
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FORMATS = ("e4m3", "int8")


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def tensors(n_q: int = 33, n_k: int = 47, dtype: Any = np.float32) -> list[np.ndarray]:
    return [normal(*shape).astype(dtype) for shape in ((2, 4, n_q, 16), (2, 2, n_k, 16), (2, 2, n_k, 12))]


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_e4m3_is_the_nearest_number_with_ties_to_even() -> None:
    """Every number of the format, every middle of two, and their float32 neighbours."""
    every = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    middles = (every[1:] + every[:-1]) / 2
    near = np.concatenate([every, middles, [1e-30, 460, 1e9]]).astype(np.float32)
    near = np.concatenate([near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))])
    y = np.concatenate([near, -near, [np.nan]]).astype(np.float32)
    with np.errstate(invalid="ignore"):
        found = quantized._e4m3(np, y).astype(np.float32)
    np.testing.assert_array_equal(found, reference.e4m3_or_int8(y, "e4m3"))
    within = abs(y) < 464  # ml_dtypes makes NaN of what rounds beyond the greatest number
    np.testing.assert_array_equal(
        found.view(np.int32)[within], y[within].astype(E4M3).astype(np.float32).view(np.int32)
    )


GROUPS = {"tensor": 1, "head": 2 * 3, "block": 2 * 3 * 4, "token": 2 * 3 * 50}
"""How many groups an array of 2 entries, 3 heads and 50 tokens has, with blocks of 16."""


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("per", quantized.PER)
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_group_shares_a_scale(dtype: Any, per: Any, layout: str) -> None:
    x = normal(2, 3, 50, 8)
    largest = quantized.LARGEST[dtype]
    given = x if layout == "bhnd" else np.ascontiguousarray(x.swapaxes(1, 2))
    found = quantize(given, dtype, per, block=16, layout=layout)
    assert found.scale.size == GROUPS[per] and found.scale.dtype == np.float32
    size = {"tensor": (2, 3, 50), "head": (1, 1, 50), "block": (1, 1, 16), "token": (1, 1, 1)}[per]
    scale = np.empty_like(x)
    for b, h, n in itertools.product(*(range(0, n, step) for n, step in zip(x.shape, size))):
        box = np.s_[b : b + size[0], h : h + size[1], n : n + size[2]]
        scale[box] = abs(x[box]).max() / np.float32(largest)
    if (dtype, per) == ("e4m3", "block"):
        scale = 2 ** np.ceil(np.log2(scale))
    expected = reference.dequantised(x, dtype, scale)
    values = found.dequantize()
    values = values if layout == "bhnd" else values.swapaxes(1, 2)
    assert values.dtype == np.float32 and found.shape == given.shape
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    top = abs(found.data.astype(np.float32)).max()
    assert top == largest if (dtype, per) != ("e4m3", "block") else largest / 2 < top <= largest


@pytest.mark.parametrize("d", [1, 2, 8, 12, 64, 65, 96, 512])
def test_a_rotation_is_orthonormal_and_spreads(d: int) -> None:
    matrix = quantized.rotation(d, 3).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(d), atol=1e-6)
    power_of_two = d & (d - 1) == 0
    assert abs(matrix).max() <= (1 if power_of_two else 2) ** 0.5 / d**0.5 + 1e-7
    if d >= 64:
        assert abs(matrix - quantized.rotation(d, 4)).max() > 1 / d**0.5
        assert 0.25 < (np.sign(matrix[:, 0]) < 0).mean() < 0.75


def test_rotations_stay_the_same() -> None:
    """Stored arrays depend on them."""
    assert (quantized.rotation(8, 5)[:, 0] > 0).tolist() == SIGNS
    assert (quantized.rotation(8, 2**63)[:, 0] > 0).tolist() != SIGNS


SIGNS = [False, True, True, True, True, False, False, True]


@pytest.mark.parametrize("d", [16, 12])
@pytest.mark.parametrize("dtype", FORMATS)
def test_rotated_and_smooth(dtype: Any, d: int) -> None:
    x = normal(2, 3, 50, d) + 20 * normal(2, 3, 1, d)
    found = quantize(x, dtype, "token", rotate=True, smooth=True, seed=7)
    np.testing.assert_allclose(found.mean, x.mean(2, keepdims=True), rtol=1e-5)
    matrix = quantized.rotation(d, 7).astype(np.float64)
    numbers = found.data.astype(np.float64) * found.scale
    exact = numbers @ matrix.T + found.mean
    np.testing.assert_allclose(found.dequantize("float64"), exact, rtol=1e-13)
    np.testing.assert_allclose(found.dequantize(), exact, atol=1e-5)
    defined = reference.dequantised(x, dtype, found.scale, matrix, found.mean)
    same_rows = np.isclose(exact, defined, atol=1e-4).all(-1)  # float32 decides a tie differently now and then
    assert same_rows.mean() > 0.9
    half_step = (0.5 if dtype == "int8" else 16) * found.scale  # of the greatest numbers
    assert (abs(numbers - (x - found.mean) @ matrix) <= 1.001 * half_step).all()
    plain = np.std(quantize(x, dtype, "token").dequantize() - x)
    assert np.std(exact - x) < 0.2 * plain, "the offsets would have taken the bits"


def test_what_dequantize_gives() -> None:
    x = normal(3, 20, 8)
    for of, default in (("float16", "float32"), (BF16, "float32"), ("float32", "float32"), ("float64", "float64")):
        found = quantize(x.astype(of))
        assert found.dtype == np.dtype(of) and found.dequantize().dtype == default
        assert found.dequantize("bfloat16").dtype == BF16
    with pytest.raises(TypeError, match=r"dtype: expected .* got 'int32'"):
        found.dequantize("int32")


def test_what_is_not_finite() -> None:
    x = normal(1, 4, 8)
    x[0, 1, 2], x[0, 2, 3], x[0, 3] = np.nan, -np.inf, 0
    missing = np.isnan(x) | np.isinf(x)
    for per in quantized.PER:
        values = quantize(x, "e4m3", per).dequantize()
        assert (np.isnan(values) == missing).all() and not values[0, 3].any()
        np.testing.assert_allclose(values[~missing], x[~missing], rtol=0.0626, atol=0.01)
    rows = np.isnan(quantize(x, "int8", "token").dequantize())
    assert rows.tolist() == np.broadcast_to(missing.any(-1, keepdims=True), x.shape).tolist()
    assert np.isnan(quantize(x, "int8", "head").dequantize()).all()
    smooth = quantize(x, rotate=True, smooth=True)
    np.testing.assert_allclose(smooth.mean, np.nanmean(np.where(missing, np.nan, x), 1, keepdims=True), rtol=1e-6)
    assert np.isnan(smooth.dequantize()).all(-1).tolist() == [[False, True, True, False]]
    huge = np.array([[1e300, 1.0], [3e38, 1e-45]])
    values = quantize(huge, per="token").dequantize()
    assert np.isnan(values[0, 0]) and abs(values[0, 1] - 1) < 1e-6 and values[1, 0] > 2.9e38 and values[1, 1] == 0
    zeros = quantize(np.zeros((5, 8), np.float32), "int8")
    assert not zeros.dequantize().any() and zeros.scale[0, 0] == np.finfo(np.float32).tiny


@pytest.mark.parametrize("per", quantized.PER)
def test_arrays_without_tokens(per: Any) -> None:
    for shape in ((0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8), (0, 8)):
        found = quantize(np.zeros(shape, np.float32), "e4m3", per, rotate=True, smooth=True, block=4)
        assert found.dequantize().shape == shape


def test_a_quantised_array() -> None:
    x = normal(2, 3, 50, 8)
    found = quantize(x, "int8", "block", rotate=True, smooth=True, block=16, seed=3)
    assert found.nbytes == x.size + 4 * 2 * 3 * 4 + 4 * 2 * 3 * 8 and found.format == "int8" and found.seed == 3
    assert repr(found) == (
        "<Quantized: int8 per block of 16, rotated, smooth, shape (2, 3, 50, 8) of float32, 2688 bytes>"
    )
    same(pickle.loads(pickle.dumps(found)).dequantize(), found.dequantize())
    wrapped = Quantized(found.data, found.scale, "float16", "block", 16)
    assert wrapped.dtype == np.float16
    np.testing.assert_allclose(wrapped.dequantize(), reference.dequantised(
        found.data.astype(float), "int8", 1) * found.scale.repeat(16, 2)[:, :, :50], rtol=1e-6)  # fmt: skip


# --- calls ------------------------------------------------------------------------------------------------------------


def leaky(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return flashkit.where(s > 0, s, 0.5 * s)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 3},
    "window": {"window": (9, 2), "scale": 0.3, "layout": "bnhd"},
    "scores": {"softcap": 3.0, "alibi_slopes": np.array([0.5, 0.25, 0.1, 0.05], np.float32)},
    "arrays": {"bias": normal(4, 33, 47), "mask": rng.random((33, 47)) < 0.8},
    "functions": {"score_mod": leaky, "mask_mod": flashkit.mods.prefix_lm(5)},
    "lengths": {"kv_lengths": [17, 47], "sinks": np.zeros(4, np.float32)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
}
MIXED = ["qkv", "k", "v", "kv", "q"]


def as_given(option: dict[str, Any], which: str, **form: Any) -> tuple[list[Any], list[Any]]:
    """Arrays of a call, those of `which` quantised, and the same dequantised; q and k rotated differently."""
    layout = option.get("layout", "bhnd")
    arrays = [x if layout == "bhnd" else x.swapaxes(1, 2) for x in tensors()]
    given = [
        quantize(x, "e4m3", "block", rotate=True, seed=i, block=16, layout=layout, **form) if name in which else x
        for i, (name, x) in enumerate(zip("qkv", arrays, strict=True))
    ]
    return given, [x.dequantize() if isinstance(x, Quantized) else x for x in given]


@pytest.mark.parametrize("which", MIXED)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_of_quantised_arrays(name: str, which: str) -> None:
    """The same bits as for the arrays that they stand for, forward and backward, whatever the masks and scores."""
    option = OPTIONS[name] | {"backend": "reference"}  # NumPy: nothing compiles
    given, plain = as_given(option, which, smooth=True)
    same(attention(*given, **option, return_lse=True), attention(*plain, **option, return_lse=True))
    found, expected = (attention_vjp(*x, **option) for x in (given, plain))
    same(found[0], expected[0])
    dout = np.ones_like(found[0])
    same(found[1](dout), expected[1](dout))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("smooth", [False, True])
def test_the_error_is_that_of_float32(smooth: bool, backend: str) -> None:
    """At most twice that of plain computation in float32, against float64 on the same arrays; lse and gradients too."""
    given, _ = as_given({}, "qkv", smooth=smooth)
    single, double = ([x.dequantize(dtype) for x in given] for dtype in ("float32", "float64"))
    dout = normal(2, 4, 33, 12)
    (out, lse), vjp = attention_vjp(*given, causal=True, return_lse=True, backend=backend)
    problem, operands, _ = prepare(*single, causal=True)
    _, allowed = cases.by_definition(problem.spec, operands, dout)
    _, exact_operands, _ = prepare(*double, causal=True)
    exact = cases.computed(problem.spec, exact_operands, dout, None, np.float64)
    cases.assert_conforms(cases.Results(out, lse, *vjp(dout), None), exact, allowed)


def test_packed_and_paged() -> None:
    q, k, v = normal(30, 4, 16), normal(30, 2, 16), normal(30, 2, 12)
    for per in quantized.PER:
        given = [quantize(x, "e4m3", per, layout="bnhd", block=8) for x in (q, k, v)]
        plain = [x.dequantize() for x in given]
        same(*(attention(*x, cu_seqlens=[0, 11, 30], backend="reference") for x in (given, plain)))
        pools = [quantize(normal(6, 8, 2, d), "int8", per, layout="bnhd", smooth=True, block=4) for d in (16, 12)]
        pages = {"page_table": [[3, 1, -1], [0, 5, 2]], "kv_lengths": [9, 22], "backend": "reference"}
        rows = normal(2, 4, 3, 16)
        same(attention(rows, *pools, **pages), attention(rows, *(x.dequantize() for x in pools), **pages))


def test_a_smooth_key_leaves_the_log_sum_exp_right() -> None:
    """Scores without the mean are off by a constant of their row, and lse would be as well."""
    q, k, v = tensors()
    k += 4
    found = attention(q, quantize(k, "int8", "token", smooth=True), v, return_lse=True, backend="reference")[1]
    exact = attention(q, k, v, return_lse=True, backend="reference")[1]
    assert abs(found - exact).max() < 0.05 and abs(q.sum(-1)).max() > 5


@pytest.mark.parametrize("dtype", ["float16", BF16, "float64"])
def test_results_have_the_dtype_of_what_was_quantised(dtype: Any) -> None:
    given = [quantize(x, "int8", "token") for x in tensors(dtype=dtype)]
    wide = np.float64 if dtype == "float64" else np.float32
    for arrays in (given, [given[0], given[1], given[2].dequantize(dtype)], [given[0].dequantize(dtype), *given[1:]]):
        sinks = np.zeros(4, np.float16)
        plain = [x.dequantize() if isinstance(x, Quantized) else x.astype(wide) for x in arrays]
        options: Any = {"sinks": sinks, "return_lse": True, "backend": "reference"}
        (out, lse), vjp = attention_vjp(*arrays, **options)
        (wide_out, wide_lse), wide_vjp = attention_vjp(*plain, **options)
        same((out, lse), (wide_out.astype(dtype), wide_lse))
        dout, dlse = normal(*out.shape).astype(dtype), normal(*lse.shape).astype(lse.dtype)
        wrt = ("sinks", "v", "q", "k")
        found, expected = vjp(dout, dlse, wrt=wrt), wide_vjp(dout.astype(wide), dlse, wrt=wrt)
        assert found[0].dtype == np.float16
        same(found, (expected[0], *(x.astype(dtype) for x in expected[1:])))
        with pytest.raises(TypeError, match=r"dout: expected .* got int8"):
            vjp(np.ones(out.shape, np.int8))


@pytest.mark.parametrize("dtype", ["float32", BF16])
def test_out(dtype: Any) -> None:
    q, k, v = tensors(dtype=dtype)
    k8 = quantize(k)
    expected = attention(q, k8, v, return_lse=True)
    out = np.empty(expected[0].shape, dtype)
    found = attention(q, k8, v, return_lse=True, out=out)
    assert found[0] is out
    same(found, expected)
    out[...] = 0
    assert attention_vjp(q, k8, v, out=out)[0] is out
    same(out, expected[0])
    assert flashkit.plan(q, k8, v)(q, k8, v, out=out) is out
    same(out, expected[0])
    wrong = {
        "out: expected shape": np.empty((2, 4, 33, 16), dtype),
        "out: expected dtype": np.empty(out.shape, np.float16),
        "out: expected a writable array": np.broadcast_to(out[:1], out.shape),
    }
    for message, array in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            attention(q, k8, v, out=array)
    bias = np.zeros((2, 4, 33, 47), dtype)
    with pytest.raises(ValueError, match="out must not share memory with bias"):
        attention_vjp(q, k8, v, bias=bias, out=bias[..., :12])


def test_plans() -> None:
    q, k, v = tensors()
    k8 = quantize(k, per="token")
    planned = flashkit.plan(q, k8, v, causal=True)
    expected = attention(q, k8.dequantize(), v, causal=True)
    same(planned(q, k8, v), expected)
    same(pickle.loads(pickle.dumps(planned))(q, k8, v), expected)
    same(planned(q, quantize(k, "int8"), v), attention(q, quantize(k, "int8"), v, causal=True))
    assert flashkit.plan(q, k8, v, precision="tf32").problem.spec.precision == "tf32"
    with pytest.raises(ValueError, match=r"k: expected .* got \(2, 2, 46, 16\)"):
        planned(q, quantize(k[:, :, 1:]), v)


# --- precision="fp8" --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", BF16])
def test_precision_fp8(dtype: Any) -> None:
    """q, k and v per block, q and k rotated; in every function that takes it."""
    q, k, v = tensors(dtype=dtype)
    given = [quantize(x, "e4m3", "block", rotate=name != "v") for name, x in zip("qkv", (q, k, v), strict=True)]
    fp8: dict[str, Any] = {"precision": "fp8", "causal": True}
    expected = attention(*given, causal=True, return_lse=True)
    before = attention(q, k, v, causal=True)
    for _ in range(2):
        same(attention(q, k, v, return_lse=True, **fp8), expected)
    same(attention(q, given[1], v, return_lse=True, **fp8), expected)
    same(attention(q, k, v, causal=True), before)
    assert not (before == expected[0]).all()
    (found, vjp), (_, vjp_of_given) = attention_vjp(q, k, v, **fp8), attention_vjp(*given, causal=True)
    same(found, expected[0])
    same(vjp(found), vjp_of_given(found))
    planned = flashkit.plan(q, k, v, return_lse=True, **fp8)
    assert repr(planned).endswith("returns (out, lse); precision 'fp8'>")
    for each in (planned, pickle.loads(pickle.dumps(planned))):
        same(each(q, k, v), expected)
        with pytest.raises(TypeError, match="q: expected dtype float16 or bfloat16 with precision='fp8', got float32"):
            each(*tensors())
        with pytest.raises(ValueError, match=r"q: expected .* got \(2, 4, 32, 16\)"):
            each(q[:, :, 1:], k, v)
    same(flashkit.weights(q, k, **fp8), flashkit.weights(given[0], given[1], causal=True))


def test_precision_fp8_does_not_look_ahead() -> None:
    """A row depends neither on later blocks of 128 keys nor on memory behind lengths, in each layout and plan."""
    q, k, v = tensors(300, 300, BF16)
    great, unknown = ([x.copy() for x in (k, v)] for _ in range(2))
    for x, y in zip(great, unknown, strict=True):
        x[:, :, 128:] = 1e4
        y[:, :, 200:] = np.nan
    for options in ({"causal": True}, {"kv_lengths": [128, 15], "q_offset": 0}):
        of_great, of_unknown, expected = (
            attention(q, *kv, precision="fp8", **options)[:, :, : 128 if "causal" in options else 300]
            for kv in (great, unknown, (k, v))
        )
        same(of_great, expected)
        # Beside NaN that a mask hides a tile is summed again in another order.
        np.testing.assert_allclose(of_unknown.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=2**-9)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    given = {"precision": "fp8", "causal": True, "layout": "bnhd"}
    other = attention(*swapped, **given)
    same(other.swapaxes(1, 2), attention(q, k, v, precision="fp8", causal=True))
    same(flashkit.plan(*swapped, **given)(*swapped), other)


def test_explain() -> None:
    q, k, v = tensors(dtype=BF16)
    found = flashkit.explain(q, quantize(k, "int8", "head"), v)
    assert "float32, batch 2" in found.problem
    assert found.problem.endswith(
        "; dequantised before: q bfloat16, k int8 per head, v bfloat16 (k and v are not both quantised to one format)"
    )
    large = np.broadcast_to(q[:1, :1, :1], (1, 64, 1 << 24, 16))  # 32 GiB would not fit
    assert "v e4m3 per block (" in flashkit.explain(large, large, large, precision="fp8").problem
    assert flashkit.explain(q, k, v, precision="fp8", measure=True).measured_seconds


@pytest.mark.slow
def test_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch")
    import flashkit.torch

    q, k, v = tensors(dtype=BF16)
    given = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (q, k, v)]
    plain = lambda x: x.view(torch.int16).numpy().view(BF16)
    out, vjp = attention_vjp(*given, precision="fp8")
    expected, expected_vjp = attention_vjp(q, k, v, precision="fp8")
    same(plain(out), expected)
    same(tuple(map(plain, vjp(out))), expected_vjp(expected))
    same(plain(flashkit.plan(*given, precision="fp8")(*given)), expected)
    same(plain(attention(given[0], quantize(k), quantize(v))), attention(q, quantize(k), quantize(v)))
    with pytest.raises(TypeError, match=r"k: expected a numpy array.* got a torch tensor on cpu"):
        attention(quantize(q), given[1], v)
    same(quantize(given[0]).data, quantize(q).data)
    with pytest.raises(ValueError, match=r"precision: .* 'fp8', which flashkit.attention takes"):
        flashkit.torch.attention(*given, precision="fp8")
    with pytest.raises(TypeError, match="Quantized"):
        flashkit.torch.attention(*map(quantize, (q, k, v)))


# --- errors -----------------------------------------------------------------------------------------------------------

X, X8 = np.ones((2, 3, 8), np.float32), quantize(np.ones((2, 3, 8), np.float32))
ONE = np.ones((1, 1, 1), np.float32)

WRONG: dict[str, tuple[Any, str]] = {
    "dtype": (lambda: quantize(X, "fp8"), "dtype: expected .* got 'fp8'"),  # type: ignore[arg-type]
    "per": (lambda: quantize(X, per="row"), "per: expected .* got 'row'"),  # type: ignore[arg-type]
    "layout": (lambda: quantize(X, layout="nhd"), "layout: expected .* got 'nhd'"),
    "rotate": (lambda: quantize(X, rotate=1), "rotate: expected True or False, got 1"),  # type: ignore[arg-type]
    "smooth": (lambda: quantize(X, smooth="k"), "smooth: expected True or False, got 'k'"),  # type: ignore[arg-type]
    "block": (lambda: quantize(X, per="block", block=0), "block: expected an integer from 1 to [0-9]+, got 0"),
    "x": (lambda: quantize([1.0]), "x: expected .* got a builtins.list"),
    "x's dtype": (lambda: quantize(X.astype(int)), "x: expected .* got int64"),
    "x's shape": (lambda: quantize(X[0, 0]), r"x: expected .* got \(8,\)"),
    "head dim": (lambda: quantize(np.ones((1, 1025))), r"x: expected .* 1 to 1024, got \(1, 1025\)"),
    "twice": (lambda: quantize(X8), r"x: expected an array of NumPy.* got a .*Quantized; pass x.dequantize\(\)"),
    "data": (lambda: Quantized(X, ONE), "data: expected .* got float32"),
    "scale": (lambda: Quantized(X8.data, ONE, per="token"), r"scale: expected .* got \(1, 1, 1\)"),
    "scale's dtype": (lambda: Quantized(X8.data, ONE.astype(float)), "scale: expected .* got float64"),
    "of": (lambda: Quantized(X8.data, ONE, "int32"), "dtype: expected .* got 'int32'"),
    "no dtype": (lambda: Quantized(X8.data, ONE, "half a byte"), "dtype: expected float64, .* got 'half a byte'"),
    "mean": (lambda: Quantized(X8.data, ONE, mean=X[:, :2]), r"mean: expected .* got \(2, 2, 8\)"),
    "mean's axes": (lambda: Quantized(X8.data, ONE, mean=X[0]), r"mean: expected .* got \(3, 8\)"),
    "mean's dtype": (lambda: Quantized(X8.data, ONE, mean=X.astype(float)), "mean: expected .* got float64"),
    "seed of data": (lambda: Quantized(X8.data, ONE, seed="a"), "seed: expected an integer from 0 .* got 'a'"),  # type: ignore[arg-type]
    "dtypes": (lambda: attention(X.astype(BF16), X8, X.astype(BF16)), "k: expected .* got float32"),
    "dtypes of plain": (lambda: attention(X8, X8, X.astype(BF16)), "v: expected .* got bfloat16"),
    "fp8 of float32": (lambda: attention(X, X, X, precision="fp8"), "q: expected dtype float16 or bfloat16 with"),
    "fp8 of 1 axis": (lambda: attention(*[X[0, 0].astype(BF16)] * 3, precision="fp8"), r"q: expected .* got \(8,\)"),
    "shapes": (lambda: attention(X, quantize(X[:, :, :4]), X), "k: expected head dim 8"),
    "precision": (lambda: attention(X, X, X, precision="fp16"), "expected None, 'highest', 'tf32' or 'fp8'"),  # type: ignore
    "prepare": (lambda: prepare(X, X, X, precision="fp8"), "precision: .* got 'fp8', which only attention, "),
    "merge": (lambda: flashkit.merge((X8, X[..., 0])), "out of part 0: .* got a .*Quantized"),
    "rotary": (lambda: flashkit.rotary(X8, *flashkit.rotary_table(8, 8)), r"Quantized.*dequantize\(\)"),
    "cache": (lambda: flashkit.KVCache(1, kv_heads=2, dim=8, pages=1, page=4).append(X8, X8), "k: .*Quantized"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        call()


def test_a_cache_has_its_own_numbers() -> None:
    cache = flashkit.KVCache(1, kv_heads=2, dim=8, pages=1, page=4, dtype="float16")
    k = np.ones((1, 2, 3, 8), np.float16)
    cache.append(k, k)
    with pytest.raises(ValueError, match=r"precision: .* for a cache, got 'fp8'"):
        cache.attend(k, precision="fp8")
    with pytest.raises(TypeError, match=r"q: .* got a .*Quantized"):
        cache.attend(quantize(k))
