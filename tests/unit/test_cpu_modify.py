"""Generated functions of the CPU backend: what a mask loads from arrays, and the bounds that classify its tiles."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import near

import flashkit
from flashkit import mods

N = 100  # several tiles, and more queries than are decoded


def assert_shows(mask_mod: Callable[..., Any], shown: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, N, 8)).astype(np.float32)
    got = flashkit.attention(q, k, v, mask_mod=mask_mod, return_lse=True, backend="cpu")
    near(got, flashkit.attention(q, k, v, mask=shown, return_lse=True, backend="reference"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rest", [True, False])
def test_a_leading_index_moves_along_the_keys(rest: bool) -> None:
    """The array's tiles cannot be transposed ahead, and bounds take in all of its first axis."""
    array = np.full((2, N, N), rest)
    array[0] = np.random.default_rng(1).random((N, N)) < 0.5
    of_key = np.arange(N) % 2
    shown = np.where(of_key == 0, array[0], array[1])
    assert_shows(mods.mask(lambda b, h, q, k, *, a: a[k % 2, q, k], a=array), shown)


@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("odd", [0, N - 1])
@pytest.mark.parametrize("step", [1, 3])
def test_one_key_unlike_all_others(step: int, odd: int, rest: bool) -> None:
    """At either end of the range whose bounds are taken, in contiguous memory or with gaps."""
    array = np.full(N * step, rest)[::step]
    array[odd] = not rest
    assert_shows(mods.mask(lambda b, h, q, k, *, a: a[k], a=array), np.broadcast_to(array, (N, N)))


def test_unsigned_numbers_that_no_float_tells_apart() -> None:
    ids = np.uint64(2**60) + np.arange(N, dtype=np.uint64) % np.uint64(3)
    assert_shows(mods.mask(lambda b, h, q, k, *, ids: ids[q] == ids[k], ids=ids), ids[:, None] == ids)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("queries", [2, 16])
def test_a_broadcast_bias_of_16_bits_is_widened_once(queries: int, dtype: type) -> None:
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((2, 4, n, 8), dtype=np.float32) for n in (queries, 2000))
    row = rng.standard_normal((4, 1, 2000)).astype(dtype)
    bias = np.broadcast_to(row, (2, 4, queries, 2000))
    want = flashkit.attention(q, k, k, bias=row.astype(np.float32))
    flashkit.attention(q, k, k, bias=bias)
    tracemalloc.start()
    try:
        out = flashkit.attention(q, k, k, bias=bias)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.array_equal(out, want) and peak < 2 * 4 * row.size
