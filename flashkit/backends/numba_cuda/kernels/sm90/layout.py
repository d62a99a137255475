# The tile of Hopper's forward pass, its registers, and the map of a block's shared memory, in bytes.

CLUSTER_SIZE = 1  # of a cluster
LISTS, SLEEP = 2, 100  # of tiles that exist; nanoseconds of those who are not in a hurry
BLOCK_Q, THREADS, COLUMNS, COLUMNS_QK = 64 * MMA_WARPGROUPS, 128 * (MMA_WARPGROUPS + 1), padded(HEAD_DIM_V), padded(HEAD_DIM)
chunks_q, chunks_v = chunks(HEAD_DIM), chunks(HEAD_DIM_V)
SUMS, SCORES, PACKED = COLUMNS // 2, BLOCK_K // 2, BLOCK_K // 4  # registers of a lane: output, scores, weights
BYTES_Q = 64 * CHUNK_ROW * max(chunks_q, chunks_v)
BYTES_K, BYTES_V = BLOCK_K * CHUNK_ROW * chunks_q, BLOCK_K * CHUNK_ROW * chunks_v
AT_K = Q_BUFFERS * MMA_WARPGROUPS * BYTES_Q
AT_V = AT_K + STAGES * BYTES_K
AT_Q_PIPE = AT_V + STAGES * BYTES_V
AT_K_PIPE = AT_Q_PIPE + 16 * Q_BUFFERS
AT_V_PIPE = AT_K_PIPE + 16 * STAGES
AT_LISTS_PIPE = AT_V_PIPE + 16 * STAGES
AT_SOON = AT_LISTS_PIPE + 16 * LISTS  # the item is near its end
AT_DONE = AT_SOON + 8  # for each buffer and group: its output is in the buffer
AT_TILE_DESCS = AT_DONE + 8 * MMA_WARPGROUPS * Q_BUFFERS  # for each stage of K: tile << 8 | first of its item << 6 | groups' states
AT_WORK_TILES = AT_TILE_DESCS + 4 * STAGES  # for each buffer of Q: an item
AT_LISTS = AT_WORK_TILES + 12 * Q_BUFFERS
# A list: an item's three words, of which the first is END after the last one; how many tiles here; the last tile of all
# keys; bits of the first tile's tile_desc; whether there are no more of the item; then place << 8 | states of each tile.
MOST, IN_LIST = 224, 28
BYTES_LIST = IN_LIST + 4 * MOST
assert AT_LISTS + LISTS * BYTES_LIST <= SHARED_BYTES  # which the host gives
FIRST, END = 64, -1
AHEAD = 12 if MASK_READS_ARRAYS else 4  # how many tiles before the end of an item the next one is taken
TURN, MEETING = 1, 1 + MMA_WARPGROUPS  # numbers of barriers among warps, of each group; 0 is the block's
