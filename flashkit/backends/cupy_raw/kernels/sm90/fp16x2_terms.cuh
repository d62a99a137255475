// float32 as PARTS terms of float16, and the units that they are in: powers of two.
#pragma once

// The unit of numbers whose greatest magnitude has these bits, such that it comes to lie in [2^14, 2^15): 1 for zeros, at
// least 2^-126, NaN where a number is not finite.
DEVICE float unit_of(unsigned greatest) {
    const int exponent = (int)(greatest >> 23);  // with a bias of 127
    if (exponent == 255) return __int_as_float(0x7fffffff);
    return __int_as_float((greatest == 0 ? 127 : exponent > 15 ? exponent - 14 : 1) << 23);
}
DEVICE float inverse_of(float unit) { return __int_as_float((254 - (__float_as_int(unit) >> 23)) << 23); }

DEVICE float exponent_of(float unit) { return (float)((__float_as_int(unit) >> 23) - 127); }

// Two numbers as terms.
DEVICE void split(float x, float y, unsigned& high, unsigned& low) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(y), "f"(x));
    if constexpr (PARTS == 2) {
        const float rest_x = x - widen(half_t{(unsigned short)high}), rest_y = y - widen(half_t{(unsigned short)(high >> 16)});
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(rest_y), "f"(rest_x));
    }
}
