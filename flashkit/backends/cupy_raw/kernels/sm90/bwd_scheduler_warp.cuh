// The scheduler warp of Hopper's backward pass: claims work tiles, lists the query tiles that see them, loads their K.
// It runs ahead of the producer, as classifying 32 query tiles may take as long as the products of a few.
#pragma once
#include "sm90/bwd_producer.cuh"
#include "sm90/dq_accum.cuh"

// Flags and states for a TileDesc of query tiles `tile` ... `tile` + many - 1; 0 if all are EMPTY. A tile that reaches
// past the last key is PARTIAL, and one that reaches past the last row of a packed sequence.
DEVICE unsigned tile_states(const Params& p, const WorkTile& at, int h, int n_q, int n_k, int tile, int many) {
    const long long offset = seq_info(p, at.b).q_position;
    const int row0 = tile * BLOCK_Q, end = row0 + many * BLOCK_Q, row1 = end < n_q ? end : n_q;
    auto state_of_keys = [&](int k0, int k1) {
        if (k0 >= n_k) return (int)EMPTY;
        const int state = tile_state(p, at.b, h, offset, row0, row1, k0, k1 < n_k ? k1 : n_k);
        return state == FULL && (k1 > n_k || (IS_PACKED && end > n_q)) ? (int)PARTIAL : state;
    };
    const int all = state_of_keys(at.k0, at.k0 + BLOCK_K);
    unsigned states = 0;
#pragma unroll 1
    for (int g = 0; g < BLOCK_K / WARPGROUP_KEYS; ++g) {
        int state = all;
        if (all == PARTIAL && many == 1)
            state = state_of_keys(at.k0 + WARPGROUP_KEYS * g, at.k0 + WARPGROUP_KEYS * (g + 1));
        states |= state << 2 * g;
    }
    if (CLEARS_ROWS && states != 0 && many == 1 &&
        (dq_semaphore(p, at.b, h, tile).flags() & DqSemaphore::HAS_NONFINITE_ROWS))
        states |= TileDesc::NONFINITE_ROWS;
    if (STORES_DQ && states != 0 && n_k <= BLOCK_K) states |= TileDesc::WHOLE_DQ;
    return states;
}

// Of packed sequences: the next work tile is claimed while the tiles of a short one are listed, as there is no time
// left for that near its end; unless other CTAs wait for its turns, to which a CTA that claimed early comes late.
DEVICE bool claims_early(int n_q, int n_k) {
    constexpr int SHORT = 8;  // query tiles
    return IS_PACKED && (!DETERMINISTIC || n_k <= BLOCK_K) && n_q <= SHORT / GQA_GROUP * BLOCK_Q;
}

DEVICE void scheduler(const Params& p, const KvSource& kv, unsigned base, QueryTileList* lists) {
    ListWriter<QueryTileList, NUM_LISTS, BACKOFF_NS> writer{list_pipe(base), lists};
    const auto pipe_k = k_pipe(base);
    TileScheduler work{p, base};
    const bool leader = threadIdx.x % 32 == 0;
    const int num_work_tiles = work.count();
    unsigned number = 0;  // work tiles so far
    int claim = 0;
    bool claimed = false;          // early, by claims_early()
    unsigned early_claims = 0;
    auto announce = [&](const WorkTile& at, bool descending) {
        pipe_k.producer_acquire(number);
        const unsigned slot = work_tile_slot(base, number);
        if (leader) store_word(slot, at.b), store_word(slot + 4, at.head), store_word(slot + 8, at.k0);
        if (!IS_PACKED || at.b == END || !leader) return;
        const SeqInfo of = seq_info(p, at.b);
        seq_of(p, at.b, slot).store(of);
        if (FROM_DIAGONAL) store_word(descending_tiles_slot(slot), descending ? ceil_div(of.n_k, BLOCK_K) : 0);
    };
    auto load_k = [&](const WorkTile& at, bool descending) {
        if (!FUSED_PREPROCESS) announce(at, descending);
        kv.load_k(at, number);
    };
    // Consumers release K of a work tile after all of the one before has been added to dQ. So when the buffer for K of
    // `number` is empty, the work tile BEHIND before it is finished. The leader counts it after it has listed query
    // tiles, as the fence takes its time; heads wait in shared memory.
    constexpr unsigned BEHIND = KEY_BUFFERS + 1;
    auto finished_head = [&](unsigned number) { return base + AT_FINISHED_HEADS + 4 * (number % 4); };
    auto count_finished = [&](unsigned number) {
        fence_all_proxies(), red_release_increment(PreprocessCounters::finished(p, load_word(finished_head(number))));
    };
#pragma unroll 1
    for (;; ++number) {
        // Claimed late, the last work tiles are shared evenly.
        if (!claimed) {
            if (number > 0) mbarrier_wait_backoff(base + AT_CLAIM, (number - 1 - early_claims) & 1, BACKOFF_NS);
            claim = work.claim(leader);
        }
        const int index = work.claimed(claim, number, leader);
        if (index >= num_work_tiles) break;
        const WorkTile at = work.work_tile(index);
        const int n_q = (int)seq_info(p, at.b).n_q, n_k = (int)seq_info(p, at.b).n_k;
        const int tiles_q = ceil_div(n_q, BLOCK_Q), bh = kv_head_index(p, at.b, at.head);
        const bool descending = is_descending(p, bh, work.tiles());
        claimed = claims_early(n_q, n_k);
        if (FUSED_PREPROCESS) {
            announce(at, descending);
            __syncwarp();
            if (leader) mbarrier_arrive(base + AT_CLAIMED);
            mbarrier_wait(base + AT_HEAD_READY, number & 1);
        } else if (!DETERMINISTIC) {
            while (!is_ready(p, bh)) {}
            fence_all_proxies();
        }
        if (KEY_BUFFERS > 1) load_k(at, descending);
        bool first = true;
#pragma unroll 1
        for (int member = 0, next = 0; member < GQA_GROUP;) {
            const int h = at.head * GQA_GROUP + member;
            auto tile_at = [&](int place, int many) {
                return DETERMINISTIC && !descending ? tiles_q - place - many : place;
            };
            auto states_of = [&](int place, int many) {
                const int from = tile_at(place, many);
                const unsigned states = tile_states(p, at, h, n_q, n_k, from, many);
                if (DETERMINISTIC && states == 0)
                    for (int tile = from; tile < from + many; ++tile)
                        skip_dq(dq_semaphore(p, at.b, h, tile).added(p), at.k0 / BLOCK_K);
                return states;
            };
            QueryTileList& list = writer.acquire();
            // Before a list is free it would be too early: other CTAs may be sooner done.
            if (claimed && first) claim = work.claim(leader), ++early_claims;
            unsigned all_states;
            const int count = fill(list, next, tiles_q, all_states, states_of, writer.n == 0);
            if (const int lane = threadIdx.x % 32; DETERMINISTIC && lane < count)
                list.entry[lane] = tile_at(list.entry[lane] >> 8, 1) << 8 | (list.entry[lane] & 255);
            if (leader) {
                list.count = count, list.b = at.b, list.h = h, list.k0 = at.k0;
                list.first_index = query_tile_index(p, at.b, h, 0);
                const bool ends = next >= tiles_q && member == GQA_GROUP - 1;
                list.ends = ends && claimed ? QueryTileList::CLAIMED : ends;
            }
            writer.commit();
            if (next >= tiles_q) next = 0, ++member;
            if (!first) continue;
            first = false;
            if (KEY_BUFFERS == 1) load_k(at, descending);
            if (CLEARS_KEYS) kv.clear_nonfinite_k(at, number, leader);
            if (CLUSTER_SIZE > 1) kv.load_peer_k(at, number, leader);
        }
        if (!DETERMINISTIC && !FUSED_PREPROCESS) clear_dq_ahead(p, work.tiles());
        if (!DETERMINISTIC && leader) {
            store_word(finished_head(number), bh);
            if (number >= BEHIND) count_finished(number - BEHIND);
        }
    }
    // END to the producer, the consumers and the fused preprocess.
    QueryTileList& list = writer.acquire();
    if (leader) list.b = END;
    writer.commit();
    announce({END, 0, 0}, false);
    if (leader) mbarrier_arrive(kv.k_full(number));
    if (FUSED_PREPROCESS && leader) mbarrier_arrive(base + AT_CLAIMED);
    if (!DETERMINISTIC && leader) {
        mbarrier_wait_backoff(base + AT_DQ_COMPLETE, 0);
        for (unsigned i = number < BEHIND ? 0 : number - BEHIND; i < number; ++i) count_finished(i);
    }
    work.reset(leader);
}
