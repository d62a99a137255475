"""KVCache and rotary on arrays of a device: the expressions in place of the CPU's kernel."""

from typing import Any

import numpy as np
import pytest
from cases import near
from operands import numbers

import flashkit

from .calls import cupy


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_that_of_numpy_arrays(device: Any, interleaved: bool) -> None:
    x = numbers(2, 3, 5, 16)
    on_device = cupy.asarray(x)
    tables = flashkit.rotary_table(30, 12, like=on_device)
    host = tuple(table.get() for table in tables)
    positions = np.array([[3, 9, 1, 0, 29], [4, 5, 6, 7, 8]])
    for function in (flashkit.rotary, flashkit.rotary_vjp):
        expected = function(x, *host, positions=positions, interleaved=interleaved)
        for where in (positions, cupy.asarray(positions)):
            found = function(on_device, *tables, positions=where, interleaved=interleaved)
            np.testing.assert_allclose(found.get(), expected, atol=1e-6)
        found = function(on_device, positions=positions, dims=12, interleaved=interleaved)
        np.testing.assert_allclose(found.get(), expected, atol=1e-6)
    far = flashkit.rotary(on_device, *tables, positions=cupy.asarray([-5, 99, 0, 1, 2]))
    near = flashkit.rotary(x, *host, positions=[0, 29, 0, 1, 2])
    np.testing.assert_allclose(far.get(), near, atol=1e-6)  # clamped


def test_a_cache_on_a_device_holds_what_one_on_the_host_does(device: Any) -> None:
    steps = [
        ("append", [0, 5, 9, 9]), ("fork", 0, 2), ("append", None), ("trim", 1, 2), ("append", [0, 0, 3, 7]),
        ("keep", 2, [7, 9]),
    ]  # fmt: skip
    sizes: dict[str, Any] = {"pages": 20, "page": 4, "layers": 2}
    caches = [flashkit.KVCache(3, 2, 8, 6, **sizes), flashkit.KVCache(3, 2, 8, 6, like=cupy.empty(0, "f4"), **sizes)]
    tables = flashkit.rotary_table(50, 8), flashkit.rotary_table(50, 8, like=cupy.empty(0))
    given = []
    for number, (what, *arguments) in enumerate(steps):
        for cache, rotary, xp in zip(caches, tables, (np, cupy), strict=True):
            if what != "append":
                getattr(cache, what)(*arguments)
                continue
            tokens = 3 if arguments[0] is None else arguments[0][-1]
            for layer in cache:
                k, v = (xp.asarray(numbers(tokens, 2, d, seed=9 * number + layer.number + d)) for d in (8, 6))
                layer.append(k, v, *arguments, rotary=rotary)
        host, there = caches
        given.append(there.lengths)
        assert np.array_equal(host.lengths, there.lengths.get())
        assert np.array_equal(host.page_table, there.page_table.get())
        for layer, other in zip(host, there, strict=True):
            for i in range(3):
                where = np.arange(host.lengths[i])
                at = host.page_table[i][where // 4], where % 4
                np.testing.assert_allclose(other.k_pages.get()[at], layer.k_pages[at], atol=1e-6)
                assert np.array_equal(other.v_pages.get()[at], layer.v_pages[at])
    assert all(array is given[0] for array in given)  # a captured graph reads the same array


@pytest.mark.slow
def test_a_prefix_on_a_device_is_read_once(device: Any) -> None:
    """On request: two sequences that share 32 tokens, and one of its own."""
    sizes: dict[str, Any] = {"pages": 20, "page": 8}
    results = []
    for xp, asked in ((np, False), (cupy, True)):
        cache = flashkit.KVCache(3, 1, 8, like=xp.empty(0, "f4"), cascade=asked, **sizes)
        for counts, seed in (([0, 40, 40, 60], 1), ([0, 10, 22, 31], 2)):
            k, v = (xp.asarray(numbers(counts[-1], 1, 8, seed=seed + x)) for x in (0, 5))
            cache.append(k, v, counts)
            if seed == 1:
                cache.fork(0)
        results.append(cache.attend(xp.asarray(numbers(3, 2, 2, 8)), causal=True, return_lse=True))
    assert [(x.sequences.tolist(), x.tokens) for x in cache._steps.cascade._prefixes] == [([0, 1], 32)]
    near(*results, atol=2e-3)  # TF32


def test_a_planned_call_takes_lengths(device: Any) -> None:
    """Lengths on the host and on the device, where they are not read."""
    q, k, v = numbers(2, 2, 1, 8), numbers(2, 1, 20, 8, seed=1), numbers(2, 1, 20, 8, seed=2)
    given = [cupy.asarray(x) for x in (q, k, v)]
    call = flashkit.plan(*given, kv_lengths=[20, 20], window=(6, 0), backend="cupy_raw")
    for lengths in (np.array([3, 20]), cupy.asarray([20, 9], "i4")):
        on_host = lengths if isinstance(lengths, np.ndarray) else lengths.get()
        expected = flashkit.attention(q, k, v, kv_lengths=on_host.copy(), window=(6, 0), backend="reference")
        np.testing.assert_allclose(call(*given, kv_lengths=lengths).get(), expected, atol=1e-5)
    with pytest.raises(ValueError, match=r"kv_lengths: expected .* got values from 3 to 21"):
        call(*given, kv_lengths=[3, 21])
