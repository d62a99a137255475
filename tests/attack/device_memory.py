"""Guarded memory for CuPy: an allocator that puts margins around every array and fills them with a canary.

CuPy asks it for the memory of every array while `guarded` is on: the caller's arrays, results, and what a backend
allocates for itself. Fresh memory holds NaN. On the emulated device of tests/emulator there is no allocator to replace,
and no need: it checks every address.

Under compute-sanitizer every array is an allocation of the driver's instead, without margins, so that it sees the
bounds.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

MARGIN = 4096
"""Bytes on each side. A multiple of the alignment that CuPy gives, so that kernels see the alignment they would see."""

CANARY = 0xFF
"""All bits set is NaN in every floating dtype."""


class DeviceMemory:
    """The blocks of the current call."""

    def __init__(self, sanitized: bool) -> None:
        import cupy

        self.xp = cupy
        self.margin = 0 if sanitized else MARGIN
        self.blocks: list[tuple[Any, int]] = []  # a pointer to the margin before an array, and the array's size
        self.damage: list[str] = []
        self.replaces = hasattr(cupy.cuda, "using_allocator")
        if self.replaces:
            self.plain = self._from_driver if sanitized else cupy.cuda.MemoryPool().malloc

    def _from_driver(self, size: int) -> Any:
        return self.xp.cuda.MemoryPointer(self.xp.cuda.Memory(size), 0)

    def allocate(self, size: int) -> Any:
        total = size + 2 * self.margin
        block = self.plain(total)
        if total:
            block.memset_async(CANARY, total)  # on the current stream, which need not wait for the default one
        self.blocks.append((block, size))
        return block + self.margin

    def guarded(self, seed: int) -> AbstractContextManager[Any]:
        self.blocks.clear()
        return self.xp.cuda.using_allocator(self.allocate) if self.replaces else nullcontext()

    def bytes_of(self, block: Any, start: int, size: int) -> Any:
        return self.xp.ndarray((size,), self.xp.uint8, memptr=block + start)

    @contextmanager
    def read_only(self, but: Any) -> Iterator[None]:
        """Within the block, arrays that exist before it keep their bytes, except `but`."""
        if not self.replaces:
            yield
            return
        mine = [(block, size) for block, size in self.blocks if but is None or block.mem is not but.data.mem]
        with self.xp.cuda.using_allocator(self.plain):
            before = [self.bytes_of(block, self.margin, size).copy() for block, size in mine]
        yield
        with self.xp.cuda.using_allocator(self.plain):
            for (block, size), kept in zip(mine, before, strict=True):
                if not (self.bytes_of(block, self.margin, size) == kept).all():
                    self.damage.append(f"an input of {size} bytes was written")

    def seen_damage(self) -> list[str]:
        self.xp.cuda.Device().synchronize()
        if self.margin and self.replaces:
            with self.xp.cuda.using_allocator(self.plain):
                for block, size in self.blocks:
                    for where, start in (("before", 0), ("after", self.margin + size)):
                        if not (self.bytes_of(block, start, self.margin) == CANARY).all():
                            self.damage.append(f"bytes {where} an array of {size} bytes were written")
        self.blocks.clear()
        found, self.damage = self.damage, []
        return found
