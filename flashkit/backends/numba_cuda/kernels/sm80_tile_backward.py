# The tile of the backward pass by mma.sync, its registers and its shared memory: kernels/sm80_backward.py.
#
# BACKWARD_KEYS: whether a block takes BLOCK_K keys and goes over tiles of BLOCK_Q queries, or the other way round.

MINE, OTHER = (BLOCK_K, BLOCK_Q) if BACKWARD_KEYS else (BLOCK_Q, BLOCK_K)
THREADS, ROWS, WARP_ROWS = 2 * MINE, 2, 16
GROUP_THREADS, PACK = THREADS, 1
COLUMNS, STEPS, STEPS_V = padded(HEAD_DIM_V), padded(HEAD_DIM) // 16, padded(HEAD_DIM_V) // 16
SUMS, SUMS_V, PAIRS = padded(HEAD_DIM) // 2, padded(HEAD_DIM_V) // 2, OTHER // 2  # registers of a lane
BYTES_MINE, BYTES_OTHER = MINE * CHUNK_ROW * chunks(HEAD_DIM), OTHER * CHUNK_ROW * chunks(HEAD_DIM)
AT_OTHER = BYTES_MINE + MINE * CHUNK_ROW * chunks(HEAD_DIM_V)
AT_NUMBERS = BYTES_OTHER + OTHER * CHUNK_ROW * chunks(HEAD_DIM_V)
BYTES_STAGE = AT_NUMBERS + 1024 * (-(-OTHER // 128))  # tiles begin on 1024 bytes
