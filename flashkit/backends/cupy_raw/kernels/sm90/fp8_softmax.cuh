// The softmax of the FP8 forward pass: S of codes to weights of codes, their scales, and its registers.
//
// A tile that hides nothing is taken relative to the maximum of the tiles before, where codes have registers of their
// own, and the codes tell whether that holds; any other tile looks for its maximum first.
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
    UNROLL(n, BLOCK_K / 8) f(n, load_floats(numbers + threadIdx.x % 4 * 8 + 32 * n));
}

// --- weights ---------------------------------------------------------------------------------------------------------

// e4m3 has no bits for P below 2^-9, and 448 is its greatest number. The greatest weight is FIRST_WEIGHT after a first
// tile, which leaves room for greater ones, and GREATEST after one that was too great: a power of two, which e4m3
// holds.
// LAZY: by how many octaves the maximum may grow before O is rescaled.
constexpr float GREATEST = 8, FIRST_WEIGHT = IN_PAIRS ? 4 : IS_NARROW || SCALES_OF_TOKENS ? 8 : 5,
                LAZY = IS_NARROW || SCALES_OF_TOKENS ? 0 : 3;
constexpr unsigned TO_SIGN = 0x08080808, SIGNS = 0x80808080;  // a code of 2^8 or more plus 8 has its sign set
constexpr float NO_MAXIMUM = -1e30f;  // m of a row without a visible key so far

// Nothing, as no computation produces this NaN. But the compiler does not know it, and schedules what x depends on
// before a wait that follows: it would wait for P V before the exponentials.
DEVICE void never_store(unsigned address, unsigned x) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0x7fa12345; @p st.shared.b32 [%0], %1; }"
                 ::"r"(address), "r"(x) : "memory");
}

// x += y, where it stands: ptxas would keep all weights of a tile for a later sum, and spill.
DEVICE void add_at_once(float& x, float y) { asm volatile("add.f32 %0, %0, %1;" : "+f"(x) : "f"(y)); }

struct SoftmaxFp8 {
    const Params& params;
    unsigned base;
    int wg;
    int number = -1;           // of the work tile that the current tile belongs to, among this CTA's
    float s[S_REGS], m[2];
    float l[2];                // row sums; of a lane's columns unless SUMS_BY_ONES, which leaves the last ones in O
    float exact_l[2];          // EXACT_LSE with SUMS_BY_ONES: of weights that are not rounded, of a lane's columns
    float rescale[2];          // of O and l, where m has grown
    float row_scale[2];        // of S; to base 2 unless HAS_SCORE
    float k_scale, v_scale;    // of the head
    float factor[2], shift;    // of the tile: from S to base 2, and log2 of the scale of v
    float inverse_v = 1;       // of the tile
    unsigned exact_signs = 0;  // SIGNS: m is great, so that no tile is taken as it is

    __device__ __forceinline__ SoftmaxFp8(const Params& p, unsigned base, int wg) : params(p), base(base), wg(wg) {}

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
            UNROLL(i, S_REGS) s[i] *= factor[i / 2 % 2];
            factor[0] = factor[1] = LOG2E;
        }
        if (HAS_SCORE || !full)
            modify_tile(params, read_work_tile(params, base, number, wg), full, s, k0, (float)params.softmax_scale);
        if constexpr (SCALES_OF_TOKENS) {
            for_columns(key_scales + SCALE_BYTES, [&](int n, float2 log2_v) {
                UNROLL(i, 4)
                    s[4 * n + i] = fmaf(s[4 * n + i], factor[i / 2], i % 2 ? log2_v.y : log2_v.x);
            });
            factor[0] = factor[1] = 1;
        }
    }

    // The greatest exponent of a lane's columns of a row.
    __device__ __forceinline__ float lane_maximum(int half) const {
        float chains[2] = {s[2 * half], s[2 * half + 1]};  // half the latency
#pragma unroll
        for (int i = 2; i < S_REGS / 2; ++i) chains[i % 2] = fmaxf(chains[i % 2], s[i / 2 * 4 + 2 * half + i % 2]);
        return fmaf(fmaxf(chains[0], chains[1]), factor[half], shift);
    }
    __device__ __forceinline__ float row_maximum(int half) const { return max_across_lanes(lane_maximum(half)); }

    // Whether m is to grow. LAZY: a weight that dominates its lane's columns becomes a power of two, which e4m3 holds,
    // as the sum of floats does not have its rounding. No branch, as the exponentials wait for this.
    __device__ __forceinline__ bool outgrows(int half, float most) const {
        const bool exceeds = most - (FIRST_WEIGHT + LAZY) > m[half];
        if (LAZY == 0) return exceeds;
        return exceeds | ((most - FIRST_WEIGHT > m[half]) & (exp2_fast(most - m[half]) * inverse_v > l[half]));
    }
    // m relative to which no weight of a row is above 2^top. FIRST: the greatest one is that. IN_PAIR: and it is where
    // it has a 64th of its row's sum.
    template <bool FIRST, bool IN_PAIR>
    __device__ __forceinline__ void raise_maximum(const float (&most)[2], float top) {
        UNROLL(half, 2) {
            const float own = most[half] - top;
            const bool dominates = IN_PAIR && l[half] > 0 && 64 * exp2_fast(most[half] - m[half]) * inverse_v > l[half];
            const float next = FIRST ? fmaxf(own, NO_MAXIMUM) : dominates ? own : fmaxf(own, m[half]);
            if (!FIRST) rescale[half] = exp2_fast(m[half] - next);
            if (!FIRST && SUMS_OF_FLOATS) float_sum(half) *= rescale[half];
            m[half] = next;
        }
        exact_signs = __any_sync(~0u, is_great(m[0]) || is_great(m[1])) ? SIGNS : 0;
        if (__builtin_expect(exact_signs != 0, 0)) scale_below_great();
    }
    __device__ __forceinline__ float& float_sum(int half) { return SUMS_BY_ONES ? exact_l[half] : l[half]; }
    __device__ __forceinline__ void add_float_sums(float sum0, float sum1) {
        if (!SUMS_OF_FLOATS) return;
        float_sum(0) = fmaf(sum0, inverse_v, float_sum(0)), float_sum(1) = fmaf(sum1, inverse_v, float_sum(1));
    }

    // Where m is great S is scaled and rounded before m is subtracted.
    __device__ __forceinline__ void scale_below_great() {
        UNROLL(i, S_REGS) s[i] = __fadd_rn(__fmul_rn(s[i], factor[i / 2 % 2]), shift);
        factor[0] = factor[1] = 1, shift = 0;
        UNROLL(half, 2)  // A great score hides the scale of its value. The epilogue sees NaN.
            if ((SCALES_OF_BLOCKS || SCALES_OF_TOKENS) && is_great(m[half]) && m[half] > NO_MAXIMUM)
                l[half] = fk_special(0);
    }

    // S to weights relative to the row maximum so far. Returns whether O and l are to be multiplied by `rescale`. LAZY:
    // lanes tell each other their maxima only where m grows.
    template <bool FIRST>
    __device__ __forceinline__ bool exact_softmax(unsigned key_scales, bool lifts) {
        constexpr bool ASKS_FIRST = FIRST || LAZY == 0;
        float most[2];
        UNROLL(half, 2) most[half] = ASKS_FIRST ? row_maximum(half) : lane_maximum(half);
        const bool grows = !FIRST && __any_sync(~0u, outgrows(0, most[0]) | outgrows(1, most[1]) | (exact_signs != 0));
        if (FIRST || __builtin_expect(grows, 0)) {
            if (!ASKS_FIRST) most[0] = max_across_lanes(most[0]), most[1] = max_across_lanes(most[1]);
            raise_maximum<FIRST, false>(most, FIRST_WEIGHT);
        }
        const float add[2] = {shift - m[0], shift - m[1]};
        float sum[4] = {0, 0, 0, 0};
        UNROLL(i, S_REGS) {
            s[i] = exp2_fast(fmaf(s[i], factor[i / 2 % 2], add[i / 2 % 2]));
            if (!SCALES_OF_TOKENS) sum[i % 4] += s[i];
        }
        if constexpr (SCALES_OF_TOKENS)
            for_columns(key_scales + 2 * SCALE_BYTES, [&](int n, float2 inverse) {
                UNROLL(i, 4) sum[i] = fmaf(s[4 * n + i], i % 2 ? inverse.y : inverse.x, sum[i]);
            });
        if (IN_PAIRS && lifts) lift_great(sum);
        add_float_sums(sum[0] + sum[1], sum[2] + sum[3]);
        never_store(base, __float_as_uint((sum[0] + sum[1]) + (sum[2] + sum[3])));
        return grows;
    }

    // Of a first tile: where the greatest weight has a fifth of its row's sum it becomes GREATEST, as small ones need
    // the range. Then a lane's sum is under a quarter of FEW.
    __device__ __forceinline__ void lift_great(float (&sum)[4]) {
        constexpr float FEW = 5 << (int)FIRST_WEIGHT;
        const float own[2] = {sum[0] + sum[1], sum[2] + sum[3]};
        if (!__any_sync(~0u, exact_signs == 0 && fminf(own[0], own[1]) < FEW / 4)) return;
        float by[2];
        UNROLL(half, 2) {
            const bool few = sum_across_lanes(own[half]) < FEW;
            by[half] = few ? 1 << (int)(GREATEST - FIRST_WEIGHT) : 1;
            m[half] -= few ? GREATEST - FIRST_WEIGHT : 0;
        }
        UNROLL(i, S_REGS) s[i] *= by[i / 2 % 2];
        UNROLL(i, 4) sum[i] *= by[i / 2];
    }

    // S to codes, relative to m of the tiles before. The codes tell whether a weight is too great; then S is still
    // there, and is taken again relative to a new m.
    __device__ __forceinline__ bool optimistic_softmax(unsigned (&codes)[CODE_REGS]) {
        float sum[2];
        unsigned to_sign = TO_SIGN, signs = exact_signs;
        bool again;
#pragma unroll 1
        do {
            const float add[2] = {shift - m[0], shift - m[1]};
            sum[0] = sum[1] = 0;
            UNROLL(i, CODE_REGS) {
                const float* x = of_code(i);
                float weight[4];
                UNROLL(c, 4) weight[c] = exp2_fast(fmaf(x[c / 2 * 4 + c % 2], factor[i % 2], add[i % 2]));
                codes[i] = pack_e4m3(weight[0], weight[1], weight[2], weight[3]);
                if (EXACT_LSE) UNROLL(c, 4) add_at_once(sum[i % 2], weight[c]);
                signs |= codes[i] + to_sign;
            }
            again = __any_sync(~0u, signs & SIGNS);
            if (__builtin_expect(again, 0)) {
                const float most[2] = {row_maximum(0), row_maximum(1)};
                raise_maximum<false, true>(most, GREATEST);
                to_sign = signs = 0;  // no sign the next time
            }
            __syncwarp();  // or ptxas makes a second copy of the exponentials
        } while (__builtin_expect(again, 0));
        add_float_sums(sum[0], sum[1]);
        return to_sign == 0;
    }

    // Where the four numbers of word i of the codes begin: 16 keys of row i % 2, in the order of V^T.
    __device__ __forceinline__ float* of_code(int i) { return s + 8 * (i / 2) + i % 2 * 2; }
    __device__ __forceinline__ unsigned code_word(int i) {
        const float* x = of_code(i);
        return pack_e4m3(x[0], x[1], x[4], x[5]);
    }
    __device__ __forceinline__ void pack_codes(unsigned (&codes)[CODE_REGS]) {
        UNROLL(i, CODE_REGS) codes[i] = code_word(i);
    }
};
