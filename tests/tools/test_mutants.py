"""The list of faults does not rot, and its runner tells a fault that is found from one that is not."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
from pathlib import Path

import mutants
import pytest
from mutants import Area, Fault, runner
from mutants.results import Results, score
from mutants.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
AREAS = mutants.areas()


@functools.cache
def statements(text: str) -> tuple[list[str], list[ast.stmt]]:
    """The texts of a module's statements, and their syntax."""
    body, lines = ast.parse(text).body, text.splitlines()
    return ["\n".join(lines[each.lineno - 1 : each.end_lineno]) for each in body], body


def same_syntax(one: str, other: str) -> bool:
    """Whether two modules differ in comments and line breaks alone. Most statements are the same text."""
    (texts, body), (others, changed) = statements(one), statements.__wrapped__(other)
    return len(body) == len(changed) and all(
        a == b or ast.dump(x) == ast.dump(y) for a, b, x, y in zip(texts, others, body, changed, strict=True)
    )


def test_comments_and_line_breaks_are_no_change() -> None:
    text = "x = 1\n\ndef f(a):\n    return a + x\n"
    assert same_syntax(text, "x = 1  # one\n\n\ndef f(a):\n    return (\n        a + x\n    )\n")
    for other in ("x = 2", "a + a", "def f(b)"):
        assert not same_syntax(text, text.replace({"x = 2": "x = 1", "a + a": "a + x"}.get(other, "def f(a)"), other))
    assert not same_syntax(text, text + "y = 1\n")


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
            assert not same_syntax(text, changed), fault.name


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.name)
def test_every_stage_names_tests(area: Area) -> None:
    own = [text for fault in area.faults for text in (fault.tests, fault.device)]
    for text in filter(None, (*area.stages, *area.device, *own)):
        paths = [word.partition("::")[0] for word in mutants.stage(text).arguments if word.startswith("tests/")]
        assert paths, text
        assert all((ROOT / path).exists() for path in paths), text


def test_make_fast_runs_the_tests_that_must_find_the_core_faults() -> None:
    """Every part of the algorithm has faults, and their stages are of the folders of `make fast`."""
    rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nfast: ")[2].partition("\n\n")[0]
    folders = tuple(f"tests/{name}/" for name in rule.partition("addprefix tests/,")[2].partition(")")[0].split())
    core = [(area, fault) for area in AREAS for fault in area.faults if fault.core]
    assert {fault.core for _, fault in core} == set(mutants.CORE)
    for area, fault in core:
        for text in filter(None, (fault.tests, *area.stages)):
            paths = [word for word in mutants.stage(text).arguments if word.startswith("tests/")]
            assert all(path.startswith(folders) for path in paths), text


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


def judged(checkout: Path, work: Path, area: Area, jobs: int = 1, **settings: object) -> tuple[Results, list[str]]:
    said: list[str] = []
    judge = runner.Judge(checkout, work / "trees", work / "work", jobs, said.append)
    results = Results(work / "results.jsonl", judge.digest, [work / "results.jsonl"])
    judge.run([area], results, **settings)  # type: ignore[arg-type]
    return results, said


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_runner(jobs: int, checkout: Path, tmp_path: Path) -> None:
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
    results, said = judged(checkout, tmp_path, area, jobs)
    found = {name: (record["outcome"], record["selection"]) for (_, name, _), record in results.records.items()}
    assert found == {
        "one more": ("killed", "not slow"),
        "thrice": ("killed", "slow"),
        "the same": ("survived", None),
        "no function": ("killed", "not slow"),
    }
    assert any("own: thrice: KILLED: tests/test_double.py::test_two" in line for line in said)
    assert score([area], results, "all").splitlines()[-1].split() == ["all", "3", "2", "4", "4"]
    for copy in (tmp_path / "trees").glob("*/tree/double.py"):
        assert copy.read_text() == (checkout / "double.py").read_text()

    again = Results(tmp_path / "new.jsonl", results.tree, [results.output])
    assert all(again.known("own", fault, "all") for fault in area.faults)
    assert again.known("own", area.faults[0], "fast") is None
    later = Results(tmp_path / "new.jsonl", "another tree", [results.output])
    assert [later.known("own", fault, "all") is None for fault in area.faults] == [False, False, True, False]
    _, said = judged(checkout, tmp_path, area, jobs)
    assert said == []


def test_tests_that_found_a_neighbour_come_first(checkout: Path, tmp_path: Path) -> None:
    """Those of another file after those of the same; a test that finds nothing leaves it to the stages."""
    (checkout / "tests" / "test_other.py").write_text(
        "import double\n\ndef test_three(): assert double.double(3) == 6\n"
        "def test_slow(): assert double.double(1) == 2\n"
    )
    faults = (
        Fault("thrice", "double.py", "2 *", "3 *"),
        Fault("four times", "double.py", "2 *", "4 *"),
        Fault("one more", "double.py", "+ 0", "+ (x == 1)"),
    )
    area = Area("own", ("tests/test_other.py",), faults)
    first, _ = judged(checkout, tmp_path, area._replace(faults=faults[:1]))
    assert first.known("own", faults[0], "all")["stage"] == "tests/test_other.py"
    results, _ = judged(checkout, tmp_path, area)
    by = {fault.name: results.known("own", fault, "all") for fault in faults[1:]}
    assert by["four times"]["stage"] == by["four times"]["by"] == "tests/test_other.py::test_three"
    assert (by["one more"]["by"], by["one more"]["stage"]) == ("tests/test_other.py::test_slow", "tests/test_other.py")


def test_on_a_device(checkout: Path, tmp_path: Path) -> None:
    """Tests marked gpu, in the stages for a device; a barrier's watchdog is on."""
    (checkout / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: gpu", "slow: slow"]\n')
    (checkout / "tests" / "test_device.py").write_text(
        "import os, pytest\nfrom double import double\n\n@pytest.mark.gpu\n"
        "def test_two(): assert double(2) == 4 and os.environ['FLASHKIT_CUDA_WATCHDOG'] == '1'\n"
    )
    faults = (
        Fault("thrice", "double.py", "2 *", "3 *"),
        Fault("four times", "double.py", "2 *", "4 *", "tests/test_double.py", "tests/test_device.py -k two"),
        Fault("one more", "double.py", "+ 0", "+ (x == 0)"),  # which test_double.py finds
    )
    area = Area("own", ("tests/test_double.py",), faults, ("tests/test_device.py",))
    results, said = judged(checkout, tmp_path, area, 2, tests="device")
    found = [results.known("own", fault, "device") for fault in faults]
    assert [(record["outcome"], record["stage"]) for record in found] == [
        ("killed", "FLASHKIT_CUDA_WATCHDOG=1 tests/test_device.py"),
        ("killed", "FLASHKIT_CUDA_WATCHDOG=1 tests/test_device.py -k two"),
        ("survived", ""),
    ]
    assert not any("fails" in line for line in said)


def test_an_areas_stages_wait_for_a_fault_that_its_own_does_not_find(checkout: Path, tmp_path: Path) -> None:
    faults = tuple(
        Fault(f"times {n}", "double.py", "2 *", f"{n} *", f"tests/test_double.py -k {own}")
        for n, own in ((3, "two"), (4, "zero"))
    )
    area = Area("own", ("tests/test_double.py",), faults)
    for chosen, stage in ((0, "tests/test_double.py -k two"), (1, "tests/test_double.py")):
        results, said = judged(checkout, tmp_path, area._replace(faults=faults[: chosen + 1]))
        record = results.known("own", faults[chosen], "all")
        assert record is not None and (record["outcome"], record["stage"]) == ("killed", stage)
        assert any("tests/test_double.py -m" in line for line in said) == (chosen == 1)


def test_a_test_that_fails_anyway_judges_nothing(checkout: Path, tmp_path: Path) -> None:
    (checkout / "double.py").write_text("def double(x):\n    return 3 * x + 0\n")
    faults = Fault("one more", "double.py", "+ 0", "+ 1"), Fault("four times", "double.py", "3 *", "4 *")
    results, said = judged(checkout, tmp_path, Area("own", ("tests/test_double.py",), faults))
    assert "  fails, and judges nothing: tests/test_double.py::test_two" in said
    assert [results.known("own", fault, "all")["outcome"] for fault in faults] == ["killed", "survived"]


def test_tests_that_cannot_be_imported(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests" / "test_double.py").write_text("import no_such_package\n")
    area = Area("own", ("tests/test_double.py",), (Fault("one more", "double.py", "+ 0", "+ 1"),))
    with pytest.raises(ValueError, match=r"tests/test_double\.py cannot be collected"):
        judged(checkout, tmp_path, area)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_fault_without_an_end(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where the tests take much longer than without it; where the limit ran out first, not judged."""
    endless = Fault("hangs", "double.py", "    return", "    while x: pass\n    return")
    area = Area("own", ("tests/test_double.py",), (endless,))
    results, said = judged(checkout, tmp_path, area, limit=2)
    assert said[-1].startswith("1/1 own: hangs: TIMEOUT")
    assert results.known("own", area.faults[0], "all") is None
    monkeypatch.setattr(runner.Plain, "longest", 3)
    results, said = judged(checkout, tmp_path, area)
    assert "hangs: KILLED: tests/test_double.py: no end within 3 s" in said[-1]
    assert results.known("own", area.faults[0], "all")


def test_a_copy_that_is_no_repository(checkout: Path, tmp_path: Path) -> None:
    """Has the same digest: what one machine has judged, another need not."""
    (checkout / "build").mkdir()
    (checkout / "build" / "old").write_text("")
    (checkout / ".gitignore").write_text("build\n")
    copy = tmp_path / "copy"
    shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
    trees = [Tree(root, tmp_path / root.name / "trees", tmp_path / "warm") for root in (checkout, copy)]
    assert trees[0].digest == trees[1].digest
    assert [(tree.copy / "build").exists() for tree in trees] == [False, False]
