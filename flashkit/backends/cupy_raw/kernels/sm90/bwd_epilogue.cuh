// dK or dV of a warp's 16 keys to memory: through shared memory and by TMA, 64 columns at a time.
#pragma once
#include "sm90/tf32_scales.cuh"

constexpr int BYTES_PIECE = 16 * CHUNK_ROW;

// The keys of a piece that exist, by a warp: TMA would also store those behind the end of a packed sequence, which are
// the next one's.
template <int DIM>
DEVICE void store_keys(const Params& p, const Tensor& tensor, const WorkTile& at, int key, int count, int chunk,
                       unsigned source, int lane) {
#pragma unroll 1
    for (int i = lane; i < count * 8; i += 32) {
        const int row = i / 8, vec = 8 * chunk + i % 8;
        if (vec < DIM / 8)
            reinterpret_cast<uint4*>(kv_row<storage>(p, tensor, at.b, at.head, key + row))[vec] =
                load_vec(source + swizzled(row, i % 8));
    }
}

// float32: 32 columns at a time through BYTES_PIECE of shared memory, so that stores are of whole 128-byte lines. The
// groups of bulk stores are empty.
template <int DIM>
DEVICE void store_dkv_float32(const Params& p, const Tensor& tensor, const WorkTile& at, int key, int lane,
                              unsigned buffer, const float (&x)[padded(DIM) / 2], float factor) {
    bulk_wait_read();
#pragma unroll
    for (int c0 = 0; c0 < padded(DIM); c0 += 32) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8 && c0 + i / 2 * 8 < padded(DIM); ++i) {
            const int e = (c0 / 8 + i / 2) * 4 + 2 * (i % 2);
            store_floats(buffer + swizzled(lane / 4 + 8 * (i % 2), 2 * (i / 2) + lane % 4 / 2) + lane % 2 * 8,
                         x[e] * factor, x[e + 1] * factor);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = 4 * i + lane / 8;
            const unsigned source = buffer + swizzled(row, lane % 8);
            const float2 low = load_floats(source), high = load_floats(source + 8);
            if (key + row < (int)max_n_k(p))
                store_float32<DIM>(row_at<float>(tensor, at.b, at.head, key + row), c0 + lane % 8 * 4,
                                   {low.x, low.y, high.x, high.y}, p);
        }
    }
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < chunks(DIM); ++chunk) bulk_commit();
}

// key: the warp's first. The pieces go through BUFFERS places in shared memory from `buffer` on, STRIDE bytes apart;
// BEFORE pieces went there before these. The first one waits until all earlier bulk stores of the warp have left. Each
// commits a group of bulk stores, if of none.
template <int DIM, int BEFORE, int BUFFERS, int STRIDE>
DEVICE void store_dkv(const Params& p, const Tensor& tensor, const TensorMap& map, const WorkTile& at, int key,
                      int lane, unsigned buffer, const float (&x)[padded(DIM) / 2], float factor) {
    if constexpr (IS_FLOAT32) {
        store_dkv_float32<DIM>(p, tensor, at, key, lane, buffer, x, factor);
        return;
    }
    const Box box = kv_box(p, at.b, at.head, key);
    const int left = IS_PACKED ? (int)seq_info(p, at.b).n_k - key : 16;  // keys
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
        if (left < 16) store_keys<DIM>(p, tensor, at, key, left, chunk, target, lane);
        if (elect_one()) {
            if (left >= 16) tma_store<1>(map, at_column(box, 64 * chunk), target);
            bulk_commit();
        }
    }
}
