"""The schema of device profiles, and their strict reader: every error names file, line and field (docs/devices.md)."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from ..errors import ProfileError
from . import trust

SCHEMA = 1

MOST_BYTES = 1 << 20
"""Largest size of a profile file."""

Kind = Literal["cpu", "cuda"]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(gt=0)]


class SchemaError(ProfileError):
    """A profile does not fit the schema. Attributes: `file`, `line`, dotted `field`, `problem`."""

    def __init__(self, file: str, line: int, field: str, problem: str) -> None:
        self.file, self.line, self.field, self.problem = file, line, field, problem
        super().__init__(f"{file}:{line}: {field or 'the file'}: {problem}")


class ProfileWarning(UserWarning):
    """A profile was skipped, or a row of it not followed."""


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
            try:
                re.compile(self.match)
            except re.error as error:
                raise ValueError(f"match={self.match!r} is not a regular expression: {error}") from None


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


class TileRow(_Section, frozen=True):
    """One row of a tile table: its selectors, the tile, the reason, and the measured speed.

    A missing selector matches everything. `block_q` x `block_k` is the tile of the score matrix. On CPUs the register
    block of the micro-kernel is `rows` x `vectors` vector registers of `lanes` float32 (float64: half as many).
    """

    block_q: Count
    block_k: Count
    dtype: Dtype | list[Dtype] | None = None
    head_dim: Count | list[Count] | None = None
    max_head_dim: Count | None = None
    causal: bool | None = None
    max_rows: Count | None = None  # query rows that share the keys of a head: selects calls with few, as in decoding
    lanes: Literal[4, 8, 16] | None = None
    rows: Count | None = None
    vectors: Count | None = None
    stages: Count | None = None
    options: dict[str, int | float | str | bool] = field(default_factory=dict)  # specific to one backend
    why: str | None = None
    measured: Measured | None = None
    origin: str | None = None  # file:line, written by the reader

    def __post_init__(self) -> None:
        if self.head_dim is not None and self.max_head_dim is not None:
            raise ValueError("give head_dim (these values) or max_head_dim (up to this one), not both")
        if self.lanes and self.rows and self.vectors:
            # AVX2 has 16 vector registers, AVX-512 and NEON 32. The innermost loop holds the accumulators, one row of
            # vectors and one broadcast; a larger block would spill there.
            have = 16 if self.lanes == 8 else 32
            need = self.rows * self.vectors + self.vectors + 1
            if need > have:
                raise ValueError(
                    f"a register block of rows={self.rows} x vectors={self.vectors} needs {need} vector registers, "
                    f"there are {have} with lanes={self.lanes}"
                )

    @property
    def selector(self) -> tuple[Any, ...]:
        """The selectors of the row. A row of a higher layer replaces those with equal selectors."""
        dtype = tuple(sorted(listed(self.dtype))) or None
        head_dim = tuple(sorted(listed(self.head_dim))) or None
        return dtype, head_dim, self.max_head_dim, self.causal, self.max_rows, self.options.get("generation")

    def matches(self, dtype: str, head_dim: int, causal: bool, rows: int | None = None) -> bool:
        """Whether the row applies. rows: query rows that share keys of a head; None excludes rows with `max_rows`."""
        return (
            (self.dtype is None or dtype in listed(self.dtype))
            and (self.head_dim is None or head_dim in listed(self.head_dim))
            and (self.max_head_dim is None or head_dim <= self.max_head_dim)
            and (self.causal is None or causal == self.causal)
            and (self.max_rows is None or (rows is not None and rows <= self.max_rows))
        )

    @property
    def specificity(self) -> tuple[float, ...]:
        """Sort key, the most specific row first: by head dim (exact, then the nearest bound), rows, dtype, causal."""
        if self.head_dim is not None:
            head = 0.0
        elif self.max_head_dim is not None:
            head = float(self.max_head_dim)
        else:
            head = float("inf")
        few = float("inf") if self.max_rows is None else float(self.max_rows)
        return head, few, len(listed(self.dtype)) or float("inf"), float(self.causal is None)


class Profile(Struct, frozen=True):
    """What is known about a device: the content of one file, or merged from all files that apply to it.

    `tiles[table]` is ordered: the first row that matches applies.
    """

    device: Device
    memory: Memory = Memory()
    peak_tflops: dict[str, Rate] = field(default_factory=dict)
    tiles: dict[str, list[TileRow]] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    def rows(
        self, table: str, dtype: str, head_dim: int, causal: bool, rows: int | None = None
    ) -> Iterator[TileRow]:
        """The rows of `table` ("cpu.forward", "cupy_raw.backward", ...) for such a problem.

        Rows of a higher layer come first; within a layer the most specific one.
        """
        return (row for row in self.tiles.get(table, ()) if row.matches(dtype, head_dim, causal, rows))

    def tile(self, table: str, dtype: str, head_dim: int, causal: bool) -> TileRow | None:
        """The first of `rows`, or None."""
        return next(self.rows(table, dtype, head_dim, causal), None)

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


class _Loader(_BaseLoader):  # type: ignore[misc]
    """Safe YAML that reads 2026-11-20 as text: JSON has no dates, and the schema has a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own name and form)
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Source:
    """The data of a YAML text, and the line of every field."""

    def __init__(self, text: str, file: str) -> None:
        self.file = file
        loader = _Loader(text)
        try:
            self.node = loader.get_single_node()
            self._no_duplicates(self.node)
            self.data = loader.construct_document(self.node) if self.node is not None else None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
            problem = getattr(error, "problem", None) or str(error)
            raise SchemaError(file, mark.line + 1 if mark else 1, "", f"not YAML: {problem}") from None
        finally:
            loader.dispose()

    def _no_duplicates(self, node: Any, path: str = "") -> None:
        # YAML readers silently keep the last of two equal keys, which would drop rows of a tile table.
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                where = f"{path}.{key.value}".lstrip(".")
                if str(key.value) in seen:
                    raise SchemaError(self.file, key.start_mark.line + 1, where, "appears twice")
                seen.add(str(key.value))
                self._no_duplicates(value, where)
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                self._no_duplicates(value, f"{path}[{index}]")

    def line(self, path: list[str | int]) -> int:
        """The line of the field at `path`, or of its nearest ancestor in the text."""
        node, line = self.node, 1
        for step in path:
            if isinstance(node, yaml.MappingNode):
                found = next(((k, v) for k, v in node.value if k.value == str(step)), None)
                if found is None:
                    break
                line, node = found[0].start_mark.line + 1, found[1]
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
        """`value` as `kind`; SchemaError with file, line and full field name if it does not fit."""
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
    """A profile from YAML text. The ProfileError of the first field that does not fit names `file`, line and field."""
    source = _Source(text, file)
    data = source.mapping(source.data, [])
    for key in data:
        if key not in _TOP_LEVEL:
            raise source.error([key], "unknown section" + suggest(key, _TOP_LEVEL))
    for key in ("schema", "device"):
        if key not in data:
            raise source.error([], f"the section `{key}` is missing")
    if data["schema"] != SCHEMA:
        raise source.error(["schema"], f"got {data['schema']!r}, this flashkit reads schema {SCHEMA}")

    device = source.convert(data["device"], Device, ["device"])
    memory = source.convert(data.get("memory") or {}, Memory, ["memory"])
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
        tiles[table].sort(key=lambda row: row.specificity)
    return Profile(device, memory, peaks, tiles)


def load_file(path: str | os.PathLike[str]) -> Profile:
    """The profile of one file, not merged. The file may belong to any user, since the caller names it.

    ProfileError if it does not fit the schema; OSError if it cannot be read, is no regular file, or is larger than
    1 MiB.
    """
    try:
        text = trust.read_any(path, MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SchemaError(str(path), 1, "", f"not UTF-8 text: {error.reason}") from None
    profile = parse(text, str(path))
    provenance = {dotted: str(path) for dotted, _ in leaves(known_fields(profile))}
    return msgspec.structs.replace(profile, provenance=provenance)
