// Forward pass (FlashAttention-2, Dao 2023, arXiv 2307.08691, Algorithm 1; warp groups with roles and softmax beside
// products as in FlashAttention-3, Shah et al. 2024, arXiv 2407.08608) for Hopper. docs/hopper.md walks through it.
//
// As many blocks as multiprocessors take items one after the other, each BLOCK_Q rows of a head. With PACK > 1 a row is one
// of the PACK query heads that share a key/value head, at one token.
//
//     Q, then O   [Q_BUFFERS][GROUPS][64][..]   shared memory, an item's rows; its output on the way out
//     K, V        [STAGES][BLOCK_K][..]         shared memory, two rings
//     S, P        [64][BLOCK_K]                 registers of a warp group
//     O           [64][HEAD_DIM_V]              registers of a warp group, unscaled
//     m, l        [64]                          a row's reference, in base 2, and its sum of weights: registers
//
// Warp group 0: warp 0 finds the tiles and loads them, warp g stores the output of group g. Warp groups 1 ... GROUPS, with
// 64 rows each, multiply. A step of such a group, for the tile of keys number n of all that the block loads:
//
//     scores      S = Q K_n^T          is begun,
//     accumulate  O += P V             of the tile before is begun,
//     modify, online_softmax           S becomes weights while the second product runs,
//     and the first tile of an item is begun before the last item is finished.
//
// Constants of the head: BLOCK_K, GROUPS, STAGES, Q_BUFFERS, PACK, TURNS, REGISTERS, REGISTERS_LOADING, WATCHDOG,
// HAS_LENGTHS, SMALL_SCORE (modify.is_small).
#include "sm90.cuh"

constexpr int BLOCK_Q = 64 * GROUPS, THREADS = 128 * (GROUPS + 1), COLUMNS = padded(HEAD_DIM_V);
constexpr int BYTES_Q = 64 * CHUNK_ROW * larger(chunks(HEAD_DIM), chunks(HEAD_DIM_V));
constexpr int BYTES_K = BLOCK_K * CHUNK_ROW * chunks(HEAD_DIM), BYTES_V = BLOCK_K * CHUNK_ROW * chunks(HEAD_DIM_V);
constexpr int AT_K = Q_BUFFERS * GROUPS * BYTES_Q, AT_V = AT_K + STAGES * BYTES_K, AT_BARRIERS = AT_V + STAGES * BYTES_V;
constexpr int AT_Q_RING = AT_BARRIERS, AT_K_RING = AT_Q_RING + 16 * Q_BUFFERS, AT_V_RING = AT_K_RING + 16 * STAGES;
constexpr int AT_DONE = AT_V_RING + 16 * STAGES;   // a barrier for each group: its output is in shared memory
constexpr int AT_NOTES = AT_DONE + 8 * GROUPS;     // for each stage of K: tile << 8 | first of its item << 6 | states of the groups
constexpr int AT_ITEMS = AT_NOTES + 4 * STAGES;    // for each buffer of Q: an Item
constexpr int AT_LIST = AT_ITEMS + 12 * Q_BUFFERS;
constexpr int FIRST = 64, END = -1;
enum NamedBarrier { TURN = 1, MEETING = TURN + GROUPS };  // of each group

// Weights up to this much above the reference are taken as they come: they fit the type that they are rounded to.
constexpr float LIMIT = STORAGE == FLOAT16 ? 32768.0f : 1e18f;

// A hidden pair has the weight 0, but 0 times NaN is NaN: see finish().
constexpr bool MAY_HIDE = HAS_MASK || HAS_SCORE || HAS_DROPOUT;

struct Item { int b, h, row0; };  // h: the first of PACK heads

// --- which work -------------------------------------------------------------------------------------------------------

DEVICE int items_of(const Params& p) {
    return (int)((p.n_q * PACK + BLOCK_Q - 1) / BLOCK_Q * (p.heads / PACK) * p.batch);
}

// Item number `index`. With a mask: tiles with most to do first, of p.splits heads at a time; of those with least to do a
// quarter is left to the end, where they even out when blocks finish. Else one head after the other, the ragged tiles last.
DEVICE Item item_of(const Params& p, int index) {
    const int heads = (int)p.heads / PACK, all = heads * (int)p.batch, rows = (int)p.n_q * PACK;
    const int tiles = (rows + BLOCK_Q - 1) / BLOCK_Q;
    int tile, bh;
    if constexpr (HAS_MASK) {
        const int early = tiles - tiles / 4, most = (int)p.splits;
        if (index < early * all) {
            const int first = index / (most * early) * most, rest = index - first * early;
            const int size = all - first < most ? all - first : most;
            tile = rest / size, bh = first + rest - tile * size;
        } else {
            tile = index / all, bh = index - tile * all;
        }
        tile = tiles - 1 - tile;
    } else {
        const int whole = rows / BLOCK_Q;
        if (index < whole * all) bh = index / whole, tile = index - bh * whole;
        else bh = index - whole * all, tile = whole;
    }
    return {bh / heads, bh % heads * PACK, tile * BLOCK_Q};
}

// A lane's row among the 64 of its warp group.
DEVICE int row_of_lane(int half) { return threadIdx.x % 128 / 32 * 16 + 8 * half + threadIdx.x % 32 / 4; }

// --- loading ----------------------------------------------------------------------------------------------------------

// States of the groups' rows and keys k0 ... k0 + BLOCK_K - 1 (times `many`), two bits a group; a tile that is not whole is PARTIAL.
DEVICE unsigned states_of(const Params& p, const Item& at, int n_k, int tile, int many) {
    const int rows = (int)p.n_q * PACK, k0 = tile * BLOCK_K, whole = k0 + many * BLOCK_K, k1 = whole < n_k ? whole : n_k;
    const long long offset = offset_of(p, at.b);
    auto look = [&](int row0, int row1) {
        const int from = row0 / PACK, to = (row1 + PACK - 1) / PACK;
        int state = tile_state(p, at.b, at.h, offset, from, to, k0, k1);
#pragma unroll 1
        for (int other = 1; HAS_MASK && other < PACK; ++other)
            if (state != tile_state(p, at.b, at.h + other, offset, from, to, k0, k1)) state = PARTIAL;
        return state == FULL && whole > n_k ? (int)PARTIAL : state;
    };
    const int end = at.row0 + BLOCK_Q < rows ? at.row0 + BLOCK_Q : rows;
    const int all = look(at.row0, end);
    unsigned states = 0;
#pragma unroll 1
    for (int g = 0; g < GROUPS; ++g) {
        const int row0 = at.row0 + 64 * g, row1 = row0 + 64 < end ? row0 + 64 : end;
        int state = row0 < end ? all : (int)EMPTY;
        if (HAS_MASK && state == PARTIAL && many == 1) state = look(row0, row1);
        states |= state << 2 * g;
    }
    return states;
}

DEVICE void load(const Params& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map, unsigned base,
                 TileList& list, unsigned* ticket) {
    const Ring<Q_BUFFERS> queries{base + AT_Q_RING, base + AT_Q_RING + 8 * Q_BUFFERS};
    const Ring<STAGES> keys{base + AT_K_RING, base + AT_K_RING + 8 * STAGES}, values{base + AT_V_RING, base + AT_V_RING + 8 * STAGES};
    const bool leader = threadIdx.x == 0;
    const int items = items_of(p);
    unsigned n = 0;
    int index = blockIdx.x, value_tile = 0, value_head = 0, value_b = 0;
    auto load_values = [&]() {  // of tile n - 1
        values.wait_empty(n - 1);
        const unsigned stage = (n - 1) % STAGES, full = values.full + 8 * stage;
        arrive_and_expect(full, BYTES_V);
        load_tile<1, HEAD_DIM_V, BLOCK_K>(base + AT_V + stage * BYTES_V, v_map, value_tile * BLOCK_K, value_head, value_b, full);
    };
    for (unsigned number = 0;; ++number) {
        const unsigned buffer = number % Q_BUFFERS, slot = base + AT_ITEMS + 12 * buffer;
        if (index >= items) {  // the others are told to stop
            if (leader) {
                if (n > 0) load_values();
                keys.wait_empty(n);
                store_word(base + AT_NOTES + 4 * (n % STAGES), END);
                arrive(keys.full + 8 * (n % STAGES));
                queries.wait_empty(number);
                store_word(slot, END);
                arrive(queries.full + 8 * buffer);
            }
            break;
        }
        const Item at = item_of(p, index);
        const int n_k = (int)keys_of(p, at.b);
        if (leader) index = atomicAdd(ticket, 1) + gridDim.x;
        const int tiles = (n_k + BLOCK_K - 1) / BLOCK_K;
        int next = 0, first = FIRST;
        unsigned seen;
        auto look = [&](int place, int many) { return states_of(p, at, n_k, tiles - place - many, many); };  // the last keys first
        int count = fill(list, next, tiles, seen, look);
        // Groups that see nothing take a tile all the same, where everything is hidden from them.
        unsigned blind = 0;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) blind |= (seen >> 2 * g & 3) == EMPTY ? PARTIAL << 2 * g : 0;
        if (count == 0) {
            if (leader) list.entry[0] = (tiles - 1) << 8;  // tile 0
            __syncwarp();
            count = 1;
        }
        do {
            if (leader) {
#pragma unroll 1
                for (int i = 0; i < count; ++i) {
                    const int entry = list.entry[i], tile = tiles - 1 - (entry >> 8);
                    const unsigned stage = n % STAGES, full = keys.full + 8 * stage;
                    keys.wait_empty(n);
                    store_word(base + AT_NOTES + 4 * stage, tile << 8 | first | (entry & 63) | blind);
                    arrive_and_expect(full, BYTES_K);
                    load_tile<1, HEAD_DIM, BLOCK_K>(base + AT_K + stage * BYTES_K, k_map, tile * BLOCK_K, at.h / GROUP, at.b, full);
                    if (n > 0) load_values();
                    value_tile = tile, value_head = at.h / GROUP, value_b = at.b;
                    ++n;
                    if (first) {
                        queries.wait_empty(number);
                        store_word(slot, at.b), store_word(slot + 4, at.h), store_word(slot + 8, at.row0);
                        const unsigned filled = queries.full + 8 * buffer;
                        arrive_and_expect(filled, GROUPS * 64 * CHUNK_ROW * chunks(HEAD_DIM));
#pragma unroll 1
                        for (int g = 0; g < GROUPS; ++g)
                            load_tile<PACK, HEAD_DIM, 64>(base + (buffer * GROUPS + g) * BYTES_Q, q_map, (at.row0 + 64 * g) / PACK,
                                                    at.h / PACK, at.b, filled);
                        first = 0, blind = 0;
                    }
                }
            }
            count = fill(list, next, tiles, seen, look);
        } while (count > 0);
        index = uniform(index);
    }
    if (leader && atomicAdd(ticket + 1, 1u) == gridDim.x - 1) ticket[0] = 0, ticket[1] = 0;  // as they were found
}

// --- storing ----------------------------------------------------------------------------------------------------------

DEVICE void store(const Params& p, const TensorMap& out_map, unsigned base, int group) {
    const Ring<Q_BUFFERS> queries{base + AT_Q_RING, base + AT_Q_RING + 8 * Q_BUFFERS};
#pragma unroll 1
    for (unsigned number = 0;; ++number) {
        const unsigned buffer = number % Q_BUFFERS, slot = base + AT_ITEMS + 12 * buffer;
        queries.wait_full(number);
        const Item item{load_word(slot), load_word(slot + 4), load_word(slot + 8) + 64 * group};
        if (item.b == END) break;
        wait_patiently(base + AT_DONE + 8 * group, number & 1);
        if (item.row0 < (int)p.n_q * PACK) {
#pragma unroll
            for (int c = 0; c < chunks(HEAD_DIM_V); ++c)
                store_box<PACK>(out_map, {64 * c, item.row0 / PACK, item.h / PACK, item.b},
                          base + (buffer * GROUPS + group) * BYTES_Q + c * 64 * CHUNK_ROW);
        }
        stores_end();
        stores_wait_read();
        arrive(queries.empty + 8 * buffer);
    }
    stores_wait();
}

// --- multiplying ------------------------------------------------------------------------------------------------------

// What scores are multiplied by to be in base 2; where there is a score modification they are scaled before it.
DEVICE float base_2(const Params& p) { return HAS_SCORE ? LOG2E : (float)(p.scale * 1.4426950408889634); }

constexpr long long FAR = 1 << 26;

// Scores as they come from the product, modified; -inf where hidden. Rows past the end are taken for the last one.
template <bool PARTIAL_TILE, typename POSITION>
DEVICE void modify_tile(const Params& p, const Item& at, long long offset, float (&s)[BLOCK_K / 2], int k0) {
    const int n_k = (int)keys_of(p, at.b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int own = here(at.row0) + row_of_lane(half), last = (int)p.n_q * PACK - 1, index = own < last ? own : last;
        const int row = index / PACK, h = at.h + index % PACK;
        const POSITION q = (POSITION)(row + offset);
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                const int k = k0 + 8 * n + threadIdx.x % 4 * 2 + c;
                if (HAS_SCORE) x *= (float)p.scale;
                if (!PARTIAL_TILE || k < n_k) x = modify<PARTIAL_TILE, POSITION>(x, at.b, h, row, q, k, p);
                else x = HIDDEN;
            }
    }
}

DEVICE void modify_tile(const Params& p, const Item& at, bool full, float (&s)[BLOCK_K / 2], int k0) {
    if (!HAS_SCORE && full) return;
    asm volatile("" : "+r"(k0));  // or what depends on k0 alone is computed for every tile, needed or not
    const long long offset = offset_of(p, at.b);
    // Whether 32 bits do for positions and what is computed from them. Asked as a vote, whose outcome is known to be the
    // same in all lanes.
    const bool narrow = __all_sync(~0u, SMALL_SCORE && offset >= -FAR && offset + p.n_q < FAR && p.n_k < FAR);
    if (!(HAS_SCORE || HAS_MASK) || narrow) {
        if (HAS_SCORE && full) modify_tile<false, int>(p, at, offset, s, k0);
        else modify_tile<true, int>(p, at, offset, s, k0);
    } else {
        modify_tile<true, long long>(p, at, offset, s, k0);
    }
}

// Scores to weights relative to the greatest so far; returns what that takes for sums made before. sum: of the weights.
DEVICE void online_softmax(float (&s)[BLOCK_K / 2], float (&m)[2], float (&sum)[2], float (&rescale)[2], float unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float top = m[half];
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x *= unit;
                top = fmaxf(top, x);
            }
        top = across_lanes(top, [](float x, float y) { return fmaxf(x, y); });
        const float shift = top == HIDDEN ? 0.0f : top;  // so that -inf stays -inf
        rescale[half] = exp2_fast(m[half] - shift);
        m[half] = top;
        float total[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x = exp2_fast(x - shift);
                total[c] += x;
            }
        sum[half] = total[0] + total[1];
    }
}

// The same without looking for the greatest: m need not be that, only near it. False where it is not near enough (or a
// score is NaN): then the scores are needed anew.
DEVICE bool optimistic_softmax(float (&s)[BLOCK_K / 2], const float (&m)[2], float (&sum)[2], float unit) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float total[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = s[4 * n + 2 * half + c];
                x = exp2_fast(fmaf(x, unit, -m[half]));
                total[c] += x;
            }
        sum[half] = total[0] + total[1];
    }
    return __all_sync(~0u, sum[0] <= LIMIT && sum[1] <= LIMIT);
}

DEVICE void drop_tile(const Params& p, const Item& at, float (&s)[BLOCK_K / 2], int k0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half);
#pragma unroll
        for (int n = 0; n < BLOCK_K / 8; ++n)
            drop_pair(s[4 * n + 2 * half], s[4 * n + 2 * half + 1], p, at.b, at.h + index % PACK, index / PACK,
                      k0 + 8 * n + threadIdx.x % 4 * 2);
    }
}

// Scores of a warp's 16 rows by instructions of the warp alone. q, k: its tiles in shared memory.
DEVICE void scores_again(float (&s)[BLOCK_K / 2], unsigned q, unsigned k) {
    const int lane = here(threadIdx.x % 32), row = here(threadIdx.x % 128 / 32) * 16 + lane % 16, key = lane / 16 * 8 + lane % 8;
    const float zero = __int_as_float(here(0));
#pragma unroll
    for (int i = 0; i < BLOCK_K / 2; ++i) s[i] = zero;
#pragma unroll 1
    for (int step = 0; step < padded(HEAD_DIM) / 16; ++step) {
        const int chunk = step / 4, unit = step % 4 * 2;
        unsigned left[4];
        load_matrices(left, q + chunk * 64 * CHUNK_ROW + swizzled(row, unit + lane / 16));
#pragma unroll
        for (int n = 0; n < BLOCK_K / 16; ++n) {
            unsigned right[4];
            load_matrices(right, k + (chunk * BLOCK_K + 16 * n) * CHUNK_ROW + swizzled(key, unit + lane / 8 % 2));
            multiply(s + 8 * n, left, right[0], right[1]);
            multiply(s + 8 * n + 4, left, right[2], right[3]);
        }
    }
}

// Output of a warp's 16 rows once more, from memory and pair by pair, leaving out the values of weights that are 0. No
// branch here differs between lanes, or the compiler would take nothing after it as uniform.
DEVICE void accumulate_carefully(const Params& p, const Item& at, const float (&m)[2], const float (&factor)[2], unsigned staged) {
    constexpr int OWN = (HEAD_DIM_V + 31) / 32;  // columns of a lane
    const int lane = here(threadIdx.x % 32), row0 = here(uniform(threadIdx.x % 128 / 32)) * 16;
    const int n_k = uniform((int)keys_of(p, at.b)), last = (int)p.n_q * PACK - 1;
    const long long offset = offset_of(p, at.b);
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
        const int index = at.row0 + row0 + r < last ? at.row0 + row0 + r : last, row = index / PACK, h = at.h + index % PACK;
        const float reference = __shfl_sync(~0u, r < 8 ? m[0] : m[1], r % 8 * 4);
        const float scale = __shfl_sync(~0u, r < 8 ? factor[0] : factor[1], r % 8 * 4);
        const storage* q = row_at<const storage>(p.q, at.b, h, row);
        float sums[OWN] = {};
#pragma unroll 1
        for (int k0 = 0; k0 < n_k; k0 += 32) {
            const int k = k0 + lane < n_k ? k0 + lane : n_k - 1;
            const storage* key = row_at<const storage>(p.k, at.b, h / GROUP, k);
            float w = 0;
#pragma unroll 1
            for (int d = 0; d < HEAD_DIM; ++d) w += widen(q[d]) * widen(key[d]);
            w = modify<true>(w * (float)p.scale, at.b, h, row, row + offset, k, p);
            w = exp2_fast(fmaf(w, LOG2E, -reference));
            if constexpr (HAS_DROPOUT) w = drop(w, p, at.b, h, row, k);
#pragma unroll 1
            for (int other = 0; other < 32; ++other) {
                const int from = k0 + other < n_k ? k0 + other : n_k - 1;
                const float weight = k0 + other < n_k ? __shfl_sync(~0u, w, other) : 0.0f;
                const storage* value = row_at<const storage>(p.v, at.b, h / GROUP, from);
#pragma unroll
                for (int i = 0; i < OWN; ++i) {
                    const float x = widen(value[lane + 32 * i < HEAD_DIM_V ? lane + 32 * i : 0]);
                    sums[i] += weight == 0 ? 0.0f : weight * x;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int column = lane + 32 * i;
            const unsigned target = staged + column / 64 * 64 * CHUNK_ROW + swizzled(row0 + r, column % 64 / 8) + column % 8 * 2;
            asm volatile("st.shared.b16 [%0], %1;" ::"r"(target), "h"((unsigned short)pack(sums[i] * scale, 0.0f)) : "memory");
        }
    }
}

// Divide by the sums; log-sum-exp to memory, output to shared memory.
DEVICE void finish(const Params& p, const Item& item, const float (&m)[2], const float (&l)[2], float (&output)[COLUMNS / 2],
                   unsigned staged, unsigned done, int group) {
    const Item at{here(item.b), here(item.h), here(item.row0)};
    float factor[2];
    bool odd = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int index = at.row0 + row_of_lane(half), row = index / PACK, h = at.h + index % PACK;
        float top = m[half], sum = across_lanes(l[half], [](float x, float y) { return x + y; });
        factor[half] = 1;
        const bool exists = index < (int)p.n_q * PACK;
        if (HAS_SINKS && exists) {  // one more logit in the sum, without a value
            const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E;
            if (sink != HIDDEN) {
                top = fmaxf(top, sink);
                factor[half] = exp2_fast(m[half] - top);
                sum = sum * factor[half] + exp2_fast(sink - top);
            }
        }
        const bool empty = sum == 0;  // no key is visible
        factor[half] = empty ? 0.0f : factor[half] / sum;
        if (exists && threadIdx.x % 4 == 0)
            *row_at<float>(p.lse, at.b, h, row) = empty ? HIDDEN : fmaf(top, LN2, logf(sum));
        float zero = 0;  // NaN if an element is not finite
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float& x = output[4 * n + 2 * half + c];
                if (MAY_HIDE) zero = fmaf(x, 0.0f, zero);
                x *= factor[half];
            }
        odd |= zero != 0 && is_finite(sum) && exists;
    }
    warps_sync(MEETING + group, 128);  // all are done with Q
    const int lane = here(threadIdx.x % 32), row = here(threadIdx.x % 128 / 32) * 16 + lane % 16;
#pragma unroll
    for (int n = 0; n < COLUMNS / 8; n += 2) {
        const float* x = output + 4 * n;
        store_matrices<false>(staged + n / 8 * 64 * CHUNK_ROW + swizzled(row, n % 8 + lane / 16), pack(x[0], x[1]),
                              pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    }
    // A value that is not finite may have met a weight of 0.
    if (MAY_HIDE && __any_sync(~0u, odd)) {
        __syncwarp();
        accumulate_carefully(p, at, m, factor, staged);
    }
    fence_async();
    __syncwarp();
    arrive_once(done);
}

DEVICE void multiply_tiles(const Params& p, unsigned base, int group) {
    const Ring<Q_BUFFERS> queries{base + AT_Q_RING, base + AT_Q_RING + 8 * Q_BUFFERS};
    const Ring<STAGES> keys{base + AT_K_RING, base + AT_K_RING + 8 * STAGES}, values{base + AT_V_RING, base + AT_V_RING + 8 * STAGES};
    const unsigned done = base + AT_DONE + 8 * group;
    const float unit = __int_as_float(uniform(__float_as_int(base_2(p))));  // or it is computed anew, in float64
    float output[COLUMNS / 2], s[BLOCK_K / 2], m[2], l[2];
    unsigned weights[BLOCK_K / 4];
    Item at;                     // the item whose output is in registers,
    bool open = false;           // if there is one,
    bool begun = false;          // and whether all rows of this warp have a reference
    bool fresh = false;          // whether the tile that comes is the first of another item
    int number = -1;             // of the item that the tile belongs to among the block's
    bool pending = false;        // whether weights of the tile before wait for their values,
    int sum = 0, exist = 0;      // to be added to the output (sum), not to start it; keys of that tile that exist

    auto buffer_of = [&](int number) { return base + (number % Q_BUFFERS * GROUPS + group) * BYTES_Q; };
    auto take_turn = [&]() { if (TURNS) warps_sync(TURN + group, 256); };
    auto pass_turn = [&]() { if (TURNS) warps_arrive(TURN + (group + 1 == GROUPS ? 0 : group + 1), 256); };
    auto scores = [&](unsigned n) {
        const unsigned long long q = descriptor(buffer_of(number)), k = descriptor(base + AT_K + n % STAGES * BYTES_K);
        products_begin();
        product_fresh<0, 0>(s, q, k);
#pragma unroll
        for (int step = 1; step < padded(HEAD_DIM) / 16; ++step)
            product<0, 0>(s, q + along_rows(step, 64), k + along_rows(step, BLOCK_K), 1);
        products_end();
    };
    auto accumulate = [&](unsigned n) {
        const unsigned stage = base + AT_V + n % STAGES * BYTES_V;
        const unsigned long long v = descriptor(stage, BLOCK_K * CHUNK_ROW);
        values.wait_full(n);
        if (HAS_LENGTHS && exist < BLOCK_K) {  // what lies past the length must not matter
            clear_rows<HEAD_DIM_V, BLOCK_K>(stage, exist);
            warps_sync(MEETING + group, 128);
        }
        products_begin();
#pragma unroll
        for (int step = 0; step < BLOCK_K / 16; ++step)
            product_weights<1>(output, weights, 4 * step, v + along_columns(step), step > 0 ? 1 : sum);
        products_end();
    };
    auto accumulated = [&](unsigned n) {
        products_wait<0>();
        settle(output), settle(weights);
        values.release(n);
        pending = false;
    };
    // Tile n from its scores to its weights. PENDING: meanwhile the product of the weights before. USUAL: all rows of this
    // warp have a reference, and all pairs are visible. Both have to be known to the compiler, or it makes products wait
    // for each other.
    auto step = [&](auto with_pending, auto is_usual, unsigned n, bool full, int k0) {
        constexpr bool PENDING = decltype(with_pending)::value, USUAL = decltype(is_usual)::value;
        const Item before = at;
        const float m_before[2] = {m[0], m[1]}, l_before[2] = {l[0], l[1]};
        if (!USUAL && fresh) {
            queries.wait_full(number);
            const unsigned slot = base + AT_ITEMS + 12 * (number % Q_BUFFERS);
            at = {uniform(load_word(slot)), uniform(load_word(slot + 4)), uniform(load_word(slot + 8)) + 64 * group};
            m[0] = m[1] = HIDDEN, l[0] = l[1] = 0;
        }
        take_turn();
        scores(n);
        if (PENDING) accumulate(n - 1);
        pass_turn();
        products_wait<PENDING>();
        settle(s);
        float total[2], rescale[2];
        modify_tile(p, at, USUAL || full, s, k0);
        const bool exact = !(USUAL && optimistic_softmax(s, m, total, unit));
        if (exact) {
            if (USUAL) {  // the optimism was misplaced, and has cost the scores
                scores_again(s, buffer_of(number), base + AT_K + n % STAGES * BYTES_K);
                modify_tile(p, at, true, s, k0);
            }
            online_softmax(s, m, total, rescale, unit);
            l[0] *= rescale[0], l[1] *= rescale[1];
            begun = __all_sync(~0u, m[0] != HIDDEN && m[1] != HIDDEN);
        }
        l[0] += total[0], l[1] += total[1];
        keys.release(USUAL ? n : n + after(total[0]) + after(total[1]));  // or exponentials are computed after the next wait
        if (PENDING) accumulated(n - 1);
        if (!USUAL && fresh) {
            if (PENDING && Q_BUFFERS > 1) finish(p, before, m_before, l_before, output, buffer_of(number - 1), done, group);
        } else if (exact) {
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) output[i] *= rescale[i / 2 % 2];
        }
        if constexpr (HAS_DROPOUT) drop_tile(p, at, s, k0);
#pragma unroll
        for (int i = 0; i < BLOCK_K / 4; ++i) weights[i] = pack(s[2 * i], s[2 * i + 1]);
        pending = open = true, sum = USUAL || !fresh, fresh = false;
        if (HAS_LENGTHS) exist = (int)keys_of(p, at.b) - k0;
    };

    if (TURNS && group == GROUPS - 1) pass_turn();
#pragma unroll 1
    for (unsigned n = 0;; ++n) {
        keys.wait_full(n);
        const int note = uniform(load_word(base + AT_NOTES + 4 * (n % STAGES)));
        const int k0 = (note >> 8) * BLOCK_K;
        // Both END and the first tile of an item have the bit FIRST.
        if (pending && begun && (note & (FIRST | 3 << 2 * group)) == FULL << 2 * group) {
            step(Constant<true>{}, Constant<true>{}, n, true, k0);
            continue;
        }
        if (note & FIRST) fresh = true, begun = false, ++number;
        const int state = note == END ? (int)EMPTY : note >> 2 * group & 3;
        // What is pending is done by itself where there are no scores to go with it, or no room for the next item's rows.
        if (pending && (state == EMPTY || (Q_BUFFERS == 1 && fresh))) accumulate(n - 1), accumulated(n - 1);
        if (fresh && open && !pending) {
            finish(p, at, m, l, output, buffer_of(number - 1), done, group);
            open = false;
        }
        if (note == END) break;
        if (state == EMPTY) {
            take_turn();
            pass_turn();
            keys.release(n);
            values.wait_full(n);
            values.release(n);
        } else if (pending) {
            step(Constant<true>{}, Constant<false>{}, n, state == FULL, k0);
        } else {
            step(Constant<false>{}, Constant<false>{}, n, state == FULL, k0);
        }
    }
}

// --- roles ------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sm90_forward(KERNEL_PARAMS, const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
             const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap out_map) {
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned base = uniform(address_of(shared));
    if (threadIdx.x == 0) {
        Ring<Q_BUFFERS>{base + AT_Q_RING, base + AT_Q_RING + 8 * Q_BUFFERS}.init(1, GROUPS);
        Ring<STAGES>{base + AT_K_RING, base + AT_K_RING + 8 * STAGES}.init(1, 4 * GROUPS);
        Ring<STAGES>{base + AT_V_RING, base + AT_V_RING + 8 * STAGES}.init(1, 4 * GROUPS);
        for (int g = 0; g < GROUPS; ++g) barrier_init(base + AT_DONE + 8 * g, 4);
        barriers_ready();
    }
    __syncthreads();
    const int role = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
    if (role == 0) {
        give_registers<REGISTERS_LOADING>();
        if (warp == 0) load(p, q_map, k_map, v_map, base, *reinterpret_cast<TileList*>(shared + AT_LIST), p.ticket);
        else if (warp <= GROUPS && threadIdx.x % 32 == 0) store(p, out_map, base, warp - 1);
    } else {
        take_registers<REGISTERS>();
        multiply_tiles(p, base, role - 1);
    }
}
