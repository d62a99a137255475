"""The block of 64-bit integers that a kernel gets: which entry means what.

A tensor takes four entries: its address and the byte strides of its batch, head and token axes (elements of a token
are contiguous). Numba compiles these names in as constants. They are NumPy integers because it would compile a
function anew for each Python integer that it is called with.
"""

from __future__ import annotations

import numpy as np

(
    Q, K, V, OUT, DOUT, DQ, DK, DV, DQ_PARTIAL, LSE, DLSE, DELTA, SHIFT,
) = map(np.int64, range(0, 13 * 4, 4))  # fmt: skip

(
    COUNTER,  # next task to be taken, shared by the threads
    DONE,  # tasks that have ended (decoding)
    TASKS,
    SCRATCH,  # address of the first thread's scratch memory
    SCRATCH_BYTES,  # of each thread
    BATCH,
    HEADS,
    GROUP,  # query heads a key/value head
    N_Q,
    N_K,
    DIM,
    DIM_V,
    BLOCK_Q,
    BLOCK_K,
    SPLITS,  # backward, decoding: parts that the keys of one head are split into
    PART_KEYS,  # decoding: keys of a part, whole tiles
    PARTS,  # decoding: bytes from SCRATCH to the outputs of parts
    PART_BYTES,
    SCALE,  # bits of a float64, as the three factors of it that follow and the rate
    PACK_SCALE,  # what operands are multiplied by when they are packed
    TILE_SCALE,  # what a tile of scores is multiplied by before it is modified
    REST_SCALE,  # what scores are multiplied by in the softmax
    RATE,  # log2(e) times REST_SCALE
    LENGTHS,  # address of int64, keys of each batch entry
    OFFSETS,  # address of int64, q_offset of each batch entry
    SINKS,  # address of one number for each query head, or 0
    CLASSIFY,  # address of the generated function, or 0: every tile is FULL
    MODIFY,  # address of the generated function, or 0
    HAS_SCORE,  # whether FULL tiles need it too
    VALUES,  # address of the modification's params and arrays
    TURNED,  # tiles of arrays that it reads transposed
    MAX_GROUP,  # tiles that are classified at once
    DROPOUT,  # whether weights are dropped at all
    THRESHOLD,
    KEPT_SCALE,  # 1 / (1 - p), bits of a float64
    SEED,
    CAREFUL,  # sums leave out weights that are zero: what they would be multiplied by is not finite
    NON_FINITE,  # set by the kernel when a result is not finite
    LANES,  # elements of a vector
    PANEL,  # columns of a forward score tile: whole vectors
    PRODUCT,  # addresses of the micro-kernels (micro.py)
    PRODUCT_ADD,
    COLUMN_MAX,
    EXPONENTIALS,
    TILE_EXPONENTIALS,  # what leaves a tile's weights as pairs
    PACK_ROWS,
    PACK_ROWS_T,
    ROUND_PAIRS,
    PACK,
    UNPACK,
    WEIGHTS,
    ROW_SCORES,  # (gemv.py)
    ROW_WEIGHTS,
    ROW_VALUES,
    WORKER,  # address of the kernel
    PARALLEL_FOR,  # address of the thread pool's loop, and what it gets: a function, first, count and step of
    SHARE,  # the threads' numbers
    FIRST,
    COUNT,
    STEP,
    SIZE,
) = map(np.int64, range(13 * 4, 13 * 4 + 61))  # fmt: skip

EMPTY, PARTIAL, FULL = map(np.int64, range(3))

STRETCH = np.int64(16)
"""Tiles that decoding takes at once where nothing is masked: memory is read fastest in long stretches."""

STRIP = np.int64(16)
"""Keys or rows that are looked at together inside a PARTIAL tile; tiles begin at multiples of it."""

HEADER = (int(SIZE) * 8 + 63) // 64 * 64
"""Bytes of a block, in whole cache lines."""
