"""FP16x2: float32 on Hopper's tensor cores, as float16 terms that kernels/sm90/fp16x2_convert.cu makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ...spec import AttentionSpec, Problem
from ..cuda_common.arguments import Arguments
from ..cuda_common.bwd_preprocess import BwdPreprocess
from ..cuda_common.device import Device
from ..cuda_common.generation import Choice, Generation, Kind, Pass, TileTables
from ..cuda_common.launch import Kernel, KernelArguments, TensorMap, check_grid, scratch
from ..cuda_common.memory import SmemLayout, SmemTile, Workspace, heads_per_l2_group
from ..cuda_common.params import AT
from ..cuda_common.sm90_launch import WATCHDOG, chunks, padded
from ..cuda_common.tensor_maps import TileCounters, encode
from .sm90_wgmma import text as wgmma_functions

MAX_DIM = 128
"""With wider heads the accumulators of a tile and of the work tile do not both fit in registers."""

MIN_SCORES, MIN_DIM = 2**23, 32
"""With fewer, the conversion takes longer than the products save over the sm80 kernels."""

_ALIGNED = 256  # bytes
_L2_BYTES = 24_000_000  # of columns that CTAs read at the same time, well within the L2 cache
_WARP_TOKENS = 8  # of a warp: kernels/sm90/fp16x2_convert.cu
_MAX_TENSORS = 4
_ROW_FACTORS = 3  # floats for each query: kernels/sm90/fp16x2_backward.cu
_ROWS, _BACKWARD_THREADS = 128, 384  # of a CTA
_LIST_BYTES = 4 * 224  # kernels/sm90/pipeline.cuh: TileList


def num_terms(spec: AttentionSpec) -> int:
    """Terms that an element is multiplied as; 1 also for 16-bit elements."""
    return 2 if spec.dtype == "float32" and spec.precision != "tf32" else 1


class Fp16x2Conversion:
    """Converts tensors to terms, in CuPy's memory pool: as many bytes as the tensors, or half of them for one term."""

    def __init__(self, of: Pass, rows: int) -> None:
        self.rows, self.num_terms = rows, num_terms(of.spec)
        library = of.compiled("sm90/fp16x2_convert", {"NUM_TERMS": self.num_terms, "ROWS": rows})
        self._kernel = library.kernel("fp16x2_convert", of.device)

    def terms(self, arguments: Arguments, stream: int, names: Sequence[str], by_row: str) -> tuple[list[Terms], Any]:
        """Enqueue the conversion of q, k, v and perhaps dout, and put their scales into the arguments.

        Returns the terms and the memory that holds them, to be kept until all kernels that read it are enqueued.
        Rows of the tensor `by_row` have a scale each, the others one for a tile.
        """
        words, rows = arguments.words, self.rows
        terms = [Terms.of(arguments, name, self.num_terms) for name in names]
        tiles = [-(-each.tokens // rows) for each in terms]  # of a head, and its scales
        scales = [n * rows if name == by_row else n for name, n in zip(names, tiles)]
        ends = list(accumulate(each.batch * each.heads * n for each, n in zip(terms, tiles)))
        check_grid(ends[-1])
        memory, at = allocated(terms, [4 * each.batch * each.heads * n for each, n in zip(terms, scales)])
        block = list[int]()
        for name, each, address, n in zip(names, terms, at, scales):
            scale = address, each.heads * n, n, 1
            words[AT[f"{name}_scale"] : AT[f"{name}_scale"] + 4] = list(scale)
            block += [*each.words(arguments, name, *scale), name == by_row]
        absent = _MAX_TENSORS - len(names)
        block += [0] * (len(block) // len(names) * absent)
        block += [*ends, *ends[-1:] * absent, words[AT["fallback"]]]
        self._kernel.launch(ends[-1], 32 * rows // _WARP_TOKENS, KernelArguments(block), stream)
        return terms, memory


@dataclass
class Terms:
    """The terms of a tensor in memory: [batch][heads][tokens][columns] of float16."""

    columns: int
    heads: int
    tokens: int
    batch: int
    address: int = 0

    @classmethod
    def of(cls, arguments: Arguments, name: str, num_terms: int = 1) -> Terms:
        """Of a tensor of a call, without memory."""
        spec, of_queries = arguments.spec, name in ("q", "dout")
        heads, tokens = (arguments.heads, arguments.n_q) if of_queries else (arguments.heads_kv, arguments.n_k)
        columns = 64 * num_terms * chunks(spec.head_dim if name in ("q", "k") else spec.head_dim_v)
        return cls(columns, heads, tokens, arguments.batch)

    def words(self, arguments: Arguments, name: str, *scale: int) -> list[int]:
        """What a conversion kernel gets: tensor, terms, scales if it has them, lengths of keys or 0, heads, tokens."""
        tensor, lengths = arguments.words[AT[name] : AT[name] + 4], arguments.words[AT["kv_lengths"]]
        return [*tensor, *self.place, *scale, lengths * (name in ("k", "v")), self.heads, self.tokens]

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Address and strides, in elements."""
        return self.address, self.heads * self.tokens * self.columns, self.tokens * self.columns, self.columns

    def map(self, rows: int, pack: int = 1) -> TensorMap:
        """The tensor map for boxes of `rows` rows, of `pack` heads."""
        address, *strides = self.place
        return encode("float16", *strides, self.columns, pack, self.heads, self.tokens, self.batch, rows, address)


def allocated(terms: Sequence[Terms], more: Sequence[int] = ()) -> tuple[Any, list[int]]:
    """Memory for terms, whose addresses are set, and the addresses of `more` bytes each behind them."""
    sizes = [*(2 * each.batch * each.heads * each.tokens * each.columns for each in terms), *more]
    begins = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
    memory = scratch(begins.pop(), "int8")
    addresses = [memory.data.ptr + each for each in begins]
    for each, address in zip(terms, addresses):
        each.address = address
    return memory, addresses[len(terms) :]


@dataclass(frozen=True)
class Sm90Float32BackwardTile(SmemTile):
    """A tile of kernels/sm90/fp16x2_backward.cu: a CTA keeps 128 rows and loads `block_k` tokens at a time.

    Rows are queries for dQ, and keys for dK and dV. `stages` tiles of columns and `row_buffers` tiles of rows are in
    shared memory at the same time.
    """

    block_k: int
    stages: int = 2
    row_buffers: int = 2

    def __post_init__(self) -> None:
        if self.block_k % 16 or not 16 <= self.block_k <= 128 or self.stages < 2:
            raise ValueError(f"{self=}: expected block_k a multiple of 16 up to 128 and two stages or more")
        if self.row_buffers not in (1, 2):
            raise ValueError(f"{self=}: expected one or two row_buffers")

    @property
    def block_q(self) -> int:
        return _ROWS

    def smem(self, spec: AttentionSpec, dq_kernel: bool = False) -> SmemLayout:
        """The map of a CTA's shared memory: kernels/sm90/fp16x2_bwd_producer.cuh."""
        first, second = (128 * num_terms(spec) * chunks(dim) for dim in (spec.head_dim, spec.head_dim_v))
        smem, barriers = SmemLayout(), 16  # a full and an empty one
        smem.add("A1", self.row_buffers * _ROWS * first)
        smem.add("A2", self.row_buffers * _ROWS * second)
        smem.add("B1", self.stages * self.block_k * first)
        smem.add("B2", self.stages * self.block_k * second)
        smem.add("ROW_FACTORS", 0 if dq_kernel else self.stages * self.block_k * 4 * _ROW_FACTORS)
        smem.add("COLUMNS_PIPE", barriers * self.stages)
        smem.add("ROWS_PIPE", barriers * self.row_buffers)
        smem.add("TILE_DESCS", 8 * self.stages)
        smem.add("WORK_TILES", 12 * self.row_buffers)
        smem.add("LIST", _LIST_BYTES)
        return smem

    def shared_memory(self, spec: AttentionSpec, dq_kernel: bool = False) -> int:
        """Bytes of shared memory of a CTA."""
        return self.smem(spec, dq_kernel).bytes

    def fits(self, spec: AttentionSpec, device: Device) -> bool:
        return all(self.shared_memory(spec, dq_kernel) <= device.shared_per_block for dq_kernel in (True, False))

    def source(self, spec: AttentionSpec, dq_kernel: bool) -> tuple[dict[str, int], str]:
        """Constants and generated functions of kernels/sm90/fp16x2_backward.cu."""
        dims = [padded(dim) for dim in (spec.head_dim, *[spec.head_dim_v] * (not dq_kernel))]
        constants = {
            "DQ_KERNEL": dq_kernel, "BLOCK_COLUMNS": self.block_k, "STAGES": self.stages,
            "ROW_STAGES": self.row_buffers, "NUM_TERMS": num_terms(spec), "CONSUMER_REGISTERS": 232,
            "PRODUCER_REGISTERS": 40, "WATCHDOG": WATCHDOG, **self.smem(spec, dq_kernel).constants(),
        }  # fmt: skip
        widths = {min(64, dim - first) for dim in dims for first in range(0, dim, 64)}
        return constants, wgmma_functions("float16", [self.block_k], widths)


def backward_tiles(problem: Problem, device: Device) -> list[Sm90Float32BackwardTile]:
    """Tiles worth measuring, of which some may not fit."""
    narrow = max(problem.spec.head_dim, problem.spec.head_dim_v) <= 64
    buffers = 2 if narrow or num_terms(problem.spec) == 1 else 1
    return [Sm90Float32BackwardTile(keys, row_buffers=buffers) for keys in ((64, 96, 48) if narrow else (48, 80, 32))]


class Sm90Float32Backward(Pass):
    """The backward pass: preprocess, conversion, then a kernel for dQ and one for dK and dV."""

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        spec, device, self._kernels = self.spec, self.device, list[tuple[bool, Kernel]]()
        self.conversion, self.preprocess = Fp16x2Conversion(self, self.tile.block_k), BwdPreprocess(self)
        for dq_kernel in (True, False):
            library = self.compiled("sm90/fp16x2_backward", *self.tile.source(spec, dq_kernel))
            shared = self.tile.shared_memory(spec, dq_kernel)
            self._kernels.append((dq_kernel, library.kernel("fp16x2_backward", device, shared)))
        self._row_factors = library.kernel("fp16x2_row_factors", device)
        self._counters = TileCounters.of(device)

    def geometry(self, arguments: Arguments) -> tuple[Workspace, int] | None:
        """Memory besides that of terms, and the CTAs of the preprocess."""
        # A scale that is not positive would change the sign of a masked pair's -inf.
        if not (arguments.n_q and arguments.n_k and arguments.positive_scale):
            return None
        workspace, block = Workspace(arguments), self.tile.block_k
        preprocess_ctas = self.preprocess.place(arguments, workspace, block)
        workspace.tensor("row_factors", 4, arguments.q_tiles(block) * block, _ROW_FACTORS)
        return workspace, preprocess_ctas

    def launch(self, arguments: Arguments, geometry: tuple[Workspace, int], stream: int) -> None:
        block, batch, (workspace, preprocess_ctas) = self.tile.block_k, arguments.batch, geometry
        held = [workspace.allocate(arguments, stream)]
        self.preprocess.run(arguments, stream, preprocess_ctas)
        (q, k, v, dout), terms = self.conversion.terms(arguments, stream, ("q", "k", "v", "dout"), "dout")
        held.append(terms)
        queries = -(-arguments.n_q // block) * block
        self._row_factors.launch(-(-batch * arguments.heads * queries // 256), 256, arguments, stream)
        for dq_kernel, kernel in self._kernels:
            rows, columns = ((q, dout), (k, v)) if dq_kernel else ((k, v), (q, dout))
            heads = rows[0].heads * batch
            work_tiles = -(-rows[0].tokens // _ROWS) * heads
            check_grid(work_tiles)
            maps = [*(each.map(64) for each in rows), *(each.map(block) for each in columns)]
            head_bytes = sum(2 * each.columns * each.tokens for each in columns) * columns[0].heads // rows[0].heads
            group = heads_per_l2_group(heads, _L2_BYTES // head_bytes) if arguments.spec.mask is not None else 1
            arguments.set(heads_per_l2_group=group, tile_counter=self._counters.next(stream))
            if work_tiles:
                ctas = min(work_tiles, self.device.sms)
                kernel.launch(ctas, _BACKWARD_THREADS, arguments.with_maps(maps), stream)
        self.preprocess.sink_gradients(arguments, stream)
        del held  # kept until the kernels that read them are enqueued


BACKWARD = Kind(Sm90Float32BackwardTile, Sm90Float32Backward, backward_tiles)
