"""Micro-kernels compiled for this machine: LLVM IR (vector.py) to an object file, kept in the cache directory.

Numba is not involved, so a register block costs a fraction of a second, and the kernels, which call micro-kernels
by address, are compiled once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from llvmlite import binding

from .. import objects
from ..objects import Object, machine
from . import bf16_pairs, gemv, product, softmax, transposes, vector
from .vector import Block

KERNELS: dict[str, tuple[int, Callable[..., None]]] = {
    "product": (10, partial(product.emit_product, accumulate=False)),
    "product_add": (10, partial(product.emit_product, accumulate=True)),
    "column_max": (5, softmax.emit_column_max),
    "exponentials": (6, softmax.emit_exponentials),
    "pack": (7, transposes.emit_pack),
    "unpack": (8, transposes.emit_unpack),
    "weights": (8, softmax.emit_weights),
    **{f"transpose{size}": (6, partial(transposes.emit_transpose, size=size)) for size in (1, 4, 8)},
}
"""Name: number of arguments, emitter."""


def kernels(block: Block, few: bool = False) -> dict[str, tuple[int, Any]]:
    """Name: number of arguments, emitter, of the micro-kernels that are made for a register block. few: those for few
    rows (gemv.py), which choose their own blocks.
    """
    return gemv.KERNELS if few else KERNELS | (bf16_pairs.kernels(block.pairs) if block.pairs else {})


def assemble(block: Block, triple: str, cpu: str, features: str, few: bool = False) -> tuple[Any, Any]:
    """The optimised LLVM module and the target machine that emits it, for any CPU that LLVM was built for."""
    target = binding.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault"
    )
    module = binding.parse_assembly(str(vector.module(block, triple, features, kernels(block, few))))
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    # The loops are written as they are meant to run; LLVM's unrolling of them gains nothing and takes seconds.
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    return module, target


@cache
def addresses(block: Block, few: bool = False) -> dict[str, int]:
    """Address of each micro-kernel for the register block on this machine."""
    return objects.functions("micro_few" if few else "micro", str(block), lambda: _object(block, few))


def _object(block: Block, few: bool) -> Object:
    module, target = assemble(block, *machine(), few)
    return Object(target.emit_object(module), tuple(kernels(block, few)))
