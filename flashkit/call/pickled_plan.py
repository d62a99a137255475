"""Plans as pickles: what was asked for, not compiled code. Loading one plans anew, on the machine that loads it, with
every check of `flashkit.plan`.
"""

from __future__ import annotations

import copyreg
from contextlib import nullcontext
from typing import Any

import numpy as np

from ..errors import shown
from .arguments import prepare
from .planned import Planned
from .positions import queries_of

OPTIONS = (
    "scale", "q_offset", "kv_lengths", "score_mod", "mask_mod", "block_mask", "dropout_p", "seed", "sinks", "layout",
    "deterministic", "precision", "cu_seqlens", "page_table",
)  # fmt: skip
"""Arguments of `prepare` that say everything: causal masks, windows, biases and the like are in the joined mods, and so
are lengths of queries.
"""


def _reduce(planned: Planned) -> Any:
    spec, operands = planned.problem.spec, planned._operands
    score, mask = planned.mods()
    tensors = [(planned.problem.array_kind, *rest) for _, *rest in planned._layouts]
    own = slice(-1 if spec.packed else None)  # without the sequence that a packed call adds
    offsets_q, offsets_k = (None if x is None else x[own] for x in operands.cu_seqlens or (None, None))
    has_lengths = spec.kv_lengths and (spec.paged or not spec.packed)
    options = (
        operands.scale, operands.q_offset[own], operands.kv_lengths[own] if has_lengths else None,
        score, mask if operands.blocks is None else None, operands.blocks, operands.dropout_p,
        operands.seed if spec.dropout else None, operands.sinks, planned._shape.layout, spec.deterministic,
        spec.precision, offsets_q if offsets_k is None else (offsets_q, offsets_k), operands.page_table,
    )  # fmt: skip
    return _planned, (tensors, options, planned._asked, planned._return_lse, planned._follows)


def register() -> None:
    """Let pickle and copy know."""
    copyreg.pickle(Planned, _reduce)


def _planned(tensors: Any, options: Any, backend: Any, return_lse: Any, follows: Any) -> Planned:
    """The plan whose pickled form this is."""
    if not isinstance(tensors, list) or len(tensors) != 3 or len(options) != len(OPTIONS):
        raise ValueError(f"no pickled plan: {shown(tensors)}")
    given = tuple(_laid_out(*each) for each in tensors)
    problem, operands, shape = prepare(*given, **dict(zip(OPTIONS, options, strict=True)))
    if follows is not None:
        n_q, queries = problem.n_q, None if isinstance(follows, int) else follows
        follows = queries_of(queries, problem.array_kind, shape, problem.batch, n_q, n_q)
    varies = problem.spec.kv_lengths and not problem.spec.packed
    return Planned(problem, operands, shape, given, backend, return_lse is True, varies=varies, follows=follows)


def _laid_out(kind: str, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, place: Any) -> Any:
    """An array of this layout with arbitrary contents; its memory is not touched here."""
    shape, strides, dtype = tuple(map(int, shape)), tuple(map(int, strides)), np.dtype(dtype)
    reach = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)] if 0 not in shape else []
    first, last = sum(x for x in reach if x < 0), sum(x for x in reach if x > 0)
    size = last - first + dtype.itemsize
    if kind != "cupy":
        memory = np.empty(size + 2 * dtype.itemsize, np.uint8)
        start = -first + (-memory.ctypes.data + first) % dtype.itemsize + (0 if place else 1)
        return np.ndarray(shape, dtype, memory, start, strides)
    import cupy

    with cupy.cuda.Device(int(place)) if place is not None else nullcontext():
        held = cupy.empty(size, np.uint8)
        return cupy.ndarray(shape, dtype, held.data + -first, strides)
