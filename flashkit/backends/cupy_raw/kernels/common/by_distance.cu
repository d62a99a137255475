// The kernels before and behind those that read by_distance and add to ds_by_distance. A CTA has a head of a batch
// entry, or of all where these share the distances.
#include "common/by_distance.cuh"

// The distance q - k of a pair that exists, if need be another one than that of row - key.
DEVICE long long distance_of(const SeqInfo& seq, long long row_minus_key) {
    const long long first = 1 - seq.n_k, last = seq.n_q - 1, i = row_minus_key < first ? first : row_minus_key;
    return (i < last ? i : last) + seq.q_position;
}

extern "C" __global__ void fill_by_distance(KERNEL_PARAMS) {
    const long long b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
    const SeqInfo seq = seq_info(p, b);
    const bool exist = seq.n_q > 0 && seq.n_k > 0;
    const long long before = seq.row_offset + seq.key_offset, n_k = IS_PACKED ? seq.n_k : p.n_k;
    float* added = by_distance(p.by_distance, b, h, before, n_k);
    float* sums = by_distance(p.ds_by_distance, b, h, before, n_k);
    for (long long i = threadIdx.x - n_k - DISTANCE_ROOM; i < seq.n_q + DISTANCE_ROOM; i += blockDim.x) {
        const long long distance = distance_of(seq, i);
        if (BY_DISTANCE) added[i] = exist ? modified_score<long long>(0, b, h, 0, distance, 0, distance, p) : 0;
        if (HAS_SUMS) sums[i] = 0;
    }
}

// A thread has distances that follow one another, as these often read the same value.
extern "C" __global__ void add_by_distance(KERNEL_PARAMS) {
    const long long b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
    const SeqInfo seq = seq_info(p, b);
    const long long n_k = IS_PACKED ? seq.n_k : p.n_k;
    const float* ds = by_distance(p.ds_by_distance, b, h, seq.row_offset + seq.key_offset, n_k);
    ValueSums sums;
    sums.enter(b, h, p);
    const long long all = seq.n_q + n_k + 2 * DISTANCE_ROOM, each = (all + blockDim.x - 1) / blockDim.x;
    const long long from = threadIdx.x * each, to = from + each < all ? from + each : all;
    for (long long i = from - n_k - DISTANCE_ROOM; i < to - n_k - DISTANCE_ROOM; ++i)
        if (ds[i] != 0) sums.add<long long>(ds[i], 0, b, h, 0, distance_of(seq, i), 0, p);
    sums.leave(p);
}
