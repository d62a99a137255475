"""Addresses of a kernel's tensor maps and of its dynamic shared memory."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .asm import instruction

__all__ = ["as_float", "as_int", "map_address", "shared_address"]

as_float = instruction("mov.b32 $0, $1;", types.float32, types.int32, pure=True)
"""The float32 with these bits."""
as_int = instruction("mov.b32 $0, $1;", types.int32, types.float32, pure=True)


@intrinsic
def map_address(typing: Any, name: Any) -> Any:
    """map_address("map_k"): of a tensor map, which is a parameter of the kernel (compile.py)."""
    if not isinstance(name, types.StringLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long = ir.IntType(64)
        text = f"{{ .reg .b64 a; mov.b64 a, {name.literal_value}; cvta.param.u64 $0, a; }}"
        assembly = ir.InlineAsm(ir.FunctionType(long, []), text, "=l", side_effect=False)
        return builder.call(assembly, [], attrs=("nounwind", "readnone"))

    return types.uint64(name), generate


@intrinsic
def shared_address(typing: Any) -> Any:
    """Address of the CTA's dynamic shared memory, aligned to 1024 bytes as the 128-byte swizzle requires."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        name = "flashkit_shared"
        memory = builder.module.globals.get(name)
        if memory is None:
            memory = ir.GlobalVariable(builder.module, ir.ArrayType(ir.IntType(8), 0), name, 3)
            memory.linkage, memory.align = "external", 1024
        return builder.ptrtoint(memory, ir.IntType(32))

    return types.uint32(), generate
