"""Micro-kernels compiled for this machine: LLVM IR (vector.py) to an object file, kept in the cache directory.

Numba is not involved, so a register block costs a fraction of a second, and the kernels, which call micro-kernels
by address, are compiled once for all of them.
"""

from __future__ import annotations

import hashlib
import threading
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import binding

from . import specialise, vector
from .vector import Block

_lock = threading.Lock()
_engines: list[Any] = []  # own the machine code


@cache
def machine() -> tuple[str, str, str]:
    """Triple, name and features of this CPU by LLVM's names; LLVM is ready for it afterwards."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.get_process_triple(), binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def assemble(block: Block, triple: str, cpu: str, features: str) -> tuple[Any, Any]:
    """The optimised LLVM module and the target machine that emits it, for any CPU that LLVM was built for."""
    target = binding.Target.from_triple(triple).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault"
    )
    module = binding.parse_assembly(str(vector.module(block, triple, features)))
    module.verify()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    # The loops are written as they are meant to run; LLVM's unrolling of them gains nothing and takes seconds.
    options.loop_unrolling = options.loop_vectorization = options.slp_vectorization = False
    builder = binding.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    return module, target


@cache
def addresses(block: Block) -> dict[str, int]:
    """Address of each micro-kernel for the register block on this machine."""
    with _lock:
        key = f"{specialise.fingerprint()} {machine()} {block}"
        path = specialise.folder() / f"micro_{hashlib.sha256(key.encode()).hexdigest()[:20]}.o"
        if not path.exists():
            module, target = assemble(block, *machine())
            specialise.write(path, target.emit_object(module))
        return _load(path)


def _load(path: Path) -> dict[str, int]:
    target = binding.Target.from_triple(machine()[0]).create_target_machine(
        cpu=machine()[1], features=machine()[2], codemodel="jitdefault"
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(path.read_bytes()))
    engine.finalize_object()
    _engines.append(engine)
    return {name: engine.get_function_address(name) for name in vector.KERNELS}
