"""Caches and pools of pages that keep 8-bit numbers: attention through them is that on the numbers they stand for."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import KVCache, Quantized, attention, quantize

BF16 = ml_dtypes.bfloat16
FORMATS: tuple[Any, ...] = ("e4m3", "int8")


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> np.ndarray:
    """float64, by the definition: q (N, Hq, D), k and v (Nk, Hkv, D) of one sequence."""
    own = (x.astype(np.float64).swapaxes(0, 1) for x in (q, k, v))
    return attention(*own, backend="reference", **options).swapaxes(0, 1)


def kept(x: np.ndarray, quantized: Any) -> np.ndarray:
    return quantize(x, quantized, "token").dequantize(np.float64)


@pytest.mark.parametrize("quantized", FORMATS)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", BF16])
def test_attend_is_exact_on_what_the_cache_keeps(dtype: Any, quantized: Any) -> None:
    """A prompt, single tokens, a fork, drafts that are trimmed: within the error of the dtype."""
    cache = KVCache(3, 2, 16, 8, pages=16, page=4, dtype=dtype, quantized=quantized)
    for pool in (cache[0].k_pages, cache[0].v_pages):
        pool.scale[:] = np.nan
    k, v = normal(40, 2, 16, seed=1, dtype=dtype), normal(40, 2, 8, seed=2, dtype=dtype)
    cos, sin = flashkit.rotary_table(64, 16)
    tolerance = {"float64": 1e-6, "float32": 2e-6, "float16": 1e-3}.get(dtype if isinstance(dtype, str) else "", 8e-3)

    def check(rows: list[Any], counts: list[int], **options: Any) -> None:
        """rows: of each sequence, the tokens that it has; counts: queries at the end of each."""
        q = normal(sum(counts), 6, 16, seed=3, dtype=dtype)
        out = cache.attend(q, causal=True, **options)
        assert out.dtype == q.dtype and out.shape == (len(q), 6, 8)
        at = 0
        for tokens, count in zip(rows, counts, strict=True):
            if count:
                turned = flashkit.rotary(k[tokens].swapaxes(0, 1), cos, sin).swapaxes(0, 1)
                mine = kept(turned, quantized), kept(v[tokens], quantized)
                want = exact(q[at : at + count], *mine, causal=True)
                np.testing.assert_allclose(out[at : at + count].astype("f8"), want, atol=tolerance)
            at += count

    def add(rows: list[Any], new: list[Any]) -> list[Any]:
        counts = np.array([len(x) for x in new])
        tokens = np.concatenate([np.asarray(x, int) for x in new])
        cache.append(k[tokens], v[tokens], np.concatenate([[0], counts.cumsum()]), rotary=(cos, sin))
        return [[*have, *more] for have, more in zip(rows, new, strict=True)]

    rows = add([[], [], []], [range(9), range(20, 25), []])
    check(rows, [9, 5, 0])
    rows[cache.fork(0)] = list(rows[0])
    for token in (9, 10):
        rows = add(rows, [[token], [token + 16], [token]])
        check(rows, [1, 1, 1])
    rows = add(rows, [range(11, 15), range(27, 31), range(11, 15)])
    cache.trim(0, 3)
    rows[0] = rows[0][:-3]
    check(rows, [1, 2, 1], cu_seqlens=[0, 1, 3, 4])


@pytest.mark.parametrize("quantized", FORMATS)
def test_a_window_of_a_quantised_cache(quantized: Any) -> None:
    cache = KVCache(1, 1, 16, pages=4, page=4, window=(6, 0), quantized=quantized)
    k, v = normal(40, 1, 16, seed=1), normal(40, 1, 16, seed=2)
    for n in range(1, 40):
        cache.append(k[n - 1 : n], v[n - 1 : n])
        q = normal(1, 2, 16, seed=n)
        want = exact(q, kept(k[:n], quantized), kept(v[:n], quantized), window=(6, 0))
        np.testing.assert_allclose(cache.attend(q, causal=True), want, atol=2e-6)
    assert cache.free_pages >= 1


def test_half_the_memory_of_16_bits() -> None:
    sizes: dict[str, Any] = {"pages": 8, "layers": 3}
    for quantized in FORMATS:
        small = KVCache(2, 4, 128, dtype=BF16, quantized=quantized, **sizes).nbytes
        assert small == KVCache(2, 4, 128, quantized=quantized, **sizes).nbytes
        assert small == 3 * 8 * 64 * 4 * 2 * (128 + 4)
        assert small <= 0.52 * KVCache(2, 4, 128, dtype=BF16, **sizes).nbytes
        assert small <= 0.26 * KVCache(2, 4, 128, dtype="float32", **sizes).nbytes


def pools(per: Any, quantized: Any, pages: int = 30, page: int = 8) -> list[Quantized]:
    return [
        quantize(normal(pages, page, 2, d, seed=d), quantized, per, layout="bnhd", smooth=per == "head", block=4)
        for d in (16, 12)
    ]


@pytest.mark.parametrize("quantized", FORMATS)
@pytest.mark.parametrize("per", ["tensor", "head", "block", "token"])
@pytest.mark.parametrize("queries", [1, 9])
def test_pools_of_an_own_engine(queries: int, per: Any, quantized: Any) -> None:
    """Within the error of float32 of exact arithmetic on the dequantised pools; packed queries too, and one plain pool;
    pages that no sequence has never matter.
    """
    own = pools(per, quantized)
    table, lengths = np.array([[3, 1, -1], [0, 25, 2], [7, 7, 3], [-1, -1, -1]]), np.array([9, 22, 16, 0])
    q = normal(4, 4, queries, 16)
    options: Any = {"page_table": table, "kv_lengths": lengths, "causal": True, "softcap": 4.0}
    wide = [x.dequantize(np.float64) for x in own]
    want, want_lse = attention(q.astype("f8"), *wide, **options, return_lse=True, backend="reference")
    unused = np.setdiff1d(np.arange(30), table)
    for x in own:
        if x.scale.shape[0] > 1:
            x.scale[unused] = np.nan
    plain = own[1].dequantize()
    for k, v in (own, (own[0], plain)):
        out, lse = attention(q, k, v, **options, return_lse=True)
        np.testing.assert_allclose(out, want, atol=4e-6)
        np.testing.assert_allclose(lse, want_lse, atol=4e-6)
    rows = np.ascontiguousarray(q.swapaxes(1, 2)).reshape(-1, 4, 16)
    packed = attention(rows, *own, **options, cu_seqlens=np.arange(5) * queries)
    np.testing.assert_allclose(packed.reshape(4, queries, 4, 12).swapaxes(1, 2), want, atol=4e-6)


def test_only_pages_that_are_used_are_dequantised() -> None:
    """A pool of 32 MiB of float32, of which a call reads 4 pages."""
    cache = KVCache(1, 4, 64, pages=256, page=64, quantized="e4m3")
    k = normal(1, 4, 200, 64)
    cache.append(k, k)
    q, own = k[:, :, :1], (cache[0].k_pages, cache[0].v_pages)
    calls = (
        lambda: cache.attend(q),
        lambda: attention(q, *own, page_table=cache.page_table, kv_lengths=cache.lengths),
    )
    for call in calls:
        call()
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 << 20


def test_plans_and_explanations_of_quantised_pools() -> None:
    own, q = pools("token", "int8"), normal(2, 4, 1, 16)
    options: Any = {"page_table": [[3, 1], [0, 25]], "kv_lengths": [9, 16]}
    planned = flashkit.plan(q, *own, **options)
    want = attention(q, *own, **options)
    np.testing.assert_allclose(planned(q, *own), want, atol=1e-6)
    np.testing.assert_allclose(
        planned(q, *own, page_table=[[4, 5], [6, 7]], kv_lengths=[9, 16]),
        attention(q, *own, page_table=[[4, 5], [6, 7]], kv_lengths=[9, 16]),
        atol=1e-6,
    )  # fmt: skip
    assert "k int8 per token" in flashkit.explain(q, *own, **options).problem


def test_what_quantised_caches_refuse() -> None:
    with pytest.raises(ValueError, match="quantized is 'fp8'; 'e4m3' or 'int8' fits"):
        KVCache(1, 1, 8, pages=1, quantized="fp8")  # type: ignore[arg-type]
    cache = KVCache(1, 1, 8, pages=1, dtype=BF16, quantized="e4m3")
    x = normal(1, 1, 2, 8)
    with pytest.raises(TypeError, match="k has dtype float32; the cache's, bfloat16, fits"):
        cache.append(x, x)
    cache.append(x.astype(BF16), x.astype(BF16))
    with pytest.raises(TypeError, match="k has dtype bfloat16, q has float32"):
        cache.attend(x)
