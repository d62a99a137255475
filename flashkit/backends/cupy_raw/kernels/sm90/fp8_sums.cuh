// The sums of the FP8 forward pass: O and row sums in the tensor cores' accumulator, their promoted part, the epilogue.
//
// Promotion: a tensor core aligns each product to its accumulator and loses what lies under 2^-13 of it. So O goes to a
// part that CUDA cores sum, and begins anew, every PROMOTE_TILES tiles: weights of one size and values of one sign lose
// two per cent by then. Each thread has its own elements of that part, and their reference, so nothing waits.
//
// Row sums: eight lines of ones behind V^T make the tensor cores sum the codes, and the rounding of a great weight
// cancels in O. Every SUM_TILES tiles, and where V's scale changes, CUDA cores add them up. The log-sum-exp needs sums
// of weights that are not rounded (EXACT_LSE).
#pragma once
#include "sm90/fp8_softmax.cuh"

// The inverse of pack_f16().
DEVICE float2 unpack_f16(unsigned x) {
    float2 y;
    asm("{ .reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\n"
        "cvt.f32.f16 %1, high; }" : "=f"(y.x), "=f"(y.y) : "r"(x));
    return y;
}

// --- the epilogue ----------------------------------------------------------------------------------------------------

// A row's words of 32 columns among the four lanes that share it, transposed: each has a vector of 16 bytes then.
DEVICE void transpose_words(unsigned (&x)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
        UNROLL(i, 4) {
            if (i & step) continue;
            const bool odd = threadIdx.x & step;
            const unsigned other = __shfl_xor_sync(~0u, odd ? x[i] : x[i + step], step);
            if (odd) x[i] = other;
            else x[i + step] = other;
        }
}

// A lane's part of a row of O to global memory.
DEVICE void store_output_row(const float (&o)[SUMS_REGS], int half, storage* row, bool exists) {
    const int lane = threadIdx.x % 4;
    UNROLL(block, COLUMNS / 32) {
        unsigned x[4];
        UNROLL(i, 4) x[i] = pack(o[16 * block + 4 * i + 2 * half], o[16 * block + 4 * i + 2 * half + 1]);
        transpose_words(x);
        if (exists) reinterpret_cast<uint4*>(row + 32 * block)[lane] = {x[0], x[1], x[2], x[3]};
    }
#pragma unroll
    for (int i = COLUMNS / 32 * 16; i < COLUMNS / 2; i += 4)  // half a block
        if (exists) reinterpret_cast<unsigned*>(row + 2 * i)[lane] = pack(o[i + 2 * half], o[i + 2 * half + 1]);
}

// v_scale O / l of a warp's 16 rows, and their log-sum-exp, to global memory. exact_l: EXACT_LSE, sums of weights that
// are not rounded.
DEVICE void epilogue_fp8(const Params& p, const WorkTile& at, const float (&m)[2], const float (&l)[2],
                         const float (&exact_l)[2], float v_scale, float (&o)[SUMS_REGS]) {
    const int n_q = seq_of(p, at).n_q();
    bool is_nonfinite = false;
    const auto add = [](float x, float y) { return x + y; };
    UNROLL(half, 2) {
        const int index = at.row0 + row_of_lane(half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        const bool exists = index < n_q * PACK_GQA;
        float top = m[half], sum = SUMS_BY_ONES ? l[half] : across_lanes(l[half], add), of_sink = 1;
        float exact_top = top, exact_sum = SUMS_BY_ONES && EXACT_LSE ? across_lanes(exact_l[half], add) : sum;
        if (HAS_SINKS && exists) {
            float unused = 1;
            add_sink(p, h, exact_top, exact_sum, unused), add_sink(p, h, top, sum, of_sink);
        }
        const bool empty = sum == 0;  // no key is visible
        const float factor = empty ? 0.0f : of_sink * v_scale * reciprocal(sum);
        if (exists && threadIdx.x % 4 == 0)
            *q_row<float>(p, p.lse, at.b, h, row) = empty ? HIDDEN : LN2 * (exact_top + log2_fast(exact_sum));
        float zero = 0 * sum;  // NaN if an element is not finite
        UNROLL(n, COLUMNS / 8)
            UNROLL(c, 2) {
                float& x = o[4 * n + 2 * half + c];
                x *= factor;
                zero = fmaf(x, 0.0f, zero);
            }
        is_nonfinite |= zero != 0 && exists;
        store_output_row(o, half, q_row<storage>(p, p.out, at.b, h, row), exists);
    }
    if (__any_sync(~0u, is_nonfinite)) {
        __syncwarp();
        rows_nonfinite(p, at, 0);
    }
}

// --- sums ------------------------------------------------------------------------------------------------------------

struct SumsFp8 : SoftmaxFp8 {
    float o[SUMS_REGS];
    int tiles = 0;                // in O, since it began or was promoted
    bool promoted = false;        // a part of O is elsewhere
    float pending_inverse_v = 1;  // of the tile whose codes are pending

    using SoftmaxFp8::SoftmaxFp8;

    __device__ __forceinline__ void clear_sums() {
        UNROLL(i, SUMS_REGS) o[i] = 0;
        tiles = 0;
    }
    // A thread's vector i of the promoted part.
    __device__ __forceinline__ unsigned promoted_slot(int i) const {
        return base + AT_PROMOTED + wg * PROMOTED_BYTES + (i * 128 + threadIdx.x % 128) * VEC_BYTES;
    }
    __device__ __forceinline__ uint4* promoted_vec(int i) const {
        return static_cast<uint4*>(params.o_partial.data) +
               ((blockIdx.x * MMA_WARPGROUPS + wg) * PROMOTED_VECS + i) * 128 + threadIdx.x % 128;
    }
    __device__ __forceinline__ unsigned reference_slot(int half) const {
        return base + AT_REFERENCES + wg * REFERENCES_BYTES + row_of_lane(half) * 4;
    }
    __device__ __forceinline__ float4 load_promoted(int i) const {
        const uint4 x = load_vec(promoted_slot(i));
        return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
    }
    __device__ __forceinline__ void store_promoted(int i, float x, float y, float z, float w) const {
        store_vec(promoted_slot(i), x, y, z, w);
    }
    // The same of wide heads: a vector has four numbers of each row.
    __device__ __forceinline__ void add_wide_promoted(const float (&m)[2]) {
        float by[2];
        UNROLL(half, 2)
            by[half] = exp2_fast(load_float(reference_slot(half)) - m[half] + PROMOTED_UNIT);
        UNROLL(i, PROMOTED_VECS) {
            const uint4 x = PROMOTED_IN_SHARED ? load_vec(promoted_slot(i)) : *promoted_vec(i);
            const float2 pairs[4] = {unpack_f16(x.x), unpack_f16(x.y), unpack_f16(x.z), unpack_f16(x.w)};
            UNROLL(c, 4) {
                float* to = o + 8 * i + 2 * c;
                to[0] = fmaf(pairs[c].x, by[c % 2], to[0]), to[1] = fmaf(pairs[c].y, by[c % 2], to[1]);
            }
        }
    }
    __device__ __forceinline__ void store_wide_promoted() {
        constexpr float unit = 1.0f / (1 << (int)PROMOTED_UNIT);
        UNROLL(i, PROMOTED_VECS) {
            unsigned x[4];
            UNROLL(c, 4) x[c] = pack_f16(o[8 * i + 2 * c] * unit, o[8 * i + 2 * c + 1] * unit);
            if (PROMOTED_IN_SHARED) store_words(promoted_slot(i), x[0], x[1], x[2], x[3]);
            else *promoted_vec(i) = {x[0], x[1], x[2], x[3]};
        }
        __syncwarp();  // all lanes have read the references
        UNROLL(half, 2)
            if (threadIdx.x % 4 == 0) store_float(reference_slot(half), m[half]);
        __syncwarp();
    }
    // O plus the promoted part, relative to m.
    __device__ __forceinline__ void add_promoted(const float (&m)[2]) {
        if constexpr (!IS_NARROW) return add_wide_promoted(m);
        const float4 reference = load_promoted(PROMOTED_VECS - 1);
        const float by[2] = {exp2_fast(reference.x - m[0]), exp2_fast(reference.y - m[1])};
        UNROLL(i, PROMOTED_VECS - 1) {
            const float4 x = load_promoted(i);
            o[4 * i] = fmaf(x.x, by[0], o[4 * i]), o[4 * i + 1] = fmaf(x.y, by[0], o[4 * i + 1]);
            o[4 * i + 2] = fmaf(x.z, by[1], o[4 * i + 2]), o[4 * i + 3] = fmaf(x.w, by[1], o[4 * i + 3]);
        }
    }
    __device__ __forceinline__ void promote() {
        if (promoted) add_promoted(m);
        if constexpr (IS_NARROW) {
            UNROLL(i, PROMOTED_VECS - 1)
                store_promoted(i, o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
            store_promoted(PROMOTED_VECS - 1, m[0], m[1], 0, 0);
        } else {
            store_wide_promoted();
        }
        clear_sums();
        promoted = true;
    }
    __device__ __forceinline__ float sum_by_ones(int half) const { return o[(ONES + 2 * half) % SUMS_REGS]; }
    // After a product. A branch with a barrier in it: predicated, ptxas would move it among the wgmmas and serialise
    // them. more: whether the work tile may have tiles behind the one in hand.
    __device__ __forceinline__ void end_product(bool grows, bool more) {
        const bool promotes = ++tiles >= PROMOTE_TILES && more,
                   changes = SCALES_OF_BLOCKS && inverse_v != pending_inverse_v,
                   adds = SUMS_BY_ONES && (tiles % SUM_TILES == 0 || changes);
        if (__builtin_expect(grows || adds || promotes, 0)) {
            __syncwarp();
            UNROLL(half, 2) {
                if (SUMS_BY_ONES) {
                    l[half] = fmaf(sum_by_ones(half), pending_inverse_v, l[half]);
                    o[(ONES + 2 * half) % SUMS_REGS] = o[(ONES + 2 * half + 1) % SUMS_REGS] = 0;
                    if (grows) l[half] *= rescale[half];
                }
            }
            if (grows) rescale_o();
            if (promotes) promote();
            if (SUMS_BY_ONES && grows) tiles |= SUM_TILES - 1;  // sums are added up behind the next product
        }
    }
    __device__ __forceinline__ void rescale_o() {
        UNROLL(i, SUMS_REGS) o[i] *= rescale[i / 2 % 2];
    }
};
