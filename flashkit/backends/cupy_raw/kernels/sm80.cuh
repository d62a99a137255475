// Tiles on tensor cores by mma.sync, from Ampere on: shared memory, loading, products, which tiles there are, what
// happens to their scores.
//
// A matrix instruction multiplies fragments that lie in the registers of a warp. Of an accumulator of 16 x 8 a lane
// holds, with g = lane / 4 and t = lane % 4,
//
//     element 0, 1    row g,      columns 2t, 2t + 1
//     element 2, 3    row g + 8,  columns 2t, 2t + 1
//
// which for 16-bit elements is also the layout of the left operand: weights become an operand where they are.
//
// float32 goes through the same instructions in TF32, whose numbers have 11 bits. With TERMS = 3 each number is the sum
// of two of them, and a product the sum of the three larger of their four products (Ootomo and Yokota 2022,
// arXiv 2203.03341). What is left out, up to 2^-22 of a product, averages out in sums of many. Tensor cores round their
// sums towards zero; so each step starts from zero and is added to the sum on the ordinary units, which round to nearest.
//
// Constants of the head that these kernels add to those of params.cuh: TERMS, of float32 products, 1 or 3; GRANULE, a
// multiple of 16; PADDED, how rows lie in shared memory.
#pragma once

#include "fragment.cuh"

constexpr bool WIDE = sizeof(storage) == 4;  // float32
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int STEP = WIDE ? 8 : 16;          // columns that an instruction multiplies
constexpr int PER_UNIT = 16 / sizeof(storage);  // elements of 16 bytes

constexpr int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

// Rows in shared memory are filled up with zeros to a multiple of GRANULE columns. Eight rows that are read at the same
// column have to lie on different banks. Either pieces of 16 bytes are permuted within a row, among as many as divide its
// length, up to eight; or, if PADDED, rows begin an odd number of pieces apart. Then a copy of two neighbours straddles
// sectors, each of which is fetched twice; but one address serves all columns, which is faster where operands are loaded a
// word at a time (float32) or registers are few.
constexpr int padded(int dim) { return up(dim, GRANULE); }
constexpr int pieces(int dim) { return padded(dim) / PER_UNIT; }
constexpr int pitch(int dim) { return (pieces(dim) + PADDED) * 16; }  // bytes
constexpr int among(int dim) { return PADDED ? 1 : pieces(dim) % 8 == 0 ? 8 : pieces(dim) % 4 == 0 ? 4 : 2; }

template <int DIM>
DEVICE unsigned swap_of(unsigned row) { return row / (8 / among(DIM)) % among(DIM); }
// Where a piece of a row is, in bytes from the tile's beginning.
template <int DIM>
DEVICE unsigned place(unsigned row, unsigned piece) { return row * pitch(DIM) + (piece ^ swap_of<DIM>(row)) * 16; }
// An element.
template <int DIM>
DEVICE storage& element(void* tile, int row, int column) {
    return reinterpret_cast<storage*>(static_cast<char*>(tile) + place<DIM>(row, column / PER_UNIT))[column % PER_UNIT];
}
// Address of piece first + n of a row, where a warp goes over a share of SHARE pieces in twos: first is the share's first
// piece or the one after, n even. Mostly one address serves all n.
template <int DIM, int SHARE>
DEVICE unsigned piece_at(unsigned tile, unsigned row, unsigned first, int n) {
    constexpr int AMONG = among(DIM);
    if constexpr (SHARE % AMONG != 0 && (SHARE & (SHARE - 1)) != 0) return tile + place<DIM>(row, first + n);
    return ((tile + place<DIM>(row, first)) ^ n % AMONG * 16) + n / AMONG * AMONG * 16;
}

DEVICE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }

// --- load_tile --------------------------------------------------------------------------------------------------------

// 16 bytes, if `wanted`; zeros if left <= place, and then `source` need not be an address. Both are looked at here and not
// before: predicates that are kept for many copies take registers.
DEVICE void copy_async(unsigned target, const void* source, int place, int left, bool wanted) {
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %4, 0; setp.le.s32 q, %3, %2;"
                 "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, q; }" ::"r"(target), "l"(source), "r"(place),
                 "r"(left), "r"((int)wanted));
}
DEVICE void store_element(unsigned target, storage x) {
    if constexpr (WIDE) asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"((float)widen(x)) : "memory");
    else asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"(*reinterpret_cast<unsigned short*>(&x)) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;"); }
DEVICE void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // this thread's
template <int PENDING>
DEVICE void copies_wait() {  // until all groups but the last PENDING are there
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Rows of one head: row r at data + r * token elements. PACK > 1: rows of PACK heads, interleaved.
template <int PACK = 1>
struct Rows {
    const Tensor& tensor;  // strides are read from constant memory when needed
    storage* data;
    bool aligned;  // whether every row begins on 16 bytes

    __device__ __forceinline__ Rows(const Tensor& tensor, long long b, long long h)
        : tensor(tensor), data(row_at<storage>(tensor, b, h, 0)) {
        const long long all = tensor.token | (PACK > 1 ? tensor.head : 0);
        aligned = (((unsigned long long)data | all * (long long)sizeof(storage)) & 15) == 0;
    }
    __device__ __forceinline__ storage* at(int row) const {
        if constexpr (PACK == 1) return data + row * tensor.token;
        return data + row / PACK * tensor.token + row % PACK * tensor.head;
    }
};

// Rows first ... first + ROWS - 1 to shared memory; those at or past `count` and columns past DIM become zeros. Arrives
// with the current group of copies. A thread's share is copied in pieces: among the instructions of a product they cost
// little, but many at a time wait for each other, since a copy reads its address late and registers for more are not there.
template <int ROWS, int DIM, int THREADS>
struct TileCopy {
    // Threads lie across a row, and further ones on the next rows.
    static constexpr int UNITS = pieces(DIM), ACROSS = UNITS < THREADS ? UNITS : THREADS, DOWN = THREADS / ACROSS;
    static constexpr int DEEP = up(ROWS, DOWN) / DOWN, PIECES = DIM % PER_UNIT != 0 ? 0 : up(UNITS, ACROSS) / ACROSS * DEEP;
    const storage* from;  // of the next piece
    long long step;       // bytes from a piece to the one below
    unsigned to;          // the tile
    int left;             // rows from this thread's first one on
    bool wanted;

    static __device__ __forceinline__ int row() { return threadIdx.x / ACROSS; }
    static __device__ __forceinline__ int unit() { return threadIdx.x % ACROSS; }

    // What cannot be copied 16 bytes at a time is stored here and now.
    static __device__ __forceinline__ bool can(const Rows<>& source) { return PIECES > 0 && source.aligned; }
    static __device__ __forceinline__ void store(const Rows<>& source, int first, int count, unsigned target) {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * padded(DIM); i += THREADS) {
            const int r = i / padded(DIM), d = i % padded(DIM);
            storage x{};
            if (first + r < count && d < DIM) x = source.at(first + r)[d];
            store_element(target + place<DIM>(r, d / PER_UNIT) + d % PER_UNIT * (int)sizeof(storage), x);
        }
    }

    __device__ __forceinline__ void start(const Rows<>& source, int first, int count, unsigned target, bool wanted) {
        from = source.at(first + row()) + unit() * PER_UNIT;
        step = DOWN * source.tensor.token * (long long)sizeof(storage);
        to = target;
        left = count - first - row();
        this->wanted = wanted && (THREADS % ACROSS == 0 || row() < DOWN);
    }

    // Piece number k of `parts`.
    __device__ __forceinline__ void copy(int k, int parts) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            if (i * parts / larger(PIECES, 1) != k) continue;
            const int column = i / DEEP * ACROSS, down = i % DEEP * DOWN;
            const bool here = (UNITS % ACROSS == 0 || unit() + column < UNITS) && (ROWS % DOWN == 0 || row() + down < ROWS);
            const bool inside = DIM == padded(DIM) || (unit() + column) * PER_UNIT < DIM;
            // With DOWN a power of two one address serves all pieces.
            const unsigned target = (DOWN & (DOWN - 1)) != 0 ? place<DIM>(row() + down, unit() + column) + to
                : ((to + place<DIM>(row(), unit())) ^ swap_of<DIM>(down) * 16) + down * pitch(DIM) + column * 16;
            copy_async(target, from, down, inside ? left : 0, wanted && here);
            // One address moves on: the compiler would keep one for each piece in registers.
            const long long next = i % DEEP < DEEP - 1 ? step : ACROSS * 16 - (DEEP - 1) * step;
            const storage* at;
            asm volatile("add.s64 %0, %1, %2;" : "=l"(at) : "l"(from), "l"(next));
            from = at;
        }
    }
};

template <int ROWS, int DIM, int THREADS>
DEVICE void load_tile(const Rows<>& source, int first, int count, unsigned target) {
    using Copy = TileCopy<ROWS, DIM, THREADS>;
    if (!Copy::can(source)) return Copy::store(source, first, count, target);
    Copy copy;
    copy.start(source, first, count, target, true);
    copy.copy(0, 1);
}

// The same for rows of PACK heads.
template <int ROWS, int DIM, int THREADS, int PACK>
DEVICE void load_packed(const Rows<PACK>& source, int first, int count, unsigned target) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * pieces(DIM); i += THREADS) {
        const int row = i / pieces(DIM), column = i % pieces(DIM) * PER_UNIT;
        const unsigned to = target + place<DIM>(row, i % pieces(DIM));
        const storage* from = source.at(first + row < count ? first + row : 0) + column;
        if (DIM % PER_UNIT == 0 && source.aligned) {
            copy_async(to, from, row, column < DIM ? count - first : 0, true);
        } else {
            for (int d = 0; d < PER_UNIT; ++d)
                store_element(to + d * (int)sizeof(storage), first + row < count && column + d < DIM ? from[d] : storage{});
        }
    }
}

// --- products ---------------------------------------------------------------------------------------------------------

template <bool TRANSPOSED>
DEVICE void load_matrices(unsigned (&r)[4], unsigned address) {  // four of 8 x 16 bytes
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
    unsigned high[TILES][4], low[WIDE && TERMS == 3 ? TILES : 1][4];

    __device__ __forceinline__ void ready() {
        if constexpr (WIDE) {
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
    if constexpr (!WIDE) {
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

// Where a lane points for load_matrices: rows 0 ... 15 of one piece, then of the next;
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
    constexpr int WIDTH = 8 / PER_UNIT, SHARE = N * WIDTH;
    if constexpr (!WIDE) {
        const unsigned piece = piece_at<DIM, SHARE>(b, row_first(), share * SHARE + piece_second(), n);
        load_matrices<true>(right, piece + k * STEP * pitch(DIM));
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
    if constexpr (!WIDE) {
        load_matrices<TURNED>(left, a + (TURNED ? row_second() * PITCH + piece_first() * 16
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
        for (int i = 0; i < TILES; ++i) load_matrices<false>(left.high[i], of_a + i * 16 * pitch(DIM));
        between(k, STEPS);
        left.ready();
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned right[4];
            load_matrices<false>(right, of_b + n * 8 * pitch(DIM));
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
        for (int i = 0; i < TILES; ++i) load_matrices<false>(left[k % 2].high[i], of_a + i * 16 * pitch(DIM));
#pragma unroll
        for (int n = 0; n < N; n += 2) load_matrices<false>(right[k % 2][n / 2], of_b + n * 8 * pitch(DIM));
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
            if constexpr (WIDE) {  // columns 2t, 2t + 1 stand for t, t + 4, as in load_turned()
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

// --- which tiles ------------------------------------------------------------------------------------------------------

// Tiles along one axis that are not EMPTY, in shared memory: the registers of the loops over them are needed for sums.
// The first warp classifies 32 tiles at once, and before that 32 groups of 32 where one look may cover so many.
struct TileList {
    static constexpr int MOST = 510;
    int entry[MOST];  // 2 * tile + (state == FULL)
    int count, next;  // entries; the first tile, in the order of going, that nobody has looked at
};

// Fill the list with the next tiles of first ... last - 1 (down: the last first); false if none is left. For all
// threads of a block. HEADS: heads h ... that share the tile. from ... to - 1: the range on the other axis.
template <int BLOCK, bool ALONG_KEYS, int HEADS>
DEVICE bool fill(TileList& list, const Params& p, int b, int h, int from, int to, int first, int last, int n,
                 bool down = false) {
    __syncthreads();
    if (threadIdx.x < 32) {
        const int lane = threadIdx.x, tiles = last - first;
        const long long offset = offset_of(p, b);
        auto look = [&](int place, int many) {  // tiles at places `place` ... `place` + many - 1 of the way
            if (place >= tiles) return (int)EMPTY;
            const int end_place = place + many < tiles ? place + many : tiles;
            const int low = down ? last - end_place : first + place, high = down ? last - place : first + end_place;
            const int start = low * BLOCK, end = high * BLOCK < n ? high * BLOCK : n;
            int state = ALONG_KEYS ? tile_state(p, b, h, offset, from, to, start, end)
                                   : tile_state(p, b, h, offset, start, end, from, to);
#pragma unroll 1
            for (int other = 1; other < HEADS; ++other) {
                const int found = ALONG_KEYS ? tile_state(p, b, h + other, offset, from, to, start, end)
                                             : tile_state(p, b, h + other, offset, start, end, from, to);
                state = state == found ? state : (int)PARTIAL;
            }
            return state;
        };
        int count = 0, place = list.next;
        while (place < tiles && count + 32 <= TileList::MOST) {
            if (HAS_MASK && CLASSIFY_MANY && tiles - place > 32) {
                const unsigned groups = __ballot_sync(~0u, look(place + 32 * lane, 32) != EMPTY);
                if (groups == 0) {
                    place += 1024;
                    continue;
                }
                place += 32 * (__ffs(groups) - 1);
            }
            const int state = look(place + lane, 1);
            const unsigned live = __ballot_sync(~0u, state != EMPTY);
            const int tile = down ? last - 1 - place - lane : first + place + lane;
            if (state != EMPTY) list.entry[count + __popc(live & ((1u << lane) - 1))] = 2 * tile + (state == FULL);
            count += __popc(live);
            place += 32;
        }
        __syncwarp();  // all lanes have read list.next
        if (lane == 0) list.count = count, list.next = place;
    }
    __syncthreads();
    return list.count > 0;
}

// --- modify -----------------------------------------------------------------------------------------------------------

// Which work is number `index`: heads in groups of `most`, and within a group all heads' first tile, then their second.
struct Work {
    int tile, bh;
};
DEVICE Work work_of(unsigned index, unsigned tiles, unsigned heads, unsigned most) {
    const unsigned group = index / (most * tiles), rest = index - group * most * tiles;
    const unsigned size = heads - group * most < most ? heads - group * most : most;
    return {(int)(rest / size), (int)(group * most + rest % size)};
}

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }

// Two neighbouring elements of a row of DIM; those past its end are left out.
template <int DIM>
DEVICE void store_pair(storage* row, int column, float x, float y) {
    if (DIM != padded(DIM) && column + 1 >= DIM) {
        if (column < DIM) row[column] = narrow(x);
    } else if constexpr (WIDE) {
        row[column] = narrow(x), row[column + 1] = narrow(y);
    } else {
        const unsigned both = pack(x, y);
        if (((unsigned long long)(row + column) & 3) == 0) {
            *reinterpret_cast<unsigned*>(row + column) = both;
        } else {
            reinterpret_cast<unsigned short*>(row)[column] = (unsigned short)both;
            reinterpret_cast<unsigned short*>(row)[column + 1] = (unsigned short)(both >> 16);
        }
    }
}

// Eight neighbouring elements of a row of DIM, from a column that is a multiple of eight.
template <int DIM>
DEVICE void store_eight(storage* row, int column, const float (&x)[8]) {
    if (DIM % 8 == 0 && ((unsigned long long)row & 15) == 0) {
        if (DIM != padded(DIM) && column >= DIM) return;
        if constexpr (WIDE) {
            reinterpret_cast<float4*>(row + column)[0] = float4{x[0], x[1], x[2], x[3]};
            reinterpret_cast<float4*>(row + column)[1] = float4{x[4], x[5], x[6], x[7]};
        } else {
            *reinterpret_cast<uint4*>(row + column) = uint4{pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7])};
        }
    } else {
#pragma unroll
        for (int c = 0; c < 8; c += 2) store_pair<DIM>(row, column + c, x[c], x[c + 1]);
    }
}

// A warp's accumulator of 16 TILES rows and 8 N columns, from `column` on, to rows of DIM in global memory, 16 bytes at a
// time: rows row ... of `target`, without those at or past `count`. They go through rows of the warp's own in shared memory,
// which lie as those of STAGED columns do, from column `first` there on.
template <int DIM, int STAGED, int PACK, int TILES, int N>
DEVICE void store_tile(const float (&x)[TILES][N][4], float factor, unsigned char* staging, int first, int column,
                       const Rows<PACK>& target, int row, int count) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                void* at = &element<STAGED>(staging, 16 * i + 8 * half + lane / 4, first + 8 * n + lane % 4 * 2);
                const float a = x[i][n][2 * half] * factor, b = x[i][n][2 * half + 1] * factor;
                if constexpr (WIDE) *static_cast<float2*>(at) = float2{a, b};
                else *static_cast<unsigned*>(at) = pack(a, b);
            }
    __syncwarp();
    if (DIM % PER_UNIT != 0 || !target.aligned) {
#pragma unroll 1
        for (int i = lane; i < 16 * TILES * N * 8; i += 32) {
            const int r = i / (N * 8), d = i % (N * 8);
            if (row + r < count && column + d < DIM) target.at(row + r)[column + d] = element<STAGED>(staging, r, first + d);
        }
        return;
    }
    // Lanes lie across a row, and further ones on the next rows.
    constexpr int UNITS = N * 8 / PER_UNIT, ACROSS = UNITS < 32 ? UNITS : 32, DOWN = 32 / ACROSS;
    const int below = lane / ACROSS;
#pragma unroll
    for (int across = 0; across < UNITS; across += ACROSS) {
        const int d = (across + lane % ACROSS) * PER_UNIT;
        if (below >= DOWN || d >= N * 8 || column + d >= DIM) continue;
#pragma unroll
        for (int r = 0; r < 16 * TILES; r += DOWN) {
            if (row + below + r >= count || below + r >= 16 * TILES) break;
            *reinterpret_cast<uint4*>(target.at(row + below + r) + column + d) =
                *reinterpret_cast<const uint4*>(&element<STAGED>(staging, below + r, first + d));
        }
    }
}
