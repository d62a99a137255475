// Of packed sequences, from offsets on the device: what kernels read, in one launch; gradients of keys behind the last.
//
// Offsets may be anything: they are clamped to the tokens, and one that is less than the one before is made equal to
// it, as kernels would wait for tiles of sequences that overlap.

struct Integers {
    const char* data;
    long long stride, bytes;  // bytes from one to the next; of one, 4 or 8
};

struct Sequences {
    Integers q;                      // (batch + 1,) offsets
    Integers keys;                   // (batch + 1,) offsets, or (batch,) lengths
    long long* out;                  // four arrays of batch + 2: see below
    long long batch, n_q, n_k;       // sequences; tokens of q; tokens of k, or room for keys
    long long keys_are_lengths;
};

constexpr int THREADS = 256;

static __device__ long long read(const Integers& x, long long i) {
    const char* at = x.data + i * x.stride;
    return x.bytes == 4 ? *reinterpret_cast<const int*>(at) : *reinterpret_cast<const long long*>(at);
}
static __device__ long long within(long long x, long long most) { return x < 0 ? 0 : x > most ? most : x; }

// The running maxima of the offsets, by all threads. Returns the last one.
static __device__ long long ascending(const Integers& x, long long batch, long long tokens, long long* out) {
    __shared__ long long most[THREADS];
    const int t = threadIdx.x;
    long long before = 0;
    for (long long from = 0; from <= batch; from += THREADS) {
        const long long i = from + t;
        most[t] = i == 0 || i > batch ? 0 : within(read(x, i), tokens);
        __syncthreads();
        for (int step = 1; step < THREADS; step *= 2) {
            const long long other = t >= step ? most[t - step] : 0;
            __syncthreads();
            if (other > most[t]) most[t] = other;
            __syncthreads();
        }
        if (i <= batch) out[i] = most[t] > before ? most[t] : before;
        before = most[THREADS - 1] > before ? most[THREADS - 1] : before;
        __syncthreads();
    }
    return before;
}

// out: where each sequence begins among the rows of q, and of k (unused where the lengths are given); how many keys it
// has; the position of its first query, which stands so that the last one stands at the last key. The caller's
// sequences are followed by one more, the queries behind them, which has no keys.
extern "C" __global__ void __launch_bounds__(THREADS) derive_cu_seqlens(const Sequences p) {
    const long long room = p.batch + 2, extra = p.batch;
    long long *cu_q = p.out, *cu_k = cu_q + room, *lengths = cu_k + room, *positions = lengths + room;
    ascending(p.q, p.batch, p.n_q, cu_q);
    const long long end = p.keys_are_lengths ? 0 : ascending(p.keys, p.batch, p.n_k, cu_k);
    if (threadIdx.x == 0) cu_q[extra + 1] = p.n_q, cu_k[extra + 1] = end, lengths[extra] = positions[extra] = 0;
    __syncthreads();
    for (long long b = threadIdx.x; b < p.batch; b += THREADS) {
        const long long n_k = p.keys_are_lengths ? within(read(p.keys, b), p.n_k) : cu_k[b + 1] - cu_k[b];
        lengths[b] = n_k, positions[b] = n_k - (cu_q[b + 1] - cu_q[b]);
    }
}

struct Gradients {
    char *dk, *dv;
    const long long* end;                // the first row behind the last sequence
    long long rows, bytes_k, bytes_v;    // rows of a head; bytes of a row
};

// Zeros in the rows of dK and dV behind the last sequence. A CTA takes a head of one of them.
extern "C" __global__ void __launch_bounds__(THREADS) clear_behind(const Gradients p) {
    const long long bytes = blockIdx.x % 2 ? p.bytes_v : p.bytes_k, head = blockIdx.x / 2;
    char* rows = (blockIdx.x % 2 ? p.dv : p.dk) + head * p.rows * bytes;
    for (long long i = *p.end * bytes + 2 * threadIdx.x; i < p.rows * bytes; i += 2 * THREADS)
        *reinterpret_cast<short*>(rows + i) = 0;
}
