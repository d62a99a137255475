"""The console of the commands, their progress, and tables that lose no number on a narrow one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..devices.progress import hidden

_GAP = 2  # between columns
_NAME = 14  # characters that a column of names keeps


def stdout() -> Console:
    """A console on stdout without markup, wide enough for a table if it is no terminal."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=200)


@contextmanager
def progress(total: int, counted: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A bar of so many steps on stderr, without the lines of compilations. Yields its `Progress.update`."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), counted, TimeElapsedColumn())
    # Without auto_refresh: its thread would take a core from the timed calls ten times a second.
    with hidden(), Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as drawn:
        yield partial(drawn.update, drawn.add_task("", total=total), refresh=True)


def print_table(console: Console, names: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Where it is too wide names are folded, and numbers that do not fit follow in a table below."""
    for part in _parts(console.width, len(names), numbers, rows):
        table = Table(box=None, padding=(0, _GAP, 0, 0))
        for name in names:
            table.add_column(name, overflow="fold")
        for i in part:
            table.add_column(numbers[i], justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row[: len(names)], *(row[len(names) + i] for i in part))
        console.print(table)


def _parts(width: int, named: int, numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[list[int]]:
    """The columns of numbers of each table: as many as fit beside the names."""
    part: list[int] = []
    left = width - named * (_NAME + _GAP)
    for i, head in enumerate(numbers):
        needed = max(cell_len(text) for text in (head, *(row[named + i] for row in rows))) + _GAP
        if part and needed > left:
            yield part
            part, left = [], width - named * (_NAME + _GAP)
        part.append(i)
        left -= needed
    yield part


def digits(x: float) -> str:
    """Three significant digits without an exponent."""
    return f"{x:.{max(0, 2 - math.floor(math.log10(x)))}f}" if x > 0 else "0"
