// The producer: one thread issues TMA loads of K, V and Q for every K/V tile of every work tile that the scheduler
// lists. Of pages another warp's issues those of V.
#pragma once
#include "sm90/layout.cuh"

// --- the tile scheduler ----------------------------------------------------------------------------------------------
//
// The tile scheduler of the forward pass: a persistent grid takes work tiles from an atomic counter. A warp of its own
// claims them and lists the K/V tiles that the mask leaves of each.

// The order of work tiles.
struct TileScheduler : WorkTileCounter {
    PackedTiles<QUERIES, BLOCK_Q> packed{p};

    // Work tiles: BLOCK_Q rows of PACK_GQA heads.
    __device__ __forceinline__ int tiles() const {  // of a head
        static_assert(!IS_PACKED || PACK_GQA == 1, "a tile of packed sequences has rows of one head");
        if constexpr (IS_PACKED) return packed.total;
        return (int)((max_n_q(p) * PACK_GQA + BLOCK_Q - 1) / BLOCK_Q);
    }
    __device__ __forceinline__ int count() const {
        return tiles() * (int)(p.heads / PACK_GQA * num_entries(p));
    }
    // Under a mask: longest first, with L2 swizzle and LPT tail. Packed sequences: in turn, with L2 swizzle, as a row
    // of one head is next to those of the others. Otherwise head after head, the ragged tiles last.
    __device__ __forceinline__ WorkTile work_tile(int index) {  // by a warp
        const int heads = (int)p.heads / PACK_GQA, all = heads * (int)num_entries(p);
        const int rows = (int)max_n_q(p) * PACK_GQA, tiles = this->tiles();
        int tile, bh;
        if constexpr (HAS_MASK || IS_PACKED) {
            const TileCoord at = tile_coord(index, tiles_before_lpt_tail(tiles), all, (int)p.heads_per_l2_group);
            tile = HAS_MASK ? tiles - 1 - at.tile : at.tile, bh = at.bh;
        } else {
            const int whole = rows / BLOCK_Q;
            if (index < whole * all) bh = index / whole, tile = index - bh * whole;
            else bh = index - whole * all, tile = whole;
        }
        const SeqTile at = IS_PACKED ? packed.tile(tile) : SeqTile{bh / heads, tile};
        return {(int)at.b, bh % heads * PACK_GQA, (int)at.tile * BLOCK_Q, 0};
    }
};

// State of rows row0 ... row1 - 1 of a work tile and of keys k0 ... k1 - 1. A ragged tile is PARTIAL. MASK_OF_HEADS:
// the mask may differ from head to head.
template <bool MASK_OF_HEADS>
DEVICE int tile_state_of_rows(const Params& p, const WorkTile& at, long long q_position, int row0, int row1, int k0,
                              int k1, bool is_ragged) {
    const int from = row0 / PACK_GQA, to = (row1 + PACK_GQA - 1) / PACK_GQA;
    int state = tile_state(p, at.b, at.h, q_position, from, to, k0, k1);
#pragma unroll 1
    for (int other = 1; MASK_OF_HEADS && other < PACK_GQA; ++other)
        if (state != tile_state(p, at.b, at.h + other, q_position, from, to, k0, k1)) state = PARTIAL;
    return state == FULL && is_ragged ? (int)PARTIAL : state;
}

// States of the warp groups' rows in K/V tiles tile ... tile + count - 1, two bits each.
DEVICE unsigned kv_tile_states(const Params& p, const WorkTile& at, const SeqInfo& of, int tile, int count) {
    const int rows = (int)of.n_q * PACK_GQA, n_k = (int)of.n_k, k0 = tile * BLOCK_K, whole = k0 + count * BLOCK_K,
        k1 = whole < n_k ? whole : n_k;
    auto state_of = [&](int row0, int row1) {
        return tile_state_of_rows<HAS_MASK>(p, at, of.q_position, row0, row1, k0, k1, whole > n_k);
    };
    const int end = at.row0 + BLOCK_Q < rows ? at.row0 + BLOCK_Q : rows;
    const int all = state_of(at.row0, end);
    unsigned states = 0;
#pragma unroll 1
    for (int wg = 0; wg < MMA_WARPGROUPS; ++wg) {
        const int row0 = at.row0 + 64 * wg, row1 = row0 + 64 < end ? row0 + 64 : end;
        int state = row0 < end ? all : (int)EMPTY;
        if (HAS_MASK && state == PARTIAL && count == 1) state = state_of(row0, row1);
        states |= state << 2 * wg;
    }
    return states;
}

// K/V tiles of a work tile, all or some, from the scheduler warp to the producer.
struct WorkTileList {
    int b, h, row0;         // the work tile; b is END behind the last one
    int count, last_tile;   // entries of `list`; the last K/V tile of all keys, from which indices count down
    int first_bits;         // what the descriptor of the list's first tile has beyond its states
    int ends;               // whether these are the last ones of the work tile
    TileList list;
};
static_assert(sizeof(WorkTileList) == LIST_HEADER + 4 * LIST_CAPACITY, "sm90_launch.py and WorkTileList differ");

// Long sequences: the next work tile is claimed when this one nears its end, so that the last ones are shared evenly.
// Short ones, of so many K/V tiles, leave no time for that; tiles of FP16x2 and of wide heads take longer.
DEVICE bool claims_late(int tiles) { return tiles > (FP16X2 || HEAD_DIM > 128 ? 4 : 16); }
constexpr int CLAIM_AHEAD = MASK_READS_ARRAYS ? 12 : 4;  // K/V tiles before the end
// For the producer: the entry of a list of `count` before which the next work tile is claimed, -1 for none.
DEVICE int claim_before(bool late, int count) { return !late ? -1 : count > CLAIM_AHEAD ? count - CLAIM_AHEAD : 0; }

// O and the log-sum-exp of a packed sequence without keys. A modification must not be asked about it: those queries
// that follow the last sequence are of no batch entry.
DEVICE void store_without_keys(const Params& p, const WorkTile& at) {
    const int n_q = (int)seq_info(p, at.b).n_q, lane = threadIdx.x % 32;
    const float lse = HAS_SINKS ? static_cast<const float*>(p.sinks)[at.h] : HIDDEN;
#pragma unroll 1
    for (int row = at.row0; row < n_q && row < at.row0 + BLOCK_Q; ++row) {
        uint4* out = reinterpret_cast<uint4*>(q_row<storage>(p, p.out, at.b, at.h, row));
        uint4* d_out = reinterpret_cast<uint4*>(q_row<storage>(p, HAS_TANGENTS ? p.dout : p.out, at.b, at.h, row));
        for (int vec = lane; vec < HEAD_DIM_V * (int)sizeof(storage) / VEC_BYTES; vec += 32) {
            out[vec] = uint4{};
            if constexpr (HAS_TANGENTS) d_out[vec] = uint4{};
        }
        if (lane != 0) continue;
        *q_row<float>(p, p.lse, at.b, at.h, row) = lse;
        if constexpr (HAS_STATS) {
            *q_row<float>(p, p.entropy, at.b, at.h, row) = 0;
            *q_row<float>(p, p.max_logit, at.b, at.h, row) = HIDDEN;
        }
        if constexpr (HAS_TANGENTS) *q_row<float>(p, p.dlse, at.b, at.h, row) = 0;
    }
}

// The scheduler warp. It runs ahead of the producer: classifying tiles is a latency-bound chain, and may take as long
// as the products of a tile.
DEVICE void scheduler_warp(const Params& p, unsigned base, WorkTileList* lists) {
    ListWriter<WorkTileList, 2> writer{list_pipe(base), lists};
    TileScheduler scheduler{p};
    const bool leader = threadIdx.x % 32 == 0;
    const int count = scheduler.count();
    unsigned number = 0;  // late claims so far
#pragma unroll 1
    for (int index = scheduler.initial(); index < count;) {
        const WorkTile at = scheduler.work_tile(index);
        const SeqInfo of = seq_info(p, at.b);
        const int n_k = (int)of.n_k, tiles = (n_k + BLOCK_K - 1) / BLOCK_K;
        const bool skipped = IS_PACKED && n_k == 0;
        const bool late = !skipped && claims_late(tiles);
        if (skipped) {
            store_without_keys(p, at);
            index = scheduler.claimed(scheduler.claim());
            continue;
        }
        int next = 0, claim = 0;
        unsigned seen;
        // The last keys come first.
        auto states_of = [&](int i, int many) { return kv_tile_states(p, at, of, tiles - i - many, many); };
#pragma unroll 1
        for (bool first = true; first || next < tiles; first = false) {
            WorkTileList& to = writer.acquire();
            // It arrives while the tiles are listed. Before a list is free it would be too early: other CTAs may be
            // sooner done.
            if (first && !late) claim = scheduler.claim();
            const int found = fill(to.list, next, tiles, seen, states_of, writer.n == 0);
            // A warp group without any visible key still gets one tile, as PARTIAL with every pair masked: rows without
            // keys need no code of their own.
            unsigned blind = 0;
            UNROLL(wg, MMA_WARPGROUPS) blind |= (seen >> 2 * wg & 3) == EMPTY ? PARTIAL << 2 * wg : 0;
            if (leader) {
                if (found == 0) to.list.entry[0] = (tiles - 1) << 8;  // tile 0
                to.b = at.b, to.h = at.h, to.row0 = at.row0, to.last_tile = tiles - 1, to.ends = next >= tiles;
                to.count = first && found == 0 ? 1 : found, to.first_bits = first ? FIRST_TILE | blind : 0;
                SeqSlot{p, at.b, list_seq(base, writer.n)}.store(of);
            }
            writer.commit();
        }
        if (late) mbarrier_wait_backoff(base + AT_CLAIM, number++ & 1), claim = scheduler.claim();
        index = scheduler.claimed(claim);
    }
    WorkTileList& to = writer.acquire();
    if (leader) to.b = END;
    writer.commit();
    if (leader) scheduler.reset();
}

// --- the producer ----------------------------------------------------------------------------------------------------

// page, row: where a lane's box begins, of keys in pages; page as the table has it, which may be no page.
struct KvTile { int tile, head, b, row; long long page; };

// FP8: the tile that a stage of V holds, for the transpose warp. b: END behind the last one.
DEVICE void store_v_tile(unsigned slot, const KvTile& at) {
    store_word(slot, at.b), store_word(slot + 4, at.tile);
}

// FP8 with scales of blocks: a tile's scales of K and V, as they lie.
DEVICE float2 tile_scales(const Params& p, int b, int head, int tile) {
    return {Elements::key_scale(p, p.k_scale, b, head, tile * BLOCK_K),
            Elements::key_scale(p, p.v_scale, b, head, tile * BLOCK_K)};
}

// Behind the descriptor: the scale of K, log2 and inverse of that of V.
DEVICE void store_scales(unsigned slot, const float2& x) {
    const float v = valid_v_scale(x.y);
    store_float(slot + 4, valid_scale(x.x)), store_floats(slot + 8, log2_fast(v), reciprocal(v));
}

// Tangents of Q, K and V, for those that have one.
struct TangentMaps { const TensorMap *q, *k, *v; };

// Of a dense bias and of a mask, for those of which tiles come with K.
struct DenseMaps {
    const TensorMap *bias, *mask;

    __device__ __forceinline__ void load(unsigned base, unsigned n, int b, int h, int row, int key,
                                         unsigned barrier) const {
        BiasTile::load(base + AT_BIAS + n % STAGES * BiasTile::SIZE, *bias, b, h, row, key, barrier);
        MaskTile::load(base + AT_MASK + n % STAGES * MaskTile::SIZE, *mask, b, h, row, key, barrier);
    }
};

// Where K and V come from: contiguous tensors, or pages.
struct KvSource {
    const Params& p;
    const TensorMap &k_map, &v_map;
    const TangentMaps tangents{};

    // The page of a sequence's last key. Asked for once a list: the length is far away.
    __device__ __forceinline__ unsigned last_page(int b) const {
        const int n_k = IS_PAGED ? (int)seq_info(p, b).n_k : 0;
        return n_k > 0 ? page_number(p, n_k - 1) : 0;
    }
    // Looked up once for K and V. Behind the last key comes what lies there in its page, or that page again.
    __device__ __forceinline__ KvTile located(int tile, int head, int b, unsigned last) const {
        if constexpr (!IS_PAGED) return {tile, head, b};
        const unsigned key = tile * BLOCK_K + threadIdx.x % 32 * BOX_ROWS, number = page_number(p, key);
        return {tile, head, b, (int)(key - number * p.page), table_entry(p, b, number < last ? number : last)};
    }

    // Calls f(box, row) by one lane for each box of a tile, with its first row in the tile. The others tell it where
    // boxes begin: if each lane loaded its own, ptxas would elect one after another.
    template <typename F>
    __device__ __forceinline__ void for_each_box(const KvTile& at, F f) const {
        if constexpr (!IS_PAGED) return f(kv_box(p, at.b, at.head, at.tile * BLOCK_K), 0u);
        constexpr int BOXES = BLOCK_K / BOX_ROWS;
        const int page = (int)existing_page(p, at.page), head = uniform(at.head);
        int rows[BOXES], pages[BOXES];
        UNROLL(i, BOXES) rows[i] = __shfl_sync(~0u, at.row, i), pages[i] = __shfl_sync(~0u, page, i);
        if (elect_one()) {
            UNROLL(i, BOXES) f(Box{0, rows[i], head, pages[i]}, i * BOX_ROWS);
        }
        __syncwarp();  // a lane that fell behind would wait for a phase of the pipeline that is over
    }
    template <int CHUNKS>
    __device__ __forceinline__ void load_pages(const TensorMap& map, const KvTile& at, unsigned target, int chunk,
                                               unsigned barrier) const {
        if (is_leader()) mbarrier_arrive_expect_tx(barrier, BLOCK_K * CHUNK_ROW * CHUNKS);
        for_each_box(at, [&](const Box& box, unsigned row) {
            load_tile<1, CHUNKS, BLOCK_K, CHUNK_COLUMNS>(target + row * CHUNK_ROW, map, box, barrier, 0, chunk);
        });
    }
    __device__ __forceinline__ static bool is_leader() { return !IS_PAGED || threadIdx.x % 32 == 0; }

    __device__ __forceinline__ void load_k(const KvTile& at, unsigned target, unsigned barrier) const {
        if constexpr (IS_PAGED) return load_pages<CHUNKS_K>(k_map, at, target, CHUNK_BYTES, barrier);
        mbarrier_arrive_expect_tx(barrier, BYTES_K + BiasTile::SIZE + MaskTile::SIZE);
        const Box box = kv_box(p, at.b, at.head, at.tile * BLOCK_K);
        load_tile<1, CHUNKS_K, BLOCK_K, CHUNK_COLUMNS>(target, k_map, box, barrier, 0, ROWS_K * CHUNK_ROW);
        if constexpr (TANGENT_K)
            load_tile<1, CHUNKS_K, BLOCK_K>(target + CHUNK_BYTES, *tangents.k, box, barrier, 0, ROWS_K * CHUNK_ROW);
    }
    __device__ __forceinline__ void load_v(const KvTile& at, unsigned target, int chunk_stride,
                                           unsigned barrier) const {
        if constexpr (IS_PAGED) return load_pages<CHUNKS_V>(v_map, at, target, chunk_stride, barrier);
        if constexpr (GETS_VT) {  // the keys of each column
            mbarrier_arrive_expect_tx(barrier, COLUMNS * CHUNK_ROW);
            return tma_load<1>(target, v_map, Box{at.tile * BLOCK_K, 0, at.head, at.b}, barrier);
        }
        mbarrier_arrive_expect_tx(barrier, BYTES_V);
        const Box box = kv_box(p, at.b, at.head, at.tile * BLOCK_K);
        load_tile<1, CHUNKS_V, BLOCK_K, CHUNK_COLUMNS>(target, v_map, box, barrier, 0, chunk_stride);
        if constexpr (TANGENT_V)
            load_tile<1, CHUNKS_V, BLOCK_K>(target + CHUNKS_V * CHUNK_BYTES, *tangents.v, box, barrier);
    }
};

// Writes a work tile to its slot, and loads its rows. list_seq: the SeqSlot of its list. b: END tells consumers and the
// store warp to stop.
DEVICE void load_q(const Params& p, const TensorMap& q_map, const TensorMap* dq_map, unsigned base, unsigned number,
                   int b, int h, int row0, unsigned list_seq) {
    const Pipeline<Q_BUFFERS> pipe_q = q_pipe(base);
    pipe_q.producer_acquire(number);
    const unsigned buffer = number % Q_BUFFERS, slot = work_tile_slot(base, number), full = pipe_q.full_barrier(number);
    store_word(slot, b), store_word(slot + 4, h), store_word(slot + 8, row0);
    if (b == END) {
        mbarrier_arrive(full);
    } else {
        const SeqSlot seq = seq_of(p, b, slot);
        seq.copy_from(list_seq);
        mbarrier_arrive_expect_tx(full, MMA_WARPGROUPS * 64 * CHUNK_ROW * CHUNKS_K * (1 + TANGENT_Q));
#pragma unroll 1
        for (int wg = 0; wg < MMA_WARPGROUPS; ++wg) {
            const unsigned target = q_rows(base, buffer, wg);
            const Box box = q_box(p, b, h / PACK_GQA, (row0 + 64 * wg) / PACK_GQA);
            load_tile<PACK_GQA, CHUNKS_K, 64, CHUNK_COLUMNS>(target, q_map, box, full);
            if constexpr (TANGENT_Q) load_tile<PACK_GQA, CHUNKS_K, 64>(target + TANGENT_OF_Q, *dq_map, box, full);
        }
    }
}

// V follows K one tile later, as consumers need it. Q follows the first K of its work tile: consumers begin with a K
// tile before they release the previous Q, so this order cannot deadlock. Of pages all lanes come, for load_pages().
DEVICE void producer(const Params& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                     unsigned base, const WorkTileList* lists, const TangentMaps& tangents = {},
                     const DenseMaps& dense = {}) {
    const Pipeline<STAGES> pipe_k = k_pipe(base);
    const Pipeline<V_STAGES> pipe_v = v_pipe(base);
    const Pipeline<2> pipe_lists = list_pipe(base);
    const KvSource kv{p, k_map, v_map, tangents};
    const bool leader = KvSource::is_leader();
    unsigned n = 0, number = 0;  // K/V tiles, work tiles so far
    KvTile previous{}, looked_up{};
    float2 scales{};  // FP8, of a tile: on their way while the one before is loaded
    auto load_previous_v = [&]() {
        pipe_v.producer_acquire(n - 1);
        const unsigned stage = (n - 1) % V_STAGES;
        if constexpr (FP8 && !GETS_VT) store_v_tile(v_tile_slot(base, n - 1), previous);
        kv.load_v(previous, base + at_v(stage), chunk_stride_v(stage), pipe_v.full_barrier(n - 1));
    };
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        pipe_lists.consumer_wait(c);
        const WorkTileList& work = lists[c % 2];
        const int b = work.b, count = work.count, head = work.h / GQA_GROUP;
        if (b == END) break;
        const unsigned last_page = kv.last_page(b);
        const auto tile_of = [&](int entry) { return work.last_tile - (entry >> 8); };
        const auto located = [&](int entry) { return kv.located(tile_of(entry), head, b, last_page); };
        const int claim_at = claim_before(work.ends && claims_late(work.last_tile + 1), count);
        if (leader && claim_at == count) mbarrier_arrive(base + AT_CLAIM);
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            const int entry = work.list.entry[i], first = i == 0 ? work.first_bits : 0;
            if (leader && i == claim_at) mbarrier_arrive(base + AT_CLAIM);
            const KvTile at = IS_PAGED && i > 0 ? looked_up : located(entry);
            if (SCALES_OF_BLOCKS && i == 0) scales = tile_scales(p, b, head, at.tile);
            pipe_k.producer_acquire(n);
            if constexpr (FP8) {
                const int next = i + 1 < count ? work.list.entry[i + 1] : ~entry;
                const int pair = !first && (entry & 63) == (next & 63) ? PAIR : 0;
                const int last = ENDS_WORK_TILE && i + 1 == count && work.ends ? ENDS_WORK_TILE : 0;
                const int states = entry & 63;
                if (leader) store_word(tile_desc_slot(base, n), at.tile << TILE_BIT | first | pair | last | states);
                if (SCALES_OF_BLOCKS) {
                    store_scales(tile_desc_slot(base, n), scales);
                    if (i + 1 < count) scales = tile_scales(p, b, head, tile_of(next));
                }
            } else if (leader) {
                store_word(tile_desc_slot(base, n), at.tile << 8 | first | (entry & 63));
            }
            kv.load_k(at, base + at_k(n % STAGES), pipe_k.full_barrier(n));
            dense.load(base, n, b, work.h, work.row0, at.tile * BLOCK_K, pipe_k.full_barrier(n));
            // The table is far away: the next tile's pages arrive while V's stage is awaited.
            if (IS_PAGED && i + 1 < count) looked_up = located(work.list.entry[i + 1]);
            if (!HAS_V_PRODUCER && n > 0) load_previous_v();
            previous = at;
            ++n;
            if (leader && first)
                load_q(p, q_map, tangents.q, base, number++, b, work.h, work.row0, list_seq(base, c));
        }
        if (IS_PAGED) __syncwarp();  // all lanes have read the list
        if (leader) mbarrier_arrive(pipe_lists.empty_barrier(c));
    }
    if (!HAS_V_PRODUCER && n > 0) load_previous_v();
    if (!leader) return;
    pipe_k.producer_acquire(n);
    store_word(tile_desc_slot(base, n), END);
    mbarrier_arrive(pipe_k.full_barrier(n));
    load_q(p, q_map, tangents.q, base, number, END, 0, 0, 0);
    if constexpr (FP8 && !GETS_VT) {
        pipe_v.producer_acquire(n);
        store_v_tile(v_tile_slot(base, n), {0, 0, END});
        mbarrier_arrive(pipe_v.full_barrier(n));
    }
}

// The producer of V in pages, all lanes, beside that of K and Q.
DEVICE void v_producer(const Params& p, const TensorMap& v_map, unsigned base, const WorkTileList* lists) {
    const Pipeline<V_STAGES> pipe_v = v_pipe(base);
    const Pipeline<2> pipe_lists = list_pipe(base);
    const KvSource kv{p, v_map, v_map};
    unsigned n = 0;
#pragma unroll 1
    for (unsigned c = 0;; ++c) {
        pipe_lists.consumer_wait(c);
        const WorkTileList& work = lists[c % 2];
        const int b = work.b, count = work.count, head = work.h / GQA_GROUP;
        if (b == END) break;
        const unsigned last_page = kv.last_page(b);
        const auto located = [&](int i) {
            return kv.located(work.last_tile - (work.list.entry[i] >> 8), head, b, last_page);
        };
        KvTile next = located(0);
#pragma unroll 1
        for (int i = 0; i < count; ++i, ++n) {
            const KvTile at = next;
            const unsigned stage = n % V_STAGES;
            pipe_v.producer_acquire(n);
            kv.load_v(at, base + at_v(stage), chunk_stride_v(stage), pipe_v.full_barrier(n));
            if (i + 1 < count) next = located(i + 1);
        }
        __syncwarp();  // all lanes have read the list
        if (KvSource::is_leader()) mbarrier_arrive(pipe_lists.empty_barrier(c));
    }
}
