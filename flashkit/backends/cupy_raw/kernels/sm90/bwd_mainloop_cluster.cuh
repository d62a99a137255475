// Products of the Hopper backward pass where dK and dV of 64 keys do not fit the registers of a warp group. A cluster of two
// blocks has an item, 64 keys each; of a block's groups one has what is of pairs, the other the sums over them. All are
// turned: keys are the rows.
//
//     S^T, P^T, dP^T, dS^T  [64][64]   registers of the first group; dS also in shared memory, of both blocks
//     dV                    [64][..]   registers of the first
//     dK                    [64][..]   registers of the second
//     dQ^T                  half the columns, of the keys of both blocks: registers of the second, from where they are added
//
// What limited one block alone is the way to the L2 cache: dQ, in float32, took more of it than all that is read. So blocks
// send each other dS, in 16 bits, and each adds half the columns, once for 128 keys.
//
// A step, for the tile of queries number n, of the first group and of the second:
//
//     S^T = K Q^T was begun in the step before     dK += dS^T Q
//     dP^T = V dO^T, meanwhile weights of S        dQ^T = K^T dS^T of the block's own keys
//     dV += P^T dO, meanwhile dS of dP,            the other block's dS is waited for
//         which goes to both blocks                dQ^T += K^T dS^T of its keys
//     S^T of the next tile                         dQ leaves
#pragma once
#include "sm90/pipeline.cuh"

// What a warp's dS of a tile is to the block's shared memory, and from there to the other's: 16 rows of keys.
constexpr int BYTES_HANDED = BYTES_DS / SIDE;

DEVICE void multiply_pairs(const Params& p, const TensorMap& dv_map, unsigned base, int rank) {
    const auto queries = q_pipe(base);
    const auto douts = dout_pipe(base);
    const auto keys = k_pipe(base);
    const auto values = v_pipe(base);
    const auto pairs = ds_pipe(base);
    const auto across = dsmem_pipe(base);
    const float unit = uniform_float((float)(p.softmax_scale * 1.4426950408889634));
    const int lane = opaque(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 % 4);
    const unsigned hand = base + AT_DS + warp * BYTES_HANDED, place = opaque(hand + swizzled(lane % 16, lane / 16));
    const unsigned there = mapa(hand + BYTES_DS, 1 - rank), told = mapa(across.full, 1 - rank);
    const unsigned own = base + own_row(lane), v_tile = base + AT_V;
    float dv[COLUMNS_V / 2], s[PAIRS], dp[PAIRS];
    unsigned n = 0;  // tiles so far

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        keys.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number), odd_keys = odd_of(base, number);
        if (uniform(load_word(slot)) == END) break;
        const unsigned k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K;
        const bool even = !MAY_HIDE || uniform(load_word(odd_keys) | load_word(odd_keys + 4)) == 0;

        auto scores = [&](unsigned n) {
            begin_pairs<COLUMNS>(s, k_tile, base + AT_Q + n % STAGES * BYTES_Q);
        };

        queries.consumer_wait(n);
        scores(n);
        Line line{};
        if (!AT_ONCE) line = line_of(p, base, n, number, rank, warp, lane);
        values.consumer_wait(number);
        bool first = true, last;
#pragma unroll 1
        do {
            const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
            const unsigned shift = own + AT_SHIFT + stage * BYTES_ROWS;
            const int tile_desc = uniform(load_word(tile_desc_of(base, n)));
            last = tile_desc & LAST;
            if (ORDERED && warp == 0 && lane == 0) ask_for(base, n, tile_desc, load_word(tile_desc_of(base, n) + 8), load_word(slot + 8));
            float early[PAIRS / 4][2];
#pragma unroll
            for (int i = 0; i < PAIRS / 4; ++i) load_numbers_of(early[i], shift, i);
            if (AT_ONCE) line = line_of(p, base, n, number, rank, warp, lane);
            douts.consumer_wait(n);
            wgmma_wait<0>();  // S
            fence_operand(s);
            begin_pairs<COLUMNS_V>(dp, v_tile, base + AT_DOUT + dout_stage * BYTES_DOUT);
            const Deltas deltas(own + AT_DELTA + dout_stage * BYTES_ROWS);
            unsigned p_pairs[PAIRS / 2], ds[PAIRS / 2];
            Kept kept;
            const bool plain = weights(p, base, n, number, tile_desc, rank, even, s, p_pairs, early, shift, unit, kept, line);
            begin_sums(dv, p_pairs, base + AT_DOUT + dout_stage * BYTES_DOUT, !first);
            wgmma_wait<1>();  // dP
            fence_operand(dp);
            if (plain || !CLEANS_KEYS) gradients<true>(p, s, dp, ds, deltas, kept);
            else gradients<false>(p, s, dp, ds, deltas, kept);
            pairs.producer_acquire(n), across.producer_acquire(n);
#pragma unroll
            for (int k = 0; k < BLOCK_Q / 16; ++k)
                stmatrix_x4<false>(place ^ 2 * VEC_BYTES * k, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
            fence_proxy_async();
            __syncwarp();
            if (elect_one()) dsmem_copy(there, hand, BYTES_HANDED, told);
            mbarrier_arrive_once(pairs.full, lane);
            queries.consumer_release(n, lane);
            if (!last) queries.consumer_wait(n + 1);
            scores(last ? n : n + 1);  // always begun, or the compiler makes it wait; after the last tile nothing comes of it
            wgmma_wait<1>();        // dV
            fence_operand(p_pairs);
            douts.consumer_release(n, lane);
            first = false, ++n;
        } while (!last);
        wgmma_wait<0>();
        fence_operand(s), fence_operand(dp), fence_operand(dv);
        const WorkTile at{uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))};
        keys.consumer_release(number, lane);
        named_barrier_sync(1, 128);  // nobody reads V any more: dV leaves through its place
        send_keys<HEAD_DIM_V, 0, CHUNKS_V, HELD * CHUNK_ROW>(dv_map, at, HELD * rank + 16 * warp, lane, v_tile + warp * BYTES_PIECE, dv, 1.0f);
        bulk_wait_read();
        __syncwarp();
        values.consumer_release(number, lane);
    }
    if (ORDERED && warp == 0 && lane == 0) ask(base, n, END, 0), ask(base, n + 1, END, 0);
    bulk_wait();
}

DEVICE void multiply_sums(const Params& p, const TensorMap& dk_map, unsigned base, int rank) {
    const auto queries = q_pipe(base);
    const auto keys = k_pipe(base);
    const auto others = peer_k_pipe(base);
    const auto pairs = ds_pipe(base);
    const auto across = dsmem_pipe(base);
    const int lane = opaque(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 % 4);
    const bool announces = warp == 0 && lane == 0;
    const unsigned room = mapa(across.empty, 1 - rank);
    const unsigned pairs_here = base + AT_DS, pairs_there = pairs_here + BYTES_DS, others_tile = base + AT_OTHERS;
    float dk[COLUMNS / 2], dq[SHARE][BLOCK_Q / 2];
    unsigned n = 0;  // tiles so far
    if (announces) mbarrier_arrive_expect_tx(across.full, BYTES_DS);

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        keys.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number);
        if (uniform(load_word(slot)) == END) break;
        const WorkTile at{uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))};
        const unsigned own_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K + SHARE * rank * HELD * CHUNK_ROW;

        auto query_gradients = [&](unsigned tile, unsigned from, auto fresh) {
            const unsigned long long b = descriptor(from);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < SHARE; ++c) {
                const unsigned long long a = descriptor(tile + c * HELD * CHUNK_ROW);
                if (fresh.value) wgmma_zero_init<1, 1>(dq[c], a, b);
                else product<1, 1>(dq[c], a, b, 1);
#pragma unroll
                for (int k = 1; k < HELD / 16; ++k) product<1, 1>(dq[c], a + along_columns(k), b + along_columns(k), 1);
            }
            wgmma_commit();
        };
        auto add_sums = [&](int where, Adding adding) {
            float* sums = part_of_sums(p, where, SHARE * rank * BYTES_PART) + warp * (BYTES_WARP / 4) + lane * 4;
            if (ORDERED && adding == ADDS_NOTHING) return;
#pragma unroll
            for (int c = 0; c < SHARE; ++c) {
                if (CHUNKS % 2 && SHARE * rank + c >= CHUNKS) break;
                float* to = sums + c * (BYTES_PART / 4);
#pragma unroll
                for (int i = 0; i < BLOCK_Q / 8; ++i) {
                    if (ORDERED && adding == STORES) store_four(to + i * 128, dq[c] + 4 * i);
                    else add_four(to + i * 128, dq[c] + 4 * i);
                }
            }
        };

        bool first = true, last;
#pragma unroll 1
        do {
            const unsigned q_tile = base + AT_Q + n % STAGES * BYTES_Q;
            queries.consumer_wait(n);
            const int tile_desc = uniform(load_word(tile_desc_of(base, n))), where = load_word(tile_desc_of(base, n) + 8);
            last = tile_desc & LAST;
            pairs.consumer_wait(n);
            {
                const unsigned long long a = descriptor(pairs_here), b = descriptor(q_tile, BLOCK_Q * CHUNK_ROW);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BLOCK_Q / 16; ++k) product<0, 1>(dk, a + along_rows(k, HELD), b + along_columns(k), k > 0 || !first);
                wgmma_commit();
            }
            query_gradients(own_tile, pairs_here, Constant<true>{});
            wgmma_wait<1>();  // dK
            queries.consumer_release(n, lane);
            if (first) others.consumer_wait(number);
            across.consumer_wait(n);
            query_gradients(others_tile, pairs_there, Constant<false>{});
            wgmma_wait<1>();  // dQ of the block's own keys
            pairs.consumer_release(n, lane);
            wgmma_wait<0>();
#pragma unroll
            for (int c = 0; c < SHARE; ++c) fence_operand(dq[c]);
            if (announces) mbarrier_arrive_expect_tx(across.full, BYTES_DS);  // of the next tile
            dsmem_arrive(room, lane);
            Adding adding = ADDS;
            if (ORDERED) {
                mbarrier_wait(tile_coord(base, n), n / 2 & 1);
                adding = (Adding)uniform(load_word(slot_of(base, n)));
            }
            if (last) keys.consumer_release(number, lane);
            add_sums(where, adding);
            if constexpr (ORDERED) {
                __syncwarp();
                mbarrier_arrive_once(added_of(base, n), lane);
            }
            first = false, ++n;
        } while (!last);
        fence_operand(dk);
        named_barrier_sync(2, 128);  // nobody reads the other block's keys any more: dK leaves through their place
        send_keys<HEAD_DIM, 0, SHARE, HELD * CHUNK_ROW>(dk_map, at, HELD * rank + 16 * warp, lane, others_tile + warp * BYTES_PIECE, dk, (float)p.softmax_scale);
        bulk_wait_read();
        __syncwarp();
        others.consumer_release(number, lane);
    }
    bulk_wait();
    __syncwarp();
    if (!ORDERED) mbarrier_arrive_once(base + AT_OVER, lane);
}

DEVICE void consumer(const Params& p, const TensorMap& dk_map, const TensorMap& dv_map, unsigned base, int group) {
    const int rank = uniform(rank_of_block());
    if (group == 0) multiply_pairs(p, dv_map, base, rank);
    else multiply_sums(p, dk_map, base, rank);
}
