"""Hopper's own instructions for kernels that run as Python, lane by lane (lanes.py): barriers that count bytes, the
copy engine, products of warp groups.

Copies and products are done at once where they are begun, so what a kernel forgets to await is not found here; that it
waits for what nobody brings is, by a time limit.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lanes
import numpy as np
from lanes import *  # noqa: F403
from lanes import _bytes, _lane, lanes_sync, shared_address, told

PATIENCE = 120
"""Seconds that a barrier is waited for."""

maps: dict[str, Map] = {}
"""Tensor maps of the launch, by their parameters' names."""

_lock = threading.RLock()


@dataclass
class Map:
    """A tensor (B, H, N, D) of 16-bit elements, and the rows of a box: tokens, or members of a pack of heads for each
    of fewer tokens.
    """

    array: np.ndarray
    rows: int
    pack: int = 1

    def box(self, column: int, near: int, far: int, head: int, batch: int) -> np.ndarray:
        """What is there of a box, (tokens, members, columns)."""
        token = far if self.pack > 1 else near
        heads = slice(head * self.pack, (head + 1) * self.pack)
        tokens = slice(token, token + self.rows // self.pack)
        return self.array[batch, heads, tokens, column : column + 64].transpose(1, 0, 2)


class Barrier:
    """In shared memory, at an address: a phase ends when all arrivals and all announced bytes are there."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.missing, self.bytes, self.ended = arrivals, arrivals, 0, 0
        self.changed = threading.Condition(_lock)

    def take(self, arrivals: int, announced: int) -> None:
        with _lock:
            self.missing -= arrivals
            self.bytes += announced
            assert self.missing >= 0
            if self.missing == 0 and self.bytes == 0:
                self.missing, self.ended = self.arrivals, self.ended + 1
                self.changed.notify_all()

    def mbarrier_wait(self, parity: int) -> None:
        with _lock:
            _await(self.changed, lambda: self.ended & 1 != parity)


def _go_on() -> None:
    if _lane.block.failed:
        raise threading.BrokenBarrierError


def _await(changed: threading.Condition, happened: Callable[[], bool]) -> None:
    """Until something has happened, unless another lane has failed."""
    for _ in range(PATIENCE):
        if changed.wait_for(happened, 1):
            return
        _go_on()
    raise AssertionError("nobody arrives")


def _barriers() -> dict[int, Barrier]:
    return _lane.block.__dict__.setdefault("barriers", {})


# --- barriers, fences, registers --------------------------------------------------------------------------------------


def mbarrier_init(barrier: int, arrivals: int) -> None:
    _barriers()[int(barrier)] = Barrier(arrivals)


def mbarrier_arrive(barrier: int) -> None:
    _barriers()[int(barrier)].take(1, 0)


def mbarrier_arrive_once(barrier: int) -> None:
    if elect_one():
        mbarrier_arrive(barrier)


def mbarrier_arrive_expect_tx(barrier: int, count: int) -> None:
    _barriers()[int(barrier)].take(1, count)


def arrive_and_expect_once(barrier: int, count: int) -> None:
    if elect_one():
        mbarrier_arrive_expect_tx(barrier, count)


def mbarrier_wait(barrier: int, parity: int) -> None:
    _barriers()[int(barrier)].mbarrier_wait(parity)


def mbarrier_try_wait(barrier: int, parity: int) -> bool:
    return _barriers()[int(barrier)].ended & 1 != parity


def nap(nanoseconds: int) -> None:
    _go_on()
    time.sleep(0.01)


def nothing(*_: Any) -> None: ...


fence_mbarrier_init = fence_proxy_async = fence_proxies = setmaxnreg_dec = setmaxnreg_inc = clock = nothing
wgmma_fence = wgmma_commit = wgmma_wait = bulk_commit = bulk_wait = bulk_wait_read = nothing


def settle(registers: Any) -> Any:
    return registers


# --- clusters ---------------------------------------------------------------------------------------------------------

def blocks() -> int:
    return len(_lane.block.cluster)


def cluster_ctarank() -> int:
    return int(_lane.block.rank)


def mapped(address: int, rank: int) -> int:
    return int(address) - shared_address() + int(_lane.block.cluster[rank].base)


def cluster_sync() -> None:
    first = _lane.block.cluster[0]
    with _lock:
        meeting = first.__dict__.setdefault("together", threading.Barrier(blocks() * first.meeting.parties))
        if meeting not in first.meetings:
            first.meetings.append(meeting)
    meeting.mbarrier_wait()


def _whose(address: int) -> lanes.Block:
    return next(block for block in _lane.block.cluster if 0 <= int(address) - block.base < block.memory.size)


def _take_across(barrier: int, arrivals: int, announced: int) -> None:
    _whose(barrier).__dict__["barriers"][int(barrier)].take(arrivals, announced)


def dsmem_arrive(barrier: int) -> None:
    if elect_one():
        _take_across(barrier, 1, 0)


def _write_across(address: int, data: np.ndarray, barrier: int) -> None:
    there = _whose(address)
    start = int(address) - there.base
    there.memory[start : start + data.size] = data
    _take_across(barrier, 0, -data.size)


def dsmem_store(address: int, x: int, barrier: int) -> None:
    _write_across(address, np.array([x], np.int32).view(np.uint8), barrier)


def dsmem_copy(target: int, source: int, count: int, barrier: int) -> None:
    if elect_one():
        assert int(source) % 16 == int(target) % 16 == 0
        _write_across(target, _part(source, count), barrier)


# --- memory -----------------------------------------------------------------------------------------------------------


def _part(address: int, count: int) -> np.ndarray:
    start = int(address) - shared_address()
    assert start >= 0 and start + count <= _lane.block.memory.size
    return _lane.block.memory[start : start + count]


def map_address(name: str) -> Map:
    return maps[name]


def _units(start: int, rows: int) -> Any:
    """Places of the units of a box in shared memory."""
    for row in range(rows):
        for unit in range(8):
            yield row, slice(8 * unit, 8 * unit + 8), _bytes(swizzle(start + row * 128 + unit * 16), 16)


def tma_load(target: int, source: Map, barrier: int, *corner: int) -> None:
    box = np.zeros((source.rows // source.pack, source.pack, 64), np.uint16)
    there = source.box(*corner)
    box[: there.shape[0], :, : there.shape[2]] = there
    for row, columns, place in _units(target, source.rows):
        place[:] = box.reshape(-1, 64)[row, columns].view(np.uint8)
    _barriers()[int(barrier)].take(0, -box.nbytes)


def tma_store(target: Map, source: int, *corner: int) -> None:
    box, there = np.zeros((target.rows // target.pack, target.pack, 64), np.uint16), target.box(*corner)
    for row, columns, place in _units(source, target.rows):
        box.reshape(-1, 64)[row, columns] = place.view(np.uint16)
    there[...] = box[: there.shape[0], :, : there.shape[2]]


def load_bulk(target: int, source: int, count: int, barrier: int) -> None:
    assert int(source) % 16 == int(target) % 16 == 0
    _part(target, count)[:] = np.frombuffer(ctypes.string_at(int(source), count), np.uint8)
    _barriers()[int(barrier)].take(0, -count)


def bulk_reduce_add(target: int, source: int, count: int) -> None:
    with _lock:
        sums = np.ctypeslib.as_array((ctypes.c_float * (count // 4)).from_address(int(target)))
        sums += _part(source, count).view(np.float32)


def add_bulk_once(target: int, source: int, count: int) -> None:
    if elect_one():
        bulk_reduce_add(target, source, count)


def _word(address: int) -> Any:
    return ctypes.c_uint32.from_address(int(address))


def fetch_add(address: int, n: int) -> int:
    with _lock:
        word = _word(address)
        word.value += n
        return int(word.value) - n


def set_bits(address: int, bits: int) -> None:
    with _lock:
        _word(address).value |= int(bits)


set_bits_after = set_bits


def add_after(address: int, n: int) -> None:
    fetch_add(address, n)


def load_acquired(address: int) -> int:
    return int(_word(address).value)


def store_zeros(address: int, zero: int) -> None:
    _bytes(address, 16)[:] = 0


def _store(address: int, words: Sequence[int], row_of: Callable[[list[Any], int, int], Any]) -> None:
    """Matrices of 8 x 8, each lane's row where it says: row_of(lanes' words, matrix, row)."""
    given = told((address, words))
    matrix, row = divmod(_lane.thread % 32, 8)
    if matrix < len(words):
        elements = np.array(row_of([each[1] for each in given], matrix, row))
        _bytes(address, 16)[:] = elements.astype(np.uint16).view(np.uint8)
    lanes_sync()


def stmatrix_x4(address: int, *words: int) -> None:
    def row_of(given: list[Any], matrix: int, row: int) -> Any:
        return np.array([given[4 * row + k][matrix] for k in range(4)], np.uint32).view(np.uint16)

    _store(address, words, row_of)


def store_matrices_turned(address: int, *words: int) -> None:
    """Given as their columns."""
    _store(address, words, lambda given, i, row: [_half(given[4 * k + row // 2][i], row) for k in range(8)])


def _half(word: int, which: int) -> int:
    return int(word) >> 16 * (which % 2) & 0xFFFF


class Meeting:
    """A barrier among warps by number: so many threads in all, of which some do not wait for the others."""

    def __init__(self) -> None:
        self.there, self.ended, self.changed = 0, 0, threading.Condition(_lock)

    def come(self, threads: int, stay: bool) -> None:
        with _lock:
            before, self.there = self.ended, self.there + 1
            if self.there == threads:
                self.there, self.ended = 0, self.ended + 1
                self.changed.notify_all()
            elif stay:
                _await(self.changed, lambda: self.ended != before)


def _meeting(number: int) -> Meeting:
    with _lock:
        return _lane.block.__dict__.setdefault("named", {}).setdefault(int(number), Meeting())


def named_barrier_sync(number: int, threads: int) -> None:
    _meeting(number).come(threads, True)


def named_barrier_arrive(number: int, threads: int) -> None:
    _meeting(number).come(threads, False)


# --- lanes and numbers ------------------------------------------------------------------------------------------------


def fma(x: Any, y: Any, z: Any) -> Any:
    return np.float32(np.float64(x) * np.float64(y) + np.float64(z))


def or_lanes(bits: int) -> int:
    return int(np.bitwise_or.reduce([int(x) for x in told(bits)]))


def ones(bits: int) -> int:
    return int(bits).bit_count()


def lowest_one(bits: int) -> int:
    return (int(bits) & -int(bits)).bit_length() - 1


def elect_one() -> bool:
    return bool(_lane.thread % 32 == 0)


# --- products of warp groups ------------------------------------------------------------------------------------------


def swizzle(address: int) -> int:
    """Where the 128-byte swizzle puts what has this address."""
    return int(address) ^ (int(address) >> 7 & 7) << 4


def _operand(kind: str, of: int, size: int, turned: bool) -> np.ndarray:
    """(size, 16) elements of an operand that begins where a descriptor says."""
    start, chunk = (of & 0x3FFF) << 4, (of >> 16 & 0x3FFF) << 4
    found = np.zeros((size, 16), np.uint16)
    for i in range(size):
        for k in range(16):
            at = start + k * 128 + i // 64 * chunk + i % 64 * 2 if turned else start + i * 128 + k * 2
            found[i, k] = _lane.block.memory[swizzle(at) :][:2].view(np.uint16)[0]
    return found.view(lanes.NUMPYS[kind]).astype(np.float32)


def _together(value: Any, compute: Callable[[list[Any]], np.ndarray]) -> tuple[Any, ...]:
    """Compute a matrix of 64 rows from what all lanes of a warp group have; this lane's part of it."""
    block, thread = _lane.block, _lane.thread
    with _lock:
        groups = block.__dict__.setdefault("groups", {})
        barrier, table = groups.setdefault(thread // 128, (threading.Barrier(128), [None] * 129))
        block.meetings.append(barrier)
    table[thread % 128] = value
    barrier.mbarrier_wait()
    if thread % 128 == 0:
        table[128] = compute(table[:128])
    barrier.mbarrier_wait()
    result, (g, t), row = table[128], divmod(thread % 32, 4), thread % 128 // 32 * 16
    parts = result.reshape(64, -1, 4, 2)[[row + g, row + g + 8], :, t]  # (half, i, c)
    return tuple(parts.transpose(1, 0, 2).ravel())


def _before(given: Sequence[Any], n: int) -> np.ndarray:
    """The sums that lanes hold, as a matrix."""
    rows = np.array(given, np.float32).reshape(4, 8, 4, n // 8, 2, 2)  # warp, g, t, i, half, c
    return rows.transpose(0, 4, 1, 3, 2, 5).reshape(64, n)


def _sums(given: Sequence[Any], n: int, add: int) -> np.ndarray:
    return _before(given, n) if add else np.zeros((64, n), np.float32)


def wgmma(
    kind: str, n: int, a_steps: Sequence[int], b_steps: Sequence[int], *, turned_a: bool = False,
    turned_b: bool = False, fresh: bool = False,
) -> Any:  # fmt: skip
    def of_shared(a: int, b: int, sums: np.ndarray) -> np.ndarray:
        for a_step, b_step in zip(a_steps, b_steps, strict=True):
            sums = sums + _operand(kind, a + a_step, 64, turned_a) @ _operand(kind, b + b_step, n, turned_b).T
        return sums.astype(np.float32)

    def product(sums: Sequence[Any], a: int, b: int, add: int) -> tuple[Any, ...]:
        return _together(sums, lambda given: of_shared(a, b, _sums(given, n, add)))

    if fresh:
        return lambda a, b: _together(None, lambda _: of_shared(a, b, np.zeros((64, n), np.float32)))
    return product


def wgmma_registers(kind: str, n: int, b_steps: Sequence[int], *, turned_b: bool = False) -> Any:
    def product(sums: Sequence[Any], left: Sequence[int], b: int, add: int) -> tuple[Any, ...]:
        def compute(given: list[Any]) -> np.ndarray:
            total = _sums([each[0] for each in given], n, add)
            words = np.array([each[1] for each in given], np.uint32).view(lanes.NUMPYS[kind]).astype(np.float32)
            words = words.reshape(4, 8, 4, -1, 2, 2, 2)  # warp, g, t, step, column half, row half, c
            for i, step in enumerate(b_steps):
                a = words[:, :, :, i].transpose(0, 4, 1, 3, 2, 5).reshape(64, 16)
                total = total + a @ _operand(kind, b + step, n, turned_b).T
            return total.astype(np.float32)

        return _together((sums, left), compute)

    return product
