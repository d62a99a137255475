// Where K and V of a work tile come from: dense tensors, by TMA.
#pragma once
#include "sm90/bwd_nonfinite.cuh"
#include "sm90/bwd_tile_scheduler.cuh"

// The scheduler warp loads K, the producer warp V. Keys that are to be cleared arrive at a barrier of their own first.
struct KvSource {
    const Params& p;
    const TensorMap &k_map, &v_map;
    unsigned base;

    __device__ __forceinline__ unsigned k_tile(unsigned number) const {
        return base + AT_K + k_pipe(base).stage(number) * BYTES_K;
    }
    __device__ __forceinline__ unsigned k_full(unsigned number) const {
        return k_pipe(base).full + 8 * k_pipe(base).stage(number);
    }
    __device__ __forceinline__ unsigned k_loaded(unsigned number) const {
        return CLEARS_KEYS ? base + AT_K_LOADED + 8 * k_pipe(base).stage(number) : k_full(number);
    }
    // K of the CTA's keys, in the buffer of work tile `number`.
    __device__ __forceinline__ void load_k(const WorkTile& at, unsigned number) const {
        if (elect_one()) {
            mbarrier_arrive_expect_tx(k_loaded(number), BYTES_K);
            load_tile<1, CHUNKS, CTA_KEYS>(k_tile(number), k_map, kv_box(p, at.b, at.head, first_cta_key(at)),
                                           k_loaded(number));
        }
    }
    __device__ __forceinline__ void clear_nonfinite_k(const WorkTile& at, unsigned number, bool leader) const {
        mbarrier_wait(k_loaded(number), number / KEY_BUFFERS & 1);
        clear_nonfinite_keys<CHUNKS>(k_tile(number), (int)seq_info(p, at.b).n_k - first_cta_key(at),
                                     nonfinite_keys_slot(base, number));
        if (leader) mbarrier_arrive(k_full(number));
    }

    // K of the peer CTA's keys, in the columns of dQ that this CTA computes.
    __device__ __forceinline__ void load_peer_k(const WorkTile& at, unsigned number, bool leader) const {
        const auto pipe = peer_k_pipe(base);
        const unsigned loaded = CLEARS_KEYS ? base + AT_PEER_K_LOADED : pipe.full;
        const int rank = cta_rank(), from = at.k0 + CTA_KEYS * (1 - rank);
        pipe.producer_acquire(number);
        if (elect_one()) {
            mbarrier_arrive_expect_tx(loaded, BYTES_PEER_K);
            load_tile<1, DQ_CHUNKS, CTA_KEYS>(base + AT_PEER_K, k_map, kv_box(p, at.b, at.head, from), loaded,
                                              64 * DQ_CHUNKS * rank);
        }
        if constexpr (CLEARS_KEYS) {
            mbarrier_wait(loaded, number & 1);
            clear_nonfinite_keys<DQ_CHUNKS>(base + AT_PEER_K, (int)seq_info(p, at.b).n_k - from, 0);
            if (leader) mbarrier_arrive(pipe.full);
        }
    }

    // V of the CTA's keys, by one thread; h: a query head. Nothing is cleared: compute_ds drops what masked keys give.
    __device__ __forceinline__ void load_v(int b, int h, int k0, unsigned number) const {
        const auto pipe = v_pipe(base);
        pipe.producer_acquire(number);
        mbarrier_arrive_expect_tx(pipe.full, BYTES_V);
        load_tile<1, CHUNKS_V, CTA_KEYS>(base + AT_V, v_map, kv_box(p, b, h / GQA_GROUP, first_cta_key({b, h, k0})),
                                         pipe.full);
    }
};
