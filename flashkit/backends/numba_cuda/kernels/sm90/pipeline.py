# Descriptors of wgmma operands, and pipelines: circular buffers in shared memory with a full and an empty mbarrier for
# each stage, as in CUTLASS. Index n of a sequence lies in stage n % stages. A pipeline is given by the address of its
# barriers, the full ones first. One without a consumer_release has full barriers only.

ROWS, WARP_ROWS, GROUP_THREADS = 2, 16, 128  # of a lane, of a warp; the threads of a warp group


def along_rows(dim, rows):
    """What each step of 16 columns adds to the descriptor of a tile of `rows` rows."""
    return tuple((k // 4 * rows * CHUNK_ROW + k % 4 * 32) >> 4 for k in range(padded(dim) // 16))


def along_columns(keys):
    """What each step of 16 rows adds."""
    return tuple(k * 16 * CHUNK_ROW >> 4 for k in range(keys // 16))


@device
def descriptor(address, chunk):
    """The lower half of a descriptor: address and, if it is read along columns, the stride from chunk to chunk.

    In a cluster an address above 2^18 names the CTA, which a descriptor does not hold.
    """
    if CLUSTER_SIZE > 1:
        address = u32(address) & u32(0x3FFFF)
    return u32(u32(u32(address) >> u32(4)) + u32(chunk >> 4 << 16))


# --- pipelines --------------------------------------------------------------------------------------------------------


@device
def stage_of(n, stages):
    return i32(u32(n) % u32(stages))


@device
def full_barrier(pipe, n, stages):
    return pipe + 8 * stage_of(n, stages)


@device
def empty_barrier(pipe, n, stages):
    return full_barrier(pipe + 8 * stages, n, stages)


@device
def mbarrier_wait(barrier, parity):
    if WATCHDOG:  # a debugging aid: a deadlock becomes a fault
        begin = clock()
        while not mbarrier_try_wait(barrier, parity):
            if clock() - begin > 4000000000:
                store_word(u32(0xFFFFFFF0), 0)  # there is no such memory
    else:
        mbarrier_wait_spin(barrier, parity)


@device
def mbarrier_wait_backoff(barrier, parity, nanoseconds):
    """A wait off the critical path: sleeps between attempts, which leaves the issue slots to other warps."""
    while not mbarrier_try_wait(barrier, parity):
        nap(nanoseconds)


@device
def consumer_wait(pipe, n, stages):
    mbarrier_wait(full_barrier(pipe, n, stages), u32(n) // u32(stages) & 1)


@device
def producer_acquire(pipe, n, stages):
    mbarrier_wait(empty_barrier(pipe, n, stages), u32(n) // u32(stages) & 1 ^ 1)


@device
def consumer_release(pipe, n, stages):
    """One arrival for a warp that no longer reads the stage."""
    mbarrier_arrive_once(empty_barrier(pipe, n, stages))


@device
def pipeline_init(pipe, stages, producers, consumers):
    for i in range(stages):
        mbarrier_init(pipe + 8 * i, producers)
        mbarrier_init(pipe + 8 * stages + 8 * i, consumers)
