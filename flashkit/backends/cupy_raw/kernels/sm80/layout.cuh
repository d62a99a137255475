// Tiles on tensor cores by mma.sync, from Ampere on: how they lie in registers and shared memory. sm80_*.cuh have what is
// done with them.
//
// A matrix instruction multiplies fragments that lie in the registers of a warp. Of an accumulator of 16 x 8 a lane
// holds, with g = lane / 4 and t = lane % 4,
//
//     element 0, 1    row g,      columns 2t, 2t + 1
//     element 2, 3    row g + 8,  columns 2t, 2t + 1
//
// which for 16-bit elements is also the layout of the left operand: weights become an operand where they are.
//
// float32 goes through the same instructions in TF32, whose numbers have 11 bits. With TERMS = 3 each number is the sum
// of two of them, and a product the sum of the three larger of their four products (Ootomo and Yokota 2022,
// arXiv 2203.03341). What is left out, up to 2^-22 of a product, averages out in sums of many. Tensor cores round their
// sums towards zero; so each step starts from zero and is added to the sum on the ordinary units, which round to nearest.
//
// Constants of the head that these kernels add to those of params.cuh: TERMS, of float32 products, 1 or 3; GRANULE, a
// multiple of 16; PADDED, how rows lie in shared memory.
#pragma once

#include "common/fragment.cuh"

constexpr bool IS_FLOAT32 = sizeof(storage) == 4;  // float32
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int STEP = IS_FLOAT32 ? 8 : 16;          // columns that an instruction multiplies
constexpr int VEC_ELEMENTS = 16 / sizeof(storage);  // elements of 16 bytes

constexpr int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Rows in shared memory are filled up with zeros to a multiple of GRANULE columns. Eight rows that are read at the same
// column have to lie on different banks. Either pieces of 16 bytes are permuted within a row, among as many as divide its
// length, up to eight; or, if PADDED, rows begin an odd number of pieces apart. Then a copy of two neighbours straddles
// sectors, each of which is fetched twice; but one address serves all columns, which is faster where operands are loaded a
// word at a time (float32) or registers are few.
constexpr int padded(int dim) { return up(dim, GRANULE); }
constexpr int pieces(int dim) { return padded(dim) / VEC_ELEMENTS; }
constexpr int pitch(int dim) { return (pieces(dim) + PADDED) * 16; }  // bytes
constexpr int among(int dim) { return PADDED ? 1 : pieces(dim) % 8 == 0 ? 8 : pieces(dim) % 4 == 0 ? 4 : 2; }

template <int DIM>
DEVICE unsigned swap_of(unsigned row) { return row / (8 / among(DIM)) % among(DIM); }
// Where a piece of a row is, in bytes from the tile's beginning.
template <int DIM>
DEVICE unsigned place(unsigned row, unsigned piece) { return row * pitch(DIM) + (piece ^ swap_of<DIM>(row)) * 16; }
// An element.
template <int DIM>
DEVICE storage& element(void* tile, int row, int column) {
    return reinterpret_cast<storage*>(static_cast<char*>(tile) + place<DIM>(row, column / VEC_ELEMENTS))[column % VEC_ELEMENTS];
}
// Address of piece first + n of a row, where a warp goes over a share of SHARE pieces in twos: first is the share's first
// piece or the one after, n even. Mostly one address serves all n.
template <int DIM, int SHARE>
DEVICE unsigned piece_at(unsigned tile, unsigned row, unsigned first, int n) {
    constexpr int AMONG = among(DIM);
    if constexpr (SHARE % AMONG != 0 && (SHARE & (SHARE - 1)) != 0) return tile + place<DIM>(row, first + n);
    return ((tile + place<DIM>(row, first)) ^ n % AMONG * 16) + n / AMONG * AMONG * 16;
}

DEVICE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
// A number that is the same in all lanes of a warp, got by an instruction whose result lies in a uniform register; and a number that
// is kept: where shared memory begins the compiler asks anew for each tile (S2R), and the answer comes behind all stores to it.
DEVICE unsigned uniform(unsigned x) { return __reduce_or_sync(~0u, x); }
DEVICE unsigned kept(unsigned x) {
    asm volatile("mov.b32 %0, %0;" : "+r"(x));
    return x;
}

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }

#include "sm80/load.cuh"
#include "sm80/mma.cuh"
#include "sm80/tile_scheduler.cuh"
#include "sm80/store.cuh"
