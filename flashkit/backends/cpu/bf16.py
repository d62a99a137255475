"""How this machine multiplies bfloat16, best way first.

    amx           tile registers (micro/amx.py), where the CPU has them and Linux grants their use
    avx512bf16    dot products of bf16 pairs by vectors (micro/bf16_pairs.py), on AMD's CPUs
    widen         float32 products of operands that are widened when a tile is loaded, as for float16

FLASHKIT_CPU_BF16 selects one by name.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from ... import settings
from ...devices import host
from ...errors import UnsupportedError

VARIABLE = settings.CPU_BF16.name


class Method(NamedTuple):
    name: str
    why: str


def select() -> Method:
    """The method that the environment names, or the best, and why. ValueError or UnsupportedError if there is none."""
    wanted = settings.CPU_BF16.read()
    if wanted is None:
        return _best()
    if obstacle := _obstacle(wanted):
        raise UnsupportedError(f"{VARIABLE}={wanted}: {obstacle}")
    return Method(wanted, f"{VARIABLE} asks for it")


@cache
def _best() -> Method:
    obstacles: list[str] = []
    for name in ("amx", "avx512bf16"):
        if not (obstacle := _obstacle(name) or _drawback(name)):
            return Method(name, "; ".join(["the fastest here", *obstacles]))
        obstacles.append(obstacle)
    return Method("widen", "; ".join(obstacles))


def _drawback(name: str) -> str:
    """Why a method that this machine has is not the fastest, "" if nothing speaks against it."""
    if name == "avx512bf16" and host.cpu_is_intel():
        # vdpbf16ps, one in two cycles, multiplies half as fast as two multiply-adds of float32 a cycle.
        return "AVX512-BF16 is slower than float32 on Intel's CPUs"
    return ""


@cache
def _obstacle(name: str) -> str:
    """What this machine lacks for a method, "" if nothing."""
    needs = {"amx": ("amx_tile", "amx_bf16", "avx512_bf16"), "avx512bf16": ("avx512_bf16",)}.get(name, ())
    missing = [feature for feature in needs if feature not in host.cpu_features()]
    if missing:
        return f"this CPU has no {', '.join(missing)}"
    if name == "amx":
        from .micro import amx

        return amx.request_permission()
    return ""
