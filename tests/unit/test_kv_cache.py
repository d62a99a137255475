"""KVCache against a list of arrays: random traces, sharing, windows, layers, and what it refuses."""

import itertools
import threading
from contextlib import suppress
from random import Random
from typing import Any

import cases
import numpy as np
import pytest
from attack import caches
from attack.caches import stopped
from operands import numbers

import flashkit
from flashkit.cache import layer as layers
from flashkit.cache import step_plans
from flashkit.cache.pages import PageTable

DTYPES = ("float64", "float32", "float16", "bfloat16")


def poison(cache: Any) -> None:
    for layer in cache:
        layer.k_pages[:] = layer.v_pages[:] = np.nan


def stored(cache: Any, i: int, first: int = 0, layer: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of a sequence as its row of the page table has them."""
    where = np.arange(first, cache.lengths[i])
    pages = cache.page_table[i][where // cache.page]
    assert (pages >= 0).all()
    return tuple(pool[pages, where % cache.page] for pool in (cache[layer].k_pages, cache[layer].v_pages))


def check_pages(cache: Any) -> None:
    """Each page is free or has as many references as rows of the table name it."""
    table, state = cache.page_table, cache._pages
    used, times = np.unique(table[table >= 0], return_counts=True)
    assert (state.references[used] == times).all() and state.references.sum() == times.sum()
    assert sorted([*state.free.tolist(), *used.tolist()]) == list(range(len(state.references)))
    held = (table >= 0).sum(1)
    assert (held == -(-cache.lengths // cache.page) - state.first).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", ["1", "4", "64"])
def test_random_traces_equal_lists(page: str, dtype: str) -> None:
    """Those of the fuzzer: appends, forks, trims, paths that are kept, refusals and signals, attention after each."""
    call = cases.build(cases.with_(dtype=dtype, sizes="7x9", heads="4:2", dims="8/6") | {"page": page})
    for seed in range(12):
        assert caches.trace(call, Random(seed)).wrong == []


# Attention


def expected(q: np.ndarray, k: Any, v: Any, **options: Any) -> Any:
    """One sequence: q (N, Hq, D), k and v (length, Hkv, D)."""
    return flashkit.attention(*(np.ascontiguousarray(np.asarray(x).swapaxes(0, 1)) for x in (q, k, v)), **options)


def test_batches_and_packed_tokens_are_the_same() -> None:
    """(B, H, N, D) in both layouts, and (T, H, D)."""
    k, v, q = numbers(2, 2, 9, 16, seed=1), numbers(2, 2, 9, 16, seed=2), numbers(2, 4, 9, 16, seed=3)
    caches = [flashkit.KVCache(2, 2, 16, pages=20, page=4) for _ in range(3)]
    caches[0].append(k, v)
    caches[1].append(k.swapaxes(1, 2), v.swapaxes(1, 2), layout="bnhd")
    flat = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(18, -1, 16) for x in (k, v, q)]
    caches[2].append(flat[0], flat[1], cu_seqlens=[0, 9, 18])
    whole, lse = flashkit.attention(q, k, v, causal=True, return_lse=True)
    for cache in caches:
        out, rows = cache.attend(q, causal=True, return_lse=True)
        np.testing.assert_allclose(out, whole, atol=1e-5)
        np.testing.assert_allclose(rows, lse, atol=1e-5)
        other = cache.attend(q.swapaxes(1, 2), causal=True, layout="bnhd")
        np.testing.assert_allclose(other.swapaxes(1, 2), whole, atol=1e-5)
    target = np.empty((18, 4, 16), np.float32)
    out, rows = caches[2].attend(flat[2], causal=True, return_lse=True, out=target)
    assert out is target
    np.testing.assert_allclose(target.reshape(2, 9, 4, 16).swapaxes(1, 2), whole, atol=1e-5)
    np.testing.assert_allclose(rows.reshape(4, 2, 9).swapaxes(0, 1), lse, atol=1e-5)
    names = "entropy", "key_weight"
    right = flashkit.attention(q, k, v, causal=True, return_stats=names)[1]
    out, rows, found = caches[2].attend(flat[2], causal=True, return_lse=True, return_stats=names, out=target)
    assert out is target
    np.testing.assert_allclose(rows.reshape(4, 2, 9).swapaxes(0, 1), lse, atol=1e-5)
    np.testing.assert_allclose(found["entropy"].reshape(4, 2, 9).swapaxes(0, 1), right["entropy"], atol=1e-5)
    np.testing.assert_allclose(found["key_weight"], right["key_weight"], atol=1e-5)


def test_a_forked_sequence_shares_its_prefix_until_it_appends() -> None:
    cache = flashkit.KVCache(3, 1, 8, pages=8, page=4)
    prompt = numbers(6, 1, 8)
    cache.append(prompt, prompt, cu_seqlens=[0, 6, 6, 6])
    assert cache.fork(0, into=2) == 2
    assert cache.fork(0) == 1
    assert cache.free_pages == 6
    new = numbers(3, 1, 8, seed=1)
    cache.append(new, new)
    assert cache.free_pages == 4  # the partial page was copied twice; its last owner kept it
    for i in range(3):
        assert np.array_equal(stored(cache, i)[0], np.concatenate([prompt, new[i : i + 1]]))
    assert len(set(cache.page_table[:, 0])) == 1


def test_a_window_is_a_ring_of_pages() -> None:
    """In calls that are not planned, too; test_random_traces_equal_lists has those that are."""
    cache = flashkit.KVCache(1, 2, 16, pages=4, page=4, window=(9, 0))  # 11 tokens, wherever a page begins
    k, v, q = numbers(200, 2, 16, seed=1), numbers(200, 2, 16, seed=2), numbers(200, 4, 16, seed=3)
    for i in range(0, 200, 2):
        cache.append(k[i : i + 2], v[i : i + 2], cu_seqlens=[0, 2])
        for options in ({"sinks": np.zeros(4, np.float32)}, {"window": (3, 0)}):
            out = cache.attend(q[i : i + 2], causal=True, **options)
            o = expected(q[i : i + 2], k[: i + 2], v[: i + 2], **{"causal": True, "window": (9, 0), **options})
            np.testing.assert_allclose(out.swapaxes(0, 1), o, atol=1e-5)
    for window in ((10, 0), (None, 0)):
        with pytest.raises(ValueError, match=rf"window: expected .* got \({window[0]}, 0\)"):
            cache.attend(q[:2], window=window)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_call_has_the_tables_that_it_gives(dtype: str) -> None:
    """Checked tables are kept by a layer; other tables, another order of pairs and new contents are not mistaken."""
    cache = flashkit.KVCache(1, 1, 8, pages=10, page=4)
    k, (one, other) = numbers(1, 1, 8), (flashkit.rotary_table(20, 8, base=base, dtype=dtype) for base in (10.0, 99.0))
    for position, (tables, interleaved) in enumerate(
        [(one, False), (one, False), (other, False), (other, True), (one, True), (one, False)]
    ):
        cache.append(k, k, rotary=tables, rotary_interleaved=interleaved)
        assert cache.positions.tolist() == [position]
        expected = flashkit.rotary(k, *tables, positions=[position], interleaved=interleaved, layout="bnhd")
        assert np.array_equal(stored(cache, 0)[0][position:], expected)
        found = cache.attend(k, causal=True, rotary=tables, rotary_interleaved=interleaved)
        assert np.array_equal(found, cache.attend(expected, causal=True))
    one[0][:] = 0
    cache.append(k, k, rotary=one)
    assert np.array_equal(stored(cache, 0)[0][6:], flashkit.rotary(k, *one, positions=[6], layout="bnhd"))


def test_steps_of_decoding_share_plans(calls_of: Any) -> None:
    """A plan is made for a power of two of keys, not for each step; its results follow the lengths."""
    made = calls_of(step_plans, "Planned")
    cache = flashkit.KVCache(2, 2, 16, pages=80, page=4, layers=2)
    k, v, q = numbers(2, 100, 2, 16), numbers(2, 100, 2, 16, seed=1), numbers(100, 2, 4, 16, seed=2)
    for n in range(60):
        for layer in cache:
            layer.append(k[:, n], v[:, n])
            out = layer.attend(q[n], causal=True)
        expected = flashkit.attention(*(x.swapaxes(1, 2) for x in (q[n][:, None], k[:, : n + 1], v[:, : n + 1])))
        np.testing.assert_allclose(out, expected[:, :, 0], atol=1e-5)
    assert len(made) <= 8  # up to 64 keys, and tables of 8 and 16 columns
    count = len(made)
    with flashkit.use_backend("reference"):
        np.testing.assert_allclose(layer.attend(q[n], causal=True), out, atol=1e-5)
    assert len(made) == count + 1
    for other in ({"causal": True, "scale": 0.5}, {"causal": True, "window": (3, 0)}):
        assert np.abs(layer.attend(q[n], **other) - out).max() > 1e-3
    cache.trim(1, 30)
    for layer in cache:
        layer.append(k[:, 60], v[:, 60])
        out = layer.attend(q[60])
    keys, values = (np.concatenate([x[1, :30], x[1, 60:61]]).swapaxes(0, 1) for x in (k, v))
    np.testing.assert_allclose(out[1][:, None], flashkit.attention(q[60, 1][:, None], keys, values), atol=1e-5)


@pytest.mark.parametrize("each", [1, 3])
def test_packed_queries_of_equal_sequences_share_plans(each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what their offsets are, whatever array brings them, and whatever the last append was."""
    cache = flashkit.KVCache(2, 2, 16, pages=80, page=4)
    k, v, q = numbers(2, 20, 2, 16), numbers(2, 20, 2, 16, seed=1), numbers(2 * each, 4, 16, seed=2)
    cache.append(*(x.reshape(-1, 2, 16) for x in (k, v)), cu_seqlens=[0, 20, 40])
    lengths, offsets = {"page_table": cache.page_table, "kv_lengths": cache.lengths}, np.array([0, each, 2 * each])
    right = flashkit.attention(q, *cache[0]._pools[:2], cu_seqlens=offsets, return_lse=True, causal=True, **lengths)
    uneven = np.array([0, 2 * each, 2 * each])
    other = flashkit.attention(q, *cache[0]._pools[:2], cu_seqlens=uneven, causal=True, **lengths)
    planned = layers.attention
    monkeypatch.setattr(layers, "attention", None)
    for given in (offsets, offsets.astype(np.uint16), offsets.tolist()):
        out = np.empty_like(q)
        found = cache.attend(q, cu_seqlens=given, return_lse=True, causal=True, out=out)
        assert found[0] is out
        cases.near(found, right, atol=1e-5)
    monkeypatch.setattr(layers, "attention", planned)
    np.testing.assert_allclose(cache.attend(q, cu_seqlens=uneven, causal=True), other, atol=1e-5)
    for wrong in (offsets.astype(float), offsets > 0, [[0], [1, 2]], "x"):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
            cache.attend(q, cu_seqlens=wrong, causal=True)
    with pytest.raises(ValueError, match="bias: expected None beside cu_seqlens"):
        cache.attend(q, cu_seqlens=offsets, bias=np.zeros((4, each, 20), np.float32))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_queries_of_unequal_sequences_share_plans(causal: bool, calls_of: Any) -> None:
    """As many queries find one plan, whatever their offsets and the lengths are; rows behind the last offset are 0."""
    made = calls_of(step_plans, "Planned")
    cache = flashkit.KVCache(3, 2, 16, pages=80, page=4)
    k, v, q = numbers(60, 2, 16), numbers(60, 2, 16, seed=1), numbers(9, 4, 16, seed=2)
    cache.append(k, v, [0, 33, 47, 60])
    lengths = [33, 14, 13]
    for offsets in ([0, 1, 5, 9], [0, 0, 9, 9], [0, 4, 5, 8]):
        out, lse = cache.attend(q, cu_seqlens=np.array(offsets), causal=causal, return_lse=True)
        for b, (first, last) in enumerate(itertools.pairwise(offsets)):
            keys = slice(sum(lengths[:b]), sum(lengths[: b + 1]))
            own = [x.swapaxes(0, 1) for x in (q[first:last], k[keys], v[keys])]
            right = flashkit.attention(*own, causal=causal, return_lse=True)
            np.testing.assert_allclose(out[first:last].swapaxes(0, 1), right[0], atol=1e-5)
            np.testing.assert_allclose(lse[:, first:last], right[1], atol=1e-5)
        assert not out[offsets[-1] :].any()
    assert len(made) == 1
    for offsets, message in (([0, 5, 4, 9], "none less than the one before"), ([0, 1, 5, 10], "here 9 of q")):
        with pytest.raises(ValueError, match=message):
            cache.attend(q, cu_seqlens=offsets, causal=causal)


def test_layers_share_one_table() -> None:
    cache = flashkit.KVCache(2, 1, 8, pages=8, page=4, layers=3)
    k = numbers(3, 5, 1, 8)
    for layer, x in zip(cache, k, strict=True):
        layer.append(x, -x, cu_seqlens=[0, 2, 5])
        assert layer.attend(x).shape == (5, 1, 8)
    assert cache.lengths.tolist() == [2, 3] and cache.free_pages == 6
    for l in range(3):
        assert np.array_equal(stored(cache, 1, layer=l)[0], k[l, 2:])
        assert np.array_equal(stored(cache, 1, layer=l)[1], -k[l, 2:])
    cache[1].append(k[0, :2], k[0, :2])  # any layer may begin
    assert cache.lengths.tolist() == [3, 4]
    with pytest.raises(ValueError, match="layer 0 has not appended"):
        cache[1].append(k[0, :2], k[0, :2])
    with pytest.raises(ValueError, match="layer 0 has not appended"):
        cache[0].attend(k[0, :2])
    for change in (lambda: cache.trim(0, 1), lambda: cache.free(0), lambda: cache.fork(0)):
        with pytest.raises(ValueError, match=r"middle of a step|have tokens"):
            change()
    with pytest.raises(ValueError, match=r"expected \[1, 1\] tokens .* got \[2, 0\]"):
        cache[0].append(k[0, :2], k[0, :2], cu_seqlens=[0, 2, 2])
    with pytest.raises(TypeError, match=r"cache\[l\]\.append"):
        cache.append(k[0, :2], k[0, :2])
    for l in (0, 2):
        cache[l].append(k[l, :2], k[l, :2])
    cache.trim(0, 1)
    assert cache.lengths.tolist() == [2, 4]


def test_exhausted_pages_leave_the_cache_as_it_was() -> None:
    cache = flashkit.KVCache(2, 1, 8, pages=3, page=4, layers=2)
    k = numbers(9, 1, 8)
    for layer in cache:
        layer.append(k[:7], k[:7], cu_seqlens=[0, 4, 7])
    table, lengths = cache.page_table.copy(), cache.lengths
    kept = [stored(cache, i) for i in range(2)]
    with pytest.raises(flashkit.OutOfPagesError, match="9 more tokens need 3 pages of 4, and 1 of 3 are free"):
        cache[0].append(k, k, cu_seqlens=[0, 5, 9])
    assert np.array_equal(cache.page_table, table) and np.array_equal(cache.lengths, lengths)
    assert all(np.array_equal(a, b) for i in range(2) for a, b in zip(kept[i], stored(cache, i), strict=True))
    for layer in cache:
        layer.append(k[:2], k[:2])
    assert cache.lengths.tolist() == [5, 4] and cache.free_pages == 0


def test_earlier_lengths_stay_what_they_were() -> None:
    """And what a caller writes to lengths, tables and positions reaches no kernel."""
    cache = flashkit.KVCache(1, 1, 8, pages=3, page=4)
    k = numbers(6, 1, 8)
    for n in range(6):
        before = cache.lengths
        cache.append(k[n : n + 1], k[n : n + 1], rotary=flashkit.rotary_table(9, 8))
        assert before.tolist() == [n] and cache.lengths.tolist() == [n + 1]
        for array in (cache.lengths, cache.page_table, cache.positions):
            array += 10**8
        cache.attend(k[n : n + 1], rotary=flashkit.rotary_table(9, 8))
    assert np.array_equal(stored(cache, 0)[1], k)
    assert cache.lengths.tolist() == [6] and cache.positions.tolist() == [5] and (cache.page_table < 3).all()


@pytest.mark.parametrize("pages", [12, 40])
def test_an_append_writes_to_no_page_of_the_table_that_holds_meanwhile(pages: int) -> None:
    """That is the table of before, as long as there are free pages but those behind the window."""
    rng, table, kinds = np.random.default_rng(0), PageTable.empty(3, pages, 2, 3, 1), set()
    for _ in range(300):
        counts = rng.integers(0, 4, 3)
        try:
            growth = table.append(counts)
        except flashkit.OutOfPagesError:
            table = table.trim(int(table.lengths.argmax()), int(table.lengths.max()))
            continue
        before = np.full(growth.pages.table.shape, -1)
        before[:, : growth.before.table.shape[1]] = growth.before.table
        new = growth.pages.table != before
        written = growth.pages.table[new]
        written = written[written >= 0]
        assert not np.isin(written, before).any()
        assert (growth.before is table) == (len(written) <= len(table.free))
        kinds.add(growth.before is table)
        table = growth.pages
    assert kinds == ({True, False} if pages == 12 else {True})


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no pages": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=0), ValueError, "pages: .* got 0"),
    "a long page": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, page=65537), ValueError, "page: .* got 65537"),
    "a negative margin": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, rollback=-1), ValueError, "rollback: .* -1"),
    "more tokens than int64 has": (
        lambda c, k: [c.append(*[np.broadcast_to(k[:1], (n, 1, 8))] * 2, [0, n, n]) for n in (1, 2**57)],
        flashkit.OutOfPagesError, "144115188075855872 more tokens need 72057594037927936 pages of 2, and 3 of 4",
    ),
    "kept floats": (lambda c, k: (c.append(k, k), c.keep(0, [0.5])), TypeError, "positions: expected ascending"),
    "kept from before": (
        lambda c, k: (c.append(k, k), c.append(k, k), c.keep(1, [0])), ValueError, "integers from 1 to 1"
    ),
    "kept from behind": (lambda c, k: (c.append(k, k), c.keep(1, [1])), ValueError, "integers from 0 to 0"),
    "kept twice": (lambda c, k: (c.append(k, k), c.append(k, k), c.keep(0, [0, 0], 2)), ValueError, "positions:"),
    "kept out of order": (lambda c, k: (c.append(k, k), c.append(k, k), c.keep(0, [1, 0], 2)), ValueError, "got"),
    "kept of more than there is": (lambda c, k: c.keep(0, [], 1), ValueError, "n: expected 0 to 0, .* got 1"),
    "a float": (lambda c, k: flashkit.KVCache(2.0, 1, 8, pages=1), TypeError, "sequences: .* got 2.0"),
    "a long head": (lambda c, k: flashkit.KVCache(2, 1, 1025, pages=1), ValueError, "dim: .* 1 to 1024, got 1025"),
    "a dtype": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, dtype="int16"), TypeError, "dtype: .* int16"),
    "latent values": (
        lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, latent=True), ValueError, "value_dim: expected 1 to 7 .*None"
    ),
    "a latent cache's v": (
        lambda c, k: flashkit.KVCache(2, 1, 8, 4, pages=1, latent=True).append(k, k), TypeError, "v: expected None"
    ),
    "a latent cache's rotary": (
        lambda c, k: flashkit.KVCache(2, 1, 8, 4, pages=1, latent=True).append(k, rotary=(k, k)), TypeError, "rotary:"
    ),
    "no v": (lambda c, k: c.append(k), TypeError, "v: expected .* got a builtins.NoneType"),
    "like": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, like=[1]), TypeError, "like: .* builtins.list"),
    "window": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, window=3), TypeError, "window: expected .* got 3"),
    "k's dtype": (lambda c, k: c.append(k.astype("f8"), k), TypeError, "k: expected dtype float32 .* got float64"),
    "v's shape": (lambda c, k: c.append(k, k[:1]), ValueError, "v: expected the shape of k"),
    "k's heads": (lambda c, k: c.append(k[:, [0, 0]], k), ValueError, r"k: .* \(T, 1, 8\) or .* got \(2, 2, 8\)"),
    "k's axes": (lambda c, k: c.append(k[0], k), ValueError, "k: expected shape"),
    "k's layout": (lambda c, k: c.append(k, k, layout="hnd"), ValueError, "layout: expected .* got 'hnd'"),
    "few tokens": (lambda c, k: c.append(k[:1], k[:1]), ValueError, "k: .* each of 2 sequences, got 1"),
    "offsets of floats": (lambda c, k: c.append(k, k, [0.0, 1.0, 2.0]), TypeError, "cu_seqlens: expected"),
    "too few offsets": (lambda c, k: c.append(k, k, [0, 2]), ValueError, r"cu_seqlens: .* got shape \(2,\)"),
    "falling offsets": (lambda c, k: c.append(k, k, [0, 3, 2]), ValueError, "cu_seqlens: expected"),
    "short offsets": (lambda c, k: c.append(k, k, [0, 1, 1]), ValueError, "cu_seqlens: expected 2 at the end"),
    "offsets that wrap": (
        lambda c, k: flashkit.KVCache(3, 1, 8, pages=4).append(k, k, [0, 2**63 - 1, -2, 2]), ValueError, "cu_seqlens"
    ),
    "offsets of a batch": (lambda c, k: c.append(k[:, :, None], k[:, :, None], [0, 1, 2]), TypeError, "expected k of"),
    "rotary": (lambda c, k: c.append(k, k, rotary=3), TypeError, "rotary: expected .* got 3"),
    "a short table": (
        lambda c, k: [c.append(k, k, rotary=flashkit.rotary_table(1, 8)) for _ in range(2)], ValueError,
        "rotary: expected tables of 2 rows .* got 1",
    ),
    "a wide table": (lambda c, k: c.append(k, k, rotary=flashkit.rotary_table(9, 16)), ValueError, "cos: .*shape"),
    "a list": (lambda c, k: c.append(k.tolist(), k), TypeError, "k: expected .* got a builtins.list"),
    "attend's lengths": (lambda c, k: c.attend(k, kv_lengths=[1, 1]), TypeError, "unexpected argument 'kv_lengths'"),
    "attend's tokens": (lambda c, k: (c.append(k, k), c.attend(k[:1])), ValueError, r"q: expected .* got \(1, 1, 8\)"),
    "attend first": (lambda c, k: c.attend(k), ValueError, "had no append"),
    "attend's layout": (lambda c, k: (c.append(k, k), c.attend(k, layout="bhnd")), ValueError, "layout: .* 'bnhd'"),
    "after a trim": (lambda c, k: (c.append(k, k), c.trim(0, 1), c.attend(k)), ValueError, "changed since"),
    "an unknown option": (lambda c, k: (c.append(k, k), c.attend(k, casual=True)), TypeError, "casual"),
    "no such sequence": (lambda c, k: c.free(2), ValueError, "i: expected a sequence from 0 to 1, got 2"),
    "a negative one": (lambda c, k: c.free(-1), ValueError, "i: .* got -1"),
    "trim too much": (lambda c, k: c.trim(0, 1), ValueError, "n: expected 0 to 0, .* got 1"),
    "fork into tokens": (lambda c, k: (c.append(k, k), c.fork(0, 1)), ValueError, "into: .* empty .* got 1 with"),
    "no empty sequence": (lambda c, k: (c.append(k, k), c.fork(0)), ValueError, "all 2 sequences have tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_that_names_it(name: str) -> None:
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        call(flashkit.KVCache(2, 1, 8, pages=4, page=2), numbers(2, 1, 8))


@pytest.mark.parametrize("pool", ["of heads", "of pages"])
def test_pages_in_a_row(pool: str) -> None:
    """Pages that follow each other in the table and in memory are read as one run, others are not."""
    shape = (2, 12, 4, 8) if pool == "of heads" else (12, 2, 4, 8)
    kept = [numbers(*shape), numbers(*shape, seed=1)]
    kept = [x.swapaxes(0, 1) for x in kept] if pool == "of heads" else kept
    pages = [x.swapaxes(1, 2) for x in kept]
    tables = [[3, 4, 5, 6], [3, 4, 6, 7], [5, 4, 3, 2], [11, 10, 11, 0], [7, 7, 8, 9], [9, 10, 11, -1]]
    for table in np.array(tables):
        for n in (1, 4, 5, 11, 12, 13, 16):
            if n > 12 and table[3] < 0:
                continue
            k, v = (np.concatenate([x[page] for page in table if page >= 0], 1)[None, :, :n] for x in kept)
            for queries in (1, 9):
                q = numbers(1, 2, queries, 8, seed=queries)
                out = flashkit.attention(q, *pages, page_table=table[None], kv_lengths=[n])
                np.testing.assert_allclose(out, flashkit.attention(q, k, v, backend="reference"), atol=1e-5)


# --- rolling back, and what an error leaves --------------------------------------------------------------------------


def outcome(call: Any, *given: Any, **options: Any) -> tuple[Any, str]:
    """The result, or what the error says."""
    try:
        return call(*given, **options), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("appends", [[36, 4], [40], [1] * 40, [30, 10]])
@pytest.mark.parametrize("rollback", [0, 2, 6])
def test_a_windowed_cache_rolls_back_what_its_margin_says(appends: list[int], rollback: int) -> None:
    """And the result is right, or the call is refused; up to the margin and within the last append it is not."""
    k, q = numbers(1, 1, 40, 8), numbers(1, 2, 8, 8, seed=1)
    for n, queries in itertools.product((0, 1, 5, 6, 12), (1, 3, 8)):
        cache = flashkit.KVCache(1, 1, 8, pages=12, page=4, window=(6, 0), rollback=rollback)
        poison(cache)
        ends = np.cumsum(appends)
        for end, tokens in zip(ends, appends, strict=True):
            cache.append(*[k[:, :, end - tokens : end]] * 2)
        promised = appends[-1] + rollback
        _, refused = outcome(cache.trim, 0, n)
        if refused:
            assert n > promised
            assert "window has dropped" in refused
            continue
        left = 40 - n
        want = flashkit.attention(q[:, :, :queries], *[k[:, :, :left]] * 2, causal=True, window=(6, 0))
        some, rows = q[:, :, :queries], q[0, :, :queries].swapaxes(0, 1)
        results = [
            outcome(cache.attend, some, causal=True),
            outcome(cache.attend, some, causal=True, q_offset=np.array([left - queries])),
            outcome(cache.attend, rows, cu_seqlens=[0, queries], causal=True),
        ]
        for found, refused in results:
            if refused:
                assert n + queries > promised
                assert "window has dropped" in refused
            else:
                np.testing.assert_allclose(found if found.ndim == 4 else found.swapaxes(0, 1)[None], want, atol=1e-5)
        assert len({bool(refused) for _, refused in results}) == 1
        narrow = cache.attend(q[:, :, :1], causal=True, window=(0, 0))
        np.testing.assert_allclose(narrow[0, 0, 0], k[0, 0, left - 1], atol=1e-6)
        cache.append(k[:, :, left : left + 1], k[:, :, left : left + 1])
        want = flashkit.attention(q[:, :, :1], *[k[:, :, : left + 1]] * 2, window=(6, 0))
        np.testing.assert_allclose(cache.attend(q[:, :, :1]), want, atol=1e-5)


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("what", ["float32", "int8", "latent", "window"])
def test_one_path_of_a_tree_is_kept(what: str, forked: bool) -> None:
    """As if nothing but the path had been appended; a sequence that shares the tree keeps another path of it."""
    options: dict[str, Any] = {"dtype": "int8"} if what == "int8" else {"latent": True} if what == "latent" else {}
    options |= {"window": (5, 0)} if what == "window" else {}

    def append(cache: Any, tokens: list[int]) -> None:
        for layer, x in zip(cache, pool, strict=True):
            v = () if what == "latent" else (x[tokens][..., :4],)
            layer.append(x[tokens], *v, cu_seqlens=[0, len(tokens), len(tokens)])

    pool, q = numbers(2, 40, 1, 8), np.concatenate([numbers(1, 2, 1, 8, seed=1)] * 2)
    paths = [13, 15, 20], [14, 15, 16, 17]
    caches = []
    for path in (None, *paths):
        cache = flashkit.KVCache(2, 1, 8, 4, pages=14, page=4, layers=2, **options)
        append(cache, list(range(13)))
        append(cache, list(range(13, 22)) if path is None else path)
        caches.append(cache)
    tree, *expected = caches
    if forked:
        tree.fork(0)
    for i, path in enumerate(paths if forked else paths[:1]):
        tree.keep(i, path)
        assert tree.lengths[i] == 13 + len(path)
        for layer, other in zip(tree, expected[i], strict=True):
            np.testing.assert_allclose(layer.attend(q)[i], other.attend(q)[0], atol=1e-5)
        check_pages(tree)
    with pytest.raises(ValueError, match="integers from 16 to 15"):  # the path is settled now
        tree.keep(0, [15])
    tree.keep(0, [], n=3)
    assert tree.lengths[0] == 13


def contents(cache: Any) -> tuple[Any, ...]:
    """Lengths, free pages, and the memory of the keys and values that the next append's queries see."""
    first = np.maximum(cache.lengths - (cache._pages.left or 100), 0)
    tokens = []
    for i, n in enumerate(cache.lengths):
        where = np.arange(first[i], n)
        at = cache.page_table[i][where // cache.page], where % cache.page
        tokens += [pool[:, at[0], :, at[1]].tolist() for pool in cache._steps.memory]
    return cache.lengths.tolist(), cache.free_pages, tokens


K, Q, TABLES = numbers(2, 2, 20, 1, 8), numbers(3, 2, 9, 8, seed=1), flashkit.rotary_table(64, 8)
OPERATIONS: dict[str, Any] = {
    "append": lambda c: [x.append(*K[l, :, :3], cu_seqlens=[0, 2, 3, 3], rotary=TABLES) for l, x in enumerate(c)],
    "one token": lambda c: [layer.append(*K[l, :, :3]) for l, layer in enumerate(c)],
    "attend": lambda c: [layer.attend(Q[:, :, :n]) for layer in c for n in ((1, 9, 1) if c.dtype == "int8" else (1,))],
    "fork": lambda c: c.fork(0), "trim": lambda c: c.trim(1, 2), "keep": lambda c: c.keep(1, [7, 8, 11]),
    "free": lambda c: c.free(1),
}  # fmt: skip


def drafted(kind: str) -> Any:
    """Two sequences that share pages, of 11 and 13 tokens, of which 4 and 6 are those of the last append."""
    options: dict[str, Any] = {
        "layers": {"layers": 2}, "int8": {"dtype": "int8"}, "cascade": {"cascade": True},
        "window": {"window": (2, 0), "pages": 8},  # the next page of a sequence is one that the window drops
    }[kind]  # fmt: skip
    cache = flashkit.KVCache(3, 1, 8, page=2, **{"pages": 24, **options})
    for pool in cache._steps.memory:
        pool[...] = 0
    for counts in ([0, 7, 7, 7], [0, 4, 10, 10]):
        for l, layer in enumerate(cache):
            layer.append(*K[l, :, : counts[-1]], counts)
        if not cache.lengths[1]:
            cache.fork(0)
    return cache


@pytest.mark.parametrize(
    ("what", "kind"),
    [(what, "layers") for what in OPERATIONS]
    + [("append", "int8"), ("attend", "int8"), ("attend", "cascade"), ("append", "window"), ("keep", "window")],
)  # fmt: skip
def test_a_signal_leaves_the_cache_as_it_was(what: str, kind: str) -> None:
    """Wherever it comes; or the call is done. It is repeated then, on the same cache."""
    operation, cache = OPERATIONS[what], drafted(kind)
    begin, memory = cache._steps.state, [pool.copy() for pool in cache._steps.memory]
    before, result = contents(cache), operation(cache)
    after = contents(cache)
    for at in itertools.count(0, 1 if what != "attend" else 131 if kind == "int8" else 37):
        cache._steps.state = begin  # a value
        for pool, x in zip(cache._steps.memory, memory, strict=True):
            pool[...] = x
        if what == "attend":
            cache = drafted(kind)  # without plans
        if not stopped(lambda cache=cache: operation(cache), at):
            break
        if missing := cache._steps.state.missing:  # a layer has appended; the others go on
            assert what in ("append", "one token") and missing != 3
            for l, layer in enumerate(cache):
                if missing >> l & 1:
                    layer.append(*K[l, :, :3], rotary=TABLES if what == "append" else None)
        found = contents(cache)
        if what == "keep" and found[0] == [11, 9, 0]:  # what keep does not move
            cache.keep(1, [7, 8])
            continue
        same = (before, after) if kind != "window" else (before[:1] + before[2:], after[:1] + after[2:])
        assert (found if kind != "window" else found[:1] + found[2:]) in same, at
        check_pages(cache)
        if found[0] == before[0]:
            again = operation(cache)
            if what == "attend":
                cases.near(again, result, atol=1e-5)
        assert contents(cache)[::2] == after[::2], at
    assert at > 10


def test_one_call_at_a_time() -> None:
    """A call during another one, of a thread or of a callback, is refused; the other one goes on."""
    cache, x = flashkit.KVCache(2, 1, 8, pages=8, page=4, layers=2), numbers(2, 1, 8)
    for layer in cache:
        layer.append(x, x)
    errors: list[str] = []

    def others() -> None:
        for call in (
            lambda: cache[0].append(x, x), lambda: cache[1].attend(x), lambda: cache.fork(0), lambda: cache.free(0),
            lambda: cache.trim(0, 1), lambda: cache.keep(0, []),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match="expected one call of a cache at a time") as caught:
                call()
            errors.append(str(caught.value).partition(":")[0])

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        others()
        thread = threading.Thread(target=others)
        thread.start()
        thread.join()
        return k >= 0

    assert np.array_equal(cache[0].attend(x, mask_mod=mask), x)
    names = ["append", "attend", "fork", "free", "trim", "keep"]
    assert errors[:12] == 2 * names and cache.lengths.tolist() == [1, 1]
    for layer in cache:
        layer.append(x, x)
    assert cache.lengths.tolist() == [2, 2]


REFUSED = {"an option": ("float32", 1, {"softcap": -1.0}), "8 bits": ("int8", 9, {}), "a head": ("float32", 1, None)}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("cascade", [False, True])
def test_what_is_not_planned_leaves_the_plans_of_others(what: str, cascade: bool) -> None:
    """Slots without a token hold what would show."""
    dtype, queries, options = REFUSED[what]
    cache = flashkit.KVCache(2, 1, 8, pages=16, page=4, dtype=dtype, cascade=cascade)
    for pool in cache._steps.memory:
        pool.view(np.uint8)[...] = 255  # NaN
    k, q = numbers(37, 1, 8), numbers(2, 2, queries, 8)
    cache.append(k, k, [0, 37, 37])
    cache.fork(0)
    before = cache.attend(q[:, :, :1])
    with suppress(ValueError):
        cache.attend(q[..., :3] if options is None else q, **(options or {}))
    assert np.isfinite(before).all() and np.array_equal(cache.attend(q[:, :, :1]), before)


def test_tokens_outside_the_pages_and_the_tables_are_dropped() -> None:
    """By the kernel, whatever the integers say that reach it: the second line of defence."""
    from flashkit.backends.cpu.rotary import Write

    memory, x = np.zeros((9, 1, 4, 8), np.float32), np.ones((1, 1, 6, 8), np.float32)
    tables = np.ones((12, 4), np.float32)
    write = Write(x.shape, x.strides, memory[3:6], (4, 4))
    places, positions = np.array([-1, 0, 5, 11, 12, -(2**62)]), np.array([0, 1, 4, 3, 0, 0])
    write(x, places, (tables[4:8], tables[4:8] * 0, positions))
    written = memory.any((1, 3))
    assert np.argwhere(written).tolist() == [[3, 0], [5, 3]]  # not place 5, whose position 4 the table lacks
    Write(x.shape, x.strides, memory[3:6])(x, places)
    assert np.argwhere(memory.any((1, 3))).tolist() == [[3, 0], [4, 1], [5, 3]]


@pytest.mark.parametrize("offsets", [[0, 1, 2], np.array([0, 1, 2], np.int32)], ids=["list", "int32"])
def test_offsets_of_one_token_each_are_the_step_without_offsets(offsets: Any) -> None:
    """By their contents, whatever array brings them: such a step takes no look at the table."""
    cache = flashkit.KVCache(2, kv_heads=1, dim=8, pages=4, page=8)
    x = np.ones((2, 1, 8), np.float32)
    for _ in range(2):
        cache.append(x, x, cu_seqlens=offsets)
        assert cache._steps.last().counts is cache._pages.one_each
    with pytest.raises(ValueError, match="cu_seqlens: expected 3 at the end"):
        cache.append(np.ones((3, 1, 8), np.float32), np.ones((3, 1, 8), np.float32), cu_seqlens=offsets)
    with pytest.raises(TypeError, match="cu_seqlens"):
        cache.append(x, x, cu_seqlens=np.array([0.0, 1.0, 2.0]))
