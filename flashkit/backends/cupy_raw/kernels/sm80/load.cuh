// Tiles from memory to shared memory, by asynchronous copies where rows are aligned.
#pragma once

// 16 bytes, if `wanted`; zeros if left <= place, and then `source` need not be an address. Both are looked at here and not
// before: predicates that are kept for many copies take registers.
DEVICE void copy_async(unsigned target, const void* source, int place, int left, bool wanted) {
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %4, 0; setp.le.s32 q, %3, %2;"
                 "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, q; }" ::"r"(target), "l"(source), "r"(place),
                 "r"(left), "r"((int)wanted));
}
DEVICE void store_element(unsigned target, storage x) {
    if constexpr (IS_FLOAT32) asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"((float)widen(x)) : "memory");
    else asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"(*reinterpret_cast<unsigned short*>(&x)) : "memory");
}
DEVICE void copies_end() { asm volatile("cp.async.commit_group;"); }
DEVICE void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // this thread's
template <int PENDING>
DEVICE void copies_wait() {  // until all groups but the last PENDING are there
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Rows of one head: row r at data + r * token elements. PACK_GQA > 1: rows of PACK_GQA heads, interleaved.
template <int PACK_GQA = 1>
struct Rows {
    const Tensor& tensor;  // strides are read from constant memory when needed
    storage* data;
    bool aligned;  // whether every row begins on 16 bytes

    __device__ __forceinline__ Rows(const Tensor& tensor, long long b, long long h)
        : tensor(tensor), data(row_at<storage>(tensor, b, h, 0)) {
        const long long all = tensor.token | (PACK_GQA > 1 ? tensor.head : 0);
        aligned = (((unsigned long long)data | all * (long long)sizeof(storage)) & 15) == 0;
    }
    __device__ __forceinline__ storage* at(int row) const {
        if constexpr (PACK_GQA == 1) return data + row * tensor.token;
        return data + row / PACK_GQA * tensor.token + row % PACK_GQA * tensor.head;
    }
};

// Rows first ... first + ROWS - 1 to shared memory; those at or past `count` and columns past DIM become zeros. Arrives
// with the current group of copies. A thread's share is copied in pieces: among the instructions of a product they cost
// little, but many at a time wait for each other, since a copy reads its address late and registers for more are not there.
template <int ROWS, int DIM, int THREADS>
struct TileCopy {
    // Threads lie across a row, and further ones on the next rows.
    static constexpr int ROW_VECS = pieces(DIM), ACROSS = ROW_VECS < THREADS ? ROW_VECS : THREADS, DOWN = THREADS / ACROSS;
    static constexpr int DEEP = up(ROWS, DOWN) / DOWN, PIECES = DIM % VEC_ELEMENTS != 0 ? 0 : up(ROW_VECS, ACROSS) / ACROSS * DEEP;
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
            store_element(target + place<DIM>(r, d / VEC_ELEMENTS) + d % VEC_ELEMENTS * (int)sizeof(storage), x);
        }
    }

    __device__ __forceinline__ void start(const Rows<>& source, int first, int count, unsigned target, bool wanted) {
        from = source.at(first + row()) + unit() * VEC_ELEMENTS;
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
            const bool here = (ROW_VECS % ACROSS == 0 || unit() + column < ROW_VECS) && (ROWS % DOWN == 0 || row() + down < ROWS);
            const bool inside = DIM == padded(DIM) || (unit() + column) * VEC_ELEMENTS < DIM;
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

// The same for rows of PACK_GQA heads.
template <int ROWS, int DIM, int THREADS, int PACK_GQA>
DEVICE void load_packed(const Rows<PACK_GQA>& source, int first, int count, unsigned target) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * pieces(DIM); i += THREADS) {
        const int row = i / pieces(DIM), column = i % pieces(DIM) * VEC_ELEMENTS;
        const unsigned to = target + place<DIM>(row, i % pieces(DIM));
        const storage* from = source.at(first + row < count ? first + row : 0) + column;
        if (DIM % VEC_ELEMENTS == 0 && source.aligned) {
            copy_async(to, from, row, column < DIM ? count - first : 0, true);
        } else {
            for (int d = 0; d < VEC_ELEMENTS; ++d)
                store_element(to + d * (int)sizeof(storage), first + row < count && column + d < DIM ? from[d] : storage{});
        }
    }
}
