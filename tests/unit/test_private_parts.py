"""The private and undocumented parts of other packages that flashkit uses, so that a new version of one is noticed.

pyproject.toml bounds these packages by the newest versions that this file passed with.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import inspect
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashkit

PACKAGE = Path(flashkit.__file__).parent
SOURCES = [file for file in sorted(PACKAGE.rglob("*.py")) if "kernels" not in file.parts]

ATTRIBUTES = {
    "_final_module": "numba: specialise.compiled", "_finalize_final_module": "numba: specialise",
    "_optimize_final_module": "numba: specialise", "_finalized": "numba: specialise",
    "_getvalue": "numba: views, of cgutils.create_struct_proxy", "_asdict": "Python: named tuples",
    "_replace": "Python: named tuples",
    "_getframe": "Python: sys, errors.warn", "_functorch": "torch: call/foreign, call/torch_autograd",
    "_current_level": "torch: call/foreign, call/torch_autograd", "_cuda_getCurrentRawStream": "torch: call/foreign",
    "_are_functorch_transforms_active": "torch: torch, call/torch_autograd",
    "_len_torch_dispatch_stack": "torch: call/torch_autograd", "_profiler_enabled": "torch: call/torch_autograd",
    "_len_torch_function_stack": "torch: call/torch_autograd", "_autograd": "torch: call/torch_autograd",
    "_parse_dispatch_key": "torch: call/torch_autograd",
    "_dispatch_tls_is_dispatch_key_included": "torch: call/torch_autograd",
    "_dynamo": "torch: call/views, call/torch_plans", "_empty_strided_cuda": "torch: call/views",
    "_is_owned": "Python: threading.RLock, forking", "_dispose": "llvmlite: pass_managers",
}  # fmt: skip
"""Attributes with a leading underscore that flashkit does not define itself."""

MODULES = {
    "numba.core", "numba.core.cgutils", "numba.core.compiler", "numba.core.compiler_lock", "numba.core.config",
    "numba.core.registry", "numba.cuda.dispatcher", "numba.cuda.libdevice", "numba.cuda.np", "numba.cuda.np.arrayobj",
    "numba.np.ufunc",
}  # fmt: skip
"""Modules without documentation that flashkit imports, or names as text."""


def test_every_private_attribute_is_listed() -> None:
    own: set[str] = set()
    used: dict[str, str] = {}
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    own.add(name)
                case ast.Attribute(attr=name) if re.match(r"_[a-z]", name):
                    used.setdefault(name, f"{file.name}:{node.lineno}")
    foreign = {name: place for name, place in used.items() if name not in own}
    assert set(foreign) <= set(ATTRIBUTES), {name: foreign[name] for name in set(foreign) - set(ATTRIBUTES)}
    assert {"_final_module", "_finalized"} <= set(foreign), "the scan finds what is known"


def test_every_undocumented_module_is_listed() -> None:
    undocumented = r"(numba(?:\.cuda)?\.(?:core|np|dispatcher|libdevice)[\w.]*)"
    pattern = re.compile(rf"(?:from|import) {undocumented}(?: import (\w+))?")
    found = set()
    for file in SOURCES:
        for line in file.read_text().splitlines():
            for module, name in pattern.findall(line.strip()):
                found.add(module)
                if name.islower() and name in ("cgutils", "compiler", "config", "arrayobj"):
                    found.add(f"{module}.{name}")
    assert found <= MODULES | {"numba.core"}, found - MODULES
    assert "numba.core.compiler_lock" in found


def test_numbas_compiler() -> None:
    """What specialise.compiled calls and replaces."""
    from numba.core import compiler
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.registry import cpu_target

    flags = compiler.Flags()
    for name in ("nrt", "no_compile", "no_cpython_wrapper", "no_cfunc_wrapper", "error_model"):
        assert hasattr(flags, name), name
    names = [*inspect.signature(compiler.compile_extra).parameters]
    assert names[:7] == ["typingctx", "targetctx", "func", "args", "return_type", "flags", "locals"]
    assert hasattr(global_compiler_lock, "__enter__")
    target = cpu_target.target_context
    target.refresh()
    codegen = target.codegen()
    library: Any = codegen.create_library("test")
    for name in (
        "_optimize_final_module", "_finalize_final_module", "add_ir_module", "add_linking_library", "finalize",
        "get_defined_functions",
    ):  # fmt: skip
        assert callable(getattr(library, name)), name
    for name in ("_optimize_final_module", "_finalize_final_module"):
        assert [*inspect.signature(getattr(type(library), name)).parameters] == ["self"], name
    for name in ("_final_module", "_finalized"):
        assert hasattr(library, name), name
    assert [*inspect.signature(codegen.set_env).parameters] == ["env_name", "env"]
    assert {"declare_function", "get_value_type", "call_conv"} <= set(dir(target))
    assert callable(target.call_conv.call_function)


def test_llvmlite() -> None:
    from llvmlite import binding

    binding.initialize_native_target()
    manager = binding.create_new_module_pass_manager()
    manager.add_global_dead_code_eliminate_pass()
    options = binding.create_pipeline_tuning_options(speed_level=3)
    for name in ("loop_unrolling", "loop_vectorization", "slp_vectorization"):
        assert hasattr(options, name), name
    machine = binding.Target.from_default_triple().create_target_machine()
    builder = binding.create_pass_builder(machine, options)
    assert callable(builder.getModulePassManager().run)
    assert builder._time_passes_handler is None and builder._tm is machine
    assert isinstance(type(options).inlining_threshold, property)


def test_numbas_threads() -> None:
    """What threads.py reads where a program uses Numba's threads, and objects.py without importing Numba."""
    from numba.np.ufunc import parallel

    assert isinstance(parallel._is_initialized, bool) and callable(parallel.get_num_threads)
    places = importlib.util.find_spec("numba").submodule_search_locations
    assert (Path(places[0]) / "_version.py").is_file()


def test_pythons_locks_and_threads() -> None:
    """What the workers of the pool are made of; all but the first are in the stable ABI."""
    for name in ("start_new_thread", "allocate_lock", "acquire_lock", "release_lock"):
        assert getattr(ctypes.pythonapi, f"PyThread_{name}")


def test_numpys_array_objects() -> None:
    """kernels/launch.py reads the address of an array's data from the object."""
    array = np.arange(3)
    assert ctypes.c_ssize_t.from_address(id(array) + object.__basicsize__).value == array.ctypes.data


def test_numba_cuda() -> None:
    """What numba_cuda/compile.py replaces, and the form of the PTX that it rewrites."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
    from numba import cuda
    from numba.cuda import dispatcher, libdevice
    from numba.cuda.np import arrayobj

    assert callable(dispatcher.get_current_device) and callable(arrayobj.make_array)
    assert "launch_bounds" in inspect.signature(cuda.compile_ptx).parameters or any(
        p.kind is p.VAR_KEYWORD for p in inspect.signature(cuda.compile_ptx).parameters.values()
    )
    for name in (
        "int_as_float",
        "float_as_int",
        "longlong_as_double",
        "double_as_longlong",
        "half2float",
        "float2half_rn",
    ):
        assert hasattr(libdevice, name), name


def bounds(package: str) -> list[str]:
    """The bounds of a package in each of flashkit's requirements that names it."""
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    return re.findall(rf'"{package}(?:\[\w+\])?([<>=][^";]*)', text)


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numba-cuda"])
def test_packages_with_private_parts_have_an_upper_bound(package: str) -> None:
    found = bounds(package)
    assert found and all(re.fullmatch(r">=\d+\.\d+(\.\d+)?,<\d+\.\d+", each) for each in found), found
    try:
        installed = tuple(map(int, metadata.version(package).split(".")[:3]))
    except metadata.PackageNotFoundError:
        return
    for each in found:
        least, most = (tuple(map(int, part.lstrip("<>=").split("."))) for part in each.split(","))
        assert least <= installed < most, f"{package} {installed} is outside of {each}"
