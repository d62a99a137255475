// What the Hopper backward pass has to know of rows, delta and the log-sum-exp in base 2, and sums of dQ that are zero.
//
// bwd_preprocess() does that before the kernel, for tiles of queries below p.preprocessed_tiles. Sums of the others are cleared by the kernel
// (unless ORDERED: then who adds first stores), some with each item, so far ahead that hardly anybody waits. Where BESIDE, rows
// of the others are prepared by it, too: by two warps that have nothing else to do, with O and dO in the place of the next item's
// keys, until these come, which is four tiles before the end of an item. If the tiles of an item's head are not ready then, they
// first prepare what is left of these.
//
// Tiles count as sums_of() has them, so a key/value head has tiles_of_head() in a row. Before the marks lie the number of the
// next tile to be prepared and, backwards, how many of each such head are ready, then how many items of each are finished.
#pragma once
#include "sm90/bwd_tile_scheduler.cuh"

constexpr int AT_A_TIME = 64, BYTES_AT_A_TIME = AT_A_TIME * CHUNK_ROW * CHUNKS_V;  // rows of O, and of dO
static_assert(!BESIDE || (!ORDERED && CHUNKS_V <= CHUNKS && KEY_BUFFERS == 2), "O and dO take the place of keys");

DEVICE int* next_tile(const Params& p) { return p.preprocess_counters; }
DEVICE int* ready_of(const Params& p, int bh) { return p.preprocess_counters + 1 + bh; }  // bh: of keys
DEVICE int* finished_of(const Params& p, int bh) { return ready_of(p, bh) + heads_of_keys(p); }
DEVICE int tiles_of_head(const Params& p) { return tiles_of(p.n_q, BLOCK_Q) * GQA_GROUP; }
DEVICE int tiles_with_item(const Params& p) { return tiles_of(tiles_of_head(p), CLUSTER_SIZE * tiles_of(p.n_k, BLOCK_K)); }

struct QueryTile { int b, h, tile; };
DEVICE QueryTile tile_number(const Params& p, int where) {
    const int tiles = tiles_of(p.n_q, BLOCK_Q);
    return {where / tiles / (int)p.heads, where / tiles % (int)p.heads, where % tiles};
}

DEVICE float sum_of_products(const uint4& x, const uint4& y) {
    const storage *a = reinterpret_cast<const storage*>(&x), *b = reinterpret_cast<const storage*>(&y);
    float total = 0;
#pragma unroll
    for (int e = 0; e < 8; ++e) total += widen(a[e]) * widen(b[e]);
    return total;
}

// Numbers of a row: delta = rowsum(dO * O) - dlse, and the log-sum-exp in base 2, +inf for rows without keys, whose weights so
// become 0; NaN where a row's numbers are not finite: it is odd. Rows past the end get such that their weights are 0.
struct Known { float lse, dlse; };
DEVICE Known known_of(const Params& p, int b, int h, int row) {
    const bool exists = row < (int)p.n_q;
    return {exists ? *row_at<const float>(p.lse, b, h, row) : 0.0f,
            exists && p.dlse.data != nullptr ? *row_at<const float>(p.dlse, b, h, row) : 0.0f};
}
DEVICE bool store_numbers(const Params& p, int b, int h, int row, const Known& known, float total) {
    float shift = 1e30f;
    if (row < (int)p.n_q) {
        const bool empty = known.lse == HIDDEN;
        total = empty ? 0 : total - known.dlse;
        shift = empty ? INFINITE : is_finite(known.lse) && is_finite(total) ? known.lse * LOG2E : fk_special(0);
    }
    *row_at<float>(p.delta, b, h, row) = total;
    *row_at<float>(p.bwd_lse, b, h, row) = shift;
    return !is_finite(shift);
}

// By one of `threads` threads that prepare a tile.
DEVICE void clear_sums(const Params& p, int where, int thread, int threads) {
    float4* sums = reinterpret_cast<float4*>(part_of_sums(p, where, 0));
#pragma unroll 4
    for (int i = thread; i < BYTES_SUMS / 16; i += threads) sums[i] = float4{0, 0, 0, 0};
}
DEVICE void set_marks(const Params& p, const QueryTile& at, bool odd, int thread, int threads) {
    int* marks = dq_semaphore_of(p, at.b, at.h, at.tile);
    if (thread == 0) marks[0] = odd ? IS_ODD : 0;
    for (int i = thread; ORDERED && i < CLUSTER_SIZE * order_words(p); i += threads) marks[1 + i] = 0;
}

// --- before -----------------------------------------------------------------------------------------------------------

constexpr int ROW_VECS = HEAD_DIM_V / 8, LANES = ROW_VECS > 16 ? 32 : ROW_VECS > 8 ? 16 : 8;  // LANES take a row
extern "C" __global__ void __launch_bounds__(256) bwd_preprocess(KERNEL_PARAMS) {
    griddepcontrol_launch_dependents();
    const QueryTile at = tile_number(p, blockIdx.x);
    constexpr int AT_ONCE = 256 / LANES;
    const int lane = threadIdx.x % LANES;
    if (!ORDERED && blockIdx.x < p.preprocessed_tiles) clear_sums(p, blockIdx.x, threadIdx.x, 256);
    bool odd = false;
#pragma unroll
    for (int from = 0; from < BLOCK_Q; from += AT_ONCE) {
        const int row = at.tile * BLOCK_Q + from + threadIdx.x / LANES;
        float total = 0;
        if (row < (int)p.n_q) {
            const uint4* out = reinterpret_cast<const uint4*>(row_at<const storage>(p.out, at.b, at.h, row));
            const uint4* dout = reinterpret_cast<const uint4*>(row_at<const storage>(p.dout, at.b, at.h, row));
#pragma unroll
            for (int i = 0; i < (ROW_VECS + LANES - 1) / LANES; ++i)
                if (lane + i * LANES < ROW_VECS) total += sum_of_products(out[lane + i * LANES], dout[lane + i * LANES]);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
        if (lane == 0) odd |= store_numbers(p, at.b, at.h, row, known_of(p, at.b, at.h, row), total);
    }
    odd = __syncthreads_or(odd);
    set_marks(p, at, odd, threadIdx.x, 256);
    if constexpr (!ORDERED) {
        const int of_head = tiles_of_head(p), heads = heads_of_keys(p);
        for (int bh = blockIdx.x * 256 + threadIdx.x; bh < heads; bh += gridDim.x * 256) {
            const long long ready = p.preprocessed_tiles - (long long)bh * of_head;
            *ready_of(p, bh) = ready < 0 ? 0 : ready < of_head ? (int)ready : of_head, *finished_of(p, bh) = 0;
        }
        if (blockIdx.x == 0 && threadIdx.x == 0) *next_tile(p) = (int)p.preprocessed_tiles;
    }
}

// --- beside -----------------------------------------------------------------------------------------------------------

DEVICE bool exists(const Params& p, int where) { return where < tiles_of_head(p) * heads_of_keys(p); }

// By one thread, which has to wait for the end of its stores.
DEVICE void begin_to_clear(const Params& p, int where, unsigned base) {
    float* sums = part_of_sums(p, where, 0);
#pragma unroll 1
    for (int i = 0; i < BYTES_SUMS; i += BYTES_ZEROS) bulk_store(sums + i / 4, base + AT_ZEROS, BYTES_ZEROS);
    bulk_commit();
}
DEVICE void add_one(int* word) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(word) : "memory"); }
DEVICE void set_ready(const Params& p, int where) { add_one(ready_of(p, where / tiles_of_head(p))); }
DEVICE bool is_ready(const Params& p, int bh) { return uniform((int)get_acquired(ready_of(p, bh))) == tiles_of_head(p); }

// Sums alone, by a warp, with each item.
DEVICE void clear_some(const Params& p) {
    const int lane = threadIdx.x % 32, many = tiles_with_item(p), from = uniform(lane == 0 ? atomicAdd(next_tile(p), many) : 0);
#pragma unroll 1
    for (int where = from; where < from + many && exists(p, where); ++where) {
        clear_sums(p, where, lane, 32);
        fence_all_proxies();
        __syncwarp();
        if (lane == 0) set_ready(p, where);
    }
}

// rowsum(dO * O) of a row in shared memory. Its units lie in the same order in both, another one for each of eight rows.
DEVICE float product_of_rows(unsigned out, unsigned dout, int row) {
    float total = 0;
#pragma unroll 1
    for (int c = 0; c < CHUNKS_V; ++c)
#pragma unroll 4
        for (int i = 0; i < 8; ++i) {
            const unsigned unit = c * AT_A_TIME * CHUNK_ROW + swizzled(row, i);
            total += sum_of_products(load_vec(out + unit), load_vec(dout + unit));
        }
    return total;
}

// By two warps, of which each thread has one of AT_A_TIME rows. With each item they see to it that the rows of its head are
// ready, after which its keys may come; then they prepare some more, where the next item's keys will lie.
DEVICE void prepare_beside(const Params& p, const TensorMap& out_map, const TensorMap& dout_map, unsigned base, int thread) {
    const auto keys = k_pipe(base);
    const bool first = uniform(thread / 32) == 0, leads = thread == 0;
    const unsigned came = base + AT_ROWS_READ;
    unsigned pieces = 0, words = 0;
    int owed = 0;  // tiles that should have been prepared by now
    constexpr int NO_TILE = -1, NOTHING_YET = 0x7fffffff, NONE_LEFT = -(1 << 30);

    auto agree = [&](int x) {  // what the first thread says
        const unsigned word = base + AT_SAID + 4 * (words++ & 1);
        if (leads) store_word(word, x);
        named_barrier_sync(AMONG_ROWS, AT_A_TIME);
        return uniform(load_word(word));
    };
    auto prepare = [&](int where, unsigned number) {
        const unsigned out = base + AT_K + keys.stage(number) * BYTES_K, dout = out + BYTES_AT_A_TIME;
        const QueryTile at = tile_number(p, where);
        if (!first && elect_one()) begin_to_clear(p, where, base);
        bool odd = false;
#pragma unroll 1
        for (int from = at.tile * BLOCK_Q; from < (at.tile + 1) * BLOCK_Q; from += AT_A_TIME) {
            if (first && elect_one()) {
                mbarrier_arrive_expect_tx(came, 2 * BYTES_AT_A_TIME);
                load_tile<1, CHUNKS_V, AT_A_TIME>(out, out_map, from, at.h, at.b, came);
                load_tile<1, CHUNKS_V, AT_A_TIME>(dout, dout_map, from, at.h, at.b, came);
            }
            const Known known = known_of(p, at.b, at.h, from + thread);
            mbarrier_wait(came, pieces++ & 1);
            odd |= store_numbers(p, at.b, at.h, from + thread, known, product_of_rows(out, dout, thread));
            bulk_wait();
            fence_all_proxies();
            odd = named_barrier_any(AMONG_ROWS, AT_A_TIME, odd);
        }
        if (leads) {
            set_marks(p, at, odd, 0, 1);
            set_ready(p, where);
        }
    };

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        mbarrier_wait_backoff(base + AT_TAKEN, number & 1);
        const int b = uniform(load_word(work_tile_slot(base, number)));
        if (b == END) break;
        const int bh = number_of_head(p, b, uniform(load_word(work_tile_slot(base, number) + 4)));
        int where;
#pragma unroll 1
        while ((where = agree(!first || is_ready(p, bh)                                        ? NO_TILE
                              : leads && (int)get_acquired(next_tile(p)) < (bh + 1) * tiles_of_head(p) ? atomicAdd(next_tile(p), 1)
                                                                                               : NOTHING_YET)) != NO_TILE)
            if (exists(p, where)) prepare(where, number);
        fence_all_proxies();
        if (leads) mbarrier_arrive(base + AT_PLACE);
        mbarrier_wait_backoff(keys.empty + 8 * keys.stage(number + 1), ((number + 1) / KEY_BUFFERS & 1) ^ 1, SLEEP);
        owed += tiles_with_item(p);
#pragma unroll 1
        while ((where = agree(leads && owed > 0 && !mbarrier_try_wait(base + AT_SOON, number & 1) ? atomicAdd(next_tile(p), 1) : NO_TILE)) != NO_TILE) {
            if (exists(p, where)) prepare(where, number + 1);
            owed = exists(p, where) ? owed - 1 : NONE_LEFT;
        }
    }
}
