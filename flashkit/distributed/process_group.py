"""Arrays through a process group of PyTorch: its own communicator, gloo for NumPy and NCCL for CuPy."""

from __future__ import annotations

import itertools
import pickle
from collections import defaultdict
from typing import Any

import numpy as np

from .transport import Messages, Pending, as_bytes

_numbers: defaultdict[str, Any] = defaultdict(itertools.count)


class ProcessGroup:
    """The transport of a group of torch.distributed, with its time limits. All ranks make theirs in one order."""

    def __init__(self, group: Any) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed, self._group = torch, distributed, group
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)
        # Small objects go through the store in which the processes met: a GPU's communicator would have to wait for it.
        name = f"flashkit-{group.group_name}-{next(_numbers[group.group_name])}"
        self._store = distributed.PrefixStore(name, distributed.distributed_c10d._get_default_store())
        self._agreements = 0
        self._global = [distributed.get_global_rank(group, rank) for rank in range(self.ranks)]

    def exchange(self, sends: Messages, receives: Messages) -> Pending:
        d = self._distributed
        operations = [
            d.P2POp(start, self._tensor(x), self._global[rank], self._group)
            for start, messages in ((d.isend, sends), (d.irecv, receives))
            for rank, x in messages
            if x.nbytes
        ]
        return _Works(d.batch_isend_irecv(operations) if operations else [], operations)

    def agree(self, item: Any) -> list[Any]:
        number, self._agreements = self._agreements, self._agreements + 1
        self._store.set(f"{number}/{self.rank}", pickle.dumps(item))
        items = [pickle.loads(self._store.get(f"{number}/{rank}")) for rank in range(self.ranks)]
        if number:  # the others have read the one before, as they have written this one
            self._store.delete_key(f"{number - 1}/{self.rank}")
        return items

    def _tensor(self, x: Any) -> Any:
        """The bytes of an array as a tensor on the same memory."""
        data = as_bytes(x)
        return self._torch.from_numpy(data) if isinstance(data, np.ndarray) else self._torch.from_dlpack(data)


class _Works:
    """Transfers of a process group. They keep the tensors."""

    def __init__(self, works: list[Any], operations: list[Any]) -> None:
        self._works, self._operations = works, operations

    def wait(self) -> None:
        for work in self._works:
            work.wait()
