"""The command line. Each command is a thin layer over a function that a program can call as well.

With --json a command prints one JSON value on stdout and nothing else there; progress, warnings and errors go to
stderr. Exit status: 0 done, 1 the answer is no (a malformed profile, an unsupported problem, a missing package, an
invalid variable, a file that cannot be used), 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from ... import __version__
from ...errors import ProfileError
from ...settings import SettingError
from .. import doctor as examination
from . import cache, config, examples, explain, measuring, profiles
from .common import Json, fail, print_json

app = typer.Typer(
    name="flashkit",
    help="Exact attention on NumPy and CuPy arrays: what runs here, why, and how fast.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,  # help is printed as it is written: rich takes "[...]" for markup
    pretty_exceptions_enable=False,  # a plain traceback can be pasted into a bug report
)


@app.command()
def info(as_json: Json = False) -> None:
    """Version, backends, profiles in use and kernel cache."""
    with contextlib.redirect_stdout(sys.stderr):
        report = examination.report("flashkit", "backends", "profiles", "cache")
    if as_json:
        print_json(report)
    else:
        print(examination.render(report), end="")


@app.command()
def doctor(as_json: Json = False) -> None:
    """A report for bugs, with commands that install what is missing. Never fails."""
    examination.main(["--json"] if as_json else [])


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
    """Run the command line on the words after `flashkit`; returns the exit status."""
    try:
        app(arguments, prog_name="flashkit")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except (OSError, MemoryError, ProfileError, SettingError) as error:  # of what the user has: not of this program
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
