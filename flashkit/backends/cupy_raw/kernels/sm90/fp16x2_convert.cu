// FP16x2 conversion: float32 tensors to float16 terms, x = scale (high + low), for products on tensor cores. scale is a
// power of two that brings the greatest of the elements that share it to [2^14, 2^15). high is x / scale rounded to
// float16, low the rounded rest. Elements down to 2^-17 of the greatest keep 23 bits, smaller ones an error of 2^-40 of
// the greatest.
//
// A CTA converts a tile: ROWS tokens of a head. All its elements share a scale, or (by_row) those of each row do. A
// scale is NaN, as a request for the non-finite fallback, where an element is not finite, or where that error could
// show: where the greatest of a row or column is small compared with others of the tile. So an element's error is
// always below 2^-22 of the greatest of its row and of its column. Tokens past `kv_lengths` become zeros.
//
// Constants of the head: NUM_TERMS, 2 or 1 (high alone); ROWS.
#include "sm90/fp16x2_terms.cuh"

struct Conversion {
    // float32; float16, [high: 64 * chunks columns][low]; a float for each row or tile
    Tensor source, terms, scale;
    Integers lengths;                  // (B,), or none
    long long heads, tokens, by_row;   // by_row: a scale for each row
};
// Of q, k, v and perhaps dO; ctas: of the first tensor, of two ...; fallback: as in Params.
struct Conversions { Conversion of[4]; long long ctas[4]; const int* fallback; };

constexpr int TOKENS = 8, WARPS = ROWS / TOKENS;  // tokens of a warp
constexpr float SPREAD = 3.8146973e-6f;  // 2^-18
static_assert(ROWS % TOKENS == 0);

// A CTA's tile with rows of DIM columns. A warp takes TOKENS consecutive tokens, a lane four columns of some of them.
template <int DIM>
DEVICE void convert_tile(const Conversion& at, int index) {
    constexpr int CHUNKS = (DIM + 63) / 64, ACROSS = 16 * CHUNKS, DOWN = 32 / ACROSS, STEPS = TOKENS / DOWN;
    static_assert(CHUNKS <= 2, "a row for a warp");
    __shared__ unsigned tops[WARPS];
    __shared__ float tops_of_columns[WARPS * DOWN][64 * CHUNKS];
    __shared__ bool small_row;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % ACROSS * 4;
    const int tiles = (int)((at.tokens + ROWS - 1) / ROWS), bh = index / tiles, tile = index - bh * tiles;
    const int b = bh / (int)at.heads, h = bh - b * (int)at.heads;
    const long long length = at.lengths.given() ? at.lengths[b] : at.tokens;
    const int tokens = (int)at.tokens, count = length < 0 ? 0 : length < tokens ? (int)length : tokens;
    const int first = tile * ROWS + warp * TOKENS + lane / ACROSS;  // and every DOWN-th after it
    const bool by_row = at.by_row;
    float x[STEPS][4];
    load_rows<DIM, DOWN>(x, at.source, b, h, first, count, column);
    // The greatest magnitude of the tile, and of each row, as bits: inf and NaN are the greatest of all.
    unsigned top = 0, top_of[STEPS];
    UNROLL(i, STEPS) {
        top_of[i] = 0;
        UNROLL(c, 4) top_of[i] = max(top_of[i], __float_as_uint(x[i][c]) & 0x7fffffffu);
        top = max(top, top_of[i]);
        if (by_row) {
#pragma unroll
            for (int other = 1; other < ACROSS; other *= 2)
                top_of[i] = max(top_of[i], __shfl_xor_sync(~0u, top_of[i], other));
        }
    }
    top = __reduce_max_sync(~0u, top);
    if (lane == 0) tops[warp] = top;
    if (threadIdx.x == 0) small_row = false;
    __syncthreads();
    top = __reduce_max_sync(~0u, tops[lane % WARPS]);

    // Scaled. by_row: an element is compared with its column in its own row's scale.
    const float tile_scale = scale_for(top);
    const float least = by_row ? 16384 * SPREAD : __uint_as_float(top) * inverse_of(tile_scale) * SPREAD;
    float greatest[4] = {0, 0, 0, 0};
    UNROLL(i, STEPS) {
        const float inverse = inverse_of(by_row ? scale_for(top_of[i]) : tile_scale);
        UNROLL(c, 4) {
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
    UNROLL(c, 4) large &= greatest[c] >= least || column + c >= DIM;
    // Nearly always one warp alone proves that all columns have a large element.
    const bool all_large = __syncthreads_or(__all_sync(~0u, large));
    bool small = small_row;
    if (!all_large && tile * ROWS + 1 < count) {  // a column of one token has no others to compare with
        UNROLL(c, 4) tops_of_columns[warp * DOWN + lane / ACROSS][column + c] = greatest[c];
        __syncthreads();
        for (int c = threadIdx.x; c < 64 * CHUNKS; c += 32 * WARPS) {
            float own = 0;
            UNROLL(w, WARPS * DOWN) own = fmaxf(own, tops_of_columns[w][c]);
            small |= own != 0 && own < least;
        }
        small = __syncthreads_or(small);
    }
    auto or_nan = [&](float scale) { return small ? __int_as_float(0x7fffffff) : scale; };
    half_t* target = row_at<half_t>(at.terms, b, h, first) + column;
    UNROLL(i, STEPS) {
        const int token = first + DOWN * i;
        if (by_row && column == 0)  // the array holds whole tiles
            *row_at<float>(at.scale, b, h, token) = or_nan(scale_for(top_of[i]));
        uint2 high, low;
        to_terms(x[i][0], x[i][1], high.x, low.x), to_terms(x[i][2], x[i][3], high.y, low.y);
        if (token >= tokens) continue;
        *reinterpret_cast<uint2*>(target + i * DOWN * 64 * NUM_TERMS * CHUNKS) = high;
        if constexpr (NUM_TERMS == 2)
            *reinterpret_cast<uint2*>(target + i * DOWN * 64 * NUM_TERMS * CHUNKS + 64 * CHUNKS) = low;
    }
    if (threadIdx.x == 0 && !by_row) *row_at<float>(at.scale, b, h, tile) = or_nan(tile_scale);
}

// Enough co-resident CTAs to keep memory busy.
constexpr int MIN_CTAS = (HEAD_DIM > 64 || HEAD_DIM_V > 64 ? 1024 : 1536) / (32 * WARPS);
extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_CTAS)
fp16x2_convert(const __grid_constant__ Conversions conversions) {
    if (is_skipped(conversions.fallback)) return;
    const int cta = blockIdx.x;
    if (cta < conversions.ctas[1]) {  // q, k
        const int i = cta >= conversions.ctas[0];
        convert_tile<HEAD_DIM>(conversions.of[i], cta - (i > 0 ? (int)conversions.ctas[0] : 0));
    } else {  // v, dO
        const int i = cta >= conversions.ctas[2];
        convert_tile<HEAD_DIM_V>(conversions.of[2 + i], cta - (int)conversions.ctas[1 + i]);
    }
}
