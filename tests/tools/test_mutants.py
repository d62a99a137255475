"""The list of faults does not rot, and its runner tells a fault that is found from one that is not."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import mutants
import pytest
from mutants import Area, Fault, runner

ROOT = Path(__file__).resolve().parents[2]
AREAS = mutants.areas()


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_every_fault_fits_the_code(area: Area) -> None:
    """The old text occurs exactly once, the new one is another, and a Python file still parses."""
    names = [fault.name for fault in area.faults]
    assert len(set(names)) == len(names)
    for fault in area.faults:
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        changed = fault.applied(text)
        assert changed != text, fault.name
        if fault.file.endswith(".py"):
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), fault.name


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_every_stage_names_tests(area: Area) -> None:
    for text in (*area.stages, *(fault.tests for fault in area.faults if fault.tests)):
        paths = [word.partition("::")[0] for word in mutants.stage(text).arguments if word.startswith("tests/")]
        assert paths, text
        assert all((ROOT / path).exists() for path in paths), text


def test_a_fault_whose_text_is_gone_or_occurs_twice() -> None:
    fault = Fault("too many", "a.py", "x", "y")
    assert fault.applied("a x b") == "a y b"
    for text in ("a b", "x x"):
        with pytest.raises(ValueError, match=r"a\.py has 'x' . times; the fault 'too many' needs it once"):
            fault.applied(text)


def test_stages() -> None:
    found = mutants.stage("A=1 B='x y' tests/a.py -k 'p and q' -m gpu")
    assert found == (("tests/a.py", "-k", "p and q"), "gpu", {"A": "1", "B": "x y"})


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a function and two tests of it, one of them slow."""
    root = tmp_path / "checkout"
    (root / "tests").mkdir(parents=True)
    (root / "double.py").write_text("def double(x):\n    return 2 * x + 0\n")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: slow"]\n')
    (root / "tests" / "test_double.py").write_text(
        "import pytest\nfrom double import double\n\ndef test_zero(): assert double(0) == 0\n\n"
        "@pytest.mark.slow\ndef test_two(): assert double(2) == 4\n"
    )
    subprocess.run(["git", "init", "-q", root], check=True)
    return root


def test_the_runner(checkout: Path, tmp_path: Path) -> None:
    """Faults are killed by fast or by slow tests or survive; a further run judges the survivors of other code alone."""
    area = Area(
        "own",
        ("tests/test_double.py",),
        (
            Fault("one more", "double.py", "+ 0", "+ 1"),
            Fault("thrice", "double.py", "2 *", "3 *"),
            Fault("the same", "double.py", "x + 0", "x"),
            Fault("no function", "double.py", "def double", "def triple"),
        ),
    )
    said: list[str] = []
    tree = runner.Tree(checkout, tmp_path / "work", tmp_path / "warm")
    results = runner.Results(tmp_path / "results.jsonl", tree.digest)
    runner.run(tree, [area], results, say=said.append)
    found = {name: (record["killed"], record["selection"]) for (_, name, _), record in results.records.items()}
    assert found == {
        "one more": (True, "not slow"),
        "thrice": (True, "slow"),
        "the same": (False, None),
        "no function": (True, "not slow"),
    }
    assert "own: thrice: tests/test_double.py::test_two" in said[1]
    assert runner.score([area], results, "all").splitlines()[-1].split() == ["all", "3", "2", "4", "4"]
    assert (tree.copy / "double.py").read_text() == (checkout / "double.py").read_text()

    again = runner.Results(tmp_path / "results.jsonl", tree.digest)
    assert all(again.known("own", fault, "all") for fault in area.faults)
    assert again.known("own", area.faults[0], "fast") is None
    later = runner.Results(tmp_path / "results.jsonl", "another tree")
    assert [later.known("own", fault, "all") is None for fault in area.faults] == [False, False, True, False]


def test_the_runner_wants_tests_that_pass(checkout: Path, tmp_path: Path) -> None:
    (checkout / "double.py").write_text("def double(x):\n    return 3 * x + 0\n")
    area = Area("own", ("tests/test_double.py",), (Fault("one more", "double.py", "+ 0", "+ 1"),))
    tree = runner.Tree(checkout, tmp_path / "work", tmp_path / "warm")
    with pytest.raises(ValueError, match=r"fails without any fault: tests/test_double.py::test_two"):
        runner.run(tree, [area], runner.Results(tmp_path / "results.jsonl", tree.digest))
