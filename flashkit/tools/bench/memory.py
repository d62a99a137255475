"""Growth of peak resident memory in a call, measured in a new process: `python -m flashkit.tools.bench.memory`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from ...spec import Direction
from .baselines import BASELINES
from .cases import Case
from .contender import with_flashkit


def memory_growth(case: Case, direction: Direction, name: str) -> int | None:
    """Bytes by which peak resident memory grows in a forward pass, or in a forward and a backward pass, of "flashkit"
    or of a baseline on the CPU. None if the system does not report it (on anything but Linux).

    A smaller call runs first in the same process: it compiles, and allocates what stays allocated. RuntimeError with
    the errors of the process if it fails.
    """
    command = [sys.executable, "-m", "flashkit.tools.bench.memory", json.dumps([asdict(case), direction, name])]
    # glibc would keep freed memory for reuse, and the growth would be less than what is used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise RuntimeError(f"measuring the memory of {name} failed:\n{done.stderr}") from None
    return None if answer is None else int(answer)


def _growth_in_this_process(case: Case, direction: Direction, name: str) -> int | None:
    from ...backends.cpu import threads

    contender = with_flashkit if name == "flashkit" else BASELINES[name]

    def step(case: Case) -> Callable[[], object]:
        arrays, count = case.arrays(), threads.count()

        def both() -> object:
            entry = contender(case, arrays, direction, count)  # for "backward" it runs the forward pass
            assert entry is not None
            return entry.call()

        return both

    step(replace(case, n_q=min(case.n_q, 256), n_k=min(case.keys, 256)))()
    call, status = step(case), Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
        before = _status_bytes(status, "VmRSS")
        results = call()
        growth = _status_bytes(status, "VmHWM") - before
    except OSError:
        return None
    del results
    return growth


def _status_bytes(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    fields, *rest = json.loads(sys.argv[1])
    print(json.dumps(_growth_in_this_process(Case(**fields), *rest)))
