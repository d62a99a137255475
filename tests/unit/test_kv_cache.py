"""KVCache against a list of arrays: random traces, sharing, windows, layers, and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit.cache import step_plans
from flashkit.cache.pages import PageTable
from flashkit.call.planned import Planned

DTYPES = ("float64", "float32", "float16", "bfloat16")


def numbers(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    import ml_dtypes  # noqa: F401  # makes bfloat16 a dtype

    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


class Lists:
    """The same sequences as lists of tokens, and pages by the definition."""

    def __init__(self, sequences: int) -> None:
        self.k: list[list[np.ndarray]] = [[] for _ in range(sequences)]
        self.v: list[list[np.ndarray]] = [[] for _ in range(sequences)]


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
    assert (state._references[used] == times).all() and state._references.sum() == times.sum()
    assert sorted([*state._free, *used.tolist()]) == list(range(len(state._references)))
    held = (table >= 0).sum(1)
    assert (held == -(-cache.lengths // cache.page) - state.first).all()


def trace(steps: int, seed: int, window: int | None, page: int, pages: int) -> dict[str, int]:
    """Random appends, forks, trims and frees; returns how often each was done."""
    rng = np.random.default_rng(seed)
    sequences, heads, dim, value_dim, layers = 5, 2, 4, 3, 2
    cache = flashkit.KVCache(
        sequences, heads, dim, value_dim, pages=pages, page=page, layers=layers, dtype="float32",
        window=None if window is None else (window, 0),
    )  # fmt: skip
    poison(cache)
    lists, done = Lists(sequences), dict.fromkeys(("append", "fork", "trim", "free", "full", "gone"), 0)
    for _ in range(steps):
        what = rng.choice(["append", "append", "append", "fork", "trim", "free"])
        i = int(rng.integers(sequences))
        lengths = cache.lengths
        if what == "append":
            counts = rng.integers(0, 2 * page + 2, sequences) * (rng.random(sequences) < 0.4)
            if rng.random() < 0.5:
                counts = np.ones(sequences, np.int64)
            tokens = int(counts.sum())
            k, v = (
                rng.standard_normal((layers, tokens, heads, dim)),
                rng.standard_normal((layers, tokens, heads, value_dim)),
            )
            k, v = k.astype(np.float32), v.astype(np.float32)
            offsets = np.concatenate([[0], np.cumsum(counts)])
            before = cache.page_table.copy(), cache.lengths, cache.free_pages
            try:
                cache[0].append(k[0], v[0], offsets)
            except flashkit.OutOfPagesError:
                assert (cache.page_table == before[0]).all() and (cache.lengths == before[1]).all()
                assert cache.free_pages == before[2]
                done["full"] += 1
                cache.free(i)
                lists.k[i], lists.v[i] = [], []
                continue
            cache[1].append(k[1], v[1])
            for j in range(sequences):
                lists.k[j].extend(k[:, offsets[j] : offsets[j + 1]].swapaxes(0, 1))
                lists.v[j].extend(v[:, offsets[j] : offsets[j + 1]].swapaxes(0, 1))
        elif what == "fork":
            if lengths.all():
                continue
            into = cache.fork(i)
            lists.k[into], lists.v[into] = list(lists.k[i]), list(lists.v[i])
        elif what == "trim":
            n, refused = int(rng.integers(lengths[i] + 1)), ""
            try:
                cache.trim(i, n)
            except ValueError as error:
                refused = str(error)
            if refused:
                assert window is not None and "window has dropped" in refused
                done["gone"] += 1
                continue
            del lists.k[i][lengths[i] - n :], lists.v[i][lengths[i] - n :]
        else:
            cache.free(i)
            lists.k[i], lists.v[i] = [], []
        done[what] += 1
        assert cache.lengths.tolist() == [len(x) for x in lists.k]
        check_pages(cache)
        for j, layer in itertools.product(range(sequences), range(layers)):
            first = 0 if window is None else max(0, len(lists.k[j]) - window)
            for found, expected in zip(stored(cache, j, first, layer), (lists.k[j], lists.v[j]), strict=True):
                assert np.array_equal(found, np.array([x[layer] for x in expected[first:]]).reshape(found.shape))
    return done


@pytest.mark.parametrize(("window", "page", "pages"), [(None, 4, 24), (None, 1, 30), (7, 4, 14), (0, 3, 8)])
def test_random_traces_equal_lists(window: int | None, page: int, pages: int) -> None:
    done = trace(600, 1, window, page, pages)
    assert min(done[what] for what in ("append", "fork", "trim", "free", "full")) >= 10
    assert done["gone"] or window is None


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("window", "page", "pages"), [(None, 4, 24), (None, 16, 24), (9, 4, 14)])
def test_long_random_traces_equal_lists(window: int | None, page: int, pages: int) -> None:
    done = trace(10_000, 2, window, page, pages)
    assert min(done[what] for what in ("append", "fork", "trim", "free", "full")) >= 100


# Attention


def expected(q: np.ndarray, k: Any, v: Any, **options: Any) -> Any:
    """One sequence: q (N, Hq, D), k and v (length, Hkv, D)."""
    return flashkit.attention(*(np.ascontiguousarray(np.asarray(x).swapaxes(0, 1)) for x in (q, k, v)), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page", [1, 4, 64])
def test_attention_through_pages_is_attention(dtype: str, page: int) -> None:
    cache = flashkit.KVCache(3, 2, 16, 8, pages=200 // page, page=page, dtype=dtype)
    poison(cache)
    counts = [[5, 0, 17], [1, 1, 1], [3, 2, 1], [2, 2, 2], [0, 1, 0]]
    k, v = (numbers(3, 40, 2, d, seed=s, dtype=dtype) for d, s in ((16, 1), (8, 2)))
    lengths = np.zeros(3, int)
    eps = float(np.finfo("float32").eps) if dtype != "float64" else 1e-15
    tolerance = {"float16": 1e-3, "bfloat16": 1e-2}.get(dtype, 64 * eps)
    for step, new in enumerate(counts):
        spans = [slice(a, a + n) for a, n in zip(lengths, new, strict=True)]
        q = numbers(sum(new), 6, 16, seed=10 + step, dtype=dtype)
        offsets = np.concatenate([[0], np.cumsum(new)])
        packed = [np.concatenate([x[i, span] for i, span in enumerate(spans)]) for x in (k, v)]
        cache.append(*packed, cu_seqlens=offsets)
        lengths += new
        out, lse = cache.attend(q, causal=True, return_lse=True)
        assert out.shape == (sum(new), 6, 8) and lse.shape == (6, sum(new)) and out.dtype == k.dtype
        for i in range(3):
            if new[i]:
                mine = slice(offsets[i], offsets[i + 1])
                o, l = expected(q[mine], k[i, : lengths[i]], v[i, : lengths[i]], causal=True, return_lse=True)
                np.testing.assert_allclose(out[mine].swapaxes(0, 1).astype("f8"), o.astype("f8"), atol=tolerance)
                np.testing.assert_allclose(lse[:, mine], l, atol=10 * tolerance)


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
    cache = flashkit.KVCache(1, 2, 16, pages=4, page=4, window=(9, 0))  # 11 tokens, wherever a page begins
    sinks = np.zeros(4, np.float32)
    k, v, q = numbers(200, 2, 16, seed=1), numbers(200, 2, 16, seed=2), numbers(200, 4, 16, seed=3)
    for i in range(0, 200, 2):
        cache.append(k[i : i + 2], v[i : i + 2], cu_seqlens=[0, 2])
        out = cache.attend(q[i : i + 2], causal=True)
        o = expected(q[i : i + 2], k[: i + 2], v[: i + 2], causal=True, window=(9, 0))
        np.testing.assert_allclose(out.swapaxes(0, 1), o, atol=1e-5)
        out = cache.attend(q[i : i + 2], causal=True, sinks=sinks)  # a call that is not planned
        o = expected(q[i : i + 2], k[: i + 2], v[: i + 2], causal=True, window=(9, 0), sinks=sinks)
        np.testing.assert_allclose(out.swapaxes(0, 1), o, atol=1e-5)
        narrower = cache.attend(q[i : i + 2], causal=True, window=(3, 0))
        o = expected(q[i : i + 2], k[: i + 2], v[: i + 2], causal=True, window=(3, 0))
        np.testing.assert_allclose(narrower.swapaxes(0, 1), o, atol=1e-5)
    with pytest.raises(ValueError, match=r"window is \(10, 0\)"):
        cache.attend(q[:2], window=(10, 0))
    with pytest.raises(ValueError, match=r"window is \(None, 0\)"):
        cache.attend(q[:2], window=(None, 0))
    cache.trim(0, 2)  # the last append can be taken back
    cache.append(k[198:], v[198:], cu_seqlens=[0, 2])
    out = cache.attend(q[198:], causal=True)
    np.testing.assert_allclose(out.swapaxes(0, 1), expected(q[198:], k, v, causal=True, window=(9, 0)), atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_fused_into_append_and_attend(interleaved: bool, dtype: str) -> None:
    cos_sin = flashkit.rotary_table(64, 12)
    cache = flashkit.KVCache(2, 2, 16, pages=20, page=4, dtype=dtype)
    rows = np.arange(64)
    for new, offsets in ((7, [0, 5, 7]), (2, None), (4, [0, 1, 4])):
        before = cache.lengths
        k, v, q = (numbers(new, h, 16, seed=new + h, dtype=dtype) for h in (2, 2, 6))
        cache.append(k, v, offsets, rotary=cos_sin, rotary_interleaved=interleaved)
        counts = np.diff(offsets if offsets is not None else np.arange(3))
        where = np.concatenate([rows[a : a + n] for a, n in zip(before, counts, strict=True)])
        assert cache.positions.tolist() == where.tolist()
        options: dict[str, Any] = {"positions": where, "interleaved": interleaved, "layout": "bnhd"}
        turned = flashkit.rotary(k, *cos_sin, **options)
        ends = np.concatenate([[0], np.cumsum(counts)])
        for i in range(2):
            kept_k, kept_v = (x[before[i] :] for x in stored(cache, i))
            assert np.array_equal(kept_k, turned[ends[i] : ends[i + 1]])
            assert np.array_equal(kept_v, v[ends[i] : ends[i + 1]])
        out = cache.attend(q, causal=True, rotary=cos_sin, rotary_interleaved=interleaved)
        assert np.array_equal(out, cache.attend(flashkit.rotary(q, *cos_sin, **options), causal=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_call_has_the_tables_that_it_gives(dtype: str) -> None:
    """Checked tables are kept by a layer; other tables, another order of pairs and new contents are not mistaken."""
    cache = flashkit.KVCache(1, 1, 8, pages=10, page=4)
    k, (one, other) = numbers(1, 1, 8), (flashkit.rotary_table(20, 8, base=base, dtype=dtype) for base in (10.0, 99.0))
    for position, (tables, interleaved) in enumerate(
        [(one, False), (one, False), (other, False), (other, True), (one, True), (one, False)]
    ):
        cache.append(k, k, rotary=tables, rotary_interleaved=interleaved)
        expected = flashkit.rotary(k, *tables, positions=[position], interleaved=interleaved, layout="bnhd")
        assert np.array_equal(stored(cache, 0)[0][position:], expected)
    one[0][:] = 0
    cache.append(k, k, rotary=one)
    assert np.array_equal(stored(cache, 0)[0][6:], flashkit.rotary(k, *one, positions=[6], layout="bnhd"))


def test_steps_of_decoding_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is made for a power of two of keys, not for each step; its results follow the lengths."""
    made = []
    monkeypatch.setattr(step_plans, "Planned", lambda *given: made.append(0) or Planned(*given))
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


def test_rotary_turns_queries_of_batches() -> None:
    cos_sin = flashkit.rotary_table(64, 16)
    cache = flashkit.KVCache(2, 2, 16, pages=20, page=4)
    k, q = numbers(2, 2, 3, 16), numbers(2, 4, 3, 16, seed=1)
    cache.append(k, k, rotary=cos_sin)
    cache.append(k, k, rotary=cos_sin)
    turned = flashkit.rotary(q, *cos_sin, positions=[3, 4, 5])
    assert np.array_equal(cache.attend(q, rotary=cos_sin), cache.attend(turned))
    other = cache.attend(q.swapaxes(1, 2), rotary=cos_sin, layout="bnhd")
    np.testing.assert_allclose(other.swapaxes(1, 2), cache.attend(turned), atol=1e-6)
    with pytest.raises(ValueError, match="last append"):
        cache.attend(q[:, :, :2], rotary=cos_sin)


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
    with pytest.raises(ValueError, match=r"appends \[2, 0\] tokens .* \[1, 1\]"):
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
    cache = flashkit.KVCache(1, 1, 8, pages=3, page=4)
    before = cache.lengths
    cache.append(numbers(1, 1, 8), numbers(1, 1, 8))
    assert before.tolist() == [0] and cache.lengths.tolist() == [1]
    for array in (cache.lengths, cache.page_table):
        with pytest.raises(ValueError):
            array[0] = 7


def test_the_table_of_pages_grows_with_the_longest_sequence() -> None:
    cache = flashkit.KVCache(2, 1, 8, pages=100, page=1)
    k = numbers(70, 1, 8)
    cache.append(k[:3], k[:3], cu_seqlens=[0, 3, 3])
    assert cache.page_table.shape == (2, 8)
    cache.append(k, k, cu_seqlens=[0, 0, 70])
    assert cache.page_table.shape == (2, 128)
    assert np.array_equal(stored(cache, 1)[0], k) and np.array_equal(stored(cache, 0)[0], k[:3])


def test_pages_go_back_and_are_used_again() -> None:
    table = PageTable(2, 4, 2, None)
    table.append(np.array([5, 0]))
    table.append(np.array([0, 2]))
    assert table.free_pages == 0
    table.trim(0, 3)
    assert table.free_pages == 2
    table.append(np.array([0, 3]))
    assert table.free_pages == 0 and table.lengths.tolist() == [2, 5]


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "no pages": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=0), ValueError, "pages is 0"),
    "a float": (lambda c, k: flashkit.KVCache(2.0, 1, 8, pages=1), TypeError, "sequences is 2.0"),
    "a long head": (lambda c, k: flashkit.KVCache(2, 1, 1025, pages=1), ValueError, "dim is 1025"),
    "a dtype": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, dtype="int16"), TypeError, "dtype has dtype int16"),
    "latent values": (
        lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, latent=True), ValueError, "value_dim is None with latent=True"
    ),
    "a latent cache's v": (
        lambda c, k: flashkit.KVCache(2, 1, 8, 4, pages=1, latent=True).append(k, k), TypeError, "v is given"
    ),
    "a latent cache's rotary": (
        lambda c, k: flashkit.KVCache(2, 1, 8, 4, pages=1, latent=True).append(k, rotary=(k, k)), TypeError, "rotary is"
    ),
    "no v": (lambda c, k: c.append(k), TypeError, "v is a builtins.NoneType"),
    "like": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, like=[1]), TypeError, "like is a builtins.list"),
    "window": (lambda c, k: flashkit.KVCache(2, 1, 8, pages=1, window=3), TypeError, "window is 3"),
    "k's dtype": (lambda c, k: c.append(k.astype("f8"), k), TypeError, "k has dtype float64"),
    "v's shape": (lambda c, k: c.append(k, k[:1]), ValueError, "v has shape"),
    "k's heads": (lambda c, k: c.append(k[:, [0, 0]], k), ValueError, r"k has shape \(2, 2, 8\); \(T, 1, 8\) or"),
    "k's axes": (lambda c, k: c.append(k[0], k), ValueError, "k has shape"),
    "k's layout": (lambda c, k: c.append(k, k, layout="hnd"), ValueError, "layout is 'hnd'"),
    "few tokens": (lambda c, k: c.append(k[:1], k[:1]), ValueError, "k has 1 tokens for 2 sequences"),
    "offsets of floats": (lambda c, k: c.append(k, k, [0.0, 1.0, 2.0]), TypeError, "cu_seqlens is"),
    "too few offsets": (lambda c, k: c.append(k, k, [0, 2]), ValueError, r"cu_seqlens has shape \(2,\)"),
    "falling offsets": (lambda c, k: c.append(k, k, [0, 3, 2]), ValueError, "cu_seqlens is"),
    "short offsets": (lambda c, k: c.append(k, k, [0, 1, 1]), ValueError, "cu_seqlens is"),
    "offsets of a batch": (lambda c, k: c.append(k[:, :, None], k[:, :, None], [0, 1, 2]), TypeError, "for k of"),
    "rotary": (lambda c, k: c.append(k, k, rotary=3), TypeError, "rotary is 3"),
    "a short table": (
        lambda c, k: [c.append(k, k, rotary=flashkit.rotary_table(1, 8)) for _ in range(2)], ValueError, "has 1 rows"
    ),
    "a wide table": (lambda c, k: c.append(k, k, rotary=flashkit.rotary_table(9, 16)), ValueError, "cos has shape"),
    "a list": (lambda c, k: c.append(k.tolist(), k), TypeError, "k is a builtins.list"),
    "attend's lengths": (lambda c, k: c.attend(k, kv_lengths=[1, 1]), TypeError, "attend takes no kv_lengths"),
    "attend's tokens": (lambda c, k: (c.append(k, k), c.attend(k[:1])), ValueError, r"q has shape \(1, 1, 8\)"),
    "attend first": (lambda c, k: c.attend(k), ValueError, "had no append"),
    "attend's layout": (lambda c, k: (c.append(k, k), c.attend(k, layout="bhnd")), ValueError, "layout is 'bhnd'"),
    "after a trim": (lambda c, k: (c.append(k, k), c.trim(0, 1), c.attend(k)), ValueError, "changed since"),
    "an unknown option": (lambda c, k: (c.append(k, k), c.attend(k, casual=True)), TypeError, "casual"),
    "no such sequence": (lambda c, k: c.free(2), ValueError, "i is 2; a sequence from 0 to 1 fits"),
    "a negative one": (lambda c, k: c.free(-1), ValueError, "i is -1"),
    "trim too much": (lambda c, k: c.trim(0, 1), ValueError, "n is 1; 0 to 0"),
    "fork into tokens": (lambda c, k: (c.append(k, k), c.fork(0, 1)), ValueError, "into is 1, a sequence with"),
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


def test_cheap_steps_are_steps() -> None:
    """Steps of one token each that need no page, between any others, are as in a cache that knows no cheap ones."""
    rng = np.random.default_rng(0)
    cheap, other = (flashkit.KVCache(3, 1, 4, pages=60, page=4) for _ in range(2))
    for _ in range(300):
        i, n = int(rng.integers(3)), int(rng.integers(3))
        what = rng.choice(["append", "some", "trim", "free", "fork"], p=[0.8, 0.1, 0.04, 0.02, 0.04])
        for cache in (cheap, other):
            lengths = cache.lengths
            if what == "append" and lengths.max() < 60:
                k = numbers(3, 1, 4, seed=int(lengths.sum()))
                cache.append(k, k, [0, 1, 2, 3] if cache is other else None)
            elif what == "some" and lengths.max() < 60:
                k = numbers(1, 1, 4)
                cache.append(k, k, np.cumsum([0, *(np.arange(3) == i)]))
            elif what == "trim":
                cache.trim(i, min(n, int(lengths[i])))
            elif what == "free" or (what == "fork" and i != n):
                cache.free(i)
                if what == "fork":
                    cache.fork(n, i)
        assert np.array_equal(cheap.lengths, other.lengths) and np.array_equal(cheap.page_table, other.page_table)
        for b in range(3):
            for x, y in zip(stored(cheap, b), stored(other, b), strict=True):
                assert np.array_equal(x, y)
