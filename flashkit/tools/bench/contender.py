"""What is timed in a case: contenders compute the same attention, yardsticks measure a rate to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ...api import attention, attention_vjp
from ...spec import Direction
from .cases import Arrays, Case


class Entry(NamedTuple):
    """`call` is timed; `result` computes the same once more and returns NumPy arrays: (out,) or (dq, dk, dv)."""

    call: Callable[[], object]
    result: Callable[[], Arrays]


class Yardstick(NamedTuple):
    """`call` does `work` FLOPs or bytes (None: as many as the case); flashkit's rate is compared with its rate."""

    call: Callable[[], object]
    work: float | None = None
    unit: Literal["FLOP", "byte"] = "FLOP"


Contender = Callable[[Case, Any, Direction, int], Entry | None]
"""(case, (q, k, v, dout), direction, threads) -> Entry, None if not supported. Libraries are imported inside."""


def with_flashkit(case: Case, arrays: Sequence[Any], direction: Direction, threads: int, **options: Any) -> Entry:
    """flashkit with these further options of `attention`. The backward pass is timed alone."""
    q, k, v, dout = arrays
    options |= case.options
    if direction == "forward":
        forward = partial(attention, q, k, v, **options)
        return Entry(forward, lambda: (in_numpy(case, forward()),))
    _, vjp = attention_vjp(q, k, v, **options)
    return Entry(partial(vjp, dout), lambda: tuple(in_numpy(case, x) for x in vjp(dout)))


def in_numpy(case: Case, x: Any) -> np.ndarray:
    """A result in NumPy; of one on a device, which may have gigabytes, the first heads of the first entry."""
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(x[:1, : case.group if x.shape[1] == case.heads else 1].get())


def torch_entry(
    attend: Callable[..., Any], tensors: tuple[Any, ...], dout: Any, to_numpy: Callable[[Any], np.ndarray],
    direction: Direction,
) -> Entry:  # fmt: skip
    """attend(q, k, v) of PyTorch without autograd, or its backward pass alone."""
    import torch

    if direction == "forward":

        def forward() -> Any:
            with torch.inference_mode():
                return attend(*tensors)

        return Entry(forward, lambda: (to_numpy(attend(*tensors)),))
    inputs = tuple(x.clone().requires_grad_() for x in tensors)
    backward: Callable[[], Any] = partial(torch.autograd.grad, attend(*inputs), inputs, dout, retain_graph=True)
    return Entry(backward, lambda: tuple(map(to_numpy, backward())))
