"""The probabilities of `flashkit.weights` are those by which attention multiplies the values."""

import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import within_a_unit

import flashkit
from flashkit import attention, mods, weights

B, HQ, HKV, NQ, NK, D = 2, 4, 2, 9, 13, 8
RNG = np.random.default_rng(0)
Q, K = RNG.standard_normal((B, HQ, NQ, D)), RNG.standard_normal((B, HKV, NK, D))


def closer(s: Any, b: Any, h: Any, q: Any, k: Any, *, slopes: Any) -> Any:
    return s - slopes[h] * abs(q - k) + 0.1 * b


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"causal": True},
    "top left": {"causal": True, "q_offset": 0},
    "an offset for each entry": {"causal": True, "q_offset": [1, 4]},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 0.5},
    "slopes": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
    "bias": {"bias": RNG.standard_normal((HQ, NQ, NK))},
    "broadcast bias": {"bias": np.broadcast_to(RNG.standard_normal((NQ, 1)), (HQ, NQ, NK)), "softcap": 2.0},
    "mask": {"mask": RNG.random((B, 1, NQ, NK)) > 0.4},
    "floating mask": {"mask": np.where(RNG.random((NQ, NK)) > 0.4, 0, -np.inf)},
    "no key at all": {"mask": np.arange(NQ)[:, None] > np.zeros(NK)},
    "mods": {"score_mod": mods.score(closer, slopes=np.linspace(0.1, 0.4, HQ)), "mask_mod": mods.prefix_lm([2, 5])},
    "block mask": {"block_mask": flashkit.BlockMask.local(NQ, NK, 1, block=4)},
    "lengths": {"kv_lengths": [13, 4], "causal": True, "q_offset": 0},
    "lengths of queries": {"q_lengths": [9, 3], "kv_lengths": [12, 5], "causal": True},
    "sinks": {"sinks": np.array([0.5, -1.0, 2.0, 0.0])},
    "dropout": {"dropout_p": 0.3, "seed": 7},
}
CHOICES: dict[str, tuple[Any, Any]] = {
    "all": (None, None), "some": ([7, 0, 1, 2, -1], [3, 0]), "one": (4, 2),
    "slices": (slice(2, 6), slice(None, None, 2)),
}  # fmt: skip


def identity(n: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Values whose average by the weights is the weights."""
    return np.ascontiguousarray(np.broadcast_to(np.eye(n, dtype=dtype), (*shape, n, n)))


@pytest.mark.parametrize("chosen", CHOICES)
@pytest.mark.parametrize("options", OPTIONS)
def test_weights_are_those_of_attention(options: str, chosen: str) -> None:
    given, (rows, heads) = OPTIONS[options], CHOICES[chosen]
    out = attention(Q, K, identity(NK, (B, HKV), Q.dtype), backend="reference", **given)
    found = weights(Q, K, rows=rows, heads=heads, **given)
    row, head = (np.atleast_1d(np.arange(n)[slice(None) if x is None else x]) for n, x in ((NQ, rows), (HQ, heads)))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, out[:, head][:, :, row], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", ["causal", "mods", "sinks", "dropout", "lengths"])
def test_weights_are_those_of_the_kernels(options: str, dtype: str) -> None:
    kind = getattr(ml_dtypes, dtype, dtype)
    q, k = Q.astype(kind), K.astype(kind)
    out = attention(q, k, identity(NK, (B, HKV), kind), backend="cpu", **OPTIONS[options])
    found = weights(q, k, **OPTIONS[options])
    assert found.dtype == np.float32
    within_a_unit(out, found)


def test_weights_in_every_form_of_arrays() -> None:
    expected = weights(Q, K, rows=[3], causal=True)
    np.testing.assert_array_equal(weights(Q[:, None], K[:, None], rows=[3], causal=True), expected[:, None])
    strided = weights(Q.repeat(2, -1)[..., ::2], K.repeat(2, 2)[:, :, ::2], rows=[3], causal=True)
    np.testing.assert_array_equal(strided, expected)
    bnhd = weights(Q.swapaxes(1, 2), K.swapaxes(1, 2), rows=[3], causal=True, layout="bnhd")
    np.testing.assert_array_equal(bnhd, expected)
    np.testing.assert_array_equal(weights(Q[1], K[1], rows=[3], causal=True), expected[1])
    np.testing.assert_array_equal(weights(Q[1, 2], K[1, 1], rows=[3], causal=True), expected[1, 2])


@pytest.mark.parametrize("paged", [False, True])
def test_weights_of_packed_sequences(paged: bool) -> None:
    lengths = [3, 0, 5]
    offsets = np.cumsum([0, *lengths])  # of 9 tokens, so that one is in none
    q, k = Q[0].swapaxes(0, 1), K[0, :, :9].swapaxes(0, 1)
    options: dict[str, Any] = {"cu_seqlens": offsets}
    if paged:
        # The second half of pages 1 and 4 is of no sequence.
        pages = np.concatenate([np.insert(k[:3], 3, 0, 0), np.insert(k[3:8], 5, 0, 0)]).reshape(5, 2, HKV, D)
        table = np.array([[0, 1, -1], [-1, -1, -1], [2, 3, 4]])
        options |= {"page_table": table, "kv_lengths": lengths}
        k = pages
    found = weights(q, k, rows=[7, 1, 4, 8], causal=True, **options)
    assert found.shape == (HQ, 4, 5 if paged else 9)
    for i, row in enumerate((7, 1, 4)):
        part = slice(0, 3) if row < 3 else slice(3, 8)
        own = weights(Q[0, :, part], K[0, :, part], rows=[row - part.start], causal=True)
        at = slice(0, part.stop - part.start) if paged else part
        np.testing.assert_allclose(found[:, i, at], own[:, 0], rtol=1e-12)
        np.testing.assert_allclose(found[:, i].sum(-1), 1)
    np.testing.assert_array_equal(found[:, 3], 0)


def test_weights_of_keys_in_pages() -> None:
    pages = RNG.standard_normal((5, 4, HKV, D))
    table = np.array([[3, 0, 4], [1, 2, 0]])
    found = weights(Q, pages, rows=[8], page_table=table, kv_lengths=[11, 6], causal=True)
    for b, n in enumerate((11, 6)):
        own = np.concatenate([pages[i] for i in table[b]])[:n].swapaxes(0, 1)
        np.testing.assert_allclose(found[b, :, :, :n], weights(Q[b], own, rows=[8], causal=True), rtol=1e-12)
        np.testing.assert_array_equal(found[b, :, :, n:], 0)


def test_masked_keys_may_hold_nan() -> None:
    k = K.copy()
    k[:, :, 5:] = np.nan
    np.testing.assert_array_equal(weights(Q, k, mask=np.arange(NK) < 5), weights(Q, K, mask=np.arange(NK) < 5))


def test_memory_is_that_of_the_rows() -> None:
    n = 1 << 17
    q = np.broadcast_to(RNG.standard_normal((1, 64, 1, 16), np.float32), (1, 64, n, 16))
    k = np.broadcast_to(RNG.standard_normal((1, 1, n, 16), np.float32), (1, 64, n, 16))
    tracemalloc.start()
    try:
        found = weights(q, k, rows=[5, n - 1], heads=[3], causal=True, bias=np.broadcast_to(np.float32(1), (64, n, n)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.shape == (1, 1, 2, n) and peak < 200 * n
    np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"rows": 9}, ValueError, r"rows: expected .* got values from 9 to 9"),
        ({"heads": [0, -5]}, ValueError, r"heads: expected .* got values from -5 to 0"),
        ({"rows": 1.5}, TypeError, "rows: expected .* got 1.5"),
        ({"rows": [[1]]}, TypeError, r"rows: expected integers .* got \[\[1\]\]"),
        ({"rows": [[1], [2, 3]]}, TypeError, r"rows: expected integers .* different lengths"),
        ({"rows": True}, TypeError, "rows: expected .* got True"),
        ({"out": None}, TypeError, "unexpected argument 'out'"),
        ({"is_causal": True}, TypeError, "did you mean causal"),
        ({"mask": np.ones((3, 3), bool)}, ValueError, "mask: expected .*shape"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        weights(Q, K, **arguments)


def test_rows_of_small_integers() -> None:
    x = np.zeros((300, 2))
    expected = weights(x, x, rows=[299, 3], causal=True)
    np.testing.assert_array_equal(weights(x, x, rows=np.array([-1, 3], np.int8), causal=True), expected)


def test_no_rows_and_no_keys() -> None:
    assert weights(Q, K, rows=[]).shape == (B, HQ, 0, NK)
    assert weights(Q, K[:, :, :0]).shape == (B, HQ, NQ, 0)
