"""Faults in what the host lays out for CUDA kernels: maps of shared memory, argument blocks, tensor maps."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/cuda -k 'not numba_tensor and not numba_ptx'",
    "tests/emulator/test_host.py -k 'not numba_cuda'",
    "tests/emulator/test_kernels.py -k 'not numba_cuda'",
)
DEVICE = (
    "tests/cuda/test_cuda_bound.py tests/cuda/test_generations.py tests/cuda/test_cuda_kernels.py -m 'not slow'",
    "tests/emulator/test_kernels.py -k 'cupy_raw and (test_features or wide_heads or test_unmasked)'",
    "tests/emulator/test_host.py -k 'cupy_raw and sm90'",
    "tests/cuda/test_cuda_devices.py -k 'cupy_raw and (strides or (head_dims and bfloat16) or on_the_device)'",
)

COMMON, CUPY = "flashkit/backends/cuda_common", "flashkit/backends/cupy_raw"

PAGES = "tests/emulator/test_kernels.py -k 'pages_of and sm90'"
HOPPER = "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-sm90'"
ADDRESSED = "tests/cuda/test_cuda_kernels.py tests/emulator/test_host.py -k 'copy_engine or tma'"

FAULTS = (
    # shared memory
    Fault(
        "sm90: barriers of two stages of K", f"{COMMON}/sm90_launch.py",
        '"K_PIPE", barriers * self.stages', '"K_PIPE", barriers * 2', HOPPER,
    ),
    Fault(
        "sm90: a tile descriptor for all stages", f"{COMMON}/sm90_launch.py",
        '"TILE_DESCS", 4 * self.stages', '"TILE_DESCS", 4', HOPPER,
    ),
    Fault(
        "sm90: outputs of one warp group", f"{COMMON}/sm90_launch.py",
        "8 * self.warpgroups * self.q_buffers", "8 * self.q_buffers", HOPPER,
    ),
    Fault(
        "sm90 backward: log-sum-exps of one stage", f"{COMMON}/sm90_bwd_launch.py",
        '"LSE", self.stages * self.block_q * 4', '"LSE", self.block_q * 4', HOPPER,
    ),
    Fault(
        "sm90 backward: dq_accum without padding", f"{COMMON}/sm90_bwd_launch.py",
        "self.block_q * chunks(spec.head_dim) * 64 * 4", "self.block_q * spec.head_dim * 4",
        "tests/emulator/test_kernels.py -k 'test_affine_scores and sloped and sm90'",
    ),
    Fault(
        "sm80: row states of half the warps", f"{CUPY}/sm80.py",
        "self.block_q * self.warps_k * 32)", "self.block_q * self.warps_k * 16)",
        "tests/emulator/test_kernels.py -k 'test_wide_heads and cupy_raw-sm80'",
    ),
    Fault(
        "sm80: P in the pitch of its columns", f"{CUPY}/sm80.py",
        "self.block_q * (self.block_k * size + 16) * shared_rows", "self.block_q * self.block_k * size * shared_rows",
        "tests/emulator/test_kernels.py -k 'test_wide_heads and cupy_raw-sm80'",
    ),
    # argument blocks
    Fault(
        "CUDA C++ reads lengths of 32 bits", f"{COMMON}/params.py",
        "const bool is_int32 = ", "const bool is_int32 = true || ",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-simt'",
    ),
    # tensor maps
    Fault(
        "TMA addresses rows on 8 bytes", f"{COMMON}/tensor_maps.py",
        "stride * itemsize % _ALIGNMENT", "stride * itemsize % (_ALIGNMENT // 2)", ADDRESSED,
    ),
    Fault(
        "TMA addresses negative strides", f"{COMMON}/tensor_maps.py",
        "(stride <= 0 or ", "(stride == 0 or ", ADDRESSED,
    ),
    Fault(
        "TMA addresses shared heads", f"{COMMON}/tensor_maps.py",
        "(stride <= 0 or ", "(stride < 0 or ", ADDRESSED,
    ),
    Fault(
        "dK and dV have the sizes of queries", f"{COMMON}/tensor_maps.py",
        'if name not in ("k", "v", "dk", "dv"):', 'if name not in ("k", "v"):', HOPPER,
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
        "(tokens, token, rows // pack)", "(tokens, token, rows)", HOPPER,
    ),
    Fault(
        "groups of packed heads overlap", f"{COMMON}/tensor_maps.py",
        "(heads // pack, pack * head, 1)", "(heads // pack, head, 1)", HOPPER,
    ),
    Fault(
        "columns past the head dim are loaded", f"{COMMON}/tensor_maps.py",
        "[u64(dim), ", "[u64(-(-dim // 64) * 64), ",
        "tests/emulator/test_kernels.py -k 'test_affine_scores and sloped and sm90'",
    ),
    Fault(
        "Hopper's V has the columns of K", f"{COMMON}/sm90_launch.py",
        '("v", dim_v, 1, keys)', '("v", dim, 1, keys)', "tests/emulator/test_kernels.py -k wider_than_keys",
    ),
)  # fmt: skip
