# The tile of the forward pass by mma.sync, its registers and its shared memory.

BLOCK_Q, THREADS, PACK, ROWS, WARP_ROWS, GROUP_THREADS = 128, 128, 1, 4, 32, 128
COLUMNS, COLUMNS_QK, STEPS = padded(HEAD_DIM_V), padded(HEAD_DIM), padded(HEAD_DIM) // 16
SUMS, SCORES = COLUMNS, BLOCK_K  # registers of a lane: output, scores
BYTES_Q = BLOCK_Q * CHUNK_ROW * max(chunks(HEAD_DIM), chunks(HEAD_DIM_V))
BYTES_K, BYTES_V = BLOCK_K * CHUNK_ROW * chunks(HEAD_DIM), BLOCK_K * CHUNK_ROW * chunks(HEAD_DIM_V)
BYTES_STAGE = BYTES_K + BYTES_V
