"""Native code and settings that another user could have planted are neither loaded nor read."""

import json
import os
import shutil
import signal
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kernels import COMPILED, PLANTED, Source, beside, content, forget, returning, run

from flashkit.backends.cpu import objects
from flashkit.backends.cuda_common import compiler
from flashkit.devices import kernel_cache, profiles, trust
from flashkit.devices.io_model import CpuTile
from flashkit.tools import cli, doctor
from flashkit.tools.autotune.log import Log, MeasuredPeaks

if not hasattr(os, "geteuid"):
    pytest.skip("there are no owners here", allow_module_level=True)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")

USER_DIR = profiles.user_dir


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing loaded, read or told yet; no cache but below tmp_path; what hangs is an error."""
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FLASHKIT_PROFILE_DIR", raising=False)
    monkeypatch.setattr(profiles, "user_dir", lambda: tmp_path / "user")
    forget(monkeypatch)
    profiles.forget()
    before = os.umask(0o022)
    handler = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    os.umask(before)
    profiles.forget()


# --- a kernel that returns a number -----------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a kernel in the cache, another one than is compiled."""
    run()
    (file,) = kernel_cache.path().rglob("kind_*.o")
    file.write_bytes(content(file.name, returning(PLANTED)))
    forget(monkeypatch)
    return file


def test_a_kernel_of_this_user_is_loaded(kernel: Path) -> None:
    """Or the tests below would say nothing."""
    with warnings.catch_warnings(action="error"):
        assert run() == PLANTED


def test_what_is_made_is_for_this_user_alone(tmp_path: Path) -> None:
    os.umask(0)
    run()
    made = list((tmp_path / "cache").rglob("*"))
    assert len(made) >= 3
    for entry in (tmp_path / "cache", *made):
        assert stat.S_IMODE(entry.stat().st_mode) & 0o077 == 0, entry


# --- ways to plant ----------------------------------------------------------------------------------------------------

Plant = Callable[[Path], Path]
"""Given a trusted file three folders below tmp_path, lets another user have written it; returns the component."""


def mode(level: int, bits: int) -> Plant:
    """The file (0), its folder (1) or one above has these modes."""

    def plant(file: Path) -> Path:
        guilty = (file, *file.parents)[level]
        guilty.chmod(bits)
        return guilty

    return plant


def owner(level: int) -> Plant:
    def plant(file: Path) -> Path:
        guilty = (file, *file.parents)[level]
        os.chown(guilty, NOBODY, NOBODY)
        return guilty

    return plant


def link(level: int, foreign: bool, bits: int = 0o755) -> Plant:
    """A symbolic link in its place, another user's, or to where others can write."""

    def plant(file: Path) -> Path:
        guilty = (file, *file.parents)[level]
        aside = guilty.with_name("aside")
        guilty.rename(aside)
        guilty.symlink_to(aside)
        aside.chmod(bits)
        if foreign:
            os.chown(guilty, NOBODY, NOBODY, follow_symlinks=False)
        return guilty if foreign else aside

    return plant


def hard_link(file: Path) -> Path:
    os.link(file, file.with_name("another"))
    return file


def fifo(file: Path) -> Path:
    file.unlink()
    os.mkfifo(file, 0o600)
    return file


def in_sticky(file: Path) -> Path:
    """Another user's folder in a folder that all may write, as /tmp/flashkit-kernels would be."""
    file.parents[1].chmod(0o1777)
    os.chown(file.parents[0], NOBODY, NOBODY)
    return file.parents[0]


WAYS = [
    pytest.param(mode(0, 0o620), id="the group can write the file"),
    pytest.param(mode(0, 0o602), id="others can write the file"),
    pytest.param(mode(1, 0o770), id="the group can write the folder"),
    pytest.param(mode(1, 0o707), id="others can write the folder"),
    pytest.param(mode(2, 0o777), id="others can write a folder above"),
    pytest.param(mode(3, 0o777), id="others can write a folder two above"),
    pytest.param(link(0, False, 0o622), id="a link to a file that others can write"),
    pytest.param(link(1, False, 0o777), id="a link to a folder that others can write"),
    pytest.param(hard_link, id="a hard link"),
    pytest.param(fifo, id="a FIFO"),
    pytest.param(owner(0), id="another user's file", marks=as_root),
    pytest.param(owner(1), id="another user's folder", marks=as_root),
    pytest.param(owner(2), id="another user's folder above", marks=as_root),
    pytest.param(link(0, True), id="another user's link as the file", marks=as_root),
    pytest.param(link(1, True), id="another user's link as the folder", marks=as_root),
    pytest.param(link(2, True), id="another user's link above", marks=as_root),
    pytest.param(in_sticky, id="another user's folder in a sticky one", marks=as_root),
]


@contextmanager
def one_warning(guilty: Path, kind: type[Warning] = UserWarning) -> Iterator[None]:
    """That names the component, and what to do."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        yield
    (said,) = (str(warning.message) for warning in caught if issubclass(warning.category, kind))
    assert f"{guilty} " in said, said
    assert told(said)


def told(said: str) -> bool:
    """What to do, or what alone it can be."""
    return any(x in said for x in ("chmod go-w", "remove it", "path of your own", "not a regular file"))


@pytest.mark.parametrize("plant", WAYS)
def test_a_planted_kernel_is_not_loaded(kernel: Path, monkeypatch: pytest.MonkeyPatch, plant: Plant) -> None:
    guilty = plant(kernel)
    with one_warning(guilty):
        assert run() == COMPILED
        monkeypatch.setattr(objects, "_loaded", {})
        assert run() == COMPILED
        assert run("another kind") == COMPILED


@pytest.mark.parametrize("plant", [link(level, False) for level in range(3)] + [mode(2, 0o1777), mode(3, 0o1777)])
def test_links_of_this_user_and_sticky_folders_are_fine(kernel: Path, plant: Plant) -> None:
    plant(kernel)
    with warnings.catch_warnings(action="error"):
        assert run() == PLANTED


def test_as_many_links_are_followed_as_the_system_follows(tmp_path: Path) -> None:
    """And no more: links may lead in circles."""
    for i in range(41):
        (tmp_path / f"{i + 1}").symlink_to(tmp_path / f"{i}" if i else tmp_path)
    assert trust.resolve(tmp_path / "40") == trust.resolve(tmp_path)
    with pytest.raises(trust.UntrustedError, match="leads nowhere"):
        trust.resolve(tmp_path / "41")


def test_a_kernel_that_cannot_be_trusted_is_replaced(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel.chmod(0o666)
    with pytest.warns(UserWarning, match="cannot be kept"):
        run()
    forget(monkeypatch)
    with warnings.catch_warnings(action="error"):
        assert run() == COMPILED
    assert stat.S_IMODE(kernel.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("when", "says"),
    [("before", "can be written by"), ("after", ""), pytest.param("by a link", "belongs to user", marks=as_root)],
)
def test_a_file_that_is_swapped_meanwhile(kernel: Path, monkeypatch: pytest.MonkeyPatch, when: str, says: str) -> None:
    """It is opened once, not through a link, and what was opened is what is checked and loaded."""
    evil = kernel.with_name("evil")
    evil.write_bytes(content(kernel.name, returning(13)))
    evil.chmod(0o666 if when != "by a link" else 0o600)
    opened, open_ = [], os.open

    def swapping(path: Any, *rest: Any, **options: Any) -> int:
        if Path(path) != kernel:
            return open_(path, *rest, **options)
        opened.append(path)
        if len(opened) > 1:
            return open_(path, *rest, **options)
        if when == "after":
            descriptor = open_(path, *rest, **options)
        if when == "by a link":
            kernel.unlink()
            kernel.symlink_to(evil)
            os.chown(kernel, NOBODY, NOBODY, follow_symlinks=False)
        else:
            os.replace(evil, kernel)
        return descriptor if when == "after" else open_(path, *rest, **options)

    monkeypatch.setattr(os, "open", swapping)
    if when == "after":
        with warnings.catch_warnings(action="error"):
            assert run() == PLANTED
    else:
        with pytest.warns(UserWarning, match=says):
            assert run() == COMPILED
    assert len(opened) == 1 or when == "by a link"


# --- CUDA's binaries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", WAYS)
@pytest.mark.parametrize("suffix", [".cubin", ".json", ".checked"])
def test_a_planted_cuda_binary_is_not_used(monkeypatch: pytest.MonkeyPatch, plant: Plant, suffix: str) -> None:
    source = Source()
    made = compiler.binary(source, "sm_80")
    made.mark_checked()
    forget(monkeypatch)
    again = compiler.binary(source, "sm_80")
    assert again == made and again.checked and source.compiled == 1
    guilty = plant(made.path.with_suffix(suffix))
    with one_warning(guilty):
        again = compiler.binary(source, "sm_80")
        if suffix == ".checked":
            assert not again.checked
            again.mark_checked()
            assert again.checked
        else:
            assert source.compiled == 2


def test_a_mark_is_of_the_code_that_was_checked() -> None:
    source = Source()
    made = compiler.binary(source, "sm_80")
    made.mark_checked()
    assert not compiler.Binary(made.name, made.code + b"\0", {}).checked


@pytest.mark.parametrize("code", [b"", b"junk" * 50, b"\x7fELF" + bytes(80), Source().compile("")[0][:50]])
def test_a_cuda_binary_that_is_none_is_compiled_again(monkeypatch: pytest.MonkeyPatch, code: bytes) -> None:
    source = Source()
    made = compiler.binary(source, "sm_80")
    made.path.write_bytes(code)
    report = {"sha256": compiler._hash(compiler.Binary(made.name, code, {})), "resources": {}}
    made.path.with_suffix(".json").write_text(json.dumps(report))
    assert compiler.binary(source, "sm_80") == made and source.compiled == 2


# --- files of this user that are no kernels ---------------------------------------------------------------------------


def test_junk_is_compiled_again_and_does_not_crash(program: Callable[..., str], tmp_path: Path) -> None:
    """LLVM's loader crashes on most of it."""
    text = """
        import struct
        from test_cache_trust import *

        def file(code, **changed):
            return content(path.name, objects.Object(code, ("f",)), **changed)

        def flipped(stored, at):
            place = int(at * (len(stored) - 1))
            return stored[:place] + bytes([stored[place] ^ 4]) + stored[place + 1 :]

        run()
        (path,) = kernel_cache.path().rglob("kind_*.o")
        whole = returning(PLANTED).code
        machine = whole[:18] + struct.pack("<H", 243 if whole[18:20] != b"\\xf3\\0" else 62) + whole[20:]
        other = returning(PLANTED, "g").code
        for junk in (
            b"", b"\\n", b"[]\\n" + whole, b"{}\\n" + whole, b"[" * 100_000 + b"\\n", b"\\xff\\n" + whole, b"\\0" * 300,
            file(b""), file(b"junk" * 50), file(whole[:40]), file(whole[:64] + b"x" * 600), file(whole[:200]),
            file(machine), file(b"\\x7fELF" + bytes(100)), file(other), file(whole, functions="f"),
            file(whole, functions=3), file(whole, functions=["f\\0"]), file(whole, functions=[]),
            file(whole, functions=[None]), file(whole, functions=["\\ud800"]), file(whole, sha256=None),
            file(whole, calls="yes"), file(whole, calls=["nobody_has_this"]),
            content(path.name.replace("kind", "another"), returning(PLANTED)), file(whole)[:-100],
            *(flipped(file(whole), at) for at in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)),
        ):
            path.write_bytes(junk)
            objects._loaded.clear()
            assert run() == COMPILED, junk[:200]
        path.write_bytes(file(whole))
        objects._loaded.clear()
        print(run())
    """
    assert program(beside(text), FLASHKIT_CACHE_DIR=tmp_path).split() == [str(PLANTED)]


# --- where nothing can be kept ----------------------------------------------------------------------------------------

CALL = """
    from test_cache_trust import *
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert run("one") == run("two") == compiler.binary(Source(), "sm_80").checked + 1
        profiles.for_device("cpu")
    print(len(caught), *(warning.message for warning in caught))
"""


@pytest.mark.parametrize("wanted", ["/dev/null", "relative", "~nobody-of-this-name/cache", "untrusted"])
def test_no_directory_is_left_behind(
    program: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    if wanted == "untrusted":
        (tmp_path / "untrusted").mkdir(mode=0o700)
        (tmp_path / "untrusted").chmod(0o777)
        wanted = str(tmp_path / "untrusted")
    said = program(beside(CALL), FLASHKIT_CACHE_DIR=wanted, TMPDIR=temporary)
    assert said.startswith("1 compiled kernels cannot be kept"), said
    assert list(temporary.iterdir()) == [] and list(here.iterdir()) == []


def test_without_a_home_directory_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pwd

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "FLASHKIT_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "user_dir", USER_DIR)
    with pytest.warns(UserWarning, match="no home directory"):
        assert run() == COMPILED
    assert profiles.for_device("cpu").files
    assert list(tmp_path.iterdir()) == []


@contextmanager
def another_user() -> Iterator[None]:
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@as_root
def test_a_cache_that_root_baked_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and only when something had to be compiled."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(folder))
        run()
        (file,) = folder.rglob("kind_*.o")
        file.write_bytes(content(file.name, returning(PLANTED)))
        for entry in (folder, *folder.rglob("*")):
            entry.chmod(entry.stat().st_mode | (0o055 if entry.is_dir() else 0o044))
        forget(monkeypatch)
        with another_user():
            with warnings.catch_warnings(action="error"):
                assert run() == PLANTED
            with pytest.warns(UserWarning, match="cannot be kept") as caught:
                assert [run("one"), run("two")] == [COMPILED, COMPILED]
            assert len(caught) == 1
    finally:
        shutil.rmtree(folder)


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [mode(2, 0o777), pytest.param(link(1, True), marks=as_root)])
def test_clear_removes_nothing_that_may_not_be_ours(tmp_path: Path, plant: Plant, capsys: Any) -> None:
    precious = kernel_cache.path() / "precious"
    precious.parent.mkdir(parents=True)
    precious.touch()
    guilty = plant(precious)
    assert cli.run(["cache", "clear"]) == 1
    assert str(guilty) in capsys.readouterr().err
    assert precious.exists()


def test_doctor_tells_whether_the_cache_is_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = doctor.report("cache")
    assert (found["cache"]["trusted"], found["cache"]["writable"]) == (True, True)
    kernel_cache.path().mkdir(parents=True)
    kernel_cache.path().chmod(0o777)
    assert not doctor.report("cache")["cache"]["trusted"]
    shutil.rmtree(tmp_path / "cache")
    tmp_path.chmod(0o777)
    found = doctor.report("cache")
    assert (found["cache"]["trusted"], found["cache"]["writable"]) == (False, False)
    words = " ".join(doctor.render(found).split())
    assert f"stay in the memory of each process: {tmp_path} can be written by other users" in words
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", "/dev/null")
    found = doctor.report("cache")
    assert (found["cache"]["trusted"], found["cache"]["writable"]) == (True, False)
    assert not (tmp_path / "cache").exists()


# --- profiles and logs ------------------------------------------------------------------------------------------------

PROFILE = "schema: 1\ndevice: {kind: cpu, name: planted, cores: %d}\nmemory: {l2: 12345}\n"


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in FLASHKIT_PROFILE_DIR that speaks for this device."""
    file = tmp_path / "a" / "b" / "x.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(PROFILE % (os.cpu_count() or 1))
    monkeypatch.setattr("flashkit.devices.host.cpu_count", lambda: os.cpu_count() or 1)
    monkeypatch.setenv("FLASHKIT_PROFILE_DIR", str(file.parent))
    return file


def used(file: Path) -> bool:
    profiles.forget()
    return str(file) in profiles.for_device("cpu").files


@pytest.mark.parametrize("plant", WAYS)
def test_a_planted_profile_is_skipped(profile: Path, plant: Plant) -> None:
    assert used(profile)
    guilty = plant(profile)
    with one_warning(guilty, profiles.ProfileWarning):
        assert not used(profile)


def test_one_warning_for_a_folder_of_planted_profiles(profile: Path) -> None:
    for i in range(3):
        (profile.parent / f"{i}.yaml").write_text(profile.read_text())
    profile.parent.chmod(0o777)
    with one_warning(profile.parent, profiles.ProfileWarning):
        profiles.forget()
        for kind in ("cpu", "cuda"):
            profiles.for_device(kind)


def test_a_relative_profile_directory_is_not_looked_at(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(profile.parents[1])
    monkeypatch.setenv("FLASHKIT_PROFILE_DIR", "b")
    profiles.forget()
    with pytest.warns(profiles.ProfileWarning, match="FLASHKIT_PROFILE_DIR: expected an absolute path, got 'b'"):
        found = profiles.for_device("cpu")
    assert not any(Path(file).name == "x.yaml" for file in found.files)


def test_a_profile_is_not_written_where_others_can(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir(mode=0o700)
    (tmp_path / "user").chmod(0o777)
    with pytest.raises(OSError, match="can be written by other users"):
        profiles.write_user_profile({"device": {"kind": "cpu", "name": "test"}})
    assert list((tmp_path / "user").iterdir()) == []


@pytest.mark.parametrize("plant", WAYS)
def test_a_planted_log_is_refused(tmp_path: Path, plant: Plant) -> None:
    file = tmp_path / "a" / "b" / "log"
    Log(file, CpuTile).add(MeasuredPeaks(1.0, 2.0, 3.0, {}))
    assert Log(file, CpuTile).peaks is not None
    guilty = plant(file)
    with pytest.raises(OSError, match=rf"{guilty} ") as caught:
        Log(file, CpuTile)
    assert told(str(caught.value))


def test_a_log_that_is_no_text(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", CpuTile)
    log.add(MeasuredPeaks(1.0, 2.0, 3.0, {}))
    with log.path.open("ab") as file:
        file.write(b'{"type": "trial", "note": "\xff"}\n\xff\xfe\0\n' + b"[" * 100_000 + b"\n{")
    with pytest.warns(UserWarning, match=rf"{log.path}: line 2 and 2 more is no entry"):  # the last one is incomplete
        again = Log(log.path, CpuTile)
    assert again.peaks == log.peaks
    later = MeasuredPeaks(4.0, 5.0, 6.0, {})
    again.add(later)
    with pytest.warns(UserWarning, match="line 2 and 3 more"):
        assert Log(log.path, CpuTile).peaks == later
