// PTX instructions of Hopper as functions: mbarriers, clusters, TMA, wgmma, register reallocation.
//
// A warp group is four warps. One wgmma multiplies its 64 rows by N columns, asynchronously. B lies in shared memory, A
// in shared memory or in registers. In the accumulator element 4 n + 2 half + c of a lane, with g = lane / 4 and t =
// lane % 4, is
//
//     row 16 * (warp of the warp group) + g + 8 half,  column 8 n + 2 t + c
//
// A packed 16-bit accumulator has the layout of an A operand in registers, so P feeds the second product without a
// shuffle.
//
// A tile in shared memory is [chunk][row][128 bytes], a chunk being 64 columns of 16 bits. It begins at a multiple of
// 1024 bytes. Its 16-byte vectors are permuted within eight rows, vector v of row r lying at v ^ (r % 8): the 128-byte
// swizzle of TMA and wgmma.
//
// The wgmma instructions of the shapes in use are generated (cupy_raw/sm90_wgmma.py): product(), wgmma_zero_init(),
// wgmma_rs().
#pragma once

#include "common/fragment.cuh"

constexpr int padded(int dim) { return up(dim, 16); }  // columns of a product; those past `dim` are zeros
constexpr int chunks(int dim) { return up(dim, 64) / 64; }
constexpr int CHUNK_ROW = 128, VEC_BYTES = 16;  // bytes

template <auto VALUE> struct Constant { static constexpr auto value = VALUE; };  // an argument of generic lambdas

// A lane's row of an accumulator, among the 64 of its warp group.
DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

// --- shared and global memory ----------------------------------------------------------------------------------------

DEVICE unsigned address_of(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }
// Of a 16-byte vector within a chunk.
DEVICE unsigned swizzled(int row, int vec) { return row * CHUNK_ROW + ((vec ^ (row & 7)) * VEC_BYTES); }

DEVICE void store_word(unsigned address, int x) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
DEVICE void store_float(unsigned address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
DEVICE void store_floats(unsigned address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
DEVICE void store_if(int condition, float* target, float x) {  // to global memory, predicated instead of branching
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %0, 0; @p st.global.f32 [%1], %2; }"
                 ::"r"(condition), "l"(target), "f"(x) : "memory");
}
// What `target` was before it is counted up where `condition` holds; 0 elsewhere. ptxas combines what a warp adds, and
// so waits for the result at once; it does not combine this.
DEVICE int count_if(int condition, unsigned* target) {
    int before;
    asm volatile("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; @p atom.global.inc.u32 %0, [%1], 0x7fffffff; }"
                 : "=r"(before) : "l"(target), "r"(condition) : "memory");
    return before;
}
DEVICE float2 load_floats(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}
DEVICE float load_float(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
DEVICE int load_word(unsigned address) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

DEVICE void clear_vec(unsigned address) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

// --- mbarriers -------------------------------------------------------------------------------------------------------
// A phase ends when all arrivals and all expected bytes are there. mbarrier_wait(barrier, parity) waits for the end of
// a phase. The first phase has parity 0; a wait for parity 1 on a new barrier returns at once.

DEVICE void mbarrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes the initialisation visible to TMA.
DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// One arrival for a warp, by its lane 0. It is predicated: after a branch ptxas 13.0 no longer treats wgmma descriptors
// as uniform and moves them out of uniform registers.
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
    if constexpr (WATCHDOG) {  // a debugging aid: a deadlock becomes a fault at the barrier's address
        // The fault is a store: a trap instruction here would serialise the wgmmas.
        for (long long begin = clock64(); !mbarrier_try_wait(barrier, parity);)
            if (clock64() - begin > 4000000000ll) *(volatile int*)(unsigned long long)barrier = 0;
    } else {
        asm volatile(
            "{ .reg .pred p;\n"
            "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
            "@p bra DONE;\n"
            "bra AGAIN;\n"
            "DONE: }" ::"r"(barrier), "r"(parity) : "memory");
    }
}
// A wait off the critical path: sleeps between attempts, which leaves the issue slots to other warps.
DEVICE void mbarrier_wait_backoff(unsigned barrier, unsigned parity, int nanoseconds = 100) {
    while (!mbarrier_try_wait(barrier, parity)) asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}

// --- named barriers --------------------------------------------------------------------------------------------------
// Barriers among warps, by number; 0 is __syncthreads'.

DEVICE void named_barrier_sync(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE void named_barrier_arrive(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
DEVICE bool named_barrier_any(int number, int threads, bool x) {
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.s32 %0, 1, 0, q; }"
                 : "=r"(any) : "r"(number), "r"(threads), "r"((int)x) : "memory");
    return any;
}

// --- clusters --------------------------------------------------------------------------------------------------------
// The CTAs of a cluster are co-resident and reach each other's shared memory. No CTA may end before the last access to
// it.

DEVICE int cluster_ctarank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
DEVICE unsigned mapa(unsigned address, int rank) {  // the same address in the shared memory of CTA `rank`
    unsigned x;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(address), "r"(rank));
    return x;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// One arrival for a warp, at a mapa barrier. It reports a read, so no release is needed: .release.cluster would wait
// for all of the warp's additions to global memory.
DEVICE void dsmem_arrive(unsigned barrier, int lane) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [%0]; }"
                 ::"r"(barrier), "r"(lane) : "memory");
}
// A word to a mapa address. The barrier there expects and counts its four bytes.
DEVICE void dsmem_store(unsigned address, int x, unsigned barrier) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 ::"r"(address), "r"(x), "r"(barrier) : "memory");
}
// From this CTA's shared memory to a mapa address and barrier.
DEVICE void dsmem_copy(unsigned target, unsigned source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "r"(source), "r"(bytes), "r"(barrier) : "memory");
}

// --- TMA -------------------------------------------------------------------------------------------------------------

struct __align__(64) TensorMap { unsigned long long words[16]; };  // written by cuda_common/tensor_maps.py

// A box is [tokens][PACK_GQA heads][64 columns]. Rows past the tensor's end are read as zeros and not written.
struct Box { int column, token, head, batch; };

template <int PACK_GQA>
DEVICE void tma_load(unsigned target, const TensorMap& map, const Box& box, unsigned barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(box.column), "r"(PACK_GQA > 1 ? 0 : box.token),
                 "r"(PACK_GQA > 1 ? box.token : 0), "r"(box.head), "r"(box.batch) : "memory");
}
// To the same address in the shared memory of each CTA of the cluster that `ctas` has a bit for, and its barrier there.
// Of a map without PACK_GQA.
DEVICE void tma_load_multicast(unsigned target, const TensorMap& map, const Box& box, unsigned barrier,
                               unsigned short ctas) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 ::"r"(target), "l"(&map), "r"(barrier), "r"(box.column), "r"(box.token), "r"(0),
                 "r"(box.head), "r"(box.batch), "h"(ctas) : "memory");
}
template <int PACK_GQA>
DEVICE void tma_store(const TensorMap& map, const Box& box, unsigned source) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 ::"l"(&map), "r"(source), "r"(box.column), "r"(PACK_GQA > 1 ? 0 : box.token),
                 "r"(PACK_GQA > 1 ? box.token : 0), "r"(box.head), "r"(box.batch) : "memory");
}
// Contiguous floats; `bytes` is a multiple of 16.
DEVICE void bulk_load(unsigned target, const float* source, int bytes, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int PENDING = 0>  // shared memory may be overwritten
DEVICE void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
template <int PENDING = 0>  // the data are in global memory
DEVICE void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }

DEVICE void store_vec(unsigned address, float x, float y, float z, float w) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
DEVICE void store_words(unsigned address, unsigned x, unsigned y, unsigned z, unsigned w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE uint4 load_vec(unsigned address) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}

// The first columns of query or key n of sequence b, and of those behind it.
DEVICE Box q_box(const Params& p, int b, int head, int n) {
    return {0, (int)q_token(p, b, n), head, IS_PACKED ? 0 : b};
}
DEVICE Box kv_box(const Params& p, int b, int head, int n) {
    return {0, (int)kv_token(p, b, n), head, IS_PACKED ? 0 : b};
}
DEVICE Box at_column(const Box& box, int column) { return {column, box.token, box.head, box.batch}; }

// A tile of ROWS rows, chunk by chunk.
template <int PACK_GQA, int CHUNKS, int ROWS, int COLUMNS = 64>
DEVICE void load_tile(unsigned target, const TensorMap& map, const Box& box, unsigned barrier, int column = 0,
                      int chunk = ROWS * CHUNK_ROW) {
    UNROLL(c, CHUNKS)
        tma_load<PACK_GQA>(target + c * chunk, map, at_column(box, column + COLUMNS * c), barrier);
}

// Orders a thread's writes to shared memory before later reads by TMA and wgmma (the async proxy).
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Writes zeros to the rows of a tile from `first` on. Called by a warp group, which synchronises afterwards.
template <int DIM, int ROWS>
DEVICE void clear_rows(unsigned tile, int first, int chunk_bytes) {
    first = first < 0 ? 0 : first;
    for (int i = threadIdx.x % 128; i < (ROWS - first) * chunks(DIM) * 8; i += 128) {
        const int vec = i % 8, chunk = i / 8 % chunks(DIM), row = first + i / 8 / chunks(DIM);
        clear_vec(tile + chunk * chunk_bytes + row * CHUNK_ROW + vec * VEC_BYTES);
    }
    fence_proxy_async();
}

// --- wgmma -----------------------------------------------------------------------------------------------------------

// An operand's descriptor: its address and, if it is read along columns and wider than a chunk, the stride from chunk
// to chunk. Eight rows every 1024 bytes and the 128-byte swizzle are common to all.
DEVICE unsigned long long descriptor(unsigned address, int chunk = 16) {
    return 0x4000004000000000ull | (unsigned long long)(chunk >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

// What step k, 16 along the contracted axis, adds to a descriptor: 16 columns of a tile of `rows` rows, or 16 rows.
constexpr int along_rows(int k, int rows) { return (k / 4 * rows * CHUNK_ROW + k % 4 * 32) >> 4; }
constexpr int along_columns(int k) { return k * 16 * CHUNK_ROW >> 4; }

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {  // until at most PENDING committed groups are in flight
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
DEVICE void wgmma_wait_loads_pass() {  // without a memory clobber: the compiler may hoist loads above it
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING));
}
// After a wait: the compiler may not read these registers before it.
template <int N> DEVICE void fence_operand(float (&x)[N]) {
    UNROLL(i, N) asm volatile("" : "+f"(x[i]));
}
template <int N> DEVICE void fence_operand(unsigned (&x)[N]) {
    UNROLL(i, N) asm volatile("" : "+r"(x[i]));
}

// --- instructions of one warp ----------------------------------------------------------------------------------------

template <bool TRANSPOSED = false>
DEVICE void ldmatrix_x4(unsigned (&r)[4], unsigned address) {  // four of 8 rows x 16 bytes
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
template <bool TRANSPOSED>
DEVICE void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
    if constexpr (TRANSPOSED)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                     ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// c += a b by one warp. The accumulator has wgmma's layout.
DEVICE void mma_m16n8k16(float* c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
#define MMA_M16N8K16(type)                                                                                             \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                                        \
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                     \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (STORAGE == BFLOAT16) MMA_M16N8K16("bf16");
    else MMA_M16N8K16("f16");
#undef MMA_M16N8K16
}

// --- float32 accumulators --------------------------------------------------------------------------------------------

// A warp's 16 rows times `factor`, 32 columns at a time through 2 KiB of shared memory, so that stores are of whole
// 128-byte lines: store(row, column, four elements).
template <int DIM, int N, typename F>
DEVICE void store_lines(const float (&x)[N], float factor, unsigned staged, int lane, F store) {
#pragma unroll
    for (int c0 = 0; c0 < padded(DIM); c0 += 32) {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 8 && c0 + i / 2 * 8 < padded(DIM); ++i) {
            const int e = (c0 / 8 + i / 2) * 4 + 2 * (i % 2);
            store_floats(staged + swizzled(lane / 4 + 8 * (i % 2), 2 * (i / 2) + lane % 4 / 2) + lane % 2 * 8,
                         x[e] * factor, x[e + 1] * factor);
        }
        __syncwarp();
        UNROLL(i, 4) {
            const int row = 4 * i + lane / 8;
            const unsigned source = staged + swizzled(row, lane % 8);
            const float2 low = load_floats(source), high = load_floats(source + 8);
            store(row, c0 + lane % 8 * 4, float4{low.x, low.y, high.x, high.y});
        }
    }
    __syncwarp();
}

// Four columns of a row of DIM, which is contiguous.
template <int DIM>
DEVICE void store_four(float* row, int column, const float4& x) {
    if (DIM % 4 == 0 && ((unsigned long long)row & 15) == 0) {
        if (column < DIM) *reinterpret_cast<float4*>(row + column) = x;
        return;
    }
    if (column < DIM) row[column] = x.x;
    if (column + 1 < DIM) row[column + 1] = x.y;
    if (column + 2 < DIM) row[column + 2] = x.z;
    if (column + 3 < DIM) row[column + 3] = x.w;
}

// --- registers -------------------------------------------------------------------------------------------------------

template <int COUNT> DEVICE void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// A warp-uniform value, declared as such: the compiler keeps what depends on it in uniform registers.
DEVICE int uniform(int x) { return __shfl_sync(~0u, x, 0); }
DEVICE float uniform_float(float x) { return __int_as_float(uniform(__float_as_int(x))); }

// True in one lane of the warp, always the same one. ptxas knows that a single lane runs, and issues TMA with half as
// many instructions.
DEVICE bool elect_one() {
    int chosen;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.s32 %0, 1, 0, p; }" : "=r"(chosen));
    return chosen;
}

// x, opaque to the compiler: the address arithmetic of rarely executed code stays there instead of being hoisted.
DEVICE int opaque(int x) { return __shfl_sync(~0u, x, threadIdx.x % 32); }

// 0, which the compiler cannot know: what uses it is not scheduled before x. No computation produces this NaN.
DEVICE unsigned depends_on(float x) { return __float_as_uint(x) == 0x7fa12345u; }
