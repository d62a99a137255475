"""Random calls of attention on guarded memory: a fuzzer of memory safety that also checks every result.

    python -m tests.attack --seed 7 --calls 1000 --lanes 8        # on the CPU
    python -m tests.attack --backend cupy_raw --generation sm90   # on a CUDA device

A call follows from a seed and a number. `draw` chooses its features, sizes, memory layouts and data; tests/cases.py
builds it. `memory` (NumPy) and `device_memory` (CuPy) put guards around every array: the caller's, the results and what
a backend allocates for itself. `check` runs the call, looks at the guards, and holds the results against the definition
and against their repetition. `hostile` makes calls whose arguments change in between; these must not crash.

`worker` runs calls in a child process. A crash is a finding, which the parent, `campaign`, prints with the command that
repeats it, after it has taken away the features that the finding does not need.

`graphs` makes no calls: it holds what is proven about random expression graphs against their values.
"""

import sys
from pathlib import Path

_TESTS = str(Path(__file__).parents[1])
if _TESTS not in sys.path:  # `python -m tests.attack`; pytest has put it there
    sys.path.insert(0, _TESTS)
