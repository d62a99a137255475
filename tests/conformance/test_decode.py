"""Decoding on the CPU: attention of few queries against the definition."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import dispatch, mods, reference
from flashkit.backends.cpu import launch, plan, threads
from flashkit.backends.cpu.arguments import FREE, NUM_WORKERS, PREVIOUS, STATE, WORKER_WORDS, WORKERS
from flashkit.backends.cpu.backend import CpuBackend
from flashkit.backends.cpu.micro import compile as micro
from flashkit.backends.cpu.micro.register_block import RegisterBlock
from flashkit.backends.cpu.micro.vector import E4M3_UNIT
from flashkit.call.arguments import prepare
from flashkit.devices.io_model import CpuTile

EIGHT_BITS = [RegisterBlock("float", 1, 1, lanes, storage) for lanes in (8, 16) for storage in ("e4m3", "int8")]
EIGHT_BITS += [RegisterBlock("double", 1, 1, 8, storage) for storage in ("e4m3", "int8")]


def run(block: RegisterBlock, name: str, *arguments: int) -> None:
    function = micro.addresses(block, True)[name]
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(function)(*arguments)


def at(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def computed(block: RegisterBlock) -> Any:
    return np.float32 if block.element == "float" else np.float64


def stored(block: RegisterBlock) -> Any:
    return {"e4m3": ml_dtypes.float8_e4m3fn, "int8": np.int8}[block.storage]


def unit(block: RegisterBlock) -> float:
    """What the micro-kernels make of numbers, over these."""
    return 1 / E4M3_UNIT if block.storage == "e4m3" else 1


@pytest.mark.parametrize("block", EIGHT_BITS, ids=str)
def test_every_number_of_8_bits(block: RegisterBlock) -> None:
    dtype = computed(block)
    v = np.arange(256, dtype=np.uint8).view(stored(block))
    o, one = np.zeros(256, dtype), np.ones(1, dtype)
    run(block, "gemv_pv", at(one), one.nbytes, at(v), 256, at(o), o.nbytes, at(one), 1, 1, 256)
    assert np.array_equal(o, v.astype(dtype) * dtype(unit(block)), equal_nan=True)


# --- attention --------------------------------------------------------------------------------------------------------

FACTORS = {
    **{name: levels[:3] for name, levels in cases.FACTORS.items()}, "dtype": cases.FACTORS["dtype"],
    "sizes": ("1x70", "1x9", "3x257", "7x131", "2x1500", "5x640"), "heads": ("2:2", "4:2", "8:1"),
    "dims": ("8", "1", "40", "64", "128", "192/128", "7/13"), "storage": cases.FACTORS["storage"],
    "bias": ("no", "full", "with -inf"), "mask": ("no", "full", "float with -inf"),
    "block_mask": ("no", "from_mod", "from_dense"), "score_mod": ("no", "plain", "array by distance"),
    "mask_mod": ("no", "plain", "array"), "dlse": ("no",),
}  # fmt: skip
DESIGN = cases.pairwise(FACTORS, seed=5, tries=2)


OFTEN = [pytest.mark.slow, *[pytest.mark.exhaustive] * 17]
"""Each takes seconds; test_steps.py has calls with few queries that are fast."""


@pytest.mark.parametrize(
    "choice", [pytest.param(c, id=cases.name(c), marks=OFTEN[i % len(OFTEN)]) for i, c in enumerate(DESIGN)]
)
def test_every_feature_with_few_queries(choice: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In splits of two tiles, however few keys there are."""
    monkeypatch.setattr(launch, "MIN_SPLIT_KEYS", 2 * plan.DECODE_BLOCK_K)
    cases.assert_conforms(cases.run(cases.build(choice), "cpu"), *cases.expected(cases.build(choice)))


@pytest.fixture(autouse=True)
def few_keys_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as they are enough for two splits."""
    monkeypatch.setattr(threads, "SERIAL_FLOPS", 0)
    dispatch.forget()


def decoded(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    return flashkit.attention(q, k, v, return_lse=True, backend="cpu", **options)


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    problem, operands, _ = prepare(q, k, v, **options)
    return reference.standard(problem.spec, operands, np.float64)


def tensors(heads: int, heads_kv: int, n_q: int, n_k: int, d: int, batch: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = (batch, heads, n_q, d), (batch, heads_kv, n_k, d), (batch, heads_kv, n_k, d)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def assert_near(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray]) -> None:
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-6, atol=3e-6)


def test_few_queries_decode_and_many_do_not() -> None:
    def why(n_q: int) -> str:
        return str(flashkit.explain(*tensors(4, 2, n_q, 100, 16), backend="cpu").why)

    assert all("kernels/decode.py" in why(n) for n in (1, 7)) and "kernels/decode.py" not in why(8)


def test_one_key_has_its_value_as_gradient_too() -> None:
    """Scores are large: if the passes summed them in different orders, the weight would not be 1 in both."""
    q, k, v = tensors(4, 2, 1, 1, 192)
    q *= 1000
    out, vjp = flashkit.attention_vjp(q, k, v, scale=2**-4, backend="cpu")
    dout = np.random.default_rng(3).standard_normal(out.shape).astype(np.float32)
    assert np.array_equal(out, np.repeat(v, 2, 1))
    _, _, dv = vjp(dout)
    np.testing.assert_allclose(dv[0, :, 0], dout[0, :, 0].reshape(2, 2, -1).sum(1), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("dtype", "lanes"),
    [
        ("float64", 4), ("bfloat16", 8),
        *(pytest.param(*x, marks=pytest.mark.exhaustive) for x in (
            ("float16", 16), ("bfloat16", 4), ("float64", 8), ("float32", 16))),
    ],
)  # fmt: skip
def test_every_width_decodes(dtype: str, lanes: int) -> None:
    """With dtypes in turn, as in test_cpu_kernels.py."""
    q, k, v = (x.astype(dtype) for x in tensors(6, 2, 2, 700, 37))
    problem, operands, _ = prepare(q, k, v, softcap=4.0)
    tile = CpuTile(64, 64, lanes, 2, 2)
    CpuBackend().forward(plan.CpuPlan(problem, tile, tile, "forced"), operands)
    got = cases.Results(operands.out, operands.lse, None, None, None, None)
    cases.assert_conforms(got, *cases.by_definition(problem.spec, operands))


@pytest.mark.parametrize("n_k", [0, 1, 63, 64, 65, 511, 513, 4097])
def test_splits_of_any_number_of_keys(n_k: int) -> None:
    q, k, v = tensors(14, 2, 1, n_k, 24)  # seven rows at once: of 4, 2 and 1
    assert_near(decoded(q, k, v), exact(q, k, v))


@pytest.mark.parametrize("count", [1, 2])
def test_heads_of_few_keys_share_work_tiles(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several sequences, and a last work tile with fewer heads than the others."""
    monkeypatch.setenv("FLASHKIT_NUM_THREADS", str(count))
    q, k, v = tensors(22, 11, 1, 64, 24, batch=3)
    for lengths in ([64, 1, 30], [0, 16, 16], [0, 0, 0]):
        assert_near(decoded(q, k, v, kv_lengths=lengths), exact(q, k, v, kv_lengths=lengths))


def test_lengths_leave_splits_without_keys() -> None:
    q, k, v = tensors(4, 2, 2, 3000, 16, batch=4)
    lengths = np.array([0, 1, 700, 3000])
    k[2, :, 700:], v[2, :, 700:] = np.nan, np.nan
    got = decoded(q, k, v, kv_lengths=lengths)
    assert_near(got, exact(q, k, v, kv_lengths=lengths))
    assert (got[0][0] == 0).all() and (got[1][0] == -np.inf).all()


def test_a_mask_hides_whole_splits_whatever_they_hold() -> None:
    q, k, v = tensors(4, 1, 1, 5000, 16)
    k[:, :, :4000], v[:, :, :4000] = np.nan, np.inf
    options = {"causal": True, "window": (499, 0)}
    got = decoded(q, k, v, **options)
    assert np.isfinite(got[0]).all()
    assert_near(got, exact(q[:], k, v, **options))
    hidden = np.zeros((1, 1, 1, 5000), bool)
    out, lse = decoded(q, k, v, mask=hidden)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_heads_of_a_group_see_different_splits() -> None:
    q, k, v = tensors(4, 1, 3, 3000, 16)
    mask = np.zeros((4, 1, 3000), bool)
    for h in range(3):  # the last head sees nothing
        mask[h, :, 900 * h : 900 * h + 500] = True
    assert_near(decoded(q, k, v, mask=mask), exact(q, k, v, mask=mask))
    by_head = mods.mask(lambda b, h, q, k: (k >= 900 * h) & (k < 900 * h + 70))
    assert_near(decoded(q, k, v, mask_mod=by_head), exact(q, k, v, mask_mod=by_head))


def test_hidden_infinities_next_to_visible_keys_are_skipped() -> None:
    q, k, v = tensors(2, 1, 1, 2000, 8)
    visible = np.arange(2000) % 3 != 1
    v[:, :, ~visible] = np.inf
    got = decoded(q, k, v, mask=visible[None])
    v[:, :, ~visible] = 0
    assert_near(got, exact(q, k, v, mask=visible[None]))


@pytest.mark.parametrize("where", [3, 1800])
def test_nan_shows_in_the_rows_that_see_it(where: int) -> None:
    q, k, v = tensors(4, 2, 2, 2000, 8)
    k[0, 0, where, 2] = np.nan
    out, lse = decoded(q, k, v)
    assert np.isnan(out[0, :2]).all() and np.isnan(lse[0, :2]).all() and np.isfinite(out[0, 2:]).all()
    q, k, v = tensors(4, 2, 2, 2000, 8)
    v[0, 1, where, 5] = np.nan
    out, lse = decoded(q, k, v)
    assert np.isnan(out[0, 2:, :, 5]).all() and np.isnan(out).sum() == 4 and np.isfinite(lse).all()


def test_a_split_of_nan_scores_alone_shows() -> None:
    """Its maximum stays -inf, as if it had no key."""
    q, k, v = tensors(1, 1, 1, 2000, 8)
    k[0, 0, 1024:] = np.nan
    assert np.isnan(decoded(q, k, v)[0]).all()


@pytest.mark.parametrize("low", [slice(512), slice(512, 1024)], ids=["the first", "the last"])
def test_a_split_without_weight_is_left_out(low: slice) -> None:
    """Within it all keys weigh the same, so its sum is infinite; that the other outweighs it is known at the end."""
    q, k, v = tensors(1, 1, 1, 1024, 8)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :, low, 0], v[:, :, low] = -1e6, np.inf
    got = decoded(q, k, v)
    assert np.isfinite(got[0]).all()
    assert_near(got, exact(q, k, v))


def test_a_sink_outweighs_infinite_values() -> None:
    q, k, v = tensors(2, 1, 1, 70, 8)
    v[:] = np.inf
    out, lse = decoded(q, k, v, sinks=np.full(2, 1e6, np.float32))
    assert (out == 0).all() and (lse == 1e6).all()


def test_few_keys_stay_on_the_thread_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for any lengths does not know how few a call has."""
    worker = np.full((1, int(WORKER_WORDS)), -1)  # free, with no thread: it keeps a trace of an offer
    worker[0, STATE] = FREE
    monkeypatch.setattr(threads, "SERIAL_FLOPS", 2e5)
    monkeypatch.setattr(threads, "count", lambda: 4)

    def set_pool(block: np.ndarray) -> None:
        block[WORKERS], block[NUM_WORKERS] = worker.ctypes.data, 1

    monkeypatch.setattr(threads, "set_pool", set_pool)
    q, k, v = tensors(4, 2, 1, 4000, 8)
    planned = flashkit.plan(q, k, v, kv_lengths=[4000], return_lse=True, backend="cpu")
    got = planned(q, k, v, kv_lengths=[100])
    assert worker[0, PREVIOUS] == -1
    assert_near(got, exact(q, k, v, kv_lengths=[100]))
    planned(q, k, v)
    assert worker[0, PREVIOUS] == 0 and worker[0, STATE] == FREE


def test_two_runs_give_the_same_bits_on_any_thread() -> None:
    q, k, v = tensors(8, 2, 1, 6000, 64)
    out, lse = decoded(q, k, v)
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(lambda _: decoded(q, k, v), range(40))]
    assert all(np.array_equal(out, x) and np.array_equal(lse, y) for x, y in results)
