// How an item of the Hopper forward pass ends, and what is done where weights of 0 met what is not finite.
#pragma once
#include "sm90/pipeline.cuh"

// Output of a warp's 16 rows once more, from memory and pair by pair, leaving out the values of weights that are 0. No
// branch here differs between lanes, or the compiler would take nothing after it as uniform. lse: in base 2.
DEVICE void accumulate_nonfinite(const Params& p, const WorkTile& at, const float (&lse)[2], unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = opaque(threadIdx.x % 32), row0 = opaque(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)keys_of(p, at.b)), last = (int)p.n_q * PACK_GQA - 1;
    const long long offset = offset_of(p, at.b);
    // Weights are at most 1 so: those of the tiles may be far above, and with great values have been what was not finite.
    const float exact[2] = {lse[0] == HIDDEN ? -HIDDEN : lse[0], lse[1] == HIDDEN ? -HIDDEN : lse[1]};
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        const int index = at.row0 + row0 + r < last ? at.row0 + row0 + r : last, row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        const float reference = __shfl_sync(~0u, r < 8 ? exact[0] : exact[1], r % 8 * 4);
        const storage* q = row_at<const storage>(p.q, at.b, h, row);
        float sums[OWN] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) {
            const int k = k0 + lane < n_k ? k0 + lane : n_k - 1;
            const storage* key = row_at<const storage>(p.k, at.b, h / GQA_GROUP, k);
            float w = 0;
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) w += widen(q[d]) * widen(key[d]);
            w = modify<true>(w * (float)p.softmax_scale, at.b, h, row, row + offset, k, p);
            w = exp2_fast(fmaf(w, LOG2E, -reference));
            if constexpr (HAS_DROPOUT) w = drop(w, p, at.b, h, row, k);
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const int from = k0 + other < n_k ? k0 + other : n_k - 1;
                const float weight = k0 + other < n_k ? __shfl_sync(~0u, w, other) : 0.0f;
                const storage* value = row_at<const storage>(p.v, at.b, h / GQA_GROUP, from);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float x = widen(value[lane + 32 * i < HEAD_DIM_V ? lane + 32 * i : 0]);
                    sums[i] += weight == 0 ? 0.0f : weight * x;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int column = lane + 32 * i;
            const unsigned target = staged + column / 64 * 64 * CHUNK_ROW + swizzled(row0 + r, column % 64 / 8) + column % 8 * 2;
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"((unsigned short)pack(sums[i], 0.0f)) : "memory");
        }
    }
}

// The output of a warp's 16 rows from memory, on the ordinary units, pair by pair, leaving out the values of weights that
// are 0: whatever the numbers are.
DEVICE void rows_nonfinite(const Params& p, const WorkTile& at, unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = opaque(threadIdx.x % 32), row0 = opaque(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)keys_of(p, at.b)), last = (int)p.n_q * PACK_GQA - 1;
    const long long offset = offset_of(p, at.b);
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        const int index = at.row0 + row0 + r < last ? at.row0 + row0 + r : last, row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        const storage* q = row_at<const storage>(p.q, at.b, h, row);
        auto score = [&](int k) {  // in base 2
            const storage* key = row_at<const storage>(p.k, at.b, h / GQA_GROUP, k < n_k ? k : n_k - 1);
            float s = 0;
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) s = fmaf(widen(q[d]), widen(key[d]), s);
            return k < n_k ? modify<true>(s * (float)p.softmax_scale, at.b, h, row, row + offset, k, p) * LOG2E : HIDDEN;
        };
        float top = HIDDEN, sum = 0;
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) top = fmaxf(top, score(k0 + lane));
#pragma unroll
        for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
        if (HAS_SINKS) top = fmaxf(top, static_cast<const float*>(p.sinks)[h] * LOG2E);
        const float shift = top == HIDDEN ? 0.0f : top;
        float sums[OWN] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) {
            float w = exp2_fast(score(k0 + lane) - shift);
            sum += w;
            if constexpr (HAS_DROPOUT) w = drop(w, p, at.b, h, row, k0 + lane);
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const float weight = __shfl_sync(~0u, w, other);  // 0 past the last key
                const storage* value = row_at<const storage>(p.v, at.b, h / GQA_GROUP, k0 + other < n_k ? k0 + other : n_k - 1);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float x = widen(value[lane + 32 * i < HEAD_DIM_V ? lane + 32 * i : 0]);
                    sums[i] += weight == 0 ? 0.0f : weight * x;
                }
            }
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        if (HAS_SINKS) sum += exp2_fast(static_cast<const float*>(p.sinks)[h] * LOG2E - shift);
        const bool empty = sum == 0;
        if (lane == 0 && at.row0 + row0 + r <= last)
            *row_at<float>(p.lse, at.b, h, row) = empty ? HIDDEN : fmaf(shift, LN2, logf(sum));
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            store_float(staged + i * 64 * CHUNK_ROW + swizzled(row0 + r, lane / 4) + lane % 4 * 4, empty ? 0.0f : sums[i] / sum);
    }
}

// Divide by the sums of an item, the block's number `number`; log-sum-exp to memory, output to shared memory. Sums that are
// not finite say that the row's terms of float32 are not what they stand for.
DEVICE void finish(const Params& p, const WorkTile& at, unsigned base, int number, const float (&m)[2], const float (&l)[2],
                   float (&output)[SUMS], int group) {
    const unsigned staged = rows_at(base, number % Q_BUFFERS, group);
    float factor[2], lse[2];  // lse: in base 2
    bool odd = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        // Where ROW_SUM_BY_MMA each lane of a row has its whole sum.
        float top = m[half], sum = ROW_SUM_BY_MMA ? output[COLUMNS / 2 + 2 * half] : across_lanes(l[half], [](float x, float y) { return x + y; });
        factor[half] = 1;
        const bool exists = index < (int)p.n_q * PACK_GQA;
        if (HAS_SINKS && exists) {  // one more logit in the sum, without a value
            const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E;
            if (sink != HIDDEN) {
                top = fmaxf(top, sink);
                factor[half] = exp2_fast(m[half] - top);
                sum = sum * factor[half] + exp2_fast(sink - top);
            }
        }
        const bool empty = sum == 0;  // no key is visible
        factor[half] = empty ? 0.0f : EXACT ? factor[half] / sum : factor[half] * reciprocal(sum);
        lse[half] = empty ? HIDDEN : top + log2_fast(sum);
        if (IS_FLOAT32 && exists && threadIdx.x % 4 == 0)  // at once, for rows that are done again write their own
            *row_at<float>(p.lse, at.b, h, row) = !empty && EXACT ? fmaf(top, LN2, logf(sum)) : LN2 * lse[half];
        float zero = IS_FLOAT32 ? 0 * sum : 0;  // NaN if an element is not finite
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = output[4 * n + 2 * half + c];
                if (IS_FLOAT32) x *= factor[half];
                if (IS_FLOAT32 || MAY_HIDE) zero = fmaf(x, 0.0f, zero);
                if (!IS_FLOAT32) x *= factor[half];
            }
        odd |= zero != 0 && (IS_FLOAT32 || is_finite(sum)) && exists;
    }
    named_barrier_sync(MEETING + group, 128);  // all are done with Q
    const int lane = opaque(threadIdx.x % 32), row = opaque(threadIdx.x % 128 / 32) * 16;
    if constexpr (IS_FLOAT32) {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int own = row + 8 * half + lane / 4, unit = n % 4 * 2 + lane % 4 / 2;
                store_floats(staged + n / 4 * 64 * CHUNK_ROW + swizzled(own, unit) + lane % 2 * 8, output[4 * n + 2 * half],
                             output[4 * n + 2 * half + 1]);
            }
    } else {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            const float* x = output + 4 * n;
            stmatrix_x4<false>(staged + n / 8 * 64 * CHUNK_ROW + swizzled(row + lane % 16, n % 8 + lane / 16), pack(x[0], x[1]),
                                  pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
        }
    }
    // A value that is not finite may have met a weight of 0.
    if ((IS_FLOAT32 || MAY_HIDE) && __any_sync(~0u, odd)) {
        __syncwarp();
        if constexpr (IS_FLOAT32) rows_nonfinite(p, at, staged);
        else accumulate_nonfinite(p, at, lse, staged);
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_once(done_at(base, number % Q_BUFFERS, group));
    // After the fence, which would wait for it; and without a branch, or the compiler would make products wait for each other.
#pragma unroll
    for (int half = 0; !IS_FLOAT32 && half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half), writes = index < (int)p.n_q * PACK_GQA && threadIdx.x % 4 == 0;
        store_if(writes, row_at<float>(p.lse, at.b, at.h + index % PACK_GQA, index / PACK_GQA), LN2 * lse[half]);
    }
}
