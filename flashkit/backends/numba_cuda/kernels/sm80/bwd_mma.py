# parts: common/fragment sm80/bwd_layout sm80/mma
# The five matrix products of the backward pass, with the copies and additions that are interleaved with them.


@device
def mma_step_nt_copying(step, sums, rest):
    """mma_step_nt() that interleaves the copies of a tile, a few per step: many at once stall on each other."""
    operands, copy, steps, pieces, dim, columns = rest
    sums = mma_step_nt(step, sums, operands)
    for piece in range((step * pieces + steps - 1) // steps, ((step + 1) * pieces + steps - 1) // steps):
        chunk, row = piece // (BLOCK_Q // ROWS_AT_ONCE), piece % (BLOCK_Q // ROWS_AT_ONCE) * ROWS_AT_ONCE
        copy_rows(copy, chunk, row, BLOCK_Q, dim, columns)
    return sums


@device
def scores(stage, keys, rows, first, copy):
    """S = Q K^T for this warp's 32 query rows, from `rows` on, and its keys, from `first` on."""
    operands = stage + rows * CHUNK_ROW, CHUNK_Q, keys + first * CHUNK_ROW, CHUNK_K
    rest = operands, copy, STEPS, PIECES, HEAD_DIM, PADDED_QK
    return repeat(mma_step_nt_copying, STEPS, filled(ZERO, KEYS_S), rest)


@device
def dp_scores(stage, values, rows, first, copy):
    """dP = dO V^T"""
    operands = stage + AT_STAGE_DOUT + rows * CHUNK_ROW, CHUNK_Q, values + first * CHUNK_ROW, CHUNK_K
    rest = operands, copy, STEPS_V, PIECES_V, HEAD_DIM_V, PADDED_V
    return repeat(mma_step_nt_copying, STEPS_V, filled(ZERO, KEYS_S), rest)


@device
def store_fragment(i, words, at):
    """16 keys of 32 query rows, packed, to P or dS in shared memory."""
    for j in range(FRAGMENT):
        store_word(at + (j // 4 * 16 + j % 2 * 8) * PITCH + (2 * i + j // 2 % 2) * VEC_BYTES, i32(words[j]))


@device
def mma_step_tn(step, sums, rest):
    p_tile, b, first = rest
    at = p_tile + 16 * step * PITCH
    a_frag = ldmatrix_x4_trans(at) + ldmatrix_x4_trans(at + 2 * VEC_BYTES)
    return groups(mma_columns_nn, SIXTEEN, sums, (a_frag, b, CHUNK_Q, first, 16 * step))


@device
def key_address(p_tile):
    """The address at which a lane reads the columns of P or dS that are its warp's 32 keys."""
    lane = i32(thread() % 32)
    row, column = lane // 16 * 8 + lane % 8, i32(thread() // 32) // ACROSS_KV * 64 + lane // 8 % 2 * VEC_BYTES
    return p_tile + row * PITCH + column


@device
def gemm_tn(sums, p_tile, rows, first):
    """sums += P^T rows, or dS^T rows, for this warp's 32 keys and its columns, from vector `first` on."""
    return repeat(mma_step_tn, STEPS_KV, sums, (key_address(p_tile), rows, first))


@device
def reduce_add_fragment(i, four, address):
    """Adds four neighbouring registers of a lane to dq_accum."""
    if VECTOR_ADDS:
        red_add_four(address + 512 * i, four)
    else:
        for j in range(4):
            red_add(address + 512 * i + 4 * j, four[j])


@device
def dq_accum_at(p, b, h, tile, warp):
    """Address of a lane's part of dq_accum, which lies in memory as fragments: four registers of each lane in turn."""
    head_accum = number_address(p.dq_accum, I(b), I(h), I(0))
    of_tile = I(tile) * (4 * BLOCK_Q * PADDED_QK)
    return head_accum + of_tile + 128 * SUMS_Q * warp + 16 * (thread() % 32)


@device
def mma_step_tn_adding(step, dq, sums, rest):
    rest, target = rest
    groups(reduce_add_fragment, 4, dq, target + DQ_ADDS_PER_STEP * 128 * step)
    return mma_step_tn(step, sums, rest)


@device
def gemm_tn_adding(sums, p_tile, rows, first, dq, target):
    """gemm_tn() that interleaves the additions of dq to dq_accum, a few per step: many at once fill the queue."""
    return chain(mma_step_tn_adding, DQ_ADDS_PER_STEP, dq, sums, ((key_address(p_tile), rows, first), target))


@device
def mma_step_nn(step, sums, rest):
    ds_tile, keys, first = rest
    a_frag = ldmatrix_x4(ds_tile + 32 * step) + ldmatrix_x4(ds_tile + 32 * step + 16 * PITCH)
    return groups(mma_columns_nn, SIXTEEN, sums, (a_frag, keys, CHUNK_K, first, 16 * step))


@device
def compute_dq(ds_tile, keys):
    """dQ = dS K of this CTA's keys, for this warp's 32 query rows and its columns."""
    warp, lane = i32(thread() // 32), i32(thread() % 32)
    rows, first = warp // ACROSS_Q * 32 + lane % 16, warp % ACROSS_Q * (SUMS_Q // 8)
    rest = ds_tile + rows * PITCH + lane // 16 * VEC_BYTES, keys, first
    return repeat(mma_step_nn, STEPS_Q, filled(ZERO, SUMS_Q), rest)
