// Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on CUDA cores. P is recomputed from the
// log-sum-exp.
//
// Two kernels, each of which owns its gradients, so there are no atomics and the result is deterministic: "dkdv" takes
// a tile of keys and loops over the query tiles that see it, for dK and dV; "dq" takes a tile of query rows and loops
// over its key tiles, for dQ. That costs seven matrix products instead of five.
//
//     dkdv:   S^T, dP^T, P^T, dS^T [BLOCK_K][BLOCK_Q];  dK [BLOCK_K][HEAD_DIM], dV [BLOCK_K][HEAD_DIM_V]
//     dq:     S, dP, dS [BLOCK_Q][BLOCK_K];             dQ [BLOCK_Q][HEAD_DIM]
//
// BACKWARD_KEYS says for which of the two this text is compiled: each has a tile of its own.
#include "simt/tile.cuh"

constexpr int ROWS = BACKWARD_KEYS ? BLOCK_K : BLOCK_Q, COLUMNS = BACKWARD_KEYS ? BLOCK_Q : BLOCK_K;
constexpr int ROWS_PER_THREAD = ROWS / TY, COLUMNS_PER_THREAD = COLUMNS / TX;
constexpr int K_COLUMNS = accumulator_pitch(HEAD_DIM) / TX, V_COLUMNS = accumulator_pitch(HEAD_DIM_V) / TX;

template <int N>
DEVICE void clear(fk_float (&x)[ROWS_PER_THREAD][N]) {
    UNROLL(i, ROWS_PER_THREAD)
        UNROLL(c, N) x[i][c] = 0;
}

// S, as it comes from the product, to P, and dP to dS, which includes the scale and the slope of the score
// modification. Where P is 0 dS is 0, whatever dP is. SUMS: gradients by values of the modification are summed as well.
template <bool SUMS>
DEVICE void softmax_backward(const Params& p, int state, fk_float (&s)[ROWS_PER_THREAD][COLUMNS_PER_THREAD],
                             fk_float (&dp)[ROWS_PER_THREAD][COLUMNS_PER_THREAD], long long b, long long h,
                             long long row0, long long k0, long long n_k, ValueSums& sums) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const long long n_q = seq_info(p, b).n_q, q_position = seq_info(p, b).q_position;
    fk_float slope[ROWS_PER_THREAD][COLUMNS_PER_THREAD], before[ROWS_PER_THREAD][COLUMNS_PER_THREAD];
    scale_tile(s, (fk_float)p.softmax_scale);
#pragma unroll
    for (int i = 0; SUMS && VALUES_READ_SCORE && i < ROWS_PER_THREAD; ++i)
        UNROLL(j, COLUMNS_PER_THREAD) before[i][j] = s[i][j];
    modify_tile<ROWS, COLUMNS, BACKWARD_KEYS, true>(p, state, s, slope, b, h, row0, k0, n_k);
    if constexpr (HAS_DROPOUT) drop_tile<ROWS, COLUMNS, BACKWARD_KEYS>(p, dp, b, h, row0, k0);
    constexpr int QUERIES_PER_THREAD = BACKWARD_KEYS ? COLUMNS_PER_THREAD : ROWS_PER_THREAD;
    fk_float lse[QUERIES_PER_THREAD], delta[QUERIES_PER_THREAD];
    UNROLL(x, QUERIES_PER_THREAD) {
        const long long row = row0 + (BACKWARD_KEYS ? tx + x * TX : ty + x * TY);
        const long long stats = stats_row(p, b, row);
        lse[x] = row < n_q ? *row_at<const fk_float>(p.bwd_lse, b, h, stats) : INFINITE;
        delta[x] = row < n_q ? *row_at<const fk_float>(p.delta, b, h, stats) : (fk_float)0;
    }
    UNROLL(i, ROWS_PER_THREAD)
        UNROLL(j, COLUMNS_PER_THREAD) {
            const int x = BACKWARD_KEYS ? j : i;
            s[i][j] = softmax_exp2((s[i][j] - lse[x]) * LOG2E);
            fk_float ds = s[i][j] * (dp[i][j] - delta[x]);
            if (SUMS && s[i][j] != 0) {
                const long long row = row0 + ty + i * TY, k = k0 + tx + j * TX;
                sums.add<long long>(ds, VALUES_READ_SCORE ? before[i][j] : 0, b, h, row, row + q_position, k, p);
            }
            ds *= (fk_float)p.softmax_scale;
            if constexpr (HAS_SCORE) ds *= slope[i][j];
            dp[i][j] = s[i][j] == 0 ? (fk_float)0 : ds;
        }
}

// dK and dV of one key tile.
DEVICE void dkdv_tile(const Params& p, fk_float* stages, fk_float* p_tile) {
    const int heads_kv = (int)p.heads / GQA_GROUP, head_kv = blockIdx.x % heads_kv;
    const long long entries = num_entries(p);
    const SeqTile at = k_tile(p, blockIdx.x / heads_kv % entries, blockIdx.x / (heads_kv * entries), BLOCK_K);
    const long long b = at.b, k0 = at.tile * BLOCK_K, n_k = seq_info(p, b).n_k;
    const long long k1 = k0 + BLOCK_K < n_k ? k0 + BLOCK_K : n_k;
    const KvSource kv{p, b, head_kv, n_k};
    const auto k = kv.k(k0), v = kv.v(k0);
    ValueSums none;

#pragma unroll 1
    for (int nonfinite = 0; nonfinite < 2; ++nonfinite) {
        fk_float dk[ROWS_PER_THREAD][K_COLUMNS], dv[ROWS_PER_THREAD][V_COLUMNS];
        clear(dk);
        clear(dv);
        for (int h = head_kv * GQA_GROUP; h < (head_kv + 1) * GQA_GROUP && k0 < n_k; ++h) {
            TileWalk<BLOCK_Q, false> walk(p, b, h, k0, k1, seq_info(p, b).n_q);
#pragma unroll 1
            while (walk.next()) {
                const long long row0 = walk.tile * BLOCK_Q;
                const Rows q = q_rows(p, p.q, b, h, row0, seq_info(p, b).n_q);
                const Rows dout = q_rows(p, p.dout, b, h, row0, seq_info(p, b).n_q);
                fk_float s[ROWS_PER_THREAD][COLUMNS_PER_THREAD], dp[ROWS_PER_THREAD][COLUMNS_PER_THREAD];
                scores<ROWS, COLUMNS, HEAD_DIM>(k, q, s, stages);
                scores<ROWS, COLUMNS, HEAD_DIM_V>(v, dout, dp, stages);
                softmax_backward<false>(p, walk.state, s, dp, b, h, row0, k0, n_k, none);
                if constexpr (HAS_DROPOUT) drop_tile<ROWS, COLUMNS, true>(p, s, b, h, row0, k0);
                store_tile<ROWS, COLUMNS>(s, p_tile);
                accumulate<ROWS, COLUMNS, HEAD_DIM_V>(p_tile, dout, dv, stages, nonfinite);
                __syncthreads();
                store_tile<ROWS, COLUMNS>(dp, p_tile);
                accumulate<ROWS, COLUMNS, HEAD_DIM>(p_tile, q, dk, stages, nonfinite);
            }
        }
        fk_float one[ROWS_PER_THREAD];
        UNROLL(i, ROWS_PER_THREAD) one[i] = 1;
        // Keys past a sequence's length have accumulated nothing and get 0.
        const long long start = seq_info(p, b).key_offset, n = stored_n_k(p, b);
        const bool finite = store_accumulator<ROWS, HEAD_DIM>(dk, one, p.dk, b, head_kv, start, k0, n) &
                            store_accumulator<ROWS, HEAD_DIM_V>(dv, one, p.dv, b, head_kv, start, k0, n);
        if (!__syncthreads_or(!finite)) break;
    }
}

// dQ of one query tile.
DEVICE void dq_tile(const Params& p, fk_float* stages, fk_float* p_tile) {
    const long long entries = num_entries(p), h = blockIdx.x % p.heads, head_kv = h / GQA_GROUP;
    const long long number = num_q_tiles(p, BLOCK_Q) - 1 - blockIdx.x / (p.heads * entries);
    const SeqTile at = q_tile(p, blockIdx.x / p.heads % entries, number, BLOCK_Q);
    const long long b = at.b, row0 = at.tile * BLOCK_Q, n_k = seq_info(p, b).n_k;
    if (IS_PACKED && row0 >= seq_info(p, b).n_q) return;
    const long long row1 = row0 + BLOCK_Q < seq_info(p, b).n_q ? row0 + BLOCK_Q : seq_info(p, b).n_q;
    const KvSource kv{p, b, head_kv, n_k};
    const Rows q = q_rows(p, p.q, b, h, row0, seq_info(p, b).n_q);
    const Rows dout = q_rows(p, p.dout, b, h, row0, seq_info(p, b).n_q);
    ValueSums sums;
    sums.enter(b, h, p);

#pragma unroll 1
    for (int nonfinite = 0; nonfinite < 2; ++nonfinite) {
        fk_float dq[ROWS_PER_THREAD][K_COLUMNS];
        clear(dq);
        TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_k);
#pragma unroll 1
        while (walk.next()) {
            const long long k0 = walk.tile * BLOCK_K;
            const Rows k = kv.k(k0);
            fk_float s[ROWS_PER_THREAD][COLUMNS_PER_THREAD], dp[ROWS_PER_THREAD][COLUMNS_PER_THREAD];
            scores<ROWS, COLUMNS, HEAD_DIM>(q, k, s, stages);
            scores<ROWS, COLUMNS, HEAD_DIM_V>(dout, kv.v(k0), dp, stages);
            if (HAS_VALUES && !nonfinite) softmax_backward<true>(p, walk.state, s, dp, b, h, row0, k0, n_k, sums);
            else softmax_backward<false>(p, walk.state, s, dp, b, h, row0, k0, n_k, sums);
            store_tile<ROWS, COLUMNS>(dp, p_tile);
            accumulate<ROWS, COLUMNS, HEAD_DIM>(p_tile, k, dq, stages, nonfinite);
        }
        if constexpr (HAS_VALUES) sums.leave(p);
        fk_float one[ROWS_PER_THREAD];
        UNROLL(i, ROWS_PER_THREAD) one[i] = 1;
        const SeqInfo seq = seq_info(p, b);
        const bool finite = store_accumulator<ROWS, HEAD_DIM>(dq, one, p.dq, b, h, seq.row_offset, row0, seq.n_q);
        if (!__syncthreads_or(!finite)) break;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) simt_backward(KERNEL_PARAMS) {
    extern __shared__ __align__(16) unsigned char shared[];
    fk_float* stages = reinterpret_cast<fk_float*>(shared);
    fk_float* p_tile = stages + AT_P / (int)sizeof(fk_float);
    if constexpr (BACKWARD_KEYS) dkdv_tile(p, stages, p_tile);
    else dq_tile(p, stages, p_tile);
}
