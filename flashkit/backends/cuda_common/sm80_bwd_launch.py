"""The launch of the backward pass by mma.sync in both languages: kernels/sm80/backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...spec import Problem
from .arguments import Arguments
from .bwd_preprocess import BwdPreprocess
from .generation import Choice, Generation, Pass, TileTables
from .launch import check_grid
from .memory import Workspace, bytes_of_queries, heads_per_l2_group

_L2_BYTES = 40_000_000  # of the heads that CTAs work on at the same time
_POSTPROCESS_THREADS = 256


class LaunchGeometry(NamedTuple):
    """What the launches derive from the shapes of their arrays: their memory, and their CTAs."""

    workspace: Workspace
    preprocess_ctas: int
    blocks: int
    tiles: int


class MmaBackward(Pass):
    """Preprocess; all gradients, a CTA per key tile, which add to dq_accum, in one order if `ordered`; postprocess."""

    ordered = True

    def __init__(
        self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables,
        constants: Mapping[str, int], columns: int,
    ) -> None:  # fmt: skip
        super().__init__(generation, problem, choice, tables)
        self._columns, library = columns, self.compiled("sm80/backward", constants)
        self.preprocess = BwdPreprocess(self)
        self._kernel = library.kernel("sm80_backward", self.device, self.tile.shared_memory(self.spec))
        self._postprocess = library.kernel("bwd_postprocess", self.device)

    def geometry(self, arguments: Arguments) -> LaunchGeometry | None:
        """What the launches derive from shapes and strides; None where the kernels do not support them."""
        tile, workspace = self.tile, Workspace(arguments)
        tiles_k, tiles_q = arguments.k_tiles(tile.block_k), arguments.q_tiles(tile.block_q)
        preprocess_ctas = self.preprocess.place(arguments, workspace, tile.block_q)
        workspace.tensor("dq_accum", 4, tiles_q, tile.block_q * self._columns, zeros=True)
        if self.ordered:
            words = -(-tiles_k // 32)  # for each query tile a bit for each key tile that has been added to its dQ
            workspace.tensor("dq_semaphore", 4, tiles_q, words, zeros=True)
            workspace.memory("tile_counter", 4, zeros=True)
        heads_kv = arguments.entries * arguments.heads_kv
        blocks, tiles = tiles_k * heads_kv, tiles_q * arguments.entries * arguments.heads
        check_grid(blocks, tiles)
        if blocks:
            group = heads_per_l2_group(heads_kv, _L2_BYTES // bytes_of_queries(arguments))
            workspace.words(heads_per_l2_group=group)
        return LaunchGeometry(workspace, preprocess_ctas, blocks, tiles)

    def launch(self, arguments: Arguments, geometry: LaunchGeometry, stream: int) -> None:
        held = geometry.workspace.allocate(arguments, stream)
        self.preprocess.run(arguments, stream, geometry.preprocess_ctas)
        if geometry.blocks:
            self._kernel.launch(geometry.blocks, 32 * self.tile.warps, arguments, stream)
        if geometry.tiles:
            self._postprocess.launch(geometry.tiles, _POSTPROCESS_THREADS, arguments, stream)
        self.preprocess.sink_gradients(arguments, stream)
        del held
