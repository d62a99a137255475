"""Arrays of CuPy over NCCL, one GPU a rank; MPI or another transport compares what the host knows."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from .transport import Done, Messages, Mpi, Pending, _OnStream


def library() -> Any:
    """CuPy's module of NCCL, with PyTorch's copy of the library where the system has none."""
    with suppress(ImportError, StopIteration, OSError):
        found = find_spec("nvidia.nccl")
        folder = next(iter(found.submodule_search_locations or ())) if found else ""
        ctypes.CDLL(f"{folder}/lib/libnccl.so.2", ctypes.RTLD_GLOBAL)
    from cupy.cuda import nccl

    return nccl


def unique_id() -> Any:
    """What rank 0 makes and all ranks pass to `Nccl`; None where CuPy has no NCCL."""
    nccl = library()
    return nccl.get_unique_id() if nccl.available else None


class Nccl:
    """A communicator of NCCL on the current device. control: connects the hosts. identity: of `unique_id`, rank 0's."""

    def __init__(self, control: Mpi, identity: Any) -> None:
        import cupy

        nccl = library()
        self._cupy, self._nccl, self._control = cupy, nccl, control
        self.rank, self.ranks = control.rank, control.ranks
        self._comm = nccl.NcclCommunicator(self.ranks, identity, self.rank)
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        ready, done = (self._cupy.cuda.Event(disable_timing=True) for _ in range(2))
        ready.record(self._cupy.cuda.get_current_stream())  # sent arrays are written, received ones no longer read
        stream, kind = self._stream, self._nccl.NCCL_UINT8  # bytes: NCCL of CuPy has no bfloat16
        stream.wait_event(ready)
        self._nccl.groupStart()
        try:
            for rank, x in sends:
                if x.nbytes:
                    self._comm.send(x.data.ptr, x.nbytes, kind, rank, stream.ptr)
            for rank, x in receives:
                if x.nbytes:
                    self._comm.recv(x.data.ptr, x.nbytes, kind, rank, stream.ptr)
        finally:
            self._nccl.groupEnd()
        done.record(stream)
        return _OnStream(self._cupy, done, Done())

    def close(self) -> None:
        """Free the communicator."""
        self._comm.destroy()

    def agree(self, item: Any) -> list[Any]:
        try:
            return self._control.agree(item)
        except BaseException:
            self._comm.abort()  # transfers whose peers are gone would keep this rank's stream
            raise
