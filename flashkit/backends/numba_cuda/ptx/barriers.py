"""Barriers in shared memory, which count arrivals and bytes, and barriers among warps by number.

A barrier's phase ends when all arrivals and all announced bytes are there. The first has parity 0; waiting for parity
1 on a new barrier returns at once.
"""

from __future__ import annotations

from numba.cuda.types import boolean, int32, uint32

from .asm import CONSTANT, NOTHING, instruction

__all__ = [
    "arrive", "arrive_and_expect", "arrive_and_expect_once", "arrive_once", "barrier_init", "barriers_ready",
    "fence_async", "fence_proxies", "give_registers", "has_ended", "kernel_before", "nap", "take_registers",
    "threads_sync", "wait", "warps_arrive", "warps_sync",
]  # fmt: skip

barrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", NOTHING, uint32, int32)
"""barrier_init(barrier, arrivals)"""

barriers_ready = instruction("fence.mbarrier_init.release.cluster;", NOTHING)
"""Makes new barriers known to the copy engine."""

arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", NOTHING, uint32)

arrive_once = instruction(
    "{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", NOTHING, uint32
)
"""The same by one lane of a warp. After a branch instead the assembler would not know what is the same in all lanes; a
lane's number would take a register always."""

arrive_and_expect = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", NOTHING, uint32, int32)
"""arrive_and_expect(barrier, bytes): arrives, and announces what the copy engine will bring."""

arrive_and_expect_once = instruction(
    "{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }",
    NOTHING, uint32, int32,
)  # fmt: skip
"""The same by one lane of a warp."""

has_ended = instruction(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }",
    boolean, uint32, uint32,
)  # fmt: skip
"""has_ended(barrier, parity), after waiting for a while"""

wait = instruction(
    "{ .reg .pred p;\n"
    "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;\n"
    "@p bra DONE;\n"
    "bra AGAIN;\n"
    "DONE: }", NOTHING, uint32, uint32,
)  # fmt: skip
"""wait(barrier, parity): for the end of a phase"""

nap = instruction("nanosleep.u32 $0;", NOTHING, uint32)
"""nap(nanoseconds): leaves the issue slots to others"""

threads_sync = instruction("bar.sync 0;", NOTHING)
"""For all threads of the block."""

warps_sync = instruction("bar.sync $0, #0;", NOTHING, int32, CONSTANT)
"""warps_sync(number, threads): meet others at barrier `number`, so many threads in all"""

warps_arrive = instruction("bar.arrive $0, #0;", NOTHING, int32, CONSTANT)
"""The same without waiting for the others."""

fence_async = instruction("fence.proxy.async.shared::cta;", NOTHING)
"""What this thread wrote to shared memory is seen by the copy engine and wgmma after."""

fence_proxies = instruction("fence.proxy.async;", NOTHING)
"""The same of memory, both ways."""

kernel_before = instruction("griddepcontrol.wait; griddepcontrol.launch_dependents;", NOTHING)
"""For a kernel that is launched early (launch.py): waits for the end of the one before, and lets the next one begin to
wait for this one."""

give_registers = instruction("setmaxnreg.dec.sync.aligned.u32 #0;", NOTHING, CONSTANT)
"""give_registers(n): this warp keeps n registers a thread."""
take_registers = instruction("setmaxnreg.inc.sync.aligned.u32 #0;", NOTHING, CONSTANT)
"""take_registers(n): this warp waits until it has n registers a thread."""
