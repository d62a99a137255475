# parts: common/fragment
# Tile shape, warp roles and shared memory of Hopper's backward pass.
#
# warp group 0   warp 0       producer: Q, dO and V of each query tile (bwd_producer)
#                warp 1       scheduler: claims work tiles, lists their query tiles, loads K (bwd_producer)
# warp groups 1, 2            consumers (bwd_mainloop)
#
# From the head: BLOCK_Q, BLOCK_K, STAGES (of Q), DOUT_STAGES, KEY_BUFFERS (of K), CONSUMER_REGISTERS,
# PRODUCER_REGISTERS, WATCHDOG, NUM_LISTS, LIST_CAPACITY, LIST_BYTES, and the offsets of shared memory, laid out by
# BackwardTile.smem (cuda_common/sm90_bwd_launch.py):
#
#     AT_K             [KEY_BUFFERS][BLOCK_K][..]
#     AT_V             [BLOCK_K][..]
#     AT_Q, AT_DOUT    [STAGES][BLOCK_Q][..], [DOUT_STAGES][BLOCK_Q][..]
#     AT_DS            [2][BLOCK_Q][BLOCK_K]         dS of two query tiles
#     AT_DQ            a tile of dQ on its way to dq_accum
#     AT_LSE, AT_DELTA [STAGES][BLOCK_Q], [DOUT_STAGES][BLOCK_Q]   float32, loaded with Q and with dO
#     AT_Q_PIPE, AT_DOUT_PIPE, AT_K_PIPE, AT_V_PIPE, AT_LIST_PIPE   full and empty barriers
#     AT_DS_PIPE       consumers to consumers: dS is in shared memory
#     AT_CLAIM         the next work tile may be claimed
#     AT_TILE_DESCS    a tile descriptor for each stage of Q
#     AT_WORK_TILES    a work tile for each buffer of K
#     AT_LISTS         [NUM_LISTS] lists of query tiles

# --- tiles ------------------------------------------------------------------------------------------------------------

MMA_WARPGROUPS, MMA_WARPS, THREADS, WARPGROUP_KEYS = 2, 8, 384, 64
PADDED_DIM, PADDED_DIM_V, CHUNKS, CHUNKS_V = padded(HEAD_DIM), padded(HEAD_DIM_V), chunks(HEAD_DIM), chunks(HEAD_DIM_V)
S_REGS, DK_REGS, DV_REGS = BLOCK_Q // 2, PADDED_DIM // 2, PADDED_DIM_V // 2  # registers of a lane

# dQ in global memory: dq_accum, float32 sums of each query tile, which bwd_preprocess clears and to which CTAs add in
# any order. dQ^T of a query tile consists of parts, one for each warp group: 64 columns of all rows or, of up to 64
# columns, half of the rows. dq_accum holds a tile as the lanes do: [part][warp][16 bytes][lane].
DQ_BY_COLUMNS = CHUNKS > 1
DQ_PARTS, DQ_PART_ROWS = (CHUNKS, BLOCK_Q) if DQ_BY_COLUMNS else (MMA_WARPGROUPS, BLOCK_Q // MMA_WARPGROUPS)
BYTES_DQ_WARP = DQ_PART_ROWS * 16 * 4
BYTES_DQ_PART, BYTES_DQ = 4 * BYTES_DQ_WARP, DQ_PARTS * 4 * BYTES_DQ_WARP

BYTES_K, BYTES_V = BLOCK_K * CHUNK_ROW * CHUNKS, BLOCK_K * CHUNK_ROW * CHUNKS_V
BYTES_Q, BYTES_DOUT, BYTES_ROW_STATS = BLOCK_Q * CHUNK_ROW * CHUNKS, BLOCK_Q * CHUNK_ROW * CHUNKS_V, BLOCK_Q * 4
BYTES_DS = BLOCK_Q * BLOCK_K * 2
assert (AT_V, AT_Q) == (KEY_BUFFERS * BYTES_K, AT_V + BYTES_V)
assert (AT_DOUT, AT_DS, AT_DQ) == (AT_Q + STAGES * BYTES_Q, AT_DOUT + DOUT_STAGES * BYTES_DOUT, AT_DS + 2 * BYTES_DS)

# --- scheduling -------------------------------------------------------------------------------------------------------

CLAIM_AHEAD = 20 if MASK_READS_ARRAYS else 4  # query tiles before a work tile's end at which the next one is claimed
BACKOFF_NS = 200 if MASK_READS_ARRAYS else 1000  # the scheduler warp's sleep between polls
END = -1  # in the place of a batch entry or tile: there is no more

# A work tile is (batch entry, head of keys, first of its BLOCK_K keys).
#
# Tile descriptor, three words in shared memory: query tile << 8 | LAST_TILE of a work tile | a state for each 64 keys,
# two bits each; the query head; the tile's index among all query tiles, as they lie in dq_accum.
LAST_TILE, DESC_HEAD, DESC_INDEX, DESC_BYTES = 64, 4, 8, 12

# A list of query tiles, from the scheduler to the producer: words at these offsets, then the tiles, as query tile << 8
# | states. LIST_B: END if there are no more work tiles; LIST_ENDS: whether the list is the work tile's last.
LIST_B, LIST_HEAD, LIST_K0, LIST_COUNT, LIST_ENDS, LIST_HEADER = 0, 4, 8, 12, 16, 24
assert LIST_BYTES == LIST_HEADER + 4 * LIST_CAPACITY


@device
def tile_desc_slot(base, n):
    """Of query tile n of the CTA."""
    return base + AT_TILE_DESCS + DESC_BYTES * stage_of(n, STAGES)


@device
def work_tile_slot(base, number):
    """Of work tile `number` of the CTA."""
    return base + AT_WORK_TILES + 12 * stage_of(number, KEY_BUFFERS)


@device
def read_work_tile(base, number):
    slot = work_tile_slot(base, number)
    return uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))


@device
def lane_key(half):
    """Of a lane's two keys, among the 64 of its warp group."""
    return i32(thread() % 128 // 32 * 16 + 8 * half + thread() % 32 // 4)


@device
def tiles_of_queries(p):
    """Of a head."""
    return i32((p.n_q + BLOCK_Q - 1) // BLOCK_Q)


@device
def query_tile_of_cta(p):
    """Batch entry, head and number of the query tile of a CTA of bwd_preprocess or bwd_postprocess."""
    tiles, heads = u32(tiles_of_queries(p)), u32(p.heads)
    row = u32(block() // tiles)
    return i32(row // heads), i32(row % heads), i32(block() - row * tiles)


@device
def dq_accum_at(p, index, offset):
    """From byte `offset` of a query tile on. index: of the tile among all."""
    return p.dq_accum.data + I(index) * BYTES_DQ + offset
