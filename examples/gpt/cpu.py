"""The array functions of model.py and parameters.py in NumPy. gpu.py has the same functions for CuPy.

Everything runs over chunks of rows that fit a core's cache, on as many threads as there are cores: NumPy's functions
release the interpreter lock. Products are BLAS's, which the caller keeps to one thread (threadpoolctl).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from flashkit.devices import host

from .parameters import Parameters

Array = np.ndarray
xp = np
Replay = None  # is a GPU's
index = np.asarray  # integers as embed and add_rows take them

CHUNK = 1 << 16  # elements
EPSILON = 1e-5  # of a variance, as in GPT-2
THREADS = ThreadPoolExecutor(host.cpu_count())
GELU = 2 * math.sqrt(2 / math.pi)


def _by_rows(rows: int, width: int, function: Callable[[slice], Any], totals: tuple[Array, ...] = ()) -> list[Any]:
    """The results of the function for slices that together are all rows, in their order. Each total gets the
    sum of what is at its place in the results.
    """
    step = max(1, min(CHUNK // width, -(-rows // host.cpu_count())))
    slices = [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
    results = [function(slices[0])] if len(slices) == 1 else list(THREADS.map(function, slices))
    for i, total in enumerate(totals):
        total += sum(result[i] for result in results)
    return results


def product(a: Array, b: Array, out: Array | None = None) -> Array:
    """a b."""
    found = np.empty((len(a), b.shape[1]), a.dtype) if out is None else out
    _by_rows(len(a), b.shape[1], lambda rows: np.matmul(a[rows], b, out=found[rows]))
    return found


def add_product(total: Array, a: Array, b: Array) -> None:
    """total += a b."""
    width = CHUNK // -(-len(a) // host.cpu_count())
    _by_rows(len(a), width, lambda rows: np.add(total[rows], a[rows] @ b, out=total[rows]))


def add_sum(total: Array, x: Array) -> None:
    """total (E,) += the sum of the rows of x (T, E)."""
    _by_rows(*x.shape, lambda rows: (x[rows].sum(0),), (total,))


def add_bias(x: Array, bias: Array) -> Array:
    """x (T, E) + bias (E,), in place of x."""
    x += bias
    return x


def embed(ids: Array, positions: Array, words: Array, places: Array) -> Array:
    """Rows `ids` of words plus rows `positions` of places."""
    return words[ids] + places[positions]


def add_rows(total: Array, index: Array, x: Array) -> None:
    """total[index[t]] += x[t], in the order of t."""
    order = np.argsort(index, kind="stable")
    rows, begins = np.unique(index[order], return_index=True)
    total[rows] += np.add.reduceat(x[order], begins, axis=0)


def add_norm(x: Array, added: Array | None, bias: Array | None, weight: Array, shift: Array) -> tuple[Array, ...]:
    """x + added + bias (T, E), its layer normalisation (Ba et al. 2016), and the mean and reciprocal deviation (2, T)
    of each row.
    """
    y, stats = np.empty_like(x), np.empty((2, len(x)), x.dtype)
    total = x if added is None else np.empty_like(x)

    def norm(rows: slice) -> None:
        if added is not None:
            np.add(x[rows], added[rows], out=total[rows])
            total[rows] += bias
        stats[0, rows] = total[rows].mean(1)
        centred = total[rows] - stats[0, rows, None]
        stats[1, rows] = 1 / np.sqrt(np.einsum("te,te->t", centred, centred) / x.shape[1] + EPSILON)
        centred *= stats[1, rows, None]
        centred *= weight
        np.add(centred, shift, out=y[rows])

    _by_rows(*x.shape, norm)
    return total, y, stats


def norm_gradient(dy: Array, x: Array, stats: Array, weight: Array, dx: Array | None, totals: Any) -> Array:
    """The gradient by x of `add_norm` plus dx; adds to those by weight and shift."""
    found = np.empty_like(x)

    def gradient(rows: slice) -> tuple[Array, ...]:
        normal = (x[rows] - stats[0, rows, None]) * stats[1, rows, None]
        of_weight, of_shift = np.einsum("te,te->e", dy[rows], normal), dy[rows].sum(0)
        d = dy[rows] * weight
        normal *= np.einsum("te,te->t", d, normal)[:, None] / x.shape[1]
        d -= d.mean(1, keepdims=True)
        d -= normal
        d *= stats[1, rows, None]
        if dx is not None:
            d += dx[rows]
        found[rows] = d
        return of_weight, of_shift

    _by_rows(*x.shape, gradient, totals)
    return found


def _divisor(z: Array) -> Array:
    """z / GELU(z) by the formula with tanh (Hendrycks and Gimpel 2016): 2 / (1 + tanh u) = 1 + exp(-2 u)."""
    t = z * z
    t *= -0.044715 * GELU
    t -= GELU
    t *= z
    with np.errstate(over="ignore"):
        np.exp(t, out=t)
    t += 1
    return t


def gelu(x: Array, bias: Array) -> Array:
    """GELU of x + bias."""
    out = np.empty_like(x)

    def activate(rows: slice) -> None:
        z = x[rows] + bias
        np.divide(z, _divisor(z), out=out[rows])

    _by_rows(*x.shape, activate)
    return out


def gelu_gradient(dy: Array, x: Array, bias: Array) -> Array:
    """The gradient by x, in place of dy."""

    def gradient(rows: slice) -> None:
        z = x[rows] + bias
        share = 1 / _divisor(z)
        slope = z * z
        slope *= 3 * 0.044715 * GELU
        slope += GELU
        slope *= z
        slope *= 1 - share
        slope += 1
        slope *= share
        dy[rows] *= slope

    _by_rows(*x.shape, gradient)
    return dy


def cross_entropy(logits: Array, targets: Array, scale: float | None) -> Array:
    """Of each row log sum exp(logits) - logits[target], or 0 where the target is negative.

    With a scale, the gradient of `scale` times their sum takes the place of the logits.
    """

    def loss(rows: slice) -> Any:
        s, target = logits[rows], targets[rows]
        kept = target >= 0
        at = np.arange(len(s)), np.where(kept, target, 0)
        top = s.max(1)
        chosen = s[at] - top
        p = np.exp(s - top[:, None])
        sums = p.sum(1)
        if scale is not None:
            p *= np.where(kept, scale / sums, 0).astype(s.dtype)[:, None]
            p[at] -= np.where(kept, s.dtype.type(scale), 0)
            logits[rows] = p
        return np.where(kept, np.log(sums) - chosen, 0)

    return np.concatenate(_by_rows(*logits.shape, loss))


def adamw(p: Parameters, factor: Array, rate: float, decay: float, betas: Any, corrections: Any) -> None:
    """One step of AdamW with the gradients times `factor`. It leaves them 0.

    rate: the step; decay: of matrices, times the rate; corrections: 1 - beta ** step of both averages.
    """

    def step(part: slice) -> None:
        g, mean, variance = p.gradients[part] * factor, p.mean[part], p.variance[part]
        p.gradients[part] = 0
        mean *= betas[0]
        mean += (1 - betas[0]) * g
        variance *= betas[1]
        g *= g
        variance += (1 - betas[1]) * g
        size = np.sqrt(variance / corrections[1]) + 1e-8
        p.masters[part.start : min(part.stop, p.decayed)] *= 1 - rate * decay
        p.masters[part] -= rate / corrections[0] * mean / size

    _by_rows(p.masters.size, 1, step)
