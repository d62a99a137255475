"""The schema of device profiles, and their reader: every error names file, line and field (docs/devices.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from ..errors import warn_once
from . import trust
from .lazy import cached_property
from .strict_yaml import MAX_BYTES, SchemaError, Source, suggest

SCHEMA = 1

MIN_L1D = 4096
"""Bytes of L1 that some tile of every head dim fits in."""

Kind = Literal["cpu", "cuda"]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
Count = Annotated[int, Meta(ge=1, le=2**50)]
Amount = Annotated[float, Meta(gt=0, le=1e9)]
Block = Annotated[int, Meta(ge=1, le=1024)]  # queries or keys of a tile
Few = Annotated[int, Meta(ge=1, le=32)]  # registers, stages


class ProfileWarning(UserWarning):
    """A profile was skipped, or a row of it not followed."""


def not_followed(row: TileRow, why: object) -> None:
    """Warn that a row of a profile is not followed: a bad row must not disable attention."""
    warn_once(f"{row.origin or 'a row of the profile'}: not followed, {why}", category=ProfileWarning)


# ---- the schema ----------------------------------------------------------------------------------------------------


class _Section(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Rate(_Section, frozen=True):
    """A rate from the datasheet, and as `flashkit autotune` measured it. The name of the section has the unit."""

    datasheet: Amount | None = None
    source: str | None = None  # of the datasheet value
    measured: Amount | None = None
    date: str | None = None  # of the measurement, as are the versions
    versions: str | dict[str, str] | None = None

    @property
    def best(self) -> float | None:
        """The measured rate, else the datasheet's."""
        return self.measured if self.measured is not None else self.datasheet


class Device(_Section, frozen=True):
    """The device that a profile is for: criteria in a file, facts in a merged profile."""

    kind: Kind
    name: str | None = None
    match: str | None = None  # regular expression, searched in the device's name, case ignored
    compute_capability: tuple[int, int] | None = None
    features: list[str] | None = None  # CPU: by Linux's names, "avx2", "avx512f", "amx_bf16", "asimd"
    sms: Count | None = None
    cores: Count | None = None  # that the process may run on; rates are of all of them together
    source: str | None = None

    def __post_init__(self) -> None:
        if self.match is not None:
            if problem := _slow(self.match):
                raise ValueError(f"match={self.match[:80]!r} {problem}, so that a search could take forever")
            try:
                re.compile(self.match)
            except (re.error, OverflowError, RecursionError) as error:
                raise ValueError(f"match={self.match[:80]!r} is not a regular expression: {error}") from None


MAX_REPEATS, MAX_BRANCHES = 3, 6


def _slow(pattern: str) -> str:
    """Why a regular expression might take long on a short text; empty if it does not.

    A search tries at most one position for each repeat and one branch of each alternative, so few of both, none within
    another, are tried in a moment. The pattern of an exact name, as `autotune` writes it, has none.
    """
    bare = re.sub(r"\\.|\[\^?\]?[^\]]*\]", "x", pattern, flags=re.DOTALL)  # without escapes and sets of characters
    if len(pattern) > 500:
        return "has more than 500 characters"
    if re.search(r"\)[*+{]", bare):
        return "repeats a group"
    if len(re.findall(r"[*+{]|(?<!\()\?", bare)) > MAX_REPEATS:
        return f"has more than {MAX_REPEATS} repeats"
    return f"has more than {MAX_BRANCHES} alternatives" if bare.count("|") > MAX_BRANCHES else ""


class Memory(_Section, frozen=True):
    """Sizes in bytes, bandwidths in 1e9 bytes per second. GPU: sram_*, registers, l2. CPU: l1d, l2, l3."""

    sram_per_block: Count | None = None
    sram_per_sm: Count | None = None
    registers_per_sm: Count | None = None  # 32-bit registers
    l1d: Count | None = None  # per core
    l2: Count | None = None  # CPU: per core; GPU: the whole device
    l3: Count | None = None  # shared
    bandwidth_gbs: Rate | None = None
    sram_bandwidth_gbs: Rate | None = None
    interconnect_gbs: Rate | None = None  # between devices, what one sends at a time
    source: str | None = None


class Measured(_Section, frozen=True):
    """The measured speed of a tile; null before it is measured."""

    tflops: Amount | None = None
    gflops: Amount | None = None
    date: str | None = None
    versions: str | dict[str, str] | None = None

    @property
    def flops(self) -> float | None:
        """FLOP/s."""
        for rate, unit in ((self.tflops, 1e12), (self.gflops, 1e9)):
            if rate is not None:
                return rate * unit
        return None


class TileRow(_Section, frozen=True, dict=True):  # dict: for what is cached
    """One row of a tile table: its conditions, the tile, the reason, and the measured speed.

    A condition that is left out always holds. Names with `min_` and `max_` bound a fact of the call, the others are
    equal to it; `spec.Problem.facts` says what each is. `block_q` x `block_k` is the tile of the score matrix. On CPUs
    the register block of the micro-kernel is `rows` x `vectors` vector registers of `lanes` float32 (float64: half as
    many). A row without a tile is a measured speed alone, of whatever tile other rows give such calls.
    """

    block_q: Block | None = None
    block_k: Block | None = None
    generation: str | None = None
    dtype: Dtype | list[Dtype] | None = None
    precision: Literal["tf32"] | None = None
    scales: Literal["head", "block", "token"] | None = None
    head_dim: Count | list[Count] | None = None
    min_head_dim: Count | None = None
    max_head_dim: Count | None = None
    min_head_dim_v: Count | None = None
    max_head_dim_v: Count | None = None
    min_dim: Count | None = None
    max_dim: Count | None = None
    mask: bool | None = None
    score: bool | None = None
    modified: bool | None = None
    packed: bool | None = None
    stats: bool | None = None
    min_rows: Count | None = None
    max_rows: Count | None = None
    min_tile_rows: Count | None = None
    max_tile_rows: Count | None = None
    min_queries: Count | None = None
    max_queries: Count | None = None
    min_longest: Count | None = None
    max_longest: Count | None = None
    min_keys: Count | None = None
    max_keys: Count | None = None
    max_run: Count | None = None
    min_tiles_per_sm: Amount | None = None
    max_tiles_per_sm: Amount | None = None
    ctas_per_sm: Few | None = None  # followed where this many CTAs of the tile fit an SM
    lanes: Literal[4, 8, 16] | None = None
    rows: Few | None = None
    vectors: Few | None = None
    stages: Few | None = None
    options: dict[str, int | float | str | bool] = field(default_factory=dict)  # specific to one backend
    why: str | None = None
    measured: Measured | None = None
    origin: str | None = None  # file:line, written by the reader

    def __post_init__(self) -> None:
        if (self.block_q is None) != (self.block_k is None) or (self.block_q is None and self.measured is None):
            raise ValueError("expected block_q and block_k, or a speed in `measured` and neither of them")
        for name, most in self.conditions.items():
            least = self.conditions.get(name.replace("max_", "min_"))
            if name.startswith("max_") and least is not None and least > most:
                raise ValueError(f"{name}: expected {least}, the least, or more, got {most}")
        if self.rows and self.vectors:
            # AVX2 has 16 vector registers, AVX-512 and NEON 32. The innermost loop holds the accumulators, one row of
            # vectors and one broadcast; a larger block would spill there.
            have = 16 if self.lanes == 8 else 32
            need = self.rows * self.vectors + self.vectors + 1
            if need > have:
                lanes = "" if self.lanes is None else f" with lanes={self.lanes}"
                raise ValueError(
                    f"a register block of rows={self.rows} x vectors={self.vectors} needs {need} vector registers, "
                    f"there are {have}{lanes}"
                )

    @cached_property
    def conditions(self) -> dict[str, Any]:
        """The conditions of the row that are not left out."""
        return {name: value for name in CONDITIONS if (value := getattr(self, name)) is not None}

    @cached_property
    def _tests(self) -> list[tuple[str, str, Any]]:
        """Of each condition the fact, the kind of bound, and the value, or the values that fit."""
        parts = ((name, name.partition("_"), value) for name, value in self.conditions.items())
        return [
            (of, bound, value) if bound in ("min", "max") else (name, "", listed(value))
            for name, (bound, _, of), value in parts
        ]

    @property
    def selector(self) -> tuple[Any, ...]:
        """The conditions, to compare. A row of a higher layer replaces those with equal ones."""
        return tuple((name, *sorted(listed(value))) for name, value in self.conditions.items())

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether all conditions hold. A condition on what the facts do not say does not."""
        for fact, bound, wanted in self._tests:
            value = facts.get(fact)
            if value is None or not (
                value in wanted if not bound else value >= wanted if bound == "min" else value <= wanted
            ):
                return False
        return True


CONDITIONS = TileRow.__struct_fields__[2 : TileRow.__struct_fields__.index("ctas_per_sm")]
"""The fields of a row that say which calls it is for."""


class Profile(Struct, frozen=True):
    """What is known about a device: the content of one file, or merged from all files that apply to it.

    `tiles[table]` is ordered: the first row that matches, and whose tile fits, applies.
    """

    device: Device
    memory: Memory = Memory()
    peak_tflops: dict[str, Rate] = field(default_factory=dict)
    tiles: dict[str, list[TileRow]] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    def rows(self, table: str, **facts: Any) -> Iterator[TileRow]:
        """The rows of `table` ("cpu.forward", ..) for these facts: of higher layers first, as they stand in a file."""
        return (row for row in self.tiles.get(table, ()) if row.matches(facts))

    def tile(self, table: str, **facts: Any) -> TileRow | None:
        """The first of `rows` with a tile, or None."""
        return next((row for row in self.rows(table, **facts) if row.block_q is not None), None)

    def rate(self, table: str, **facts: Any) -> float | None:
        """FLOP/s of the first of `rows` that was measured, or None."""
        measured = (row.measured.flops for row in self.rows(table, **facts) if row.measured)
        return next(filter(None, measured), None)

    def peak(self, dtype: str) -> float | None:
        """Peak of matrix products in 1e12 FLOP/s: measured, else by the datasheet, else None."""
        rate = self.peak_tflops.get(dtype)
        return rate.best if rate else None

    @property
    def bandwidth_gbs(self) -> float | None:
        """Bandwidth of main memory in 1e9 bytes/s: measured, else by the datasheet, else None."""
        rate = self.memory.bandwidth_gbs
        return rate.best if rate else None

    @property
    def interconnect_gbs(self) -> float | None:
        """Bandwidth between devices, likewise."""
        rate = self.memory.interconnect_gbs
        return rate.best if rate else None

    @property
    def files(self) -> list[str]:
        """The files that contributed, in order of first appearance in `provenance`."""
        origins = (origin.partition(" (")[0] for origin in self.provenance.values())
        files = (re.sub(r"\.yaml:\d+$", ".yaml", origin) for origin in origins)
        return list(dict.fromkeys(file for file in files if file not in {"system", "built in"}))

    def fields(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted name, value, origin) of every known field, and of every row of a tile table."""
        for dotted, value in leaves(known_fields(self)):
            yield dotted, value, self.provenance.get(dotted, "")
        for table, rows in self.tiles.items():
            for index, row in enumerate(rows):
                value = msgspec.to_builtins(row)
                yield f"tiles.{table}[{index}]", value, value.pop("origin", "")

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists: the data of a profile file, and `provenance`."""
        return {"schema": SCHEMA, **msgspec.to_builtins(self)}


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def known_fields(profile: Profile) -> dict[str, Any]:
    fields = {"device": profile.device, "memory": profile.memory, "peak_tflops": profile.peak_tflops}
    return dict(msgspec.to_builtins(fields))


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "versions":
            yield from leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value


# ---- reading one file, strictly ------------------------------------------------------------------------------------

_TOP_LEVEL = ("schema", "device", "memory", "peak_tflops", "tiles")


def parse(text: str, file: str = "<text>") -> Profile:
    """A profile from YAML text. The ProfileError of the first invalid field names `file`, line and field."""
    source = Source(text, file)
    data = source.mapping(source.data, ())
    for key in data:
        if key not in _TOP_LEVEL:
            raise source.error((key,), "unknown section" + suggest(key, _TOP_LEVEL))
    for key in ("schema", "device"):
        if key not in data:
            raise source.error((), f"the section `{key}` is missing")
    if data["schema"] != SCHEMA:
        raise source.error(("schema",), f"expected schema {SCHEMA}, got {data['schema']!r}")

    def section(name: str) -> dict[str, Any]:
        return source.mapping(data.get(name) or {}, (name,))

    device = source.convert(data["device"], Device, ("device",))
    memory = source.convert(section("memory"), Memory, ("memory",))
    if memory.l1d is not None and memory.l1d < MIN_L1D:
        raise source.error(("memory", "l1d"), f"expected {MIN_L1D} bytes or more, got {memory.l1d}")
    peaks = {
        dtype: source.convert(rate or {}, Rate, ("peak_tflops", dtype))
        for dtype, rate in section("peak_tflops").items()
    }
    tiles: dict[str, list[TileRow]] = {}
    for table, rows in section("tiles").items():
        path = "tiles", table
        if not isinstance(rows, list):
            raise source.error(path, f"expected a list of rows, got {type(rows).__name__}")
        tiles[table] = []
        for index, row in enumerate(rows):
            at = *path, index
            origin = f"{file}:{source.lines[at]}"
            tiles[table].append(msgspec.structs.replace(source.convert(row, TileRow, at), origin=origin))
    return Profile(device, memory, peaks, tiles)


def load_file(path: str | os.PathLike[str], *, trusted: bool = False) -> Profile:
    """The profile of one file, not merged. The file may belong to any user, since the caller names it.

    trusted: UntrustedError if another user could have written it. ProfileError if it violates the schema; OSError if it
    cannot be read, is no regular file, or is larger than MAX_BYTES.
    """
    return parse(text_of(path, trusted), str(path))


def text_of(path: str | os.PathLike[str], trusted: bool) -> str:
    """The text of a profile file; errors of `load_file`."""
    try:
        return (trust.read if trusted else trust.read_any)(path, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SchemaError(str(path), 1, "", f"not UTF-8 text: {error}") from None
