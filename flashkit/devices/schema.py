"""The schema of device profiles, and their strict reader: every error names file, line and field (docs/devices.md)."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from ..errors import ProfileError, warn_once
from . import trust
from .lazy import cached_property

SCHEMA = 1

MAX_BYTES = 1 << 18
"""Largest size of a profile file."""

MAX_DEPTH, MAX_EVENTS, MAX_TEXT = 16, 30_000, 2000
"""Bounds of a file: lists within lists, events of the parser (about one for each value and key), characters of a value.
"""

MIN_L1D = 4096
"""Bytes of L1 that some tile of every head dim fits in."""

Kind = Literal["cpu", "cuda"]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
Count = Annotated[int, Meta(ge=1, le=2**50)]
Amount = Annotated[float, Meta(gt=0, le=1e9)]
Block = Annotated[int, Meta(ge=1, le=1024)]  # queries or keys of a tile
Few = Annotated[int, Meta(ge=1, le=32)]  # registers, stages


class SchemaError(ProfileError):
    """A profile violates the schema. Attributes: `file`, `line`, dotted `field`, `problem`."""

    def __init__(self, file: str, line: int, field: str, problem: str) -> None:
        self.file, self.line, self.field, self.problem = file, line, field, problem
        super().__init__(f"{file}:{line}: {field or 'the file'}: {problem}")


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
    max_head_dim_v: Count | None = None
    min_dim: Count | None = None
    max_dim: Count | None = None
    mask: bool | None = None
    score: bool | None = None
    modified: bool | None = None
    packed: bool | None = None
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
        """The rows of `table` ("cpu.forward", "cupy_raw.backward", ...) for a call with these facts, in order: rows of
        a higher layer first, within a file as they stand there.
        """
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

Path = tuple[str | int, ...]
"""Of a field: keys of mappings, indices of lists."""

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is faster


_UNREAD = "tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class _Loader(_BaseLoader):  # type: ignore[misc]
    """Safe YAML that reads 2026-11-20 as text: JSON has no dates, and the schema has a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own name and form)
        first: [(tag, pattern) for tag, pattern in rules if tag not in _UNREAD]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Source:
    """The data of a YAML text, made in one pass over the parser's events, and the line of every field.

    Composing nodes would recurse in C, and an anchor could make them more than the text. Here both are refused first.
    """

    def __init__(self, text: str, file: str) -> None:
        self.file, self.events = file, 0
        self.lines: dict[Path, int] = {(): 1}
        if len(text) > MAX_BYTES:
            raise SchemaError(file, 1, "", f"expected at most {MAX_BYTES} characters, got {len(text)}")
        try:
            self.loader = _Loader(text)
            self.data = self._document()
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise SchemaError(file, mark.line + 1 if mark else 1, "", f"not YAML: {problem}") from None

    def _document(self) -> Any:
        self._event()  # the stream's start
        if isinstance(self._event(), yaml.StreamEndEvent):
            return None
        data = self._value(self._event(), ())
        self._event()  # the document's end
        if not isinstance(event := self._event(), yaml.StreamEndEvent):
            raise self._wrong(event, (), "not YAML: expected a single document")
        return data

    def _event(self) -> Any:
        """The next event. It is one that is read."""
        event = self.loader.get_event()
        self.events += 1
        if getattr(event, "anchor", None) is not None:
            raise self._wrong(event, (), "anchors (&) and aliases (*) are not read: write the value twice")
        if getattr(event, "tag", None) is not None:
            raise self._wrong(event, (), f"tags are not read, here {event.tag[:80]!r}")
        if self.events > MAX_EVENTS:
            raise self._wrong(event, (), "it has too many values")
        return event

    def _value(self, event: Any, path: Path) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event, path)
        if len(path) >= MAX_DEPTH:
            raise self._wrong(event, (), f"lists and mappings are nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Any] = []
            while not isinstance(event := self._event(), yaml.SequenceEndEvent):
                self.lines[at := (*path, len(items))] = event.start_mark.line + 1
                items.append(self._value(event, at))
            return items
        mapping: dict[str, Any] = {}
        while not isinstance(event := self._event(), yaml.MappingEndEvent):
            key = self._scalar(event, path) if isinstance(event, yaml.ScalarEvent) else None
            if not isinstance(key, str):
                raise self._wrong(event, path, "expected a short text as key")
            at = *path, key
            # YAML readers silently keep the last of two equal keys, which would drop rows of a tile table.
            if key in mapping:
                raise self._wrong(event, at, "appears twice")
            self.lines[at] = event.start_mark.line + 1
            mapping[key] = self._value(self._event(), at)
        return mapping

    def _scalar(self, event: Any, path: Path) -> Any:
        """A value, and what no schema says: numbers are finite, text can be printed on a line."""
        if len(event.value) > MAX_TEXT:
            raise self._wrong(event, path, f"expected at most {MAX_TEXT} characters, got {len(event.value)}")
        tag = self.loader.resolve(yaml.ScalarNode, event.value, event.implicit)
        try:
            value = self.loader.construct_object(yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark))
        except ValueError as error:
            raise self._wrong(event, path, f"expected a number, got {event.value!r}: {error}") from None
        if isinstance(value, str) and (control := _CONTROL.search(value)):
            raise self._wrong(event, path, f"has the control character {control[0]!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(event, path, f"expected a finite number, got {event.value}")
        if isinstance(value, int) and abs(value) > 2**53:
            raise self._wrong(event, path, f"expected a number within 2^53, got {value}")
        return value

    def _wrong(self, event: Any, path: Path, problem: str) -> SchemaError:
        return SchemaError(self.file, event.start_mark.line + 1, _dotted(path), problem)

    def error(self, path: Path, problem: str) -> SchemaError:
        """An error with the line of the field at `path`, or of its nearest ancestor in the text."""
        line = next(self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines)
        return SchemaError(self.file, line, _dotted(path), problem)

    def mapping(self, value: Any, path: Path) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(path, f"expected a mapping, got {type(value).__name__}")
        return value

    def convert(self, value: Any, kind: type[Any], path: Path) -> Any:
        """`value` as `kind`; SchemaError with file, line and full field name if it is invalid."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, inner = str(error).partition(" - at `$")
            steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", inner)
            path = *path, *(int(index) if index else name for name, index in steps)
            problem = problem.replace(" | null`", "`")  # irrelevant for a field that has a value
            if unknown := re.search(r"unknown field `(.+)`", problem):
                problem += suggest(unknown[1], kind.__struct_fields__)
                path = *path, unknown[1]
            raise self.error(path, problem) from None


def _dotted(path: Path) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def suggest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}"


_TOP_LEVEL = ("schema", "device", "memory", "peak_tflops", "tiles")


def parse(text: str, file: str = "<text>") -> Profile:
    """A profile from YAML text. The ProfileError of the first invalid field names `file`, line and field."""
    source = _Source(text, file)
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
