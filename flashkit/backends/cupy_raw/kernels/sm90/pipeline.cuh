// What producers, consumers and tile schedulers share: pipelines, the counter of work tiles, tiles of packed sequences.
#pragma once
#include "common/distances.cuh"
#include "sm90/instructions.cuh"

// A row or key past the end stands for the last one, so no array is read beyond its end. Its pair is masked anyway.
DEVICE int clamped_index(int i, int n) { return min(i, n > 0 ? n - 1 : 0); }

// A circular buffer in shared memory between a producer and its consumers, as in CUTLASS: a full and an empty mbarrier
// for each stage. Index n of the sequence lies in stage n % STAGES. The addresses are those of the first full and the
// first empty barrier.
template <int STAGES>
struct Pipeline {
    unsigned full, empty;
    __device__ __forceinline__ static unsigned stage(unsigned n) { return n % STAGES; }
    __device__ __forceinline__ static Pipeline at(unsigned address) { return {address, address + 8 * STAGES}; }
    __device__ __forceinline__ unsigned full_barrier(unsigned n) const { return full + 8 * (n % STAGES); }
    __device__ __forceinline__ unsigned empty_barrier(unsigned n) const { return empty + 8 * (n % STAGES); }
    __device__ __forceinline__ void consumer_wait(unsigned n) const { mbarrier_wait(full_barrier(n), n / STAGES & 1); }
    __device__ __forceinline__ void producer_acquire(unsigned n) const {
        mbarrier_wait(empty_barrier(n), (n / STAGES & 1) ^ 1);
    }
    __device__ __forceinline__ void producer_acquire_backoff(unsigned n, int nanoseconds = 100) const {
        mbarrier_wait_backoff(empty_barrier(n), (n / STAGES & 1) ^ 1, nanoseconds);
    }
    // One arrival for a warp that no longer reads the stage.
    __device__ __forceinline__ void consumer_release(unsigned n, int lane = threadIdx.x % 32) const {
        mbarrier_arrive_once(empty_barrier(n), lane);
    }
    __device__ __forceinline__ void init(int producers, int consumers) const {
        for (int i = 0; i < STAGES; ++i)
            mbarrier_init(full + 8 * i, producers), mbarrier_init(empty + 8 * i, consumers);
    }
};

// --- the counter of work tiles ---------------------------------------------------------------------------------------

// A persistent grid: a CTA begins with the work tile of its own number, and claims others. The last one resets the
// counter for the next launch.
struct WorkTileCounter {
    const Params& p;

    __device__ __forceinline__ int initial() const { return blockIdx.x; }
    // By a warp: claims an index, which claimed() tells of the result. Meanwhile there is time for something else.
    __device__ __forceinline__ int claim() const { return count_if(threadIdx.x % 32 == 0, p.tile_counter); }
    __device__ __forceinline__ int claimed(int claim) const { return uniform(claim) + gridDim.x; }
    __device__ __forceinline__ void reset() const {  // by one thread of each CTA, at its end
        if (atomicAdd(p.tile_counter + 1, 1u) == gridDim.x - 1) p.tile_counter[0] = 0, p.tile_counter[1] = 0;
    }
};

// --- lists of tiles --------------------------------------------------------------------------------------------------
//
// Lists of the tiles that a mask leaves, made by one warp (fill).

// The scheduler warp's side.
template <typename List, int LISTS, int NANOSECONDS = 100>
struct ListWriter {
    Pipeline<LISTS> pipe;
    List* lists;
    unsigned n = 0;  // lists so far

    __device__ __forceinline__ List& acquire() const {
        pipe.producer_acquire_backoff(n, NANOSECONDS);
        return lists[n % LISTS];
    }
    __device__ __forceinline__ void commit() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(pipe.full_barrier(n));
        ++n;
    }
};

struct TileList {
    int entry[224];  // index << 8 | states of the warp groups' rows, two bits each
};

// --- packed sequences ------------------------------------------------------------------------------------------------
//
// Their tiles, numbered without the gaps of SeqTile: half of that one's numbers are of no tile where sequences are as
// short as a tile, and each would cost a claim.

// The sum of n over the lanes up to this one.
DEVICE int sum_to_lane(int n) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_sync(~0u, n, (threadIdx.x - step) % 32);
        if (threadIdx.x % 32 >= step) n += other;
    }
    return n;
}

enum PackedAxis { QUERIES, KEYS };

// Found by a warp, whose lanes know how many tiles precede step() sequences each, and for 32 sequences from `first` on
// how many those up to theirs have.
template <PackedAxis AXIS, int BLOCK>
struct PackedTiles {
    const Params& p;
    int before, total;
    int first = 0, before_first = 0, until = 0;

    __device__ __forceinline__ PackedTiles(const Params& p) : p(p) {
        if constexpr (!IS_PACKED) return;
        int count = 0;
        for (int i = 0; i < step(); ++i) count += of_sequence(threadIdx.x % 32 * step() + i);
        const int after = sum_to_lane(count);
        before = after - count, total = __shfl_sync(~0u, after, 31);
    }
    __device__ __forceinline__ int step() const { return ((int)p.batch + 31) / 32; }
    __device__ __forceinline__ int covered() const { return __shfl_sync(~0u, until, 31); }
    __device__ __forceinline__ int of_sequence(int b) const {
        if (b >= p.batch) return 0;
        const SeqInfo of = seq_info(p, b);
        return ((int)(AXIS == QUERIES ? of.n_q : of.n_k) + BLOCK - 1) / BLOCK;
    }
    __device__ __forceinline__ SeqTile tile(int number) {
        const bool is_known = number >= before_first && number - before_first < covered();
        if (!is_known) look_up(number);
        const int rest = number - before_first, lane = __ffs(__ballot_sync(~0u, until > rest)) - 1;
        const int before_lane = __shfl_sync(~0u, until, (lane + 31) % 32);
        return {first + lane, lane > 0 ? rest - before_lane : rest};
    }
    __device__ __forceinline__ void look_up(int number) {
        const int lane = __popc(__ballot_sync(~0u, before <= number)) - 1;
        first = lane * step(), before_first = __shfl_sync(~0u, before, lane);
#pragma unroll 1
        while (until = sum_to_lane(of_sequence(first + threadIdx.x % 32)), number - before_first >= covered())
            first += 32, before_first += covered();
    }
};

// As packed_tile(), by a warp: 32 places of the search at a time.
DEVICE SeqTile packed_tile_by_warp(const long long* cu_seqlens, int batch, int number, int block) {
    int low = 0, high = batch;
#pragma unroll 1
    while (high - low > 1) {
        const int step = (high - low + 31) / 32, place = low + threadIdx.x % 32 * step;
        const bool begins_before = place < high && first_tile(cu_seqlens, place, block) <= number;
        low += (__popc(__ballot_sync(~0u, begins_before)) - 1) * step;
        if (low + step < high) high = low + step;
    }
    return {low, number - first_tile(cu_seqlens, low, block)};
}

// --- a sequence's place ----------------------------------------------------------------------------------------------
//
// What is asked of a work tile's sequence. Of packed sequences the scheduler warp writes it into shared memory with the
// work tile: it takes several arrays in global memory to say it. Else Params says it.

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

// Element [row - key] of the sequence.
DEVICE float* distances(const Tensor& tensor, const SeqSlot& seq, int h) {
    const int n_k = IS_PACKED ? seq.n_k() : (int)max_n_k(seq.p);
    return distances(tensor, seq.b, h, seq.q_row(0) + seq.key_row(0), n_k);
}
