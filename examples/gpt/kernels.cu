// The kernels of gpu.py. Two lines in front define T, the type of activations: bfloat16, float or double; and WIDE, that of
// sums: float, or double for double. Rows are contiguous; a block has a row, unless said otherwise.

#define KERNEL extern "C" __global__ void

struct alignas(4 * sizeof(T)) T4 {  // what a thread loads at once; widths are multiples of 4
  T x[4];
};

__device__ inline void load(WIDE (&to)[4], const T* from) {
  T4 v = *reinterpret_cast<const T4*>(from);
  for (int i = 0; i < 4; ++i) to[i] = WIDE(v.x[i]);
}

__device__ inline void store(T* to, const WIDE (&from)[4]) {
  T4 v;
  for (int i = 0; i < 4; ++i) v.x[i] = T(from[i]);
  *reinterpret_cast<T4*>(to) = v;
}

struct Sum {
  static constexpr WIDE neutral = 0;
  __device__ static WIDE of(WIDE a, WIDE b) { return a + b; }
};
struct Max {
  static constexpr WIDE neutral = -1e30;
  __device__ static WIDE of(WIDE a, WIDE b) { return a > b ? a : b; }
};

// Of all threads of a block, for all of them.
template <class Op>
__device__ WIDE reduce(WIDE x) {
  __shared__ WIDE of_warps[32];
  for (int lane = 16; lane; lane /= 2) x = Op::of(x, __shfl_xor_sync(~0u, x, lane));
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < (blockDim.x + 31) / 32 ? of_warps[threadIdx.x % 32] : Op::neutral;
  for (int lane = 16; lane; lane /= 2) x = Op::of(x, __shfl_xor_sync(~0u, x, lane));
  return x;
}

// --- embedding and biases --------------------------------------------------------------------------------------------

KERNEL embed(T* x, const int* ids, const int* positions, const T* words, const T* places, int width) {
  size_t row = blockIdx.x, word = ids[row], place = positions[row];
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {
    WIDE a[4], b[4];
    load(a, words + word * width + e);
    load(b, places + place * width + e);
    for (int i = 0; i < 4; ++i) a[i] += b[i];
    store(x + row * width + e, a);
  }
}

// A block has an index, and adds the rows of x that have it.
KERNEL add_rows(WIDE* total, const int* indices, const int* begins, const int* order, const T* x, int width) {
  size_t index = indices[blockIdx.x];
  for (int e = threadIdx.x; e < width; e += blockDim.x) {
    WIDE sum = 0;
    for (int t = begins[blockIdx.x]; t < begins[blockIdx.x + 1]; ++t) sum += WIDE(x[size_t(order[t]) * width + e]);
    total[index * width + e] += sum;
  }
}

KERNEL add_bias(T* x, const T* bias, int width) {
  x += size_t(blockIdx.x) * width;
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {
    WIDE a[4], b[4];
    load(a, x + e);
    load(b, bias + e);
    for (int i = 0; i < 4; ++i) a[i] += b[i];
    store(x + e, a);
  }
}

// --- layer normalisation ---------------------------------------------------------------------------------------------

KERNEL add_norm(const T* x, const T* added, const T* bias, const T* weight, const T* shift, T* total, T* y,
                WIDE* stats, int rows, int width) {
  size_t at = size_t(blockIdx.x) * width;
  WIDE sum = 0;
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {
    WIDE a[4], b[4], c[4];
    load(a, x + at + e);
    if (added != nullptr) {
      load(b, added + at + e);
      load(c, bias + e);
      for (int i = 0; i < 4; ++i) a[i] = WIDE(T(a[i] + b[i] + c[i]));
      store(total + at + e, a);
    }
    for (int i = 0; i < 4; ++i) sum += a[i];
  }
  WIDE mean = reduce<Sum>(sum) / width, square = 0;
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {  // each thread reads what it wrote
    WIDE a[4];
    load(a, total + at + e);
    for (int i = 0; i < 4; ++i) square += (a[i] - mean) * (a[i] - mean);
  }
  WIDE scale = 1 / sqrt(reduce<Sum>(square) / width + WIDE(1e-5));
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {
    WIDE a[4], w[4], b[4];
    load(a, total + at + e);
    load(w, weight + e);
    load(b, shift + e);
    for (int i = 0; i < 4; ++i) a[i] = (a[i] - mean) * scale * w[i] + b[i];
    store(y + at + e, a);
  }
  if (threadIdx.x == 0) {
    stats[blockIdx.x] = mean;
    stats[rows + blockIdx.x] = scale;
  }
}

// A block has every gridDim.x-th row, and sums what these rows add to the gradients by weight and shift: `sums`,
// (2, blocks, width). A thread has the columns that it starts at, in steps of a block.
KERNEL norm_gradient(const T* dy, const T* x, const WIDE* stats, const T* weight, const T* dx, T* found, WIDE* sums,
                     int rows, int width) {
  constexpr int COLUMNS = 4;  // of a thread at most: widths to 4 * 1024
  WIDE of_weight[COLUMNS] = {}, of_shift[COLUMNS] = {};
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    size_t at = size_t(row) * width;
    WIDE mean = stats[row], scale = stats[rows + row], sum = 0, product = 0, normal[COLUMNS], d[COLUMNS];
    for (int i = 0, e = threadIdx.x; e < width; ++i, e += blockDim.x) {
      WIDE g = WIDE(dy[at + e]);
      normal[i] = (WIDE(x[at + e]) - mean) * scale;
      d[i] = g * WIDE(weight[e]);
      of_weight[i] += g * normal[i];
      of_shift[i] += g;
      sum += d[i];
      product += d[i] * normal[i];
    }
    sum = reduce<Sum>(sum) / width;
    product = reduce<Sum>(product) / width;
    for (int i = 0, e = threadIdx.x; e < width; ++i, e += blockDim.x) {
      WIDE g = (d[i] - sum - normal[i] * product) * scale;
      found[at + e] = T(dx == nullptr ? g : g + WIDE(dx[at + e]));
    }
  }
  for (int i = 0, e = threadIdx.x; e < width; ++i, e += blockDim.x) {
    sums[size_t(blockIdx.x) * width + e] = of_weight[i];
    sums[size_t(gridDim.x + blockIdx.x) * width + e] = of_shift[i];
  }
}

// --- GELU ------------------------------------------------------------------------------------------------------------

constexpr WIDE LINEAR = 0.7978845608028654, CUBIC = 0.044715 * 0.7978845608028654;  // sqrt(2 / pi) of it

KERNEL gelu(T* out, const T* x, const T* bias, int width) {
  size_t at = size_t(blockIdx.x) * width;
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {
    WIDE z[4], b[4];
    load(z, x + at + e);
    load(b, bias + e);
    for (int i = 0; i < 4; ++i) {
      z[i] += b[i];
      z[i] *= WIDE(0.5) * (1 + tanh(z[i] * (LINEAR + CUBIC * z[i] * z[i])));
    }
    store(out + at + e, z);
  }
}

KERNEL gelu_gradient(T* dy, const T* x, const T* bias, int width) {
  size_t at = size_t(blockIdx.x) * width;
  for (int e = 4 * threadIdx.x; e < width; e += 4 * blockDim.x) {
    WIDE z[4], b[4], d[4];
    load(z, x + at + e);
    load(b, bias + e);
    load(d, dy + at + e);
    for (int i = 0; i < 4; ++i) {
      z[i] += b[i];
      WIDE t = tanh(z[i] * (LINEAR + CUBIC * z[i] * z[i]));
      d[i] *= WIDE(0.5) * (1 + t + z[i] * (1 - t * t) * (LINEAR + 3 * CUBIC * z[i] * z[i]));
    }
    store(dy + at + e, d);
  }
}

// --- cross-entropy ---------------------------------------------------------------------------------------------------

KERNEL cross_entropy(T* logits, const int* targets, WIDE* losses, WIDE scale, int backward, int width) {
  logits += size_t(blockIdx.x) * width;
  int target = targets[blockIdx.x];
  // Each thread's maximum and sum first, in one pass.
  WIDE top = Max::neutral, sum = 0;
  for (int e = threadIdx.x; e < width; e += blockDim.x) {
    WIDE s = WIDE(logits[e]), above = Max::of(top, s);
    sum = sum * exp(top - above) + exp(s - above);
    top = above;
  }
  WIDE of_row = reduce<Max>(top);
  sum = reduce<Sum>(sum * exp(top - of_row));
  if (threadIdx.x == 0) losses[blockIdx.x] = target < 0 ? 0 : log(sum) + of_row - WIDE(logits[target]);
  if (!backward) return;
  __syncthreads();  // thread 0 has read its target
  WIDE factor = target < 0 ? 0 : scale / sum;
  for (int e = threadIdx.x; e < width; e += blockDim.x) {
    WIDE p = exp(WIDE(logits[e]) - of_row) * factor;
    logits[e] = T(e == target ? p - scale : p);
  }
}

// --- the optimizer: a thread has an element ---------------------------------------------------------------------------

KERNEL adamw(WIDE* master, T* value, WIDE* gradient, WIDE* mean, WIDE* variance, const WIDE* factor, WIDE rate,
             WIDE decay, WIDE beta1, WIDE beta2, WIDE correction1, WIDE correction2, long long size) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= size) return;
  WIDE g = gradient[i] * *factor;
  gradient[i] = 0;
  WIDE m = mean[i] = beta1 * mean[i] + (1 - beta1) * g;
  WIDE v = variance[i] = beta2 * variance[i] + (1 - beta2) * g * g;
  WIDE x = master[i] * (1 - rate * decay) - rate * (m / correction1) / (sqrt(v / correction2) + WIDE(1e-8));
  master[i] = x;
  value[i] = T(x);
}
