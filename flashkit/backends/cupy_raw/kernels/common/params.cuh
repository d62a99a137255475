// Constants that a kernel is compiled for, the arguments of a call, and which sequences they describe.
//
// cupy_raw/specialise.py puts the text of a kernel together:
//
//     head                  constants of the variant, listed below
//     generated/params.cuh  struct Params (cuda_common/params.py)
//     params.cuh            this file
//     scalar.cuh            conversion of stored elements, the functions that generated code calls
//     generated             modified_score, score_slope, visible, classify (cupy_raw/modify.py)
//     tiles.cuh             mask classification of tiles, the walk over tiles that are not EMPTY, modify(), drop()
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
//     HAS_LENGTHS               whether the batch entries or the sequences have as many keys as an array says
//     MASK_READS_ARRAYS         whether classify() reads arrays over ranges: then one call must not cover many tiles,
//                               and the position of a tile does not say how many tiles exist
//     IS_PACKED                 whether sequences of any length follow each other in one axis of tokens
//     IS_PAGED                  whether keys and values lie in pages that a table names
//     VALUES                    64-bit entries of Params::values
//     FAST_MATH                 whether functions in a score modification may be off by some ulps
//
// Each generation adds the constants of its tiles and the offsets of its shared memory, AT_... (cuda_common/memory.py).
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

// A loop over i = 0 ... n - 1 that is unrolled: elements of arrays in registers have constant indices.
#define UNROLL(i, n) _Pragma("unroll") for (int i = 0; i < (n); ++i)

// Whether the kernels of a fallback that is launched in any case have nothing to compute (Params::fallback).
DEVICE bool is_skipped(const int* fallback) { return fallback != nullptr && *fallback == 0; }

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
        if constexpr (!HAS_LENGTHS) return p.n_k;
        const long long n = p.kv_lengths[b];
        return n < 0 ? 0 : n > p.n_k ? p.n_k : n;
    };
    const long long q_position = p.q_offsets == nullptr ? p.q_offset : p.q_offsets[b];
    if constexpr (IS_PACKED) {
        const long long rows = p.cu_seqlens_q[b + 1] - p.cu_seqlens_q[b];
        return {p.cu_seqlens_q[b], rows < 0 ? 0 : rows, IS_PAGED ? 0 : p.cu_seqlens_k[b], length(), q_position};
    }
    return {0, p.n_q, 0, length(), q_position};
}

// The longest sequences of the batch: grids, schedules and the rows of gradients are sized by these.
DEVICE long long max_n_q(const Params& p) { return p.n_q; }
DEVICE long long max_n_k(const Params& p) { return p.n_k; }

// A tile of a sequence. Packed sequences begin at any token: the tiles of sequence b have numbers from start / block +
// b on, where start is its first token. That leaves room for the tiles of all sequences before it, and needs no sum
// over them; at most one number for each sequence stands for no tile (is past the sequence's end).
struct SeqTile { long long b, tile; };
DEVICE long long first_tile(const long long* cu_seqlens, long long b, long long block) {
    return cu_seqlens[b] / block + b;
}
DEVICE SeqTile packed_tile(const long long* cu_seqlens, long long batch, long long number, long long block) {
    long long low = 0, high = batch;
    while (high - low > 1) {
        const long long middle = (low + high) / 2;
        (first_tile(cu_seqlens, middle, block) <= number ? low : high) = middle;
    }
    return {low, number - first_tile(cu_seqlens, low, block)};
}
// Batch entries, and tiles of a head of one of them, that grids and schedules count, and the tile that a number stands
// for.
DEVICE long long num_entries(const Params& p) { return IS_PACKED ? 1 : p.batch; }
DEVICE long long num_q_tiles(const Params& p, int block) {
    return IS_PACKED ? p.n_q / block + p.batch : (p.n_q + block - 1) / block;
}
DEVICE long long num_k_tiles(const Params& p, int block) {
    return IS_PACKED ? p.n_k / block + p.batch : (p.n_k + block - 1) / block;
}
DEVICE SeqTile q_tile(const Params& p, long long entry, long long number, int block) {
    if constexpr (IS_PACKED) return packed_tile(p.cu_seqlens_q, p.batch, number, block);
    return {entry, number};
}
DEVICE SeqTile k_tile(const Params& p, long long entry, long long number, int block) {
    if constexpr (IS_PACKED) return packed_tile(p.cu_seqlens_k, p.batch, number, block);
    return {entry, number};
}
// The number of a query tile, where accumulators of query tiles are.
DEVICE long long q_tile_number(const Params& p, long long b, long long tile, int block) {
    return IS_PACKED ? first_tile(p.cu_seqlens_q, b, block) + tile : tile;
}
// The row of bwd_lse and delta for row n of a sequence.
DEVICE long long stats_row(const Params& p, long long b, long long n) {
    return IS_PACKED ? first_tile(p.cu_seqlens_q, b, p.row_block) * p.row_block + n : n;
}
// Keys of which the backward pass writes dK and dV. Those past kv_lengths get 0; packed, they are another sequence's.
DEVICE long long stored_n_k(const Params& p, long long b) { return IS_PACKED ? seq_info(p, b).n_k : p.n_k; }

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
// What the table says of keys at * page ... of sequence b, and the page that is: for one that does not exist the first
// or the last one.
DEVICE long long table_entry(const Params& p, long long b, unsigned at) {
    return p.page_table[b * p.table_width + at];
}
DEVICE long long existing_page(const Params& p, long long entry) {
    return entry < 0 ? 0 : entry < p.pages ? entry : p.pages - 1;
}
// The entry of the page table for key n. There are less than 2^31 keys.
DEVICE unsigned page_number(const Params& p, unsigned n) { return n / (unsigned)p.page; }
template <typename T>
DEVICE T* kv_row(const Params& p, const Tensor& tensor, long long b, long long h, long long n) {
    if constexpr (IS_PAGED) {
        const unsigned at = page_number(p, (unsigned)n);
        return row_at<T>(tensor, existing_page(p, table_entry(p, b, at)), h, (unsigned)n - at * p.page);
    }
    return row_at<T>(tensor, b, h, kv_token(p, b, n));
}
