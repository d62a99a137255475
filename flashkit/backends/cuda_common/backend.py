"""What the CUDA backends are alike in: generations of kernels, the newest that can do a spec on the device first.

Where the device's profile says how fast generations were measured, the fastest of these comes before the others; one
that is newer than all of them and was not measured stays first. FLASHKIT_CUDA_GENERATION forces one for the process;
what it cannot do is then refused instead of handed down.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

from ...errors import UnsupportedError
from ...spec import MAX_HEAD_DIM, Direction, Gradients, Operands, Problem, Verdict
from ..base import Bound
from . import compiler, device, launch, modification, verify
from .arguments import Arguments
from .device import Device
from .generation import Generation, Pass
from .params import AT

VARIABLE = "FLASHKIT_CUDA_GENERATION"
NAMES = "sm90", "sm80", "simt"
_ELSEWHERE = "q lies on CUDA device {}, the current one is {}; `with q.device:` fits"

MANY_ROWS = 64
"""Query rows that share keys up to which only those rows of a profile count that are for few: tiles for many would be
mostly empty."""


class Choice(NamedTuple):
    """A generation, the profile's row for it, and what was said of others."""

    generation: Generation | None
    row: Any
    said: list[str]


class CudaBackend:
    """Attention on CuPy arrays by compiled kernels. A backend says which, and what it needs to have them."""

    name: str
    generations: tuple[Generation, ...]
    """Newest first; the last can do everything."""

    needs: Mapping[str, str]
    """What has to be importable, and what installs it."""

    array_kinds = ("cupy",)
    device_kind = "cuda"
    efficiency = 0.5
    spares_lse = takes_arrays = True

    def check(self) -> None:
        """Raise, with a sentence, where what compiles is too old or cannot be loaded."""

    def sources(self) -> list[tuple[str, str]]:
        """Names and texts that kernels are made from."""
        raise NotImplementedError

    def allowed(self, direction: Direction = "forward") -> tuple[Generation, ...]:
        """Those that the environment leaves; all where the one that it forces has no kernels in this direction."""
        forced = os.environ.get(VARIABLE)
        if not forced:
            return self.generations
        if forced not in NAMES:
            raise ValueError(f"{VARIABLE} is {forced!r}; {' or '.join(NAMES)} fits")
        left = tuple(generation for generation in self.generations if generation.name == forced)
        return self.generations if left and direction not in left[0].directions else left

    def rows_of(self, problem: Problem, profile: Any, direction: Direction) -> dict[str, Any]:
        """The profile's row for each generation, by its name."""
        spec, rows = problem.spec, problem.n_q * problem.spec.group
        found: dict[str, Any] = {}
        for row in profile.rows(f"{self.name}.{direction}", spec.dtype, spec.head_dim, spec.masked, rows):
            if row.max_rows is not None or rows > MANY_ROWS:
                found.setdefault(str(row.options.get("generation")), row)
        return found

    def choose(self, problem: Problem, profile: Any, on: Device, direction: Direction) -> Choice:
        """The generation to compute with; None where none can."""
        said: list[str] = []
        able: list[Generation] = []
        allowed = self.allowed(direction)
        for generation in allowed:
            verdict = generation.supports(problem, on, direction)
            if verdict and len(allowed) > 1:
                verdict = generation.profitable(problem, direction)
            if verdict:
                able.append(generation)
            else:
                said.append(f"{generation.name}: {verdict.reason}")
        if not able:
            return Choice(None, None, said)
        rows = self.rows_of(problem, profile, direction)
        rates = {
            g.name: rate for g in able if (row := rows.get(g.name)) and row.measured and (rate := row.measured.tflops)
        }
        best = able[0]
        if best.name in rates:
            best = max(able, key=lambda g: rates.get(g.name, 0.0))
            said += [f"{name}: {rate:g} TFLOP/s in the profile" for name, rate in rates.items() if name != best.name]
        return Choice(best, rows.get(best.name), said)

    def available(self) -> Verdict:
        missing = [name for name in self.needs if _absent(name)]
        if missing:
            hints = dict.fromkeys(self.needs[name] for name in missing)
            return Verdict(False, f"{' and '.join(missing)} cannot be imported: {'; '.join(hints)}")
        try:
            self.check()
            launch.call("cuInit", 0)
            compiler.target(device.current().capability)
        except Exception as error:  # no driver, no device, no NVRTC: each says so in its own way
            return Verdict(False, f"no CUDA device can be used: {error}")
        return Verdict(True)

    def supports(self, problem: Problem) -> Verdict:
        spec = problem.spec
        if max(spec.head_dim, spec.head_dim_v) > MAX_HEAD_DIM:
            return Verdict(False, f"head dim {max(spec.head_dim, spec.head_dim_v)} is over {MAX_HEAD_DIM}")
        if reason := modification.unsupported(spec):
            return Verdict(False, reason)
        able = [generation.supports(problem, device.current(), "forward") for generation in self.allowed()]
        if not able:
            return Verdict(False, f"it has no generation {os.environ.get(VARIABLE)}, which {VARIABLE} asks for")
        return Verdict(any(able), "; ".join(verdict.reason for verdict in able if not verdict))

    def row(self, problem: Problem, profile: Any, direction: Direction) -> Any:
        return self.choose(problem, profile, device.current(), direction).row

    def plan(self, problem: Problem, profile: Any) -> CudaPlan:
        return CudaPlan(self, problem, profile)

    def forward(self, plan: CudaPlan, operands: Operands) -> None:
        run, stream = plan.on(_device_of(operands), "forward").run, launch.stream()
        run(Arguments(plan.problem.spec, operands), stream)
        _keep(stream, operands)

    def backward(self, plan: CudaPlan, operands: Operands, gradients: Gradients) -> None:
        run = plan.on(_device_of(operands), "backward").run
        arguments = Arguments(plan.problem.spec, operands)
        arguments.gradients(gradients)
        stream = launch.stream()
        run(arguments, stream)
        _keep(stream, operands)
        launch.keep(stream, gradients.dlse)

    def bind(self, plan: CudaPlan, operands: Operands, anew: Sequence[str] = ()) -> Bound:
        import cupy

        here, current = _device_of(operands), cupy.cuda.runtime.getDevice
        run, template = plan.on(here, "forward").run, Arguments(plan.problem.spec, operands)
        places = [(template.release(name, operands), _form(operands.arrays[name])) for name in anew]
        templates = template, template.copy()
        templates[1].unread_lse(here.ordinal)
        spares: tuple[deque[Arguments], ...] = deque(maxlen=8), deque(maxlen=8)
        q_at, k_at, v_at, out_at, lse_at = (AT[name] for name in ("q", "k", "v", "out", "lse"))
        stream_of, ordinal, copies = launch.stream, here.ordinal, template.alive
        _keep(stream_of(), operands)

        def call(q: Any, k: Any, v: Any, out: Any, lse: Any, *arrays: Any) -> None:
            if current() != ordinal:
                raise ValueError(_ELSEWHERE.format(ordinal, current()))
            spare = spares[lse is None]
            try:
                arguments = spare.pop()  # its own, until it is put back
            except IndexError:
                arguments = templates[lse is None].copy()
            words = arguments.words
            words[q_at], words[k_at], words[v_at] = q.data.ptr, k.data.ptr, v.data.ptr
            words[out_at] = out.data.ptr
            if lse is not None:
                words[lse_at] = lse.data.ptr
            if arrays:
                for (at, form), array in zip(places, arrays, strict=True):
                    if _form(array) != form:
                        raise ValueError(f"an array of a modification has the form {_form(array)}; {form} fits")
                    words[at] = array.data.ptr
            stream = stream_of()
            if copies or arrays:  # arrays of the caller's, or made of them: a graph that records this may outlive them
                launch.keep(stream, copies, arrays)
            run(arguments, stream)
            spare.append(arguments)

        return call


@dataclass(frozen=True)
class CudaPlan:
    """Kernels for one spec; compiled, loaded and checked when first used on a device."""

    backend: CudaBackend
    problem: Problem
    profile: Any
    passes: dict[tuple[int, Direction], Pass] = field(default_factory=dict)

    def on(self, here: Device, direction: Direction) -> Pass:
        """The pass on a device."""
        made = self.passes.get((here.ordinal, direction))
        if made is None:
            made = self.passes[here.ordinal, direction] = self._made(here, direction)
        return made

    def _made(self, here: Device, direction: Direction) -> Pass:
        generation, row, said = self.backend.choose(self.problem, self.profile, here, direction)
        if generation is None:
            raise UnsupportedError(f"{self.backend.name} has no {direction} pass for this: {'; '.join(said)}")
        try:
            made = generation.plan(self.problem, row, here, direction)
        except compiler.CompileError as error:
            if row is None:
                raise
            from ...devices.schema import ProfileWarning

            # A profile chooses, it cannot stop attention.
            message = f"{row.origin}: not followed, its kernels do not compile: {error}"
            warnings.warn(message, ProfileWarning, stacklevel=2)
            made = generation.plan(self.problem, None, here, direction)
        verify.trusted(made, self.problem.spec, here, direction)
        return made

    @property
    def tile(self) -> Any:
        return self.on(device.current(), "forward").tile

    @property
    def why(self) -> str:
        here = device.current()
        generation, _, said = self.backend.choose(self.problem, self.profile, here, "forward")
        assert generation is not None
        return f"{generation.name}: {self.on(here, 'forward').why}" + "".join(f"; not {line}" for line in said)


def _absent(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:
        return True


def _form(array: Any) -> tuple[Any, ...]:
    return array.shape, array.strides, array.dtype


def _keep(stream: int, operands: Operands) -> None:
    """What a recorded call uses again beyond what the caller holds, who cannot know what was converted or copied."""
    op = operands
    launch.keep(stream, op.out, op.lse, op.q_offset, op.kv_lengths, op.sinks, *op.arrays.values())


def _device_of(operands: Operands) -> Device:
    """The current device, on which the operands have to lie."""
    here, ordinal = device.current(), operands.q.data.device_id
    if ordinal != here.ordinal:
        raise ValueError(_ELSEWHERE.format(ordinal, here.ordinal))
    return here
