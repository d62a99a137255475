// Forward pass with tangents on tensor cores by mma.sync, for 16-bit elements: six matrix products in one pass. Ampere
// and Ada use it; Hopper only for arrays that its own kernel (sm90/jvp.cu) does not take.
//
// A CTA of WARPS warps takes BLOCK_Q query rows of a head, 16 for each warp, and loops over the key tiles that the mask
// shows them. With dS the tangent of the modified scores, and sums over the keys that a row sees,
//
//     dlse = rowsum(P dS)     dO = P dS V + P dV - dlse O
//
//     Q, dQ          [BLOCK_Q][HEAD_DIM]    shared memory
//     K, dK, V, dV   [BLOCK_K][..]          shared memory, one tile; other CTAs of the SM compute while it is loaded
//     S, dS          [16][BLOCK_K]          registers of a warp; then P, P dS
//     O, dO          [16][HEAD_DIM_V]       registers, not yet divided by the row sum
//     m, l, total    [16]                   registers: row maximum in base 2, rowsum(P), rowsum(P dS)
//
// TANGENT_Q, TANGENT_K, TANGENT_V: which tangents are not 0. P and P dS are rounded to 16 bits for the products with V.
#include "sm80/layout.cuh"

extern __shared__ __align__(128) unsigned char shared[];

constexpr int THREADS = 32 * WARPS, KEYS = BLOCK_K / 8, COLUMNS = padded(HEAD_DIM_V) / 8;
constexpr bool SCORES_MOVE = TANGENT_Q || TANGENT_K;
static_assert(BLOCK_Q == 16 * WARPS && KEYS % 2 == 0 && COLUMNS % 2 == 0, "ldmatrix_x4 loads two operands");

// A masked pair has P = 0, but 0 times inf or NaN is NaN. Where O or dO is not finite though the row sum is, kernels
// without tensor cores compute all again (p.fallback).
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

// The query rows of a warp, of which a lane has two.
struct RowsOfLane {
    int b, h, first, n_q;
    __device__ __forceinline__ int at(int half) const { return first + 8 * half + threadIdx.x % 32 / 4; }
};
DEVICE int key_of_lane(int n) { return 8 * n + threadIdx.x % 4 * 2; }  // and the next

struct State {
    float o[1][COLUMNS][4], d_o[1][COLUMNS][4], m[2], l[2], total[2];
};

// S to scores in base 2, -inf where masked; dS to the tangents of modified scores.
DEVICE void modify_tile(const Params& p, const RowsOfLane& rows, int state, float (&s)[1][KEYS][4],
                        float (&ds)[1][KEYS][4], int k0, int n_k) {
    const float scale = (float)p.softmax_scale;
    const long long q_position = seq_info(p, rows.b).q_position;
    const bool edge = k0 + BLOCK_K > n_k;
    UNROLL(n, KEYS)
        UNROLL(e, 4) {
            const int row = rows.at(e / 2), k = k0 + key_of_lane(n) + e % 2;
            float& x = s[0][n][e];
            x *= scale;
            if constexpr (SCORES_MOVE) ds[0][n][e] *= scale;
            if (HAS_SCORE || state != FULL || edge) {
                if (row < rows.n_q && k < n_k) {
                    const long long q = row + q_position;
                    if constexpr (HAS_SCORE && SCORES_MOVE)
                        ds[0][n][e] *= score_slope(x, rows.b, rows.h, row, q, k, p);
                    x = state == FULL ? modify<false>(x, rows.b, rows.h, row, q, k, p)
                                      : modify<true>(x, rows.b, rows.h, row, q, k, p);
                } else {
                    x = HIDDEN;
                }
            }
            x *= LOG2E;
        }
}

// Scores to P, dS to P dS, and all sums relative to the new row maximum.
DEVICE void online_softmax(State& at, float (&s)[1][KEYS][4], float (&ds)[1][KEYS][4]) {
    float rescale[2];
    UNROLL(half, 2) {
        float top = at.m[half];
        UNROLL(n, KEYS) top = fmaxf(top, fmaxf(s[0][n][2 * half], s[0][n][2 * half + 1]));
        top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(at.m[half] - shift);
        at.m[half] = top;
        float sum = 0, total = 0;
        UNROLL(n, KEYS)
            UNROLL(c, 2) {
                float& x = s[0][n][2 * half + c];
                x = exp2_fast(x - shift);
                sum += x;
                if constexpr (SCORES_MOVE) {
                    float& dx = ds[0][n][2 * half + c];
                    dx = x == 0 ? 0.0f : x * dx;
                    total += dx;
                }
            }
        at.l[half] = fmaf(at.l[half], rescale[half], sum);
        at.total[half] = fmaf(at.total[half], rescale[half], total);
    }
    if (__all_sync(~0u, rescale[0] == 1 && rescale[1] == 1)) return;
    UNROLL(n, COLUMNS)
        UNROLL(e, 4) at.o[0][n][e] *= rescale[e / 2], at.d_o[0][n][e] *= rescale[e / 2];
}

DEVICE void drop_tile(const Params& p, const RowsOfLane& rows, float (&x)[1][KEYS][4], int k0) {
    UNROLL(half, 2)
        UNROLL(n, KEYS)
            drop_pair(x[0][n][2 * half], x[0][n][2 * half + 1], p, rows.b, rows.h, rows.at(half), k0 + key_of_lane(n));
}

// Stores O, dO, the log-sum-exp and its tangent. Returns whether the tensor cores may have made NaN of a masked pair.
DEVICE bool epilogue(const Params& p, const RowsOfLane& rows, State& at) {
    bool spoilt = false;
    UNROLL(half, 2) {
        const auto add = [](float x, float y) { return x + y; };
        const int row = rows.at(half);
        float top = at.m[half], sum = across_lanes(at.l[half], add), total = across_lanes(at.total[half], add);
        float factor = 1;
        if (HAS_SINKS) add_sink(p, rows.h, top, sum, factor);
        const bool empty = sum == 0;  // no visible key
        factor = empty ? 0.0f : factor / sum;
        total *= factor;
        float zero = 0;  // NaN if an element is not finite
        UNROLL(n, COLUMNS)
            UNROLL(c, 2) {
                float &x = at.o[0][n][2 * half + c], &dx = at.d_o[0][n][2 * half + c];
                x *= factor;
                dx = fmaf(dx, factor, -total * x);
                zero = fmaf(x, 0.0f, fmaf(dx, 0.0f, zero));
            }
        if (row >= rows.n_q) continue;
        spoilt |= zero != 0 && is_finite(sum);
        if (threadIdx.x % 4 == 0) {
            *q_row<float>(p, p.lse, rows.b, rows.h, row) = empty ? HIDDEN : fmaf(top, LN2, logf(sum));
            *q_row<float>(p, p.dlse, rows.b, rows.h, row) = total;
        }
        storage* const out = q_row<storage>(p, p.out, rows.b, rows.h, row);
        storage* const d_out = q_row<storage>(p, p.dout, rows.b, rows.h, row);
        UNROLL(n, COLUMNS) {
            store_pair<HEAD_DIM_V>(out, key_of_lane(n), at.o[0][n][2 * half], at.o[0][n][2 * half + 1]);
            store_pair<HEAD_DIM_V>(d_out, key_of_lane(n), at.d_o[0][n][2 * half], at.d_o[0][n][2 * half + 1]);
        }
    }
    return spoilt;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_jvp(KERNEL_PARAMS) {
    const int heads = (int)p.heads, entries = (int)num_entries(p), h = blockIdx.x % heads, head_kv = h / GQA_GROUP;
    const long long number = num_q_tiles(p, BLOCK_Q) - 1 - blockIdx.x / (heads * entries);  // longest first
    const SeqTile tile = q_tile(p, blockIdx.x / heads % entries, number, BLOCK_Q);
    const int b = (int)tile.b, row0 = (int)tile.tile * BLOCK_Q;
    const SeqInfo seq = seq_info(p, b);
    const int n_q = (int)seq.n_q, n_k = (int)seq.n_k;
    if (row0 >= n_q) return;
    const unsigned base = smem_address(shared);
    const unsigned own = threadIdx.x / 32 * 16 * pitch(HEAD_DIM), q = base + AT_Q + own, dq = base + AT_DQ + own;
    const RowsOfLane rows{b, h, row0 + (int)(threadIdx.x / 32) * 16, n_q};

    const Rows<> q_rows(p.q, b, h, seq.row_offset), dq_rows(TANGENT_Q ? p.dq : p.q, b, h, seq.row_offset);
    load_tile<BLOCK_Q, HEAD_DIM, THREADS>(q_rows, row0, n_q, base + AT_Q);
    if constexpr (TANGENT_Q) load_tile<BLOCK_Q, HEAD_DIM, THREADS>(dq_rows, row0, n_q, base + AT_DQ);
    const KeyRows k(p, p.k, b, head_kv), v(p, p.v, b, head_kv);
    const KeyRows dk(p, TANGENT_K ? p.dk : p.k, b, head_kv), dv(p, TANGENT_V ? p.dv : p.v, b, head_kv);
    using CopyK = TileCopy<BLOCK_K, HEAD_DIM, THREADS, KeyRows>;
    using CopyV = TileCopy<BLOCK_K, HEAD_DIM_V, THREADS, KeyRows>;

    State at;
    clear(at.o), clear(at.d_o);
    at.m[0] = at.m[1] = HIDDEN, at.l[0] = at.l[1] = at.total[0] = at.total[1] = 0;
    const int row1 = row0 + BLOCK_Q < n_q ? row0 + BLOCK_Q : n_q;
    TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_k);
#pragma unroll 1
    while (walk.next()) {
        const int k0 = (int)walk.tile * BLOCK_K;
        __syncthreads();  // all threads have finished with the tile before
        CopyK::load(k, k0, n_k, base + AT_K);
        if constexpr (TANGENT_K) CopyK::load(dk, k0, n_k, base + AT_DK);
        cp_async_commit();
        CopyV::load(v, k0, n_k, base + AT_V);
        if constexpr (TANGENT_V) CopyV::load(dv, k0, n_k, base + AT_DV);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        float s[1][KEYS][4], ds[1][KEYS][4];
        clear(s), clear(ds);
        gemm_nt<HEAD_DIM>(s, q, base + AT_K);
        if constexpr (TANGENT_Q) gemm_nt<HEAD_DIM>(ds, dq, base + AT_K);
        if constexpr (TANGENT_K) gemm_nt<HEAD_DIM>(ds, q, base + AT_DK);
        modify_tile(p, rows, walk.state, s, ds, k0, n_k);
        online_softmax(at, s, ds);
        if constexpr (HAS_DROPOUT) drop_tile(p, rows, s, k0);
        if constexpr (HAS_DROPOUT && SCORES_MOVE) drop_tile(p, rows, ds, k0);
        cp_async_wait_all();
        __syncthreads();
        gemm_rs<HEAD_DIM_V>(at.o, s, base + AT_V);
        if constexpr (SCORES_MOVE) gemm_rs<HEAD_DIM_V>(at.d_o, ds, base + AT_V);
        if constexpr (TANGENT_V) gemm_rs<HEAD_DIM_V>(at.d_o, s, base + AT_DV);
    }
    cp_async_wait_all();  // for Q, if no key tile has
    const bool spoilt = epilogue(p, rows, at);
    if constexpr (MAY_HIDE)
        if (spoilt) *p.fallback = 1;
}
