"""Arrays of PyTorch, JAX and Numba on a CUDA device: read in place, on their library's stream, returned in kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit.call import interop

pytestmark = pytest.mark.gpu
SHAPE = (2, 4, 300, 64)


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not found.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA device")
    pytest.importorskip("cupy", reason="CuPy is not installed")
    return found


def qkv(torch: Any, dtype: str = "float16") -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(SHAPE, device="cuda").to(getattr(torch, dtype)) for _ in range(3)]


def test_the_work_is_on_the_current_stream(torch: Any) -> None:
    """The tensors are written late, on a side stream: only work behind them there sees what they hold."""
    q, k, v = qkv(torch)
    expected = flashkit.attention(q, k, v)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    flashkit.attention(*late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for to, source in zip(late, (q, k, v)):
            to.copy_(source)
        out = flashkit.attention(*late)
        assert not stream.query()  # nothing waited for the device
    stream.synchronize()
    assert torch.equal(out, expected)


def test_what_lies_elsewhere_is_an_error(torch: Any) -> None:
    q, k, v = qkv(torch)
    with pytest.raises(TypeError, match=r"v: expected .* cuda:0, got a torch tensor on cpu"):
        flashkit.attention(q, k, v.cpu())
    with pytest.raises(TypeError, match="k requires grad"):
        flashkit.attention(q, k.requires_grad_(), v)


def test_jax_arrays_on_the_device() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA device")
    q, k, v = (jax.random.normal(jax.random.key(n), SHAPE, "bfloat16") for n in range(3))
    out, vjp = flashkit.attention_vjp(q, k, v, causal=True)
    assert isinstance(out, jax.Array) and out.device == q.device and out.dtype == q.dtype
    expected = flashkit.attention(*(interop.native("x", x) for x in (q, k, v)), causal=True)
    np.testing.assert_array_equal(np.asarray(out, np.float32), expected.astype(np.float32).get())
    assert all(isinstance(x, jax.Array) and x.shape == q.shape for x in vjp(out))


def test_numba_arrays_on_the_device() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    cuda = pytest.importorskip("numba.cuda", reason="Numba has no CUDA")
    if not cuda.is_available():
        pytest.skip("Numba has no CUDA device")
    own = [cupy.random.default_rng(n).standard_normal(SHAPE, dtype=cupy.float32) for n in range(3)]
    out = flashkit.attention(*(cuda.as_cuda_array(x) for x in own))
    assert cuda.is_cuda_array(out) and not isinstance(out, cupy.ndarray)
    np.testing.assert_array_equal(out.copy_to_host(), flashkit.attention(*own).get())
