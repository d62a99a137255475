"""What score modifications add to all pairs of a distance, and sums of dS: kernels/common/distances.cuh."""

from __future__ import annotations

from typing import Any

from ...mods import expr
from ...spec import AttentionSpec
from ..cuda_common import compiler
from ..cuda_common.affine_score import adds_distance_bias
from ..cuda_common.arguments import Arguments
from ..cuda_common.generation import Pass
from ..cuda_common.launch import scratch
from ..cuda_common.params import AT
from . import specialise

_ROOM = 512  # elements of a sequence beside one for each row and key: two times DISTANCE_ROOM
_THREADS = 1024, 256  # of a CTA that fills, that adds
_PART, _CTAS = 960, 264  # of distances, that a CTA fills at a time; of both kernels, unless there are more heads
_STRAIGHT = 64  # elements for which there is one word before them: STRAIGHT


def reads(spec: AttentionSpec) -> bool:
    """Whether what a score modification adds can be read by distance."""
    return adds_distance_bias(spec.score) and not (spec.packed and spec.paged)


class Distances:
    """The memory of a call, and the kernels that fill it and, where there are sums, add these to the gradients. Their
    spec is the problem's: that a pass adds dQ in order does not order sums.
    """

    def __init__(self, of: Pass, is_read: bool = True, has_sums: bool = False) -> None:
        self.is_read, self.has_sums, spec, device = is_read, has_sums, of.problem.spec, of.device
        graphs = [spec.score, *(graph for read in spec.reads for graph in (read.slope, *read.indices))]
        self._of_entries = spec.packed or spec.kv_lengths or any(expr.uses(x, expr.B) for x in graphs if x is not None)
        constants = (
            ("HAS_DISTANCE_BIAS", is_read), ("HAS_SUMS", has_sums), ("FILL_THREADS", _THREADS[0]),
            ("OF_ENTRIES", self._of_entries),
        )  # fmt: skip
        library = specialise.library("common/distances", spec, constants, compiler.target(device.capability))
        of.libraries.append(library)
        self._fill, self._add = (library.kernel(name, device) for name in ("fill_distances", "add_distance_sums"))

    def _heads(self, arguments: Arguments) -> int:
        """Those of each batch entry where these differ."""
        of_entries = self._of_entries or arguments.words[AT["q_offsets"]]
        return arguments.heads * (arguments.batch if of_entries else 1)

    def _ctas(self, arguments: Arguments) -> int:
        heads, parts = self._heads(arguments), (arguments.n_q + arguments.n_k + _ROOM) // _PART + 1
        return heads * max(1, min(parts, _CTAS // heads))

    def fill(self, arguments: Arguments, stream: int) -> Any:
        """Returns the memory, to be kept until the kernels that read it are enqueued."""
        heads, words = arguments.heads, arguments.words
        of_head = arguments.n_q + arguments.n_k + _ROOM * (arguments.batch if arguments.spec.packed else 1)
        heads_of_all = heads if arguments.spec.packed else self._heads(arguments)
        size, of_entry = heads_of_all * of_head, 0 if heads_of_all == heads else heads * of_head
        words_of_tiles = self.has_sums * (size // _STRAIGHT + 1)
        memory = scratch((words_of_tiles + size * (self.is_read + self.has_sums),), "float32")
        sums = memory.data.ptr + 4 * words_of_tiles
        words[AT["distance_sums"] : AT["distance_sums"] + 4] = [sums, of_entry, of_head, 1]
        added = sums + 4 * size * self.has_sums
        words[AT["distance_bias"] : AT["distance_bias"] + 4] = [added, of_entry, of_head, 1]
        self._fill.launch(self._ctas(arguments), _THREADS[0], arguments, stream)
        return memory

    def add(self, arguments: Arguments, stream: int) -> None:
        """Add the sums to the gradients."""
        self._add.launch(self._ctas(arguments), _THREADS[1], arguments, stream)
