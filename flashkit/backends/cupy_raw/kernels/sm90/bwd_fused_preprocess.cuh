// The fused preprocess (FUSED_PREPROCESS): two otherwise idle warps of the backward kernel preprocess the query tiles
// of heads to come. O and dO pass through the buffer for the next work tile's K, until K is loaded: CLAIM_AHEAD query
// tiles before the end of a work tile.
//
// Before K of a work tile is loaded, these warps see to it that its head's query tiles are ready, which they may have
// to do themselves.
#pragma once
#include "sm90/bwd_preprocess.cuh"

constexpr int ROWS_PER_LOAD = 64, BYTES_PER_LOAD = ROWS_PER_LOAD * CHUNK_ROW * CHUNKS_V;  // rows of O, and of dO
static_assert(!FUSED_PREPROCESS || (!IS_PACKED && !DETERMINISTIC && CHUNKS_V <= CHUNKS && KEY_BUFFERS == 2),
              "O and dO take the place of K");

// By one thread, which has to wait for the end of its bulk stores.
DEVICE void clear_dq_accum_bulk(const Params& p, int index, unsigned base) {
    float* accum = dq_accum_at(p, index, 0);
#pragma unroll 1
    for (int i = 0; i < BYTES_DQ; i += BYTES_ZEROS) bulk_store(accum + i / 4, base + AT_ZEROS, BYTES_ZEROS);
    bulk_commit();
}

// rowsum(dO * O) of a row in shared memory.
DEVICE float dot_of_rows(unsigned out, unsigned dout, int row) {
    float total = 0;
#pragma unroll 1
    for (int c = 0; c < CHUNKS_V; ++c)
#pragma unroll 4
        for (int i = 0; i < 8; ++i) {
            const unsigned offset = c * ROWS_PER_LOAD * CHUNK_ROW + swizzled(row, i);
            total += dot(load_vec(out + offset), load_vec(dout + offset));
        }
    return total;
}

// By two warps; a thread has one of ROWS_PER_LOAD rows.
DEVICE void fused_preprocess(const Params& p, const TensorMap& out_map, const TensorMap& dout_map, unsigned base,
                             int thread) {
    const auto pipe_k = k_pipe(base);
    const bool first_warp = uniform(thread / 32) == 0, leader = thread == 0;
    const unsigned loaded = base + AT_O_LOADED;
    unsigned loads = 0, broadcasts = 0;
    int owed = 0;  // query tiles that should have been preprocessed by now
    constexpr int DONE = -1, NO_TILE = 0x7fffffff, NONE_LEFT = -(1 << 30);

    auto broadcast = [&](int x) {  // the leader's x to both warps
        const unsigned word = base + AT_BROADCAST + 4 * (broadcasts++ & 1);
        if (leader) store_word(word, x);
        named_barrier_sync(PREPROCESS_BARRIER, ROWS_PER_LOAD);
        return uniform(load_word(word));
    };
    auto preprocess = [&](int index, unsigned number) {  // in the buffer for K of work tile `number`
        const unsigned out = base + AT_K + pipe_k.stage(number) * BYTES_K, dout = out + BYTES_PER_LOAD;
        const QueryTile at = query_tile(p, index);
        if (!first_warp && elect_one()) clear_dq_accum_bulk(p, index, base);
        bool nonfinite = false;
#pragma unroll 1
        for (int from = at.tile * BLOCK_Q; from < (at.tile + 1) * BLOCK_Q; from += ROWS_PER_LOAD) {
            if (first_warp && elect_one()) {
                mbarrier_arrive_expect_tx(loaded, 2 * BYTES_PER_LOAD);
                load_tile<1, CHUNKS_V, ROWS_PER_LOAD>(out, out_map, q_box(p, at.b, at.h, from), loaded);
                load_tile<1, CHUNKS_V, ROWS_PER_LOAD>(dout, dout_map, q_box(p, at.b, at.h, from), loaded);
            }
            const RowStats given = load_given_stats(p, at.b, at.h, from + thread);
            mbarrier_wait(loaded, loads++ & 1);
            nonfinite |= store_row_stats(p, at.b, at.h, from + thread, given, dot_of_rows(out, dout, thread));
            bulk_wait();
            fence_all_proxies();
            nonfinite = named_barrier_any(PREPROCESS_BARRIER, ROWS_PER_LOAD, nonfinite);
        }
        if (leader) {
            init_semaphore(p, at, nonfinite, 0, 1);
            set_ready(p, index);
        }
    };

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        mbarrier_wait_backoff(base + AT_CLAIMED, number & 1);
        const int b = uniform(load_word(work_tile_slot(base, number)));
        if (b == END) break;
        const int bh = kv_head_index(p, b, uniform(load_word(work_tile_slot(base, number) + 4)));
        // What is left of the work tile's own head; another CTA may be at its last tiles, for which these warps wait.
        auto next_of_head = [&]() {
            if (!first_warp || is_ready(p, bh)) return DONE;
            const bool is_left = leader &&
                (int)load_acquire(PreprocessCounters::next_tile(p)) < (bh + 1) * query_tiles_per_kv_head(p);
            return is_left ? atomicAdd(PreprocessCounters::next_tile(p), 1) : NO_TILE;
        };
        int index;
#pragma unroll 1
        while ((index = broadcast(next_of_head())) != DONE)
            if (query_tile_exists(p, index)) preprocess(index, number);
        fence_all_proxies();
        if (leader) mbarrier_arrive(base + AT_HEAD_READY);

        // This work tile's share of the heads to come, while the next buffer for K is free.
        mbarrier_wait_backoff(pipe_k.empty + 8 * pipe_k.stage(number + 1), ((number + 1) / KEY_BUFFERS & 1) ^ 1,
                              BACKOFF_NS);
        owed += query_tiles_per_work_tile(p, tiles_of_keys(p));
        auto next_owed = [&]() {
            const bool has_time = leader && owed > 0 && !mbarrier_try_wait(base + AT_CLAIM, number & 1);
            return has_time ? atomicAdd(PreprocessCounters::next_tile(p), 1) : DONE;
        };
#pragma unroll 1
        while ((index = broadcast(next_owed())) != DONE) {
            if (query_tile_exists(p, index)) preprocess(index, number + 1);
            owed = query_tile_exists(p, index) ? owed - 1 : NONE_LEFT;
        }
    }
}
