"""Tiles: their memory traffic (the IO model of the papers), and which fit a CPU, ranked by an analytic cost.

    paper_tile, traffic, standard_traffic      the IO model; `reference.Traffic` counts the same
    CpuTile                                    one tile of a CPU; an impossible one is an error
    candidates, amx_candidates, default_cpu    tiles that fit, best first by the cost

Tiles of a GPU are chosen by the generations of its kernels (backends/cuda_common/generation.py).

The cost ranks candidates for `flashkit autotune`, and chooses without measurements. It does not predict speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from ..spec import DTYPES, MAX_HEAD_DIM, Direction
from .host import lanes_of
from .schema import MIN_L1D, Profile, TileRow, listed, not_followed

Order = Literal[1, 2]


# --- the IO model -----------------------------------------------------------------------------------------------------


def paper_tile(memory: int, head_dim: int, order: Order = 1) -> tuple[int, int]:
    """(B_r, B_c), queries and keys of a tile, for M = `memory` elements: B_c = ceil(M / 4d), B_r = min(B_c, d), as in
    line 1 of Algorithm 1 of Dao et al., "FlashAttention", 2022, arXiv 2205.14135.

    Tiles of Q, K, V and O share the memory, and the score tile is no larger than one of them. In FlashAttention-2's
    order (order=2) queries and keys are swapped: the tile of the outer loop is the large one.
    """
    if memory < 1 or head_dim < 1:
        raise ValueError(f"memory, head_dim: expected numbers of elements >= 1, got {memory} and {head_dim}")
    outer = -(-memory // (4 * head_dim))
    inner = min(outer, head_dim)
    return (inner, outer) if order == 1 else (outer, inner)


def traffic(
    order: Order, direction: Direction, n_q: int, n_k: int, head_dim: int, head_dim_v: int, block_q: int, block_k: int,
    kept: float = 1.0, group: int = 1,
) -> dict[str, int]:  # fmt: skip
    """Elements that move between slow and fast memory, by array: what `reference.Traffic` counts. Sinks, dlse and the
    arrays of modifications are not counted.

    order: 1, keys in the outer loop (FlashAttention), or 2, queries (FlashAttention-2). Sizes are of one head. kept:
    the fraction of tiles that are not EMPTY; the result is exact if it is 1 or if the tiles divide n_q and n_k. group:
    query heads that share one key/value head.
    """
    rounds = kept * -(-n_k // block_k)  # times each row of Q is read, on average
    q, o, row = n_q * head_dim, n_q * head_dim_v, n_q
    k, v = n_k * head_dim, n_k * head_dim_v
    if direction == "forward" and order == 1:
        per_head = {"q": rounds * q, "k": k, "v": v, "out": o + 2 * rounds * o, "m": 2 * row + 2 * rounds * row}
        per_head |= {"l": per_head["m"], "lse": row}
        shared: dict[str, float] = {}
    elif direction == "forward":
        rounds = kept * -(-n_q // block_q)  # times each row of K is read
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
    """Elements moved by standard attention, which stores S = QK^T and P = softmax(S): Theta(N d + N^2).

    Forward pass of one head; S and P are each written and read (Dao et al. 2022, arXiv 2205.14135, Algorithm 0).
    """
    return (n_q + n_k) * (head_dim + head_dim_v) + 4 * n_q * n_k


# --- a tile on a CPU --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class CpuTile:
    """block_q queries by block_k keys; the micro-kernel has rows x vectors vector registers of accumulators.

    lanes: float32 in one vector register, 4 (NEON, SSE), 8 (AVX2) or 16 (AVX-512); float64 has half as many.
    """

    block_q: int
    block_k: int
    lanes: int
    rows: int
    vectors: int

    def __post_init__(self) -> None:
        for name, n in vars(self).items():
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"{name} of a CpuTile: expected an integer >= 1, got {n!r}")
        if self.lanes not in (4, 8, 16):
            raise ValueError(f"lanes: expected 4, 8 or 16 float32 lanes of a vector register, got {self.lanes}")
        if self.registers_used > self.registers:
            raise ValueError(
                f"rows={self.rows}, vectors={self.vectors}: expected sums, a row of vectors and a broadcast within the "
                f"{self.registers} registers of {self.lanes} lanes, got {self.registers_used}"
            )

    @property
    def registers(self) -> int:
        """Vector registers of the instruction set: 16 of AVX2, 32 of AVX-512 and NEON."""
        return 16 if self.lanes == 8 else 32

    @property
    def registers_used(self) -> int:
        return self.rows * self.vectors + self.vectors + 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The register block that a micro-kernel is compiled for."""
        return self.lanes, self.rows, self.vectors

    @property
    def row(self) -> dict[str, Any]:
        """The fields of a profile's row."""
        return dict(vars(self))

    def __str__(self) -> str:
        return f"{self.block_q} x {self.block_k} in {self.rows} x {self.vectors} registers"

    def panel(self, itemsize: int = 4) -> int:
        """Columns of one micro-kernel call: queries in the forward pass, keys or head dims in the backward pass."""
        return self.vectors * self.lanes * 4 // itemsize

    def working_set(self, direction: Direction, head_dim: int, head_dim_v: int, itemsize: int = 4) -> tuple[int, int]:
        """Bytes of the working set for (L1, L2); itemsize: of the computing precision.

        Forward, L1: the scores of one panel and its Q^T or O^T. L2: Q^T and O^T of all panels, and the K and V tiles.
        Backward, L1: S and dP. L2: K^T, V^T and K, the accumulators of dK and dV, and the rows of Q, dO and dQ.
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


def _cpu_tiles(lanes: int) -> Iterator[CpuTile]:
    """Register blocks that keep both multiply-add pipes busy (8 accumulators), times blocks of whole panels."""
    usable = 16 if lanes == 8 else 28  # larger register blocks fit AVX-512, but are slow within attention
    for rows, vectors in product((2, 3, 4, 6, 8, 12), (1, 2, 3, 4)):
        if rows * vectors < 8 or vectors > 0.75 * rows or rows * vectors + vectors + 1 > usable:
            continue
        panel = vectors * lanes
        for panels, block_k in product((1, 2, 3, 4, 6, 8, 12, 16), (32, 48, 64, 96, 128, 192, 256)):
            if panels * panel <= 512:
                yield CpuTile(panels * panel, block_k, lanes, rows, vectors)


# Of a typical recent core, with two multiply-adds, two loads and one store a cycle, and a multiply-add latency of 4.
_L2_BYTES_A_CYCLE, _MEMORY_BYTES_A_CYCLE, _TYPICAL_LENGTH = 48.0, 8.0, 2048


def _cpu_cost(tile: CpuTile, direction: Direction, d: int, dv: int, itemsize: int, l1: int) -> float:
    """Cycles for one key and one vector of queries (forward), or for one query and one vector of keys (backward)."""
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
        moves = 1 + 2 * dv / tile.block_k + 0.5 * dv / tile.block_k  # S out; O in and out; O sometimes rescaled
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
    # The last tile of a row is partly empty, tiles on a causal diagonal are half empty.
    edges = 1 + (tile.block_q + tile.block_k) / (2 * _TYPICAL_LENGTH)
    return (compute + calls + moves + l2 / _L2_BYTES_A_CYCLE + memory / _MEMORY_BYTES_A_CYCLE) * edges


def amx_candidates(
    head_dim: int, head_dim_v: int, direction: Direction = "forward", *, l1d: int, l2: int
) -> list[CpuTile]:
    """Tiles for products by AMX, ranked by the bytes that a query and a key move between L2 and L1, the fewest first.

    These products take 2 x 2 tiles of 16 x 16 whatever the register block, which all else uses: 32 or 64 queries are a
    panel. l1d, l2: bytes of the caches.
    """
    d, dv = head_dim, head_dim_v

    def moved(tile: CpuTile) -> float:
        if direction == "backward":  # sums of dK and dV, and of dQ, in and out
            return 8 * (d + dv) / tile.block_q + 8 * d / tile.block_k
        operands, sums = 2 * (d + dv) / tile.panel() + 2 * d / tile.block_k, 8 * dv / tile.block_k
        scores = 14 if 4 * tile.block_k * tile.panel() > l1d // 2 else 0  # written, read twice, and P written and read
        return operands + sums + scores + 16 * (d + dv) / tile.block_q  # packing

    blocks_q = (64, 128, 256, 512) if direction == "backward" else (128, 256, 512)
    panels = ((12, 2),) if direction == "backward" else ((12, 2), (6, 4))
    tiles = [
        CpuTile(block_q, block_k, 16, rows, vectors)
        for block_q, block_k, (rows, vectors) in product(blocks_q, (64, 96, 128, 192, 256, 384, 512), panels)
    ]
    small = CpuTile(64, 64, 16, 12, 2)
    fitting = [tile for tile in tiles if tile.working_set(direction, d, dv)[1] <= l2 * 3 // 4]
    return sorted(fitting, key=lambda tile: (moved(tile), tile)) or [small]


# --- the choice -------------------------------------------------------------------------------------------------------


def candidates(
    dtype: str, head_dim: int, head_dim_v: int, direction: Direction = "forward", *, l1d: int, l2: int, lanes: int = 8
) -> list[CpuTile]:
    """Tiles that fit caches of these bytes and vectors of `lanes` float32, the cheapest first. ValueError if none."""
    computing = 8 if dtype == "float64" else 4
    ranked = [
        (_cpu_cost(tile, direction, head_dim, head_dim_v, computing, l1d), tile)
        for tile in _cpu_tiles(lanes)
        if _fits_cpu(tile, direction, head_dim, head_dim_v, computing, l1d, l2)
    ]
    if not ranked:
        problem = f"{dtype}, head dims {head_dim}/{head_dim_v}"
        raise ValueError(f"no tile of {problem}, fits a CPU with l1d={l1d}, l2={l2}")
    return [tile for _, tile in sorted(ranked)]


def cpu_memory(profile: Any) -> dict[str, int]:
    """The cache sizes of the CPU of a Profile; unknown ones count as 32 KiB of L1 and 256 KiB of L2."""
    return {"l1d": max(profile.memory.l1d or 32 << 10, MIN_L1D), "l2": profile.memory.l2 or 256 << 10}


def default_cpu(profile: Any, dtype: str, head_dim: int, head_dim_v: int, direction: Direction = "forward") -> CpuTile:
    """The first of `candidates` for the CPU of a Profile."""
    lanes = lanes_of(profile.device.features)
    return candidates(dtype, head_dim, head_dim_v, direction, lanes=lanes, **cpu_memory(profile))[0]


def cpu_tile(row: TileRow | None, model: CpuTile) -> tuple[CpuTile, str]:
    """The tile of a profile's row, and why; the model's for what the row leaves open, or if it is no tile."""
    if row is None or row.block_q is None or row.block_k is None:
        return model, "no row of the profile applies; the model's choice"
    lanes, rows, vectors = row.lanes or model.lanes, row.rows or model.rows, row.vectors or model.vectors
    try:
        return CpuTile(row.block_q, row.block_k, lanes, rows, vectors), row.why or "the profile's row"
    except ValueError as error:
        not_followed(row, error)
        return model, f"the profile's row is no tile: {error}; the model's choice"


def check_cpu_rows(profile: Profile) -> None:
    """Warn of each row for the CPU that is no tile."""
    directions: tuple[Direction, ...] = "forward", "backward"
    for backend, direction in product(("cpu", "cpu_amx"), directions):
        for row in profile.tiles.get(f"{backend}.{direction}", ()):
            dtype = next((name for name in listed(row.dtype) if name in DTYPES), "float32")
            dim = min(next(iter(listed(row.head_dim)), row.max_head_dim or 64), MAX_HEAD_DIM)
            cpu_tile(row, default_cpu(profile, dtype, dim, dim, direction))


def _fits_cpu(tile: CpuTile, direction: Direction, d: int, dv: int, itemsize: int, l1: int, l2: int) -> bool:
    """The scores of a panel fit L1, because softmax reads them three times; the working set fits L2."""
    if direction == "forward":
        in_l1 = tile.block_k * tile.panel(itemsize) * itemsize <= l1 * 3 // 4
    else:
        in_l1 = tile.block_q * tile.block_k * itemsize <= l1 * 3 // 2  # S and dP, used one after the other
    smallest = tile.block_q <= tile.panel() and tile.block_k <= 32  # every head dim needs one that fits
    return in_l1 and (tile.working_set(direction, d, dv, itemsize)[1] <= l2 * 3 // 4 or smallest)
