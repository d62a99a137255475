// Gradients by values that a score modification reads: each pair adds dS * d score / d value to the element of the sums
// that it has read. Generated code (cupy_raw/modify.py) has a `ValueSums` with one of these for each read; add() is for
// the pairs of a thread, flush() for all threads of a warp together, after the last pair of a head. AT: the index in
// Params::values of the address of the sums; offsets are in elements.
#pragma once

DEVICE void add_float(float* at, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory"); }
DEVICE void add_float(double* at, double x) {
    asm volatile("red.global.add.f64 [%0], %1;" ::"l"(at), "d"(x) : "memory");
}

// ORDERED_SUMS, as in cuda_common/ordered_sums.py: integers, whose sum does not depend on the order. The words: bits of
// the greatest term; of each sum one, or two for float64. terms: log2 of the terms of a sum, -1 to find the greatest.
DEVICE void add_ordered(unsigned long long* words, long long offset, double x, int terms) {
    constexpr unsigned long long INFINITY_BITS = 0x7ffull << 52;
    const unsigned long long bits = (unsigned long long)__double_as_longlong(x) & ~(1ull << 63);
    unsigned long long* sum = words + 1 + offset * (sizeof(fk_float) / 4);
    if (terms < 0) {
        if (bits < INFINITY_BITS) asm volatile("red.global.max.u64 [%0], %1;" ::"l"(words), "l"(bits) : "memory");
    } else if (bits >= INFINITY_BITS) {
        asm volatile("red.global.or.b64 [%0], %1;" ::"l"(sum), "l"(1ull << 62) : "memory");
    } else {
        long long exponent = (long long)(words[0] >> 52) + (terms - 60 - 1022);
        exponent = exponent < -1000 ? -1000 : exponent > 1000 ? 1000 : exponent;
        const double units = x * __longlong_as_double((1023 - exponent) << 52);
        const long long high = __double2ll_rn(units);
        asm volatile("red.global.add.u64 [%0], %1;" ::"l"(sum), "l"(high) : "memory");
        if constexpr (sizeof(fk_float) == 8) {
            const long long low = __double2ll_rn((units - (double)high) * (double)(1ll << (60 - terms)));
            asm volatile("red.global.add.u64 [%0], %1;" ::"l"(sum + 1), "l"(low) : "memory");
        }
    }
}

template <int AT>
DEVICE void add_to(const Params& p, long long offset, fk_float x) {
    if constexpr (ORDERED_SUMS) add_ordered((unsigned long long*)p.values[AT], offset, x, (int)p.values[VALUES - 1]);
    else add_float((fk_float*)p.values[AT] + offset, x);
}

// Most pairs have elements of their own, as those of a bias.
template <int AT>
struct EachPair {
    __device__ __forceinline__ void add(const Params& p, long long at, fk_float x) { add_to<AT>(p, at, x); }
    __device__ __forceinline__ void flush(const Params&) {}
};

// Neighbouring pairs often have the same, as in a table of distances.
template <int AT>
struct Run {
    long long last = -1;
    fk_float sum = 0;
    __device__ __forceinline__ void add(const Params& p, long long at, fk_float x) {
        if (at != last) {
            flush(p);
            last = at;
        }
        sum += x;
    }
    __device__ __forceinline__ void flush(const Params& p) {
        if (last >= 0) add_to<AT>(p, last, sum);
        last = -1, sum = 0;
    }
};

// All pairs of a head have one, as a slope.
template <int AT>
struct OfHead {
    fk_float sum = 0;
    __device__ __forceinline__ void add(const Params&, long long, fk_float x) { sum += x; }
    __device__ __forceinline__ void flush(const Params& p, long long at) {
#pragma unroll
        for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
        if (threadIdx.x % 32 == 0 && sum != 0) add_to<AT>(p, at, sum);
        sum = 0;
    }
};
