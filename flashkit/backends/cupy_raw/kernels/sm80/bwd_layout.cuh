// Constants of the backward kernel: how its warps share the products, pitches; schedules, and the order of additions.
#pragma once
#include "sm80/layout.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int S_TILES = BLOCK_Q / (16 * WARPS_S), S_KEYS = BLOCK_K * WARPS_S / WARPS / 8;
constexpr int KV_TILES = BLOCK_K / (16 * WARPS_KV), K_COLUMNS = padded(HEAD_DIM) * WARPS_KV / WARPS / 8;
constexpr int V_COLUMNS = padded(HEAD_DIM_V) * WARPS_KV / WARPS / 8;
constexpr int Q_TILES = BLOCK_Q / (16 * WARPS_Q), Q_COLUMNS = padded(HEAD_DIM) * WARPS_Q / WARPS / 8;

// COPY_DURING_MMA: where registers leave room, the copies of the next tile are interleaved with the first two products.
// DQ_FIRST: dQ is computed before dV, so that two products hide its additions instead of one.
constexpr bool COPY_DURING_MMA = !IS_FLOAT32 && HEAD_DIM > 64;
constexpr bool DQ_FIRST = !IS_FLOAT32 && (HEAD_DIM <= 64 || HEAD_DIM > 128);
// All of dQ is added during the product of dV: the CTA that waits for this tile of dQ waits less.
constexpr bool DQ_WITH_DV = DQ_FIRST && HAS_MASK && HEAD_DIM > 128;
static_assert(S_KEYS % 2 == 0 && K_COLUMNS % 2 == 0 && V_COLUMNS % 2 == 0 && Q_COLUMNS % 2 == 0,
              "ldmatrix_x4 loads two operands");

constexpr int SIZE = sizeof(storage), PITCH = pitch(HEAD_DIM), PITCH_V = pitch(HEAD_DIM_V);
constexpr int PITCH_S = BLOCK_K * SIZE + 16;

// A masked pair has P = 0 and dS = 0, but 0 times inf or NaN is NaN: non-finite gradients are recomputed
// (common/bwd_fallback.cuh).
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

// --- the tile scheduler ----------------------------------------------------------------------------------------------
//
// Which key tile a CTA of the backward pass takes.

// Backward pass: work tiles are key tiles, taken from an atomic counter in the order in which CTAs add to dQ. A CTA
// therefore only ever waits for a CTA that is resident. The last key tiles come first, and a CTA starts with its first
// query tile: under a causal mask that is its diagonal, where it is the first to add. The last group of heads runs in
// the reverse order, longest first, so that all CTAs end at about the same time.
struct BackwardTileScheduler {
    int tiles_k, heads;
    bool descending;

    __device__ __forceinline__ TileCoord initial(const Params& p, unsigned* broadcast) {
        if (threadIdx.x == 0) *broadcast = atomicAdd(p.tile_counter, 1u);
        __syncthreads();
        const unsigned index = *broadcast;
        heads = (int)p.heads / GQA_GROUP;
        tiles_k = (int)num_k_tiles(p, BLOCK_K);
        const int all = heads * (int)num_entries(p), group = (int)p.heads_per_l2_group;
        const TileCoord coord = tile_coord((int)index, tiles_k, all, group);
        descending = HAS_MASK && all > group && coord.bh >= (all - 1) / group * group;
        return {descending ? coord.tile : tiles_k - 1 - coord.tile, coord.bh};
    }
};

// --- the order of additions ------------------------------------------------------------------------------------------
//
// The order in which CTAs add to dq_accum. p.dq_semaphore has a bit for each pair of a query tile and a key tile: the
// CTA of the key tile has added to the query tile.

DEVICE unsigned* semaphore_at(const Params& p, int b, int h, int tile) {
    return row_at<unsigned>(p.dq_semaphore, b, h, q_tile_number(p, b, tile, BLOCK_Q));
}
DEVICE void semaphore_skip(unsigned* word, int tile) {  // for a tile that gets no addition
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
DEVICE void semaphore_release(unsigned* word, int tile) {  // orders the CTA's additions before the last barrier
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile / 32), "r"(1u << tile % 32) : "memory");
}
DEVICE unsigned semaphore_load(const unsigned* word) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
// The bits of tiles low ... high - 1 in word number `word`.
DEVICE unsigned bits_between(int low, int high, int word) {
    const auto below = [&](int tile) {
        return tile >= 32 * word + 32 ? ~0u : tile <= 32 * word ? 0u : (1u << tile % 32) - 1;
    };
    return below(high) & ~below(low);
}
// Waits until tiles low ... high - 1 have their bits set; `bits`: the lane's first word, loaded a while ago. A relaxed
// load suffices: the additions that follow are performed at the L2 cache and depend on a branch on it, so they come
// after the additions that the bits stand for.
DEVICE void semaphore_wait(const unsigned* semaphore, unsigned bits, int low, int high) {
    for (int word = low / 32 + threadIdx.x % 32; 32 * word < high; word += 32) {
        const unsigned need = bits_between(low, high, word);
        while ((bits & need) != need) bits = semaphore_load(semaphore + word);
        bits = 0;
    }
    __syncwarp();
}

DEVICE void reduce_add(float* target, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3]) : "memory");
#else
    UNROLL(e, 4)
        asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(target + e), "f"(x[e]) : "memory");
#endif
}
