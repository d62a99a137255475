"""Matrix instructions of a warp and of a warp group. Products are summed in float64 and rounded once.

wgmma is put down with its descriptors and computed when its group is waited for: shared memory has to hold the operands
until then, and accumulators are stale before. Types: 0 float16, 1 bfloat16, 2 tf32, 3 e4m3.

Of e4m3 a tensor core keeps about 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.5.2): here every addend of
an instruction, the accumulator among them, is truncated to 13 bits below the greatest one's first.
"""

TF32, E4M3 = 2, 3
KEPT_BITS = 13


@njit
def tf32_of(bits):
    """The number that tensor cores make of float32's bits."""
    return np.uint32(bits & np.uint32(0xFFFFE000)).view(np.float32)


@njit
def fragment_a(kind, first, operands, R, halves, left):
    """16 rows of A from registers."""
    U, H = R.view(np.uint32), R.view(np.uint16)
    for l in range(R.shape[1]):
        g, t = l >> 2, l & 3
        for half in range(2):
            for side in range(2):
                register = operands[first + half + 2 * side]
                if kind == TF32:
                    left[g + 8 * half, t + 4 * side] = tf32_of(U[register, 2 * l])
                elif kind == E4M3:
                    for c in range(4):
                        code = np.int64(U[register, 2 * l] >> np.uint32(8 * c)) & 0xFF
                        left[g + 8 * half, 16 * side + 4 * t + c] = halves[kind, code]
                else:
                    for c in range(2):
                        left[g + 8 * half, 8 * side + 2 * t + c] = halves[kind, H[register, 4 * l + c]]


@njit
def mma(kind, s, operands, R, halves, left, right):
    """D = A B + C of a warp, 16 x 8."""
    U, F, H = R.view(np.uint32), R.view(np.float32), R.view(np.uint16)
    WIDE = R.shape[1]
    fragment_a(kind, s + 4, operands, R, halves, left)
    for l in range(WIDE):
        g, t = l >> 2, l & 3
        for side in range(2):
            register = operands[s + 8 + side]
            if kind == TF32:
                right[g, t + 4 * side] = tf32_of(U[register, 2 * l])
            else:
                for c in range(2):
                    right[g, 8 * side + 2 * t + c] = halves[kind, H[register, 4 * l + c]]
    for l in range(WIDE):
        g, t = l >> 2, l & 3
        for e in range(4):
            i, j = g + 8 * (e >> 1), 2 * t + (e & 1)
            total = np.float64(F[operands[s + 10 + e], 2 * l])
            for x in range(8 if kind == TF32 else 16):
                total += np.float64(left[i, x]) * np.float64(right[j, x])
            right[32 + l, e] = np.float32(total)  # registers of D may be others of C
    for l in range(WIDE):
        for e in range(4):
            F[operands[s + e], 2 * l] = right[32 + l, e]


@njit
def ldmatrix(n, transposed, s, count, operands, R, shared, scratch, info):
    U, V = R.view(np.uint32), R
    halfwords = shared.view(np.uint16)
    found = scratch.view(np.uint16)  # n matrices of 8 x 8
    for l in range(8 * n):
        address = np.int64(U[operands[s + count - 2], 2 * l]) + operands[s + count - 1]
        cta, at = spot(address, 16, shared)
        if at < 0:
            info[3], info[4] = l, address
            return at
        for j in range(8):
            found[8 * l + j] = halfwords[cta, (at >> 1) + j]
    for i in range(n):
        for l in range(R.shape[1]):
            g, t = l >> 2, l & 3
            first, apart = (64 * i + 16 * t + g, 8) if transposed else (64 * i + 8 * g + 2 * t, 1)
            V[operands[s + i], l] = np.uint64(found[first]) | np.uint64(found[first + apart]) << np.uint64(16)
    return np.int64(0)


@njit
def stmatrix(n, transposed, s, operands, R, shared, info):
    U, H = R.view(np.uint32), R.view(np.uint16)
    halfwords = shared.view(np.uint16)
    for i in range(n):
        for r in range(8):
            l = 8 * i + r
            address = np.int64(U[operands[s], 2 * l]) + operands[s + 1]
            cta, at = spot(address, 16, shared)
            if at < 0:
                info[3], info[4] = l, address
                return at
            for j in range(8):
                source, half = (4 * j + r // 2, r & 1) if transposed else (4 * r + j // 2, j & 1)
                halfwords[cta, (at >> 1) + j] = H[operands[s + 2 + i], 4 * source + half]
    return np.int64(0)


# --- wgmma ------------------------------------------------------------------------------------------------------------
# A pending one: its row in the program; the descriptors of A (0: in registers) and B; whether it accumulates; whether A
# and B are transposed; its group; its type.

HISTORY = 64
"""How many of a warp's last wgmma are compared with those of its warp group: their tiles of B, or, of e4m3, their rows
in the program, which is more. The last number of a state is how many it has issued.
"""

PROGRAM_ROW, OF_A, OF_B, ACCUMULATES, TRANSPOSES_A, TRANSPOSES_B, OF_GROUP, OF_TYPE = 0, 1, 2, 3, 4, 5, 6, 7


@njit
def wgmma_issue(kind, p, w, s, count, n, operands, R, state, pending):
    V, L = R, R.view(np.int64)
    at = state[w, WGMMAS]
    if at >= pending.shape[1]:
        return np.int64(FULL)
    first = s + n // 2  # after the accumulators
    from_shared = count - n // 2 == (5 if kind >= TF32 else 7)
    rest = first + (1 if from_shared else 4)
    entry = pending[w, at]
    entry[PROGRAM_ROW], entry[OF_A] = p, L[operands[first], 0] if from_shared else 0
    entry[OF_B], entry[ACCUMULATES] = L[operands[rest], 0], np.int64(V[operands[rest + 1], 0])
    issued, count_of, own = state[w, -1], state.shape[1] - 1, state.shape[1] - 1 - HISTORY
    what = p if kind == E4M3 else entry[OF_B]
    for other in range(w - w % 4, min(w - w % 4 + 4, state.shape[0])):
        ahead = state[other, count_of] - issued
        if 0 < ahead <= HISTORY and state[other, own + issued % HISTORY] != what:
            return np.int64(PARTED)
    state[w, own + issued % HISTORY], state[w, count_of] = what, issued + 1
    entry[TRANSPOSES_A] = entry[TRANSPOSES_B] = 0
    if kind < TF32:
        if from_shared:
            entry[TRANSPOSES_A] = L[operands[rest + 4], 0]
        entry[TRANSPOSES_B] = L[operands[rest + (5 if from_shared else 4)], 0]
    entry[OF_GROUP], entry[OF_TYPE] = state[w, WGMMA_GROUPS], kind
    state[w, WGMMAS] += 1
    return np.int64(0)


@njit
def element(shared, cta, at, kind, halves):
    at = swizzled(at)
    if kind == E4M3:
        return halves[kind, np.int64(shared[cta, at])]
    bits = np.uint32(shared[cta, at]) | np.uint32(shared[cta, at + 1]) << np.uint32(8)
    if kind == TF32:
        bits |= np.uint32(shared[cta, at + 2]) << np.uint32(16) | np.uint32(shared[cta, at + 3]) << np.uint32(24)
        return tf32_of(bits)
    return halves[kind, np.int64(bits)]


@njit
def operand(descriptor, rows, row0, k, transposed, kind, shared, cta, halves, into):
    """Rows row0 ... of an operand in shared memory, K-major or transposed, in lines of 128 bytes."""
    start, chunk, lines = (descriptor & 0x3FFF) << 4, (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    width = 4 if kind == TF32 else 1 if kind == E4M3 else 2
    for i in range(rows):
        r = row0 + i
        for j in range(k):
            if transposed:
                at = start + (r >> 6) * chunk + (j >> 3) * lines + (j & 7) * 128 + (r & 63) * 2
            else:
                at = start + (r >> 3) * lines + (r & 7) * 128 + j * width
            into[i, j] = element(shared, cta, at, kind, halves)


@njit
def aligned_sum(before, k, left, right):
    """before + left right, of addends that are truncated relative to the greatest."""
    greatest = abs(before)
    for x in range(k):
        greatest = max(greatest, abs(np.float64(left[x]) * np.float64(right[x])))
    quantum = 2.0 ** (math.frexp(greatest)[1] - 1 - KEPT_BITS)
    total = np.trunc(before / quantum)
    for x in range(k):
        total += np.trunc(np.float64(left[x]) * np.float64(right[x]) / quantum)
    return total * quantum


@njit
def wgmma(n, k, s, operands, entry, R, shared, cta, warp, halves, left, right):
    """A warp's 16 rows of a warp group's product."""
    F, kind = R.view(np.float32), entry[OF_TYPE]
    if entry[OF_A] != 0:
        operand(entry[OF_A], 16, 16 * (warp & 3), k, entry[TRANSPOSES_A], kind, shared, cta, halves, left)
    else:
        fragment_a(kind, s + n // 2, operands, R, halves, left)
    operand(entry[OF_B], n, 0, k, entry[TRANSPOSES_B], kind, shared, cta, halves, right)
    for l in range(R.shape[1]):
        g, t = l >> 2, l & 3
        for e in range(n // 2):
            i, j = g + 8 * (e >> 1 & 1), 8 * (e >> 2) + 2 * t + (e & 1)
            register, total = operands[s + e], 0.0
            before = np.float64(F[register, 2 * l]) if entry[ACCUMULATES] else 0.0
            if kind == E4M3:
                total, before = aligned_sum(before, k, left[i], right[j]), 0.0
            else:
                for x in range(k):
                    total += np.float64(left[i, x]) * np.float64(right[j, x])
            F[register, 2 * l] = np.float32(total + before)


@njit
def wgmma_complete(w, groups, code, operands, R, state, pending, shared, cta, halves, left, right):
    """Compute a warp's pending products of the groups before this one."""
    done = 0
    while done < state[w, WGMMAS] and pending[w, done, OF_GROUP] < groups:
        entry = pending[w, done]
        p = entry[PROGRAM_ROW]
        n, k, s = np.int64(code[p, 4]), np.int64(code[p, 5]), np.int64(code[p, 2])
        wgmma(n, k, s, operands, entry, R, shared, cta, w, halves, left, right)
        done += 1
    for i in range(done, state[w, WGMMAS]):
        for field in range(pending.shape[2]):
            pending[w, i - done, field] = pending[w, i, field]
    state[w, WGMMAS] -= done
