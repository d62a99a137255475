// The consumer of the FP8 forward pass: 64 rows of a work tile for each warp group.
//
//     S         [64][BLOCK_K]       registers; S = Q K^T of codes, then of numbers, by the scales of queries and keys
//     P         [64][BLOCK_K]       registers, codes: 2^MAX_P_LOG2 relative to the row maximum
//     PV        [64][PV_COLUMNS]    registers, the accumulator of one tile
//     O         [64][HEAD_DIM_V]    registers, sums by CUDA cores
//
// Two-level accumulation: a tensor core keeps about 14 bits of a sum of e4m3 products (DeepSeek-V3, arXiv 2412.19437,
// section 3.5.2). So PV of each tile, at most 128 keys, has an accumulator of its own, which CUDA cores add to O in
// float32. That addition applies the scale of V. Scales of tokens are factors on P before it is rounded, and each row
// of a tile then has a scale of its own, that of its greatest product. Masked keys have no part in it.
//
// Rows whose scales are not positive numbers, or too far from 1 for products of scales, and rows that a masked NaN in V
// has spoilt, are computed again from global memory (nonfinite.cuh).
#pragma once
#include "sm90/epilogue.cuh"
#include "sm90/fp8_transpose.cuh"
#include "sm90/softmax.cuh"

// e4m3 has no bits for P below 2^-9, and 448 is its greatest number.
constexpr float MAX_P_LOG2 = 8, MAX_P = 256;
constexpr float MIN_P_SCALE = 7.888609e-31f;  // 2^-100: its inverse, times MAX_P, is finite

// O and PV have to fit into registers.
constexpr int PV_COLUMNS = COLUMNS <= 128 ? COLUMNS : COLUMNS / 2, PV_REGS = PV_COLUMNS / 2;
constexpr int CODE_REGS = BLOCK_K / 8;  // of P

// S = Q K(n)^T
DEVICE void issue_qk_fp8(float (&s)[S_REGS], unsigned long long q, unsigned long long k) {
    wgmma_fence();
    wgmma_zero_init(s, q, k);
#pragma unroll
    for (int step = 1; step < up(HEAD_DIM, 32) / 32; ++step)  // 32 columns are as many bytes as 16 of 16 bits
        product(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
    wgmma_commit();
}

// The scales of a tile's keys or values, from global memory: four of a lane, before they are needed.
struct KeyScales {
    float own[BLOCK_K / 32];
    __device__ __forceinline__ void load(const Tensor& scales, const WorkTile& at, int k0, int n_k) {
#pragma unroll
        for (int i = 0; i < BLOCK_K / 32; ++i)
            own[i] = scale_of(scales, at.b, at.h / GQA_GROUP, key_inside(k0 + threadIdx.x % 32 + 32 * i, n_k));
    }
    __device__ __forceinline__ void store(unsigned slot) const {
        __syncwarp();  // the scales before have been read
#pragma unroll
        for (int i = 0; i < BLOCK_K / 32; ++i) store_float(slot + 4 * (threadIdx.x % 32 + 32 * i), own[i]);
        __syncwarp();
    }
};

// Each column of a tile times its key's scale.
DEVICE void scale_columns(float (&s)[S_REGS], unsigned scales) {
    const unsigned first = scales + threadIdx.x % 4 * 8;
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) {
        const float2 scale = load_floats(first + 32 * n);
        s[4 * n] *= scale.x, s[4 * n + 1] *= scale.y, s[4 * n + 2] *= scale.x, s[4 * n + 3] *= scale.y;
    }
}

// Rows of P to MAX_P at most; `scale` undoes it.
DEVICE void scale_rows(float (&s)[S_REGS], float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = MIN_P_SCALE;
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) top = fmaxf(top, fabsf(s[i / 2 * 4 + 2 * half + i % 2]));
        top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        const float factor = MAX_P * reciprocal(top);
        scale[half] = top * (1 / MAX_P);
#pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) s[i / 2 * 4 + 2 * half + i % 2] *= factor;
    }
}

// P as the A operand of P V: the keys of a word are in the order of fp8_transpose.cuh.
DEVICE void pack_p_fp8(unsigned (&codes)[CODE_REGS], const float (&s)[S_REGS]) {
#pragma unroll
    for (int i = 0; i < CODE_REGS; ++i) {
        const float* x = s + 8 * (i / 2) + i % 2 * 2;  // 16 keys of row half i % 2
        codes[i] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
}

// PV of columns from `first` on, of one tile.
DEVICE void issue_pv_fp8(float (&pv)[PV_REGS], const unsigned (&codes)[CODE_REGS], unsigned vt, int first) {
    const unsigned long long v = descriptor(vt + first * CHUNK_ROW);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK_K / 32; ++step)
        wgmma_rs(pv, codes, 4 * step, v + along_rows(step, COLUMNS), step > 0 ? 1 : 0);
    wgmma_commit();
}

DEVICE void consumer_fp8(const Params& p, unsigned base, int wg) {
    const Pipeline<Q_BUFFERS> pipe_q = q_pipe(base);
    const Pipeline<STAGES> pipe_k = k_pipe(base), pipe_vt = vt_pipe(base);
    const float scale_log2 = uniform_float(softmax_scale_log2(p));
    const unsigned key_scales = base + AT_KEY_SCALES + SCALE_BYTES * uniform(threadIdx.x / 32 - 4);
    float o[O_REGS], pv[PV_REGS], s[S_REGS], m[2], l[2], row_scale[2], v_scale[2];
    unsigned codes[CODE_REGS];
    WorkTile at;
    int number = -1;  // of the work tile whose O is in registers

#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        pipe_k.consumer_wait(n);
        const int tile_desc = uniform(load_word(tile_desc_slot(base, n)));
        if (tile_desc & FIRST_TILE) {  // also END
            if (number >= 0) epilogue(p, read_work_tile(p, base, number, wg), base, number, m, l, o, wg);
            if (tile_desc == END) break;
            pipe_q.consumer_wait(++number);
            at = read_work_tile(p, base, number, wg);
            const float k_scale = SCALES_PER_TOKEN ? 1.0f : scale_of(p.k_scale, at.b, at.h / GQA_GROUP, 0);
            v_scale[0] = v_scale[1] = SCALES_PER_TOKEN ? 1.0f : scale_of(p.v_scale, at.b, at.h / GQA_GROUP, 0);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const auto [h, row] = clamped_row(p, at.b, at.h, at.row0 + row_of_lane(half));
                row_scale[half] = scale_of(p.q_scale, at.b, h, row) * k_scale;
                // The epilogue sees NaN.
                l[half] = row_scale[half] >= 0 && row_scale[half] <= MAX_SCALE && fabsf(v_scale[half]) <= MAX_SCALE
                    ? 0.0f : fk_special(0);
                m[half] = HIDDEN, row_scale[half] = fmaxf(row_scale[half], MIN_SCALE);
            }
#pragma unroll
            for (int i = 0; i < O_REGS; ++i) o[i] = 0;
        }
        const int state = tile_desc >> 2 * wg & 3, k0 = (tile_desc >> 8) * BLOCK_K;
        if (state == EMPTY) {
            pipe_k.consumer_release(n);
            pipe_vt.consumer_wait(n);
            pipe_vt.consumer_release(n);
            continue;
        }
        issue_qk_fp8(s, descriptor(q_rows(base, number % Q_BUFFERS, wg)), descriptor(base + at_k(n % STAGES)));
        KeyScales of_keys, of_values;
        if (SCALES_PER_TOKEN) {
            of_keys.load(p.k_scale, at, k0, (int)seq_info(p, at.b).n_k);
            of_values.load(p.v_scale, at, k0, (int)seq_info(p, at.b).n_k);
        }
        wgmma_wait<0>();
        fence_operand(s);
        pipe_k.consumer_release(n);

        if (SCALES_PER_TOKEN) of_keys.store(key_scales), scale_columns(s, key_scales);
        float scale[2] = {row_scale[0] * scale_log2, row_scale[1] * scale_log2};  // from S to base 2
        if (HAS_SCORE) {
#pragma unroll
            for (int i = 0; i < S_REGS; ++i) s[i] *= row_scale[i / 2 % 2];
            scale[0] = scale[1] = LOG2E;
        }
        modify_tile(p, at, state == FULL, s, k0, (float)p.softmax_scale);
        float rescale[2];
        online_softmax_below(s, m, l, rescale, scale, MAX_P_LOG2);

        if (SCALES_PER_TOKEN) of_values.store(key_scales), scale_columns(s, key_scales), scale_rows(s, v_scale);
        pack_p_fp8(codes, s);
        pipe_vt.consumer_wait(n);
#pragma unroll
        for (int first = 0; first < COLUMNS; first += PV_COLUMNS) {
            issue_pv_fp8(pv, codes, at_vt(base, n), first);
            if (first == 0 && __any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
                for (int i = 0; i < O_REGS; ++i) o[i] *= rescale[i / 2 % 2];
            }
            wgmma_wait<0>();
            fence_operand(pv), fence_operand(codes);
#pragma unroll
            for (int i = 0; i < PV_REGS; ++i) o[first / 2 + i] = fmaf(pv[i], v_scale[i / 2 % 2], o[first / 2 + i]);
        }
        pipe_vt.consumer_release(n);
    }
}
