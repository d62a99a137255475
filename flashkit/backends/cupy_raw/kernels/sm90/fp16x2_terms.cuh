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
    high = pack_f16(x, y);
    if constexpr (NUM_TERMS == 2)
        low = pack_f16(x - widen(half_t{(unsigned short)high}), y - widen(half_t{(unsigned short)(high >> 16)}));
}

// --- rows of float32 -------------------------------------------------------------------------------------------------
//
// Reads float32 rows four columns at a time.

// Columns column ... column + 3 of token `first` and every DOWN-th after it, up to token count - 1; zeros elsewhere.
template <int DIM, int DOWN, int STEPS>
DEVICE void load_rows(float (&x)[STEPS][4], const Tensor& tensor, int b, int h, int first, int count, int column) {
    const bool aligned = DIM % 4 == 0 && (((unsigned long long)tensor.data >> 2 | tensor.batch | tensor.head |
                                           tensor.token) & 3) == 0;
    const float* source = row_at<const float>(tensor, b, h, first) + column;
    const long long step = DOWN * tensor.token;
    UNROLL(i, STEPS) {
        UNROLL(c, 4) x[i][c] = 0;
        if (first + DOWN * i < count) {
            if (aligned) {
                if (column < DIM) {
                    const float4 four = *reinterpret_cast<const float4*>(source + i * step);
                    x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
                }
            } else {
                UNROLL(c, 4)
                    if (column + c < DIM) x[i][c] = source[i * step + c];
            }
        }
    }
}
