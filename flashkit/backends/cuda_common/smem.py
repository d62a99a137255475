"""The map of a kernel's shared memory: laid out here, once, for the host and for kernels in all languages.

A tile's class lists what lies in shared memory, in order. From that come the bytes to ask for and the constants AT_...
that the kernel's head gets, so that a kernel never adds up offsets itself.

    smem = SmemLayout()
    smem.add("Q", 2 * 64 * 128, align=1024)      # AT_Q
    smem.add("Q_PIPE", 16 * 2)                   # AT_Q_PIPE: full and empty barriers
    smem.constants(), smem.bytes
"""

from __future__ import annotations


class SmemLayout:
    """Parts of shared memory, one after the other. Offsets and sizes are in bytes."""

    def __init__(self) -> None:
        self.offsets: dict[str, int] = {}
        self.bytes = 0

    def add(self, name: str, size: int, align: int = 1) -> int:
        """Put a part behind the others, at a multiple of `align`; returns its offset."""
        if name in self.offsets:
            raise ValueError(f"{name=} is there already, at byte {self.offsets[name]}")
        if size < 0 or align < 1:
            raise ValueError(f"{name}: {size=}, {align=}; a size of 0 or more and an alignment of 1 or more fit")
        offset = -(-self.bytes // align) * align
        self.offsets[name], self.bytes = offset, offset + size
        return offset

    def constants(self) -> dict[str, int]:
        """The constants of a kernel's head: AT_<name> of each part, and SHARED_BYTES."""
        return {**{f"AT_{name}": offset for name, offset in self.offsets.items()}, "SHARED_BYTES": self.bytes}


def stage_constants(stage: SmemLayout) -> dict[str, int]:
    """AT_<name> of the parts of a pipeline stage, relative to the stage, and STAGE_BYTES."""
    constants = stage.constants()
    return {**constants, "STAGE_BYTES": constants.pop("SHARED_BYTES")}
