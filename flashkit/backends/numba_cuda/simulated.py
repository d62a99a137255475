"""memory.py for kernels that run as Python in Numba's CUDA simulator: addresses are the process's own.

Each thread of a block is a thread of Python there. All of them meet at barriers, so what lanes tell each other goes
through a table between two of these.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np


def device(function: Any) -> Any:
    return function


# --- device memory ----------------------------------------------------------------------------------------------------


def load(kind: Any, address: int, index: int) -> Any:
    size = np.dtype(kind).itemsize
    return np.frombuffer(ctypes.string_at(int(address) + int(index) * size, size), kind)[0]


def load4(kind: Any, address: int, index: int) -> tuple[Any, ...]:
    size = np.dtype(kind).itemsize
    assert (address + index * size) % min(4 * size, 16) == 0
    return tuple(load(kind, address, index + i) for i in range(4))


def store(kind: Any, address: int, index: int, value: Any) -> None:
    data = kind(value).tobytes()
    ctypes.memmove(int(address) + int(index) * len(data), data, len(data))


# --- shared memory ----------------------------------------------------------------------------------------------------


def at(array: Any, index: int) -> Any:
    assert index >= 0
    return array[index]


def at4(array: Any, index: int) -> tuple[Any, ...]:
    assert index >= 0 and index * array.itemsize % 16 == 0
    return tuple(array[index + i] for i in range(4))


def put(array: Any, index: int, value: Any) -> None:
    assert index >= 0
    array[index] = value


def put4(array: Any, index: int, *values: Any) -> None:
    assert index >= 0 and index * array.itemsize % 16 == 0
    array[index : index + 4] = values


# --- numbers ----------------------------------------------------------------------------------------------------------


def single_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


def bits_of_single(x: Any) -> Any:
    return np.float32(x).view(np.int32)


def double_of(bits: Any) -> Any:
    return np.int64(bits).view(np.float64)


def bits_of_double(x: Any) -> Any:
    return np.float64(x).view(np.int64)


def half_of(bits: Any) -> Any:
    return np.float32(np.int16(bits).view(np.float16))


def bits_of_half(x: Any) -> Any:
    return np.float16(x).view(np.int16)


def functions_of(number: Any) -> tuple[Callable[..., Any], ...]:
    return np.exp, np.exp2, np.log, np.log2, np.sqrt, np.tanh, np.sin, np.cos, np.floor


# --- warps and blocks -------------------------------------------------------------------------------------------------


def _told(x: Any) -> dict[int, Any]:
    """x of every thread of the block, by its number."""
    here: Any = threading.current_thread()
    here.syncthreads()  # nobody reads the table any more
    table: dict[int, Any] = here._manager.__dict__.setdefault("table", {})
    table[here.thread_id] = x
    here.syncthreads()
    return table


def thread_here() -> int:
    here: Any = threading.current_thread()
    return int(here.thread_id)


def shuffle_xor(x: Any, step: int) -> Any:
    return _told(x)[thread_here() ^ int(step)]


def ballot(condition: Any) -> int:
    table, first = _told(bool(condition)), thread_here() // 32 * 32
    return sum(1 << lane for lane in range(32) if table.get(first + lane))


def lowest_bit(bits: Any) -> int:
    return (int(bits) & -int(bits)).bit_length() - 1


def all_threads_or(condition: Any) -> bool:
    return any(_told(bool(condition)).values())
