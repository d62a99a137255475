"""Latent attention by Hopper's kernel: values that are the first columns of the keys. Against the definition in float64;
the error is at most twice that of the plain computation in the same precision, and a rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cases
import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import reference
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.backends.cupy_raw import sm90_mla
from flashkit.call.arguments import prepare

if TYPE_CHECKING:
    from .device import Device

KERNEL, COMBINE = "sm90_mla_forward", "combine"
BF16, FP16 = ml_dtypes.bfloat16, np.float16

slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def only_sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(cuda_backend.VARIABLE, "sm90")
    yield


def inputs(
    batch: int, heads: str, n_q: int, n_k: int, dim: int, dtype: Any = BF16, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """q and k. Tokens differ in size, so that another one's place shows; scores are of order one."""
    h, h_kv = map(int, heads.split(":"))
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((batch, h, n_q, dim)), rng.standard_normal((batch, h_kv, n_k, dim))
    k *= 2 ** rng.uniform(-1, 1, (batch, h_kv, n_k, 1))
    return q.astype(dtype), k.astype(dtype)


def expected(q: np.ndarray, k: np.ndarray, dim_v: int, **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """For the output and the log-sum-exp: exact values, and how far results may be from them."""
    problem, operands, _ = prepare(q, k, k[..., :dim_v], **options)
    exact = reference.standard(problem.spec, operands)
    plain = reference.standard(problem.spec, operands, np.dtype(q.dtype))
    found = []
    for right, other, unit in zip(exact, plain, (cases.epsilon(q.dtype.name), 2.0**-20), strict=True):
        right, other = right.astype(np.float64), other.astype(np.float64)
        finite = np.isfinite(right)
        error = np.abs(np.where(finite, other - np.where(finite, right, 0), 0)).max(initial=0)
        found.append((right, 2 * error + unit * (1 + np.abs(np.where(finite, right, 0)))))
    return found


def assert_close(results: list[Any], right: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for got, (exact, allowed) in zip(results, right, strict=True):
        got = got.get().astype(np.float64)
        assert got.shape == exact.shape
        same = (got == exact) | (np.isnan(got) & np.isnan(exact))
        with np.errstate(invalid="ignore"):
            assert (same | (np.abs(got - exact) <= allowed)).all()


def call(q: np.ndarray, k: Any, dim_v: int, **options: Any) -> list[Any]:
    """Output, into memory that is NaN, and log-sum-exp on the device. k: there, or in host memory."""
    import cupy

    k = cupy.asarray(k) if isinstance(k, np.ndarray) else k
    on = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out = cupy.asarray(np.full((*q.shape[:-1], dim_v), np.nan).astype(q.dtype))
    found = flashkit.attention(
        cupy.asarray(q), k, k[..., :dim_v], out=out, return_lse=True, backend="cupy_raw", **on
    )  # fmt: skip
    assert found[0] is out
    return list(found)


def check(q: np.ndarray, k: np.ndarray, dim_v: int, **options: Any) -> None:
    assert_close(call(q, k, dim_v, **options), expected(q, k, dim_v, **options))


def splits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(sm90_mla, "number_of_splits", lambda work_tiles, key_tiles, sms: min(count, key_tiles))


def paged(k: np.ndarray, lengths: np.ndarray, page: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The keys in pages in any order, and their table. Other pages and what lies behind a sequence are NaN; the table
    names pages that do not exist there.
    """
    batch, heads, n_k, dim = k.shape
    width = -(-n_k // page)
    rng, count = np.random.default_rng(seed), batch * width + 3
    pages = np.full((count, page, heads, dim), np.nan).astype(k.dtype)
    table, order = np.full((batch, width), count + 5, np.int32), rng.permutation(count)
    for b, n in enumerate(lengths):
        for i in range(-(-int(n) // page)):
            table[b, i] = at = order[b * width + i]
            own = k[b, :, i * page : min((i + 1) * page, int(n))].swapaxes(0, 1)
            pages[at, : len(own)] = own
    return pages, table


@pytest.mark.parametrize(
    ("heads", "n_q", "n_k", "dims", "dtype"),
    [
        ("16:1", 1, 200, (576, 512), BF16),
        ("20:1", 3, 65, (320, 256), FP16),
        pytest.param("128:1", 1, 63, (576, 512), FP16, marks=slow),
        pytest.param("128:1", 2, 1, (576, 512), BF16, marks=slow),
        pytest.param("2:2", 70, 130, (264, 8), BF16, marks=slow),
        pytest.param("6:2", 9, 300, (392, 328), FP16, marks=slow),
    ],
)
def test_dense(
    heads: str, n_q: int, n_k: int, dims: tuple[int, int], dtype: Any, device: Device, launched: list[str]
) -> None:
    check(*inputs(2, heads, n_q, n_k, dims[0], dtype), dims[1], scale=dims[0] ** -0.5)
    assert set(launched) <= {KERNEL, COMBINE} and KERNEL in launched
