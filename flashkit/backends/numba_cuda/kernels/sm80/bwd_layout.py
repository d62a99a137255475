# The tile of the backward pass by mma.sync, how its warps share the products, its registers and its shared memory:
# kernels/sm80_backward.py. A warp has 32 rows of each product: WARPS_S of them stand along the queries of S and dP,
# WARPS_KV along the keys of dK and dV, WARPS_Q along the queries of dQ, the others along the second axis. Rows of
# operands are whole chunks of 64 columns, so that these can be shared evenly.

THREADS, ROWS, WARP_ROWS, PACK_GQA = 32 * WARPS, 4, 32, 1
WARPS_S, WARPS_KV, WARPS_Q = BLOCK_Q // 32, BLOCK_K // 32, BLOCK_Q // 32
ACROSS_S, ACROSS_KV, ACROSS_Q = WARPS // WARPS_S, WARPS // WARPS_KV, WARPS // WARPS_Q
GROUP_THREADS = THREADS
WHOLE, WHOLE_V = 64 * chunks(HEAD_DIM), 64 * chunks(HEAD_DIM_V)
COLUMNS, STEPS, STEPS_V = padded(HEAD_DIM_V), padded(HEAD_DIM) // 16, padded(HEAD_DIM_V) // 16
STEPS_KV, STEPS_Q = BLOCK_Q // 16, BLOCK_K // 16

KEYS_S = BLOCK_K // ACROSS_S  # of a warp: keys of S, columns of dK, dV and dQ, as many registers of a lane
SUMS, SUMS_V, SUMS_Q = WHOLE // ACROSS_KV, WHOLE_V // ACROSS_KV, WHOLE // ACROSS_Q
EVEN = not any(n & (n - 1) for n in (SUMS, SUMS_V, SUMS_Q))
PIECES, PIECES_V = (BLOCK_Q // (THREADS // 8) * chunks(dim) for dim in (HEAD_DIM, HEAD_DIM_V))  # that a thread copies
# Of dQ with each step of the product after it, which is dV or dK: measured on an H200, 256 columns, dV 3 to 4 % faster.
ADDED, DQ_FIRST = SUMS_Q // STEPS_KV, HEAD_DIM <= 64 or HEAD_DIM > 128

CHUNK_K, CHUNK_Q = BLOCK_K * CHUNK_ROW, BLOCK_Q * CHUNK_ROW  # bytes from one chunk of keys, of queries, to the next
AT_V = chunks(HEAD_DIM) * CHUNK_K
AT_QUERIES = AT_V + chunks(HEAD_DIM_V) * CHUNK_K
AT_DOUT = chunks(HEAD_DIM) * CHUNK_Q  # within a stage; then a query's numbers
AT_NUMBERS = AT_DOUT + chunks(HEAD_DIM_V) * CHUNK_Q
BYTES_STAGE = AT_NUMBERS + 1024 * (-(-BLOCK_Q // 128))  # tiles begin on 1024 bytes
PITCH = 2 * BLOCK_K + VEC_BYTES  # bytes from a row of P or dS to the next: an odd number of units, in place of permuted ones
AT_P = AT_QUERIES + 2 * BYTES_STAGE
AT_DS = AT_P + BLOCK_Q * PITCH
AT_TICKET = AT_DS + BLOCK_Q * PITCH  # words
AT_UNIT = AT_TICKET + 4
