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
    """The memory of a call, and kernels that fill it and add its sums to the gradients, for the problem's own spec."""

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

    def _form(self, arguments: Arguments) -> tuple[int, int, int, int]:
        """CTAs of a kernel; elements of a head, of a batch entry (0 where these do not differ), and of all."""
        heads, packed = arguments.heads, arguments.spec.packed
        of_entries = self._of_entries or arguments.words[AT["q_offsets"]]
        all_heads, distances = heads * (arguments.batch if of_entries else 1), arguments.n_q + arguments.n_k + _ROOM
        ctas = all_heads * max(1, min(distances // _PART + 1, _CTAS // all_heads))
        if packed:  # sequences follow each other
            distances, all_heads = distances + _ROOM * (arguments.batch - 1), heads
        return ctas, distances, heads * distances if all_heads > heads else 0, all_heads * distances

    def fill(self, arguments: Arguments, stream: int) -> Any:
        """Returns the memory, to be kept until the kernels that read it are enqueued."""
        ctas, of_head, of_entry, size = arguments.known(self, self._form)
        words_of_tiles = self.has_sums * (size // _STRAIGHT + 1)
        memory = scratch((words_of_tiles + size * (self.is_read + self.has_sums),), "float32")
        sums = memory.data.ptr + 4 * words_of_tiles
        for name, address in ("distance_sums", sums), ("distance_bias", sums + 4 * size * self.has_sums):
            arguments.words[AT[name] : AT[name] + 4] = [address, of_entry, of_head, 1]
        self._fill.launch(ctas, _THREADS[0], arguments, stream)
        return memory

    def add(self, arguments: Arguments, stream: int) -> None:
        """Add the sums to the gradients."""
        self._add.launch(arguments.known(self, self._form)[0], _THREADS[1], arguments, stream)
