"""Compile micro-kernels for this machine: LLVM IR (vector.py) to an object file in the cache directory.

Numba is not involved, so a register block compiles in a fraction of a second. Kernels call micro-kernels by address, so
one kernel serves all register blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import binding

from .. import objects
from ..objects import Functions, Object, machine
from . import bf16_pairs, gemm, gemv, softmax, transpose
from .register_block import RegisterBlock, module

KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "gemm": (10, partial(gemm.emit_gemm, accumulate=False)),
    "gemm_add": (10, partial(gemm.emit_gemm, accumulate=True)),
    "column_max": (5, softmax.emit_column_max),
    "exp_sum": (6, softmax.emit_exp_sum),
    "pack_transposed": (7, transpose.emit_pack_transposed),
    "unpack_transposed": (8, transpose.emit_unpack_transposed),
    "softmax_backward": (8, softmax.emit_softmax_backward),
    **{f"transpose{size}": (6, partial(transpose.emit_transpose, size=size)) for size in (1, 4, 8)},
}
"""Name: number of arguments, emitter."""


def kernels(block: RegisterBlock, gemv_kernels: bool = False) -> dict[str, tuple[int, Any]]:
    """Name: number of arguments, emitter, of the micro-kernels for a register block.

    gemv_kernels: those for few queries (gemv.py), which choose their own register blocks.
    """
    if gemv_kernels:
        return gemv.KERNELS
    return KERNELS | (bf16_pairs.kernels(block.bf16_pairs) if block.bf16_pairs else {})


def assemble(block: RegisterBlock, triple: str, cpu: str, features: str, gemv_kernels: bool = False) -> tuple[Any, Any]:
    """The optimised LLVM module and the target machine that emits it, for any CPU that LLVM was built for."""
    target = binding.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault"
    )
    compiled = binding.parse_assembly(str(module(block, triple, features, kernels(block, gemv_kernels))))
    compiled.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    # The IR is unrolled and vectorised already.
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(target, options)
    builder.getModulePassManager().run(compiled, builder)
    return compiled, target


@cache
def addresses(block: RegisterBlock, gemv_kernels: bool = False) -> Functions:
    """Address of each micro-kernel for the register block on this machine."""
    kind = "micro_gemv" if gemv_kernels else "micro"
    return objects.functions(kind, str(block), lambda: _object(block, gemv_kernels))


def _object(block: RegisterBlock, gemv_kernels: bool) -> Object:
    compiled, target = assemble(block, *machine(), gemv_kernels)
    return Object(target.emit_object(compiled), tuple(kernels(block, gemv_kernels)))
