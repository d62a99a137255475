"""What each rank runs: `mpiexec -n 3 python -m tests.distributed.worker conformance`. Rank 0 prints JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import flashkit
from flashkit import api
from flashkit.distributed import Comm, RankError
from flashkit.distributed.whole import Axes

from .cases import HEADS, Case, cases

METHODS = "ring", "heads", "gather"
ORDERS = "contiguous", "zigzag", "striped"
WORLD = MPI.COMM_WORLD


def say(**facts: Any) -> None:
    """A line of rank 0."""
    if WORLD.Get_rank() == 0:
        print(json.dumps(facts), flush=True)


def spread(comm: Any, case: Case, order: str) -> tuple[list[Any], dict[str, Any]]:
    """A rank's part of q, k and v, and its options."""
    axis = Axes.of(case.q, case.options).tokens
    options = dict(case.options)
    for name in case.rows:
        options[name] = comm.shard(options[name], -2, order=order)
    return [comm.shard(x, axis, order=order) for x in case[:3]], options


def results(comm: Any, case: Case, method: str, order: str, dtype: Any, rng: Any) -> tuple[list[Any], list[Any]]:
    """What the ranks compute together, and one process alone: out, lse and the gradients."""
    axis = Axes.of(case.q, case.options).tokens
    case = Case(*(x.astype(dtype) for x in case[:3]), case.options, case.rows)
    wrt = ("q", "k", "v", "sinks") if "sinks" in case.options else ("q", "k", "v")
    (out, lse), vjp = flashkit.attention_vjp(*case[:3], return_lse=True, **case.options)
    dout, dlse = rng.standard_normal(out.shape).astype(out.dtype), rng.standard_normal(lse.shape).astype(lse.dtype)
    dlse[np.isneginf(lse)] = 0
    expected = [out, lse, *vjp(dout, dlse, wrt=wrt)]
    tensors, options = spread(comm, case, order)
    (out, lse), vjp = comm.attention_vjp(*tensors, method=method, order=order, return_lse=True, **options)
    parts = comm.shard(dout, axis, order=order), comm.shard(dlse, -1, order=order)
    gradients = vjp(*parts, wrt=wrt)
    axes = [axis, -1, axis, axis, axis]
    found = [comm.gather(x, at, order=order) for x, at in zip((out, lse, *gradients[:3]), axes, strict=True)]
    return [*found, *gradients[3:]], expected


def takes(method: str, case: Case, ranks: int) -> bool:
    """Whether heads can be spread."""
    every = all(case.options[name].shape[-2] == 1 for name in case.rows)
    return method != "heads" or (case.q.ndim > 2 and HEADS % ranks == 0 and every)


def conformance() -> None:
    """Every case, method and order in float64; a part of them each run in float32 and bfloat16."""
    comm = Comm(WORLD, timeout=60)
    rng = np.random.default_rng(5)
    count, started = 0, time.perf_counter()
    for name, case in cases(rng).items():
        for method in METHODS:
            for order in ORDERS if method == "ring" else ("zigzag", "striped"):
                if not takes(method, case, comm.ranks):
                    continue
                found, expected = results(comm, case, method, order, np.float64, np.random.default_rng(6))
                for what, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
                    np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10, err_msg=f"{name} {method} {order} {what}")
                count += 1
    say(cases=count, seconds=round(time.perf_counter() - started, 1))


def process_group(path: str) -> None:
    """Tensors through a process group: the same as one process, and gradients by autograd."""
    import torch
    from torch import distributed

    import flashkit.torch

    rank, ranks = WORLD.Get_rank(), WORLD.Get_size()
    distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
    comm = flashkit.torch.Comm(distributed.group.WORLD)
    generator = torch.Generator().manual_seed(3)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.bfloat16, 0.1)):
        q, k, v, dout = (torch.randn(2, 4, 21, 8, generator=generator).to(dtype) for _ in range(4))
        sinks = torch.randn(4, generator=generator, dtype=torch.float64).to(dtype)
        for method in METHODS:
            whole = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
            expected = flashkit.torch.attention(*whole[:3], sinks=whole[3], causal=True)
            expected.backward(dout)
            parts = [comm.shard(x, order="zigzag").requires_grad_() for x in (q, k, v)]
            own = sinks.clone().requires_grad_()
            out = comm.attention(*parts, sinks=own, causal=True, method=method, order="zigzag")
            out.backward(comm.shard(dout, order="zigzag"))
            found = [comm.gather(x.detach(), order="zigzag") for x in (out, *(x.grad for x in parts))]
            for x, y in zip((*found, own.grad), (expected, *(x.grad for x in whole)), strict=True):
                torch.testing.assert_close(x, y.detach(), rtol=tolerance, atol=tolerance)
    say(methods=len(METHODS))
    distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
