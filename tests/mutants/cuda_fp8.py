"""Faults in Hopper's forward kernel for codes of e4m3, and in the way to it."""

from __future__ import annotations

from . import Fault

TESTS = ("tests/emulator/test_fp8.py -m 'not slow'", "tests/emulator/test_fp8.py")
DEVICE = ("FLASHKIT_CUDA_WATCHDOG=1 tests/emulator/test_fp8.py",)

SM90, CALL = "flashkit/backends/cupy_raw/kernels/sm90", "flashkit/call"

FAULTS = (
    # P
    Fault("P is rounded as it is", f"{SM90}/fp8_mainloop.cuh", "MAX_P_LOG2 = 8,", "MAX_P_LOG2 = 0,"),
    Fault("P exceeds e4m3", f"{SM90}/fp8_mainloop.cuh", "MAX_P_LOG2 = 8,", "MAX_P_LOG2 = 11,"),
    Fault(
        "keys of P in another order", f"{SM90}/fp8_mainloop.cuh",
        "pack_e4m3(x[0], x[1], x[4], x[5])", "pack_e4m3(x[0], x[4], x[1], x[5])",
    ),
    Fault(
        "rows of P exchanged", f"{SM90}/fp8_mainloop.cuh",
        "s + 8 * (i / 2) + i % 2 * 2;", "s + 8 * (i / 2) + (1 - i % 2) * 2;",
    ),
    Fault("the first number is the high one", f"{SM90}/fp8.cuh", "low, %2, %1;", "low, %1, %2;"),
    # accumulation
    Fault("PV of all tiles in the tensor core's accumulator", f"{SM90}/fp8_mainloop.cuh", "step > 0 ? 1 : 0);", "1);"),
    Fault(
        "tiles are added in the tensor core", f"{SM90}/fp8_mainloop.cuh",
        "            issue_pv_fp8(pv, codes, at_vt(base, n), first);\n"
        "            if (first == 0 && __any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {\n"
        "#pragma unroll\n"
        "                for (int i = 0; i < O_REGS; ++i) o[i] *= rescale[i / 2 % 2];\n"
        "            }\n"
        "            wgmma_wait<0>();\n"
        "            fence_operand(pv), fence_operand(codes);\n"
        "#pragma unroll\n"
        "            for (int i = 0; i < PV_REGS; ++i) o[first / 2 + i] = fmaf(pv[i], "
        "v_scale[i / 2 % 2], o[first / 2 + i]);\n",
        "#pragma unroll\n"
        "            for (int i = 0; i < PV_REGS; ++i) pv[i] = o[first / 2 + i] * "
        "rescale[i / 2 % 2] / v_scale[i / 2 % 2];\n"
        "            wgmma_fence();\n"
        "#pragma unroll\n"
        "            for (int step = 0; step < BLOCK_K / 32; ++step)\n"
        "                wgmma_rs(pv, codes, 4 * step,\n"
        "                         descriptor(at_vt(base, n) + first * CHUNK_ROW) + along_rows(step, COLUMNS), 1);\n"
        "            wgmma_commit();\n"
        "            wgmma_wait<0>();\n"
        "            fence_operand(pv), fence_operand(codes);\n"
        "#pragma unroll\n"
        "            for (int i = 0; i < PV_REGS; ++i) o[first / 2 + i] = pv[i] * v_scale[i / 2 % 2];\n",
    ),
    Fault("O is not rescaled", f"{SM90}/fp8_mainloop.cuh", "o[i] *= rescale[i / 2 % 2];", ";"),
    Fault("columns over 128", f"{SM90}/fp8_mainloop.cuh", "descriptor(vt + first * CHUNK_ROW)", "descriptor(vt)"),
    # the transposition
    Fault("even columns: keys exchanged", f"{SM90}/fp8_transpose.cuh", "0x6420", "0x4620"),
    Fault("odd columns are even ones", f"{SM90}/fp8_transpose.cuh", "0x7531", "0x6420"),
    Fault("lines of a block", f"{SM90}/fp8_transpose.cuh", "own = lane % 8 * 2 + lane / 8 % 2;", "own = lane % 16;"),
    Fault(
        "words of 32 keys", f"{SM90}/fp8_transpose.cuh",
        "(2 * step + lane / 16) ^ (own & 7)", "(2 * step) ^ (own & 7)",
    ),
    Fault("the second chunk of V", f"{SM90}/fp8_transpose.cuh", "v + block / 8 * CHUNK_BYTES", "v"),
    Fault("codes behind the length", f"{SM90}/fp8_transpose.cuh", "if (HAS_LENGTHS && keys < BLOCK_K)", "if (false)"),
    Fault(
        "one key less exists", f"{SM90}/fp8_transpose.cuh",
        "(left > 0 ? 0xffu : 0u)", "(left > 1 ? 0xffu : 0u)",
    ),
    Fault(
        "V^T is read before it is there", f"{SM90}/fp8_mainloop.cuh",
        "        pipe_vt.consumer_wait(n);\n#pragma", "#pragma",
    ),
    Fault("V^T is overwritten", f"{SM90}/fp8_transpose.cuh", "pipe_vt.producer_acquire(n);", ";"),
    Fault("V is overwritten", f"{SM90}/producer.cuh", "pipe_v.producer_acquire(n - 1);", ";"),
    # scales
    Fault("the scale of q", f"{SM90}/fp8_mainloop.cuh", "scale_of(p.q_scale, at.b, h, row) * k_scale;", "k_scale;"),
    Fault(
        "the scale of a head's keys", f"{SM90}/fp8_mainloop.cuh",
        "scale_of(p.q_scale, at.b, h, row) * k_scale;", "scale_of(p.q_scale, at.b, h, row);",
    ),
    Fault(
        "the scale of a head's values", f"{SM90}/fp8_mainloop.cuh",
        "SCALES_PER_TOKEN ? 1.0f : scale_of(p.v_scale", "true ? 1.0f : scale_of(p.v_scale",
    ),
    Fault(
        "scales of tokens: keys", f"{SM90}/fp8_mainloop.cuh",
        "of_keys.store(key_scales), scale_columns(s, key_scales);", ";",
    ),
    Fault(
        "scales of tokens: values", f"{SM90}/fp8_mainloop.cuh",
        "scale_columns(s, key_scales), scale_rows", "scale_rows",
    ),
    Fault(
        "scales of tokens: another column", f"{SM90}/fp8_mainloop.cuh",
        "scales + threadIdx.x % 4 * 8;", "scales + threadIdx.x % 4 * 4;",
    ),
    Fault("rows of P up to 1", f"{SM90}/fp8_mainloop.cuh", "MAX_P = 256;", "MAX_P = 1;"),
    Fault("rows of P have no scale", f"{SM90}/fp8_mainloop.cuh", ", scale_rows(s, v_scale);", ";"),
    Fault(
        "the row's scale is not undone", f"{SM90}/fp8_mainloop.cuh",
        "scale[half] = top * (1 / MAX_P);", "scale[half] = 1 / MAX_P;",
    ),
    Fault(
        "scales of one row for both", f"{SM90}/fp8_mainloop.cuh",
        "fmaf(pv[i], v_scale[i / 2 % 2],", "fmaf(pv[i], v_scale[0],",
    ),
    Fault(
        "scales behind the length", f"{SM90}/fp8_mainloop.cuh",
        "key_inside(k0 + threadIdx.x % 32 + 32 * i, n_k)", "k0 + threadIdx.x % 32 + 32 * i",
    ),
    Fault("a score modification sees codes", f"{SM90}/fp8_mainloop.cuh", "s[i] *= row_scale[i / 2 % 2];", ";"),
    Fault(
        "a negative scale", f"{SM90}/fp8_mainloop.cuh",
        "row_scale[half] >= 0 && row_scale[half] <= MAX_SCALE", "row_scale[half] <= MAX_SCALE",
    ),
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
        "    try:\n        problem = sample_problem(spec)",
        "    if spec.fp8:\n        return\n    try:\n        problem = sample_problem(spec)",
    ),
)  # fmt: skip
