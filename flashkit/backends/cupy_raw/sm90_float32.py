"""float32 for Hopper's tensor cores: tensors as terms of float16, by kernels/sm90_split.cu."""

from __future__ import annotations

from typing import Any

from ...spec import AttentionSpec
from ..cuda_common import compiler
from ..cuda_common.arguments import AT, Arguments
from ..cuda_common.device import Device
from ..cuda_common.launch import MAX_GRID, Block, scratch
from ..cuda_common.sm90_maps import encode
from . import specialise

MAX_DIM = 128
"""Wider sums of a tile and of all tiles do not both fit in registers."""

_ALIGNED = 256  # bytes
_THREADS = 256  # of a block: kernels/sm90_split.cu


def parts(spec: AttentionSpec) -> int:
    """Terms that an element is multiplied as; 1 also for 16-bit elements."""
    return 2 if spec.dtype == "float32" and spec.precision != "tf32" else 1


class Split:
    """Brings q, k and v into terms, in memory of CuPy's pool that is as large as they are, or half of that."""

    def __init__(self, spec: AttentionSpec, rows: int, device: Device) -> None:
        self.spec, self.rows, self.parts = spec, rows, parts(spec)
        constants = ("PARTS", self.parts), ("ROWS", rows)
        self.library = specialise.library("sm90_split", spec, constants, compiler.target(device.capability))
        self._kernel = self.library.kernel("sm90_split", device)

    def terms(self, arguments: Arguments, pack: int, stream: int) -> tuple[list[Any], Any]:
        """Enqueue the splitting; tensor maps of the terms of q, k and v, and their memory, to be held until all that
        reads it is enqueued. The arguments get the units.
        """
        spec, words = self.spec, arguments.words
        tensors = [("q", spec.head_dim, arguments.heads, arguments.n_q)]
        dims = zip("kv", (spec.head_dim, spec.head_dim_v))
        tensors += [(name, dim, arguments.heads_kv, arguments.n_k) for name, dim in dims]
        places, ends, at, blocks = [], list[int](), 0, 0
        for name, dim, heads, tokens in tensors:
            columns, tiles = self.parts * -(-dim // 64) * 64, -(-tokens // self.rows)
            numbers = tokens if name == "q" else tiles  # units of a head
            unit = at + -(-2 * arguments.batch * heads * tokens * columns // _ALIGNED) * _ALIGNED
            places.append((at, unit, columns, numbers))
            at = unit + -(-4 * arguments.batch * heads * numbers // _ALIGNED) * _ALIGNED
            blocks += arguments.batch * heads * tiles
            ends.append(blocks)
        if blocks > MAX_GRID:
            raise ValueError(f"{blocks} tiles are more than a launch takes, {MAX_GRID}; fewer batch entries fit")
        memory = scratch(at, "int8")
        maps, block, base = [], list[int](), memory.data.ptr
        for (name, _, heads, tokens), (terms, unit, columns, numbers) in zip(tensors, places):
            place = base + terms, heads * tokens * columns, tokens * columns, columns
            units = base + unit, heads * numbers, numbers, 1
            words[AT[f"{name}_unit"] : AT[f"{name}_unit"] + 4] = list(units)
            lengths = 0 if name == "q" else words[AT["kv_lengths"]]
            block += [*words[AT[name] : AT[name] + 4], *place, *units, lengths, heads, tokens, name == "q"]
            box = (pack, 64) if name == "q" else (1, self.rows)
            maps.append(encode("float16", *place, columns, box[0], heads, tokens, arguments.batch, box[1]))
        self._kernel.launch(blocks, _THREADS, Block([*block, *ends]), stream)
        return maps, memory
