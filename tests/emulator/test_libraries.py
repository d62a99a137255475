"""Compiled kernels are unloaded with the last plan that uses them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from cases import near

import flashkit
from flashkit import dispatch
from flashkit.backends.cuda_common import launch
from flashkit.backends.cuda_common.backend import VARIABLE
from flashkit.call import plans

from .calls import cupy
from .driver import DRIVER

if TYPE_CHECKING:
    from .device import Device

pytestmark = pytest.mark.slow

CUPY = "cupy_raw"
X = np.random.default_rng(0).standard_normal((1, 1, 24, 8), np.float32)


@pytest.fixture(autouse=True)
def few_plans(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.forget()  # of tests before this one
    plans.clear()
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 2)
    monkeypatch.setattr(launch, "_captured", [])
    monkeypatch.setenv(VARIABLE, "simt")  # whose kernels compile fast


def mask(i: int) -> Callable[..., Any]:
    return lambda b, h, q, k: q - k < 3 * i + 2


def call(i: int) -> np.ndarray:
    x = cupy.asarray(X)
    return flashkit.attention(x, x, x, mask_mod=mask(i), backend=CUPY).get()


def right(i: int) -> np.ndarray:
    return flashkit.attention(X, X, X, mask_mod=mask(i), backend="reference")


def loaded() -> int:
    """Libraries that the driver has loaded now."""
    gc.collect()
    launch._unload()
    return sum(isinstance(handle, dict) for handle in DRIVER._handles)


def test_libraries_are_unloaded() -> None:
    before = loaded()
    for i in range(3):
        np.testing.assert_allclose(call(i), right(i), atol=1e-5)
        assert loaded() - before <= 2
    np.testing.assert_allclose(call(0), right(0), atol=1e-5)
    dispatch.forget()
    plans.clear()
    assert loaded() <= before


def test_a_plan_keeps_its_kernels() -> None:
    x = cupy.asarray(X)
    planned = flashkit.plan(x, x, x, mask_mod=mask(7), backend=CUPY)
    _, vjp = flashkit.attention_vjp(x, x, x, mask_mod=mask(7), backend=CUPY)
    gradients = [each.get() for each in vjp(x)]
    for i in range(3):
        call(i)
    dispatch.forget()
    assert loaded() > 0
    np.testing.assert_allclose(planned(x, x, x).get(), right(7), atol=1e-5)
    near(vjp(x), gradients, atol=1e-5)


@pytest.mark.parametrize("way", ["attention", "plan", "vjp"])
def test_kernels_of_a_captured_launch_stay(way: str) -> None:
    """A CUDA graph launches them later, when no plan uses them any more."""
    before, x = loaded(), cupy.asarray(X)
    planned = flashkit.plan(x, x, x, mask_mod=mask(7), backend=CUPY) if way == "plan" else None
    with cupy.cuda.Stream(non_blocking=True) as stream:
        if planned is None:  # compiled, and checked, before the capture
            flashkit.attention_vjp(x, x, x, mask_mod=mask(7), backend=CUPY)[1](x)
        stream.begin_capture()
        if planned is not None:
            planned(x, x, x)
        elif way == "vjp":
            flashkit.attention_vjp(x, x, x, mask_mod=mask(7), backend=CUPY)[1](x)
        else:
            flashkit.attention(x, x, x, mask_mod=mask(7), backend=CUPY)
        stream.end_capture()
    del planned
    dispatch.forget()
    plans.clear()
    assert loaded() > before
    launch._captured.clear()
    assert loaded() <= before


def test_nothing_is_unloaded_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    call(0)
    dispatch.forget()
    plans.clear()
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "capturing", lambda stream: True)
        call(1)
        assert launch._unused
    call(2)
    assert not launch._unused
