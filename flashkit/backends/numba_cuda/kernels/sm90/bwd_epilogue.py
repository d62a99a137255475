# dK or dV of a warp's 16 keys to memory: through shared memory and by TMA, 64 columns at a time.

BYTES_PIECE = 16 * CHUNK_ROW


@device
def store_matrices(i, words, args):
    """16 columns of a warp's 16 keys."""
    target, lane = args
    stmatrix_x4(target + swizzled(lane % 16, 2 * i + lane // 16), words[0], words[1], words[2], words[3])


def make_store_dkv(columns, before, buffers, stride):
    """store_dkv(tensor, at, key, lane, buffer, x, factor): so many columns of dK or dV of work tile `at`. tensor: a
    tensor map; key: the warp's first. The pieces go through so many buffers in shared memory, `stride` bytes apart;
    `before` pieces went there before these. The first one waits until all earlier bulk stores of the warp have left.
    """
    in_flight, padding = buffers - 1, (u32(0),) * (-columns // 4 % 16)

    @device
    def store_piece(i, words, args):
        tensor, box, lane, buffer = args
        target = buffer + (before + i) % buffers * stride
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
    def store_dkv(tensor, at, key, lane, buffer, x, factor):
        args = tensor, (key, at[1], at[0]), lane, buffer
        groups(store_piece, 16, join(pack, scaled(x, factor)) + padding, args)

    return store_dkv
