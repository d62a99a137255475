"""The log of `flashkit autotune`: what was tried and measured, a line of JSON each, so that it is not tried again."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ...devices import trust

Stage = Literal["in use", "blocks", "shapes", "final"]
T = TypeVar("T")


class Trial(msgspec.Struct, Generic[T], frozen=True, tag="trial"):
    """One tile on one target. Not timed: numbers are None.

    seconds: median. ratio, high: to the tile in use, the median and the 80 % quantile of the rounds.
    """

    target: str
    stage: Stage
    tile: T
    status: Literal["ok", "wrong", "failed"]
    seconds: float | None = None
    ratio: float | None = None
    high: float | None = None
    gflops: float | None = None
    rounds: int = 0
    note: str = ""  # what was wrong
    date: str = ""


class Rates(msgspec.Struct, frozen=True, tag="rates"):
    """Bandwidths in 1e9 bytes/s and peak rates in 1e12 FLOP/s of the whole device. l1: of a GPU shared memory."""

    bandwidth_gbs: float
    l2_bandwidth_gbs: float
    l1_bandwidth_gbs: float
    peak_tflops: dict[str, float]
    date: str = ""


class Log:
    """Trials, of tiles of this type, and rates as JSON lines in a file, read back when it is opened.

    UntrustedError where another user could have written the file or can put files into its directory.
    """

    def __init__(self, path: Path, tile: Any, resume: bool = True) -> None:
        self.path = trust.directory(path.parent, make=True) / path.name
        self.trials: list[Trial[Any]] = []
        self.rates: Rates | None = None
        if not resume:
            self.path.unlink(missing_ok=True)
        entries: Any = Trial[tile] | Rates
        content = b""
        with suppress(FileNotFoundError):
            content = trust.read(self.path)
        for line in content.splitlines():
            # A line may be cut short, when its process was killed, or be no text: that tile is tried again.
            with suppress(msgspec.DecodeError, ValueError, RecursionError):
                self._take(msgspec.json.decode(line, type=entries))
        if content and not content.endswith(b"\n"):
            trust.append(self.path, b"\n")

    def add(self, entry: Trial[Any] | Rates) -> None:
        trust.append(self.path, msgspec.json.encode(entry) + b"\n")
        self._take(entry)

    def of(self, target: str) -> list[Trial[Any]]:
        return [trial for trial in self.trials if trial.target == target]

    def _take(self, entry: Trial[Any] | Rates) -> None:
        if isinstance(entry, Rates):
            self.rates = entry
        else:
            self.trials.append(entry)
