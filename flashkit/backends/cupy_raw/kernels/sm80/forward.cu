// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on tensor cores by mma.sync.
//
// A block of WARPS warps takes BLOCK_Q rows and goes over the tiles of keys that they see. With PACK_GQA > 1 a row is one
// of the PACK_GQA query heads that share a key/value head, at one token: all of them use what is loaded once. With SPLIT a
// block takes one of p.num_splits parts of the keys, and `combine` joins the parts (FlashDecoding).
//
//     Q          [BLOCK_Q][HEAD_DIM]            shared memory
//     K, V       [STAGES][BLOCK_K][..]          shared memory, filled STAGES - 1 tiles ahead
//     S, P       [BLOCK_Q][BLOCK_K]             registers
//     O          [BLOCK_Q][HEAD_DIM_V]          registers, unscaled
//     m, l       [BLOCK_Q]                      reference and sum of a row's weights, base 2: shared memory, a lane's own
//
// WARPS_K warps share 16 TILES rows. Where it is 2, each has half of the keys of S and then half of the columns of O, and P
// goes through shared memory: a warp has room for few rows of a wide O, and what it reads should serve many.
//
// Measured on an H200, bfloat16:
//
//     256 columns   Two blocks of 64 x 64 to a multiprocessor, each with one tile of keys in memory. Two warps for 32 rows
//                   instead of a warp for each 16: 3 to 7 % slower for what they tell each other. Four warps that share O by
//                   columns, each with the scores of its own rows, and read a fifth less from shared memory: 1 to 2 %
//                   slower; 128 x 64 and 8 warps so: 10 %; 128 x 32 in three stages, or 64 x 32 in two: 20 %. The next keys
//                   asked for before the softmax, not after it: 3 to 5 % faster if causal, else as fast.
//     128 columns   128 x 64. 128 x 32 in three stages: 1 to 2 % slower; 64 x 64 and 8 warps: 15 to 30 %.
//      64 columns   128 x 128, 5 to 9 % faster than 128 x 64, but not with a score modification, which spills then.
//     by form       Times of a plain call with soft-capping 1.22 (128 columns), 1.42 (64), with ALiBi 1.20, 1.36, a factor 1.06,
//                   1.10; 3.3 and 2.0 as functions of each pair with 64-bit positions. In the backward pass 1.14 and 1.07 to
//                   1.13; 1.7 before. Soft-capping by tiles of 128 x 128, 64 columns: 1.37, but causal 1.55 instead of 1.49.
//     1,024 tokens  What begins and ends a block is a tenth of its time: hence the guess at the first tile, the outputs in 16
//                   bytes, and numbers of the grid that the host knows.
//     decoding      16 x 128 in three stages, one block to a multiprocessor, 1 to 2 % faster than two blocks of 16 x 64; more
//                   stages or parts are slower. 256 bytes at a time into the L2 cache: 3 to 7 % slower; to be evicted first:
//                   0.5 % faster with one sequence, as fast with 16. A kernel that is launched early though keys are not split:
//                   1 % slower, and its launch costs the host more.
//     the loop      Whether rows can be copied is asked once a tile, for keys and values together: asked for each, a call is 1
//                   to 3 % slower; asked after the product, it is 1 % faster with 128 columns, 2 % slower with 64. Sums
//                   rescaled after the weights of all rows: 3 % slower with 128. A register that is spilled costs 0.4 %.
//                   Rows in shared memory PADDED instead of permuted: 4 to 7 % slower with 128 columns, 5 % in decoding,
//                   where a third of what was read from the L2 cache was read in vain. Comparing three numbers at once as
//                   integers, to find the greatest: no faster, and takes registers. Heads one at a time without a mask: as
//                   fast.
//
// Constants of the head: BLOCK_Q, BLOCK_K, WARPS, WARPS_K, STAGES, PACK_GQA, SPLIT, BLOCKS_PER_SM, POSITIONS and FAR.
#include "sm80/layout.cuh"
#include "sm80/affine_score.cuh"

extern __shared__ __align__(128) unsigned char shared[];

constexpr int THREADS = 32 * WARPS, TILES = BLOCK_Q * WARPS_K / (16 * WARPS), KEYS = BLOCK_K / WARPS_K / 8;
constexpr int COLUMNS = padded(HEAD_DIM_V) / WARPS_K / 8;
// Tiles of keys in shared memory beside the one at work. With none, its values come while scores are multiplied, and the
// next keys from then on.
constexpr int AHEAD = STAGES - 1, NEXT = larger(AHEAD, 1);
// Whether a tile is copied among the steps of a product: where registers leave room, and it is not needed soon.
constexpr bool SPREAD = AHEAD > 0 && (IS_FLOAT32 || !HAS_MASK || HEAD_DIM <= 64);
constexpr bool EARLY = !IS_FLOAT32 && HEAD_DIM > 64;  // of operands; with 64 columns it makes a call 3 to 8 % slower
static_assert(KEYS % 2 == 0 && COLUMNS % 2 == 0, "operands come in pairs");
constexpr int BYTES_Q = BLOCK_Q * pitch(HEAD_DIM), BYTES_K = BLOCK_K * pitch(HEAD_DIM);
constexpr int BYTES_STAGE = BYTES_K + BLOCK_K * pitch(HEAD_DIM_V), AT_LIST = BYTES_Q + STAGES * BYTES_STAGE;
constexpr int AT_P = AT_LIST + (int)sizeof(TileList), PITCH_P = BLOCK_K * (int)sizeof(storage) + 16;
constexpr int AT_ROWS = AT_P + (WARPS_K > 1 ? BLOCK_Q * PITCH_P : 0);  // numbers of a row that its warps tell each other
constexpr int AT_STATE = AT_ROWS + (WARPS_K > 1 ? BLOCK_Q * WARPS_K * 4 : 0);

// What a lane knows of its rows. Registers for it are not there while scores are multiplied.
struct RowState {
    float m[TILES][2], l[TILES][2];
};
DEVICE RowState& state_of_lane() { return reinterpret_cast<RowState*>(shared + AT_STATE)[threadIdx.x]; }

// A hidden pair has the weight 0, but 0 times NaN is NaN. So where an output is not finite though its sum is, the block
// is done again, product by product. So it is where float32 is split, which at first makes infinity NaN.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT, SPLITS = IS_FLOAT32 && TERMS == 3;

// What a block works at, and the place of its lanes in it.
struct Place {
    int b, h, row0, rows, n_k;  // h: the first of PACK_GQA heads; rows: PACK_GQA rows for a token, of which this block's start at row0
    long long offset;

    __device__ __forceinline__ int row(int i, int half) const {  // that a lane holds; of the block's head and token
        return row0 + row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int row_of_warp() { return threadIdx.x / 32 / WARPS_K * 16 * TILES; }
    static __device__ __forceinline__ int share() { return WARPS_K == 1 ? 0 : threadIdx.x / 32 % WARPS_K; }
    static __device__ __forceinline__ int key(int n) { return (share() * KEYS + n) * 8 + threadIdx.x % 4 * 2; }  // and the next
    static __device__ __forceinline__ int column(int n) { return (share() * COLUMNS + n) * 8 + threadIdx.x % 4 * 2; }
    // Whether positions fit 32 bits, and what a score modification computes with them: that takes half the instructions then.
    __device__ __forceinline__ bool narrow() const { return offset >= -FAR && offset + rows < FAR && (!HAS_SCORE || n_k < FAR); }
};

#include "sm80/softmax.cuh"
#include "sm80/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_forward(KERNEL_PARAMS) {
    if constexpr (SPLIT) griddepcontrol_wait(), griddepcontrol_launch_dependents();
    TileList& list = *reinterpret_cast<TileList*>(shared + AT_LIST);
    storage* shared_weights = reinterpret_cast<storage*>(shared + AT_P);
    const unsigned q_shared = address_of(shared), stages = q_shared + BYTES_Q;
    const unsigned q_of_warp = q_shared + Place::row_of_warp() * pitch(HEAD_DIM);

    const int heads = (int)p.heads / PACK_GQA, rows = (int)p.n_q * PACK_GQA, tiles = (rows + BLOCK_Q - 1) / BLOCK_Q;
    const unsigned parts = SPLIT ? (unsigned)p.num_splits : 1, part = blockIdx.x % parts;
    // Tiles with most to do first, of p.heads_per_l2_group heads at a time, whose keys and values are in the L2 cache together; of
    // the tiles with least to do a quarter is left to the end, where they even out when blocks finish.
    const unsigned all = heads * (unsigned)p.batch, index = blockIdx.x / parts, early = HAS_MASK ? tiles - tiles / 4 : tiles;
    Work work;
    if (!HAS_MASK || index < early * all) work = work_of(index, early, all, SPLIT ? all : (unsigned)p.heads_per_l2_group);
    else work = {(int)(index / all), (int)(index % all)};
    const int b = work.bh / heads, h = work.bh % heads * PACK_GQA, row0 = (tiles - 1 - work.tile) * BLOCK_Q;
    const Place at{b, h, row0, rows, (int)keys_of(p, b), offset_of(p, b)};
    const int from = row0 / PACK_GQA, to = ((row0 + BLOCK_Q < rows ? row0 + BLOCK_Q : rows) + PACK_GQA - 1) / PACK_GQA;
    const long long key_tiles = (at.n_k + BLOCK_K - 1) / BLOCK_K;
    const int first = (int)(key_tiles * part / parts), last = (int)(key_tiles * (part + 1) / parts);
    const Rows<> k(p.k, b, h / GQA_GROUP), v(p.v, b, h / GQA_GROUP);
    const float scale = softmax_scale_log2(p);

    float output[TILES][COLUMNS][4];
    RowState now;
#pragma unroll 1
    for (bool careful = false;; careful = true) {
        clear(output);
#pragma unroll
        for (int i = 0; i < TILES; ++i) now.m[i][0] = now.m[i][1] = HIDDEN, now.l[i][0] = now.l[i][1] = 0;
        state_of_lane() = now;
        if (threadIdx.x == 0) list.next = 0;
        if (!careful) {
            if constexpr (PACK_GQA == 1) load_tile<BLOCK_Q, HEAD_DIM, THREADS>(Rows<>(p.q, b, h), row0, rows, q_shared);
            else load_packed<BLOCK_Q, HEAD_DIM, THREADS>(Rows<PACK_GQA>(p.q, b, h), row0, rows, q_shared);
        }
        const auto load_keys = [&](int tile, int stage) {
            load_tile<BLOCK_K, HEAD_DIM, THREADS>(k, tile * BLOCK_K, at.n_k, stages + stage * BYTES_STAGE);
            if (AHEAD > 0)
                load_tile<BLOCK_K, HEAD_DIM_V, THREADS>(v, tile * BLOCK_K, at.n_k, stages + stage * BYTES_STAGE + BYTES_K);
        };
        bool begun = false, guessed = first < last;  // the first tile is mostly one that exists
        if (guessed) load_keys(first, 0);

#pragma unroll 1
        for (bool once = first < last;; once = false) {
            if (!(HAS_MASK ? fill<BLOCK_K, true, PACK_GQA>(list, p, b, h, from, to, first, last, at.n_k) : once)) break;
            const int count = HAS_MASK ? list.count : last - first;
            const auto entry_of = [&](int i) { return HAS_MASK ? list.entry[i] : 2 * (first + i) + 1; };
            const auto key_of = [&](int i) { return entry_of(i) / 2 * BLOCK_K; };
            const auto stage_of = [&](int i) { return i % STAGES * BYTES_STAGE; };
#pragma unroll
            for (int i = 0; i < NEXT; ++i) {
                if (i == 0 && guessed && entry_of(0) / 2 != first) copies_wait_all(), guessed = false;
                if (i < count && !(i == 0 && guessed)) load_keys(entry_of(i) / 2, i);
                copies_end();
            }
            guessed = false;
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                copies_wait<NEXT - 1>();
                __syncthreads();  // tile i is there for all, and all are done with tile i - 1
                const int k0 = key_of(i), at_stage = stage_of(i);
                const bool full = entry_of(i) & 1, more = i + NEXT < count, more_v = AHEAD == 0 || more;
                const int next_k0 = more ? key_of(i + NEXT) : 0, next_v0 = AHEAD == 0 ? k0 : next_k0;
                const unsigned stage = stages + at_stage, to = stages + stage_of(i + AHEAD);
                TileCopy<BLOCK_K, HEAD_DIM, THREADS> copy_k;
                TileCopy<BLOCK_K, HEAD_DIM_V, THREADS> copy_v;
                const bool copied = copy_k.can(k) && copy_v.can(v);
                if (!copied) {
                    if (AHEAD > 0 && more) copy_k.store(k, next_k0, at.n_k, to);
                    if (more_v) copy_v.store(v, next_v0, at.n_k, to + BYTES_K);
                }
                const auto copy_next_k = [&](int step, int steps) {
                    if (step == 0) copy_k.start(k, next_k0, at.n_k, to, more && copied);
                    copy_k.copy(step, steps);
                };
                const auto copy_next_v = [&](int step, int steps) {
                    if (step == 0) copy_v.start(v, next_v0, at.n_k, to + BYTES_K, more_v && copied);
                    copy_v.copy(step, steps);
                };
                const auto copy_next = [&](int step, int steps) {
                    const int half = AHEAD > 0 ? steps / 2 : 0;
                    if (AHEAD > 0 && (step < half || steps == 1)) copy_next_k(step, larger(half, 1));
                    if (step >= half) copy_next_v(step - half, steps - half);
                };
                if (!SPREAD) copy_next(0, 1);
                float s[TILES][KEYS][4];
                clear(s);
                if (SPLITS && careful) {
                    if (SPREAD) copy_next(0, 1);
                    scores_nonfinite(s, shared, shared + BYTES_Q + at_stage);
                } else {
                    const unsigned keys = stage + at.share() * 8 * KEYS * pitch(HEAD_DIM);
                    const auto between = [&](int step, int steps) {
                        if (SPREAD) copy_next(step, steps);
                    };
                    if constexpr (EARLY) multiply_rows_early<HEAD_DIM>(s, q_of_warp, keys, between);
                    else multiply_rows<HEAD_DIM>(s, q_of_warp, keys, between);
                }
                if (AHEAD == 0) {
                    copies_end();
                    copies_wait_all();
                    __syncthreads();  // the values are there for all, and all are done with the keys
                    if (more && !copied) copy_k.store(k, next_k0, at.n_k, to);
                    copy_next_k(0, 1);
                    copies_end();
                }
                const bool plain = !HAS_SCORE && full && k0 + BLOCK_K <= at.n_k && scale > 0;
                float factor = 1;
                if (!plain) modify_tile(p, at, full, s, k0, factor);
                online_softmax(s, output, plain ? scale : factor);
                if constexpr (HAS_DROPOUT) drop_tile(p, at, s, k0);
                if constexpr (WARPS_K > 1) store_weights(s, shared_weights);
                join_warps();
                if (AHEAD > 0) copies_end();
                begun = true;
                if ((MAY_HIDE || SPLITS) && careful)
                    accumulate_nonfinite(output, s, shared_weights, shared + BYTES_Q + at_stage + BYTES_K);
                else if constexpr (WARPS_K == 1)
                    multiply_weights<HEAD_DIM_V>(output, s, stage + BYTES_K);
                else
                    multiply_turned<BLOCK_K / STEP, false, PITCH_P, HEAD_DIM_V>(
                        output, q_shared + AT_P + at.row_of_warp() * PITCH_P, stage + BYTES_K, at.share());
            }
        }
        if (!begun) {  // nor has anyone waited for Q, whose memory the results go through
            copies_wait_all();
            __syncthreads();
        }
        bool odd = false;
        now = state_of_lane();
        const float(&l)[TILES][2] = now.l;
        across_rows(now.l, [](float x, float y) { return x + y; });
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
    finish(p, at, part, now.m, now.l, output, shared + Place::row_of_warp() * pitch(HEAD_DIM));
}

// Join the parts of a row: each weighs as much as its sum of weights. A block takes a row, a thread a column of some parts.
constexpr int JOIN_COLUMNS = up(HEAD_DIM_V, 32), JOIN_GROUPS = JOIN_COLUMNS <= 64 ? 8 : 512 / JOIN_COLUMNS;
extern "C" __global__ void __launch_bounds__(JOIN_COLUMNS * JOIN_GROUPS) combine(KERNEL_PARAMS) {
    __shared__ float totals[JOIN_GROUPS][JOIN_COLUMNS], sums[JOIN_GROUPS];
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    const long long row = blockIdx.x % p.n_q, h = blockIdx.x / p.n_q % p.heads, b = blockIdx.x / p.n_q / p.heads;
    const int column = threadIdx.x % JOIN_COLUMNS, group = threadIdx.x / JOIN_COLUMNS, parts = (int)p.num_splits;
    const float* lse = row_at<const float>(p.lse_partial, b, h, row);
    const float* partial = row_at<const float>(p.o_partial, b, h, row) + column;
    const long long lse_step = p.batch * p.lse_partial.batch, step = p.batch * p.o_partial.batch;

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
