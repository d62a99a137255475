"""flashkit.jax on a GPU: kernels run in XLA's stream, on XLA's buffers."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import mods

pytestmark = pytest.mark.gpu


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
    return [rng.standard_normal(shape).astype(cases.numpy_dtype(dtype)) for shape in shapes]


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
