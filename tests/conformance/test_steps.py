"""The steps of the algorithm, on data that a step left out changes by far: scores that grow, fall and stay along the
keys, ragged last tiles, rows without keys, splits of the keys, lengths, sinks, dropout.

Small, so that all of it runs with the tests that are not slow.
"""

from typing import Any

import cases
import numpy as np
import pytest

import flashkit

BATCH, HEADS, HEADS_KV, D, DV = 3, 4, 2, 12, 7

SLOPES = (0.0, 3.0, -40.0, 40.0, 900.0, -900.0, 9.0, 200.0)
"""By how much the scores of a row grow from the first key to the last: beyond the range of exp, too, and other rows of
the same vector stay as they are.
"""


def tensors(
    n_q: int, n_k: int, scale: float, dtype: Any, lead: tuple[int, int] = (BATCH, HEADS), group: int = HEADS // HEADS_KV
) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    of_keys = lead[0], lead[1] // group
    shapes = (*lead, n_q, D), (*of_keys, n_k, D), (*of_keys, n_k, DV), (*lead, n_q, DV)
    q, k, v, dout = (rng.standard_normal(shape) for shape in shapes)
    q[..., 0] = np.resize(SLOPES, n_q) / scale
    k[..., 0] = np.arange(n_k) / n_k
    v[..., 0] += np.arange(n_k) / n_k  # so that early and late keys differ in the mean
    return [x.astype(dtype) for x in (q, k, v, dout)]


def everything(n_q: int, n_k: int) -> dict[str, Any]:
    rng = np.random.default_rng(4)
    return {
        "softcap": 30.0, "bias": rng.standard_normal((HEADS, n_q, n_k)).astype(np.float32), "window": (n_k * 3 // 4, 5),
        "kv_lengths": np.array([n_k - 30, n_k, 0]), "sinks": (-1.0, 3.0, 0.5, 20.0), "dropout_p": 0.3,
        "seed": 2**40 + 5,
    }  # fmt: skip


STEPS: dict[str, Any] = {
    "plain": lambda n_q, n_k: {"scale": 0.3},
    "causal": lambda n_q, n_k: {"causal": True},
    "rows without keys": lambda n_q, n_k: {"causal": True, "q_offset": np.array([-n_q // 2, n_k // 2, -n_q])},
    "lengths and sinks": lambda n_q, n_k: {
        "kv_lengths": np.array([n_k - 7, n_k // 3, 0]), "sinks": (5.0, -np.inf, -2.0, 40.0),
    },
    "dropout": lambda n_q, n_k: {"dropout_p": 0.4, "seed": 2**33 + 1, "scale": -0.3},
    "everything": everything,
}  # fmt: skip

SIZES = {"rows": (77, 301), "panels": (9, 150), "few": (3, 1500), "one": (1, 700)}
"""Many queries, few more than a vector, and so few that they are decoded."""


@pytest.mark.parametrize("backend", cases.backends())
@pytest.mark.parametrize(
    "dtype", ["float64", "float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float16", "bfloat16"))]
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.one_in(2)
def test_steps(step: str, size: str, dtype: str, backend: str) -> None:
    n_q, n_k = SIZES[size]
    options = STEPS[step](n_q, n_k)
    check(tensors(n_q, n_k, options.get("scale", D**-0.5), dtype), options, dtype, backend)


@pytest.mark.parametrize("backend", cases.backends())
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("causal", [False, True])
def test_one_head_on_all_threads(causal: bool, dtype: str, backend: str) -> None:
    """The keys of a head are split where there are fewer heads than threads."""
    check(tensors(200, 700, D**-0.5, dtype, (1, 1), 1), {"causal": causal}, dtype, backend)


def check(given: list[np.ndarray], options: dict[str, Any], dtype: str, backend: str) -> None:
    """Out, lse and all gradients are those of the definition, gradients by lse included."""
    cases.skip_unless(backend)
    xp = cases.array_library(backend)
    q, k, v, dout = given
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    if "sinks" in options:
        options = {**options, "sinks": np.array(options["sinks"], lse_dtype)}
    dlse = np.random.default_rng(5).standard_normal(q.shape[:3]).astype(lse_dtype)
    problem, operands, _ = cases.prepare(q, k, v, **options)
    cases.skip_unless(backend, problem=problem)
    expected = cases.by_definition(problem.spec, operands, dout, dlse)

    own = {n: xp.asarray(x) if n in ("bias", "sinks") else x for n, x in options.items()}
    stored = [xp.asarray(x) for x in (q, k, v, dout, dlse)]
    wrt = ("q", "k", "v", "sinks")[: 3 + ("sinks" in options)]
    (out, lse), vjp = flashkit.attention_vjp(*stored[:3], return_lse=True, backend=backend, **own)
    got = [cases.to_numpy(x) for x in (out, lse, *vjp(*stored[3:], wrt=wrt))]
    cases.assert_conforms(cases.Results(*got, *[None] * (6 - len(got))), *expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", cases.backends())
@pytest.mark.parametrize("causal", [False, True])
def test_one_query_at_a_position_among_many_keys(causal: bool, backend: str) -> None:
    """Keys after the position are in tiles of their own, and the last tile is not whole."""
    cases.skip_unless(backend)
    xp = cases.array_library(backend)
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (1, 9000, 9000))
    k[:, :, 5001:] += 3 * q  # what must not be seen would dominate
    cases.skip_unless(backend, problem=cases.prepare(q, k, v, causal=causal, q_offset=0)[0])
    given = [xp.asarray(x) for x in (q, k, v)]
    shown = 5001 if causal else 9000
    for offset in (5000, 8999):
        last = min(offset + 1, 9000) if causal else shown
        s = np.einsum("bhqd,bhkd->bhqk", q, k[:, :, :last]).astype(np.float64) / 8**0.5
        p = np.exp(s - s.max(-1, keepdims=True))
        want = p / p.sum(-1, keepdims=True) @ v[:, :, :last]
        out = flashkit.attention(*given, causal=causal, q_offset=offset, backend=backend)
        np.testing.assert_allclose(cases.to_numpy(out), want, rtol=2e-4, atol=2e-5)
