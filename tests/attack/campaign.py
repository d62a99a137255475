"""The parent of worker processes: gives them calls, waits, and turns what goes wrong into findings.

A finding is what a call did, the smallest choice that still does it, and the command that repeats that.
"""

import json
import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import draw

ROOT = Path(__file__).resolve().parents[2]
BATCH = 500
"""Calls of one child process."""

PATIENCE = 600
"""Seconds without a line from a child until it counts as hanging."""


@dataclass
class Settings:
    """What a call depends on besides its choice."""

    backend: str = "cpu"
    lanes: str = ""
    bf16: str = ""
    generation: str = ""
    emulated: str = ""  # SMs of the emulated CUDA device
    sanitizer: str = ""  # command in front of a child's, such as compute-sanitizer
    graphs: int = 200
    batch: int = BATCH
    fixed: draw.Choice = field(default_factory=dict)
    package: str = ""  # folder of the flashkit that is attacked, where it is another than this checkout's

    def environment(self) -> dict[str, str]:
        """Of a child."""
        mine = {
            "FLASHKIT_CPU_LANES": self.lanes, "FLASHKIT_CPU_BF16": self.bf16,
            "FLASHKIT_CUDA_GENERATION": self.generation, "FLASHKIT_TEST_EMULATED": self.emulated,
        }  # fmt: skip
        fixed = {"NUMBA_NUM_THREADS": "3", "OMP_WAIT_POLICY": "passive"}
        if not self.emulated:  # the emulated device finds what hangs by itself, and does not know the watchdog's code
            fixed["FLASHKIT_CUDA_WATCHDOG"] = "1"
        fixed |= {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # the reference's matrices are small
        places = [self.package, str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]
        path = os.pathsep.join(filter(None, places))
        return os.environ | fixed | {"PYTHONPATH": path} | {name: x for name, x in mine.items() if x}

    def options(self) -> list[str]:
        """Of the command that repeats a call."""
        named = {"backend": self.backend, "lanes": self.lanes, "bf16": self.bf16, "generation": self.generation}
        named |= {"emulated": self.emulated, "sanitizer": self.sanitizer}
        return [word for name, x in named.items() if x for word in (f"--{name}", x)]


@dataclass
class Tally:
    """What a run has done."""

    calls: int = 0
    refused: int = 0
    findings: list[dict[str, Any]] = field(default_factory=list)


def lines(settings: Settings, task: dict[str, Any], until: float = float("inf")) -> Iterator[dict[str, Any]]:
    """What a child says; at last how it ended, where that was not well."""
    task = {"backend": settings.backend, "seed": 0, "graphs": settings.graphs, **task}
    task["sanitized"] = bool(settings.sanitizer)
    command = [*shlex.split(settings.sanitizer), sys.executable, "-P", "-m", "attack.worker", json.dumps(task)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=settings.environment()) as child:
        assert child.stdout is not None and child.stderr is not None
        errors, rest, heard = b"", b"", time.monotonic()
        with selectors.DefaultSelector() as selector:
            for stream in (child.stdout, child.stderr):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(timeout=1)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is child.stderr:
                        errors = (errors + data)[-20_000:]
                    else:
                        *whole, rest = (rest + data).split(b"\n")
                        heard = time.monotonic()
                        for line in whole:
                            if line.startswith(b"{"):
                                yield json.loads(line)
                            else:  # a sanitizer's
                                errors = (errors + line + b"\n")[-20_000:]
                if time.monotonic() > until or (hangs := time.monotonic() - heard > PATIENCE):
                    child.kill()
                    if time.monotonic() <= until and hangs:
                        yield {"ended": f"hung for {PATIENCE} s", "stderr": ""}
                    return
        if child.wait() != 0:
            yield {"ended": f"exit status {child.returncode}", "stderr": errors.decode(errors="replace")[-3000:]}


def numbered(
    settings: Settings, seed: int, first: int, last: int, tally: Tally, until: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """Make the calls of these numbers; yields findings."""
    at = first
    while at < last and time.monotonic() < until:
        end = min(at + settings.batch, last)
        task = {"seed": seed, "first": at, "last": end, "fixed": settings.fixed}
        choice, number = {}, at
        for line in lines(settings, task, until):
            if "begin" in line:
                choice, number = line["choice"], line["begin"]
            elif "end" in line:
                tally.calls += 1
                tally.refused += "refused" in line
                if line.get("problems"):
                    yield {"seed": seed, "number": number, "choice": choice, "problems": line["problems"]}
            else:
                yield {"seed": seed, "number": number, "choice": choice, "problems": [line["ended"], line["stderr"]]}
        if not choice:
            return  # the child did not come to a call
        at = number + 1  # before `end` where the child ended early


def check(settings: Settings, seed: int, calls: int, first: int = 0) -> Tally:
    """The calls; the test fails with the first findings and the commands that repeat them."""
    tally = Tally()
    for found in numbered(settings, seed, first, first + calls, tally):
        found["repeat"] = command(settings, found["choice"])
        tally.findings.append(found)
    assert not tally.findings, json.dumps(tally.findings[:3], indent=1)
    assert tally.calls == calls
    return tally


def problems_of(settings: Settings, choice: draw.Choice) -> list[str]:
    """What is wrong with one call, in a child of its own."""
    found: list[str] = []
    for line in lines(settings, {"calls": [choice]}):
        found += line.get("problems", [])
        if "ended" in line:
            found += [line["ended"], line["stderr"]]
    return found


def smallest(settings: Settings, choice: draw.Choice) -> tuple[draw.Choice, list[str]]:
    """The choice with every factor at its plain level that the finding does not need, and what is wrong with it."""
    found = problems_of(settings, choice)
    if not found:
        return choice, ["did not happen again in a process of its own"]
    shrunk = True
    while shrunk:
        shrunk = False
        for factor in [f for f in choice if f != "seed" and choice[f] != draw.PLAIN[f]]:
            smaller = choice | {factor: draw.PLAIN[factor]}
            if again := problems_of(settings, smaller):
                choice, found, shrunk = smaller, again, True
    return choice, found


def command(settings: Settings, choice: draw.Choice) -> str:
    """What repeats a call."""
    special = {f: x for f, x in choice.items() if x != draw.PLAIN[f]}
    words = ["python", "-m", "tests.attack", *settings.options(), "--call", json.dumps(special)]
    return shlex.join(words)
