// After Hopper's backward kernel: dq_accum to dq.
//
// The kernel is launched early (programmatic dependent launch) and converts each query tile as soon as its dQ is
// complete, on SMs reserved for it or whose CTAs have ended.
#pragma once
#include "sm90/dq_clear.cuh"
#include "sm90/tf32_scales.cuh"

// Until a query tile's dQ is complete: DETERMINISTIC, until all key tiles have added to it; else until all work tiles
// of its head are finished. All CTAs of the backward kernel are resident by then.
DEVICE void wait_for_dq(const Params& p, int b, int h, int tile) {
    const int tiles = DETERMINISTIC ? ceil_div(stored_n_k(p, b), BLOCK_K) : tiles_of_keys(p);
    auto backoff = [] { asm volatile("nanosleep.u32 500;"); };
    if constexpr (DETERMINISTIC) {
        const int words = DqSemaphore::words_per_cta(p);
        const int* added = &dq_semaphore(p, b, h, tile).added_by_all(0);
        for (int i = threadIdx.x; i < CLUSTER_SIZE * words; i += blockDim.x) {
            const int left = tiles - i % words * DqSemaphore::TILES_PER_WORD;
            if (IS_PACKED && left <= 0) continue;
            const unsigned needed = left < DqSemaphore::TILES_PER_WORD ? (1u << left) - 1 : ~DqSemaphore::STORED;
            while ((load_acquire(added + i) & needed) != needed) backoff();
        }
    } else if (threadIdx.x == 0) {
        const int* finished = PreprocessCounters::finished(p, kv_head_index(p, b, h / GQA_GROUP));
        while ((int)load_acquire(finished) != CLUSTER_SIZE * tiles) backoff();
    }
    __syncthreads();
}

// A CTA takes a query tile, which becomes rows again in shared memory. The last CTA waits for the end of the backward
// kernel, so that this kernel ends after it.
extern "C" __global__ void __launch_bounds__(256) bwd_postprocess(KERNEL_PARAMS) {
    using element = conditional<IS_FLOAT32, float, unsigned short>::type;
    constexpr int PITCH = 64 * CHUNKS + 16 / (int)sizeof(element);
    __shared__ __align__(16) element rows[BLOCK_Q * PITCH];
    const auto [b, h, tile] = query_tile(p, blockIdx.x);
    const int lane = threadIdx.x % 32;
    if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();
    else if (!IS_PACKED || tile * BLOCK_Q < (int)seq_info(p, b).n_q) wait_for_dq(p, b, h, tile);
    const float scale = (float)p.softmax_scale * head_scales(p, b, h / GQA_GROUP).of_dq();
    const bool stored = !DETERMINISTIC || (__ldcg(&dq_semaphore(p, b, h, tile).flags()) & DqSemaphore::IS_STORED);
#pragma unroll
    for (int first = 0; first < DQ_PARTS; first += 2) {
        const int part = first + threadIdx.x / 128;
        if (DQ_PARTS % 2 && part >= DQ_PARTS) break;
        const float4* accum = reinterpret_cast<const float4*>(dq_accum(p, b, h, tile))
                              + (first * 4 + threadIdx.x / 32) * (BYTES_DQ_WARP / 16) + lane;
        const int column = (DQ_BY_COLUMNS ? 64 * part : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < DQ_PART_ROWS / 8; ++i) {
            const float4 x = stored ? __ldcg(accum + 32 * i) : float4{0, 0, 0, 0};
            const int row = (DQ_BY_COLUMNS ? 0 : part * DQ_PART_ROWS) + 8 * i + lane % 4 * 2;
            element* at = rows + row * PITCH + column;
            if constexpr (IS_FLOAT32) {
                at[0] = x.x * scale, at[PITCH] = x.y * scale, at[8] = x.z * scale, at[PITCH + 8] = x.w * scale;
                continue;
            }
            const unsigned low = pack(x.x * scale, x.y * scale), high = pack(x.z * scale, x.w * scale);
            at[0] = (unsigned short)low, at[PITCH] = (unsigned short)(low >> 16);
            at[8] = (unsigned short)high, at[PITCH + 8] = (unsigned short)(high >> 16);
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
                                        *reinterpret_cast<const float4*>(rows + r * PITCH + i % VECS * 4), p);
        }
        return;
    }
    constexpr int VECS = HEAD_DIM / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_Q * VECS; i += 256) {
        const int r = i / VECS, row = tile * BLOCK_Q + r;
        if (row < (int)seq_info(p, b).n_q)
            *reinterpret_cast<uint4*>(q_row<storage>(p, p.dq, b, h, row) + i % VECS * 8) =
                *reinterpret_cast<const uint4*>(rows + r * PITCH + i % VECS * 8);
    }
}
