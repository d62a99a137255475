"""The device: global memory, a stream of launches, and SMs on which CTAs are resident."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import ptx
from .errors import CODES, EmulationError, message
from .machine import Machine

BASE = 1 << 34
"""Address of the first byte of global memory."""

DONE = 2
"""What the interpreter returns when a CTA has ended."""

PATIENCE = 120
"""Seconds after which a CTA must have ended somewhere on the device."""

_every = np.arange(65536, dtype=np.uint16)
_halves = [_every.view(t).astype(np.float32) for t in (np.float16, ml_dtypes.bfloat16)]
_codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
HALVES = np.stack([*_halves, np.zeros_like(_halves[0]), np.resize(_codes, len(_every))])
"""The number of each code, by the types of interpreter/matrices.py."""

MACHINE = Machine()


class Memory:
    """Global memory. `allowed` marks allocated bytes; a gap separates allocations."""

    APART = 256

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.allowed = np.zeros(size, np.bool_)
        self.free = [(0, size)]
        self.freed: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """The offset of an allocation, filled with NaN."""
        wanted = -(-max(size, 1) // self.APART) * self.APART + self.APART
        for i, (start, room) in enumerate(self.free):
            if room >= wanted:
                self.free[i : i + 1] = [(start + wanted, room - wanted)] if room > wanted else []
                self.bytes[start : start + size] = 0xFF
                self.allowed[start : start + size] = True
                return start
        raise MemoryError(f"{size} bytes of an emulated device")

    def give(self, start: int, size: int) -> None:
        """Free an allocation when all that was enqueued has run."""
        self.freed.append((start, size))

    def reclaim(self) -> None:
        while self.freed:
            start, size = self.freed.pop()
            self.allowed[start : start + size] = False
            room = -(-max(size, 1) // self.APART) * self.APART + self.APART
            bisect.insort(self.free, (start, room))
        merged: list[tuple[int, int]] = []
        for start, room in self.free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = merged[-1][0], merged[-1][1] + room
            else:
                merged.append((start, room))
        self.free = merged


@dataclass
class Launch:
    entry: ptx.Entry
    blocks: int
    threads: int
    shared: int
    parameters: bytes
    early: bool
    begun: int = 0  # CTAs
    ended: int = 0
    allowed: set[int] = field(default_factory=set)  # CTAs that let the next kernel begin, or have ended
    place: int = 0

    @property
    def done(self) -> bool:
        return self.ended == self.blocks


class State(NamedTuple):
    """A CTA as the interpreter sees it; the files of interpreter/ say how the small arrays are laid out."""

    code: np.ndarray
    operands: np.ndarray
    hits: np.ndarray
    registers: np.ndarray
    counters: np.ndarray
    state: np.ndarray
    wgmmas: np.ndarray
    local: np.ndarray
    shared: np.ndarray  # of all blocks of the cluster
    rank: int
    barriers: np.ndarray
    cluster: np.ndarray
    queue: np.ndarray
    buffers: np.ndarray  # what the stores of the queue have read
    groups: np.ndarray
    flags: np.ndarray
    memory: np.ndarray
    base: int
    allowed: np.ndarray
    halves: np.ndarray
    rng: np.ndarray
    info: np.ndarray  # of an error
    left: np.ndarray
    right: np.ndarray
    scratch: np.ndarray


BUFFERS: list[np.ndarray] = []
"""Those of CTAs that have ended: their memory is written before it is read."""


class Block:
    """A CTA, resident on an SM."""

    def __init__(
        self, device: Device, launch: Launch, number: int, rank: int, shared: np.ndarray, cluster: np.ndarray,
        sm: Multiprocessor,
    ) -> None:  # fmt: skip
        self.launch, self.number, self.sm, entry = launch, number, sm, launch.entry
        warps = -(-launch.threads // 32)
        registers = np.full((warps, entry.registers, 32), 0xA5A5A5A5A5A5A5A5, np.uint64)
        threads = np.arange(warps * 32, dtype=np.uint64).reshape(warps, 32)
        values: dict[str, Any] = {
            "%tid.x": threads, "%ntid.x": launch.threads, "%ctaid.x": number, "%nctaid.x": launch.blocks,
            "%laneid": threads % 32, "%warpid": threads // 32, "%cluster_ctarank": rank, "%smid": sm.number,
            "PARAMETERS": launch.place + BASE, "SHARED": rank << 24,
        }  # fmt: skip
        for register, name in enumerate(ptx.SPECIAL):
            registers[:, register] = values.get(name, 0)
        for register, bits in entry.constants:
            registers[:, register] = np.uint64(bits)
        self.counters = np.zeros((warps, 32), np.int32)
        self.counters[threads >= launch.threads] = -1
        self.flags = np.zeros(2, np.int64)  # whether the previous kernel has ended; whether the next one may begin
        self.state = State(
            entry.code, entry.operands, entry.hits, registers, self.counters,
            state=np.zeros((warps, 8 + 64 + 1), np.int64), wgmmas=np.zeros((warps, 96, 8), np.int64),
            local=np.full((warps, 32, max(8, entry.local)), 0xFF, np.uint8), shared=shared, rank=rank,
            barriers=np.zeros((16, 4), np.int64), cluster=cluster, queue=np.zeros((512, 16), np.int64),
            buffers=BUFFERS.pop() if BUFFERS else np.zeros((512, 32768), np.uint8),
            groups=np.zeros((warps, 32), np.int64), flags=self.flags,
            memory=device.memory.bytes, base=BASE, allowed=device.memory.allowed, halves=HALVES, rng=device.rng,
            info=device.info, left=device.left, right=device.right, scratch=device.scratch,
        )  # fmt: skip


@dataclass
class Multiprocessor:
    number: int
    shared: int
    threads: int = 2048
    registers: int = 65536
    blocks: int = 32

    def room(self, launch: Launch, sign: int = 0) -> bool:
        """Whether a CTA fits; sign -1 takes its room, 1 returns it."""
        shared = launch.shared + launch.entry.shared + 1024
        registers = 65536 // max(1, launch.entry.blocks_per_sm)
        fits = (
            min(self.shared - shared, self.threads - launch.threads, self.registers - registers, self.blocks - 1) >= 0
        )
        self.shared, self.threads = self.shared + sign * shared, self.threads + sign * launch.threads
        self.registers, self.blocks = self.registers + sign * registers, self.blocks + sign
        return fits


class Device:
    """Runs the enqueued launches when a result is read (`flush`). A generator, by `seed`, orders what is concurrent."""

    def __init__(self, sms: int = 3, size: int = 1 << 31, seed: int = 1) -> None:
        self.memory, self.sms, self.pending = Memory(size), sms, list[Launch]()
        self.base = BASE
        self.launched: list[str] = []  # names of the kernels, in order
        self.recorded: list[Launch | Callable[[], None]] | None = None  # what a graph captures
        self.info = np.zeros(16, np.int64)
        self.left, self.right = np.zeros((16, 32), np.float32), np.zeros((256, 32), np.float32)  # of a product
        self.scratch = np.zeros(64, np.uint64)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rng = np.array([self.random.integers(1, 2**63)], np.uint64)

    def allocate(self, size: int) -> int:
        """An address."""
        return self.memory.take(size) + BASE

    def enqueue(self, launch: Launch) -> None:
        if self.recorded is not None:
            self.recorded.append(launch)
            return
        self.launched.append(launch.entry.name)
        self.pending.append(launch)

    def copied(self, target: np.ndarray, source: np.ndarray) -> None:
        """Write to an array of the device, now and whenever a graph that captures this runs."""
        target[...] = source
        if self.recorded is not None:
            self.recorded.append(lambda: target.__setitem__(..., source))

    def replay(self, recorded: list[Launch | Callable[[], None]]) -> None:
        """Enqueue what a graph has captured."""
        for each in recorded:
            if isinstance(each, Launch):
                self.enqueue(replace(each, begun=0, ended=0, allowed=set()))
            else:
                self.flush()
                each()

    def flush(self) -> None:
        launches, self.pending = self.pending, []
        if launches:
            self._run(launches)
        if self.memory.freed:
            self.memory.reclaim()

    def _run(self, launches: list[Launch]) -> None:
        sms = [Multiprocessor(i, 233472) for i in range(self.sms)]
        resident: list[Block] = []
        copy_rate = int(self.random.choice([0, 1, 5, 50]))  # of 100 turns, in how many a copy proceeds
        last = 0.0
        for launch in launches:
            launch.place = self.memory.take(len(launch.parameters))
            self.memory.bytes[launch.place : launch.place + len(launch.parameters)] = np.frombuffer(
                launch.parameters, np.uint8
            )
        while launches:
            while launches and launches[0].done:
                launch = launches.pop(0)
                self.memory.give(launch.place, len(launch.parameters))
                for block in resident:
                    if launches and block.launch is launches[0]:
                        block.flags[0] = 1
            for i, launch in enumerate(launches[:2]):
                before = launches[0]
                if i == 1 and not (
                    launch.early and before.begun == before.blocks and len(before.allowed) == before.blocks
                ):
                    continue
                self._begin(launch, i == 0, sms, resident)
            if not launches:
                break
            if not resident:
                raise EmulationError(f"no block of {launches[0].entry.name} finds room")
            block = resident[int(self.random.integers(len(resident)))]
            run = MACHINE.run(block.state)
            last = last or time.monotonic()  # not while the interpreter is compiled
            found = run(int(self.random.integers(1, 80)), copy_rate, block.state)
            if block.flags[1]:
                block.launch.allowed.add(block.number)
            if found < 0:
                raise EmulationError(self._describe(block, self.info, found))
            if found == DONE:
                last = time.monotonic()
                resident.remove(block)
                BUFFERS.append(block.state.buffers)
                block.sm.room(block.launch, 1)
                block.launch.ended += 1
                block.launch.allowed.add(block.number)
            elif time.monotonic() - last > PATIENCE:
                raise EmulationError("nothing ends; " + "; ".join(self._position(block) for block in resident))

    def _begin(self, launch: Launch, first: bool, sms: list[Multiprocessor], resident: list[Block]) -> None:
        size_of_cluster = launch.entry.cluster
        while launch.begun < launch.blocks:
            found = []
            for sm in self.random.permutation(len(sms)):  # type: ignore[assignment]
                while len(found) < size_of_cluster and sms[sm].room(launch):
                    sms[sm].room(launch, -1)
                    found.append(sms[sm])
            if len(found) < size_of_cluster:
                for sm in found:
                    sm.room(launch, 1)
                return
            size = -(-(launch.entry.shared + launch.shared) // 8) * 8 + 8
            shared, cluster = np.full((size_of_cluster, size), 0xFF, np.uint8), np.zeros(4, np.int64)
            for rank, sm in enumerate(found):
                block = Block(self, launch, launch.begun, rank, shared, cluster, sm)
                block.flags[0] = first
                launch.begun += 1
                resident.append(block)

    def _describe(self, block: Block, info: np.ndarray, code: int) -> str:
        entry = block.launch.entry
        line = entry.text[info[1]] if 0 <= info[1] < len(entry.text) else "?"
        if code == CODES["DIVERGED"]:
            lines = {int(c): entry.text[c][:80] for c in block.counters[info[2]] if c >= 0}
            return f"{entry.name}, block {block.number}, warp {info[2]}: {message(code)}: {lines}"
        where = f"{entry.name}, block {block.number}, warp {info[2]}, lane {info[3]}, row {info[1]}"
        return f"{where}: {message(code)} ({info[4]:#x}): {line[:200]}"

    def _position(self, block: Block) -> str:
        at = sorted({int(c) for c in block.counters.ravel() if c >= 0})
        return f"{block.launch.entry.name} {block.number}: " + ", ".join(
            block.launch.entry.text[c][:60] for c in at[:6]
        )
