"""Memory of a pass: the map of a kernel's shared memory, scratch memory in one allocation, and what stays in L2.

A tile's class lists what lies in shared memory, in order, once for the host and for kernels in all languages. From that
come the bytes to ask for and the constants AT_... that the kernel's head gets, so that a kernel never adds up offsets
itself.

    smem = SmemLayout(Q_PIPE=16 * 2)             # AT_Q_PIPE: full and empty barriers
    smem.add("Q", 2 * 64 * 128, align=1024)      # AT_Q
    smem.constants(), smem.bytes
"""

from __future__ import annotations

from typing import Any, Self

from ...spec import ITEMSIZE, AttentionSpec, Direction
from . import launch
from .arguments import Arguments
from .device import Device
from .params import AT

_ALIGNMENT = 256
"""Bytes, as CuPy's pool aligns allocations."""

_GAP = 0
"""Bytes between parts, at least. The emulated device has some, so that it finds an access past the end of one."""

_LONG_SEQUENCE = 4
"""Times the mean length: where packed sequences differ in length, most work is in sequences of about this length."""


# --- shared memory ---------------------------------------------------------------------------------------------------


class SmemLayout:
    """Parts of shared memory, one after the other. Offsets and sizes are in bytes."""

    def __init__(self, **parts: int) -> None:
        self.offsets: dict[str, int] = {}
        self.bytes = 0
        for name, size in parts.items():
            self.add(name, size)

    def add(self, name: str, size: int, align: int = 1) -> int:
        """Put a part behind the others, at a multiple of `align`; returns its offset."""
        if name in self.offsets:
            raise ValueError(f"{name}: expected a new name, got that of the buffer at byte {self.offsets[name]}")
        if size < 0 or align < 1:
            raise ValueError(f"{name}: expected a size >= 0 and an alignment >= 1, got {size} and {align}")
        offset = -(-self.bytes // align) * align
        self.offsets[name], self.bytes = offset, offset + size
        return offset

    def constants(self) -> dict[str, int]:
        """The constants of a kernel's head: AT_<name> of each part, and SHARED_BYTES."""
        return {**{f"AT_{name}": offset for name, offset in self.offsets.items()}, "SHARED_BYTES": self.bytes}


class SmemTile:
    """A tile of a kernel that keeps its operands in shared memory."""

    def smem(self, spec: AttentionSpec) -> SmemLayout:
        """The shared memory of a CTA."""
        raise NotImplementedError

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of it."""
        return self.smem(spec).bytes

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        """Whether shared memory suffices, and registers as far as is known."""
        return self.shared_memory(spec) <= device.shared_per_block

    def fitted(self, spec: AttentionSpec, device: Device, direction: Direction, ctas_per_sm: int = 0) -> Self | None:
        """The tile as it fits a spec, with at least so many CTAs per SM; None where it does not."""
        return self if self.fits(spec, device) else None


def stage_constants(stage: SmemLayout) -> dict[str, int]:
    """AT_<name> of the parts of a pipeline stage, relative to the stage, and STAGE_BYTES."""
    constants = stage.constants()
    return {**constants, "STAGE_BYTES": constants.pop("SHARED_BYTES")}


# --- scratch memory ---------------------------------------------------------------------------------------------------


class Workspace:
    """Laid out once for all arguments of one layout; `allocate` is what remains for each launch.

        workspace = Workspace(arguments)
        workspace.tensor("delta", 4, rows)
        workspace.words(row_block=64)
        held = workspace.allocate(arguments, stream)

    `parts` says where each part begins, and its size, in bytes; `bytes` is the size of all.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.parts: dict[str, tuple[int, int]] = {}
        self.bytes = 0
        self._batch, self._heads = arguments.entries, arguments.heads
        self._packed = arguments.spec.packed
        self._addresses: list[tuple[int, int]] = []
        self._words: list[tuple[int, int]] = []
        self._zeros: int | None = None

    def words(self, **words: int) -> None:
        """Words by name, the same for all launches."""
        self._words += [(AT[name], value) for name, value in words.items()]

    def memory(self, name: str, size: int, zeros: bool = False) -> None:
        """Bytes that a pointer of `Params` refers to. From the first part of zeros on, all are 0 at each launch."""
        offset = -(-(self.bytes + _GAP) // _ALIGNMENT) * _ALIGNMENT
        self.parts[name] = offset, size
        if zeros and self._zeros is None:
            self._zeros = offset
        self.bytes = offset + size
        self._addresses.append((AT[name], offset))

    def tensor(
        self, name: str, itemsize: int, tokens: int, elements: int = 1, zeros: bool = False, entries_first: bool = False
    ) -> None:
        """A tensor (B, Hq, tokens, elements), or with entries_first (Hq, B, ..); packed sequences share an entry."""
        heads, row = self._heads, tokens * elements
        self.memory(name, itemsize * self._batch * heads * row, zeros)
        strides = (0 if self._packed else heads * row), row, elements
        if entries_first:
            strides = row, self._batch * row, elements
        self._words += [(AT[name] + i, stride) for i, stride in enumerate(strides, 1)]

    def allocate(self, arguments: Arguments, stream: int) -> Any:
        """Set the words. Returns the memory, to be kept until the kernels that read it are enqueued."""
        held = launch.scratch((self.bytes,), "int8", empty=arguments.empty)
        words, address = arguments.words, held.data.ptr
        for at, offset in self._addresses:
            words[at] = address + offset
        for at, value in self._words:
            words[at] = value
        if self._zeros is not None:
            launch.clear(address + self._zeros, self.bytes - self._zeros, stream)
        return held


# --- L2 swizzle: heads that CTAs work on at the same time, so that their operands stay in L2 --------------------------


def heads_per_l2_group(heads: int, limit: int) -> int:
    """Heads of a group, at most `limit`, such that all groups have about the same size."""
    limit = max(1, min(heads, limit))
    return -(-heads // -(-heads // limit))


def bytes_of_keys(arguments: Arguments) -> int:
    """Bytes of K and V of a key/value head; of packed sequences, those of a long one."""
    spec = arguments.spec
    keys = min(arguments.n_k, _LONG_SEQUENCE * arguments.mean_n_k)
    return max(keys, 1) * (spec.head_dim + spec.head_dim_v) * spec.operand_size


def bytes_of_queries(arguments: Arguments, itemsize: int = 0) -> int:
    """Bytes of Q, dO and dq_accum of a key/value head's queries. itemsize: of Q and dO, if not that of the dtype."""
    spec = arguments.spec
    row = (spec.head_dim + spec.head_dim_v) * (itemsize or ITEMSIZE[spec.dtype]) + 4 * spec.head_dim
    return max(arguments.n_q, 1) * spec.group * row
