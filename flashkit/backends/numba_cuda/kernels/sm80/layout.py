# The tile of the forward pass by mma.sync and its registers. Shared memory: numba_cuda/sm80.py, Tile.smem.

THREADS, WARP_ROWS, GROUP_THREADS, EVEN = 128, BLOCK_Q // 4, 128, True
ROWS = WARP_ROWS // 8
COLUMNS, COLUMNS_QK, STEPS = padded(HEAD_DIM_V), padded(HEAD_DIM), padded(HEAD_DIM) // 16
SUMS, SCORES = COLUMNS * ROWS // 4, BLOCK_K * ROWS // 4  # registers of a lane: output, scores
CHUNK_Q, CHUNK_K = BLOCK_Q * CHUNK_ROW, BLOCK_K * CHUNK_ROW  # bytes from one chunk of 64 columns to the next
ROW_VECS_V = HEAD_DIM_V // VEC_ELEMENTS
