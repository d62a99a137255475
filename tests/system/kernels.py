"""Kernels for tests of the caches: one of machine code that returns a number, and one of CUDA without a compiler."""

import ctypes
import json
import os
import struct
import textwrap
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding

from flashkit import errors
from flashkit.backends.cpu import objects, target
from flashkit.devices import kernel_cache

PLANTED, COMPILED = 666, 1
"""What the kernel returns that is in the cache, and the one that is compiled."""

IR = "declare i32 @abs(i32)\ndefine i32 @{name}() {{ %x = call i32 @abs(i32 {number})\n ret i32 %x }}"
"""With a relocation."""


class Source:
    """Of a CUDA binary without kernels."""

    name = "kernel"
    compiled = 0

    def made_from(self) -> object:
        return "text"

    def compile(self, arch: str) -> tuple[bytes, str]:
        self.compiled += 1
        header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HH", 2, 190)
        names = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 128, 1, 0, 0, 1, 0)  # the only section, which has no name
        header = header.ljust(40, b"\0") + struct.pack("<Q10xHHH", 64, 64, 1, 0)
        return header.ljust(64, b"\0") + names + b"\0", ""


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a new process does not know."""
    monkeypatch.setattr(objects, "_loaded", {})
    monkeypatch.setattr(kernel_cache, "_memory", OrderedDict())
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(kernel_cache, "_unpruned", {})


def returning(number: int, name: str = "f", wanted: target.Target | None = None) -> objects.Object:
    """The machine code of a function, for this CPU or a class of them."""
    text = IR.format(name=name, number=number)
    machine = target.machine(wanted or target.target())
    return objects.Object(machine.emit_object(binding.parse_assembly(text)), (name,))


def source(number: int = COMPILED, kind: str = "kind") -> objects.Source:
    """All of a kind have one name, whatever they return."""
    return objects.Source(kind, "text", lambda wanted: returning(number, wanted=wanted))


def content(name: str, made: objects.Object, **changed: Any) -> bytes:
    """What the file of this machine code contains; its hash is right, unless that is changed."""
    header = {"functions": made.functions, "calls": made.calls, **changed}
    functions, calls = (tuple(x) if isinstance(x, list) else x for x in (header["functions"], header["calls"]))
    header = {"sha256": objects._hash(name, objects.Object(made.code, functions, calls)), **header}
    return json.dumps(header).encode() + b"\n" + made.code


def run(kind: str = "kind") -> int:
    """Call the kernel, loaded from the cache or compiled."""
    found = objects.functions(source(kind=kind))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(found["f"])())


def file_of(kind: str = "kind") -> Path:
    (file,) = kernel_cache.path().rglob(f"{kind}_*.o")
    return file


def leftovers(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.suffix != ".lock"]


def beside(text: str) -> str:
    """A program that can import this file and tests beside it."""
    return f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n{textwrap.dedent(text)}"
