"""`flashkit bench`: attention against its peers, forward and backward.

Speed is timed in turns in one process, peak memory of a CPU's calls in processes of their own. A result is a JSON line
(`Line`) for a case and a direction, with all who took part, the machine and the versions; benchmarks/report.py makes
tables and plots of such lines. FLOPs are those of the matrix products for the visible pairs (spec.Problem.flops).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...devices import timing
from ...devices.timing import Timing
from ...spec import Direction, Verdict
from .baselines import PEERS, REQUIRES, Case, Entry, Peer, Yardstick, missing, with_flashkit, yardsticks

SCHEMA = 1
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

ATTEMPTS = 3
"""A case is timed again, so often at most, while other processes take cores away; the calmest time counts."""

DROP = 6.0
"""A contender so many times slower than the fastest is timed in LEAST_ROUNDS rounds and no more."""

LEAST_ROUNDS = 3

LONG = (512, 2048, 8192)


def _grid(dtype: str, lengths: Sequence[int]) -> list[Case]:
    return [Case(n, d, dtype=dtype, causal=causal) for n in lengths for d in (64, 128) for causal in (False, True)]


SUITES: dict[str, list[Case]] = {
    "float32": _grid("float32", LONG),
    "bfloat16": _grid("bfloat16", LONG),
    "float16": _grid("float16", LONG[:2]),
    "float64": _grid("float64", LONG[:2]),
    "masks": [Case(8192, causal=True, window=512), Case(8192, kept=0.25)],
    "decode": [
        Case(1, 128, heads=32, heads_kv=8, n_k=32768, dtype=dtype) for dtype in ("float32", "bfloat16")
    ],
    "small": [Case(n) for n in (16, 64, 128)],
}  # fmt: skip
"""Named cases of `flashkit bench --suite`; "all" is all of them, "quick" the shorter half of float32's with D = 64."""

QUICK = [case for case in SUITES["float32"] if case.n_q <= 2048 and case.head_dim == 64]

CUDA_SUITES: dict[str, list[Case]] = {
    **{
        dtype: [
            Case(n, d, 2048 // d, dtype, causal, batch=16384 // n)
            for d in dims for causal in (False, True) for n in lengths
        ]
        for dtype, dims, lengths in (
            ("bfloat16", (64, 128, 256), (1024, 4096, 16384)),
            ("float16", (64, 128), (1024,)),
            ("float32", (64, 128), (1024, 4096)),
        )
    },
    "decode": [
        Case(1, 128, 32, "bfloat16", heads_kv=8, n_k=n_k, batch=batch)
        for batch, n_k in ((1, 32768), (16, 32768), (1, 131072))
    ],
    "masks": [
        *(Case(16384, 128, 16, "bfloat16", kept=kept) for kept in (0.5, 0.25, 0.1)),
        Case(16384, 128, 16, "bfloat16", window=1024),
    ],
}  # fmt: skip
"""The same with `--device cuda`: 16,384 tokens and 2048 columns of all heads together, as others time attention."""

CUDA_QUICK = [case for case in CUDA_SUITES["bfloat16"] if case.n_q == 4096 and case.head_dim == 128]

Machine = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where it is measured, and what differs between these."""

    suites: Mapping[str, Sequence[Case]]
    quick: Sequence[Case]
    peers: Mapping[str, Peer]
    requires: Mapping[str, tuple[str, ...]]
    flashkit: Peer
    arrays: Callable[[Case], Any]
    machine: Callable[..., Machine]
    yardsticks: Callable[[Case, Any, Direction, Sequence[str], int], dict[str, Yardstick]]
    finish: Callable[[], object] = lambda: None  # waits until calls are done that only hand over their work
    on_cpu: bool = True  # so other processes matter, idle threads do, and memory is the process's


def on_cpu() -> Place:
    return Place(SUITES, QUICK, PEERS, REQUIRES, with_flashkit, Case.arrays, timing.machine, yardsticks)


def on_cuda() -> Place:
    """RuntimeError, with a sentence, where there is no device."""
    from ... import dispatch
    from . import baselines_cuda

    backend = dispatch.registry().get("cupy_raw")
    verdict = backend.available() if backend else Verdict(False, "cupy_raw is not installed")
    if not verdict:
        raise RuntimeError(verdict.reason)
    import cupy

    return Place(
        CUDA_SUITES, CUDA_QUICK, baselines_cuda.PEERS, baselines_cuda.REQUIRES, baselines_cuda.with_flashkit,
        baselines_cuda.arrays_of, timing.cuda_machine, baselines_cuda.yardsticks,
        cupy.cuda.runtime.deviceSynchronize, on_cpu=False,
    )  # fmt: skip


PLACES = {"cpu": on_cpu, "cuda": on_cuda}


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a result file. Seconds, bytes, FLOPs.

    `memory`: growth of resident memory at its peak, results included, in a forward, or a forward and a backward pass.
    """

    run: str  # when the run began, UTC: the same in all its lines
    case: Case
    direction: Direction
    flops: float
    bytes: int  # least traffic with main memory
    timings: dict[str, dict[str, float]]  # who: median, low and high (20 and 80 %), best, rounds, repeats
    times_as_fast: dict[str, dict[str, float]]  # flashkit over who: median, low, high of the rounds' ratios
    skipped: dict[str, str]  # who: why
    memory: dict[str, int]
    machine: Machine
    neighbours: float | None = None  # share of the cores' time that other processes took while it was timed
    yardsticks: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)  # flashkit's rate over this one's
    errors: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)  # who: of each result, see `errors`
    schema: int = SCHEMA

    def gflops(self, name: str) -> float:
        return self.flops / self.timings[name]["median"] / 1e9


def read(file: Path) -> list[Line]:
    """The lines of the last run in a result file, in order. msgspec.ValidationError where one does not fit."""
    texts = file.read_text(encoding="utf-8").splitlines()
    lines = [msgspec.json.decode(text, type=Line) for text in texts if text.strip()]
    return [line for line in lines if line.run == lines[-1].run]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(
    case: Case, direction: Direction, peers: Sequence[str], *, run: str, rounds: int, budget: float, memory: bool,
    threads: int, place: Place | None = None, time: Callable[..., dict[str, Timing]] = timing.interleaved,
    growth: Callable[[Case, Direction, str], int | None] | None = None,
) -> Line:  # fmt: skip
    """One case in one direction. time, growth: for tests."""
    from ...call.arguments import prepare
    from ...call.explanation import visible_pairs

    place = place or on_cpu()
    arrays = place.arrays(case)
    problem, operands, _ = prepare(*arrays[:3], **case.options)
    entry = place.flashkit(case, arrays, direction, threads)
    assert entry is not None
    entries: dict[str, Entry] = {"flashkit": entry}
    ours = entries["flashkit"].result()
    truth = definition(case, arrays, direction)
    off = {"flashkit": errors(ours, truth)} if truth else {}
    skipped = {}
    for name in peers:
        try:
            entry = place.peers[name](case, arrays, direction, threads)
            if entry is None:
                skipped[name] = "cannot do this case, or not in reasonable memory"
                continue
            theirs = entry.result()
        except Exception as failure:  # whatever another library raises: one peer's refusal must not end a long run
            skipped[name] = f"fails: {str(failure).splitlines()[0] if str(failure) else type(failure).__name__}"
            continue
        if (error := _difference(theirs, ours)) > tolerance(case.dtype):
            skipped[name] = f"does not compute the same: the largest difference is {error:.2g} of the largest value"
            continue
        entries[name] = entry
        if truth:
            off[name] = errors(theirs, truth)

    beside = place.yardsticks(case, arrays, direction, peers, threads)
    settle = timing.until_idle if place.on_cpu else None
    calls = {name: entry.call for name, entry in entries.items()} | {name: x.call for name, x in beside.items()}
    attempts: list[tuple[float | None, dict[str, Timing]]] = []
    while len(attempts) < ATTEMPTS and (not attempts or timing.warning(attempts[-1][0])):
        with timing.Neighbours() as neighbours:
            taken = time(
                calls, rounds=rounds, budget=budget, least=LEAST_ROUNDS, drop=DROP, settle=settle, finish=place.finish
            )
        attempts.append((neighbours.share if place.on_cpu else None, taken))
    share, timings = min(attempts, key=lambda attempt: attempt[0] or 0.0)
    ratios = {name: timings[name].over(timings["flashkit"]) for name in entries if name != "flashkit"}
    measured = [name for name in ("flashkit", "numpy") if memory and name in entries]
    grown = {name: (growth or memory_growth)(case, direction, name) for name in measured}
    flops, moved = problem.flops(direction, visible_pairs(problem, operands)), problem.bytes(direction)
    shares = {}
    for name, yardstick in beside.items():
        done = flops if yardstick.unit == "FLOP" else moved
        as_much = 1.0 if yardstick.work is None else done / yardstick.work
        times = timings[name].over(timings["flashkit"])
        shares[name] = dict(zip(("median", "low", "high"), (as_much * x for x in times)))
    return Line(
        run=run,
        case=case,
        direction=direction,
        flops=flops,
        bytes=moved,
        timings={name: t.as_dict() for name, t in timings.items()},
        times_as_fast={name: dict(zip(("median", "low", "high"), ratio)) for name, ratio in ratios.items()},
        skipped=skipped,
        memory={name: n for name, n in grown.items() if n is not None},
        machine=place.machine(*peers),
        neighbours=share,
        yardsticks=shares,
        errors=off,
    )


MOST_EXACT = 2048 * 2048
"""Pairs of one head beyond which errors are not measured: the definition stores them in float64."""


def definition(case: Case, arrays: Sequence[np.ndarray], direction: Direction) -> dict[str, np.ndarray]:
    """What the first key/value head of the first batch entry and its queries should give, in float64, by name; empty
    for too large a case, and for float64, whose errors nothing finer shows here.
    """
    from ... import reference
    from ...call.arguments import prepare

    if case.n_q * case.keys > MOST_EXACT or case.dtype == "float64":
        return {}
    parts = (x[:1, : case.group if i in (0, 3) else 1] for i, x in enumerate(arrays))
    q, k, v, dout = ((x if isinstance(x, np.ndarray) else x.get()).astype(np.float64) for x in parts)
    problem, operands, _ = prepare(q, k, v, **case.options)
    if direction == "forward":
        return {"out": reference.standard(problem.spec, operands)[0]}
    grads = reference.standard_gradients(problem.spec, operands, dout)
    return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}


def errors(results: Sequence[np.ndarray], truth: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Root mean square of the error over that of the truth, of each result: "out", or "dq", "dk", "dv"."""
    return {
        name: float(np.linalg.norm(got[:1, : exact.shape[1]].astype(np.float64) - exact) / np.linalg.norm(exact))
        for (name, exact), got in zip(truth.items(), results, strict=True)
    }


def _difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest difference, relative to the largest value, of arrays in pairs."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(ours, theirs, strict=True)]
    return max(float(np.abs(a - b).max() / np.abs(b).max()) if a.shape == b.shape else math.inf for a, b in pairs)


def tolerance(dtype: str) -> float:
    """Half the digits: enough to tell the same computation from another one, whatever the order of its sums."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) ** 0.5


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_growth(case: Case, direction: Direction, name: str) -> int | None:
    """Bytes by which resident memory grows at its peak; None where it cannot be told (elsewhere than on Linux).

    In a forward pass, or in a forward and a backward pass; in a new process, after a smaller call that compiles and
    brings in what stays.
    """
    command = [sys.executable, "-m", "flashkit.tools.bench.run", json.dumps([asdict(case), direction, name])]
    # glibc would keep freed memory for later, so that the growth would be less than what is used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"measuring the memory of {name} failed:\n{done.stderr}") from None
    return None if answer is None else int(answer)


def _grow(case: Case, direction: Direction, name: str) -> int | None:
    contender = with_flashkit if name == "flashkit" else PEERS[name]
    from ...backends.cpu import threads

    def step(case: Case) -> Callable[[], object]:
        arrays, count = case.arrays(), threads.count()

        def both() -> object:
            entry = contender(case, arrays, direction, count)  # in the backward direction it makes the forward pass
            assert entry is not None
            return entry.call()

        return both

    step(replace(case, n_q=min(case.n_q, 256), n_k=min(case.keys, 256)))()
    call, status = step(case), Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # peak = now
        before = _status_bytes(status, "VmRSS")
        kept = call()
        grown = _status_bytes(status, "VmHWM") - before
    except OSError:
        return None
    del kept
    return grown


def _status_bytes(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# --- the command ------------------------------------------------------------------------------------------------------


def run(
    cases: Sequence[Case], peers: Sequence[str], *, rounds: int, budget: float, memory: Callable[[Case], bool],
    on_start: Callable[[str], None], place: Place,
) -> Iterator[Line]:  # fmt: skip
    """Measure every case in its directions."""
    from ...backends.cpu import threads

    # Peers come first. Numba's OpenMP layer allows parallel regions within parallel regions in all of the process; a
    # PyTorch that is loaded later shares its OpenMP library, and becomes twenty times slower.
    for name in peers:
        for package in place.requires.get(name, ()):
            import_module(package)
    began, count = timing.now(), threads.count()
    for case in cases:
        for direction in directions(case):
            on_start(f"{case.label}, {direction}")
            with _threads(count) if place.on_cpu else nullcontext():
                yield measure(
                    case, direction, peers, run=began, rounds=rounds, budget=budget, threads=count, place=place,
                    memory=place.on_cpu and memory(case),
                )  # fmt: skip


def _memory_is_telling(case: Case) -> bool:
    """Linear growth shows in a few long cases; every figure takes a process of its own."""
    usual = case.dtype == "float32" and not case.causal and not case.masked
    return usual and ((case.keys >= 2048 and case.head_dim == 64) or case.n_q == 1)


def directions(case: Case) -> tuple[Direction, ...]:
    """Decoding, one query, has no backward pass."""
    return ("forward",) if case.n_q == 1 else DIRECTIONS


def _threads(count: int) -> AbstractContextManager[Any]:
    """NumPy's matrix product on as many threads as flashkit, where that can be set; by itself it takes all cores."""
    from ...devices import host

    if count == host.cpu_count():
        return nullcontext()
    if find_spec("threadpoolctl") is None:
        problem = f"flashkit uses {count} of {host.cpu_count()} cores, and NumPy may use all"
        print(f"warning: {problem}; pip install threadpoolctl, or set OPENBLAS_NUM_THREADS", file=sys.stderr)
        return nullcontext()
    limits: AbstractContextManager[Any] = import_module("threadpoolctl").threadpool_limits(count, user_api="blas")
    return limits


def main(
    *, quick: bool = False, output: Path | None = None, peers: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None, suites: Sequence[str] = ("all",), device: str = "cpu",
) -> int:  # fmt: skip
    """The command: a table on stdout, JSON lines appended to `output`, progress on stderr. Returns the exit status.

    device: "cpu" or "cuda". peers: names of the place's; by default those that are installed. suites: names of its
    suites, or "all". sizes: numbers of tokens, instead of a suite. quick: few cases, few rounds.
    """
    try:
        place = PLACES[device]()
    except (KeyError, RuntimeError) as error:
        problem = f"{device} is none of {', '.join(PLACES)}" if isinstance(error, KeyError) else str(error)
        print(f"error: --device: {problem}", file=sys.stderr)
        return 2 if isinstance(error, KeyError) else 1
    options = ("--peers", peers or (), [*place.peers]), ("--suite", suites, ["all", *place.suites])
    for option, given, known in options:
        unknown = [name for name in given if name not in known]
        if unknown:
            print(f"error: {option}: {', '.join(unknown)} is none of {', '.join(known)}", file=sys.stderr)
            return 2
    lacking = [package for name in peers or () for package in missing(name, place.requires)]
    if lacking:
        print(f"error: --peers: pip install {' '.join(lacking)}", file=sys.stderr)
        return 1
    names = list(place.peers if peers is None else dict.fromkeys(peers))
    absent = {name: lacking for name in names if (lacking := missing(name, place.requires))}
    for name, lacking in absent.items():
        names.remove(name)
        print(f"{name} is not compared with: pip install {' '.join(lacking)}", file=sys.stderr)
    if sizes:
        cases = [Case(n, causal=causal) for n in sizes for causal in (False, True)]
    else:
        named = {name: cases for name, cases in place.suites.items() if {name, "all"} & set(suites)}
        cases = list(place.quick) if quick else [case for cases in named.values() for case in cases]
    rounds, budget = (7, 5.0) if quick else (20, 4.0) if place.on_cpu else (20, 0.6)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    lines: list[Line] = []
    # A bar that redraws itself would take a core from what is timed, ten times a second.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=sum(len(directions(case)) for case in cases))
        measured = run(
            cases, names, rounds=rounds, budget=budget,
            memory=_memory_is_telling,
            on_start=lambda label: progress.update(task, description=label, refresh=True), place=place,
        )  # fmt: skip
        for line in measured:
            lines.append(line)
            if output is not None:
                append(output, line)
            progress.advance(task)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=200)
    console.print(table(lines, names))
    console.print(describe(lines[-1].machine))
    if warning := timing.warning(max(line.neighbours or 0.0 for line in lines)):
        console.print(warning)
    if output is not None:
        console.print(f"written to {output}")
    return 0


def append(file: Path, line: Line) -> None:
    """Add a line to a result file: at once, so that an interrupted run keeps what it has."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(msgspec.json.encode(line).decode() + "\n")


def table(lines: Sequence[Line], peers: Sequence[str]) -> Table:
    """For the screen: medians with their 20 and 80 % quantiles, rates, how many times as fast as each peer, and which
    share of each yardstick's rate.
    """
    shown = Table(box=None, padding=(0, 2, 0, 0))
    left = "case", "direction"
    right = "ms (20-80 %)", "GFLOP/s", *(f"x {peer}" for peer in peers), "share of", "MiB", "NumPy's"
    for name in (*left, *right):
        shown.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for line in lines:
        t = line.timings["flashkit"]
        milliseconds = f"{_digits(t['median'] * 1e3)} ({_digits(t['low'] * 1e3)}-{_digits(t['high'] * 1e3)})"
        ratios = [f"{line.times_as_fast[peer]['median']:.2f}" if peer in line.times_as_fast else "-" for peer in peers]
        memory = [f"{line.memory[name] / 2**20:.1f}" if name in line.memory else "" for name in ("flashkit", "numpy")]
        shares = ", ".join(f"{name} {share['median']:.2f}" for name, share in line.yardsticks.items())
        rate = f"{line.gflops('flashkit'):.1f}"
        shown.add_row(line.case.label, line.direction, milliseconds, rate, *ratios, shares, *memory)
    return shown


def _digits(x: float) -> str:
    """Three significant digits without an exponent."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" if x > 0 else "0"


def describe(machine: Machine) -> str:
    """The machine in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = f", {machine['threads']} threads" if "threads" in machine else ""
    return f"{machine['device']}{threads}; {versions}; {machine['date'][:10]}"


if __name__ == "__main__":  # one measurement of `memory_growth`
    fields, *rest = json.loads(sys.argv[1])
    print(json.dumps(_grow(Case(**fields), *rest)))
