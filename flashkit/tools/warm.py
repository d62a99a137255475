"""The kernels that most calls need, compiled before the first of them: what `flashkit cache warm` does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np

from .. import api, dispatch
from ..devices import host

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 128)


class Warmed(NamedTuple):
    """One kind of call: forward and backward pass compiled and run once, or the error that this gave."""

    backend: str
    label: str
    seconds: float
    error: str = ""


def warm(dtypes: Sequence[str] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Warmed]:
    """Compile for plain and causal attention of these dtypes and head dims, on the backends of `_compiling`, in
    parallel; yields each as it is done.
    """
    calls = [(name, *what) for name in _compiling() for what in itertools.product(dtypes, head_dims, (False, True))]
    with ThreadPoolExecutor(host.cpu_count()) as pool:
        for done in as_completed([pool.submit(_one, *call) for call in calls]):
            yield done.result()


def _compiling() -> list[str]:
    """Backends that compile; numba_cuda, which takes minutes and is not chosen by itself, where it is asked for."""
    left = {"reference", "numba_cuda"} - {dispatch.forced()}
    return [name for name, backend in sorted(dispatch.registry().items()) if name not in left and backend.available()]


def _one(name: str, dtype: str, head_dim: int, causal: bool) -> Warmed:
    label = f"{dtype}, head dim {head_dim}{', causal' if causal else ''}"
    started = time.perf_counter()
    try:
        x = _array(dispatch.registry()[name].array_kinds[0], dtype, head_dim)
        _, pull = api.attention_vjp(x, x, x, causal=causal, backend=name)
        pull(x)
    except Exception as error:  # the others may still be compiled
        return Warmed(name, label, time.perf_counter() - started, f"{type(error).__name__}: {error}")
    return Warmed(name, label, time.perf_counter() - started)


def _array(kind: str, dtype: str, head_dim: int) -> Any:
    if dtype == "bfloat16":
        import ml_dtypes

        numbers = np.ones((1, 1, 16, head_dim), ml_dtypes.bfloat16)
    else:
        numbers = np.ones((1, 1, 16, head_dim), dtype)
    if kind == "numpy":
        return numbers
    import cupy

    return cupy.asarray(numbers)
