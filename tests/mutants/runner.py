"""Judge faults, several at a time: each job has a copy of the tree and a cache of kernels of its own.

Before, the tests run without a fault. That fills the caches, names the tests that fail on this machine anyway, which
then judge nothing, and says how long a stage takes: much longer, and the fault has made it endless.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

from . import Area, Fault, stage
from .results import Record, Results, digest
from .tree import Tree

SELECTIONS = {"fast": ("not slow",), "all": ("not slow", "slow"), "device": ("gpu",)}
"""Expressions of pytest's -m: all stages run with the first one, then with the next."""

Step = tuple[str, str]
"""A stage and a selection."""

ON_DEVICE = "FLASHKIT_CUDA_WATCHDOG=1"
"""A barrier that waits for ever ends a kernel."""

WORKERS = 4
"""Of an area's step without a fault, where there are more jobs: few of these steps take long."""

NEIGHBOURS = 6
"""Tests that are tried first, because they have found other faults. Most faults are found by the same few."""

UNKNOWN = 60
"""Seconds of a step that was not run without a fault, because each of its tests was."""

T = TypeVar("T")


class Plain(NamedTuple):
    """A step without a fault: the tests that fail, and seconds, with compiling."""

    failed: tuple[str, ...]
    seconds: float

    @property
    def longest(self) -> float:
        """A fault compiles kernels again and meets other loads of the machine, but no more than that."""
        return 60 + 3 * self.seconds


class Trial(NamedTuple):
    """A fault that is to be judged, by its own steps if there are any, or else by those of its area."""

    area: Area
    fault: Fault
    own: tuple[Step, ...]
    stages: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.own or self.stages


class Judge:
    """Trees for `jobs` faults at a time.

    work: keeps what is known of the tests without faults: a cache of kernels, and a file of steps.
    """

    def __init__(self, root: Path, folder: Path, work: Path, jobs: int = 1, say: Callable[[str], None] = print) -> None:
        work = work.absolute()  # FLASHKIT_CACHE_DIR refuses others
        self.trees = [Tree(root, folder / str(job), work / "kernels") for job in range(jobs)]
        self.digest, self.say = self.trees[0].digest, say
        self._file = work / "plain.json"
        self._plain: dict[Step, Plain] = {}
        known = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        if known.get("tree") == self.digest and (work / "kernels").exists():
            self._plain = {
                (s["stage"], s["selection"]): Plain(tuple(s["failed"]), s["seconds"]) for s in known["steps"]
            }
        else:
            for path in sorted((work / "kernels").rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()

    def run(
        self, areas: Iterable[Area], results: Results, tests: str = "all", limit: float = 3600, plain: float = 1800
    ) -> None:
        """Judge the faults of areas that results do not know, the longest tests first; on a device the shortest.

        A fault is tried as soon as the steps that it takes are known without a fault: first with its own stage, and
        with the area's, which take longer, if it survives that.

        limit: seconds for a fault's own stage, and for the area's; plain: seconds for a step without a fault.
        """
        left = [
            Trial(area, fault, *steps)
            for area in areas
            for fault in area.faults
            if results.known(area.name, fault, tests) is None and any(steps := _steps(area, fault, results, tests))
        ]
        faults, done, asked = list(left), 0, set(self._plain)
        workers = WORKERS if len(self.trees) > WORKERS and find_spec("xdist") else 1

        def to_measure(by_own: bool) -> Step | None:
            steps = (step for trial in faults if bool(trial.own) is by_own for step in trial.steps)
            return next((step for step in steps if step not in asked), None)

        def next_job() -> Callable[[Tree], Trial | Record | tuple[Step, Plain]] | None:
            ready = [trial for trial in faults if all(step in self._plain for step in trial.steps)]
            if not ready:
                own = to_measure(True)
                if (step := own or to_measure(False)) is None:
                    return None
                asked.add(step)
                return lambda tree: (step, self._measure(tree, step, plain, 1 if own else workers))
            seconds = [sum(self._plain[step].seconds for step in trial.steps) for trial in ready]
            chosen = ready[seconds.index(min(seconds) if tests == "device" else max(seconds))]
            faults.remove(chosen)
            return lambda tree: self._judge(tree, chosen, results, tests, limit)

        for found in self._each(next_job, 2 * workers):
            if isinstance(found, Trial):
                faults.append(found)
                continue
            if isinstance(found, tuple):
                self._keep(*found)
                continue
            results.add(found)
            done += 1
            by = f"{found['outcome'].upper()}: {found['by']}" if found["by"] else found["outcome"].upper()
            self.say(f"{done}/{len(left)} {found['area']}: {found['name']}: {by} ({found['seconds']:.0f} s)")

    def _judge(self, tree: Tree, trial: Trial, results: Results, tests: str, limit: float) -> Trial | Record:
        """Run the trial's steps until one finds the fault, and first the tests that have found its neighbours. The
        result is a further trial where the fault's own stage does not find it.
        """
        start, outcome, by, which = time.monotonic(), "survived", None, ("", None)
        area, fault, steps = trial.area, trial.fault, trial.steps
        tree.refill_cache()
        first = [] if _own(fault, tests) else self._neighbours(area, fault, results, steps[0][1])
        with tree.fault(fault):
            for text, selection in [*first, *steps]:
                failed, _ = plain = self._plain.get((text, selection), Plain((), UNKNOWN))
                remains = limit - (time.monotonic() - start)
                found = tree.run(text, selection, min(remains, plain.longest), failed)
                if found.kind == "passed" or ((text, selection) in first and found.kind != "failed"):
                    continue
                which = text, selection
                if found.kind == "failed":
                    outcome, by = "killed", (*found.tests, found.said)[0]
                elif found.kind == "endless" and plain.longest < remains:
                    outcome, by = "killed", f"{text}: {found.said}"
                else:
                    outcome, by = "timeout" if found.kind == "endless" else "error", found.said
                break
        if outcome == "survived" and trial.own and trial.stages:
            return trial._replace(own=())
        return {
            "area": area.name, "name": fault.name, "tests": tests,
            "outcome": outcome, "by": by, "stage": which[0], "selection": which[1],
            "seconds": round(time.monotonic() - start, 1), "fault": digest(fault), "tree": tree.digest,
        }  # fmt: skip

    def _neighbours(self, area: Area, fault: Fault, results: Results, selection: str) -> list[Step]:
        """A step of the tests that have found most faults of the area, those of the same file first."""
        files = {other.name: other.file for other in area.faults}
        found: dict[str, Counter[str]] = {}  # by the settings of the stage
        for record in list(results.records.values()):
            if (record["area"], record["tree"], record["selection"]) == (area.name, self.digest, selection):
                if record["outcome"] == "killed" and "::" in record["by"] and " - " not in record["by"]:
                    settings = shlex.join(f"{name}={x}" for name, x in stage(record.get("stage", "")).settings.items())
                    points = 100 if files.get(record["name"]) == fault.file else 1
                    found.setdefault(settings, Counter())[record["by"]] += points
        if not found:
            return []
        settings, tests = max(found.items(), key=lambda one: one[1].total())
        return [(f"{settings} {shlex.join(test for test, _ in tests.most_common(NEIGHBOURS))}".strip(), selection)]

    def _measure(self, tree: Tree, step: Step, timeout: float, workers: int) -> Plain:
        """Run a step without a fault. Its kernels are those that other steps find compiled."""
        start = time.monotonic()
        found = tree.run(*step, timeout, workers=workers, cache=tree.warm)
        if found.kind in ("endless", "error") or (found.kind == "failed" and not found.tests):
            raise ValueError(f"{step[0]!r} cannot be run without any fault: {found.said}")
        if missing := [test for test in found.tests if "::" not in test]:
            raise ValueError(f"{', '.join(missing)} cannot be collected: {step[0]!r}")
        return Plain(found.tests, round(workers * (time.monotonic() - start), 1))

    def _keep(self, step: Step, plain: Plain) -> None:
        """For this run and the next ones."""
        self._plain[step] = plain
        self.say(f"without a fault: {' -m '.join(step)} ({plain.seconds:.0f} s)")
        for test in plain.failed:
            self.say(f"  fails, and judges nothing: {test}")
        kept = [
            {"stage": text, "selection": selection, **plain._asdict()}
            for (text, selection), plain in self._plain.items()
        ]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps({"tree": self.digest, "steps": kept}, indent=1), encoding="utf-8")

    def _each(self, next_job: Callable[[], Callable[[Tree], T] | None], cores: int) -> Iterator[T]:
        """Do jobs, each with a tree that is free; yields what they return, in the order of their ends.

        next_job: None where what runs has to end first, or where nothing is left. cores: for each job, at least.
        """
        free, running = list(self.trees), dict[Future[T], Tree]()

        def done(tree: Tree, job: Callable[[Tree], T]) -> T:
            _take_cores(self.trees.index(tree), len(self.trees), cores)
            return job(tree)

        with ThreadPoolExecutor(len(self.trees)) as pool:
            try:
                while True:
                    while free and (job := next_job()):
                        tree = free.pop()
                        running[pool.submit(done, tree, job)] = tree
                    if not running:
                        return
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        free.append(running.pop(future))
                        yield future.result()
            except BaseException:
                for tree in self.trees:
                    tree.stop()
                for future in running:
                    with suppress(BaseException):
                        future.result()
                raise


def _take_cores(job: int, jobs: int, least: int) -> None:
    """Give this thread, and what it starts, its share of the process's cores: tests take as many threads."""
    if jobs > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(os.getpid()))
        share = min(len(cores), max(least, len(cores) // jobs))
        os.sched_setaffinity(0, {cores[(job * len(cores) // jobs + i) % len(cores)] for i in range(share)})


def _steps(area: Area, fault: Fault, results: Results, tests: str) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps that may find the fault, its own and those of its area, in the order in which they are tried."""
    selections, own, stages = SELECTIONS[tests], _own(fault, tests), area.stages
    if tests == "device":
        stages = tuple(f"{ON_DEVICE} {text}" for text in area.device)
    elif tests == "all" and results.survived_fast(area.name, fault):
        selections = selections[1:]
    of_own = tuple((own, selection) for selection in selections if own)
    return of_own, tuple((text, selection) for selection in selections for text in stages)


def _own(fault: Fault, tests: str) -> str:
    """The stage to try first, or "". On a device that for the emulated one may find the fault, too."""
    if tests != "device":
        return fault.tests
    return f"{ON_DEVICE} {own}" if (own := fault.device or fault.tests) else ""
