"""Vector exponentials: polynomials on the reduced range, and a power of two."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from .vector import I32, I64, SIZE, call, declared, fill, fma

LOG2E = 1.4426950408889634

# 2^r on [-1/2, 1/2]: Chebyshev interpolation in 40 digits; relative error 2.5e-9 and, coefficients rounded, 2e-17.
EXP2_COEFFICIENTS = {
    "float": (
        1.0, 0.6931472067028326, 0.24022650922288757, 0.05550327226670302, 0.009618056678524637, 0.0013400428177615838,
        0.0001546144469856913,
    ),
    "double": (
        1.0, 0.6931471805599453, 0.24022650695910072, 0.0555041086648217, 0.009618129107628484, 0.0013333558146390353,
        0.00015403530393362755, 1.5252733856293466e-05, 1.3215486815999978e-06, 1.0178051192960649e-07,
        7.054894386348348e-09, 4.456675341049206e-10, 2.5733568308756892e-11,
    ),
}  # fmt: skip
# For float32 that is rounded to bfloat16: on [-1/2, 1/2] and on [0, 1] the polynomials with the least relative error,
# 1.02e-4 and 1.04e-4, among those of their degree that are 1 at 0. The other one is 2 at 1, so that 2^x has no step.
EXP2_SHORT = (1.0, 0.6932828979925821, 0.2422109746653685, 0.05500905780658288)
EXP2_SHORT_OF_FLOOR = (1.0, 0.6954241731944327, 0.2263083574084024, 0.07826746939716478)
EXP_COEFFICIENTS = {
    name: tuple(c / math.log(2) ** k for k, c in enumerate(coefficients))
    for name, coefficients in EXP2_COEFFICIENTS.items()
}
# Below these the result is 0, since arithmetic on denormals is slow.
EXP2_UNDERFLOW = {"float": -126.0, "double": -1022.0}
MANTISSA_BITS = {"float": 23, "double": 52}
EXPONENT_BIAS = {"float": 127, "double": 1023}


def exp2(b: ir.IRBuilder, x: ir.Value, coefficients: Sequence[float] = ()) -> ir.Value:
    """2^x for a vector of x <= 127: 0 below the normal numbers, NaN at NaN. coefficients: of the polynomial."""
    coefficients = coefficients or EXP2_COEFFICIENTS[str(x.type.element)]
    if not _is_native(b, x.type):
        return _power(b, x, _whole(b, x), lambda whole: b.fsub(x, whole), coefficients)
    r = _avx512(b, "reduce", x, I32(_REDUCE_TO_NEAREST))
    return _power(b, x, b.fsub(x, r), lambda whole: r, coefficients)


def exp2_short(b: ir.IRBuilder, x: ir.Value, used: ir.Value | None = None) -> ir.Value:
    """2^x likewise, for float32 that is rounded to bfloat16 (4e-3) next: relative error 1.04e-4, 2^0 is 1.
    FlashAttention-4 takes a polynomial of this degree for weights of 16 bits, too (arXiv 2603.05451).

    used: lanes of normal_power that count; the others are 0.
    """
    used = normal_power(b, x) if used is None else used
    if not _is_native(b, x.type):
        return b.select(used, exp2(b, x, EXP2_SHORT), fill(x.type, 0.0))
    # scalef takes the floor of x itself, so the reduced range is [0, 1).
    p = _polynomial(b, _avx512(b, "reduce", x, I32(_REDUCE_TO_FLOOR)), EXP2_SHORT_OF_FLOOR)
    return _avx512(b, "scalef", p, x, used)


def normal_power(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Lanes in which 2^x is no smaller than the normal numbers, or NaN."""
    return b.fcmp_unordered(">=", x, fill(x.type, EXP2_UNDERFLOW[str(x.type.element)]))


def exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e^x likewise, to about one ulp: ln 2 is subtracted from x, as x log2(e) has an error that grows with x."""
    vector = x.type
    in_twos = b.fmul(x, fill(vector, LOG2E))
    ln2 = fill(vector, -math.log(2))
    coefficients = EXP_COEFFICIENTS[str(vector.element)]
    return _power(b, in_twos, _whole(b, in_twos), lambda whole: fma(b, whole, ln2, x), coefficients)


def _is_native(b: ir.IRBuilder, vector: ir.VectorType) -> bool:
    return getattr(b.module, "avx512", False) and vector.count * SIZE[str(vector.element)] == 64


def _whole(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest integer, clamped to exponents of normal numbers."""
    if not _is_native(b, x.type):
        # The comparison is false for NaN: the integer conversion sees a finite number, the polynomial NaN.
        underflow = fill(x.type, EXP2_UNDERFLOW[str(x.type.element)])
        x = b.select(b.fcmp_ordered(">", x, underflow), x, underflow)
    return call(b, "llvm.rint", x.type, x)


def _power(
    b: ir.IRBuilder, x: ir.Value, whole: ir.Value, rest: Callable[[ir.Value], ir.Value], coefficients: Sequence[float]
) -> ir.Value:
    """2^whole times the polynomial of the rest; 0 where the exponent x is below that of normal numbers."""
    vector, name = x.type, str(x.type.element)
    p = _polynomial(b, rest(whole), coefficients)
    if _is_native(b, vector):
        power = _avx512(b, "scalef", p, whole)
    else:
        integers = ir.VectorType(I32 if name == "float" else I64, vector.count)
        exponent = b.add(b.fptosi(whole, integers), fill(integers, EXPONENT_BIAS[name]))
        power = b.fmul(p, b.bitcast(b.shl(exponent, fill(integers, MANTISSA_BITS[name])), vector))
    return b.select(b.fcmp_ordered("<", x, fill(vector, EXP2_UNDERFLOW[name])), fill(vector, 0.0), power)


def _polynomial(b: ir.IRBuilder, r: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    p: ir.Value = fill(r.type, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        p = fma(b, p, r, fill(r.type, c))
    return p


_REDUCE_TO_NEAREST = 8  # vreduceps' immediate: x - round(x), no exception flagged
_REDUCE_TO_FLOOR = 9  # x - floor(x)
_ROUNDING_OF_MODE = 4


def _avx512(b: ir.IRBuilder, name: str, x: ir.Value, y: ir.Value, mask: ir.Value | None = None) -> ir.Value:
    """`reduce`, x minus an integer, or `scalef`, x times 2 to the floor of y. Lanes outside of the mask are 0."""
    vector = x.type
    single = str(vector.element) == "float"
    full = f"llvm.x86.avx512.mask.{name}.p{'s' if single else 'd'}.512"
    lanes = ir.IntType(vector.count)
    used = lanes(-1) if mask is None else b.bitcast(mask, lanes)
    args = [x, y, fill(vector, 0.0), used, I32(_ROUNDING_OF_MODE)]
    return b.call(declared(b.module, full, ir.FunctionType(vector, [a.type for a in args])), args)
