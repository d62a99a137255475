"""The step of examples/ladder for tensor cores is attention, in float16."""

import numpy as np
import pytest

from examples.ladder import memory, step10_tensor_cores


@pytest.mark.parametrize("n", [64, 150])
def test_the_step_for_tensor_cores_is_attention(device, n):
    q, k, v = np.random.default_rng(3).standard_normal((3, n, memory.D)).astype(np.float32)
    q *= 3  # some weights are near 1
    s = q.astype(np.float64) @ k.T / memory.D**0.5
    p = np.exp(s - s.max(1, keepdims=True))
    expected = p / p.sum(1, keepdims=True) @ v
    found = step10_tensor_cores.attention(q, k, v, memory.SlowMemory())
    half = [x.astype(np.float16).astype(np.float64) for x in (q, k, v)]
    s = half[0] @ half[1].T / memory.D**0.5
    p = np.exp(s - s.max(1, keepdims=True)).astype(np.float16)
    plain = (p.astype(np.float64) @ half[2]) / p.astype(np.float64).sum(1, keepdims=True)
    assert np.abs(found - expected).max() <= 2 * np.abs(plain - expected).max() + 2**-10
