// dK or dV of a warp's 16 keys to memory: through shared memory and by TMA, 64 columns at a time.
#pragma once
#include "sm90/bwd_layout.cuh"

// box: from the warp's first key on. The pieces go through BUFFERS places in shared memory from
// `buffer` on, STRIDE bytes apart; BEFORE pieces went there before these. The first one waits until all earlier bulk
// stores of the warp have left.
constexpr int BYTES_PIECE = 16 * CHUNK_ROW;
template <int DIM, int BEFORE, int BUFFERS, int STRIDE>
DEVICE void store_dkv(const TensorMap& map, const Box& box, int lane, unsigned buffer,
                      const float (&x)[padded(DIM) / 2], float factor) {
#pragma unroll
    for (int chunk = 0; chunk < chunks(DIM); ++chunk) {
        const unsigned target = buffer + (BEFORE + chunk) % BUFFERS * STRIDE;
        if (BEFORE + chunk == 0) bulk_wait_read();
        else bulk_wait_read<BUFFERS - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 8 * chunk; n < 8 * chunk + 8 && 8 * n < padded(DIM); n += 2) {
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) words[i] = pack(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor);
            stmatrix_x4<false>(target + swizzled(lane % 16, n % 8 + lane / 16), words[0], words[1], words[2], words[3]);
        }
        fence_proxy_async();
        __syncwarp();
        if (elect_one()) tma_store<1>(map, at_column(box, 64 * chunk), target), bulk_commit();
    }
}
