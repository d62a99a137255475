"""Backward passes with and without gradients by values of the score: JSON lines on standard output.

    python benchmarks/bias_gradients.py             # bfloat16 on the GPU, about a minute and a half
    python benchmarks/bias_gradients.py --cpu       # float32 on the CPU

Each line has the median time of a backward pass in milliseconds, of runs in turns: flashkit's by q, k and v alone
("without"), with a further gradient ("with"), and others' backward passes with it: FlexAttention with captured tensors
that require grad, PyTorch's scaled_dot_product_attention with a floating mask ("torch math"), and `jax.grad` of XLA's
attention where JAX is installed. What does not run there is null.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import flashkit
from flashkit import mods
from flashkit.torch import attention

CASES: dict[str, tuple[int, int, int, int, bool]] = {  # batch, heads, tokens, head dim, causal
    "dense": (4, 16, 2048, 64, False),
    "dense, head dim 128": (1, 16, 4096, 128, False),
    "dense, pairs of 256 residues": (256, 4, 256, 32, False),
    "T5 table": (4, 16, 2048, 64, False),
    "T5 table, head dim 128": (1, 16, 4096, 128, False),
    "slopes": (4, 16, 2048, 64, True),
    "slopes, head dim 128": (1, 16, 4096, 128, True),
}
CPU_CASES = {"dense": (1, 8, 1024, 64, False), "T5 table": (1, 8, 1024, 64, False), "slopes": (1, 8, 1024, 64, True)}
BUCKETS = 32


def t5_bucket(distance: torch.Tensor) -> torch.Tensor:
    """The bucket of k - q, bidirectional, of a tensor of integers."""
    half, exact = BUCKETS // 2, BUCKETS // 4
    n = distance.abs()
    far = exact + (torch.log(n.clamp(min=1) / exact) / np.log(128 / exact) * (half - exact) + 1e-5).to(torch.int64)
    return torch.where(distance > 0, half, 0) + torch.where(n < exact, n, far.clamp(max=half - 1))


def runs(name: str, sizes: tuple[int, int, int, int, bool], device: str, dtype: Any) -> dict[str, Callable[[], Any]]:
    """For each system a backward pass to time."""
    batch, heads, n, d, causal = sizes
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(batch, heads, n, d, device=device, dtype=dtype) for _ in range(4))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    kind = name.partition(",")[0]
    shape = {"dense": (1, heads, n, n), "T5 table": (BUCKETS, heads), "slopes": (heads,)}[kind]
    value = torch.rand(shape, device=device).requires_grad_()
    bias = value.detach().to(dtype).requires_grad_() if kind == "dense" else value
    at = torch.arange(n, device=device)

    def ours(x: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"causal": causal}
        if kind == "T5 table":
            graph = mods.t5_bias(np.zeros(shape, np.float32))
            options["score_mod"] = mods.Mod("score", graph.expr, graph.params, {"table": x})
        else:
            options["bias" if kind == "dense" else "alibi_slopes"] = x
        result: torch.Tensor = attention(q, k, v, **options)
        return result

    def scores(x: torch.Tensor) -> torch.Tensor:
        distance = at[None] - at[:, None]
        if kind == "T5 table":
            added = x[t5_bucket(distance)].permute(2, 0, 1)[None]
        else:
            added = x if kind == "dense" else -x[:, None, None] * distance.abs()
        hidden = torch.where(distance > 0, -torch.inf, 0.0) if causal else 0.0
        return (added + hidden).to(dtype)

    def math(x: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=scores(x))

    def flex(x: torch.Tensor) -> torch.Tensor:
        from torch.nn.attention import flex_attention as theirs

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if kind == "dense":
                return s + x[0, h, i, j]
            return s + x[t5_bucket(j - i), h] if kind == "T5 table" else s - x[h] * (i - j).abs()

        block_mask = None
        if causal:
            block_mask = theirs.create_block_mask(lambda b, h, i, j: j <= i, None, None, n, n, device=device)
        result: torch.Tensor = _compiled()(q, k, v, score_mod=score_mod, block_mask=block_mask)
        return result

    found: dict[str, Callable[[], Any]] = {}
    systems = {"with": (ours, bias), "torch math": (math, bias)}
    if device == "cuda":
        systems["FlexAttention"] = (flex, bias)
    for system, (forward, x) in systems.items():
        try:
            out = forward(x)
            found[system] = _backward(out, (q, k, v, x), dout)
            found[system]()
        except Exception as error:  # out of memory, or what a system does not compile
            print(json.dumps({"case": name, "system": system, "error": str(error).splitlines()[0][:200]}), flush=True)
            found.pop(system, None)
    found["without"] = _backward(ours(bias.detach()), (q, k, v), dout)
    if (xla := _xla(name, sizes, kind, shape, device)) is not None:
        found["XLA"] = xla
    return found


def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if not hasattr(_compiled, "made"):
        _compiled.made = torch.compile(flex_attention, dynamic=False)  # type: ignore[attr-defined]
    return _compiled.made  # type: ignore[attr-defined]


def _backward(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def _xla(name: str, sizes: Any, kind: str, shape: tuple[int, ...], device: str) -> Callable[[], Any] | None:
    """Forward and backward pass, of which XLA does not keep the first apart."""
    try:
        import jax
        import jax.numpy as jnp

        if (device == "cuda") != (jax.default_backend() == "gpu"):
            return None
        batch, heads, n, d, causal = sizes
        dtype = jnp.bfloat16 if device == "cuda" else jnp.float32
        q, k, v = (jax.random.normal(jax.random.key(i), (batch, n, heads, d), dtype) for i in range(3))
        buckets = jnp.asarray(t5_bucket(torch.arange(n)[None] - torch.arange(n)[:, None]).numpy())
        distance = abs(jnp.arange(n)[None] - jnp.arange(n)[:, None])

        def loss(q: Any, k: Any, v: Any, x: Any) -> Any:
            table = x[buckets].transpose(2, 0, 1)[None] if kind == "T5 table" else -x[:, None, None] * distance
            bias = (x if kind == "dense" else table).astype(dtype)
            return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=causal, implementation="xla").sum()

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        x = jax.random.uniform(jax.random.key(3), shape, dtype if kind == "dense" else jnp.float32)
        jax.block_until_ready(step(q, k, v, x))
        return lambda: jax.block_until_ready(step(q, k, v, x))
    except Exception as error:
        print(json.dumps({"case": name, "system": "XLA", "error": str(error).splitlines()[0][:200]}), flush=True)
        return None


def timed(found: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Medians, in milliseconds, of runs in turns; on a GPU of three at a time, unless they are long."""

    def milliseconds(run: Callable[[], Any], repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3 / repeats

    times: dict[str, list[float]] = {system: [] for system in found}
    for _ in range(rounds):
        for system, run in found.items():
            short = milliseconds(run) < 50
            times[system].append(milliseconds(run, 3 if device == "cuda" and short else 1))
    return {system: round(statistics.median(each), 4) for system, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="float32 on the CPU")
    parser.add_argument("--rounds", type=int, default=7, help="how often the systems take turns")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    options = parser.parse_args()
    device, dtype = ("cpu", torch.float32) if options.cpu else ("cuda", torch.bfloat16)
    where = "CPU" if options.cpu else torch.cuda.get_device_name()
    for name, sizes in (CPU_CASES if options.cpu else CASES).items():
        if options.only not in name:
            continue
        times = timed(runs(name, sizes, device, dtype), device, options.rounds)
        ratio = round(times["with"] / times["without"], 3) if "with" in times else None
        line: dict[str, Any] = {
            "case": name, "device": where, "dtype": str(dtype).removeprefix("torch."), "batch": sizes[0],
            "heads": sizes[1], "tokens": sizes[2], "head_dim": sizes[3], "causal": sizes[4], "flashkit":
            flashkit.__version__, "torch": torch.__version__, "ms": times, "ratio": ratio,
        }  # fmt: skip
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
