// Split-KV (FlashDecoding, Dao et al. 2023): combines the splits of a row, weighted by the sum of their P. Row
// reference and sum come apart, as the rounding of a great log-sum-exp would be that of the weight. A CTA takes a row
// or, of many splits, 32 lanes of one; a thread COMBINE_VEC columns of every `groups`-th split. The host chooses how
// many threads there are, and CTAs of a row (launch_combine). The order of additions is fixed.
#pragma once

constexpr int COMBINE_VEC = HEAD_DIM_V % 4 == 0 && HEAD_DIM_V > 64 ? 4 : HEAD_DIM_V % 2 == 0 ? 2 : 1;
constexpr int COMBINE_LANES = up((HEAD_DIM_V + COMBINE_VEC - 1) / COMBINE_VEC, 32), COMBINE_THREADS = 1024;

// Splits whose loads are under way together, as each is a journey to global memory.
constexpr int COMBINE_PREFETCH = 8;

struct alignas(4 * COMBINE_VEC) CombineColumns { float x[COMBINE_VEC]; };

extern "C" __global__ void __launch_bounds__(COMBINE_THREADS) combine(KERNEL_PARAMS) {
    __shared__ CombineColumns acc_smem[COMBINE_THREADS];
    __shared__ float sum_smem[COMBINE_THREADS / 32];
    const unsigned rows = (unsigned)max_n_q(p), heads = (unsigned)p.heads;
    const bool whole = gridDim.x == rows * heads * (unsigned)p.batch;  // a row in a CTA
    const unsigned lanes = whole ? COMBINE_LANES : 32, per_row = COMBINE_LANES / lanes;
    const unsigned index = blockIdx.x / per_row, row = index % rows, h = index / rows % heads, b = index / rows / heads;
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    const int splits = (int)p.num_splits, last = splits - 1;
    const int column = (blockIdx.x % per_row * lanes + lane) * COMBINE_VEC;
    const bool stores = column < HEAD_DIM_V;
    const long long step = p.batch * p.o_partial.batch, lse_step = p.batch * p.lse_partial.batch;
    const float2* lse = row_at<const float2>(p.lse_partial, b, h, row);
    const float* o_split = row_at<const float>(p.o_partial, b, h, row) + group * step + (stores ? column : 0);
    CombineColumns o[COMBINE_PREFETCH];
    const auto load = [&](int first) {
        UNROLL(i, COMBINE_PREFETCH) {
            if (first + groups * i > last) break;
            o[i] = *reinterpret_cast<const CombineColumns*>(o_split), o_split += groups * step;
        }
    };
    griddepcontrol_wait(), griddepcontrol_launch_dependents();

    load(group);
    const float sink = HAS_SINKS ? static_cast<const float*>(p.sinks)[h] * LOG2E : HIDDEN;
    float row_ref = sink;
#pragma unroll 1
    for (int first = 0; first < splits; first += 32 * COMBINE_PREFETCH)
        UNROLL(i, COMBINE_PREFETCH) {
            if (first + 32 * i > last) break;
            row_ref = fmaxf(row_ref, lse[min(first + 32 * i + (int)threadIdx.x % 32, last) * lse_step].x);
        }
#pragma unroll
    for (int other = 16; other > 0; other /= 2) row_ref = fmaxf(row_ref, __shfl_xor_sync(~0u, row_ref, other));
    const float shift = row_ref == HIDDEN ? 0.0f : row_ref;
    float sum = group == 0 ? exp2_fast(sink - shift) : 0.0f;
    CombineColumns acc{};
#pragma unroll 1
    for (int first = group; first < splits; first += groups * COMBINE_PREFETCH) {
        if (first > group) load(first);
        UNROLL(i, COMBINE_PREFETCH) {
            const int split = first + groups * i;
            if (split > last) break;
            const float2 of_split = lse[split * lse_step];
            const float scale = of_split.y * exp2_fast(of_split.x - shift);
            sum += scale;  // NaN where the split is
            UNROLL(c, COMBINE_VEC)
                if (scale != 0) acc.x[c] += scale * o[i].x[c];
        }
    }
    if (groups > 1) {
        acc_smem[threadIdx.x] = acc;
        if (lane == 0) sum_smem[group] = sum;
        __syncthreads();
        if (group > 0) return;
        for (int other = 1; other < groups; ++other) {
            sum += sum_smem[other];
            UNROLL(c, COMBINE_VEC) acc.x[c] += acc_smem[other * lanes + lane].x[c];
        }
    }
    const float inverse = sum == 0 ? 0.0f : 1.0f / sum;
    storage* out = q_row<storage>(p, p.out, b, h, row) + column;
    UNROLL(c, COMBINE_VEC)
        if (stores) out[c] = narrow(sum == 0 ? 0.0f : acc.x[c] * inverse);
    if (column == 0) *q_row<float>(p, p.lse, b, h, row) = sum == 0 ? HIDDEN : fmaf(shift, LN2, logf(sum));
}
