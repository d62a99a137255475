// Tiles on CUDA cores: how a CTA loads and multiplies them. For every CUDA device and dtype.
//
// Constants of the head beyond those of common/params.cuh:
//
//     TX, TY        threads of a CTA: TX along the columns of a tile, TY along its rows
//     CHUNK         columns of two operands that scores() multiplies at a time; a multiple of 4
//     KEYS          rows of an operand that accumulate() multiplies at a time; a multiple of 4
//     AT_P          byte offset of P in shared memory
//
// Shared memory (cuda_common/simt.py: SimtTile.smem)
//
//     stages    2 x [rows][pitch]    double buffer of the operands
//     AT_P      [M][pitch]           a tile of P or dS, between two products
//
// Of a tile M x N thread (ty, tx) holds rows ty + TY * i and columns tx + TX * j; of an accumulator M x DIM the same
// rows and columns 4 * (tx + TX * j) ... + 3. Neighbouring threads thus read neighbouring words of shared memory, and
// each thread multiplies a small block of rows by a small block of columns in registers.
#pragma once

constexpr int THREADS = TX * TY;
constexpr fk_float LOG2E = (fk_float)1.4426950408889634;

// Four elements that move in one vector access.
template <typename T>
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Vec4 {
    T x[4];
};

DEVICE Vec4<fk_float>& vec4_at(fk_float* p) { return *reinterpret_cast<Vec4<fk_float>*>(p); }
DEVICE const Vec4<fk_float>& vec4_at(const fk_float* p) { return *reinterpret_cast<const Vec4<fk_float>*>(p); }

constexpr int ceil_div(int n, int size) { return (n + size - 1) / size; }
constexpr int next_power_of_two(int n) { return n <= 1 ? 1 : 2 * next_power_of_two((n + 1) / 2); }

// Pitches keep the lanes of a warp on different banks: rows read as Vec4 start an odd number of Vec4 apart, rows that a
// warp writes together start TX words apart.
constexpr int CHUNK_PITCH = CHUNK + 16 / (int)sizeof(fk_float);
constexpr int accumulator_pitch(int dim) { return ceil_div(dim, 4 * TX) * 4 * TX; }
constexpr int tile_pitch(int n) { return n + (TX < 32 ? TX : 0); }

// --- load_tile -------------------------------------------------------------------------------------------------------

// Queries or keys of one head that a tile covers: `count` exist, the first at `data`, `token` elements apart.
struct Rows {
    static constexpr bool PAGED = false;
    const storage* data;
    long long token;
    int count;
    __device__ __forceinline__ const storage* at(int row) const { return data + row * token; }
    __device__ __forceinline__ bool aligned(int bytes) const {
        return ((size_t)data | (size_t)(token * (long long)sizeof(storage))) % bytes == 0;
    }
};

// Keys of one head in pages, from key `first` on.
struct PagedRows {
    static constexpr bool PAGED = true;
    const storage* data;  // of page 0
    long long token;
    int count;
    const Params& p;
    const Tensor& tensor;
    long long b, head, first;
    __device__ __forceinline__ const storage* at(int row) const {
        return kv_row<const storage>(p, tensor, b, head, first + row);
    }
    __device__ __forceinline__ bool aligned(int bytes) const {
        return ((size_t)data | (size_t)((tensor.batch | token) * (long long)sizeof(storage))) % bytes == 0;
    }
};

// Queries of a head, from row `first` of `n` on.
DEVICE Rows q_rows(const Params& p, const Tensor& tensor, long long b, long long h, long long first, long long n) {
    const int count = (int)(n - first < BLOCK_Q ? n - first : BLOCK_Q);
    return {q_row<const storage>(p, tensor, b, h, first), tensor.token, count};
}

// K and V of one key/value head: the only code that knows where they lie.
template <bool PAGED>
struct KvSourceOf {
    const Params& p;
    long long b, head, n_k;
    __device__ __forceinline__ auto rows(const Tensor& tensor, long long first) const {
        const int count = (int)(n_k - first < BLOCK_K ? n_k - first : BLOCK_K);
        if constexpr (PAGED)
            return PagedRows{row_at<const storage>(tensor, 0, head, 0), tensor.token, count, p, tensor, b, head, first};
        else
            return Rows{kv_row<const storage>(p, tensor, b, head, first), tensor.token, count};
    }
    __device__ __forceinline__ auto k(long long first) const { return rows(p.k, first); }
    __device__ __forceinline__ auto v(long long first) const { return rows(p.v, first); }
};
using KvSource = KvSourceOf<IS_PAGED>;

#if __CUDA_ARCH__ >= 800
constexpr bool ASYNC = sizeof(storage) == sizeof(fk_float);  // cp.async, without conversion in registers
#else
constexpr bool ASYNC = false;
#endif

template <int BYTES>
DEVICE void copy_async(void* target, const void* source, bool exists) {  // writes zeros unless `exists`
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

// Rows first ... first + ROWS - 1 and columns column ... column + WIDTH - 1 of an operand with DIM columns; elements
// past its end become 0. Loads are vectors of four elements where the addresses are aligned, else single elements.
template <int ROWS, int WIDTH, int DIM, int PITCH, typename Source>
DEVICE void load_tile(const Source& source, int first, int column, fk_float* target) {
    constexpr int BYTES = 4 * (int)sizeof(storage), VEC_BYTES = BYTES < 16 ? BYTES : 16;
    if (DIM % 4 == 0 && source.aligned(VEC_BYTES)) {
        // A thread stays in its column, so the next address is one addition away.
        constexpr int ACROSS = next_power_of_two(WIDTH / 4), STEP = THREADS / ACROSS;
        const int row = threadIdx.x / ACROSS, at = threadIdx.x % ACROSS * 4;
        if (WIDTH / 4 < ACROSS && at >= WIDTH) return;
        const int exist = column + at < DIM ? source.count - first - row : 0;  // rows from this one on
        const storage* from = source.data + (first + row) * source.token + column + at;
        fk_float* to = target + row * PITCH + at;
#pragma unroll
        for (int i = 0; i < ROWS; i += STEP, from += STEP * source.token, to += STEP * PITCH) {
            if (ROWS % STEP != 0 && row + i >= ROWS) break;
            if constexpr (Source::PAGED)
                if (i < exist) from = source.at(first + row + i) + column + at;
            if constexpr (ASYNC) {
#pragma unroll
                for (int byte = 0; byte < BYTES; byte += 16)
                    copy_async<16>((char*)to + byte, (const char*)from + byte, i < exist);
            } else {
                Vec4<storage> stored{};
                if (i < exist) stored = *reinterpret_cast<const Vec4<storage>*>(from);
                Vec4<fk_float> wide;
                UNROLL(e, 4) wide.x[e] = widen(stored.x[e]);
                vec4_at(to) = wide;
            }
        }
    } else {
#pragma unroll 1
        for (int at = threadIdx.x; at < ROWS * WIDTH; at += THREADS) {
            const int row = at / WIDTH, d = at % WIDTH;
            const bool exists = first + row < source.count && column + d < DIM;
            const storage* from = exists ? source.at(first + row) + column + d : source.data;
            fk_float* to = target + row * PITCH + d;
            if constexpr (ASYNC) copy_async<sizeof(storage)>(to, from, exists);
            else *to = exists ? widen(*from) : (fk_float)0;
        }
    }
}

// --- online_softmax --------------------------------------------------------------------------------------------------

// 2^x of a score relative to its row maximum; subnormal results are flushed to 0.
DEVICE float softmax_exp2(float x) { return exp2_fast(x); }
DEVICE double softmax_exp2(double x) { return exp2(x); }

// --- scores, accumulate ----------------------------------------------------------------------------------------------

// s = a b^T for M rows of a and N rows of b, both with DIM columns; CHUNK columns at a time, double-buffered. ADD: the
// product is added to s.
template <int M, int N, int DIM, bool ADD = false, typename A, typename B>
DEVICE void scores(const A& a, const B& b, fk_float (&s)[M / TY][N / TX], fk_float* stages) {
    constexpr int BUFFER = (M + N) * CHUNK_PITCH, CHUNKS = ceil_div(DIM, CHUNK);
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    UNROLL(i, M / TY)
        UNROLL(j, N / TX) s[i][j] = ADD ? s[i][j] : 0;

    __syncthreads();
    load_tile<M, CHUNK, DIM, CHUNK_PITCH>(a, 0, 0, stages);
    load_tile<N, CHUNK, DIM, CHUNK_PITCH>(b, 0, 0, stages + M * CHUNK_PITCH);
#pragma unroll 1
    for (int chunk = 0; chunk < CHUNKS; ++chunk) {
        wait_async();
        __syncthreads();
        if (chunk + 1 < CHUNKS) {
            fk_float* next = stages + (chunk + 1) % 2 * BUFFER;
            load_tile<M, CHUNK, DIM, CHUNK_PITCH>(a, 0, (chunk + 1) * CHUNK, next);
            load_tile<N, CHUNK, DIM, CHUNK_PITCH>(b, 0, (chunk + 1) * CHUNK, next + M * CHUNK_PITCH);
        }
        const fk_float* rows_a = stages + chunk % 2 * BUFFER + ty * CHUNK_PITCH;
        const fk_float* rows_b = stages + chunk % 2 * BUFFER + (M + tx) * CHUNK_PITCH;
        const int width = DIM - chunk * CHUNK < CHUNK ? DIM - chunk * CHUNK : CHUNK;
#pragma unroll 1  // unrolling takes registers from the accumulators
        for (int d = 0; d < width; d += 4) {
            Vec4<fk_float> x[M / TY];
            UNROLL(i, M / TY) x[i] = vec4_at(rows_a + i * TY * CHUNK_PITCH + d);
            UNROLL(j, N / TX) {
                const Vec4<fk_float> y = vec4_at(rows_b + j * TX * CHUNK_PITCH + d);
                UNROLL(e, 4)
                    UNROLL(i, M / TY) s[i][j] += x[i].x[e] * y.x[e];
            }
        }
    }
}

// Writes a thread's part of P or dS to shared memory, for accumulate().
template <int M, int N>
DEVICE void store_tile(const fk_float (&tile)[M / TY][N / TX], fk_float* target) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    UNROLL(i, M / TY)
        UNROLL(j, N / TX) target[(ty + i * TY) * tile_pitch(N) + tx + j * TX] = tile[i][j];
}

// acc += a b: a tile a, M x N, of P or dS in shared memory times N rows of b with DIM columns; KEYS rows at a time,
// double-buffered. `nonfinite`: elements of a that are 0 skip their row of b, which may hold inf or NaN.
template <int M, int N, int DIM, typename Source>
DEVICE void accumulate(const fk_float* a, const Source& b, fk_float (&acc)[M / TY][accumulator_pitch(DIM) / TX],
                       fk_float* stages, bool nonfinite) {
    constexpr int PITCH = accumulator_pitch(DIM), BUFFER = KEYS * PITCH, VECS = PITCH / (4 * TX);
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const fk_float* own = a + ty * tile_pitch(N);

    __syncthreads();
    load_tile<KEYS, PITCH, DIM, PITCH>(b, 0, 0, stages);
#pragma unroll 1
    for (int first = 0, stage = 0; first < b.count; first += KEYS, stage ^= 1) {
        wait_async();
        __syncthreads();
        if (first + KEYS < b.count)
            load_tile<KEYS, PITCH, DIM, PITCH>(b, first + KEYS, 0, stages + (stage ^ 1) * BUFFER);
        const fk_float* rows = stages + stage * BUFFER + 4 * tx;
        if (nonfinite) {
#pragma unroll 1
            for (int k = 0; k < KEYS; ++k) {
                UNROLL(i, M / TY) {
                    const fk_float x = own[i * TY * tile_pitch(N) + first + k];
                    if (x != 0) {
                        UNROLL(c, 4 * VECS)
                            acc[i][c] += x * rows[k * PITCH + c / 4 * 4 * TX + c % 4];
                    }
                }
            }
            continue;
        }
#pragma unroll 2
        for (int k = 0; k < KEYS; k += 4) {
            Vec4<fk_float> x[M / TY];
            UNROLL(i, M / TY) x[i] = vec4_at(own + i * TY * tile_pitch(N) + first + k);
            UNROLL(e, 4)
                UNROLL(c, VECS) {
                    const Vec4<fk_float> y = vec4_at(rows + (k + e) * PITCH + c * 4 * TX);
                    UNROLL(f, 4)
                        UNROLL(i, M / TY) acc[i][4 * c + f] += x[i].x[e] * y.x[f];
                }
        }
    }
}

// --- epilogue --------------------------------------------------------------------------------------------------------

// Writes an accumulator to rows first ... n - 1 of a sequence that begins at row `start` of the tensor, each row times
// its factor. Returns whether all of the thread's elements are finite.
template <int M, int DIM>
DEVICE bool store_accumulator(const fk_float (&acc)[M / TY][accumulator_pitch(DIM) / TX],
                              const fk_float (&factor)[M / TY], const Tensor& tensor, long long b, long long h,
                              long long start, long long first, long long n) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    bool finite = true;
    UNROLL(i, M / TY) {
        const long long row = first + ty + i * TY;
        if (row < n) {
            storage* target = row_at<storage>(tensor, b, h, start + row);
            UNROLL(c, accumulator_pitch(DIM) / TX) {
                const int column = c / 4 * 4 * TX + 4 * tx + c % 4;
                if (column < DIM) {
                    const fk_float value = acc[i][c] * factor[i];
                    finite &= fk_abs(value) < INFINITE;
                    target[column] = narrow(value);
                }
            }
        }
    }
    return finite;
}

// --- modify ----------------------------------------------------------------------------------------------------------

template <int M, int N>
DEVICE void scale_tile(fk_float (&s)[M][N], fk_float scale) {
    UNROLL(i, M)
        UNROLL(j, N) s[i][j] *= scale;
}

// Modifies the scaled scores of a tile; pairs past the last row or key are masked. WITH_SLOPES: also computes the slope
// of the score modification. KEYS_ALONG_ROWS: the rows of the tile are keys, else queries.
template <int M, int N, bool KEYS_ALONG_ROWS, bool WITH_SLOPES>
DEVICE void modify_tile(const Params& p, int state, fk_float (&s)[M / TY][N / TX], fk_float (&slopes)[M / TY][N / TX],
                        long long b, long long h, long long row0, long long k0, long long n_k) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const long long n_q = seq_info(p, b).n_q, q_position = seq_info(p, b).q_position;
    const bool edge = row0 + (KEYS_ALONG_ROWS ? N : M) > n_q || k0 + (KEYS_ALONG_ROWS ? M : N) > n_k;
    if (!HAS_SCORE && state == FULL && !edge) return;
    UNROLL(i, M / TY)
        UNROLL(j, N / TX) {
            const int along = ty + i * TY, across = tx + j * TX;
            const long long row = row0 + (KEYS_ALONG_ROWS ? across : along), q = row + q_position;
            const long long k = k0 + (KEYS_ALONG_ROWS ? along : across);
            if (row < n_q && k < n_k) {
                if (WITH_SLOPES && HAS_SCORE) slopes[i][j] = score_slope(s[i][j], b, h, row, q, k, p);
                s[i][j] = state == FULL ? modify<false>(s[i][j], b, h, row, q, k, p)
                                        : modify<true>(s[i][j], b, h, row, q, k, p);
            } else {
                s[i][j] = HIDDEN;
            }
        }
}

// Dropout of a tile of P or dP.
template <int M, int N, bool KEYS_ALONG_ROWS>
DEVICE void drop_tile(const Params& p, fk_float (&tile)[M / TY][N / TX], long long b, long long h, long long row0,
                      long long k0) {
    const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    UNROLL(i, M / TY)
        UNROLL(j, N / TX) {
            const int along = ty + i * TY, across = tx + j * TX;
            tile[i][j] = drop(tile[i][j], p, b, h, row0 + (KEYS_ALONG_ROWS ? across : along),
                              k0 + (KEYS_ALONG_ROWS ? along : across));
        }
}
