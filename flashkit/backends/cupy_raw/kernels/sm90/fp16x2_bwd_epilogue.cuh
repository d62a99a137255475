// The epilogue of the FP16x2 backward pass: gradients to global memory.
#pragma once
#include "sm90/fp16x2_bwd_nonfinite.cuh"

// A gradient of a warp's 16 rows to global memory, 32 columns at a time through 2 KiB of shared memory, so that stores
// are of whole 128-byte lines. all: rows of the tensor, which get zeros from at.rows on.
template <int DIM, int M>
DEVICE void store_gradient(const Tensor& gradient, const WorkTile& at, int first, int all, const float (&sums)[M],
    float factor, unsigned staged) {
    const int lane = threadIdx.x % 32;
    const bool whole = DIM % 4 == 0 && ((unsigned long long)gradient.data & 15) == 0;  // a gradient is contiguous
#pragma unroll
    for (int c0 = 0; c0 < padded(DIM); c0 += 32) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8 && c0 + i / 2 * 8 < padded(DIM); ++i) {
            const int own = lane / 4 + 8 * (i % 2), e = (c0 / 8 + i / 2) * 4 + 2 * (i % 2),
                vec = 2 * (i / 2) + lane % 4 / 2;
            const bool exists = first + own < at.rows;
            store_floats(staged + swizzled(own, vec) + lane % 2 * 8, exists ? sums[e] * factor : 0.0f,
                exists ? sums[e + 1] * factor : 0.0f);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = 4 * i + lane / 8, column = c0 + lane % 8 * 4;
            const float2 x = load_floats(staged + swizzled(own, lane % 8)),
                y = load_floats(staged + swizzled(own, lane % 8) + 8);
            if (first + own >= all) continue;
            float* target = row_at<float>(gradient, at.b, at.h, first + own) + column;
            if (whole) {
                if (column < DIM) *reinterpret_cast<float4*>(target) = {x.x, x.y, y.x, y.y};
            } else {
                if (column < DIM) target[0] = x.x;
                if (column + 1 < DIM) target[1] = x.y;
                if (column + 2 < DIM) target[2] = y.x;
                if (column + 3 < DIM) target[3] = y.y;
            }
        }
    }
}

// The gradients of a work tile; `staged`: its warp group's rows of A1, which are no longer read.
DEVICE void epilogue(const Params& p, const WorkTile& at, int wg, float (&acc_1)[ACC_COLUMNS_1 / 2 + 1],
    float (&acc_2)[ACC_COLUMNS_2 / 2 + 1], const float (&factor)[2], bool is_nonfinite, unsigned staged) {
    const int warp = uniform(threadIdx.x % 128 / 32), first = at.row0 + 64 * wg + 16 * warp,
        all = DQ_KERNEL ? (int)seq_info(p, at.b).n_q : (int)max_n_k(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < ACC_COLUMNS_1 / 4; ++i) {
            float& x = acc_1[i / 2 * 4 + 2 * half + i % 2];
            x *= factor[half], is_nonfinite |= !is_finite(x);
        }
#pragma unroll
        for (int i = 0; i < ACC_COLUMNS_2 / 4; ++i) is_nonfinite |= !is_finite(acc_2[i / 2 * 4 + 2 * half + i % 2]);
    }
    if (__any_sync(~0u, is_nonfinite)) rows_nonfinite(p, at, first, acc_1, acc_2);
    named_barrier_sync(1 + wg, 128);  // no warp of the warp group reads the rows any more
    staged += 16 * warp * CHUNK_ROW;
    store_gradient<HEAD_DIM>(DQ_KERNEL ? p.dq : p.dk, at, first, all, acc_1, (float)p.softmax_scale, staged);
    if constexpr (!DQ_KERNEL) store_gradient<HEAD_DIM_V>(p.dv, at, first, all, acc_2, 1.0f, staged);
    fence_proxy_async();
    __syncwarp();
}
