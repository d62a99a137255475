"""What is tuned: targets and tiles, how much is tried, and what the search asks of a backend and its device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol

from ...devices.schema import Kind, TileRow
from ...devices.timing import Timing
from ...spec import Direction
from .log import MeasuredPeaks

DROP = 2.0
"""A tile that takes this many times as long as the best one is dropped from further rounds. A kernel generation whose
tile in use is this many times slower than another generation gets no further trials."""

DECODE_ROWS = 16
"""Rows of a profile for decoding apply up to this many query rows that share keys."""


class Tile(Protocol):
    """A tile that can be tried. Equal tiles are one tile; the log stores them as JSON; str() is for people."""

    @property
    def block_q(self) -> int: ...

    @property
    def block_k(self) -> int: ...

    @property
    def shape(self) -> Hashable:
        """Everything but block_q and block_k: on a CPU the register block, on a GPU the kernel generation."""

    @property
    def row(self) -> dict[str, Any]:
        """The tile as fields of a profile's row."""


@dataclass(frozen=True)
class Target:
    """What a row of a tile table is for: a dtype, head dims from min_head_dim to head_dim, masks or not, or decoding
    (`few` queries), and a kernel generation.
    """

    direction: Direction
    dtype: str
    head_dim: int
    causal: bool = False
    few: bool = False
    generation: str = ""
    min_head_dim: int = 1

    @property
    def key(self) -> str:
        """The name of the target in the log."""
        return " ".join(filter(None, (*self.problem, self.generation)))

    @property
    def problem(self) -> tuple[str, ...]:
        """The computation, whichever kernel generation runs it."""
        kind = "few" if self.few else "causal" if self.causal else "full"
        return self.direction, self.dtype, str(self.head_dim), kind

    def row_conditions(self, in_use: TileRow | None, tokens: int) -> dict[str, Any]:
        """The conditions of a row for the target: its own and those of the row in use, whose tile the new one replaces.
        On a GPU shorter sequences than a quarter of the `tokens` timed, and calls that do not fill the device, are left
        to other rows.
        """
        found: dict[str, Any] = dict(in_use.conditions) if in_use else {}
        least = {"min_head_dim": self.min_head_dim}
        if self.generation and not self.few:
            least |= {"min_queries": tokens // 4, "min_keys": tokens // 4, "min_tiles_per_sm": 1}
        found |= {name: max(n, found.get(name, n)) for name, n in least.items()}
        last = {"max_rows": DECODE_ROWS} if self.few else {"mask": self.causal}
        return found | {"dtype": self.dtype, "max_head_dim": self.head_dim} | last

    def __str__(self) -> str:
        kind = ", one query" if self.few else ", causal" if self.causal else ""
        generation = f", {self.generation}" if self.generation else ""
        return f"{self.direction}, {self.dtype}, head dim {self.head_dim}{kind}{generation}"


@dataclass(frozen=True)
class Effort:
    """How much is tried.

    tokens: of the problem that is timed. blocks: choices of (block_q, block_k) with one shape. shapes: other shapes.
    rounds: of a timing. budget: seconds for all targets.
    """

    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    tokens: int
    blocks: int
    shapes: int
    rounds: int
    budget: float

    def targets(self, dtypes: Sequence[str] | None = None) -> list[Target]:
        """All targets of these dtypes (by default the effort's own), without kernel generations."""
        return [
            Target(direction, dtype, head_dim, causal, min_head_dim=before + 1)
            for dtype in dtypes or self.dtypes
            for before, head_dim in pairwise((0, *self.head_dims))
            for direction in ("forward", "backward")
            for causal in (False, True)
        ]


class TileRunner(Protocol):
    """Runs tiles of targets on a device."""

    def in_use(self, target: Target) -> Any:
        """The tile that attention uses now."""

    def row_in_use(self, target: Target) -> TileRow | None:
        """The profile's row that decided about it, before anything is written."""

    def candidates(self, target: Target) -> Sequence[Any]:
        """Possible tiles, ranked by a model, the best first."""

    def flops(self, target: Target) -> float:
        """FLOPs of the problem that is timed."""

    def verify(self, target: Target, tile: Any) -> str:
        """What is wrong with the results of this tile; empty if they are right."""

    def time(self, target: Target, tiles: Sequence[Any], rounds: int, budget: float) -> dict[Any, Timing]:
        """Interleaved timings; budget: seconds."""


class TunableBackend(Protocol):
    """A backend that can be tuned, on the device it runs on.

    tile: the type of its tiles. levels: names of the memories whose bandwidth is measured, the slowest first. sram:
    which of them tiles of K and V are read from.
    """

    backend: str
    kind: Kind
    tile: Any
    levels: tuple[str, str, str]
    sram: Literal["l1", "l2"]

    def effort(self, quick: bool) -> Effort: ...

    def targets(self, effort: Effort, dtypes: Sequence[str] | None) -> list[Target]: ...

    def runner(self, effort: Effort, targets: Sequence[Target]) -> TileRunner: ...

    def measure_peaks(self) -> MeasuredPeaks: ...

    def table(self, target: Target) -> str:
        """The tile table of a profile that attention asks for this target."""

    def conditions(self, target: Target) -> str:
        """The conditions of the measurement, for the `why` of a profile's row."""

    def versions(self) -> dict[str, str]:
        """Versions of the software that the speed depends on."""

    def identity(self) -> Any:
        """The device, versions and kernel sources that a log is valid for."""
