"""A device that runs PTX: memory, launches on streams, multiprocessors that blocks come to."""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import ptx
from .machine import Machine

BASE = 1 << 34
"""Address of the first byte of memory."""

PATIENCE = 120
"""Seconds in which a block has to end somewhere."""

WHY = {
    -1: "an address outside of what is allocated", -2: "a misaligned address",
    -3: "lanes that have to be together are not",
    -4: "trap", -5: "an unknown operation", -6: "too many copies or products are pending",
    -7: "a barrier that more come to than it is for, or that is none",
    -8: "the block ends before a store has read its source",
}  # fmt: skip

_every = np.arange(65536, dtype=np.uint16)
HALVES = np.stack([_every.view(t).astype(np.float32) for t in (np.float16, ml_dtypes.bfloat16)])
MACHINE = Machine()


class EmulationError(RuntimeError):
    """A kernel did what a device would not."""


class Memory:
    """Allocations, each apart from the next; what is not allocated is known."""

    APART = 256

    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.allowed = np.zeros(size, np.bool_)
        self.free = [(0, size)]
        self.freed: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """The offset of so many bytes, poisoned."""
        wanted = -(-max(size, 1) // self.APART) * self.APART + self.APART
        for i, (start, room) in enumerate(self.free):
            if room >= wanted:
                self.free[i : i + 1] = [(start + wanted, room - wanted)] if room > wanted else []
                self.bytes[start : start + size] = 0xFF
                self.allowed[start : start + size] = True
                return start
        raise MemoryError(f"{size} bytes of an emulated device")

    def give(self, start: int, size: int) -> None:
        """Back, once all that was enqueued is done."""
        self.freed.append((start, size))

    def settle(self) -> None:
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
    begun: int = 0
    ended: int = 0
    allowed: set[int] = field(default_factory=set)  # blocks that allow the next kernel, or have ended
    place: int = 0

    @property
    def done(self) -> bool:
        return self.ended == self.blocks


class Turn(NamedTuple):
    """What the interpreter knows of a block; its numbers and small arrays are laid out as interpreter.py says."""

    code: np.ndarray
    operands: np.ndarray
    hits: np.ndarray
    registers: np.ndarray
    counters: np.ndarray
    state: np.ndarray
    products: np.ndarray
    local: np.ndarray
    shared: np.ndarray  # of all blocks of the cluster
    rank: int
    barriers: np.ndarray
    cluster: np.ndarray
    queue: np.ndarray
    parts: np.ndarray  # of the queue's stores what was read
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


class Block:
    """Of a launch, on a multiprocessor."""

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
        self.flags = np.zeros(2, np.int64)  # whether the kernel before has ended; whether the next one may begin
        self.turn = Turn(
            entry.code, entry.operands, entry.hits, registers, self.counters,
            state=np.zeros((warps, 8), np.int64), products=np.zeros((warps, 96, 8), np.int64),
            local=np.full((warps, 32, max(8, entry.local)), 0xFF, np.uint8), shared=shared, rank=rank,
            barriers=np.zeros((16, 4), np.int64), cluster=cluster, queue=np.zeros((128, 16), np.int64),
            parts=np.zeros((128, 32768), np.uint8), groups=np.zeros((warps, 32), np.int64), flags=self.flags,
            memory=device.memory.bytes, base=BASE, allowed=device.memory.allowed, halves=HALVES, rng=device.rng,
            info=device.info, left=device.left, right=device.right,
        )  # fmt: skip


@dataclass
class Multiprocessor:
    number: int
    shared: int
    threads: int = 2048
    registers: int = 65536
    blocks: int = 32

    def room(self, launch: Launch, sign: int = 0) -> bool:
        """Whether a block fits; takes it (-1) or gives it back (1)."""
        shared = launch.shared + launch.entry.shared + 1024
        registers = 65536 // max(1, launch.entry.together)
        fits = (
            min(self.shared - shared, self.threads - launch.threads, self.registers - registers, self.blocks - 1) >= 0
        )
        self.shared, self.threads = self.shared + sign * shared, self.threads + sign * launch.threads
        self.registers, self.blocks = self.registers + sign * registers, self.blocks + sign
        return fits


class Device:
    """What it is enqueued to do it does when somebody looks (`flush`). Chance, by `seed`, orders what is concurrent."""

    def __init__(self, sms: int = 3, size: int = 1 << 31, seed: int = 1) -> None:
        self.memory, self.sms, self.pending = Memory(size), sms, list[Launch]()
        self.info = np.zeros(16, np.int64)
        self.left, self.right = np.zeros((16, 16), np.float32), np.zeros((256, 16), np.float32)  # of a product
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.rng = np.array([self.random.integers(1, 2**63)], np.uint64)

    def allocate(self, size: int) -> int:
        """An address."""
        return self.memory.take(size) + BASE

    def enqueue(self, launch: Launch) -> None:
        self.pending.append(launch)

    def flush(self) -> None:
        launches, self.pending = self.pending, []
        if launches:
            self._run(launches)
        if self.memory.freed:
            self.memory.settle()

    def _run(self, launches: list[Launch]) -> None:
        sms = [Multiprocessor(i, 233472) for i in range(self.sms)]
        resident: list[Block] = []
        haste = int(self.random.choice([0, 1, 5, 50]))  # of 100 turns, in how many a copy goes on
        run, last = MACHINE.run, time.monotonic()
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
            found = run(int(self.random.integers(1, 80)), haste, block.turn)
            if block.flags[1]:
                block.launch.allowed.add(block.number)
            if found < 0:
                raise EmulationError(self._said(block, self.info, found))
            if found == 2:
                last = time.monotonic()
                resident.remove(block)
                block.sm.room(block.launch, 1)
                block.launch.ended += 1
                block.launch.allowed.add(block.number)
            elif time.monotonic() - last > PATIENCE:
                raise EmulationError("nothing ends; " + "; ".join(self._where(block) for block in resident))

    def _begin(self, launch: Launch, first: bool, sms: list[Multiprocessor], resident: list[Block]) -> None:
        together = launch.entry.cluster
        while launch.begun < launch.blocks:
            found = []
            for sm in self.random.permutation(len(sms)):  # type: ignore[assignment]
                while len(found) < together and sms[sm].room(launch):
                    sms[sm].room(launch, -1)
                    found.append(sms[sm])
            if len(found) < together:
                for sm in found:
                    sm.room(launch, 1)
                return
            size = -(-(launch.entry.shared + launch.shared) // 8) * 8 + 8
            shared, cluster = np.full((together, size), 0xFF, np.uint8), np.zeros(4, np.int64)
            for rank, sm in enumerate(found):
                block = Block(self, launch, launch.begun, rank, shared, cluster, sm)
                block.flags[0] = first
                launch.begun += 1
                resident.append(block)

    def _said(self, block: Block, info: np.ndarray, code: int) -> str:
        entry = block.launch.entry
        line = entry.text[info[1]] if 0 <= info[1] < len(entry.text) else "?"
        if code == -3:
            lines = {int(c): entry.text[c][:80] for c in block.counters[info[2]] if c >= 0}
            return f"{entry.name}, block {block.number}, warp {info[2]}: {WHY[code]}: {lines}"
        where = f"{entry.name}, block {block.number}, warp {info[2]}, lane {info[3]}, row {info[1]}"
        return f"{where}: {WHY[code]} ({info[4]:#x}): {line[:200]}"

    def _where(self, block: Block) -> str:
        at = sorted({int(c) for c in block.counters.ravel() if c >= 0})
        return f"{block.launch.entry.name} {block.number}: " + ", ".join(
            block.launch.entry.text[c][:60] for c in at[:6]
        )
