// float32 by products of two float16 terms: the warp groups of the Hopper forward pass that multiply (sm90_forward.cu).
//
// The tiles of Q, K and V hold an element x as two numbers of float16, x = unit (high + low), high in the first half of a
// row's chunks, low in the second (fp16x2_split.cu): 23 bits and a sign, all but one of float32's. A product of two such is
// low high + high low + high high, three products at float16's rate; low low is under what float32 rounds.
//
// Tensor cores round float32 sums toward zero (Ootomo and Yokota 2022, arXiv 2203.03341), and errors of one sign do not
// average out in long sums. So the small products come first, while the sum is small; and each tile of V is multiplied into
// sums of its own, which are then added to the output on the ordinary units. That is where a unit of each tile comes free.
//
//     O           [64][HEAD_DIM_V]    output: registers, ordinary sums
//     O of a tile [64][HEAD_DIM_V]    part: registers, sums of wgmma
//     P           [64][BLOCK_K]       weights as terms: registers
//
// What is not finite, or far from 1 in a way that float32 could hold and products of units cannot, is found by its unit, a
// NaN or huge; and so is what comes out not finite. A warp does such rows again on the ordinary units.
#pragma once
#include "sm90/pipeline.cuh"

constexpr int LOW_Q = along_rows(4 * chunks(HEAD_DIM), 64), LOW_K = along_rows(4 * chunks(HEAD_DIM), BLOCK_K);
constexpr int LOW_V = chunks(HEAD_DIM_V) * BLOCK_K * CHUNK_ROW >> 4;  // from a descriptor to that of the low parts

// Weights are up to 2^14, as high in float16 as safely fits: down to 2^-28 of a row's greatest they keep all bits. What
// is kept by dropout grows.
constexpr float TOP = HAS_DROPOUT ? 7 : 14;

DEVICE void multiply_float32(const Params& p, unsigned base, int group) {
    const Pipeline<Q_BUFFERS> queries{base + AT_Q_PIPE, base + AT_Q_PIPE + 8 * Q_BUFFERS};
    const Pipeline<STAGES> keys{base + AT_K_PIPE, base + AT_K_PIPE + 8 * STAGES}, values{base + AT_V_PIPE, base + AT_V_PIPE + 8 * STAGES};
    const float scale = uniform_float(HAS_SCORE ? 1.0f : softmax_scale_log2(p));
    float output[SUMS], part[SUMS], s[BLOCK_K / 2], m[2], l[2], q_unit[2];
    unsigned high[BLOCK_K / 4], low[BLOCK_K / 4];
    WorkTile at;                // the item whose output is in registers,
    int number = -1;        // and its number among the block's

#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        keys.consumer_wait(n);
        const int tile_desc = uniform(load_word(base + AT_TILE_DESCS + 4 * (n % STAGES)));
        if (tile_desc & FIRST) {  // of another item, or END
            if (number >= 0) finish(p, work_tile_of_number(p, base, number, group), base, number, m, l, output, group);
            if (tile_desc == END) break;
            queries.consumer_wait(++number);
            at = work_tile_of_number(p, base, number, group);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int own = at.row0 + row_of_lane(half), last = (int)p.n_q * PACK_GQA - 1, index = own < last ? own : last;
                m[half] = HIDDEN, l[half] = 0;
                q_unit[half] = *row_at<const float>(p.q_scale, at.b, at.h + index % PACK_GQA, index / PACK_GQA);
            }
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) output[i] = 0;
        }
        const int state = tile_desc >> 2 * group & 3, tile = tile_desc >> 8, k0 = tile * BLOCK_K;
        if (state == EMPTY) {
            keys.consumer_release(n);
            values.consumer_wait(n);
            values.consumer_release(n);
            continue;
        }
        // scores
        {
            const unsigned long long q = descriptor(rows_at(base, number % Q_BUFFERS, group)), k = descriptor(base + at_k(n % STAGES));
            constexpr int STEPS = padded(HEAD_DIM) / 16;
            auto terms = [&](unsigned long long q, unsigned long long k, bool first) {
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    if (first && step == 0) wgmma_zero_init<0, 0>(s, q, k);
                    else product<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
                }
            };
            wgmma_fence();
            terms(q + LOW_Q, k, true), terms(q, k + LOW_K, false), terms(q, k, false);
            wgmma_commit();
        }
        const float k_unit = *row_at<const float>(p.k_scale, at.b, at.h / GQA_GROUP, tile);
        const float v_unit = *row_at<const float>(p.v_scale, at.b, at.h / GQA_GROUP, tile);
        wgmma_wait<0>();
        fence_operand(s);
        keys.consumer_release(n);
        // modify
        float unit[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unit[half] = q_unit[half] * k_unit * scale;
            if (!(unit[half] <= FAR_UNIT && v_unit <= FAR_UNIT)) l[half] = fk_special(0);  // so the row is done again
            unit[half] = fmaxf(unit[half], LEAST_UNIT);
            if (HAS_SCORE) {
#pragma unroll
                for (int i = 0; i < BLOCK_K / 4; ++i) s[i / 2 * 4 + 2 * half + i % 2] *= unit[half];
                unit[half] = LOG2E;
            }
        }
        modify_tile(p, at, state == FULL, s, k0, (float)p.softmax_scale);
        // online_softmax
        float rescale[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = HIDDEN;
#pragma unroll
            for (int i = 0; i < BLOCK_K / 4; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2]);
            top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
            top = fmaxf(m[half], fmaf(top, unit[half], -TOP));
            const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
            rescale[half] = exp2_fast(m[half] - shift);
            m[half] = top;
            l[half] = l[half] * rescale[half] + weigh(s, half, [&](float x) { return fmaf(x, unit[half], -shift); });
        }
        if constexpr (HAS_DROPOUT) drop_tile(p, at, s, k0);
#pragma unroll
        for (int i = 0; i < BLOCK_K / 4; ++i) split(s[2 * i], s[2 * i + 1], high[i], low[i]);
        // accumulate
        values.consumer_wait(n);
        {
            const unsigned long long v = descriptor(base + at_v(n % STAGES), chunk_v(n % STAGES));
            auto terms = [&](const unsigned (&weights)[BLOCK_K / 4], unsigned long long v, bool first) {
#pragma unroll
                for (int step = 0; step < BLOCK_K / 16; ++step)
                    wgmma_rs<1>(part, weights, 4 * step, v + along_columns(step), first && step == 0 ? 0 : 1);
            };
            wgmma_fence();
            terms(low, v, true), terms(high, v + LOW_V, false), terms(high, v, false);
            wgmma_commit();
        }
        if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) output[i] *= rescale[i / 2 % 2];
        }
        wgmma_wait<0>();
        fence_operand(part), fence_operand(high), fence_operand(low);
        values.consumer_release(n);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) output[i] = fmaf(part[i], v_unit, output[i]);
    }
}
