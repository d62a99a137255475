"""Tiles: what moves through memory with them (the papers' IO model), which are possible on a device, which likely fast.

    paper_tile, traffic, standard_traffic, asymptotic_traffic    the IO model; `reference.Traffic` counts the same
    CpuTile, GpuTile                                             one tile; impossible ones cannot be built
    candidates, default, default_cpu                             the possible ones, best first by an analytic cost

The cost orders candidates for `flashkit autotune` and chooses where nothing was measured; it predicts no speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from ..spec import ITEMSIZE, MAX_HEAD_DIM, Direction
from .host import lanes_of

Order = Literal[1, 2]


# --- the IO model -----------------------------------------------------------------------------------------------------


def paper_tile(memory: int, head_dim: int, order: Order = 1) -> tuple[int, int]:
    """(B_r, B_c), queries and keys of a tile, for M = `memory` elements: B_c = ceil(M / 4d), B_r = min(B_c, d).

    Dao et al. 2022, Algorithm 1, line 1: tiles of Q, K, V and O share the memory, and the score tile is no larger
    than one of them. In FlashAttention-2's order (order=2) queries and keys change places: the outer tile is the large.
    """
    if memory < 1 or head_dim < 1:
        raise ValueError(f"memory and head_dim count elements and are 1 or more; got {memory=}, {head_dim=}")
    outer = -(-memory // (4 * head_dim))
    inner = min(outer, head_dim)
    return (inner, outer) if order == 1 else (outer, inner)


def traffic(
    order: Order, direction: Direction, n_q: int, n_k: int, head_dim: int, head_dim_v: int, block_q: int, block_k: int,
    kept: float = 1.0, group: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Elements that move between slow and fast memory, read or written, by array: what `reference.Traffic` counts.

    For the `group` query heads that share one key/value head. kept: the fraction of tiles that are not EMPTY; exact
    where all are kept or the tiles divide n_q and n_k. Sinks, dlse and the arrays of modifications are not counted.
    """
    rounds = kept * -(-n_k // block_k)  # how often each row of Q takes part, on average
    q, o, row = n_q * head_dim, n_q * head_dim_v, n_q
    k, v = n_k * head_dim, n_k * head_dim_v
    if direction == "forward" and order == 1:
        per_head = {"q": rounds * q, "k": k, "v": v, "out": o + 2 * rounds * o, "m": 2 * row + 2 * rounds * row}
        per_head |= {"l": per_head["m"], "lse": row}
        shared: dict[str, float] = {}
    elif direction == "forward":
        rounds = kept * -(-n_q // block_q)  # how often each row of K takes part
        per_head, shared = {"q": q, "k": rounds * k, "v": rounds * v, "out": o, "lse": row}, {}
    else:
        per_head = {"q": rounds * q, "dq": q + 2 * rounds * q, "lse": rounds * row}
        if order == 1:
            per_head |= {"out": rounds * o, "dout": rounds * o}
        else:
            per_head |= {"out": o, "dout": o + rounds * o, "delta": row + rounds * row}
        shared = {"k": k, "v": v, "dk": k, "dv": v}
    return {name: round(x) for name, x in ({name: group * x for name, x in per_head.items()} | shared).items()}


def standard_traffic(n_q: int, n_k: int, head_dim: int, head_dim_v: int) -> int:
    """Forward pass of one head that stores scores and weights, Theta(N d + N^2): S = QK^T, P = softmax(S), O = PV.

    Dao et al. 2022, Algorithm 0: S is written and read, P is written and read.
    """
    return (n_q + n_k) * (head_dim + head_dim_v) + 4 * n_q * n_k


def asymptotic_traffic(n_q: int, n_k: int, head_dim: int, memory: int, kept: float = 1.0) -> float:
    """How FlashAttention's traffic grows, Theta(N^2 d^2 / M), and with a block mask kept times that.

    Dao et al. 2022, Theorem 2 and Proposition 4. memory: elements of fast memory.
    """
    return kept * n_q * n_k * head_dim**2 / memory


# --- a tile on a CPU --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class CpuTile:
    """block_q queries by block_k keys; the micro-kernel keeps rows x vectors vector registers of sums.

    lanes: float32 in one vector register, 4 (NEON, SSE), 8 (AVX2) or 16 (AVX-512); float64 has half as many.
    """

    block_q: int
    block_k: int
    lanes: int
    rows: int
    vectors: int

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.lanes not in (4, 8, 16):
            raise ValueError(f"{self.lanes=}: float32 lanes of a vector register are 4, 8 or 16")
        if self.registers_used > self.registers:
            raise ValueError(
                f"{self.rows=} x {self.vectors=} sums, a row of vectors and one broadcast take {self.registers_used} "
                f"vector registers; with {self.lanes=} there are {self.registers}"
            )

    @property
    def registers(self) -> int:
        """Vector registers of the instruction set: AVX2 has 16, AVX-512 and NEON 32."""
        return 16 if self.lanes == 8 else 32

    @property
    def registers_used(self) -> int:
        return self.rows * self.vectors + self.vectors + 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The register block, which a micro-kernel is compiled for."""
        return self.lanes, self.rows, self.vectors

    @property
    def row(self) -> dict[str, Any]:
        """As fields of a profile's row."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.block_q} x {self.block_k} in {self.rows} x {self.vectors} registers"

    def panel(self, itemsize: int = 4) -> int:
        """Columns of one micro-kernel call: in the forward pass queries, in the backward pass keys or head dims."""
        return self.vectors * self.lanes * 4 // itemsize

    def working_set(self, direction: Direction, head_dim: int, head_dim_v: int, itemsize: int = 4) -> tuple[int, int]:
        """Bytes that are best held by (L1, L2); itemsize: of the computing precision.

        Forward, L1: the scores of one panel and its Q^T or O^T. L2: Q^T and O^T of all panels, and the K and V tiles.
        Backward, L1: S and dP. L2: K^T, V^T and K, the sums dK and dV, and the rows of Q, dO and dQ.
        """
        d, both = head_dim, head_dim + head_dim_v
        if direction == "forward":
            scores = self.block_k * self.panel(itemsize)
            l1 = scores + max(d, head_dim_v) * self.panel(itemsize)
            l2 = scores + (self.block_q + self.block_k) * both
        else:
            l1 = scores = 2 * self.block_q * self.block_k
            l2 = scores + self.block_k * (2 * both + d) + self.block_q * (both + d)
        return l1 * itemsize, l2 * itemsize


def _cpu_tiles(lanes: int, registers: int) -> Iterator[CpuTile]:
    """Register blocks that keep both multiply-add units busy, 8 sums in flight, by blocks of whole panels."""
    # 13x2 and 14x2 fit into AVX-512's 32 registers and are fast alone, but halve the speed inside attention.
    most = min(registers, 28)
    for rows, vectors in product((2, 3, 4, 6, 8, 12), (1, 2, 3, 4)):
        if rows * vectors < 8 or vectors > 0.75 * rows or rows * vectors + vectors + 1 > most:
            continue
        panel = vectors * lanes
        for panels, block_k in product((1, 2, 3, 4, 6, 8, 12, 16), (32, 48, 64, 96, 128, 192, 256)):
            if panels * panel <= 512:
                yield CpuTile(panels * panel, block_k, lanes, rows, vectors)


# Of a recent core, roughly. Besides: two multiply-adds, two loads and one store a cycle, multiply-add latency 4.
_L2_BYTES_A_CYCLE, _MEMORY_BYTES_A_CYCLE, _TYPICAL_LENGTH = 48.0, 8.0, 2048


def _cpu_cost(tile: CpuTile, direction: Direction, d: int, dv: int, itemsize: int, l1: int) -> float:
    """Cycles for one key and one vector of queries (forward), or one query and one vector of keys (backward)."""
    rows, vectors, vector_bytes = tile.rows, tile.vectors, tile.lanes * 4
    sums = rows * vectors
    step = max(sums / 2, (rows + vectors) / 2, 4.0) / sums  # of one vector multiply-add
    call = 10 / sums  # to start and drain a micro-kernel, for each vector of its result

    def waste(n: int, block: int) -> float:
        return -(-n // block) * block / n

    l1_set = tile.working_set(direction, d, dv, itemsize)[0]
    beyond_l1 = max(0.0, 1 - l1 / l1_set)  # share of the reads of the inner operand that miss L1
    if direction == "forward":
        compute = step * (d * waste(tile.block_k, rows) + dv * waste(dv, rows))
        calls = call * (1 + dv / tile.block_k)
        moves = 1 + 2 * dv / tile.block_k + 0.5 * dv / tile.block_k  # S out; O in and out; O now and then rescaled
        l2 = (d + dv) * itemsize / vectors + (d + 2 * dv) * vector_bytes / tile.block_k
        l2 += beyond_l1 * vector_bytes * (d + dv) / rows
        memory = (d + dv) * itemsize * (vector_bytes / itemsize) / tile.block_q
    else:
        lanes = vector_bytes // itemsize
        over_d = waste(d, tile.panel(itemsize)) if d > tile.panel(itemsize) else waste(d, lanes)
        compute = step * ((d + dv) * waste(tile.block_k, lanes) + (2 * d + dv) * over_d)
        calls = call * (2 + (d + dv) / tile.block_q + d / tile.block_k)
        moves = 2 + 2 * (d + dv) / tile.block_q + 2 * d / tile.block_k  # S, dP out; dV, dK, dQ in and out
        l2 = (2 * d + dv + 2 * (d + dv)) * vector_bytes / tile.block_q
        l2 += beyond_l1 * vector_bytes * (3 * d + 2 * dv) / rows / 2
        memory = (3 * d + dv) * vector_bytes / tile.block_k
    # Edges: the last tile of a row is partly empty, tiles on a causal diagonal are half empty.
    edges = 1 + (tile.block_q + tile.block_k) / (2 * _TYPICAL_LENGTH)
    return (compute + calls + moves + l2 / _L2_BYTES_A_CYCLE + memory / _MEMORY_BYTES_A_CYCLE) * edges


# --- a tile on a GPU --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class GpuTile:
    """block_q queries by block_k keys, K and V in a ring of `stages`, `warps` that compute, `splits` of the keys.

    For kernels on matrix instructions: a warp owns whole groups of 16 queries, and the keys go in steps of 16.
    """

    block_q: int
    block_k: int
    stages: int
    warps: int
    splits: int = 1

    def __post_init__(self) -> None:
        _check_positive(self)
        if self.block_q % (16 * self.warps):
            raise ValueError(f"{self.block_q=} is no multiple of 16 queries for each of {self.warps=}")
        if self.block_k % 16:
            raise ValueError(f"{self.block_k=} is no multiple of 16, the inner dimension of a matrix instruction")
        if 32 * self.warps > 1024:
            raise ValueError(f"{self.warps=} are {32 * self.warps} threads; a block has 1024 at most")

    def shared_memory(self, head_dim: int, head_dim_v: int, itemsize: int) -> int:
        """Bytes: the Q tile (the output takes its place), the ring of K and V, 1 KiB for barriers and alignment."""
        return (self.block_q * head_dim + self.stages * self.block_k * (head_dim + head_dim_v)) * itemsize + 1024

    def registers(self, head_dim_v: int) -> int:
        """32-bit registers of one computing thread: O and S in float32, half of P at a time, about 20 for all else."""
        return self.block_q * (head_dim_v + self.block_k + self.block_k // 4) // (32 * self.warps) + 20

    def register_budget(self, registers_per_sm: int) -> int:
        """Registers a computing thread can have beside one warpgroup that loads with 24 each; given out by eights."""
        return min(255, (registers_per_sm - 128 * 24) // (32 * self.warps) // 8 * 8)


def _gpu_tiles() -> Iterator[GpuTile]:
    blocks = product((64, 128, 192, 256), range(32, 257, 16), (1, 2, 3, 4), (4, 8, 12))
    return (GpuTile(q, k, stages, warps) for q, k, stages, warps in blocks if q % (16 * warps) == 0)


def _gpu_cost(tile: GpuTile, d: int, dv: int, itemsize: int) -> float:
    """Cycles of an SM for one pair, at Hopper's rates: 2048 multiply-adds, 16 exp2, 24 bytes from L2 a cycle."""
    products = (d + dv) * itemsize / 2 / 2048
    softmax = 1 / 16 + dv / tile.block_k / 128
    arithmetic = max(products, softmax) if tile.warps >= 8 else products + softmax  # two groups work in turns
    loads = (d + dv) * itemsize / tile.block_q / 24
    waiting = 300 / (tile.block_q * tile.block_k) / min(tile.stages, 2)  # barriers and latency, half hidden by a ring
    return (max(arithmetic, loads) if tile.stages > 1 else arithmetic + loads) + waiting


# --- the choice -------------------------------------------------------------------------------------------------------


def candidates(
    kind: Literal["cpu", "cuda"], memory: Mapping[str, int | None], dtype: str, head_dim: int, head_dim_v: int,
    direction: Direction = "forward", *, lanes: int = 8,
) -> list[Any]:  # fmt: skip
    """Tiles that fit the device, the likely fastest first; the same list for the same arguments.

    kind "cpu": CpuTiles for `memory` with "l1d" and "l2" in bytes; lanes: float32 in a vector register.
    kind "cuda": GpuTiles for the forward pass, for `memory` with "sram_per_block" (bytes) and "registers_per_sm".
    Raises ValueError where a number is missing or impossible, or where nothing fits.
    """
    for name, n in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= n <= MAX_HEAD_DIM:
            raise ValueError(f"{name} is 1 to {MAX_HEAD_DIM}, not {n}")
    if dtype not in ITEMSIZE:
        raise ValueError(f"dtype {dtype!r} is none of {', '.join(ITEMSIZE)}")
    ranked: list[tuple[float, Any]]
    if kind == "cpu":
        l1, l2 = _numbers(memory, ("l1d", "l2"))
        computing = 8 if dtype == "float64" else 4
        ranked = [
            (_cpu_cost(tile, direction, head_dim, head_dim_v, computing, l1), tile)
            for tile in _cpu_tiles(lanes, 16 if lanes == 8 else 32)
            if _fits_cpu(tile, direction, head_dim, head_dim_v, computing, l1, l2)
        ]
    elif kind == "cuda":
        if direction != "forward":
            raise ValueError(f"direction {direction!r}: GPU tiles are modelled for the forward pass only")
        sram, registers = _numbers(memory, ("sram_per_block", "registers_per_sm"))
        ranked = [
            (_gpu_cost(tile, head_dim, head_dim_v, ITEMSIZE[dtype]), tile)
            for tile in _gpu_tiles()
            if tile.shared_memory(head_dim, head_dim_v, ITEMSIZE[dtype]) <= sram
            and tile.registers(head_dim_v) <= tile.register_budget(registers)
        ]
    else:
        raise ValueError(f"kind {kind!r} is none of cpu, cuda")
    if not ranked:
        given = ", ".join(f"{name}={n}" for name, n in memory.items() if n is not None)
        raise ValueError(f"no tile of {dtype}, head dims {head_dim}/{head_dim_v}, fits a {kind} device with {given}")
    return [tile for _, tile in sorted(ranked)]


def default(
    kind: Literal["cpu", "cuda"], memory: Mapping[str, int | None], dtype: str, head_dim: int, head_dim_v: int,
    direction: Direction = "forward", *, lanes: int = 8,
) -> Any:  # fmt: skip
    """The first of `candidates`."""
    return candidates(kind, memory, dtype, head_dim, head_dim_v, direction, lanes=lanes)[0]


def default_cpu(profile: Any, dtype: str, head_dim: int, head_dim_v: int, direction: Direction = "forward") -> CpuTile:
    """The tile for a CPU that a Profile describes; sizes it does not tell are those of the smallest caches in use."""
    memory = {"l1d": profile.memory.l1d or 32 << 10, "l2": profile.memory.l2 or 256 << 10}
    lanes = lanes_of(profile.device.features)
    tile: CpuTile = default("cpu", memory, dtype, head_dim, head_dim_v, direction, lanes=lanes)
    return tile


def _fits_cpu(tile: CpuTile, direction: Direction, d: int, dv: int, itemsize: int, l1: int, l2: int) -> bool:
    """The scores of a panel in L1, which softmax passes over three times; all in L2; operands may stream past L1."""
    if direction == "forward":
        in_l1 = tile.block_k * tile.panel(itemsize) * itemsize <= l1 * 3 // 4
    else:
        in_l1 = tile.block_q * tile.block_k * itemsize <= l1 * 3 // 2  # S and dP, of which one is enough at a time
    smallest = tile.block_q <= tile.panel() and tile.block_k <= 32  # there must be one for every head dim
    return in_l1 and (tile.working_set(direction, d, dv, itemsize)[1] <= l2 * 3 // 4 or smallest)


def _numbers(memory: Mapping[str, int | None], names: tuple[str, ...]) -> tuple[int, ...]:
    found = tuple(memory.get(name) for name in names)
    for name, n in zip(names, found):
        if n is None or n < 1:
            raise ValueError(f"memory[{name!r}] is {n}; a number of bytes, or of registers, is needed")
    return found  # type: ignore[return-value]


def _check_positive(tile: CpuTile | GpuTile) -> None:
    for name, n in vars(tile).items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"{name}={n!r} of a {type(tile).__name__} is an integer, 1 or more")
