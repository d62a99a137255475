"""All parameters of a model as one array, and AdamW (Loshchilov and Hutter, arXiv:1711.05101) beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
ALIGNMENT = 64  # elements: whole vectors and cache lines


class Parameters:
    """Named arrays, each a part of flat ones.

    `masters` are what the optimizer updates, in float32 (float64 for a float64 model); `values` are what the model
    computes with, the same array or its copy in bfloat16. Matrices come first: AdamW decays them, and no vectors.

    Parameters
    ----------
    shapes
        By name.
    ops
        The module of array functions, cpu.py or gpu.py.
    dtype
        Of `values`.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], ops: Any, dtype: Any) -> None:
        matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        self.xp = ops.xp
        self.shapes = matrices | {name: shape for name, shape in shapes.items() if len(shape) == 1}
        offsets, size = {}, 0
        for name, shape in self.shapes.items():
            offsets[name] = size
            size += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
            if name in matrices:
                self.decayed = size
        wide = np.float64 if dtype == np.float64 else np.float32
        self.masters, self.gradients, self.mean, self.variance = (ops.xp.zeros(size, wide) for _ in range(4))
        self.values = self.masters if dtype == wide else ops.xp.zeros(size, dtype)
        self._parts = {
            kind: {
                name: getattr(self, kind)[i : i + math.prod(shapes[name])].reshape(shapes[name])
                for name, i in offsets.items()
            }
            for kind in ("masters", "values", "gradients", "mean", "variance")
        }

    def __getitem__(self, name: str) -> Array:
        """What the model computes with."""
        return self._parts["values"][name]

    def gradient(self, name: str) -> Array:
        return self._parts["gradients"][name]

    def state(self) -> dict[str, Array]:
        """What a checkpoint holds: masters by name, and the optimizer's averages."""
        averages = {f"adam.{kind}.{name}": x for kind in ("mean", "variance") for name, x in self._parts[kind].items()}
        return self._parts["masters"] | averages

    def load(self, state: dict[str, Array]) -> None:
        """Copy arrays of `state()`'s names; averages may be missing, as in a published model."""
        for name, to in self.state().items():
            if name in state:
                if state[name].shape != to.shape:
                    raise ValueError(f"{name}: expected shape {to.shape}, got {state[name].shape}")
                to[...] = self.xp.asarray(state[name])
            elif not name.startswith("adam."):
                raise ValueError(f"the checkpoint has no {name}")
        if self.values is not self.masters:
            self.values[...] = self.masters.astype(self.values.dtype)


@dataclass(frozen=True)
class AdamW:
    """With a clipped gradient and a cosine schedule.

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

    def update(self, p: Parameters, step: int, ops: Any) -> None:
        """One step with the gradients, which are 0 afterwards."""
        norm = ops.xp.sqrt(ops.xp.dot(p.gradients, p.gradients))
        factor = ops.xp.minimum(self.clip / (norm + 1e-6), 1)
        corrections = 1 - self.betas[0] ** (step + 1), 1 - self.betas[1] ** (step + 1)
        ops.adamw(p, factor, self.rate_at(step), self.decay, self.betas, corrections)
