// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1) on tensor cores by mma.sync.
//
// A CTA of WARPS warps takes a work tile, BLOCK_Q query rows, and loops over the key tiles that the mask shows them.
// With PACK_GQA > 1 a row is one of the PACK_GQA query heads that share a key/value head, at one token: they all use K
// and V of one load. With SPLIT_KV a CTA takes one of p.num_splits parts of the keys, and `combine` reduces the splits.
//
//     Q          [BLOCK_Q][HEAD_DIM]            shared memory; then O on its way to global memory
//     K, V       [STAGES][BLOCK_K][..]          shared memory, filled STAGES - 1 tiles ahead
//     S, P       [BLOCK_Q][BLOCK_K]             registers
//     O          [BLOCK_Q][HEAD_DIM_V]          registers, not yet divided by the row sum
//     m, l       [BLOCK_Q]                      row maximum and row sum, base 2: shared memory, each lane its own
//
// WARPS_K warps share 16 TILES rows. With WARPS_K = 2 each warp computes half of the keys of S and then half of the
// columns of O, and P goes through shared memory: with a wide O a warp has registers for few rows, and each operand
// that it loads should serve many.
//
// Constants of the head: BLOCK_Q, BLOCK_K, WARPS, WARPS_K, STAGES, LOOKED_UP, PAGE_RUN, PACK_GQA, SPLIT_KV,
// BLOCKS_PER_SM, POSITIONS, FAR.
// Shared memory (cupy_raw/sm80.py: Sm80Tile.smem): Q at 0, AT_KV, AT_TILE_LIST, AT_TILE_ROWS, AT_P, AT_ROW_REDUCE,
// AT_ROW_STATE; within a stage of KV, of STAGE_BYTES bytes, K at 0 and AT_STAGE_V. Measurements: docs/notes/ampere.md.
#include "sm80/layout.cuh"
#include "sm80/affine_score.cuh"

extern __shared__ __align__(128) unsigned char shared[];

constexpr int THREADS = 32 * WARPS, TILES = BLOCK_Q * WARPS_K / (16 * WARPS), KEYS = BLOCK_K / WARPS_K / 8;
constexpr int COLUMNS = padded(HEAD_DIM_V) / WARPS_K / 8;
// Key tiles that are loaded ahead. With a single stage V of a tile is loaded during Q K^T, and K of the next tile after
// it.
constexpr int STAGES_AHEAD = STAGES - 1, PREFETCH = larger(STAGES_AHEAD, 1);
// Interleaves the copies of a tile with the steps of Q K^T: where registers leave room and the tile is not needed at
// once.
constexpr bool COPY_DURING_MMA = STAGES_AHEAD > 0 && (IS_FLOAT32 || !HAS_MASK || HEAD_DIM <= 64);
constexpr bool PREFETCH_OPERANDS = !IS_FLOAT32 && HEAD_DIM > 64;  // gemm_nt_pipelined(): pays for long sums only
static_assert(KEYS % 2 == 0 && COLUMNS % 2 == 0, "ldmatrix_x4 loads two operands");
constexpr int PITCH_P = BLOCK_K * (int)sizeof(storage) + 16;

// Row maximum and row sum of a lane's rows. They live in shared memory: Q K^T needs the registers.
struct RowState {
    float m[TILES][2], l[TILES][2];
};
// HAS_STATS: the sum of P log2 P, behind them.
struct RowTotals {
    float of[TILES][2];
};
DEVICE RowTotals& row_totals() {
    return reinterpret_cast<RowTotals*>(shared + AT_ROW_STATE + THREADS * (int)sizeof(RowState))[threadIdx.x];
}
DEVICE RowState& row_state() { return reinterpret_cast<RowState*>(shared + AT_ROW_STATE)[threadIdx.x]; }

// A masked pair has P = 0, but 0 times inf or NaN is NaN. Where O is not finite though its row sum is, the CTA
// recomputes its rows without tensor cores and skips products with 0. TF32x3, which makes NaN of inf, needs that, too.
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT, TF32X3 = IS_FLOAT32 && TF32_TERMS == 3;

// The work tile of a CTA, and which of its rows, keys and columns a lane holds.
struct WorkTile {
    int b, h, row0, rows, n_k;  // h: first of PACK_GQA heads; rows: PACK_GQA per token, this tile's begin at row0
    long long q_position;

    __device__ __forceinline__ int row(int i, int half) const {  // among the rows of all PACK_GQA heads
        return row0 + row_of_warp() + 16 * i + 8 * half + threadIdx.x % 32 / 4;
    }
    static __device__ __forceinline__ int row_of_warp() { return threadIdx.x / 32 / WARPS_K * 16 * TILES; }
    static __device__ __forceinline__ int warp_column() { return WARPS_K == 1 ? 0 : threadIdx.x / 32 % WARPS_K; }
    static __device__ __forceinline__ int key(int n) {  // and the next
        return (warp_column() * KEYS + n) * 8 + threadIdx.x % 4 * 2;
    }
    static __device__ __forceinline__ int column(int n) {
        return (warp_column() * COLUMNS + n) * 8 + threadIdx.x % 4 * 2;
    }
    // Whether positions, and what a score modification computes with them, fit 32 bits, which halves the instructions.
    __device__ __forceinline__ bool narrow() const {
        return q_position >= -FAR && q_position + rows < FAR && (!HAS_SCORE || n_k < FAR);
    }
};

#include "sm80/kv_source.cuh"
#include "sm80/softmax.cuh"
#include "sm80/epilogue.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm80_forward(KERNEL_PARAMS) {
    if constexpr (SPLIT_KV) griddepcontrol_wait(), griddepcontrol_launch_dependents();
    TileList& list = *reinterpret_cast<TileList*>(shared + AT_TILE_LIST);
    storage* p_tile = reinterpret_cast<storage*>(shared + AT_P);
    const unsigned q_shared = smem_address(shared), stages = q_shared + AT_KV;
    const unsigned q_of_warp = q_shared + WorkTile::row_of_warp() * pitch(HEAD_DIM);

    const int heads = (int)p.heads / PACK_GQA, most_rows = (int)max_n_q(p) * PACK_GQA;
    const int tiles = IS_PACKED ? (int)num_q_tiles(p, BLOCK_Q) : (most_rows + BLOCK_Q - 1) / BLOCK_Q;
    const unsigned splits = SPLIT_KV ? (unsigned)p.num_splits : 1, split = blockIdx.x % splits;
    const unsigned index = blockIdx.x / splits;
    const TileCoord coord = forward_tile<SPLIT_KV>(p, heads, tiles, (int)index);
    const SeqTile tile = q_tile(p, coord.bh / heads, coord.tile, BLOCK_Q);
    const int b = (int)tile.b, h = coord.bh % heads * PACK_GQA, row0 = (int)tile.tile * BLOCK_Q;
    const int rows = IS_PACKED ? (int)seq_info(p, b).n_q : most_rows;
    if (IS_PACKED && row0 >= rows) return;
    const WorkTile at{b, h, row0, rows, (int)seq_info(p, b).n_k, seq_info(p, b).q_position};
    const int from = row0 / PACK_GQA, to = ((row0 + BLOCK_Q < rows ? row0 + BLOCK_Q : rows) + PACK_GQA - 1) / PACK_GQA;
    const long long key_tiles = (at.n_k + BLOCK_K - 1) / BLOCK_K;
    int first = (int)(key_tiles * split / splits), last = (int)(key_tiles * (split + 1) / splits);
    if constexpr (SPLIT_TILES > 0)
        first = min((int)key_tiles, (int)split * SPLIT_TILES), last = min((int)key_tiles, first + SPLIT_TILES);
    const KvSource kv(p, b, h / GQA_GROUP, at.n_k);
    const float scale = softmax_scale_log2(p);

    float o[TILES][COLUMNS][4];
    RowState now;
    clear(o);
    UNROLL(i, TILES) now.m[i][0] = now.m[i][1] = HIDDEN, now.l[i][0] = now.l[i][1] = 0;
    row_state() = now;
    if (threadIdx.x == 0) list.next = 0;
    load_tile<BLOCK_Q, HEAD_DIM, THREADS>(Rows<PACK_GQA>(p.q, b, h, seq_info(p, b).row_offset), row0, rows,
                                          q_shared);
    const auto load_kv = [&](int tile, int i) {
        kv.load_k(tile, i, stages + i * STAGE_BYTES);
        if (STAGES_AHEAD > 0) kv.load_v(tile, i, stages + i * STAGE_BYTES);
    };
    // The first key tile is loaded before the mask is evaluated: mostly it is not EMPTY.
    bool waited_for_q = false, speculative_load = !IS_PAGED && first < last;
    if (speculative_load) load_kv(first, 0);

#pragma unroll 1
    for (bool first_pass = first < last;; first_pass = false) {
        if (!(HAS_MASK ? fill<BLOCK_K, true, PACK_GQA>(list, p, b, h, from, to, first, last, at.n_k) : first_pass))
            break;
        const int count = HAS_MASK ? list.count : last - first;
        const auto tile_of = [&](int i) { return HAS_MASK ? TileList::tile(list.entry[i]) : first + i; };
        const auto key_of = [&](int i) { return tile_of(i) * BLOCK_K; };
        const auto stage_of = [&](int i) { return i % STAGES * STAGE_BYTES; };
        const auto tile_to_look_up = [&](int i) { return tile_of(i < count ? i : count - 1); };
        if constexpr (IS_PAGED) {
#pragma unroll 1
            for (int i = 0; i <= PREFETCH; ++i) kv.keep(kv.look_up(tile_to_look_up(i)), tile_to_look_up(i), i);
            __syncthreads();
        }
        UNROLL(i, PREFETCH) {
            if (i == 0 && speculative_load && tile_of(0) != first)
                cp_async_wait_all(), speculative_load = false;
            if (i < count && !(i == 0 && speculative_load)) load_kv(tile_of(i), i);
            cp_async_commit();
        }
        speculative_load = false;
#pragma unroll 1
        for (int i = 0; i < count; ++i) {
            cp_async_wait<PREFETCH - 1>();
            __syncthreads();  // all threads see tile i and have finished tile i - 1
            const int k0 = key_of(i), at_stage = stage_of(i);
            const bool full = !HAS_MASK || TileList::full(list.entry[i]), more = i + PREFETCH < count;
            const bool more_v = STAGES_AHEAD == 0 || more;
            const int next_k0 = more ? key_of(i + PREFETCH) : 0, next_v0 = STAGES_AHEAD == 0 ? k0 : next_k0;
            const unsigned stage = stages + at_stage, to = stages + stage_of(i + STAGES_AHEAD);
            const int to_look_up = IS_PAGED ? tile_to_look_up(i + PREFETCH + 1) : 0;
            KvSource::Pages pages;
            if constexpr (IS_PAGED) pages = kv.look_up(to_look_up);
            KvSource::CopyK copy_k;
            KvSource::CopyV copy_v;
            const bool copied = copy_k.can(kv.k) && copy_v.can(kv.v);
            if (!copied) {
                if (STAGES_AHEAD > 0 && more) copy_k.store(kv.k, next_k0, at.n_k, to);
                if (more_v) copy_v.store(kv.v, next_v0, at.n_k, to + AT_STAGE_V);
            }
            const auto copy_next_k = [&](int step, int steps) {
                if (step == 0) copy_k.start(kv.k, next_k0, at.n_k, to, more && copied, kv.rows(i + PREFETCH).k);
                copy_k.copy(step, steps);
            };
            const auto copy_next_v = [&](int step, int steps) {
                const auto& rows = kv.rows(STAGES_AHEAD == 0 ? i : i + PREFETCH).v;
                if (step == 0) copy_v.start(kv.v, next_v0, at.n_k, to + AT_STAGE_V, more_v && copied, rows);
                copy_v.copy(step, steps);
            };
            const auto copy_next = [&](int step, int steps) {
                const int half = STAGES_AHEAD > 0 ? steps / 2 : 0;
                if (STAGES_AHEAD > 0 && (step < half || steps == 1)) copy_next_k(step, larger(half, 1));
                if (step >= half) copy_next_v(step - half, steps - half);
            };
            if (!COPY_DURING_MMA) copy_next(0, 1);
            float s[TILES][KEYS][4];
            clear(s);
            const unsigned keys = stage + at.warp_column() * 8 * KEYS * pitch(HEAD_DIM);
            const auto interleave = [&](int step, int steps) {
                if (COPY_DURING_MMA) copy_next(step, steps);
            };
            if constexpr (PREFETCH_OPERANDS) gemm_nt_pipelined<HEAD_DIM>(s, q_of_warp, keys, interleave);
            else gemm_nt<HEAD_DIM>(s, q_of_warp, keys, interleave);
            if (STAGES_AHEAD == 0) {
                cp_async_commit();
                cp_async_wait_all();
                __syncthreads();  // all threads see V and have finished with K
                if (more && !copied) copy_k.store(kv.k, next_k0, at.n_k, to);
                copy_next_k(0, 1);
                cp_async_commit();
            }
            const bool plain = !HAS_SCORE && full && k0 + BLOCK_K <= at.n_k && scale > 0;
            float factor = 1;
            if (!plain) modify_tile(p, at, full, s, k0, factor);
            online_softmax(s, o, plain ? scale : factor);
            if constexpr (HAS_DROPOUT) drop_tile(p, at, s, k0);
            if constexpr (WARPS_K > 1) store_p(s, p_tile);
            sync_row_warps();
            if (STAGES_AHEAD > 0) cp_async_commit();
            waited_for_q = true;
            if constexpr (WARPS_K == 1)
                gemm_rs<HEAD_DIM_V>(o, s, stage + AT_STAGE_V);
            else
                gemm_nn<BLOCK_K / STEP, false, PITCH_P, HEAD_DIM_V>(
                    o, q_shared + AT_P + at.row_of_warp() * PITCH_P, stage + AT_STAGE_V, at.warp_column());
            if constexpr (IS_PAGED) kv.keep(pages, to_look_up, i + PREFETCH + 1);
        }
    }
    if (!waited_for_q) {  // Q may still be arriving in the memory that O goes through
        cp_async_wait_all();
        __syncthreads();
    }
    bool nonfinite = false;
    now = row_state();
    const float(&l)[TILES][2] = now.l;
    across_rows(now.l, [](float x, float y) { return x + y; });
    if constexpr (HAS_STATS) {
        RowTotals totals = row_totals();
        sync_row_warps();  // all have read the row sums
        across_rows(totals.of, [](float x, float y) { return x + y; });
        const auto store = [](float* target, float x) { *target = x; };
        UNROLL(i, 2 * TILES) {
            const int index = at.row(i / 2, i % 2);
            if (index < at.rows && threadIdx.x % 4 == 0 && at.warp_column() == 0)
                store_statistics(p, at.b, at.h + index % PACK_GQA, index / PACK_GQA, now.m[i / 2][i % 2],
                                 l[i / 2][i % 2], totals.of[i / 2][i % 2], now.m[i / 2][i % 2], store);
        }
    }
    UNROLL(i, TILES)
        UNROLL(half, 2) {
            if (TF32X3 && at.row(i, half) < rows) nonfinite |= !is_finite(l[i][half]);
            if ((MAY_HIDE || TF32X3) && at.row(i, half) < rows && is_finite(l[i][half])) {
                UNROLL(n, COLUMNS)
                    nonfinite |= !is_finite(o[i][n][2 * half]) || !is_finite(o[i][n][2 * half + 1]);
            }
        }
    epilogue(p, at, split, now.m, now.l, o, shared + WorkTile::row_of_warp() * pitch(HEAD_DIM));
    if ((MAY_HIDE || TF32X3) && __syncthreads_or(nonfinite))
        rows_nonfinite(p, at, split, first * BLOCK_K, min(last * BLOCK_K, at.n_k));
}

#include "sm80/combine.cuh"
