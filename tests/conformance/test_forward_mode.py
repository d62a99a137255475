"""JVPs, statistics and second derivatives of every backend: a pairwise design of features against the definition,
differences of finite steps, and what holds at the edges.
"""

from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit.call.arguments import prepare
from flashkit.call.second_order import second_order
from flashkit.reference import standard_jvp, statistics
from flashkit.spec import Tangents

DESIGN = cases.pairwise(cases.FACTORS)
STATISTICS = ("entropy", "key_weight", "max_logit")
HOST = ("reference", "cpu")
TOLERANCE = {"float64": 1e-9, "float32": 1e-4}


def near(got: Any, expected: Any) -> None:
    got, expected = np.asarray(got), np.asarray(expected, np.float64)
    if got.dtype.itemsize == 2:
        cases.within_a_unit(got, expected)
        return
    scale = max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=0, atol=TOLERANCE[got.dtype.name] * scale)


def rows(backend: str) -> list[Any]:
    """Rows of the design; the reference, which is the definition, takes few."""
    step = {"reference": 9, "cpu": 1}[backend]
    return [pytest.param(backend, i) for i in range(0, len(DESIGN), step)]


def built(row: int) -> cases.Call:
    """Most of the calls compute in float64, whose errors are small whatever the features."""
    dtype = DESIGN[row]["dtype"] if row % 5 == 0 else "float64"
    return cases.build({**DESIGN[row], "dtype": dtype})


@pytest.mark.parametrize(("backend", "row"), [x for backend in HOST for x in rows(backend)])
@pytest.mark.one_in(48)
def test_statistics_conform(backend: str, row: int) -> None:
    call = built(row)
    out, lse, found = flashkit.attention(
        call.q, call.k, call.v, return_lse=True, return_stats=STATISTICS, backend=backend, **call.options
    )
    without = {name: x for name, x in call.options.items() if name != "out"}
    expected_out, expected_lse = flashkit.attention(call.q, call.k, call.v, return_lse=True, backend=backend, **without)
    near(out, expected_out)
    near(lse, expected_lse)
    problem, operands, _ = prepare(**call.plain)
    exact = statistics(problem.spec, operands)
    for name in ("entropy", "max_logit"):
        assert found[name].shape == lse.shape
        assert found[name].dtype == lse.dtype
        if call.choice["sequences"] != "packed":
            near(call.rows_to_plain(found[name]), exact[name])
        elif backend != "reference":  # what follows the last sequence has no plain form
            _, own = flashkit.attention(call.q, call.k, call.v, return_stats=STATISTICS, backend="reference", **without)
            near(found[name], own[name])
    for name in ("dropout_p", "seed"):  # weights() drops, the statistics do not
        without.pop(name, None)
    near(found["key_weight"], flashkit.weights(call.q, call.k, **without).sum(-2))


@pytest.mark.parametrize(("backend", "row"), [x for backend in HOST for x in rows(backend)])
@pytest.mark.one_in(48)
def test_jvp_conforms(backend: str, row: int) -> None:
    call = built(row)
    rng = np.random.default_rng(row)
    named = {
        name: rng.standard_normal(x.shape).astype(x.dtype)
        for name, x in (("q", call.q), ("k", call.k), ("v", call.v))
        if row % 7 or name != "qkv"[row // 7 % 3]  # one of them is 0 now and then
    }
    given: Any = {f"d{name}": named.get(name) for name in "qkv"}
    if "page_table" in call.options:
        with pytest.raises(flashkit.UnsupportedError, match="page_table"):
            flashkit.attention_jvp(call.q, call.k, call.v, **given, backend=backend, **call.options)
        return
    (out, lse), (dout, dlse) = flashkit.attention_jvp(
        call.q, call.k, call.v, **given, return_lse=True, backend=backend, **call.options
    )
    assert (dout.dtype, dlse.dtype) == (out.dtype, lse.dtype)
    if call.choice["sequences"] == "packed":  # what follows the last sequence has no plain form
        own = flashkit.attention_jvp(
            call.q, call.k, call.v, **given, return_lse=True, backend="reference", **call.options
        )
        for got, right in zip((out, lse, dout, dlse), (*own[0], *own[1]), strict=True):
            near(got, right)
        return
    problem, operands, _ = prepare(**call.plain)
    plain = (None if name not in named else call.to_plain(named[name], "q" if name == "q" else "k") for name in "qkv")
    operands.tangents = Tangents(*plain, None, None)
    exact = standard_jvp(problem.spec, operands)
    found = call.to_plain(out), call.rows_to_plain(lse), call.to_plain(dout), call.rows_to_plain(dlse)
    for got, expected in zip(found, exact, strict=True):
        near(got, expected)


FINITE: dict[str, dict[str, Any]] = {
    "causal, sinks": {"causal": True, "sinks": np.array([0.5, -1.0, 2.0, 0.0])},
    "modifications": {
        "softcap": 2.0, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.0]), "window": (9, 2),
        "bias": np.random.default_rng(5).standard_normal((4, 20, 25)),
    },
    "a function, dropout": {
        "score_mod": lambda s, b, h, q, k: s * flashkit.tanh(0.3 * s) + 0.1 * (q - k), "kv_lengths": [20, 25],
        "dropout_p": 0.3, "seed": 3,
    },
    "packed": {"cu_seqlens": (np.array([0, 10, 10, 25]), np.array([0, 20, 25, 35])), "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("features", FINITE)
def test_finite_differences(features: str, backend: str) -> None:
    """First and second derivatives along random directions; both of them without a tangent here and there."""
    rng, options = np.random.default_rng(0), FINITE[features]
    packed = "cu_seqlens" in options
    shapes = ((30, 4, 6), (40, 2, 6), (40, 2, 5)) if packed else ((2, 4, 20, 6), (2, 2, 25, 6), (2, 2, 25, 5))
    tensors, along = ([rng.standard_normal(shape) for shape in shapes] for _ in range(2))
    h = 1e-5

    def difference(f: Any, direction: Any) -> Any:
        after, before = ([x + sign * h * d for x, d in zip(tensors, direction, strict=True)] for sign in (1, -1))
        return [(a - b) / (2 * h) for a, b in zip(f(*after), f(*before), strict=True)]

    def attend(*x: Any) -> Any:
        return flashkit.attention(*x, return_lse=True, backend=backend, **options)

    for which in ("qkv", "q", "v"):
        moved: Any = {f"d{name}": x if name in which else None for name, x in zip("qkv", along, strict=True)}
        _, found = flashkit.attention_jvp(*tensors, **moved, return_lse=True, backend=backend, **options)
        direction = [x if name in which else 0 * x for name, x in zip("qkv", along, strict=True)]
        for got, expected in zip(found, difference(attend, direction), strict=True):
            finite = np.isfinite(expected)  # of an empty row the lse is -inf, and its tangent 0
            np.testing.assert_allclose(got[finite], expected[finite], atol=1e-7)
            assert not got[~finite].any()
        weights = [rng.standard_normal(x.shape) for x in found]

        def projected(*x: Any, moved: Any = moved, weights: Any = weights) -> Any:
            _, found = flashkit.attention_jvp(*x, **moved, return_lse=True, backend=backend, **options)
            return [sum((x * w).sum() for x, w in zip(found, weights, strict=True))]

        second = second_order(*tensors, moved, *weights, backend=backend, **options)
        (expected,) = difference(projected, along)
        np.testing.assert_allclose(sum((g * d).sum() for g, d in zip(second, along, strict=True)), expected, rtol=1e-6)


@pytest.mark.parametrize("backend", HOST)
@pytest.mark.parametrize("n_q", [3, 20])
def test_edges(n_q: int, backend: str) -> None:
    """Empty rows, NaN that the mask hides, NaN that it shows, and no keys at all."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((1, 2, n_q, 8)), *rng.standard_normal((2, 1, 2, 24, 8))
    visible = np.ones((n_q, 24), bool)
    visible[0], visible[:, 5], visible[:, 7], visible[-1, 7] = False, False, False, True
    k[0, 0, 5] = v[0, 0, 5] = np.nan
    k[0, 1, 7] = np.nan
    options: Any = {"mask": visible, "backend": backend}
    out, lse, found = flashkit.attention(q, k, v, return_lse=True, return_stats=STATISTICS, **options)
    assert not found["entropy"][0, :, 0].any()
    assert (found["max_logit"][0, :, 0] == -np.inf).all()
    for name in ("entropy", "max_logit"):
        assert (np.isnan(found[name]) == np.isnan(lse)).all()
        assert np.isnan(found[name][0, 1, -1])
    assert np.isfinite(found["key_weight"][0, 0]).all()
    assert (np.isnan(found["key_weight"][0, 1]) == visible[-1]).all()  # the NaN row sees them
    (same, _), (dout, dlse) = flashkit.attention_jvp(q, k, v, q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(same, out)
    assert (np.isnan(dout).any(-1) == np.isnan(lse)).all()
    assert (np.isnan(dlse) == np.isnan(lse)).all()
    assert not dout[0, :, 0].any()
    empty = flashkit.attention(q, k[:, :, :0], v[:, :, :0], return_stats=STATISTICS, backend=backend)[1]
    assert empty["key_weight"].shape == (1, 2, 0)
    assert not empty["entropy"].any()
    assert (empty["max_logit"] == -np.inf).all()
    assert not flashkit.attention_jvp(q, k[:, :, :0], v[:, :, :0], q, backend=backend)[1].any()
    none = flashkit.attention(q[:, :, :0], k, v, return_stats=STATISTICS, backend=backend)[1]
    assert not none["key_weight"].any()
    assert none["entropy"].shape == (1, 2, 0)
    pages: Any = {"page_table": np.zeros((1, 0), np.int64), "kv_lengths": np.array([0])}
    pages["cu_seqlens"] = np.array([0, n_q])
    of_q, pool = q[0].swapaxes(0, 1), k.swapaxes(1, 2)
    no_pages = flashkit.attention(of_q, pool, pool, return_stats=STATISTICS, backend=backend, **pages)[1]
    assert no_pages["key_weight"].shape == (1, 2, 0)


def test_only_what_is_asked_for_is_returned() -> None:
    q = np.ones((2, 4, 8))
    out, found = flashkit.attention(q, q, q, return_stats=["key_weight"])
    assert list(found) == ["key_weight"]
    assert out.shape == q.shape
    np.testing.assert_allclose(found["key_weight"], 1)
    with pytest.raises(ValueError, match=r"return_stats: expected 'entropy', 'key_weight', 'max_logit', got 'mass'"):
        flashkit.attention(q, q, q, return_stats=("mass",))
    with pytest.raises(TypeError, match="return_stats: expected a tuple of"):
        flashkit.attention(q, q, q, return_stats="entropy")  # type: ignore[call-overload]


def test_tangents_are_checked() -> None:
    q, k = np.ones((2, 3, 7, 8), np.float32), np.ones((2, 3, 9, 8), np.float32)
    with pytest.raises(ValueError, match=r"dk: expected shape \(2, 3, 9, 8\) \(k's\), got \(2, 3, 7, 8\)"):
        flashkit.attention_jvp(q, k, k, dk=q)
    with pytest.raises(TypeError, match=r"dq: expected dtype float32 \(q's\), got float64"):
        flashkit.attention_jvp(q, k, k, q.astype(float))
    with pytest.raises(TypeError, match="dv"):
        flashkit.attention_jvp(q, k, k, dv="zero")
    float0 = np.zeros(k.shape, np.dtype([("float0", np.void, 0)]))  # as JAX writes a tangent of nothing
    assert not flashkit.attention_jvp(q, k, k, None, float0)[1].any()


def test_quantised_arrays_have_tangents() -> None:
    """Those of the numbers that they stand for."""
    q, k, v, dq, dk, dv = np.random.default_rng(0).standard_normal((6, 1, 2, 32, 16), np.float32)
    k8, v8 = flashkit.quantize(k, "int8"), flashkit.quantize(v, "int8")
    expected = flashkit.attention_jvp(q, k8.dequantize(), v8.dequantize(), dq, dk, dv)
    cases.near(flashkit.attention_jvp(q, k8, v8, dq, dk, dv), expected, atol=1e-6)
    _, found = flashkit.attention(q, k8, v8, return_stats=STATISTICS)
    _, expected = flashkit.attention(q, k8.dequantize(), v8.dequantize(), return_stats=STATISTICS)
    for name in STATISTICS:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
