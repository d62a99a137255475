"""Which files are trusted, and how they are read without a race: other users could have planted them.

A file is trusted if only this user and root can have written it: every component of its path, and the file itself,
belongs to one of them and is not writable by group or others. In a sticky directory such as /tmp all users may create
entries but cannot replace those of others, so there the owner of the next component decides. Symbolic links of this
user and of root are followed, and their targets are checked in the same way.

No other user can then change the path between check and use. The file is opened once, not through a link, the
descriptor is checked again, and the content comes from this descriptor. On systems without owners (Windows), owners and
modes are not checked.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

_LINKS = 40  # as many as Linux follows
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_SAFE = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_NOCTTY", "O_BINARY"))


class UntrustedError(OSError):
    """Another user could have written the file. The message names the component, the reason and the remedy."""


def resolve(path: str | os.PathLike[str], make: bool = False) -> str:
    """The absolute real path. UntrustedError if others could have written it; OSError; make: create directories."""
    path = os.fspath(path)
    if not os.path.isabs(path):
        raise UntrustedError(f"path: expected an absolute path, got {path}")
    if not hasattr(os, "geteuid"):
        if make:
            os.makedirs(path, mode=0o700, exist_ok=True)
        return os.path.realpath(path, strict=True)
    resolved, left, links = "/", path.split("/")[::-1], 0
    sticky = _check(resolved, os.lstat(resolved))
    while left:
        name = left.pop()
        if name == "..":
            resolved = os.path.dirname(resolved)
            sticky = _check(resolved, os.lstat(resolved))
        elif name not in ("", "."):
            entry = os.path.join(resolved, name)
            status = _made(entry) if make else os.lstat(entry)
            if not stat.S_ISLNK(status.st_mode):
                if left and not stat.S_ISDIR(status.st_mode):
                    raise NotADirectoryError(f"{entry} is not a directory")
                resolved, sticky = entry, _check(entry, status)
                continue
            _check_owner(entry, status)
            links += 1
            if links > _LINKS or (sticky and status.st_nlink > 1):
                raise UntrustedError(f"{entry} is a symbolic link that leads nowhere or was linked here: remove it")
            target = os.readlink(entry)
            left += target.split("/")[::-1]
            if target.startswith("/"):
                resolved, sticky = "/", _check("/", os.lstat("/"))
    return resolved


def directory(path: str | os.PathLike[str], make: bool = False) -> Path:
    """The real path of a directory in which only this user and root can create files. Errors of `resolve`."""
    resolved = resolve(path, make)
    mode = os.lstat(resolved).st_mode
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(f"{resolved} is not a directory")
    if hasattr(os, "geteuid") and mode & _OTHERS:  # sticky: others can still put files there first
        remedy = f"chmod go-w {resolved}, or choose a folder in it"
        raise UntrustedError(f"{resolved} can be written by other users: {remedy}")
    return Path(resolved)


def of_user(kind: Literal["cache", "data"]) -> Path:
    """The directory of this user's files of flashkit. UntrustedError without a home directory."""
    import platformdirs

    try:
        folder = getattr(platformdirs, f"user_{kind}_dir")("flashkit", appauthor=False)
    except RuntimeError as error:
        raise UntrustedError(f"there is no home directory: {error}") from None
    if not os.path.isabs(folder):
        raise UntrustedError(f"there is no home directory: {folder} is not an absolute path")
    return Path(folder)


def read(path: str | os.PathLike[str], max_bytes: int | None = None) -> bytes:
    """The content of a trusted regular file of at most `max_bytes`. UntrustedError, or the OSError of opening it."""
    resolved = resolve(path)

    def check(status: os.stat_result) -> None:
        if hasattr(os, "geteuid"):
            _check(resolved, status)
            if status.st_nlink > 1:  # 0: replaced meanwhile
                raise UntrustedError(f"{resolved} is one of {status.st_nlink} hard links of a file: remove it")

    return _content(resolved, _SAFE, check, max_bytes)


def read_installed(folder: str | os.PathLike[str], *below: str) -> bytes:
    """The content of the file `below` a folder of modules that this process runs. UntrustedError, or the OSError of
    opening it.

    Who can write the folder can have the process run any code, so the file is trusted if no one else can have written
    it: it and the folders between belong to this user, to root or to the owner of the folder, and no group or others
    can write them that cannot write the folder. It may be a hard link, by which installers share files.
    """
    path, top = os.fspath(folder), os.stat(folder)
    writers = 0 if top.st_mode & stat.S_ISVTX else top.st_mode & _OTHERS

    def check(status: os.stat_result) -> None:
        users = getattr(status, "st_uid", 0), getattr(status, "st_gid", 0)
        allowed = writers if users[1] == top.st_gid else writers & ~stat.S_IWGRP
        if hasattr(os, "geteuid") and (
            users[0] not in (0, os.geteuid(), top.st_uid) or status.st_mode & _OTHERS & ~allowed
        ):
            raise UntrustedError(f"{path} can be written by users that cannot write {folder}: install flashkit again")

    for name in below[:-1]:
        path = os.path.join(path, name)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{path} is not a directory")
        check(status)
    path = os.path.join(path, below[-1])
    return _content(path, _SAFE, check)


def read_any(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The content of a regular file of any owner, which the user has named. OSError if it is larger or not regular."""
    return _content(os.fspath(path), _SAFE & ~getattr(os, "O_NOFOLLOW", 0), lambda status: None, max_bytes)


def write(file: Path, content: bytes, durable: bool = False) -> None:
    """Create or replace the file atomically, for this user alone. durable: it survives a power failure."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name[:100]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as target:
            target.write(content)
            if durable:
                target.flush()
                os.fsync(target.fileno())
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def append(file: Path, content: bytes) -> None:
    """Append to a file, created for this user alone if it does not exist; not through a symbolic link."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _SAFE, 0o600), "wb") as target:
        target.write(content)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of this file; after a minute, or without locks, go on without it, and work is done twice."""
    from filelock import FileLock

    lock = FileLock(file, mode=0o600)
    with suppress(OSError, RuntimeError):  # Timeout is an OSError, NotImplementedError a RuntimeError
        lock.acquire(timeout=60)
    try:
        yield
    finally:
        with suppress(OSError):
            lock.release()


def _made(entry: str) -> os.stat_result:
    try:
        return os.lstat(entry)
    except FileNotFoundError:
        with suppress(FileExistsError):  # another process created it meanwhile
            os.mkdir(entry, 0o700)
        return os.lstat(entry)


def _check(path: str, status: os.stat_result) -> bool:
    """UntrustedError if others own or can write the path. Returns whether it is a sticky directory for all."""
    _check_owner(path, status)
    if not stat.S_ISDIR(status.st_mode) and not stat.S_ISREG(status.st_mode):
        raise UntrustedError(f"{path} is not a regular file")
    if not status.st_mode & _OTHERS:
        return False
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        return True
    group = "" if status.st_mode & stat.S_IWOTH else "its group, "
    raise UntrustedError(f"{path} can be written by {group}other users: chmod go-w {path}")


def _check_owner(path: str, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        users = f"user {status.st_uid}, not to this user ({os.geteuid()})"
        raise UntrustedError(f"{path} belongs to {users}: use a path of your own")


def _content(path: str, flags: int, check: Callable[[os.stat_result], object], max_bytes: int | None = None) -> bytes:
    """The content of a regular file, checked and read by one descriptor."""
    try:
        with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UntrustedError(f"{path} is not a regular file")
            check(status)
            content = file.read(-1 if max_bytes is None else max_bytes + 1)
    except OSError as error:
        if error.errno is None or error.filename == path:
            raise
        raise OSError(error.errno, error.strerror, path) from None  # reading names no file
    if max_bytes is not None and len(content) > max_bytes:
        raise UntrustedError(f"{path} has more than {max_bytes} bytes: remove it")
    return content
