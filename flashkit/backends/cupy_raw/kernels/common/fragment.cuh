// What kernels on tensor cores share. Accumulator fragments of mma.sync and wgmma: four lanes share a row, and each
// lane holds two neighbouring columns of every eight.
#pragma once

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

constexpr int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int larger(int a, int b) { return a > b ? a : b; }

template <bool FIRST, typename A, typename B> struct Select { using type = A; };
template <typename A, typename B> struct Select<false, A, B> { using type = B; };

DEVICE bool is_finite(float x) { return fabsf(x) < INFINITE; }

// Two float32 as 16-bit elements, the first in the low half; float16 where the tensors are float32.
DEVICE unsigned pack(float low, float high) {
    if constexpr (STORAGE != BFLOAT16) return pack_f16(low, high);
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Programmatic dependent launch (cuda_common/launch.py): the kernel starts while its predecessor still runs. After
// griddepcontrol_wait() the predecessor's results are visible; griddepcontrol_launch_dependents() lets the successor
// start.
DEVICE void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Reduces over the four lanes that share a row.
template <typename F>
DEVICE float across_lanes(float x, F join) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

DEVICE float max_across_lanes(float x) { return across_lanes(x, [](float x, float y) { return fmaxf(x, y); }); }
DEVICE float sum_across_lanes(float x) { return across_lanes(x, [](float x, float y) { return x + y; }); }

// A head's sink, one more logit without a value: the row reference in base 2 and the row sum with it, the factor on O.
DEVICE void add_sink(const Params& p, int h, float& reference, float& sum, float& factor) {
    const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E, before = reference;
    if (sink == HIDDEN) return;
    reference = fmaxf(reference, sink);
    factor = exp2_fast(before - reference);
    sum = sum * factor + exp2_fast(sink - reference);
}

// Stores the entropy and the largest score of a row. top: base 2; total: the sum of P log2 P; sum: of P; P is relative
// to `reference`, in base 2, and the sink is in none of them.
constexpr float LOWEST = -1e30f;  // instead of -inf, which P = 0 makes NaN
template <typename F>
DEVICE void store_statistics(const Params& p, int b, int h, int row, float reference, float sum, float total, float top,
                             F store) {
    const float largest = sum == sum ? top * LN2 : sum;
    if constexpr (HAS_SINKS) {  // one more outcome
        const float before = reference, of_keys = sum;
        float factor = 1;
        add_sink(p, h, reference, sum, factor);
        const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E - reference;
        total = of_keys == 0 ? 0.0f : factor * fmaf(before - reference, of_keys, total);
        total = fmaf(exp2_fast(sink), fmaxf(sink, LOWEST), total);
    }
    store(q_row<float>(p, p.entropy, b, h, row), sum == 0 ? 0.0f : logf(sum) - LN2 * total / sum);
    store(q_row<float>(p, p.max_logit, b, h, row), largest);
}

// --- the non-finite fallback -----------------------------------------------------------------------------------------
//
// Rows computed again from global memory, pair by pair, where a masked pair or P = 0 has met infinity or NaN in V, or
// where products of terms or codes do not stand for those of the elements. No branch differs between the lanes of a
// warp, as the compiler would take nothing behind it as uniform.

// Elements of Q, K and V: what 1 in one of query or key n stands for, and V of a key by column.
template <typename T>
struct PlainElements {
    using element = T;
    __device__ __forceinline__ static float query_scale(const Params&, int, int, int) { return 1; }
    __device__ __forceinline__ static float key_scale(const Params&, const Tensor&, int, int, int) { return 1; }
    __device__ __forceinline__ static const T* values(const Params& p, int b, int h, int key) {
        return kv_row<const T>(p, p.v, b, h, key);
    }
};

// Sums of P V over keys first ... end - 1 of a row, by a warp, whose lane has columns column, column + 32, ...; and
// what they are relative to, the row reference in base 2 and the row sum. has_sink: the head's sink is in the sum.
// OF: of elements, as PlainElements.
// HAS_STATS: also the sum of P log2 P of the keys, and their greatest score in base 2.
struct RowSums { float top, sum, total, greatest; };
template <typename OF, int OWN>
DEVICE RowSums row_nonfinite(const Params& p, int b, int h, int row, int first, int end, bool has_sink, int lane,
                             int column, float (&sums)[OWN]) {
    const long long position = row + seq_info(p, b).q_position;
    using element = typename OF::element;
    const element* q = q_row<const element>(p, p.q, b, h, row);
    const float q_scale = OF::query_scale(p, b, h, row);
    const auto existing = [&](int k) { return k < end ? k : end - 1; };
    const auto score_log2 = [&](int k) {
        const element* key = kv_row<const element>(p, p.k, b, h / GQA_GROUP, existing(k));
        float s = 0;
#pragma unroll 1
        for (int d = 0; d < HEAD_DIM; ++d) s = fmaf(widen(q[d]), widen(key[d]), s);
        s *= q_scale * OF::key_scale(p, p.k_scale, b, h / GQA_GROUP, existing(k));
        if (k >= end) return (float)HIDDEN;
        s = modify<true>(s * (float)p.softmax_scale, b, h, row, position, k, p);
        return __fmul_rn(s, LOG2E);  // not fused with the subtraction of a great row reference
    };
    float top = HIDDEN, sum = 0, total = 0;
#pragma unroll 1
    for (int k0 = first; k0 < end; k0 += 32) top = fmaxf(top, score_log2(k0 + lane));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float greatest = top;
    const float sink = has_sink ? static_cast<const float*>(p.sinks)[h] * LOG2E : HIDDEN;
    top = fmaxf(top, sink);
    const float shift = top == HIDDEN ? 0.0f : top;
    UNROLL(i, OWN) sums[i] = 0;
#pragma unroll 1
    for (int k0 = first; k0 < end; k0 += 32) {
        const float below = score_log2(k0 + lane) - shift;
        float x = exp2_fast(below);
        sum += x;
        if constexpr (HAS_STATS) total = fmaf(x, fmaxf(below, LOWEST), total);
        if constexpr (HAS_DROPOUT) x = drop(x, p, b, h, row, k0 + lane);
#pragma unroll 1
        for (int other = 0; other < 32; ++other) {
            const float weight = __shfl_sync(~0u, x, other);  // 0 past the last key
            const int from = existing(k0 + other);
            const auto value = OF::values(p, b, h / GQA_GROUP, from);
            const float v_scale = OF::key_scale(p, p.v_scale, b, h / GQA_GROUP, from);
            UNROLL(i, OWN) {
                const float v = widen(value[column + 32 * i < HEAD_DIM_V ? column + 32 * i : 0]) * v_scale;
                sums[i] += weight == 0 ? 0.0f : weight * v;
            }
        }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        if constexpr (HAS_STATS) total += __shfl_xor_sync(~0u, total, step);
    }
    return {shift, sum + exp2_fast(sink - shift), total, greatest};
}

// --- the order of tiles ----------------------------------------------------------------------------------------------
//
// The order in which a persistent grid takes the tiles of all heads: L2 swizzle and longest-processing-time-first
// (LPT).

struct TileCoord { int tile, bh; };  // index of a tile; of a head among those of all batch entries

// The tile at place `index` of the order: `heads_at_a_time` heads together, tile after tile, so that their K and V stay
// in the L2 cache. Tiles from number `before_tail` on, the shortest, come after those of all heads: they even out the
// CTAs' ends.
DEVICE TileCoord tile_coord(int index, int before_tail, int heads, int heads_at_a_time) {
    if (index >= before_tail * heads) {
        const int tile = index / heads;
        return {tile, index - tile * heads};
    }
    const int first = index / (heads_at_a_time * before_tail) * heads_at_a_time, rest = index - first * before_tail;
    const int group = heads - first < heads_at_a_time ? heads - first : heads_at_a_time, tile = rest / group;
    return {tile, first + rest - tile * group};
}

// How many of a head's tiles come before the LPT tail: three quarters under a mask whose tiles shrink along the order.
// A mask that is read from arrays says nothing of their sizes, and a tail would only lose L2 hits.
DEVICE int tiles_before_lpt_tail(int tiles) { return HAS_MASK && !MASK_READS_ARRAYS ? tiles - tiles / 4 : tiles; }

// --- the tiles that a mask leaves ------------------------------------------------------------------------------------

// Appends the next of `tiles` tiles that exist; returns how many and advances `next`. `seen` is the union of their
// states.
//
// states_of(index, count) gives the states of tiles index ... index + count - 1 together, 0 if all are EMPTY. The warp
// asks for 32 tiles at a time, after 32 groups of 32 where a query may span so many. only_first: stop at the first
// tiles found, where the pipeline is still empty.
template <typename List, typename States>
DEVICE int fill(List& list, int& next, int tiles, unsigned& seen, States states_of, bool only_first = false) {
    constexpr int CAPACITY = sizeof(list.entry) / sizeof(int);
    const int lane = threadIdx.x % 32;
    int count = 0;
    seen = 0;
    __syncwarp();
#pragma unroll 1
    while (next < tiles && count + 32 <= CAPACITY && !(only_first && count > 0)) {
        if (HAS_MASK && !MASK_READS_ARRAYS && tiles - next > 32) {
            const int first = next + 32 * lane, many = tiles - first < 32 ? tiles - first : 32;
            const unsigned groups = __ballot_sync(~0u, many > 0 && states_of(first, many) != 0);
            if (groups == 0) {
                next += 1024;
                continue;
            }
            next += 32 * (__ffs(groups) - 1);
        }
        const int index = next + lane;
        const unsigned states = index < tiles ? states_of(index, 1) : 0, live = __ballot_sync(~0u, states != 0);
        if (states != 0) list.entry[count + __popc(live & ((1u << lane) - 1))] = index << 8 | states;
        seen |= __reduce_or_sync(~0u, states);
        count += __popc(live);
        next += 32;
    }
    __syncwarp();
    return count;
}
