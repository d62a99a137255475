"""The command line. Each command is a thin layer over a function that a program can call as well.

With --json a command prints one JSON value on stdout and nothing else there; progress, warnings and errors go to
stderr. Exit status: 0 done, 1 the answer is no (a malformed profile, an unsupported problem, a missing package),
2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ... import __version__
from . import cache, config, examples, explain, measuring, profiles, status
from .common import fail

app = typer.Typer(
    name="flashkit",
    help="Exact attention on NumPy and CuPy arrays: what runs here, why, and how fast.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # help is printed as it is written: rich takes "[...]" for markup
    pretty_exceptions_enable=False,  # a plain traceback can be pasted into a bug report
)
app.command()(status.info)
app.command()(status.doctor)
app.command()(explain.explain)
app.command()(measuring.autotune)
app.command()(measuring.bench)
for example in (examples.demo, examples.generate):
    app.command(
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        add_help_option=False,  # --help is passed to the example
    )(example)
app.add_typer(profiles.app, name="profile", no_args_is_help=True)
app.add_typer(cache.app, name="cache")
app.add_typer(config.app, name="config", no_args_is_help=True)


def run(arguments: list[str]) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments
        The words after `flashkit`.

    Returns
    -------
    int
        The exit status.

    Examples
    --------
    >>> from flashkit.tools import cli
    >>> cli.run(["explain", "--shape", "5"])
    2
    """
    try:
        app(arguments, prog_name="flashkit")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (OSError, MemoryError) as error:  # of files, of devices and of sizes: not of this program
        fail(str(error) or type(error).__name__)
        return 1
    return 0


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
