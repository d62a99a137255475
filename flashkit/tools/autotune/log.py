"""The log of `flashkit autotune`: trials and measured peaks as lines of JSON. A resumed run repeats none of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from ...devices import trust

Stage = Literal["in use", "blocks", "shapes", "final"]
T = TypeVar("T")


class Trial(msgspec.Struct, Generic[T], frozen=True, tag="trial"):
    """One tile on one target. The numbers of a trial that was not timed are None.

    seconds: the median. ratio, high: of the time to that of the tile in use, median and 80 % quantile over the rounds.
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
    note: str = ""  # the error, if status is "wrong" or "failed"
    date: str = ""


class MeasuredPeaks(msgspec.Struct, frozen=True, tag="rates"):
    """Bandwidths in 1e9 bytes/s and peaks in 1e12 FLOP/s of the whole device. On a GPU l1 is shared memory."""

    bandwidth_gbs: float
    l2_bandwidth_gbs: float
    l1_bandwidth_gbs: float
    peak_tflops: dict[str, float]
    date: str = ""


class Log:
    """A log file, read when it is opened; every entry is appended at once.

    Parameters
    ----------
    path
        The file; its folder is made.
    tile
        Type of the tiles in its trials.
    resume
        False: begin with an empty file.

    Raises
    ------
    UntrustedError
        If another user could have written the file or can put files into its directory.
    """

    def __init__(self, path: Path, tile: Any, resume: bool = True) -> None:
        self.path = trust.directory(path.parent, make=True) / path.name
        self.trials: list[Trial[Any]] = []
        self.peaks: MeasuredPeaks | None = None
        if not resume:
            self.path.unlink(missing_ok=True)
        entries: Any = Trial[tile] | MeasuredPeaks
        content = b""
        with suppress(FileNotFoundError):
            content = trust.read(self.path)
        for line in content.splitlines():
            # A line that was truncated when its process was killed, or is no text, is skipped: its trial is repeated.
            with suppress(msgspec.DecodeError, ValueError, RecursionError):
                self._take(msgspec.json.decode(line, type=entries))
        if content and not content.endswith(b"\n"):
            trust.append(self.path, b"\n")

    def add(self, entry: Trial[Any] | MeasuredPeaks) -> None:
        trust.append(self.path, msgspec.json.encode(entry) + b"\n")
        self._take(entry)

    def of(self, target: str) -> list[Trial[Any]]:
        """The trials of the target with this key, in order."""
        return [trial for trial in self.trials if trial.target == target]

    def _take(self, entry: Trial[Any] | MeasuredPeaks) -> None:
        if isinstance(entry, MeasuredPeaks):
            self.peaks = entry
        else:
            self.trials.append(entry)


def four_digits(x: float) -> float:
    """x to four significant digits, which is as precise as a measurement is."""
    return float(f"{x:.4g}")
