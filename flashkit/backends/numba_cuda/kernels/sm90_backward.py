# parts: tiles tensor sm90 sm90_tile_backward softmax sm90_items_backward sm90_order sm90_pairs sm90_queries
# Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp groups with roles as in
# FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper: weights recomputed from the log-sum-exp, five
# products.
#
# As many blocks as multiprocessors take items one after the other, each BLOCK_K keys of a key/value head, and go over
# the tiles of queries that see them.
#
#     K              [KEY_BUFFERS][BLOCK_K][..]   shared memory
#     V              [BLOCK_K][..]                shared memory
#     Q              [STAGES][BLOCK_Q][..]        shared memory, a ring; with a log-sum-exp for each row
#     dO             [DOUT_STAGES][BLOCK_Q][..]   shared memory, a ring; with a delta for each row
#     S, P, dP, dS   [BLOCK_Q][BLOCK_K]           registers; what both warp groups need of P and dS in shared memory
#     dK, dV         [BLOCK_K][..]                registers
#     dQ             [BLOCK_Q][..]                registers, then added to float32 sums in memory: prepare_rows() clears
#                                                 them, store_queries() makes dQ of them
#
# Warp group 0: warp 0 loads tiles of queries, warp 1 finds them, loads the keys and looks through these, warps 2 and 3
# keep the order in which dQ is added, if it matters. Warp groups 1 and 2 multiply, in one of two ways: each has 64 of
# the keys, with all that belongs to them (sm90_backward_keys.py); or, where dK and dV of 64 keys do not fit the
# registers of a group, both share the keys, and each has half the columns of dK, dV and dQ (sm90_backward_columns.py,
# KEYS_SHARED).
#
# With ORDERED a tile is added to by one block after the other, in the order of their keys, so the bits never change.
# Without a mask keys ascend and all go from the last queries to the first; with one keys descend and queries ascend:
# under a causal mask a block then begins at its diagonal, where it is the first to add.


dq_product = wgmma(
    STORAGE, PART_ROWS, along_columns(BLOCK_K), along_rows(BLOCK_K, BLOCK_Q), turned_a=True, fresh=True
)  # fmt: skip


@device
def query_gradients(keys, ds):
    """dQ^T = K^T dS of a tile, a chunk of columns or a part of the rows."""
    products_begin()
    dq = dq_product(descriptor(keys, 16), descriptor(ds, 16))
    products_end()
    return dq


@device
def turn_four(a, b, c, d):
    """Lane t of four that share a row ends with all four words of number t."""
    lane = i32(thread() % 32)
    odd, high = lane & 1 != 0, lane & 2 != 0
    x, y = from_lane(a if odd else b, lane ^ 1), from_lane(c if odd else d, lane ^ 1)
    a, b, c, d = (x, b, y, d) if odd else (a, x, c, y)
    x, y = from_lane(a if high else c, lane ^ 2), from_lane(b if high else d, lane ^ 2)
    a, b, c, d = (x, y, c, d) if high else (a, b, x, y)
    return u32(a), u32(b), u32(c), u32(d)


@kernel(THREADS, 1, maps=("map_q", "map_k", "map_v", "map_dout"))
def sm90_backward(p):
    base = u32(uniform(shared_address()))
    if thread() == 0:
        ring_init(base + AT_Q_RING, STAGES, 1, WARPS)
        ring_init(base + AT_DOUT_RING, DOUT_STAGES, 1, WARPS)
        ring_init(base + AT_K_RING, KEY_BUFFERS, 1, WARPS)
        ring_init(base + AT_V_RING, 1, 1, WARPS)
        ring_init(base + AT_PAIRS_RING, 2, WARPS, WARPS)
        ring_init(base + AT_LISTS_RING, LISTS, 1, 1)
        barrier_init(base + AT_SOON, 1)
        for i in range(2):
            barrier_init(base + AT_ADDED + 8 * i, WARPS)
            barrier_init(base + AT_TURN + 8 * i, 1)
        for i in range(4):
            barrier_init(base + AT_ASKED + 8 * i, 1)
        for i in range(KEY_BUFFERS):
            barrier_init(base + AT_K_CAME + 8 * i, 1)
        barrier_init(base + AT_ROWS_CAME, 1)
        barriers_ready()
    threads_sync()
    role, warp = uniform(thread() // 128), uniform(thread() // 32)
    if role == 0:
        give_registers(REGISTERS_LOADING)
        if warp == 0:
            load_items(p, base)
        elif warp == 1:
            find_items(p, base)
        elif warp >= 2 and ORDERED:
            keep_order(p, base, warp - 2)
    else:
        take_registers(REGISTERS)
        multiply_tiles(p, base, role - 1)
