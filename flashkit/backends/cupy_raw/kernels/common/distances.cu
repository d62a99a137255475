// Kernels before and behind those that read distance_bias and add to distance_sums. A CTA has one of `parts` parts
// of a head's distances, in a batch entry, or in all where these share the distances.
#include "common/distances.cuh"

struct Share { long long b, h, part, parts; };
DEVICE Share share_of_cta(const Params& p) {
    const long long heads = p.heads * (OF_ENTRIES || p.q_offsets != nullptr ? p.batch : 1), head = blockIdx.x % heads;
    return {head / p.heads, head % p.heads, blockIdx.x / heads, gridDim.x / heads};
}

// The distance q - k of a pair that exists, if need be another one than that of row - key.
DEVICE long long distance_of(const SeqInfo& seq, long long row_minus_key) {
    const long long first = 1 - seq.n_k, last = seq.n_q - 1, i = row_minus_key < first ? first : row_minus_key;
    return (i < last ? i : last) + seq.q_position;
}

// What the pairs of the CTA's distances read, one read at a time, and which tiles that begin at these are not straight.
struct SharedTerms {
    long long at[FILL_THREADS];
    fk_float slope[FILL_THREADS];
    int bends[FILL_THREADS / STRAIGHT];
};

// Whether the pairs of a tile's sum and moment, at `tile` and MOMENT_AT behind it, stand for one that reads element
// `at` with a derivative `slope`.
DEVICE bool stand_for(const SharedTerms& terms, int tile, long long at, fk_float slope) {
    const fk_float first = terms.slope[tile], second = terms.slope[tile + MOMENT_AT];
    const fk_float expected = first + (second - first) * (fk_float)((int)threadIdx.x - tile) / MOMENT_AT;
    const fk_float size = fmax(fmax(fabs(first), fabs(second)), fabs(slope));
    return terms.at[tile] == at && terms.at[tile + MOMENT_AT] == at && fabs(slope - expected) <= size * (fk_float)1e-6;
}

extern "C" __global__ void fill_distances(KERNEL_PARAMS) {
    constexpr int STEP = FILL_THREADS - STRAIGHT;
    const auto [b, h, part, parts] = share_of_cta(p);
    const SeqInfo seq = seq_info(p, b);
    const bool exist = seq.n_q > 0 && seq.n_k > 0;
    const long long before = seq.row_offset + seq.key_offset, n_k = IS_PACKED ? seq.n_k : p.n_k;
    const long long least = -n_k - DISTANCE_ROOM, end = seq.n_q + DISTANCE_ROOM;
    float* added = distances(p.distance_bias, b, h, before, n_k);
    float* sums = distances(p.distance_sums, b, h, before, n_k);
    // From a multiple of STRAIGHT on; the pairs of a tile have distances on both sides of its first one.
    for (long long first = (least / STRAIGHT - 1) * STRAIGHT + part * STEP; first < end; first += parts * STEP) {
        const long long i = first + threadIdx.x, distance = distance_of(seq, i);
        const bool inside = i >= least && i < end;
        if (HAS_DISTANCE_BIAS && inside)
            added[i] = exist ? modified_score<long long>(0, b, h, 0, distance, 0, distance, p) : 0;
        if constexpr (!HAS_SUMS) continue;
        __shared__ SharedTerms terms;
        const int tile = threadIdx.x / STRAIGHT;
        if (inside) sums[i] = 0;
        __syncthreads();
        if (threadIdx.x % STRAIGHT == 0) terms.bends[tile] = !exist;
        UNROLL(read, ValueSums::READS) {
            long long at = 0;
            fk_float slope = 0;
            if (exist) ValueSums::term<long long>(read, at, slope, 0, b, h, 0, distance, 0, p);
            terms.at[threadIdx.x] = at, terms.slope[threadIdx.x] = slope;
            __syncthreads();
            for (int t = tile; t <= tile + 1; ++t)
                if (t < FILL_THREADS / STRAIGHT && (int)threadIdx.x > (t - 1) * STRAIGHT &&
                    !stand_for(terms, t * STRAIGHT, at, slope))
                    terms.bends[t] = 1;
            __syncthreads();
        }
        if (inside && threadIdx.x % STRAIGHT == 0 && tile > 0)
            *is_straight(p.distance_sums, sums + i) = terms.bends[tile] ? 0.0f : 1.0f;
    }
}

// A thread has distances that follow one another, as these often read the same value.
extern "C" __global__ void add_distance_sums(KERNEL_PARAMS) {
    const auto [b, h, part, parts] = share_of_cta(p);
    const SeqInfo seq = seq_info(p, b);
    const long long n_k = IS_PACKED ? seq.n_k : p.n_k;
    const float* ds = distances(p.distance_sums, b, h, seq.row_offset + seq.key_offset, n_k);
    ValueSums sums;
    sums.enter(b, h, p);
    const long long all = seq.n_q + n_k + 2 * DISTANCE_ROOM, threads = parts * blockDim.x;
    const long long each = (all + threads - 1) / threads;
    const long long from = (part * blockDim.x + threadIdx.x) * each, to = from + each < all ? from + each : all;
    for (long long i = from - n_k - DISTANCE_ROOM; i < to - n_k - DISTANCE_ROOM; ++i)
        if (ds[i] != 0) sums.add<long long>(ds[i], 0, b, h, 0, distance_of(seq, i), 0, p);
    sums.leave(p);
}
