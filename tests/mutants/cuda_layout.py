"""Faults in what the host lays out for CUDA kernels: maps of shared memory, argument blocks, tensor maps."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/cuda -k 'not numba_tensor and not numba_ptx'",
    "tests/emulator/test_host.py -k 'not numba_cuda'",
    "tests/emulator/test_kernels.py -k 'not numba_cuda'",
)
DEVICE = (
    "tests/emulator/test_host.py -k 'not numba_cuda'",
    "tests/emulator/test_kernels.py -k 'sm90 and not numba_cuda'",
    "tests/emulator/test_kernels.py -k '(simt or sm80 or numbers) and not numba_cuda'",
    "tests/cuda/test_cuda_devices.py -k 'cupy_raw and (strides or (head_dims and bfloat16) or on_the_device)'",
)

COMMON, CUPY = "flashkit/backends/cuda_common", "flashkit/backends/cupy_raw"

PAGES = "tests/emulator/test_kernels.py -k pages_of"

FAULTS = (
    # shared memory
    Fault(
        "sm90: barriers of two stages of K", f"{COMMON}/sm90_launch.py",
        '"K_PIPE", barriers * self.stages', '"K_PIPE", barriers * 2',
    ),
    Fault(
        "sm90: room for one list", f"{COMMON}/sm90_launch.py",
        "NUM_LISTS * (LIST_HEADER + 4 * LIST_CAPACITY)", "LIST_HEADER + 4 * LIST_CAPACITY",
    ),
    Fault(
        "sm90: outputs of one warp group", f"{COMMON}/sm90_launch.py",
        "8 * self.warpgroups * self.q_buffers", "8 * self.q_buffers",
    ),
    Fault(
        "sm90 backward: log-sum-exps of one stage", f"{COMMON}/sm90_bwd_launch.py",
        '"LSE", self.stages * self.block_q * 4', '"LSE", self.block_q * 4',
    ),
    Fault(
        "sm90 backward: dq_accum without padding", f"{COMMON}/sm90_bwd_launch.py",
        "self.block_q * chunks(spec.head_dim) * 64 * 4", "self.block_q * spec.head_dim * 4",
    ),
    Fault(
        "sm80: row states of half the warps", f"{CUPY}/sm80.py",
        "self.block_q * self.warps_k * 32)", "self.block_q * self.warps_k * 16)",
    ),
    Fault(
        "sm80: P in the pitch of its columns", f"{CUPY}/sm80.py",
        "self.block_q * (self.block_k * size + 16) * shared_rows", "self.block_q * self.block_k * size * shared_rows",
    ),
    # argument blocks
    Fault("CUDA C++ reads lengths of 32 bits", f"{COMMON}/params.py", "const bool is_int32 = ", "const bool is_int32 = true || "),
    # tensor maps
    Fault(
        "TMA addresses rows on 8 bytes", f"{COMMON}/tensor_maps.py",
        "stride * itemsize % _ALIGNMENT", "stride * itemsize % (_ALIGNMENT // 2)",
    ),
    Fault("TMA addresses negative strides", f"{COMMON}/tensor_maps.py", "(stride <= 0 or ", "(stride == 0 or "),
    Fault("TMA addresses shared heads", f"{COMMON}/tensor_maps.py", "(stride <= 0 or ", "(stride < 0 or "),
    Fault(
        "dK and dV have the sizes of queries", f"{COMMON}/tensor_maps.py",
        'if name not in ("k", "v", "dk", "dv"):', 'if name not in ("k", "v"):',
    ),
    Fault(
        "pages are as many as batch entries", f"{COMMON}/tensor_maps.py",
        "return arguments.words[AT[\"pages\"]], ", "return arguments.entries, ", PAGES,
    ),
    Fault(
        "boxes are as long as a page", f"{COMMON}/sm90_launch.py",
        "return (page | block_k) & -(page | block_k)", "return min(page, block_k)", PAGES,
    ),
    Fault(
        "pages of any rows are boxes", f"{COMMON}/sm90_launch.py",
        "% SWIZZLE_ROWS == 0", "% 1 == 0", PAGES,
    ),
    Fault(
        "a box of packed rows is as long as one of a head", f"{COMMON}/tensor_maps.py",
        "(tokens, token, rows // pack)", "(tokens, token, rows)",
    ),
    Fault(
        "groups of packed heads overlap", f"{COMMON}/tensor_maps.py",
        "(heads // pack, pack * head, 1)", "(heads // pack, head, 1)",
    ),
    Fault(
        "columns past the head dim are loaded", f"{COMMON}/tensor_maps.py",
        "[u64(dim), ", "[u64(-(-dim // 64) * 64), ",
    ),
    Fault(
        "Hopper's V has the columns of K", f"{COMMON}/sm90_launch.py",
        '("v", dim_v, 1, keys)', '("v", dim, 1, keys)',
    ),
)  # fmt: skip
