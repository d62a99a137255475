// Which items and tiles blocks of the backward pass in float32 take, and the warp that loads them (fp16x2_backward.cu).
#pragma once

// An item: its first row, of how many. h: of queries, or of keys.
struct WorkTile { int b, h, row0, rows, n_k; long long offset; };

DEVICE WorkTile item_at(const Params& p, int b, int h, int row0) {
    const int n_k = (int)keys_of(p, b);
    return {b, h, row0, OF_QUERIES ? (int)p.n_q : n_k, n_k, offset_of(p, b)};
}

// WorkTile number `index`: tiles with most to do first, under a causal mask of queries the last, of keys the first ones, of
// p.heads_per_l2_group heads at a time; of those with least to do a quarter is left to the end (tiles_before_lpt_tail), where they even out when blocks
// finish.
DEVICE WorkTile work_tile(const Params& p, int index) {
    const int heads = (int)p.heads / (OF_QUERIES ? 1 : GQA_GROUP), all = heads * (int)p.batch;
    const int tiles = ((OF_QUERIES ? (int)p.n_q : (int)p.n_k) + ROWS - 1) / ROWS;
    const TileCoord turn = tile_coord(index, tiles_before_lpt_tail(tiles), all, (int)p.heads_per_l2_group);
    return item_at(p, turn.bh / heads, turn.bh % heads, (OF_QUERIES ? tiles - 1 - turn.tile : turn.tile) * ROWS);
}

DEVICE int num_work_tiles(const Params& p) {
    return ((OF_QUERIES ? (int)p.n_q : (int)p.n_k) + ROWS - 1) / ROWS * ((int)p.heads / (OF_QUERIES ? 1 : GQA_GROUP)) * (int)p.batch;
}

// By a warp. What the copy engine is asked for by an elect_one lane takes half as many instructions.
DEVICE void load(const Params& p, const TensorMap& a1, const TensorMap& a2, const TensorMap& b1, const TensorMap& b2,
                 unsigned base, TileList& list) {
    const Pipeline<STAGES> ring{base + AT_RING, base + AT_RING + 8 * STAGES};
    const Pipeline<ROW_BUFFERS> rows{base + AT_ROWS_RING, base + AT_ROWS_RING + 8 * ROW_BUFFERS};
    const bool leader = threadIdx.x == 0;
    const int items = num_work_tiles(p);
    unsigned n = 0, number = 0;  // tiles and items so far
    auto tile_desc = [&](int first, int second) {
        ring.producer_acquire(n);
        store_word(base + AT_TILE_DESCS + 8 * (n % STAGES), first), store_word(base + AT_TILE_DESCS + 8 * (n % STAGES) + 4, second);
    };
    auto load_rows = [&](const WorkTile& at) {
        rows.producer_acquire(number);
        const unsigned buffer = number % ROW_BUFFERS, slot = base + AT_WORK_TILES + 12 * buffer, full = rows.full + 8 * buffer;
        store_word(slot, at.b), store_word(slot + 4, at.h), store_word(slot + 8, at.row0);
        mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * (BYTES_A1 + BYTES_A2));
#pragma unroll 1
        for (int g = 0; g < MMA_WARPGROUPS; ++g) {
            const unsigned place = buffer * MMA_WARPGROUPS + g;
            load_tile<1, CHUNKS_1, 64>(base + place * BYTES_A1, a1, at.row0 + 64 * g, at.h, at.b, full);
            load_tile<1, CHUNKS_2, 64>(base + AT_A2 + place * BYTES_A2, a2, at.row0 + 64 * g, at.h, at.b, full);
        }
    };
#pragma unroll 1
    for (int index = blockIdx.x; index < items;) {
        const WorkTile at = work_tile(p, index);
        if (leader) index = atomicAdd(p.tile_counter, 1u) + gridDim.x;
        const int columns = OF_QUERIES ? at.n_k : (int)p.n_q, tiles = (columns + BLOCK - 1) / BLOCK;
        bool first = true;
#pragma unroll 1
        for (int i = 0; i < (OF_QUERIES ? 1 : GQA_GROUP) && at.row0 < at.rows; ++i) {
            const int h = OF_QUERIES ? at.h : at.h * GQA_GROUP + i, head = OF_QUERIES ? at.h / GQA_GROUP : h;
            // States of the groups' rows; a tile that is not whole is PARTIAL.
            auto look = [&](int place, int many) {
                const int from = place * BLOCK, whole = from + many * BLOCK, to = whole < columns ? whole : columns;
                auto state_of = [&](int row0, int row1) {
                    if (row0 >= at.rows) return (int)EMPTY;
                    const int end = row1 < at.rows ? row1 : at.rows;
                    const int state = OF_QUERIES ? tile_state(p, at.b, h, at.offset, row0, end, from, to)
                                                 : tile_state(p, at.b, h, at.offset, from, to, row0, end);
                    return state == FULL && (whole > columns || row1 > at.rows) ? (int)PARTIAL : state;
                };
                const int all = state_of(at.row0, at.row0 + ROWS);
                unsigned states = 0;
#pragma unroll 1
                for (int g = 0; g < MMA_WARPGROUPS; ++g)
                    states |= (all == PARTIAL && many == 1 ? state_of(at.row0 + 64 * g, at.row0 + 64 * (g + 1)) : all) << 2 * g;
                return states;
            };
            int next = 0;
            unsigned seen;
#pragma unroll 1
            for (int count; (count = fill(list, next, tiles, seen, look)) > 0; first = false) {
#pragma unroll 1
                for (int e = 0; e < count; ++e, ++n) {
                    const int tile = list.entry[e] >> 8, states = list.entry[e] & 15, stage = n % STAGES;
                    const bool begins = first && e == 0;
                    if (elect_one()) {
                        const unsigned full = ring.full + 8 * stage;
                        tile_desc(tile << 5 | (begins ? FIRST : 0) | states, h);
                        mbarrier_arrive_expect_tx(full, BYTES_B1 + BYTES_B2 + BYTES_NUMBERS);
                        load_tile<1, CHUNKS_1, BLOCK>(base + AT_B1 + stage * BYTES_B1, b1, tile * BLOCK, head, at.b, full);
                        load_tile<1, CHUNKS_2, BLOCK>(base + AT_B2 + stage * BYTES_B2, b2, tile * BLOCK, head, at.b, full);
                        if constexpr (!OF_QUERIES)
                            bulk_load(base + AT_NUMBERS + stage * BYTES_NUMBERS, row_at<const float>(p.row_factors, at.b, h, tile * BLOCK),
                                         BYTES_NUMBERS, full);
                        if (begins) load_rows(at);
                    }
                    number += begins;
                }
            }
        }
        if (first) {  // nothing is seen
            if (elect_one()) {
                tile_desc(FIRST, 0);
                mbarrier_arrive(ring.full + 8 * (n % STAGES));
                load_rows(at);
            }
            ++n, ++number;
        }
        index = uniform(index);
    }
    if (!elect_one()) return;
    tile_desc(END, 0), mbarrier_arrive(ring.full + 8 * (n % STAGES));
    if (atomicAdd(p.tile_counter + 1, 1u) == gridDim.x - 1) p.tile_counter[0] = 0, p.tile_counter[1] = 0;  // as they were found
}
