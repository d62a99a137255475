// Pairs in the Hopper backward pass: where they are, the products that they come from and go into, dP to dS, dK and dV to memory.
//
// Numbers lie as wgmma leaves them, keys being the rows. Element 4 n + 2 half + c of a lane is at
//
//     key key_of_lane(half),     row row_of_lane(n, c) of the tile of queries
//
// of its group's keys: there are four lanes for each key.
#pragma once
#include "sm90/pipeline.cuh"

constexpr int PAIRS = BLOCK_Q / 2;  // elements of a lane

DEVICE int key_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }
DEVICE int row_of_lane(int n, int c) { return 8 * n + threadIdx.x % 4 * 2 + c; }

// Numbers of the rows of a lane's elements 4 n ...: [c]. address: of the lane's first one, own_row() bytes into the tile's.
DEVICE unsigned own_row(int lane) { return lane % 4 * 8; }
DEVICE void load_numbers_of(float (&x)[2], unsigned address, int n) { load_two(x, address + 32 * n); }

// --- dropout ----------------------------------------------------------------------------------------------------------

// Which of a lane's weights are kept, a bit for each. A call of the generator is for four keys of a row, which several lanes
// have; each of them makes the words for a part of the rows.
struct Kept {
    unsigned bits[4];

    __device__ __forceinline__ static unsigned four(const Params& p, int b, int h, int row, int key) {
        const Words words = philox(p.seed, key >> 2, row, h, b);
        unsigned kept = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) kept |= (words.word[j] >= (unsigned)p.dropout_threshold ? 1u : 0u) << j;
        return kept;
    }
    // Of rows 4 m + i (in the order of elements) lane i of four has bits 16 * half + 4 m + key % 4.
    __device__ __forceinline__ void fill(const Params& p, int b, int h, int row0, int k0) {
        static_assert(!HAS_DROPOUT || PAIRS <= 32, "a lane's bits of a part of the rows fit a word");
        unsigned own = 0;
        const int part = threadIdx.x % 16 / 4;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int m = 0; m < PAIRS / 8; ++m) {
                const int e = 4 * m + part;
                own |= four(p, b, h, row0 + row_of_lane(e / 2, e % 2), k0 + key_of_lane(half)) << (16 * half + 4 * m);
            }
#pragma unroll
        for (int i = 0; i < 4; ++i) bits[i] = __shfl_sync(~0u, own, (threadIdx.x % 32 & ~12) | 4 * i) >> part;
    }
    __device__ __forceinline__ bool has(int n, int half, int c) const {
        const int e = 2 * n + c;
        return bits[e % 4] >> (16 * half + e / 4 * 4) & 1;
    }
};

// --- where pairs are --------------------------------------------------------------------------------------------------

constexpr long long FAR = 1 << 26;

// Whether positions fit 32 bits, whatever is made of them; asked as a vote, whose outcome is known to be the same in all lanes.
DEVICE bool is_near(const Params& p, long long offset) {
    return __all_sync(~0u, offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
}

// The place of a group's pairs; where blocks share an item, `group` is the block's number.
struct Place {
    int b, h, row0, k0;
    unsigned odd;  // address of bits of the block's keys that are not finite
    int first;     // of the group's keys within that
};
// Of tile `n` of queries, item `number`: from shared memory, since it is asked for rarely and would take registers always.
DEVICE Place place_of(unsigned base, unsigned n, unsigned number, int group) {
    const unsigned tile_desc = tile_desc_of(base, n), slot = work_tile_slot(base, number);
    return {load_word(slot), load_word(tile_desc + 4), (load_word(tile_desc) >> 8) * BLOCK_Q, load_word(slot + 8) + GROUP_KEYS * group,
            odd_of(base, number), KEYS_SHARED ? 0 : GROUP_KEYS * group};
}

// Scores to weights, rounded in `pairs`; weight(x, number of its row, n, half, c) leaves in x what dP - delta is multiplied by. early:
// numbers of the first rows, loaded before.
template <int EARLY, typename F>
DEVICE void weigh_each(float (&s)[PAIRS], unsigned (&pairs)[PAIRS / 2], const float (&early)[EARLY][2], unsigned shift, F weight) {
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float l[2];
        if (n >= EARLY) load_numbers_of(l, shift, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float w[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) w[c] = weight(s[4 * n + 2 * half + c], n < EARLY ? early[n % EARLY][c] : l[c], n, half, c);
            pairs[2 * n + half] = pack(w[0], w[1]);
        }
    }
}

// --- dP to dS ---------------------------------------------------------------------------------------------------------

// Deltas of a lane's rows. Shared memory, which products read all the time, answers late: so where there are registers the first
// ones are loaded before they are needed. Over 128 columns it was 8 to 12 % slower so, in order 1 % faster to 5 % slower.
constexpr int EARLY_DELTAS = !HAS_SCORE && COLUMNS <= 64 ? 2 : 0;
struct Deltas {
    unsigned address;
    float early[larger(EARLY_DELTAS, 1)][2];

    __device__ __forceinline__ explicit Deltas(unsigned address) : address(address) {
#pragma unroll
        for (int i = 0; i < EARLY_DELTAS; ++i) load_numbers_of(early[i], address, i);
    }
    __device__ __forceinline__ void of(float (&x)[2], int n) const {
        if (n < EARLY_DELTAS) x[0] = early[n % larger(EARLY_DELTAS, 1)][0], x[1] = early[n % larger(EARLY_DELTAS, 1)][1];
        else load_numbers_of(x, address, n);
    }
};

// dP to dS, rounded in `pairs`. PLAIN: nothing is hidden.
template <bool PLAIN>
DEVICE void gradients(const Params& p, const float (&s)[PAIRS], float (&dp)[PAIRS], unsigned (&pairs)[PAIRS / 2],
                      const Deltas& deltas, const Kept& kept) {
#pragma unroll
    for (int n = 0; n < PAIRS / 4; ++n) {
        float d[2];
        deltas.of(d, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int i = 4 * n + 2 * half + c;
                if (HAS_DROPOUT) dp[i] = kept.has(n, half, c) ? dp[i] * (float)p.dropout_scale : 0.0f;
                x[c] = s[i] * (dp[i] - d[c]);
                if (!PLAIN && s[i] == 0) x[c] = 0;
            }
            pairs[2 * n + half] = pack(x[0], x[1]);
        }
    }
}

// --- products that both ways to share the work have; they are begun here, and awaited by who needs them -----------------

// S^T = K Q^T or dP^T = V dO^T, of 64 of the block's keys.
template <int ROW_SUM_BY_MMA>
DEVICE void begin_pairs(float (&x)[PAIRS], unsigned keys, unsigned rows) {
    const unsigned long long a = descriptor(keys), b = descriptor(rows);
    wgmma_fence();
    wgmma_zero_init<0, 0>(x, a, b);
#pragma unroll
    for (int k = 1; k < ROW_SUM_BY_MMA / 16; ++k) product<0, 0>(x, a + along_rows(k, HELD), b + along_rows(k, BLOCK_Q), 1);
    wgmma_commit();
}

// dV += P^T dO or dK += dS^T Q, from the registers where P^T or dS^T is.
template <int N>
DEVICE void begin_sums(float (&sums)[N], const unsigned (&left)[PAIRS / 2], unsigned rows, bool add) {
    const unsigned long long b = descriptor(rows, BLOCK_Q * CHUNK_ROW);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k) wgmma_rs<1>(sums, left, 4 * k, b + along_columns(k), k > 0 || add);
    wgmma_commit();
}

// --- storing ----------------------------------------------------------------------------------------------------------

// dK or dV of a warp's 16 keys, from key `first` of the item's on, leaves by the copy engine, 64 columns at a time, through one
// of PIECES places in shared memory, APART bytes from each other. BEFORE: how many pieces went there before these; at the first
// one all else that was sent from there has left. Straight from registers, eight lines a store, it took as long as a tile.
constexpr int BYTES_PIECE = 16 * CHUNK_ROW;
template <int DIM, int BEFORE, int PIECES, int APART>
DEVICE void send_keys(const TensorMap& map, const WorkTile& at, int first, int lane, unsigned place, const float (&x)[padded(DIM) / 2],
                      float factor) {
#pragma unroll
    for (int chunk = 0; chunk < chunks(DIM); ++chunk) {
        const unsigned target = place + (BEFORE + chunk) % PIECES * APART;
        if (BEFORE + chunk == 0) bulk_wait_read();
        else bulk_wait_read<PIECES - 1>();
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
        if (elect_one()) tma_store<1>(map, {64 * chunk, at.k0 + first, at.head, at.b}, target), bulk_commit();
    }
}
