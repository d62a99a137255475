"""Packed sequences, keys in pages and latent keys on a GPU, beside the fastest of other libraries.

    python benchmarks/sequences_cuda.py --output FILE      measure, print ratios; BASELINES is in sequence_baselines.py
    python benchmarks/sequences_cuda.py --warm             compile only, in several processes
    python benchmarks/sequences_cuda.py --report FILE      the ratios of stored results

The cases are in sequence_cases.py. The contenders of a case are compared with float64 first and then take turns, L2
flushed before each call, timed by events; calls of a few microseconds are replayed from CUDA graphs. A line of a
result file is one contender of one case.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from sequence_baselines import Call, versions
from sequence_cases import Case, Where, cases
from stored import RESULTS, geometric_mean, markdown_table

from flashkit.devices.timing import Timing
from flashkit.tools.bench.environment import cuda_clocks, cuda_machine

TOLERANCE = 3e-2
"""Relative rms error against float64 beyond which a contender computes something else and is not timed."""

ROUNDS, ROUND_SECONDS, FLUSHED = 3, 0.04, 256 << 20

# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def one_stream() -> Iterator[Any]:
    """A stream that is the current one of CuPy and of PyTorch, if there is one."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with ExitStack() as stack:
        stack.enter_context(stream)
        with suppress(ImportError):
            import torch

            if torch.cuda.is_available():
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)))
        yield stream


def captured(call: Call, stream: Any) -> Callable[[], object]:
    """The replay of a CUDA graph of the call; PyTorch has to know of a capture of its own calls."""
    import cupy

    pool = cupy.cuda.MemoryPool()  # of the graph: replays write again what the call frees
    with cupy.cuda.using_allocator(pool.malloc):
        if isinstance(call()[0], cupy.ndarray):
            stream.synchronize()
            stream.begin_capture()
            try:
                call()
            finally:
                graph = stream.end_capture()
            return lambda _pool=pool: graph.launch(stream)
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def timed(calls: dict[str, Callable[[], object]], stream: Any) -> tuple[dict[str, Timing], dict[str, str]]:
    """The seconds of each call, and the clocks while the last ones ran."""
    import cupy

    flush = cupy.empty(FLUSHED, np.int8)

    def sample(call: Callable[[], object], repeats: int) -> list[tuple[Any, Any]]:
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(repeats)]
        for begin, end in events:
            flush.fill(0)
            begin.record(stream)
            call()
            end.record(stream)
        return events

    def seconds(events: list[tuple[Any, Any]]) -> list[float]:
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(*pair) / 1e3 for pair in events]

    repeats = {}
    for name, call in calls.items():
        repeats[name] = min(max(int(ROUND_SECONDS / max(seconds(sample(call, 2))[1], 1e-6)), 3), 100)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    clocks: dict[str, str] = {}
    for number in range(ROUNDS):
        order = sorted(calls, reverse=number % 2 == 1)
        for name in order:
            events = sample(calls[name], repeats[name])
            if number == ROUNDS - 1 and name == order[-1]:
                clocks = cuda_clocks()
            taken[name] += seconds(events)
    return {name: Timing(tuple(x)) for name, x in taken.items()}, clocks


def measured(case: Case, ours: dict[str, str], stream: Any) -> list[dict[str, Any]]:
    """A line for each contender; those that fail or are wrong have the reason in place of times."""
    work, lines = case.make(ours), {}
    held: dict[str, Call] = {}  # with their arrays, which graphs do not hold
    calls: dict[str, Callable[[], object]] = {}
    for who, make in work.contenders.items():
        line: dict[str, Any] = {"what": case.what, "case": case.label, "who": who}
        lines[who] = line | {"work": work.amount, "unit": work.unit}
        try:
            held[who] = make()
            lines[who]["error"] = error = error_of(held[who](), work.expected)
            if not error <= TOLERANCE:
                raise ArithmeticError(f"does not compute the same: the error is {error:.2g}")
            calls[who] = captured(held[who], stream) if work.graph else held[who]
        except Exception as failure:  # a library may raise anything; the others go on
            lines[who]["skipped"] = why(failure)
            print(f"  {case.what}, {case.label}: {who} is not timed: {lines[who]['skipped']}", flush=True)
    timings, clocks = timed(calls, stream) if calls else ({}, {})
    for who, timing in timings.items():
        lines[who] |= {"seconds": timing.as_dict(), "clocks": clocks}
    return list(lines.values())


def measure(selected: Sequence[Case], ours: dict[str, str], output: Path | None) -> list[dict[str, Any]]:
    import cupy

    machine, lines = cuda_machine("torch") | {"baselines": versions()}, []
    target = output or RESULTS / "sequences-cuda" / f"{machine['device'].split()[-1].lower()}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with one_stream() as stream, target.open("w") as file:
        for case in selected:
            try:
                found = measured(case, ours, stream)
            except Exception as failure:  # too little memory for the case
                print(f"  {case.what}, {case.label}: {why(failure)}", flush=True)
                continue
            file.writelines(json.dumps({**line, "machine": machine}) + "\n" for line in found)
            file.flush()
            lines += found
            us = (f"{x['who']} {1e6 * x['seconds']['median']:.1f} ({x['error']:.1e})" for x in found if "seconds" in x)
            seconds = time.perf_counter() - start
            print(f"{seconds:5.0f} s  {case.what}, {case.label}: us (error): {'; '.join(us)}", flush=True)
            gc.collect()
            cupy.get_default_memory_pool().free_all_blocks()
            if "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()
    print(f"written to {target}")
    return lines


def warm(number: int, ours: dict[str, str]) -> str:
    """Make flashkit's calls of a case once, in a process of its own, so that the cache has their kernels."""
    import cupy

    case, complaints = list(cases())[number], []
    try:
        own = {who: make for who, make in case.make(ours).contenders.items() if who.startswith(tuple(ours))}
    except Exception as failure:  # too little memory beside the other processes
        return f"{case.what}, {case.label}: {why(failure)}"
    for who, make in own.items():
        try:
            make()()
            cupy.cuda.runtime.deviceSynchronize()
        except Exception as failure:
            complaints.append(f"{case.what}, {case.label}: {who}: {why(failure)}")
    del own
    cupy.get_default_memory_pool().free_all_blocks()
    return "\n".join(complaints)


def why(failure: Exception) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def error_of(results: Sequence[Any], expected: Sequence[tuple[Where, Any]]) -> float:
    """The largest relative rms error of all parts."""
    import cupy

    found = []
    for (number, part), right in expected:
        got = results[number][part]
        if not isinstance(got, cupy.ndarray):
            got = cupy.from_dlpack(got.detach().contiguous())
        difference = got.astype(np.float32) - right
        found.append(float(((difference**2).sum() / (right**2).sum()) ** 0.5))
    return math.nan if any(map(math.isnan, found)) else max(found)


# --- what the results say ---------------------------------------------------------------------------------------------


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Tables of the times of others over flashkit's, one for each kind of case, and what they come to."""
    tables = []
    for what in dict.fromkeys(line["what"] for line in lines):
        by_case: dict[str, dict[str, Any]] = {}
        for line in lines:
            if line["what"] == what and "seconds" in line:
                by_case.setdefault(line["case"], {})[line["who"]] = line
        names = [who for who in dict.fromkeys(x["who"] for x in lines if x["what"] == what) if who != "flashkit"]
        rows, best = [], {}
        for case, found in by_case.items():
            own = found.get("flashkit")
            ratios = {who: x["seconds"]["median"] / own["seconds"]["median"] for who, x in found.items()} if own else {}
            theirs = [ratio for who, ratio in ratios.items() if not who.startswith(("flashkit", "numba_cuda"))]
            if theirs:
                best[case] = min(theirs)
            cells = [f"{ratios[who]:.2f}" if who in ratios else "-" for who in names]
            rows.append((case, *(rate(own) if own else ("-", "-", "-")), *cells))
        table = markdown_table((what, "us", "rate", "error", *names), rows, 1)
        if best:
            least = min(best, key=lambda case: best[case])
            table += f"\n\n{what}, best of the others: geometric mean {geometric_mean(best.values()):.3f}, "
            table += f"least {best[least]:.3f} ({least}), {len(best)} cases"
        tables.append(table)
    return "\n\n".join(tables)


def rate(line: dict[str, Any]) -> tuple[str, str, str]:
    seconds, unit = line["seconds"]["median"], {"FLOP": ("TFLOP/s", 1e12), "byte": ("GB/s", 1e9)}[line["unit"]]
    return f"{1e6 * seconds:.1f}", f"{line['work'] / seconds / unit[1]:.0f} {unit[0]}", f"{line['error']:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases with this text in their kind and description")
    parser.add_argument("--warm", action="store_true", help="compile flashkit's kernels, and measure nothing")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--output", type=Path, help="result file to write")
    parser.add_argument("--report", type=Path, help="print the ratios of this result file, and measure nothing")
    options: Any = parser.parse_args(arguments)
    if options.report:
        print(report([json.loads(text) for text in options.report.read_text().splitlines()]))
        return 0
    ours = {"flashkit": "cupy_raw"}
    numbers = [i for i, case in enumerate(cases()) if options.only in f"{case.what}, {case.label}"]
    if options.warm:
        with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
            for complaint in filter(None, pool.map(partial(warm, ours=ours), numbers)):
                print(complaint, flush=True)
        return 0
    every = list(cases())
    print(report(measure([every[i] for i in numbers], ours, options.output)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
