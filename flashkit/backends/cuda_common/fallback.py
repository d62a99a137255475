"""The pass of an older generation, for calls that the kernels of a newer one do not support."""

from __future__ import annotations

from collections.abc import Callable

from ...spec import AttentionSpec, Direction
from . import verify
from .arguments import Arguments
from .device import Device
from .generation import Pass


class Fallback:
    """Takes calls whose arrays do not fit a kernel, for example by their alignment. Planned on the first such call."""

    def __init__(
        self, plan: Callable[[], Pass], spec: AttentionSpec, device: Device, direction: Direction
    ) -> None:
        self._plan, self._for = plan, (spec, device, direction)
        self._pass: Pass | None = None

    def run(self, arguments: Arguments, stream: int) -> None:
        """Enqueue the kernels of the older pass."""
        if self._pass is None:
            planned = self._plan()
            verify.check(planned, *self._for)
            self._pass = planned
        self._pass.run(arguments, stream)
