"""The cache of compiled kernels on disk.

Every backend has a folder in one directory. `flashkit cache path` prints it and `flashkit cache clear` empties it.
Deleting it is safe: the next call compiles again.

Kernels are native code, so a file is used only if no other user could have written it (trust.py). If the directory
cannot be used, compiled kernels stay in the memory of the process, and one warning has the reason.
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
    """The cache directory, which is not created: below FLASHKIT_CACHE_DIR, or the user's cache directory.

    It is a folder below the variable's, so that `clear` empties only a directory that flashkit alone writes, even if
    the variable is a home directory by mistake. UntrustedError if the variable is a relative path, or without a home
    directory.
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
    """Contents of the cache: number of files, of compiled kernels among them (.o, .cubin), and bytes of all files."""

    files: int
    kernels: int
    bytes: int


def usage() -> Usage:
    """Count the contents of the cache. An untrusted directory counts as empty. Files that another process removes
    meanwhile are not counted.
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
    """Remove everything in the cache directory, but not the directory. Returns what was there.

    UntrustedError if it may be a link of another user; nothing is removed then.
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
    """Why kernels cannot be cached: an UntrustedError, or a directory that cannot be written; None if they can."""
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


# --- files of backends -----------------------------------------------------------------------------------------------

_memory: dict[tuple[str, str], bytes] = {}
_warned: set[str | None] = set()


def read(folder: str, name: str) -> bytes | None:
    """The content written under this name; None if there is none, or if another user could have written it."""
    if (content := _memory.get((folder, name))) is not None:
        return content
    try:
        return trust.read(path() / folder / name)
    except trust.UntrustedError as error:
        _warn(error)
    except OSError:
        pass
    return None


def write(folder: str, name: str, content: bytes) -> None:
    """Store it for all processes, or in the memory of this process if the directory cannot be used."""
    try:
        trust.write(trust.directory(path() / folder, make=True) / name, content)
    except OSError as error:
        _warn(error)
        _memory[folder, name] = content


@contextmanager
def alone(folder: str, name: str) -> Iterator[None]:
    """Lock this name while the file is made, so that other processes wait and then find it."""
    lock: AbstractContextManager[None] = nullcontext()
    with suppress(OSError):  # the directory cannot be used, so nothing is shared
        lock = trust.locked(trust.directory(path() / folder, make=True) / f"{name}.lock")
    with lock:
        yield


def _warn(error: OSError) -> None:
    """Warn once for each cache directory."""
    wanted = os.environ.get("FLASHKIT_CACHE_DIR")
    if wanted not in _warned:
        _warned.add(wanted)
        warnings.warn(
            f"compiled kernels cannot be kept, so each process compiles anew: {error}; FLASHKIT_CACHE_DIR can name "
            "another directory",
            stacklevel=3,
        )
