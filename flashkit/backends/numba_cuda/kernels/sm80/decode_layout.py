# The tile of a warp for few queries and its registers. A row is one of the PACK_GQA heads that share keys, at one
# token; a warp has 16 rows, and STAGES tiles of BLOCK_K keys in its shared memory (numba_cuda/sm80_decode.py:
# DecodeTile.smem).

THREADS, ROWS, WARP_ROWS, PACK_GQA, GROUP_THREADS, BLOCK_Q = 32 * WARPS, 2, 16, GQA_GROUP, 32, 16
COLUMNS, COLUMNS_QK, STEPS = padded(HEAD_DIM_V), padded(HEAD_DIM), padded(HEAD_DIM) // 16
SUMS, SCORES, EVEN = COLUMNS // 2, BLOCK_K // 2, True  # registers of a lane
CHUNK_Q, CHUNK_K, STAGES_AHEAD, PENDING = 16 * CHUNK_ROW, BLOCK_K * CHUNK_ROW, STAGES - 1, STAGES - 2
