"""Kernels specialised at run time: a head of constants and the kernel's texts, compiled by Numba to an object file.

With Numba's own disk cache every later process would import Numba, which takes longer than all else before the first
result. So Numba's optimised LLVM module is kept as an object file (objects.py), named by the hash of the text and of
every source that is compiled into it: a changed source is a new file, never a stale kernel.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...devices.host import no_collection
from ...spec import DTYPES
from . import objects
from .objects import Functions, Object

_HERE = Path(__file__).parent

_SETTINGS = (
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT", "NUMBA_LOOP_VECTORIZE",
    "NUMBA_SLP_VECTORIZE", "NUMBA_DISABLE_INTEL_SVML", "NUMBA_INTEL_SVML",
)  # fmt: skip
"""Environment variables that change Numba's code."""


def load(kind: str, text: str) -> Functions:
    """The functions that the text marks by @entry (functions.py); compiled once, then read from disk."""
    settings = [(name, os.environ[name]) for name in _SETTINGS if name in os.environ]
    return objects.functions(kind, f"{settings} {text}", lambda: compiled(kind, text))


@cache
def kernel(name: str, dtype: str, *, bf16_pairs: bool = False) -> Functions:
    """Entries of kernels/<name>.py for a dtype. bf16_pairs: bfloat16 operands are multiplied in pairs, not widened."""
    parts = ("common", "operands_bf16_pairs" if bf16_pairs else "operands", "kv_loader", name)
    return load(f"{name}_{dtype}", "\n\n".join([_head(dtype), *(_text(part) for part in parts)]))


@cache
def rotary(dtype: str) -> Functions:
    """kernels/rotary.py for a dtype."""
    head = f"{_head(dtype)}\nADDRESS = {_address_offset()}\n\n"
    return load(f"rotary_{dtype}", head + _text("rotary"))


def _head(dtype: str) -> str:
    """What kernels know of their dtype."""
    accumulator, size = DTYPES[dtype].accumulator, DTYPES[dtype].size
    storage = dtype if dtype == accumulator else "uint16"
    widen, narrow = f"{dtype}_to_{accumulator}", f"{accumulator}_to_{dtype}"
    return f"""import numpy as np
from flashkit.backends.cpu.storage import {widen} as widen, {narrow} as narrow
STORAGE, STORAGE_SIZE = np.{storage}, {size}
ACCUM, ACCUM_SIZE = np.{accumulator}, {DTYPES[accumulator].size}
IN_PLACE = {dtype == accumulator}
"""


def _text(name: str) -> str:
    return (_HERE / "kernels" / f"{name}.py").read_text()


@cache
def launcher() -> Functions:
    """kernels/launch.py for this Python."""
    return load("launch", f"ADDRESS = {_address_offset()}\n\n" + _text("launch"))


@cache
def _address_offset() -> int:
    """Where a NumPy array object has the address of its first element."""
    offset, probe = object.__basicsize__, np.empty(1)
    if ctypes.c_ssize_t.from_address(id(probe) + offset).value != probe.ctypes.data:
        raise RuntimeError(
            "this Python does not lay out NumPy arrays as CPython does; flashkit's CPU kernels need that"
        )
    return offset


# --- compiling --------------------------------------------------------------------------------------------------------


def compiled(kind: str, text: str) -> Object:
    """One object with the text's entries, each a C function of its own name, and all that they call."""
    from llvmlite import binding, ir
    from numba.core import compiler
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    from .functions import options

    module: dict[str, Any] = {"__name__": f"flashkit_kernels.{kind}"}
    exec(compile(text, f"<flashkit {kind}>", "exec"), module)
    entries = {name: f for name, f in module.items() if hasattr(f, "signature")}
    flags = compiler.Flags()
    flags.nrt = flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = options["error_model"]
    # Numba allocates many objects that live to the end, so garbage collection only costs time.
    with global_compiler_lock, no_collection():
        typing, target = cpu_target.typing_context, cpu_target.target_context
        target.refresh()  # completes Numba's runtime
        library = target.codegen().create_library(kind)
        with _without_intermediate_code(library):
            results = {
                name: compiler.compile_extra(typing, target, f, f.signature.args, f.signature.return_type, flags, {})
                for name, f in entries.items()
            }
            library.add_ir_module(_exports(ir, target, results))
            for result in results.values():
                library.add_linking_library(result.library)
            library.finalize()
        library._optimize_final_module()
        linked = library._final_module
        for name in [*linked.functions, *linked.global_variables]:
            if not name.is_declaration and name.name not in entries:
                name.linkage = "internal"
        manager = binding.create_new_module_pass_manager()
        manager.add_global_dead_code_eliminate_pass()
        manager.run(linked, binding.create_pass_builder(target.codegen()._tm, binding.create_pipeline_tuning_options()))
        code = target.codegen()._tm.emit_object(linked)
        foreign = [f.name for f in linked.functions if f.is_declaration and not f.name.startswith("llvm.")]
    return Object(code, tuple(entries), not all(map(_in_process, foreign)))


@contextmanager
def _without_intermediate_code(library: Any) -> Iterator[None]:
    """Numba optimises and compiles each function that a kernel calls, first alone and then inside each caller. Only the
    last compilation, of all functions together, counts; this skips the others. Numba's own functions are compiled as
    usual, since other code may call them later.
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
    """For each entry a C function of its name, of 64-bit integers, that calls Numba's function.

    Arrays in kernels are views that own nothing, so reference counts are no-ops. Kernels do not raise; should one, its
    results are invalid, and the process ends with a message.
    """
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


def _in_process(name: str) -> bool:
    """Whether libc, libm or Python has a function of this name, so that it is found without Numba."""
    return any(hasattr(library, name) for library in _libraries())


@cache
def _libraries() -> tuple[ctypes.CDLL, ...]:
    def opened() -> Iterator[ctypes.CDLL]:
        for name in (None, "libm.so.6"):
            try:
                yield ctypes.CDLL(name)
            except (OSError, TypeError):  # TypeError: Windows has no library that stands for the process
                continue

    return (*opened(), ctypes.pythonapi)
