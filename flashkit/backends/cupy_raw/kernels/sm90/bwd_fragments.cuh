// S^T, P^T, dP^T and dS^T of 64 keys in the registers of a warp group: where each element is, and the products from and
// into them.
//
// Keys are the rows, as wgmma leaves them. Element 4 n + 2 half + c of a lane is at
//
//     key row_of_lane(half) of the 64,  row lane_row(n, c) of the query tile
//
// so four lanes share a key.
#pragma once
#include "sm90/bwd_layout.cuh"

DEVICE int lane_row(int n, int c) { return 8 * n + threadIdx.x % 4 * 2 + c; }

// Row statistics (log-sum-exps or deltas) of elements 4 n ...: [c]. address: lane_stats() bytes into the tile's.
DEVICE unsigned lane_stats(int lane) { return lane % 4 * 8; }
DEVICE void load_row_stats(float (&x)[2], unsigned address, int n) {
    const float2 pair = load_floats(address + 32 * n);
    x[0] = pair.x, x[1] = pair.y;
}

// Query tile n and work tile `number` of the CTA, and which 64 of the work tile's keys: the warp group's or, in a
// cluster, the CTA's.
struct FragmentId { unsigned base, n, number; int key_group; };

struct FragmentCoord {
    int b, h, row0, k0;
    SeqSlot seq;
    unsigned nonfinite_keys;  // address of a bit for each key of the CTA
    int first_key;            // of the 64 keys among the CTA's
};
// From shared memory, as it is rarely needed and would always take registers.
DEVICE FragmentCoord coord_of(const Params& p, const FragmentId& id) {
    const unsigned desc = tile_desc_slot(id.base, id.n), slot = work_tile_slot(id.base, id.number);
    const int b = load_word(slot);
    return {b, load_word(desc + TileDesc::HEAD), (load_word(desc) >> 8) * BLOCK_Q,
            load_word(slot + 8) + WARPGROUP_KEYS * id.key_group, seq_of(p, b, slot),
            nonfinite_keys_slot(id.base, id.number),
            CLUSTER_SIZE > 1 ? 0 : WARPGROUP_KEYS * id.key_group};
}

// Whether positions, their differences and, where SMALL_SCORE, what a score modification computes with them fit 32
// bits. A vote, so that the compiler knows it is uniform.
DEVICE bool positions_are_near(const Params& p, long long offset) {
    constexpr long long most = HAS_SCORE ? 1 << 20 : 1 << 26;
    return __all_sync(~0u, offset >= -most && offset + max_n_q(p) < most && max_n_k(p) < most);
}

// --- a bias ----------------------------------------------------------------------------------------------------------
//
// What a score modification adds: a dense bias, whose tile is in shared memory (BIAS_BYTES), or HAS_DISTANCE_BIAS.

constexpr bool HAS_BIAS = BIAS_BYTES > 0 || HAS_DISTANCE_BIAS;

// The bias of a lane's pairs: in 16 bits as pairs, in the order of a packed fragment; by distance, one of those with
// the same one, which are as many keys on as rows.
struct BiasFragment {
    static constexpr int WORDS = HAS_DISTANCE_BIAS ? S_REGS / 2 + 2 : S_REGS / 2;
    unsigned address, words[WORDS];
    const float* bias_of_lane;

    // stage: the address of the tile. In it a lane has rows and keys or, in 16 bits, the rows of matrices.
    __device__ __forceinline__ void load(const Params& p, const FragmentId& id, unsigned stage, int warp, int lane) {
        if constexpr (HAS_DISTANCE_BIAS) {
            const FragmentCoord at = coord_of(p, id);
            const int distance = at.row0 + lane_row(0, 0) - at.k0 - row_of_lane(0);
            bias_of_lane = distances(p.distance_bias, at.seq, at.h) + distance;
        }
        if constexpr (BIAS_BYTES > 0) {
            const int key = 64 * id.key_group + warp % 4 * 16, vec = key % BiasTile::CHUNK * BIAS_BYTES / VEC_BYTES;
            address = stage + key / BiasTile::CHUNK * BLOCK_Q * CHUNK_ROW;
            if constexpr (BIAS_BYTES == 2) address += swizzled(lane % 8 + lane / 16 * 8, vec + lane / 8 % 2);
            else address += swizzled(lane % 4 * 2, vec + lane / 16) + lane / 4 % 4 * 4;
        }
        load_again();
    }
    __device__ __forceinline__ void load_again() {
        if constexpr (HAS_DISTANCE_BIAS) {
            UNROLL(i, WORDS)
                words[i] = __float_as_uint(__ldg(bias_of_lane + 8 * (i / 2 - 1) + i % 2));
        } else if constexpr (BIAS_BYTES == 2) {
            UNROLL(k, BLOCK_Q / 16) {
                unsigned four[4];
                ldmatrix_x4<true>(four, address + k * 16 * CHUNK_ROW);
                UNROLL(i, 4) words[(4 * k + i) % WORDS] = four[i];
            }
        }
    }
    __device__ __forceinline__ float get(int n, int half, int c) const {
        if constexpr (HAS_DISTANCE_BIAS) return __uint_as_float(words[2 * (n - half + 1) + c]);
        if constexpr (BIAS_BYTES == 4)
            return load_float((address ^ (2 * half + c) * VEC_BYTES) + (8 * n + c) * CHUNK_ROW);
        return bias_of_pair(words[(2 * n + half) % WORDS], c);
    }
};

// MASK_TILES: a bit for each of a lane's pairs. ldmatrix has keys 2 (lane / 4) and the next one of each row.
struct MaskFragment {
    unsigned words[up(S_REGS, 32) / 32][2];

    // stage: the address of the tile.
    __device__ __forceinline__ void load(unsigned stage, int key_group, int warp, int lane) {
        const unsigned address = stage + swizzled(lane, 4 * key_group + warp % 4);
        UNROLL(i, S_REGS / 32) {
            const unsigned rows = address + 64 * i * CHUNK_ROW, bits = mask_bits<true>(rows, rows + 32 * CHUNK_ROW);
            UNROLL(half, 2)
                words[i][half] = __shfl_sync(~0u, bits, 16 * half + lane / 8 * 4 + lane % 4) >> lane / 4 % 2 * 8;
        }
    }
    __device__ __forceinline__ bool shown(int n, int half, int c) const {
        return words[n / 8][half] >> (16 * c + n % 8) & 1;
    }
};

// --- products --------------------------------------------------------------------------------------------------------
// Issued and committed here, awaited by the main loop.

// S^T = K Q^T or dP^T = V dO^T of 64 keys: both operands in shared memory.
template <int PADDED_COLUMNS>
DEVICE void issue_ss(float (&x)[S_REGS], unsigned keys, unsigned rows) {
    const unsigned long long a = descriptor(keys), b = descriptor(rows);
    wgmma_fence();
    wgmma_zero_init<0, 0>(x, a, b);
#pragma unroll
    for (int k = 1; k < PADDED_COLUMNS / 16; ++k)
        product<0, 0>(x, a + along_rows(k, CTA_KEYS), b + along_rows(k, BLOCK_Q), 1);
    wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q, with P^T or dS^T from registers.
template <int N>
DEVICE void issue_rs(float (&acc)[N], const unsigned (&left)[S_REGS / 2], unsigned rows, bool accumulate) {
    const unsigned long long b = descriptor(rows, BLOCK_Q * CHUNK_ROW);
    wgmma_fence();
    UNROLL(k, BLOCK_Q / 16) wgmma_rs<1>(acc, left, 4 * k, b + along_columns(k), k > 0 || accumulate);
    wgmma_commit();
}

// --- dropout ---------------------------------------------------------------------------------------------------------
//
// The dropout mask of a P fragment, regenerated as in the forward pass.

// A bit for each element of a lane. A Philox call serves four keys of a row, which lie in several lanes; so each of
// these lanes makes the words of a part of the rows, and they exchange them.
struct DropoutMask {
    unsigned bits[4];

    __device__ __forceinline__ static unsigned kept_of_four_keys(const Params& p, int b, int h, int row, int key) {
        const Words words = philox(p, key >> 2, row, h, b);
        unsigned kept = 0;
        UNROLL(j, 4) kept |= (words.word[j] >= (unsigned)p.dropout_threshold ? 1u : 0u) << j;
        return kept;
    }
    // Of rows 4 m + i, in the order of elements, lane i of four has bits 16 * half + 4 m + key % 4.
    __device__ __forceinline__ void fill(const Params& p, int b, int h, int row0, int k0) {
        static_assert(!HAS_DROPOUT || S_REGS <= 32, "a lane's bits of a part of the rows fit a word");
        unsigned own = 0;
        const int part = threadIdx.x % 16 / 4;
        UNROLL(half, 2)
            UNROLL(m, S_REGS / 8) {
                const int e = 4 * m + part;
                const int row = row0 + lane_row(e / 2, e % 2);
                own |= kept_of_four_keys(p, b, h, row, k0 + row_of_lane(half)) << (16 * half + 4 * m);
            }
        UNROLL(i, 4) bits[i] = __shfl_sync(~0u, own, (threadIdx.x % 32 & ~12) | 4 * i) >> part;
    }
    __device__ __forceinline__ bool kept(int n, int half, int c) const {
        const int e = 2 * n + c;
        return bits[e % 4] >> (16 * half + e / 4 * 4) & 1;
    }
};

// --- dS --------------------------------------------------------------------------------------------------------------
//
// dP to dS.

// Deltas of a lane's rows. Shared memory answers late while wgmma reads it, so the first ones are loaded before they
// are needed where registers allow.
constexpr int EARLY_DELTAS = !HAS_SCORE && PADDED_DIM <= 64 ? 2 : 0;
struct RowDeltas {
    unsigned address;
    float early[larger(EARLY_DELTAS, 1)][2];

    __device__ __forceinline__ explicit RowDeltas(unsigned address) : address(address) {
        UNROLL(i, EARLY_DELTAS) load_row_stats(early[i], address, i);
    }
    __device__ __forceinline__ void get(float (&x)[2], int n) const {
        if (n < EARLY_DELTAS)
            x[0] = early[n % larger(EARLY_DELTAS, 1)][0], x[1] = early[n % larger(EARLY_DELTAS, 1)][1];
        else load_row_stats(x, address, n);
    }
};

// SUMS_BY_DISTANCE: the sum and the moment of dS (common/distances.cuh) of the pairs that LANES lanes have in each 64
// rows of a tile, in even and in odd lanes, for bwd_values.cuh: of four where shared memory has room for so many.
struct PairSums {
    static constexpr int TILES = SUMS_BY_DISTANCE ? BLOCK_Q / STRAIGHT : 0, LANES = CHUNKS + CHUNKS_V > 2 ? 32 : 4;
    static constexpr int OF_WARP = 32 / LANES, OF_GROUP = 4 * OF_WARP, BYTES = 2 * 4;
    int lane, first;  // distance of the lane's first pair from the tile's
    float x[larger(TILES, 1)];

    // of_keys: of the lane's two keys; of_rows: of the elements times their row, counted from the lane's first one.
    __device__ __forceinline__ void set(int tile, const float (&of_keys)[2], float of_rows) {
        const float sum = of_keys[0] + of_keys[1], moment = fmaf(first, sum, fmaf(-8, of_keys[1], of_rows));
        const bool odd = lane % 2;
        x[tile] = (odd ? moment : sum) + __shfl_xor_sync(~0u, odd ? sum : moment, 1);
#pragma unroll
        for (int step = 2; step < LANES; step *= 2) x[tile] += __shfl_xor_sync(~0u, x[tile], step);
    }
};
// Those of query tile n of the CTA and the keys of a warp group: OF_WARP of each warp follow one another.
DEVICE unsigned pair_sums(unsigned base, unsigned n, int group, int tile) {
    const int place = (n % 2 * larger(PairSums::TILES, 1) + tile) * MMA_WARPGROUPS + group;
    return base + AT_PAIR_SUMS + place * PairSums::OF_GROUP * PairSums::BYTES;
}

// dS = P * slope * (dP - delta), rounded. p_slope: P times the slope of the score modification (softmax_p). UNMASKED:
// every pair is visible; else pairs whose P is 0 get a dS of 0, whatever dP is.
template <bool UNMASKED>
DEVICE void compute_ds(const Params& p, const float (&p_slope)[S_REGS], float (&dp)[S_REGS], unsigned (&ds)[S_REGS / 2],
                       const RowDeltas& deltas, const DropoutMask& dropout, PairSums& sums) {
    float of_keys[2], of_rows;
    UNROLL(n, S_REGS / 4) {
        if (n % (STRAIGHT / 8) == 0) of_keys[0] = of_keys[1] = of_rows = 0;
        float delta[2];
        deltas.get(delta, n);
        UNROLL(half, 2) {
            float x[2];
            UNROLL(c, 2) {
                const int i = 4 * n + 2 * half + c;
                if (HAS_DROPOUT) dp[i] = dropout.kept(n, half, c) ? dp[i] * (float)p.dropout_scale : 0.0f;
                x[c] = p_slope[i] * minus_delta(dp[i], delta[c]);
                if (!UNMASKED && p_slope[i] == 0) x[c] = 0;
                if constexpr (SUMS_BY_DISTANCE)
                    of_keys[half] += x[c], of_rows = fmaf(8 * (n % (STRAIGHT / 8)) + c, x[c], of_rows);
            }
            ds[2 * n + half] = pack(x[0], x[1]);
        }
        if constexpr (SUMS_BY_DISTANCE)
            if ((n + 1) % (STRAIGHT / 8) == 0) sums.set(n / (STRAIGHT / 8), of_keys, of_rows);
    }
}

// Gradients by values of the score modification. dP as compute_ds() leaves it, with dropout; a modification of slope 1,
// so that P * slope is P.
DEVICE void add_values(const Params& p, const FragmentId& id, const float (&p_slope)[S_REGS],
                       const float (&dp)[S_REGS], const RowDeltas& deltas, ValueSums& sums) {
    static_assert(!HAS_VALUES || (SLOPE_IS_ONE && !VALUES_READ_SCORE), "P and the score are not kept");
    const FragmentCoord at = coord_of(p, id);
    const long long offset = at.seq.q_position();
    sums.enter(at.b, at.h, p);
    auto add = [&](auto row, auto key, float ds) {
        using I = decltype(row);
        if (ds != 0) sums.add<I>(ds, 0, at.b, at.h, row, row + (I)offset, key, p);
    };
    float ds[S_REGS];
    UNROLL(n, S_REGS / 4) {
        float delta[2];
        deltas.get(delta, n);
#pragma unroll
        for (int i = 4 * n; i < 4 * n + 4; ++i)
            ds[i] = p_slope[i] == 0 ? 0.0f : p_slope[i] * minus_delta(dp[i], delta[i % 2]);
    }
    if (!SMALL_SCORE || !positions_are_near(p, offset)) {
#pragma unroll 1
        for (int i = 0; i < S_REGS; ++i)  // in local memory, as its index is not constant: takes few registers
            add((long long)(at.row0 + lane_row(i / 4, i % 2)), (long long)(at.k0 + row_of_lane(i / 2 % 2)), ds[i]);
    } else {
        // Eight rows on and eight keys on is the same distance: element (n + 1, half 1) is added to (n, half 0) first.
        UNROLL(i, S_REGS) {
            const int n = i / 4, half = i / 2 % 2;
            if (VALUES_BY_DISTANCE && half == 1 && n > 0) continue;
            const float other = VALUES_BY_DISTANCE && half == 0 && n + 1 < S_REGS / 4 ? ds[(i + 6) % S_REGS] : 0.0f;
            add(at.row0 + lane_row(n, i % 2), at.k0 + row_of_lane(half), ds[i] + other);
        }
    }
}
