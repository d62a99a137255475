"""A copy of the checkout that may have a fault, and stages of tests that run on it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from . import Fault, stage


class Outcome(NamedTuple):
    """How a stage ended: 'passed', 'failed', 'endless' or 'error'; the tests that failed, or what pytest said."""

    kind: str
    tests: tuple[str, ...] = ()
    said: str = ""


class Stopped(Exception):
    """The run was broken off."""


class Tree:
    """The checkout's files, tracked and new ones, in `folder`, with a cache of kernels beside it.

    warm: kernels that tests without a fault have compiled; the cache begins with them.
    """

    def __init__(self, root: Path, folder: Path, warm: Path) -> None:
        self.root, self.copy, self.cache, self.warm = root, folder / "tree", folder / "cache", warm
        self._changes = 0
        self._stopped = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        total = hashlib.sha256()
        for name in sorted(_files(root)):
            source, target = root / name, self.copy / name
            if source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
                if name.startswith(("flashkit/", "tests/")) and not name.startswith("tests/mutants/"):
                    total.update(name.encode() + b"\0" + source.read_bytes())
        self.digest = total.hexdigest()[:16]

    @contextmanager
    def fault(self, fault: Fault) -> Iterator[None]:
        """Within the block, the copy has the fault."""
        path = self.copy / fault.file
        text = path.read_text(encoding="utf-8")
        self._store(path, fault.applied(text))
        try:
            yield
        finally:
            self._store(path, text)

    def _store(self, path: Path, text: str) -> None:
        """With a time of its own: Python tells bytecode of former sources by times in seconds, and by sizes."""
        path.write_text(text, encoding="utf-8")
        self._changes += 1
        os.utime(path, (self._changes, self._changes))

    def refill_cache(self) -> None:
        """Give the next runs the kernels of the code without faults, and nothing that a fault has left."""
        _copy_files(self.warm, self.cache)

    def stop(self) -> None:
        """From another thread: end what runs; what would run next is `Stopped`."""
        self._stopped.set()
        if process := self._process:
            _end(process)

    def run(
        self, text: str, selection: str, timeout: float, left_out: Iterable[str] = (), workers: int = 0,
        cache: Path | None = None,
    ) -> Outcome:  # fmt: skip
        """Run a stage until its first failure, or with workers to its end. left_out: tests that fail anyway."""
        if self._stopped.is_set():
            raise Stopped
        chosen = stage(text)
        marks = f"({chosen.marks}) and {selection}" if chosen.marks else selection
        how = ["-p", "xdist", "-n", str(workers)] if workers > 1 else [] if workers else ["-x"]
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *how,
            *chosen.arguments, *(f"--deselect={name}" for name in left_out), "-m", marks,
        ]  # fmt: skip
        environment = {n: x for n, x in os.environ.items() if not n.startswith(("FLASHKIT_", "NUMBA_", "PYTEST_"))}
        paths = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != self.root
        ]
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(self.copy), *paths]),
            "FLASHKIT_CACHE_DIR": str(cache or self.cache), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "OMP_WAIT_POLICY": "passive", **chosen.settings,
        }  # fmt: skip
        self._process = process = subprocess.Popen(
            command, cwd=self.copy, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Outcome("endless", said=f"no end within {timeout:.0f} s")
        finally:
            _end(process)
            self._process = None
            process.wait()
        if self._stopped.is_set():
            raise Stopped
        if process.returncode in (0, 5):  # 5: the selection leaves no test
            return Outcome("passed")
        if process.returncode in (3, 4):
            return Outcome("error", said=f"pytest cannot run {text!r}:\n{output}")
        found = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, re.MULTILINE)
        return Outcome("failed", tuple(found), f"pytest ended with status {process.returncode}")


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads its own group; programs that it started are in it


def _files(root: Path) -> Iterator[str]:
    """Names of the checkout's files: those that git does not ignore, or all in a copy that is no repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    with suppress(OSError):
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if (root / ".git").exists() and listed.returncode == 0:
            yield from filter(None, listed.stdout.split("\0"))
            return
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in ("__pycache__", "build", "shared") and name[0] != "."]
        yield from (os.path.relpath(os.path.join(folder, name), root) for name in names)


def _copy_files(source: Path, target: Path) -> None:
    """Make the files of the target those of the source; none is copied that is there by size and time.

    Others may write to the source meanwhile: what is gone when its turn comes was no kernel yet.
    """
    left = {path.relative_to(target): path for path in target.rglob("*") if path.is_file()}
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in source.rglob("*"):
        with suppress(FileNotFoundError):
            if path.is_dir():
                (target / path.relative_to(source)).mkdir(mode=0o700, exist_ok=True)
                continue
            right, there = path.stat(), left.pop(path.relative_to(source), None)
            found = there.stat() if there else None
            if found is None or (right.st_size, right.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
                shutil.copy2(path, target / path.relative_to(source))
    for path in left.values():
        path.unlink()
