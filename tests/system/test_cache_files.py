"""Files of the cache of compiled kernels: full disks, damaged files, the limit of their size; kernels in memory."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kernels import COMPILED, PLANTED, Source, content, file_of, forget, leftovers, returning, run

from flashkit.backends import elf
from flashkit.backends.cpu import objects
from flashkit.backends.cuda_common import compiler
from flashkit.backends.numba_cuda import assemble
from flashkit.devices import kernel_cache, profiles, trust
from flashkit.devices.io_model import CpuTile
from flashkit.tools.autotune.log import Log, MeasuredPeaks


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHKIT_CACHE_SIZE", raising=False)
    forget(monkeypatch)


@pytest.fixture
def silent() -> Iterator[None]:
    """Any warning is an error."""
    with warnings.catch_warnings(action="error"):
        yield


def test_compilations_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """And a file that is found again compiles nothing."""
    with caplog.at_level("INFO", "flashkit"):
        for _ in range(2):
            objects._loaded.clear()
            assert run() == COMPILED
    (record,) = caplog.records
    assert record.name == "flashkit" and re.fullmatch(r"compiled kind in \d+\.\d s", record.getMessage())


# --- a full disk ------------------------------------------------------------------------------------------------------


class FullFile:
    """A file on a full disk, which says so when it is written, flushed, or only when it is closed."""

    def __init__(self, file: Any, when: str) -> None:
        self._file, self._when = file, when

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._when == "close":
            full()

    def write(self, content: bytes) -> None:
        self._file.write(content[: len(content) // 2] if self._when == "write" else content)
        if self._when == "write":
            full()

    def flush(self) -> None:
        self._file.flush()
        if self._when == "flush":
            full()

    def fileno(self) -> int:
        return int(self._file.fileno())


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fill(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """From now on the disk is full for this operation."""
    fdopen = os.fdopen
    if when in ("write", "flush", "close"):

        def opened(descriptor: int, mode: str = "r", *rest: Any, **options: Any) -> Any:
            file = fdopen(descriptor, mode, *rest, **options)
            return FullFile(file, when) if "w" in mode else file

        monkeypatch.setattr(os, "fdopen", opened)
    else:
        owner: Any = tempfile if when == "mkstemp" else os
        monkeypatch.setattr(owner, when, full)


@pytest.mark.parametrize("when", ["mkdir", "mkstemp", "write", "close", "replace"])
def test_kernels_are_used_where_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    source = Source()
    with warnings.catch_warnings(record=True, action="always") as caught, monkeypatch.context() as patch:
        fill(patch, when)
        assert run() == run("another") == COMPILED
        made = compiler.binary(source, "sm_80")
        made.mark_checked()
        again = compiler.binary(source, "sm_80")
        assert again == made and again.checked and source.compiled == 1
        objects._loaded.clear()
        assert objects.functions(objects.Source("kind", "text", lambda wanted: pytest.fail("it is in memory")))
    (said,) = (str(warning.message) for warning in caught)
    assert os.strerror(errno.ENOSPC) in said
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("when", ["flush", "fsync", "replace"])
def test_a_durable_file_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Such as a profile: the old content stays, the error is the caller's."""
    file = tmp_path / "file"
    trust.write(file, b"old")
    with monkeypatch.context() as patch:
        fill(patch, when)
        with pytest.raises(OSError, match="No space"):
            trust.write(file, b"new", durable=True)
    assert leftovers(tmp_path) == [file] and file.read_bytes() == b"old"


def test_a_log_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, peaks = Log(tmp_path / "log", CpuTile), [MeasuredPeaks(float(i), 2.0, 3.0, {}) for i in range(4)]
    fdopen = os.fdopen
    log.add(peaks[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", lambda *args: FullFile(fdopen(*args), "write"))
        with pytest.warns(UserWarning, match="cannot be written.*No space"):
            log.add(peaks[1])
        with warnings.catch_warnings(action="error"):
            log.add(peaks[2])
        assert log.peaks == peaks[2]
    log.add(peaks[3])  # there is room again
    with pytest.warns(UserWarning, match="is no entry"):  # the half of a line
        assert Log(log.path, CpuTile).peaks == peaks[3]


PTX = """.version 7.8
.target sm_80
.address_size 64
.visible .entry f(.param .u64 p) { .reg .u64 %r; ld.param.u64 %r, [p]; st.global.u64 [%r], 5; ret; }
"""


@pytest.fixture
def ptxas() -> None:
    try:
        assemble.program()
    except compiler.CompileError:
        pytest.skip("there is no ptxas")


@pytest.mark.usefixtures("ptxas")
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no files in memory")
def test_ptxas_needs_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    before = len(os.listdir("/proc/self/fd"))
    code, said = assemble.machine_code("f", [PTX], "sm_80")
    assert elf.alike(code, elf.CUBIN) and "f" in compiler.resources(said)
    with pytest.raises(compiler.CompileError, match="Parsing error near 'junk'"):
        assemble.machine_code("f", [PTX + "junk"], "sm_80")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("ptxas")
def test_ptxas_without_files_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    in_memory, _ = assemble.machine_code("f", [PTX], "sm_80")
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert assemble.machine_code("f", [PTX], "sm_80")[0] == in_memory
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("error", [NotImplementedError(), OSError(errno.ENOLCK, "no locks"), RuntimeError("deadlock")])
@pytest.mark.usefixtures("silent")
def test_work_goes_on_without_a_lock(monkeypatch: pytest.MonkeyPatch, error: Exception, tmp_path: Path) -> None:
    import filelock

    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", failing)
    monkeypatch.setattr(profiles, "user_dir", lambda: tmp_path)
    if isinstance(error, OSError):
        monkeypatch.setattr(filelock.FileLock, "release", failing)
    assert run() == COMPILED
    assert file_of().exists()
    assert profiles.write_user_profile({"device": {"kind": "cpu", "name": "test"}}).exists()


# --- damaged files ----------------------------------------------------------------------------------------------------


def test_a_file_that_another_process_makes_meanwhile_is_not_made_again(monkeypatch: Any, tmp_path: Path) -> None:
    """A process that waited for the lock reads what the other has made."""
    assert run() == COMPILED
    file, lock = file_of(), kernel_cache.compile_lock
    file.write_bytes(content(file.name, returning(PLANTED)))
    held = file.rename(tmp_path / "held")

    def waited(folder: str, name: str) -> Any:
        held.rename(file)  # as the process that holds the lock does
        return lock(folder, name)

    monkeypatch.setattr(kernel_cache, "compile_lock", waited)
    objects._loaded.clear()
    assert run() == PLANTED


KERNELS = """
extern "C" __global__ void f(float* x) { extern __shared__ float s[]; s[threadIdx.x] = x[0]; x[1] = s[0]; }
__device__ float table[70000];
extern "C" __global__ void g(float* x) { x[0] = table[(int)x[1]]; }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_a_cubin_is_checked(calls_of: Callable[..., Any], arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source = compiler.Source("kernels", KERNELS)
    made = compiler.binary(source, arch)
    assert set(made.resources) == {"f", "g"}
    compiles = calls_of(compiler, "_compile")
    assert compiler.binary(source, arch) == made and not compiles
    for at in (0, len(made.code) // 2, -1):
        damaged = bytearray(made.code)
        damaged[at] ^= 4
        made.path.write_bytes(damaged)
        assert compiler.binary(source, arch) == made and len(compiles) == 1
        compiles.clear()


def test_a_cubin_of_another_name_is_not_loaded() -> None:
    source, other = Source(), Source()
    made, moved = compiler.binary(source, "sm_80"), compiler.binary(other, "sm_90")
    for suffix in (".json", ".cubin"):
        shutil.copy(made.path.with_suffix(suffix), moved.path.with_suffix(suffix))
    assert compiler.binary(other, "sm_90") == moved and other.compiled == 2


# --- the limit on disk ------------------------------------------------------------------------------------------------


def write(name: str, size: int = 100) -> None:
    kernel_cache.write("cpu", name, bytes(size))


def names() -> set[str]:
    return {file.name for file in leftovers(kernel_cache.path())}


def aged(name: str, hours: float) -> None:
    """As if it was used so long ago."""
    at = time.time() - 3600 * hours
    os.utime(kernel_cache.path() / "cpu" / name, (at, at))


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKIT_CACHE_SIZE", "256K")  # 64 blocks
    for i in range(200):
        write(f"k{i}.o")
        assert len(names()) <= 64 + 64 // 16
        assert f"k{i}.o" in names()
    assert len(names()) > 48
    forget(monkeypatch)
    monkeypatch.setenv("FLASHKIT_CACHE_SIZE", "100K")
    write("last.o", 5000)  # the first file of a process
    assert len(names()) == 24 and "last.o" in names()


def test_the_least_recently_used_kernels_are_removed() -> None:
    for i in range(6):
        write(f"k{i}.o")
        aged(f"k{i}.o", 10 - i)
    assert kernel_cache.read("cpu", "k1.o") is not None
    removed = kernel_cache.prune(3 * 4096)
    assert names() == {"k1.o", "k4.o", "k5.o"}
    assert (removed.files, removed.kernels, removed.bytes) == (3, 3, 3 * 4096)


def test_files_of_a_kernel_are_removed_together() -> None:
    for name in ("a.json", "a.cubin", "a.checked", "b.json", "b.cubin"):
        write(name)
        aged(name, 5)
    aged("a.checked", 1)  # a is used last
    kernel_cache.prune(4 * 4096)
    assert names() == {"a.json", "a.cubin", "a.checked"}


def test_temporary_files_of_killed_processes_are_removed() -> None:
    write("k.o")
    folder = kernel_cache.path() / "cpu"
    for name in (".k.o.old.tmp", ".k.o.new.tmp"):
        (folder / name).write_bytes(b"x")
    aged(".k.o.old.tmp", 2)
    with kernel_cache.compile_lock("cpu", "k.o"):
        kernel_cache.prune(1 << 20)
    assert {file.name for file in folder.iterdir() if file.suffix != ".lock"} == {"k.o", ".k.o.new.tmp"}


def test_locks_do_not_grow_in_number() -> None:
    for i in range(500):
        with kernel_cache.compile_lock("cpu", f"k{i}.o"):
            pass
    assert 16 < len(list(kernel_cache.path().rglob("*.lock"))) <= 64


@pytest.mark.usefixtures("silent")
def test_a_file_that_another_process_removes_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == COMPILED
    file, open_ = file_of(), os.open

    def late(path: Any, *rest: Any, **options: Any) -> int:
        if Path(path) == file:
            file.unlink(missing_ok=True)
        return open_(path, *rest, **options)

    objects._loaded.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", late)
        assert run() == COMPILED
    assert file.exists()


@pytest.mark.usefixtures("silent")
def test_files_that_vanish_while_they_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(4):
        write(f"k{i}.o")
    unlink = Path.unlink

    def vanished(self: Path, missing_ok: bool = False) -> None:
        unlink(self)
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "unlink", vanished)
    assert kernel_cache.prune(0) == kernel_cache.Usage(0, 0, 0)
    assert names() == set()


@pytest.mark.usefixtures("silent")
def test_a_folder_that_vanishes_while_a_kernel_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write_ = trust.write

    def late(file: Path, content: bytes, durable: bool = False) -> None:
        monkeypatch.setattr(trust, "write", write_)
        shutil.rmtree(file.parent)  # as `flashkit cache clear` does
        write_(file, content, durable)

    monkeypatch.setattr(trust, "write", late)
    assert run() == COMPILED
    assert file_of().exists()


# --- in memory --------------------------------------------------------------------------------------------------------


def test_files_in_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the directory cannot be used."""
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", "/dev/null")
    monkeypatch.setattr(kernel_cache, "MAX_MEMORY", 1000)
    with pytest.warns(UserWarning, match="cannot be kept"):
        write("k0.o")
    for i in range(1, 20):
        write(f"k{i}.o")
        assert kernel_cache.read("cpu", "k0.o") is not None  # used all the time
    assert [name for _, name in kernel_cache._memory] == [*(f"k{i}.o" for i in range(11, 20)), "k0.o"]
    write("large.o", 2000)
    assert kernel_cache.read("cpu", "large.o") is not None


MODIFICATIONS = """
    import gc, numpy as np, flashkit
    from flashkit import dispatch
    from llvmlite import binding
    dispatch._MAX_PLANS = 4
    x = np.random.default_rng(0).standard_normal((1, 2, 64, 32), np.float32)

    def call(i):
        return flashkit.attention(x, x, x, mask_mod=lambda b, h, q, k: (q - k < 2 * i + 3) & (k <= q), backend="cpu")

    def engines():
        gc.collect()
        return sum(isinstance(x, binding.ExecutionEngine) for x in gc.get_objects())

    def resident():
        gc.collect()
        return int(open("/proc/self/statm").read().split()[1]) * 4
"""


@pytest.mark.slow
def test_modifications_are_unloaded(program: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that a caller's plan or gradient uses are not."""
    text = """
        mask = lambda b, h, q, k: q - k < 5
        planned = flashkit.plan(x, x, x, mask_mod=mask, backend="cpu")
        out, vjp = flashkit.attention_vjp(x, x, x, mask_mod=mask, backend="cpu")
        right, gradients = planned(x, x, x), vjp(x)
        before = engines()
        for i in range(10):
            call(i)
        assert engines() <= before + 2 * 4
        assert (planned(x, x, x) == right).all()
        assert all((a == b).all() for a, b in zip(vjp(x), gradients))
        del planned, vjp
        for i in range(10, 15):
            call(i)
        assert engines() < before + 2 * 4
        for i in range(10):  # loaded again, from the cache
            reference = flashkit.attention(
                x, x, x, mask_mod=lambda b, h, q, k: (q - k < 2 * i + 3) & (k <= q), backend="reference")
            np.testing.assert_allclose(call(i), reference, atol=1e-5)
    """
    monkeypatch.undo()  # in the cache of all tests the kernels are compiled already
    program(textwrap.dedent(MODIFICATIONS) + textwrap.dedent(text))


@pytest.mark.slow
def test_compiling_leaves_little_memory(program: Callable[..., str], tmp_path: Path) -> None:
    """Of the C library's: what Python frees, LLVM must free too."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("this C library does not count what is allocated")
    printed = program(
        """
        import ctypes, gc
        import numpy as np
        from flashkit.backends.cpu import modify, objects
        from flashkit.call.arguments import prepare

        class Counts(ctypes.Structure):
            _fields_ = [(f"count{i}", ctypes.c_size_t) for i in range(10)]

        count = ctypes.CDLL(None).mallinfo2
        count.restype = Counts
        x = np.ones((1, 1, 64, 16), np.float32)

        def allocated(first, last):
            for i in range(first, last):
                spec = prepare(x, x, x, score_mod=lambda s, b, h, q, k: s + i / 7)[0].spec
                objects.functions(modify.forward_source(spec))
            gc.collect()
            return count().count7 + count().count4

        before = allocated(0, 4)
        print((allocated(4, 20) - before) / 16)
        """,
        FLASHKIT_CACHE_DIR=tmp_path,
    )
    assert float(printed) < 9_000


def test_pass_managers_are_freed_only_while_kernels_compile() -> None:
    from llvmlite.binding import newpassmanagers

    from flashkit.backends.cpu import pass_managers

    before = newpassmanagers.ModulePassManager._dispose
    with pass_managers.freed(), pass_managers.freed():
        during = newpassmanagers.ModulePassManager._dispose
    assert newpassmanagers.ModulePassManager._dispose is before
    assert during is newpassmanagers.NewPassManager._dispose
