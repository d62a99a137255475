"""Shared-prefix decoding: attention over pages that sequences share, with and without reading them once."""

from typing import Any

import numpy as np
import pytest
from operands import numbers

import flashkit
from flashkit.cache import cascade
from flashkit.call import plans

DTYPES = ["float64", "float32", "float16", "bfloat16"]
PAGE, HEADS, DIM, VALUE_DIM = 4, 2, 16, 12


def grown(asked: bool | None, dtype: str = "float32", held: str | None = None, **more: Any) -> Any:
    """Sequences 0, 2 and 5 share 70 tokens, 1 and 4 have 45, 3 is alone, 6 empty. held: the dtype in memory."""
    held = held or dtype
    cache = flashkit.KVCache(7, HEADS, DIM, VALUE_DIM, pages=120, page=PAGE, dtype=held, cascade=asked, **more)
    cache._layers[0].k_pages[:] = cache._layers[0].v_pages[:] = np.nan
    append(cache, [70, 45, 0, 33, 0, 0, 0], 1, dtype, held)
    for i, into in ((0, 2), (1, 4), (0, 5)):
        cache.fork(i, into)
    append(cache, [21, 17, 30, 0, 19, 16, 0], 2, dtype, held)
    return cache


def append(to: Any, counts: list[int], seed: int, dtype: str = "float32", held: str = "float32") -> None:
    k, v = (numbers(sum(counts), HEADS, d, seed=seed + d, dtype=dtype).astype(held) for d in (DIM, VALUE_DIM))
    to.append(k, v, np.cumsum([0, *counts]))


@pytest.fixture
def merged(calls_of: Any) -> list[Any]:
    """The parts of each merge."""
    return calls_of(cascade, "merge")


def sequences_of(merged: list[Any]) -> list[int]:
    return [len(first[0]) for first, *_ in merged]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "scale, softcap": {"scale": 0.7, "softcap": 3.0, "causal": True},
    "bnhd": {"layout": "bnhd", "causal": True}, "no window": {"window": None}, "reference": {"backend": "reference"},
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("n", "heads"), [(1, 2), (1, 6), (3, 4), (16, 4)])
@pytest.mark.parametrize(
    ("what", "dtype"), [(x, d) for x in OPTIONS for d in (DTYPES if x in ("causal", "bnhd") else ["float32"])]
)
@np.errstate(invalid="ignore")  # -inf - -inf of a sequence without keys
def test_the_error_is_that_of_one_call(what: str, n: int, heads: int, dtype: str, merged: list[Any]) -> None:
    """At most twice, and a rounding for each part and for the result. Groups are decoded as heads and as queries."""
    options = {**OPTIONS[what], "return_lse": True}
    shape = (7, n, heads, DIM) if what == "bnhd" else (7, heads, n, DIM)

    def results(asked: bool, dtype: str, held: str) -> list[np.ndarray]:
        q = numbers(*shape, seed=5, dtype=dtype).astype(held)
        return [*grown(asked, dtype, held).attend(q, **options)]

    plain = "float32" if dtype == "float64" else dtype  # the error of float64 cannot be seen
    one_call = zip(results(False, plain, plain), results(False, plain, "float64"), strict=True)
    exact, whole = results(False, dtype, "float64"), results(False, dtype, dtype)
    assert not merged
    found = results(True, dtype, dtype)
    assert sequences_of(merged) == [3, 2]
    units = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
    seen = np.isfinite(exact[1])
    assert (np.isfinite(found[1]) == seen).all() and not seen[6].any()
    for x, y, like, calls in zip(found, exact, whole, one_call, strict=True):
        assert (x.dtype, x.shape) == (like.dtype, like.shape)
        unit = units[x.dtype.name]
        allowed = 2 * greatest(calls[0] - calls[1]) * (2.0**-29 if dtype == "float64" else 1)
        assert greatest(x - y) <= allowed + 2 * unit * greatest(y)


def greatest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max())


def near(x: Any, y: Any) -> None:
    np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


def test_results_go_to_out_and_come_in_the_order_of_the_last_append(merged: list[Any]) -> None:
    caches = [grown(asked) for asked in (True, False)]
    for cache in caches:
        append(cache, [1] * 7, 3)
    q, out = numbers(7, 4, DIM), np.full((7, 4, VALUE_DIM), np.nan, np.float32)
    found, lse = caches[0].attend(q, causal=True, return_lse=True, out=out)
    expected, expected_lse = caches[1].attend(q, causal=True, return_lse=True)
    assert found is out and merged
    near(out, expected)
    near(lse, expected_lse)
    with pytest.raises(ValueError, match=r"out: expected .* got \(7, 4, 1, 3\)"):
        caches[0].attend(q[:, :, None], out=np.empty((7, 4, 1, 3), np.float32))


ELSEWHERE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "window": ((7, 4, 1, DIM), {"window": (50, 0)}),
    "q_offset": ((7, 4, 1, DIM), {"causal": True, "q_offset": 20}),
    "alibi": ((7, 4, 1, DIM), {"alibi_slopes": np.ones(4, np.float32)}),
    "mask_mod": ((7, 4, 1, DIM), {"mask_mod": lambda b, h, q, k: k % 3 != 0}),
    "sinks": ((7, 4, 1, DIM), {"sinks": np.ones(4, np.float32)}),
    "dropout": ((7, 4, 1, DIM), {"dropout_p": 0.5, "seed": 3}),
    "17 queries": ((7, 4, 17, DIM), {"causal": True}),
    "packed": ((9, 4, DIM), {"cu_seqlens": [0, 2, 3, 4, 5, 6, 8, 9], "causal": True}),
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_other_calls_are_made_as_without(what: str, merged: list[Any]) -> None:
    shape, options = ELSEWHERE[what]
    q = numbers(*shape)
    assert np.array_equal(grown(True).attend(q, **options), grown(False).attend(q, **options))
    assert not merged


def test_a_cache_with_a_window_has_no_prefix(merged: list[Any]) -> None:
    q = numbers(7, 4, 1, DIM)
    near(grown(True, window=(80, 0)).attend(q), grown(False, window=(80, 0)).attend(q))
    assert not merged


@pytest.mark.parametrize(
    ("kept", "others", "expected"),
    [(41, 30, ([0, 2, 5], 40)), (20, 0, ([0, 2], 68)), (20, 60, ([0, 2], 68)), (53, 0, ([0, 2, 5], 36))],
)
def test_the_prefix_that_saves_most(kept: int, others: int, expected: Any, merged: list[Any]) -> None:
    """Sequence 5 keeps some tokens of the prompt, all but the last 16 in the prefix, and gets others."""
    caches = [grown(asked) for asked in (True, False)]
    for cache in caches:
        cache.trim(5, int(cache.lengths[5]) - kept)
        append(cache, [0, 0, 0, 0, 0, others, 0], 4)
    q = numbers(7, 4, 2, DIM)
    near(*(cache.attend(q, causal=True) for cache in caches))
    found = [(x.sequences.tolist(), x.tokens) for x in caches[0]._steps.cascade._prefixes]
    assert found == [expected, ([1, 4], 44)]


def test_layers_read_their_own_pages(merged: list[Any]) -> None:
    sizes: dict[str, Any] = {"pages": 40, "page": PAGE, "layers": 2}
    caches = [flashkit.KVCache(2, HEADS, DIM, VALUE_DIM, cascade=asked, **sizes) for asked in (True, False)]
    for cache in caches:
        for number, layer in enumerate(cache):
            append(layer, [40, 0], number)
        cache.fork(0)
        for number, layer in enumerate(cache):
            append(layer, [20, 25], 5 + number)
    q = numbers(2, 4, 1, DIM)
    for one, other in zip(*caches, strict=True):
        near(one.attend(q), other.attend(q))
    assert sequences_of(merged) == [2, 2]


PAYS = {"pays": (1044, 25, 1, 1), "few bytes": (1044, 24, 1, 1), "few tokens": (1039, 30, 1, 1),
        "heads of a group": (1044, 25, 2, 1), "queries": (1044, 25, 1, 2)}  # fmt: skip
"""Tokens, sequences, query heads of the one key/value head, queries."""


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("what", PAYS)
def test_where_it_pays(what: str, shared: bool, merged: list[Any]) -> None:
    """24 of 25 sequences need not read 1,024 tokens of 512 bytes, 12 MiB; the last 16 tokens are in no prefix."""
    tokens, sequences, heads, queries = PAYS[what]
    cache = flashkit.KVCache(sequences, 1, 64, pages=17 * (1 if shared else sequences))
    k = numbers(tokens * (1 if shared else sequences), 1, 64)
    cache.append(k, k, [0] + [tokens] * sequences if shared else np.arange(sequences + 1) * tokens)
    for _ in range((sequences - 1) * shared):
        cache.fork(0)
    cache.attend(numbers(sequences, heads, queries, 64))
    assert sequences_of(merged) == ([sequences] if what == "pays" and shared else [])


def test_a_flag_that_is_none() -> None:
    with pytest.raises(TypeError, match=r"cascade: expected .* got 'yes'"):
        flashkit.KVCache(1, 1, 8, pages=1, cascade="yes")


def of_prefixes(cache: Any) -> list[Any]:
    """The plans of a cache for shared pages."""
    return [planned for key, planned in plans._plans.items() if key[0] is cache._steps.cascade._owner]


def test_a_forced_backend_is_followed() -> None:
    cache, q = grown(True), numbers(7, 4, 1, DIM)
    cache.attend(q)
    with flashkit.use_backend("reference"):
        cache.attend(q)
    assert {planned.backend for planned in of_prefixes(cache)} == {"cpu", "reference"}


def test_every_prefix_has_the_backend_of_the_call() -> None:
    cache = grown(True)
    cache.attend(numbers(7, 4, 1, DIM), backend="reference")
    assert [planned.backend for planned in of_prefixes(cache)] == ["reference"] * 2
