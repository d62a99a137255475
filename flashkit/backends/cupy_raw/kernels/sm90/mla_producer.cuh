// The producer of latent attention: TMA loads of K, part by part. V is a part of K. Consumers load Q. The CTAs of a
// cluster share their keys: each loads every other chunk, for both.
#pragma once
#include "sm90/producer.cuh"
#include "sm90/mla_scheduler.cuh"

// Chunks of a part, at `box`: in a cluster those of this CTA.
template <int PART>
DEVICE void load_chunks(const TensorMap& k_map, const Box& box, unsigned target, unsigned barrier) {
    constexpr int FIRST_OF_PART = first_chunk(PART);
#pragma unroll
    for (int c = 0; c < chunks_of_part(PART); ++c) {
        const unsigned chunk = target + c * CHUNK_BYTES;
        const Box of_chunk = at_column(box, 64 * (FIRST_OF_PART + c));
        if constexpr (CLUSTER_SIZE == 1) tma_load<1>(chunk, k_map, of_chunk, barrier);
        else if ((FIRST_OF_PART + c) % CLUSTER_SIZE == cluster_ctarank())
            tma_load_multicast<1>(chunk, k_map, of_chunk, barrier, (1 << CLUSTER_SIZE) - 1);
    }
}

template <int PART>
DEVICE void load_k_part(const KvSource& kv, const KvTile& at, unsigned base, unsigned n) {
    constexpr int CHUNKS = chunks_of_part(PART);
    if constexpr (CHUNKS == 0) return;
    const Pipeline<STAGES> pipe = k_part(base, PART);
    const unsigned target = base + at_k(n % STAGES) + first_chunk(PART) * CHUNK_BYTES, barrier = pipe.full_barrier(n);
    pipe.producer_acquire(n);
    if (KvSource::is_leader()) mbarrier_arrive_expect_tx(barrier, CHUNKS * CHUNK_BYTES);
    if constexpr (IS_PAGED) {
        const unsigned row = threadIdx.x % 32 * kv.box_rows();
        const Box box{0, at.row, at.head, (int)existing_page(kv.p, at.page)};
        if (row < BLOCK_K) load_chunks<PART>(kv.k_map, box, target + row * CHUNK_ROW, barrier);
        __syncwarp();  // a lane that fell behind would wait for a phase of the pipeline that is over
    } else {
        load_chunks<PART>(kv.k_map, kv_box(kv.p, at.b, at.head, at.tile * BLOCK_K), target, barrier);
    }
}

// Of pages all lanes come.
DEVICE void mla_producer(const Params& p, const TensorMap& k_map, unsigned base, const UnitList* lists) {
    const Pipeline<2> pipe_lists = list_pipe(base);
    const Pipeline<UNIT_SLOTS> units = unit_pipe(base);
    const KvSource kv{p, k_map, k_map};
    const bool leader = KvSource::is_leader();
    unsigned n = 0, number = 0;  // K tiles, units so far
    KvTile looked_up{};
    auto announce = [&](int b, int h, int row0, int split) {
        units.producer_acquire(number);
        const unsigned slot = unit_slot(base, number);
        store_word(slot, b), store_word(slot + 4, h), store_word(slot + 8, row0), store_word(slot + 12, split);
        mbarrier_arrive(units.full_barrier(number));
    };
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        pipe_lists.consumer_wait(c);
        const UnitList& work = lists[c % 2];
        const int b = work.b, count = work.count, head = work.h / GQA_GROUP;
        if (b == END) break;
        const auto tile_of = [&](int entry) { return work.last_tile - (entry >> 8); };
        const int claim_at = claim_before(work.ends && claims_late(work.tiles), count);
        if (work.begins) {
            if (leader) announce(b, work.h, work.row0, work.split);
            ++number;
        }
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int entry = work.list.entry[i], tile = tile_of(entry), last = work.ends && i == count - 1;
            if (leader && i == claim_at) mbarrier_arrive(base + AT_CLAIM);
            const KvTile at = IS_PAGED && i > 0 ? looked_up : kv.located(tile, head, b);
            k_part(base, OLDEST_PART).producer_acquire(n);
            if (leader) store_word(mla_desc_slot(base, n), tile << 8 | last * LAST_TILE | (entry & 3));
            load_k_part<REST>(kv, at, base, n);
            load_k_part<FIRST>(kv, at, base, n);
            // The table is far away: the next tile's pages arrive while a part is awaited.
            if (IS_PAGED && i + 1 < count) looked_up = kv.located(tile_of(work.list.entry[i + 1]), head, b);
            load_k_part<SECOND>(kv, at, base, n);
            ++n;
        }
        if (IS_PAGED) __syncwarp();  // all lanes have read the list
        if (leader) mbarrier_arrive(pipe_lists.empty_barrier(c));
    }
    if (leader) announce(END, 0, 0, 0);
}
