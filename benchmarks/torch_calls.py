"""Host time of a call of flashkit.torch beside PyTorch's own, and beside a planned call on NumPy's or CuPy's arrays.

    python benchmarks/torch_calls.py [--device cuda] [--dtype bfloat16] [--stream] [--parts] [--profile 20]

The problem is so small that overhead is most of the time. A time is the least of many, in turns. --stream computes on a
stream of PyTorch's other than the default one. --parts times the steps of a call by itself; --profile prints the
functions that take most time in a forward call, and in both passes.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import flashkit
from flashkit import torch as ft
from flashkit.call import interop, torch_autograd, torch_passes, torch_plans

SHAPE = (1, 1, 16, 16)
ROUNDS, CALLS = 400, 4
NO_OPTIONS: torch_passes.Scalars = ()

Calls = dict[str, Callable[[], Any]]


def calls(device: str, dtype: torch.dtype) -> Calls:
    """What is timed, by name."""
    q, k, v = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    own = [interop.native("x", x) for x in (q, k, v)]
    planned, dout = flashkit.plan(*own), torch.ones_like(q)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def both(function: Callable[..., Any]) -> Any:
        return torch.autograd.grad(function(*leaves), leaves, dout)

    def both_of_numpy() -> Any:
        out, vjp = flashkit.attention_vjp(*own)
        return vjp(out)

    return {
        "planned call of arrays": lambda: planned(*own),
        "flashkit.attention of arrays": lambda: flashkit.attention(*own),
        "flashkit.attention of tensors": lambda: flashkit.attention(q, k, v),
        "flashkit.torch.attention": lambda: ft.attention(q, k, v),
        "flashkit.torch.scaled_dot_product_attention": lambda: ft.scaled_dot_product_attention(q, k, v),
        "SDPA": lambda: sdpa(q, k, v),
        "flashkit.torch, recorded": lambda: ft.scaled_dot_product_attention(*leaves),
        "SDPA, recorded": lambda: sdpa(*leaves),
        "attention_vjp of arrays, both passes": both_of_numpy,
        "flashkit.torch, both passes": lambda: both(ft.scaled_dot_product_attention),
        "SDPA, both passes": lambda: both(sdpa),
    }


def parts(device: str, dtype: torch.dtype) -> Calls:
    """Steps of a call that finds its plan, by name."""
    q, k, v = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(3))
    out, lse = ft.attention(q, k, v, return_lse=True)
    memory, name = interop.TORCH.memory, torch_plans.name_of(True, (), NO_OPTIONS)
    leaves, dout = [x.clone().requires_grad_() for x in (q, k, v)], torch.ones_like(q)
    recorded = ft.attention(*leaves)
    torch.autograd.grad(recorded, leaves, dout, retain_graph=True)
    known: Any = torch_plans.find(name, (q, k, v))
    planned, lent = known.planned, [memory(x) for x in (q, k, v)]

    def scope() -> None:
        with interop.TORCH.scope(q):
            pass

    backward = dout, None, out, lse, (), q, k, v, {}, NO_OPTIONS, None
    torch_passes.backward(known, None, *backward)
    read = q, k, v, out, lse, dout
    found = known.pull_back((), read)
    return {
        "whether anything else looks at the call": torch_autograd.is_watched,
        "name of the plan": lambda: torch_plans.name_of(True, (), NO_OPTIONS),
        "look-up of the plan": lambda: torch_plans.find(name, (q, k, v)),
        "device and stream": scope,
        "memory of a tensor": lambda: memory(q),
        "a new tensor": lambda: q.new_empty(SHAPE),
        "an array made of a tensor": lambda: interop.TORCH.native("q", q),
        "the plan's call, with its results": lambda: planned.run_on(*lent, None),
        "forward pass": lambda: torch_autograd.call(False, q, k, v, {}, NO_OPTIONS, None),
        "look-up of the backward pass": lambda: known.pull_back((), read),
        "backward pass": lambda: torch_passes.backward(known, found, *backward),
        "backward pass by autograd": lambda: torch.autograd.grad(recorded, leaves, dout, retain_graph=True),
    }


def measure(timed: Calls, device: str) -> dict[str, float]:
    """The least time of a call, in seconds."""
    least = dict.fromkeys(timed, float("inf"))
    for _ in range(ROUNDS):
        for name, call in timed.items():
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / CALLS)
    return least


def profile(call: Callable[[], Any], lines: int, device: str) -> None:
    """Print the functions that take most time. A profile does not see the threads of PyTorch's on which backward passes
    run on a GPU, so autograd is told to stay on this one.
    """
    runs, profiler = 2000, cProfile.Profile()
    call()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(runs // 100):
            if device == "cuda":
                torch.cuda.synchronize()
            profiler.enable()
            for _ in range(100):
                call()
            profiler.disable()
    print(f"\n{runs} calls")
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device, dtype = given.device, getattr(torch, given.dtype)
    with torch.cuda.stream(torch.cuda.Stream()) if given.stream else nullcontext():
        timed = calls(device, dtype)
        least = measure(timed, device)
        if given.parts:
            least |= measure(parts(device, dtype), device)
        print(f"{device}, {given.dtype} {SHAPE}, torch {torch.__version__}\n\n| call | us |\n|---|---:|")
        for name, seconds in least.items():
            print(f"| {name} | {seconds * 1e6:.1f} |")
        if given.profile:
            for name in ("flashkit.torch.attention", "flashkit.torch, both passes"):
                print(f"\n{name}:")
                profile(timed[name], given.profile, device)


if __name__ == "__main__":
    main()
