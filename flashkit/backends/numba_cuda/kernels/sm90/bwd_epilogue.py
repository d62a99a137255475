# dK or dV of a warp's 16 keys to memory: through shared memory and by TMA, 64 columns at a time.

BYTES_PIECE = 16 * CHUNK_ROW


@device
def store_matrices(i, words, args):
    """16 columns of a warp's 16 keys."""
    target, lane = args
    stmatrix_x4(target + swizzled(lane % 16, 2 * i + lane // 16), words[0], words[1], words[2], words[3])


def make_store_dkv(columns, columns_stored, before, buffers, stride):
    """store_dkv(p, tensor, target, at, key, lane, buffer, x, factor): so many columns of dK or dV of work tile `at`.
    tensor, target: a tensor map, and the tensor; key: the warp's first. The pieces go through so many buffers in shared
    memory, `stride` bytes apart; `before` pieces went there before these. The first one waits until all earlier bulk
    stores of the warp have left. TMA would also store the keys behind the end of a packed sequence, which are the next
    one's.
    """
    in_flight, padding = buffers - 1, (u32(0),) * (-columns // 4 % 16)

    @device
    def store_piece(i, words, args):
        tensor, box, lane, buffer, left, rows, token = args
        target = buffer + (before + i) % buffers * stride
        if before + i == 0:
            bulk_wait_read(0)
        else:
            bulk_wait_read(in_flight)
        lanes_sync()
        groups(store_matrices, 4, words, (target, lane))
        fence_proxy_async()
        lanes_sync()
        if IS_PACKED and left < 16:
            for vec in range(i32(lane), i32(left * 8), i32(32)):
                if 64 * i + vec % 8 * 8 < columns_stored:
                    store_vec(
                        rows + (I(vec // 8) * token + 64 * i + vec % 8 * 8) * ITEMSIZE,
                        load_vec(target + swizzled(vec // 8, vec % 8)),
                    )
        if elect_one():
            if not IS_PACKED or left >= 16:
                tma_store(tensor, target, 64 * i, box[0], 0, box[1], box[2])
            bulk_commit()

    @device
    def store_dkv(p, tensor, target, at, key, lane, buffer, x, factor):
        box = i32(kv_token(p, at[0], key)), at[1], entry_of(at[0])
        left = i32(seq_info(p, I(at[0])).n_k) - key if IS_PACKED else i32(16)
        rows = row_address(target, I(at[0]), I(at[1]), I(box[0]))
        args = tensor, box, lane, buffer, left, rows, target.token
        groups(store_piece, 16, join(pack, scaled(x, factor)) + padding, args)

    return store_dkv
