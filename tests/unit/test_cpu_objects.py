"""Names of object files: whatever decides the machine code is part of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
import pytest

from flashkit.backends.cpu import objects, specialise

SETTINGS = (
    "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT", "NUMBA_LOOP_VECTORIZE",
    "NUMBA_SLP_VECTORIZE", "NUMBA_DISABLE_INTEL_SVML", "NUMBA_INTEL_SVML",
)  # fmt: skip
"""Environment variables by which Numba generates other code."""


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The name of the file that holds the object of a text."""
    monkeypatch.setattr(objects, "_read_or_make", lambda name, make: name)
    for setting in SETTINGS:
        monkeypatch.delenv(setting, raising=False)

    def found(text: str = "text", kind: str = "kind") -> str:
        objects.fingerprint.cache_clear()
        monkeypatch.setattr(objects, "_loaded", {})
        return str(specialise.load(kind, text))

    yield found
    objects.fingerprint.cache_clear()


def test_equal_texts_have_one_name(name: Callable[..., str]) -> None:
    assert name() == name() != name("other text")
    assert name(kind="classify").startswith("classify_")


@pytest.mark.parametrize("part", range(3))
def test_the_machine_is_part_of_a_name(part: int, name: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triple, name and features of the CPU: a cache directory may be shared by machines."""
    before, machine = name(), list(objects.machine())
    machine[part] += "x"
    monkeypatch.setattr(objects, "machine", lambda: tuple(machine))
    assert name() != before


@pytest.mark.parametrize("setting", SETTINGS)
def test_numbas_settings_are_part_of_a_name(
    setting: str, name: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name()]
    for value in ("0", "1"):
        monkeypatch.setenv(setting, value)
        names.append(name())
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("module", "attribute"), [(llvmlite, "__version__"), (np, "__version__"), (objects, "_numba_version")]
)
def test_versions_are_part_of_a_name(
    module: Any, attribute: str, name: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name()
    monkeypatch.setattr(module, attribute, "0.0" if attribute == "__version__" else lambda: "0.0")
    assert name() != before


@pytest.mark.parametrize("source", ["tiling.py", "kernels/forward.py", "micro/gemm.py"])
def test_every_source_is_part_of_a_name(
    source: str, name: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy = tmp_path / "cpu"
    shutil.copytree(objects._HERE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(objects, "_HERE", copy)
    before = name()
    with (copy / source).open("a") as file:
        file.write("\n# another line\n")
    assert name() != before


def test_a_file_that_another_process_makes_meanwhile_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that waited for the lock reads what the other has made."""
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path))
    made: list[str] = []

    def make() -> objects.Object:
        made.append("object")
        return specialise.compiled("own", _TEXT)

    monkeypatch.setattr(objects, "_loaded", {})
    assert objects.functions("own", "text", make)["seven"]
    (file,) = tmp_path.rglob("own_*.o")
    held, alone = file.rename(tmp_path / "held"), objects.kernel_cache.alone

    def waited(folder: str, name: str) -> Any:
        os.rename(held, file)  # as the process that holds the lock does
        return alone(folder, name)

    monkeypatch.setattr(objects.kernel_cache, "alone", waited)
    monkeypatch.setattr(objects, "_loaded", {})
    assert objects.functions("own", "text", make)["seven"]
    assert made == ["object"]


_TEXT = """from numba import types
from flashkit.backends.cpu.functions import entry

@entry(types.int64())
def seven():
    return 7
"""
