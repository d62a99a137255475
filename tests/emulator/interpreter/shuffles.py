"""What lanes of a warp exchange: shuffles, votes, reductions, elections. m: the lanes that take part."""


@njit
def lowest(mask):
    l = 0
    while not mask >> l & 1:
        l += 1
    return l


@njit
def shuffle(op, m, s, count, operands, R, scratch):
    U, V = R.view(np.uint32), R
    WIDE, tells = R.shape[1], count == 6  # tells: the second result says whether the source lane is in range
    rest = s + (2 if tells else 1)
    for l in range(WIDE):
        scratch[l] = V[operands[rest], l]
    for l in range(WIDE):
        if m >> l & 1:
            n, form = np.int64(U[operands[rest + 1], 2 * l]) & 31, np.int64(U[operands[rest + 2], 2 * l])
            clamp, segment = form & 31, form >> 8 & 31
            high, low = (l & segment) | (clamp & ~segment & 31), l & segment
            if op == SHFL_SYNC_IDX_B32:
                source = low | (n & ~segment & 31)
            elif op == SHFL_SYNC_BFLY_B32:
                source = l ^ n
            elif op == SHFL_SYNC_UP_B32:
                source = l - n
            else:
                source = l + n
            inside = source >= high if op == SHFL_SYNC_UP_B32 else source <= high
            V[operands[s], l] = scratch[source if inside else l]
            if tells:
                V[operands[s + 1], l] = np.uint64(1 if inside else 0)


@njit
def reduce(op, m, s, operands, R):
    """redux.sync."""
    U, I = R.view(np.uint32), R.view(np.int32)
    WIDE, total, first = R.shape[1], np.int64(0), True
    signed = op == REDUX_SYNC_MAX_S32 or op == REDUX_SYNC_MIN_S32 or op == REDUX_SYNC_ADD_S32
    for l in range(WIDE):
        if m >> l & 1:
            x = np.int64(I[operands[s + 1], 2 * l]) if signed else np.int64(U[operands[s + 1], 2 * l])
            if first:
                total, first = x, False
            elif op == REDUX_SYNC_OR_B32:
                total |= x
            elif op == REDUX_SYNC_AND_B32:
                total &= x
            elif op == REDUX_SYNC_MAX_U32 or op == REDUX_SYNC_MAX_S32:
                total = max(total, x)
            elif op == REDUX_SYNC_MIN_U32 or op == REDUX_SYNC_MIN_S32:
                total = min(total, x)
            else:
                total += x
    for l in range(WIDE):
        if m >> l & 1:
            U[operands[s], 2 * l] = np.uint32(total & 0xFFFFFFFF)


@njit
def vote(op, m, s, operands, V):
    WIDE, votes = V.shape[1], np.int64(0)
    for l in range(WIDE):
        if m >> l & 1 and V[operands[s + 1], l] != 0:
            votes |= 1 << l
    if op == VOTE_SYNC_ANY_PRED:
        votes = np.int64(votes != 0)
    elif op == VOTE_SYNC_ALL_PRED:
        votes = np.int64(votes == m)
    for l in range(WIDE):
        if m >> l & 1:
            V[operands[s], l] = np.uint64(votes)


@njit
def elect(m, s, operands, V):
    elected = lowest(m)
    for l in range(V.shape[1]):
        if m >> l & 1:
            V[operands[s], l] = np.uint64(elected)
            V[operands[s + 1], l] = np.uint64(1 if l == elected else 0)
