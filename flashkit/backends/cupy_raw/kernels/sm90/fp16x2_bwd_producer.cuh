// Tile shape, shared memory, products, tile scheduler and producer of the FP16x2 backward pass.
//
// From the head: DQ_KERNEL, BLOCK_COLUMNS, STAGES, ROW_STAGES, NUM_TERMS, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
// WATCHDOG, SHARED_BYTES and the offsets AT_* of shared memory, laid out by Sm90Float32BackwardTile.smem
// (cupy_raw/sm90_fp16x2.py):
//
//     AT_A1, AT_A2           [ROW_STAGES][MMA_WARPGROUPS][64][..]   rows, as terms; gradients leave through A1
//     AT_B1, AT_B2           [STAGES][BLOCK_COLUMNS][..]            columns
//     AT_ROW_FACTORS         [STAGES][3][BLOCK_COLUMNS]             of columns that are queries (fp16x2_row_factors)
//     AT_COLUMNS_PIPE, AT_ROWS_PIPE   full and empty barriers
//     AT_TILE_DESCS          for each stage: tile << 5 | FIRST_TILE | states, two bits a warp group; the query head
//     AT_WORK_TILES          for each stage of rows: b, h, row0
//     AT_LIST                a TileList
#pragma once
#include "sm90/fp16x2_terms.cuh"
#include "sm90/pipeline.cuh"

constexpr int MMA_WARPGROUPS = 2, THREADS = 128 * (MMA_WARPGROUPS + 1), ROWS = 64 * MMA_WARPGROUPS;
// Of W B1 and of W B2.
constexpr int ACC_COLUMNS_1 = padded(HEAD_DIM), ACC_COLUMNS_2 = DQ_KERNEL ? 0 : padded(HEAD_DIM_V);
constexpr int SLICE = 64;  // columns of a product
constexpr int CHUNKS_1 = NUM_TERMS * chunks(HEAD_DIM), CHUNKS_2 = NUM_TERMS * chunks(HEAD_DIM_V);
constexpr int BYTES_A1 = 64 * CHUNK_ROW * CHUNKS_1, BYTES_A2 = 64 * CHUNK_ROW * CHUNKS_2;  // of a warp group
constexpr int BYTES_B1 = BLOCK_COLUMNS * CHUNK_ROW * CHUNKS_1, BYTES_B2 = BLOCK_COLUMNS * CHUNK_ROW * CHUNKS_2;
constexpr int BYTES_ROW_FACTORS = DQ_KERNEL ? 0 : 3 * 4 * BLOCK_COLUMNS;
constexpr int FIRST_TILE = 16, END = -1;  // of a tile descriptor: the first of a work tile; END has that bit, too
constexpr float MAX_SCALE = 1.2089258e24f;  // 2^80

DEVICE Pipeline<STAGES> columns_pipe(unsigned base) { return Pipeline<STAGES>::at(base + AT_COLUMNS_PIPE); }
DEVICE Pipeline<ROW_STAGES> rows_pipe(unsigned base) { return Pipeline<ROW_STAGES>::at(base + AT_ROWS_PIPE); }
DEVICE unsigned a1_rows(unsigned base, int number, int wg) {
    return base + AT_A1 + (number % ROW_STAGES * MMA_WARPGROUPS + wg) * BYTES_A1;
}
DEVICE unsigned a2_rows(unsigned base, int number, int wg) {
    return base + AT_A2 + (number % ROW_STAGES * MMA_WARPGROUPS + wg) * BYTES_A2;
}

// `rows` of queries (dQ) or keys (dK, dV), of which this tile's begin at row0.
struct WorkTile { int b, h, row0, rows, n_k; long long offset; };

DEVICE WorkTile work_tile_at(const Params& p, int b, int h, int row0) {
    const SeqInfo seq = seq_info(p, b);
    return {b, h, row0, (int)(DQ_KERNEL ? seq.n_q : seq.n_k), (int)seq.n_k, seq.q_position};
}

// --- products --------------------------------------------------------------------------------------------------------
//
// Products of the FP16x2 backward pass: every operand is NUM_TERMS float16 terms, and W B of a tile has an accumulator
// of its own, which CUDA cores add up (fp16x2.cuh says why).

// Issues X = A B^T, term by term. DIM columns are contracted, 16 in a step.
template <int DIM>
DEVICE void issue_abt(float (&x)[BLOCK_COLUMNS / 2], unsigned a_at, unsigned b_at) {
    constexpr int STEPS = padded(DIM) / 16, LOW = 4 * chunks(DIM);  // in steps, to the low parts
    const unsigned long long a = descriptor(a_at), b = descriptor(b_at);
    auto terms = [&](unsigned long long a, unsigned long long b, bool first) {
        UNROLL(step, STEPS) {
            if (first && step == 0) wgmma_zero_init<0, 0>(x, a, b);
            else product<0, 0>(x, a + along_rows(step, 64), b + along_rows(step, BLOCK_COLUMNS), 1);
        }
    };
    if constexpr (NUM_TERMS == 2)
        terms(a + along_rows(LOW, 64), b, true), terms(a, b + along_rows(LOW, BLOCK_COLUMNS), false);
    terms(a, b, NUM_TERMS == 1);
}

// P or dS of a tile as an A operand, in terms.
struct Fragment {
    unsigned high[BLOCK_COLUMNS / 4], low[BLOCK_COLUMNS / 4];

    // Packs w. `top` holds the lane's greatest magnitude of each row; `scale` gets what 1 stands for in the row.
    __device__ __forceinline__ void pack_rows(float (&w)[BLOCK_COLUMNS / 2], const float (&top)[2], float (&scale)[2]) {
        UNROLL(half, 2) {
            scale[half] = scale_for(__float_as_uint(max_across_lanes(top[half])));
            const float inverse = inverse_of(scale[half]);
            UNROLL(i, BLOCK_COLUMNS / 4) w[i / 2 * 4 + 2 * half + i % 2] *= inverse;
        }
        UNROLL(i, BLOCK_COLUMNS / 4) to_terms(w[2 * i], w[2 * i + 1], high[i], low[i]);
    }
};

// Issues columns FROM ... FROM + 2 N - 1 of W B, into an accumulator of its own.
template <int DIM, int FROM, int N>
DEVICE void issue_slice(float (&slice)[N], const Fragment& w, unsigned b_at) {
    static_assert(FROM % 64 == 0);
    constexpr int CHUNK = BLOCK_COLUMNS * CHUNK_ROW;
    const unsigned long long b = descriptor(b_at + FROM / 64 * CHUNK, CHUNK);
    auto terms = [&](const unsigned (&x)[BLOCK_COLUMNS / 4], unsigned long long b, bool first) {
        UNROLL(step, BLOCK_COLUMNS / 16)
            wgmma_rs<1>(slice, x, 4 * step, b + along_columns(step), first && step == 0 ? 0 : 1);
    };
    wgmma_fence();
    if constexpr (NUM_TERMS == 2) terms(w.low, b, true), terms(w.high, b + (chunks(DIM) * CHUNK >> 4), false);
    terms(w.high, b, NUM_TERMS == 1);
    wgmma_commit();
}

// Waits for them and adds them up on CUDA cores; `back` is what 1 stands for in a row.
template <int FROM, int N, int M>
DEVICE void finish_slice(float (&slice)[N], Fragment& w, const float (&back)[2], float (&sums)[M]) {
    wgmma_wait<0>();
    fence_operand(slice), fence_operand(w.high);
    if constexpr (NUM_TERMS == 2) fence_operand(w.low);
    UNROLL(i, N) sums[FROM / 2 + i] = fmaf(slice[i], back[i / 2 % 2], sums[FROM / 2 + i]);
}

// sums += W B, slice by slice; meanwhile() runs while the first is in flight.
template <int DIM, int FROM = 0, int M, typename F>
DEVICE void accumulate(Fragment& w, unsigned b_at, const float (&back)[2], float (&sums)[M], F meanwhile) {
    if constexpr (FROM < padded(DIM)) {
        constexpr int WIDTH = padded(DIM) - FROM < SLICE ? padded(DIM) - FROM : SLICE;
        float slice[WIDTH / 2];
        issue_slice<DIM, FROM>(slice, w, b_at);
        meanwhile();
        finish_slice<FROM>(slice, w, back, sums);
        accumulate<DIM, FROM + WIDTH>(w, b_at, back, sums, [] {});
    }
}

// --- the producer ----------------------------------------------------------------------------------------------------
//
// One warp claims work tiles, lists the column tiles that the mask leaves of each, and loads both.

struct TileScheduler : WorkTileCounter {
    __device__ __forceinline__ int tiles() const {
        return ((int)(DQ_KERNEL ? max_n_q(p) : max_n_k(p)) + ROWS - 1) / ROWS;
    }
    __device__ __forceinline__ int heads() const { return (int)p.heads / (DQ_KERNEL ? 1 : GQA_GROUP); }
    __device__ __forceinline__ int count() const { return tiles() * heads() * (int)p.batch; }
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
