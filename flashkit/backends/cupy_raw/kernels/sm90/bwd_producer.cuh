// The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
// deltas and the tiles of a bias and of a mask, and V with the first tile of a work tile; and the scheduler warp.
#pragma once
#include "sm90/dq_accum.cuh"

// --- non-finite rows and keys ----------------------------------------------------------------------------------------
//
// Rows and keys of Hopper's backward pass that are not finite, or past the end, are cleared in shared memory before
// they are multiplied (bwd_layout.cuh, MAY_HIDE).

// Zeros in those rows of a tile that `cleared` names, by one warp.
template <int ROWS, int TILE_CHUNKS, typename F>
DEVICE void clear_rows_where(unsigned tile, F cleared) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < ROWS * 8; i += 32)
        if (cleared(i / 8))
            UNROLL(c, TILE_CHUNKS) clear_vec(tile + (c * ROWS + i / 8) * CHUNK_ROW + i % 8 * VEC_BYTES);
}

// Of 16 bytes of elements: whether one is not finite. Its exponent is all ones, so one more overflows into the sign.
DEVICE bool any_nonfinite(const uint4& x) {
    constexpr unsigned ONES = STORAGE == BFLOAT16 ? 0x7f807f80u : 0x7c007c00u, ONE = ONES & -ONES & 0xffff;
    const unsigned words[4] = {x.x, x.y, x.z, x.w};
    unsigned signs = 0;
    UNROLL(e, 4) signs |= (words[e] & ONES) + (ONE | ONE << 16);
    return signs & 0x80008000u;
}

// Clears the keys of a tile that are not finite, and those past the first `existing`. bits: where a bit for each of the
// former goes, or 0.
template <int TILE_CHUNKS>
DEVICE void clear_nonfinite_keys(unsigned tile, int existing, unsigned bits) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = 0; word < NONFINITE_WORDS; ++word) {
        unsigned nonfinite = 0;  // of 32 keys; a lane reads 16 bytes of every fourth
        if constexpr (MAY_HIDE) {
            UNROLL(i, 8) {
                const int row = 32 * word + 4 * i + lane / 8;
                bool found = false;
                UNROLL(c, TILE_CHUNKS)
                    found |= any_nonfinite(load_vec(tile + (c * CTA_KEYS + row) * CHUNK_ROW + lane % 8 * VEC_BYTES));
                const unsigned ballot = __ballot_sync(~0u, found);
                UNROLL(r, 4) nonfinite |= (ballot >> 8 * r & 255) != 0 ? 1u << 4 * i + r : 0;
            }
        }
        if (bits != 0 && lane == 0) store_word(bits + 4 * word, (int)nonfinite);
        if (nonfinite != 0 || existing < 32 * word + 32)
            clear_rows_where<CTA_KEYS, TILE_CHUNKS>(tile, [&](int row) {
                return row / 32 == word && ((nonfinite >> row % 32 & 1) || row >= existing);
            });
    }
    fence_proxy_async();
    __syncwarp();
}

// Clears the rows of a tile of Q and of dO whose log-sum-exp is not finite. lse: its address in shared memory.
DEVICE void clear_nonfinite_rows(unsigned q, unsigned dout, unsigned lse) {
    const auto is_nonfinite = [&](int row) { return !is_finite(load_float(lse + 4 * row)); };
    clear_rows_where<BLOCK_Q, CHUNKS>(q, is_nonfinite);
    clear_rows_where<BLOCK_Q, CHUNKS_V>(dout, is_nonfinite);
    fence_proxy_async();
    __syncwarp();
}

// --- K and V ---------------------------------------------------------------------------------------------------------
//
// Where K and V of a work tile come from: dense tensors, by TMA.

// The scheduler warp loads K, the producer warp V. Keys that are to be cleared arrive at a barrier of their own first.
struct KvSource {
    const Params& p;
    const TensorMap &k_map, &v_map;
    unsigned base;

    __device__ __forceinline__ unsigned k_tile(unsigned number) const {
        return base + AT_K + k_pipe(base).stage(number) * BYTES_K;
    }
    __device__ __forceinline__ unsigned k_full(unsigned number) const {
        return k_pipe(base).full + 8 * k_pipe(base).stage(number);
    }
    __device__ __forceinline__ unsigned k_loaded(unsigned number) const {
        return CLEARS_KEYS ? base + AT_K_LOADED + 8 * k_pipe(base).stage(number) : k_full(number);
    }
    // K of the CTA's keys, in the buffer of work tile `number`.
    __device__ __forceinline__ void load_k(const WorkTile& at, unsigned number) const {
        if (elect_one()) {
            mbarrier_arrive_expect_tx(k_loaded(number), BYTES_K);
            load_tile<1, CHUNKS, CTA_KEYS>(k_tile(number), k_map, kv_box(p, at.b, at.head, first_cta_key(at)),
                                           k_loaded(number));
        }
    }
    __device__ __forceinline__ void clear_nonfinite_k(const WorkTile& at, unsigned number, bool leader) const {
        mbarrier_wait(k_loaded(number), number / KEY_BUFFERS & 1);
        clear_nonfinite_keys<CHUNKS>(k_tile(number), (int)seq_info(p, at.b).n_k - first_cta_key(at),
                                     nonfinite_keys_slot(base, number));
        if (leader) mbarrier_arrive(k_full(number));
    }

    // K of the peer CTA's keys, in the columns of dQ that this CTA computes.
    __device__ __forceinline__ void load_peer_k(const WorkTile& at, unsigned number, bool leader) const {
        const auto pipe = peer_k_pipe(base);
        const unsigned loaded = CLEARS_KEYS ? base + AT_PEER_K_LOADED : pipe.full;
        const int rank = cta_rank(), from = at.k0 + CTA_KEYS * (1 - rank);
        pipe.producer_acquire(number);
        if (elect_one()) {
            mbarrier_arrive_expect_tx(loaded, BYTES_PEER_K);
            load_tile<1, DQ_CHUNKS, CTA_KEYS>(base + AT_PEER_K, k_map, kv_box(p, at.b, at.head, from), loaded,
                                              64 * (CHUNKS / 2) * rank);
        }
        if constexpr (CLEARS_KEYS) {
            mbarrier_wait(loaded, number & 1);
            clear_nonfinite_keys<DQ_CHUNKS>(base + AT_PEER_K, (int)seq_info(p, at.b).n_k - from, 0);
            if (leader) mbarrier_arrive(pipe.full);
        }
    }

    // V of the CTA's keys, by one thread; h: a query head. Nothing is cleared: compute_ds drops what masked keys give.
    __device__ __forceinline__ void load_v(int b, int h, int k0, unsigned number) const {
        const auto pipe = v_pipe(base);
        pipe.producer_acquire(number);
        mbarrier_arrive_expect_tx(pipe.full, BYTES_V);
        load_tile<1, CHUNKS_V, CTA_KEYS>(base + AT_V, v_map, kv_box(p, b, h / GQA_GROUP, first_cta_key({b, h, k0})),
                                         pipe.full);
    }
};

// --- Q, dO and V -----------------------------------------------------------------------------------------------------

DEVICE void producer(const Params& p, const KvSource& kv, const TensorMap& q_map, const TensorMap& dout_map,
                     const TensorMap& bias_map, const TensorMap& mask_map, unsigned base, const QueryTileList* lists) {
    const auto pipe_q = q_pipe(base);
    const auto pipe_dout = dout_pipe(base);
    const auto pipe_dense = dense_pipe(base);
    const auto pipe_list = list_pipe(base);
    const bool leader = threadIdx.x == 0;
    unsigned n = 0, number = 0, nonfinite_tiles = 0;  // query tiles, work tiles, query tiles to be cleared so far
    bool first = true;
    auto load_q_and_dout = [&](int b, int h, int k0, int index, int tile, unsigned states, bool last) {
        const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
        const unsigned q_full = pipe_q.full + 8 * stage, dout_full = pipe_dout.full + 8 * dout_stage;
        // Rows that are not finite are cleared between loading and committing the stages.
        const bool nonfinite = CLEARS_ROWS && (states & TileDesc::NONFINITE_ROWS);
        const unsigned q_loaded = nonfinite ? base + AT_ROWS_LOADED : q_full;
        const unsigned dout_loaded = nonfinite ? base + AT_ROWS_LOADED : dout_full;
        const unsigned q = base + AT_Q + stage * BYTES_Q, dout = base + AT_DOUT + dout_stage * BYTES_DOUT;
        const unsigned lse = base + AT_LSE + stage * BYTES_ROW_STATS;
        if (elect_one()) {
            const float *lse_source = static_cast<const float*>(p.bwd_lse.data) + (long long)index * BLOCK_Q;
            const float *delta_source = static_cast<const float*>(p.delta.data) + (long long)index * BLOCK_Q;
            const Box rows = q_box(p, b, h, tile * BLOCK_Q);
            pipe_q.producer_acquire(n);
            const unsigned desc = tile_desc_slot(base, n);
            store_word(desc, tile << 8 | (last ? TileDesc::LAST_TILE : 0) | states);
            store_word(desc + TileDesc::HEAD, h), store_word(desc + TileDesc::INDEX, index);
            mbarrier_arrive_expect_tx(q_loaded, BYTES_Q + BYTES_ROW_STATS +
                                                    (nonfinite ? BYTES_DOUT + BYTES_ROW_STATS : 0));
            load_tile<1, CHUNKS, BLOCK_Q>(q, q_map, rows, q_loaded);
            bulk_load(lse, lse_source, BYTES_ROW_STATS, q_loaded);
            if (first) kv.load_v(b, h, k0, number);
            pipe_dout.producer_acquire(n);
            if (!nonfinite) mbarrier_arrive_expect_tx(dout_loaded, BYTES_DOUT + BYTES_ROW_STATS);
            load_tile<1, CHUNKS_V, BLOCK_Q>(dout, dout_map, rows, dout_loaded);
            bulk_load(base + AT_DELTA + dout_stage * BYTES_ROW_STATS, delta_source, BYTES_ROW_STATS, dout_loaded);
            if constexpr (BYTES_DENSE > 0) {
                const unsigned stage = n % DENSE_STAGES, full = pipe_dense.full + 8 * stage;
                pipe_dense.producer_acquire(n);
                mbarrier_arrive_expect_tx(full, BYTES_DENSE);
                BiasTile::load(base + AT_BIAS + stage * BiasTile::SIZE, bias_map, b, h, tile * BLOCK_Q, k0, full);
                MaskTile::load(base + AT_MASK + stage * MaskTile::SIZE, mask_map, b, h, tile * BLOCK_Q, k0, full);
            }
        }
        if (nonfinite) {
            __syncwarp();
            mbarrier_wait(base + AT_ROWS_LOADED, nonfinite_tiles++ & 1);
            clear_nonfinite_rows(q, dout, lse);
            if (leader) mbarrier_arrive(q_full), mbarrier_arrive(dout_full);
        }
        first = false, ++n;
    };
    // A query tile is held back until it is known whether it is the work tile's last.
    int held = 0, held_head = 0, held_index = 0;
    unsigned held_states = 0;
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        pipe_list.consumer_wait(c);
        const QueryTileList& list = lists[c % NUM_LISTS];
        const int b = list.b, h = list.h, k0 = list.k0, count = list.count, first_index = list.first_index;
        if (b == END) break;
        const bool claims = !IS_PACKED || list.ends != QueryTileList::CLAIMED;
        const int claim_at = list.ends && claims ? (count > CLAIM_AHEAD ? count - CLAIM_AHEAD : 0) : -1;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (!DETERMINISTIC && i == claim_at && leader) mbarrier_arrive(base + AT_CLAIM);
            if (held_states != 0) load_q_and_dout(b, held_head, k0, held_index, held, held_states, false);
            held = list.entry[i] >> 8, held_states = list.entry[i] & 255;
            held_head = h, held_index = first_index + held;
        }
        if (list.ends) {
            // Consumers expect a query tile in each work tile: where there is none, one whose pairs are all masked. Its
            // rows may be non-finite.
            if (held_states == 0) {
                held = 0, held_head = h, held_index = first_index;
                held_states = PARTIAL * 5 | TileDesc::NO_VISIBLE_PAIR | (CLEARS_ROWS ? TileDesc::NONFINITE_ROWS : 0);
            }
            load_q_and_dout(b, held_head, k0, held_index, held, held_states, true);
            held_states = 0, first = true, ++number;
            // DETERMINISTIC: a CTA that claimed early, while it waits for its turn, would keep others waiting for its
            // next turns.
            if (claims && (DETERMINISTIC || claim_at == count) && leader) mbarrier_arrive(base + AT_CLAIM);
        }
        __syncwarp();
        if (leader) mbarrier_arrive(pipe_list.empty_barrier(c));
    }
}

// --- the scheduler warp ---------------------------------------------------------------------------------------------
//
// It claims work tiles, lists the query tiles that see them, and loads their K. It runs ahead of the producer, as
// classifying 32 query tiles may take as long as the products of a few.

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
