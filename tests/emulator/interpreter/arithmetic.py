"""Functions of one lane's operands, for the statements of operations.py."""


@njit
def flushed(x):
    return np.float32(0) if abs(x) < np.float32(1.17549435e-38) else x


@njit
def high_signed(a, b):
    negative = (a < 0) != (b < 0)
    x, y = np.uint64(abs(a)), np.uint64(abs(b))
    low, high = x * y, high_unsigned(x, y)
    if not negative:
        return np.int64(high)
    return np.int64(~high + (np.uint64(1) if low == 0 else np.uint64(0)))


@njit
def high_unsigned(a, b):
    s, ones = np.uint64(32), np.uint64(0xFFFFFFFF)
    al, ah, bl, bh = a & ones, a >> s, b & ones, b >> s
    low, m1, m2 = al * bl, ah * bl, al * bh
    carry = (low >> s) + (m1 & ones) + (m2 & ones)
    return ah * bh + (m1 >> s) + (m2 >> s) + (carry >> s)


@njit
def div_signed(a, b):
    if b == 0:
        return np.int64(-1)
    q = abs(a) // abs(b)
    return -q if (a < 0) != (b < 0) else q


@njit
def rem_signed(a, b):
    return a if b == 0 else a - div_signed(a, b) * b


@njit
def div_unsigned(a, b):
    return ~np.uint64(0) if b == 0 else a // b


@njit
def rem_unsigned(a, b):
    return a if b == 0 else a % b


@njit
def round_down(x):
    """To float32, rounding down."""
    y = np.float32(x)
    return np.nextafter(y, np.float32(-np.inf)) if np.float64(y) > x else y


@njit
def minimum(a, b):
    return b if a != a else a if b != b else min(a, b)


@njit
def maximum(a, b):
    return b if a != a else a if b != b else max(a, b)


@njit
def saturated(x):
    return min(max(x, np.float32(0)), np.float32(1)) if x == x else np.float32(0)


@njit
def clamp(x, low, high):
    return 0.0 if x != x else low if x < low else high if x > high else x


@njit
def popcount(x):
    n = 0
    while x != np.uint64(0):
        x &= x - np.uint64(1)
        n += 1
    return n


@njit
def find_msb(x):
    n = -1
    while x != np.uint64(0):
        x >>= np.uint64(1)
        n += 1
    return n


@njit
def reverse_bits(x):
    y = np.uint32(0)
    for i in range(32):
        y |= np.uint32((x >> np.uint32(i)) & np.uint32(1)) << np.uint32(31 - i)
    return y


@njit
def bfe_signed(a, b, c):
    y = np.int64(a) >> np.int64(b)
    bits = np.int64(c)
    if bits == 0:
        return np.int64(0)
    y &= (1 << bits) - 1
    return y - (1 << bits) if y >> (bits - 1) & 1 else y


@njit
def bit_insert(a, b, c, d):
    ones = (np.uint64(1) << d) - np.uint64(1)
    return (b & ~(ones << c)) | ((a & ones) << c)


@njit
def byte_permute(a, b, c):
    both, y = np.uint64(a) | np.uint64(b) << np.uint64(32), np.uint64(0)
    for i in range(4):
        which = np.uint64(c) >> np.uint64(4 * i)
        byte = both >> ((which & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        if which & np.uint64(8):
            byte = np.uint64(255) if byte & np.uint64(128) else np.uint64(0)
        y |= byte << np.uint64(8 * i)
    return np.uint32(y)


@njit
def lop3_(a, b, c, table):
    y = np.uint32(0)
    for i in range(8):
        if table >> np.uint32(i) & np.uint32(1):
            x = a if i & 4 else ~a
            x &= b if i & 2 else ~b
            x &= c if i & 1 else ~c
            y |= x
    return y


@njit
def bfe_unsigned(a, b, c):
    return (np.uint64(a) >> np.uint64(b)) & ((np.uint64(1) << np.uint64(c)) - np.uint64(1))


@njit
def to_bf16(x):
    bits = np.float32(x).view(np.uint32)
    if x != x:
        return np.uint32(0x7FFF)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


@njit
def to_f16(x):
    bits = np.int64(np.float32(x).view(np.uint32))
    sign, rest = bits >> 16 & 0x8000, bits & 0x7FFFFFFF
    if rest > 0x7F800000:
        return np.uint32(0x7FFF)
    if rest >= 0x47800000 - 0x1000:  # 65520
        return np.uint32(sign | 0x7C00)
    if rest < 0x38800000:  # 2^-14: steps of 2^-24
        steps = np.rint(np.float64(abs(x)) * 16777216.0)
        return np.uint32(sign | np.int64(steps))
    rest += 0xFFF + (rest >> 13 & 1)
    return np.uint32(sign | ((rest - 0x38000000) >> 13))


@njit
def to_e4m3(x):
    """The greatest number where x exceeds it (satfinite)."""
    sign, size = np.int64(np.float32(x).view(np.uint32) >> np.uint32(24) & np.uint32(0x80)), np.float64(abs(x))
    if x != x:
        return np.uint32(0x7F)
    if size < 2.0**-6:
        return np.uint32(sign | np.int64(np.rint(size * 512.0)))
    bits = np.int64(np.float32(min(size, 448.0)).view(np.uint32))
    return np.uint32(sign | ((bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - 960))


@njit
def ex2_(x):
    return np.float32(2.0 ** np.float64(x))


@njit
def lg2_(x):
    y = np.float64(x)
    return np.float32(np.nan if y != y or y < 0 else -np.inf if y == 0 else math.log2(y) if y < np.inf else np.inf)


@njit
def rcp_(x):
    return np.float64(1) / np.float64(x) if x != 0 else np.copysign(np.inf, np.float64(x))


@njit
def sqrt_(x):
    return np.sqrt(x)


@njit
def rsqrt_(x):
    return np.float32(1 / np.sqrt(np.float64(x)))


@njit
def tanh_(x):
    return np.float32(math.tanh(x))


@njit
def sin_(x):
    return np.float32(math.sin(x))


@njit
def cos_(x):
    return np.float32(math.cos(x))
