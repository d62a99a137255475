# parts: common/tiles common/fragment sm80/bwd_layout sm80/mma common/softmax
# The epilogue of the backward pass: dK and dV.

# --- the non-finite fallback ------------------------------------------------------------------------------------------
#
# Gradients that are not finite are recomputed from global memory, pair by pair: P or dS = 0 of a masked pair may have
# met inf or NaN in a tensor core.

DQ, DK, DV = 0, 1, 2


@device
def dot(x, y, dim):
    total = ZERO
    for d in range(dim):
        total += widen(load(STORED, x, d)) * widen(load(STORED, y, d))
    return total


@device
def recompute_pair(p, b, h, query, key):
    """P of a pair after dropout, and its dS."""
    q, k = row_address(p.q, b, h, query), row_address(p.k, b, h // GQA_GROUP, key)
    s, position = dot(q, k, HEAD_DIM) * np.float32(p.softmax_scale), query + seq_info(p, b).q_position
    lse = load(np.float32, number_address(p.bwd_lse, b, h, query), 0)
    delta = load(np.float32, number_address(p.delta, b, h, query), 0)
    x = modify(s, PARTIAL, b, h, query, position, key, p)
    p_pair = ZERO if x == HIDDEN else exp2_fast(x * LOG2E - lse * LOG2E)
    dp = dot(row_address(p.dout, b, h, query), row_address(p.v, b, h // GQA_GROUP, key), HEAD_DIM_V)
    if HAS_DROPOUT:
        dp = drop(dp, p, b, h, query, key)
    ds = ZERO if p_pair == ZERO else p_pair * (dp - delta)
    if HAS_SCORE:
        slope = score_slope(s, b, h, query, position, key, p)
        ds = ZERO if ds == ZERO else ds * slope
    if HAS_DROPOUT:
        p_pair = drop(p_pair, p, b, h, query, key)
    return p_pair, ds


@device
def recompute_row(p, which, b, head, row, first, columns, end, factor):
    """A warp recomputes columns first ... of one row before `end` of dQ, dK or dV, skipping products with 0. head: a
    query head for dQ, else a key/value head.
    """
    lane, b, row = I(thread() % 32), I(b), I(row)
    if row < end:
        target = p.dq if which == DQ else p.dk if which == DK else p.dv
        other = p.k if which == DQ else p.q if which == DK else p.dout
        seq, dim = seq_info(p, b), I(HEAD_DIM_V if which == DV else HEAD_DIM)
        n = seq.n_k if which == DQ else seq.n_q
        heads = 1 if which == DQ else GQA_GROUP
        for i in range((columns + 31) // 32):
            column, total = min(first + lane + 32 * i, dim - 1), ZERO
            for h in range(I(head) * heads, I(head) * heads + heads):
                for start in range(0, n, 32):
                    own_index = min(start + lane, n - 1)
                    query, key = (row, own_index) if which == DQ else (own_index, row)
                    p_pair, ds = recompute_pair(p, b, I(h), query, key)
                    own = p_pair if which == DV else ds
                    for lane_of in range(min(I(32), n - start)):
                        factor_i = from_lane_float(own, lane_of)
                        of_head = I(h) // GQA_GROUP if which == DQ else I(h)
                        x = widen(load(STORED, row_address(other, b, of_head, I(start + lane_of)), column))
                        total += ZERO if factor_i == ZERO else factor_i * x
            if lane + 32 * i < columns and first + lane + 32 * i < dim:
                store(STORED, row_address(target, b, I(head), row), column, narrow(total * factor))


# --- the epilogue -----------------------------------------------------------------------------------------------------


@device
def scaled_or_zero(x, row, rest):
    factor, end = rest
    return x * factor if row < end else ZERO  # keys past the sequence's length get 0


@device
def key_of_row(j, first):
    return first + 8 * j + i32(thread() % 32 // 4)


@device
def is_nonfinite(j, so_far, zero):
    return so_far or zero[j] != ZERO


@device
def epilogue(p, which, b, head, tile_k, n_k, acc, factor, staged):
    """Stores a warp's accumulator of dK or dV by way of shared memory, in vectors of 16 bytes."""
    dim, target = HEAD_DIM_V if which == DV else HEAD_DIM, p.dv if which == DV else p.dk
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    row0, columns = tile_k * BLOCK_K + warp // ACROSS_KV * 32, (PADDED_V if which == DV else PADDED_QK) // ACROSS_KV
    staged, first = staged + warp // ACROSS_KV * 32 * CHUNK_ROW, warp % ACROSS_KV * columns
    acc = each(scaled_or_zero, acc, listed(key_of_row, ROWS, row0), (factor, n_k))
    groups(store_o_fragment, FRAGMENT, join(pack, acc), (staged, CHUNK_K, first // 8))
    lanes_sync()
    address = row_address(target, I(b), I(head), I(row0))
    for i in range(lane, 4 * columns, 32):
        row, vec = i // (columns // 8), first // 8 + i % (columns // 8)
        if row0 + row < p.n_k and 8 * vec < dim:
            vector = load_vec(staged + (vec >> 3) * CHUNK_K + swizzled(row, vec & 7))
            store_vec(address + row * target.token * ITEMSIZE + VEC_BYTES * vec, vector)
    if MAY_HIDE:  # P or dS = 0 may have met inf or NaN
        if any_lane(repeat(is_nonfinite, ROWS, False, row_sum(scaled(acc, ZERO), ZERO_ROWS))):
            for r in range(32):
                recompute_row(p, which, b, head, row0 + r, first, columns, n_k, factor)
