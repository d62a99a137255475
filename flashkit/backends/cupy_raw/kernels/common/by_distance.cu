// The kernels before and behind those that read by_distance and add to ds_by_distance. A CTA has a head of a batch
// entry, or of all where these share the distances.
#include "common/by_distance.cuh"

constexpr int THREADS = 1024;

// use(row - key, distance q - k of a pair that exists) of each element, by the threads of the CTA in turn.
template <typename F>
DEVICE void each_distance(const SeqInfo& seq, long long n_k, F use) {
    for (long long i = threadIdx.x - n_k - DISTANCE_ROOM; i < seq.n_q + DISTANCE_ROOM; i += THREADS) {
        const long long least = i > -seq.n_k ? i : 1 - seq.n_k, last = seq.n_q - 1;
        use(i, (least < last ? least : last) + seq.q_position);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fill_by_distance(KERNEL_PARAMS) {
    const long long b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
    const SeqInfo seq = seq_info(p, b);
    const bool exist = seq.n_q > 0 && seq.n_k > 0;
    const long long before = seq.row_offset + seq.key_offset, n_k = IS_PACKED ? seq.n_k : p.n_k;
    float* added = by_distance(p.by_distance, b, h, before, n_k);
    float* sums = by_distance(p.ds_by_distance, b, h, before, n_k);
    each_distance(seq, n_k, [&](long long i, long long distance) {
        if (BY_DISTANCE) added[i] = exist ? modified_score<long long>(0, b, h, 0, distance, 0, distance, p) : 0;
        if (HAS_SUMS) sums[i] = 0;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) add_by_distance(KERNEL_PARAMS) {
    const long long b = blockIdx.x / p.heads, h = blockIdx.x % p.heads;
    const SeqInfo seq = seq_info(p, b);
    const long long n_k = IS_PACKED ? seq.n_k : p.n_k;
    const float* ds = by_distance(p.ds_by_distance, b, h, seq.row_offset + seq.key_offset, n_k);
    ValueSums sums;
    sums.enter(b, h, p);
    each_distance(seq, n_k, [&](long long i, long long distance) {
        if (ds[i] != 0) sums.add<long long>(ds[i], 0, b, h, 0, distance, 0, p);
    });
    sums.leave(p);
}
