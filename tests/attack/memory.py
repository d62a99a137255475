"""Guarded memory for NumPy: an allocator (NEP 49) whose blocks begin or end at a page that no one may touch.

NumPy asks it for the memory of every array while `guarded` is on: the caller's arrays, copies of them, results,
argument blocks and scratch memory. An access past the guarded end of an array is a segmentation fault; so is an access
after the array is gone. The rest of the block's pages holds a canary, and fresh memory holds NaN.
"""

import ctypes
import mmap
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
_NONE, _READ, _WRITE = 0, 1, 2  # PROT_*
_PRIVATE_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MOST_FREED = 1 << 16
"""Arrays that are freed between two calls of `give_back`; more of them would stay as they are."""

_CANARY = bytes([0xFF]) * PAGE
"""All bits set is NaN in every floating dtype, and -1 as an integer."""

_POOLS = {1: 2048, 4: 256, 16: 64, 64: 32, 256: 16, 1024: 8}
"""Pages of mappings that are used again, and how many of a kind lie untouchable before the first of them is: mapping
anew takes several times as long. A pointer to what is gone has that many allocations in which it shows.
"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Guard:
    """All blocks that NumPy holds, and the damage seen so far."""

    def __init__(self) -> None:
        self.random = Random(0)
        self.blocks: dict[int, tuple[int, int]] = {}  # address: (size, bytes of the pages between the guards)
        self.damage: list[str] = []
        self.freed = (ctypes.c_int64 * (1 + _MOST_FREED))()  # how many, and their addresses
        self.pools: dict[int, deque[int]] = {pages * PAGE: deque() for pages in _POOLS}  # ends of mappings

    def allocate(self, size: int) -> int:
        size = max(size, 1)
        inner = -(-size // PAGE) * PAGE
        room = next((room for room in self.pools if room >= inner), inner)
        pool = self.pools.get(room, ())
        if len(pool) > _POOLS.get(room // PAGE, 0):
            end = pool.popleft()
        else:
            base = _libc.mmap(None, room + 2 * PAGE, _NONE, _PRIVATE_ANONYMOUS, -1, 0)
            if base in (None, ctypes.c_void_p(-1).value):
                return 0
            end = base + PAGE + room
        if self.freed[0]:
            self.give_back()  # only now, so that the new block is not where one of these was
        first = end - inner
        _libc.mprotect(first, inner, _READ | _WRITE)
        ctypes.memset(first, 0xFF, inner)
        address = first + (inner - size if self.random.random() < 0.75 else 0)
        self.blocks[address] = size, inner
        return address

    def free(self, address: int) -> None:
        self.look_at(address)
        _, inner = self.blocks.pop(address)
        first = _first_page(address)
        room = next((room for room in self.pools if room >= inner), inner)
        if room in self.pools:
            _libc.mprotect(first, inner, _NONE)
            self.pools[room].append(first + inner)
        else:
            _libc.munmap(first - PAGE, inner + 2 * PAGE)

    def give_back(self) -> None:
        """Free what NumPy has freed since, even while an exception is on its way: so `_noting` is machine code."""
        while count := self.freed[0]:
            self.freed[0] = count - 1
            self.free(self.freed[count])

    def look_at(self, address: int) -> None:
        size, inner = self.blocks[address]
        first = _first_page(address)
        before, after = address - first, first + inner - address - size
        if before and ctypes.string_at(first, before) != _CANARY[:before]:
            self.damage.append(f"bytes before an array of {size} bytes were written")
        if after and ctypes.string_at(address + size, after) != _CANARY[:after]:
            self.damage.append(f"bytes after an array of {size} bytes were written")

    def seen_damage(self) -> list[str]:
        """What was written out of bounds since the last call of this."""
        self.give_back()
        for address in list(self.blocks):
            self.look_at(address)
        found, self.damage = self.damage, []
        return found

    @contextmanager
    def read_only(self, *, but: Any = None) -> Iterator[None]:
        """Within the block, a write to an array that exists before it, except to `but`, is a segmentation fault."""
        self.give_back()
        spared = None if but is None else _memory_of(but)
        protected = [(a, block) for a, block in self.blocks.items() if a != spared]
        for address, block in protected:
            _libc.mprotect(_first_page(address), block[1], _READ)
        try:
            yield
        finally:
            for address, block in protected:
                if self.blocks.get(address) is block:  # and not another one at the place of one that is gone
                    _libc.mprotect(_first_page(address), block[1], _READ | _WRITE)


def _first_page(address: int) -> int:
    """A block begins in the first of the pages between its guards."""
    return address // PAGE * PAGE


def _memory_of(array: np.ndarray) -> int:
    """The address of the memory that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.__array_interface__["data"][0])


GUARD = Guard()

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


def _calloc(_: Any, count: int, each: int) -> int:
    address = GUARD.allocate(count * each)
    if address:
        ctypes.memset(address, 0, count * each)
    return address


def _realloc(_: Any, old: int, size: int) -> int:
    address = GUARD.allocate(size)
    if address and old:
        ctypes.memmove(address, old, min(size, GUARD.blocks[old][0]))
        GUARD.free(old)
    return address


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of NumPy's C API."""

    _fields_ = (
        ("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("ctx", _pointer), ("malloc", _pointer),
        ("calloc", _pointer), ("realloc", _pointer), ("free", _pointer),
    )  # fmt: skip


_FUNCTIONS = (
    ctypes.CFUNCTYPE(_pointer, _pointer, _size)(lambda _, size: GUARD.allocate(size)),
    ctypes.CFUNCTYPE(_pointer, _pointer, _size, _size)(_calloc),
    ctypes.CFUNCTYPE(_pointer, _pointer, _pointer, _size)(_realloc),
)


def _noting() -> tuple[Any, int]:
    """free(context, address, size), which appends the address to the context, `Guard.freed`; and what keeps it."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(f"""
        define void @note(i64* %context, i64 %address, i64 %size) {{
            %count = load i64, i64* %context
            %after = add i64 %count, 1
            %room = icmp ult i64 %count, {_MOST_FREED}
            %real = icmp ne i64 %address, 0
            %both = and i1 %room, %real
            br i1 %both, label %append, label %end
        append:
            %place = getelementptr i64, i64* %context, i64 %after
            store i64 %address, i64* %place
            store i64 %after, i64* %context
            br label %end
        end:
            ret void
        }}
    """)
    engine = binding.create_mcjit_compiler(module, binding.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    return engine, engine.get_function_address("note")


_ENGINE, _NOTE = _noting()
_HANDLER = _Handler(
    b"flashkit guard", 1, ctypes.addressof(GUARD.freed), *(ctypes.cast(f, _pointer) for f in _FUNCTIONS), _NOTE
)
_python = ctypes.pythonapi
_python.PyCapsule_New.restype = ctypes.py_object
_python.PyCapsule_New.argtypes = [_pointer, ctypes.c_char_p, _pointer]
_python.PyCapsule_GetPointer.restype = _pointer
_python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_NAME = b"mem_handler"  # the capsule refers to these bytes
_CAPSULE = _python.PyCapsule_New(ctypes.addressof(_HANDLER), _NAME, None)


def _set_handler() -> Any:
    """PyDataMem_SetHandler, by its place in the table of NumPy's C API."""
    from numpy._core import _multiarray_umath as core

    header = (Path(np.get_include()) / "numpy" / "__multiarray_api.h").read_text()
    index = re.search(r"#define PyDataMem_SetHandler\b.*?PyArray_API\[(\d+)\]", header, re.DOTALL)
    assert index is not None
    table = _python.PyCapsule_GetPointer(core._ARRAY_API, None)
    address = ctypes.c_void_p.from_address(table + int(index[1]) * ctypes.sizeof(_pointer)).value
    return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(address)


_set = _set_handler()


@contextmanager
def guarded(seed: int) -> Iterator[Guard]:
    """Within the block this thread's arrays lie in guarded memory; the seed decides at which end."""
    GUARD.random.seed(seed)
    before = _set(_CAPSULE)
    try:
        yield GUARD
    finally:
        _set(before)
