// Backward pass in float32 by products of float16 terms (sm90_float32.cuh says how numbers become terms): one gradient of
// three, OF, in a kernel of its own. Each owns what it sums, so the bits are the same every time; eight products instead of
// five, since two gradients of the width of a head, each with sums of a tile beside those of all, do not fit in registers.
//
//     OF        rows        A1, A2     columns     B1, B2     weights W                        sums
//     DQ   of queries  Q, dO      of keys     K, V       dS   = P * (dO V^T - delta)      dQ += dS   K
//     DK      of keys     K, V       of queries  Q, dO      dS^T                             dK += dS^T Q
//     DV    of keys     K          of queries  Q, dO      P^T                              dV += P^T  dO
//
// A block takes 128 rows of a head, for keys of all query heads of the group, and goes over the tiles of columns.
//
//     A1, A2      [GROUPS][64][..]        shared memory, as terms
//     B1, B2      [STAGES][BLOCK][..]     shared memory, a ring
//     S, dP, W    [64][BLOCK]             registers of a warp group
//     sums, part  [64][COLUMNS]           registers: ordinary sums, and those of wgmma for one tile
//
// Warp 0 finds the tiles and loads them, warp groups 1 and 2 multiply. dS may be of any magnitude: each row of a tile has a
// unit of its own, which is put back with the unit of B when the tile's sums are added.
//
// Constants of the head: OF, BLOCK, STAGES, PARTS, WATCHDOG.
#include "sm90.cuh"

enum Gradient { DQ, DK, DV };
constexpr int GROUPS = 2, THREADS = 128 * (GROUPS + 1), ROWS = 64 * GROUPS;
constexpr bool OF_QUERIES = OF == DQ, WITH_DP = OF != DV;
constexpr int DIM = OF == DV ? HEAD_DIM_V : HEAD_DIM, COLUMNS = padded(DIM);
constexpr int CHUNKS_1 = PARTS * chunks(HEAD_DIM), CHUNKS_2 = PARTS * chunks(HEAD_DIM_V);
constexpr int BYTES_A1 = 64 * CHUNK_ROW * CHUNKS_1, BYTES_A2 = WITH_DP ? 64 * CHUNK_ROW * CHUNKS_2 : 0;
constexpr int BYTES_B1 = BLOCK * CHUNK_ROW * CHUNKS_1, BYTES_B2 = BLOCK * CHUNK_ROW * CHUNKS_2;
constexpr int AT_A2 = GROUPS * BYTES_A1, AT_B1 = AT_A2 + GROUPS * BYTES_A2, AT_B2 = AT_B1 + STAGES * BYTES_B1;
constexpr int AT_ROWS = AT_B2 + STAGES * BYTES_B2, AT_RING = AT_ROWS + 8, AT_NOTES = AT_RING + 16 * STAGES;
constexpr int AT_LIST = AT_NOTES + 8 * STAGES;  // notes: tile << 2 | state; query head
constexpr int END = -1;
constexpr float FAR_UNIT = 1.2089258e24f, LEAST_UNIT = 1.1754944e-38f, TOP = 16384;  // 2^80; 2^-126; of weights

#include "sm90_terms.cuh"

template <int VALUE> struct Number { static constexpr int value = VALUE; };  // for generic lambdas

// A block's rows: first, of how many.
struct Place { int b, h, row0, rows, n_k; long long offset; };  // h: of queries, or of keys

DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

// --- loading ----------------------------------------------------------------------------------------------------------

DEVICE void load(const Params& p, const Place& at, const TensorMap& a1, const TensorMap& a2, const TensorMap& b1,
                 const TensorMap& b2, unsigned base, TileList& list) {
    const Ring<STAGES> ring{base + AT_RING, base + AT_RING + 8 * STAGES};
    const bool leader = threadIdx.x == 0;
    const int columns = OF_QUERIES ? at.n_k : (int)p.n_q, tiles = (columns + BLOCK - 1) / BLOCK;
    const int end = at.row0 + ROWS < at.rows ? at.row0 + ROWS : at.rows;
    if (leader) {
        arrive_and_expect(base + AT_ROWS, GROUPS * (BYTES_A1 + BYTES_A2));
#pragma unroll 1
        for (int g = 0; g < GROUPS; ++g) {
            load_tile<1, CHUNKS_1, 64>(base + g * BYTES_A1, a1, at.row0 + 64 * g, at.h, at.b, base + AT_ROWS);
            if (WITH_DP) load_tile<1, CHUNKS_2, 64>(base + AT_A2 + g * BYTES_A2, a2, at.row0 + 64 * g, at.h, at.b, base + AT_ROWS);
        }
    }
    unsigned n = 0;
    auto note = [&](int first, int second) {
        ring.wait_empty(n);
        store_word(base + AT_NOTES + 8 * (n % STAGES), first), store_word(base + AT_NOTES + 8 * (n % STAGES) + 4, second);
    };
    const int heads = OF_QUERIES ? 1 : GROUP;
#pragma unroll 1
    for (int i = 0; i < heads && at.row0 < end; ++i) {
        const int h = OF_QUERIES ? at.h : at.h * GROUP + i, head = OF_QUERIES ? at.h / GROUP : h;
        auto look = [&](int place, int many) {
            const int from = place * BLOCK, whole = from + many * BLOCK, to = whole < columns ? whole : columns;
            const int state = OF_QUERIES ? tile_state(p, at.b, h, at.offset, at.row0, end, from, to)
                                         : tile_state(p, at.b, h, at.offset, from, to, at.row0, end);
            return (unsigned)(state == FULL && (whole > columns || at.row0 + ROWS > at.rows) ? (int)PARTIAL : state);
        };
        int next = 0;
        unsigned seen;
#pragma unroll 1
        for (int count; (count = fill(list, next, tiles, seen, look)) > 0;) {
            if (leader) {
#pragma unroll 1
                for (int e = 0; e < count; ++e, ++n) {
                    const int tile = list.entry[e] >> 8, stage = n % STAGES;
                    const unsigned full = ring.full + 8 * stage;
                    note(tile << 2 | (list.entry[e] & 3), h);
                    arrive_and_expect(full, BYTES_B1 + BYTES_B2);
                    load_tile<1, CHUNKS_1, BLOCK>(base + AT_B1 + stage * BYTES_B1, b1, tile * BLOCK, head, at.b, full);
                    load_tile<1, CHUNKS_2, BLOCK>(base + AT_B2 + stage * BYTES_B2, b2, tile * BLOCK, head, at.b, full);
                }
            }
        }
    }
    if (leader) note(END, 0), arrive(ring.full + 8 * (n % STAGES));
}

// --- pairs ------------------------------------------------------------------------------------------------------------

// A score as it comes, scaled, and dP to a weight W. In base 2; lse, delta: of the query.
DEVICE float weigh(const Params& p, const Place& at, int h, int query, int key, bool full, float x, float dp, float lse, float delta) {
    if (query >= (int)p.n_q || key >= at.n_k) return 0;
    float slope = 1;
    if constexpr (HAS_SCORE) slope = score_slope(x, at.b, h, query, query + at.offset, key, p);
    if constexpr (HAS_SCORE || HAS_MASK)
        if (HAS_SCORE || !full) x = modify<true>(x, at.b, h, query, query + at.offset, key, p);
    if (x == HIDDEN) return 0;
    const float w = exp2_fast(fmaf(x, HAS_SCORE ? LOG2E : 1.0f, -lse));
    if (!WITH_DP) return HAS_DROPOUT ? drop(w, p, at.b, h, query, key) : w;
    if constexpr (HAS_DROPOUT) dp = drop(dp, p, at.b, h, query, key);
    return w == 0 ? 0.0f : w * slope * (dp - delta);
}

// The gradients of a warp's 16 rows from memory, on the ordinary units, leaving out weights that are 0.
DEVICE void rows_carefully(const Params& p, const Place& at, int first, float (&sums)[COLUMNS / 2]) {
    const int lane = threadIdx.x % 32, columns = OF_QUERIES ? at.n_k : (int)p.n_q;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0;
#pragma unroll 1
    for (int i = 0; i < (OF_QUERIES ? 1 : GROUP); ++i) {
        const int h = OF_QUERIES ? at.h : at.h * GROUP + i, head = OF_QUERIES ? at.h / GROUP : at.h;
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
                for (int d = 0; WITH_DP && d < HEAD_DIM_V; ++d) dp = fmaf(dout[d], v[d], dp);
                const float lse = *row_at<const float>(p.shift, at.b, h, query) * LOG2E, delta = *row_at<const float>(p.delta, at.b, h, query);
                const float scale = (float)(HAS_SCORE ? p.scale : p.scale * 1.4426950408889634);
                const float w = own_column < columns ? weigh(p, at, h, query, key, false, s * scale, dp, lse, delta) : 0.0f;
#pragma unroll 1
                for (int other = 0; other < 4; ++other) {
                    const float weight = __shfl_sync(~0u, w, (lane & 28) + other);
                    const int from = c0 + other < columns ? c0 + other : columns - 1;
                    const storage* b = OF == DQ ? row_at<const storage>(p.k, at.b, head, from)
                                     : OF == DK ? row_at<const storage>(p.q, at.b, h, from) : row_at<const storage>(p.dout, at.b, h, from);
                    if (weight != 0) {
#pragma unroll
                        for (int e = 0; e < COLUMNS / 4; ++e) {
                            const int column = e / 2 * 8 + lane % 4 * 2 + e % 2;
                            if (column < DIM) sums[e / 2 * 4 + 2 * half + e % 2] += weight * b[column];
                        }
                    }
                }
            }
        }
    }
}

// --- multiplying ------------------------------------------------------------------------------------------------------

DEVICE void multiply_tiles(const Params& p, const Place& at, unsigned base, int group) {
    const Ring<STAGES> ring{base + AT_RING, base + AT_RING + 8 * STAGES};
    const float scale = __int_as_float(uniform(__float_as_int((float)(HAS_SCORE ? p.scale : p.scale * 1.4426950408889634))));
    const int first = at.row0 + 64 * group;
    float sums[COLUMNS / 2], part[COLUMNS / 2], s[BLOCK / 2], dp[BLOCK / 2], unit_1[2], unit_2[2], lse_of[2] = {}, delta_of[2] = {};
    unsigned high[BLOCK / 4], low[BLOCK / 4];
    bool odd = false;
    const Tensor& units_1 = OF_QUERIES ? p.q_unit : p.k_unit;
    const Tensor& units_2 = OF_QUERIES ? p.dout_unit : p.v_unit;
    const Tensor& columns_1 = OF_QUERIES ? p.k_unit : p.q_unit;
    const Tensor& columns_2 = OF_QUERIES ? p.v_unit : p.dout_unit;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = first + row_of_lane(half), row = own < at.rows ? own : larger(at.rows - 1, 0);
        unit_1[half] = *row_at<const float>(units_1, at.b, at.h, row / BLOCK);
        unit_2[half] = *row_at<const float>(units_2, at.b, at.h, row / BLOCK);
        if (OF_QUERIES) {
            lse_of[half] = *row_at<const float>(p.shift, at.b, at.h, row) * LOG2E;
            delta_of[half] = *row_at<const float>(p.delta, at.b, at.h, row);
        }
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = 0;
    wait(base + AT_ROWS, 0);
    // X = A B^T by terms; a step is 16 of the summed columns, low parts lie `low_a` and `low_b` further.
    auto multiply_rows = [&](float (&x)[BLOCK / 2], auto dim, unsigned a_at, unsigned b_at) {
        constexpr int STEPS = padded(decltype(dim)::value) / 16, LOW = 4 * chunks(decltype(dim)::value);
        const unsigned long long a = descriptor(a_at), b = descriptor(b_at);
        auto terms = [&](unsigned long long a, unsigned long long b, bool fresh) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                if (fresh && step == 0) product_fresh<0, 0>(x, a, b);
                else product<0, 0>(x, a + along_rows(step, 64), b + along_rows(step, BLOCK), 1);
            }
        };
        if constexpr (PARTS == 2) terms(a + along_rows(LOW, 64), b, true), terms(a, b + along_rows(LOW, BLOCK), false);
        terms(a, b, PARTS == 1);
    };

#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        ring.wait_full(n);
        const unsigned stage = n % STAGES;
        const int note = uniform(load_word(base + AT_NOTES + 8 * stage)), h = uniform(load_word(base + AT_NOTES + 8 * stage + 4));
        if (note == END) break;
        const int tile = note >> 2, head = OF_QUERIES ? at.h / GROUP : h;
        const bool full = (note & 3) == FULL;
        const unsigned b1 = base + AT_B1 + stage * BYTES_B1, b2 = base + AT_B2 + stage * BYTES_B2;
        products_begin();
        multiply_rows(s, Number<HEAD_DIM>{}, base + group * BYTES_A1, b1);
        if constexpr (WITH_DP) multiply_rows(dp, Number<HEAD_DIM_V>{}, base + AT_A2 + group * BYTES_A2, b2);
        products_end();
        const float column_1 = *row_at<const float>(columns_1, at.b, head, tile), column_2 = *row_at<const float>(columns_2, at.b, head, tile);
        products_wait<0>();
        settle(s);
        if constexpr (WITH_DP) settle(dp);
        float back[2];  // what 1 stands for in the sums of this tile
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float of_s = fmaxf(unit_1[half] * column_1 * scale, LEAST_UNIT), of_dp = unit_2[half] * column_2;
            // NaN, which fmaxf drops, is asked for before.
            odd |= !(unit_1[half] * column_1 * scale <= FAR_UNIT && column_2 <= FAR_UNIT && column_1 <= FAR_UNIT && (!WITH_DP || of_dp <= FAR_UNIT));
            const int row = first + row_of_lane(half);
            float top = 0;
#pragma unroll
            for (int i = 0; i < BLOCK / 8; ++i) {
                const int column = tile * BLOCK + 8 * i + threadIdx.x % 4 * 2;
                float2 lse{lse_of[half], lse_of[half]}, delta{delta_of[half], delta_of[half]};
                if (!OF_QUERIES) {  // there is memory for whole tiles of rows
                    lse = *reinterpret_cast<const float2*>(row_at<const float>(p.shift, at.b, h, column));
                    lse.x *= LOG2E, lse.y *= LOG2E;
                    if (WITH_DP) delta = *reinterpret_cast<const float2*>(row_at<const float>(p.delta, at.b, h, column));
                }
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int e = 4 * i + 2 * half + c, query = OF_QUERIES ? row : column + c, key = OF_QUERIES ? column + c : row;
                    s[e] = weigh(p, at, h, query, key, full, s[e] * of_s, WITH_DP ? dp[e] * of_dp : 0.0f, c ? lse.y : lse.x, c ? delta.y : delta.x);
                    top = fmaxf(top, fabsf(s[e]));
                    odd |= s[e] != s[e];
                }
            }
            top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
            const float unit = WITH_DP || HAS_DROPOUT ? unit_of(__float_as_uint(top)) : 1 / TOP;
            odd |= !(unit <= FAR_UNIT);
            const float inverse = WITH_DP || HAS_DROPOUT ? inverse_of(unit) : TOP;
            back[half] = unit * (OF == DV ? column_2 : column_1);
#pragma unroll
            for (int i = 0; i < BLOCK / 4; ++i) s[i / 2 * 4 + 2 * half + i % 2] *= inverse;
        }
#pragma unroll
        for (int i = 0; i < BLOCK / 4; ++i) split(s[2 * i], s[2 * i + 1], high[i], low[i]);
        const unsigned long long b = descriptor(OF == DV ? b2 : b1, BLOCK * CHUNK_ROW);
        auto terms = [&](const unsigned (&weights)[BLOCK / 4], unsigned long long b, bool fresh) {
#pragma unroll
            for (int step = 0; step < BLOCK / 16; ++step)
                product_weights<1>(part, weights, 4 * step, b + along_columns(step), fresh && step == 0 ? 0 : 1);
        };
        products_begin();
        if constexpr (PARTS == 2) terms(low, b, true), terms(high, b + (chunks(DIM) * BLOCK * CHUNK_ROW >> 4), false);
        terms(high, b, PARTS == 1);
        products_end();
        products_wait<0>();
        settle(part), settle(high);
        if constexpr (PARTS == 2) settle(low);
        ring.release(n);
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] = fmaf(part[i], back[i / 2 % 2], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) odd |= !is_finite(sums[i]);
    if (__any_sync(~0u, odd)) rows_carefully(p, at, first + threadIdx.x % 128 / 32 * 16, sums);
    const Tensor& gradient = OF == DQ ? p.dq : OF == DK ? p.dk : p.dv;
    const float factor = OF == DV ? 1.0f : (float)p.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first + row_of_lane(half);
        float* target = row_at<float>(gradient, at.b, at.h, row);
#pragma unroll
        for (int e = 0; e < COLUMNS / 4; ++e) {
            const int column = e / 2 * 8 + threadIdx.x % 4 * 2 + e % 2;
            if (row < (OF_QUERIES ? (int)p.n_q : (int)p.n_k) && column < DIM)
                target[column] = row < at.rows ? sums[e / 2 * 4 + 2 * half + e % 2] * factor : 0.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_float32_backward(KERNEL_PARAMS, const __grid_constant__ TensorMap a1, const __grid_constant__ TensorMap a2,
                      const __grid_constant__ TensorMap b1, const __grid_constant__ TensorMap b2) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        barrier_init(base + AT_ROWS, 1);
        Ring<STAGES>{base + AT_RING, base + AT_RING + 8 * STAGES}.init(1, 4 * GROUPS);
        barriers_ready();
    }
    __syncthreads();
    const int all = OF_QUERIES ? (int)p.n_q : (int)p.n_k, tiles = (all + ROWS - 1) / ROWS, heads = (int)p.heads / (OF_QUERIES ? 1 : GROUP);
    // Of queries the last tiles, of keys the first ones see most under a causal mask: these begin first.
    const int tile = blockIdx.x / (heads * (int)p.batch), bh = blockIdx.x % (heads * (int)p.batch), b = bh / heads;
    const int n_k = (int)keys_of(p, b), row0 = (OF_QUERIES ? tiles - 1 - tile : tile) * ROWS;
    const Place at{b, bh % heads, row0, OF_QUERIES ? (int)p.n_q : n_k, n_k, offset_of(p, b)};
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        give_registers<24>();
        if (warp == 0) load(p, at, a1, a2, b1, b2, base, *reinterpret_cast<TileList*>(shared + AT_LIST));
    } else {
        take_registers<240>();
        multiply_tiles(p, at, base, role - 1);
    }
}
