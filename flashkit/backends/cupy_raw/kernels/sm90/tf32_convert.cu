// TF32's backward pass: Q, K, V and dO as float16 under a power-of-two scale for each key/value head, so that sums over
// queries and over keys stay in the accumulators of the tensor cores.
//
//     tf32_maxima     the greatest magnitude of each column of a head
//     tf32_convert    the scale, which brings the greatest of a head to [2^14, 2^15), and the rounded elements
//
// Elements down to 2^-28 of the greatest keep 11 bits. Where a row or a column lies wholly below that, or an element is
// not finite, the call is for the fallback, which has a scale for each row or tile.
#include "sm90/fp16x2_terms.cuh"

struct Converted {
    Tensor source, target;      // float32; float16, 64 * chunks columns
    Integers lengths;           // (B,), or none
    long long heads, tokens, group;
};
// Of q, k, v and dO; ctas: of the first tensor, of two ...
struct Conversion {
    Converted of[4];
    long long ctas[4];
    unsigned* maxima;           // [key/value heads][4][MAX_DIM], bits, 0 at first
    float* scales;              // [key/value heads][4]
    int* fallback;
};

constexpr int MAX_DIM = 128, TOKENS = 8, WARPS = 16, ROWS = WARPS * TOKENS;  // TOKENS: of a warp
constexpr float LEAST = 1.2207031e-4f;  // 2^-13, 2^-27 of the greatest
// dS has fewer bits where a row of dO is small, as its scale is that of all rows: 2^-14 of the greatest.
constexpr float LEAST_DOUT = 1;
enum Operand { OF_Q, OF_K, OF_V, OF_DOUT };

// A CTA's rows, a lane's columns, as in fp16x2_convert.cu.
template <int DIM>
struct Place {
    static constexpr int CHUNKS = (DIM + 63) / 64, ACROSS = 16 * CHUNKS, DOWN = 32 / ACROSS, STEPS = TOKENS / DOWN;
    static_assert(DIM <= MAX_DIM, "a row for a warp");
    int b, h, kv_head, tile, first, count, column;

    __device__ __forceinline__ Place(const Converted& at, int index) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int tiles = (int)((at.tokens + ROWS - 1) / ROWS), bh = index / tiles;
        b = bh / (int)at.heads, h = bh - b * (int)at.heads, tile = index - bh * tiles;
        kv_head = bh / (int)at.group;
        const long long length = at.lengths.given() ? at.lengths[b] : at.tokens;
        count = length < 0 ? 0 : length < at.tokens ? (int)length : (int)at.tokens;
        first = tile * ROWS + warp * TOKENS + lane / ACROSS, column = lane % ACROSS * 4;
    }
};

template <int DIM>
DEVICE void maxima_of(const Conversion& all, int operand, int index) {
    using P = Place<DIM>;
    __shared__ unsigned tops[WARPS * P::DOWN][64 * P::CHUNKS];
    const Converted& from = all.of[operand];
    const P at(from, index);
    float x[P::STEPS][4];
    load_rows<DIM, P::DOWN>(x, from.source, at.b, at.h, at.first, at.count, at.column);
    UNROLL(c, 4) {
        unsigned top = 0;
        UNROLL(i, P::STEPS) top = max(top, __float_as_uint(x[i][c]) & 0x7fffffffu);
        tops[threadIdx.x / P::ACROSS][at.column + c] = top;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < DIM; c += 32 * WARPS) {
        unsigned top = 0;
        UNROLL(w, WARPS * P::DOWN) top = max(top, tops[w][c]);
        if (top != 0) atomicMax(all.maxima + (at.kv_head * 4 + operand) * MAX_DIM + c, top);
    }
}

template <int DIM>
DEVICE void convert_rows(const Conversion& all, int operand, int index) {
    using P = Place<DIM>;
    const Converted& from = all.of[operand];
    const P at(from, index);
    unsigned tops[4], top = 0;
    UNROLL(c, 4) {
        const bool exists = at.column + c < DIM;
        tops[c] = exists ? all.maxima[(at.kv_head * 4 + operand) * MAX_DIM + at.column + c] : 0;
        top = max(top, tops[c]);
    }
    top = __reduce_max_sync(~0u, top);
    const float scale = scale_for(top), inverse = inverse_of(scale);
    bool is_wide = top >= 0x7f800000u;
    UNROLL(c, 4) is_wide |= tops[c] != 0 && __uint_as_float(tops[c]) * inverse < LEAST;
    if (at.tile == 0 && at.h % (int)from.group == 0 && threadIdx.x == 0)
        all.scales[at.kv_head * 4 + operand] = scale;
    float x[P::STEPS][4];
    load_rows<DIM, P::DOWN>(x, from.source, at.b, at.h, at.first, at.count, at.column);
    half_t* target = row_at<half_t>(from.target, at.b, at.h, at.first) + at.column;
    UNROLL(i, P::STEPS) {
        float row = 0;
        UNROLL(c, 4) x[i][c] *= inverse, row = fmaxf(row, fabsf(x[i][c]));
#pragma unroll
        for (int other = 1; other < P::ACROSS; other *= 2) row = fmaxf(row, __shfl_xor_sync(~0u, row, other));
        is_wide |= row != 0 && row < (operand == OF_DOUT ? LEAST_DOUT : LEAST);
        uint2 packed, none;
        to_terms(x[i][0], x[i][1], packed.x, none.x), to_terms(x[i][2], x[i][3], packed.y, none.y);
        if (at.first + i * P::DOWN < from.tokens)
            *reinterpret_cast<uint2*>(target + i * P::DOWN * 64 * P::CHUNKS) = packed;
    }
    if (is_wide) *all.fallback = 1;
}

// Calls f(operand, CTA of the operand, HEAD_DIM or HEAD_DIM_V).
template <typename F>
DEVICE void for_operand(const Conversion& all, F f) {
    const int cta = blockIdx.x;
    const int operand = cta < all.ctas[0] ? OF_Q : cta < all.ctas[1] ? OF_K : cta < all.ctas[2] ? OF_V : OF_DOUT;
    f(operand, cta - (operand == OF_Q ? 0 : (int)all.ctas[operand - 1]));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
tf32_maxima(const __grid_constant__ Conversion all) {
    for_operand(all, [&](int operand, int index) {
        if (operand <= OF_K) maxima_of<HEAD_DIM>(all, operand, index);
        else maxima_of<HEAD_DIM_V>(all, operand, index);
    });
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
tf32_convert(const __grid_constant__ Conversion all) {
    for_operand(all, [&](int operand, int index) {
        if (operand <= OF_K) convert_rows<HEAD_DIM>(all, operand, index);
        else convert_rows<HEAD_DIM_V>(all, operand, index);
    });
}
