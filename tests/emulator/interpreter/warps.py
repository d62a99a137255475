"""Warps: which lanes run together, which instruction is next, and whose turn it is."""

DONE, WAITS, GOES_ON = 2, 1, 0  # of a turn
AT_BARRIER, BARRIER_PHASE, WGMMAS, WGMMA_GROUPS, EXITED, CLUSTER_PHASE = 0, 1, 2, 3, 4, 5  # columns of state


@njit
def random_below(rng, n):
    x = rng[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = x
    return np.int64((x >> np.uint64(11)) % np.uint64(n))


@njit
def move_to(counter, mask, p):
    """Set the program counters of lanes."""
    for l in range(counter.size):
        if mask >> l & 1:
            counter[l] = p


@njit
def lanes_at(counter, p):
    mask = np.int64(0)
    for l in range(counter.size):
        if counter[l] == p:
            mask |= 1 << l
    return mask


@njit
def next_lanes(counter, waiting):
    """The lowest program counter of the lanes that do not wait for others, and a mask of all that have not exited."""
    p, live = np.int64(NOWHERE), np.int64(0)
    for l in range(counter.size):
        if counter[l] >= 0:
            live |= 1 << l
            if not waiting >> l & 1 and counter[l] < p:
                p = np.int64(counter[l])
    return p, live


@njit
def guarded(mask, guard, V):
    """The lanes whose guard holds: predicate guard - 1, negated where the guard is negative."""
    r, wanted = abs(guard) - 1, guard > 0
    for l in range(V.shape[1]):
        if mask >> l & 1 and (V[r, l] != 0) != wanted:
            mask &= ~(1 << l)
    return mask


@njit
def participants(op, s, count, live, mask, operands, U):
    """The lanes that have to execute an instruction together; 0 where each lane does by itself."""
    if op <= LAST_LANEWISE or op > LAST_SHUFFLES:
        return np.int64(0)
    if op <= LAST_MATRICES:
        return live
    if op == BAR_WARP_SYNC:
        member = operands[s]
    else:
        member = operands[s + 2] if op == ELECT_SYNC else operands[s + count - 1]
    return live & np.int64(U[member, 2 * lowest(mask)])


NOWHERE = 1 << 40


@njit
def step(w, budget, block):
    """Run a warp for so many instructions, or until it waits. DONE, WAITS, GOES_ON or an error."""
    code, operands, counter, state, info = block.code, block.operands, block.counters[w], block.state, block.info
    shared, cta, queue, groups = block.shared, block.rank, block.queue, block.groups
    memory, base, allowed, halves = block.memory, block.base, block.allowed, block.halves
    left, right, scratch = block.left, block.right, block.scratch
    R = block.registers[w]
    U, I, V, L = R.view(np.uint32), R.view(np.int32), R, R.view(np.int64)
    F, D, H, S = R.view(np.float32), R.view(np.float64), R.view(np.uint16), R.view(np.int16)
    AI, AU, AL, AV = memory.view(np.int32), memory.view(np.uint32), memory.view(np.int64), memory.view(np.uint64)
    AF, AD = memory.view(np.float32), memory.view(np.float64)
    warps = block.registers.shape[0]
    WIDE = np.int64(counter.size)  # 32, which the compiler must not know: it would unroll every loop
    waiting = np.int64(0)  # lanes that wait for others at a warp-synchronous instruction
    while True:
        p, live = next_lanes(counter, waiting)
        if live == 0:
            return DONE
        if p == NOWHERE:
            info[0], info[2] = DIVERGED, w
            return DIVERGED
        mask = lanes_at(counter, p)
        waiting &= ~mask
        while True:
            if budget <= 0:
                move_to(counter, mask, p)
                return GOES_ON
            budget -= 1
            block.hits[p] += 1
            op, guard, s, count = code[p, 0], code[p, 1], np.int64(code[p, 2]), np.int64(code[p, 3])
            m = mask if guard == 0 else guarded(mask, guard, V)
            if op == BRA:
                move_to(counter, mask, p + 1)
                move_to(counter, m, np.int64(code[p, 4]))
                if mask != live or (m != 0 and m != mask):
                    break
                p = p + 1 if m == 0 else np.int64(code[p, 4])
                continue
            if m == 0:
                p += 1
                continue
            if op == RET or op == EXIT:
                move_to(counter, mask, p + 1)
                move_to(counter, m, -1)
                break
            together = participants(op, s, count, live, mask, operands, U)
            if mask & together != together:
                move_to(counter, mask, p)
                converged = lanes_at(counter, p)
                waiting = waiting & ~converged if converged & together == together else waiting | mask
                break

            error, again, waits = np.int64(0), False, False  # again: the same instruction in the warp's next turn
            if op <= LAST_FLOW:
                if op == GRIDDEPCONTROL_WAIT:
                    again = block.flags[0] == 0
                elif op == GRIDDEPCONTROL_LAUNCH_DEPENDENTS:
                    block.flags[1] = 1
                elif op == NANOSLEEP_U32:
                    waits = True
                elif op == TRAP:
                    error = np.int64(TRAPPED)
            elif op <= LAST_MEMORY:
                error = load_store(
                    op, p, m, w, s, count, code, operands, R, block.local, shared, memory, base, allowed, info
                )
                waits = (op == LD_GENERIC or op == LD_GLOBAL or op == LD_SHARED) and code[p, 5] & 1 != 0
            elif op <= LAST_PACKING:
                pack_unpack(op, p, m, s, count, code, operands, V)
            elif op <= LAST_MBARRIERS:
                error, waits = mbarrier(op, m, s, operands, R, shared, info)
            elif op <= LAST_COPIES:
                error = issue(op, p, m, w, s, operands, R, queue, groups)
            elif op <= LAST_STORE_WAITS:
                again = stores_pending(op, m, w, np.int64(U[operands[s], 0]), queue, groups)
            elif op <= LAST_LANEWISE:
                error = copy_now(op, p, m, s, operands, code, R, shared, memory, base, allowed, info)
            elif op <= LAST_BARRIERS:
                if op == BARRIER_CLUSTER_ARRIVE or op == BARRIER_CLUSTER_WAIT:
                    again = cluster_barrier(op, w, state, block.cluster, warps * shared.shape[0])
                elif op != SETMAXNREG:
                    error, again = named_barrier(op, mask, w, s, count, operands, R, state, block.barriers, 32 * warps)
            elif op <= LAST_MATRICES:
                if op == MMA_F16 or op == MMA_BF16 or op == MMA_TF32:
                    mma(op - MMA_F16, s, operands, R, halves, left, right)
                elif op == LDMATRIX:
                    transposed = code[p, 5] != 0
                    error = ldmatrix(np.int64(code[p, 4]), transposed, s, count, operands, R, shared, scratch, info)
                elif op == STMATRIX:
                    error = stmatrix(np.int64(code[p, 4]), code[p, 5] != 0, s, operands, R, shared, info)
                elif op == WGMMA_COMMIT_GROUP_SYNC:
                    state[w, WGMMA_GROUPS] += 1
                elif op == WGMMA_WAIT_GROUP_SYNC:
                    before = state[w, WGMMA_GROUPS] - np.int64(U[operands[s], 0])
                    wgmma_complete(w, before, code, operands, R, state, block.wgmmas, shared, cta, halves, left, right)
                elif op != WGMMA_FENCE_SYNC:
                    n, kind = np.int64(code[p, 4]), np.int64(op - WGMMA_F16)
                    error = wgmma_issue(kind, p, w, s, count, n, operands, R, state, block.wgmmas)
            elif op <= LAST_SHUFFLES:
                if op == ELECT_SYNC:
                    elect(m, s, operands, V)
                elif op >= SHFL_SYNC_BFLY_B32 and op <= SHFL_SYNC_UP_B32:
                    shuffle(op, m, s, count, operands, R, scratch)
                elif op >= VOTE_SYNC_ALL_PRED and op <= VOTE_SYNC_BALLOT_B32:
                    vote(op, m, s, operands, V)
                elif op != BAR_WARP_SYNC:
                    reduce(op, m, s, operands, R)
            # OPERATIONS
            else:
                error = np.int64(UNKNOWN)
            if error < 0:
                info[0], info[1], info[2] = error, p, w
                return error
            if again or waits:
                move_to(counter, mask, p if again else p + 1)
                return WAITS
            p += 1


@njit
def copies_pending(queue):
    pending = 0
    for i in range(queue.shape[0]):
        pending += queue[i, KIND] != 0
    return pending


@njit
def advance_one(queue, which, block):
    """Do the next part of one of the pending copies. Returns an error."""
    for i in range(queue.shape[0]):
        if queue[i, KIND] != 0:
            if which == 0:
                error = advance(queue[i], block.buffers[i], block.shared, block.memory, block.base, block.allowed)
                if error < 0:
                    block.info[0], block.info[1], block.info[2] = error, queue[i, ROW], queue[i, WARP]
                return error
            which -= 1
    return np.int64(0)


@njit
def exit_block(block):
    """What is left of copies when all warps have exited. DONE or an error."""
    queue = block.queue
    for i in range(queue.shape[0]):
        if queue[i, KIND] != 0 and queue[i, STAGE] == ISSUED:
            block.info[0], block.info[1], block.info[2] = UNREAD, queue[i, ROW], queue[i, WARP]
            return np.int64(UNREAD)
    while copies_pending(queue) > 0:
        error = advance_one(queue, 0, block)
        if error < 0:
            return error
    return np.int64(DONE)


@njit
def run(turns, copy_rate, block):
    """Give warps of a CTA turns, and of 100 turns `copy_rate` to its copies, too. DONE, GOES_ON or an error."""
    state, queue, rng = block.state, block.queue, block.rng
    warps, idle = state.shape[0], 0
    for _ in range(turns):
        if random_below(rng, 100) < copy_rate or idle > 2 * warps:
            pending, idle = copies_pending(queue), 0
            if pending > 0:
                error = advance_one(queue, random_below(rng, pending), block)
                if error < 0:
                    return error
        w = random_below(rng, warps)
        if state[w, EXITED]:
            idle += 1
            continue
        found = step(w, 1 + random_below(rng, 400), block)
        if found < 0:
            return found
        idle = idle + 1 if found == WAITS else 0
        if found == DONE:
            state[w, EXITED] = 1
            exited = 0
            for i in range(warps):
                exited += state[i, EXITED]
            if exited == warps:
                return exit_block(block)
    return np.int64(GOES_ON)
