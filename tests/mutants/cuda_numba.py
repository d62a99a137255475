"""Faults in the CUDA kernels in Python."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/cuda/test_numba_cuda.py",
    "tests/emulator/test_kernels.py -k 'numba_cuda and simt'",
    "tests/emulator/test_kernels.py -k 'numba_cuda and sm80'",
    "tests/emulator/test_kernels.py -k 'numba_cuda and sm90'",
    "tests/emulator/test_hopper.py -k numba_cuda",
)

ALL, SIMT, SM80, SM90 = (f"flashkit/backends/numba_cuda/kernels/{name}" for name in ("common", "simt", "sm80", "sm90"))

FAULTS = (
    # common
    Fault("a sink does not raise the maximum", f"{ALL}/epilogue.py", "greatest = greater(top, sink)", "greatest = top"),
    Fault("a sink does not lower O", f"{ALL}/epilogue.py", "exp2_fast(sink - greatest), factor", "exp2_fast(sink - greatest), np.float32(1)"),
    Fault("the log-sum-exp of tokens past the end", f"{ALL}/epilogue.py", "at[1] + index % PACK_GQA, index < p.n_q * PACK_GQA\n", "at[1] + index % PACK_GQA, index <= p.n_q * PACK_GQA\n"),
    Fault("the scale comes after the modification", f"{ALL}/score_mod.py", "x = modify(x * np.float32(p.softmax_scale) if HAS_SCORE else x, PARTIAL", "x = modify(x, PARTIAL"),
    Fault("dropout: pairs of keys swap words", f"{ALL}/score_mod.py", "(words[2], words[3]) if k & 2 else (words[0], words[1])", "(words[0], words[1]) if k & 2 else (words[2], words[3])"),
    Fault("float16 takes row sums of bfloat16", f"{ALL}/softmax.py", '32768.0 if STORAGE == "float16" else 1e18', "1e18"),
    Fault("rows without a key subtract -inf", f"{ALL}/softmax.py", "return ZERO if x == HIDDEN else x", "return x"),
    Fault("walk: a group of tiles too far", f"{ALL}/tiles.py", "chunk = (first_group + lowest_bit(groups)) * 32", "chunk = (first_group + lowest_bit(groups) + 1) * 32"),
    Fault("walk: a tile past the end", f"{ALL}/tiles.py", "(BLOCK_K if walk.along_keys else BLOCK_Q) < walk.n", "(BLOCK_K if walk.along_keys else BLOCK_Q) <= walk.n"),
    Fault("descending walk: groups of tiles", f"{ALL}/tiles.py", "max(walk.top + 1 - last, 0), walk.top + 1 - first", "max(walk.top + 1 - last, 0), walk.top - first"),
    Fault("the modification of a masked score", f"{ALL}/tiles.py", "s = modified_score(s, b, h, row, q, k, p)", "s = s"),
    Fault("order: tiles of the LPT tail twice", f"{ALL}/tile_order.py", "if index < u32(before_tail * heads):", "if index <= u32(before_tail * heads):"),
    Fault("unmasked: ragged tiles of the first heads", f"{ALL}/tile_order.py", "head = u32(index - whole * every)", "head = u32(index - whole)"),
    Fault("sinks: gradients without delta", f"{ALL}/bwd_preprocess.py", "total -= np.float64(p_sink *", "total -= np.float64(F(1) *"),
    Fault("row statistics: vectors of the first half", f"{ALL}/bwd_preprocess.py", "for vec in range(lane, ROW_VECS, LANES):", "for vec in range(lane, ROW_VECS // 2, LANES):"),
    # simt
    Fault("simt: the sum is without its rescaling", f"{SIMT}/forward.py", "l[i] = l[i] * rescale + total", "l[i] = l[i] + total"),
    Fault("simt: sinks do not raise the maximum", f"{SIMT}/forward.py", "old_max, row_max = row_max, larger(row_max, sink)", "old_max = row_max"),
    Fault("simt: masked NaN counts", f"{SIMT}/tile.py", "if x != ZERO:", "if True:"),
    Fault("simt: the slope of the score is 1", f"{SIMT}/backward.py", "ds *= slope[i, j]", "pass"),
    Fault("simt: the last query tile is not taken", f"{SIMT}/backward.py", "(tiles - 1 - block // (p.heads * p.batch)) * BLOCK_Q", "(tiles - block // (p.heads * p.batch)) * BLOCK_Q"),
    Fault("simt: unaligned rows: columns past the head dim", f"{SIMT}/tile.py", "if left > 1 else ZERO", "if left > 0 else ZERO"),
    # sm80
    Fault("sm80: the sum is without its rescaling", f"{SM80}/forward.py", "            l = both(times, l, rescale)\n", ""),
    Fault("sm80: a ragged tile is full", f"{SM80}/forward.py", "full = walk.state == FULL and k0 + BLOCK_K <= n_k", "full = walk.state == FULL"),
    Fault("sm80: a wrong speculation stays", f"{SM80}/forward.py", "            if not near:  # the speculation failed, and the scores are overwritten\n                s = scores(q, k)\n", "            near = True\n"),
    Fault("sm80: columns of the second chunk", f"{SM80}/load.py", "+ CHUNK_ROW * chunk\n", "\n"),
    Fault("sm80: dS of masked pairs", f"{SM80}/bwd_ds.py", "        ds = both(times_nonzero, p_slope, each(minus_delta, dp, rows, 0))", "        ds = both(times, p_slope, each(minus_delta, dp, rows, 0))"),
    Fault("sm80: dropout of dP", f"{SM80}/bwd_ds.py", "dp = both(times_nonzero, dropped, dp)", "pass"),
    Fault("sm80: keys past the length have gradients", f"{SM80}/bwd_epilogue.py", "return x * factor if row < end else ZERO", "return x * factor"),
    Fault("sm80: the order of additions is not kept", f"{SM80}/backward.py", "            semaphore_wait(semaphore, missing, add_after, add_end)\n", ""),
    Fault("sm80: tiles without pairs hold up others", f"{SM80}/dq_semaphore.py", "if HAS_MASK:\n        k0", "if False:\n        k0"),
    Fault("decode: a split has one tile too many", f"{SM80}/decode.py", "last = i32(min(tile + each_part, tiles))", "last = i32(min(tile + each_part + u32(1), tiles))"),
    Fault("decode: the last rows of a packed group", f"{SM80}/decode.py", "min(I(at[2]) + 16, max_n_q(p) * PACK_GQA) - 1) // PACK_GQA + 1", "min(I(at[2]) + 16, max_n_q(p) * PACK_GQA) - 1) // PACK_GQA"),
    Fault("decode: heads of a group have the first one's mask", f"{SM80}/decode.py", "state = state if found == state else I(PARTIAL)", "pass"),
    Fault("combine: splits past the last count", f"{SM80}/combine.py", "weight = weight if split < splits else ZERO", "pass"),
    Fault("combine: O is without the sink's factor", f"{SM80}/combine.py", "factor = ZERO if empty else factor / total", "factor = ZERO if empty else ONE / total"),
    Fault("TF32x3 without the low part of the left", f"{SM80}/tf32x3.py", "x = mma_sync(zeros, part(left, 4, 4), b0, b1)", "x = zeros"),
    # sm90
    Fault("sm90: V behind the length is multiplied", f"{SM90}/mainloop.py", "if valid_keys < BLOCK_K:", "if valid_keys < 0:"),
    Fault("sm90: the sum is without its rescaling", f"{SM90}/mainloop.py", "        l = both(times, l, rescale)\n", ""),
    Fault("sm90: after a misprediction S is not masked", f"{SM90}/mainloop.py", "            s = modify_tile(p, work, unmasked or full, s, k0)\n", ""),
    Fault("sm90: a ragged tile is FULL", f"{SM90}/tile_scheduler.py", "return i32(PARTIAL) if state == FULL and whole > n_k else state", "return state"),
    Fault("sm90: warp groups without a key get no tile", f"{SM90}/tile_scheduler.py", "first_bits |= PARTIAL << 2 * wg", "first_bits |= 0"),
    Fault("sm90: packed heads share the first one's mask", f"{SM90}/tile_scheduler.py", "for other in range(1, PACK_GQA):", "for other in range(1, 1):"),
    Fault("sm90: tile counters are not reset", f"{SM90}/tile_scheduler.py", "== blocks() - 1:", "== blocks():"),
    Fault("sm90: Q of the first warp group for all", f"{SM90}/producer.py", "token = (row0 + 64 * wg) // PACK_GQA", "token = row0 // PACK_GQA"),
    Fault("sm90: backward: keys past the length are seen", f"{SM90}/bwd_softmax.py", "i32(row + coord.q_position), inside, coord)\n    return x if key < coord.n_k else HIDDEN", "i32(row + coord.q_position), inside, coord)\n    return x"),
    Fault("sm90: backward: masked pairs have gradients", f"{SM90}/bwd_ds.py", "return ZERO if p_slope == ZERO else p_slope * x", "return p_slope * x"),
    Fault("sm90: backward: dlse of rows without keys", f"{SM90}/bwd_preprocess.py", "lse_log2, total = INFINITE, ZERO", "lse_log2 = INFINITE"),
    Fault("sm90: backward: dropout bits of the neighbour", f"{SM90}/bwd_dropout.py", ">> u32(lane % 16 // 4)", ">> u32(0)"),
    Fault("sm90: backward: nobody waits for its turn", f"{SM90}/dq_semaphore.py", "& needed != needed:\n            pass", "& needed != needed:\n            break"),
    Fault("sm90: backward: dQ of the first half of a tile", f"{SM90}/bwd_postprocess.py", "for turn in range(BLOCK_Q * CHUNKS // 32):", "for turn in range(BLOCK_Q * CHUNKS // 64):"),
)  # fmt: skip
