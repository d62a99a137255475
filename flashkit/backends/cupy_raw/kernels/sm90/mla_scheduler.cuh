// The tile scheduler of latent attention: units from an atomic counter, and the K tiles that the mask leaves of each.
#pragma once
#include "sm90/producer.cuh"

// --- shared memory ---------------------------------------------------------------------------------------------------
//
// Tile shape and shared memory of the forward pass of latent attention, beyond layout.cuh.
//
// From the head: MASK_OF_HEADS, whether the mask differs from head to head, CLUSTER_SIZE, and the offsets of
//
//     AT_K                [STAGES][BLOCK_K][HEAD_DIM]; the first HEAD_DIM_V columns are V
//     AT_Q                [64][HEAD_DIM]
//     AT_P                [64][BLOCK_K]
//     AT_K_PIPE           full and empty barriers of each part of K
//     AT_LIST_PIPE, AT_UNIT_PIPE                        full and empty barriers
//     AT_CLAIM            as in layout.cuh
//     AT_CLAIMED          in a cluster, from its first CTA to the second: full and empty barrier, index of a unit
//     AT_TILE_DESCS       [DESC_SLOTS]
//     AT_UNITS            [UNIT_SLOTS] of four words: b, h, row0, split
//     AT_ROW_REF, AT_RESCALE                            [64] floats, of the newest P
//     AT_ROW_SUMS         [2][64] floats, one sum for each consumer warp group
//     AT_LISTS            [2] UnitList
//
// MMA_WARPGROUPS is 1 here: the rows of a work tile are those of one wgmma. Two consumer warp groups share them.

constexpr int MLA_THREADS = 3 * 128, CONSUMERS = 2 * 128;

// O and V by warp group: whole chunks of columns. Those past HEAD_DIM_V are computed and never stored.
constexpr int HALF_CHUNKS = (CHUNKS_V + 1) / 2, HALF_COLUMNS = 64 * HALF_CHUNKS, HALF_REGS = HALF_COLUMNS / 2;

// A K tile comes in parts, each with barriers of its own: the half of V that a warp group reads, for each of them, and
// the columns behind both, which only Q K^T reads. They arrive in the order in which they become free.
enum Part { FIRST, SECOND, REST };
constexpr int REST_CHUNKS = CHUNKS_K > 2 * HALF_CHUNKS ? CHUNKS_K - 2 * HALF_CHUNKS : 0;
constexpr int SECOND_CHUNKS = CHUNKS_K - REST_CHUNKS - HALF_CHUNKS;
constexpr int chunks_of_part(int part) {
    return part == FIRST ? HALF_CHUNKS : part == SECOND ? SECOND_CHUNKS : REST_CHUNKS;
}
constexpr int first_chunk(int part) { return part * HALF_CHUNKS; }
constexpr int OLDEST_PART = REST_CHUNKS > 0 ? REST : FIRST;  // the first to arrive

static_assert(STAGES == 2 && MMA_WARPGROUPS == 1 && BLOCK_K == 64, "a chunk of P is a tile of 64 x 64");
static_assert(HEAD_DIM_V <= HEAD_DIM && HALF_REGS <= 128 && SECOND_CHUNKS > 0, "V is a part of K, half of O fits");
static_assert(2 * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= 3 * (65536 / MLA_THREADS / 8 * 8),
              "setmaxnreg would wait for ever for registers that the launch does not get");

// Tile descriptor: tile << 8 | LAST_TILE of its unit | State. A slot is written again four tiles later: by then both
// warp groups have multiplied by V of the tile, as a stage of K that the next but one was loaded into depended on it.
constexpr int LAST_TILE = 32, DESC_SLOTS = 4, UNIT_SLOTS = 2;

enum MlaBarrier { P_READY = 1, BOTH_WARPGROUPS = 3, OWN_WARPGROUP = 4 };  // P_READY and OWN_WARPGROUP: one for each

DEVICE Pipeline<STAGES> k_part(unsigned base, int part) {
    return Pipeline<STAGES>::at(base + AT_K_PIPE + 16 * STAGES * part);
}
DEVICE Pipeline<UNIT_SLOTS> unit_pipe(unsigned base) { return Pipeline<UNIT_SLOTS>::at(base + AT_UNIT_PIPE); }
DEVICE unsigned mla_desc_slot(unsigned base, unsigned n) { return base + AT_TILE_DESCS + 4 * (n % DESC_SLOTS); }
DEVICE unsigned unit_slot(unsigned base, unsigned number) { return base + AT_UNITS + 16 * (number % UNIT_SLOTS); }

// In a cluster of two the stages of both CTAs fill together, so both free them.
DEVICE int peer_rank() { return 1 - cluster_ctarank(); }
DEVICE Pipeline<1> claimed_pipe(unsigned base) { return Pipeline<1>::at(base + AT_CLAIMED); }

// What a CTA takes at a time: one of p.num_splits parts of the keys of a work tile.
struct Unit {
    WorkTile at;
    int split;
};

// --- units -----------------------------------------------------------------------------------------------------------

// K tiles of a unit, all or some, from the scheduler warp to the producer.
struct UnitList {
    struct { int entry[96]; } list;  // index << 8 | State
    int b, h, row0, split;           // b: END behind the last one
    int count, tiles, last_tile;     // entries; K tiles of the unit, and the last one, from which indices count down
    int begins, ends;                // whether these are the first, the last ones of the unit
};
static_assert(sizeof(UnitList) * NUM_LISTS == LIST_BYTES, "sm90_mla.py and UnitList differ");

struct UnitScheduler : TileScheduler {
    // Row tiles of the CTAs of a cluster, which take them together.
    __device__ __forceinline__ int groups() const { return (tiles() + CLUSTER_SIZE - 1) / CLUSTER_SIZE; }
    __device__ __forceinline__ int count() const {
        return groups() * (int)(p.heads / PACK_GQA * p.batch * p.num_splits);
    }
    // Row tiles of the same keys follow each other, so that CTAs read these keys from L2 together. Where no tile is
    // left for a cluster's second CTA, it takes the first's.
    __device__ __forceinline__ Unit unit(int index) const {
        const int groups = this->groups(), heads = (int)p.heads / PACK_GQA, splits = (int)p.num_splits;
        const int rest = index / groups, bh = rest / splits, group = groups - 1 - index % groups;
        int tile = group * CLUSTER_SIZE;
        if (CLUSTER_SIZE > 1 && tile + 1 < tiles()) tile += cluster_ctarank();
        return {{bh / heads, bh % heads * PACK_GQA, tile * BLOCK_Q, 0}, rest % splits};
    }
    __device__ __forceinline__ int initial() const { return blockIdx.x / CLUSTER_SIZE; }
    // As of TileScheduler. The first CTA of a cluster claims for both.
    __device__ __forceinline__ int claim() const {
        return count_if(threadIdx.x % 32 == 0 && (CLUSTER_SIZE == 1 || cluster_ctarank() == 0), p.tile_counter);
    }
    // The index of claim number `n`, in all lanes of the warps of both CTAs.
    __device__ __forceinline__ int claimed(int claim, unsigned base, unsigned n) const {
        return agreed(claim, base, n) + gridDim.x / CLUSTER_SIZE;
    }
    __device__ __forceinline__ static int agreed(int claim, unsigned base, unsigned n) {
        if constexpr (CLUSTER_SIZE == 1) return uniform(claim);
        const Pipeline<1> pipe = claimed_pipe(base);
        const unsigned word = base + AT_CLAIMED + 16, lane = threadIdx.x % 32;
        if (cluster_ctarank() == 0) {
            pipe.producer_acquire_backoff(n);
            if (lane == 0) dsmem_store(mapa(word, 1), claim, mapa(pipe.full, 1));
            return uniform(claim);
        }
        if (lane == 0) mbarrier_arrive_expect_tx(pipe.full, 4);
        mbarrier_wait_backoff(pipe.full, n & 1);
        const int theirs = load_word(word);
        __syncwarp();
        dsmem_arrive(mapa(pipe.empty, 0), lane);
        return uniform(theirs);
    }
};

// K tiles first ... end - 1 of a split. Splits of all sequences are of one length, a part of the longest sequence or
// SPLIT_TILES, so that units are of one size; a shorter sequence has fewer.
struct TileRange { int first, end; };
DEVICE TileRange tile_range(const Params& p, int n_k, int split) {
    const long long most = (max_n_k(p) + BLOCK_K - 1) / BLOCK_K,
                    each = SPLIT_TILES > 0 ? SPLIT_TILES : (most + p.num_splits - 1) / p.num_splits;
    const long long all = (n_k + BLOCK_K - 1) / BLOCK_K, first = split * each;
    return {(int)(first < all ? first : all), (int)(first + each < all ? first + each : all)};
}

// The State of K tiles tile ... tile + count - 1 for the rows of a work tile, and of its cluster's other CTAs: they
// have one list.
DEVICE unsigned unit_tile_state(const Params& p, const WorkTile& at, int n_k, int tile, int count) {
    constexpr int GROUP_ROWS = CLUSTER_SIZE * BLOCK_Q;
    const int rows = (int)max_n_q(p) * PACK_GQA, row0 = at.row0 / GROUP_ROWS * GROUP_ROWS,
              row1 = row0 + GROUP_ROWS < rows ? row0 + GROUP_ROWS : rows;
    const int k0 = tile * BLOCK_K, whole = k0 + count * BLOCK_K, k1 = whole < n_k ? whole : n_k;
    const long long offset = seq_info(p, at.b).q_position;
    return tile_state_of_rows<MASK_OF_HEADS>(p, at, offset, row0, row1, k0, k1, whole > n_k);
}

// The results of a unit without keys, by a warp. The combine kernel does not read O of such a split.
DEVICE void store_unit_without_keys(const Params& p, const Unit& unit) {
    constexpr int VECS = HEAD_DIM_V * (int)sizeof(storage) / VEC_BYTES;
    const WorkTile& at = unit.at;
    const int rows = (int)max_n_q(p) * PACK_GQA, lane = threadIdx.x % 32,
              end = at.row0 + BLOCK_Q < rows ? at.row0 + BLOCK_Q : rows;
#pragma unroll 1
    for (int index = at.row0 + lane; index < end; index += 32) {
        const int h = at.h + index % PACK_GQA, row = index / PACK_GQA;
        const float lse = HAS_SINKS ? static_cast<const float*>(p.sinks)[h] : HIDDEN;
        if (p.num_splits > 1)
            *row_at<float2>(p.lse_partial, unit.split * p.batch + at.b, h, row) = float2{HIDDEN, 0};
        else *q_row<float>(p, p.lse, at.b, h, row) = lse;
    }
#pragma unroll 1
    for (int i = lane; p.num_splits == 1 && i < (end - at.row0) * VECS; i += 32) {
        const int index = at.row0 + i / VECS, h = at.h + index % PACK_GQA, row = index / PACK_GQA;
        reinterpret_cast<uint4*>(q_row<storage>(p, p.out, at.b, h, row))[i % VECS] = uint4{};
    }
}

// As scheduler_warp(): it runs ahead of the producer.
DEVICE void unit_scheduler_warp(const Params& p, unsigned base, UnitList* lists) {
    ListWriter<UnitList, 2> writer{list_pipe(base), lists};
    const UnitScheduler scheduler{p};
    const bool leader = threadIdx.x % 32 == 0;
    const int count = scheduler.count();
    unsigned number = 0, claims = 0;  // late ones so far, and all
#pragma unroll 1
    for (int index = scheduler.initial(); index < count;) {
        const Unit unit = scheduler.unit(index);
        const WorkTile& at = unit.at;
        const int n_k = (int)seq_info(p, at.b).n_k;
        const TileRange range = tile_range(p, n_k, unit.split);
        const int end = range.end, tiles = end - range.first;
        const bool late = claims_late(tiles);
        int claim = late ? 0 : scheduler.claim();  // it arrives while the tiles are listed
        if (tiles == 0) {
            store_unit_without_keys(p, unit);
            index = scheduler.claimed(claim, base, claims++);
            continue;
        }
        int next = 0;
        unsigned seen;
        // The last keys come first.
        auto states_of = [&](int i, int many) { return unit_tile_state(p, at, n_k, end - i - many, many); };
#pragma unroll 1
        for (bool begins = true; begins || next < tiles; begins = false) {
            UnitList& to = writer.acquire();
            const int found = fill(to.list, next, tiles, seen, states_of, writer.n == 0);
            // No list is empty, as the last tile of a unit says that it is the last: where the mask leaves none of
            // the tiles up to the last, that one comes as PARTIAL, with every pair masked.
            if (leader) {
                if (found == 0) to.list.entry[0] = (tiles - 1) << 8 | PARTIAL;
                to.b = at.b, to.h = at.h, to.row0 = at.row0, to.split = unit.split;
                to.count = found == 0 ? 1 : found, to.tiles = tiles, to.last_tile = end - 1;
                to.begins = begins, to.ends = next >= tiles;
            }
            writer.commit();
        }
        if (late) mbarrier_wait_backoff(base + AT_CLAIM, number++ & 1), claim = scheduler.claim();
        index = scheduler.claimed(claim, base, claims++);
    }
    UnitList& to = writer.acquire();
    if (leader) to.b = END;
    writer.commit();
    if (leader) scheduler.reset();
}
