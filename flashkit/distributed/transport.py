"""How arrays travel between ranks: `Transport`, and MPI as one, with staging in host memory for arrays on a device.

A transport moves bytes: `exchange` starts sends and receives that belong together, `agree` compares small objects. All
rings, all-to-alls and gathers are lists of sends and receives. There are two more: `nccl.Nccl` and
`process_group.ProcessGroup`.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

Messages = Sequence[tuple[int, Any]]
"""Pairs of (rank, contiguous array). Messages between two ranks arrive in their order."""


class Pending(Protocol):
    """Transfers on their way."""

    def wait(self) -> None:
        """Until received arrays can be read and sent ones written: by the host, or by the current stream."""


class Transport(Protocol):
    """What the distributed functions need of a library that connects processes."""

    rank: int
    ranks: int

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        """Start to send and receive, behind what the caller computes."""

    def agree(self, item: Any) -> list[Any]:
        """The item of each rank, in the order of ranks; they can be pickled."""


def as_bytes(x: Any) -> Any:
    """The memory of a contiguous array."""
    return x.reshape(-1).view(np.uint8)


class Done:
    """Transfers that are over."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Mpi:
    """Arrays of NumPy through a duplicate of mpi4py's communicator. timeout: seconds that a transfer may take."""

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI

        self._mpi, self._comm, self._timeout = MPI, comm.Dup(), timeout
        self.rank, self.ranks = comm.Get_rank(), comm.Get_size()
        self._broken = ""
        # MPI moves large messages while someone tests them: a thread does, where MPI allows that.
        threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._worker = ThreadPoolExecutor(1, "flashkit-mpi") if threads else None

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        return self.start(self.transfer, sends, receives)

    def close(self) -> None:
        """Free the thread and the communicator."""
        if self._worker is not None:
            self._worker.shutdown()
        self._comm.Free()

    def start(self, work: Any, *arguments: Any) -> Pending:
        """Run `work` beside the caller, or now if MPI was initialised without threads."""
        if self._worker is not None:
            return _Running(self._worker.submit(work, *arguments))
        work(*arguments)
        return Done()

    def transfer(self, sends: Messages, receives: Messages) -> None:
        """Send and receive arrays of NumPy."""
        kind = self._mpi.BYTE
        requests = [self._comm.Irecv([as_bytes(x), kind], rank) for rank, x in receives]
        requests += [self._comm.Isend([as_bytes(x), kind], rank) for rank, x in sends]
        self._finish(requests, "a transfer")

    def agree(self, item: Any) -> list[Any]:
        own = np.frombuffer(pickle.dumps(item), np.uint8)
        sizes = np.empty(self.ranks, np.int64)
        self._finish([self._comm.Iallgather(np.array([own.size], np.int64), sizes)], "the other ranks")
        every = np.empty(int(sizes.sum()), np.uint8)
        counts = [every, sizes.tolist(), None, self._mpi.BYTE]
        self._finish([self._comm.Iallgatherv([own, self._mpi.BYTE], counts)], "the other ranks")
        return [pickle.loads(part.tobytes()) for part in np.split(every, np.cumsum(sizes)[:-1])]

    def _finish(self, requests: list[Any], what: str) -> None:
        """Wait, at most for the time limit. It sleeps between looks: MPI's own wait would take a core."""
        if self._broken:
            raise RuntimeError(f"this Comm is no longer usable: {self._broken}")
        until, pause = time.monotonic() + self._timeout, 0.0
        while not self._mpi.Request.Testall(requests):
            if time.monotonic() > until:
                self._broken = f"rank {self.rank} waited {self._timeout:g} s for {what}: a rank is late or gone"
                raise TimeoutError(self._broken)
            time.sleep(pause)
            pause = min(pause + 2e-6, 5e-4)


class _Running:
    """A transfer on the thread of a transport."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class Staged:
    """Arrays of CuPy through host memory and MPI, for ranks that share a GPU, or without NCCL."""

    def __init__(self, mpi: Mpi) -> None:
        import cupy

        self._cupy, self._mpi, self._stream = cupy, mpi, cupy.cuda.Stream(non_blocking=True)
        self.rank, self.ranks, self.agree = mpi.rank, mpi.ranks, mpi.agree

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        events = [self._cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        events[0].record(self._cupy.cuda.get_current_stream())
        running = self._mpi.start(self._transfer, self._cupy.cuda.Device(), events, sends, receives)
        return _OnStream(self._cupy, events[1], running)

    def _transfer(self, device: Any, events: Sequence[Any], sends: Messages, receives: Messages) -> None:
        with device, self._stream as stream:
            stream.wait_event(events[0])
            outgoing = [(rank, self._cupy.asnumpy(as_bytes(x))) for rank, x in sends]
            incoming = [(rank, np.empty(x.nbytes, np.uint8)) for rank, x in receives]
            self._mpi.transfer(outgoing, incoming)
            for (_, x), (_, host) in zip(receives, incoming, strict=True):
                as_bytes(x).set(host)
            events[1].record(stream)
            stream.synchronize()  # the host memory is freed


class _OnStream:
    """Transfers on a stream of their own, which the current one waits for."""

    def __init__(self, cupy: Any, event: Any, running: Pending) -> None:
        self._cupy, self._event, self._running = cupy, event, running

    def wait(self) -> None:
        self._running.wait()
        self._cupy.cuda.get_current_stream().wait_event(self._event)
