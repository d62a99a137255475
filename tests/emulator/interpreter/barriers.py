"""Barriers: mbarriers, named barriers (bar.*) and the cluster's.

An mbarrier's word: arrivals missing (20 bits), arrivals of a phase (20), bytes missing (22, plus 2^21), phase parity.
"""

NO_BYTES = 1 << 21


@njit
def mbarrier_after(word, arrivals, more_bytes):
    """An mbarrier's word after arrivals and a change of the bytes that it expects; -1 where that is an error."""
    missing, expected = word & 0xFFFFF, word >> 20 & 0xFFFFF
    missing_bytes, phase = (word >> 40 & 0x3FFFFF) - NO_BYTES, word >> 62 & 1
    missing -= arrivals
    missing_bytes += more_bytes
    if missing < 0 or expected == 0:
        return np.int64(-1)
    if missing == 0 and missing_bytes == 0:
        missing, phase = expected, 1 - phase
    return missing | expected << 20 | (missing_bytes + NO_BYTES) << 40 | phase << 62


@njit
def signal(shared8, address, arrivals, more_bytes):
    cta, at = address >> 24, (address & 0xFFFFFF) >> 3
    if cta >= shared8.shape[0] or at >= shared8.shape[1] or address & 7:
        return np.int64(OUTSIDE)
    word = mbarrier_after(shared8[cta, at], arrivals, more_bytes)
    if word < 0:
        return np.int64(BARRIER)
    shared8[cta, at] = word
    return np.int64(0)


@njit
def mbarrier(op, m, s, operands, R, shared, info):
    """An error, and whether the warp should wait for its next turn."""
    U, V = R.view(np.uint32), R
    shared8 = shared.view(np.int64)
    first = s if op == MBARRIER_INIT else s + 1  # the address; the others begin with their result
    WIDE, waits = R.shape[1], False
    for l in range(WIDE):
        if m >> l & 1:
            address = np.int64(U[operands[first], 2 * l]) + operands[first + 1]
            error = np.int64(0)
            if op == MBARRIER_ARRIVE:
                error = signal(shared8, address, 1, 0)
            elif op == MBARRIER_ARRIVE_EXPECT_TX:
                error = signal(shared8, address, 1, np.int64(U[operands[first + 2], 2 * l]))
            else:
                cta, at = spot(address, 8, shared)
                n = np.int64(U[operands[first + 2], 2 * l])
                if at < 0:
                    error = at
                elif op == MBARRIER_INIT:
                    shared8[cta, at >> 3] = n | n << 20 | NO_BYTES << 40
                else:
                    complete = shared8[cta, at >> 3] >> 62 & 1 != n & 1
                    V[operands[s], l] = np.uint64(1 if complete else 0)
                    waits |= not complete
            if error < 0:
                info[3], info[4] = l, address
                return error, False
    return np.int64(0), waits


@njit
def arrive(barriers, number, wanted):
    """A warp arrives at a named barrier; its columns: arrived, phase, vote of this phase, vote of the last one."""
    barriers[number, 0] += 32
    if barriers[number, 0] > wanted:
        return np.int64(BARRIER)
    if barriers[number, 0] == wanted:
        barriers[number, 0] = 0
        barriers[number, 1] += 1
        barriers[number, 3], barriers[number, 2] = barriers[number, 2], 0
    return np.int64(0)


@njit
def named_barrier(op, mask, w, s, count, operands, R, state, barriers, threads):
    """An error, and whether the warp has to wait."""
    U, V = R.view(np.uint32), R
    WIDE = R.shape[1]
    votes = op == BAR_RED_OR_PRED or op == BAR_RED_AND_PRED
    at = s + 1 if votes else s
    number = np.int64(U[operands[at], 0])
    wanted = np.int64(U[operands[at + 1], 0]) if count > (3 if votes else 1) else threads
    if op == BAR_ARRIVE:
        return arrive(barriers, number, wanted), False
    if state[w, AT_BARRIER] == 0:
        state[w, AT_BARRIER], state[w, BARRIER_PHASE] = 1, barriers[number, 1]
        if votes:  # collected as the disjunction; `and` by De Morgan
            for l in range(WIDE):
                if mask >> l & 1 and (V[operands[s + count - 1], l] != 0) == (op == BAR_RED_OR_PRED):
                    barriers[number, 2] = 1
        error = arrive(barriers, number, wanted)
        if error < 0:
            return error, False
    if state[w, BARRIER_PHASE] == barriers[number, 1]:
        return np.int64(0), True
    state[w, AT_BARRIER] = 0
    if votes:
        vote = barriers[number, 3] if op == BAR_RED_OR_PRED else 1 - barriers[number, 3]
        for l in range(WIDE):
            V[operands[s], l] = np.uint64(vote)
    return np.int64(0), False


@njit
def cluster_barrier(op, w, state, cluster, warps):
    """Whether the warp has to wait. cluster: arrived warps of all CTAs, phase."""
    if op == BARRIER_CLUSTER_WAIT:
        return cluster[1] == state[w, CLUSTER_PHASE]
    state[w, CLUSTER_PHASE] = cluster[1]
    cluster[0] += 1
    if cluster[0] == warps:
        cluster[0] = 0
        cluster[1] += 1
    return False
