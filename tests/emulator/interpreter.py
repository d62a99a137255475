"""The interpreter's text: `machine` puts numbers for operations before it and what single lanes do into it.

Each function is compiled by Numba. Numbers of operations, in capitals, are named as in PTX.
"""

import math

import numpy as np
from numba import njit

OUTSIDE, MISALIGNED, PARTED, TRAP, UNKNOWN, FULL, BARRIER, UNREAD = -1, -2, -3, -4, -5, -6, -7, -8


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
def below(x):
    """In float32, rounded down."""
    y = np.float32(x)
    return np.nextafter(y, np.float32(-np.inf)) if np.float64(y) > x else y


@njit
def least(a, b):
    return b if a != a else a if b != b else min(a, b)


@njit
def greatest(a, b):
    return b if a != a else a if b != b else max(a, b)


@njit
def saturated(x):
    return min(max(x, np.float32(0)), np.float32(1)) if x == x else np.float32(0)


@njit
def within(x, low, high):
    return 0.0 if x != x else low if x < low else high if x > high else x


@njit
def count_of_ones(x):
    n = 0
    while x != np.uint64(0):
        x &= x - np.uint64(1)
        n += 1
    return n


@njit
def highest_one(x):
    n = -1
    while x != np.uint64(0):
        x >>= np.uint64(1)
        n += 1
    return n


@njit
def turned_bits(x):
    y = np.uint32(0)
    for i in range(32):
        y |= np.uint32((x >> np.uint32(i)) & np.uint32(1)) << np.uint32(31 - i)
    return y


@njit
def field(a, b, c):
    y = np.int64(a) >> np.int64(b)
    bits = np.int64(c)
    if bits == 0:
        return np.int64(0)
    y &= (1 << bits) - 1
    return y - (1 << bits) if y >> (bits - 1) & 1 else y


@njit
def inserted(a, b, c, d):
    ones = (np.uint64(1) << d) - np.uint64(1)
    return (b & ~(ones << c)) | ((a & ones) << c)


@njit
def permuted(a, b, c):
    both, y = np.uint64(a) | np.uint64(b) << np.uint64(32), np.uint64(0)
    for i in range(4):
        which = np.uint64(c) >> np.uint64(4 * i)
        byte = both >> ((which & np.uint64(7)) * np.uint64(8)) & np.uint64(255)
        if which & np.uint64(8):
            byte = np.uint64(255) if byte & np.uint64(128) else np.uint64(0)
        y |= byte << np.uint64(8 * i)
    return np.uint32(y)


@njit
def looked_up(a, b, c, table):
    y = np.uint32(0)
    for i in range(8):
        if table >> np.uint32(i) & np.uint32(1):
            x = a if i & 4 else ~a
            x &= b if i & 2 else ~b
            x &= c if i & 1 else ~c
            y |= x
    return y


@njit
def bits_of(a, b, c):
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


# --- chance -----------------------------------------------------------------------------------------------------------


@njit
def chance(rng, n):
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return np.int64((x >> np.uint64(11)) % np.uint64(n))


# --- memory -----------------------------------------------------------------------------------------------------------


@njit
def place(address, size, base, allowed):
    """Where in memory so many bytes lie; OUTSIDE or MISALIGNED."""
    at = address - base
    if at < 0 or at + size > allowed.size or not allowed[at] or not allowed[at + size - 1]:
        return np.int64(OUTSIDE)
    return at if at % size == 0 or size > 16 else np.int64(MISALIGNED)


@njit
def spot(address, size, shared):
    """Of an address in shared memory: block of the cluster, offset; an offset of OUTSIDE or MISALIGNED."""
    block, at = address >> 24, address & 0xFFFFFF
    if block < 0 or block >= shared.shape[0] or at + size > shared.shape[1]:
        return block, np.int64(OUTSIDE)
    return block, at if at % size == 0 or size > 16 else np.int64(MISALIGNED)


# --- barriers in shared memory ----------------------------------------------------------------------------------------
# A word: arrivals missing (20 bits), arrivals of a phase (20), bytes missing (22, plus 2^21), parity of the phase.


@njit
def changed(word, arrivals, count):
    """A barrier's word after arrivals and with `count` bytes more to come, or -1 where that cannot be."""
    missing, all_, bytes_, phase = (
        word & 0xFFFFF,
        word >> 20 & 0xFFFFF,
        (word >> 40 & 0x3FFFFF) - 2097152,
        word >> 62 & 1,
    )
    missing -= arrivals
    bytes_ += count
    if missing < 0 or all_ == 0:
        return np.int64(-1)
    if missing == 0 and bytes_ == 0:
        missing, phase = all_, 1 - phase
    return missing | all_ << 20 | (bytes_ + 2097152) << 40 | phase << 62


@njit
def signal(shared8, address, arrivals, count):
    block, at = address >> 24, (address & 0xFFFFFF) >> 3
    if block >= shared8.shape[0] or at >= shared8.shape[1] or address & 7:
        return OUTSIDE
    word = changed(shared8[block, at], arrivals, count)
    if word < 0:
        return BARRIER
    shared8[block, at] = word
    return 0


# --- the copy engine --------------------------------------------------------------------------------------------------
# An entry: kind, state (1 asked for, 2 its source read), target, source, bytes, barrier, five coordinates, warp, lane,
# group, row of the program.

LOAD_BOX, STORE_BOX, LOAD, STORE, ADD, ACROSS = 1, 2, 3, 4, 5, 6


@njit
def bytes_of_box(words, at):
    b = words[(at >> 3) + 8 : (at >> 3) + 12]  # sizes, two in a word, and bytes of an element
    return (b[0] & 0xFFFFFFFF) * (b[0] >> 32) * (b[1] & 0xFFFFFFFF) * (b[1] >> 32) * b[2] * b[3]


@njit
def box_of(words, at, coordinates, part, shared, base, allowed, memory, loads, block, offset):
    """Move the box of a tensor map between memory and shared memory, or a place for what was read there."""
    start = words[at >> 3]
    size0, size1, size2 = (
        words[(at >> 3) + 1] & 0xFFFFFFFF,
        words[(at >> 3) + 1] >> 32,
        words[(at >> 3) + 2] & 0xFFFFFFFF,
    )
    size3, size4 = words[(at >> 3) + 2] >> 32, words[(at >> 3) + 3]
    s1, s2, s3, s4 = words[(at >> 3) + 4], words[(at >> 3) + 5], words[(at >> 3) + 6], words[(at >> 3) + 7]
    b0, b1, b2 = words[(at >> 3) + 8] & 0xFFFFFFFF, words[(at >> 3) + 8] >> 32, words[(at >> 3) + 9] & 0xFFFFFFFF
    b3, b4, width = words[(at >> 3) + 9] >> 32, words[(at >> 3) + 10], words[(at >> 3) + 11]
    c0, c1, c2, c3, c4 = coordinates[0], coordinates[1], coordinates[2], coordinates[3], coordinates[4]
    line = 0
    for i4 in range(b4):
        for i3 in range(b3):
            for i2 in range(b2):
                for i1 in range(b1):
                    inside = (
                        0 <= c1 + i1 < size1 and 0 <= c2 + i2 < size2 and 0 <= c3 + i3 < size3 and 0 <= c4 + i4 < size4
                    )
                    row = start + (c1 + i1) * s1 + (c2 + i2) * s2 + (c3 + i3) * s3 + (c4 + i4) * s4
                    for i0 in range(b0):
                        here = inside and 0 <= c0 + i0 < size0
                        there = offset + line * b0 * width + i0 * width
                        there ^= (there >> 7 & 7) << 4
                        if here:
                            from_ = place(row + (c0 + i0) * width, width, base, allowed)
                            if from_ < 0:
                                return from_
                            for e in range(width):
                                if loads:
                                    shared[block, there + e] = memory[from_ + e]
                                else:
                                    memory[from_ + e] = part[line * b0 * width + i0 * width + e]
                        elif loads:
                            for e in range(width):
                                shared[block, there + e] = 0
                    line += 1
    return bytes_of_box(words, at)


@njit
def advance(entry, part, shared, shared8, memory, words, floats, base, allowed):
    """Do the next thing of a copy: 0 or an error. Loads and copies are done at once; stores read, then write."""
    kind, target, source, count = entry[0], entry[2], entry[3], entry[4]
    if kind == LOAD_BOX:
        block, offset = target >> 24, target & 0xFFFFFF
        if offset & 127:
            return MISALIGNED
        moved = box_of(
            words,
            place(source, 8, base, allowed),
            entry[6:11],
            part,
            shared,
            base,
            allowed,
            memory,
            True,
            block,
            offset,
        )
        if moved < 0:
            return moved
        entry[0] = 0
        return signal(shared8, entry[5], 0, -moved)
    if kind == LOAD:
        at = place(source, count, base, allowed)
        block, offset = spot(target, count, shared)
        if at < 0 or offset < 0:
            return OUTSIDE
        if at & 15 or offset & 15 or count & 15:
            return MISALIGNED
        for i in range(count):
            shared[block, offset + i] = memory[at + i]
        entry[0] = 0
        return signal(shared8, entry[5], 0, -count)
    if kind == ACROSS:
        from_, at = spot(source, count, shared)
        block, offset = spot(target, count, shared)
        if at < 0 or offset < 0:
            return OUTSIDE
        for i in range(count):
            shared[block, offset + i] = shared[from_, at + i]
        entry[0] = 0
        return signal(shared8, entry[5], 0, -count)
    if entry[1] == 1:
        block, offset = source >> 24, source & 0xFFFFFF
        if kind == STORE_BOX:
            at = place(target, 8, base, allowed)
            if offset & 127:
                return MISALIGNED
            count = bytes_of_box(words, at)
            for i in range(count):
                there = offset + i
                part[i] = shared[block, there ^ (there >> 7 & 7) << 4]
        else:
            if offset & 15 or count & 15:
                return MISALIGNED
            if offset + count > shared.shape[1]:
                return OUTSIDE
            for i in range(count):
                part[i] = shared[block, offset + i]
        entry[1] = 2
        return 0
    entry[0] = 0
    if kind == STORE_BOX:
        moved = box_of(
            words,
            place(target, 8, base, allowed),
            entry[6:11],
            part,
            shared,
            base,
            allowed,
            memory,
            False,
            0,
            0,
        )
        return min(moved, 0)
    at = place(target, count, base, allowed)
    if at < 0:
        return at
    if at & 15:
        return MISALIGNED
    if kind == STORE:
        for i in range(count):
            memory[at + i] = part[i]
    else:
        numbers = part.view(np.float32)
        for i in range(count >> 2):
            floats[(at >> 2) + i] += numbers[i]
    return 0


# --- products ---------------------------------------------------------------------------------------------------------


@njit
def element(shared, block, at, form, halves):
    at ^= (at >> 7 & 7) << 4
    if form == 2:
        bits = np.uint32(shared[block, at]) | np.uint32(shared[block, at + 1]) << np.uint32(8)
        bits |= np.uint32(shared[block, at + 2]) << np.uint32(16) | np.uint32(shared[block, at + 3]) << np.uint32(24)
        return np.uint32(np.uint32(bits) & np.uint32(0xFFFFE000)).view(np.float32)
    return halves[form, np.int64(shared[block, at]) | np.int64(shared[block, at + 1]) << 8]


@njit
def product(form, n, k, s, operands, described, F, U, H, shared, rank, warp, halves, left, right):
    """A warp's sixteen rows of a warp group's product. described: a (or 0), b, whether sums go on, which are turned."""
    da, db, goes_on, turns_a, turns_b = described[1], described[2], described[3], described[4], described[5]
    width, WIDE = 4 if form == 2 else 2, U.shape[1] >> 1
    if da != 0:
        start, chunk, lines = (da & 0x3FFF) << 4, (da >> 16 & 0x3FFF) << 4, (da >> 32 & 0x3FFF) << 4
        for i in range(16):
            r = 16 * (warp & 3) + i
            for j in range(k):
                at = (
                    start + (r >> 6) * chunk + (j >> 3) * lines + (j & 7) * 128 + (r & 63) * 2
                    if turns_a
                    else start + (r >> 3) * lines + (r & 7) * 128 + j * width
                )
                left[i, j] = element(shared, rank, at, form, halves)
    else:
        first = s + n // 2
        for l in range(WIDE):
            g, t = l >> 2, l & 3
            for half in range(2):
                for side in range(2):
                    if form == 2:
                        left[g + 8 * half, t + 4 * side] = np.uint32(
                            U[operands[first + half + 2 * side], 2 * l] & np.uint32(0xFFFFE000)
                        ).view(np.float32)
                    else:
                        for c in range(2):
                            left[g + 8 * half, 8 * side + 2 * t + c] = halves[
                                form, H[operands[first + half + 2 * side], 4 * l + c]
                            ]
    start, chunk, lines = (db & 0x3FFF) << 4, (db >> 16 & 0x3FFF) << 4, (db >> 32 & 0x3FFF) << 4
    for i in range(n):
        for j in range(k):
            at = (
                start + (i >> 6) * chunk + (j >> 3) * lines + (j & 7) * 128 + (i & 63) * 2
                if turns_b
                else start + (i >> 3) * lines + (i & 7) * 128 + j * width
            )
            right[i, j] = element(shared, rank, at, form, halves)
    for l in range(WIDE):
        g, t = l >> 2, l & 3
        for e in range(n // 2):
            i, j = g + 8 * (e >> 1 & 1), 8 * (e >> 2) + 2 * t + (e & 1)
            total = 0.0
            for x in range(k):
                total += np.float64(left[i, x]) * np.float64(right[j, x])
            register = operands[s + e]
            F[register, 2 * l] = np.float32(total + (np.float64(F[register, 2 * l]) if goes_on else 0.0))


@njit
def settle(w, before, code, operands, state, products, F, U, H, shared, rank, halves, left, right):
    """Do a warp's pending products of groups before one."""
    done = 0
    while done < state[w, 3] and products[w, done, 6] < before:
        p = products[w, done, 0]
        form = products[w, done, 7]
        product(
            form,
            code[p, 4],
            code[p, 5],
            code[p, 2],
            operands,
            products[w, done],
            F,
            U,
            H,
            shared,
            rank,
            w,
            halves,
            left,
            right,
        )
        done += 1
    for i in range(done, state[w, 3]):
        products[w, i - done] = products[w, i]
    state[w, 3] -= done


@njit
def lowest(mask):
    l = 0
    while not mask >> l & 1:
        l += 1
    return l


@njit
def extended(x, width):
    bits = 8 * width
    return x - (1 << bits) if x >> (bits - 1) & 1 else x


@njit
def free(queue):
    for i in range(queue.shape[0]):
        if queue[i, 0] == 0:
            return i
    return -1


@njit
def memory_(op, p, m, w, s, count, code, operands, R, local, shared, rank, memory, base, allowed, info):
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    WIDE, error = R.shape[1], np.int64(0)
    shared2, shared4, shared8 = shared.view(np.uint16), shared.view(np.uint32), shared.view(np.int64)
    AH, AU, AV = memory.view(np.uint16), memory.view(np.uint32), memory.view(np.uint64)
    if op == LD_GLOBAL:
        width, n = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1)
        r, offset = operands[s + count - 2], np.int64(operands[s + count - 1])
        for l in range(WIDE):
            if m >> l & 1:
                at = place(L[r, l] + offset, width * n, base, allowed)
                if at < 0:
                    error, info[3], info[4] = at, l, L[r, l] + offset
                    break
                for i in range(n):
                    d = operands[s + i]
                    if width == 4:
                        V[d, l] = AU[(at >> 2) + i]
                    elif width == 8:
                        V[d, l] = AV[(at >> 3) + i]
                    elif width == 2:
                        V[d, l] = AH[(at >> 1) + i]
                    else:
                        V[d, l] = memory[at + i]
                    if code[p, 4] < 0 and width < 8:
                        L[d, l] = extended(L[d, l], width)
    elif op == LD_SHARED:
        width, n = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1)
        r, offset = operands[s + count - 2], np.int64(operands[s + count - 1])
        for l in range(WIDE):
            if m >> l & 1:
                block, at = spot(np.int64(U[r, 2 * l]) + offset, width * n, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[r, 2 * l]) + offset
                    break
                for i in range(n):
                    d = operands[s + i]
                    if width == 4:
                        V[d, l] = shared4[block, (at >> 2) + i]
                    elif width == 8:
                        L[d, l] = shared8[block, (at >> 3) + i]
                    elif width == 2:
                        V[d, l] = shared2[block, (at >> 1) + i]
                    else:
                        V[d, l] = shared[block, at + i]
                    if code[p, 4] < 0 and width < 8:
                        L[d, l] = extended(L[d, l], width)
    elif op == LD_LOCAL:
        width, n = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1)
        r, offset = operands[s + count - 2], np.int64(operands[s + count - 1])
        for l in range(WIDE):
            if m >> l & 1:
                at = L[r, l] + offset
                if at < 0 or at + width * n > local.shape[2]:
                    error, info[3], info[4] = OUTSIDE, l, at
                    break
                for i in range(n):
                    x = np.uint64(0)
                    for e in range(width):
                        x |= np.uint64(local[w, l, at + i * width + e]) << np.uint64(8 * e)
                    V[operands[s + i], l] = x
                    if code[p, 4] < 0 and width < 8:
                        L[operands[s + i], l] = extended(L[operands[s + i], l], width)
    elif op == ST_GLOBAL:
        width, n = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1)
        r, offset = operands[s], np.int64(operands[s + 1])
        for l in range(WIDE):
            if m >> l & 1:
                at = place(L[r, l] + offset, width * n, base, allowed)
                if at < 0:
                    error, info[3], info[4] = at, l, L[r, l] + offset
                    break
                for i in range(n):
                    d = operands[s + 2 + i]
                    if width == 4:
                        AU[(at >> 2) + i] = U[d, 2 * l]
                    elif width == 8:
                        AV[(at >> 3) + i] = V[d, l]
                    elif width == 2:
                        AH[(at >> 1) + i] = H[d, 4 * l]
                    else:
                        memory[at + i] = V[d, l] & np.uint64(255)
    elif op == ST_SHARED:
        width, n = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1)
        r, offset = operands[s], np.int64(operands[s + 1])
        for l in range(WIDE):
            if m >> l & 1:
                block, at = spot(np.int64(U[r, 2 * l]) + offset, width * n, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[r, 2 * l]) + offset
                    break
                for i in range(n):
                    d = operands[s + 2 + i]
                    if width == 4:
                        shared4[block, (at >> 2) + i] = U[d, 2 * l]
                    elif width == 8:
                        shared8[block, (at >> 3) + i] = L[d, l]
                    elif width == 2:
                        shared2[block, (at >> 1) + i] = H[d, 4 * l]
                    else:
                        shared[block, at + i] = V[d, l] & np.uint64(255)
    elif op == ST_LOCAL:
        width, n = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1)
        r, offset = operands[s], np.int64(operands[s + 1])
        for l in range(WIDE):
            if m >> l & 1:
                at = L[r, l] + offset
                if at < 0 or at + width * n > local.shape[2]:
                    error, info[3], info[4] = OUTSIDE, l, at
                    break
                for i in range(n):
                    for e in range(width):
                        local[w, l, at + i * width + e] = V[operands[s + 2 + i], l] >> np.uint64(8 * e) & np.uint64(255)
    elif op == PACK:
        n, width = count - 1, np.int64(code[p, 4])
        for l in range(WIDE):
            if m >> l & 1:
                x = np.uint64(0)
                for i in range(n):
                    ones = ~np.uint64(0) >> np.uint64(64 - 8 * width)
                    x |= (V[operands[s + 1 + i], l] & ones) << np.uint64(8 * width * i)
                V[operands[s], l] = x
    elif op == UNPACK:
        n, width = count - 1, np.int64(code[p, 4])
        for l in range(WIDE):
            if m >> l & 1:
                x = V[operands[s + n], l]
                for i in range(n):
                    ones = ~np.uint64(0) >> np.uint64(64 - 8 * width)
                    V[operands[s + i], l] = x >> np.uint64(8 * width * i) & ones
    return error


@njit
def together_(op, m, s, count, operands, R):
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    WIDE, error = R.shape[1], np.int64(0)
    if op == SHFL_SYNC_IDX_B32 or op == SHFL_SYNC_BFLY_B32 or op == SHFL_SYNC_UP_B32 or op == SHFL_SYNC_DOWN_B32:
        extra = 1 if count == 6 else 0
        d, a, b, c = operands[s], operands[s + 1 + extra], operands[s + 2 + extra], operands[s + 3 + extra]
        taken = np.zeros(32, np.uint64)
        for l in range(WIDE):
            taken[l] = V[a, l]
        for l in range(WIDE):
            if m >> l & 1:
                n, form = np.int64(U[b, 2 * l]) & 31, np.int64(U[c, 2 * l])
                clamp, segment = form & 31, form >> 8 & 31
                high, low = (l & segment) | (clamp & ~segment & 31), l & segment
                if op == SHFL_SYNC_IDX_B32:
                    j = low | (n & ~segment & 31)
                    inside = j <= high
                elif op == SHFL_SYNC_BFLY_B32:
                    j = l ^ n
                    inside = j <= high
                elif op == SHFL_SYNC_UP_B32:
                    j = l - n
                    inside = j >= high
                else:
                    j = l + n
                    inside = j <= high
                V[d, l] = taken[j if inside else l]
                if extra:
                    V[operands[s + 1], l] = np.uint64(1 if inside else 0)
    elif op == VOTE_SYNC_BALLOT_B32 or op == VOTE_SYNC_ANY_PRED or op == VOTE_SYNC_ALL_PRED:
        yes = np.int64(0)
        for l in range(WIDE):
            if m >> l & 1 and V[operands[s + 1], l] != 0:
                yes |= 1 << l
        if op == VOTE_SYNC_ANY_PRED:
            yes = 1 if yes != 0 else 0
        elif op == VOTE_SYNC_ALL_PRED:
            yes = 1 if yes == m else 0
        for l in range(WIDE):
            if m >> l & 1:
                V[operands[s], l] = np.uint64(yes)
    elif op == ELECT_SYNC:
        for l in range(WIDE):
            if m >> l & 1:
                V[operands[s], l] = np.uint64(lowest(m))
                V[operands[s + 1], l] = np.uint64(1 if l == lowest(m) else 0)
    elif (
        op == REDUX_SYNC_OR_B32
        or op == REDUX_SYNC_AND_B32
        or op == REDUX_SYNC_MAX_U32
        or op == REDUX_SYNC_MIN_U32
        or op == REDUX_SYNC_ADD_U32
    ):
        x, first = np.int64(0), True
        for l in range(WIDE):
            if m >> l & 1:
                y = np.int64(U[operands[s + 1], 2 * l])
                if first:
                    x, first = y, False
                elif op == REDUX_SYNC_OR_B32:
                    x |= y
                elif op == REDUX_SYNC_AND_B32:
                    x &= y
                elif op == REDUX_SYNC_MAX_U32:
                    x = max(x, y)
                elif op == REDUX_SYNC_MIN_U32:
                    x = min(x, y)
                else:
                    x += y
        for l in range(WIDE):
            if m >> l & 1:
                U[operands[s], 2 * l] = np.uint32(x & 0xFFFFFFFF)
    elif op == REDUX_SYNC_MAX_S32 or op == REDUX_SYNC_MIN_S32 or op == REDUX_SYNC_ADD_S32:
        x, first = np.int64(0), True
        for l in range(WIDE):
            if m >> l & 1:
                y = np.int64(I[operands[s + 1], 2 * l])
                if first:
                    x, first = y, False
                elif op == REDUX_SYNC_MAX_S32:
                    x = max(x, y)
                elif op == REDUX_SYNC_MIN_S32:
                    x = min(x, y)
                else:
                    x += y
        for l in range(WIDE):
            if m >> l & 1:
                I[operands[s], 2 * l] = x
    return error


@njit
def matrices_(op, p, w, s, count, code, operands, R, state, products, shared, rank, halves, info, left, right):
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    WIDE, error = R.shape[1], np.int64(0)
    shared2, shared4, shared8 = shared.view(np.uint16), shared.view(np.uint32), shared.view(np.int64)
    if op == STMATRIX:
        n = np.int64(code[p, 4])
        for i in range(n):
            for r in range(8):
                l = 8 * i + r
                block, at = spot(np.int64(U[operands[s], 2 * l]) + operands[s + 1], 16, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[operands[s + 1], 2 * l])
                    break
                for j in range(8):
                    source, half = (4 * r + j // 2, j & 1) if code[p, 5] == 0 else (4 * j + r // 2, r & 1)
                    shared2[block, (at >> 1) + j] = H[operands[s + 2 + i], 4 * source + half]
    elif op == LDMATRIX:
        n = np.int64(code[p, 4])
        r0 = operands[s + count - 2]
        found = np.zeros((4, 8, 8), np.uint16)
        for i in range(n):
            for r in range(8):
                l = 8 * i + r
                block, at = spot(np.int64(U[r0, 2 * l]) + operands[s + count - 1], 16, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[operands[s + 1], 2 * l])
                    break
                for j in range(8):
                    found[i, r, j] = shared2[block, (at >> 1) + j]
        for i in range(n):
            for l in range(WIDE):
                g, t = l >> 2, l & 3
                if code[p, 5] == 0:
                    x, y = found[i, g, 2 * t], found[i, g, 2 * t + 1]
                else:
                    x, y = found[i, 2 * t, g], found[i, 2 * t + 1, g]
                V[operands[s + i], l] = np.uint64(x) | np.uint64(y) << np.uint64(16)
    elif op == MMA_BF16 or op == MMA_F16 or op == MMA_TF32:
        # d, a, b, c
        form = 2 if op == MMA_TF32 else 1 if op == MMA_BF16 else 0
        k = 8 if form == 2 else 16
        for l in range(WIDE):
            g, t = l >> 2, l & 3
            for half in range(2):
                for side in range(2):
                    a = operands[s + 4 + half + 2 * side]
                    if form == 2:
                        left[g + 8 * half, t + 4 * side] = np.uint32(U[a, 2 * l] & np.uint32(0xFFFFE000)).view(
                            np.float32
                        )
                    else:
                        for c in range(2):
                            left[g + 8 * half, 8 * side + 2 * t + c] = halves[form, H[a, 4 * l + c]]
            for side in range(2):
                b = operands[s + 8 + side]
                if form == 2:
                    right[g, t + 4 * side] = np.uint32(U[b, 2 * l] & np.uint32(0xFFFFE000)).view(np.float32)
                else:
                    for c in range(2):
                        right[g, 8 * side + 2 * t + c] = halves[form, H[b, 4 * l + c]]
        sums = np.zeros((32, 4), np.float32)
        for l in range(WIDE):
            g, t = l >> 2, l & 3
            for e in range(4):
                i, j = g + 8 * (e >> 1), 2 * t + (e & 1)
                total = np.float64(F[operands[s + 10 + e], 2 * l])
                for x in range(k):
                    total += np.float64(left[i, x]) * np.float64(right[j, x])
                sums[l, e] = np.float32(total)
        for l in range(WIDE):
            for e in range(4):
                F[operands[s + e], 2 * l] = sums[l, e]
    elif op == WGMMA_BF16 or op == WGMMA_F16 or op == WGMMA_TF32:
        n = state[w, 3]
        if n >= products.shape[1]:
            error = FULL
        else:
            form = 2 if op == WGMMA_TF32 else 1 if op == WGMMA_BF16 else 0
            first = s + code[p, 4] // 2
            of_shared = count - code[p, 4] // 2 == (5 if form == 2 else 7)
            rest = first + (1 if of_shared else 4)
            products[w, n, 0], products[w, n, 1] = p, L[operands[first], 0] if of_shared else 0
            products[w, n, 2], products[w, n, 3] = L[operands[rest], 0], np.int64(V[operands[rest + 1], 0])
            if form == 2:
                products[w, n, 4] = products[w, n, 5] = 0
            elif of_shared:
                products[w, n, 4], products[w, n, 5] = L[operands[rest + 4], 0], L[operands[rest + 5], 0]
            else:
                products[w, n, 4], products[w, n, 5] = 0, L[operands[rest + 4], 0]
            products[w, n, 6], products[w, n, 7] = state[w, 4], form
            state[w, 3] += 1
    elif op == WGMMA_COMMIT_GROUP_SYNC:
        state[w, 4] += 1
    elif op == WGMMA_WAIT_GROUP_SYNC:
        settle(
            w,
            state[w, 4] - np.int64(U[operands[s], 0]),
            code,
            operands,
            state,
            products,
            F,
            U,
            H,
            shared,
            rank,
            halves,
            left,
            right,
        )
    return error


@njit
def copies_(op, p, m, w, s, count, code, operands, R, queue, groups, shared, rank, memory, base, allowed, info):
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    WIDE, error = R.shape[1], np.int64(0)
    shared2, shared4, shared8 = shared.view(np.uint16), shared.view(np.uint32), shared.view(np.int64)
    waits = False
    if op == MBARRIER_INIT:
        for l in range(WIDE):
            if m >> l & 1:
                block, at = spot(np.int64(U[operands[s], 2 * l]) + operands[s + 1], 8, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[operands[s + 1], 2 * l])
                    break
                n = np.int64(U[operands[s + 2], 2 * l])
                shared8[block, at >> 3] = n | n << 20 | 2097152 << 40
    elif op == MBARRIER_INVAL:
        pass
    elif op == MBARRIER_ARRIVE:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                info[3], info[4] = l, np.int64(U[operands[s + 1], 2 * l]) + operands[s + 2]
                error = signal(shared8, info[4], 1, 0)
    elif op == MBARRIER_ARRIVE_EXPECT_TX:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                info[3], info[4] = l, np.int64(U[operands[s + 1], 2 * l]) + operands[s + 2]
                error = signal(shared8, info[4], 1, np.int64(U[operands[s + 3], 2 * l]))
    elif op == MBARRIER_TRY_WAIT_PARITY:
        for l in range(WIDE):
            if m >> l & 1:
                block, at = spot(np.int64(U[operands[s + 1], 2 * l]) + operands[s + 2], 8, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[operands[s + 1], 2 * l])
                    break
                ended = shared8[block, at >> 3] >> 62 & 1 != np.int64(U[operands[s + 3], 2 * l]) & 1
                V[operands[s], l] = np.uint64(1 if ended else 0)
        waits |= not ended
    elif op == MAPA_U32:
        for l in range(WIDE):
            if m >> l & 1:
                x = np.int64(U[operands[s + 1], 2 * l]) & 0xFFFFFF | np.int64(U[operands[s + 2], 2 * l]) << 24
                V[operands[s], l] = np.uint64(x)
    elif op == CP_ASYNC_BULK_COMMIT_GROUP:
        for l in range(WIDE):
            if m >> l & 1:
                groups[w, l] += 1
    elif op == CP_ASYNC_BULK_SHARED_GLOBAL_MBARRIER or op == CP_ASYNC_BULK_SHARED_SHARED_MBARRIER:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                i = free(queue)
                if i < 0:
                    error = FULL
                    break
                across = op == CP_ASYNC_BULK_SHARED_SHARED_MBARRIER
                queue[i, 0], queue[i, 1] = ACROSS if across else LOAD, 1
                queue[i, 2] = np.int64(U[operands[s], 2 * l]) + operands[s + 1]
                queue[i, 3] = (np.int64(U[operands[s + 2], 2 * l]) if across else L[operands[s + 2], l]) + operands[
                    s + 3
                ]
                queue[i, 4] = np.int64(U[operands[s + 4], 2 * l])
                queue[i, 5] = np.int64(U[operands[s + 5], 2 * l]) + operands[s + 6]
                queue[i, 11], queue[i, 12], queue[i, 13], queue[i, 14] = w, l, -1, p
    elif op == CP_ASYNC_BULK_TENSOR_5D_SHARED_GLOBAL_MBARRIER:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                i = free(queue)
                if i < 0:
                    error = FULL
                    break
                queue[i, 0], queue[i, 1] = LOAD_BOX, 1
                queue[i, 2] = np.int64(U[operands[s], 2 * l]) + operands[s + 1]
                queue[i, 3] = L[operands[s + 2], l] + operands[s + 3]
                for j in range(5):
                    queue[i, 6 + j] = np.int64(I[operands[s + 4 + j], 2 * l])
                queue[i, 5] = np.int64(U[operands[s + 9], 2 * l]) + operands[s + 10]
                queue[i, 11], queue[i, 12], queue[i, 13], queue[i, 14] = w, l, -1, p
    elif op == CP_ASYNC_BULK_TENSOR_5D_GLOBAL_SHARED_BULK_GROUP:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                i = free(queue)
                if i < 0:
                    error = FULL
                    break
                queue[i, 0], queue[i, 1] = STORE_BOX, 1
                queue[i, 2] = L[operands[s], l] + operands[s + 1]
                for j in range(5):
                    queue[i, 6 + j] = np.int64(I[operands[s + 2 + j], 2 * l])
                queue[i, 3] = np.int64(U[operands[s + 7], 2 * l]) + operands[s + 8]
                queue[i, 11], queue[i, 12], queue[i, 13], queue[i, 14] = w, l, groups[w, l], p
    elif op == CP_ASYNC_BULK_GLOBAL_SHARED_BULK_GROUP or op == CP_REDUCE_ASYNC_BULK_GLOBAL_SHARED_BULK_GROUP_ADD_F32:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                i = free(queue)
                if i < 0:
                    error = FULL
                    break
                queue[i, 0], queue[i, 1] = STORE if op == CP_ASYNC_BULK_GLOBAL_SHARED_BULK_GROUP else ADD, 1
                queue[i, 2] = L[operands[s], l] + operands[s + 1]
                queue[i, 3] = np.int64(U[operands[s + 2], 2 * l]) + operands[s + 3]
                queue[i, 4] = np.int64(U[operands[s + 4], 2 * l])
                queue[i, 11], queue[i, 12], queue[i, 13], queue[i, 14] = w, l, groups[w, l], p
    elif op == ST_ASYNC:
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                block, at = spot(np.int64(U[operands[s], 2 * l]) + operands[s + 1], 4, shared)
                if at < 0:
                    error, info[3], info[4] = at, l, np.int64(U[operands[s + 1], 2 * l])
                    break
                shared4[block, at >> 2] = U[operands[s + 2], 2 * l]
                error = signal(shared8, np.int64(U[operands[s + 3], 2 * l]) + operands[s + 4], 0, -4)
    elif op == CP_ASYNC_SHARED_GLOBAL:
        # Done at once. What a kernel does not wait for is not found.
        for l in range(WIDE):
            if m >> l & 1 and error == 0:
                n = np.int64(U[operands[s + 4], 2 * l])
                block, to = spot(np.int64(U[operands[s], 2 * l]) + operands[s + 1], n, shared)
                taken = n
                if code[p, 4] == 1:
                    taken = n if V[operands[s + 5], l] == 0 else np.int64(0)
                elif code[p, 4] == 2:
                    taken = np.int64(U[operands[s + 5], 2 * l])
                if to < 0:
                    error, info[3] = to, l
                    break
                at = np.int64(0)
                if taken > 0:
                    at = place(L[operands[s + 2], l] + operands[s + 3], n, base, allowed)
                if at < 0:
                    error, info[3], info[4] = at, l, L[operands[s + 2], l] + operands[s + 3]
                    break
                for i in range(n):
                    shared[block, to + i] = memory[at + i] if i < taken else 0
    return error, waits


# FUNCTIONS

# --- a warp -----------------------------------------------------------------------------------------------------------

DONE, WAITS, GOES_ON = 2, 1, 0


@njit
def step(w, budget, block):
    code, operands, counter, state, products, local = (
        block.code, block.operands, block.counters[w], block.state, block.products, block.local
    )  # fmt: skip
    shared, rank, barriers, cluster, queue, groups = (
        block.shared, block.rank, block.barriers, block.cluster, block.queue, block.groups
    )  # fmt: skip
    memory, base, allowed, halves = block.memory, block.base, block.allowed, block.halves
    flags, info, hits, left, right = block.flags, block.info, block.hits, block.left, block.right
    R = block.registers[w]
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    shared2, shared4, shared8 = shared.view(np.uint16), shared.view(np.uint32), shared.view(np.int64)
    AH, AU, AL = memory.view(np.uint16), memory.view(np.uint32), memory.view(np.int64)
    AI, AV, AF, AD = memory.view(np.int32), memory.view(np.uint64), memory.view(np.float32), memory.view(np.float64)
    warps = block.registers.shape[0]
    WIDE = np.int64(counter.size)  # 32, which the compiler shall not know: it would write everything out 32 times
    waiting = np.int64(0)  # lanes that wait for others to come where they are
    while True:
        p, live = np.int64(1 << 40), np.int64(0)
        for l in range(WIDE):
            if counter[l] >= 0:
                live |= 1 << l
                if not waiting >> l & 1 and counter[l] < p:
                    p = np.int64(counter[l])
        if live == 0:
            return DONE
        if p == 1 << 40:
            info[0], info[2] = PARTED, w
            for l in range(WIDE):
                if counter[l] >= 0:
                    info[1] = counter[l]
            return PARTED
        mask = np.int64(0)
        for l in range(WIDE):
            if counter[l] == p:
                mask |= 1 << l
        waiting &= ~mask
        apart = mask != live
        while True:
            if budget <= 0:
                for l in range(WIDE):
                    if mask >> l & 1:
                        counter[l] = p
                return GOES_ON
            budget -= 1
            hits[p] += 1
            op, guard, s, count = code[p, 0], code[p, 1], np.int64(code[p, 2]), np.int64(code[p, 3])
            m = mask
            if guard != 0:
                r, wanted = abs(guard) - 1, np.uint64(1 if guard > 0 else 0)
                for l in range(WIDE):
                    if m >> l & 1 and (V[r, l] != 0) != (wanted != 0):
                        m &= ~(1 << l)
            error, waits = np.int64(0), False
            if op == BRA:
                if m == 0:
                    p += 1
                elif m == mask:
                    p = np.int64(code[p, 4])
                else:
                    for l in range(WIDE):
                        if mask >> l & 1:
                            counter[l] = code[p, 4] if m >> l & 1 else p + 1
                    break
                if apart:
                    for l in range(WIDE):
                        if mask >> l & 1:
                            counter[l] = p
                    break
                continue
            if m == 0:
                p += 1
                continue
            if op == RET or op == EXIT:
                for l in range(WIDE):
                    if mask >> l & 1:
                        counter[l] = -1 if m >> l & 1 else p + 1
                break
            together = (
                op == BAR_SYNC
                or op == BAR_ARRIVE
                or op == BAR_RED_OR_PRED
                or op == BAR_RED_AND_PRED
                or op == WHOLE
                or op == STMATRIX
                or op == LDMATRIX
                or op == WGMMA_BF16
                or op == WGMMA_F16
                or op == WGMMA_TF32
                or op == WGMMA_FENCE_SYNC
                or op == WGMMA_COMMIT_GROUP_SYNC
                or op == WGMMA_WAIT_GROUP_SYNC
                or op == MMA_BF16
                or op == MMA_F16
                or op == MMA_TF32
                or op == BARRIER_CLUSTER_ARRIVE
                or op == BARRIER_CLUSTER_WAIT
            )
            asked = live
            if op == BAR_WARP_SYNC:
                together, asked = True, live & np.int64(U[operands[s], 2 * lowest(mask)])
            elif op == ELECT_SYNC:
                together, asked = True, live & np.int64(U[operands[s + 2], 2 * lowest(mask)])
            elif (
                op == SHFL_SYNC_IDX_B32
                or op == SHFL_SYNC_BFLY_B32
                or op == SHFL_SYNC_UP_B32
                or op == SHFL_SYNC_DOWN_B32
                or op == VOTE_SYNC_BALLOT_B32
                or op == VOTE_SYNC_ANY_PRED
                or op == VOTE_SYNC_ALL_PRED
                or op == REDUX_SYNC_OR_B32
                or op == REDUX_SYNC_AND_B32
                or op == REDUX_SYNC_MAX_U32
                or op == REDUX_SYNC_MIN_U32
                or op == REDUX_SYNC_ADD_U32
                or op == REDUX_SYNC_MAX_S32
                or op == REDUX_SYNC_MIN_S32
                or op == REDUX_SYNC_ADD_S32
            ):
                together, asked = True, live & np.int64(U[operands[s + count - 1], 2 * lowest(mask)])
            if together and mask & asked != asked:
                for l in range(WIDE):
                    if mask >> l & 1:
                        counter[l] = p
                here = np.int64(0)
                for l in range(WIDE):
                    if counter[l] == p:
                        here |= 1 << l
                waiting = waiting & ~here if here & asked == asked else waiting | mask
                break

            if op == BAR_SYNC or op == BAR_RED_OR_PRED or op == BAR_RED_AND_PRED:
                reduces = op != BAR_SYNC
                number = np.int64(U[operands[s + (1 if reduces else 0)], 0])
                of = 2 if reduces else 1
                wanted = np.int64(U[operands[s + of], 0]) if count > (3 if reduces else 1) else 32 * warps
                if state[w, 0] == 0:
                    state[w, 0], state[w, 1] = 1, barriers[number, 1]
                    barriers[number, 0] += 32
                    if reduces:
                        for l in range(WIDE):
                            yes = mask >> l & 1 and V[operands[s + count - 1], l] != 0
                            if op == BAR_RED_OR_PRED:
                                barriers[number, 2] |= 1 if yes else 0
                            elif mask >> l & 1 and not yes:
                                barriers[number, 2] |= 1
                    if barriers[number, 0] > wanted:
                        error = BARRIER
                    if barriers[number, 0] == wanted:
                        barriers[number, 0] = 0
                        barriers[number, 1] += 1
                        barriers[number, 3], barriers[number, 2] = barriers[number, 2], 0
                if error == 0 and state[w, 1] == barriers[number, 1]:
                    for l in range(WIDE):
                        if mask >> l & 1:
                            counter[l] = p
                    return WAITS
                state[w, 0] = 0
                if reduces:
                    for l in range(WIDE):
                        V[operands[s], l] = np.uint64(
                            barriers[number, 3] if op == BAR_RED_OR_PRED else 1 - barriers[number, 3]
                        )
            elif op == BAR_ARRIVE:
                number, wanted = np.int64(U[operands[s], 0]), np.int64(U[operands[s + 1], 0])
                barriers[number, 0] += 32
                if barriers[number, 0] > wanted:
                    error = BARRIER
                if barriers[number, 0] == wanted:
                    barriers[number, 0] = 0
                    barriers[number, 1] += 1
            elif op == BARRIER_CLUSTER_ARRIVE:
                state[w, 6] = cluster[1]
                cluster[0] += 1
                if cluster[0] == warps * shared.shape[0]:
                    cluster[0] = 0
                    cluster[1] += 1
            elif op == BARRIER_CLUSTER_WAIT:
                if cluster[1] == state[w, 6]:
                    for l in range(WIDE):
                        if mask >> l & 1:
                            counter[l] = p
                    return WAITS
            elif op == BAR_WARP_SYNC or op == WHOLE or op == WGMMA_FENCE_SYNC:
                pass
            elif op == GRIDDEPCONTROL_WAIT:
                if flags[0] == 0:
                    for l in range(WIDE):
                        if mask >> l & 1:
                            counter[l] = p
                    return WAITS
            elif op == GRIDDEPCONTROL_LAUNCH_DEPENDENTS:
                flags[1] = 1
            elif op == NANOSLEEP_U32:
                waits = True
            elif op == CP_ASYNC_BULK_WAIT_GROUP or op == CP_ASYNC_BULK_WAIT_GROUP_READ:
                n, least_state = np.int64(U[operands[s], 0]), 2 if op == CP_ASYNC_BULK_WAIT_GROUP_READ else 3
                for i in range(queue.shape[0]):
                    if queue[i, 0] != 0 and queue[i, 11] == w and m >> queue[i, 12] & 1 and queue[i, 1] < least_state:
                        if queue[i, 13] >= 0 and queue[i, 13] < groups[w, queue[i, 12]] - n:
                            for l in range(WIDE):
                                if mask >> l & 1:
                                    counter[l] = p
                            return WAITS
            elif op == CP_ASYNC_COMMIT_GROUP or op == CP_ASYNC_WAIT_GROUP or op == CP_ASYNC_WAIT_ALL:
                pass
            elif op == TRAP:
                error = TRAP
            elif op <= LAST_MEMORY:
                error = memory_(
                    op, p, m, w, s, count, code, operands, R, local, shared, rank, memory, base, allowed, info
                )
                waits = (op == LD_GLOBAL or op == LD_SHARED) and code[p, 5] & 1 != 0
            elif op <= LAST_TOGETHER:
                error = together_(op, m, s, count, operands, R)
            elif op <= LAST_MATRICES:
                error = matrices_(
                    op, p, w, s, count, code, operands, R, state, products, shared, rank, halves, info, left, right
                )
            elif op <= LAST_COPIES:
                error, waits = copies_(
                    op, p, m, w, s, count, code, operands, R, queue, groups, shared, rank, memory, base, allowed, info
                )
            # LANES
            else:
                error = UNKNOWN
            if error < 0:
                info[0], info[1], info[2] = error, p, w
                return error
            p += 1
            if waits:
                for l in range(WIDE):
                    if mask >> l & 1:
                        counter[l] = p
                return WAITS


@njit
def run(slices, haste, block):
    """Give warps of a block turns. haste: of 100 turns, in how many a copy goes on, too. DONE, GOES_ON or an error."""
    state, queue, parts, memory, rng = block.state, block.queue, block.parts, block.memory, block.rng
    shared, base, allowed, info = block.shared, block.base, block.allowed, block.info
    shared8, words, floats = shared.view(np.int64), memory.view(np.int64), memory.view(np.float32)
    warps, idle = state.shape[0], 0
    for _ in range(slices):
        if chance(rng, 100) < haste or idle > 2 * warps:
            pending = 0
            for i in range(queue.shape[0]):
                pending += queue[i, 0] != 0
            if pending:
                which = chance(rng, pending)
                for i in range(queue.shape[0]):
                    if queue[i, 0] != 0:
                        if which == 0:
                            error = advance(queue[i], parts[i], shared, shared8, memory, words, floats, base, allowed)
                            if error < 0:
                                info[0], info[1], info[2] = error, queue[i, 14], queue[i, 11]
                                return error
                            break
                        which -= 1
            idle = 0
        w = chance(rng, warps)
        if state[w, 5]:
            idle += 1
            continue
        found = step(w, 1 + chance(rng, 400), block)
        if found < 0:
            return found
        idle = idle + 1 if found == WAITS else 0
        if found == DONE:
            state[w, 5] = 1
            left_over = False
            for i in range(warps):
                left_over |= state[i, 5] == 0
            if not left_over:
                for i in range(queue.shape[0]):
                    if queue[i, 0] != 0:
                        if queue[i, 1] == 1:
                            info[0], info[1], info[2] = UNREAD, queue[i, 14], queue[i, 11]
                            return UNREAD
                        advance(queue[i], parts[i], shared, shared8, memory, words, floats, base, allowed)
                return DONE
    return GOES_ON
