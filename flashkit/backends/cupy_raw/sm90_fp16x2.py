"""float32 for Hopper's tensor cores: tensors as terms of float16, by kernels/fp16x2_split.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...spec import AttentionSpec, Problem
from ..cuda_common import compiler
from ..cuda_common.arguments import Arguments
from ..cuda_common.bwd_preprocess import BwdPreprocess
from ..cuda_common.device import Device
from ..cuda_common.fallback import Fallback
from ..cuda_common.l2_swizzle import heads_per_l2_group
from ..cuda_common.launch import KernelArguments, TensorMap, check_grid, scratch
from ..cuda_common.params import AT
from ..cuda_common.sm90_launch import CHOSEN, WATCHDOG, chunks, padded
from ..cuda_common.tensor_maps import TileCounters, encode
from . import specialise
from .sm80 import Sm80Backward
from .sm90_wgmma import text as products

MAX_DIM = 128
"""Wider sums of a tile and of all tiles do not both fit in registers."""

LEAST_SCORES, LEAST_DIM = 2**23, 32
"""With fewer, the kernels for any tensor cores are faster."""

_ALIGNED = 256  # bytes
_CACHED = 24_000_000  # bytes that blocks read from together, well within the L2 cache
_TOKENS = 8  # of a warp: kernels/fp16x2_split.cu
_TENSORS = 4  # at most
_NUMBERS = 3  # of each query: kernels/fp16x2_backward.cu
_ROWS, _THREADS_BACKWARD = 128, 384  # of a block
_LIST = 4 * 224  # bytes of kernels/sm90.cuh: TileList


def parts(spec: AttentionSpec) -> int:
    """Terms that an element is multiplied as; 1 also for 16-bit elements."""
    return 2 if spec.dtype == "float32" and spec.precision != "tf32" else 1


class Split:
    """Brings tensors into terms, in memory of CuPy's pool that is as large as they are, or half of that."""

    def __init__(self, spec: AttentionSpec, rows: int, device: Device) -> None:
        self.spec, self.rows, self.parts = spec, rows, parts(spec)
        constants = ("PARTS", self.parts), ("ROWS", rows)
        self.library = specialise.library("sm90/fp16x2_split", spec, constants, compiler.target(device.capability))
        self._kernel = self.library.kernel("fp16x2_split", device)

    def terms(self, arguments: Arguments, stream: int, names: Sequence[str], by_row: str) -> tuple[list[Terms], Any]:
        """Enqueue the splitting of q, k, v and perhaps dout; their terms, and the memory of these, to be held until all
        that reads it is enqueued. The arguments get the units. by_row: of which tensor rows have units of their own.
        """
        spec, words, batch = self.spec, arguments.words, arguments.batch
        found, ends, at, blocks = list[tuple[Terms, int, int]](), [0] * _TENSORS, 0, 0
        for i, name in enumerate(names):
            of_q = name in ("q", "dout")
            heads, tokens = (arguments.heads, arguments.n_q) if of_q else (arguments.heads_kv, arguments.n_k)
            columns = self.parts * -(-(spec.head_dim if name in ("q", "k") else spec.head_dim_v) // 64) * 64
            tiles = -(-tokens // self.rows)
            numbers = tiles * self.rows if name == by_row else tiles  # units of a head
            unit = at + -(-2 * batch * heads * tokens * columns // _ALIGNED) * _ALIGNED
            found.append((Terms(at, columns, heads, tokens, batch), unit, numbers))
            at = unit + -(-4 * batch * heads * numbers // _ALIGNED) * _ALIGNED
            blocks += batch * heads * tiles
            ends[i:] = [blocks] * (_TENSORS - i)
        check_grid(blocks)
        memory = scratch(at, "int8")
        block, base = list[int](), memory.data.ptr
        for name, (terms, unit, numbers) in zip(names, found):
            terms.address += base
            units = base + unit, terms.heads * numbers, numbers, 1
            words[AT[f"{name}_unit"] : AT[f"{name}_unit"] + 4] = list(units)
            lengths = words[AT["kv_lengths"]] if name in ("k", "v") else 0
            block += [*words[AT[name] : AT[name] + 4], *terms.place, *units, lengths, terms.heads, terms.tokens]
            block.append(name == by_row)
        block += [0] * (len(block) // len(names) * (_TENSORS - len(names)))
        self._kernel.launch(blocks, 32 * self.rows // _TOKENS, KernelArguments([*block, *ends]), stream)
        return [terms for terms, _, _ in found], memory


@dataclass
class Terms:
    """Where the terms of a tensor lie."""

    address: int
    columns: int
    heads: int
    tokens: int
    batch: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Address and strides, in elements."""
        return self.address, self.heads * self.tokens * self.columns, self.tokens * self.columns, self.columns

    def map(self, rows: int, pack: int = 1) -> TensorMap:
        """The tensor map for boxes of `rows` rows, of `pack` heads."""
        address, *strides = self.place
        return encode("float16", *strides, self.columns, pack, self.heads, self.tokens, self.batch, rows, address)


@dataclass(frozen=True)
class Sm90Float32BackwardTile:
    """Rows that a block of threads keeps and tokens that it loads at once; how many of such tiles, and of rows, are in
    shared memory: kernels/fp16x2_backward.cu. Rows are queries for dQ, keys for dK and dV.
    """

    block_k: int
    stages: int = 2
    row_buffers: int = 2

    def __post_init__(self) -> None:
        if self.block_k % 16 or not 16 <= self.block_k <= 128 or self.stages < 2:
            raise ValueError(f"{self=}: block_k is a multiple of 16 up to 128, stages are two or more")
        if self.row_buffers not in (1, 2):
            raise ValueError(f"{self=}: row_buffers are one or two")

    @property
    def block_q(self) -> int:
        return _ROWS

    def shared_memory(self, spec: AttentionSpec, of_queries: bool) -> int:
        """Bytes of a block of threads."""
        row = 128 * parts(spec) * (chunks(spec.head_dim) + chunks(spec.head_dim_v))
        numbers = 0 if of_queries else 4 * _NUMBERS
        tiles = self.row_buffers * (_ROWS * row + 28) + self.stages * (self.block_k * (row + numbers) + 24)
        return tiles + _LIST

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return all(self.shared_memory(spec, of_queries) <= device.shared_per_block for of_queries in (True, False))

    def source(self, spec: AttentionSpec, of_queries: bool) -> tuple[dict[str, int], str]:
        """Constants and generated functions of kernels/fp16x2_backward.cu."""
        dims = [padded(dim) for dim in (spec.head_dim, *[spec.head_dim_v] * (not of_queries))]
        constants = {
            "OF_QUERIES": of_queries, "BLOCK": self.block_k, "STAGES": self.stages, "ROW_BUFFERS": self.row_buffers,
            "PARTS": parts(spec), "CONSUMER_REGISTERS": 232, "PRODUCER_REGISTERS": 40, "WATCHDOG": WATCHDOG,
        }  # fmt: skip
        widths = {min(64, dim - first) for dim in dims for first in range(0, dim, 64)}
        return constants, products("float16", [self.block_k], widths)


def backward_tile(spec: AttentionSpec) -> Sm90Float32BackwardTile:
    """What does well on an H200."""
    if max(spec.head_dim, spec.head_dim_v) <= 64:
        return Sm90Float32BackwardTile(64)
    return Sm90Float32BackwardTile(48, row_buffers=2 if parts(spec) == 1 else 1)


def backward_candidates(spec: AttentionSpec, device: Device) -> list[Sm90Float32BackwardTile]:
    chosen = backward_tile(spec)
    each = chosen, *(replace(chosen, block_k=chosen.block_k + more) for more in (32, -16))
    return [tile for tile in each if tile.fits(spec, device)]


class Sm90Float32Backward:
    """The backward pass: rows prepared, tensors split, then a kernel for dQ and one for dK and dV."""

    def __init__(
        self, problem: Problem, device: Device, tile: Sm90Float32BackwardTile | None = None, why: str = CHOSEN
    ) -> None:
        spec = problem.spec
        self.problem, self.device, self.tile, self.why = problem, device, tile or backward_tile(spec), why
        arch, block = compiler.target(device.capability), self.tile.block_k
        self.split = Split(spec, block, device)
        self.rows = BwdPreprocess(specialise.library, spec, device)
        self.libraries, self._kernels = [self.split.library, self.rows.library], []
        for of_queries in (True, False):
            constants, text = self.tile.source(spec, of_queries)
            library = specialise.library("sm90/fp16x2_backward", spec, tuple(constants.items()), arch, text)
            self.libraries.append(library)
            shared = self.tile.shared_memory(spec, of_queries)
            self._kernels.append((of_queries, library.kernel("fp16x2_backward", device, shared)))
        self._numbers = library.kernel("fp16x2_row_factors", device)
        self._tickets = TileCounters.of(device)
        self._spare = Fallback(partial(Sm80Backward, problem, device), spec, device, "backward")

    def run(self, arguments: Arguments, stream: int) -> None:
        if not (arguments.n_q and arguments.n_k and arguments.positive_scale):
            return self._spare.run(arguments, stream)
        block, batch = self.tile.block_k, arguments.batch
        self.rows.prepare(arguments, stream, block)
        (q, k, v, dout), held = self.split.terms(arguments, stream, ("q", "k", "v", "dout"), "dout")
        queries = -(-arguments.n_q // block) * block
        numbers = scratch((batch, arguments.heads, queries, _NUMBERS), "float32")
        arguments.tensors(row_factors=numbers)
        self._numbers.launch(-(-batch * arguments.heads * queries // 256), 256, arguments, stream)
        for of_queries, kernel in self._kernels:
            rows, columns = ((q, dout), (k, v)) if of_queries else ((k, v), (q, dout))
            heads = rows[0].heads * batch
            items = -(-rows[0].tokens // _ROWS) * heads
            check_grid(items)
            maps = [*(each.map(64) for each in rows), *(each.map(block) for each in columns)]
            bytes_of_head = sum(2 * each.columns * each.tokens for each in columns) * columns[0].heads // rows[0].heads
            together = heads_per_l2_group(heads, _CACHED // bytes_of_head) if arguments.spec.mask is not None else 1
            arguments.set(heads_per_l2_group=together, tile_counter=self._tickets.next(stream))
            if items:
                blocks = min(items, self.device.sms)
                kernel.launch(blocks, _THREADS_BACKWARD, arguments.with_maps(maps), stream)
        self.rows.finish(arguments, stream)
        del held, numbers  # what the kernels read, until they are enqueued
        return None
