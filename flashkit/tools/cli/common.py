"""What commands share: printing, errors, and options that are lists of numbers or words."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
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
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)


def numbers(text: str, name: str, count: int | None = None) -> list[int | None]:
    """ "512,none" -> [512, None]; "none" is accepted with a `count` only.

    Raises
    ------
    typer.BadParameter
        For anything else; it names the option.
    """
    values: list[int | None] = []
    for part in text.split(","):
        word = part.strip().lower()
        if word in {"", "none"} and count is not None:
            values.append(None)
        elif word.isdecimal():
            values.append(int(word))
        else:
            raise typer.BadParameter(f"got {part.strip()!r}, expected whole numbers joined by commas", param_hint=name)
    if count is not None and len(values) != count:
        raise typer.BadParameter(f"got {text!r}, expected {count} values joined by a comma", param_hint=name)
    return values


def words(text: str) -> list[str]:
    """ "a, b" -> ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]
