"""Compile micro-kernels: LLVM IR (vector.py) to an object file.

Numba is not involved, so a register block compiles in a fraction of a second. Kernels call micro-kernels by address, so
one kernel serves all register blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import binding

from ... import elf
from .. import objects, target
from ..objects import Functions, Object, Source
from ..target import Target
from . import bf16_pairs, gemm, gemv, softmax, transpose
from .register_block import RegisterBlock, module

KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "gemm": (10, partial(gemm.emit_gemm, accumulate=False)),
    "gemm_add": (10, partial(gemm.emit_gemm, accumulate=True)),
    "online_softmax": (9, softmax.emit_online_softmax),
    "online_softmax_stats": (11, softmax.emit_online_softmax),
    "pack_transposed": (7, transpose.emit_pack_transposed),
    "unpack_transposed": (8, transpose.emit_unpack_transposed),
    "softmax_backward": (8, softmax.emit_softmax_backward),
    **{f"transpose{size}": (6, partial(transpose.emit_transpose, size=size)) for size in (1, 4, 8)},
}
"""Name: number of arguments, emitter."""


def kernels(block: RegisterBlock, gemv_kernels: bool = False) -> dict[str, tuple[int, Any]]:
    """Name: number of arguments, emitter. gemv_kernels: those for few queries, with register blocks of their own."""
    if gemv_kernels:
        return gemv.KERNELS
    return KERNELS | (bf16_pairs.kernels(block.bf16_pairs) if block.bf16_pairs else {})


def assemble(block: RegisterBlock, wanted: Target, gemv_kernels: bool = False) -> tuple[Any, Any]:
    """The optimised LLVM module and the target machine that emits it, for any CPU that LLVM was built for."""
    text = str(module(block, wanted.triple, wanted.features, kernels(block, gemv_kernels)))
    if wanted.tune:  # llvmlite has no such attribute
        text = text.replace(") nounwind\n", f') nounwind "tune-cpu"="{wanted.tune}"\n')
    compiled, machine = binding.parse_assembly(text), target.machine(wanted)
    compiled.verify()
    target.optimise(compiled, machine, vectorise=False)  # the IR is unrolled and vectorised already
    return compiled, machine


def addresses(block: RegisterBlock, gemv_kernels: bool = False) -> Functions:
    """Address of each micro-kernel for the register block on this machine."""
    return objects.kept(source, block, gemv_kernels)


def source(block: RegisterBlock, gemv_kernels: bool = False) -> Source:
    """The micro-kernels for a register block."""
    kind = "micro_gemv" if gemv_kernels else "micro"
    return Source(kind, str(block), lambda wanted: _object(block, wanted, gemv_kernels), block.bf16_pairs)


def _object(block: RegisterBlock, wanted: Target, gemv_kernels: bool) -> Object:
    compiled, machine = assemble(block, wanted, gemv_kernels)
    code = machine.emit_object(compiled)
    return Object(code, tuple(kernels(block, gemv_kernels)), tuple(sorted(elf.undefined(code))))
