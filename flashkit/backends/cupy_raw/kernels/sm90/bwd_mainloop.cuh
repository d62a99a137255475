// Consumers of Hopper's backward pass where each warp group owns 64 of the work tile's 128 keys. All products are
// transposed: keys are the rows.
//
//     S^T, P^T     [64][BLOCK_Q]     registers
//     dP^T, dS^T   [64][BLOCK_Q]     registers; dS also in shared memory, two query tiles, for dQ
//     dK, dV       [64][..]          registers
//     dQ^T         a part            registers, then shared memory, from where it is added to dq_accum
//
// A step, for query tile n:
//
//     S^T = K Q^T          issued in the step before
//     dP^T = V dO^T        issued; S becomes P meanwhile
//     dV += P^T dO         issued; dP becomes dS meanwhile, which goes to shared memory
//     dQ^T = K^T dS^T      of tile n - 1, so that no warp group waits for the other's dS
//     dK += dS^T Q         both issued; dS is committed meanwhile (up to 64 columns: commit, dK, dQ)
//     S^T = K Q^T          of tile n + 1 issued; dQ of tile n - 1 leaves meanwhile
#pragma once
#include "sm90/bwd_fragments.cuh"
#include "sm90/bwd_epilogue.cuh"
#include "sm90/bwd_softmax.cuh"
#include "sm90/dq_accum.cuh"

// The order of what does not depend on each other was found by timing (docs/notes/hopper-backward.md).
constexpr bool DK_FIRST = CHUNKS == 1 && !FROM_DIAGONAL;  // not where the next CTA waits for this one's dQ at once
// Warp groups alternate at issuing dV, dQ and dK.
constexpr bool PING_PONG = HAS_SCORE && !HAS_BIAS && !DK_FIRST && !DETERMINISTIC;
constexpr int PING_PONG_BARRIER = 1;  // plus the warp group: its named barrier
constexpr int EARLY_LSE = S_REGS <= 32 ? S_REGS / 4 : 4;  // pairs of log-sum-exps that are loaded before S is complete

// dS of query tile n to shared memory, transposed. address: of the lane's matrices in the first of the two tiles.
DEVICE void store_ds(const Pipeline<2>& pipe_ds, unsigned n, unsigned address, const unsigned (&ds)[S_REGS / 2]) {
    pipe_ds.producer_acquire(n);
    UNROLL(k, BLOCK_Q / 16)
        stmatrix_x4<true>(address + n % 2 * BYTES_DS + k * 16 * CHUNK_ROW, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2],
                          ds[4 * k + 3]);
}

DEVICE void consumer(const Params& p, const TensorMap& dk_map, const TensorMap& dv_map, unsigned base, int wg) {
    const auto pipe_q = q_pipe(base);
    const auto pipe_dout = dout_pipe(base);
    const auto pipe_dense = dense_pipe(base);
    const auto pipe_k = k_pipe(base);
    const auto pipe_v = v_pipe(base);
    const auto pipe_ds = ds_pipe(base);
    float scale_log2 = uniform_float((float)(p.softmax_scale * 1.4426950408889634));
    // Made once: reading the thread's index again would wait for all stores to shared memory before.
    const int lane = opaque(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 - 4);
    const unsigned dq_of_warp = base + AT_DQ + warp * BYTES_DQ_WARP, dq_of_lane = dq_of_warp + lane * 16;
    const unsigned ds_of_lane = opaque(base + AT_DS + wg * BLOCK_Q * CHUNK_ROW +
                                 swizzled(lane % 8 + lane / 16 * 8, warp % 4 * 2 + lane / 8 % 2));
    const unsigned stats_of_lane = base + lane_stats(lane);
    float dk_acc[PADDED_DIM / 2], dv_acc[PADDED_DIM_V / 2], s[S_REGS];
    unsigned n = 0;  // query tiles so far
    ValueSums sums;

    // warp group 0 comes first
    if (PING_PONG && wg == 1) named_barrier_arrive(PING_PONG_BARRIER, 128 * MMA_WARPGROUPS);
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        pipe_k.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number), nonfinite_keys = nonfinite_keys_slot(base, number);
        if (uniform(load_word(slot)) == END) break;
        const unsigned k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K;
        if constexpr (IS_FLOAT32)
            scale_log2 = uniform_float((float)(p.softmax_scale * 1.4426950408889634) *
                                       head_scales(p, load_word(slot), load_word(slot + 4)).of_scores());
        const bool keys_finite = !MAY_HIDE ||
            uniform(load_word(nonfinite_keys + 8 * wg) | load_word(nonfinite_keys + 8 * wg + 4)) == 0;

        auto issue_s = [&](unsigned n) {
            issue_ss<PADDED_DIM>(s, k_tile + wg * 64 * CHUNK_ROW, base + AT_Q + n % STAGES * BYTES_Q);
        };
        auto issue_dq = [&](unsigned n, float (&dq)[DQ_PART_ROWS / 2]) {
            const unsigned long long a = descriptor(k_tile + (DQ_BY_COLUMNS ? wg * BLOCK_K * CHUNK_ROW : 0));
            const unsigned long long b =
                descriptor(base + AT_DS + n % 2 * BYTES_DS + (DQ_BY_COLUMNS ? 0 : wg * DQ_PART_ROWS * CHUNK_ROW));
            wgmma_fence();
            wgmma_zero_init<1, 0>(dq, a, b);
#pragma unroll
            for (int k = 1; k < BLOCK_K / 16; ++k)
                product<1, 0>(dq, a + along_columns(k), b + along_rows(k, BLOCK_Q), 1);
            wgmma_commit();
        };
        auto issue_dk = [&](unsigned n, const unsigned (&ds)[S_REGS / 2], bool first) {
            issue_rs(dk_acc, ds, base + AT_Q + n % STAGES * BYTES_Q, !first);
        };
        // dQ leaves in two steps: to shared memory at once; from there after the next step's proxy fence or, if
        // DETERMINISTIC, by a semaphore warp with a fence of its own. Or it becomes the caller's dQ at once.
        auto stage_dq = [&](unsigned n, int index, bool is_whole, const float (&dq)[DQ_PART_ROWS / 2]) {
            pipe_ds.consumer_release(n, lane);
            if (DETERMINISTIC) mbarrier_wait(dq_granted(base, n - 1), (n - 1) / 2 & 1);
            bulk_wait_read();
            __syncwarp();
            if (is_whole) {
                store_dq(p, index, seq_of(p, load_word(slot), slot), warp, lane, dq_of_warp, dq);
            } else {
                UNROLL(i, DQ_PART_ROWS / 8)
                    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(dq_of_lane + i * 512), "f"(dq[4 * i]),
                                 "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3]) : "memory");
            }
            if constexpr (DETERMINISTIC) {
                __syncwarp();
                mbarrier_arrive_once(dq_written(base, n), lane);
            }
        };
        auto send_dq = [&](int index) {  // after a proxy fence and __syncwarp()
            if (!DETERMINISTIC && elect_one())
                bulk_reduce_add(dq_accum_at(p, index, warp * BYTES_DQ_WARP), dq_of_warp, BYTES_DQ_WARP);
        };
        auto warpgroup_barrier_sync = [&]() {
            if (PING_PONG) named_barrier_sync(PING_PONG_BARRIER + wg, 128 * MMA_WARPGROUPS);
        };
        auto warpgroup_barrier_arrive = [&]() {
            if (PING_PONG) named_barrier_arrive(PING_PONG_BARRIER + 1 - wg, 128 * MMA_WARPGROUPS);
        };

        // --- prologue
        pipe_q.consumer_wait(n);
        issue_s(n);
        AffineTile affine{};
        if (!AFFINE_PER_STEP) affine = affine_tile(p, {base, n, number, wg}, warp, lane);
        BiasFragment bias;
        MaskFragment mask;
        pipe_v.consumer_wait(number);
        bool first = true, last, is_whole = false;
        // query tiles, as indices among all: whose dQ is in shared memory, and the one before n
        int staged = -1, previous = -1;

        // --- steps
#pragma unroll 1
        do {
            const FragmentId id{base, n, number, wg};
            const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
            const unsigned lse = stats_of_lane + AT_LSE + stage * BYTES_ROW_STATS;
            const unsigned dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT;
            const int tile_desc = uniform(load_word(tile_desc_slot(base, n)));
            const int index = load_word(tile_desc_slot(base, n) + TileDesc::INDEX);
            last = tile_desc & TileDesc::LAST_TILE, is_whole = STORES_DQ && (tile_desc & TileDesc::WHOLE_DQ);
            if (DETERMINISTIC && warp == 0 && lane == 0)
                request_dq_turn_for(base, n, tile_desc, index, slot);
            float early_lse[EARLY_LSE][2];
            UNROLL(i, EARLY_LSE) load_row_stats(early_lse[i], lse, i);
            if (AFFINE_PER_STEP) affine = affine_tile(p, id, warp, lane);
            if (BYTES_DENSE > 0) pipe_dense.consumer_wait(n);
            bias.load(p, id, base + AT_BIAS + n % DENSE_STAGES * BiasTile::SIZE, warp, lane);
            if (MASK_TILES) mask.load(base + AT_MASK + n % DENSE_STAGES * MaskTile::SIZE, wg, warp, lane);
            add_early_bias(affine, early_lse);
            pipe_dout.consumer_wait(n);
            wgmma_wait<0>();  // S, and dK of the step before
            fence_operand(s);
            float dp[S_REGS], dq[DQ_PART_ROWS / 2];
            issue_ss<PADDED_DIM_V>(dp, base + AT_V + wg * 64 * CHUNK_ROW, dout_tile);
            unsigned p_frag[S_REGS / 2];
            DropoutMask dropout;
            const bool unmasked = softmax_p(p, id, tile_desc, keys_finite, s, p_frag, early_lse, lse, scale_log2,
                                            dropout, affine, bias, mask);
            const RowDeltas deltas(stats_of_lane + AT_DELTA + dout_stage * BYTES_ROW_STATS);
            warpgroup_barrier_sync();
            issue_rs(dv_acc, p_frag, dout_tile, !first);
            if (BYTES_DENSE > 0) pipe_dense.consumer_release(n, lane);
            wgmma_wait<1>();  // dP
            fence_operand(dp);
            // V of the next work tile may be loaded during the epilogue
            if (last) pipe_v.consumer_release(number, lane);
            unsigned ds[S_REGS / 2];
            PairSums pairs{lane, lane % 4 * 2 - (warp % 4 * 16 + lane / 4)};
            if (unmasked || !CLEARS_KEYS) compute_ds<true>(p, s, dp, ds, deltas, dropout, pairs);
            else compute_ds<false>(p, s, dp, ds, deltas, dropout, pairs);
            if constexpr (HAS_VALUES && VALUE_WARPS == 0) add_values(p, id, s, dp, deltas, sums);
            auto issue_dq_and_dk = [&]() {
                if (DK_FIRST) issue_dk(n, ds, first);
                if (!first) pipe_ds.consumer_wait(n - 1);
                issue_dq(n - 1, dq);  // unconditional, or ptxas serializes it; unused in the first step
                if (!DK_FIRST) issue_dk(n, ds, first);
            };
            auto commit_ds = [&]() {  // and send the dQ that is in shared memory: one fence serves both
                fence_proxy_async();
                __syncwarp();
                mbarrier_arrive_once(pipe_ds.full + 8 * (n % 2), lane);
                if (staged >= 0) send_dq(staged);
            };
            store_ds(pipe_ds, n, ds_of_lane, ds);
            UNROLL(i, PairSums::TILES)
                if (lane % PairSums::LANES < 2)
                    store_float(pair_sums(base, n, wg, i) + 4 * (lane % PairSums::LANES) +
                                    (warp % 4 * PairSums::OF_WARP + lane / PairSums::LANES) * PairSums::BYTES,
                                pairs.x[i]);
            if constexpr (DK_FIRST) {
                commit_ds();
                wgmma_wait<0>();  // dV
                fence_operand(p_frag);
                issue_dq_and_dk();
            } else {
                issue_dq_and_dk();
                warpgroup_barrier_arrive();
                commit_ds();
                wgmma_wait<2>();  // dV
                fence_operand(p_frag);
            }
            if (!last) pipe_q.consumer_wait(n + 1);
            issue_s(last ? n : n + 1);  // unconditional as well; unused after the last step
            if (AFFINE_AHEAD && !last) affine = affine_tile(p, {base, n + 1, number, wg}, warp, lane);
            wgmma_wait<1>();  // dQ, dK
            fence_operand(dq), fence_operand(ds);
            pipe_q.consumer_release(n, lane), pipe_dout.consumer_release(n, lane);
            if (!first) stage_dq(n - 1, previous, is_whole, dq);
            staged = previous, previous = index;
            first = false, ++n;
        } while (!last);

        // --- epilogue: the last dQ, then dV and dK
        // all of the work tile before is in memory: its dV and dK were sent after its dQ
        if (!DETERMINISTIC) bulk_wait<CHUNKS + CHUNKS_V>();
        wgmma_wait<0>();
        fence_operand(s), fence_operand(dk_acc), fence_operand(dv_acc);
        pipe_ds.consumer_wait(n - 1);
        float dq[DQ_PART_ROWS / 2];
        issue_dq(n - 1, dq);
        if constexpr (!DETERMINISTIC) {
            fence_proxy_async();
            __syncwarp();
            if (staged >= 0) send_dq(staged);
        }
        wgmma_wait<0>();
        fence_operand(dq);
        if constexpr (DETERMINISTIC) {
            stage_dq(n - 1, previous, is_whole, dq);
        } else {  // from registers, while the tile before leaves through shared memory
            pipe_ds.consumer_release(n - 1, lane);
            float* accum = dq_accum_at(p, previous, warp * BYTES_DQ_WARP) + lane * 4;
            UNROLL(i, DQ_PART_ROWS / 8) red_add_float4(accum + i * 128, dq + 4 * i);
        }
        const WarpKeys keys(p, slot, 16 * warp);
        pipe_k.consumer_release(number, lane);
        if (DETERMINISTIC) mbarrier_wait(dq_granted(base, n - 1), (n - 1) / 2 & 1);  // dQ has left shared memory
        constexpr int BUFFERS = BYTES_DQ_WARP / BYTES_PIECE;
        const HeadScales scales = head_scales(p, keys.at.b, keys.at.head);
        store_dkv<HEAD_DIM_V, 0, BUFFERS, BYTES_PIECE>(p, p.dv, dv_map, keys, lane, dq_of_warp, dv_acc, scales.of_dv());
        store_dkv<HEAD_DIM, CHUNKS_V, BUFFERS, BYTES_PIECE>(p, p.dk, dk_map, keys, lane, dq_of_warp, dk_acc,
                                                            (float)p.softmax_scale * scales.of_dk());
    }
    if (HAS_VALUES && VALUE_WARPS == 0) sums.leave(p);
    if (DETERMINISTIC && warp == 0 && lane == 0) end_dq_requests(base, n);
    bulk_wait();
    __syncwarp();
    if (!DETERMINISTIC) mbarrier_arrive_once(base + AT_DQ_COMPLETE, lane);
}
