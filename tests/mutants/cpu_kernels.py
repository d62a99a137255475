"""Faults in the kernels of the CPU backend: kernels/, and the functions that they call."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/conformance/test_steps.py",
    "tests/conformance/test_conformance.py -k 'cpu and (boundary or head_dims or alone)'",
    "tests/unit/test_cpu_kernels.py",
    "tests/conformance/test_decode.py",
    "tests/conformance/test_edges.py -k 'cpu'",
    "tests/conformance/test_conformance.py -k 'cpu and (pairs or many or finite)'",
    "tests/unit/test_cpu_bf16_pairs.py",
)

CPU = "flashkit/backends/cpu"
FORWARD, BACKWARD, DECODE = (f"{CPU}/kernels/{name}.py" for name in ("forward", "backward", "decode"))
OPERANDS, PAIRS, LOADER = (f"{CPU}/kernels/{name}.py" for name in ("operands", "operands_bf16_pairs", "kv_loader"))

FAULTS = (
    # the forward pass
    Fault(
        "forward: O is not rescaled", FORWARD,
        "                o_acc[d, i] *= m_new[i]",
        "                pass",
        core="rescale",
    ),
    Fault("forward: l is not rescaled", FORWARD, "            l[i] *= m_new[i]", "            pass", core="rescale"),
    Fault(
        "forward: the maximum never moves", FORWARD,
        "moves |= m_new[i] > m[i] + RESCALE_THRESHOLD",
        "moves |= m_new[i] > m[i] + 1000",
    ),
    Fault(
        "forward: one query decides whether the maximum moves", FORWARD,
        "moves |= m_new[i] > m[i] + RESCALE_THRESHOLD",
        "moves = m_new[i] > m[i] + RESCALE_THRESHOLD",
    ),
    Fault(
        "forward: the old maximum is lost", FORWARD,
        "            rescale[0, i] = m[i]\n            m[i] = m_new[i]",
        "            m[i] = m_new[i]\n            rescale[0, i] = m[i]",
    ),
    Fault(
        "forward: a row without keys subtracts minus infinity", FORWARD,
        "m_safe[i] = 0 if m[i] == -np.inf else m[i]",
        "m_safe[i] = m[i]",
    ),
    Fault(
        "forward: the sink does not rescale O", FORWARD,
        "lse[i], l[i] = row_max + np.log(row_sum), rescale / row_sum",
        "lse[i], l[i] = row_max + np.log(row_sum), 1 / row_sum",
    ),
    Fault(
        "forward: the sink of the next head", FORWARD,
        "sink = accum_row(args[SINKS], args[HEADS])[h]",
        "sink = accum_row(args[SINKS], args[HEADS])[(h + 1) % args[HEADS]]",
    ),
    Fault(
        "forward: l is not rescaled for the sink", FORWARD,
        "row_sum = row_sum * rescale + np.exp(sink - row_max)",
        "row_sum = row_sum + np.exp(sink - row_max)",
        core="sink",
    ),
    Fault(
        "forward: a sink of minus infinity is used", FORWARD,
        "            if sink != -np.inf:",
        "            if True:",
        "tests/conformance/test_edges.py -k 'cpu and sink'",
    ),
    Fault(
        "forward: the last key is left out", FORWARD,
        "n = min(block_k, seq.n_k - k0)",
        "n = min(block_k, seq.n_k - k0 - (seq.n_k - k0 < block_k))",
        core="ragged tile",
    ),
    Fault(
        "forward: the last tile is left out", FORWARD,
        "tiles = (seq.n_k + block_k - 1) // block_k",
        "tiles = seq.n_k // block_k",
        core="ragged tile",
    ),
    Fault(
        "forward: a panel's queries start at the block", FORWARD,
        "scratch + at.transposed, b, h, row0, start)",
        "scratch + at.transposed, b, h, first, start)",
    ),
    Fault(
        "forward: dropout counts keys from the tile", FORWARD,
        "dropout(args, p_t[:, :columns], True, b, h, row0, begin)",
        "dropout(args, p_t[:, :columns], True, b, h, row0, begin - k0)",
    ),
    Fault(
        "forward: values of the tile's first keys", FORWARD,
        "v_t[:, (begin - k0) // K_PACK : (start - k0 + K_PACK - 1) // K_PACK]",
        "v_t[:, : (start - begin + K_PACK - 1) // K_PACK]",
    ),
    Fault(
        "forward: no non-finite fallback", FORWARD,
        "        for nonfinite in range(2):",
        "        for nonfinite in range(1):",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault(
        "forward: keys of a strip from the tile's start", FORWARD,
        "scores(args, k[start - k0 : stop - k0], q_t, s_t)",
        "scores(args, k[: stop - start], q_t, s_t)",
    ),
    Fault(
        "forward: a group of tiles is one tile", FORWARD,
        "            tile += 1\n        tile = end\n",
        "            tile = end\n        tile = end\n",
    ),
    Fault(
        "forward: a key head for each query head", FORWARD,
        "head_kv = h // args[GROUP]",
        "head_kv = h % (args[HEADS] // args[GROUP])",
        core="heads",
    ),
    Fault(
        "forward: the LSE's logarithm is subtracted", FORWARD,
        "lse[i], l[i] = row_max + np.log(row_sum), rescale",
        "lse[i], l[i] = row_max - np.log(row_sum), rescale",
        core="lse",
    ),
    Fault(
        "forward: the LSE without the scale", FORWARD,
        "row_max, row_sum, rescale = m[i] * scale, l[i], ACCUM(1)",
        "row_max, row_sum, rescale = m[i], l[i], ACCUM(1)",
        "tests/unit/test_cpu_bf16_pairs.py",
        core="lse",
    ),
    # the backward pass
    Fault(
        "backward: dlse is added", BACKWARD,
        "total -= q_stats(args, DLSE",
        "total += q_stats(args, DLSE",
        core="gradient",
    ),
    Fault(
        "backward: the LSE of rows without keys", BACKWARD,
        "bwd_lse[i] = np.inf if empty else lse[i]",
        "bwd_lse[i] = lse[i]",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault(
        "backward: dP is not dropped", BACKWARD,
        "dropout(args, ds, False, b, h, row0, k0)",
        "dropout(args, ds, False, b, h, row0, k0 + 4)",
    ),
    Fault(
        "backward: P is dropped before dS", BACKWARD,
        "        softmax_backward(args, s, ds, lse, delta, pairs)\n"
        "        visit_ds(args, seq, s, ds, scratch + at.slopes, b, h, row0, k0)\n",
        "        visit_ds(args, seq, s, ds, scratch + at.slopes, b, h, row0, k0)\n"
        "        softmax_backward(args, s, ds, lse, delta, pairs)\n",
    ),
    Fault(
        "backward: the last key tile is left out", BACKWARD,
        "tiles = (seq.n_k + args[BLOCK_K] - 1) // args[BLOCK_K]",
        "tiles = seq.n_k // args[BLOCK_K]",
        core="ragged tile",
    ),
    Fault(
        "backward: the last query tile is left out", BACKWARD,
        "tiles = (n_q + block_q - 1) // block_q",
        "tiles = n_q // block_q",
        core="ragged tile",
    ),
    Fault(
        "backward: one query head of a group", BACKWARD,
        "for h in range(head_kv * args[GROUP], (head_kv + 1) * args[GROUP]):\n        tile = np.int64(0)",
        "for h in range(head_kv * args[GROUP], head_kv * args[GROUP] + 1):\n        tile = np.int64(0)",
        core="heads",
    ),
    Fault(
        "backward: dQ of a group is not cleared", BACKWARD,
        "for h in range(head_kv * args[GROUP], (head_kv + 1) * args[GROUP]):\n            seq = seq_info(args, b, "
        "h)\n            accum_row",
        "for h in range(head_kv * args[GROUP], head_kv * args[GROUP] + 1):\n            seq = seq_info(args, b, "
        "h)\n            accum_row",
    ),
    Fault(
        "backward: dQ of the first split", BACKWARD,
        "    entry = split * args[DQ_SPLIT_STRIDE] + b * batch_stride",
        "    entry = b * batch_stride",
    ),
    Fault(
        "backward: the sign of dQ of other splits", BACKWARD,
        "total[i] += of_split[i]",
        "total[i] -= of_split[i]",
        core="gradient",
    ),
    Fault(
        "backward: splits are not added", BACKWARD,
        "for split in range(1, args[NUM_SPLITS]):",
        "for split in range(2, args[NUM_SPLITS]):",
    ),
    Fault(
        "backward: a split takes neighbouring tiles twice", BACKWARD,
        "range(split, tiles, args[NUM_SPLITS])",
        "range(split, tiles, max(args[NUM_SPLITS] - 1, 1))",
    ),
    Fault(
        "backward: dQ that is not finite is kept", BACKWARD,
        "d * ACCUM_SIZE), dq):\n            args[IS_NONFINITE] = 1",
        "d * ACCUM_SIZE), dq):\n            pass",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight or key_of_infinity)'",
    ),
    Fault(
        "backward: dV that is not finite is kept", BACKWARD,
        "return finite & store_dkv(args, dv,",
        "return finite | store_dkv(args, dv,",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault(
        "backward: strips of PARTIAL tiles are not told apart", BACKWARD,
        "                    if run != EMPTY:\n",
        "                    if run == FULL:\n",
    ),
    # decoding
    Fault(
        "decode: splits are not weighted", DECODE,
        "weight = ACCUM(0) if row_sum == 0 else exp_below(m[row] - m_safe) / row_sum",
        "weight = ACCUM(0) if row_sum == 0 else 1 / row_sum",
        core="rescale",
    ),
    Fault(
        "decode: row sums are not weighted", DECODE,
        "row_sum += exp_below(m[row] - m_safe) * l[row]",
        "row_sum += l[row]",
    ),
    Fault(
        "decode: a split of weight 0 counts", DECODE,
        "                elif weight != 0:\n",
        "                else:\n",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    Fault(
        "decode: the first split of weight 0 counts", DECODE,
        "0 if weight == 0 else weight * o_partial[row, c]",
        "weight * o_partial[row, c]",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    Fault(
        "decode: the only split of weight 0 counts", DECODE,
        "            out[c] = narrow(ACCUM(0))\n",
        "            out[c] = narrow(weight * o[c])\n",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    Fault("decode: e^0", DECODE, "        return ACCUM(1)\n", "        return ACCUM(0)\n"),
    Fault(
        "decode: the next head is of the same sequence", DECODE,
        "next_b, next_head = b + 1, np.int64(0)",
        "next_b, next_head = b, np.int64(0)",
        "tests/conformance/test_decode.py -k share_work_tiles",
    ),
    Fault(
        "decode: the sink is left out of the sum", DECODE,
        "row_sum = exp_below(sink - m_safe)",
        "row_sum = ACCUM(0)",
        core="sink",
    ),
    Fault("decode: the sink is left out of the maximum", DECODE, "row_max = sink\n", "row_max = ACCUM(-np.inf)\n"),
    Fault(
        "decode: FULL tiles run past the last key", DECODE,
        "n = min(following * block_k, stop) - k0",
        "n = following * block_k - k0",
        core="lengths",
    ),
    Fault(
        "decode: a head's state counts for its group", DECODE,
        "following = min(following, ends[g])",
        "following = ends[g]",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    Fault(
        "decode: a run of FULL tiles ends with the keys", DECODE,
        "            following = min(following, ends[g])\n",
        "",
        "tests/conformance/test_steps.py -k one_query",
    ),
    Fault(
        "decode: the last head of a group says what is visible", DECODE,
        "visible |= states[g] != EMPTY",
        "visible = states[g] != EMPTY",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    Fault(
        "decode: an EMPTY head is not masked", DECODE,
        "            rows[:] = -np.inf\n",
        "            pass\n",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    Fault(
        "decode: the group's heads drop alike", DECODE,
        "False, b, head_kv * group + g, 0, k0)",
        "False, b, head_kv * group, 0, k0)",
    ),
    Fault(
        "decode: the next split begins one tile late", DECODE,
        "tile, tiles = start // block_k,",
        "tile, tiles = start // block_k + (start > 0),",
    ),
    Fault(
        "decode: O is not rescaled by the fallback", DECODE,
        "            o[i, c] *= rescale[i]\n",
        "            pass\n",
        "tests/conformance/test_decode.py -k 'not every_feature'",
    ),
    # operands and tiles of both
    Fault(
        "operands: row sums are not finite-checked", f"{CPU}/kernels/common.py",
        "finite &= np.isfinite(acc[i, j])",
        "finite = np.isfinite(acc[i, j])",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault(
        "operands: the sign of dV", OPERANDS,
        "_gemm_add(args, p.T, do, dv, nonfinite)",
        "_gemm_add(args, (-p).T, do, dv, nonfinite)",
        core="gradient",
    ),
    Fault(
        "operands: the sign of dK", OPERANDS,
        "_gemm_add(args, ds.T, q, dk, nonfinite)",
        "_gemm_add(args, (-ds).T, q, dk, nonfinite)",
        core="gradient",
    ),
    Fault(
        "operands: dK takes P", OPERANDS,
        "_gemm_add(args, ds.T, q, dk, nonfinite)",
        "_gemm_add(args, p.T, q, dk, nonfinite)",
        core="gradient",
    ),
    Fault(
        "operands: dQ takes no fallback", OPERANDS,
        "_gemm_add(args, ds, k, dq, nonfinite)",
        "_gemm_add(args, ds, k, dq, False)",
        "tests/conformance/test_edges.py -k 'cpu and (poison or nan or weight)'",
    ),
    Fault(
        "operands: dQ is overwritten", OPERANDS,
        "        call_gemm(args[GEMM_ADD], a, b, c)",
        "        call_gemm(args[GEMM], a, b, c)",
    ),
    Fault(
        "operands: a query is not padded", OPERANDS,
        "        target[i] = 0\n",
        "        target[i] = ACCUM(np.nan)\n",
    ),
    Fault(
        "loader: V^T is scaled", LOADER,
        "call_pack_transposed(args[PACK_TRANSPOSED], rows, v_t, ONE)",
        "call_pack_transposed(args[PACK_TRANSPOSED], rows, v_t, args[PACK_SCALE])",
    ),
    Fault(
        "bf16 pairs: rows are no whole tiles", PAIRS,
        "words = ((width + 1) // 2 + args[LEFT_WORDS] - 1) // args[LEFT_WORDS] * args[LEFT_WORDS]",
        "words = (width + 1) // 2",
        "tests/unit/test_cpu_bf16_pairs.py",
    ),
    Fault(
        "bf16 pairs: P is rounded before dropout", PAIRS,
        "    return args[DROPOUT] == 0\n\n\n@njit(**options)\ndef halves(",
        "    return True\n\n\n@njit(**options)\ndef halves(",
    ),
    Fault(
        "bf16 pairs: dS is rounded before the slope", PAIRS,
        "return args[VISIT_DS] == 0 and args[DROPOUT] == 0",
        "return args[DROPOUT] == 0",
    ),
    Fault(
        "bf16 pairs: the last key of dS is not cleared", PAIRS,
        "            stored[i, n] = 0\n",
        "            stored[i, n] = 32704\n",
        "tests/unit/test_cpu_bf16_pairs.py",
    ),
    # modification, dropout, products of the fallback
    Fault(
        "modify: positions without the offset", f"{CPU}/tile_ops.py",
        "        q0 = row0 + seq.first_position\n        rows, columns = tile.shape",
        "        q0 = row0\n        rows, columns = tile.shape",
        core="offset",
    ),
    Fault(
        "modify: a FULL tile is not scored", f"{CPU}/tile_ops.py",
        "(state == PARTIAL or args[HAS_SCORE] != 0)",
        "state == PARTIAL",
    ),
    Fault(
        "dropout: a group of four too few", f"{CPU}/tile_ops.py",
        "range(k0 // 4, (k0 + keys + 3) // 4)",
        "range(k0 // 4, (k0 + keys) // 4)",
    ),
    Fault(
        "dropout: kept weights keep their size", f"{CPU}/tile_ops.py",
        "factor = tile.dtype.type(double_from_bits(args[DROPOUT_SCALE]))",
        "factor = tile.dtype.type(1)",
    ),
    Fault(
        "dropout: the upper half of the seed", f"{CPU}/tile_ops.py",
        "key0, key1 = seed & LOW32, seed >> SHIFT32",
        "key0, key1 = seed & LOW32, seed & LOW32",
    ),
    Fault("dropout: rounds", f"{CPU}/tile_ops.py", "    for _ in range(ROUNDS):", "    for _ in range(ROUNDS - 1):"),
    Fault(
        "scale: the part in the tile", f"{CPU}/tile_ops.py",
        "                tile[i, j] *= factor\n",
        "                tile[i, j] *= 1\n",
        "tests/unit/test_cpu_bf16_pairs.py",
    ),
    # tiles, work tiles, sequences
    Fault(
        "classify: one key too few", f"{CPU}/tiling.py",
        "row1 - 1 + position, k0, k1 - 1, args[VALUES]",
        "row1 - 1 + position, k0, k1 - 2, args[VALUES]",
        core="mask edge",
    ),
    Fault(
        "classify: one row too few", f"{CPU}/tiling.py",
        "row0, row1 - 1, row0 + position",
        "row0, row1 - 2, row0 + position",
        core="mask edge",
    ),
    Fault("classify: without the last row's offset", f"{CPU}/tiling.py", "row1 - 1 + position, k0", "row1 - 1, k0"),
    Fault(
        "strips join across a change of state", f"{CPU}/tiling.py",
        "        if other != state:\n            break\n",
        "",
    ),
    Fault(
        "strips end at the next strip", f"{CPU}/tiling.py",
        "return min(end * STRIP, stop), state",
        "return end * STRIP, state",
    ),
    Fault(
        "the scheduler leaves out the first work tile", f"{CPU}/tile_scheduler.py",
        "    number = atomic_increment(args.ctypes.data + 8 * TILE_COUNTER)\n    heads_kv",
        "    number = atomic_increment(args.ctypes.data + 8 * TILE_COUNTER) + 1\n    heads_kv",
    ),
    Fault(
        "lengths are not clamped above", f"{CPU}/seq_info.py",
        "min(max(integer_at(args[KV_LENGTHS] + 8 * b), 0), args[N_K])",
        "max(integer_at(args[KV_LENGTHS] + 8 * b), 0)",
        "tests/unit/test_memory_safety_calls.py -k bound_lengths",
    ),
    Fault(
        "the length of the first entry", f"{CPU}/seq_info.py",
        "integer_at(args[KV_LENGTHS] + 8 * b)",
        "integer_at(args[KV_LENGTHS])",
        core="lengths",
    ),
    Fault(
        "the offset of the first entry", f"{CPU}/seq_info.py",
        "integer_at(args[Q_OFFSETS] + 8 * b)",
        "integer_at(args[Q_OFFSETS])",
        core="offset",
    ),
    Fault(
        "strides of heads and batch are swapped", f"{CPU}/seq_info.py",
        "address = args[tensor] + b * args[tensor + 1] + h * args[tensor + 2] + first * args[tensor + 3]",
        "address = args[tensor] + h * args[tensor + 1] + b * args[tensor + 2] + first * args[tensor + 3]",
    ),
    Fault(
        "bfloat16 is truncated", f"{CPU}/storage.py",
        "i32(0x7FFF)",
        "i32(0)",
        "tests/unit/test_cpu_kernels.py -k sixteen",
    ),
    Fault(
        "scratch: l and the rows of a panel", f"{CPU}/scratch.py",
        "panel_rows = _end(l, queries, itemsize)",
        "panel_rows = _end(l, 0, itemsize)",
    ),
    Fault(
        "scratch: decode shares a region", f"{CPU}/scratch.py",
        "pe_scores = _end(scores, rows * keys, itemsize)",
        "pe_scores = _end(scores, keys, itemsize)",
    ),
)  # fmt: skip
