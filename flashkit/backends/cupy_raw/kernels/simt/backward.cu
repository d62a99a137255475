// Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on the ordinary arithmetic units: weights
// recomputed from the log-sum-exp.
//
// Two passes, each of which owns what it sums, so nothing is added atomically and the bits never change: `keys` takes a
// tile of keys and goes over the queries that see it, for dK and dV; `queries` takes a tile of queries and goes over
// its keys, for dQ. That costs seven products instead of five.
//
//     keys:     S^T, dP^T, P^T, dS^T [BLOCK_K][BLOCK_Q];  dK [BLOCK_K][HEAD_DIM], dV [BLOCK_K][HEAD_DIM_V]
//     queries:  S, dP, dS [BLOCK_Q][BLOCK_K];             dQ [BLOCK_Q][HEAD_DIM]
//
// BACKWARD_KEYS says which of the two this text is compiled to: each has a tile of its own.
#include "simt/tile.cuh"

constexpr int ROWS = BACKWARD_KEYS ? BLOCK_K : BLOCK_Q, COLUMNS = BACKWARD_KEYS ? BLOCK_Q : BLOCK_K;
constexpr int ROWS_EACH = ROWS / TY, COLUMNS_EACH = COLUMNS / TX;
constexpr int WIDTH = sums_pitch(HEAD_DIM) / TX, WIDTH_V = sums_pitch(HEAD_DIM_V) / TX;

template <int N>
DEVICE void clear(fk_float (&sums)[ROWS_EACH][N]) {
#pragma unroll
    for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
        for (int c = 0; c < N; ++c) sums[i][c] = 0;
}

// Scores s (unscaled) to weights, and dP to dS, times the scale and the slope of the score modification. A weight of 0
// has a gradient of 0, whatever dP is.
DEVICE void weights_and_gradients(const Params& p, int state, fk_float (&s)[ROWS_EACH][COLUMNS_EACH],
                                  fk_float (&dp)[ROWS_EACH][COLUMNS_EACH], long long b, long long h, long long row0,
                                  long long k0, long long n_k) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    fk_float slope[ROWS_EACH][COLUMNS_EACH];
#pragma unroll
    for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_EACH; ++j) s[i][j] *= (fk_float)p.softmax_scale;
    modify_tile<ROWS, COLUMNS, BACKWARD_KEYS, true>(p, state, s, slope, b, h, row0, p.n_q, k0, n_k);
    if constexpr (HAS_DROPOUT) drop_tile<ROWS, COLUMNS, BACKWARD_KEYS>(p, dp, b, h, row0, k0);
    constexpr int QUERIES_EACH = BACKWARD_KEYS ? COLUMNS_EACH : ROWS_EACH;
    fk_float shift[QUERIES_EACH], delta[QUERIES_EACH];
#pragma unroll
    for (int x = 0; x < QUERIES_EACH; ++x) {
        const long long row = row0 + (BACKWARD_KEYS ? tx + x * TX : ty + x * TY);
        shift[x] = row < p.n_q ? *row_at<const fk_float>(p.bwd_lse, b, h, row) : INFINITE;
        delta[x] = row < p.n_q ? *row_at<const fk_float>(p.delta, b, h, row) : (fk_float)0;
    }
#pragma unroll
    for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS_EACH; ++j) {
            const int x = BACKWARD_KEYS ? j : i;
            s[i][j] = weight_of((s[i][j] - shift[x]) * LOG2E);
            fk_float gradient = s[i][j] * (dp[i][j] - delta[x]) * (fk_float)p.softmax_scale;
            if constexpr (HAS_SCORE) gradient *= slope[i][j];
            dp[i][j] = s[i][j] == 0 ? (fk_float)0 : gradient;
        }
}

// dK and dV of one tile of keys.
DEVICE void keys_tile(const Params& p, fk_float* stages, fk_float* weights) {
    const long long heads_kv = p.heads / GQA_GROUP;
    const long long head_kv = blockIdx.x % heads_kv, b = blockIdx.x / heads_kv % p.batch;
    const long long k0 = blockIdx.x / (heads_kv * p.batch) * BLOCK_K, n_k = keys_of(p, b);
    const long long k1 = k0 + BLOCK_K < n_k ? k0 + BLOCK_K : n_k;
    const Rows k = rows_of(p.k, b, head_kv, k0, n_k, BLOCK_K), v = rows_of(p.v, b, head_kv, k0, n_k, BLOCK_K);

#pragma unroll 1
    for (int careful = 0; careful < 2; ++careful) {
        fk_float dk[ROWS_EACH][WIDTH], dv[ROWS_EACH][WIDTH_V];
        clear(dk);
        clear(dv);
        for (long long h = head_kv * GQA_GROUP; h < (head_kv + 1) * GQA_GROUP && k0 < n_k; ++h) {
            TileWalk<BLOCK_Q, false> walk(p, b, h, k0, k1, p.n_q);
#pragma unroll 1
            while (walk.next()) {
                const long long row0 = walk.tile * BLOCK_Q;
                const Rows q = rows_of(p.q, b, h, row0, p.n_q, BLOCK_Q), dout = rows_of(p.dout, b, h, row0, p.n_q, BLOCK_Q);
                fk_float s[ROWS_EACH][COLUMNS_EACH], dp[ROWS_EACH][COLUMNS_EACH];
                scores<ROWS, COLUMNS, HEAD_DIM>(k, q, s, stages);
                scores<ROWS, COLUMNS, HEAD_DIM_V>(v, dout, dp, stages);
                weights_and_gradients(p, walk.state, s, dp, b, h, row0, k0, n_k);
                if constexpr (HAS_DROPOUT) drop_tile<ROWS, COLUMNS, true>(p, s, b, h, row0, k0);
                store_weights<ROWS, COLUMNS>(s, weights);
                accumulate<ROWS, COLUMNS, HEAD_DIM_V>(weights, dout, dv, stages, careful);
                __syncthreads();
                store_weights<ROWS, COLUMNS>(dp, weights);
                accumulate<ROWS, COLUMNS, HEAD_DIM>(weights, q, dk, stages, careful);
            }
        }
        fk_float one[ROWS_EACH];
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i) one[i] = 1;
        // Keys past a sequence's length take part in nothing and get 0.
        const bool finite = store_sums<ROWS, HEAD_DIM>(dk, one, p.dk, b, head_kv, k0, p.n_k) &
                            store_sums<ROWS, HEAD_DIM_V>(dv, one, p.dv, b, head_kv, k0, p.n_k);
        if (!__syncthreads_or(!finite)) break;
    }
}

// dQ of one tile of queries.
DEVICE void queries_tile(const Params& p, fk_float* stages, fk_float* weights) {
    const long long tiles = (p.n_q + BLOCK_Q - 1) / BLOCK_Q;
    const long long h = blockIdx.x % p.heads, b = blockIdx.x / p.heads % p.batch, head_kv = h / GQA_GROUP;
    const long long row0 = (tiles - 1 - blockIdx.x / (p.heads * p.batch)) * BLOCK_Q, n_k = keys_of(p, b);
    const long long row1 = row0 + BLOCK_Q < p.n_q ? row0 + BLOCK_Q : p.n_q;
    const Rows q = rows_of(p.q, b, h, row0, p.n_q, BLOCK_Q), dout = rows_of(p.dout, b, h, row0, p.n_q, BLOCK_Q);

#pragma unroll 1
    for (int careful = 0; careful < 2; ++careful) {
        fk_float dq[ROWS_EACH][WIDTH];
        clear(dq);
        TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_k);
#pragma unroll 1
        while (walk.next()) {
            const long long k0 = walk.tile * BLOCK_K;
            const Rows k = rows_of(p.k, b, head_kv, k0, n_k, BLOCK_K);
            fk_float s[ROWS_EACH][COLUMNS_EACH], dp[ROWS_EACH][COLUMNS_EACH];
            scores<ROWS, COLUMNS, HEAD_DIM>(q, k, s, stages);
            scores<ROWS, COLUMNS, HEAD_DIM_V>(dout, rows_of(p.v, b, head_kv, k0, n_k, BLOCK_K), dp, stages);
            weights_and_gradients(p, walk.state, s, dp, b, h, row0, k0, n_k);
            store_weights<ROWS, COLUMNS>(dp, weights);
            accumulate<ROWS, COLUMNS, HEAD_DIM>(weights, k, dq, stages, careful);
        }
        fk_float one[ROWS_EACH];
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i) one[i] = 1;
        const bool finite = store_sums<ROWS, HEAD_DIM>(dq, one, p.dq, b, h, row0, p.n_q);
        if (!__syncthreads_or(!finite)) break;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) simt_backward(KERNEL_PARAMS) {
    extern __shared__ __align__(16) unsigned char shared[];
    fk_float* stages = reinterpret_cast<fk_float*>(shared);
    constexpr int WIDEST = BACKWARD_KEYS ? larger(HEAD_DIM, HEAD_DIM_V) : HEAD_DIM;  // of what is summed up
    fk_float* weights = stages + 2 * stage_size(ROWS, COLUMNS, WIDEST);
    if constexpr (BACKWARD_KEYS) keys_tile(p, stages, weights);
    else queries_tile(p, stages, weights);
}
