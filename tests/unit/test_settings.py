"""The environment variables: read when they are needed, checked in one place, described in the document."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit import settings
from flashkit.devices import kernel_cache, profiles

ROOT = Path(__file__).resolve().parents[2]
READS = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()\s*f?["'](FLASHKIT_\w+)""")


def test_the_package_reads_variables_through_their_settings() -> None:
    for file in (ROOT / "flashkit").rglob("*.py"):
        assert not READS.findall(file.read_text(encoding="utf-8")), file
    assert READS.findall('os.environ.get("FLASHKIT_X") os.environ["FLASHKIT_Y"] os.getenv("FLASHKIT_Z")') == [
        "FLASHKIT_X", "FLASHKIT_Y", "FLASHKIT_Z",
    ]  # fmt: skip


def test_the_document_has_every_variable() -> None:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    section = text.partition("## Environment variables")[2]
    assert re.findall(r"^\| `(FLASHKIT_\w+)`", section, re.MULTILINE) == [each.name for each in settings.ALL]


@pytest.mark.parametrize("setting", settings.ALL, ids=lambda setting: setting.name)
def test_an_empty_variable_is_not_set(setting: settings.Setting[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.name, "")
    assert setting.read() is None and setting.text() == ""
    monkeypatch.delenv(setting.name)
    assert setting.read() is None and setting.raw() is None
    assert setting.meaning and setting.default and setting.kind


GOOD: list[tuple[settings.Setting[Any], str, Any]] = [
    (settings.BACKEND, "cpu", "cpu"), (settings.NUM_THREADS, "3", 3), (settings.DETERMINISTIC, "1", True),
    (settings.DETERMINISTIC, "0", False), (settings.DETERMINISTIC, "no", False), (settings.PROGRESS, "Off", False),
    (settings.CACHE_SIZE, "1.5K", 1536), (settings.CPU_LANES, "8", "8"), (settings.CPU_BF16, "widen", "widen"),
    (settings.CUDA_GENERATION, "sm80", "sm80"), (settings.CUDA_WATCHDOG, "true", True),
    *((settings.CACHE_SIZE, text, size) for text, size in (
        ("0", 0), ("12", 12), ("4K", 4096), ("1.5 M", 3 << 19), ("2GiB", 2 << 30), ("1tb", 1 << 40))),
]  # fmt: skip
BAD: list[tuple[settings.Setting[Any], str]] = [
    (settings.NUM_THREADS, "0"), (settings.NUM_THREADS, "two"), (settings.NUM_THREADS, "9" * 5000),
    (settings.DETERMINISTIC, "maybe"), (settings.CACHE_SIZE, "much"), (settings.CACHE_DIR, "relative"),
    (settings.PROFILE_DIR, "."), (settings.CPU_LANES, "5"), (settings.CPU_BF16, "fast"),
    (settings.CUDA_GENERATION, "sm70"), (settings.CUDA_WATCHDOG, "2"),
    *((settings.CACHE_SIZE, text) for text in ("-1", "1X", "K", "1e3", "1 2", "9" * 400)),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "text", "value"), GOOD, ids=lambda x: str(getattr(x, "name", x)))
def test_values(setting: settings.Setting[Any], text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.name, text)
    assert setting.read() == value and type(setting.read()) is type(value)


@pytest.mark.parametrize(("setting", "text"), BAD, ids=lambda x: str(getattr(x, "name", x))[:40])
def test_what_does_not_fit(setting: settings.Setting[Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(setting.name, text)
    with pytest.raises(ValueError, match=rf"{setting.name}: expected .* got "):
        setting.read()


def test_variables_are_read_by_each_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not when flashkit is imported, and not once."""
    q = np.zeros((1, 1, 4, 8), np.float32)
    for backend in ("reference", "cpu"):
        monkeypatch.setenv("FLASHKIT_BACKEND", backend)
        assert flashkit.explain(q, q, q).backend == backend
    monkeypatch.setenv("FLASHKIT_DETERMINISTIC", "perhaps")
    with pytest.raises(ValueError, match="FLASHKIT_DETERMINISTIC: expected 1 or 0, got 'perhaps'"):
        flashkit.attention(q, q, q)
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path))
    assert kernel_cache.path() == tmp_path / "flashkit-kernels"
    monkeypatch.setenv("FLASHKIT_CACHE_SIZE", "3K")
    assert kernel_cache.limit() == 3072
    monkeypatch.setenv("FLASHKIT_PROFILE_DIR", str(tmp_path))
    assert profiles.directories()["FLASHKIT_PROFILE_DIR"] == tmp_path
