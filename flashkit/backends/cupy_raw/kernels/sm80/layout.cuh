// Tiles for mma.sync, from Ampere on: how they lie in registers and in shared memory.
//
// A matrix instruction multiplies fragments in the registers of a warp. Of an accumulator of 16 x 8 a lane holds, with
// g = lane / 4 and t = lane % 4,
//
//     element 0, 1    row g,      columns 2t, 2t + 1
//     element 2, 3    row g + 8,  columns 2t, 2t + 1
//
// For 16-bit elements that is also the layout of the A operand: P becomes an operand in the registers where it is.
//
// Constants of the head beyond those of common/params.cuh: TF32_TERMS, products of TF32 per product of float32, 1 or 3
// (mma.cuh); GRANULE, the multiple that head dims are padded to; PADDED, how rows lie in shared memory; AT_...,
// offsets in shared memory (cupy_raw/sm80.py).
#pragma once

#include "common/fragment.cuh"

constexpr bool IS_FLOAT32 = sizeof(storage) == 4;
constexpr int STEP = IS_FLOAT32 ? 8 : 16;           // columns that one instruction multiplies
constexpr int VEC_ELEMENTS = 16 / sizeof(storage);  // elements of a vector of 16 bytes

// Rows in shared memory are filled up with zeros to a multiple of GRANULE columns. Eight rows that a warp reads at the
// same column have to lie on different banks. Either the vectors of a row are swizzled, among as many as divide its
// length, up to eight; or, if PADDED, rows begin an odd number of vectors apart. A padded copy of two neighbours
// straddles sectors, each of which is fetched twice; but one address serves all columns, which is faster where operands
// are loaded a word at a time (float32) or registers are few.
constexpr int padded(int dim) { return up(dim, GRANULE); }
constexpr int row_vecs(int dim) { return padded(dim) / VEC_ELEMENTS; }
constexpr int pitch(int dim) { return (row_vecs(dim) + PADDED) * 16; }  // bytes
constexpr int swizzle_span(int dim) {
    return PADDED ? 1 : row_vecs(dim) % 8 == 0 ? 8 : row_vecs(dim) % 4 == 0 ? 4 : 2;
}

template <int DIM>
DEVICE unsigned swizzle(unsigned row) { return row / (8 / swizzle_span(DIM)) % swizzle_span(DIM); }
// Byte offset of a vector of a row within its tile.
template <int DIM>
DEVICE unsigned vec_offset(unsigned row, unsigned vec) { return row * pitch(DIM) + (vec ^ swizzle<DIM>(row)) * 16; }
// An element of a tile.
template <int DIM>
DEVICE storage& element(void* tile, int row, int column) {
    char* vec = static_cast<char*>(tile) + vec_offset<DIM>(row, column / VEC_ELEMENTS);
    return reinterpret_cast<storage*>(vec)[column % VEC_ELEMENTS];
}
// Address of vector first + n of a row, where a warp visits SHARE vectors in twos: `first` is the first of them or its
// neighbour, n is even. Mostly one address serves all n.
template <int DIM, int SHARE>
DEVICE unsigned vec_address(unsigned tile, unsigned row, unsigned first, int n) {
    constexpr int SPAN = swizzle_span(DIM);
    if constexpr (SHARE % SPAN != 0 && (SHARE & (SHARE - 1)) != 0) return tile + vec_offset<DIM>(row, first + n);
    return ((tile + vec_offset<DIM>(row, first)) ^ n % SPAN * 16) + n / SPAN * SPAN * 16;
}

DEVICE unsigned smem_address(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
// A value that is the same in all lanes, from an instruction whose result lies in a uniform register.
DEVICE unsigned uniform(unsigned x) { return __reduce_or_sync(~0u, x); }
// A value that the compiler must keep. It would read the base of shared memory (S2R) anew for every tile, and the read
// waits for all earlier stores to shared memory.
DEVICE unsigned opaque(unsigned x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

#include "sm80/load.cuh"
#include "sm80/mma.cuh"
#include "sm80/tile_scheduler.cuh"
#include "sm80/store.cuh"
