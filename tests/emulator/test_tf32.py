"""TF32 gradients on Hopper on the emulated device: scales of heads, and when the fallback computes them."""

from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.backends.cuda_common.generation import Fallback
from flashkit.call.arguments import prepare

from .calls import cupy, moved

exhaustive = pytest.mark.exhaustive

FAST = ["tf32_maxima", "tf32_convert", "bwd_preprocess", "sm90_backward", "bwd_postprocess"]
FALLBACK = ["bwd_preprocess", "fp16x2_convert", "fp16x2_row_factors", "fp16x2_backward", "fp16x2_backward"]


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_backend.VARIABLE, "sm90")


def drawn(
    seed: int, batch: int, heads: tuple[int, int], n_q: int, n_k: int, dims: tuple[int, int]
) -> dict[str, np.ndarray]:
    """q, k, v and dout."""
    rng, (h, h_kv), (d, d_v) = np.random.default_rng(seed), heads, dims
    shapes = {"q": (h, n_q, d), "k": (h_kv, n_k, d), "v": (h_kv, n_k, d_v), "dout": (h, n_q, d_v)}
    return {name: rng.standard_normal((batch, *shape)).astype(np.float32) for name, shape in shapes.items()}


def gradients(arrays: dict[str, np.ndarray], **options: Any) -> list[np.ndarray]:
    """dq, dk and dv of the kernels."""
    given = {name: cupy.asarray(x) for name, x in arrays.items()}
    dout, dlse = given.pop("dout"), given.pop("dlse", None)
    options = moved(options)
    _, vjp = flashkit.attention_vjp(
        *given.values(), precision="tf32", backend="cupy_raw", return_lse=dlse is not None, **options
    )
    return [x.get().astype(np.float64) for x in (vjp(dout) if dlse is None else vjp(dout, dlse))]


def check(
    arrays: dict[str, np.ndarray], given: dict[str, np.ndarray] | None = None,
    magnitudes: dict[str, float] | None = None, **options: Any,
) -> None:  # fmt: skip
    """By the rule of cases.Yardstick, for which TF32 has the precision of float16.

    given: what the kernels get instead. magnitudes: factors on the arrays, of which those of q and k cancel.
    """
    factor = dict.fromkeys(arrays, 1.0) | (magnitudes or {})
    assert factor["q"] * factor["k"] == 1
    got = gradients({name: np.float32(factor[name]) * x for name, x in (given or arrays).items()}, **options)
    inputs = {name: x for name, x in arrays.items() if name != "dout"}
    problem, operands, _ = prepare(*inputs.values(), **options)
    exact, allowed = cases.by_definition(problem.spec, operands, arrays["dout"], dtype="float16")
    both = factor["v"] * factor["dout"]
    scaled = (x / scale for x, scale in zip(got, (both / factor["q"], both / factor["k"], factor["dout"]), strict=True))
    cases.assert_conforms(cases.Results(exact.out, exact.lse, *scaled, None), exact, allowed)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fallback, which would hide what is wrong."""
    monkeypatch.setattr(Fallback, "run", lambda *_: None)


def test_features(alone: None, device: Any, launched: list[str]) -> None:
    """Groups of heads, a mask, lengths with NaN behind them, rows that see nothing; head dims that are no multiple of
    16; dQ in order.
    """
    arrays, lengths = drawn(0, 2, (4, 2), 140, 330, (36, 52)), np.array([290, 5])
    arrays["dout"][:, 1] *= 8  # the second head of a group
    behind = {name: x.copy() for name, x in arrays.items()}
    for b, n in enumerate(lengths):
        behind["k"][b, :, n:] = behind["v"][b, :, n:] = np.nan
    options = {"kv_lengths": lengths, "q_offset": lengths - 140, "causal": True, "deterministic": True}
    check(arrays, behind, **options)
    assert launched[-len(FAST) :] == FAST


@pytest.mark.parametrize(
    "magnitudes",
    [
        {"q": 2.0**40, "k": 2.0**-40, "v": 2.0**-30, "dout": 2.0**-10},
        pytest.param({"q": 2.0**-30, "k": 2.0**30, "v": 2.0**60, "dout": 2.0**-20}, marks=exhaustive),
        pytest.param({"q": 1.0, "k": 1.0, "v": 1.0, "dout": 2.0**-60}, marks=exhaustive),
    ],
    ids=["large q", "large v", "small dout"],
)
def test_magnitudes(magnitudes: dict[str, float], alone: None, device: Any) -> None:
    """Wide heads, dQ in any order; heads and rows of different magnitudes."""
    arrays = drawn(1, 1, (2, 2), 100, 140, (128, 100))
    for name, x in arrays.items():
        x[:, 1] *= 2.0 ** (7 if name == "dout" else -3)
    arrays["dout"][:, :, ::3] *= 2.0**-9
    check(arrays, magnitudes=magnitudes)


@pytest.mark.parametrize("kind", ["rows", "tokens", "channels", "opposite", "NaN", "dlse"])
def test_fallback(kind: str, device: Any, launched: list[str]) -> None:
    """Where one scale does not suit a head, dS leaves the range of float16, an element is not finite, or the
    log-sum-exp has a gradient: each row is as exact as elsewhere.
    """
    arrays = drawn(2, 1, (1, 1), 80, 70, (32, 32))
    if kind == "rows":
        arrays["dout"][..., ::2, :] *= 2.0**-20
    elif kind == "tokens":
        arrays["v"][..., 60:, :] *= 2.0**40  # which the first rows do not see
    elif kind == "channels":
        arrays["q"][..., 3] *= 2.0**40
        arrays["k"][..., 3] *= 2.0**-40
    elif kind == "opposite":  # a row of values and its opposite, and few keys
        arrays["k"] *= 0
        arrays["v"][...] = np.where(np.arange(70) % 2, 1.99, -1.99)[:, None]
        arrays["dout"][...] = 1.99
    elif kind == "NaN":
        arrays["k"][..., 50, 1] = np.nan
    elif kind == "dlse":
        arrays["dlse"] = np.full((1, 1, 80), 2.0**-20, np.float32)
        arrays["dout"] *= 0
    got = gradients(arrays, causal=True, q_offset=0)
    wide = {name: x.astype(np.float64) for name, x in arrays.items()}
    q, k, v, dout, *dlse = wide.values()
    right = cases.definition(q, k, v, causal=True, q_offset=0)[1](dout, *dlse)
    assert launched[-len(FALLBACK) :] == FALLBACK and ("tf32_convert" in launched) == (kind != "dlse")
    for name, one, other in zip(("dq", "dk", "dv"), got, right):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other), name)
        size = np.abs(other).max(-1, keepdims=True)
        error = np.abs(one - other) / np.where(size > 0, size, 1)
        assert error[~np.isnan(error)].max(initial=0) <= 4e-3, name
