// Hopper's own instructions, each a function: barriers that count bytes, the copy engine, products of warp groups, roles.
//
// A warp group, four warps, multiplies 64 rows by N columns with one instruction (wgmma), which runs on while the group
// does other things. Operands lie in shared memory, the left one perhaps in registers. Of the result a lane holds, with
// g = lane / 4, t = lane % 4, in element 4 n + 2 half + c
//
//     row 16 * (warp of the group) + g + 8 half,  column 8 n + 2 t + c
//
// which is also the layout of a left operand in registers: weights become an operand where they are.
//
// A tile in shared memory is a row of chunks of 64 columns: [chunk][row][128 bytes], begins on 1024 bytes, and its 16-byte
// units are permuted within eight rows, unit u of row r lying at u ^ (r % 8) ("128-byte swizzle"): so the copy engine
// writes it and wgmma reads it, along rows or along columns.
//
// The instructions of the shapes in use are generated (cupy_raw/sm90_products.py): product(), wgmma_zero_init(),
// wgmma_rs().
#pragma once

#include "common/fragment.cuh"

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

constexpr int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int padded(int dim) { return up(dim, 16); }    // columns that are multiplied; those past `dim` are zeros
constexpr int chunks(int dim) { return up(dim, 64) / 64; }
constexpr int CHUNK_ROW = 128, VEC_BYTES = 16;                // bytes

template <bool VALUE> struct Constant { static constexpr bool value = VALUE; };  // for generic lambdas

DEVICE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
DEVICE unsigned swizzled(int row, int unit) { return row * CHUNK_ROW + ((unit ^ (row & 7)) * VEC_BYTES); }  // within a chunk

DEVICE void store_word(unsigned address, int x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
DEVICE void store_float(unsigned address, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory"); }
DEVICE void store_floats(unsigned address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
DEVICE void store_if(int condition, float* target, float x) {  // to global memory, without a branch
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.f32 [%1], %2; }" ::"r"(condition), "l"(target), "f"(x) : "memory");
}
DEVICE int load_word(unsigned address) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

// --- barriers ---------------------------------------------------------------------------------------------------------
// A barrier's phase ends when all arrivals and all announced bytes are there. mbarrier_wait(barrier, parity) waits for the end of
// a phase; the first has parity 0, and waiting for parity 1 on a new barrier returns at once.

DEVICE void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }  // for the copy engine
DEVICE void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same by one lane of a warp. A branch instead would end what ptxas 13.0 knows to be uniform: descriptors would not
// stay in uniform registers.
DEVICE void mbarrier_arrive_once(unsigned barrier, int lane = threadIdx.x % 32) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }"
                 ::"r"(barrier), "r"(lane) : "memory");
}
DEVICE void mbarrier_arrive_expect_tx(unsigned barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
DEVICE bool mbarrier_try_wait(unsigned barrier, unsigned parity) {
    int ended;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.s32 %0, 1, 0, p; }"
                 : "=r"(ended) : "r"(barrier), "r"(parity) : "memory");
    return ended;
}
DEVICE void mbarrier_wait(unsigned barrier, unsigned parity) {
    if constexpr (WATCHDOG) {  // stop the kernel instead of hanging: a debugging aid; the address that faults is the barrier's
        for (long long begin = clock64(); !mbarrier_try_wait(barrier, parity);)
            if (clock64() - begin > 4000000000ll) *(volatile int*)(unsigned long long)barrier = 0;  // with a trap here products would be serialised
    } else {
        asm volatile(
            "{ .reg .pred p;\n"
            "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
            "@p bra DONE;\n"
            "bra AGAIN;\n"
            "DONE: }" ::"r"(barrier), "r"(parity) : "memory");
    }
}

// The same where nobody is in a hurry: leaves the issue slots to others.
DEVICE void mbarrier_wait_backoff(unsigned barrier, unsigned parity, int nanoseconds = 100) {
    while (!mbarrier_try_wait(barrier, parity)) asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

// Barriers of a ring: one for each stage. Number n of what goes through it lies in stage n % STAGES.
template <int STAGES>
struct Pipeline {
    unsigned full, empty;  // addresses
    __device__ __forceinline__ static unsigned stage(unsigned n) { return n % STAGES; }
    __device__ __forceinline__ void consumer_wait(unsigned n) const { mbarrier_wait(full + 8 * (n % STAGES), n / STAGES & 1); }
    __device__ __forceinline__ void producer_acquire(unsigned n) const { mbarrier_wait(empty + 8 * (n % STAGES), (n / STAGES & 1) ^ 1); }
    __device__ __forceinline__ void consumer_release(unsigned n, int lane = threadIdx.x % 32) const {  // by a warp that is done with it
        mbarrier_arrive_once(empty + 8 * (n % STAGES), lane);
    }
    __device__ __forceinline__ void init(int fillers, int readers) const {
        for (int i = 0; i < STAGES; ++i) mbarrier_init(full + 8 * i, fillers), mbarrier_init(empty + 8 * i, readers);
    }
};

// --- clusters ---------------------------------------------------------------------------------------------------------
// Blocks of a cluster run at the same time, and reach each other's shared memory. Nobody may end before that is over.

DEVICE int cluster_ctarank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE unsigned mapa(unsigned address, int rank) {  // what lies at that address in the shared memory of block `rank`
    unsigned x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
    return x;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// By one lane of a warp, at a mapa barrier. It says that something was read, so nothing has to be written before it: with
// .release.cluster it would wait for all that the warp has added to global memory.
DEVICE void dsmem_arrive(unsigned barrier, int lane) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0]; }"
                 ::"r"(barrier), "r"(lane) : "memory");
}
// A word to a mapa address; its four bytes are announced and counted there.
DEVICE void dsmem_store(unsigned address, int x, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(address), "r"(x), "r"(barrier) : "memory");
}

// Barriers among warps, by number; 0 is __syncthreads'.
DEVICE void named_barrier_sync(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
DEVICE bool named_barrier_any(int number, int threads, bool x) {
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"(number), "r"(threads), "r"((int)x) : "memory");
    return any;
}
DEVICE void named_barrier_arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// --- the copy engine --------------------------------------------------------------------------------------------------

struct __align__(64) TensorMap { unsigned long long words[16]; };  // where a tensor lies: cupy_raw/sm90_maps.py

// A box of [tokens][PACK_GQA members][64 columns] between memory and shared memory, where a member is one of PACK_GQA heads whose
// rows share a tile. Rows past the tensor's end are read as zeros and not written.
struct Box { int column, token, head, batch; };

template <int PACK_GQA>
DEVICE void tma_load(unsigned target, const TensorMap& map, const Box& box, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(box.column), "r"(PACK_GQA > 1 ? 0 : box.token),
                 "r"(PACK_GQA > 1 ? box.token : 0), "r"(box.head), "r"(box.batch) : "memory");
}
template <int PACK_GQA>
DEVICE void tma_store(const TensorMap& map, const Box& box, unsigned source) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 ::"l"(&map), "r"(source), "r"(box.column), "r"(PACK_GQA > 1 ? 0 : box.token), "r"(PACK_GQA > 1 ? box.token : 0),
                 "r"(box.head), "r"(box.batch) : "memory");
}
// From this block's shared memory to that of another block of the cluster: addresses there are mapa ones.
DEVICE void dsmem_copy(unsigned target, unsigned source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "r"(source), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0>
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }  // shared memory is free
template <int PENDING = 0>
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }  // they have come

// A tile of ROWS rows: its chunks side by side.
template <int PACK_GQA, int CHUNKS, int ROWS>
DEVICE void load_tile(unsigned target, const TensorMap& map, int token, int head, int batch, unsigned barrier, int column = 0,
                      int chunk = ROWS * CHUNK_ROW) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) tma_load<PACK_GQA>(target + c * chunk, map, {column + 64 * c, token, head, batch}, barrier);
}

// What was written to shared memory before is seen by the copy engine and wgmma after; by every thread that wrote.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Zeros in the rows of a tile from `first` on, by a warp group that then meets.
template <int DIM, int ROWS>
DEVICE void clear_rows(unsigned tile, int first, int chunk_bytes) {
    first = first < 0 ? 0 : first;
    for (int i = threadIdx.x % 128; i < (ROWS - first) * chunks(DIM) * 8; i += 128) {
        const int unit = i % 8, chunk = i / 8 % chunks(DIM), row = first + i / 8 / chunks(DIM);
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + chunk * chunk_bytes + row * CHUNK_ROW + unit * VEC_BYTES), "r"(0) : "memory");
    }
    fence_proxy_async();
}

// --- products ---------------------------------------------------------------------------------------------------------

// An operand's descriptor: its address and, for one that is read along columns and wider than a chunk, the distance from
// chunk to chunk; then what is the same for all, eight rows every 1024 bytes and the swizzle of 128 bytes.
DEVICE unsigned long long descriptor(unsigned address, int chunk = 16) {
    return 0x4000004000000000ull | (unsigned long long)(chunk >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

// How far descriptors move on for step k of 16 along the summed axis:
constexpr int along_rows(int k, int rows) { return (k / 4 * rows * CHUNK_ROW + k % 4 * 32) >> 4; }  // 16 columns of `rows` rows
constexpr int along_columns(int k) { return k * 16 * CHUNK_ROW >> 4; }                              // 16 rows

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {  // until all but the last PENDING ends are reached
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void wgmma_wait_loads_pass() {  // the same, past which the compiler may move loads up
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING));
}
// After a wait: the compiler may not use these registers before it.
template <int N> DEVICE void fence_operand(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i]));
}
template <int N> DEVICE void fence_operand(unsigned (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i]));
}

// --- registers --------------------------------------------------------------------------------------------------------

template <int CONSUMER_REGISTERS> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS)); }
template <int CONSUMER_REGISTERS> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS)); }

// A number that is the same in all lanes of a warp; said so to the compiler, which then keeps what depends on it in
// uniform registers.
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }
DEVICE float uniform_float(float x) { return __int_as_float(uniform(__float_as_int(x))); }

// Whether the calling lane is the one of its warp that acts for all, always the same. ptxas knows that it is alone: what such a
// one has the copy engine do takes half as many instructions.
DEVICE bool elect_one() {
    int chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

// The number itself, got by an instruction that the compiler leaves where it is: in code that hardly ever runs, whose
// beginnings would else be computed beforehand, each time.
DEVICE int opaque(int x) { return __shfl_sync(~0u, x, threadIdx.x % 32); }

// The number, which the compiler may not compute behind what is said to depend on the result, 0: no computation gives this NaN.
DEVICE unsigned depends_on(float x) { return __float_as_uint(x) == 0x7fa12345u; }

DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned address) {  // four of 8 rows x 16 bytes
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
template <bool TURNED>
DEVICE void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    if constexpr (TURNED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// One product of a single warp, 16 x 8 with 16 summed; its result lies as wgmma's.
DEVICE void multiply(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MULTIPLY(type)                                                                                                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (STORAGE == BFLOAT16) MULTIPLY("bf16");
    else MULTIPLY("f16");
#undef MULTIPLY
}

// --- which tiles ------------------------------------------------------------------------------------------------------

// Tiles along an axis that exist, found by one warp, 32 at a time and before that, where one look may cover so many, 32
// groups of 32. look(place, many): states of tiles `place` ... `place` + many - 1 of the way, 0 if all are EMPTY.
struct TileList {
    static constexpr int MOST = 224;
    int entry[MOST];  // place << 8 | states
};

// Fill the list with the next of `tiles` tiles; returns how many, moves `next` on. seen: all states of these, or-ed. hurry: what the
// first look finds is enough, for all wait for it.
template <typename List, typename Look>
DEVICE int fill(List& list, int& next, int tiles, unsigned& seen, Look look, bool hurry = false) {
    const int lane = threadIdx.x % 32;
    int count = 0;
    seen = 0;
    __syncwarp();
#pragma unroll 1
    while (next < tiles && count + 32 <= List::MOST && !(hurry && count > 0)) {
        if (HAS_MASK && !MASK_READS_ARRAYS && tiles - next > 32) {
            const int first = next + 32 * lane, many = tiles - first < 32 ? tiles - first : 32;
            const unsigned groups = __ballot_sync(~0u, many > 0 && look(first, many) != 0);
            if (groups == 0) {
                next += 1024;
                continue;
            }
            next += 32 * (__ffs(groups) - 1);
        }
        const int place = next + lane;
        const unsigned states = place < tiles ? look(place, 1) : 0, live = __ballot_sync(~0u, states != 0);
        if (states != 0) list.entry[count + __popc(live & ((1u << lane) - 1))] = place << 8 | states;
        seen |= __reduce_or_sync(~0u, states);
        count += __popc(live);
        next += 32;
    }
    __syncwarp();
    return count;
}

// --- which work -------------------------------------------------------------------------------------------------------

struct TileCoord { int tile, bh; };  // number of a tile; of a head among those of all batch entries

// What comes as number `index` of the tiles of `all` heads: `most` heads at a time, tile after tile. Of each head the
// tiles from number `early` on come at the very end, where they even out when blocks finish.
DEVICE TileCoord tile_coord(int index, int early, int all, int most) {
    if (index >= early * all) {
        const int tile = index / all;
        return {tile, index - tile * all};
    }
    const int first = index / (most * early) * most, rest = index - first * early;
    const int size = all - first < most ? all - first : most, tile = rest / size;
    return {tile, first + rest - tile * size};
}

// How many of a head's tiles come early: under a mask, where those that come first have most to do, a quarter does not. Not of tiles
// that are looked up: the last ones have as much to do, and what all heads read and add to does not stay in the L2 cache.
DEVICE int tiles_before_lpt_tail(int tiles) { return HAS_MASK && !MASK_READS_ARRAYS ? tiles - tiles / 4 : tiles; }

// Numbers of rows, in bulk: `bytes` of them, a multiple of 16.
DEVICE void bulk_load(unsigned target, const float* source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }
