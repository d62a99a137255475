// Forward pass for Hopper (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1; warp specialisation and overlap
// of softmax and products as in FlashAttention-3, Shah et al. 2024, arXiv 2407.08608). docs/hopper.md walks through it.
//
// The grid is persistent: one CTA per SM takes work tiles, BLOCK_Q rows of a head, until none is left. With PACK_GQA >
// 1 a row is one of the PACK_GQA query heads that share a K/V head, at one token.
//
//     Q, then O   [Q_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory; O leaves through the buffer that its Q came in
//     K, V        [STAGES][BLOCK_K][..]                 shared memory, two pipelines
//     S, P        [64][BLOCK_K]                         registers of a warp group
//     O           [64][HEAD_DIM_V]                      registers, not normalised; ROW_SUM_BY_MMA: and row sums
//     m, l        [64]                                  registers: row reference in base 2, row sum
//
//     warp group 0     warp 0  producer (producer.cuh)
//                      warp 1  store warp (epilogue.cuh)
//                      warp 2  scheduler warp (producer.cuh)
//                      warp 3  of pages: producer of V (producer.cuh)
//     warp groups 1 .. MMA_WARPGROUPS  consumers, 64 rows each (mainloop.cuh; fp16x2.cuh for float32)
//
// TF32 is one float16 term, multiplied by the same main loop; scales are put back into scores and P (fp16x2.cuh).
#include "sm90/layout.cuh"
#include "sm90/producer.cuh"
#include "sm90/mainloop.cuh"
#include "sm90/fp16x2.cuh"

// Writes the chunk of ones that follows V, by all threads of the CTA.
DEVICE void fill_ones(unsigned target) {
    for (int i = threadIdx.x; i < CHUNK_BYTES / VEC_BYTES; i += THREADS)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};"
            ::"r"(target + i * VEC_BYTES), "r"(pack(1.0f, 1.0f)) : "memory");
    fence_proxy_async();
}

#ifdef DENSE_MAPS
#define MORE_MAPS , const __grid_constant__ TensorMap bias_map, const __grid_constant__ TensorMap mask_map
#else
#define MORE_MAPS
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
             const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map MORE_MAPS) {
#ifndef DENSE_MAPS
    const TensorMap &bias_map = q_map, &mask_map = q_map;
#endif
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) init_barriers(base);
    if (ROW_SUM_BY_MMA) fill_ones(base + AT_ONES);
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        WorkTileList* lists = reinterpret_cast<WorkTileList*>(shared + AT_LISTS);
        if (warp == 2) scheduler_warp(p, base, lists);
        else if (warp == 0 && (IS_PAGED || elect_one()))
            producer(p, q_map, k_map, v_map, base, lists, {}, {&bias_map, &mask_map});
        else if (warp == 1 && (IS_PACKED || elect_one())) store_warp(p, out_map, base);
        else if (HAS_V_PRODUCER && warp == 3) v_producer(p, v_map, base, lists);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if constexpr (FP16X2) consumer_fp16x2(p, base, role - 1);
        else Consumer(p, base, role - 1).run();
    }
}
