"""Kernels for tensor cores run as Python, lane by lane: numba_cuda/ptx and fragments.py for threads of this process.

Each lane is a thread of Python. What lanes of a warp do together, shuffles, votes, pieces of matrices, products, goes
through a table between two meetings of the warp; products are made from registers as the instructions lay them out. So
layouts, addresses, masks and the algorithm are checked without a device; timing and what copies do meanwhile are not.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from flashkit.backends.numba_cuda import params, specialise

NUMPYS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_lane: Any = threading.local()


class Block:
    """A block of threads: its shared memory, poisoned, and where its threads meet. cluster: all blocks that run at the
    same time, itself among them; above 2^24 addresses say whose they are.
    """

    def __init__(self, cluster: list[Block], rank: int, number: int, threads: int, shared: int) -> None:
        self.cluster, self.rank, self.base, self.number = cluster, rank, rank << 24, number
        self.memory = np.full(shared, 0xAB, np.uint8)
        self.meeting = threading.Barrier(threads)
        self.warps = [threading.Barrier(32) for _ in range(threads // 32)]
        self.tables: list[list[Any]] = [[None] * 32 for _ in self.warps]
        self.meetings, self.failed = [self.meeting, *self.warps], list[BaseException]()


def run(first: int, blocks: int, threads: int, shared: int, kernel: Callable[[Any], None], p: Any) -> None:
    """Blocks of a cluster, from number `first` on."""
    cluster: list[Block] = []
    cluster += [Block(cluster, i, first + i, threads, shared) for i in range(blocks)]

    def thread(block: Block, number: int) -> None:
        _lane.block, _lane.thread = block, number
        try:
            with np.errstate(all="ignore"):
                kernel(p)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            for each in cluster:
                each.failed.append(error)
                for barrier in each.meetings:
                    barrier.abort()

    lanes = [threading.Thread(target=thread, args=(block, i)) for block in cluster for i in range(threads)]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    if cluster[0].failed:
        raise cluster[0].failed[0]


def launch(
    name: str, spec: Any, constants: dict[str, Any], shared: int, words: Sequence[int], blocks: int, kernel: str = "",
    module: str = "lanes",
) -> None:  # fmt: skip
    """Run a kernel of a file, that of the same name or another, with so many bytes of shared memory and the words of
    its block of arguments; its tensors lie in this process. module: whose functions the instructions are.
    """
    text = specialise.text(name, spec, constants, "simulated")
    for each_module in ("fragments", "ptx"):
        text = text.replace(f"from flashkit.backends.numba_cuda.{each_module} import *", f"from {module} import *")
    plain = "i32, u32, u64 = int, (lambda x: int(x) & 0xFFFFFFFF), int"
    text = text.replace("i32, u32, u64 = np.int32, np.uint32, np.uint64", plain)
    names: dict[str, Any] = {"__name__": "lanes_kernel"}
    exec(compile(text, f"<{name}, lane by lane>", "exec"), names)
    names |= {"thread_here": thread, "ballot": vote, "all_threads_or": all_threads_or}
    p, function = params.of(words), names[kernel or name]
    (threads, _), _, cluster = function.kernel
    for number in range(0, blocks, cluster):
        run(number, cluster, threads, shared, function, p)


# --- lanes ------------------------------------------------------------------------------------------------------------


def told(x: Any) -> list[Any]:
    """x of all lanes of the warp."""
    warp = _lane.thread // 32
    _lane.block.warps[warp].mbarrier_wait()
    _lane.block.tables[warp][_lane.thread % 32] = x
    _lane.block.warps[warp].mbarrier_wait()
    return list(_lane.block.tables[warp])


def thread() -> int:
    return _lane.thread


def block() -> int:
    return _lane.block.number


def from_lane(x: Any, lane: int) -> Any:
    return told(x)[lane % 32]


from_lane_float = from_lane


def across(x: Any, step: int) -> Any:
    return told(x)[_lane.thread % 32 ^ step]


def vote(condition: Any) -> int:
    return sum(1 << i for i, x in enumerate(told(bool(condition))) if x)


def lowest_one(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def all_lanes(condition: Any) -> bool:
    return all(told(bool(condition)))


def any_lane(condition: Any) -> bool:
    return any(told(bool(condition)))


def lanes_sync() -> None:
    told(None)


def threads_sync() -> None:
    _lane.block.meeting.mbarrier_wait()


def all_threads_or(condition: Any) -> bool:
    _lane.block.any = False
    _lane.block.meeting.mbarrier_wait()
    if condition:
        _lane.block.any = True
    _lane.block.meeting.mbarrier_wait()
    return bool(_lane.block.any)


def opaque(x: Any) -> Any:
    return x


# --- numbers ----------------------------------------------------------------------------------------------------------


def exp2_fast(x: Any) -> Any:
    return np.float32(np.exp2(np.float32(x)))


def log2_fast(x: Any) -> Any:
    return np.log2(np.float32(x))


def reciprocal(x: Any) -> Any:
    return np.float32(1) / np.float32(x)


def greater(x: Any, y: Any) -> Any:
    return np.float32(np.fmax(x, y))


def add(x: Any, y: Any) -> Any:
    return x + y


def as_float(x: Any) -> Any:
    return np.uint32(int(x) & 0xFFFFFFFF).view(np.float32)


def as_int(x: Any) -> Any:
    return np.float32(x).view(np.int32)


def _pack(kind: str) -> Callable[[Any, Any], int]:
    def pack(low: Any, high: Any) -> int:
        first, second = np.array([low, high], np.float32).astype(NUMPYS[kind]).view(np.uint16)
        return int(first) | int(second) << 16

    return pack


pack_float16, pack_bfloat16 = _pack("float16"), _pack("bfloat16")


def widen_float16(x: Any) -> Any:
    return np.float32(np.uint16(x).view(np.float16))


def widen_bfloat16(x: Any) -> Any:
    return np.uint32(int(x) << 16).view(np.float32)


# --- memory -----------------------------------------------------------------------------------------------------------


def shared_address() -> int:
    return int(_lane.block.base)


def _bytes(address: Any, size: int) -> Any:
    at = int(address) - shared_address()
    assert at >= 0 and at + size <= len(_lane.block.memory) and at % size == 0
    return _lane.block.memory[at : at + size]


def load_from(space: str, kind: Any, constant: bool = False) -> Callable[[Any], Any]:
    if str(kind) == "float32":
        return lambda address: _bytes(address, 4).view(np.float32)[0]
    return lambda address: int(_bytes(address, 4).view(np.int32)[0])


def store_to(space: str, kind: Any) -> Callable[[Any, Any], None]:
    def store(address: Any, x: Any) -> None:
        size = kind.bitwidth // 8
        _bytes(address, size)[:] = np.frombuffer((int(x) & 0xFFFFFFFF).to_bytes(4, "little")[:size], np.uint8)

    return store


def cp_async(target: Any, source: Any, place: int, end: int) -> None:
    assert place >= end or int(source) % 16 == 0
    data = ctypes.string_at(int(source), 16) if place < end else bytes(16)
    _bytes(target, 16)[:] = np.frombuffer(data, np.uint8)


def cp_async_if(target: Any, source: Any, place: int, end: int, wanted: int) -> None:
    if wanted:
        cp_async(target, source, place, end)


def cp_async_commit() -> None: ...


def griddepcontrol_wait() -> None: ...


def cp_async_wait(pending: int) -> None: ...


def load_vec(address: Any) -> tuple[Any, ...]:
    return tuple(_bytes(address, 16).view(np.uint32))


def load_two(address: Any) -> tuple[Any, ...]:
    return tuple(_bytes(address, 8).view(np.float32))


_atomic = threading.Lock()


def _changed(address: Any, kind: Any, change: Callable[[Any], Any]) -> Any:
    """A number of memory before it was changed."""
    with _atomic:
        number = np.frombuffer((ctypes.c_char * np.dtype(kind).itemsize).from_address(int(address)), kind)
        before = number[0]
        number[0] = change(before)
    return before


def fetch_add(address: Any, n: int) -> int:
    return int(_changed(address, np.uint32, lambda x: x + np.uint32(n)))


def add_to_four(address: Any, four: Sequence[Any]) -> None:
    assert int(address) % 16 == 0
    for i, x in enumerate(four):
        _changed(address + 4 * i, np.float32, lambda y, x=x: y + x)


def set_bits(address: Any, bits: int) -> None:
    _changed(address, np.uint32, lambda x: x | np.uint32(bits))


set_bits_after = set_bits


def load_now(address: Any) -> int:
    return int(_changed(address, np.uint32, lambda x: x))


def store_four(address: Any, four: Sequence[Any]) -> None:
    _bytes(address, 16)[:] = np.array(four, np.float32).view(np.uint8)


def store_vec(address: Any, four: Sequence[Any]) -> None:
    assert int(address) % 16 == 0
    ctypes.memmove(int(address), np.array(four, np.uint32).tobytes(), 16)


# --- products ---------------------------------------------------------------------------------------------------------


def _matrices(address: Any) -> Any:
    rows = [_bytes(at, 16).view(np.uint16).copy() for at in told(address)]
    lanes_sync()
    return np.array(rows).reshape(4, 8, 8)


def ldmatrix_x4(address: Any) -> tuple[int, ...]:
    g, t = divmod(_lane.thread % 32, 4)
    return tuple(int(m[g, 2 * t]) | int(m[g, 2 * t + 1]) << 16 for m in _matrices(address))


def ldmatrix_x4_trans(address: Any) -> tuple[int, ...]:
    g, t = divmod(_lane.thread % 32, 4)
    return tuple(int(m[2 * t, g]) | int(m[2 * t + 1, g]) << 16 for m in _matrices(address))


def mma(kind: str) -> Callable[..., tuple[Any, ...]]:
    return _product_of_tf32 if kind == "tf32" else _product_of(kind)


def _product_of_tf32(c: Sequence[Any], a: Sequence[int], b0: int, b1: int) -> tuple[Any, ...]:
    def number(word: int) -> Any:  # the last 13 bits are not looked at
        return np.uint32(int(word) & 0xFFFFE000).view(np.float32)

    left, right, sums = (np.zeros(shape, np.float32) for shape in ((16, 8), (8, 8), (16, 8)))
    for lane, registers in enumerate(told((c, a, b0, b1))):
        g, t = divmod(lane, 4)
        for half in range(2):
            right[t + 4 * half, g] = number(registers[2 + half])
            for below in range(2):
                left[g + 8 * below, t + 4 * half] = number(registers[1][below + 2 * half])
            sums[g + 8 * half, 2 * t : 2 * t + 2] = registers[0][2 * half : 2 * half + 2]
    (g, t), result = divmod(_lane.thread % 32, 4), sums + left @ right
    return (*result[g, 2 * t : 2 * t + 2], *result[g + 8, 2 * t : 2 * t + 2])


def _product_of(kind: str) -> Callable[..., tuple[Any, ...]]:
    def numbers(word: int) -> Any:
        return np.array([word & 0xFFFF, word >> 16], np.uint16).view(NUMPYS[kind]).astype(np.float32)

    def product(c: Sequence[Any], a: Sequence[int], b0: int, b1: int) -> tuple[Any, ...]:
        left, right, sums = (np.zeros(shape, np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
        mine = slice(2 * (_lane.thread % 4), 2 * (_lane.thread % 4) + 2)
        for lane, registers in enumerate(told((c, a, b0, b1))):
            g, t = divmod(lane, 4)
            two = slice(2 * t, 2 * t + 2)
            for half in range(2):
                for right_half in range(2):
                    left[g + 8 * half, 8 * right_half :][two] = numbers(registers[1][half + 2 * right_half])
                right[8 * half :][two, g] = numbers(registers[2 + half])
                sums[g + 8 * half, two] = registers[0][2 * half : 2 * half + 2]
        row, result = _lane.thread % 32 // 4, sums + left @ right
        return (*result[row, mine], *result[row + 8, mine])

    return product


# --- tuples and tiles -------------------------------------------------------------------------------------------------


def _row(i: int, rows: Sequence[Any]) -> int:
    return 2 * (i // 8 % (len(rows) // 2)) + i // 2 % 2


def _column(i: int, rows: Sequence[Any]) -> int:
    return i // (4 * len(rows)) * 16 + i // 4 % 2 * 8 + i % 2


def each(f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    return tuple(f(x, rows[_row(i, rows)], rest) for i, x in enumerate(tile))


def each_at(f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    return tuple(f(x, _column(i, rows), rows[_row(i, rows)], rest) for i, x in enumerate(tile))


def pairs_at(f: Any, tile: Any, rows: Any, rest: Any) -> Any:
    made: tuple[Any, ...] = ()
    for i in range(0, len(tile), 2):
        made += f(tile[i], tile[i + 1], _column(i, rows), rows[_row(i, rows)], rest)
    return made


def fold(f: Any, tile: Any, start: Any) -> Any:
    found = list(start)
    for i, x in enumerate(tile):
        found[_row(i, start)] = f(found[_row(i, start)], x)
    return tuple(found)


def join(f: Any, tile: Any) -> Any:
    return tuple(f(tile[i], tile[i + 1]) for i in range(0, len(tile), 2))


def alike(f: Any, values: Any, rest: Any) -> Any:
    return tuple(f(x, rest) for x in values)


def both(f: Any, left: Any, right: Any) -> Any:
    return tuple(map(f, left, right))


def listed(f: Any, count: int, rest: Any) -> Any:
    return tuple(f(i, rest) for i in range(count))


def filled(x: Any, count: int) -> Any:
    return (x,) * count


def part(values: Any, start: int, count: int) -> Any:
    return tuple(values[start : start + count])


def groups(f: Any, size: int, tile: Any, rest: Any) -> Any:
    made = [f(i, tile[i * size : (i + 1) * size], rest) for i in range(len(tile) // size)]
    return None if made[0] is None else tuple(x for piece in made for x in piece)


def chain(f: Any, size: int, values: Any, state: Any, rest: Any) -> Any:
    for i in range(len(values) // size):
        state = f(i, values[i * size : (i + 1) * size], state, rest)
    return state


def repeat(f: Any, count: int, state: Any, rest: Any) -> Any:
    for i in range(count):
        state = f(i, state, rest)
    return state


def scaled(tile: Any, factor: Any) -> Any:
    return tuple(np.float32(x * factor) for x in tile)


def rows_scaled(tile: Any, factors: Any) -> Any:
    return each(lambda x, row, _: np.float32(x * row), tile, factors, None)


def exponentials(tile: Any, shifts: Any, unit: Any) -> Any:
    return each(lambda x, row, _: exp2_fast(x * unit - row), tile, shifts, None)


def row_max(tile: Any, start: Any) -> Any:
    return fold(greater, tile, start)


def row_sum(tile: Any, start: Any) -> Any:
    return fold(add, tile, start)


def across_row(f: Any, rows: Any) -> Any:
    for step in (1, 2):
        rows = tuple(f(x, across(x, step)) for x in rows)
    return rows
