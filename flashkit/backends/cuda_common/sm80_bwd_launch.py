"""The launch of the backward pass by mma.sync in both languages: kernels/sm80/backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...spec import AttentionSpec
from . import compiler
from .arguments import Arguments
from .bwd_preprocess import BwdPreprocess
from .device import Device
from .generation import Kernels
from .l2_swizzle import bytes_of_queries, heads_per_l2_group
from .launch import check_grid, scratch

_L2_BYTES = 40_000_000  # of the heads that CTAs work on at the same time
_POSTPROCESS_THREADS = 256


class OrderedBackward:
    """Preprocess; then all gradients, a CTA per key tile, which add to dq_accum in a fixed order; then postprocess.

    `tile` has block_q, block_k, warps and shared_memory; columns: of a row of dq_accum.
    """

    def __init__(
        self, kernels: Kernels, spec: AttentionSpec, device: Device, tile: Any, why: str,
        constants: Mapping[str, int], columns: int,
    ) -> None:  # fmt: skip
        self.tile, self.why, self._columns = tile, why, columns
        library = kernels("sm80/backward", spec, tuple(constants.items()), compiler.target(device.capability))
        self.preprocess = BwdPreprocess(kernels, spec, device)
        self.libraries = [library, self.preprocess.library]
        self._kernel = library.kernel("sm80_backward", device, tile.shared_memory(spec))
        self._postprocess = library.kernel("bwd_postprocess", device)

    def run(self, arguments: Arguments, stream: int) -> None:
        tile = self.tile
        self.preprocess.run(arguments, stream, tile.block_q)
        tiles_k, tiles_q = arguments.k_tiles(tile.block_k), arguments.q_tiles(tile.block_q)
        heads = arguments.entries, arguments.heads
        dq_accum = scratch((*heads, tiles_q, tile.block_q * self._columns), "float32", zeros=True)
        # The tile counter, and for each query tile a bit for each key tile that has been added to its dQ.
        words = -(-tiles_k // 32)
        counters = scratch(4 + math.prod(heads) * tiles_q * words, "int32", zeros=True)
        arguments.tensors(dq_accum=dq_accum, dq_semaphore=counters[4:].reshape((*heads, tiles_q, words)))
        arguments.set(tile_counter=counters.data.ptr)
        all_heads_kv = arguments.entries * arguments.heads_kv
        blocks, tiles = tiles_k * all_heads_kv, tiles_q * math.prod(heads)
        check_grid(blocks, tiles)
        if blocks:
            group = heads_per_l2_group(all_heads_kv, _L2_BYTES // bytes_of_queries(arguments))
            arguments.set(heads_per_l2_group=group)
            self._kernel.launch(blocks, 32 * tile.warps, arguments, stream)
        if tiles:
            self._postprocess.launch(tiles, _POSTPROCESS_THREADS, arguments, stream)
        self.preprocess.sink_gradients(arguments, stream)
