"""The argument block: one 64-bit word per entry, numbered once for the kernels and for the host.

A kernel gets the address of the block. `word()` numbers a scalar. `tensor()` numbers the four words of a tensor: its
address and the byte strides of its batch, head and token axes; elements of a token are contiguous. A float is stored as
the bits of a float64.

The numbers are NumPy integers: Numba compiles them in as constants, and would compile a function again for each Python
integer that it is called with.
"""

from __future__ import annotations

from itertools import count

import numpy as np

_free = count()


def word() -> np.int64:
    return np.int64(next(_free))


def tensor() -> np.int64:
    first, *_ = word(), word(), word(), word()
    return first


# --- tensors ----------------------------------------------------------------------------------------------------------

Q = tensor()
K = tensor()
V = tensor()
K_SCALE = tensor()  # of keys of 8 bits, float32; its address is the bytes from K to it
V_SCALE = tensor()  # likewise
K_PE = tensor()  # the last DIM_PE columns of the keys, if they lie apart from K
OUT = tensor()
LSE = tensor()
ENTROPY = tensor()  # its address is 0 where the pass computes no statistics
MAX_LOGIT = tensor()
DOUT = tensor()
DLSE = tensor()
DQ = tensor()  # a gradient; with tangents, which DOUT and DLSE get, one of them, whose address is 0 where it is 0
DK = tensor()
DV = tensor()
DQ_ACCUM = tensor()  # (num_splits, B, H, N_Q, D): sums of dQ in the accumulator dtype
DQ_SPLIT_STRIDE = word()  # bytes
BWD_LSE = tensor()  # natural logarithm; +inf in rows without a visible key, whose P is then 0
DELTA = tensor()  # rowsum(dO * O) - dLSE

# --- sizes; seq_info.py reads those of a sequence ---------------------------------------------------------------------

BATCH = word()
HEADS = word()
GROUP = word()  # query heads per key/value head
N_Q = word()
N_K = word()
KV_LENGTHS = word()  # address of int64 (B,)
Q_OFFSETS = word()  # address of int64 (B,)
CU_SEQLENS_Q = word()  # address of int64 (B + 1,), or 0: each sequence has N_Q rows of its own
CU_SEQLENS_K = word()  # likewise
PAGE_TABLE = word()  # address of int64 (B, TABLE_WIDTH), or 0: keys follow each other
TABLE_WIDTH = word()
PAGES = word()
PAGE = word()  # keys of a page
PAGES_FOLLOW = word()  # whether a head's keys in page p + 1 follow those in page p at their own stride
PER_CALL = word()  # what each call brings: 1 lengths and offsets, 2 a page table, 4 scales of keys and values, 8 VALUES
DIM = word()
DIM_V = word()
DIM_PE = word()  # 0: K has all columns

# --- tiles and work tiles; tile_scheduler.py reads the latter ---------------------------------------------------------

BLOCK_Q = word()
BLOCK_K = word()
PANEL = word()  # columns of a forward score tile: whole vectors
LANES = word()  # elements per vector
LEFT_WORDS = word()  # bf16 pairs: rows of left operands are padded to a multiple of this many words
TILE_COUNTER = word()  # next work tile, shared by the threads
SPLITS_DONE = word()  # split-KV: work tiles that are complete
WORK_TILES = word()
ROW_WORK_TILES = word()  # of bwd_preprocess and bwd_postprocess
Q_TILES = word()  # query tiles per head; of all sequences, some of them empty, where these are packed
ROW_TILES = word()  # likewise, of ROW_BLOCK rows
NUM_SPLITS = word()  # split-KV in decoding; dQ accumulators per head in the backward pass
SERIAL_ENTRIES = word()  # backward: batch entries that a work tile goes over in turn, one or all of them
SERIAL_HEADS = word()  # likewise key/value heads
SPLIT_KEYS = word()  # decoding: keys per split, whole tiles; 0 where launch.py computes it for each call
HEADS_PER_TILE = word()  # decoding: key/value heads of a work tile, where each has one split
TILES_IN_CACHE = word()  # decoding: tiles of keys whose values, if they are views of the keys, are still in L2
MAX_SPLITS = word()  # decoding: the most splits, from which launch.py computes their number for each call; else 0
MIN_SPLIT_KEYS = word()  # decoding: the fewest keys of a work tile, if there are more
SERIAL_KEYS = word()  # decoding: with fewer keys of all sequences, one thread computes them

# --- scratch memory ---------------------------------------------------------------------------------------------------

SCRATCH = word()  # address of the first thread's
SCRATCH_BYTES = word()  # per thread
PARTIALS = word()  # decoding: byte offset from SCRATCH of the splits' o_partial, m and l
PARTIAL_BYTES = word()  # per split

# --- softmax ----------------------------------------------------------------------------------------------------------

SCALE = word()  # = PACK_SCALE * TILE_SCALE * SOFTMAX_SCALE
PACK_SCALE = word()  # applied when Q or K is packed
TILE_SCALE = word()  # applied to a tile of scores before it is modified
SOFTMAX_SCALE = word()  # applied inside the softmax
SOFTMAX_SCALE_LOG2 = word()  # SOFTMAX_SCALE * log2(e)
SINKS = word()  # address of (H,), or 0

# --- modifications and dropout ----------------------------------------------------------------------------------------

CLASSIFY = word()  # address of the generated function, or 0: every tile is FULL
MODIFY = word()  # address of the generated function, or 0
VISIT_DS = word()  # address of the generated function, or 0
HAS_SCORE = word()  # whether FULL tiles are modified too
VALUES = word()  # address of the modification's scalars and arrays
TRANSPOSED_TILES = word()  # tiles of arrays that `modify` transposes into scratch memory
MAX_GROUP = word()  # tiles that are classified at once
DROPOUT = word()  # 1 where P is dropped
DROPOUT_THRESHOLD = word()
DROPOUT_SCALE = word()  # 1 / (1 - p)
SEED = word()
DROPOUT_ROW = word()  # row, key and head at which the counter begins
DROPOUT_KEY = word()
DROPOUT_HEAD = word()

# --- the non-finite fallback ------------------------------------------------------------------------------------------

NONFINITE = word()  # backward: 1 in the second pass, whose products skip factors of 0
IS_NONFINITE = word()  # backward: set by the kernel where a gradient is not finite

# --- addresses of micro-kernels (micro/), by their names in capitals --------------------------------------------------

GEMM = word()
GEMM_ADD = word()
ONLINE_SOFTMAX = word()
ONLINE_SOFTMAX_BF16_PAIRS = word()
ONLINE_SOFTMAX_STATS = word()
SOFTMAX_BACKWARD = word()
SOFTMAX_BACKWARD_BF16_PAIRS = word()
PACK_TRANSPOSED = word()
UNPACK_TRANSPOSED = word()
PAD_ROWS = word()
PACK_ROWS = word()
PACK_ROWS_T = word()
ROUND_BF16_PAIRS = word()
ATTEND_BF16_PAIRS = word()
BEGIN_PRODUCTS = word()
END_PRODUCTS = word()
GEMV_QK = word()
GEMV_SOFTMAX = word()
GEMV_PV = word()

# --- the launch (kernels/launch.py) ---------------------------------------------------------------------------

KERNEL = word()  # address of the kernel
BWD_PREPROCESS = word()  # of those before and after it in the backward pass
BWD_POSTPROCESS = word()
STOP = word()  # address of an integer, or 0: where it is not 0, kernels end early and leave results undefined
WORKERS = word()  # address of the pool's workers, each of WORKER_WORDS words, and their number
NUM_WORKERS = word()
NEXT_THREAD = word()  # the number of the next thread that begins
OFFERED = word()  # address of the last worker that the block was offered to, or 0
NEXT_ASLEEP = word()  # the number of the next worker that is woken if it sleeps

SIZE = word()

HEADER = (int(SIZE) * 8 + 63) // 64 * 64
"""Bytes of a block, in whole cache lines."""

# --- the words of a worker of the pool (kernels/launch.py) -----------------------------------------------------------

WORKER_WORDS = np.int64(24)  # three cache lines, of which others write the first

STATE = np.int64(0)
"""One of those below, or the address of the waiting worker's argument block, plus 1 where it sleeps: wake it."""

PREVIOUS = np.int64(1)  # address of the worker that the same block was offered to before, or 0
WAKE, ENDED, ACQUIRE, RELEASE = map(np.int64, range(8, 12))  # two locks and their functions
SPUN, YIELD, CLOCK, SECONDS, NANOSECONDS = map(np.int64, range(12, 17))  # a counter, two functions of C, and a time

FREE, ASLEEP, RUNNING, AWAITED, DONE, DONE_ASLEEP, ABSENT = map(np.int64, range(7))

# --- constants of the kernels -----------------------------------------------------------------------------------------

EMPTY, PARTIAL, FULL = map(np.int64, range(3))
"""States of a tile: no pair visible, some, all."""

STRIP = np.int64(16)
"""Keys or rows that are classified together inside a PARTIAL tile; tiles begin at multiples of it."""

ROW_BLOCK = np.int64(256)
"""Rows of a work tile of bwd_preprocess and bwd_postprocess."""

PREFETCHED_LINES = np.int64(16)
"""Cache lines of a page that are read ahead; the hardware follows from there."""

TILES_PER_STRETCH = np.int64(16)
"""FULL tiles that decoding takes at once: long reads are the fastest. Of values in the keys, TILES_IN_CACHE."""
