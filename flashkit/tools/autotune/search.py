"""`flashkit autotune`: measure a device, find its best tiles by trial, and write both to the user's profile.

    subject  a backend and the device it runs on: tune_cpu.py and tune_cuda.py, which do the trials
    target   what a row of a tile table is for: direction, dtype, head dims up to one, masked or not, ...
    trial    one tile on one target: verified against the definition, then timed in turns with the tile in use so far

For each target the search goes in stages, each over a few tiles that a model ranks highest: blocks of queries and keys
with the shape in use, which on a CPU is the register block; other shapes; blocks of queries and keys with the best of
them; a last round of the best tiles against the one in use, which is replaced only by one that is clearly faster. Times
of different stages are compared by their ratio to the tile in use, which takes part in all. Where a device has several
generations of kernels each is a target of its own, and one that is far behind another is left after its first trial.
Every trial is a line of a log; what the log has is not tried again, so a run that was interrupted goes on where it
stopped. Nothing here runs inside attention().
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ... import dispatch
from ...devices import profiles, timing, trust
from ...devices.schema import Kind
from ...devices.timing import Timing
from ...spec import ITEMSIZE, Direction
from .log import Log, Rates, Stage, Trial

DROP = 2.0
"""A tile that takes so many times as long as the best is timed no further, nor are the other tiles of a generation of
kernels whose first one does beside another generation's best."""

MARGIN = 0.02
"""A tile must be faster by this share, and faster in four of five rounds, to replace the one in use: less is within
what repeated runs differ by."""


LEAST_TIME = 6.0
"""Seconds that a target gets while they last: little time is better spent on few targets than on all of them."""

FINALISTS = 3
"""Tiles that the last round compares with the one in use."""

FINAL_SHARE = 0.3
"""Share of a target's time that is kept for the last round."""

LEAST_ROUNDS = 4
"""A tile that was timed fewer times in the last round replaces none."""

FEW_ROWS = 16
"""Query rows that share keys, up to which the rows of decoding are for."""


# --- what is tuned, and with how much effort --------------------------------------------------------------------------


class Tile(Protocol):
    """What is tried; str() is for people. Equal ones are one tile, and the log has them as JSON."""

    @property
    def block_q(self) -> int: ...

    @property
    def block_k(self) -> int: ...

    @property
    def shape(self) -> Hashable:
        """What it has beside the blocks, of which each choice is worth a search of its own."""

    @property
    def row(self) -> dict[str, Any]:
        """As fields of a profile's row."""


@dataclass(frozen=True)
class Target:
    """A row of a tile table: for this dtype, head dims up to head_dim, causal masks or not, or for few queries; of this
    generation of kernels.
    """

    direction: Direction
    dtype: str
    head_dim: int
    causal: bool = False
    few: bool = False
    generation: str = ""

    @property
    def key(self) -> str:
        return " ".join(filter(None, (*self.problem, self.generation)))

    @property
    def problem(self) -> tuple[str, ...]:
        """What is computed, whoever does it."""
        kind = "few" if self.few else "causal" if self.causal else "full"
        return self.direction, self.dtype, str(self.head_dim), kind

    @property
    def selector(self) -> dict[str, Any]:
        """Which problems a row is for, as its fields."""
        last = {"max_rows": FEW_ROWS} if self.few else {"causal": self.causal}
        return {"dtype": self.dtype, "max_head_dim": self.head_dim, **last}

    def __str__(self) -> str:
        kind = ", one query" if self.few else ", causal" if self.causal else ""
        generation = f", {self.generation}" if self.generation else ""
        return f"{self.direction}, {self.dtype}, head dim {self.head_dim}{kind}{generation}"


@dataclass(frozen=True)
class Effort:
    """How much is tried for each target."""

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    tokens: int  # of the problem that is timed
    blocks: int  # blocks of queries and keys with one shape
    shapes: int  # other shapes
    rounds: int
    budget: float  # seconds for all targets

    def targets(self, dtypes: Sequence[str] | None = None) -> list[Target]:
        return [
            Target(direction, dtype, head_dim, causal)
            for dtype in dtypes or self.dtypes
            for head_dim in self.head_dims
            for direction in ("forward", "backward")
            for causal in (False, True)
        ]


QUICK = Effort(("float32",), (64, 128), tokens=1024, blocks=9, shapes=5, rounds=9, budget=100.0)
FULL = Effort(
    ("float32", "float64", "float16", "bfloat16"),
    (64, 128, 256),
    tokens=2048,
    blocks=12,
    shapes=8,
    rounds=9,
    budget=1800.0,
)


# --- the search -------------------------------------------------------------------------------------------------------


class Bench(Protocol):
    """What the search asks of a machine; `tune_cpu.CpuBench` and `tune_cuda.CudaBench` are the real ones."""

    def in_use(self, target: Target) -> Any:
        """The tile that attention uses now."""

    def candidates(self, target: Target) -> Sequence[Any]:
        """Possible tiles, the likely fastest first."""

    def flops(self, target: Target) -> float:
        """Of the problem that is timed."""

    def verify(self, target: Target, tile: Any) -> str:
        """What is wrong with the results of this tile, or nothing."""

    def time(self, target: Target, tiles: Sequence[Any], rounds: int, budget: float) -> dict[Any, Timing]:
        """Times in turns."""


class Subject(Protocol):
    """A backend that is tuned, and the device it runs on."""

    backend: str
    kind: Kind
    tile: Any  # the type of its tiles
    levels: tuple[str, str, str]  # names of the memories whose bandwidths are measured, the slowest first
    sram: Literal["l1", "l2"]  # which of these the tiles of K and V are read from

    def effort(self, quick: bool) -> Effort: ...

    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]: ...

    def bench(self, effort: Effort, targets: Sequence[Target]) -> Bench: ...

    def rates(self) -> Rates: ...

    def note(self, target: Target) -> str:
        """How it is measured, for each row's reason."""

    def versions(self) -> dict[str, str]:
        """Of what its speed depends on."""

    def identity(self) -> Any:
        """The device, versions and sources: trials count for these."""


def log_path(subject: Subject) -> Path:
    """The log of this device with these versions of flashkit's kernels and of what they depend on."""
    identity = repr(subject.identity())
    slug = re.sub(r"[^a-z0-9]+", "-", str(profiles.criteria(subject.kind)["name"]).lower()).strip("-")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    return profiles.user_dir().parent / "autotune" / f"{subject.backend}-{slug}-{digest}.jsonl"


def subjects(backend: str | None = None) -> list[Subject]:
    """What can be tuned here: this backend, or those that are available of what most calls use. ValueError where it is
    none that is tuned.
    """
    from .cpu import Cpu
    from .cuda import Cuda

    known = "cpu", "cupy_raw", "numba_cuda"
    if backend is not None and backend not in known:
        raise ValueError(f"backend {backend!r} is not tuned; {', '.join(known)} are")
    said = {name: _available(name) for name in (known[:2] if backend is None else [backend])}
    if backend is not None and said[backend]:
        raise ValueError(f"backend {backend!r} cannot be tuned here: {said[backend]}")
    able = [name for name, reason in said.items() if not reason]
    return [Cpu() if name == "cpu" else Cuda(dispatch.registry()[name]) for name in able]  # type: ignore[arg-type, misc]


def _available(name: str) -> str:
    """Why a backend cannot run here, or nothing."""
    if name not in dispatch.registry():
        return "it is not installed"
    return dispatch.registry()[name].available().reason


@dataclass(frozen=True)
class Found:
    """The outcome for a target: the tile to use, how fast it is, and how many times as fast as the one used before."""

    target: Target
    before: Tile
    tile: Tile
    gain: float
    gflops: float
    tried: int
    wrong: int
    complete: bool  # False: the time was up before every stage was done

    @property
    def why(self) -> str:
        if self.tile == self.before:
            return f"none of {self.tried} other tiles timed was clearly faster"
        return f"{self.gain:.2f} times as fast as {self.before}; best of {self.tried} tiles timed"


@dataclass
class Search:
    """The search for one target. deadline: on `clock`, after which nothing more is started. rival: the rate in 1e9
    FLOP/s that other kernels reach on the same problem.
    """

    target: Target
    bench: Bench
    log: Log
    effort: Effort
    deadline: float = math.inf
    clock: Callable[[], float] = time.monotonic
    on_trial: Callable[[], None] = lambda: None
    rival: float = 0.0
    before: Any = field(init=False)

    def run(self) -> Found | None:
        """None where not even the tile in use could be timed before the time was up."""
        logged = self.log.of(self.target.key)
        # The log's, where it has one: a resumed search compares with the same tile, whatever a profile says by now.
        self.before = next((t.tile for t in logged if t.stage == "in use"), None) or self.bench.in_use(self.target)
        ranked = self.bench.candidates(self.target)
        whole, kept_back = self.deadline, FINAL_SHARE * (self.deadline - self.clock())
        if math.isfinite(whole):
            self.deadline = whole - kept_back  # without the last round nothing is decided
        started = self.stage("in use", [self.before])
        if started and self.hopeless:
            return self.outcome(complete=True)
        complete = (
            started
            and self.stage("blocks", self.blocks(ranked, self.before.shape))
            and self.stage("shapes", self.shapes(ranked, self.leader(self.before.shape)))
            and self.stage("blocks", self.blocks(ranked, self.leader().shape))
        )
        self.deadline = whole
        right = [t.tile for t in self.timed()]
        decided = self.stage("final", [t for t in right if t == self.before or t in right[:FINALISTS]])
        return self.outcome(complete and decided)

    @property
    def hopeless(self) -> bool:
        """Whether the tile in use is so far behind other kernels that no other tile will catch up with them."""
        return any(DROP * (t.gflops or 0.0) < self.rival for t in self.timed() if t.tile == self.before)

    def blocks(self, ranked: Sequence[Any], shape: Hashable) -> list[Any]:
        """The likeliest tiles of a shape."""
        return [tile for tile in ranked if tile.shape == shape][: self.effort.blocks]

    def shapes(self, ranked: Sequence[Any], best: Any) -> list[Any]:
        """For each of the likeliest other shapes the tile nearest to the best so far."""
        others = list(dict.fromkeys(tile.shape for tile in ranked if tile.shape != best.shape))
        return [
            min((tile for tile in ranked if tile.shape == other), key=lambda tile: _distance(tile, best))
            for other in others[: self.effort.shapes]
        ]

    def stage(self, stage: Stage, wanted: Sequence[Any]) -> bool:
        """Verify and time the tiles that the log does not have yet. False where the time was up first."""
        past = [t for t in self.log.of(self.target.key) if (t.stage == "final") == (stage == "final")]
        logged = {t.tile for t in past if stage != "final" or t.rounds >= LEAST_ROUNDS}
        left = [tile for tile in wanted if tile not in logged]
        while left:
            if self.clock() > self.deadline:
                return False
            batch, left = left[:5], left[5:]
            right = [tile for tile in batch if stage == "final" or self.right(stage, tile)]
            if right:
                self.time(stage, right)
        return True

    def right(self, stage: Stage, tile: Any) -> bool:
        """Whether the tile gives the right results; logged where it does not."""
        status: Literal["wrong", "failed"] = "wrong"
        try:
            problem = self.bench.verify(self.target, tile)
        except Exception as error:  # whatever a candidate runs into, the others are still worth trying
            status, problem = "failed", f"{type(error).__name__}: {error}"
        if problem:
            self.record(Trial(self.target.key, stage, tile, status, note=problem))
        return not problem

    def time(self, stage: Stage, batch: Sequence[Any]) -> None:
        everyone = list(dict.fromkeys([self.before, *batch]))
        rounds = self.effort.rounds * (2 if stage == "final" else 1)
        timings = self.bench.time(self.target, everyone, rounds, max(self.deadline - self.clock(), 0.0))
        for tile in batch:
            t = timings[tile]
            ratio, _, high = t.over(timings[self.before])
            gflops = self.bench.flops(self.target) / t.median / 1e9
            self.record(Trial(self.target.key, stage, tile, "ok", t.median, ratio, high, gflops, len(t.rounds)))

    def record(self, trial: Trial[Any]) -> None:
        self.log.add(msgspec.structs.replace(trial, date=timing.now()))
        self.on_trial()

    def timed(self, stage: Stage | None = None) -> list[Trial[Any]]:
        """Trials with a time, the fastest first; those of the last round apart, by asking for it."""
        timed = [t for t in self.log.of(self.target.key) if t.ratio is not None]
        of_round = [t for t in timed if (t.stage == "final") == (stage == "final")]
        return sorted(of_round, key=lambda t: t.ratio or 0.0)

    def leader(self, shape: Hashable = None) -> Any:
        """The fastest so far, of all or of that shape.

        Later stages must not change what it was when a stage began, or a search done would find more to do.
        """
        timed = (t.tile for t in self.timed() if shape in (None, t.tile.shape))
        return next(timed, self.before)

    def outcome(self, complete: bool) -> Found | None:
        timed, finals = self.timed(), [t for t in self.timed("final") if t.rounds >= LEAST_ROUNDS]
        kept = next((t for t in [*finals, *timed] if t.tile == self.before), None)
        faster = [t for t in finals if (t.ratio or 1.0) < 1 - MARGIN and (t.high or 1.0) < 1]
        # A tile in use that gives wrong results has no time, and anything right is better.
        best = faster[0] if faster else kept or next(iter([*finals, *timed]), None)
        if best is None:
            return None
        tried = {t.tile for t in timed} - {self.before}
        wrong = {t.tile for t in self.log.of(self.target.key) if t.status != "ok"}
        gain, gflops = 1 / (best.ratio or 1.0), best.gflops or 0.0
        return Found(self.target, self.before, best.tile, gain, gflops, len(tried), len(wrong), complete)


def digits(x: float) -> float:
    """Four significant digits: more were never measured."""
    return float(f"{x:.4g}")


def _distance(a: Tile, b: Tile) -> float:
    return abs(math.log(a.block_q / b.block_q)) + abs(math.log(a.block_k / b.block_k))


# --- the profile ------------------------------------------------------------------------------------------------------


def profile_of(found: Sequence[Found], rates: Rates | None, subject: Subject) -> dict[str, Any]:
    """What was found in the form of a profile file."""
    versions = {name: version for name, version in subject.versions().items() if name != "python"}
    result: dict[str, Any] = {"schema": profiles.SCHEMA, "device": profiles.criteria(subject.kind)}
    if rates is not None:

        def rate(value: float) -> dict[str, Any]:
            return {"measured": value, "date": rates.date[:10], "versions": versions}

        sram = rates.l2_bandwidth_gbs if subject.sram == "l2" else rates.l1_bandwidth_gbs
        result["memory"] = {"bandwidth_gbs": rate(rates.bandwidth_gbs), "sram_bandwidth_gbs": rate(sram)}
        result["peak_tflops"] = {dtype: rate(value) for dtype, value in rates.peak_tflops.items()}
    tables: dict[str, list[dict[str, Any]]] = {}
    for f in found:
        speed = {"gflops": digits(f.gflops)} if subject.kind == "cpu" else {"tflops": digits(f.gflops / 1000)}
        measured = {**speed, "date": timing.now()[:10], "versions": versions}
        why = f"{f.why}; {subject.note(f.target)}"
        row = {**f.target.selector, **f.tile.row, "why": why, "measured": measured}
        tables.setdefault(f"{subject.backend}.{f.target.direction}", []).append(row)
    result["tiles"] = tables
    return result


def _write(profile: dict[str, Any], output: Path | None) -> Path:
    """To the user's profiles, or to a file that the user names, replaced in one step."""
    if output is None:
        return profiles.write_user_profile(profile)
    import yaml

    text = yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
    profiles.parse(text, str(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    trust.write(output, text.encode())
    return output


# --- the command ------------------------------------------------------------------------------------------------------


def autotune(
    *, quick: bool = False, dtypes: Sequence[str] | None = None, budget: float | None = None, resume: bool = True,
    output: Path | None = None, backend: str | None = None, clock: Callable[[], float] = time.monotonic,
    tuned: Sequence[Subject] | None = None,
) -> list[Found]:  # fmt: skip
    """Tune backends and write the user's profiles of their devices; tables on stdout, progress on stderr.

    backend: the one to tune, by default cpu and cupy_raw as they are available. budget: seconds for each, after which
    nothing more is started; what was found by then is written. output: the profile's file, instead of the user's.
    clock, tuned: for tests. ValueError for an unknown dtype or backend, and for one output of several backends.
    """
    for dtype in dtypes or ():
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype {dtype!r} is none of {', '.join(ITEMSIZE)}")
    each = subjects(backend) if tuned is None else tuned
    if output is not None and len(each) > 1:
        names = " or ".join(subject.backend for subject in each)
        raise ValueError(f"--output is the profile of one device; --backend {names} says which")
    return [one for subject in each for one in _tune(subject, quick, dtypes, budget, resume, output, clock)]


def _tune(
    subject: Subject, quick: bool, dtypes: Sequence[str] | None, budget: float | None, resume: bool,
    output: Path | None, clock: Callable[[], float],
) -> list[Found]:  # fmt: skip
    """One of them."""
    effort = subject.effort(quick)
    end = clock() + (effort.budget if budget is None else budget)
    log, targets = Log(log_path(subject), subject.tile, resume), subject.targets(effort, dtypes)
    with timing.Neighbours() as neighbours:
        found = list(_search(targets, subject.bench(effort, targets), log, effort, subject.rates, end, clock))
    path = _write(profile_of(found, log.rates, subject), output)
    dispatch.forget()
    profiles.forget()
    _report(found, targets, log, path, subject, timing.warning(neighbours.share))
    return found


def _search(
    targets: Sequence[Target], bench: Bench, log: Log, effort: Effort, rates: Callable[[], Rates], end: float,
    clock: Callable[[], float],
) -> Iterator[Found]:  # fmt: skip
    """Search target by target, each with an equal share of the time that is left, but no less than LEAST_TIME."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    each = 2 * effort.blocks + effort.shapes + 5
    # A bar that redraws itself would take a core from what is timed, ten times a second.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("bandwidths and peak rates", total=each * len(targets) + 1)
        if log.rates is None:
            log.add(rates())
        best: dict[tuple[str, ...], float] = {}
        for number, target in enumerate(targets):
            progress.update(task, description=str(target), completed=1 + number * each, refresh=True)
            left = end - clock()
            deadline = clock() + min(left, max(left / (len(targets) - number), LEAST_TIME))
            step = lambda: progress.update(task, advance=1, refresh=True)
            search = Search(target, bench, log, effort, deadline, clock, step, best.get(target.problem, 0.0))
            outcome = search.run()
            if outcome is not None:
                best[target.problem] = max(best.get(target.problem, 0.0), outcome.gflops)
                yield outcome


def _report(
    found: Sequence[Found], targets: Sequence[Target], log: Log, path: Path, subject: Subject, warning: str
) -> None:
    """What was measured, what got faster, and where it is written."""
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=200)
    if log.rates is not None:
        r, (slow, middle, fast) = log.rates, subject.levels
        peaks = ", ".join(f"{1000 * rate:.0f} in {dtype}" for dtype, rate in r.peak_tflops.items())
        console.print(
            f"reads {r.bandwidth_gbs:.1f} GB/s from {slow}, {r.l2_bandwidth_gbs:.0f} from {middle}, "
            f"{r.l1_bandwidth_gbs:.0f} from {fast}; multiplies, in GFLOP/s, {peaks}"
        )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("for", "tile", "GFLOP/s", "speed-up", "tried", "wrong"):
        table.add_column(name, justify="left" if name in ("for", "tile") else "right", no_wrap=True)
    for f in found:
        gain = "as before" if f.tile == f.before else f"{f.gain:.2f} x"
        row = str(f.target), str(f.tile), f"{f.gflops:.1f}", gain, str(f.tried), str(f.wrong or "")
        table.add_row(*row)
    console.print(table)
    faster = [f for f in found if f.tile != f.before]
    if faster:
        best = max(faster, key=lambda f: f.gain)
        console.print(f"{len(faster)} of {len(found)} got faster, most of all {best.target}: {best.gain:.2f} x")
    done = [f.target for f in found]
    hopeless = [t for t in targets if t not in done and any(trial.status != "ok" for trial in log.of(t.key))]
    for target in hopeless:
        console.print(f"{target}: every tile tried gives wrong results; the log says which, please report it")
    unfinished = len(targets) - len(hopeless) - sum(f.complete for f in found)
    if unfinished:
        console.print(f"the time was up with {unfinished} of {len(targets)} unfinished: run again to go on")
    if warning:
        console.print(warning)
    console.print(f"profile  {path}\nlog      {log.path}")
