"""How attention on a CPU scales with threads, and how near decoding comes to the read bandwidth.

    python benchmarks/threads.py scaling [--threads 1,2,4,8,16] [--dtypes bfloat16,float32] [--output FILE]
    python benchmarks/threads.py decode [--output FILE]
    python benchmarks/threads.py tiles "512x128 2" "512x96 4" [--dims 64,128]
    python benchmarks/threads.py busy [--seconds 1]

All contenders of a case take turns in one process. A line of the output is one case: seconds of each contender, and
what follows from them: for `scaling` the time of one thread over that of each number of threads, for `decode` the share
of the rate at which a loop reads as many bytes. `tiles` times tiles of the forward pass in bfloat16, block_q x
block_k and the vectors of a panel, beside the tile in use. `busy` prints calls a second of attention, and answers of
four tokens by `flashkit generate`, beside 0, 1 and 4 busy processes, and their share of those beside none, over that of
a loop of NumPy on one thread. Bind the process to one hardware thread of each core, for example by taskset: threads of
one core share its units.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import flashkit
from flashkit import settings
from flashkit.devices import timing
from flashkit.devices.timing import Timing
from flashkit.tools.bench.cases import Case
from flashkit.tools.bench.environment import machine
from flashkit.tools.bench.yardsticks import read

Calls = dict[str, Callable[[], Any]]

TOKENS, DIMS = 4096, (64, 128)
DECODING = (1, 32768), (16, 8192)
"""Batch and keys of each entry, with 32 heads, 8 of keys and values."""


def with_threads(count: int, call: Callable[[], Any]) -> Callable[[], Any]:
    def limited() -> Any:
        os.environ[settings.NUM_THREADS.name] = str(count)
        return call()

    return limited


def scaling(given: argparse.Namespace) -> Iterator[tuple[str, Calls, dict[str, Any]]]:
    for dtype in given.dtypes.split(","):
        for dim in DIMS:
            q, k, v, dout = Case(TOKENS, dim, dtype=dtype).arrays()
            forward = partial(flashkit.attention, q, k, v, backend="cpu")
            backward = partial(flashkit.attention_vjp(q, k, v, backend="cpu")[1], dout)
            for direction, call in (("forward", forward), ("backward", backward)):
                calls = {str(count): with_threads(count, call) for count in map(int, given.threads.split(","))}
                yield f"{dtype}, {TOKENS} tokens, head dim {dim}, {direction}", calls, {}


def decode(given: argparse.Namespace) -> Iterator[tuple[str, Calls, dict[str, Any]]]:
    os.environ[settings.NUM_THREADS.name] = given.threads.split(",")[-1]
    for batch, keys in DECODING:
        for dtype in ("float32", "bfloat16", "int8"):
            shape = batch, 8, keys, 128
            q = np.random.default_rng(0).standard_normal((batch, 32, 1, 128), np.float32)
            arrays: list[Any]
            if dtype == "int8":
                arrays = [np.random.default_rng(i).integers(-127, 128, shape, np.int8) for i in range(2)]
                scale = np.full((*shape[:3], 1), 1 / 64, np.float32)
                k, v = (flashkit.Quantized(x, scale, per="token") for x in arrays)
                stored = [*arrays, scale, scale.copy()]
            else:
                q, *arrays = (x for x in Case(1, 128, 32, dtype, False, batch, keys, 8).arrays()[:3])
                (k, v), stored = arrays, arrays
            calls = {"flashkit": partial(flashkit.attention, q, k, v, backend="cpu"),
                     "read": read(stored, int(os.environ[settings.NUM_THREADS.name]))}  # fmt: skip
            yield f"{dtype}, batch {batch}, {keys} keys", calls, {"bytes": sum(x.nbytes for x in stored)}


def tiles(given: argparse.Namespace) -> Iterator[tuple[str, Calls, dict[str, Any]]]:
    from flashkit.backends.cpu import threads
    from flashkit.devices.io_model import CpuTile
    from flashkit.tools.autotune.cpu import FULL, CpuTuner
    from flashkit.tools.autotune.targets import Target

    count = threads.count()
    for dim in map(int, given.dims.split(",")):
        for tokens in map(int, given.tokens.split(",")):
            target, runner = Target("forward", "bfloat16", dim), CpuTuner()
            runner.begin(replace(FULL, tokens=tokens), [target])
            task = runner.task(target)
            calls = {"in use": runner.call(target, task.plan.tile, task)}
            for text in given.tiles:
                block_q, block_k, vectors = map(int, text.replace("x", " ").split())
                tile = CpuTile(block_q, block_k, 16, 24 // vectors, vectors)
                calls[text] = runner.call(target, tile, task)
            yield f"{tokens} tokens, head dim {dim}, {count} threads", calls, {"in use": str(task.plan.tile)}


def described(what: str, taken: dict[str, Timing]) -> dict[str, Any]:
    first = next(iter(taken))
    if what == "decode":
        return {"share": taken["read"].over(taken["flashkit"])}
    return {"times_as_fast": {name: taken[first].over(timed) for name, timed in taken.items()}}


def busy(seconds: float) -> None:
    """Each state of the machine three times, in turns: medians."""
    numbers = np.ones(100_000, np.float32)
    calls: Calls = {"numpy": partial(np.multiply, numbers, numbers, out=numbers)}
    for n in (256, 1024, 4096):
        q, k, v, _ = Case(n, 64).arrays()
        calls[f"{n} tokens"] = partial(flashkit.attention, q, k, v, causal=True, backend="cpu")
    calls["generate"] = answering(4)
    rates: dict[int, list[list[float]]] = {0: [], 1: [], 4: []}
    for others in 3 * [*rates]:
        running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
        try:
            time.sleep(0.3)  # they start
            rates[others].append([_rate(call, seconds) for call in calls.values()])
        finally:
            for one in running:
                one.kill()
                one.wait()
    alone, *_ = medians = [np.median(rows, axis=0) for rows in rates.values()]
    for others, median in zip(rates, medians, strict=True):
        shares = median / alone
        print(others, "busy:", {name: f"{rate:.0f}/s, {share:.2f}" for name, rate, share in
                                zip(calls, median, shares / shares[0], strict=True)}, flush=True)  # fmt: skip


def answering(tokens: int) -> Callable[[], Any]:
    """Continue a prompt, as `flashkit generate` does."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from examples.generate.checkpoint import Checkpoint
    from examples.generate.model import Llama
    from examples.generate.sampling import generate

    model = Llama(Checkpoint())
    return lambda: list(generate(model, [[1, 2, 3, 4]], tokens, None))


def _rate(call: Callable[[], Any], seconds: float) -> float:
    call()
    count, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        call()
        count += 1
    return count / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scaling", "decode", "tiles", "busy"))
    parser.add_argument("tiles", nargs="*")
    parser.add_argument("--threads", default=os.environ.get("NUMBA_NUM_THREADS", str(os.cpu_count())))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--dims", default="64,128", help="of tiles")
    parser.add_argument("--tokens", default="2048", help="of tiles")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each case; three rounds at least")
    parser.add_argument("--output", type=Path, help="append a JSON line of each case")
    given = parser.parse_intermixed_args()
    if given.what == "busy":
        return busy(given.seconds)
    for label, calls, more in {"scaling": scaling, "decode": decode, "tiles": tiles}[given.what](given):
        taken = timing.interleaved(calls, rounds=given.rounds, budget=given.seconds, min_rounds=3)
        found = described(given.what, taken)
        print(label, {name: f"{t.median * 1e3:.3f} ms" for name, t in taken.items()}, found, flush=True)
        if given.output:
            seconds = {name: t.as_dict() for name, t in taken.items()}
            line = {"what": given.what, "case": label, "seconds": seconds, **found, **more, "machine": machine()}
            with given.output.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
