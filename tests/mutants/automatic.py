"""Mutate every operator and constant of a module: cosmic-ray, on a copy of the tree.

`python -m tests.mutants.automatic flashkit/call/shape.py` begins or continues the session of a module or folder in
build/mutants, and prints the share of mutants that survived. The tests are those of the faults in the module, unless
others are named after it, without the slow ones. `cr-report SESSION --show-diff --surviving-only` shows the survivors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from .__main__ import copied
from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.automatic", description=__doc__)
    parser.add_argument("module", help="a file or folder of flashkit, relative to the repository")
    parser.add_argument("tests", nargs="*", help="files and folders of tests, in their order")
    parser.add_argument("--init-only", action="store_true", help="count the mutants, and run nothing")
    options = parser.parse_args()
    module = options.module.rstrip("/")
    session = WORK / f"{module.removesuffix('.py').replace('/', '.')}.sqlite"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cosmic-ray"]
    with tempfile.TemporaryDirectory(prefix="flashkit-mutants-") as folder:
        tree = copied(ROOT, Path(folder, "tree"))
        if not (tree / module).exists():
            parser.error(f"there is no {module}")
        tests = options.tests or own_tests(module)
        if not tests:
            parser.error(f"tests/mutants has no fault in {module}; name its tests after it")
        config = session.with_suffix(".toml")
        session.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            "[cosmic-ray]",
            f"module-path = {module!r}",
            f"timeout = {settings['timeout']}",
            f"excluded-modules = {settings['excluded-modules']}",
            f"test-command = '''{' '.join([sys.executable, settings['test-command'], *tests])}'''",
            "[cosmic-ray.distributor]",
            "name = 'local'",
        ]
        config.write_text("\n".join(lines), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(tree), "FLASHKIT_CACHE_DIR": str(Path(folder, "kernels"))}

        def run(*command: str) -> None:
            program = Path(sys.executable).parent / command[0]
            subprocess.run([program, *command[1:]], cwd=tree, env=environment, check=True)

        if not session.exists():
            run("cosmic-ray", "init", str(config), str(session))
        if not options.init_only:
            run("cosmic-ray", "exec", str(config), str(session))
        run("cr-rate", str(session))
    return 0


def own_tests(module: str) -> list[str]:
    """The files of tests of the faults in a module or folder, in their order."""
    own = (fault for fault in FAULTS if fault.file == module or fault.file.startswith(f"{module}/"))
    words = (word for fault in own for word in fault.tests.split())
    return [*dict.fromkeys(word for word in words if word.startswith("tests/"))]


if __name__ == "__main__":
    sys.exit(main())
