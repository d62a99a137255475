// Products of the Hopper backward pass where each warp group has 64 of the keys. All are turned: keys are the rows.
//
//     S^T, P^T     [64][BLOCK_Q]     registers
//     dP^T, dS^T   [64][BLOCK_Q]     registers; dS also in shared memory, two tiles, for dQ
//     dK, dV       [64][..]          registers
//     dQ^T         a part            registers, then shared memory, from where the copy engine adds it
//
// A step, for the tile of queries number n:
//
//     S^T = K Q^T          was begun in the step before,
//     dP^T = V dO^T        is begun; meanwhile S becomes weights,
//     dV += P^T dO         is begun; meanwhile dP becomes dS, which goes to shared memory,
//     dQ^T = K^T dS^T      of the tile before, so that nobody waits for the other group's dS, and
//     dK += dS^T Q         are begun; meanwhile dS is handed over (up to 64 columns first, then dK, then dQ),
//     S^T = K Q^T          of the next tile is begun; meanwhile dQ leaves.
#pragma once
#include "sm90/pipeline.cuh"

// Found by timing some 400 orders of what does not depend on each other (docs/hopper.md).
constexpr bool KEYS_FIRST = CHUNKS == 1 && !FROM_DIAGONAL;  // dS handed over, then dK, then dQ; not where others wait for dQ at once
constexpr bool PING_PONG = HAS_SCORE && !KEYS_FIRST && !ORDERED;  // groups take turns at beginning dV, dQ and dK
constexpr int TURN = 1;  // and the group's number: its named barrier
constexpr int EARLY = PAIRS <= 32 ? PAIRS / 4 : 4;     // log-sum-exps, of two rows each, that are loaded before scores are there

// dS of tile n to shared memory, turned, for dQ. place: where the lane's matrices go in the first of the two tiles there.
DEVICE void store_ds(const Pipeline<2>& pairs, unsigned n, unsigned place, const unsigned (&ds)[PAIRS / 2]) {
    pairs.producer_acquire(n);
#pragma unroll
    for (int k = 0; k < BLOCK_Q / 16; ++k)
        stmatrix_x4<true>(place + n % 2 * BYTES_DS + k * 16 * CHUNK_ROW, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
}

DEVICE void consumer(const Params& p, const TensorMap& dk_map, const TensorMap& dv_map, unsigned base, int group) {
    const auto queries = q_pipe(base);
    const auto douts = dout_pipe(base);
    const auto keys = k_pipe(base);
    const auto values = v_pipe(base);
    const auto pairs = ds_pipe(base);
    const float unit = uniform_float((float)(p.softmax_scale * 1.4426950408889634));
    // What follows from the thread is made once: asking again which it is waits for all stores to shared memory before.
    const int lane = opaque(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 - 4);
    const unsigned warp_part = base + AT_SUMS + warp * BYTES_WARP, part = warp_part + lane * 16;  // a lane's place in what the warp sends of dQ
    const unsigned turned = opaque(base + AT_DS + group * BLOCK_Q * CHUNK_ROW +
                                 swizzled(lane % 8 + lane / 16 * 8, warp % 4 * 2 + lane / 8 % 2));  // of dS, where a lane's matrices go
    const unsigned own = base + own_row(lane);
    float dk[COLUMNS / 2], dv[COLUMNS_V / 2], s[PAIRS];
    unsigned n = 0;  // tiles so far

    if (PING_PONG && group == 1) named_barrier_arrive(TURN, 128 * MMA_WARPGROUPS);  // the first turn
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        keys.consumer_wait(number);
        const unsigned slot = work_tile_slot(base, number), odd_keys = odd_of(base, number);
        if (uniform(load_word(slot)) == END) break;
        const unsigned k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K;
        const bool even = !MAY_HIDE || uniform(load_word(odd_keys + 8 * group) | load_word(odd_keys + 8 * group + 4)) == 0;

        auto scores = [&](unsigned n) {
            begin_pairs<COLUMNS>(s, k_tile + group * 64 * CHUNK_ROW, base + AT_Q + n % STAGES * BYTES_Q);
        };
        auto query_gradients = [&](unsigned n, float (&dq)[PART_ROWS / 2]) {
            const unsigned long long a = descriptor(k_tile + (BY_COLUMNS ? group * BLOCK_K * CHUNK_ROW : 0));
            const unsigned long long b = descriptor(base + AT_DS + n % 2 * BYTES_DS + (BY_COLUMNS ? 0 : group * PART_ROWS * CHUNK_ROW));
            wgmma_fence();
            wgmma_zero_init<1, 0>(dq, a, b);
#pragma unroll
            for (int k = 1; k < BLOCK_K / 16; ++k) product<1, 0>(dq, a + along_columns(k), b + along_rows(k, BLOCK_Q), 1);
            wgmma_commit();
        };
        auto key_gradients = [&](unsigned n, const unsigned (&ds)[PAIRS / 2], bool first) {
            begin_sums(dk, ds, base + AT_Q + n % STAGES * BYTES_Q, !first);
        };
        // dQ leaves in two steps: to shared memory at once; from there when the next proxy fence has been made anyway, or in
        // order by a warp that makes its own.
        auto stage_sums = [&](unsigned n, const float (&dq)[PART_ROWS / 2]) {
            pairs.consumer_release(n, lane);
            if (ORDERED) mbarrier_wait(tile_coord(base, n - 1), (n - 1) / 2 & 1);
            bulk_wait_read();
            __syncwarp();
#pragma unroll
            for (int i = 0; i < PART_ROWS / 8; ++i)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(part + i * 512), "f"(dq[4 * i]),
                             "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]), "f"(dq[4 * i + 3]) : "memory");
            if constexpr (ORDERED) {
                __syncwarp();
                mbarrier_arrive_once(added_of(base, n), lane);
            }
        };
        auto send_sums = [&](int where) {  // after a fence and __syncwarp()
            if (!ORDERED && elect_one())
                bulk_reduce_add(part_of_sums(p, where, warp * BYTES_WARP), warp_part, BYTES_WARP);
        };
        auto warpgroup_barrier_sync = [&]() { if (PING_PONG) named_barrier_sync(TURN + group, 128 * MMA_WARPGROUPS); };
        auto warpgroup_barrier_arrive = [&]() { if (PING_PONG) named_barrier_arrive(TURN + 1 - group, 128 * MMA_WARPGROUPS); };

        queries.consumer_wait(n);
        scores(n);
        Line line{};
        if (!AT_ONCE) line = line_of(p, base, n, number, group, warp, lane);
        values.consumer_wait(number);
        bool first = true, last;
        int staged = -1, before = -1;  // tiles of dQ: in shared memory, and the one that is next
#pragma unroll 1
        do {
            const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
            const unsigned shift = own + AT_SHIFT + stage * BYTES_ROWS;
            const unsigned dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT;
            const int tile_desc = uniform(load_word(tile_desc_of(base, n))), where = load_word(tile_desc_of(base, n) + 8);
            last = tile_desc & LAST;
            if (ORDERED && warp == 0 && lane == 0) ask_for(base, n, tile_desc, where, load_word(slot + 8));
            float early[EARLY][2];
#pragma unroll
            for (int i = 0; i < EARLY; ++i) load_numbers_of(early[i], shift, i);
            if (AT_ONCE) line = line_of(p, base, n, number, group, warp, lane);
            lower(line, early);
            douts.consumer_wait(n);
            wgmma_wait<0>();  // S, and dK of the tile before
            fence_operand(s);
            float dp[PAIRS], dq[PART_ROWS / 2];
            begin_pairs<COLUMNS_V>(dp, base + AT_V + group * 64 * CHUNK_ROW, dout_tile);
            unsigned p_pairs[PAIRS / 2];
            Kept kept;
            const bool plain = weights(p, base, n, number, tile_desc, group, even, s, p_pairs, early, shift, unit, kept, line);
            const Deltas deltas(own + AT_DELTA + dout_stage * BYTES_ROWS);
            warpgroup_barrier_sync();
            begin_sums(dv, p_pairs, dout_tile, !first);
            wgmma_wait<1>();  // dP
            fence_operand(dp);
            if (last) values.consumer_release(number, lane);  // the next item's may come while this one ends
            unsigned ds[PAIRS / 2];
            if (plain || !CLEANS_KEYS) gradients<true>(p, s, dp, ds, deltas, kept);
            else gradients<false>(p, s, dp, ds, deltas, kept);
            auto begin_gradients = [&]() {  // dQ's always, or the compiler makes it wait; of the first tile nothing comes of it
                if (KEYS_FIRST) key_gradients(n, ds, first);
                if (!first) pairs.consumer_wait(n - 1);
                query_gradients(n - 1, dq);
                if (!KEYS_FIRST) key_gradients(n, ds, first);
            };
            auto hand_over = [&]() {  // dS of this tile to the other group, dQ that is in shared memory to where it is added
                fence_proxy_async();
                __syncwarp();
                mbarrier_arrive_once(pairs.full + 8 * (n % 2), lane);
                if (staged >= 0) send_sums(staged);
            };
            store_ds(pairs, n, turned, ds);
            if constexpr (KEYS_FIRST) {
                hand_over();
                wgmma_wait<0>();  // dV
                fence_operand(p_pairs);
                begin_gradients();
            } else {
                begin_gradients();
                warpgroup_barrier_arrive();
                hand_over();
                wgmma_wait<2>();  // dV
                fence_operand(p_pairs);
            }
            if (!last) queries.consumer_wait(n + 1);
            scores(last ? n : n + 1);  // as dQ's
            if (BEFOREHAND && !last) line = line_of(p, base, n + 1, number, group, warp, lane);
            wgmma_wait<1>();  // dQ, dK
            fence_operand(dq), fence_operand(ds);
            queries.consumer_release(n, lane), douts.consumer_release(n, lane);
            if (!first) stage_sums(n - 1, dq);
            staged = before, before = where;
            first = false, ++n;
        } while (!last);
        if (!ORDERED) bulk_wait<CHUNKS + CHUNKS_V>();  // so the item before has been added; after its dQ came its dV and dK
        wgmma_wait<0>();
        fence_operand(s), fence_operand(dk), fence_operand(dv);
        pairs.consumer_wait(n - 1);
        float dq[PART_ROWS / 2];
        query_gradients(n - 1, dq);
        if constexpr (!ORDERED) {
            fence_proxy_async();
            __syncwarp();
            if (staged >= 0) send_sums(staged);
        }
        wgmma_wait<0>();
        fence_operand(dq);
        if constexpr (ORDERED) {
            stage_sums(n - 1, dq);
        } else {  // from registers, while what leaves through shared memory does so
            pairs.consumer_release(n - 1, lane);
            float* sums = part_of_sums(p, before, warp * BYTES_WARP) + lane * 4;
#pragma unroll
            for (int i = 0; i < PART_ROWS / 8; ++i) add_four(sums + i * 128, dq + 4 * i);
        }
        const WorkTile at{uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))};
        keys.consumer_release(number, lane);
        if (ORDERED) mbarrier_wait(tile_coord(base, n - 1), (n - 1) / 2 & 1);  // the sums have left
        constexpr int PIECES = BYTES_WARP / BYTES_PIECE;
        send_keys<HEAD_DIM_V, 0, PIECES, BYTES_PIECE>(dv_map, at, 16 * warp, lane, warp_part, dv, 1.0f);
        send_keys<HEAD_DIM, CHUNKS_V, PIECES, BYTES_PIECE>(dk_map, at, 16 * warp, lane, warp_part, dk, (float)p.softmax_scale);
    }
    if (ORDERED && warp == 0 && lane == 0) ask(base, n, END, 0), ask(base, n + 1, END, 0);
    bulk_wait();
    __syncwarp();
    if (!ORDERED) mbarrier_arrive_once(base + AT_OVER, lane);
}
