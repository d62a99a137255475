// The gradient by a bias, whose elements lie along the keys (cuda_common/modification.py, adds_rows): VALUES_BY_WARPS,
// the warps 2 and 3 of warp group 0 add dS, which is in shared memory for dQ, to the sums, four keys at once. Each has
// the keys of a consumer warp group. So no consumer waits for its additions.
//
// STORES_DS: each pair has an element of its own, so that dS is the gradient, and leaves by TMA as it is.
//
// SUMS_BY_DISTANCE: they add dS to the sums of its distances (common/distances.cuh).
#pragma once
#include "sm90/bwd_fragments.cuh"
#include "sm90/dq_accum.cuh"

constexpr int VALUE_LANES = 16, VALUE_KEYS = WARPGROUP_KEYS / VALUE_LANES;  // of a row; of a lane

// Elements of dS as floats.
template <int N>
DEVICE void unpack(float (&x)[N], const unsigned* pairs) {
    UNROLL(i, N) {
        const unsigned short element = (unsigned short)(pairs[i / 2] >> i % 2 * 16);
        x[i] = STORAGE == BFLOAT16 ? widen(bfloat16_t{element}) : widen(half_t{element});
    }
}
DEVICE void load_ds(float (&x)[4], unsigned address) {
    const float2 two = load_floats(address);
    const unsigned pairs[2] = {__float_as_uint(two.x), __float_as_uint(two.y)};
    unpack(x, pairs);
}

// dS of a tile. sums: of the distance of its first row and key; tile: its address. A lane has the distances 2 lane - 1
// ... 2 lane + 1, and those 64 less. Of each two rows it has the two keys with some of these distances, which are two
// keys on in the next two rows.
DEVICE void add_diagonals(float* sums, unsigned tile, int lane) {
    float x[3] = {}, less[3];
#pragma unroll 4
    for (int i = 0; i < STRAIGHT / 2; ++i) {
        if (i == lane) {
            UNROLL(j, 3) less[j] = x[j], x[j] = 0;
        }
        const int pair = i - lane & 31;
        UNROLL(row, 2) {
            const unsigned word = (unsigned)load_word(tile + swizzled(2 * i + row, pair / 4) + pair % 4 * 4);
            float ds[2];
            unpack(ds, &word);
            x[row + 1] += ds[0], x[row] += ds[1];
        }
    }
    UNROLL(j, 3) {
        float* at = sums + 2 * lane + j - 1;
        if (x[j] != 0) add_float(at, x[j]);
        if (less[j] != 0) add_float(at - STRAIGHT, less[j]);
    }
}

// The same of a tile that is_straight(), from what consumers have found (PairSums).
DEVICE void add_straight(float* sums, unsigned found, int lane) {
    float2 x = load_floats(found + lane % PairSums::OF_GROUP * PairSums::BYTES);
#pragma unroll
    for (int step = 1; step < PairSums::OF_GROUP; step *= 2)
        x.x += __shfl_xor_sync(~0u, x.x, step), x.y += __shfl_xor_sync(~0u, x.y, step);
    const float moment = x.y * (1.0f / MOMENT_AT), added = lane == 0 ? x.x - moment : moment;
    if (lane < 2 && added != 0) add_float(sums + lane * MOMENT_AT, added);
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
                    const Box box = BiasTile::box(b, h, (desc >> 8) * BLOCK_Q, key - VALUE_KEYS * part);
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
                unsigned tile = base + AT_DS + n % 2 * BYTES_DS + group * BLOCK_Q * CHUNK_ROW;
                float* sums = distances(p.distance_sums, seq, h) + distance;
                int straight[BLOCK_Q / STRAIGHT];
                UNROLL(i, BLOCK_Q / STRAIGHT)
                    straight[i] = uniform(__float_as_int(*is_straight(p.distance_sums, sums + i * STRAIGHT)));
                pipe_ds.consumer_wait(n);
#pragma unroll
                for (int i = 0; i < BLOCK_Q / STRAIGHT; ++i, sums += STRAIGHT, tile += STRAIGHT * CHUNK_ROW) {
                    if (straight[i]) add_straight(sums, pair_sums(base, n, group, i), lane);
                    else add_diagonals(sums, tile, lane);
                }
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
                    UNROLL(j, VALUE_KEYS)
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
