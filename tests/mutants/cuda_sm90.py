"""Faults in Hopper's kernels in CUDA C++."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/emulator/test_kernels.py -k 'cupy_raw and sm90'",
    "tests/emulator/test_hopper.py -k 'not numba_cuda'",
)

SM90 = "flashkit/backends/cupy_raw/kernels/sm90"

FAULTS = (
    # forward: softmax
    Fault("float16 takes row sums of bfloat16", f"{SM90}/softmax.cuh", "MAX_SUM = P_IS_FLOAT16 ? 32768.0f : 1e18f", "MAX_SUM = 1e18f"),
    Fault("the second row's misprediction is not seen", f"{SM90}/softmax.cuh", "sum[0] <= MAX_SUM && sum[1] <= MAX_SUM && valid", "sum[0] <= MAX_SUM && valid"),
    Fault("rows without a key subtract -inf", f"{SM90}/softmax.cuh", "top == HIDDEN ? 0.0f : top;", "top;"),
    Fault("S again: the second half of 16 keys", f"{SM90}/softmax.cuh", "mma_m16n8k16(s + 8 * n + 4, a, b[2], b[3])", "mma_m16n8k16(s + 8 * n + 4, a, b[0], b[1])"),
    Fault("the online softmax forgets the maximum so far", f"{SM90}/softmax.cuh", "float top = m[half];", "float top = HIDDEN;"),
    Fault("after a misprediction S is not modified", f"{SM90}/mainloop.cuh", "else if (speculative || block.affine) modify_tile", "else if (block.affine) modify_tile"),
    Fault("a work tile's first reference stays a guess", f"{SM90}/mainloop.cuh", "                m[0] = m[1] = HIDDEN;", "                ;"),
    Fault("the second row's sum is rescaled like the first's", f"{SM90}/mainloop.cuh", "            l[0] *= block.rescale[0], l[1] *= block.rescale[1];\n            const", "            l[0] *= block.rescale[0], l[1] *= block.rescale[0];\n            const"),
    Fault("the first PV of a work tile adds to the last O", f"{SM90}/mainloop.cuh", "acc.accumulate = UNMASKED || !first_tile,", "acc.accumulate = true,"),
    Fault("V behind the length is multiplied", f"{SM90}/mainloop.cuh", "acc.valid_keys < BLOCK_K) {", "acc.valid_keys < 0) {"),
    Fault("no PV before a tile without keys", f"{SM90}/mainloop.cuh", "steady_desc = softmax.has_row_ref && path.steady ? FULL << 2 * wg : NO_DESC", "steady_desc = FULL << 2 * wg"),
    # forward: masks, sinks, non-finite values
    Fault("packed rows end with the tokens", f"{SM90}/layout.cuh", "(int)p.n_q * PACK_GQA - 1, index", "(int)p.n_q - 1, index"),
    Fault("heads of packed rows are swapped with tokens", f"{SM90}/layout.cuh", "return {h + index % PACK_GQA, index / PACK_GQA};", "return {h + index / PACK_GQA, index % PACK_GQA};"),
    Fault("the end of the keys is not masked", f"{SM90}/score_mod.cuh", "if (PARTIAL_TILE && HAS_MASK && n_k - k0 < BLOCK_K)", "if (false)"),
    Fault("dropout counts packed rows", f"{SM90}/score_mod.cuh", "at.h + index % PACK_GQA, index / PACK_GQA,\n                      k0 + 8", "at.h, index,\n                      k0 + 8"),
    Fault("the score is scaled after its modification", f"{SM90}/score_mod.cuh", "modified_score<position>(x * scale,", "modified_score<position>(x,"),
    Fault("a sink does not lower O", f"{SM90}/epilogue.cuh", "factor[half] = exp2_fast(m[half] - top);", ";"),
    Fault("the sink of the first packed head", f"{SM90}/epilogue.cuh", "static_cast<const float*>(p.sinks)[h] * LOG2E", "static_cast<const float*>(p.sinks)[at.h] * LOG2E"),
    Fault("one log-sum-exp too many", f"{SM90}/epilogue.cuh", "writes = index < (int)p.n_q * PACK_GQA &&", "writes = index <= (int)p.n_q * PACK_GQA &&"),
    Fault("non-finite rows: a masked NaN counts", f"{SM90}/nonfinite.cuh", "sums[i] += weight == 0 ? 0.0f : weight * v;\n                }\n            }\n        }\n#pragma unroll\n        for (int i = 0; i < OWN; ++i) {\n            const int column", "sums[i] += weight * v;\n                }\n            }\n        }\n#pragma unroll\n        for (int i = 0; i < OWN; ++i) {\n            const int column"),
    Fault("non-finite rows: the log-sum-exp of the upper eight", f"{SM90}/nonfinite.cuh", "r < 8 ? reference_of[0] : reference_of[1]", "reference_of[0]"),
    # forward: work tiles
    Fault("packed heads share the first one's mask", f"{SM90}/tile_scheduler.cuh", "other = 1; HAS_MASK && other < PACK_GQA", "other = 1; HAS_MASK && other < 1"),
    Fault("a ragged tile is FULL", f"{SM90}/tile_scheduler.cuh", "state == FULL && whole > n_k ? (int)PARTIAL : state", "state"),
    Fault("warp groups without a key get no tile", f"{SM90}/tile_scheduler.cuh", "== EMPTY ? PARTIAL << 2 * wg : 0", "== EMPTY ? 0 : 0"),
    Fault("an empty work tile takes what was listed before", f"{SM90}/tile_scheduler.cuh", "if (found == 0) to.list.entry[0] = (tiles - 1) << 8;", ";"),
    Fault("tile counters are not reset", f"{SM90}/tile_scheduler.cuh", "== gridDim.x - 1) p.tile", "== gridDim.x) p.tile"),
    Fault("the unmasked ragged tiles are those of the first heads", f"{SM90}/tile_scheduler.cuh", "else bh = index - whole * all, tile = whole;", "else bh = index - whole, tile = whole;"),
    Fault("tile lists: a group of tiles too far", f"{SM90}/tile_lists.cuh", "next += 32 * (__ffs(groups) - 1);", "next += 32 * __ffs(groups);"),
    Fault("tile lists overflow", f"{SM90}/tile_lists.cuh", "next < tiles && count + 32 <= CAPACITY &&", "next < tiles && count <= CAPACITY &&"),
    Fault("V of the tile after", f"{SM90}/producer.cuh", "const unsigned stage = (n - 1) % STAGES;", "const unsigned stage = n % STAGES;"),
    # forward: affine scores
    Fault("a slope over one key too many", f"{SM90}/affine_score.cuh", "const float step = step_between(first, last, LAST + 15);", "const float step = step_between(first, last, LAST + 16);"),
    Fault("bent biases pass as straight", f"{SM90}/affine_score.cuh", "return __all_sync(~0u, bias_is_straight", "return true || __all_sync(~0u, bias_is_straight"),
    Fault("a reference that lags is not raised", f"{SM90}/affine_score.cuh", "ref_minus_bias[0] + affine.bias_max[0] - m[0] > MAX_LAG", "ref_minus_bias[0] - affine.bias_max[0] - m[0] > MAX_LAG"),
    Fault("capped scores: the square's coefficient", f"{SM90}/affine_score.cuh", "TANH_POLY_1 * gain * rate * square)", "TANH_POLY_1 * gain * rate)"),
    # backward: preprocess, postprocess
    Fault("delta of rows without keys", f"{SM90}/bwd_preprocess.cuh", "total = empty ? 0 : total - given.dlse;", "total -= given.dlse;"),
    Fault("a non-finite delta passes", f"{SM90}/bwd_preprocess.cuh", "is_finite(given.lse) && is_finite(total) ?", "is_finite(given.lse) ?"),
    Fault("dlse of the row below", f"{SM90}/bwd_preprocess.cuh", "*row_at<const float>(p.dlse, b, h, row)", "*row_at<const float>(p.dlse, b, h, row > 0 ? row - 1 : 0)"),
    Fault("dQ of tiles that nothing stored", f"{SM90}/bwd_postprocess.cuh", "const bool stored = !DETERMINISTIC || (__ldcg", "const bool stored = true || (__ldcg"),
    Fault("dQ waits for the first word of its key tiles", f"{SM90}/bwd_postprocess.cuh", "i < CLUSTER_SIZE * words; i += blockDim.x", "i < 1; i += blockDim.x"),
    Fault("dQ of half a query tile", f"{SM90}/bwd_postprocess.cuh", "i < BLOCK_Q * VECS; i += 256", "i < BLOCK_Q * VECS / 2; i += 256"),
    # backward: dQ in order
    Fault("a tile that adds nothing has stored", f"{SM90}/dq_semaphore.cuh", '"r"(1u << tile_k % DqSemaphore::TILES_PER_WORD) : "memory");\n}\nDEVICE void set', '"r"(DqSemaphore::STORED | 1u << tile_k % DqSemaphore::TILES_PER_WORD) : "memory");\n}\nDEVICE void set'),
    Fault("nobody waits for its turn", f"{SM90}/dq_semaphore.cuh", "& needed) != needed) {}", "& needed) != needed) break;"),
    Fault("dQ is stored, not added", f"{SM90}/dq_semaphore.cuh", "? ADD : STORE;", "? STORE : STORE;"),
    Fault("a tile without pairs waits for its turn", f"{SM90}/bwd_producer.cuh", "held_states = PARTIAL * 5 | TileDesc::NO_VISIBLE_PAIR;", "held_states = PARTIAL * 5;"),
    Fault("dQ is cleared by the first half of a share", f"{SM90}/dq_clear.cuh", "index < from + many && query", "index < from + (many + 1) / 2 && query"),
    Fault("the last work tiles are in the other order", f"{SM90}/bwd_tile_scheduler.cuh", "FROM_DIAGONAL && !in_tail ? tiles", "FROM_DIAGONAL ? tiles"),
    # backward: masks, gradients
    Fault("backward: keys past the length are seen", f"{SM90}/bwd_softmax.cuh", "return k < n_k && (!HAS_MASK", "return (!HAS_MASK"),
    Fault("backward: a ragged tile is FULL", f"{SM90}/bwd_scheduler_warp.cuh", "return state == FULL && k1 > n_k ? (int)PARTIAL : state;", "return state;"),
    Fault("backward: the second half of keys has the state of the first", f"{SM90}/bwd_scheduler_warp.cuh", "at.k0 + WARPGROUP_KEYS * g, at.k0", "at.k0, at.k0"),
    Fault("backward: masked pairs have a gradient", f"{SM90}/bwd_ds.cuh", "if (!UNMASKED && p_slope[i] == 0) x[c] = 0;", ";"),
    Fault("backward: dropout of dP is not scaled", f"{SM90}/bwd_ds.cuh", "? dp[i] * (float)p.dropout_scale : 0.0f;", "? dp[i] : 0.0f;"),
    Fault("backward: keys past the length keep NaN", f"{SM90}/bwd_nonfinite.cuh", "(nonfinite >> row % 32 & 1) || row >= existing", "(nonfinite >> row % 32 & 1)"),
    Fault("backward: rows of dO that are not finite", f"{SM90}/bwd_nonfinite.cuh", "    clear_rows_where<BLOCK_Q, CHUNKS_V>(dout, is_nonfinite);\n", ""),
    Fault("backward: a slope over one pair too many", f"{SM90}/bwd_affine_score.cuh", "(1.0f / (ROWS + KEYS - 2))", "(1.0f / (ROWS + KEYS - 1))"),
    Fault("backward: capped scores keep the slope at 0", f"{SM90}/bwd_affine_score.cuh", "tile.slope = UNIT_SLOPE ? 1.0f : uniform_float(gain * rate);", "tile.slope = 1.0f;"),
    Fault("backward: dropout bits of the neighbour", f"{SM90}/bwd_dropout.cuh", "(threadIdx.x % 32 & ~12) | 4 * i) >> part", "(threadIdx.x % 32 & ~12) | 4 * i)"),
    Fault("backward: dK of the second chunk goes to the first", f"{SM90}/bwd_epilogue.cuh", "{64 * chunk, at.k0 + first_key", "{0, at.k0 + first_key"),
    Fault("backward: K is loaded for the last head", f"{SM90}/bwd_kv_source.cuh", "h / GQA_GROUP, b, pipe.full", "h % GQA_GROUP, b, pipe.full"),
    Fault("fused preprocess: dots of the first chunk", f"{SM90}/bwd_fused_preprocess.cuh", "for (int c = 0; c < CHUNKS_V; ++c)", "for (int c = 0; c < 1; ++c)"),
    Fault("fused preprocess: statistics of the first 64 rows", f"{SM90}/bwd_fused_preprocess.cuh", "load_given_stats(p, at.b, at.h, from + thread)", "load_given_stats(p, at.b, at.h, at.tile * BLOCK_Q + thread)"),
    Fault("cluster: the CTA's own columns twice", f"{SM90}/bwd_kv_source.cuh", "64 * DQ_CHUNKS * rank);", "0);"),
    Fault("cluster: the peer's dS is not awaited", f"{SM90}/bwd_mainloop_cluster.cuh", "            pipe_dsmem.consumer_wait(n);\n", ""),
    # float32
    Fault("FP16x2: no product of the low terms of V", f"{SM90}/fp16x2.cuh", "term(high, v + LOW_V, false), ", ""),
    Fault("FP16x2: O is without the scale of V", f"{SM90}/fp16x2.cuh", "o[i] = fmaf(pv[i], v_scale, o[i]);", "o[i] = fmaf(pv[i], 1.0f, o[i]);"),
    Fault("FP16x2: lengths are not seen by the conversion", f"{SM90}/fp16x2_convert.cu", "at.lengths == nullptr ? at.tokens : at.lengths[b]", "at.tokens"),
    Fault("FP16x2: deltas have no power", f"{SM90}/fp16x2_backward.cu", "p.delta, b, h, row) * reference.power", "p.delta, b, h, row)"),
    Fault("FP16x2: gradients past the length stay as they are", f"{SM90}/fp16x2_bwd_epilogue.cuh", "if (first + own >= all) continue;", "if (first + own >= at.rows) continue;"),
)  # fmt: skip
