"""Scalar instructions: approximations, conversions, memory accesses by address, warp lanes."""

from __future__ import annotations

from numba.cuda.types import UniTuple, boolean, float32, int32, int64, uint32, uint64

from .asm import NOTHING, instruction

__all__ = [
    "across", "all_lanes", "any_lane", "block", "blocks", "clock", "count_if", "elect_one", "exp2_fast",
    "fetch_add", "fma", "from_lane", "from_lane_float", "greater", "lanes_sync", "load_relaxed", "log2_fast",
    "lowest_set_bit", "ones", "opaque", "or_lanes", "pack_bfloat16", "pack_float16", "reciprocal", "red_add",
    "red_add_four", "red_or", "red_or_release", "thread", "times_rounded", "vote",
]  # fmt: skip

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
red_or = instruction("red.relaxed.gpu.global.or.b32 [$0], $1;", NOTHING, uint64, uint32)
red_or_release = instruction("red.release.gpu.global.or.b32 [$0], $1;", NOTHING, uint64, uint32)
"""red_or(address, bits): atomic or on a word of global memory. red_or_release orders earlier writes before it."""
load_relaxed = instruction("ld.relaxed.gpu.global.b32 $0, [$1];", uint32, uint64)
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
