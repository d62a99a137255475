// The consumer's main loop: 64 rows of a work tile for each warp group, as in FlashAttention-3.
//
// S(n) = Q K(n)^T is issued together with O += P(n-1) V(n-1); the softmax of tile n overlaps with the second product.
// Two warp groups ping-pong: one issues its products while the other takes exponentials. The pipeline does not drain
// between work tiles: S of the next one is issued before the last PV of this one, and its epilogue follows in the same
// block.
//
// A block is a K/V tile seen from a warp group. Three instances of mma_block cover all cases: the steady state (a PV is
// pending, whose V has no ragged end, all rows have a reference, nothing is masked), the general block, and the block
// without a pending PV. Both flags are template arguments, as the compiler serialises wgmmas that are issued
// conditionally.
#pragma once
#include "sm90/affine_score.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/fp16x2.cuh"

// A uniform float that the compiler cannot recompute. Under register pressure it would otherwise do so for each tile,
// in float64; a load from shared memory can happen only once.
DEVICE float pinned(float x, unsigned address) {
    if constexpr (HAS_SCORE || READS_ARRAYS) {
        store_float(address, x);
        __syncwarp();
        return __int_as_float(uniform(load_word(address)));
    }
    return uniform_float(x);
}

struct SoftmaxState {
    float m[2], l[2];          // row reference in base 2, row sum: for each of a lane's rows
    float ref_minus_bias[2];   // affine scores: see find_ref_minus_bias()
    RowStats stats;            // HAS_STATS
    bool has_row_ref = false;  // all rows of the warp have a reference that is likely to hold
};

// How scores of the work tile become exponents.
struct ScorePath {
    bool steady = true;        // positions are in range, and no tile was too large for the polynomial of tanh
    bool tanh_poly_ok = true;  // the same of affine scores with TANH_POLY_SHORT, which then take the device's tanh
    bool bounded = false;      // affine scores: one row reference holds for all tiles
    Head head{};               // what the score modification reads once for a head
    AffineScore affine;        // AFFINE_PER_WORK_TILE
};

struct Accumulator {
    float o[O_REGS];
    unsigned p[P_REGS];
    bool pv_pending = false;  // P waits for its V
    bool open = false;        // O belongs to a work tile whose epilogue is to come
    int accumulate = 0;       // 0: the pending PV starts O
    int valid_keys = 0;       // of the pending tile
};

// What is known of a block while its S becomes P.
struct Block {
    unsigned n;
    int k0;
    bool full;                 // nothing is masked
    bool first_tile;           // of its work tile
    bool affine = false;       // exponents come from accumulators
    bool may_be_high = false;  // the row reference is a guess that may be too high, too
    bool rescales = false;     // the reference has changed: O needs `rescale`
    bool poly_ok = true, in_range = true;
    float sum[2], rescale[2];  // row sums of P; factors on O and l
    RowStats stats;            // HAS_STATS: of the tile

    __device__ __forceinline__ Block(unsigned n, int k0, bool full, bool first_tile)
        : n(n), k0(k0), full(full), first_tile(first_tile) {}
};

struct Consumer {
    const Params& params;
    unsigned base;
    int wg;
    Pipeline<Q_BUFFERS> pipe_q;
    Pipeline<STAGES> pipe_k, pipe_v;
    float scale_log2, scale;
    Accumulator acc;
    float s[S_REGS];
    SoftmaxState softmax;
    ScorePath path;
    FloatTermsState terms;
    WorkTile work_tile;        // of the tile before, until begin_work_tile()
    int number = -1;           // of the work tile that the current tile belongs to, among this CTA's
    bool first_tile = false;   // the current tile begins another work tile
    int steady_desc = NO_DESC; // the descriptor bits of a tile that the steady state takes
    int next_desc;             // tile descriptor, read ahead
    unsigned affine_slot;      // AFFINE_PER_WORK_TILE: this warp's

    __device__ __forceinline__ Consumer(const Params& p, unsigned base, int wg)
        : params(p), base(base), wg(wg), pipe_q(q_pipe(base)), pipe_k(k_pipe(base)), pipe_v(v_pipe(base)),
          scale_log2(pinned(softmax_scale_log2(p), base + AT_SCALES)),
          scale(HAS_SCORE ? pinned((float)p.softmax_scale, base + AT_SCALES + 4) : 1.0f),
          affine_slot(base + AT_AFFINE + AFFINE_BYTES * uniform(threadIdx.x / 32 - 4)) {}

    // --- products ----------------------------------------------------------------------------------------------------

    // S = Q K(n)^T
    __device__ __forceinline__ void issue_qk(unsigned n) {
        const unsigned long long q = descriptor(q_rows(base, number % Q_BUFFERS, wg));
        const unsigned long long k = descriptor(base + at_k(n % STAGES));
        wgmma_fence();
        wgmma_zero_init<0, 0>(s, q, k);
#pragma unroll
        for (int step = 1; step < padded(HEAD_DIM) / 16; ++step)
            product<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
        wgmma_commit();
    }

    // Keys of the pending tile are past the length. There V must not matter: 0 * NaN.
    __device__ __forceinline__ bool is_ragged_v() const {
        return HAS_LENGTHS && !IS_FLOAT32 && acc.valid_keys < BLOCK_K;
    }
    // O += P V(n)
    template <bool UNMASKED>
    __device__ __forceinline__ void issue_pv(unsigned n) {
        const unsigned stage = base + at_v(n % STAGES);
        const unsigned long long v = descriptor(stage, chunk_stride_v(n % STAGES));
        pipe_v.consumer_wait(n);
        if (!UNMASKED && is_ragged_v()) {
            clear_rows<HEAD_DIM_V, BLOCK_K>(stage, acc.valid_keys, chunk_stride_v(n % STAGES));
            named_barrier_sync(WARPGROUP_BARRIER + wg, 128);
        }
        wgmma_fence();
        UNROLL(step, BLOCK_K / 16)
            wgmma_rs<1>(acc.o, acc.p, 4 * step, v + along_columns(step), step > 0 ? 1 : acc.accumulate);
        wgmma_commit();
    }

    __device__ __forceinline__ void finish_pv(unsigned n) {
        wgmma_wait<0>();
        fence_operand(acc.o), fence_operand(acc.p);
        pipe_v.consumer_release(n);
        acc.pv_pending = false;
    }

    template <bool PV_PENDING, bool UNMASKED>
    __device__ __forceinline__ void issue_pv_and_yield(unsigned n) {
        if (PV_PENDING) issue_pv<UNMASKED>(n - 1);
        ping_pong_arrive(wg);
    }

    // --- work tiles --------------------------------------------------------------------------------------------------

    // The work tile before `number`: kept in registers, or read again, which needs none meanwhile. A score modification
    // keeps it, as the compiler otherwise orders the softmax worse.
    __device__ __forceinline__ WorkTile previous_work_tile(const WorkTile& kept) const {
        return HAS_SCORE ? WorkTile{opaque(kept.b), opaque(kept.h), opaque(kept.row0), kept.offset, kept.slot}
                         : read_work_tile(params, base, number - 1, wg);
    }

    // Waits for Q, resets the softmax and chooses the score path.
    __device__ __forceinline__ void begin_work_tile() {
        pipe_q.consumer_wait(number);
        work_tile = read_work_tile(params, base, number, wg);
        softmax.m[0] = softmax.m[1] = softmax.ref_minus_bias[0] = softmax.ref_minus_bias[1] = HIDDEN;
        softmax.l[0] = softmax.l[1] = 0;
        if constexpr (HAS_STATS) softmax.stats = {};
        path.steady = path.tanh_poly_ok = true;
        if constexpr (AFFINE) path.head = head_of(work_tile.b, work_tile.h, params);
        if (AFFINE_PER_WORK_TILE || BOUNDED_SCORES) {
            path.steady = positions_in_range(params, seq_of(params, work_tile).q_position());
            if (path.steady) {
                find_affine(params, work_tile, path.head, 0, scale, path.affine);
                if (AFFINE_PER_WORK_TILE) store_gain(path.affine, affine_slot);
            }
        }
        if constexpr (BOUNDED_SCORES)
            softmax.has_row_ref = path.bounded = path.steady && bound_scores(path.affine, softmax.m);
        terms.begin_work_tile(params, work_tile);
    }

    // Of tile n, in whose stage of K they lie.
    template <bool UNMASKED>
    __device__ __forceinline__ void load_dense(unsigned n, DenseFragments& dense) const {
        const unsigned stage = n % STAGES, rows = base + wg * 64 * CHUNK_ROW;
        dense.bias = rows + AT_BIAS + stage * BiasTile::SIZE;
        if constexpr (MASK_TILES && !UNMASKED) dense.mask.load(rows + AT_MASK + stage * MaskTile::SIZE);
    }

    // --- softmax -----------------------------------------------------------------------------------------------------

    template <bool STEEP, bool BOUNDED>
    __device__ __forceinline__ bool speculate_affine_as(Block& block, const AffineScore& affine) {
        return affine_softmax<STEEP, BOUNDED>(s, softmax.m, block.sum, affine, block.may_be_high, block.poly_ok);
    }
    __device__ __forceinline__ bool speculate_affine(Block& block, const AffineScore& affine) {
        if constexpr (BOUNDED_SCORES)
            if (path.bounded)
                return path.tanh_poly_ok ? speculate_affine_as<false, true>(block, affine)
                                         : speculate_affine_as<true, true>(block, affine);
        if constexpr (CAPPED && TANH_POLY_SHORT)
            if (!path.tanh_poly_ok) return speculate_affine_as<true, false>(block, affine);
        return speculate_affine_as<false, false>(block, affine);
    }

    // Whether exponents of this block come from accumulators, and how: by `affine`.
    template <bool UNMASKED>
    __device__ __forceinline__ void choose_affine(Block& block, AffineScore& affine) {
        block.affine = AFFINE && (block.full || path.bounded) && path.steady &&
                       (UNMASKED || AFFINE_PER_WORK_TILE ||
                        positions_in_range(params, seq_of(params, work_tile).q_position()));
        if (AFFINE && !AFFINE_PER_WORK_TILE && block.affine) {
            block.affine = find_affine(params, work_tile, path.head, block.k0, scale, affine);
            if (SLOPED && block.affine && (UNMASKED || !first_tile) &&
                __any_sync(~0u, row_ref_lags(affine, softmax.m, softmax.ref_minus_bias))) {
                raise_row_ref(affine, softmax.m, softmax.ref_minus_bias, block.rescale);
                softmax.l[0] *= block.rescale[0], softmax.l[1] *= block.rescale[1];
                block.may_be_high = block.rescales = true;
            }
        }
    }

    // --- blocks ------------------------------------------------------------------------------------------------------

    // S as the online softmax takes it: modified as its graph says. After a misprediction, `speculative`, exponentials
    // have overwritten S, which is computed again.
    template <bool UNMASKED>
    __device__ __forceinline__ void prepare_online(const Block& block, bool speculative, const TileScales& scales,
                                                   const DenseFragments& dense) {
        if (speculative) {
            recompute_qk(s, q_rows(base, number % Q_BUFFERS, wg), base + at_k(block.n % STAGES));
            scale_scores(s, scales);
            if (UNMASKED || block.affine)
                (AFFINE && TANH_POLY_SHORT ? path.tanh_poly_ok : path.steady) &= __all_sync(~0u, block.poly_ok);
        }
        if (AFFINE && (UNMASKED || (block.affine && block.full)))
            modify_in_range<false>(params, work_tile, work_tile.offset, s, block.k0, scale, dense);
        else if (speculative || block.affine) modify_tile(params, work_tile, block.full, s, block.k0, scale, dense);
    }

    template <bool PV_PENDING, bool UNMASKED>
    __device__ __forceinline__ void mma_block(unsigned n, bool full, int k0) {
        const WorkTile previous = work_tile;
        const float m_before[2] = {softmax.m[0], softmax.m[1]}, l_before[2] = {softmax.l[0], softmax.l[1]};
        const RowStats stats_before = softmax.stats;
        Block block(n, k0, full, !UNMASKED && first_tile);
        if (!UNMASKED && first_tile) begin_work_tile();
        const TileScales scales = tile_scales(params, work_tile, terms.q_scale, k0 / BLOCK_K);

        ping_pong_sync(wg);
        issue_qk(n);
        AffineScore affine;
        if (AFFINE_PER_WORK_TILE) affine = path.affine, load_gain(affine, affine_slot);
        if (!AFFINE_BEFORE_PV) issue_pv_and_yield<PV_PENDING, UNMASKED>(n);
        block.may_be_high = !UNMASKED && first_tile;
        choose_affine<UNMASKED>(block, affine);
        if (AFFINE_BEFORE_PV) issue_pv_and_yield<PV_PENDING, UNMASKED>(n);
        wgmma_wait_loads_pass<PV_PENDING>();  // S is complete, PV may be in flight
        fence_operand(s);
        DenseFragments dense;
        load_dense<UNMASKED>(n, dense);

        // S to P. No function of its own: with one, the compiler copies m on the way.
        float(&m)[2] = softmax.m, (&l)[2] = softmax.l;
        const float factor[2] = {score_factor(scales, 0, scale_log2), score_factor(scales, 1, scale_log2)};
        scale_scores(s, scales);
        terms.begin_tile(scales, !UNMASKED && first_tile, m, l, softmax.ref_minus_bias);
        if constexpr (HAS_SCORE && !AFFINE && UNMASKED)
            modify_in_range<false>(params, work_tile, work_tile.offset, s, k0, scale, dense);
        else if (!UNMASKED && !block.affine) block.in_range = modify_tile(params, work_tile, full, s, k0, scale, dense);
        if (!UNMASKED && first_tile && !path.bounded)
            softmax.has_row_ref =
                AFFINE && block.affine ? guess_row_ref_affine(s, m, affine) : guess_row_ref(s, m, factor);
        constexpr bool FINITE = UNMASKED && !HAS_SCORE;
        const bool speculative = UNMASKED ? block.affine || !AFFINE : softmax.has_row_ref;
        if (!speculative || !(AFFINE && block.affine ? speculate_affine(block, affine)
                                                     : speculative_softmax<FINITE>(s, m, block.sum, factor,
                                                                                   block.stats))) {
            prepare_online<UNMASKED>(block, speculative, scales, dense);
            if (!UNMASKED && first_tile && !path.bounded) {
                m[0] = m[1] = HIDDEN;
            } else if (AFFINE && SLOPED && block.may_be_high) {  // the reference before it was raised
                m[0] = m_before[0], m[1] = m_before[1], l[0] = l_before[0], l[1] = l_before[1];
                terms.restore(m, l);
            }
            const float m_old[2] = {m[0], m[1]};
            online_softmax(s, m, block.sum, block.rescale, factor, block.stats);
            if constexpr (HAS_STATS) rescale_stats(softmax.stats, m_old, m, l, block.rescale);
            l[0] *= block.rescale[0], l[1] *= block.rescale[1];
            terms.refuse_great(m, l);
            const bool grows = !block.first_tile && !(AFFINE && SLOPED) &&
                               (block.rescale[0] < MIN_RESCALE || block.rescale[1] < MIN_RESCALE);
            softmax.has_row_ref = path.bounded || __all_sync(~0u, are_row_refs(m) && !grows);
            if (AFFINE && SLOPED) softmax.ref_minus_bias[0] = softmax.ref_minus_bias[1] = HIDDEN;
            block.rescales = true;
            if (UNMASKED && !is_settled()) steady_desc = NO_DESC;
        } else if (BOUNDED_SCORES && !UNMASKED && block.affine && !full) {
            modify_in_range<true, true>(params, work_tile, work_tile.offset, s, k0, scale, dense);  // masks P
        }
        terms.end_tile(m);
        if (AFFINE && SLOPED && block.affine) find_ref_minus_bias(affine, m, softmax.ref_minus_bias);
        if (!block.in_range) path.steady = false;
        add_row_sums(l, block.sum, scales);
        if constexpr (HAS_STATS) add_stats(softmax.stats, block.stats);

        // The dependence keeps exponentials from being scheduled behind the next wait.
        pipe_k.consumer_release(UNMASKED ? n : n + depends_on(block.sum[0]) + depends_on(block.sum[1]));
        if (PV_PENDING) finish_pv(n - 1);
        if (!UNMASKED && first_tile) {
            if (PV_PENDING && Q_BUFFERS > 1)
                epilogue(params, previous_work_tile(previous), base, number - 1, m_before, l_before, stats_before,
                         acc.o, wg);
        } else if (block.rescales || terms.rescales()) {
            if (IS_FLOAT32 && !block.rescales) block.rescale[0] = block.rescale[1] = 1;
            UNROLL(i, O_REGS)
                acc.o[i] *= IS_FLOAT32 ? block.rescale[i / 2 % 2] * terms.change_factor : block.rescale[i / 2 % 2];
        }
        if constexpr (HAS_DROPOUT) dropout_tile(params, work_tile, s, k0);
        next_desc = wait_tile_desc(base, pipe_k, n + 1);  // its latency is hidden behind packing P
        UNROLL(i, P_REGS) acc.p[i] = pack(s[2 * i], s[2 * i + 1]);
        acc.pv_pending = acc.open = true, acc.accumulate = UNMASKED || !first_tile, first_tile = false;
        if (UNMASKED) return;
        if (HAS_LENGTHS) acc.valid_keys = seq_of(params, work_tile).n_k() - k0;
        steady_desc = is_settled() ? FULL << 2 * wg : NO_DESC;
    }

    // Whether FULL tiles may follow in the steady state.
    __device__ __forceinline__ bool is_settled() const {
        return softmax.has_row_ref && path.steady && !is_ragged_v();
    }

    // A tile that is EMPTY for this warp group, but not for another one.
    __device__ __forceinline__ void skip_block(unsigned n) {
        ping_pong_sync(wg);
        ping_pong_arrive(wg);
        pipe_k.consumer_release(n);
        pipe_v.consumer_wait(n);
        pipe_v.consumer_release(n);
        next_desc = wait_tile_desc(base, pipe_k, n + 1);
    }

    // One comparison decides: is_settled() is part of steady_desc. With a score modification it is asked each time, as
    // the compiler otherwise orders the softmax worse.
    __device__ __forceinline__ bool is_steady(int tile_desc) const {
        const int bits = tile_desc & (FIRST_TILE | 3 << 2 * wg);
        return HAS_SCORE ? acc.pv_pending && is_settled() && bits == FULL << 2 * wg : bits == steady_desc;
    }

    __device__ __forceinline__ void run() {
        next_desc = wait_tile_desc(base, pipe_k, 0);
        if (PING_PONG && wg == MMA_WARPGROUPS - 1) ping_pong_arrive(wg);
#pragma unroll 1
        for (unsigned n = 0;; ++n) {
            const int tile_desc = uniform(next_desc);
            const int k0 = (tile_desc >> 8) * BLOCK_K;
            if (is_steady(tile_desc)) {
                mma_block<true, true>(n, true, k0);
                continue;
            }
            if (tile_desc & FIRST_TILE) first_tile = true, softmax.has_row_ref = false, ++number;  // also END
            const int state = tile_desc == END ? (int)EMPTY : tile_desc >> 2 * wg & 3;
            // A pending PV is issued by itself where no S goes with it, or where the next Q needs this one's only
            // buffer.
            if (acc.pv_pending && (state == EMPTY || (Q_BUFFERS == 1 && first_tile))) {
                issue_pv<false>(n - 1), finish_pv(n - 1);
                steady_desc = NO_DESC;
            }
            if (first_tile && acc.open && !acc.pv_pending) {
                epilogue(params, previous_work_tile(work_tile), base, number - 1, softmax.m, softmax.l, softmax.stats,
                         acc.o, wg);
                acc.open = false;
            }
            if (tile_desc == END) break;
            if (state == EMPTY) skip_block(n);
            else if (acc.pv_pending) mma_block<true, false>(n, state == FULL, k0);
            else mma_block<false, false>(n, state == FULL, k0);
        }
    }
};
