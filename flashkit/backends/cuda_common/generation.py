"""What a generation of kernels is: those for one kind of arithmetic units, newest first in a backend.

A generation says which problems it can do on a device, in which direction, and plans a pass. What it cannot do goes to
the next one down; `simt` can do everything. It lists the tiles that are worth trying, which is what `flashkit autotune`
tries, and follows a profile's row, in which such a tile stands: `block_q`, `block_k` and `stages` in fields of the row,
the tile's other fields in its options beside `generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Protocol, TypeVar

from ...spec import AttentionSpec, Direction, Problem, Verdict
from .arguments import Arguments
from .device import Device
from .launch import Library

Tile = TypeVar("Tile")
IN_ROW = ("block_q", "block_k", "stages")

OWN_CHOICE = "own_choice"
"""Option of a profile's row: it says how fast the generation is, which tile is the generation's own choice."""


class Kernels(Protocol):
    """What a backend calls to have kernels: its language is its own, names, constants and arguments are the same."""

    def __call__(self, name: str, spec: AttentionSpec, constants: tuple[tuple[str, int], ...], arch: str, /) -> Library:
        """The kernels of kernels/<name> for a spec, compiled now or before, loaded; `constants`: those that the file
        asks for beyond the spec's own.
        """


class Pass(Protocol):
    """One direction of a plan: kernels, compiled and loaded, and how they are launched."""

    tile: Any
    why: str
    libraries: list[Library]

    def run(self, arguments: Arguments, stream: int) -> None:
        """Enqueue the kernels; changes nothing in `arguments` that another call of the same would not change."""


class Generation(Protocol):
    """Kernels for one kind of arithmetic units."""

    name: str
    directions: tuple[Direction, ...]

    has_heuristic: bool = False
    """Whether the tile that it takes by itself, the first of `candidates`, depends on more than a profile's row says,
    such as lengths, precision and modifications: then autotune leaves it the choice where no other tile was faster.
    """

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        """Whether these kernels can do it, and have the work to do it well, or the sentence that says why not."""

    def profitable(self, problem: Problem, direction: Direction) -> Verdict:
        """Whether it is faster than those that come after it, which is asked where these are allowed."""
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> Sequence[Any]:
        """Tiles that fit and are worth trying, the likely fastest first: frozen dataclasses of integers."""

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Pass:
        """A pass for the problem; row: of the device's profile, for this generation, or None."""


def sixteen_bits(spec: AttentionSpec, most: int) -> Verdict:
    """Whether tensor cores take the elements as they are: 16 bits, rows of whole 16 bytes, head dims up to `most`."""
    if spec.dtype not in ("float16", "bfloat16"):
        return Verdict(False, f"{spec.dtype} is not for these tensor cores")
    if max(spec.head_dim, spec.head_dim_v) > most:
        return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {most}")
    if spec.head_dim % 8 or spec.head_dim_v % 8:
        return Verdict(False, f"rows of head dims {spec.head_dim} and {spec.head_dim_v} are not whole 16 bytes")
    return Verdict(True)


class Fallback:
    """The pass of an older generation, for calls that the kernels of a newer one cannot take, such as arrays that begin
    on odd addresses: planned, and checked, when the first of them comes.
    """

    def __init__(
        self, plan: Callable[[], Pass], spec: AttentionSpec, device: Device, direction: Direction
    ) -> None:
        self._plan, self._for = plan, (spec, device, direction)
        self._pass: Pass | None = None

    def run(self, arguments: Arguments, stream: int) -> None:
        if self._pass is None:
            from . import verify

            planned = self._plan()
            verify.trusted(planned, *self._for)
            self._pass = planned
        self._pass.run(arguments, stream)


def tile_of(kind: type[Tile], row: Any, fits: Callable[[Any], bool], own: str = "") -> tuple[Tile | None, str]:
    """The tile of a profile's row and the row's reason; or None, `own`, the reason of a generation's own tile, and why
    the row is not followed.

    kind: the dataclass of the tile, whose own checks count too. What it is not made with, such as rows that are always
    128, it has to have as the row says.
    """

    def none(why: str | None) -> tuple[None, str]:
        return None, "; ".join(filter(None, (own, why)))

    if row is None:
        return none(None)
    if row.options.get(OWN_CHOICE):
        return none(row.why)
    numbers = {name: value for name in IN_ROW if (value := getattr(row, name)) is not None}
    numbers |= {name: value for name, value in row.options.items() if name != "generation"}
    given = {field.name for field in fields(kind)} & numbers.keys()  # type: ignore[arg-type]
    try:
        tile = kind(**{name: numbers[name] for name in given})
        if unknown := [name for name in sorted(numbers) if not hasattr(tile, name)]:
            raise ValueError(f"it has no {', '.join(unknown)}")
        if wrong := [f"{name} is {getattr(tile, name)}" for name, n in numbers.items() if getattr(tile, name) != n]:
            raise ValueError(", ".join(wrong))
    except (TypeError, ValueError) as error:
        return none(f"the profile's row is no tile: {error}")
    return (tile, row.why or "the profile's row") if fits(tile) else none(f"the profile's tile {tile} does not fit")
