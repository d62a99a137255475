"""Attention on e4m3 codes by Hopper's kernel, against exact arithmetic on the numbers that they stand for.

Weights are rounded to e4m3, too. So the yardstick is the error of one such rounding, relative to the greatest weight of
the row, in otherwise exact arithmetic.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import Quantized
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.backends.cuda_common import compiler, launch, quantize, verify
from flashkit.backends.cupy_raw import sm90, sm90_fp8, specialise
from flashkit.call import plans
from flashkit.call.arguments import prepare
from flashkit.call.quantized import transposed_values
from flashkit.spec import Fp8

from . import hardware
from .calls import cupy, moved
from .errors import EmulationError

if TYPE_CHECKING:
    from .device import Device

E4M3 = ml_dtypes.float8_e4m3fn
KERNEL = "sm90_fp8_forward"
CHECK = verify.check

slow = pytest.mark.slow
pytestmark = pytest.mark.one_in(3, slow=4)  # a case takes seconds, and shares most of its code with the others


def normal(*shape: int, seed: int = 0, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def inputs(
    batch: int, heads: str, n_q: int, n_k: int, dim: int, dim_v: int = 0, dtype: Any = ml_dtypes.bfloat16
) -> list[np.ndarray]:  # fmt: skip
    """q, k and v. Tokens differ in size, values by a factor of up to 64, so that a scale of another one shows."""
    h, h_kv = map(int, heads.split(":"))
    shapes = (batch, h, n_q, dim), (batch, h_kv, n_k, dim), (batch, h_kv, n_k, dim_v or dim)
    q, k, v = (normal(*shape, seed=i, dtype=np.float32) for i, shape in enumerate(shapes))
    sizes = np.random.default_rng(9)
    k *= 2 ** sizes.uniform(-1, 1, (*k.shape[:3], 1))
    v *= 2 ** sizes.uniform(-3, 3, (*v.shape[:3], 1))
    return [x.astype(dtype) for x in (q, k, v)]


def quantised(q: Any, k: Any, v: Any, per: Any, rotate: bool = False, **more: Any) -> list[Quantized]:
    transpose = more.pop("transpose", True)
    options = {"per": per, **more}
    return [
        flashkit.quantize(x, "e4m3", rotate=rotate and x is not v, transpose=transpose and x is v, **options)
        for x in (q, k, v)
    ]


def on_device(x: Quantized) -> Quantized:
    transposed = None if x.transposed is None else cupy.asarray(x.transposed)
    return replace(x, data=cupy.asarray(x.data.view(np.uint8)), scale=cupy.asarray(x.scale), transposed=transposed)


def of_group(x: np.ndarray, heads: int) -> np.ndarray:
    """K or V for every query head."""
    return np.repeat(x, heads // x.shape[1], 1)


def exact_and_rounded(given: list[Quantized], **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64, and the output with weights rounded once."""
    q, k, v = (x.dequantize("float64") for x in given)
    exact, lse = flashkit.attention(q, k, v, return_lse=True, backend="reference", **options)
    weights = flashkit.weights(q, k, **options)
    bhnd, heads = options.get("layout", "bhnd") == "bhnd", weights.shape[1]
    v = of_group(v if bhnd else v.swapaxes(1, 2), heads)
    top = np.maximum(weights.max(-1, keepdims=True), 1e-300) / 256
    out = (weights / top).astype(E4M3).astype(np.float64) * top @ np.nan_to_num(v)
    return exact, lse, out if bhnd else out.swapaxes(1, 2)


def assert_close(got: Any, exact: np.ndarray, rounded: np.ndarray) -> None:
    """An error like that of one rounding of the weights, and of the output."""
    error, yardstick = got.astype(np.float64) - exact, rounded - exact
    last = 2.0**-8 * np.abs(exact)
    assert np.isfinite(error).all()
    rms, allowed = (float(np.sqrt(np.mean(x**2))) for x in (error, yardstick))
    assert rms <= 1.25 * allowed + float(np.sqrt(np.mean(last**2)))
    assert (np.abs(error) <= 2 * np.abs(yardstick).max() + last).all()


def check(
    given: list[Quantized], launched: list[str], on: dict[str, Any] | None = None, atol: float = 2e-3, **options: Any
) -> None:
    """Output and log-sum-exp of a call; `on`: options on the device. atol: a tensor core rounds scores, too."""
    exact, lse, rounded = exact_and_rounded(given, **options)
    out = cupy.asarray(np.full(exact.shape, np.nan).astype(given[0].dtype))
    on = moved(options | (on or {}))
    found, found_lse = flashkit.attention(*map(on_device, given), out=out, return_lse=True, backend="cupy_raw", **on)
    assert found is out
    assert_close(out.get(), exact, rounded)
    same = found_lse.get() == lse
    np.testing.assert_allclose(np.where(same, 0, found_lse.get()), np.where(same, 0, lse), atol=atol)
    assert launched == [KERNEL]


def plant(monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    """Change the text of a kernel file."""
    texts = dict(compiler.headers(specialise.FOLDER))
    assert texts[file].count(old) == 1
    texts[file] = texts[file].replace(old, new)
    monkeypatch.setattr(compiler, "headers", lambda folder: tuple(texts.items()))
    launch._shared.clear()  # kernels that are loaded, by what their texts are made from


@pytest.fixture(autouse=True)
def only_sm90(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without its fallback for rows that are not finite, where they are: it would hide what the main loop makes NaN."""
    monkeypatch.setenv(cuda_backend.VARIABLE, "sm90")
    if request.node.originalname not in (
        "test_numbers_that_scales_cannot_carry", "test_a_fresh_kernel_is_checked", "test_equal_scores_of_any_size"
    ):  # fmt: skip
        plant(monkeypatch, "sm90/fp8_sums.cuh", "        rows_nonfinite(p, at, 0);\n", "")
    yield
    launch._shared.clear()


@pytest.mark.parametrize("per", ["head", "block", "token"])
def test_calls_of_one_layout_share_a_plan(
    per: str, device: Device, launched: list[str], plans_on_codes: list[object]
) -> None:
    """Each has its own codes and scales."""
    q, k, v = inputs(1, "2:1", 70, 130, 64)
    for factor in (1, 3, 0.25):
        launched.clear()
        given = quantised(q, (k.astype(np.float32) * factor).astype(k.dtype), v, per)
        check(given, launched, atol=6e-3, causal=True)
    assert len(plans_on_codes) == 1


def test_addresses_that_the_copy_engine_cannot_read(device: Device, launched: list[str]) -> None:
    """A plan for a layout is not for such codes, which are copied."""
    q, k, v = map(on_device, quantised(*inputs(1, "2:1", 70, 130, 64), "head"))
    moved = cupy.empty(k.data.size + 8, np.uint8)[8:].reshape(k.data.shape)
    moved[...] = k.data
    first, second = (flashkit.attention(q, x, v, backend="cupy_raw") for x in (k, replace(k, data=moved)))
    np.testing.assert_array_equal(first.get(), second.get())
    assert launched == [KERNEL] * 2


@pytest.mark.parametrize(("n_q", "n_k"), [(0, 5), (5, 0), (0, 0)])
def test_arrays_without_tokens(n_q: int, n_k: int, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda_backend.VARIABLE)  # another kernel's task
    q, k, v = (cupy.zeros((2, 2, n, 16), np.float16) for n in (n_q, n_k, n_k))
    for axes in (np.s_[:], np.s_[0], np.s_[None]):
        given = quantised(q[axes], k[axes], v[axes], "block")
        out = flashkit.attention(*given, backend="cupy_raw")
        assert out.shape == q[axes].shape
        assert not out.get().any()


@pytest.mark.parametrize("per", ["head", "token"])
def test_equal_scores_of_any_size(per: str, device: Device, launched: list[str]) -> None:
    """Weights are equal, those of values with scales of their own, too, though the rounding of a row reference is
    greater than exponents may be.
    """
    q, k, v = inputs(1, "12:1", 70, 300, 64)
    q[...] = (130.0 * 4.0 ** np.repeat([-2, 1, 4, 6, 9, 26], 2) * np.resize([1, -1], 12))[:, None, None]
    k[...] = 130
    given = [on_device(x) for x in quantised(q, k, v, per)]
    out, lse = flashkit.attention(*given, return_lse=True, backend="cupy_raw")
    values = quantised(q, k, v, per)[2].dequantize("float64")[0, 0]
    assert np.abs(out.get().astype(np.float64)[0] - values.mean(0)).max() < 2.0**-7 * values.std()
    np.testing.assert_allclose(lse.get()[0], 1040 * q[0, :, :, 0].astype(np.float64) + np.log(300), rtol=2.0**-12)
    assert launched == [KERNEL]


def test_scales_of_tokens(device: Device, launched: list[str]) -> None:
    """With sinks, and lengths on the device: nothing behind them counts, NaN or not, nor do scales there."""
    dtype = np.float16
    given = quantised(*inputs(2, "2:1", 150, 270, 128, dtype=dtype), "token", rotate=True)
    lengths = np.array([270 - 77, 5])
    for x in given[1:]:
        for b, n in enumerate(lengths):
            x.data.view(np.uint8)[b, :, n:], x.scale[b, :, n:] = 0x7F, np.nan
    sinks = np.array([0.5, -1], np.float32)
    plain = [replace(x, data=x.data.copy(), scale=np.nan_to_num(x.scale, nan=1)) for x in given]
    for x in plain[1:]:
        x.data.view(np.uint8)[x.data.view(np.uint8) == 0x7F] = 0
    options = {"kv_lengths": lengths, "sinks": sinks, "causal": True, "q_offset": lengths - 150}
    exact = exact_and_rounded(plain, **options)
    out, lse = flashkit.attention(*map(on_device, given), return_lse=True, backend="cupy_raw", **moved(options))
    assert out.dtype == dtype and launched == [KERNEL]
    assert_close(out.get(), exact[0], exact[2])
    np.testing.assert_allclose(lse.get(), exact[1], atol=2e-3)


@slow
@pytest.mark.parametrize(
    ("dims", "per", "options"),
    [
        ((64, 0), "block", {"softcap": 5.0, "window": (100, 20), "layout": "bnhd"}), ((128, 0), "tensor", {}),
        ((256, 0), "token", {"causal": True}), ((256, 0), "head", {"softcap": 5.0}), ((96, 192), "token", {}),
        ((16, 48), "head", {"causal": True}),
    ],
)  # fmt: skip
@pytest.mark.one_in(4)
def test_head_dims_and_options(
    dims: tuple[int, int], per: str, options: dict[str, Any], device: Device, launched: list[str]
) -> None:
    """Blocks of 48 tokens, which are no part of a tile."""
    q, k, v = inputs(1, "4:2", 130, 200, *dims)
    more = {"block": 48} if per == "block" else {}
    if options.get("layout") == "bnhd":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
        more["layout"] = "bnhd"
    check(quantised(q, k, v, per, **more), launched, **options)


@pytest.mark.parametrize("per", ["head", "token"])
def test_a_needle_and_small_weights(per: str, device: Device, launched: list[str]) -> None:
    """One key has half of the weight, 1,000 others the rest: 2^-10 of the greatest each, which e4m3 holds only as a
    weight times 2^8.
    """
    n, dim = 1001, 64
    q, k = np.zeros((1, 1, 100, dim), np.float32), np.zeros((1, 1, n, dim), np.float32)
    v = np.ones((1, 1, n, dim), np.float32)
    q[..., 0], k[..., 700, 0], v[..., 700, :] = 8, np.log(1000), -2
    given = quantised(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), per)
    check(given, launched)
    exact = exact_and_rounded(given)[0]
    assert abs(exact + 0.5).max() < 0.05  # neither of them alone


@pytest.mark.parametrize(
    ("tile", "dim"),
    [
        (sm90_fp8.Sm90Fp8Tile(128, 128, q_buffers=1), 64),
        pytest.param(sm90_fp8.Sm90Fp8Tile(192, 128, 3), 64, marks=slow),
        pytest.param(sm90_fp8.Sm90Fp8Tile(128, 128, 2), 128, marks=slow),
    ],
)
def test_tiles(tile: Any, dim: int, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several for each CTA. The first warp group does not see keys in the middle, nor the second one the first."""
    monkeypatch.setattr(sm90.Sm90, "tile", lambda *_: tile)

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q >= 64) | (k < 100) | (k >= 290)) & ((q < 64) | (k >= 130))

    check(quantised(*inputs(1, "4:2", 300, 420, dim), "token"), launched, mask_mod=sees)


def test_a_nan_stays_in_its_head(device: Device, launched: list[str]) -> None:
    """One CTA computes them all, one after another."""
    device.sms = 1
    given = quantised(*inputs(1, "3:3", 70, 140, 64), "head")
    exact, _, rounded = exact_and_rounded(given)
    given[2].data.view(np.uint8)[0, 1, 3, 5] = given[2].transposed[0, 1, 5, 5] = 0x7F  # key 3, column 5
    out = flashkit.attention(*map(on_device, given), backend="cupy_raw").get()
    assert np.isnan(out[0, 1, :, 5].astype(np.float64)).all()
    others = np.s_[:, [0, 2]]
    assert_close(out[others], exact[others], rounded[others])


def test_long_sums_are_promoted(device: Device, launched: list[str]) -> None:
    """A tensor core's accumulator of 14 bits would lose a part of each of 3,000 equal addends."""
    device.sms = 1  # the rows fill it
    q, k, v = np.zeros((1, 1, 70, 64)), normal(1, 1, 3000, 64), np.ones((1, 1, 3000, 64))
    given = quantised(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), "head")
    out = flashkit.attention(*map(on_device, given), backend="cupy_raw")
    np.testing.assert_allclose(out.get().astype(np.float64), 1, atol=2e-2)
    assert launched == [KERNEL] and isinstance(out, cupy.ndarray)


@pytest.mark.parametrize("per", ["head", "block"])
def test_blocks_and_the_log_sum_exp(per: str, device: Device, launched: list[str]) -> None:
    """Sizes of keys and values change from block to block. With and without the log-sum-exp outputs are the same."""
    q, k, v = inputs(2, "2:1", 200, 1500, 64)
    sizes = np.repeat(2.0 ** np.array([0, -3, 2, 5, 0, 0, -6, 1, 3, 0, 0, 2]), 128)[:1500, None]
    k[...], v[...] = k / (1 + sizes), v * sizes
    given = quantised(q, k, v, per)
    check(given, launched)
    on = [on_device(x) for x in given]
    alone, (out, _) = (flashkit.attention(*on, return_lse=lse, backend="cupy_raw") for lse in (False, True))
    np.testing.assert_array_equal(alone.get(), out.get())
    assert isinstance(alone, cupy.ndarray) and launched == [KERNEL] * 3


def test_other_scales_of_blocks(device: Device, launched: list[str]) -> None:
    """Of another quantiser, no powers of two; and V as it lies, with V^T in no array."""
    given = quantised(*inputs(1, "2:1", 130, 700, 64), "block", transpose=False)
    given = [replace(x, scale=x.scale * np.float32(1.3)) for x in given]
    check(given, launched, causal=True)


def test_packed_sequences(device: Device, launched: list[str]) -> None:
    """One of them without queries; codes of the next sequence are NaN in none."""
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in inputs(1, "4:2", 300, 300, 64))
    offsets = np.array([0, 130, 130, 201, 300])
    given = [flashkit.quantize(x, layout="bnhd") for x in (q, k, v)]
    options: dict[str, Any] = {"cu_seqlens": offsets, "causal": True}
    found = flashkit.attention(*map(on_device, given), backend="cupy_raw", **options)
    parts = [
        exact_and_rounded([replace(x, data=x.data[None, a:b], scale=x.scale[None]) for x in given], causal=True,
                          layout="bnhd")
        for a, b in itertools.pairwise(offsets)
        if a < b
    ]  # fmt: skip
    exact, rounded = (np.concatenate([part[i][0] for part in parts]) for i in (0, 2))
    assert_close(found.get(), exact, rounded)
    assert launched == [KERNEL] and isinstance(found, cupy.ndarray)


@pytest.mark.parametrize("dim", [64, pytest.param(256, marks=slow)])
@pytest.mark.parametrize("per", ["tensor", "token"])
def test_keys_in_pages(dim: int, per: Any, device: Device, launched: list[str]) -> None:
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in inputs(2, "4:2", 40, 224, dim))
    table = np.random.default_rng(3).permutation(28).reshape(2, 14)
    pools = [np.zeros((28, 16, *x.shape[2:]), x.dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[table] = x.reshape(2, 14, 16, *x.shape[2:])
    q8, *pools8 = (flashkit.quantize(x, per=per, layout="bnhd") for x in (q, *pools))
    lengths = np.array([220, 77])
    options: dict[str, Any] = {"kv_lengths": lengths, "causal": True, "layout": "bnhd"}
    found = flashkit.attention(*map(on_device, (q8, *pools8)), page_table=table, backend="cupy_raw", **options)
    dense = [
        replace(x, data=x.data[table].reshape(2, 224, *x.shape[2:]),
                scale=x.scale[table].reshape(2, 224, *x.scale.shape[2:]) if per == "token" else x.scale)
        for x in pools8
    ]  # fmt: skip
    exact, _, rounded = exact_and_rounded([q8, *dense], **options)
    assert_close(found.get(), exact, rounded)
    assert launched == [KERNEL]


def test_a_weight_that_outgrows_the_first_tile(device: Device, launched: list[str]) -> None:
    """Scores grow by more than codes have room for, in tiles that are taken optimistically and in both of a pair."""
    q, k, v = inputs(1, "1:1", 128, 1152, 64)
    q[...] = 1
    k[...] = (np.arange(1152)[::-1] // 128 * 1.5 / 8)[:, None]  # last keys come first
    check(quantised(q, k, v, "head"), launched)


@pytest.mark.parametrize(
    ("dim", "q_buffers"), [(64, 2), pytest.param(256, 2, marks=slow), pytest.param(256, 1, marks=slow)]
)
def test_promotion(dim: int, q_buffers: int, device: Device, launched: list[str], monkeypatch: Any) -> None:
    """Every four tiles here, with a maximum that grows meanwhile; no part of O is lost. Of wide heads the promoted part
    is in shared memory where there is one buffer of Q.
    """
    monkeypatch.setattr(sm90_fp8, "PROMOTED_KEYS", 512)
    tile = sm90_fp8.Sm90Fp8Tile(128, 128, 2, q_buffers)
    monkeypatch.setattr(sm90.Sm90, "tile", lambda *_: tile)
    old = "PROMOTE_TILES = PROMOTED_IN_SHARED || !GETS_VT ? 16 : 32"
    plant(monkeypatch, "sm90/fp8_softmax.cuh", old, "PROMOTE_TILES = 4")
    given = quantised(*growing(1700, dim), "head")
    assert tile.promotes_in_shared(spec_of(given)) == (dim == 64 or q_buffers == 1)
    check(given, launched, atol=1e-2)


def growing(n: int, dim: int) -> list[np.ndarray]:
    """q, k and v; keys grow from the last to the first, which is the order of a kernel."""
    q, k, v = inputs(1, "2:1", 70, n, dim)
    k *= (1 + np.arange(n)[::-1] // 300).astype(k.dtype)[:, None] / 4
    return [q, k, v]


def spec_of(given: list[Quantized]) -> Any:
    """That of the call on the device."""
    problem, _, _ = prepare(*(x.dequantize("float32").astype(x.dtype) for x in given))
    return replace(problem.spec, fp8=Fp8("head", given[2].transposed is not None))


@slow
def test_great_weights_of_wide_heads(device: Device, launched: list[str]) -> None:
    """Scores with a deviation of 3: what dominates a row is no better rounded than in exact arithmetic."""
    q, k, v = (normal(1, 1, n, 256, seed=i, dtype=np.float32) for i, n in enumerate((128, 200, 200)))
    given = quantised(*(x.astype(ml_dtypes.bfloat16) for x in (3 * q, k, v)), "head")
    exact, _, rounded = exact_and_rounded(given)
    out = flashkit.attention(*map(on_device, given), backend="cupy_raw").get().astype(np.float64)
    assert np.mean((out - exact) ** 2) < 1.05**2 * np.mean((rounded - exact) ** 2) + np.mean((exact / 2**8) ** 2) / 3
    assert launched == [KERNEL]


def test_small_weights_behind_a_great_one(device: Device, launched: list[str]) -> None:
    """Their codes count in row sums, from which the great one is taken as soon as it is there: beside it they would be
    less than the accumulator's last bit.
    """
    q, k = np.zeros((1, 1, 70, 64), np.float32), np.zeros((1, 1, 2000, 64), np.float32)
    v = np.zeros((1, 1, 2000, 64), np.float32)
    q[..., 0], k[..., 1500, 0], v[..., 1500, :] = 8, 14 * np.log(2), -2
    given = quantised(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)), "head")
    exact = exact_and_rounded(given)[0]
    out = flashkit.attention(*map(on_device, given), backend="cupy_raw").get()
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0.012)
    assert launched == [KERNEL]


def test_peaked_scores(device: Device, launched: list[str]) -> None:
    """The great weights of a row are powers of two, whichever tile they come in, so most of them have no rounding."""
    q, k, v = (normal(1, 1, n, 64, seed=n, dtype=np.float32) for n in (150, 768, 769))
    given = quantised(*(x.astype(ml_dtypes.bfloat16) for x in (3 * q, k, v[..., 1:, :])), "head")
    exact, _, rounded = exact_and_rounded(given)
    out = flashkit.attention(*map(on_device, given), backend="cupy_raw").get().astype(np.float64)
    assert np.linalg.norm(out - exact) < 0.7 * np.linalg.norm(rounded - exact)
    assert launched == [KERNEL]


def test_warps_of_a_group_keep_together(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch of the main loop that one warp decides alone would have the four issue different wgmma: wrong sums on a
    device. The emulated one stops there.
    """
    if hardware.exists():
        pytest.skip("what happens on hardware is undefined")
    given = [on_device(x) for x in quantised(*inputs(1, "1:1", 128, 1152, 64), "head")]
    plant(monkeypatch, "sm90/fp8_mainloop.cuh", "looks = HAS_MASK && !full;", "looks = threadIdx.x % 128 < 32;")
    with pytest.raises(EmulationError, match="issue different wgmma"):
        flashkit.attention(*given, backend="cupy_raw").get()


def test_numbers_that_scales_cannot_carry(device: Device, launched: list[str]) -> None:
    """A masked NaN in V; rows of q with a negative scale, 0, or one whose products overflow; a value's scale of 0."""
    given = quantised(*inputs(1, "2:1", 40, 70, 32), "token")
    q, _, v = given
    q.scale[0, 0, 5], q.scale[0, 0, 6], q.scale[0, 1, 30] = -q.scale[0, 0, 5], 0, 1e30  # of two warps
    for options, rows in (({}, slice(None)), ({"mask": np.arange(70) < 50}, slice(None)), ({}, slice(5))):
        exact, lse, rounded = exact_and_rounded(given, **options)
        on = {name: cupy.asarray(x) for name, x in options.items()}
        out, found = flashkit.attention(*map(on_device, given), return_lse=True, backend="cupy_raw", **on)
        np.testing.assert_allclose(found.get(), lse, rtol=1e-4, atol=2e-3)
        got, exact = out.get().astype(np.float64)[:, :, rows], exact[:, :, rows]
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(exact))
        if rows == slice(None):
            assert_close(got, exact, rounded)
        v.data.view(np.uint8)[0, 0, 50, 3], v.scale[0, 0, 55], v.scale[0, 0, 60] = 0x7F, np.inf, 0
    assert launched == [KERNEL] * 3


def test_precision_fp8(device: Device, launched: list[str]) -> None:
    """It is attention on these arrays, of any strides, and later values do not change how weights are rounded."""
    arrays = inputs(1, "2:2", 130, 140, 64)
    q, k, v = map(cupy.asarray, arrays)
    found = flashkit.attention(q, k, v, precision="fp8", backend="cupy_raw", causal=True)
    given = quantised(q, k, v, "block", rotate=True)
    memory = cupy.asarray(np.zeros((1, 2, 140, 72), np.uint8))
    memory[..., 8:] = given[1].data
    given[1] = replace(given[1], data=memory[..., 8:])  # rows that TMA cannot address
    same = flashkit.attention(*given, backend="cupy_raw", causal=True)
    np.testing.assert_array_equal(found.get(), same.get())
    arrays[2][:, :, 128:] *= np.asarray(1000, arrays[2].dtype)
    other = flashkit.attention(q, k, cupy.asarray(arrays[2]), precision="fp8", backend="cupy_raw", causal=True)
    np.testing.assert_array_equal(found.get()[:, :, :90], other.get()[:, :, :90])
    assert launched.count(KERNEL) == 3 and set(launched) == {KERNEL, "quantize_blocks"}


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_a_plan_quantises(layout: Any, device: Device, launched: list[str], plans_on_codes: list[object]) -> None:
    """Each call's arrays with precision="fp8", those of a captured call whenever its graph runs; of any axes, and
    whatever their addresses are.
    """

    def right() -> Any:
        given = quantised(q, k, v, "block", rotate=True, layout=layout)
        return flashkit.attention(*given, backend="cupy_raw", layout=layout).get()

    def found(k: Any) -> Any:
        return flashkit.attention(q, k, v, precision="fp8", backend="cupy_raw", layout=layout)

    shape = (2, 130, 64) if layout == "bhnd" else (130, 2, 64)
    q, k, v = (cupy.asarray(normal(*shape, seed=seed)) for seed in range(3))
    memory = cupy.asarray(normal(k.size + 4, seed=3))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for factor in (1, -3):
            k *= cupy.asarray(np.asarray(factor, k.dtype))
            np.testing.assert_array_equal(found(k).get(), right())
        moved = memory[4:].reshape(k.shape)  # by 8 bytes
        moved[...] = k
        np.testing.assert_array_equal(found(moved).get(), right())
        assert len(plans_on_codes) == 3, "of codes, of quantised arrays, and of those that the kernel does not read"
        launched.clear()
        stream.begin_capture()
        out = found(k)
        graph = stream.end_capture()
        quantize.planned.cache_clear()
        plans.clear()
        gc.collect()
        cupy.asarray(np.ones((), np.float32))
        device.flush()
        for _ in range(2):
            k *= cupy.asarray(np.asarray(2, k.dtype))
            graph.launch()
            np.testing.assert_array_equal(out.get(), right())


def test_an_unknown_layout_is_named(device: Device) -> None:
    x = cupy.asarray(normal(1, 2, 130, 64))
    for layout in ("other", ["bhnd"]):
        with pytest.raises(ValueError, match="layout: expected"):
            flashkit.attention(x, x, x, precision="fp8", layout=layout)


REFUSED = [
    (lambda q, k, v: (flashkit.quantize(q, "int8"), k, v), {}, "q is int8"),
    (lambda q, k, v: (q, k, flashkit.quantize(v, rotate=True)), {}, "v is rotated"),
    (lambda q, k, v: (q, flashkit.quantize(k, rotate=True), v), {}, "rotated differently"),
    (lambda q, k, v: (q, flashkit.quantize(k, smooth=True), v), {}, "k is smoothed"),
    (lambda q, k, v: (q, k, v), {"dropout_p": 0.1, "seed": 1}, "no dropout"),
    (lambda q, k, v: (q, k, v), {"scale": 0.0}, "scale is 0"),
    (lambda q, k, v: (q, k, v), {"precision": "highest"}, "is float32"),
    (lambda q, k, v: (q, k, v), {"backend": "numba_cuda"}, "no kernels for e4m3"),
    (lambda q, k, v: tuple(flashkit.quantize(x[..., :24]) for x in (q, k, v)), {}, "multiples of 16"),
    (lambda q, k, v: tuple(flashkit.quantize(x.astype("float32")) for x in (q, k, v)), {}, "float32 is asked for"),
    (lambda q, k, v: tuple(x[:, :, :20] for x in (q, k, v)), {}, "20 rows share keys"),
]


@pytest.mark.parametrize(("change", "options", "reason"), REFUSED, ids=[each[2] for each in REFUSED])
def test_what_is_dequantised_and_why(change: Any, options: dict[str, Any], reason: str, device: Device) -> None:
    arrays = [cupy.asarray(x) for x in inputs(1, "1:1", 80, 90, 32)]
    given = [x if isinstance(x, Quantized) else flashkit.quantize(x) for x in change(*arrays)]
    found = flashkit.explain(*given, **{"backend": "cupy_raw", **options})
    assert f"dequantised before: q {given[0].format} per tensor" in found.problem and reason in found.problem
    assert "e4m3 with scales" not in found.problem


def test_what_is_not_dequantised(device: Device, launched: list[str]) -> None:
    """`explain` computes nothing, and names the kernel's tile."""
    x = cupy.broadcast_to(cupy.asarray(normal(1, 1, 1, 1)), (1, 4, 4096, 128))
    found = flashkit.explain(x, x, x, precision="fp8", backend="cupy_raw")
    assert "e4m3 with scales per block" in found.problem and "dequantised" not in found.problem
    assert found.tile is not None and found.tile["block_k"] == 128 and "sm90" in str(found.why)
    assert found.bytes["forward"] == 4 * 4096 * (3 * 128 + 2 * 128 + 4) and not launched


@slow
@pytest.mark.parametrize("wrong", [False, True])
def test_a_fresh_kernel_is_checked(wrong: bool, device: Device, launched: list[str], monkeypatch: Any) -> None:
    """Before its first use, as all kernels are."""
    monkeypatch.setattr(verify, "check", CHECK)
    monkeypatch.setattr(compiler.Binary, "checked", False)
    monkeypatch.setattr(compiler.Binary, "mark_checked", lambda self: None)
    if wrong:
        plant(monkeypatch, "sm90/fp8_forward.cu", "0x6420", "0x6240")
    given = [on_device(x) for x in quantised(*inputs(1, "2:1", 100, 100, 32), "token", transpose=False)]
    if wrong:
        with pytest.raises(verify.MiscompiledError, match="out of the freshly compiled forward pass"):
            flashkit.attention(*given, backend="cupy_raw")
    else:
        out = flashkit.attention(*given, backend="cupy_raw")
        assert launched == [KERNEL] * 2 and isinstance(out, cupy.ndarray)


@pytest.mark.parametrize(
    ("dim", "layout", "rotate", "dtype"),
    [
        (64, "bhnd", True, ml_dtypes.bfloat16),
        (128, "bnhd", False, np.float16),
        pytest.param(256, "bhnd", True, np.float16, marks=slow),
    ],
)
def test_quantised_in_one_pass(dim: int, layout: Any, rotate: bool, dtype: Any, device: Device) -> None:
    """By the kernel: the numbers of the host, and V^T as `transposed_values` makes it."""
    x = normal(2, 3, 300, dim, dtype=np.float32)
    x[0, 1, 130], x[1, 2, :, 7] = 0, 5
    x[0, 2, 3, 5], x[0, 2, 4, 6] = np.nan, np.inf
    x = x.astype(dtype) if layout == "bhnd" else np.ascontiguousarray(x.swapaxes(1, 2)).astype(dtype)
    options: dict[str, Any] = {"per": "block", "rotate": rotate, "layout": layout, "transpose": True}
    host, own = (flashkit.quantize(each, **options) for each in (x, cupy.asarray(x)))
    assert device.launched[-1] == "quantize_blocks"
    np.testing.assert_array_equal(own.scale.get(), host.scale)
    differ = np.count_nonzero(own.data.get() != host.data.view(np.uint8))
    assert differ <= (0 if not rotate else x.size // 500)  # sums in another order, between two codes
    np.testing.assert_array_equal(own.transposed.get(), transposed_values(np, own.data.get(), layout))
