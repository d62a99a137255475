"""Results of a trial against the reference, with a tolerance from the error of the plain computation."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ... import reference
from ...spec import AttentionSpec, Direction, Operands

SLACK = 4.0
"""A result may have this many times the error of the plain computation: its sums are taken in another order, and the
maximum of a few errors varies. A wrong tile is off by thousands of times that error."""


class Expected:
    """The results that a pass should give.

    Parameters
    ----------
    spec
        What is computed.
    operands
        NumPy operands; for the backward pass with `out` and `lse` of the forward pass.
    direction
        "forward" or "backward".
    dout
        Gradient of `out`, used by the backward pass alone.
    """

    def __init__(self, spec: AttentionSpec, operands: Operands, direction: Direction, dout: np.ndarray) -> None:
        self.spec, self.operands, self.direction, self.dout = spec, operands, direction, dout

    @cached_property
    def tolerances(self) -> dict[str, tuple[np.ndarray, float]]:
        """For each result the reference in float64 and the largest absolute error that is allowed.

        The tolerance is SLACK times the error of the plain computation in the same precision, and one rounding of the
        largest value. For float64, which the reference itself computes in, that error is scaled from float32's.
        """
        dtype = self.operands.q.dtype
        coarse = np.dtype(np.float32) if dtype == np.float64 else dtype
        exact, plain = self._computed(np.float64), self._computed(coarse)
        eps, ratio = _eps(dtype), _eps(dtype) / _eps(coarse)
        return {
            name: (x, SLACK * ratio * _error(plain[name], x) + eps * float(np.abs(x).max()))
            for name, x in exact.items()
        }

    def _computed(self, dtype: Any) -> dict[str, np.ndarray]:
        if self.direction == "forward":
            return dict(zip(("out", "lse"), reference.standard(self.spec, self.operands, dtype)))
        grads = reference.standard_gradients(self.spec, self.operands, self.dout, dtype=dtype)
        return {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}

    def complaint(self, results: Mapping[str, np.ndarray]) -> str:
        """The first of these results that is wrong, in a sentence; empty if all are right.

        results: by name, "out" and "lse", or "dq", "dk" and "dv".
        """
        for name, got in results.items():
            exact, allowed = self.tolerances[name]
            error = _error(got, exact)
            if not error <= allowed:
                return f"{name} is off by {error:.3g}, {allowed:.3g} is allowed"
        return ""


def _error(got: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(got.astype(np.float64) - exact).max())


def _eps(dtype: Any) -> float:
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps)
