"""`flashkit config`: the environment variables that flashkit reads."""

from __future__ import annotations

import difflib
import os
from typing import Any

import typer
from rich.table import Table

from ... import dispatch, settings
from ..console import stdout
from .common import Json, fail, print_json

app = typer.Typer(rich_markup_mode=None, help="Environment variables, and what they are set to.")


@app.callback()
def _group() -> None:
    """Keeps `show` a command of its own: typer runs the only command of a group without its name."""


@app.command("show")
def config_show(as_json: Json = False) -> None:
    """Every FLASHKIT_* variable: value, default and meaning.
    """
    listed = [_entry(setting) for setting in settings.ALL]
    wrong = [entry["error"] for entry in listed if entry["error"]]
    if as_json:
        print_json(listed)
    else:
        table = Table("variable", "value", "meaning", box=None, padding=(0, 2, 0, 0))
        table.columns[0].no_wrap = True
        table.columns[1].overflow = "fold"
        for entry in listed:
            value = entry["text"] or f"not set: {entry['default']}"
            table.add_row(entry["name"], value, f"{entry['meaning']} ({entry['kind']})")
        stdout().print(table)
    known = [setting.name for setting in settings.ALL]
    for name in os.environ:
        if not name.startswith("FLASHKIT_") or name in known:
            continue
        if near := difflib.get_close_matches(name, known, 1, 0.8):
            wrong.append(f"{name} is no variable of flashkit; did you mean {near[0]}?")
    for problem in wrong:
        fail(problem)
    if wrong:
        raise typer.Exit(1)


def _entry(setting: settings.Setting[Any]) -> dict[str, Any]:
    value = error = None
    try:
        value = setting.read()
        if setting is settings.BACKEND and value:
            dispatch.forced()  # which knows the names
    except ValueError as problem:
        error = str(problem)
    return {
        "name": setting.name, "text": setting.text() or None, "value": value, "default": setting.default,
        "kind": setting.kind, "meaning": setting.meaning, "error": error,
    }  # fmt: skip
