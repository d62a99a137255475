"""`flashkit autotune`: all targets of the backends that can be tuned here, within a budget of time, and a report."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import TaskProgressColumn

from ... import dispatch
from ...devices import profiles, trust
from ...spec import ITEMSIZE
from ..bench.environment import BackgroundLoad, background_warning, now
from ..console import digits, print_table, progress, stdout
from .cpu import CpuTuner
from .cuda import CudaTuner
from .log import Disturbance, Log, MeasuredPeaks, four_digits
from .search import Outcome, Search
from .targets import Effort, Target
from .trials import Tuner

BACKENDS = "cpu", "cupy_raw", "numba_cuda"
DEFAULT_BACKENDS = BACKENDS[:2]

MIN_TIME = 6.0
"""Seconds that a target gets while any are left: a small budget is better spent on few targets than on all of them."""


class Outcomes(list[Outcome]):
    """One for each target that was timed. written: whether every backend's profile was, if only with peaks."""

    written = True


def autotune(
    *, quick: bool = False, dtypes: Sequence[str] | None = None, budget: float | None = None, resume: bool = True,
    output: Path | None = None, backend: str | None = None, force: bool = False,
    clock: Callable[[], float] = time.monotonic, tuned: Sequence[Tuner] | None = None,
) -> Outcomes:  # fmt: skip
    """Tune backends and write a profile of each device; prints a report on stdout and progress on stderr.

    The arguments are those of the command. budget: seconds for each backend, after which nothing more is started.
    output: the file of the profile, instead of one in the user's profile directory. clock, tuned: for tests, a
    simulated clock and simulated backends.

    ValueError for an unknown dtype, for a backend that is unknown or cannot be tuned here, and for one output of
    several backends.
    """
    for dtype in dtypes or ():
        if dtype not in ITEMSIZE:
            raise ValueError(f"dtype: expected {', '.join(ITEMSIZE)}, got {dtype!r}")
    backends = tuners(backend) if tuned is None else tuned
    if output is not None and len(backends) > 1:
        names = " or ".join(tuner.backend for tuner in backends)
        raise ValueError(f"--output: expected one backend, as a profile is of one device; choose by --backend {names}")
    found = Outcomes()
    for one in backends:
        outcomes, path = _tune(one, quick, dtypes, budget, resume, output, force, clock)
        found += outcomes
        found.written &= path is not None
    return found


def tuners(backend: str | None = None) -> list[Tuner]:
    """The backend of this name, or those of DEFAULT_BACKENDS that are available. ValueError if it is not."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend: expected {', '.join(BACKENDS)}, got {backend!r}")
    reasons = {name: _unavailable(name) for name in (DEFAULT_BACKENDS if backend is None else (backend,))}
    if backend is not None and reasons[backend]:
        raise ValueError(f"backend {backend!r} cannot be tuned here: {reasons[backend]}")
    available = [name for name, reason in reasons.items() if not reason]
    registry: Any = dispatch.registry()
    return [CpuTuner() if name == "cpu" else CudaTuner(registry[name]) for name in available]


def _unavailable(name: str) -> str:
    """Why a backend cannot run here; empty if it can."""
    if name not in dispatch.registry():
        return "it is not installed"
    return dispatch.registry()[name].available().reason


def log_path(tuner: Tuner) -> Path:
    """The log of this device with these versions of flashkit's kernels and of the software they depend on."""
    identity = repr(tuner.identity())
    slug = re.sub(r"[^a-z0-9]+", "-", str(profiles.criteria(tuner.kind)["name"]).lower()).strip("-")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:10]
    return profiles.user_dir().parent / "autotune" / f"{tuner.backend}-{slug}-{digest}.jsonl"


def _tune(
    tuner: Tuner, quick: bool, dtypes: Sequence[str] | None, budget: float | None, resume: bool,
    output: Path | None, force: bool, clock: Callable[[], float],
) -> tuple[list[Outcome], Path | None]:  # fmt: skip
    """Tune one backend: the outcomes, and the file of the profile, if it was written."""
    effort = tuner.effort(quick)
    end = clock() + (effort.budget if budget is None else budget)
    log, targets = Log(log_path(tuner), tuner.tile, resume), tuner.targets(effort, dtypes)
    try:
        with BackgroundLoad() as load:
            outcomes = list(_search(tuner, targets, log, effort, end, clock))
    finally:
        if background_warning(load.share):
            log.add(Disturbance(load.share or 0.0))
    warning = background_warning(log.disturbed)
    path = None
    if force or not warning:
        path = _write(profile_of(outcomes, log.peaks, tuner), output)
    dispatch.forget()
    profiles.forget()
    _report(outcomes, targets, log, path, tuner, warning)
    return outcomes, path


def _search(
    tuner: Tuner, targets: Sequence[Target], log: Log, effort: Effort, end: float, clock: Callable[[], float]
) -> Iterator[Outcome]:
    """Search target by target, each with an equal share of the time that is left, but no less than MIN_TIME."""
    tuner.begin(effort, targets)
    steps = 2 * effort.blocks + effort.shapes + 5
    with progress(steps * len(targets) + 1, TaskProgressColumn()) as update:
        update(description="bandwidths and peak FLOP/s")
        if log.peaks is None:
            log.add(tuner.measure_peaks())
        best: dict[tuple[str, ...], float] = {}
        for number, target in enumerate(targets):
            update(description=str(target), completed=1 + number * steps)
            left = end - clock()
            deadline = clock() + min(left, max(left / (len(targets) - number), MIN_TIME))
            step = lambda: update(advance=1)
            rival_gflops = best.get(target.problem, 0.0)
            outcome = Search(target, tuner, log, effort, deadline, clock, step, rival_gflops).run()
            if outcome is not None:
                best[target.problem] = max(rival_gflops, outcome.gflops)
                yield outcome


def profile_of(outcomes: Sequence[Outcome], peaks: MeasuredPeaks | None, tuner: Tuner) -> dict[str, Any]:
    """The fields of a profile file: the device, its measured peaks, and a row of a tile table for each outcome."""
    versions = {name: version for name, version in tuner.versions().items() if name != "python"}
    result: dict[str, Any] = {"schema": profiles.SCHEMA, "device": profiles.criteria(tuner.kind)}
    if peaks is not None:

        def measured(value: float) -> dict[str, Any]:
            return {"measured": value, "date": peaks.date[:10], "versions": versions}

        sram = peaks.l2_bandwidth_gbs if tuner.sram == "l2" else peaks.l1_bandwidth_gbs
        result["memory"] = {"bandwidth_gbs": measured(peaks.bandwidth_gbs), "sram_bandwidth_gbs": measured(sram)}
        result["peak_tflops"] = {dtype: measured(value) for dtype, value in peaks.peak_tflops.items()}
    tables: dict[str, list[dict[str, Any]]] = {}
    for o in outcomes:
        speed = {"gflops": four_digits(o.gflops)} if tuner.kind == "cpu" else {"tflops": four_digits(o.gflops / 1000)}
        provenance = {**speed, "date": now()[:10], "versions": versions}
        why = f"{o.why}; {tuner.conditions(o.target)}"
        row = {**o.conditions, **o.tile.row, "why": why, "measured": provenance}
        tables.setdefault(tuner.table(o.target), []).append(row)
    result["tiles"] = tables
    return result


def _write(profile: dict[str, Any], output: Path | None) -> Path:
    """Write a profile to `output`, replaced atomically, or by default to the user's profiles; returns its path."""
    if output is None:
        return profiles.write_user_profile(profile)
    text = profiles.dump(profile)
    profiles.parse(text, str(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    trust.write(output, text.encode())
    return output


def _report(
    outcomes: Sequence[Outcome], targets: Sequence[Target], log: Log, path: Path | None, tuner: Tuner, warning: str
) -> None:
    """Print the measured peaks, a table of the outcomes, what is unfinished, and the paths that were written."""
    console = stdout()
    if log.peaks is not None:
        p, (slow, middle, fast) = log.peaks, tuner.levels
        flops = ", ".join(f"{dtype} {digits(value)}" for dtype, value in p.peak_tflops.items())
        console.print(
            f"bandwidth in GB/s: {slow} {p.bandwidth_gbs:.1f}, {middle} {p.l2_bandwidth_gbs:.0f}, "
            f"{fast} {p.l1_bandwidth_gbs:.0f}; peak TFLOP/s: {flops}"
        )
    rows = []
    for o in outcomes:
        gain = "as before" if o.tile == o.before else f"{o.gain:.2f} x"
        rows.append([str(o.target), str(o.tile), digits(o.gflops / 1e3), gain, str(o.tried), str(o.wrong or "")])
    print_table(console, ["for", "tile"], ["TFLOP/s", "speed-up", "tried", "wrong"], rows)
    faster = [o for o in outcomes if o.tile != o.before]
    if faster:
        best = max(faster, key=lambda o: o.gain)
        console.print(f"{len(faster)} of {len(outcomes)} got faster, most of all {best.target}: {best.gain:.2f} x")
    done = [o.target for o in outcomes]
    failed = [t for t in targets if t not in done and any(trial.status != "ok" for trial in log.of(t.key))]
    for target in failed:
        console.print(f"{target}: every tile tried gives wrong results; please report it with the log")
    unfinished = len(targets) - len(failed) - sum(o.complete for o in outcomes)
    if unfinished:
        console.print(f"the time was up with {unfinished} of {len(targets)} unfinished: run again to resume")
    if warning:
        console.print(warning)
    if path is None:
        console.print(
            "no profile is written: run again with --no-resume while nothing else runs, or with --force to write these"
        )
    else:
        console.print(f"profile  {path}", soft_wrap=True)
    console.print(f"log      {log.path}", soft_wrap=True)
