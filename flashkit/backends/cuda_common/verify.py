"""A freshly compiled kernel is checked once before use, because compilers have miscompiled such kernels.

It computes a small problem of the same spec, which is compared with the definition in NumPy. The cache records that a
binary passed, so each binary is checked once on a machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ...spec import (
    BLOCK,
    AttentionSpec,
    Direction,
    Gradients,
    Operands,
    Slot,
    Stats,
    Tangents,
    dtype_of,
    transposed_codes,
)
from .arguments import Arguments
from .device import Device

ROWS, KEYS = 150, 200
"""Sizes of the sample problem: more than one tile of any kernel in both directions, and no multiple of a tile."""

PAGE = 40
"""Keys of a page of the sample problem: a part of KEYS, and no multiple of a tile. Eight divide it, as TMA needs."""

TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "float16": 2e-2, "bfloat16": 1e-1, "tf32": 4e-3, "fp8": 1e-1}
"""Largest error, relative to the largest result: a right kernel is far below, a wrong one far above."""

_VALUES = {"bool": True, "int": 1, "float": 0.0625}
_EXTENT = 1024  # length of each axis of a modification's arrays


class MiscompiledError(RuntimeError):
    """A freshly compiled kernel gave wrong results, so it is not used."""


def check(compiled: Any, spec: AttentionSpec, device: Device, direction: Direction) -> None:
    """Check the kernels of a pass that no process has checked before; MiscompiledError if a result is wrong."""
    unchecked = [library.binary for library in compiled.libraries if not library.binary.checked]
    if not unchecked:
        return
    try:
        problem = sample_problem(spec, compiled.values_in_keys)
        expected = _expected(spec, problem, direction)
    except (IndexError, ValueError):
        return  # the modification indexes arrays in ways that the sample problem does not support
    greatest = {name: float(np.abs(x[np.isfinite(x)]).max(initial=1e-3)) for name, x in expected.items()}
    for name, right, got in zip(expected, expected.values(), _computed(compiled, spec, problem, direction)):
        is_sum = name in [slot.name for slot in spec.sums]
        scale = max(greatest.values()) if is_sum else greatest[name]  # sums by values may cancel
        with np.errstate(invalid="ignore"):
            same = (got == right) | (np.isnan(got) & np.isnan(right))
            difference = np.where(same, 0, np.where(np.isfinite(right) & np.isfinite(got), np.abs(got - right), np.inf))
        precision = "tf32" if (spec.dtype, spec.precision) == ("float32", "tf32") else spec.dtype
        if spec.fp8 and name == "out":  # weights are rounded to three bits
            precision = "fp8"
        if not (difference <= TOLERANCE[precision] * scale).all():
            raise MiscompiledError(
                f"{name} of the freshly compiled {direction} pass {compiled.tile} for {spec} on {device.name} is off "
                f"by {difference.max():.3g} of {scale:.3g}; binaries: {', '.join(b.name for b in unchecked)}"
            )
    for binary in unchecked:
        binary.mark_checked()


def sample_problem(spec: AttentionSpec, values_in_keys: bool = False) -> Operands:
    """NumPy operands of a small problem, modified by equal values. values_in_keys: v is a view of k."""
    rng = np.random.default_rng(0)
    dtype = dtype_of(spec.dtype)

    def random(heads: int, tokens: int, dim: int) -> np.ndarray:
        return rng.standard_normal((1, heads, tokens, dim)).astype(dtype)

    keys, rows = np.array([KEYS - 7 if spec.kv_lengths else KEYS]), np.array([ROWS])
    cu_seqlens: tuple[Any, Any] | None = None
    if spec.packed:
        cu_seqlens = np.array([0, 60, ROWS - 7, ROWS]), np.array([0, 100, KEYS - 7, KEYS - 7])
        rows, keys = map(np.diff, cu_seqlens)
    page = PAGE if PAGE % spec.page_run == 0 else spec.page_run
    room = -(-KEYS // page) * page if spec.paged else KEYS
    q, k, v = random(spec.group, ROWS, spec.head_dim), random(1, room, spec.head_dim), random(1, room, spec.head_dim_v)
    v = k[..., : spec.head_dim_v] if values_in_keys else v
    scales: Any = None
    if spec.fp8:
        per = spec.fp8.per
        scales = tuple(_scales(rng, x, "token" if x is q and per == "head" else per) for x in (q, k, v))
        q, k, v = (_codes(x / 2 / _of_tokens(scale, x)) for x, scale in zip((q, k, v), scales, strict=True))
    page_table = None
    if spec.paged:
        k, v = (x.reshape(-1, 1, page, x.shape[3]) for x in (k, v))
        if spec.fp8 and spec.fp8.per == "token":
            scales = (scales[0], *(x.reshape(-1, 1, page, 1) for x in scales[1:]))
        page_table = (np.arange(len(k)) * 3 + np.arange(len(keys))[:, None]) % len(k)
        cu_seqlens = None if cu_seqlens is None else (cu_seqlens[0], None)
    return Operands(
        q, k, v,
        spec.head_dim**-0.5, keys - rows, keys,
        {slot.name: 7 if slot.kind == "int" else 1.5 for slot in spec.slots if slot.ndim is None},
        {
            slot.name: np.broadcast_to(_element(slot), (_EXTENT,) * slot.ndim)
            for slot in spec.slots
            if slot.ndim is not None
        },
        np.linspace(-1, 1, spec.group).astype(spec.lse_dtype) if spec.sinks else None,
        0.25 if spec.dropout else 0.0, 12345, cu_seqlens=cu_seqlens, page_table=page_table,
        scales=scales, tangents=_tangents(spec, {"q": q, "k": k, "v": v}) if spec.jvp else None,
    )  # fmt: skip


def _tangents(spec: AttentionSpec, tensors: dict[str, np.ndarray]) -> Tangents:
    rng = np.random.default_rng(2)
    drawn = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in tensors.items()}
    return Tangents._make([*(drawn[name] if name in spec.jvp else None for name in "qkv"), None, None])


def _scales(rng: np.random.Generator, x: np.ndarray, per: str) -> np.ndarray:
    """Scales of very different sizes."""
    tokens = {"head": 1, "block": -(-x.shape[2] // BLOCK), "token": x.shape[2]}[per]
    drawn = (2.0 ** rng.uniform(-7, -3, (*x.shape[:2], tokens, 1))).astype(np.float32)
    return drawn if per == "block" else np.broadcast_to(drawn, (*x.shape[:3], 1))


def _of_tokens(scale: np.ndarray, x: np.ndarray) -> np.ndarray:
    """One for each token."""
    if scale.shape[2] == x.shape[2]:
        return scale
    return np.repeat(scale, BLOCK, 2)[:, :, : x.shape[2]]


def _codes(x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def _numbers(problem: Operands) -> Operands:
    """The problem with the numbers that codes and scales stand for."""
    import ml_dtypes

    if problem.scales is None:
        return problem
    given = zip((problem.q, problem.k, problem.v), problem.scales, strict=True)
    q, k, v = (x.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * _of_tokens(scale, x) for x, scale in given)
    return replace(problem, q=q, k=k, v=v, scales=None)


def _element(slot: Slot) -> np.ndarray:
    return np.asarray(_VALUES[slot.kind], dtype_of(str(slot.dtype)))


def _expected(spec: AttentionSpec, problem: Operands, direction: Direction) -> dict[str, np.ndarray]:
    from ...reference import standard, standard_gradients, standard_jvp, statistics

    out, lse = standard(spec, _numbers(problem))
    if direction == "forward":
        expected = {"out": out, "lse": lse}
        if spec.stats:
            found = statistics(spec, problem)
            expected |= {name: found[name] for name in Stats._fields}
        if spec.jvp:
            expected |= dict(zip(("dout", "dlse"), standard_jvp(spec, problem)[2:], strict=True))
        return {name: np.asarray(x, np.float64) for name, x in expected.items()}
    problem.out, problem.lse = out, lse
    sums = {name: np.zeros(max(ndim, 1) * _EXTENT) for name, ndim in _axes_of_sums(spec)}
    values = {
        name: np.lib.stride_tricks.as_strided(sums[name], (_EXTENT,) * ndim, (8,) * ndim)
        for name, ndim in _axes_of_sums(spec)
    }
    gradients = standard_gradients(spec, problem, _dout(spec), values=values)
    return {name: np.asarray(x, np.float64) for name, x in (gradients._asdict() | sums).items() if x is not None}


def _axes_of_sums(spec: AttentionSpec) -> list[tuple[str, int]]:
    """The slots of `spec.sums`. All axes of the sums of the sample problem have a stride of one element."""
    return [(slot.name, slot.ndim or 0) for slot in spec.sums]


def _dout(spec: AttentionSpec) -> np.ndarray:
    shape = (1, spec.group, ROWS, spec.head_dim_v)
    return np.random.default_rng(1).standard_normal(shape).astype(dtype_of(spec.dtype))


def _computed(compiled: Any, spec: AttentionSpec, problem: Operands, direction: Direction) -> list[np.ndarray]:
    """The results of the kernels, on a stream of their own."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True) as stream:
        # One element each, with strides of 0, so that every index reads it.
        arrays = {name: _Strided(cupy.asarray(x[(0,) * x.ndim]), (0,) * x.ndim) for name, x in problem.arrays.items()}
        bias, shape = compiled.dense.bias, []
        for array in filter(None, (compiled.dense.mask, bias)):  # TMA reads no stride of 0
            shape = [spec.group if axis == array.head else 1 for axis in range(array.slot.ndim - 2)] + [ROWS, KEYS]
            whole = np.full([*shape[:-1], KEYS + 8], _element(array.slot))  # rows of a multiple of 16 bytes
            arrays[array.slot.name] = cupy.asarray(whole)[..., :KEYS]
        is_transposed = spec.fp8 is not None and spec.fp8.transposed
        values = transposed_codes(np, problem.v.view(np.uint8)) if is_transposed else problem.v
        q, k, v = (cupy.asarray(x) for x in (problem.q, problem.k, values))
        if compiled.values_in_keys:
            v = k[..., : spec.head_dim_v]
        out = cupy.empty((*q.shape[:3], spec.head_dim_v), dtype_of(spec.dtype))
        lse = cupy.empty(q.shape[:3], spec.lse_dtype)
        operands = replace(
            problem, q=q, k=k, v=v, arrays=arrays, out=out, lse=lse,
            sinks=None if problem.sinks is None else cupy.asarray(problem.sinks),
            scales=None if problem.scales is None else tuple(map(_on_device, problem.scales)),
            stats=Stats(cupy.empty_like(lse), cupy.empty_like(lse)) if spec.stats else None,
        )  # fmt: skip
        if problem.tangents is not None:
            own = [None if x is None else cupy.asarray(x) for x in problem.tangents[:3]]
            operands.tangents = Tangents._make([*own, cupy.empty_like(out), cupy.empty_like(lse)])
        if direction == "forward":
            compiled.run(Arguments(spec, operands), stream.ptr)
            results = [out, lse, *(operands.stats or ()), *(operands.tangents or ())[3:]]
        else:
            operands.out[...], operands.lse[...] = cupy.asarray(problem.out.astype(q.dtype)), cupy.asarray(problem.lse)
            gradients = Gradients(
                cupy.asarray(_dout(spec)), None, cupy.empty_like(q), cupy.zeros_like(k), cupy.zeros_like(v),
                cupy.empty_like(operands.sinks) if spec.sinks else None,
            )  # fmt: skip
            sums = [cupy.zeros(max(ndim, 1) * _EXTENT, spec.lse_dtype) for _, ndim in _axes_of_sums(spec)]
            for (name, ndim), array in zip(_axes_of_sums(spec), sums):
                gradients.values[name] = _Strided(array, array.strides * ndim)
            arguments = Arguments(spec, operands)
            arguments.gradients(gradients)
            if bias is not None and spec.sums:
                arguments.stores_values, _ = compiled.writes_values(arguments)
                dtype = spec.dtype if arguments.stores_values else spec.lse_dtype
                gradients.values = {bias.slot.name: cupy.asarray(np.zeros(shape, dtype_of(dtype)))}
            arguments.sums(gradients.values)
            compiled.run(arguments, stream.ptr)
            if bias is not None and spec.sums:
                sums = [cupy.asarray(_diagonals(gradients.values[bias.slot.name].get()))]
            gradients.values = {slot.name: x for slot, x in zip(spec.sums, sums)}
            arguments.finish_sums(gradients)
            results = [gradients.dq, gradients.dk, gradients.dv, *([gradients.dsinks] if spec.sinks else []), *sums]
        on_host = [x.get().astype(np.float64) for x in results]
        stream.synchronize()
    return on_host


def _on_device(scale: np.ndarray) -> Any:
    """Scales as calls have them: those of a head once, with a stride of 0."""
    import cupy

    once = scale[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in scale.strides)]
    return cupy.broadcast_to(cupy.asarray(once), scale.shape)


def _diagonals(array: np.ndarray) -> np.ndarray:
    """The sums of elements whose indices have the same sum, as where all strides are one element."""
    places = np.indices(array.shape).sum(0)
    return np.bincount(places.ravel(), array.astype(np.float64).ravel(), array.ndim * _EXTENT)


class _Strided:
    """Memory with the attributes of an array that Arguments reads, and other strides."""

    def __init__(self, array: Any, strides: tuple[int, ...]) -> None:
        self.data, self.dtype, self.size, self.strides = array.data, array.dtype, array.size, strides
        self.shape = (_EXTENT,) * len(strides)
        self.array = array
