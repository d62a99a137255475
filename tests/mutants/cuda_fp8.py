"""Faults in Hopper's forward kernel for codes of e4m3, and in the way to it."""

from __future__ import annotations

from . import Fault

TESTS = ("tests/emulator/test_fp8.py -m 'not slow'", "tests/emulator/test_fp8.py")
DEVICE = ("tests/emulator/test_fp8.py",)

RAW, CALL = "flashkit/backends/cupy_raw", "flashkit/call"
SM90 = f"{RAW}/kernels/sm90"
MAINLOOP, SOFTMAX, TRANSPOSE = (f"{SM90}/fp8_{name}.cuh" for name in ("mainloop", "softmax", "transpose"))

FAULTS = (
    # P
    Fault("P is rounded as it is", SOFTMAX, "MAX_P_LOG2 = 8;", "MAX_P_LOG2 = 0;"),
    Fault("P exceeds e4m3", SOFTMAX, "MAX_P_LOG2 = 8;", "MAX_P_LOG2 = 11;"),
    Fault(
        "keys of P in another order", SOFTMAX,
        "pack_e4m3(x[0], x[1], x[4], x[5])", "pack_e4m3(x[0], x[4], x[1], x[5])",
    ),
    Fault("rows of P exchanged", SOFTMAX, "s + 8 * (i / 2) + i % 2 * 2;", "s + 8 * (i / 2) + (1 - i % 2) * 2;"),
    Fault("the row sum of the tiles before", SOFTMAX, "fmaf(l[half], rescale[half],", "fmaf(l[half], 1.0f,"),
    Fault("the first number is the high one", f"{SM90}/fp8.cuh", "low, %2, %1;", "low, %1, %2;"),
    # accumulation
    Fault("PV of all tiles in the tensor core's accumulator", MAINLOOP, "step > 0 ? 1 : 0);", "1);"),
    Fault(
        "tiles are added in the tensor core", MAINLOOP,
        "        wgmma_fence();\n"
        "#pragma unroll\n"
        "        for (int step = 0; step < BLOCK_K / 32; ++step)\n"
        "            wgmma_rs(pv, codes, 4 * step, advance(v, along_rows(step, COLUMNS)), step > 0 ? 1 : 0);\n",
        "        for (int i = 0; i < PV_REGS; ++i)\n"
        "            pv[i] = o[first / 2 + i] * rescale[i / 2 % 2], o[first / 2 + i] = 0;\n"
        "        wgmma_fence();\n"
        "#pragma unroll\n"
        "        for (int step = 0; step < BLOCK_K / 32; ++step)\n"
        "            wgmma_rs(pv, codes, 4 * step, advance(v, along_rows(step, COLUMNS)), 1);\n",
    ),
    Fault("O is not rescaled", MAINLOOP, "o[first / 2 + i], pv_rescale[i / 2 % 2],", "o[first / 2 + i], 1.0f,"),
    Fault("columns over 128", MAINLOOP, "descriptor(at_vt(base, n) + first * CHUNK_ROW)", "descriptor(at_vt(base, n))"),
    # work tiles
    Fault("the last tile's product is left out", MAINLOOP, "if (OVERLAPS) add_pv();", ";"),
    Fault("the last P is left out", MAINLOOP, "add_pv(), issue_pv(n - 1), wait_pv(n - 1);", "add_pv();"),
    Fault("the last product is added to the next O", MAINLOOP, "OVERLAPS && i < PV_REGS; ++i) pv[i] = 0;", "false;);"),
    Fault("O begins with that of the work tile before", MAINLOOP, "for (int i = 0; i < O_REGS; ++i) o[i] = 0;", ";"),
    Fault("more registers than a launch gets", f"{RAW}/sm90_fp8.py", "else (224, 32)", "else (232, 32)"),
    # the transposition
    Fault("even columns: keys exchanged", TRANSPOSE, "0x6420", "0x4620"),
    Fault("odd columns are even ones", TRANSPOSE, "second = first ^ 0x1111;", "second = first;"),
    Fault("lines of a block", TRANSPOSE, "own = lane % 8 * 2 + (lane / 8 + lane / 4) % 2;", "own = lane % 16;"),
    Fault("words of 32 keys", TRANSPOSE, "(to ^ 2 * step * VEC_BYTES)", "to"),
    Fault("the second chunk of V", TRANSPOSE, "column + block / 8 * CHUNK_BYTES", "column"),
    Fault("codes behind the length", TRANSPOSE, "if (HAS_LENGTHS && keys < BLOCK_K)", "if (false)"),
    Fault(
        "one key less exists", TRANSPOSE,
        "(left > 0 ? 0xffu : 0u)", "(left > 1 ? 0xffu : 0u)",
    ),
    Fault("V^T is read before it is there", MAINLOOP, "if (first == 0) pipe_vt.consumer_wait(n);", ";"),
    Fault("V^T is overwritten", TRANSPOSE, "pipe_vt.producer_acquire(n);", ";"),
    Fault("V is overwritten", f"{SM90}/producer.cuh", "pipe_v.producer_acquire(n - 1);", ";"),
    # scales
    Fault("the scale of q", MAINLOOP, "scale_of(params.q_scale, at.b, h, row) * k_scale;", "k_scale;"),
    Fault(
        "the scale of a head's keys", MAINLOOP,
        "scale_of(params.q_scale, at.b, h, row) * k_scale;", "scale_of(params.q_scale, at.b, h, row);",
    ),
    Fault("the scale of a head's values", MAINLOOP, "o[i] *= v_scale;", ";"),
    Fault("scales of tokens: keys", MAINLOOP, "if (SCALES_PER_TOKEN) scale_columns(s, key_scales);", ";"),
    Fault("scales of tokens: values", SOFTMAX, "log2_fast(size));", "0.0f);"),
    Fault("scales of tokens: values in the row sum", SOFTMAX, "valid ? reciprocal(size) :", "valid ? 1.0f :"),
    Fault(
        "scales of tokens: another column", SOFTMAX,
        "numbers + threadIdx.x % 4 * 8", "numbers + threadIdx.x % 4 * 4",
    ),
    Fault(
        "scales of tokens: read before they are there", SOFTMAX,
        "named_barrier_sync(WARPGROUP_BARRIER + wg, 128);", ";",
    ),
    Fault("values of zeros", SOFTMAX, "(v >= MIN_V_SCALE || v == MIN_SCALE) &&", "v >= MIN_V_SCALE &&"),
    Fault(
        "scales behind the length", SOFTMAX,
        "key_inside(k0 + threadIdx.x % 128, (int)seq_info(p, at.b).n_k)", "k0 + threadIdx.x % 128",
    ),
    Fault("a score modification sees codes", MAINLOOP, "s[i] *= row_scale[i / 2 % 2];", ";"),
    Fault("a negative scale", MAINLOOP, "scale >= 0 && scale <= MAX_SCALE", "scale <= MAX_SCALE"),
    Fault(
        "rows again: the scale of q and k", f"{SM90}/nonfinite.cuh",
        "if (FP8) s *= q_scale * scale_of", "if (false) s *= q_scale * scale_of",
    ),
    Fault("rows again: the scale of v", f"{SM90}/nonfinite.cuh", "v *= v_scale;", ";"),
    # the host
    Fault(
        "an output of the codes' dtype", f"{CALL}/arguments.py",
        "entries, heads, n_q, dv, own_dtype)", "entries, heads, n_q, dv, q.dtype)",
    ),
    Fault("rotations may differ", f"{CALL}/fp8.py", "if q.seed != k.seed:", "if False:"),
    Fault("a mean is dropped", f"{CALL}/fp8.py", "if x.mean is not None:", "if False:"),
    Fault("scales of tokens are of the head", f"{CALL}/fp8.py", '"head" if per_head else "token"', '"head"'),
    Fault(
        "codes are moved as 16 bits", "flashkit/backends/cuda_common/tensor_maps.py",
        'arguments.spec.operand_dtype if name in ("q", "k", "v") else', "",
    ),
    Fault(
        "rows that TMA cannot address", f"{CALL}/fp8.py",
        "map(_addressable, (operands.q, operands.k, operands.v))", "(operands.q, operands.k, operands.v)",
    ),
    Fault(
        "a fresh kernel is not checked", "flashkit/backends/cuda_common/verify.py",
        "    try:\n        problem = sample_problem(spec,",
        "    if spec.fp8:\n        return\n    try:\n        problem = sample_problem(spec,",
    ),
)  # fmt: skip
