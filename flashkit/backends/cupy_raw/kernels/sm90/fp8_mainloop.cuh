// The consumer of the FP8 forward pass: 64 rows of a work tile for each warp group.
//
//     Q         [64][HEAD_DIM]           Q_IN_REGISTERS: registers
//     S         [64][BLOCK_K]            registers: S = Q K^T of codes, then weights
//     P         [64][BLOCK_K]            registers, codes; IS_NARROW: two, in turns
//     O         [64][HEAD_DIM_V]         registers, sums of the tensor cores; SUMS_BY_ONES: and row sums
//     promoted  [64][HEAD_DIM_V]         shared memory, or global memory that stays in L2: sums of CUDA cores. Of wide
//                                        heads in float16
//
// S(n) is issued together with P(n-1) V(n-1), and the softmax of tile n overlaps with the second product. Warp groups
// do not ping-pong. Tiles that hide nothing come in pairs, the codes of one in the registers that the other leaves
// free.
//
// Promotion: a tensor core aligns each product to its accumulator and loses what lies under 2^-13 of it. So O goes to a
// part that CUDA cores sum, and begins anew, every PROMOTE_TILES tiles: weights of one size and values of one sign lose
// two per cent by then. Each thread has its own elements of that part, and their reference, so nothing waits.
//
// Row sums: eight lines of ones behind V^T make the tensor cores sum the codes, and the rounding of a great weight
// cancels in O. Every SUM_TILES tiles, and where V's scale changes, CUDA cores add them up. The log-sum-exp needs sums
// of weights that are not rounded (EXACT_LSE).
//
// Rows whose scales are not positive numbers, or too far from 1 for products of scales, and rows that a masked NaN in V
// has spoilt, are computed again from global memory (rows_nonfinite in epilogue.cuh).
#pragma once
#include "sm90/epilogue.cuh"

// --- registers and shared memory -------------------------------------------------------------------------------------
//
// Beyond the shared memory of layout.cuh, from the head:
//
//     AT_VT            unless GETS_VT: [STAGES][VT_LINES][128 bytes], V^T: a line has a column's codes of BLOCK_K keys
//     AT_VT_PIPE       full and empty barriers of it
//     AT_PROMOTED      PROMOTED_IN_SHARED: [MMA_WARPGROUPS][PROMOTED_VECS][128 threads][16 bytes]
//     AT_REFERENCES    unless IS_NARROW: [MMA_WARPGROUPS][64] floats, what a row of it is relative to
//     AT_KEY_SCALES    SCALES_OF_TOKENS: [2][MMA_WARPGROUPS][3][128] floats, see load_key_scales()

constexpr bool IS_NARROW = COLUMNS <= 128;  // O leaves registers for two P
constexpr bool SUMS_BY_ONES = IS_NARROW && !SCALES_OF_TOKENS, SUMS_OF_FLOATS = !SUMS_BY_ONES || EXACT_LSE;
constexpr bool IN_PAIRS = SUMS_BY_ONES && !HAS_SCORE;  // FULL tiles
constexpr bool Q_IN_REGISTERS = IN_PAIRS && MMA_WARPGROUPS == 2 && HEAD_DIM <= 128 && !EXACT_LSE;
constexpr int ONES = COLUMNS / 2;  // the first row sum in O
constexpr int SUMS_REGS = ONES + 4 * SUMS_BY_ONES, CODE_REGS = BLOCK_K / 8;
constexpr int Q_REGS = Q_IN_REGISTERS ? up(HEAD_DIM, 32) / 8 : 4;
constexpr int BYTES_VT = VT_LINES * CHUNK_ROW, SCALE_BYTES = 4 * 128;
constexpr int PROMOTED_VECS = IS_NARROW ? SUMS_REGS / 4 + 1 : COLUMNS / 16;
constexpr int PROMOTED_BYTES = PROMOTED_VECS * 128 * VEC_BYTES, REFERENCES_BYTES = 64 * 4;  // of a warp group
constexpr bool CHAINED = !IS_NARROW && !HAS_SCORE && !SCALES_OF_TOKENS;  // FULL tiles
constexpr bool RELEASES_Q_EARLY = !IS_NARROW && Q_BUFFERS == 1;  // with the last S of a work tile

// Wide heads with V^T and up to 4,096 keys have no room for the promoted part in shared memory, and need none.
constexpr int PROMOTE_TILES = PROMOTED_IN_SHARED || !GETS_VT ? 16 : 32, SUM_TILES = 4;
// log2 of what 1 in float16 stands for. Sums of a million weights and values fit it, and what is too small for it is
// under 2^-9 of a code of V.
constexpr float PROMOTED_UNIT = 21;

static_assert(BLOCK_K % 32 == 0 && BLOCK_K <= 128, "a line of V^T has up to 128 keys, a wgmma multiplies 32");
static_assert(!SCALES_OF_BLOCKS || BLOCK_K == 128, "a tile has one scale");
static_assert(GETS_VT || AT_VT - AT_V == V_STAGES * BYTES_V, "sm90_fp8.py and V_STAGES differ");

// V^T comes by TMA (GETS_VT); or warps transpose V: a warp group of its own, or where consumers leave no registers for
// it warps 1 and 3 of warp group 0.
constexpr int TRANSPOSE_WARPS = GETS_VT ? 0 : MMA_WARPGROUPS < 3 && IS_NARROW ? 4 : 2;
constexpr int WARPGROUPS = MMA_WARPGROUPS + (TRANSPOSE_WARPS == 4 ? 2 : 1);
constexpr int LAUNCH_REGISTERS = 65536 / (128 * WARPGROUPS) / 8 * 8;  // of a thread
static_assert(MMA_WARPGROUPS * CONSUMER_REGISTERS + (WARPGROUPS - MMA_WARPGROUPS) * PRODUCER_REGISTERS
                  <= WARPGROUPS * LAUNCH_REGISTERS,
              "setmaxnreg would wait for ever for registers that the launch does not get");

DEVICE Pipeline<STAGES> vt_pipe(unsigned base) {
    return Pipeline<STAGES>::at(base + (GETS_VT ? AT_V_PIPE : AT_VT_PIPE));
}
DEVICE unsigned at_vt(unsigned base, int stage) { return base + (GETS_VT ? AT_V : AT_VT) + stage * BYTES_VT; }

// Two numbers in float16.
DEVICE unsigned pack_f16(float low, float high) {
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE float2 unpack_f16(unsigned x) {
    float2 y;
    asm("{ .reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}

// --- scales ----------------------------------------------------------------------------------------------------------
//
//     t_j = scale * q_scale * k_scale_j s_j + log2(v_scale_j)      P_j = 2^(t_j - m)      l = sum P_j / v_scale_j
//
// Scales of blocks and of tokens belong to a score's exponent, so P is what its value's code is multiplied by. Those of
// heads of v are a factor of O.

// A tile's key scales, logarithms and inverses of its value scales, by a warp group: a key for each thread. A slot is
// written again two tiles later, behind the barrier of the tile between.
DEVICE void load_key_scales(const Params& p, const WorkTile& at, int k0, unsigned slot, int wg) {
    const int key = clamped_index(k0 + threadIdx.x % 128, seq_of(p, at).n_k()), head = at.h / GQA_GROUP;
    const float v = valid_v_scale(Elements::key_scale(p, p.v_scale, at.b, head, key));
    const unsigned own = slot + threadIdx.x % 128 * 4;
    store_float(own, valid_scale(Elements::key_scale(p, p.k_scale, at.b, head, key)));
    store_float(own + SCALE_BYTES, log2_fast(v));
    store_float(own + 2 * SCALE_BYTES, reciprocal(v));
    named_barrier_sync(WARPGROUP_BARRIER + wg, 128);
}

// For each pair of a lane's columns f(column block, two numbers of the keys).
template <typename F>
DEVICE void for_columns(unsigned numbers, F f) {
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) f(n, load_floats(numbers + threadIdx.x % 4 * 8 + 32 * n));
}

// --- the epilogue ----------------------------------------------------------------------------------------------------

// A row's words of 32 columns among the four lanes that share it, transposed: each has a vector of 16 bytes then.
DEVICE void transpose_words(unsigned (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & step) continue;
            const bool odd = threadIdx.x & step;
            const unsigned other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + step], step);
            if (odd) x[i] = other;
            else x[i + step] = other;
        }
}

// A lane's part of a row of O to global memory.
DEVICE void store_output_row(const float (&o)[SUMS_REGS], int half, storage* row, bool exists) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int block = 0; block < COLUMNS / 32; ++block) {
        unsigned x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = pack(o[16 * block + 4 * i + 2 * half], o[16 * block + 4 * i + 2 * half + 1]);
        transpose_words(x);
        if (exists) reinterpret_cast<uint4*>(row + 32 * block)[lane] = {x[0], x[1], x[2], x[3]};
    }
#pragma unroll
    for (int i = COLUMNS / 32 * 16; i < COLUMNS / 2; i += 4)  // half a block
        if (exists) reinterpret_cast<unsigned*>(row + 2 * i)[lane] = pack(o[i + 2 * half], o[i + 2 * half + 1]);
}

// v_scale O / l of a warp's 16 rows, and their log-sum-exp, to global memory. exact_l: EXACT_LSE, sums of weights that
// are not rounded.
DEVICE void epilogue_fp8(const Params& p, const WorkTile& at, const float (&m)[2], const float (&l)[2],
                         const float (&exact_l)[2], float v_scale, float (&o)[SUMS_REGS]) {
    const int n_q = seq_of(p, at).n_q();
    bool is_nonfinite = false;
    const auto add = [](float x, float y) { return x + y; };
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        const bool exists = index < n_q * PACK_GQA;
        float top = m[half], sum = SUMS_BY_ONES ? l[half] : across_lanes(l[half], add), of_sink = 1;
        float exact_top = top, exact_sum = SUMS_BY_ONES && EXACT_LSE ? across_lanes(exact_l[half], add) : sum;
        if (HAS_SINKS && exists) {
            float unused = 1;
            add_sink(p, h, exact_top, exact_sum, unused), add_sink(p, h, top, sum, of_sink);
        }
        const bool empty = sum == 0;  // no key is visible
        const float factor = empty ? 0.0f : of_sink * v_scale * reciprocal(sum);
        if (exists && threadIdx.x % 4 == 0)
            *q_row<float>(p, p.lse, at.b, h, row) = empty ? HIDDEN : LN2 * (exact_top + log2_fast(exact_sum));
        float zero = 0 * sum;  // NaN if an element is not finite
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = o[4 * n + 2 * half + c];
                x *= factor;
                zero = fmaf(x, 0.0f, zero);
            }
        is_nonfinite |= zero != 0 && exists;
        store_output_row(o, half, q_row<storage>(p, p.out, at.b, h, row), exists);
    }
    if (__any_sync(~0u, is_nonfinite)) {
        __syncwarp();
        rows_nonfinite(p, at, 0);
    }
}

// --- the consumer ----------------------------------------------------------------------------------------------------

// e4m3 has no bits for P below 2^-9, and 448 is its greatest number. The greatest weight is FIRST_WEIGHT after a first
// tile, which leaves room for greater ones, and GREATEST after one that was too great: a power of two, which e4m3
// holds.
// LAZY: by how many octaves the maximum may grow before O is rescaled.
constexpr float GREATEST = 8, FIRST_WEIGHT = SUMS_BY_ONES ? 4 : SCALES_OF_TOKENS ? 8 : 5,
                LAZY = IS_NARROW || SCALES_OF_TOKENS ? 0 : 3;
constexpr unsigned TO_SIGN = 0x08080808, SIGNS = 0x80808080;  // a code of 2^8 or more plus 8 has its sign set
constexpr float NO_MAXIMUM = -1e30f;  // m of a row without a visible key so far

// Nothing, as no computation produces this NaN. But the compiler does not know it, and schedules what x depends on
// before a wait that follows: it would wait for P V before the exponentials.
DEVICE void never_store(unsigned address, unsigned x) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0x7fa12345; @p st.shared.b32 [%0], %1; }"
                 ::"r"(address), "r"(x) : "memory");
}

// What a step adds to a descriptor stays within its low word.
DEVICE unsigned long long advance(unsigned long long descriptor, int step) {
    return descriptor & 0xffffffff00000000ull | ((unsigned)descriptor + step);
}

struct ConsumerFp8 {
    const Params& params;
    unsigned base;
    int wg;
    unsigned tiles_k = 0, tiles_v = 0;  // released so far. V of a tile whose codes are pending is one behind
    float o[SUMS_REGS], s[S_REGS], m[2];
    float l[2];                // row sums; of a lane's columns unless SUMS_BY_ONES, which leaves the last ones in O
    float exact_l[2];          // EXACT_LSE with SUMS_BY_ONES: of weights that are not rounded, of a lane's columns
    float rescale[2];          // of O and l, where m has grown
    float row_scale[2];        // of S; to base 2 unless HAS_SCORE
    float k_scale, v_scale;    // of the head
    float factor[2], shift;    // of the tile: from S to base 2, and log2 of the scale of v
    float inverse_v = 1, pending_inverse_v = 1;  // of the tile, and of that whose codes are pending
    unsigned p[CODE_REGS], other_p[CODE_REGS], q[Q_REGS];
    int number = -1;           // of the work tile that the current tile belongs to, among this CTA's
    int tiles = 0;             // in O, since it began or was promoted
    int next_desc;             // tile descriptor, read ahead
    unsigned loads = 0;        // of key scales
    unsigned exact_signs = 0;      // SIGNS: m is great, so that no tile is taken as it is
    bool begins = false;       // the next tile is the warp group's first one of its work tile
    bool looks = true;         // the next tile looks for the maximum
    bool promoted = false;     // a part of O is elsewhere

    __device__ __forceinline__ ConsumerFp8(const Params& p, unsigned base, int wg) : params(p), base(base), wg(wg) {}

    // --- pipelines ---------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void wait_k() const { k_pipe(base).consumer_wait(tiles_k); }
    __device__ __forceinline__ void read_ahead() {  // a tile's descriptor comes with its K
        wait_k();
        next_desc = load_word(tile_desc_slot(base, tiles_k));
    }
    __device__ __forceinline__ void wait_v() const { vt_pipe(base).consumer_wait(tiles_v); }
    __device__ __forceinline__ void release_k() { k_pipe(base).consumer_release(tiles_k++); }
    __device__ __forceinline__ void release_v() { vt_pipe(base).consumer_release(tiles_v++); }
    __device__ __forceinline__ void pass_v() {  // of a tile that is EMPTY for this warp group, but not for another one
        wait_v();
        release_v();
    }
    // RELEASES_Q_EARLY, when S of a tile is there.
    __device__ __forceinline__ void release_q_after(int tile_desc) const {
        const int lane = threadIdx.x % 32 + (tile_desc & ENDS_WORK_TILE ? 0 : 32);  // none is 0 then
        if (RELEASES_Q_EARLY) mbarrier_arrive_once(q_pipe(base).empty_barrier(number), lane);
    }
    // Whether codes wait for their V.
    __device__ __forceinline__ bool is_pending() const { return tiles_v != tiles_k; }
    __device__ __forceinline__ void release_q() const { mbarrier_arrive_once(q_pipe(base).empty_barrier(number)); }

    // --- products ----------------------------------------------------------------------------------------------------

    // S = Q K^T. The shuffle tells ptxas that the stage is uniform; without it 16 instructions a tile move descriptors.
    __device__ __forceinline__ void issue_qk() {
        const unsigned long long k = descriptor(base + at_k(uniform(tiles_k % STAGES)));
        const unsigned long long from = descriptor(q_rows(base, number % Q_BUFFERS, wg));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < up(HEAD_DIM, 32) / 32; ++step) {  // 32 columns: as many bytes as 16 of 16 bits
            const unsigned long long to = advance(k, along_rows(step, BLOCK_K));
            if constexpr (Q_IN_REGISTERS) wgmma_rs(s, q, 4 * step, to, step > 0 ? 1 : 0);
            else if (step == 0) wgmma_zero_init(s, from, to);
            else product(s, advance(from, along_rows(step, 64)), to, 1);
        }
        wgmma_commit();
    }
    // O += P V
    __device__ __forceinline__ void issue_pv(unsigned (&codes)[CODE_REGS]) {
        const unsigned long long v = descriptor(at_vt(base, uniform(tiles_v % STAGES)));
        wait_v();
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 32; ++step)
            wgmma_rs(o, codes, 4 * step, advance(v, along_rows(step, VT_LINES)), 1);
        wgmma_commit();
    }
    template <int PENDING>
    __device__ __forceinline__ void wait_s() {
        wgmma_wait<PENDING>();
        fence_operand(s);
        release_k();
        release_q_after(next_desc);
    }
    __device__ __forceinline__ void wait_pv(unsigned (&codes)[CODE_REGS]) {
        wgmma_wait<0>();
        fence_operand(o), fence_operand(codes), fence_operand(s);
        release_v();
    }

    // --- softmax -----------------------------------------------------------------------------------------------------

    // The scales of a tile, which the producer has put beside its descriptor.
    __device__ __forceinline__ void load_tile_scales(unsigned slot) {
        factor[0] = row_scale[0], factor[1] = row_scale[1], shift = 0;
        if constexpr (!SCALES_OF_BLOCKS) return;
        const uint4 x = load_vec(slot);
        factor[0] *= __uint_as_float(x.y), factor[1] *= __uint_as_float(x.y);
        shift = __uint_as_float(x.z), inverse_v = __uint_as_float(x.w);
    }

    // S as the softmax takes it: scaled where a modification or a scale of a token needs it, and masked.
    __device__ __forceinline__ void modify(bool full, int k0, unsigned key_scales) {
        if constexpr (SCALES_OF_TOKENS)
            for_columns(key_scales, [&](int n, float2 scale) {
                s[4 * n] *= scale.x, s[4 * n + 1] *= scale.y, s[4 * n + 2] *= scale.x, s[4 * n + 3] *= scale.y;
            });
        if (HAS_SCORE) {
#pragma unroll
            for (int i = 0; i < S_REGS; ++i) s[i] *= factor[i / 2 % 2];
            factor[0] = factor[1] = LOG2E;
        }
        if (HAS_SCORE || !full)
            modify_tile(params, read_work_tile(params, base, number, wg), full, s, k0, (float)params.softmax_scale);
        if constexpr (SCALES_OF_TOKENS) {
            for_columns(key_scales + SCALE_BYTES, [&](int n, float2 log2_v) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    s[4 * n + i] = fmaf(s[4 * n + i], factor[i / 2], i % 2 ? log2_v.y : log2_v.x);
            });
            factor[0] = factor[1] = 1;
        }
    }

    // The greatest exponent of a row.
    __device__ __forceinline__ float row_maximum(int half) const {
        float chains[2] = {s[2 * half], s[2 * half + 1]};  // half the latency
#pragma unroll
        for (int i = 2; i < S_REGS / 2; ++i) chains[i % 2] = fmaxf(chains[i % 2], s[i / 2 * 4 + 2 * half + i % 2]);
        const float top = across_lanes(fmaxf(chains[0], chains[1]), [](float x, float y) { return fmaxf(x, y); });
        return fmaf(top, factor[half], shift);
    }

    // Whether m is to grow, as a lane sees it. LAZY: a weight that dominates its row's sum becomes 2^top, which e4m3
    // holds, as the sum of floats does not have its rounding. A lane's l is a quarter of the row's sum or so.
    __device__ __forceinline__ bool outgrows(int half, float most, float top, float limit) {
        if (most - limit > m[half]) return true;
        return LAZY > 0 && most - top > m[half] && exp2_fast(most - m[half]) * inverse_v > l[half];
    }
    // m relative to which no weight of S is above 2^LIMIT; where it grows the greatest becomes 2^TOP. Returns whether O
    // and l are to be multiplied by `rescale`.
    template <bool FIRST>
    __device__ __forceinline__ bool raise_maximum(float top, float limit) {
        const float most[2] = {row_maximum(0), row_maximum(1)};
        bool grows = false;
        if (FIRST) m[0] = fmaxf(most[0] - top, NO_MAXIMUM), m[1] = fmaxf(most[1] - top, NO_MAXIMUM);
        else if (LAZY == 0) grows = __any_sync(~0u, most[0] - limit > m[0] || most[1] - limit > m[1]);
        else grows = __any_sync(~0u, outgrows(0, most[0], top, limit) || outgrows(1, most[1], top, limit));
        if (__builtin_expect(grows, 0)) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const bool higher = most[half] - (LAZY == 0 ? limit : top) > m[half];
                const float next = higher ? most[half] - top : m[half];
                rescale[half] = exp2_fast(m[half] - next), m[half] = next;
                if (SUMS_OF_FLOATS) float_sum(half) *= rescale[half];
            }
        }
        if (FIRST || grows) exact_signs = __any_sync(~0u, is_great(m[0]) || is_great(m[1])) ? SIGNS : 0;
        return grows;
    }
    __device__ __forceinline__ float& float_sum(int half) { return SUMS_BY_ONES ? exact_l[half] : l[half]; }
    __device__ __forceinline__ void add_float_sums(float sum0, float sum1) {
        if (!SUMS_OF_FLOATS) return;
        float_sum(0) = fmaf(sum0, inverse_v, float_sum(0)), float_sum(1) = fmaf(sum1, inverse_v, float_sum(1));
    }

    // Where m is great S is scaled and rounded before m is subtracted.
    __device__ __forceinline__ void scale_below_great() {
        if (__builtin_expect(exact_signs == 0, 1)) return;
#pragma unroll
        for (int i = 0; i < S_REGS; ++i) s[i] = __fadd_rn(__fmul_rn(s[i], factor[i / 2 % 2]), shift);
        factor[0] = factor[1] = 1, shift = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)  // A great score hides the scale of its value. The epilogue sees NaN.
            if ((SCALES_OF_BLOCKS || SCALES_OF_TOKENS) && is_great(m[half]) && m[half] > NO_MAXIMUM)
                l[half] = fk_special(0);
    }

    // S to weights relative to the row maximum so far; with PACKS to codes as well.
    template <bool FIRST, bool PACKS>
    __device__ __forceinline__ bool exact_softmax(unsigned (&codes)[CODE_REGS], unsigned key_scales) {
        const float first = PACKS ? GREATEST : FIRST_WEIGHT;
        const bool grows = raise_maximum<FIRST>(first, PACKS ? GREATEST : FIRST_WEIGHT + LAZY);
        scale_below_great();
        const float add[2] = {shift - m[0], shift - m[1]};
        float sum[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < CODE_REGS; ++i) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float& weight = of_code(i)[c / 2 * 4 + c % 2];
                weight = exp2_fast(fmaf(weight, factor[i % 2], add[i % 2]));
                if (!SCALES_OF_TOKENS && (SUMS_OF_FLOATS || !PACKS)) sum[i % 2 * 2 + c % 2] += weight;
            }
            if (PACKS) codes[i] = code_word(i);
        }
        if constexpr (SCALES_OF_TOKENS)
            for_columns(key_scales + 2 * SCALE_BYTES, [&](int n, float2 inverse) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] = fmaf(s[4 * n + i], i % 2 ? inverse.y : inverse.x, sum[i]);
            });
        add_float_sums(sum[0] + sum[1], sum[2] + sum[3]);
        unsigned seen = __float_as_uint((sum[0] + sum[1]) + (sum[2] + sum[3]));
#pragma unroll
        for (int i = 0; PACKS && i < CODE_REGS; ++i) seen |= codes[i];
        never_store(base, seen);
        return grows;
    }

    // S to codes, relative to m of the tiles before. The codes tell whether a weight is too great; then S is still
    // there.
    __device__ __forceinline__ bool optimistic_softmax(unsigned (&codes)[CODE_REGS]) {
        const float add[2] = {shift - m[0], shift - m[1]};
        unsigned greatest = exact_signs;
        float sum[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < CODE_REGS; ++i) {
            const float* x = of_code(i);
            float weight[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) weight[c] = exp2_fast(fmaf(x[c / 2 * 4 + c % 2], factor[i % 2], add[i % 2]));
            codes[i] = pack_e4m3(weight[0], weight[1], weight[2], weight[3]);
            if (EXACT_LSE) sum[i % 2] += (weight[0] + weight[1]) + (weight[2] + weight[3]);
            greatest |= codes[i] + TO_SIGN;
        }
        if (__builtin_expect(__any_sync(~0u, greatest & SIGNS), 0)) return exact_softmax<false, true>(codes, 0);
        add_float_sums(sum[0], sum[1]);
        return false;
    }

    // Where the four numbers of word i of the codes begin: 16 keys of row i % 2, in the order of V^T.
    __device__ __forceinline__ float* of_code(int i) { return s + 8 * (i / 2) + i % 2 * 2; }
    __device__ __forceinline__ unsigned code_word(int i) {
        const float* x = of_code(i);
        return pack_e4m3(x[0], x[1], x[4], x[5]);
    }
    __device__ __forceinline__ void pack_codes() {
#pragma unroll
        for (int i = 0; i < CODE_REGS; ++i) p[i] = code_word(i);
    }

    // --- sums --------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int i = 0; i < SUMS_REGS; ++i) o[i] = 0;
        tiles = 0;
    }
    // A thread's vector i of the promoted part.
    __device__ __forceinline__ unsigned promoted_slot(int i) const {
        return base + AT_PROMOTED + wg * PROMOTED_BYTES + (i * 128 + threadIdx.x % 128) * VEC_BYTES;
    }
    __device__ __forceinline__ uint4* promoted_vec(int i) const {
        return static_cast<uint4*>(params.o_partial.data) +
               ((blockIdx.x * MMA_WARPGROUPS + wg) * PROMOTED_VECS + i) * 128 + threadIdx.x % 128;
    }
    __device__ __forceinline__ unsigned reference_slot(int half) const {
        return base + AT_REFERENCES + wg * REFERENCES_BYTES + row_of_lane(half) * 4;
    }
    __device__ __forceinline__ float4 load_promoted(int i) const {
        const uint4 x = load_vec(promoted_slot(i));
        return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
    }
    __device__ __forceinline__ void store_promoted(int i, float x, float y, float z, float w) const {
        store_vec(promoted_slot(i), x, y, z, w);
    }
    // The same of wide heads: a vector has four numbers of each row.
    __device__ __forceinline__ void add_wide_promoted(const float (&m)[2]) {
        float by[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            by[half] = exp2_fast(load_float(reference_slot(half)) - m[half] + PROMOTED_UNIT);
#pragma unroll
        for (int i = 0; i < PROMOTED_VECS; ++i) {
            const uint4 x = PROMOTED_IN_SHARED ? load_vec(promoted_slot(i)) : *promoted_vec(i);
            const float2 pairs[4] = {unpack_f16(x.x), unpack_f16(x.y), unpack_f16(x.z), unpack_f16(x.w)};
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float* to = o + 8 * i + 2 * c;
                to[0] = fmaf(pairs[c].x, by[c % 2], to[0]), to[1] = fmaf(pairs[c].y, by[c % 2], to[1]);
            }
        }
    }
    __device__ __forceinline__ void store_wide_promoted() {
        constexpr float unit = 1.0f / (1 << (int)PROMOTED_UNIT);
#pragma unroll
        for (int i = 0; i < PROMOTED_VECS; ++i) {
            unsigned x[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) x[c] = pack_f16(o[8 * i + 2 * c] * unit, o[8 * i + 2 * c + 1] * unit);
            if (PROMOTED_IN_SHARED) store_words(promoted_slot(i), x[0], x[1], x[2], x[3]);
            else *promoted_vec(i) = {x[0], x[1], x[2], x[3]};
        }
        __syncwarp();  // all lanes have read the references
#pragma unroll
        for (int half = 0; half < 2; ++half)
            if (threadIdx.x % 4 == 0) store_float(reference_slot(half), m[half]);
        __syncwarp();
    }
    // O plus the promoted part, relative to m.
    __device__ __forceinline__ void add_promoted(const float (&m)[2]) {
        if constexpr (!IS_NARROW) return add_wide_promoted(m);
        const float4 reference = load_promoted(PROMOTED_VECS - 1);
        const float by[2] = {exp2_fast(reference.x - m[0]), exp2_fast(reference.y - m[1])};
#pragma unroll
        for (int i = 0; i < PROMOTED_VECS - 1; ++i) {
            const float4 x = load_promoted(i);
            o[4 * i] = fmaf(x.x, by[0], o[4 * i]), o[4 * i + 1] = fmaf(x.y, by[0], o[4 * i + 1]);
            o[4 * i + 2] = fmaf(x.z, by[1], o[4 * i + 2]), o[4 * i + 3] = fmaf(x.w, by[1], o[4 * i + 3]);
        }
    }
    __device__ __forceinline__ void promote() {
        if (promoted) add_promoted(m);
        if constexpr (IS_NARROW) {
#pragma unroll
            for (int i = 0; i < PROMOTED_VECS - 1; ++i)
                store_promoted(i, o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
            store_promoted(PROMOTED_VECS - 1, m[0], m[1], 0, 0);
        } else {
            store_wide_promoted();
        }
        clear_sums();
        promoted = true;
    }
    __device__ __forceinline__ float sum_by_ones(int half) const { return o[(ONES + 2 * half) % SUMS_REGS]; }
    // After a product. A branch with a barrier in it: predicated, ptxas would move it among the wgmmas and serialise
    // them. more: whether the work tile may have tiles behind the one in hand.
    __device__ __forceinline__ void end_product(bool grows, bool more) {
        const bool promotes = ++tiles >= PROMOTE_TILES && more,
                   changes = SCALES_OF_BLOCKS && inverse_v != pending_inverse_v,
                   adds = SUMS_BY_ONES && (tiles % SUM_TILES == 0 || changes);
        if (__builtin_expect(grows || adds || promotes, 0)) {
            __syncwarp();
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (SUMS_BY_ONES) {
                    l[half] = fmaf(sum_by_ones(half), pending_inverse_v, l[half]);
                    o[(ONES + 2 * half) % SUMS_REGS] = o[(ONES + 2 * half + 1) % SUMS_REGS] = 0;
                    if (grows) l[half] *= rescale[half];
                }
            }
            if (grows) rescale_o();
            if (promotes) promote();
        }
    }
    __device__ __forceinline__ void rescale_o() {
#pragma unroll
        for (int i = 0; i < SUMS_REGS; ++i) o[i] *= rescale[i / 2 % 2];
    }

    // --- work tiles --------------------------------------------------------------------------------------------------

    // Waits for Q, and takes it and its scales.
    __device__ __forceinline__ void begin_work_tile() {
        q_pipe(base).consumer_wait(number);
        const WorkTile at = read_work_tile(params, base, number, wg);
        const int head = at.h / GQA_GROUP;
        k_scale = SCALES_OF_HEADS ? Elements::key_scale(params, params.k_scale, at.b, head, 0) : 1.0f;
        v_scale = SCALES_OF_HEADS ? Elements::key_scale(params, params.v_scale, at.b, head, 0) : 1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto [h, row] = clamped_row(params, at.b, at.h, at.row0 + row_of_lane(half));
            row_scale[half] = Elements::query_scale(params, at.b, h, row);
            if (IS_NARROW) combine_scales(half);
        }
        if constexpr (Q_IN_REGISTERS) {
            const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
#pragma unroll
            for (int step = 0; step < Q_REGS / 4; ++step) {
                unsigned r[4];
                ldmatrix_x4(r, q_rows(base, number % Q_BUFFERS, wg) + swizzled(row, 2 * step + lane / 16));
#pragma unroll
                for (int i = 0; i < 4; ++i) q[4 * step + i] = r[i];
            }
            __syncwarp();
            release_q();
        }
        begins = false;
    }
    __device__ __forceinline__ void combine_scales(int half) {
        row_scale[half] = valid_scale(row_scale[half] * k_scale);
        if (!HAS_SCORE) row_scale[half] *= softmax_scale_log2(params);
    }
    // Wide heads: once the scales have arrived from global memory, and not before products are issued.
    __device__ __forceinline__ void await_scales() {
        fence_operand(row_scale);
        combine_scales(0), combine_scales(1);
    }
    // The epilogue of the work tile before; its state, as O is still its.
    __device__ __forceinline__ void end_work_tile(const float (&m)[2], const float (&l)[2], const float (&exact_l)[2],
                                                  float v_scale, bool promoted) {
        if (promoted) add_promoted(m);
        float sum[2] = {l[0], l[1]};
#pragma unroll
        for (int half = 0; SUMS_BY_ONES && half < 2; ++half)
            sum[half] = fmaf(sum_by_ones(half), pending_inverse_v, sum[half]);
        epilogue_fp8(params, read_work_tile(params, base, number - 1, wg), m, sum, exact_l, v_scale, o);
    }

    // --- steps -------------------------------------------------------------------------------------------------------

    // A tile that hides nothing, of a work tile whose rows have a maximum. codes: those that are pending.
    __device__ __forceinline__ void optimistic_step(unsigned (&codes)[CODE_REGS], unsigned (&next)[CODE_REGS],
                                                    unsigned slot, int tile) {
        load_tile_scales(slot);
        issue_qk();
        issue_pv(codes);
        wait_s<1>();
        const bool grows = optimistic_softmax(next);
        wait_pv(codes);
        read_ahead();
        end_product(grows, tile > 0);
        pending_inverse_v = inverse_v;
    }

    // CHAINED: a tile that hides nothing, behind one whose codes are pending, and others after it. Only those after
    // them wait for their descriptor.
    __device__ __forceinline__ void full_steps() {
        int tile_desc;
        do {
            const unsigned slot = tile_desc_slot(base, tiles_k);
            load_tile_scales(slot);
            issue_qk();
            issue_pv(p);
            next_desc = tile_desc = uniform(load_word(slot));
            wait_s<1>();
            const bool grows = exact_softmax<false, false>(p, 0);
            wait_pv(p);
            pack_codes();
            wait_k();
            end_product(grows, !(tile_desc & ENDS_WORK_TILE));
            pending_inverse_v = inverse_v;
        } while (tile_desc & PAIR);
        read_ahead();
    }

    // Any tile. FIRST: of its work tile, while codes of the one before are PENDING.
    template <bool FIRST, bool PENDING>
    __device__ __forceinline__ void step(unsigned slot, int tile, bool full) {
        const float m_before[2] = {m[0], m[1]}, l_before[2] = {l[0], l[1]}, exact_before[2] = {exact_l[0], exact_l[1]};
        const float v_before = v_scale;
        const bool promoted_before = promoted;
        const bool is_first = FIRST || (!PENDING && begins);
        if (FIRST) begin_work_tile();
        if (!PENDING && begins) {
            if (number > 0) end_work_tile(m, l, exact_l, v_scale, promoted);
            begin_work_tile();
            clear_sums();
            m[0] = m[1] = NO_MAXIMUM;
            l[0] = l[1] = exact_l[0] = exact_l[1] = 0, promoted = false;
        }
        if (FIRST) l[0] = l[1] = exact_l[0] = exact_l[1] = 0, promoted = false;
        if (IS_NARROW) load_tile_scales(slot);
        const unsigned key_scales = base + AT_KEY_SCALES + (++loads % 2 * MMA_WARPGROUPS + wg) * 3 * SCALE_BYTES;
        issue_qk();
        if (PENDING) issue_pv(p);
        if (!IS_NARROW) {
            if (is_first) await_scales();
            load_tile_scales(slot);
        }
        if (SCALES_OF_TOKENS)
            load_key_scales(params, read_work_tile(params, base, number, wg), tile * BLOCK_K, key_scales, wg);
        wait_s<PENDING>();
        modify(full, tile * BLOCK_K, key_scales);
        const bool grows = exact_softmax<FIRST, false>(p, key_scales);
        if (PENDING) {
            wait_pv(p);
            if (!IS_NARROW) pack_codes();  // no branch in between: ptxas packs before it waits
            while (tiles_v + 1 != tiles_k) pass_v();
        }
        read_ahead();  // its latency is hidden behind packing P
        if (FIRST) {
            if (IS_NARROW) pack_codes();
            end_work_tile(m_before, l_before, exact_before, v_before, promoted_before);
            clear_sums();
        } else if (PENDING) {
            if (IS_NARROW) pack_codes();
            end_product(grows, tile > 0);
        } else {
            if (grows) {
                rescale_o();
                if (SUMS_BY_ONES) l[0] *= rescale[0], l[1] *= rescale[1];
            }
            pack_codes();
        }
        pending_inverse_v = inverse_v;
        looks = HAS_MASK && !full;
    }

    // P V by itself: where no S goes with it.
    __device__ __forceinline__ void drain() {
        issue_pv(p);
        wait_pv(p);
        end_product(false, false);
        while (is_pending()) pass_v();
    }

    // A tile that is EMPTY for this warp group, but not for another one. Its V is released behind that of the pending
    // codes; only one, as the producer would wait for further ones.
    __device__ __forceinline__ void skip() {
        if (tiles_k - tiles_v > 1) drain();
        const bool pending = is_pending();
        release_k();
        release_q_after(next_desc);
        if (!pending) pass_v();
        looks = true;
        read_ahead();
    }

    __device__ __forceinline__ void run() {
        read_ahead();
#pragma unroll 1
        while (true) {
            const unsigned slot = tile_desc_slot(base, tiles_k);
            const int tile_desc = uniform(next_desc), tile = tile_desc >> TILE_BIT, state = tile_desc >> 2 * wg & 3;
            if (IN_PAIRS && (tile_desc & PAIR) && state == FULL && !looks) {
                optimistic_step(p, other_p, slot, tile);
                optimistic_step(other_p, p, tile_desc_slot(base, tiles_k), tile - 1);
                continue;
            }
            if (tile_desc & FIRST_TILE) {  // also END
                if (!Q_IN_REGISTERS && !RELEASES_Q_EARLY && number >= 0) release_q();
                ++number, begins = looks = true;
            }
            if (tile_desc == END) break;
            if (CHAINED && state == FULL && !begins && tiles_k - tiles_v == 1) full_steps();
            else if (state == EMPTY) skip();
            else if (!is_pending()) step<false, false>(slot, tile, state == FULL);
            else if (begins) step<true, true>(slot, tile, state == FULL);
            else step<false, true>(slot, tile, state == FULL);
        }
        if (is_pending()) drain();
        if (number > 0) end_work_tile(m, l, exact_l, v_scale, promoted);
    }
};
