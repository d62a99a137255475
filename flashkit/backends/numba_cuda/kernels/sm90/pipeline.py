# What Hopper's kernels share: descriptors, rings of stages.
#
# Number n of what goes through a ring lies in stage n % STAGES. Whoever fills a stage waits until it is empty, whoever
# reads it until it is full. What only comes, and never goes, is a ring without the second half of its barriers.

ROWS, WARP_ROWS, GROUP_THREADS = 2, 16, 128  # a warp group has 64 rows, a warp 16 of them, a lane 2 of these


def along_rows(dim, rows):
    """How far a descriptor moves on for each 16 columns of a tile of `rows` rows."""
    return tuple((k // 4 * rows * CHUNK_ROW + k % 4 * 32) >> 4 for k in range(padded(dim) // 16))


def along_columns(keys):
    """The same for each 16 rows."""
    return tuple(k * 16 * CHUNK_ROW >> 4 for k in range(keys // 16))


@device
def descriptor(address, chunk):
    """An operand's, but for what all have in common: its address and, for one that is read along columns, the distance
    from chunk to chunk. Shared memory ends before 2^18; above that stands whose it is, of the CLUSTER_SIZE of a cluster.
    """
    if CLUSTER_SIZE > 1:
        address = u32(address) & u32(0x3FFFF)
    return u32(u32(u32(address) >> u32(4)) + u32(chunk >> 4 << 16))


# --- rings ------------------------------------------------------------------------------------------------------------


@device
def stage_of(n, stages):
    return i32(u32(n) % u32(stages))


@device
def full_barrier(ring, n, stages):
    """The barrier at which number n's stage becomes full."""
    return ring + 8 * stage_of(n, stages)


@device
def empty_barrier(ring, n, stages):
    return full_barrier(ring + 8 * stages, n, stages)


@device
def mbarrier_wait(barrier, parity):
    if WATCHDOG:  # stop the kernel instead of hanging: a debugging aid
        begin = clock()
        while not mbarrier_try_wait(barrier, parity):
            if clock() - begin > 4000000000:
                store_word(u32(0xFFFFFFF0), 0)  # there is no such memory
    else:
        mbarrier_wait_spin(barrier, parity)


@device
def mbarrier_wait_backoff(barrier, parity, nanoseconds):
    """The same where nobody is in a hurry: leaves the issue slots to others."""
    while not mbarrier_try_wait(barrier, parity):
        nap(nanoseconds)


@device
def consumer_wait(ring, n, stages):
    mbarrier_wait(full_barrier(ring, n, stages), u32(n) // u32(stages) & 1)


@device
def producer_acquire(ring, n, stages):
    mbarrier_wait(empty_barrier(ring, n, stages), u32(n) // u32(stages) & 1 ^ 1)


@device
def consumer_release(ring, n, stages):
    """By a warp that is done with it."""
    mbarrier_arrive_once(empty_barrier(ring, n, stages))


@device
def pipeline_init(ring, stages, fillers, readers):
    for i in range(stages):
        mbarrier_init(ring + 8 * i, fillers)
        mbarrier_init(ring + 8 * stages + 8 * i, readers)
