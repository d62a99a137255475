// The coming of a block's work in the Hopper backward pass, and the order of adding: the roles of warp group 0.
#pragma once
#include "sm90/bwd_preprocess.cuh"
#include "sm90/bwd_tile_scheduler.cuh"

// --- which tiles, and the keys ----------------------------------------------------------------------------------------

// States of the groups' keys and the rows of `many` tiles of queries, two bits a group; a tile that is not whole along the
// keys is PARTIAL.
DEVICE unsigned states_of(const Params& p, const WorkTile& at, int h, int n_k, int tile, int many) {
    const long long offset = offset_of(p, at.b);
    const int row0 = tile * BLOCK_Q, end = row0 + many * BLOCK_Q, row1 = end < (int)p.n_q ? end : (int)p.n_q;
    auto look = [&](int k0, int k1) {
        if (k0 >= n_k) return (int)EMPTY;
        const int state = tile_state(p, at.b, h, offset, row0, row1, k0, k1 < n_k ? k1 : n_k);
        return state == FULL && k1 > n_k ? (int)PARTIAL : state;
    };
    const int all = look(at.k0, at.k0 + BLOCK_K);
    unsigned states = 0;
#pragma unroll 1
    for (int g = 0; g < BLOCK_K / GROUP_KEYS; ++g) {
        int state = all;
        if (all == PARTIAL && many == 1) state = look(at.k0 + GROUP_KEYS * g, at.k0 + GROUP_KEYS * (g + 1));
        states |= state << 2 * g;
    }
    if (MAY_HIDE && states != 0 && many == 1 && (dq_semaphore_of(p, at.b, h, tile)[0] & IS_ODD)) states |= ODD;
    return states;
}

// For a tile that nothing is added to.
DEVICE void set_nothing(const Params& p, const WorkTile& at, int h, int tile) {
    const int tile_k = at.k0 / BLOCK_K;
    asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;"
                 ::"l"(order_of(p, dq_semaphore_of(p, at.b, h, tile)) + tile_k / ORDER_BITS), "r"(1u << tile_k % ORDER_BITS) : "memory");
}

// Whether 16 bytes of elements are finite: a number that is not has an exponent of ones.
DEVICE bool all_finite(const uint4& x) {
    const unsigned words[4] = {x.x, x.y, x.z, x.w}, ones = STORAGE == FLOAT16 ? 0x7c00u : 0x7f80u;
    bool finite = true;
#pragma unroll
    for (int e = 0; e < 4; ++e) finite &= (words[e] & ones) != ones && (words[e] >> 16 & ones) != ones;
    return finite;
}

// In a tile of keys, of which `exist` are not past the length: the others, and those that are not finite, are cleared. bits:
// where a bit for each of the latter goes, or 0.
template <int TILE_CHUNKS>
DEVICE void clean_keys(unsigned tile, int exist, unsigned bits) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = 0; word < ODD_WORDS; ++word) {
        unsigned odd = 0;  // of 32 keys; a lane looks at units of every fourth
        if constexpr (MAY_HIDE) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = 32 * word + 4 * i + lane / 8;
                bool finite = true;
#pragma unroll
                for (int c = 0; c < TILE_CHUNKS; ++c)
                    finite &= all_finite(load_vec(tile + (c * HELD + row) * CHUNK_ROW + lane % 8 * VEC_BYTES));
                const unsigned ballot = __ballot_sync(~0u, !finite);
#pragma unroll
                for (int r = 0; r < 4; ++r) odd |= (ballot >> 8 * r & 255) != 0 ? 1u << 4 * i + r : 0;
            }
        }
        if (bits != 0 && lane == 0) store_word(bits + 4 * word, (int)odd);
        if (odd != 0 || exist < 32 * word + 32)
            clear_rows_of<HELD, TILE_CHUNKS>(tile, [&](int row) {
                return row / 32 == word && ((odd >> row % 32 & 1) || row >= exist);
            });
    }
    fence_proxy_async();
    __syncwarp();
}

// The number of a block's next item, by one lane. Of blocks that share items the first one takes them and tells the other, which
// by the next but one has read it: it has added its part to tiles that the first could not end without.
DEVICE int take_item(const Params& p, unsigned base, unsigned number) {
    const unsigned barrier = base + AT_TAKEN + number % 2 * 8, word = base + AT_TAKEN + 16 + number % 2 * 4;
    if (rank_of_block() == 0) {
        const int index = (int)atomicAdd(p.tile_counter, 1u);
        if (CLUSTER_SIZE > 1) dsmem_store(mapa(word, 1), index, mapa(barrier, 1));
        return index;
    }
    mbarrier_arrive_expect_tx(barrier, 4);
    mbarrier_wait(barrier, number / 2 & 1);
    return load_word(word);
}

// By a warp, which works ahead of the one that loads: classifying 32 tiles may take as long as the products of a few. So its
// own are the items: it takes them, finds their tiles, loads their keys and looks through these.
DEVICE void find(const Params& p, const TensorMap& k_map, unsigned base, Found* found) {
    const auto lists = list_pipe(base);
    const auto keys = k_pipe(base);
    const bool leader = threadIdx.x % 32 == 0;
    const int tiles_q = tiles_of(p.n_q, BLOCK_Q), items = tiles_of(p.n_k, BLOCK_K) * heads_of_keys(p);
    unsigned n = 0, number = 0;
    auto next_list = [&]() -> Found& {
        mbarrier_wait_backoff(lists.empty + 8 * lists.stage(n), (n / LISTS & 1) ^ 1, SLEEP);
        return found[n % LISTS];
    };
    auto hand_over = [&]() {
        __syncwarp();
        if (leader) mbarrier_arrive(lists.full + 8 * lists.stage(n));
        ++n;
    };
    auto full_barrier = [&]() { return keys.full + 8 * keys.stage(number); };
    auto k_tile = [&]() { return base + AT_K + keys.stage(number) * BYTES_K; };
    auto came_of = [&]() { return CLEANS_KEYS ? base + AT_K_CAME + 8 * keys.stage(number) : full_barrier(); };
    // Who releases an item's keys has seen to it that all of the item before has been added to dQ. So with the buffer for an item's
    // keys being empty, all of the item before the one that lay there has been. Counted after that item's tiles are handed over,
    // as it takes its time, by the leader, with heads in shared memory.
    auto head_of = [&](unsigned number) { return base + AT_HEADS + 4 * (number % 4); };
    auto count_finished = [&](unsigned number) { fence_all_proxies(), add_one(finished_of(p, load_word(head_of(number)))); };
    constexpr unsigned BEHIND = KEY_BUFFERS + 1;
    auto announce = [&](const WorkTile& at) {
        keys.producer_acquire(number);
        const unsigned slot = work_tile_slot(base, number);
        if (leader) store_word(slot, at.b), store_word(slot + 4, at.head), store_word(slot + 8, at.k0);
    };
    auto load_keys = [&](const WorkTile& at) {
        if (!BESIDE) announce(at);
        if (elect_one()) {
            mbarrier_arrive_expect_tx(came_of(), BYTES_K);
            load_tile<1, CHUNKS, HELD>(k_tile(), k_map, held_from(at), at.head, at.b, came_of());
        }
    };
    auto clean = [&](const WorkTile& at) {
        mbarrier_wait(came_of(), number / KEY_BUFFERS & 1);
        clean_keys<CHUNKS>(k_tile(), (int)keys_of(p, at.b) - held_from(at), odd_of(base, number));
        if (leader) mbarrier_arrive(full_barrier());
    };
    // The keys of the other block, in the columns of this block's part of dQ.
    auto load_others = [&](const WorkTile& at) {
        const auto others = peer_k_pipe(base);
        const unsigned came = CLEANS_KEYS ? base + AT_OTHERS_CAME : others.full;
        const int rank = rank_of_block(), from = at.k0 + HELD * (1 - rank);
        others.producer_acquire(number);
        if (elect_one()) {
            mbarrier_arrive_expect_tx(came, BYTES_OTHERS);
            load_tile<1, SHARE, HELD>(base + AT_OTHERS, k_map, from, at.head, at.b, came, 64 * SHARE * rank);
        }
        if constexpr (CLEANS_KEYS) {
            mbarrier_wait(came, number & 1);
            clean_keys<SHARE>(base + AT_OTHERS, (int)keys_of(p, at.b) - from, 0);
            if (leader) mbarrier_arrive(others.full);
        }
    };
#pragma unroll 1
    for (;; ++number) {
        // Not earlier than it has to be, so that the last items are shared evenly.
        if (number > 0) mbarrier_wait_backoff(base + AT_SOON, (number - 1) & 1, SLEEP);
        const int index = uniform(leader ? take_item(p, base, number) : 0);
        if (index >= items) break;
        const WorkTile at = work_tile(p, index);
        const int n_k = (int)keys_of(p, at.b);
        const int bh = number_of_head(p, at.b, at.head);
        const bool descending = is_descending(p, bh);
        if (BESIDE) {
            announce(at);
            __syncwarp();
            if (leader) mbarrier_arrive(base + AT_TAKEN);
            mbarrier_wait(base + AT_PLACE, number & 1);
        } else if (!ORDERED) {
            while (!is_ready(p, bh)) {}
            fence_all_proxies();
        }
        if (KEY_BUFFERS > 1) load_keys(at);
        bool first = true;
#pragma unroll 1
        for (int member = 0, next = 0; member < GQA_GROUP;) {
            const int h = at.head * GQA_GROUP + member;
            auto tile_of = [&](int place, int many) { return ORDERED && !descending ? tiles_q - place - many : place; };
            auto look = [&](int place, int many) {
                const int from = tile_of(place, many);
                const unsigned states = states_of(p, at, h, n_k, from, many);
                if (ORDERED && states == 0)
                    for (int tile = from; tile < from + many; ++tile) set_nothing(p, at, h, tile);
                return states;
            };
            Found& list = next_list();
            unsigned seen;
            const int count = fill(list, next, tiles_q, seen, look, n == 0);
            if (const int lane = threadIdx.x % 32; ORDERED && lane < count)
                list.entry[lane] = tile_of(list.entry[lane] >> 8, 1) << 8 | (list.entry[lane] & 255);
            if (leader) {
                list.count = count, list.b = at.b, list.h = h, list.k0 = at.k0, list.before = (at.b * (int)p.heads + h) * tiles_q;
                list.ends = next >= tiles_q && member == GQA_GROUP - 1;
            }
            hand_over();
            if (next >= tiles_q) next = 0, ++member;
            if (!first) continue;
            first = false;
            if (KEY_BUFFERS == 1) load_keys(at);
            if (CLEANS_KEYS) clean(at);
            if (CLUSTER_SIZE > 1) load_others(at);
        }
        if (!ORDERED && !BESIDE) clear_some(p);
        if (!ORDERED && leader) {
            store_word(head_of(number), bh);
            if (number >= BEHIND) count_finished(number - BEHIND);
        }
    }
    Found& list = next_list();  // and the others are told to stop
    if (leader) list.b = END;
    hand_over();
    announce({END, 0, 0});
    if (leader) mbarrier_arrive(full_barrier());
    if (BESIDE && leader) mbarrier_arrive(base + AT_TAKEN);
    if (!ORDERED && leader) {
        mbarrier_wait_backoff(base + AT_OVER, 0);
        for (unsigned i = number < BEHIND ? 0 : number - BEHIND; i < number; ++i) count_finished(i);
    }
    if (leader && atomicAdd(p.tile_counter + 1, 1u) == gridDim.x - 1) p.tile_counter[0] = 0, p.tile_counter[1] = 0;  // as they were found
}

// --- loading ----------------------------------------------------------------------------------------------------------

DEVICE void load(const Params& p, const TensorMap& q_map, const TensorMap& v_map, const TensorMap& dout_map, unsigned base,
                 const Found* found) {
    const auto queries = q_pipe(base);
    const auto douts = dout_pipe(base);
    const auto values = v_pipe(base);
    const auto lists = list_pipe(base);
    const bool leader = threadIdx.x == 0;
    unsigned n = 0, number = 0, odd_tiles = 0;
    bool first = true;
    auto load_queries = [&](int b, int h, int k0, int where, int tile, unsigned states, bool last) {
        const unsigned stage = n % STAGES, dout_stage = n % DOUT_STAGES;
        const unsigned q_full = queries.full + 8 * stage, dout_full = douts.full + 8 * dout_stage;
        const bool odd = MAY_HIDE && (states & ODD);
        const unsigned q_came = odd ? base + AT_ROWS_CAME : q_full, dout_came = odd ? base + AT_ROWS_CAME : dout_full;
        const unsigned q = base + AT_Q + stage * BYTES_Q, dout = base + AT_DOUT + dout_stage * BYTES_DOUT;
        const unsigned shift = base + AT_SHIFT + stage * BYTES_ROWS;
        if (elect_one()) {
            // Numbers of rows lie one tile after the other.
            const float *shifts = static_cast<const float*>(p.bwd_lse.data) + (long long)where * BLOCK_Q;
            const float *deltas = static_cast<const float*>(p.delta.data) + (long long)where * BLOCK_Q;
            queries.producer_acquire(n);
            const unsigned tile_desc = tile_desc_of(base, n);
            store_word(tile_desc, tile << 8 | (last ? LAST : 0) | states), store_word(tile_desc + 4, h);
            store_word(tile_desc + 8, where);
            mbarrier_arrive_expect_tx(q_came, BYTES_Q + BYTES_ROWS + (odd ? BYTES_DOUT + BYTES_ROWS : 0));
            load_tile<1, CHUNKS, BLOCK_Q>(q, q_map, tile * BLOCK_Q, h, b, q_came);
            bulk_load(shift, shifts, BYTES_ROWS, q_came);
            if (first) {
                values.producer_acquire(number);
                mbarrier_arrive_expect_tx(values.full, BYTES_V);
                load_tile<1, CHUNKS_V, HELD>(base + AT_V, v_map, held_from({b, h, k0}), h / GQA_GROUP, b, values.full);
            }
            douts.producer_acquire(n);
            if (!odd) mbarrier_arrive_expect_tx(dout_came, BYTES_DOUT + BYTES_ROWS);
            load_tile<1, CHUNKS_V, BLOCK_Q>(dout, dout_map, tile * BLOCK_Q, h, b, dout_came);
            bulk_load(base + AT_DELTA + dout_stage * BYTES_ROWS, deltas, BYTES_ROWS, dout_came);
        }
        if (odd) {
            __syncwarp();
            mbarrier_wait(base + AT_ROWS_CAME, odd_tiles++ & 1);
            const auto is_odd = [&](int row) { return !is_finite(load_number(shift + 4 * row)); };
            clear_rows_of<BLOCK_Q, CHUNKS>(q, is_odd);
            clear_rows_of<BLOCK_Q, CHUNKS_V>(dout, is_odd);
            fence_proxy_async();
            __syncwarp();
            if (leader) mbarrier_arrive(q_full), mbarrier_arrive(dout_full);
        }
        first = false, ++n;
    };
    // A tile is held back until it is known whether another one follows.
    int held = 0, held_head = 0, held_where = 0;
    unsigned held_states = 0;
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        lists.consumer_wait(c);
        const Found& list = found[c % LISTS];
        const int b = list.b, h = list.h, k0 = list.k0, count = list.count, before = list.before;
        if (b == END) break;
        const int soon = list.ends ? (count > AHEAD ? count - AHEAD : 0) : -1;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            if (!ORDERED && i == soon && leader) mbarrier_arrive(base + AT_SOON);
            if (held_states != 0) load_queries(b, held_head, k0, held_where, held, held_states, false);
            held = list.entry[i] >> 8, held_head = h, held_where = before + held, held_states = list.entry[i] & 255;
        }
        if (list.ends) {  // an item that is seen by no query takes one tile all the same, where everything is hidden
            if (held_states == 0) held = 0, held_head = h, held_where = before, held_states = PARTIAL * 5 | NOTHING;
            load_queries(b, held_head, k0, held_where, held, held_states, true);
            held_states = 0, first = true, ++number;
            // In an order the next item is taken not before all is loaded: who has waited for others would come back to one that
            // others wait for.
            if ((ORDERED || soon == count) && leader) mbarrier_arrive(base + AT_SOON);
        }
        __syncwarp();
        if (leader) mbarrier_arrive(lists.empty + 8 * lists.stage(c));
    }
}

// --- adding dQ --------------------------------------------------------------------------------------------------------

DEVICE void bulk_reduce_add(float* target, unsigned source, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(target), "r"(source), "r"(bytes) : "memory");
    bulk_commit();
}
DEVICE void store_four(float* target, const float* x) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
DEVICE void add_four(float* target, const float* x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"l"(target), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

DEVICE void set_done(int* word, int tile_k) {
    asm volatile("red.release.gpu.global.or.b32 [%0], %1;" ::"l"(word + tile_k / ORDER_BITS), "r"(WRITTEN_HERE | 1u << tile_k % ORDER_BITS) : "memory");
}
DEVICE void set_written(int* word) { asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word), "r"(WRITTEN) : "memory"); }

// Until all tiles of keys whose turn comes before tile_k's are done; by a warp. Returns whether one of them has written.
DEVICE bool wait_for_turn(const Params& p, const int* done, int tile_k, bool descending) {
    const int first = descending ? tile_k + 1 : 0, end = descending ? tiles_of(p.n_k, BLOCK_K) : tile_k;
    unsigned seen = 0;
#pragma unroll 1
    for (int word = first / ORDER_BITS + threadIdx.x % 32; ORDER_BITS * word < end; word += 32) {
        const int from = first - ORDER_BITS * word, to = end - ORDER_BITS * word;
        const unsigned need = ((1u << (to < ORDER_BITS ? to : ORDER_BITS)) - 1) & ~0u << (from > 0 ? from : 0);
        unsigned x;
        while (((x = get_acquired(done + word)) & need) != need) {}
        seen |= x;
    }
    __syncwarp();
    return __any_sync(~0u, seen & WRITTEN_HERE);
}

// The order of adding, by a warp. Those that multiply say at once which tile their number n is, as sums_of() counts, and the
// tile of keys, and a step later that its dQ is there: meanwhile its turn has come. If it is in shared memory it is added from
// there; if it is in registers they are told when to add it. Two warps do this, each for every second tile.
// Four slots: before tile n + 4 is asked for, n has left.
DEVICE unsigned slot_of(unsigned base, unsigned n) { return base + AT_SLOTS + 8 * (n % 4); }
DEVICE unsigned asked_of(unsigned base, unsigned n) { return base + AT_ASKED + 8 * (n % 4); }
DEVICE void ask(unsigned base, unsigned n, int where, int tile_k) {
    store_word(slot_of(base, n), where), store_word(slot_of(base, n) + 4, tile_k);
    mbarrier_arrive(asked_of(base, n));
}
DEVICE void ask_for(unsigned base, unsigned n, int tile_desc, int where, int k0) { ask(base, n, where, tile_desc & NOTHING ? END : k0 / BLOCK_K); }
DEVICE unsigned tile_coord(unsigned base, unsigned n) { return base + AT_TURN + 8 * (n % 2); }
DEVICE unsigned added_of(unsigned base, unsigned n) { return base + AT_ADDED + 8 * (n % 2); }

enum Adding { ADDS_NOTHING, STORES, ADDS };  // who is the first to add stores: sums were not cleared
DEVICE void keep_order(const Params& p, unsigned base, int which) {
    const bool leader = elect_one();
    const int tiles_q = tiles_of(p.n_q, BLOCK_Q);
#pragma unroll 1
    for (unsigned n = which;; n += 2) {
        mbarrier_wait(asked_of(base, n), n / 4 & 1);
        const int where = load_word(slot_of(base, n)), tile_k = load_word(slot_of(base, n) + 4);
        if (where == END) break;
        int* marks = static_cast<int*>(p.dq_semaphore.data) + where * p.dq_semaphore.token;
        int* done = order_of(p, marks);
        // Of an item that is seen by no query nobody waits for the tile that it takes all the same: it leaves nothing there.
        Adding adding = ADDS_NOTHING;
        if (tile_k != END) {
            adding = wait_for_turn(p, done, tile_k, FROM_DIAGONAL && is_descending(p, where / tiles_q / GQA_GROUP)) ? ADDS : STORES;
            if (adding == STORES && leader) set_written(marks);
        }
        if (KEYS_SHARED) {
            if (leader) store_word(slot_of(base, n), adding), mbarrier_arrive(tile_coord(base, n));
            mbarrier_wait(added_of(base, n), n / 2 & 1);
            if (leader && adding != ADDS_NOTHING) set_done(done, tile_k);
        } else if (leader) {
            float* sums = part_of_sums(p, where, 0);
            mbarrier_wait(added_of(base, n), n / 2 & 1);
            if (adding != ADDS_NOTHING) {
                fence_all_proxies();
                if (adding == ADDS) bulk_reduce_add(sums, base + AT_SUMS, BYTES_SUMS);
                else bulk_store(sums, base + AT_SUMS, BYTES_SUMS), bulk_commit();
                bulk_wait_read();
            }
            mbarrier_arrive(tile_coord(base, n));  // the next one may come
            if (adding != ADDS_NOTHING) {
                bulk_wait();
                fence_all_proxies();
                set_done(done, tile_k);
            }
        }
        __syncwarp();
    }
}
