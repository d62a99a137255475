// Backward pass in float32 by products of float16 terms (sm90_float32.cuh says how numbers become terms): a kernel for the
// gradients that are sums over keys, and one for those that are sums over queries. Each owns what it sums, so the bits are
// the same every time; seven products instead of five.
//
//     rows          A1, A2     columns       B1, B2     weights W                             sums
//     of queries    Q, dO      of keys       K, V       dS   = P * (dO V^T - delta)           dQ += dS K
//     of keys       K, V       of queries    Q, dO      dS^T and P^T                          dK += dS^T Q, dV += P^T dO
//
// As many blocks run as there are multiprocessors. Each takes items, 128 rows of a head, for keys of all query heads of the
// group, until none is left, and goes over the tiles of columns.
//
//     A1, A2      [ROW_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory, as terms
//     B1, B2      [STAGES][BLOCK][..]             shared memory, a ring
//     numbers     [STAGES][3][BLOCK]              of columns that are queries, with them: kernel fp16x2_row_factors
//     S, dP, W    [64][BLOCK]                     registers of a warp group
//     sums, part  [64][COLUMNS]                   registers: ordinary sums, and those of wgmma for one tile
//
// Warp 0 finds the tiles and loads them, warp groups 1 and 2 multiply. A row of dO has a unit of its own, since gradients
// may be of any magnitude; so does a row of W in a tile, which is put back when the tile's sums are added.
//
// Constants of the head: OF_QUERIES: which kernel, BLOCK, STAGES, ROW_BUFFERS, NUM_TERMS, CONSUMER_REGISTERS, PRODUCER_REGISTERS, WATCHDOG.
#include "common/tile_order.cuh"
#include "sm90/pipeline.cuh"
#include "sm90/tile_lists.cuh"

constexpr int MMA_WARPGROUPS = 2, THREADS = 128 * (MMA_WARPGROUPS + 1), ROWS = 64 * MMA_WARPGROUPS;
constexpr int SUMS_1 = padded(HEAD_DIM), SUMS_2 = OF_QUERIES ? 0 : padded(HEAD_DIM_V);  // columns of W B1, W B2
constexpr int SLICE = 64;                                                               // of a product
constexpr int CHUNKS_1 = NUM_TERMS * chunks(HEAD_DIM), CHUNKS_2 = NUM_TERMS * chunks(HEAD_DIM_V);
constexpr int BYTES_A1 = 64 * CHUNK_ROW * CHUNKS_1, BYTES_A2 = 64 * CHUNK_ROW * CHUNKS_2;
constexpr int BYTES_B1 = BLOCK * CHUNK_ROW * CHUNKS_1, BYTES_B2 = BLOCK * CHUNK_ROW * CHUNKS_2;
constexpr int BYTES_NUMBERS = OF_QUERIES ? 0 : 3 * 4 * BLOCK;
constexpr int AT_A2 = ROW_BUFFERS * MMA_WARPGROUPS * BYTES_A1, AT_B1 = AT_A2 + ROW_BUFFERS * MMA_WARPGROUPS * BYTES_A2;
constexpr int AT_B2 = AT_B1 + STAGES * BYTES_B1, AT_NUMBERS = AT_B2 + STAGES * BYTES_B2;
constexpr int AT_RING = AT_NUMBERS + STAGES * BYTES_NUMBERS, AT_ROWS_RING = AT_RING + 16 * STAGES;
constexpr int AT_TILE_DESCS = AT_ROWS_RING + 16 * ROW_BUFFERS;   // tile << 5 | FIRST | states, two bits a group; query head
constexpr int AT_WORK_TILES = AT_TILE_DESCS + 8 * STAGES, AT_LIST = AT_WORK_TILES + 12 * ROW_BUFFERS;
constexpr int FIRST = 16;  // the first tile of an item
constexpr int END = -1;
constexpr float FAR_UNIT = 1.2089258e24f;  // 2^80

#include "sm90/fp16x2_terms.cuh"

DEVICE float2 load_floats(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

template <int VALUE> struct Number { static constexpr int value = VALUE; };  // for generic lambdas

#include "sm90/fp16x2_load.cuh"

DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

// --- numbers of queries -----------------------------------------------------------------------------------------------

// A log-sum-exp in base 2 as a fraction, which weights are relative to, and a whole number, which goes into a unit: power = 2^-whole.
// Fifteen and a fraction would cost a weight four of its bits. `unit` times `power` is to be a normal number.
struct Reference { float fraction, power; };
DEVICE Reference reference_of(float lse, float unit) {
    constexpr float REST = (float)(1.4426950408889634 - LOG2E);
    const float whole = fminf(fminf(fmaxf(rintf(lse * LOG2E), -16.0f), 16.0f), exponent_of(unit) + 126);
    return {fmaf(lse, REST, fmaf(lse, LOG2E, -whole)), __int_as_float((127 - (int)whole) << 23)};
}

// Of each query: fraction, delta and unit of dO, these times power; BLOCK of each after the other. There is memory for whole tiles.
extern "C" __global__ void __launch_bounds__(256) fp16x2_row_factors(KERNEL_PARAMS) {
    const long long index = (long long)blockIdx.x * 256 + threadIdx.x, rows = p.bwd_lse.head;
    if (index >= p.batch * p.heads * rows) return;
    const long long row = index % rows, h = index / rows % p.heads, b = index / rows / p.heads;
    const float unit = *row_at<const float>(p.dout_scale, b, h, row);
    const Reference reference = reference_of(*row_at<const float>(p.bwd_lse, b, h, row), unit);
    float* target = row_at<float>(p.row_factors, b, h, row / BLOCK * BLOCK) + row % BLOCK;
    target[0] = reference.fraction;
    target[BLOCK] = *row_at<const float>(p.delta, b, h, row) * reference.power;
    target[2 * BLOCK] = unit * reference.power;
}

// --- pairs ------------------------------------------------------------------------------------------------------------

DEVICE float dropped(float x, const Params& p, const WorkTile& at, int h, int query, int key) {
    return HAS_DROPOUT ? drop(x, p, at.b, h, query, key) : x;
}

// A score, of which 1 stands for `unit`, to a weight; 0 where the pair is hidden. lse: of the query, in base 2, or its fraction.
template <bool WHOLE>
DEVICE float weigh(const Params& p, const WorkTile& at, int h, int query, int key, float s, float unit, float lse, float& slope) {
    if constexpr (WHOLE && !HAS_SCORE) return exp2_fast(fmaf(s, unit, -lse));
    if (!WHOLE && (query >= (int)p.n_q || key >= at.n_k)) return 0;
    float x = s * unit;
    if constexpr (HAS_SCORE) slope = score_slope(x, at.b, h, query, query + at.offset, key, p);
    x = modify<!WHOLE>(x, at.b, h, query, query + at.offset, key, p);
    return x == HIDDEN ? 0.0f : exp2_fast(fmaf(x, HAS_SCORE ? LOG2E : 1.0f, -lse));
}

// The gradients of a warp's 16 rows from memory, on the ordinary units, leaving out weights that are 0.
DEVICE void rows_nonfinite(const Params& p, const WorkTile& at, int first, float (&sums_1)[SUMS_1 / 2 + 1], float (&sums_2)[SUMS_2 / 2 + 1]) {
    const int lane = threadIdx.x % 32, columns = OF_QUERIES ? at.n_k : (int)p.n_q;
#pragma unroll
    for (int i = 0; i < SUMS_1 / 2; ++i) sums_1[i] = 0;
#pragma unroll
    for (int i = 0; i < SUMS_2 / 2; ++i) sums_2[i] = 0;
#pragma unroll 1
    for (int i = 0; i < (OF_QUERIES ? 1 : GQA_GROUP); ++i) {
        const int h = OF_QUERIES ? at.h : at.h * GQA_GROUP + i, head = OF_QUERIES ? at.h / GQA_GROUP : at.h;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = first + 8 * half + lane / 4, row = own < at.rows ? own : larger(at.rows - 1, 0);
#pragma unroll 1
            for (int c0 = 0; c0 < columns; c0 += 4) {  // four lanes share a row: each weighs a column
                const int own_column = c0 + lane % 4, column = own_column < columns ? own_column : columns - 1;
                const int query = OF_QUERIES ? row : column, key = OF_QUERIES ? column : row;
                const storage *q = row_at<const storage>(p.q, at.b, h, query), *k = row_at<const storage>(p.k, at.b, head, key);
                const storage *dout = row_at<const storage>(p.dout, at.b, h, query), *v = row_at<const storage>(p.v, at.b, head, key);
                float s = 0, dp = 0;
#pragma unroll 1
                for (int d = 0; d < HEAD_DIM; ++d) s = fmaf(q[d], k[d], s);
#pragma unroll 1
                for (int d = 0; d < HEAD_DIM_V; ++d) dp = fmaf(dout[d], v[d], dp);
                const float lse = *row_at<const float>(p.bwd_lse, at.b, h, query) * LOG2E, delta = *row_at<const float>(p.delta, at.b, h, query);
                const float scale = (float)(HAS_SCORE ? p.softmax_scale : p.softmax_scale * 1.4426950408889634);
                float slope = 1;
                const float w = own_column < columns ? weigh<false>(p, at, h, query, key, s, scale, lse, slope) : 0.0f;
                const float ds = w == 0 ? 0.0f : w * slope * (dropped(dp, p, at, h, query, key) - delta);
#pragma unroll 1
                for (int other = 0; other < 4; ++other) {
                    const int from = c0 + other < columns ? c0 + other : columns - 1;
                    auto add = [&](float own_weight, auto dim, const storage* b, auto& sums) {
                        const float weight = __shfl_sync(~0u, own_weight, (lane & 28) + other);
                        if (weight == 0) return;
#pragma unroll
                        for (int e = 0; e < padded(decltype(dim)::value) / 4; ++e) {
                            const int column = e / 2 * 8 + lane % 4 * 2 + e % 2;
                            if (column < decltype(dim)::value) sums[e / 2 * 4 + 2 * half + e % 2] += weight * b[column];
                        }
                    };
                    const storage* b1 = OF_QUERIES ? row_at<const storage>(p.k, at.b, head, from) : row_at<const storage>(p.q, at.b, h, from);
                    add(ds, Number<HEAD_DIM>{}, b1, sums_1);
                    if constexpr (!OF_QUERIES) add(w == 0 ? 0.0f : dropped(w, p, at, h, query, key), Number<HEAD_DIM_V>{}, row_at<const storage>(p.dout, at.b, h, from), sums_2);
                }
            }
        }
    }
}

// --- multiplying ------------------------------------------------------------------------------------------------------

// What a sum of DIM products has lost on average when tensor cores have rounded it toward zero after each 16 of them, as a share:
// half a unit of the last place, 0.72 2^-24, for the last step, and for those before as much of it as the sum was then. Measured
// on an H200 by the slopes of gradients against exact ones: so it is with head dim 64, and with 128 no more.
template <int DIM> constexpr double WHAT_IS_LOST = 0.36 / 16777216 * (padded(DIM) < 64 ? padded(DIM) / 16 + 1 : 5);

// X = A B^T by terms; a step is 16 of the summed columns, of which there are DIM.
template <int DIM>
DEVICE void multiply_rows(float (&x)[BLOCK / 2], unsigned a_at, unsigned b_at) {
    constexpr int STEPS = padded(DIM) / 16, LOW = 4 * chunks(DIM);  // in steps, to the low parts
    const unsigned long long a = descriptor(a_at), b = descriptor(b_at);
    auto terms = [&](unsigned long long a, unsigned long long b, bool fresh) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (fresh && step == 0) wgmma_zero_init<0, 0>(x, a, b);
            else product<0, 0>(x, a + along_rows(step, 64), b + along_rows(step, BLOCK), 1);
        }
    };
    if constexpr (NUM_TERMS == 2) terms(a + along_rows(LOW, 64), b, true), terms(a, b + along_rows(LOW, BLOCK), false);
    terms(a, b, NUM_TERMS == 1);
}

struct Weights {  // of a tile, as terms
    unsigned high[BLOCK / 4], low[BLOCK / 4];

    // Those in w, whose greatest of each row is `top`. unit: what 1 then stands for.
    __device__ __forceinline__ void take(float (&w)[BLOCK / 2], const float (&top)[2], float (&unit)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            unit[half] = scale_for(__float_as_uint(across_lanes(top[half], [](float x, float y) { return fmaxf(x, y); })));
            const float inverse = inverse_of(unit[half]);
#pragma unroll
            for (int i = 0; i < BLOCK / 4; ++i) w[i / 2 * 4 + 2 * half + i % 2] *= inverse;
        }
#pragma unroll
        for (int i = 0; i < BLOCK / 4; ++i) to_terms(w[2 * i], w[2 * i + 1], high[i], low[i]);
    }
};

// Columns FROM ... FROM + 2 N - 1 of W B, in sums of their own: begun.
template <int DIM, int FROM, int N>
DEVICE void begin_sums(float (&part)[N], const Weights& w, unsigned b_at) {
    static_assert(FROM % 64 == 0);
    constexpr int CHUNK = BLOCK * CHUNK_ROW;
    const unsigned long long b = descriptor(b_at + FROM / 64 * CHUNK, CHUNK);
    auto terms = [&](const unsigned (&weights)[BLOCK / 4], unsigned long long b, bool fresh) {
#pragma unroll
        for (int step = 0; step < BLOCK / 16; ++step)
            wgmma_rs<1>(part, weights, 4 * step, b + along_columns(step), fresh && step == 0 ? 0 : 1);
    };
    wgmma_fence();
    if constexpr (NUM_TERMS == 2) terms(w.low, b, true), terms(w.high, b + (chunks(DIM) * CHUNK >> 4), false);
    terms(w.high, b, NUM_TERMS == 1);
    wgmma_commit();
}

// They are there, and added: `back` is what 1 stands for in them.
template <int FROM, int N, int M>
DEVICE void end_sums(float (&part)[N], Weights& w, const float (&back)[2], float (&sums)[M]) {
    wgmma_wait<0>();
    fence_operand(part), fence_operand(w.high);
    if constexpr (NUM_TERMS == 2) fence_operand(w.low);
#pragma unroll
    for (int i = 0; i < N; ++i) sums[FROM / 2 + i] = fmaf(part[i], back[i / 2 % 2], sums[FROM / 2 + i]);
}

// W B, a slice after the other; meanwhile(), while the first is multiplied.
template <int DIM, int FROM = 0, int M, typename F>
DEVICE void add_slices(Weights& w, unsigned b_at, const float (&back)[2], float (&sums)[M], F meanwhile) {
    if constexpr (FROM < padded(DIM)) {
        constexpr int WIDTH = padded(DIM) - FROM < SLICE ? padded(DIM) - FROM : SLICE;
        float part[WIDTH / 2];
        begin_sums<DIM, FROM>(part, w, b_at);
        meanwhile();
        end_sums<FROM>(part, w, back, sums);
        add_slices<DIM, FROM + WIDTH>(w, b_at, back, sums, [] {});
    }
}

// A gradient of a warp's 16 rows to memory, 32 columns at once by way of 2 KB of shared memory, so that whole lines are
// written: straight from registers each store would be to eight of them. all: rows that there are, zeros from at.rows on.
template <int DIM, int M>
DEVICE void store_rows(const Tensor& gradient, const WorkTile& at, int first, int all, const float (&sums)[M], float factor, unsigned staged) {
    const int lane = threadIdx.x % 32;
    const bool whole = DIM % 4 == 0 && ((unsigned long long)gradient.data & 15) == 0;  // a gradient has no gaps
#pragma unroll
    for (int c0 = 0; c0 < padded(DIM); c0 += 32) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8 && c0 + i / 2 * 8 < padded(DIM); ++i) {
            const int own = lane / 4 + 8 * (i % 2), e = (c0 / 8 + i / 2) * 4 + 2 * (i % 2), unit = 2 * (i / 2) + lane % 4 / 2;
            const bool exists = first + own < at.rows;
            store_floats(staged + swizzled(own, unit) + lane % 2 * 8, exists ? sums[e] * factor : 0.0f, exists ? sums[e + 1] * factor : 0.0f);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = 4 * i + lane / 8, column = c0 + lane % 8 * 4;
            const float2 x = load_floats(staged + swizzled(own, lane % 8)), y = load_floats(staged + swizzled(own, lane % 8) + 8);
            if (first + own >= all) continue;
            float* target = row_at<float>(gradient, at.b, at.h, first + own) + column;
            if (whole) {
                if (column < DIM) *reinterpret_cast<float4*>(target) = {x.x, x.y, y.x, y.y};
            } else {
                if (column < DIM) target[0] = x.x;
                if (column + 1 < DIM) target[1] = x.y;
                if (column + 2 < DIM) target[2] = y.x;
                if (column + 3 < DIM) target[3] = y.y;
            }
        }
    }
}

// An item's gradients to memory; staged: where its rows were.
DEVICE void finish(const Params& p, const WorkTile& at, int group, float (&sums_1)[SUMS_1 / 2 + 1], float (&sums_2)[SUMS_2 / 2 + 1],
                   const float (&factor)[2], bool odd, unsigned staged) {
    const int warp = uniform(threadIdx.x % 128 / 32), first = at.row0 + 64 * group + 16 * warp, all = OF_QUERIES ? (int)p.n_q : (int)p.n_k;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < SUMS_1 / 4; ++i) {
            float& x = sums_1[i / 2 * 4 + 2 * half + i % 2];
            x *= factor[half], odd |= !is_finite(x);
        }
#pragma unroll
        for (int i = 0; i < SUMS_2 / 4; ++i) odd |= !is_finite(sums_2[i / 2 * 4 + 2 * half + i % 2]);
    }
    if (__any_sync(~0u, odd)) rows_nonfinite(p, at, first, sums_1, sums_2);
    named_barrier_sync(1 + group, 128);  // all are done with the rows
    staged += 16 * warp * CHUNK_ROW;
    store_rows<HEAD_DIM>(OF_QUERIES ? p.dq : p.dk, at, first, all, sums_1, (float)p.softmax_scale, staged);
    if constexpr (!OF_QUERIES) store_rows<HEAD_DIM_V>(p.dv, at, first, all, sums_2, 1.0f, staged);
    fence_proxy_async();
    __syncwarp();
}

DEVICE void consumer(const Params& p, unsigned base, int group) {
    const Pipeline<STAGES> ring{base + AT_RING, base + AT_RING + 8 * STAGES};
    const Pipeline<ROW_BUFFERS> rows{base + AT_ROWS_RING, base + AT_ROWS_RING + 8 * ROW_BUFFERS};
    constexpr double MORE = 1 + WHAT_IS_LOST<HEAD_DIM>;
    constexpr float MORE_V = 1 + WHAT_IS_LOST<HEAD_DIM_V>;
    const float scale = uniform_float((float)(p.softmax_scale * (HAS_SCORE ? MORE : MORE * 1.4426950408889634)));
    float sums_1[SUMS_1 / 2 + 1], sums_2[SUMS_2 / 2 + 1], s[BLOCK / 2], dp[BLOCK / 2];
    float unit_1[2], unit_2[2], lse_of[2] = {}, delta_of[2] = {}, factor[2] = {1, 1};
    WorkTile at;          // whose sums are in registers,
    int number = -1;  // its number among the block's,
    bool odd = false; // and whether it is to be done again
    const Tensor& units_1 = OF_QUERIES ? p.q_scale : p.k_scale;
    const Tensor& units_2 = OF_QUERIES ? p.dout_scale : p.v_scale;
    const Tensor& columns_1 = OF_QUERIES ? p.k_scale : p.q_scale;

#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        ring.consumer_wait(n);
        const unsigned stage = n % STAGES;
        const int tile_desc = uniform(load_word(base + AT_TILE_DESCS + 8 * stage)), h = uniform(load_word(base + AT_TILE_DESCS + 8 * stage + 4));
        if (tile_desc & FIRST) {  // of another item, or END
            if (number >= 0) {
                finish(p, at, group, sums_1, sums_2, factor, odd, base + (number % ROW_BUFFERS * MMA_WARPGROUPS + group) * BYTES_A1);
                rows.consumer_release(number);
            }
            if (tile_desc == END) break;
            rows.consumer_wait(++number);
            const unsigned slot = base + AT_WORK_TILES + 12 * (number % ROW_BUFFERS);
            at = item_at(p, uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8)));
            odd = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int own = at.row0 + 64 * group + row_of_lane(half), row = own < at.rows ? own : larger(at.rows - 1, 0);
                unit_1[half] = *row_at<const float>(units_1, at.b, at.h, row / BLOCK) * scale;
                unit_2[half] = *row_at<const float>(units_2, at.b, at.h, OF_QUERIES ? row : row / BLOCK) * (OF_QUERIES ? 1.0f : MORE_V);
                if (OF_QUERIES) {
                    const Reference reference = reference_of(*row_at<const float>(p.bwd_lse, at.b, at.h, row), unit_2[half]);
                    lse_of[half] = reference.fraction, factor[half] = unit_2[half] * reference.power;
                    delta_of[half] = *row_at<const float>(p.delta, at.b, at.h, row) / unit_2[half];
                }
            }
#pragma unroll
            for (int i = 0; i < SUMS_1 / 2; ++i) sums_1[i] = 0;
#pragma unroll
            for (int i = 0; i < SUMS_2 / 2; ++i) sums_2[i] = 0;
        }
        const int tile = tile_desc >> 5, head = OF_QUERIES ? at.h / GQA_GROUP : h, state = tile_desc >> 2 * group & 3;
        const int first = at.row0 + 64 * group;
        if (state == EMPTY) {
            ring.consumer_release(n);
            continue;
        }
        const unsigned b1 = base + AT_B1 + stage * BYTES_B1, b2 = base + AT_B2 + stage * BYTES_B2;
        wgmma_fence();
        multiply_rows<HEAD_DIM>(s, base + (number % ROW_BUFFERS * MMA_WARPGROUPS + group) * BYTES_A1, b1);
        wgmma_commit();
        multiply_rows<HEAD_DIM_V>(dp, base + AT_A2 + (number % ROW_BUFFERS * MMA_WARPGROUPS + group) * BYTES_A2, b2);
        wgmma_commit();
        const float column_1 = *row_at<const float>(columns_1, at.b, head, tile);
        const float column_2 = OF_QUERIES ? *row_at<const float>(p.v_scale, at.b, head, tile) * MORE_V : 1.0f;
        wgmma_wait<1>();
        fence_operand(s);
        float of_s[2], slope[HAS_SCORE ? BLOCK / 2 : 1];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            of_s[half] = unit_1[half] * column_1;
            odd |= !(of_s[half] <= FAR_UNIT);  // also NaN
        }
        auto numbers = [&](int which, int column) {  // addressed so; by stages of BYTES_NUMBERS ptxas spilled three times as much
            return load_floats(base + AT_NUMBERS + (3 * stage + which) * (4 * BLOCK) + 4 * column);
        };
        auto weigh_tile = [&](auto whole) {
#pragma unroll
            for (int i = 0; i < BLOCK / 8; ++i) {
                const int column = 8 * i + threadIdx.x % 4 * 2;
                float2 lse{};
                if constexpr (!OF_QUERIES) lse = numbers(0, column);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int half = e / 2, row = first + row_of_lane(half), other = tile * BLOCK + column + e % 2;
                    float& x = s[4 * i + e];
                    x = weigh<decltype(whole)::value>(p, at, h, OF_QUERIES ? row : other, OF_QUERIES ? other : row, x, of_s[half],
                                                      OF_QUERIES ? lse_of[half] : e % 2 ? lse.y : lse.x,
                                                      slope[HAS_SCORE ? 4 * i + e : 0]);
                }
            }
        };
        if (state == FULL) weigh_tile(Constant<true>{});
        else weigh_tile(Constant<false>{});
        wgmma_wait<0>();
        fence_operand(dp);
        float top_p[2] = {}, top_ds[2] = {};
#pragma unroll
        for (int i = 0; i < BLOCK / 8; ++i) {
            const int column = 8 * i + threadIdx.x % 4 * 2;
            float2 delta{}, unit{column_2, column_2};
            if constexpr (!OF_QUERIES) delta = numbers(1, column), unit = numbers(2, column);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int half = e / 2, row = first + row_of_lane(half), other = tile * BLOCK + column + e % 2;
                const int query = OF_QUERIES ? row : other, key = OF_QUERIES ? other : row;
                const float of_other = e % 2 ? unit.y : unit.x;
                float &w = s[4 * i + e], &x = dp[4 * i + e];
                x = dropped(x * (OF_QUERIES ? of_other : unit_2[half] * of_other), p, at, h, query, key);
                x = w * (x - (OF_QUERIES ? delta_of[half] : e % 2 ? delta.y : delta.x));
                if constexpr (HAS_SCORE) x *= slope[4 * i + e];
                top_ds[half] = fmaxf(top_ds[half], fabsf(x));
                if constexpr (!OF_QUERIES) {
                    w = dropped(w, p, at, h, query, key) * of_other;
                    top_p[half] = fmaxf(top_p[half], w);
                }
            }
        }
        Weights p_terms, ds_terms;
        float unit_p[2], unit_ds[2];
        auto take_ds = [&] { ds_terms.take(dp, top_ds, unit_ds); };
        if constexpr (OF_QUERIES) {
            take_ds();
        } else {  // the units of dO are in the weights
            p_terms.take(s, top_p, unit_p);
            add_slices<HEAD_DIM_V>(p_terms, b2, unit_p, sums_2, take_ds);
        }
        const float back[2] = {unit_ds[0] * column_1, unit_ds[1] * column_1};
        add_slices<HEAD_DIM>(ds_terms, b1, back, sums_1, [] {});
        ring.consumer_release(n);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
fp16x2_backward(KERNEL_PARAMS, const __grid_constant__ TensorMap a1, const __grid_constant__ TensorMap a2,
                      const __grid_constant__ TensorMap b1, const __grid_constant__ TensorMap b2) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        Pipeline<STAGES>{base + AT_RING, base + AT_RING + 8 * STAGES}.init(1, 4 * MMA_WARPGROUPS);
        Pipeline<ROW_BUFFERS>{base + AT_ROWS_RING, base + AT_ROWS_RING + 8 * ROW_BUFFERS}.init(1, 4 * MMA_WARPGROUPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == 0) load(p, a1, a2, b1, b2, base, *reinterpret_cast<TileList*>(shared + AT_LIST));
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consumer(p, base, role - 1);
    }
}
