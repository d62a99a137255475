"""Where compiled kernels are kept between processes.

One directory for every backend; each takes a folder of its own in it. `flashkit cache path` prints it and
`flashkit cache clear` empties it. Deleting it is always safe: the next call compiles again.

Kernels are native code, so a file is used only where no other user could have written it (trust.py). Where they cannot
be kept they stay in the memory of the process that compiled them, and one warning says why.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from . import trust


def path() -> Path:
    """The cache directory (not created): below FLASHKIT_CACHE_DIR, or the user's cache directory of this platform.

    Below, not at: whatever the variable names (a home directory, by mistake), `clear` only ever empties a directory
    that flashkit alone writes. UntrustedError where it is a relative path, or where there is no home directory.
    """
    override = os.environ.get("FLASHKIT_CACHE_DIR")
    if not override:
        return trust.of_user("cache")
    found = os.path.join(os.path.expanduser(override), "flashkit-kernels")
    if not os.path.isabs(found):
        raise trust.UntrustedError(f"FLASHKIT_CACHE_DIR={override} is not an absolute path")
    return Path(found)


@dataclass(frozen=True)
class Usage:
    """What lies in the cache: `kernels` compiled ones (the CPU's .o, CUDA's .cubin) among `files`, in `bytes`."""

    files: int
    kernels: int
    bytes: int


def usage() -> Usage:
    """Count the cache's contents: none where another user could have written them. Files that vanish meanwhile (another
    process clears) are not counted.
    """
    files = kernels = size = 0
    try:
        root = Path(trust.resolve(path()))
    except OSError:
        return Usage(0, 0, 0)
    for entry in root.rglob("*"):
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
    """Remove everything in the cache directory, the directory itself kept; returns what was there.

    UntrustedError where it may be another user's link to somewhere else; nothing is removed then.
    """
    before = usage()
    with suppress(FileNotFoundError):
        for entry in trust.directory(path()).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    return before


def problem() -> OSError | None:
    """Why new kernels cannot be kept: an UntrustedError, or that a directory cannot be written. Changes nothing."""
    try:
        for folder in ("cpu", "cuda"):
            wanted = path() / folder
            with suppress(FileNotFoundError):
                trust.directory(wanted)
            for nearest in (wanted, *wanted.parents):
                with suppress(FileNotFoundError):
                    if not os.access(trust.resolve(nearest), os.W_OK):
                        raise PermissionError(f"{nearest} cannot be written")
                    break
    except OSError as error:
        return error
    return None


# --- what backends keep there -----------------------------------------------------------------------------------------

_memory: dict[tuple[str, str], bytes] = {}
_warned: set[str | None] = set()


def read(folder: str, name: str) -> bytes | None:
    """What was written under this name; None where nothing was, or where another user could have written it."""
    if (kept := _memory.get((folder, name))) is not None:
        return kept
    try:
        return trust.read(path() / folder / name)
    except trust.UntrustedError as error:
        _warn(error)
    except OSError:
        pass
    return None


def write(folder: str, name: str, content: bytes) -> None:
    """Keep it for all processes; in memory, for this one, where that cannot be."""
    try:
        trust.write(trust.directory(path() / folder, make=True) / name, content)
    except OSError as error:
        _warn(error)
        _memory[folder, name] = content


@contextmanager
def alone(folder: str, name: str) -> Iterator[None]:
    """While one process makes this file the others wait; they then find it made."""
    lock: AbstractContextManager[None] = nullcontext()
    with suppress(OSError):  # others neither find nor keep anything there
        lock = trust.locked(trust.directory(path() / folder, make=True) / f"{name}.lock")
    with lock:
        yield


def _warn(error: OSError) -> None:
    """Once for each cache directory."""
    wanted = os.environ.get("FLASHKIT_CACHE_DIR")
    if wanted not in _warned:
        _warned.add(wanted)
        warnings.warn(
            f"compiled kernels cannot be kept, so each process compiles anew: {error}; FLASHKIT_CACHE_DIR can name "
            "another directory",
            stacklevel=3,
        )
