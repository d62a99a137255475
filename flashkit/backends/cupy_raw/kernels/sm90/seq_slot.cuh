// What is asked of a work tile's sequence. Of packed sequences the scheduler warp writes it into shared memory with the
// work tile: it takes several arrays in global memory to say it. Else Params says it.
#pragma once
#include "sm90/instructions.cuh"

struct SeqSlot {
    const Params& p;
    int b;
    unsigned address;
    static constexpr int BYTES = IS_PACKED ? 24 : 0;
    enum { N_Q = 0, N_K = 4, ROW_OFFSET = 8, KEY_OFFSET = 12, POSITION = 16 };

    __device__ __forceinline__ void store(const SeqInfo& of) const {
        if constexpr (!IS_PACKED) return;
        store_word(address + N_Q, (int)of.n_q), store_word(address + N_K, (int)of.n_k);
        store_word(address + ROW_OFFSET, (int)of.row_offset), store_word(address + KEY_OFFSET, (int)of.key_offset);
        store_word(address + POSITION, (int)of.q_position), store_word(address + POSITION + 4, of.q_position >> 32);
    }
    __device__ __forceinline__ void copy_from(unsigned other) const {
#pragma unroll
        for (int i = 0; i < BYTES; i += 4) store_word(address + i, load_word(other + i));
    }
    __device__ __forceinline__ int n_q() const {
        return IS_PACKED ? load_word(address + N_Q) : (int)seq_info(p, b).n_q;
    }
    __device__ __forceinline__ int n_k() const {
        return IS_PACKED ? load_word(address + N_K) : (int)seq_info(p, b).n_k;
    }
    __device__ __forceinline__ long long q_position() const {
        if constexpr (!IS_PACKED) return seq_info(p, b).q_position;
        return (long long)load_word(address + POSITION + 4) << 32 | (unsigned)load_word(address + POSITION);
    }
    // The rows of its queries and keys among those of all sequences.
    __device__ __forceinline__ int q_row(int n) const { return IS_PACKED ? load_word(address + ROW_OFFSET) + n : n; }
    __device__ __forceinline__ int key_row(int n) const { return IS_PACKED ? load_word(address + KEY_OFFSET) + n : n; }
};

// Of a work tile that lies in `slot`: behind its three words.
DEVICE SeqSlot seq_of(const Params& p, int b, unsigned slot) { return {p, b, slot + 12}; }
