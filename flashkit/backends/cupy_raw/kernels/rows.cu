// What the backward passes of every generation begin and end with: numbers of a row, and gradients of the sinks.

// delta = rowsum(dO * O) - dlse, and the log-sum-exp with +inf for rows without keys, whose weights so become 0. A warp
// takes a row.
extern "C" __global__ void __launch_bounds__(128) prepare(KERNEL_PARAMS) {
    const long long index = (long long)blockIdx.x * 4 + threadIdx.x / 32;
    if (index >= p.batch * p.heads * p.n_q) return;
    const long long row = index % p.n_q, h = index / p.n_q % p.heads, b = index / p.n_q / p.heads;
    const storage* out = row_at<const storage>(p.out, b, h, row);
    const storage* dout = row_at<const storage>(p.dout, b, h, row);
    fk_float total = 0;
    for (int d = threadIdx.x % 32; d < HEAD_DIM_V; d += 32) total += (fk_float)widen(out[d]) * (fk_float)widen(dout[d]);
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(~0u, total, step);
    if (threadIdx.x % 32 == 0) {
        const fk_float lse = *row_at<const fk_float>(p.lse, b, h, row);
        const bool empty = lse == HIDDEN;
        if (p.dlse.data != nullptr) total -= *row_at<const fk_float>(p.dlse, b, h, row);
        *row_at<fk_float>(p.delta, b, h, row) = empty ? (fk_float)0 : total;
        *row_at<fk_float>(p.shift, b, h, row) = empty ? INFINITE : lse;
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
            const fk_float weight = fk_exp(sink - *row_at<const fk_float>(p.shift, b, h, row));
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
