"""Statistics and tangents of the CUDA backends' kernels, on the emulated device, against the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.call.arguments import prepare
from flashkit.reference import standard_jvp, statistics
from flashkit.spec import Tangents

from .calls import generations

if TYPE_CHECKING:
    from .device import Device

TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}

OPTIONS: dict[str, dict[str, Any]] = {
    "causal, sinks": {"causal": True, "sinks": np.float32([0.5, -1.0, 2.0, 0.0])},
    "modifications": {"softcap": 2.0, "mask": np.random.default_rng(0).random((70, 90)) < 0.6},
    "packed": {"cu_seqlens": (np.array([0, 30, 30, 110]), np.array([0, 50, 60, 160])), "causal": True},
}

KERNELS = [
    pytest.param(
        backend, generation, dtype, name,
        marks=pytest.mark.slow if backend == "numba_cuda" or name == "packed" or generation == "simt" else [],
    )
    for backend, generation, dtype in (
        ("cupy_raw", "sm90", "bfloat16"), ("cupy_raw", "sm80", "bfloat16"), ("cupy_raw", "simt", "float32"),
        ("numba_cuda", "simt", "float32"),
    )
    for name in OPTIONS
]  # fmt: skip


@pytest.fixture
def generation() -> str:
    """Tests are parametrized with it."""
    return ""


@pytest.fixture(autouse=True)
def forced(generation: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The generation is the only one that the backend may plan with, and the test has launched its kernels."""
    monkeypatch.setenv(cuda_backend.VARIABLE, generation)
    yield
    assert generation in generations(launched)


def call_of(name: str, dtype: str) -> tuple[list[np.ndarray], list[np.ndarray], dict[str, Any], list[Any], Any]:
    """q, k and v, as many tangents, and the options, of NumPy; the first six and the options on the device."""
    import cupy

    rng, packed = np.random.default_rng(0), name == "packed"
    shapes = ((120, 4, 32), (170, 2, 32), (170, 2, 16)) if packed else ((1, 4, 70, 32), (1, 2, 90, 32), (1, 2, 90, 16))
    six = [rng.standard_normal(shape).astype(cases.numpy_dtype(dtype)) for shape in shapes * 2]
    options = OPTIONS[name]
    on_device = {
        n: cupy.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "fb" else x for n, x in options.items()
    }
    return six[:3], six[3:], options, [cupy.asarray(x) for x in six], on_device


def near(got: Any, expected: np.ndarray, dtype: str) -> None:
    got = cases.to_numpy(got).astype(np.float64)
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("backend", "generation", "dtype", "name"), KERNELS)
def test_statistics(backend: str, generation: str, dtype: str, name: str, device: Device) -> None:
    tensors, _, options, own, on_device = call_of(name, dtype)
    _, found = flashkit.attention(
        *own[:3], return_stats=("entropy", "max_logit", "key_weight"), backend=backend, **on_device
    )
    problem, operands, _ = prepare(*tensors, **options)
    expected = statistics(problem.spec, operands)
    for statistic, x in found.items():
        near(x, expected[statistic], "float32")  # scores and sums are float32


@pytest.mark.parametrize(
    ("backend", "generation", "dtype", "name"),
    [x for x in KERNELS if x.values[0] == "cupy_raw" and x.values[1] != "sm90"],
)
def test_tangents(backend: str, generation: str, dtype: str, name: str, device: Device) -> None:
    tensors, tangents, options, own, on_device = call_of(name, dtype)
    (out, lse), (dout, dlse) = flashkit.attention_jvp(*own, return_lse=True, backend=backend, **on_device)
    problem, operands, shape = prepare(*tensors, **options)
    operands.tangents = Tangents._make([*map(shape.to_four, tangents), None, None])
    expected = standard_jvp(problem.spec, operands)
    for got, right in zip((out, dout), (expected[0], expected[2]), strict=True):
        near(got, shape.like(right), dtype)
    for got, right in zip((lse, dlse), (expected[1], expected[3]), strict=True):
        near(got, right, "float32")
