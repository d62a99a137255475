# Tiles of the score matrix: which exist, what happens to a score of one, which weights dropout removes.
#
# No list of tiles is handed over. classify() proves from the corners of a tile alone that it is EMPTY (no pair is
# visible) or FULL (all are); where it can do neither the tile is PARTIAL and visible() decides each pair. So tiles may
# have any size, and masks any length. The generated functions stand before this text; b, h: batch entry and query head,
# row: the query's index, q: its position, row + offset_of(p, b), k: the key's index; the corners of classify are
# inclusive.
#
#     modified_score(s, b, h, row, q, k, p)     score_slope(s, b, h, row, q, k, p)     d modified_score / d s
#     visible(b, h, row, q, k, p)               classify(b, h, row0, row1, q0, q1, k0, k1, p)


@device
def row_address(tensor, b, h, n):
    """Address of token n of head h of batch entry b."""
    return tensor.data + (b * tensor.batch + h * tensor.head + n * tensor.token) * ITEM


@device
def number_address(tensor, b, h, n):
    """The same in a tensor of one computed number for each row."""
    return tensor.data + (b * tensor.batch + h * tensor.head + n * tensor.token) * F_ITEM


# Where a batch entry's tokens lie and how many there are: first row in the tensors of queries, number of queries, first
# row in the tensors of keys, number of keys, position of query 0 on the axis of the keys.
SeqInfo = namedtuple("SeqInfo", "row_offset n_q key_offset n_k q_position")


@device
def kv_length(p, b):
    """Lengths in device memory are clamped here: the host cannot check them without a synchronization."""
    if p.kv_lengths == 0:
        return p.n_k
    return min(max(load(np.int64, p.kv_lengths, b), 0), p.n_k)


@device
def seq_info(p, b):
    """The only reader of the lengths and positions in Params, with max_n_q() and max_n_k()."""
    q_position = p.q_offset if p.q_offsets == 0 else load(np.int64, p.q_offsets, b)
    return SeqInfo(I(0), p.n_q, I(0), kv_length(p, b), q_position)


@device
def max_n_q(p):
    """Queries of the longest sequence: grids and schedules are sized by it."""
    return p.n_q


@device
def max_n_k(p):
    """Keys of the longest sequence: grids, schedules and the rows of dK and dV are sized by it."""
    return p.n_k


@device
def keys_of(p, b):
    return seq_info(p, b).n_k


@device
def offset_of(p, b):
    return seq_info(p, b).q_position


# --- the walk over tiles ----------------------------------------------------------------------------------------------
#
# Along an axis, over the tiles that are not EMPTY. Every warp of a block walks by itself, all in step: the lanes of a
# warp classify 32 tiles at once, after 32 groups of 32 unless tiles are MASK_READS_ARRAYS, so a long run of EMPTY tiles costs a
# few looks at the mask. A walk is a value; next_tile() gives the next one. Call it with all lanes of a warp.
#
#     walk = walk_keys(p, b, h, row0, row1, n_k)
#     while walk.state != EMPTY:
#         walk.tile, walk.state ...
#         walk = next_tile(p, walk)

Walk = namedtuple(
    "Walk",
    "tile, state, "  # PARTIAL or FULL; EMPTY after the last
    "b, h, start, end, n, along_keys, "  # start ... end - 1: the range on the other axis; n: elements along this one
    "turn, "  # of a walk that goes down, its first tile; else -1
    "chunk, live, full, "  # tiles chunk ... chunk + 31 are classified; those of them that exist, and that are FULL
    "first_group, groups",  # 32 groups of tiles are classified from here on; those that are not EMPTY
)


@device
def walk_keys(p, b, h, row0, row1, n_k):
    """Tiles of BLOCK_K keys that rows row0 ... row1 - 1 see some of."""
    start = Walk(-1, FULL, b, h, row0, row1, n_k, True, -1, -32, 0, 0, -32, 0)
    return next_tile(p, start)


@device
def walk_queries(p, b, h, k0, k1, n_q, down):
    """Tiles of BLOCK_Q rows that see some of the keys k0 ... k1 - 1; down: where there is a mask, the last first."""
    turn = (n_q - 1) // BLOCK_Q if HAS_MASK and down else I(-1)
    return next_tile(p, Walk(-1, FULL, b, h, k0, k1, n_q, False, turn, -32, 0, 0, -32, 0))


@device
def exists(walk, tile):
    """Compared in elements: how many tiles there are would be a division, though by a constant."""
    return tile * (BLOCK_K if walk.along_keys else BLOCK_Q) < walk.n


@device
def tile_state(p, b, h, offset, row0, row1, k0, k1):
    """State of rows row0 ... row1 - 1 and keys k0 ... k1 - 1, at least one of each."""
    if not HAS_MASK:
        return FULL
    return I(classify(b, h, row0, row1 - 1, row0 + offset, row1 - 1 + offset, k0, k1 - 1, p))


@device
def look_along(p, walk, first, last):
    """State of the tiles at places first ... last - 1 of the way."""
    block = BLOCK_K if walk.along_keys else BLOCK_Q
    if walk.turn >= 0:
        first, last = max(walk.turn + 1 - last, 0), walk.turn + 1 - first
    start, end = first * block, min(last * block, walk.n)
    if start >= end:
        return EMPTY
    offset = offset_of(p, walk.b)
    if walk.along_keys:
        return tile_state(p, walk.b, walk.h, offset, walk.start, walk.end, start, end)
    return tile_state(p, walk.b, walk.h, offset, start, end, walk.start, walk.end)


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
                        groups = ballot(look_along(p, walk, group, group + 32) != EMPTY)
                if not over:
                    chunk = (first_group + lowest_bit(groups)) * 32
                    groups &= groups - 1
            else:
                chunk += 32
                over = not exists(walk, chunk)
            if not over:
                state = look_along(p, walk, chunk + lane, chunk + lane + 1)
                live = ballot(state != EMPTY)
                full = ballot(state == FULL)
        tile, state = -1, EMPTY
        if not over:
            bit = lowest_bit(live)
            tile, state = chunk + bit, FULL if (full >> bit) & 1 else PARTIAL
            if walk.turn >= 0:
                tile = walk.turn - tile
            live &= live - 1
        return Walk(
            tile,
            state,
            walk.b,
            walk.h,
            walk.start,
            walk.end,
            walk.n,
            walk.along_keys,
            walk.turn,
            chunk,
            live,
            full,
            first_group,
            groups,
        )

else:

    @device
    def next_tile(p, walk):
        tile = walk.tile + 1
        return Walk(
            tile, FULL if exists(walk, tile) else EMPTY, walk.b, walk.h, walk.start, walk.end, walk.n,
            walk.along_keys, walk.turn, walk.chunk, walk.live, walk.full, walk.first_group, walk.groups,
        )  # fmt: skip


# --- modify, dropout --------------------------------------------------------------------------------------------------


@device
def modify(s, state, b, h, row, q, k, p):
    """A score, modified; -inf where the pair is hidden."""
    if HAS_SCORE:
        s = modified_score(s, b, h, row, q, k, p)
    if HAS_MASK:
        if state == PARTIAL:
            s = s if visible(b, h, row, q, k, p) else HIDDEN
    return s


U, LOW = np.uint64, np.uint64(0xFFFFFFFF)


@device
def philox(seed, key_group, row, h, b):
    """Philox-4x32 with ten rounds (flashkit/mods/dropout.py): four words for keys 4 * key_group ... + 3 of a row."""
    c0, c1, c2, c3 = U(key_group) & LOW, U(row) & LOW, U(h) & LOW, U(b) & LOW
    key0, key1 = seed & LOW, seed >> U(32)
    for _ in range(10):
        product0, product1 = U(0xD2511F53) * c0, U(0xCD9E8D57) * c2
        c0, c1 = (product1 >> U(32)) ^ c1 ^ key0, product1 & LOW
        c2, c3 = (product0 >> U(32)) ^ c3 ^ key1, product0 & LOW
        key0, key1 = (key0 + U(0x9E3779B9)) & LOW, (key1 + U(0xBB67AE85)) & LOW
    return c0, c1, c2, c3


@device
def drop(weight, p, b, h, row, key):
    """A weight, dropped or scaled."""
    word0, word1, word2, word3 = philox(p.seed, key >> 2, row, h, b)
    lane = key & 3
    word = word0 if lane == 0 else word1 if lane == 1 else word2 if lane == 2 else word3
    return weight * F(p.dropout_scale) if word >= p.dropout_threshold else ZERO
