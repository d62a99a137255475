"""`flashkit autotune` and `flashkit bench`."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import fail, numbers, words, writable


def autotune(
    quick: Annotated[bool, typer.Option("--quick", help="Few candidates, the most used sizes.")] = False,
    dtype: Annotated[list[str] | None, typer.Option(help="Only this dtype; may be repeated.")] = None,
    budget: Annotated[float | None, typer.Option(help="Stop after this many seconds for each backend.")] = None,
    resume: Annotated[bool, typer.Option(help="Resume an interrupted run.")] = True,
    output: Annotated[
        Path | None, typer.Option(help="Write the profile here (default: the user's profile directory).")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, cupy_raw or numba_cuda (default: the first two).")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write the profile even if other processes disturbed the measurements.")
    ] = False,
    interconnect: Annotated[
        bool, typer.Option("--interconnect", help="Under mpiexec: measure only the bandwidth between ranks.")
    ] = False,
) -> None:
    """Measure this machine and write its best tiles to a profile.

    Ctrl-C keeps what was measured.

    Example: flashkit autotune --quick --backend cpu
    """
    from ..autotune import command

    writable(output)
    if budget is not None and not 0 < budget < math.inf:
        raise typer.BadParameter(f"got {budget:g}, expected seconds, more than 0", param_hint="--budget")
    try:
        if interconnect:
            from ..autotune.interconnect import interconnect as measured

            rate, path = measured()
            if path is not None:
                print(f"interconnect in GB/s: {rate:.1f}\nprofile  {path}")
            return
        outcomes = command.autotune(
            quick=quick, dtypes=dtype, budget=budget, resume=resume, output=output, backend=backend, force=force
        )
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, run again to resume", file=sys.stderr)
        raise typer.Exit(130) from None
    except ValueError as error:
        raise fail(error, 2) from None
    if not outcomes.written:
        raise fail("no profile was written; the reason is above")


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, few rounds.")] = False,
    output: Annotated[Path | None, typer.Option(help="Append the results to this file, as lines of JSON.")] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            help="Cases: float32, bfloat16, float16, float64, masks, decode, small, shapes (default: all; with --sizes "
            "the first)."
        ),
    ] = None,
    baselines: Annotated[
        str | None,
        typer.Option(
            help="Compare with these: numpy, torch, jax, onnxruntime; on a GPU flash, cudnn, efficient, fa3, flex, "
            "pallas."
        ),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(help="Numbers of tokens instead of those of the suite, joined by commas: 512,2048.")
    ] = None,
    device: Annotated[str, typer.Option(help="Measure on this: cpu, cuda.")] = "cpu",
) -> None:
    """Time attention and its gradients beside other libraries.

    Calls are interleaved in one process.

    Example: flashkit bench --quick --baselines numpy,torch
    """
    from ..bench.cases import MAX_TOKENS

    lengths = None if sizes is None else [int(n) for n in numbers(sizes, "--sizes") if n is not None]
    if wrong := [n for n in lengths or () if not 1 <= n <= MAX_TOKENS]:
        raise typer.BadParameter(f"expected 1 to {MAX_TOKENS} tokens, got {wrong[0]}", param_hint="--sizes")
    writable(output)
    names = None if baselines is None else words(baselines)
    from ..bench import command

    suites = None if suite is None else words(suite)
    raise typer.Exit(
        command.main(quick=quick, output=output, baselines=names, sizes=lengths, suites=suites, device=device)
    )
