"""A report of the doctor as plain text."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

Report = dict[str, Any]
Rows = list[tuple[str, Any]]


def render(report: Report) -> str:
    """The report as text, a section for each of its topics. A topic of unexpected form still gets a section."""
    lines: list[str] = []

    def section(title: str, rows: Rows) -> None:
        lines.append(title)
        width = max((len(label) for label, _ in rows), default=0)
        for label, value in rows:
            lines.extend(wrapped(f"  {label:<{width}}  ", f"{value}"))
        lines.append("")

    for name, rows in _ROWS.items():
        if name not in report:
            continue
        content = report[name]
        if isinstance(content, dict) and set(content) == {"error"}:
            section(name, [("could not be read", content["error"])])
            continue
        try:
            section(name, rows(content))
        except Exception as error:
            section(name, [("could not be shown", f"{type(error).__name__}: {error}: {content!r}")])
    return "\n".join(lines).rstrip() + "\n"


def wrapped(first: str, value: str) -> list[str]:
    """The lines of a value behind its label, with whole words at the width of a terminal; in a file one line."""
    columns, _ = shutil.get_terminal_size((1000, 24))
    return textwrap.wrap(
        value, columns, initial_indent=first, subsequent_indent=" " * (len(first) or 2), break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]  # fmt: skip


def size(amount: int) -> str:
    """Bytes for people: 48 KiB, 1.3 MiB."""
    value = float(amount)
    for suffix in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {suffix}"
        value /= 1024
    return f"{value:.4g} GiB"


def _package_rows(packages: dict[str, Report]) -> Rows:
    rows = []
    absent = []
    for name, entry in packages.items():
        if entry.get("error"):
            rows.append((name, f"{entry['installed'] or 'not installed'}, DOES NOT IMPORT: {entry['error']}"))
        elif entry.get("loaded"):
            rows.append((name, f"{entry['installed']} installed, but {entry['loaded']} loaded from {entry['from']}"))
        elif entry["installed"]:
            rows.append((name, entry["installed"]))
        else:
            absent.append(name)
    return [*rows, ("not installed", ", ".join(absent))] if absent else rows


def _cpu_rows(cpu: Report) -> Rows:
    return [
        ("name", f"{cpu['name']} ({cpu['architecture']}, LLVM calls it {cpu['llvm_name']})"),
        ("cores", cpu["cores"]),
        ("features", " ".join(cpu["features"]) or "none known"),
        ("bfloat16", cpu["bfloat16"]),
        ("caches", ", ".join(f"{name} {size(amount)}" for name, amount in cpu["caches"].items()) or "unknown"),
    ]


def _plain_rows(content: Report) -> Rows:
    return [(name, ("; ".join(x) if isinstance(x, list) else x) or "none") for name, x in content.items()]


def _cache_rows(cache: Report) -> Rows:
    contents = f"{cache['kernels']} compiled kernels, {cache['files']} files, {size(cache['bytes'])}"
    contents += f" of {size(cache['limit'])}" if cache["limit"] is not None else ""
    prebuilt = f"{cache['prebuilt']} kernels for this CPU" if cache["prebuilt"] else "none"
    rows = [("path", cache["path"]), ("contents", contents), ("prebuilt", prebuilt)]
    rows += [(name, "yes" if cache[name] else "NO") for name in ("trusted", "writable")]
    if cache["problem"]:
        rows.append(("new kernels", f"stay in the memory of each process: {cache['problem']}"))
    return [*rows, ("first call", cache["first_call"])]


def _profile_rows(profiles: Report) -> Rows:
    used = [(kind, profiles[kind]) for kind in ("cpu", "cuda")]
    rows = [(kind, f"{it['device']}: {', '.join(os.path.basename(file) for file in it['files'])}") for kind, it in used]
    return [*rows, *(("skipped", text) for text in profiles["skipped"])]


def _backend_rows(backends: list[Report]) -> Rows:
    verdicts = [(it["name"], "available" if it["ok"] else "not available", it["reason"]) for it in backends]
    rows = [(name, f"{verdict}: {reason}" if reason else verdict) for name, verdict, reason in verdicts]
    return rows or [("none", "no entry point of the group flashkit.backends")]


def _missing_rows(missing: list[dict[str, str]]) -> Rows:
    return [(entry["command"], f"{entry['what']}: {entry['brings']}") for entry in missing] or [("nothing", "")]


_ROWS: dict[str, Callable[[Any], Rows]] = {
    "flashkit": lambda it: [("version", it["version"]), ("path", it["path"])],
    "python": lambda it: [
        ("version", f"{it['implementation']} {it['version']}"),
        ("executable", it["executable"]),
        ("platform", it["platform"]),
    ],
    "packages": _package_rows,
    "cpu": _cpu_rows,
    "threading": _plain_rows,
    "cuda": _plain_rows,
    "cache": _cache_rows,
    "profiles": _profile_rows,
    "backends": _backend_rows,
    "environment": lambda it: list(it.items()) or [("nothing set", "")],
    "missing": _missing_rows,
}
