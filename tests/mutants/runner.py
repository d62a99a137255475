"""Run the tests of an area on a copy of the tree that has one fault."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import Area, Fault, stage

SELECTIONS = {"fast": ("not slow",), "all": ("not slow", "slow")}
"""Expressions of pytest's -m: all stages run with the first one, then with the next."""

Record = dict[str, Any]


class Results:
    """What is known of each fault: a file of JSON lines, the last line of a fault counts.

    A killed fault stays killed while its text is the same. One that survived is tried again when any source or test
    has changed.
    """

    def __init__(self, path: Path, tree: str) -> None:
        self.path, self.tree = path, tree
        self.records: dict[tuple[str, str, str], Record] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.records[record["area"], record["name"], record["tests"]] = record

    def known(self, area: str, fault: Fault, tests: str) -> Record | None:
        """What is known of the fault by these tests. All tests kill what the fast ones kill."""
        for by in dict.fromkeys((tests, "fast")):
            record = self.records.get((area, fault.name, by))
            if record is None or record["fault"] != digest(fault):
                continue
            if record["killed"] or (by == tests and record["tree"] == self.tree):
                return record
        return None

    def left(self, area: str, fault: Fault, tests: str) -> tuple[str, ...]:
        """The selections of tests that have not let the fault survive."""
        fast = self.records.get((area, fault.name, "fast"))
        survived = fast is not None and (fast["fault"], fast["tree"]) == (digest(fault), self.tree)
        return SELECTIONS[tests][1:] if survived and tests == "all" else SELECTIONS[tests]

    def add(self, record: Record) -> None:
        self.records[record["area"], record["name"], record["tests"]] = record
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def digest(fault: Fault) -> str:
    return hashlib.sha256(repr((fault.file, fault.old, fault.new)).encode()).hexdigest()[:16]


class Tree:
    """A copy of the checkout's files, tracked and new ones, in `folder`, with a cache of kernels beside it.

    warm: kernels that tests without a fault have compiled; kept between runs.
    """

    def __init__(self, root: Path, folder: Path, warm: Path) -> None:
        self.root, self.copy, self.cache, self.warm = root, folder / "tree", folder / "cache", warm
        self._changes = 0
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        total = hashlib.sha256()
        for name in sorted(filter(None, names.split("\0"))):
            source, target = root / name, self.copy / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
                if name.startswith(("flashkit/", "tests/")) and not name.startswith("tests/mutants/"):
                    total.update(name.encode() + b"\0" + source.read_bytes())
        self.digest = total.hexdigest()[:16]

    def write(self, fault: Fault) -> None:
        path = self.copy / fault.file
        self._store(path, fault.applied(path.read_text(encoding="utf-8")))

    def restore(self, fault: Fault) -> None:
        self._store(self.copy / fault.file, (self.root / fault.file).read_text(encoding="utf-8"))

    def _store(self, path: Path, text: str) -> None:
        """With a time of its own: Python tells bytecode of former sources by times in seconds, and by sizes."""
        path.write_text(text, encoding="utf-8")
        self._changes += 1
        os.utime(path, (self._changes, self._changes))

    def refill_cache(self) -> None:
        """Give the next runs the kernels of the code without faults, and nothing that a fault has left."""
        shutil.rmtree(self.cache, ignore_errors=True)
        if self.warm.exists():
            shutil.copytree(self.warm, self.cache)

    def keep_cache(self) -> None:
        if self.cache.exists():
            shutil.rmtree(self.warm, ignore_errors=True)  # of former sources
            shutil.copytree(self.cache, self.warm)

    def failure(self, text: str, selection: str, timeout: float) -> str | None:
        """Run a stage. The first test that fails, or how pytest ended without one; None if all pass."""
        chosen = stage(text)
        marks = f"({chosen.marks}) and {selection}" if chosen.marks else selection
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *chosen.arguments,
            "-m", marks,
        ]  # fmt: skip
        environment = {n: x for n, x in os.environ.items() if not n.startswith(("FLASHKIT_", "NUMBA_", "PYTEST_"))}
        environment |= {
            "PYTHONPATH": str(self.copy), "FLASHKIT_CACHE_DIR": str(self.cache), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            **chosen.settings,
        }  # fmt: skip
        process = subprocess.Popen(
            command, cwd=self.copy, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return f"no end within {timeout:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it leads its own group; programs that it started are in it
            process.wait()
        if process.returncode in (0, 5):  # 5: the selection leaves no test
            return None
        if process.returncode == 4:
            raise ValueError(f"pytest cannot run {text!r}:\n{output}")
        found = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
        return found[1] if found else f"pytest ended with status {process.returncode}"


def stages_of(area: Area, fault: Fault | None, selections: Iterable[str]) -> Iterable[tuple[str, str]]:
    """(stage, selection) in the order in which they are tried."""
    own = (fault.tests,) if fault and fault.tests else ()
    for selection in selections:
        for text in own + area.stages:
            yield text, selection


def check_baseline(tree: Tree, area: Area, tests: str, timeout: float) -> None:
    """The area's tests pass without a fault. Compiles their kernels."""
    texts = dict.fromkeys(pair for fault in (None, *area.faults) for pair in stages_of(area, fault, SELECTIONS[tests]))
    tree.refill_cache()
    for text, selection in texts:
        if failure := tree.failure(text, selection, timeout):
            raise ValueError(f"{text!r} fails without any fault: {failure}")
    tree.keep_cache()


def judge(tree: Tree, area: Area, fault: Fault, tests: str, selections: Iterable[str], timeout: float) -> Record:
    """Run the stages until one finds the fault. tests: the name under which the result is kept."""
    start, by, which = time.monotonic(), None, None
    tree.refill_cache()
    tree.write(fault)
    try:
        for text, selection in stages_of(area, fault, selections):
            if by := tree.failure(text, selection, timeout):
                which = selection
                break
    finally:
        tree.restore(fault)
    return {
        "area": area.name, "name": fault.name, "tests": tests, "fault": digest(fault), "tree": tree.digest,
        "killed": by is not None, "by": by, "selection": which, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def run(
    tree: Tree, areas: Iterable[Area], results: Results, tests: str = "all", timeout: float = 900,
    baseline: bool = True, say: Callable[[str], None] = print,
) -> None:  # fmt: skip
    """Judge every fault that the results do not know."""
    for area in areas:
        left = [fault for fault in area.faults if results.known(area.name, fault, tests) is None]
        if left and baseline:
            check_baseline(tree, area._replace(faults=tuple(left)), tests, timeout)
        for fault in left:
            record = judge(tree, area, fault, tests, results.left(area.name, fault, tests), timeout)
            results.add(record)
            say(f"{area.name}: {fault.name}: {record['by'] or 'SURVIVED'} ({record['seconds']:.0f} s)")


def score(areas: Iterable[Area], results: Results, tests: str) -> str:
    """A line for each area: faults killed, those killed by tests that are not slow, and all that were judged."""
    lines = [f"{'area':24} {'killed':>8} {'fast':>8} {'judged':>8} {'faults':>8}"]
    totals = [0, 0, 0, 0]
    for area in areas:
        known = [record for fault in area.faults if (record := results.known(area.name, fault, tests))]
        numbers = [
            sum(record["killed"] for record in known),
            sum(record["selection"] == "not slow" for record in known),
            len(known),
            len(area.faults),
        ]
        totals = [total + n for total, n in zip(totals, numbers, strict=True)]
        lines.append(f"{area.name:24} " + " ".join(f"{n:8}" for n in numbers))
    return "\n".join([*lines, f"{'all':24} " + " ".join(f"{n:8}" for n in totals)])
