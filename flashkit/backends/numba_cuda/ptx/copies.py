"""Asynchronous copies between global and shared memory: cp.async of 16 bytes (Ampere), TMA and bulk copies (Hopper)."""

from __future__ import annotations

from numba.cuda.types import UniTuple, float32, int32, uint16, uint32, uint64

from .asm import CONSTANT, NOTHING, instruction

__all__ = [
    "add_bulk_once", "bulk_commit", "bulk_wait", "bulk_wait_read", "cp_async_commit", "cp_async_if",
    "cp_async_wait", "load_bulk", "load_f32", "load_two", "load_vec", "load_word", "store_four", "store_half",
    "store_vec", "store_word", "store_zeros", "tma_load", "tma_store",
]  # fmt: skip

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
FOUR = UniTuple(uint32, 4)
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
