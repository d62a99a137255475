// After Hopper's backward kernel: dq_accum to dq.
//
// The kernel is launched early (programmatic dependent launch) and converts each query tile as soon as its dQ is
// complete, on SMs reserved for it or whose CTAs have ended. Of packed sequences it waits for the end of the kernel, as
// only that one's scheduler warps have counted the work tiles.
#pragma once
#include "sm90/dq_clear.cuh"
#include "sm90/tf32_scales.cuh"

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

using DqElement = conditional<IS_FLOAT32, float, unsigned short>::type;
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
#pragma unroll
        for (int i = 0; i < DQ_PART_ROWS / 8; ++i) {
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
