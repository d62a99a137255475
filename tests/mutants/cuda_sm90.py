"""Faults in Hopper's kernels in CUDA C++."""

from __future__ import annotations

from . import Fault

TESTS = ("tests/emulator/test_kernels.py -k 'sm90 and not numba_cuda'",)
DEVICE = (
    "tests/emulator/test_kernels.py -k 'sm90 and not numba_cuda'",
    "tests/cuda/test_cuda_devices.py -k 'cupy_raw-sm90 and (every_remainder or hidden_nan or "
    "infinity or hugely or (same_bits and float16) or fused_preprocess)'",
)

SM90 = "flashkit/backends/cupy_raw/kernels/sm90"

FEATURES = "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-sm90'"
HARD = "tests/emulator/test_kernels.py -k 'test_hard_data and cupy_raw-sm90'"
GROWING = "tests/emulator/test_kernels.py -k 'float16_does_not_hold and cupy_raw'"
AFFINE = "tests/emulator/test_kernels.py -k '(test_affine_scores or slopes_through) and sm90'"
PACKED = (
    "tests/emulator/test_kernels.py -k '(test_packed_sequences or before_a_short_one) and sm90 and not numba_cuda and "
    "not many_keys'"
)
AWAITED = "tests/emulator/test_kernels.py -k '(after_a_long_one or many_keys) and sm90'"
NEXT = "tests/emulator/test_kernels.py -k 'next_sequence and sm90 and not numba_cuda'"
PAGED = "tests/emulator/test_kernels.py -k '(pages_of or in_pages) and sm90 and not numba_cuda'"

MANY = "tests/emulator/test_kernels.py -k 'test_many_packed and sm90'"
GRADIENTS = "tests/emulator/test_kernels.py -k gradients_of_many_packed"

TF32 = "tests/emulator/test_tf32.py"

FAULTS = (
    # forward: softmax
    Fault(
        "float16 takes row sums of bfloat16", f"{SM90}/softmax.cuh",
        "MAX_SUM = P_IS_FLOAT16 ? 32768.0f : 1e18f", "MAX_SUM = 1e18f", GROWING,
    ),
    Fault(
        "the second row's misprediction is not seen", f"{SM90}/softmax.cuh",
        "sum[0] <= MAX_SUM && sum[1] <= MAX_SUM && valid", "sum[0] <= MAX_SUM && valid", GROWING,
    ),
    Fault(
        "S again: the second half of 16 keys", f"{SM90}/softmax.cuh",
        "mma_m16n8k16(s + 8 * n + 4, a, b[2], b[3])", "mma_m16n8k16(s + 8 * n + 4, a, b[0], b[1])", HARD,
    ),
    Fault(
        "the online softmax forgets the maximum so far", f"{SM90}/softmax.cuh",
        "float top = m[half];", "float top = HIDDEN;", HARD,
    ),
    Fault(
        "after a misprediction S is not modified", f"{SM90}/mainloop.cuh",
        "else if (speculative || block.affine) modify_tile", "else if (block.affine) modify_tile", HARD,
    ),
    Fault(
        "the first PV of a work tile adds to the last O", f"{SM90}/mainloop.cuh",
        "acc.accumulate = UNMASKED || !first_tile,", "acc.accumulate = true,", FEATURES,
    ),
    Fault(
        "V behind the length is multiplied", f"{SM90}/mainloop.cuh",
        "acc.valid_keys < BLOCK_K;", "acc.valid_keys < 0;",
        "tests/emulator/test_kernels.py -k '(lengths_without_a_mask or test_features) and sm90 and cupy_raw'",
    ),
    Fault(
        "a V with a ragged end is multiplied in the steady state", f"{SM90}/mainloop.cuh",
        "path.steady && !is_ragged_v();", "path.steady;",
        "tests/emulator/test_kernels.py -k '(lengths_without_a_mask or sequences_on_hopper) and sm90 and cupy_raw'",
    ),
    # forward: masks, sinks, non-finite values
    Fault(
        "packed rows end with the tokens", f"{SM90}/layout.cuh",
        "n_q * PACK_GQA - 1, index", "n_q - 1, index", FEATURES,
    ),
    Fault(
        "the end of the keys is not masked", f"{SM90}/score_mod.cuh",
        "if (PARTIAL_TILE && HAS_MASK && n_k - k0 < BLOCK_K)", "if (false)", FEATURES,
    ),
    Fault(
        "a sink does not lower O", f"{SM90}/sinks.cuh",
        "factor = exp2_fast(before - reference);", ";", FEATURES,
    ),
    Fault(
        "non-finite rows: a masked NaN counts", f"{SM90}/nonfinite.cuh",
        "sums[i] += weight == 0 ? 0.0f : weight * v;\n                }\n            }\n        }\n#pragma "
        "unroll\n        for (int i = 0; i < OWN; ++i) store_16bit",
        "sums[i] += weight * v;\n                }\n            }\n        }\n#pragma unroll\n        for "
        "(int i = 0; i < OWN; ++i) store_16bit",
        HARD,
    ),
    Fault(
        "non-finite rows: the log-sum-exp of the upper eight", f"{SM90}/nonfinite.cuh",
        "r < 8 ? reference_of[0] : reference_of[1]", "reference_of[0]", HARD,
    ),
    # forward: work tiles
    Fault(
        "packed: tiles of the first 32 sequences", f"{SM90}/packed_tiles.cuh",
        "first += 32, before_first += covered();", "first += 32;", MANY,
    ),
    Fault(
        "packed: a lane counts one sequence less", f"{SM90}/packed_tiles.cuh",
        "for (int i = 0; i < step(); ++i)", "for (int i = 1; i < step(); ++i)", MANY,
    ),
    Fault(
        "packed: sequences that are remembered are not looked up", f"{SM90}/packed_tiles.cuh",
        "number >= before_first && number - before_first < covered()", "covered() != 0", MANY,
    ),
    Fault(
        "a claim leaves out one work tile", f"{SM90}/tile_scheduler.cuh",
        "return uniform(claim) + gridDim.x;", "return uniform(claim) + gridDim.x + 1;",
    ),
    Fault(
        "packed heads share the first one's mask", f"{SM90}/tile_scheduler.cuh",
        "other = 1; MASK_OF_HEADS && other < PACK_GQA", "other = 1; MASK_OF_HEADS && other < 1", FEATURES,
    ),
    Fault(
        "a ragged tile is FULL", f"{SM90}/tile_scheduler.cuh",
        "state == FULL && is_ragged ? (int)PARTIAL : state", "state", FEATURES,
    ),
    Fault(
        "warp groups without a key get no tile", f"{SM90}/tile_scheduler.cuh",
        "== EMPTY ? PARTIAL << 2 * wg : 0", "== EMPTY ? 0 : 0", FEATURES,
    ),
    Fault(
        "tile counters are not reset", f"{SM90}/tile_scheduler.cuh",
        "p.tile_counter[0] = 0, p.tile_counter[1] = 0;", ";",
        "tests/emulator/test_host.py -k 'serve_again and cupy_raw'",
    ),
    Fault(
        "tile lists: a group of tiles too far", f"{SM90}/tile_lists.cuh",
        "next += 32 * (__ffs(groups) - 1);", "next += 32 * __ffs(groups);",
        "tests/emulator/test_kernels.py -k 'far_apart and cupy_raw-sm90'",
    ),
    # forward: affine scores
    Fault(
        "a slope over one key too many", f"{SM90}/affine_score.cuh",
        "const float step = step_between(first, last, LAST + 15);",
        "const float step = step_between(first, last, LAST + 16);",
        AFFINE,
    ),
    Fault(
        "O is not brought to a reference that is raised", f"{SM90}/affine_score.cuh",
        "rescale[half] = exp2_fast(m[half] - top);", "rescale[half] = 1.0f;", AFFINE,
    ),
    Fault(
        "capped scores: the square's coefficient", f"{SM90}/affine_score.cuh",
        "TANH_POLY_1 * gain * rate * square)", "TANH_POLY_1 * gain * rate)", AFFINE,
    ),
    # backward: preprocess, postprocess
    Fault(
        "the sign of dlse", f"{SM90}/bwd_preprocess.cuh", "total - given.dlse", "total + given.dlse", FEATURES,
    ),
    Fault(
        "dQ of tiles that nothing stored", f"{SM90}/bwd_postprocess.cuh",
        "!DETERMINISTIC || (__ldcg(flags) & DqSemaphore::IS_STORED), rows", "true, rows", FEATURES,
    ),
    # backward: dQ in order
    Fault(
        "a tile that adds nothing has stored", f"{SM90}/dq_semaphore.cuh",
        '"r"(1u << tile_k % DqSemaphore::TILES_PER_WORD) : "memory");\n}\nDEVICE void set',
        '"r"(DqSemaphore::STORED | 1u << tile_k % DqSemaphore::TILES_PER_WORD) : "memory");\n}\nDEVICE void set',
        FEATURES,
    ),
    Fault(
        "nobody waits for its turn", f"{SM90}/dq_semaphore.cuh",
        "& needed) != needed) {}", "& needed) != needed) break;",
        FEATURES, "tests/cuda/test_cuda_devices.py -k 'cupy_raw-sm90 and same_bits and float16'",
    ),
    Fault(
        "a tile without pairs waits for its turn", f"{SM90}/bwd_producer.cuh",
        "PARTIAL * 5 | TileDesc::NO_VISIBLE_PAIR | ", "PARTIAL * 5 | ", FEATURES,
    ),
    Fault(
        "dQ is cleared by the first half of a share", f"{SM90}/dq_clear.cuh",
        "index < from + many && query", "index < from + (many + 1) / 2 && query",
        "tests/emulator/test_kernels.py -k '(prepared_late or test_unmasked and cupy_raw) and sm90'",
    ),
    # backward: masks, gradients
    Fault(
        "backward: keys past the length are seen", f"{SM90}/bwd_softmax.cuh",
        "return k < n_k && (!IS_PACKED", "return (!IS_PACKED",
        "tests/emulator/test_kernels.py -k '(lengths_without_a_mask or test_features) and sm90 and cupy_raw'",
    ),
    Fault(
        "backward: a ragged tile is FULL", f"{SM90}/bwd_scheduler_warp.cuh",
        "return state == FULL && (k1 > n_k || (IS_PACKED && end > n_q)) ? (int)PARTIAL : state;", "return state;",
        FEATURES,
    ),
    Fault(
        "backward: the second half of keys has the state of the first", f"{SM90}/bwd_scheduler_warp.cuh",
        "state_of_keys(at.k0 + WARPGROUP_KEYS * g, at.k0 + WARPGROUP_KEYS * (g + 1))",
        "state_of_keys(at.k0, at.k0 + WARPGROUP_KEYS)",
        FEATURES,
    ),
    Fault(
        "backward: masked pairs have a gradient", f"{SM90}/bwd_ds.cuh",
        "if (!UNMASKED && p_slope[i] == 0) x[c] = 0;", ";", HARD,
    ),
    Fault(
        "backward: keys past the length keep NaN", f"{SM90}/bwd_nonfinite.cuh",
        "(nonfinite >> row % 32 & 1) || row >= existing", "(nonfinite >> row % 32 & 1)",
        "tests/emulator/test_kernels.py -k 'lengths_without_a_mask and cupy_raw'",
    ),
    Fault(
        "backward: a slope over one pair too many", f"{SM90}/bwd_affine_score.cuh",
        "(1.0f / (ROWS + KEYS - 2))", "(1.0f / (ROWS + KEYS - 1))", AFFINE,
    ),
    Fault(
        "backward: dropout bits of the neighbour", f"{SM90}/bwd_dropout.cuh",
        "(threadIdx.x % 32 & ~12) | 4 * i) >> part", "(threadIdx.x % 32 & ~12) | 4 * i)",
        "tests/emulator/test_kernels.py -k 'test_modifications and cupy_raw-sm90 and not packed'",
    ),
    Fault(
        "backward: dK of the second chunk goes to the first", f"{SM90}/bwd_epilogue.cuh",
        "at_column(keys.box, 64 * chunk), target)", "at_column(keys.box, 0), target)",
        "tests/emulator/test_kernels.py -k 'wide_heads and cupy_raw-sm90'",
    ),
    Fault(
        "fused preprocess: statistics of the first 64 rows", f"{SM90}/bwd_fused_preprocess.cuh",
        "load_given_stats(p, at.b, at.h, from + thread)", "load_given_stats(p, at.b, at.h, at.tile * BLOCK_Q + thread)",
        "tests/emulator/test_kernels.py -k prepared_late",
    ),
    Fault(
        "cluster: the CTA's own columns twice", f"{SM90}/bwd_kv_source.cuh",
        "64 * DQ_CHUNKS * rank);", "0);", "tests/emulator/test_kernels.py -k 'wide_heads and cupy_raw-sm90'",
    ),
    Fault(
        "cluster: the peer's dS is not awaited", f"{SM90}/bwd_mainloop_cluster.cuh",
        "            pipe_dsmem.consumer_wait(n);\n", "",
        "tests/emulator/test_kernels.py -k 'wide_heads and cupy_raw-sm90'",
    ),
    # float32
    Fault(
        "FP16x2: no product of the low terms of V", f"{SM90}/fp16x2.cuh",
        "term(high, v + LOW_V, false), ", "",
        "tests/emulator/test_kernels.py -k 'float32_on_tensor_cores and cupy_raw-sm90'",
    ),
    Fault(
        "FP16x2: the first length is that of all", f"{SM90}/fp16x2_convert.cu",
        "? at.lengths[b] : at.tokens", "? at.lengths[0] : at.tokens",
        "tests/emulator/test_kernels.py -k 'float32_on_tensor_cores and cupy_raw-sm90'",
    ),
    Fault(
        "FP16x2: deltas have no power", f"{SM90}/fp16x2_backward.cu",
        "p.delta, b, h, row) * reference.power", "p.delta, b, h, row)",
        "tests/emulator/test_kernels.py -k 'float32_on_tensor_cores and cupy_raw-sm90'",
    ),
    Fault(
        "TF32: what one float16 scale does not hold is not found", f"{SM90}/tf32_convert.cu",
        "if (is_wide) *all.fallback = 1;", "", TF32,
    ),
    Fault(
        "TF32: a channel that is too small is not found", f"{SM90}/tf32_convert.cu",
        "is_wide |= tops[c] != 0 && __uint_as_float(tops[c]) * inverse < LEAST;", ";", TF32,
    ),
    Fault(
        "TF32: the other heads of a group have no part in the scale", f"{SM90}/tf32_convert.cu",
        "if (top != 0) atomicMax", "if (top != 0 && at.h % (int)from.group == 0) atomicMax", TF32,
    ),
    Fault(
        "TF32: the first length is that of all", f"{SM90}/tf32_convert.cu",
        "? at.lengths[b] : at.tokens", "? at.lengths[0] : at.tokens", TF32,
    ),
    Fault(
        "TF32: gradients that are not finite ask for nothing", f"{SM90}/tf32_scales.cuh",
        "    ask_for_fallback(p, !(is_finite(x.x) &&", "    ask_for_fallback(p, false && !(is_finite(x.x) &&", TF32,
    ),
    Fault(
        "TF32: dK has the scale of K", f"{SM90}/tf32_scales.cuh",
        "of_dk() const { return of_ds() * q; }", "of_dk() const { return of_ds() * k; }", TF32,
    ),
    Fault(
        "TF32: delta has no scale of dO", f"{SM90}/tf32_scales.cuh",
        "(inverse_of(v) * DP_UNIT) * inverse_of(dout)", "(inverse_of(v) * DP_UNIT)", TF32,
    ),
    Fault(
        "TF32: all work tiles have the first one's scale of scores", f"{SM90}/bwd_mainloop.cuh",
        "head_scales(p, load_word(slot), load_word(slot + 4)).of_scores());",
        "head_scales(p, 0, 0).of_scores());", TF32,
    ),
    Fault(
        "TF32: tiles with rows that see nothing have no scale", f"{SM90}/bwd_softmax.cuh",
        "IS_FLOAT32 ? scale_log2\n", "false ? scale_log2\n", TF32,
    ),
    Fault(
        "TF32: the fallback's kernels always return", f"{SM90}/fp16x2_backward.cu",
        "const __grid_constant__ TensorMap b2) {\n    if (is_skipped(p.fallback)) return;",
        "const __grid_constant__ TensorMap b2) {\n    if (p.fallback != nullptr) return;", TF32,
    ),
    Fault(
        "TF32: keys behind the last are stored", f"{SM90}/bwd_epilogue.cuh",
        "if (key + row < (int)max_n_k(p))", "if (true)", TF32,
    ),
    # packed sequences
    Fault(
        "packed: TMA stores rows behind the end", f"{SM90}/epilogue.cuh",
        "if (IS_PACKED && row0 < n_q && row0 + 64 > n_q) {", "if (false) {", PACKED,
    ),
    Fault(
        "packed: queries without keys get no output", f"{SM90}/tile_scheduler.cuh",
        "            store_without_keys(p, at);\n", "", PACKED,
    ),
    Fault(
        "backward: non-finite rows meet keys that no query sees", f"{SM90}/bwd_producer.cuh",
        " | (CLEARS_ROWS ? TileDesc::NONFINITE_ROWS : 0)", "",
        "tests/emulator/test_kernels.py -k no_query_sees",
    ),
    Fault(
        "packed: a non-finite row of the next sequence", f"{SM90}/bwd_layout.cuh",
        "CLEARS_ROWS = MAY_HIDE || IS_PACKED", "CLEARS_ROWS = MAY_HIDE", NEXT,
    ),
    Fault(
        "packed: rows of the next sequence are taken for finite", f"{SM90}/bwd_preprocess.cuh",
        "return IS_PACKED ? q_token(p, b, row) < p.n_q : row <", "return row <", NEXT,
    ),
    Fault(
        "packed: a sink's row is taken for finite", f"{SM90}/bwd_preprocess.cuh",
        "if (HAS_SINKS || !is_finite(given.lse)", "if (!is_finite(given.lse)", NEXT,
    ),
    Fault(
        "packed: row statistics lie where the sequence's rows do", f"{SM90}/bwd_preprocess.cuh",
        "const long long at = stats_row(p, b, row);", "const long long at = row;", PACKED,
    ),
    Fault(
        "packed: rows of the next sequence are seen", f"{SM90}/bwd_softmax.cuh",
        "(!IS_PACKED || own <= last) && ", "", NEXT,
    ),
    Fault(
        "packed: a tile that reaches into the next sequence is FULL", f"{SM90}/bwd_scheduler_warp.cuh",
        "(k1 > n_k || (IS_PACKED && end > n_q))", "k1 > n_k", NEXT,
    ),
    Fault(
        "packed: TMA stores dK and dV behind the end", f"{SM90}/bwd_epilogue.cuh",
        "left = uniform(seq.n_k()) - key, box", "box", PACKED,
    ),
    Fault(
        "packed: the last keys' dK has eight columns", f"{SM90}/bwd_epilogue.cuh",
        "const int row = i / 8, vec = 8 * chunk + i % 8;", "const int row = i / 8, vec = 8 * chunk;", PACKED,
    ),
    Fault(
        "packed: tiles of a sequence count from the first one's", f"{SM90}/packed_tiles.cuh",
        "lane > 0 ? rest - before_lane : rest", "rest", MANY,
    ),
    Fault(
        "packed: a query tile belongs to the sequence before", f"{SM90}/packed_tiles.cuh",
        "first_tile(cu_seqlens, place, block) <= number;", "first_tile(cu_seqlens, place, block) < number;", GRADIENTS,
    ),
    Fault(
        "packed: dQ without keys is what lies in dq_accum", f"{SM90}/bwd_postprocess.cuh",
        ": seq_info(p, own.b).n_k > 0;", ": true;", "tests/emulator/test_kernels.py -k no_packed_sequence",
    ),
    Fault(
        "packed: dQ of one of two key tiles is stored", f"{SM90}/bwd_scheduler_warp.cuh",
        "states != 0 && n_k <= BLOCK_K)", "states != 0 && n_k <= 2 * BLOCK_K)", GRADIENTS,
    ),
    Fault(
        "packed: dQ that was stored is converted", f"{SM90}/bwd_postprocess.cuh",
        "(STORES_DQ && (flags & DqSemaphore::IS_CONVERTED))", "false", GRADIENTS,
    ),
    Fault(
        "packed: dQ is stored behind the end", f"{SM90}/bwd_epilogue.cuh",
        "        if (first + row < n_q)\n", "", GRADIENTS,
    ),
    Fault(
        "packed: the second half of dQ's rows goes to the first", f"{SM90}/bwd_epilogue.cuh",
        "row0 + (DQ_BY_COLUMNS ? 0 : part * DQ_PART_ROWS)", "row0", GRADIENTS,
    ),
    Fault(
        "packed: key tiles that descend wait as if they ascended", f"{SM90}/bwd_scheduler_warp.cuh",
        "descending ? ceil_div(of.n_k, BLOCK_K) : 0", "0", AWAITED,
    ),
    Fault(
        "packed: a sequence's position has its number of keys", f"{SM90}/seq_slot.cuh",
        "store_word(address + POSITION, (int)of.q_position)", "store_word(address + POSITION, (int)of.n_k)", GRADIENTS,
    ),
    Fault(
        "packed: the first query tile is not prepared where there is no query", f"{SM90}/bwd_preprocess.cuh",
        "at.tile == 0 || exists(p, at)", "exists(p, at)", GRADIENTS,
    ),
    Fault(
        "packed: a list's sequence is the other list's", f"{SM90}/layout.cuh",
        "AT_LIST_SEQS + n % 2 * SeqSlot::BYTES", "AT_LIST_SEQS", MANY,
    ),
    Fault(
        "packed: O has the rows of its buffer's next sequence", f"{SM90}/epilogue.cuh",
        "seq_of(p, b, slot).n_q()", "seq_of(p, b, work_tile_slot(base, 0)).n_q()", MANY,
    ),
    # keys in pages
    Fault(
        "pages: the table is read behind its end", f"{SM90}/producer.cuh",
        "number < last ? number : last", "number", "tests/emulator/test_kernels.py -k 'table_that_ends and sm90'",
    ),
    Fault("pages: boxes begin with their page", f"{SM90}/producer.cuh", "(int)(key - number * p.page),", "0,", PAGED),
    Fault(
        "pages: a lane falls behind", f"{SM90}/producer.cuh", "        __syncwarp();  // a lane that fell", "//", PAGED
    ),
    Fault(
        "pages: V comes from the first tile's pages", f"{SM90}/producer.cuh", "previous = at;",
        "previous = {at.tile, at.head, at.b, at.row, i > 0 ? previous.page : at.page};", PAGED,
    ),
    Fault(
        "pages: the next tile has this one's", f"{SM90}/producer.cuh",
        "looked_up = located(work.list.entry[i + 1]);", "looked_up = at;", PAGED,
    ),
    Fault(
        "pages: a box for each lane", f"{SM90}/producer.cuh",
        "if (row < BLOCK_K)", "if (row < BLOCK_K / 2)", PAGED,
    ),
    Fault(
        "O is not rescaled", f"{SM90}/mainloop.cuh",
        "acc.o[i] *= IS_FLOAT32 ? block.rescale[i / 2 % 2] * terms.change_factor : block.rescale[i / 2 % 2];", ";",
    ),
    Fault("dlse is added", f"{SM90}/bwd_preprocess.cuh", "total - given.dlse", "total + given.dlse"),
)  # fmt: skip
