// The producer: one thread issues TMA loads of K, V and Q for every K/V tile of every work tile that the scheduler
// lists.
#pragma once
#include "sm90/tile_scheduler.cuh"

// page, row: where a lane's box begins, of keys in pages; page as the table has it, which may be no page.
struct KvTile { int tile, head, b, row; long long page; };

// FP8: the tile that a stage of V holds, for the transpose warp. b: END behind the last one.
DEVICE void store_v_tile(unsigned slot, const KvTile& at) {
    store_word(slot, at.b), store_word(slot + 4, at.tile);
}

// Where K and V come from: contiguous tensors, or pages.
struct KvSource {
    const Params& p;
    const TensorMap &k_map, &v_map;

    // A box has a page's rows, as many as the largest power of two that divides a page and a tile
    // (sm90_launch.keys_of_a_box): a tile has at most one for each lane of a warp.
    __device__ __forceinline__ unsigned box_rows() const {
        return ((unsigned)p.page | BLOCK_K) & -((unsigned)p.page | BLOCK_K);
    }
    // The page of a sequence's last key. Asked for once a list: the length is far away.
    __device__ __forceinline__ unsigned last_page(int b) const {
        const int n_k = IS_PAGED ? (int)seq_info(p, b).n_k : 0;
        return n_k > 0 ? page_number(p, n_k - 1) : 0;
    }
    // Looked up once for K and V. Behind the last key comes what lies there in its page, or that page again.
    __device__ __forceinline__ KvTile located(int tile, int head, int b, unsigned last) const {
        if constexpr (!IS_PAGED) return {tile, head, b};
        const unsigned key = tile * BLOCK_K + threadIdx.x % 32 * box_rows(), number = page_number(p, key);
        return {tile, head, b, (int)(key - number * p.page), table_entry(p, b, number < last ? number : last)};
    }

    template <int CHUNKS>
    __device__ __forceinline__ void load_pages(const TensorMap& map, const KvTile& at, unsigned target, int chunk,
                                               unsigned barrier) const {
        const unsigned row = threadIdx.x % 32 * box_rows();
        if (is_leader()) mbarrier_arrive_expect_tx(barrier, BLOCK_K * CHUNK_ROW * CHUNKS);
        if (row < BLOCK_K)
            load_tile<1, CHUNKS, BLOCK_K>(target + row * CHUNK_ROW, map,
                                          Box{0, at.row, at.head, (int)existing_page(p, at.page)}, barrier, 0, chunk);
        __syncwarp();  // a lane that fell behind would wait for a phase of the pipeline that is over
    }
    __device__ __forceinline__ static bool is_leader() { return !IS_PAGED || threadIdx.x % 32 == 0; }

    __device__ __forceinline__ void load_k(const KvTile& at, unsigned target, unsigned barrier) const {
        if constexpr (IS_PAGED) return load_pages<CHUNKS_K>(k_map, at, target, CHUNK_BYTES, barrier);
        mbarrier_arrive_expect_tx(barrier, BYTES_K);
        load_tile<1, CHUNKS_K, BLOCK_K, CHUNK_COLUMNS>(target, k_map, kv_box(p, at.b, at.head, at.tile * BLOCK_K),
                                                       barrier);
    }
    __device__ __forceinline__ void load_v(const KvTile& at, unsigned target, int chunk_stride,
            unsigned barrier) const {
        if constexpr (IS_PAGED) return load_pages<CHUNKS_V>(v_map, at, target, chunk_stride, barrier);
        mbarrier_arrive_expect_tx(barrier, BYTES_V);
        load_tile<1, CHUNKS_V, BLOCK_K, CHUNK_COLUMNS>(target, v_map, kv_box(p, at.b, at.head, at.tile * BLOCK_K),
                                                       barrier, 0, chunk_stride);
    }
};

// Writes a work tile to its slot, and loads its rows. list_seq: the SeqSlot of its list. b: END tells consumers and the
// store warp to stop.
DEVICE void load_q(const Params& p, const TensorMap& q_map, unsigned base, unsigned number, int b, int h, int row0,
                   unsigned list_seq) {
    const Pipeline<Q_BUFFERS> pipe_q = q_pipe(base);
    pipe_q.producer_acquire(number);
    const unsigned buffer = number % Q_BUFFERS, slot = work_tile_slot(base, buffer), full = pipe_q.full_barrier(number);
    store_word(slot, b), store_word(slot + 4, h), store_word(slot + 8, row0);
    if (b == END) {
        mbarrier_arrive(full);
    } else {
        const SeqSlot seq = seq_of(p, b, slot);
        seq.copy_from(list_seq);
        mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * 64 * CHUNK_ROW * CHUNKS_K);
#pragma unroll 1
        for (int wg = 0; wg < MMA_WARPGROUPS; ++wg)
            load_tile<PACK_GQA, CHUNKS_K, 64, CHUNK_COLUMNS>(q_rows(base, buffer, wg), q_map,
                                                             q_box(p, b, h / PACK_GQA, (row0 + 64 * wg) / PACK_GQA),
                                                             full);
    }
}

// V follows K one tile later, as consumers need it. Q follows the first K of its work tile: consumers begin with a K
// tile before they release the previous Q, so this order cannot deadlock. Of pages all lanes come, for load_pages().
DEVICE void producer(const Params& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                     unsigned base, const WorkTileList* lists) {
    const Pipeline<STAGES> pipe_k = k_pipe(base), pipe_v = v_pipe(base);
    const Pipeline<2> pipe_lists = list_pipe(base);
    const KvSource kv{p, k_map, v_map};
    const bool leader = KvSource::is_leader();
    unsigned n = 0, number = 0;  // K/V tiles, work tiles so far
    KvTile previous{}, looked_up{};
    auto load_previous_v = [&]() {
        pipe_v.producer_acquire(n - 1);
        const unsigned stage = (n - 1) % STAGES;
        if constexpr (FP8) store_v_tile(v_tile_slot(base, n - 1), previous);
        kv.load_v(previous, base + at_v(stage), chunk_stride_v(stage), pipe_v.full_barrier(n - 1));
    };
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        pipe_lists.consumer_wait(c);
        const WorkTileList& work = lists[c % 2];
        const int b = work.b, count = work.count, head = work.h / GQA_GROUP;
        if (b == END) break;
        const unsigned last_page = kv.last_page(b);
        const auto tile_of = [&](int entry) { return work.last_tile - (entry >> 8); };
        const auto located = [&](int entry) { return kv.located(tile_of(entry), head, b, last_page); };
        const int claim_at = claim_before(work.ends && claims_late(work.last_tile + 1), count);
        if (leader && claim_at == count) mbarrier_arrive(base + AT_CLAIM);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int entry = work.list.entry[i], first = i == 0 ? work.first_bits : 0;
            if (leader && i == claim_at) mbarrier_arrive(base + AT_CLAIM);
            const KvTile at = IS_PAGED && i > 0 ? looked_up : located(entry);
            pipe_k.producer_acquire(n);
            if (leader) store_word(tile_desc_slot(base, n), at.tile << 8 | first | (entry & 63));
            kv.load_k(at, base + at_k(n % STAGES), pipe_k.full_barrier(n));
            // The table is far away: the next tile's pages arrive while V's stage is awaited.
            if (IS_PAGED && i + 1 < count) looked_up = located(work.list.entry[i + 1]);
            if (n > 0) load_previous_v();
            previous = at;
            ++n;
            if (leader && first) load_q(p, q_map, base, number++, b, work.h, work.row0, list_seq(base, c));
        }
        if (IS_PAGED) __syncwarp();  // all lanes have read the list
        if (leader) mbarrier_arrive(pipe_lists.empty_barrier(c));
    }
    if (n > 0) load_previous_v();
    if (!leader) return;
    pipe_k.producer_acquire(n);
    store_word(tile_desc_slot(base, n), END);
    mbarrier_arrive(pipe_k.full_barrier(n));
    load_q(p, q_map, base, number, END, 0, 0, 0);
    if constexpr (FP8) {
        pipe_v.producer_acquire(n);
        store_v_tile(v_tile_slot(base, n), {0, 0, END});
        mbarrier_arrive(pipe_v.full_barrier(n));
    }
}
