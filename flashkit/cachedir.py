"""Where compiled kernels are kept between processes.

One directory for every backend; each takes a folder of its own in it. `flashkit cache path` prints it and
`flashkit cache clear` empties it. Deleting it is always safe: the next call compiles again.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
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
    """What lies in the cache: `kernels` compiled functions (Numba's .nbc, CUDA's .cubin) among `files`, in `bytes`."""

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
        kernels += entry.suffix in {".nbc", ".cubin"}
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
