"""L2 swizzle: how many heads CTAs work on at the same time, so that their operands stay in the L2 cache."""

from __future__ import annotations

from ...spec import ITEMSIZE
from .arguments import Arguments

_LONG_SEQUENCE = 4
"""Times the mean length: where packed sequences differ in length, most of the work is in sequences of about so many."""


def heads_per_l2_group(heads: int, limit: int) -> int:
    """Heads of a group, at most `limit`, such that all groups have about the same size."""
    limit = max(1, min(heads, limit))
    return -(-heads // -(-heads // limit))


def bytes_of_keys(arguments: Arguments) -> int:
    """Bytes of K and V of a key/value head; of packed sequences, those of a long one."""
    spec = arguments.spec
    keys = min(arguments.n_k, _LONG_SEQUENCE * arguments.mean_n_k)
    return max(keys, 1) * (spec.head_dim + spec.head_dim_v) * spec.operand_size


def bytes_of_queries(arguments: Arguments, itemsize: int = 0) -> int:
    """Bytes of Q, dO and the dQ accumulator of the query heads of a key/value head. itemsize: of what is read of Q and
    dO, where that is not the dtype.
    """
    spec = arguments.spec
    row = (spec.head_dim + spec.head_dim_v) * (itemsize or ITEMSIZE[spec.dtype]) + 4 * spec.head_dim
    return max(arguments.n_q, 1) * spec.group * row
