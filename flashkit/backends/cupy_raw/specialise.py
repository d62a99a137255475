"""Kernels of a spec: a head of constants, generated functions and a file of kernels/, compiled and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...spec import AttentionSpec
from ..cuda_common import arguments, compiler, modification, params
from ..cuda_common.launch import Library, shared_library
from . import modify

FOLDER = Path(__file__).parent / "kernels"


def source(name: str, spec: AttentionSpec, constants: Mapping[str, int], functions: str = "") -> compiler.Source:
    """The text of kernels/<name>.cu for a spec, after `functions`. `constants`: beyond those of the spec."""
    numbers = {
        **modification.constants_of(spec), **{f"TANGENT_{name}": name.lower() in spec.jvp for name in "QKV"},
        "ORDERED_SUMS": spec.orders_sums, "VALUES": modification.values_of(spec),
        "PARAMS_WORDS": arguments.size(spec), "FAST_MATH": False, **constants,
    }  # fmt: skip
    lines = [f"constexpr {'bool' if isinstance(x, bool) else 'int'} {n} = {int(x)};" for n, x in numbers.items()]
    text = [
        *lines,
        f'#include "{params.HEADER}"',
        '#include "common/params.cuh"',
        f"constexpr int STORAGE = {spec.dtype.upper()};",
        '#include "common/scalar.cuh"',
        '#include "common/values.cuh"',
        modify.text(spec),
        '#include "common/tiles.cuh"',
        functions,
        f'#include "{name}.cu"',
    ]
    headers = (*compiler.headers(FOLDER), (params.HEADER, params.cuda_header()))
    return compiler.Source(name.replace("/", "_"), "\n".join(text) + "\n", headers)


def library(
    name: str, spec: AttentionSpec, constants: tuple[tuple[str, int], ...], arch: str, functions: str = ""
) -> Library:
    """The loaded kernels of kernels/<name>.cu for a spec, compiled or from the cache."""
    key = __package__, name, spec, constants, arch, functions
    return shared_library(key, lambda: source(name, spec, dict(constants), functions), arch)
