// Which work the blocks of the Hopper backward pass take, and where what belongs to it lies: what the roles of warp group 0 share.
#pragma once
#include "sm90/pipeline.cuh"

DEVICE Pipeline<STAGES> q_pipe(unsigned base) { return {base + AT_Q_PIPE, base + AT_Q_PIPE + 8 * STAGES}; }
DEVICE Pipeline<DOUT_STAGES> dout_pipe(unsigned base) { return {base + AT_DOUT_PIPE, base + AT_DOUT_PIPE + 8 * DOUT_STAGES}; }
DEVICE Pipeline<KEY_BUFFERS> k_pipe(unsigned base) { return {base + AT_K_PIPE, base + AT_K_PIPE + 8 * KEY_BUFFERS}; }
DEVICE Pipeline<1> v_pipe(unsigned base) { return {base + AT_V_PIPE, base + AT_V_PIPE + 8}; }
DEVICE Pipeline<1> peer_k_pipe(unsigned base) { return {base + AT_PEER_K_PIPE, base + AT_PEER_K_PIPE + 8}; }
DEVICE Pipeline<LISTS> list_pipe(unsigned base) { return {base + AT_LISTS_PIPE, base + AT_LISTS_PIPE + 8 * LISTS}; }
DEVICE Pipeline<CLUSTER_SIZE == 1 ? 2 : 1> ds_pipe(unsigned base) { return {base + AT_DS_PIPE, base + AT_DS_PIPE + 16}; }
// Between two blocks: full when the other one's dS is here, empty when what was sent there is no longer needed.
DEVICE Pipeline<1> dsmem_pipe(unsigned base) { return {base + AT_DSMEM_PIPE, base + AT_DSMEM_PIPE + 8}; }

// Of a tile of queries: whether it is odd, and whether its dQ is WRITTEN; then words with bits of ORDER_BITS tiles of keys each
// that are done with it, and a bit for whether one of them has WRITTEN_HERE: who waits so learns at once if sums are there.
constexpr int ORDER_BITS = 31;
constexpr unsigned WRITTEN_HERE = 1u << ORDER_BITS;
DEVICE int* dq_semaphore_of(const Params& p, int b, int h, int tile) { return row_at<int>(p.dq_semaphore, b, h, tile); }
DEVICE int order_words(const Params& p) { return tiles_of(p.n_k, ORDER_BITS * BLOCK_K); }
// The words behind a tile's mark; each block of a cluster has its own, as it has its own columns of dQ.
DEVICE int rank_of_block() { return CLUSTER_SIZE > 1 ? cluster_ctarank() : 0; }
DEVICE int* order_of(const Params& p, int* marks) { return marks + 1 + rank_of_block() * order_words(p); }

DEVICE unsigned get_acquired(const int* word) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
DEVICE void fence_all_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The first of an item's keys that the block has.
DEVICE int held_from(const WorkTile& at) { return at.k0 + HELD * rank_of_block(); }
DEVICE unsigned tile_desc_of(unsigned base, unsigned n) { return base + AT_TILE_DESCS + 12 * (n % STAGES); }
DEVICE unsigned work_tile_slot(unsigned base, unsigned number) { return base + AT_WORK_TILES + 12 * (number % KEY_BUFFERS); }
DEVICE unsigned odd_of(unsigned base, unsigned number) { return base + AT_ODD + 4 * ODD_WORDS * (number % KEY_BUFFERS); }

// --- which work -------------------------------------------------------------------------------------------------------

DEVICE int heads_of_keys(const Params& p) { return (int)(p.heads / GQA_GROUP * p.batch); }  // of all batch entries
DEVICE int number_of_head(const Params& p, int b, int head) { return b * ((int)p.heads / GQA_GROUP) + head; }

// WorkTile number `index`: one head's tiles after the other's. With a mask that is not looked up, p.heads_per_l2_group heads at a time, their first
// tiles, then their second, for under a causal mask the first keys are seen by most; of the last heads (EVENS_OUT) all at a time, so
// that the items with least to do come last of all and blocks finish together. FROM_DIAGONAL: in descending order, but for those.
constexpr bool EVENS_OUT = HAS_MASK && (ORDERED || !MASK_READS_ARRAYS);
DEVICE int heads_at_last(const Params& p) {
    if constexpr (!EVENS_OUT) return 0;
    // In any order as many as are an item for each block: more would have to wait until their sums are cleared.
    const int all = heads_of_keys(p), one_each = tiles_of(gridDim.x / CLUSTER_SIZE, tiles_of(p.n_k, BLOCK_K));
    const int last = !ORDERED ? one_each : p.heads_per_l2_group < 2 ? 2 : (int)p.heads_per_l2_group;
    return last < all ? last : all;
}
DEVICE bool is_descending(const Params& p, int bh) { return FROM_DIAGONAL && bh < heads_of_keys(p) - heads_at_last(p); }
DEVICE WorkTile work_tile(const Params& p, int index) {
    const int heads = (int)p.heads / GQA_GROUP, tiles = tiles_of(p.n_k, BLOCK_K), last = heads_at_last(p), first = heads_of_keys(p) - last;
    const bool at_last = EVENS_OUT && index >= first * tiles;
    const TileCoord turn = at_last ? tile_coord(index - first * tiles, tiles, last, last) : tile_coord(index, tiles, first, (int)p.heads_per_l2_group);
    const int bh = at_last ? first + turn.bh : turn.bh;
    return {bh / heads, bh % heads, (FROM_DIAGONAL && !at_last ? tiles - 1 - turn.tile : turn.tile) * BLOCK_K};
}

// --- units of shared memory ------------------------------------------------------------------------------------------

DEVICE uint4 load_vec(unsigned address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
DEVICE void clear_vec(unsigned address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// Zeros in those rows of a tile whose `odd` is true, by one warp.
template <int ROWS, int TILE_CHUNKS, typename F>
DEVICE void clear_rows_of(unsigned tile, F odd) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < ROWS * 8; i += 32)
        if (odd(i / 8))
#pragma unroll
            for (int c = 0; c < TILE_CHUNKS; ++c) clear_vec(tile + (c * ROWS + i / 8) * CHUNK_ROW + i % 8 * VEC_BYTES);
}

DEVICE void bulk_store(float* target, unsigned source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes) : "memory");
}
