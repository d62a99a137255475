# parts: sm90/bwd_layout common/bwd_nonfinite
# dK or dV of a warp's 16 keys to memory: through shared memory and by TMA, 64 columns at a time.

BYTES_PIECE = 16 * CHUNK_ROW
BUFFERS = BYTES_DQ_WARP // BYTES_PIECE


@device
def store_matrices(i, words, args):
    """16 columns of a warp's 16 keys."""
    target, lane = args
    stmatrix_x4(target + swizzled(lane % 16, 2 * i + lane // 16), words[0], words[1], words[2], words[3])


def make_store_dkv(which, columns, before):
    """store_dkv(p, tensor, at, key, lane, buffer, x, factor): so many columns of dK or dV of work tile `at`. tensor: a
    tensor map; key: the warp's first. The pieces go through BUFFERS buffers; `before` pieces went there before these.
    The first one waits until all earlier bulk stores of the warp have left.
    """
    in_flight, padding = BUFFERS - 1, (u32(0),) * (-columns // 4 % 16)

    @device
    def store_piece(i, words, args):
        tensor, box, lane, buffer = args
        target = buffer + (before + i) % BUFFERS * BYTES_PIECE
        if before + i == 0:
            bulk_wait_read(0)
        else:
            bulk_wait_read(in_flight)
        lanes_sync()
        groups(store_matrices, 4, words, (target, lane))
        fence_proxy_async()
        lanes_sync()
        if elect_one():
            tma_store(tensor, target, 64 * i, box[0], 0, box[1], box[2])
            bulk_commit()

    @device
    def store_dkv(p, tensor, at, key, lane, buffer, x, factor):
        n_k, box = i32(seq_info(p, I(at[0])).n_k), (key, at[1], at[0])
        x = each(scaled_or_zero, x, listed(key_of_row, ROWS, key), (factor, n_k))
        groups(store_piece, 16, join(pack, x) + padding, (tensor, box, lane, buffer))
        if MAY_HIDE:
            if rows_nonfinite(x):
                bulk_wait()
                lanes_sync()
                for r in range(16):
                    recompute_row(p, which, at[0], at[1], key + r, 0, columns, n_k, factor)

    return store_dkv


store_dv, store_dk = make_store_dkv(DV, PADDED_DIM_V, 0), make_store_dkv(DK, PADDED_DIM, CHUNKS_V)
