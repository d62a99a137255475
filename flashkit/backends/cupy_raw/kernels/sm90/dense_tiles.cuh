// Tiles of arrays with an element for each row and key (cuda_common/modification.py, DenseArray): a bias, which a score
// modification adds, and a boolean mask. They come to shared memory by TMA: in the forward pass with K, in the backward
// pass for each tile of Q, in as many stages as there is room for.
//
// From the head: BIAS_BYTES: of an element of the bias, or 0 where pairs read theirs from global memory;
// BIAS_IS_BFLOAT16; MASK_TILES: whether tiles of a mask come; BIAS_OF_HEADS, BIAS_OF_ENTRIES, MASK_TILES_OF_HEADS,
// MASK_TILES_OF_ENTRIES: whether heads, and batch entries, have elements of their own.
#pragma once
#include "sm90/instructions.cuh"

template <int BYTES, bool OF_HEADS, bool OF_ENTRIES, int ROWS, int KEYS>
struct DenseTile {
    static constexpr int CHUNK = CHUNK_ROW / larger(BYTES, 1);  // keys
    static constexpr int CHUNKS = BYTES > 0 ? up(KEYS, CHUNK) / CHUNK : 0, SIZE = CHUNKS * ROWS * CHUNK_ROW;

    __device__ __forceinline__ static Box box(int b, int h, int row, int key) {
        return {key, row, OF_HEADS ? h : 0, OF_ENTRIES ? b : 0};
    }
    __device__ __forceinline__ static void load(unsigned target, const TensorMap& map, int b, int h, int row, int key,
                                                unsigned barrier) {
        if constexpr (BYTES > 0) load_tile<1, CHUNKS, ROWS, CHUNK>(target, map, box(b, h, row, 0), barrier, key);
    }
};

// One of two numbers of 16 bits.
DEVICE float bias_of_pair(unsigned pair, int c) {
    if constexpr (BIAS_IS_BFLOAT16) return __uint_as_float(c ? pair & 0xffff0000u : pair << 16);
    return widen(half_t{(unsigned short)(pair >> 16 * c)});
}

// Bit 7 of each byte says whether the byte is not 0; its other bits are anything.
DEVICE unsigned nonzero_bytes(unsigned x) { return (x & 0x7f7f7f7fu) + 0x7f7f7f7fu | x; }

// Of a mask: bit 8 i + m says whether byte i is not 0 in word m of those that ldmatrix gives a lane from the first four
// matrices and the second ones. Matrices have pairs of bytes: lanes exchange bits where others need them.
template <bool TRANSPOSED>
DEVICE unsigned mask_bits(unsigned first, unsigned second) {
    unsigned bits = 0;
#pragma unroll
    for (int m = 0; m < 8; m += 4) {
        unsigned four[4];
        ldmatrix_x4<TRANSPOSED>(four, m == 0 ? first : second);
        UNROLL(i, 4) bits |= (nonzero_bytes(four[i]) & 0x80808080u) >> (7 - m - i);
    }
    return bits;
}
