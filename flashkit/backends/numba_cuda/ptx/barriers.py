"""mbarriers in shared memory, which count arrivals and transaction bytes, and named barriers.

The phase of an mbarrier ends when all arrivals and all expected bytes have come. The first phase has parity 0; a wait
for parity 1 on a new barrier returns at once.
"""

from __future__ import annotations

from numba.cuda.types import boolean, int32, uint32

from .asm import CONSTANT, NOTHING, instruction

__all__ = [
    "fence_mbarrier_init", "fence_proxy_async", "griddepcontrol_wait",
    "mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_arrive_once", "mbarrier_init", "mbarrier_try_wait",
    "mbarrier_wait_spin", "named_barrier_arrive", "named_barrier_sync", "nap", "setmaxnreg_dec", "setmaxnreg_inc",
    "threads_sync",
]  # fmt: skip

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
