"""flashkit.dask on chunks of CuPy."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import mods

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "kv_lengths": [17, 60], "q_offset": [0, 10]},
        {"score_mod": lambda s, b, h, q, k: s + 0.1 * b - 0.2 * h, "mask_mod": mods.document(np.arange(70) // 25)},
    ],
    ids=["lengths", "functions"],
)
def test_chunks_on_a_device_make_the_whole(options: dict[str, Any]) -> None:
    da = pytest.importorskip("dask.array", reason="the extra `dask`")
    cases.skip_unless("cupy_raw")
    import cupy

    from flashkit.dask import attention

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, heads, n, 16), np.float32) for heads, n in ((4, 50), (2, 70), (2, 70)))
    slopes, bias = rng.random((2, 4), np.float32), rng.standard_normal((4, 1, 70), np.float32)
    given = [
        da.from_array(cupy.asarray(x), chunks=(1, 2, size, 16), asarray=False, name=False)
        for x, size in ((q, 30), (k, 40), (v, 40))
    ]
    found = attention(*given, alibi_slopes=cupy.asarray(slopes), bias=cupy.asarray(bias), return_lse=True, **options)
    expected = flashkit.attention(q, k, v, alibi_slopes=slopes, bias=bias, return_lse=True, **options)
    for got, wanted in zip(found, expected, strict=True):
        got = got.compute(scheduler="sync")
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_allclose(got.get(), wanted, rtol=1e-4, atol=1e-5)
