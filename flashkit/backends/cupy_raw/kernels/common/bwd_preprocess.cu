// Backward preprocess and sink gradients, shared by all generations.

// bwd_preprocess: delta = rowsum(dO * O) - dlse, and bwd_lse, the log-sum-exp with +inf for rows without a visible key,
// so that their P is 0; so is it, if it is computed in BASE_2, of rows beyond MAX_BWD_LSE. LANES lanes take a row, 16
// bytes at a time where alignment allows. Rows past n_q, up to a multiple of the query tile, get a finite bwd_lse that
// makes their P 0 as well.
constexpr int VEC_ELEMENTS = 16 / sizeof(storage), ROW_VECS = (HEAD_DIM_V + VEC_ELEMENTS - 1) / VEC_ELEMENTS;
constexpr int LANES = ROW_VECS > 16 ? 32 : ROW_VECS > 8 ? 16 : 8;
constexpr float PADDING_LSE = 1e30f;
extern "C" __global__ void __launch_bounds__(128) bwd_preprocess(KERNEL_PARAMS) {
    if (is_skipped(p.fallback)) return;
    const long long index = ((long long)blockIdx.x * 128 + threadIdx.x) / LANES, rows = p.bwd_lse.head;
    const int lane = threadIdx.x % LANES;
    const bool exists = index < num_entries(p) * p.heads * rows;
    const long long at = index % rows, h = index / rows % p.heads, entry = exists ? index / rows / p.heads : 0;
    const SeqTile tile = q_tile(p, entry, IS_PACKED ? at / p.row_block : 0, (int)p.row_block);
    const long long b = tile.b, row = IS_PACKED ? tile.tile * p.row_block + at % p.row_block : at;
    const long long n_q = seq_info(p, b).n_q;
    fk_float sum = 0;
    if (exists && row < n_q) {
        const storage* out = q_row<const storage>(p, p.out, b, h, row);
        const storage* dout = q_row<const storage>(p, p.dout, b, h, row);
        if (HEAD_DIM_V % VEC_ELEMENTS == 0 && (((unsigned long long)out | (unsigned long long)dout) & 15) == 0) {
#pragma unroll
            for (int vec = lane; vec < ROW_VECS; vec += LANES) {
                const uint4 x = reinterpret_cast<const uint4*>(out)[vec], y = reinterpret_cast<const uint4*>(dout)[vec];
                const storage *a = reinterpret_cast<const storage*>(&x), *c = reinterpret_cast<const storage*>(&y);
                UNROLL(e, VEC_ELEMENTS) sum += (fk_float)widen(a[e]) * (fk_float)widen(c[e]);
            }
        } else {
            for (int d = lane; d < HEAD_DIM_V; d += LANES) sum += (fk_float)widen(out[d]) * (fk_float)widen(dout[d]);
        }
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0 && exists) {
        const fk_float lse = row < n_q ? *q_row<const fk_float>(p, p.lse, b, h, row) : (fk_float)PADDING_LSE;
        const bool empty = lse == HIDDEN, great = BASE_2 && row < n_q && fk_abs(lse) > MAX_BWD_LSE;
        if (p.dlse.data != nullptr && row < n_q) sum -= *q_row<const fk_float>(p, p.dlse, b, h, row);
        *row_at<fk_float>(p.delta, entry, h, at) = empty ? (fk_float)0 : sum;
        *row_at<fk_float>(p.bwd_lse, entry, h, at) = empty || great ? INFINITE : lse;
    }
}

// bwd_sinks: d lse / d sink is the softmax weight of the sink, 0 in rows without a visible key. One CTA per head; the
// float64 reduction has a fixed order.
extern "C" __global__ void __launch_bounds__(256) bwd_sinks(KERNEL_PARAMS) {
    __shared__ double part[256];
    const long long h = blockIdx.x, rows = IS_PACKED ? p.bwd_lse.head : max_n_q(p);
    double sum = 0;
    if constexpr (HAS_SINKS) {
        const fk_float sink = static_cast<const fk_float*>(p.sinks)[h];
        for (long long index = threadIdx.x; index < num_entries(p) * rows; index += 256) {
            const long long b = index / rows, row = index % rows;
            const fk_float p_sink = fk_exp(sink - *row_at<const fk_float>(p.bwd_lse, b, h, row));
            if (p_sink != 0) sum -= (double)(p_sink * *row_at<const fk_float>(p.delta, b, h, row));
        }
    }
    part[threadIdx.x] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) static_cast<fk_float*>(p.dsinks)[h] = (fk_float)part[0];
}
