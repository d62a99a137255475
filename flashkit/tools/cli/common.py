"""What commands share: printing, errors, and options that are lists of numbers or words."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str, ensure_ascii=False))


def fail(message: object, status: int = 1) -> typer.Exit:
    """Print an error; the caller raises what is returned."""
    print(f"error: {message}", file=sys.stderr)
    return typer.Exit(status)


@contextlib.contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print warnings as one line each, without the source line that Python adds."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)


def numbers(text: str, name: str, count: int | None = None) -> list[int | None]:
    """ "512,none" -> [512, None]; "none" is accepted with a `count` only. BadParameter names the option."""
    values: list[int | None] = []
    for part in text.split(","):
        word = part.strip().lower()
        if word in {"", "none"} and count is not None:
            values.append(None)
        elif word.isascii() and word.isdecimal() and len(word) <= 18:
            values.append(int(word))
        else:
            got = part.strip() if len(part) < 40 else f"{part[:37]}..."
            raise typer.BadParameter(f"got {got!r}, expected whole numbers joined by commas", param_hint=name)
    if count is not None and len(values) != count:
        raise typer.BadParameter(f"got {text!r}, expected {count} values joined by a comma", param_hint=name)
    return values


def writable(output: Path | None) -> None:
    """Check before a long measurement that its file can be written; None is no file. BadParameter names --output."""
    if output is None:
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        new = not output.exists()
        with output.open("ab"):
            pass
        if new:
            output.unlink()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{str(output)!r} cannot be written: {reason}", param_hint="--output") from None


def words(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]
