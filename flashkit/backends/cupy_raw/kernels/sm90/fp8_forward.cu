// Forward pass for Hopper on FP8: codes of e4m3 with float32 scales for a head, or for each token. docs/quantized.md.
//
// As in forward.cu the grid is persistent, and one CTA per SM takes work tiles. Beyond it warps transpose V, and
// consumers add the products of each tile to O by themselves. Results are float16 or bfloat16.
//
//     Q, then O   [Q_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory; O leaves through the buffer that its Q came in
//     K, V        [STAGES][BLOCK_K][..]                 shared memory, two pipelines
//     V^T         [STAGES][HEAD_DIM_V][BLOCK_K]         shared memory, a pipeline
//
//     warp group 0     warp 0  producer (producer.cuh)
//                      warp 1  store warp (epilogue.cuh)
//                      warp 2  scheduler warp (tile_scheduler.cuh)
//     warp groups 1 .. MMA_WARPGROUPS  consumers, 64 rows each (fp8_mainloop.cuh)
//     the last warp group, or warp 3   transpose warps (fp8_transpose.cuh)
#include "sm90/layout.cuh"
#include "sm90/producer.cuh"
#include "sm90/fp8_mainloop.cuh"

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1)
sm90_fp8_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                 const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        q_pipe(base).init(1, 1);
        k_pipe(base).init(1, 4 * MMA_WARPGROUPS);
        v_pipe(base).init(1, TRANSPOSE_WARPS);
        vt_pipe(base).init(TRANSPOSE_WARPS, 4 * MMA_WARPGROUPS);
        list_pipe(base).init(1, 1);
        mbarrier_init(base + AT_CLAIM, 1);
        for (int i = 0; i < MMA_WARPGROUPS * Q_BUFFERS; ++i) mbarrier_init(base + AT_OUT_READY + 8 * i, 4);
        fence_mbarrier_init();
    }
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        WorkTileList* lists = reinterpret_cast<WorkTileList*>(shared + AT_LISTS);
        if (warp == 2) scheduler_warp(p, base, lists);
        else if (warp == 3 && TRANSPOSE_WARPS == 1) transpose_warp(p, base, 0);
        else if (warp == 0 && elect_one()) producer(p, q_map, k_map, v_map, base, lists);
        else if (warp == 1 && elect_one()) store_warp(p, out_map, base);
    } else if (role > MMA_WARPGROUPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        transpose_warp(p, base, warp % 4);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        ConsumerFp8(p, base, role - 1).run();
    }
}
