"""Latent attention by Hopper's kernel, whose values are the first columns of the keys, against the definition in
float64: the error is at most twice that of the plain computation in the same precision, and a rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cases
import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.backends.cupy_raw import sm80, sm90_mla
from flashkit.call.arguments import prepare
from flashkit.spec import AttentionSpec, Problem

from .calls import cupy, moved

if TYPE_CHECKING:
    from .device import Device

KERNEL, COMBINE = "sm90_mla_forward", "combine"
BF16, FP16 = ml_dtypes.bfloat16, np.float16
slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive


@pytest.fixture(autouse=True)
def only_sm90(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_backend.VARIABLE, "sm90")


def inputs(
    batch: int, heads: str, n_q: int, n_k: int, dim: int, dtype: Any = BF16, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """q and k. Tokens differ in size, so that another one's place shows; scores are of order one."""
    h, h_kv = map(int, heads.split(":"))
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((batch, h, n_q, dim)), rng.standard_normal((batch, h_kv, n_k, dim))
    k *= 2 ** rng.uniform(-1, 1, (batch, h_kv, n_k, 1))
    return q.astype(dtype), k.astype(dtype)


def expected(q: np.ndarray, k: np.ndarray, dim_v: int, **options: Any) -> tuple[cases.Results, cases.Results]:
    """The output and the log-sum-exp, and how far results may be from them."""
    problem, operands, _ = prepare(q, k, k[..., :dim_v], **options)
    return cases.by_definition(problem.spec, operands)


def assert_close(results: list[Any], right: tuple[cases.Results, cases.Results]) -> None:
    cases.assert_conforms(cases.Results(*(x.get() for x in results), *[None] * 4), *right)  # type: ignore[arg-type]


def call(q: np.ndarray, k: Any, dim_v: int, **options: Any) -> list[Any]:
    """Output, into memory that is NaN, and log-sum-exp on the device. k: there, or in host memory."""
    k = cupy.asarray(k) if isinstance(k, np.ndarray) else k
    out = cupy.asarray(np.full((*q.shape[:-1], dim_v), np.nan).astype(q.dtype))
    given, on = (cupy.asarray(q), k, k[..., :dim_v]), moved(options)
    found = flashkit.attention(*given, out=out, return_lse=True, backend="cupy_raw", **on)
    assert found[0] is out
    return list(found)


def check(q: np.ndarray, k: np.ndarray, dim_v: int, **options: Any) -> None:
    assert_close(call(q, k, dim_v, **options), expected(q, k, dim_v, **options))


def splits(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(sm90_mla, "number_of_splits", lambda work_tiles, key_tiles, *_: min(count, key_tiles))


def paged(k: np.ndarray, lengths: np.ndarray, page: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The keys in pages in any order, and their table. Other pages and what lies behind a sequence are NaN; the table
    names pages that do not exist there.
    """
    batch, heads, n_k, dim = k.shape
    width = -(-n_k // page)
    rng, count = np.random.default_rng(seed), batch * width + 3
    pages = np.full((count, page, heads, dim), np.nan).astype(k.dtype)
    table, order = np.full((batch, width), count + 5, np.int32), rng.permutation(count)
    for b, n in enumerate(lengths):
        for i in range(-(-int(n) // page)):
            table[b, i] = at = order[b * width + i]
            own = k[b, :, i * page : min((i + 1) * page, int(n))].swapaxes(0, 1)
            pages[at, : len(own)] = own
    return pages, table


@pytest.mark.parametrize(
    ("page", "heads", "n_q", "dims", "count", "options"),
    [
        (24, "20:1", 3, (320, 256), 3, {"causal": True}),
        (64, "16:1", 1, (576, 512), 1, {}),
        pytest.param(64, "128:1", 2, (576, 512), 4, {"causal": True}, marks=slow),
        pytest.param(8, "4:2", 2, (576, 512), 2, {"window": (70, 0)}, marks=slow),
        pytest.param(128, "16:1", 1, (320, 256), 9, {"softcap": 4.0}, marks=slow),
    ],
)
@pytest.mark.one_in(2)
def test_pages(
    page: int, heads: str, n_q: int, dims: tuple[int, int], count: int, options: dict[str, Any],
    device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Sequences of any length, also none. Fewer keys than there is room for: one split has none of them."""
    splits(monkeypatch, count)
    lengths = np.array([200, 1, 0, 65])
    q, k = inputs(4, heads, n_q, 200, dims[0])
    options = {"kv_lengths": lengths, "scale": dims[0] ** -0.5, **options}
    if "window" in options or "causal" in options:
        options["q_offset"] = np.maximum(lengths - n_q, -1)
    right = expected(q, k, dims[1], **options)
    pages, table = paged(k, lengths, page)
    on = moved(options)
    bnhd = cupy.asarray(np.ascontiguousarray(q.swapaxes(1, 2)))
    memory = cupy.asarray(pages)
    out, lse = flashkit.attention(
        bnhd, memory, memory[..., : dims[1]], page_table=table, layout="bnhd", return_lse=True, backend="cupy_raw", **on
    )
    lse = lse if lse.shape == right[0].lse.shape else lse.swapaxes(1, 2)
    assert_close([out.swapaxes(1, 2), lse], right)
    assert launched == [KERNEL] + [COMBINE] * (count > 1)


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=slow), pytest.param(7, marks=slow)])
def test_features(count: int, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One CTA takes all units, of odd and even numbers of tiles. Keys behind the lengths, on the device, are NaN; some
    rows see none; heads differ in their mask, so that a tile is FULL for one and EMPTY for another.
    """
    device.sms = 1
    splits(monkeypatch, count)
    q, k = inputs(3, "20:1", 7, 450, 320, FP16)
    lengths = np.array([450 - 77, 5, 450])

    def of_heads(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (h % 2 == 0) | (k >= 150)

    options = {
        "kv_lengths": lengths, "causal": True, "q_offset": np.array([450 - 77 - 7, -4, 200]), "mask_mod": of_heads,
        "sinks": np.linspace(-2, 1, 20).astype(np.float32), "softcap": 6.0, "scale": 0.06,
        "alibi_slopes": np.linspace(0.001, 0.1, 20).astype(np.float32),
    }  # fmt: skip
    right = expected(q, k, 256, **options)
    for b, n in enumerate(lengths):
        k[b, :, n:] = np.nan
    assert_close(call(q, k, 256, **options), right)
    assert launched == [KERNEL] + [COMBINE] * (count > 1)


@pytest.mark.parametrize("growth", [40, -40])
def test_a_row_maximum_that_grows(growth: int, device: Device, launched: list[str]) -> None:
    """In half of the rows, from tile to tile in one direction: O of both warp groups is rescaled, or is not."""
    q, k = inputs(1, "16:1", 1, 330, 576)
    q[..., 0] = np.arange(16)[:, None] % 3 > 0
    k[..., 0] = np.linspace(0, growth, 330)
    check(q, k, 512, scale=1.0 / 24)
    check(q, k, 512, scale=1.0)
    assert launched.count(KERNEL) == 2


@pytest.mark.parametrize("count", [1, 3])
def test_equal_scores_of_any_size(count: int, device: Device, launched: list[str], monkeypatch: Any) -> None:
    """Weights are equal, and a split has the weight of its keys. Values are no part of the scores."""
    splits(monkeypatch, count)
    (q, k), powers = inputs(1, "16:1", 1, 300, 576), np.repeat([-2, 1, 2, 4, 10, 26, 50, 52], 2)
    q[...], k[..., 512:] = 0, 130
    q[..., 512:] = (130.0 * 4.0**powers * np.resize([1, -1], 16))[:, None, None]
    out, lse = call(q, k, 512)
    mean = k[0, 0, :, :512].astype(np.float64).mean(0)
    np.testing.assert_allclose(out.get().astype(np.float64)[0, :, 0], np.broadcast_to(mean, (16, 512)), atol=2.0**-9)
    scores = 64 * 130 * q[0, :, 0, -1].astype(np.float64) / 24
    np.testing.assert_allclose(lse.get()[0, :, 0], scores + np.log(300), rtol=2.0**-21)
    assert launched == [KERNEL, COMBINE][: 1 + (count > 1)]


@pytest.mark.parametrize("count", [1, 2])
def test_masked_nan(count: int, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is NaN, which half of the queries do not see: theirs are as without it, and the others' are NaN."""
    splits(monkeypatch, count)
    q, k = inputs(1, "4:1", 6, 150, 320)
    options = {"causal": True, "scale": 0.06}
    exact, allowed = expected(q, k, 256, **options)
    k[0, 0, 147, [7, 200]] = np.nan  # values of both warp groups
    out, lse = call(q, k, 256, **options)
    exact.out, exact.lse = exact.out[:, :, :3], exact.lse[:, :, :3]
    assert_close([out[:, :, :3], lse[:, :, :3]], (exact, allowed))
    assert np.isnan(out.get()[:, :, 3:].astype(np.float64)).all() and np.isnan(lse.get()[:, :, 3:]).all()


@pytest.mark.parametrize(
    ("heads", "n_q", "tiles"), [("64:1", 5, 5), pytest.param("40:1", 3, 2, marks=slow)], ids=["odd", "ragged"]
)
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=slow)])
def test_clusters(
    heads: str, n_q: int, tiles: int, count: int, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Two CTAs take neighbouring row tiles, of which the last may have no neighbour, and load each key once: one
    cluster all units, among them sequences without keys; row tiles that see other keys than their neighbours.
    """
    assert sm90_mla.row_tiles(int(heads.split(":")[0]), n_q) == tiles
    device.sms = 2
    splits(monkeypatch, count)
    q, k = inputs(6, heads, n_q, 150, 320)
    lengths, offset = np.array([150, 0, 0, 0, 1, 66]), np.array([62, 0, 0, 0, 0, 63])
    check(q, k, 256, kv_lengths=lengths, causal=True, q_offset=offset, scale=0.06)
    check(q, k, 256, scale=0.06, mask_mod=lambda b, h, q, k: k < 40 * q)
    assert set(launched) <= {KERNEL, COMBINE}


@pytest.mark.parametrize("threads", [1024, 32])
def test_many_splits(threads: int, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a thread takes at a time, so that several CTAs combine them for a row: of several groups of threads
    each, or in several rounds.
    """
    splits(monkeypatch, 11)
    monkeypatch.setattr(sm80, "_COMBINE_THREADS", threads)
    check(*inputs(1, "3:1", 1, 64 * 11 - 5, 320), 256, scale=0.06, sinks=np.array([3.0, 4.0, 5.0], np.float32))
    assert launched == [KERNEL, COMBINE]


def test_deterministic_results_depend_on_their_sequence_alone(device: Device, launched: list[str]) -> None:
    """Neither on how many others there are nor on how long they are: sequences of no, one, two and three splits."""
    lengths = np.array([2100, 900, 0, 1025], np.int32)
    q, k = inputs(4, "16:1", 1, 2100, 320, FP16)
    every = call(q, k, 256, kv_lengths=lengths, deterministic=True)
    assert launched == [KERNEL, COMBINE]
    assert_close(every, expected(q, k, 256, kv_lengths=lengths))
    for b, most in ((0, 2100), (1, 900), (1, 1500), (3, 1025)):
        one = call(q[b : b + 1], k[b : b + 1, :, :most], 256, kv_lengths=lengths[b : b + 1], deterministic=True)
        for got, want in zip(one, every, strict=True):
            np.testing.assert_array_equal(got.get()[0], want.get()[b])
    device.sms = 16
    other = call(q[:1], k[:1], 256, kv_lengths=lengths[:1])[0].get()[0]
    assert (other != every[0].get()[0]).any()  # which this is about


@slow
def test_lists_of_many_tiles(device: Device, launched: list[str]) -> None:
    """A unit of more K tiles than a list holds; and under a mask, none of the last list's."""
    q, k = inputs(1, "2:1", 1, 7000, 264)
    device.sms = 1
    check(q, k, 8, scale=0.06)
    check(q, k, 8, scale=0.06, mask_mod=lambda b, h, q, k: (k > 3000) & (k % 640 < 500))
    assert launched == [KERNEL] * 2


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("apart", marks=slow), "another view", pytest.param("scale", marks=slow),
        pytest.param("rows", marks=slow), pytest.param("packed", marks=exhaustive),
    ],
)  # fmt: skip
def test_calls_of_older_kernels(how: str, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that are not the first columns of the keys, and arrays that the kernel does not take."""
    monkeypatch.delenv(cuda_backend.VARIABLE)
    q, k = inputs(1, "2:1", 2, 20, 264)
    options: dict[str, Any] = {"scale": -0.1 if how == "scale" else 0.1}
    on_device, width = cupy.asarray(k), 8
    if how == "rows":  # not multiples of 16 bytes
        on_device = cupy.asarray(np.concatenate([k, k[..., :3]], -1))[..., :264]
    first = 8 if how == "another view" else 0
    values = cupy.asarray(k[..., :width] * 2) if how == "apart" else on_device[..., first : first + width]
    v = k[..., :width] * 2 if how == "apart" else k[..., first : first + width]
    given = [cupy.asarray(q), on_device, values]
    plain = [q, k, v]
    if how == "packed":
        given, plain = ([x[0].swapaxes(0, 1) for x in each] for each in (given, plain))
        options["cu_seqlens"] = [0, 2], [0, 20]
    out = flashkit.attention(*given, backend="cupy_raw", **options)
    exact = flashkit.attention(*(x.astype(np.float64) for x in plain), backend="reference", **options)
    np.testing.assert_allclose(out.get().astype(np.float64), exact, atol=2e-2)
    assert launched == ["simt_forward"]


def test_mla_on_the_device(device: Device, launched: list[str]) -> None:
    """The two parts of the keys, as views of one array and apart."""
    q, k = inputs(2, "16:1", 1, 100, 576)
    right = expected(q, k, 512, scale=0.07, causal=True)
    keys = cupy.asarray(k[:, 0])
    for ckv, k_pe in ((keys[..., :512], keys[..., 512:]), (keys[..., :512].copy(), keys[..., 512:].copy())):
        given = cupy.asarray(q[..., :512].copy()), cupy.asarray(q[..., 512:].copy()), ckv, k_pe
        assert_close(list(flashkit.mla(*given, scale=0.07, causal=True, return_lse=True)), right)
    assert launched.count(KERNEL) == 2


# --- on the host ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work_tiles", "key_tiles", "found"),
    [(256, 64, 1), (128, 64, 1), (64, 128, 2), (2, 512, 64), (1, 512, 128), (2, 1, 1), (0, 5, 1)],
)
def test_splits_fill_the_device(work_tiles: int, key_tiles: int, found: int) -> None:
    assert sm90_mla.number_of_splits(work_tiles, key_tiles, 132) == found


@pytest.mark.parametrize(
    ("work_tiles", "key_tiles", "found"), [(256, 256, 4), (128, 64, 1), (2, 512, 64), (10000, 2048, 1), (400, 2048, 2)]
)
def test_sequences_that_differ_in_length(work_tiles: int, key_tiles: int, found: int) -> None:
    """Units of one size, unless these are so many that all together take the same time, and much memory."""
    assert sm90_mla.number_of_splits(work_tiles, key_tiles, 132, True) == found


def test_what_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for dims, reason in (
        ((577, 64), "head dim 577 is over 576"), ((600, 512), "head dim 600 is over 576"),
        ((560, 520), "head dim 520 is over 512"), ((500, 64), "not a multiple of 16 bytes"),
        ((300, 300), "head dim 300 is over 256"),
    ):  # fmt: skip
        q, k, v = (cupy.zeros((1, 1, 70, dim), np.float16) for dim in (dims[0], *dims))
        with pytest.raises(flashkit.UnsupportedError, match=reason):
            flashkit.attention(q, k, v, backend="cupy_raw")
    q, k = (cupy.zeros((1, 1, 70, 576), np.float16) for _ in range(2))
    found = flashkit.explain(q, k, k[..., :512], backend="cupy_raw")
    assert "sm90: latent attention" in str(found)
    with pytest.raises(flashkit.UnsupportedError, match="dropout"):
        flashkit.attention(q, k, k[..., :512], dropout_p=0.1, seed=1, backend="cupy_raw")
    for dim, reason in (576, ""), (584, "584/512 are over 576/512"):
        assert sm90_mla.supports(Problem(AttentionSpec("float16", dim, 512, 16), 2, 16, 1, 100), "forward").reason == (
            reason and f"head dims {reason}"
        )
    packed = Problem(AttentionSpec("float16", 576, 512, 16, packed=True), 2, 16, 1, 100)
    assert "packed sequences have no latent kernels" in sm90_mla.supports(packed, "forward").reason
