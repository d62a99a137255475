"""Names of object files: whatever decides the machine code is part of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numpy as np
import pytest

from flashkit.backends.cpu import objects, specialise, target
from flashkit.backends.cpu.target import Target

SVML = "NUMBA_DISABLE_INTEL_SVML"
"""The environment variable by which LLVM generates other code."""


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """The names of the prebuilt and of the cached file that holds the object of a text."""
    monkeypatch.setattr(objects, "_read_or_make", lambda names, make: names)
    monkeypatch.delenv(SVML, raising=False)

    def forget() -> None:
        objects.fingerprint.cache_clear()
        objects.compilers.cache_clear()

    def found(text: str = "text", kind: str = "kind") -> tuple[str, str]:
        forget()
        monkeypatch.setattr(objects, "_loaded", {})
        return objects.functions(specialise.source(kind, text))  # type: ignore[return-value]

    yield found
    forget()


@pytest.fixture(params=["prebuilt", "cached"])
def name(request: pytest.FixtureRequest, names: Callable[..., tuple[str, str]]) -> Callable[..., str]:
    """One of them."""
    return lambda **given: str(getattr(names(**given), request.param))


def test_equal_texts_have_one_name(name: Callable[..., str]) -> None:
    assert name() == name() != name(text="other text")
    assert name(kind="classify").rpartition("/")[2].startswith("classify_")


@pytest.mark.parametrize("part", Target._fields)
def test_the_target_is_part_of_a_name(part: str, name: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache directory may be shared by machines."""
    before, here = name(), target.target()
    changed = here._replace(**{part: getattr(here, part) + "x"})
    monkeypatch.setattr(target, "target", lambda instructions="": changed)
    assert name() != before


def test_numbas_setting_is_part_of_a_name(name: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name()]
    for value in ("0", "1"):
        monkeypatch.setenv(SVML, value)
        names.append(name())
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("module", "attribute"), [(llvmlite, "__version__"), (np, "__version__"), (objects, "_numba_version")]
)
def test_versions_are_part_of_a_cached_name(
    module: Any, attribute: str, names: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wheel carries runs whatever compilers are installed beside it."""
    before = names()
    monkeypatch.setattr(module, attribute, "0.0" if attribute == "__version__" else lambda: "0.0")
    after = names()
    assert (after.cached == before.cached, after.prebuilt == before.prebuilt) == (False, True)


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
