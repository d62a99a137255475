"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) with a clipped gradient and a cosine schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .parameters import Parameters


@dataclass(frozen=True)
class AdamW:
    """Its settings.

    rate: the largest learning rate, reached after `warmup` steps and a tenth of which is left after `steps`; clip: the
    largest norm of the gradient.
    """

    steps: int
    rate: float = 6e-4
    warmup: int = 100
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def rate_at(self, step: int) -> float:
        """Of a step, from 0 on."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = min((step - self.warmup) / max(self.steps - self.warmup, 1), 1.0)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def update(self, parameters: Parameters, step: int, ops: Any) -> None:
        """One step with the gradients, which are 0 afterwards."""
        p = parameters
        norm = ops.xp.sqrt(ops.xp.dot(p.gradients, p.gradients))
        factor = ops.xp.minimum(self.clip / (norm + 1e-6), 1)
        corrections = 1 - self.betas[0] ** (step + 1), 1 - self.betas[1] ** (step + 1)
        ops.adamw(p, factor, self.rate_at(step), self.decay, self.betas, corrections)
