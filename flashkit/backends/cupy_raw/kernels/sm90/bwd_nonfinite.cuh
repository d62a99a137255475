// Rows and keys of Hopper's backward pass that are not finite, or past the end, are cleared in shared memory before
// they are multiplied (bwd_layout.cuh, MAY_HIDE).
#pragma once
#include "sm90/bwd_layout.cuh"

// Zeros in those rows of a tile that `cleared` names, by one warp.
template <int ROWS, int TILE_CHUNKS, typename F>
DEVICE void clear_rows_where(unsigned tile, F cleared) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < ROWS * 8; i += 32)
        if (cleared(i / 8))
#pragma unroll
            for (int c = 0; c < TILE_CHUNKS; ++c) clear_vec(tile + (c * ROWS + i / 8) * CHUNK_ROW + i % 8 * VEC_BYTES);
}

// Whether 16 bytes of elements are finite: the exponent of a non-finite one is all ones.
DEVICE bool all_finite(const uint4& x) {
    const unsigned words[4] = {x.x, x.y, x.z, x.w}, ones = STORAGE == BFLOAT16 ? 0x7f80u : 0x7c00u;
    bool finite = true;
#pragma unroll
    for (int e = 0; e < 4; ++e) finite &= (words[e] & ones) != ones && (words[e] >> 16 & ones) != ones;
    return finite;
}

// Clears the keys of a tile that are not finite, and those past the first `existing`. bits: where a bit for each of the
// former goes, or 0.
template <int TILE_CHUNKS>
DEVICE void clear_nonfinite_keys(unsigned tile, int existing, unsigned bits) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = 0; word < NONFINITE_WORDS; ++word) {
        unsigned nonfinite = 0;  // of 32 keys; a lane reads 16 bytes of every fourth
        if constexpr (MAY_HIDE) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = 32 * word + 4 * i + lane / 8;
                bool finite = true;
#pragma unroll
                for (int c = 0; c < TILE_CHUNKS; ++c)
                    finite &= all_finite(load_vec(tile + (c * CTA_KEYS + row) * CHUNK_ROW + lane % 8 * VEC_BYTES));
                const unsigned ballot = __ballot_sync(~0u, !finite);
#pragma unroll
                for (int r = 0; r < 4; ++r) nonfinite |= (ballot >> 8 * r & 255) != 0 ? 1u << 4 * i + r : 0;
            }
        }
        if (bits != 0 && lane == 0) store_word(bits + 4 * word, (int)nonfinite);
        if (nonfinite != 0 || existing < 32 * word + 32)
            clear_rows_where<CTA_KEYS, TILE_CHUNKS>(tile, [&](int row) {
                return row / 32 == word && ((nonfinite >> row % 32 & 1) || row >= existing);
            });
    }
    fence_proxy_async();
    __syncwarp();
}

// Clears the rows of a tile of Q and of dO whose log-sum-exp is not finite. lse: its address in shared memory.
DEVICE void clear_nonfinite_rows(unsigned q, unsigned dout, unsigned lse) {
    const auto is_nonfinite = [&](int row) { return !is_finite(load_float(lse + 4 * row)); };
    clear_rows_where<BLOCK_Q, CHUNKS>(q, is_nonfinite);
    clear_rows_where<BLOCK_Q, CHUNKS_V>(dout, is_nonfinite);
    fence_proxy_async();
    __syncwarp();
}
