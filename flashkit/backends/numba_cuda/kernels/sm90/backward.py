# parts: common/tiles common/fragment sm90/pipeline sm90/bwd_layout common/softmax
# parts: sm90/bwd_tile_scheduler sm90/dq_semaphore sm90/bwd_softmax sm90/bwd_preprocess
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp groups with roles as in
# FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper: weights recomputed from the log-sum-exp, five
# products.
#
# As many blocks as multiprocessors take items one after the other, each BLOCK_K keys of a key/value head, and go over
# the tiles of queries that see them.
#
#     K              [KEY_BUFFERS][HELD][..]      shared memory; HELD: of BLOCK_K keys those of the block
#     V              [HELD][..]                   shared memory
#     Q              [STAGES][BLOCK_Q][..]        shared memory, a ring; with a log-sum-exp for each row
#     dO             [DOUT_STAGES][BLOCK_Q][..]   shared memory, a ring; with a delta for each row
#     S, P, dP, dS   [BLOCK_Q][HELD]              registers; dS also in shared memory, for dQ
#     dK, dV         [HELD][..]                   registers
#     dQ             [BLOCK_Q][..]                registers, then added to float32 sums in memory: bwd_preprocess() clears
#                                                 them, bwd_postprocess() makes dQ of them
#
# Warp group 0: warp 0 loads tiles of queries, warp 1 finds them, loads the keys and looks through these, warps 2 and 3
# keep the order in which dQ is added, if it matters. Warp groups 1 and 2 multiply, in one of two ways: each has 64 of
# the keys, with all that belongs to them (sm90_backward_keys.py); or, where dK and dV of 64 keys do not fit the
# registers of a group, a cluster of two blocks has 64 of the keys each, of which one group makes dS and dV, the other
# dK and dQ, whose columns the blocks share (sm90_backward_products.py, KEYS_SHARED).
#
# With ORDERED a tile is added to by one block after the other, in the order of their keys, so the bits never change.
# Without a mask keys ascend and all go from the last queries to the first; with one keys descend and queries ascend:
# under a causal mask a block then begins at its diagonal, where it is the first to add.


scores_product = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM, HELD), along_rows(HEAD_DIM, BLOCK_Q), fresh=True)
values_product = wgmma(STORAGE, BLOCK_Q, along_rows(HEAD_DIM_V, HELD), along_rows(HEAD_DIM_V, BLOCK_Q), fresh=True)
dv_product = wgmma_registers(STORAGE, COLUMNS_V, along_columns(BLOCK_Q), turned_b=True)


@device
def scores(base, k_tile, group, n):
    q = base + AT_Q + stage_of(n, STAGES) * BYTES_Q
    wgmma_fence()
    s = scores_product(descriptor(k_tile + group * 64 * CHUNK_ROW, 16), descriptor(q, 16))
    wgmma_commit()
    return s


@device
def gradients_of_weights(base, group, dout):
    wgmma_fence()
    dp = values_product(descriptor(base + AT_V + group * 64 * CHUNK_ROW, 16), descriptor(dout, 16))
    wgmma_commit()
    return dp


@device
def add_four(i, four, target):
    add_to_four(target + 512 * i, four)


@device
def part_of_sums(p, where, part):
    """A part of a tile of dQ. where: the tile of queries among all."""
    return p.dq_accum.data + I(where) * BYTES_SUMS + part


# --- from item to item ------------------------------------------------------------------------------------------------


@device
def is_even(base, number, group):
    """Whether all keys of an item, those of a group, are finite."""
    if not MAY_HIDE:
        return True
    odd = odd_of(base, number) + 8 * group
    return uniform(load_word(odd) | load_word(odd + 4)) == 0


@device
def multiply_items(p, base, sums, begin, step, finish, rest):
    """All items of the block, one after the other, by a warp group: what is begun before an item's first tile, a step
    for each tile, what is done after the last. sums: in registers, to be begun anew with each item. rest: what these
    need beside; which keys are the group's. How many tiles there were.
    """
    n, number = u32(0), u32(0)  # tiles, items so far
    while True:
        consumer_wait(base + AT_K_PIPE, number, KEY_BUFFERS)
        if uniform(load_word(work_tile_slot(base, number))) == END:
            break
        k_tile, even = base + AT_K + stage_of(number, KEY_BUFFERS) * BYTES_K, is_even(base, number, rest[0])
        state, first, last = begin(base, k_tile, number, n, sums, rest), YES, NO
        while not last:
            state, last = step(p, base, k_tile, number, even, (n, first), state, rest)
            first, n = NO, u32(n + 1)
        wgmma_wait(0)
        sums = finish(p, base, k_tile, number, n, state, rest)
        number = u32(number + 1)
    return n


# --- an item's end ----------------------------------------------------------------------------------------------------

BYTES_PIECE = 16 * CHUNK_ROW


@device
def store_four_units(i, words, rest):
    """16 columns of a warp's 16 keys."""
    target, lane = rest
    stmatrix_x4(target + swizzled(lane % 16, 2 * i + lane // 16), words[0], words[1], words[2], words[3])


def keys_sender(columns, before, pieces, apart):
    """send_keys(tensor, at, first, lane, place, x, factor): so many columns of dK or dV of a warp's 16 keys, from key
    `first` of the item's on, leave by the copy engine, 64 columns at a time, through one of `pieces` places in shared
    memory, `apart` bytes from each other. before: how many pieces went there before these; at the first one all else
    that was sent from there has left. Straight from registers, eight lines a store, it took as long as a tile.
    """
    pending, missing = pieces - 1, (u32(0),) * (-columns // 4 % 16)

    @device
    def send_piece(i, words, rest):
        tensor, at, first, lane, place = rest
        target = place + (before + i) % pieces * apart
        if before + i == 0:
            bulk_wait_read(0)
        else:
            bulk_wait_read(pending)
        lanes_sync()
        groups(store_four_units, 4, words, (target, lane))
        fence_proxy_async()
        lanes_sync()
        if elect_one():
            tma_store(tensor, target, 64 * i, at[2] + first, 0, at[1], at[0])
            bulk_commit()

    @device
    def send_keys(tensor, at, first, lane, place, x, factor):
        groups(send_piece, 16, join(pack, scaled(x, factor)) + missing, (tensor, at, first, lane, place))

    return send_keys


# --- roles ------------------------------------------------------------------------------------------------------------


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_dout", "map_dk", "map_dv"), cluster=CLUSTER_SIZE)
def sm90_backward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        pipeline_init(base + AT_Q_PIPE, STAGES, 1, WARPS)
        pipeline_init(base + AT_DOUT_PIPE, DOUT_STAGES, 1, SIDE)
        pipeline_init(base + AT_K_PIPE, KEY_BUFFERS, 1, WARPS)
        pipeline_init(base + AT_V_PIPE, 1, 1, SIDE)
        pipeline_init(base + AT_DS_PIPE, PAIRS_HELD, SIDE, SIDE)
        pipeline_init(base + AT_PEER_K_PIPE, 1, 1, SIDE)
        pipeline_init(base + AT_DSMEM_PIPE, 1, 1, SIDE)
        pipeline_init(base + AT_LIST_PIPE, NUM_LISTS, 1, 1)
        mbarrier_init(base + AT_SOON, 1)
        mbarrier_init(base + AT_OTHERS_CAME, 1)
        for i in range(2):
            mbarrier_init(base + AT_ADDED + 8 * i, SIDE)
            mbarrier_init(base + AT_TURN + 8 * i, 1)
            mbarrier_init(base + AT_TAKEN + 8 * i, 1)
        for i in range(4):
            mbarrier_init(base + AT_ASKED + 8 * i, 1)
        for i in range(KEY_BUFFERS):
            mbarrier_init(base + AT_K_CAME + 8 * i, 1)
        mbarrier_init(base + AT_ROWS_CAME, 1)
        fence_mbarrier_init()
    if CLUSTER_SIZE > 1:
        cluster_sync()
    else:
        threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        setmaxnreg_dec(PRODUCER_REGISTERS)
        if warp == 0:
            load_items(p, base)
        elif warp == 1:
            find_items(p, base)
        elif warp >= 2 and ORDERED:
            keep_order(p, base, warp - 2)
    else:
        setmaxnreg_inc(CONSUMER_REGISTERS)
        consumer(p, base, role - 1)
    if CLUSTER_SIZE > 1:
        cluster_sync()  # what the other block sends has come
