// TF32's backward pass: float32 gradients from float16 elements under a scale for each key/value head
// (tf32_convert.cu). For 16-bit elements all of it is empty, and every scale is 1.
//
//     S         times scale_q scale_k                                in the factor of the scores
//     P         2^P_LOG2 in the fragment, which keeps its bits       in the log-sum-exp
//     dP        times scale_dout scale_v; 2^DP_LOG2 stands for 1     in dS, with delta in the same unit
//     gradients times what is left                                   when they are stored
//
// No scale depends on the tile. A gradient that is not finite, as where dS leaves the range of float16, asks for the
// fallback.
#pragma once
#include "sm90/bwd_layout.cuh"

constexpr int P_LOG2 = 14, DP_LOG2 = 31;
constexpr float DP_UNIT = 1.0f / (1u << DP_LOG2);
constexpr float P_BACK = IS_FLOAT32 ? 1.0f / (1 << P_LOG2) : 1.0f;                // what 1 in P stands for; in dS
constexpr float DS_BACK = IS_FLOAT32 ? (float)(1 << (DP_LOG2 - P_LOG2)) : 1.0f;
constexpr float SCALE_RANGE = 1.2676506e30f;                                      // 2^100
static_assert(!IS_FLOAT32 || !(HAS_SCORE || HAS_DROPOUT || HAS_SINKS || IS_PACKED || CLUSTER_SIZE > 1), "sm90_tf32.py");

struct HeadScales {
    float q, k, v, dout;

    __device__ __forceinline__ float of_scores() const { return q * k; }
    __device__ __forceinline__ float of_ds() const { return v * dout * DS_BACK; }
    __device__ __forceinline__ float of_dq() const { return of_ds() * k; }
    __device__ __forceinline__ float of_dk() const { return of_ds() * q; }
    __device__ __forceinline__ float of_dv() const { return dout * P_BACK; }
    // A row's delta in the unit of dP.
    __device__ __forceinline__ float scaled_delta(float delta) const {
        return delta * (inverse_of(v) * DP_UNIT) * inverse_of(dout);
    }
    __device__ __forceinline__ bool valid() const {
        bool valid = true;
#pragma unroll
        for (const float x : {of_scores(), of_ds(), of_dq(), of_dk(), of_dv()})
            valid &= x < SCALE_RANGE && x > 1 / SCALE_RANGE;  // not NaN
        return valid;
    }
};
DEVICE HeadScales head_scales(const Params& p, int b, int kv_head) {
    if constexpr (!IS_FLOAT32) return {1, 1, 1, 1};
    const float4 x = static_cast<const float4*>(p.head_scales)[b * (p.heads / GQA_GROUP) + kv_head];
    return {x.x, x.y, x.z, x.w};
}

DEVICE void ask_for_fallback(const Params& p, bool asks) {
    if (IS_FLOAT32 && asks) *p.fallback = 1;
}

// dP - delta, in whose unit delta is.
DEVICE float minus_delta(float dp, float delta) { return IS_FLOAT32 ? fmaf(dp, DP_UNIT, -delta) : dp - delta; }

// Four columns of a row of a gradient, which is contiguous.
template <int DIM>
DEVICE void store_float32(float* row, int column, const float4& x, const Params& p) {
    ask_for_fallback(p, !(is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w)));
    if (DIM % 4 == 0 && ((unsigned long long)row & 15) == 0) {
        if (column < DIM) *reinterpret_cast<float4*>(row + column) = x;
        return;
    }
    if (column < DIM) row[column] = x.x;
    if (column + 1 < DIM) row[column + 1] = x.y;
    if (column + 2 < DIM) row[column + 2] = x.z;
    if (column + 3 < DIM) row[column + 3] = x.w;
}
