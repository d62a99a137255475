// Forward pass for Hopper on FP8: codes of e4m3 with float32 scales for a head, a block of keys, or each token.
// docs/hopper-fp8.md.
//
// As in forward.cu the grid is persistent, and one CTA per SM takes work tiles. Results are float16 or bfloat16.
//
//     Q           [Q_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory
//     K, V        [STAGES or V_STAGES][BLOCK_K][..]     shared memory, two pipelines
//     V^T         [STAGES][VT_LINES][BLOCK_K]           shared memory, a pipeline; where it is GETS_VT there is no V
//
//     warp group 0     warp 0  producer (producer.cuh)
//                      warp 2  scheduler warp (producer.cuh)
//     warp groups 1 .. MMA_WARPGROUPS  consumers, 64 rows each, which store O themselves (fp8_mainloop.cuh)
//     the last warp group, or warps 1 and 3   transpose warps
#include "sm90/fp8_mainloop.cuh"
#include "sm90/producer.cuh"

// --- the transpose warps ---------------------------------------------------------------------------------------------
//
// The transpose warps of the FP8 forward pass: V to V^T, as wgmma takes 8-bit operands along the contracted axis alone.
// The instructions are those that FlashAttention-3 names (Shah et al. 2024, arXiv 2407.08608, section 3.3): ldmatrix
// with .trans, byte permutations, stmatrix.
//
// Rows of 16-bit matrices are pairs of columns of V: a transposed one gives lane (g, t) the codes of columns 2 g and
// 2 g + 1 for keys 2 t and 2 t + 1, and two of them, 8 keys apart, four codes of one column. The lane stores these as
// word t of the column's line. So among 16 keys the line has key 8 j + 2 t + c at 4 t + 2 j + c. That is the order in
// which S lies in a lane's registers, and P needs no shuffle to be the other operand.
//
// A stmatrix stores even columns by the lanes of one half of the warp and odd ones by the other's: the swizzle gives
// eight lines of both kinds different banks, but eight even ones only half of them.

// Ones in the bytes of the keys that exist, of a lane's word. left: keys that exist, less the lane's first one.
DEVICE unsigned existing_keys(int left) {
    return (left > 0 ? 0xffu : 0u) | (left > 1 ? 0xff00u : 0u) | (left > 8 ? 0xff0000u : 0u) |
           (left > 9 ? 0xff000000u : 0u);
}

// A unit is 32 keys of a block of 16 columns. Blocks take turns among the warps. keys: how many of the tile exist.
// Codes of the others become 0, as P = 0 would not hide a NaN.
DEVICE void transpose_tile(unsigned v, unsigned vt, int keys, int warp) {
    constexpr int STEPS = BLOCK_K / 32, BLOCKS = COLUMNS / 16, WARPS = larger(TRANSPOSE_WARPS, 1);
    const int lane = threadIdx.x % 32, own = lane % 8 * 2 + (lane / 8 + lane / 4) % 2;  // the line the lane addresses
    const unsigned first = lane < 16 ? 0x6420 : 0x7531, second = first ^ 0x1111;  // bytes of its first word's column
    if (!IS_NARROW) asm volatile("" : "+r"(v), "+r"(vt));  // or addresses of all units are kept from tile to tile
    const unsigned from = v + swizzled(lane, warp), to = vt + swizzled(own, lane / 16) + warp * 16 * CHUNK_ROW;
    constexpr int UNITS = (BLOCKS + WARPS - 1) / WARPS * STEPS, AHEAD = IS_NARROW ? 4 : 2;  // registers allow no more
    unsigned r[AHEAD][4];
    auto exists = [&](int unit) {  // `block`: of those before this warp's
        const int block = unit / STEPS * WARPS;
        return unit < UNITS && (block + WARPS <= BLOCKS || block + warp < BLOCKS);
    };
    auto load = [&](int unit) {
        const int block = unit / STEPS * WARPS;
        ldmatrix_x4<true>(r[unit % AHEAD], (from ^ block % 8 * VEC_BYTES) + block / 8 * CHUNK_BYTES +
                                               unit % STEPS * 32 * CHUNK_ROW);
    };
    UNROLL(unit, AHEAD)
        if (exists(unit)) load(unit);
    UNROLL(unit, UNITS) {
        if (!exists(unit)) break;
        const int step = unit % STEPS;
        unsigned words[4];
        UNROLL(half, 2) {
            const unsigned x = r[unit % AHEAD][2 * half], y = r[unit % AHEAD][2 * half + 1];
            words[2 * half] = __byte_perm(x, y, first), words[2 * half + 1] = __byte_perm(x, y, second);
            if (HAS_LENGTHS && keys < BLOCK_K) {
                const unsigned exist = existing_keys(keys - 32 * step - 16 * half - lane % 4 * 2);
                words[2 * half] &= exist, words[2 * half + 1] &= exist;
            }
        }
        if (exists(unit + AHEAD)) load(unit + AHEAD);  // its latency is hidden behind the units between
        stmatrix_x4<false>((to ^ 2 * step * VEC_BYTES) + unit / STEPS * WARPS * 16 * CHUNK_ROW, words[0], words[1],
                           words[2], words[3]);
    }
}

// One of TRANSPOSE_WARPS.
DEVICE void transpose_warp(const Params& p, unsigned base, int warp) {
    const Pipeline<V_STAGES> pipe_v = v_pipe(base);
    const Pipeline<STAGES> pipe_vt = vt_pipe(base);
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        pipe_v.consumer_wait(n);
        const unsigned slot = v_tile_slot(base, n);
        const int b = load_word(slot);
        if (b == END) break;
        const int keys = (int)seq_info(p, b).n_k - load_word(slot + 4) * BLOCK_K;
        pipe_vt.producer_acquire(n);
        transpose_tile(base + at_v(n % V_STAGES), at_vt(base, n % STAGES), keys, warp);
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_once(pipe_vt.full_barrier(n));
        pipe_v.consumer_release(n);
    }
}

// --- the kernel ------------------------------------------------------------------------------------------------------

// Lines of ones behind each V^T, by all threads of the CTA.
DEVICE void fill_ones(unsigned base) {
    constexpr int VECS = 8 * CHUNK_ROW / VEC_BYTES;
    const float ones = __int_as_float(0x38383838);
    for (int i = threadIdx.x; i < STAGES * VECS; i += 128 * WARPGROUPS)
        store_vec(at_vt(base, i / VECS) + COLUMNS * CHUNK_ROW + i % VECS * VEC_BYTES, ones, ones, ones, ones);
    fence_proxy_async();
}

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1)
sm90_fp8_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                 const __grid_constant__ TensorMap v_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        q_pipe(base).init(1, 4 * MMA_WARPGROUPS);
        k_pipe(base).init(1, 4 * MMA_WARPGROUPS);
        if (!GETS_VT) v_pipe(base).init(1, TRANSPOSE_WARPS);
        vt_pipe(base).init(GETS_VT ? 1 : TRANSPOSE_WARPS, 4 * MMA_WARPGROUPS);
        list_pipe(base).init(1, 1);
        mbarrier_init(base + AT_CLAIM, 1);
        fence_mbarrier_init();
    }
    if (SUMS_BY_ONES) fill_ones(base);
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        WorkTileList* lists = reinterpret_cast<WorkTileList*>(shared + AT_LISTS);
        if (warp == 2) scheduler_warp(p, base, lists);
        else if (warp == 0 && (IS_PAGED || elect_one())) producer(p, q_map, k_map, v_map, base, lists);
        else if constexpr (TRANSPOSE_WARPS == 2)
            if (warp % 2 == 1) transpose_warp(p, base, warp / 2);
    } else if (TRANSPOSE_WARPS == 4 && role > MMA_WARPGROUPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if constexpr (TRANSPOSE_WARPS == 4) transpose_warp(p, base, warp % 4);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        ConsumerFp8(p, base, role - 1).run();
    }
}
