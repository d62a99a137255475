"""PTX instructions as functions of Numba kernels: scalars and lanes, addresses, barriers, copies, matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba.cuda.extending import intrinsic
from numba.cuda.types import StringLiteral, UniTuple, boolean, float32, int32, int64, uint16, uint32, uint64

from ....spec import DTYPES
from .asm import CONSTANT, NOTHING, _emit, instruction, parts

__all__ = [
    "across", "add_bulk_once", "all_lanes", "any_lane", "as_float", "as_int", "block", "blocks", "bulk_commit",
    "bulk_wait", "bulk_wait_read", "clock", "count_if", "cp_async_commit", "cp_async_if", "cp_async_wait", "elect_one",
    "exp2_fast", "fence_mbarrier_init", "fence_operand", "fence_proxy_async", "fetch_add", "fma", "from_lane",
    "from_lane_float", "greater", "griddepcontrol_wait", "lanes_sync", "ldmatrix_x4", "ldmatrix_x4_trans", "load_bulk",
    "load_f32", "load_two", "load_vec", "load_word", "log2_fast", "lowest_set_bit", "map_address",
    "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_arrive_once", "mbarrier_init", "mbarrier_try_wait",
    "mbarrier_wait_spin", "mma", "named_barrier_arrive", "named_barrier_sync", "nap", "ones", "opaque", "or_lanes",
    "pack_bfloat16", "pack_float16", "reciprocal", "red_add", "red_add_four",
    "setmaxnreg_dec", "setmaxnreg_inc", "shared_address", "stmatrix_x4", "stmatrix_x4_trans", "store_four",
    "store_half", "store_vec", "store_word", "store_zeros", "thread", "threads_sync", "times_rounded", "tma_load",
    "tma_store", "vote", "wgmma", "wgmma_commit", "wgmma_fence", "wgmma_registers", "wgmma_wait",
]  # fmt: skip

FOUR = UniTuple(uint32, 4)

# --- approximations, conversions, memory accesses by address ----------------------------------------------------------

exp2_fast = instruction("ex2.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
"""2^x; subnormal results are flushed to 0."""

log2_fast = instruction("lg2.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
greater = instruction("max.f32 $0, $1, $2;", float32, float32, float32, pure=True)
"""The maximum. If one operand is NaN, the other one."""

times_rounded = instruction("mul.rn.f32 $0, $1, $2;", float32, float32, float32, pure=True)
"""x * y, which the compiler does not fuse with a sum."""
fma = instruction("fma.rn.f32 $0, $1, $2, $3;", float32, float32, float32, float32, pure=True)
"""x * y + z, rounded once."""

pack_float16 = instruction("cvt.rn.f16x2.f32 $0, $2, $1;", uint32, float32, float32, pure=True)
"""pack(low, high): two float32 values rounded to 16-bit elements of one word."""
pack_bfloat16 = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", uint32, float32, float32, pure=True)

opaque = instruction("{ .reg .b32 l; mov.u32 l, %laneid; shfl.sync.idx.b32 $0, $1, l, 31, -1; }", int32, int32)
"""The number itself, by an instruction that the compiler cannot move. In code that rarely runs it keeps the compiler
from hoisting address computations into the main loop."""


fetch_add = instruction("atom.global.add.u32 $0, [$1], $2;", uint32, uint64, uint32)
"""fetch_add(address, n): atomic addition to a word of global memory; returns the old value."""
count_if = instruction(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p atom.global.inc.u32 $0, [$1], 0x7fffffff; }",
    int32, uint64, int32,
)  # fmt: skip
"""count_if(address, condition): counts a word of global memory up where the condition holds; returns its old value, 0
elsewhere. ptxas combines what a warp adds, and so waits for the result at once; it does not combine this."""

_ADD = "red.relaxed.gpu.global.add"
red_add = instruction(f"{_ADD}.f32 [$0], $1;", NOTHING, uint64, float32)
"""red_add(address, x): atomic addition to a float32 in global memory."""
red_add_four = instruction(f"{_ADD}.v4.f32 [$0], {{$1, $2, $3, $4}};", NOTHING, uint64, UniTuple(float32, 4))
"""red_add_four(address, four): the same for four consecutive values (Hopper)."""
"""Relaxed load of a word that other CTAs change."""

# --- lanes ------------------------------------------------------------------------------------------------------------

thread = instruction("mov.u32 $0, %tid.x;", uint32, pure=True)
block = instruction("mov.u32 $0, %ctaid.x;", uint32, pure=True)
blocks = instruction("mov.u32 $0, %nctaid.x;", uint32, pure=True)
clock = instruction("mov.u64 $0, %clock64;", int64)

from_lane = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", int32, int32, int32)
"""from_lane(x, lane): the value of x in another lane."""
from_lane_float = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", float32, float32, int32)
across = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", float32, float32, int32)
"""across(x, step): the value of x in lane ^ step."""

vote = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }", uint32, boolean
)  # fmt: skip
"""vote(x): bit mask of the lanes where x is true."""
all_lanes = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.all.pred p, p, -1; selp.b32 $0, 1, 0, p; }", boolean, boolean
)
any_lane = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, -1; selp.b32 $0, 1, 0, p; }", boolean, boolean
)
or_lanes = instruction("redux.sync.or.b32 $0, $1, -1;", uint32, uint32)
elect_one = instruction("{ .reg .pred p; elect.sync _|p, -1; selp.b32 $0, 1, 0, p; }", boolean)
"""True in one lane of the warp."""
ones = instruction("popc.b32 $0, $1;", int32, uint32, pure=True)
lowest_set_bit = instruction("{ .reg .b32 r; brev.b32 r, $1; bfind.shiftamt.u32 $0, r; }", int32, uint32, pure=True)
"""Index of the lowest bit that is set."""
lanes_sync = instruction("bar.warp.sync -1;", NOTHING)

# --- addresses of tensor maps and of dynamic shared memory ------------------------------------------------------------

as_float = instruction("mov.b32 $0, $1;", float32, int32, pure=True)
"""The float32 with these bits."""
as_int = instruction("mov.b32 $0, $1;", int32, float32, pure=True)


@intrinsic
def map_address(typing: Any, name: Any) -> Any:
    """map_address("map_k"): of a tensor map, which is a parameter of the kernel (compile.py)."""
    if not isinstance(name, StringLiteral):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long = ir.IntType(64)
        text = f"{{ .reg .b64 a; mov.b64 a, {name.literal_value}; cvta.param.u64 $0, a; }}"
        assembly = ir.InlineAsm(ir.FunctionType(long, []), text, "=l", side_effect=False)
        return builder.call(assembly, [], attrs=("nounwind", "readnone"))

    return uint64(name), generate


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

    return uint32(), generate


# --- barriers ---------------------------------------------------------------------------------------------------------
#
# mbarriers in shared memory count arrivals and transaction bytes. The phase of one ends when all arrivals and all
# expected bytes have come. The first phase has parity 0; a wait for parity 1 on a new barrier returns at once.

mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", NOTHING, uint32, int32)
"""mbarrier_init(barrier, arrivals)"""

fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;", NOTHING)
"""Makes new barriers visible to TMA."""

mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", NOTHING, uint32)

mbarrier_arrive_once = instruction(
    "{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", NOTHING, uint32
)
"""mbarrier_arrive() by one lane of a warp. After a branch instead, ptxas would not keep values in uniform registers."""

mbarrier_arrive_expect_tx = instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", NOTHING, uint32, int32
)
"""mbarrier_arrive_expect_tx(barrier, bytes): arrives, and expects the bytes of a copy."""

mbarrier_try_wait = instruction(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }",
    boolean, uint32, uint32,
)  # fmt: skip
"""mbarrier_try_wait(barrier, parity), after waiting for a while"""

mbarrier_wait_spin = instruction(
    "{ .reg .pred p;\n"
    "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    "@p bra DONE;\n"
    "bra AGAIN;\n"
    "DONE: }", NOTHING, uint32, uint32,
)  # fmt: skip
"""mbarrier_wait_spin(barrier, parity): for the end of a phase"""

nap = instruction("nanosleep.u32 $0;", NOTHING, uint32)
"""nap(nanoseconds): frees the issue slots for other warps"""

threads_sync = instruction("bar.sync 0;", NOTHING)
"""For all threads of the CTA."""

named_barrier_sync = instruction("bar.sync $0, #0;", NOTHING, int32, CONSTANT)
"""named_barrier_sync(number, threads): barrier `number` of this many threads"""

named_barrier_arrive = instruction("bar.arrive $0, #0;", NOTHING, int32, CONSTANT)
"""Arrives at a named barrier without waiting."""

fence_proxy_async = instruction("fence.proxy.async.shared::cta;", NOTHING)
"""Makes this thread's writes to shared memory visible to TMA and wgmma."""

griddepcontrol_wait = instruction("griddepcontrol.wait; griddepcontrol.launch_dependents;", NOTHING)
"""Programmatic dependent launch (launch.py): waits for the end of the predecessor, and lets the successor start."""

setmaxnreg_dec = instruction("setmaxnreg.dec.sync.aligned.u32 #0;", NOTHING, CONSTANT)
"""setmaxnreg_dec(n): releases registers down to n a thread."""
setmaxnreg_inc = instruction("setmaxnreg.inc.sync.aligned.u32 #0;", NOTHING, CONSTANT)
"""setmaxnreg_inc(n): waits for registers up to n a thread."""

# --- copies between global and shared memory: cp.async of 16 bytes (Ampere), TMA and bulk copies (Hopper) -------------

cp_async_if = instruction(
    "{ .reg .pred p, q; setp.ne.s32 q, $4, 0; setp.le.s32 p, $3, $2; "
    "@q cp.async.cg.shared.global.L2::128B [$0], [$1], 16, p; }",
    NOTHING, uint32, uint64, int32, int32, int32,
)  # fmt: skip
"""cp_async_if(target, source, row, rows, wanted): 16 bytes to shared memory if wanted is not 0; zeros if row >= rows,
and then `source` need not be a valid address"""

load_word = instruction("ld.shared.b32 $0, [$1];", int32, uint32)
"""load_word(address), load_f32(address): 4 bytes of shared memory"""
load_f32 = instruction("ld.shared.b32 $0, [$1];", float32, uint32)
store_word = instruction("st.shared.b32 [$0], $1;", NOTHING, uint32, int32)
store_half = instruction("st.shared.b16 [$0], $1;", NOTHING, uint32, uint16)
store_zeros = instruction("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", NOTHING, uint32, int32)
"""store_zeros(address, 0): 16 bytes of shared memory"""
load_vec = instruction("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", FOUR, uint32)
"""load_vec(address): 16 bytes of shared memory"""
load_two = instruction("ld.shared.v2.f32 {$0, $1}, [$2];", UniTuple(float32, 2), uint32)
"""load_two(address): two numbers of shared memory"""
store_vec = instruction("st.global.v4.b32 [$0], {$1, $2, $3, $4};", NOTHING, uint64, FOUR)
"""store_vec(address, four): 16 bytes to memory"""
store_four = instruction("st.shared.v4.f32 [$0], {$1, $2, $3, $4};", NOTHING, uint32, UniTuple(float32, 4))
"""store_four(address, four): four numbers to shared memory"""
cp_async_commit = instruction("cp.async.commit_group;", NOTHING)
"""Puts the copies since the last commit into a group."""
cp_async_wait = instruction("cp.async.wait_group #0;", NOTHING, CONSTANT)
"""cp_async_wait(n): until all but the last n groups of this thread have arrived"""

tma_load = instruction(
    "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[$0], [$1, {$3, $4, $5, $6, $7}], [$2];",
    NOTHING, uint32, uint64, uint32, int32, int32, int32, int32, int32,
)  # fmt: skip
"""tma_load(target, map, barrier, c0, ..., c4): a box of a tensor, its corner at these coordinates, innermost first; its
bytes arrive at the barrier. What lies outside the tensor is zeros."""

tma_store = instruction(
    "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [$0, {$2, $3, $4, $5, $6}], [$1];",
    NOTHING, uint64, uint32, int32, int32, int32, int32, int32,
)  # fmt: skip
"""tma_store(map, source, c0, ..., c4): the other way; what lies outside is not written."""

load_bulk = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], #0, [$2];",
    NOTHING, uint32, uint64, CONSTANT, uint32,
)  # fmt: skip
"""load_bulk(target, source, bytes, barrier): bytes as they lie, which arrive at the barrier"""
add_bulk_once = instruction(
    "{ .reg .pred p; elect.sync _|p, -1;"
    " @p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], #0; }",
    NOTHING, uint64, uint32, CONSTANT,
)  # fmt: skip
"""add_bulk_once(target, source, bytes): adds float32 numbers of shared memory to those in memory, as they lie; by one
lane of a warp without a branch, see `mbarrier_arrive_once`"""

bulk_commit = instruction("cp.async.bulk.commit_group;", NOTHING)
"""What was started since the last one is a group."""
bulk_wait_read = instruction("cp.async.bulk.wait_group.read #0;", NOTHING, CONSTANT)
"""bulk_wait_read(n): until shared memory that all but the last n groups of this thread read is free again"""
bulk_wait = instruction("cp.async.bulk.wait_group 0;", NOTHING)
"""Until all is in memory."""

# --- matrix products of a warp (mma.sync, Ampere) and of a warp group (wgmma, Hopper) ---------------------------------
#
# mma.sync multiplies 16 x 16 by 16 x 8 elements; wgmma, which is asynchronous, 64 x 16 by 16 x n. Both accumulate in
# registers of a lane: with g = lane / 4, t = lane % 4, element 4 i + 2 half + c of the tuple
#
#     row 16 * (warp of the group) + g + 8 half,  column 8 i + 2 t + c
#
# and two neighbours, packed, are an A operand of the next product.

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
