"""`QuantizedLayer`: a layer whose keys and values are 8-bit numbers with a scale for each token and head."""

from __future__ import annotations

from typing import Any

from ..api import attention
from ..call import arrays
from ..call.quantized import Quantized, quantize
from ..rope.apply import Table, rotate
from .layer import Form, Layer, Window
from .steps import Step, Steps


class QuantizedLayer(Layer):
    """A layer of a `KVCache` that was made with `quantized`.

    Attributes
    ----------
    number : int
        The index of the layer.
    k_pages, v_pages : Quantized
        Pools of shapes (pages, page, Hkv, D) and (pages, page, Hkv, Dv), for `attention` with the cache's page_table.
        Their data and scale are views; what lies in unused slots is undefined.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> cache = flashkit.KVCache(1, kv_heads=2, dim=64, pages=4, layers=2, quantized="int8")
    >>> cache[1].k_pages
    <Quantized: int8 per token, shape (4, 64, 2, 64) of float32, 34816 bytes>
    """

    k_pages: Quantized
    v_pages: Quantized
    _keeps_numbers = False

    def __init__(self, number: int, steps: Steps, pools: list[Any], window: Window | None, dtype: Any) -> None:
        """pools: those of the numbers of k and v, and of their scales (layers, pages, Hkv, page, 1)."""
        super().__init__(number, steps, pools, window, dtype)
        self._scales = pools[2][number], pools[3][number]
        self.k_pages, self.v_pages = (
            Quantized(pool.swapaxes(1, 2), scale.swapaxes(1, 2), dtype, "token", layout="bnhd")
            for pool, scale in zip((self._k, self._v), self._scales)
        )

    def _store(self, form: Form, k: Any, v: Any, layout: str, step: Step, table: Table | None) -> None:
        own = zip(("k", "v"), (k, v), (self._k, self._v), self._scales, (table, None), strict=True)
        with arrays.scope(k):
            for name, x, pool, scales, turn in own:
                x = self._four(name, x, pool, layout)
                tokens, page = (x.shape[0], x.shape[2]), pool.shape[2]
                if turn is not None:
                    source, x = x, self._steps.xp.empty(x.shape, x.dtype)
                    rotate(source, x, turn, step.where.reshape(tokens), 1)
                made, slots = quantize(x, self.k_pages.format, "token"), step.slots.reshape(tokens)
                for target, numbers in ((pool, made.data), (scales, made.scale)):
                    target[slots // page, :, slots % page] = numbers.swapaxes(1, 2)

    def _attend(self, q: Any, out: Any = None, **options: Any) -> Any:
        steps = self._steps
        return attention(
            q, self.k_pages, self.v_pages, page_table=steps.readable, kv_lengths=steps.lengths, out=out, **options
        )
