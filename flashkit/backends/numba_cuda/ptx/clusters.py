"""Thread block clusters (Hopper): CTAs that reach each other's shared memory by mapa addresses. A CTA must not exit
while another still accesses its shared memory.
"""

from __future__ import annotations

from numba.cuda.types import int32, uint32

from .asm import CONSTANT, NOTHING, instruction

__all__ = ["cluster_ctarank", "cluster_sync", "dsmem_arrive", "dsmem_copy", "dsmem_store", "mapa"]

cluster_ctarank = instruction("mov.u32 $0, %cluster_ctarank;", int32, pure=True)

mapa = instruction("mapa.shared::cluster.u32 $0, $1, $2;", uint32, uint32, int32, pure=True)
"""mapa(address, rank): that address in the shared memory of CTA `rank`"""

cluster_sync = instruction(
    "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;", NOTHING
)  # fmt: skip
"""For all threads of the cluster."""

dsmem_arrive = instruction(
    "{ .reg .pred p; elect.sync _|p, -1; @p mbarrier.arrive.shared::cluster.b64 _, [$0]; }", NOTHING, uint32
)
"""By one lane of a warp, at a mapa barrier. It signals reads only, so it needs no .release.cluster, which would wait
for all reductions of the warp to global memory."""

dsmem_store = instruction(
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [$0], $1, [$2];", NOTHING, uint32, int32, uint32
)
"""dsmem_store(address, x, barrier): a word to a mapa address; its four bytes are announced and counted there."""

dsmem_copy = instruction(
    "{ .reg .pred p; elect.sync _|p, -1;"
    " @p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [$0], [$1], #0, [$2]; }",
    NOTHING, uint32, uint32, CONSTANT, uint32,
)  # fmt: skip
"""dsmem_copy(target, source, bytes, barrier): by one lane of a warp, from this CTA's shared memory to that of
another CTA of the cluster; addresses there are mapa addresses."""
