"""Matrix products of a warp (mma.sync, Ampere) and of a warp group (wgmma, Hopper).

mma.sync multiplies 16 x 16 by 16 x 8 elements; wgmma, which is asynchronous, 64 x 16 by 16 x n. Both accumulate in
registers of a lane: with g = lane / 4, t = lane % 4, element 4 i + 2 half + c of the tuple

    row 16 * (warp of the group) + g + 8 half,  column 8 i + 2 t + c

and two neighbours, packed, are an A operand of the next product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from numba.cuda.extending import intrinsic
from numba.cuda.types import UniTuple, float32, int32, uint32

from ....spec import DTYPES
from .asm import CONSTANT, NOTHING, _emit, instruction, parts

__all__ = [
    "fence_operand", "ldmatrix_x4", "ldmatrix_x4_trans", "mma", "stmatrix_x4", "stmatrix_x4_trans", "wgmma",
    "wgmma_commit", "wgmma_fence", "wgmma_registers", "wgmma_wait",
]  # fmt: skip

# --- ldmatrix, stmatrix: shared memory and registers ------------------------------------------------------------------

FOUR = UniTuple(uint32, 4)
ldmatrix_x4 = instruction("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", FOUR, uint32)
"""ldmatrix_x4(address): four matrices of 8 rows x 16 bytes; lane i passes the address of row i % 8 of matrix i / 8"""
ldmatrix_x4_trans = instruction("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", FOUR, uint32)
stmatrix_x4 = instruction(
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", NOTHING, uint32, uint32, uint32, uint32, uint32
)
"""stmatrix_x4(address, a, b, c, d): the inverse (Hopper)"""
stmatrix_x4_trans = instruction(
    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
    NOTHING, uint32, uint32, uint32, uint32, uint32,
)  # fmt: skip

# --- of a warp --------------------------------------------------------------------------------------------------------


@lru_cache
def mma(dtype: str) -> Any:
    """mma(dtype)(c, a, b0, b1): c + a b; c: four float32, a: four registers."""
    kind = DTYPES[dtype].mma
    return instruction(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$0, $1, $2, $3};",
        UniTuple(float32, 4), UniTuple(float32, 4), FOUR, uint32, uint32, tied=True,
    )  # fmt: skip


# --- of a warp group --------------------------------------------------------------------------------------------------

wgmma_fence = instruction("wgmma.fence.sync.aligned;", NOTHING)
wgmma_commit = instruction("wgmma.commit_group.sync.aligned;", NOTHING)
wgmma_wait = instruction("wgmma.wait_group.sync.aligned #0;", NOTHING, CONSTANT)
"""wgmma_wait(n): until all but the last n committed groups are complete"""


@lru_cache
def wgmma(
    dtype: str, n: int, a_steps: tuple[int, ...], b_steps: tuple[int, ...], *, trans_a: bool = False,
    trans_b: bool = False, fresh: bool = False,
) -> Any:  # fmt: skip
    """product(sums, a, b, add): sums, if add, plus a b, 64 x n; both operands in shared memory, by descriptors.

    a_steps, b_steps: how far the descriptors move on for each 16 along the summed axis. trans: an operand is read
    along columns. fresh: product(a, b), whatever was in the registers."""
    tile, head = _tile(n), _head(dtype, n)
    a, b, p = (f"${(1 if fresh else 2) * tile.count + i}" for i in range(3))
    lines = [f"{{ .reg .pred p; {_REGISTERS} setp.ne.b32 p, {'0, 0' if fresh else f'{p}, 0'};"]
    for i, (a_step, b_step) in enumerate(zip(a_steps, b_steps, strict=True)):
        lines.append(_moved("a", a, a_step) + _moved("b", b, b_step))
        lines.append(f"{head}, a, b, {'p' if i == 0 else 1}, 1, 1, {int(trans_a)}, {int(trans_b)};")
    text = "\n".join([*lines, "}"])
    if fresh:
        return instruction(text, tile, uint32, uint32)
    return instruction(text, tile, tile, uint32, uint32, int32, tied=True)


@lru_cache
def wgmma_registers(dtype: str, n: int, b_steps: tuple[int, ...], *, trans_b: bool = False) -> Any:
    """product(sums, a, b, add): the same with the left operand in registers, four for each step."""
    tile, left = _tile(n), UniTuple(uint32, 4 * len(b_steps))
    start, head = 2 * tile.count, _head(dtype, n)
    lines = [f"{{ .reg .pred p; {_REGISTERS} setp.ne.b32 p, ${start + left.count + 1}, 0;"]
    for i, b_step in enumerate(b_steps):
        operand = ", ".join(f"${start + 4 * i + j}" for j in range(4))
        lines.append(_moved("b", f"${start + left.count}", b_step))
        lines.append(f"{head}, {{{operand}}}, b, {'p' if i == 0 else 1}, 1, 1, {int(trans_b)};")
    return instruction("\n".join([*lines, "}"]), tile, tile, left, uint32, int32, tied=True)


# A descriptor's upper half is the same for all: eight rows every 1024 bytes and the swizzle of 128 bytes.
_REGISTERS = ".reg .b64 a, b; .reg .b32 low, high; mov.b32 high, 0x40000040;"


def _moved(name: str, low: str, step: int) -> str:
    return f"add.u32 low, {low}, {step}; mov.b64 {name}, {{low, high}};"


def _tile(n: int) -> Any:
    if n % 8 or not 8 <= n <= 256:
        raise ValueError(f"a product has 8 to 256 columns, a multiple of 8, not {n=}")
    return UniTuple(float32, n // 2)


def _head(dtype: str, n: int) -> str:
    kind = DTYPES[dtype].mma
    sums = ", ".join(f"${i}" for i in range(n // 2))
    return f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {{{sums}}}"


@intrinsic
def fence_operand(typing: Any, registers: Any) -> Any:
    """fence_operand(x): x, after a wait; the compiler may not use these registers before it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        operands = [(part, registers.dtype) for part in parts(builder, arguments[0], registers)]
        return _emit(context, builder, "", registers, operands, False, True)

    return (registers(registers), generate) if isinstance(registers, UniTuple) else None
