"""What all ranks of a call have to agree on, in a form that is compared and sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import mods
from ..options import OPTIONS
from .placement import count, ranges_of


class Header(NamedTuple):
    """What all ranks have to agree on, and how many tokens a rank has."""

    facts: dict[str, str]
    tokens: tuple[int, ...]
    seed: int
    device: Any


def compare(headers: Sequence[Header]) -> None:
    """ValueError where ranks differ in a fact: the same on all ranks."""
    names = dict.fromkeys(name for each in headers for name in each.facts)
    for name in names:
        given = [each.facts.get(name, "not given") for each in headers]
        if len(set(given)) > 1:
            ranks = {value: [rank for rank, own in enumerate(given) if own == value] for value in given}
            text = ", ".join(f"{value} on rank {', '.join(map(str, which))}" for value, which in ranks.items())
            raise ValueError(f"{name}: expected the same on all ranks, got {text}")


def check_sizes(given: Sequence[int], order: str, name: str) -> list[list[range]]:
    """The positions of each rank's tokens, if the ranks have as many as `shard` gives them."""
    ranges = [ranges_of(order, sum(given), rank, len(given)) for rank in range(len(given))]
    wanted = list(map(count, ranges))
    if list(given) != wanted:
        raise ValueError(
            f"{name}: expected {wanted} tokens on the ranks, as shard(order={order!r}) gives them, got {list(given)}"
        )
    return ranges


def fingerprint(name: str, value: Any) -> str:
    """An option as text that is equal where the option is: contents of arrays on the host by a hash."""
    if isinstance(value, tuple):
        return str(tuple(fingerprint(name, x) for x in value))
    if name in ("score_mod", "mask_mod"):
        value = mods.trace(value, "score" if name == "score_mod" else "mask")
    if name == "block_mask":
        value = getattr(value, "mod", value)
    if isinstance(value, mods.Mod):
        own = {each: fingerprint(each, x) for each, x in value.arrays.items()}
        return hashlib.sha256(f"{value.key} {dict(value.params)} {own}".encode()).hexdigest()[:12]
    if OPTIONS.get(name) is not None and OPTIONS[name].axes == "pairs":
        return f"{value.dtype} of {value.ndim} axes and {value.shape[-1]} keys"
    if isinstance(value, (list, np.ndarray)):
        value = np.ascontiguousarray(value)
        return f"{value.dtype}{value.shape} {hashlib.sha256(value.tobytes()).hexdigest()[:12]}"
    return f"{value.dtype}{value.shape}" if hasattr(value, "dtype") and hasattr(value, "shape") else repr(value)
