// load_tile: tiles from global to shared memory, by cp.async where rows are aligned.
#pragma once

// Copies 16 bytes if `wanted`; zeros if row >= rows, and then `source` need not be a valid address. The instruction
// evaluates both predicates: predicates computed ahead for many copies take registers.
DEVICE void cp_async(unsigned target, const void* source, int row, int rows, bool wanted) {
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %4, 0; setp.le.s32 q, %3, %2;"
                 "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, q; }" ::"r"(target), "l"(source), "r"(row),
                 "r"(rows), "r"((int)wanted));
}
DEVICE void store_element(unsigned target, storage x) {
    if constexpr (IS_FLOAT32) asm volatile("st.shared.f32 [%0], %1;" ::"r"(target), "f"((float)widen(x)) : "memory");
    else asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"(*reinterpret_cast<unsigned short*>(&x)) : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
DEVICE void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }  // this thread's
template <int PENDING>
DEVICE void cp_async_wait() {  // until all groups but the last PENDING have arrived
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Rows of one head: row r at data + r * token elements. PACK_GQA > 1: interleaved rows of PACK_GQA heads.
template <int PACK_GQA = 1>
struct Rows {
    static constexpr bool PAGED = false;
    const Tensor& tensor;  // in constant memory: strides take no registers
    storage* data;
    bool aligned;  // whether every row begins on 16 bytes

    // `start`: row of the tensor that counts as row 0, SeqInfo::row_offset or key_offset.
    __device__ __forceinline__ Rows(const Tensor& tensor, long long b, long long h, long long start)
        : tensor(tensor), data(row_at<storage>(tensor, b, h, start)) {
        const long long all = tensor.token | (PACK_GQA > 1 ? tensor.head : 0);
        aligned = (((unsigned long long)data | all * (long long)sizeof(storage)) & 15) == 0;
    }
    __device__ __forceinline__ storage* at(int row) const {
        if constexpr (PACK_GQA == 1) return data + row * tensor.token;
        return data + row / PACK_GQA * tensor.token + row % PACK_GQA * tensor.head;
    }
};

// Keys or values of one head.
template <bool IN_PAGES>
struct KeyRowsOf : Rows<> {
    __device__ __forceinline__ KeyRowsOf(const Params& p, const Tensor& tensor, int b, int head)
        : Rows<>(tensor, b, head, seq_info(p, b).key_offset) {}
};
template <>
struct KeyRowsOf<true> {
    static constexpr bool PAGED = true;
    const Params& p;
    const Tensor& tensor;
    storage* data;  // row 0 of page 0
    int b, head;
    bool aligned;

    __device__ __forceinline__ KeyRowsOf(const Params& p, const Tensor& tensor, int b, int head)
        : p(p), tensor(tensor), data(row_at<storage>(tensor, 0, head, 0)), b(b), head(head) {
        const long long all = tensor.batch | tensor.token;
        aligned = (((unsigned long long)data | all * (long long)sizeof(storage)) & 15) == 0;
    }
    __device__ __forceinline__ storage* at(int row) const { return kv_row<storage>(p, tensor, b, head, row); }
};
using KeyRows = KeyRowsOf<IS_PAGED>;

// Copies rows first ... first + ROWS - 1 to shared memory; rows at or past `count` and columns past DIM become zeros.
// The copies belong to the current cp.async group. A thread issues its COPIES copies in parts: among the instructions
// of a matrix product they are hidden, while many at a time stall on each other, since a copy reads its address late
// and the registers for more addresses are taken.
template <int ROWS, int DIM, int THREADS, typename Source = Rows<>>
struct TileCopy {
    // Neighbouring threads copy neighbouring vectors of a row, then of the rows below.
    static constexpr int ROW_VECS = row_vecs(DIM), ACROSS = ROW_VECS < THREADS ? ROW_VECS : THREADS;
    static constexpr int DOWN = THREADS / ACROSS;
    static constexpr int COPIES_DOWN = up(ROWS, DOWN) / DOWN;
    static constexpr int COPIES = DIM % VEC_ELEMENTS != 0 ? 0 : up(ROW_VECS, ACROSS) / ACROSS * COPIES_DOWN;
    const storage* from;    // source of the next copy; in pages of all, see `rows`
    const long long* rows;  // in pages: elements to each run of PAGE_RUN rows of the tile
    const storage* at;      // in pages: source of the next copy
    long long step;         // bytes from a copy to the one below
    unsigned to;            // the tile
    int left;               // rows that exist from the thread's first one on
    bool wanted;

    static __device__ __forceinline__ int row() { return threadIdx.x / ACROSS; }
    static __device__ __forceinline__ int vec() { return threadIdx.x % ACROSS; }

    // Rows that are not aligned to 16 bytes are copied through registers, synchronously.
    static __device__ __forceinline__ bool can(const Source& source) { return COPIES > 0 && source.aligned; }
    static __device__ __forceinline__ void store(const Source& source, int first, int count, unsigned target) {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * padded(DIM); i += THREADS) {
            const int r = i / padded(DIM), d = i % padded(DIM);
            storage x{};
            if (first + r < count && d < DIM) x = source.at(first + r)[d];
            store_element(target + vec_offset<DIM>(r, d / VEC_ELEMENTS) + d % VEC_ELEMENTS * (int)sizeof(storage), x);
        }
    }

    __device__ __forceinline__ void start(const Source& source, int first, int count, unsigned target, bool wanted,
                                          const long long* rows = nullptr) {
        const storage* first_row = Source::PAGED ? source.data + (PAGE_RUN > 1 ? row() * source.tensor.token : 0)
                                                 : source.at(first + row());
        from = first_row + vec() * VEC_ELEMENTS;
        step = DOWN * source.tensor.token * (long long)sizeof(storage);
        this->rows = rows;
        to = target;
        left = count - first - row();
        this->wanted = wanted && (THREADS % ACROSS == 0 || row() < DOWN);
    }

    // Part k of `parts`.
    __device__ __forceinline__ void copy(int k, int parts) {
        UNROLL(i, COPIES) {
            if (i * parts / larger(COPIES, 1) != k) continue;
            const int column = i / COPIES_DOWN * ACROSS, down = i % COPIES_DOWN * DOWN;
            const bool exists = (ROW_VECS % ACROSS == 0 || vec() + column < ROW_VECS) &&
                                (ROWS % DOWN == 0 || row() + down < ROWS);
            const bool inside = DIM == padded(DIM) || (vec() + column) * VEC_ELEMENTS < DIM;
            // With DOWN a power of two one address serves all copies.
            const unsigned target = (DOWN & (DOWN - 1)) != 0
                ? vec_offset<DIM>(row() + down, vec() + column) + to
                : ((to + vec_offset<DIM>(row(), vec())) ^ swizzle<DIM>(down) * 16) + down * pitch(DIM) + column * 16;
            if constexpr (Source::PAGED && PAGE_RUN > 1) {
                static_assert(PAGE_RUN % DOWN == 0 && THREADS % ACROSS == 0, "a copy has rows of one run");
                if (down % PAGE_RUN == 0) at = from + rows[down / PAGE_RUN] + column * VEC_ELEMENTS;
                cp_async(target, at, down, inside ? left : 0, wanted && exists);
                asm volatile("add.s64 %0, %1, %2;" : "=l"(at) : "l"(at), "l"(step));
                continue;
            }
            if constexpr (Source::PAGED) {
                const bool all_rows = ROWS % DOWN == 0 && THREADS % ACROSS == 0;
                const int r = all_rows || row() + down < ROWS ? row() + down : 0;
                cp_async(target, from + rows[r] + column * VEC_ELEMENTS, down, inside ? left : 0, wanted && exists);
                continue;
            }
            cp_async(target, from, down, inside ? left : 0, wanted && exists);
            // One address that advances: the compiler would keep one per copy in registers.
            const long long next = i % COPIES_DOWN < COPIES_DOWN - 1 ? step : ACROSS * 16 - (COPIES_DOWN - 1) * step;
            const storage* at;
            asm volatile("add.s64 %0, %1, %2;" : "=l"(at) : "l"(from), "l"(next));
            from = at;
        }
    }

    static __device__ __forceinline__ void load(const Source& source, int first, int count, unsigned target,
                                                const long long* rows = nullptr) {
        if (!can(source)) return store(source, first, count, target);
        TileCopy copy;
        copy.start(source, first, count, target, true, rows);
        copy.copy(0, 1);
    }
};

template <int ROWS, int DIM, int THREADS>
DEVICE void load_tile(const Rows<>& source, int first, int count, unsigned target) {
    TileCopy<ROWS, DIM, THREADS>::load(source, first, count, target);
}

// The same for packed GQA: rows of PACK_GQA heads.
template <int ROWS, int DIM, int THREADS, int PACK_GQA>
DEVICE void load_tile(const Rows<PACK_GQA>& source, int first, int count, unsigned target) {
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * row_vecs(DIM); i += THREADS) {
        const int row = i / row_vecs(DIM), column = i % row_vecs(DIM) * VEC_ELEMENTS;
        const unsigned to = target + vec_offset<DIM>(row, i % row_vecs(DIM));
        const storage* from = source.at(first + row < count ? first + row : 0) + column;
        if (DIM % VEC_ELEMENTS == 0 && source.aligned) {
            cp_async(to, from, row, column < DIM ? count - first : 0, true);
        } else {
            for (int d = 0; d < VEC_ELEMENTS; ++d)
                store_element(to + d * (int)sizeof(storage),
                              first + row < count && column + d < DIM ? from[d] : storage{});
        }
    }
}
