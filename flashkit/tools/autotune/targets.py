"""What is tuned: targets and tiles, and how much is tried."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from ...devices.schema import TileRow
from ...spec import Direction

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
    """What a row is for: dtype, head dims, masks or decoding (`few` queries), and a kernel generation."""

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
        """The conditions of the target and of the row in use. On a GPU short sequences and small calls are left out."""
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
