# After Hopper's backward kernel: dq_accum, which lies transposed, to dq. A CTA takes a query tile, a thread 8 columns
# of a row.


@device
def scaled_dq(g, args):
    address, scale = args
    return load(F, address, 16 * g) * scale


@kernel(256)
def bwd_postprocess(p):
    at, scale = query_tile_of_cta(p), F(p.softmax_scale)
    accum = dq_accum(p, at)
    for turn in range(BLOCK_Q * CHUNKS // 32):
        i = u32(thread() + 256 * turn)
        vec, r, part = i % u32(8), i // u32(8) % u32(BLOCK_Q), i // u32(8 * BLOCK_Q)
        row, column = at[2] * BLOCK_Q + r, 64 * part + 8 * vec
        if not DQ_BY_COLUMNS:
            part, r = r // DQ_PART_ROWS, r % DQ_PART_ROWS
        if row < seq_info(p, I(at[0])).n_q and column < HEAD_DIM:
            warp, half = vec // 2, vec % 2
            address = accum + part * BYTES_DQ_PART + warp * BYTES_DQ_WARP + r // 8 * 512 + r % 8 // 2 * 16
            x = listed(scaled_dq, 8, (address + 8 * half + r % 2 * 4, scale))
            store_vec(row_address(p.dq, I(at[0]), I(at[1]), I(row)) + column * ITEMSIZE, join(pack, x))
