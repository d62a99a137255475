"""What the backward passes by mma.sync are alike in, in whichever language: kernels/sm80_backward."""

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

_CACHED = 40_000_000  # bytes of the heads that blocks work at together
_STORING = 256  # threads


class OrderedBackward:
    """Rows prepared, then all gradients by tiles of keys, whose blocks add to sums of dQ one after the other, then
    these sums rounded. `tile` has block_q, block_k, warps and shared_memory; columns: of a row of the sums.
    """

    def __init__(
        self, kernels: Kernels, spec: AttentionSpec, device: Device, tile: Any, why: str,
        constants: Mapping[str, int], columns: int,
    ) -> None:  # fmt: skip
        self.tile, self.why, self._columns = tile, why, columns
        library = kernels("sm80/backward", spec, tuple(constants.items()), compiler.target(device.capability))
        self.rows = BwdPreprocess(kernels, spec, device)
        self.libraries = [library, self.rows.library]
        self._kernel = library.kernel("sm80_backward", device, tile.shared_memory(spec))
        self._store = library.kernel("bwd_postprocess", device)

    def run(self, arguments: Arguments, stream: int) -> None:
        tile = self.tile
        self.rows.run(arguments, stream, tile.block_q)
        keys, queries = -(-arguments.n_k // tile.block_k), -(-arguments.n_q // tile.block_q)
        heads = arguments.batch, arguments.heads
        sums = scratch((*heads, queries, tile.block_q * self._columns), "float32", zeros=True)
        # The counter of work tiles, and for each query tile a bit for each key tile that has been added to it.
        words = -(-keys // 32)
        counters = scratch(4 + math.prod(heads) * queries * words, "int32", zeros=True)
        arguments.tensors(dq_accum=sums, dq_semaphore=counters[4:].reshape((*heads, queries, words)))
        arguments.set(tile_counter=counters.data.ptr)
        # Heads at a time: what they read and add to should stay in the L2 cache. All groups have about as many.
        every = arguments.batch * arguments.heads_kv
        blocks, tiles = keys * every, queries * math.prod(heads)
        check_grid(blocks, tiles)
        if blocks:
            arguments.set(heads_per_l2_group=heads_per_l2_group(every, _CACHED // bytes_of_queries(arguments)))
            self._kernel.launch(blocks, 32 * tile.warps, arguments, stream)
        if tiles:
            self._store.launch(tiles, _STORING, arguments, stream)
        self.rows.sink_gradients(arguments, stream)
