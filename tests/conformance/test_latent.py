"""Values that are the first columns of the keys, and `mla`, which has the two parts of a key."""

import dataclasses
import tracemalloc
from collections.abc import Iterator
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
from cases import with_

import flashkit
from flashkit import dispatch
from flashkit.backends.cpu import launch
from flashkit.backends.cpu.plan import DECODE_BLOCK_K
from flashkit.call import plans
from flashkit.call.arguments import prepare

SIZES = {"decoding": "3x150", "tiles": "33x80"}
FORMS = {
    "batch": {"storage": "gaps", "layout": "bnhd"}, "padded": {"sequences": "padded", "causal": "yes"},
    "packed": {"sequences": "packed", "causal": "yes"}, "pages": {"sequences": "paged", "causal": "yes"},
}  # fmt: skip
FORM_CASES = [
    pytest.param(form, id=name, marks=[pytest.mark.slow] if name == "padded" else []) for name, form in FORMS.items()
]
DTYPES = [
    "float32", "bfloat16", "bfloat16, emulated tiles",
    pytest.param("float64", marks=pytest.mark.slow), pytest.param("float16", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name, _, method = request.param.partition(", ")
    if method:
        pytest.importorskip("amx_emulation")
        monkeypatch.setenv("FLASHKIT_CPU_BF16", "emulate")
        dispatch.forget()
    yield name
    if method:
        monkeypatch.undo()
        dispatch.forget()


def call_of(dims: str, xp: Any = np, **changes: str) -> cases.Call:
    """A call whose values are views of the keys."""
    call = cases.build(with_(dims=dims, scale="0.3", **changes), xp)
    dv = call.plain_dout.shape[-1]
    return dataclasses.replace(call, v=call.k[..., :dv], plain=call.plain | {"v": call.plain["k"][..., :dv]})


# --- one array for keys and values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, indirect=True)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("form", FORM_CASES)
@pytest.mark.one_in(4)
def test_values_in_the_keys(form: dict[str, str], sizes: str, dtype: str) -> None:
    call = call_of("24/16", heads="4:1", sizes=sizes, dtype=dtype, **form)
    cases.assert_conforms(cases.run(call, "cpu"), *cases.expected(call))


@pytest.mark.parametrize("backend", [b for b in cases.backends() if b.values[0] != "reference"])
@pytest.mark.parametrize("dtype", DTYPES, indirect=True)
@pytest.mark.parametrize("dims", ["576/512", pytest.param("1024", marks=pytest.mark.slow), "513/7"])
@pytest.mark.one_in(5)
def test_head_dims_above_512(dims: str, dtype: str, backend: str) -> None:
    for sizes in ("2x70", "17x30"):
        cases.skip_unless(backend)
        call = call_of(dims, cases.array_library(backend), heads="4:1", batch="1", sizes=sizes, dtype=dtype)
        cases.skip_unless(backend, call)
        cases.assert_conforms(cases.run(call, backend), *cases.expected(call))


@pytest.mark.parametrize(
    ("dims", "backend", "reason"),
    [
        ("576/512", "numba_cuda", "head dim 576 is over 512"),
        ("584/512", "cupy_raw", "head dim 584 is over 576"),
        ("560/520", "cupy_raw", "head dim 520 is over 512"),
    ],
)
def test_gpus_refuse_large_head_dims(dims: str, backend: str, reason: str) -> None:
    call = call_of(dims, heads="4:1", batch="1", sizes="2x30")
    problem = dataclasses.replace(prepare(call.q, call.k, call.v)[0], array_kind="cupy")
    assert dispatch.registry()[backend].supports(problem).reason == reason


def test_a_cached_plan_is_for_values_anywhere() -> None:
    """The layouts are those of views, but the arrays are others."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 1, 24), dtype=np.float32)
    for views_first in (True, False):
        k, other = rng.standard_normal((2, 1, 1, 500 + views_first, 24), dtype=np.float32)
        values = [k[..., :16], other[..., :16]]
        for v in values if views_first else reversed(values):
            exact = flashkit.attention(*(x.astype(np.float64) for x in (q, k, v)))
            np.testing.assert_allclose(flashkit.attention(q, k, v), exact, rtol=1e-4, atol=1e-5)


def test_views_are_read_in_pieces_that_stay_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over other pieces have other last bits."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 1, n, 576), dtype=np.float32) for n in (4, 2000))
    v = np.empty((1, 1, 2000, 576), np.float32)[..., :512]
    v[...] = k[..., :512]
    monkeypatch.setenv("FLASHKIT_NUM_THREADS", "1")
    dispatch.forget()

    def out(v: np.ndarray) -> np.ndarray:
        plans.clear()
        return flashkit.attention(q, k, v)

    apart, views = out(v), out(k[..., :512])
    assert (apart != views).any()
    monkeypatch.setattr(launch, "BYTES_IN_CACHE", 3 * DECODE_BLOCK_K * 576 * 4)
    assert (out(k[..., :512]) == views).all()  # three tiles are the most within 512 KiB
    monkeypatch.setattr(launch, "BYTES_IN_CACHE", 1 << 30)
    assert (out(k[..., :512]) == apart).all()


# --- mla --------------------------------------------------------------------------------------------------------------


def parts(call: cases.Call, apart: bool) -> list[Any]:
    """The arguments of `mla` for a call of `attention` with one key/value head."""
    latent = call.plain_dout.shape[-1]
    tokens_first = call.choice["layout"] == "bnhd" or call.choice["sequences"] in ("packed", "paged")
    k = call.k[..., 0, :] if tokens_first else call.k[..., 0, :, :]
    found = [x[..., part] for x in (call.q, k) for part in (slice(latent), slice(latent, None))]
    return [x.copy() for x in found] if apart else found


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, indirect=True)
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "views"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("form", FORM_CASES)
def test_mla(form: dict[str, str], sizes: str, apart: bool, dtype: str) -> None:
    """Widths that are no whole vectors, and an odd one, where pairs of bfloat16 end within the latent."""
    call = call_of("40/33" if apart else "24/16", heads="4:1", sizes=sizes, dtype=dtype, **form)
    exact, allowed = cases.expected(call)
    out, lse = flashkit.mla(*parts(call, apart), return_lse=True, **call.options)
    got = cases.Results(call.to_plain(out), call.rows_to_plain(lse), None, None, None, None)
    cases.assert_conforms(got, exact, allowed)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("gap", [0, 3])
def test_parts_of_pages_in_a_row(gap: int, queries: int) -> None:
    """Pages of ckv that follow each other are read as one run, unless those of k_pe have gaps, and the reverse."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, queries, 24))
    pages, memory = rng.standard_normal((8, 5, 24)), np.full((2, 8, 5 + gap, 24), np.nan)
    for i, columns in enumerate((slice(16), slice(16, None))):
        apart = memory[i, :, :5, columns]
        apart[...] = pages[..., columns]
        parts = [pages[..., :16].copy(), pages[..., 16:].copy()]
        parts[i] = apart
        out = flashkit.mla(q[..., :16], q[..., 16:], *parts, scale=0.2, page_table=np.arange(8)[None], kv_lengths=[38])
        k = pages.reshape(1, 1, 40, 24)[:, :, :38]
        np.testing.assert_allclose(out, flashkit.attention(q, k, k[..., :16], scale=0.2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("how", ["modified", "poisoned", "reference", "in place", "batch axes"])
def test_mla_takes_what_attention_takes(how: str, sizes: str) -> None:
    changes = {"heads": "3:3" if how == "modified" else "4:1", "sizes": sizes, "kv_lengths": "yes"}
    if how == "modified":
        changes |= {"heads": "4:1", "softcap": "yes", "alibi": "(Hq,)", "sinks": "yes", "window": "left"}
    if how == "batch axes":
        changes |= {"layout": "five axes"}
    call = call_of("24/16", **changes)
    exact, allowed = cases.expected(call)
    given = parts(call, True)
    if how == "poisoned":
        for x in given[2:]:
            for b, n in enumerate(call.options["kv_lengths"]):
                x[b, n:] = np.nan
    options: dict[str, Any] = dict(call.options)
    if how == "reference":
        options["backend"] = "reference"
    if how == "in place":
        options["out"] = given[0]
    out, lse = flashkit.mla(*given, return_lse=True, **options)
    assert how != "in place" or out is given[0]
    got = cases.Results(call.to_plain(out), call.rows_to_plain(lse), None, None, None, None)
    cases.assert_conforms(got, exact, allowed)


def test_decoding_copies_no_key() -> None:
    rng = np.random.default_rng(0)
    q_nope, q_pe = (rng.standard_normal((1, 4, 1, n), dtype=np.float32) for n in (256, 64))
    k = rng.standard_normal((1, 4000, 320), dtype=np.float32)
    for ckv, k_pe in ((k[..., :256], k[..., 256:]), (k[..., :256].copy(), k[..., 256:].copy())):
        flashkit.mla(q_nope, q_pe, ckv, k_pe, scale=0.1)
        tracemalloc.start()
        flashkit.mla(q_nope, q_pe, ckv, k_pe, scale=0.1)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < k_pe.size * 4 / 4


@pytest.mark.parametrize(("first", "row"), [(16, 16), (17, 24), (15, 24)])
def test_parts_that_are_no_row_together(first: int, row: int) -> None:
    """k_pe begins where a row of ckv ends, or nearby, with the same strides or others."""
    rng = np.random.default_rng(0)
    memory = rng.standard_normal(3000, dtype=np.float32)
    q_nope, q_pe = (rng.standard_normal((4, 2, n), dtype=np.float32) for n in (16, 8))
    ckv, k_pe = memory[: 50 * 24].reshape(50, 24)[:, :16], memory[first : first + 50 * row].reshape(50, row)[:, :8]
    k = np.concatenate([ckv, k_pe], -1)[None].astype(np.float64)
    exact = flashkit.attention(np.concatenate([q_nope, q_pe], -1).astype(np.float64), k, k[..., :16], scale=0.2)
    np.testing.assert_allclose(flashkit.mla(q_nope, q_pe, ckv, k_pe, scale=0.2), exact, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 20])
def test_out_may_be_k_pe(queries: int) -> None:
    rng = np.random.default_rng(0)
    q_nope, q_pe = (rng.standard_normal((2, 4, queries, n), dtype=np.float32) for n in (16, 8))
    ckv, memory = rng.standard_normal((2, 80, 16), dtype=np.float32), rng.standard_normal(4000, dtype=np.float32)
    k_pe, out = memory[: 2 * 80 * 8].reshape(2, 80, 8), memory[: q_nope.size].reshape(q_nope.shape)
    expected = flashkit.mla(q_nope, q_pe, ckv, k_pe, scale=0.2)
    assert flashkit.mla(q_nope, q_pe, ckv, k_pe, scale=0.2, out=out) is out
    np.testing.assert_array_equal(out, expected)


Z = np.zeros
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scale": ({"scale": None}, TypeError, "scale: expected a number, got None"),
    "dtypes": ({"k_pe": Z((2, 9, 4))}, TypeError, "k_pe: expected dtype float32 (q_nope's), got float64"),
    "library": ({"ckv": [[1.0]]}, TypeError, "ckv: expected an array of NumPy"),
    "two axes": ({"q_nope": Z((3, 8), "f4"), "q_pe": Z((3, 4), "f4")}, ValueError, "q_nope: expected shape"),
    "queries": ({"q_pe": Z((2, 5, 4, 4), "f4")}, ValueError, "q_nope (2, 5, 3, 8) but for the last, got"),
    "keys": ({"k_pe": Z((2, 8, 4), "f4")}, ValueError, "those of ckv (2, 9, 8) but for the last, got shape (2, 8, 4)"),
    "latent": ({"ckv": Z((2, 9, 7), "f4")}, ValueError, "the last axis of q_nope (2, 5, 3, 8), 1 or more"),
    "rotary": ({"k_pe": Z((2, 9, 3), "f4")}, ValueError, "the last axis of q_pe (2, 5, 3, 4), 1 or more"),
    "no rotary": ({"k_pe": Z((2, 9, 0), "f4"), "q_pe": Z((2, 5, 3, 0), "f4")}, ValueError, "1 or more"),
    "layout": ({"layout": "hbnd"}, ValueError, "got 'hbnd'"),
    "unknown": ({"is_causal": True}, TypeError, "did you mean causal"),
    "batch": ({"ckv": Z((3, 9, 8), "f4"), "k_pe": Z((3, 9, 4), "f4")}, ValueError, "(3,"),
    "columns": (
        {"q_nope": Z((2, 5, 3, 1021), "f4"), "ckv": Z((2, 9, 1021), "f4")}, ValueError,
        "expected 2 to 1024 columns in all, got 1025",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_of_mla(what: str) -> None:
    shapes = {"q_nope": (2, 5, 3, 8), "q_pe": (2, 5, 3, 4), "ckv": (2, 9, 8), "k_pe": (2, 9, 4)}
    given: dict[str, Any] = {name: Z(shape, "f4") for name, shape in shapes.items()}
    flashkit.mla(**given, scale=1)
    changes, error, message = BAD[what]
    with pytest.raises(error) as raised:
        flashkit.mla(**given | {"scale": 1} | changes)
    assert message in str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive), "e4m3"])
def test_a_latent_cache_holds_each_token_once(dtype: str) -> None:
    """Across forks and trims, in layers, and equal to `mla` of the tokens."""
    rng, of_queries = np.random.default_rng(5), ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    cache = flashkit.KVCache(
        3, 1, 48, 32, pages=30, page=4, layers=2, latent=True, dtype=dtype, like=np.empty(0, of_queries)
    )
    tokens = rng.standard_normal((13, 48)).astype(of_queries)
    for layer in cache:
        assert len(layer._steps.memory) == 1
        layer.append(tokens[:9, None], cu_seqlens=[0, 9, 9, 9])
    cache.fork(0)
    cache.trim(1, 2)
    for layer in cache:
        layer.append(tokens[9:, None], cu_seqlens=[0, 1, 4, 4])
    held = [tokens[:10], np.concatenate([tokens[:7], tokens[10:]])]
    q = rng.standard_normal((3, 6, 1, 48)).astype(of_queries)
    out = cache[1].attend(q, scale=0.1, causal=True)
    for b, c in enumerate(held):
        if dtype == "e4m3":
            c = flashkit.quantize(c, "e4m3", "token").dequantize()
        wide = [x.astype(np.float64) for x in (q[b], c)]
        want = flashkit.mla(wide[0][:, :, :32], wide[0][:, :, 32:], wide[1][:, :32], wide[1][:, 32:], scale=0.1)
        assert abs(out[b] - want).max() < (0.02 if dtype == "bfloat16" else 3e-6)
    assert cache.lengths.tolist() == [10, 10, 0] and (out[2] == 0).all()
