// Backward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 2) on tensor cores by mma.sync: weights
// recomputed from the log-sum-exp, five products.
//
// A block of WARPS warps takes BLOCK_K keys of one head and goes over the tiles of queries that see them.
//
//     K, V       [BLOCK_K][..]                  shared memory
//     Q, dO      [2][BLOCK_Q][..]               shared memory, one tile ahead, with the numbers of its rows
//     P, dS      [BLOCK_Q][BLOCK_K]             computed in registers, in shared memory for the next products
//     dK, dV     [BLOCK_K][..]                  registers
//     dQ         [BLOCK_Q][HEAD_DIM]            registers, then added to float32 sums in global memory
//
// The warps share each product in a grid of its own: WARPS_S of them along the queries of S and dP, WARPS_KV along the
// keys of dK and dV, WARPS_Q along the queries of dQ, the others along the second axis.
//
// dQ is summed over blocks. With ORDERED a block adds to a tile of queries when all blocks before it are done with it, so
// the bits never change: `done` has a bit for each pair of tiles. Blocks take their work by ticket in that order, so
// whoever waits, waits for a block that runs. Blocks work at p.heads_per_l2_group heads at a time, whose rows and sums the L2 cache
// holds; so many blocks are at one head, and the order has to be one in which they follow each other at the distance of
// a tile: the last keys come first, and a block goes over its queries from the first on. Under a causal mask it begins at
// its diagonal, where it is the first to add, and nobody waits. Only the last heads go the other way round: their blocks
// with most to do come first, so that all blocks end at about the same time.
//
// Measured on an H200, bfloat16. Many heads at a time instead of what the cache holds: ten times the traffic to memory and
// 5 to 20 % slower under a causal mask, for sums that are not in the cache hold up whoever adds to them. `done` set by
// the first warp at a barrier, or after the first product, instead of by one warp after the second barrier: 2 to 10 %
// slower; the release takes 500 cycles wherever it is. Without any order 1 % faster, under a causal mask 3 to 7 %. Numbers
// of rows read from global memory where they are used: 14 % of the time. Other tiles for 64 columns: 64 x 64 by 4 warps 5 %
// slower, 64 x 128 10 %, 128 x 64 25 %; for 128 columns 64 x 64 30 %; for 256 columns 32 x 64 20 %.
//
// Under a mask, 3 to 5 % faster than before together: hidden scores become -inf before the one copy of the code that makes
// weights, instead of copies for tiles with and without them; sums that are not finite are found in the end, not rows in each
// tile; what a block works at lies in uniform registers, and where shared memory begins is not asked for in each tile. With 256
// columns adding all of dQ beside the first product after it brings 2 % more, no order at all would bring 3 % more yet (with 128
// it costs 3 %); warps of 32 x 16 instead of 16 x 32 for S 1 % slower, rows permuted instead of PADDED as fast.
//
// Constants of the head: BLOCK_Q, BLOCK_K, WARPS, WARPS_S, WARPS_KV, WARPS_Q, ORDERED, BLOCKS_PER_SM, POSITIONS and FAR.
#include "sm80/layout.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int S_TILES = BLOCK_Q / (16 * WARPS_S), S_KEYS = BLOCK_K * WARPS_S / WARPS / 8;
constexpr int KV_TILES = BLOCK_K / (16 * WARPS_KV), K_COLUMNS = padded(HEAD_DIM) * WARPS_KV / WARPS / 8;
constexpr int V_COLUMNS = padded(HEAD_DIM_V) * WARPS_KV / WARPS / 8;
constexpr int Q_TILES = BLOCK_Q / (16 * WARPS_Q), Q_COLUMNS = padded(HEAD_DIM) * WARPS_Q / WARPS / 8;

// Where registers leave room, the next tile is copied among the steps of the first two products; and dQ comes first, so
// that there are more steps to add it among.
constexpr bool SPREAD = !IS_FLOAT32 && HEAD_DIM > 64, DQ_FIRST = !IS_FLOAT32 && (HEAD_DIM <= 64 || HEAD_DIM > 128);
constexpr bool SOON = DQ_FIRST && HAS_MASK && HEAD_DIM > 128;  // all of it beside the first product after it: who waits, waits less
constexpr bool LEAN = !HAS_MASK && HEAD_DIM > 128;  // where neither uniform registers nor one address for all are faster
constexpr bool LISTED = HAS_MASK || IS_FLOAT32;  // float32: in place of the numbers on the list others would be spilled
static_assert(S_KEYS % 2 == 0 && K_COLUMNS % 2 == 0 && V_COLUMNS % 2 == 0 && Q_COLUMNS % 2 == 0, "operands come in pairs");

constexpr int SIZE = sizeof(storage), PITCH = pitch(HEAD_DIM), PITCH_V = pitch(HEAD_DIM_V), PITCH_S = BLOCK_K * SIZE + 16;
constexpr int AT_V = BLOCK_K * PITCH, AT_QUERIES = AT_V + BLOCK_K * PITCH_V;
constexpr int AT_ROWS = BLOCK_Q * (PITCH + PITCH_V), BYTES_STAGE = AT_ROWS + BLOCK_Q * 8;  // shift, then delta
constexpr int AT_P = AT_QUERIES + 2 * BYTES_STAGE;
constexpr int AT_DS = AT_P + BLOCK_Q * PITCH_S, AT_LIST = AT_DS + BLOCK_Q * PITCH_S;

// A hidden pair has the weight and the gradient 0, but 0 times NaN is NaN: then sums are not finite, and are made once more.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

#include "sm80/bwd_softmax.cuh"
#include "sm80/dq_semaphore.cuh"
#include "sm80/bwd_epilogue.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_backward(KERNEL_PARAMS) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ unsigned ticket;
    TileList& list = *reinterpret_cast<TileList*>(shared + AT_LIST);
    const unsigned begin = address_of(shared), base = LEAN ? begin : HAS_MASK && HEAD_DIM <= 64 ? kept(begin) : begin & 0xffffff;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (ORDERED) {
        if (threadIdx.x == 0) ticket = atomicAdd(p.tile_counter, 1u);
        __syncthreads();
    }
    const unsigned index = ORDERED ? ticket : blockIdx.x;
    const int heads = (int)p.heads / GQA_GROUP;
    const int tiles_k = (int)((p.n_k + BLOCK_K - 1) / BLOCK_K), all = heads * (int)p.batch, most = (int)p.heads_per_l2_group;
    const Work work = work_of(index, tiles_k, all, most);
    const bool down = HAS_MASK && all > most && work.bh >= (all - 1) / most * most;  // the last heads, the other way
    const auto known = [](int x) { return LEAN ? x : (int)uniform(x); };
    const int tile_k = known(down ? work.tile : tiles_k - 1 - work.tile);
    const int b = known(work.bh / heads), head = known(work.bh % heads), n_k = known((int)keys_of(p, b));
    const int before_low = down ? 0 : tile_k + 1, before_high = down ? tile_k : (n_k + BLOCK_K - 1) / BLOCK_K;  // add before
    Place at{b, head * GQA_GROUP, tile_k * BLOCK_K, 0, (int)p.n_q, n_k, offset_of(p, b)};
    at.k1 = at.k0 + BLOCK_K < n_k ? at.k0 + BLOCK_K : n_k;
    const int tiles_q = (at.n_q + BLOCK_Q - 1) / BLOCK_Q;

    float dk[KV_TILES][K_COLUMNS][4], dv[KV_TILES][V_COLUMNS][4];
    clear(dk);
    clear(dv);

    if (at.k0 < n_k) {
        if (ORDERED && HAS_MASK) {  // tiles that see nothing of these keys are done
            for (int h = at.h; h < at.h + GQA_GROUP; ++h)
                for (int tile = threadIdx.x; tile < tiles_q; tile += THREADS) {
                    const int end = tile * BLOCK_Q + BLOCK_Q < at.n_q ? tile * BLOCK_Q + BLOCK_Q : at.n_q;
                    if (tile_state(p, b, h, at.offset, tile * BLOCK_Q, end, at.k0, at.k1) == EMPTY)
                        set_nothing(done_of(p, b, h, tile), tile_k);
                }
        }
        load_tile<BLOCK_K, HEAD_DIM, THREADS>(Rows<>(p.k, b, head), at.k0, n_k, base);
        load_tile<BLOCK_K, HEAD_DIM_V, THREADS>(Rows<>(p.v, b, head), at.k0, n_k, base + AT_V);
        copies_end();

#pragma unroll 1
        for (at.h = head * GQA_GROUP; at.h < (head + 1) * GQA_GROUP; ++at.h) {
            const Rows<> q(p.q, b, at.h), dout(p.dout, b, at.h);
            if (threadIdx.x == 0) list.next = 0;
            int before = -1;  // the tile of queries that was added to last
#pragma unroll 1
            for (bool once = tiles_q > 0;; once = false) {
                if (!(LISTED ? fill<BLOCK_Q, false, 1>(list, p, b, at.h, at.k0, at.k1, 0, tiles_q, at.n_q, down) : once)) break;
                const int count = LISTED ? list.count : tiles_q;
                const auto entry_of = [&](int i) { return LISTED ? (int)load_word(base + AT_LIST + 4 * i) : 2 * i + 1; };
                const auto row_of = [&](int i) { return entry_of(i) / 2 * BLOCK_Q; };
                if (!LISTED) __syncthreads();  // all are done with the head before
                const auto stage_of = [&](int i) { return base + AT_QUERIES + i % 2 * BYTES_STAGE; };
                const auto load_rows = [&](int row0, unsigned stage, bool wanted) {  // pieces of shift, then of delta
                    const bool first = threadIdx.x < BLOCK_Q / 4;
                    const float* rows = row_at<const float>(first ? p.bwd_lse : p.delta, b, at.h, row0);
                    copy_async(stage + AT_ROWS + threadIdx.x * 16, rows + threadIdx.x % (BLOCK_Q / 4) * 4, 0, 1,
                               wanted && threadIdx.x < BLOCK_Q / 2);
                };
                load_tile<BLOCK_Q, HEAD_DIM, THREADS>(q, row_of(0), at.n_q, stage_of(0));
                load_tile<BLOCK_Q, HEAD_DIM_V, THREADS>(dout, row_of(0), at.n_q, stage_of(0) + BLOCK_Q * PITCH);
                load_rows(row_of(0), stage_of(0), true);
                copies_end();
#pragma unroll 1
                for (int i = 0; i < count; ++i) {
                    const int tile = entry_of(i) / 2, row0 = tile * BLOCK_Q;
                    const bool full = entry_of(i) & 1;
                    const int at_stage = AT_QUERIES + i % 2 * BYTES_STAGE;
                    const unsigned stage = base + at_stage, next = stage_of(i + 1);
                    copies_wait<0>();
                    __syncthreads();  // the tile is there for all, and all are done with the one before
                    const bool more = i + 1 < count;
                    const int next_row0 = more ? row_of(i + 1) : 0;
                    TileCopy<BLOCK_Q, HEAD_DIM, THREADS> copy_q;
                    TileCopy<BLOCK_Q, HEAD_DIM_V, THREADS> copy_dout;
                    const bool copied = more && copy_q.can(q) && copy_dout.can(dout);
                    if (more && !copied) {
                        copy_q.store(q, next_row0, at.n_q, next);
                        copy_dout.store(dout, next_row0, at.n_q, next + BLOCK_Q * PITCH);
                    }
                    if (!SPREAD) {
                        copy_q.start(q, next_row0, at.n_q, next, copied);
                        copy_q.copy(0, 1);
                        copy_dout.start(dout, next_row0, at.n_q, next + BLOCK_Q * PITCH, copied);
                        copy_dout.copy(0, 1);
                        load_rows(next_row0, next, more);
                        copies_end();
                    }
                    const auto number = [&](int i) {
                        return LEAN ? reinterpret_cast<const float*>(shared + at_stage + AT_ROWS)[i] : __uint_as_float(load_word(stage + AT_ROWS + 4 * i));
                    };
                    float shift[S_TILES][2], delta[S_TILES][2];
#pragma unroll
                    for (int j = 0; j < S_TILES; ++j)
#pragma unroll
                        for (int half = 0; half < 2; ++half)
                            shift[j][half] = number(at.row(j, half)), delta[j][half] = number(BLOCK_Q + at.row(j, half));

                    float s[S_TILES][S_KEYS][4], dp[S_TILES][S_KEYS][4];
                    const int of_rows = warp / (WARPS / WARPS_S) * 16 * S_TILES, of_keys = warp % (WARPS / WARPS_S) * 8 * S_KEYS;
                    clear(s);
                    multiply_rows<HEAD_DIM>(s, stage + of_rows * PITCH, base + of_keys * PITCH, [&](int k, int steps) {
                        if (SPREAD && k == 0) copy_q.start(q, next_row0, at.n_q, next, copied);
                        if (SPREAD) copy_q.copy(k, steps);
                    });
                    bool plain = (!HAS_SCORE || BY_FORM) && full && at.k0 + BLOCK_K <= n_k;
                    Line line[S_TILES][2];
                    if constexpr (BY_FORM)
                        plain = plain && at.narrow() &&
                                lines_of<BLOCK_K, 16 * S_TILES, 1>(p, b, at.h, at.offset, at.n_q, row0 + of_rows, at.k0, at.key(0), line,
                                                                   [&](int i, int half) { return row0 + at.row(i, half); });
                    if constexpr (HAS_SCORE) {
                        if (plain) weights<true>(p, at, s, shift, line, row0, base + AT_P);
                        else if (at.narrow()) weights<false>(p, at, s, shift, line, row0, base + AT_P);
                        else weights<false, long long>(p, at, s, shift, line, row0, base + AT_P);
                    } else {
                        if (!plain) hide(p, at, s, row0);
                        weights<true>(p, at, s, shift, line, row0, base + AT_P);
                    }
                    clear(dp);
                    multiply_rows<HEAD_DIM_V>(
                        dp, stage + BLOCK_Q * PITCH + of_rows * PITCH_V, base + AT_V + of_keys * PITCH_V, [&](int k, int steps) {
                            if (SPREAD && k == 0)
                                copy_dout.start(dout, next_row0, at.n_q, next + BLOCK_Q * PITCH, copied);
                            if (SPREAD) copy_dout.copy(k, steps);
                            if (SPREAD && k == steps - 1) load_rows(next_row0, next, more);
                        });
                    if (SPREAD) copies_end();
                    gradients(p, at, s, dp, delta, row0, base + AT_DS);
                    __syncthreads();  // P and dS are there

                    if (ORDERED) {  // what was added a while ago is there by now, so this hardly waits
                        if (before >= 0 && threadIdx.x == THREADS - 1) set_done(done_of(p, b, at.h, before), tile_k);
                        before = tile;
                    }
                    const unsigned* done = done_of(p, b, at.h, tile);
                    unsigned seen = 0;
                    if (ORDERED && (before_low / 32 + lane) * 32 < before_high) seen = get_done(done + before_low / 32 + lane);
                    // dQ is added among the steps of the products after it: many at a time fill the way to memory.
                    float dq[Q_TILES][Q_COLUMNS][4];
                    const auto multiply_dq = [&] {
                        clear(dq);
                        multiply_turned<BLOCK_K / STEP, false, PITCH_S, HEAD_DIM>(
                            dq, base + AT_DS + warp / (WARPS / WARPS_Q) * 16 * Q_TILES * PITCH_S, base, warp % (WARPS / WARPS_Q));
                        if (ORDERED) wait_for(done, seen, before_low, before_high);
                    };
                    float* sums = row_at<float>(p.dq_accum, b, at.h, tile) + warp * Q_TILES * Q_COLUMNS * 128 + lane * 4;
                    const auto add_dq = [&](int k, int steps) {
#pragma unroll
                        for (int j = 0; j < Q_TILES * Q_COLUMNS; ++j)
                            if (j * steps / (Q_TILES * Q_COLUMNS) == k) add(sums + j * 128, dq[j / Q_COLUMNS][j % Q_COLUMNS]);
                    };
                    const int of_key = warp / (WARPS / WARPS_KV) * 16 * KV_TILES, share = warp % (WARPS / WARPS_KV);
                    if constexpr (DQ_FIRST) multiply_dq();
                    multiply_turned<BLOCK_Q / STEP, true, PITCH_S, HEAD_DIM_V>(
                        dv, base + AT_P + of_key * SIZE, stage + BLOCK_Q * PITCH, share,
                        [&](int k, int steps) {
                            if constexpr (DQ_FIRST) add_dq(k, SOON ? steps : 2 * steps);
                        });
                    if constexpr (!DQ_FIRST) multiply_dq();
                    multiply_turned<BLOCK_Q / STEP, true, PITCH_S, HEAD_DIM>(
                        dk, base + AT_DS + of_key * SIZE, stage, share,
                        [&](int k, int steps) { if constexpr (!SOON) add_dq(DQ_FIRST ? steps + k : k, DQ_FIRST ? 2 * steps : steps); });
                }
            }
            if (ORDERED && !LISTED) __syncthreads();  // all have added to the last tile, too
            if (ORDERED && before >= 0 && threadIdx.x == THREADS - 1) set_done(done_of(p, b, at.h, before), tile_k);
        }
    }
    copies_wait_all();  // of keys that no tile of queries waited for
    __syncthreads();
    store_keys<DK, HEAD_DIM>(p, p.dk, at, head, dk, (float)p.softmax_scale, shared);
    store_keys<DV, HEAD_DIM_V>(p, p.dv, at, head, dv, 1.0f, shared);
}
