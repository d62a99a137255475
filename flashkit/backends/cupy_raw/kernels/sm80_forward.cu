// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on tensor cores by mma.sync.
//
// A block of WARPS warps takes BLOCK_Q rows and goes over the tiles of keys that they see. With PACK > 1 a row is one
// of the PACK query heads that share a key/value head, at one token: all of them use what is loaded once. With SPLIT a
// block takes one of p.splits parts of the keys, and `combine` joins the parts (FlashDecoding).
//
//     Q          [BLOCK_Q][HEAD_DIM]            shared memory
//     K, V       [STAGES][BLOCK_K][..]          shared memory, filled STAGES - 1 tiles ahead
//     S, P       [BLOCK_Q][BLOCK_K]             registers
//     O          [BLOCK_Q][HEAD_DIM_V]          registers, unscaled
//     m, l       [BLOCK_Q]                      reference and sum of a row's weights, base 2: registers
//
// WARPS_K warps share 16 TILES rows. Where it is 2, each has half of the keys of S and then half of the columns of O, and P
// goes through shared memory: a warp has room for few rows of a wide O, and what it reads should serve many.
//
// Measured on an H200, bfloat16. 256 columns: a warp for each 16 rows 15 % slower than two for 32; two blocks of 64 x 32 to a
// multiprocessor 10 to 25 %; 128 x 32 in three stages 20 %. 128 columns: 128 x 32 in three stages 1 to 2 % slower, 64 x 64
// and 8 warps 15 to 30 %. With 1,024 tokens what begins and ends a block is a tenth of its time: hence the guess at the
// first tile and the outputs in 16 bytes. Decoding: 32 or 128 keys, more warps, stages or parts, or 256 bytes fetched: all
// as fast or slower.
//
// Constants of the head: BLOCK_Q, BLOCK_K, WARPS, WARPS_K, STAGES, PACK, SPLIT, BLOCKS_PER_SM.
#include "sm80.cuh"

constexpr int THREADS = 32 * WARPS, TILES = BLOCK_Q * WARPS_K / (16 * WARPS), KEYS = BLOCK_K / WARPS_K / 8;
constexpr int COLUMNS = padded(HEAD_DIM_V) / WARPS_K / 8;
constexpr bool SPREAD = WIDE || !HAS_MASK || HEAD_DIM <= 64;  // registers leave room to copy among the steps of a product
static_assert(KEYS % 2 == 0 && COLUMNS % 2 == 0, "operands come in pairs");
constexpr int BYTES_Q = BLOCK_Q * pitch(HEAD_DIM), BYTES_K = BLOCK_K * pitch(HEAD_DIM);
constexpr int BYTES_STAGE = BYTES_K + BLOCK_K * pitch(HEAD_DIM_V), AT_LIST = BYTES_Q + STAGES * BYTES_STAGE;
constexpr int AT_P = AT_LIST + (int)sizeof(TileList), PITCH_P = BLOCK_K * (int)sizeof(storage) + 16;
constexpr int AT_ROWS = AT_P + BLOCK_Q * PITCH_P;  // numbers of a row that its warps tell each other; WARPS_K > 1, like P

// Weights up to this much above the reference are taken as they come: they fit the type that they are rounded to.
constexpr float LIMIT = STORAGE == FLOAT16 ? 32768.0f : 1e18f;

// A hidden pair has the weight 0, but 0 times NaN is NaN. So where an output is not finite though its sum is, the block
// is done again, product by product. So it is where float32 is split, which at first makes infinity NaN.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT, SPLITS = WIDE && TERMS == 3;

// What a block works at, and the place of its lanes in it.
struct Place {
    int b, h, row0, rows, n_k;  // h: the first of PACK heads; rows: PACK rows for a token, of which this block's start at row0
    long long offset;

    __device__ __forceinline__ int row(int i, int half) const {  // that a lane holds; of the block's head and token
        return row0 + row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int row_of_warp() { return threadIdx.x / 32 / WARPS_K * 16 * TILES; }
    static __device__ __forceinline__ int share() { return WARPS_K == 1 ? 0 : threadIdx.x / 32 % WARPS_K; }
    static __device__ __forceinline__ int key(int n) { return (share() * KEYS + n) * 8 + threadIdx.x % 4 * 2; }  // and the next
    static __device__ __forceinline__ int column(int n) { return (share() * COLUMNS + n) * 8 + threadIdx.x % 4 * 2; }
    // Whether positions fit 32 bits: comparing them takes half the instructions then.
    __device__ __forceinline__ bool narrow() const { return offset >= -0x7fffffffll && offset + rows < 0x7fffffffll; }
};

// The scale to base 2; in float32 it is rounded once.
DEVICE float base_2(const Params& p) { return WIDE ? (float)(p.scale * 1.4426950408889634) : (float)p.scale * LOG2E; }

// Scores as they come from the product to scores in base 2, -inf where hidden. POSITION: the type that positions fit.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void modify_tile(const Params& p, const Place& at, float (&s)[TILES][KEYS][4], int k0) {
    const float scale = HAS_SCORE ? (float)p.scale : base_2(p);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int index = at.row(i, half), row = index / PACK, h = at.h + index % PACK;
            const POSITION q = (POSITION)(row + at.offset);
            const int end = index < at.rows ? at.n_k : 0;  // rows that do not exist: what is hidden has no effect
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    const int k = k0 + at.key(n) + c;
                    x *= scale;
                    if (!HAS_SCORE && !PARTIAL_TILE) {
                        x = k < at.n_k ? x : HIDDEN;
                    } else if (k < end) {
                        x = modify<PARTIAL_TILE>(x, at.b, h, row, q, k, p);
                        if (HAS_SCORE) x *= LOG2E;
                    } else {
                        x = HIDDEN;
                    }
                }
        }
}

DEVICE void modify_tile(const Params& p, const Place& at, bool full, float (&s)[TILES][KEYS][4], int k0) {
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, needed or not
    if constexpr (!HAS_SCORE && !HAS_MASK) {
        modify_tile<false, int>(p, at, s, k0);
    } else if (at.narrow()) {
        if (HAS_MASK && !full) modify_tile<true, int>(p, at, s, k0);
        else modify_tile<false, int>(p, at, s, k0);
    } else {
        modify_tile<HAS_MASK, long long>(p, at, s, k0);  // also right where all is visible
    }
}

// Whether a condition holds in all warps that share rows. What they have written to shared memory is there then.
DEVICE bool in_all_warps(bool condition) {
    if constexpr (WARPS_K == 1) return __all_sync(~0u, condition);
    int all;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %1, 0; barrier.red.and.pred p, %2, %3, p; selp.s32 %0, 1, 0, p; }"
                 : "=r"(all) : "r"((int)condition), "r"(1 + (int)threadIdx.x / 32 / WARPS_K), "n"(32 * WARPS_K) : "memory");
    return all;
}

// Over the lanes and warps that share a row, for each of a lane's rows.
template <typename F>
DEVICE void across_rows(float (&x)[TILES][2], F join) {
    extern __shared__ __align__(16) unsigned char shared[];
    float(*told)[BLOCK_Q] = reinterpret_cast<float(*)[BLOCK_Q]>(shared + AT_ROWS);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            x[i][half] = across_lanes(x[i][half], join);
            if (WARPS_K > 1 && threadIdx.x % 4 == 0)
                told[Place::share()][Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4] = x[i][half];
        }
    if constexpr (WARPS_K > 1) {
        in_all_warps(true);
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                x[i][half] = told[0][row];
#pragma unroll
                for (int other = 1; other < WARPS_K; ++other) x[i][half] = join(x[i][half], told[other][row]);
            }
    }
}

// Scores in base 2 to weights relative to the greatest so far; what was summed before is rescaled to it.
DEVICE void online_softmax(float (&s)[TILES][KEYS][4], float (&m)[TILES][2], float (&l)[TILES][2],
                           float (&output)[TILES][COLUMNS][4]) {
    const auto greater = [](float x, float y) { return fmaxf(x, y); };
    const auto greatest = [&](int i, int half) {  // of a lane's
        float top = m[i][half];
#pragma unroll
        for (int n = 0; n < KEYS; ++n) top = fmaxf(top, fmaxf(s[i][n][2 * half], s[i][n][2 * half + 1]));
        return top;
    };
    float tops[TILES][2];
    if constexpr (WARPS_K > 1) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) tops[i][0] = greatest(i, 0), tops[i][1] = greatest(i, 1);
        across_rows(tops, greater);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float top = WARPS_K > 1 ? tops[i][half] : across_lanes(greatest(i, half), greater);
            const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
            const float factor = exp2_fast(m[i][half] - shift);
            float sum = 0;
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    x = exp2_fast(x - shift);
                    sum += x;
                }
            m[i][half] = top;
            l[i][half] = l[i][half] * factor + sum;  // of this lane's keys; the row's is formed at the end
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n)
                output[i][n][2 * half] *= factor, output[i][n][2 * half + 1] *= factor;
        }
}

// The same for a tile that needs no modification, without looking for the greatest: m need not be that, only near it.
// False where it is not near enough (or a score is NaN): then the scores are needed anew. sum: of the tile's weights.
DEVICE bool optimistic_softmax(float (&s)[TILES][KEYS][4], const float (&m)[TILES][2], float (&sum)[TILES][2], float scale) {
    bool near = true;
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = 0;
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& x = s[i][n][2 * half + c];
                    x = exp2_fast(fmaf(x, scale, -m[i][half]));
                    total += x;
                }
            sum[i][half] = total;
            near &= total <= LIMIT;
        }
    return near;
}

DEVICE void drop_tile(const Params& p, const Place& at, float (&s)[TILES][KEYS][4], int k0) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int index = at.row(i, half);
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
                drop_pair(s[i][n][2 * half], s[i][n][2 * half + 1], p, at.b, at.h + index % PACK, index / PACK,
                          k0 + at.key(n));
        }
}

DEVICE void store_weights(const float (&s)[TILES][KEYS][4], storage* weights) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < KEYS; ++n) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                char* target = reinterpret_cast<char*>(weights) + row * PITCH_P + Place::key(n) * (int)sizeof(storage);
                const float x = s[i][n][2 * half], y = s[i][n][2 * half + 1];
                if constexpr (WIDE) *reinterpret_cast<float2*>(target) = float2{x, y};
                else *reinterpret_cast<unsigned*>(target) = pack(x, y);
            }
}

// S = Q K^T on the ordinary units.
DEVICE void scores_carefully(float (&s)[TILES][KEYS][4], const storage* q, const storage* k) {
    constexpr int ROW = pitch(HEAD_DIM) / (int)sizeof(storage);
#pragma unroll 1
    for (int d = 0; d < HEAD_DIM; ++d)
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float x = (float)widen(q[(Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4) * ROW + d]);
#pragma unroll
                for (int n = 0; n < KEYS; ++n)
#pragma unroll
                    for (int c = 0; c < 2; ++c) s[i][n][2 * half + c] += x * (float)widen(k[(Place::key(n) + c) * ROW + d]);
            }
}

// O += P V, leaving out the values of weights that are 0.
DEVICE void accumulate_carefully(float (&output)[TILES][COLUMNS][4], const float (&s)[TILES][KEYS][4],
                                 const storage* weights, const storage* v) {
    float own[TILES][KEYS][4];  // indexed by the loop below, so in memory
    if constexpr (WARPS_K == 1) {
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int n = 0; n < KEYS; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) own[i][n][e] = s[i][n][e];
    }
#pragma unroll 1
    for (int k = 0; k < BLOCK_K; ++k) {
        const storage* value = v + k * (pitch(HEAD_DIM_V) / (int)sizeof(storage));
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = Place::row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
                const float w = WARPS_K == 1
                    ? __shfl_sync(~0u, own[i][k / 8 % KEYS][2 * half + k % 2], (threadIdx.x & 28) + k % 8 / 2)
                    : (float)widen(weights[row * (PITCH_P / (int)sizeof(storage)) + k]);
                if (w != 0) {
#pragma unroll
                    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                        for (int c = 0; c < 2; ++c) output[i][n][2 * half + c] += w * (float)widen(value[Place::column(n) + c]);
                }
            }
    }
}

// Divide by the sums; store output and log-sum-exp, or those of a part. Outputs go through the memory of Q, where its rows
// are wide enough.
constexpr bool STAGED = !SPLIT && padded(HEAD_DIM_V) <= padded(HEAD_DIM);
DEVICE void finish(const Params& p, const Place& at, int part, float (&m)[TILES][2], const float (&l)[TILES][2],
                   float (&output)[TILES][COLUMNS][4], unsigned char* q_of_warp) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int index = at.row(i, half), row = index / PACK, h = at.h + index % PACK;
            float top = m[i][half], sum = l[i][half], factor = 1;
            if (HAS_SINKS && !SPLIT) {  // one more logit in the sum, without a value
                const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E;
                if (sink != HIDDEN) {
                    top = fmaxf(top, sink);
                    factor = exp2_fast(m[i][half] - top);
                    sum = sum * factor + exp2_fast(sink - top);
                }
            }
            const bool empty = sum == 0;  // no key is visible
            const float lse = empty ? HIDDEN : fmaf(top, LN2, logf(sum));
            factor = empty ? 0.0f : factor / sum;
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) output[i][n][2 * half] *= factor, output[i][n][2 * half + 1] *= factor;
            if (index >= at.rows) continue;
            if (threadIdx.x % 4 == 0 && at.share() == 0) {
                if constexpr (SPLIT) *row_at<float>(p.partial_lse, part * p.batch + at.b, h, row) = lse;
                else *row_at<float>(p.lse, at.b, h, row) = lse;
            }
            if constexpr (SPLIT) {
                float* target = row_at<float>(p.partial, part * p.batch + at.b, h, row);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    const int column = at.column(n);
                    if (column < HEAD_DIM_V) target[column] = output[i][n][2 * half];
                    if (column + 1 < HEAD_DIM_V) target[column + 1] = output[i][n][2 * half + 1];
                }
            } else if constexpr (!STAGED) {
                storage* target = row_at<storage>(p.out, at.b, h, row);
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n)
                    store_pair<HEAD_DIM_V>(target, at.column(n), output[i][n][2 * half], output[i][n][2 * half + 1]);
            }
        }
    if constexpr (STAGED) {
        const int first = at.row0 + at.row_of_warp(), column = at.share() * COLUMNS * 8;
        store_tile<HEAD_DIM_V, pitch(HEAD_DIM)>(output, 1.0f, q_of_warp + column * sizeof(storage), column, [&](int r) {
            const int index = first + r;
            return index < at.rows ? row_at<storage>(p.out, at.b, at.h + index % PACK, index / PACK) : nullptr;
        });
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_forward(KERNEL_PARAMS) {
    extern __shared__ __align__(16) unsigned char shared[];
    TileList& list = *reinterpret_cast<TileList*>(shared + AT_LIST);
    storage* shared_weights = reinterpret_cast<storage*>(shared + AT_P);
    const unsigned q_shared = address_of(shared), stages = q_shared + BYTES_Q;
    const unsigned q_of_warp = q_shared + Place::row_of_warp() * pitch(HEAD_DIM);

    const int heads = (int)p.heads / PACK, rows = (int)p.n_q * PACK, tiles = (rows + BLOCK_Q - 1) / BLOCK_Q;
    const unsigned parts = SPLIT ? (unsigned)p.splits : 1, part = blockIdx.x % parts;
    // Tiles with most to do first, of as many heads at a time as have their keys and values in the L2 cache together; of
    // the tiles with least to do a quarter is left to the end, where they even out when blocks finish.
    const long long fit = 24000000 / (p.n_k * (HEAD_DIM + HEAD_DIM_V) * (long long)sizeof(storage) + 1);
    const unsigned all = heads * (unsigned)p.batch, index = blockIdx.x / parts, early = HAS_MASK ? tiles - tiles / 4 : tiles;
    Work work;
    if (index < early * all) work = work_of(index, early, all, fit < 1 ? 1 : fit > all ? all : (unsigned)fit);
    else work = {(int)(index / all), (int)(index % all)};
    const int b = work.bh / heads, h = work.bh % heads * PACK, row0 = (tiles - 1 - work.tile) * BLOCK_Q;
    const Place at{b, h, row0, rows, (int)keys_of(p, b), offset_of(p, b)};
    const int from = row0 / PACK, to = ((row0 + BLOCK_Q < rows ? row0 + BLOCK_Q : rows) + PACK - 1) / PACK;
    const long long key_tiles = (at.n_k + BLOCK_K - 1) / BLOCK_K;
    const int first = (int)(key_tiles * part / parts), last = (int)(key_tiles * (part + 1) / parts);
    const Rows<> k(p.k, b, h / GROUP), v(p.v, b, h / GROUP);
    const float scale = base_2(p);

    float output[TILES][COLUMNS][4], m[TILES][2], l[TILES][2];
#pragma unroll 1
    for (bool careful = false;; careful = true) {
        clear(output);
#pragma unroll
        for (int i = 0; i < TILES; ++i) m[i][0] = m[i][1] = HIDDEN, l[i][0] = l[i][1] = 0;
        if (threadIdx.x == 0) list.next = 0;
        if (!careful) {
            if constexpr (PACK == 1) load_tile<BLOCK_Q, HEAD_DIM, THREADS>(Rows<>(p.q, b, h), row0, rows, q_shared);
            else load_packed<BLOCK_Q, HEAD_DIM, THREADS>(Rows<PACK>(p.q, b, h), row0, rows, q_shared);
        }
        const auto load_keys = [&](int tile, int stage) {
            load_tile<BLOCK_K, HEAD_DIM, THREADS>(k, tile * BLOCK_K, at.n_k, stages + stage * BYTES_STAGE);
            load_tile<BLOCK_K, HEAD_DIM_V, THREADS>(v, tile * BLOCK_K, at.n_k, stages + stage * BYTES_STAGE + BYTES_K);
        };
        bool begun = false, guessed = first < last;  // the first tile is mostly one that exists
        if (guessed) load_keys(first, 0);

#pragma unroll 1
        while (fill<BLOCK_K, true, PACK>(list, p, b, h, from, to, first, last, at.n_k)) {
            const int count = list.count;
            const auto key_of = [&](int i) { return list.entry[i] / 2 * BLOCK_K; };
            const auto stage_of = [&](int i) { return stages + i % STAGES * BYTES_STAGE; };
#pragma unroll
            for (int i = 0; i < STAGES - 1; ++i) {
                if (i == 0 && guessed && list.entry[0] / 2 != first) copies_wait_all(), guessed = false;
                if (i < count && !(i == 0 && guessed)) load_keys(list.entry[i] / 2, i);
                copies_end();
            }
            guessed = false;
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                copies_wait<STAGES - 2>();
                __syncthreads();  // tile i is there for all, and all are done with tile i - 1
                const int next = i + STAGES - 1, next_k0 = next < count ? key_of(next) : 0;
                const unsigned to = stage_of(next);
                TileCopy<BLOCK_K, HEAD_DIM, THREADS> copy_k;
                TileCopy<BLOCK_K, HEAD_DIM_V, THREADS> copy_v;
                const bool stored_k = next < count && copy_k.store(k, next_k0, at.n_k, to);
                const bool stored_v = next < count && copy_v.store(v, next_k0, at.n_k, to + BYTES_K);
                if (!SPREAD) {
                    copy_k.start(k, next_k0, at.n_k, to, next < count && !stored_k);
                    copy_k.copy(0, 1);
                    copy_v.start(v, next_k0, at.n_k, to + BYTES_K, next < count && !stored_v);
                    copy_v.copy(0, 1);
                    copies_end();
                }
                const bool full = list.entry[i] & 1;
                const int k0 = list.entry[i] / 2 * BLOCK_K;
                const unsigned stage = stage_of(i);
                float s[TILES][KEYS][4];
                bool exact = HAS_SCORE || !begun || !full || k0 + BLOCK_K > at.n_k, done, again = false;
                do {
                    clear(s);
                    const bool wanted = next < count && !again;
                    const auto copy_next = [&](int step, int steps) {
                        const int half = steps / 2;
                        if (!SPREAD) return;
                        if (step == 0) copy_k.start(k, next_k0, at.n_k, to, wanted && !stored_k);
                        if (step < half || steps == 1) copy_k.copy(step, larger(half, 1));
                        if (step == half) copy_v.start(v, next_k0, at.n_k, to + BYTES_K, wanted && !stored_v);
                        if (step >= half) copy_v.copy(step - half, steps - half);
                    };
                    const unsigned keys = stage + at.share() * 8 * KEYS * pitch(HEAD_DIM);
                    if (SPLITS && careful) {
                        copy_next(0, 1);
                        scores_carefully(s, reinterpret_cast<const storage*>(shared), reinterpret_cast<const storage*>(
                            shared + BYTES_Q + i % STAGES * BYTES_STAGE));
                    } else {
                        multiply_rows<HEAD_DIM>(s, q_of_warp, keys, copy_next);
                    }
                    float sum[TILES][2];
                    done = true;
                    if (exact) {
                        modify_tile(p, at, full, s, k0);
                        online_softmax(s, m, l, output);
                    } else {
                        done = optimistic_softmax(s, m, sum, scale);
                    }
                    if constexpr (HAS_DROPOUT) drop_tile(p, at, s, k0);
                    if constexpr (WARPS_K > 1) store_weights(s, shared_weights);
                    done = in_all_warps(done);
                    if (done && !exact) {
#pragma unroll
                        for (int j = 0; j < TILES; ++j) l[j][0] += sum[j][0], l[j][1] += sum[j][1];
                    }
                    exact = again = true;
                } while (!done);
                if (SPREAD) copies_end();
                begun = true;
                if ((MAY_HIDE || SPLITS) && careful)
                    accumulate_carefully(output, s, shared_weights, reinterpret_cast<const storage*>(
                        shared + BYTES_Q + i % STAGES * BYTES_STAGE + BYTES_K));
                else if (WARPS_K == 1)
                    multiply_weights<HEAD_DIM_V>(output, s, stage + BYTES_K);
                else
                    multiply_turned<BLOCK_K / STEP, false, PITCH_P, pitch(HEAD_DIM_V)>(
                        output, q_shared + AT_P + at.row_of_warp() * PITCH_P,
                        stage + BYTES_K + at.share() * 8 * COLUMNS * (int)sizeof(storage));
            }
        }
        bool odd = false;
        across_rows(l, [](float x, float y) { return x + y; });
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (SPLITS && at.row(i, half) < rows) odd |= !is_finite(l[i][half]);
                if ((MAY_HIDE || SPLITS) && at.row(i, half) < rows && is_finite(l[i][half])) {
#pragma unroll
                    for (int n = 0; n < COLUMNS; ++n)
                        odd |= !is_finite(output[i][n][2 * half]) || !is_finite(output[i][n][2 * half + 1]);
                }
            }
        if (!(MAY_HIDE || SPLITS) || careful || !__syncthreads_or(odd)) break;
    }
    finish(p, at, part, m, l, output, shared + Place::row_of_warp() * pitch(HEAD_DIM));
}

// Join the parts of a row: each weighs as much as its sum of weights. A block takes a row, a thread a column of some parts.
constexpr int JOIN_COLUMNS = up(HEAD_DIM_V, 32), JOIN_GROUPS = JOIN_COLUMNS <= 64 ? 8 : 512 / JOIN_COLUMNS;
extern "C" __global__ void __launch_bounds__(JOIN_COLUMNS * JOIN_GROUPS) combine(KERNEL_PARAMS) {
    __shared__ float totals[JOIN_GROUPS][JOIN_COLUMNS], sums[JOIN_GROUPS];
    const long long row = blockIdx.x % p.n_q, h = blockIdx.x / p.n_q % p.heads, b = blockIdx.x / p.n_q / p.heads;
    const int column = threadIdx.x % JOIN_COLUMNS, group = threadIdx.x / JOIN_COLUMNS, parts = (int)p.splits;
    const float* lse = row_at<const float>(p.partial_lse, b, h, row);
    const float* partial = row_at<const float>(p.partial, b, h, row) + column;
    const long long lse_step = p.batch * p.partial_lse.batch, step = p.batch * p.partial.batch;

    const float sink = HAS_SINKS ? static_cast<const float*>(p.sinks)[h] : HIDDEN;
    float top = sink;
    for (int part = threadIdx.x % 32; part < parts; part += 32) top = fmaxf(top, lse[part * lse_step]);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, other));
    const float shift = top == HIDDEN ? 0.0f : top;
    float sum = group == 0 ? exp2_fast((sink - shift) * LOG2E) : 0.0f, total = 0;
#pragma unroll 8
    for (int part = group; part < parts; part += JOIN_GROUPS) {
        const float weight = exp2_fast((lse[part * lse_step] - shift) * LOG2E);  // NaN where the part is
        const float value = column < HEAD_DIM_V ? partial[part * step] : 0.0f;
        sum += weight;
        if (weight != 0) total += weight * value;
    }
    totals[group][column] = total;
    if (column == 0) sums[group] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < JOIN_GROUPS; ++other) sum += sums[other], total += totals[other][column];
    if (column < HEAD_DIM_V) row_at<storage>(p.out, b, h, row)[column] = narrow(sum == 0 ? 0.0f : total / sum);
    if (column == 0) *row_at<float>(p.lse, b, h, row) = sum == 0 ? HIDDEN : shift + logf(sum);
}
