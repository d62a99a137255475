// Which work the blocks of the Hopper forward pass take, and its coming and going: the roles of warp group 0.
#pragma once
#include "sm90/pipeline.cuh"

// --- which work -------------------------------------------------------------------------------------------------------

DEVICE int num_work_tiles(const Params& p) {
    return (int)((p.n_q * PACK_GQA + BLOCK_Q - 1) / BLOCK_Q * (p.heads / PACK_GQA) * p.batch);
}

// WorkTile number `index`. With a mask: tiles with most to do first, of p.heads_per_l2_group heads at a time; of those with least to do a
// quarter is left to the end (tiles_before_lpt_tail). Else one head after the other, the ragged tiles last.
DEVICE WorkTile work_tile(const Params& p, int index) {
    const int heads = (int)p.heads / PACK_GQA, all = heads * (int)p.batch, rows = (int)p.n_q * PACK_GQA;
    const int tiles = (rows + BLOCK_Q - 1) / BLOCK_Q;
    int tile, bh;
    if constexpr (HAS_MASK) {
        const TileCoord turn = tile_coord(index, tiles_before_lpt_tail(tiles), all, (int)p.heads_per_l2_group);
        tile = tiles - 1 - turn.tile, bh = turn.bh;
    } else {
        const int whole = rows / BLOCK_Q;
        if (index < whole * all) bh = index / whole, tile = index - bh * whole;
        else bh = index - whole * all, tile = whole;
    }
    return {bh / heads, bh % heads * PACK_GQA, tile * BLOCK_Q, 0};
}

// --- which tiles ------------------------------------------------------------------------------------------------------

// States of the groups' rows and keys k0 ... k0 + BLOCK_K - 1 (times `many`), two bits a group; a tile that is not whole is PARTIAL.
DEVICE unsigned states_of(const Params& p, const WorkTile& at, int n_k, int tile, int many) {
    const int rows = (int)p.n_q * PACK_GQA, k0 = tile * BLOCK_K, whole = k0 + many * BLOCK_K, k1 = whole < n_k ? whole : n_k;
    const long long offset = offset_of(p, at.b);
    auto look = [&](int row0, int row1) {
        const int from = row0 / PACK_GQA, to = (row1 + PACK_GQA - 1) / PACK_GQA;
        int state = tile_state(p, at.b, at.h, offset, from, to, k0, k1);
#pragma unroll 1
        for (int other = 1; HAS_MASK && other < PACK_GQA; ++other)
            if (state != tile_state(p, at.b, at.h + other, offset, from, to, k0, k1)) state = PARTIAL;
        return state == FULL && whole > n_k ? (int)PARTIAL : state;
    };
    const int end = at.row0 + BLOCK_Q < rows ? at.row0 + BLOCK_Q : rows;
    const int all = look(at.row0, end);
    unsigned states = 0;
#pragma unroll 1
    for (int g = 0; g < MMA_WARPGROUPS; ++g) {
        const int row0 = at.row0 + 64 * g, row1 = row0 + 64 < end ? row0 + 64 : end;
        int state = row0 < end ? all : (int)EMPTY;
        if (HAS_MASK && state == PARTIAL && many == 1) state = look(row0, row1);
        states |= state << 2 * g;
    }
    return states;
}

// What the warp that finds tiles hands to the one that loads: tiles of one item, perhaps not all of them.
struct Chunk {
    int b, h, row0;          // of the item; b: END after the last one
    int count, last, first;  // how many tiles here; the last tile of all keys; bits of the first tile's tile_desc
    int ends;                // whether there are no more of the item
    TileList list;
};
static_assert(sizeof(Chunk) == CHUNK_BYTES, "sm90.py and Chunk differ");

// Whether the next item is taken not before the end of this one is near, so that the last ones are shared evenly: where they
// are long enough for it.
DEVICE bool takes_late(const Params& p) { return p.n_k > 16 * BLOCK_K; }

// By a warp. It works ahead of the one that loads, as classifying may take as long as a tile's products.
DEVICE void find(const Params& p, unsigned base, Chunk* found, unsigned* ticket) {
    const Pipeline<2> lists{base + AT_LIST_PIPE, base + AT_LIST_PIPE + 16};
    const bool leader = threadIdx.x % 32 == 0;
    const int items = num_work_tiles(p);
    const bool late = takes_late(p);
    unsigned n = 0, number = 0;
    auto hand_over = [&]() {
        __syncwarp();
        if (leader) mbarrier_arrive(lists.full + 8 * (n % 2));
        ++n;
    };
    auto next_chunk = [&]() -> Chunk& {
        mbarrier_wait_backoff(lists.empty + 8 * (n % 2), (n / 2 & 1) ^ 1);
        return found[n % 2];
    };
#pragma unroll 1
    for (int index = blockIdx.x; index < items;) {
        const WorkTile at = work_tile(p, index);
        const int n_k = (int)keys_of(p, at.b), tiles = (n_k + BLOCK_K - 1) / BLOCK_K;
        int next = 0;
        unsigned seen;
        auto look = [&](int place, int many) { return states_of(p, at, n_k, tiles - place - many, many); };  // the last keys first
#pragma unroll 1
        for (bool first = true; first || next < tiles; first = false) {
            Chunk& chunk = next_chunk();
            const int count = fill(chunk.list, next, tiles, seen, look, n == 0);
            // Groups that see nothing take a tile all the same, where everything is hidden from them.
            unsigned blind = 0;
#pragma unroll
            for (int g = 0; g < MMA_WARPGROUPS; ++g) blind |= (seen >> 2 * g & 3) == EMPTY ? PARTIAL << 2 * g : 0;
            if (leader) {
                if (count == 0) chunk.list.entry[0] = (tiles - 1) << 8;  // tile 0
                chunk.b = at.b, chunk.h = at.h, chunk.row0 = at.row0, chunk.last = tiles - 1, chunk.ends = next >= tiles;
                chunk.count = first && count == 0 ? 1 : count, chunk.first = first ? FIRST | blind : 0;
            }
            hand_over();
        }
        if (late) mbarrier_wait_backoff(base + AT_SOON, number++ & 1);
        index = uniform(leader ? (int)(atomicAdd(ticket, 1) + gridDim.x) : 0);
    }
    Chunk& chunk = next_chunk();
    if (leader) chunk.b = END;
    hand_over();
    if (leader && atomicAdd(ticket + 1, 1u) == gridDim.x - 1) ticket[0] = 0, ticket[1] = 0;  // as they were found
}

// --- loading ----------------------------------------------------------------------------------------------------------

// By one thread.
DEVICE void load(const Params& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, unsigned base,
                 const Chunk* found) {
    const Pipeline<Q_BUFFERS> queries{base + AT_Q_PIPE, base + AT_Q_PIPE + 8 * Q_BUFFERS};
    const Pipeline<STAGES> keys{base + AT_K_PIPE, base + AT_K_PIPE + 8 * STAGES}, values{base + AT_V_PIPE, base + AT_V_PIPE + 8 * STAGES};
    const Pipeline<2> lists{base + AT_LIST_PIPE, base + AT_LIST_PIPE + 16};
    const bool late = takes_late(p);
    unsigned n = 0, number = 0;  // tiles and items so far
    int value_tile = 0, value_head = 0, value_b = 0;
    auto load_values = [&]() {  // of tile n - 1
        values.producer_acquire(n - 1);
        const unsigned stage = (n - 1) % STAGES, full = values.full + 8 * stage;
        mbarrier_arrive_expect_tx(full, BYTES_V);
        load_tile<1, CHUNKS_V, BLOCK_K>(base + at_v(stage), v_map, value_tile * BLOCK_K, value_head, value_b, full, 0, chunk_v(stage));
    };
    auto load_queries = [&](int b, int h, int row0) {
        queries.producer_acquire(number);
        const unsigned buffer = number % Q_BUFFERS, slot = work_tile_slot(base, buffer), full = queries.full + 8 * buffer;
        store_word(slot, b), store_word(slot + 4, h), store_word(slot + 8, row0);
        if (b == END) {
            mbarrier_arrive(full);
        } else {
            mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * 64 * CHUNK_ROW * CHUNKS_K);
#pragma unroll 1
            for (int g = 0; g < MMA_WARPGROUPS; ++g)
                load_tile<PACK_GQA, CHUNKS_K, 64>(rows_at(base, buffer, g), q_map, (row0 + 64 * g) / PACK_GQA,
                                              h / PACK_GQA, b, full);
        }
        ++number;
    };
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        lists.consumer_wait(c);
        const Chunk& chunk = found[c % 2];
        const int b = chunk.b, count = chunk.count, head = chunk.h / GQA_GROUP;
        if (b == END) break;
        const int soon = !late || !chunk.ends ? -1 : count > AHEAD ? count - AHEAD : 0;
        if (soon == count) mbarrier_arrive(base + AT_SOON);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int entry = chunk.list.entry[i], tile = chunk.last - (entry >> 8), first = i == 0 ? chunk.first : 0;
            const unsigned stage = n % STAGES, full = keys.full + 8 * stage;
            if (i == soon) mbarrier_arrive(base + AT_SOON);
            keys.producer_acquire(n);
            store_word(base + AT_TILE_DESCS + 4 * stage, tile << 8 | first | (entry & 63));
            mbarrier_arrive_expect_tx(full, BYTES_K);
            load_tile<1, CHUNKS_K, BLOCK_K>(base + at_k(stage), k_map, tile * BLOCK_K, head, b, full);
            if (n > 0) load_values();
            value_tile = tile, value_head = head, value_b = b;
            ++n;
            if (first) load_queries(b, chunk.h, chunk.row0);
        }
        mbarrier_arrive(lists.empty + 8 * (c % 2));
    }
    if (n > 0) load_values();  // and the others are told to stop
    keys.producer_acquire(n);
    store_word(base + AT_TILE_DESCS + 4 * (n % STAGES), END);
    mbarrier_arrive(keys.full + 8 * (n % STAGES));
    load_queries(END, 0, 0);
}

// --- storing ----------------------------------------------------------------------------------------------------------

// By one thread.
DEVICE void store(const Params& p, const TensorMap& out_map, unsigned base) {
    const Pipeline<Q_BUFFERS> queries{base + AT_Q_PIPE, base + AT_Q_PIPE + 8 * Q_BUFFERS};
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        const unsigned buffer = number % Q_BUFFERS, slot = work_tile_slot(base, buffer);
        queries.consumer_wait(number);
        const int b = load_word(slot), h = load_word(slot + 4);
        if (b == END) break;
#pragma unroll 1
        for (int g = 0; g < MMA_WARPGROUPS; ++g) {
            const int row0 = load_word(slot + 8) + 64 * g;
            mbarrier_wait_backoff(done_at(base, buffer, g), number / Q_BUFFERS & 1);
            if (row0 < (int)p.n_q * PACK_GQA) {
#pragma unroll
                for (int c = 0; c < CHUNKS_OUT; ++c)
                    tma_store<PACK_GQA>(out_map, {OUT_COLUMNS * c, row0 / PACK_GQA, h / PACK_GQA, b},
                                    rows_at(base, buffer, g) + c * 64 * CHUNK_ROW);
            }
            bulk_commit();
        }
        bulk_wait_read();
        mbarrier_arrive(queries.empty + 8 * buffer);
    }
    bulk_wait();
}
