// The forward epilogue: consumers normalise O and write it to shared memory, the store warp sends it to global memory.
#pragma once
#include "sm90/softmax.cuh"

// --- the non-finite fallback -----------------------------------------------------------------------------------------
//
// O of a warp's 16 rows to its warp group's rows in shared memory, `staged`, or FP8: to global memory. HAS_SCALES: also
// their log-sum-exps.
DEVICE void rows_nonfinite(const Params& p, const WorkTile& at, unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = opaque(threadIdx.x % 32), row0 = opaque(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)seq_info(p, at.b).n_k), rows = (int)seq_info(p, at.b).n_q * PACK_GQA;
#pragma unroll 1
    for (int n = 0; n < 16; ++n) {  // counting r itself, ptxas would spill in the main loop of FP8
        const int r = row0 + n;
        const auto [h, row] = clamped_row(p, at.b, at.h, at.row0 + r);
        float sums[OWN];
        const RowSums of = row_nonfinite<Elements>(p, at.b, h, row, 0, n_k, HAS_SINKS, lane, lane, sums);
        const bool empty = of.sum == 0, exists = at.row0 + r < rows;
        if (HAS_SCALES && lane == 0 && exists)
            *q_row<float>(p, p.lse, at.b, h, row) = empty ? HIDDEN : fmaf(of.top, LN2, logf(of.sum));
        UNROLL(i, OWN) {
            const int column = lane + 32 * i;
            const float x = empty ? 0.0f : sums[i] / of.sum;
            if constexpr (FP8) {
                if (exists && column < HEAD_DIM_V) q_row<storage>(p, p.out, at.b, h, row)[column] = narrow(x);
            } else if constexpr (IS_FLOAT32) {
                store_float(staged + i * 64 * CHUNK_ROW + swizzled(r, lane / 4) + lane % 4 * 4, x);
            } else {
                const unsigned chunk = staged + column / 64 * 64 * CHUNK_ROW;
                const unsigned target = chunk + swizzled(r, column % 64 / 8) + column % 8 * 2;
                asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"((unsigned short)pack(x, 0.0f)) : "memory");
            }
        }
    }
}

// --- the epilogue ----------------------------------------------------------------------------------------------------

// O of a warp to its warp group's rows in shared memory.
DEVICE void stage_output(const float (&o)[O_REGS], unsigned staged) {
    const int lane = opaque(threadIdx.x % 32), row = opaque(threadIdx.x % 128 / 32) * 16;
    if constexpr (IS_FLOAT32) {
        UNROLL(n, COLUMNS / 8)
            UNROLL(half, 2) {
                const int own = row + 8 * half + lane / 4, vec = n % 4 * 2 + lane % 4 / 2;
                store_floats(staged + n / 4 * 64 * CHUNK_ROW + swizzled(own, vec) + lane % 2 * 8, o[4 * n + 2 * half],
                             o[4 * n + 2 * half + 1]);
            }
    } else {
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 2) {
            const float* x = o + 4 * n;
            stmatrix_x4<false>(staged + n / 8 * 64 * CHUNK_ROW + swizzled(row + lane % 16, n % 8 + lane / 16),
                               pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
        }
    }
}

// O / l and the log-sum-exp of work tile `number` of this CTA. HAS_SCALES: a row sum that is not finite means that the
// products do not stand for the row's elements.
DEVICE void epilogue(const Params& p, const WorkTile& at, unsigned base, int number, const float (&m)[2],
                     const float (&l)[2], const RowStats& stats, float (&o)[O_REGS], int wg) {
    const unsigned staged = q_rows(base, number % Q_BUFFERS, wg);
    const SeqSlot seq = seq_of(p, at);  // its words may be others' when O is in shared memory
    const int n_q = seq.n_q();
    float factor[2], lse[2];  // lse: in base 2
    bool is_nonfinite = false;
    UNROLL(half, 2) {
        const int index = at.row0 + row_of_lane(half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        // Where ROW_SUM_BY_MMA each lane of a row has its whole sum.
        float top = m[half];
        float sum = ROW_SUM_BY_MMA ? o[COLUMNS / 2 + 2 * half] : sum_across_lanes(l[half]);
        factor[half] = 1;
        const bool exists = index < n_q * PACK_GQA;
        if (HAS_SINKS && exists) add_sink(p, h, top, sum, factor[half]);
        const bool empty = sum == 0;  // no key is visible
        factor[half] = empty ? 0.0f : FP16X2 ? factor[half] / sum : factor[half] * reciprocal(sum);
        lse[half] = empty ? HIDDEN : top + log2_fast(sum);
        if (HAS_SCALES && exists && threadIdx.x % 4 == 0)  // before the fallback, which overwrites its rows'
            *q_row<float>(p, p.lse, at.b, h, row) = !empty && FP16X2 ? fmaf(top, LN2, logf(sum)) : LN2 * lse[half];
        float zero = HAS_SCALES ? 0 * sum : 0;  // NaN if an element is not finite
        UNROLL(n, COLUMNS / 8)
            UNROLL(c, 2) {
                float& x = o[4 * n + 2 * half + c];
                if (HAS_SCALES) x *= factor[half];
                if (HAS_SCALES || MAY_HIDE) zero = fmaf(x, 0.0f, zero);
                if (!HAS_SCALES) x *= factor[half];
            }
        is_nonfinite |= zero != 0 && (HAS_SCALES || is_finite(sum)) && exists;
    }
    named_barrier_sync(WARPGROUP_BARRIER + wg, 128);  // no warp of the warp group reads Q any more
    stage_output(o, staged);
    if ((HAS_SCALES || MAY_HIDE) && __any_sync(~0u, is_nonfinite)) {
        __syncwarp();
        rows_nonfinite(p, at, staged);
    }
    fence_proxy_async();
    __syncwarp();
    mbarrier_arrive_once(out_ready(base, number % Q_BUFFERS, wg));
    // The log-sum-exp is stored after the fence, which would wait for it, and without a branch, behind which the
    // compiler would serialise the wgmmas.
#pragma unroll
    for (int half = 0; !HAS_SCALES && half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half);
        const bool writes = index < n_q * PACK_GQA && threadIdx.x % 4 == 0;
        store_if(writes, q_row<float>(p, p.lse, at.b, at.h + index % PACK_GQA, index / PACK_GQA), LN2 * lse[half]);
        if constexpr (HAS_STATS) {
            const float top = max_across_lanes(stats.top[half]);
            store_statistics(p, at.b, at.h + index % PACK_GQA, index / PACK_GQA, m[half], sum_across_lanes(l[half]),
                             sum_across_lanes(stats.total[half]), m[half] + log2_fast(top),
                             [=](float* target, float x) { store_if(writes, target, x); });
        }
    }
}

// The rows of O that exist, from shared memory to global memory, by a warp: TMA would also store those behind the end
// of a packed sequence, which are the next one's.
DEVICE void store_rows(const Params& p, const Tensor& target, unsigned staged, int b, int h, int row0, int count) {
    constexpr int VECS = HEAD_DIM_V * (int)sizeof(storage) / VEC_BYTES;  // of a row
    char* const out = reinterpret_cast<char*>(q_row<storage>(p, target, b, h, row0));
    const long long row_bytes = target.token * (long long)sizeof(storage);
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < count * VECS; i += 32) {
        const int row = i / VECS, vec = i % VECS;
        const uint4 x = load_vec(staged + vec / 8 * 64 * CHUNK_ROW + swizzled(row, vec % 8));
        reinterpret_cast<uint4*>(out + row * row_bytes)[vec] = x;
    }
}

// The store warp: it stores each work tile's O and releases the buffer of Q that it lay in. One thread issues TMA; of
// packed sequences all lanes come, for store_rows().
DEVICE void store_warp(const Params& p, const TensorMap& out_map, unsigned base, const TensorMap* dout_map = nullptr) {
    const bool leader = !IS_PACKED || threadIdx.x % 32 == 0;
    const Pipeline<Q_BUFFERS> pipe_q = q_pipe(base);
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        const unsigned buffer = number % Q_BUFFERS, slot = work_tile_slot(base, number);
        pipe_q.consumer_wait(number);
        const int b = load_word(slot), h = load_word(slot + 4);
        if (b == END) break;
#pragma unroll 1
        for (int wg = 0; wg < MMA_WARPGROUPS; ++wg) {
            const int row0 = load_word(slot + 8) + 64 * wg;
            mbarrier_wait_backoff(out_ready(base, buffer, wg), number / Q_BUFFERS & 1);
            const int n_q = seq_of(p, b, slot).n_q();
            const auto store = [&](const TensorMap& map, const Tensor& target, unsigned staged) {
                if (IS_PACKED && row0 < n_q && row0 + 64 > n_q) {
                    store_rows(p, target, staged, b, h, row0, n_q - row0);
                } else if (leader && row0 < n_q * PACK_GQA) {
                    UNROLL(c, CHUNKS_OUT)
                        tma_store<PACK_GQA>(map, at_column(q_box(p, b, h / PACK_GQA, row0 / PACK_GQA), OUT_COLUMNS * c),
                                            staged + c * 64 * CHUNK_ROW);
                }
            };
            store(out_map, p.out, q_rows(base, buffer, wg));
            if constexpr (HAS_TANGENTS) store(*dout_map, p.dout, q_rows(base, buffer, wg) + TANGENT_OF_Q);
            if (IS_PACKED) __syncwarp();  // all lanes have passed the barrier, and read what TMA does not store
            bulk_commit();
        }
        bulk_wait_read();
        if (leader) mbarrier_arrive(pipe_q.empty_barrier(number));
        if (IS_PACKED) __syncwarp();  // no lane waits for the next work tile before the leader has released this one
    }
    bulk_wait();
}
