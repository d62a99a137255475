"""Faults in the kernels in CUDA C++ for sm80 and simt, and in what all kernels in CUDA C++ share."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/emulator/test_kernels.py -k '(simt or sm80 or numbers) and not numba_cuda'",
    "tests/emulator/test_host.py -k not_positive",
    "tests/emulator/test_kernels.py -k 'sm90 and not numba_cuda'",
)
DEVICE = (
    "tests/emulator/test_kernels.py -k 'cupy_raw and not sm90 and (test_features or test_modifications)'",
    "tests/emulator/test_kernels.py -k '(simt or sm80 or numbers) and not numba_cuda'",
    "tests/emulator/test_host.py -k not_positive",
    "tests/cuda/test_cuda_devices.py -k '(cupy_raw-sm80 or cupy_raw-simt) and (every_remainder or hidden_nan or "
    "strides or sees_nothing)'",
    "tests/emulator/test_kernels.py -k 'sm90 and not numba_cuda'",
)

SM80, SIMT, ALL = (f"flashkit/backends/cupy_raw/kernels/{name}" for name in ("sm80", "simt", "common"))

UNALIGNED = "tests/emulator/test_kernels.py -k 'rows_that_are_not_aligned and cupy_raw'"
DECODE = "tests/emulator/test_kernels.py -k 'test_decode and sm80 and cupy_raw'"
PACKED = "tests/emulator/test_kernels.py -k 'test_packed_sequences and cupy_raw and (sm80 or simt)'"
RUNS = "tests/emulator/test_kernels.py -k test_runs_of_a_page"
PAGES = (
    "tests/emulator/test_kernels.py -k '(keys_in_pages and not queries or tiles_that_a_mask or pages_that_are_not) and "
    "not numba_cuda and not sm90'"
)

FAULTS = (
    # sm80: forward
    Fault(
        "sm80: packed rows: the heads' stride may be anything", f"{SM80}/load.cuh",
        "tensor.token | (PACK_GQA > 1 ? tensor.head : 0)", "tensor.token",
        "tests/emulator/test_kernels.py -k packed_heads_that_are_not_aligned",
    ),
    Fault(
        "sm80: unaligned rows: columns past the head dim", f"{SM80}/load.cuh",
        "if (first + r < count && d < DIM) x", "if (first + r < count) x", UNALIGNED,
    ),
    Fault(
        "sm80: splits overlap", f"{SM80}/forward.cu",
        "last = (int)(key_tiles * (split + 1) / splits)",
        "last = (int)((key_tiles * (split + 1) + splits - 1) / splits)",
        DECODE,
    ),
    Fault(
        "sm80: a scale below 0 takes the maximum", f"{SM80}/forward.cu",
        "k0 + BLOCK_K <= at.n_k && scale > 0;", "k0 + BLOCK_K <= at.n_k;",
        "tests/emulator/test_host.py -k negative_scales",
    ),
    Fault(
        "sm80: a ragged tile is plain", f"{SM80}/forward.cu",
        "full && k0 + BLOCK_K <= at.n_k && scale > 0", "full && scale > 0",
        "tests/emulator/test_kernels.py -k 'test_unmasked and cupy_raw-sm80'",
    ),
    Fault(
        "sm80: row maxima of the warp's own keys", f"{SM80}/softmax.cuh",
        "x[i][half] = join(x[i][half], reduce[other][row]);", ";",
        "tests/emulator/test_kernels.py -k 'test_wide_heads and cupy_raw-sm80'",
    ),
    Fault(
        "sm80: splits have sinks, too", f"{SM80}/epilogue.cuh",
        "if (HAS_SINKS && !SPLIT_KV) {", "if (HAS_SINKS) {", DECODE,
    ),
    Fault(
        "sm80: combine steps over one batch entry", f"{SM80}/combine.cuh",
        "long long step = p.batch * p.o_partial.batch,", "long long step = p.o_partial.batch,", DECODE,
    ),
    Fault(
        "sm80: combine leaves out the last split", f"{SM80}/combine.cuh",
        "            if (split > last) break;\n", "            if (split >= last) break;\n",
        "tests/emulator/test_mla.py -k test_many_splits",
    ),
    Fault(
        "sm80: combine loads a group's splits one after another", f"{SM80}/combine.cuh",
        "o_split += groups * step;", "o_split += step;", "tests/emulator/test_mla.py -k test_many_splits",
    ),
    Fault(
        "sm80: combine has the first splits' O for all", f"{SM80}/combine.cuh",
        "        if (first > group) load(first);\n", "", "tests/emulator/test_mla.py -k test_many_splits",
    ),
    Fault(
        "sm80: combine takes the first columns in each CTA of a row", f"{SM80}/combine.cuh",
        "(blockIdx.x % per_row * lanes + lane) * COMBINE_VEC", "lane * COMBINE_VEC",
        "tests/emulator/test_mla.py -k test_many_splits",
    ),
    Fault(
        "sm80: combine adds the sink in each group", f"{SM80}/combine.cuh",
        "float sum = group == 0 ? exp2_fast(sink - shift) : 0.0f",
        "float sum = exp2_fast(sink - shift)",
        "tests/emulator/test_mla.py -k test_many_splits",
    ),
    Fault(
        "sm80: TF32x3 without the low part of the left", f"{SM80}/mma.cuh",
        "            mma(sum, a.low[i], high0, high1);\n", "",
        "tests/emulator/test_kernels.py -k 'float32_on_tensor_cores and cupy_raw-sm80'",
    ),
    Fault(
        "sm80: a slope over one key too many", f"{SM80}/affine_score.cuh",
        "(last - at.bias) * (1.0f / (KEYS - 1))", "(last - at.bias) * (1.0f / KEYS)",
        "tests/emulator/test_kernels.py -k 'slopes_through_whole_tiles and sm80'",
    ),
    # sm80: tile lists, order
    Fault(
        "sm80: packed heads share the first one's tiles", f"{SM80}/tile_scheduler.cuh",
        "state = state == found ? state : (int)PARTIAL;", ";",
        "tests/emulator/test_kernels.py -k '(test_features or test_decode) and sm80 and cupy_raw'",
    ),
    Fault(
        "sm80: 1,024 tiles without a pair are 1,025", f"{SM80}/tile_scheduler.cuh",
        "step += 1024;", "step += 1056;", "tests/emulator/test_kernels.py -k 'far_apart and cupy_raw-sm80'",
    ),
    # sm80: backward
    Fault(
        "sm80: gradients of a scale below 0", f"{SM80}/bwd_softmax.cuh",
        "const float masked = (float)p.softmax_scale < 0 ? INFINITE : HIDDEN;", "const float masked = HIDDEN;",
        "tests/emulator/test_host.py -k negative_scales",
    ),
    Fault(
        "sm80: dQ in the order of arrival", f"{SM80}/backward.cu",
        "if (ORDERED) semaphore_wait(semaphore, bits, add_after, add_end);", ";",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-sm80'",
        "tests/cuda/test_cuda_devices.py -k 'cupy_raw-sm80 and same_bits and float16'",
    ),
    # simt
    Fault(
        "simt: rows that are not aligned: columns past the head dim", f"{SIMT}/tile.cuh",
        "first + row < source.count && column + d < DIM;", "first + row < source.count;", UNALIGNED,
    ),
    Fault(
        "simt: any row is read in vectors", f"{SIMT}/tile.cuh",
        "DIM % 4 == 0 && source.aligned(VEC_BYTES)", "DIM % 4 == 0 && source.aligned(4)", UNALIGNED,
    ),
    Fault(
        "simt: float64 with float32's log2(e)", f"{SIMT}/tile.cuh",
        "(fk_float)1.4426950408889634;", "(fk_float)1.4426950408889634f;", UNALIGNED,
    ),
    Fault(
        "simt: the last key of an unmasked ragged tile", f"{SIMT}/tile.cuh",
        " || k0 + (KEYS_ALONG_ROWS ? M : N) > n_k;", ";",
        "tests/emulator/test_kernels.py -k 'test_unmasked and cupy_raw-simt'",
    ),
    Fault(
        "simt: sinks do not lower O", f"{SIMT}/forward.cu",
        "factor[i] = softmax_exp2((old_max - row_max) * LOG2E);", "",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-simt'",
    ),
    Fault(
        "simt: the slope of the score is 1", f"{SIMT}/backward.cu",
        "if constexpr (HAS_SCORE) ds *= slope[i][j];", "",
        "tests/emulator/test_kernels.py -k 'test_modifications and cupy_raw-simt and not packed'",
    ),
    # common: tiles, numbers
    Fault(
        "walk: one tile of 32 groups", f"{ALL}/tiles.cuh",
        "classify_tiles(group * 32, group * 32 + 32) != EMPTY", "classify_tiles(group * 32, group * 32 + 1) != EMPTY",
        "tests/emulator/test_kernels.py -k 'far_apart and cupy_raw-simt'",
    ),
    Fault(
        "walk: the last tile is not visited", f"{ALL}/tiles.cuh",
        "return ++tile < tiles;", "return ++tile < (n + 1) / BLOCK || tile == 0;",
        "tests/emulator/test_kernels.py -k 'test_unmasked and cupy_raw-simt'",
    ),
    Fault(
        "ranges of arrays: the last element is not seen", f"{ALL}/scalar.cuh",
        "i <= corner[2 * AXIS + 1]", "i < corner[2 * AXIS + 1]",
        "tests/emulator/test_kernels.py -k 'last_key_of_a_tile and cupy_raw'",
    ),
    Fault(
        "floor division rounds towards 0", f"{ALL}/scalar.cuh",
        "quotient - (quotient * y != x && (x < 0) != (y < 0))", "quotient",
        "tests/emulator/test_kernels.py -k 'numbers_are and cupy_raw'",
    ),
    Fault(
        "the remainder of negative numbers", f"{ALL}/scalar.cuh",
        "(unsigned long long)x - (unsigned long long)fk_floordiv(x, y) * (unsigned long long)y", "x % y",
        "tests/emulator/test_kernels.py -k 'numbers_are and cupy_raw'",
    ),
    Fault(
        "bfloat16: ties are rounded up", f"{ALL}/scalar.cuh",
        "0x7fffu + ((bits >> 16) & 1u)", "0x8000u", "tests/emulator/test_kernels.py -k 'numbers_are and cupy_raw'",
    ),
    Fault(
        "dropout: nine rounds", f"{ALL}/dropout.cuh",
        "round < 10", "round < 9",
        "tests/emulator/test_kernels.py -k 'test_modifications and cupy_raw-simt and not packed'",
    ),
    Fault(
        "sinks: gradients of the first 256 rows", f"{ALL}/bwd_preprocess.cu",
        "index < num_entries(p) * rows; index += 256", "index < 256 && index < num_entries(p) * rows; index += 256",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-sm80'",
    ),
    Fault(
        "row statistics: rows without a key", f"{ALL}/bwd_preprocess.cu",
        "= empty ? INFINITE : lse;", "= lse;",
        "tests/emulator/test_kernels.py -k 'sink_of_minus_infinity and cupy_raw-sm80'",
    ),
    Fault(
        "the sign of dlse", f"{ALL}/bwd_preprocess.cu",
        "sum -= *q_row<const fk_float>(p, p.dlse,", "sum += *q_row<const fk_float>(p, p.dlse,",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-sm80'",
    ),
    Fault(
        "lengths beyond the room", f"{ALL}/params.cuh",
        "return n < 0 ? 0 : n > p.n_k ? p.n_k : n;", "return n < 0 ? 0 : n;",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-simt'",
    ),
    # packed sequences
    Fault(
        "packed: row statistics of the first sequence", f"{ALL}/params.cuh",
        "return IS_PACKED ? first_tile(p.cu_seqlens_q, b, p.row_block) * p.row_block + n : n;", "return n;", PACKED,
    ),
    Fault(
        "packed: dQ is added to tiles of the first sequence", f"{ALL}/params.cuh",
        "return IS_PACKED ? first_tile(p.cu_seqlens_q, b, block) + tile : tile;", "return tile;", PACKED,
    ),
    Fault(
        "packed: dK and dV of all keys are written", f"{ALL}/params.cuh",
        "return IS_PACKED ? seq_info(p, b).n_k : p.n_k;", "return p.n_k;", PACKED,
    ),
    Fault(
        "packed: no room for the tile that is not full", f"{ALL}/params.cuh",
        "return cu_seqlens[b] / block + b;", "return cu_seqlens[b] / block;", PACKED,
    ),
    Fault(
        "packed: keys are those of the first sequence", f"{ALL}/params.cuh",
        "IS_PAGED ? 0 : p.cu_seqlens_k[b], length()", "0, length()", PACKED,
    ),
    # keys in pages
    Fault(
        "pages: any number is taken for a page", f"{ALL}/params.cuh",
        "entry < 0 ? 0 : entry < p.pages ? entry : p.pages - 1", "entry",
        "tests/emulator/test_kernels.py -k 'packed_queries_of_keys and cupy_raw and not sm90'",
    ),
    Fault(
        "pages: all sequences have those of the first", f"{ALL}/params.cuh",
        "p.page_table[b * p.table_width + at]", "p.page_table[at]", PAGES,
    ),
    Fault(
        "sm80: pages: a thread copies its first row", f"{SM80}/load.cuh",
        "|| row() + down < ROWS ? row() + down : 0;", "|| row() + down < ROWS ? row() : 0;", PAGES,
    ),
    Fault(
        "sm80: pages: all runs of a tile are the first one", f"{SM80}/load.cuh",
        "if (down % PAGE_RUN == 0)", "if (down == 0)", RUNS,
    ),
    Fault(
        "sm80: pages: the rows of a run are the first one", f"{SM80}/load.cuh",
        "(PAGE_RUN > 1 ? row()", "(PAGE_RUN > 1 ? 0", RUNS,
    ),
    Fault(
        "sm80: pages: runs are as long as a row", f"{SM80}/kv_source.cuh",
        "(threadIdx.x + j * THREADS) * PAGE_RUN", "(threadIdx.x + j * THREADS)", RUNS,
    ),
    Fault(
        "sm80: pages: a run is shorter than what a CTA copies at a time", "flashkit/backends/cupy_raw/sm80.py",
        "if threads % across or run % (threads // across):", "if threads % across:", RUNS,
    ),
    Fault(
        "sm80: pages: the table is read behind its end", f"{SM80}/kv_source.cuh",
        "return n < n_k ? n : n_k - 1;", "return n;",
        "tests/emulator/test_kernels.py -k 'table_that_ends and sm80 and cupy_raw'",
    ),
    Fault(
        "sm80: pages: the next tile's rows take the place of this one's", f"{SM80}/forward.cu",
        "kv.keep(pages, to_look_up, i + PREFETCH + 1);", "kv.keep(pages, to_look_up, i + PREFETCH);", PAGES,
    ),
    Fault(
        "sm80: pages: a tile that is EMPTY is looked up", f"{SM80}/forward.cu",
        "entry_of(i < count ? i : count - 1) / 2;", "entry_of(0) / 2 + (i < count ? i : count - 1);", PAGES,
    ),
    Fault(
        "sm80: pages: rows of V are as far apart as those of K", f"{SM80}/kv_source.cuh",
        "page * p.v.batch + slot * p.v.token", "page * p.v.batch + slot * p.k.token", PAGES,
    ),
    Fault("sm80: O is not rescaled", f"{SM80}/softmax.cuh", "o[i][n][e] *= rescale[e / 2];", ";"),
    Fault("sm80: one key too many", f"{SM80}/softmax.cuh", "? at.n_k : 0;", "? at.n_k + 1 : 0;"),
    Fault("lengths are not clamped", f"{ALL}/params.cuh", "return n < 0 ? 0 : n > p.n_k ? p.n_k : n;", "return n;"),
    Fault(
        "dlse is added", f"{ALL}/bwd_preprocess.cu",
        "sum -= *q_row<const fk_float>(p, p.dlse", "sum += *q_row<const fk_float>(p, p.dlse",
    ),
)  # fmt: skip
