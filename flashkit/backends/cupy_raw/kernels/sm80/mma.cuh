// Matrix products of a warp by mma.sync: of tiles in shared memory, and of P in registers.
#pragma once

// --- float32 ---------------------------------------------------------------------------------------------------------
//
// float32 on tensor cores by TF32, which has 11 significant bits.
//
// TF32x3: with TF32_TERMS = 3 each operand is the sum of two TF32 values, and a product is the sum of the three larger
// of their four products (Ootomo and Yokota 2022, arXiv 2203.03341). The product that is left out, up to 2^-22 of the
// result, averages out in long sums. Tensor cores round their sums towards zero; so each step starts from zero, and
// FADD, which rounds to nearest, adds it to the accumulator.

// The nearest TF32 value.
DEVICE unsigned round_tf32(unsigned x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
}

// A float32 as two TF32 values; the instruction ignores the last 13 bits. Rounding may turn a NaN into 0, which leaves
// the NaN to the low part; the low part of an infinity is NaN, too. Truncation would take an instruction less, but then
// the product of two low parts, which is left out, would be too large.
DEVICE void split_tf32(unsigned x, unsigned& high, unsigned& low) {
    high = (x + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

// --- products --------------------------------------------------------------------------------------------------------

template <bool TRANSPOSED>
DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned address) {  // four of 8 x 16 bytes
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA_SYNC(shape)                                                                                          \
    asm("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (STORAGE == FLOAT16) MMA_SYNC("m16n8k16.row.col.f32.f16.f16.f32");
    else if constexpr (STORAGE == BFLOAT16) MMA_SYNC("m16n8k16.row.col.f32.bf16.bf16.f32");
    else MMA_SYNC("m16n8k8.row.col.f32.tf32.tf32.f32");
#undef MMA_SYNC
}

// The A operands of one step.
template <int TILES>
struct FragmentA {
    unsigned high[TILES][4], low[IS_FLOAT32 && TF32_TERMS == 3 ? TILES : 1][4];

    __device__ __forceinline__ void to_tf32() {
        if constexpr (IS_FLOAT32) {
            UNROLL(i, TILES)
                UNROLL(e, 4) {
                    if constexpr (TF32_TERMS == 3) split_tf32(high[i][e], high[i][e], low[i][e]);
                    else high[i][e] = round_tf32(high[i][e]);
                }
        }
    }
};

// One step: c += a b for the rows of all TILES of a and 8 columns.
template <int TILES, int N>
DEVICE void mma_step(float (&c)[TILES][N][4], int n, const FragmentA<TILES>& a, unsigned b0, unsigned b1) {
    if constexpr (!IS_FLOAT32) {
        UNROLL(i, TILES) mma(c[i][n], a.high[i], b0, b1);
    } else if constexpr (TF32_TERMS == 1) {
        UNROLL(i, TILES) mma(c[i][n], a.high[i], round_tf32(b0), round_tf32(b1));
    } else {
        unsigned high0, high1, low0, low1;
        split_tf32(b0, high0, low0), split_tf32(b1, high1, low1);
        UNROLL(i, TILES) {
            float sum[4] = {0, 0, 0, 0};
            mma(sum, a.low[i], high0, high1);
            mma(sum, a.high[i], low0, low1);
            mma(sum, a.high[i], high0, high1);
            UNROLL(e, 4) c[i][n][e] += sum[e];
        }
    }
}

// The row and vector whose address a lane passes to ldmatrix_x4: rows 0 ... 15 of one vector, then of the next;
DEVICE unsigned a_row() { return threadIdx.x % 16; }
DEVICE unsigned a_vec() { return threadIdx.x / 16 % 2; }
// or rows 0 ... 7 of two vectors, then rows 8 ... 15.
DEVICE unsigned b_row() { return threadIdx.x / 16 % 2 * 8 + threadIdx.x % 8; }
DEVICE unsigned b_vec() { return threadIdx.x / 8 % 2; }

DEVICE unsigned load_word(unsigned address) {
    unsigned x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

// The B operands of one step for 16 columns, those from 8 n on of the warp's N * 8, from rows along the summation axis.
// ldmatrix cannot transpose 32-bit elements: there a lane takes rows 2t and 2t + 1 for t and t + 4, without bank
// conflicts, and load_a() does likewise.
template <int DIM, int N>
DEVICE void load_b_transposed(unsigned (&b_frag)[4], unsigned b, int warp_column, int k, int n) {
    constexpr int WIDTH = 8 / VEC_ELEMENTS, SHARE = N * WIDTH;
    if constexpr (!IS_FLOAT32) {
        const unsigned piece = vec_address<DIM, SHARE>(b, a_row(), warp_column * SHARE + a_vec(), n);
        ldmatrix_x4<true>(b_frag, piece + k * STEP * pitch(DIM));
    } else {
        const unsigned row = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4;
        UNROLL(e, 4)
            b_frag[e] = load_word(vec_address<DIM, SHARE>(b, row + e % 2, warp_column * SHARE + g / 4,
                                                          (n + e / 2) * WIDTH) + k * STEP * pitch(DIM) + g % 4 * 4);
    }
}

// The A operands of one step for 16 rows of P or dS, PITCH bytes apart, in the order of load_b_transposed().
// TRANSPOSED: the rows in shared memory lie along the summation axis.
template <bool TRANSPOSED, int PITCH>
DEVICE void load_a(unsigned (&a_frag)[4], unsigned a) {
    if constexpr (!IS_FLOAT32) {
        ldmatrix_x4<TRANSPOSED>(a_frag, a + (TRANSPOSED ? b_row() * PITCH + b_vec() * 16
                                                : a_row() * PITCH + a_vec() * 16));
    } else {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        a += TRANSPOSED ? 2 * t * PITCH + g * 4 : g * PITCH + 2 * t * 4;
        UNROLL(e, 4)
            a_frag[e] = load_word(a + (TRANSPOSED ? e / 2 * PITCH + e % 2 * 32 : e % 2 * 8 * PITCH + e / 2 * 4));
    }
}

// One step of c += a b, for 8 N columns: load_b(b_frag, n) gives the B operands of 16 columns from 8 n on.
template <int TILES, int N, typename F>
DEVICE void mma_columns(float (&c)[TILES][N][4], const FragmentA<TILES>& a, F load_b) {
#pragma unroll
    for (int n = 0; n < N; n += 2) {
        unsigned b_frag[4];
        load_b(b_frag, n);
        mma_step(c, n, a, b_frag[0], b_frag[1]);
        mma_step(c, n + 1, a, b_frag[2], b_frag[3]);
    }
}

// Work that a product interleaves with its steps: interleave(k, steps) in step k.
struct NoInterleave {
    __device__ __forceinline__ void operator()(int, int) const {}
};

// c += a b: 16 TILES rows, 8 N columns, STEPS steps. Both operands lie in shared memory. a is P or dS with rows PITCH
// bytes apart, or its transpose; b has rows of DIM columns, of which this warp multiplies share number warp_column.
template <int STEPS, bool TRANSPOSED, int PITCH, int DIM, int TILES, int N, typename F = NoInterleave>
DEVICE void gemm_nn(float (&c)[TILES][N][4], unsigned a, unsigned b, int warp_column, F interleave = {}) {
    UNROLL(k, STEPS) {
        FragmentA<TILES> a_frag;
        UNROLL(i, TILES)
            load_a<TRANSPOSED, PITCH>(a_frag.high[i], a + (TRANSPOSED ? k * STEP * PITCH + i * 16 * (int)sizeof(storage)
                                                               : i * 16 * PITCH + k * 32));
        interleave(k, STEPS);
        a_frag.to_tf32();
        mma_columns(c, a_frag, [&](unsigned (&b_frag)[4], int n) {
            load_b_transposed<DIM, N>(b_frag, b, warp_column, k, n);
        });
    }
}

// c += a b^T: 16 TILES rows of a and 8 N rows of b, both with DIM columns in shared memory.
template <int DIM, int TILES, int N, typename F = NoInterleave>
DEVICE void gemm_nt(float (&c)[TILES][N][4], unsigned a, unsigned b, F interleave = {}) {
    constexpr int STEPS = up(DIM, STEP) / STEP;
    UNROLL(k, STEPS) {
        FragmentA<TILES> a_frag;
        const unsigned a_address = vec_address<DIM, row_vecs(DIM)>(a, a_row(), a_vec(), 2 * k);
        const unsigned b_address = vec_address<DIM, row_vecs(DIM)>(b, b_row(), b_vec(), 2 * k);
        UNROLL(i, TILES) ldmatrix_x4<false>(a_frag.high[i], a_address + i * 16 * pitch(DIM));
        interleave(k, STEPS);
        a_frag.to_tf32();
        mma_columns(c, a_frag, [&](unsigned (&b_frag)[4], int n) {
            ldmatrix_x4<false>(b_frag, b_address + n * 8 * pitch(DIM));
        });
    }
}

// gemm_nt() for 16-bit elements that loads the operands of a step during the step before.
template <int DIM, int TILES, int N, typename F = NoInterleave>
DEVICE void gemm_nt_pipelined(float (&c)[TILES][N][4], unsigned a, unsigned b, F interleave = {}) {
    constexpr int STEPS = up(DIM, STEP) / STEP;
    FragmentA<TILES> a_frag[2];
    unsigned b_frag[2][N / 2][4];
    const auto load = [&](int k) {
        const unsigned a_address = vec_address<DIM, row_vecs(DIM)>(a, a_row(), a_vec(), 2 * k);
        const unsigned b_address = vec_address<DIM, row_vecs(DIM)>(b, b_row(), b_vec(), 2 * k);
        UNROLL(i, TILES) ldmatrix_x4<false>(a_frag[k % 2].high[i], a_address + i * 16 * pitch(DIM));
#pragma unroll
        for (int n = 0; n < N; n += 2) ldmatrix_x4<false>(b_frag[k % 2][n / 2], b_address + n * 8 * pitch(DIM));
    };
    load(0);
    UNROLL(k, STEPS) {
        if (k + 1 < STEPS) load(k + 1);
        interleave(k, STEPS);
        UNROLL(n, N) {
            const unsigned(&b_pair)[4] = b_frag[k % 2][n / 2];
            mma_step(c, n, a_frag[k % 2], b_pair[n % 2 * 2], b_pair[n % 2 * 2 + 1]);
        }
    }
}

// c += p b: P in registers, K * 8 columns, times as many rows of b with DIM columns in shared memory.
template <int DIM, int TILES, int K, int N>
DEVICE void gemm_rs(float (&c)[TILES][N][4], const float (&p)[TILES][K][4], unsigned b) {
#pragma unroll
    for (int k = 0; k < K; k += STEP / 8) {
        FragmentA<TILES> a_frag;
        UNROLL(i, TILES) {
            if constexpr (IS_FLOAT32) {  // columns 2t, 2t + 1 stand for t, t + 4, as in load_b_transposed()
                a_frag.high[i][0] = __float_as_uint(p[i][k][0]), a_frag.high[i][2] = __float_as_uint(p[i][k][1]);
                a_frag.high[i][1] = __float_as_uint(p[i][k][2]), a_frag.high[i][3] = __float_as_uint(p[i][k][3]);
            } else {
                a_frag.high[i][0] = pack(p[i][k][0], p[i][k][1]), a_frag.high[i][1] = pack(p[i][k][2], p[i][k][3]);
                a_frag.high[i][2] = pack(p[i][k + 1][0], p[i][k + 1][1]);
                a_frag.high[i][3] = pack(p[i][k + 1][2], p[i][k + 1][3]);
            }
        }
        a_frag.to_tf32();
        mma_columns(c, a_frag, [&](unsigned (&b_frag)[4], int n) {
            load_b_transposed<DIM, N>(b_frag, b, 0, k * 8 / STEP, n);
        });
    }
}

template <int TILES, int N>
DEVICE void clear(float (&c)[TILES][N][4]) {
    UNROLL(i, TILES)
        UNROLL(n, N)
            UNROLL(e, 4) c[i][n][e] = 0;
}
