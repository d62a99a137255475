// Before Hopper's backward kernel: for each row delta = rowsum(dO * O) - dlse and the log-sum-exp in base 2; zeros in
// dq_accum (unless DETERMINISTIC: the first to add stores); dq_semaphore and the counters as the kernel expects them.
//
// bwd_preprocess does that for query tiles below p.preprocessed_tiles, those of the heads that come first. The rest is
// cleared by the backward kernel (dq_accum.cuh) or, if FUSED_PREPROCESS, preprocessed there.
#pragma once
#include "sm90/dq_accum.cuh"

// --- row statistics --------------------------------------------------------------------------------------------------

DEVICE float dot(const uint4& x, const uint4& y) {
    const storage *a = reinterpret_cast<const storage*>(&x), *b = reinterpret_cast<const storage*>(&y);
    float total = 0;
    UNROLL(e, VEC_BYTES / (int)sizeof(storage)) total += widen(a[e]) * widen(b[e]);
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
            UNROLL(i, (ROW_VECS + LANES_PER_ROW - 1) / LANES_PER_ROW)
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

// --- the fused preprocess --------------------------------------------------------------------------------------------
//
// The fused preprocess (FUSED_PREPROCESS): two otherwise idle warps of the backward kernel preprocess the query tiles
// of heads to come. O and dO pass through the buffer for the next work tile's K, until K is loaded: CLAIM_AHEAD query
// tiles before the end of a work tile.
//
// Before K of a work tile is loaded, these warps see to it that its head's query tiles are ready, which they may have
// to do themselves.

constexpr int ROWS_PER_LOAD = 64, BYTES_PER_LOAD = ROWS_PER_LOAD * CHUNK_ROW * CHUNKS_V;  // rows of O, and of dO
static_assert(!FUSED_PREPROCESS || (!IS_PACKED && !DETERMINISTIC && CHUNKS_V <= CHUNKS && KEY_BUFFERS == 2),
              "O and dO take the place of K");

// By one thread, which has to wait for the end of its bulk stores.
DEVICE void clear_dq_accum_bulk(const Params& p, int index, unsigned base) {
    float* accum = dq_accum_at(p, index, 0);
#pragma unroll 1
    for (int i = 0; i < BYTES_DQ; i += BYTES_ZEROS) bulk_store(accum + i / 4, base + AT_ZEROS, BYTES_ZEROS);
    bulk_commit();
}

// rowsum(dO * O) of a row in shared memory.
DEVICE float dot_of_rows(unsigned out, unsigned dout, int row) {
    float total = 0;
#pragma unroll 1
    for (int c = 0; c < CHUNKS_V; ++c)
#pragma unroll 4
        for (int i = 0; i < 8; ++i) {
            const unsigned offset = c * ROWS_PER_LOAD * CHUNK_ROW + swizzled(row, i);
            total += dot(load_vec(out + offset), load_vec(dout + offset));
        }
    return total;
}

// By two warps; a thread has one of ROWS_PER_LOAD rows.
DEVICE void fused_preprocess(const Params& p, const TensorMap& out_map, const TensorMap& dout_map, unsigned base,
                             int thread) {
    const auto pipe_k = k_pipe(base);
    const bool first_warp = uniform(thread / 32) == 0, leader = thread == 0;
    const unsigned loaded = base + AT_O_LOADED;
    unsigned loads = 0, broadcasts = 0;
    int owed = 0;  // query tiles that should have been preprocessed by now
    constexpr int DONE = -1, NO_TILE = 0x7fffffff, NONE_LEFT = -(1 << 30);

    auto broadcast = [&](int x) {  // the leader's x to both warps
        const unsigned word = base + AT_BROADCAST + 4 * (broadcasts++ & 1);
        if (leader) store_word(word, x);
        named_barrier_sync(PREPROCESS_BARRIER, ROWS_PER_LOAD);
        return uniform(load_word(word));
    };
    auto preprocess = [&](int index, unsigned number) {  // in the buffer for K of work tile `number`
        const unsigned out = base + AT_K + pipe_k.stage(number) * BYTES_K, dout = out + BYTES_PER_LOAD;
        const QueryTile at = query_tile(p, index);
        if (!first_warp && elect_one()) clear_dq_accum_bulk(p, index, base);
        bool nonfinite = false;
#pragma unroll 1
        for (int from = at.tile * BLOCK_Q; from < (at.tile + 1) * BLOCK_Q; from += ROWS_PER_LOAD) {
            if (first_warp && elect_one()) {
                mbarrier_arrive_expect_tx(loaded, 2 * BYTES_PER_LOAD);
                load_tile<1, CHUNKS_V, ROWS_PER_LOAD>(out, out_map, q_box(p, at.b, at.h, from), loaded);
                load_tile<1, CHUNKS_V, ROWS_PER_LOAD>(dout, dout_map, q_box(p, at.b, at.h, from), loaded);
            }
            const RowStats given = load_given_stats(p, at.b, at.h, from + thread);
            mbarrier_wait(loaded, loads++ & 1);
            nonfinite |= store_row_stats(p, at.b, at.h, from + thread, given, dot_of_rows(out, dout, thread));
            bulk_wait();
            fence_all_proxies();
            nonfinite = named_barrier_any(PREPROCESS_BARRIER, ROWS_PER_LOAD, nonfinite);
        }
        if (leader) {
            init_semaphore(p, at, nonfinite, 0, 1);
            set_ready(p, index);
        }
    };

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        mbarrier_wait_backoff(base + AT_CLAIMED, number & 1);
        const int b = uniform(load_word(work_tile_slot(base, number)));
        if (b == END) break;
        const int bh = kv_head_index(p, b, uniform(load_word(work_tile_slot(base, number) + 4)));
        // What is left of the work tile's own head; another CTA may be at its last tiles, for which these warps wait.
        auto next_of_head = [&]() {
            if (!first_warp || is_ready(p, bh)) return DONE;
            const bool is_left = leader &&
                (int)load_acquire(PreprocessCounters::next_tile(p)) < (bh + 1) * query_tiles_per_kv_head(p);
            return is_left ? atomicAdd(PreprocessCounters::next_tile(p), 1) : NO_TILE;
        };
        int index;
#pragma unroll 1
        while ((index = broadcast(next_of_head())) != DONE)
            if (query_tile_exists(p, index)) preprocess(index, number);
        fence_all_proxies();
        if (leader) mbarrier_arrive(base + AT_HEAD_READY);

        // This work tile's share of the heads to come, while the next buffer for K is free.
        mbarrier_wait_backoff(pipe_k.empty + 8 * pipe_k.stage(number + 1), ((number + 1) / KEY_BUFFERS & 1) ^ 1,
                              BACKOFF_NS);
        owed += query_tiles_per_work_tile(p, tiles_of_keys(p));
        auto next_owed = [&]() {
            const bool has_time = leader && owed > 0 && !mbarrier_try_wait(base + AT_CLAIM, number & 1);
            return has_time ? atomicAdd(PreprocessCounters::next_tile(p), 1) : DONE;
        };
#pragma unroll 1
        while ((index = broadcast(next_owed())) != DONE) {
            if (query_tile_exists(p, index)) preprocess(index, number + 1);
            owed = query_tile_exists(p, index) ? owed - 1 : NONE_LEFT;
        }
    }
}

// --- bwd_postprocess -------------------------------------------------------------------------------------------------
//
// After Hopper's backward kernel: dq_accum to dq.
//
// The kernel is launched early (programmatic dependent launch) and converts each query tile as soon as its dQ is
// complete, on SMs reserved for it or whose CTAs have ended. Of packed sequences it waits for the end of the kernel, as
// only that one's scheduler warps have counted the work tiles.

// Until a query tile's dQ is complete: DETERMINISTIC, until all key tiles have added to it; else until all work tiles
// of its head are finished. All CTAs of the backward kernel are resident by then.
DEVICE void wait_for_dq(const Params& p, int b, int h, int tile) {
    const int tiles = DETERMINISTIC ? ceil_div(max_n_k(p), BLOCK_K) : tiles_of_keys(p);
    auto backoff = [] { asm volatile("nanosleep.u32 500;"); };
    if constexpr (DETERMINISTIC) {
        const int words = DqSemaphore::words_per_cta(p);
        const int* added = &dq_semaphore(p, b, h, tile).added_by_all(0);
        for (int i = threadIdx.x; i < CLUSTER_SIZE * words; i += blockDim.x) {
            const int left = tiles - i % words * DqSemaphore::TILES_PER_WORD;
            const unsigned needed = left < DqSemaphore::TILES_PER_WORD ? (1u << left) - 1 : ~DqSemaphore::STORED;
            while ((load_acquire(added + i) & needed) != needed) backoff();
        }
    } else if (threadIdx.x == 0) {
        const int* finished = PreprocessCounters::finished(p, kv_head_index(p, b, h / GQA_GROUP));
        while ((int)load_acquire(finished) != CLUSTER_SIZE * tiles) backoff();
    }
    __syncthreads();
}

using DqElement = Select<IS_FLOAT32, float, unsigned short>::type;
constexpr int DQ_PITCH = 64 * CHUNKS + 16 / (int)sizeof(DqElement);  // of a row in shared memory

// A query tile becomes rows again in shared memory. stored: whether dq_accum has a sum of it.
DEVICE void convert_dq(const Params& p, int b, int h, int tile, bool stored, DqElement (&rows)[BLOCK_Q * DQ_PITCH]) {
    const int lane = threadIdx.x % 32;
    const float scale = (float)p.softmax_scale * head_scales(p, b, h / GQA_GROUP).of_dq();
#pragma unroll
    for (int first = 0; first < DQ_PARTS; first += 2) {
        const int part = first + threadIdx.x / 128;
        if (DQ_PARTS % 2 && part >= DQ_PARTS) break;
        const float4* accum = reinterpret_cast<const float4*>(dq_accum(p, b, h, tile))
                              + (first * 4 + threadIdx.x / 32) * (BYTES_DQ_WARP / 16) + lane;
        const int column = (DQ_BY_COLUMNS ? 64 * part : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
        UNROLL(i, DQ_PART_ROWS / 8) {
            const float4 x = stored ? __ldcg(accum + 32 * i) : float4{0, 0, 0, 0};
            const int row = (DQ_BY_COLUMNS ? 0 : part * DQ_PART_ROWS) + 8 * i + lane % 4 * 2;
            DqElement* at = rows + row * DQ_PITCH + column;
            if constexpr (IS_FLOAT32) {
                at[0] = x.x * scale, at[DQ_PITCH] = x.y * scale, at[8] = x.z * scale, at[DQ_PITCH + 8] = x.w * scale;
                continue;
            }
            const unsigned low = pack(x.x * scale, x.y * scale), high = pack(x.z * scale, x.w * scale);
            at[0] = (unsigned short)low, at[DQ_PITCH] = (unsigned short)(low >> 16);
            at[8] = (unsigned short)high, at[DQ_PITCH + 8] = (unsigned short)(high >> 16);
        }
    }
    __syncthreads();
    if constexpr (IS_FLOAT32) {
        constexpr int VECS = up(HEAD_DIM, 4) / 4;
#pragma unroll 4
        for (int i = threadIdx.x; i < BLOCK_Q * VECS; i += 256) {
            const int r = i / VECS, row = tile * BLOCK_Q + r;
            if (row < (int)seq_info(p, b).n_q)
                store_float32<HEAD_DIM>(q_row<float>(p, p.dq, b, h, row), i % VECS * 4,
                                        *reinterpret_cast<const float4*>(rows + r * DQ_PITCH + i % VECS * 4), p);
        }
        return;
    }
    constexpr int VECS = HEAD_DIM / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_Q * VECS; i += 256) {
        const int r = i / VECS, row = tile * BLOCK_Q + r;
        if (row < (int)seq_info(p, b).n_q)
            *reinterpret_cast<uint4*>(q_row<storage>(p, p.dq, b, h, row) + i % VECS * 8) =
                *reinterpret_cast<const uint4*>(rows + r * DQ_PITCH + i % VECS * 8);
    }
}

// A CTA takes a query tile. The last CTA waits for the end of the backward kernel, so that this kernel ends after it.
DEVICE void convert_one(const Params& p, DqElement (&rows)[BLOCK_Q * DQ_PITCH]) {
    const QueryTile at = query_tile(p, blockIdx.x);
    if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();
    else wait_for_dq(p, at.b, at.h, at.tile);
    const int* flags = &dq_semaphore(p, at.b, at.h, at.tile).flags();
    convert_dq(p, at.b, at.h, at.tile, !DETERMINISTIC || (__ldcg(flags) & DqSemaphore::IS_STORED), rows);
}

// Of packed sequences a CTA takes up to as many query tiles as it has warps, each of which looks at one: many may not
// exist, or have been converted.
DEVICE void convert_some(const Params& p, DqElement (&rows)[BLOCK_Q * DQ_PITCH]) {
    constexpr int WARPS = 8;
    __shared__ QueryTile left[WARPS];  // b: END if there is nothing to convert
    __shared__ bool stored[WARPS];
    const int each = ceil_div(query_tiles_per_kv_head(p) * num_kv_heads(p), gridDim.x);
    const int warp = threadIdx.x / 32, index = blockIdx.x * each + warp;
    griddepcontrol_wait();
    QueryTile own{END, 0, 0};
    if (warp < each && query_tile_exists(p, index)) own = query_tile(p, index);
    if (own.b != END) {
        const int flags = __ldcg(&dq_semaphore(p, index).flags());
        if (!exists(p, own) || (STORES_DQ && (flags & DqSemaphore::IS_CONVERTED))) own.b = END;
        else stored[warp] = DETERMINISTIC ? (flags & DqSemaphore::IS_STORED) != 0 : seq_info(p, own.b).n_k > 0;
    }
    left[warp] = own;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < each; ++i) {
        if (left[i].b == END) continue;
        convert_dq(p, left[i].b, left[i].h, left[i].tile, stored[i], rows);
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(256) bwd_postprocess(KERNEL_PARAMS) {
    __shared__ __align__(16) DqElement rows[BLOCK_Q * DQ_PITCH];
    if constexpr (IS_PACKED) convert_some(p, rows);
    else convert_one(p, rows);
}
