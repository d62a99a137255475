// Scalars: stored elements, the precision of the computation, and the functions that expressions of flashkit.mods.expr
// are rendered to. Needs no header of the toolkit, so NVRTC alone compiles it.
#pragma once

// --- stored elements -------------------------------------------------------------------------------------------------

struct half_t { unsigned short bits; };
struct bfloat16_t { unsigned short bits; };

template <int> struct storage_of { using type = float; using compute = float; };
template <> struct storage_of<FLOAT64> { using type = double; using compute = double; };
template <> struct storage_of<FLOAT16> { using type = half_t; using compute = float; };
template <> struct storage_of<BFLOAT16> { using type = bfloat16_t; using compute = float; };

using storage = storage_of<STORAGE>::type;      // an element of Q, K, V, O
using fk_float = storage_of<STORAGE>::compute;  // the type of all arithmetic

DEVICE fk_float fk_special(int which) {  // 1: inf, -1: -inf, 0: NaN
    const float inf = __int_as_float(0x7f800000);
    return which == 0 ? (fk_float)__int_as_float(0x7fffffff) : which > 0 ? (fk_float)inf : (fk_float)-inf;
}
#define INFINITE (fk_special(1))
#define HIDDEN (fk_special(-1))

DEVICE float widen(half_t x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float widen(bfloat16_t x) { return __int_as_float((int)x.bits << 16); }
template <typename T> DEVICE T widen(T x) { return x; }

template <typename T> struct Narrow { static __device__ __forceinline__ T from(fk_float x) { return (T)x; } };
template <> struct Narrow<half_t> {
    static __device__ __forceinline__ half_t from(fk_float x) {
        half_t y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"((float)x));
        return y;
    }
};
template <> struct Narrow<bfloat16_t> {
    static __device__ __forceinline__ bfloat16_t from(fk_float x) {  // to nearest, ties to even
        const unsigned bits = __float_as_uint((float)x);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        return bfloat16_t{(unsigned short)(nan ? (bits >> 16) | 64u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
    }
};
DEVICE storage narrow(fk_float x) { return Narrow<storage>::from(x); }

// Two numbers as float16, the first in the low half.
DEVICE unsigned pack_f16(float low, float high) {
    unsigned x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

// --- functions that generated code calls (OPS of flashkit/mods/expr/operations.py) ----------------------------------

template <typename T> DEVICE T fk_abs(T x) { return x < 0 ? -x : x; }
template <> __device__ __forceinline__ float fk_abs(float x) { return fabsf(x); }
template <> __device__ __forceinline__ double fk_abs(double x) { return fabs(x); }
// NaN propagates, as in NumPy. The operands may be integers of two widths, or a float that holds an integer and an
// integer.
template <typename T, typename U> DEVICE auto fk_min(T x, U y) -> decltype(x + y) { return y < x || y != y ? y : x; }
template <typename T, typename U> DEVICE auto fk_max(T x, U y) -> decltype(x + y) { return y > x || y != y ? y : x; }

// A float without its fraction, up to 2^30 (flashkit.to_int). fmin and fmax give the bound for NaN.
DEVICE int fk_int(float x) { return x == x ? (int)fminf(fmaxf(x, -1073741824.0f), 1073741824.0f) : 0; }
DEVICE int fk_int(double x) { return x == x ? (int)fmin(fmax(x, -1073741824.0), 1073741824.0) : 0; }

// Python's // and %: the quotient is rounded towards minus infinity, the remainder has the sign of the divisor.
// Division by 0 gives 0.
DEVICE long long fk_floordiv(long long x, long long y) {
    if (y == 0) return 0;
    if (((x | y) >> 31) == 0) return (unsigned)x / (unsigned)y;
    if (y == -1) return (long long)(0 - (unsigned long long)x);  // -2^63 wraps
    const long long quotient = x / y;
    return quotient - (quotient * y != x && (x < 0) != (y < 0));
}
DEVICE long long fk_mod(long long x, long long y) {
    if (y == 0 || y == -1) return 0;
    // Unsigned: the multiple of y below x may be below -2^63.
    return (unsigned long long)x - (unsigned long long)fk_floordiv(x, y) * (unsigned long long)y;
}
DEVICE float fk_floordiv(float x, float y) { return floorf(x / y); }
DEVICE double fk_floordiv(double x, double y) { return floor(x / y); }
DEVICE float fk_mod(float x, float y) {
    const float r = fmodf(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}
DEVICE double fk_mod(double x, double y) {
    const double r = fmod(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}

// Integers that may overflow wrap, which C++ defines for unsigned types only.
DEVICE long long fk_wrapping_add(long long x, long long y) { return (unsigned long long)x + (unsigned long long)y; }
DEVICE long long fk_wrapping_sub(long long x, long long y) { return (unsigned long long)x - (unsigned long long)y; }
DEVICE long long fk_wrapping_mul(long long x, long long y) { return (unsigned long long)x * (unsigned long long)y; }
DEVICE long long fk_wrapping_neg(long long x) { return 0 - (unsigned long long)x; }
DEVICE long long fk_wrapping_abs(long long x) { return x < 0 ? fk_wrapping_neg(x) : x; }

// 2^x; subnormal results are flushed to 0.
DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Greater row references, in base 2, are great: what they are rounded by, 2^-24 of them, is no small error of an
// exponent. They are subtracted from scores that are scaled and rounded as they are, not in one operation with the
// scale.
constexpr float MAX_ROW_REF = 1048576.0f;
DEVICE bool is_great(float row_ref) { return !(fabsf(row_ref) < MAX_ROW_REF); }
// Log-sum-exps up to this, 2^26 in base 2, tell P in base 2 within a factor of 2^7. Rows beyond have no gradient.
constexpr float MAX_BWD_LSE = 46516320.0f;

DEVICE float log2_fast(float x) {  // to 2^-22
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float reciprocal(float x) {  // to 1 ulp
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// FAST_MATH: scores of 16-bit elements have three correct digits, so a few float32 ulps do not matter.
DEVICE double fk_div(double x, double y) { return x / y; }
DEVICE float fk_div(float x, float y) {
    if constexpr (!FAST_MATH) return x / y;
    return x * reciprocal(y);  // hoisted out of the loops where y is a parameter
}

DEVICE double fk_tanh(double x) { return tanh(x); }
DEVICE float fk_tanh(float x) {
    if constexpr (!FAST_MATH) return tanhf(x);
    float y = exp2_fast(x * 2.8853900817779268f);  // 1 - 2 / (exp(2 x) + 1), to 2e-7
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(y + 1.0f));
    return fmaf(-2.0f, y, 1.0f);
}
DEVICE float tanh_fast(float x) {  // one instruction, to 2^-11
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// The approximation where P is rounded to the 8 bits of bfloat16, else the accurate function.
DEVICE float tanh_of(float x) {
    if constexpr (STORAGE != BFLOAT16) return fk_tanh(x);
    return tanh_fast(x);
}

#define FK_FUNCTION(name)                                    \
    DEVICE float fk_##name(float x) { return name##f(x); }   \
    DEVICE double fk_##name(double x) { return name(x); }
FK_FUNCTION(exp) FK_FUNCTION(exp2) FK_FUNCTION(log) FK_FUNCTION(log2) FK_FUNCTION(sqrt)
FK_FUNCTION(sin) FK_FUNCTION(cos) FK_FUNCTION(floor) FK_FUNCTION(erf)
#undef FK_FUNCTION

// An array of a modification; strides are in elements.
template <typename T, int AXES>
struct View {
    const T* data;
    long long stride[AXES > 0 ? AXES : 1];
};
template <typename T, int N> DEVICE fk_float fk_load_float(const View<T, N>& a, long long at) {
    return (fk_float)widen(a.data[at]);
}
template <typename T, int N> DEVICE long long fk_load_int(const View<T, N>& a, long long at) {
    return (long long)a.data[at];
}
template <typename T, int N> DEVICE bool fk_load_bool(const View<T, N>& a, long long at) { return a.data[at] != 0; }

// Minimum (LEAST) or maximum within a box of inclusive corners (flashkit.mods.expr.bounds), one loop per axis.
template <bool LEAST, int AXIS, typename T, int N>
DEVICE long long fk_extreme(const View<T, N>& a, const T* at, const long long (&corner)[2 * N]) {
    long long best = LEAST ? 0x7fffffffffffffffll : -0x7fffffffffffffffll - 1;
    for (long long i = corner[2 * AXIS]; i <= corner[2 * AXIS + 1]; ++i) {
        long long value;
        if constexpr (AXIS + 1 < N) value = fk_extreme<LEAST, AXIS + 1>(a, at + i * a.stride[AXIS], corner);
        else value = (long long)at[i * a.stride[AXIS]];
        best = (LEAST ? value < best : value > best) ? value : best;
    }
    return best;
}
// The same where the box is small (MAX_BOX); of a larger one the extreme of the type.
template <bool LEAST, typename T, int N>
DEVICE long long fk_bound(const View<T, N>& a, const long long (&corner)[2 * N]) {
    long long elements = 1;
    for (int axis = 0; axis < N; ++axis) elements *= corner[2 * axis + 1] - corner[2 * axis] + 1;
    constexpr bool IS_SIGNED = T(-1) < T(0) || sizeof(T) == 8;  // numbers of 64 bits without a sign wrap
    constexpr long long MOST = 0x7fffffffffffffffll >> (63 - 8 * (int)sizeof(T) + IS_SIGNED);
    if (elements > MAX_BOX) return LEAST ? (IS_SIGNED ? -MOST - 1 : 0) : MOST;
    return fk_extreme<LEAST, 0>(a, a.data, corner);
}
template <typename T, int N, typename... C> DEVICE long long fk_load_min(const View<T, N>& a, C... corners) {
    return fk_bound<true>(a, {corners...});
}
template <typename T, int N, typename... C> DEVICE long long fk_load_max(const View<T, N>& a, C... corners) {
    return fk_bound<false>(a, {corners...});
}
