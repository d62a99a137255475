// Q to shared memory, and the epilogue of latent attention: a warp group's columns of O, of all keys or of a split.
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/mla_scheduler.cuh"

// Copies 16 bytes, or writes zeros; then `source` need not be a valid address.
DEVICE void cp_async(unsigned target, const void* source, bool exists) {
    asm volatile("{ .reg .pred p; setp.eq.s32 p, %2, 0;"
                 "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p; }"
                 ::"r"(target), "l"(source), "r"((int)exists) : "memory");
}
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // this thread's

// 64 rows of Q, by all consumers; rows and columns behind the last are zeros. TMA takes no group of heads that 64 is
// no multiple of.
DEVICE void load_q(const Params& p, unsigned target, int b, int h, int row0) {
    constexpr int VECS = padded(HEAD_DIM) / 8;
    const int rows = (int)max_n_q(p) * PACK_GQA;
#pragma unroll 2
    for (int i = threadIdx.x - 128; i < 64 * VECS; i += CONSUMERS) {
        const int row = i / VECS, vec = i % VECS, index = row0 + row;
        const bool exists = index < rows && vec * 8 < HEAD_DIM;
        const HeadRow at = clamped_row(p, b, h, index);
        const storage* source = q_row<const storage>(p, p.q, b, at.h, at.row) + (exists ? vec * 8 : 0);
        cp_async(target + vec / 8 * 64 * CHUNK_ROW + swizzled(row, vec % 8), source, exists);
    }
}

// Column `column` of a row of O, of a split or of the output.
DEVICE void store_element(const Params& p, const Unit& unit, int h, int row, int column, float x) {
    if (p.num_splits > 1)
        row_at<float>(p.o_partial, unit.split * p.batch + unit.at.b, h, row)[column] = x;
    else q_row<storage>(p, p.out, unit.at.b, h, row)[column] = narrow(x);
}

// The non-finite fallback: those of a warp's 16 rows that `wanted` has bits for.
template <int WG>
DEVICE void unit_nonfinite(const Params& p, const Unit& unit, unsigned wanted) {
    constexpr int OWN = HALF_COLUMNS / 32;  // columns of a lane
    const WorkTile& at = unit.at;
    const int lane = threadIdx.x % 32, first_column = WG * HALF_COLUMNS + lane;
    const int row0 = uniform(threadIdx.x % 128 / 32) * 16, n_k = (int)seq_info(p, at.b).n_k;
    const TileRange range = tile_range(p, n_k, unit.split);
    const int first = range.first * BLOCK_K, end = n_k - first < (range.end - range.first) * BLOCK_K
                                                       ? n_k : range.end * BLOCK_K;
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        if (!(wanted >> r & 1)) continue;
        const HeadRow of = clamped_row(p, at.b, at.h, at.row0 + row0 + r);
        float sums[OWN];
        const bool has_sink = HAS_SINKS && p.num_splits == 1;
        const float sum = row_nonfinite<Elements>(p, at.b, of.h, of.row, first, end, has_sink, lane, first_column,
                                                  sums).sum;
        UNROLL(i, OWN) {
            const int column = first_column + 32 * i;
            if (column < HEAD_DIM_V) store_element(p, unit, of.h, of.row, column, sums[i] / sum);
        }
    }
}

// O / l and the log-sum-exp of a unit. l: row sums of all its keys.
template <int WG>
DEVICE void mla_epilogue(const Params& p, const Unit& unit, const float (&m)[2], const float (&l)[2],
                         float (&o)[HALF_REGS]) {
    const WorkTile& at = unit.at;
    const bool is_split = p.num_splits > 1;
    const int t = threadIdx.x % 4, rows = (int)max_n_q(p) * PACK_GQA;
    unsigned nonfinite = 0;
    UNROLL(half, 2) {
        const int index = at.row0 + row_of_lane(half), row = index / PACK_GQA, h = at.h + index % PACK_GQA;
        const bool exists = index < rows;
        float top = m[half], sum = l[half], factor = 1;
        if (HAS_SINKS && exists && !is_split) add_sink(p, h, top, sum, factor);
        const bool empty = sum == 0;  // no key is visible
        factor = empty ? 0.0f : factor * reciprocal(sum);
        float zero = 0;  // NaN if an element is not finite
        UNROLL(n, HALF_COLUMNS / 8)
            UNROLL(c, 2) {
                float& x = o[4 * n + 2 * half + c];
                if (MAY_HIDE && WG * HALF_COLUMNS + 8 * n < HEAD_DIM_V) zero = fmaf(x, 0.0f, zero);
                x = empty ? 0.0f : x * factor;
            }
        if (MAY_HIDE) {
            const unsigned found = __ballot_sync(~0u, zero != 0 && is_finite(sum) && exists && !empty);
            UNROLL(r, 8) nonfinite |= (found >> 4 * r & 15) != 0 ? 1u << (r + 8 * half) : 0u;
        }
        if (WG == 0 && exists && t == 0) {
            if (is_split) *row_at<float2>(p.lse_partial, unit.split * p.batch + at.b, h, row) = float2{top, sum};
            else *q_row<float>(p, p.lse, at.b, h, row) = empty ? HIDDEN : LN2 * (top + log2_fast(sum));
        }
        if (is_split) {
            float* target = row_at<float>(p.o_partial, unit.split * p.batch + at.b, h, row);
            UNROLL(n, HALF_COLUMNS / 8) {
                const int column = WG * HALF_COLUMNS + 8 * n;
                if (exists && column < HEAD_DIM_V)
                    *reinterpret_cast<float2*>(target + column + 2 * t) =
                        float2{o[4 * n + 2 * half], o[4 * n + 2 * half + 1]};
            }
        } else {
            storage* target = q_row<storage>(p, p.out, at.b, h, row);
            // Two lanes exchange, so that each has four columns in a row: of the first eight, or of the second.
#pragma unroll
            for (int n = 0; n < HALF_COLUMNS / 8; n += 2) {
                const float *x = o + 4 * n + 2 * half, *y = x + 4;
                const unsigned first = pack(x[0], x[1]), second = pack(y[0], y[1]);
                const unsigned other = __shfl_xor_sync(~0u, t % 2 ? first : second, 1);
                const int column = WG * HALF_COLUMNS + 8 * (n + t % 2);
                if (exists && column < HEAD_DIM_V)
                    *reinterpret_cast<uint2*>(target + column + 4 * (t / 2)) =
                        t % 2 ? uint2{other, second} : uint2{first, other};
            }
        }
    }
    if (MAY_HIDE && nonfinite != 0) unit_nonfinite<WG>(p, unit, nonfinite);
}
