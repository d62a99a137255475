// Tile shape, registers and shared memory of Hopper's forward pass.
//
// From the head: BLOCK_K, MMA_WARPGROUPS, STAGES, Q_BUFFERS, PACK_GQA, PING_PONG, ROW_SUM_BY_MMA, NUM_TERMS,
// CONSUMER_REGISTERS, PRODUCER_REGISTERS, BOX_ROWS (keys of a TMA box of K and V), WATCHDOG, READS_ARRAYS, POSITIONS,
// FAR, SHARED_BYTES, LIST_HEADER, LIST_CAPACITY, those of dense_tiles.cuh and the offsets AT_* of the parts of shared
// memory, which ForwardTile.smem lays out (cuda_common/sm90_launch.py):
//
//     AT_Q                  [Q_BUFFERS][MMA_WARPGROUPS][64][..]; O on its way out lies there, too
//     AT_K, AT_V            [STAGES][BLOCK_K][..]; jvp.cu: with tangents
//     AT_BIAS, AT_MASK      [STAGES][BLOCK_Q][BLOCK_K]  tiles of a dense bias and of a mask, loaded with K
//     AT_ONES               a chunk of ones behind every V, where ROW_SUM_BY_MMA
//     AT_Q_PIPE, AT_K_PIPE, AT_V_PIPE, AT_LIST_PIPE     full and empty barriers
//     AT_CLAIM              barrier: the work tile is near its end, so the scheduler may claim the next one
//     AT_OUT_READY          barriers, for each buffer of Q and warp group: O is in the buffer
//     AT_TILE_DESCS         for each stage of K its tile descriptor; FP8: and the scales of blocks of keys
//     AT_WORK_TILES         for each buffer of Q its work tile: b, h, row0; of packed sequences with a SeqSlot. FP8:
//                           two more, as consumers release Q before they are done with it
//     AT_LISTS              two WorkTileLists
//     AT_LIST_SEQS          of packed sequences, a SeqSlot for each list
//     AT_V_TILES            FP8, for each stage of V its tile: b, tile
//     AT_SCALES, AT_AFFINE  softmax scales; for each consumer warp the row-uniform part of its AffineScore
//
// FP8 says what shares a scale of codes in fp8_forward.cu, whose further constants and parts fp8_softmax.cuh lists,
// and is 0 in other kernels. GETS_VT: V comes as V^T.
#pragma once
#include "common/positions.cuh"
#include "sm90/dense_tiles.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/fp16x2_terms.cuh"

// --- elements of e4m3 ------------------------------------------------------------------------------------------------
//
// FP8: elements of Q, K and V as codes of e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), which scales make numbers
// of.

struct e4m3_t { unsigned char bits; };  // sign, 4 bits of exponent with the bias 7, 3 of mantissa; no infinity

using operand = Select<FP8 != 0, e4m3_t, storage>::type;  // an element of Q, K and V

DEVICE float widen(e4m3_t x) {
    const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
    const float size = (float)(exponent > 0 ? 8 + mantissa : mantissa),
        step = __int_as_float(127 - 10 + (exponent > 0 ? exponent : 1) << 23);
    return (x.bits & 127) == 127 ? (float)fk_special(0) : x.bits & 128 ? -size * step : size * step;
}

// Four numbers to codes, the first in the lowest byte. What exceeds the greatest number, 448, becomes it.
DEVICE unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
    unsigned codes;
    asm("{ .reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }" : "=r"(codes) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return codes;
}

// What shares a scale: a head, a block of SCALE_BLOCK tokens, or one token. Queries of heads may have scales of their
// own.
constexpr bool SCALES_OF_HEADS = FP8 == 1, SCALES_OF_BLOCKS = FP8 == 2, SCALES_OF_TOKENS = FP8 == 3;
constexpr int SCALE_BLOCK = 128;

// GETS_VT: V of a key. In V^T among 16 keys key 8 j + 2 t + c stands at 4 t + 2 j + c.
struct ValuesOfKey {
    const operand* first;  // of column 0
    long long stride;
    __device__ __forceinline__ ValuesOfKey(const Params& p, int b, int h, int key) : stride(p.v.token) {
        const int place = key & ~15 | (key & 6) << 1 | (key & 8) >> 2 | key & 1;
        first = row_at<const operand>(p.v, b, h, 0) + place;
    }
    __device__ __forceinline__ const operand& operator[](int column) const { return first[column * stride]; }
};

// What row_nonfinite() reads.
struct Elements : PlainElements<operand> {
    __device__ __forceinline__ static float query_scale(const Params& p, int b, int h, int n) {
        if constexpr (!FP8) return 1;
        if constexpr (SCALES_OF_BLOCKS) return *row_at<const float>(p.q_scale, b, h, n / SCALE_BLOCK);
        return *q_row<const float>(p, p.q_scale, b, h, n);
    }
    __device__ __forceinline__ static float key_scale(const Params& p, const Tensor& scales, int b, int h, int n) {
        if constexpr (!FP8) return 1;
        if constexpr (SCALES_OF_TOKENS) return *kv_row<const float>(p, scales, b, h, n);
        return *row_at<const float>(scales, IS_PAGED ? 0 : b, h, SCALES_OF_BLOCKS ? n / SCALE_BLOCK : 0);
    }
    __device__ __forceinline__ static auto values(const Params& p, int b, int h, int key) {
        if constexpr (GETS_VT) return ValuesOfKey(p, b, h, key);
        else return PlainElements<operand>::values(p, b, h, key);
    }
};

// --- tiles and shared memory -----------------------------------------------------------------------------------------

constexpr int BLOCK_Q = 64 * MMA_WARPGROUPS, THREADS = 128 * (MMA_WARPGROUPS + 1), COLUMNS = padded(HEAD_DIM_V);

// float32 elements come as NUM_TERMS float16 terms and leave as float32.
constexpr bool IS_FLOAT32 = STORAGE == FLOAT32, FP16X2 = IS_FLOAT32 && NUM_TERMS == 2;
// 2^80: scores stay finite; 2^-126: -inf stays -inf.
constexpr float MAX_SCALE = 1.2089258e24f, MIN_SCALE = 1.1754944e-38f;
// Scales of values that float32 has room for, beside weights. A group of zeros has float32's least normal number
// (quantize), whose codes are zeros: it stands for MIN_V_SCALE.
constexpr float MIN_V_SCALE = 8.271806e-25f, MAX_V_SCALE = 16384.0f;  // 2^-80, 2^14

// NaN for a scale that no product of scales has room for.
DEVICE float valid_scale(float x) { return x >= 0 && x <= MAX_SCALE ? fmaxf(x, MIN_SCALE) : (float)fk_special(0); }
DEVICE float valid_v_scale(float x) {
    return (x >= MIN_V_SCALE || x == MIN_SCALE) && x <= MAX_V_SCALE ? fmaxf(x, MIN_V_SCALE) : (float)fk_special(0);
}

// The kernel computes from other numbers than the caller's: terms, or codes with scales.
constexpr bool HAS_SCALES = IS_FLOAT32 || FP8;

constexpr int CHUNK_COLUMNS = FP8 ? 128 : 64;  // of Q, K and V
constexpr int chunks_of(int dim) { return NUM_TERMS * (up(dim, CHUNK_COLUMNS) / CHUNK_COLUMNS); }
constexpr int CHUNKS_K = chunks_of(HEAD_DIM), CHUNKS_V = chunks_of(HEAD_DIM_V);  // of Q and K, of V
constexpr int OUT_COLUMNS = IS_FLOAT32 ? 32 : 64, CHUNKS_OUT = up(HEAD_DIM_V, OUT_COLUMNS) / OUT_COLUMNS;
constexpr int CHUNK_BYTES = BLOCK_K * CHUNK_ROW;  // of K or V

// Where Q, K, V and O have tangents (jvp.cu): dQ follows a warp group's rows of Q, and dO those of O; a chunk has the
// rows of dK behind those of K; the chunks of dV follow those of V.
constexpr bool HAS_TANGENTS = TANGENT_Q || TANGENT_K || TANGENT_V;
constexpr int ROWS_K = BLOCK_K * (1 + TANGENT_K);
constexpr int TANGENT_OF_Q = 64 * CHUNK_ROW * (FP8 ? CHUNKS_K : larger(CHUNKS_K, CHUNKS_OUT));  // bytes to dQ, dO
constexpr int BYTES_Q = TANGENT_OF_Q * (1 + HAS_TANGENTS);  // of a warp group; also O's
constexpr int VT_LINES = COLUMNS + 8 * (COLUMNS <= 128);  // FP8, of V^T: columns, and eight lines of ones
constexpr int BYTES_K = CHUNK_BYTES * CHUNKS_K * (1 + TANGENT_K);
constexpr int BYTES_V = GETS_VT ? VT_LINES * CHUNK_ROW : CHUNK_BYTES * CHUNKS_V * (1 + TANGENT_V);
constexpr int V_STAGES = FP8 && !GETS_VT ? (COLUMNS <= 128 ? 2 : 1) : STAGES;

using BiasTile = DenseTile<BIAS_BYTES, BIAS_OF_HEADS, BIAS_OF_ENTRIES, BLOCK_Q, BLOCK_K>;
using MaskTile = DenseTile<MASK_TILES, MASK_TILES_OF_HEADS, MASK_TILES_OF_ENTRIES, BLOCK_Q, BLOCK_K>;
static_assert(BiasTile::SIZE + MaskTile::SIZE == 0 || (PACK_GQA == 1 && !IS_PACKED && !IS_PAGED),
              "rows and keys are those of the arrays");

// V has a producer warp of its own, as boxes of pages take long to ask for.
constexpr bool HAS_V_PRODUCER = IS_PAGED && !FP8 && !HAS_TANGENTS;

// Registers of a lane. Where ROW_SUM_BY_MMA the last four of O are sums of P.
constexpr int O_REGS = COLUMNS / 2 + 4 * ROW_SUM_BY_MMA, S_REGS = BLOCK_K / 2, P_REGS = BLOCK_K / 4;

constexpr int AFFINE_BYTES = 24;  // of AT_AFFINE, for a warp

// Tile descriptor: tile << 8 | FIRST_TILE if it begins a work tile | a State for each warp group's rows, two bits each.
// END has the bit FIRST_TILE, too. NO_DESC equals no descriptor.
constexpr int FIRST_TILE = 64, END = -1, NO_DESC = -2;
constexpr int PAIR = 128;  // FP8: the next tile of the work tile has the same states
// FP8 with wide heads: the tile ends its work tile. Its number follows from TILE_BIT on.
constexpr int ENDS_WORK_TILE = FP8 && COLUMNS > 128 ? 256 : 0, TILE_BIT = ENDS_WORK_TILE ? 9 : 8;
constexpr int DESC_BYTES = FP8 ? 16 : 4;

// ROW_SUM_BY_MMA: one chunk of ones follows the chunks of V of every stage, as the last column block of the second
// product. A descriptor has a single chunk stride, so the stages of V have different strides, and with two chunks of V
// a stage of K lies in between.
static_assert(!ROW_SUM_BY_MMA || CHUNKS_V == 1 || (CHUNKS_V == 2 && CHUNKS_K == 2 && STAGES == 2), "no room for ones");
DEVICE constexpr int at_k(int stage) {
    return ROW_SUM_BY_MMA && CHUNKS_V == 2 ? AT_ONES - (5 + 3 * stage) * CHUNK_BYTES : AT_K + stage * BYTES_K;
}
DEVICE constexpr int chunk_stride_v(int stage) {
    return ROW_SUM_BY_MMA ? (1 + CHUNKS_V * stage) * CHUNK_BYTES : CHUNK_BYTES;
}
DEVICE constexpr int at_v(int stage) {
    return ROW_SUM_BY_MMA ? AT_ONES - CHUNKS_V * chunk_stride_v(stage) : AT_V + stage * BYTES_V;
}

// For each warp group.
enum NamedBarrier { PING_PONG_BARRIER = 1, WARPGROUP_BARRIER = PING_PONG_BARRIER + MMA_WARPGROUPS };
DEVICE void ping_pong_sync(int wg) {
    if (PING_PONG) named_barrier_sync(PING_PONG_BARRIER + wg, 256);
}
DEVICE void ping_pong_arrive(int wg) {
    if (PING_PONG) named_barrier_arrive(PING_PONG_BARRIER + (wg + 1 == MMA_WARPGROUPS ? 0 : wg + 1), 256);
}

struct WorkTile {
    int b, h, row0;     // h: the first of PACK_GQA query heads, whose rows alternate
    start offset;       // position of row 0, if it is in range
    unsigned slot = 0;  // where consumers have it from
};
DEVICE SeqSlot seq_of(const Params& p, const WorkTile& at) { return seq_of(p, at.b, at.slot); }

DEVICE Pipeline<Q_BUFFERS> q_pipe(unsigned base) { return Pipeline<Q_BUFFERS>::at(base + AT_Q_PIPE); }
DEVICE Pipeline<STAGES> k_pipe(unsigned base) { return Pipeline<STAGES>::at(base + AT_K_PIPE); }
DEVICE Pipeline<V_STAGES> v_pipe(unsigned base) { return Pipeline<V_STAGES>::at(base + AT_V_PIPE); }
DEVICE Pipeline<2> list_pipe(unsigned base) { return Pipeline<2>::at(base + AT_LIST_PIPE); }

// A warp group's rows of Q, later of O, in a buffer; the barrier that says O is there; the buffer's work tile.
DEVICE unsigned q_rows(unsigned base, int buffer, int wg) { return base + (buffer * MMA_WARPGROUPS + wg) * BYTES_Q; }
DEVICE unsigned out_ready(unsigned base, int buffer, int wg) {
    return base + AT_OUT_READY + 8 * (buffer * MMA_WARPGROUPS + wg);
}
// By one thread. The store warp releases Q.
DEVICE void init_barriers(unsigned base) {
    q_pipe(base).init(1, 1);
    k_pipe(base).init(1, 4 * MMA_WARPGROUPS);
    v_pipe(base).init(1, 4 * MMA_WARPGROUPS);
    list_pipe(base).init(1, 1 + HAS_V_PRODUCER);
    mbarrier_init(base + AT_CLAIM, 1);
    for (int i = 0; i < MMA_WARPGROUPS * Q_BUFFERS; ++i) mbarrier_init(base + AT_OUT_READY + 8 * i, 4);
    fence_mbarrier_init();
}
constexpr int WORK_TILE_BYTES = 12 + SeqSlot::BYTES;  // in shared memory
constexpr int WORK_TILES = Q_BUFFERS + 2 * (FP8 != 0);
template <typename T>
DEVICE unsigned work_tile_slot(unsigned base, T number) {
    return base + AT_WORK_TILES + WORK_TILE_BYTES * (number % WORK_TILES);
}
DEVICE unsigned list_seq(unsigned base, unsigned n) { return base + AT_LIST_SEQS + n % 2 * SeqSlot::BYTES; }
DEVICE unsigned v_tile_slot(unsigned base, unsigned n) { return base + AT_V_TILES + 8 * (n % V_STAGES); }
DEVICE unsigned tile_desc_slot(unsigned base, unsigned n) { return base + AT_TILE_DESCS + DESC_BYTES * (n % STAGES); }
DEVICE int wait_tile_desc(unsigned base, const Pipeline<STAGES>& pipe_k, unsigned n) {  // it comes with K(n)
    pipe_k.consumer_wait(n);
    return load_word(tile_desc_slot(base, n));
}

// The rows that warp group `wg` has of work tile `number` of this CTA.
DEVICE WorkTile read_work_tile(const Params& p, unsigned base, int number, int wg) {
    const unsigned slot = work_tile_slot(base, number);
    const int b = uniform(load_word(slot)), h = uniform(load_word(slot + 4)),
        row0 = uniform(load_word(slot + 8)) + 64 * wg;
    return {b, h, row0, (start)seq_of(p, b, slot).q_position(), slot};
}

// Head and token of a packed row; rows past the end stand for the last one.
struct HeadRow { int h, row; };
DEVICE HeadRow clamped_row(int n_q, int h, int row) {
    const int last = n_q * PACK_GQA - 1, index = row < last ? row : last;
    return {h + index % PACK_GQA, index / PACK_GQA};
}
DEVICE HeadRow clamped_row(const Params& p, int b, int h, int row) {
    return clamped_row((int)seq_info(p, b).n_q, h, row);
}
