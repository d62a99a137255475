"""Each generation of kernels of both CUDA backends on the emulated device, against the definition in float64.

A test asserts which kernels it launched: a generation hands calls that it cannot take to an older one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import dispatch
from flashkit.backends.cuda_common import backend as cuda_backend

GENERATIONS = [(backend, each) for backend in ("cupy_raw", "numba_cuda") for each in ("sm90", "sm80", "simt")]


def generation_of(kernels: Iterable[str]) -> set[str]:
    """The generations that kernels belong to, of those that name one."""
    return {found[0] for name in kernels if (found := re.match(r"sm\d+|simt", name))}


@pytest.fixture(params=GENERATIONS, ids="-".join)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A backend and the generation that is forced."""
    monkeypatch.setenv(cuda_backend.VARIABLE, request.param[1])
    return request.param


def features(generation: str) -> dict[str, str]:
    """One specification with every feature that has code of its own in each kernel."""
    return cases.with_(
        dtype="float32" if generation == "simt" else "float16", heads="4:2", sizes="140x330", storage="swapped",
        dims="64", out="poisoned", causal="yes", kv_lengths="yes", sinks="yes", dlse="yes",
    )  # fmt: skip


def replace(call: cases.Call, **arrays: np.ndarray) -> None:
    import cupy

    for name, x in arrays.items():
        call.plain[name] = x
        getattr(call, name)[...] = cupy.asarray(x)


def test_features(kernels, launched):
    import cupy, time

    backend, generation = kernels
    call = cases.build(features(generation), cupy)
    call.options["deterministic"] = True
    for b, n in enumerate(call.plain["kv_lengths"]):
        call.k[b, :, n:] = call.v[b, :, n:] = np.nan
    t = time.process_time()
    got = cases.run(call, backend)
    print(kernels, "run", time.process_time() - t)
    t = time.process_time()
    got = cases.run(call, backend)
    print(kernels, "run again", time.process_time() - t)
    t = time.process_time()
    exp = cases.expected(call)
    print(kernels, "expected", time.process_time() - t, launched)
    print(cases.ratios(got, *exp))
    cases.assert_conforms(got, *exp)
    assert generation_of(launched) == {generation}
