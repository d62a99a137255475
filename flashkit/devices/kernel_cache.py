"""The cache of compiled kernels on disk.

Every backend has a folder in one directory. `flashkit cache path` prints it and `flashkit cache clear` empties it.
Deleting it is safe: the next call compiles again.

Kernels are native code, so a file is used only if no other user could have written it (trust.py). If the directory
cannot be used, compiled kernels stay in the memory of the process, and one warning has the reason.

The files take up to FLASHKIT_CACHE_SIZE bytes. A process that writes beyond it removes those that were not used for the
longest time; a process that finds a file removed compiles again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..errors import warn_once
from . import trust
from .forking import inner_lock

FOLDERS = "cpu", "cuda"
"""The folders of backends, which `prune` looks at."""

DEFAULT_SIZE = settings.size(settings.CACHE_SIZE.default)
MAX_MEMORY = 64 << 20
"""Bytes of compiled kernels in the memory of a process whose directory cannot be used."""

_KERNELS = ".o", ".cubin"
_BLOCK = 4096  # a file takes whole blocks of the file system
_RECENT = 3600  # seconds: a file's time of use is at least so precise, and an older temporary file is a leftover
_LOCKS = 64


def path() -> Path:
    """The cache directory, which is not created: below FLASHKIT_CACHE_DIR, or the user's cache directory.

    It is a folder below the variable's, so that `clear` empties only a directory that only flashkit writes, even if
    the variable is a home directory by mistake. UntrustedError if the variable is a relative path, or without a home
    directory.
    """
    try:
        override = settings.CACHE_DIR.read()
    except ValueError as error:
        raise trust.UntrustedError(str(error)) from None
    return Path(override, "flashkit-kernels") if override else trust.of_user("cache")


@dataclass(frozen=True)
class Usage:
    """Contents of a directory: number of files, of compiled kernels among them (.o, .cubin), and bytes of all files."""

    files: int
    kernels: int
    bytes: int


def limit() -> int:
    """The bytes that the cache may take: FLASHKIT_CACHE_SIZE, or DEFAULT_SIZE. ValueError for another value."""
    wanted = settings.CACHE_SIZE.read()
    return DEFAULT_SIZE if wanted is None else wanted


def usage() -> Usage:
    """Count the contents of the cache. An untrusted directory counts as empty."""
    try:
        return files_below(trust.resolve(path()))
    except OSError:
        return Usage(0, 0, 0)


def files_below(root: str | Path) -> Usage:
    """Count the files of a directory. Those that another process removes meanwhile are not counted."""
    files = kernels = size = 0
    for folder, _, names in os.walk(root):  # a folder that is gone counts as empty
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(folder, name)).st_size
                files += 1
                kernels += name.endswith(_KERNELS)
    return Usage(files, kernels, size)


def clear() -> Usage:
    """Remove everything in the cache directory; returns what was there. UntrustedError if it may be another user's."""
    before = usage()
    with suppress(FileNotFoundError):
        for entry in trust.directory(path()).iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    return before


def prune(most: int) -> Usage:
    """Remove the kernels that were not used for the longest time, until the files take at most `most` bytes, and what
    processes that were killed while writing have left. Returns what was removed. UntrustedError if a folder may be
    another user's; nothing is removed then.

    The files of a kernel, which differ in their suffix, are removed together. Each counts as whole blocks. A file that
    is removed while another process reads it is read to its end.
    """
    kernels: dict[tuple[Path, str], list[tuple[Path, int]]] = {}
    used: dict[tuple[Path, str], float] = {}
    leftovers = []
    for folder in FOLDERS:
        with suppress(FileNotFoundError):
            for entry in os.scandir(trust.directory(path() / folder)):
                with suppress(OSError):  # another process has removed it
                    status = entry.stat(follow_symlinks=False)
                    size, at = -(-status.st_size // _BLOCK) * _BLOCK, Path(entry.path)
                    if entry.name.endswith(".tmp"):
                        leftovers += [(at, size)] if status.st_mtime < time.time() - _RECENT else []
                    elif not entry.name.endswith(".lock"):
                        kernel = at.parent, entry.name.partition(".")[0]
                        kernels.setdefault(kernel, []).append((at, size))
                        used[kernel] = max(used.get(kernel, 0), status.st_mtime)
    total = sum(size for files in kernels.values() for _, size in files)
    for kernel in sorted(kernels, key=lambda kernel: used[kernel]):
        if total <= most:
            break
        leftovers += kernels[kernel]
        total -= sum(size for _, size in kernels[kernel])
    removed = []
    for file, size in leftovers:
        with suppress(OSError):
            file.unlink()
            removed.append((file, size))
    kernels_removed = sum(file.suffix in _KERNELS for file, _ in removed)
    return Usage(len(removed), kernels_removed, sum(size for _, size in removed))


def problem() -> OSError | ValueError | None:
    """Why kernels cannot be cached: a directory that cannot be used, or a wrong FLASHKIT_CACHE_SIZE; or None."""
    try:
        limit()
        for folder in FOLDERS:
            wanted = path() / folder
            with suppress(FileNotFoundError):
                trust.directory(wanted)
            for nearest in (wanted, *wanted.parents):
                with suppress(FileNotFoundError):
                    if not os.access(trust.resolve(nearest), os.W_OK):
                        raise PermissionError(f"{nearest} cannot be written")
                    break
    except (OSError, ValueError) as error:
        return error
    return None


# --- files of backends -----------------------------------------------------------------------------------------------

_memory: OrderedDict[tuple[str, str], bytes] = OrderedDict()
_lock = inner_lock()
_unpruned: dict[Path, int] = {}
"""Bytes that this process has written to a cache directory since it compared its size with the limit."""


def read(folder: str, name: str) -> bytes | None:
    """The content written under this name; None if it is missing, or another user could have written it."""
    with _lock:
        if (content := _memory.get((folder, name))) is not None:
            _memory.move_to_end((folder, name))
            return content
    try:
        file = path() / folder / name
        content = trust.read(file)
        _mark_used(file)
        return content
    except trust.UntrustedError as error:
        _warn(error)
    except OSError:
        pass
    return None


def write(folder: str, name: str, content: bytes) -> None:
    """Store it for all processes, or in the memory of this one. ValueError if FLASHKIT_CACHE_SIZE is no size."""
    most = limit()
    try:
        try:
            trust.write(trust.directory(path() / folder, make=True) / name, content)
        except FileNotFoundError:  # another process has removed the folder meanwhile
            trust.write(trust.directory(path() / folder, make=True) / name, content)
    except OSError as error:
        _warn(error)
        with _lock:
            _memory[folder, name] = content
            while sum(map(len, _memory.values())) > MAX_MEMORY and len(_memory) > 1:
                _memory.popitem(last=False)
        return
    with suppress(OSError):
        _prune_sometimes(path(), max(len(content), _BLOCK), most)


def _prune_sometimes(root: Path, written: int, most: int) -> None:
    """Prune after the first file and then whenever a sixteenth of the limit has been written."""
    with _lock:
        unpruned = _unpruned.get(root, most) + written
        prunes = unpruned * 16 > most
        _unpruned[root] = 0 if prunes else unpruned
    if prunes:
        prune(most)


def _mark_used(file: Path) -> None:
    """Record the use of a file in its modification time, since most file systems do not record the access time."""
    with suppress(OSError):  # a cache that this process cannot write
        if os.stat(file).st_mtime < time.time() - _RECENT:
            os.utime(file)


@contextmanager
def compile_lock(folder: str, name: str) -> Iterator[None]:
    """Lock this name while other processes would make it too. Names share few lock files, which cannot be removed."""
    lock: AbstractContextManager[None] = nullcontext()
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:2]) % _LOCKS
    with suppress(OSError):  # the directory cannot be used, so nothing is shared
        lock = trust.locked(trust.directory(path() / folder, make=True) / f"{number}.lock")
    with lock:
        yield


def _warn(error: OSError) -> None:
    problem = f"compiled kernels cannot be kept, so each process compiles them: {error}"
    warn_once(f"{problem}; set FLASHKIT_CACHE_DIR to another directory", f"cache {settings.CACHE_DIR.text()}")
