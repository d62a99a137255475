// The consumer of the FP8 forward pass: 64 rows of a work tile for each warp group.
//
//     S         [64][BLOCK_K]       registers; S = Q K^T of codes, then P
//     P         [64][BLOCK_K]       registers, codes
//     PV        [64][PV_COLUMNS]    registers, the accumulator of one tile
//     O         [64][HEAD_DIM_V]    registers, sums by CUDA cores
//
// S(n) is issued together with P(n-1) V(n-1), the softmax of tile n overlaps with the second product, and two warp
// groups may ping-pong, as in mainloop.cuh. Head dims over 128 leave no registers for it (OVERLAPS).
//
// Two-level accumulation: a tensor core keeps about 14 bits of a sum of e4m3 products (DeepSeek-V3, arXiv 2412.19437,
// section 3.5.2). So PV of each tile, at most 128 keys, has an accumulator of its own, which CUDA cores add to O in
// float32, while the tensor cores compute S of the next tile but one.
//
// Rows whose scales are not positive numbers, or too far from 1 for products of scales, and rows that a masked NaN in V
// has spoilt, are computed again from global memory (epilogue.cuh).
#pragma once
#include "sm90/epilogue.cuh"

// --- shared memory ---------------------------------------------------------------------------------------------------
//
// Shared memory of the FP8 forward pass beyond that of layout.cuh. V comes as [BLOCK_K][..], like K, and is transposed.
//
// From the head: SCALES_PER_TOKEN, whether keys of a head have scales of their own, and the offsets of
//
//     AT_VT               [STAGES][COLUMNS][128 bytes]: V^T, a line with the codes of a column for BLOCK_K keys
//     AT_VT_PIPE          full and empty barriers
//     AT_KEY_SCALES       SCALES_PER_TOKEN: [2][MMA_WARPGROUPS][3][128] floats, see load_key_scales()

constexpr int BYTES_VT = COLUMNS * CHUNK_ROW, SCALE_BYTES = 4 * 128;

static_assert(!FP8 || (BLOCK_K % 32 == 0 && BLOCK_K <= 128), "a line of V^T has up to 128 keys, a wgmma multiplies 32");

// A warp group that transposes V: one warp would delay its scheduler's consumers, for which the others wait. Beside
// three warp groups of consumers there are no registers for it, and a warp of warp group 0 transposes.
constexpr int TRANSPOSE_WARPS = MMA_WARPGROUPS < 3 ? 4 : 1, WARPGROUPS = MMA_WARPGROUPS + (TRANSPOSE_WARPS > 1 ? 2 : 1);
constexpr int LAUNCH_REGISTERS = 65536 / (128 * WARPGROUPS) / 8 * 8;  // of a thread
static_assert(!FP8 || MMA_WARPGROUPS * CONSUMER_REGISTERS + (WARPGROUPS - MMA_WARPGROUPS) * PRODUCER_REGISTERS
                          <= WARPGROUPS * LAUNCH_REGISTERS,
              "setmaxnreg would wait for ever for registers that the launch does not get");

DEVICE Pipeline<STAGES> vt_pipe(unsigned base) { return Pipeline<STAGES>::at(base + AT_VT_PIPE); }
DEVICE unsigned at_vt(unsigned base, unsigned n) { return base + AT_VT + n % STAGES * BYTES_VT; }

// --- softmax ---------------------------------------------------------------------------------------------------------
//
// The online softmax of the FP8 forward pass, to P as codes of e4m3.
//
// P is 2^MAX_P_LOG2 relative to the row maximum so far. Scales of tokens belong to a score's exponent:
//
//     t_j = scale * k_scale_j s_j + log2(v_scale_j)      P_j = 2^(t_j - m)      l = sum P_j / v_scale_j
//
// So P is what its value's code is multiplied by, the row maximum is that of these products, and the greatest of them
// is a power of two, which e4m3 holds. Masked keys have no part in it.

// e4m3 has no bits for P below 2^-9, and 448 is its greatest number.
constexpr float MAX_P_LOG2 = 8;

// Scales of values that float32 has room for, beside weights. A group of zeros has float32's least normal number
// (quantize), whose codes are zeros: it stands for MIN_V_SCALE.
constexpr float MIN_V_SCALE = 8.271806e-25f, MAX_V_SCALE = 16384.0f;  // 2^-80, 2^14

constexpr int CODE_REGS = BLOCK_K / 8;  // of P

// A tile's key scales, logarithms and inverses of its value scales, by a warp group: a key for each thread. A slot is
// written again two tiles later, behind the barrier of the tile between.
DEVICE void load_key_scales(const Params& p, const WorkTile& at, int k0, unsigned slot, int wg) {
    const int key = key_inside(k0 + threadIdx.x % 128, (int)seq_info(p, at.b).n_k), head = at.h / GQA_GROUP;
    const float k = scale_of(p.k_scale, at.b, head, key), v = scale_of(p.v_scale, at.b, head, key);
    const unsigned own = slot + threadIdx.x % 128 * 4;
    const float size = fmaxf(v, MIN_V_SCALE);
    const bool valid = (v >= MIN_V_SCALE || v == MIN_SCALE) && v <= MAX_V_SCALE;
    store_float(own, k);
    store_float(own + SCALE_BYTES, log2_fast(size));
    store_float(own + 2 * SCALE_BYTES, valid ? reciprocal(size) : fk_special(0));  // the epilogue sees NaN
    named_barrier_sync(WARPGROUP_BARRIER + wg, 128);
}

// For each pair of a lane's columns f(column block, two numbers of the keys).
template <typename F>
DEVICE void for_columns(unsigned numbers, F f) {
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) f(n, load_floats(numbers + threadIdx.x % 4 * 8 + 32 * n));
}

// Each column of a tile times its key's scale.
DEVICE void scale_columns(float (&s)[S_REGS], unsigned key_scales) {
    for_columns(key_scales, [&](int n, float2 scale) {
        s[4 * n] *= scale.x, s[4 * n + 1] *= scale.y, s[4 * n + 2] *= scale.x, s[4 * n + 3] *= scale.y;
    });
}

// S to P. scale: from S to base 2, for each of a lane's rows. `rescale` brings sums of the tiles before to the new m.
// between_rows(x) is called between a lane's two rows, whose first one x depends on.
template <typename F>
DEVICE void online_softmax_fp8(float (&s)[S_REGS], float (&m)[2], float (&l)[2], float (&rescale)[2],
                               const float (&scale)[2], unsigned key_scales, F between_rows) {
    if constexpr (SCALES_PER_TOKEN)
        for_columns(key_scales + SCALE_BYTES, [&](int n, float2 log2_v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) s[4 * n + i] = fmaf(s[4 * n + i], scale[i / 2], i % 2 ? log2_v.y : log2_v.x);
        });
    auto element = [&](int half, int i) -> float& { return s[i / 2 * 4 + 2 * half + i % 2]; };
    float top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float chains[2] = {HIDDEN, HIDDEN};  // half the latency
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) chains[i % 2] = fmaxf(chains[i % 2], element(half, i));
        top[half] = fmaxf(chains[0], chains[1]);
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], step));
    float sum[4] = {0, 0, 0, 0}, factor[2] = {1, 1}, shift[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if constexpr (!SCALES_PER_TOKEN) factor[half] = scale[half];
        const float next = fmaxf(m[half], fmaf(top[half], factor[half], -MAX_P_LOG2));
        shift[half] = next == HIDDEN ? 0.0f : next;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift[half]);
        m[half] = next;
        // A great score hides the scale of its value. The epilogue sees NaN.
        if (SCALES_PER_TOKEN && is_great(shift[half])) l[half] = fk_special(0);
    }
    if constexpr (!SCALES_PER_TOKEN) scale_below_great(s, shift, factor);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) {
            float& x = element(half, i);
            x = exp2_fast(fmaf(x, factor[half], -shift[half]));
            if constexpr (!SCALES_PER_TOKEN) sum[2 * half + i % 2] += x;
        }
        if (half == 0) between_rows(SCALES_PER_TOKEN ? element(0, 0) : sum[0] + sum[1]);
    }
    if constexpr (SCALES_PER_TOKEN)
        for_columns(key_scales + 2 * SCALE_BYTES, [&](int n, float2 inverse_v) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] = fmaf(s[4 * n + i], i % 2 ? inverse_v.y : inverse_v.x, sum[i]);
        });
#pragma unroll
    for (int half = 0; half < 2; ++half) l[half] = fmaf(l[half], rescale[half], sum[2 * half] + sum[2 * half + 1]);
}

// A row of P as the A operand of P V: the keys of a word are in the order of fp8_forward.cu.
DEVICE void pack_p_fp8(unsigned (&codes)[CODE_REGS], const float (&s)[S_REGS], int half) {
#pragma unroll
    for (int i = half; i < CODE_REGS; i += 2) {
        const float* x = s + 8 * (i / 2) + i % 2 * 2;  // 16 keys of row half i % 2
        codes[i] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
}

// --- the consumer ----------------------------------------------------------------------------------------------------

constexpr bool OVERLAPS = COLUMNS <= 128;
// O and PV have to fit into registers.
constexpr int PV_COLUMNS = OVERLAPS ? COLUMNS : COLUMNS / 2, PV_REGS = PV_COLUMNS / 2;

// Nothing, as no computation produces this NaN. But the compiler does not know it, and schedules what x depends on
// before a wait that follows: it would wait for PV before the exponentials.
DEVICE void never_store(unsigned address, float x) {
    asm volatile("{ .reg .pred p; setp.eq.u32 p, %1, 0x7fa12345; @p st.shared.b32 [%0], %1; }"
                 ::"r"(address), "r"(__float_as_uint(x)) : "memory");
}

// What a step adds to a descriptor stays within its low word.
DEVICE unsigned long long advance(unsigned long long descriptor, int step) {
    return descriptor & 0xffffffff00000000ull | ((unsigned)descriptor + step);
}

struct ConsumerFp8 {
    const Params& params;
    unsigned base;
    int wg;
    Pipeline<Q_BUFFERS> pipe_q;
    Pipeline<STAGES> pipe_k, pipe_vt;
    float scale_log2;
    float o[O_REGS], pv[PV_REGS], s[S_REGS], m[2], l[2];
    float pv_rescale[2], rescale[2];  // of O, before PV of the last tile whose product is complete, and of this one
    float row_scale[2];        // of S; to base 2 unless HAS_SCORE
    float v_scale;
    unsigned codes[CODE_REGS];
    WorkTile work_tile;
    int number = -1;           // of the work tile whose O is in registers
    bool p_pending = false;    // the codes wait for their V
    unsigned q_address = 0;    // of the warp group's rows of Q
    int next_desc;             // tile descriptor, read ahead

    __device__ __forceinline__ ConsumerFp8(const Params& p, unsigned base, int wg)
        : params(p), base(base), wg(wg), pipe_q(q_pipe(base)), pipe_k(k_pipe(base)), pipe_vt(vt_pipe(base)),
          scale_log2(uniform_float(softmax_scale_log2(p))) {}

    __device__ __forceinline__ void ping_pong_sync() const {
        if (PING_PONG) named_barrier_sync(PING_PONG_BARRIER + wg, 256);
    }
    __device__ __forceinline__ void ping_pong_arrive() const {
        if (PING_PONG) named_barrier_arrive(PING_PONG_BARRIER + (wg + 1 == MMA_WARPGROUPS ? 0 : wg + 1), 256);
    }
    __device__ __forceinline__ int wait_tile_desc(unsigned n) const {  // it comes with K(n)
        pipe_k.consumer_wait(n);
        return load_word(tile_desc_slot(base, n));
    }

    // S = Q K(n)^T
    __device__ __forceinline__ void issue_qk(unsigned n) {
        const unsigned long long q = descriptor(q_address), k = descriptor(base + at_k(n % STAGES));
        wgmma_fence();
        wgmma_zero_init(s, q, k);
#pragma unroll
        for (int step = 1; step < up(HEAD_DIM, 32) / 32; ++step)  // 32 columns are as many bytes as 16 of 16 bits
            product(s, advance(q, along_rows(step, 64)), advance(k, along_rows(step, BLOCK_K)), 1);
        wgmma_commit();
    }

    // PV of tile n, columns from `first` on.
    __device__ __forceinline__ void issue_pv(unsigned n, int first = 0) {
        const unsigned long long v = descriptor(at_vt(base, n) + first * CHUNK_ROW);
        if (first == 0) pipe_vt.consumer_wait(n);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 32; ++step)
            wgmma_rs(pv, codes, 4 * step, advance(v, along_rows(step, COLUMNS)), step > 0 ? 1 : 0);
        wgmma_commit();
    }
    // The codes and V of tile n may be overwritten.
    __device__ __forceinline__ void wait_pv(unsigned n, bool last = true) {
        wgmma_wait<0>();
        fence_operand(pv), fence_operand(codes);
        if (last) pipe_vt.consumer_release(n);
        pv_rescale[0] = rescale[0], pv_rescale[1] = rescale[1];
    }
    // O = rescale O + PV
    __device__ __forceinline__ void add_pv(int first = 0) {
#pragma unroll
        for (int i = 0; i < PV_REGS; ++i) o[first / 2 + i] = fmaf(o[first / 2 + i], pv_rescale[i / 2 % 2], pv[i]);
    }

    // Work tile `number` and its scales, from global memory; O and the softmax anew.
    __device__ __forceinline__ void begin_work_tile() {
        const WorkTile& at = work_tile = read_work_tile(params, base, number, wg);
        q_address = q_rows(base, number % Q_BUFFERS, wg);
        const int head = at.h / GQA_GROUP;
        v_scale = SCALES_PER_TOKEN ? 1.0f : scale_of(params.v_scale, at.b, head, 0);
        const float k_scale = SCALES_PER_TOKEN ? 1.0f : scale_of(params.k_scale, at.b, head, 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto [h, row] = clamped_row(params, at.b, at.h, at.row0 + row_of_lane(half));
            const float scale = scale_of(params.q_scale, at.b, h, row) * k_scale;
            const bool valid = scale >= 0 && scale <= MAX_SCALE && fabsf(v_scale) <= MAX_SCALE;
            l[half] = valid ? 0.0f : fk_special(0);  // the epilogue sees NaN
            m[half] = HIDDEN, row_scale[half] = fmaxf(scale, MIN_SCALE) * (HAS_SCORE ? 1.0f : scale_log2);
        }
#pragma unroll
        for (int i = 0; i < O_REGS; ++i) o[i] = 0;
#pragma unroll
        for (int i = 0; OVERLAPS && i < PV_REGS; ++i) pv[i] = 0;  // the first sum is of nothing
        pv_rescale[0] = pv_rescale[1] = 0;
    }

    __device__ __forceinline__ void end_work_tile() {
#pragma unroll
        for (int i = 0; !SCALES_PER_TOKEN && i < O_REGS; ++i) o[i] *= v_scale;
        epilogue(params, read_work_tile(params, base, number, wg), base, number, m, l, o, wg);
    }

    // P_PENDING: that of tile n - 1 waits for its V.
    template <bool P_PENDING>
    __device__ __forceinline__ void mma_block(unsigned n, bool full, int k0) {
        ping_pong_sync();
        if (P_PENDING) add_pv();  // ptxas places it beside QK, and behind issue_qk() would have it wait for S
        issue_qk(n);
        if (P_PENDING) issue_pv(n - 1);
        ping_pong_arrive();
        const unsigned key_scales = base + AT_KEY_SCALES + (n % 2 * MMA_WARPGROUPS + wg) * 3 * SCALE_BYTES;
        if (SCALES_PER_TOKEN) load_key_scales(params, work_tile, k0, key_scales, wg);
        wgmma_wait<P_PENDING>();  // S is complete, PV may be in flight
        fence_operand(s);
        pipe_k.consumer_release(n);

        if (SCALES_PER_TOKEN) scale_columns(s, key_scales);
        float scale[2] = {row_scale[0], row_scale[1]};
        if (HAS_SCORE) {
#pragma unroll
            for (int i = 0; i < S_REGS; ++i) s[i] *= row_scale[i / 2 % 2];
            scale[0] = scale[1] = LOG2E;
        }
        modify_tile(params, work_tile, full, s, k0, (float)params.softmax_scale);
        float next_rescale[2];
        online_softmax_fp8(s, m, l, next_rescale, scale, key_scales, [&](float first_row) {
            if (P_PENDING) {
                never_store(base, first_row);
                wait_pv(n - 1);
            }
            pack_p_fp8(codes, s, 0);
        });
        pack_p_fp8(codes, s, 1);
        rescale[0] = next_rescale[0], rescale[1] = next_rescale[1];
        next_desc = wait_tile_desc(n + 1);
        p_pending = OVERLAPS;
#pragma unroll
        for (int first = 0; !OVERLAPS && first < COLUMNS; first += PV_COLUMNS) {
            issue_pv(n, first), wait_pv(n, first + PV_COLUMNS == COLUMNS);
            add_pv(first);
        }
    }

    // A tile that is EMPTY for this warp group, but not for another one.
    __device__ __forceinline__ void skip_block(unsigned n) {
        ping_pong_sync();
        ping_pong_arrive();
        pipe_k.consumer_release(n);
        pipe_vt.consumer_wait(n);
        pipe_vt.consumer_release(n);
        if (SCALES_PER_TOKEN) named_barrier_sync(WARPGROUP_BARRIER + wg, 128);  // as load_key_scales() needs
        next_desc = wait_tile_desc(n + 1);
    }

    __device__ __forceinline__ void run() {
        next_desc = wait_tile_desc(0);
        if (PING_PONG && wg == MMA_WARPGROUPS - 1) ping_pong_arrive();
#pragma unroll 1
        for (unsigned n = 0;; ++n) {
            const int tile_desc = uniform(next_desc), k0 = (tile_desc >> 8) * BLOCK_K;
            const int state = tile_desc >> 2 * wg & 3;
            const bool first_tile = tile_desc & FIRST_TILE;  // also END
            if (OVERLAPS && p_pending && !first_tile && state != EMPTY) {
                mma_block<true>(n, state == FULL, k0);
                continue;
            }
            if (OVERLAPS && p_pending) {  // no S goes with it
                add_pv(), issue_pv(n - 1), wait_pv(n - 1);
                p_pending = false;
            }
            if (first_tile) {
                if (number >= 0) {
                    if (OVERLAPS) add_pv();
                    end_work_tile();
                }
                if (tile_desc == END) break;
                pipe_q.consumer_wait(++number);
                begin_work_tile();
            }
            if (state == EMPTY) skip_block(n);
            else mma_block<false>(n, state == FULL, k0);
        }
    }
};
