"""Single numbers: approximations, conversions, memory at an address, lanes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from numba.cuda.types import UniTuple, boolean, float32, int32, int64, uint16, uint32, uint64

from .asm import NOTHING, instruction

__all__ = [
    "across",
    "add_after",
    "add_to",
    "add_to_four",
    "all_lanes",
    "any_lane",
    "block",
    "blocks",
    "clock",
    "elect_one",
    "exp2_fast",
    "fetch_add",
    "fma",
    "from_lane",
    "from_lane_float",
    "greater",
    "lanes_sync",
    "load_acquired",
    "load_from",
    "load_now",
    "log2_fast",
    "lowest_one",
    "multiply_high",
    "ones",
    "opaque",
    "or_lanes",
    "pack_bfloat16",
    "pack_float16",
    "reciprocal",
    "set_bits",
    "set_bits_after",
    "store_to",
    "store_zeros",
    "thread",
    "vote",
    "widen_bfloat16",
    "widen_float16",
]  # fmt: skip

exp2_fast = instruction("ex2.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
"""2^x; what is below the smallest normal number is 0."""

log2_fast = instruction("lg2.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
reciprocal = instruction("rcp.approx.ftz.f32 $0, $1;", float32, float32, pure=True)
greater = instruction("max.f32 $0, $1, $2;", float32, float32, float32, pure=True)
"""The greater; of a number and NaN, the number."""

fma = instruction("fma.rn.f32 $0, $1, $2, $3;", float32, float32, float32, float32, pure=True)
"""x * y + z, rounded once."""

multiply_high = instruction("mul.hi.u32 $0, $1, $2;", uint32, uint32, uint32, pure=True)

pack_float16 = instruction("cvt.rn.f16x2.f32 $0, $2, $1;", uint32, float32, float32, pure=True)
"""pack(low, high): two numbers as 16-bit elements, the first in the low half."""
pack_bfloat16 = instruction("cvt.rn.bf16x2.f32 $0, $2, $1;", uint32, float32, float32, pure=True)
widen_float16 = instruction("cvt.f32.f16 $0, $1;", float32, uint16, pure=True)
widen_bfloat16 = instruction("{ .reg .b16 z; mov.b16 z, 0; mov.b32 $0, {z, $1}; }", float32, uint16, pure=True)

opaque = instruction("{ .reg .b32 l; mov.u32 l, %laneid; shfl.sync.idx.b32 $0, $1, l, 31, -1; }", int32, int32)
"""The number itself, got by an instruction that the compiler leaves where it is: in code that hardly ever runs, whose
beginnings would else be computed beforehand, each time."""


@lru_cache
def load_from(space: str, kind: Any, constant: bool = False) -> Any:
    """load_from(space, kind)(address), from `space`, "global" or "shared"; constant: no kernel writes there
    meanwhile.
    """
    address = uint32 if space == "shared" else uint64
    how = "global.nc" if constant else space
    return instruction(f"ld.{how}.b{kind.bitwidth} $0, [$1];", kind, address, pure=constant)


@lru_cache
def store_to(space: str, kind: Any) -> Any:
    """store_to(space, kind)(address, x), to `space`, "global" or "shared"."""
    address = uint32 if space == "shared" else uint64
    return instruction(f"st.{space}.b{kind.bitwidth} [$0], $1;", NOTHING, address, kind)


store_zeros = instruction("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", NOTHING, uint32, int32)
"""store_zeros(address, 0): 16 bytes of shared memory."""

fetch_add = instruction("atom.global.add.u32 $0, [$1], $2;", uint32, uint64, uint32)
"""fetch_add(address, n): adds to a word of memory; what it was."""

_ADD = "red.relaxed.gpu.global.add"
add_to = instruction(f"{_ADD}.f32 [$0], $1;", NOTHING, uint64, float32)
"""add_to(address, x): adds to a number in memory."""
add_to_four = instruction(f"{_ADD}.v4.f32 [$0], {{$1, $2, $3, $4}};", NOTHING, uint64, UniTuple(float32, 4))
"""add_to_four(address, four): adds to four neighbours (Hopper)."""
set_bits = instruction("red.relaxed.gpu.global.or.b32 [$0], $1;", NOTHING, uint64, uint32)
set_bits_after = instruction("red.release.gpu.global.or.b32 [$0], $1;", NOTHING, uint64, uint32)
"""set_bits(address, bits): in a word of memory; set_bits_after: what was written before is there when they are."""
add_after = instruction("red.release.gpu.global.add.u32 [$0], $1;", NOTHING, uint64, uint32)
"""add_after(address, n): to a word of memory; what was written before is there when it is."""
load_now = instruction("ld.relaxed.gpu.global.b32 $0, [$1];", uint32, uint64)
"""A word of memory that others change."""
load_acquired = instruction("ld.acquire.gpu.global.b32 $0, [$1];", uint32, uint64)
"""The same, and what was there before it was."""

# --- lanes ------------------------------------------------------------------------------------------------------------

thread = instruction("mov.u32 $0, %tid.x;", uint32, pure=True)
block = instruction("mov.u32 $0, %ctaid.x;", uint32, pure=True)
blocks = instruction("mov.u32 $0, %nctaid.x;", uint32, pure=True)
clock = instruction("mov.u64 $0, %clock64;", int64)

from_lane = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", int32, int32, int32)
"""from_lane(x, lane): the number of another lane."""
from_lane_float = instruction("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", float32, float32, int32)
across = instruction("shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", float32, float32, int32)
"""across(x, step): the number of lane ^ step."""

vote = instruction(
    "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }", uint32, boolean
)  # fmt: skip
"""vote(x): a bit for each lane."""
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
lowest_one = instruction("{ .reg .b32 r; brev.b32 r, $1; bfind.shiftamt.u32 $0, r; }", int32, uint32, pure=True)
"""Index of the lowest bit that is set."""
lanes_sync = instruction("bar.warp.sync -1;", NOTHING)
