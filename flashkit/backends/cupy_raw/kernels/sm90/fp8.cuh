// FP8: elements of Q, K and V as codes of e4m3 (Micikevicius et al. 2022, arXiv 2209.05433), which scales make numbers
// of.
#pragma once
#include "sm90/instructions.cuh"
#include "common/positions.cuh"

struct e4m3_t { unsigned char bits; };  // sign, 4 bits of exponent with the bias 7, 3 of mantissa; no infinity

using operand = Select<FP8, e4m3_t, storage>::type;  // an element of Q, K and V

DEVICE float widen(e4m3_t x) {
    const int exponent = x.bits >> 3 & 15, mantissa = x.bits & 7;
    const float size = (float)(exponent > 0 ? 8 + mantissa : mantissa),
        step = __int_as_float(127 - 10 + (exponent > 0 ? exponent : 1) << 23);
    return (x.bits & 127) == 127 ? (float)fk_special(0) : x.bits & 128 ? -size * step : size * step;
}

// Four numbers to codes, the first in the lowest byte. What exceeds the greatest number, 448, becomes it.
DEVICE unsigned pack_e4m3(float x0, float x1, float x2, float x3) {
    unsigned codes;
    asm("{ .reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high}; }" : "=r"(codes) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return codes;
}

// The scale of query n or of key n; 1 where elements have none.
DEVICE float scale_of(const Tensor& scales, int b, int h, int n) {
    return FP8 ? *row_at<const float>(scales, b, h, n) : 1.0f;
}
