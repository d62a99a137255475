// Forward pass with tangents for Hopper, for 16-bit elements: six matrix products in one pass. With dS the tangent of
// the modified scores, and sums over the keys that a row sees,
//
//     dlse = rowsum(P dS)     dO = P dS V + P dV - dlse O
//
// Grid, work tiles, producer and store warp are those of the forward pass (forward.cu); tangents travel with what they
// belong to (layout.cuh). TANGENT_Q, TANGENT_K, TANGENT_V: which tangents are not 0.
//
//     S, dS       [64][BLOCK_K]       registers of a warp group; then P, P dS, which are rounded to 16 bits
//     O, dO       [64][HEAD_DIM_V]    registers, not yet divided by the row sum
//     m, l, total [64]                registers: row maximum in base 2, rowsum(P), rowsum(P dS) without softmax scale
//
// A warp group has registers for the scores of one tile, so it multiplies and takes exponentials in turn; the products
// of the other warp group overlap with its softmax.
#include "sm90/layout.cuh"
#include "sm90/producer.cuh"
#include "sm90/epilogue.cuh"

constexpr bool SCORES_MOVE = TANGENT_Q || TANGENT_K;

struct Consumer {
    const Params& params;
    unsigned base;
    int wg;
    Pipeline<Q_BUFFERS> pipe_q;
    Pipeline<STAGES> pipe_k, pipe_v;
    float scale_log2, scale;
    float o[O_REGS], d_o[O_REGS], s[S_REGS], ds[S_REGS], m[2], l[2], total[2];
    unsigned p[P_REGS], p_ds[P_REGS];
    WorkTile work_tile;
    int number = -1;  // of the work tile, among this CTA's
    int next_desc;    // tile descriptor, read ahead

    __device__ __forceinline__ Consumer(const Params& p, unsigned base, int wg)
        : params(p), base(base), wg(wg), pipe_q(q_pipe(base)), pipe_k(k_pipe(base)), pipe_v(v_pipe(base)),
          scale_log2(uniform_float(softmax_scale_log2(p))), scale(uniform_float((float)p.softmax_scale)) {}

    // --- products ----------------------------------------------------------------------------------------------------

    // x = a b^T, plus x unless `starts`: rows of queries, rows of keys.
    __device__ __forceinline__ void issue_scores(float (&x)[S_REGS], unsigned long long a, unsigned long long b,
                                                 bool starts) const {
        UNROLL(step, padded(HEAD_DIM) / 16) {
            const unsigned long long a_step = a + along_rows(step, 64), b_step = b + along_rows(step, ROWS_K);
            if (starts && step == 0) wgmma_zero_init<0, 0>(x, a_step, b_step);
            else product<0, 0>(x, a_step, b_step, 1);
        }
    }
    // S = Q K(n)^T, dS = dQ K(n)^T + Q dK(n)^T
    __device__ __forceinline__ void issue_qk(unsigned n) {
        const unsigned rows = q_rows(base, number % Q_BUFFERS, wg), keys = base + at_k(n % STAGES);
        const unsigned long long q = descriptor(rows), k = descriptor(keys);
        wgmma_fence();
        issue_scores(s, q, k, true);
        if (TANGENT_Q) issue_scores(ds, descriptor(rows + TANGENT_OF_Q), k, true);
        if (TANGENT_K) issue_scores(ds, q, descriptor(keys + CHUNK_BYTES), !TANGENT_Q);
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_values(float (&x)[O_REGS], const unsigned (&weights)[P_REGS],
                                                 unsigned address) const {
        const unsigned long long v = descriptor(address, CHUNK_BYTES);
        UNROLL(step, BLOCK_K / 16) wgmma_rs<1>(x, weights, 4 * step, v + along_columns(step), 1);
    }
    // O += P V(n), dO += (P dS) V(n) + P dV(n). V of keys past the length must not matter: 0 * NaN.
    __device__ __forceinline__ void issue_pv(unsigned n, int valid_keys) {
        const unsigned values = base + at_v(n % STAGES), tangents = values + CHUNKS_V * CHUNK_BYTES;
        pipe_v.consumer_wait(n);
        if (HAS_LENGTHS && valid_keys < BLOCK_K) {
            clear_rows<HEAD_DIM_V, BLOCK_K>(values, valid_keys, CHUNK_BYTES);
            if (TANGENT_V) clear_rows<HEAD_DIM_V, BLOCK_K>(tangents, valid_keys, CHUNK_BYTES);
            named_barrier_sync(WARPGROUP_BARRIER + wg, 128);
        }
        wgmma_fence();
        issue_values(o, p, values);
        if (SCORES_MOVE) issue_values(d_o, p_ds, values);
        if (TANGENT_V) issue_values(d_o, p, tangents);
        wgmma_commit();
    }

    // --- work tiles --------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void begin_work_tile() {
        pipe_q.consumer_wait(++number);
        work_tile = read_work_tile(params, base, number, wg);
        m[0] = m[1] = HIDDEN, l[0] = l[1] = total[0] = total[1] = 0;
        UNROLL(i, O_REGS) o[i] = d_o[i] = 0;
    }

    // O, dO, the log-sum-exp and its tangent.
    __device__ __forceinline__ void epilogue() {
        const unsigned staged = q_rows(base, number % Q_BUFFERS, wg);
        const int n_q = seq_of(params, work_tile).n_q();
        bool spoilt = false;  // the tensor cores may have made NaN of a masked pair
        float lse[2], dlse[2];
        UNROLL(half, 2) {
            const auto add = [](float x, float y) { return x + y; };
            const int index = work_tile.row0 + row_of_lane(half);
            const bool exists = index < n_q * PACK_GQA;
            float top = m[half], sum = across_lanes(l[half], add), factor = 1, zero = 0;  // NaN: one is not finite
            if (HAS_SINKS && exists) add_sink(params, work_tile.h + index % PACK_GQA, top, sum, factor);
            const bool empty = sum == 0;  // no visible key
            factor = empty ? 0.0f : factor / sum;
            lse[half] = empty ? HIDDEN : fmaf(top, LN2, logf(sum));
            dlse[half] = across_lanes(total[half], add) * scale * factor;
            UNROLL(n, COLUMNS / 8)
                UNROLL(c, 2) {
                    float &x = o[4 * n + 2 * half + c], &dx = d_o[4 * n + 2 * half + c];
                    x *= factor;
                    dx = fmaf(dx, factor, -dlse[half] * x);
                    zero = fmaf(x, 0.0f, fmaf(dx, 0.0f, zero));
                }
            spoilt |= zero != 0 && is_finite(sum) && exists;
        }
        named_barrier_sync(WARPGROUP_BARRIER + wg, 128);  // no warp of the warp group reads Q any more
        stage_output(o, staged), stage_output(d_o, staged + TANGENT_OF_Q);
        fence_proxy_async();
        __syncwarp();
        mbarrier_arrive_once(out_ready(base, number % Q_BUFFERS, wg));
        if (MAY_HIDE && spoilt) *params.fallback = 1;
        UNROLL(half, 2) {
            const int index = work_tile.row0 + row_of_lane(half), h = work_tile.h + index % PACK_GQA;
            if (index >= n_q * PACK_GQA || threadIdx.x % 4 != 0) continue;
            *q_row<float>(params, params.lse, work_tile.b, h, index / PACK_GQA) = lse[half];
            *q_row<float>(params, params.dlse, work_tile.b, h, index / PACK_GQA) = dlse[half];
        }
    }

    // --- softmax -----------------------------------------------------------------------------------------------------

    // dS times the slope of the score modification at S.
    __device__ __forceinline__ void apply_slopes(int k0) {
        const SeqSlot seq = seq_of(params, work_tile);
        UNROLL(half, 2) {
            const auto [h, row] = clamped_row(seq.n_q(), work_tile.h, work_tile.row0 + row_of_lane(half));
            const long long q = row + seq.q_position();
            UNROLL(n, BLOCK_K / 8)
                UNROLL(c, 2) {
                    const int i = 4 * n + 2 * half + c, key = k0 + 8 * n + threadIdx.x % 4 * 2 + c,
                              k = READS_ARRAYS ? clamped_index(key, seq.n_k()) : key;
                    ds[i] *= score_slope(s[i] * scale, work_tile.b, h, row, q, k, params);
                }
        }
    }

    // S to P, dS to P dS. Returns whether `rescale` must bring O and dO to the new row maximum.
    __device__ __forceinline__ bool softmax(bool full, int k0, float (&rescale)[2]) {
        if constexpr (HAS_SCORE && SCORES_MOVE) apply_slopes(k0);
        modify_tile(params, work_tile, full, s, k0, scale);
        if (SCORES_MOVE && (HAS_SCORE || !full)) {
            UNROLL(i, S_REGS) ds[i] = s[i] == HIDDEN ? 0.0f : ds[i];
        }
        float sum[2], d_sum[2] = {0, 0};
        RowStats unused;
        online_softmax(s, m, sum, rescale, {scale_log2, scale_log2}, unused);
#pragma unroll
        for (int i = 0; SCORES_MOVE && i < S_REGS; ++i) ds[i] *= s[i], d_sum[i / 2 % 2] += ds[i], ds[i] *= scale;
        UNROLL(half, 2) {
            l[half] = fmaf(l[half], rescale[half], sum[half]);
            total[half] = fmaf(total[half], rescale[half], d_sum[half]);
        }
        if constexpr (HAS_DROPOUT) dropout_tile(params, work_tile, s, k0);
        if constexpr (HAS_DROPOUT && SCORES_MOVE) dropout_tile(params, work_tile, ds, k0);
        return !__all_sync(~0u, rescale[0] == 1 && rescale[1] == 1);
    }

    // --- blocks ------------------------------------------------------------------------------------------------------

    __device__ __forceinline__ void mma_block(unsigned n, bool full, int k0) {
        ping_pong_sync(wg);
        issue_qk(n);
        ping_pong_arrive(wg);
        wgmma_wait<0>();  // the other warp group multiplies meanwhile
        fence_operand(s), fence_operand(ds);
        pipe_k.consumer_release(n);
        float rescale[2];
        if (softmax(full, k0, rescale)) {
            UNROLL(i, O_REGS) o[i] *= rescale[i / 2 % 2], d_o[i] *= rescale[i / 2 % 2];
        }
        next_desc = wait_tile_desc(base, pipe_k, n + 1);  // its latency is hidden behind packing P
        UNROLL(i, P_REGS) {
            p[i] = pack(s[2 * i], s[2 * i + 1]);
            if (SCORES_MOVE) p_ds[i] = pack(ds[2 * i], ds[2 * i + 1]);
        }
        issue_pv(n, HAS_LENGTHS ? seq_of(params, work_tile).n_k() - k0 : BLOCK_K);
        wgmma_wait<0>();
        fence_operand(o), fence_operand(d_o), fence_operand(p), fence_operand(p_ds);
        pipe_v.consumer_release(n);
    }

    // A tile that is EMPTY for this warp group, but not for another one.
    __device__ __forceinline__ void skip_block(unsigned n) {
        ping_pong_sync(wg), ping_pong_arrive(wg);
        pipe_k.consumer_release(n);
        pipe_v.consumer_wait(n), pipe_v.consumer_release(n);
        next_desc = wait_tile_desc(base, pipe_k, n + 1);
    }

    __device__ __forceinline__ void run() {
        next_desc = wait_tile_desc(base, pipe_k, 0);
        if (PING_PONG && wg == MMA_WARPGROUPS - 1) ping_pong_arrive(wg);
#pragma unroll 1
        for (unsigned n = 0;; ++n) {
            const int tile_desc = uniform(next_desc), k0 = (tile_desc >> 8) * BLOCK_K;
            const int state = tile_desc == END ? (int)EMPTY : tile_desc >> 2 * wg & 3;
            if (tile_desc & FIRST_TILE) {  // also END
                if (number >= 0) epilogue();
                if (tile_desc == END) break;
                begin_work_tile();
            }
            if (state == EMPTY) skip_block(n);
            else mma_block(n, state == FULL, k0);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_jvp(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
         const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map,
         const __grid_constant__ TensorMap dq_map, const __grid_constant__ TensorMap dk_map,
         const __grid_constant__ TensorMap dv_map, const __grid_constant__ TensorMap dout_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) init_barriers(base);
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        WorkTileList* lists = reinterpret_cast<WorkTileList*>(shared + AT_LISTS);
        if (warp == 2) scheduler_warp(p, base, lists);
        else if (warp == 0 && elect_one()) producer(p, q_map, k_map, v_map, base, lists, {&dq_map, &dk_map, &dv_map});
        else if (warp == 1 && (IS_PACKED || elect_one())) store_warp(p, out_map, base, &dout_map);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        Consumer(p, base, role - 1).run();
    }
}
