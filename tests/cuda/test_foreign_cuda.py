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


def close(torch: Any, found: Any, *qkv: Any, causal: bool = False) -> None:
    """As near to float64 as PyTorch's own math is, and one rounding more."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact = sdpa(*(x.double() for x in qkv), is_causal=causal)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        own = sdpa(*qkv, is_causal=causal)
    error = (found.double() - exact).abs().max()
    assert error <= 2 * (own.double() - exact).abs().max() + torch.finfo(found.dtype).eps


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_come_back_as_tensors(torch: Any, dtype: str) -> None:
    q, k, v = qkv(torch, dtype)
    view = interop.native("q", q.transpose(1, 2))
    assert view.data.ptr == q.data_ptr() and view.strides == tuple(
        n * q.element_size() for n in q.transpose(1, 2).stride()
    )
    out, lse = flashkit.attention(q, k, v, causal=True, return_lse=True)
    assert out.device == lse.device == q.device and out.dtype == q.dtype
    close(torch, out, q, k, v, causal=True)
    assert torch.equal(flashkit.plan(q, k, v, causal=True)(q, k, v), out)
    found, vjp = flashkit.attention_vjp(q, k, v, causal=True)
    assert torch.equal(found, out)
    gradients = vjp(torch.ones_like(out))
    assert all(g.shape == x.shape and g.dtype == x.dtype and g.is_cuda for g, x in zip(gradients, (q, k, v)))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).sum().backward()
    for gradient, leaf in zip(gradients, leaves):
        scale = leaf.grad.abs().max()
        assert (gradient.double() - leaf.grad).abs().max() <= 8 * torch.finfo(q.dtype).eps * scale + 1e-6


def test_every_array_argument_may_be_a_tensor(torch: Any) -> None:
    q, k, v = qkv(torch)
    options = {
        "bias": torch.randn(4, 300, 300, device="cuda"), "mask": torch.rand(2, 1, 300, 300, device="cuda") < 0.7,
        "alibi_slopes": torch.rand(4, device="cuda"), "sinks": torch.zeros(4, device="cuda"),
        "kv_lengths": torch.tensor([300, 7], device="cuda"), "q_offset": torch.tensor([0, 2], device="cuda"),
    }  # fmt: skip
    import cupy

    expected = flashkit.attention(
        *(interop.native("x", x) for x in (q, k, v)),
        **{name: interop.native(name, x) for name, x in options.items()},
    )
    assert isinstance(expected, cupy.ndarray)
    cupy.testing.assert_array_equal(interop.native("x", flashkit.attention(q, k, v, **options)), expected)
    host = {**options, "kv_lengths": torch.tensor([300, 7]), "q_offset": torch.tensor([0, 2])}
    assert torch.equal(flashkit.attention(q, k, v, **host), flashkit.attention(q, k, v, **options))


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


def test_out_that_shares_memory_with_an_input(torch: Any) -> None:
    q, k, v = qkv(torch)
    expected = flashkit.attention(q, k, v)
    assert flashkit.attention(q, k, v, out=q) is q
    assert torch.equal(q, expected)


def test_what_lies_elsewhere_is_an_error(torch: Any) -> None:
    q, k, v = qkv(torch)
    with pytest.raises(TypeError, match=r"v: expected .* cuda:0, got a torch tensor on cpu"):
        flashkit.attention(q, k, v.cpu())
    with pytest.raises(TypeError, match="k requires grad"):
        flashkit.attention(q, k.requires_grad_(), v)


def test_a_graph_of_torch_replays_the_call(torch: Any) -> None:
    q, k, v = qkv(torch)
    out = torch.empty_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            flashkit.attention(q, k, v, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        flashkit.attention(q, k, v, out=out)
    q.normal_()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, flashkit.attention(q, k, v))


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
