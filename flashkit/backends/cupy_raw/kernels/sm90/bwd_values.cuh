// The gradient by a bias, whose elements lie along the keys (cuda_common/modification.py, adds_rows): VALUES_BY_WARPS,
// the warps 2 and 3 of warp group 0 add dS, which is in shared memory for dQ, to the sums, four keys at once. Each has
// the keys of a consumer warp group. So no consumer waits for its additions.
//
// STORES_DS: each pair has an element of its own, so that dS is the gradient, and leaves by TMA as it is.
#pragma once
#include "sm90/dq_accum.cuh"

constexpr int VALUE_LANES = 16, VALUE_KEYS = WARPGROUP_KEYS / VALUE_LANES;  // of a row; of a lane

// Four or eight elements of dS as floats, or zeros.
template <int N>
DEVICE void load_ds(float (&x)[N], unsigned address, bool exist = true) {
    unsigned pairs[N / 2];
    if constexpr (N == 8) {
        const uint4 four = load_vec(address);
        pairs[0] = four.x, pairs[1] = four.y, pairs[2] = four.z, pairs[3] = four.w;
    } else {
        const float2 two = load_floats(address);
        pairs[0] = __float_as_uint(two.x), pairs[1] = __float_as_uint(two.y);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const unsigned short element = (unsigned short)((exist ? pairs[i / 2] : 0) >> i % 2 * 16);
        x[i] = STORAGE == BFLOAT16 ? widen(bfloat16_t{element}) : widen(half_t{element});
    }
}

// SUMS_BY_DISTANCE: adds dS of a warp group's tile to the sums of its distances. sums: of the first row and key; tile:
// its address. Elements of blocks (m, m + c) of 8 rows x 8 keys have the same distances for all m, so that a lane sums
// those that are in its row of a block. In turns the lanes have four c, the greatest first, and as many keys of a block
// as registers allow.
DEVICE void add_diagonals(float* sums, unsigned tile, int lane) {
    constexpr int BLOCKS = WARPGROUP_KEYS / 8, KEYS = PRODUCER_REGISTERS < 40 ? 4 : 8;
    static_assert(!SUMS_BY_DISTANCE || BLOCK_Q == WARPGROUP_KEYS, "as many blocks of rows as of keys");
#pragma unroll
    for (int turn = 0; turn < BLOCKS / 2 * 8 / KEYS; ++turn) {
        const int most = BLOCKS - 1 - turn * KEYS / 8 * 4, key = turn * KEYS % 8, c = most - lane / 8;
        float x[KEYS] = {};
#pragma unroll
        for (int m = 0; m < BLOCKS; ++m) {
            if (m + most < 0 || m + most - 3 >= BLOCKS) continue;
            const unsigned own = tile + swizzled(8 * m + lane % 8, m + c & BLOCKS - 1) + 2 * key;
            float ds[KEYS];
            load_ds(ds, own, m + c >= 0 && m + c < BLOCKS);
#pragma unroll
            for (int i = 0; i < KEYS; ++i) x[i] += ds[i];
        }
        float* at = sums + lane - 8 * most - key;  // lane: 8 (most - c) + the row of the block
#pragma unroll
        for (int i = 0; i < KEYS; ++i)
            if (x[i] != 0) add_float(at - i, x[i]);
    }
}

DEVICE void value_sums_warp(const Params& p, const TensorMap& dbias_map, unsigned base, int group) {
    const auto pipe_q = q_pipe(base);
    const auto pipe_k = k_pipe(base);
    const auto pipe_ds = ds_pipe(base);
    const int lane = threadIdx.x % 32, part = lane % VALUE_LANES;
    unsigned n = 0;  // query tiles so far
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        pipe_k.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number);
        const int b = load_word(slot), key = load_word(slot + 8) + WARPGROUP_KEYS * group + VALUE_KEYS * part;
        if (b == END) break;
        const SeqSlot seq = seq_of(p, b, slot);
        const int n_q = seq.n_q(), keys = seq.n_k() - key;  // keys from the lane's first one on
        const long long offset = seq.q_position();
        __syncwarp();
        pipe_k.consumer_release(number, lane);
        bool last;
#pragma unroll 1
        do {
            pipe_q.consumer_wait(n);
            const unsigned slot_of_tile = tile_desc_slot(base, n);
            const int desc = load_word(slot_of_tile), h = load_word(slot_of_tile + TileDesc::HEAD);
            __syncwarp();
            pipe_q.consumer_release(n, lane);
            last = desc & TileDesc::LAST_TILE;
            if constexpr (STORES_DS) {
                pipe_ds.consumer_wait(n);
                if (elect_one()) {
                    const Box box = bias_box(b, h, (desc >> 8) * BLOCK_Q, key - VALUE_KEYS * part);
                    tma_store<1>(dbias_map, box, base + AT_DS + n % 2 * BYTES_DS + group * BLOCK_Q * CHUNK_ROW);
                    bulk_commit(), bulk_wait_read();
                }
                __syncwarp();
                pipe_ds.consumer_release(n, lane);
                ++n;
                continue;
            }
            if constexpr (SUMS_BY_DISTANCE) {
                const int distance = (desc >> 8) * BLOCK_Q - (key - VALUE_KEYS * part);
                float* sums = by_distance(p.ds_by_distance, seq, h) + distance;
                pipe_ds.consumer_wait(n);
                add_diagonals(sums, base + AT_DS + n % 2 * BYTES_DS + group * BLOCK_Q * CHUNK_ROW, lane);
                __syncwarp();
                pipe_ds.consumer_release(n, lane);
                ++n;
                continue;
            }
            const int row0 = (desc >> 8) * BLOCK_Q + lane / VALUE_LANES;  // the lane's first one; it has every second
            auto sum_at = [&](int row, int k) {
                const long long place = ValueSums::first_at(b, h, row, row + offset, k, p);
                return (float*)p.values[ValueSums::FIRST] + place;
            };
            float* sums = sum_at(row0, key);
            const long long to_row = sum_at(row0 + 2, key) - sums, to_key = sum_at(row0, key + 1) - sums;
            const bool aligned = ((unsigned long long)sums | to_row * 4) % 16 == 0;  // and so are all of its rows
            const int rows = (min(n_q - row0, BLOCK_Q) + 1) / 2;
            const unsigned tile = base + AT_DS + n % 2 * BYTES_DS + group * BLOCK_Q * CHUNK_ROW + part % 2 * 8;
            auto element = [&](int i) { return tile + swizzled(lane / VALUE_LANES + 2 * i, part / 2); };
            float x[VALUE_KEYS];
            pipe_ds.consumer_wait(n);
            if (aligned && to_key == 1 && keys >= VALUE_KEYS) {
#pragma unroll 4
                for (int i = 0; i < rows; ++i, sums += to_row) load_ds(x, element(i)), red_add_float4(sums, x);
            } else {
#pragma unroll 1
                for (int i = 0; i < rows; ++i, sums += to_row) {
                    load_ds(x, element(i));
#pragma unroll
                    for (int j = 0; j < VALUE_KEYS; ++j)
                        if (j < keys) add_float(sums + j * to_key, x[j]);
                }
            }
            __syncwarp();
            pipe_ds.consumer_release(n, lane);
            ++n;
        } while (!last);
    }
    bulk_wait();
}
