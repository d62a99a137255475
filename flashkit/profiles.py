"""Device profiles: what a device is, how fast its parts are, and which tiles to use on it. YAML in, `Profile` out.

    device_profiles/h200.yaml          one file a device; docs/devices.md explains how to add one
    profiles.for_device("cuda")        the merged profile of the device of this machine (cached)
    profile.tile("cpu.forward", "float32", head_dim=64, causal=True)   the row that applies

A file speaks for a device when all criteria in its `device:` section hold: `match` (a regular expression searched in
the device's name), `compute_capability` (equal), `features` (all present). Without criteria it is the generic profile
of its kind. Layers, highest first, are merged field by field, null meaning "not known here":

    1. files of FLASHKIT_PROFILE_DIR          3. what the system itself reports (cache sizes, number of SMs)
    2. the user's files, see `user_dir`       4. the shipped files

and within one directory those with more criteria come first, so the generic ones are always last. `Profile.provenance`
says of each field where it came from. A malformed file found on the way is skipped with a warning: a bad profile must
not stop attention. `load_file` is the strict reader, with errors that name file, line and field.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, Struct, field

from . import host
from .errors import ProfileError

SCHEMA = 1

Kind = Literal["cpu", "cuda"]
Dtype = Literal["float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2"]
Count = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(gt=0)]


class SchemaError(ProfileError):
    """Where a profile does not fit the schema: `file`, `line`, dotted `field`, and the `problem`."""

    def __init__(self, file: str, line: int, field: str, problem: str) -> None:
        self.file, self.line, self.field, self.problem = file, line, field, problem
        super().__init__(f"{file}:{line}: {field or 'the file'}: {problem}")


class ProfileWarning(UserWarning):
    """A profile that could not be read was skipped; another one is in use."""


# ---- the schema ----------------------------------------------------------------------------------------------------


class _Section(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Rate(_Section, frozen=True):
    """A rate as the maker states it and as `flashkit autotune` measured it; the section's name tells the unit."""

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
    """Which device a profile is for. In a merged profile: which device this is."""

    kind: Kind
    name: str | None = None
    match: str | None = None  # regular expression, searched in the device's name, case ignored
    compute_capability: tuple[int, int] | None = None
    features: list[str] | None = None  # CPU: by Linux's names, "avx2", "avx512f", "amx_bf16", "asimd"
    sms: Count | None = None
    cores: Count | None = None
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
    """What a tile reached when it was timed; all null until then."""

    tflops: Amount | None = None
    gflops: Amount | None = None
    date: str | None = None
    versions: str | dict[str, str] | None = None


class TileRow(_Section, frozen=True):
    """One row of a tile table: for which problems, which tile, why, and what it reached.

    A selector that is left out means "any". `block_q` x `block_k` is the tile of the score matrix. On CPUs the
    micro-kernel keeps a block of `rows` x `vectors` vector registers with `lanes` float32 each (float64: half as many).
    """

    block_q: Count
    block_k: Count
    dtype: Dtype | list[Dtype] | None = None
    head_dim: Count | list[Count] | None = None
    max_head_dim: Count | None = None
    causal: bool | None = None
    lanes: Literal[4, 8, 16] | None = None
    rows: Count | None = None
    vectors: Count | None = None
    stages: Count | None = None
    options: dict[str, int | float | str | bool] = field(default_factory=dict)  # what only one backend understands
    why: str | None = None
    measured: Measured | None = None
    origin: str | None = None  # file:line, written by the reader

    def __post_init__(self) -> None:
        if self.head_dim is not None and self.max_head_dim is not None:
            raise ValueError("give head_dim (these values) or max_head_dim (up to this one), not both")
        if self.lanes and self.rows and self.vectors:
            # AVX2 has 16 vector registers, AVX-512 and NEON 32. One row of vectors and one broadcast are live beside
            # the accumulators; a block that needs more spills in its innermost loop.
            have = 16 if self.lanes == 8 else 32
            need = self.rows * self.vectors + self.vectors + 1
            if need > have:
                raise ValueError(
                    f"a register block of rows={self.rows} x vectors={self.vectors} needs {need} vector registers, "
                    f"there are {have} with lanes={self.lanes}"
                )

    @property
    def selector(self) -> tuple[Any, ...]:
        """What this row is for; rows of equal selector replace each other."""
        dtype = tuple(sorted(_listed(self.dtype))) or None
        head_dim = tuple(sorted(_listed(self.head_dim))) or None
        return dtype, head_dim, self.max_head_dim, self.causal

    def matches(self, dtype: str, head_dim: int, causal: bool) -> bool:
        """Whether the row is for such a problem."""
        return (
            (self.dtype is None or dtype in _listed(self.dtype))
            and (self.head_dim is None or head_dim in _listed(self.head_dim))
            and (self.max_head_dim is None or head_dim <= self.max_head_dim)
            and (self.causal is None or causal == self.causal)
        )

    @property
    def specificity(self) -> tuple[float, ...]:
        """Sorts the most specific row first: by head dim (exact, then the nearest bound), dtype, causal."""
        if self.head_dim is not None:
            head = 0.0
        elif self.max_head_dim is not None:
            head = float(self.max_head_dim)
        else:
            head = float("inf")
        return head, len(_listed(self.dtype)) or float("inf"), float(self.causal is None)


class Profile(Struct, frozen=True):
    """What is known of a device: of one file, or merged from all files that speak for it.

    `tiles[table]` is ordered: the first row that matches is the one to use.
    """

    device: Device
    memory: Memory = Memory()
    peak_tflops: dict[str, Rate] = field(default_factory=dict)
    tiles: dict[str, list[TileRow]] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    def tile(self, table: str, dtype: str, head_dim: int, causal: bool) -> TileRow | None:
        """The row of `table` ("cpu.forward", "cupy_raw.backward", ...) for such a problem, or None.

        Rows of a higher layer come first; within a layer the most specific one.
        """
        return next((row for row in self.tiles.get(table, ()) if row.matches(dtype, head_dim, causal)), None)

    def peak(self, dtype: str) -> float | None:
        """Peak matrix rate in 1e12 FLOP/s, measured if it was, else the datasheet's; None if neither is known."""
        rate = self.peak_tflops.get(dtype)
        return rate.best if rate else None

    @property
    def bandwidth_gbs(self) -> float | None:
        """Main memory bandwidth in 1e9 bytes/s, measured if it was, else the datasheet's; None if neither is known."""
        rate = self.memory.bandwidth_gbs
        return rate.best if rate else None

    @property
    def files(self) -> list[str]:
        """The files that contributed, in order of first appearance in `provenance`."""
        origins = (origin.partition(" (")[0] for origin in self.provenance.values())
        files = (re.sub(r"\.yaml:\d+$", ".yaml", origin) for origin in origins)
        return list(dict.fromkeys(file for file in files if file not in {"system", "built in"}))

    def fields(self) -> Iterator[tuple[str, Any, str]]:
        """(dotted name, value, where it came from) of every known field, one for each row of a tile table."""
        for dotted, value in _leaves(_fields(self)):
            yield dotted, value, self.provenance.get(dotted, "")
        for table, rows in self.tiles.items():
            for index, row in enumerate(rows):
                value = msgspec.to_builtins(row)
                yield f"tiles.{table}[{index}]", value, value.pop("origin", "")

    def as_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, in the form of a profile file plus `provenance`."""
        return {"schema": SCHEMA, **msgspec.to_builtins(self)}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


# ---- reading one file, strictly ------------------------------------------------------------------------------------

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


class _Loader(_BaseLoader):  # type: ignore[misc]
    """Safe YAML in which 2026-11-20 stays text: JSON has no dates, and the schema asks for a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own name and form)
        first: [(tag, pattern) for tag, pattern in rules if tag != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Source:
    """A YAML text as data, together with the line of every field in it."""

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
        # YAML readers keep the last of two equal keys: a silent way to lose half a tile table.
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
        """Line of the field at `path`, or of the nearest one above it that the text has."""
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
        """`value` as `kind`; msgspec's complaint becomes one with file, line and full field name."""
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            problem, _, inner = str(error).partition(" - at `$")
            steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", inner)
            path = [*path, *(int(index) if index else name for name, index in steps)]
            problem = problem.replace(" | null`", "`")  # that a field may be null is no help to who gave it a value
            unknown = re.search(r"unknown field `(.+)`", problem)
            if unknown:
                problem += _suggest(unknown[1], kind.__struct_fields__)
                path = [*path, unknown[1]]
            raise self.error(path, problem) from None


def _dotted(path: list[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")


def _suggest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean `{near[0]}`?" if near else f"; known are {', '.join(known)}"


_TOP_LEVEL = ("schema", "device", "memory", "peak_tflops", "tiles")


def parse(text: str, file: str = "<text>") -> Profile:
    """A profile from YAML text; ProfileError names `file`, line and field of the first thing that does not fit."""
    source = _Source(text, file)
    data = source.mapping(source.data, [])
    for key in data:
        if key not in _TOP_LEVEL:
            raise source.error([key], "unknown section" + _suggest(key, _TOP_LEVEL))
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
            here = [*path, index]
            origin = f"{file}:{source.line(here)}"
            tiles[table].append(msgspec.structs.replace(source.convert(row, TileRow, here), origin=origin))
        tiles[table].sort(key=lambda row: row.specificity)
    return Profile(device, memory, peaks, tiles)


def load_file(path: str | os.PathLike[str]) -> Profile:
    """The profile of one file alone. ProfileError if it does not fit the schema, OSError if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SchemaError(str(path), 1, "", f"not UTF-8 text: {error.reason}") from None
    profile = parse(text, str(path))
    provenance = {dotted: str(path) for dotted, _ in _leaves(_fields(profile))}
    return msgspec.structs.replace(profile, provenance=provenance)


# ---- merging -------------------------------------------------------------------------------------------------------

_Layer = tuple[str, dict[str, Any], dict[str, list[TileRow]]]  # origin, fields, tiles

# A date belongs to the number beside it: it must not be taken from a layer that did not give that number.
_BELONGS_TO = {"source": "datasheet", "date": "measured", "versions": "measured"}


def _fields(profile: Profile) -> dict[str, Any]:
    fields = {"device": profile.device, "memory": profile.memory, "peak_tflops": profile.peak_tflops}
    return dict(msgspec.to_builtins(fields))


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and key != "versions":
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield prefix + key, value


def _merge(layers: list[_Layer]) -> Profile:
    """One profile from layers, highest first."""
    merged: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for origin, fields, _ in layers:
        for dotted, value in _leaves(fields):
            parent, _, name = dotted.rpartition(".")
            number = f"{parent}.{_BELONGS_TO[name]}" if name in _BELONGS_TO else ""
            if dotted in provenance or provenance.get(number, origin) != origin:
                continue
            *parents, last = dotted.split(".")
            node = merged
            for step in parents:
                node = node.setdefault(step, {})
            node[last] = value
            provenance[dotted] = origin

    tiles: dict[str, list[TileRow]] = {}
    for _, _, tables in layers:
        for table, rows in tables.items():
            kept = tiles.setdefault(table, [])
            known = {row.selector for row in kept}
            kept.extend(row for row in rows if row.selector not in known)
    for table, kept in tiles.items():
        provenance.update({f"tiles.{table}[{index}]": row.origin or "" for index, row in enumerate(kept)})
    return Profile(
        device=msgspec.convert(merged["device"], Device),
        memory=msgspec.convert(merged.get("memory", {}), Memory),
        peak_tflops=msgspec.convert(merged.get("peak_tflops", {}), dict[str, Rate]),
        tiles=tiles,
        provenance=provenance,
    )


# ---- finding the files ---------------------------------------------------------------------------------------------


def shipped_dir() -> Path:
    """The profiles that come with flashkit: inside the package in a wheel, beside it in a source tree."""
    package = Path(__file__).parent
    inside = package / "device_profiles"
    return inside if inside.is_dir() else package.parent / "device_profiles"


def user_dir() -> Path:
    """Where `flashkit autotune` writes; not created."""
    import platformdirs

    return Path(platformdirs.user_data_dir("flashkit", appauthor=False)) / "device_profiles"


def directories() -> dict[str, Path]:
    """Where profiles are looked for, in order: "FLASHKIT_PROFILE_DIR" (if set), "user", "shipped"."""
    override = os.environ.get("FLASHKIT_PROFILE_DIR")
    first = {"FLASHKIT_PROFILE_DIR": Path(os.path.expanduser(override))} if override else {}
    return {**first, "user": user_dir(), "shipped": shipped_dir()}


def paths() -> list[Path]:
    """Every profile file, in lookup order."""
    return [file for directory in directories().values() for file in _files(directory)]


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.glob("*.yaml"))
    except OSError:
        return []


_OTHER_KIND = {"cpu": re.compile(r"\bkind:\s*cuda\b"), "cuda": re.compile(r"\bkind:\s*cpu\b")}


def _candidates(directory: Path, kind: str) -> Iterator[tuple[Path, Profile]]:
    """The readable profiles of one kind in a directory; those that are not are skipped with a warning."""
    for file in _files(directory):
        try:
            text = file.read_text(encoding="utf-8")
            head = re.search(r"^device:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
            if head and _OTHER_KIND[kind].search(head[0]):
                continue  # not worth a full parse
            profile = parse(text, str(file))
        except (OSError, ValueError) as error:
            warnings.warn(f"device profile skipped: {error}", ProfileWarning, stacklevel=2)
            continue
        if profile.device.kind == kind:
            yield file, profile


# ---- matching ------------------------------------------------------------------------------------------------------


def _system(kind: str) -> dict[str, Any]:
    """What the system reports of its device: {"device": {...}, "memory": {...}}, empty if there is none."""
    if kind == "cpu":
        features = sorted(host.cpu_features())
        device = {"kind": kind, "name": host.cpu_name(), "features": features, "cores": host.cpu_count()}
        return {"device": device, "memory": dict(host.cpu_caches())}
    facts = host.cuda_device()
    if facts is None:
        return {}
    device = {"kind": kind, **{name: facts[name] for name in ("name", "compute_capability", "sms") if name in facts}}
    sizes = ("sram_per_block", "sram_per_sm", "registers_per_sm", "l2")
    return {"device": device, "memory": {name: facts[name] for name in sizes if name in facts}}


def _rank(criteria: Device, device: dict[str, Any]) -> tuple[int, int] | None:
    """How closely a profile's criteria fit this device (more is closer), or None if one of them does not hold."""
    if criteria.match and not re.search(criteria.match, device.get("name", ""), re.IGNORECASE):
        return None
    if criteria.compute_capability and criteria.compute_capability != _capability(device):
        return None
    if not set(criteria.features or ()) <= set(device.get("features", ())):
        return None
    return int(criteria.match is not None), len(criteria.features or ()) + (criteria.compute_capability is not None)


def _capability(device: dict[str, Any]) -> tuple[int, ...] | None:
    given = device.get("compute_capability")
    return None if given is None else tuple(given)


def _contribution(profile: Profile) -> dict[str, Any]:
    """The fields that a file gives to a merge: all but its criteria, in whose place the system's own facts stand, and
    the sources of whole sections, which would seem to speak of those facts too."""
    fields = _fields(profile)
    fields["device"] = {k: v for k, v in fields["device"].items() if k not in {"match", "features", "source"}}
    fields["memory"] = {k: v for k, v in fields["memory"].items() if k != "source"}
    return fields


def _relative(profile: Profile) -> dict[str, Any]:
    """What a profile tells of another device of its compute capability: the sizes that the architecture fixes."""
    memory = _fields(profile)["memory"]
    sizes = ("sram_per_block", "sram_per_sm", "registers_per_sm")
    return {"memory": {name: memory[name] for name in sizes if name in memory}}


def _layers(kind: str, system: dict[str, Any], origin: str = "system") -> list[_Layer]:
    """All that is known of the device that `system` describes, highest layer first."""
    device = system.get("device", {})
    layers: list[_Layer] = []
    for name, directory in directories().items():
        if name == "shipped" and system:
            layers.append((origin, system, {}))
        ranked: list[tuple[tuple[int, int], _Layer]] = []
        for file, profile in _candidates(directory, kind):
            rank = _rank(profile.device, device)
            capability = profile.device.compute_capability
            if rank is not None:
                ranked.append((rank, (str(file), _contribution(profile), profile.tiles)))
            elif name == "shipped" and capability and capability == _capability(device):
                # A device that no file names takes the tiles of its relatives: above the generic profile (0, 0).
                ranked.append(((0, 1), (f"{file} (same compute capability)", _relative(profile), profile.tiles)))
        ranked.sort(key=lambda item: item[0], reverse=True)
        layers += [layer for _, layer in ranked]
    # Without a device and with every file unreadable there is still an answer, if an empty one.
    layers.append(("built in", {"device": {"kind": kind, "name": f"unknown {kind} device"}}, {}))
    return layers


_merged: dict[tuple[str, str | None], Profile] = {}
_lock = threading.Lock()


def for_device(kind: str) -> Profile:
    """The merged profile of this machine's device.

    kind: "cpu", or "cuda" for the device current at the first call (the generic CUDA profile if CuPy finds none).
    Read once a process; thread-safe. Raises ValueError for another kind and nothing else: unreadable files are
    skipped with a ProfileWarning.
    """
    if kind not in _OTHER_KIND:
        raise ValueError(f"kind must be 'cpu' or 'cuda', got {kind!r}")
    key = kind, os.environ.get("FLASHKIT_PROFILE_DIR")
    profile = _merged.get(key)
    if profile is None:
        with _lock:
            profile = _merged.get(key)
            if profile is None:
                profile = _merged[key] = _merge(_layers(kind, _system(kind)))
    return profile


def by_name(name: str) -> Profile:
    """The merged profile of the device that the file `name`.yaml describes, as `for_device` would give it there.

    ValueError if no directory has such a file, ProfileError if it is malformed.
    """
    file = next((file for file in paths() if file.stem == name), None)
    if file is None:
        raise ValueError(f"no device profile is called {name!r}{_suggest(name, tuple(f.stem for f in paths()))}")
    device = msgspec.to_builtins(load_file(file).device)
    described = {key: device[key] for key in ("kind", "name", "compute_capability", "features") if key in device}
    return _merge(_layers(device["kind"], {"device": described, "memory": {}}, str(file)))


def forget() -> None:
    """Drop what `for_device` has cached, so that changed files are read."""
    with _lock:
        _merged.clear()


# ---- writing -------------------------------------------------------------------------------------------------------


def criteria(kind: str) -> dict[str, Any]:
    """The `device:` section with which a profile speaks for exactly this machine's device. For `flashkit autotune`.

    kind: "cpu" or "cuda". RuntimeError for "cuda" where CuPy finds no device.
    """
    device = _system(kind).get("device")
    if device is None:
        raise RuntimeError(f"no {kind} device was found")
    section: dict[str, Any] = {"kind": kind, "name": device["name"], "match": f"^{re.escape(device['name'])}$"}
    if kind == "cuda":
        return {**section, "compute_capability": device["compute_capability"], "sms": device["sms"]}
    # Virtual machines often hide the model behind a family name, so the features that decide about kernels join in.
    deciding = {name for _, profile in _candidates(shipped_dir(), kind) for name in profile.device.features or ()}
    return {**section, "features": sorted(deciding & set(device["features"]))}


def write_user_profile(profile: dict[str, Any]) -> Path:
    """Write a profile to the user's directory, where `for_device` finds it, and return its path.

    profile: in the form of a profile file ({"schema": 1, "device": {...}, "tiles": {...}}); `criteria` gives the device
    section. A file that this device already has is updated: fields given replace its fields, rows replace rows of
    equal selector, the rest stays. The file is replaced in one step under a lock, so that neither a crash nor another
    writer leaves half of it. ProfileError if the profile does not fit the schema; nothing is written then.
    """
    from filelock import FileLock

    new = parse(_dump({"schema": SCHEMA, **profile}), "<profile>")
    device = new.device
    identity = repr((device.kind, device.match, device.compute_capability, sorted(device.features or ())))
    slug = re.sub(r"[^a-z0-9]+", "-", (device.name or device.kind).lower()).strip("-")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    target = user_dir() / f"{device.kind}-{slug}-{digest}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)

    with FileLock(target.parent / ".lock"):
        layers: list[_Layer] = [("new", _fields(new), new.tiles)]
        if target.exists():
            try:
                old = load_file(target)
                layers.append(("old", _fields(old), old.tiles))
            except ProfileError as error:  # someone's edit went wrong: keep it, out of the way
                target.replace(target.with_suffix(".yaml.bad"))
                warnings.warn(f"moved to {target.name}.bad: {error}", ProfileWarning, stacklevel=2)
        merged = _merge(layers)
        text = "# Written by flashkit for this machine's device. Fields left out come from the shipped profiles.\n"
        text += _dump(_plain(merged))
        parse(text, str(target))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    forget()
    return target


def _plain(profile: Profile) -> dict[str, Any]:
    """A profile in the form of its file: without provenance, line numbers and empty fields."""
    data = profile.as_dict()
    del data["provenance"]
    for rows in data["tiles"].values():
        for row in rows:
            row.pop("origin", None)
    return {name: value for name, value in data.items() if value}


def _dump(data: dict[str, Any]) -> str:
    builtins = msgspec.to_builtins(data)
    return str(yaml.safe_dump(builtins, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True))
