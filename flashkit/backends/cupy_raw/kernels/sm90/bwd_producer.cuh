// The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
// deltas, and V with the first tile of a work tile.
#pragma once
#include "sm90/bwd_kv_source.cuh"

DEVICE void producer(const Params& p, const KvSource& kv, const TensorMap& q_map, const TensorMap& dout_map,
                     unsigned base, const QueryTileList* lists) {
    const auto pipe_q = q_pipe(base);
    const auto pipe_dout = dout_pipe(base);
    const auto pipe_list = list_pipe(base);
    const bool leader = threadIdx.x == 0;
    unsigned n = 0, number = 0, nonfinite_tiles = 0;  // query tiles, work tiles, query tiles to be cleared so far
    bool first = true;
    auto load_q_and_dout = [&](int b, int h, int k0, int index, int tile, unsigned states, bool last) {
        const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
        const unsigned q_full = pipe_q.full + 8 * stage, dout_full = pipe_dout.full + 8 * dout_stage;
        // Rows that are not finite are cleared between loading and committing the stages.
        const bool nonfinite = CLEARS_ROWS && (states & TileDesc::NONFINITE_ROWS);
        const unsigned q_loaded = nonfinite ? base + AT_ROWS_LOADED : q_full;
        const unsigned dout_loaded = nonfinite ? base + AT_ROWS_LOADED : dout_full;
        const unsigned q = base + AT_Q + stage * BYTES_Q, dout = base + AT_DOUT + dout_stage * BYTES_DOUT;
        const unsigned lse = base + AT_LSE + stage * BYTES_ROW_STATS;
        if (elect_one()) {
            const float *lse_source = static_cast<const float*>(p.bwd_lse.data) + (long long)index * BLOCK_Q;
            const float *delta_source = static_cast<const float*>(p.delta.data) + (long long)index * BLOCK_Q;
            const Box rows = q_box(p, b, h, tile * BLOCK_Q);
            pipe_q.producer_acquire(n);
            const unsigned desc = tile_desc_slot(base, n);
            store_word(desc, tile << 8 | (last ? TileDesc::LAST_TILE : 0) | states);
            store_word(desc + TileDesc::HEAD, h), store_word(desc + TileDesc::INDEX, index);
            mbarrier_arrive_expect_tx(q_loaded,
                                      BYTES_Q + BYTES_ROW_STATS + (nonfinite ? BYTES_DOUT + BYTES_ROW_STATS : 0));
            load_tile<1, CHUNKS, BLOCK_Q>(q, q_map, rows, q_loaded);
            bulk_load(lse, lse_source, BYTES_ROW_STATS, q_loaded);
            if (first) kv.load_v(b, h, k0, number);
            pipe_dout.producer_acquire(n);
            if (!nonfinite) mbarrier_arrive_expect_tx(dout_loaded, BYTES_DOUT + BYTES_ROW_STATS);
            load_tile<1, CHUNKS_V, BLOCK_Q>(dout, dout_map, rows, dout_loaded);
            bulk_load(base + AT_DELTA + dout_stage * BYTES_ROW_STATS, delta_source, BYTES_ROW_STATS, dout_loaded);
        }
        if (nonfinite) {
            __syncwarp();
            mbarrier_wait(base + AT_ROWS_LOADED, nonfinite_tiles++ & 1);
            clear_nonfinite_rows(q, dout, lse);
            if (leader) mbarrier_arrive(q_full), mbarrier_arrive(dout_full);
        }
        first = false, ++n;
    };
    // A query tile is held back until it is known whether it is the work tile's last.
    int held = 0, held_head = 0, held_index = 0;
    unsigned held_states = 0;
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        pipe_list.consumer_wait(c);
        const QueryTileList& list = lists[c % NUM_LISTS];
        const int b = list.b, h = list.h, k0 = list.k0, count = list.count, first_index = list.first_index;
        if (b == END) break;
        const bool claims = !IS_PACKED || list.ends != QueryTileList::CLAIMED;
        const int claim_at = list.ends && claims ? (count > CLAIM_AHEAD ? count - CLAIM_AHEAD : 0) : -1;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (!DETERMINISTIC && i == claim_at && leader) mbarrier_arrive(base + AT_CLAIM);
            if (held_states != 0) load_q_and_dout(b, held_head, k0, held_index, held, held_states, false);
            held = list.entry[i] >> 8, held_states = list.entry[i] & 255;
            held_head = h, held_index = first_index + held;
        }
        if (list.ends) {
            // Consumers expect a query tile in each work tile: where there is none, one whose pairs are all masked. Its
            // rows may be non-finite.
            if (held_states == 0) {
                held = 0, held_head = h, held_index = first_index;
                held_states = PARTIAL * 5 | TileDesc::NO_VISIBLE_PAIR | (CLEARS_ROWS ? TileDesc::NONFINITE_ROWS : 0);
            }
            load_q_and_dout(b, held_head, k0, held_index, held, held_states, true);
            held_states = 0, first = true, ++number;
            // DETERMINISTIC: a CTA that claimed early, while it waits for its turn, would keep others waiting for its
            // next turns.
            if (claims && (DETERMINISTIC || claim_at == count) && leader) mbarrier_arrive(base + AT_CLAIM);
        }
        __syncwarp();
        if (leader) mbarrier_arrive(pipe_list.empty + 8 * pipe_list.stage(c));
    }
}
