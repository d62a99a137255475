"""The CUDA backends on a device: each generation of kernels against the definition, and what only a GPU has: streams,
graphs, arrays beyond 2^31 elements, device arrays as arguments. What needs no device is in test_cuda_kernels.py and
test_numba_cuda.py.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
from cases import FACTORS, with_
from filelock import FileLock

import flashkit
from flashkit import dispatch, mods, reference
from flashkit.backends.cuda_common import sm80_bwd_launch
from flashkit.backends.cuda_common.backend import VARIABLE
from flashkit.backends.cuda_common.verify import Fallback
from flashkit.backends.cupy_raw.backend import CupyRawBackend
from flashkit.backends.numba_cuda.backend import NumbaCudaBackend

pytestmark = pytest.mark.gpu

BACKENDS = CupyRawBackend(), NumbaCudaBackend()
if not any(backend.available() for backend in BACKENDS):  # two thousand tests need not be collected to be skipped
    reasons = (f"{backend.name}: {backend.available().reason}" for backend in BACKENDS)
    pytest.skip("; ".join(reasons), allow_module_level=True)

DESIGN = cases.pairwise(FACTORS)
HOPPER_DESIGN = cases.pairwise({
    **FACTORS, "dtype": ("bfloat16", "float16"), "sizes": ("130x200", "97x50", "70x330", "300x128"),
    "dims": ("64", "8", "40", "80", "96", "128", "192/128", "72/40"), "storage": ("packed", "swapped"),
    "out": ("new", "poisoned"), "page": ("16", "8"),
})  # fmt: skip
"""What Hopper's own kernels take, where most rows of DESIGN go to older ones: their sizes, head dims and strides."""

EVERY = [(backend.name, generation.name) for backend in BACKENDS for generation in backend.generations]

NAME = ""
"""The backend that a test is for: `kernels` sets it."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that names `generation` runs with each alone; others with each backend and what it chooses."""
    each = EVERY if "generation" in metafunc.fixturenames else [(backend.name, "") for backend in BACKENDS]
    metafunc.parametrize("kernels", each, ids=["-".join(filter(None, one)) for one in each], indirect=True)


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What a forced generation cannot do is refused, and the test skipped with its reason."""
    backend, generation = request.param
    monkeypatch.setattr(sys.modules[__name__], "NAME", backend)
    if backend not in dispatch.registry():
        pytest.skip(f"{backend} cannot be imported")
    cases.skip_unless(backend)
    if generation:
        monkeypatch.setenv(VARIABLE, generation)
    dispatch.forget()
    yield generation
    dispatch.forget()


@pytest.fixture
def generation(kernels: str) -> str:
    return kernels


def check(choice: cases.Choice) -> None:
    call = cases.build(choice, cases.array_library(NAME))
    cases.skip_unless(NAME, call)
    got = cases.run(call, NAME)
    cases.assert_conforms(got, *cases.expected(call))


def tensors(*shapes: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> list[Any]:
    import cupy

    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape).astype(cases.numpy_dtype(dtype))) for shape in shapes]


# --- every generation against the definition --------------------------------------------------------------------------


@pytest.mark.parametrize("row", range(len(DESIGN)))
def test_pairs_of_features(row: int, generation: str) -> None:
    check(DESIGN[row])


@pytest.mark.parametrize("row", range(len(HOPPER_DESIGN)))
def test_pairs_of_features_on_hopper(row: int, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own kernels, none of an older generation."""
    if generation != "sm90":
        pytest.skip("other generations take all rows of DESIGN")
    monkeypatch.setattr(Fallback, "run", lambda *_: pytest.fail("the call went to an older generation"))
    check(HOPPER_DESIGN[row])


@pytest.mark.parametrize("fused", [False, True], ids=["preprocess", "fused preprocess"])
@pytest.mark.parametrize("row", [i for i, row in enumerate(DESIGN) if row["dtype"] in ("float16", "bfloat16")])
def test_pairs_of_features_in_any_order(
    row: int, fused: bool, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dQ is accumulated in arbitrary order; rows are preprocessed before the kernel, or in it."""
    if (NAME, generation) != ("cupy_raw", "sm90"):
        pytest.skip("other kernels never accumulate dQ in order unasked")
    cases.arbitrary_dq_order(monkeypatch)
    if fused:
        cases.fused_preprocess(monkeypatch, sms=3)
    check(DESIGN[row])


@pytest.mark.parametrize("nan", [False, True], ids=["finite", "NaN"])
@pytest.mark.parametrize(("d", "d_v", "group"), [(64, 64, 1), (40, 24, 2), (128, 128, 1), (96, 80, 4), (128, 64, 1)])
def test_fused_preprocess(
    d: int, d_v: int, group: int, nan: bool, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of many heads are those with a separate preprocess, but for the order of the sums of delta and dQ; a
    non-finite row shows in the rows and keys that see it alone.
    """
    if (NAME, generation) != ("cupy_raw", "sm90"):
        pytest.skip("other kernels have no fused preprocess")
    n = 777
    q, dout = tensors((2, 16, n, d), (2, 16, n, d_v), dtype="bfloat16")
    k, v = tensors((2, 16 // group, n, d), (2, 16 // group, n, d_v), dtype="bfloat16", seed=1)
    dlse = tensors((2, 16, n), seed=2)[0]
    if nan:
        q[1, 7, 300, 0] = np.nan

    def gradients() -> list[Any]:
        vjp = flashkit.attention_vjp(q, k, v, causal=True, return_lse=True, backend=NAME)[1]
        return [x.get().astype(np.float64) for x in vjp(dout, dlse)]

    cases.arbitrary_dq_order(monkeypatch)
    separate = gradients()
    cases.fused_preprocess(monkeypatch)
    for got, right in zip(gradients(), separate):
        np.testing.assert_array_equal(np.isnan(got), np.isnan(right))
        assert np.isnan(got).any() == nan
        np.testing.assert_allclose(np.nan_to_num(got), np.nan_to_num(right), rtol=2**-6, atol=2**-7 * np.nanstd(right))


@pytest.mark.parametrize("masked", [False, True], ids=["full", "blocks"])
@pytest.mark.parametrize(("d", "group", "n_q", "n_k"), [(64, 1, 700, 900), (128, 2, 2300, 1500), (192, 1, 900, 700)])
def test_finished_work_tiles_are_counted(
    d: int, group: int, n_q: int, n_k: int, masked: bool, generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of each head when the kernel has ended: bwd_postprocess waits for that."""
    if (NAME, generation) != ("cupy_raw", "sm90"):
        pytest.skip("other kernels do not count them")
    from flashkit.backends.cuda_common.memory import Workspace

    cases.arbitrary_dq_order(monkeypatch)
    made: list[Any] = []
    allocate = Workspace.allocate

    def allocated(workspace: Workspace, *arguments: Any) -> Any:
        held = allocate(workspace, *arguments)
        begin, size = workspace.parts["preprocess_counters"]
        made.append(held[begin : begin + size].view("int32"))
        return held

    monkeypatch.setattr(Workspace, "allocate", allocated)
    q, dout = tensors(*[(3, 8, n_q, d)] * 2, dtype="bfloat16")
    k, v = tensors(*[(3, 8 // group, n_k, d)] * 2, dtype="bfloat16", seed=1)
    grid = np.random.default_rng(0).random((-(-n_q // 64), -(-n_k // 64))) < 0.3
    mask = flashkit.BlockMask.from_dense(grid, 64, 64, n_q, n_k) if masked else None
    flashkit.attention_vjp(q, k, v, block_mask=mask, backend=NAME)[1](dout)
    counters = made[-1]
    work_tiles, kv_heads = -(-n_k // 128) * (2 if d > 128 else 1), 3 * 8 // group
    finished = counters[1 + kv_heads : 1 + 2 * kv_heads]  # PreprocessCounters of sm90/dq_accum.cuh
    assert finished.get().tolist() == [work_tiles] * kv_heads


@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("d", [1, 8, 40, 64, 80, 96, 128, 160, 192, 256, 512])
def test_head_dims(d: int, dtype: str, generation: str) -> None:
    """Odd numbers of tokens, results written over NaN."""
    check(with_(dims=f"{d}", dtype=dtype, sizes="77x50", batch="1", out="poisoned", causal="yes"))


@pytest.mark.parametrize("storage", FACTORS["storage"])
@pytest.mark.parametrize("dims", ["64", "7/13"])
def test_strides(dims: str, storage: str, generation: str) -> None:
    check(with_(dims=dims, storage=storage, out="poisoned, with gaps", heads="4:2", dtype="float16"))


@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize(("n_q", "n_k", "d"), [(300, 400, 64), (1500, 1500, 128), (1, 5000, 128)])
def test_the_same_bits_each_time(n_q: int, n_k: int, d: int, dtype: str, generation: str) -> None:
    """With more blocks than fit on the device at once, and with keys that are split."""
    q, dout = tensors((2, 8, n_q, d), (2, 8, n_q, d), dtype=dtype)
    k, v = tensors((2, 2, n_k, d), (2, 2, n_k, d), dtype=dtype, seed=1)

    def once() -> list[bytes]:
        out, vjp = flashkit.attention_vjp(q, k, v, causal=True, deterministic=True, backend=NAME)
        return [x.get().tobytes() for x in (out, *vjp(dout))]

    first = once()
    assert all(once() == first for _ in range(3))


@pytest.mark.parametrize(("n", "d"), [(500, 64), (2000, 128), (2000, 256)])
def test_where_order_costs_nothing_it_is_kept(n: int, d: int, generation: str) -> None:
    """The newest kernels in CUDA C++ are deterministic unasked with short masked sequences."""
    if (NAME, generation) != ("cupy_raw", "sm90"):
        pytest.skip("others are asked for it")
    q, k, v, dout = tensors(*[(2, 8, n, d)] * 4, dtype="bfloat16")

    def once(**options: Any) -> list[bytes]:
        vjp = flashkit.attention_vjp(q, k, v, causal=True, backend=NAME, **options)[1]
        return [x.get().tobytes() for x in vjp(dout)]

    first = once(deterministic=True)
    assert all(once() == first for _ in range(4))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_hidden_nan_never_shows(dtype: str, generation: str) -> None:
    """NaN in a key and a value that some rows of a tile see and others do not, forward and backward."""
    q, k, v, dout = tensors((1, 2, 200, 32), (1, 2, 200, 32), (1, 2, 200, 32), (1, 2, 200, 32), dtype=dtype)
    clean = [x.get() for x in flashkit.attention_vjp(q, k, v, causal=True, backend=NAME)[1](dout)]
    k[..., 150, :] = v[..., 150, :] = np.nan
    out, vjp = flashkit.attention_vjp(q, k, v, causal=True, backend=NAME)
    dq, out = vjp(dout)[0].get(), out.get()
    assert np.isfinite(out[..., :150, :]).all()
    assert np.isnan(out[..., 150:, :]).all()
    atol = 1e-5 if dtype == "float32" else 4e-3
    np.testing.assert_allclose(dq[..., :150, :], clean[0][..., :150, :], rtol=1e-4, atol=atol)
    assert np.isnan(dq[..., 150:, :]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_infinity_is_not_nan(dtype: str, generation: str) -> None:
    """An infinite key hides itself from rows where its score is -inf; an infinite value makes its column infinite."""
    q, k, v = tensors((1, 2, 150, 64), (1, 2, 200, 64), (1, 2, 200, 64), dtype=dtype)
    k[0, 0, 70, 3], v[0, 1, 90, 5] = np.inf, -np.inf
    (right, _), _ = cases.definition(*(x.get().astype(np.float64) for x in (q, k, v)))
    got = flashkit.attention(q, k, v, backend=NAME).get()
    assert 40 < np.isfinite(right[0, 0]).all(-1).sum() < 110 and np.isneginf(right[0, 1, :, 5]).all()
    np.testing.assert_allclose(got.astype(np.float64), right, rtol=1e-5, atol=1e-5 if dtype == "float32" else 4e-3)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kind", ["alike", "rows", "tiles", "far", "huge", "zeros"])
def test_float32_is_kept_at_any_magnitude(kind: str, d: int, generation: str) -> None:
    """A relative error (root mean square) of 8e-7: where rows or tiles of a call differ by many powers of ten, where
    magnitudes of q and k make up for each other, and near the ends of float32's range.
    """
    rng = np.random.default_rng(1)
    q, k, v = (x.get().astype(np.float64) for x in tensors((1, 4, 300, d), (1, 2, 500, d), (1, 2, 500, d)))
    if kind == "rows":
        q *= 10.0 ** rng.uniform(-6, 0, (1, 4, 300, 1))
        v *= 10.0 ** rng.uniform(-3, 3, (1, 2, 500, 1))
    elif kind == "tiles":
        scale = 10.0 ** np.repeat(rng.uniform(-12, 0, (1, 2, 10, 1)), 50, 2)
        k, v = k * scale, v * scale[:, ::-1]
    elif kind == "far":
        q, k, v = q * 1e-25, k * 1e25, v * 1e-30
    elif kind == "huge":
        q, k, v = q * 1e-30, k * 1e30, v * 1e32
    elif kind == "zeros":
        q[:, :, 100:200], k[:, 0, 128:300], v[:, 1] = 0, 0, 0
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    (right, _), _ = cases.definition(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
    import cupy

    got = flashkit.attention(*map(cupy.asarray, (q, k, v)), causal=True, backend=NAME).get().astype(np.float64)
    assert np.isfinite(got).all()
    for head in range(4):
        if not (kind == "zeros" and head >= 2):
            error = np.sqrt(((got - right)[0, head] ** 2).mean() / (right[0, head] ** 2).mean())
            assert error <= 8e-7, (head, error)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("magnitude", [1.0, 1e-12])
def test_float32_gradients_are_exact(magnitude: float, d: int, generation: str) -> None:
    """Relative errors (root mean square) of 1e-6, whatever the magnitude of dO."""
    q, k, v, dout = tensors((1, 4, 300, d), (1, 2, 500, d), (1, 2, 500, d), (1, 4, 300, d))
    dout *= np.float32(magnitude)
    wide = [x.get().astype(np.float64) for x in (q, k, v, dout)]
    right = cases.definition(*wide[:3], causal=True)[1](wide[3])
    got = flashkit.attention_vjp(q, k, v, causal=True, backend=NAME)[1](dout)
    for name, one, other in zip(("dq", "dk", "dv"), got, right):
        error = np.sqrt(((one.get() - other) ** 2).mean() / (other**2).mean())
        assert error <= 1e-6, (name, error)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("kind", ["tokens", "channels", "hidden", "large", "small"])
def test_float32_of_mixed_magnitudes(kind: str, d: int, generation: str) -> None:
    """Each row and each column of results and gradients is as near as plain arithmetic in float32 brings it: where
    tokens, or channels, have magnitudes between 1e-12 and 1e18, where tokens of 1e18 are hidden, and where all are
    large or small.
    """
    rng = np.random.default_rng(2)
    q, k, v, dout = (
        x.get().astype(np.float64) for x in tensors((1, 4, 300, d), (1, 2, 500, d), (1, 2, 500, d), (1, 4, 300, d))
    )
    mixed, options = np.array([1e-12, 1.0, 1e6, 1e18]), dict[str, Any](causal=True)
    if kind == "tokens":
        v *= rng.choice(mixed[:3], (1, 2, 500, 1))
        dout *= rng.choice(mixed, (1, 4, 300, 1))
    elif kind == "channels":
        of_k, of_v = rng.choice(mixed[:3], d), rng.choice(mixed[:3], d)
        q, k, v, dout = q / of_k, k * of_k, v * of_v, dout / of_v
    elif kind == "hidden":
        seen = np.ones(500, bool)
        seen[70:90] = seen[490:] = False
        k[..., ~seen, :] *= 1e12
        v[..., ~seen, :] *= 1e18
        options = {"mask": seen}
    elif kind == "large":
        q, k, v, dout = q * 1e-6, k * 1e6, v * 1e18, dout * 1e12
    elif kind == "small":
        q, k, v, dout = q * 1e6, k * 1e-6, v * 1e-12, dout * 1e-12
    arrays = [x.astype(np.float32) for x in (q, k, v, dout)]

    import cupy

    def computed(backend: str, arrays: list[Any]) -> list[np.ndarray]:
        given = {name: x if isinstance(x, bool) or backend != NAME else cupy.asarray(x) for name, x in options.items()}
        out, vjp = flashkit.attention_vjp(*arrays[:3], **given, backend=backend)
        results = (out, *vjp(arrays[3])[:3])
        return [np.asarray(x if isinstance(x, np.ndarray) else x.get(), np.float64) for x in results]

    right = computed("reference", [x.astype(np.float64) for x in arrays])
    plain = computed("reference", arrays)
    got = computed(NAME, [*map(cupy.asarray, arrays)])
    for name, one, other, exact in zip(("out", "dq", "dk", "dv"), got, plain, right):
        for axis in (2, 3):
            size = np.sqrt((exact**2).mean(axis)) + 1e-300
            error, usual = (np.sqrt(((x - exact) ** 2).mean(axis)) / size for x in (one, other))
            worst = np.unravel_index((error / (4 * usual + 2e-6)).argmax(), error.shape)
            assert (error <= 4 * usual + 2e-6).all(), (name, axis, worst, error[worst], usual[worst])


@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_float32_that_is_not_finite(value: float, where: str, generation: str) -> None:
    """What the definition gives: NaN and infinities where they belong, and nowhere else."""
    arrays = dict(zip("qkv", tensors((1, 2, 150, 64), (1, 2, 300, 64), (1, 2, 300, 64))))
    arrays[where][0, 0, 100, 7] = arrays[where][0, 1, 20, 3] = value
    for options in ({}, {"causal": True}):
        with np.errstate(invalid="ignore"):
            wide = (x.get().astype(np.float64) for x in arrays.values())
            right, _ = cases.definition(*wide, **options)
        got = flashkit.attention(*arrays.values(), **options, return_lse=True, backend=NAME)
        for one, other in zip(got, right):
            np.testing.assert_allclose(one.get().astype(np.float64), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("d", [64, 128])
def test_tf32_has_eleven_bits(d: int, generation: str) -> None:
    q, k, v = tensors((2, 2, 500, d), (2, 2, 700, d), (2, 2, 700, d))
    (right, _), _ = cases.definition(*(x.get().astype(np.float64) for x in (q, k, v)))
    got = flashkit.attention(q, k, v, precision="tf32", backend=NAME).get().astype(np.float64)
    error = np.sqrt(((got - right) ** 2).mean() / (right**2).mean())
    assert error <= (8e-7 if generation == "simt" else 8e-4)


@pytest.mark.parametrize("kind", ["zeros", "one", "steps"])
def test_tf32_of_uneven_values(kind: str, generation: str) -> None:
    """A token's result is as exact where tiles of values are zeros, or hold others that are far greater or smaller."""
    q, k, v = tensors(*[(2, 8, 500, 64)] * 3)
    if kind == "zeros":
        v[:, :, 350:] = 0
    elif kind == "one":
        v[:, :, -1] *= 1e5
    else:
        v[:, :, :128] *= 1e-4
        v[:, :, 256:384] *= 1e3
    (right, _), _ = cases.definition(*(x.get().astype(np.float64) for x in (q, k, v)), causal=True)
    got = flashkit.attention(q, k, v, causal=True, precision="tf32", backend=NAME).get().astype(np.float64)
    errors = ((got - right) ** 2).mean(-1) / (right**2).mean(-1)
    assert np.sqrt(errors.mean()) <= 1e-3


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "deterministic": True}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_tf32_gradients_have_eleven_bits(d: int, options: dict[str, Any], generation: str) -> None:
    """Of many tiles, in heads of very different magnitudes."""
    q, k, v, dout = tensors((2, 8, 1500, d), (2, 4, 1700, d), (2, 4, 1700, d), (2, 8, 1500, d))
    v[:, 1] *= np.float32(1e12)
    dout[:, 4:] *= np.float32(1e-20)
    masks = {name: x for name, x in options.items() if name == "causal"}
    wide = [x.get().astype(np.float64) for x in (q, k, v, dout)]
    right = flashkit.attention_vjp(*wide[:3], **masks, backend="cpu")[1](wide[3])
    vjp = flashkit.attention_vjp(q, k, v, precision="tf32", **options, backend=NAME)[1]
    first = [x.get() for x in vjp(dout)]
    for _ in range(3):
        for name, one, other, before in zip(("dq", "dk", "dv"), vjp(dout), right, first):
            error = np.sqrt(((one.get() - other) ** 2).mean((2, 3)) / (other**2).mean((2, 3)))
            assert error.max() <= (2e-6 if generation == "simt" else 1e-3), (name, error)
            assert "deterministic" not in options or np.array_equal(one.get(), before)


@pytest.mark.parametrize("kind", ["rows", "channels", "hidden", "opposite"])
def test_tf32_gradients_of_mixed_magnitudes(kind: str, generation: str) -> None:
    """Each row, or channel, is as exact, where one scale does not suit a head or dS leaves the range of float16."""
    axis = 2 if kind == "channels" else 3
    q, k, v, dout = tensors((1, 4, 600, 64), (1, 2, 700, 64), (1, 2, 700, 64), (1, 4, 600, 64))
    if kind == "rows":
        dout[:, :, ::2] *= np.float32(1e-12)
    elif kind == "channels":
        q[..., 3] *= np.float32(1e12)
        k[..., 3] *= np.float32(1e-12)
    elif kind == "hidden":
        v[:, :, 650:] *= np.float32(1e12)
    else:
        k *= np.float32(0)
        v[:, :, ::2], v[:, :, 1::2], dout[...] = 1.99, -1.99, 1.99
    wide = [x.get().astype(np.float64) for x in (q, k, v, dout)]
    right = flashkit.attention_vjp(*wide[:3], causal=True, q_offset=0, backend="cpu")[1](wide[3])
    vjp = flashkit.attention_vjp(q, k, v, causal=True, q_offset=0, precision="tf32", backend=NAME)[1]
    for name, one, other in zip(("dq", "dk", "dv"), vjp(dout), right):
        rows = slice(8, None) if name == "dq" else slice(500)  # few pairs may cancel
        error, size = (np.sqrt((x**2)[:, :, rows].mean(axis)) for x in (one.get() - other, other))
        assert (error <= 4e-3 * size).all(), (name, (error / size).max())


def test_heads_in_groups(monkeypatch: pytest.MonkeyPatch, generation: str) -> None:
    """Backward, a head at a time in the cache, the last one in the other order; odd tiles, rows that see nothing."""
    if generation != "sm80":
        pytest.skip("takes all heads together")
    shapes = (2, 6, 700, 64), (2, 3, 650, 64), (2, 3, 650, 64), (2, 6, 700, 64)
    q, k, v, dout = tensors(*shapes, dtype="float16")

    def gradients() -> list[np.ndarray]:
        return [x.get() for x in flashkit.attention_vjp(q, k, v, causal=True, backend=NAME)[1](dout)]

    together = gradients()
    monkeypatch.setattr(sm80_bwd_launch, "_L2_BYTES", 0)
    apart = gradients()
    for one, other, again in zip(together, apart, gradients()):
        np.testing.assert_array_equal(other, again)
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=0, atol=4e-3)
    np.testing.assert_array_equal(together[0][0], apart[0][0])  # of other batch entries the order is the same


# --- what is chosen ---------------------------------------------------------------------------------------------------


def test_an_unknown_generation_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "sm70")
    with pytest.raises(ValueError, match="simt"):
        CupyRawBackend().allowed()


def test_explain_names_the_generation(generation: str) -> None:
    q, k, v = tensors((1, 2, 70, 64), (1, 2, 70, 64), (1, 2, 70, 64), dtype="float16")
    assert generation in str(flashkit.explain(q, k, v, backend=NAME))


# --- arguments on the device ------------------------------------------------------------------------------------------


def test_lengths_and_offsets_on_the_device() -> None:
    import cupy

    q, k, v = tensors((3, 2, 40, 16), (3, 2, 90, 16), (3, 2, 90, 16))
    lengths, offsets = np.array([90, 0, 33]), np.array([5, -3, 50])
    for options in ({"q_offset": offsets}, {"kv_lengths": lengths, "q_offset": offsets}):
        here = flashkit.attention(q, k, v, causal=True, **options, backend=NAME)
        there = {name: cupy.asarray(x) for name, x in options.items()}
        there = flashkit.attention(q, k, v, causal=True, **there, backend=NAME)
        np.testing.assert_array_equal(here.get(), there.get())
    one = q[:, :, :1]
    here, there = (
        flashkit.attention(one, k, v, causal=True, kv_lengths=given, backend=NAME)
        for given in (lengths, cupy.asarray(lengths))
    )
    np.testing.assert_array_equal(here.get(), there.get())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n_q", [1, 70])
def test_lengths_on_the_device_are_bounded(n_q: int, dtype: str, generation: str) -> None:
    """By the kernels of both passes, which read the same lengths, and in the offset that follows from lengths."""
    import cupy

    n_k, wrong = 100, [10**6, 2**32 + 7, -4, -(2**32) + 2**31 - 1]
    lengths, shape_q, shape_k = cupy.asarray(wrong), (4, 2, n_q, 64), (4, 1, n_k, 64)
    q, k, v, dout = tensors(shape_q, shape_k, shape_k, shape_q, dtype=dtype)
    options = {"causal": True, "deterministic": True, "backend": NAME}
    if n_q > 1:  # the default offset is for one query
        options["q_offset"] = cupy.clip(lengths, 0, n_k) - n_q
    right, right_vjp = flashkit.attention_vjp(q, k, v, kv_lengths=[n_k, n_k, 0, 0], **options)
    out, vjp = flashkit.attention_vjp(q, k, v, kv_lengths=lengths, **options)
    plain = flashkit.attention(q, k, v, kv_lengths=lengths, **options)
    lengths[...] = cupy.asarray([1, 2, 3, 4])
    np.testing.assert_array_equal(out.get(), right.get())
    np.testing.assert_array_equal(plain.get(), right.get())
    for got, expected in zip(vjp(dout), right_vjp(dout), strict=True):
        np.testing.assert_array_equal(got.get(), expected.get())


def test_positions_on_the_device_stay_within_tables() -> None:
    """An index that is in range for all lengths that fit is so for those that do not."""
    import cupy

    q, k, v = tensors((2, 1, 1, 8), (2, 1, 7, 8), (2, 1, 7, 8))
    score = mods.score(lambda s, b, h, q, k, *, t: s + t[q + 1], t=cupy.arange(8.0))
    got = flashkit.attention(q, k, v, kv_lengths=cupy.asarray([2**40, -(2**40)]), score_mod=score, backend=NAME).get()
    right = flashkit.attention(q, k, v, kv_lengths=[7, 0], score_mod=score, backend=NAME).get()
    np.testing.assert_array_equal(got, right)


def test_arrays_of_modifications_from_either_library() -> None:
    import cupy

    q, k, v = tensors((1, 2, 50, 16), (1, 2, 50, 16), (1, 2, 50, 16))
    ids = np.repeat(np.arange(5), 10)
    results = [
        flashkit.attention(q, k, v, mask_mod=mods.document(x), backend=NAME).get() for x in (ids, cupy.asarray(ids))
    ]
    np.testing.assert_array_equal(*results)


# --- streams, threads, graphs -----------------------------------------------------------------------------------------


def test_two_streams_from_two_threads(generation: str) -> None:
    """Each thread on its own stream, with inputs that are made on it just before: a launch on another stream would
    read them unfinished."""
    import cupy

    q, k, v = tensors((2, 4, 500, 64), (2, 4, 500, 64), (2, 4, 500, 64), dtype="float16")
    right = {scale: flashkit.attention(q * scale, k, v, causal=True, backend=NAME).get() for scale in (1, 2, 3, 4)}
    start = threading.Barrier(2)

    def work(scales: tuple[int, ...]) -> bool:
        start.wait()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for _ in range(30):
                for scale in scales:
                    big = cupy.broadcast_to(q * scale, (20, *q.shape)).copy()  # keeps this stream busy
                    out = flashkit.attention(big[-1], k, v, causal=True, backend=NAME)
                    if not (out == cupy.asarray(right[scale])).all():
                        return False
            stream.synchronize()
        return True

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, ((1, 2), (3, 4))))


@pytest.mark.parametrize("n_q", [400, 1])
def test_gradients_on_two_streams_from_two_threads(n_q: int, generation: str) -> None:
    """What a pass needs in between is its own: scratch memory that one thread gives back is soon another's."""
    import cupy

    q, dout = tensors((2, 16, n_q, 64), (2, 16, n_q, 64), dtype="float16")
    k, v = tensors((2, 8, 3000, 64), (2, 8, 3000, 64), dtype="float16", seed=1)

    def compute(scale: int) -> list[Any]:
        out, vjp = flashkit.attention_vjp(q * scale, k, v, deterministic=True, backend=NAME)
        return [out, *vjp(dout)]

    right = {scale: [x.get() for x in compute(scale)] for scale in (1, 2)}
    start = threading.Barrier(2)

    def work(scale: int) -> bool:
        start.wait()
        with cupy.cuda.Stream(non_blocking=True):
            results = [compute(scale) for _ in range(20)]
            return all((x.get() == y).all() for got in results for x, y in zip(got, right[scale]))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(work, (1, 2)))


@pytest.mark.parametrize("captured", [False, True])
def test_other_streams_wait_for_what_a_plan_copies(captured: bool) -> None:
    """Lengths on the host, whose copy is held up on the stream of the plan."""
    import cupy

    (q,) = tensors((2, 1, 20, 16))
    lengths, held = np.array([7, 20]), threading.Event()
    right = flashkit.attention(q.get(), q.get(), q.get(), kv_lengths=lengths, backend="cpu")
    flashkit.attention(q, q, q, kv_lengths=np.array([20, 7]), backend=NAME)  # compiles
    out = cupy.full_like(q, np.nan)
    first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        first.launch_host_func(lambda _: held.wait(1), None)
        planned = flashkit.plan(q, q, q, kv_lengths=lengths, backend=NAME)
        planned(q, q, q)
    with second:
        if captured:
            second.begin_capture()
        planned(q, q, q, out=out)
        if captured:
            second.end_capture().launch()
        held.set()
        second.synchronize()
    np.testing.assert_allclose(out.get(), right, atol=1e-5)


def test_a_call_on_another_device(generation: str) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    arrays = tensors((1, 2, 70, 64), (1, 2, 70, 64), (1, 2, 70, 64), dtype="float16")
    right = flashkit.attention(*arrays, causal=True, backend=NAME).get()
    with cupy.cuda.Device(1):
        there = [cupy.asarray(x.get()) for x in arrays]
        out, vjp = flashkit.attention_vjp(*there, causal=True, backend=NAME)
        np.testing.assert_array_equal(out.get(), right)
        assert all(x.device.id == 1 for x in (out, *vjp(out)))
    with pytest.raises(ValueError, match="current CUDA device, 0, got one on device 1"):
        flashkit.attention(*there, causal=True, backend=NAME)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (100, 0)}], ids=["plain", "window"])
@pytest.mark.parametrize(("n_q", "n_k"), [(130, 200), (1, 4000)], ids=["prefill", "decode"])
def test_a_captured_call_replays(n_q: int, n_k: int, options: dict[str, Any], dtype: str, generation: str) -> None:
    import cupy

    shapes = (2, 4, n_q, 64), (2, 2, n_k, 64), (2, 2, n_k, 64), (2, 4, n_q, 64)
    q, k, v, dout = tensors(*shapes, dtype=dtype)
    lengths = cupy.asarray([n_k, n_k - 80])

    def compute() -> list[Any]:
        more = {"kv_lengths": lengths, "q_offset": lengths - n_q, "deterministic": True, "backend": NAME}
        out, vjp = flashkit.attention_vjp(q, k, v, **options, **more)
        return [out, *vjp(dout)]

    compute()  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        compute()
        stream.synchronize()
        stream.begin_capture()
        results = compute()
        graph = stream.end_capture()
        for seed in range(1, 4):
            new = tensors(*shapes, dtype=dtype, seed=seed)
            for array, values in zip((q, k, v, dout), new):
                array[...] = values
            lengths[...] = cupy.asarray([n_k - seed, n_k * seed // 4])
            for x in results:
                x.fill(np.nan)
            graph.launch()
            stream.synchronize()
            replayed = [x.get() for x in results]
            for got, right in zip(replayed, compute()):
                np.testing.assert_array_equal(got, right.get())


def test_a_kept_call_reads_the_arrays_that_it_gets(generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes, biases and masks of one form, each time others; a graph that recorded such a call needs no one to hold
    them.
    """
    import cupy

    from flashkit import api
    from flashkit.call import plans

    rng, shape = np.random.default_rng(3), (2, 4, 128, 64)
    q, k, v = tensors(shape, shape, shape, dtype="float16")
    blocks = flashkit.BlockMask.from_dense(np.array([[True, False], [True, True]]), 64, 64)

    def arrays() -> dict[str, Any]:
        mask = cupy.asarray(rng.random((2, 1, 128, 128)) < 0.8)
        bias, slopes = (cupy.asarray(rng.standard_normal(n, dtype=np.float32)) for n in ((4, 1, 128), 4))
        return {"alibi_slopes": slopes, "bias": bias, "mask": mask}

    options = {"block_mask": blocks, "backend": NAME}
    flashkit.attention(q, k, v, **arrays(), **options)
    given, stream, out = arrays(), cupy.cuda.Stream(non_blocking=True), cupy.empty_like(q)
    with monkeypatch.context() as patch:
        patch.setattr(api, "prepare", None)
        got = flashkit.attention(q, k, v, **given, **options).get()
        with stream:
            stream.begin_capture()
            flashkit.attention(q, k, v, out=out, **given, **options)
            graph = stream.end_capture()
    with mock.patch.object(plans, "key_of", return_value=None):
        right = flashkit.attention(q, k, v, **given, **options).get()
    np.testing.assert_array_equal(got, right)
    del given
    gc.collect()
    others = [arrays() for _ in range(100)]  # as CuPy's pool hands memory out again
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), right)
    assert len(others) == 100


def test_a_graph_outlives_the_plan(generation: str) -> None:
    """And so do the copies of NumPy arrays that it made."""
    import cupy

    q, k, v = tensors((2, 4, 128, 64), (2, 4, 192, 64), (2, 4, 192, 64), dtype="float16")
    grid = np.array([[True, False, True], [False, True, False]])
    planned = flashkit.plan(q, k, v, block_mask=flashkit.BlockMask.from_dense(grid, 64, 64), backend=NAME)
    right, out = planned(q, k, v).get(), cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        planned(q, k, v, out=out)
        graph = stream.end_capture()
    del planned
    gc.collect()
    others = [cupy.full(128, 7, np.int32) for _ in range(1000)]  # as CuPy's pool hands memory out again
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(out.get(), right)
    assert len(others) == 1000


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("n_q", "heads"), [(130, 36), (1, 4)])
def test_a_replayed_call_writes_to_no_memory_of_others(n_q: int, heads: int, dtype: str, generation: str) -> None:
    """What a call allocates and drops, like a log-sum-exp that nobody asked for, is used again by each replay."""
    import cupy

    q, k, v = tensors((2, heads, n_q, 64), (2, heads // 2, 4000, 64), (2, heads // 2, 4000, 64), dtype=dtype)
    out, lengths = cupy.empty_like(q), cupy.asarray([3000, 4000], np.int32)
    calls = [
        lambda: flashkit.attention(q, k, v, out=out, backend=NAME),
        lambda: flashkit.attention(q, k, v, kv_lengths=lengths, out=out, backend=NAME),
    ]
    for call in calls:
        call()
        right = out.get()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
            sizes = [1 << i for i in range(9, 24)] * 4
            others = [cupy.full(size // 4, 7, np.int32) for size in sizes]  # as CuPy's pool hands memory out again
            out.fill(np.nan)
            graph.launch()
            stream.synchronize()
            assert all((x == 7).all() for x in others)
        np.testing.assert_array_equal(out.get(), right)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_turn() -> Iterator[None]:
    """For tests that take much of a device's memory: one after the other, whichever processes they run in."""
    with FileLock(Path(tempfile.gettempdir()) / "flashkit-tests-large.lock"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("in_turn")
def test_more_than_2_to_the_31_elements(generation: str) -> None:
    """Offsets beyond 32 bits in every tensor: the last head of a long batch, against the same head alone."""
    import cupy

    n, d, batch, heads = 1000, 128, 64, 270  # 2.2e9 elements a tensor
    if cupy.cuda.Device().mem_info[0] < 60e9:
        pytest.skip("takes 45 GB of device memory")
    shape = (batch, heads, n, d)
    assert np.prod(shape) > 2**31
    small = tensors((1, 1, n, d), (1, 1, n, d), (1, 1, n, d), (1, 1, n, d), dtype="float16")
    big = [cupy.zeros(shape, np.float16) for _ in range(4)]
    for whole, part in zip(big, small):
        whole[-1:, -1:] = part
    q, k, v, dout = (x[-1:, -2:] for x in big)  # starts beyond 2^31 elements from the array's first
    out, vjp = flashkit.attention_vjp(q, k, v, causal=True, backend=NAME)
    right, right_vjp = flashkit.attention_vjp(*small[:3], causal=True, backend=NAME)
    # Not the same bits: how many parts the keys are split into depends on how many heads there are.
    np.testing.assert_allclose(out[:, 1:].get(), right.get(), rtol=0, atol=4e-3)
    for got, x in zip(vjp(dout), right_vjp(small[3])):
        np.testing.assert_allclose(got[:, 1:].get(), x.get(), rtol=0, atol=0.02)
    # And with the strides of the whole within one call.
    whole = flashkit.attention(*big[:3], causal=True, backend=NAME)
    np.testing.assert_allclose(whole[-1:, -1:].get(), right.get(), rtol=0, atol=4e-3)
    assert not whole[0].any()
    del big, whole
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("dtype", FACTORS["dtype"])
@pytest.mark.parametrize("d", [64, 128])
def test_results_of_what_sees_nothing(d: int, dtype: str, generation: str) -> None:
    """Exact zeros where a block of threads has no tile to go over, though it began to load operands; many blocks, so
    that loading takes longer than finding that out.
    """
    q, k, v, dout = tensors((4, 16, 1500, d), (4, 16, 2, d), (4, 16, 2, d), (4, 16, 1500, d), dtype=dtype)
    out = q.copy()
    out[:] = np.nan
    options = {"return_lse": True, "backend": NAME}

    def read(x: Any) -> np.ndarray:
        return x.get().astype(np.float32)

    (_, lse), vjp = flashkit.attention_vjp(q, k, v, causal=True, out=out, **options)
    hidden, seen = slice(0, 1498), slice(1498, None)  # the last query sees both keys, the one before it one
    assert not read(out)[..., hidden, :].any() and np.isneginf(read(lse)[..., hidden]).all()
    assert np.isfinite(read(lse)[..., seen]).all() and read(out)[..., seen, :].any(-1).all()
    dq = read(vjp(dout)[0])
    assert not dq[..., hidden, :].any() and dq[..., -1, :].any(-1).all()

    out[:] = np.nan
    (_, lse), vjp = flashkit.attention_vjp(q, k[:, :, :0], v[:, :, :0], out=out, **options)
    assert not read(out).any() and np.isneginf(read(lse)).all() and not read(vjp(dout)[0]).any()
    with suppress(flashkit.UnsupportedError):  # no queries may be for another generation
        vjp = flashkit.attention_vjp(k[:, :, :0], q, q, backend=NAME)[1]
        assert not any(read(x).any() for x in vjp(v[:, :, :0])[1:])


@pytest.mark.parametrize("n", [1, 31, 33, 1000, 4097])
def test_lengths_of_every_remainder(n: int, generation: str) -> None:
    q, k, v = tensors((1, 8, n, 64), (1, 4, n + 3, 64), (1, 4, n + 3, 64), dtype="float16")
    call = {"q": q.get(), "k": k.get(), "v": v.get(), "causal": True}
    right = flashkit.attention(**call, backend="cpu")
    got = flashkit.attention(q, k, v, causal=True, backend=NAME).get()
    error = np.abs(got.astype(np.float64) - right.astype(np.float64)).max()
    assert error < 4e-3, error


BEHIND = mods.score(lambda s, b, h, q, k: flashkit.where(q - k > 0, s, s - 1))


@pytest.mark.parametrize("options", [{"window": (2**40 - 100, None)}, {"score_mod": BEHIND}], ids=["mask", "score"])
def test_positions_beyond_32_bits(options: dict[str, Any], generation: str) -> None:
    """Short cuts for near positions are not taken where they are far; told on the device, no host knows."""
    import cupy

    q, k, v = tensors((1, 2, 200, 64), (1, 2, 300, 64), (1, 2, 300, 64), dtype="float16")
    call = {"q": q.get(), "k": k.get(), "v": v.get(), **options}
    right = flashkit.attention(**call, q_offset=2**40, backend="cpu")
    got = flashkit.attention(q, k, v, **options, q_offset=cupy.asarray([2**40]), backend=NAME).get()
    assert np.abs(got.astype(np.float64) - right.astype(np.float64)).max() < 8e-3


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("falling", [False, True], ids=["rising", "falling"])
def test_maxima_that_change_hugely_along_the_keys(d: int, falling: bool, generation: str) -> None:
    """A softmax that expects the maximum to stay near the first tile's has to notice that it does not."""
    import cupy

    q, k, v = tensors((1, 2, 700, d), (1, 2, 900, d), (1, 2, 900, d))
    k *= cupy.linspace(60, 0.1, 900, dtype="float32")[:: 1 if falling else -1, None]
    q, k, v = ((x * factor).astype("float16") for x, factor in ((q, 3), (k, 1), (v, 1)))
    for causal in (False, True):
        right = flashkit.attention(q.get(), k.get(), v.get(), causal=causal, backend="cpu")
        got = flashkit.attention(q, k, v, causal=causal, backend=NAME).get()
        assert np.abs(got.astype(np.float64) - right.astype(np.float64)).max() < 8e-3


@pytest.mark.parametrize("dims", ["64", "128", "256", "128/64"])
@pytest.mark.parametrize("cap", [1.0, 50.0, 60.0, 400.0, None], ids=lambda cap: f"cap {cap or 'of each row'}")
def test_soft_capping_of_any_size(cap: float | None, dims: str, generation: str) -> None:
    """Caps that bound weights and caps that do not; scores far below and at them; values that weights far above 1 would
    make infinite; rows of one head and of several in a tile.
    """
    d, d_v = map(int, (dims.split("/") * 2)[:2])
    of_row = mods.score(lambda s, b, h, q, k: flashkit.tanh(s / (30.0 + (q & 15))) * (30.0 + (q & 15)) - (q & 7) * 0.5)
    capped = {"softcap": cap} if cap else {"score_mod": of_row}
    seen = np.random.default_rng(0).random((8, 15)) < 0.5
    for scores, values, n_q in ((1, 1, 500), (40, 1e33, 500), (1, 1, 100)):
        q, k, v = tensors((1, 4, n_q, d), (1, 2, 900, d), (1, 2, 900, d_v))
        blocks = flashkit.BlockMask.from_dense(seen[: -(-n_q // 64)], 64, 64, n_q, 900)
        arrays = [x.astype(cases.numpy_dtype("bfloat16")) for x in (q * scores, k, v * values)]
        wide = [x.get().astype(np.float64) for x in arrays]
        exponents = 6e-4 * min(cap or 45, 6 * scores)  # what the device's tanh may be off by, in scores
        for options in ({}, {"causal": True, "q_offset": 400}, {"kv_lengths": np.array([777])}, {"block_mask": blocks}):
            options = options | capped | {"return_lse": True}
            right, right_lse = flashkit.attention(*wide, **options, backend="cpu")
            out, lse = flashkit.attention(*arrays, **options, backend=NAME)
            assert np.abs(out.get().astype(np.float64) / values - right / values).max() < 8e-3 + 4 * exponents
            assert np.abs(lse.get() - right_lse).max() < 2.0**-8 + exponents  # weights may be summed as rounded


BESIDE_A_CAP = [
    (factor, level)
    for factor, levels in FACTORS.items()
    if factor not in ("dtype", "dims", "sizes", "batch", "layout", "storage", "out", "softcap")
    for level in levels[1:]
]


@pytest.mark.parametrize(
    ("factor", "level", "d"),
    [
        (*pair, d)
        for i, pair in enumerate(BESIDE_A_CAP)
        for d in (64, 128)
        if d == (64, 128)[i % 2] or pair[0] == "sinks"
    ],
)
def test_soft_capping_beside_another_feature(factor: str, level: str, d: int, generation: str) -> None:
    """In bfloat16, whose tanh is approximate."""
    capped = {"softcap": "yes", "dtype": "bfloat16", "sizes": "130x200", "heads": "4:2", "out": "poisoned"}
    check(with_(**{**capped, "dims": f"{d}", factor: level}))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (70, 0)}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_many_tiles_for_each_block_of_threads(d: int, options: dict[str, Any], generation: str) -> None:
    """What a block does after its first tile: several hundred heads of a few ragged tiles."""
    q, k, v = tensors((2, 200, 300, d), (2, 100, 300, d), (2, 100, 300, d), dtype="float16")
    right = flashkit.attention(q.get(), k.get(), v.get(), **options, backend="cpu")
    for _ in range(3):
        got = flashkit.attention(q, k, v, **options, backend=NAME).get()
        assert np.abs(got.astype(np.float64) - right.astype(np.float64)).max() < 8e-3


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (70, 0)}, {"kv_lengths": [330, 97]}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_float32_gradients_of_many_tiles(d: int, options: dict[str, Any], generation: str) -> None:
    """The same of gradients in float32, and their errors (root mean square)."""
    q, k, v, dout = tensors((2, 48, 300, d), (2, 24, 330, d), (2, 24, 330, d), (2, 48, 300, d))
    options = {name: np.asarray(x) if isinstance(x, list) else x for name, x in options.items()}
    wide = [x.get().astype(np.float64) for x in (q, k, v, dout)]
    right = flashkit.attention_vjp(*wide[:3], **options, backend="cpu")[1](wide[3])
    vjp = flashkit.attention_vjp(q, k, v, **options, backend=NAME)[1]
    for _ in range(3):
        for name, one, other in zip(("dq", "dk", "dv"), vjp(dout), right):
            error = np.sqrt(((one.get() - other) ** 2).mean() / (other**2).mean())
            assert error <= 1e-6, (name, error)


def test_float64_is_the_definition() -> None:
    """float64 on the device agrees with the definition to the last digits."""
    q, k, v = tensors((1, 2, 70, 40), (1, 2, 90, 40), (1, 2, 90, 40), dtype="float64")
    from flashkit.call.arguments import prepare

    problem, operands, _ = prepare(q.get(), k.get(), v.get(), causal=True)
    out, _ = reference.standard(problem.spec, operands)
    np.testing.assert_allclose(
        flashkit.attention(q, k, v, causal=True, backend=NAME).get(), out, rtol=1e-12, atol=1e-13
    )
