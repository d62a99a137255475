"""What machine code is compiled for: a class of CPUs, and the instructions that a kernel asks for besides.

Code for a class is the same on every CPU of it, and so are its results; objects that were compiled elsewhere, on CPUs
of whatever architecture, are those that this machine would compile. A CPU of no class is a target of its own, with the
name and features that LLVM detects.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from llvmlite import binding

from ...devices import host


class Target(NamedTuple):
    """A target of LLVM, and its name here."""

    name: str
    triple: str
    cpu: str
    features: str
    tune: str = ""  # the CPU for which LLVM orders the instructions of micro-kernels, if not `cpu`


class _CpuClass(NamedTuple):
    name: str
    arch: str  # first word of the triple
    cpu: str  # LLVM's name
    features: frozenset[str]  # by LLVM's names
    lanes: int  # float32 lanes of its vectors
    tune: str = ""  # as in Target
    tuning: tuple[str, ...] = ()  # LLVM's features that choose among instructions


_V3 = frozenset({
    "cx8", "cx16", "cmov", "fxsr", "mmx", "popcnt", "sahf", "sse", "sse2", "sse3", "ssse3", "sse4.1", "sse4.2", "avx",
    "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave",
})  # fmt: skip
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
CLASSES = (
    # Or LLVM would vectorise loops to half of the width, for the clocks of the first CPUs with AVX-512. Products have
    # the full width regardless.
    _CpuClass("x86-64-v4", "x86_64", "x86-64-v4", _V4, 16, "znver4", ("-prefer-256-bit",)),
    _CpuClass("x86-64-v3", "x86_64", "x86-64-v3", _V3, 8, "znver3"),
    _CpuClass("aarch64", "aarch64", "generic", frozenset({"neon", "fp-armv8"}), 4),
)
"""Best first. Levels of x86-64: psABI, section 3.1.1. LLVM orders a level's instructions for Intel's CPUs; with that
order AMD's are 5 % slower where another thread shares the core.
"""

INSTRUCTIONS = {"avx512bf16": frozenset({"avx512bf16"}), "amx": frozenset({"avx512bf16", "amx-tile", "amx-bf16"})}
"""LLVM's features for a way to multiply bfloat16 (bf16.py), which finds out whether this CPU has them."""


def target(instructions: str = "") -> Target:
    """What kernels of this process are compiled for; instructions: the way to multiply bfloat16 that they use.

    The best class that the CPU fulfils, with vectors of the width that FLASHKIT_CPU_LANES allows. (Kernels of 4 lanes
    need fused multiply-adds too: without these a call replaces each.)
    """
    return _target(instructions, host.lanes_of(host.cpu_features()))


@cache
def _target(instructions: str, lanes: int) -> Target:
    triple, features = initialised(), binding.get_host_cpu_features()
    available = frozenset(name for name, present in features.items() if present)
    for level in CLASSES:
        same_width = level.lanes in (lanes, max(lanes, 8))
        if level.arch == triple.partition("-")[0] and level.features <= available and same_width:
            return of_class(level.name, instructions)
    return Target("host", triple, binding.get_host_cpu_name(), features.flatten())


def of_class(name: str, instructions: str = "") -> Target:
    """The target of a class on this system. This CPU need not fulfil it, nor be of its architecture."""
    (one,), (_, system) = (one for one in CLASSES if one.name == name), initialised().split("-", 1)
    more = INSTRUCTIONS.get(instructions, frozenset())
    features = [*(f"+{feature}" for feature in sorted(one.features | more)), *one.tuning]
    tune = "" if instructions == "amx" else one.tune  # no CPU of AMD has AMX
    return Target(f"{name}-{instructions}" if more else name, f"{one.arch}-{system}", one.cpu, ",".join(features), tune)


@cache
def initialised() -> str:
    """LLVM's triple of this process. Initialises LLVM for every architecture."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.get_process_triple()


def machine(of: Target) -> Any:
    """LLVM's emitter of machine code. An engine takes ownership of it, so each has its own."""
    llvm = binding.Target.from_triple(of.triple)
    return llvm.create_target_machine(cpu=of.cpu, features=of.features, opt=3, codemodel="jitdefault", jit=True)


def optimise(module: Any, machine: Any, *, vectorise: bool) -> None:
    """LLVM's passes of level 3 on a module; vectorise: also those that unroll and vectorise its loops."""
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = options.loop_vectorization = vectorise
    options.slp_vectorization = False
    builder = binding.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
