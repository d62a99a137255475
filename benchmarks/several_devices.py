"""Attention over several devices: conformance, faults of timing, overlap and scaling, beside PyTorch's.

    mpiexec -n 2 python -m benchmarks.several_devices --output FILE          CuPy over NCCL, one GPU a rank
    torchrun --nproc-per-node 2 -m benchmarks.several_devices --output FILE  tensors in a process group, and PyTorch's
    python -m benchmarks.several_devices --cpu --output FILE                 ranks x threads on this CPU, and the model

The module is not called distributed, as a package of Dask is.

Where wheels are unpacked instead of installed, mpiexec is in mpich-*.data/data/bin, to be made executable and put on
PATH, and its libraries are in mpich-*.data/data/lib, to be put on LD_LIBRARY_PATH.

--parts a,b runs some of the parts alone, --seconds bounds each of them. Every result is a line of JSON, printed by rank
0 at once. One device runs the same tokens alone for comparison: efficiency is its time over that of all ranks times
their number.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HEADS, HEADS_KV, DIM = 32, 8, 128
TOTALS = 65_536, 131_072, 262_144, 524_288


class Run:
    """A rank of the benchmark."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.started = time.monotonic()
        self.facts: dict[str, Any] = {"date": time.strftime("%Y-%m-%d", time.gmtime())}
        if "TORCHELASTIC_RUN_ID" in os.environ or arguments.torch:
            self._with_torch()
        else:
            self._with_mpi()

    def _with_mpi(self) -> None:
        from mpi4py import MPI

        from flashkit.distributed import Comm
        from flashkit.distributed.nccl import library

        self.rank, self.ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        self.library, self.barrier = "numpy" if self.arguments.numpy else "cupy", MPI.COMM_WORLD.Barrier
        if self.arguments.numpy:
            self.xp: Any = np
            self.synchronize: Callable[[], Any] = lambda: None
        else:
            import cupy

            self.xp = cupy
            cupy.cuda.Device(self.rank % cupy.cuda.runtime.getDeviceCount()).use()
            self.synchronize = lambda: cupy.cuda.get_current_stream().synchronize()
            self.facts["device"] = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
            nccl = library()
            self.facts |= {"cupy": cupy.__version__, "nccl": nccl.get_version() if nccl.available else None}
        self.comm: Any = Comm(MPI.COMM_WORLD, timeout=120)
        self.slowest = lambda seconds: MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)

    def _with_torch(self) -> None:
        import torch
        from torch import distributed

        import flashkit.torch

        self.library, self.torch = "torch", torch
        distributed.init_process_group("nccl")
        self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        torch.cuda.set_device(self.rank % torch.cuda.device_count())
        self.synchronize, self.barrier = torch.cuda.synchronize, distributed.barrier
        self.comm = flashkit.torch.Comm(distributed.group.WORLD)
        self.facts |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

        def slowest(seconds: float) -> float:
            value = torch.tensor(seconds, dtype=torch.float64, device="cuda")
            distributed.all_reduce(value, distributed.ReduceOp.MAX)
            return float(value)

        self.slowest = slowest

    def say(self, part: str, **facts: Any) -> None:
        """Print and store a line, if this is rank 0."""
        if self.rank:
            return
        line = json.dumps({"part": part, "library": self.library, "ranks": self.ranks, **self.facts, **facts})
        print(line, flush=True)
        if self.arguments.output:
            path = Path(self.arguments.output)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    def timed(self, call: Callable[[], Any], rounds: int = 3) -> float:
        """Median seconds of the slowest rank, after a call that is not counted; of one call if there are 0 rounds."""
        taken = []
        for _ in range(rounds + 1):
            self.synchronize()
            self.barrier()
            begin = time.perf_counter()
            result = call()
            self.synchronize()
            del result
            taken.append(self.slowest(time.perf_counter() - begin))
        return statistics.median(taken[1:] or taken)

    def random(self, seed: int, *shape: int) -> Any:
        """Normal numbers, bfloat16 on a GPU, float32 on a CPU; the same on all ranks."""
        if self.library == "torch":
            generator = self.torch.Generator("cuda").manual_seed(seed)
            return self.torch.randn(shape, generator=generator, device="cuda", dtype=self.torch.bfloat16)
        if self.arguments.numpy:
            return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        import ml_dtypes

        found = self.xp.empty(shape, ml_dtypes.bfloat16)
        generator = self.xp.random.default_rng(seed)
        flat, piece = found.reshape(-1), 1 << 26
        for first in range(0, flat.size, piece):
            part = flat[first : first + piece]
            part[...] = generator.standard_normal(part.size, dtype=np.float32).astype(ml_dtypes.bfloat16)
        return found

    def sequence(self, tokens: int, heads: int = HEADS, heads_kv: int = HEADS_KV, dim: int = DIM) -> tuple[Any, ...]:
        """q, k, v and dout of so many tokens."""
        return tuple(self.random(n, 1, h, tokens, dim) for n, h in enumerate((heads, heads_kv, heads_kv, heads)))

    def vjp(self, *tensors: Any, comm: Any = None, **options: Any) -> tuple[Any, Any]:
        """out, and what gives the gradients of q, k and v, by one device or by all."""
        import flashkit

        if self.library != "torch":
            return (flashkit if comm is None else comm).attention_vjp(*tensors, **options)
        given = [x.detach().requires_grad_() for x in tensors]
        out = (flashkit.torch if comm is None else comm).attention(*given, **options)
        return out, lambda dout: self.torch.autograd.grad(out, given, dout, retain_graph=True)


def as_float(x: Any) -> np.ndarray:
    """An array of any library as float64 on the host."""
    if hasattr(x, "float"):
        return x.detach().double().cpu().numpy()
    return np.asarray(x.astype(np.float32).get() if hasattr(x, "get") else x, np.float64)


# --- parts ------------------------------------------------------------------------------------------------------------


def conformance(run: Run) -> None:
    """Every method against one device: relative errors of out and gradients against float32, of both."""
    n, axis = 2048, -2
    cu = np.array([0, 300, 301, 1100, 2000])
    cu = run.torch.from_numpy(cu) if run.library == "torch" else cu
    cases: dict[str, dict[str, Any]] = {
        "zigzag causal": dict(causal=True, order="zigzag"),
        "striped causal": dict(causal=True, order="striped"),
        "contiguous window": dict(window=(300, 0)),
        "zigzag window": dict(window=(300, 100), order="zigzag"),
        "packed": dict(causal=True, cu_seqlens=cu, order="zigzag"),
        "softcap": dict(softcap=20.0, causal=True, order="zigzag"),
    }
    for name, options in cases.items():
        q, k, v, dout = run.sequence(n, 16, 4, 128)
        axis = -2
        if "cu_seqlens" in options:
            q, k, v, dout = (x[0].swapaxes(0, 1) for x in (q, k, v, dout))
            axis = -3
        plain = {each: x for each, x in options.items() if each != "order"}
        wide = (lambda x: x.float()) if run.library == "torch" else (lambda x: x.astype(np.float32))
        true_out, true_vjp = run.vjp(*map(wide, (q, k, v)), **plain)
        true = [true_out, *true_vjp(wide(dout))]
        one_out, one_vjp = run.vjp(q, k, v, **plain)
        one = [one_out, *one_vjp(dout)]
        order = options.get("order", "contiguous")
        for method in ("ring", "heads", "gather"):
            parts = [run.comm.shard(x, axis, order=order) for x in (q, k, v)]
            out, vjp = run.vjp(*parts, comm=run.comm, method=method, **options)
            found = [out, *vjp(run.comm.shard(dout, axis, order=order))]
            found = [run.comm.gather(x.detach() if run.library == "torch" else x, axis, order=order) for x in found]
            errors = {}
            for what, x, y, z in zip(("out", "dq", "dk", "dv"), found, one, true, strict=True):
                x, y, z = map(as_float, (x, y, z))
                errors[what] = [float(f"{abs(e - z).max() / abs(z).max():.3g}") for e in (x, y)]
            ok = all(many <= 2 * alone + 2**-8 for many, alone in errors.values())
            run.say("conformance", case=name, method=method, ok=ok, errors=errors)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("zigzag", {"causal": True}), ("striped", {"causal": True}), ("contiguous", {"window": (90, 20)}), ("zigzag", {}),
]  # fmt: skip


def random_calls(run: Run) -> None:
    """Calls of random methods, kinds and sizes, for a hang or an error. Small, so that they meet often, and of few
    kinds, which share kernels, so that the time is theirs and not the compiler's.
    """
    rng = np.random.default_rng(11)
    count, begin = 0, time.monotonic()
    while count < run.arguments.calls:
        stop = run.slowest(float(time.monotonic() - begin > run.arguments.seconds)) > 0
        if stop:
            break
        n = int(rng.integers(run.ranks * 2, 700))
        q, k, v, dout = (run.random(count * 4 + i, 1, h, n, 64) for i, h in enumerate((8, 2, 2, 8)))
        order, options = KINDS[rng.integers(len(KINDS))]
        method = str(rng.choice(["ring", "heads", "gather"]))
        parts = [run.comm.shard(x, order=order) for x in (q, k, v)]
        out, vjp = run.vjp(*parts, comm=run.comm, method=method, order=order, **options)
        if rng.integers(2):
            vjp(run.comm.shard(dout, order=order))
        if count % 50 == 0:
            own = run.comm.shard(run.vjp(q, k, v, **options)[0], order=order) if run.library != "torch" else None
            if own is not None:
                error = abs(as_float(own) - as_float(out)).max()
                assert error < 0.05, (count, method, order, options, error)
        count += 1
    run.synchronize()
    run.say("random calls", calls=count, seconds=round(time.monotonic() - begin, 1))


def overlap(run: Run) -> None:
    """The timeline of a ring: when each step's attention and the transfer behind it ran, in milliseconds, by events."""
    if run.library == "torch" or run.arguments.numpy:
        return
    import cupy

    from flashkit import api

    q, k, v, _ = (run.comm.shard(x, order="zigzag") for x in run.sequence(65_536 * run.ranks))
    call = lambda: run.comm.attention(q, k, v, causal=True, order="zigzag")
    call()
    begin = cupy.cuda.Event()
    spans: dict[str, list[tuple[Any, Any]]] = {"attention": [], "transfer": []}
    transport = run.comm._on_devices
    stream, plain_exchange, plain_attention = transport._stream, transport.exchange, api.attention

    def marked(where: Any, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            events = cupy.cuda.Event(), cupy.cuda.Event()
            if where is not None:  # after what the transfer waits for
                ready = cupy.cuda.Event()
                ready.record(cupy.cuda.get_current_stream())
                where.wait_event(ready)
            events[0].record(where or cupy.cuda.get_current_stream())
            result = call(*arguments, **options)
            events[1].record(where or cupy.cuda.get_current_stream())
            spans[name].append(events)
            return result

        return wrapped

    transport.exchange = marked(stream, plain_exchange, "transfer")
    api.attention = marked(None, plain_attention, "attention")
    try:
        for _ in range(2):
            for each in spans.values():
                each.clear()
            run.synchronize()
            run.barrier()
            begin.record(cupy.cuda.get_current_stream())
            call()
            run.synchronize()
    finally:
        transport.exchange, api.attention = plain_exchange, plain_attention
    stream.synchronize()
    at = lambda event: round(cupy.cuda.get_elapsed_time(begin, event), 2)
    lines = {name: [[at(first), at(last)] for first, last in each] for name, each in spans.items()}
    hidden = sum(
        max(0.0, min(last, end) - max(first, start))
        for first, last in lines["transfer"] for start, end in lines["attention"]
    )  # fmt: skip
    moved = sum(last - first for first, last in lines["transfer"])
    run.say("overlap", tokens=65_536 * run.ranks, hidden=round(hidden / max(moved, 1e-9), 3), milliseconds=lines)


def bandwidth(run: Run) -> None:
    """What a rank sends to the next one while it receives as much, in 1e9 bytes/s."""
    if run.library == "torch":
        return
    for size in (1 << 20, 1 << 24, 1 << 28):
        run.say("bandwidth", bytes=size, gbs=round(run.comm.bandwidth_gbs(size, run.xp), 2))


def scaling(run: Run) -> None:
    """Causal zigzag from 64k to 512k tokens against one device, forward and backward."""
    begin = time.monotonic()
    for total in run.arguments.totals:
        if time.monotonic() - begin > run.arguments.seconds:
            run.say("scaling", tokens=total, skipped="out of time")
            continue
        q, k, v, dout = run.sequence(total)
        rounds = 5 if total <= 131_072 else 2
        alone = both(run, (q, k, v), dout, None, rounds, causal=True)
        parts = [run.comm.shard(x, order="zigzag") for x in (q, k, v, dout)]
        del q, k, v, dout
        for method in ("ring", "heads", "gather"):
            if method != "ring" and total > 262_144:
                continue
            taken = both(run, parts[:3], parts[3], run.comm, rounds, causal=True, order="zigzag", method=method)
            efficiency = {name: round(alone[name] / taken[name] / run.ranks, 4) for name in taken}
            flops = {"forward": 2.0 * HEADS * DIM * total**2, "backward": 5.0 * HEADS * DIM * total**2}
            rate = {name: round(flops[name] / taken[name] / run.ranks / 1e12, 1) for name in taken}
            run.say(
                "scaling", tokens=total, method=method, seconds=taken, one_device=alone, efficiency=efficiency,
                tflops_per_rank=rate,
            )  # fmt: skip
        del parts


def both(run: Run, tensors: Any, dout: Any, comm: Any, rounds: int, **options: Any) -> dict[str, float]:
    """Seconds of the forward and of the backward pass."""
    import flashkit

    if run.library == "torch":
        forward_only = flashkit.torch.attention if comm is None else comm.attention
    else:
        forward_only = flashkit.attention if comm is None else comm.attention
    forward = run.timed(lambda: forward_only(*tensors, **options), rounds)
    _, vjp = run.vjp(*tensors, comm=comm, **options)
    return {"forward": forward, "backward": run.timed(lambda: vjp(dout), rounds)}


def context_parallel(run: Run) -> None:
    """PyTorch's context-parallel scaled_dot_product_attention on the same tokens; KV heads repeated."""
    if run.library != "torch":
        return
    torch = run.torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (run.ranks,))
    functional = torch.nn.functional  # whose function context_parallel replaces while it lasts
    begin = time.monotonic()
    for total in run.arguments.totals:
        if time.monotonic() - begin > run.arguments.seconds:
            run.say("context_parallel", tokens=total, skipped="out of time")
            continue
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            try:
                q, k, v, dout = run.sequence(total, HEADS, HEADS)
                rounds = 5 if total <= 131_072 else 2
                with (
                    sdpa_kernel(getattr(SDPBackend, backend)),
                    parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2, 2, 2, 2]),
                ):
                    taken = {
                        "forward": run.timed(
                            lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True),  # noqa: B023
                            rounds,
                        )
                    }
                    leaves = [x.clone().requires_grad_() for x in (q, k, v)]  # buffers are resized at the end
                    found = [functional.scaled_dot_product_attention(*leaves, is_causal=True)]
                    gradients = lambda: torch.autograd.grad(found, leaves, dout, retain_graph=True)  # noqa: B023
                    taken["backward"] = run.timed(gradients, rounds)
                    found.clear()
                    leaves.clear()
                run.say("context_parallel", tokens=total, backend=backend, seconds=taken)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"[:300]
                run.say("context_parallel", tokens=total, backend=backend, error=text)
            q = k = v = dout = None
            torch.cuda.empty_cache()


PARTS = {
    "bandwidth": bandwidth, "conformance": conformance, "random": random_calls, "scaling": scaling, "overlap": overlap,
    "context_parallel": context_parallel,
}  # fmt: skip


# --- what is stored ---------------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results" / "distributed"


def stored(file: Path) -> list[dict[str, Any]]:
    """The scaling lines of a result file, the last of each kind."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [line for line in lines if line["part"] in ("scaling", "context_parallel") and "seconds" in line]
    return list({(x["library"], x["part"], x.get("method", x.get("backend")), x["tokens"]): x for x in found}.values())


def plot(file: Path, output: Path) -> Path:
    """Seconds of both passes over the number of tokens: all methods, one device, and PyTorch's."""
    import figures

    lines = stored(file)
    figure = figures.new(9, 2.9)
    handles: dict[str, Any] = {}
    for axes, name in zip(figure.subplots(1, 2), ("forward", "backward"), strict=True):
        series: dict[str, list[tuple[int, float]]] = {}
        for line in lines:
            label = f"{line['library']} {line.get('method') or line['backend']}"
            series.setdefault(label, []).append((line["tokens"], line["seconds"][name]))
            if line.get("method") == "ring" and line["library"] == "cupy":
                series.setdefault("one device", []).append((line["tokens"], line["one_device"][name]))
        for label, points in series.items():
            handles[label] = axes.plot(*zip(*sorted(points), strict=True), "o-", markersize=3)[0]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"{name}, {lines[0]['ranks']} ranks")
        axes.set_xlabel("tokens")
    figure.axes[0].set_ylabel("seconds")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4)
    return Path(figures.save(figure, output / f"distributed-{file.stem}.svg"))


# --- the CPU ----------------------------------------------------------------------------------------------------------


def cpu_rank(run: Run) -> None:
    """A line of the CPU's table: all ranks with their threads, and the model's time from that of one process."""
    from flashkit.distributed import predict
    from flashkit.distributed.passes import add_scaled

    facts = json.loads(run.arguments.facts)
    tensors = run.sequence(facts["tokens"], 16, 4, 64)
    q, k, v, dout = (run.comm.shard(x, order="zigzag") for x in tensors)
    gbs, latency = run.comm.bandwidth_gbs(1 << 24, np), 8e-9 / run.comm.bandwidth_gbs(8, np, 50)
    total, weight = np.zeros((1, 16, q.shape[2], 64), np.float32), np.ones((1, 16, q.shape[2], 1), np.float32)
    part = np.zeros_like(total)
    merge_gbs = 12 * total.size / run.timed(lambda: add_scaled(total, part, weight, weight), 5) / 1e9
    methods = run.arguments.methods.split(",") if run.ranks > 1 else ["ring"]
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(4):  # the first warms up; a shared machine's pace changes from round to round
        each = {"": both(run, tensors[:3], tensors[3], None, 0, causal=True)}  # with all cores in use
        for method in methods:
            each[method] = both(run, (q, k, v), dout, run.comm, 0, causal=True, order="zigzag", method=method)
        rounds.append(each)
    for method in methods:
        models = [
            predict(
                *tensors[:3], ranks=run.ranks, method=method, order="zigzag", causal=True, bandwidth_gbs=gbs,
                memory_gbs=merge_gbs, latency=latency, seconds=each[""],
            ).seconds
            for each in rounds[1:]
        ]  # fmt: skip
        taken = [each[method] for each in rounds[1:]]

        def middle(numbers: list[dict[str, float]]) -> dict[str, float]:
            return {name: statistics.median(each[name] for each in numbers) for name in numbers[0]}

        ratios = [{name: model[name] / own[name] for name in own} for model, own in zip(models, taken, strict=True)]
        seconds, alone = middle(taken), facts["alone"] or middle([each[""] for each in rounds[1:]])
        run.say(
            "cpu", method=method, threads=facts["threads"], tokens=facts["tokens"], seconds=seconds,
            one_process=middle([each[""] for each in rounds[1:]]), bandwidth_gbs=gbs, merge_gbs=merge_gbs,
            latency=latency, predicted=middle(models),
            ratio={name: round(x, 3) for name, x in middle(ratios).items()},
            efficiency={name: round(alone[name] / seconds[name] / run.ranks, 3) for name in seconds},
        )  # fmt: skip


def cpu(arguments: argparse.Namespace) -> None:
    """Ranks x threads: each rank has the same number of threads as the one process that it is compared with."""
    from benchmarks.compare import ON_A_CPU

    cores = arguments.cores or len(os.sched_getaffinity(0))
    mpiexec = Path(sys.executable).parent / "mpiexec"
    program = str(mpiexec) if mpiexec.exists() else "mpiexec"
    threads = max(cores // 8, 1)
    alone: Any = None
    ranks = [arguments.least_ranks]
    while ranks[-1] * 2 * threads <= cores:
        ranks.append(ranks[-1] * 2)
    for n in ranks:
        facts = {"tokens": arguments.tokens, "threads": threads, "alone": alone}
        command = [
            program, "-n", str(n), sys.executable, "-m", "benchmarks.several_devices", "--numpy", "--facts",
            json.dumps(facts), "--output", arguments.output or "", "--methods", arguments.methods,
        ]  # fmt: skip
        env = {**os.environ, **ON_A_CPU, "FLASHKIT_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        if n == 1:
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            alone = lines[0]["one_process"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="", help="file of JSON lines to append to")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=150, help="after which a part begins nothing more")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--totals", type=lambda text: [int(x) for x in text.split(",")], default=list(TOTALS))
    parser.add_argument("--torch", action="store_true", help="a process group, also without torchrun's environment")
    parser.add_argument("--numpy", action="store_true", help="arrays of NumPy")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--methods", default="ring,heads,gather", help="of --cpu")
    parser.add_argument("--least-ranks", type=int, default=1, help="of --cpu")
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--facts", default="")
    arguments = parser.parse_args()
    if arguments.cpu:
        cpu(arguments)
        return
    run = Run(arguments)
    if arguments.facts:
        cpu_rank(run)
        return
    for name in arguments.parts.split(","):
        begin = time.monotonic()
        try:
            PARTS[name](run)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            print(json.dumps({"part": name, "rank": run.rank, "error": text}), flush=True)
            if "no longer usable" in str(error) or isinstance(error, TimeoutError):
                os._exit(1)
        run.say("seconds", of=name, seconds=round(time.monotonic() - begin, 1))
    run.synchronize()
    run.comm.close()


if __name__ == "__main__":
    main()
