"""Launch a kernel on one thread or on several.

A call from Python costs microseconds for each array that it looks into. Here the addresses of arrays are read where
NumPy keeps them: ADDRESS, from the head that specialise.py puts before this text, is the offset in a NumPy array object
of the address of its first element, the first field after Python's own (PyArrayObject in NumPy's C API).
CLOCK_MONOTONIC is that of the C library's clock_gettime.
"""

import numpy as np
from numba import njit, types

from flashkit.backends.cpu.arguments import *
from flashkit.backends.cpu.functions import entry, options
from flashkit.backends.cpu.micro_calls import *
from flashkit.backends.cpu.seq_info import keys_of
from flashkit.backends.cpu.views import (
    atomic_exchange,
    atomic_increment,
    atomic_read,
    atomic_replace,
    integer_at,
    vector,
)

WORKER_SPINS = 20_000
"""How often a worker looks for work at first: 0.1 to 0.2 ms, longer than Python needs between two calls."""

YIELDING, LOST = 3_000_000, 50_000
"""Nanoseconds for which it then looks for work and offers its core to other threads, and of a gap in this that shows
that another thread took the core. Then it sleeps. Waking it takes 5 to 50 microseconds.
"""

CALLER_SPINS = 2_000
"""How often a call looks whether a worker has ended before it sleeps: some 15 microseconds."""


# --- the pool ---------------------------------------------------------------------------------------------------------
# A call offers its work to free workers, begins itself, and takes the offer back from those that have not started when
# all work tiles are taken. So it waits for work tiles, never for a thread that the system has not run yet. No thread
# spins for long on a core that others need: perhaps the thread that is waited for does.


@njit(**options)
def wake(args, block):
    """Wake workers that have the block and sleep. All threads of a call do it first: a wake takes microseconds."""
    asleep, tile = block + 8 * NEXT_ASLEEP, block + 8 * TILE_COUNTER
    while atomic_read(asleep) < args[NUM_WORKERS] and atomic_read(tile) < args[WORK_TILES]:
        number = atomic_increment(asleep)
        worker = args[WORKERS] + 8 * WORKER_WORDS * number
        if number < args[NUM_WORKERS] and atomic_replace(worker + 8 * STATE, block + 1, block):
            call_release(integer_at(worker + 8 * RELEASE), integer_at(worker + 8 * WAKE))


@njit(**options)
def now(worker):
    call_clock(integer_at(worker + 8 * CLOCK), CLOCK_MONOTONIC, worker + 8 * SECONDS)
    return integer_at(worker + 8 * SECONDS) * 1_000_000_000 + integer_at(worker + 8 * NANOSECONDS)


@njit(**options)
def idle_core(worker, before):
    """Wait until the state is another one, for as long as no other thread needs the core; returns whether it is."""
    state = worker + 8 * STATE
    if integer_at(worker + 8 * YIELD) == 0:  # not on this system
        return False
    start = last = now(worker)
    while atomic_read(state) == before:
        for _ in range(32):
            atomic_increment(worker + 8 * SPUN)
        call_without_arguments(integer_at(worker + 8 * YIELD))
        time = now(worker)
        if time - last > LOST or time - start > YIELDING:
            return False
        last = time
    return True


@entry(types.void(types.int64))
def work(worker):
    """A worker, for ever."""
    state = worker + 8 * STATE
    spins = np.int64(0)
    while True:
        found = atomic_read(state)
        if found >= ABSENT and atomic_replace(state, found, RUNNING):
            wake(vector(found, SIZE, 8, np.int64), found)
            call_kernel(integer_at(found + 8 * KERNEL), found, atomic_increment(found + 8 * NEXT_THREAD))
            if atomic_exchange(state, DONE) == AWAITED:
                call_release(integer_at(worker + 8 * RELEASE), integer_at(worker + 8 * ENDED))
            spins = np.int64(0)
        elif spins < WORKER_SPINS:
            spins += 1
            atomic_increment(worker + 8 * SPUN)  # takes time, and nothing that another core needs
        elif idle_core(worker, found):
            spins = np.int64(0)
        elif atomic_replace(state, FREE, ASLEEP) or atomic_replace(state, DONE, DONE_ASLEEP):
            call_acquire(integer_at(worker + 8 * ACQUIRE), integer_at(worker + 8 * WAKE), 1)
            spins = np.int64(0)


@njit(**options)
def offer(worker, block):
    """Give a worker the block if it is free; returns whether it was."""
    state = worker + 8 * STATE
    if atomic_read(state) == FREE and atomic_replace(state, FREE, block):
        return True
    return atomic_read(state) == ASLEEP and atomic_replace(state, ASLEEP, block + 1)


@njit(**options)
def finish(worker, block):
    """Take back what the worker has not started, or wait for it."""
    state = worker + 8 * STATE
    if atomic_replace(state, block + 1, ASLEEP) or atomic_replace(state, block, FREE):
        return
    spins = 0
    while atomic_read(state) == RUNNING and spins < CALLER_SPINS:
        spins += 1
        atomic_increment(worker + 8 * SPUN)
    if atomic_replace(state, RUNNING, AWAITED):
        call_acquire(integer_at(worker + 8 * ACQUIRE), integer_at(worker + 8 * ENDED), 1)
    if not atomic_replace(state, DONE, FREE):
        atomic_exchange(state, ASLEEP)


@njit(**options)
def run_on(args, block, threads):
    """Run the kernel on up to so many threads, this one among them."""
    args[NEXT_THREAD], args[OFFERED], args[NEXT_ASLEEP] = 1, 0, args[NUM_WORKERS]
    free, worker, end = threads - 1, args[WORKERS], args[WORKERS] + 8 * WORKER_WORDS * args[NUM_WORKERS]
    asleep = 0
    while free > 0 and worker < end:
        if offer(worker, block):
            vector(worker, WORKER_WORDS, 8, np.int64)[PREVIOUS] = args[OFFERED]
            args[OFFERED] = worker
            free -= 1
            asleep += atomic_read(worker + 8 * STATE) == block + 1
        worker += 8 * WORKER_WORDS
    if asleep:  # else no thread looks at all workers' words, which takes many threads longer than a small call
        atomic_exchange(block + 8 * NEXT_ASLEEP, 0)
        wake(args, block)
    call_kernel(args[KERNEL], block, 0)
    while args[OFFERED] != 0:
        worker = args[OFFERED]
        args[OFFERED] = integer_at(worker + 8 * PREVIOUS)  # before another call has the worker
        finish(worker, block)


# --- calls ------------------------------------------------------------------------------------------------------------


@njit(**options)
def split_keys(args, threads):
    """Decoding: a few work tiles for each thread, of split keys or of heads with few. Returns the threads."""
    longest, keys = np.int64(0), np.int64(0)
    for b in range(args[BATCH]):
        n = keys_of(args, b)
        longest, keys = max(longest, n), keys + n
    if keys < args[SERIAL_KEYS]:
        threads = np.int64(1)
    if args[SPLIT_KEYS] == 0:
        num_splits = np.int64(1)
        if threads > 1:
            num_splits = max(num_splits, min(args[MAX_SPLITS], longest // args[MIN_SPLIT_KEYS]))
        tiles = max((longest + num_splits * args[BLOCK_K] - 1) // (num_splits * args[BLOCK_K]), 1)  # of a split
        args[SPLIT_KEYS] = tiles * args[BLOCK_K]
    args[NUM_SPLITS] = max((longest + args[SPLIT_KEYS] - 1) // args[SPLIT_KEYS], 1)
    heads, per_tile = args[BATCH] * args[HEADS] // args[GROUP], np.int64(1)
    if args[NUM_SPLITS] == 1:
        most = heads if threads == 1 else heads // (4 * threads)
        per_tile = max(per_tile, min(args[MIN_SPLIT_KEYS] // max(longest, 1), most))
    args[HEADS_PER_TILE] = per_tile
    args[WORK_TILES] = (heads + per_tile - 1) // per_tile * args[NUM_SPLITS]
    return threads


@njit(**options)
def start(args, block, threads):
    args[TILE_COUNTER] = args[SPLITS_DONE] = 0
    if args[MAX_SPLITS] != 0:
        threads = split_keys(args, threads)
    if threads == 1:
        call_kernel(args[KERNEL], block, 0)
    else:
        run_on(args, block, threads)


@entry(types.void(types.int64, types.int64))
def launch(block, threads):
    """Run a complete argument block."""
    start(vector(block, SIZE, 8, np.int64), block, threads)


@njit(**options)
def copy_block(template, block):
    source, args = vector(template, SIZE, 8, np.int64), vector(block, SIZE, 8, np.int64)
    for i in range(SIZE):
        args[i] = source[i]
    return args


@njit(**options)
def start_on_rows(args, block, threads, kernel):
    """Run bwd_preprocess or bwd_postprocess."""
    usual = args[KERNEL], args[BLOCK_Q], args[Q_TILES], args[WORK_TILES]
    args[KERNEL], args[BLOCK_Q], args[Q_TILES], args[WORK_TILES] = (
        kernel, ROW_BLOCK, args[ROW_TILES], args[ROW_WORK_TILES]
    )  # fmt: skip
    start(args, block, max(min(threads, args[WORK_TILES]), 1))
    args[KERNEL], args[BLOCK_Q], args[Q_TILES], args[WORK_TILES] = usual


@njit(**options)
def data(arrays, i):
    """The address of the first element of an array. arrays: where the addresses of NumPy array objects lie."""
    return integer_at(integer_at(arrays + 8 * i) + ADDRESS)


@entry(types.void(*[types.int64] * 6))
def pull_back(template, block, threads, stop, dq_accum, arrays):
    """Run the backward pass with a copy of the template and q, k, v, out, lse, dout, dlse, dq, dk, dv, and the values
    that PER_CALL names. dq_accum: its address, or 0 where dQ is summed in place. `block`: memory for the copy, followed
    by bwd_lse, delta and scratch memory; in the template these addresses are distances from it.
    """
    args = copy_block(template, block)
    args[Q], args[K], args[V] = data(arrays, 0), data(arrays, 1), data(arrays, 2)
    args[OUT], args[LSE], args[DOUT] = data(arrays, 3), data(arrays, 4), data(arrays, 5)
    if args[DLSE] != 0:
        args[DLSE] = data(arrays, 6)
    args[DQ], args[DK], args[DV] = data(arrays, 7), data(arrays, 8), data(arrays, 9)
    if args[PER_CALL] & 8:
        args[VALUES] = data(arrays, 10)
    args[DQ_ACCUM] = dq_accum if dq_accum != 0 else args[DQ]
    args[BWD_LSE] += block
    args[DELTA] += block
    args[SCRATCH] += block
    args[STOP] = stop
    start_on_rows(args, block, threads, args[BWD_PREPROCESS])
    for nonfinite in range(2):
        # P = 0 times an infinity that the mask hides is NaN. Then, rarely, all is computed again by the non-finite
        # fallback, which skips such terms.
        args[NONFINITE], args[IS_NONFINITE] = nonfinite, 0
        start(args, block, max(min(threads, args[WORK_TILES]), 1))
        start_on_rows(args, block, threads, args[BWD_POSTPROCESS])
        if args[IS_NONFINITE] == 0:
            break


@entry(types.void(*[types.int64] * 5))
def call(template, block, threads, stop, arrays):
    """Run a copy of the template, in `block` before scratch memory, with q, k, v, out, lse and what PER_CALL names."""
    args = copy_block(template, block)
    args[Q], args[K], args[V] = data(arrays, 0), data(arrays, 1), data(arrays, 2)
    args[OUT], args[LSE], end = data(arrays, 3), data(arrays, 4), 5
    if args[PER_CALL] & 1:
        args[KV_LENGTHS], args[Q_OFFSETS], end = data(arrays, 5), data(arrays, 6), 7
    if args[PER_CALL] & 2:
        args[PAGE_TABLE], end = data(arrays, 7), 8
    if args[PER_CALL] & 4:
        args[K_SCALE], args[V_SCALE], end = data(arrays, end) - args[K], data(arrays, end + 1) - args[V], end + 2
    if args[PER_CALL] & 8:
        args[VALUES] = data(arrays, end)
    args[SCRATCH], args[STOP] = block + HEADER, stop
    start(args, block, threads)
