// Tile shape and shared memory of the FP16x2 backward pass.
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
#include "common/tile_order.cuh"
#include "sm90/fp16x2_terms.cuh"
#include "sm90/tile_lists.cuh"

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

template <int VALUE> struct Number { static constexpr int value = VALUE; };  // an argument of generic lambdas

// A lane's row among the 64 of its warp group.
DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

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
