# parts: common/tiles
# Tiles on CUDA cores: how a CTA loads and multiplies them. For every CUDA device and dtype.
#
#     TX, TY           threads of a CTA: TX along the columns of a tile, TY along its rows
#     CHUNK            columns of two operands that scores() multiplies at a time; a multiple of 4
#     KEYS             rows of an operand that accumulate() multiplies at a time; a multiple of 4
#     ROWS, COLUMNS    of a tile: query rows and keys, transposed where BACKWARD_KEYS
#
# Shared memory (cuda_common/simt.py: SimtTile.smem)
#
#     stages    2 x [rows][pitch]     double buffer of the operands
#     AT_P      [ROWS][pitch]         a tile of P or dS, between two products
#
# Of a tile thread (ty, tx) holds rows ty + TY * i and columns tx + TX * j; of an accumulator the same rows and columns
# 4 * (tx + TX * j) ... + 3. Neighbouring threads thus read neighbouring words of shared memory, and each thread
# multiplies a small block of rows by a small block of columns. A thread's fragments are local arrays, which the
# compiler keeps in registers as all loops over them have constant length.

THREADS = TX * TY
ROWS, COLUMNS = (BLOCK_K, BLOCK_Q) if BACKWARD_KEYS else (BLOCK_Q, BLOCK_K)
TX_BITS = TX.bit_length() - 1
ROWS_PER_THREAD, COLUMNS_PER_THREAD = ROWS // TY, COLUMNS // TX

# Rows of one head: address, elements between rows, rows that exist. In pages: the address is that of row 0 of page 0;
# elements between pages; batch entry, key of the first row, and the table. Queries have none, whose address is 0.
Rows = namedtuple("Rows", "data token count batch b first table")
# Of an operand: columns, columns and pitch of a stage, threads per row.
Shape = namedtuple("Shape", "dim width pitch across")


@device
def thread_coord():
    """tx and ty."""
    thread = thread_here()
    return thread & (TX - 1), thread >> TX_BITS


@device
def rolled(n):
    """n, opaque to the compiler, which then does not unroll the loop: blockIdx.y is 0, but the compiler cannot know."""
    return n + cuda.blockIdx.y


def up(n, size):
    return -(-n // size) * size


def shape(dim, width, pitch):
    return Shape(dim, width, pitch, min(1 << (width // 4 - 1).bit_length(), THREADS))


# Pitches keep the lanes of a warp on different banks: rows read as vectors of four start an odd number of vectors
# apart, rows that a warp writes together start TX words apart.
CHUNK_PITCH = CHUNK + 16 // F_ITEMSIZE
P_PITCH = COLUMNS + (TX if TX < 32 else 0)
CHUNK_QK, CHUNK_V = (shape(dim, CHUNK, CHUNK_PITCH) for dim in (HEAD_DIM, HEAD_DIM_V))
ACC_QK, ACC_V = (shape(dim, up(dim, 4 * TX), up(dim, 4 * TX)) for dim in (HEAD_DIM, HEAD_DIM_V))
K_COLUMNS, V_COLUMNS = ACC_QK.pitch // TX, ACC_V.pitch // TX  # of an accumulator, of a thread
P_TILE = AT_P // F_ITEMSIZE  # elements
STAGE = P_TILE // 2


# --- load_tile --------------------------------------------------------------------------------------------------------

# Where the keys and values of a sequence come from: tensors; batch entry and key/value head; the row of key 0; the
# number of keys; the pages of the sequence.
KvSource = namedtuple("KvSource", "k v b head start n_k table")


@device
def kv_source(p, b, head, n_k):
    return KvSource(p.k, p.v, b, head, kv_token(p, b, I(0)), n_k, page_table(p))


@device
def q_rows(p, tensor, b, h, first):
    """Rows first ... of a head's queries, at most BLOCK_Q of them."""
    address, count = q_row_address(p, tensor, b, h, first), min(seq_info(p, b).n_q - first, BLOCK_Q)
    return Rows(address, tensor.token, count, I(0), I(0), I(0), PageTable(I(0), I(0), I(0), I(0)))


@device
def kv_rows(kv, tensor, first):
    """Rows first ... of K or V of a KvSource, at most BLOCK_K of them."""
    count = min(kv.n_k - first, BLOCK_K)
    if IS_PAGED:
        address = row_address(tensor, I(0), kv.head, I(0))
        return Rows(address, tensor.token, count, tensor.batch, kv.b, first, kv.table)
    address = row_address(tensor, I(kv.b), I(kv.head), kv.start + first)
    return Rows(address, tensor.token, count, I(0), I(0), I(0), kv.table)


@device
def k_rows(kv, first):
    return kv_rows(kv, kv.k, first)


@device
def v_rows(kv, first):
    return kv_rows(kv, kv.v, first)


@device
def address_in_rows(source, row):
    """Address of one of the rows."""
    if IS_PAGED:
        if source.table.data != 0:
            page, row_of_page = page_and_row(source.table, source.b, source.first + row)
            return source.data + (page * source.batch + row_of_page * source.token) * ITEMSIZE
    return source.data + row * source.token * ITEMSIZE


@device
def load_tile(source, first, column, rows, shape, shared, start):
    """Rows and columns to shared memory from `start` on, by vectors where they are aligned; 0 past the end."""
    thread = thread_here()
    step = THREADS // shape.across
    row, lane_column = thread // shape.across, (thread & (shape.across - 1)) * 4
    if lane_column < shape.width:
        strides = (source.token | source.batch) * ITEMSIZE
        vectorized = shape.dim % 4 == 0 and (source.data | strides) & (min(4 * ITEMSIZE, 16) - 1) == 0
        exist = source.count - first - row  # rows from this one on
        address = source.data + ((first + row) * source.token + column + lane_column) * ITEMSIZE
        for i in range(0, rows, step):
            if rows % step == 0 or row + i < rows:
                x, y, z, w = ZERO, ZERO, ZERO, ZERO
                if i < exist:
                    if IS_PAGED:
                        address = address_in_rows(source, first + row + i) + (column + lane_column) * ITEMSIZE
                    if vectorized:
                        if column + lane_column < shape.dim:
                            a, b, c, d = load4(STORED, address, 0)
                            x, y, z, w = widen(a), widen(b), widen(c), widen(d)
                    else:
                        left = shape.dim - column - lane_column
                        x = widen(load(STORED, address, 0)) if left > 0 else ZERO
                        y = widen(load(STORED, address, 1)) if left > 1 else ZERO
                        z = widen(load(STORED, address, 2)) if left > 2 else ZERO
                        w = widen(load(STORED, address, 3)) if left > 3 else ZERO
                store4(F, shared, start + (row + i) * shape.pitch + lane_column, x, y, z, w)
            address += step * source.token * ITEMSIZE


# --- scores, accumulate -----------------------------------------------------------------------------------------------


@device
def scores(a, b, shape, s, shared):
    """s = a b^T for ROWS rows of a and COLUMNS rows of b, both with shape.dim columns; CHUNK columns at a time."""
    tx, ty = thread_coord()
    for i in range(ROWS_PER_THREAD):
        for j in range(COLUMNS_PER_THREAD):
            s[i, j] = ZERO
    cuda.syncthreads()
    load_tile(a, 0, 0, ROWS, shape, shared, 0)
    load_tile(b, 0, 0, COLUMNS, shape, shared, ROWS * CHUNK_PITCH)
    stage = 0
    for column in range(0, rolled(shape.dim), CHUNK):
        cuda.syncthreads()
        other = STAGE - stage
        if column + CHUNK < shape.dim:
            load_tile(a, 0, column + CHUNK, ROWS, shape, shared, other)
            load_tile(b, 0, column + CHUNK, COLUMNS, shape, shared, other + ROWS * CHUNK_PITCH)
        rows_a, rows_b = stage + ty * CHUNK_PITCH, stage + (ROWS + tx) * CHUNK_PITCH
        for d in range(0, rolled(min(CHUNK, shape.dim - column)), 4):
            x = cuda.local.array((ROWS_PER_THREAD, 4), F_TYPE)
            for i in range(ROWS_PER_THREAD):
                x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load4(F, shared, rows_a + i * TY * CHUNK_PITCH + d)
            for j in range(COLUMNS_PER_THREAD):
                y = load4(F, shared, rows_b + j * TX * CHUNK_PITCH + d)
                for i in range(ROWS_PER_THREAD):
                    s[i, j] = s[i, j] + x[i, 0] * y[0] + x[i, 1] * y[1] + x[i, 2] * y[2] + x[i, 3] * y[3]
        stage = other


@device
def store_tile(tile, shared):
    """Writes a thread's part of P or dS to shared memory, for accumulate()."""
    tx, ty = thread_coord()
    for i in range(ROWS_PER_THREAD):
        for j in range(COLUMNS_PER_THREAD):
            store(F, shared, P_TILE + (ty + i * TY) * P_PITCH + tx + j * TX, tile[i, j])


@device
def accumulate(b, shape, acc, shared, nonfinite):
    """acc += a b, a in shared memory, KEYS rows of b at a time. `nonfinite`: zeros of a skip rows of b."""
    tx, ty = thread_coord()
    own = P_TILE + ty * P_PITCH
    cuda.syncthreads()
    load_tile(b, 0, 0, KEYS, shape, shared, 0)
    stage = 0
    for first in range(0, b.count, KEYS):
        cuda.syncthreads()
        other = STAGE - stage
        if first + KEYS < b.count:
            load_tile(b, first + KEYS, 0, KEYS, shape, shared, other)
        rows = stage + 4 * tx
        if nonfinite:
            for k in range(rolled(KEYS)):
                for i in range(ROWS_PER_THREAD):
                    x = load(F, shared, own + i * TY * P_PITCH + first + k)
                    if x != ZERO:
                        for c in range(0, shape.pitch // TX, 4):
                            y = load4(F, shared, rows + k * shape.pitch + c * TX)
                            for e in range(4):
                                acc[i, c + e] += x * y[e]
        else:
            for k in range(0, rolled(KEYS), 4):
                x = cuda.local.array((ROWS_PER_THREAD, 4), F_TYPE)
                for i in range(ROWS_PER_THREAD):
                    x[i, 0], x[i, 1], x[i, 2], x[i, 3] = load4(F, shared, own + i * TY * P_PITCH + first + k)
                for e in range(4):
                    for c in range(0, shape.pitch // TX, 4):
                        y = load4(F, shared, rows + (k + e) * shape.pitch + c * TX)
                        for i in range(ROWS_PER_THREAD):
                            acc[i, c] += x[i, e] * y[0]
                            acc[i, c + 1] += x[i, e] * y[1]
                            acc[i, c + 2] += x[i, e] * y[2]
                            acc[i, c + 3] += x[i, e] * y[3]
        stage = other


@device
def clear(acc, width):
    for i in range(ROWS_PER_THREAD):
        for c in range(width):
            acc[i, c] = ZERO


@device
def store_accumulator(acc, shape, factor, tensor, b, h, start, first, n):
    """Writes rows first ... n - 1, each times its factor, behind row `start`. Returns whether they are finite."""
    tx, ty = thread_coord()
    finite = True
    for i in range(ROWS_PER_THREAD):
        row = first + ty + i * TY
        if row < n:
            target = row_address(tensor, b, h, start + row)
            for c in range(shape.pitch // TX):
                column = c // 4 * 4 * TX + 4 * tx + c % 4
                if column < shape.dim:
                    value = acc[i, c] * factor[i]
                    finite = finite and abs(value) < INFINITE
                    store(STORED, target, column, narrow(value))
    return finite


# --- modify -----------------------------------------------------------------------------------------------------------


@device
def modify_tile(p, state, s, slopes, with_slopes, b, h, row0, k0, n_k):
    """Scales, modifies and masks the scores of a tile. with_slopes: and stores slopes, or the scores for sums."""
    tx, ty = thread_coord()
    scale, n_q, q_position = F(p.softmax_scale), seq_info(p, b).n_q, seq_info(p, b).q_position
    for i in range(ROWS_PER_THREAD):
        for j in range(COLUMNS_PER_THREAD):
            along, across = ty + i * TY, tx + j * TX
            row, k = (row0 + across, k0 + along) if BACKWARD_KEYS else (row0 + along, k0 + across)
            if row < n_q and k < n_k:
                scaled = s[i, j] * scale
                if with_slopes:
                    if HAS_VALUES:
                        slopes[i, j] = scaled
                    else:
                        slopes[i, j] = score_slope(scaled, b, h, row, row + q_position, k, p) if HAS_SCORE else ONE
                s[i, j] = modify(scaled, state, b, h, row, row + q_position, k, p)
            else:
                s[i, j] = HIDDEN


@device
def drop_tile(p, tile, b, h, row0, k0):
    """Dropout of a tile of P or dP."""
    tx, ty = thread_coord()
    for i in range(ROWS_PER_THREAD):
        for j in range(COLUMNS_PER_THREAD):
            along, across = ty + i * TY, tx + j * TX
            row, k = (row0 + across, k0 + along) if BACKWARD_KEYS else (row0 + along, k0 + across)
            tile[i, j] = drop(tile[i, j], p, b, h, row, k)
