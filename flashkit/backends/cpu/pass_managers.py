"""Free LLVM's pass managers, of which compiling one function with Numba makes ten.

llvmlite's classes inherit the empty `_dispose` of ObjectRef before that of NewPassManager, so pass managers are never
freed: a fifth of a megabyte for each modification.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding


@contextmanager
def freed() -> Iterator[None]:
    """Free the pass managers that are released in this block. One thread at a time may be in it."""
    base: Any = getattr(getattr(binding, "newpassmanagers", None), "NewPassManager", None)
    leaking = []
    if base is not None:
        leaking = [kind for kind in base.__subclasses__() if kind._dispose is binding.ffi.ObjectRef._dispose]
    for kind in leaking:
        kind._dispose = base._dispose
    try:
        yield
    finally:
        for kind in leaking:
            del kind._dispose
