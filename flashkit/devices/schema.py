"""The schema of device profiles, and their strict reader: every error names file, line and field (docs/devices.md)."""

from __future__ import annotations

import difflib
import math
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from ..errors import ProfileError
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


_warned: set[str] = set()
_lock = threading.Lock()


def warn_once(message: str) -> None:
    """Give a ProfileWarning, once in a process for each message."""
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, ProfileWarning, stacklevel=3)


def not_followed(row: TileRow, why: object) -> None:
    """Warn that a row of a profile is not followed: a bad row must not disable attention."""
    warn_once(f"{row.origin or 'a row of the profile'}: not followed, {why}")


def forget_warnings() -> None:
    """Give all warnings again."""
    with _lock:
        _warned.clear()


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
    """The data of a YAML text, and the line of every field."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        if len(text) > MAX_BYTES:
            raise SchemaError(file, 1, "", f"expected at most {MAX_BYTES} characters, got {len(text)}")
        try:
            self._check_events(text)
            self._read(text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
            raise SchemaError(file, mark.line + 1 if mark else 1, "", f"not YAML: {problem}") from None

    def _read(self, text: str) -> None:
        loader = _Loader(text)
        try:
            self.node = loader.get_single_node()
            self._check_values(loader, self.node)
            self.data = loader.construct_document(self.node) if self.node is not None else None
        finally:
            loader.dispose()

    def _check_events(self, text: str) -> None:
        """Bound the work of composing nodes, which recurses in C, before it begins. Without anchors, the nodes are a
        tree no larger than the text.
        """
        event: Any
        depth = 0
        for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
            problem = ""
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
                problem = f"lists and mappings are nested more than {MAX_DEPTH} deep" if depth > MAX_DEPTH else ""
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
                problem = "anchors (&) and aliases (*) are not read: write the value twice"
            elif getattr(event, "tag", None) is not None:
                problem = f"tags are not read, here {event.tag[:80]!r}"
            elif count > MAX_EVENTS:
                problem = "it has too many values"
            if problem:
                raise SchemaError(self.file, event.start_mark.line + 1, "", problem)

    def _check_values(self, loader: Any, node: Any, path: str = "") -> None:
        """Check what no schema says: keys are text and differ, numbers are finite, text can be printed on a line."""

        def wrong(problem: str) -> SchemaError:
            return SchemaError(self.file, node.start_mark.line + 1, path, problem)

        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode) or _CONTROL.search(key.value) or len(key.value) > MAX_TEXT:
                    raise wrong("expected a short text as key")
                where = f"{path}.{key.value}".lstrip(".")
                # YAML readers silently keep the last of two equal keys, which would drop rows of a tile table.
                if key.value in seen:
                    raise SchemaError(self.file, key.start_mark.line + 1, where, "appears twice")
                seen.add(key.value)
                self._check_values(loader, value, where)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._check_values(loader, value, f"{path}[{index}]")
        elif node is not None:
            if len(node.value) > MAX_TEXT:
                raise wrong(f"expected at most {MAX_TEXT} characters, got {len(node.value)}")
            try:
                value = loader.construct_object(node)
            except ValueError as error:
                raise wrong(f"expected a number, got {node.value!r}: {error}") from None
            if isinstance(value, str) and (control := _CONTROL.search(value)):
                raise wrong(f"has the control character {control[0]!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise wrong(f"expected a finite number, got {node.value}")
            if isinstance(value, int) and abs(value) > 2**53:
                raise wrong(f"expected a number within 2^53, got {value}")

    def line(self, path: list[str | int]) -> int:
        """The line of the field at `path`, or of its nearest ancestor in the text."""
        node, line = self.node, 1
        for step in path:
            if isinstance(node, yaml.MappingNode):
                entry = next(((k, v) for k, v in node.value if k.value == str(step)), None)
                if entry is None:
                    break
                line, node = entry[0].start_mark.line + 1, entry[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.start_mark.line + 1
            else:
                break
        return int(line)

    def error(self, path: list[str | int], problem: str) -> SchemaError:
        return SchemaError(self.file, self.line(path), _dotted(path), problem)

    def mapping(self, value: Any, path: list[str | int]) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise self.error(path, f"expected a mapping with text keys, got {type(value).__name__}")
        return value

    def convert(self, value: Any, kind: type[Any], path: list[str | int]) -> Any:
        """`value` as `kind`; SchemaError with file, line and full field name if it is invalid."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, inner = str(error).partition(" - at `$")
            steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", inner)
            path = [*path, *(int(index) if index else name for name, index in steps)]
            problem = problem.replace(" | null`", "`")  # irrelevant for a field that has a value
            unknown = re.search(r"unknown field `(.+)`", problem)
            if unknown:
                problem += suggest(unknown[1], kind.__struct_fields__)
                path = [*path, unknown[1]]
            raise self.error(path, problem) from None


def _dotted(path: list[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def suggest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}"


_TOP_LEVEL = ("schema", "device", "memory", "peak_tflops", "tiles")


def parse(text: str, file: str = "<text>") -> Profile:
    """A profile from YAML text. The ProfileError of the first invalid field names `file`, line and field."""
    source = _Source(text, file)
    data = source.mapping(source.data, [])
    for key in data:
        if key not in _TOP_LEVEL:
            raise source.error([key], "unknown section" + suggest(key, _TOP_LEVEL))
    for key in ("schema", "device"):
        if key not in data:
            raise source.error([], f"the section `{key}` is missing")
    if data["schema"] != SCHEMA:
        raise source.error(["schema"], f"expected schema {SCHEMA}, got {data['schema']!r}")

    device = source.convert(data["device"], Device, ["device"])
    memory = source.convert(data.get("memory") or {}, Memory, ["memory"])
    if memory.l1d is not None and memory.l1d < MIN_L1D:
        raise source.error(["memory", "l1d"], f"expected {MIN_L1D} bytes or more, got {memory.l1d}")
    peaks = {
        dtype: source.convert(rate or {}, Rate, ["peak_tflops", dtype])
        for dtype, rate in source.mapping(data.get("peak_tflops") or {}, ["peak_tflops"]).items()
    }
    tiles: dict[str, list[TileRow]] = {}
    for table, rows in source.mapping(data.get("tiles") or {}, ["tiles"]).items():
        path: list[str | int] = ["tiles", table]
        if not isinstance(rows, list):
            raise source.error(path, f"expected a list of rows, got {type(rows).__name__}")
        tiles[table] = []
        for index, row in enumerate(rows):
            at = [*path, index]
            origin = f"{file}:{source.line(at)}"
            tiles[table].append(msgspec.structs.replace(source.convert(row, TileRow, at), origin=origin))
    return Profile(device, memory, peaks, tiles)


def load_file(path: str | os.PathLike[str]) -> Profile:
    """The profile of one file, not merged. The file may belong to any user, since the caller names it.

    ProfileError if it violates the schema; OSError if it cannot be read, is no regular file, or is larger than
    MAX_BYTES.
    """
    try:
        text = trust.read_any(path, MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SchemaError(str(path), 1, "", f"not UTF-8 text: {error.reason}") from None
    profile = parse(text, str(path))
    provenance = {dotted: str(path) for dotted, _ in leaves(known_fields(profile))}
    return msgspec.structs.replace(profile, provenance=provenance)
