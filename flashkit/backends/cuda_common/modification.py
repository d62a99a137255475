"""Properties of a score and mask modification that kernels are specialised for: the size of its values, what kernels do
not support, and the range of its integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import NamedTuple

from ...mods import expr
from ...mods.expr import Expr
from ...spec import AttentionSpec, Read, Slot

MAX_NDIM = 8
MAX_VALUES = 384
"""64-bit entries: with the other arguments they stay below the 4096 bytes of kernel parameters."""

MAX_BOX = 1024
"""Elements of an array that one thread reads to bound them. So a mask of pairs leaves its tiles PARTIAL: one lane that
reads every pair of a tile takes longer than the tile.
"""

ELEMENTS = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32",
    "float64",
)  # fmt: skip
"""Dtypes of arrays."""


def entries(slot: Slot) -> int:
    """64-bit entries that a value takes among Params::values: the scalar, or the address and strides in elements."""
    return 1 if slot.ndim is None else 1 + slot.ndim


def values_of(spec: AttentionSpec) -> int:
    """Entries of all values: of slots, of `spec.sums`, and log2 of the terms (-1 seeks the greatest) if ordered."""
    of_sums = sum(entries(slot) for _, slot in sums_of(spec).values())
    return sum(map(entries, spec.slots)) + of_sums + spec.orders_sums


def sums_of(spec: AttentionSpec) -> dict[str, tuple[int, Slot]]:
    """For each of `spec.sums` the index of its address and strides among Params::values, and the slot as an array."""
    found, at = {}, sum(map(entries, spec.slots))
    for slot in spec.sums:
        slot = slot._replace(ndim=slot.ndim or 0, dtype=spec.lse_dtype)
        found[slot.name] = at, slot
        at += entries(slot)
    return found


def constants_of(spec: AttentionSpec) -> dict[str, int]:
    """Constants that the head of every kernel has, in all languages."""
    return {
        "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v, "GQA_GROUP": spec.group,
        "MASK_READS_ARRAYS": looks_at_ranges(spec), "HAS_SCORE": spec.score is not None,
        "HAS_MASK": spec.mask is not None, "HAS_DROPOUT": spec.dropout, "HAS_SINKS": spec.sinks,
        "HAS_STATS": spec.stats, "HAS_LENGTHS": spec.kv_lengths, "IS_PACKED": spec.packed, "IS_PAGED": spec.paged,
        "MAX_BOX": MAX_BOX,
    }  # fmt: skip


def places_of(spec: AttentionSpec) -> dict[str, tuple[Slot, int]]:
    """For each value its slot and its first index in Params::values: the scalar, or address and strides."""
    places, at = {}, 0
    for slot in spec.slots:
        places[slot.name] = slot, at
        at += entries(slot)
    return places


def sums_by_distance(spec: AttentionSpec) -> bool:
    """Whether gradients by values follow from sums of dS by distance, in any order."""
    return bool(spec.reads) and not spec.deterministic and all(read.of_distance() is not None for read in spec.reads)


def slope_is_one(spec: AttentionSpec) -> bool:
    """Whether the score modification only adds to scores, so that dS is the same before and after it."""
    return spec.score is not None and expr.is_const(expr.derivative(spec.score), 1)


def way_of_adding(read: Read) -> str:
    """How kernels add terms: "EachPair" has an own element, "OfHead" one of a head, "Run" of neighbours that share."""
    symbols = {node for index in read.indices for node in expr.walk([index]) if node.op == "symbol"}
    if not symbols & {expr.ROW, expr.Q, expr.K}:
        return "OfHead"
    return "EachPair" if any(index is expr.K for index in read.indices) else "Run"


def adds_rows(spec: AttentionSpec) -> bool:
    """Whether the gradients by values are those of a bias: keys that follow one another add dS to elements that do."""
    if len(spec.reads) != 1 or not expr.is_const(spec.reads[0].slope, 1):
        return False
    indices = spec.reads[0].indices
    others = [index for index in indices if not any(index is x for x in (expr.ROW, expr.Q, expr.K))]
    along_keys = sum(index is expr.K for index in indices) == 1
    return along_keys and not any(expr.uses(index, expr.ROW, expr.Q, expr.K) for index in others)


class DenseArray(NamedTuple):
    """An array that a modification reads as x[.., row, k], after axes of heads and batch entries."""

    load: Expr
    slot: Slot
    at: int
    """Index of its address among Params::values."""

    head: int | None
    entry: int | None
    """The axes of heads and of batch entries, if it has them. Others have one element."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element of those dtypes of which kernels take tiles, else 0."""
        return {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4}.get(str(self.slot.dtype), 0)


def _dense(spec: AttentionSpec, load: Expr) -> DenseArray | None:
    if load.op != "load" or len(load.args) < 2 or load.args[-2] is not expr.ROW or load.args[-1] is not expr.K:
        return None
    axes: dict[Expr, int] = {}
    for axis, index in enumerate(load.args[:-2]):
        if index in axes or not (index is expr.B or index is expr.H or expr.is_const(index, 0)):
            return None
        if not expr.is_const(index, 0):
            axes[index] = axis
    return DenseArray(load, *places_of(spec)[load.value], axes.get(expr.H), axes.get(expr.B))


def dense_bias(spec: AttentionSpec) -> DenseArray | None:
    """The bias, if adding it is all that the score modification does."""
    score = spec.score
    if score is None or score.op != "add" or not any(x is expr.S for x in score.args):
        return None
    return next((found for x in score.args if (found := _dense(spec, x)) and str(found.slot.dtype) != "bool"), None)


def dense_mask(spec: AttentionSpec) -> DenseArray | None:
    """A boolean array that the mask reads for each pair."""
    nodes = [] if spec.mask is None else expr.walk([spec.mask])
    return next((found for x in nodes if (found := _dense(spec, x)) and str(found.slot.dtype) == "bool"), None)


class Dense(NamedTuple):
    """The arrays whose tiles pass through shared memory: kernels/sm90/dense_tiles.cuh."""

    bias: DenseArray | None = None
    mask: DenseArray | None = None

    def constants(self) -> dict[str, int]:
        """Those of the kernels' head."""
        bias, mask = self
        return {
            "BIAS_BYTES": bias.itemsize if bias else 0, "BIAS_IS_BFLOAT16": str(bias and bias.slot.dtype) == "bfloat16",
            "BIAS_OF_HEADS": bias is not None and bias.head is not None,
            "BIAS_OF_ENTRIES": bias is not None and bias.entry is not None,
            "MASK_TILES": mask is not None, "MASK_TILES_OF_HEADS": mask is not None and mask.head is not None,
            "MASK_TILES_OF_ENTRIES": mask is not None and mask.entry is not None,
        }  # fmt: skip


NOT_DENSE = Dense()


def unsupported(spec: AttentionSpec) -> str:
    """Why kernels do not support the spec's modification, or an empty string."""
    for slot in spec.slots:
        if slot.ndim is not None and str(slot.dtype) not in ELEMENTS:
            return f"array of a modification: expected dtype {', '.join(ELEMENTS)}, got {slot.dtype}"
        if (slot.ndim or 0) > MAX_NDIM:
            return f"array of a modification: expected up to {MAX_NDIM} axes, got {slot.ndim}"
    if values_of(spec) > MAX_VALUES:
        return f"modification: expected arrays and numbers of up to {MAX_VALUES} entries, got {values_of(spec)}"
    return ""


def looks_at_ranges(spec: AttentionSpec) -> bool:
    """Whether classifying a tile reads arrays over ranges, in time proportional to the tile."""
    return any(node.op in ("load_min", "load_max") for node in expr.walk(spec.tile_state))


def is_of_blocks(spec: AttentionSpec) -> bool:
    """Whether all arrays of the mask are indexed by blocks of queries or keys."""
    loads = [] if spec.mask is None else [node for node in expr.walk([spec.mask]) if node.op == "load"]
    return looks_at_ranges(spec) and all(any(arg.op == "floordiv" for arg in node.args) for node in loads)


def shifts(mask: Expr) -> bool:
    """Whether the mask is known to be the same for (q + n, k + n) as for (q, k)."""
    moved: dict[Expr, int] = {}  # how much a node changes per n
    overflowing = expr.reaches([mask])[1]
    for node in expr.walk([mask]):
        by = [moved[arg] for arg in node.args]
        if node.op == "symbol":
            moved[node] = node is expr.Q or node is expr.K
        elif node.op in ("add", "sub", "neg"):
            moved[node] = sum(by) if node.op == "add" else by[0] - by[1] if node.op == "sub" else -by[0]
        elif node.op in ("lt", "le", "eq", "min", "max") and by[0] == by[1]:
            moved[node] = by[0] if node.op in ("min", "max") else 0
        elif any(by):
            return False
        else:
            moved[node] = 0
        if moved[node] and node in overflowing:  # it moves by 2^64 less where it wraps
            return False
    return not moved[mask]


NEAR = 2**20
"""Positions below this allow arithmetic in 32 bits or float."""


POSITIONS = "any", "integers", "floats"
"""The results of `positions`, in the order of kernels/common/positions.cuh."""


def forward_constants(spec: AttentionSpec, distance_bias: bool = False, dense: Dense = NOT_DENSE) -> dict[str, int]:
    """What Hopper's forward kernels in CUDA C++ know of scores and masks beyond the constants of every kernel."""
    return {
        "ROW_SUM_BY_MMA": False, "FAST_MATH": True, "NUM_TERMS": 1, "FP8": False, "GETS_VT": False,
        "HAS_DISTANCE_BIAS": distance_bias, **dense.constants(),
        "READS_ARRAYS": any(slot.ndim is not None for slot in spec.slots),
        "FAR": NEAR if spec.score is not None else 2**30, "POSITIONS": POSITIONS.index(positions(spec)),
    }  # fmt: skip


def positions(spec: AttentionSpec) -> str:
    """For integers of scores at positions below NEAR: exact "floats", "integers" of 32 bits, or "any" that overflow."""
    if spec.score is None:
        return "integers"
    greatest: dict[Expr, float] = {}
    by_position = False  # whether positions index arrays
    for node in expr.walk([spec.score]):
        parts = [greatest[arg] for arg in node.args if arg.kind == "int"]
        greatest[node] = _greatest(node, parts) if node.kind == "int" else 0
        by_position |= node.op == "load" and any(each.value in ("row", "q", "k") for each in expr.walk(node.args))
    most = max(greatest.values())
    return "floats" if most <= 2**24 and not by_position else "integers" if most < 2**31 else "any"


def _greatest(node: Expr, parts: Sequence[float]) -> float:
    """Upper bound of the absolute value of an integer, from those of its arguments."""
    if node.op == "symbol":
        return NEAR
    if node.op == "const":
        return abs(node.value)
    if node.op in ("add", "sub"):
        return sum(parts)
    if node.op == "mul":
        return prod(parts)
    return max(parts) if node.op in ("neg", "abs", "min", "max", "where") else inf
