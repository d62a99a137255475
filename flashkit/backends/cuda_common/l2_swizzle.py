"""How many heads blocks work at together, so that what they read, and add to, stays in the L2 cache."""

from __future__ import annotations

from ...spec import ITEMSIZE
from .arguments import Arguments


def heads_per_l2_group(heads: int, most: int) -> int:
    """Heads that blocks work at together, `most` at most: in parts that are as even as may be."""
    most = max(1, min(heads, most))
    return -(-heads // -(-heads // most))


def bytes_of_keys(arguments: Arguments) -> int:
    """What the forward pass reads of the keys and values of a head."""
    spec = arguments.spec
    return max(arguments.n_k, 1) * (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.dtype]


def bytes_of_queries(arguments: Arguments) -> int:
    """What the backward pass reads of the rows of a key/value head, and adds to dQ for them."""
    spec = arguments.spec
    row = (spec.head_dim + spec.head_dim_v) * ITEMSIZE[spec.dtype] + 4 * spec.head_dim
    return max(arguments.n_q, 1) * spec.group * row
