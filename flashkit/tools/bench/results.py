"""Result files of `flashkit bench`: a line of JSON for each case and direction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ...spec import Direction
from .cases import Case

SCHEMA = 1


class Result(msgspec.Struct, forbid_unknown_fields=True):
    """One case in one direction: seconds, bytes, FLOPs.

    run: when the run began (UTC), the same for all its results. bytes: least traffic with main memory. timings: by
    contender and yardstick, see `Timing.as_dict`. times_as_fast: flashkit's speed over that of a baseline, median, low
    and high of the rounds. skipped: the reason for each baseline that was not timed. memory: growth of peak resident
    memory, outputs included, in a forward or a forward and a backward pass. background_load: share of the cores' time
    that other processes took. yardsticks: flashkit's rate over that of the yardstick. errors: by contender and output,
    see `errors` in measure.py.
    """

    run: str
    case: Case
    direction: Direction
    flops: float
    bytes: int
    timings: dict[str, dict[str, float]]
    times_as_fast: dict[str, dict[str, float]]
    skipped: dict[str, str]
    memory: dict[str, int]
    machine: dict[str, Any]
    background_load: float | None = msgspec.field(default=None, name="neighbours")
    yardsticks: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    errors: dict[str, dict[str, float]] = msgspec.field(default_factory=dict)
    schema: int = SCHEMA

    def gflops(self, name: str) -> float:
        return self.flops / self.timings[name]["median"] / 1e9


def read(file: Path) -> list[Result]:
    """The results of the last run in a file, in order. msgspec.ValidationError if a line is no valid `Result`."""
    texts = file.read_text(encoding="utf-8").splitlines()
    results = [msgspec.json.decode(text, type=Result) for text in texts if text.strip()]
    return [result for result in results if result.run == results[-1].run]


def append(file: Path, result: Result) -> None:
    """Append a result to a file at once, so that an interrupted run keeps its results."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(msgspec.json.encode(result).decode() + "\n")
