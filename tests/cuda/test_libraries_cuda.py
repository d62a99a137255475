"""Arrays of other libraries on a CUDA device: read in place, on their library's stream, returned in kind."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import mods
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


def test_tables_are_read_by_each_call(torch: Any) -> None:
    """By one plan, which guards find; with their gradients."""
    from flashkit.torch import attention

    q, k, v = (x.requires_grad_() for x in qkv(torch, "bfloat16"))
    dout, at = torch.randn_like(q), torch.arange(SHAPE[2], device="cuda")
    distances = (at[:, None] - at).clamp(-20, 20) + 20

    def with_table(table: Any) -> Any:
        return lambda s, b, h, i, j: s + table[torch.clamp(i - j, -20, 20) + 20, h]

    for _ in range(4):
        table = torch.randn(41, SHAPE[1], device="cuda", requires_grad=True)
        out = attention(q, k, v, score_mod=with_table(table))
        scores = (q.float() @ k.float().mT) / SHAPE[3] ** 0.5 + table[distances].permute(2, 0, 1)
        right = torch.softmax(scores, -1) @ v.float()
        for one, two in zip(*(torch.autograd.grad(x, (q, k, v, table), dout.to(x.dtype)) for x in (out, right))):
            assert (one - two).abs().max() < 2**-5 * two.abs().max()


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


# --- flashkit.jax: kernels run in XLA's stream, on XLA's buffers ------------------------------------------------------


@pytest.fixture(scope="module")
def jax() -> Any:
    jax = pytest.importorskip("jax", reason="the extra `jax`")
    cases.skip_unless("cupy_raw")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU: jax[cuda13] brings it")
    return jax


def tensors(dtype: str, n_q: int = 200, n_k: int = 260) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (2, 4, n_q, 64), (2, 2, n_k, 64), (2, 2, n_k, 64)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (50, 3), "softcap": 2.0},
    "lengths": {"kv_lengths": np.array([17, 260], np.int32), "q_offset": 0, "causal": True},
    "slopes": {"alibi_slopes": np.float32([0.5, 0.25, 0.1, 0.05])},
    "sinks": {"sinks": np.float32([0.5, -1, 0, 2])},
    "mask": {"mask": np.random.default_rng(1).random((2, 1, 200, 260)) < 0.8},
    "function": {
        "score_mod": mods.score(lambda s, b, h, q, k, *, table: s * table[h], table=np.float32([1, 0.5, 2, 1.5]))
    },
    "dropout": {"dropout_p": 0.3, "seed": np.uint32(7)},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_both_passes_agree_with_cupy(jax: Any, name: str, dtype: str) -> None:
    import cupy

    from flashkit.jax import attention

    q, k, v = tensors(dtype)
    dout = tensors(dtype)[0]
    arrays = {n: x for n, x in OPTIONS[name].items() if isinstance(x, (np.ndarray, np.generic))}
    static = {n: x for n, x in OPTIONS[name].items() if n not in arrays}

    @jax.jit
    def both(q: Any, k: Any, v: Any, dout: Any, arrays: Any) -> Any:
        call = lambda q, k, v: attention(q, k, v, return_lse=True, deterministic=True, **static, **arrays)
        (out, lse), vjp = jax.vjp(call, q, k, v)
        return out, lse, *vjp((dout, jax.numpy.zeros_like(lse)))

    options = {n: int(x) if n == "seed" else cupy.asarray(x) for n, x in arrays.items()}
    on_cupy = [cupy.asarray(x) for x in (q, k, v, dout)]
    (out, lse), vjp = flashkit.attention_vjp(*on_cupy[:3], return_lse=True, deterministic=True, **static, **options)
    expected = out, lse, *vjp(on_cupy[3], cupy.zeros_like(lse))
    for got, wanted in zip(both(q, k, v, dout, arrays), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(got), wanted.get())


def test_kernels_wait_for_what_xla_computes_before_them(jax: Any) -> None:
    """And what it computes afterwards waits for them: a chain of products and calls without a synchronisation."""
    from flashkit.jax import attention

    q, k, v = tensors("float32", 256, 256)
    k, v = (x.repeat(2, axis=1) for x in (k, v))
    weights = np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32) / 8

    def chain(attend: Any, x: Any) -> Any:
        for _ in range(20):
            x = attend(jax.numpy.tanh(x @ weights), k, v)
        return x

    by_xla = lambda q, k, v: jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v))).swapaxes(1, 2)
    with jax.default_matmul_precision("highest"):
        found, expected = (jax.jit(lambda x, f=f: chain(f, x))(q) for f in (attention, by_xla))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


# --- flashkit.dask on chunks of CuPy ----------------------------------------------------------------------------------


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
