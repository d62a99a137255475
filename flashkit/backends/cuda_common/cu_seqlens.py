"""Packed sequences whose offsets are on the device: the kernels of cu_seqlens.cu."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from . import compiler, device, launch
from .arguments import on_device

_THREADS = 256  # of a CTA, as in cu_seqlens.cu


class CuSeqlens(NamedTuple):
    """int64 on the device; the last sequence is the queries behind the caller's, which have no keys."""

    q: Any  # (B + 2,) where each sequence begins in the rows of q
    k: Any  # likewise in those of k; of no use where the lengths of the keys were given
    lengths: Any  # (B + 1,) keys
    positions: Any  # (B + 1,) of the first query: the last one stands at the last key


def derive(cu_q: Any, n_q: int, keys: Any, n_k: int, keys_are_lengths: bool = False) -> CuSeqlens:
    """The sequences of a call, without a synchronisation. ValueError if an array lies on another device than the
    current one, or on the host while a CUDA graph captures the call.

    cu_q: (B + 1,), where sequences begin in the n_q rows of q. keys: (B + 1,), where they begin in the n_k rows of k;
    or (B,), how many keys each has, in room for n_k. At least one of the arrays lies on the device.
    """
    on = device.current()
    offsets = [_signed(on_device(x)) for x in (cu_q, keys)]
    for x in offsets:
        if x.data.device_id != on.ordinal:
            raise ValueError(
                f"cu_seqlens: expected an array on q's CUDA device, {on.ordinal}, got one on device {x.data.device_id}"
            )
    batch, stream = len(cu_q) - 1, launch.stream()
    room = batch + 2
    memory = launch.scratch((4 * room,), "int64")
    words = [word for x in offsets for word in (x.data.ptr, x.strides[0], x.dtype.itemsize)]
    arguments = launch.KernelArguments([*words, memory.data.ptr, batch, n_q, n_k, int(keys_are_lengths)])
    _kernel("derive_cu_seqlens", on.ordinal).launch(1, _THREADS, arguments, stream)
    launch.keep(stream, offsets)
    parts = [memory[i * room : (i + 1) * room] for i in range(4)]
    return CuSeqlens(parts[0], parts[1], parts[2][:-1], parts[3][:-1])


def clear_behind(cu_k: Any, dk: Any, dv: Any, stream: int) -> None:
    """Enqueue zeros in the rows of dk and dv, (1, H, N, D), behind the last of the keys that cu_k names."""
    (_, heads, rows, dim), dim_v, itemsize = dk.shape, dv.shape[3], dk.dtype.itemsize
    end = cu_k.data.ptr + cu_k.nbytes - cu_k.itemsize
    words = dk.data.ptr, dv.data.ptr, end, rows, dim * itemsize, dim_v * itemsize
    if heads:
        kernel = _kernel("clear_behind", dk.data.device_id)
        kernel.launch(2 * heads, _THREADS, launch.KernelArguments(words), stream)


def _signed(x: Any) -> Any:
    """As integers of 4 or 8 bytes with a sign, which the kernel reads."""
    x = x.clip(None, 2**63 - 1) if x.dtype == "uint64" else x
    return x if x.dtype in ("int32", "int64") else x.astype("int64")


@cache
def _kernel(name: str, ordinal: int) -> launch.Kernel:
    """It stays loaded, as a CUDA graph may have captured a launch."""
    on = device.of(ordinal)
    source = compiler.Source("cu_seqlens", Path(__file__).with_name("cu_seqlens.cu").read_text())
    return launch.Library(compiler.binary(source, compiler.target(on.capability))).kernel(name, on)
