"""Where compiled kernels are kept between processes.

One directory for every backend; each takes a folder of its own in it. `flashkit cache path` prints it and
`flashkit cache clear` empties it. Deleting it is always safe: the next call compiles again.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path


def path() -> Path:
    """The cache directory (not created): below FLASHKIT_CACHE_DIR, or the user's cache directory of this platform.

    Below, not at: whatever the variable names (a home directory, by mistake), `clear` only ever empties a directory
    that flashkit alone writes.
    """
    override = os.environ.get("FLASHKIT_CACHE_DIR")
    if override:
        return Path(override).expanduser() / "flashkit-kernels"
    import platformdirs

    return Path(platformdirs.user_cache_dir("flashkit", appauthor=False))


@dataclass(frozen=True)
class Usage:
    """What lies in the cache: `kernels` compiled ones (the CPU's .o, CUDA's .cubin) among `files`, in `bytes`."""

    files: int
    kernels: int
    bytes: int


def usage() -> Usage:
    """Count the cache's contents. Files that vanish meanwhile (another process clears) are not counted."""
    files = kernels = size = 0
    for entry in path().rglob("*"):
        try:
            if not entry.is_file():
                continue
            size += entry.stat().st_size
        except OSError:
            continue
        files += 1
        kernels += entry.suffix in {".o", ".cubin"}
    return Usage(files, kernels, size)


def clear() -> Usage:
    """Remove everything in the cache directory, the directory itself kept; returns what was there."""
    before = usage()
    root = path()
    if root.is_dir():
        for entry in root.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    return before


# --- what backends write there ----------------------------------------------------------------------------------------


def folder(name: str) -> Path:
    """The folder of this name in the cache, made; where that cannot be, a temporary one for this process."""
    return _writable(path() / name)


@cache
def _writable(wanted: Path) -> Path:
    with suppress(OSError):
        wanted.mkdir(parents=True, exist_ok=True)
    if os.access(wanted, os.W_OK):
        return wanted
    warnings.warn(
        f"{wanted} cannot be written, so each process compiles anew; FLASHKIT_CACHE_DIR names another place",
        stacklevel=2,
    )
    return Path(tempfile.mkdtemp(prefix="flashkit-"))


def write(file: Path, content: bytes) -> None:
    """Create the file at once or not at all: another process may be doing the same."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".tmp")
    with os.fdopen(handle, "wb") as target:
        target.write(content)
    os.replace(temporary, file)


@contextmanager
def alone(file: Path) -> Iterator[None]:
    """While one process makes this file the others wait; they then find it made."""
    from filelock import FileLock, Timeout

    lock = FileLock(file.with_suffix(".lock"))
    with suppress(Timeout, OSError):  # held for longer than compiling takes: better twice than never
        lock.acquire(timeout=60)
    try:
        yield
    finally:
        lock.release()
