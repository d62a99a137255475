// Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2; warp groups with roles as in FlashAttention-3,
// Shah et al. 2024, arXiv 2407.08608) for Hopper: weights recomputed from the log-sum-exp, five products.
// docs/hopper.md walks through it.
//
// As many blocks as multiprocessors take items one after the other, each BLOCK_K keys of a key/value head, and go over the
// tiles of queries that see them.
//
//     K            [KEY_BUFFERS][HELD][..]      shared memory; HELD: of BLOCK_K keys those of the block
//     V            [HELD][..]                   shared memory
//     Q            [STAGES][BLOCK_Q][..]        shared memory, a ring; with a log-sum-exp for each row
//     dO           [DOUT_STAGES][BLOCK_Q][..]   shared memory, a ring; with a delta for each row
//     S, P, dP, dS [BLOCK_Q][HELD]              registers; dS also in shared memory, for dQ
//     dK, dV       [HELD][..]                   registers
//     dQ           [BLOCK_Q][..]                registers, then added to float32 sums in global memory
//
// Warp group 0: warp 0 loads tiles of queries, warp 1 finds them, loads the keys and looks through these, warps 2 and 3 keep
// the order in which dQ is added, if it matters, or prepare rows of heads to come (BESIDE). Warp groups 1 and 2 multiply, in
// one of two ways: each has 64 of the keys, with all that belongs to them (sm90_backward_keys.cuh); or, where dK and dV of 64
// keys do not fit the registers of a group, a cluster of two blocks has 64 of the keys each, of which one group makes dS and
// dV, the other dK and dQ, whose columns the blocks share (sm90_backward_products.cuh, KEYS_SHARED, KEYS_ARE_SHARED defined).
//
// The sums of dQ lie as the warps hold them, 64 columns of dQ^T in four warps: [tile][part][warp][16 bytes][lane]. They are
// cleared ahead of those who add (sm90_backward_rows.cuh), unless there is an order: then the first to add stores.
// bwd_postprocess() makes dQ of them.
//
// With ORDERED a tile is added to by one block after the other, in the order of their keys, so the bits never change: `done`
// has a bit for each pair of tiles. Blocks take their work in that order, so whoever waits, waits for a block that runs.
// Without a mask keys ascend, and all go from the last queries to the first, so that soon each follows the one before at a
// distance, and waits no more. With one keys descend and queries ascend: under a causal mask a block then begins at its
// diagonal, where it is the first to add, and the next one, which begins a tile later, follows it from the start.
//
// A release of a stage is lane 0's arrival. What the other lanes have read of it is before that, for they meet in between: when
// dS is in shared memory.
//
// Measured on an H200, bfloat16. In order, with the next item asked for while the last one is worked at: 1.3 to 2 times
// slower, for who has waited at one item then comes late to another that others wait for. 4, 8 or 16 heads at a time: the
// same within 5 %; under a causal mask, in any order, 1 or as many as 12 or 30 MB hold: the same. Compiled with ptxas 13.0:
// 128 keys under a mask find no registers with 232 of them for those that multiply.
//
// Constants of the head: BLOCK_Q, BLOCK_K, STAGES, DOUT_STAGES, KEY_BUFFERS, KEYS_SHARED, ORDERED, CONSUMER_REGISTERS,
// PRODUCER_REGISTERS, WATCHDOG, HAS_LENGTHS, SHARED_BYTES, SMALL_SCORE (modification.is_small), BESIDE.
#include "common/tile_order.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_lists.cuh"

constexpr int MMA_WARPGROUPS = 2, WARPS = 4 * MMA_WARPGROUPS, THREADS = 128 * (MMA_WARPGROUPS + 1), GROUP_KEYS = 64;
constexpr int SIDE = KEYS_SHARED ? 4 : WARPS;  // warps that do the same
constexpr int COLUMNS = padded(HEAD_DIM), COLUMNS_V = padded(HEAD_DIM_V), CHUNKS = chunks(HEAD_DIM), CHUNKS_V = chunks(HEAD_DIM_V);
constexpr int CLUSTER_SIZE = KEYS_SHARED ? 2 : 1, HELD = BLOCK_K / CLUSTER_SIZE;  // blocks of a cluster, which share an item; keys of each
static_assert(BLOCK_K == 128 && (KEYS_SHARED ? BLOCK_Q == 64 && CHUNKS <= 4 && CHUNKS_V <= 4 : CHUNKS <= 2 && CHUNKS_V <= 2),
              "dK and dV fit the registers");
constexpr int SHARE = (CHUNKS + CLUSTER_SIZE - 1) / CLUSTER_SIZE;  // chunks of dQ of a block

// A part of dQ^T is 64 columns of all rows; where there are no more than 64, of half the rows, so that both groups have one.
constexpr bool BY_COLUMNS = CHUNKS > 1 || KEYS_SHARED;
constexpr int PARTS = BY_COLUMNS ? CHUNKS : MMA_WARPGROUPS, PART_ROWS = BY_COLUMNS ? BLOCK_Q : BLOCK_Q / MMA_WARPGROUPS;
constexpr int BYTES_WARP = PART_ROWS * 16 * 4, BYTES_PART = 4 * BYTES_WARP, BYTES_SUMS = PARTS * BYTES_PART;

constexpr int BYTES_K = HELD * CHUNK_ROW * CHUNKS, BYTES_V = HELD * CHUNK_ROW * CHUNKS_V;
constexpr int BYTES_OTHERS = KEYS_SHARED ? HELD * CHUNK_ROW * SHARE : 0;  // the other block's keys, for the columns of dQ
constexpr int BYTES_Q = BLOCK_Q * CHUNK_ROW * CHUNKS, BYTES_DOUT = BLOCK_Q * CHUNK_ROW * CHUNKS_V, BYTES_ROWS = BLOCK_Q * 4;
constexpr int BYTES_DS = BLOCK_Q * HELD * 2;  // dS of a tile: of two tiles, or of one and that of the other block

constexpr int AT_K = 0, AT_OTHERS = AT_K + KEY_BUFFERS * BYTES_K, AT_V = AT_OTHERS + BYTES_OTHERS, AT_Q = AT_V + BYTES_V;
constexpr int AT_DOUT = AT_Q + STAGES * BYTES_Q, AT_DS = AT_DOUT + DOUT_STAGES * BYTES_DOUT, AT_SUMS = AT_DS + 2 * BYTES_DS;
constexpr int AT_SHIFT = AT_SUMS + (KEYS_SHARED ? 0 : BYTES_SUMS), AT_DELTA = AT_SHIFT + STAGES * BYTES_ROWS;
constexpr int AT_Q_PIPE = AT_DELTA + DOUT_STAGES * BYTES_ROWS, AT_DOUT_PIPE = AT_Q_PIPE + 16 * STAGES;
constexpr int AT_K_PIPE = AT_DOUT_PIPE + 16 * DOUT_STAGES, AT_V_PIPE = AT_K_PIPE + 16 * KEY_BUFFERS;
constexpr int AT_DS_PIPE = AT_V_PIPE + 16, AT_ADDED = AT_DS_PIPE + 32, AT_TURN = AT_ADDED + 16, AT_ASKED = AT_TURN + 16;
constexpr int AT_K_CAME = AT_ASKED + 32, AT_ROWS_CAME = AT_K_CAME + 8 * KEY_BUFFERS;
constexpr int AT_PEER_K_PIPE = AT_ROWS_CAME + 8, AT_OTHERS_CAME = AT_PEER_K_PIPE + 16, AT_DSMEM_PIPE = AT_OTHERS_CAME + 8;
constexpr int AT_TAKEN = AT_DSMEM_PIPE + 16;           // for two items: a barrier; behind these which they are
constexpr int AT_TILE_DESCS = AT_TAKEN + 24;                 // for each stage of Q: tile << 8 | ODD, LAST, states of the groups; head;
constexpr int AT_WORK_TILES = AT_TILE_DESCS + 12 * STAGES;        // number among all tiles of Q. For each buffer of K: an WorkTile
constexpr int AT_ODD = AT_WORK_TILES + 12 * KEY_BUFFERS;     // for each buffer of K: a bit for each key that was cleared
constexpr int ODD_WORDS = HELD / 32;
constexpr int AT_SLOTS = AT_ODD + 4 * ODD_WORDS * KEY_BUFFERS;  // for four tiles of dQ: which they are
constexpr int AT_FOUND = AT_SLOTS + 32, LISTS = MASK_READS_ARRAYS ? 2 : 4;
constexpr unsigned ODD = 16, NOTHING = 32, LAST = 64;  // some rows' numbers are not finite; taken though nobody sees it; the last tile of an item
constexpr int IS_ODD = 1, WRITTEN = 2;   // of a tile of queries
constexpr int END = -1, AMONG_ROWS = 3;  // AMONG_ROWS: a barrier among warps

// A hidden pair has the weight and the gradient 0, but 0 times NaN is NaN. So rows of Q, dO and K that are not finite are
// cleared before they are multiplied, by who loads them, and what they would have done to visible pairs is said otherwise:
// of a row by its log-sum-exp, which is NaN then, of a key by a bit (weigh()).
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT, CLEANS_KEYS = MAY_HIDE || HAS_LENGTHS;

constexpr bool FROM_DIAGONAL = ORDERED && HAS_MASK;

struct WorkTile { int b, head, k0; };  // head: of keys

// What the warp that finds tiles hands to the one that loads: some of an item's.
struct Found {
    static constexpr int MOST = MASK_READS_ARRAYS ? 72 : 32;
    int b, h, k0, count;  // b: END if there is nothing more
    int before;           // tiles of the heads before h
    int ends;             // whether they are the item's last
    int entry[MOST];      // tile << 8 | states
};
constexpr int AT_LISTS_PIPE = up(AT_FOUND + LISTS * (int)sizeof(Found), 8), AT_SOON = AT_LISTS_PIPE + 16 * LISTS;
constexpr int AT_ROWS_READ = AT_SOON + 8, AT_PLACE = AT_ROWS_READ + 8;
constexpr int AT_OVER = AT_PLACE + 8, AT_HEADS = AT_OVER + 8;  // all that the block adds to dQ has come; heads of four items
constexpr int AT_SAID = AT_HEADS + 16, AT_ZEROS = up(AT_SAID + 8, 16), BYTES_ZEROS = 512;
static_assert(AT_ZEROS + BYTES_ZEROS <= SHARED_BYTES, "hopper_backward.py gives less shared memory than there is to lie in it");
constexpr int AHEAD = MASK_READS_ARRAYS ? 20 : 4;  // how many tiles before the end of an item the next one is taken
// Nanoseconds of the warp that takes it, which mostly has time, and else takes that of others.
constexpr int SLEEP = ORDERED ? 100 : MASK_READS_ARRAYS ? 200 : 1000;

DEVICE int tiles_of(long long n, int block) { return (int)((n + block - 1) / block); }
DEVICE float* sums_of(const Params& p, int b, int h, int tile) { return row_at<float>(p.dq_accum, b, h, tile); }
// A part of a tile's, from byte `part` on. where: the tile among all.
DEVICE float* part_of_sums(const Params& p, int where, int part) {
    return static_cast<float*>(p.dq_accum.data) + (long long)where * (BYTES_SUMS / 4) + part / 4;
}

DEVICE void load_two(float (&x)[2], unsigned address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}
DEVICE float load_number(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}

#include "sm90/bwd_producer.cuh"
#include "sm90/bwd_fragments.cuh"
#include "sm90/bwd_affine_score.cuh"
#include "sm90/bwd_softmax.cuh"
#ifdef KEYS_ARE_SHARED
#include "sm90/bwd_mainloop_cluster.cuh"
#else
#include "sm90/bwd_mainloop.cuh"
#endif

// --- roles ------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER_SIZE, 1, 1) __launch_bounds__(THREADS, 1)
sm90_backward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
              const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dout_map,
              const __grid_constant__ TensorMap dk_map, const __grid_constant__ TensorMap dv_map,
              const __grid_constant__ TensorMap out_rows_map, const __grid_constant__ TensorMap dout_rows_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        q_pipe(base).init(1, WARPS);
        dout_pipe(base).init(1, SIDE);
        k_pipe(base).init(1, WARPS);
        v_pipe(base).init(1, SIDE);
        ds_pipe(base).init(SIDE, SIDE);
        peer_k_pipe(base).init(1, SIDE);
        dsmem_pipe(base).init(1, SIDE);
        list_pipe(base).init(1, 1);
        mbarrier_init(base + AT_SOON, 1), mbarrier_init(base + AT_OTHERS_CAME, 1);
        for (int i = 0; i < 2; ++i) mbarrier_init(base + AT_ADDED + 8 * i, SIDE), mbarrier_init(base + AT_TURN + 8 * i, 1);
        for (int i = 0; i < 2; ++i) mbarrier_init(base + AT_TAKEN + 8 * i, 1);
        for (int i = 0; i < 4; ++i) mbarrier_init(base + AT_ASKED + 8 * i, 1);
        for (int i = 0; i < KEY_BUFFERS; ++i) mbarrier_init(base + AT_K_CAME + 8 * i, 1);
        mbarrier_init(base + AT_ROWS_CAME, 1);
        if (BESIDE) mbarrier_init(base + AT_ROWS_READ, 1), mbarrier_init(base + AT_PLACE, 1);
        if (!ORDERED) mbarrier_init(base + AT_OVER, SIDE);
        fence_mbarrier_init();
    }
    if (BESIDE && threadIdx.x < BYTES_ZEROS / VEC_BYTES) clear_vec(base + AT_ZEROS + threadIdx.x * VEC_BYTES), fence_proxy_async();
    if (CLUSTER_SIZE > 1) cluster_sync();
    else __syncthreads();
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        Found* found = reinterpret_cast<Found*>(shared + AT_FOUND);
        if (warp == 0) load(p, q_map, v_map, dout_map, base, found);
        else if (warp == 1) find(p, k_map, base, found);
        else if (BESIDE) prepare_beside(p, out_rows_map, dout_rows_map, base, threadIdx.x - 64);
        else if (ORDERED && warp >= 2) keep_order(p, base, warp - 2);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consumer(p, dk_map, dv_map, base, role - 1);
    }
    if (CLUSTER_SIZE > 1) cluster_sync();  // what the other block sends has come
}

// --- after ------------------------------------------------------------------------------------------------------------

// By a block, when all blocks of the kernel run: until all has been added that a tile's dQ is the sum of. In an order each tile of
// keys says so of each tile of queries, else each block of a cluster counts its finished items of a head.
DEVICE void await_sums(const Params& p, int b, int h, int tile) {
    const int tiles = tiles_of(p.n_k, BLOCK_K);
    auto ask_again = [] { asm volatile("nanosleep.u32 500;"); };
    if constexpr (ORDERED) {
        const int words = order_words(p);
        const int* done = dq_semaphore_of(p, b, h, tile) + 1;
        for (int i = threadIdx.x; i < CLUSTER_SIZE * words; i += blockDim.x) {
            const int left = tiles - i % words * ORDER_BITS;
            const unsigned need = left < ORDER_BITS ? (1u << left) - 1 : ~WRITTEN_HERE;
            while ((get_acquired(done + i) & need) != need) ask_again();
        }
    } else if (threadIdx.x == 0) {
        const int* finished = finished_of(p, number_of_head(p, b, h / GQA_GROUP));
        while ((int)get_acquired(finished) != CLUSTER_SIZE * tiles) ask_again();
    }
    __syncthreads();
}

// The sums of dQ to dq; a block takes a tile. In shared memory they become rows again. This kernel begins while the one before runs,
// on multiprocessors that are left to it or where blocks have ended; the last block ends after that kernel in any case.
extern "C" __global__ void __launch_bounds__(256) bwd_postprocess(KERNEL_PARAMS) {
    constexpr int PITCH = 64 * CHUNKS + 8;
    __shared__ __align__(16) unsigned short rows[BLOCK_Q * PITCH];
    const auto [b, h, tile] = tile_number(p, blockIdx.x);
    const int lane = threadIdx.x % 32;
    const float scale = (float)p.softmax_scale;
    if (blockIdx.x + 1 == gridDim.x) griddepcontrol_wait();
    else await_sums(p, b, h, tile);
    const bool written = !ORDERED || (__ldcg(dq_semaphore_of(p, b, h, tile)) & WRITTEN);
#pragma unroll
    for (int first = 0; first < PARTS; first += 2) {
        const int part = first + threadIdx.x / 128;
        if (PARTS % 2 && part >= PARTS) break;
        const float4* sums = reinterpret_cast<const float4*>(sums_of(p, b, h, tile)) + (first * 4 + threadIdx.x / 32) * (BYTES_WARP / 16) + lane;
        const int column = (BY_COLUMNS ? 64 * part : 0) + threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < PART_ROWS / 8; ++i) {
            const float4 x = written ? __ldcg(sums + 32 * i) : float4{0, 0, 0, 0};
            unsigned short* at = rows + ((BY_COLUMNS ? 0 : part * PART_ROWS) + 8 * i + lane % 4 * 2) * PITCH + column;
            const unsigned low = pack(x.x * scale, x.y * scale), high = pack(x.z * scale, x.w * scale);
            at[0] = (unsigned short)low, at[PITCH] = (unsigned short)(low >> 16);
            at[8] = (unsigned short)high, at[PITCH + 8] = (unsigned short)(high >> 16);
        }
    }
    __syncthreads();
    constexpr int ACROSS = HEAD_DIM / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_Q * ACROSS; i += 256) {
        const int r = i / ACROSS, row = tile * BLOCK_Q + r;
        if (row < (int)p.n_q)
            *reinterpret_cast<uint4*>(row_at<storage>(p.dq, b, h, row) + i % ACROSS * 8) = *reinterpret_cast<const uint4*>(rows + r * PITCH + i % ACROSS * 8);
    }
}
