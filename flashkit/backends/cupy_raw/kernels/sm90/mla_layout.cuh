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
//     AT_LISTS            [2] UnitList (mla_scheduler.cuh)
//
// MMA_WARPGROUPS is 1 here: the rows of a work tile are those of one wgmma. Two consumer warp groups share them.
#pragma once
#include "sm90/layout.cuh"

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
