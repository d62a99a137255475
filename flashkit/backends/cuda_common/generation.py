"""A generation: kernels for one kind of arithmetic units (`sm90`, `sm80`, `simt`), newest first in a backend.

A generation decides which problems it supports on a device, in which direction, and plans a pass. Problems that it does
not support go to the next older one; `simt` supports all. It lists the tiles worth trying, which `flashkit autotune`
times, and follows the row of a profile: `block_q`, `block_k` and `stages` are fields of the row, the other fields of a
tile are its options, with `generation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from ...devices.schema import not_followed
from ...spec import AttentionSpec, Direction, Problem, Verdict
from .arguments import Arguments
from .device import Device
from .launch import Library

Tile = TypeVar("Tile")
IN_ROW = ("block_q", "block_k", "stages")

OWN_CHOICE = "own_choice"
"""Option of a profile's row that has a measurement but no tile: the generation chooses the tile by its heuristic."""


class Kernels(Protocol):
    """Compiles kernels in the language of a backend. Names, constants and arguments are the same in all languages."""

    def __call__(self, name: str, spec: AttentionSpec, constants: tuple[tuple[str, int], ...], arch: str, /) -> Library:
        """The kernels of kernels/<name> for a spec, compiled (or cached) and loaded. `constants`: those that the file
        needs besides the ones of the spec.
        """


class Pass(Protocol):
    """One direction of a plan: its loaded kernels, and how they are launched."""

    tile: Any
    why: str
    libraries: list[Library]

    def run(self, arguments: Arguments, stream: int) -> None:
        """Enqueue the kernels. Words of `arguments` that it changes are set again by the next call."""


class Generation(Protocol):
    """Kernels for one kind of arithmetic units."""

    name: str
    directions: tuple[Direction, ...]

    has_heuristic: bool = False
    """Whether its own choice, the first of `candidates`, depends on more than a profile's row selects by, such as
    lengths, precision and modifications. Then autotune leaves it the choice if no other tile was faster.
    """

    takes_fp8: bool = False
    """Whether it is asked about problems whose q, k and v are codes of e4m3."""

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        """Whether these kernels can compute it and have enough work for it, or the reason why not."""

    def profitable(self, problem: Problem, direction: Direction) -> Verdict:
        """Whether it is faster than older generations; asked only if these are allowed."""
        return Verdict(True)

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> Sequence[Any]:
        """Tiles worth trying, by expected speed: frozen dataclasses of integers."""

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Pass:
        """A pass for the problem; row: the profile's row for this generation, or None."""


def supports_packed(spec: AttentionSpec, what: str) -> Verdict:
    """The refusal of packed sequences, of a generation that has no kernels of this kind for them."""
    return Verdict(not spec.packed, f"packed sequences have no {what} kernels here" if spec.packed else "")


def supports_paged(spec: AttentionSpec, what: str) -> Verdict:
    """The refusal of keys in pages, likewise."""
    return Verdict(not spec.paged, f"keys in pages have no {what} kernels here" if spec.paged else "")


def supports_16bit(spec: AttentionSpec, most: int) -> Verdict:
    """Whether kernels for 16-bit elements can take them: rows of whole 16-byte vectors, head dims up to `most`."""
    if spec.dtype not in ("float16", "bfloat16"):
        return Verdict(False, f"{spec.dtype} is not for these tensor cores")
    if max(spec.head_dim, spec.head_dim_v) > most:
        return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {most}")
    if spec.head_dim % 8 or spec.head_dim_v % 8:
        return Verdict(False, f"rows of head dims {spec.head_dim} and {spec.head_dim_v} are not whole 16 bytes")
    return Verdict(True)


def asked(generation: Generation, problem: Problem, device: Device, direction: Direction) -> Verdict:
    """The answer of `supports`, or the refusal of codes of e4m3 for a generation that does not know them."""
    if problem.spec.fp8 and not generation.takes_fp8:
        return Verdict(False, "it has no kernels for codes of e4m3")
    return generation.supports(problem, device, direction)


LARGEST = 1024
"""Largest number of a tile."""


def tile_of(
    kind: type[Tile], row: Any, spec: AttentionSpec, fits: Callable[[Any, AttentionSpec], bool], own: str = ""
) -> tuple[Tile | None, str]:
    """The tile of a profile's row. A row that is a tile for no spec is not followed, with a warning.

    Parameters
    ----------
    kind
        The dataclass of the tile, with its own checks. Attributes that are no fields, such as a constant block_q, must
        equal those of the row.
    row
        The profile's row, or None.
    spec
        What is computed.
    fits
        Whether a tile fits a spec, and the device.
    own
        The reason of the generation's own tile.

    Returns
    -------
    tile : Tile or None
        None: the generation chooses.
    why : str
        The reason for the tile, and why the row is not followed.
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
        for name, n in numbers.items():
            if type(n) is not int or not 0 <= n <= LARGEST:
                raise ValueError(f"{name} is {n!r}; an integer up to {LARGEST} fits")
        tile = kind(**{name: numbers[name] for name in given})
        if unknown := [name for name in sorted(numbers) if not hasattr(tile, name)]:
            raise ValueError(f"it has no {', '.join(unknown)}")
        if wrong := [f"{name} is {getattr(tile, name)}" for name, n in numbers.items() if getattr(tile, name) != n]:
            raise ValueError(", ".join(wrong))
        if fits(tile, spec):
            return tile, row.why or "the profile's row"
        if not fits(tile, replace(spec, head_dim=16, head_dim_v=16, score=None)):
            raise ValueError(f"{tile} fits no head dim")
    except (ArithmeticError, TypeError, ValueError) as error:
        not_followed(row, f"it is no tile of {kind.__name__}: {error}")
        return none(f"the profile's row is no tile: {error}")
    return none(f"the profile's tile {tile} does not fit")
