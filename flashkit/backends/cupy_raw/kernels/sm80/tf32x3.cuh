// float32 on tensor cores by TF32, which has 11 significant bits.
//
// TF32x3: with TF32_TERMS = 3 each operand is the sum of two TF32 values, and a product is the sum of the three larger
// of their four products (Ootomo and Yokota 2022, arXiv 2203.03341). The product that is left out, up to 2^-22 of the
// result, averages out in long sums. Tensor cores round their sums towards zero; so each step starts from zero, and
// FADD, which rounds to nearest, adds it to the accumulator.
#pragma once

// The nearest TF32 value.
DEVICE unsigned round_tf32(unsigned x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
}

// A float32 as two TF32 values; the instruction ignores the last 13 bits. Rounding may turn a NaN into 0, which leaves
// the NaN to the low part; the low part of an infinity is NaN, too. Truncation would take an instruction less, but then
// the product of two low parts, which is left out, would be too large.
DEVICE void split_tf32(unsigned x, unsigned& high, unsigned& low) {
    high = (x + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}
