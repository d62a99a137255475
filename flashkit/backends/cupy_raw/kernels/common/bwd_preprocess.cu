// What the backward passes of every generation begin and end with: numbers of a row, and gradients of the sinks.

// delta = rowsum(dO * O) - dlse, and the log-sum-exp with +inf for rows without keys, whose weights so become 0. LANES
// lanes take a row, 16 bytes at a time where they can. There may be memory for more rows than n_q; of those the weights
// become 0 too, by a number that is finite.
constexpr int VEC_ELEMENTS = 16 / sizeof(storage), ROW_VECS = (HEAD_DIM_V + VEC_ELEMENTS - 1) / VEC_ELEMENTS;
constexpr int LANES = ROW_VECS > 16 ? 32 : ROW_VECS > 8 ? 16 : 8;
constexpr float NO_ROW = 1e30f;
extern "C" __global__ void __launch_bounds__(128) prepare(KERNEL_PARAMS) {
    const long long index = ((long long)blockIdx.x * 128 + threadIdx.x) / LANES, rows = p.bwd_lse.head;
    const int lane = threadIdx.x % LANES;
    const bool exists = index < p.batch * p.heads * rows;
    const long long row = index % rows, h = index / rows % p.heads, b = exists ? index / rows / p.heads : 0;
    fk_float total = 0;
    if (exists && row < p.n_q) {
        const storage* out = row_at<const storage>(p.out, b, h, row);
        const storage* dout = row_at<const storage>(p.dout, b, h, row);
        if (HEAD_DIM_V % VEC_ELEMENTS == 0 && (((unsigned long long)out | (unsigned long long)dout) & 15) == 0) {
#pragma unroll
            for (int unit = lane; unit < ROW_VECS; unit += LANES) {
                const uint4 x = reinterpret_cast<const uint4*>(out)[unit], y = reinterpret_cast<const uint4*>(dout)[unit];
                const storage *a = reinterpret_cast<const storage*>(&x), *c = reinterpret_cast<const storage*>(&y);
#pragma unroll
                for (int e = 0; e < VEC_ELEMENTS; ++e) total += (fk_float)widen(a[e]) * (fk_float)widen(c[e]);
            }
        } else {
            for (int d = lane; d < HEAD_DIM_V; d += LANES) total += (fk_float)widen(out[d]) * (fk_float)widen(dout[d]);
        }
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    if (lane == 0 && exists) {
        const fk_float lse = row < p.n_q ? *row_at<const fk_float>(p.lse, b, h, row) : (fk_float)NO_ROW;
        const bool empty = lse == HIDDEN;
        if (p.dlse.data != nullptr && row < p.n_q) total -= *row_at<const fk_float>(p.dlse, b, h, row);
        *row_at<fk_float>(p.delta, b, h, row) = empty ? (fk_float)0 : total;
        *row_at<fk_float>(p.bwd_lse, b, h, row) = empty ? INFINITE : lse;
    }
}

// d lse / d sink is the sink's weight, 0 in a row that sees nothing at all. A block takes a head; sums in float64, in an
// order that does not change.
extern "C" __global__ void __launch_bounds__(256) sink_gradients(KERNEL_PARAMS) {
    __shared__ double part[256];
    const long long h = blockIdx.x;
    double total = 0;
    if constexpr (HAS_SINKS) {
        const fk_float sink = static_cast<const fk_float*>(p.sinks)[h];
        for (long long index = threadIdx.x; index < p.batch * p.n_q; index += 256) {
            const long long b = index / p.n_q, row = index % p.n_q;
            const fk_float weight = fk_exp(sink - *row_at<const fk_float>(p.bwd_lse, b, h, row));
            if (weight != 0) total -= (double)(weight * *row_at<const fk_float>(p.delta, b, h, row));
        }
    }
    part[threadIdx.x] = total;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) static_cast<fk_float*>(p.dsinks)[h] = (fk_float)part[0];
}
