// dS in registers.
#pragma once
#include "sm80/bwd_softmax.cuh"

// dP to dS = P (dP - delta), which goes to shared memory for the products of dQ and dK.
DEVICE void compute_ds(const Params& p, const WorkTile& at, const float (&s)[S_TILES][S_KEYS][4],
                      float (&dp)[S_TILES][S_KEYS][4], const float (&delta)[S_TILES][2], int row0, unsigned target) {
#pragma unroll
    for (int i = 0; i < S_TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < S_KEYS; ++n) {
                if constexpr (HAS_DROPOUT)
                    drop_pair(dp[i][n][2 * half], dp[i][n][2 * half + 1], p, at.b, at.h, row0 + at.row(i, half),
                              at.k0 + at.key(n));
                float d[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    d[c] = s[i][n][2 * half + c] * (dp[i][n][2 * half + c] - delta[i][half]);
                    const int row = row0 + at.row(i, half), key = at.k0 + at.key(n) + c;
                    visit_ds(d[c], at.b, at.h, row, row + at.q_position, key, p);
                }
                store_fragment(target, at.row(i, half), at.key(n), d[0], d[1]);
            }
}
