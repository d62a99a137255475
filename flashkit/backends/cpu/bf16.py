"""How this machine multiplies bfloat16, best way first.

    amx           tiles in registers (amx.py), where the CPU has them and the kernel grants their use
    avx512bf16    dot products of pairs by vectors (pairs.py)
    widen         float32 products of operands widened when a tile is loaded, as float16 has them
    emulate       amx's code with its tiles in memory: slow, for tests; never chosen by itself

FLASHKIT_CPU_BF16 chooses another way than the best.
"""

from __future__ import annotations

import os
from functools import cache
from typing import NamedTuple

from ...devices import host
from ...errors import UnsupportedError

VARIABLE = "FLASHKIT_CPU_BF16"
WAYS = ("amx", "avx512bf16", "widen", "emulate")


class Way(NamedTuple):
    name: str
    why: str


def way() -> Way:
    """The way that the environment asks for, or the best one, and the reason.

    ValueError: no such way. UnsupportedError: this machine cannot go it.
    """
    wanted = os.environ.get(VARIABLE, "")
    if not wanted:
        return _best()
    if wanted not in WAYS:
        raise ValueError(f"{VARIABLE} is one of {', '.join(WAYS)}; got {wanted!r}")
    if obstacle := _obstacle(wanted):
        raise UnsupportedError(f"{VARIABLE}={wanted}: {obstacle}")
    return Way(wanted, f"{VARIABLE} asks for it")


@cache
def _best() -> Way:
    obstacles: list[str] = []
    for name in ("amx", "avx512bf16"):
        if not (obstacle := _obstacle(name)):
            return Way(name, "; ".join(["the fastest here", *obstacles]))
        obstacles.append(obstacle)
    return Way("widen", "; ".join(obstacles))


@cache
def _obstacle(name: str) -> str:
    """Why this machine cannot go a way; "" where it can."""
    needs = {"amx": ("amx_tile", "amx_bf16", "avx512_bf16"), "avx512bf16": ("avx512_bf16",)}.get(name, ())
    missing = [feature for feature in needs if feature not in host.cpu_features()]
    if missing:
        return f"this CPU has no {', '.join(missing)}"
    if name == "amx":
        from .micro import amx

        return amx.permitted()
    return ""
