"""The log of `flashkit autotune`: trials and measured peaks as lines of JSON. A resumed run repeats none of them."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ...devices import trust

Stage = Literal["in use", "blocks", "shapes", "final"]
T = TypeVar("T")


class Trial(msgspec.Struct, Generic[T], frozen=True, tag="trial"):
    """One tile on one target, None where it was not timed. ratio, high: of the time to that of the tile in use."""

    target: str
    stage: Stage
    tile: T
    status: Literal["ok", "wrong", "failed"]
    seconds: float | None = None
    ratio: float | None = None
    high: float | None = None
    gflops: float | None = None
    rounds: int = 0
    note: str = ""  # the error, if status is "wrong" or "failed"
    date: str = ""


class MeasuredPeaks(msgspec.Struct, frozen=True, tag="rates"):
    """Bandwidths in 1e9 bytes/s and peaks in 1e12 FLOP/s of the whole device. On a GPU l1 is shared memory."""

    bandwidth_gbs: float
    l2_bandwidth_gbs: float
    l1_bandwidth_gbs: float
    peak_tflops: dict[str, float]
    date: str = ""


class Disturbance(msgspec.Struct, frozen=True, tag="disturbance"):
    """The share of all cores' time, 0 to 1, that other processes took during a run whose trials are above."""

    share: float


class Log:
    """A log file of trials of `tile`s, read when it is opened; every entry is appended at once. Its folder is made.

    Lines that are no entries are skipped with one warning, and their trials are repeated; the incomplete last line of a
    killed process is skipped without one. If the disk is full, entries stay in memory, with one warning. UntrustedError
    if another user could have written the file or can put files into its directory.
    """

    def __init__(self, path: Path, tile: Any, resume: bool = True) -> None:
        self.path = trust.directory(path.parent, make=True) / path.name
        self.trials: list[Trial[Any]] = []
        self.peaks: MeasuredPeaks | None = None
        self.disturbed = 0.0  # the largest share of a run
        if not resume:
            self.path.unlink(missing_ok=True)
        entries: Any = Trial[tile] | MeasuredPeaks | Disturbance
        content = b""
        with suppress(FileNotFoundError):
            content = trust.read(self.path)
        damaged, lines = [], content.split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    self._take(msgspec.json.decode(line, type=entries))
            except (msgspec.DecodeError, ValueError, RecursionError):
                damaged += [number] if number < len(lines) else []
        if damaged:
            more = f" and {len(damaged) - 1} more" if len(damaged) > 1 else ""
            warnings.warn(f"{self.path}: line {damaged[0]}{more} is no entry of this log: skipped", stacklevel=2)
        self._separator = b"" if content.endswith(b"\n") or not content else b"\n"
        self._warned = False

    def add(self, entry: Trial[Any] | MeasuredPeaks | Disturbance) -> None:
        self._take(entry)
        try:
            trust.append(self.path, self._separator + msgspec.json.encode(entry) + b"\n")
            self._separator = b""
        except trust.UntrustedError:
            raise
        except OSError as error:
            self._separator = b"\n"  # the line may be incomplete
            if not self._warned:
                self._warned = True
                warnings.warn(f"the log cannot be written, so a later run repeats trials: {error}", stacklevel=2)

    def of(self, target: str) -> list[Trial[Any]]:
        """The trials of the target with this key, in order."""
        return [trial for trial in self.trials if trial.target == target]

    def _take(self, entry: Trial[Any] | MeasuredPeaks | Disturbance) -> None:
        if isinstance(entry, MeasuredPeaks):
            self.peaks = entry
        elif isinstance(entry, Disturbance):
            self.disturbed = max(self.disturbed, entry.share)
        else:
            self.trials.append(entry)


def four_digits(x: float) -> float:
    """x to four significant digits, which is as precise as a measurement is."""
    return float(f"{x:.4g}")
