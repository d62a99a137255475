# What tensor-core kernels share: types, tiles in shared memory, the rows of a lane.
#
# A tile in shared memory is [chunk][row][128 bytes], a chunk being 64 columns of 16 bits. It begins at a multiple of
# 1024 bytes. Its 16-byte vectors are permuted within eight rows, vector v of row r lying at v ^ (r % 8), the 128-byte
# swizzle: eight rows read at the same column lie in different banks.
#
# A generation adds: ROWS of a lane, 2 or 4; WARP_ROWS, 16 or 32; GROUP_THREADS, which share a tile of rows.

from numba.cuda.types import int32, uint16

from flashkit.backends.numba_cuda.fragments import *
from flashkit.backends.numba_cuda.ptx import *

i32, u32, u64 = np.int32, np.uint32, np.uint64
YES, NO = np.bool_(True), np.bool_(False)  # run-time values; literals compile functions again
LN2 = np.float32(0.6931471805599453)

CHUNK_ROW, VEC_BYTES = 128, 16  # bytes
VEC_ELEMENTS, PER_CHUNK = VEC_BYTES // ITEMSIZE, CHUNK_ROW // ITEMSIZE


def padded(dim):
    """Columns of a product; those past `dim` are zeros."""
    return -(-dim // 16) * 16


def chunks(dim):
    return -(-dim // PER_CHUNK)


pack = pack_float16 if STORAGE == "float16" else pack_bfloat16
load_word, store_word = load_from("shared", int32), store_to("shared", int32)
store_half = store_to("shared", uint16)


@device
def swizzled(row, vec):
    """Offset of a 16-byte vector of a row within a chunk."""
    return row * CHUNK_ROW + (vec ^ (row & 7)) * VEC_BYTES


@device
def first_of(x, _):
    return x[0]


@device
def second_of(x, _):
    return x[1]


@device
def uniform(x):
    """A warp-uniform value, declared as such: the assembler keeps what depends on it in uniform registers."""
    return from_lane(x, 0)


@device
def row_of_lane(j):
    """A lane's row `j` within the tile of its warps."""
    return thread() % GROUP_THREADS // 32 * WARP_ROWS + 8 * j + thread() % 32 // 4
