"""`flashkit bench`: a run over cases, its progress, its table and its result file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn

from ..console import digits, print_table, progress, stdout
from . import measure
from .baselines import missing
from .cases import Case, directions, resized
from .environment import background_warning, describe, now
from .platforms import PLATFORMS, Platform
from .results import Result, append


def main(
    *, quick: bool = False, output: Path | None = None, baselines: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None, suites: Sequence[str] | None = None, device: str = "cpu",
) -> int:  # fmt: skip
    """Run the benchmark: a table on stdout, progress and errors on stderr. Returns the exit status: 0, 1 if a package
    or a device is missing, 2 for an unknown name.

    quick: few rounds, and without `suites` few cases. baselines: by default those that are installed. sizes: numbers of
    tokens, instead of those of the suites, whose dtypes, head dims and masks stay. suites: names, or "all"; by default
    all, with `sizes` the first.
    """
    try:
        platform = PLATFORMS[device]()
    except (KeyError, RuntimeError) as error:
        problem = f"expected {', '.join(PLATFORMS)}, got {device}" if isinstance(error, KeyError) else str(error)
        return _error(f"--device: {problem}", 2 if isinstance(error, KeyError) else 1)
    if suites is not None and not suites:
        return _error(f"--suite: no name; expected some of all, {', '.join(platform.suites)}", 2)
    known_suites = ["all", *platform.suites]
    options = ("--baselines", baselines or (), [*platform.baselines]), ("--suite", suites or (), known_suites)
    for option, given, known in options:
        if unknown := [name for name in given if name not in known]:
            return _error(f"{option}: expected {', '.join(known)}, got {', '.join(unknown)}", 2)
    if lacking := [package for name in baselines or () for package in missing(name, platform.requires)]:
        return _error(f"--baselines: pip install {' '.join(lacking)}", 1)
    names = list(platform.baselines if baselines is None else dict.fromkeys(baselines))
    for name, packages in {name: missing(name, platform.requires) for name in names}.items():
        if packages:
            names.remove(name)
            print(f"{name} is left out: pip install {' '.join(packages)}", file=sys.stderr)
    cases = _cases(platform, quick, sizes, suites)
    rounds, budget = (7, 5.0) if quick else (20, 4.0) if platform.is_cpu else (20, 0.6)

    results: list[Result] = []
    with progress(sum(len(directions(case)) for case in cases), MofNCompleteColumn()) as update:
        on_start = lambda label: update(description=label)
        for result in run(cases, names, rounds=rounds, budget=budget, on_start=on_start, platform=platform):
            results.append(result)
            if output is not None:
                append(output, result)
            update(advance=1)
    console = stdout()
    show(console, results, names)
    console.print(describe(results[-1].machine))
    if warning := background_warning(max(result.background_load or 0.0 for result in results)):
        console.print(warning)
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)
    return 0


def show(console: Console, results: Sequence[Result], baselines: Sequence[str]) -> None:
    """Print a row for each result: time with quantiles, GFLOP/s, speed-ups, shares of yardsticks, and memory."""
    rows = []
    for r in results:
        t = r.timings["flashkit"]
        milliseconds = f"{digits(t['median'] * 1e3)} ({digits(t['low'] * 1e3)}-{digits(t['high'] * 1e3)})"
        ratios = [f"{r.times_as_fast[name]['median']:.2f}" if name in r.times_as_fast else "-" for name in baselines]
        memory = [f"{r.memory[name] / 2**20:.1f}" if name in r.memory else "" for name in ("flashkit", "numpy")]
        shares = ", ".join(f"{name} {share['median']:.2f}" for name, share in r.yardsticks.items())
        gflops = f"{r.gflops('flashkit'):.1f}"
        rows.append([f"{r.case.label}, {r.direction}", milliseconds, gflops, *ratios, shares, *memory])
    numbers = ["ms (20-80 %)", "GFLOP/s", *(f"x {name}" for name in baselines), "share of", "MiB", "NumPy's"]
    print_table(console, ["case"], numbers, rows)


def _cases(platform: Platform, quick: bool, sizes: Sequence[int] | None, suites: Sequence[str] | None) -> list[Case]:
    """The cases of the suites, or without suites the quick ones; with sizes, each of them at these."""
    default = {next(iter(platform.suites))} if sizes else {"all"}
    named = [cases for name, cases in platform.suites.items() if {name, "all"} & set(suites or default)]
    cases = list(platform.quick) if quick and not suites else [case for cases in named for case in cases]
    return list(dict.fromkeys(resized(case, n) for n in sizes for case in cases)) if sizes else cases


def run(
    cases: Sequence[Case], baselines: Sequence[str], *, rounds: int, budget: float, on_start: Callable[[str], None],
    platform: Platform,
) -> Iterator[Result]:  # fmt: skip
    """Measure every case in its directions; on_start gets the label of each."""
    from ...backends.cpu import threads

    started, count = now(), threads.count()
    for case in cases:
        for direction in directions(case):
            on_start(f"{case.label}, {direction}")
            with _blas_threads(count) if platform.is_cpu else nullcontext():
                yield measure.measure(
                    case, direction, baselines, run=started, rounds=rounds, budget=budget, threads=count,
                    platform=platform, with_memory=platform.is_cpu and _shows_memory(case),
                )  # fmt: skip


def _shows_memory(case: Case) -> bool:
    """Whether memory is measured: in a few long cases, because each takes a process of its own."""
    plain = case.dtype == "float32" and not case.causal and not case.masked
    return plain and ((case.keys >= 2048 and case.head_dim == 64) or case.n_q == 1)


def _blas_threads(count: int) -> AbstractContextManager[Any]:
    """Limit NumPy's matrix product to as many threads as flashkit uses, if threadpoolctl is installed."""
    from ...devices import host

    if count == host.cpu_count():
        return nullcontext()
    if find_spec("threadpoolctl") is None:
        problem = f"flashkit uses {count} of {host.cpu_count()} cores, and NumPy may use all"
        print(f"warning: {problem}; pip install threadpoolctl, or set OPENBLAS_NUM_THREADS", file=sys.stderr)
        return nullcontext()
    limits: AbstractContextManager[Any] = import_module("threadpoolctl").threadpool_limits(count, user_api="blas")
    return limits


def _error(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status
