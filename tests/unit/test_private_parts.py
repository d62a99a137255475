"""The private and undocumented parts of other packages that flashkit uses, so that a new version of one is noticed.

pyproject.toml bounds these packages by the newest versions that this file passed with.
"""

import ast
import ctypes
import re
from importlib import metadata
from pathlib import Path

import pytest

import flashkit

PACKAGE = Path(flashkit.__file__).parent
SOURCES = [file for file in sorted(PACKAGE.rglob("*.py")) if "kernels" not in file.parts]

ATTRIBUTES = {
    "_final_module": "numba: specialise.compiled", "_finalize_final_module": "numba: specialise",
    "_optimize_final_module": "numba: specialise", "_finalized": "numba: specialise",
    "_getvalue": "numba: views, of cgutils.create_struct_proxy", "_asdict": "Python: named tuples",
    "_replace": "Python: named tuples", "_fields": "Python: named tuples",
    "_getframe": "Python: sys, errors.warn", "_functorch": "torch: call/foreign, call/torch_autograd",
    "_current_level": "torch: call/foreign, call/torch_autograd", "_cuda_getCurrentRawStream": "torch: call/foreign",
    "_are_functorch_transforms_active": "torch: torch, call/torch_autograd",
    "_len_torch_dispatch_stack": "torch: call/torch_autograd", "_profiler_enabled": "torch: call/torch_autograd",
    "_len_torch_function_stack": "torch: call/torch_autograd", "_autograd": "torch: call/torch_autograd",
    "_parse_dispatch_key": "torch: call/torch_autograd", "_get_default_store": "torch: distributed/process_group",
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


def test_pythons_locks_and_threads() -> None:
    """What the workers of the pool are made of; all but the first are in the stable ABI."""
    for name in ("start_new_thread", "allocate_lock", "acquire_lock", "release_lock"):
        assert getattr(ctypes.pythonapi, f"PyThread_{name}")


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
