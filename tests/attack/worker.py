"""A child process that makes calls of a run and prints a line of JSON before and after each of them."""

import faulthandler
import json
import os
import sys
import traceback
from collections import deque
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from . import check, draw


class NumpyMemory:
    """memory.py, for NumPy's arrays."""

    xp = np

    def __init__(self) -> None:
        from flashkit.backends.cpu import arguments, launch, passes, scratch_pool, threads

        from . import memory

        self._memory = memory

        class Exact:
            """Scratch memory that nothing surrounds but guards."""

            def __init__(self, size: int) -> None:
                self.array, self.size = np.empty(size, np.uint8), size
                self.address = self.array.ctypes.data
                assert size % 64 != 0 or self.address % 64 == 0  # dq_accum needs no whole cache lines

        # Scratch memory is not shared between calls, and ends where its last region does.
        scratch_pool.Scratch, scratch_pool._free = Exact, deque(maxlen=0)  # type: ignore[misc, assignment]
        launch.per_thread = passes.per_thread = lambda size: launch.rounded(size, 64)  # type: ignore[attr-defined]
        threads.SERIAL_FLOPS = 0  # FLASHKIT_NUM_THREADS alone decides
        # The pool outlives calls, so its memory is none of a call's, which the guards make read-only.
        threads.set_pool(np.empty(int(arguments.SIZE), np.int64))

    def guarded(self, seed: int) -> AbstractContextManager[Any]:
        return self._memory.guarded(seed)

    def read_only(self, but: Any) -> AbstractContextManager[Any]:
        return self._memory.GUARD.read_only(but=but)

    def seen_damage(self) -> list[str]:
        return self._memory.GUARD.seen_damage()


def memory_of(backend: str, sanitized: bool) -> Any:
    """The guards of a backend's arrays."""
    if backend in draw.ON_CPU:
        return NumpyMemory()
    from .device_memory import DeviceMemory

    return DeviceMemory(sanitized)


def main(task: dict[str, Any]) -> None:
    """Make the calls of a task: either `calls`, choices, or those numbered from `first` to `last` of a seed."""
    faulthandler.enable()
    backend, stack = task["backend"], ExitStack()
    if os.environ.get("FLASHKIT_CPU_BF16") == "emulate":
        import amx_emulation  # noqa: F401  (which brings the method)
    emulates = "FLASHKIT_TEST_EMULATED" in os.environ
    if emulates:
        import emulator

        from flashkit.backends.cuda_common import verify

        stack.enter_context(emulator.emulated(sms=int(os.environ["FLASHKIT_TEST_EMULATED"])))
        verify.check = lambda *_: None  # type: ignore[assignment]  # launches of its own
    cuda = backend not in draw.ON_CPU
    memory = memory_of(backend, task.get("sanitized", False))
    compiled = draw.pool(task["seed"], task["graphs"], cuda)
    numbers = range(task.get("first", 0), task.get("last", 0))
    given = ((n, draw.call(task["seed"], n, compiled, cuda) | task.get("fixed", {})) for n in numbers)
    for number, choice in enumerate(task["calls"]) if "calls" in task else given:
        if emulates and choice.get("hostile") in ("writer", "signals"):  # one thread at a time emulates
            choice = choice | {"hostile": "contents"}
        say(begin=number, choice=choice)
        try:
            found = check.problems(choice, backend, memory)
        except NotImplementedError as error:  # flashkit.UnsupportedError, and what the emulated device lacks
            say(end=number, refused=str(error))
            continue
        except Exception as error:
            say(end=number, problems=[f"{type(error).__name__}: {error}", traceback.format_exc(limit=-6)])
            if cuda:
                break  # the device may be unusable from here on
            continue
        say(end=number, problems=found)
    sys.stdout.flush()
    os._exit(0)  # arrays in guarded memory may outlive what frees them


def say(**line: Any) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
