"""The faults of tests/mutants fit today's code, and their runner tells those that tests find from others."""

import ast
import subprocess
from pathlib import Path

import mutants
import pytest
from attack import test_faults as fuzzer
from mutants import Fault
from mutants.__main__ import judge
from mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_every_fault_fits() -> None:
    """It changes the syntax of a Python file, each once; its tests exist, in folders of `make fast`."""
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nfast: ")[2].partition("\n\n")[0]
    folders = tuple(f"tests/{name}/" for name in rule.partition("addprefix tests/,")[2].partition(")")[0].split())
    assert len(FAULTS) == len({(fault.place, fault.old, fault.new) for fault in FAULTS}) <= 80
    assert {fault.core for fault in FAULTS} == set(mutants.CORE)
    for fault in FAULTS:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        changed = fault.applied(text)
        assert changed != text, fault
        if fault.file.endswith(".py"):
            assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(changed)), fault
        paths = [word for word in fault.tests.split() if word.startswith("tests/")]
        assert paths and all(path.startswith(folders) and (ROOT / path).exists() for path in paths), fault
    for planted in fuzzer.FAULTS:
        assert (ROOT / "flashkit" / planted.file).read_text().count(planted.text) == 1, planted


def test_where_a_fault_goes() -> None:
    """Into the function that it names, whatever the layout of the code; nowhere if the code is gone or occurs twice."""
    text = "def f(x):\n    return x + 1\n\n\nclass A:\n    def f(self, é):\n        é = (é +\n             1)\n"
    assert Fault("", "a:A.f", "é + 1", "2", "").applied(text) == text.replace("é +\n             1", "2")
    assert Fault("", "a:f", "return x + 1", "pass", "").applied(text) == text.replace("return x + 1", "pass")
    assert Fault("", "a.cuh", "x + 1", "x", "").applied(text) == text.replace("x + 1", "x")
    for place, old in (("a:f", "x + 2"), ("a:g", "x + 1"), ("a:A.f", "é + 2"), ("a.cuh", "f(")):
        with pytest.raises(ValueError, match=rf"{place} has .* \d times; a fault needs it once"):
            Fault("", place, old, "0", "").applied(text)


def test_the_runner(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Faults are killed or survive, also by a crash; tests that fail anyway judge nothing."""
    root = tmp_path / "checkout"
    (root / "flashkit").mkdir(parents=True)
    (root / "flashkit" / "__init__.py").touch()
    double, tests = root / "flashkit" / "double.py", root / "test_double.py"
    double.write_text("def double(x):\n    return 2 * x + 0\n")
    tests.write_text(
        "from flashkit.double import double\n\n\ndef test_zero(): assert double(0) == 0\n\n\n"
        "def test_two(): assert double(2) == 4\n\n\ndef test_wrong(): assert double(2) == 5\n"
    )
    subprocess.run(["git", "init", "-q", root], check=True)

    def fault(old: str, new: str, tests: str) -> Fault:
        return Fault("core", "double:double", old, new, f"test_double.py -k '{tests}'")

    faults = (
        fault("2 * x", "3 * x", "zero or two"),
        fault("2 * x", "3 * x", "zero"),
        fault("return 2 * x + 0", "import os; os.abort()", "zero"),
        fault("2 * x", "3 * x", "wrong"),
        fault("2 * x", "3 * x", "no_such_test"),
    )
    before = double.read_text()
    assert judge(root, faults, jobs=2) == 3
    assert double.read_text() == before
    said = [line.rpartition(" (")[0] or line for line in capfd.readouterr().out.splitlines() if line[:1].isupper()]
    name = "core: double:double:"
    assert sorted(said) == [
        f"KILLED {name} 2 * x by test_double.py::test_two", f"KILLED {name} return 2 * x + 0 by a crash",
        f"NOT JUDGED {name} 2 * x", f"NOT JUDGED {name} 2 * x", f"SURVIVED {name} 2 * x",
    ]  # fmt: skip
