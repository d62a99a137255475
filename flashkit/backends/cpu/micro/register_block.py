"""The register block that micro-kernels are compiled for, and the LLVM module that holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir

from ....devices.io_model import CpuTile
from ....spec import DTYPES
from .vector import I64


@dataclass(frozen=True)
class RegisterBlock:
    """rows x vectors x lanes accumulators in registers, and how operands are stored."""

    element: str  # LLVM's name of the accumulators' dtype: "float" or "double"
    rows: int
    vectors: int
    lanes: int
    storage: str = ""  # how operands are stored if in fewer bits: "float16", "bfloat16", "e4m3" or "int8"
    bf16_pairs: str = ""  # the instructions that multiply bf16 pairs (bf16.py); "" where operands are widened

    @classmethod
    def of(cls, dtype: str, tile: CpuTile, bf16_pairs: str = "") -> RegisterBlock:
        """The register block of a tile, whose lanes are those of float32, for operands of a dtype."""
        accumulator = DTYPES[dtype].accumulator
        element, lanes = ("double", tile.lanes // 2) if accumulator == "float64" else ("float", tile.lanes)
        storage = "" if dtype == accumulator else dtype
        return cls(element, tile.rows, tile.vectors, lanes, storage, bf16_pairs)


class MicroModule(ir.Module):  # type: ignore[misc]
    """A module of micro-kernels for a CPU with these features, in LLVM's terms."""

    def __init__(self, name: str, triple: str, features: str) -> None:
        super().__init__(name)
        self.triple = triple
        self.avx512 = {"+avx512f", "+avx512dq"} <= set(features.split(","))
        self.avx512bf16 = self.avx512 and "+avx512bf16" in features.split(",")


def module(
    block: RegisterBlock, triple: str, features: str, kernels: dict[str, tuple[int, Callable[..., None]]]
) -> ir.Module:
    """Micro-kernels for a register block, as C functions of 64-bit integers."""
    result = MicroModule("flashkit_micro", triple, features)
    element = ir.FloatType() if block.element == "float" else ir.DoubleType()
    for name, (arguments, emit) in kernels.items():
        function = ir.Function(result, ir.FunctionType(ir.VoidType(), [I64] * arguments), name)
        function.attributes.add("nounwind")
        builder = ir.IRBuilder(function.append_basic_block("entry"))
        emit(builder, list(function.args), element, block)
        builder.ret_void()
    return result
