"""Judge the faults: python -m tests.mutants [--only TEXT] [--jobs N] [--list].

Each job has a copy of the tree and caches of its own, so the checkout stays as it is. The tests of a fault run without
it, too: what fails anyway judges nothing, and takes no longer than a fault may.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from . import Fault
from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


class Outcome(NamedTuple):
    """passed; failed, by the first test that did; or nothing, with what pytest said."""

    kind: str
    by: str
    seconds: float


def copied(root: Path, folder: Path) -> Path:
    """A copy of the checkout's files, tracked and new ones."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (source := root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    return folder


def run(tree: Path, tests: str, kernels: Path, limit: float = 3600) -> Outcome:
    """Run tests in a copy until the first failure. kernels: the cache of compiled ones."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *shlex.split(tests)]
    environment = {n: x for n, x in os.environ.items() if not n.startswith(("FLASHKIT_", "NUMBA_", "PYTEST_"))}
    environment |= {
        "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "FLASHKIT_CACHE_DIR": str(kernels),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_WAIT_POLICY": "passive",
    }  # fmt: skip
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=tree, env=environment, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return Outcome("failed", f"no end within {limit:.0f} s", limit)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it leads its own group; programs that it started are in it
        process.wait()
    seconds = time.monotonic() - start
    failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
    if process.returncode == 0:
        return Outcome("passed", "", seconds)
    if failed or process.returncode < 0:
        return Outcome("failed", failed[1] if failed else "a crash", seconds)
    return Outcome("nothing", output[-2000:], seconds)


def judge(root: Path, faults: Iterable[Fault], jobs: int = 1) -> int:
    """Print what becomes of each fault; the number of those that are not killed."""
    with tempfile.TemporaryDirectory(prefix="flashkit-mutants-", ignore_cleanup_errors=True) as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            trees.put(copied(root, Path(folder, str(job), "tree")))

        @cache  # a race runs tests twice, and no more
        def plain(tests: str) -> Outcome:
            tree = copied(root, Path(tempfile.mkdtemp(dir=folder)))
            return run(tree, tests, tree.parent / "kernels")

        def of(fault: Fault) -> bool:
            without = plain(fault.tests)
            if without.kind != "passed":
                print(f"NOT JUDGED {fault}\n  fails without it, or tests nothing: {without.by}", flush=True)
                return False
            tree = trees.get()
            path, kernels = tree / fault.file, tree.parent / "kernels"
            text = path.read_text(encoding="utf-8")
            try:
                path.write_text(fault.applied(text), encoding="utf-8")
                found = run(tree, fault.tests, kernels, 60 + 3 * without.seconds)
            finally:
                path.write_text(text, encoding="utf-8")
                shutil.rmtree(kernels, ignore_errors=True)  # a fault's kernels serve no other
                trees.put(tree)
            by = f" by {found.by}" if found.kind == "failed" else ""
            print(f"{'KILLED' if by else 'SURVIVED'} {fault}{by} ({found.seconds:.0f} s)", flush=True)
            return bool(by)

        with ThreadPoolExecutor(jobs) as pool:
            return sum(not killed for killed in pool.map(of, faults))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="faults whose line in --list contains this text")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at a time")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    chosen = [fault for fault in FAULTS if options.only in str(fault)]
    if not chosen:
        parser.error(f"no fault has {options.only!r} in its line; see --list")
    if options.list:
        print(*chosen, sep="\n")
        return 0
    return min(judge(ROOT, chosen, options.jobs), 1)


if __name__ == "__main__":
    sys.exit(main())
