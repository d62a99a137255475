"""What each rank runs: `mpiexec -n 3 python -m tests.ranks.worker conformance`. Rank 0 prints JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from mpi4py import MPI

import flashkit
from flashkit import api
from flashkit.distributed import Comm
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


THOROUGH = "causal", "packed causal", "window", "score_mod"


def conformance(*parts: str) -> None:
    """Every case and method; every order in some cases, one in turn in others. parts: every n-th case, from m on."""
    first, step = map(int, parts)
    thorough = THOROUGH if step <= 2 else THOROUGH[:2]
    comm = Comm(WORLD, timeout=60)
    count, started = 0, time.perf_counter()
    for number, (name, case) in enumerate(cases(np.random.default_rng(5)).items()):
        if (number + first) % step and name not in thorough:
            continue
        for place, method in enumerate(METHODS):
            orders = ORDERS if name in thorough else (ORDERS[(number + place + comm.ranks) % 3],)
            for order in orders if takes(method, case, comm.ranks) else ():
                if "dropout_p" in case.options and order == "striped" and method != "heads":
                    text = raised(lambda: results(comm, case, method, order, np.float64, np.random.default_rng(6)))  # noqa: B023
                    assert text.startswith("UnsupportedError: dropout_p: expected order="), text
                    continue
                found, expected = results(comm, case, method, order, np.float64, np.random.default_rng(6))
                for what, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
                    np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10, err_msg=f"{name} {method} {order} {what}")
                count += 1
    say(cases=count, seconds=round(time.perf_counter() - started, 1))


def precision() -> None:
    """The error against float64 does not grow with the number of ranks."""
    comm = Comm(WORLD, timeout=60)
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 1, 4, 128, 16))
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        exact = Case(*(x.astype(dtype).astype(np.float64) for x in (q, k, v)), {"causal": True})
        unit = float(ml_dtypes.finfo(dtype).eps)
        for method in ("ring", "gather"):
            found, plain = results(comm, exact, method, "zigzag", dtype, np.random.default_rng(1))
            _, true = results(comm, exact, method, "zigzag", np.float64, np.random.default_rng(1))
            for x, y, z in zip(found, plain, true, strict=True):
                errors = [abs(np.asarray(each, np.float64) - z).max() for each in (x, y)]
                assert errors[0] <= 2 * errors[1] + unit * abs(z).max(), (dtype, method, errors)
    comm.close()
    say(dtypes=3)


def again() -> None:
    """The same bits in each of several calls."""
    comm = Comm(WORLD, timeout=60)
    rng = np.random.default_rng(8)
    q, k, v, dout = (comm.shard(x) for x in rng.standard_normal((4, 1, 4, 101, 16)).astype(np.float32))
    for method in ("ring", "gather"):
        found = []
        for delay in (0.0, 0.05 * comm.rank, 0.05 * (comm.ranks - comm.rank)):
            time.sleep(delay)
            out, vjp = comm.attention_vjp(q, k, v, causal=True, method=method)
            found.append([out, *vjp(dout)])
        for other in found[1:]:
            for x, y in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(x, y)
    say(again=True)


def raised(call: Callable[[], Any]) -> str:
    """The error of a call, as text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def faults() -> None:
    """A fault of one rank is an error on all, and the ranks go on together."""
    rank, last = WORLD.Get_rank(), WORLD.Get_size() - 1
    comm = Comm(WORLD, timeout=60)
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 16, 8))
    q, k, v = (comm.shard(x) for x in (q, k, v))
    odd = rank == last
    narrow = (lambda x: x[..., :4]) if odd else (lambda x: x)
    slopes = np.arange(6.0) + odd

    def other(name: str, x: Any) -> Callable[[], Any]:
        return lambda: comm.attention(q, k, v, **({name: x} if odd else {}))

    def in_the_middle(method: str, backward: bool) -> Callable[[], Any]:
        def call() -> Any:
            _, vjp = comm.attention_vjp(q, k, v, method=method)
            name = "vjp_of" if backward else "attention"
            plain = getattr(api, name)

            def exhausted(*args: Any, **options: Any) -> Any:
                raise MemoryError("no memory is left")

            if odd:
                setattr(api, name, exhausted)
            try:
                return vjp(np.ones_like(q)) if backward else comm.attention(q, k, v, method=method)
            finally:
                setattr(api, name, plain)

        return call

    same = {
        "dtype": (lambda: comm.attention(*(x.astype(np.float32 if odd else x.dtype) for x in (q, k, v))), "dtype of q"),
        "head dim": (lambda: comm.attention(narrow(q), narrow(k), v), "shape of q"),
        "tokens": (lambda: comm.attention(q, k[..., : 3 if odd else None, :], v), "k: expected"),
        "causal": (other("causal", True), "causal: expected the same on all ranks, got not given on rank 0"),
        "order": (other("order", "zigzag"), "order: expected the same"),
        "seed": (lambda: comm.attention(q, k, v, causal=True, scale=1.0 + odd), "scale: expected the same"),
        "slopes": (lambda: comm.attention(q, k, v, alibi_slopes=slopes), "alibi_slopes: expected the same"),
        "gather": (lambda: comm.gather(q, axis=-1 - odd), "axis: expected the same"),
        "pages": (lambda: comm.attention(q, k, v, page_table=np.zeros((1, 1), int)), "page_table: not taken"),
    }  # fmt: skip
    for what, (call, expected) in same.items():
        text = raised(call)
        assert expected in text and "Rank" not in text, (what, rank, text)
    for what, call in {
        "no array": lambda: comm.attention(None if odd else q, k, v),
        "unknown option": other("is_causal", True),
        "rows of a bias": lambda: comm.attention(q, k, v, bias=np.zeros((3 if odd else q.shape[-2], 16))),
        "dout": lambda: comm.attention_vjp(q, k, v)[1](np.ones_like(narrow(q))),
        **{f"forward of {m}": in_the_middle(m, False) for m in METHODS},
        **{f"backward of {m}": in_the_middle(m, True) for m in METHODS},
    }.items():
        text = raised(call)
        assert text != "nothing" and odd != text.startswith(f"RankError: rank {last}: "), (what, rank, text)
    assert raised(lambda: comm.attention(q, k, v)) == "nothing"
    WORLD.Barrier()
    # A rank that does not come.
    comm = Comm(WORLD, timeout=0.5)
    if odd:
        time.sleep(2)
    else:
        text = raised(lambda: comm.attention(q, k, v))
        assert text.startswith("TimeoutError: rank"), text
        assert "no longer usable" in raised(lambda: comm.attention(q, k, v))
    say(faults="told")
    sys.stdout.flush()
    WORLD.Barrier()
    os._exit(0)  # finalizing would wait for the messages that never came


def death() -> None:
    """A rank that ends in the middle: mpiexec ends the others."""
    comm = Comm(WORLD, timeout=20)
    x = np.ones((1, 2, 8, 4))
    if WORLD.Get_rank() == 0:
        os._exit(3)
    comm.attention(x, x, x)


def devices() -> None:
    """Arrays of CuPy, one device for each rank or several ranks on one."""
    import cupy

    cupy.cuda.Device(WORLD.Get_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    comm = Comm(WORLD, timeout=120)
    rng = np.random.default_rng(2)
    every: dict[str, dict[str, Any]] = {
        "causal": {"causal": True}, "window": {"window": (70, 30)}, "sinks": {"sinks": rng.standard_normal(8)},
        "softcap": {"softcap": 3.0, "kv_lengths": np.array([150])},
    }  # fmt: skip
    count = 0
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        for options in every.values():
            options = {name: x.astype(np.float32) if name == "sinks" else x for name, x in options.items()}
            shapes = (1, 8, 200, 64), (1, 2, 200, 64), (1, 2, 200, 64), (1, 8, 200, 64)
            *tensors, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
            (true, _), vjp = flashkit.attention_vjp(*map(as_double, tensors), return_lse=True, **options)
            exact = [true, *vjp(as_double(dout))]
            given = {name: cupy.asarray(x) if name == "sinks" else x for name, x in options.items()}
            on_device = [cupy.asarray(x) for x in tensors]
            out, vjp = flashkit.attention_vjp(*on_device, **given)
            plain = [out, *vjp(cupy.asarray(dout))]
            for method in METHODS:
                for order in ORDERS:
                    parts = [comm.shard(x, order=order) for x in on_device]
                    out, vjp = comm.attention_vjp(*parts, method=method, order=order, deterministic=True, **given)
                    found = [out, *vjp(comm.shard(cupy.asarray(dout), order=order))]
                    for x, y, z in zip(found, plain, exact, strict=True):
                        errors = [abs(as_double(e) - z).max() for e in (comm.gather(x, order=order), y)]
                        unit = float(ml_dtypes.finfo(dtype).eps) * abs(z).max()
                        assert errors[0] <= 2 * errors[1] + unit, (dtype, method, order, list(options), errors)
                    count += 1
    say(calls=count, transport=type(comm._on_devices).__name__)


def emulated() -> None:
    """Arrays of CuPy on the emulated device, through host memory."""
    import types
    from unittest import mock

    sys.path.insert(0, str(Path(__file__).parents[1]))
    import emulator
    from emulator import cupy

    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = types.SimpleNamespace(available=False)  # type: ignore[attr-defined]
    rng = np.random.default_rng(1)
    *tensors, dout = (rng.standard_normal((1, h, 64, 32)).astype(ml_dtypes.bfloat16) for h in (4, 2, 2, 4))
    out, vjp = flashkit.attention_vjp(*map(as_double, tensors), causal=True)
    exact = [out, *vjp(as_double(dout))]
    with mock.patch.dict(sys.modules, {"cupy.cuda": cuda}), emulator.emulated(sms=2):
        comm = Comm(WORLD, timeout=200)
        comm._control._worker = None  # the emulated device has one thread
        parts = [comm.shard(cupy.asarray(x), order="zigzag") for x in (*tensors, dout)]
        out, vjp = comm.attention_vjp(*parts[:3], causal=True, order="zigzag")
        for x, y in zip((out, *vjp(parts[3])), exact, strict=True):
            error = abs(as_double(comm.gather(x, order="zigzag")) - y).max()
            assert error < 0.008 * abs(y).max(), error
    say(transport=type(comm._on_devices).__name__)


def interconnect() -> None:
    """What autotune writes, a prediction reads."""
    from flashkit.distributed import predict
    from flashkit.tools.autotune.interconnect import interconnect as measured

    rate, path = measured()
    x = np.broadcast_to(np.float32(0), (1, 2, 64, 8))
    if path is not None:
        found = predict(x, x, x, ranks=2, seconds={"forward": 1.0})
        assert found.bandwidth_gbs == round(rate, 2), (found.bandwidth_gbs, rate)
        assert 0.01 < rate < 1000, rate
    comm = Comm(WORLD, timeout=60)
    found = comm.explain(x, x, x, causal=True, order="zigzag")
    assert (found.ranks, "128" in found.problem) == (comm.ranks, True), found
    say(measured=True)


def as_double(x: Any) -> np.ndarray:
    """An array on the host, as float64."""
    x = x.get() if hasattr(x, "get") else x
    return np.asarray(x).astype(np.float64)


def process_group(path: str, backend: str = "gloo") -> None:
    """Tensors through a process group: the same as one process, and gradients by autograd."""
    import torch
    from torch import distributed

    import flashkit.torch

    rank, ranks = WORLD.Get_rank(), WORLD.Get_size()
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    distributed.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=ranks)
    comm = flashkit.torch.Comm(distributed.group.WORLD)
    generator = torch.Generator().manual_seed(3)
    wide = (torch.float64, 1e-10) if backend == "gloo" else (torch.float32, 1e-4)
    for dtype, tolerance in (wide, (torch.bfloat16, 2.0**-8)):
        q, k, v, dout = (torch.randn(2, 4, 21, 8, generator=generator).to(device, dtype) for _ in range(4))
        sinks = torch.randn(4, generator=generator, dtype=torch.float64).to(device, dtype)
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
                error, size = (each.double().square().mean().sqrt() for each in (x - y, y.detach()))
                assert error <= tolerance * size, (dtype, method, error, size)
    say(methods=len(METHODS))
    distributed.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
