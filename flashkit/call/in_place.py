"""Calls whose quantised keys and values a backend reads as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import dispatch
from ..spec import Operands, Problem
from .arguments import prepare
from .loans import Dequantised
from .quantized import Quantized
from .shape import Shape


def in_place(
    loan: Dequantised, q: Any, k: Any, v: Any, options: dict[str, Any], backend: str | None
) -> tuple[Problem, Operands, Shape] | None:  # fmt: skip
    """The call prepared for a backend that reads keys and values of 8 bits, of NumPy; None if there is none.

    options: all arguments of `prepare`. Scales are factors of scores and weights then: they belong to tokens, or to
    more than a token, and there is no rotation and no mean.
    """
    layout = options["layout"] if options["cu_seqlens"] is options["page_table"] is None else "bnhd"
    if loan.fp8 or loan.kind != "numpy" or isinstance(q, Quantized) or not _fit(k, v, layout):
        return None
    scales = np.broadcast_to(k.scale, (*k.shape[:-1], 1)), np.broadcast_to(v.scale, (*v.shape[:-1], 1))
    prepared = prepare(q, k.data, v.data, kv_format=k.format, scales=scales, **options)
    found = dispatch.candidates(prepared[0], only=dispatch.forced(backend))
    return prepared if found and found[0].verdict.ok else None


def _fit(k: Any, v: Any, layout: str) -> bool:
    if not (isinstance(k, Quantized) and isinstance(v, Quantized) and k.format == v.format):
        return False
    plain = all(x.seed is None and x.mean is None and x.per != "block" for x in (k, v))
    return plain and all(x.per == "tensor" or x.ndim == 2 or x.layout == layout for x in (k, v))
