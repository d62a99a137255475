// Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on tensor cores by mma.sync. P is
// recomputed from the log-sum-exp; five matrix products.
//
// A CTA of WARPS warps takes BLOCK_K keys of one key/value head and loops over the query tiles that see them, of all
// query heads that share it.
//
//     K, V           [BLOCK_K][..]           shared memory
//     Q, dO          [2][BLOCK_Q][..]        shared memory, double-buffered, with bwd_lse and delta of their rows
//     P, dS          [BLOCK_Q][BLOCK_K]      computed in registers, in shared memory for the products that follow
//     dK, dV         [BLOCK_K][..]           registers
//     dQ             [BLOCK_Q][HEAD_DIM]     registers, then added to float32 accumulators in global memory
//
// The warps share each product in a grid of its own: WARPS_S of them along the queries of S and dP, WARPS_KV along the
// keys of dK and dV, WARPS_Q along the queries of dQ, the others along the second axis.
//
// dQ is summed over CTAs. They add to a query tile in a fixed order, so the result is deterministic (bwd_layout.cuh).
// CTAs take their work tiles in that order, so a CTA only ever waits for a resident one. p.heads_per_l2_group heads are
// worked on at the same time: their operands and dQ accumulators stay in the L2 cache, and under a causal mask, where
// CTAs wait for accumulators, that matters most.
//
// Constants of the head: BLOCK_Q, BLOCK_K, WARPS, WARPS_S, WARPS_KV, WARPS_Q, BLOCKS_PER_SM, POSITIONS, FAR.
// Shared memory (cupy_raw/sm80.py: Sm80BackwardTile.smem): K at 0, AT_V, AT_QDO, AT_P, AT_DS, AT_TILE_LIST; within a
// stage of QDO, of STAGE_BYTES bytes, Q at 0, AT_STAGE_DOUT, AT_STAGE_ROWS. Measurements: docs/notes/ampere.md.
#include "sm80/bwd_layout.cuh"
#include "sm80/bwd_softmax.cuh"
#include "sm80/bwd_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_backward(KERNEL_PARAMS) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ unsigned broadcast;
    TileList& list = *reinterpret_cast<TileList*>(shared + AT_TILE_LIST);
    const unsigned begin = smem_address(shared), base = HAS_MASK && HEAD_DIM <= 64 ? opaque(begin) : begin & 0xffffff;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    BackwardTileScheduler scheduler;
    const TileCoord coord = scheduler.initial(p, &broadcast);
    const int heads = scheduler.heads;
    const bool descending = scheduler.descending;
    const auto known = [](int x) { return (int)uniform(x); };  // in a uniform register
    const SeqTile key_tile = k_tile(p, coord.bh / heads, coord.tile, BLOCK_K);
    const int tile_k = known((int)key_tile.tile), b = known((int)key_tile.b);
    const int head = known(coord.bh % heads), n_k = known((int)seq_info(p, b).n_k);
    const int add_after = descending ? 0 : tile_k + 1;  // tiles add_after ... add_end - 1 add to dQ before this one
    const int add_end = descending ? tile_k : (n_k + BLOCK_K - 1) / BLOCK_K;
    WorkTile at{b, head * GQA_GROUP, tile_k * BLOCK_K, 0, (int)seq_info(p, b).n_q, n_k, seq_info(p, b).q_position};
    at.k1 = at.k0 + BLOCK_K < n_k ? at.k0 + BLOCK_K : n_k;
    const int tiles_q = (at.n_q + BLOCK_Q - 1) / BLOCK_Q;

    float dk[KV_TILES][K_COLUMNS][4], dv[KV_TILES][V_COLUMNS][4];
    clear(dk);
    clear(dv);
    ValueSums sums;

    if (at.k0 < n_k) {
        if (HAS_MASK) {  // query tiles that see none of these keys do not wait for this CTA
            for (int h = at.h; h < at.h + GQA_GROUP; ++h)
                for (int tile = threadIdx.x; tile < tiles_q; tile += THREADS) {
                    const int end = tile * BLOCK_Q + BLOCK_Q < at.n_q ? tile * BLOCK_Q + BLOCK_Q : at.n_q;
                    if (tile_state(p, b, h, at.q_position, tile * BLOCK_Q, end, at.k0, at.k1) == EMPTY)
                        semaphore_skip(semaphore_at(p, b, h, tile), tile_k);
                }
        }
        const Rows<> k(p.k, b, head, seq_info(p, b).key_offset), v(p.v, b, head, seq_info(p, b).key_offset);
        load_tile<BLOCK_K, HEAD_DIM, THREADS>(k, at.k0, n_k, base);
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS>(v, at.k0, n_k, base + AT_V);
        cp_async_commit();

#pragma unroll 1
        for (at.h = head * GQA_GROUP; at.h < (head + 1) * GQA_GROUP; ++at.h) {
            const long long row_offset = seq_info(p, b).row_offset;
            const Rows<> q(p.q, b, at.h, row_offset), dout(p.dout, b, at.h, row_offset);
            if (threadIdx.x == 0) list.next = 0;
            if (HAS_VALUES) sums.enter(b, at.h, p);
            int previous = -1;  // the query tile whose dQ this CTA added to last
#pragma unroll 1
            while (fill<BLOCK_Q, false, 1>(list, p, b, at.h, at.k0, at.k1, 0, tiles_q, at.n_q, descending)) {
                const int count = list.count;
                const auto entry_of = [&](int i) { return (int)load_word(base + AT_TILE_LIST + 4 * i); };
                const auto tile_of = [&](int i) { return TileList::tile(entry_of(i)); };
                const auto row_of = [&](int i) { return tile_of(i) * BLOCK_Q; };
                const auto stage_of = [&](int i) { return base + AT_QDO + i % 2 * STAGE_BYTES; };
                const auto load_rows = [&](int row0, unsigned stage, bool wanted) {  // bwd_lse, then delta
                    const bool first = threadIdx.x < BLOCK_Q / 4;
                    const float* rows = row_at<const float>(first ? p.bwd_lse : p.delta, b, at.h,
                                                           stats_row(p, b, row0));
                    cp_async(stage + AT_STAGE_ROWS + threadIdx.x * 16, rows + threadIdx.x % (BLOCK_Q / 4) * 4, 0, 1,
                               wanted && threadIdx.x < BLOCK_Q / 2);
                };
                load_tile<BLOCK_Q, HEAD_DIM, THREADS>(q, row_of(0), at.n_q, stage_of(0));
                load_tile<BLOCK_Q, HEAD_DIM_V, THREADS>(dout, row_of(0), at.n_q, stage_of(0) + AT_STAGE_DOUT);
                load_rows(row_of(0), stage_of(0), true);
                cp_async_commit();
#pragma unroll 1
                for (int i = 0; i < count; ++i) {
                    const int tile = tile_of(i), row0 = tile * BLOCK_Q;
                    const bool full = TileList::full(entry_of(i));
                    const unsigned stage = stage_of(i), next = stage_of(i + 1);
                    cp_async_wait<0>();
                    __syncthreads();  // all threads see the tile and have finished the previous one
                    const bool more = i + 1 < count;
                    const int next_row0 = more ? row_of(i + 1) : 0;
                    TileCopy<BLOCK_Q, HEAD_DIM, THREADS> copy_q;
                    TileCopy<BLOCK_Q, HEAD_DIM_V, THREADS> copy_dout;
                    const bool copied = more && copy_q.can(q) && copy_dout.can(dout);
                    if (more && !copied) {
                        copy_q.store(q, next_row0, at.n_q, next);
                        copy_dout.store(dout, next_row0, at.n_q, next + AT_STAGE_DOUT);
                    }
                    if (!COPY_DURING_MMA) {
                        copy_q.start(q, next_row0, at.n_q, next, copied);
                        copy_q.copy(0, 1);
                        copy_dout.start(dout, next_row0, at.n_q, next + AT_STAGE_DOUT, copied);
                        copy_dout.copy(0, 1);
                        load_rows(next_row0, next, more);
                        cp_async_commit();
                    }
                    const auto row_value = [&](int i) {
                        return __uint_as_float(load_word(stage + AT_STAGE_ROWS + 4 * i));
                    };
                    float bwd_lse[S_TILES][2], delta[S_TILES][2];
                    UNROLL(j, S_TILES)
                        UNROLL(half, 2)
                            bwd_lse[j][half] = row_value(at.row(j, half)),
                            delta[j][half] = row_value(BLOCK_Q + at.row(j, half));

                    float s[S_TILES][S_KEYS][4], dp[S_TILES][S_KEYS][4], before[S_TILES][S_KEYS][4];
                    const int warp_row = warp / (WARPS / WARPS_S) * 16 * S_TILES;
                    const int warp_key = warp % (WARPS / WARPS_S) * 8 * S_KEYS;
                    clear(s);
                    gemm_nt<HEAD_DIM>(s, stage + warp_row * PITCH, base + warp_key * PITCH, [&](int k, int steps) {
                        if (COPY_DURING_MMA && k == 0) copy_q.start(q, next_row0, at.n_q, next, copied);
                        if (COPY_DURING_MMA) copy_q.copy(k, steps);
                    });
                    bool plain = (!HAS_SCORE || AFFINE) && full && at.k0 + BLOCK_K <= n_k;
                    AffineScore affine[S_TILES][2];
                    if constexpr (AFFINE)
                        plain = plain && at.narrow() &&
                                find_affine<BLOCK_K, 16 * S_TILES, 1>(
                                    p, b, at.h, at.q_position, at.n_q, row0 + warp_row, at.k0, at.key(0), affine,
                                    [&](int i, int half) { return row0 + at.row(i, half); });
                    if constexpr (HAS_SCORE) {
                        if (plain) recompute_p<true>(p, at, s, bwd_lse, affine, row0, base + AT_P, before);
                        else if (at.narrow()) recompute_p<false>(p, at, s, bwd_lse, affine, row0, base + AT_P, before);
                        else recompute_p<false, long long>(p, at, s, bwd_lse, affine, row0, base + AT_P, before);
                    } else {
                        if (!plain) mask_tile(p, at, s, row0);
                        recompute_p<true>(p, at, s, bwd_lse, affine, row0, base + AT_P, before);
                    }
                    clear(dp);
                    gemm_nt<HEAD_DIM_V>(
                        dp, stage + AT_STAGE_DOUT + warp_row * PITCH_V, base + AT_V + warp_key * PITCH_V,
                        [&](int k, int steps) {
                            if (COPY_DURING_MMA && k == 0)
                                copy_dout.start(dout, next_row0, at.n_q, next + AT_STAGE_DOUT, copied);
                            if (COPY_DURING_MMA) copy_dout.copy(k, steps);
                            if (COPY_DURING_MMA && k == steps - 1) load_rows(next_row0, next, more);
                        });
                    if (COPY_DURING_MMA) cp_async_commit();
                    if (!HAS_VALUES || at.narrow())
                        compute_ds<int>(p, at, s, dp, delta, row0, base + AT_DS, before, sums);
                    else compute_ds<long long>(p, at, s, dp, delta, row0, base + AT_DS, before, sums);
                    __syncthreads();  // all threads see P and dS

                    // The additions to the previous tile have completed, so the release hardly waits.
                    if (previous >= 0 && threadIdx.x == THREADS - 1)
                        semaphore_release(semaphore_at(p, b, at.h, previous), tile_k);
                    previous = tile;
                    const unsigned* semaphore = semaphore_at(p, b, at.h, tile);
                    unsigned bits = 0;  // of the semaphore, read ahead of their use
                    if ((add_after / 32 + lane) * 32 < add_end)
                        bits = semaphore_load(semaphore + add_after / 32 + lane);
                    // The additions to dQ are interleaved with the next products: many at a time fill the memory queue.
                    float dq[Q_TILES][Q_COLUMNS][4];
                    const auto compute_dq = [&] {
                        clear(dq);
                        gemm_nn<BLOCK_K / STEP, false, PITCH_S, HEAD_DIM>(
                            dq, base + AT_DS + warp / (WARPS / WARPS_Q) * 16 * Q_TILES * PITCH_S, base,
                            warp % (WARPS / WARPS_Q));
                        semaphore_wait(semaphore, bits, add_after, add_end);
                    };
                    float* dq_accum = row_at<float>(p.dq_accum, b, at.h, q_tile_number(p, b, tile, BLOCK_Q)) +
                                      warp * Q_TILES * Q_COLUMNS * 128 + lane * 4;
                    const auto add_dq = [&](int k, int steps) {
                        UNROLL(j, Q_TILES * Q_COLUMNS)
                            if (j * steps / (Q_TILES * Q_COLUMNS) == k)
                                reduce_add(dq_accum + j * 128, dq[j / Q_COLUMNS][j % Q_COLUMNS]);
                    };
                    const int key_of_warp = warp / (WARPS / WARPS_KV) * 16 * KV_TILES;
                    const int column = warp % (WARPS / WARPS_KV);
                    if constexpr (DQ_FIRST) compute_dq();
                    gemm_nn<BLOCK_Q / STEP, true, PITCH_S, HEAD_DIM_V>(
                        dv, base + AT_P + key_of_warp * SIZE, stage + AT_STAGE_DOUT, column,
                        [&](int k, int steps) {
                            if constexpr (DQ_FIRST) add_dq(k, DQ_WITH_DV ? steps : 2 * steps);
                        });
                    if constexpr (!DQ_FIRST) compute_dq();
                    gemm_nn<BLOCK_Q / STEP, true, PITCH_S, HEAD_DIM>(
                        dk, base + AT_DS + key_of_warp * SIZE, stage, column,
                        [&](int k, int steps) {
                            if constexpr (!DQ_WITH_DV) add_dq(DQ_FIRST ? steps + k : k, DQ_FIRST ? 2 * steps : steps);
                        });
                }
            }
            if (previous >= 0 && threadIdx.x == THREADS - 1)
                semaphore_release(semaphore_at(p, b, at.h, previous), tile_k);
        }
    }
    if (HAS_VALUES) sums.leave(p);
    cp_async_wait_all();  // for K and V, if no query tile has
    __syncthreads();
    epilogue<DK, HEAD_DIM>(p, p.dk, at, head, dk, (float)p.softmax_scale, shared);
    epilogue<DV, HEAD_DIM_V>(p, p.dv, at, head, dv, 1.0f, shared);
}
