"""Faults in the kernels in CUDA C++ for tensor cores from Ampere on and for CUDA cores, and in what all kernels share."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/emulator/test_kernels.py -k 'cupy_raw and sm80'",
    "tests/emulator/test_kernels.py -k 'cupy_raw and simt'",
    "tests/emulator/test_kernels.py -k 'not numba_cuda'",
)

SM80, SIMT, ALL = (f"flashkit/backends/cupy_raw/kernels/{name}" for name in ("sm80", "simt", "common"))

FAULTS = (
    # sm80: forward
    Fault("sm80: packed rows: the heads' stride may be anything", f"{SM80}/load.cuh", "tensor.token | (PACK_GQA > 1 ? tensor.head : 0)", "tensor.token"),
    Fault("sm80: packed rows: heads are one token apart", f"{SM80}/load.cuh", "row % PACK_GQA * tensor.head;", "row % PACK_GQA * tensor.token;"),
    Fault("sm80: unaligned rows: columns past the head dim", f"{SM80}/load.cuh", "if (first + r < count && d < DIM) x", "if (first + r < count) x"),
    Fault("sm80: splits overlap", f"{SM80}/forward.cu", "last = (int)(key_tiles * (split + 1) / splits)", "last = (int)((key_tiles * (split + 1) + splits - 1) / splits)"),
    Fault("sm80: a scale below 0 takes the maximum", f"{SM80}/forward.cu", "k0 + BLOCK_K <= at.n_k && scale > 0;", "k0 + BLOCK_K <= at.n_k;"),
    Fault("sm80: a ragged tile is plain", f"{SM80}/forward.cu", "full && k0 + BLOCK_K <= at.n_k && scale > 0", "full && scale > 0"),
    Fault("sm80: V is not awaited where there is one stage", f"{SM80}/forward.cu", "                    cp_async_wait_all();\n                    __syncthreads();  // all threads see V", "                    __syncthreads();  // all threads see V"),
    Fault("sm80: the last packed token", f"{SM80}/forward.cu", "(row0 + BLOCK_Q < rows ? row0 + BLOCK_Q : rows) + PACK_GQA - 1) / PACK_GQA", "(row0 + BLOCK_Q < rows ? row0 + BLOCK_Q : rows)) / PACK_GQA"),
    Fault("sm80: row maxima of the warp's own keys", f"{SM80}/softmax.cuh", "x[i][half] = join(x[i][half], reduce[other][row]);", ";"),
    Fault("sm80: packed heads have the first one's modification", f"{SM80}/softmax.cuh", "row = index / PACK_GQA, h = at.h + index % PACK_GQA;\n            const POSITION q", "row = index / PACK_GQA, h = at.h;\n            const POSITION q"),
    Fault("sm80: dropout of packed rows", f"{SM80}/softmax.cuh", "at.h + index % PACK_GQA, index / PACK_GQA,\n                          k0", "at.h, index,\n                          k0"),
    Fault("sm80: splits have sinks, too", f"{SM80}/epilogue.cuh", "if (HAS_SINKS && !SPLIT_KV) {", "if (HAS_SINKS) {"),
    Fault("sm80: log-sum-exps of splits are those of one batch entry", f"{SM80}/epilogue.cuh", "row_at<float>(p.lse_partial, split * p.batch + at.b, h, row)", "row_at<float>(p.lse_partial, split + at.b, h, row)"),
    Fault("sm80: combine steps over one batch entry", f"{SM80}/combine.cuh", "step = p.batch * p.o_partial.batch;", "step = p.o_partial.batch;"),
    Fault("sm80: combine adds the sink in each group", f"{SM80}/combine.cuh", "float sum = group == 0 ? exp2_fast((sink - finite_max) * LOG2E) : 0.0f", "float sum = exp2_fast((sink - finite_max) * LOG2E)"),
    Fault("sm80: combine takes NaN times 0", f"{SM80}/combine.cuh", "if (scale != 0) acc", "acc"),
    Fault("sm80: TF32x3 without the low part of the left", f"{SM80}/mma.cuh", "            mma(sum, a.low[i], high0, high1);\n", ""),
    Fault("sm80: vectors past the last row", f"{SM80}/store.cuh", "if (row + below + r >= count || below", "if (row + below + r > count || below"),
    Fault("sm80: a slope over one key too many", f"{SM80}/affine_score.cuh", "(last - at.bias) * (1.0f / (KEYS - 1))", "(last - at.bias) * (1.0f / KEYS)"),
    Fault("sm80: the bias of a diagonal begins a key late", f"{SM80}/affine_score.cuh", "(float)(SPAN - 1 - (own - row0) + key)", "(float)(SPAN - (own - row0) + key)"),
    # sm80: tile lists, order
    Fault("sm80: packed heads share the first one's tiles", f"{SM80}/tile_scheduler.cuh", "state = state == found ? state : (int)PARTIAL;", ";"),
    Fault("sm80: groups of 33 tiles", f"{SM80}/tile_scheduler.cuh", "classify_steps(step + 32 * lane, 32) != EMPTY", "classify_steps(step + 33 * lane, 32) != EMPTY"),
    Fault("sm80: 1,024 tiles without a pair are 1,025", f"{SM80}/tile_scheduler.cuh", "step += 1024;", "step += 1056;"),
    Fault("sm80: entries one place on", f"{SM80}/tile_scheduler.cuh", "((1u << lane) - 1))] = 2 * tile", "((2u << lane) - 1))] = 2 * tile"),
    Fault("sm80: the LPT tail begins early", f"{SM80}/tile_scheduler.cuh", "if (!HAS_MASK || index < before_tail * all)", "if (!HAS_MASK || index + 1 < before_tail * all)"),
    # sm80: backward
    Fault("sm80: gradients of a scale below 0", f"{SM80}/bwd_softmax.cuh", "const float masked = p.softmax_scale < 0 ? INFINITE : HIDDEN;", "const float masked = HIDDEN;"),
    Fault("sm80: gradients of keys past the length", f"{SM80}/bwd_epilogue.cuh", "threadIdx.x % 32 / 4 < at.n_k) continue;", "threadIdx.x % 32 / 4 < (int)max_n_k(p)) continue;"),
    Fault("sm80: dQ in the order of arrival", f"{SM80}/backward.cu", "if (ORDERED) semaphore_wait(semaphore, bits, add_after, add_end);", ";"),
    Fault("sm80: dS is without delta", f"{SM80}/bwd_ds.cuh", "(dp[i][n][2 * half + c] - delta[i][half])", "dp[i][n][2 * half + c]"),
    Fault("sm80: non-finite dV is without dropout", f"{SM80}/bwd_nonfinite.cuh", "if (p_pair == 0) return 0;", ""),
    Fault("sm80: dQ of the lower row", f"{SM80}/bwd_postprocess.cuh", "const int row = tile * BLOCK_Q + each.row + 8 * half;", "const int row = tile * BLOCK_Q + each.row + 4 * half;"),
    # simt
    Fault("simt: rows that are not aligned: columns past the head dim", f"{SIMT}/tile.cuh", "first + row < source.count && column + d < DIM;", "first + row < source.count;"),
    Fault("simt: any row is read in vectors", f"{SIMT}/tile.cuh", "(source.token * (long long)sizeof(storage))) % VEC_BYTES == 0) {", "(source.token * (long long)sizeof(storage))) % 4 == 0) {"),
    Fault("simt: float64 with float32's log2(e)", f"{SIMT}/tile.cuh", "(fk_float)1.4426950408889634;", "(fk_float)1.4426950408889634f;"),
    Fault("simt: the last key of an unmasked ragged tile", f"{SIMT}/tile.cuh", " || k0 + (KEYS_ALONG_ROWS ? M : N) > n_k;", ";"),
    Fault("simt: a chunk of columns is lost", f"{SIMT}/tile.cuh", "CHUNKS = ceil_div(DIM, CHUNK);", "CHUNKS = DIM / CHUNK;"),
    Fault("simt: sinks do not lower O", f"{SIMT}/forward.cu", "factor[i] = softmax_exp2((old_max - row_max) * LOG2E);", ""),
    Fault("simt: the log-sum-exp of the row below", f"{SIMT}/forward.cu", "const long long row = row0 + ty + i * TY;\n        if (tx", "const long long row = row0 + ty + i * TY + 1;\n        if (tx"),
    Fault("simt: batch entries share the first one's blocks", f"{SIMT}/backward.cu", "h = blockIdx.x % p.heads, b = blockIdx.x / p.heads % p.batch", "h = blockIdx.x % p.heads, b = blockIdx.x / p.heads % p.batch * 0"),
    Fault("simt: P of dV is not dropped", f"{SIMT}/backward.cu", "if constexpr (HAS_DROPOUT) drop_tile<ROWS, COLUMNS, true>(p, s, b, h, row0, k0);", ""),
    Fault("simt: the slope of the score is 1", f"{SIMT}/backward.cu", "if constexpr (HAS_SCORE) ds *= slope[i][j];", ""),
    # common: tiles, numbers
    Fault("walk: a group of tiles too far", f"{ALL}/tiles.cuh", "chunk = (first_group + __ffs(groups) - 1) * 32;", "chunk = (first_group + __ffs(groups)) * 32;"),
    Fault("walk: one tile of 32 groups", f"{ALL}/tiles.cuh", "classify_tiles(group * 32, group * 32 + 32) != EMPTY", "classify_tiles(group * 32, group * 32 + 1) != EMPTY"),
    Fault("walk: the last tile is not visited", f"{ALL}/tiles.cuh", "return ++tile < tiles;", "return ++tile < (n + 1) / BLOCK || tile == 0;"),
    Fault("walk: tiles between two groups", f"{ALL}/tiles.cuh", "live &= live - 1;", "live &= live - 1, groups = live == 0 ? 0 : groups;"),
    Fault("order: groups of heads in the L2 cache", f"{ALL}/tile_order.cuh", "const int group = heads - first < heads_at_a_time ? heads - first : heads_at_a_time", "const int group = heads_at_a_time"),
    Fault("ranges of arrays: the last element is not seen", f"{ALL}/scalar.cuh", "i <= corner[2 * AXIS + 1]", "i < corner[2 * AXIS + 1]"),
    Fault("floor division rounds towards 0", f"{ALL}/scalar.cuh", "quotient - (quotient * y != x && (x < 0) != (y < 0))", "quotient"),
    Fault("the remainder of negative numbers", f"{ALL}/scalar.cuh", "x - fk_floordiv(x, y) * y", "x % y"),
    Fault("bfloat16: ties are rounded up", f"{ALL}/scalar.cuh", "0x7fffu + ((bits >> 16) & 1u)", "0x8000u"),
    Fault("bfloat16: NaN becomes infinite", f"{ALL}/scalar.cuh", "nan ? (bits >> 16) | 64u : ", "false ? (bits >> 16) | 64u : "),
    Fault("dropout: nine rounds", f"{ALL}/dropout.cuh", "round < 10", "round < 9"),
    Fault("dropout: pairs of keys swap words", f"{ALL}/dropout.cuh", "const bool upper = key & 2;", "const bool upper = !(key & 2);"),
    Fault("sinks: gradients of the first 256 rows", f"{ALL}/bwd_preprocess.cu", "index < p.batch * rows; index += 256", "index < 256 && index < p.batch * rows; index += 256"),
    Fault("row statistics: rows without a key", f"{ALL}/bwd_preprocess.cu", "= empty ? INFINITE : lse;", "= lse;"),
    Fault("row statistics: unaligned rows", f"{ALL}/bwd_preprocess.cu", "for (int d = lane; d < HEAD_DIM_V; d += LANES) sum", "for (int d = lane; d < HEAD_DIM_V - 1; d += LANES) sum"),
)  # fmt: skip
