"""Prebuilt kernels: found by their names, checked like cached ones, and the same code that a process would compile."""

import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import COMPILED, PLANTED, content, returning, run, source
from llvmlite import binding

import flashkit
from flashkit import BlockMask, errors, mods, settings
from flashkit.backends.cpu import modify, objects, plan, specialise, target
from flashkit.backends.cpu.micro import compile as micro
from flashkit.backends.cpu.micro.register_block import RegisterBlock
from flashkit.backends.cpu.target import Target
from flashkit.backends.cuda_common import compiler
from flashkit.call.arguments import prepare
from flashkit.devices import kernel_cache, prebuilt, profiles, trust
from flashkit.tools import cli, doctor, prebuild
from flashkit.tools.doctor import probes


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of prebuilt kernels of a package that has none yet; the cache is empty."""
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(settings.PREBUILT.name, "1")
    monkeypatch.setattr(prebuilt, "PACKAGE", tmp_path / "package")
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(objects, "_loaded", {})
    prebuilt.path().mkdir(parents=True)
    return prebuilt.path()


def write(folder: Path, name: str, code: bytes) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(code)
    return file


@pytest.fixture
def planted(package: Path) -> Path:
    """The file of a prebuilt kernel, another one than is compiled."""
    name, code = objects.build(source(PLANTED), target.target())
    return write(package / "cpu", name, code)


def test_the_prebuilt_object_runs(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run() == PLANTED
    assert not kernel_cache.path().exists()
    objects._loaded.clear()
    monkeypatch.setenv(settings.PREBUILT.name, "0")
    assert run() == COMPILED
    objects._loaded.clear()
    monkeypatch.setenv(settings.PREBUILT.name, "1")
    assert run() == PLANTED, "also where the cache has another one"
    monkeypatch.setenv(settings.PREBUILT.name, "x")
    with pytest.raises(ValueError, match="FLASHKIT_PREBUILT: expected 1 or 0, got 'x'"):
        prebuilt.enabled()


def test_a_damaged_prebuilt_object_is_compiled_afresh(planted: Path) -> None:
    """By the check that objects of the cache pass; test_cache_trust.py has what it finds."""
    planted.write_bytes(content("cpu/other.o", returning(PLANTED)))
    assert run() == COMPILED


def test_a_prebuilt_object_calls_nothing_that_is_missing(package: Path) -> None:
    """LLVM would end the process."""
    text = "declare i32 @nobody_has_this() define i32 @f() { %x = call i32 @nobody_has_this() ret i32 %x }"

    def make(wanted: Target) -> objects.Object:
        code = target.machine(wanted).emit_object(binding.parse_assembly(text))
        return objects.Object(code, ("f",), ("nobody_has_this",))

    name, code = objects.build(source(PLANTED)._replace(make=make), target.target())
    write(package / "cpu", name, code)
    assert run() == COMPILED


# --- which files are trusted ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owners")
@pytest.mark.parametrize("who", ["file", "folder"])
@pytest.mark.parametrize("others", [stat.S_IWGRP, stat.S_IWOTH])
def test_what_more_users_can_write_than_the_package_is_not_loaded(planted: Path, who: str, others: int) -> None:
    changed = planted if who == "file" else planted.parent
    os.chmod(changed, changed.stat().st_mode | others)
    with pytest.warns(UserWarning, match="can be written by users that cannot write"):
        assert run() == COMPILED
    objects._loaded.clear()
    os.chmod(prebuilt.PACKAGE, prebuilt.PACKAGE.stat().st_mode | others)
    assert run() == PLANTED, "who can write it can write the modules beside it"
    os.chmod(prebuilt.PACKAGE, prebuilt.PACKAGE.stat().st_mode | stat.S_ISVTX)
    with pytest.raises(trust.UntrustedError):
        trust.read_installed(prebuilt.PACKAGE, *planted.relative_to(prebuilt.PACKAGE).parts)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("user", "group", "trusted"), [(12345, 0, False), (0, 0, True), (0, 12345, False)])
def test_files_of_other_users_and_groups(planted: Path, user: int, group: int, trusted: bool) -> None:
    os.chmod(prebuilt.PACKAGE, 0o775)
    planted.chmod(0o664)
    os.chown(planted, user, group)
    if trusted:
        assert run() == PLANTED
    else:
        with pytest.warns(UserWarning, match="prebuilt kernels are compiled again"):
            assert run() == COMPILED


def test_hard_links_of_installers_are_followed_and_symbolic_links_are_not(planted: Path, tmp_path: Path) -> None:
    os.link(planted, tmp_path / "another name of it")
    assert run() == PLANTED
    objects._loaded.clear()
    planted.unlink()
    planted.symlink_to(tmp_path / "another name of it")
    assert run() == COMPILED


# --- targets ----------------------------------------------------------------------------------------------------------

WITH_AVX512 = sorted(target._V4)


@pytest.mark.parametrize(
    ("features", "lanes", "expected"),
    [
        (WITH_AVX512, 16, "x86-64-v4"), (WITH_AVX512, 8, "x86-64-v3"), (WITH_AVX512, 4, "x86-64-v3"),
        (sorted(target._V3), 8, "x86-64-v3"), (["sse2"], 4, "host"),
        (sorted(target._V4 - {"avx512cd"}), 16, "host"),
    ],
)  # fmt: skip
def test_the_best_class_that_the_cpu_fulfils(features: list[str], lanes: int, expected: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(target, "initialised", lambda: "x86_64-unknown-linux-gnu")
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: binding.FeatureMap(dict.fromkeys(features, True)))
    found = target._target.__wrapped__("", lanes)
    assert found.name == expected
    assert (found.cpu == binding.get_host_cpu_name()) == (expected == "host")
    extended = target._target.__wrapped__("amx", lanes)
    assert ("+amx-bf16" in extended.features.split(",")) == (expected != "host") == extended.name.endswith("-amx")
    monkeypatch.setattr(target, "initialised", lambda: "aarch64-unknown-linux-gnu")
    assert target._target.__wrapped__("", 4).name == "host"
    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: binding.FeatureMap({"neon": True, "fp-armv8": True}))
    assert target._target.__wrapped__("", 4).name == "aarch64"


def test_objects_do_not_depend_on_what_was_compiled_before() -> None:
    text = """from numba import njit, types
from flashkit.backends.cpu.functions import entry, exp, options, tanh

@njit(**options)
def large(x):
    return exp(tanh(exp(tanh(exp(tanh(exp(x)))))))

@entry(types.float64(types.int64))
def eight(x):
    y, z = types.float32(x), types.float32(x + 1)
    return exp(types.float64(x)) + large(y) * large(z) * large(y * z)
"""
    wanted = target.target()
    first = specialise.compiled("own", text, wanted)
    specialise.compiled("another", text.replace("eight", "nine"), wanted)
    assert specialise.compiled("own", text, wanted) == first
    assert {"exp"} <= set(first.calls) <= {"exp", "Py_FatalError"}
    assert b"\0part" in first.code and b"large" not in first.code, "a function that is not inlined has a name"


CODE = {"x86-64-v4": (62, "vfmadd.*zmm"), "x86-64-v3": (62, "vfmadd.*ymm"), "aarch64": (183, r"fmla\s+v\d+\.4s")}
"""ELF's number of the architecture, and what a product is made of."""


@pytest.mark.parametrize("name", CODE)
def test_a_machine_builds_for_cpus_of_other_architectures(name: str) -> None:
    (one,), wanted = (one for one in target.CLASSES if one.name == name), target.of_class(name)
    number, product = CODE[name]
    text = """
from numba import types
from flashkit.backends.cpu.functions import entry, exp

@entry(types.float64(types.int64))
def f(x):
    return exp(types.float64(x)) + exp(types.float32(x))
"""
    block = RegisterBlock("float", rows=2, vectors=2, lanes=one.lanes)
    for each, calls in ((specialise.source("own", text), {"exp", "Py_FatalError"}), (micro.source(block), set())):
        made = each.make(wanted)
        if made.code.startswith(b"\x7fELF"):
            assert int.from_bytes(made.code[18:20], "little") == number
        assert set(made.calls) <= calls
        assert objects.build(each._replace(make=lambda _, made=made: made), wanted)[0].startswith(f"{name}/")
    module, machine = micro.assemble(block, wanted)
    assert re.search(product, machine.emit_assembly(module))
    assert wanted.triple.split("-")[1:] == target.target().triple.split("-")[1:], "of this system"


# --- a call -----------------------------------------------------------------------------------------------------------

CALL = """
    import importlib.abc, importlib.machinery, sys
    from pathlib import Path

    class Broken(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        "Numba can be found, and not imported."

        def find_spec(self, name, path, target=None):
            if name != "numba":
                return None
            found = importlib.machinery.PathFinder.find_spec(name, path)
            found.loader = self
            return found

        def create_module(self, spec):
            raise ImportError("Numba is not needed")

        exec_module = None

    if {broken}:
        sys.meta_path.insert(0, Broken())
    import numpy as np
    import flashkit
    from flashkit.devices import kernel_cache, prebuilt

    prebuilt.PACKAGE = Path({package!r})
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 3, 70, 64)).astype(np.float32) for _ in range(3))
    out, vjp = flashkit.attention_vjp(q, k, v, causal=True)
    results = [out, flashkit.attention(q, k, v), *vjp(out)]
    print(*(x.tobytes().hex() for x in results))
    print("numba" in sys.modules, kernel_cache.usage().files)
"""


def of_calls() -> Iterator[objects.Source]:
    """What the calls above load."""
    x = np.zeros((1, 3, 70, 64), np.float32)
    yield specialise.launcher_source()
    for name in ("forward", "backward"):
        yield specialise.kernel_source(name, "float32")
    for options in ({}, {"causal": True}):
        made = plan.make_plan(prepare(x, x, x, **options)[0], profiles.for_device("cpu"))
        for tile in (made.tile, made.backward_tile):
            yield micro.source(made.register_block(tile, ""))
        if options:
            spec = made.problem.spec
            yield from (modify.forward_source(spec), modify.backward_source(spec), modify.classify_source(spec))


@pytest.mark.slow
def test_the_first_call_needs_neither_numba_nor_the_cache(program: Callable[..., str], tmp_path: Path) -> None:
    """And its results have the bits that they have with objects compiled here."""
    for each in of_calls():
        wanted = target.target(each.instructions)
        objects.functions(each)
        line, _, code = (kernel_cache.read("cpu", objects._names(each, wanted).cached) or b"").partition(b"\n")
        found = json.loads(line)
        compiled = objects.Object(code, tuple(found["functions"]), tuple(found["calls"]))  # what `make` makes again
        name, code = objects.build(each._replace(make=lambda wanted, compiled=compiled: compiled), wanted)
        write(tmp_path / "package/prebuilt/cpu", name, code)

    def call(broken: bool, **settings: object) -> tuple[str, list[str]]:
        text = CALL.format(broken=broken, package=str(tmp_path / "package"))
        results, state = program(text, **settings).splitlines()
        return results, state.split()

    prebuilt_, state = call(True, FLASHKIT_CACHE_DIR=tmp_path / "cache", FLASHKIT_PREBUILT=1)
    assert state == ["False", "0"]
    assert prebuilt_ == call(False, FLASHKIT_PREBUILT=0)[0]


def test_the_sources_of_a_wheel_have_the_objects_of_calls() -> None:
    """For the tiles of the shipped profiles, whatever CPU this is."""
    x, mask, keys = np.zeros((2, 4, 300, 64), np.float32), np.ones((300, 300), bool), np.ones((2, 1, 1, 300), bool)
    bias = np.ones((4, 300, 300), np.float32)
    usual: list[dict[str, Any]] = [
        {}, {"causal": True}, {"softcap": 5.0}, {"window": (3, 4)}, {"mask": mask}, {"mask": keys, "causal": True},
        {"softcap": 50.0, "causal": True, "window": (100, 0)}, {"bias": bias, "causal": True},
        {"bias": bias, "mask": keys}, {"alibi_slopes": np.ones(4), "causal": True}, {"mask_mod": mods.prefix_lm(7)},
        {"block_mask": BlockMask.from_mod(mods.sliding_window(50), 300, 300)},
    ]  # fmt: skip
    for one in target.CLASSES:
        name, lanes = one.name, one.lanes
        listed = {(each.kind, each.text) for each in prebuild.cpu_sources(name)}
        assert len(listed) > 100
        names = {16: ["cpu_avx512", "cpu_amx"], 8: ["cpu_avx2"], 4: ["cpu_neon"]}[lanes]
        for profile in map(profiles.by_name, names):
            for options in usual:
                made = plan.make_plan(prepare(x, x, x, **options)[0], profile)
                spec, wanted = made.problem.spec, []
                if options:
                    wanted += [modify.forward_source(spec), modify.decode_source(spec), modify.backward_source(spec)]
                wanted += [modify.classify_source(spec)] if spec.mask is not None else []
                wanted += [micro.source(made.register_block(tile, "")) for tile in (made.tile, made.backward_tile)]
                assert {(each.kind, each.text) for each in wanted} <= listed, (name, options)


# --- binaries of GPUs -------------------------------------------------------------------------------------------------

TINY = compiler.Source("tiny", 'extern "C" __global__ void f(float* x) { x[0] = 1; }')


@pytest.fixture
def cubin(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prebuilt binary; the driver is of this CUDA version."""
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(compiler, "_driver", lambda: compiler.version()[0])
    files = [write(package / "cuda", name, code) for name, code in compiler.build(TINY, "sm_80")]
    assert [file.suffix for file in files] == [".json", ".cubin"]
    return files[1]


def compiled(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether NVRTC is asked."""
    asked, compile_ = [], compiler._compile
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "_compile", lambda *args: asked.append(1) or compile_(*args))
        found = compiler.binary(TINY, "sm_80")
    assert set(found.resources) == {"f"} and not found.checked
    return bool(asked)


def test_the_prebuilt_binary_runs_whatever_compiler_is_installed(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not compiled(monkeypatch)
    version = compiler.version()
    monkeypatch.setattr(compiler, "version", lambda: (version[0], 99))
    assert not compiled(monkeypatch)
    assert compiler.binary(TINY, "sm_80").code == cubin.read_bytes()
    assert not kernel_cache.path().exists()


def test_a_driver_of_an_older_cuda_compiles(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_driver", lambda: compiler.version()[0] - 1)
    assert compiled(monkeypatch)


@pytest.mark.parametrize("suffix", [".cubin", ".json"])
@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: x[:30] + bytes([x[30] ^ 1]) + x[31:], None])
def test_a_damaged_binary_is_compiled_afresh(
    cubin: Path, suffix: str, damage: Callable[[bytes], bytes] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = cubin.with_suffix(suffix)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    assert compiled(monkeypatch)


def test_a_binary_of_another_architecture_is_not_loaded(cubin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, _ = next(compiler.build(TINY, "sm_90"))
    shutil.copytree(cubin.parent, cubin.parents[1] / "sm_90")
    for suffix in (".json", ".cubin"):
        moved = (cubin.parents[1] / other).with_suffix(suffix)
        cubin.with_suffix(suffix).rename(moved)
    assert compiler.binary(TINY, "sm_90").code != moved.read_bytes()


def test_the_binaries_of_a_wheel_are_those_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    names = {arch: {each.name for each in prebuild.gpu_sources(arch)} for arch in ("sm_80", "sm_90a")}
    assert names["sm_80"] == {"sm80_forward", "sm80_backward", "common_bwd_preprocess"}
    assert {"sm90_forward", "sm90_backward"} <= names["sm_90a"]
    assert "cupy" not in sys.modules or "FLASHKIT_TEST_EMULATED" in os.environ


# --- the command ------------------------------------------------------------------------------------------------------


def test_prebuild_refuses_what_it_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="got '486'"):
        prebuild.prebuild(tmp_path / "new", cpu=["486"])
    with pytest.raises(ValueError, match=r"expected sm_80.*got 'sm_20'"):
        prebuild.prebuild(tmp_path / "new", gpu=["sm_20"])
    (tmp_path / "precious").touch()
    with pytest.raises(ValueError, match="expected a new or empty one"):
        prebuild.prebuild(tmp_path, cpu=[], gpu=[])
    assert (tmp_path / "precious").exists()
    monkeypatch.setattr(compiler, "version", lambda: (12, 9))
    with pytest.raises(compiler.CompileError, match=r"NVRTC 13.0, here is 12.9: nvidia-cuda-nvrtc==13.0\.\*"):
        prebuild.prebuild(tmp_path / "new", cpu=[], gpu=["sm_80"])


def test_the_command_says_what_is_prebuilt(package: Path, monkeypatch: Any, capsys: Any) -> None:
    def said() -> str:
        assert cli.run(["cache"]) == 0
        return capsys.readouterr().out

    assert "prebuilt  none" in said()
    here, mine = target.target(), source(PLANTED)
    monkeypatch.setattr(specialise, "launcher_source", lambda: mine)
    monkeypatch.setattr(prebuild, "cpu_sources", lambda name: [mine])
    assert cli.run(["cache", "prebuild", "--gpu", "none"]) == 0
    written = capsys.readouterr().out
    assert all(f"cpu/{one.name}/kind_" in written for one in target.CLASSES)
    assert run() == (PLANTED if here.name != "host" else COMPILED)
    found = said()
    assert all(f"prebuilt  cpu/{one.name}: 1 kernels, " in found for one in target.CLASSES)
    assert f"this CPU  {here.name}" in found
    assert "not used" not in found
    monkeypatch.setattr(specialise, "launcher_source", lambda: mine._replace(text="changed"))
    assert here.name == "host" or "not used: the sources of the kernels have changed since" in said()
    monkeypatch.setenv(settings.PREBUILT.name, "0")
    assert "not used: FLASHKIT_PREBUILT is 0" in said()
    assert cli.run(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prebuilt"]["contents"]["cpu/x86-64-v3"]["kernels"] == 1
    assert cli.run(["cache", "prebuild", "--cpu", "486"]) == 2
    monkeypatch.setenv(settings.PREBUILT.name, "x")
    assert cli.run(["cache"]) == 1


def test_doctor_counts_them(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And times a first call where the cache is empty: there is a kernel to load."""
    mine = source(PLANTED)
    monkeypatch.setattr(specialise, "launcher_source", lambda: mine)
    monkeypatch.setattr(probes, "_first_call", lambda: "timed")

    def said() -> list[str]:
        rows = [line.split() for line in doctor.render(doctor.report("cache")).splitlines()]
        return [" ".join(row) for row in rows if row[:1] == ["prebuilt"] or row[:2] == ["first", "call"]]

    assert said() == ["prebuilt none", "first call nothing is compiled yet"]
    name, code = objects.build(mine, target.target())
    write(package / "cpu", name, code)
    assert said() == ["prebuilt 1 kernels for this CPU", "first call timed"]
    monkeypatch.setenv(settings.PREBUILT.name, "0")
    assert said() == ["prebuilt none", "first call nothing is compiled yet"]
    monkeypatch.setenv(settings.PREBUILT.name, "x")
    assert said()[0] == "prebuilt none"


@pytest.mark.skipif(not (Path(flashkit.__file__).parents[1] / "pyproject.toml").exists(), reason="no source checkout")
def test_a_wheel_carries_them_and_an_sdist_does_not(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    checkout = Path(flashkit.__file__).parents[1]
    for name in ("pyproject.toml", ".gitignore", "README.md", "LICENSE", "flashkit/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(checkout / name, tmp_path / name)
    write(tmp_path, "flashkit/prebuilt/cpu/x86-64-v3/kernel.o", b"code")
    held = {
        builder.PLUGIN_NAME: {file.distribution_path for file in builder(str(tmp_path)).recurse_included_files()}
        for builder in (WheelBuilder, SdistBuilder)
    }
    assert any(path.endswith("flashkit/prebuilt/cpu/x86-64-v3/kernel.o") for path in held["wheel"])
    assert not any("prebuilt" in path for path in held["sdist"])
    assert all(any(path.endswith("flashkit/__init__.py") for path in paths) for paths in held.values())
