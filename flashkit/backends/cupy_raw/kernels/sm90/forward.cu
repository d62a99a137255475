// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1; warp groups with roles and softmax beside
// products as in FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper. docs/hopper.md walks through it.
//
// As many blocks as multiprocessors take items one after the other, each BLOCK_Q rows of a head. With PACK_GQA > 1 a row is one
// of the PACK_GQA query heads that share a key/value head, at one token.
//
//     Q, then O   [Q_BUFFERS][MMA_WARPGROUPS][64][..]   shared memory, an item's rows; its output on the way out
//     K, V        [STAGES][BLOCK_K][..]         shared memory, two rings; where ROW_SUM_BY_MMA, a chunk of ones that all V share
//     S, P        [64][BLOCK_K]                 registers of a warp group
//     O           [64][HEAD_DIM_V]              registers of a warp group, unscaled; where ROW_SUM_BY_MMA, eight columns more: l
//     m, l        [64]                          a row's reference, in base 2, and its sum of weights: registers
//
// Warp group 0: warp 0 loads tiles, warp 1 stores outputs, warp 2 finds the tiles to load. Warp groups 1 ... MMA_WARPGROUPS, with
// 64 rows each, multiply. A step of such a group, for the tile of keys number n of all that the block loads:
//
//     scores      S = Q K_n^T          is begun,
//     accumulate  O += P V             of the tile before is begun,
//     modify, online_softmax           S becomes weights while the second product runs,
//     and the first tile of an item is begun before the last item is finished.
//
// float32 goes through the same roles, as terms of float16: sm90_float32.cuh has what multiplies two for each element. One,
// with precision="tf32", is multiplied here, in units (fp16x2_split.cu) that are put back as the scores' factor, and of values
// by way of the weights.
//
// Constants of the head: PARTS, ROW_SUM_BY_MMA, BLOCK_K, MMA_WARPGROUPS, STAGES, Q_BUFFERS, PACK_GQA, PING_PONG, CONSUMER_REGISTERS, PRODUCER_REGISTERS,
// WATCHDOG, HAS_LENGTHS, SHARED_BYTES, CHUNK_BYTES, POSITIONS and FAR (modification.positions).
#include "sm90/pipeline.cuh"
#include "sm90/fp16x2_terms.cuh"
#include "common/positions.cuh"

constexpr int BLOCK_Q = 64 * MMA_WARPGROUPS, THREADS = 128 * (MMA_WARPGROUPS + 1), COLUMNS = padded(HEAD_DIM_V);
constexpr bool IS_FLOAT32 = STORAGE == FLOAT32;  // elements come as PARTS numbers of float16, and leave as float32
constexpr bool EXACT = IS_FLOAT32 && PARTS == 2;
constexpr float FAR_UNIT = 1.2089258e24f, LEAST_UNIT = 1.1754944e-38f;  // 2^80: scores stay finite; 2^-126: -inf stays itself
constexpr int CHUNKS_K = PARTS * chunks(HEAD_DIM), CHUNKS_V = PARTS * chunks(HEAD_DIM_V);  // of Q and K, of V
constexpr int OUT_COLUMNS = IS_FLOAT32 ? 32 : 64, CHUNKS_OUT = up(HEAD_DIM_V, OUT_COLUMNS) / OUT_COLUMNS;
constexpr int BYTES_Q = 64 * CHUNK_ROW * larger(CHUNKS_K, CHUNKS_OUT);
constexpr int BYTES_K = BLOCK_K * CHUNK_ROW * CHUNKS_K, BYTES_V = BLOCK_K * CHUNK_ROW * CHUNKS_V;
constexpr int AT_K = Q_BUFFERS * MMA_WARPGROUPS * BYTES_Q, AT_V = AT_K + STAGES * BYTES_K, AT_ONES = AT_V + STAGES * BYTES_V;
constexpr int CHUNK = BLOCK_K * CHUNK_ROW, AT_BARRIERS = AT_ONES + ROW_SUM_BY_MMA * CHUNK;
constexpr int AT_Q_PIPE = AT_BARRIERS, AT_K_PIPE = AT_Q_PIPE + 16 * Q_BUFFERS, AT_V_PIPE = AT_K_PIPE + 16 * STAGES;
constexpr int AT_LIST_PIPE = AT_V_PIPE + 16 * STAGES, AT_SOON = AT_LIST_PIPE + 32;  // soon: the item is near its end
constexpr int AT_DONE = AT_SOON + 8;               // for each buffer and group: its output is in the buffer
constexpr int AT_TILE_DESCS = AT_DONE + 8 * MMA_WARPGROUPS * Q_BUFFERS;  // for each stage of K: tile << 8 | first of its item << 6 | states of the groups
constexpr int AT_WORK_TILES = AT_TILE_DESCS + 4 * STAGES;    // for each buffer of Q: an WorkTile
constexpr int AT_LISTS = AT_WORK_TILES + 12 * Q_BUFFERS, AT_UNIT = AT_LISTS + 2 * CHUNK_BYTES;
constexpr int AT_GAINS = AT_UNIT + 8, BYTES_GAINS = 24;  // for each warp that multiplies: six numbers of a Line
static_assert(AT_GAINS + BYTES_GAINS * 4 * MMA_WARPGROUPS <= SHARED_BYTES, "sm90.py gives less shared memory than there is to lie in it");
constexpr int FIRST = 64, END = -1, NEVER = -2;
constexpr int AHEAD = MASK_READS_ARRAYS ? 12 : 4;  // how many tiles before the end of an item the next one is taken
constexpr int SUMS = COLUMNS / 2 + 4 * ROW_SUM_BY_MMA;  // of a lane; the last four are of weights alone

// Where stages of K and V lie, and how far the chunks of V are from each other. Where ROW_SUM_BY_MMA, V has a chunk of ones after its own,
// the same for all stages: so stages have them at different distances, and one stage of K lies between two chunks of V.
static_assert(!ROW_SUM_BY_MMA || CHUNKS_V == 1 || (CHUNKS_V == 2 && CHUNKS_K == 2 && STAGES == 2), "no room for ones");
DEVICE constexpr int at_k(int stage) { return ROW_SUM_BY_MMA && CHUNKS_V == 2 ? AT_ONES - (5 + 3 * stage) * CHUNK : AT_K + stage * BYTES_K; }
DEVICE constexpr int chunk_v(int stage) { return ROW_SUM_BY_MMA ? (1 + CHUNKS_V * stage) * CHUNK : CHUNK; }
DEVICE constexpr int at_v(int stage) { return ROW_SUM_BY_MMA ? AT_ONES - CHUNKS_V * chunk_v(stage) : AT_V + stage * BYTES_V; }

enum NamedBarrier { TURN = 1, MEETING = TURN + MMA_WARPGROUPS };  // of each group

struct WorkTile {
    int b, h, row0;  // h: the first of PACK_GQA heads
    start offset;    // position of the head's row 0, where it is not FAR
};

// What an item has in a buffer of Q: a group's rows, and then their output; a barrier that says it is there; which item it is.
DEVICE unsigned rows_at(unsigned base, int buffer, int group) { return base + (buffer * MMA_WARPGROUPS + group) * BYTES_Q; }
DEVICE unsigned done_at(unsigned base, int buffer, int group) { return base + AT_DONE + 8 * (buffer * MMA_WARPGROUPS + group); }
DEVICE unsigned work_tile_slot(unsigned base, int buffer) { return base + AT_WORK_TILES + 12 * buffer; }
DEVICE WorkTile work_tile_of_number(const Params& p, unsigned base, int number, int group) {
    const unsigned slot = work_tile_slot(base, number % Q_BUFFERS);
    const int b = uniform(load_word(slot)), h = uniform(load_word(slot + 4)), row0 = uniform(load_word(slot + 8)) + 64 * group;
    return {b, h, row0, (start)offset_of(p, b)};
}

#include "sm90/tile_scheduler.cuh"
#include "sm90/softmax.cuh"
#include "sm90/epilogue.cuh"
#include "sm90/fp16x2.cuh"

// --- multiplying ------------------------------------------------------------------------------------------------------

// A number that is the same for all, kept. Where there are few registers it would be computed anew for each tile, in
// float64: so it is read from shared memory, which the compiler cannot do twice.
DEVICE float kept(float x, unsigned address) {
    if constexpr (HAS_SCORE || READS_ARRAYS) {
        store_float(address, x);
        __syncwarp();
        return __int_as_float(uniform(load_word(address)));
    }
    return uniform_float(x);
}

// What a tile's products stand for, in powers of two; 1 where elements are what they are.
struct Units {
    float score[2];  // for each of a lane's rows
    float values;
    bool known;      // whether they are numbers to be multiplied
};
DEVICE Units units_of(const Params& p, const WorkTile& at, const float (&q_unit)[2], int tile) {
    if constexpr (!IS_FLOAT32) return {{1, 1}, 1, true};
    const float k_unit = *row_at<const float>(p.k_scale, at.b, at.h / GQA_GROUP, tile);
    const float values = *row_at<const float>(p.v_scale, at.b, at.h / GQA_GROUP, tile);
    const float score[2] = {q_unit[0] * k_unit, q_unit[1] * k_unit};
    return {{fmaxf(score[0], LEAST_UNIT), fmaxf(score[1], LEAST_UNIT)}, values,
            score[0] <= FAR_UNIT && score[1] <= FAR_UNIT && values <= FAR_UNIT};
}

DEVICE void consumer(const Params& p, unsigned base, int group) {
    const Pipeline<Q_BUFFERS> queries{base + AT_Q_PIPE, base + AT_Q_PIPE + 8 * Q_BUFFERS};
    const Pipeline<STAGES> keys{base + AT_K_PIPE, base + AT_K_PIPE + 8 * STAGES}, values{base + AT_V_PIPE, base + AT_V_PIPE + 8 * STAGES};
    const float unit = kept(softmax_scale_log2(p), base + AT_UNIT), scale = HAS_SCORE ? kept((float)p.softmax_scale, base + AT_UNIT + 4) : 1.0f;
    float output[SUMS], s[BLOCK_K / 2], m[2], l[2], level[2], q_unit[2];
    unsigned weights[BLOCK_K / 4];
    WorkTile at;                     // the item of the tile before,
    bool open = false;           // whether an item's output is in registers,
    bool begun = false;          // and whether all rows of this warp have a reference that is likely to last
    bool usual = true;           // and whether its positions and scores are as usual steps expect them
    bool bounded = false;        // and whether its scores are near enough to each other for one reference, m
    bool gentle = true;          // and whether its scores are as the polynomial in place of tanh expects them
    bool fresh = false;          // whether the tile that comes is the first of another item
    int number = -1;             // of the item that the tile belongs to among the block's
    bool pending = false;        // whether weights of the tile before wait for their values,
    int expected = NEVER;        // what the tile_desc of a tile says of this group that a usual step is for
    Head head{};                 // what its score modification reads once for a head,
    Line lasting;                // what makes exponents of its scores, where that is the same for all its tiles,
    const unsigned gains = base + AT_GAINS + BYTES_GAINS * uniform(threadIdx.x / 32 - 4);  // and where some of it is STORED
    float frame = 0;             // the exponent of the unit that the item's sums are in: of values
    int sum = 0, exist = 0;      // to be added to the output (sum), not to start it; keys of that tile that exist

    // The item before this one, kept or read again, which takes no registers meanwhile. But with a score modification the compiler
    // then orders the softmax worse, and with `expected`: ALiBi was 6 to 8 % slower, soft-capping 2 %. So neither is done there.
    auto item_before = [&](const WorkTile& kept) {
        return HAS_SCORE ? WorkTile{opaque(kept.b), opaque(kept.h), opaque(kept.row0), kept.offset} : work_tile_of_number(p, base, number - 1, group);
    };
    auto await_tile_desc = [&](unsigned n) {  // it comes with the tile's keys
        keys.consumer_wait(n);
        return load_word(base + AT_TILE_DESCS + 4 * (n % STAGES));
    };
    int next_tile_desc = await_tile_desc(0);
    auto warpgroup_barrier_sync = [&]() { if (PING_PONG) named_barrier_sync(TURN + group, 256); };
    auto warpgroup_barrier_arrive = [&]() { if (PING_PONG) named_barrier_arrive(TURN + (group + 1 == MMA_WARPGROUPS ? 0 : group + 1), 256); };
    auto scores = [&](unsigned n) {
        const unsigned long long q = descriptor(rows_at(base, number % Q_BUFFERS, group)), k = descriptor(base + at_k(n % STAGES));
        wgmma_fence();
        wgmma_zero_init<0, 0>(s, q, k);
#pragma unroll
        for (int step = 1; step < padded(HEAD_DIM) / 16; ++step)
            product<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
        wgmma_commit();
    };
    auto accumulate = [&](unsigned n) {
        const unsigned stage = base + at_v(n % STAGES);
        const unsigned long long v = descriptor(stage, chunk_v(n % STAGES));
        values.consumer_wait(n);
        if (HAS_LENGTHS && !IS_FLOAT32 && exist < BLOCK_K) {  // what lies past the length must not matter
            clear_rows<HEAD_DIM_V, BLOCK_K>(stage, exist, chunk_v(n % STAGES));
            named_barrier_sync(MEETING + group, 128);
        }
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            wgmma_rs<1>(output, weights, 4 * step, v + along_columns(step), step > 0 ? 1 : sum);
        wgmma_commit();
    };
    auto accumulated = [&](unsigned n) {
        wgmma_wait<0>();
        fence_operand(output), fence_operand(weights);
        values.consumer_release(n);
        pending = false;
    };
    auto weigh_formed = [&](float (&s)[BLOCK_K / 2], float (&total)[2], const Line& line, bool guessed, bool& calm) {
        if constexpr (BOUNDABLE)
            if (bounded) return gentle ? formed_softmax<false, true>(s, m, total, line, guessed, calm)
                                       : formed_softmax<true, true>(s, m, total, line, guessed, calm);
        if constexpr (CAPPED && SHORT)
            if (!gentle) return formed_softmax<true, false>(s, m, total, line, guessed, calm);
        return formed_softmax<false, false>(s, m, total, line, guessed, calm);
    };
    // Tile n from its scores to its weights. PENDING: meanwhile the product of the weights before. USUAL: all rows of this
    // warp have a reference, and all pairs are visible. Both have to be known to the compiler, or it makes products wait
    // for each other.
    auto step = [&](auto with_pending, auto is_usual, unsigned n, bool full, int k0) {
        constexpr bool PENDING = decltype(with_pending)::value, USUAL = decltype(is_usual)::value;
        const WorkTile before = at;
        const float m_before[2] = {m[0], m[1]}, l_before[2] = {l[0], l[1]};
        if (!USUAL && fresh) {
            queries.consumer_wait(number);
            at = work_tile_of_number(p, base, number, group);
            m[0] = m[1] = level[0] = level[1] = HIDDEN, l[0] = l[1] = 0;
            usual = gentle = true;
            if constexpr (BY_FORM) head = head_of(at.b, at.h, p);
            if ((FOUND_ONCE || BOUNDABLE) && (usual = is_near(p, offset_of(p, at.b)))) {
                line_of(p, at, head, 0, scale, lasting);
                if (STORED) store_gain(lasting, gains);
            }
            if constexpr (BOUNDABLE) begun = bounded = usual && is_bounded(lasting, m);
#pragma unroll
            for (int half = 0; IS_FLOAT32 && half < 2; ++half) {
                const int own = at.row0 + row_of_lane(half), last = (int)p.n_q * PACK_GQA - 1, index = own < last ? own : last;
                q_unit[half] = *row_at<const float>(p.q_scale, at.b, at.h + index % PACK_GQA, index / PACK_GQA);
            }
        }
        const Units units = units_of(p, at, q_unit, k0 / BLOCK_K);
        auto multiply_before = [&]() {
            if (PENDING) accumulate(n - 1);
            warpgroup_barrier_arrive();
        };
        warpgroup_barrier_sync();
        scores(n);
        Line passing;
        if (STORED) passing = lasting, load_gain(passing, gains);  // while scores are multiplied
        if (!BETWEEN) multiply_before();
        // Whether exponents come by form, without the modified scores.
        float total[2], rescale[2];
        bool exact = false, near = true, calm = true, guessed = !USUAL && fresh;
        Line& line = LASTING ? lasting : passing;
        bool by_form = BY_FORM && (full || bounded) && usual && (USUAL || FOUND_ONCE || is_near(p, offset_of(p, at.b)));
        if (BY_FORM && !FOUND_ONCE && by_form) {
            by_form = line_of(p, at, head, k0, scale, line);
            if (SLOPED && by_form && (USUAL || !fresh) && __any_sync(~0u, is_low(line, m, level))) {
                lift(line, m, level, rescale);
                l[0] *= rescale[0], l[1] *= rescale[1];
                guessed = exact = true;
            }
        }
        if (BETWEEN) multiply_before();
        wgmma_wait_loads_pass<PENDING>();
        fence_operand(s);
        const float factor[2] = {IS_FLOAT32 && !HAS_SCORE ? units.score[0] * unit : unit, IS_FLOAT32 && !HAS_SCORE ? units.score[1] * unit : unit};
        const float shift = IS_FLOAT32 ? exponent_of(units.values) : 0.0f;  // of this tile's weights, which bring the unit of its values
        auto bring = [&](float x) {
#pragma unroll
            for (int half = 0; IS_FLOAT32 && half < 2; ++half) m[half] += x;
        };
        auto scale_scores = [&]() {
#pragma unroll
            for (int i = 0; IS_FLOAT32 && HAS_SCORE && i < BLOCK_K / 2; ++i) s[i] *= units.score[i / 2 % 2];
        };
        scale_scores();
        // Sums follow the unit of the values, or weights of a tile in a much smaller one would lose their bits.
        float change = 0, change_factor = 1;
        if constexpr (IS_FLOAT32) {
            if (!USUAL && fresh) frame = shift;
            if (__any_sync(~0u, fabsf(shift - frame) > 4)) {
                change = shift - frame, change_factor = exp2_fast(-change), frame = shift;
                bring(change);
                level[0] += change, level[1] += change, l[0] *= change_factor, l[1] *= change_factor;
            }
        }
        bring(-shift);
        const Tanh tanh;
        if (!BY_FORM && USUAL) calm = modify_usual(p, at, s, k0, scale);
        else if (!USUAL && !by_form) near = modify_tile(p, at, full, s, k0, scale);
        if (!USUAL && fresh && !bounded) begun = BY_FORM && by_form ? guess_formed(s, m, line) : guess(s, m, factor);
        const bool hopeful = USUAL ? by_form || !BY_FORM : begun;
        if (!hopeful || !(BY_FORM && by_form ? weigh_formed(s, total, line, guessed, calm) : speculative_softmax(s, m, total, factor, calm))) {
            if (hopeful) {  // the optimism was misplaced, and has cost the scores
                scores_again(s, rows_at(base, number % Q_BUFFERS, group), base + at_k(n % STAGES));
                scale_scores();
                if (USUAL || by_form) (BY_FORM && SHORT ? gentle : usual) &= __all_sync(~0u, calm);
            }
            if (BY_FORM && (USUAL || (by_form && full))) modify_near<false>(p, at, at.offset, s, k0, scale, tanh);
            else if (hopeful || by_form) modify_tile(p, at, full, s, k0, scale);
            if (!USUAL && fresh && !bounded) m[0] = m[1] = HIDDEN;
            else if (BY_FORM && SLOPED && guessed) {
                m[0] = m_before[0], m[1] = m_before[1], l[0] = l_before[0], l[1] = l_before[1];
                bring(change - shift);
                if (IS_FLOAT32) l[0] *= change_factor, l[1] *= change_factor;
            }
            online_softmax(s, m, total, rescale, factor);
            l[0] *= rescale[0], l[1] *= rescale[1];
            // Where a reference has just grown by much, it may again: another first look would be in vain.
            const bool grows = !fresh && !(BY_FORM && SLOPED) && (rescale[0] < STEADY || rescale[1] < STEADY);
            begun = bounded || __all_sync(~0u, m[0] != HIDDEN && m[1] != HIDDEN && !grows);
            if (BY_FORM && SLOPED) level[0] = level[1] = HIDDEN;
            exact = true;
            if (USUAL && !(begun && usual)) expected = NEVER;
        } else if (BOUNDABLE && !USUAL && by_form && !full) {
            modify_near<true, true>(p, at, at.offset, s, k0, scale, tanh);
        }
        bring(shift);
        if (BY_FORM && SLOPED && by_form) find_level(line, m, level);
        if (!near) usual = false;
        if constexpr (IS_FLOAT32) {
            const float back = units.known ? inverse_of(units.values) : fk_special(0);
            l[0] = fmaf(total[0], back, l[0]), l[1] = fmaf(total[1], back, l[1]);
        } else {
            l[0] += total[0], l[1] += total[1];
        }
        keys.consumer_release(USUAL ? n : n + depends_on(total[0]) + depends_on(total[1]));  // or exponentials are computed after the next wait
        if (PENDING) accumulated(n - 1);
        if (!USUAL && fresh) {
            if (PENDING && Q_BUFFERS > 1) finish(p, item_before(before), base, number - 1, m_before, l_before, output, group);
        } else if (exact || (IS_FLOAT32 && change != 0)) {
            if (IS_FLOAT32 && !exact) rescale[0] = rescale[1] = 1;
#pragma unroll
            for (int i = 0; i < SUMS; ++i) output[i] *= IS_FLOAT32 ? rescale[i / 2 % 2] * change_factor : rescale[i / 2 % 2];
        }
        if constexpr (HAS_DROPOUT) drop_tile(p, at, s, k0);
        next_tile_desc = await_tile_desc(n + 1);  // its latencies pass while weights are packed
#pragma unroll
        for (int i = 0; i < BLOCK_K / 4; ++i) weights[i] = pack(s[2 * i], s[2 * i + 1]);
        pending = open = true, sum = USUAL || !fresh, fresh = false;
        if (!USUAL) expected = begun && usual ? FULL << 2 * group : NEVER;
        if (HAS_LENGTHS) exist = (int)keys_of(p, at.b) - k0;
    };

    if (PING_PONG && group == MMA_WARPGROUPS - 1) warpgroup_barrier_arrive();
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        const int tile_desc = uniform(next_tile_desc);
        const int k0 = (tile_desc >> 8) * BLOCK_K;
        // Both END and the first tile of an item have the bit FIRST.
        const int asked = tile_desc & (FIRST | 3 << 2 * group);
        if (HAS_SCORE ? pending && begun && usual && asked == FULL << 2 * group : asked == expected) {
            step(Constant<true>{}, Constant<true>{}, n, true, k0);
            continue;
        }
        if (tile_desc & FIRST) fresh = true, begun = false, ++number;
        const int state = tile_desc == END ? (int)EMPTY : tile_desc >> 2 * group & 3;
        // What is pending is done by itself where there are no scores to go with it, or no room for the next item's rows.
        if (pending && (state == EMPTY || (Q_BUFFERS == 1 && fresh))) {
            accumulate(n - 1), accumulated(n - 1);
            expected = NEVER;
        }
        if (fresh && open && !pending) {
            finish(p, item_before(at), base, number - 1, m, l, output, group);
            open = false;
        }
        if (tile_desc == END) break;
        if (state == EMPTY) {
            warpgroup_barrier_sync();
            warpgroup_barrier_arrive();
            keys.consumer_release(n);
            values.consumer_wait(n);
            values.consumer_release(n);
            next_tile_desc = await_tile_desc(n + 1);
        } else if (pending) {
            step(Constant<true>{}, Constant<false>{}, n, state == FULL, k0);
        } else {
            step(Constant<false>{}, Constant<false>{}, n, state == FULL, k0);
        }
    }
}

// Ones in the chunk after those of V, by all threads of a block.
DEVICE void fill_ones(unsigned target) {
    for (int i = threadIdx.x; i < CHUNK / VEC_BYTES; i += THREADS)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(target + i * VEC_BYTES), "r"(pack(1.0f, 1.0f)) : "memory");
    fence_proxy_async();
}

// --- roles ------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
             const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        Pipeline<Q_BUFFERS>{base + AT_Q_PIPE, base + AT_Q_PIPE + 8 * Q_BUFFERS}.init(1, 1);
        Pipeline<STAGES>{base + AT_K_PIPE, base + AT_K_PIPE + 8 * STAGES}.init(1, 4 * MMA_WARPGROUPS);
        Pipeline<STAGES>{base + AT_V_PIPE, base + AT_V_PIPE + 8 * STAGES}.init(1, 4 * MMA_WARPGROUPS);
        Pipeline<2>{base + AT_LIST_PIPE, base + AT_LIST_PIPE + 16}.init(1, 1);
        mbarrier_init(base + AT_SOON, 1);
        for (int i = 0; i < MMA_WARPGROUPS * Q_BUFFERS; ++i) mbarrier_init(base + AT_DONE + 8 * i, 4);
        fence_mbarrier_init();
    }
    if (ROW_SUM_BY_MMA) fill_ones(base + AT_ONES);
    griddepcontrol_wait(), griddepcontrol_launch_dependents();
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        Chunk* found = reinterpret_cast<Chunk*>(shared + AT_LISTS);
        if (warp == 2) find(p, base, found, p.tile_counter);
        else if (warp == 0 && elect_one()) load(p, q_map, k_map, v_map, base, found);
        else if (warp == 1 && elect_one()) store(p, out_map, base);
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        if constexpr (EXACT) multiply_float32(p, base, role - 1);
        else consumer(p, base, role - 1);
    }
}
