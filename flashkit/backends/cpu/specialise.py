"""Kernels specialised at run time: a head of constants and the kernel's texts, compiled by Numba to an object file.

With Numba's own disk cache every later process would import Numba, which takes longer than all else before the first
result. So Numba's optimised LLVM module is kept as an object file (objects.py), named by the hash of the text and of
every source that is compiled into it: a changed source is a new file, never a stale kernel.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...devices.host import no_collection
from ...spec import DTYPES
from .. import elf
from . import target
from .micro.vector import E4M3_UNIT
from .objects import Object, Source
from .target import Target

_HERE = Path(__file__).parent

_SETTINGS = ("NUMBA_DISABLE_INTEL_SVML",)
"""Environment variables that change the machine code."""


def source(kind: str, text: str) -> Source:
    """The functions that the text marks by @entry (functions.py); compiled once, then read from disk."""
    settings = [(name, os.environ[name]) for name in _SETTINGS if name in os.environ]
    return Source(kind, f"{settings} {text}", lambda wanted: compiled(kind, text, wanted))


def kernel_source(name: str, dtype: str, bf16_pairs: bool = False, kv_format: str = "") -> Source:
    """Entries of kernels/<name>.py; of "jvp", forward.py with tangents. kv_format: of 8-bit keys and values."""
    file = "forward" if name == "jvp" else name
    parts = ("common", "operands_bf16_pairs" if bf16_pairs else "operands", "kv_loader", file)
    kind, head = f"{name}_{dtype}" + (f"_{kv_format}" if kv_format else ""), f"JVP = {name == 'jvp'}\n"
    return source(kind, "\n\n".join([_head(dtype, kv_format) + head, *(_text(part) for part in parts)]))


def rotary_source(dtype: str) -> Source:
    """kernels/rotary.py for a dtype."""
    return source(f"rotary_{dtype}", f"{_head(dtype)}\nADDRESS = {_address_offset()}\n\n" + _text("rotary"))


def launcher_source() -> Source:
    """kernels/launch.py for this Python."""
    clock = getattr(time, "CLOCK_MONOTONIC", 0)
    head = f"ADDRESS = {_address_offset()}\nCLOCK_MONOTONIC = {clock}\n\n"
    return source("launch", head + _text("launch"))


def _head(dtype: str, kv_format: str = "") -> str:
    """What kernels know of their dtype, and of that of keys and values."""
    accumulator, size = DTYPES[dtype].accumulator, DTYPES[dtype].size
    storage = dtype if dtype == accumulator else f"uint{8 * size}"
    widen, narrow = f"{dtype}_to_{accumulator}", f"{accumulator}_to_{dtype}"
    kv, kv_size, widen_kv = (storage, size, widen) if not kv_format else ("uint8", 1, f"{kv_format}_to_{accumulator}")
    return f"""import numpy as np
from flashkit.backends.cpu.views import {widen} as widen, {narrow} as narrow, {widen_kv} as widen_kv
STORAGE, STORAGE_SIZE = np.{storage}, {size}
ACCUM, ACCUM_SIZE = np.{accumulator}, {DTYPES[accumulator].size}
IN_PLACE = {dtype == accumulator}
KV_STORAGE, KV_SIZE, SCALED = np.{kv}, {kv_size}, {bool(kv_format)}
KV_UNIT = ACCUM({E4M3_UNIT if kv_format == "e4m3" else 1})
"""


def _text(name: str) -> str:
    return (_HERE / "kernels" / f"{name}.py").read_text()


@cache
def _address_offset() -> int:
    """Where a NumPy array object has the address of its first element. Kernels find the objects in tuples, too."""
    offset, arrays = object.__basicsize__, (np.empty(1),)
    places = id(arrays) + tuple.__basicsize__, id(arrays[0]) + offset
    if [ctypes.c_ssize_t.from_address(x).value for x in places] != [id(arrays[0]), arrays[0].ctypes.data]:
        raise RuntimeError(
            "this Python does not lay out NumPy arrays as CPython does; flashkit's CPU kernels need that"
        )
    return offset


# --- compiling --------------------------------------------------------------------------------------------------------


def compiled(kind: str, text: str, wanted: Target) -> Object:
    """One object with the text's entries, each a C function of its own name, and all that they call."""
    with _jit():
        return _compiled(kind, text, wanted)


def _compiled(kind: str, text: str, wanted: Target) -> Object:
    from llvmlite import binding, ir
    from numba.core import compiler
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from .functions import options

    module: dict[str, Any] = {"__name__": f"flashkit_kernels.{kind}"}
    exec(compile(text, f"<flashkit {kind}>", "exec"), module)
    entries = {name: f for name, f in module.items() if getattr(f, "signature", None) is not None}  # not NumPy's
    flags = compiler.Flags()
    flags.nrt = flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = options["error_model"]
    # Numba allocates many objects that live to the end, so garbage collection only costs time.
    with global_compiler_lock, no_collection():
        typing, context = cpu_target.typing_context, cpu_target.target_context
        context.refresh()  # completes Numba's runtime
        library = context.codegen().create_library(kind)
        with _without_machine_code(library):
            results = {
                name: compiler.compile_extra(typing, context, f, f.signature.args, f.signature.return_type, flags, {})
                for name, f in entries.items()
            }
            library.add_ir_module(_exports(ir, context, results))
            for result in results.values():
                library.add_linking_library(result.library)
            library.finalize()
        linked, machine = library._final_module, _machine(wanted)
        linked.triple, linked.data_layout = wanted.triple, str(machine.target_data)
        for i, name in enumerate([*linked.functions, *linked.global_variables]):
            if not name.is_declaration and name.name not in entries:
                # Numba counts what it has compiled in its names; the object is the same in every process.
                name.linkage, name.name = "internal", f"part{i}"
        target.optimise(linked, machine, vectorise=True)
        manager = binding.create_new_module_pass_manager()
        manager.add_global_dead_code_eliminate_pass()
        manager.run(linked, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
        code = machine.emit_object(linked)
        called = {f.name for f in linked.functions if f.is_declaration and not f.name.startswith("llvm.")}
    # LLVM makes calls of its own, such as memset, which the module does not name.
    return Object(code, tuple(entries), tuple(sorted(called | elf.undefined(code))))


@contextmanager
def _jit() -> Iterator[None]:
    """NUMBA_DISABLE_JIT is for the functions of the program, and kernels have no other form."""
    from numba import config

    disabled, config.DISABLE_JIT = config.DISABLE_JIT, 0
    try:
        yield
    finally:
        config.DISABLE_JIT = disabled


@cache
def _machine(wanted: Target) -> Any:
    """Kept, as builders of pass managers are for one machine."""
    return target.machine(wanted)


@contextmanager
def _without_machine_code(library: Any) -> Iterator[None]:
    """Numba optimises and compiles each function that a kernel calls, for this CPU, first on its own and then in each
    caller. Only the last compilation, of all functions together for a target, counts; this skips the others. Numba's
    own functions are compiled as usual, since other code may call them later.
    """
    kind, codegen = type(library), library.codegen
    optimise, finalize, set_env = kind._optimize_final_module, kind._finalize_final_module, codegen.set_env

    def finalize_numbas_own(library: Any) -> None:
        if any("flashkit" in function.name for function in library.get_defined_functions()):
            library._finalized = True
        else:
            finalize(library)

    kind._optimize_final_module = lambda library: None
    kind._finalize_final_module = finalize_numbas_own
    codegen.set_env = lambda name, env: None if "flashkit" in name else set_env(name, env)
    try:
        yield
    finally:
        kind._optimize_final_module, kind._finalize_final_module = optimise, finalize
        del codegen.set_env


def _exports(ir: Any, target: Any, results: dict[str, Any]) -> Any:
    """A C function for each entry. Views own nothing, so reference counts do nothing; a kernel that raises aborts."""
    module = ir.Module("exports")
    pointer, void = ir.IntType(8).as_pointer(), ir.VoidType()
    for name in ("NRT_incref", "NRT_decref"):
        ir.IRBuilder(ir.Function(module, ir.FunctionType(void, [pointer]), name).append_basic_block()).ret_void()
    fatal = ir.Function(module, ir.FunctionType(void, [pointer]), "Py_FatalError")
    for name, result in results.items():
        signature, described = result.signature, result.fndesc
        native = target.declare_function(module, described)
        returns = target.get_value_type(signature.return_type)
        nothing = str(signature.return_type) == "none"
        function = ir.Function(
            module, ir.FunctionType(void if nothing else returns, [ir.IntType(64)] * len(signature.args)), name
        )
        builder = ir.IRBuilder(function.append_basic_block())
        status, value = target.call_conv.call_function(
            builder, native, signature.return_type, signature.args, function.args
        )
        with builder.if_then(status.is_error, likely=False):
            message = bytearray(f"flashkit: the kernel function {name} raised\0".encode())
            text = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(message)), f"raised.{name}")
            text.initializer, text.global_constant = ir.Constant(text.value_type, message), True
            text.linkage = "internal"
            builder.call(fatal, [builder.bitcast(text, pointer)])
        builder.ret_void() if nothing else builder.ret(value)
    return module
