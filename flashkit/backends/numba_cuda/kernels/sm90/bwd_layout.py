# The tile of Hopper's backward pass, its registers, and the map of a block's shared memory, in bytes.

MMA_WARPGROUPS = 2
WARPS, THREADS, GROUP_KEYS = 4 * MMA_WARPGROUPS, 128 * (MMA_WARPGROUPS + 1), 64
COLUMNS, COLUMNS_V, chunks_q, chunks_v = padded(HEAD_DIM), padded(HEAD_DIM_V), chunks(HEAD_DIM), chunks(HEAD_DIM_V)

# KEYS_SHARED: both warp groups work at the same keys, with different products, and a cluster of two blocks shares an
# item. Else each group has 64 of the keys, with all that belongs to them.
CLUSTER_SIZE = 2 if KEYS_SHARED else 1
SIDE, HELD = 4 if KEYS_SHARED else WARPS, BLOCK_K // CLUSTER_SIZE  # warps that do the same; keys of a block
SHARE = (chunks_q + CLUSTER_SIZE - 1) // CLUSTER_SIZE  # chunks of dQ of a block
PAIRS, SUMS, SUMS_V = BLOCK_Q // 2, COLUMNS // 2, COLUMNS_V // 2  # registers of a lane: scores, dK, dV

# A part of dQ^T is 64 columns of all rows; where there are no more than 64, of half the rows, so that both groups have
# one. The sums lie as the warps hold them: [part][warp][16 bytes][lane].
BY_COLUMNS = chunks_q > 1 or KEYS_SHARED
PARTS, PART_ROWS = (chunks_q, BLOCK_Q) if BY_COLUMNS else (MMA_WARPGROUPS, BLOCK_Q // MMA_WARPGROUPS)
BYTES_WARP = PART_ROWS * 16 * 4
BYTES_PART, BYTES_SUMS = 4 * BYTES_WARP, PARTS * 4 * BYTES_WARP

BYTES_K, BYTES_V = HELD * CHUNK_ROW * chunks_q, HELD * CHUNK_ROW * chunks_v
BYTES_OTHERS = HELD * CHUNK_ROW * SHARE if KEYS_SHARED else 0  # the other block's keys, for the columns of dQ
BYTES_Q, BYTES_DOUT, BYTES_ROWS = BLOCK_Q * CHUNK_ROW * chunks_q, BLOCK_Q * CHUNK_ROW * chunks_v, BLOCK_Q * 4
BYTES_DS, PAIRS_HELD = BLOCK_Q * HELD * 2, 2 // CLUSTER_SIZE  # dS of a tile: of two, or of one and that of the other block

AT_K = 0
AT_OTHERS = AT_K + KEY_BUFFERS * BYTES_K
AT_V = AT_OTHERS + BYTES_OTHERS
AT_Q = AT_V + BYTES_V
AT_DOUT = AT_Q + STAGES * BYTES_Q
AT_DS = AT_DOUT + DOUT_STAGES * BYTES_DOUT
AT_SUMS = AT_DS + 2 * BYTES_DS
AT_SHIFT = AT_SUMS + (0 if KEYS_SHARED else BYTES_SUMS)
AT_DELTA = AT_SHIFT + STAGES * BYTES_ROWS
AT_Q_PIPE = AT_DELTA + DOUT_STAGES * BYTES_ROWS
AT_DOUT_PIPE = AT_Q_PIPE + 16 * STAGES
AT_K_PIPE = AT_DOUT_PIPE + 16 * DOUT_STAGES
AT_V_PIPE = AT_K_PIPE + 16 * KEY_BUFFERS
AT_DS_PIPE = AT_V_PIPE + 16
AT_ADDED = AT_DS_PIPE + 32  # keep_order(): a tile of dQ is there, or has been added
AT_TURN = AT_ADDED + 16  # its place in shared memory is free again, or it may be added
AT_ASKED = AT_TURN + 16  # it is said which it is
AT_K_CAME = AT_ASKED + 32
AT_ROWS_CAME = AT_K_CAME + 8 * KEY_BUFFERS
AT_PEER_K_PIPE = AT_ROWS_CAME + 8
AT_OTHERS_CAME = AT_PEER_K_PIPE + 16
# Between two blocks: full when the other one's dS is here, empty when what was sent there is no longer needed.
AT_DSMEM_PIPE = AT_OTHERS_CAME + 8
AT_TAKEN = AT_DSMEM_PIPE + 16  # for two items: a barrier; behind these which they are
AT_TILE_DESCS = AT_TAKEN + 24  # of each stage of Q: tile << 8 | ODD, LAST, states of the groups; head; number of all
AT_WORK_TILES = AT_TILE_DESCS + 12 * STAGES  # for each buffer of K: an item
AT_ODD = AT_WORK_TILES + 12 * KEY_BUFFERS  # for each buffer of K: a bit for each key that was cleared
ODD_WORDS = HELD // 32
AT_SLOTS = AT_ODD + 4 * ODD_WORDS * KEY_BUFFERS  # for four tiles of dQ: which they are
ODD, LAST_TILE, END = 16, 64, -1  # some rows' numbers are not finite; the last tile of an item

# A list of tiles: batch entry or END, head of queries, first key, how many, whether it is the item's last; the tiles.
NUM_LISTS, LIST_CAPACITY = (2, 72) if MASK_READS_ARRAYS else (4, 32)
LIST_HEADER = 20
LIST_BYTES = LIST_HEADER + 4 * LIST_CAPACITY
AT_LISTS = AT_SLOTS + 32
AT_LIST_PIPE = -(-(AT_LISTS + NUM_LISTS * LIST_BYTES) // 8) * 8
AT_SOON = AT_LIST_PIPE + 16 * NUM_LISTS  # the next item is taken
assert AT_SOON + 8 <= SHARED_BYTES  # which the host gives
AHEAD = 20 if MASK_READS_ARRAYS else 4  # tiles before the end of an item, when that is
BACKOFF_NS = 100 if ORDERED else 200 if MASK_READS_ARRAYS else 1000  # nanoseconds of the warp that takes it: it mostly has time

FROM_DIAGONAL = ORDERED and HAS_MASK  # keys in descending order, queries in ascending: a block is first at its diagonal

# A hidden pair has the weight and the gradient 0, but 0 times NaN is NaN. So rows of Q, dO and K that are not finite
# are cleared before they are multiplied, by who loads them, and what they would have done to visible pairs is said
# otherwise: of a row by its log-sum-exp, which is NaN then, of a key by a bit (weigh).
CLEANS_KEYS = HAS_MASK or HAS_SCORE or HAS_DROPOUT or HAS_LENGTHS

load_number, NAN, ZEROS = load_from("shared", float32), F(np.nan), (u32(0),) * 4


@device
def first_of_lane(half):
    """A lane's place along the first axis of its group's tile, of two."""
    return i32(thread() % 128 // 32 * 16 + 8 * half + thread() % 32 // 4)


@device
def tiles_along(n, block):
    return i32((n + block - 1) // block)


@device
def is_finite(x):
    return abs(x) < INFINITE


@device
def tile_desc_of(base, n):
    return base + AT_TILE_DESCS + 12 * stage_of(n, STAGES)


@device
def work_tile_slot(base, number):
    return base + AT_WORK_TILES + 12 * stage_of(number, KEY_BUFFERS)


@device
def odd_of(base, number):
    return base + AT_ODD + 4 * ODD_WORDS * stage_of(number, KEY_BUFFERS)


@device
def rank_of_block():
    """Which of the blocks that share items it is."""
    return cluster_ctarank() if CLUSTER_SIZE > 1 else i32(0)


@device
def order_words(p):
    """Words with a bit for each tile of keys."""
    return tiles_along(p.n_k, 32 * BLOCK_K)


@device
def dq_semaphore_of(p, b, h, tile):
    """Of a tile of queries: a word, whether it is odd; then, for each block of a cluster, as each has its own columns
    of dQ, order_words() with bits of the tiles of keys that are done with it.
    """
    return number_address(p.dq_semaphore, I(b), I(h), I(tile))
