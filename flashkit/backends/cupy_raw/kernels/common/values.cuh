// Gradients by values that a score modification reads: each pair adds dS * d score / d value to the element of the sums
// that it has read. Generated code (cupy_raw/modify.py) has a `ValueSums` with one of these for each read; add() is for
// the pairs of a thread, flush() for all threads of a warp together, after the last pair of a head.
#pragma once

DEVICE void add_to(float* at, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory"); }
DEVICE void add_to(double* at, double x) { asm volatile("red.global.add.f64 [%0], %1;" ::"l"(at), "d"(x) : "memory"); }

// Most pairs have elements of their own, as those of a bias.
struct EachPair {
    __device__ __forceinline__ void add(fk_float* at, fk_float x) { add_to(at, x); }
    __device__ __forceinline__ void flush() {}
};

// Neighbouring pairs often have the same, as in a table of distances.
struct Run {
    fk_float* last = nullptr;
    fk_float sum = 0;
    __device__ __forceinline__ void add(fk_float* at, fk_float x) {
        if (at != last) {
            flush();
            last = at;
        }
        sum += x;
    }
    __device__ __forceinline__ void flush() {
        if (last != nullptr) add_to(last, sum);
        last = nullptr, sum = 0;
    }
};

// All pairs of a head have one, as a slope.
struct OfHead {
    fk_float sum = 0;
    __device__ __forceinline__ void add(fk_float*, fk_float x) { sum += x; }
    __device__ __forceinline__ void flush(fk_float* at) {
#pragma unroll
        for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(~0u, sum, lane);
        if (threadIdx.x % 32 == 0 && sum != 0) add_to(at, sum);
        sum = 0;
    }
};
