// What a score modification adds to scores where it depends on nothing but the distance q - k, the batch entry and the
// head: computed once for each of these (distances.cu), which kernels read for each pair; and sums of dS, likewise.
#pragma once

constexpr int DISTANCE_ROOM = 256;  // pairs of a tile may be so far outside of a sequence

// Element [row - key] of a sequence. before: rows and keys of all packed sequences before it.
DEVICE float* distances(const Tensor& tensor, long long b, long long h, long long before, long long n_k) {
    return row_at<float>(tensor, b, h, IS_PACKED ? before + 2 * DISTANCE_ROOM * b : 0) + n_k + DISTANCE_ROOM;
}

// Where the pairs of a tile of STRAIGHT rows and keys read the same elements, with derivatives linear in the distance,
// two numbers stand for them: the sum of dS, and its moment, the sum of dS times the distance from the first pair,
// which become dS of pairs with the first pair's distance and with one MOMENT_AT greater. So each such tile has a word
// before the sums of all heads, which is 1; else 0. at: the sum of the first pair's distance.
constexpr int STRAIGHT = 64, MOMENT_AT = STRAIGHT / 2;
DEVICE float* is_straight(const Tensor& sums, const float* at) {
    float* first = static_cast<float*>(sums.data);
    return first - 1 - (at - first) / STRAIGHT;
}
