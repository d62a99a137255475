// The epilogue of the backward pass, dK and dV, and its postprocess, dQ.
#pragma once
#include "common/bwd_fallback.cuh"

// Stores dK or dV by way of shared memory, whose operands all warps have finished with.
template <Gradient WHICH, int DIM, int COLUMNS>
DEVICE void epilogue(const Params& p, const Tensor& tensor, const WorkTile& at, int head,
                     float (&x)[KV_TILES][COLUMNS][4], float factor, unsigned char* shared) {
    constexpr int ACROSS = WARPS / WARPS_KV, STAGED = 8 * larger(K_COLUMNS, V_COLUMNS);
    constexpr int BYTES = 16 * KV_TILES * pitch(STAGED);
    static_assert(WARPS * BYTES <= AT_TILE_LIST, "the tiles of all warps fit");
    const int warp = threadIdx.x / 32, k0 = at.k0 + warp / ACROSS * 16 * KV_TILES, first = warp % ACROSS * COLUMNS * 8;
    UNROLL(i, 2 * KV_TILES) {  // keys past the sequence's length
        if (k0 + 8 * i + (int)threadIdx.x % 32 / 4 < at.n_k) continue;
        UNROLL(n, COLUMNS) x[i / 2][n][i % 2 * 2] = x[i / 2][n][i % 2 * 2 + 1] = 0;
    }
    const Rows<> target(tensor, at.b, head, seq_info(p, at.b).key_offset);
    store_tile<DIM, STAGED>(x, factor, shared + warp * BYTES, 0, first, target, k0, (int)stored_n_k(p, at.b));
    if constexpr (MAY_HIDE) {
        bool nonfinite = false;
        UNROLL(i, KV_TILES * COLUMNS * 4)
            nonfinite |= !is_finite(x[i / COLUMNS / 4][i / 4 % COLUMNS][i % 4]);
        if (__any_sync(~0u, nonfinite)) {
            __syncwarp();  // all lanes have stored
#pragma unroll 1
            for (int key = k0; key < k0 + 16 * KV_TILES && key < at.n_k; ++key)
                recompute_row<WHICH>(p, at.b, head, key, first, 8 * COLUMNS, factor);
        }
    }
}

// --- bwd_postprocess -------------------------------------------------------------------------------------------------
//
// dQ from its float32 accumulators.

// Eight columns of two rows of a dQ accumulator, which lies in memory as fragments: the part of the four lanes that
// share the rows.
struct EightColumns {
    int row, column;  // of the upper row; the lower one is 8 further
    float x[2][8];

    __device__ __forceinline__ EightColumns(const float* accum, int i, float scale) {
        const int n = i % Q_COLUMNS, g = i / Q_COLUMNS % 8, j = i / Q_COLUMNS / 8 % Q_TILES;
        const int warp = i / Q_COLUMNS / 8 / Q_TILES;
        row = (warp / (WARPS / WARPS_Q) * Q_TILES + j) * 16 + g;
        column = (warp % (WARPS / WARPS_Q) * Q_COLUMNS + n) * 8;
        const float* fragment = accum + ((warp * Q_TILES + j) * Q_COLUMNS + n) * 128;
        const float4* four = reinterpret_cast<const float4*>(fragment) + 4 * g;
        UNROLL(t, 4) {
            const float4 y = four[t];
            x[0][2 * t] = y.x * scale, x[0][2 * t + 1] = y.y * scale;
            x[1][2 * t] = y.z * scale, x[1][2 * t + 1] = y.w * scale;
        }
    }
    __device__ __forceinline__ bool is_nonfinite() const {
        bool nonfinite = false;
        UNROLL(c, 16) nonfinite |= !is_finite(x[c / 8][c % 8]);
        return nonfinite;
    }
};

// Scales and rounds dq_accum to dq. A CTA takes a query tile.
extern "C" __global__ void __launch_bounds__(256, 6) bwd_postprocess(KERNEL_PARAMS) {
    const int tiles = (int)num_q_tiles(p, BLOCK_Q), number = blockIdx.x % tiles;
    const int h = blockIdx.x / tiles % (int)p.heads, entry = blockIdx.x / tiles / (int)p.heads;
    const SeqTile at = q_tile(p, entry, number, BLOCK_Q);
    const int tile = (int)at.tile, b = (int)at.b;
    const float* accum = row_at<const float>(p.dq_accum, entry, h, number);
    const float scale = (float)p.softmax_scale;
    constexpr int VECS = BLOCK_Q * padded(HEAD_DIM) / 16;
    bool nonfinite = false;
#pragma unroll 2
    for (int i = threadIdx.x; i < VECS; i += 256) {
        const EightColumns each(accum, i, scale);
        if constexpr (MAY_HIDE) nonfinite |= each.is_nonfinite();
        UNROLL(half, 2) {
            const int row = tile * BLOCK_Q + each.row + 8 * half;
            if (row < seq_info(p, b).n_q)
                store_eight<HEAD_DIM>(q_row<storage>(p, p.dq, b, h, row), each.column, each.x[half]);
        }
    }
    if (!MAY_HIDE || !__syncthreads_or(nonfinite)) return;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < VECS; i += 8) {  // a warp each
        const EightColumns each(accum, i, scale);
        if (!each.is_nonfinite()) continue;
#pragma unroll 1
        for (int row = tile * BLOCK_Q + each.row, last = row + 8; row <= last && row < (int)seq_info(p, b).n_q;
             row += 8)
            recompute_row<DQ>(p, b, h, row, each.column, 8, scale);
    }
}
