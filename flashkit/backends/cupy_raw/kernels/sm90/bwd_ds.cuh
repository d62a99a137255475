// dP to dS.
#pragma once
#include "sm90/bwd_dropout.cuh"
#include "sm90/tf32_scales.cuh"

// Deltas of a lane's rows. Shared memory answers late while wgmma reads it, so the first ones are loaded before they
// are needed where registers allow.
constexpr int EARLY_DELTAS = !HAS_SCORE && PADDED_DIM <= 64 ? 2 : 0;
struct RowDeltas {
    unsigned address;
    float early[larger(EARLY_DELTAS, 1)][2];

    __device__ __forceinline__ explicit RowDeltas(unsigned address) : address(address) {
#pragma unroll
        for (int i = 0; i < EARLY_DELTAS; ++i) load_row_stats(early[i], address, i);
    }
    __device__ __forceinline__ void get(float (&x)[2], int n) const {
        if (n < EARLY_DELTAS)
            x[0] = early[n % larger(EARLY_DELTAS, 1)][0], x[1] = early[n % larger(EARLY_DELTAS, 1)][1];
        else load_row_stats(x, address, n);
    }
};

// Element 4 n + 2 half + c of a lane to visit_ds. Where it lies is found only if the hook is used.
DEVICE void visit_element(float ds, const FragmentId& id, int n, int half, int c, const Params& p) {
    if constexpr (VISITS_DS) {
        const FragmentCoord at = coord_of(p, id);
        const int row = at.row0 + lane_row(n, c);
        visit_ds(ds, at.b, at.h, row, row + seq_info(p, at.b).q_position, at.k0 + lane_key(half), p);
    }
}

// dS = P * slope * (dP - delta), rounded. p_slope: P times the slope of the score modification (softmax_p). UNMASKED:
// every pair is visible; else pairs whose P is 0 get a dS of 0, whatever dP is.
template <bool UNMASKED>
DEVICE void compute_ds(const Params& p, const float (&p_slope)[S_REGS], float (&dp)[S_REGS], unsigned (&ds)[S_REGS / 2],
                       const RowDeltas& deltas, const DropoutMask& dropout, const FragmentId& id) {
#pragma unroll
    for (int n = 0; n < S_REGS / 4; ++n) {
        float delta[2];
        deltas.get(delta, n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float x[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int i = 4 * n + 2 * half + c;
                if (HAS_DROPOUT) dp[i] = dropout.kept(n, half, c) ? dp[i] * (float)p.dropout_scale : 0.0f;
                x[c] = p_slope[i] * minus_delta(dp[i], delta[c]);
                if (!UNMASKED && p_slope[i] == 0) x[c] = 0;
                visit_element(x[c], id, n, half, c, p);
            }
            ds[2 * n + half] = pack(x[0], x[1]);
        }
    }
}
