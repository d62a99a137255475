// Attention sinks: a logit of each head that is in the row sum alone.
#pragma once
#include "sm90/instructions.cuh"

// A head's sink, one more logit without a value: the row reference and the row sum with it, and the factor on O.
DEVICE void add_sink(const Params& p, int h, float& reference, float& sum, float& factor) {
    const float sink = static_cast<const float*>(p.sinks)[h] * LOG2E, before = reference;
    if (sink == HIDDEN) return;
    reference = fmaxf(reference, sink);
    factor = exp2_fast(before - reference);
    sum = sum * factor + exp2_fast(sink - reference);
}
