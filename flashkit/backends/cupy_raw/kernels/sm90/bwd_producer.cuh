// The producer warp of Hopper's backward pass: loads Q and dO of each query tile with their rows' log-sum-exps and
// deltas and the tiles of a bias and of a mask, and V with the first tile of a work tile.
#pragma once
#include "sm90/bwd_layout.cuh"

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
