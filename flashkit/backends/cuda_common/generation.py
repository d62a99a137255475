"""A generation: kernels for one kind of arithmetic units (`sm90`, `sm80`, `simt`), newest first in a backend.

A generation decides which problems it supports on a device, in which direction, and plans a pass. Problems that it does
not support go to the next older one; `simt` supports all. Its tile is that of the first row of the profile that is for
the generation and the problem and whose tile fits: `block_q`, `block_k` and `stages` are fields of the row, the other
fields of a tile are its options. It lists the tiles worth trying, which `flashkit autotune` times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from ...devices.schema import Profile, TileRow, not_followed
from ...errors import UnsupportedError
from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..base import refused
from . import compiler, verify
from .arguments import Arguments, addresses, aligned
from .device import Device
from .launch import Library
from .modification import NOT_DENSE

IN_ROW = ("block_q", "block_k", "stages")


class Kernels(Protocol):
    """Compiles kernels in the language of a backend. Names, constants and arguments are the same in all languages."""

    def __call__(self, name: str, spec: AttentionSpec, constants: tuple[tuple[str, int], ...], arch: str, /) -> Library:
        """The kernels of kernels/<name> for a spec, loaded. `constants`: beyond those of the spec."""


class Choice(NamedTuple):
    """A tile, the row of the profile that has it, and the reason."""

    tile: Any
    row: TileRow | None  # None: a model chose
    why: str


class Kind(NamedTuple):
    """Kernels of a generation for one kind of problem."""

    tile: type
    plan: Callable[[Any, Problem, Choice, Any], Pass]
    """Takes the arguments of `Pass`."""

    tiles: Callable[[Problem, Device], Iterable[Any]]
    """Tiles worth trying, by expected speed."""

    why: str = ""
    """Where no row has a tile: why the first of these is taken; "" if it is not."""

    has_rows: bool = True
    """Whether rows of profiles are for these kernels."""


class Generation:
    """Kernels for one kind of arithmetic units. `below`: of these the first that can takes what is left."""

    name: str
    directions: tuple[Direction, ...] = ("forward", "backward")

    takes: Collection[str] = ()
    """Names of `base.EXTRAS` that it is asked about."""

    def __init__(self, kernels: Kernels, *below: Generation) -> None:
        self.kernels, self.below = kernels, below

    def supports(self, problem: Problem, device: Device, direction: Direction) -> Verdict:
        """Whether these kernels can compute it and have enough work for it, or the reason why not."""
        raise NotImplementedError

    def kind(self, problem: Problem, direction: Direction) -> Kind:
        """The kernels for a problem that it supports."""
        raise NotImplementedError

    def profitable(self, problem: Problem, direction: Direction) -> Verdict:
        """Whether it is faster than older generations; asked only if these are allowed."""
        return Verdict(True)

    def modified(self, spec: AttentionSpec, direction: Direction) -> bool:
        """Whether a score modification or dropout takes registers from tiles: a condition of rows."""
        return spec.score is not None or spec.dropout

    def tile(self, problem: Problem, row: TileRow, device: Device, direction: Direction) -> Any:
        """The tile of a profile's row; None where it does not fit."""
        kind = self.kind(problem, direction)
        return tile_of(kind.tile, row, problem.spec, device, direction) if kind.has_rows else None

    def model(self, problem: Problem, device: Device, direction: Direction) -> Choice | None:
        """A tile for where no row has one."""
        why = self.kind(problem, direction).why
        tiles = self.candidates(problem, device, direction) if why else []
        return Choice(tiles[0], None, why) if tiles else None

    def candidates(self, problem: Problem, device: Device, direction: Direction) -> list[Any]:
        """Tiles worth trying, by expected speed: frozen dataclasses of integers."""
        tiles = dict.fromkeys(self.kind(problem, direction).tiles(problem, device))
        return [found for tile in tiles if (found := tile.fitted(problem.spec, device, direction))]

    def plan(self, problem: Problem, choice: Choice, tables: TileTables) -> Pass:
        """A pass with the chosen tile, in the direction and for the device of `tables`."""
        return self.kind(problem, tables.direction).plan(self, problem, choice, tables)

    def older(self, problem: Problem, tables: TileTables) -> Pass:
        """A pass of the generations below."""
        for each in self.below:
            if asked(each, problem, tables.device, tables.direction):
                return tables.plan(each, problem)
        needed = "keys, a positive scale, and addresses and strides that are multiples of 16 bytes"
        raise UnsupportedError(f"{problem.describe()}: the only kernels for this need {needed}")


class Pass:
    """The kernels of one direction and their launch. Calls that they do not take go to an older generation's pass."""

    addressed: tuple[str, ...] = ()
    """Tensors whose addresses have to be multiples of 16 bytes."""

    dense = NOT_DENSE
    """The arrays of the modification whose tiles TMA loads, and"""

    values_in_keys = False
    """whether v is a view of k: what the sample problem of a fresh kernel needs (verify.py)."""

    def __init__(
        self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables,
        spec: AttentionSpec | None = None,
    ) -> None:  # fmt: skip
        self.generation, self.problem, self.spec, self.device = generation, problem, spec or problem.spec, tables.device
        self.tile, _, self.why = choice
        self.libraries: list[Library] = []
        self._addresses = addresses(self.addressed)
        self.fallback = Fallback(partial(generation.older, problem, tables), problem.spec, tables)

    def compiled(self, name: str, constants: Mapping[str, int], *functions: str) -> Library:
        """The kernels of kernels/<name> for the spec."""
        arch = compiler.target(self.device.capability)
        library = self.generation.kernels(name, self.spec, tuple(constants.items()), arch, *functions)
        self.libraries.append(library)
        return library

    def geometry(self, arguments: Arguments) -> Any:
        """What launches derive from shapes and strides, first 0 if there is nothing to do; None if not supported."""
        raise NotImplementedError

    def takes(self, arguments: Arguments) -> bool:
        """Whether the kernels take the addresses of a call, whose strides they do."""
        return aligned(arguments, self._addresses)

    def launch(self, arguments: Arguments, geometry: Any, stream: int) -> None:
        """Enqueue the kernels. Words of `arguments` that it changes are set again by the next call."""
        raise NotImplementedError

    def run(self, arguments: Arguments, stream: int) -> None:
        """Enqueue the kernels of this pass, or of an older one."""
        geometry = arguments.known(self, self.geometry)
        if geometry is None or not self.takes(arguments):
            self.fallback.run(arguments, stream)
        elif geometry[0]:
            self.launch(arguments, geometry, stream)


class Fallback:
    """A pass that few calls need, or that follows another one. It is planned on the first such call."""

    def __init__(self, plan: Callable[[], Pass], spec: AttentionSpec, tables: TileTables) -> None:
        self._plan, self._for = plan, (spec, tables.device, tables.direction)
        self._pass: Pass | None = None

    def run(self, arguments: Arguments, stream: int) -> None:
        """Enqueue its kernels."""
        if self._pass is None:
            planned = self._plan()
            verify.check(planned, *self._for)
            self._pass = planned
        self._pass.run(arguments, stream)


@dataclass(frozen=True)
class TileTables:
    """A profile's rows for a backend and direction on a device: of `<backend>.<direction>`, then `cuda.<direction>`."""

    backend: str
    profile: Profile
    device: Device
    direction: Direction

    def rows(self, generation: Generation, problem: Problem) -> Iterator[TileRow]:
        """The rows for a generation and a problem."""
        facts = problem.facts | {
            "generation": generation.name, "modified": generation.modified(problem.spec, self.direction),
            "tiles_per_sm": row_tiles(problem) / self.device.sms,
        }  # fmt: skip
        for table in (self.backend, "cuda"):
            yield from self.profile.rows(f"{table}.{self.direction}", **facts)

    def choices(self, generation: Generation, problem: Problem) -> Iterator[Choice]:
        """The tiles that fit, that of the first row first."""
        for row in self.rows(generation, problem):
            if row.block_q is not None:
                tile = generation.tile(problem, row, self.device, self.direction)
                if tile is not None:
                    yield Choice(tile, row, row.why or "the profile's row")
        if (model := generation.model(problem, self.device, self.direction)) is not None:
            yield model

    def rate(self, generation: Generation, problem: Problem) -> float | None:
        """The measured FLOP/s; None if the profile has none."""
        rates = (row.measured.flops for row in self.rows(generation, problem) if row.measured)
        return next(filter(None, rates), None)

    def plan(self, generation: Generation, problem: Problem) -> Pass:
        """A pass of a generation."""
        for choice in self.choices(generation, problem):
            return generation.plan(problem, choice, self)
        raise UnsupportedError(f"no tile of {generation.name} for {problem.describe()} fits {self.device.name}")


def row_tiles(problem: Problem) -> int:
    """Tiles of 64 rows, where query heads that share keys share tiles."""
    return -(-problem.n_q * problem.spec.group // 64) * problem.heads_kv * problem.batch


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
    """The answer of `supports`, or the refusal of what a generation does not know."""
    if reason := refused(generation, problem.spec, direction):
        return Verdict(False, reason)
    return generation.supports(problem, device, direction)


LARGEST = 1024
"""Largest number of a tile."""


def tile_of(kind: type[Any], row: TileRow, spec: AttentionSpec, device: Device, direction: Direction) -> Any:
    """The tile of a profile's row as it fits a spec; None where it does not. A row that is a tile for no spec is not
    followed, with a warning. Attributes of `kind` that are no fields, such as a constant block_q, must equal those of
    the row.
    """
    numbers = {name: value for name in IN_ROW if (value := getattr(row, name)) is not None} | row.options
    known = {field.name for field in fields(kind)} & numbers.keys()
    try:
        for name, n in numbers.items():
            if type(n) is not int or not 0 <= n <= LARGEST:
                raise ValueError(f"{name}: expected an integer up to {LARGEST}, got {n!r}")
        tile = kind(**{name: numbers[name] for name in known})
        if unknown := [name for name in sorted(numbers) if not hasattr(tile, name)]:
            raise ValueError(f"it has no {', '.join(unknown)}")
        if wrong := [f"{name} is {getattr(tile, name)}" for name, n in numbers.items() if getattr(tile, name) != n]:
            raise ValueError(", ".join(wrong))
        fitted = partial(tile.fitted, device=device, direction=direction, ctas_per_sm=row.ctas_per_sm or 0)
        fitting = fitted(spec)
        if fitting is None and fitted(replace(spec, head_dim=16, head_dim_v=16, score=None, slots=())) is None:
            raise ValueError(f"{tile} fits no head dim")
        return fitting
    except (ArithmeticError, TypeError, ValueError) as error:
        not_followed(row, f"it is no tile of {kind.__name__}: {error}")
        return None
