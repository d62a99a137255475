"""`flashkit cache warm`: compile the kernels of plain and causal attention before the first call needs them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import numpy as np

from .. import api, dispatch
from ..devices import host
from ..spec import dtype_of

DTYPES = ("float32", "float16", "bfloat16")
HEAD_DIMS = (64, 128)


class Warmed(NamedTuple):
    """One kind of call whose forward and backward pass were compiled and run once, or the error of that."""

    backend: str
    label: str
    seconds: float
    error: str = ""


def warm(dtypes: Sequence[str] = DTYPES, head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Warmed]:
    """Compile plain and causal attention for every combination of these, in parallel, on every available backend;
    yields each kind of call, as it is done. An error of one does not end the others.

    numba_cuda, which takes minutes and is never chosen by default, is left out unless FLASHKIT_BACKEND selects it.
    """
    calls = [(name, *what) for name in _compiled() for what in itertools.product(dtypes, head_dims, (False, True))]
    with ThreadPoolExecutor(host.cpu_count()) as pool:
        for done in as_completed([pool.submit(_one, *call) for call in calls]):
            yield done.result()


def _compiled() -> list[str]:
    """The available backends that compile kernels."""
    excluded = {"reference", "numba_cuda"} - {dispatch.forced()}
    backends = sorted(dispatch.registry().items())
    return [name for name, backend in backends if name not in excluded and backend.available()]


def _one(name: str, dtype: str, head_dim: int, causal: bool) -> Warmed:
    label = f"{dtype}, head dim {head_dim}{', causal' if causal else ''}"
    started = time.perf_counter()
    try:
        x = _array(dispatch.registry()[name].array_kinds[0], dtype, head_dim)
        _, vjp = api.attention_vjp(x, x, x, causal=causal, backend=name)
        vjp(x)
    except Exception as error:
        return Warmed(name, label, time.perf_counter() - started, f"{type(error).__name__}: {error}")
    return Warmed(name, label, time.perf_counter() - started)


def _array(kind: str, dtype: str, head_dim: int) -> Any:
    array = np.ones((1, 1, 16, head_dim), dtype_of(dtype))
    if kind == "numpy":
        return array
    import cupy

    return cupy.asarray(array)
