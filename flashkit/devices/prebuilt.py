"""The compiled kernels that a wheel carries: folders of backends below the package, which are only read.

A source checkout has none until `flashkit cache prebuild` makes them. A user who can change these files can change the
package's modules; trust.read_installed checks that no one else can. Backends check the content as they check that of
the kernel cache.
"""

from __future__ import annotations

from pathlib import Path

from .. import settings
from ..errors import warn_once
from . import trust
from .kernel_cache import Usage, files_below

PACKAGE = Path(__file__).parents[1]
FOLDER = "prebuilt"


def path() -> Path:
    """The folder of the prebuilt kernels, which may not exist."""
    return PACKAGE / FOLDER


def enabled() -> bool:
    """Whether prebuilt kernels are used: unless FLASHKIT_PREBUILT is 0. ValueError for a value that is none."""
    return settings.PREBUILT.read() is not False


def read(folder: str, name: str) -> bytes | None:
    """The content of a file; None if there is none, FLASHKIT_PREBUILT is 0, or, with a warning, it is not trusted."""
    try:
        return trust.read_installed(PACKAGE, FOLDER, folder, *name.split("/")) if enabled() else None
    except trust.UntrustedError as error:
        warn_once(f"prebuilt kernels are compiled again instead of used: {error}", "prebuilt kernels")
    except OSError:
        pass
    return None


def contents() -> dict[str, Usage]:
    """What the package carries, by backend folder and target, such as "cpu/x86-64-v4" or "cuda/sm_90a"."""
    targets = {file.parent for file in path().rglob("*") if file.is_file()}
    return {target.relative_to(path()).as_posix(): files_below(target) for target in sorted(targets)}
