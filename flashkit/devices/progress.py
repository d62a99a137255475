"""What flashkit says while kernels compile: a line on the terminal, and records of the logger `flashkit`.

The terminal's line shows which kernel compiles, for how long, and how many were compiled before. It is written by a
thread of its own, by os.write alone: a fork may happen at any time, and Python's own streams have locks.
FLASHKIT_PROGRESS=0 turns it off, and so do commands that draw on the terminal themselves.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .. import settings

DELAY = 0.3
"""Seconds before the line appears, so that short compilations pass in silence."""

_FRAMES = "|/-\\"
_WIDTH = 79

_compiled = 0  # kernels of this process
_hidden = 0  # `with hidden()` blocks that are entered


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Say that a kernel of this name compiles, and, after the `with` block, how long that took."""
    global _compiled
    import logging  # takes longer than the rest of `import flashkit` but NumPy

    logger = logging.getLogger("flashkit")
    logger.debug("compiling %s", name)
    started, ended = time.perf_counter(), threading.Event()
    descriptor = _terminal()
    writer = None
    if descriptor is not None:
        writer = threading.Thread(target=_draw, args=(descriptor, name, ended), name="flashkit progress", daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            writer.start()
    try:
        yield
    finally:
        ended.set()
        if writer is not None and writer.is_alive():
            writer.join()
    _compiled += 1
    logger.info("compiled %s in %.1f s", name, time.perf_counter() - started)


@contextmanager
def hidden() -> Iterator[None]:
    """Nothing is drawn within the `with` block, which draws on the terminal itself."""
    global _hidden
    _hidden += 1
    try:
        yield
    finally:
        _hidden -= 1


def _terminal() -> int | None:
    """The descriptor to draw on; None where nothing is drawn."""
    if _hidden:
        return None
    with suppress(AttributeError, OSError, ValueError):  # no stderr, or one without a descriptor
        descriptor = sys.stderr.fileno()
        wanted = settings.PROGRESS.read()
        if os.isatty(descriptor) if wanted is None else wanted:
            return descriptor
    return None


def _draw(descriptor: int, name: str, ended: threading.Event) -> None:
    """Redraw the line until the compilation has ended, then remove it."""
    started = time.perf_counter()
    if ended.wait(DELAY):
        return
    frame = 0
    with suppress(OSError):  # the terminal is gone
        while True:
            before = f", {_compiled} done" if _compiled else ""
            seconds = time.perf_counter() - started
            text = f"{_FRAMES[frame % 4]} flashkit compiles {name} for this machine, once: {seconds:.0f} s{before}"
            os.write(descriptor, f"\r{text[:_WIDTH]:{_WIDTH}}".encode())
            frame += 1
            if ended.wait(0.2):
                break
        os.write(descriptor, f"\r{'':{_WIDTH}}\r".encode())
