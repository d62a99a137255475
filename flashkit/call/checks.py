"""Checks of single arguments of attention(). Every error names the argument, what was expected and what came."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from .. import settings
from ..errors import shown
from ..mods import Mod
from ..mods.dropout import ChunkSeed
from ..mods.tracing import DTYPES
from ..numeric import described, integer
from . import arrays


def choice(name: str, value: Any, options: tuple[str | None, ...]) -> None:
    """Check that a value is one of these; not by ==, which arrays answer for each element."""
    if not isinstance(value, str | None) or value not in options:
        expected = ", ".join(map(repr, options[:-1])) + f" or {options[-1]!r}"
        raise ValueError(f"{name}: expected {expected}, got {shown(value)}")


def flag(name: str, value: Any, hint: str = "") -> bool:
    """True or False; hint: continues the error message."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False{hint}, got {described(value)}")
    return bool(value)


def is_deterministic(value: Any) -> bool:
    """Whether the call or the process (FLASHKIT_DETERMINISTIC) asks for deterministic results."""
    return flag("deterministic", value) or bool(settings.DETERMINISTIC.read())


def window_of(window: Any) -> tuple[int | None, int | None]:
    """(left, right)."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected (left, right), numbers of keys or None for no bound, got {shown(window)}")
    left, right = (
        None if side is None else integer(f"window[{i}], a number of keys", side, 0) for i, side in enumerate(window)
    )
    return left, right


def _floats(name: str, values: Any, kind: str) -> Any:
    """An array of floating numbers, or a list of them as an array."""
    if isinstance(values, (list, tuple)):
        try:
            values = np.asarray(values, np.float32)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{name}: expected floating numbers, got {shown(values)}") from None
    values = arrays.own_form(name, values, kind)
    if DTYPES.get(values.dtype.name) != "float":
        raise TypeError(f"{name}: expected a floating dtype up to float64, got {values.dtype}")
    return values


def slopes_of(slopes: Any, kind: str, batch: int, heads: int, layout: str) -> Any:
    """alibi_slopes."""
    slopes = _floats("alibi_slopes", slopes, kind)
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes: expected shape (Hq,) = ({heads},) or (B, Hq) = ({batch}, {heads}) with layout={layout!r}, "
            f"got {slopes.shape}"
        )
    return slopes


def sinks_of(sinks: Any, kind: str, heads: int, layout: str, dtype: str, copied: bool = True) -> Any:
    """The sinks in the computing precision, unless `copied` is False, or None."""
    if sinks is None:
        return None
    sinks = _floats("sinks", sinks, kind)
    if sinks.shape != (heads,):
        raise ValueError(
            f"sinks: expected shape (Hq,) = ({heads},) with layout={layout!r}, one logit for each query head, got "
            f"{sinks.shape}"
        )
    return sinks.astype(dtype) if copied else sinks


def seed_of(seed: Any, dropout_p: float) -> int:
    """The seed, or a random one if dropout needs one."""
    if seed is None:
        return secrets.randbits(64) if dropout_p else 0
    return seed if isinstance(seed, ChunkSeed) else integer("seed", seed, 0, 2**64 - 1)


def block_mask_of(
    block_mask: Any, batch: int, heads: int, n_q: int, n_k: int, layout: str, larger: bool = False
) -> Mod:
    """The mask of a BlockMask for these sizes, or, where sequences differ in length, for larger ones."""
    from ..mods.block_mask import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask: expected a flashkit.BlockMask, got {type(block_mask).__name__}")
    sizes = block_mask.n_q, block_mask.n_k
    if sizes != (n_q, n_k) and not (larger and sizes[0] >= n_q and sizes[1] >= n_k):
        least = ", those of the longest sequences, or more" if larger else ""
        raise ValueError(
            f"block_mask: expected one for {n_q} queries and {n_k} keys{least} (layout={layout!r}), got one for "
            f"{sizes[0]} and {sizes[1]}"
        )
    for what, count, n in (("batch entries", block_mask.batch, batch), ("heads", block_mask.heads, heads)):
        if count not in (1, n):
            raise ValueError(f"block_mask: expected 1 or {n} {what} (layout={layout!r}), got {count}")
    return block_mask.mod


def check_out(out: Any, kind: str, dtype: str, wanted: tuple[int, ...]) -> None:
    """Check that the array given as `out` can hold the result."""
    arrays.require("out", out, kind)
    if arrays.dtype_name("out", out) != dtype:
        raise TypeError(f"out: expected dtype {dtype} (q's), got {out.dtype}")
    if out.shape != wanted:
        raise ValueError(f"out: expected shape {wanted}, got {out.shape}")
    if kind == "numpy" and not out.flags.writeable:
        raise ValueError("out: expected a writable array, got a read-only one")


def can_write(out: Any, *inputs: Any) -> bool:
    """Whether a kernel may write to `out`: it is addressable, its elements do not overlap, and it shares no memory with
    an input.
    """
    if arrays.addressable(out) is not out or 0 in [s for s, n in zip(out.strides, out.shape, strict=True) if n > 1]:
        return False
    if out.ndim > 4 and not out.flags.c_contiguous:
        return False
    return not any(arrays.may_share(out, x) for x in inputs)
