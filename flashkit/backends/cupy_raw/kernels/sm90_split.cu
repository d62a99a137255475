// Tensors of float32 as terms of float16, for products on tensor cores: x = unit (high + low), where unit is a power of two
// such that the greatest of those that share it comes to lie in [2^14, 2^15). high is x / unit rounded to float16, low the
// rest, rounded too. Numbers down to 2^-17 of the greatest keep 23 bits, smaller ones an error of 2^-40 of the greatest.
//
// A block takes a tile: ROWS tokens of a head. All its elements share a unit, or (by_row) the elements of each row do. A unit
// is NaN, and who multiplies has to look at it, where an element is not finite, and where that error could show: where the
// greatest of a row or a column, beside others of the tile, is small. So an element's error is always below 2^-22 of the
// greatest of its row and of its column. Tokens past `kv_lengths` become zeros.
//
// Constants of the head: PARTS, terms that are stored, 2 or 1: high alone; ROWS.
#include "sm90_terms.cuh"

struct Split {
    Tensor source, terms, unit;          // float32; float16, [high: 64 * chunks columns][low]; a float for each row or tile
    const long long* lengths;            // (B,), or null
    long long heads, tokens, by_row;     // by_row: a unit for each row
};
struct Splits { Split of[4]; long long blocks[4]; };  // q, k, v, dO if it is split; blocks: of the first tensor, of two ...

constexpr int TOKENS = 8, WARPS = ROWS / TOKENS;  // of a warp
constexpr unsigned SPREAD = 18 << 23;  // as a difference of bits: a factor of 2^18
static_assert(ROWS % TOKENS == 0);

// By a block, for rows of DIM columns; a lane has columns 2 lane, 2 lane + 1 of every 64.
template <int DIM>
DEVICE void split_tile(const Split& at, int index) {
    constexpr int CHUNKS = (DIM + 63) / 64;
    __shared__ unsigned tops[WARPS], tops_of_columns[WARPS][64 * CHUNKS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = (int)((at.tokens + ROWS - 1) / ROWS), tile = index % tiles, bh = index / tiles;
    const int h = bh % (int)at.heads, b = bh / (int)at.heads;
    const long long length = at.lengths == nullptr ? at.tokens : at.lengths[b];
    const bool even = (((unsigned long long)at.source.data >> 2 | at.source.batch | at.source.head | at.source.token) & 1) == 0;
    float x[TOKENS][2 * CHUNKS];
    unsigned top = 0, top_of[TOKENS], column[2 * CHUNKS] = {};  // magnitudes as bits, in which inf and NaN are the greatest
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const int token = tile * ROWS + warp + WARPS * i;
        const float* source = row_at<const float>(at.source, b, h, token);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const int first = 64 * c + 2 * lane;
            float2 pair{0, 0};
            if (token < at.tokens && token < length) {
                if (DIM % 2 == 0 && even && first < DIM) {
                    pair = *reinterpret_cast<const float2*>(source + first);
                } else {
                    if (first < DIM) pair.x = source[first];
                    if (first + 1 < DIM) pair.y = source[first + 1];
                }
            }
            x[i][2 * c] = pair.x, x[i][2 * c + 1] = pair.y;
        }
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        top_of[i] = 0;
#pragma unroll
        for (int c = 0; c < 2 * CHUNKS; ++c) top_of[i] = max(top_of[i], __float_as_uint(x[i][c]) & 0x7fffffffu);
        top_of[i] = __reduce_max_sync(~0u, top_of[i]);
        top = max(top, top_of[i]);
        if (top_of[i] >= 0x7f800000u) continue;
        const float inverse = at.by_row ? inverse_of(unit_of(top_of[i])) : 1.0f;  // what shares no unit is compared in its own
#pragma unroll
        for (int c = 0; c < 2 * CHUNKS; ++c) column[c] = max(column[c], __float_as_uint(x[i][c] * inverse) & 0x7fffffffu);
    }
    if (lane == 0) tops[warp] = top;
#pragma unroll
    for (int c = 0; c < 2 * CHUNKS; ++c) tops_of_columns[warp][c / 2 * 64 + 2 * lane + c % 2] = column[c];
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = max(top, tops[w]);
    const unsigned greatest = at.by_row ? __float_as_uint(16384.0f) : top, least = greatest > SPREAD ? greatest - SPREAD : 0;
    bool small = false;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) small |= !at.by_row && top_of[i] != 0 && top_of[i] < least;
    const bool alone = tile * ROWS + 1 >= (at.tokens < length ? at.tokens : length);  // columns of one token say nothing
    for (int c = threadIdx.x; c < 64 * CHUNKS && !alone; c += 32 * WARPS) {
        unsigned own = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) own = max(own, tops_of_columns[w][c]);
        small |= own != 0 && own < least;
    }
    small = __syncthreads_or(small);
    auto said = [&](float unit) { return small ? __int_as_float(0x7fffffff) : unit; };
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
        const int token = tile * ROWS + warp + WARPS * i;
        const float unit = unit_of(at.by_row ? top_of[i] : top), inverse = inverse_of(unit);
        if (lane == 0 && at.by_row) *row_at<float>(at.unit, b, h, token) = said(unit);  // there is room for whole tiles
        if (token >= at.tokens) continue;
        unsigned* target = reinterpret_cast<unsigned*>(row_at<half_t>(at.terms, b, h, token));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            unsigned high, low;
            split(x[i][2 * c] * inverse, x[i][2 * c + 1] * inverse, high, low);
            target[32 * c + lane] = high;
            if constexpr (PARTS == 2) target[32 * (CHUNKS + c) + lane] = low;
        }
        if (threadIdx.x == 0 && i == 0 && !at.by_row) *row_at<float>(at.unit, b, h, tile) = said(unit);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) sm90_split(const __grid_constant__ Splits splits) {
    const int block = blockIdx.x;
    if (block < splits.blocks[0]) split_tile<HEAD_DIM>(splits.of[0], block);                         // q
    else if (block < splits.blocks[1]) split_tile<HEAD_DIM>(splits.of[1], block - (int)splits.blocks[0]);  // k
    else if (block < splits.blocks[2]) split_tile<HEAD_DIM_V>(splits.of[2], block - (int)splits.blocks[1]);  // v
    else split_tile<HEAD_DIM_V>(splits.of[3], block - (int)splits.blocks[2]);                        // dO
}
