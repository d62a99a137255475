"""Sources to machine code, cached on disk; and the compiler of CUDA C++, NVRTC.

It needs neither a device nor a driver, so every kernel can be compiled and inspected anywhere. The name of a binary has
the hash of everything that it depends on: text, headers, options, architecture and compiler version.

A wheel carries the binaries of usual calls (tools/prebuild.py); their names leave the compiler version out. One rule
says which binary runs: the prebuilt one, if the package has it and the driver is of its CUDA version or newer, else the
one in the cache, else one compiled now.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...devices import interrupt, kernel_cache, prebuilt, progress
from .. import elf

FOLDER = "cuda"
"""Folder in the cache directory, and of the prebuilt kernels."""

OPTIONS = (
    "-std=c++17",
    "-default-device",
    "--diag-suppress=177",
    "--ptxas-options=-v",
)  # 177: unused constants and functions


class CompileError(RuntimeError):
    """A kernel cannot be compiled here. The message has the output of the compiler."""


class SerialisedError(CompileError):
    """ptxas would run the wgmma instructions of a kernel one after another: it would be right but slow."""


@dataclass(frozen=True)
class Resources:
    """Resources of a kernel by ptxas: registers, stack and spilled bytes of a thread; bytes of static shared memory."""

    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0


@dataclass(frozen=True)
class Binary:
    """A compiled file: machine code, and the resources of each of its kernels by name."""

    name: str
    code: bytes
    resources: Mapping[str, Resources]

    @property
    def path(self) -> Path:
        """Its file, if the cache directory can be used. Kernels are loaded from `code`."""
        return kernel_cache.path() / FOLDER / f"{self.name}.cubin"

    @property
    def checked(self) -> bool:
        """Whether this code has passed `verify.check`, in this process or an earlier one."""
        return kernel_cache.read(FOLDER, f"{self.name}.checked") == _hash(self).encode()

    def mark_checked(self) -> None:
        """Record that this code has passed `verify.check`."""
        kernel_cache.write(FOLDER, f"{self.name}.checked", _hash(self).encode())


class _Report(msgspec.Struct, frozen=True):
    """The JSON file of a binary. The hash prevents loading a damaged or renamed file."""

    sha256: str
    resources: dict[str, Resources]
    cuda: int = 0  # major version of the compiler of a prebuilt binary


class Compilable(Protocol):
    """A source in any language."""

    @property
    def name(self) -> str:
        """For the file."""

    def made_from(self) -> object:
        """What the machine code depends on besides the architecture: text, options, compilers. `repr` identifies it."""

    def compile(self, arch: str) -> tuple[bytes, str]:
        """Machine code and the report of `ptxas -v`. CompileError with the output of the compiler."""


@dataclass(frozen=True)
class Source:
    """A source in CUDA C++, and the headers that it may include, by name."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()

    def made_from(self) -> object:
        return self.given, version()

    @property
    def given(self) -> object:
        """What the machine code depends on besides the architecture and the compiler."""
        return self.text, _included(self), OPTIONS

    def compile(self, arch: str) -> tuple[bytes, str]:
        return _compile(self, arch)


@cache
def headers(folder: Path) -> tuple[tuple[str, str], ...]:
    """The .cuh and .cu files below a folder, for `#include "folder/name"`."""
    found = (path for path in sorted(folder.rglob("*")) if path.suffix in (".cuh", ".cu"))
    return tuple((path.relative_to(folder).as_posix(), path.read_text()) for path in found)


@cache
def version() -> tuple[int, int]:
    """The version of NVRTC. ImportError or RuntimeError if it cannot be loaded."""
    major, minor = _call("nvrtcVersion")
    return major, minor


@cache
def architectures() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for, ascending: 90 is sm_90."""
    return tuple(_call("nvrtcGetSupportedArchs")[0])


def target(capability: tuple[int, int]) -> str:
    """sm_90a for the device's own, else the newest of its major version that NVRTC knows. CompileError without one."""
    major, minor = capability
    known = [arch for arch in architectures() if arch // 10 == major and arch % 10 <= minor]
    if not known:
        oldest, newest = architectures()[0], architectures()[-1]
        have = f"NVRTC {'.'.join(map(str, version()))} compiles for sm_{oldest} to sm_{newest}"
        raise CompileError(f"{have}, the device is sm_{major}{minor}: install the packages of another CUDA version")
    best = max(known)
    return f"sm_{best}{'a' if best >= 90 and best == 10 * major + minor else ''}"


def binary(source: Compilable, arch: str) -> Binary:
    """The machine code of a source, prebuilt, from the cache or compiled now."""
    if isinstance(source, Source) and (found := _prebuilt(source, arch)) is not None:
        return found
    name = _name(source, source.made_from(), arch)
    cached = _read(name, kernel_cache.read)
    return interrupt.run_off_main_thread(lambda: _compiled(source, arch, name)) if cached is None else cached[0]


def build(source: Source, arch: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of a prebuilt binary."""
    made = _made(source, arch, _name(source, source.given, arch))
    for suffix, content in _files(made, version()[0]):
        yield f"{arch}/{made.name}{suffix}", content


def _prebuilt(source: Source, arch: str) -> Binary | None:
    """None without a binary, or where the driver may not load that of a newer compiler."""
    name = _name(source, source.given, arch)
    found = _read(name, lambda folder, file: prebuilt.read(folder, f"{arch}/{file}"))
    return found[0] if found is not None and found[1] <= _driver() else None


@cache
def _driver() -> int:
    """The major CUDA version that the driver is of; 0 without a driver."""
    from cuda.bindings import driver

    try:
        status, number = driver.cuDriverGetVersion()
    except RuntimeError:  # the driver's library is missing
        return 0
    return 0 if status else int(number) // 1000


def _name(source: Compilable, given: object, arch: str) -> str:
    return f"{source.name}_{arch}_{hashlib.sha256(repr((given, arch)).encode()).hexdigest()[:20]}"


def _compiled(source: Compilable, arch: str, name: str) -> Binary:
    with kernel_cache.compile_lock(FOLDER, name):
        cached = _read(name, kernel_cache.read)  # another process may have compiled it meanwhile
        if cached is not None:
            return cached[0]
        with progress.compiling(f"{source.name} for {arch}"):
            compiled = _made(source, arch, name)
        for suffix, content in _files(compiled):
            kernel_cache.write(FOLDER, name + suffix, content)
    return compiled


def _made(source: Compilable, arch: str, name: str) -> Binary:
    code, log = source.compile(arch)
    _refuse_serialised(source.name, arch, log)
    return Binary(name, code, resources(log))


def _files(made: Binary, cuda: int = 0) -> tuple[tuple[str, bytes], ...]:
    """Suffix and content of each file; the code last, since a file without it is a miss."""
    report = _Report(_hash(made), dict(made.resources), cuda)
    return (".json", msgspec.json.encode(report)), (".cubin", made.code)


def _read(name: str, read: Callable[[str, str], bytes | None]) -> tuple[Binary, int] | None:
    """A binary, and the CUDA version that a prebuilt one is of; None if the files are missing or damaged."""
    try:
        report = msgspec.json.decode(read(FOLDER, f"{name}.json") or b"", type=_Report)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    found = Binary(name, read(FOLDER, f"{name}.cubin") or b"", report.resources)
    return (found, report.cuda) if report.sha256 == _hash(found) and elf.alike(found.code, elf.CUBIN) else None


def _hash(binary: Binary) -> str:
    """Of the code and the name, so that no other file can take its place."""
    return hashlib.sha256(binary.name.encode() + b"\0" + binary.code).hexdigest()


def _included(source: Source) -> tuple[tuple[str, str], ...]:
    """The headers that the text includes, directly or indirectly."""
    known, found, waiting = dict(source.headers), {}, [source.text]
    while waiting:
        for name in re.findall(r'^\s*#include "([^"]+)"', waiting.pop(), re.MULTILINE):
            if name not in found and name in known:
                found[name] = known[name]
                waiting.append(known[name])
    return tuple(found.items())


def _refuse_serialised(name: str, arch: str, log: str) -> None:
    """SerialisedError if ptxas has serialised wgmma instructions. Its remark C7519, another arrive, costs nothing."""
    if serialised := re.findall(r".*\(C75\d\d\).*serialized.*", log):
        raise SerialisedError(f"{name} for {arch}: {serialised[0].strip()}")


def _compile(source: Source, arch: str, form: str = "CUBIN", more: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """The output of NVRTC (machine code, or another form) and its log. more: options besides `OPTIONS`."""
    from cuda.bindings import nvrtc

    used = _included(source)
    names, texts = [name.encode() for name, _ in used], [text.encode() for _, text in used]
    file = f"{source.name}_variant.cu".encode()  # not the name of a header
    (program,) = _call("nvrtcCreateProgram", source.text.encode(), file, len(used), texts, names)
    options = [f"--gpu-architecture={arch}".encode(), *(option.encode() for option in (*OPTIONS, *more))]
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        log = bytearray(_call("nvrtcGetProgramLogSize", program)[0])
        _call("nvrtcGetProgramLog", program, log)
        text = log.decode(errors="replace").rstrip("\0\n ")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{source.name} does not compile for {arch}:\n{text[:8000]}")
        code = bytearray(_call(f"nvrtcGet{form}Size", program)[0])
        _call(f"nvrtcGet{form}", program, code)
        return bytes(code), text
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _call(function: str, *arguments: Any) -> tuple[Any, ...]:
    """Call a function of NVRTC; CompileError if it fails."""
    from cuda.bindings import nvrtc

    status, *results = getattr(nvrtc, function)(*arguments)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"{function}: {status.name}")
    return tuple(results)


def resources(log: str) -> dict[str, Resources]:
    """The resources of each kernel in the report of `ptxas -v`."""
    by_kernel: dict[str, Resources] = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:

        def number(pattern: str, part: str = part) -> int:
            return sum(map(int, re.findall(pattern, part)))

        by_kernel[part.partition("'")[0]] = Resources(
            number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame"),
            number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes smem"),
        )  # fmt: skip
    return by_kernel
