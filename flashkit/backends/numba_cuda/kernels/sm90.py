# What Hopper's kernels share: descriptors, rings of stages, the map of shared memory.
#
# Number n of what goes through a ring lies in stage n % STAGES. Whoever fills a stage waits until it is empty, whoever
# reads it until it is full.

ROWS, WARP_ROWS, GROUP_THREADS = 2, 16, 128  # a warp group has 64 rows, a warp 16 of them, a lane 2 of these


def along_rows(dim, rows):
    """How far a descriptor moves on for each 16 columns of a tile of `rows` rows."""
    return tuple((k // 4 * rows * CHUNK_ROW + k % 4 * 32) >> 4 for k in range(padded(dim) // 16))


def along_columns(keys):
    """The same for each 16 rows."""
    return tuple(k * 16 * CHUNK_ROW >> 4 for k in range(keys // 16))


@device
def descriptor(address, chunk):
    """An operand's: its address and, for one that is read along columns, the distance from chunk to chunk; then what is
    the same for all, eight rows every 1024 bytes and the swizzle of 128 bytes."""
    return 0x4000004000000000 | (chunk >> 4) << 16 | (address & 0x3FFFF) >> 4


# --- rings ------------------------------------------------------------------------------------------------------------


@device
def stage_of(n, stages):
    return i32(u32(n) % u32(stages))


@device
def await_barrier(barrier, parity):
    if WATCHDOG:  # stop the kernel instead of hanging: a debugging aid
        begin = clock()
        while not has_ended(barrier, parity):
            if clock() - begin > 4000000000:
                store_word(u32(0xFFFFFFF0), 0)  # there is no such memory
    else:
        wait(barrier, parity)


@device
def wait_full(ring, n, stages):
    await_barrier(ring + 8 * stage_of(n, stages), u32(n) // u32(stages) & 1)


@device
def wait_empty(ring, n, stages):
    await_barrier(ring + 8 * stages + 8 * stage_of(n, stages), u32(n) // u32(stages) & 1 ^ 1)


@device
def release(ring, n, stages):
    """By a warp that is done with it."""
    arrive_once(ring + 8 * stages + 8 * stage_of(n, stages))


@device
def ring_init(ring, stages, fillers, readers):
    for i in range(stages):
        barrier_init(ring + 8 * i, fillers)
        barrier_init(ring + 8 * stages + 8 * i, readers)


# --- the memory map of a block's shared memory, in bytes --------------------------------------------------------------

BLOCK_Q, THREADS, COLUMNS, COLUMNS_QK = 64 * GROUPS, 128 * (GROUPS + 1), padded(HEAD_DIM_V), padded(HEAD_DIM)
chunks_q, chunks_v = chunks(HEAD_DIM), chunks(HEAD_DIM_V)
SUMS, SCORES, PACKED = COLUMNS // 2, BLOCK_K // 2, BLOCK_K // 4  # registers of a lane: output, scores, weights
BYTES_Q = 64 * CHUNK_ROW * max(chunks_q, chunks_v)
BYTES_K, BYTES_V = BLOCK_K * CHUNK_ROW * chunks_q, BLOCK_K * CHUNK_ROW * chunks_v
AT_K = Q_BUFFERS * GROUPS * BYTES_Q
AT_V = AT_K + STAGES * BYTES_K
AT_Q_RING = AT_V + STAGES * BYTES_V
AT_K_RING = AT_Q_RING + 16 * Q_BUFFERS
AT_V_RING = AT_K_RING + 16 * STAGES
AT_DONE = AT_V_RING + 16 * STAGES  # for each buffer and group: its output is in the buffer
AT_NOTES = AT_DONE + 8 * GROUPS * Q_BUFFERS  # for each stage of K: tile << 8 | first of its item << 6 | groups' states
AT_ITEMS = AT_NOTES + 4 * STAGES  # for each buffer of Q: an item
AT_LIST = AT_ITEMS + 12 * Q_BUFFERS  # tiles that exist: place << 8 | states
LIST = 224
FIRST, END = 64, -1
TURN, MEETING = 1, 1 + GROUPS  # numbers of barriers among warps, of each group; 0 is the block's
