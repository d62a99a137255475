// The epilogue of the backward pass: dK and dV.
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
