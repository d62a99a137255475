"""Time of a call from a JAX program on a CPU: flashkit.jax beside jax.nn and a pure_callback, interleaved.

python benchmarks/jax_calls.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import flashkit
from flashkit.jax import dot_product_attention

SIZES = ((1, 16, 4, 32), (1, 512, 8, 64), (1, 2048, 8, 64))  # batch, tokens, heads, dim
ROUNDS = 30


def by_pure_callback(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    def call(q: Any, k: Any, v: Any) -> Any:
        return flashkit.attention(*map(np.asarray, (q, k, v)), causal=is_causal, layout="bnhd")

    return jax.pure_callback(call, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v)


def microseconds(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """The median of each, measured in turn."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e6)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, medians of {ROUNDS}, microseconds")
    for shape in SIZES:
        q, k, v = (jax.random.normal(jax.random.key(i), shape) for i in range(3))
        host = [np.asarray(x) for x in (q, k, v)]
        calls: dict[str, Callable[[], Any]] = {
            "flashkit on NumPy": lambda host=host: flashkit.attention(*host, causal=True, layout="bnhd")
        }
        functions = {
            "flashkit.jax": dot_product_attention, "jax.nn": jax.nn.dot_product_attention,
            "pure_callback": by_pure_callback,
        }  # fmt: skip
        for name, function in functions.items():
            forward = jax.jit(lambda q, k, v, function=function: function(q, k, v, is_causal=True))
            calls[name] = lambda forward=forward, x=(q, k, v): jax.block_until_ready(forward(*x))
            if function is not by_pure_callback:
                loss = lambda q, k, v, function=function: (function(q, k, v, is_causal=True) ** 2).sum()
                both = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
                calls[f"{name}, gradients"] = lambda both=both, x=(q, k, v): jax.block_until_ready(both(*x))
        print(shape, {name: round(value) for name, value in microseconds(calls).items()})


if __name__ == "__main__":
    main()
