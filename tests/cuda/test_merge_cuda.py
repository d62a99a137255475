"""merge on a device: CuPy's own arithmetic, bfloat16 included."""

from __future__ import annotations

import cases
import numpy as np
import pytest

import flashkit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_parts_merge_as_numpys_do(dtype: str, layout: str) -> None:
    cases.skip_unless("cupy_raw")
    import cupy
    import ml_dtypes  # noqa: F401  gives NumPy its bfloat16

    rng = np.random.default_rng(0)
    outs = rng.standard_normal((3, 2, 6, 6, 16)).astype(dtype)
    lses = rng.standard_normal((3, 2, 6, 6)).astype("float64" if dtype == "float64" else "float32")
    lses[:2, :, 3, 1] = -np.inf
    rows = outs.swapaxes(2, 3) if layout == "bnhd" else outs  # a view with a row for each number of lses
    rows[0, :, 3, 1] = np.nan
    expected, expected_lse = flashkit.merge(*zip(outs, lses), layout=layout)
    found, lse = flashkit.merge(*zip(map(cupy.asarray, outs), map(cupy.asarray, lses)), layout=layout)
    assert (found.dtype, lse.dtype) == (expected.dtype, expected_lse.dtype)
    assert np.isfinite(expected.astype("float64")).all()
    eps = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(found.get().astype("float64"), expected.astype("float64"), rtol=16 * eps, atol=eps)
    np.testing.assert_allclose(lse.get(), expected_lse, rtol=1e-6, atol=1e-6)
