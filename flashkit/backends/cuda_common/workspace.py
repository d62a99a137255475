"""`Workspace`: the scratch memory of a pass in one allocation, and the words of `Params` that a launch sets."""

from __future__ import annotations

from typing import Any

from . import launch
from .arguments import Arguments
from .params import AT

_ALIGNMENT = 256
"""Bytes, as CuPy's pool aligns allocations."""

_GAP = 0
"""Bytes between parts, at least. The emulated device has some, so that it finds an access past the end of one."""


class Workspace:
    """Laid out once for all arguments of one layout; `allocate` is what remains for each launch.

        workspace = Workspace(arguments)
        workspace.tensor("delta", 4, rows)
        workspace.words(row_block=64)
        held = workspace.allocate(arguments, stream)

    Attributes
    ----------
    parts : dict
        Where each part begins, and its size, in bytes.
    bytes : int
        Of all parts.
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
        """Bytes that a pointer of `Params` refers to. Those of the first part of zeros, and of all parts that are added
        after it, are 0 at each launch.
        """
        offset = -(-(self.bytes + _GAP) // _ALIGNMENT) * _ALIGNMENT
        self.parts[name] = offset, size
        if zeros and self._zeros is None:
            self._zeros = offset
        self.bytes = offset + size
        self._addresses.append((AT[name], offset))

    def tensor(self, name: str, itemsize: int, tokens: int, elements: int = 1, zeros: bool = False) -> None:
        """A tensor (B, Hq, tokens, elements), C-contiguous; packed sequences share one batch entry."""
        heads = self._heads
        self.memory(name, itemsize * self._batch * heads * tokens * elements, zeros)
        strides = 0 if self._packed else heads * tokens * elements, tokens * elements, elements
        self._words += [(AT[name] + i, stride) for i, stride in enumerate(strides, 1)]

    def allocate(self, arguments: Arguments, stream: int) -> Any:
        """Set the words. Returns the memory, to be kept until the kernels that read it are enqueued."""
        held = launch.scratch(self.bytes, "int8")
        words, address = arguments.words, held.data.ptr
        for at, offset in self._addresses:
            words[at] = address + offset
        for at, value in self._words:
            words[at] = value
        if self._zeros is not None:
            launch.clear(address + self._zeros, self.bytes - self._zeros, stream)
        return held
