"""Barriers in shared memory, which count arrivals and bytes, and barriers among warps by number.

A barrier's phase ends when all arrivals and all announced bytes are there. The first has parity 0; waiting for parity
1 on a new barrier returns at once.
"""

from __future__ import annotations

from numba.cuda.types import boolean, int32, uint32

from .asm import CONSTANT, NOTHING, instruction

__all__ = [
    "arrive_and_expect_once",
    "fence_mbarrier_init",
    "fence_proxies",
    "fence_proxy_async",
    "griddepcontrol_wait",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_arrive_once",
    "mbarrier_init",
    "mbarrier_try_wait",
    "mbarrier_wait_spin",
    "named_barrier_arrive",
    "named_barrier_sync",
    "nap",
    "setmaxnreg_dec",
    "setmaxnreg_inc",
    "threads_sync",
]  # fmt: skip

mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", NOTHING, uint32, int32)
"""mbarrier_init(barrier, arrivals)"""

fence_mbarrier_init = instruction("fence.mbarrier_init.release.cluster;", NOTHING)
"""Makes new barriers known to the copy engine."""

mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", NOTHING, uint32)

mbarrier_arrive_once = instruction(
    "{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", NOTHING, uint32
)
"""The same by one lane of a warp. After a branch instead the assembler would not know what is the same in all lanes; a
lane's number would take a register always."""

mbarrier_arrive_expect_tx = instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", NOTHING, uint32, int32)
"""mbarrier_arrive_expect_tx(barrier, bytes): arrives, and announces what the copy engine will bring."""

arrive_and_expect_once = instruction(
    "{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }",
    NOTHING, uint32, int32,
)  # fmt: skip
"""The same by one lane of a warp."""

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
"""nap(nanoseconds): leaves the issue slots to others"""

threads_sync = instruction("bar.sync 0;", NOTHING)
"""For all threads of the block."""

named_barrier_sync = instruction("bar.sync $0, #0;", NOTHING, int32, CONSTANT)
"""named_barrier_sync(number, threads): meet others at barrier `number`, so many threads in all"""

named_barrier_arrive = instruction("bar.arrive $0, #0;", NOTHING, int32, CONSTANT)
"""The same without waiting for the others."""

fence_proxy_async = instruction("fence.proxy.async.shared::cta;", NOTHING)
"""What this thread wrote to shared memory is seen by the copy engine and wgmma after."""

fence_proxies = instruction("fence.proxy.async;", NOTHING)
"""The same of memory, both ways."""

griddepcontrol_wait = instruction("griddepcontrol.wait; griddepcontrol.launch_dependents;", NOTHING)
"""For a kernel that is launched early (launch.py): waits for the end of the one before, and lets the next one begin to
wait for this one."""

setmaxnreg_dec = instruction("setmaxnreg.dec.sync.aligned.u32 #0;", NOTHING, CONSTANT)
"""setmaxnreg_dec(n): this warp keeps n registers a thread."""
setmaxnreg_inc = instruction("setmaxnreg.inc.sync.aligned.u32 #0;", NOTHING, CONSTANT)
"""setmaxnreg_inc(n): this warp waits until it has n registers a thread."""
