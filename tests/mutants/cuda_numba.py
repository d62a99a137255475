"""Faults in the CUDA kernels in Python."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/cuda/test_numba_cuda.py",
    "tests/emulator/test_kernels.py -k 'numba_cuda and (simt or numbers)'",
    "tests/emulator/test_kernels.py -k 'numba_cuda and (sm80 or sm90)'",
)
DEVICE = (
    "tests/emulator/test_kernels.py -k 'numba_cuda and test_features'",
    "tests/emulator/test_kernels.py -k 'numba_cuda and (simt or numbers)'",
    "tests/cuda/test_cuda_devices.py -k 'numba_cuda and (hidden_nan or infinity)'",
)

ALL, SIMT, SM80, SM90 = (f"flashkit/backends/numba_cuda/kernels/{name}" for name in ("common", "simt", "sm80", "sm90"))

SEQUENCES = "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'test_packed_sequences and numba_cuda-simt'"
MODIFIED = (
    "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'test_modifications and numba_cuda-simt and not packed'"
)


def on_device(generation: str, test: str) -> str:
    return f"tests/cuda/test_cuda_devices.py -k 'numba_cuda-{generation} and {test}'"


FAULTS = (
    # common
    Fault(
        "lengths beyond the room", f"{ALL}/tiles.py",
        "min(max(integer_at(p.kv_lengths, b), 0), p.n_k)", "max(integer_at(p.kv_lengths, b), 0)",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-simt'",
    ),
    Fault(
        "the sign of dlse", f"{ALL}/bwd_preprocess.py",
        "total -= load(F, number_address(p.dlse,", "total += load(F, number_address(p.dlse,",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-simt'",
    ),
    Fault(
        "a sink does not raise the maximum", f"{ALL}/epilogue.py",
        "greatest = greater(top, sink)", "greatest = top",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm90'",
    ),
    Fault(
        "float16 takes row sums of bfloat16", f"{ALL}/softmax.py",
        '32768.0 if STORAGE == "float16" else 1e18', "1e18",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'float16_does_not_hold and numba_cuda-sm90'",
    ),
    Fault(
        "walk: a group of tiles too far", f"{ALL}/tiles.py",
        "chunk = (first_group + lowest_bit(groups)) * 32", "chunk = (first_group + lowest_bit(groups) + 1) * 32",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-simt'",
    ),
    Fault(
        "walk: a last tile of few elements does not exist", f"{ALL}/tiles.py",
        "(BLOCK_K if walk.along_keys else BLOCK_Q) < walk.n", "(BLOCK_K if walk.along_keys else BLOCK_Q) + 31 < walk.n",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'test_unmasked and numba_cuda-simt'",
    ),
    Fault(
        "walk: an array's mask has 32 tiles", f"{ALL}/tiles.py",
        "over = not exists(walk, chunk)", "over = chunk > 0",
        "tests/emulator/test_kernels.py -k 'more_than_32_tiles and numba_cuda'",
    ),
    Fault(
        "the modification of a masked score", f"{ALL}/tiles.py",
        "s = modified_score(s, b, h, row, q, k, p)", "s = s",
        MODIFIED,
    ),
    Fault(
        "packed: row statistics of the first sequence", f"{ALL}/tiles.py",
        "return first_tile(p.cu_seqlens_q, I(b), p.row_block) * p.row_block + n if IS_PACKED else n", "return n",
        SEQUENCES,
    ),
    Fault(
        "packed: dK and dV of all keys are written", f"{ALL}/tiles.py",
        "return seq_info(p, I(b)).n_k if IS_PACKED else p.n_k", "return p.n_k", SEQUENCES,
    ),
    Fault(
        "packed: no room for the tile that is not full", f"{ALL}/tiles.py",
        "return I(U(load(np.int64, cu_seqlens, b)) // U(block)) + b",
        "return I(U(load(np.int64, cu_seqlens, b)) // U(block))",
        SEQUENCES,
    ),
    Fault(
        "packed: keys of the sequence before", f"{ALL}/tiles.py",
        "else load(np.int64, p.cu_seqlens_k, b)", "else load(np.int64, p.cu_seqlens_k, max(b - 1, 0))", SEQUENCES,
    ),
    Fault(
        "pages: any number is taken for a page", f"{ALL}/tiles.py",
        "return min(max(page, 0), table.pages - 1), n - at * table.page", "return page, n - at * table.page",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'packed_queries_of_keys and numba_cuda-simt'",
    ),
    Fault(
        "pages: all sequences have those of the first", f"{ALL}/tiles.py",
        "integer_at(table.data, I(b) * table.width + at)", "integer_at(table.data, at)",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'test_keys_in_pages and numba_cuda-simt'",
    ),
    Fault(
        "simt: pages: rows of a tile are those of its first keys", f"{SIMT}/tile.py",
        "source.b, source.first + row)", "source.b, source.first)",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'test_keys_in_pages and numba_cuda-simt'",
    ),
    # simt
    Fault(
        "simt: the sum is without its rescaling", f"{SIMT}/forward.py",
        "l[i] = l[i] * rescale + total", "l[i] = l[i] + total",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-simt'",
    ),
    Fault(
        "simt: sinks do not raise the maximum", f"{SIMT}/forward.py",
        "old_max, row_max = row_max, larger(row_max, sink)", "old_max = row_max",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-simt'",
    ),
    Fault(
        "simt: masked NaN counts", f"{SIMT}/tile.py",
        "if x != ZERO:", "if True:", "tests/emulator/test_kernels.py -k 'test_hard_data and numba_cuda-simt'",
    ),
    Fault(
        "simt: the slope of the score is 1", f"{SIMT}/backward.py",
        "ds *= slope[i, j]", "pass",
        MODIFIED,
    ),
    Fault(
        "simt: unaligned rows: columns past the head dim", f"{SIMT}/tile.py",
        "if left > 1 else ZERO", "if left > 0 else ZERO",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'rows_that_are_not_aligned and numba_cuda'",
    ),
    # sm80
    Fault(
        "sm80: a ragged tile is full", f"{SM80}/forward.py",
        "full = walk.state == FULL and k0 + BLOCK_K <= n_k", "full = walk.state == FULL",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm80'",
    ),
    Fault(
        "sm80: a wrong speculation stays", f"{SM80}/forward.py",
        "            if not near:  # the speculation failed, and the scores are overwritten\n                "
        "s = scores(q, k)\n", "            near = True\n",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'float16_does_not_hold and numba_cuda-sm80'",
    ),
    Fault(
        "sm80: the order of additions is not kept", f"{SM80}/backward.py",
        "            semaphore_wait(semaphore, missing, add_after, add_end)\n", "",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm80'", on_device("sm80",
        "same_bits and float16"),
    ),
    # sm90
    Fault(
        "sm90: V behind the length is multiplied", f"{SM90}/mainloop.py",
        "if valid_keys < BLOCK_K:", "if valid_keys < 0:",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'lengths_without_a_mask and numba_cuda'",
    ),
    Fault(
        "sm90: after a misprediction S is not masked", f"{SM90}/mainloop.py",
        "            s = modify_tile(p, work, unmasked or full, s, k0)\n", "",
        "tests/emulator/test_kernels.py -k 'test_hard_data and numba_cuda-sm90-growing'",
    ),
    Fault(
        "sm90: a ragged tile is FULL", f"{SM90}/tile_scheduler.py",
        "return i32(PARTIAL) if state == FULL and whole > n_k else state", "return state",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm90'",
    ),
    Fault(
        "sm90: warp groups without a key get no tile", f"{SM90}/tile_scheduler.py",
        "first_bits |= PARTIAL << 2 * wg", "first_bits |= 0",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm90'",
    ),
    Fault(
        "sm90: tile counters are not reset", f"{SM90}/tile_scheduler.py",
        "        store(np.int32, p.tile_counter, 0, i32(0))\n", "",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_host.py -k 'serve_again and numba_cuda'",
    ),
    Fault(
        "sm90: backward: keys past the length are seen", f"{SM90}/bwd_softmax.py",
        "i32(row + coord.q_position), inside, coord)\n    return x if key < coord.n_k else HIDDEN",
        "i32(row + coord.q_position), inside, coord)\n    return x",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm90'",
    ),
    Fault(
        "sm90: the sign of dlse", f"{SM90}/bwd_preprocess.py",
        "total -= load(F, number_address(tensors.dlse,", "total += load(F, number_address(tensors.dlse,",
        "tests/emulator/test_kernels.py -k 'test_features and numba_cuda-sm90'",
    ),
    Fault(
        "sm90: backward: masked pairs have gradients", f"{SM90}/bwd_ds.py",
        "return ZERO if p_slope == ZERO else p_slope * x", "return p_slope * x",
        "FLASHKIT_TEST_ALL=1 tests/emulator/test_kernels.py -k 'test_hard_data and numba_cuda-sm90-NaN'",
    ),
    Fault(
        "sm80: O is not rescaled", f"{SM80}/forward.py",
        "                output = rows_scaled(output, rescale)", "                pass",
    ),
    Fault(
        "strides are swapped", f"{ALL}/tiles.py",
        "h * tensor.head + n * tensor.token) * ITEMSIZE", "h * tensor.token + n * tensor.head) * ITEMSIZE",
    ),
    Fault(
        "dlse is added", f"{ALL}/bwd_preprocess.py",
        "total -= load(F, number_address(p.dlse", "total += load(F, number_address(p.dlse",
    ),
)  # fmt: skip
