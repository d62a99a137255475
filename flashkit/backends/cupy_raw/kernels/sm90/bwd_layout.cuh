// Tile shape, warp roles and shared memory of Hopper's backward pass.
//
// warp group 0   warp 0       producer: Q, dO and V of each query tile (bwd_producer.cuh)
//                warp 1       scheduler: claims work tiles, lists their query tiles, loads K (bwd_producer.cuh)
//                warps 2, 3   DETERMINISTIC: dq_accum.cuh; FUSED_PREPROCESS: bwd_preprocess.cuh; VALUE_WARPS of them:
//                             bwd_values.cuh; else idle
// warp groups 1, 2            consumers: bwd_mainloop.cuh, or bwd_mainloop_cluster.cuh where CLUSTER_SIZE is 2
//
// From the head: BLOCK_Q, BLOCK_K, STAGES (of Q), DOUT_STAGES, DENSE_STAGES, KEY_BUFFERS (of K), CLUSTER_SIZE,
// DETERMINISTIC, FUSED_PREPROCESS, VALUE_WARPS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, WATCHDOG, NUM_LISTS,
// LIST_CAPACITY, LIST_BYTES, SHARED_BYTES, SMALL_SCORE (modification.positions), those of dense_tiles.cuh, and the
// offsets of shared memory, laid out by BackwardTile.smem (cuda_common/sm90_bwd_launch.py):
//
//     AT_K             [KEY_BUFFERS][CTA_KEYS][..]   K of the CTA's keys
//     AT_PEER_K        [CTA_KEYS][64 DQ_CHUNKS]      K of the peer CTA's keys, in the CTA's columns of dQ
//     AT_V             [CTA_KEYS][..]
//     AT_Q, AT_DOUT    [STAGES][BLOCK_Q][..], [DOUT_STAGES][BLOCK_Q][..]
//     AT_DS            [2][BLOCK_Q][CTA_KEYS]        dS of two query tiles; in a cluster, of one and of the peer's keys
//     AT_DQ            a tile of dQ on its way to dq_accum, unless in a cluster
//     AT_BIAS, AT_MASK [DENSE_STAGES][BLOCK_Q][CTA_KEYS]   tiles of a dense bias and of a mask
//     AT_LSE, AT_DELTA [STAGES][BLOCK_Q], [DOUT_STAGES][BLOCK_Q]   float32, loaded with Q and with dO
//     AT_Q_PIPE, AT_DOUT_PIPE, AT_DENSE_PIPE, AT_K_PIPE, AT_V_PIPE, AT_PEER_K_PIPE, AT_LIST_PIPE   full and empty
//                      barriers
//     AT_DS_PIPE       consumers to consumers: dS is in shared memory
//     AT_DSMEM_PIPE    between the CTAs of a cluster: full when the peer's dS is here, empty when the peer has read dS
//     AT_DQ_WRITTEN, AT_DQ_GRANTED, AT_DQ_REQUESTED, AT_DQ_SLOTS   DETERMINISTIC: see dq_accum.cuh
//     AT_K_LOADED, AT_PEER_K_LOADED, AT_ROWS_LOADED   K, or Q and dO, have yet to be cleared of non-finite values
//     AT_CLAIMED       a work tile is claimed: for the peer CTA, with AT_CLAIMED_INDEX, or for the fused preprocess
//     AT_CLAIM         the next work tile may be claimed
//     AT_TILE_DESCS    a TileDesc for each stage of Q
//     AT_WORK_TILES    a WorkTile for each buffer of K; of packed sequences with a SeqSlot, and with how many key
//                      tiles descend
//     AT_NONFINITE_KEYS   for each buffer of K a bit for each key that was cleared
//     AT_LISTS         [NUM_LISTS] QueryTileList
//     AT_DQ_COMPLETE   all that the CTA adds to dQ is in memory
//     AT_FINISHED_HEADS   heads of the last four work tiles
//     AT_O_LOADED, AT_HEAD_READY, AT_BROADCAST, AT_ZEROS   FUSED_PREPROCESS
#pragma once
#include "sm90/dense_tiles.cuh"
#include "sm90/fp16x2_terms.cuh"
#include "sm90/pipeline.cuh"

// --- tiles -----------------------------------------------------------------------------------------------------------

constexpr int MMA_WARPGROUPS = 2, MMA_WARPS = 4 * MMA_WARPGROUPS, THREADS = 128 * (MMA_WARPGROUPS + 1);
constexpr bool IS_FLOAT32 = STORAGE == FLOAT32;  // see HeadScales
constexpr int ROLE_WARPS = MMA_WARPS / CLUSTER_SIZE;   // consumer warps with the same role
constexpr int WARPGROUP_KEYS = 64, CTA_KEYS = BLOCK_K / CLUSTER_SIZE;
constexpr int PADDED_DIM = padded(HEAD_DIM), PADDED_DIM_V = padded(HEAD_DIM_V);
constexpr int CHUNKS = chunks(HEAD_DIM), CHUNKS_V = chunks(HEAD_DIM_V);
constexpr int S_REGS = BLOCK_Q / 2;  // registers of a lane for S, P, dP or dS of 64 keys
static_assert(BLOCK_K == 128, "two times 64 keys");
static_assert(CLUSTER_SIZE > 1 ? BLOCK_Q == 64 && CHUNKS <= 4 && CHUNKS_V <= 4 : CHUNKS <= 2 && CHUNKS_V <= 2,
              "dK and dV fit the registers");

// dQ^T of a query tile consists of parts, one for each warp group: 64 columns of all rows or, of up to 64 columns, half
// of the rows. A CTA of a cluster computes parts from CHUNKS / 2 times its rank on, DQ_CHUNKS of them, of which both
// have half of the middle one. dq_accum holds a tile as the lanes do: [part][warp][16 bytes][lane].
constexpr bool DQ_BY_COLUMNS = CHUNKS > 1 || CLUSTER_SIZE > 1;
constexpr int DQ_CHUNKS = (CHUNKS + CLUSTER_SIZE - 1) / CLUSTER_SIZE;
constexpr int DQ_PARTS = DQ_BY_COLUMNS ? CHUNKS : MMA_WARPGROUPS;
constexpr int DQ_PART_ROWS = DQ_BY_COLUMNS ? BLOCK_Q : BLOCK_Q / MMA_WARPGROUPS;
constexpr int BYTES_DQ_WARP = DQ_PART_ROWS * 16 * 4, BYTES_DQ_PART = 4 * BYTES_DQ_WARP;
constexpr int BYTES_DQ = DQ_PARTS * BYTES_DQ_PART;

constexpr int BYTES_K = CTA_KEYS * CHUNK_ROW * CHUNKS, BYTES_V = CTA_KEYS * CHUNK_ROW * CHUNKS_V;
constexpr int BYTES_PEER_K = CLUSTER_SIZE > 1 ? CTA_KEYS * CHUNK_ROW * DQ_CHUNKS : 0;
constexpr int BYTES_Q = BLOCK_Q * CHUNK_ROW * CHUNKS, BYTES_DOUT = BLOCK_Q * CHUNK_ROW * CHUNKS_V;
constexpr int BYTES_ROW_STATS = BLOCK_Q * 4;
constexpr int BYTES_DS = BLOCK_Q * CTA_KEYS * 2, BYTES_ZEROS = 512;
using BiasTile = DenseTile<BIAS_BYTES, BIAS_OF_HEADS, BIAS_OF_ENTRIES, BLOCK_Q, CTA_KEYS>;
using MaskTile = DenseTile<MASK_TILES, MASK_TILES_OF_HEADS, MASK_TILES_OF_ENTRIES, BLOCK_Q, CTA_KEYS>;
static_assert(AT_PEER_K - AT_K == KEY_BUFFERS * BYTES_K && AT_V - AT_PEER_K == BYTES_PEER_K && AT_Q - AT_V == BYTES_V &&
              AT_DOUT - AT_Q == STAGES * BYTES_Q && AT_DS - AT_DOUT == DOUT_STAGES * BYTES_DOUT &&
              AT_DQ - AT_DS == 2 * BYTES_DS && AT_BIAS - AT_DQ == (CLUSTER_SIZE > 1 ? 0 : BYTES_DQ) &&
              AT_MASK - AT_BIAS == DENSE_STAGES * BiasTile::SIZE && AT_LSE - AT_MASK == DENSE_STAGES * MaskTile::SIZE &&
              AT_ZEROS + BYTES_ZEROS == SHARED_BYTES, "BackwardTile.smem and the kernel differ");
constexpr int BYTES_DENSE = BiasTile::SIZE + MaskTile::SIZE;
static_assert(BYTES_DENSE == 0 || (CLUSTER_SIZE == 1 && !IS_PACKED && !HAS_DROPOUT),
              "rows are those of the arrays");

// --- what is masked --------------------------------------------------------------------------------------------------

// P and dS of a masked pair are 0, but 0 times NaN is NaN. So rows of Q, dO and K that are not finite are cleared in
// shared memory before they are multiplied. The log-sum-exp of such a row is NaN and such a key has a bit in
// AT_NONFINITE_KEYS, from which the gradients of visible pairs become NaN (softmax_p_general).
//
// Behind the last rows of a packed sequence are those of the next one, which every tile hides.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT, CLEARS_KEYS = MAY_HIDE || HAS_LENGTHS;
constexpr bool CLEARS_ROWS = MAY_HIDE || IS_PACKED;
constexpr int NONFINITE_WORDS = CTA_KEYS / 32;

// DETERMINISTIC under a mask: keys descend and queries ascend, so a CTA starts at its diagonal, where it is the first
// to add.
constexpr bool FROM_DIAGONAL = DETERMINISTIC && HAS_MASK;

// Of packed sequences many may have no more keys than a work tile: what it adds to dQ is all of it. Consumers then
// store it as dQ, and there is nothing to convert for bwd_postprocess.
constexpr bool STORES_DQ = IS_PACKED && DETERMINISTIC && CLUSTER_SIZE == 1;

// --- scheduling ------------------------------------------------------------------------------------------------------

// How many query tiles before a work tile's end the next one is claimed.
constexpr int CLAIM_AHEAD = MASK_READS_ARRAYS ? 20 : 4;
// The scheduler warp's sleep between polls.
constexpr int BACKOFF_NS = DETERMINISTIC ? 100 : MASK_READS_ARRAYS ? 200 : 1000;
constexpr int END = -1;  // in the place of a batch entry or tile: there is no more
constexpr int PREPROCESS_BARRIER = 3;  // named barrier of the fused preprocess' two warps

struct WorkTile { int b, head, k0; };  // head: of keys; k0: the first of BLOCK_K keys
constexpr int WORK_TILE_BYTES = 12 + SeqSlot::BYTES + (IS_PACKED ? 4 : 0);  // in shared memory
static_assert(AT_NONFINITE_KEYS - AT_WORK_TILES >= KEY_BUFFERS * WORK_TILE_BYTES,
              "BackwardTile.smem and WorkTile differ");

// Three words in shared memory: the descriptor proper, which is query tile << 8 | flags | a State for each 64 keys, two
// bits each; the query head; the tile's index among all query tiles.
struct TileDesc {
    static constexpr unsigned NONFINITE_ROWS = 16, NO_VISIBLE_PAIR = 32, LAST_TILE = 64;
    static constexpr unsigned WHOLE_DQ = 128;  // STORES_DQ: no other work tile adds to the tile's dQ
    static constexpr int HEAD = 4, INDEX = 8, BYTES = 12;  // offsets
};

// Some of a work tile's query tiles of one head, from the scheduler to the producer.
struct QueryTileList {
    static constexpr int MOST = LIST_CAPACITY;
    enum { LAST = 1, CLAIMED = 2 };
    int b, h, k0, count;  // b: END if there are no more work tiles
    int first_index;      // index of the head's first query tile among all
    int ends;             // 0, or LAST of the work tile, or CLAIMED, if the next work tile is claimed already
    int entry[MOST];      // query tile << 8 | flags and states of its TileDesc
};
static_assert(sizeof(QueryTileList) == LIST_BYTES, "BackwardTile.smem and QueryTileList differ");

// --- shared memory ---------------------------------------------------------------------------------------------------

DEVICE Pipeline<STAGES> q_pipe(unsigned base) { return Pipeline<STAGES>::at(base + AT_Q_PIPE); }
DEVICE Pipeline<DOUT_STAGES> dout_pipe(unsigned base) { return Pipeline<DOUT_STAGES>::at(base + AT_DOUT_PIPE); }
DEVICE Pipeline<DENSE_STAGES> dense_pipe(unsigned base) { return Pipeline<DENSE_STAGES>::at(base + AT_DENSE_PIPE); }
DEVICE Pipeline<KEY_BUFFERS> k_pipe(unsigned base) { return Pipeline<KEY_BUFFERS>::at(base + AT_K_PIPE); }
DEVICE Pipeline<1> v_pipe(unsigned base) { return Pipeline<1>::at(base + AT_V_PIPE); }
DEVICE Pipeline<1> peer_k_pipe(unsigned base) { return Pipeline<1>::at(base + AT_PEER_K_PIPE); }
DEVICE Pipeline<NUM_LISTS> list_pipe(unsigned base) { return Pipeline<NUM_LISTS>::at(base + AT_LIST_PIPE); }
DEVICE Pipeline<CLUSTER_SIZE == 1 ? 2 : 1> ds_pipe(unsigned base) {
    return {base + AT_DS_PIPE, base + AT_DS_PIPE + 16};
}
DEVICE Pipeline<1> dsmem_pipe(unsigned base) { return Pipeline<1>::at(base + AT_DSMEM_PIPE); }

// Of query tile n of the CTA; of work tile `number` of the CTA.
DEVICE unsigned tile_desc_slot(unsigned base, unsigned n) {
    return base + AT_TILE_DESCS + TileDesc::BYTES * (n % STAGES);
}
DEVICE unsigned work_tile_slot(unsigned base, unsigned number) {
    return base + AT_WORK_TILES + WORK_TILE_BYTES * (number % KEY_BUFFERS);
}
// Of a work tile that lies in `slot`. How many key tiles are added to dQ in descending order; 0 where they ascend.
DEVICE unsigned descending_tiles_slot(unsigned slot) { return slot + 12 + SeqSlot::BYTES; }
DEVICE unsigned nonfinite_keys_slot(unsigned base, unsigned number) {
    return base + AT_NONFINITE_KEYS + 4 * NONFINITE_WORDS * (number % KEY_BUFFERS);
}


// --- the CTA's share -------------------------------------------------------------------------------------------------

DEVICE int cta_rank() { return CLUSTER_SIZE > 1 ? cluster_ctarank() : 0; }
DEVICE int first_cta_key(const WorkTile& at) { return at.k0 + CTA_KEYS * cta_rank(); }

DEVICE int ceil_div(long long n, int block) { return (int)((n + block - 1) / block); }

// --- the tile scheduler ----------------------------------------------------------------------------------------------
//
// Which work tile each CTA of Hopper's persistent backward kernel takes, and in which order.

// ENTRIES_FIRST: batch entries of a head follow one another, as they share a bias, which so stays in L2; else heads of
// a batch entry.
static_assert(!ENTRIES_FIRST || (GQA_GROUP == 1 && !IS_PACKED), "a key/value head has one query head");

// Heads of all batch entries; of packed sequences, whose tiles follow each other, those of one entry.
DEVICE int num_kv_heads(const Params& p) { return (int)(p.heads / GQA_GROUP * num_entries(p)); }
DEVICE int kv_head_index(const Params& p, int b, int head) {
    if constexpr (ENTRIES_FIRST) return head * (int)num_entries(p) + b;
    return (IS_PACKED ? 0 : b * ((int)p.heads / GQA_GROUP)) + head;
}
DEVICE int tiles_of_queries(const Params& p) { return (int)num_q_tiles(p, BLOCK_Q); }  // of a head
// The index of a query tile among all, as they lie in dq_accum: those of a key/value head follow one another.
DEVICE int query_tile_index(const Params& p, int b, int h, int tile) {
    const int head = ENTRIES_FIRST ? kv_head_index(p, b, h) : IS_PACKED ? h : b * (int)p.heads + h;
    return head * tiles_of_queries(p) + (int)q_tile_number(p, b, tile, BLOCK_Q);
}
// Of a head; not of packed sequences, which TileScheduler::tiles() counts.
DEVICE int tiles_of_keys(const Params& p) { return (int)num_k_tiles(p, BLOCK_K); }

// Without a mask heads follow one another. Under a mask that is not read from arrays, p.heads_per_l2_group heads share
// the L2 cache, and first key tiles come first: under a causal mask these have most to do. The last heads
// (HAS_LPT_TAIL) are all interleaved, so that the shortest work tiles come at the very end and CTAs finish together,
// yet whole heads finish early, for bwd_postprocess. FROM_DIAGONAL: key tiles descend, but for those of the last heads.
constexpr bool HAS_LPT_TAIL = HAS_MASK && (DETERMINISTIC || !MASK_READS_ARRAYS);

// How many heads the tail has, where each has `tiles` key tiles. Unless DETERMINISTIC, one work tile for each CTA: more
// would wait until dq_accum is cleared, and as there are not more, not all of them wait.
DEVICE int tail_heads(const Params& p, int tiles) {
    if constexpr (!HAS_LPT_TAIL) return 0;
    const int all = num_kv_heads(p), one_each = ceil_div(gridDim.x / CLUSTER_SIZE, tiles);
    const int tail = !DETERMINISTIC ? one_each : p.heads_per_l2_group < 2 ? 2 : (int)p.heads_per_l2_group;
    return tail < all ? tail : all;
}
DEVICE bool is_descending(const Params& p, int bh, int tiles) {
    return FROM_DIAGONAL && bh < num_kv_heads(p) - tail_heads(p, tiles);
}

struct TileScheduler {
    const Params& p;
    unsigned base;
    PackedTiles<KEYS, BLOCK_K> packed{p};

    __device__ __forceinline__ int tiles() const {  // of a head
        if constexpr (IS_PACKED) return packed.total;
        return tiles_of_keys(p);
    }
    __device__ __forceinline__ int count() const { return tiles() * num_kv_heads(p); }
    __device__ __forceinline__ WorkTile work_tile(int index) {  // by a warp
        const int heads = (int)p.heads / GQA_GROUP, tiles = this->tiles(), tail = tail_heads(p, tiles);
        const int first = num_kv_heads(p) - tail;
        const bool in_tail = HAS_LPT_TAIL && index >= first * tiles;
        const TileCoord coord = in_tail ? tile_coord(index - first * tiles, tiles, tail, tail)
                                        : tile_coord(index, tiles, first, (int)p.heads_per_l2_group);
        const int bh = in_tail ? first + coord.bh : coord.bh;
        const int number = FROM_DIAGONAL && !in_tail ? tiles - 1 - coord.tile : coord.tile;
        if constexpr (ENTRIES_FIRST) {
            const int entries = (int)num_entries(p);
            return {bh % entries, bh / entries, number * BLOCK_K};
        }
        const SeqTile at = IS_PACKED ? packed.tile(number) : SeqTile{bh / heads, number};
        return {(int)at.b, bh % heads, (int)at.tile * BLOCK_K};
    }

    // By a warp: claims an index, which claimed() tells of the result. Meanwhile there is time for something else, if
    // the claim is early. The first CTA of a cluster claims for both.
    __device__ __forceinline__ int claim(bool leader) const {
        const bool claims = leader && cta_rank() == 0;
        if constexpr (IS_PACKED) return count_if(claims, p.tile_counter);
        return claims ? (int)atomicAdd(p.tile_counter, 1u) : 0;
    }
    // The index of work tile `number` of the CTA.
    __device__ __forceinline__ int claimed(int claim, unsigned number, bool leader) const {
        return uniform(leader && CLUSTER_SIZE > 1 ? agreed(claim, number) : claim);
    }
    // By one lane. A word may be overwritten two work tiles later: the peer CTA has read it by then, as it has sent dS
    // of query tiles that the first CTA could not complete without.
    __device__ __forceinline__ int agreed(int claim, unsigned number) const {
        const unsigned barrier = base + AT_CLAIMED + number % 2 * 8, word = base + AT_CLAIMED_INDEX + number % 2 * 4;
        if (cta_rank() == 0) {
            if (CLUSTER_SIZE > 1) dsmem_store(mapa(word, 1), claim, mapa(barrier, 1));
            return claim;
        }
        mbarrier_arrive_expect_tx(barrier, 4);
        mbarrier_wait(barrier, number / 2 & 1);
        return load_word(word);
    }
    // The last CTA to end leaves the counters as the next launch expects them.
    __device__ __forceinline__ void reset(bool leader) const {
        if (leader && atomicAdd(p.tile_counter + 1, 1u) == gridDim.x - 1) p.tile_counter[0] = 0, p.tile_counter[1] = 0;
    }
};

// --- scales of TF32 --------------------------------------------------------------------------------------------------
//
// TF32's backward pass: float32 gradients from float16 elements under a scale for each key/value head
// (tf32_convert.cu). For 16-bit elements all of it is empty, and every scale is 1.
//
//     S         times scale_q scale_k                                in the factor of the scores
//     P         2^P_LOG2 in the fragment, which keeps its bits       in the log-sum-exp
//     dP        times scale_dout scale_v; 2^DP_LOG2 stands for 1     in dS, with delta in the same unit
//     gradients times what is left                                   when they are stored
//
// No scale depends on the tile. A gradient that is not finite, as where dS leaves the range of float16, asks for the
// fallback.

constexpr int P_LOG2 = 14, DP_LOG2 = 31;
constexpr float DP_UNIT = 1.0f / (1u << DP_LOG2);
constexpr float P_BACK = IS_FLOAT32 ? 1.0f / (1 << P_LOG2) : 1.0f;                // what 1 in P stands for; in dS
constexpr float DS_BACK = IS_FLOAT32 ? (float)(1 << (DP_LOG2 - P_LOG2)) : 1.0f;
constexpr float SCALE_RANGE = 1.2676506e30f;                                      // 2^100
static_assert(!IS_FLOAT32 || !(HAS_SCORE || HAS_DROPOUT || HAS_SINKS || IS_PACKED || CLUSTER_SIZE > 1), "sm90_tf32.py");

struct HeadScales {
    float q, k, v, dout;

    __device__ __forceinline__ float of_scores() const { return q * k; }
    __device__ __forceinline__ float of_ds() const { return v * dout * DS_BACK; }
    __device__ __forceinline__ float of_dq() const { return of_ds() * k; }
    __device__ __forceinline__ float of_dk() const { return of_ds() * q; }
    __device__ __forceinline__ float of_dv() const { return dout * P_BACK; }
    // A row's delta in the unit of dP.
    __device__ __forceinline__ float scaled_delta(float delta) const {
        return delta * (inverse_of(v) * DP_UNIT) * inverse_of(dout);
    }
    __device__ __forceinline__ bool valid() const {
        bool valid = true;
#pragma unroll
        for (const float x : {of_scores(), of_ds(), of_dq(), of_dk(), of_dv()})
            valid &= x < SCALE_RANGE && x > 1 / SCALE_RANGE;  // not NaN
        return valid;
    }
};
DEVICE HeadScales head_scales(const Params& p, int b, int kv_head) {
    if constexpr (!IS_FLOAT32) return {1, 1, 1, 1};
    const float4 x = static_cast<const float4*>(p.head_scales)[b * (p.heads / GQA_GROUP) + kv_head];
    return {x.x, x.y, x.z, x.w};
}

DEVICE void ask_for_fallback(const Params& p, bool asks) {
    if (IS_FLOAT32 && asks) *p.fallback = 1;
}

// dP - delta, in whose unit delta is.
DEVICE float minus_delta(float dp, float delta) { return IS_FLOAT32 ? fmaf(dp, DP_UNIT, -delta) : dp - delta; }

// Four columns of a row of a gradient.
template <int DIM>
DEVICE void store_float32(float* row, int column, const float4& x, const Params& p) {
    ask_for_fallback(p, !(is_finite(x.x) && is_finite(x.y) && is_finite(x.z) && is_finite(x.w)));
    store_four<DIM>(row, column, x);
}
