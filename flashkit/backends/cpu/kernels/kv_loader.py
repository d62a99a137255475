"""The K/V loader: tiles of keys and values as the products want them. specialise.py puts this text before the kernels'.

`kv_run` and `kv_rows` alone know where the rows of a key/value head lie: in tensors (B, H, N, D), in packed ones, or in
pages (pages, H, page, D) that a table names. The last DIM_PE columns of the keys may lie apart, in K_PE.

    kv_run      how many rows lie at one stride
    kv_rows     such rows of K, K_PE, V, dK or dV, in place
    kv_scales   the scales of such rows of K or V
    gather      rows of K, K_PE or V, copied
    k_tile      rows of K with all columns, in place if they are one run, else gathered
    v_tile      likewise of V
    load_k      K      left operand of S^T = K Q^T        forward
    load_v_t    V^T    left operand of O^T += V^T P^T
    pack_t      K^T    right operand of S = Q K^T         backward
                V^T    right operand of dP = dO V^T

`address`: scratch memory for a tile that is not used where it lies.
"""

ONE = np.float64(1).view(np.int64)


@njit(**options)
def kv_run(args, b, first, count):
    if args[PAGE_TABLE] == 0:
        return count
    run = args[PAGE] - first % args[PAGE]
    if args[PAGES_FOLLOW]:
        entry = args[PAGE_TABLE] + 8 * (b * args[TABLE_WIDTH] + first // args[PAGE])
        page = integer_at(entry)
        while run < count and 0 <= page < args[PAGES] - 1 and integer_at(entry + 8) == page + 1:
            run, page, entry = run + args[PAGE], page + 1, entry + 8
    return min(count, run)


@njit(**options)
def kv_at(args, b, first):
    """Batch entry and row, or page and slot."""
    if args[PAGE_TABLE] == 0:
        return b, first
    page = integer_at(args[PAGE_TABLE] + 8 * (b * args[TABLE_WIDTH] + first // args[PAGE]))
    return min(max(page, 0), args[PAGES] - 1), first % args[PAGE]


@njit(**options)
def kv_rows(args, tensor, seq, b, head_kv, first, count, width):
    entry, row = kv_at(args, b, seq.key_offset + first)
    return tokens(args, tensor, entry, head_kv, row, count, width, KV_SIZE, KV_STORAGE)


@njit(**options)
def kv_scales(args, tensor, scales, b, head_kv, first, count):
    """Scales, to be multiplied by KV_UNIT. Their distance from the tensor holds for all layers of a cache."""
    entry, row = kv_at(args, b, first)
    base = args[tensor] + args[scales] + entry * args[scales + 1] + head_kv * args[scales + 2]
    return vector(base + row * args[scales + 3], count, args[scales + 3], np.float32)


@njit(**options)
def prefetch_run(args, tensor, seq, b, head_kv, first, end, width):
    """Read ahead where the next run of rows begins, which the hardware cannot know; no row from `end` on."""
    if first < end:
        start = kv_rows(args, tensor, seq, b, head_kv, first, np.int64(1), width).ctypes.data
        for line in range(PREFETCHED_LINES):
            prefetch(start + 64 * line)


@njit(**options)
def gather(args, tensor, seq, b, head_kv, first, tile):
    count, width = tile.shape
    done = np.int64(0)
    while done < count:
        run = kv_run(args, b, first + done, count - done)
        rows = kv_rows(args, tensor, seq, b, head_kv, first + done, run, width)
        for i in range(run):
            for j in range(width):
                tile[done + i, j] = rows[i, j]
        done += run


@njit(**options)
def storage_tile(address, count, width):
    return matrix(address, count, width, width * STORAGE_SIZE, STORAGE_SIZE, STORAGE)


@njit(**options)
def k_tile(args, seq, b, head_kv, first, count, address):
    d, d_pe = args[DIM], args[DIM_PE]
    if d_pe == 0 and kv_run(args, b, first, count) == count:
        return kv_rows(args, K, seq, b, head_kv, first, count, d)
    tile = storage_tile(address, count, d)
    gather(args, K, seq, b, head_kv, first, tile[:, : d - d_pe])
    gather(args, K_PE, seq, b, head_kv, first, tile[:, d - d_pe :])
    return tile


@njit(**options)
def v_tile(args, seq, b, head_kv, first, count, address):
    if kv_run(args, b, first, count) == count:
        return kv_rows(args, V, seq, b, head_kv, first, count, args[DIM_V])
    tile = storage_tile(address, count, args[DIM_V])
    gather(args, V, seq, b, head_kv, first, tile)
    return tile


@njit(**options)
def load_k(args, seq, b, head_kv, k0, n, address, pages):
    """pages: scratch memory for rows that are gathered."""
    return load_tile(args, k_tile(args, seq, b, head_kv, k0, n, pages), address)


@njit(**options)
def load_v_t(args, seq, b, head_kv, k0, n, address, pages):
    return load_tile_t(args, v_tile(args, seq, b, head_kv, k0, n, pages), address)


@njit(**options)
def pack_t(args, rows, scale, address):
    """Rows of K or V as columns of a right operand, scaled."""
    count, width = rows.shape
    target = accum_tile(address, (width + K_PACK - 1) // K_PACK, count, args[BLOCK_K] * ACCUM_SIZE)
    call_pack_transposed(args[PACK_TRANSPOSED], rows, target, scale)
    return target
