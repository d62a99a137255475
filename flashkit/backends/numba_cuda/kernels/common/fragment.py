# What tensor-core kernels share: types, tiles in shared memory, the rows of a lane.
#
# A tile in shared memory is [chunk][row][128 bytes], a chunk being 64 columns of 16 bits. It begins at a multiple of
# 1024 bytes. Its 16-byte vectors are permuted within eight rows, vector v of row r lying at v ^ (r % 8), the 128-byte
# swizzle: eight rows read at the same column lie in different banks.
#
# A generation adds: ROWS of a lane, 2 or 4; WARP_ROWS, 16 or 32; GROUP_THREADS, which share a tile of rows.

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


# --- the order of tiles -----------------------------------------------------------------------------------------------
#
# The order in which CTAs take the tiles of all heads: L2 swizzle and longest-processing-time-first (LPT).
#
# A work tile of the forward pass is (batch entry, head, first of its BLOCK_Q rows).


@device
def tile_coord(index, before_tail, heads, heads_at_a_time):
    """(tile, head among those of all batch entries) at place `index` of the order, all unsigned.

    `heads_at_a_time` heads come together, tile after tile, so that their K and V stay in the L2 cache. Tiles from
    number `before_tail` on, the shortest, come after those of all heads: they even out the CTAs' ends.
    """
    if index < u32(before_tail * heads):
        first = u32(index // u32(heads_at_a_time * before_tail) * heads_at_a_time)
        rest = u32(index - first * before_tail)
        group = u32(min(heads - first, heads_at_a_time))
        tile = u32(rest // group)
        head = u32(first + rest - tile * group)
    else:
        tile = u32(index // heads)
        head = u32(index - tile * heads)
    return tile, head


@device
def tiles_before_lpt_tail(tiles):
    """Tiles of a head before the LPT tail: three quarters under a mask whose tiles shrink, if it reads no arrays."""
    return u32(tiles - tiles // u32(4)) if HAS_MASK and not MASK_READS_ARRAYS else tiles


@device
def num_work_tiles(p):
    return i32((p.n_q + BLOCK_Q - 1) // BLOCK_Q * p.heads * p.batch)


@device
def work_tile(p, index):
    """The work tile at `index`: under a mask longest first, with L2 swizzle and LPT tail, else head after head."""
    heads, rows, index = u32(p.heads), u32(p.n_q), u32(index)
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
    return i32(head // heads), i32(head % heads), i32(tile * BLOCK_Q)
