// Products of tiles in shared memory and of weights in registers, by a warp.
#pragma once

template <bool TRANSPOSED>
DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned address) {  // four of 8 x 16 bytes
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

DEVICE void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MULTIPLY(shape)                                                                                              \
    asm("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (STORAGE == FLOAT16) MULTIPLY("m16n8k16.row.col.f32.f16.f16.f32");
    else if constexpr (STORAGE == BFLOAT16) MULTIPLY("m16n8k16.row.col.f32.bf16.bf16.f32");
    else MULTIPLY("m16n8k8.row.col.f32.tf32.tf32.f32");
#undef MULTIPLY
}

// A float32 number to the nearest of TF32.
DEVICE unsigned round_tf32(unsigned x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
}

// A float32 number as two of TF32; the unit ignores the last 13 bits. Adding may turn a NaN into 0, which leaves the NaN to
// the lower part; of an infinity that is NaN too. Cutting the upper part off instead would take an instruction less, but
// the products of two lower parts, which are left out, are too large then.
DEVICE void split(unsigned x, unsigned& high, unsigned& low) {
    high = (x + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

// Left operands of one step, ready to be multiplied.
template <int TILES>
struct Left {
    unsigned high[TILES][4], low[IS_FLOAT32 && TERMS == 3 ? TILES : 1][4];

    __device__ __forceinline__ void ready() {
        if constexpr (IS_FLOAT32) {
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if constexpr (TERMS == 3) split(high[i][e], high[i][e], low[i][e]);
                    else high[i][e] = round_tf32(high[i][e]);
                }
        }
    }
};

// One step: c += a b for the rows of all left tiles and 8 columns.
template <int TILES, int N>
DEVICE void step(float (&c)[TILES][N][4], int n, const Left<TILES>& a, unsigned b0, unsigned b1) {
    if constexpr (!IS_FLOAT32) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) multiply(c[i][n], a.high[i], b0, b1);
    } else if constexpr (TERMS == 1) {
#pragma unroll
        for (int i = 0; i < TILES; ++i) multiply(c[i][n], a.high[i], round_tf32(b0), round_tf32(b1));
    } else {
        unsigned high0, high1, low0, low1;
        split(b0, high0, low0), split(b1, high1, low1);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            float sum[4] = {0, 0, 0, 0};
            multiply(sum, a.low[i], high0, high1);
            multiply(sum, a.high[i], low0, low1);
            multiply(sum, a.high[i], high0, high1);
#pragma unroll
            for (int e = 0; e < 4; ++e) c[i][n][e] += sum[e];
        }
    }
}

// Where a lane points for ldmatrix_x4: rows 0 ... 15 of one piece, then of the next;
DEVICE unsigned row_first() { return threadIdx.x % 16; }
DEVICE unsigned piece_second() { return threadIdx.x / 16 % 2; }
// or rows 0 ... 7 of two pieces, then rows 8 ... 15.
DEVICE unsigned row_second() { return threadIdx.x / 16 % 2 * 8 + threadIdx.x % 8; }
DEVICE unsigned piece_first() { return threadIdx.x / 8 % 2; }

DEVICE unsigned load_word(unsigned address) {
    unsigned x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
}

// Right operands of one step for 16 columns, those from 8 n on of the warp's N * 8, from rows that are multiplied and
// columns that remain. Float32 has no transposing load. There the lane takes rows 2t and 2t + 1 for t and t + 4, without
// conflicts of banks; left operands do likewise.
template <int DIM, int N>
DEVICE void load_turned(unsigned (&right)[4], unsigned b, int share, int k, int n) {
    constexpr int WIDTH = 8 / VEC_ELEMENTS, SHARE = N * WIDTH;
    if constexpr (!IS_FLOAT32) {
        const unsigned piece = piece_at<DIM, SHARE>(b, row_first(), share * SHARE + piece_second(), n);
        ldmatrix_x4<true>(right, piece + k * STEP * pitch(DIM));
    } else {
        const unsigned row = threadIdx.x % 4 * 2, g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            right[e] = load_word(piece_at<DIM, SHARE>(b, row + e % 2, share * SHARE + g / 4, (n + e / 2) * WIDTH) +
                                 k * STEP * pitch(DIM) + g % 4 * 4);
    }
}

// Left operands of one step for 16 rows of weights, whose rows are PITCH bytes apart, as load_turned() wants them: TURNED
// like the right ones there, else from rows that remain.
template <bool TURNED, int PITCH>
DEVICE void load_left(unsigned (&left)[4], unsigned a) {
    if constexpr (!IS_FLOAT32) {
        ldmatrix_x4<TURNED>(left, a + (TURNED ? row_second() * PITCH + piece_first() * 16
                                                : row_first() * PITCH + piece_second() * 16));
    } else {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        a += TURNED ? 2 * t * PITCH + g * 4 : g * PITCH + 2 * t * 4;
#pragma unroll
        for (int e = 0; e < 4; ++e)
            left[e] = load_word(a + (TURNED ? e / 2 * PITCH + e % 2 * 32 : e % 2 * 8 * PITCH + e / 2 * 4));
    }
}

// What is done between the steps of a product: between(k, steps) in step k.
struct Nothing {
    __device__ __forceinline__ void operator()(int, int) const {}
};

// c += a b: 16 TILES rows, 8 N columns, STEPS steps. Both operands lie in shared memory, the weights a by rows, which are
// PITCH bytes apart, or, if TURNED, by columns; b, of DIM columns, by rows. Which share of its columns is this warp's?
template <int STEPS, bool TURNED, int PITCH, int DIM, int TILES, int N, typename F = Nothing>
DEVICE void multiply_turned(float (&c)[TILES][N][4], unsigned a, unsigned b, int share, F between = {}) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        Left<TILES> left;
#pragma unroll
        for (int i = 0; i < TILES; ++i)
            load_left<TURNED, PITCH>(left.high[i], a + (TURNED ? k * STEP * PITCH + i * 16 * (int)sizeof(storage)
                                                               : i * 16 * PITCH + k * 32));
        between(k, STEPS);
        left.ready();
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_turned<DIM, N>(right, b, share, k, n);
            step(c, n, left, right[0], right[1]);
            step(c, n + 1, left, right[2], right[3]);
        }
    }
}

// c += a b^T: 16 TILES rows of a and 8 N rows of b, both with DIM columns in shared memory.
template <int DIM, int TILES, int N, typename F = Nothing>
DEVICE void multiply_rows(float (&c)[TILES][N][4], unsigned a, unsigned b, F between = {}) {
    constexpr int STEPS = up(DIM, STEP) / STEP;
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        Left<TILES> left;
        const unsigned of_a = piece_at<DIM, pieces(DIM)>(a, row_first(), piece_second(), 2 * k);
        const unsigned of_b = piece_at<DIM, pieces(DIM)>(b, row_second(), piece_first(), 2 * k);
#pragma unroll
        for (int i = 0; i < TILES; ++i) ldmatrix_x4<false>(left.high[i], of_a + i * 16 * pitch(DIM));
        between(k, STEPS);
        left.ready();
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            ldmatrix_x4<false>(right, of_b + n * 8 * pitch(DIM));
            step(c, n, left, right[0], right[1]);
            step(c, n + 1, left, right[2], right[3]);
        }
    }
}

// The same, where a step's operands are asked for while the step before is multiplied. For 16-bit elements.
template <int DIM, int TILES, int N, typename F = Nothing>
DEVICE void multiply_rows_early(float (&c)[TILES][N][4], unsigned a, unsigned b, F between = {}) {
    constexpr int STEPS = up(DIM, STEP) / STEP;
    Left<TILES> left[2];
    unsigned right[2][N / 2][4];
    const auto load = [&](int k) {
        const unsigned of_a = piece_at<DIM, pieces(DIM)>(a, row_first(), piece_second(), 2 * k);
        const unsigned of_b = piece_at<DIM, pieces(DIM)>(b, row_second(), piece_first(), 2 * k);
#pragma unroll
        for (int i = 0; i < TILES; ++i) ldmatrix_x4<false>(left[k % 2].high[i], of_a + i * 16 * pitch(DIM));
#pragma unroll
        for (int n = 0; n < N; n += 2) ldmatrix_x4<false>(right[k % 2][n / 2], of_b + n * 8 * pitch(DIM));
    };
    load(0);
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        if (k + 1 < STEPS) load(k + 1);
        between(k, STEPS);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const unsigned(&pair)[4] = right[k % 2][n / 2];
            step(c, n, left[k % 2], pair[n % 2 * 2], pair[n % 2 * 2 + 1]);
        }
    }
}

// c += w b: weights in registers, K * 8 columns of them, times as many rows of b with DIM columns in shared memory.
template <int DIM, int TILES, int K, int N>
DEVICE void multiply_weights(float (&c)[TILES][N][4], const float (&w)[TILES][K][4], unsigned b) {
#pragma unroll
    for (int k = 0; k < K; k += STEP / 8) {
        Left<TILES> left;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            if constexpr (IS_FLOAT32) {  // columns 2t, 2t + 1 stand for t, t + 4, as in load_turned()
                left.high[i][0] = __float_as_uint(w[i][k][0]), left.high[i][2] = __float_as_uint(w[i][k][1]);
                left.high[i][1] = __float_as_uint(w[i][k][2]), left.high[i][3] = __float_as_uint(w[i][k][3]);
            } else {
                left.high[i][0] = pack(w[i][k][0], w[i][k][1]), left.high[i][1] = pack(w[i][k][2], w[i][k][3]);
                left.high[i][2] = pack(w[i][k + 1][0], w[i][k + 1][1]), left.high[i][3] = pack(w[i][k + 1][2], w[i][k + 1][3]);
            }
        }
        left.ready();
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_turned<DIM, N>(right, b, 0, k * 8 / STEP, n);
            step(c, n, left, right[0], right[1]);
            step(c, n + 1, left, right[2], right[3]);
        }
    }
}

template <int TILES, int N>
DEVICE void clear(float (&c)[TILES][N][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[i][n][e] = 0;
}
