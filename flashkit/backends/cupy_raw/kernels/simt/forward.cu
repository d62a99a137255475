// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on the ordinary arithmetic units.
//
// A block of TX * TY threads takes BLOCK_Q queries of one head and goes over the tiles of keys that they see.
//
//     S, P     [BLOCK_Q][BLOCK_K]     scores, then weights: in registers, then in shared memory
//     O        [BLOCK_Q][HEAD_DIM_V]  output, unscaled: in registers
//     m, l     [BLOCK_Q]              running maximum and sum of each query: in the registers of its TX threads
//
// Blocks are numbered with the last rows first, which under a causal mask see the most, and heads next to each other,
// which share keys where they are grouped.
#include "simt/tile.cuh"

constexpr int ROWS_EACH = BLOCK_Q / TY, KEYS_EACH = BLOCK_K / TX;

// Reduce over the TX threads that share a row.
template <typename F>
DEVICE fk_float across_row(fk_float x, F join) {
#pragma unroll
    for (int step = TX / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Scores to weights relative to the running maximum; what was summed before is rescaled to it.
DEVICE void online_softmax(fk_float (&s)[ROWS_EACH][KEYS_EACH], fk_float (&m)[ROWS_EACH], fk_float (&l)[ROWS_EACH],
                           fk_float (&output)[ROWS_EACH][sums_pitch(HEAD_DIM_V) / TX]) {
#pragma unroll
    for (int i = 0; i < ROWS_EACH; ++i) {
        fk_float top = m[i];
#pragma unroll
        for (int j = 0; j < KEYS_EACH; ++j) top = top < s[i][j] ? s[i][j] : top;
        top = across_row(top, [](fk_float a, fk_float b) { return a < b ? b : a; });
        // A query that has seen no key yet keeps the shift 0, so that -inf - shift stays -inf.
        const fk_float shift = top == HIDDEN ? (fk_float)0 : top;
        const fk_float factor = weight_of((m[i] - shift) * LOG2E);
        fk_float sum = 0;
#pragma unroll
        for (int j = 0; j < KEYS_EACH; ++j) {
            s[i][j] = weight_of((s[i][j] - shift) * LOG2E);
            sum += s[i][j];
        }
        m[i] = top;
        l[i] = l[i] * factor + sum;  // of this thread's keys; the row's is formed at the end
#pragma unroll
        for (int c = 0; c < sums_pitch(HEAD_DIM_V) / TX; ++c) output[i][c] *= factor;
    }
}

// Divide by the sums and store output and log-sum-exp. Returns whether all of it is finite.
DEVICE bool finish(const Params& p, long long b, long long h, long long row0, fk_float (&m)[ROWS_EACH],
                   fk_float (&l)[ROWS_EACH], fk_float (&output)[ROWS_EACH][sums_pitch(HEAD_DIM_V) / TX]) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    fk_float factor[ROWS_EACH];
#pragma unroll
    for (int i = 0; i < ROWS_EACH; ++i) {
        fk_float top = m[i], sum = across_row(l[i], [](fk_float a, fk_float b) { return a + b; });
        factor[i] = 1;
        if constexpr (HAS_SINKS) {  // one more logit in the sum, without a value
            const fk_float sink = static_cast<const fk_float*>(p.sinks)[h];
            if (sink != HIDDEN) {
                const fk_float old = top;
                top = old < sink ? sink : old;
                factor[i] = weight_of((old - top) * LOG2E);
                sum = sum * factor[i] + weight_of((sink - top) * LOG2E);
            }
        }
        const bool empty = sum == 0;  // no key is visible
        factor[i] = empty ? (fk_float)0 : factor[i] / sum;
        const long long row = row0 + ty + i * TY;
        if (tx == 0 && row < p.n_q) *row_at<fk_float>(p.lse, b, h, row) = empty ? HIDDEN : top + fk_log(sum);
    }
    return store_sums<BLOCK_Q, HEAD_DIM_V>(output, factor, p.out, b, h, row0, p.n_q);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) simt_forward(KERNEL_PARAMS) {
    extern __shared__ __align__(16) unsigned char shared[];
    fk_float* stages = reinterpret_cast<fk_float*>(shared);
    fk_float* weights = stages + 2 * stage_size(BLOCK_Q, BLOCK_K, HEAD_DIM_V);

    const long long heads = p.heads, tiles = (p.n_q + BLOCK_Q - 1) / BLOCK_Q;
    const long long b = blockIdx.x / heads % p.batch, h = blockIdx.x % heads, head_kv = h / GQA_GROUP;
    const long long row0 = (tiles - 1 - blockIdx.x / (heads * p.batch)) * BLOCK_Q, n_k = keys_of(p, b);
    const long long row1 = row0 + BLOCK_Q < p.n_q ? row0 + BLOCK_Q : p.n_q;
    const Rows q = rows_of(p.q, b, h, row0, p.n_q, BLOCK_Q);

    // A weight of 0 times an infinity that the mask hides would be NaN: such a block, rare, is done again, carefully.
#pragma unroll 1
    for (int careful = 0; careful < 2; ++careful) {
        fk_float output[ROWS_EACH][sums_pitch(HEAD_DIM_V) / TX], m[ROWS_EACH], l[ROWS_EACH];
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i) {
            m[i] = HIDDEN, l[i] = 0;
#pragma unroll
            for (int c = 0; c < sums_pitch(HEAD_DIM_V) / TX; ++c) output[i][c] = 0;
        }
        TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_k);
#pragma unroll 1
        while (walk.next()) {
            const long long k0 = walk.tile * BLOCK_K;
            fk_float s[ROWS_EACH][KEYS_EACH];
            scores<BLOCK_Q, BLOCK_K, HEAD_DIM>(q, rows_of(p.k, b, head_kv, k0, n_k, BLOCK_K), s, stages);
#pragma unroll
            for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
                for (int j = 0; j < KEYS_EACH; ++j) s[i][j] *= (fk_float)p.softmax_scale;
            modify_tile<BLOCK_Q, BLOCK_K, false, false>(p, walk.state, s, s, b, h, row0, p.n_q, k0, n_k);
            online_softmax(s, m, l, output);
            if constexpr (HAS_DROPOUT) drop_tile<BLOCK_Q, BLOCK_K, false>(p, s, b, h, row0, k0);
            store_weights<BLOCK_Q, BLOCK_K>(s, weights);
            accumulate<BLOCK_Q, BLOCK_K, HEAD_DIM_V>(weights, rows_of(p.v, b, head_kv, k0, n_k, BLOCK_K), output, stages,
                                                     careful);
        }
        const bool finite = finish(p, b, h, row0, m, l, output);
        if (!__syncthreads_or(!finite)) break;
    }
}
