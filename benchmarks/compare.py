"""Two checkouts of flashkit against each other, in turns, in one process: is this one as fast as that one?

    git worktree add ../before REVISION
    python benchmarks/compare.py ../before --output compare.jsonl
    python benchmarks/compare.py ../before --backend cpu --suite float32,bfloat16
    python benchmarks/compare.py ../before --backend cpu --suite calls --pause 2
    python benchmarks/compare.py . --old-backend cupy_raw --backend numba_cuda --only "dtype=bfloat16 d=128"

Each cell is old over new, forward and backward apart, on random data; above 1 this checkout is faster. It is the median
over rounds, in each of which both take turns. Programs timed one after the other run at other clocks and beside other
processes, which changes figures by up to 10 %; and the fastest rounds hide what is slow where a core is shared.

With --pause, each call follows so many milliseconds of other work of the calling thread: threads of the pool may have
fallen asleep.

On a CPU the process keeps the memory that it frees. glibc would give an array's back to the system or not, by what was
freed before, and fresh pages are an eighth of a backward pass of 512 tokens. Idle threads of OpenMP, which the old
checkout may use, sleep: they would spin on the cores that the new one's workers need.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parents[1]
ON_A_CPU = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**40), "OMP_WAIT_POLICY": "passive"}
BACKENDS = {"cpu": "CpuBackend", "cupy_raw": "CupyRawBackend", "numba_cuda": "NumbaCudaBackend"}

Case = dict[str, Any]


def cases(suite: str) -> list[Case]:
    """Shapes and options; CUDA's have 16,384 tokens and 2048 columns of all heads, as others time attention."""
    cuda = {"bfloat16": (64, 128, 256), "float16": (64, 128), "float32": (64, 128)}
    found: list[Case] = []
    if suite == "cuda":
        for dtype, dims in cuda.items():
            lengths = (1024, 4096, 16384) if dtype == "bfloat16" else (1024, 4096)
            found += [
                {"dtype": dtype, "d": d, "heads": 2048 // d, "n": n, "batch": 16384 // n, "causal": causal}
                for d in dims
                for causal in (False, True)
                for n in lengths
            ]
        base = {"dtype": "bfloat16", "d": 128, "heads": 16, "n": 4096, "batch": 4, "causal": True}
        found += [{**base, "softcap": 30.0}, {**base, "alibi": True}, {**base, "deterministic": True}]
        found += [{**base, "window": (1024, 0), "n": 16384, "batch": 1}, {**base, "kept": 0.25, "causal": False}]
        found += [{**base, "n": 512, "batch": 32}, {**base, "d": 64, "heads": 32, "n": 300, "batch": 50}]
        found += [{**base, "n": 1, "n_k": 32768, "batch": 16, "heads": 32, "heads_kv": 8, "causal": False}]
        return found
    if suite == "calls":
        base = {"dtype": "float32", "heads": 8, "batch": 1, "d": 64}
        decoding = {**base, "n": 1, "d": 128, "heads": 32, "heads_kv": 8, "causal": False}
        tokens = [{**base, "n": n, "causal": True} for n in (256, 512, 1024, 4096)]
        return [*tokens, *({**decoding, "n_k": n} for n in (1024, 8192, 32768))]
    grid = [(n, d, causal) for d in (64, 128) for causal in (False, True) for n in (512, 2048)]
    if suite == "shapes":
        grid = [(777, 64, False), (384, 80, False), (384, 80, True), (1536, 80, False), (1536, 96, False)]
    dtype = "bfloat16" if suite == "shapes" else suite
    return [{"dtype": dtype, "d": d, "heads": 8, "n": n, "batch": 1, "causal": causal} for n, d, causal in grid]


def described(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in case.items() if value is not False)


def options(case: Case, package: Any, xp: Any) -> dict[str, Any]:
    """Keyword arguments of attention; xp: whose arrays they are."""
    found = {name: case[name] for name in ("causal", "softcap", "window", "deterministic") if case.get(name)}
    if case.get("alibi"):
        found["alibi_slopes"] = xp.asarray(np.geomspace(0.5, 0.004, case["heads"]), np.float32)
    if "kept" in case:
        blocks = case["n"] // 128
        grid = np.random.default_rng(0).random((blocks, blocks)) < case["kept"]
        found["block_mask"] = package.BlockMask.from_dense(grid, 128, 128)
    return found


def link(folder: Path, checkout: Path, name: str) -> None:
    """Make a checkout's flashkit importable under another name, by `load`."""
    (folder / name).mkdir()
    (folder / name / name).symlink_to(checkout.resolve() / "flashkit")
    (folder / name / "device_profiles").symlink_to(checkout.resolve() / "device_profiles")


def load(folder: Path, name: str, backend: str) -> Any:
    """The package that `link` made, with this backend alone."""
    sys.path.insert(0, str(folder / name))
    package = importlib.import_module(name)
    kind = getattr(importlib.import_module(f"{name}.backends.{backend}.backend"), BACKENDS[backend])
    found = {backend: kind()}
    dispatch = importlib.import_module(f"{name}.dispatch")
    dispatch.registry = lambda: found  # the entry points are of the installed one
    return package


def array_library(backend: str) -> Any:
    if backend == "cpu":
        return np
    import cupy

    return cupy


def arrays(case: Case, backend: str) -> tuple[Any, ...]:
    import ml_dtypes

    xp = array_library(backend)
    rng, dtype = np.random.default_rng(1), np.dtype(getattr(ml_dtypes, case["dtype"], case["dtype"]))
    n_k, heads_kv = case.get("n_k", case["n"]), case.get("heads_kv", case["heads"])
    shapes = [(case["heads"], case["n"]), (heads_kv, n_k), (heads_kv, n_k), (case["heads"], case["n"])]
    return tuple(
        xp.asarray(rng.standard_normal((case["batch"], heads, n, case["d"]), dtype=np.float32)).astype(dtype)
        for heads, n in shapes
    )


def attention_call(case: Case, package: Any, given: tuple[Any, ...], direction: str, backend: str) -> Callable[[], Any]:
    q, k, v, dout = given
    named = options(case, package, array_library(backend))
    if direction == "forward":
        return partial(package.attention, q, k, v, **named)
    return partial(package.attention_vjp(q, k, v, **named)[1], dout)


def other_work(seconds: float) -> None:
    numbers, end = np.ones(10_000, np.float32), time.perf_counter() + seconds
    while time.perf_counter() < end:
        np.multiply(numbers, numbers, out=numbers)


def timed(old: Callable[[], Any], new: Callable[[], Any], backend: str, seconds: float, pause: float) -> np.ndarray:
    """Times of (old, new) in each round, which come in an order that changes."""
    if backend == "cpu":

        def sample(call: Callable[[], Any], repeats: int) -> float:
            taken = 0.0
            for _ in range(repeats):
                if pause:
                    other_work(pause)
                start = time.perf_counter()
                call()
                taken += time.perf_counter() - start
            return taken
    else:
        import cupy

        begin, end = cupy.cuda.Event(), cupy.cuda.Event()

        def sample(call: Callable[[], Any], repeats: int) -> float:
            begin.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3

    for call in (old, new):
        call()
        sample(call, 2)
    repeats = max(1, math.ceil(8e-3 / max(sample(new, 1) + pause, 1e-7)))
    rounds: list[tuple[float, float]] = []
    stop = time.perf_counter() + seconds
    while len(rounds) < 6 or time.perf_counter() < stop:
        order = (old, new) if len(rounds) % 2 == 0 else (new, old)
        taken = {call: sample(call, repeats) for call in order}
        rounds.append((taken[old], taken[new]))
        if backend != "cpu":
            time.sleep(0.004)  # in pauses the chip keeps its clock
    return np.array(rounds)


def warm(folder: Path, name: str, backend: str, case: Case) -> str:
    """Compile a case's kernels in a process of its own; the cache keeps them."""
    package = load(folder, name, backend)
    sys.modules["flashkit"] = package  # the text of CPU kernels imports its parts by this name
    try:
        tensors = arrays(case, backend)  # all of it: how much there is to do chooses kernels, too
        for direction in directions(case):
            attention_call(case, package, tensors, direction, backend)()
    except Exception as error:
        return f"{name} {case}: {error!r}"
    return ""


def directions(case: Case) -> tuple[str, ...]:
    return ("forward",) if case["n"] == 1 else ("forward", "backward")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the checkout to compare with")
    parser.add_argument("--new", type=Path, default=HERE)
    parser.add_argument("--backend", default="cupy_raw", choices=list(BACKENDS))
    parser.add_argument("--suite", default="cuda", help="cuda, or of the CPU's: float32,bfloat16,shapes,calls")
    parser.add_argument("--pause", type=float, default=0.0, help="milliseconds of other work before each call on a CPU")
    parser.add_argument("--old-backend", choices=list(BACKENDS), help="the old checkout's, if another")
    parser.add_argument("--only", default="", help="cases that have this in their description, for example softcap=")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each cell")
    workers = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument("--workers", type=int, default=workers, help="processes that compile beforehand")
    parser.add_argument("--output", type=Path, help="append a JSON line of each cell")
    given = parser.parse_args()
    if given.backend == "cpu" and not ON_A_CPU.keys() <= os.environ.keys():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ON_A_CPU)
    every = [case for suite in given.suite.split(",") for case in cases(suite) if given.only in described(case)]
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        return compare(given, every, Path(folder))


def compare(given: argparse.Namespace, every: list[Case], folder: Path) -> int:
    names = "flashkit_old", "flashkit_new"
    backends = given.old_backend or given.backend, given.backend
    for name, checkout, backend in zip(names, (given.old, given.new), backends):
        link(folder, checkout, name)
        with ProcessPoolExecutor(given.workers, get_context("spawn")) as pool:
            for complaint in pool.map(partial(warm, folder, name, backend), every):
                if complaint:
                    print(complaint, file=sys.stderr)
    sys.modules["flashkit"] = None  # type: ignore[assignment]  # compiling here would mix the checkouts
    old, new = (load(folder, name, backend) for name, backend in zip(names, backends))
    found: list[float] = []
    for case in every:
        tensors = arrays(case, given.backend)
        for direction in directions(case):
            both = (attention_call(case, each, tensors, direction, given.backend) for each in (old, new))
            taken = timed(*both, given.backend, given.seconds, given.pause / 1e3)
            middle, low, high = (float(np.quantile(taken[:, 0] / taken[:, 1], at)) for at in (0.5, 0.2, 0.8))
            found.append(middle)
            print(f"{middle:.3f} ({low:.3f} {high:.3f})  {direction:8} {described(case)}", flush=True)
            if given.output:
                line = {"case": case, "direction": direction, "old_over_new": middle, "low": low, "high": high}
                with given.output.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    mean = float(np.exp(np.mean(np.log(found))))
    print(f"geometric mean {mean:.4f}, least {min(found):.3f}, {len(found)} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main())
