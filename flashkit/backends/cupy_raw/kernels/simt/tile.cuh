// Tiles on the ordinary arithmetic units: how they are loaded and multiplied. For every CUDA device and dtype.
//
// Constants of the head that these kernels add to those of params.cuh:
//
//     TX, TY     threads of a block: TX along the columns of a tile, TY along its rows
//     CHUNK      columns of two operands that are multiplied at once in scores(); a multiple of 4
//     KEYS       rows of an operand that are multiplied at once in accumulate(); a multiple of 4
//
// Thread (ty, tx) holds of a tile M x N the rows ty + TY * i and the columns tx + TX * j, and of sums M x DIM the same
// rows and the columns 4 * (tx + TX * j) ... + 3. So neighbouring threads read neighbouring words of shared memory, and
// a thread multiplies a small block of rows by a small block of columns in registers.
#pragma once

constexpr int THREADS = TX * TY;
constexpr fk_float LOG2E = (fk_float)1.4426950408889634;

// Four numbers that are moved at once.
template <typename T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Four {
    T part[4];
};

DEVICE Four<fk_float>& four_at(fk_float* p) { return *reinterpret_cast<Four<fk_float>*>(p); }
DEVICE const Four<fk_float>& four_at(const fk_float* p) { return *reinterpret_cast<const Four<fk_float>*>(p); }

constexpr int blocks_of(int n, int size) { return (n + size - 1) / size; }
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }  // the next one up

// --- shared memory ----------------------------------------------------------------------------------------------------
//
//     stages    2 x [rows][pitch]     what is multiplied now, and what is on its way
//     weights   [M][pitch]            a tile of weights or of their gradients, between two products

// Pitches keep the lanes of a warp on different banks: rows read in fours start an odd number of fours apart, rows that
// a warp writes side by side start TX words apart.
constexpr int CHUNK_PITCH = CHUNK + 16 / (int)sizeof(fk_float);
constexpr int sums_pitch(int dim) { return blocks_of(dim, 4 * TX) * 4 * TX; }
constexpr int weights_pitch(int n) { return n + (TX < 32 ? TX : 0); }
constexpr int stage_size(int m, int n, int dim) {  // of a tile m x n whose weights multiply rows of dim columns
    return larger((m + n) * CHUNK_PITCH, KEYS * sums_pitch(dim));
}

// --- load_tile --------------------------------------------------------------------------------------------------------

// Rows of one head that a tile covers: `count` exist, the first at data, `token` elements apart.
struct Rows {
    const storage* data;
    long long token;
    int count;
};

DEVICE Rows rows_of(const Tensor& tensor, long long b, long long h, long long first, long long n, int most) {
    return {row_at<const storage>(tensor, b, h, first), tensor.token, (int)(n - first < most ? n - first : most)};
}

#if __CUDA_ARCH__ >= 800
constexpr bool ASYNC = sizeof(storage) == sizeof(fk_float);  // copied without passing through registers
#else
constexpr bool ASYNC = false;
#endif

template <int BYTES>
DEVICE void copy_async(void* target, const void* source, bool exists) {  // zeros where it does not exist
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"((unsigned)__cvta_generic_to_shared(target)),
                 "l"(source), "n"(BYTES), "r"(exists ? BYTES : 0));
#endif
}
DEVICE void wait_async() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Rows first ... first + ROWS - 1 and columns column ... column + WIDTH - 1 of an operand with DIM columns; what does
// not exist becomes 0. In fours where addresses allow it, else one by one.
template <int ROWS, int WIDTH, int DIM, int PITCH>
DEVICE void load_tile(const Rows& source, int first, int column, fk_float* target) {
    constexpr int BYTES = 4 * (int)sizeof(storage), VEC_BYTES = BYTES < 16 ? BYTES : 16;
    if (DIM % 4 == 0 && ((size_t)source.data | (size_t)(source.token * (long long)sizeof(storage))) % VEC_BYTES == 0) {
        // A thread stays in its column and goes down in steps, so an address is one addition.
        constexpr int ACROSS = power_of_two(WIDTH / 4), STEP = THREADS / ACROSS;
        const int row = threadIdx.x / ACROSS, at = threadIdx.x % ACROSS * 4;
        if (WIDTH / 4 < ACROSS && at >= WIDTH) return;
        const int exist = column + at < DIM ? source.count - first - row : 0;  // rows from here on
        const storage* from = source.data + (first + row) * source.token + column + at;
        fk_float* to = target + row * PITCH + at;
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP, from += STEP * source.token, to += STEP * PITCH) {
            if (ROWS % STEP != 0 && row + i >= ROWS) break;
            if constexpr (ASYNC) {
#pragma unroll
                for (int byte = 0; byte < BYTES; byte += 16) copy_async<16>((char*)to + byte, (const char*)from + byte, i < exist);
            } else {
                Four<storage> given{};
                if (i < exist) given = *reinterpret_cast<const Four<storage>*>(from);
                Four<fk_float> wide;
#pragma unroll
                for (int e = 0; e < 4; ++e) wide.part[e] = widen(given.part[e]);
                four_at(to) = wide;
            }
        }
    } else {
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * WIDTH; at += THREADS) {
            const int row = at / WIDTH, d = at % WIDTH;
            const bool exists = first + row < source.count && column + d < DIM;
            const storage* from = exists ? source.data + (first + row) * source.token + column + d : source.data;
            fk_float* to = target + row * PITCH + d;
            if constexpr (ASYNC) copy_async<sizeof(storage)>(to, from, exists);
            else *to = exists ? widen(*from) : (fk_float)0;
        }
    }
}

// --- exponentials -------------------------------------------------------------------------------------------------------

// 2^x for a weight: what is below the smallest normal number, relative to the largest weight of the row, is 0.
DEVICE float weight_of(float x) { return exp2_fast(x); }
DEVICE double weight_of(double x) { return exp2(x); }

// --- products ---------------------------------------------------------------------------------------------------------

// s = a b^T: M rows of a times N rows of b, both with DIM columns; a chunk of columns at a time.
template <int M, int N, int DIM>
DEVICE void scores(const Rows& a, const Rows& b, fk_float (&s)[M / TY][N / TX], fk_float* stages) {
    constexpr int STAGE = (M + N) * CHUNK_PITCH, CHUNKS = blocks_of(DIM, CHUNK);
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
#pragma unroll
    for (int i = 0; i < M / TY; ++i)
#pragma unroll
        for (int j = 0; j < N / TX; ++j) s[i][j] = 0;

    __syncthreads();
    load_tile<M, CHUNK, DIM, CHUNK_PITCH>(a, 0, 0, stages);
    load_tile<N, CHUNK, DIM, CHUNK_PITCH>(b, 0, 0, stages + M * CHUNK_PITCH);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        wait_async();
        __syncthreads();
        if (chunk + 1 < CHUNKS) {
            fk_float* next = stages + (chunk + 1) % 2 * STAGE;
            load_tile<M, CHUNK, DIM, CHUNK_PITCH>(a, 0, (chunk + 1) * CHUNK, next);
            load_tile<N, CHUNK, DIM, CHUNK_PITCH>(b, 0, (chunk + 1) * CHUNK, next + M * CHUNK_PITCH);
        }
        const fk_float* rows_a = stages + chunk % 2 * STAGE + ty * CHUNK_PITCH;
        const fk_float* rows_b = stages + chunk % 2 * STAGE + (M + tx) * CHUNK_PITCH;
        const int width = DIM - chunk * CHUNK < CHUNK ? DIM - chunk * CHUNK : CHUNK;
#pragma unroll 1  // 2 is no faster and takes registers from the sums
        for (int d = 0; d < width; d += 4) {
            Four<fk_float> x[M / TY];
#pragma unroll
            for (int i = 0; i < M / TY; ++i) x[i] = four_at(rows_a + i * TY * CHUNK_PITCH + d);
#pragma unroll
            for (int j = 0; j < N / TX; ++j) {
                const Four<fk_float> y = four_at(rows_b + j * TX * CHUNK_PITCH + d);
#pragma unroll
                for (int e = 0; e < 4; ++e)
#pragma unroll
                    for (int i = 0; i < M / TY; ++i) s[i][j] += x[i].part[e] * y.part[e];
            }
        }
    }
}

// Put a thread's part of a tile where all threads find it, for accumulate().
template <int M, int N>
DEVICE void store_weights(const fk_float (&tile)[M / TY][N / TX], fk_float* weights) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
#pragma unroll
    for (int i = 0; i < M / TY; ++i)
#pragma unroll
        for (int j = 0; j < N / TX; ++j) weights[(ty + i * TY) * weights_pitch(N) + tx + j * TX] = tile[i][j];
}

// sums += weights b: a tile M x N times N rows of b with DIM columns; KEYS of the rows at a time. `careful`: a weight
// of 0 leaves out its row, whatever that holds.
template <int M, int N, int DIM>
DEVICE void accumulate(const fk_float* weights, const Rows& b, fk_float (&sums)[M / TY][sums_pitch(DIM) / TX],
                       fk_float* stages, bool careful) {
    constexpr int PITCH = sums_pitch(DIM), STAGE = KEYS * PITCH, FOURS = PITCH / (4 * TX);
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const fk_float* w = weights + ty * weights_pitch(N);

    __syncthreads();
    load_tile<KEYS, PITCH, DIM, PITCH>(b, 0, 0, stages);
#pragma unroll 1
    for (int first = 0, stage = 0; first < b.count; first += KEYS, stage ^= 1) {
        wait_async();
        __syncthreads();
        if (first + KEYS < b.count) load_tile<KEYS, PITCH, DIM, PITCH>(b, first + KEYS, 0, stages + (stage ^ 1) * STAGE);
        const fk_float* rows = stages + stage * STAGE + 4 * tx;
        if (careful) {
#pragma unroll 1
            for (int k = 0; k < KEYS; ++k) {
#pragma unroll
                for (int i = 0; i < M / TY; ++i) {
                    const fk_float weight = w[i * TY * weights_pitch(N) + first + k];
                    if (weight != 0) {
#pragma unroll
                        for (int c = 0; c < 4 * FOURS; ++c)
                            sums[i][c] += weight * rows[k * PITCH + c / 4 * 4 * TX + c % 4];
                    }
                }
            }
            continue;
        }
#pragma unroll 2
        for (int k = 0; k < KEYS; k += 4) {
            Four<fk_float> x[M / TY];
#pragma unroll
            for (int i = 0; i < M / TY; ++i) x[i] = four_at(w + i * TY * weights_pitch(N) + first + k);
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int c = 0; c < FOURS; ++c) {
                    const Four<fk_float> y = four_at(rows + (k + e) * PITCH + c * 4 * TX);
#pragma unroll
                    for (int f = 0; f < 4; ++f)
#pragma unroll
                        for (int i = 0; i < M / TY; ++i) sums[i][4 * c + f] += x[i].part[e] * y.part[f];
                }
        }
    }
}

// A thread's sums to a tensor, each row times its factor. Returns whether all of them are finite.
template <int M, int DIM>
DEVICE bool store_sums(const fk_float (&sums)[M / TY][sums_pitch(DIM) / TX], const fk_float (&factor)[M / TY],
                       const Tensor& tensor, long long b, long long h, long long first, long long n) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < M / TY; ++i) {
        const long long row = first + ty + i * TY;
        if (row < n) {
            storage* target = row_at<storage>(tensor, b, h, row);
#pragma unroll
            for (int c = 0; c < sums_pitch(DIM) / TX; ++c) {
                const int column = c / 4 * 4 * TX + 4 * tx + c % 4;
                if (column < DIM) {
                    const fk_float value = sums[i][c] * factor[i];
                    finite &= fk_abs(value) < INFINITE;
                    target[column] = narrow(value);
                }
            }
        }
    }
    return finite;
}

// --- modify -----------------------------------------------------------------------------------------------------------

// The scores of a tile, modified; pairs beyond the last row or key are hidden. WITH_SLOPES: slopes become d score / d s.
// KEYS_ALONG_ROWS: rows of the tile are keys, else queries.
template <int M, int N, bool KEYS_ALONG_ROWS, bool WITH_SLOPES>
DEVICE void modify_tile(const Params& p, int state, fk_float (&s)[M / TY][N / TX], fk_float (&slopes)[M / TY][N / TX],
                        long long b, long long h, long long row0, long long n_q, long long k0, long long n_k) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const long long offset = offset_of(p, b);
    const bool edge = row0 + (KEYS_ALONG_ROWS ? N : M) > n_q || k0 + (KEYS_ALONG_ROWS ? M : N) > n_k;
    if (!HAS_SCORE && state == FULL && !edge) return;
#pragma unroll
    for (int i = 0; i < M / TY; ++i)
#pragma unroll
        for (int j = 0; j < N / TX; ++j) {
            const int along = ty + i * TY, across = tx + j * TX;
            const long long row = row0 + (KEYS_ALONG_ROWS ? across : along), k = k0 + (KEYS_ALONG_ROWS ? along : across);
            if (row < n_q && k < n_k) {
                if (WITH_SLOPES && HAS_SCORE) slopes[i][j] = score_slope(s[i][j], b, h, row, row + offset, k, p);
                s[i][j] = state == FULL ? modify<false>(s[i][j], b, h, row, row + offset, k, p)
                                        : modify<true>(s[i][j], b, h, row, row + offset, k, p);
            } else {
                s[i][j] = HIDDEN;
            }
        }
}

// Dropout of a tile of weights, or of their gradients.
template <int M, int N, bool KEYS_ALONG_ROWS>
DEVICE void drop_tile(const Params& p, fk_float (&tile)[M / TY][N / TX], long long b, long long h, long long row0,
                      long long k0) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
#pragma unroll
    for (int i = 0; i < M / TY; ++i)
#pragma unroll
        for (int j = 0; j < N / TX; ++j) {
            const int along = ty + i * TY, across = tx + j * TX;
            tile[i][j] = drop(tile[i][j], p, b, h, row0 + (KEYS_ALONG_ROWS ? across : along),
                              k0 + (KEYS_ALONG_ROWS ? along : across));
        }
}
