"""Device profiles: facts of a device, its peak rates, and its tiles. YAML in, `Profile` out.

    device_profiles/h200.yaml          one file for each device; docs/devices.md explains how to add one
    profiles.for_device("cuda")        the merged profile of this machine's device (cached)
    profile.tile("cpu.forward", **problem.facts)                       the row that applies

A file applies to a device if all criteria in its `device:` section hold: `match` (a regular expression searched in the
device's name), `compute_capability` and `cores` (equal), `features` (all present). A file without criteria is the
generic profile of its kind. Layers, highest first, are merged field by field; null means "not known":

    1. files of FLASHKIT_PROFILE_DIR          3. what the system reports (cache sizes, number of SMs)
    2. the user's files, see `user_dir`       4. the shipped files

Within one directory, files with more criteria come first and the generic one last. `Profile.provenance` has the origin
of each field. Malformed files, and files that another user could have written (trust.py), are skipped with a warning: a
bad profile must not disable attention. `load_file` is the strict reader, whose errors name file, line and field.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import yaml

from .. import settings
from ..errors import ProfileError, forget_warnings, warn, warn_once
from . import host, trust
from .forking import outer_lock
from .schema import (
    SCHEMA,
    Device,
    Memory,
    Profile,
    ProfileWarning,
    Rate,
    TileRow,
    known_fields,
    leaves,
    load_file,
    parse,
    text_of,
)
from .strict_yaml import SchemaError, suggest

__all__ = [
    "SCHEMA", "Profile", "ProfileWarning", "SchemaError", "TileRow", "by_name", "criteria", "directories", "files",
    "for_device", "forget", "load_file", "parse", "paths", "read", "shipped_dir", "user_dir", "write_user_profile",
]  # fmt: skip

# ---- merging -------------------------------------------------------------------------------------------------------

_Layer = tuple[str, dict[str, Any], dict[str, list[TileRow]]]  # origin, fields, tiles

# A date describes a number: it must come from the same layer as the number.
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
    """The directory of the shipped profiles: inside the package in a wheel, next to it in a source tree."""
    package = Path(__file__).parents[1]
    inside = package / "device_profiles"
    return inside if inside.is_dir() else package.parent / "device_profiles"


def user_dir() -> Path:
    """The directory where `flashkit autotune` writes. It is not created. UntrustedError without a home directory."""
    return trust.of_user("data") / "device_profiles"


def directories() -> dict[str, Path]:
    """The directories in order: "FLASHKIT_PROFILE_DIR" if it is absolute, "user" if there is a home, "shipped"."""
    folders = {}
    try:
        if override := settings.PROFILE_DIR.read():
            folders[settings.PROFILE_DIR.name] = Path(override)
    except ValueError as error:
        _skip(error)
    with suppress(trust.UntrustedError):
        folders["user"] = user_dir()
    return {**folders, "shipped": shipped_dir()}


def paths() -> list[Path]:
    """Every profile file, in lookup order."""
    return [file for directory in directories().values() for file in files(directory)]


MAX_FILES = 200
"""Files of a directory that are read."""


def files(directory: Path) -> list[Path]:
    """The profile files of a directory, in lookup order. Files beyond MAX_FILES are left out with a warning."""
    try:
        found = sorted(directory.glob("*.yaml"))
    except OSError:
        return []
    if len(found) > MAX_FILES:
        problem = f"{directory} has {len(found)}, the first {MAX_FILES} are read"
        warn_once(f"device profiles skipped: {problem}", category=ProfileWarning)
    return found[:MAX_FILES]


_OTHER_KIND = {"cpu": re.compile(r"\bkind:\s*cuda\b"), "cuda": re.compile(r"\bkind:\s*cpu\b")}


def _trusted(file: Path) -> bool:
    """Whether a file of one of the directories must be trusted. Shipped files are as trusted as the code."""
    return file.parent != shipped_dir()


def read(file: Path) -> Profile:
    """The profile of one file, not merged. Errors of `load_file`; UntrustedError if others could have written it."""
    return load_file(file, trusted=_trusted(file))


def _skip(problem: object, file: Path | None = None) -> None:
    """Warn that a file is skipped, or a whole directory."""
    named = file is None or str(file) in str(problem)
    warn_once(f"device profile skipped: {problem if named else f'{file}: {problem}'}", category=ProfileWarning)


def _candidates(directory: Path, kind: str) -> Iterator[tuple[Path, Profile]]:
    """The valid profiles of one kind in a directory; others are skipped with a warning."""
    profile_files = files(directory)
    if profile_files and directory != shipped_dir():
        try:
            trust.resolve(directory)
        except OSError as error:
            _skip(error)
            return
    for file in profile_files:
        try:
            text = text_of(file, _trusted(file))
            head = re.search(r"^device:.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
            if head and _OTHER_KIND[kind].search(head[0]):
                continue  # parsing it would take longer
            profile = parse(text, str(file))
        except (OSError, ValueError, RecursionError) as error:
            _skip(error, file)
            continue
        if profile.device.kind == kind:
            yield file, profile


# ---- matching ------------------------------------------------------------------------------------------------------


def _system(kind: str) -> dict[str, Any]:
    """What the system reports about its device: {"device": {...}, "memory": {...}}, empty if there is none."""
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


def _rank(criteria: Device, device: Device) -> tuple[int, int] | None:
    """How specific the criteria of a profile are (more is closer), or None if one does not hold for this device."""
    equal = [name for name in ("compute_capability", "cores") if getattr(criteria, name) is not None]
    features = set(criteria.features or ())
    if any(getattr(criteria, name) != getattr(device, name) for name in equal):
        return None
    if not features <= set(device.features or ()):
        return None
    if criteria.match and not re.search(criteria.match, device.name or "", re.IGNORECASE):
        return None
    return int(criteria.match is not None), len(features) + len(equal)


def _contribution(profile: Profile) -> dict[str, Any]:
    """The fields that are merged: without criteria, and without sources of sections, which need not hold here."""
    fields = known_fields(profile)
    fields["device"] = {k: v for k, v in fields["device"].items() if k not in {"match", "features", "cores", "source"}}
    fields["memory"] = {k: v for k, v in fields["memory"].items() if k != "source"}
    return fields


def _relative(profile: Profile) -> dict[str, Any]:
    """The fields of a profile that hold for other devices of its compute capability: sizes of the architecture."""
    memory = known_fields(profile)["memory"]
    sizes = ("sram_per_block", "sram_per_sm", "registers_per_sm")
    return {"memory": {name: memory[name] for name in sizes if name in memory}}


def _layers(kind: str, system: dict[str, Any], origin: str = "system") -> list[_Layer]:
    """All layers for the device that `system` describes, highest first."""
    device = msgspec.convert(system.get("device", {"kind": kind}), Device)
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
            elif name == "shipped" and capability and capability == device.compute_capability:
                # A device without a file takes the tiles of its compute capability: above the generic profile (0, 0).
                tiles = {
                    table: [msgspec.structs.replace(row, measured=None) for row in rows if row.block_q is not None]
                    for table, rows in profile.tiles.items()
                }
                ranked.append(((0, 1), (f"{file} (same compute capability)", _relative(profile), tiles)))
        ranked.sort(key=lambda ranked_layer: ranked_layer[0], reverse=True)
        layers += [layer for _, layer in ranked]
    # An empty profile, for a machine without a device and without a readable file.
    layers.append(("built in", {"device": {"kind": kind, "name": f"unknown {kind} device"}}, {}))
    return layers


_merged: dict[tuple[str | None, ...], Profile] = {}
_lock = outer_lock()


def for_device(kind: str) -> Profile:
    """The merged profile of this machine's "cpu", or for "cuda" of the current device of the first call (the generic
    CUDA profile if CuPy finds none). ValueError for another kind, or if FLASHKIT_CPU_LANES is invalid.

    Files are read once in a process. Unreadable ones are skipped with a ProfileWarning. Threads may call it at the same
    time.
    """
    if kind not in _OTHER_KIND:
        raise ValueError(f"kind: expected 'cpu' or 'cuda', got {kind!r}")
    key = kind, settings.PROFILE_DIR.text(), settings.CPU_LANES.text()
    profile = _merged.get(key)
    if profile is None:
        with _lock:
            profile = _merged.get(key)
            if profile is None:
                profile = _merged[key] = _merge(_layers(kind, _system(kind)))
    return profile


def by_name(name: str) -> Profile:
    """The merged profile as of the device of `name`.yaml. ValueError without this file; errors of `read`."""
    file = next((file for file in paths() if file.stem == name), None)
    if file is None:
        hint = suggest(name, tuple(f.stem for f in paths()))
        raise ValueError(f"name: expected that of a device profile, got {name!r}{hint}")
    device = msgspec.to_builtins(read(file).device)
    names = ("kind", "name", "compute_capability", "features", "cores")
    described = {key: device[key] for key in names if key in device}
    return _merge(_layers(device["kind"], {"device": described, "memory": {}}, str(file)))


def forget() -> None:
    """Drop the cached profiles, so that changed files are read again."""
    with _lock:
        _merged.clear()
        forget_warnings()


# ---- writing -------------------------------------------------------------------------------------------------------


def criteria(kind: str) -> dict[str, Any]:
    """The `device:` section of a profile for this machine's "cpu" or "cuda" device. RuntimeError without one."""
    device = _system(kind).get("device")
    if device is None:
        raise RuntimeError(f"no {kind} device was found")
    section: dict[str, Any] = {"kind": kind, "name": device["name"], "match": f"^{re.escape(device['name'])}$"}
    if kind == "cuda":
        return {**section, "compute_capability": device["compute_capability"], "sms": device["sms"]}
    # Virtual machines often report a family name, so the features that decide about kernels are criteria too.
    deciding = {name for _, profile in _candidates(shipped_dir(), kind) for name in profile.device.features or ()}
    return {**section, "features": sorted(deciding & set(device["features"]))}


def write_user_profile(profile: dict[str, Any]) -> Path:
    """Write the data of a profile file, {"schema": 1, "device": `criteria`, "tiles": {...}}, to the user's directory,
    where `for_device` finds it; returns the file.

    An existing file of this device is updated: given fields replace its fields, rows replace rows of equal selector,
    the rest stays. The file is replaced atomically under a lock. Nothing is written, but ProfileError raised, if the
    profile violates the schema, and UntrustedError if other users can write the directory.
    """
    new = parse(dump({"schema": SCHEMA, **profile}), "<profile>")
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
            except (ProfileError, OSError, RecursionError) as error:  # keep a malformed file under another name
                target.replace(target.with_suffix(".yaml.bad"))
                warn(f"moved to {target.name}.bad: {error}", ProfileWarning)
        merged = _merge(layers)
        text = "# Written by flashkit for this machine's device. Fields left out come from the shipped profiles.\n"
        text += dump(_plain(merged))
        parse(text, str(target))
        trust.write(target, text.encode(), durable=True)
    forget()
    return target


def _plain(profile: Profile) -> dict[str, Any]:
    """The data of a profile file: without provenance, line numbers and empty fields."""
    data = profile.as_dict()
    del data["provenance"]
    for rows in data["tiles"].values():
        for row in rows:
            row.pop("origin", None)
    return {name: value for name, value in data.items() if value}


def dump(data: dict[str, Any]) -> str:
    """The YAML text of a profile. Parts that occur twice are written twice: `parse` refuses aliases."""
    builtins = msgspec.to_builtins(data)
    return str(yaml.safe_dump(builtins, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True))
