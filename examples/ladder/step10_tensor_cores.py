"""Step 10, tensor cores: the loop of step 5 with a warp for each 16 queries, whose products are instructions, in CuPy.

`mma` multiplies 16 x 16 halves by 16 x 8 and adds in float32. A warp has its matrices in registers: a thread has rows
lane / 4 and 8 below, and columns 2 (lane % 4) and the next. Where a product of queries and keys leaves its numbers, the
product of weights and values wants them, so weights stay there. flashkit's sm80 kernels also copy tiles ahead.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec

import numpy as np
from numba import cuda

from examples.ladder.memory import Array, D, N, SlowMemory, show
from examples.ladder.step9_simt import attention as simt

ROWS = 64  # of a block of four warps
CODE = r"""
using half = unsigned short;
using pair = unsigned;  // two halves, adjacent in memory
constexpr int ROWS = 64, KEYS = 64, D = 64;

__device__ void mma(float (&c)[4], const pair (&a)[4], const half* b) {  // c += a b; b: the thread's column
  const pair* x = reinterpret_cast<const pair*>(b);
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(x[0]), "r"(x[4]));
}

extern "C" __global__ void attention(const half* q, const half* k, const half* v, float* out, int n, float scale) {
  __shared__ half tile_k[KEYS][D + 8], tile_v[D][KEYS + 8];  // v transposed; rows apart, in other banks
  int lane = threadIdx.x % 32, row = blockIdx.x * ROWS + threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  pair queries[D / 16][4];
  for (int i = 0; i < D / 4; ++i) {
    int at = min(row + i % 2 * 8, n - 1) * D + i / 4 * 16 + i % 4 / 2 * 8 + column;
    queries[i / 4][i % 4] = *reinterpret_cast<const pair*>(q + at);
  }
  float total[D / 8][4] = {}, m[2] = {-1e30, -1e30}, l[2] = {};
  for (int begin = 0; begin < n; begin += KEYS) {
    __syncthreads();  // all have used the tile before
    for (int x = threadIdx.x; x < KEYS * D; x += blockDim.x) {
      tile_k[x / D][x % D] = begin + x / D < n ? k[begin * D + x] : 0;
      tile_v[x % D][x / D] = begin + x / D < n ? v[begin * D + x] : 0;
    }
    __syncthreads();
    float s[KEYS / 8][4] = {};
    for (int j = 0; j < KEYS / 8; ++j) {
      for (int i = 0; i < D / 16; ++i) mma(s[j], queries[i], &tile_k[j * 8 + lane / 4][i * 16 + column]);
      for (int x = 0; x < 4; ++x) s[j][x] = begin + j * 8 + column + x % 2 < n ? s[j][x] * scale : -1e30;
    }
    for (int r = 0; r < 2; ++r) {
      float top = m[r];
      for (int j = 0; j < KEYS / 8; ++j) top = fmaxf(top, fmaxf(s[j][2 * r], s[j][2 * r + 1]));
      for (int x = 1; x < 4; x *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));  // four threads have the row
      float correction = exp2f(m[r] - top);
      m[r] = top;
      l[r] *= correction;
      for (int i = 0; i < D / 4; ++i) total[i / 2][2 * r + i % 2] *= correction;
      for (int j = 0; j < KEYS / 4; ++j) l[r] += s[j / 2][2 * r + j % 2] = exp2f(s[j / 2][2 * r + j % 2] - top);
    }
    for (int j = 0; j < KEYS / 8; j += 2) {
      pair p[4];
      for (int x = 0; x < 4; ++x) {
        float* two = &s[j + x / 2][x % 2 * 2];
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p[x]) : "f"(two[1]), "f"(two[0]));
      }
      for (int i = 0; i < D / 8; ++i) mma(total[i], p, &tile_v[i * 8 + lane / 4][j * 8 + column]);
    }
  }
  for (int r = 0; r < 2; ++r) {
    for (int x = 1; x < 4; x *= 2) l[r] += __shfl_xor_sync(~0u, l[r], x);
    for (int i = 0; i < D / 4 && row + r * 8 < n; ++i)
      out[(row + r * 8) * D + i / 2 * 8 + column + i % 2] = total[i / 2][2 * r + i % 2] / l[r];
  }
}
"""
compiled = cache(lambda cupy: cupy.RawModule(code=CODE, options=("-std=c++17",)).get_function("attention"))


def attention(q: Array, k: Array, v: Array, memory: SlowMemory) -> Array:
    cupy = importlib.import_module("cupy")
    there = [cupy.asarray(x.astype(np.float16)) for x in (q, k, v)]
    out, blocks, scale = cupy.empty(q.shape, np.float32), -(-len(q) // ROWS), np.float32(np.log2(np.e) / D**0.5)
    compiled(cupy)((blocks,), (2 * ROWS,), (*there, out, np.int32(len(q)), scale))
    memory.moved += there[0].nbytes + out.nbytes + blocks * (there[1].nbytes + there[2].nbytes)
    return out.get()


def main() -> None:
    if not cuda.is_available() or not find_spec("cupy"):
        print(f"10 tensor cores: none here ({N} tokens wait)")
    else:
        show("10 tensor cores, 16 queries a warp", attention, simt)


if __name__ == "__main__":
    main()
