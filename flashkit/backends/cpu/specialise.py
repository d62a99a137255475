"""Kernels made at run time: a kernel's text behind a head of constants, compiled by Numba to an object file.

Numba's own disk cache would have every later process import Numba, which takes longer than all else before the
first result. So its optimised LLVM module is taken from it and kept as an object file (objects.py), named by the
hash of the text and of every source that is compiled into it: a changed source is a new file, and never a stale
kernel.
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
from . import objects
from .objects import Object

_HERE = Path(__file__).parent

_CONVERSIONS = {
    "float64": ("float64", "float64_to_float64", "float64_to_float64"),
    "float32": ("float32", "float32_to_float32", "float32_to_float32"),
    "float16": ("uint16", "float16_to_float32", "float32_to_float16"),
    "bfloat16": ("uint16", "bfloat16_to_float32", "float32_to_bfloat16"),
}

_SETTINGS = (
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT", "NUMBA_LOOP_VECTORIZE",
    "NUMBA_SLP_VECTORIZE", "NUMBA_DISABLE_INTEL_SVML", "NUMBA_INTEL_SVML",
)  # fmt: skip
"""Variables of the environment that change what Numba makes."""


def load(kind: str, text: str) -> dict[str, int]:
    """Addresses of the functions that the text marks by @entry (functions.py), compiled now or before."""
    settings = [(name, os.environ[name]) for name in _SETTINGS if name in os.environ]
    return objects.functions(kind, f"{settings} {text}", lambda: compiled(kind, text))


@cache
def kernel(name: str, dtype: str, *, pairs: bool = False) -> dict[str, int]:
    """kernels/<name>.py for a storage dtype. pairs: bfloat16 that is multiplied as it is (pairs.py)."""
    storage, widen, narrow = _CONVERSIONS[dtype]
    compute = "float64" if dtype == "float64" else "float32"
    head = f"""
import numpy as np
from flashkit.backends.cpu.memory import {widen} as widen, {narrow} as narrow
STORAGE, STORAGE_SIZE = np.{storage}, {np.dtype(storage).itemsize}
COMPUTE, COMPUTE_SIZE = np.{compute}, {np.dtype(compute).itemsize}
IN_PLACE = {storage == compute}
"""
    texts = [(_HERE / "kernels" / f"{part}.py").read_text() for part in ("load_pairs" if pairs else "load", name)]
    return load(f"{name}_{dtype}", "\n\n".join([head.lstrip(), *texts]))


@cache
def launcher() -> dict[str, int]:
    """kernels/launch.py for this Python."""
    address, probe = object.__basicsize__, np.empty(1)
    if ctypes.c_ssize_t.from_address(id(probe) + address).value != probe.ctypes.data:
        raise RuntimeError(
            "this Python does not lay out NumPy arrays as CPython does; flashkit's CPU kernels need that"
        )
    head = f"ADDRESS = {address}\n\n"
    return load("launch", head + (_HERE / "kernels" / "launch.py").read_text())


# --- compiling --------------------------------------------------------------------------------------------------------


def compiled(kind: str, text: str) -> Object:
    """The text's entries, each a C function under its own name, and all that they call, as one object."""
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
    # Numba makes a million objects that live to the end; looking for garbage among them takes an eighth of the time.
    with global_compiler_lock, no_collection():
        typing, target = cpu_target.typing_context, cpu_target.target_context
        target.refresh()  # Numba's runtime, which is to be complete
        library = target.codegen().create_library(kind)
        with _parts_unfinished(library):
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
def _parts_unfinished(library: Any) -> Iterator[None]:
    """Numba optimises each function that a kernel calls and makes machine code of it, alone and then again as a part of
    each that calls it. What counts is the last time, when all of them are together; leaving out the others saves half
    of the time. Functions of Numba's own get their machine code as ever, for others may call them later.
    """
    kind, codegen = type(library), library.codegen
    optimise, finish, set_env = kind._optimize_final_module, kind._finalize_final_module, codegen.set_env

    def finish_others(part: Any) -> None:
        if any("flashkit" in function.name for function in part.get_defined_functions()):
            part._finalized = True
        else:
            finish(part)

    kind._optimize_final_module = lambda part: None
    kind._finalize_final_module = finish_others
    codegen.set_env = lambda name, env: None if "flashkit" in name else set_env(name, env)
    try:
        yield
    finally:
        kind._optimize_final_module, kind._finalize_final_module = optimise, finish
        del codegen.set_env


def _exports(ir: Any, target: Any, results: dict[str, Any]) -> Any:
    """For each entry a C function of its name, over 64-bit integers, that calls what Numba compiled.

    Arrays in kernels are views of addresses and own nothing, so counting references to them does nothing. Kernels do
    not raise; one that did would have computed nonsense, and ends the process with a message.
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
            said = bytearray(f"flashkit: the kernel function {name} raised\0".encode())
            text = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), len(said)), f"raised.{name}")
            text.initializer, text.global_constant, text.linkage = ir.Constant(text.value_type, said), True, "internal"
            builder.call(fatal, [builder.bitcast(text, pointer)])
        builder.ret_void() if nothing else builder.ret(value)
    return module


def _in_process(name: str) -> bool:
    """Whether the process has a function of this name without Numba: C's library, its mathematics, Python's."""
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
