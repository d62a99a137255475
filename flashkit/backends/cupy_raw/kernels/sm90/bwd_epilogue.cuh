// The backward epilogue: dK or dV of a warp's 16 keys to memory, through shared memory and by TMA, 64 columns at a
// time; and dQ of a query tile, where a work tile has all of it (STORES_DQ).
#pragma once
#include "sm90/dq_accum.cuh"
#include "sm90/bwd_layout.cuh"

constexpr int BYTES_PIECE = 16 * CHUNK_ROW;

// A warp's keys, read before their slot in shared memory is free.
struct WarpKeys {
    WorkTile at;
    int key;   // the first of the warp
    int left;  // keys from there on that exist, of packed sequences
    Box box;

    __device__ __forceinline__ WarpKeys(const Params& p, unsigned slot, int offset)  // offset: in the work tile
        : at{uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))},
          key(at.k0 + offset), left(16), box{0, key, at.head, at.b} {
        if constexpr (IS_PACKED) {
            const SeqSlot seq = seq_of(p, at.b, slot);
            left = uniform(seq.n_k()) - key, box = {0, uniform(seq.key_row(key)), at.head, 0};
        }
    }
};

// The keys of a piece that exist, by a warp: TMA would also store those behind the end of a packed sequence, which are
// the next one's.
template <int DIM>
DEVICE void store_keys(const Tensor& tensor, const WarpKeys& keys, int chunk, unsigned source, int lane) {
#pragma unroll 1
    for (int i = lane; i < keys.left * 8; i += 32) {
        const int row = i / 8, vec = 8 * chunk + i % 8;
        if (vec < DIM / 8)
            reinterpret_cast<uint4*>(row_at<storage>(tensor, 0, keys.at.head, keys.box.token + row))[vec] =
                load_vec(source + swizzled(row, i % 8));
    }
}

// float32: by lines. The groups of bulk stores are empty.
template <int DIM>
DEVICE void store_dkv_float32(const Params& p, const Tensor& tensor, const WarpKeys& keys, int lane, unsigned buffer,
                              const float (&x)[padded(DIM) / 2], float factor) {
    bulk_wait_read();
    store_lines<DIM>(x, factor, buffer, lane, [&](int row, int column, const float4& four) {
        if (keys.key + row < (int)max_n_k(p))
            store_float32<DIM>(row_at<float>(tensor, keys.at.b, keys.at.head, keys.key + row), column, four, p);
    });
    UNROLL(chunk, chunks(DIM)) bulk_commit();
}

// The pieces go through BUFFERS places in shared memory from `buffer` on, STRIDE bytes apart;
// BEFORE pieces went there before these. The first one waits until all earlier bulk stores of the warp have left. Each
// commits a group of bulk stores, if of none.
template <int DIM, int BEFORE, int BUFFERS, int STRIDE>
DEVICE void store_dkv(const Params& p, const Tensor& tensor, const TensorMap& map, const WarpKeys& keys, int lane,
                      unsigned buffer, const float (&x)[padded(DIM) / 2], float factor) {
    if constexpr (IS_FLOAT32) {
        store_dkv_float32<DIM>(p, tensor, keys, lane, buffer, x, factor);
        return;
    }
    UNROLL(chunk, chunks(DIM)) {
        const unsigned target = buffer + (BEFORE + chunk) % BUFFERS * STRIDE;
        if (BEFORE + chunk == 0) bulk_wait_read();
        else bulk_wait_read<BUFFERS - 1>();
        __syncwarp();
#pragma unroll
        for (int n = 8 * chunk; n < 8 * chunk + 8 && 8 * n < padded(DIM); n += 2) {
            unsigned words[4];
            UNROLL(i, 4) words[i] = pack(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor);
            stmatrix_x4<false>(target + swizzled(lane % 16, n % 8 + lane / 16), words[0], words[1], words[2], words[3]);
        }
        fence_proxy_async();
        __syncwarp();
        if (keys.left < 16) store_keys<DIM>(tensor, keys, chunk, target, lane);
        if (elect_one()) {
            if (keys.left >= 16) tma_store<1>(map, at_column(keys.box, 64 * chunk), target);
            bulk_commit();
        }
    }
}

// The caller's dQ of query tile `index` among all, by a warp: its 16 columns, through its part of AT_DQ, `buffer`,
// where a row takes PITCH bytes. Rows behind the end of the sequence are the next one's.
DEVICE void store_dq(const Params& p, int index, const SeqSlot& seq, int warp, int lane, unsigned buffer,
                     const float (&dq)[DQ_PART_ROWS / 2]) {
    constexpr int PITCH = 48;
    const int tiles = tiles_of_queries(p), h = index / tiles, of_seq = seq.q_row(0) / BLOCK_Q + seq.b;
    const int row0 = (index - h * tiles - of_seq) * BLOCK_Q;
    if (warp == 0 && lane == 0) set_flag(dq_semaphore(p, index), DqSemaphore::IS_CONVERTED);
    const float scale = (float)p.softmax_scale;
    const unsigned target = buffer + (lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * VEC_BYTES;
#pragma unroll
    for (int i = 0; i < DQ_PART_ROWS / 8; i += 2) {
        const float* x = dq + 4 * i;
        stmatrix_x4<true>(target + 8 * i * PITCH, pack(x[0] * scale, x[1] * scale), pack(x[2] * scale, x[3] * scale),
                          pack(x[4] * scale, x[5] * scale), pack(x[6] * scale, x[7] * scale));
    }
    __syncwarp();
    const int part = warp / 4, column = (DQ_BY_COLUMNS ? 64 * part : 0) + warp % 4 * 16 + lane % 2 * 8;
    const int first = row0 + (DQ_BY_COLUMNS ? 0 : part * DQ_PART_ROWS), n_q = seq.n_q(), token = seq.q_row(first);
    if (column >= HEAD_DIM) return;
#pragma unroll
    for (int row = lane / 2; row < DQ_PART_ROWS; row += 16)
        if (first + row < n_q)
            *reinterpret_cast<uint4*>(row_at<storage>(p.dq, 0, h, token + row) + column) =
                load_vec(buffer + row * PITCH + lane % 2 * VEC_BYTES);
}
