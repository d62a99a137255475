"""The package that is released: what it says of itself, what is in it, and that it works where it is installed."""

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pythons
import yaml

import flashkit
from flashkit.tools import cli

ROOT = Path(__file__).resolve().parents[2]
NAME = "flashkit-attention"
MOST_BYTES = 20 << 20

pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="not in a source tree")


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def test_the_version_has_one_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "version" not in project() and project()["dynamic"] == ["version"]
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == flashkit.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev|post)\d+)?", flashkit.__version__)
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(flashkit.__version__)}\b", changes, re.MULTILINE)


def test_names_and_addresses() -> None:
    found = project()
    assert found["name"] == NAME
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} <= set(found["urls"])
    assert found["classifiers"] == sorted(found["classifiers"])
    assert {"torch", "jax", "transformers", "plot", "demo", "cuda12", "cuda13"} <= set(found["optional-dependencies"])


def test_each_python_of_the_classifiers_is_tested_or_named(monkeypatch: Any, capsys: Any) -> None:
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert own in pythons.versions() and pythons.versions()[0] == project()["requires-python"].removeprefix(">=")
    tried = []
    monkeypatch.setattr(pythons, "versions", lambda: [own, "3.98", "3.99"])
    monkeypatch.setattr(pythons, "places", lambda version: iter(["", sys.executable] if version == "3.98" else [""]))
    monkeypatch.setattr(pythons, "output", lambda *_: "3.98")
    monkeypatch.setattr(pythons, "check", lambda *given: tried.append(given))
    assert pythons.main("environment") == 0
    assert [(version, python) for version, python, _ in tried] == [("3.98", sys.executable)]
    assert "Python 3.99: not tested" in capsys.readouterr().out

    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "pytest")

    monkeypatch.setattr(pythons, "check", fails)
    assert pythons.main("environment") == 1
    monkeypatch.undo()
    monkeypatch.setattr(pythons, "places", lambda _: iter(["", "/nowhere/python", sys.executable]))
    assert pythons.find(own) == sys.executable and not pythons.find("3.99")


def test_extras_can_be_combined() -> None:
    """Tests and benchmarks name one PyTorch exactly, since a figure is of one version, and users any that works."""
    extras = project()["optional-dependencies"]
    wanted = {name: [one for one in extra if re.match(r"torch\b", one)] for name, extra in extras.items()}
    (exact,) = wanted["test"]
    version = re.fullmatch(r"torch==(\d+)\.(\d+)\.\d+", exact)
    assert version and {name: one for name, one in wanted.items() if one} == {
        "torch": ["torch>=2.7"], "transformers": ["torch>=2.7"], "bench": [exact], "test": [exact],
    }  # fmt: skip
    assert (int(version[1]), int(version[2])) >= (2, 7)
    assert exact in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_workflows_run_what_the_makefile_has() -> None:
    """CI runs .ci/run on every Python of the classifiers; a release builds by `make wheel` and stores no token."""
    ci, release = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))["jobs"]
        for name in ("ci", "release")
    )
    named = {c.rpartition(" ")[2] for c in project()["classifiers"] if re.search(r":: 3\.\d+$", c)}
    assert set(ci["test"]["strategy"]["matrix"]["python"]) == named
    assert any(step.get("run") == "bash .ci/run" for step in ci["test"]["steps"])
    runs = "\n".join(step.get("run", "") for step in release["build"]["steps"])
    assert "make wheel" in runs and runs.index("--sdist") < runs.index("make wheel")  # else it would carry kernels
    assert release["publish"]["permissions"] == {"id-token": "write"} and "secrets." not in str(release)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step.get("run", "") for jobs in (ci, release) for job in jobs.values() for step in job["steps"]]
    assert set(re.findall(r"^make (\w+)", "\n".join(steps), re.MULTILINE)) <= targets


def test_the_citation() -> None:
    """The keys that version 1.2.0 of the format requires, and those that must agree with the package."""
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "type", "license"} <= set(found)
    assert found["cff-version"] == "1.2.0" and found["license"] == project()["license"]
    assert [author["name"] for author in found["authors"]] == [author["name"] for author in project()["authors"]]
    assert "version" not in found  # it has one place
    for reference in found["references"]:
        assert {"type", "title", "authors"} <= set(reference)
        assert all({"family-names", "given-names"} <= set(author) for author in reference["authors"])


# --- wheel and sdist --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    if missing := [name for name in ("build", "hatchling", "twine") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"pip install {' '.join(missing)}")
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def run(*arguments: str, python: str = sys.executable, **variables: str) -> str:
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run([python, *arguments], capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_twine_accepts_them(built: tuple[Path, Path]) -> None:
    assert run("-m", "twine", "--no-color", "check", "--strict", *map(str, built)).count("PASSED") == 2


@pytest.mark.slow
def test_what_the_wheel_holds(built: tuple[Path, Path]) -> None:
    wheel = built[1]
    assert wheel.name == f"flashkit_attention-{flashkit.__version__}-py3-none-any.whl" or "cp" in wheel.name
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"flashkit_attention-{flashkit.__version__}.dist-info"
        metadata: Message = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        points = archive.read(f"{info}/entry_points.txt").decode()
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flashkit").rglob("*.py")}
    assert sources <= names
    for profile in (ROOT / "device_profiles").glob("*.yaml"):
        assert f"flashkit/device_profiles/{profile.name}" in names
    kernels = {p.relative_to(ROOT).as_posix() for p in (ROOT / "flashkit").rglob("*") if p.suffix in (".cu", ".cuh")}
    assert kernels and kernels <= names
    assert {"flashkit/examples/semantic_search/__init__.py", "flashkit/py.typed", f"{info}/licenses/LICENSE"} <= names
    assert all(name.startswith(("flashkit/", f"{info}/")) for name in names), "nothing else in site-packages"
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in names)
    assert metadata["Name"] == NAME and metadata["Version"] == flashkit.__version__
    assert set(metadata.get_all("Provides-Extra", [])) == set(project()["optional-dependencies"])
    assert "flashkit = flashkit.__main__:main" in points
    backends = "cpu", "cupy_raw", "numba_cuda", "reference"
    assert all(f"{name} = flashkit.backends.{name}." in points for name in backends)


@pytest.mark.slow
def test_what_the_sdist_holds(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "Makefile"} <= names
    assert {"docs/cli.md", "tests/conftest.py", "device_profiles/h200.yaml"} <= names
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    tops = {name.partition("/")[0] for name in names} - {"", "PKG-INFO", ".gitignore"}
    assert tops == set(included["only-include"]), "nothing that a user keeps in the folder, such as an environment"


INSTALLED = """
import importlib.metadata, json, numpy as np, flashkit
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 64, 32), dtype=np.float32)
out = flashkit.attention(q, k, v, causal=True)
right = flashkit.attention(q, k, v, causal=True, backend="reference")
version = importlib.metadata.version("flashkit-attention")
print(json.dumps([flashkit.__file__, bool(np.allclose(out, right, atol=1e-5)), version]))
"""


@pytest.mark.slow
def test_the_wheel_works_where_it_is_installed(built: tuple[Path, Path], tmp_path: Path) -> None:
    """In an environment of its own, which borrows the packages that flashkit needs and not flashkit."""
    folder = tmp_path / "environment"
    venv.create(folder, symlinks=sys.platform != "win32")
    scripts = folder / ("Scripts" if sys.platform == "win32" else "bin")
    python = str(next(scripts.glob("python*")))
    pip = "-m", "pip", "--python", python  # this environment's, as another takes seconds to install
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(built[1]))
    site = Path(run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", python=python).strip())
    needed = Path(np.__file__).parents[1]  # no .pth files of this folder are read, so an editable flashkit is not found
    (site / "needed.pth").write_text(f"{needed}\n{sysconfig.get_path('purelib')}\n")
    file, right, version = json.loads(run("-c", INSTALLED, python=python))
    assert Path(file).is_relative_to(folder) and right and version == flashkit.__version__
    flashkit_command = str(next(scripts.glob("flashkit*")))
    assert run(flashkit_command, "--version", python=python).strip() == flashkit.__version__
    report = json.loads(run(flashkit_command, "doctor", "--json", python=python))
    assert report["flashkit"]["version"] == flashkit.__version__ and report["flashkit"]["backends_registered"]
    assert any(backend["name"] == "cpu" and backend["ok"] for backend in report["backends"])
    assert "--limit" in run(flashkit_command, "demo", "--help", python=python)  # the example is in the wheel


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
def test_a_wheel_for_one_architecture_has_its_tag(architecture: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    environment = os.environ | {"FLASHKIT_WHEEL": architecture}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=environment)
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith(f"-py3-none-manylinux_2_17_{architecture}.manylinux2014_{architecture}.whl")
    environment["FLASHKIT_WHEEL"] = "m68k"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode and "expected x86_64 or aarch64" in done.stderr


def test_the_recipe_asks_for_what_the_project_asks_for() -> None:

    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    asked = {name.replace(" ", "").lower() for name in recipe["requirements"]["run"]}
    assert asked == {f"python{project()['requires-python']}", *(x.lower() for x in project()["dependencies"])}
