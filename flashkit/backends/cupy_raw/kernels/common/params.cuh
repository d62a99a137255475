// Constants that a kernel is compiled for, the arguments of a call, and which sequences they describe.
//
// cupy_raw/specialise.py puts the text of a kernel together:
//
//     head                  constants of the variant, listed below
//     generated/params.cuh  struct Params (cuda_common/params.py)
//     params.cuh            this file
//     scalar.cuh            conversion of stored elements, the functions that generated code calls
//     generated             modified_score, score_slope, visit_ds, visible, classify (cupy_raw/modify.py)
//     tiles.cuh             mask classification of tiles, the walk over tiles that are not EMPTY, modify()
//     dropout.cuh           Philox, drop()
//     <name>.cu             the kernels
//
// Constants of the head:
//
//     HEAD_DIM, HEAD_DIM_V      of Q and K; of V and O
//     GQA_GROUP                 query heads that share one key/value head
//     STORAGE                   dtype of the tensors: FLOAT64, FLOAT32, FLOAT16 or BFLOAT16
//     BLOCK_Q, BLOCK_K          query rows and keys of a tile
//     HAS_SCORE, HAS_MASK       whether there is a score modification, a mask
//     HAS_DROPOUT, HAS_SINKS
//     MASK_READS_ARRAYS         whether classify() reads arrays over ranges: then one call must not cover many tiles,
//                               and the position of a tile does not say how many tiles exist
//     VALUES                    64-bit entries of Params::values
//     FAST_MATH                 whether functions in a score modification may be off by some ulps
//
// Each generation adds the constants of its tiles and the offsets of its shared memory, AT_... (cuda_common/smem.py).
#pragma once

enum Storage { FLOAT64, FLOAT32, FLOAT16, BFLOAT16 };

// Kernel arguments lie in constant memory; from sm_70 on a kernel may take their address without a copy.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 700
#define KERNEL_PARAMS const __grid_constant__ Params p
#else
#define KERNEL_PARAMS const Params p
#endif

// What the mask shows of a tile: no pair, some pairs, all pairs.
enum TileState { EMPTY, PARTIAL, FULL };

#define DEVICE static __device__ __forceinline__

// Where a batch entry's tokens lie and how many there are. Unused members cost nothing: the compiler drops their loads.
struct SeqInfo {
    long long row_offset, n_q;  // first row in the tensors of queries, number of queries
    long long key_offset, n_k;  // first row in the tensors of keys, number of keys
    long long q_position;       // position of query 0 on the axis of the keys
};

// The only reader of the lengths and positions in Params, with max_n_q() and max_n_k(). Lengths in device memory are
// clamped here: the host cannot check them without a synchronization.
DEVICE SeqInfo seq_info(const Params& p, long long b) {
    const auto length = [&] {
        if (p.kv_lengths == nullptr) return p.n_k;
        const long long n = p.kv_lengths[b];
        return n < 0 ? 0 : n > p.n_k ? p.n_k : n;
    };
    return {0, p.n_q, 0, length(), p.q_offsets == nullptr ? p.q_offset : p.q_offsets[b]};
}

// The longest sequences of the batch: grids, schedules and the rows of gradients are sized by these.
DEVICE long long max_n_q(const Params& p) { return p.n_q; }
DEVICE long long max_n_k(const Params& p) { return p.n_k; }

// Row n of head h of batch entry b.
template <typename T>
DEVICE T* row_at(const Tensor& tensor, long long b, long long h, long long n) {
    return static_cast<T*>(tensor.data) + b * tensor.batch + h * tensor.head + n * tensor.token;
}
// The rows of query n and of key n of sequence b, in a tensor that has one for each query (Q, O, dO, dQ, log-sum-exp)
// or for each key (K, V, dK, dV). row_at() is for tensors of another form, such as accumulators.
DEVICE long long q_token(const Params& p, long long b, long long n) { return seq_info(p, b).row_offset + n; }
DEVICE long long kv_token(const Params& p, long long b, long long n) { return seq_info(p, b).key_offset + n; }
template <typename T>
DEVICE T* q_row(const Params& p, const Tensor& tensor, long long b, long long h, long long n) {
    return row_at<T>(tensor, b, h, q_token(p, b, n));
}
template <typename T>
DEVICE T* kv_row(const Params& p, const Tensor& tensor, long long b, long long h, long long n) {
    return row_at<T>(tensor, b, h, kv_token(p, b, n));
}
