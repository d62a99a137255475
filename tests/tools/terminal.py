"""Run a program on a real terminal of 80 columns."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 80


def written(arguments: Sequence[str], timeout: float = 120, **variables: str) -> tuple[int, str]:
    """Run Python with these arguments on a terminal; the exit status, and everything that it wrote, without colours."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "tools", ROOT / "tests")))
    environment = os.environ | {"TERM": "xterm", "PYTHONPATH": path, "COLUMNS": str(COLUMNS)} | variables
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=ROOT) as running:
        os.close(theirs)
        parts = []
        with suppress(OSError):  # Linux: the other end is closed
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        os.close(ours)
        status = running.wait(timeout)
    return status, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(parts).decode())


def on_terminal(arguments: Sequence[str], **variables: str) -> tuple[int, list[str]]:
    """The exit status, and the lines that the terminal shows at the end."""
    status, text = written(arguments, **variables)
    return status, [line.rstrip().rpartition("\r")[2].rstrip() for line in text.split("\n")]
