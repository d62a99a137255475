// Tile scheduler and producer of the FP16x2 backward pass: one warp claims work tiles, lists the column tiles that the
// mask leaves of each, and loads both.
#pragma once
#include "sm90/fp16x2_bwd_layout.cuh"

struct TileScheduler {
    const Params& p;

    __device__ __forceinline__ int tiles() const {
        return ((int)(DQ_KERNEL ? max_n_q(p) : max_n_k(p)) + ROWS - 1) / ROWS;
    }
    __device__ __forceinline__ int heads() const { return (int)p.heads / (DQ_KERNEL ? 1 : GQA_GROUP); }
    __device__ __forceinline__ int count() const { return tiles() * heads() * (int)p.batch; }
    __device__ __forceinline__ int initial() const { return blockIdx.x; }
    // By a warp: claims an index, which claimed() tells of the result.
    __device__ __forceinline__ int claim() const { return count_if(threadIdx.x % 32 == 0, p.tile_counter); }
    __device__ __forceinline__ int claimed(int claim) const { return uniform(claim) + gridDim.x; }
    __device__ __forceinline__ void reset() const {  // by one thread of each CTA, at its end
        if (atomicAdd(p.tile_counter + 1, 1u) == gridDim.x - 1) p.tile_counter[0] = 0, p.tile_counter[1] = 0;
    }
    // Longest first: under a causal mask the last queries, the first keys.
    __device__ __forceinline__ WorkTile work_tile(int index) const {
        const int n = tiles();
        const TileCoord at = tile_coord(index, tiles_before_lpt_tail(n), heads() * (int)p.batch,
            (int)p.heads_per_l2_group);
        return work_tile_at(p, at.bh / heads(), at.bh % heads(), (DQ_KERNEL ? n - 1 - at.tile : at.tile) * ROWS);
    }
};

DEVICE void producer(const Params& p, const TensorMap& a1, const TensorMap& a2, const TensorMap& b1,
    const TensorMap& b2, unsigned base, TileList& list) {
    const Pipeline<STAGES> pipe_columns = columns_pipe(base);
    const Pipeline<ROW_STAGES> pipe_rows = rows_pipe(base);
    const TileScheduler scheduler{p};
    const int work_tiles = scheduler.count();
    unsigned n = 0, number = 0;  // column tiles, work tiles so far
    auto acquire = [&](int first, int second) {
        pipe_columns.producer_acquire(n);
        const unsigned slot = base + AT_TILE_DESCS + 8 * (n % STAGES);
        store_word(slot, first), store_word(slot + 4, second);
    };
    auto load_rows = [&](const WorkTile& at) {
        pipe_rows.producer_acquire(number);
        const unsigned buffer = number % ROW_STAGES, slot = base + AT_WORK_TILES + 12 * buffer,
            full = pipe_rows.full_barrier(number);
        store_word(slot, at.b), store_word(slot + 4, at.h), store_word(slot + 8, at.row0);
        mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * (BYTES_A1 + BYTES_A2));
#pragma unroll 1
        for (int wg = 0; wg < MMA_WARPGROUPS; ++wg) {
            const Box rows{0, at.row0 + 64 * wg, at.h, at.b};  // terms lie sequence by sequence
            load_tile<1, CHUNKS_1, 64>(a1_rows(base, number, wg), a1, rows, full);
            load_tile<1, CHUNKS_2, 64>(a2_rows(base, number, wg), a2, rows, full);
        }
    };
#pragma unroll 1
    for (int index = scheduler.initial(); index < work_tiles;) {
        const WorkTile at = scheduler.work_tile(index);
        const int claim = scheduler.claim();  // its latency is hidden behind the work tile
        const int columns = DQ_KERNEL ? at.n_k : (int)seq_info(p, at.b).n_q;
        const int tiles = (columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
        bool first = true;
#pragma unroll 1
        for (int i = 0; i < (DQ_KERNEL ? 1 : GQA_GROUP) && at.row0 < at.rows; ++i) {
            const int h = DQ_KERNEL ? at.h : at.h * GQA_GROUP + i, head = DQ_KERNEL ? at.h / GQA_GROUP : h;
            // States of the warp groups' rows. A ragged tile is PARTIAL.
            auto states_of = [&](int first_tile, int many) {
                const int from = first_tile * BLOCK_COLUMNS, whole = from + many * BLOCK_COLUMNS,
                    to = whole < columns ? whole : columns;
                auto state_of = [&](int row0, int row1) {
                    if (row0 >= at.rows) return (int)EMPTY;
                    const int end = row1 < at.rows ? row1 : at.rows;
                    const int state = DQ_KERNEL ? tile_state(p, at.b, h, at.offset, row0, end, from, to)
                                                 : tile_state(p, at.b, h, at.offset, from, to, row0, end);
                    return state == FULL && (whole > columns || row1 > at.rows) ? (int)PARTIAL : state;
                };
                const int all = state_of(at.row0, at.row0 + ROWS);
                unsigned states = 0;
#pragma unroll 1
                for (int wg = 0; wg < MMA_WARPGROUPS; ++wg)
                    states |= (all == PARTIAL && many == 1 ? state_of(at.row0 + 64 * wg, at.row0 + 64 * (wg + 1))
                        : all) << 2 * wg;
                return states;
            };
            int next = 0;
            unsigned seen;
#pragma unroll 1
            for (int count; (count = fill(list, next, tiles, seen, states_of)) > 0; first = false) {
#pragma unroll 1
                for (int e = 0; e < count; ++e, ++n) {
                    const int tile = list.entry[e] >> 8, states = list.entry[e] & 15, stage = n % STAGES;
                    const bool begins = first && e == 0;
                    if (elect_one()) {
                        const unsigned full = pipe_columns.full_barrier(n);
                        acquire(tile << 5 | (begins ? FIRST_TILE : 0) | states, h);
                        mbarrier_arrive_expect_tx(full, BYTES_B1 + BYTES_B2 + BYTES_ROW_FACTORS);
                        const Box box{0, tile * BLOCK_COLUMNS, head, at.b};
                        load_tile<1, CHUNKS_1, BLOCK_COLUMNS>(base + AT_B1 + stage * BYTES_B1, b1, box, full);
                        load_tile<1, CHUNKS_2, BLOCK_COLUMNS>(base + AT_B2 + stage * BYTES_B2, b2, box, full);
                        if constexpr (!DQ_KERNEL)
                            bulk_load(base + AT_ROW_FACTORS + stage * BYTES_ROW_FACTORS,
                                      row_at<const float>(p.row_factors, at.b, h, tile * BLOCK_COLUMNS),
                                          BYTES_ROW_FACTORS, full);
                        if (begins) load_rows(at);
                    }
                    number += begins;
                }
            }
        }
        if (first) {  // the mask leaves no tile: one that is EMPTY, whose columns are not loaded, writes zeros
            if (elect_one()) {
                acquire(FIRST_TILE, 0);
                mbarrier_arrive(pipe_columns.full_barrier(n));
                load_rows(at);
            }
            ++n, ++number;
        }
        index = scheduler.claimed(claim);
    }
    if (!elect_one()) return;
    acquire(END, 0), mbarrier_arrive(pipe_columns.full_barrier(n));
    scheduler.reset();
}
