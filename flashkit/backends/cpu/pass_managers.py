"""Free LLVM's pass managers and share their builders, of which compiling one function with Numba makes ten each.

llvmlite's classes inherit the empty `_dispose` of ObjectRef before that of NewPassManager, so pass managers are never
freed: a fifth of a megabyte for each modification. Builders are, but not the callbacks that each of them allocates:
18 kB for each modification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import binding


@contextmanager
def freed() -> Iterator[None]:
    """Free the pass managers released in this block, and share builders. One thread at a time may be in it."""
    base: Any = getattr(getattr(binding, "newpassmanagers", None), "NewPassManager", None)
    leaking = []
    if base is not None:
        leaking = [kind for kind in base.__subclasses__() if kind._dispose is binding.ffi.ObjectRef._dispose]
    for kind in leaking:
        kind._dispose = base._dispose
    create = binding.create_pass_builder
    binding.create_pass_builder = _shared(create)
    try:
        yield
    finally:
        binding.create_pass_builder = create
        for kind in leaking:
            del kind._dispose


def _shared(create: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def builder(machine: Any, options: Any) -> Any:
        builders = vars(machine).setdefault("flashkit_builders", {})  # they end with the machine
        names = [name for name, value in vars(type(options)).items() if isinstance(value, property)]
        key = tuple([getattr(options, name) for name in names])
        if key not in builders or getattr(builders[key], "_time_passes_handler", None):  # which a builder takes once
            builders[key] = create(machine, options)
        return builders[key]

    return builder
