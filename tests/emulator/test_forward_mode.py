"""Statistics and tangents of the CUDA backends' kernels, on the emulated device, against the definition in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import dispatch, mods
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.call.arguments import prepare
from flashkit.reference import standard_jvp, statistics
from flashkit.spec import Tangents

from .calls import cupy, generations

if TYPE_CHECKING:
    from .device import Device

OPTIONS: dict[str, dict[str, Any]] = {
    "causal, sinks": {"causal": True, "sinks": np.float32([0.5, -1.0, 2.0, 0.0])},
    "modifications": {"softcap": 2.0, "mask": np.random.default_rng(0).random((70, 90)) < 0.6},
    "by distance": {"score_mod": mods.t5_bias(np.random.default_rng(1).random((8, 4), np.float32), max_distance=30)},
    "packed": {"cu_seqlens": (np.array([0, 30, 30, 110]), np.array([0, 50, 60, 160])), "causal": True},
}

KERNELS = [
    pytest.param(
        backend, generation, dtype, name,
        marks=[
            *[pytest.mark.slow] * (backend == "numba_cuda" or name == "packed" or generation == "simt"),
            *[pytest.mark.exhaustive] * (backend == "numba_cuda" and name != "modifications"),
        ],
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
    rng, packed = np.random.default_rng(0), name == "packed"
    shapes = ((120, 4, 32), (170, 2, 32), (170, 2, 16)) if packed else ((1, 4, 70, 32), (1, 2, 90, 32), (1, 2, 90, 16))
    six = [rng.standard_normal(shape).astype(dtype) for shape in shapes * 2]
    options = OPTIONS[name]
    on_device = {
        n: cupy.asarray(x) if isinstance(x, np.ndarray) and x.dtype.kind in "fb" else x for n, x in options.items()
    }
    return six[:3], six[3:], options, [cupy.asarray(x) for x in six], on_device


def near(got: Any, expected: np.ndarray, dtype: str) -> None:
    got, expected = cases.to_numpy(got), expected.reshape(got.shape)
    if dtype == "float32":
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
    else:
        cases.within_a_unit(got, expected, dtype)


@pytest.mark.one_in(2, slow=4)
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


@pytest.mark.parametrize(("backend", "generation", "dtype", "name"), [x for x in KERNELS if x.values[0] == "cupy_raw"])
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


@pytest.mark.parametrize("generation", ["sm80"])
def test_key_weights_of_packed_queries_over_pages(device: Device) -> None:
    """Keys ask and queries answer, of the sequences that the forward pass has put on the device."""
    rng = np.random.default_rng(0)
    q, pool = (rng.standard_normal(shape).astype(np.float16) for shape in ((30, 2, 32), (6, 16, 2, 32)))
    options: dict[str, Any] = {"page_table": np.array([[4, 0], [2, 5]]), "kv_lengths": np.array([20, 32])}
    options["cu_seqlens"] = np.array([0, 9, 30])
    _, found = flashkit.attention(q, pool, pool, return_stats=["key_weight"], backend="reference", **options)
    own = (cupy.asarray(x) for x in (q, pool, pool))
    _, got = flashkit.attention(*own, return_stats=["key_weight"], backend="cupy_raw", **options)
    near(got["key_weight"], found["key_weight"], "bfloat16")


# --- Hopper's kernel --------------------------------------------------------------------------------------------------

HOPPER = pytest.mark.parametrize("generation", ["sm90"])


def operands_of(n_q: int, n_k: int, dim: int, dim_v: int, which: str = "qkv") -> list[Any]:
    """q, k, v and the tangents of these, None where `which` has none, of NumPy."""
    rng, dtype = np.random.default_rng(0), np.dtype("bfloat16")
    shapes = (2, 2, n_q, dim), (2, 1, n_k, dim), (2, 1, n_k, dim_v)
    six = [rng.standard_normal(shape).astype(dtype) for shape in shapes * 2]
    return [x if i < 3 or "qkv"[i - 3] in which else None for i, x in enumerate(six)]


def check_tangents(given: list[Any], own: list[Any], out: Any = None, **options: Any) -> None:
    """Results on the device for its arrays `own` are near those of the definition for `given`."""
    (out, lse), (dout, dlse) = flashkit.attention_jvp(*own, return_lse=True, backend="cupy_raw", out=out, **options)
    problem, operands, shape = prepare(*given[:3], **options)
    operands.tangents = Tangents._make([*(x if x is None else shape.to_four(x) for x in given[3:]), None, None])
    expected = standard_jvp(problem.spec, operands)
    for got, right, dtype in zip((out, lse, dout, dlse), expected, ("bfloat16", "float32") * 2, strict=True):
        near(got, shape.like(right) if dtype == "bfloat16" else right, dtype)


@HOPPER
@pytest.mark.parametrize(
    ("which", "dim", "dim_v"), [("qkv", 128, 72), ("q", 64, 64), ("k", 40, 128), ("v", 64, 64), ("kv", 16, 8)]
)
def test_some_tangents_and_dims(which: str, dim: int, dim_v: int, device: Device) -> None:
    """Of sizes that no tile divides, with NaN behind the keys and in the array for the result."""
    given, lengths = operands_of(70, 150, dim, dim_v, which), np.array([150, 33])
    own = [None if x is None else cupy.asarray(x) for x in given]
    for x in own[1:3] + own[4:]:
        if x is not None:
            x[1, :, 33:] = np.nan
    out = cupy.full((2, 2, 70, dim_v), np.nan, own[0].dtype)
    check_tangents(given, own, out, kv_lengths=lengths)


@HOPPER
def test_nan_of_masked_keys(device: Device, launched: list[str]) -> None:
    """It does not show: kernels without tensor cores follow."""
    given = operands_of(70, 150, 64, 64)
    own = [cupy.asarray(x) for x in given]
    for x in own[1:3] + own[4:]:
        x[:, :, 40] = np.nan
    check_tangents(given, own, mask_mod=lambda b, h, q, k: k != 40)
    assert generations(launched) >= {"simt"}


@HOPPER
def test_nan_of_a_visible_tangent(device: Device) -> None:
    own = [cupy.asarray(x) for x in operands_of(70, 150, 64, 64)]
    own[3][0, 1, 3, 5] = np.nan
    out, dout = (cases.to_numpy(x) for x in flashkit.attention_jvp(*own, backend="cupy_raw"))
    assert np.isfinite(out.astype(np.float32)).all()
    rows = np.isnan(dout.astype(np.float32)).all(-1)
    assert rows[0, 1, 3]
    assert rows.sum() == np.isnan(dout.astype(np.float32)).any(-1).sum() == 1


@HOPPER
def test_strides_that_tma_does_not_take(device: Device, launched: list[str]) -> None:
    """Of a tangent alone."""
    given = operands_of(70, 90, 64, 64)
    own = [cupy.asarray(x) for x in given]
    check_tangents(given, own)
    assert "sm80" not in generations(launched)
    rows = cupy.zeros((2, 1, 90, 66), own[4].dtype)
    rows[..., :64] = own[4]
    check_tangents(given, [*own[:4], rows[..., :64], own[5]])
    assert "sm80" in generations(launched)


@HOPPER
def test_a_tangent_whose_columns_lie_apart(device: Device) -> None:
    """Each call copies it."""
    given = operands_of(70, 90, 64, 64)
    for _ in range(2):
        own = [cupy.asarray(x) for x in given]
        columns = cupy.zeros((2, 2, 64, 70), own[3].dtype)
        columns[...] = own[3].swapaxes(2, 3)
        check_tangents(given, [*own[:3], columns.swapaxes(2, 3), *own[4:]])
        given = [np.roll(x, 1, 2) for x in given]


@HOPPER
@pytest.mark.parametrize("options", [{}, {"cu_seqlens": ([0, 60, 140], [0, 70, 180]), "causal": True}])
def test_a_later_call_is_not_planned_again(options: dict[str, Any], device: Device, monkeypatch: Any) -> None:
    """But where sequences have other lengths."""
    given = operands_of(70, 90, 64, 64)
    if options:
        given = [x.transpose(0, 2, 1, 3).reshape(-1, x.shape[1], 64) for x in given]
        options = {**options, "cu_seqlens": tuple(map(np.array, options["cu_seqlens"]))}
    names, own = ("entropy", "max_logit"), [cupy.asarray(x) for x in given]
    check_tangents(given, own, **options)
    _, first = flashkit.attention(*own[:3], return_stats=names, backend="cupy_raw", **options)
    plan = dispatch.plan
    monkeypatch.setattr(dispatch, "plan", None)
    given = [np.roll(x, 1, 0 if options else 2) for x in given]
    own = [cupy.asarray(x) for x in given]
    check_tangents(given, own, **options)
    _, then = flashkit.attention(*own[:3], return_stats=names, backend="cupy_raw", **options)
    if not options:
        near(then["max_logit"], np.roll(cases.to_numpy(first["max_logit"]), 1, 2), "float32")
        return
    monkeypatch.setattr(dispatch, "plan", plan)
    options["cu_seqlens"][0][1] = 50
    check_tangents(given, own, **options)
