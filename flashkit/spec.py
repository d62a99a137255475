"""What is to be computed: the spec a kernel is compiled for, the problem with its sizes, and the operands of one
call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import numpy as np

from .devices.lazy import cached_property
from .mods import expr
from .mods.expr import Expr, Kind

Direction = Literal["forward", "backward"]

MAX_HEAD_DIM = 1024
"""Of any backend; multi-head latent attention needs 576."""


class DType(NamedTuple):
    """An input dtype: its bytes, that of accumulators and softmax, and PTX's type of matrix operands."""

    size: int
    accumulator: str
    mma: str


DTYPES = {
    "float64": DType(8, "float64", "f64"),
    "float32": DType(4, "float32", "tf32"),
    "float16": DType(2, "float32", "f16"),
    "bfloat16": DType(2, "float32", "bf16"),
}
"""Every dtype that attention takes."""

ITEMSIZE = {name: dtype.size for name, dtype in DTYPES.items()}


class Fp8(NamedTuple):
    """q, k and v are codes of e4m3 with scales."""

    per: Literal["head", "block", "token"]  # what shares a scale of keys and of values; a block has 128 tokens
    transposed: bool = False  # there is V^T beside v
    exact_lse: bool = True  # the log-sum-exp is that of weights before they are rounded


@cache
def name_of(dtype: Any) -> str:
    """The name of a dtype; cached because NumPy computes it for each access."""
    return str(dtype.name)


def dtype_of(name: str) -> np.dtype:
    """The dtype of this name, of NumPy or ml_dtypes."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


class Verdict(NamedTuple):
    """A backend's answer: yes, or no with a sentence."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class Slot(NamedTuple):
    """A value that a modification takes at run time: a scalar (ndim None) or an array."""

    name: str
    kind: Kind
    ndim: int | None = None
    dtype: str | None = None


class Read(NamedTuple):
    """One place where a score modification reads a float: an element of an array, or a number, which has no indices.

    The gradient of a loss by the value sums dS * slope over the pairs, at the index that each of them reads.
    """

    name: str  # of the slot
    indices: tuple[Expr, ...]
    slope: Expr  # d score / d value

    def of_distance(self) -> Read | None:
        """The same in the symbol DISTANCE, q - k, if it depends on that, the batch entry and the head alone."""
        graphs = expr.substitute([self.slope, *self.indices], lambda node: _of_distance().get(node, node))
        kept = (expr.B, expr.H, DISTANCE)
        if any(node.op == "symbol" and all(node is not x for x in kept) for node in expr.walk(graphs)):
            return None
        return Read(self.name, tuple(graphs[1:]), graphs[0])


DISTANCE = expr.symbol("distance")


@cache
def _of_distance() -> dict[Expr, Expr]:
    q, k, d, zero = expr.Q, expr.K, DISTANCE, expr.const(0)
    return {
        q - k: d, k - q: -d, q < k: d < zero, k < q: zero < d, q <= k: d <= zero, k <= q: zero <= d,
        q == k: d == zero, k == q: d == zero,
    }  # fmt: skip


def reads_of(score: Expr | None, name: str) -> tuple[Read, ...]:
    """The reads of a slot that the score has a derivative by."""
    nodes = [] if score is None else expr.walk([score])
    named = [node for node in nodes if node.op in ("load", "param") and node.value == name and node.kind == "float"]
    reads = (Read(name, node.args, expr.derivative(score, node)) for node in named)
    return tuple(read for read in reads if not expr.is_const(read.slope, 0))


MAX_PAGE_RUN = 64


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a kernel is compiled for: equal specs run the same code. Graphs are interned, and compared by identity."""

    dtype: str
    head_dim: int
    head_dim_v: int
    group: int = 1  # query heads that share one key/value head
    score: Expr | None = None  # the modified score as a graph; None: the score itself
    mask: Expr | None = None  # which pairs are visible; None: all
    slots: tuple[Slot, ...] = ()
    dropout: bool = False
    sinks: bool = False
    kv_lengths: bool = False
    deterministic: bool = False
    precision: str | None = None
    packed: bool = False  # sequences of any length follow each other in one axis of tokens
    paged: bool = False  # keys and values lie in pages that a table names
    pe_dim: int = 0  # last columns of the keys, which lie in an array of their own
    fp8: Fp8 | None = None  # q, k and v are codes of e4m3 in uint8; dtype is that of the output
    kv_format: str = ""  # of keys and values of 8 bits, which have scales: "e4m3" or "int8"
    page_run: int = 1  # the largest power of two, up to MAX_PAGE_RUN, that divides the tokens of a page
    stats: bool = False  # the forward pass computes statistics of each row, too
    jvp: str = ""  # the forward pass computes tangents, too: the names of the tensors whose tangents are not 0
    wrt: tuple[str, ...] = ()  # slots of the score modification that the backward pass differentiates by, too

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, AttentionSpec) and self._identity == other._identity)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return AttentionSpec, _values(self)  # without what is computed, which may hold for this process alone

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        return tuple([id(x) if isinstance(x, Expr) else x for x in _values(self)])

    @cached_property
    def _hash(self) -> int:
        return hash(self._identity)

    @property
    def lse_dtype(self) -> str:
        """The accumulators' dtype, which the log-sum-exp keeps."""
        return DTYPES[self.dtype].accumulator

    @property
    def operand_dtype(self) -> str:
        """The dtype of the arrays q, k and v."""
        return self.dtype if self.fp8 is None else "uint8"

    @property
    def operand_size(self) -> int:
        """Bytes of an element of q, k and v."""
        return ITEMSIZE[self.dtype] if self.fp8 is None else 1

    @cached_property
    def key(self) -> str:
        """A name for the spec: equal for equal specs, safe in a file name."""
        graphs = ["" if e is None else expr.key(e) for e in (self.score, self.mask)]
        rest = [getattr(self, f.name) for f in fields(self) if f.name not in ("score", "mask")]
        return hashlib.sha256(repr((graphs, rest)).encode()).hexdigest()[:16]

    @cached_property
    def int32_arrays(self) -> frozenset[str]:
        """Names of arrays whose elements have at most 32 bits; see `expr.int32_arrays`."""
        return expr.int32_arrays({slot.name: slot.dtype for slot in self.slots if slot.ndim is not None})

    @cached_property
    def tile_state(self) -> tuple[Expr, Expr]:
        """(empty, full) of a tile; see `expr.classify`."""
        return expr.classify(expr.TRUE if self.mask is None else self.mask, self.int32_arrays)

    @cached_property
    def sums(self) -> tuple[Slot, ...]:
        """The slots of `wrt`: what a backward pass has gradients by, beside the tensors."""
        return tuple(slot for slot in self.slots if slot.name in self.wrt)

    @property
    def orders_sums(self) -> bool:
        """Whether the bits of these gradients must not depend on the order of their terms."""
        return bool(self.wrt) and self.deterministic

    @cached_property
    def reads(self) -> tuple[Read, ...]:
        """Where the score reads values of `wrt`."""
        return tuple(each for name in self.wrt for each in reads_of(self.score, name))

    def features(self) -> list[str]:
        """Names of the features beyond plain attention, for messages."""
        flags = {
            "score modification": self.score is not None, "mask": self.mask is not None, "dropout": self.dropout,
            "sinks": self.sinks, "kv_lengths": self.kv_lengths, "grouped-query": self.group > 1,
            "packed sequences": self.packed, "paged keys": self.paged, "keys in two arrays": self.pe_dim > 0,
            f"e4m3 with scales per {self.fp8 and self.fp8.per}": self.fp8 is not None,
            f"keys and values of {self.kv_format}": self.kv_format != "",
            "statistics": self.stats, f"tangents by {self.jvp}": self.jvp != "",
            "gradients of a score modification's values": bool(self.wrt),
        }  # fmt: skip
        return [name for name, on in flags.items() if on]


_values: Callable[[AttentionSpec], tuple[Any, ...]] = attrgetter(*(each.name for each in fields(AttentionSpec)))


class Tokens(NamedTuple):
    """Sizes of a call whose sequences differ in length: queries and keys of all sequences, and pairs of a head."""

    q: int
    k: int
    pairs: int


@dataclass(frozen=True)
class Problem:
    """A spec and its sizes; n_q and n_k are of the longest sequence, or bounds, and `tokens` counts all."""

    spec: AttentionSpec
    batch: int
    heads: int
    n_q: int
    n_k: int
    array_kind: str = "numpy"
    tokens: Tokens | None = None

    @property
    def heads_kv(self) -> int:
        return self.heads // self.spec.group

    @property
    def all_tokens(self) -> Tokens:
        """Queries, keys and pairs of a head over all batch entries, without any mask."""
        n_q, n_k = self.n_q, self.n_k
        return self.tokens or Tokens(self.batch * n_q, self.batch * n_k, self.batch * n_q * n_k)

    @property
    def mean_n_q(self) -> int:
        """Queries of a batch entry or a sequence, on average. Packed ones are followed by one more."""
        return min(self.n_q, self.all_tokens.q // max(self.batch - self.spec.packed, 1))

    @property
    def pairs(self) -> int:
        """Query-key pairs without any mask."""
        return self.heads * self.all_tokens.pairs

    @property
    def facts(self) -> dict[str, Any]:
        """What the rows of a profile's tile tables may be restricted to."""
        spec = self.spec
        return {
            "dtype": spec.dtype if spec.fp8 is None else "float8_e4m3",
            "precision": spec.precision,
            "scales": spec.fp8 and spec.fp8.per,  # what shares a scale of codes of e4m3
            "head_dim": spec.head_dim,
            "head_dim_v": spec.head_dim_v,
            "dim": max(spec.head_dim, spec.head_dim_v),
            "mask": spec.mask is not None,  # masks of all kinds: they cut tiles at their edges
            "score": spec.score is not None,
            "packed": spec.packed,
            "stats": spec.stats,
            "rows": self.mean_n_q * spec.group,  # query rows that share the keys of a head
            "tile_rows": self.n_q * (1 if spec.packed else spec.group),  # of them those that may share a tile
            "queries": self.mean_n_q,
            "longest": self.n_q,  # queries of the longest sequence
            "keys": self.n_k,
            "run": spec.page_run if spec.paged else None,  # of pages: keys that are known to lie together
        }

    def flops(self, direction: Direction = "forward", pairs: float | None = None) -> float:
        """Floating-point operations of the matrix products; `pairs`: the visible ones where a mask hides some.

        Forward 2 * (D + Dv) a pair, which is the customary 4 D for D = Dv; backward 2.5 times that (five products
        against two); with tangents up to three times (six products).
        """
        jvp, d, dv = self.spec.jvp, self.spec.head_dim, self.spec.head_dim_v
        more = ("q" in jvp) * d + ("k" in jvp) * d + ("v" in jvp) * dv + (jvp not in ("", "v")) * dv
        forward = 2.0 * (d + dv + more) * (self.pairs if pairs is None else pairs)
        return forward if direction == "forward" else 2.5 * forward

    def bytes(self, direction: Direction = "forward") -> int:
        """Least traffic with main memory: each operand read once, each result written once."""
        d, dv, size, operand = (
            self.spec.head_dim, self.spec.head_dim_v, ITEMSIZE[self.spec.dtype], self.spec.operand_size
        )  # fmt: skip
        queries, keys = self.heads * self.all_tokens.q, self.heads_kv * self.all_tokens.k
        lse = queries * ITEMSIZE[self.spec.lse_dtype]
        size_kv, scales = (1, 8) if self.spec.kv_format else (operand, 0)
        q_and_out, k_and_v = queries * (d * operand + dv * size), keys * ((d + dv) * size_kv + scales)
        if direction == "forward":
            return q_and_out + k_and_v + lse
        return q_and_out + queries * dv * size + k_and_v + lse + queries * d * size + k_and_v  # + dout; dq, dk, dv

    def describe(self) -> str:
        s = self.spec
        dims = f"{s.head_dim}" if s.head_dim == s.head_dim_v else f"{s.head_dim}/{s.head_dim_v}"
        heads = f"{self.heads}" if s.group == 1 else f"{self.heads}:{self.heads_kv}"
        features = s.features()
        extra = f", {', '.join(features)}" if features else ""
        sizes = f"batch {self.batch}, heads {heads}, queries {self.n_q}, keys {self.n_k}, head dim {dims}"
        return f"{s.dtype}, {sizes}{extra} on {self.array_kind} arrays"


BLOCK, PADDING, ALIGNMENT = 128, 32, 16
"""Tokens of a block by default, which are a tile of Hopper's kernel; keys that V^T has a multiple of; bytes that
addresses and strides are multiples of, for Hopper's copy engine (TMA) and the kernel that quantises.
"""


def transposed_codes(xp: Any, codes: Any) -> Any:
    """V^T of codes (..., keys, columns), uint8: keys innermost, permuted in groups of 16; 0 past the last key."""
    *rest, n, columns = codes.shape
    keys = -(-n // PADDING) * PADDING
    padded = xp.zeros((*rest, keys, columns), np.uint8)
    padded[..., :n, :] = codes
    sixteens = padded.reshape((*rest, -1, 2, 4, 2, columns))
    m = sixteens.ndim
    permuted = sixteens.transpose((*range(m - 5), m - 1, m - 5, m - 3, m - 4, m - 2))
    return xp.ascontiguousarray(permuted).reshape((*rest, columns, keys))


SCALES = "q_scale", "k_scale", "v_scale"
"""Names of `Operands.scales`."""


class Tangents(NamedTuple):
    """Tangents of q, k and v, like these, None where they are 0, and those of out and lse, which the pass writes."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


class Stats(NamedTuple):
    """Statistics of each row, (B, Hq, Nq), of lse's dtype, which the forward pass writes."""

    entropy: Any
    max_logit: Any


@dataclass
class Operands:
    """The arrays and numbers of one call as backends get them: four axes, defaults filled in.

    q (B, Hq, Nq, D), k (B, Hkv, Nk, D), v (B, Hkv, Nk, Dv), out (B, Hq, Nq, Dv): any strides, the last axis
    contiguous. lse (B, Hq, Nq). q_offset: int64, (B,). kv_lengths: (B,), int64, or on a device int32, as page_table
    below. params and arrays: the values of the spec's slots by name. sinks: (Hq,). blocks: the BlockMask, if it is the
    only mask.

    Packed sequences: q, out and lse have one batch entry, and so have k and v unless they are paged. cu_seqlens: two
    int64 (B + 1,), where each sequence begins in the tokens of q, and in those of k. The last sequence is what follows
    the caller's: queries without keys.

    Paged keys: k (pages, Hkv, page, D), v likewise. page_table: int64 (B, pages of a sequence), with the page that
    holds keys i * page ... (i + 1) * page - 1 at i. A page that does not exist is read as page 0 or the last one.

    Keys in two arrays: k has the first columns of the keys and k_pe the last pe_dim; the other axes are k's.

    Codes of e4m3: q, k and v are uint8. spec.fp8.transposed: v is V^T (transposed_codes). scales: those of q, k and v,
    float32 (B, heads, tokens, 1), any strides; with scales per block one for each block of 128 tokens. Where keys and
    values alone are numbers of 8 bits, those of q are None.

    follows: the queries of each batch entry, (B,) or one number, where q_offset is kv_lengths less these, by default.

    stats, tangents: of a spec that has them.
    names: the slot of each value of the score modifications, by the caller's name: "bias", "score.table".
    """

    q: Any
    k: Any
    v: Any
    scale: float
    q_offset: Any
    kv_lengths: Any
    params: dict[str, int | float] = field(default_factory=dict)
    arrays: dict[str, Any] = field(default_factory=dict)
    sinks: Any = None
    dropout_p: float = 0.0
    seed: int = 0
    out: Any = None
    lse: Any = None
    blocks: Any = None
    cu_seqlens: tuple[Any, Any] | None = None
    page_table: Any = None
    k_pe: Any = None
    scales: tuple[Any, Any, Any] | None = None
    follows: Any = None
    stats: Stats | None = None
    tangents: Tangents | None = None
    names: dict[str, str] = field(default_factory=dict)

    def sequences(self) -> dict[str, Any]:
        """The arrays that say where packed sequences lie: the two of cu_seqlens, and two by their own names."""
        if self.cu_seqlens is None:
            return {}
        offsets = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.cu_seqlens, strict=True))  # pages have none of keys
        found = {**offsets, "kv_lengths": self.kv_lengths, "q_offset": self.q_offset}
        return {name: array for name, array in found.items() if array is not None}

    def array(self, slot: Slot) -> Any:
        """The array of a slot, checked: a kernel would read another dtype or number of strides out of bounds."""
        array = self.arrays[slot.name]
        if len(array.strides) != slot.ndim or name_of(array.dtype) != slot.dtype:
            raise ValueError(
                f"{slot.name} of a modification: expected {slot.ndim} axes of {slot.dtype}, for which the kernel was "
                f"compiled, got {len(array.strides)} axes of {array.dtype}"
            )
        return array


@dataclass
class Gradients:
    """What the backward pass reads beyond the operands, and where it writes.

    dout (B, Hq, Nq, Dv); dlse (B, Hq, Nq) or None; dq, dk, dv like q, k, v, C-contiguous; dsinks (Hq,) or None.
    values: the gradients by the slots of `spec.sums`, None before: arrays that the backend makes, in the shapes of the
    values, a number's (), of any floating dtype.
    """

    dout: Any
    dlse: Any
    dq: Any
    dk: Any
    dv: Any
    dsinks: Any = None
    values: dict[str, Any] = field(default_factory=dict)
