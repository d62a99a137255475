// dQ in global memory: dq_accum, float32 sums of each query tile, and dq_semaphore, which puts the additions in order.
//
// DETERMINISTIC: a query tile is added to by one key tile after the other, so the bits never change. dq_semaphore has a
// bit for each pair of tiles. Work tiles are claimed in the order of the additions, so a CTA only ever waits for
// resident CTAs. Without a mask keys ascend and each CTA goes from the last queries to the first: every CTA soon
// follows the one before at a distance, and waits no more. With one, FROM_DIAGONAL.
//
// The first to add stores instead, so that nothing has to be cleared.
#pragma once
#include "sm90/bwd_layout.cuh"

// The words of a query tile.
struct DqSemaphore {
    static constexpr int FLAGS = 0, ADDED = 1;                   // words: flags; then, for each CTA, added key tiles
    static constexpr int HAS_NONFINITE_ROWS = 1, IS_STORED = 2;  // flags
    static constexpr int IS_CONVERTED = 4;                       // STORES_DQ: dQ is where the caller wants it
    static constexpr int TILES_PER_WORD = 31;                    // a bit for each key tile that has been added
    static constexpr unsigned STORED = 1u << TILES_PER_WORD;     // one of the word's key tiles has stored
    int* words;

    __device__ __forceinline__ static int words_per_cta(const Params& p) {
        return ceil_div(max_n_k(p), TILES_PER_WORD * BLOCK_K);
    }
    __device__ __forceinline__ int& flags() const { return words[FLAGS]; }
    // Each CTA of a cluster has columns of dQ, and so words, of its own.
    __device__ __forceinline__ int& added_by_all(int word) const { return words[ADDED + word]; }
    __device__ __forceinline__ int* added(const Params& p) const {
        return words + ADDED + cta_rank() * words_per_cta(p);
    }
};
DEVICE DqSemaphore dq_semaphore(const Params& p, int b, int h, int tile) {
    return {row_at<int>(p.dq_semaphore, b, h, q_tile_number(p, b, tile, BLOCK_Q))};
}
DEVICE DqSemaphore dq_semaphore(const Params& p, int index) {  // index: of the query tile among all
    return {static_cast<int*>(p.dq_semaphore.data) + index * p.dq_semaphore.token};
}

DEVICE float* dq_accum(const Params& p, int b, int h, int tile) {
    return row_at<float>(p.dq_accum, b, h, q_tile_number(p, b, tile, BLOCK_Q));
}
// From byte `offset` of query tile `index` on.
DEVICE float* dq_accum_at(const Params& p, int index, int offset) {
    return static_cast<float*>(p.dq_accum.data) + (long long)index * (BYTES_DQ / 4) + offset / 4;
}

DEVICE unsigned load_acquire(const int* word) {
    unsigned x;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(word) : "memory");
    return x;
}
DEVICE void fence_all_proxies() { asm volatile("fence.proxy.async;" ::: "memory"); }

DEVICE void bulk_store(float* target, unsigned source, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(target), "r"(source), "r"(bytes) : "memory");
}
DEVICE void bulk_reduce_add(float* target, unsigned source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(target), "r"(source), "r"(bytes) : "memory");
    bulk_commit();
}
DEVICE void store_float4(float* target, const float* x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
DEVICE void red_add_float4(float* target, const float* x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// --- the semaphore ---------------------------------------------------------------------------------------------------

// Key tile tile_k has been added; `added` are a CTA's words.
DEVICE void release_dq(int* added, int tile_k) {
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(added + tile_k / DqSemaphore::TILES_PER_WORD),
                 "r"(DqSemaphore::STORED | 1u << tile_k % DqSemaphore::TILES_PER_WORD) : "memory");
}
// Key tile tile_k adds nothing.
DEVICE void skip_dq(int* added, int tile_k) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(added + tile_k / DqSemaphore::TILES_PER_WORD),
                 "r"(1u << tile_k % DqSemaphore::TILES_PER_WORD) : "memory");
}
DEVICE void set_flag(const DqSemaphore& semaphore, int flag) {
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(&semaphore.flags()), "r"(flag) : "memory");
}

// A warp waits until all key tiles that add to a query tile before tile_k does have been added: those below it, or,
// where key tiles descend, those up to the last of `descending`. Returns whether one of them has stored.
DEVICE bool acquire_dq(const int* added, int tile_k, int descending) {
    constexpr int BITS = DqSemaphore::TILES_PER_WORD;
    const int first = descending ? tile_k + 1 : 0, end = descending ? descending : tile_k;
    unsigned found = 0;
#pragma unroll 1
    for (int word = first / BITS + threadIdx.x % 32; BITS * word < end; word += 32) {
        const int from = first - BITS * word, to = end - BITS * word;
        const unsigned needed = ((1u << (to < BITS ? to : BITS)) - 1) & ~0u << (from > 0 ? from : 0);
        unsigned x;
        while (((x = load_acquire(added + word)) & needed) != needed) {}
        found |= x;
    }
    __syncwarp();
    return __any_sync(~0u, found & DqSemaphore::STORED);
}

// --- between consumers and the semaphore warps -----------------------------------------------------------------------
//
// Consumers request a turn for query tile n as soon as they know it, a step before its dQ is there: the semaphore warp
// waits meanwhile. dQ then leaves in one of two ways.
//
//     CLUSTER_SIZE == 1   consumers write dQ to shared memory (AT_DQ_WRITTEN); the semaphore warp sends it when its
//                         turn has come, and grants the buffer to the next tile (AT_DQ_GRANTED)
//     CLUSTER_SIZE == 2   the semaphore warp grants the turn (AT_DQ_GRANTED); consumers add from registers
//                         (AT_DQ_WRITTEN)
//
// Two warps take every second tile each. There are four slots: before tile n + 4 is requested, tile n has left.

// query tile; key tile or DqWrite; of packed sequences, key tiles that descend
constexpr int DQ_SLOT_BYTES = IS_PACKED ? 12 : 8;
static_assert(AT_LISTS - AT_DQ_SLOTS >= 4 * DQ_SLOT_BYTES, "BackwardTile.smem and dq_slot differ");
DEVICE unsigned dq_slot(unsigned base, unsigned n) { return base + AT_DQ_SLOTS + DQ_SLOT_BYTES * (n % 4); }
DEVICE unsigned dq_requested(unsigned base, unsigned n) { return base + AT_DQ_REQUESTED + 8 * (n % 4); }
DEVICE unsigned dq_granted(unsigned base, unsigned n) { return base + AT_DQ_GRANTED + 8 * (n % 2); }
DEVICE unsigned dq_written(unsigned base, unsigned n) { return base + AT_DQ_WRITTEN + 8 * (n % 2); }

// By one lane. index: of the query tile among all, or END; tile_k: END if the tile is to be left as it is.
DEVICE void request_dq_turn(unsigned base, unsigned n, int index, int tile_k, int descending = 0) {
    store_word(dq_slot(base, n), index), store_word(dq_slot(base, n) + 4, tile_k);
    if (IS_PACKED && FROM_DIAGONAL) store_word(dq_slot(base, n) + 8, descending);
    mbarrier_arrive(dq_requested(base, n));
}
// No CTA waits for a tile without visible pairs (TileDesc::NO_VISIBLE_PAIR), which adds nothing, nor for one that
// consumers store (TileDesc::WHOLE_DQ). slot: of the work tile.
DEVICE void request_dq_turn_for(unsigned base, unsigned n, int tile_desc, int index, unsigned slot) {
    const int k0 = load_word(slot + 8), ascends = 0;
    constexpr int IS_LEFT = TileDesc::NO_VISIBLE_PAIR | (STORES_DQ ? TileDesc::WHOLE_DQ : 0);
    request_dq_turn(base, n, index, tile_desc & IS_LEFT ? END : k0 / BLOCK_K,
                    IS_PACKED && FROM_DIAGONAL ? load_word(descending_tiles_slot(slot)) : ascends);
}
DEVICE void end_dq_requests(unsigned base, unsigned n) {
    request_dq_turn(base, n, END, 0), request_dq_turn(base, n + 1, END, 0);
}

enum DqWrite { SKIP, STORE, ADD };

// The semaphore warp `which` of two.
DEVICE void dq_semaphore_warp(const Params& p, unsigned base, int which) {
    const bool leader = elect_one();
    const int tiles_q = tiles_of_queries(p);
#pragma unroll 1
    for (unsigned n = which;; n += 2) {
        mbarrier_wait(dq_requested(base, n), n / 4 & 1);
        const int index = load_word(dq_slot(base, n)), tile_k = load_word(dq_slot(base, n) + 4);
        if (index == END) break;
        const DqSemaphore semaphore = dq_semaphore(p, index);
        int* added = semaphore.added(p);
        DqWrite write = SKIP;
        if (tile_k != END) {
            int descending = 0;
            if constexpr (IS_PACKED && FROM_DIAGONAL) descending = load_word(dq_slot(base, n) + 8);
            else if (FROM_DIAGONAL && is_descending(p, index / tiles_q / GQA_GROUP, tiles_of_keys(p)))
                descending = ceil_div(max_n_k(p), BLOCK_K);
            write = acquire_dq(added, tile_k, descending) ? ADD : STORE;
            if (write == STORE && leader) set_flag(semaphore, DqSemaphore::IS_STORED);
        }
        if (CLUSTER_SIZE > 1) {
            if (leader) store_word(dq_slot(base, n), write), mbarrier_arrive(dq_granted(base, n));
            mbarrier_wait(dq_written(base, n), n / 2 & 1);
            if (leader && write != SKIP) release_dq(added, tile_k);
        } else if (leader) {
            float* accum = dq_accum_at(p, index, 0);
            mbarrier_wait(dq_written(base, n), n / 2 & 1);
            if (write != SKIP) {
                fence_all_proxies();
                if (write == ADD) bulk_reduce_add(accum, base + AT_DQ, BYTES_DQ);
                else bulk_store(accum, base + AT_DQ, BYTES_DQ), bulk_commit();
                bulk_wait_read();
            }
            mbarrier_arrive(dq_granted(base, n));
            if (write != SKIP) {
                bulk_wait();
                fence_all_proxies();
                release_dq(added, tile_k);
            }
        }
        __syncwarp();
    }
}

// --- clearing --------------------------------------------------------------------------------------------------------
//
// Clearing dq_accum where the order of additions is arbitrary, and the counters that say how far each head is.
//
// bwd_preprocess clears query tiles below p.preprocessed_tiles: those of the heads that come first. The scheduler
// warps, or the fused preprocess, clear the others, some with each work tile and so far ahead that a CTA hardly ever
// waits. Queries of a packed sequence without keys may be left as they are: bwd_postprocess does not read them.

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
    if constexpr (ENTRIES_FIRST) {
        const int entries = (int)num_entries(p);
        return {index / tiles % entries, index / tiles / entries, index % tiles};
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
