# The tile of the backward pass by mma.sync, how its warps share the products, and its registers. A warp has 32 rows of
# each product: WARPS_S warps stand along the queries of S and dP, WARPS_KV along the keys of dK and dV, WARPS_Q along
# the queries of dQ, the others along the second axis. Rows of operands are whole chunks of 64 columns, so that warps
# share them evenly. Shared memory: numba_cuda/sm80.py, BackwardTile.smem.

THREADS, ROWS, WARP_ROWS = 32 * WARPS, 4, 32
WARPS_S, WARPS_KV, WARPS_Q = BLOCK_Q // 32, BLOCK_K // 32, BLOCK_Q // 32
ACROSS_S, ACROSS_KV, ACROSS_Q = WARPS // WARPS_S, WARPS // WARPS_KV, WARPS // WARPS_Q
GROUP_THREADS = THREADS
PADDED_QK, PADDED_V = 64 * chunks(HEAD_DIM), 64 * chunks(HEAD_DIM_V)
COLUMNS, STEPS, STEPS_V = padded(HEAD_DIM_V), padded(HEAD_DIM) // 16, padded(HEAD_DIM_V) // 16
STEPS_KV, STEPS_Q = BLOCK_Q // 16, BLOCK_K // 16

KEYS_S = BLOCK_K // ACROSS_S  # of a warp: keys of S, columns of dK, dV and dQ; as many registers of a lane
SUMS, SUMS_V, SUMS_Q = PADDED_QK // ACROSS_KV, PADDED_V // ACROSS_KV, PADDED_QK // ACROSS_Q
EVEN = not any(n & (n - 1) for n in (SUMS, SUMS_V, SUMS_Q))
PIECES, PIECES_V = (BLOCK_Q // (THREADS // 8) * chunks(dim) for dim in (HEAD_DIM, HEAD_DIM_V))  # that a thread copies
# Additions to dQ with each step of the product after it, which is dV if DQ_FIRST, else dK.
DQ_ADDS_PER_STEP, DQ_FIRST = SUMS_Q // STEPS_KV, HEAD_DIM <= 64 or HEAD_DIM > 128

CHUNK_K, CHUNK_Q = BLOCK_K * CHUNK_ROW, BLOCK_Q * CHUNK_ROW  # bytes from one chunk of keys, of queries, to the next
# Bytes from a row of P or dS to the next: an odd number of vectors, instead of a swizzle.
PITCH = 2 * BLOCK_K + VEC_BYTES
