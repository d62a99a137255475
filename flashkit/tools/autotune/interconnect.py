"""`mpiexec -n 2 flashkit autotune --interconnect`: the bandwidth between the devices of ranks."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...devices import profiles
from ...distributed import Comm
from ..bench.environment import now, versions

SIZE = 1 << 27
"""Bytes of a message, beyond what a latency shows in."""


def interconnect() -> tuple[float, Path | None]:
    """Measure 1e9 bytes/s on all ranks, which call it, and write them to the user's profile on rank 0."""
    from mpi4py import MPI

    comm, kind = Comm(MPI.COMM_WORLD), "cpu"
    xp: Any = np
    if comm.ranks < 2:
        raise ValueError("--interconnect: expected 2 ranks or more: mpiexec -n 2 flashkit autotune --interconnect")
    with suppress(ImportError):
        import cupy

        if cupy.cuda.is_available():
            cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
            kind, xp = "cuda", cupy
    rate = comm.bandwidth_gbs(SIZE, xp)
    if comm.rank:
        return rate, None
    measured: dict[str, Any] = {"measured": round(rate, 2), "date": now()[:10], "versions": versions("mpi4py", "mpich")}
    return rate, profiles.write_user_profile(
        {"device": profiles.criteria(kind), "memory": {"interconnect_gbs": measured}}
    )
