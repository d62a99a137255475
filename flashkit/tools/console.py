"""The console of the commands."""

from __future__ import annotations

from rich.console import Console


def stdout() -> Console:
    """A console on stdout. If that is not a terminal, it is wide enough that a table is not cut.

    Markup is off: text such as "cupy-cuda13x[ctk]" must be printed as it is.
    """
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=200)
