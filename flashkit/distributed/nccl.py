"""Arrays of CuPy over NCCL, one GPU a rank; MPI or another transport compares what the host knows."""

from __future__ import annotations

from typing import Any

from .transport import Done, Messages, Mpi, Pending, _OnStream


def unique_id() -> Any:
    """What rank 0 makes and all ranks pass to `Nccl`; None where CuPy has no NCCL."""
    from cupy.cuda import nccl

    return nccl.get_unique_id() if nccl.available else None


class Nccl:
    """A communicator of NCCL on the current device.

    Parameters
    ----------
    control
        Connects the hosts.
    identity
        Of `unique_id`, rank 0's.
    """

    def __init__(self, control: Mpi, identity: Any) -> None:
        import cupy
        from cupy.cuda import nccl

        self._cupy, self._nccl = cupy, nccl
        self.rank, self.ranks, self.agree = control.rank, control.ranks, control.agree
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
                self._comm.send(x.data.ptr, x.nbytes, kind, rank, stream.ptr)
            for rank, x in receives:
                self._comm.recv(x.data.ptr, x.nbytes, kind, rank, stream.ptr)
        finally:
            self._nccl.groupEnd()
        done.record(stream)
        return _OnStream(self._cupy, done, Done())

    def abort(self) -> None:
        """Stop transfers whose peers are gone: the streams of this rank go on."""
        self._comm.abort()
