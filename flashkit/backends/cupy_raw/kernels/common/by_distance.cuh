// What a score modification adds to scores where it depends on nothing but the distance q - k, the batch entry and the
// head: computed once for each of these (by_distance.cu), which kernels read for each pair; and sums of dS, likewise.
#pragma once

constexpr int DISTANCE_ROOM = 256;  // pairs of a tile may be so far outside of a sequence

// Element [row - key] of a sequence. before: rows and keys of all packed sequences before it.
DEVICE float* by_distance(const Tensor& tensor, long long b, long long h, long long before, long long n_k) {
    return row_at<float>(tensor, b, h, IS_PACKED ? before + 2 * DISTANCE_ROOM * b : 0) + n_k + DISTANCE_ROOM;
}
