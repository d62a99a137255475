"""`make pythons`: the README and the tests of modules on each other Python that the classifiers name.

Each has an environment with what `pip install flashkit-attention[unit]` brings, which is none of the optional
libraries. Tests that need one are skipped, and those of machine code, which is the same for every Python, unless
FLASHKIT_TEST_ALL is set. A Python is looked for on the PATH, in pyenv and in uv; one that is not there is named and
left out.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ["-n", "2", "--dist", "worksteal", "-o", "faulthandler_timeout=300"]
DOCUMENTS = ["tests/tools/test_docs.py", "-k", "python_blocks", *WORKERS]
MODULES = ["tests/unit", "-m", "not slow", *WORKERS]
MACHINE_CODE = [f"--ignore=tests/unit/{name}.py" for name in ("test_cpu_bf16_pairs", "test_cpu_kernels")]
COMPILERS = "numpy", "numba", "llvmlite"
CLASSIFIER = "Programming Language :: Python :: 3."


def versions() -> list[str]:
    """Those that the classifiers name, such as 3.11."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [f"3.{name.removeprefix(CLASSIFIER)}" for name in project["classifiers"] if name.startswith(CLASSIFIER)]


def output(*command: str) -> str:
    """What a command prints; nothing where it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def places(version: str) -> Iterator[str]:
    """Where a Python of this version may be."""
    yield shutil.which(f"python{version}") or ""  # pyenv's shims fail for versions that are not chosen
    if shutil.which("pyenv"):
        yield from map(str, sorted(Path(output("pyenv", "root"), "versions").glob(f"{version}.*/bin/python")))
    if shutil.which("uv"):
        yield output("uv", "python", "find", "--no-python-downloads", version)


def find(version: str) -> str:
    """A Python of this version, or nothing."""
    asked = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    return next((place for place in places(version) if place and output(place, "-c", asked) == version), "")


def compilers() -> list[str]:
    """Those of this environment, if it has them: what it has compiled is then found in the cache."""
    found = [name for name in COMPILERS if importlib.util.find_spec(name) is not None]
    return [f"{name}=={importlib.metadata.version(name)}" for name in found]


def check(version: str, python: str, folder: Path) -> None:
    """Raises CalledProcessError where the installation or a test fails."""
    own = str(folder / "bin" / "python")
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(*command: str) -> None:
        subprocess.run(command, cwd=ROOT, env=environment, check=True)

    if not Path(own).exists():
        run(python, "-m", "venv", str(folder))
    run(own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "-e", ".[unit]", *compilers())
    skipped = [] if os.environ.get("FLASHKIT_TEST_ALL") else MACHINE_CODE
    for tests in (DOCUMENTS, [*MODULES, *skipped]):
        run(own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)


def main(environments: str) -> int:
    """The exit status. Environments are made beside this folder, with the version behind its name."""
    failed = []
    for version in versions():
        if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
            print(f"== Python {version}: runs this; `make test` tests it", flush=True)
        elif not (python := find(version)):
            print(f"== Python {version}: not tested, there is none on the PATH, in pyenv or in uv", flush=True)
        else:
            begun = time.monotonic()
            print(f"== Python {version}: {python}", flush=True)
            try:
                check(version, python, Path(f"{environments}-{version}").resolve())
            except subprocess.CalledProcessError:
                failed.append(version)
            print(f"== Python {version}: {time.monotonic() - begun:.0f} s", flush=True)
    if failed:
        print(f"failed: Python {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
