"""Whether results of a trial are right: held against the definition, with what plain arithmetic is off by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ... import reference
from ...spec import AttentionSpec, Direction, Operands

SLACK = 4.0
"""How many times the plain computation's error a right result may have: its sums have another order, and the largest of
few errors is a matter of luck. What a wrong tile does to a result is thousands of times that."""


class Truth:
    """What a pass should give for operands in NumPy. For the backward pass they hold out and lse; dout is given too."""

    def __init__(self, spec: AttentionSpec, operands: Operands, direction: Direction, dout: np.ndarray) -> None:
        self.spec, self.operands, self.direction, self.dout = spec, operands, direction, dout

    @cached_property
    def allowed(self) -> dict[str, tuple[np.ndarray, float]]:
        """By name, the definition's result in float64, and the error to be allowed.

        That is SLACK times the error of the plain computation in the same precision, and one rounding of the largest
        value. The plain float64 computation is the definition; its error is taken from float32's.
        """
        dtype = self.operands.q.dtype
        coarse = np.dtype(np.float32) if dtype == np.float64 else dtype
        exact, plain = self._computed(np.float64), self._computed(coarse)
        unit, ratio = _unit(dtype), _unit(dtype) / _unit(coarse)
        return {
            name: (x, SLACK * ratio * _error(plain[name], x) + unit * float(np.abs(x).max()))
            for name, x in exact.items()
        }

    def _computed(self, dtype: Any) -> dict[str, np.ndarray]:
        if self.direction == "forward":
            return dict(zip(("out", "lse"), reference.standard(self.spec, self.operands, dtype)))
        grads = reference.standard_gradients(self.spec, self.operands, self.dout, dtype=dtype)
        return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    def complaint(self, results: Mapping[str, np.ndarray]) -> str:
        """Which of these results is wrong, or nothing. Names: out and lse, or dq, dk and dv."""
        for name, got in results.items():
            exact, allowed = self.allowed[name]
            error = _error(got, exact)
            if not error <= allowed:
                return f"{name} is off by {error:.3g}, {allowed:.3g} is allowed"
        return ""


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - exact).max())


def _unit(dtype: Any) -> float:
    """The distance from 1 to the next number."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)
