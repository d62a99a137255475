# Tiles of the score matrix: SeqInfo, mask classification, the walk over tiles that are not EMPTY, modification of
# scores, dropout.
#
# The host passes no list of tiles. classify() proves from the corners of a tile that it is EMPTY (no pair is visible)
# or FULL (all pairs are); where it proves neither, the tile is PARTIAL and visible() decides each pair. Tiles may
# therefore have any size, and masks any length. The generated functions come before this text (numba_cuda/modify.py).
# b, h: batch entry and query head; row: index of the query; q: its position, row + SeqInfo.q_position; k: index of the
# key. The corners of classify() are inclusive.
#
#     modified_score(s, b, h, row, q, k, p)
#     score_slope(s, b, h, row, q, k, p)                   d modified_score / d s
#     visible(b, h, row, q, k, p)
#     classify(b, h, row0, row1, q0, q1, k0, k1, p)        EMPTY, PARTIAL or FULL

U, LOW = np.uint64, np.uint64(0xFFFFFFFF)

# Where a batch entry's tokens lie and how many there are: first row in the tensors of queries, number of queries, first
# row in the tensors of keys, number of keys, position of query 0 on the axis of the keys.
SeqInfo = namedtuple("SeqInfo", "row_offset n_q key_offset n_k q_position")


@device
def integer_at(address, i):
    """int64, or int32 where the lowest bit of the address is set (cuda_common/params.py)."""
    if address & 1:
        return I(load(np.int32, address - 1, i))
    return load(np.int64, address, i)


@device
def kv_length(p, b):
    """Lengths in device memory are clamped here: the host cannot check them without a synchronization."""
    if not HAS_LENGTHS:
        return p.n_k
    return min(max(integer_at(p.kv_lengths, b), 0), p.n_k)


@device
def seq_info(p, b):
    """The only reader of lengths and positions in Params, with the functions of SeqTile."""
    q_position = p.q_offset if p.q_offsets == 0 else load(np.int64, p.q_offsets, b)
    if IS_PACKED:
        start, end = load(np.int64, p.cu_seqlens_q, b), load(np.int64, p.cu_seqlens_q, b + 1)
        key_start = I(0) if IS_PAGED else load(np.int64, p.cu_seqlens_k, b)
        return SeqInfo(start, max(end - start, 0), key_start, kv_length(p, b), q_position)
    return SeqInfo(I(0), p.n_q, I(0), kv_length(p, b), q_position)


# A tile of a sequence. Packed sequences begin at any token: the tiles of sequence b have numbers from
# start // block + b on, where start is its first token. That leaves room for the tiles of all sequences before it, and
# needs no sum over them; at most one number for each sequence stands for no tile (is past the sequence's end).
SeqTile = namedtuple("SeqTile", "b tile")


@device
def first_tile(cu_seqlens, b, block):
    return I(U(load(np.int64, cu_seqlens, b)) // U(block)) + b


@device
def packed_tile(cu_seqlens, batch, number, block):
    low, high = I(0), batch
    while high - low > 1:
        middle = (low + high) >> 1
        if first_tile(cu_seqlens, middle, block) <= number:
            low = middle
        else:
            high = middle
    return SeqTile(low, number - first_tile(cu_seqlens, low, block))


@device
def num_entries(p):
    """Batch entries that grids and schedules count."""
    return I(1) if IS_PACKED else p.batch


@device
def num_q_tiles(p, block):
    """Query tiles of a head of one of these entries."""
    return p.n_q // block + p.batch if IS_PACKED else (p.n_q + block - 1) // block


@device
def num_k_tiles(p, block):
    return p.n_k // block + p.batch if IS_PACKED else (p.n_k + block - 1) // block


@device
def q_tile(p, entry, number, block):
    """The query tile that a number stands for."""
    if IS_PACKED:
        return packed_tile(p.cu_seqlens_q, p.batch, I(number), block)
    return SeqTile(I(entry), I(number))


@device
def k_tile(p, entry, number, block):
    if IS_PACKED:
        return packed_tile(p.cu_seqlens_k, p.batch, I(number), block)
    return SeqTile(I(entry), I(number))


@device
def stats_row(p, b, n):
    """The row of bwd_lse and delta for row n of a sequence."""
    return first_tile(p.cu_seqlens_q, I(b), p.row_block) * p.row_block + n if IS_PACKED else n


@device
def stored_n_k(p, b):
    """Keys whose dK and dV are written: 0 past kv_lengths; packed, those belong to another sequence."""
    return seq_info(p, I(b)).n_k if IS_PACKED else p.n_k


@device
def row_address(tensor, b, h, n):
    """Address of row n of head h of batch entry b, in a tensor of stored elements."""
    return tensor.data + (b * tensor.batch + h * tensor.head + n * tensor.token) * ITEMSIZE


@device
def number_address(tensor, b, h, n):
    """The same in a tensor of computed numbers, such as the log-sum-exp."""
    return tensor.data + (b * tensor.batch + h * tensor.head + n * tensor.token) * F_ITEMSIZE


@device
def q_token(p, b, n):
    """The row of query n of sequence b in a tensor that has one for each query: Q, O, dO, dQ, log-sum-exps."""
    return seq_info(p, I(b)).row_offset + n


@device
def kv_token(p, b, n):
    """The row of key n of sequence b in a tensor that has one for each key: K, V, dK, dV."""
    return seq_info(p, I(b)).key_offset + n


@device
def q_row_address(p, tensor, b, h, n):
    return row_address(tensor, b, h, q_token(p, b, n))


PageTable = namedtuple("PageTable", "data width pages page")  # address; pages of a sequence; all pages; keys of a page


@device
def page_table(p):
    return PageTable(p.page_table, p.table_width, p.pages, p.page)


@device
def page_and_row(table, b, n):
    """Where key n, of less than 2^31, of sequence b lies; a page that does not exist is the first or the last."""
    at = I(np.uint32(np.uint32(n) // np.uint32(table.page)))
    page = integer_at(table.data, I(b) * table.width + at)
    return min(max(page, 0), table.pages - 1), n - at * table.page


# --- the walk over tiles ----------------------------------------------------------------------------------------------
#
# Along one axis over the tiles that are not EMPTY. Every warp of a CTA walks by itself, in step with the others. The
# lanes of a warp classify 32 tiles at once, and before that 32 groups of 32 tiles unless the mask reads arrays; so a
# long run of EMPTY tiles costs few evaluations of the mask. A walk is a value; next_tile() returns the next one. All
# lanes of a warp call it together.
#
#     walk = walk_keys(p, b, h, row0, row1, n_k)
#     while walk.state != EMPTY:
#         walk.tile, walk.state ...
#         walk = next_tile(p, walk)

Walk = namedtuple(
    "Walk",
    "tile, state, "  # PARTIAL or FULL; EMPTY after the last
    "b, h, start, end, n, along_keys, "  # start ... end - 1: the range on the other axis; n: elements along this axis
    "chunk, live, full, "  # tiles chunk ... chunk + 31 are classified; bit masks: not EMPTY and not yet visited, FULL
    "first_group, groups",  # 32 groups of tiles from here on are classified; those that are not EMPTY
)


@device
def walk_keys(p, b, h, row0, row1, n_k):
    """Tiles of BLOCK_K keys of which rows row0 ... row1 - 1 see a part."""
    return next_tile(p, Walk(-1, FULL, b, h, row0, row1, n_k, True, -32, 0, 0, -32, 0))


@device
def walk_queries(p, b, h, k0, k1, n_q):
    """Tiles of BLOCK_Q rows that see some of the keys k0 ... k1 - 1."""
    return next_tile(p, Walk(-1, FULL, b, h, k0, k1, n_q, False, -32, 0, 0, -32, 0))


@device
def exists(walk, tile):
    """Compares elements: a count of tiles would take a division."""
    return tile * (BLOCK_K if walk.along_keys else BLOCK_Q) < walk.n


@device
def tile_state(p, b, h, q_position, row0, row1, k0, k1):
    """State of rows row0 ... row1 - 1 and keys k0 ... k1 - 1; neither range is empty."""
    if not HAS_MASK:
        return FULL
    return I(classify(b, h, row0, row1 - 1, row0 + q_position, row1 - 1 + q_position, k0, k1 - 1, p))


@device
def classify_steps(p, walk, first, last):
    """State of the tiles of steps first ... last - 1 of the walk."""
    block = BLOCK_K if walk.along_keys else BLOCK_Q
    start, end = first * block, min(last * block, walk.n)
    if start >= end:
        return EMPTY
    q_position = seq_info(p, walk.b).q_position
    if walk.along_keys:
        return tile_state(p, walk.b, walk.h, q_position, walk.start, walk.end, start, end)
    return tile_state(p, walk.b, walk.h, q_position, start, end, walk.start, walk.end)


if HAS_MASK:

    @device
    def next_tile(p, walk):
        lane = thread_here() & 31
        chunk, live, full, first_group, groups = walk.chunk, walk.live, walk.full, walk.first_group, walk.groups
        over = False
        while live == 0 and not over:
            if not MASK_READS_ARRAYS:
                while groups == 0 and not over:
                    first_group += 32
                    over = not exists(walk, first_group * 32)
                    if not over:
                        group = (first_group + lane) * 32
                        groups = ballot(classify_steps(p, walk, group, group + 32) != EMPTY)
                if not over:
                    chunk = (first_group + lowest_bit(groups)) * 32
                    groups &= groups - 1
            else:
                chunk += 32
                over = not exists(walk, chunk)
            if not over:
                state = classify_steps(p, walk, chunk + lane, chunk + lane + 1)
                live = ballot(state != EMPTY)
                full = ballot(state == FULL)
        tile, state = -1, EMPTY
        if not over:
            bit = lowest_bit(live)
            tile, state = chunk + bit, FULL if (full >> bit) & 1 else PARTIAL
            live &= live - 1
        return Walk(
            tile, state, walk.b, walk.h, walk.start, walk.end, walk.n, walk.along_keys, chunk, live, full, first_group,
            groups,
        )  # fmt: skip

else:

    @device
    def next_tile(p, walk):
        tile = walk.tile + 1
        return Walk(
            tile, FULL if exists(walk, tile) else EMPTY, walk.b, walk.h, walk.start, walk.end, walk.n,
            walk.along_keys, walk.chunk, walk.live, walk.full, walk.first_group, walk.groups,
        )  # fmt: skip


# --- modify -----------------------------------------------------------------------------------------------------------


@device
def modify(s, state, b, h, row, q, k, p):
    """The modified score; -inf where the pair is masked."""
    if HAS_SCORE:
        s = modified_score(s, b, h, row, q, k, p)
    if HAS_MASK:
        if state == PARTIAL:
            s = s if visible(b, h, row, q, k, p) else HIDDEN
    return s


# --- dropout ----------------------------------------------------------------------------------------------------------
#
# Of P and dP by a counter-based generator (flashkit/mods/dropout.py): the forward and the backward pass compute the
# same bits from (seed, batch entry, head, row, key).


@device
def seed_of(p):
    """The seed, and where the counter begins."""
    return p.seed, p.dropout_first, p.dropout_head


@device
def philox(given, key_group, row, h, b):
    """Philox-4x32-10: four words, for keys 4 * key_group ... 4 * key_group + 3 of a row."""
    seed, first, head = given
    c0, c1 = (U(key_group) + (first >> U(32))) & LOW, (U(row) + first) & LOW
    c2, c3 = (U(h) + head) & LOW, U(b) & LOW
    key0, key1 = seed & LOW, seed >> U(32)
    for _ in range(10):
        product0, product1 = U(0xD2511F53) * c0, U(0xCD9E8D57) * c2
        c0, c1 = (product1 >> U(32)) ^ c1 ^ key0, product1 & LOW
        c2, c3 = (product0 >> U(32)) ^ c3 ^ key1, product0 & LOW
        key0, key1 = (key0 + U(0x9E3779B9)) & LOW, (key1 + U(0xBB67AE85)) & LOW
    return c0, c1, c2, c3


@device
def drop(x, p, b, h, row, key):
    """An element of P or dP, dropped or scaled."""
    word0, word1, word2, word3 = philox(seed_of(p), key >> 2, row, h, b)
    lane = key & 3
    word = word0 if lane == 0 else word1 if lane == 1 else word2 if lane == 2 else word3
    return x * F(p.dropout_scale) if word >= p.dropout_threshold else ZERO
