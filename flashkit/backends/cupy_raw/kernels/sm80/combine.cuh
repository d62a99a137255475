// Split-KV (FlashDecoding, Dao et al. 2023): combines the splits of a row, weighted by the sum of their P. A CTA takes
// a row, a thread one column of some of the splits.
#pragma once

constexpr int COMBINE_COLUMNS = up(HEAD_DIM_V, 32), COMBINE_GROUPS = COMBINE_COLUMNS <= 64 ? 8 : 512 / COMBINE_COLUMNS;
extern "C" __global__ void __launch_bounds__(COMBINE_COLUMNS * COMBINE_GROUPS) combine(KERNEL_PARAMS) {
    __shared__ float acc_smem[COMBINE_GROUPS][COMBINE_COLUMNS], sum_smem[COMBINE_GROUPS];
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    const long long rows = max_n_q(p);
    const long long row = blockIdx.x % rows, h = blockIdx.x / rows % p.heads, b = blockIdx.x / rows / p.heads;
    const int column = threadIdx.x % COMBINE_COLUMNS, group = threadIdx.x / COMBINE_COLUMNS, splits = (int)p.num_splits;
    const float* lse = row_at<const float>(p.lse_partial, b, h, row);
    const float* o_split = row_at<const float>(p.o_partial, b, h, row) + column;
    const long long lse_step = p.batch * p.lse_partial.batch, step = p.batch * p.o_partial.batch;

    const float sink = HAS_SINKS ? static_cast<const float*>(p.sinks)[h] : HIDDEN;
    float max_lse = sink;
    for (int split = threadIdx.x % 32; split < splits; split += 32) max_lse = fmaxf(max_lse, lse[split * lse_step]);
#pragma unroll
    for (int other = 16; other > 0; other /= 2) max_lse = fmaxf(max_lse, __shfl_xor_sync(~0u, max_lse, other));
    const float finite_max = max_lse == HIDDEN ? 0.0f : max_lse;
    float sum = group == 0 ? exp2_fast((sink - finite_max) * LOG2E) : 0.0f, acc = 0;
#pragma unroll 8
    for (int split = group; split < splits; split += COMBINE_GROUPS) {
        const float scale = exp2_fast((lse[split * lse_step] - finite_max) * LOG2E);  // NaN where the split is
        const float value = column < HEAD_DIM_V ? o_split[split * step] : 0.0f;
        sum += scale;
        if (scale != 0) acc += scale * value;
    }
    acc_smem[group][column] = acc;
    if (column == 0) sum_smem[group] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int other = 1; other < COMBINE_GROUPS; ++other) sum += sum_smem[other], acc += acc_smem[other][column];
    if (column < HEAD_DIM_V) q_row<storage>(p, p.out, b, h, row)[column] = narrow(sum == 0 ? 0.0f : acc / sum);
    if (column == 0) *q_row<float>(p, p.lse, b, h, row) = sum == 0 ? HIDDEN : finite_max + logf(sum);
}
