// A circular buffer in shared memory between a producer and its consumers, as in CUTLASS: a full and an empty mbarrier
// for each stage.
#pragma once
#include "sm90/instructions.cuh"

// Index n of the sequence lies in stage n % STAGES. The addresses are those of the first full and the first empty
// barrier.
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
    __device__ __forceinline__ void producer_acquire_backoff(unsigned n) const {
        mbarrier_wait_backoff(empty_barrier(n), (n / STAGES & 1) ^ 1);
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

struct TileList {
    int entry[224];  // index << 8 | states of the warp groups' rows, two bits each
};
