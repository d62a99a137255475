"""`flashkit profile`: device profiles."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..console import stdout
from .common import Json, fail, print_json, warnings_on_stderr

app = typer.Typer(rich_markup_mode=None, help="Device profiles: list, show and validate them.")


@app.command("list")
def profile_list(as_json: Json = False) -> None:
    """Every profile file in lookup order; a mark where it applies."""
    from ...devices import profiles

    with warnings_on_stderr():
        used = {origin for kind in ("cpu", "cuda") for origin in profiles.for_device(kind).files}
    listed: list[dict[str, Any]] = []
    for where, directory in profiles.directories().items():
        for file in profiles.files(directory):
            entry: dict[str, Any] = {"name": file.stem, "where": where, "file": str(file), "used": str(file) in used}
            try:
                profile = profiles.read(file)
                rows = {table: len(rows) for table, rows in profile.tiles.items()}
                entry.update(kind=profile.device.kind, device=profile.device.name, tiles=rows, error=None)
            except (OSError, ValueError) as error:
                entry.update(kind=None, device=None, tiles={}, error=str(error))
            listed.append(entry)
    if as_json:
        print_json(listed)
        return
    table = Table("", "name", "kind", "device", "tile rows", "where", box=None, padding=(0, 2, 0, 0))
    for entry in listed:
        count = sum(entry["tiles"].values())
        device = f"malformed: {entry['error']}" if entry["error"] else entry["device"]
        mark = "*" if entry["used"] else ""
        table.add_row(mark, entry["name"], entry["kind"], device, str(count or ""), entry["where"])
    stdout().print(table)
    print("\n* in use on this machine")


@app.command("show")
def profile_show(
    name: Annotated[str | None, typer.Argument(help="A profile's name (default: the devices of this machine).")] = None,
    as_json: Json = False,
) -> None:
    """A merged profile, with the origin of every field.

    Example: flashkit profile show h200
    """
    from ...devices import io_model, profiles

    try:
        with warnings_on_stderr():
            kinds = ("cpu", "cuda") if name is None else (name,)
            read = profiles.for_device if name is None else profiles.by_name
            profiles.forget()  # read again, so that warnings about skipped files are caught
            by_kind = {kind: read(kind) for kind in kinds}
            for profile in by_kind.values():
                io_model.check_cpu_rows(profile)
    except ValueError as error:
        raise fail(error) from None
    if as_json:
        print_json({kind: profile.as_dict() for kind, profile in by_kind.items()})
        return
    for kind, profile in by_kind.items():
        table = Table("field", "value", "from", box=None, padding=(0, 2, 0, 0), title=kind, title_justify="left")
        for dotted, value, origin in profile.fields():
            table.add_row(dotted, _short(value), os.path.basename(origin) if os.path.isabs(origin) else origin)
        stdout().print(table)
        print()


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_short(inner)}" for name, inner in value.items())
    if isinstance(value, list) and len(value) > 8:
        return f"{len(value)} of them, see --json"
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@app.command("validate")
def profile_validate(
    files: Annotated[
        list[Path] | None, typer.Argument(help="YAML files (default: all that would be read here).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check files against the schema.

    Exit status 1 if one is malformed; its line and field are named.
    """
    from ...devices import profiles

    results: list[dict[str, Any]] = []
    for file in files or profiles.paths():
        result: dict[str, Any] = {"file": str(file), "ok": True, "line": None, "field": None, "problem": None}
        try:
            profiles.load_file(file)
        except profiles.SchemaError as error:
            result.update(ok=False, line=error.line, field=error.field, problem=error.problem)
        except OSError as error:
            result.update(ok=False, problem=error.strerror or str(error))
        results.append(result)
    if as_json:
        print_json(results)
    else:
        for result in results:
            place = ":".join(str(part) for part in (result["file"], result["line"]) if part)
            detail = "ok" if result["ok"] else ": ".join(part for part in (result["field"], result["problem"]) if part)
            print(f"{place}: {detail}")
    if not all(result["ok"] for result in results):
        raise typer.Exit(1)
