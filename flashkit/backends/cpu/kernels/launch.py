"""Start a kernel on one thread or on several. A call of Python's costs microseconds for each array that it looks into;
here the addresses of arrays are read where NumPy keeps them.

ADDRESS, from the head that specialise.py puts before this text, is the place in a NumPy array object of the address of
its first element: the first field after Python's own (PyArrayObject in NumPy's C API).
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.memory import call_parallel_for, call_worker, integer_at, vector


@entry(types.void(*[types.int64] * 4))
def share(numbers, counts, steps, block):
    """What a thread of the pool does: be the threads of these numbers, one after the other (mostly one)."""
    for thread in range(integer_at(numbers), integer_at(numbers) + integer_at(counts)):
        call_worker(integer_at(block + 8 * WORKER), block, thread)


@njit(**options)
def start(args, block, threads):
    args[COUNTER] = args[DONE] = 0
    if threads == 1:
        call_worker(args[WORKER], block, 0)
    else:
        args[FIRST], args[COUNT], args[STEP] = 0, threads, 1
        first, count, step = block + 8 * FIRST, block + 8 * COUNT, block + 8 * STEP
        call_parallel_for(args[PARALLEL_FOR], args[SHARE], first, count, step, block, 0, 1, threads)


@entry(types.void(types.int64, types.int64))
def launch(block, threads):
    """Run a prepared argument block."""
    start(vector(block, SIZE, 8, np.int64), block, threads)


@entry(types.void(*[types.int64] * 8))
def call(template, block, threads, q, k, v, out, lse):
    """Run a copy of the template with these NumPy arrays. `block`: room for the copy, scratch memory after it."""
    source, args = vector(template, SIZE, 8, np.int64), vector(block, SIZE, 8, np.int64)
    for i in range(SIZE):
        args[i] = source[i]
    args[Q], args[K], args[V] = integer_at(q + ADDRESS), integer_at(k + ADDRESS), integer_at(v + ADDRESS)
    args[OUT], args[LSE] = integer_at(out + ADDRESS), integer_at(lse + ADDRESS)
    args[SCRATCH] = block + HEADER
    start(args, block, threads)
