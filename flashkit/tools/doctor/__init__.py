"""`flashkit doctor`: versions, devices, caches, profiles and backends, and the commands that install what is missing.

Rules of this package: standard library only at import; every probe is guarded, so that a broken installation still gets
a report; nothing is changed. It runs alone, too: `python -m flashkit.tools.doctor [--json]`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from . import cuda, missing, probes
from .text import render, size

__all__ = ["PROBES", "Report", "main", "render", "report", "size"]

Report = dict[str, Any]

PROBES: dict[str, Callable[[], Any]] = {
    "flashkit": probes.installation,
    "python": probes.python,
    "packages": probes.packages,
    "cpu": probes.cpu,
    "threading": probes.threading,
    "cuda": cuda.cuda,
    "cache": probes.cache,
    "profiles": probes.profiles,
    "backends": probes.backends,
    "environment": probes.environment,
}
"""What each topic of a report is made by."""


def report(*topics: str) -> Report:
    """The report by topic of PROBES, by default all and "missing"; {"error": ..} of one that fails. Never raises."""
    found: Report = {name: _guarded(probe) for name, probe in PROBES.items() if not topics or name in topics}
    if not topics:
        found["missing"] = _guarded(lambda: missing.missing(found))
    return found


def main(arguments: list[str]) -> int:
    """Print the report as text, or with --json as one JSON object. Returns the exit status, which is always 0."""
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # libraries may print on import, and stdout must be valid JSON
        found = report()
    if "--json" in arguments:
        print(json.dumps(found, indent=2, default=str))
    else:
        print(render(found))
        print(f"({time.perf_counter() - started:.1f} s)", file=sys.stderr)
    return 0


def _guarded(probe: Callable[[], Any]) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
