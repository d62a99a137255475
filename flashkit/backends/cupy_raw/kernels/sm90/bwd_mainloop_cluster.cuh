// Consumers of Hopper's backward pass where dK and dV of 64 keys do not fit the registers of a warp group. A cluster of
// two CTAs shares a work tile, 64 keys each, and the two consumers of a CTA differ in role. All products are
// transposed: keys are the rows.
//
//     S^T, P^T, dP^T, dS^T  [64][64]   registers of the dS consumer; dS also in shared memory of both CTAs
//     dV                    [64][..]   registers of the dS consumer
//     dK                    [64][..]   registers of the dK/dQ consumer
//     dQ^T                  half the columns, of both CTAs' keys: registers of the dK/dQ consumer. Of an odd number of
//                           chunks of 64 columns each CTA has half the rows of the middle one
//
// A single CTA would be limited by its traffic to the L2 cache, most of which is dQ in float32. So the CTAs exchange dS
// in 16 bits and each adds half of the columns, once for all 128 keys.
//
// A step, for query tile n:
//
//     dS consumer                                  dK/dQ consumer
//     S^T = K Q^T issued in the step before        dK += dS^T Q
//     dP^T = V dO^T; S becomes P meanwhile         dQ^T = K^T dS^T of the CTA's keys
//     dV += P^T dO; dP becomes dS meanwhile,       the peer's dS is awaited
//         which goes to both CTAs                  dQ^T += K^T dS^T of the peer's keys
//     S^T of the next tile                         dQ leaves
#pragma once
#include "sm90/bwd_fragments.cuh"
#include "sm90/bwd_epilogue.cuh"
#include "sm90/bwd_softmax.cuh"
#include "sm90/dq_accum.cuh"

constexpr int BYTES_DS_WARP = BYTES_DS / ROLE_WARPS;  // dS of a warp's 16 keys, which it sends to the peer
enum NamedBarrier { DS_CONSUMER_BARRIER = 1, DK_DQ_CONSUMER_BARRIER = 2 };

DEVICE void ds_consumer(const Params& p, const TensorMap& dv_map, unsigned base, int rank) {
    const auto pipe_q = q_pipe(base);
    const auto pipe_dout = dout_pipe(base);
    const auto pipe_k = k_pipe(base);
    const auto pipe_v = v_pipe(base);
    const auto pipe_ds = ds_pipe(base);
    const auto pipe_dsmem = dsmem_pipe(base);
    const float scale_log2 = uniform_float((float)(p.softmax_scale * 1.4426950408889634));
    const int lane = opaque(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 % 4);
    const unsigned ds_of_warp = base + AT_DS + warp * BYTES_DS_WARP;
    const unsigned ds_of_lane = opaque(ds_of_warp + swizzled(lane % 16, lane / 16));
    const unsigned peer_ds = mapa(ds_of_warp + BYTES_DS, 1 - rank), peer_full = mapa(pipe_dsmem.full, 1 - rank);
    const unsigned stats_of_lane = base + lane_stats(lane), v_tile = base + AT_V;
    float dv_acc[PADDED_DIM_V / 2], s[S_REGS], dp[S_REGS];
    unsigned n = 0;  // query tiles so far
    ValueSums sums;

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        pipe_k.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number), nonfinite_keys = nonfinite_keys_slot(base, number);
        if (uniform(load_word(slot)) == END) break;
        const unsigned k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K;
        const bool keys_finite = !MAY_HIDE || uniform(load_word(nonfinite_keys) | load_word(nonfinite_keys + 4)) == 0;

        auto issue_s = [&](unsigned n) {
            issue_ss<PADDED_DIM>(s, k_tile, base + AT_Q + n % STAGES * BYTES_Q);
        };

        // --- prologue
        pipe_q.consumer_wait(n);
        issue_s(n);
        AffineTile affine{};
        if (!AFFINE_PER_STEP) affine = affine_tile(p, {base, n, number, rank}, warp, lane);
        pipe_v.consumer_wait(number);
        bool first = true, last;

        // --- steps
#pragma unroll 1
        do {
            const FragmentId id{base, n, number, rank};
            const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
            const unsigned lse = stats_of_lane + AT_LSE + stage * BYTES_ROW_STATS;
            const int tile_desc = uniform(load_word(tile_desc_slot(base, n)));
            last = tile_desc & TileDesc::LAST_TILE;
            if (DETERMINISTIC && warp == 0 && lane == 0)
                request_dq_turn_for(base, n, tile_desc, load_word(tile_desc_slot(base, n) + TileDesc::INDEX), slot);
            float early_lse[S_REGS / 4][2];
            UNROLL(i, S_REGS / 4) load_row_stats(early_lse[i], lse, i);
            if (AFFINE_PER_STEP) affine = affine_tile(p, id, warp, lane);
            pipe_dout.consumer_wait(n);
            wgmma_wait<0>();  // S
            fence_operand(s);
            issue_ss<PADDED_DIM_V>(dp, v_tile, base + AT_DOUT + dout_stage * BYTES_DOUT);
            const RowDeltas deltas(stats_of_lane + AT_DELTA + dout_stage * BYTES_ROW_STATS);
            unsigned p_frag[S_REGS / 2], ds[S_REGS / 2];
            DropoutMask dropout;
            BiasFragment no_bias;
            const MaskFragment no_mask{};
            const bool unmasked = softmax_p(p, id, tile_desc, keys_finite, s, p_frag, early_lse, lse, scale_log2,
                                            dropout, affine, no_bias, no_mask);
            issue_rs(dv_acc, p_frag, base + AT_DOUT + dout_stage * BYTES_DOUT, !first);
            wgmma_wait<1>();  // dP
            fence_operand(dp);
            PairSums none{};
            if (unmasked || !CLEARS_KEYS) compute_ds<true>(p, s, dp, ds, deltas, dropout, none);
            else compute_ds<false>(p, s, dp, ds, deltas, dropout, none);
            if constexpr (HAS_VALUES) add_values(p, id, s, dp, deltas, sums);
            pipe_ds.producer_acquire(n), pipe_dsmem.producer_acquire(n);
            UNROLL(k, BLOCK_Q / 16)
                stmatrix_x4<false>(ds_of_lane ^ 2 * VEC_BYTES * k, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2],
                                   ds[4 * k + 3]);
            fence_proxy_async();
            __syncwarp();
            if (elect_one()) dsmem_copy(peer_ds, ds_of_warp, BYTES_DS_WARP, peer_full);
            mbarrier_arrive_once(pipe_ds.full, lane);
            pipe_q.consumer_release(n, lane);
            if (!last) pipe_q.consumer_wait(n + 1);
            issue_s(last ? n : n + 1);  // unconditional, or ptxas serializes it; unused after the last step
            wgmma_wait<1>();            // dV
            fence_operand(p_frag);
            pipe_dout.consumer_release(n, lane);
            first = false, ++n;
        } while (!last);

        // --- epilogue
        wgmma_wait<0>();
        fence_operand(s), fence_operand(dp), fence_operand(dv_acc);
        const WarpKeys keys(p, slot, CTA_KEYS * rank + 16 * warp);
        pipe_k.consumer_release(number, lane);
        named_barrier_sync(DS_CONSUMER_BARRIER, 128);  // no warp reads V any more: dV leaves through its place
        constexpr int STRIDE = CTA_KEYS * CHUNK_ROW;
        store_dkv<HEAD_DIM_V, 0, CHUNKS_V, STRIDE>(p, p.dv, dv_map, keys, lane, v_tile + warp * BYTES_PIECE, dv_acc,
                                                   1.0f);
        bulk_wait_read();
        __syncwarp();
        pipe_v.consumer_release(number, lane);
    }
    if (HAS_VALUES) sums.leave(p);
    if (DETERMINISTIC && warp == 0 && lane == 0) end_dq_requests(base, n);
    bulk_wait();
}

DEVICE void dk_dq_consumer(const Params& p, const TensorMap& dk_map, unsigned base, int rank) {
    const auto pipe_q = q_pipe(base);
    const auto pipe_k = k_pipe(base);
    const auto pipe_peer_k = peer_k_pipe(base);
    const auto pipe_ds = ds_pipe(base);
    const auto pipe_dsmem = dsmem_pipe(base);
    const int lane = opaque(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 % 4);
    const bool expects_dsmem = warp == 0 && lane == 0;
    const unsigned peer_empty = mapa(pipe_dsmem.empty, 1 - rank);
    const unsigned own_ds = base + AT_DS, peer_ds = own_ds + BYTES_DS, peer_k_tile = base + AT_PEER_K;
    float dk_acc[PADDED_DIM / 2], dq_acc[larger(CHUNKS / 2, 1)][BLOCK_Q / 2], dq_half[BLOCK_Q / 4];
    unsigned n = 0;  // query tiles so far
    if (expects_dsmem) mbarrier_arrive_expect_tx(pipe_dsmem.full, BYTES_DS);

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        pipe_k.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number);
        if (uniform(load_word(slot)) == END) break;
        const WarpKeys keys(p, slot, CTA_KEYS * rank + 16 * warp);
        const unsigned own_k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K
                                    + CHUNKS / 2 * rank * CTA_KEYS * CHUNK_ROW;

        auto issue_dq = [&](unsigned k_tile, unsigned ds, auto zero_init) {
            auto issue = [&](auto& acc, int chunk, unsigned rows) {
                const unsigned long long a = descriptor(k_tile + chunk * CTA_KEYS * CHUNK_ROW), b = descriptor(rows);
                if (zero_init.value) wgmma_zero_init<1, 1>(acc, a, b);
                else product<1, 1>(acc, a, b, 1);
#pragma unroll
                for (int k = 1; k < CTA_KEYS / 16; ++k)
                    product<1, 1>(acc, a + along_columns(k), b + along_columns(k), 1);
            };
            wgmma_fence();
            UNROLL(c, CHUNKS / 2) issue(dq_acc[c], CHUNKS % 2 * rank + c, ds);
            if constexpr (CHUNKS % 2) issue(dq_half, CHUNKS / 2 * (1 - rank), ds + rank * CHUNK_ROW / 2);
            wgmma_commit();
        };
        auto add_dq = [&](int index, DqWrite write) {
            float* part = dq_accum_at(p, index, DQ_CHUNKS * rank * BYTES_DQ_PART);
            float* accum = part + warp * (BYTES_DQ_WARP / 4) + lane * 4;
            if (DETERMINISTIC && write == SKIP) return;
            auto add = [&](const auto& acc, float* to) {
                UNROLL(i, (int)(sizeof(acc) / 16)) {
                    if (DETERMINISTIC && write == STORE) store_float4(to + i * 128, acc + 4 * i);
                    else red_add_float4(to + i * 128, acc + 4 * i);
                }
            };
            UNROLL(c, CHUNKS / 2) add(dq_acc[c], accum + c * (BYTES_DQ_PART / 4));
            const int middle = CHUNKS / 2 - DQ_CHUNKS * rank;  // counted from the CTA's first whole part
            if constexpr (CHUNKS % 2) add(dq_half, accum + middle * (BYTES_DQ_PART / 4) + rank * (BYTES_DQ_WARP / 8));
        };

        // --- steps
        bool first = true, last;
#pragma unroll 1
        do {
            const unsigned q_tile = base + AT_Q + n % STAGES * BYTES_Q;
            pipe_q.consumer_wait(n);
            const int tile_desc = uniform(load_word(tile_desc_slot(base, n)));
            const int index = load_word(tile_desc_slot(base, n) + TileDesc::INDEX);
            last = tile_desc & TileDesc::LAST_TILE;
            pipe_ds.consumer_wait(n);
            {
                const unsigned long long a = descriptor(own_ds), b = descriptor(q_tile, BLOCK_Q * CHUNK_ROW);
                wgmma_fence();
                UNROLL(k, BLOCK_Q / 16)
                    product<0, 1>(dk_acc, a + along_rows(k, CTA_KEYS), b + along_columns(k), k > 0 || !first);
                wgmma_commit();
            }
            issue_dq(own_k_tile, own_ds, Constant<true>{});
            wgmma_wait<1>();  // dK
            pipe_q.consumer_release(n, lane);
            if (first) pipe_peer_k.consumer_wait(number);
            pipe_dsmem.consumer_wait(n);
            issue_dq(peer_k_tile, peer_ds, Constant<false>{});
            wgmma_wait<1>();  // dQ of the CTA's own keys
            pipe_ds.consumer_release(n, lane);
            wgmma_wait<0>();
            UNROLL(c, CHUNKS / 2) fence_operand(dq_acc[c]);
            if constexpr (CHUNKS % 2) fence_operand(dq_half);
            if (expects_dsmem) mbarrier_arrive_expect_tx(pipe_dsmem.full, BYTES_DS);  // of the next query tile
            dsmem_arrive(peer_empty, lane);
            DqWrite write = ADD;
            if (DETERMINISTIC) {
                mbarrier_wait(dq_granted(base, n), n / 2 & 1);
                write = (DqWrite)uniform(load_word(dq_slot(base, n)));
            }
            if (last) pipe_k.consumer_release(number, lane);
            add_dq(index, write);
            if constexpr (DETERMINISTIC) {
                __syncwarp();
                mbarrier_arrive_once(dq_written(base, n), lane);
            }
            first = false, ++n;
        } while (!last);

        // --- epilogue
        fence_operand(dk_acc);
        // no warp reads the peer's keys any more: dK leaves through their place
        named_barrier_sync(DK_DQ_CONSUMER_BARRIER, 128);
        constexpr int STRIDE = CTA_KEYS * CHUNK_ROW;
        store_dkv<HEAD_DIM, 0, DQ_CHUNKS, STRIDE>(p, p.dk, dk_map, keys, lane, peer_k_tile + warp * BYTES_PIECE, dk_acc,
                                                  (float)p.softmax_scale);
        bulk_wait_read();
        __syncwarp();
        pipe_peer_k.consumer_release(number, lane);
    }
    bulk_wait();
    __syncwarp();
    if (!DETERMINISTIC) mbarrier_arrive_once(base + AT_DQ_COMPLETE, lane);
}

DEVICE void consumer(const Params& p, const TensorMap& dk_map, const TensorMap& dv_map, unsigned base, int wg) {
    const int rank = uniform(cta_rank());
    if (wg == 0) ds_consumer(p, dv_map, base, rank);
    else dk_dq_consumer(p, dk_map, base, rank);
}
