"""`flashkit cache prebuild`: compile the kernels of usual calls into the package, so that a wheel carries them.

What is compiled is what calls would compile: the same sources under the same names, for classes of CPUs
(backends/cpu/target.py) and architectures of GPUs instead of for this machine. So any machine builds for all CPUs of
its system and for all GPUs.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import mods
from ..call.arguments import prepare
from ..devices import host, prebuilt, profiles
from ..mods.block_mask import BlockMask
from ..options import OPTIONS
from ..spec import DTYPES, AttentionSpec, Direction, Problem

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
"""Head dims whose tiles a CPU's micro-kernels are compiled for; each serves every head dim with the same tile."""

GPUS = {"sm_80": "a100", "sm_86": "rtx3090", "sm_89": "rtx4090", "sm_90a": "h100"}
"""By architecture, the profile of the device whose tiles are compiled."""

GPU_DTYPES, GPU_HEAD_DIMS = ("float16", "bfloat16"), (64, 128)
GPU_SIZES = ((1, 4096), (128, 1024), (512, 512), (4096, 4096))
"""Queries and keys: decoding, few rows, a short sequence and a long one, which take different kernels."""


NVRTC = 13, 0
"""Compiles for GPUs; the extra `cuda13` installs it. Newer ones are slower on Hopper (docs/notes/hopper-forward.md)."""


class Prebuilt(NamedTuple):
    """A file that was written."""

    name: str  # below the folder of prebuilt kernels
    bytes: int
    seconds: float


def prebuild(
    folder: Path | None = None, cpu: Iterable[str] | None = None, gpu: Iterable[str] | None = None
) -> Iterator[Prebuilt]:
    """Compile the kernels of usual calls; yields each file as it is written.

    folder: where to write them, a new one. By default into the package, which then uses them, in place of those that it
    has. cpu: classes of CPUs, of whatever architecture; by default all. gpu: architectures; by default all of GPUS.
    They need NVRTC, but no device.

    ValueError for an unknown class or architecture, or a folder that is not empty; CompileError if a kernel does not
    compile, or NVRTC is of another version than NVRTC.
    """
    from ..backends.cpu import target
    from ..backends.cuda_common import compiler

    classes = tuple(one.name for one in target.CLASSES)
    cpu, gpu = classes if cpu is None else tuple(cpu), tuple(GPUS if gpu is None else gpu)
    for name, known in [*((name, classes) for name in cpu), *((name, tuple(GPUS)) for name in gpu)]:
        if name not in known:
            raise ValueError(f"expected {', '.join(known)}, got {name!r}")
    if gpu and compiler.version() != NVRTC:
        have, wanted = (".".join(map(str, version)) for version in (compiler.version(), NVRTC))
        raise compiler.CompileError(f"binaries come from NVRTC {wanted}, here is {have}: nvidia-cuda-nvrtc=={wanted}.*")
    if folder is None:
        folder = prebuilt.path()
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder: expected a new or empty one, got {folder}")
    return _written(folder, itertools.chain(*map(_cpu_files, cpu), *map(_gpu_files, gpu)))


def _written(folder: Path, files: Iterator[tuple[str, bytes]]) -> Iterator[Prebuilt]:
    started = time.perf_counter()
    for name, content in files:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        yield Prebuilt(name, len(content), time.perf_counter() - started)
        started = time.perf_counter()


# --- usual calls ------------------------------------------------------------------------------------------------------

BATCH, HEADS, TOKENS = 2, 4, 32


def specs(dtype: str) -> list[AttentionSpec]:
    """The distinct specs of usual calls with a modification, in a dtype; first the causal one."""
    grid, keys, biased = (TOKENS, TOKENS), (BATCH, 1, 1, TOKENS), (HEADS, TOKENS, TOKENS)
    shapes: list[tuple[int, ...]] = [
        grid, (1, 1, *grid), (BATCH, 1, *grid), (1, HEADS, *grid), (BATCH, HEADS, *grid), keys, biased, (TOKENS,)
    ]  # fmt: skip
    visible, bias = np.ones(keys, bool), np.ones(biased, dtype)
    numbers = {name: {name: option.usual} for name, option in OPTIONS.items() if option.usual is not None}
    usual: list[dict[str, Any]] = [
        {}, *numbers.values(), *({"alibi_slopes": np.ones(HEADS, kind)} for kind in ("f4", "f8")),
        {name: option[name] for name, option in numbers.items()}, {"mask": visible}, {"bias": bias},
        {"bias": bias, "mask": visible},
    ]  # fmt: skip
    options = [
        *(option | {"causal": True} for option in usual), *usual[1:],
        *({"mask": np.ones(shape, bool)} for shape in shapes), *({"bias": np.ones(shape, dtype)} for shape in shapes),
        *({"mask_mod": mods.prefix_lm(n)} for n in (8, [8] * BATCH)),
        *({"block_mask": BlockMask.from_mod(mod, *grid)} for mod in (mods.causal(), mods.sliding_window(8))),
    ]  # fmt: skip
    x = np.zeros((BATCH, HEADS, TOKENS, 64), dtype)
    return list(dict.fromkeys(prepare(x, x, x, **option)[0].spec for option in options))


# --- object files of the CPU backend ----------------------------------------------------------------------------------


def cpu_sources(name: str) -> list[Any]:
    """What usual calls load on CPUs of a class, as objects.Source."""
    from ..backends.cpu import modify, specialise, target
    from ..backends.cpu.micro import compile as micro

    (lanes,) = (one.lanes for one in target.CLASSES if one.name == name)
    sources = [specialise.launcher_source()]
    sources += [specialise.rotary_source(dtype) for dtype in DTYPES]
    for dtype, pass_ in itertools.product(DTYPES, ("forward", "backward", "decode")):
        sources.append(specialise.kernel_source(pass_, dtype))
        if lanes == 16 and dtype == "bfloat16":
            sources.append(specialise.kernel_source(pass_, dtype, bf16_pairs=True))
    for dtype in ("float32", "float64"):
        for spec in specs(dtype):
            sources += [modify.forward_source(spec), modify.decode_source(spec), modify.backward_source(spec)]
            if spec.mask is not None:
                sources.append(modify.classify_source(spec))
    blocks = dict.fromkeys(_register_blocks(lanes))
    sources += [micro.source(block) for block in blocks]
    rows = (replace(block, rows=1, vectors=1) for block in blocks if block.bf16_pairs != "amx")
    sources += [micro.source(block, gemv_kernels=True) for block in dict.fromkeys(rows)]
    return list({(source.kind, source.text): source for source in sources}.values())


def _register_blocks(lanes: int) -> Iterator[Any]:
    """The register blocks of the tiles that the shipped profiles give CPUs with vectors of this many float32 lanes."""
    from ..backends.cpu.micro.register_block import RegisterBlock
    from ..backends.cpu.plan import choose_tile

    methods = {"bfloat16": ("", "avx512bf16", "amx")} if lanes == 16 else {}
    for file in sorted(profiles.shipped_dir().glob("*.yaml")):
        profile = profiles.by_name(file.stem)
        if profile.device.kind != "cpu" or host.lanes_of(profile.device.features) != lanes:
            continue
        for dtype, d, mask in itertools.product(DTYPES, HEAD_DIMS, (None, specs("float32")[0].mask)):
            problem = Problem(AttentionSpec(dtype, d, d, mask=mask), 1, 8, 2048, 2048)
            directions: tuple[Direction, ...] = "forward", "backward"
            for direction, method in itertools.product(directions, methods.get(dtype, ("",))):
                tile, *_ = choose_tile(problem, profile, direction, amx=method == "amx")
                yield RegisterBlock.of(dtype, tile, method)


def _cpu_files(name: str) -> Iterator[tuple[str, bytes]]:
    from ..backends.cpu import objects, target

    for source in cpu_sources(name):
        file, content = objects.build(source, target.of_class(name, source.instructions))
        yield f"{objects.FOLDER}/{file}", content


# --- binaries of the CuPy backend -------------------------------------------------------------------------------------


def gpu_sources(arch: str) -> list[Any]:
    """What plain and causal calls load on devices of an architecture, as compiler.Source."""
    from ..backends.cuda_common import launch
    from ..backends.cuda_common.device import Device
    from ..backends.cupy_raw.backend import CupyRawBackend

    profile, backend = profiles.by_name(GPUS[arch]), CupyRawBackend()
    facts, memory = profile.device, profile.memory
    device = Device(
        facts.name or arch, facts.compute_capability or (0, 0), facts.sms or 0, memory.sram_per_block or 0,
        memory.sram_per_sm or 0, memory.registers_per_sm or 0,
    )  # fmt: skip
    directions: tuple[Direction, ...] = "forward", "backward"
    with launch.listing() as listed:
        for dtype, d, (n_q, n_k), direction in itertools.product(GPU_DTYPES, GPU_HEAD_DIMS, GPU_SIZES, directions):
            for mask in (None, specs("float32")[0].mask):
                problem = Problem(AttentionSpec(dtype, d, d, mask=mask), 4, 16, n_q, n_k)
                generation, _, tables, _ = backend.choose(problem, profile, device, direction)
                assert generation is not None
                tables.plan(generation, problem)
    assert all(one == arch for _, one in listed), listed
    return list(dict.fromkeys(source for source, _ in listed))


def _gpu_files(arch: str) -> Iterator[tuple[str, bytes]]:
    from ..backends.cuda_common import compiler

    for source in gpu_sources(arch):
        for file, content in compiler.build(source, arch):
            yield f"{compiler.FOLDER}/{file}", content
