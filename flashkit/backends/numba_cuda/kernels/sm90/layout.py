# Tile shape, registers and shared memory of Hopper's forward pass.
#
# From the head: BLOCK_K, MMA_WARPGROUPS, STAGES, Q_BUFFERS, PING_PONG, CONSUMER_REGISTERS,
# PRODUCER_REGISTERS, WATCHDOG, SHARED_BYTES, NUM_LISTS, LIST_HEADER, LIST_CAPACITY and the offsets AT_* of
# the parts of shared memory, which ForwardTile.smem lays out (cuda_common/sm90_launch.py):
#
#     AT_Q                  [Q_BUFFERS][MMA_WARPGROUPS][64][..]; O on its way out lies there, too
#     AT_K, AT_V            [STAGES][BLOCK_K][..]
#     AT_Q_PIPE, AT_K_PIPE, AT_V_PIPE, AT_LIST_PIPE     full and empty barriers
#     AT_CLAIM              barrier: the work tile is near its end, so the scheduler may claim the next one
#     AT_OUT_READY          barriers, for each buffer of Q and warp group: O is in the buffer
#     AT_TILE_DESCS         for each stage of K its tile descriptor
#     AT_WORK_TILES         for each buffer of Q its work tile: b, h, row0
#     AT_LISTS              lists of K/V tiles

BLOCK_Q, THREADS = 64 * MMA_WARPGROUPS, 128 * (MMA_WARPGROUPS + 1)
COLUMNS, COLUMNS_QK = padded(HEAD_DIM_V), padded(HEAD_DIM)  # of the products P V and Q K^T
chunks_q, chunks_v = chunks(HEAD_DIM), chunks(HEAD_DIM_V)
O_REGS, S_REGS, P_REGS = COLUMNS // 2, BLOCK_K // 2, BLOCK_K // 4  # registers of a lane
BYTES_Q = 64 * CHUNK_ROW * max(chunks_q, chunks_v)  # of a warp group; also O's
BYTES_K, BYTES_V = BLOCK_K * CHUNK_ROW * chunks_q, BLOCK_K * CHUNK_ROW * chunks_v

# Tile descriptor: tile << 8 | FIRST_TILE if it begins a work tile | a state for each warp group's rows, two bits each.
# END has the bit FIRST_TILE, too.
FIRST_TILE, END = 64, -1

# A list: a work tile's three words, the first of which is END behind the last one; how many entries; the last K/V tile
# of all keys, from which indices count down; what the descriptor of the first tile has beyond its states; whether these
# are the last tiles of the work tile. Then the entries, index << 8 | states.
LIST_BYTES = LIST_HEADER + 4 * LIST_CAPACITY

BACKOFF_NS = 100  # of waits off the critical path
CLAIM_AHEAD = 12 if MASK_READS_ARRAYS else 4  # K/V tiles before the end of a work tile
PING_PONG_BARRIER, WARPGROUP_BARRIER = 1, 1 + MMA_WARPGROUPS  # named barriers, of each warp group; 0 is the CTA's


@device
def work_tile_slot(base, number):
    return base + AT_WORK_TILES + 12 * stage_of(number, Q_BUFFERS)


@device
def tile_desc_slot(base, n):
    return base + AT_TILE_DESCS + 4 * stage_of(n, STAGES)


@device
def q_rows(base, number, wg):
    """A warp group's rows of Q, later of O."""
    return base + (stage_of(number, Q_BUFFERS) * MMA_WARPGROUPS + wg) * BYTES_Q


@device
def out_ready(base, number, wg):
    """The barrier that says O is there."""
    return base + AT_OUT_READY + 8 * (stage_of(number, Q_BUFFERS) * MMA_WARPGROUPS + wg)
