// Score modifications of a known form, gain * f(rate * s) + bias (cuda_common/form.py): of tiles whose pairs are all visible
// the exponents of weights are taken from the products as they come, by an instruction or two for each part.
#pragma once
#include "common/positions.cuh"

constexpr bool BY_FORM = HAS_SCORE && FORMED && POSITIONS != ANY && !IS_FLOAT32;
constexpr bool SCALED = BY_FORM && EVEN && !BIASED;  // tanh or nothing, times a number that is the same for all

// Of a row and the keys of a tile. What depends on the score alone, and the bias, in base 2: at the lane's first key, and from
// key to key.
struct Line {
    float gain, rate, first, step;
    float slope;  // of the modified score, but for that of f
};

// Lines of a lane's rows row_of(i, half), which may be past the last of `rows`; a warp has SPAN of them one after the other, from
// `row0` on. key: the lane's first among the tile's KEYS keys, which begin at k0. False where the bias does not grow evenly from
// key to key within the tile, for a row of this warp.
template <int KEYS, int SPAN, int PACK_GQA, int TILES, typename F>
DEVICE bool lines_of(const Params& p, int b, int h, long long offset, int rows, int row0, int k0, int key,
                   Line (&line)[TILES][2], F row_of) {
    constexpr bool ALIKE = DIAGONAL && PACK_GQA == 1;  // a step along a row is one from row to row, the other way
    const float scale = (float)p.softmax_scale;
    bool straight = true;
    float step = 0, corner = 0;
    if (SLOPED && ALIKE) {
        const start q0 = (start)(row0 + offset);
        const Head numbers = head_of(b, h, p);
        corner = score_bias<position>(b, h, row0, q0 + (SPAN - 1), numbers, k0, p) * LOG2E;
        const float last = score_bias<position>(b, h, row0, q0, numbers, k0 + KEYS - 1, p) * LOG2E;
        step = last == corner ? 0.0f : (last - corner) * (1.0f / (KEYS + SPAN - 2));
        straight = bias_is_straight<position>(b, h, row0, q0, numbers, k0 - (SPAN - 1), k0 + KEYS - 1, p);
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Line& at = line[i][half];
            const int own = row_of(i, half), index = own < rows ? own : rows - 1, row = index / PACK_GQA, head = h + index % PACK_GQA;
            const start q = (start)(row + offset);
            const Head numbers = head_of(b, head, p);
            const float gain = score_gain<position>(b, head, row, q, numbers, p);
            const float rate = CAPPED ? score_rate<position>(b, head, row, q, numbers, p) : 1.0f;
            at.gain = gain * (CAPPED ? LOG2E : scale * LOG2E), at.rate = rate * scale, at.slope = gain * rate;
            if (SLOPED && ALIKE) {
                at.first = fmaf(step, (float)(SPAN - 1 - (own - row0) + key), corner), at.step = step;
            } else {
                at.first = score_bias<position>(b, head, row, q, numbers, k0, p) * LOG2E, at.step = 0;
                if constexpr (SLOPED) {
                    const float last = score_bias<position>(b, head, row, q, numbers, k0 + KEYS - 1, p) * LOG2E;
                    at.step = last == at.first ? 0.0f : (last - at.first) * (1.0f / (KEYS - 1));
                    at.first = fmaf(at.step, (float)key, at.first);
                    straight &= bias_is_straight<position>(b, head, row, q, numbers, k0, k0 + KEYS - 1, p);
                }
            }
        }
    return !SLOPED || __all_sync(~0u, straight);
}

// The exponent of a product's weight, `keys` past the lane's first; `slope`: of the modified score.
DEVICE float formed(float x, const Line& line, int keys, float& slope) {
    const float bias = SLOPED ? fmaf(line.step, (float)keys, line.first) : line.first;
    slope = line.slope;
    if constexpr (!CAPPED) return fmaf(x, line.gain, bias);
    const float f = tanh_of(x * line.rate);
    slope *= fmaf(-f, f, 1.0f);
    return fmaf(f, line.gain, bias);
}
