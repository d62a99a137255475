"""`CudaBackend`, the base of the CUDA backends: it chooses among generations of kernels.

The newest generation that supports the problem on the device is chosen, unless the device's profile has measured it and
a faster one. FLASHKIT_CUDA_GENERATION forces a generation for the process: problems that it does not support are then
errors.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ... import settings
from ...devices.lazy import cached_property
from ...devices.schema import TileRow, not_followed
from ...errors import UnsupportedError
from ...spec import Direction, Gradients, Operands, Problem, Verdict
from ..base import Bound, BoundBackward
from . import compiler, device, launch, modification, verify
from .arguments import Arguments, addresses
from .cu_seqlens import clear_behind
from .device import Device
from .generation import Choice, Generation, Pass, TileTables, asked
from .params import AT

VARIABLE = settings.CUDA_GENERATION.name
_ELSEWHERE = "q: expected an array on the current CUDA device, {}, got one on device {}; use `with q.device:`"

MAX_HEAD_DIM = 512
"""Of v, and of k unless a backend has kernels for wider ones."""

_BACKWARD_AT = addresses(("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"))
_ADDS: Any = lambda _: (False, False)  # of passes that add to zeros
_DLSE, _DSINKS = AT["dlse"], AT["dsinks"]


class Selection(NamedTuple):
    """A generation, its tile, the tables that this is from, and why other generations were not chosen."""

    generation: Generation | None
    choice: Choice | None
    tables: TileTables
    rejected: list[str]


class CudaBackend:
    """Attention on CuPy arrays by compiled kernels. A subclass has the generations, and the packages that they need."""

    name: str
    generations: tuple[Generation, ...]
    """Newest first; the last supports everything."""

    needs: Mapping[str, str]
    """Modules that must be importable, and the command that installs each."""

    array_kinds = ("cupy",)
    device_kind = "cuda"
    max_head_dim = MAX_HEAD_DIM
    """Of k in the forward pass."""

    efficiency = 0.5
    spares_lse = True

    @property
    def takes(self) -> frozenset[str]:
        return frozenset().union(*(generation.takes for generation in self.generations))

    def check(self) -> None:
        """Raise an error if the compiler is too old or cannot be loaded."""

    def sources(self) -> list[tuple[str, str]]:
        """Names and texts of the sources of kernels."""
        raise NotImplementedError

    def allowed(self, direction: Direction = "forward") -> tuple[Generation, ...]:
        """The generations that the environment allows; all if the forced one has no kernels for this direction."""
        forced = settings.CUDA_GENERATION.read()
        if forced is None:
            return self.generations
        left = tuple(generation for generation in self.generations if generation.name == forced)
        return self.generations if left and direction not in left[0].directions else left

    def choose(self, problem: Problem, profile: Any, on: Device, direction: Direction) -> Selection:
        """The generation to compute with, and its tile; None where none can."""
        tables, allowed = TileTables(self.name, profile, on, direction), self.allowed(direction)
        rejected: list[str] = []
        able: list[Generation] = []
        for generation in allowed:
            verdict = asked(generation, problem, on, direction)
            if verdict and len(allowed) > 1:
                verdict = generation.profitable(problem, direction)
            if verdict:
                able.append(generation)
            else:
                rejected.append(f"{generation.name}: {verdict.reason}")
        rates = {g: rate for g in able if (rate := tables.rate(g, problem))}
        while able:
            best = max(able, key=lambda g: rates.get(g, 0.0)) if able[0] in rates else able[0]
            able.remove(best)
            choice = next(tables.choices(best, problem), None)
            if choice is not None:
                others = (g for g in able if g in rates and best in rates)
                rejected += [f"{g.name}: {rates[g] / 1e12:g} TFLOP/s in the profile" for g in others]
                return Selection(best, choice, tables, rejected)
            rejected.append(f"{best.name}: no tile of the profile fits")
        return Selection(None, None, tables, rejected)

    def rate(self, problem: Problem, profile: Any, direction: Direction) -> float | None:
        generation, _, tables, _ = self.choose(problem, profile, device.current(), direction)
        return None if generation is None else tables.rate(generation, problem)

    def available(self) -> Verdict:
        missing = [name for name in self.needs if _absent(name)]
        if missing:
            hints = dict.fromkeys(self.needs[name] for name in missing)
            return Verdict(False, f"{' and '.join(missing)} cannot be imported: {'; '.join(hints)}")
        try:
            self.check()
            launch.call("cuInit", 0)
            compiler.target(device.current().capability)
        except Exception as error:  # a missing driver, device or NVRTC raises different exceptions
            return Verdict(False, f"no CUDA device can be used: {error}")
        return Verdict(True)

    def supports(self, problem: Problem) -> Verdict:
        spec = problem.spec
        for dim, most in (spec.head_dim, self.max_head_dim), (spec.head_dim_v, MAX_HEAD_DIM):
            if dim > most:
                return Verdict(False, f"head dim {dim} is over {most}")
        if spec.jvp and spec.paged:
            return Verdict(False, "keys in pages have no tangents")
        if reason := modification.unsupported(spec):
            return Verdict(False, reason)
        direction: Direction = "backward" if spec.sums else "forward"
        able = [asked(generation, problem, device.current(), direction) for generation in self.allowed(direction)]
        if not able:
            return Verdict(False, f"it has no generation {settings.CUDA_GENERATION.text()}, which {VARIABLE} asks for")
        return Verdict(any(able), "; ".join(verdict.reason for verdict in able if not verdict))

    def plan(self, problem: Problem, profile: Any) -> CudaPlan:
        return CudaPlan(self, problem, profile, device.current())

    def forward(self, plan: CudaPlan, operands: Operands) -> None:
        self.bind(plan, operands)(operands.q, operands.k, operands.v, operands.out, operands.lse)

    def backward(self, plan: CudaPlan, operands: Operands, gradients: Gradients) -> None:
        self.bind_backward(plan, operands, gradients)(operands, gradients)

    def bind(self, plan: CudaPlan, operands: Operands, per_call: Sequence[str] = ()) -> Bound:
        import cupy

        _check_device(plan, operands)
        on, current = plan.device, cupy.cuda.runtime.getDevice
        run, template = plan.forward[0].run, Arguments(plan.problem.spec, operands)
        own = operands.arrays | operands.sequences()
        arrays_at = [(template.release(name, operands), _layout(own.get(name))) for name in per_call]
        templates = template, template.copy()  # with and without an LSE
        templates[1].discard_lse(on.ordinal)
        pools: tuple[deque[Arguments], ...] = deque(maxlen=8), deque(maxlen=8)
        q_at, k_at, v_at, out_at, lse_at = (AT[name] for name in ("q", "k", "v", "out", "lse"))
        stream_of, ordinal, copies = launch.stream, on.ordinal, template.alive
        wait_for_uploads = launch.Uploads(stream_of(), template.uploaded).wait
        _keep(stream_of(), plan, operands)

        def call(q: Any, k: Any, v: Any, out: Any, lse: Any, *arrays: Any) -> None:
            if current() != ordinal:
                raise ValueError(_ELSEWHERE.format(current(), ordinal))
            pool = pools[lse is None]
            try:
                arguments = pool.pop()  # no other thread uses it until it is returned
            except IndexError:
                arguments = templates[lse is None].copy()
            words = arguments.words
            words[q_at], words[k_at], words[v_at] = q.data.ptr, k.data.ptr, v.data.ptr
            words[out_at] = out.data.ptr
            arguments.empty = getattr(q, "empty", None)  # of Views
            if lse is not None:
                words[lse_at] = lse.data.ptr
            if arrays:
                for (at, layout), array in zip(arrays_at, arrays, strict=True):
                    words[at] = array.data.ptr if layout is None else _address(array, layout)
            stream = stream_of()
            wait_for_uploads(stream)
            if stream:  # a CUDA graph that captures this may outlive them; the default stream is not captured
                launch.keep(stream, plan, copies, arrays)
            run(arguments, stream)
            pool.append(arguments)

        return call

    def bind_backward(
        self, plan: CudaPlan, operands: Operands, gradients: Gradients, per_call: Sequence[str] = ()
    ) -> BoundBackward:
        import cupy

        _check_device(plan, operands)
        on, current = plan.device, cupy.cuda.runtime.getDevice
        run, template = plan.backward[0].run, Arguments(plan.problem.spec, operands)
        arrays_at = [(name, template.release(name, operands), _layout(operands.arrays[name])) for name in per_call]
        template.gradients(gradients)
        end_of_keys = None if operands.cu_seqlens is None else operands.cu_seqlens[1]  # its last; on the device by now
        ordinal, stream_of = on.ordinal, launch.stream
        wait_for_uploads = launch.Uploads(stream_of(), template.uploaded).wait
        pool: deque[Arguments] = deque(maxlen=8)

        def call(op: Operands, to: Gradients) -> None:
            if current() != ordinal:
                raise ValueError(_ELSEWHERE.format(current(), ordinal))
            try:
                arguments = pool.pop()  # no other thread uses it until it is returned
            except IndexError:
                arguments = template.copy()
            words = arguments.words
            for at, array in zip(_BACKWARD_AT, (op.q, op.k, op.v, op.out, op.lse, to.dout, to.dq, to.dk, to.dv)):
                words[at] = array.data.ptr
            arguments.empty = getattr(op.q, "empty", None)  # of Views
            if to.dlse is not None:
                words[_DLSE] = to.dlse.data.ptr
            if to.dsinks is not None:
                words[_DSINKS] = to.dsinks.data.ptr
            for name, at, layout in arrays_at:
                words[at] = _address(op.arrays[name], layout)
            stream = stream_of()
            wait_for_uploads(stream)
            if to.values:
                _make_values(plan, arguments, to, stream)
            if end_of_keys is not None:
                clear_behind(end_of_keys, to.dk, to.dv, stream)
            if stream:  # a CUDA graph that captures this may outlive them
                launch.keep(stream, plan, arguments.alive, op, to)
            run(arguments, stream)
            arguments.finish_sums(to)
            pool.append(arguments)

        return call


@dataclass(frozen=True)
class CudaPlan:
    """Kernels for one spec on a device, compiled, loaded and checked on first use."""

    backend: CudaBackend
    problem: Problem
    profile: Any
    device: Device

    @cached_property
    def forward(self) -> tuple[Pass, TileRow | None]:
        """The pass, and the row of the profile that decided about its tile."""
        return self._compile("forward")

    @cached_property
    def backward(self) -> tuple[Pass, TileRow | None]:
        return self._compile("backward")

    def _compile(self, direction: Direction) -> tuple[Pass, TileRow | None]:
        """The pass with the first tile whose kernels work: a bad row must not disable attention."""
        generation, _, tables, rejected = self.backend.choose(self.problem, self.profile, self.device, direction)
        if generation is None:
            raise UnsupportedError(f"{self.backend.name} has no {direction} pass for this: {'; '.join(rejected)}")
        failed: dict[str, TileRow] = {}
        last: Exception | None = None
        for choice in tables.choices(generation, self.problem):
            try:
                compiled = generation.plan(self.problem, choice, tables)
                verify.check(compiled, self.problem.spec, self.device, direction)
            except Exception as error:  # of a compiler, a launch or the check
                if choice.row is None or str(error) in failed:
                    raise  # it is not the tile
                failed[str(error)], last = choice.row, error
            else:
                for problem, row in failed.items():
                    not_followed(row, f"its kernels do not work: {problem}")
                return compiled, choice.row
        raise last or UnsupportedError(f"{generation.name} has no tile for {self.problem.describe()}")

    @property
    def tile(self) -> Any:
        return self.forward[0].tile

    @property
    def row(self) -> TileRow | None:
        """The row of the profile that decided about the tile."""
        return self.forward[1]

    @property
    def why(self) -> str:
        generation, _, _, rejected = self.backend.choose(self.problem, self.profile, self.device, "forward")
        assert generation is not None
        return f"{generation.name}: {self.forward[0].why}" + "".join(f"; not {line}" for line in rejected)


def _absent(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


def _layout(array: Any) -> tuple[Any, ...] | None:
    """None for scales, which have other axes in the operands than in the call."""
    return None if array is None else (array.shape, array.strides, array.dtype)


def _make_values(plan: CudaPlan, arguments: Arguments, gradients: Gradients, stream: int) -> None:
    """Make the arrays of gradients by values: zeros, unless the pass stores all elements."""
    spec = plan.problem.spec
    if not spec.sums:
        return
    import cupy

    arguments.stores_values, whole = getattr(plan.backward[0], "writes_values", _ADDS)(arguments)
    dtype = gradients.dq.dtype if arguments.stores_values else spec.lse_dtype
    empty = cupy.empty if spec.orders_sums else arguments.empty or cupy.empty
    for slot in spec.sums:
        gradients.values[slot.name] = made = empty(arguments.shapes.get(slot.name, ()), np.dtype(dtype))
        if not whole:
            launch.clear(made.data.ptr, math.prod(made.shape) * made.dtype.itemsize, stream)
    arguments.sums(gradients.values)


def _address(array: Any, layout: tuple[Any, ...] | None) -> int:
    """The address of an array of a modification, which a kernel reads in this layout, or of scales."""
    if layout is not None and _layout(array) != layout:
        raise ValueError(f"array of a modification: expected the layout {layout}, got {_layout(array)}")
    return int(array.data.ptr)


def _keep(stream: int, plan: CudaPlan, operands: Operands) -> None:
    """Keep what a captured call uses again and the caller may not hold: kernels, results, and copies of operands."""
    op = operands
    positions = op.q_offset, op.kv_lengths, op.page_table, *(op.cu_seqlens or ())
    codes = () if op.scales is None else (op.q, op.k, op.v, op.scales)
    launch.keep(stream, plan, op.out, op.lse, *positions, op.sinks, *op.arrays.values(), *codes)


def _check_device(plan: CudaPlan, operands: Operands) -> None:
    """ValueError if the device of the plan is not the current one, or q is on another."""
    for ordinal in device.current().ordinal, operands.q.data.device_id:
        if ordinal != plan.device.ordinal:
            raise ValueError(_ELSEWHERE.format(plan.device.ordinal, ordinal))
