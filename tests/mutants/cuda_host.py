"""Faults in the host code of the CUDA backends: arguments, plans, launches, verification, caches."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/cuda -k 'not numba_tensor and not numba_ptx'",
    "tests/emulator/test_host.py -k 'not numba_cuda'",
    "tests/emulator/test_kernels.py -k 'not numba_cuda'",
    "tests/emulator -k 'numba_cuda and (test_host or decode)'",
)
DEVICE = (
    "tests/cuda/test_cuda_bound.py tests/cuda/test_generations.py tests/cuda/test_cuda_kernels.py -m 'not slow'",
    "tests/emulator/test_kernels.py -k 'cupy_raw and (test_features or test_modifications and not packed)'",
    "tests/emulator/test_host.py -k 'not numba_cuda'",
    "tests/cuda/test_cuda_devices.py -k 'cupy_raw and (captured or replayed or graph or kept_call or wrong_binary or "
    "no_keys or bounded or hidden_nan or (same_bits and float16))'",
    "tests/emulator/test_kernels.py -k 'cupy_raw and decode'",
)

COMMON, CUPY, NUMBA = (f"flashkit/backends/{name}" for name in ("cuda_common", "cupy_raw", "numba_cuda"))

OFFSETS = "tests/emulator/test_host.py -k 'offsets_on_the_device or share_a_plan'"
BOUND = "tests/cuda/test_cuda_bound.py tests/emulator/test_host.py -k 'bound or pull_back or captured'"
UPLOADS = "tests/emulator/test_host.py -k other_streams"
STREAMS = "tests/cuda/test_cuda_devices.py -k 'cupy_raw and other_streams'"
BLOCKS = "tests/cuda/test_cuda_bound.py"
SOURCES = "tests/cuda/test_cuda_kernels.py -m 'not slow'"
VECTORS = "tests/emulator/test_host.py -k whole_vectors"
GRADIENTS = "tests/emulator/test_kernels.py -k 'next_sequence'"

FAULTS = (
    # offsets of packed sequences on the device
    Fault(
        "offsets that descend", f"{COMMON}/cu_seqlens.cu",
        "if (other > most[t]) most[t] = other;", "", OFFSETS,
    ),
    Fault(
        "offsets descend after a CTA's threads", f"{COMMON}/cu_seqlens.cu",
        "out[i] = most[t] > before ? most[t] : before;", "out[i] = most[t];", OFFSETS,
    ),
    Fault(
        "the first offset is not 0", f"{COMMON}/cu_seqlens.cu", "i == 0 || i > batch ? 0", "i > batch ? 0", OFFSETS,
    ),
    Fault(
        "offsets beyond 2^63", f"{COMMON}/cu_seqlens.cu", "n >> 63 ? 0x7fffffffffffffff : (long long)n",
        "(long long)n", OFFSETS,
    ),
    Fault(
        "the extra sequence has keys", f"{COMMON}/cu_seqlens.cu", "cu_k[extra + 1] = end", "cu_k[extra + 1] = p.n_k",
        OFFSETS,
    ),
    Fault(
        "lengths beyond the room", f"{COMMON}/cu_seqlens.cu", "within(read(p.keys, b), p.n_k)", "read(p.keys, b)",
        OFFSETS,
    ),
    Fault(
        "gradients behind the last sequence are not cleared", f"{COMMON}/backend.py",
        "        clear_behind(", "        (lambda *_: None)(", GRADIENTS,
    ),
    Fault(
        "gradients behind the last sequence: dK alone", f"{COMMON}/cu_seqlens.py",
        "kernel.launch(2 * heads,", "kernel.launch(heads,", GRADIENTS,
    ),
    Fault(
        "a packed plan takes the offsets of q for k", "flashkit/call/plan_cache.py",
        "self._offsets[1], self._tokens[1])", "self._offsets[0], self._tokens[1])", OFFSETS,
    ),
    Fault(
        "a packed plan takes the default offset", "flashkit/call/plan_cache.py",
        ' if self._follows or name != "q_offset")', ")", OFFSETS,
    ),
    # arguments
    Fault(
        "split decoding: strides of partial outputs", f"{COMMON}/arguments.py",
        "rows * columns, self.n_q * columns, columns]", "rows * columns, columns, columns]", BLOCKS,
    ),
    Fault(
        "split decoding: strides of partial log-sum-exps", f"{COMMON}/arguments.py",
        "rows, self.n_q, 1]", "rows, 1, 1]", BLOCKS,
    ),
    Fault(
        "split decoding: no room for partial log-sum-exps", f"{COMMON}/arguments.py",
        "scratch(numbers * (columns + 1)", "scratch(numbers * columns", BLOCKS,
    ),
    Fault(
        "any scale counts as positive", f"{COMMON}/arguments.py",
        "return self.scale > 1e-30", "return True", BLOCKS,
    ),
    Fault(
        "the first of different offsets is that of all", f"{COMMON}/arguments.py",
        "offset[0]).all()", "offset[0]).any()", BLOCKS,
    ),
    Fault(
        "strides of a modification's arrays are in bytes", f"{COMMON}/arguments.py",
        "*(stride // itemsize for stride in array.strides)", "*array.strides", BLOCKS,
    ),
    Fault(
        "rows on 8 bytes count as aligned", f"{COMMON}/arguments.py",
        "return joined % 16 == 0", "return joined % 8 == 0", VECTORS,
    ),
    Fault(
        "strides of 8 bytes are whole vectors", f"{COMMON}/arguments.py",
        "not any(stride % 8 for", "not any(stride % 4 for", VECTORS,
    ),
    Fault(
        "NumPy arrays are copied in a captured call", f"{COMMON}/arguments.py",
        "if cupy.cuda.get_current_stream().is_capturing():", "if False:",
        "tests/emulator/test_host.py -k numpy_array_in_a_captured",
    ),
    # backend
    Fault(
        "a bound call takes K for V", f"{COMMON}/backend.py",
        "q.data.ptr, k.data.ptr, v.data.ptr", "q.data.ptr, k.data.ptr, k.data.ptr", BLOCKS,
    ),
    Fault(
        "gradients by the dlse of the first call", f"{COMMON}/backend.py",
        "words[_DLSE] = dlse.data.ptr", "pass", BOUND,
    ),
    Fault(
        "gradients by the strides of the first out", f"{COMMON}/backend.py",
        "form = op.out.strides, dout.strides,", "form = 0, dout.strides,", BOUND,
    ),
    Fault(
        "gradients by the layouts of others' grids and maps", f"{COMMON}/arguments.py",
        "        new._known = {}\n", "", BOUND,
    ),
    Fault(
        "gradients with the bias of the first call", f"{COMMON}/backend.py",
        "words[at] = _address(op.arrays[name], layout)", "pass", BOUND,
    ),
    Fault(
        "pull-backs at the same time share a block", f"{COMMON}/backend.py",
        "                arguments = own.copy()\n            words = arguments.words\n            for",
        "                arguments = own\n            words = arguments.words\n            for", BOUND,
    ),
    Fault(
        "gradients of a captured call are freed", f"{COMMON}/backend.py",
        "arguments.alive, operands, gradients)\n    run", "arguments.alive, operands)\n    run", BOUND,
    ),
    Fault(
        "scratch memory is not cleared", f"{COMMON}/memory.py",
        "launch.clear(address + self._zeros, self.bytes - self._zeros, stream)", "pass", BOUND,
    ),
    Fault(
        "scratch tensors overlap", f"{COMMON}/memory.py",
        "self.bytes = offset + size", "self.bytes = offset + size // 2", BOUND,
    ),
    Fault(
        "unaligned rows of a known layout", f"{COMMON}/sm90_bwd_launch.py",
        "if shaped is None or not aligned(arguments, _ADDRESSES):", "if shaped is None:", BOUND,
    ),
    Fault(
        "arrays that share memory count as contiguous", "flashkit/call/arrays.py",
        '"strides": array.strides,', '"strides": None,', "tests/emulator/test_host.py -k shared_memory",
    ),
    Fault(
        "the slowest generation wins", f"{COMMON}/backend.py",
        "best = max(able", "best = min(able", "tests/cuda/test_generations.py",
    ),
    Fault(
        "a bound call trusts the layout of arrays", f"{COMMON}/backend.py",
        "if _layout(array) != layout:", "if False:", BLOCKS,
    ),
    Fault(
        "every tile is tried without a compiler", f"{COMMON}/backend.py",
        "if choice.row is None or str(error) in failed:", "if choice.row is None:", "tests/cuda/test_generations.py",
    ),
    Fault(
        "a generation without a tile is chosen", f"{COMMON}/backend.py",
        "            if choice is not None:\n", "            if True:\n", "tests/cuda/test_generations.py",
    ),
    Fault(
        "new kernels are not verified", f"{COMMON}/backend.py",
        "verify.check(made, self.problem.spec, device, direction)", "pass", "tests/cuda/test_generations.py",
    ),
    # verification, launches, caches
    Fault(
        "one right element verifies a kernel", f"{COMMON}/verify.py",
        "* scale).all():", "* scale).any():", "tests/emulator/test_host.py -k wrong_element",
    ),
    Fault(
        "memory of captured calls is freed", f"{COMMON}/launch.py",
        "_captured.append(memory)", "pass",
        "tests/emulator/test_host.py -k captured",
        "tests/cuda/test_cuda_devices.py -k 'cupy_raw-sm80 and replayed_call_writes'",
    ),
    Fault(
        "a captured launch takes a tile counter of others", f"{COMMON}/tensor_maps.py",
        "if capturing(stream):", "if False:", "tests/emulator/test_host.py -k tile_counter_of_its_own",
    ),
    Fault(
        "grids are checked by their smallest number", f"{COMMON}/launch.py",
        "if max(tiles) > MAX_GRID", "if min(tiles) > MAX_GRID", SOURCES,
    ),
    Fault(
        "48 KiB of shared memory are all", f"{COMMON}/launch.py",
        "if shared > _DEFAULT_SHARED_MEMORY:", "if shared > 2 * _DEFAULT_SHARED_MEMORY:", SOURCES,
    ),
    Fault(
        "ptxas' other remarks are refused", f"{COMMON}/compiler.py",
        '(C75\\d\\d\\).*serialized.*"', '(C75\\d\\d\\).*"', "tests/cuda/test_cuda_kernels.py -k serialised_products",
    ),
    Fault(
        "binaries do not depend on headers", f"{COMMON}/compiler.py",
        "self.text, _included(self), OPTIONS", "self.text, OPTIONS", SOURCES,
    ),
    Fault(
        "an L2 group may be empty", f"{COMMON}/memory.py",
        "limit = max(1, min(heads, limit))", "limit = min(heads, limit)", SOURCES,
    ),
    # passes
    Fault(
        "any group is packed", f"{COMMON}/sm90_launch.py",
        "problem.n_q <= 256 and 64 % group == 0", "problem.n_q <= 256", SOURCES,
    ),
    Fault(
        "no keys: Hopper's kernel runs", f"{COMMON}/sm90_launch.py",
        "return bool(arguments.n_k) and ", "return ", "tests/emulator/test_host.py -k 'no_keys and cupy_raw'",
    ),
    Fault(
        "semaphores of 3,968 keys for all", f"{COMMON}/sm90_bwd_launch.py",
        "1 + cluster * -(-tiles_k // _KEY_TILES_PER_WORD)", "1 + cluster",
        "tests/emulator/test_kernels.py -k 'many_key_tiles and sm90'",
    ),
    Fault(
        "Hopper's gradients of a scale of 0", f"{COMMON}/sm90_bwd_launch.py",
        "arguments.n_k and arguments.positive_scale and ", "arguments.n_k and ",
        "tests/emulator/test_host.py -k not_positive",
    ),
    Fault(
        "sm80: semaphores of 32 key tiles for all", f"{COMMON}/sm80_bwd_launch.py",
        "words = -(-tiles_k // 32)", "words = 1", "tests/emulator/test_kernels.py -k 'many_key_tiles and sm80'",
    ),
    Fault(
        "no block for the last ragged tile of queries", f"{COMMON}/arguments.py",
        "else -(-self.n_q * pack // block)", "else max(1, self.n_q * pack // block)",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-simt'",
    ),
    Fault(
        "no block for the last ragged tile of keys", f"{COMMON}/arguments.py",
        "else -(-self.n_k // block)", "else max(1, self.n_k // block)",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-simt'",
    ),
    # cupy_raw
    Fault(
        "sm80: blocks of one head of a packed group", f"{CUPY}/sm80.py",
        "tiles = arguments.q_tiles(self.tile.block_q, self.pack)", "tiles = arguments.q_tiles(self.tile.block_q)",
        "tests/emulator/test_kernels.py -k packed_heads_that_are_not_aligned",
    ),
    Fault(
        "sm90: dropped weights are not in row sums", f"{CUPY}/sm90.py",
        'spec.dtype != "bfloat16" or spec.dropout:', 'spec.dtype != "bfloat16":',
        "tests/emulator/test_kernels.py -k capped_scores_with_dropout",
    ),
    Fault(
        "sm90: deterministic=True is forgotten", f"{CUPY}/sm90_backward.py",
        "return spec.deterministic or (", "return (",
        "tests/emulator/test_kernels.py -k 'test_features and cupy_raw-sm90'",
        "tests/cuda/test_cuda_devices.py -k 'cupy_raw-sm90 and same_bits and float16'",
    ),
    Fault(
        "sm90: gains of rows take the path of one gain", f"{CUPY}/sm90_backward.py",
        "known.even and known.diagonal", "known.diagonal", SOURCES,
    ),
    Fault(
        "CUDA C++: unused values take no room", f"{CUPY}/modify.py",
        "        at += entries(slot)\n", "            at += entries(slot)\n",
        "tests/emulator/test_kernels.py -k 'test_modifications and cupy_raw-simt and not packed'",
    ),
    # streams
    Fault(
        "a planned call does not wait for what other streams copied", f"{COMMON}/backend.py",
        "            wait_for_uploads(stream)\n            if stream:", "            if stream:", UPLOADS, STREAMS,
    ),
    Fault(
        "a captured call waits for an event of another stream", f"{COMMON}/launch.py",
        "elif capturing(stream):", "elif False:", UPLOADS, STREAMS,
    ),
    # numba_cuda
    Fault(
        "Numba's sm80: dO may lie anywhere", f"{NUMBA}/sm80.py",
        '"v", "dout", "dq"', '"v", "dq"', BLOCKS,
    ),
    Fault(
        "Numba's sm80: the scale may be negative", f"{NUMBA}/sm80.py",
        "arguments.n_k and arguments.positive_scale", "arguments.n_k", BLOCKS,
    ),
)  # fmt: skip
