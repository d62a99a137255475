// Before Hopper's backward kernel: for each row delta = rowsum(dO * O) - dlse and the log-sum-exp in base 2; zeros in
// dq_accum (unless DETERMINISTIC: the first to add stores); dq_semaphore and the counters as the kernel expects them.
//
// bwd_preprocess does that for query tiles below p.preprocessed_tiles, those of the heads that come first. The rest is
// cleared by the backward kernel (dq_clear.cuh) or, if FUSED_PREPROCESS, preprocessed there (bwd_fused_preprocess.cuh).
#pragma once
#include "sm90/dq_clear.cuh"
#include "sm90/tf32_scales.cuh"

// --- row statistics --------------------------------------------------------------------------------------------------

DEVICE float dot(const uint4& x, const uint4& y) {
    const storage *a = reinterpret_cast<const storage*>(&x), *b = reinterpret_cast<const storage*>(&y);
    float total = 0;
#pragma unroll
    for (int e = 0; e < VEC_BYTES / (int)sizeof(storage); ++e) total += widen(a[e]) * widen(b[e]);
    return total;
}

// Whether there is a row, if only of the sequence that follows a packed one.
DEVICE bool row_exists(const Params& p, int b, int row) {
    return IS_PACKED ? q_token(p, b, row) < p.n_q : row < (int)seq_info(p, b).n_q;
}

struct RowStats { float lse, dlse; };
DEVICE RowStats load_given_stats(const Params& p, int b, int h, int row) {
    const bool exists = row_exists(p, b, row);
    return {exists ? *q_row<const float>(p, p.lse, b, h, row) : 0.0f,
            exists && p.dlse.data != nullptr ? *q_row<const float>(p, p.dlse, b, h, row) : 0.0f};
}
// Stores delta and bwd_lse of a row whose rowsum(dO * O) is `total`; returns whether the row is non-finite. bwd_lse is
// +inf for a row without visible keys or beyond MAX_BWD_LSE, whose P so becomes 0; NaN for a non-finite row; and great
// for rows past the end, or +inf if they are the next sequence's and may be non-finite. A finite log-sum-exp says
// nothing of Q where it may be a sink's alone.
DEVICE bool store_row_stats(const Params& p, int b, int h, int row, const RowStats& given, float total) {
    float lse_log2 = 1e30f;
    if (row < (int)seq_info(p, b).n_q) {
        const bool empty = given.lse == HIDDEN;
        total = empty ? 0 : total - given.dlse;
        lse_log2 = empty                                            ? INFINITE
                   : !(is_finite(given.lse) && is_finite(total))    ? fk_special(0)
                   : fabsf(given.lse) > MAX_BWD_LSE                 ? INFINITE
                                                                    : given.lse * LOG2E;
    } else if (IS_PACKED && row_exists(p, b, row)) {
        if (HAS_SINKS || !is_finite(given.lse) || !is_finite(total)) lse_log2 = INFINITE;
        total = 0;
    }
    if constexpr (IS_FLOAT32) {
        const HeadScales scales = head_scales(p, b, h / GQA_GROUP);
        ask_for_fallback(p, !scales.valid());
        lse_log2 -= P_LOG2, total = scales.scaled_delta(total);
    }
    const long long at = stats_row(p, b, row);
    *row_at<float>(p.delta, b, h, at) = total;
    *row_at<float>(p.bwd_lse, b, h, at) = lse_log2;
    return !is_finite(lse_log2);
}

// By one of `threads` threads.
DEVICE void init_semaphore(const Params& p, const QueryTile& at, bool nonfinite, int thread, int threads) {
    const DqSemaphore semaphore = dq_semaphore(p, at.b, at.h, at.tile);
    if (thread == 0) semaphore.flags() = nonfinite ? DqSemaphore::HAS_NONFINITE_ROWS : 0;
    for (int i = thread; DETERMINISTIC && i < CLUSTER_SIZE * DqSemaphore::words_per_cta(p); i += threads)
        semaphore.added_by_all(i) = 0;
}

// --- the kernel ------------------------------------------------------------------------------------------------------

constexpr int ROW_VECS = HEAD_DIM_V * (int)sizeof(storage) / VEC_BYTES;
constexpr int LANES_PER_ROW = ROW_VECS > 16 ? 32 : ROW_VECS > 8 ? 16 : 8;

// A CTA takes a query tile.
extern "C" __global__ void __launch_bounds__(256) bwd_preprocess(KERNEL_PARAMS) {
    griddepcontrol_launch_dependents();
    const QueryTile at = query_tile(p, blockIdx.x);
    // Keys that no query sees load the first query tile of their sequence, even if there is no query.
    const bool is_loaded = at.tile == 0 || exists(p, at);
    constexpr int ROWS_AT_ONCE = 256 / LANES_PER_ROW;
    const int lane = threadIdx.x % LANES_PER_ROW;
    if (!DETERMINISTIC && is_loaded && blockIdx.x < p.preprocessed_tiles)
        clear_dq_accum(p, blockIdx.x, threadIdx.x, 256);
    bool nonfinite = false;
#pragma unroll
    for (int from = 0; from < BLOCK_Q; from += ROWS_AT_ONCE) {
        if (!is_loaded) break;
        const int row = at.tile * BLOCK_Q + from + threadIdx.x / LANES_PER_ROW;
        float total = 0;
        if (row_exists(p, at.b, row)) {
            const uint4* out = reinterpret_cast<const uint4*>(q_row<const storage>(p, p.out, at.b, at.h, row));
            const uint4* dout = reinterpret_cast<const uint4*>(q_row<const storage>(p, p.dout, at.b, at.h, row));
#pragma unroll
            for (int i = 0; i < (ROW_VECS + LANES_PER_ROW - 1) / LANES_PER_ROW; ++i)
                if (lane + i * LANES_PER_ROW < ROW_VECS)
                    total += dot(out[lane + i * LANES_PER_ROW], dout[lane + i * LANES_PER_ROW]);
        }
#pragma unroll
        for (int step = LANES_PER_ROW / 2; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (lane == 0) nonfinite |= store_row_stats(p, at.b, at.h, row, load_given_stats(p, at.b, at.h, row), total);
    }
    nonfinite = __syncthreads_or(nonfinite);
    init_semaphore(p, at, nonfinite, threadIdx.x, 256);
    if constexpr (!DETERMINISTIC) {
        const int of_head = query_tiles_per_kv_head(p), heads = num_kv_heads(p);
        for (int bh = blockIdx.x * 256 + threadIdx.x; bh < heads; bh += gridDim.x * 256) {
            const long long ready = p.preprocessed_tiles - (long long)bh * of_head;
            *PreprocessCounters::ready(p, bh) = ready < 0 ? 0 : ready < of_head ? (int)ready : of_head;
            *PreprocessCounters::finished(p, bh) = 0;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) *PreprocessCounters::next_tile(p) = (int)p.preprocessed_tiles;
    }
}
