"""`flashkit info` and `flashkit doctor`: what is installed and what runs."""

from __future__ import annotations

import contextlib
import os
import sys

from rich.table import Table

from .. import doctor as examination
from ..console import stdout
from .common import Json, print_json


def info(as_json: Json = False) -> None:
    """Version, backends, profiles in use and kernel cache."""
    with contextlib.redirect_stdout(sys.stderr):
        report = examination.report("flashkit", "backends", "profiles", "cache")
    if as_json:
        print_json(report)
        return
    table = Table.grid(padding=(0, 2))
    table.add_row("version", str(report["flashkit"].get("version")))
    for backend in report["backends"]:
        verdict = "available" if backend["ok"] else "not available"
        reason = f", {backend['reason']}" if backend["reason"] else ""
        table.add_row("backend", f"{backend['name']}: {verdict}{reason}")
    for kind in ("cpu", "cuda"):
        profile = report["profiles"].get(kind, {})
        files = ", ".join(os.path.basename(file) for file in profile.get("files", []))
        table.add_row("profile", f"{kind}: {profile.get('device')} ({files})")
    cache = report["cache"]
    size = examination.size(cache.get("bytes", 0))
    if cache.get("limit") is not None:
        size += f" of {examination.size(cache['limit'])}"
    table.add_row("cache", f"{cache.get('path')} ({cache.get('kernels')} kernels, {size})")
    stdout().print(table)


def doctor(as_json: Json = False) -> None:
    """A report for bugs, with commands that install what is missing. Never fails."""
    examination.main(["--json"] if as_json else [])
