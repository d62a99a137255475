"""Cosines and sines of rotary angles, for plain and for scaled bases."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..call import arrays, interop
from ..call.checks import flag
from ..errors import shown
from ..mods.expr import MAX_POSITION
from ..numeric import integer, number

DEFAULT_BASE = 10000.0


class Rates(NamedTuple):
    """Angle per position of each pair of elements, (dims / 2,) float64, and the factor on cosines and sines."""

    angles: np.ndarray
    factor: float = 1.0


@interop.takes_every_library(2, "like")  # `like` is no positional argument
def rotary_table(
    n: int, dims: int, *, base: float | None = None, scaling: Mapping[str, Any] | None = None, dtype: Any = "float32",
    like: Any = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Cosines and sines for `rotary` of the positions 0 ... n - 1, computed in float64.

    Parameters
    ----------
    n
        Number of positions.
    dims
        Number of elements of a head that are rotated, an even number.
    base
        Pair i turns by position * base ** (-2 i / dims); 10000 by default.
    scaling
        How a model reads more positions than it was trained on: the `rope_scaling` or `rope_parameters` of its
        config.json. The key "rope_type" (or "type") is "default", "linear", "ntk", "dynamic", "llama3" or "yarn";
        the others are that type's numbers, by the names that Hugging Face transformers has for them. "ntk" is the
        fixed form of "dynamic": base * factor ** (dims / (dims - 2)). A "rope_theta" is the base.
    dtype
        Of the tables: "float32" or "float64".
    like
        An array whose library and device the tables are for; NumPy by default.

    Returns
    -------
    cos, sin : array
        (n, dims / 2). For "yarn" both are multiplied by its attention factor.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, arXiv 2104.09864, section 3.4.
    Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation", 2023, arXiv
    2306.15595 (linear). Peng et al., "YaRN", 2023, arXiv 2309.00071, section 3 (NTK-aware, dynamic and YaRN). Llama 3.1
    scales by wavelength: Grattafiori et al., "The Llama 3 Herd of Models", 2024, arXiv 2407.21783, and its code.

    Examples
    --------
    >>> import flashkit
    >>> cos, sin = flashkit.rotary_table(4096, 64, base=500000.0)
    >>> cos.shape, cos.dtype.name, float(cos[0, 0]), float(sin[0, 0])
    ((4096, 32), 'float32', 1.0, 0.0)
    """
    n = integer("n, a number of positions", n, 0, MAX_POSITION)
    if not isinstance(dtype, str | type | np.dtype) or dtype not in ("float32", "float64", np.float32, np.float64):
        raise TypeError(f"dtype: expected 'float32' or 'float64', got {shown(dtype)}")
    if like is not None:
        arrays.require("like", like)
    cos, sin = cos_sin(np.arange(n), rates(dims, base, scaling, n), np.dtype(dtype))
    if like is None or arrays.kind_of(like) == "numpy":
        return cos, sin
    xp = arrays.namespace("cupy")
    with like.device:
        return xp.asarray(cos), xp.asarray(sin)


def cos_sin(positions: np.ndarray, rates: Rates, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Tables for these positions: (len(positions), dims / 2)."""
    angles = positions.reshape(-1, 1) * rates.angles
    return (np.cos(angles) * rates.factor).astype(dtype), (np.sin(angles) * rates.factor).astype(dtype)


def rates(dims: Any, base: Any, scaling: Any, n: int) -> Rates:
    """The angles of a scaling; n: positions that are read, which "dynamic" depends on."""
    dims = integer("dims, a number of rotated elements", dims, 2)
    if dims % 2:
        raise ValueError(f"dims: expected an even number, got {dims}")
    numbers = Scaling(scaling)
    theta = numbers.take("rope_theta", None)
    base = None if base is None else number("base", base)
    if base is not None and theta is not None and base != theta:
        raise ValueError(f"base: expected {theta}, the rope_theta of scaling, or None, got {shown(base)}")
    base = base if base is not None else theta if theta is not None else DEFAULT_BASE
    if base <= 1:
        raise ValueError(f"base: expected a number above 1, got {base}")
    angles = TYPES[numbers.type](dims, base, numbers, n)
    numbers.check_rest()
    return angles


def _plain(dims: int, base: float) -> np.ndarray:
    return base ** (-np.arange(0, dims, 2) / dims)


class Scaling:
    """The numbers of a scaling by name. Each type takes its own; a number that none takes is an error."""

    def __init__(self, scaling: Any) -> None:
        if scaling is not None and not isinstance(scaling, Mapping):
            example = {"rope_type": "linear", "factor": 2.0}
            raise TypeError(f"scaling: expected a mapping such as {example}, got {shown(scaling)}")
        self._rest = dict(scaling or {})
        kinds = [self._rest.pop(name) for name in ("rope_type", "type") if name in self._rest]
        kind = kinds[0] if kinds else None if self._rest.keys() - {"rope_theta"} else "default"
        if not isinstance(kind, str) or kind not in TYPES:
            raise ValueError(f"scaling['rope_type']: expected {', '.join(map(repr, TYPES))}, got {shown(kind)}")
        self.type = kind

    def take(self, name: str, *default: Any) -> Any:
        """A positive number by its name."""
        value = self._rest.pop(name, None)
        if value is None:
            if not default:
                raise ValueError(f"scaling[{name!r}]: expected a number for type {self.type!r}, got none")
            return default[0]
        positive = number(f"scaling[{name!r}]", value)
        if positive <= 0:
            raise ValueError(f"scaling[{name!r}]: expected a number above 0, got {shown(value)}")
        return positive

    def take_flag(self, name: str, default: bool) -> bool:
        return flag(f"scaling[{name!r}]", self._rest.pop(name, default))

    def check_rest(self) -> None:
        if self._rest:
            names = ", ".join(map(repr, self._rest))
            raise ValueError(f"scaling of type {self.type!r} got unexpected {names}; pass dims= for partial rotation")


def _default(dims: int, base: float, scaling: Scaling, n: int) -> Rates:
    return Rates(_plain(dims, base))


def _linear(dims: int, base: float, scaling: Scaling, n: int) -> Rates:
    return Rates(_plain(dims, base) / scaling.take("factor"))


def _ntk(dims: int, base: float, scaling: Scaling, n: int) -> Rates:
    return Rates(_plain(dims, _ntk_base(dims, base, scaling.take("factor"))))


def _ntk_base(dims: int, base: float, factor: float) -> float:
    if dims == 2:
        raise ValueError("dims: expected 4 or more for 'ntk' and 'dynamic', whose base grows with dims - 2, got 2")
    return base * factor ** (dims / (dims - 2))


def _dynamic(dims: int, base: float, scaling: Scaling, n: int) -> Rates:
    factor, trained = scaling.take("factor"), scaling.take("original_max_position_embeddings")
    return Rates(_plain(dims, _ntk_base(dims, base, factor * max(n, trained) / trained - (factor - 1))))


def _llama3(dims: int, base: float, scaling: Scaling, n: int) -> Rates:
    """Long wavelengths are interpolated, short ones stay, those between are blended."""
    factor, trained = scaling.take("factor"), scaling.take("original_max_position_embeddings")
    low, high = scaling.take("low_freq_factor"), scaling.take("high_freq_factor")
    if low >= high:
        raise ValueError(f"scaling['low_freq_factor']: expected less than high_freq_factor, {high}, got {low}")
    plain = _plain(dims, base)
    turns = trained * plain / (2 * math.pi)  # of each pair over the positions of the training
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return Rates(plain * (kept + (1 - kept) / factor))


def _yarn(dims: int, base: float, scaling: Scaling, n: int) -> Rates:
    """Pairs are interpolated by how often they turn; cosines and sines grow, which sharpens the softmax."""
    factor, trained = scaling.take("factor"), scaling.take("original_max_position_embeddings")
    fast, slow = scaling.take("beta_fast", 32.0), scaling.take("beta_slow", 1.0)
    mscale, mscale_all = scaling.take("mscale", None), scaling.take("mscale_all_dim", None)
    attention = scaling.take("attention_factor", None)
    whole = scaling.take_flag("truncate", True)

    def pair_that_turns(times: float) -> float:
        return dims * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if attention is None:
        attention = sharpening(mscale) / sharpening(mscale_all) if mscale and mscale_all else sharpening(1.0)
    first, last = pair_that_turns(fast), pair_that_turns(slow)
    if whole:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    if first == last:
        last += 0.001
    interpolated = np.clip((np.arange(dims // 2) - first) / (last - first), 0, 1)
    plain = _plain(dims, base)
    return Rates(plain * (1 - interpolated) + plain / factor * interpolated, attention)


TYPES: dict[str, Callable[[int, float, Scaling, int], Rates]] = {
    "default": _default, "linear": _linear, "ntk": _ntk, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip
