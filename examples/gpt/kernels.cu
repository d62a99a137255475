// The kernels of gpu.py. Lines in front define T, the type of activations: bfloat16, float or double; WIDE, that of sums:
// float, or double for double; WIDTH, the columns of a row; and LANES, the threads that have a row in their registers.
// Rows are contiguous. Threads load 16 bytes at once, and what they need before they store anything.

#define KERNEL extern "C" __global__ void
#define EACH_VECTOR \
  _Pragma("unroll") for (int v = 0, e = lane * N; v < VECTORS && e < WIDTH; ++v, e += LANES * N)  // of a row

constexpr int N = WIDTH % (16 / sizeof(T)) ? 1 : 16 / sizeof(T);  // elements that a thread loads at once
constexpr int VECTORS = (WIDTH + N * LANES - 1) / (N * LANES);    // of a row, for a thread
constexpr int ROWS = LANES == 32 ? 4 : 1;                         // of a block
constexpr int SLAB = 128 * N, SLABS = (WIDTH + SLAB - 1) / SLAB;  // columns of a block of 128 threads that sums columns

template <class X, int n>
struct alignas(sizeof(X) * n) Vector {
  X x[n];
};

template <class X, int n>
__device__ inline void load(WIDE (&to)[n], const X* from) {
  Vector<X, n> v = *reinterpret_cast<const Vector<X, n>*>(from);
  for (int i = 0; i < n; ++i) to[i] = WIDE(v.x[i]);
}

template <class X, int n>
__device__ inline void store(X* to, const WIDE (&from)[n]) {
  Vector<X, n> v;
  for (int i = 0; i < n; ++i) v.x[i] = X(from[i]);
  *reinterpret_cast<Vector<X, n>*>(to) = v;
}

// In bfloat16 an error of 1e-6 is lost.
__device__ inline float fast_exp(float x) { return sizeof(T) == 2 ? __expf(x) : exp(x); }
__device__ inline double fast_exp(double x) { return exp(x); }
__device__ inline float fast_divide(float x, float y) { return sizeof(T) == 2 ? __fdividef(x, y) : x / y; }
__device__ inline double fast_divide(double x, double y) { return x / y; }

struct Sum {
  static constexpr WIDE neutral = 0;
  __device__ static WIDE of(WIDE a, WIDE b) { return a + b; }
};
struct Max {
  static constexpr WIDE neutral = -1e30;
  __device__ static WIDE of(WIDE a, WIDE b) { return a > b ? a : b; }
};

// Of so many threads: a warp's, or all of a block's, for all of them.
template <class Op>
__device__ inline WIDE reduce(WIDE x, int threads) {
  for (int lane = 16; lane; lane /= 2) x = Op::of(x, __shfl_xor_sync(~0u, x, lane));
  if (threads == 32) return x;
  __shared__ WIDE of_warps[32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < threads / 32 ? of_warps[threadIdx.x % 32] : Op::neutral;
  for (int lane = 16; lane; lane /= 2) x = Op::of(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// --- embedding and biases ---------------------------------------------------------------------------------------------

// out = a[rows_a] + b[rows_b]; without indices every row of a, and the one row of b. A thread has a vector.
KERNEL add(T* out, const T* a, const int* rows_a, const T* b, const int* rows_b, int rows) {
  size_t at = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N, row = at / WIDTH, e = at % WIDTH;
  if (row >= rows) return;
  WIDE x[N], y[N];
  load(x, a + (rows_a == nullptr ? row : rows_a[row]) * WIDTH + e);
  load(y, b + size_t(rows_b == nullptr ? 0 : rows_b[row]) * WIDTH + e);
  for (int i = 0; i < N; ++i) x[i] += y[i];
  store(out + at, x);
}

// A block has 32 vectors of an index: its warps take turns with the rows of x that have it, the first sums their sums.
KERNEL add_rows(WIDE* total, const int* indices, const int* begins, const int* order, const T* x) {
  constexpr int PARTS = (WIDTH + 32 * N - 1) / (32 * N);
  __shared__ WIDE of_warps[16][32 * N];
  int index = blockIdx.x / PARTS, lane = threadIdx.x % 32, e = (blockIdx.x % PARTS * 32 + lane) * N;
  WIDE sum[N] = {};
  if (e < WIDTH)
    for (int t = begins[index] + threadIdx.x / 32; t < begins[index + 1]; t += 16) {
      WIDE a[N];
      load(a, x + size_t(order[t]) * WIDTH + e);
      for (int i = 0; i < N; ++i) sum[i] += a[i];
    }
  for (int i = 0; i < N; ++i) of_warps[threadIdx.x / 32][i * 32 + lane] = sum[i];
  __syncthreads();
  if (threadIdx.x >= 32 || e >= WIDTH) return;
  for (int i = 0; i < N; ++i) {
    WIDE all = 0;
    for (int warp = 0; warp < 16; ++warp) all += of_warps[warp][i * 32 + lane];
    total[size_t(indices[index]) * WIDTH + e + i] += all;
  }
}

// --- sums of columns: a kernel's blocks sum every `parts`-th row, and this one their sums, (parts, 1 to 3, width) -----

KERNEL add_sums(WIDE* first, WIDE* second, WIDE* third, const WIDE* sums, int parts, int width, int columns) {
  __shared__ WIDE of_warps[32][33];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, e = blockIdx.x * 32 + lane;
  WIDE sum = 0;
  if (e < columns)
    for (int part = warp; part < parts; part += 32) sum += sums[size_t(part) * columns + e];
  of_warps[lane][warp] = sum;
  __syncthreads();
  sum = reduce<Sum>(of_warps[warp][lane], 32);  // a warp has a column now
  e = blockIdx.x * 32 + warp;
  WIDE* total = e < width ? first : e < 2 * width ? second : third;
  if (lane == 0 && e < columns && total != nullptr) total[e % width] += sum;
}

// out (rows, 3, width) of three arrays, with the sums of its columns.
KERNEL join(T* out, const T* a, const T* b, const T* c, WIDE* sums, int rows) {
  int parts = gridDim.x / (3 * SLABS), part = blockIdx.x / (3 * SLABS), which = blockIdx.x / SLABS % 3;
  int e = blockIdx.x % SLABS * SLAB + threadIdx.x * N;
  if (e >= WIDTH) return;
  const T* x = which == 0 ? a : which == 1 ? b : c;
  WIDE sum[N] = {};
  for (int row = part; row < rows; row += parts) {
    WIDE v[N];
    load(v, x + size_t(row) * WIDTH + e);
    store(out + (size_t(row) * 3 + which) * WIDTH + e, v);
    for (int i = 0; i < N; ++i) sum[i] += v[i];
  }
  for (int i = 0; i < N; ++i) sums[(size_t(part) * 3 + which) * WIDTH + e + i] = sum[i];
}

// --- layer normalisation: LANES threads have a row --------------------------------------------------------------------

KERNEL add_norm(const T* x, const T* added, const T* bias, const T* weight, const T* shift, T* total, T* y,
                WIDE* stats, int rows) {
  int row = blockIdx.x * ROWS + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  if (row >= rows) return;
  size_t at = size_t(row) * WIDTH;
  WIDE a[VECTORS][N] = {}, sum = 0, square = 0;
  EACH_VECTOR {
    load(a[v], x + at + e);
    if (added != nullptr) {
      WIDE b[N], c[N];
      load(b, added + at + e);
      load(c, bias + e);
      for (int i = 0; i < N; ++i) a[v][i] = WIDE(T(a[v][i] + b[i] + c[i]));
    }
    for (int i = 0; i < N; ++i) sum += a[v][i];
  }
  WIDE mean = reduce<Sum>(sum, LANES) / WIDTH;
  EACH_VECTOR {
    if (added != nullptr) store(total + at + e, a[v]);
    for (int i = 0; i < N; ++i) square += (a[v][i] - mean) * (a[v][i] - mean);
  }
  WIDE scale = 1 / sqrt(reduce<Sum>(square, LANES) / WIDTH + WIDE(1e-5));
  EACH_VECTOR {
    WIDE w[N], b[N];
    load(w, weight + e);
    load(b, shift + e);
    for (int i = 0; i < N; ++i) a[v][i] = (a[v][i] - mean) * scale * w[i] + b[i];
    store(y + at + e, a[v]);
  }
  if (lane == 0) {
    stats[row] = mean;
    stats[rows + row] = scale;
  }
}

// Also the sums of columns that are the gradients by weight, shift and bias, of every gridDim.x-th ROWS rows.
KERNEL __launch_bounds__(LANES* ROWS, ROWS == 4 ? 3 : 1)
    norm_gradient(const T* dy, const T* x, const WIDE* stats, const T* weight, const T* dx, T* found, WIDE* sums, int rows) {
  int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  WIDE of[3][VECTORS][N] = {};
  for (int row = blockIdx.x * ROWS + group; row < rows; row += gridDim.x * ROWS) {
    size_t at = size_t(row) * WIDTH;
    WIDE mean = stats[row], scale = stats[rows + row], sum = 0, product = 0;
    WIDE normal[VECTORS][N], d[VECTORS][N];
    Vector<T, N> before[VECTORS];
    EACH_VECTOR {
      load(d[v], dy + at + e);
      load(normal[v], x + at + e);
      if (dx != nullptr) before[v] = *reinterpret_cast<const Vector<T, N>*>(dx + at + e);
    }
    EACH_VECTOR {
      WIDE w[N];
      load(w, weight + e);
      for (int i = 0; i < N; ++i) {
        normal[v][i] = (normal[v][i] - mean) * scale;
        of[0][v][i] += d[v][i] * normal[v][i];
        of[1][v][i] += d[v][i];
        d[v][i] *= w[i];
        sum += d[v][i];
        product += d[v][i] * normal[v][i];
      }
    }
    sum = reduce<Sum>(sum, LANES) / WIDTH;
    product = reduce<Sum>(product, LANES) / WIDTH;
    EACH_VECTOR {
      for (int i = 0; i < N; ++i) {
        d[v][i] = (d[v][i] - sum - normal[v][i] * product) * scale + (dx == nullptr ? WIDE(0) : WIDE(before[v].x[i]));
        of[2][v][i] += d[v][i];
      }
      store(found + at + e, d[v]);
    }
  }
  __shared__ WIDE of_groups[ROWS == 1 ? 1 : ROWS * WIDTH];
#pragma unroll
  for (int which = 0; which < 3; ++which) {
    WIDE* to = ROWS == 1 ? sums + (size_t(blockIdx.x) * 3 + which) * WIDTH : of_groups + group * WIDTH;
    EACH_VECTOR
      for (int i = 0; i < N; ++i) to[e + i] = of[which][v][i];
    if (ROWS == 1) continue;
    __syncthreads();
    for (int e = threadIdx.x; e < WIDTH; e += blockDim.x) {
      WIDE sum = 0;
      for (int i = 0; i < ROWS; ++i) sum += of_groups[i * WIDTH + e];
      sums[(size_t(blockIdx.x) * 3 + which) * WIDTH + e] = sum;
    }
    __syncthreads();
  }
}

// --- GELU: z / (1 + exp(-2 u)), which is z (1 + tanh(u)) / 2 ----------------------------------------------------------

constexpr WIDE LINEAR = 2 * 0.7978845608028654, CUBIC = 0.044715 * LINEAR;  // 2 sqrt(2 / pi) of it

KERNEL gelu(T* out, const T* x, const T* bias, int rows) {
  size_t at = (blockIdx.x * size_t(blockDim.x) + threadIdx.x) * N;
  if (at / WIDTH >= rows) return;
  WIDE z[N], b[N];
  load(z, x + at);
  load(b, bias + at % WIDTH);
  for (int i = 0; i < N; ++i) {
    z[i] += b[i];
    z[i] = fast_divide(z[i], 1 + fast_exp(-z[i] * (LINEAR + CUBIC * z[i] * z[i])));
  }
  store(out + at, z);
}

// In place of dy, with the sums of its columns.
KERNEL gelu_gradient(T* dy, const T* x, const T* bias, WIDE* sums, int rows) {
  int parts = gridDim.x / SLABS, part = blockIdx.x / SLABS, e = blockIdx.x % SLABS * SLAB + threadIdx.x * N;
  if (e >= WIDTH) return;
  WIDE b[N], sum[N] = {};
  load(b, bias + e);
  for (int row = part; row < rows; row += parts) {
    WIDE z[N], d[N];
    load(z, x + size_t(row) * WIDTH + e);
    load(d, dy + size_t(row) * WIDTH + e);
    for (int i = 0; i < N; ++i) {
      z[i] += b[i];
      WIDE share = fast_divide(WIDE(1), 1 + fast_exp(-z[i] * (LINEAR + CUBIC * z[i] * z[i])));
      d[i] *= share + z[i] * share * (1 - share) * (LINEAR + 3 * CUBIC * z[i] * z[i]);
      sum[i] += d[i];
    }
    store(dy + size_t(row) * WIDTH + e, d);
  }
  for (int i = 0; i < N; ++i) sums[size_t(part) * WIDTH + e + i] = sum[i];
}

// --- cross-entropy: a block has a row, which its second pass finds in the L2 cache ------------------------------------

KERNEL cross_entropy(T* logits, const int* targets, WIDE* losses, WIDE scale, int backward) {
  logits += size_t(blockIdx.x) * WIDTH;
  int target = targets[blockIdx.x];
  WIDE top = Max::neutral, sum = 0;  // each thread's own
  for (int e = threadIdx.x * N; e < WIDTH; e += blockDim.x * N) {
    WIDE s[N], above = top;
    load(s, logits + e);
    for (int i = 0; i < N; ++i) above = Max::of(above, s[i]);
    sum *= fast_exp(top - above);
    for (int i = 0; i < N; ++i) sum += fast_exp(s[i] - above);
    top = above;
  }
  WIDE of_row = reduce<Max>(top, blockDim.x);
  sum = reduce<Sum>(sum * fast_exp(top - of_row), blockDim.x);
  if (threadIdx.x == 0) losses[blockIdx.x] = target < 0 ? 0 : log(sum) + of_row - WIDE(logits[target]);
  if (!backward) return;
  __syncthreads();  // thread 0 has read its target
  WIDE factor = target < 0 ? 0 : scale / sum;
  for (int e = threadIdx.x * N; e < WIDTH; e += blockDim.x * N) {
    WIDE s[N];
    load(s, logits + e);
    for (int i = 0; i < N; ++i) s[i] = fast_exp(s[i] - of_row) * factor - (e + i == target ? scale : 0);
    store(logits + e, s);
  }
}

// --- the optimizer: a thread has four elements ------------------------------------------------------------------------

KERNEL adamw(WIDE* master, T* value, WIDE* gradient, WIDE* mean, WIDE* variance, const WIDE* factor, WIDE rate,
             WIDE decay, WIDE beta1, WIDE beta2, WIDE correction1, WIDE correction2, long long decayed, long long size) {
  long long at = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * 4;
  if (at >= size) return;
  WIDE g[4], m[4], v[4], x[4], clip = *factor, kept = at < decayed ? 1 - rate * decay : WIDE(1);
  load(g, gradient + at);
  load(m, mean + at);
  load(v, variance + at);
  load(x, master + at);
  for (int i = 0; i < 4; ++i) {
    g[i] *= clip;
    m[i] = beta1 * m[i] + (1 - beta1) * g[i];
    v[i] = beta2 * v[i] + (1 - beta2) * g[i] * g[i];
    x[i] = x[i] * kept - rate * (m[i] / correction1) / (sqrt(v[i] / correction2) + WIDE(1e-8));
    g[i] = 0;
  }
  store(gradient + at, g);
  store(mean + at, m);
  store(variance + at, v);
  store(master + at, x);
  store(value + at, x);
}
