// Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on tensor cores by mma.sync: weights
// recomputed from the log-sum-exp, five products.
//
// A block of WARPS warps takes BLOCK_K keys of one head and goes over the tiles of queries that see them, the last first.
//
//     K, V       [BLOCK_K][..]                  shared memory
//     Q, dO      [2][BLOCK_Q][..]               shared memory, one tile ahead
//     P, dS      [BLOCK_Q][BLOCK_K]             computed in registers, in shared memory for the next products
//     dK, dV     [BLOCK_K][..]                  registers
//     dQ         [BLOCK_Q][HEAD_DIM]            registers, then added to float32 sums in global memory
//
// The warps share each product in a grid of its own: WARPS_S of them along the queries of S and dP, WARPS_KV along the
// keys of dK and dV, WARPS_Q along the queries of dQ, the others along the second axis.
//
// dQ is summed over blocks. With ORDERED a block adds to a tile of queries when all blocks of earlier keys are done with
// it, so the bits never change: `done` has a bit for each pair of tiles. Blocks take their work by ticket, earlier keys
// first, so whoever waits, waits for a block that runs. Between two tiles of keys of one head lie those of p.splits - 1
// other heads, so that few blocks at a time add to the same tiles, and these soon follow each other at some distance.
//
// Constants of the head: BLOCK_Q, BLOCK_K, WARPS, WARPS_S, WARPS_KV, WARPS_Q, ORDERED, BLOCKS_PER_SM.
#include "sm80.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int S_TILES = BLOCK_Q / (16 * WARPS_S), S_KEYS = BLOCK_K * WARPS_S / WARPS / 8;
constexpr int KV_TILES = BLOCK_K / (16 * WARPS_KV), K_COLUMNS = padded(HEAD_DIM) * WARPS_KV / WARPS / 8;
constexpr int V_COLUMNS = padded(HEAD_DIM_V) * WARPS_KV / WARPS / 8;
constexpr int Q_TILES = BLOCK_Q / (16 * WARPS_Q), Q_COLUMNS = padded(HEAD_DIM) * WARPS_Q / WARPS / 8;
static_assert(S_KEYS % 2 == 0 && K_COLUMNS % 2 == 0 && V_COLUMNS % 2 == 0 && Q_COLUMNS % 2 == 0, "operands come in pairs");

constexpr int SIZE = sizeof(storage), PITCH = pitch(HEAD_DIM), PITCH_V = pitch(HEAD_DIM_V), PITCH_S = BLOCK_K * SIZE + 16;
constexpr int AT_V = BLOCK_K * PITCH, AT_QUERIES = AT_V + BLOCK_K * PITCH_V;
constexpr int BYTES_STAGE = BLOCK_Q * (PITCH + PITCH_V), AT_P = AT_QUERIES + 2 * BYTES_STAGE;
constexpr int AT_DS = AT_P + BLOCK_Q * PITCH_S, AT_ODD = AT_DS + BLOCK_Q * PITCH_S, AT_LIST = AT_ODD + BLOCK_K;

// A hidden pair has the weight and the gradient 0, but 0 times NaN is NaN. So rows of right operands that are not finite
// are zeroed before they are multiplied by weights, and what they would have done to visible pairs is said otherwise.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

struct Place {
    int b, h, k0, k1, n_q, n_k;
    long long offset;
    static __device__ __forceinline__ int row(int i, int half) {  // of S that a lane holds, within the tile
        return threadIdx.x / 32 / (WARPS / WARPS_S) * 16 * S_TILES + 16 * i + 8 * half + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int key(int n) {  // and the next
        return threadIdx.x / 32 % (WARPS / WARPS_S) * 8 * S_KEYS + 8 * n + threadIdx.x % 4 * 2;
    }
    // Whether positions fit 32 bits: comparing them takes half the instructions then.
    __device__ __forceinline__ bool narrow() const { return offset >= -0x7fffffffll && offset + n_q < 0x7fffffffll; }
};

// A lane's two numbers of a row and neighbouring keys to a tile in shared memory.
DEVICE void store_weights(unsigned target, int row, int key, float x, float y) {
    target += row * PITCH_S + key * SIZE;
    if constexpr (WIDE) asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(target), "f"(x), "f"(y) : "memory");
    else asm volatile("st.shared.b32 [%0], %1;" ::"r"(target), "r"(pack(x, y)) : "memory");
}

// Scores to weights, which go to shared memory, dropped ones as 0. They stay in s times the slope of the score
// modification, as the factor of dP - delta in dS.
template <bool PLAIN, bool PARTIAL_TILE, typename POSITION>
DEVICE void weights(const Params& p, const Place& at, const unsigned char* odd, float (&s)[S_TILES][S_KEYS][4],
                    const float (&shift)[S_TILES][2], int row0, unsigned target) {
    const float scale = (float)(HAS_SCORE ? p.scale : p.scale * 1.4426950408889634);
#pragma unroll
    for (int i = 0; i < S_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row0 + at.row(i, half);
            const int end = PARTIAL_TILE || HAS_SCORE ? row < at.n_q ? at.n_k : 0 : at.n_k;
            const POSITION q = (POSITION)(row + at.offset);
            const float reference = shift[i][half] * LOG2E;
#pragma unroll
            for (int n = 0; n < S_KEYS; ++n) {
                float w[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    if constexpr (PLAIN) {
                        x = w[c] = exp2_fast(fmaf(x, scale, -reference));
                        continue;
                    }
                    const int key = at.key(n) + c, k = at.k0 + key;
                    float slope = 1;
                    x *= scale;
                    if (k >= end) {
                        x = HIDDEN;
                    } else if (HAS_SCORE || PARTIAL_TILE) {
                        if (HAS_SCORE) slope = score_slope(x, at.b, at.h, row, q, k, p);
                        x = modify<PARTIAL_TILE>(x, at.b, at.h, row, q, k, p);
                        if (HAS_SCORE) x *= LOG2E;
                    }
                    w[c] = x == HIDDEN ? 0.0f : exp2_fast(x - reference);
                    // A score of a key that is not finite is -inf or has made its row's sum infinite or NaN.
                    if (MAY_HIDE && sizeof(POSITION) == 8 && odd != nullptr && odd[key])
                        w[c] = x == HIDDEN || is_finite(reference) ? 0.0f : fk_special(0);
                    x = HAS_SCORE && w[c] != 0 ? w[c] * slope : w[c];
                }
                if constexpr (HAS_DROPOUT) drop_pair(w[0], w[1], p, at.b, at.h, row, at.k0 + at.key(n));
                store_weights(target, at.row(i, half), at.key(n), w[0], w[1]);
            }
        }
}

// dP to dS, into shared memory. PLAIN: nothing is hidden.
template <bool PLAIN>
DEVICE void gradients(const Params& p, const Place& at, const float (&s)[S_TILES][S_KEYS][4],
                      float (&dp)[S_TILES][S_KEYS][4], const float (&delta)[S_TILES][2], int row0, unsigned target) {
#pragma unroll
    for (int i = 0; i < S_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < S_KEYS; ++n) {
                if constexpr (HAS_DROPOUT)
                    drop_pair(dp[i][n][2 * half], dp[i][n][2 * half + 1], p, at.b, at.h, row0 + at.row(i, half),
                              at.k0 + at.key(n));
                float d[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const float w = s[i][n][2 * half + c];
                    d[c] = w * (dp[i][n][2 * half + c] - delta[i][half]);
                    if (!PLAIN && w == 0) d[c] = 0;
                }
                store_weights(target, at.row(i, half), at.key(n), d[0], d[1]);
            }
}

// Zero what is not finite in a row of a tile; whether there was any.
template <int DIM>
DEVICE bool clean_row(storage* row) {
    bool odd = false;
#pragma unroll 1
    for (int d = 0; d < DIM; ++d)
        if (!is_finite((float)widen(row[d]))) row[d] = storage{}, odd = true;
    return odd;
}

// Whether 16 bytes of elements are: a number that is not has an exponent of ones.
DEVICE bool all_finite(const void* elements) {
    const uint4 x = *static_cast<const uint4*>(elements);
    const unsigned words[4] = {x.x, x.y, x.z, x.w}, ones = STORAGE == FLOAT16 ? 0x7c00u : STORAGE == BFLOAT16 ? 0x7f80u : 0x7f800000u;
    bool finite = true;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        finite &= (words[e] & ones) != ones && (WIDE || (words[e] >> 16 & ones) != ones);
    return finite;
}

DEVICE unsigned* done_of(const Params& p, int b, int h, int tile) { return row_at<unsigned>(p.partial_lse, b, h, tile); }
DEVICE void set_done(unsigned* word, int tile) {
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
// Whoever finds its bits set adds after a branch and a barrier, and with instructions that act where memory is: so later
// than what the bits stand for, without waiting for an acquiring load.
DEVICE unsigned get_done(const unsigned* word) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
// Bits of word number `word` that tiles before `tile` have.
DEVICE unsigned bits_before(int tile, int word) {
    return tile >= 32 * word + 32 ? ~0u : tile <= 32 * word ? 0u : (1u << tile % 32) - 1;
}

DEVICE void add(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3]) : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + e), "f"(x[e]) : "memory");
#endif
}

template <int DIM, int COLUMNS>
DEVICE void store_keys(const Params& p, const Tensor& tensor, const Place& at, int head, const float (&x)[KV_TILES][COLUMNS][4],
                       float factor) {
    const int warp = threadIdx.x / 32, across = WARPS / WARPS_KV;
#pragma unroll
    for (int i = 0; i < KV_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int k = at.k0 + warp / across * 16 * KV_TILES + 16 * i + 8 * half + threadIdx.x % 32 / 4;
            if (k >= p.n_k) continue;
            storage* row = row_at<storage>(tensor, at.b, head, k);
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
                store_pair<DIM>(row, (warp % across * COLUMNS + n) * 8 + threadIdx.x % 4 * 2, x[i][n][2 * half] * factor,
                                x[i][n][2 * half + 1] * factor);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_backward(KERNEL_PARAMS) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ unsigned ticket;
    TileList& list = *reinterpret_cast<TileList*>(shared + AT_LIST);
    const unsigned base = address_of(shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (ORDERED) {
        if (threadIdx.x == 0) ticket = atomicAdd(static_cast<unsigned*>(p.partial_lse.data) - 4, 1u);
        __syncthreads();
    }
    const unsigned index = ORDERED ? ticket : blockIdx.x;
    const int heads = (int)p.heads / GROUP;
    const Work work = work_of(index, (int)((p.n_k + BLOCK_K - 1) / BLOCK_K), heads * (int)p.batch, (unsigned)p.splits);
    const int tile_k = work.tile, b = work.bh / heads, head = work.bh % heads, n_k = (int)keys_of(p, b);
    Place at{b, head * GROUP, tile_k * BLOCK_K, 0, (int)p.n_q, n_k, offset_of(p, b)};
    at.k1 = at.k0 + BLOCK_K < n_k ? at.k0 + BLOCK_K : n_k;
    const int tiles_q = (at.n_q + BLOCK_Q - 1) / BLOCK_Q;

    float dk[KV_TILES][K_COLUMNS][4], dv[KV_TILES][V_COLUMNS][4];
    clear(dk);
    clear(dv);

    if (at.k0 < n_k) {
        if (ORDERED && HAS_MASK) {  // tiles that see nothing of these keys are done
            for (int h = at.h; h < at.h + GROUP; ++h)
                for (int tile = threadIdx.x; tile < tiles_q; tile += THREADS) {
                    const int end = tile * BLOCK_Q + BLOCK_Q < at.n_q ? tile * BLOCK_Q + BLOCK_Q : at.n_q;
                    if (tile_state(p, b, h, at.offset, tile * BLOCK_Q, end, at.k0, at.k1) == EMPTY)
                        set_done(done_of(p, b, h, tile), tile_k);
                }
        }
        load_tile<BLOCK_K, HEAD_DIM, THREADS>(Rows<>(p.k, b, head), at.k0, n_k, base);
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS>(Rows<>(p.v, b, head), at.k0, n_k, base + AT_V);
        copies_end();
        bool odd_keys = false;
        unsigned char* odd = shared + AT_ODD;
        if constexpr (MAY_HIDE) {
            copies_wait<0>();
            __syncthreads();
            // Scores of such a key are not finite; that it is zeroed here as well is made good in weights().
            constexpr int PIECES = padded(HEAD_DIM) / PER_UNIT;
            for (int i = threadIdx.x; i < BLOCK_K * PIECES; i += THREADS)
                odd_keys |= !all_finite(shared + i / PIECES * PITCH + i % PIECES * 16);
            odd_keys = __syncthreads_or(odd_keys);
            if (odd_keys) {
                for (int k = threadIdx.x; k < BLOCK_K; k += THREADS)
                    odd[k] = clean_row<HEAD_DIM>(reinterpret_cast<storage*>(shared + k * PITCH));
                __syncthreads();
            }
        }

#pragma unroll 1
        for (at.h = head * GROUP; at.h < (head + 1) * GROUP; ++at.h) {
            const Rows<> q(p.q, b, at.h), dout(p.dout, b, at.h);
            const float* shifts = row_at<const float>(p.shift, b, at.h, 0);
            const float* deltas = row_at<const float>(p.delta, b, at.h, 0);
            if (threadIdx.x == 0) list.next = 0;
            int before = -1;  // the tile of queries that was added to last
#pragma unroll 1
            while (fill<BLOCK_Q, false, true, 1>(list, p, b, at.h, at.k0, at.k1, 0, tiles_q, at.n_q)) {
                const int count = list.count;
                auto load_queries = [&](int i) {
                    if (i < count) {
                        const int row0 = list.entry[i] / 2 * BLOCK_Q;
                        const unsigned stage = base + AT_QUERIES + i % 2 * BYTES_STAGE;
                        load_tile<BLOCK_Q, HEAD_DIM, THREADS>(q, row0, at.n_q, stage);
                        load_tile<BLOCK_Q, HEAD_DIM_V, THREADS>(dout, row0, at.n_q, stage + BLOCK_Q * PITCH);
                    }
                    copies_end();
                };
                load_queries(0);
#pragma unroll 1
                for (int i = 0; i < count; ++i) {
                    const int tile = list.entry[i] / 2, row0 = tile * BLOCK_Q;
                    const bool full = list.entry[i] & 1;
                    const int at_stage = AT_QUERIES + i % 2 * BYTES_STAGE;
                    const unsigned stage = base + at_stage;
                    float shift[S_TILES][2], delta[S_TILES][2];
                    bool odd_rows = false;
#pragma unroll
                    for (int j = 0; j < S_TILES; ++j)
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
                            const int row = row0 + at.row(j, half);
                            shift[j][half] = row < at.n_q ? shifts[row] : INFINITE;
                            delta[j][half] = row < at.n_q ? deltas[row] : 0.0f;
                            odd_rows |= row < at.n_q && (!is_finite(shift[j][half]) || !is_finite(delta[j][half]));
                        }
                    unsigned* done = done_of(p, b, at.h, tile);
                    const int words = tile_k / 32 + 1;
                    unsigned seen = 0;
                    if (ORDERED && threadIdx.x < words) seen = get_done(done + threadIdx.x);
                    copies_wait<0>();
                    __syncthreads();  // the tile is there for all, and all are done with the one before
                    load_queries(i + 1);

                    float s[S_TILES][S_KEYS][4], dp[S_TILES][S_KEYS][4];
                    const int of_rows = warp / (WARPS / WARPS_S) * 16 * S_TILES, of_keys = warp % (WARPS / WARPS_S) * 8 * S_KEYS;
                    clear(s);
                    multiply_rows<HEAD_DIM>(s, stage + of_rows * PITCH, base + of_keys * PITCH);
                    const bool plain = !HAS_SCORE && full && !odd_keys && at.k0 + BLOCK_K <= n_k;
                    if (plain) weights<true, false, int>(p, at, nullptr, s, shift, row0, base + AT_P);
                    else if (!MAY_HIDE || (at.narrow() && !odd_keys))
                        weights<false, HAS_MASK, int>(p, at, nullptr, s, shift, row0, base + AT_P);
                    else weights<false, HAS_MASK, long long>(p, at, odd_keys ? odd : nullptr, s, shift, row0, base + AT_P);
                    clear(dp);
                    multiply_rows<HEAD_DIM_V>(dp, stage + BLOCK_Q * PITCH + of_rows * PITCH_V, base + AT_V + of_keys * PITCH_V);
                    if (plain && !HAS_DROPOUT) gradients<true>(p, at, s, dp, delta, row0, base + AT_DS);
                    else gradients<false>(p, at, s, dp, delta, row0, base + AT_DS);
                    if (ORDERED) {
                        for (int word = threadIdx.x; word < words; word += THREADS) {
                            const unsigned need = bits_before(tile_k, word);
                            while ((seen & need) != need) seen = get_done(done + word);
                            seen = 0;
                        }
                    }
                    if (!MAY_HIDE) {
                        __syncthreads();  // P and dS are there
                    } else if (__syncthreads_or(odd_rows)) {
                        for (int row = threadIdx.x; row < BLOCK_Q; row += THREADS) {
                            clean_row<HEAD_DIM>(reinterpret_cast<storage*>(shared + at_stage + row * PITCH));
                            if (!clean_row<HEAD_DIM_V>(reinterpret_cast<storage*>(shared + at_stage + BLOCK_Q * PITCH + row * PITCH_V)))
                                continue;
                            storage* w = reinterpret_cast<storage*>(shared + AT_P + row * PITCH_S);
                            for (int k = 0; k < BLOCK_K; ++k)
                                if ((float)widen(w[k]) != 0) w[k] = narrow(fk_special(0));
                        }
                        __syncthreads();
                    }

                    if (ORDERED) {  // what was added a while ago is there by now, so this hardly waits
                        if (before >= 0 && threadIdx.x == THREADS - 1) set_done(done_of(p, b, at.h, before), tile_k);
                        before = tile;
                    }
                    const int of_key = warp / (WARPS / WARPS_KV) * 16 * KV_TILES, of_column = warp % (WARPS / WARPS_KV);
                    multiply_turned<BLOCK_Q / STEP, true, PITCH_S, PITCH_V>(
                        dv, base + AT_P + of_key * SIZE, stage + BLOCK_Q * PITCH + of_column * V_COLUMNS * 8 * SIZE);
                    multiply_turned<BLOCK_Q / STEP, true, PITCH_S, PITCH>(
                        dk, base + AT_DS + of_key * SIZE, stage + of_column * K_COLUMNS * 8 * SIZE);

                    float dq[Q_TILES][Q_COLUMNS][4];
                    clear(dq);
                    multiply_turned<BLOCK_K / STEP, false, PITCH_S, PITCH>(
                        dq, base + AT_DS + warp / (WARPS / WARPS_Q) * 16 * Q_TILES * PITCH_S,
                        base + warp % (WARPS / WARPS_Q) * Q_COLUMNS * 8 * SIZE);
                    float* sums = row_at<float>(p.partial, b, at.h, tile) + warp * Q_TILES * Q_COLUMNS * 128 + lane * 4;
#pragma unroll
                    for (int j = 0; j < Q_TILES; ++j)
#pragma unroll
                        for (int n = 0; n < Q_COLUMNS; ++n) add(sums + (j * Q_COLUMNS + n) * 128, dq[j][n]);
                }
            }
            if (ORDERED && before >= 0 && threadIdx.x == THREADS - 1) set_done(done_of(p, b, at.h, before), tile_k);
        }
    }
    store_keys<HEAD_DIM>(p, p.dk, at, head, dk, (float)p.scale);
    store_keys<HEAD_DIM_V>(p, p.dv, at, head, dv, 1.0f);
}

// The sums of dQ, which lie as the warps hold them, to dq. A block takes a tile.
extern "C" __global__ void __launch_bounds__(256) store_queries(KERNEL_PARAMS) {
    const int tiles = (int)((p.n_q + BLOCK_Q - 1) / BLOCK_Q);
    const int tile = blockIdx.x % tiles, h = blockIdx.x / tiles % (int)p.heads, b = blockIdx.x / tiles / (int)p.heads;
    const float* sums = row_at<const float>(p.partial, b, h, tile);
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_Q * padded(HEAD_DIM) / 4; i += 256) {
        const int lane = i % 32, n = i / 32 % Q_COLUMNS, j = i / 32 / Q_COLUMNS % Q_TILES, warp = i / 32 / Q_COLUMNS / Q_TILES;
        const int row = (warp / (WARPS / WARPS_Q) * Q_TILES + j) * 16 + lane / 4;
        const int column = (warp % (WARPS / WARPS_Q) * Q_COLUMNS + n) * 8 + lane % 4 * 2;
        const float4 x = *reinterpret_cast<const float4*>(sums + 4 * i);
        const float scale = (float)p.scale;
        const long long at = (long long)tile * BLOCK_Q + row;
        if (at < p.n_q) store_pair<HEAD_DIM>(row_at<storage>(p.dq, b, h, at), column, x.x * scale, x.y * scale);
        if (at + 8 < p.n_q) store_pair<HEAD_DIM>(row_at<storage>(p.dq, b, h, at + 8), column, x.z * scale, x.w * scale);
    }
}
