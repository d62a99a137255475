"""Faults in Hopper's kernel for latent attention, and in the way to it."""

from __future__ import annotations

from . import Fault

TESTS = ("tests/emulator/test_mla.py -m 'not slow'", "tests/emulator/test_mla.py -m 'not exhaustive'")
DEVICE = ("tests/emulator/test_mla.py",)

RAW, COMMON = "flashkit/backends/cupy_raw", "flashkit/backends/cuda_common"
SM90, PLAN = f"{RAW}/kernels/sm90", f"{RAW}/sm90_mla.py"
MAINLOOP, EPILOGUE, SCHEDULER, PRODUCER = (
    f"{SM90}/mla_{name}.cuh" for name in ("mainloop", "epilogue", "scheduler", "producer")
)

FAULTS = (
    # products
    Fault("the last part of K is not multiplied", MAINLOOP, "        issue_qk_part<SECOND>(n, q, k);\n", ""),
    Fault("S begins with what its registers held", MAINLOOP, "if (PART == OLDEST_PART && step == FROM)", "if (false)"),
    Fault(
        "warp group 1 multiplies by the first columns", MAINLOOP,
        "at_k(n % STAGES) + first_chunk(WG) * CHUNK_BYTES;", "at_k(n % STAGES);",
    ),
    Fault("V of the other stage", MAINLOOP, "at_k(n % STAGES) + first_chunk", "at_k(1 - n % STAGES) + first_chunk"),
    Fault("V of the first keys", MAINLOOP, "64), v + along_columns(step), 1);", "64), v, 1);"),
    Fault(
        "Q is not awaited", MAINLOOP,
        "            cp_async_wait_all();\n"
        "            fence_proxy_async();\n"
        "            named_barrier_sync(BOTH_WARPGROUPS, CONSUMERS);", "",
    ),
    # softmax
    Fault("O is not rescaled", MAINLOOP, "o[i] *= rescale[i / 2 % 2];", ";", core="rescale"),
    Fault("l is not rescaled", MAINLOOP, "l[0] *= rescale[0], l[1] *= rescale[1];", ";"),
    Fault(
        "the other warp group's row reference is not taken", MAINLOOP,
        "m[half] = __int_as_float(load_word(row_slot(AT_ROW_REF, half)));", ";",
    ),
    Fault("the row reference never follows", MAINLOOP, "top > m[half] + MAX_P_LOG2 ? top", "m[half] == HIDDEN ? top"),
    Fault("rows of P exchanged", MAINLOOP, "swizzled(row + lane % 16,", "swizzled(row + (lane + 8) % 16,"),
    Fault(
        "the row sum of one warp group", MAINLOOP,
        "l[half] = __int_as_float(load_word(row_slot(AT_ROW_SUMS, half))) +\n"
        "                          __int_as_float(load_word(row_slot(AT_ROW_SUMS + 256, half)));", ";",
    ),
    Fault("no tile is masked", MAINLOOP, "(desc & 3) == FULL, s,", "true, s,"),
    Fault("NaN behind the length", MAINLOOP, "if (HAS_LENGTHS && n_k", "if (false && n_k"),
    Fault(
        "keys of the other warp group's tile", MAINLOOP,
        "issue_pv<false>(n, first_key(other_desc));", "issue_pv<false>(n, first_key(desc));",
    ),
    Fault("O begins with that of the unit before", MAINLOOP, "for (int i = 0; i < HALF_REGS; ++i) o[i] = 0;", ";"),
    # Q and O
    Fault("rows of another head", EPILOGUE, "clamped_row(p, b, h, index);", "clamped_row(p, b, h, index ^ 1);"),
    Fault("columns behind the last", EPILOGUE, "index < rows && vec * 8 < HEAD_DIM;", "index < rows;"),
    Fault("rows behind the last", EPILOGUE, "const bool exists = index < rows;", "const bool exists = true;"),
    Fault("lanes exchange the wrong columns", EPILOGUE, "t % 2 ? first : second, 1)", "t % 2 ? second : first, 1)"),
    Fault(
        "the log-sum-exp in base 2", EPILOGUE,
        "else *q_row<float>(p, p.lse, at.b, h, row) = LN2 * lse[half];",
        "else *q_row<float>(p, p.lse, at.b, h, row) = lse[half];", core="lse",
    ),
    Fault("sinks in each split", EPILOGUE, "HAS_SINKS && exists && !is_split", "HAS_SINKS && exists"),
    Fault("a masked NaN stays", EPILOGUE, "if (MAY_HIDE && nonfinite != 0)", "if (false)"),
    Fault("the fallback takes the keys of all splits", EPILOGUE, "first = range.first * BLOCK_K,", "first = 0,"),
    Fault(
        "the fallback stores columns of warp group 0", EPILOGUE,
        "            const int column = WG * HALF_COLUMNS + lane + 32 * i;\n            if (column",
        "            const int column = lane + 32 * i;\n            if (column",
    ),
    # units
    Fault("a split has one tile less", SCHEDULER, "< all ? first + each : all)", "< all ? first + each - 1 : all)"),
    Fault("tiles are not rounded up", SCHEDULER, "all = (n_k + BLOCK_K - 1) / BLOCK_K", "all = n_k / BLOCK_K"),
    Fault("a split without keys", SCHEDULER, "unit.split * p.batch + at.b, h, row) = HIDDEN", "at.b, h, row) = 0.0f"),
    Fault("sequences without keys", SCHEDULER, "            store_unit_without_keys(p, unit);\n", ""),
    Fault("the mask of the first head", SCHEDULER, "tile_state_of_rows<MASK_OF_HEADS>", "tile_state_of_rows<false>"),
    Fault("the only tile of rows without keys", SCHEDULER, "(tiles - 1) << 8 | PARTIAL;", "(tiles - 1) << 8 | FULL;"),
    Fault(
        "columns of a box", PRODUCER, "tma_load<1>(chunk, k_map, at_column(box, 64 * c)",
        "tma_load<1>(chunk, k_map, at_column(box, 64 * (c - FROM))",
    ),
    Fault("rows of a page's boxes", PRODUCER, "Box{0, at.row, at.head, page}, row", "Box{0, 0, at.head, page}, row"),
    # clusters
    Fault(
        "columns of a box for both CTAs", PRODUCER, "tma_load_multicast(chunk, k_map, at_column(box, 64 * c)",
        "tma_load_multicast(chunk, k_map, at_column(box, 64 * (c - FROM))",
    ),
    Fault(
        "a stage is freed in its own CTA alone", MAINLOOP,
        "if constexpr (CLUSTER_SIZE > 1) dsmem_arrive(mapa(pipe.empty_barrier(n), peer_rank()), threadIdx.x % 32);", "",
    ),
    Fault(
        "a stage is free when one CTA has read it", f"{SM90}/mla_forward.cu", "init(1, 4 * CLUSTER_SIZE)", "init(1, 4)",
    ),
    Fault(
        "tile states of a CTA's own rows", SCHEDULER, "constexpr int GROUP_ROWS = CLUSTER_SIZE * BLOCK_Q;",
        "constexpr int GROUP_ROWS = BLOCK_Q;",
    ),
    Fault(
        "the second CTA takes another unit", SCHEDULER, "dsmem_store(mapa(word, 1), claim,",
        "dsmem_store(mapa(word, 1), claim + 1,",
    ),
    Fault("a claim is not awaited by the first CTA", SCHEDULER, "            pipe.producer_acquire_backoff(n);\n", ""),
    Fault("neighbours have the same rows", SCHEDULER, "tile += cluster_ctarank();", ";"),
    # the host
    Fault("v need not be k", PLAN, 'views = words[AT["k"]] == words[AT["v"]]', "views = True"),
    Fault("any scale", PLAN, " and arguments.positive_scale", ""),
    Fault("any strides", PLAN, ' and strides_fit(arguments, ("q", "k", "out"))', ""),
    Fault("packed sequences", PLAN, 'return supports_packed(spec, "latent")', "return Verdict(True)"),
    Fault("dropout", PLAN, "if spec.dropout:", "if False:"),
    Fault("too many columns of k", PLAN, "MAX_DIM, MAX_DIM_V = 576, 512", "MAX_DIM, MAX_DIM_V = 584, 512"),
    Fault(
        "the sample's v is no view", f"{COMMON}/verify.py",
        'if getattr(made, "values_in_keys", False):\n            v =', "if False:\n            v =",
    ),
)  # fmt: skip
