// FP16x2: float32 elements as NUM_TERMS float16 terms under power-of-two scales, x = scale (high + low).
#pragma once

// The scale that brings the greatest magnitude, given by its bits, to [2^14, 2^15): 1 for zeros, at least 2^-126, NaN
// where an element is not finite.
DEVICE float scale_for(unsigned greatest) {
    const int exponent = (int)(greatest >> 23);  // biased by 127
    if (exponent == 255) return __int_as_float(0x7fffffff);
    return __int_as_float((greatest == 0 ? 127 : exponent > 15 ? exponent - 14 : 1) << 23);
}
DEVICE float inverse_of(float scale) { return __int_as_float((254 - (__float_as_int(scale) >> 23)) << 23); }

DEVICE float exponent_of(float scale) { return (float)((__float_as_int(scale) >> 23) - 127); }

// Two scaled elements to packed terms.
DEVICE void to_terms(float x, float y, unsigned& high, unsigned& low) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(y), "f"(x));
    if constexpr (NUM_TERMS == 2) {
        const float rest_x = x - widen(half_t{(unsigned short)high}),
            rest_y = y - widen(half_t{(unsigned short)(high >> 16)});
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(rest_y), "f"(rest_x));
    }
}
