"""`quantize`: an array as 8-bit numbers with scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal

import numpy as np

from ..devices.lazy import cached_property
from ..errors import shown
from ..mods.dropout import philox
from ..numeric import integer
from ..spec import ALIGNMENT, BLOCK, DTYPES, MAX_HEAD_DIM, PADDING, name_of, transposed_codes
from . import arrays, interop
from .checks import choice, flag
from .shape import HEADS_AND_TOKENS, LAYOUTS

Format = Literal["e4m3", "int8"]
Per = Literal["tensor", "head", "block", "token"]

LARGEST: dict[str, int] = {"e4m3": 448, "int8": 127}
"""Formats of 8 bits and the greatest number of each."""

PER = ("tensor", "head", "block", "token")

MIN_SCALE = float(np.finfo(np.float32).tiny)
"""Below it float32 numbers lose bits. The scale of a group of zeros."""


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """An array as 8-bit numbers with scales, made by `flashkit.quantize`; `attention` takes it for q, k and v.

    It stands for the array data * scale, with the rotation undone and the mean added. Data of another quantiser can be
    wrapped: Quantized(data, scale, per="head").

    Attributes
    ----------
    data : array
        The numbers, of the array's shape: float8_e4m3fn of ml_dtypes, or int8. CuPy has no float8: there the codes of
        e4m3, as uint8.
    scale : array
        float32: one factor for each group of numbers, with as many axes as data. The head dim has length 1; of the
        others "tensor" keeps none, "head" the batch axes and the heads, "token" all, and "block" has ceil(N / block)
        tokens.
    dtype : numpy.dtype
        That of the array that was quantised, and so of results and gradients. float32 by default.
    per : str
        "tensor", "head", "block" or "token".
    block : int
        Tokens that share a scale, where per="block".
    layout : str
        "bhnd" or "bnhd": which axis of data has the tokens.
    seed : int or None
        The seed of the rotation; None if the numbers are not rotated.
    mean : array or None
        float32: what was subtracted before the rotation, and is added again. It broadcasts to data.
    transposed : array or None
        The numbers of e4m3 once more, as Hopper's kernel reads those of v: see `quantize`.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> k = np.random.default_rng(0).standard_normal((1, 8, 256, 64), dtype=np.float32)
    >>> flashkit.quantize(k, per="token")
    <Quantized: e4m3 per token, shape (1, 8, 256, 64) of float32, 139264 bytes>
    >>> wrapped = flashkit.Quantized(np.ones((2, 8), np.int8), np.full((1, 1), 0.5, np.float32))
    >>> float(wrapped.dequantize()[0, 0])
    0.5
    """

    data: Any
    scale: Any
    dtype: Any = "float32"
    per: Per = "tensor"
    block: int = BLOCK
    layout: str = "bhnd"
    seed: int | None = None
    mean: Any = None
    transposed: Any = None
    _kind: str = field(init=False)

    def __post_init__(self) -> None:
        kind = arrays.require("data", self.data)
        for name in ("data", "scale", "mean", "transposed"):  # views, whose forms no other thread changes
            if (array := getattr(self, name)) is not None:
                object.__setattr__(self, name, arrays.own_form(name, array, kind))
        object.__setattr__(self, "_kind", kind)
        object.__setattr__(self, "dtype", _floating(self.dtype))
        codes = "float8_e4m3fn" if kind == "numpy" else "uint8"
        if name_of(self.data.dtype) not in (codes, "int8"):
            raise TypeError(f"data: expected dtype {codes} or int8, got {self.data.dtype}")
        choice("per", self.per, PER)
        choice("layout", self.layout, LAYOUTS)
        check_shape("data", self.data.shape)
        object.__setattr__(self, "block", integer("block", self.block, 1, 2**63 - 1))
        wanted = scale_shape(self.data.shape, self.per, self.block, self.layout)
        floats = {"scale": self.scale} if self.mean is None else {"scale": self.scale, "mean": self.mean}
        for name, array in floats.items():
            if name_of(array.dtype) != "float32":
                raise TypeError(f"{name}: expected dtype float32, got {array.dtype}")
        if self.scale.shape != wanted:
            raise ValueError(
                f"scale: expected shape {wanted} for data of shape {self.shape} with per={self.per!r}, got "
                f"{self.scale.shape}"
            )
        if self.mean is not None and (
            self.mean.ndim != self.ndim or any(n not in (1, m) for n, m in zip(self.mean.shape, self.shape))
        ):
            raise ValueError(f"mean: expected a shape that broadcasts to {self.shape} by axes, got {self.mean.shape}")
        if self.transposed is not None:
            wanted = _transposed_shape(self.shape, self.layout)
            if self.transposed.shape != wanted or name_of(self.transposed.dtype) != "uint8":
                raise ValueError(
                    f"transposed: expected uint8 of shape {wanted}, got {self.transposed.dtype} of "
                    f"{self.transposed.shape}"
                )
        if self.seed is not None:
            object.__setattr__(self, "seed", integer("seed", self.seed, 0, 2**64 - 1))

    @cached_property
    def signature(self) -> object:
        """What a plan depends on, on the host beside the layout of data: one object for equal ones."""
        own = self.format, self.per, self.block, self.layout, self.seed, self.mean is None, self.dtype
        read = [] if self._kind == "numpy" else [x for x in (self.data, self.transposed) if x is not None]
        places = [(arrays.layout(x), x.data.ptr % ALIGNMENT) for x in read]
        return _one_object(*own, *places, arrays.layout(self.scale))

    @property
    def format(self) -> Format:
        """ "e4m3" or "int8"."""
        return "int8" if self.data.dtype.kind == "i" else "e4m3"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in (self.data, self.scale, self.mean, self.transposed) if x is not None)

    def __repr__(self) -> str:
        group = f"block of {self.block}" if self.per == "block" else self.per
        extra = ", rotated" * (self.seed is not None) + ", smooth" * (self.mean is not None)
        return (
            f"<Quantized: {self.format} per {group}{extra}, shape {self.shape} of {self.dtype.name}, "
            f"{self.nbytes} bytes>"
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Quantized is 8-bit numbers with scales, not an array; pass x.dequantize()")

    def pages(self, pages: Any) -> Quantized:
        """Of pages (pages, page, H, D) those with these numbers: a copy."""
        given = {"scale": self.scale, "mean": self.mean}
        taken = {name: x if x is None or len(x) == 1 else x[pages] for name, x in given.items()}
        return replace(self, data=self.data[pages], transposed=None, **taken)

    def dequantize(self, dtype: Any = None) -> Any:
        """The array that the numbers stand for: what attention computes with.

        Parameters
        ----------
        dtype
            Of the result: float64, float32, float16 or bfloat16. By default float32, which holds every number times its
            scale to half a unit in the last place, or float64 if that is the dtype of the array that was quantised.

        Returns
        -------
        array
            New, of data's array type and shape.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> x = np.random.default_rng(0).standard_normal((4, 64, 32))
        >>> q = flashkit.quantize(x, "int8", per="token")
        >>> bool((abs(q.dequantize() - x) <= 0.501 * q.scale).all())
        True
        """
        wanted = _floating(DTYPES[name_of(self.dtype)].accumulator if dtype is None else dtype)
        wide, xp = DTYPES[name_of(wanted)].accumulator, arrays.namespace(self._kind)
        with arrays.scope(self.data), np.errstate(all="ignore"):  # NaN and infinity have results
            if self.format == "int8":
                values = self.data.astype(wide)
            else:
                table = _e4m3_values().astype(wide)
                values = (table if xp is np else xp.asarray(table))[self.data.view(np.uint8)]
            values *= _of_tokens(xp, self.scale, self.shape, self.per, self.block, self.layout)
            if self.seed is not None:
                values = _times(xp, values, rotation(self.shape[-1], self.seed).T.astype(wide))
            if self.mean is not None:
                values += self.mean
            return values.astype(wanted, copy=False)


@lru_cache(maxsize=1024)
def _one_object(*facts: Any) -> object:
    """A part of keys that is hashed and compared by its identity, in a tenth of the time of these."""
    return object()


@interop.takes_every_library(0, "x")
def quantize(
    x: Any, dtype: Format = "e4m3", per: Per = "tensor", *, rotate: bool = False, smooth: bool = False,
    block: int = BLOCK, seed: int = 0, layout: str = "bhnd", transpose: bool = False,
) -> Quantized:  # fmt: skip
    """Quantise an array of queries, keys or values to 8 bits.

    Each group of numbers shares a scale, its greatest magnitude divided by the greatest number of the format; for
    blocks of e4m3 the power of two that is no less, which costs a floating format no accuracy. Numbers are divided by
    their scale and rounded to the nearest, ties to even. It is computed in float32.

    Parameters
    ----------
    x
        Array of any library: float64, float32, float16 or bfloat16, (..., H, N, D) by layout, or (N, D). Packed
        sequences (T, H, D) and pages (pages, page, H, D) have layout="bnhd".
    dtype
        "e4m3" (float8_e4m3fn: 3 bits of mantissa, up to 448) or "int8" (-127 to 127).
    per
        Which numbers share a scale: those of the "tensor", of a "head" of a batch entry, of a "block" of tokens of a
        head, or of a "token" of a head.
    rotate
        Multiply by a random orthonormal matrix before, which spreads outliers over the head dim: signs by `seed`, then
        a Hadamard transform, or a Hartley transform where the head dim is no power of two. Arrays of one head dim and
        seed have the same matrix, so q k^T is that of the rotated arrays.
    smooth
        Subtract the mean over the tokens of each head before. It helps keys, whose channels often have an offset.
    block
        Tokens of a block.
    seed
        An integer from 0 to 2^64 - 1.
    layout
        "bhnd", or "bnhd" for (..., N, H, D).
    transpose
        Of e4m3 also keep the numbers with keys innermost, (..., H, D, N up to a multiple of 32), where among 16 keys
        key 8 j + 2 t + c stands at 4 t + 2 j + c. Hopper's kernel is up to a tenth faster where it gets v so.

    Returns
    -------
    Quantized
        `attention` takes it for q, k and v. `.dequantize()` is the array that it stands for.

    Notes
    -----
    NaN stays NaN. So does infinity become NaN, and what is beyond float32: no number of 8 bits stands for it. e4m3 has
    a NaN, so the others of its group keep their values; int8 has none, and the group's scale is NaN. A rotation spreads
    NaN over its row. A group of zeros has the least normal float32 as its scale.

    A scale depends on all numbers of its group: with causal masks on the tokens that a query does not see, and with
    lengths on the memory behind them, which should then hold nothing large. per="token" depends on neither.

    References
    ----------
    Rotation: incoherent processing of Shah et al., "FlashAttention-3", 2024, arXiv 2407.08608, section 3.3. Smoothing:
    Zhang et al., "SageAttention", 2024, arXiv 2410.02367, section 4.2. e4m3: Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022, arXiv 2209.05433, section 3.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 256, 64), dtype=np.float32)
    >>> k8 = flashkit.quantize(k, "e4m3", per="token", rotate=True)
    >>> k8.data.dtype.name, k8.scale.shape
    ('float8_e4m3fn', (1, 8, 256, 1))
    >>> error = flashkit.attention(q, k8, v) - flashkit.attention(q, k, v)
    >>> bool(abs(error).max() < 0.05)
    True
    """
    if (library := interop.library_of(x)) is not None:
        raise TypeError(f"x: expected an array of NumPy or CuPy, got a {library.describe(x)}")
    kind = arrays.require("x", x)
    x = x.view()  # before its form is looked at; see arrays.own_forms
    arrays.dtype_name("x", x)
    choice("dtype", dtype, tuple(LARGEST))
    choice("per", per, PER)
    choice("layout", layout, LAYOUTS)
    check_shape("x", x.shape)
    block, seed = integer("block", block, 1, 2**63 - 1), integer("seed", seed, 0, 2**64 - 1)
    rotate, smooth, transpose = flag("rotate", rotate), flag("smooth", smooth), flag("transpose", transpose)
    xp, tokens, mean = arrays.namespace(kind), _token_axis(x.ndim, layout), None
    transpose = transpose and dtype == "e4m3"
    with arrays.scope(x), np.errstate(all="ignore"):
        if (dtype, per, block, smooth) == ("e4m3", "block", BLOCK, False):
            if (made := one_pass(x, layout, seed if rotate else None, transpose)) is not None:
                return made(x)
        values = x.astype(np.float32)
        if smooth:
            finite = xp.isfinite(values)
            count = xp.maximum(finite.sum(tokens, keepdims=True), 1)
            total = xp.where(finite, values, np.float32(0)).sum(tokens, keepdims=True, dtype=np.float64)
            mean = (total / count).astype(np.float32)
            values -= mean
        if rotate:
            values = _times(xp, values, rotation(x.shape[-1], seed))
        values = xp.where(xp.isfinite(values), values, np.float32(np.nan))
        absent = np.float32(0 if dtype == "e4m3" else np.nan)
        rows = xp.where(xp.isnan(values), absent, abs(values)).max(-1, keepdims=True)
        scale = xp.maximum(_reduced(xp, rows, per, block, tokens) / np.float32(LARGEST[dtype]), np.float32(MIN_SCALE))
        if (dtype, per) == ("e4m3", "block"):
            scale = ((scale.view(np.int32) + 0x7FFFFF) & 0x7F800000).view(np.float32)  # a power of two, no less
        values /= _of_tokens(xp, scale, x.shape, per, block, layout)
        data = _e4m3(xp, values) if dtype == "e4m3" else _int8(xp, values)
        transposed = transposed_values(xp, data, layout) if transpose else None
    return Quantized(data, scale, x.dtype, per, block, layout, seed if rotate else None, mean, transposed)


Quantiser = Callable[[Any], Quantized]


def one_pass(x: Any, layout: str, seed: int | None, transpose: bool) -> Quantiser | None:
    """`quantize` per block to e4m3 by one launch, for aligned arrays like x on this device; None without a kernel."""
    if arrays.kind_of(x) != "cupy" or x.ndim < 3 or not arrays.is_here(x):
        return None
    if not isinstance(layout, str) or layout not in LAYOUTS:
        return None  # which `quantize` says
    from ..backends.cuda_common import quantize

    shape = x.shape
    has_four = len(shape) == 4
    four = x if has_four else arrays.as_batch(x)
    signs = None if seed is None else _sign_words(shape[-1], seed)
    planned = quantize.planned(arrays.layout(four), layout == "bnhd", transpose, signs)
    if planned is None or four.data.ptr % ALIGNMENT:
        return None
    fields = {"dtype": x.dtype, "per": "block", "block": BLOCK, "layout": layout, "seed": seed, "mean": None}

    def quantised(x: Any) -> Quantized:
        own: Any = planned(x if has_four else arrays.as_batch(x))
        if not has_four:
            own = [each if each is None else each.reshape((*shape[:-3], *each.shape[1:])) for each in own]
        found = object.__new__(Quantized)  # without checks of what is made here
        vars(found).update(fields, data=own[0], scale=own[1], transposed=own[2], _kind="cupy")
        return found

    return quantised


@lru_cache(maxsize=16)
def _signs(d: int, seed: int) -> np.ndarray:
    """Whether the rotation flips each column: by an own generator, as stored data outlives NumPy's versions."""
    return philox((np.arange(d), 0, 0, 0), seed)[0] & 1 != 0


@lru_cache(maxsize=16)
def _sign_words(d: int, seed: int) -> tuple[int, ...]:
    """`_signs` of up to 256 columns as the bits of four words."""
    words: list[int] = np.packbits(np.resize(_signs(d, seed), 256), bitorder="little").view(np.int64).tolist()
    return tuple(words)


@lru_cache(maxsize=16)
def rotation(d: int, seed: int) -> np.ndarray:
    """The orthonormal matrix of quantize(rotate=True), (d, d) float32, by which rows are multiplied from the right."""
    if d & (d - 1):
        angles = 2 * np.pi / d * (np.outer(np.arange(d), np.arange(d)) % d)
        transform = np.cos(angles) + np.sin(angles)  # Hartley's
    else:
        transform = np.ones((1, 1))
        while len(transform) < d:
            transform = np.block([[transform, transform], [transform, -transform]])
    matrix = np.where(_signs(d, seed), -1.0, 1.0)[:, None] * transform / d**0.5
    single = matrix.astype(np.float32)
    single.flags.writeable = False
    return single


def scale_shape(shape: tuple[int, ...], per: str, block: int, layout: str) -> tuple[int, ...]:
    """The shape of the scales of an array."""
    tokens = _token_axis(len(shape), layout)
    if per == "tensor":
        return (1,) * len(shape)
    counts = [*shape[:-1], 1]
    counts[tokens] = {"head": 1, "block": -(-shape[tokens] // block), "token": shape[tokens]}[per]
    return tuple(counts)


def _transposed_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    tokens = _token_axis(len(shape), layout)
    heads = () if len(shape) == 2 else (shape[-5 - tokens],)
    return (*shape[:-3], *heads, shape[-1], -(-shape[tokens] // PADDING) * PADDING)


def transposed_values(xp: Any, data: Any, layout: str) -> Any:
    """Codes of v with keys innermost, in the order of `quantize`; 0 past the last key."""
    codes = data.view(np.uint8)
    return transposed_codes(xp, codes.swapaxes(-3, -2) if layout == "bnhd" and data.ndim > 2 else codes)


def _token_axis(ndim: int, layout: str) -> int:
    return HEADS_AND_TOKENS[layout][1] if ndim > 2 else -2


def check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) < 2 or not 1 <= shape[-1] <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected shape (..., tokens, head_dim), head_dim 1 to {MAX_HEAD_DIM}, got {shape}")


def _floating(dtype: Any) -> Any:
    """The dtype of this name or type; TypeError if attention does not take it."""
    import ml_dtypes

    try:
        known = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    except TypeError:
        known = None
    if known is None or name_of(known) not in DTYPES or not known.isnative:
        raise TypeError(f"dtype: expected {', '.join(DTYPES)}, got {shown(dtype)}")
    return known


def _reduced(xp: Any, rows: Any, per: str, block: int, tokens: int) -> Any:
    """The greatest of each group of rows; 0 without rows."""
    if per == "token":
        return rows
    block = min(block, max(rows.shape[tokens], 1))
    if 0 in rows.shape:
        count = -(-rows.shape[tokens] // block) if per == "block" else 1
        shape = [1] * rows.ndim if per == "tensor" else list(rows.shape)
        shape[tokens] = count
        return xp.zeros(shape, np.float32)
    if per != "block":
        return rows.max(None if per == "tensor" else tokens, keepdims=True)
    first = xp.moveaxis(rows, tokens, 0)
    blocks = -(-len(first) // block)
    padded = xp.zeros((blocks * block, *first.shape[1:]), np.float32)
    padded[: len(first)] = first
    return xp.moveaxis(padded.reshape((blocks, block, *first.shape[1:])).max(1), 0, tokens)


def _of_tokens(xp: Any, scale: Any, shape: tuple[int, ...], per: str, block: int, layout: str) -> Any:
    """Scales that broadcast to the array."""
    if per != "block":
        return scale
    tokens = _token_axis(len(shape), layout)
    repeats = min(block, shape[tokens])
    return xp.moveaxis(xp.repeat(xp.moveaxis(scale, tokens, 0), repeats, 0)[: shape[tokens]], 0, tokens)


def token_scales(x: Quantized) -> Any:
    """The scale of each token of an array, a view with one column where that is possible."""
    xp = arrays.namespace(x._kind)
    scales = _of_tokens(xp, x.scale, x.shape, x.per, x.block, x.layout)
    return xp.broadcast_to(scales, (*x.shape[:-1], 1))


def block_scales(x: Quantized) -> Any:
    """The scale of each block of BLOCK tokens, where blocks or heads have one: a view."""
    shape = scale_shape(x.shape, "block", BLOCK, x.layout)
    return arrays.namespace(x._kind).broadcast_to(x.scale, shape)


def _times(xp: Any, values: Any, matrix: np.ndarray) -> Any:
    """Each row times a matrix, as one product."""
    rows = values.reshape((-1, values.shape[-1]))
    return (rows @ (matrix if xp is np else xp.asarray(matrix))).reshape(values.shape)


@cache
def _e4m3_values() -> np.ndarray:
    """The number of each code of e4m3, float64."""
    import ml_dtypes

    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def _e4m3(xp: Any, values: Any) -> Any:
    """float32 numbers rounded to e4m3, the greatest one where they exceed it."""
    magnitude = xp.minimum(abs(values), np.float32(448))
    bits = magnitude.view(np.int32)
    # The mantissa rounded to 3 bits, ties to even, and the exponent with e4m3's bias: 127 - 7 = 960 / 8 less.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    subnormal = xp.rint(magnitude * np.float32(2**9)).astype(np.int32)
    codes = xp.where(magnitude < np.float32(2**-6), subnormal, normal)
    codes = xp.where(xp.isnan(values), 0x7F, codes) | ((values.view(np.int32) >> 24) & 0x80)
    codes = codes.astype(np.uint8)
    if xp is not np:
        return codes
    import ml_dtypes

    return codes.view(ml_dtypes.float8_e4m3fn)


def _int8(xp: Any, values: Any) -> Any:
    """float32 numbers rounded to int8; 0 for NaN, whose scale is NaN."""
    return xp.where(xp.isnan(values), 0, xp.clip(xp.rint(values), -127, 127)).astype(np.int8)
