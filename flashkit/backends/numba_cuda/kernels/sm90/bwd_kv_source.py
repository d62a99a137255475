# Where K and V of a work tile come from: dense tensors, by TMA.


@device
def load_tile(target, tensor, many, rows, token, head, b, barrier, column):
    """Chunks of columns from `column` on."""
    for c in range(many):
        tma_load(target + c * rows * CHUNK_ROW, tensor, barrier, column + 64 * c, token, 0, head, b)


@device
def load_k(base, at, number):
    """A work tile and K of the CTA's keys. Keys that are to be cleared arrive at a barrier of their own first."""
    buffer = stage_of(number, KEY_BUFFERS)
    loaded = base + (AT_K_LOADED if CLEARS_KEYS else AT_K_PIPE) + 8 * buffer
    producer_acquire(base + AT_K_PIPE, number, KEY_BUFFERS)
    if elect_one():
        slot = work_tile_slot(base, number)
        store_word(slot, at[0])
        store_word(slot + 4, at[1])
        store_word(slot + 8, at[2])
        mbarrier_arrive_expect_tx(loaded, BYTES_K)
        tile = base + AT_K + buffer * BYTES_K
        load_tile(tile, map_address("map_k"), CHUNKS, CTA_KEYS, first_cta_key(at), at[1], at[0], loaded, 0)


@device
def clear_nonfinite_k(p, base, at, number):
    buffer = stage_of(number, KEY_BUFFERS)
    mbarrier_wait(base + AT_K_LOADED + 8 * buffer, u32(number) // u32(KEY_BUFFERS) & 1)
    existing = i32(i32(seq_info(p, I(at[0])).n_k) - first_cta_key(at))
    clear_nonfinite_keys(base + AT_K + buffer * BYTES_K, CHUNKS, existing, nonfinite_keys_slot(base, number))
    mbarrier_arrive_once(full_barrier(base + AT_K_PIPE, number, KEY_BUFFERS))


@device
def load_peer_k(p, base, at, number):
    """K of the peer CTA's keys, in the columns of dQ that this CTA computes."""
    loaded, rank = base + (AT_PEER_K_LOADED if CLEARS_KEYS else AT_PEER_K_PIPE), cta_rank()
    first = i32(at[2] + CTA_KEYS * (1 - rank))
    producer_acquire(base + AT_PEER_K_PIPE, number, 1)
    if elect_one():
        mbarrier_arrive_expect_tx(loaded, BYTES_PEER_K)
        tile, column = base + AT_PEER_K, 64 * DQ_CHUNKS * rank
        load_tile(tile, map_address("map_k"), DQ_CHUNKS, CTA_KEYS, first, at[1], at[0], loaded, column)
    if CLEARS_KEYS:
        mbarrier_wait(loaded, u32(number) & 1)
        clear_nonfinite_keys(base + AT_PEER_K, DQ_CHUNKS, i32(i32(seq_info(p, I(at[0])).n_k) - first), u32(0))
        mbarrier_arrive_once(base + AT_PEER_K_PIPE)


@device
def load_v(base, at, number):
    """V of the CTA's keys, by one thread. Nothing is cleared: compute_ds drops what masked keys give."""
    full = base + AT_V_PIPE
    producer_acquire(full, number, 1)
    mbarrier_arrive_expect_tx(full, BYTES_V)
    load_tile(base + AT_V, map_address("map_v"), CHUNKS_V, CTA_KEYS, first_cta_key(at), at[1], at[0], full, 0)
