// Backward pass in float32 by FP16x2 products: one kernel for dQ, a sum over keys, and one for dK and dV, sums over
// queries. Each CTA owns the rows that it sums up, so results are deterministic, at the price of seven products instead
// of five.
//
//     kernel     rows A1, A2     columns B1, B2     W                                       accumulates
//     dQ         Q, dO           K, V               dS   = P * (dO V^T - delta)             dQ += dS K
//     dK, dV     K, V            Q, dO              dS^T and P^T                            dK += dS^T Q, dV += P^T dO
//
// The grid is persistent. A work tile is 128 rows of a head; for keys, the columns are those of all query heads of the
// group.
//
//     A1, A2      [ROW_STAGES][MMA_WARPGROUPS][64][..]     shared memory, as terms
//     B1, B2      [STAGES][BLOCK_COLUMNS][..]              shared memory, one pipeline
//     S, dP, W    [64][BLOCK_COLUMNS]                      registers of a warp group
//     acc, slice  [64][columns]                            registers: sums by CUDA cores; the product of one tile
//
//     warp 0              scheduler and producer (fp16x2_bwd_producer.cuh)
//     warp groups 1, 2    consumers
//
// Each row of dO has a scale of its own, as gradients may be of any magnitude. So has each row of W in a tile, which is
// put back when the tile's product is added.
#include "common/bwd_fallback.cuh"
#include "sm90/fp16x2_bwd_producer.cuh"

// --- P of a pair -----------------------------------------------------------------------------------------------------

DEVICE float dropout(float x, const Params& p, const WorkTile& at, int h, int query, int key) {
    return HAS_DROPOUT ? drop(x, p, at.b, h, query, key) : x;
}

// P of a pair, 0 where it is masked. scale: what 1 stands for in s. lse: of the query, in base 2, or its fraction.
template <bool UNMASKED>
DEVICE float probability(const Params& p, const WorkTile& at, int h, int query, int key, float s, float scale,
    float lse, float& slope) {
    if constexpr (UNMASKED && !HAS_SCORE) return exp2_fast(fmaf(s, scale, -lse));
    if (!UNMASKED && (query >= (int)seq_info(p, at.b).n_q || key >= at.n_k)) return 0;
    float x = s * scale;
    if constexpr (HAS_SCORE) slope = score_slope(x, at.b, h, query, query + at.offset, key, p);
    x = modify<!UNMASKED>(x, at.b, h, query, query + at.offset, key, p);
    return x == HIDDEN ? 0.0f : exp2_fast(fmaf(x, HAS_SCORE ? LOG2E : 1.0f, -lse));
}

// --- the epilogue ----------------------------------------------------------------------------------------------------

// A gradient of a warp's 16 rows to global memory. all: rows of the tensor, which get zeros from at.rows on.
template <int DIM, int M>
DEVICE void store_gradient(const Tensor& gradient, const WorkTile& at, int first, int all, const float (&sums)[M],
    float factor, unsigned staged) {
    store_lines<DIM>(sums, factor, staged, threadIdx.x % 32, [&](int own, int column, const float4& x) {
        if (first + own < all)
            store_four<DIM>(row_at<float>(gradient, at.b, at.h, first + own), column,
                            first + own < at.rows ? x : float4{0, 0, 0, 0});
    });
}

// The gradients of a work tile; `staged`: its warp group's rows of A1, which are no longer read.
DEVICE void epilogue(const Params& p, const WorkTile& at, int wg, float (&acc_1)[ACC_COLUMNS_1 / 2 + 1],
    float (&acc_2)[ACC_COLUMNS_2 / 2 + 1], const float (&factor)[2], bool is_nonfinite, unsigned staged) {
    const int warp = uniform(threadIdx.x % 128 / 32), first = at.row0 + 64 * wg + 16 * warp,
        all = DQ_KERNEL ? (int)seq_info(p, at.b).n_q : (int)max_n_k(p);
    UNROLL(half, 2) {
        UNROLL(i, ACC_COLUMNS_1 / 4) {
            float& x = acc_1[i / 2 * 4 + 2 * half + i % 2];
            x *= factor[half], is_nonfinite |= !is_finite(x);
        }
        UNROLL(i, ACC_COLUMNS_2 / 4) is_nonfinite |= !is_finite(acc_2[i / 2 * 4 + 2 * half + i % 2]);
    }
    named_barrier_sync(1 + wg, 128);  // no warp of the warp group reads the rows any more
    staged += 16 * warp * CHUNK_ROW;
    store_gradient<HEAD_DIM>(DQ_KERNEL ? p.dq : p.dk, at, first, all, acc_1, (float)p.softmax_scale, staged);
    if constexpr (!DQ_KERNEL) store_gradient<HEAD_DIM_V>(p.dv, at, first, all, acc_2, 1.0f, staged);
    if (__any_sync(~0u, is_nonfinite)) {
#pragma unroll 1
        for (int row = opaque(first), end = row + 16 < at.rows ? row + 16 : at.rows; row < end; ++row) {
            recompute_row<DQ_KERNEL ? DQ : DK>(p, at.b, at.h, row, 0, HEAD_DIM, (float)p.softmax_scale);
            if constexpr (!DQ_KERNEL) recompute_row<DV>(p, at.b, at.h, row, 0, HEAD_DIM_V, 1.0f);
        }
    }
    fence_proxy_async();
    __syncwarp();
}

// --- the consumer ----------------------------------------------------------------------------------------------------

// A log-sum-exp in base 2 as a fraction, to which P is relative, and a whole number, which goes into a scale: power =
// 2^-whole. An exponent of 15 and a fraction would cost P four bits of precision. `scale` times `power` stays a normal
// number.
struct SplitLse { float fraction, power; };
DEVICE SplitLse split_lse(float lse, float scale) {
    constexpr float REST = (float)(1.4426950408889634 - LOG2E);
    const float whole = fminf(fminf(fmaxf(rintf(lse * LOG2E), -16.0f), 16.0f), exponent_of(scale) + 126);
    return {fmaf(lse, REST, fmaf(lse, LOG2E, -whole)), __int_as_float((127 - (int)whole) << 23)};
}

// For each query: the fraction of its log-sum-exp, delta, and the scale of dO, the latter two times power;
// BLOCK_COLUMNS of each in a row. The array holds whole tiles.
extern "C" __global__ void __launch_bounds__(256) fp16x2_row_factors(KERNEL_PARAMS) {
    if (is_skipped(p.fallback)) return;
    const long long index = (long long)blockIdx.x * 256 + threadIdx.x, rows = p.bwd_lse.head;
    if (index >= p.batch * p.heads * rows) return;
    const long long row = index % rows, h = index / rows % p.heads, b = index / rows / p.heads;
    const float scale = *row_at<const float>(p.dout_scale, b, h, row);
    const SplitLse reference = split_lse(*row_at<const float>(p.bwd_lse, b, h, row), scale);
    float* target = row_at<float>(p.row_factors, b, h, row / BLOCK_COLUMNS * BLOCK_COLUMNS) + row % BLOCK_COLUMNS;
    target[0] = reference.fraction;
    target[BLOCK_COLUMNS] = *row_at<const float>(p.delta, b, h, row) * reference.power;
    target[2 * BLOCK_COLUMNS] = scale * reference.power;
}

// The average share of a sum of DIM products that tensor cores lose by rounding it toward zero after each 16 of them:
// half a unit of the last place, 0.72 2^-24, for the last step, and proportionally less for the earlier ones.
template <int DIM> constexpr double TRUNCATION_LOSS = 0.36 / 16777216 * (padded(DIM) < 64 ? padded(DIM) / 16 + 1 : 5);

DEVICE void consumer(const Params& p, unsigned base, int wg) {
    const Pipeline<STAGES> pipe_columns = columns_pipe(base);
    const Pipeline<ROW_STAGES> pipe_rows = rows_pipe(base);
    constexpr double COMPENSATION = 1 + TRUNCATION_LOSS<HEAD_DIM>;
    constexpr float COMPENSATION_V = 1 + TRUNCATION_LOSS<HEAD_DIM_V>;
    const float s_factor = uniform_float((float)(p.softmax_scale * (HAS_SCORE ? COMPENSATION
        : COMPENSATION * 1.4426950408889634)));
    float acc_1[ACC_COLUMNS_1 / 2 + 1], acc_2[ACC_COLUMNS_2 / 2 + 1], s[BLOCK_COLUMNS / 2], dp[BLOCK_COLUMNS / 2];
    float scale_1[2], scale_2[2], lse_fraction[2] = {}, delta_scaled[2] = {}, factor[2] = {1, 1};
    WorkTile at;                // whose gradients are in registers
    int number = -1;            // its number among this CTA's
    bool is_nonfinite = false;  // its rows need the fallback
    const Tensor& row_scales_1 = DQ_KERNEL ? p.q_scale : p.k_scale;
    const Tensor& row_scales_2 = DQ_KERNEL ? p.dout_scale : p.v_scale;
    const Tensor& column_scales_1 = DQ_KERNEL ? p.k_scale : p.q_scale;

#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        pipe_columns.consumer_wait(n);
        const unsigned stage = n % STAGES;
        const unsigned desc_slot = base + AT_TILE_DESCS + 8 * stage;
        const int tile_desc = uniform(load_word(desc_slot)), h = uniform(load_word(desc_slot + 4));
        if (tile_desc & FIRST_TILE) {  // also END
            if (number >= 0) {
                epilogue(p, at, wg, acc_1, acc_2, factor, is_nonfinite, a1_rows(base, number, wg));
                pipe_rows.consumer_release(number);
            }
            if (tile_desc == END) break;
            pipe_rows.consumer_wait(++number);
            const unsigned slot = base + AT_WORK_TILES + 12 * (number % ROW_STAGES);
            at = work_tile_at(p, uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8)));
            is_nonfinite = false;
            UNROLL(half, 2) {
                const int own = at.row0 + 64 * wg + row_of_lane(half),
                    row = own < at.rows ? own : larger(at.rows - 1, 0);
                scale_1[half] = *row_at<const float>(row_scales_1, at.b, at.h, row / BLOCK_COLUMNS) * s_factor;
                scale_2[half] = *row_at<const float>(row_scales_2, at.b, at.h, DQ_KERNEL ? row : row / BLOCK_COLUMNS) *
                                (DQ_KERNEL ? 1.0f : COMPENSATION_V);
                if (DQ_KERNEL) {
                    const SplitLse reference = split_lse(*row_at<const float>(p.bwd_lse, at.b, at.h, row),
                        scale_2[half]);
                    lse_fraction[half] = reference.fraction, factor[half] = scale_2[half] * reference.power;
                    delta_scaled[half] = *row_at<const float>(p.delta, at.b, at.h, row) / scale_2[half];
                }
            }
            UNROLL(i, ACC_COLUMNS_1 / 2) acc_1[i] = 0;
            UNROLL(i, ACC_COLUMNS_2 / 2) acc_2[i] = 0;
        }
        const int tile = tile_desc >> 5, head = DQ_KERNEL ? at.h / GQA_GROUP : h, state = tile_desc >> 2 * wg & 3;
        const int first = at.row0 + 64 * wg;
        if (state == EMPTY) {
            pipe_columns.consumer_release(n);
            continue;
        }
        const unsigned b1 = base + AT_B1 + stage * BYTES_B1, b2 = base + AT_B2 + stage * BYTES_B2;
        wgmma_fence();
        issue_abt<HEAD_DIM>(s, a1_rows(base, number, wg), b1);
        wgmma_commit();
        issue_abt<HEAD_DIM_V>(dp, a2_rows(base, number, wg), b2);
        wgmma_commit();
        const float column_scale_1 = *row_at<const float>(column_scales_1, at.b, head, tile);
        const float column_scale_2 = DQ_KERNEL ? *row_at<const float>(p.v_scale, at.b, head, tile) * COMPENSATION_V
            : 1.0f;
        wgmma_wait<1>();
        fence_operand(s);
        float s_scale[2], slope[HAS_SCORE ? BLOCK_COLUMNS / 2 : 1];
        UNROLL(half, 2) {
            s_scale[half] = scale_1[half] * column_scale_1;
            is_nonfinite |= !(s_scale[half] <= MAX_SCALE);  // also NaN
        }
        // With stage * BYTES_ROW_FACTORS in the address ptxas spills more.
        auto row_factors = [&](int which, int column) {
            return load_floats(base + AT_ROW_FACTORS + (3 * stage + which) * (4 * BLOCK_COLUMNS) + 4 * column);
        };
        auto to_p = [&](auto unmasked) {
            UNROLL(i, BLOCK_COLUMNS / 8) {
                const int column = 8 * i + threadIdx.x % 4 * 2;
                float2 lse{};
                if constexpr (!DQ_KERNEL) lse = row_factors(0, column);
                UNROLL(e, 4) {
                    const int half = e / 2, row = first + row_of_lane(half),
                        other = tile * BLOCK_COLUMNS + column + e % 2;
                    float& x = s[4 * i + e];
                    x = probability<decltype(unmasked)::value>(
                        p, at, h, DQ_KERNEL ? row : other, DQ_KERNEL ? other : row, x, s_scale[half],
                        DQ_KERNEL ? lse_fraction[half] : e % 2 ? lse.y : lse.x, slope[HAS_SCORE ? 4 * i + e : 0]);
                }
            }
        };
        if (state == FULL) to_p(Constant<true>{});
        else to_p(Constant<false>{});
        wgmma_wait<0>();
        fence_operand(dp);
        float top_p[2] = {}, top_ds[2] = {};
        UNROLL(i, BLOCK_COLUMNS / 8) {
            const int column = 8 * i + threadIdx.x % 4 * 2;
            float2 delta{}, scale{column_scale_2, column_scale_2};
            if constexpr (!DQ_KERNEL) delta = row_factors(1, column), scale = row_factors(2, column);
            UNROLL(e, 4) {
                const int half = e / 2, row = first + row_of_lane(half), other = tile * BLOCK_COLUMNS + column + e % 2;
                const int query = DQ_KERNEL ? row : other, key = DQ_KERNEL ? other : row;
                const float other_scale = e % 2 ? scale.y : scale.x;
                float &w = s[4 * i + e], &x = dp[4 * i + e];
                x = dropout(x * (DQ_KERNEL ? other_scale : scale_2[half] * other_scale), p, at, h, query, key);
                x = w * (x - (DQ_KERNEL ? delta_scaled[half] : e % 2 ? delta.y : delta.x));
                if constexpr (HAS_SCORE) x *= slope[4 * i + e];
                top_ds[half] = fmaxf(top_ds[half], fabsf(x));
                if constexpr (!DQ_KERNEL) {
                    w = dropout(w, p, at, h, query, key) * other_scale;
                    top_p[half] = fmaxf(top_p[half], w);
                }
            }
        }
        Fragment p_terms, ds_terms;
        float scale_p[2], scale_ds[2];
        auto pack_ds = [&] { ds_terms.pack_rows(dp, top_ds, scale_ds); };
        if constexpr (DQ_KERNEL) {
            pack_ds();
        } else {  // P has the scales of dO in it
            p_terms.pack_rows(s, top_p, scale_p);
            accumulate<HEAD_DIM_V>(p_terms, b2, scale_p, acc_2, pack_ds);
        }
        const float back[2] = {scale_ds[0] * column_scale_1, scale_ds[1] * column_scale_1};
        accumulate<HEAD_DIM>(ds_terms, b1, back, acc_1, [] {});
        pipe_columns.consumer_release(n);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fp16x2_backward(KERNEL_PARAMS, const __grid_constant__ TensorMap a1, const __grid_constant__ TensorMap a2,
                const __grid_constant__ TensorMap b1, const __grid_constant__ TensorMap b2) {
    if (is_skipped(p.fallback)) return;
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        columns_pipe(base).init(1, 4 * MMA_WARPGROUPS);
        rows_pipe(base).init(1, 4 * MMA_WARPGROUPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0) producer(p, a1, a2, b1, b2, base, *reinterpret_cast<TileList*>(shared + AT_LIST));
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consumer(p, base, role - 1);
    }
}
