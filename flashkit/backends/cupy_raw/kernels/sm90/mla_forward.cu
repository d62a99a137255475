// Multi-head latent attention on Hopper (DeepSeek-V2, 2024, arXiv 2405.04434, in its absorbed form): keys of up to 576
// columns, the first of which are the values. All query heads of a group share a key, so K is loaded once, and V not
// at all. docs/hopper.md walks through it.
//
// The grid is persistent: one CTA per SM takes units, one of p.num_splits parts of the keys of 64 rows, until none is
// left. Where a key has more rows than that, the two CTAs of a cluster take neighbouring rows and load each key once. A
// row is one of the PACK_GQA query heads that share a K/V head, at one token. `combine` reduces the splits.
//
//     Q                 [64][HEAD_DIM]             shared memory
//     K, V              [STAGES][64][HEAD_DIM]     shared memory, a pipeline for each part (mla_scheduler.cuh)
//     S, P              [64][64]                   registers of a warp group; P also in shared memory
//     O                 [64][HEAD_DIM_V]           registers, half of the columns in each consumer warp group
//     m, l              [64]                       registers: row reference in base 2, row sum
//
//     warp group 0      warp 0  producer
//                       warp 1  scheduler warp (mla_scheduler.cuh)
//     warp groups 1, 2  consumers (mla_mainloop.cuh)
#include "sm90/mla_mainloop.cuh"

// --- the producer ----------------------------------------------------------------------------------------------------
//
// The producer of latent attention: TMA loads of K, part by part. V is a part of K. Consumers load Q. The CTAs of a
// cluster share their keys: each loads every other chunk, for both.

DEVICE bool is_own_chunk(int chunk) { return CLUSTER_SIZE == 1 || chunk % CLUSTER_SIZE == cluster_ctarank(); }

// Chunks FROM ... END - 1 of the rows of `box`: those of this CTA.
template <int FROM, int END>
DEVICE void load_chunks(const TensorMap& k_map, const Box& box, unsigned target, unsigned barrier) {
#pragma unroll
    for (int c = FROM; c < END; ++c) {
        const unsigned chunk = target + (c - FROM) * CHUNK_BYTES;
        if (!is_own_chunk(c)) continue;
        if constexpr (CLUSTER_SIZE == 1) tma_load<1>(chunk, k_map, at_column(box, 64 * c), barrier);
        else tma_load_multicast(chunk, k_map, at_column(box, 64 * c), barrier, (1 << CLUSTER_SIZE) - 1);
    }
}

template <int PART>
DEVICE void load_k_part(const KvSource& kv, const KvTile& at, unsigned base, unsigned n) {
    constexpr int CHUNKS = chunks_of_part(PART), FROM = first_chunk(PART);
    if constexpr (CHUNKS == 0) return;
    const Pipeline<STAGES> pipe = k_part(base, PART);
    const unsigned target = base + at_k(n % STAGES) + FROM * CHUNK_BYTES, barrier = pipe.full_barrier(n);
    pipe.producer_acquire(n);
    if (KvSource::is_leader()) mbarrier_arrive_expect_tx(barrier, CHUNKS * CHUNK_BYTES);
    kv.for_each_box(at, [&](const Box& box, unsigned row) {
        load_chunks<FROM, FROM + CHUNKS>(kv.k_map, box, target + row * CHUNK_ROW, barrier);
    });
}

// Of pages all lanes come.
DEVICE void mla_producer(const Params& p, const TensorMap& k_map, unsigned base, const UnitList* lists) {
    const Pipeline<2> pipe_lists = list_pipe(base);
    const Pipeline<UNIT_SLOTS> units = unit_pipe(base);
    const KvSource kv{p, k_map, k_map};
    const bool leader = KvSource::is_leader();
    unsigned n = 0, number = 0;  // K tiles, units so far
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
        const unsigned last_page = kv.last_page(b);
        const auto located = [&](int i) { return kv.located(tile_of(work.list.entry[i]), head, b, last_page); };
        KvTile next = located(0);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const KvTile at = next;
            const int entry = work.list.entry[i], last = work.ends && i == count - 1;
            if (i + 1 < count) next = located(i + 1);  // the table of pages is far away: it arrives meanwhile
            if (leader && i == claim_at) mbarrier_arrive(base + AT_CLAIM);
            k_part(base, OLDEST_PART).producer_acquire(n);
            if (leader) store_word(mla_desc_slot(base, n), at.tile << 8 | last * LAST_TILE | (entry & 3));
            load_k_part<REST>(kv, at, base, n);
            load_k_part<FIRST>(kv, at, base, n);
            load_k_part<SECOND>(kv, at, base, n);
            ++n;
        }
        if (IS_PAGED) __syncwarp();  // all lanes have read the list
        if (leader) mbarrier_arrive(pipe_lists.empty_barrier(c));
    }
    if (leader) announce(END, 0, 0, 0);
}

// --- the kernel ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(CLUSTER_SIZE, 1, 1) __launch_bounds__(MLA_THREADS, 1)
sm90_mla_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap k_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        for (int part = 0; part < 3; ++part) k_part(base, part).init(1, 4 * CLUSTER_SIZE);
        list_pipe(base).init(1, 1);
        unit_pipe(base).init(1, CONSUMERS / 32);
        mbarrier_init(base + AT_CLAIM, 1);
        claimed_pipe(base).init(1, 1);
        fence_mbarrier_init();
    }
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    if (CLUSTER_SIZE > 1) cluster_sync();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        UnitList* lists = reinterpret_cast<UnitList*>(shared + AT_LISTS);
        if (warp == 1) unit_scheduler_warp(p, base, lists);
        else if (warp == 0 && (IS_PAGED || elect_one())) mla_producer(p, k_map, base, lists);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if (role == 1) MlaConsumer<0>(p, base).run();
        else MlaConsumer<1>(p, base).run();
    }
    __syncwarp();
    if (CLUSTER_SIZE > 1) cluster_sync();  // the peer's arrivals and copies have come
}

#include "sm80/combine.cuh"
