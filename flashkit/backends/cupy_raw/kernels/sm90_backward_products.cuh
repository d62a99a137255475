// Products of the Hopper backward pass where dK and dV of 64 keys do not fit the registers of a warp group: one has dV, and
// makes the weights, the other dK, and makes their gradients. All are turned: keys are the rows.
//
//     S^T, P^T      [64][64]     registers of the first group, which hands P to the other through shared memory, in float32
//     dP^T, dS^T    [64][64]     registers of the second; dS also in shared memory, two tiles, for dQ
//     dV            [64][..]     registers of the first
//     dK            [64][..]     registers of the second
//     dQ^T          half the columns each, 64 at a time: registers, from where they are added
//
// A step, for the tile of queries number n, of one group and of the other:
//
//     weights of S                             dS of dP, and of the weights that the first group hands over
//     dQ^T = K^T dS^T of the tile before       dQ^T = K^T dS^T, 64 columns
//     dV += P^T dO                             dK += dS^T Q
//     dQ^T, 64 more columns                    dQ^T, 64 more columns
//     S^T = K Q^T of the next tile             dP^T = V dO^T of the next tile
//
// So the first group is ahead by about half a step, and each one's small steps take place beside the other's products.
#pragma once
#include "sm90.cuh"

template <bool FIRST_GROUP>
DEVICE void multiply_tiles_of(const Params& p, const TensorMap& dk_map, const TensorMap& dv_map, unsigned base) {
    constexpr int GROUP_COLUMNS = FIRST_GROUP ? COLUMNS_V : COLUMNS, SUMMED = FIRST_GROUP ? COLUMNS : COLUMNS_V;
    constexpr int CHUNK = FIRST_GROUP ? 0 : (CHUNKS + 1) / 2, HAS = FIRST_GROUP ? (CHUNKS + 1) / 2 : CHUNKS / 2;  // of dQ: the group's first, how many
    const auto queries = rows_ring(base);
    const auto douts = douts_ring(base);
    const auto keys = keys_ring(base);
    const auto values = values_ring(base);
    const auto pairs = pairs_ring(base);
    const auto handed = weights_ring(base);
    const float unit = __int_as_float(uniform(__float_as_int((float)(p.scale * 1.4426950408889634))));
    const int lane = here(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 % 4);
    const unsigned turned = here(base + AT_PAIRS + swizzled(lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2));  // of dS
    const unsigned hand = here(base + AT_SUMS + (warp * 32 + lane) * 16);
    const unsigned own = base + own_row(lane);
    float sums[GROUP_COLUMNS / 2], x[PAIRS];
    unsigned n = 0;  // tiles so far

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        keys.wait_full(number);
        const unsigned slot = item_slot(base, number), odd_keys = odd_of(base, number);
        if (uniform(load_word(slot)) == END) break;
        const unsigned k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K;
        const bool even = !MAY_HIDE || uniform(load_word(odd_keys) | load_word(odd_keys + 4)) == 0;

        auto begin = [&](unsigned n) {  // S^T or dP^T
            const unsigned rows = FIRST_GROUP ? AT_Q + n % STAGES * BYTES_Q : AT_DOUT + n % DOUT_STAGES * BYTES_DOUT;
            const unsigned long long a = descriptor(FIRST_GROUP ? k_tile : base + AT_V), b = descriptor(base + rows);
            products_begin();
            product_fresh<0, 0>(x, a, b);
#pragma unroll
            for (int k = 1; k < SUMMED / 16; ++k) product<0, 0>(x, a + along_rows(k, BLOCK_K), b + along_rows(k, BLOCK_Q), 1);
            products_end();
        };
        auto accumulate = [&](const unsigned (&left)[PAIRS / 2], unsigned rows, bool add) {  // dV or dK
            const unsigned long long b = descriptor(rows, BLOCK_Q * CHUNK_ROW);
            products_begin();
#pragma unroll
            for (int k = 0; k < BLOCK_Q / 16; ++k) product_weights<1>(sums, left, 4 * k, b + along_columns(k), k > 0 || add);
            products_end();
        };
        auto query_gradients = [&](int chunk, unsigned n, float (&dq)[BLOCK_Q / 2]) {
            const unsigned long long a = descriptor(k_tile + chunk * BLOCK_K * CHUNK_ROW), b = descriptor(base + AT_PAIRS + n % 2 * BYTES_PAIRS);
            products_begin();
            product_fresh<1, 0>(dq, a, b);
#pragma unroll
            for (int k = 1; k < BLOCK_K / 16; ++k) product<1, 0>(dq, a + along_columns(k), b + along_rows(k, BLOCK_Q), 1);
            products_end();
        };
        auto add_sums = [&](int where, int chunk, const float (&dq)[BLOCK_Q / 2], Adding adding) {
            float* to = static_cast<float*>(p.partial.data) + (long long)where * (BYTES_SUMS / 4) + chunk * (BYTES_PART / 4) +
                        warp * (BYTES_WARP / 4) + lane * 4;
            if (ORDERED && adding == ADDS_NOTHING) return;
            if (ORDERED && adding == STORES) {
#pragma unroll
                for (int i = 0; i < BLOCK_Q / 8; ++i) store_four(to + i * 128, dq + 4 * i);
                return;
            }
#pragma unroll
            for (int i = 0; i < BLOCK_Q / 8; ++i) add_four(to + i * 128, dq + 4 * i);
        };
        auto wait_for_turn = [&](unsigned n) {
            if (!ORDERED) return ADDS;
            wait(turn_of(base, n), n / 2 & 1);
            return (Adding)uniform(load_word(slot_of(base, n)));
        };
        auto added = [&](unsigned n) {
            if constexpr (ORDERED) {
                __syncwarp();
                arrive_once(added_of(base, n), lane);
            }
        };
        float dq[BLOCK_Q / 2];
        bool first = true, last;
        int before = 0;  // the tile of dQ that the first group adds to

        // The note of a tile is read when the tile comes: later the answer would come behind dQ's additions.
        int next_note, next_where;
        auto wait_for_tile = [&](unsigned n) {
            if constexpr (!FIRST_GROUP) douts.wait_full(n);
            queries.wait_full(n);
        };
        auto read_note = [&](unsigned n) { next_note = uniform(load_word(note_of(base, n))), next_where = load_word(note_of(base, n) + 8); };
        if constexpr (!FIRST_GROUP) values.wait_full(number);
        wait_for_tile(n);
        begin(n);
        read_note(n);
#pragma unroll 1
        do {
            const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
            const unsigned q_tile = base + AT_Q + stage * BYTES_Q, dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT;
            const int note = next_note, where = next_where;
            last = note & LAST;
            unsigned left[PAIRS / 2];  // P or dS
            if constexpr (FIRST_GROUP) {
                if (ORDERED && warp == 0 && lane == 0) ask_for(base, n, note, where, load_word(slot + 8));
                const unsigned shift = own + AT_SHIFT + stage * BYTES_ROWS;
                float early[PAIRS / 4][2];
#pragma unroll
                for (int i = 0; i < PAIRS / 4; ++i) load_numbers_of(early[i], shift, i);
                const Line line = line_of(p, base, n, number, note, 0, warp, lane, even);
                Kept kept;
                products_wait<0>(), settle(x);  // S
                weights(p, base, n, number, note, 0, even, x, left, early, shift, unit, kept, line);
                handed.wait_empty(n);
#pragma unroll
                for (int i = 0; i < PAIRS / 4; ++i)
                    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(hand + i * 2048), "f"(x[4 * i]), "f"(x[4 * i + 1]),
                                 "f"(x[4 * i + 2]), "f"(x[4 * i + 3]) : "memory");
                __syncwarp();
                arrive_once(handed.full, lane);
                queries.release(n, lane);
                douts.wait_full(n);
            } else {
                const unsigned delta = own + AT_DELTA + dout_stage * BYTES_ROWS;
                Kept kept;
                if constexpr (HAS_DROPOUT) {
                    const Place at = place_of(base, n, number, 0);
                    kept.fill(p, at.b, at.h, at.row0, at.k0);
                }
                handed.wait_full(n);
                float s[PAIRS];
#pragma unroll
                for (int i = 0; i < PAIRS / 4; ++i)
                    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(s[4 * i]), "=f"(s[4 * i + 1]), "=f"(s[4 * i + 2]),
                                 "=f"(s[4 * i + 3]) : "r"(hand + i * 2048) : "memory");
                products_wait<0>(), settle(x);  // dP
                const bool plain = !HAS_SCORE && !HAS_DROPOUT && (note & 3) == FULL && !(note & ODD) && even;
                if (plain || !CLEANS_KEYS) gradients<true>(p, s, x, left, delta, kept);
                else gradients<false>(p, s, x, left, delta, kept);
                hand_pairs(pairs, n, turned, left, lane);
                handed.release(n, lane), douts.release(n, lane);
            }
            const unsigned of = FIRST_GROUP ? n - 1 : n;
            const bool adds = !FIRST_GROUP || !first;
            const int to = FIRST_GROUP ? before : where;
            Adding adding = ADDS;
            if (adds) pairs.wait_full(of);
            if constexpr (HAS > 0) query_gradients(CHUNK, of, dq);  // always begun, or the compiler makes it wait
            accumulate(left, FIRST_GROUP ? dout_tile : q_tile, !first);
            if constexpr (HAS > 0) {
                products_wait<1>();  // dQ
                settle(dq);
                if (adds) {
                    adding = wait_for_turn(of);
                    add_sums(to, CHUNK, dq, adding);
                }
            }
            if constexpr (HAS > 1) query_gradients(CHUNK + 1, of, dq);
            if (!last) wait_for_tile(n + 1);
            begin(last ? n : n + 1);  // likewise
            read_note(last ? n : n + 1);
            products_wait<1>();       // dV or dK, dQ
            settle(left);
            if constexpr (FIRST_GROUP) douts.release(n, lane);
            else queries.release(n, lane);
            if constexpr (HAS > 1) settle(dq);
            if (adds) {
                if constexpr (HAS > 1) add_sums(to, CHUNK + 1, dq, adding);
                added(of);
                if constexpr (FIRST_GROUP) pairs.release(of, lane);
            }
            before = where;
            first = false, ++n;
        } while (!last);
        products_wait<0>();
        settle(x), settle(sums);
        if constexpr (FIRST_GROUP) {
            pairs.wait_full(n - 1);
            query_gradients(0, n - 1, dq);
            if constexpr (HAS > 1) query_gradients(1, n - 1, x);
            products_wait<0>();
            settle(dq), settle(x);
            pairs.release(n - 1, lane);
        }
        const Item at{uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))};
        keys.release(number, lane);  // as soon as can be: the next item waits for its own
        if constexpr (FIRST_GROUP) {
            const Adding adding = wait_for_turn(n - 1);
            add_sums(before, 0, dq, adding);
            if constexpr (HAS > 1) add_sums(before, 1, x, adding);
            added(n - 1);
        }
        // Through the weights' place, which nobody reads any more, and V's, which only this group has read.
        if constexpr (FIRST_GROUP) {
            send_keys<HEAD_DIM_V, 0, 2, BYTES_PIECE>(dv_map, at, 16 * warp, lane, base + AT_SUMS + warp * 2 * BYTES_PIECE, sums, 1.0f);
            stores_wait_read();
            warps_sync(1, 128);
        } else {
            warps_sync(2, 128);
            send_keys<HEAD_DIM, 0, CHUNKS_V, BLOCK_K * CHUNK_ROW>(dk_map, at, 16 * warp, lane, base + AT_V + warp * BYTES_PIECE, sums, (float)p.scale);
            stores_wait_read();
            __syncwarp();
            values.release(number, lane);
        }
    }
    if (ORDERED && FIRST_GROUP && warp == 0 && lane == 0) ask(base, n, END, 0), ask(base, n + 1, END, 0);
    stores_wait();
}

DEVICE void multiply_tiles(const Params& p, const TensorMap& dk_map, const TensorMap& dv_map, unsigned base, int group) {
    if (group == 0) multiply_tiles_of<true>(p, dk_map, dv_map, base);
    else multiply_tiles_of<false>(p, dk_map, dv_map, base);
}
