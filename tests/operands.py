"""Specs and operands for tests in the form that backends and the reference take, made without the public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  # makes bfloat16 a dtype
import numpy as np

from flashkit import mods
from flashkit.mods import Mod
from flashkit.spec import AttentionSpec, Operands, Problem, Slot

Feature = Callable[[np.random.Generator, int, int, int, int], dict[str, Any]]
"""(rng, batch, heads, n_q, n_k) -> keyword arguments of `make`."""


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Normally distributed ones."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def make(
    batch: int = 2, heads: int = 2, n_q: int = 13, n_k: int = 17,
    head_dim: int = 5, head_dim_v: int = 3, group: int = 1,
    *, dtype: Any = "float64", rng: np.random.Generator | int = 0, score: Mod | None = None, mask: Mod | None = None,
    q_offset: Any = None, kv_lengths: Any = None, sinks: Any = None, dropout_p: float = 0.0, seed: int = 1234,
    scale: float | None = None,
) -> tuple[AttentionSpec, Operands]:  # fmt: skip
    """A spec and operands: q, k, v normally distributed, of `dtype` (a name of spec.ITEMSIZE); out and lse allocated.

    heads: query heads, a multiple of group. mask, score: Mods; what two of them name alike is told apart.
    q_offset (default: the last query sees the last key), kv_lengths: int or (batch,). sinks: (heads,).
    """
    rng = np.random.default_rng(rng)
    dtype = np.dtype(dtype)
    shape_q, shape_kv = (batch, heads, n_q), (batch, heads // group, n_k)
    shapes = (*shape_q, head_dim), (*shape_kv, head_dim), (*shape_kv, head_dim_v)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    lengths = np.broadcast_to(np.asarray(n_k if kv_lengths is None else kv_lengths, np.int64), (batch,)).copy()
    offset = np.broadcast_to(np.asarray(lengths - n_q if q_offset is None else q_offset, np.int64), (batch,)).copy()

    graphs, params, arrays = {}, {}, {}
    for kind, mod in (("score", score), ("mask", mask)):
        if mod is not None:
            names = {name: f"{kind}_{name}" for name in (*mod.params, *mod.arrays)}
            graphs[kind] = mods.expr.rename([mod.expr], names)[0]
            params |= {names[name]: x for name, x in mod.params.items()}
            arrays |= {names[name]: x for name, x in mod.arrays.items()}
    kinds = {"b": "bool", "i": "int", "u": "int", "f": "float", "V": "float"}
    slots = [Slot(name, "float" if isinstance(x, float) else "int") for name, x in params.items()]
    slots += [Slot(name, kinds[x.dtype.kind], x.ndim, x.dtype.name) for name, x in arrays.items()]  # type: ignore[arg-type]

    spec = AttentionSpec(
        dtype.name, head_dim, head_dim_v, group, graphs.get("score"), graphs.get("mask"), tuple(slots),
        dropout=dropout_p > 0, sinks=sinks is not None, kv_lengths=kv_lengths is not None,
    )  # fmt: skip
    operands = Operands(
        q, k, v, head_dim**-0.5 if scale is None else scale, offset, lengths, params, arrays,
        None if sinks is None else np.asarray(sinks, spec.lse_dtype), dropout_p, seed,
        np.empty((batch, heads, n_q, head_dim_v), dtype), np.empty((batch, heads, n_q), spec.lse_dtype),
    )  # fmt: skip
    return spec, operands


def problem(spec: AttentionSpec, operands: Operands) -> Problem:
    return Problem(spec, *operands.q.shape[:3], operands.k.shape[2])


class OnDevice:
    """A NumPy array as host code sees one of CuPy."""

    device_id = 0

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.strides, self.dtype = array, array.shape, array.strides, array.dtype
        self.data, self.ptr, self.nbytes = self, array.ctypes.data, array.nbytes

    def __getitem__(self, index: Any) -> OnDevice:
        return OnDevice(self.array[index])


def on_device(array: Any, dtype: Any = None) -> Any:
    """What an array becomes where host code sends it to the device."""
    return OnDevice(np.ascontiguousarray(array, dtype)) if isinstance(array, np.ndarray) else array


def _alibi(rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    return {"score": mods.alibi(rng.uniform(0.05, 0.5, heads))}


def _documents(rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    return {"mask": mods.document(np.sort(rng.integers(0, 4, (batch, n_k)), axis=1))}


def _bias(rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    array = rng.standard_normal((1, heads, n_q, n_k))
    array[rng.random(array.shape) < 0.2] = -np.inf
    return {"score": mods.bias(array)}


def _bool_mask(rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    return {"mask": mods.visible(rng.random((batch, 1, n_q, n_k)) < 0.6)}


def _lengths(rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    return {"mask": mods.causal(), "kv_lengths": rng.integers(0, n_k + 1, batch)}


def _all(rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    score = mods.softcap(3.0).then(mods.alibi(rng.uniform(0.05, 0.5, heads)))
    mask = mods.sliding_window(n_k // 2, 2) & ~mods.dilated(3)
    lengths = rng.integers(0, n_k + 1, batch)
    return {"score": score, "mask": mask, "kv_lengths": lengths, "sinks": rng.standard_normal(heads), "dropout_p": 0.2}


FEATURES: dict[str, Feature] = {
    "plain": lambda *_: {},
    "causal": lambda *_: {"mask": mods.causal()},
    "causal from the top left": lambda *_: {"mask": mods.causal(), "q_offset": 0},
    "window": lambda *_: {"mask": mods.sliding_window(4, 1)},
    "prefix": lambda *_: {"mask": mods.prefix_lm(3)},
    "dilated": lambda *_: {"mask": mods.dilated(3) & mods.causal()},
    "documents": _documents,
    "bool mask": _bool_mask,
    "no key visible": lambda *_: {"mask": mods.mask(lambda b, h, q, k: (k < 0) | (q > 2))},
    "softcap": lambda *_: {"score": mods.softcap(1.5)},
    "alibi": _alibi,
    "bias": _bias,
    "float of the score": lambda *_: {"score": mods.score(lambda s, b, h, q, k: s * np.tanh(s) + 0.1 * (h - b))},
    "offsets": lambda rng, batch, heads, n_q, n_k: {"mask": mods.causal(), "q_offset": rng.integers(-3, n_k, batch)},
    "lengths": _lengths,
    "dropout": lambda *_: {"dropout_p": 0.3},
    "sinks": lambda rng, batch, heads, n_q, n_k: {"sinks": rng.standard_normal(heads)},
    "scale": lambda *_: {"scale": 0.7},
    "all at once": _all,
}
"""What goes beyond plain attention, by name, as a recipe for `make`: parametrise tests over its keys."""


def featured(name: str, *, rng: np.random.Generator | int = 0, **sizes: Any) -> tuple[AttentionSpec, Operands]:
    """`make` with a feature of FEATURES."""
    rng = np.random.default_rng(rng)
    sizes = {"batch": 2, "heads": 2, "n_q": 13, "n_k": 17, **sizes}
    values = FEATURES[name](rng, *(sizes[size] for size in ("batch", "heads", "n_q", "n_k")))
    return make(**{"rng": rng, **values, **sizes})
