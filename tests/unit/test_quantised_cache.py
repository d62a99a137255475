"""Keys and values of 8 bits that decoding reads as they are: caches, and pools and arrays of an engine's own."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from operands import numbers

import flashkit
from flashkit.call.quantized import Quantized

HEADS, HEADS_KV, DIM, VALUE_DIM = 4, 2, 20, 8


def exact(q: Any, k: Any, v: Any, **options: Any) -> np.ndarray:
    """In float64, on the arrays that quantised ones stand for."""
    wide = [x.dequantize("float64") if isinstance(x, Quantized) else x.astype(np.float64) for x in (q, k, v)]
    return flashkit.attention(*wide, **options)


def near(got: np.ndarray, want: np.ndarray) -> bool:
    """Within the rounding of the dtype, and of the sums before."""
    eps = float(ml_dtypes.finfo(got.dtype).eps)
    return bool((abs(got.astype(np.float64) - want) <= 16 * eps * abs(want).max(initial=1)).all())


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is dequantised."""

    def dequantize(self: Quantized, dtype: Any = None) -> Any:
        raise AssertionError("dequantised")

    monkeypatch.setattr(Quantized, "dequantize", dequantize)


def cache_of(kv_format: str, sequences: int, dtype: Any = np.float32, **options: Any) -> Any:
    cache = flashkit.KVCache(
        sequences, HEADS_KV, DIM, VALUE_DIM, page=4, dtype=kv_format, like=np.empty(0, dtype), **options
    )
    for pool in cache._steps.memory:
        pool[...] = 0xFF  # NaN, in e4m3 and in scales
    return cache


def test_decoding_reads_a_cache_in_place(in_place: None) -> None:
    cache = cache_of("e4m3", 2, pages=16)
    for n in (9, 1):
        cache.append(numbers(2, HEADS_KV, n, DIM), numbers(2, HEADS_KV, n, VALUE_DIM))
    assert np.isfinite(cache.attend(numbers(2, HEADS, 7, DIM), causal=True)).all()
    with pytest.raises(AssertionError, match="dequantised"):
        cache.attend(numbers(2, HEADS, 8, DIM), causal=True)


def test_memory_is_a_quarter_of_float32() -> None:
    """And 4 bytes for a token's scale."""

    def nbytes(dtype: str) -> int:
        return sum(pool.nbytes for pool in flashkit.KVCache(1, 2, 128, pages=64, dtype=dtype)._steps.memory)

    assert nbytes("float32") / nbytes("e4m3") == 4 * 128 / 132


@pytest.mark.parametrize("per", ["tensor", "head", "token"])
@pytest.mark.parametrize("kv_format", ["e4m3", "int8"])
def test_pools_of_an_engine(kv_format: Any, per: Any, in_place: None) -> None:
    pool_k, pool_v = numbers(30, 5, HEADS_KV, DIM), numbers(30, 5, HEADS_KV, VALUE_DIM, seed=1)
    k8, v8 = (flashkit.quantize(x, kv_format, per, layout="bnhd") for x in (pool_k, pool_v))
    table, lengths = np.random.default_rng(2).permutation(30).reshape(3, 10)[:, :7], np.array([33, 0, 7])
    q = numbers(3, HEADS, 2, DIM, seed=4)
    out = flashkit.attention(q, k8, v8, page_table=table, kv_lengths=lengths, causal=True)
    wide = [_values(x) for x in (k8, v8)]
    for b, n in enumerate(lengths):
        k, v = (x[table[b]].reshape(-1, HEADS_KV, x.shape[-1])[None, :n].swapaxes(1, 2) for x in wide)
        assert near(out[b], exact(q[b : b + 1], k, v, causal=True, q_offset=int(n) - 2)[0])


def _pages_of_heads(x: np.ndarray) -> np.ndarray:
    """A copy of (pages, page, Hkv, D) in which the pages of a head follow each other at the stride of its tokens."""
    return x.transpose(2, 0, 1, 3).copy().transpose(1, 2, 0, 3)


OTHERWISE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "in pages": np.array,
    "gaps": lambda x: np.concatenate([x, np.full_like(x, np.nan)], 1)[:, : x.shape[1]],
    "reversed": lambda x: x[::-1].copy()[::-1],
    "pages last": lambda x: x.transpose(1, 2, 3, 0).copy().transpose(3, 0, 1, 2),
}
"""Copies of (pages, page, Hkv, 1) in memory of other strides."""


@pytest.mark.parametrize("page", [1, 5])
@pytest.mark.parametrize("otherwise", OTHERWISE)
def test_scales_of_pages_in_a_row(otherwise: str, page: int, in_place: None) -> None:
    """A run of pages is one array of keys; their scales may lie anywhere."""
    q, kv = numbers(1, HEADS, 2, DIM), (numbers(60 // page, page, HEADS_KV, d, seed=d) for d in (DIM, VALUE_DIM))
    k8, v8 = (flashkit.quantize(x, "int8", "token", layout="bnhd") for x in kv)
    k, v = (_values(x).reshape(1, 60, HEADS_KV, -1).swapaxes(1, 2) for x in (k8, v8))
    for moved in range(2):
        pools = [
            Quantized(
                _pages_of_heads(x.data), (OTHERWISE[otherwise] if i == moved else _pages_of_heads)(x.scale),
                per="token", layout="bnhd",
            )
            for i, x in enumerate((k8, v8))
        ]  # fmt: skip
        out = flashkit.attention(q, *pools, page_table=np.arange(60 // page)[None], kv_lengths=[58])
        assert near(out, exact(q, k[:, :, :58], v[:, :, :58])), "kv"[moved]


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("options", [{"sinks": np.full(HEADS, -np.inf, "f4")}, {"alibi_slopes": np.zeros(HEADS, "f4")}])
def test_a_cache_attends_with_options(options: dict[str, Any], page: int) -> None:
    cache = flashkit.KVCache(1, HEADS_KV, DIM, VALUE_DIM, pages=12, page=page, dtype="int8")
    cache.append(numbers(1, HEADS_KV, 11, DIM), numbers(1, HEADS_KV, 11, VALUE_DIM))
    q = numbers(1, HEADS, 1, DIM)
    assert near(cache.attend(q, **options), cache.attend(q))


def _values(x: Quantized) -> np.ndarray:
    return x.data.astype(np.float64) * x.scale


def test_dense_arrays_and_layouts(in_place: None) -> None:
    q, k, v = numbers(2, 3, HEADS, DIM), numbers(2, 40, HEADS_KV, DIM), numbers(2, 40, HEADS_KV, VALUE_DIM)
    k8, v8 = (flashkit.quantize(x, "e4m3", "token", layout="bnhd") for x in (k, v))
    out = flashkit.attention(q, k8, v8, layout="bnhd", kv_lengths=[40, 21], backend="cpu")
    assert near(out, exact(q, _values(k8), _values(v8), layout="bnhd", kv_lengths=[40, 21]))


def test_nan_shows_where_it_is_seen() -> None:
    """That of a hidden key does not, and that of a value shows in its column alone."""
    q, k, v = numbers(1, 2, 1, 16), numbers(1, 2, 64, 16), numbers(1, 2, 64, 16)
    v[0, 0, 3, 5] = k[0, 1, 60] = np.nan
    k8, v8 = (flashkit.quantize(x, "e4m3", "token") for x in (k, v))
    out = flashkit.attention(q, k8, v8)
    assert np.isnan(out[0, 0, 0, 5]) and np.isnan(out[0, 0]).sum() == 1 and np.isnan(out[0, 1]).all()
    hidden = np.ones((1, 64), bool)
    hidden[0, [3, 60]] = False
    assert np.isfinite(flashkit.attention(q, k8, v8, mask=hidden)).all()
    k8, v8 = (flashkit.quantize(x, "int8", "token") for x in (k, v))  # whose scales are NaN
    assert np.isfinite(flashkit.attention(q, k8, v8, mask=hidden)).all()


@pytest.mark.parametrize(
    "options", [{"rotate": True}, {"smooth": True}, {"per": "block", "block": 8}, {"dtype": "int8"}], ids=str
)
def test_other_keys_are_dequantised(options: dict[str, Any]) -> None:
    """Such as those of another format than the values."""
    q, k, v = numbers(1, 4, 1, 16), numbers(1, 2, 40, 16), numbers(1, 2, 40, 16) + 3  # a mean of keys changes nothing
    k8, v8 = (
        flashkit.quantize(x, **{"dtype": "e4m3", "per": "token", **given}) for x, given in ((k, {}), (v, options))
    )
    assert near(flashkit.attention(q, k8, v8), exact(q, k8, v8))


def test_only_pages_in_use_are_dequantised(calls_of: Any) -> None:
    pool = flashkit.quantize(numbers(50, 4, HEADS_KV, DIM), "e4m3", "block", block=4, layout="bnhd")
    q, table = numbers(1, HEADS, 12, DIM), np.array([[7, 3, -1]])
    k = pool.dequantize()[[7, 3]].reshape(1, 8, HEADS_KV, DIM).swapaxes(1, 2)
    seen = calls_of(Quantized, "dequantize")
    out = flashkit.attention(q, pool, pool, page_table=table, kv_lengths=[8])
    assert [len(x.data) for x, *_ in seen] == [2, 2] and near(out, exact(q, k, k))
    with pytest.raises(ValueError, match=r"page_table\[0, 1\]: expected"):
        flashkit.attention(q, pool, pool, page_table=np.array([[7, 50, 1]]), kv_lengths=[8])


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dtype: expected .*e4m3, int8, got 'e5m2'"):
        flashkit.KVCache(1, 1, 8, pages=1, dtype="e5m2")
    cache = cache_of("e4m3", 1, pages=2)
    with pytest.raises(TypeError, match=r"k: expected .* got int64"):
        cache.append(np.ones((1, HEADS_KV, DIM), int), np.ones((1, HEADS_KV, VALUE_DIM), int))


def decoding(dtype: Any, keys: int, per: Any = "token", seed: int = 0) -> tuple[Any, ...]:
    q, k, v = (numbers(1, 2, n, 16, seed=seed).astype(ml_dtypes.bfloat16) for n in (1, keys, keys))
    return q, flashkit.quantize(k, dtype, per), flashkit.quantize(v, dtype, per)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kv_lengths": [20]}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("per", ["token", "head", "tensor"])
def test_calls_of_one_layout_share_a_plan(options: dict[str, Any], per: Any, plans_on_codes: list[object]) -> None:
    """Each has its own numbers and scales."""
    for seed in range(5):
        q, k8, v8 = decoding("int8", 32, per, seed)
        assert near(flashkit.attention(q, k8, v8, **options), exact(q, k8, v8, **options))
    assert len(plans_on_codes) == 1
    k8, v8 = (flashkit.quantize(x.dequantize(ml_dtypes.bfloat16), "e4m3", per) for x in (k8, v8))
    flashkit.attention(q, k8, v8, **options)
    assert len(plans_on_codes) == 2, "a plan is for a format"
