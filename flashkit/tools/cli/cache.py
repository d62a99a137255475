"""`flashkit cache`: compiled kernels on disk, and those that the package carries."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ... import settings
from .common import Json, fail, print_json

if TYPE_CHECKING:
    from ...devices.kernel_cache import Usage

app = typer.Typer(rich_markup_mode=None, help="Compiled kernels on disk.")


@app.callback(invoke_without_command=True)
def cache(context: typer.Context, as_json: Json = False) -> None:
    """Compiled kernels: without a command, what the cache holds and what the package carries prebuilt."""
    from ...devices import kernel_cache, prebuilt
    from .. import doctor

    if context.invoked_subcommand is not None:
        return
    path, limit, enabled = str(kernel_cache.path()), kernel_cache.limit(), prebuilt.enabled()
    used, carried, here, stale = kernel_cache.usage(), prebuilt.contents(), "unknown", False
    with suppress(ImportError):
        from ...backends.cpu import objects, specialise, target

        here = target.target().name
        stale = f"cpu/{here}" in carried and not objects.is_prebuilt(specialise.launcher_source())
    if as_json:
        contents = {name: asdict(one) for name, one in carried.items()}
        package = {"path": str(prebuilt.path()), "enabled": enabled, "stale": stale, "contents": contents}
        print_json({"path": path, **asdict(used), "limit": limit, "cpu": here, "prebuilt": package})
        return
    print(f"cached    {used.kernels} kernels, {doctor.size(used.bytes)} of at most {doctor.size(limit)}")
    print(f"path      {path}")
    for name, one in carried.items():
        print(f"prebuilt  {name}: {one.kernels} kernels, {doctor.size(one.bytes)}")
    if not carried:
        print("prebuilt  none; kernels compile when they are first needed")
    elif not enabled:
        print(f"          not used: {settings.PREBUILT.name} is {settings.PREBUILT.text()}")
    elif stale:
        print("          not used: the sources of the kernels have changed since")
    print(f"this CPU  {here}")


@app.command("prebuild")
def cache_prebuild(
    output: Annotated[Path | None, typer.Option(help="Folder to write to; by default the package's own.")] = None,
    cpu: Annotated[list[str] | None, typer.Option(help="A class of CPUs; may be repeated. none: no CPU.")] = None,
    gpu: Annotated[list[str] | None, typer.Option(help="An architecture; may be repeated. none: no GPU.")] = None,
    as_json: Json = False,
) -> None:
    """Compile usual kernels for a wheel to carry.

    Those of usual calls, for all common CPUs and GPUs. Takes minutes.

    Example: flashkit cache prebuild --cpu x86-64-v3 --gpu none
    """
    from ...backends.cuda_common.compiler import CompileError
    from .. import doctor, prebuild

    started, files, size = time.perf_counter(), [], 0
    try:
        for file in prebuild.prebuild(output, _chosen(cpu), _chosen(gpu)):
            files.append(file._asdict())
            size += file.bytes
            if not as_json:
                print(f"{file.name}: {doctor.size(file.bytes)}, {file.seconds:.1f} s")
    except ValueError as error:
        raise fail(error, 2) from None
    except (CompileError, ImportError) as error:
        raise fail(error) from None
    if as_json:
        print_json(files)
    else:
        print(f"{len(files)} files, {doctor.size(size)}, {time.perf_counter() - started:.0f} s")


def _chosen(given: list[str] | None) -> tuple[str, ...] | None:
    return None if not given else () if given == ["none"] else tuple(given)


@app.command("path")
def cache_path(as_json: Json = False) -> None:
    """Print the directory of the compiled kernels.

    With --json also their number and size, and the limit.
    """
    from ...devices import kernel_cache

    path, limit = str(kernel_cache.path()), kernel_cache.limit()
    if as_json:
        print_json({"path": path, **asdict(kernel_cache.usage()), "limit": limit})
    else:
        print(path)


@app.command("clear")
def cache_clear(as_json: Json = False) -> None:
    """Remove all compiled kernels.

    They are compiled again when they are needed.
    """
    from ...devices import kernel_cache

    _print_removed(kernel_cache.clear(), as_json)


def _print_removed(removed: Usage, as_json: bool) -> None:
    from ...devices import kernel_cache
    from .. import doctor

    if as_json:
        print_json({"path": str(kernel_cache.path()), **asdict(removed)})
    else:
        print(f"removed {removed.files} files ({removed.kernels} kernels, {doctor.size(removed.bytes)})")


@app.command("prune")
def cache_prune(
    to: Annotated[str | None, typer.Option(help="The size to keep, such as 500M; by default the limit.")] = None,
    as_json: Json = False,
) -> None:
    """Remove compiled kernels that were not used for long.

    Example: flashkit cache prune --to 100M
    """
    from ...devices import kernel_cache

    try:
        most = None if to is None else settings.size(to)
    except ValueError as error:
        raise fail(f"--to: expected {error}, got {to!r}", 2) from None
    _print_removed(kernel_cache.prune(kernel_cache.limit() if most is None else most), as_json)


@app.command("warm")
def cache_warm(
    dtype: Annotated[list[str] | None, typer.Option(help="A dtype to compile for; may be repeated.")] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="A head dim to compile for; may be repeated.")] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels of plain and causal attention now.

    In parallel, instead of in the first calls.

    Example: flashkit cache warm --dtype bfloat16 --head-dim 128
    """
    from ...devices import progress
    from ...spec import ITEMSIZE, MAX_HEAD_DIM
    from .. import warm

    for name in dtype or ():
        if name not in ITEMSIZE:
            raise fail(f"--dtype {name}: expected one of {', '.join(ITEMSIZE)}", 2)
    for d in head_dim or ():
        if not 1 <= d <= MAX_HEAD_DIM:
            raise fail(f"--head-dim {d}: expected 1 to {MAX_HEAD_DIM}", 2)
    started, failed, warmed = time.perf_counter(), 0, []
    with progress.hidden():
        for one in warm.warm(dtype or warm.DTYPES, head_dim or warm.HEAD_DIMS):
            failed += bool(one.error)
            warmed.append(one._asdict())
            if not as_json:
                print(f"{one.backend}: {one.label}: {one.error or f'{one.seconds:.1f} s'}")
    if as_json:
        print_json(warmed)
    else:
        print(f"{len(warmed)} kinds of calls, {failed} failed, {time.perf_counter() - started:.1f} s")
    if failed:
        raise typer.Exit(1)
