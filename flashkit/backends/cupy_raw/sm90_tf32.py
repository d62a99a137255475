"""TF32 gradients on Hopper: float32 through the kernels of 16-bit elements, kernels/sm90/backward.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ...spec import AttentionSpec, Problem
from ..cuda_common.arguments import Arguments
from ..cuda_common.generation import Choice, Fallback, Generation, Pass, TileTables
from ..cuda_common.launch import KernelArguments, TensorMap, check_grid, clear, scratch
from ..cuda_common.params import AT
from ..cuda_common.sm90_bwd_launch import LaunchGeometry
from .sm90_backward import Sm90Backward
from .sm90_fp16x2 import Sm90Float32Backward, Terms, allocated

_OPERANDS = "q", "k", "v", "dout"
_ROWS, _THREADS = 128, 512  # of a CTA of kernels/sm90/tf32_convert.cu
_MAX_DIM = 128
_ALIGNED = 256  # bytes


def takes(spec: AttentionSpec) -> bool:
    """Whether float32 gradients come from these kernels, not from those of `Sm90Float32Backward`."""
    plain = spec.score is None and not (spec.dropout or spec.sinks)
    return spec.dtype == "float32" and spec.precision == "tf32" and plain


def head_statistics(arguments: Arguments, stream: int) -> tuple[Any, list[int]]:
    """Memory of what the conversion finds, to be kept until the fallback is enqueued; addresses of the maxima and the
    scales of each key/value head, and of the flag that says whether the fallback is needed.
    """
    heads = arguments.batch * arguments.heads_kv
    scales, maxima = 4 * 4 * heads, 4 * 4 * _MAX_DIM * heads
    memory = scratch(_ALIGNED + maxima + scales, "int8")
    flag = int(memory.data.ptr)
    clear(flag, _ALIGNED + maxima, stream)
    addresses = [flag + _ALIGNED, flag + _ALIGNED + maxima, flag]
    arguments.set(head_scales=addresses[1], fallback=flag)
    return memory, addresses


class Tf32Conversion:
    """Converts q, k, v and dout to float16 under a scale for each key/value head, in CuPy's memory pool."""

    def __init__(self, of: Pass) -> None:
        library = of.compiled("sm90/tf32_convert", {"NUM_TERMS": 1})
        self._kernels = [library.kernel(name, of.device) for name in ("tf32_maxima", "tf32_convert")]

    def terms(self, arguments: Arguments, statistics: list[int], stream: int) -> tuple[list[Terms], Any]:
        """Enqueue the conversion; statistics: of `head_statistics`. Returns the float16 tensors and their memory, to be
        kept until all kernels that read it are enqueued.
        """
        terms, block = [Terms.of(arguments, name) for name in _OPERANDS], list[int]()
        ends = list(accumulate(each.batch * each.heads * -(-each.tokens // _ROWS) for each in terms))
        check_grid(ends[-1])
        memory, _ = allocated(terms)
        for name, each in zip(_OPERANDS, terms):
            block += [*each.words(arguments, name), each.heads // arguments.heads_kv]
        block += [*ends, *statistics]
        for kernel in self._kernels:
            kernel.launch(ends[-1], _THREADS, KernelArguments(block), stream)
        return terms, memory


class Sm90Tf32Backward(Sm90Backward):
    """The backward pass of 16-bit elements on converted tensors, then that of `Sm90Float32Backward`.

    The kernels of the latter return at once unless a flag is set: by the conversion, where magnitudes within a head are
    too different for one scale, or where a gradient is not finite. The decision is the device's, as the host would have
    to wait for it.
    """

    addressed = "out", "dout"

    def __init__(self, generation: Generation, problem: Problem, choice: Choice, tables: TileTables) -> None:
        super().__init__(generation, problem, choice, tables)
        self.conversion = Tf32Conversion(self)
        # Compiled by now, as it is part of every call; checked by itself, as a sample problem does not need it. It has
        # the tile that it has where it is the only pass, as with sinks.
        alone = next(tables.choices(generation, replace(problem, spec=replace(problem.spec, sinks=True))))
        then = Sm90Float32Backward(generation, problem, alone, tables)
        self.fallback = Fallback(lambda: then, problem.spec, tables)

    def launch(
        self, arguments: Arguments, geometry: LaunchGeometry, stream: int, maps: Sequence[TensorMap] | None = None
    ) -> None:  # fmt: skip
        held, statistics = head_statistics(arguments, stream)
        terms, memory = self.conversion.terms(arguments, statistics, stream)
        super().launch(arguments, geometry, stream, self.maps(terms))
        del memory  # for the fallback
        self.fallback.run(arguments, stream)
        arguments.set(fallback=0)
        del held  # kept until the kernels that read it are enqueued

    def takes(self, arguments: Arguments) -> bool:
        """delta may be of any magnitude where the log-sum-exp has a gradient."""
        return not arguments.words[AT["dlse"]] and super().takes(arguments)

    def maps(self, terms: Sequence[Terms]) -> list[TensorMap]:
        """Of each TMA box; gradients and O are not addressed by TMA."""
        q, k, v, dout = terms
        rows, keys = self.tile.block_q, self.tile.cta_keys(self.spec)
        loaded = [q.map(rows), k.map(keys), v.map(keys), dout.map(rows)]
        return [*loaded, *[loaded[0]] * 4]

    def boxes(self) -> list[tuple[str, int, int]]:
        return []
