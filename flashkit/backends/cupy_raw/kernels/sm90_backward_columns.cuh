// Products of the Hopper backward pass where both warp groups share the keys: each has half the keys of S and dP, whose rows
// are queries, and then half the columns of the gradients, which are turned.
//
//     S, P, dP, dS   [64][BLOCK_K / 2]       registers; P and dS also in shared memory, two tiles
//     dK^T, dV^T     [..][64][BLOCK_K]       registers, for each chunk of 64 columns that the group has
//     dQ^T           [64][BLOCK_Q]           registers, one chunk at a time, from where it is added
//
// A step, for the tile of queries number n; in brackets the products, in the order in which they are begun:
//
//     [dP = dO V^T]        S is there already and becomes weights, while dK of the tile before is still multiplied,
//                          then dP becomes dS; both groups meet,
//     [dV^T += dO^T P] [dQ^T = K^T dS^T] [S = Q K^T of the next tile]
//                          dQ is added, one chunk while the next one is multiplied,
//     [dK^T += Q^T dS].
//
// Where a group's last chunk is past the end (there are three chunks) it multiplies what lies there, and stores nothing.
#pragma once
#include "sm90.cuh"

constexpr int HAS = (CHUNKS + 1) / 2, HAS_V = (CHUNKS_V + 1) / 2;  // chunks of a group
constexpr bool LATE = HAS > 1 && !ORDERED && BLOCK_K <= 64;  // where registers allow
enum NamedBarrier { MEETING = 1 };

// An accumulator's 8 x 8 block, packed, with its rows for columns.
DEVICE unsigned turn(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// 64 columns of dK or dV, which lie turned, 16 bytes at a time.
template <int DIM>
DEVICE void store_chunk(const Params& p, const Tensor& tensor, const Item& at, int chunk, const float (&x)[BLOCK_K / 2], float factor) {
    const int t = threadIdx.x % 4, column = 64 * chunk + threadIdx.x % 128 / 32 * 16 + t % 2 * 8;
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; n += 2) {
        unsigned words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = turn(pack(x[4 * n + 2 * i] * factor, x[4 * n + 2 * i + 1] * factor));
        turn_four(words);
        const int k = at.k0 + 8 * (n + t / 2) + threadIdx.x % 32 / 4;
        if (k < (int)p.n_k && column < DIM)
            *reinterpret_cast<uint4*>(row_at<storage>(tensor, at.b, at.head, k) + column) = uint4{words[0], words[1], words[2], words[3]};
    }
}

// A lane's pairs to a tile in shared memory, [chunk of keys][row].
DEVICE void store_pairs(unsigned tile, int group, const unsigned (&pairs)[PAIRS / 2]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    auto address = [&](int unit) { return tile + unit / 8 * BLOCK_Q * CHUNK_ROW + swizzled(row, unit % 8); };
#pragma unroll
    for (int n = 0; n + 1 < GROUP_KEYS / 8; n += 2)
        store_matrices<false>(address(group * (GROUP_KEYS / 8) + n + lane / 16), pairs[2 * n], pairs[2 * n + 1], pairs[2 * n + 2], pairs[2 * n + 3]);
    if constexpr (GROUP_KEYS % 16 != 0) {
        constexpr int n = GROUP_KEYS / 8 - 1;
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
                     ::"r"(address(group * (GROUP_KEYS / 8) + n)), "r"(pairs[2 * n]), "r"(pairs[2 * n + 1]) : "memory");
    }
}

DEVICE void multiply_tiles(const Params& p, unsigned base, int group) {
    const auto queries = rows_ring(base);
    const auto douts = douts_ring(base);
    const auto keys = keys_ring(base);
    const auto values = values_ring(base);
    const float unit = __int_as_float(uniform(__float_as_int((float)(p.scale * 1.4426950408889634))));
    const int lane = here(threadIdx.x % 32), warp = uniform(threadIdx.x / 32 % 4);
    const unsigned own = base + own_row(warp, lane);
    float dk[HAS][BLOCK_K / 2], dv[HAS_V][BLOCK_K / 2], s[PAIRS];
    unsigned n = 0;  // tiles so far

#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        keys.wait_full(number);
        const unsigned slot = item_slot(base, number), odd_keys = odd_of(base, number);
        if (uniform(load_word(slot)) == END) break;
        const unsigned k_tile = base + AT_K + number % KEY_BUFFERS * BYTES_K;
        int odd = 0;
        if (MAY_HIDE)
            for (int word = 0; word < ODD_WORDS; ++word) odd |= load_word(odd_keys + 4 * word);
        const bool even = uniform(odd) == 0;

        // c = a b^T of 64 rows: along the columns of both.
        auto of_rows = [&](float (&c)[PAIRS], unsigned rows, unsigned tile, auto dim) {
            const unsigned long long a = descriptor(rows), b = descriptor(tile + group * GROUP_KEYS * CHUNK_ROW);
            products_begin();
            product_fresh<0, 0>(c, a, b);
#pragma unroll
            for (int k = 1; k < padded(decltype(dim)::value) / 16; ++k) product<0, 0>(c, a + along_rows(k, BLOCK_Q), b + along_rows(k, BLOCK_K), 1);
            products_end();
        };
        auto scores = [&](unsigned n) { of_rows(s, base + AT_Q + n % STAGES * BYTES_Q, k_tile, Number<HEAD_DIM>{}); };
        // c += a^T pairs, of a chunk's columns: along the rows of both.
        auto accumulate = [&](float (&c)[BLOCK_K / 2], unsigned chunk, unsigned tile, bool add) {
            const unsigned long long a = descriptor(chunk), b = descriptor(tile, BLOCK_Q * CHUNK_ROW);
#pragma unroll
            for (int k = 0; k < BLOCK_Q / 16; ++k) product<1, 1>(c, a + along_columns(k), b + along_columns(k), k > 0 || add);
        };
        auto query_gradients = [&](int chunk, unsigned ds_tile, float (&dq)[BLOCK_Q / 2]) {
            const unsigned long long a = descriptor(k_tile + chunk * BLOCK_K * CHUNK_ROW), b = descriptor(ds_tile);
            products_begin();
            product_fresh<1, 0>(dq, a, b);
#pragma unroll
            for (int k = 1; k < BLOCK_K / 16; ++k) product<1, 0>(dq, a + along_columns(k), b + along_rows(k, BLOCK_Q), 1);
            products_end();
        };
        auto add_sums = [&](int where, int chunk, const float (&dq)[BLOCK_Q / 2]) {
            if (CHUNKS % 2 && chunk >= CHUNKS) return;
            float* sums = static_cast<float*>(p.partial.data) + (long long)where * (BYTES_SUMS / 4) + chunk * (BYTES_PART / 4) +
                          warp * (BYTES_WARP / 4) + lane * 4;
#pragma unroll
            for (int i = 0; i < BLOCK_Q / 8; ++i) add_four(sums + i * 128, dq + 4 * i);
        };

        queries.wait_full(n);
        scores(n);
        values.wait_full(number);
        products_wait<0>();
        settle(s);
        bool first = true, last;
        float late[BLOCK_Q / 2];  // the second chunk of dQ, which is added while the next tile's dP is multiplied
        int before = 0;           // where
#pragma unroll 1
        do {
            const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
            const unsigned shift = own + AT_SHIFT + stage * BYTES_ROWS, delta = own + AT_DELTA + dout_stage * BYTES_ROWS;
            const unsigned q_tile = base + AT_Q + stage * BYTES_Q, dout_tile = base + AT_DOUT + dout_stage * BYTES_DOUT;
            const int note = uniform(load_word(note_of(base, n))), where = load_word(note_of(base, n) + 8);
            const unsigned p_tile = base + AT_PAIRS + n % 2 * BYTES_PAIRS, ds_tile = p_tile + BYTES_PAIRS / 2;
            last = note & LAST;
            if (ORDERED && group == 0 && warp == 0 && lane == 0) ask(base, n, where, load_word(slot + 8) / BLOCK_K);
            float early[1][2][2];
            load_numbers_of(early[0], shift, 0);
            const Line line = line_of(p, base, n, number, note, group, warp, lane, even);
            douts.wait_full(n);
            float dp[PAIRS];
            of_rows(dp, dout_tile, base + AT_V, Number<HEAD_DIM_V>{});
            unsigned p_pairs[PAIRS / 2];
            Kept kept;
            products_wait<1>();  // dK of the tile before
            if (!first) {
                queries.release(n - 1, lane);
                if constexpr (LATE) add_sums(before, group * HAS + 1, late);
            }
            const bool plain = weights(p, base, n, number, note, group, even, s, p_pairs, early, shift, unit, kept, line);
            products_wait<0>();  // dP
            settle(dp);
            unsigned ds[PAIRS / 2];
            if (plain || !CLEANS_KEYS) gradients<true>(p, s, dp, ds, delta, kept);
            else gradients<false>(p, s, dp, ds, delta, kept);
            // Since they met at the tile before, both are done with the one before that, whose place this is.
            store_pairs(p_tile, group, p_pairs);
            store_pairs(ds_tile, group, ds);
            fence_async();
            warps_sync(MEETING, 256);
            products_begin();
#pragma unroll
            for (int i = 0; i < HAS_V; ++i) accumulate(dv[i], dout_tile + (group * HAS_V + i) * BLOCK_Q * CHUNK_ROW, p_tile, !first);
            products_end();
            float dq[BLOCK_Q / 2];
            query_gradients(group * HAS, ds_tile, dq);
            products_wait<1>();  // dV
            douts.release(n, lane);
            if (!last) queries.wait_full(n + 1);
            scores(last ? n : n + 1);  // always begun, or the compiler makes it wait
            products_wait<1>();  // dQ
            settle(dq);
            if (ORDERED) wait(turn_of(base, n), n / 2 & 1);
            add_sums(where, group * HAS, dq);
            if constexpr (HAS > 1) query_gradients(group * HAS + 1, ds_tile, late);
            products_begin();
#pragma unroll
            for (int i = 0; i < HAS; ++i) accumulate(dk[i], q_tile + (group * HAS + i) * BLOCK_Q * CHUNK_ROW, ds_tile, !first);
            products_end();
            products_wait<1>();  // the next tile's scores, dQ
            settle(s), settle(late);
            if constexpr (HAS > 1 && !LATE) add_sums(where, group * HAS + 1, late);
            before = where;
            if (ORDERED) {
                __syncwarp();
                arrive_once(added_of(base, n), lane);
            }
            first = false, ++n;
        } while (!last);
        products_wait<0>();
#pragma unroll
        for (int i = 0; i < HAS; ++i) settle(dk[i]);
#pragma unroll
        for (int i = 0; i < HAS_V; ++i) settle(dv[i]);
        if constexpr (LATE) add_sums(before, group * HAS + 1, late);
        const Item at{uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8))};
        queries.release(n - 1, lane), values.release(number, lane), keys.release(number, lane);
#pragma unroll
        for (int i = 0; i < HAS_V; ++i) store_chunk<HEAD_DIM_V>(p, p.dv, at, group * HAS_V + i, dv[i], 1.0f);
#pragma unroll
        for (int i = 0; i < HAS; ++i) store_chunk<HEAD_DIM>(p, p.dk, at, group * HAS + i, dk[i], (float)p.scale);
    }
    if (ORDERED && group == 0 && warp == 0 && lane == 0) ask(base, n, END, 0), ask(base, n + 1, END, 0);
}
