"""What a generation of kernels is: those for one kind of arithmetic units, newest first in backend.py.

A generation says which specs it can do on a device, in which direction, and plans a pass. What it cannot do goes to
the next one down; `simt` can do everything.
"""

from __future__ import annotations

from typing import Any, Protocol

from ...spec import AttentionSpec, Direction, Problem, Verdict
from ..cuda_common.device import Device
from ..cuda_common.launch import Library
from .arguments import Arguments


class Pass(Protocol):
    """One direction of a plan: kernels, compiled and loaded, and how they are launched."""

    tile: Any
    why: str
    libraries: list[Library]

    def run(self, arguments: Arguments, stream: int) -> None:
        """Enqueue the kernels; changes nothing in `arguments` that another call of the same would not change."""


class Generation(Protocol):
    """Kernels for one kind of arithmetic units."""

    name: str

    def supports(self, spec: AttentionSpec, device: Device, direction: Direction) -> Verdict:
        """Whether these kernels can do it, or the sentence that says why not."""

    def plan(self, problem: Problem, row: Any, device: Device, direction: Direction) -> Pass:
        """A pass for the problem; row: of the device's profile, for this generation, or None."""
