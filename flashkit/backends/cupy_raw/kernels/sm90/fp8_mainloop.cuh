// The consumer of the FP8 forward pass: 64 rows of a work tile for each warp group.
//
//     Q         [64][HEAD_DIM]           Q_IN_REGISTERS: registers
//     S         [64][BLOCK_K]            registers: S = Q K^T of codes, then weights
//     P         [64][BLOCK_K]            registers, codes; IS_NARROW: two, in turns
//     O         [64][HEAD_DIM_V]         registers, sums of the tensor cores; SUMS_BY_ONES: and row sums
//     promoted  [64][HEAD_DIM_V]         shared memory, or global memory that stays in L2: sums of CUDA cores. Of wide
//                                        heads in float16
//
// S(n) is issued together with P(n-1) V(n-1), and the softmax of tile n overlaps with the second product. Warp groups
// do not ping-pong. Tiles that hide nothing come in pairs, the codes of one in the registers that the other leaves
// free.
//
// Rows whose scales are not positive numbers, or too far from 1 for products of scales, and rows that a masked NaN in V
// has spoilt, are computed again from global memory (rows_nonfinite in epilogue.cuh).
#pragma once
#include "sm90/fp8_sums.cuh"

// What a step adds to a descriptor stays within its low word.
DEVICE unsigned long long advance(unsigned long long descriptor, int step) {
    return descriptor & 0xffffffff00000000ull | ((unsigned)descriptor + step);
}

struct ConsumerFp8 : SumsFp8 {
    unsigned tiles_k = 0, tiles_v = 0;  // released so far. V of a tile whose codes are pending is one behind
    unsigned p[CODE_REGS], other_p[CODE_REGS], q[Q_REGS];
    int next_desc;        // tile descriptor, read ahead
    unsigned loads = 0;   // of key scales
    bool begins = false;  // the next tile is the warp group's first one of its work tile
    bool looks = true;    // the next tile looks for the maximum

    using SumsFp8::SumsFp8;

    // --- pipelines ---------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void wait_k() const { k_pipe(base).consumer_wait(tiles_k); }
    __device__ __forceinline__ void read_ahead() {  // a tile's descriptor comes with its K
        wait_k();
        next_desc = load_word(tile_desc_slot(base, tiles_k));
    }
    __device__ __forceinline__ void wait_v() const { vt_pipe(base).consumer_wait(tiles_v); }
    __device__ __forceinline__ void release_k() { k_pipe(base).consumer_release(tiles_k++); }
    __device__ __forceinline__ void release_v() { vt_pipe(base).consumer_release(tiles_v++); }
    __device__ __forceinline__ void pass_v() {  // of a tile that is EMPTY for this warp group, but not for another one
        wait_v();
        release_v();
    }
    // RELEASES_Q_EARLY, when S of a tile is there.
    __device__ __forceinline__ void release_q_after(int tile_desc) const {
        const int lane = threadIdx.x % 32 + (tile_desc & ENDS_WORK_TILE ? 0 : 32);  // none is 0 then
        if (RELEASES_Q_EARLY) mbarrier_arrive_once(q_pipe(base).empty_barrier(number), lane);
    }
    // Whether codes wait for their V.
    __device__ __forceinline__ bool is_pending() const { return tiles_v != tiles_k; }
    __device__ __forceinline__ void release_q() const { mbarrier_arrive_once(q_pipe(base).empty_barrier(number)); }

    // --- products ----------------------------------------------------------------------------------------------------

    // S = Q K^T. The shuffle tells ptxas that the stage is uniform; without it 16 instructions a tile move descriptors.
    __device__ __forceinline__ void issue_qk() {
        const unsigned long long k = descriptor(base + at_k(uniform(tiles_k % STAGES)));
        const unsigned long long from = descriptor(q_rows(base, number % Q_BUFFERS, wg));
        wgmma_fence();
        UNROLL(step, up(HEAD_DIM, 32) / 32) {  // 32 columns: as many bytes as 16 of 16 bits
            const unsigned long long to = advance(k, along_rows(step, BLOCK_K));
            if constexpr (Q_IN_REGISTERS) wgmma_rs(s, q, 4 * step, to, step > 0 ? 1 : 0);
            else if (step == 0) wgmma_zero_init(s, from, to);
            else product(s, advance(from, along_rows(step, 64)), to, 1);
        }
        wgmma_commit();
    }
    // O += P V
    __device__ __forceinline__ void issue_pv(unsigned (&codes)[CODE_REGS]) {
        const unsigned long long v = descriptor(at_vt(base, uniform(tiles_v % STAGES)));
        wait_v();
        wgmma_fence();
        UNROLL(step, BLOCK_K / 32)
            wgmma_rs(o, codes, 4 * step, advance(v, along_rows(step, VT_LINES)), 1);
        wgmma_commit();
    }
    template <int PENDING>
    __device__ __forceinline__ void wait_s() {
        wgmma_wait<PENDING>();
        fence_operand(s);
        release_k();
        release_q_after(next_desc);
    }
    __device__ __forceinline__ void wait_pv(unsigned (&codes)[CODE_REGS]) {
        wgmma_wait<0>();
        fence_operand(o), fence_operand(codes), fence_operand(s);
        release_v();
    }

    // --- work tiles --------------------------------------------------------------------------------------------------

    // Waits for Q, and takes it and its scales.
    __device__ __forceinline__ void begin_work_tile() {
        q_pipe(base).consumer_wait(number);
        const WorkTile at = read_work_tile(params, base, number, wg);
        const int head = at.h / GQA_GROUP;
        k_scale = SCALES_OF_HEADS ? Elements::key_scale(params, params.k_scale, at.b, head, 0) : 1.0f;
        v_scale = SCALES_OF_HEADS ? Elements::key_scale(params, params.v_scale, at.b, head, 0) : 1.0f;
        UNROLL(half, 2) {
            const auto [h, row] = clamped_row(params, at.b, at.h, at.row0 + row_of_lane(half));
            row_scale[half] = Elements::query_scale(params, at.b, h, row);
            if (IS_NARROW) combine_scales(half);
        }
        if constexpr (Q_IN_REGISTERS) {
            const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
            UNROLL(step, Q_REGS / 4) {
                unsigned r[4];
                ldmatrix_x4(r, q_rows(base, number % Q_BUFFERS, wg) + swizzled(row, 2 * step + lane / 16));
                UNROLL(i, 4) q[4 * step + i] = r[i];
            }
            __syncwarp();
            release_q();
        }
        begins = false;
    }
    __device__ __forceinline__ void combine_scales(int half) {
        row_scale[half] = valid_scale(row_scale[half] * k_scale);
        if (!HAS_SCORE) row_scale[half] *= softmax_scale_log2(params);
    }
    // Wide heads: once the scales have arrived from global memory, and not before products are issued.
    __device__ __forceinline__ void await_scales() {
        fence_operand(row_scale);
        combine_scales(0), combine_scales(1);
    }
    // The epilogue of the work tile before; its state, as O is still its.
    __device__ __forceinline__ void end_work_tile(const float (&m)[2], const float (&l)[2], const float (&exact_l)[2],
                                                  float v_scale, bool promoted) {
        if (promoted) add_promoted(m);
        float sum[2] = {l[0], l[1]};
#pragma unroll
        for (int half = 0; SUMS_BY_ONES && half < 2; ++half)
            sum[half] = fmaf(sum_by_ones(half), pending_inverse_v, sum[half]);
        epilogue_fp8(params, read_work_tile(params, base, number - 1, wg), m, sum, exact_l, v_scale, o);
    }

    // --- steps -------------------------------------------------------------------------------------------------------

    // A tile that hides nothing, of a work tile whose rows have a maximum. codes: those that are pending.
    __device__ __forceinline__ void optimistic_step(unsigned (&codes)[CODE_REGS], unsigned (&next)[CODE_REGS],
                                                    unsigned slot, int tile) {
        load_tile_scales(slot);
        issue_qk();
        issue_pv(codes);
        wait_s<1>();
        const bool grows = optimistic_softmax(next);
        wait_pv(codes);
        read_ahead();
        end_product(grows, tile > 0);
        pending_inverse_v = inverse_v;
    }

    // CHAINED: a tile that hides nothing, behind one whose codes are pending, and others after it. Only those after
    // them wait for their descriptor.
    __device__ __forceinline__ void full_steps() {
        int tile_desc;
        do {
            const unsigned slot = tile_desc_slot(base, tiles_k);
            load_tile_scales(slot);
            issue_qk();
            issue_pv(p);
            next_desc = tile_desc = uniform(load_word(slot));
            wait_s<1>();
            const bool grows = exact_softmax<false>(0, false);
            wait_pv(p);
            pack_codes(p);
            wait_k();
            end_product(grows, !(tile_desc & ENDS_WORK_TILE));
            pending_inverse_v = inverse_v;
        } while (tile_desc & PAIR);
        read_ahead();
    }

    // Any tile. FIRST: of its work tile, while codes of the one before are PENDING.
    template <bool FIRST, bool PENDING>
    __device__ __forceinline__ void step(unsigned slot, int tile, bool full) {
        const float m_before[2] = {m[0], m[1]}, l_before[2] = {l[0], l[1]}, exact_before[2] = {exact_l[0], exact_l[1]};
        const float v_before = v_scale;
        const bool promoted_before = promoted;
        const bool is_first = FIRST || (!PENDING && begins);
        if (FIRST) begin_work_tile();
        if (!PENDING && begins) {
            if (number > 0) end_work_tile(m, l, exact_l, v_scale, promoted);
            begin_work_tile();
            clear_sums();
            m[0] = m[1] = NO_MAXIMUM;
            l[0] = l[1] = exact_l[0] = exact_l[1] = 0, promoted = false;
        }
        if (FIRST) l[0] = l[1] = exact_l[0] = exact_l[1] = 0, promoted = false;
        if (IS_NARROW) load_tile_scales(slot);
        const unsigned key_scales = base + AT_KEY_SCALES + (++loads % 2 * MMA_WARPGROUPS + wg) * 3 * SCALE_BYTES;
        issue_qk();
        if (PENDING) issue_pv(p);
        if (!IS_NARROW) {
            if (is_first) await_scales();
            load_tile_scales(slot);
        }
        if (SCALES_OF_TOKENS)
            load_key_scales(params, read_work_tile(params, base, number, wg), tile * BLOCK_K, key_scales, wg);
        wait_s<PENDING>();
        modify(full, tile * BLOCK_K, key_scales);
        const bool grows = exact_softmax<FIRST>(key_scales, is_first && (full || !HAS_MASK));
        if (PENDING) {
            wait_pv(p);
            if (!IS_NARROW) pack_codes(p);  // no branch in between: ptxas packs before it waits
            while (tiles_v + 1 != tiles_k) pass_v();
        }
        read_ahead();  // its latency is hidden behind packing P
        if (FIRST) {
            if (IS_NARROW) pack_codes(p);
            end_work_tile(m_before, l_before, exact_before, v_before, promoted_before);
            clear_sums();
        } else if (PENDING) {
            if (IS_NARROW) pack_codes(p);
            end_product(grows, tile > 0);
        } else {
            if (grows) {
                rescale_o();
                if (SUMS_BY_ONES) l[0] *= rescale[0], l[1] *= rescale[1];
            }
            pack_codes(p);
        }
        pending_inverse_v = inverse_v;
        looks = HAS_MASK && !full;
    }

    // P V by itself: where no S goes with it.
    __device__ __forceinline__ void drain() {
        issue_pv(p);
        wait_pv(p);
        end_product(false, false);
        while (is_pending()) pass_v();
    }

    // A tile that is EMPTY for this warp group, but not for another one. Its V is released behind that of the pending
    // codes; only one, as the producer would wait for further ones.
    __device__ __forceinline__ void skip() {
        if (tiles_k - tiles_v > 1) drain();
        const bool pending = is_pending();
        release_k();
        release_q_after(next_desc);
        if (!pending) pass_v();
        looks = true;
        read_ahead();
    }

    __device__ __forceinline__ void run() {
        read_ahead();
#pragma unroll 1
        while (true) {
            const unsigned slot = tile_desc_slot(base, tiles_k);
            const int tile_desc = uniform(next_desc), tile = tile_desc >> TILE_BIT, state = tile_desc >> 2 * wg & 3;
            if (IN_PAIRS && (tile_desc & PAIR) && state == FULL && !looks) {
                optimistic_step(p, other_p, slot, tile);
                optimistic_step(other_p, p, tile_desc_slot(base, tiles_k), tile - 1);
                continue;
            }
            if (tile_desc & FIRST_TILE) {  // also END
                if (!Q_IN_REGISTERS && !RELEASES_Q_EARLY && number >= 0) release_q();
                ++number, begins = looks = true;
            }
            if (tile_desc == END) break;
            if (CHAINED && state == FULL && !begins && tiles_k - tiles_v == 1) full_steps();
            else if (state == EMPTY) skip();
            else if (!is_pending()) step<false, false>(slot, tile, state == FULL);
            else if (begins) step<true, true>(slot, tile, state == FULL);
            else step<false, true>(slot, tile, state == FULL);
        }
        if (is_pending()) drain();
        if (number > 0) end_work_tile(m, l, exact_l, v_scale, promoted);
    }
};
