// Split-KV (FlashDecoding, Dao et al. 2023): combines the splits of a row, weighted by the sum of their P. A CTA takes
// a row or, of many splits, 32 lanes of one; a thread COMBINE_VEC columns of every `groups`-th split. The host chooses
// how many threads there are, and CTAs of a row (launch_combine). The order of additions is fixed.
#pragma once

constexpr int COMBINE_VEC = HEAD_DIM_V % 4 == 0 && HEAD_DIM_V > 64 ? 4 : HEAD_DIM_V % 2 == 0 ? 2 : 1;
constexpr int COMBINE_LANES = up((HEAD_DIM_V + COMBINE_VEC - 1) / COMBINE_VEC, 32), COMBINE_THREADS = 1024;

// Loaded together, as each takes a journey to global memory. Past the last comes the last one again, with weight 0.
constexpr int COMBINE_PREFETCH = 8;

struct alignas(4 * COMBINE_VEC) CombineColumns { float x[COMBINE_VEC]; };

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) combine(KERNEL_PARAMS) {
    __shared__ CombineColumns acc_smem[COMBINE_THREADS];
    __shared__ float sum_smem[COMBINE_THREADS / 32];
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    const long long rows = max_n_q(p);
    const bool whole = gridDim.x == rows * p.heads * p.batch;  // a row in a CTA
    const int lanes = whole ? COMBINE_LANES : 32, per_row = COMBINE_LANES / lanes;
    const int index = blockIdx.x / per_row, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
    const long long row = index % rows, h = index / rows % p.heads, b = index / rows / p.heads;
    const int column = (blockIdx.x % per_row * lanes + lane) * COMBINE_VEC;
    const int groups = blockDim.x / lanes, splits = (int)p.num_splits, last = splits - 1;
    const bool stores = column < HEAD_DIM_V;
    const float* lse = row_at<const float>(p.lse_partial, b, h, row);
    const float* o_split = row_at<const float>(p.o_partial, b, h, row) + (stores ? column : 0);
    const long long lse_step = p.batch * p.lse_partial.batch, step = p.batch * p.o_partial.batch;

    const float sink = HAS_SINKS ? static_cast<const float*>(p.sinks)[h] : HIDDEN;
    float max_lse = sink;
    for (int first = threadIdx.x % 32; first < splits; first += 32 * COMBINE_PREFETCH)
#pragma unroll
        for (int i = 0; i < COMBINE_PREFETCH; ++i)
            max_lse = fmaxf(max_lse, lse[min(first + 32 * i, last) * lse_step]);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) max_lse = fmaxf(max_lse, __shfl_xor_sync(~0u, max_lse, other));
    const float finite_max = max_lse == HIDDEN ? 0.0f : max_lse;
    float sum = group == 0 ? exp2_fast((sink - finite_max) * LOG2E) : 0.0f;
    CombineColumns acc{};
#pragma unroll 1
    for (int first = group; first < splits; first += groups * COMBINE_PREFETCH) {
        float lse_of[COMBINE_PREFETCH];
        CombineColumns o[COMBINE_PREFETCH];
#pragma unroll
        for (int i = 0; i < COMBINE_PREFETCH; ++i) {
            const int split = min(first + groups * i, last);
            lse_of[i] = lse[split * lse_step];
            o[i] = *reinterpret_cast<const CombineColumns*>(o_split + split * step);
        }
#pragma unroll
        for (int i = 0; i < COMBINE_PREFETCH; ++i) {
            const float scale = first + groups * i > last ? 0.0f : exp2_fast((lse_of[i] - finite_max) * LOG2E);
            sum += scale;  // NaN where the split is
#pragma unroll
            for (int c = 0; c < COMBINE_VEC; ++c)
                if (scale != 0) acc.x[c] += scale * o[i].x[c];
        }
    }
    acc_smem[threadIdx.x] = acc;
    if (lane == 0) sum_smem[group] = sum;
    __syncthreads();
    if (group > 0) return;
    for (int other = 1; other < groups; ++other) {
        sum += sum_smem[other];
#pragma unroll
        for (int c = 0; c < COMBINE_VEC; ++c) acc.x[c] += acc_smem[other * lanes + lane].x[c];
    }
#pragma unroll
    for (int c = 0; c < COMBINE_VEC; ++c)
        if (stores) q_row<storage>(p, p.out, b, h, row)[column + c] = narrow(sum == 0 ? 0.0f : acc.x[c] / sum);
    if (column == 0) *q_row<float>(p, p.lse, b, h, row) = sum == 0 ? HIDDEN : finite_max + logf(sum);
}
