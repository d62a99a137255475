# parts: common/tiles
# Tiles on the ordinary arithmetic units: how they are loaded and multiplied. For every CUDA device and dtype.
#
#     TX, TY           threads of a block: TX along the columns of a tile, TY along its rows
#     CHUNK            columns of two operands that are multiplied at once in scores(); a multiple of 4
#     KEYS             rows of an operand that are multiplied at once in accumulate(); a multiple of 4
#     ROWS, COLUMNS    of a tile as a block of threads holds it: queries and keys, or where BACKWARD_KEYS the other way
#
# Thread (ty, tx) holds of a tile the rows ty + TY * i and the columns tx + TX * j, and of sums the same rows and the
# columns 4 * (tx + TX * j) ... + 3. So neighbouring threads read neighbouring words of shared memory, and a thread
# multiplies a small block of rows by a small block of columns. A thread's parts are local arrays with loops of constant
# length around them, which the compiler keeps in registers.

THREADS = TX * TY
ROWS, COLUMNS = (BLOCK_K, BLOCK_Q) if BACKWARD_KEYS else (BLOCK_Q, BLOCK_K)
TX_BITS = TX.bit_length() - 1
ROWS_EACH, COLUMNS_EACH = ROWS // TY, COLUMNS // TX

Rows = namedtuple(
    "Rows", "data token count"
)  # rows of one head: address, elements from one to the next, how many exist
Shape = namedtuple("Shape", "dim width pitch across")  # of an operand: columns, of a stage; threads that take a row


@device
def place():
    """tx and ty."""
    thread = thread_here()
    return thread & (TX - 1), thread >> TX_BITS


@device
def rolled(n):
    """n, so that the compiler does not unroll a loop of n steps: it does not know that grids have one axis."""
    return n + cuda.blockIdx.y


def up(n, size):
    return -(-n // size) * size


def shape(dim, width, pitch):
    return Shape(dim, width, pitch, min(1 << (width // 4 - 1).bit_length(), THREADS))


# --- shared memory ----------------------------------------------------------------------------------------------------
#
#     stages    2 x [rows][pitch]     what is multiplied now, and what is on its way
#     weights   [ROWS][pitch]         a tile of weights or of their gradients, between two products
#
# Pitches keep the lanes of a warp on different banks: rows read in fours start an odd number of fours apart, rows that
# a warp writes side by side start TX words apart.

CHUNK_PITCH = CHUNK + 16 // F_ITEM
WEIGHTS_PITCH = COLUMNS + (TX if TX < 32 else 0)
CHUNK_QK, CHUNK_V = (shape(dim, CHUNK, CHUNK_PITCH) for dim in (HEAD_DIM, HEAD_DIM_V))
SUMS_QK, SUMS_V = (shape(dim, up(dim, 4 * TX), up(dim, 4 * TX)) for dim in (HEAD_DIM, HEAD_DIM_V))
WIDTH_QK, WIDTH_V = SUMS_QK.pitch // TX, SUMS_V.pitch // TX  # of a thread's sums
# Of what is summed up:
WIDEST = SUMS_V.pitch if FORWARD else max(SUMS_QK.pitch, SUMS_V.pitch) if BACKWARD_KEYS else SUMS_QK.pitch
STAGE = max((ROWS + COLUMNS) * CHUNK_PITCH, KEYS * WIDEST)
WEIGHTS = 2 * STAGE


# --- load_tile --------------------------------------------------------------------------------------------------------


@device
def rows_of(tensor, b, h, first, n, most):
    """Rows first ... of a head's n, `most` of them or as many as there are."""
    return Rows(row_address(tensor, b, h, first), tensor.token, min(n - first, most))


@device
def load_tile(source, first, column, rows, shape, shared, start):
    """Rows first ... first + rows - 1 and columns column ... column + shape.width - 1 into shared memory from `start`
    on; what does not exist becomes 0. Four at a time where addresses allow it.
    """
    thread = thread_here()
    step = THREADS // shape.across
    row, here = thread // shape.across, (thread & (shape.across - 1)) * 4
    if here < shape.width:
        together = shape.dim % 4 == 0 and (source.data | source.token * ITEM) & (min(4 * ITEM, 16) - 1) == 0
        exist = source.count - first - row  # rows from here on
        address = source.data + ((first + row) * source.token + column + here) * ITEM
        for i in range(0, rows, step):
            if rows % step == 0 or row + i < rows:
                x, y, z, w = ZERO, ZERO, ZERO, ZERO
                if i < exist:
                    if together:
                        if column + here < shape.dim:
                            a, b, c, d = load4(STORED, address, 0)
                            x, y, z, w = widen(a), widen(b), widen(c), widen(d)
                    else:
                        left = shape.dim - column - here
                        x = widen(load(STORED, address, 0)) if left > 0 else ZERO
                        y = widen(load(STORED, address, 1)) if left > 1 else ZERO
                        z = widen(load(STORED, address, 2)) if left > 2 else ZERO
                        w = widen(load(STORED, address, 3)) if left > 3 else ZERO
                put4(shared, start + (row + i) * shape.pitch + here, x, y, z, w)
            address += step * source.token * ITEM


# --- products ---------------------------------------------------------------------------------------------------------


@device
def scores(a, b, shape, s, shared):
    """s = a b^T: ROWS rows of a times COLUMNS rows of b, both with shape.dim columns; a chunk of columns at a time."""
    tx, ty = place()
    for i in range(ROWS_EACH):
        for j in range(COLUMNS_EACH):
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
            x = cuda.local.array((ROWS_EACH, 4), F_TYPE)
            for i in range(ROWS_EACH):
                x[i, 0], x[i, 1], x[i, 2], x[i, 3] = at4(shared, rows_a + i * TY * CHUNK_PITCH + d)
            for j in range(COLUMNS_EACH):
                y = at4(shared, rows_b + j * TX * CHUNK_PITCH + d)
                for i in range(ROWS_EACH):
                    s[i, j] = s[i, j] + x[i, 0] * y[0] + x[i, 1] * y[1] + x[i, 2] * y[2] + x[i, 3] * y[3]
        stage = other


@device
def store_weights(tile, shared):
    """Put a thread's part of a tile where all threads find it, for accumulate()."""
    tx, ty = place()
    for i in range(ROWS_EACH):
        for j in range(COLUMNS_EACH):
            put(shared, WEIGHTS + (ty + i * TY) * WEIGHTS_PITCH + tx + j * TX, tile[i, j])


@device
def accumulate(b, shape, sums, shared, careful):
    """sums += weights b: the tile of weights that is stored times COLUMNS rows of b, KEYS of these at a time.
    `careful`: a weight of 0 leaves out its row, whatever that holds.
    """
    tx, ty = place()
    own = WEIGHTS + ty * WEIGHTS_PITCH
    cuda.syncthreads()
    load_tile(b, 0, 0, KEYS, shape, shared, 0)
    stage = 0
    for first in range(0, b.count, KEYS):
        cuda.syncthreads()
        other = STAGE - stage
        if first + KEYS < b.count:
            load_tile(b, first + KEYS, 0, KEYS, shape, shared, other)
        rows = stage + 4 * tx
        if careful:
            for k in range(rolled(KEYS)):
                for i in range(ROWS_EACH):
                    weight = at(shared, own + i * TY * WEIGHTS_PITCH + first + k)
                    if weight != ZERO:
                        for c in range(0, shape.pitch // TX, 4):
                            y = at4(shared, rows + k * shape.pitch + c * TX)
                            for e in range(4):
                                sums[i, c + e] += weight * y[e]
        else:
            for k in range(0, rolled(KEYS), 4):
                x = cuda.local.array((ROWS_EACH, 4), F_TYPE)
                for i in range(ROWS_EACH):
                    x[i, 0], x[i, 1], x[i, 2], x[i, 3] = at4(shared, own + i * TY * WEIGHTS_PITCH + first + k)
                for e in range(4):
                    for c in range(0, shape.pitch // TX, 4):
                        y = at4(shared, rows + (k + e) * shape.pitch + c * TX)
                        for i in range(ROWS_EACH):
                            sums[i, c] += x[i, e] * y[0]
                            sums[i, c + 1] += x[i, e] * y[1]
                            sums[i, c + 2] += x[i, e] * y[2]
                            sums[i, c + 3] += x[i, e] * y[3]
        stage = other


@device
def clear(sums, width):
    for i in range(ROWS_EACH):
        for c in range(width):
            sums[i, c] = ZERO


@device
def store_sums(sums, shape, factor, tensor, b, h, first, n):
    """A thread's sums to a tensor, each row times its factor. Returns whether all of them are finite."""
    tx, ty = place()
    finite = True
    for i in range(ROWS_EACH):
        row = first + ty + i * TY
        if row < n:
            target = row_address(tensor, b, h, row)
            for c in range(shape.pitch // TX):
                column = c // 4 * 4 * TX + 4 * tx + c % 4
                if column < shape.dim:
                    value = sums[i, c] * factor[i]
                    finite = finite and abs(value) < INFINITE
                    store(STORED, target, column, narrow(value))
    return finite


# --- modify -----------------------------------------------------------------------------------------------------------


@device
def modify_tile(p, state, s, slopes, with_slopes, b, h, row0, n_q, k0, n_k):
    """The scores of a tile, scaled and modified; pairs beyond the last row or key are hidden. `slopes`: where
    with_slopes holds they become d score / d s.
    """
    tx, ty = place()
    scale, offset = F(p.softmax_scale), offset_of(p, b)
    for i in range(ROWS_EACH):
        for j in range(COLUMNS_EACH):
            along, across = ty + i * TY, tx + j * TX
            row, k = (row0 + across, k0 + along) if BACKWARD_KEYS else (row0 + along, k0 + across)
            if row < n_q and k < n_k:
                scaled = s[i, j] * scale
                if with_slopes:
                    slopes[i, j] = score_slope(scaled, b, h, row, row + offset, k, p) if HAS_SCORE else ONE
                s[i, j] = modify(scaled, state, b, h, row, row + offset, k, p)
            else:
                s[i, j] = HIDDEN


@device
def drop_tile(p, tile, b, h, row0, k0):
    """Dropout of a tile of weights, or of their gradients."""
    tx, ty = place()
    for i in range(ROWS_EACH):
        for j in range(COLUMNS_EACH):
            along, across = ty + i * TY, tx + j * TX
            row, k = (row0 + across, k0 + along) if BACKWARD_KEYS else (row0 + along, k0 + across)
            tile[i, j] = drop(tile[i, j], p, b, h, row, k)
