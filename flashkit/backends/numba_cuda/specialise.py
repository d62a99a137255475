"""Kernels of a spec: a head of constants, generated functions and files of kernels/ as one module, compiled.

The first lines of a file of kernels/ name the files that it builds on, `# parts: ...`. All of them are one module, so
it uses their names directly, and those of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path

from ...spec import ITEMSIZE, AttentionSpec
from ..cuda_common import modification
from ..cuda_common.launch import Library, shared_library
from . import modify
from .compile import PythonSource

FOLDER = Path(__file__).parent / "kernels"


def source(name: str, spec: AttentionSpec, constants: Mapping[str, int]) -> PythonSource:
    """The text of kernels/<name>.py for a spec. `constants`: what the file needs beyond the constants of the spec."""
    return PythonSource(name.replace("/", "_"), text(name, spec, constants), modification.values_of(spec) or 1)


def text(name: str, spec: AttentionSpec, constants: Mapping[str, int]) -> str:
    """The module's text."""
    numbers = {
        **modification.constants_of(spec), "STORAGE": spec.dtype, "ITEMSIZE": ITEMSIZE[spec.dtype], **constants
    }
    double = spec.dtype == "float64"
    head = [
        "import math",
        "from collections import namedtuple",
        "import numpy as np",
        "from numba import cuda, types",
        "from numba.types import float32, int32, int64, uint16, uint32, uint64",
        f"from {__package__}.memory import *",
        f"from {__package__}.ptx import shared_address",
        f"from {__package__}.compile import kernel",
        f"F, F_TYPE, F_ITEMSIZE = np.{spec.lse_dtype}, types.{spec.lse_dtype}, {8 if double else 4}",
        "I, HIDDEN, INFINITE = np.int64, F(-np.inf), F(np.inf)",
        *(f"{name} = {value!r}" for name, value in numbers.items()),
    ]
    return "\n".join([*head, *map(_part, ("common/scalar",)), modify.text(spec), *map(_part, parts(name))])


def parts(name: str) -> list[str]:
    """The files of kernels/ that make up a kernel, in the order of their dependencies."""
    earlier: dict[str, None] = {}
    for line in takewhile(lambda line: line.startswith("# parts: "), _part(name).splitlines()):
        for other in line.removeprefix("# parts: ").split():
            earlier.update(dict.fromkeys(parts(other)))
    return [*earlier, name]


@cache
def _part(name: str) -> str:
    return (FOLDER / f"{name}.py").read_text()


def library(name: str, spec: AttentionSpec, constants: tuple[tuple[str, int], ...], arch: str) -> Library:
    """The kernels of kernels/<name>.py for a spec, compiled or from the cache, loaded."""
    key = __package__, name, spec, constants, arch
    return shared_library(key, lambda: source(name, spec, dict(constants)), arch)
