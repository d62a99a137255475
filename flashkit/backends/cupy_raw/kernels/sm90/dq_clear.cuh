// Clearing dq_accum where the order of additions is arbitrary, and the counters that say how far each head is.
//
// bwd_preprocess clears query tiles below p.preprocessed_tiles: those of the heads that come first. The scheduler
// warps, or the fused preprocess, clear the others, some with each work tile and so far ahead that a CTA hardly ever
// waits. Queries of a packed sequence without keys may be left as they are: bwd_postprocess does not read them.
#pragma once
#include "sm90/dq_semaphore.cuh"

// p.preprocess_counters: the next query tile to clear or to preprocess; for each key/value head how many of its query
// tiles are ready; for each how many of its work tiles are finished, times the CTAs of a cluster.
struct PreprocessCounters {
    __device__ __forceinline__ static int* next_tile(const Params& p) { return p.preprocess_counters; }
    __device__ __forceinline__ static int* ready(const Params& p, int bh) { return p.preprocess_counters + 1 + bh; }
    __device__ __forceinline__ static int* finished(const Params& p, int bh) { return ready(p, bh) + num_kv_heads(p); }
};

DEVICE int query_tiles_per_kv_head(const Params& p) { return tiles_of_queries(p) * GQA_GROUP; }
DEVICE int query_tiles_per_work_tile(const Params& p, int tiles) {  // tiles: of the keys of a head
    return ceil_div(query_tiles_per_kv_head(p), CLUSTER_SIZE * tiles);
}

struct QueryTile { int b, h, tile; };
DEVICE QueryTile query_tile(const Params& p, int index) {  // by a warp
    const int tiles = tiles_of_queries(p);
    if constexpr (IS_PACKED) {
        const SeqTile at = packed_tile_by_warp(p.cu_seqlens_q, (int)p.batch, index % tiles, BLOCK_Q);
        return {(int)at.b, index / tiles, (int)at.tile};
    }
    return {index / tiles / (int)p.heads, index / tiles % (int)p.heads, index % tiles};
}
// Of packed sequences, whether there are queries: some numbers stand for no tile.
DEVICE bool exists(const Params& p, const QueryTile& at) {
    return !IS_PACKED || at.tile * BLOCK_Q < (int)seq_info(p, at.b).n_q;
}
DEVICE bool query_tile_exists(const Params& p, int index) {
    return index < query_tiles_per_kv_head(p) * num_kv_heads(p);
}

// By one of `threads` threads.
DEVICE void clear_dq_accum(const Params& p, int index, int thread, int threads) {
    float4* accum = reinterpret_cast<float4*>(dq_accum_at(p, index, 0));
#pragma unroll 4
    for (int i = thread; i < BYTES_DQ / 16; i += threads) accum[i] = float4{0, 0, 0, 0};
}

DEVICE void red_release_increment(int* word) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(word) : "memory");
}
DEVICE void set_ready(const Params& p, int index) {
    red_release_increment(PreprocessCounters::ready(p, index / query_tiles_per_kv_head(p)));
}
DEVICE bool is_ready(const Params& p, int bh) {
    return uniform((int)load_acquire(PreprocessCounters::ready(p, bh))) == query_tiles_per_kv_head(p);
}

// A scheduler warp's share with each work tile.
DEVICE void clear_dq_ahead(const Params& p, int tiles) {
    const int lane = threadIdx.x % 32, many = query_tiles_per_work_tile(p, tiles);
    const int from = uniform(lane == 0 ? atomicAdd(PreprocessCounters::next_tile(p), many) : 0);
#pragma unroll 1
    for (int index = from; index < from + many && query_tile_exists(p, index); ++index) {
        clear_dq_accum(p, index, lane, 32);
        fence_all_proxies();
        __syncwarp();
        if (lane == 0) set_ready(p, index);
    }
}
