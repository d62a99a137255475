// The online softmax of the FP8 forward pass, to P as codes of e4m3.
//
// P is 2^MAX_P_LOG2 relative to the row maximum so far. Scales of tokens belong to a score's exponent:
//
//     t_j = scale * k_scale_j s_j + log2(v_scale_j)      P_j = 2^(t_j - m)      l = sum P_j / v_scale_j
//
// So P is what its value's code is multiplied by, the row maximum is that of these products, and the greatest of them
// is a power of two, which e4m3 holds. Masked keys have no part in it.
#pragma once
#include "sm90/fp8_layout.cuh"
#include "sm90/score_mod.cuh"

// e4m3 has no bits for P below 2^-9, and 448 is its greatest number.
constexpr float MAX_P_LOG2 = 8;

// Scales of values that float32 has room for, beside weights. A group of zeros has float32's least normal number
// (quantize), whose codes are zeros: it stands for MIN_V_SCALE.
constexpr float MIN_V_SCALE = 8.271806e-25f, MAX_V_SCALE = 16384.0f;  // 2^-80, 2^14

constexpr int CODE_REGS = BLOCK_K / 8;  // of P

// A tile's key scales, logarithms and inverses of its value scales, by a warp group: a key for each thread. A slot is
// written again two tiles later, behind the barrier of the tile between.
DEVICE void load_key_scales(const Params& p, const WorkTile& at, int k0, unsigned slot, int wg) {
    const int key = key_inside(k0 + threadIdx.x % 128, (int)seq_info(p, at.b).n_k), head = at.h / GQA_GROUP;
    const float k = scale_of(p.k_scale, at.b, head, key), v = scale_of(p.v_scale, at.b, head, key);
    const unsigned own = slot + threadIdx.x % 128 * 4;
    const float size = fmaxf(v, MIN_V_SCALE);
    const bool valid = (v >= MIN_V_SCALE || v == MIN_SCALE) && v <= MAX_V_SCALE;
    store_float(own, k);
    store_float(own + SCALE_BYTES, log2_fast(size));
    store_float(own + 2 * SCALE_BYTES, valid ? reciprocal(size) : fk_special(0));  // the epilogue sees NaN
    named_barrier_sync(WARPGROUP_BARRIER + wg, 128);
}

// For each pair of a lane's columns f(column block, two numbers of the keys).
template <typename F>
DEVICE void for_columns(unsigned numbers, F f) {
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) f(n, load_floats(numbers + threadIdx.x % 4 * 8 + 32 * n));
}

// Each column of a tile times its key's scale.
DEVICE void scale_columns(float (&s)[S_REGS], unsigned key_scales) {
    for_columns(key_scales, [&](int n, float2 scale) {
        s[4 * n] *= scale.x, s[4 * n + 1] *= scale.y, s[4 * n + 2] *= scale.x, s[4 * n + 3] *= scale.y;
    });
}

// S to P. scale: from S to base 2, for each of a lane's rows. `rescale` brings sums of the tiles before to the new m.
// between_rows(x) is called between a lane's two rows, whose first one x depends on.
template <typename F>
DEVICE void online_softmax_fp8(float (&s)[S_REGS], float (&m)[2], float (&l)[2], float (&rescale)[2],
                               const float (&scale)[2], unsigned key_scales, F between_rows) {
    if constexpr (SCALES_PER_TOKEN)
        for_columns(key_scales + SCALE_BYTES, [&](int n, float2 log2_v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[4 * n + i] = fmaf(s[4 * n + i], scale[i / 2], i % 2 ? log2_v.y : log2_v.x);
        });
    auto element = [&](int half, int i) -> float& { return s[i / 2 * 4 + 2 * half + i % 2]; };
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float chains[2] = {HIDDEN, HIDDEN};  // half the latency
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) chains[i % 2] = fmaxf(chains[i % 2], element(half, i));
        top[half] = fmaxf(chains[0], chains[1]);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], step));
    float sum[4] = {0, 0, 0, 0}, factor[2] = {1, 1}, shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (!SCALES_PER_TOKEN) factor[half] = scale[half];
        const float next = fmaxf(m[half], fmaf(top[half], factor[half], -MAX_P_LOG2));
        shift[half] = next == HIDDEN ? 0.0f : next;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift[half]);
        m[half] = next;
        // A great score hides the scale of its value. The epilogue sees NaN.
        if (SCALES_PER_TOKEN && is_great(shift[half])) l[half] = fk_special(0);
    }
    if constexpr (!SCALES_PER_TOKEN) scale_below_great(s, shift, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) {
            float& x = element(half, i);
            x = exp2_fast(fmaf(x, factor[half], -shift[half]));
            if constexpr (!SCALES_PER_TOKEN) sum[2 * half + i % 2] += x;
        }
        if (half == 0) between_rows(SCALES_PER_TOKEN ? element(0, 0) : sum[0] + sum[1]);
    }
    if constexpr (SCALES_PER_TOKEN)
        for_columns(key_scales + 2 * SCALE_BYTES, [&](int n, float2 inverse_v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = fmaf(s[4 * n + i], i % 2 ? inverse_v.y : inverse_v.x, sum[i]);
        });
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = fmaf(l[half], rescale[half], sum[2 * half] + sum[2 * half + 1]);
}

// A row of P as the A operand of P V: the keys of a word are in the order of fp8_transpose.cuh.
DEVICE void pack_p_fp8(unsigned (&codes)[CODE_REGS], const float (&s)[S_REGS], int half) {
#pragma unroll
    for (int i = half; i < CODE_REGS; i += 2) {
        const float* x = s + 8 * (i / 2) + i % 2 * 2;  // 16 keys of row half i % 2
        codes[i] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
}
