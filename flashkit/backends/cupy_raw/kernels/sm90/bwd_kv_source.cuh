// Where K and V of a work tile come from: dense tensors, by TMA.
#pragma once
#include "sm90/bwd_nonfinite.cuh"
#include "sm90/bwd_tile_scheduler.cuh"

// K of the CTA's keys, in the buffer of work tile `number`. Keys that are to be cleared arrive at a barrier of their
// own first.
struct KSource {
    const Params& p;
    const TensorMap& map;
    unsigned base;

    __device__ __forceinline__ unsigned tile(unsigned number) const {
        return base + AT_K + k_pipe(base).stage(number) * BYTES_K;
    }
    __device__ __forceinline__ unsigned full_barrier(unsigned number) const {
        return k_pipe(base).full + 8 * k_pipe(base).stage(number);
    }
    __device__ __forceinline__ unsigned loaded_barrier(unsigned number) const {
        return CLEARS_KEYS ? base + AT_K_LOADED + 8 * k_pipe(base).stage(number) : full_barrier(number);
    }
    __device__ __forceinline__ void load(const WorkTile& at, unsigned number) const {
        if (elect_one()) {
            mbarrier_arrive_expect_tx(loaded_barrier(number), BYTES_K);
            load_tile<1, CHUNKS, CTA_KEYS>(tile(number), map, first_cta_key(at), at.head, at.b, loaded_barrier(number));
        }
    }
    __device__ __forceinline__ void clear_nonfinite(const WorkTile& at, unsigned number, bool leader) const {
        mbarrier_wait(loaded_barrier(number), number / KEY_BUFFERS & 1);
        clear_nonfinite_keys<CHUNKS>(tile(number), (int)keys_of(p, at.b) - first_cta_key(at),
                                     nonfinite_keys_slot(base, number));
        if (leader) mbarrier_arrive(full_barrier(number));
    }

    // K of the peer CTA's keys, in the columns of dQ that this CTA computes.
    __device__ __forceinline__ void load_peer(const WorkTile& at, unsigned number, bool leader) const {
        const auto pipe = peer_k_pipe(base);
        const unsigned loaded = CLEARS_KEYS ? base + AT_PEER_K_LOADED : pipe.full;
        const int rank = cta_rank(), from = at.k0 + CTA_KEYS * (1 - rank);
        pipe.producer_acquire(number);
        if (elect_one()) {
            mbarrier_arrive_expect_tx(loaded, BYTES_PEER_K);
            load_tile<1, DQ_CHUNKS, CTA_KEYS>(base + AT_PEER_K, map, from, at.head, at.b, loaded,
                                              64 * DQ_CHUNKS * rank);
        }
        if constexpr (CLEARS_KEYS) {
            mbarrier_wait(loaded, number & 1);
            clear_nonfinite_keys<DQ_CHUNKS>(base + AT_PEER_K, (int)keys_of(p, at.b) - from, 0);
            if (leader) mbarrier_arrive(pipe.full);
        }
    }
};

// V of the CTA's keys, by one thread. Nothing is cleared: compute_ds drops what masked keys give.
DEVICE void load_v(const TensorMap& map, unsigned base, const WorkTile& at, unsigned number) {
    const auto pipe = v_pipe(base);
    pipe.producer_acquire(number);
    mbarrier_arrive_expect_tx(pipe.full, BYTES_V);
    load_tile<1, CHUNKS_V, CTA_KEYS>(base + AT_V, map, first_cta_key(at), at.head, at.b, pipe.full);
}
