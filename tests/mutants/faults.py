"""The faults, by the tests that find them."""

from itertools import starmap

from . import Fault

EMULATED, FP8, MLA = "tests/emulator/test_kernels.py", "tests/emulator/test_fp8.py", "tests/emulator/test_mla.py"
STEPS, DECODE, EDGES = (f"tests/conformance/test_{name}.py" for name in ("steps", "decode", "edges"))
PAIRS, SAFETY = "tests/unit/test_cpu_bf16_pairs.py", "tests/unit/test_memory_safety_calls.py"
CPU, COMMON, NUMBA = (f"backends.{name}" for name in ("cpu", "cuda_common", "numba_cuda.kernels"))

ROWS: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    # the definition, expressions, masks
    "tests/unit/test_reference.py": (
        ("scale", "reference.steps:scores", "matmul(q, k.T) * scale", "matmul(q, k.T)"),
        ("sink", "reference.steps:softmax", "row_sum(e) + np.exp(sink - finite(m))", "row_sum(e)"),
        ("rescale", "reference.steps:online_softmax", "rescale * l + row_sum(p)", "l + row_sum(p)"),
        ("rescale", "reference.steps:accumulate", "o_acc * rescale[:, None]", "o_acc"),
        ("gradient", "reference.steps:tile_gradients", "p * (dp - delta[:, None])", "p * dp"),
        (
            "heads", "reference.definition:standard_gradients", 'head.memory["dk"][...] += dk',
            'head.memory["dk"][...] = dk',
        ),
        ("offset", "reference.heads:tile_states", "row1 + head.offset", "row1"),
    ),
    "tests/unit/test_mods.py tests/unit/test_expr.py tests/unit/test_dropout.py": (
        ("mask edge", "mods.library:_window", "q - left <= k", "q - left < k"),
        ("mask edge", "mods.library:_causal", "k <= q", "k < q"),
        ("score", "mods.library:_alibi", "abs(q - k)", "(q - k)"),
        ("dropout", "mods.dropout:keep", "(k // 4, row + first_row, h + first_head, b)",
         "(k // 4, row + first_row, b, h + first_head)"),
        ("bounds", "mods.expr.interval_rules:mul", "hull([x * y for x in _ends(a) for y in _ends(b)])",
         "hull([a[0] * b[0], a[1] * b[1]])"),
        ("keys of plans", "mods.expr.graph:key", 'f"{node.op}[{node.value}:{node.kind}]"',
         'f"{node.op}[{node.value}]"'),
    ),
    "tests/unit/test_block_mask.py": (
        ("mask edge", "mods.block_mask:BlockMask.from_mod", "n_k - n_q", "0"),
    ),
    # what a call checks
    "tests/unit/test_bad_input.py -k lengths": (
        ("lengths", "call.sequences:_counts", "counts.view(np.uint64).max() > most", "counts.max() > most"),
    ),
    "tests/unit/test_numbers.py -k 'wrap or arrays'": (
        ("bounds", "call.sequences:offsets_of",
         "offsets[0] != 0 or offsets[-1] > tokens or (offsets[1:] < offsets[:-1]).any()",
         "offsets[0] != 0 or offsets[-1] > tokens or (np.diff(offsets) < 0).any()"),
        ("bounds", "call.sequences:integers_of", "array.itemsize == 8", "array.dtype == np.uint64"),
    ),
    f"{SAFETY} -k exchanged_values": (("bounds", "call.compose:check_indices", "high >= n", "high > n"),),
    f"{SAFETY} -k integers": (
        ("bounds", "mods.mod:Mod.snapshot", 'whole or kind == "int" or (kind == "bool" and name in indexing)', "whole"),
    ),
    f"{SAFETY} -k bound_lengths": (
        ("lengths", f"{CPU}.seq_info:keys_of", "min(max(integer_at(args[KV_LENGTHS] + 8 * b), 0), args[N_K])",
         "max(integer_at(args[KV_LENGTHS] + 8 * b), 0)"),
    ),
    f"{EDGES} -k formulas": (
        ("score", "call.compose:_compose_graphs", "renamed[: len(scores)]", "renamed[: len(scores)][::-1]"),
    ),
    "tests/unit/test_merge.py": (
        ("splits", "call.merge:", "term[lse == -math.inf] = 0", "pass"),
    ),
    # the CPU
    STEPS: (
        ("rescale", f"{CPU}.micro.softmax:online_softmax",
         "memory.store(b.fmul(memory.load(b.add(at, offset)), factor), b.add(at, offset))", "pass"),
        ("rescale", f"{CPU}.micro.softmax:online_softmax",
         "memory.store(b.fmul(memory.load(b.add(l, offset)), factor), b.add(l, offset))", "pass"),
        ("ragged tile", f"{CPU}.kernels.forward:forward_work_tile", "(seq.n_k + block_k - 1) // block_k",
         "seq.n_k // block_k"),
        ("heads", f"{CPU}.kernels.forward:forward_work_tile", "h // args[GROUP]", "h % (args[HEADS] // args[GROUP])"),
        ("lse", f"{CPU}.kernels.forward:epilogue", "row_max + np.log(row_sum)", "row_max - np.log(row_sum)"),
        ("sink", f"{CPU}.kernels.forward:epilogue", "row_sum * rescale", "row_sum"),
        ("gradient", f"{CPU}.kernels.backward:bwd_preprocess",
         "total -= q_stats(args, DLSE, seq, b, h, first, count)[i]",
         "total += q_stats(args, DLSE, seq, b, h, first, count)[i]"),
        ("ragged tile", f"{CPU}.kernels.backward:backward_key_tile", "(n_q + block_q - 1) // block_q",
         "n_q // block_q"),
        ("gradient", f"{CPU}.kernels.operands:accumulate_gradients", "_gemm_add(args, p.T, do, dv, nonfinite)",
         "_gemm_add(args, (-p).T, do, dv, nonfinite)"),
        ("splits", f"{CPU}.kernels.backward:bwd_postprocess", "total[i] += of_split[i]", "total[i] -= of_split[i]"),
        ("offset", f"{CPU}.seq_info:seq_info", "integer_at(args[Q_OFFSETS] + 8 * b)", "integer_at(args[Q_OFFSETS])"),
        ("lengths", f"{CPU}.passes:bind_backward", "to.dk[entry, :, end:], to.dv[entry, :, end:] = 0, 0",
         "pass"),
        ("sink", f"{CPU}.passes:bind_backward", "weight * delta", "-weight * delta"),
        ("mask edge", f"{CPU}.tiling:tile_state", "k1 - 1", "k1 - 2"),
    ),
    "tests/unit/test_cpu_kernels.py": (
        ("ragged tile", f"{CPU}.micro.gemm:emit_gemm", "memory.tail_mask(b.sub(n, j))", "None"),
        ("scale", f"{CPU}.micro.softmax:emit_softmax_backward", "b.fmul(b.fmul(p, b.fsub(dp_ij, delta_i)), scale)",
         "b.fmul(p, b.fsub(dp_ij, delta_i))"),
    ),
    PAIRS: (
        ("scale", f"{CPU}.argument_block:ArgumentBlock._set_scales", "abs(scale)", "scale"),
        ("lse", f"{CPU}.kernels.forward:epilogue", "m[i] * scale", "m[i]"),
    ),
    DECODE: (
        ("splits", f"{CPU}.kernels.decode:epilogue", "exp_below(m[row] - m_safe) / row_sum", "1 / row_sum"),
        ("lengths", f"{CPU}.kernels.decode:decode_split", "min(following * block_k, stop)", "following * block_k"),
        ("rescale", f"{CPU}.micro.gemv:_emit_pv", "b.fmul(memory.load(at, mask), scale)", "memory.load(at, mask)"),
    ),
    f"{EDGES} -k 'cpu and (poison or nan or weight)'": (
        ("non-finite", f"{CPU}.kernels.forward:forward", "range(2)", "range(1)"),
    ),
    # caches, pages, codes of 8 bits, latent keys
    "tests/unit/test_kv_cache.py tests/unit/test_rotary.py": (
        ("pages", "cache.pages:PageTable._extended", "references[page] > 1", "False"),
        ("pages", "cache.steps:Steps.copy_pages", "pool[:, copy.target] = pool[:, copy.source]", "pass"),
        ("lengths", "cache.pages:PageTable._resized", "self.lengths.copy()", "self.lengths"),
        ("offset", f"{CPU}.kernels.rotary:rotary", "where[b * tokens + n]", "where[n]"),
        ("bounds", f"{CPU}.kernels.rotary:rotary", "slot >= a[SLOTS]", "slot > a[SLOTS]"),
    ),
    "tests/unit/test_cascade.py": (
        ("lengths", "cache.step_plans:Rest.__init__", "self.lengths[at] -= tokens", "pass"),
    ),
    "tests/unit/test_quantised_cache.py -k dense_arrays": (
        ("quantised", f"{CPU}.kernels.decode:scores_of", "s[i, done + j] *= scale[j] * KV_UNIT", "pass"),
    ),
    "tests/conformance/test_latent.py -k 'test_mla and float32 and decoding and apart'": (
        ("latent", f"{CPU}.kernels.decode:scores", "s[i, j] += s_pe[i, j]", "s[i, j] = s_pe[i, j]"),
    ),
    # CUDA: the host
    "tests/cuda/test_cuda_bound.py": (
        ("keys of plans", f"{COMMON}.backend:_address", "_layout(array) != layout", "False"),
        ("gradient", f"{COMMON}.backend:CudaBackend.bind_backward", "words[_DLSE] = to.dlse.data.ptr", "pass"),
        ("offset", f"{COMMON}.arguments:Arguments.__init__", "(offset == offset[0]).all()",
         "(offset == offset[0]).any()"),
        ("memory", f"{COMMON}.memory:Workspace.memory", "offset + size", "offset + size // 2"),
    ),
    "tests/emulator/test_host.py -k captured": (
        ("memory", f"{COMMON}.launch:keep", "_captured.append(memory)", "pass"),
    ),
    # CUDA: kernels
    f"{EMULATED} -k 'test_features and cupy_raw-simt'": (
        ("ragged tile", f"{COMMON}.arguments:Arguments.q_tiles", "-(-self.n_q * pack // block)",
         "max(1, self.n_q * pack // block)"),
        ("sink", "simt/forward.cu", "factor[i] = softmax_exp2((old_max - row_max) * LOG2E);", ""),
    ),
    f"{EMULATED} -k 'test_modifications and cupy_raw-simt and not packed'": (
        ("score", "simt/backward.cu", "if constexpr (HAS_SCORE) ds *= slope[i][j];", ""),
    ),
    f"{EMULATED} -k 'test_features and cupy_raw-sm80'": (
        ("rescale", "sm80/softmax.cuh", "o[i][n][e] *= rescale[e / 2];", ";"),
        ("ragged tile", "sm80/softmax.cuh", "? at.n_k : 0;", "? at.n_k + 1 : 0;"),
        ("gradient", "common/bwd_preprocess.cu", "sum -= *q_row<const fk_float>(p, p.dlse",
         "sum += *q_row<const fk_float>(p, p.dlse"),
        ("order", "sm80/backward.cu", "semaphore_wait(semaphore, bits, add_after, add_end);", ";"),
    ),
    f"{EMULATED} -k 'test_features and cupy_raw-sm90'": (
        ("rescale", "sm90/mainloop.cuh", "acc.o[i] *= IS_FLOAT32 ? block.rescale[i / 2 % 2] * terms.change_factor : "
         "block.rescale[i / 2 % 2];", ";"),
        ("mask edge", "sm90/softmax.cuh", "if (PARTIAL_TILE && HAS_MASK && n_k - k0 < BLOCK_K)", "if (false)"),
        ("sink", "common/fragment.cuh", "factor = exp2_fast(before - reference);", ";"),
        ("heads", "sm90/layout.cuh", "n_q * PACK_GQA - 1, index", "n_q - 1, index"),
        ("gradient", "sm90/bwd_preprocess.cuh", "total - given.dlse", "total + given.dlse"),
        ("ragged tile", "sm90/bwd_producer.cuh",
         "return state == FULL && (k1 > n_k || (IS_PACKED && end > n_q)) ? (int)PARTIAL : state;", "return state;"),
    ),
    f"{EMULATED} -k 'test_packed_sequences and cupy_raw and (sm80 or simt)'": (
        ("packed", "common/params.cuh", "return IS_PACKED ? seq_info(p, b).n_k : p.n_k;", "return p.n_k;"),
    ),
    f"{EMULATED} -k 'test_packed_sequences and sm90 and not numba_cuda and not many_keys'": (
        ("packed", "sm90/epilogue.cuh", "if (IS_PACKED && row0 < n_q && row0 + 64 > n_q) {", "if (false) {"),
    ),
    f"{EMULATED} -k '(keys_in_pages and not queries) and cupy_raw'": (
        ("pages", "common/params.cuh", "p.page_table[b * p.table_width + at]", "p.page_table[at]"),
    ),
    f"{MLA} -k test_many_splits": (
        ("splits", "sm80/combine.cuh", "if (split > last) break;", "if (split >= last) break;"),
    ),
    f"{MLA} -m 'not slow'": (
        ("latent", "sm90/mla_mainloop.cuh", "o[i] *= rescale[i / 2 % 2];", ";"),
    ),
    f"{FP8} -m 'not slow'": (
        ("quantised", "sm90/fp8_mainloop.cuh", "valid_scale(row_scale[half] * k_scale);",
         "valid_scale(row_scale[half]);"),
    ),
    f"{EMULATED} -k 'test_features and numba_cuda-simt'": (
        ("rescale", f"{NUMBA}.simt.forward:online_softmax", "l[i] * rescale + row_sum", "l[i] + row_sum"),
        ("heads", f"{NUMBA}.common.tiles:row_address",
         "tensor.data + (b * tensor.batch + h * tensor.head + n * tensor.token) * ITEMSIZE",
         "tensor.data + (b * tensor.batch + h * tensor.token + n * tensor.head) * ITEMSIZE"),
    ),
    f"{EMULATED} -k 'test_features and numba_cuda-sm80'": (
        ("ragged tile", f"{NUMBA}.sm80.forward:sm80_forward", "walk.state == FULL and k0 + BLOCK_K <= n_k",
         "walk.state == FULL"),
    ),
    f"{EMULATED} -k 'test_features and numba_cuda-sm90'": (
        ("sink", f"{NUMBA}.common.epilogue:with_sink", "greater(top, sink)", "top"),
    ),
}  # fmt: skip

FAULTS = tuple(starmap(Fault, [(*row, tests) for tests, rows in ROWS.items() for row in rows]))
