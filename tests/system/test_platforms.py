"""macOS, Windows and containers: what only Linux has is not needed, and quotas count as processors."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flashkit.backends import elf
from flashkit.devices import host

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="simulates Windows on another system")

ELSEWHERE = """
    import builtins, contextlib, io, os, pathlib, sys, warnings
    system = {system!r}
    import filelock
    filelock.FileLock = filelock.SoftFileLock  # Windows has other native locks
    for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty"):
        sys.modules[name] = None  # importing it is an ImportError
    lacks = ["sched_getaffinity", "sched_setaffinity", "memfd_create", "sysconf"]
    if system == "win32":
        lacks += ["fork", "register_at_fork", "getuid", "geteuid", "getgid", "getloadavg", "O_NOFOLLOW", "O_CLOEXEC",
                  "O_NONBLOCK", "O_NOCTTY", "uname"]
    import numpy, llvmlite.binding, importlib.metadata, platform, subprocess, tempfile, asyncio, ctypes.util
    import numba, msgspec, yaml, platformdirs, typer, rich.progress, sysconfig  # decide when they are imported
    sysconfig.get_config_vars()
    for name in lacks:
        if hasattr(os, name):
            delattr(os, name)
    real = io.open
    def opened(file, *rest, **more):
        if str(file).startswith(("/proc", "/sys")):
            raise FileNotFoundError(file)
        return real(file, *rest, **more)
    builtins.open = io.open = opened
    platform.processor = lambda: ""
    sys.platform = system
    import numpy as np, flashkit
    from flashkit.devices import host
    q = np.random.default_rng(0).standard_normal((1, 4, 100, 16), np.float32)
    out, vjp = flashkit.attention_vjp(q, q, q, causal=True)
    right = flashkit.attention(q, q, q, causal=True, backend="reference")
    print("right" if np.allclose(out, right, atol=1e-5) else "wrong", vjp(out)[0].shape)
    print("backend", flashkit.explain(q, q, q).backend)
    print("vectors", sorted(host.cpu_features() & {{"avx2", "fma", "avx512f", "asimd"}}))
    print("cores", host.cpu_count() >= 1, host.cpu_quota())
    from flashkit.tools import cli
    for command in (["info"], ["doctor", "--json"], ["cache", "path"], ["cache", "prune"], ["config", "show"]):
        with contextlib.redirect_stdout(io.StringIO()):
            status = cli.run(command)
        print(*command, status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
@pytest.mark.one_in(2)
def test_without_what_only_linux_has(system: str, program: Callable[..., str], tmp_path: Path) -> None:
    printed = program(ELSEWHERE.format(system=system).replace("{{", "{").replace("}}", "}")).splitlines()
    here = sorted(host.cpu_features() & {"avx2", "fma", "avx512f", "asimd"})
    assert printed == [
        "right (1, 4, 100, 16)", "backend cpu", f"vectors {here}", "cores True None", "info 0", "doctor --json 0",
        "cache path 0", "cache prune 0", "config show 0",
    ]  # fmt: skip


def test_features_as_llvm_finds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where there is no /proc/cpuinfo. The names are those of Linux, which profiles use."""
    known = {name for name in host._all_features() if name.startswith(("avx", "fma", "amx_", "sse4", "asimd"))}
    found = host._llvm_features()
    assert known <= found | {"avx_vnni"} and ("asimd" in found) == ("asimd" in known)
    assert host.lanes_of(found) == host.lanes_of(host._all_features())
    monkeypatch.setattr(host, "CPUINFO", tmp_path / "none")
    host._cpuinfo.cache_clear(), host._all_features.cache_clear()
    try:
        assert host.lanes_of(host.cpu_features()) == host.lanes_of(found)
        monkeypatch.setitem(sys.modules, "llvmlite", None)
        host._all_features.cache_clear()
        assert "avx2" not in host.cpu_features()
    finally:
        host._cpuinfo.cache_clear(), host._all_features.cache_clear()


QUOTAS: dict[str, tuple[str, dict[str, str], float | None]] = {
    "v2": ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
    "v2, of a group above": ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0),
    "v2, the least": ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "400000 100000"}, 1.0),
    "v2, in a container": ("0::/", {"cpu.max": "50000 100000"}, 0.5),
    "v2, of another path": ("0::/docker/123", {"cpu.max": "200000 100000"}, 2.0),
    "v2, none": ("0::/a", {"a/cpu.max": "max 100000"}, None),
    "v1": (
        "4:cpu,cpuacct:/x\n1:memory:/y",
        {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
        2.5,
    ),
    "v1, under another name": (
        "4:cpu,cpuacct:/x", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2.0,
    ),
    "v1, none": ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    "cpuset is another": ("4:cpuset:/", {"cpuset/cpu.cfs_quota_us": "1", "cpuset/cpu.cfs_period_us": "1"}, None),
    "nonsense": ("0::/a\n::\n\nx", {"a/cpu.max": "many few", "cpu.max": "1 0"}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", QUOTAS)
def test_quotas_of_control_groups(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, files, expected = QUOTAS[case]
    (tmp_path / "own").write_text(text)
    for name, content in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    monkeypatch.setattr(host, "CGROUP", tmp_path / "own")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "fs")
    host.cpu_quota.cache_clear()
    try:
        assert host.cpu_quota() == expected
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
        assert host.cpu_count() == (64 if expected is None else max(1, -int(-expected // 1)))
    finally:
        host.cpu_quota.cache_clear()


@pytest.mark.parametrize(("variable", "count"), [({}, "1"), ({"NUMBA_NUM_THREADS": "3"}, "3")])
def test_a_quota_limits_the_threads_of_calls(variable: dict[str, str], count: str, program: Callable[..., str]) -> None:
    """Also where Numba, which knows no quotas, has started the threads; NUMBA_NUM_THREADS says otherwise."""
    text = """
        import os
        from flashkit.devices import host
        host.cpu_quota = lambda: 0.7
        import numba
        from flashkit.backends.cpu import threads
        print(threads.count())
    """
    assert program(text, **variable) == f"{count}\n"


@pytest.mark.parametrize("triple", ["x86_64-apple-darwin", "arm64-apple-darwin", "x86_64-pc-windows-msvc"])
def test_objects_of_other_systems_are_read_again(triple: str) -> None:
    """Mach-O and COFF."""
    from llvmlite import binding

    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine()
    code, model = (
        bytes(machine.emit_object(binding.parse_assembly(f'target triple = "{triple}"\n{text}')))
        for text in ("define i64 @answer() { ret i64 42 }", "")
    )
    assert not code.startswith(b"\x7fELF")
    assert elf.alike(code, model) and elf.undefined(code) == set()
    assert not elf.alike(b"\x7fELF" + code[4:], model)
