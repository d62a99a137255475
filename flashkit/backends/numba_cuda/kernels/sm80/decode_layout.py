# The tile of few queries by mma.sync: kernels/sm80_decode.py. A row is one of the PACK_GQA heads that share keys, at one
# token; a warp has 16 of them and BLOCK_K keys at a time, STAGES tiles of which are in its shared memory.

THREADS, ROWS, WARP_ROWS, PACK_GQA, GROUP_THREADS, BLOCK_Q = 32 * WARPS, 2, 16, GQA_GROUP, 32, 16
COLUMNS, COLUMNS_QK, STEPS = padded(HEAD_DIM_V), padded(HEAD_DIM), padded(HEAD_DIM) // 16
SUMS, SCORES, EVEN = COLUMNS // 2, BLOCK_K // 2, True  # registers of a lane
CHUNK_Q, CHUNK_K, AHEAD, PENDING = 16 * CHUNK_ROW, BLOCK_K * CHUNK_ROW, STAGES - 1, STAGES - 2
BYTES_Q, BYTES_K = CHUNK_Q * chunks(HEAD_DIM), CHUNK_K * chunks(HEAD_DIM)
BYTES_STAGE = BYTES_K + CHUNK_K * chunks(HEAD_DIM_V)
BYTES_WARP = BYTES_Q + STAGES * BYTES_STAGE
