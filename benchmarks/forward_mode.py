"""JVPs and statistics against the forward pass, also with options, and beside other libraries: JSON lines.

    python benchmarks/forward_mode.py                    # NumPy arrays, float32
    python benchmarks/forward_mode.py --device cuda      # CuPy arrays, bfloat16

Each line has a case, the best of several times in milliseconds, and the ratio to the forward pass of the same case.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flashkit

CASES = {
    "cpu": [(1, 8, 1024, 64, False), (1, 4, 2048, 128, False), (1, 4, 2048, 64, True)],
    "cuda": [(4, 16, 4096, 64, False), (2, 16, 8192, 128, False), (2, 16, 8192, 128, True)],
}
STATISTICS = ("entropy", "max_logit")
WITH_OPTIONS = ("forward", "jvp")
OPTION_SIZES = {"cpu": [(1, 4, 1024, 64)], "cuda": [(4, 16, 4096, 64), (2, 16, 4096, 128)]}


def options_of(xp: Any, batch: int, heads: int, n: int) -> dict[str, dict[str, Any]]:
    """Options of calls, by name. Sequences that are packed have an eighth to a half of the tokens."""
    rng = np.random.default_rng(1)

    def array(*shape: int) -> Any:
        return xp.asarray(rng.random(shape, np.float32))

    return {
        "window": {"window": (n // 8, 0)},
        "softcap": {"softcap": 30.0},
        "slopes": {"alibi_slopes": array(heads), "causal": True},
        "T5 table": {"score_mod": flashkit.mods.t5_bias(array(32, heads))},
        "bias": {"bias": array(1, heads, n, n)},
        "mask": {"mask": array(1, 1, n, n) < 0.9},
        "dropout": {"dropout_p": 0.1, "seed": 0},
        "lengths": {"kv_lengths": np.linspace(n // 4, n, batch).astype(np.int64)},
        "packed": {"cu_seqlens": np.array([0, n // 8, n // 4, n // 2, n]), "causal": True},
    }


def best(call: Callable[[], Any], wait: Callable[[], Any], seconds: float = 1.0) -> float:
    """Milliseconds of the fastest call within about this time."""
    call(), wait()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 200):
        start = time.perf_counter()
        call(), wait()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def ours(tensors: list[Any], tangents: list[Any], options: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """The calls of flashkit by name, the forward pass first."""
    dq, dk, dv = tangents

    def with_stats(*names: str) -> Any:
        return flashkit.attention(*tensors, return_stats=names, **options)

    return {
        "forward": lambda: flashkit.attention(*tensors, **options),
        "entropy and max_logit": lambda: with_stats(*STATISTICS),
        "key_weight": lambda: with_stats("key_weight"),
        "jvp": lambda: flashkit.attention_jvp(*tensors, dq, dk, dv, **options),
        "jvp by q": lambda: flashkit.attention_jvp(*tensors, dq, **options),
        "jvp by v": lambda: flashkit.attention_jvp(*tensors, None, None, dv, **options),
    }


def of_torch(tensors: list[Any], tangents: list[Any], causal: bool, on_gpu: bool) -> dict[str, Callable[[], Any]]:
    """torch.func.jvp of the math backend, which alone has forward-mode derivatives."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    if on_gpu and not torch.cuda.is_available():
        return {}

    def tensor(x: Any) -> Any:
        return torch.from_numpy(x.get().view(np.int16)).view(torch.bfloat16).cuda() if on_gpu else torch.from_numpy(x)

    primals, directions = tuple(map(tensor, tensors)), tuple(map(tensor, tangents))

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def jvp() -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(attend, primals, directions)

    return {"torch.func.jvp, math": jvp}


def of_jax(tensors: list[Any], tangents: list[Any], causal: bool, on_gpu: bool) -> dict[str, Callable[[], Any]]:
    """jax.jvp of XLA's attention."""
    try:
        import jax
    except ImportError:
        return {}
    if on_gpu and jax.default_backend() != "gpu":
        return {}
    primals, directions = (
        tuple(jax.numpy.asarray(np.asarray(x if not on_gpu else x.get())).swapaxes(1, 2) for x in each)
        for each in (tensors, tangents)
    )

    @jax.jit
    def jvp(primals: Any, directions: Any) -> Any:
        attend = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")
        return jax.jvp(attend, primals, directions)

    return {"jax.jvp, xla": lambda: jax.block_until_ready(jvp(primals, directions))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=CASES, default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        import cupy as xp
        import ml_dtypes

        dtype, wait = np.dtype(ml_dtypes.bfloat16), lambda: xp.cuda.Device().synchronize()
    else:
        xp, dtype, wait = np, np.dtype(np.float32), lambda: None
    for batch, heads, n, d, causal in CASES[arguments.device]:
        rng = np.random.default_rng(0)
        six = [xp.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(6)]
        tensors, tangents = six[:3], six[3:]
        calls = ours(tensors, tangents, {"causal": causal})
        for library in (of_torch, of_jax):
            try:
                calls |= library(tensors, tangents, causal, on_gpu)
            except Exception as error:  # another library refuses the arrays
                print(json.dumps({"skipped": library.__name__, "why": str(error)[:200]}), flush=True)
        case = {"device": arguments.device, "dtype": dtype.name, "shape": [batch, heads, n, d]}
        measure({**case, "causal": causal}, calls, wait, arguments.seconds)
    for batch, heads, n, d in OPTION_SIZES[arguments.device]:
        rng = np.random.default_rng(0)
        six = [xp.asarray(rng.standard_normal((batch, heads, n, d), np.float32).astype(dtype)) for _ in range(6)]
        for name, options in options_of(xp, batch, heads, n).items():
            given = six if name != "packed" else [x[0].swapaxes(0, 1) for x in six]
            calls = {what: call for what, call in ours(given[:3], given[3:], options).items() if what in WITH_OPTIONS}
            case = {"device": arguments.device, "dtype": dtype.name, "shape": list(given[0].shape), "options": name}
            measure(case, calls, wait, arguments.seconds)


def measure(case: dict[str, Any], calls: dict[str, Callable[[], Any]], wait: Callable[[], Any], seconds: float) -> None:
    """A line for each call; the first one is what the others are compared with."""
    forward = 0.0
    for name, call in calls.items():
        try:
            ms = best(call, wait, seconds)
        except Exception as error:  # out of memory, or not supported
            print(json.dumps({**case, "what": name, "error": str(error)[:200]}), flush=True)
            continue
        forward = forward or ms
        line = {**case, "what": name, "ms": round(ms, 4), "over_forward": round(ms / forward, 3)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
