// The kernels of gpu.py, which defines T, the type of activations: bfloat16, float or double; WIDE, that of sums: float, or
// double for double; and WIDTH, the columns of a row. Rows are contiguous. A thread loads 16 bytes at once, and all that
// it needs before it stores anything.

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  explicit __device__ bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  explicit __device__ operator float() const { return __uint_as_float(unsigned(bits) << 16); }
};

#define KERNEL extern "C" __global__ void

constexpr int N = WIDTH % (16 / sizeof(T)) ? 1 : 16 / sizeof(T);  // elements that a thread loads at once
constexpr int VECTORS = (WIDTH + 32 * N - 1) / (32 * N);          // of a row, for each lane of a warp that has it
#define EACH_VECTOR \
  _Pragma("unroll 8") for (int v = 0, e = threadIdx.x % 32 * N; v < VECTORS && e < WIDTH; ++v, e += 32 * N)

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
__device__ inline WIDE fast_exp(WIDE x) { return sizeof(T) == 2 ? __expf(x) : exp(x); }
__device__ inline WIDE fast_divide(WIDE x, WIDE y) { return sizeof(T) == 2 ? __fdividef(x, y) : x / y; }

// The sum or the maximum of all lanes, for each of them.
template <bool MAX = false>
__device__ inline WIDE of_warp(WIDE x) {
  for (int lane = 16; lane; lane /= 2) {
    WIDE y = __shfl_xor_sync(~0u, x, lane);
    x = MAX ? (x > y ? x : y) : x + y;
  }
  return x;
}

// `to`, of WIDTH, gets the sum of what all warps of the block have, or that is added to it.
template <int WARPS>
__device__ inline void sum_warps(WIDE* to, const WIDE (&x)[VECTORS][N], bool add) {
  __shared__ WIDE of_warps[WARPS][32 * N];
#pragma unroll 8
  for (int v = 0; v < VECTORS; ++v) {
    for (int i = 0; i < N; ++i) of_warps[threadIdx.x / 32][threadIdx.x % 32 * N + i] = x[v][i];
    __syncthreads();
    for (int i = threadIdx.x, e = v * 32 * N + i; i < 32 * N && e < WIDTH; i += blockDim.x, e += blockDim.x) {
      WIDE sum = add ? to[e] : 0;
      for (int warp = 0; warp < WARPS; ++warp) sum += of_warps[warp][i];
      to[e] = sum;
    }
    __syncthreads();
  }
}

constexpr WIDE LINEAR = 2 * 0.7978845608028654, CUBIC = 0.044715 * LINEAR;  // 2 sqrt(2 / pi) of it

// GELU(z) / z: (1 + tanh(u)) / 2 is 1 / (1 + exp(-2 u)).
__device__ inline WIDE gelu_share(WIDE z) { return fast_divide(WIDE(1), 1 + fast_exp(-z * (LINEAR + CUBIC * z * z))); }

// out = a[rows_a] + b[rows_b], or its GELU. Without indices a has a row for each of out, and b has one. A block has a row.
KERNEL add(T* out, const T* a, const int* rows_a, const T* b, const int* rows_b, int gelu) {
  a += size_t(rows_a == nullptr ? blockIdx.x : rows_a[blockIdx.x]) * WIDTH;
  b += size_t(rows_b == nullptr ? 0 : rows_b[blockIdx.x]) * WIDTH;
  for (int e = threadIdx.x * N; e < WIDTH; e += blockDim.x * N) {
    WIDE x[N], y[N];
    load(x, a + e);
    load(y, b + e);
    for (int i = 0; i < N; ++i) {
      x[i] += y[i];
      if (gelu) x[i] *= gelu_share(x[i]);
    }
    store(out + size_t(blockIdx.x) * WIDTH + e, x);
  }
}

// In place of dy. A block has a row.
KERNEL gelu_gradient(T* dy, const T* x, const T* bias) {
  dy += size_t(blockIdx.x) * WIDTH;
  x += size_t(blockIdx.x) * WIDTH;
  for (int e = threadIdx.x * N; e < WIDTH; e += blockDim.x * N) {
    WIDE b[N], z[N], d[N];
    load(b, bias + e);
    load(z, x + e);
    load(d, dy + e);
    for (int i = 0; i < N; ++i) {
      z[i] += b[i];
      WIDE share = gelu_share(z[i]);
      d[i] *= share + z[i] * share * (1 - share) * (LINEAR + 3 * CUBIC * z[i] * z[i]);
    }
    store(dy + e, d);
  }
}

#if WIDTH <= 4096  // a warp has a row in its registers, and a block has four
KERNEL add_norm(const T* x, const T* added, const T* bias, const T* weight, const T* shift, T* total, T* y,
                WIDE* stats, int rows) {
  int row = blockIdx.x * 4 + threadIdx.x / 32;
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
  WIDE mean = of_warp(sum) / WIDTH;
  EACH_VECTOR {
    if (added != nullptr) store(total + at + e, a[v]);
    for (int i = 0; i < N; ++i) square += (a[v][i] - mean) * (a[v][i] - mean);
  }
  WIDE scale = 1 / sqrt(of_warp(square) / WIDTH + WIDE(1e-5));
  EACH_VECTOR {
    WIDE w[N], b[N];
    load(w, weight + e);
    load(b, shift + e);
    for (int i = 0; i < N; ++i) a[v][i] = (a[v][i] - mean) * scale * w[i] + b[i];
    store(y + at + e, a[v]);
  }
  if (threadIdx.x % 32 == 0) {
    stats[row] = mean;
    stats[rows + row] = scale;
  }
}

// sums: of a block's rows, the gradients by weight and by shift, (2, blocks, WIDTH).
KERNEL __launch_bounds__(128, VECTORS * N > 24 ? 1 : 3)
    norm_gradient(const T* dy, const T* x, const WIDE* stats, const T* weight, const T* dx, T* found, WIDE* sums, int rows) {
  WIDE of[2][VECTORS][N] = {};
  for (int row = blockIdx.x * 4 + threadIdx.x / 32; row < rows; row += gridDim.x * 4) {
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
    sum = of_warp(sum) / WIDTH;
    product = of_warp(product) / WIDTH;
    EACH_VECTOR {
      for (int i = 0; i < N; ++i)
        d[v][i] = (d[v][i] - sum - normal[v][i] * product) * scale + (dx == nullptr ? WIDE(0) : WIDE(before[v].x[i]));
      store(found + at + e, d[v]);
    }
  }
#pragma unroll
  for (int which = 0; which < 2; ++which)
    sum_warps<4>(sums + (size_t(which) * gridDim.x + blockIdx.x) * WIDTH, of[which], false);
}

// A block has an index: its warps take turns with the rows of x that have it. Behind the last index none has.
KERNEL add_rows(WIDE* total, const int* indices, const int* begins, const int* order, const T* x) {
  if (begins[blockIdx.x] == begins[blockIdx.x + 1]) return;
  WIDE sum[VECTORS][N] = {};
  for (int t = begins[blockIdx.x] + threadIdx.x / 32; t < begins[blockIdx.x + 1]; t += 16) {
    EACH_VECTOR {
      WIDE a[N];
      load(a, x + size_t(order[t]) * WIDTH + e);
      for (int i = 0; i < N; ++i) sum[v][i] += a[i];
    }
  }
  sum_warps<16>(total + size_t(indices[blockIdx.x]) * WIDTH, sum, true);
}
#endif

template <bool MAX>
__device__ inline WIDE of_block(WIDE x) {
  __shared__ WIDE of_warps[32];
  x = of_warp<MAX>(x);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  return of_warp<MAX>(threadIdx.x % 32 < blockDim.x / 32 ? of_warps[threadIdx.x % 32] : MAX ? WIDE(-1e30) : 0);
}

// A block has a row, which its second pass finds in the L2 cache.
KERNEL cross_entropy(T* logits, const int* targets, WIDE* losses, WIDE scale, int backward) {
  logits += size_t(blockIdx.x) * WIDTH;
  int target = targets[blockIdx.x];
  WIDE top = -1e30, sum = 0;  // each thread's own
  for (int e = threadIdx.x * N; e < WIDTH; e += blockDim.x * N) {
    WIDE s[N], above = top;
    load(s, logits + e);
    for (int i = 0; i < N; ++i) above = above > s[i] ? above : s[i];
    sum *= fast_exp(top - above);
    for (int i = 0; i < N; ++i) sum += fast_exp(s[i] - above);
    top = above;
  }
  WIDE of_row = of_block<true>(top);
  sum = of_block<false>(sum * fast_exp(top - of_row));
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

// A thread has four elements.
KERNEL adamw(WIDE* master, T* value, WIDE* gradient, WIDE* mean, WIDE* variance, const WIDE* factor, WIDE rate, WIDE decay,
             WIDE beta1, WIDE beta2, WIDE correction1, WIDE correction2, long long decayed, long long size) {
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
