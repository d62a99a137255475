"""Host time of a call of flashkit.torch beside PyTorch's own, and beside a planned call on NumPy's or CuPy's arrays.

    python benchmarks/torch_calls.py [--device cuda]

The problem is so small that overhead is most of the time. A time is the least of many, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import flashkit
from flashkit import torch as ft
from flashkit.call import foreign

SHAPE = (1, 1, 16, 16)
ROUNDS, CALLS = 400, 4


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    q, k, v = (torch.randn(SHAPE, device=device) for _ in range(3))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    own = [foreign.native("x", x) for x in (q, k, v)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    torch.set_num_threads(1)
    timed = calls(device)
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
    print(f"{device}, float32 {SHAPE}, torch {torch.__version__}\n\n| call | us |\n|---|---:|")
    for name, seconds in least.items():
        print(f"| {name} | {seconds * 1e6:.1f} |")


if __name__ == "__main__":
    main()
