"""Device profiles: what a device is, how fast its parts are, and which tiles to use on it. YAML in, `Profile` out.

    device_profiles/h200.yaml          one file a device; docs/devices.md explains how to add one
    profiles.for_device("cuda")        the merged profile of the device of this machine (cached)
    profile.tile("cpu.forward", "float32", head_dim=64, causal=True)   the row that applies

A file speaks for a device when all criteria in its `device:` section hold: `match` (a regular expression searched in
the device's name), `compute_capability` and `cores` (equal), `features` (all present). Without criteria it is the
generic profile of its kind. Layers, highest first, are merged field by field, null meaning "not known here":

    1. files of FLASHKIT_PROFILE_DIR          3. what the system itself reports (cache sizes, number of SMs)
    2. the user's files, see `user_dir`       4. the shipped files

and within one directory those with more criteria come first, so the generic ones are always last. `Profile.provenance`
says of each field where it came from. A malformed file found on the way is skipped with a warning, and so is one that
another user could have written (trust.py): a bad profile must not stop attention. `load_file` is the strict reader,
with errors that name file, line and field.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml

from ..errors import ProfileError
from . import host, trust
from .schema import (
    MOST_BYTES,
    SCHEMA,
    Device,
    Memory,
    Profile,
    ProfileWarning,
    Rate,
    SchemaError,
    TileRow,
    known_fields,
    leaves,
    load_file,
    parse,
    suggest,
)

__all__ = [
    "SCHEMA", "Profile", "ProfileWarning", "SchemaError", "TileRow", "by_name", "criteria", "directories", "for_device",
    "forget", "load_file", "parse", "paths", "read", "shipped_dir", "user_dir", "write_user_profile",
]  # fmt: skip

# ---- merging -------------------------------------------------------------------------------------------------------

_Layer = tuple[str, dict[str, Any], dict[str, list[TileRow]]]  # origin, fields, tiles

# A date belongs to the number beside it: it must not be taken from a layer that did not give that number.
_BELONGS_TO = {"source": "datasheet", "date": "measured", "versions": "measured"}


def _merge(layers: list[_Layer]) -> Profile:
    """One profile from layers, highest first."""
    merged: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for origin, fields, _ in layers:
        for dotted, value in leaves(fields):
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
    package = Path(__file__).parents[1]
    inside = package / "device_profiles"
    return inside if inside.is_dir() else package.parent / "device_profiles"


def user_dir() -> Path:
    """Where `flashkit autotune` writes; not created. UntrustedError without a home directory."""
    return trust.of_user("data") / "device_profiles"


def directories() -> dict[str, Path]:
    """Where profiles are looked for, in order: "FLASHKIT_PROFILE_DIR" (if set), "user", "shipped".

    The first is left out where it is no absolute path, the second where there is no home directory.
    """
    override = os.environ.get("FLASHKIT_PROFILE_DIR")
    found = {}
    if override and os.path.isabs(os.path.expanduser(override)):
        found["FLASHKIT_PROFILE_DIR"] = Path(os.path.expanduser(override))
    elif override:
        _skip(trust.UntrustedError(f"FLASHKIT_PROFILE_DIR={override} is not an absolute path"))
    with suppress(trust.UntrustedError):
        found["user"] = user_dir()
    return {**found, "shipped": shipped_dir()}


def paths() -> list[Path]:
    """Every profile file, in lookup order."""
    return [file for directory in directories().values() for file in _files(directory)]


def _files(directory: Path) -> list[Path]:
    try:
        return sorted(directory.glob("*.yaml"))
    except OSError:
        return []


_OTHER_KIND = {"cpu": re.compile(r"\bkind:\s*cuda\b"), "cuda": re.compile(r"\bkind:\s*cpu\b")}


def _text(file: Path) -> str:
    """Of a file in one of the directories. UntrustedError where another user could have written it; what is shipped is
    as trusted as the code beside it.
    """
    shipped = file.parent == shipped_dir()
    return (trust.read_any(file, MOST_BYTES) if shipped else trust.read(file, MOST_BYTES)).decode()


def read(file: Path) -> Profile:
    """The profile of one file in one of the directories, alone. ProfileError if it does not fit the schema, OSError if
    it cannot be read, UntrustedError if another user could have written it.
    """
    try:
        return parse(_text(file), str(file))
    except UnicodeDecodeError as error:
        raise SchemaError(str(file), 1, "", f"not UTF-8 text: {error.reason}") from None


_told: set[str] = set()


def _skip(error: Exception) -> None:
    """Warn; of what is wrong with a whole directory once, not for each file in it."""
    if isinstance(error, trust.UntrustedError):
        if str(error) in _told:
            return
        _told.add(str(error))
    warnings.warn(f"device profile skipped: {error}", ProfileWarning, stacklevel=3)


def _candidates(directory: Path, kind: str) -> Iterator[tuple[Path, Profile]]:
    """The readable profiles of one kind in a directory; those that are not are skipped with a warning."""
    for file in _files(directory):
        try:
            text = _text(file)
            head = re.search(r"^device:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
            if head and _OTHER_KIND[kind].search(head[0]):
                continue  # not worth a full parse
            profile = parse(text, str(file))
        except (OSError, ValueError, RecursionError) as error:
            _skip(error)
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
    if criteria.cores and criteria.cores != device.get("cores"):
        return None
    if not set(criteria.features or ()) <= set(device.get("features", ())):
        return None
    equal = (criteria.compute_capability is not None) + (criteria.cores is not None)
    return int(criteria.match is not None), len(criteria.features or ()) + equal


def _capability(device: dict[str, Any]) -> tuple[int, ...] | None:
    given = device.get("compute_capability")
    return None if given is None else tuple(given)


def _contribution(profile: Profile) -> dict[str, Any]:
    """The fields that a file gives to a merge: all but its criteria, in whose place the system's own facts stand, and
    the sources of whole sections, which would seem to speak of those facts too."""
    fields = known_fields(profile)
    fields["device"] = {k: v for k, v in fields["device"].items() if k not in {"match", "features", "cores", "source"}}
    fields["memory"] = {k: v for k, v in fields["memory"].items() if k != "source"}
    return fields


def _relative(profile: Profile) -> dict[str, Any]:
    """What a profile tells of another device of its compute capability: the sizes that the architecture fixes."""
    memory = known_fields(profile)["memory"]
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
                tiles = {
                    table: [msgspec.structs.replace(row, measured=None) for row in rows]
                    for table, rows in profile.tiles.items()
                }
                ranked.append(((0, 1), (f"{file} (same compute capability)", _relative(profile), tiles)))
        ranked.sort(key=lambda item: item[0], reverse=True)
        layers += [layer for _, layer in ranked]
    # Without a device and with every file unreadable there is still an answer, if an empty one.
    layers.append(("built in", {"device": {"kind": kind, "name": f"unknown {kind} device"}}, {}))
    return layers


_merged: dict[tuple[str | None, ...], Profile] = {}
_lock = threading.Lock()


def for_device(kind: str) -> Profile:
    """The merged profile of this machine's device.

    kind: "cpu", or "cuda" for the device current at the first call (the generic CUDA profile if CuPy finds none).
    Read once a process; thread-safe. Raises ValueError for another kind, or where FLASHKIT_CPU_LANES does not fit, and
    nothing else: unreadable files are skipped with a ProfileWarning.
    """
    if kind not in _OTHER_KIND:
        raise ValueError(f"kind must be 'cpu' or 'cuda', got {kind!r}")
    key = kind, os.environ.get("FLASHKIT_PROFILE_DIR"), os.environ.get(host.LANES)
    profile = _merged.get(key)
    if profile is None:
        with _lock:
            profile = _merged.get(key)
            if profile is None:
                profile = _merged[key] = _merge(_layers(kind, _system(kind)))
    return profile


def by_name(name: str) -> Profile:
    """The merged profile of the device that the file `name`.yaml describes, as `for_device` would give it there.

    ValueError if no directory has such a file, ProfileError if it is malformed, UntrustedError if another user could
    have written it.
    """
    file = next((file for file in paths() if file.stem == name), None)
    if file is None:
        raise ValueError(f"no device profile is called {name!r}{suggest(name, tuple(f.stem for f in paths()))}")
    device = msgspec.to_builtins(read(file).device)
    told = ("kind", "name", "compute_capability", "features", "cores")
    described = {key: device[key] for key in told if key in device}
    return _merge(_layers(device["kind"], {"device": described, "memory": {}}, str(file)))


def forget() -> None:
    """Drop what `for_device` has cached, so that changed files are read."""
    with _lock:
        _merged.clear()
        _told.clear()


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
    writer leaves half of it. ProfileError if the profile does not fit the schema, UntrustedError if other users can
    write the directory; nothing is written then.
    """
    new = parse(_dump({"schema": SCHEMA, **profile}), "<profile>")
    device = new.device
    identity = repr((device.kind, device.match, device.compute_capability, sorted(device.features or ())))
    slug = re.sub(r"[^a-z0-9]+", "-", (device.name or device.kind).lower()).strip("-")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:6]
    target = trust.directory(user_dir(), make=True) / f"{device.kind}-{slug}-{digest}.yaml"

    with trust.locked(target.parent / ".lock"):
        layers: list[_Layer] = [("new", known_fields(new), new.tiles)]
        if target.exists():
            try:
                old = read(target)
                layers.append(("old", known_fields(old), old.tiles))
            except (ProfileError, OSError, RecursionError) as error:  # an edit went wrong: keep it, out of the way
                target.replace(target.with_suffix(".yaml.bad"))
                warnings.warn(f"moved to {target.name}.bad: {error}", ProfileWarning, stacklevel=2)
        merged = _merge(layers)
        text = "# Written by flashkit for this machine's device. Fields left out come from the shipped profiles.\n"
        text += _dump(_plain(merged))
        parse(text, str(target))
        trust.write(target, text.encode(), durable=True)
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
