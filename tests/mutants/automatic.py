"""Mutate every operator and constant of a module: cosmic-ray, on a copy of the tree.

`python -m tests.mutants.automatic flashkit/call/shape.py` begins or continues the session of a module or folder in
build/mutants, and prints the share of mutants that survived. The tests are those of the areas that have faults in the
module, without the slow ones. `cr-report SESSION --show-diff --surviving-only` shows the survivors.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from . import areas, stage
from .tree import Tree

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "mutants"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.automatic", description=__doc__)
    parser.add_argument("module", help="a file or folder of flashkit, relative to the repository")
    parser.add_argument("--init-only", action="store_true", help="count the mutants, and run nothing")
    options = parser.parse_args()
    module = options.module.rstrip("/")
    session = WORK / f"{module.removesuffix('.py').replace('/', '.')}.sqlite"
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cosmic-ray"]
    with tempfile.TemporaryDirectory(prefix="flashkit-mutants-") as folder:
        tree = Tree(ROOT, Path(folder), WORK / "kernels")
        if not (tree.copy / module).exists():
            parser.error(f"there is no {module}")
        tree.refill_cache()
        config = session.with_suffix(".toml")
        session.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            "[cosmic-ray]",
            f"module-path = {module!r}",
            f"timeout = {settings['timeout']}",
            f"excluded-modules = {settings['excluded-modules']}",
            f"test-command = '''{' '.join([sys.executable, settings['test-command'], paths(module)])}'''",
            "[cosmic-ray.distributor]",
            "name = 'local'",
        ]
        config.write_text("\n".join(lines), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(tree.copy), "FLASHKIT_CACHE_DIR": str(tree.cache)}

        def run(*command: str) -> None:
            program = Path(sys.executable).parent / command[0]
            subprocess.run([program, *command[1:]], cwd=tree.copy, env=environment, check=True)

        if not session.exists():
            run("cosmic-ray", "init", str(config), str(session))
        if not options.init_only:
            run("cosmic-ray", "exec", str(config), str(session))
        run("cr-rate", str(session))
    return 0


def paths(module: str) -> str:
    """The files of tests that the stages of the module's areas name, in their order."""
    own = [area for area in areas() if any(f.file == module or f.file.startswith(f"{module}/") for f in area.faults)]
    if not own:
        raise SystemExit(f"no area of tests/mutants has a fault in {module}, so its tests are not known")
    words = [word for area in own for text in area.stages for word in stage(text).arguments]
    return " ".join(dict.fromkeys(word for word in words if word.startswith("tests/")))


if __name__ == "__main__":
    sys.exit(main())
