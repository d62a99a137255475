// The consumers of latent attention: two warp groups share 64 rows of a unit, and each has half of the columns of O.
//
//     S, then P     [64][64]             registers of one warp group, which has every other K tile of its own
//     P             [64][64]             shared memory, for the other warp group
//     O             [64][HALF_COLUMNS]   registers of each warp group, not normalised
//     m             [64]                 row reference in base 2: registers of both, through shared memory
//     l             [64]                 row sums of a warp group's own tiles: registers
//
// The warp groups alternate, a seesaw: one computes S of a tile and takes exponentials while the other multiplies. For
// each pair of tiles, the first of which belongs to warp group 0:
//
//     warp group 0                                  warp group 1
//     S = Q K(n)^T                                  S = Q K(n+1)^T
//     softmax, P(n) to shared memory                wait for P(n)
//     O += P(n) V(n), left half                     O += P(n) V(n), right half; softmax beside it
//     wait for P(n+1)                               P(n+1) to shared memory
//     O += P(n+1) V(n+1), left half                 O += P(n+1) V(n+1), right half
//
// There is one P in shared memory. Warp group 1 writes P(n+1) when its product with P(n) is complete, and warp group 0
// P(n+2) when its product with P(n+1) is. The same holds for m and the factors of rescaling.
#pragma once
#include "sm90/mla_epilogue.cuh"

// The row reference follows the row maximum only where P would exceed 2^MAX_P_LOG2: O is hardly ever rescaled.
constexpr float MAX_P_LOG2 = 8;

// Where a warp has a great row reference: S of its rows times `factor`, which becomes 1.
DEVICE void scale_below_great(float (&s)[S_REGS], int half, float row_ref, float& factor) {
    if (!__any_sync(~0u, is_great(row_ref))) return;
    UNROLL(i, S_REGS / 2) s[i / 2 * 4 + 2 * half + i % 2] *= factor;
    factor = 1;
}

template <int WG>
struct MlaConsumer {
    const Params& params;
    unsigned base;
    float scale_log2, scale;
    float o[HALF_REGS], s[S_REGS], m[2], l[2];
    unsigned p[P_REGS];
    Unit unit;
    int n_k;
    unsigned n = 0;  // K tiles so far

    __device__ __forceinline__ MlaConsumer(const Params& p, unsigned base)
        : params(p), base(base), scale_log2(uniform_float(softmax_scale_log2(p))), scale((float)p.softmax_scale) {}

    // Where a value of a lane's row lies, in an array with one for each row.
    __device__ __forceinline__ unsigned row_slot(int at, int half) const { return base + at + 4 * row_of_lane(half); }

    // A warp's part of stage n, in each CTA that has it.
    __device__ __forceinline__ void release(int part, unsigned n) const {
        const Pipeline<STAGES> pipe = k_part(base, part);
        pipe.consumer_release(n);
        if constexpr (CLUSTER_SIZE > 1) dsmem_arrive(mapa(pipe.empty_barrier(n), peer_rank()), threadIdx.x % 32);
    }

    // --- products ----------------------------------------------------------------------------------------------------

    template <int PART>
    __device__ __forceinline__ void issue_qk_part(unsigned n, unsigned long long q, unsigned long long k) {
        constexpr int FROM = 4 * first_chunk(PART), ALL = padded(HEAD_DIM) / 16,
                      END_OF_PART = FROM + 4 * chunks_of_part(PART), TO = END_OF_PART < ALL ? END_OF_PART : ALL;
        if constexpr (chunks_of_part(PART) > 0) {
            k_part(base, PART).consumer_wait(n);
            wgmma_fence();  // ptxas wants one behind every wait that may branch
#pragma unroll
            for (int step = FROM; step < TO; ++step) {
                if (PART == OLDEST_PART && step == FROM)
                    wgmma_zero_init<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K));
                else product<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
            }
        }
    }

    // S = Q K(n)^T, part by part as they arrive. The base is read anew: descriptors of all steps, kept from tile to
    // tile, would take more registers than there are.
    __device__ __forceinline__ void issue_qk(unsigned n) {
        const unsigned base = uniform(this->base);
        const unsigned long long q = descriptor(base + AT_Q), k = descriptor(base + at_k(n % STAGES));
        issue_qk_part<REST>(n, q, k);
        issue_qk_part<FIRST>(n, q, k);
        issue_qk_part<SECOND>(n, q, k);
        wgmma_commit();
    }

    // O += P V(n), this warp group's columns; P of registers, or the other warp group's.
    template <bool OWN>
    __device__ __forceinline__ void issue_pv(unsigned n, int k0) {
        const unsigned stage = base + at_k(n % STAGES) + first_chunk(WG) * CHUNK_BYTES;
        const unsigned long long v = descriptor(stage, CHUNK_BYTES), p_tile = descriptor(base + AT_P);
        k_part(base, WG).consumer_wait(n);
        // 0 * NaN: V past the length must not matter. S of these keys is masked, whatever Q K^T reads meanwhile.
        if (HAS_LENGTHS && n_k - k0 < BLOCK_K) {
            clear_rows<64 * chunks_of_part(WG), BLOCK_K>(stage, n_k - k0, CHUNK_BYTES);
            named_barrier_sync(OWN_WARPGROUP + WG, 128);
        }
        wgmma_fence();
        UNROLL(step, BLOCK_K / 16) {
            if constexpr (OWN) wgmma_rs<1>(o, p, 4 * step, v + along_columns(step), 1);
            else product<0, 1>(o, p_tile + along_rows(step, 64), v + along_columns(step), 1);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void finish_pv(unsigned n) {
        wgmma_wait<0>();
        fence_operand(o), fence_operand(p);
        release(WG, n);
    }

    // --- softmax -----------------------------------------------------------------------------------------------------

    // O and l to another row reference.
    __device__ __forceinline__ void rescale_rows(const float (&rescale)[2]) {
        if (!__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) return;
        l[0] *= rescale[0], l[1] *= rescale[1];
        UNROLL(i, HALF_REGS) o[i] *= rescale[i / 2 % 2];
    }

    // S to P, in p; the factors on O and l.
    __device__ __forceinline__ void online_softmax(float (&rescale)[2], float (&sum)[2]) {
        UNROLL(half, 2) {
            float top = HIDDEN, factor = scale_log2;
            UNROLL(i, S_REGS / 2) top = fmaxf(top, s[i / 2 * 4 + 2 * half + i % 2]);
            top = max_across_lanes(top) * factor;
            const float ref = top > m[half] + MAX_P_LOG2 ? top : m[half], shift = ref == HIDDEN ? 0.0f : ref;
            rescale[half] = ref == m[half] ? 1.0f : exp2_fast(m[half] - shift);
            m[half] = ref;
            scale_below_great(s, half, shift, factor);
            sum[half] = exp2_row(s, half, [=](float x) { return fmaf(x, factor, -shift); });
        }
        UNROLL(i, P_REGS) p[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    // P, m and the factors to the other warp group.
    __device__ __forceinline__ void publish(const float (&rescale)[2]) {
        const int lane = opaque(threadIdx.x % 32), row = opaque(threadIdx.x % 128 / 32) * 16;
        named_barrier_sync(OWN_WARPGROUP + WG, 128);  // no warp of this warp group reads the P before this one
#pragma unroll
        for (int i = 0; i < P_REGS; i += 4)
            stmatrix_x4<false>(base + AT_P + swizzled(row + lane % 16, i / 2 + lane / 16), p[i], p[i + 1], p[i + 2],
                               p[i + 3]);
        UNROLL(half, 2)
            if (threadIdx.x % 4 == 0) {
                store_float(row_slot(AT_ROW_REF, half), m[half]);
                store_float(row_slot(AT_RESCALE, half), rescale[half]);
            }
        fence_proxy_async();
        named_barrier_arrive(P_READY + WG, CONSUMERS);
    }

    // Waits for the other warp group's P, and brings O and l to its row reference.
    __device__ __forceinline__ void take_p() {
        named_barrier_sync(P_READY + 1 - WG, CONSUMERS);
        float rescale[2];
        UNROLL(half, 2) {
            m[half] = __int_as_float(load_word(row_slot(AT_ROW_REF, half)));
            rescale[half] = __int_as_float(load_word(row_slot(AT_RESCALE, half)));
        }
        rescale_rows(rescale);
    }

    // --- blocks ------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ int tile_desc(unsigned n) const { return uniform(load_word(mla_desc_slot(base, n))); }
    __device__ __forceinline__ static int first_key(int desc) { return (desc >> 8) * BLOCK_K; }

    // S of this warp group's tile to P, beside whatever products with V are in flight.
    __device__ __forceinline__ void softmax(unsigned n, int desc, float (&rescale)[2], float (&sum)[2]) {
        fence_operand(s);
        modify_tile(params, unit.at, (desc & 3) == FULL, s, first_key(desc), scale);
        online_softmax(rescale, sum);
        // The dependence keeps exponentials from being scheduled behind the next wait.
        if constexpr (REST_CHUNKS > 0) release(REST, n + depends_on(sum[0]) + depends_on(sum[1]));
    }

    // O += P(n) V(n), of this warp group's P.
    __device__ __forceinline__ void multiply_own(unsigned n, int desc, const float (&rescale)[2],
                                                 const float (&sum)[2]) {
        publish(rescale);
        rescale_rows(rescale);
        l[0] += sum[0], l[1] += sum[1];
        issue_pv<true>(n, first_key(desc));
        finish_pv(n);
    }

    // Warp group 0: a tile of its own. The tile's descriptor, like those of the blocks below.
    __device__ __forceinline__ int own_block(unsigned n) {
        float rescale[2], sum[2];
        issue_qk(n);
        const int desc = tile_desc(n);
        wgmma_wait<0>();
        softmax(n, desc, rescale, sum);
        multiply_own(n, desc, rescale, sum);
        return desc;
    }

    // A tile of the other warp group, alone.
    __device__ __forceinline__ int other_block(unsigned n) {
        k_part(base, WG).consumer_wait(n);
        const int desc = tile_desc(n);
        take_p();
        issue_pv<false>(n, first_key(desc));
        finish_pv(n);
        return desc;
    }

    // Warp group 1: tile n of the other warp group, and tile n + 1 of its own.
    __device__ __forceinline__ int pair_block(unsigned n, int other_desc) {
        float rescale[2], sum[2];
        issue_qk(n + 1);
        const int desc = tile_desc(n + 1);
        take_p();
        issue_pv<false>(n, first_key(other_desc));
        wgmma_wait<1>();  // S is complete, PV may be in flight
        softmax(n + 1, desc, rescale, sum);
        finish_pv(n);
        multiply_own(n + 1, desc, rescale, sum);
        return desc;
    }

    // A part is waited for by the warp groups that release it, and by the owner of the tile, on whose P its release
    // depends: any other might miss a phase of its barrier.
    __device__ __forceinline__ void mma_loop() {
#pragma unroll 1
        for (bool more = true; more;) {
            if constexpr (WG == 0) {
                more = !(own_block(n++) & LAST_TILE);
                if (more) more = !(other_block(n++) & LAST_TILE);
            } else {
                k_part(base, WG).consumer_wait(n);
                const int desc = tile_desc(n);
                if (desc & LAST_TILE) {
                    other_block(n++), more = false;
                } else {
                    more = !(pair_block(n, desc) & LAST_TILE);
                    n += 2;
                }
            }
        }
    }

    // --- units -------------------------------------------------------------------------------------------------------

    // Waits for a unit, and begins to load its rows of Q. END: none is left.
    __device__ __forceinline__ Unit begin_unit(unsigned number) {
        const Pipeline<UNIT_SLOTS> pipe = unit_pipe(base);
        const unsigned slot = unit_slot(base, number);
        pipe.consumer_wait(number);
        const int b = uniform(load_word(slot)), h = uniform(load_word(slot + 4)), row0 = uniform(load_word(slot + 8)),
                  split = uniform(load_word(slot + 12));
        pipe.consumer_release(number);
        if (b == END) return {{END, 0, 0, 0}, 0};
        load_q(params, base + AT_Q, b, h, row0);
        return {{b, h, row0, (start)seq_info(params, b).q_position}, split};
    }

    __device__ __forceinline__ void run() {
        unit = begin_unit(0);
#pragma unroll 1
        for (unsigned number = 1; unit.at.b != END; ++number) {
            cp_async_wait_all();
            fence_proxy_async();
            named_barrier_sync(BOTH_WARPGROUPS, CONSUMERS);  // Q is there
            n_k = (int)seq_info(params, unit.at.b).n_k;
            m[0] = m[1] = HIDDEN, l[0] = l[1] = 0;
            UNROLL(i, HALF_REGS) o[i] = 0;
            mma_loop();
            const Unit done = unit;
            UNROLL(half, 2) {
                l[half] = sum_across_lanes(l[half]);
                if (threadIdx.x % 4 == 0) store_float(row_slot(AT_ROW_SUMS + WG * 256, half), l[half]);
            }
            named_barrier_sync(BOTH_WARPGROUPS, CONSUMERS);  // both sums are there, and no warp reads Q any more
            unit = begin_unit(number);
            UNROLL(half, 2)
                l[half] = __int_as_float(load_word(row_slot(AT_ROW_SUMS, half))) +
                          __int_as_float(load_word(row_slot(AT_ROW_SUMS + 256, half)));
            mla_epilogue<WG>(params, done, m, l, o);
        }
    }
};
