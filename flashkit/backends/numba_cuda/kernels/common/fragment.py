# What kernels on tensor cores share: numbers, tiles in shared memory, which rows a lane has, which work a block takes.
#
# A tile in shared memory is a row of chunks, each of 64 columns of 16 bits: [chunk][row][128 bytes], begins on 1024
# bytes, and its 16-byte units are permuted within eight rows, unit u of row r lying at u ^ (r % 8) ("128-byte
# swizzle"): so eight rows read at the same column lie on different banks.
#
# Constants that a generation adds: ROWS, of a lane, 2 or 4; WARP_ROWS, 16 or 32; GROUP_THREADS, which share a tile
# of rows.

from numba.cuda.types import int32, uint16

from flashkit.backends.numba_cuda.fragments import *
from flashkit.backends.numba_cuda.ptx import *

i32, u32, u64 = np.int32, np.uint32, np.uint64
YES, NO = np.bool_(True), np.bool_(False)  # of a type: for True and False what is called is compiled apart
LN2 = np.float32(0.6931471805599453)

CHUNK_ROW, VEC_BYTES = 128, 16  # bytes
VEC_ELEMENTS, PER_CHUNK, IS_FLOAT32 = VEC_BYTES // ITEM, CHUNK_ROW // ITEM, ITEM == 4  # elements; float32


def padded(dim):
    """Columns that are multiplied; those past `dim` are zeros."""
    return -(-dim // 16) * 16


def chunks(dim):
    return -(-dim // PER_CHUNK)


pack = pack_float16 if STORAGE == "float16" else pack_bfloat16
load_word, store_word = load_from("shared", int32), store_to("shared", int32)
store_half = store_to("shared", uint16)


if IS_FLOAT32:

    @device
    def store_element(address, x):
        """A number as an element of shared memory."""
        store_word(address, as_int(x))

else:

    @device
    def store_element(address, x):
        store_half(address, pack(x, ZERO))


@device
def swizzled(row, unit):
    """Where a unit of a row of a chunk is."""
    return row * CHUNK_ROW + (unit ^ (row & 7)) * VEC_BYTES


@device
def first_of(x, _):
    return x[0]


@device
def second_of(x, _):
    return x[1]


@device
def uniform(x):
    """A number that is the same in all lanes of a warp; said so to the assembler, which keeps what depends on it in
    uniform registers."""
    return from_lane(x, 0)


@device
def row_of_lane(j):
    """A lane's row number j among those of its threads' tile."""
    return thread() % GROUP_THREADS // 32 * WARP_ROWS + 8 * j + thread() % 32 // 4


# --- which work -------------------------------------------------------------------------------------------------------
#
# An item is (batch entry, first of its PACK_GQA heads, first of its BLOCK_Q rows).


@device
def num_work_tiles(p):
    rows = (p.n_q * PACK_GQA + BLOCK_Q - 1) // BLOCK_Q
    return i32(rows * (p.heads // PACK_GQA) * p.batch)


@device
def tile_coord(index, early, every, most):
    """(tile, head among those of all batch entries) that come as number `index` of the tiles of `every` heads: `most`
    heads at a time, tile after tile. Of each head the tiles from number `early` on come at the very end, where they
    even out when blocks finish. Unsigned numbers.
    """
    if index < u32(early * every):
        first = u32(index // u32(most * early) * most)
        rest = u32(index - first * early)
        size = u32(min(every - first, most))
        tile = u32(rest // size)
        head = u32(first + rest - tile * size)
    else:
        tile = u32(index // every)
        head = u32(index - tile * every)
    return tile, head


@device
def tiles_before_lpt_tail(tiles):
    """How many of a head's tiles come early: under a mask, where those that come first have most to do, a quarter does
    not. Not of tiles that are looked up: the last ones have as much to do, and what all heads read and add to does not
    stay in the L2 cache.
    """
    return u32(tiles - tiles // u32(4)) if HAS_MASK and not MASK_READS_ARRAYS else tiles


@device
def work_tile(p, index):
    """WorkTile number `index`. With a mask: tiles with most to do first, of p.heads_per_l2_group heads at a time; of those with least
    to do a quarter is left to the end (tiles_before_lpt_tail). Else one head after the other, the ragged tiles last.
    """
    heads, rows, index = u32(u32(p.heads) // u32(PACK_GQA)), u32(p.n_q * PACK_GQA), u32(index)
    tiles, every = u32((rows + u32(BLOCK_Q - 1)) // u32(BLOCK_Q)), u32(heads * p.batch)
    if HAS_MASK:
        tile, head = tile_coord(index, tiles_before_lpt_tail(tiles), every, u32(p.heads_per_l2_group))
        tile = u32(tiles - u32(1) - tile)
    else:
        whole = u32(rows // u32(BLOCK_Q))
        if index < u32(whole * every):
            head = u32(index // whole)
            tile = u32(index - head * whole)
        else:
            head = u32(index - whole * every)
            tile = whole
    return i32(head // heads), i32(head % heads * PACK_GQA), i32(tile * BLOCK_Q)
