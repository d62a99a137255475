"""Small faults, put into the code one at a time: the tests of their area must find each.

`python -m tests.mutants` runs them and prints the score of each area. It does so in temporary copies of the tree, so
the checkout stays as it is; results are JSON lines, and `--resume` continues a run that was interrupted.

The faults of one area are a module of this package, and the name of the module is the name of the area:

    TESTS = (                                   # stages, cheapest first; a fault is killed by the first that fails
        "tests/unit/test_cpu_kernels.py",
        "tests/conformance/test_conformance.py -k 'cpu and design'",
        "FLASHKIT_TEST_EMULATED=3 tests/conformance/test_soak.py -m gpu",
    )
    FAULTS = (
        Fault("O is not rescaled", "flashkit/backends/cpu/kernels/forward.py", "o_acc[d, i] *= m_new[i]", "pass"),
        Fault("...", "flashkit/...", "old text", "new text", "tests/unit/test_planned.py -k out"),  # tried first
    )

A stage is a part of a command line: environment variables, then arguments of pytest. An area of CUDA has `DEVICE`
stages, too, for `--tests device` on a machine with a GPU, and its faults a stage to try there first. A fault's old text
occurs exactly
once in its file, so it takes in as much of its line, or of several lines, as that needs. tests/tools/test_mutants.py
holds every fault to this. Choose faults by reading the code, not the tests, and such that some result is wrong.

A fault that takes away a part of the algorithm says which, `core="rescale"`: `make fast` alone must find it.
"""

from __future__ import annotations

import importlib
import pkgutil
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CORE = "scale", "rescale", "mask edge", "ragged tile", "gradient", "sink", "lengths", "offset", "heads", "lse"
"""Parts of the algorithm. `python -m tests.mutants --core --tests fast` shows that `make fast` misses none of them."""


@dataclass(frozen=True)
class Fault:
    """A text of a file, what replaces it, and stages to try before those of the area: without and with a device.

    core: the part of the algorithm, one of `CORE`, that the fault takes away.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str = ""
    device: str = ""
    core: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the fault; ValueError unless the old text occurs exactly once."""
        if (times := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {times} times; the fault {self.name!r} needs it once")
        return text.replace(self.old, self.new)


class Stage(NamedTuple):
    """Tests that run in one process of pytest: arguments, the expression of -m, and environment variables."""

    arguments: tuple[str, ...]
    marks: str
    settings: dict[str, str]


class Area(NamedTuple):
    """The faults of one part of the code, and the stages of tests that should find them, without and with a device."""

    name: str
    stages: tuple[str, ...]
    faults: tuple[Fault, ...]
    device: tuple[str, ...] = ()

    def of(self, wanted: Callable[[Fault], bool]) -> Area:
        """The area with some of its faults."""
        return self._replace(faults=tuple(filter(wanted, self.faults)))


def areas() -> tuple[Area, ...]:
    """Every area, by the modules of this package."""
    found = []
    for module in pkgutil.iter_modules(__path__):
        if module.name not in ("__main__", "automatic", "results", "runner", "tree"):
            area = importlib.import_module(f"{__name__}.{module.name}")
            device = tuple(getattr(area, "DEVICE", ()))
            found.append(Area(module.name, tuple(area.TESTS), tuple(area.FAULTS), device))
    return tuple(found)


def stage(text: str) -> Stage:
    """A stage from its part of a command line."""
    words, settings, marks = shlex.split(text), {}, ""
    while words and "=" in words[0] and words[0].partition("=")[0].isidentifier():
        name, _, value = words.pop(0).partition("=")
        settings[name] = value
    if "-m" in words:
        at = words.index("-m")
        marks = words[at + 1]
        del words[at : at + 2]
    return Stage(tuple(words), marks, settings)
