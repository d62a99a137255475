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
// has spoilt, are computed again from global memory (nonfinite.cuh).
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/fp8_softmax.cuh"
#include "sm90/fp8_transpose.cuh"

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
