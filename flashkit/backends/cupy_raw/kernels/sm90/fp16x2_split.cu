// Tensors of float32 as terms of float16, for products on tensor cores: x = unit (high + low), where unit is a power of two
// such that the greatest of those that share it comes to lie in [2^14, 2^15). high is x / unit rounded to float16, low the
// rest, rounded too. Numbers down to 2^-17 of the greatest keep 23 bits, smaller ones an error of 2^-40 of the greatest.
//
// A block takes a tile: ROWS tokens of a head. All its elements share a unit, or (by_row) the elements of each row do. A unit
// is NaN, and who multiplies has to look at it, where an element is not finite, and where that error could show: where the
// greatest of a row or a column, beside others of the tile, is small. So an element's error is always below 2^-22 of the
// greatest of its row and of its column. Tokens past `kv_lengths` become zeros.
//
// Constants of the head: NUM_TERMS, terms that are stored, 2 or 1: high alone; ROWS.
#include "sm90/fp16x2_terms.cuh"

struct Split {
    Tensor source, terms, unit;          // float32; float16, [high: 64 * chunks columns][low]; a float for each row or tile
    const long long* lengths;            // (B,), or null
    long long heads, tokens, by_row;     // by_row: a unit for each row
};
struct Splits { Split of[4]; long long blocks[4]; };  // q, k, v, dO if it is split; blocks: of the first tensor, of two ...

constexpr int TOKENS = 8, WARPS = ROWS / TOKENS;  // of a warp
constexpr float SPREAD = 3.8146973e-6f;  // 2^-18
static_assert(ROWS % TOKENS == 0);

// By a block, for rows of DIM columns. A warp has TOKENS tokens one after the other, a lane four columns of some of them.
template <int DIM>
DEVICE void split_tile(const Split& at, int index) {
    constexpr int CHUNKS = (DIM + 63) / 64, ACROSS = 16 * CHUNKS, DOWN = 32 / ACROSS, STEPS = TOKENS / DOWN;
    static_assert(CHUNKS <= 2, "a row for a warp");
    __shared__ unsigned tops[WARPS];
    __shared__ float tops_of_columns[WARPS * DOWN][64 * CHUNKS];
    __shared__ bool small_row;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % ACROSS * 4;
    const int tiles = (int)((at.tokens + ROWS - 1) / ROWS), bh = index / tiles, tile = index - bh * tiles;
    const int b = bh / (int)at.heads, h = bh - b * (int)at.heads;
    const long long length = at.lengths == nullptr ? at.tokens : at.lengths[b];
    const int tokens = (int)at.tokens, count = length < tokens ? (int)length : tokens;
    const int first = tile * ROWS + warp * TOKENS + lane / ACROSS;  // and every DOWN-th after it
    const bool by_row = at.by_row, whole = DIM % 4 == 0 && (((unsigned long long)at.source.data >> 2 | at.source.batch | at.source.head | at.source.token) & 3) == 0;

    const float* source = row_at<const float>(at.source, b, h, first) + column;
    const long long step = DOWN * at.source.token;
    float x[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) x[i][c] = 0;
        if (first + DOWN * i < count) {
            if (whole) {
                if (column < DIM) {
                    const float4 four = *reinterpret_cast<const float4*>(source + i * step);
                    x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
                }
            } else {
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    if (column + c < DIM) x[i][c] = source[i * step + c];
            }
        }
    }
    // The greatest of the tile, and of each row, as bits, in which inf and NaN are the greatest.
    unsigned top = 0, top_of[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        top_of[i] = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) top_of[i] = max(top_of[i], __float_as_uint(x[i][c]) & 0x7fffffffu);
        top = max(top, top_of[i]);
        if (by_row) {
#pragma unroll
            for (int other = 1; other < ACROSS; other *= 2) top_of[i] = max(top_of[i], __shfl_xor_sync(~0u, top_of[i], other));
        }
    }
    top = __reduce_max_sync(~0u, top);
    if (lane == 0) tops[warp] = top;
    if (threadIdx.x == 0) small_row = false;
    __syncthreads();
    top = __reduce_max_sync(~0u, tops[lane % WARPS]);

    // In units. What shares no unit with its column is compared with it in its own.
    const float tiles_unit = scale_for(top);
    const float least = by_row ? 16384 * SPREAD : __uint_as_float(top) * inverse_of(tiles_unit) * SPREAD;
    float greatest[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const float inverse = inverse_of(by_row ? scale_for(top_of[i]) : tiles_unit);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            x[i][c] *= inverse;
            if (top_of[i] < 0x7f800000u) greatest[c] = fmaxf(greatest[c], fabsf(x[i][c]));
        }
        if (by_row) continue;
        const unsigned mine = ACROSS == 32 ? ~0u : 0xffffu << (lane & 16);
        const unsigned large = __ballot_sync(~0u, __uint_as_float(top_of[i]) * inverse >= least);
        const unsigned some = __ballot_sync(~0u, top_of[i] != 0);
        if ((some & mine) != 0 && (large & mine) == 0) small_row = true;
    }
    bool large = true;
#pragma unroll
    for (int c = 0; c < 4; ++c) large &= greatest[c] >= least || column + c >= DIM;
    // Mostly any one warp has something large in every column, and nobody has to look further.
    const bool settled = __syncthreads_or(__all_sync(~0u, large));
    bool small = small_row;
    if (!settled && tile * ROWS + 1 < count) {  // columns of one token say nothing
#pragma unroll
        for (int c = 0; c < 4; ++c) tops_of_columns[warp * DOWN + lane / ACROSS][column + c] = greatest[c];
        __syncthreads();
        for (int c = threadIdx.x; c < 64 * CHUNKS; c += 32 * WARPS) {
            float own = 0;
#pragma unroll
            for (int w = 0; w < WARPS * DOWN; ++w) own = fmaxf(own, tops_of_columns[w][c]);
            small |= own != 0 && own < least;
        }
        small = __syncthreads_or(small);
    }
    auto said = [&](float unit) { return small ? __int_as_float(0x7fffffff) : unit; };
    half_t* target = row_at<half_t>(at.terms, b, h, first) + column;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
        const int token = first + DOWN * i;
        if (by_row && column == 0) *row_at<float>(at.unit, b, h, token) = said(scale_for(top_of[i]));  // there is room for whole tiles
        uint2 high, low;
        to_terms(x[i][0], x[i][1], high.x, low.x), to_terms(x[i][2], x[i][3], high.y, low.y);
        if (token >= tokens) continue;
        *reinterpret_cast<uint2*>(target + i * DOWN * 64 * NUM_TERMS * CHUNKS) = high;
        if constexpr (NUM_TERMS == 2) *reinterpret_cast<uint2*>(target + i * DOWN * 64 * NUM_TERMS * CHUNKS + 64 * CHUNKS) = low;
    }
    if (threadIdx.x == 0 && !by_row) *row_at<float>(at.unit, b, h, tile) = said(tiles_unit);
}

// So many blocks at once that what they wait for keeps memory busy.
constexpr int AT_ONCE = (HEAD_DIM > 64 || HEAD_DIM_V > 64 ? 1024 : 1536) / (32 * WARPS);
extern "C" __global__ void __launch_bounds__(32 * WARPS, AT_ONCE) fp16x2_split(const __grid_constant__ Splits splits) {
    const int block = blockIdx.x;
    if (block < splits.blocks[1]) {  // q, k
        const int i = block >= splits.blocks[0];
        split_tile<HEAD_DIM>(splits.of[i], block - (i > 0 ? (int)splits.blocks[0] : 0));
    } else {  // v, dO
        const int i = block >= splits.blocks[2];
        split_tile<HEAD_DIM_V>(splits.of[2 + i], block - (int)splits.blocks[1 + i]);
    }
}
