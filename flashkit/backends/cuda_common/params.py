"""`Params`, the argument block that every CUDA kernel takes by value: defined here, once, for all languages.

The host writes it as 64-bit words, one after the other. CUDA C++ gets its structure from `cuda_header`, Numba its named
tuple from numba_cuda/compile.py. A pass fills the fields that its kernels read; a field holds one thing.
"""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

Kind = Literal["tensor", "int64", "float64", "uint64", "pointer to void", "pointer to const void",
               "pointer to const int64", "integers", "pointer to int32", "pointer to uint32"]  # fmt: skip

WORDS_OF_TENSOR = 4
"""The address and the strides, in elements, of the batch, head and token axes."""


class Field(NamedTuple):
    """One field: its name, its type, and what it holds."""

    name: str
    kind: Kind
    meaning: str

    @property
    def words(self) -> int:
        """64-bit words that it takes."""
        return WORDS_OF_TENSOR if self.kind == "tensor" else 1


FIELDS = tuple(
    Field(*each)
    for each in (
        ("q", "tensor", "(B, Hq, Nq, D)"),
        ("k", "tensor", "(B, Hkv, Nk, D), or (pages, Hkv, page, D)"),
        ("v", "tensor", "(B, Hkv, Nk, Dv)"),
        ("out", "tensor", "(B, Hq, Nq, Dv)"),
        ("lse", "tensor", "(B, Hq, Nq)"),
        ("dout", "tensor", "like out; backward: its gradient; forward with tangents: its tangent, and so on"),
        ("dlse", "tensor", "like lse; data may be null in the backward pass"),
        ("dq", "tensor", "like q; data is null where a tangent is 0"),
        ("dk", "tensor", "like k"),
        ("dv", "tensor", "like v"),
        ("bwd_lse", "tensor", "(B, Hq, Nq); backward: the log-sum-exp, with +inf for rows without a visible key"),
        ("delta", "tensor", "(B, Hq, Nq); backward: rowsum(dO * O) - dlse"),
        ("o_partial", "tensor", "(splits * B, Hq, Nq, Dv) float32: each split's output"),
        ("lse_partial", "tensor", "(splits * B, Hq, Nq) float2: each split's row reference, base 2, and row sum"),
        ("dq_accum", "tensor", "(B, Hq, query tiles, ..) float32: sums of dQ"),
        ("dq_semaphore", "tensor", "(B, Hq, query tiles, words): which key tiles have been added to a tile of dQ"),
        ("row_factors", "tensor", "(B, Hq, Nq, 3) float32: lse, delta and scale of dO for FP16x2's backward pass"),
        ("q_scale", "tensor", "scale of each row of q: of FP16x2 terms, or of codes"),
        ("k_scale", "tensor", "FP16x2: scale of each tile of k; codes: of each key"),
        ("v_scale", "tensor", "FP16x2: scale of each tile of v; codes: of each key"),
        ("dout_scale", "tensor", "FP16x2: scale of each row of dout"),
        ("entropy", "tensor", "(B, Hq, Nq); statistics"),
        ("max_logit", "tensor", "(B, Hq, Nq); statistics"),
        ("distance_bias", "tensor", "(B or 1, Hq, rows and keys) float32: what is added to scores of a distance"),
        ("distance_sums", "tensor", "likewise: sums of dS"),
        ("sinks", "pointer to const void", "(Hq,) in computing precision"),
        ("dsinks", "pointer to void", "(Hq,) in computing precision, or null"),
        ("q_offsets", "pointer to const int64", "(B,) position of row 0, or null: q_offset for all"),
        ("kv_lengths", "integers", "(B,), with HAS_LENGTHS; otherwise n_k for all"),
        ("cu_seqlens_q", "pointer to const int64", "(B + 1,) where each packed sequence begins in q"),
        ("cu_seqlens_k", "pointer to const int64", "(B + 1,) where it begins in k"),
        ("page_table", "integers", "(B, table_width) which page has these keys of a sequence"),
        ("table_width", "int64", "pages of a sequence, at most"),
        ("pages", "int64", "pages of k and v"),
        ("page", "int64", "keys of a page"),
        ("q_offset", "int64", "position of row 0 on the axis of the keys"),
        ("batch", "int64", "B"),
        ("heads", "int64", "Hq"),
        ("n_q", "int64", "Nq, or the rows of all packed sequences"),
        ("n_k", "int64", "Nk, or the keys of all packed sequences, or that a row of page_table has room for"),
        ("row_block", "int64", "rows that bwd_lse and delta of a packed sequence have room for a multiple of"),
        ("num_splits", "int64", "split-KV: number of splits of the keys"),
        ("heads_per_l2_group", "int64", "heads whose tiles CTAs work on at the same time (memory.py)"),
        ("preprocessed_tiles", "int64", "query tiles that bwd_preprocess prepares before the backward kernel"),
        ("preprocess_counters", "pointer to int32", "fused preprocess: next query tile; ready tiles and finished work "
         "tiles of each key/value head"),
        ("tile_counter", "pointer to uint32", "work tiles claimed, CTAs that have finished"),
        ("head_scales", "pointer to void", "(B * Hkv, 4) float32: TF32's backward pass: scales of q, k, v and dout"),
        ("fallback", "pointer to int32", "a flag, or null: kernels of the fallback return at once where it is 0"),
        ("softmax_scale", "float64", "factor on q . k"),
        ("seed", "uint64", "dropout"),
        ("dropout_first", "uint64", "dropout: the row at which the counter begins; from bit 32, a quarter of the key"),
        ("dropout_head", "uint64", "and the head"),
        ("dropout_threshold", "uint64", "dropout: a pair is dropped if its random word is below"),
        ("dropout_scale", "float64", "1 / (1 - p)"),
    )
)  # fmt: skip

TENSORS = tuple(field.name for field in FIELDS if field.kind == "tensor")
SCALARS = tuple(field for field in FIELDS if field.kind != "tensor")


def _offsets() -> dict[str, int]:
    ends, at = {}, 0
    for field in FIELDS:
        ends[field.name], at = at, at + field.words
    return ends


AT = _offsets()
"""Index of each field's first word."""

VALUES = sum(field.words for field in FIELDS)
"""Index of the first value of the score and mask modification, which come after the fields."""

_CUDA = {
    "tensor": "Tensor ", "int64": "long long ", "float64": "double ", "uint64": "unsigned long long ",
    "pointer to void": "void* ", "pointer to const void": "const void* ", "pointer to int32": "int* ",
    "integers": "Integers ", "pointer to const int64": "const long long* ",
    "pointer to uint32": "unsigned* ",
}  # fmt: skip

HEADER = "generated/params.cuh"
"""The name by which kernels include it."""


def integers_address(address: int, itemsize: int) -> int:
    """The word of a field of integers: int64 ones, or int32 ones, which the lowest bit tells kernels."""
    return address | (itemsize == 4)


@cache
def cuda_header() -> str:
    """The structure in CUDA C++."""
    lines = [f"    {_CUDA[field.kind]}{field.name};  // {field.meaning}" for field in FIELDS]
    return "\n".join([
        "// Written by cuda_common/params.py.",
        "#pragma once",
        "struct Tensor {  // strides are in elements, the last axis is contiguous",
        "    void* data;",
        "    long long batch, head, token;",
        "};",
        "// int64, or int32 where the lowest bit of the address is set (integers_address).",
        "struct Integers {",
        "    const char* address;",
        "    __device__ __forceinline__ bool given() const { return address != nullptr; }",
        "    __device__ __forceinline__ long long operator[](long long i) const {",
        "        const bool is_int32 = reinterpret_cast<unsigned long long>(address) & 1;",
        "        return is_int32 ? reinterpret_cast<const int*>(address - 1)[i]",
        "                        : reinterpret_cast<const long long*>(address)[i];",
        "    }",
        "};",
        "struct Params {",
        *lines,
        "    long long values[VALUES > 0 ? VALUES : 1];  // of the modification, in the order of the spec's slots",
        "};",
        'static_assert(sizeof(Params) == 8 * PARAMS_WORDS, "the compiler lays Params out otherwise than the host");',
        "",
    ])  # fmt: skip
