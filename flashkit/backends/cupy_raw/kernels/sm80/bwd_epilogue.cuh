// How a block of the backward pass ends, and the kernel after it that rounds the sums of dQ (sm80_backward.cu). Where one is
// not finite, it is made once more, from memory and pair by pair, as weights of 0 may have met what is not finite.
#pragma once

enum Gradient { DQ, DK, DV };

template <int DIM>
DEVICE float dot(const storage* x, const storage* y) {
    float total = 0;
#pragma unroll 1
    for (int d = 0; d < DIM; ++d) total = fmaf((float)widen(x[d]), (float)widen(y[d]), total);
    return total;
}

// The weight of a pair after dropout, or the gradient of its product.
template <Gradient WHICH>
DEVICE float pair(const Params& p, int b, int h, int query, int key) {
    const long long q = query + offset_of(p, b);
    const float s = dot<HEAD_DIM>(row_at<storage>(p.q, b, h, query), row_at<storage>(p.k, b, h / GQA_GROUP, key)) * (float)p.softmax_scale;
    const float lse = *row_at<float>(p.bwd_lse, b, h, query), x = modify<true>(s, b, h, query, q, key, p);
    const float w = x == HIDDEN ? 0.0f : exp2_fast((x - lse) * LOG2E);
    if (w == 0) return 0;
    if constexpr (WHICH == DV) return HAS_DROPOUT ? drop(w, p, b, h, query, key) : w;
    float dp = dot<HEAD_DIM_V>(row_at<storage>(p.dout, b, h, query), row_at<storage>(p.v, b, h / GQA_GROUP, key));
    if constexpr (HAS_DROPOUT) dp = drop(dp, p, b, h, query, key);
    const float slope = HAS_SCORE ? (float)score_slope(s, b, h, query, q, key, p) : 1.0f;
    return w * slope * (dp - *row_at<float>(p.delta, b, h, query));
}

// Columns first ... of one row, leaving out what meets a 0. By a warp. head: of queries for dQ, else of keys.
template <Gradient WHICH>
DEVICE void once_more(const Params& p, int b, int head, int row, int first, int columns, float factor) {
    constexpr int DIM = WHICH == DV ? HEAD_DIM_V : HEAD_DIM, HEADS = WHICH == DQ ? 1 : GQA_GROUP;
    const Tensor& target = WHICH == DQ ? p.dq : WHICH == DK ? p.dk : p.dv;
    const Tensor& other = WHICH == DQ ? p.k : WHICH == DK ? p.q : p.dout;
    const int lane = threadIdx.x % 32, n = WHICH == DQ ? (int)keys_of(p, b) : (int)p.n_q;
#pragma unroll 1
    for (int c = lane; c - lane < columns; c += 32) {
        const bool exists = c < columns && first + c < DIM;
        float total = 0;
#pragma unroll 1
        for (int h = head * HEADS; h < (head + 1) * HEADS; ++h)
#pragma unroll 1
            for (int start = 0; start < n; start += 32) {
                const int own = start + lane < n ? start + lane : n - 1;
                const float mine = pair<WHICH>(p, b, h, WHICH == DQ ? row : own, WHICH == DQ ? own : row);
#pragma unroll 1
                for (int i = 0; i < 32 && start + i < n; ++i) {
                    const float w = __shfl_sync(~0u, mine, i);
                    const storage* x = row_at<storage>(other, b, WHICH == DQ ? h / GQA_GROUP : h, start + i);
                    if (w != 0 && exists) total = fmaf(w, (float)widen(x[first + c]), total);
                }
            }
        if (exists) row_at<storage>(target, b, head, row)[first + c] = narrow(total * factor);
    }
}

// dK or dV, through the shared memory of what was multiplied.
template <Gradient WHICH, int DIM, int COLUMNS>
DEVICE void store_keys(const Params& p, const Tensor& tensor, const Place& at, int head, float (&x)[KV_TILES][COLUMNS][4],
                       float factor, unsigned char* shared) {
    constexpr int ACROSS = WARPS / WARPS_KV, STAGED = 8 * larger(K_COLUMNS, V_COLUMNS), BYTES = 16 * KV_TILES * pitch(STAGED);
    static_assert(WARPS * BYTES <= AT_LIST, "all warps' keys fit");
    const int warp = threadIdx.x / 32, k0 = at.k0 + warp / ACROSS * 16 * KV_TILES, first = warp % ACROSS * COLUMNS * 8;
#pragma unroll
    for (int i = 0; i < 2 * KV_TILES; ++i) {  // keys past a sequence's length
        if (k0 + 8 * i + (int)threadIdx.x % 32 / 4 < at.n_k) continue;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) x[i / 2][n][i % 2 * 2] = x[i / 2][n][i % 2 * 2 + 1] = 0;
    }
    store_tile<DIM, STAGED>(x, factor, shared + warp * BYTES, 0, first, Rows<>(tensor, at.b, head), k0, (int)p.n_k);
    if constexpr (MAY_HIDE) {
        bool odd = false;
#pragma unroll
        for (int i = 0; i < KV_TILES * COLUMNS * 4; ++i) odd |= !is_finite(x[i / COLUMNS / 4][i / 4 % COLUMNS][i % 4]);
        if (__any_sync(~0u, odd)) {
            __syncwarp();  // all have stored
#pragma unroll 1
            for (int key = k0; key < k0 + 16 * KV_TILES && key < at.n_k; ++key) once_more<WHICH>(p, at.b, head, key, first, 8 * COLUMNS, factor);
        }
    }
}

// Eight columns of two rows of a tile's sums of dQ, which lie as the warps hold them: what four lanes had that shared these rows.
struct Eights {
    int row, column;  // of the upper row; the lower is 8 further
    float x[2][8];

    __device__ __forceinline__ Eights(const float* sums, int i, float scale) {
        const int n = i % Q_COLUMNS, g = i / Q_COLUMNS % 8, j = i / Q_COLUMNS / 8 % Q_TILES, warp = i / Q_COLUMNS / 8 / Q_TILES;
        row = (warp / (WARPS / WARPS_Q) * Q_TILES + j) * 16 + g, column = (warp % (WARPS / WARPS_Q) * Q_COLUMNS + n) * 8;
        const float4* four = reinterpret_cast<const float4*>(sums + ((warp * Q_TILES + j) * Q_COLUMNS + n) * 128) + 4 * g;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float4 y = four[t];
            x[0][2 * t] = y.x * scale, x[0][2 * t + 1] = y.y * scale;
            x[1][2 * t] = y.z * scale, x[1][2 * t + 1] = y.w * scale;
        }
    }
    __device__ __forceinline__ bool odd() const {
        bool odd = false;
#pragma unroll
        for (int c = 0; c < 16; ++c) odd |= !is_finite(x[c / 8][c % 8]);
        return odd;
    }
};

// The sums of dQ to dq. A block takes a tile.
extern "C" __global__ void __launch_bounds__(256, 6) bwd_postprocess(KERNEL_PARAMS) {
    const int tiles = (int)((p.n_q + BLOCK_Q - 1) / BLOCK_Q);
    const int tile = blockIdx.x % tiles, h = blockIdx.x / tiles % (int)p.heads, b = blockIdx.x / tiles / (int)p.heads;
    const float* sums = row_at<const float>(p.dq_accum, b, h, tile);
    const float scale = (float)p.softmax_scale;
    constexpr int EIGHTS = BLOCK_Q * padded(HEAD_DIM) / 16;
    bool odd = false;
#pragma unroll 2
    for (int i = threadIdx.x; i < EIGHTS; i += 256) {
        const Eights each(sums, i, scale);
        if constexpr (MAY_HIDE) odd |= each.odd();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile * BLOCK_Q + each.row + 8 * half;
            if (row < p.n_q) store_eight<HEAD_DIM>(row_at<storage>(p.dq, b, h, row), each.column, each.x[half]);
        }
    }
    if (!MAY_HIDE || !__syncthreads_or(odd)) return;
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < EIGHTS; i += 8) {  // by warps
        const Eights each(sums, i, scale);
        if (!each.odd()) continue;
#pragma unroll 1
        for (int row = tile * BLOCK_Q + each.row, last = row + 8; row <= last && row < (int)p.n_q; row += 8)
            once_more<DQ>(p, b, h, row, each.column, 8, scale);
    }
}
