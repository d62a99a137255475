"""Loads and stores, and words packed from registers."""


@njit
def place(address, size, base, allowed):
    """Offset of these bytes of global memory; OUTSIDE or MISALIGNED."""
    at = address - base
    if at < 0 or at + size > allowed.size or not allowed[at] or not allowed[at + size - 1]:
        return np.int64(OUTSIDE)
    return at if at % size == 0 or size > 16 else np.int64(MISALIGNED)


@njit
def spot(address, size, shared):
    """CTA of the cluster and offset of an address in shared memory; CTA 0 with OUTSIDE or MISALIGNED."""
    cta, at = address >> 24, address & 0xFFFFFF
    if cta < 0 or cta >= shared.shape[0] or at + size > shared.shape[1]:
        return np.int64(0), np.int64(OUTSIDE)
    if at % size != 0 and size <= 16:
        return np.int64(0), np.int64(MISALIGNED)
    return cta, at


@njit
def read(space, at, width, signed):
    """An element as 64 bits."""
    if width == 8:
        return space.view(np.uint64)[at >> 3]
    if width == 4:
        x = np.int64(space.view(np.uint32)[at >> 2])
    elif width == 2:
        x = np.int64(space.view(np.uint16)[at >> 1])
    else:
        x = np.int64(space[at])
    bits = 8 * width
    return np.uint64(x - (1 << bits) if signed and x >> (bits - 1) & 1 else x)


@njit
def write(space, at, width, x):
    if width == 8:
        space.view(np.uint64)[at >> 3] = x
    elif width == 4:
        space.view(np.uint32)[at >> 2] = x & np.uint64(0xFFFFFFFF)
    elif width == 2:
        space.view(np.uint16)[at >> 1] = x & np.uint64(0xFFFF)
    else:
        space[at] = x & np.uint64(0xFF)


@njit
def load_store(op, p, m, w, s, count, code, operands, R, local, shared, memory, base, allowed, info):
    U, V, L = R.view(np.uint32), R, R.view(np.int64)
    WIDE = R.shape[1]
    width, n, signed = np.int64(abs(code[p, 4])), np.int64(code[p, 5] >> 1), code[p, 4] < 0
    stores = op == ST_GENERIC or op == ST_GLOBAL or op == ST_SHARED or op == ST_LOCAL
    generic = op == LD_GENERIC or op == ST_GENERIC
    r, first = (s, s + 2) if stores else (s + count - 2, s)
    base_register, offset = operands[r], np.int64(operands[r + 1])
    for l in range(WIDE):
        if m >> l & 1:
            address = L[base_register, l] + offset
            if op == LD_GLOBAL or op == ST_GLOBAL or (generic and address >= base):
                space, at = memory, place(address, width * n, base, allowed)
            elif op == LD_LOCAL or op == ST_LOCAL or (generic and address >= LOCAL):
                space, at = local[w, l], address - LOCAL
                if at < 0 or at + width * n > local.shape[2]:
                    at = np.int64(OUTSIDE)
            else:
                if not generic:
                    address = np.int64(U[base_register, 2 * l]) + offset
                cta, at = spot(address, width * n, shared)
                space = shared[cta]
            if at < 0:
                info[3], info[4] = l, address
                return at
            for i in range(n):
                register = operands[first + i]
                if stores:
                    write(space, at + i * width, width, V[register, l])
                else:
                    V[register, l] = read(space, at + i * width, width, signed)
    return np.int64(0)


@njit
def pack_unpack(op, p, m, s, count, code, operands, V):
    """mov of a vector of registers to or from a wider one."""
    WIDE, n, bits = V.shape[1], count - 1, np.uint64(8 * code[p, 4])
    mask = ~np.uint64(0) >> (np.uint64(64) - bits)
    for l in range(WIDE):
        if m >> l & 1:
            x = np.uint64(0) if op == PACK else V[operands[s + n], l]
            for i in range(n):
                shift = bits * np.uint64(i)
                if op == PACK:
                    x |= (V[operands[s + 1 + i], l] & mask) << shift
                else:
                    V[operands[s + i], l] = x >> shift & mask
            if op == PACK:
                V[operands[s], l] = x
