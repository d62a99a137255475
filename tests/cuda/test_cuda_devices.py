"""The CUDA backends on a device: each generation of kernels against the definition, and what only a GPU has: streams,
graphs, arrays beyond 2^31 elements, device arrays as arguments. What needs no device is in test_cuda_kernels.py and
test_numba_cuda.py.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
from cases import FACTORS
from filelock import FileLock

import flashkit
from flashkit import dispatch, mods
from flashkit.backends.cuda_common import sm80_bwd_launch
from flashkit.backends.cuda_common.backend import VARIABLE
from flashkit.backends.cuda_common.generation import Fallback
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
    cases.assert_conforms(cases.run(call, NAME), *cases.expected(call))


def tensors(*shapes: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> list[Any]:
    import cupy

    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


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
def test_pairs_of_features_in_any_order(row: int, fused: bool, generation: str, monkeypatch: Any) -> None:
    """dQ is accumulated in arbitrary order; rows are preprocessed before the kernel, or in it."""
    if (NAME, generation) != ("cupy_raw", "sm90"):
        pytest.skip("other kernels never accumulate dQ in order unasked")
    cases.arbitrary_dq_order(monkeypatch)
    if fused:
        cases.fused_preprocess(monkeypatch, sms=3)
    check(DESIGN[row])


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


# --- arguments on the device ------------------------------------------------------------------------------------------


def test_positions_on_the_device_stay_within_tables() -> None:
    """An index that is in range for all lengths that fit is so for those that do not."""
    import cupy

    q, k, v = tensors((2, 1, 1, 8), (2, 1, 7, 8), (2, 1, 7, 8))
    score = mods.score(lambda s, b, h, q, k, *, t: s + t[q + 1], t=cupy.arange(8.0))
    got = flashkit.attention(q, k, v, kv_lengths=cupy.asarray([2**40, -(2**40)]), score_mod=score, backend=NAME).get()
    right = flashkit.attention(q, k, v, kv_lengths=[7, 0], score_mod=score, backend=NAME).get()
    np.testing.assert_array_equal(got, right)


# --- streams, threads, graphs -----------------------------------------------------------------------------------------


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
    """Exact zeros where a CTA has no tile, though it began to load; many CTAs, so that loading takes longer."""
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


@pytest.mark.parametrize("dims", ["64", "128", "256", "128/64"])
@pytest.mark.parametrize("cap", [1.0, 50.0, 60.0, 400.0, None], ids=lambda cap: f"cap {cap or 'of each row'}")
def test_soft_capping_of_any_size(cap: float | None, dims: str, generation: str) -> None:
    """Caps that bound weights or do not; scores far below and at them; values that weights above 1 make infinite."""
    d, d_v = map(int, (dims.split("/") * 2)[:2])
    of_row = mods.score(lambda s, b, h, q, k: flashkit.tanh(s / (30.0 + (q & 15))) * (30.0 + (q & 15)) - (q & 7) * 0.5)
    capped = {"softcap": cap} if cap else {"score_mod": of_row}
    seen = np.random.default_rng(0).random((8, 15)) < 0.5
    for scores, values, n_q in ((1, 1, 500), (40, 1e33, 500), (1, 1, 100)):
        q, k, v = tensors((1, 4, n_q, d), (1, 2, 900, d), (1, 2, 900, d_v))
        blocks = flashkit.BlockMask.from_dense(seen[: -(-n_q // 64)], 64, 64, n_q, 900)
        arrays = [x.astype("bfloat16") for x in (q * scores, k, v * values)]
        wide = [x.get().astype(np.float64) for x in arrays]
        exponents = 6e-4 * min(cap or 45, 6 * scores)  # what the device's tanh may be off by, in scores
        for options in ({}, {"causal": True, "q_offset": 400}, {"kv_lengths": np.array([777])}, {"block_mask": blocks}):
            options = options | capped | {"return_lse": True}
            right, right_lse = flashkit.attention(*wide, **options, backend="cpu")
            out, lse = flashkit.attention(*arrays, **options, backend=NAME)
            assert np.abs(out.get().astype(np.float64) / values - right / values).max() < 8e-3 + 4 * exponents
            assert np.abs(lse.get() - right_lse).max() < 2.0**-8 + exponents  # weights may be summed as rounded
