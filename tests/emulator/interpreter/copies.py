"""Asynchronous copies: what instructions put into a queue, and what the copy engine does with an entry.

Loads and copies between CTAs happen at once; a store first reads its source, then writes. In between the source must
not change, which is what cp.async.bulk.wait_group.read waits for.
"""

LOAD_BOX, STORE_BOX, LOAD, STORE, ADD, DSMEM = 1, 2, 3, 4, 5, 6  # kinds of an entry; 0: none
ISSUED, HAS_READ = 1, 2  # stages
KIND, STAGE, TARGET, SOURCE, BYTES, MBARRIER, BOX_AT, WARP, LANE, GROUP, ROW = 0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14


@njit
def enqueue(queue, kind, target, source, size, mbarrier, w, l, group, p):
    """The entry's number; FULL where there is no room. The five numbers from BOX_AT are coordinates of a box."""
    for i in range(queue.shape[0]):
        if queue[i, KIND] == 0:
            queue[i, KIND], queue[i, STAGE], queue[i, TARGET], queue[i, SOURCE] = kind, ISSUED, target, source
            queue[i, BYTES], queue[i, MBARRIER] = size, mbarrier
            queue[i, WARP], queue[i, LANE], queue[i, GROUP], queue[i, ROW] = w, l, group, p
            return np.int64(i)
    return np.int64(FULL)


@njit
def set_box(queue, i, I, operands, at, l):
    """The coordinates of entry i; nothing where there was no room for it."""
    for j in range(5):
        if i >= 0:
            queue[i, BOX_AT + j] = np.int64(I[operands[at + j], 2 * l])


@njit
def issue(op, p, m, w, s, operands, R, queue, groups):
    """Copies of the TMA unit."""
    U, I, L = R.view(np.uint32), R.view(np.int32), R.view(np.int64)
    WIDE = R.shape[1]
    for l in range(WIDE):
        if m >> l & 1:
            i, box = np.int64(0), 0  # box: the operand that its coordinates begin at
            if op == CP_ASYNC_BULK_COMMIT_GROUP:
                groups[w, l] += 1
            elif op == CP_ASYNC_BULK_SHARED_GLOBAL_MBARRIER or op == CP_ASYNC_BULK_SHARED_SHARED_MBARRIER:
                target = np.int64(U[operands[s], 2 * l]) + operands[s + 1]
                size = np.int64(U[operands[s + 4], 2 * l])
                complete = np.int64(U[operands[s + 5], 2 * l]) + operands[s + 6]
                if op == CP_ASYNC_BULK_SHARED_SHARED_MBARRIER:
                    source = np.int64(U[operands[s + 2], 2 * l]) + operands[s + 3]
                    i = enqueue(queue, DSMEM, target, source, size, complete, w, l, -1, p)
                else:
                    source = L[operands[s + 2], l] + operands[s + 3]
                    i = enqueue(queue, LOAD, target, source, size, complete, w, l, -1, p)
            elif (
                op == CP_ASYNC_BULK_TENSOR_5D_SHARED_GLOBAL_MBARRIER
                or op == CP_ASYNC_BULK_TENSOR_5D_SHARED_GLOBAL_MBARRIER_MULTICAST
            ):
                target = np.int64(U[operands[s], 2 * l]) + operands[s + 1]
                source = L[operands[s + 2], l] + operands[s + 3]
                complete = np.int64(U[operands[s + 9], 2 * l]) + operands[s + 10]
                ctas = np.int64(1) << (target >> 24)
                if op == CP_ASYNC_BULK_TENSOR_5D_SHARED_GLOBAL_MBARRIER_MULTICAST:
                    ctas = np.int64(U[operands[s + 11], 2 * l]) & 0xFFFF
                for cta in range(16):
                    if ctas >> cta & 1 and i >= 0:
                        to, at = np.int64(cta) << 24 | target & 0xFFFFFF, np.int64(cta) << 24 | complete & 0xFFFFFF
                        i = enqueue(queue, LOAD_BOX, to, source, 0, at, w, l, -1, p)
                        set_box(queue, i, I, operands, s + 4, l)
            elif op == CP_ASYNC_BULK_TENSOR_5D_GLOBAL_SHARED_BULK_GROUP:
                target = L[operands[s], l] + operands[s + 1]
                source, box = np.int64(U[operands[s + 7], 2 * l]) + operands[s + 8], s + 2
                i = enqueue(queue, STORE_BOX, target, source, 0, 0, w, l, groups[w, l], p)
            else:
                target = L[operands[s], l] + operands[s + 1]
                source = np.int64(U[operands[s + 2], 2 * l]) + operands[s + 3]
                kind = STORE if op == CP_ASYNC_BULK_GLOBAL_SHARED_BULK_GROUP else ADD
                i = enqueue(queue, kind, target, source, np.int64(U[operands[s + 4], 2 * l]), 0, w, l, groups[w, l], p)
            if i < 0:
                return i
            if box > 0:
                set_box(queue, i, I, operands, box, l)
    return np.int64(0)


@njit
def stores_pending(op, mask, w, n, queue, groups):
    """Whether more than n of the lanes' latest groups of stores are incomplete, or have not read their sources."""
    for i in range(queue.shape[0]):
        if queue[i, KIND] != 0 and queue[i, WARP] == w and mask >> queue[i, LANE] & 1 and queue[i, GROUP] >= 0:
            read_is_enough = op == CP_ASYNC_BULK_WAIT_GROUP_READ
            if not (read_is_enough and queue[i, STAGE] == HAS_READ):
                if queue[i, GROUP] < groups[w, queue[i, LANE]] - n:
                    return True
    return False


@njit
def copy_now(op, p, m, s, operands, code, R, shared, memory, base, allowed, info):
    """Asynchronous copies of threads, and st.async: done at once, so a missing wait for them is not found."""
    U, V, L = R.view(np.uint32), R, R.view(np.int64)
    WIDE = R.shape[1]
    for l in range(WIDE):
        if m >> l & 1:
            address = np.int64(U[operands[s], 2 * l]) + operands[s + 1]
            if op == ST_ASYNC:
                cta, at = spot(address, 4, shared)
                error = at
                if at >= 0:
                    shared.view(np.uint32)[cta, at >> 2] = U[operands[s + 2], 2 * l]
                    error = signal(shared.view(np.int64), np.int64(U[operands[s + 3], 2 * l]) + operands[s + 4], 0, -4)
            else:
                size = np.int64(U[operands[s + 4], 2 * l])
                taken = size
                if code[p, 4] == 1:  # ignored by a predicate
                    taken = size if V[operands[s + 5], l] == 0 else np.int64(0)
                elif code[p, 4] == 2:  # bytes that are read, the rest 0
                    taken = np.int64(U[operands[s + 5], 2 * l])
                cta, to = spot(address, size, shared)
                at = np.int64(0)
                if to >= 0 and taken > 0:
                    address = L[operands[s + 2], l] + operands[s + 3]
                    at = place(address, size, base, allowed)
                error = min(to, at)
                if error >= 0:
                    for i in range(size):
                        shared[cta, to + i] = memory[at + i] if i < taken else 0
            if error < 0:
                info[3], info[4] = l, address
                return error
    return np.int64(0)


# --- the copy engine --------------------------------------------------------------------------------------------------


@njit
def swizzled(at):
    """The 128-byte swizzle."""
    return at ^ (at >> 7 & 7) << 4


@njit
def bytes_of_box(words, at):
    b = words[at + 8 : at + 12]  # sizes, two in a word, and bytes of an element
    return (b[0] & 0xFFFFFFFF) * (b[0] >> 32) * (b[1] & 0xFFFFFFFF) * (b[1] >> 32) * b[2] * b[3]


@njit
def halves_of(word):
    return word & 0xFFFFFFFF, word >> 32


@njit
def move_box(words, at, c, buffer, shared, base, allowed, memory, loads, cta, offset):
    """Move the box of a tensor map from global memory to shared memory, or what was read of it from a buffer.

    words[at:]: the tensor map. c: coordinates. Returns the bytes, or an error.
    """
    (size0, size1), (size2, size3), size4 = halves_of(words[at + 1]), halves_of(words[at + 2]), words[at + 3]
    stride1, stride2, stride3, stride4 = words[at + 4], words[at + 5], words[at + 6], words[at + 7]
    (b0, b1), (b2, b3), b4 = halves_of(words[at + 8]), halves_of(words[at + 9]), words[at + 10]
    width, line = words[at + 11], 0
    for i4 in range(c[4], c[4] + b4):
        for i3 in range(c[3], c[3] + b3):
            for i2 in range(c[2], c[2] + b2):
                for i1 in range(c[1], c[1] + b1):
                    inside = 0 <= i1 < size1 and 0 <= i2 < size2 and 0 <= i3 < size3 and 0 <= i4 < size4
                    row = words[at] + i1 * stride1 + i2 * stride2 + i3 * stride3 + i4 * stride4
                    for i0 in range(b0):
                        packed = (line * b0 + i0) * width
                        in_shared = swizzled(offset + packed)
                        if inside and 0 <= c[0] + i0 < size0:
                            at_element = place(row + (c[0] + i0) * width, width, base, allowed)
                            if at_element < 0:
                                return at_element
                            for e in range(width):
                                if loads:
                                    shared[cta, in_shared + e] = memory[at_element + e]
                                else:
                                    memory[at_element + e] = buffer[packed + e]
                        elif loads:
                            for e in range(width):
                                shared[cta, in_shared + e] = 0
                    line += 1
    return bytes_of_box(words, at)


@njit
def load(entry, buffer, shared, memory, base, allowed):
    """To shared memory. Returns an error."""
    kind, target, source, size = entry[KIND], entry[TARGET], entry[SOURCE], entry[BYTES]
    cta, offset = target >> 24, target & 0xFFFFFF
    if kind == LOAD_BOX:
        if offset & 127:
            return np.int64(MISALIGNED)
        at = place(source, 8, base, allowed)
        box = entry[BOX_AT : BOX_AT + 5]
        size = move_box(memory.view(np.int64), at >> 3, box, buffer, shared, base, allowed, memory, True, cta, offset)
        if size < 0:
            return size
    else:
        cta, offset = spot(target, size, shared)
        space, at = memory, np.int64(0)
        if kind == LOAD:
            at = place(source, size, base, allowed)
        else:
            from_cta, at = spot(source, size, shared)
            space = shared[from_cta]
        if at < 0 or offset < 0:
            return np.int64(OUTSIDE)
        if at & 15 or offset & 15 or size & 15:
            return np.int64(MISALIGNED)
        for i in range(size):
            shared[cta, offset + i] = space[at + i]
    return signal(shared.view(np.int64), entry[MBARRIER], 0, -size)


@njit
def read_source(entry, buffer, shared, memory, base, allowed):
    """The first half of a store. Returns an error."""
    cta, offset, size = entry[SOURCE] >> 24, entry[SOURCE] & 0xFFFFFF, entry[BYTES]
    box = entry[KIND] == STORE_BOX
    if box:
        size = bytes_of_box(memory.view(np.int64), place(entry[TARGET], 8, base, allowed) >> 3)
    if offset & (127 if box else 15) or (size & 15 and not box):
        return np.int64(MISALIGNED)
    if offset + size > shared.shape[1]:
        return np.int64(OUTSIDE)
    for i in range(size):
        buffer[i] = shared[cta, swizzled(offset + i) if box else offset + i]
    return np.int64(0)


@njit
def write_target(entry, buffer, shared, memory, base, allowed):
    """The second half of a store. Returns an error."""
    size = entry[BYTES]
    if entry[KIND] == STORE_BOX:
        at, box = place(entry[TARGET], 8, base, allowed), entry[BOX_AT : BOX_AT + 5]
        moved = move_box(memory.view(np.int64), at >> 3, box, buffer, shared, base, allowed, memory, False, 0, 0)
        return min(moved, np.int64(0))
    at = place(entry[TARGET], size, base, allowed)
    if at < 0:
        return at
    if at & 15:
        return np.int64(MISALIGNED)
    if entry[KIND] == STORE:
        for i in range(size):
            memory[at + i] = buffer[i]
    else:
        numbers, sums = buffer.view(np.float32), memory.view(np.float32)
        for i in range(size >> 2):
            sums[(at >> 2) + i] += numbers[i]
    return np.int64(0)


@njit
def advance(entry, buffer, shared, memory, base, allowed):
    """Do the next part of an entry. Returns an error."""
    if entry[KIND] == LOAD_BOX or entry[KIND] == LOAD or entry[KIND] == DSMEM:
        error = load(entry, buffer, shared, memory, base, allowed)
    elif entry[STAGE] == ISSUED:
        entry[STAGE] = HAS_READ
        return read_source(entry, buffer, shared, memory, base, allowed)
    else:
        error = write_target(entry, buffer, shared, memory, base, allowed)
    entry[KIND] = 0
    return error
