# parts: common/fragment
# Tile shape, warp roles and shared memory of Hopper's backward pass.
#
# warp group 0   warp 0       producer: Q, dO and V of each query tile (bwd_producer)
#                warp 1       scheduler: claims work tiles, lists their query tiles, loads K (bwd_scheduler_warp)
# warp groups 1, 2            consumers: bwd_mainloop, or bwd_mainloop_cluster where CLUSTER_SIZE is 2
#
# From the head: BLOCK_Q, BLOCK_K, STAGES (of Q), DOUT_STAGES, KEY_BUFFERS (of K), CLUSTER_SIZE,
# CONSUMER_REGISTERS, PRODUCER_REGISTERS, WATCHDOG, NUM_LISTS, LIST_CAPACITY, LIST_BYTES, SHARED_BYTES, and
# the offsets of shared memory, laid out by BackwardTile.smem (cuda_common/sm90_bwd_launch.py):
#
#     AT_K             [KEY_BUFFERS][CTA_KEYS][..]   K of the CTA's keys
#     AT_PEER_K        [CTA_KEYS][64 DQ_CHUNKS]      K of the peer CTA's keys, in the CTA's columns of dQ
#     AT_V             [CTA_KEYS][..]
#     AT_Q, AT_DOUT    [STAGES][BLOCK_Q][..], [DOUT_STAGES][BLOCK_Q][..]
#     AT_DS            [2][BLOCK_Q][CTA_KEYS]        dS of two query tiles; in a cluster, of one and of the peer's keys
#     AT_DQ            a tile of dQ on its way to dq_accum, unless in a cluster
#     AT_LSE, AT_DELTA [STAGES][BLOCK_Q], [DOUT_STAGES][BLOCK_Q]   float32, loaded with Q and with dO
#     AT_Q_PIPE, AT_DOUT_PIPE, AT_K_PIPE, AT_V_PIPE, AT_PEER_K_PIPE, AT_LIST_PIPE   full and empty barriers
#     AT_DS_PIPE       consumers to consumers: dS is in shared memory
#     AT_DSMEM_PIPE    between the CTAs of a cluster: full when the peer's dS is here, empty when the peer has read dS
#     AT_K_LOADED, AT_PEER_K_LOADED, AT_ROWS_LOADED   K, or Q and dO, have yet to be cleared of non-finite values
#     AT_CLAIMED, AT_CLAIMED_INDEX   a work tile that the peer CTA has claimed for both
#     AT_CLAIM         the next work tile may be claimed
#     AT_TILE_DESCS    a tile descriptor for each stage of Q
#     AT_WORK_TILES    a work tile for each buffer of K
#     AT_NONFINITE_KEYS   for each buffer of K a bit for each key that was cleared
#     AT_LISTS         [NUM_LISTS] lists of query tiles

# --- tiles ------------------------------------------------------------------------------------------------------------

MMA_WARPGROUPS = 2
MMA_WARPS, THREADS, WARPGROUP_KEYS = 4 * MMA_WARPGROUPS, 128 * (MMA_WARPGROUPS + 1), 64
ROLE_WARPS = MMA_WARPS // CLUSTER_SIZE  # consumer warps with the same role
CTA_KEYS = BLOCK_K // CLUSTER_SIZE
PADDED_DIM, PADDED_DIM_V, CHUNKS, CHUNKS_V = padded(HEAD_DIM), padded(HEAD_DIM_V), chunks(HEAD_DIM), chunks(HEAD_DIM_V)
S_REGS, DK_REGS, DV_REGS = BLOCK_Q // 2, PADDED_DIM // 2, PADDED_DIM_V // 2  # registers of a lane

# dQ^T of a query tile consists of parts, one for each warp group: 64 columns of all rows or, of up to 64 columns, half
# of the rows. A CTA of a cluster computes DQ_CHUNKS of the parts. dq_accum holds a tile as the lanes do:
# [part][warp][16 bytes][lane].
DQ_BY_COLUMNS = CHUNKS > 1 or CLUSTER_SIZE > 1
DQ_CHUNKS = (CHUNKS + CLUSTER_SIZE - 1) // CLUSTER_SIZE
DQ_PARTS, DQ_PART_ROWS = (CHUNKS, BLOCK_Q) if DQ_BY_COLUMNS else (MMA_WARPGROUPS, BLOCK_Q // MMA_WARPGROUPS)
BYTES_DQ_WARP = DQ_PART_ROWS * 16 * 4
BYTES_DQ_PART, BYTES_DQ = 4 * BYTES_DQ_WARP, DQ_PARTS * 4 * BYTES_DQ_WARP

BYTES_K, BYTES_V = CTA_KEYS * CHUNK_ROW * CHUNKS, CTA_KEYS * CHUNK_ROW * CHUNKS_V
BYTES_PEER_K = CTA_KEYS * CHUNK_ROW * DQ_CHUNKS if CLUSTER_SIZE > 1 else 0
BYTES_Q, BYTES_DOUT, BYTES_ROW_STATS = BLOCK_Q * CHUNK_ROW * CHUNKS, BLOCK_Q * CHUNK_ROW * CHUNKS_V, BLOCK_Q * 4
BYTES_DS, DS_STAGES = BLOCK_Q * CTA_KEYS * 2, 2 // CLUSTER_SIZE
assert (AT_PEER_K, AT_V, AT_Q) == (KEY_BUFFERS * BYTES_K, AT_PEER_K + BYTES_PEER_K, AT_V + BYTES_V)
assert (AT_DOUT, AT_DS, AT_DQ) == (AT_Q + STAGES * BYTES_Q, AT_DOUT + DOUT_STAGES * BYTES_DOUT, AT_DS + 2 * BYTES_DS)

# --- what is masked ---------------------------------------------------------------------------------------------------

# P and dS of a masked pair are 0, but 0 times NaN is NaN. So rows of Q, dO and K that are not finite are cleared in
# shared memory before they are multiplied. The log-sum-exp of such a row is NaN and such a key has a bit in
# AT_NONFINITE_KEYS, from which the gradients of visible pairs become NaN (softmax_p_one).
CLEARS_ROWS = HAS_MASK or HAS_SCORE or HAS_DROPOUT
CLEARS_KEYS = HAS_MASK or HAS_SCORE or HAS_DROPOUT or HAS_LENGTHS
NONFINITE_WORDS = CTA_KEYS // 32

# --- scheduling -------------------------------------------------------------------------------------------------------

CLAIM_AHEAD = 20 if MASK_READS_ARRAYS else 4  # query tiles before a work tile's end at which the next one is claimed
BACKOFF_NS = 200 if MASK_READS_ARRAYS else 1000  # the scheduler warp's sleep between polls
END = -1  # in the place of a batch entry or tile: there is no more

# A work tile is (batch entry, head of keys, first of its BLOCK_K keys).
#
# Tile descriptor, three words in shared memory: query tile << 8 | flags | a state for each 64 keys, two bits each; the
# query head; the tile's index among all query tiles.
NONFINITE_ROWS, LAST_TILE = 16, 64
DESC_HEAD, DESC_INDEX, DESC_BYTES = 4, 8, 12

# A list of query tiles, from the scheduler to the producer: words at these offsets, then the tiles, as query tile << 8
# | flags and states. LIST_B: END if there are no more work tiles; LIST_ENDS: whether the list is the work tile's last.
LIST_B, LIST_HEAD, LIST_K0, LIST_COUNT, LIST_ENDS, LIST_HEADER = 0, 4, 8, 12, 16, 24
assert LIST_BYTES == LIST_HEADER + 4 * LIST_CAPACITY

# --- shared memory ----------------------------------------------------------------------------------------------------

load_float, NAN, ZEROS = load_from("shared", float32), F(np.nan), (u32(0),) * 4


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
def nonfinite_keys_slot(base, number):
    return base + AT_NONFINITE_KEYS + 4 * NONFINITE_WORDS * stage_of(number, KEY_BUFFERS)


# --- the CTA's share --------------------------------------------------------------------------------------------------


@device
def cta_rank():
    return cluster_ctarank() if CLUSTER_SIZE > 1 else i32(0)


@device
def first_cta_key(at):
    return i32(at[2] + CTA_KEYS * cta_rank())


@device
def lane_key(half):
    """Of a lane's two keys, among the 64 of its warp group."""
    return i32(thread() % 128 // 32 * 16 + 8 * half + thread() % 32 // 4)


@device
def ceil_div(n, block):
    return i32((n + block - 1) // block)


@device
def is_finite(x):
    return abs(x) < INFINITE


# --- the tile scheduler -----------------------------------------------------------------------------------------------
#
# Which work tile each CTA of Hopper's persistent backward kernel takes, and in which order.


@device
def tiles_of_queries(p):
    """Of a head."""
    return ceil_div(p.n_q, BLOCK_Q)


@device
def tiles_of_keys(p):
    return ceil_div(p.n_k, BLOCK_K)


@device
def query_tile_index(p, b, h, tile):
    """The index of a query tile among all, as they lie in dq_accum."""
    return i32((b * i32(p.heads) + h) * tiles_of_queries(p) + tile)


@device
def num_bwd_work_tiles(p):
    return tiles_of_keys(p) * i32(p.heads // GQA_GROUP * p.batch)


@device
def key_tiles_before_lpt_tail(p):
    return tiles_before_lpt_tail(u32(tiles_of_keys(p)))


@device
def bwd_work_tile(p, index):
    """Under a mask key tiles ascend, of p.heads_per_l2_group heads at a time: under a causal mask the first have most
    to do. The last quarter of each head's is the LPT tail, which evens out the CTAs' ends.
    """
    heads = u32(u32(p.heads) // u32(GQA_GROUP))
    tile, bh = tile_coord(
        u32(index), key_tiles_before_lpt_tail(p), u32(heads * p.batch), u32(p.heads_per_l2_group)
    )  # fmt: skip
    return i32(bh // heads), i32(bh % heads), i32(tile * BLOCK_K)


@device
def claim(p, base, number):
    """The index of work tile `number` of the CTA, by one lane. The first CTA of a cluster claims for both. A word may
    be overwritten two work tiles later: the peer CTA has read it by then, as it has sent dS of query tiles that the
    first CTA could not complete without.
    """
    barrier, word = full_barrier(base + AT_CLAIMED, number, 2), base + AT_CLAIMED_INDEX + 4 * stage_of(number, 2)
    if cta_rank() == 0:
        index = i32(fetch_add(p.tile_counter, 1))
        if CLUSTER_SIZE > 1:
            dsmem_store(mapa(word, 1), index, mapa(barrier, 1))
        return index
    mbarrier_arrive_expect_tx(barrier, 4)
    consumer_wait(base + AT_CLAIMED, number, 2)
    return load_word(word)


@device
def next_work_tile(p, base, number):
    """The same, by a warp. All but the first are claimed late, so that the last ones are shared evenly."""
    if number > 0:
        mbarrier_wait_backoff(base + AT_CLAIM, u32(number - u32(1)) & 1, BACKOFF_NS)
    index = i32(0)
    if thread() % 32 == 0:
        index = claim(p, base, number)
    return uniform(index)


@device
def reset_tile_scheduler(p):
    """By one lane: the last CTA to end leaves the counters as the next launch expects them."""
    if fetch_add(p.tile_counter + 4, 1) == blocks() - 1:
        store(np.int32, p.tile_counter, 0, i32(0))
        store(np.int32, p.tile_counter, 1, i32(0))
