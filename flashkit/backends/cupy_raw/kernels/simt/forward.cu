// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on CUDA cores, for every device and dtype.
//
// A CTA of TX * TY threads takes BLOCK_Q query rows of one head and loops over the key tiles that the mask shows them.
//
//     S, P     [BLOCK_Q][BLOCK_K]     registers; P then goes through shared memory
//     O        [BLOCK_Q][HEAD_DIM_V]  registers, not yet divided by the row sum
//     m, l     [BLOCK_Q]              running row maximum and row sum: registers of the TX threads that share a row
//
// HAS_STATS: also the entropy of each row, log(l) - rowsum(P (S - m)) / l, and m. TANGENT_Q, .._K, .._V: which tangents
// are not 0; if any, dS is a second tile of scores, and of P = softmax(S)
//
//     dlse = rowsum(P dS)     dO = P dS V + P dV - dlse O
//
// CTAs are numbered longest first: the last query tiles, which see the most keys under a causal mask, come first. Heads
// are neighbours, so those of a group share K and V in the L2 cache.
#include "simt/tile.cuh"

constexpr int ROWS_PER_THREAD = BLOCK_Q / TY, KEYS_PER_THREAD = BLOCK_K / TX;
constexpr int V_COLUMNS = accumulator_pitch(HEAD_DIM_V) / TX;  // of O, of a thread
constexpr bool SCORES_MOVE = TANGENT_Q || TANGENT_K, HAS_TANGENTS = SCORES_MOVE || TANGENT_V;
constexpr fk_float LOWEST = -1e30;  // instead of -inf, which P = 0 makes NaN

// Reduces over the TX threads that share a row.
template <typename F>
DEVICE fk_float across_row(fk_float x, F join) {
#pragma unroll
    for (int step = TX / 2; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// S to P relative to the running row maximum; rescales l, O and what else is summed to it. total: HAS_STATS: the sum of
// P (S - m) in base 2, with tangents that of P dS.
DEVICE void online_softmax(fk_float (&s)[ROWS_PER_THREAD][KEYS_PER_THREAD], fk_float (&m)[ROWS_PER_THREAD],
                           fk_float (&l)[ROWS_PER_THREAD], fk_float (&o)[ROWS_PER_THREAD][V_COLUMNS],
                           fk_float (&total)[ROWS_PER_THREAD], fk_float (&d_o)[ROWS_PER_THREAD][V_COLUMNS]) {
    UNROLL(i, ROWS_PER_THREAD) {
        fk_float row_max = m[i];
        UNROLL(j, KEYS_PER_THREAD) row_max = row_max < s[i][j] ? s[i][j] : row_max;
        row_max = across_row(row_max, [](fk_float a, fk_float b) { return a < b ? b : a; });
        // A row without a visible key so far subtracts 0 instead of -inf, so that -inf stays -inf.
        const fk_float finite_max = row_max == HIDDEN ? (fk_float)0 : row_max;
        const fk_float rescale = softmax_exp2((m[i] - finite_max) * LOG2E);
        fk_float row_sum = 0;
        if constexpr (HAS_STATS) total[i] = l[i] == 0 ? 0 : rescale * (total[i] + (m[i] - row_max) * LOG2E * l[i]);
        if constexpr (HAS_TANGENTS) {
            total[i] *= rescale;
            UNROLL(c, V_COLUMNS) d_o[i][c] *= rescale;
        }
        UNROLL(j, KEYS_PER_THREAD) {
            const fk_float below = (s[i][j] - finite_max) * LOG2E;
            s[i][j] = softmax_exp2(below);
            row_sum += s[i][j];
            if constexpr (HAS_STATS) total[i] += s[i][j] * (below > LOWEST ? below : LOWEST);
        }
        m[i] = row_max;
        l[i] = l[i] * rescale + row_sum;  // of this thread's keys; the epilogue reduces over the row's threads
        UNROLL(c, V_COLUMNS) o[i][c] *= rescale;
    }
}

// dS to P dS, with the slope of the score modification, and its sums. Where P is 0 it is 0, whatever dS is.
DEVICE void weigh_tangents(const fk_float (&s)[ROWS_PER_THREAD][KEYS_PER_THREAD],
                           const fk_float (&slopes)[ROWS_PER_THREAD][KEYS_PER_THREAD],
                           fk_float (&ds)[ROWS_PER_THREAD][KEYS_PER_THREAD], fk_float (&total)[ROWS_PER_THREAD]) {
    UNROLL(i, ROWS_PER_THREAD)
        UNROLL(j, KEYS_PER_THREAD) {
            const fk_float moved = HAS_SCORE ? ds[i][j] * slopes[i][j] : ds[i][j];
            ds[i][j] = s[i][j] == 0 ? (fk_float)0 : s[i][j] * moved;
            total[i] += ds[i][j];
        }
}

// The entropy and the largest score of a row. total: of all its keys.
DEVICE void store_statistics(const Params& p, long long b, long long h, long long row, fk_float row_max,
                             fk_float row_sum, fk_float total) {
    const fk_float top = row_sum == row_sum ? row_max : row_sum;
    if constexpr (HAS_SINKS) {  // one more outcome
        const fk_float sink = static_cast<const fk_float*>(p.sinks)[h];
        if (sink != HIDDEN) {
            const fk_float new_max = row_max < sink ? sink : row_max, of_sink = softmax_exp2((sink - new_max) * LOG2E);
            const fk_float factor = softmax_exp2((row_max - new_max) * LOG2E), below = (row_max - new_max) * LOG2E;
            total = row_sum == 0 ? (fk_float)0 : factor * (total + below * row_sum);
            total += of_sink * (sink - new_max) * LOG2E;
            row_sum = row_sum * factor + of_sink;
        }
    }
    *q_row<fk_float>(p, p.entropy, b, h, row) = row_sum == 0 ? (fk_float)0 : fk_log(row_sum) - total / row_sum / LOG2E;
    *q_row<fk_float>(p, p.max_logit, b, h, row) = top;
}

// Divides O by the row sums; stores O and the log-sum-exp, and statistics or tangents. Returns whether all of O, and of
// dO, is finite.
DEVICE bool epilogue(const Params& p, long long b, long long h, long long row0,
                     fk_float (&m)[ROWS_PER_THREAD], fk_float (&l)[ROWS_PER_THREAD],
                     fk_float (&o)[ROWS_PER_THREAD][V_COLUMNS], fk_float (&total)[ROWS_PER_THREAD],
                     fk_float (&d_o)[ROWS_PER_THREAD][V_COLUMNS]) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    fk_float factor[ROWS_PER_THREAD];
    const auto sum = [](fk_float a, fk_float b) { return a + b; };
    UNROLL(i, ROWS_PER_THREAD) {
        fk_float row_max = m[i], row_sum = across_row(l[i], sum);
        if constexpr (HAS_STATS || HAS_TANGENTS) total[i] = across_row(total[i], sum);
        if constexpr (HAS_STATS)
            if (tx == 0 && row0 + ty + i * TY < seq_info(p, b).n_q)
                store_statistics(p, b, h, row0 + ty + i * TY, row_max, row_sum, total[i]);
        factor[i] = 1;
        if constexpr (HAS_SINKS) {  // one more logit in the row sum, without a value
            const fk_float sink = static_cast<const fk_float*>(p.sinks)[h];
            if (sink != HIDDEN) {
                const fk_float old_max = row_max;
                row_max = old_max < sink ? sink : old_max;
                factor[i] = softmax_exp2((old_max - row_max) * LOG2E);
                row_sum = row_sum * factor[i] + softmax_exp2((sink - row_max) * LOG2E);
            }
        }
        const bool empty = row_sum == 0;  // no visible key
        factor[i] = empty ? (fk_float)0 : factor[i] / row_sum;
        const long long row = row0 + ty + i * TY;
        if (tx == 0 && row < seq_info(p, b).n_q)
            *q_row<fk_float>(p, p.lse, b, h, row) = empty ? HIDDEN : row_max + fk_log(row_sum);
        if constexpr (HAS_TANGENTS) {
            total[i] *= factor[i];
            if (tx == 0 && row < seq_info(p, b).n_q) *q_row<fk_float>(p, p.dlse, b, h, row) = total[i];
            UNROLL(c, V_COLUMNS) d_o[i][c] -= total[i] * o[i][c];
        }
    }
    const SeqInfo seq = seq_info(p, b);
    const bool finite = store_accumulator<BLOCK_Q, HEAD_DIM_V>(o, factor, p.out, b, h, seq.row_offset, row0, seq.n_q);
    if constexpr (HAS_TANGENTS)
        return finite &
               store_accumulator<BLOCK_Q, HEAD_DIM_V>(d_o, factor, p.dout, b, h, seq.row_offset, row0, seq.n_q);
    return finite;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) simt_forward(KERNEL_PARAMS) {
    if (HAS_TANGENTS && is_skipped(p.fallback)) return;
    extern __shared__ __align__(16) unsigned char shared[];
    fk_float* stages = reinterpret_cast<fk_float*>(shared);
    fk_float* p_tile = stages + AT_P / (int)sizeof(fk_float);

    const long long heads = p.heads, entries = num_entries(p), h = blockIdx.x % heads, head_kv = h / GQA_GROUP;
    const long long number = num_q_tiles(p, BLOCK_Q) - 1 - blockIdx.x / (heads * entries);
    const SeqTile at = q_tile(p, blockIdx.x / heads % entries, number, BLOCK_Q);
    const long long b = at.b, row0 = at.tile * BLOCK_Q, n_k = seq_info(p, b).n_k;
    if (IS_PACKED && row0 >= seq_info(p, b).n_q) return;
    const long long row1 = row0 + BLOCK_Q < seq_info(p, b).n_q ? row0 + BLOCK_Q : seq_info(p, b).n_q;
    const KvSource kv{p, b, head_kv, n_k};
    const Rows q = q_rows(p, p.q, b, h, row0, seq_info(p, b).n_q);
    const Rows dq = q_rows(p, p.dq, b, h, row0, seq_info(p, b).n_q);

    // An element of P that is 0 times an inf or NaN in a masked row of V is NaN. A CTA with a non-finite O, which is
    // rare, repeats its work and skips the products with 0.
#pragma unroll 1
    for (int nonfinite = 0; nonfinite < 2; ++nonfinite) {
        fk_float o[ROWS_PER_THREAD][V_COLUMNS], m[ROWS_PER_THREAD], l[ROWS_PER_THREAD];
        fk_float d_o[ROWS_PER_THREAD][V_COLUMNS], total[ROWS_PER_THREAD];
        UNROLL(i, ROWS_PER_THREAD) {
            m[i] = HIDDEN, l[i] = 0, total[i] = 0;
            UNROLL(c, V_COLUMNS) o[i][c] = d_o[i][c] = 0;
        }
        TileWalk<BLOCK_K, true> walk(p, b, h, row0, row1, n_k);
#pragma unroll 1
        while (walk.next()) {
            const long long k0 = walk.tile * BLOCK_K;
            fk_float s[ROWS_PER_THREAD][KEYS_PER_THREAD];
            scores<BLOCK_Q, BLOCK_K, HEAD_DIM>(q, kv.k(k0), s, stages);
            scale_tile(s, (fk_float)p.softmax_scale);
            fk_float ds[ROWS_PER_THREAD][KEYS_PER_THREAD], slopes[ROWS_PER_THREAD][KEYS_PER_THREAD];
            if constexpr (TANGENT_Q) scores<BLOCK_Q, BLOCK_K, HEAD_DIM>(dq, kv.k(k0), ds, stages);
            if constexpr (TANGENT_K) scores<BLOCK_Q, BLOCK_K, HEAD_DIM, TANGENT_Q>(q, kv.rows(p.dk, k0), ds, stages);
            if constexpr (SCORES_MOVE) {
                scale_tile(ds, (fk_float)p.softmax_scale);
                modify_tile<BLOCK_Q, BLOCK_K, false, true>(p, walk.state, s, slopes, b, h, row0, k0, n_k);
            } else {
                modify_tile<BLOCK_Q, BLOCK_K, false, false>(p, walk.state, s, s, b, h, row0, k0, n_k);
            }
            online_softmax(s, m, l, o, total, d_o);
            if constexpr (SCORES_MOVE) weigh_tangents(s, slopes, ds, total);
            if constexpr (HAS_DROPOUT) drop_tile<BLOCK_Q, BLOCK_K, false>(p, s, b, h, row0, k0);
            store_tile<BLOCK_Q, BLOCK_K>(s, p_tile);
            accumulate<BLOCK_Q, BLOCK_K, HEAD_DIM_V>(p_tile, kv.v(k0), o, stages,
                                                     nonfinite);
            if constexpr (TANGENT_V)
                accumulate<BLOCK_Q, BLOCK_K, HEAD_DIM_V>(p_tile, kv.rows(p.dv, k0), d_o, stages, nonfinite);
            if constexpr (SCORES_MOVE) {
                if constexpr (HAS_DROPOUT) drop_tile<BLOCK_Q, BLOCK_K, false>(p, ds, b, h, row0, k0);
                __syncthreads();
                store_tile<BLOCK_Q, BLOCK_K>(ds, p_tile);
                accumulate<BLOCK_Q, BLOCK_K, HEAD_DIM_V>(p_tile, kv.v(k0), d_o, stages, nonfinite);
            }
        }
        const bool finite = epilogue(p, b, h, row0, m, l, o, total, d_o);
        if (!__syncthreads_or(!finite)) break;
    }
}
