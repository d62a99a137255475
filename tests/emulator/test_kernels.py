"""Each generation of kernels of both CUDA backends on the emulated device, against the definition in float64.

A generation hands a call that it cannot take to an older one, so `forced` asserts whose kernels each test launched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import cases
import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import dispatch, mods
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.backends.cuda_common import sm90_bwd_launch
from flashkit.backends.cupy_raw import sm80, sm90, sm90_backward
from flashkit.backends.numba_cuda import sm90 as numba_sm90
from flashkit.call import sequences as call_sequences
from flashkit.call.arguments import prepare
from flashkit.call.sequences import read_in_place
from flashkit.mods import dropout

from . import hardware
from .calls import FEATURES, PLAIN, build, check, check_arrays, check_forward, cupy, features, generations, normal

if TYPE_CHECKING:
    from .device import Device

BACKENDS = "cupy_raw", "numba_cuda"
GENERATIONS = "sm90", "sm80", "simt"
slow, exhaustive = pytest.mark.slow, pytest.mark.exhaustive

EACH = [
    pytest.param(backend, generation, id=f"{backend}-{generation}", marks=slow if backend == "numba_cuda" else [])
    for backend in BACKENDS
    for generation in GENERATIONS
]

CUPY_OFTEN = [
    pytest.param(backend, generation, marks=exhaustive if backend == "numba_cuda" else [])
    for backend in BACKENDS
    for generation in GENERATIONS
]
"""Numba's kernels take long to compile: those of further specifications run where all tests are asked for."""

HARD_DATA = [
    pytest.param(
        backend,
        generation,
        data,
        marks=exhaustive if (backend, data) == ("numba_cuda", "NaN") and generation != "simt" else [],
    )
    for backend in BACKENDS
    for generation in GENERATIONS
    for data in ("growing", "NaN")
]


def in_order(backend: str, generation: str) -> bool:
    """Whether kernels can add to dQ in one order. Numba's for tensor cores cannot: such gradients run on simt."""
    return backend == "cupy_raw" or generation == "simt"


@pytest.fixture
def generation() -> str:
    """Tests are parametrized with it."""
    return ""


@pytest.fixture
def ran(generation: str) -> str:
    """Whose kernels run: those of another generation where a test is parametrized with that, too."""
    return generation


@pytest.fixture(autouse=True)
def forced(generation: str, ran: str, launched: list[str], device: Device, monkeypatch: Any) -> Iterator[None]:
    """The generation is the only one that the backend may plan with, and the test has launched its kernels alone."""
    if generation:
        monkeypatch.setenv(cuda_backend.VARIABLE, generation)
    yield
    assert not generation or getattr(device, "missed", "") or generations(launched) == {ran}


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("backend", "generation"), EACH)
def test_features(backend: str, generation: str, device: Device) -> None:
    """And the same bits in another order of events, where CTAs share a tile of dQ."""
    check(features(generation), backend, deterministic=in_order(backend, generation))
    found, device.sms = [], 16  # all CTAs at a time
    for seed in (1, 2) if generation != "simt" and in_order(backend, generation) else ():
        device.seed(seed)
        call = build({**features(generation), "batch": "2", "heads": "2:1"}, "cancelling")
        call.options["deterministic"] = True
        found.append(cases.run(call, backend).dq)
    for dq in found[1:]:
        np.testing.assert_array_equal(dq, found[0])


@slow
@pytest.mark.parametrize(("backend", "generation", "data"), HARD_DATA)
def test_hard_data(backend: str, generation: str, data: str) -> None:
    """A row maximum that grows in each tile; a masked NaN, in the first entry. By the kernels of test_features."""
    choice = {**features(generation), "batch": "1"} if data == "NaN" else features(generation)
    check(choice, backend, data, deterministic=in_order(backend, generation))


SOFTMAXES = [
    pytest.param(backend, generation, dtype, options, id=f"{backend}-{generation}-{dtype}{'-'.join(['', *options])}",
                 marks=slow if backend == "numba_cuda" or dtype == "float32" else [])
    for backend, generation, dtype, options in (
        ("cupy_raw", "sm90", "bfloat16", {}), ("cupy_raw", "sm90", "float16", {}), ("cupy_raw", "sm90", "float32", {}),
        ("cupy_raw", "sm90", "float32", {"precision": "tf32"}), ("cupy_raw", "sm90", "bfloat16", {"alibi_slopes": 0}),
        ("cupy_raw", "sm80", "bfloat16", {}), ("cupy_raw", "sm80", "float32", {}), ("cupy_raw", "simt", "float32", {}),
        ("cupy_raw", "sm80", "bfloat16", {"alibi_slopes": 0}),
        ("numba_cuda", "sm90", "bfloat16", {}), ("numba_cuda", "sm90", "float16", {}),
        ("numba_cuda", "sm80", "bfloat16", {}), ("numba_cuda", "simt", "float32", {}),
    )
]  # fmt: skip
"""Kernels with a softmax of their own. Slopes of ALiBi are 0: a modification that changes nothing."""

POWERS = -2, 1, 4, 6, 9, 53
"""Scores are 8 (130 2^power)^2, from 8e3 to 1e37: not powers of two, whose products with any scale are exact."""


def equal_scores(n_q: int, n_k: int, dtype: str, dim: int = 64) -> tuple[list[np.ndarray], np.ndarray]:
    """q, k and v, and the scores: the same in a head, one of a power with both signs."""
    powers = [x for x in POWERS if dtype != "float16" or x < 9]
    size = 130.0 * 2.0 ** np.repeat(powers, 2)[:, None, None]
    q, k = np.broadcast_to(size, (len(size), n_q, dim)).copy(), np.broadcast_to(size, (len(size), n_k, dim))
    q[1::2] *= -1
    v = np.random.default_rng(0).standard_normal((len(size), n_k, 64))
    arrays = [x[None].astype(dtype) for x in (q, k, v)]
    return arrays, (q[:, 0, 0] * k[:, 0, 0]) * dim**0.5


@pytest.mark.parametrize(("backend", "generation", "dtype", "options"), SOFTMAXES)
def test_equal_scores_of_any_size(
    backend: str, generation: str, dtype: str, options: dict[str, Any], launched: list[str]
) -> None:
    """Weights are equal where scores are, though the rounding of a row reference is greater than exponents may be. In
    the backward pass they are so within the rounding of the log-sum-exp, or 0 where that tells nothing (numerics.md).
    """
    (q, k, v), scores = equal_scores(66, 200, dtype)
    if "alibi_slopes" in options:
        options = {"alibi_slopes": cupy.asarray(np.zeros(len(scores), np.float32))}
    (out, lse), vjp = flashkit.attention_vjp(*map(cupy.asarray, (q, k, v)), return_lse=True, backend=backend, **options)
    mean = np.broadcast_to(v.astype(np.float64).mean(2, keepdims=True), out.shape)
    unit = cases.epsilon("float16" if "precision" in options else dtype)
    # Of the last tile, where scores are small.
    rounding = np.where(np.abs(scores) < 7e5, np.abs(scores) * 2.0**-22, 0)
    assert (np.abs(cases.to_numpy(out).astype(np.float64) - mean).max((0, 2, 3)) <= 4 * unit + rounding).all()
    np.testing.assert_allclose(cases.to_numpy(lse)[0, :, 0], scores + np.log(200), rtol=4 * cases.epsilon("float32"))
    assert generations(launched) == {generation}

    *_, dv = vjp(cupy.asarray(np.ones_like(v[:, :, :66])), cupy.asarray(np.zeros(lse.shape, np.float32)))
    times_too_great = cases.to_numpy(dv).astype(np.float64)[0] * 200 / 66
    unit_of_lse = np.spacing(np.abs(scores + np.log(200)).astype(np.float32)).astype(np.float64)
    for found, ulp in zip(times_too_great, unit_of_lse, strict=True):
        none = generation != "simt" and ulp > 4 and not found.any()
        close = ulp < 8 or generation == "simt"
        most = np.exp(min(2.5 * ulp, 700) + 0.02)
        assert none or (close and (found <= most).all() and (found >= 1 / most).all()), (ulp, found.min(), found.max())


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("generation", ["sm80"])
def test_deterministic_decoding_depends_on_its_sequence_alone(
    paged: bool, generation: str, device: Device, launched: list[str]
) -> None:
    """Neither on how many others there are nor on how long they are."""
    device.sms = 64
    rng, lengths = np.random.default_rng(0), np.array([5000, 700, 3000, 0, 513], np.int32)
    arrays = [rng.standard_normal((5, heads, n, 64)).astype(np.float16) for heads, n in ((4, 2), (2, 5000), (2, 5000))]

    def of(entries: slice, most: int, **more: Any) -> list[np.ndarray]:
        q, *kv = (x[entries] for x in arrays)
        kv = [x[:, :, :most] for x in kv]
        if paged:
            pages = len(q) * most // 100
            more["page_table"] = cupy.asarray(np.arange(pages, dtype=np.int32).reshape(len(q), -1))
            kv = [x.reshape(len(q), 2, -1, 100, 64).transpose(0, 2, 3, 1, 4).reshape(pages, 100, 2, 64) for x in kv]
        found = flashkit.attention(
            *map(cupy.asarray, (q, *kv)), kv_lengths=cupy.asarray(lengths[entries]), return_lse=True,
            backend="cupy_raw", **more,
        )  # fmt: skip
        return [x.get() for x in found]

    every = of(slice(0, 5), 5000, deterministic=True)
    assert launched == ["sm80_forward", "combine"]
    for b, most in ((0, 5000), (1, 700), (1, 1500), (2, 3000), (4, 600)):
        for got, want in zip(of(slice(b, b + 1), most, deterministic=True), every, strict=True):
            np.testing.assert_array_equal(got[0], want[b])
    assert (of(slice(0, 1), 5000)[0][0] != every[0][0]).any()  # which this is about
    assert not every[0][3].any()
    exact = flashkit.attention(*(x.astype(np.float64) for x in arrays), kv_lengths=lengths, backend="reference")
    cases.within_a_unit(every[0], exact)


PACKED = {**FEATURES, "sizes": "100x140", "sequences": "packed", "q_offset": "default", "kv_lengths": "no"}
"""Three sequences, one of them empty, and tokens behind the last."""

PACKED_KERNELS = [each for each in CUPY_OFTEN if each.values not in (("numba_cuda", "sm90"), ("numba_cuda", "sm80"))]

OLDER_PAGED = [each for each in PACKED_KERNELS if each.values[1] != "sm90"]
"""Pages of any number of keys, and few queries."""


@slow
@pytest.mark.parametrize(("backend", "generation"), PACKED_KERNELS)
def test_packed_sequences(backend: str, generation: str, launched: list[str]) -> None:
    choice = {**PACKED, "dtype": features(generation)["dtype"], "alibi": "(B, Hq)"}
    check(choice, backend, deterministic=True)
    assert generations(launched) == {generation}
    assert {"bwd_preprocess", "bwd_sinks"} <= set(launched)


@slow
@pytest.mark.one_in(12)
@pytest.mark.parametrize(("backend", "generation"), PACKED_KERNELS)
@pytest.mark.parametrize(
    "more",
    [
        {"window": "both", "softcap": "yes", "dropout": "yes", "dtype": "bfloat16"},
        {"mask_mod": "document", "score_mod": "plain"}, {"block_mask": "bigbird", "storage": "gaps"}, {},
    ],
    ids=["window", "document", "blocks", "all"],
)  # fmt: skip
def test_modifications_of_packed_sequences(more: cases.Choice, backend: str, generation: str) -> None:
    """Positions, heads and batch entries are those of each sequence."""
    if "storage" in more and (generation, backend) != ("sm80", "cupy_raw"):
        more = {**more, "storage": "swapped"}  # TMA takes no gaps, nor do Numba's copies of 16 bytes
    check({**PLAIN, "batch": "3", "sizes": "100x140", "sequences": "packed", **more}, backend)


def check_packed_gradients(
    queries: dict[int, int], keys: dict[int, int], heads: tuple[int, int], dim: int, causal: bool
) -> None:
    """The gradients of sequences with so many queries and keys, the others empty, and tokens behind the last."""
    counts = np.zeros((2, max(*queries, *keys) + 1), int)
    for of_each, given in zip(counts, (queries, keys), strict=True):
        of_each[list(given)] = list(given.values())
    cu = tuple(np.cumsum([0, *each]) for each in counts)
    tokens = cu[0][-1] + 3, cu[1][-1] + 5
    arrays = normal(ml_dtypes.bfloat16, *((tokens[i], heads[i], dim) for i in (0, 1, 1, 0)))
    check_arrays(*arrays, on_device=True, cu_seqlens=cu, causal=causal)


MANY_KEYS = {
    "75": ({0: 40, 2: 7, 33: 200, 34: 1, 69: 17, 74: 5}, {0: 40, 3: 9, 33: 128, 34: 140, 69: 270, 74: 5}),
    "1100": ({1: 1, 34: 140, 1055: 128, 1099: 17}, {0: 3, 1: 1, 34: 140, 1055: 128, 1099: 17}),
}
"""Queries and keys of more sequences than a warp finds at once: some have only one of them, some end with a whole tile,
some have several tiles.
"""


@slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize(
    ("dim", "ordered", "causal", "lengths"),
    [
        (64, True, True, "1100"), (64, False, False, "75"), (64, False, True, "75"),
        (128, True, False, "1100"), (128, False, True, "1100"), (128, True, True, "75"),
    ],
)  # fmt: skip
def test_gradients_of_many_packed_sequences(
    dim: int, ordered: bool, causal: bool, lengths: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By as many CTAs as there are work tiles and fewer. Each pair of the parameters' values comes together."""
    heads = (2, 2) if dim == 64 else (2, 1)
    monkeypatch.setattr(sm90_backward, "in_order", lambda _: ordered)
    device.sms = 4
    check_packed_gradients(*MANY_KEYS[lengths], heads, dim, causal)


@slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("ordered", [True, False])
def test_no_packed_sequence_has_keys(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no work tile, so nothing clears dq_accum."""
    monkeypatch.setattr(sm90_backward, "in_order", lambda _: ordered)
    monkeypatch.setattr(sm90_bwd_launch, "_LEAD", 0)
    check_packed_gradients({0: 5, 3: 70}, {0: 0}, (4, 4), 64, causal=False)


@slow
@pytest.mark.parametrize("generation", ["sm90"])
def test_tokens_behind_the_last_sequence_have_no_slopes(device: Device) -> None:
    """They are a sequence to the kernels, of which arrays of the caller have no entry."""
    arrays = normal(np.float16, *((200, heads, 64) for heads in (4, 2, 2, 4)))
    slopes, sinks = np.random.default_rng(1).random((2, 4)).astype(np.float32), np.zeros(4, np.float32)
    given = {"alibi_slopes": cupy.asarray(slopes), "sinks": cupy.asarray(sinks)}
    if isinstance(device, hardware.Hardware):
        given["alibi_slopes"] = hardware.at_the_end_of_memory(given["alibi_slopes"])
    options = {"cu_seqlens": np.array([0, 90, 150]), "causal": True, "deterministic": True}
    check_arrays(*arrays, given=given, alibi_slopes=slopes, sinks=sinks, **options)


@slow
@pytest.mark.parametrize("generation", ["sm90"])
def test_a_long_sequence_before_a_short_one() -> None:
    """It ends later, and what its last tile would store behind its end would stay."""
    for begins_q, begins_k in (([0, 70, 128], [0, 1000, 1010]), ([0, 700, 710], [0, 70, 128])):
        arrays = normal(np.float16, *((each[-1], 1, 64) for each in (begins_q, begins_k, begins_k, begins_q)))
        check_arrays(*arrays, cu_seqlens=(np.array(begins_q), np.array(begins_k)))


PAGED = {**PACKED, "sequences": "paged"}
"""Pages of five keys; those that no sequence has are NaN, and the table is -1 behind a sequence's last."""


@slow
@pytest.mark.parametrize("backend", ["cupy_raw", pytest.param("numba_cuda", marks=exhaustive)])
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
def test_keys_that_no_query_sees_beside_a_row_that_is_not_finite(backend: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 1, n, 64)).astype(np.float16) for n in (100, 400, 400, 100))
    q[0, 0, 3] = np.nan
    _, vjp = flashkit.attention_vjp(*map(cupy.asarray, (q, k, v)), causal=True, q_offset=0, backend=backend)
    for found in vjp(cupy.asarray(dout))[1:]:
        assert not found[0, 0, 100:].get().any()


@slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("what", ["q", "dout", "scores", "sinks"])
def test_rows_of_the_next_sequence_are_not_finite(what: str, deterministic: bool) -> None:
    """A tile of queries reaches into the next sequence, or behind the last, whose log-sum-exp is the sink."""
    rng = np.random.default_rng(0)
    begins_q, begins_k = np.array([0, 70, 170, 180]), np.array([0, 150, 240, 240])
    q, k, v, dout = (rng.standard_normal((n, 2, 64)).astype(ml_dtypes.bfloat16) for n in (200, 250, 250, 200))
    sinks = np.array([0.5, 1], np.float32) if what == "sinks" else None
    first = 180 if sinks is not None else 70
    if what == "scores":
        k[150:240], q[70:] = k[150:240].astype(np.float32) * 1e-37, 1e38
    wide = [x.astype(np.float64) for x in (q, k, v, dout)]
    k[240:] = v[240:] = np.nan
    if what != "scores":
        {"q": q, "dout": dout}.get(what, q)[first:] = np.nan
    given = {"cu_seqlens": tuple(map(cupy.asarray, (begins_q, begins_k))), "deterministic": deterministic}
    on_device = None if sinks is None else cupy.asarray(sinks)
    _, vjp = flashkit.attention_vjp(*map(cupy.asarray, (q, k, v)), sinks=on_device, backend="cupy_raw", **given)
    found = vjp(cupy.asarray(dout))
    _, right = flashkit.attention_vjp(
        *wide[:3], cu_seqlens=(begins_q, begins_k), sinks=None if sinks is None else sinks.astype(float),
        backend="reference",
    )  # fmt: skip
    ends = (180, 240, 240) if sinks is not None else (70, 150, 150)
    for got, each, end, last in zip(found, right(wide[3]), ends, (180, 240, 240), strict=True):
        got = got.get()
        cases.within_a_unit(got[:end], each[:end])
        assert not got[last:].any()


@slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.one_in(2)
def test_packed_sequences_of_many_keys(causal: bool, deterministic: bool, device: Device) -> None:
    """More key tiles than a word of dq_semaphore has bits, and a sequence with few."""
    device.sms = 5
    cu = np.cumsum([0, 70, 80, 3]), np.cumsum([0, 4100, 150, 4000])
    arrays = normal(np.float16, *((n, 1, 64) for n in (153, 8250, 8250, 153)))
    check_arrays(*arrays, cu_seqlens=cu, causal=causal, deterministic=deterministic)


@slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_few_keys_after_a_long_one(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of their work tiles clears a share of dq_accum; under a mask, where dQ is in order, its own last first."""
    monkeypatch.setattr(sm90_bwd_launch, "_LEAD", 4)
    cu = np.array([0, 260, 265, 268, 269, 270, 272])
    arrays = normal(ml_dtypes.bfloat16, *[(272, 6, 64)] * 4)
    check_arrays(*arrays, cu_seqlens=cu, causal=causal)


@slow
@pytest.mark.parametrize(
    ("backend", "generation", "dtype"),
    [
        pytest.param(backend, generation, dtype, marks=exhaustive if backend == "numba_cuda" else [])
        for backend, generation in (("cupy_raw", "sm80"), ("numba_cuda", "simt"))
        for dtype in (np.int32, np.int64)
    ],
)
def test_integers_of_the_caller_are_read_in_place(
    dtype: type, backend: str, generation: str, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no copy of another dtype, nor are offsets computed that nothing reads."""
    q, k, v = normal(np.float16, (2, 2, 3, 64), (6, 16, 1, 64), (6, 16, 1, 64))
    table, lengths = np.array([[4, 1, 5], [0, 3, -1]]), np.array([40, 17])
    integers = {"page_table": table, "kv_lengths": lengths}
    on_device = {name: cupy.asarray(x.astype(dtype)) for name, x in integers.items()}
    for x in on_device.values():
        assert read_in_place(cupy, x).data.ptr == x.data.ptr
    with monkeypatch.context() as patch:
        patch.setattr(call_sequences, "q_offsets_of", lambda *_: pytest.fail("nothing reads offsets"))
        flashkit.attention(*map(cupy.asarray, (q, k, v)), **on_device, backend=backend)
    for causal in ({}, {"causal": True, "q_offset": np.array([-1, 30])}):
        given = on_device | {name: cupy.asarray(x.astype(dtype)) for name, x in causal.items() if name == "q_offset"}
        check_arrays(q, k, v, backend=backend, given=given, **integers, **causal)
    assert generations(launched) == {generation}


@slow
@pytest.mark.parametrize(
    ("page", "dim", "queries"),
    [
        (24, 128, 1), (64, 128, 1), (48, 80, 1),
        *(pytest.param(*row, marks=exhaustive) for row in ((32, 64, 1), (64, 64, 70))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("generation", ["sm80"])
def test_runs_of_a_page(page: int, dim: int, queries: int) -> None:
    """A tile takes its rows from pages in runs, or one by one where a CTA's copies at a time are of two runs."""
    width = -(-300 // page)
    arrays = normal(np.float16, (2, queries, 4, dim), *[(2 * width + 1, page, 1, dim)] * 2)
    table = np.random.default_rng(1).permutation(2 * width + 1)[: 2 * width].reshape(2, width)
    given = {"page_table": table, "kv_lengths": np.array([300, 139]), "layout": "bnhd"}
    check_arrays(*arrays, on_device=True, **given)


@slow
@pytest.mark.parametrize("generation", ["sm80"])
@pytest.mark.parametrize("long_keys", [128, 512])
def test_long_sequences_are_halved(long_keys: int, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CTAs share a multiprocessor and sequences may differ in length. A half may have no keys."""
    monkeypatch.setattr(sm80, "LONG_KEYS", long_keys)
    arrays = normal(np.float16, (2, 1, 4, 96), *[(2 * 19 + 1, 16, 1, 96)] * 2)
    table = np.random.default_rng(1).permutation(2 * 19 + 1)[: 2 * 19].reshape(2, 19)
    given = {"page_table": table, "kv_lengths": np.array([300, 1]), "layout": "bnhd"}
    check_arrays(*arrays, on_device=True, **given)
    assert launched == ["sm80_forward", "combine"][: 2 if long_keys < 300 else 1]


@slow
@pytest.mark.parametrize("generation", ["sm90"])
def test_a_captured_call_follows_its_offsets(generation: str, launched: list[str]) -> None:
    """A call of attention, whose offsets the caller changes between replays."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, 64)).astype(ml_dtypes.bfloat16) for n in (200, 250, 250))
    given, cu = [*map(cupy.asarray, (q, k, v))], cupy.asarray(np.array([0, 90, 90, 200], np.int32))
    flashkit.attention(*given, cu_seqlens=cu, backend="cupy_raw")  # compiles
    launched.clear()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out = flashkit.attention(*given, cu_seqlens=cu, backend="cupy_raw")
        graph = stream.end_capture()
    for begins in ([0, 70, 170, 190], [0, 0, 1, 129]):
        cu[...] = cupy.asarray(np.array(begins, np.int32))
        graph.launch()
        wide = [x.astype(np.float64) for x in (q, k, v)]
        right = flashkit.attention(*wide, cu_seqlens=np.array(begins), backend="reference")
        cases.within_a_unit(out, right)
    # A real device's graph is replayed without the host; the emulated one replays its launches.
    assert launched in (["derive_cu_seqlens", f"{generation}_forward"] * n for n in (1, 2))


@slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize(
    "more",
    [
        {"page": "16", "sequences": "packed, paged"},
        {"page": "96", "sizes": "170x430"},
        pytest.param({"page": "40", "sizes": "170x430", "dims": "128"}, marks=exhaustive),
        pytest.param({"page": "256", "sequences": "packed, paged", "dims": "192/128"}, marks=exhaustive),
        pytest.param({"page": "8", "heads": "16:2", "sizes": "20x200", "dims": "256"}, marks=exhaustive),
    ],
    ids=lambda more: " ".join(more.values()),
)
def test_pages_of_whole_boxes(more: cases.Choice) -> None:
    check_forward({**PAGED, "alibi": "no", **more}, "cupy_raw")


@slow
@pytest.mark.parametrize(("generation", "ran"), [("sm90", "sm80")])
def test_pages_of_rows_that_are_no_box() -> None:
    """Nor of the rows after which TMA's swizzle repeats."""
    check_forward({**PAGED, "page": "12", "sizes": "100x140"}, "cupy_raw")


@slow
@pytest.mark.parametrize(("backend", "generation"), OLDER_PAGED)
@pytest.mark.parametrize("n_q", [100, 7])
def test_keys_in_pages(backend: str, generation: str, n_q: int, device: Device, launched: list[str]) -> None:
    """Many queries; and few, for which tensor cores split the keys."""
    device.sms = 16
    choice = {**PAGED, "dtype": features(generation)["dtype"], "sizes": f"{n_q}x{140 if n_q > 7 else 1100}"}
    check_forward(choice, backend)
    assert generations(launched) == {generation}
    assert ("combine" in launched) == ((backend, generation, n_q) == ("cupy_raw", "sm80", 7))


@slow
@pytest.mark.parametrize(
    ("backend", "generation", "d", "page"),
    [
        ("cupy_raw", "sm80", 64, 1), ("cupy_raw", "sm80", 20, 1), ("cupy_raw", "sm90", 64, 16),
        pytest.param("numba_cuda", "simt", 64, 1, marks=exhaustive),
    ],
)  # fmt: skip
def test_a_table_that_ends_with_the_last_key(backend: str, generation: str, d: int, page: int, device: Device) -> None:
    """Rows of the last tile behind it have no entries; of rows that are whole vectors, and not."""
    rng, n_k = np.random.default_rng(0), 1104
    n_q = 70 if generation == "sm90" else 1
    q, k, v = (rng.standard_normal((1, 2, n, d)).astype(np.float16) for n in (n_q, n_k, n_k))
    pools = (cupy.asarray(np.ascontiguousarray(x[0].swapaxes(0, 1).reshape(-1, page, 2, d))) for x in (k, v))
    table = cupy.asarray(np.arange(n_k // page)[None])
    if isinstance(device, hardware.Hardware):
        table = hardware.at_the_end_of_memory(table)
    out = flashkit.attention(cupy.asarray(q), *pools, page_table=table, kv_lengths=[n_k], q_offset=0, backend=backend)
    right = flashkit.attention(*(x.astype(np.float64) for x in (q, k, v)), backend="reference")
    cases.within_a_unit(out, right)


@slow
@pytest.mark.parametrize("generation", ["sm80"])
def test_pages_of_the_tiles_that_a_mask_leaves(device: Device, launched: list[str]) -> None:
    """More of them than are looked up at once: a single CTA takes all."""
    device.sms = 1
    options = {"kv_lengths": [1100], "mask_mod": lambda b, h, q, k: k // 128 % 2 == 0, "q_offset": 1093}
    table = np.random.default_rng(1).permutation(80)[None, :70]
    arrays = normal(np.float16, (1, 2, 7, 64), *[(80, 16, 2, 64)] * 2)
    check_arrays(*arrays, page_table=table, **options)
    assert "combine" not in launched


@slow
@pytest.mark.parametrize("generation", ["sm80", "simt"])
@pytest.mark.parametrize("dims", ["40/24", "64"])
def test_pages_that_are_not_aligned(dims: str) -> None:
    check_forward({**PAGED, "dims": dims, "storage": "gaps", "heads": "2:2"}, "cupy_raw")


@slow
@pytest.mark.parametrize(("backend", "generation"), PACKED_KERNELS)
def test_packed_queries_of_keys_in_pages(backend: str, generation: str) -> None:
    """With a table on the device, which host code cannot check: a page that does not exist is the first or the last."""
    rng, page, pages = np.random.default_rng(0), 24, 30
    dtype = np.dtype(features(generation)["dtype"])
    q, k, v = (rng.standard_normal(x).astype(dtype) for x in ((110, 4, 64), *[(pages, page, 2, 64)] * 2))
    table = rng.permutation(pages)[:18].reshape(3, 6)
    table[2, 1], table[0, 0] = -7, pages + 1000
    options = {"cu_seqlens": np.array([0, 33, 33, 103]), "kv_lengths": np.array([25, 30, 141]), "causal": True}
    options |= {"page_table": np.clip(table, 0, pages - 1), "return_lse": True}
    given = {"page_table": cupy.asarray(table)}
    check_arrays(q, k, v, backend=backend, on_device=True, given=given, **options)


@slow
@pytest.mark.parametrize(("backend", "generation"), CUPY_OFTEN)
def test_a_sink_of_minus_infinity(backend: str, generation: str) -> None:
    """Where rows see no key either, the gradient of the sink is 0. By the kernels of test_features."""
    call = build(features(generation))
    call.options["sinks"][1] = call.plain["sinks"][1] = -np.inf
    cases.assert_conforms(cases.run(call, backend), *cases.expected(call, draws=1))


@slow
@pytest.mark.parametrize(("backend", "generation"), CUPY_OFTEN)
def test_unmasked(backend: str) -> None:
    """dQ summed in any order, too; and the loop that has nothing to mask, with scores that outgrow its row maximum."""
    check(PLAIN, backend)
    check_forward(PLAIN, backend, "growing")


@slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("generation", ["sm80", "simt"])
@pytest.mark.parametrize(("data", "n_q"), [("random", 7), ("growing", 9), ("NaN", 1)])
def test_decode(backend: str, generation: str, data: str, n_q: int, device: Device, launched: list[str]) -> None:
    """Few queries. CUDA C++ splits the keys among CTAs on tensor cores, and a second kernel combines the splits."""
    device.sms = 16  # keys are split where that fills the device, and there are many
    if n_q == 9 and (backend, generation) == ("cupy_raw", "sm80"):
        n_q = 8  # with the packed heads as many rows as a tile for few has
    check_forward({**features(generation), "sizes": f"{n_q}x1100"}, backend, data)
    assert generations(launched) == {generation}
    assert ("combine" in launched) == ((backend, generation) == ("cupy_raw", "sm80"))


@slow
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
def test_float32_on_tensor_cores() -> None:
    """As terms of float16 or TF32."""
    check({**FEATURES, "dtype": "float32", "sizes": "130x200", "storage": "packed"}, "cupy_raw")


@slow
@pytest.mark.parametrize(
    ("backend", "generation"),
    [("cupy_raw", "sm90"), ("cupy_raw", "sm80"), pytest.param("numba_cuda", "sm80", marks=exhaustive)],
)
def test_wide_heads(backend: str) -> None:
    """In CUDA C++ for Hopper, two CTAs of a cluster share the backward pass of a tile of keys."""
    check({**FEATURES, "dims": "192/128", "batch": "2", "heads": "2:2"}, backend)


@slow
@pytest.mark.parametrize("dims", [(192, 128), (256, 72), (64, 136)])
@pytest.mark.parametrize("generation", ["sm90"])
def test_chunks_of_dq_in_a_cluster(dims: tuple[int, int]) -> None:
    """Of three chunks, or of one, each CTA has half of the rows of one."""
    dim, dim_v = dims
    arrays = normal(np.float16, (1, 2, 150, dim), (1, 2, 200, dim), (1, 2, 200, dim_v), (1, 2, 150, dim_v))
    check_arrays(*arrays)


@slow
@pytest.mark.parametrize(
    ("backend", "causal"),
    [("cupy_raw", "yes"), ("cupy_raw", "no"), pytest.param("numba_cuda", "yes", marks=exhaustive)],
)
def test_long_sequences_of_96_columns(
    backend: str, causal: str, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 192 rows and 96 keys, which usually begin at thousands of tokens."""
    module, tile = {"cupy_raw": (sm90, sm90.Sm90Tile), "numba_cuda": (numba_sm90, numba_sm90.Tile)}[backend]
    monkeypatch.setattr(module.Sm90, "tile", lambda *_: tile(192, 96))
    check_forward({**PLAIN, "sizes": "300x300", "dims": "96", "causal": causal}, backend)
    assert generations(launched) == {"sm90"}


@slow
@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("backend", "generation"),
    [each if each.values[1] != "sm80" else pytest.param(*each.values, marks=exhaustive) for each in CUPY_OFTEN],
)
def test_modifications(backend: str) -> None:
    choice = cases.with_(
        dtype="bfloat16", batch="1", heads="4:2", sizes="70x130", dims="64", window="both", softcap="yes",
        alibi="(Hq,)", bias="full", mask="(Hq, Nq, 1)", mask_mod="plain", dropout="yes",
    )  # fmt: skip
    check(choice, backend)


@slow
@pytest.mark.parametrize("backend", ["cupy_raw", pytest.param("numba_cuda", marks=exhaustive)])
@pytest.mark.parametrize("generation", ["sm90"])
def test_lengths_without_a_mask(backend: str) -> None:
    """What lies behind them is cleared: there is no fallback for it."""
    check({**PLAIN, "batch": "3", "sizes": "70x170", "kv_lengths": "yes"}, backend)


SLOPED = cases.with_(
    dtype="float16", batch="1", heads="2:2", sizes="100x330", dims="72/40", causal="yes", alibi="(Hq,)"
)  # fmt: skip
CAPPED = {
    **cases.with_(dtype="bfloat16", batch="1", heads="2:2", sizes="140x330", dims="64", softcap="yes", causal="yes"),
    "scale": "0.03",  # scores for which kernels take a polynomial
}


@slow
@pytest.mark.parametrize("generation", ["sm90", pytest.param("sm80", marks=exhaustive)])
@pytest.mark.parametrize("choice", [SLOPED, CAPPED], ids=["sloped", "capped"])
def test_affine_scores(choice: cases.Choice) -> None:
    """In kernels that have code for them; and head dims that are no multiple of 64."""
    check(choice, "cupy_raw")
    check_forward(choice, "cupy_raw", "growing")


@slow
@pytest.mark.parametrize("generation", ["sm90"])
def test_capped_scores_with_dropout() -> None:
    """Row sums are of all weights, those that dropout leaves out among them."""
    check_forward({**CAPPED, "sizes": "70x130", "dropout": "yes"}, "cupy_raw")


CHUNKS = [
    pytest.param(backend, generation, marks=slow if (backend, generation) == ("cupy_raw", "sm90") else exhaustive)
    for backend in ("cupy_raw", "numba_cuda")
    for generation in GENERATIONS
]


@pytest.mark.parametrize(("backend", "generation"), CHUNKS)
def test_dropout_of_a_chunk(backend: str, generation: str) -> None:
    """The seed says where the chunk's rows, keys and heads begin in the whole."""
    dtype = np.dtype(np.float32 if generation == "simt" else np.float16)
    rng = np.random.default_rng(3)
    parts = [rng.standard_normal((1, 2, n, 64)).astype(dtype) for n in (70, 70, 70, 70)]
    seed = dropout.ChunkSeed.at(2**40 + 3, 130, 268, 5)
    options = {"dropout_p": 0.3, "seed": seed}
    found = []
    for which, asarray in ((backend, cupy.asarray), ("reference", lambda x: x.astype(np.float64))):
        q, k, v, dout = map(asarray, parts)
        out, vjp = flashkit.attention_vjp(q, k, v, backend=which, **options)
        found.append([x if isinstance(x, np.ndarray) else x.get() for x in (out, *vjp(dout))])
    cases.within_a_unit(*found)


def by_key(s: object, b: object, h: int, q: object, k: int) -> object:
    return s + (0.15 - 0.25 * h) * k


@slow
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
@pytest.mark.parametrize("form", ["by distance", "by key"])
def test_slopes_through_whole_tiles(form: str) -> None:
    """The keys that weigh most are the last of a tile, or the first, and the mask hides none."""
    call = build({**SLOPED, "sizes": "100x256", "dims": "64", "alibi": "no"})
    slopes = np.array([0.15, -0.02], np.float32)  # no greater: 16 bits hold a large score less precisely
    for options, asarray in ((call.options, cupy.asarray), (call.plain, np.asarray)):
        options |= {"alibi_slopes": asarray(slopes)} if form == "by distance" else {"score_mod": by_key}
        options["q_offset"] = 256
    cases.assert_conforms(cases.run(call, "cupy_raw"), *cases.expected(call, draws=1))


@slow
@pytest.mark.parametrize(
    ("backend", "generation", "dtype", "dims", "storage"),
    [
        ("cupy_raw", "sm80", "float16", "40/24", "gaps"),
        ("cupy_raw", "simt", "float32", "12/40", "gaps"),
        ("cupy_raw", "simt", "float64", "7/13", "packed"),
        pytest.param("numba_cuda", "simt", "float32", "7/13", "packed", marks=exhaustive),
    ],
)
def test_rows_that_are_not_aligned(backend: str, dtype: str, dims: str, storage: str) -> None:
    choice = {**FEATURES, "dtype": dtype, "dims": dims, "storage": storage, "sizes": "70x170", "batch": "2"}
    check(choice, backend)


@slow
@pytest.mark.parametrize(("backend", "generation"), CUPY_OFTEN)
def test_masked_tiles_are_not_loaded(backend: str, device: Device) -> None:
    """Keys and values of masked tiles lie outside of any allocation."""
    choice = {**PLAIN, "heads": "1:1", "sizes": "140x640"}
    call = build(choice)
    mask = flashkit.BlockMask.from_dense(np.array([[True, False, False, False, True]] * 2), 128, 128, 140, 640)
    for x in (call.k, call.v):  # of the three masked blocks the second: tiles may have any size
        start, row = x.data.ptr - device.base, x.strides[2]
        device.memory.allowed[start + 256 * row : start + 384 * row] = False
    out = flashkit.attention(call.q, call.k, call.v, block_mask=mask, backend=backend)
    wide = (call.plain[name].astype(np.float64) for name in "qkv")
    right = flashkit.attention(*wide, block_mask=mask, backend="reference")
    cases.within_a_unit(out, right)


@slow
@pytest.mark.parametrize("backend", ["cupy_raw", pytest.param("numba_cuda", marks=exhaustive)])
@pytest.mark.parametrize("generation", ["sm90"])
def test_more_tiles_than_a_list_holds(backend: str) -> None:
    arrays = normal(ml_dtypes.bfloat16, *((1, 2, n, 64) for n in (70, 26000, 26000)))
    check_arrays(*arrays, backend=backend, on_device=True, mask=np.arange(26000) % 5000 > 4700)


@slow
@pytest.mark.parametrize(
    ("backend", "generation"), [*CUPY_OFTEN[:3], pytest.param("numba_cuda", "simt", marks=exhaustive)]
)
def test_keys_that_are_far_apart(backend: str, generation: str, device: Device, launched: list[str]) -> None:
    """More than 1,024 tiles without a pair, after less than 32 with some; then a few."""
    n_k, device.sms = 140_000, 1  # rows enough for one SM, or the keys would be split
    call = build({**PLAIN, "heads": "1:1", "sizes": f"{70 if generation == 'simt' else 200}x{n_k}", "dims": "8"})

    def mask(b: object, h: object, q: object, k: int) -> object:
        return (k < 2300) & (k % 1024 > 900) | (k > 136_000) & (k < 136_100) | (k >= n_k - 170)

    out = flashkit.attention(call.q, call.k, call.v, mask_mod=mask, backend=backend)
    q, *kv = (call.plain[name].astype(np.float64) for name in "qkv")
    right = flashkit.attention(q, *(x[:, :, mask(0, 0, 0, np.arange(n_k))] for x in kv), backend="reference")
    cases.within_a_unit(out, right)
    assert "combine" not in launched


@slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("generation", ["simt"])
def test_more_than_32_tiles_of_an_array_mask(backend: str) -> None:
    """They are classified 32 at a time; and exactly as many."""
    mask = np.random.default_rng(0).random(2200) < 0.5
    for n_k in (1024, 2048, 2200):
        arrays = normal(ml_dtypes.bfloat16, *((1, 1, n, 8) for n in (9, n_k, n_k)))
        check_arrays(*arrays, backend=backend, on_device=True, mask=mask[:n_k])


@pytest.mark.parametrize(
    ("backend", "generation", "dtype", "hidden"),
    [("cupy_raw", "sm90", "bool", 0), ("cupy_raw", "simt", "int8", -1), ("cupy_raw", "simt", "int64", -1),
     ("numba_cuda", "simt", "int8", -1), pytest.param("cupy_raw", "sm80", "uint16", 0, marks=exhaustive)],
)  # fmt: skip
def test_a_mask_of_pairs(backend: str, dtype: str, hidden: int) -> None:
    """A tile has more pairs than are read to bound them; some tiles show no pair, some all."""
    pairs = np.random.default_rng(0).integers(hidden, hidden + 2, (130, 260))
    pairs[:64, :128], pairs[64:, 128:], pairs[:, 0] = hidden, hidden + 1, hidden + 1
    if dtype == "bool":
        options: dict[str, Any] = {"mask": pairs.astype(bool), "on_device": True}
    else:
        visible = mods.mask(lambda b, h, q, k, pairs: pairs[q, k] > hidden, pairs=pairs.astype(dtype))
        options = {"mask_mod": visible, "q_offset": 0}
    q, k, v = normal(ml_dtypes.bfloat16, *((1, 1, n, 8) for n in (130, 260, 260)))
    check_arrays(q, k, v, backend=backend, **options)


@slow
@pytest.mark.parametrize(("backend", "generation"), CUPY_OFTEN)
def test_a_document_that_begins_with_the_last_key_of_a_tile(backend: str) -> None:
    """Of a power of two keys: the state of a tile follows from the least and the greatest number in it."""
    q, k, v = normal(ml_dtypes.bfloat16, *((1, 1, n, 8) for n in (70, 512, 512)))
    v[:, :, [255, 511]] = 100  # the rows see the one, and not the other
    begins = 2 ** np.arange(4, 10) - 1
    document = mods.document(np.searchsorted(begins, np.arange(512), side="right"))
    check_arrays(q, k, v, backend=backend, mask_mod=document, q_offset=290)


NARROW = {**PLAIN, "dtype": "float16", "heads": "2:1", "dims": "8", "sizes": "70x330"}


@slow
@pytest.mark.parametrize("generation", ["sm90", "sm80"])
def test_dq_of_many_key_tiles(device: Device) -> None:
    """More than a word of the semaphore has bits."""
    device.sms = 1
    check({**NARROW, "sizes": "40x4100"}, "cupy_raw", deterministic=True)


@slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("generation", ["sm90"])
def test_rows_that_are_prepared_late(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the backward kernel itself, while it runs: it clears dQ, or does the whole preprocess of all but one head."""
    cases.fused_preprocess(monkeypatch)
    if not fused:
        monkeypatch.setattr(sm90_backward, "can_fuse_preprocess", lambda *_: False)
    check({**PLAIN, "sizes": "200x130", "heads": "3:3"} if fused else PLAIN, "cupy_raw")


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths_on_device", [False, True])
def test_lengths_below_the_queries_need_an_offset(device: Device, lengths_on_device: bool) -> None:
    """On the host where a length is; on a device, where lengths are not read, in each call of several queries."""
    x = cupy.asarray(np.ones((2, 1, 20, 16), np.float32))
    lengths = cupy.asarray([20, 12]) if lengths_on_device else [20, 12]
    with pytest.raises(ValueError, match="device.*20 queries" if lengths_on_device else "q_offset: .*has 12"):
        flashkit.attention(x, x, x, causal=True, kv_lengths=lengths)
    for options, first in (
        ({"causal": True, "q_offset": 0}, [0, 0]),
        ({"causal": True, "q_offset": lengths - 20 if lengths_on_device else [0, -8]}, [0, -8]),
        ({}, [0, 0] if lengths_on_device else [0, -8]),  # nothing reads it, and it would cost the device two launches
    ):
        _, operands, _ = prepare(x, x, x, kv_lengths=lengths, **options)
        assert cupy.asarray(operands.q_offset).get().tolist() == first
    _, operands, _ = prepare(x[:, :, :1], x, x, causal=True, kv_lengths=lengths)
    assert cupy.asarray(operands.q_offset).get().tolist() == [19, 11]


VALUES = [
    pytest.param(backend, generation, marks=slow if backend == "numba_cuda" or generation != "simt" else [])
    for backend, generation in (
        ("cupy_raw", "simt"), ("cupy_raw", "sm80"), ("cupy_raw", "sm90"), ("numba_cuda", "simt"),
    )
]  # fmt: skip


@pytest.mark.parametrize(("backend", "generation"), VALUES)
def test_gradients_by_values(backend: str, generation: str, device: Device) -> None:
    """Of a bias that entries share, of slopes, of a table by distance; the same bits in any order if asked for."""
    rng, dtype = np.random.default_rng(0), "float32" if generation == "simt" else "bfloat16"
    batch, heads, n_q, n_k, d = 2, 2, 40, 90, 16 if generation == "simt" else 64
    shapes = (batch, heads, n_q, d), (batch, 1, n_k, d), (batch, 1, n_k, d), (batch, heads, n_q, d)
    q, k, v, dout = normal(np.dtype(dtype), *shapes)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in ((1, heads, n_q, n_k), (heads,), (8, heads))]
    wrt = ("bias", "alibi_slopes", "score.table", *(("score.gain", "softcap") if generation == "simt" else ()))

    def gradients(xp: Any, backend: str, deterministic: bool = False) -> list[np.ndarray]:
        bias, slopes, table = map(xp.asarray, values)
        score = mods.t5_bias(table, max_distance=20)
        if generation != "sm90":
            score = score.then(mods.score(lambda s, b, h, q, k, *, gain: s * gain, gain=0.7))
        more = {"softcap": 3.0} if generation != "sm90" else {}
        _, vjp = flashkit.attention_vjp(
            *map(xp.asarray, (q, k, v)), bias=bias, alibi_slopes=slopes * np.float32(0.1), score_mod=score, causal=True,
            kv_lengths=[n_k, 70], q_offset=30, dropout_p=0.2, seed=3, backend=backend, deterministic=deterministic,
            **more,
        )  # fmt: skip
        return [cases.to_numpy(x).astype(np.float64) for x in vjp(xp.asarray(dout), wrt=wrt)]

    found, right = gradients(cupy, backend), gradients(np, "reference")
    for name, got, expected in zip(wrt, found, right, strict=True):
        unit = np.abs(expected).max() * (2.0**-5 if dtype == "bfloat16" else 2.0**-16)  # sums that cancel
        assert np.abs(got - expected).max() <= 2 * unit, name
    if (backend, generation) == ("cupy_raw", "simt"):
        again = []
        for seed in (1, 2):
            device.seed(seed)
            again.append(gradients(cupy, backend, deterministic=True))
        for one, two, plain in zip(*again, found, strict=True):
            np.testing.assert_array_equal(one, two)
            np.testing.assert_allclose(one, plain, atol=np.abs(plain).max() * 1e-5)


BIASES: dict[str, tuple[int, int, dict[str, Any], tuple[int, ...]]] = {  # head dim, keys, options, the bias's shape
    "rows of 16 bytes": (64, 200, {"causal": True, "kv_lengths": [200, 133]}, (1, 2, 100, 200)),
    "other rows": (128, 201, {"dropout_p": 0.2, "seed": 3}, (1, 2, 100, 201)),
    "keys apart": (64, 136, {"window": (40, 9)}, (2, 1, 100, 136)),
    "packed": (64, 256, {"cu_seqlens": ([0, 100, 228], [0, 130, 256]), "causal": True, "q_offset": 0}, (2, 228, 256)),
}


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("case", BIASES)
def test_a_dense_bias_on_hopper(case: str, generation: str, launched: list[str]) -> None:
    """Its gradient, which two warps add while others multiply; batch entries or heads share elements."""
    dim, n_k, options, shape = BIASES[case]
    packed = "cu_seqlens" in options
    n_q = shape[-2]
    shapes = ((n, 2, dim) if packed else (2, 2, n, dim) for n in (n_q, n_k, n_k, n_q))
    q, k, v, dout = normal(np.dtype("bfloat16"), *shapes)
    values = np.random.default_rng(5).standard_normal(shape).astype(np.float32)

    def gradients(xp: Any, backend: str) -> list[np.ndarray]:
        bias = xp.asarray(values.swapaxes(-1, -2)).swapaxes(-1, -2) if case == "keys apart" else xp.asarray(values)
        added = (
            {"score_mod": mods.score(lambda s, b, h, q, k, *, x: s + x[h, q, k], x=bias)} if packed else {"bias": bias}
        )
        _, vjp = flashkit.attention_vjp(*map(xp.asarray, (q, k, v)), backend=backend, **added, **options)
        wrt = ("q", "k", "v", "score.x" if packed else "bias")
        return [cases.to_numpy(x).astype(np.float64) for x in vjp(xp.asarray(dout), wrt=wrt)]

    for got, expected in zip(gradients(cupy, "cupy_raw"), gradients(np, "reference"), strict=True):
        assert np.abs(got - expected).max() <= np.abs(expected).max() * 2.0**-6
    assert "sm90_backward" in launched


class Staged(NamedTuple):
    """A bias whose tiles pass through shared memory, or one that does not fit TMA."""

    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    operands: str = "bfloat16"
    dim: int = 64
    heads_kv: int = 2
    options: dict[str, Any] = {}  # noqa: RUF012
    stores: bool = False  # each pair has an element of its own
    staged: bool = True


STAGED = {
    "shared by entries": Staged((1, 2, 100, 200)),
    "shared by heads": Staged((2, 1, 100, 200), dtype="float32", dim=32),
    "of each pair": Staged((2, 2, 100, 200), stores=True),
    "of each pair, causal, 128 columns": Staged(
        (2, 2, 100, 200), dim=128, heads_kv=1, stores=True, options={"causal": True, "q_offset": 37}
    ),
    "of each pair, lengths": Staged(
        (2, 2, 140, 136), "float32", stores=True, options={"kv_lengths": [136, 40], "window": (70, 30), "q_offset": 0}
    ),
    "float16": Staged((2, 2, 128, 72), "float16", "float16", 64, stores=True),
    "bfloat16 beside float16": Staged((1, 1, 129, 72), "bfloat16", "float16", 48),
    "float32, 128 columns": Staged((1, 2, 200, 264), "float32", dim=128),
    "a part of an array": Staged((2, 2, 100, 136), stores=True),
    "a part that begins at 2 bytes": Staged((2, 2, 100, 136), staged=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("case", STAGED)
@pytest.mark.parametrize("data", ["random", "hidden"])
def test_tiles_of_a_bias(case: str, data: str, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By TMA, like dS where it is the gradient; with infinite biases, NaN by a mask, and a value not finite."""
    shape, dtype, operands, dim, heads_kv, options, stores, staged = STAGED[case]
    n_q, n_k = shape[-2:]
    rows, keys = (2, 2, n_q, dim), (2, heads_kv, n_k, dim)
    q, k, v, dout = normal(np.dtype(operands), rows, keys, keys, rows)
    rng = np.random.default_rng(5)
    values = rng.standard_normal(shape).astype(np.float32)
    if data == "hidden":
        values[rng.random(shape) < 0.1] = -np.inf
        values[..., 3, :] = values[..., :, 9] = -np.inf
        v[:, :, 9, 2] = np.inf
        if options:
            values[..., 60] = 0
            values[..., 0, 60] = k[:, :, 60, 1] = np.nan
    values = values.astype(dtype)
    if "part" in case:
        first = 1 if "2 bytes" in case else 8
        whole = np.zeros((*shape[:-1], n_k + 16), values.dtype)
        whole[..., first : first + n_k] = values
    paths, forwards = [], []
    takes, launch = sm90_backward.Sm90Backward.takes, sm90.Sm90Forward.launch

    def spied(self: Any, arguments: Any) -> bool:
        paths.append((self.dense.bias is not None, self.stores, takes(self, arguments)))
        return paths[-1][-1]

    def launched(self: Any, arguments: Any, geometry: Any, stream: int) -> None:
        forwards.append(self.dense.bias is not None)
        launch(self, arguments, geometry, stream)

    monkeypatch.setattr(sm90_backward.Sm90Backward, "takes", spied)
    monkeypatch.setattr(sm90.Sm90Forward, "launch", launched)
    dispatch.forget()
    if data == "random":
        monkeypatch.setattr(sm90_backward, "SMALL_BIAS", 0)

    def gradients(xp: Any, backend: str, *more: str) -> list[np.ndarray]:
        bias = xp.asarray(whole)[..., first : first + n_k] if "part" in case else xp.asarray(values)
        with np.errstate(invalid="ignore"):
            out, vjp = flashkit.attention_vjp(*map(xp.asarray, (q, k, v)), bias=bias, backend=backend, **options)
            found = out, *vjp(xp.asarray(dout), wrt=("q", "k", "v", *more))
        return [cases.to_numpy(x).astype(np.float64) for x in found]

    found, right = gradients(cupy, "cupy_raw", "bias"), gradients(np, "reference", "bias")
    for got, expected in zip([*found, *gradients(cupy, "cupy_raw")], right + right, strict=False):
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(got), finite)
        assert np.abs(got - expected)[finite].max() <= np.abs(expected[finite]).max() * 2.0**-6
    assert (staged, stores, True) in paths or not staged
    assert staged == any(path[0] and path[2] for path in paths)
    assert all(forwards) == (heads_kv == 2 and case != "a part that begins at 2 bytes")


class Masked(NamedTuple):
    """A mask whose tiles pass through shared memory, or one that does not fit TMA."""

    shape: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012
    dim: int = 64
    heads: tuple[int, int] = 2, 2
    bias: tuple[int, ...] = ()
    staged: bool = True


MASKED = {
    "shared": Masked((1, 1, 100, 208)),
    "of entries, lengths": Masked((2, 1, 140, 272), {"kv_lengths": [272, 50]}, dim=32),
    "of heads, causal, 128 columns": Masked((1, 4, 100, 208), {"causal": True, "q_offset": 60}, 128, heads=(4, 2)),
    "of each pair": Masked((2, 2, 140, 144), {"window": (90, 20), "q_offset": 0}),
    "beside a bias": Masked((1, 1, 100, 144), bias=(1, 2, 100, 144)),
    "beside a bias, 128 columns": Masked(
        (1, 1, 200, 272), {"causal": True, "q_offset": 70}, 128, bias=(1, 2, 200, 272)
    ),
    "packed heads": Masked((2, 1, 40, 144), heads=(4, 1)),
    "a part of an array": Masked((2, 2, 100, 144)),
    "a part that begins at 1 byte": Masked((2, 2, 100, 144), staged=False),
    "other rows": Masked((2, 1, 100, 201), staged=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("case", MASKED)
def test_tiles_of_a_mask(case: str, generation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By TMA. A row sees no key, a key that is not finite is seen by no row; some tiles show no pair, some all."""
    shape, options, dim, (heads, heads_kv), of_bias, staged = MASKED[case]
    n_q, n_k = shape[-2:]
    rows, keys = (2, heads, n_q, dim), (2, heads_kv, n_k, dim)
    q, k, v, dout = normal(ml_dtypes.bfloat16, rows, keys, keys, rows)
    k[:, :, 9, 1] = v[:, :, 9, 2] = np.nan
    rng = np.random.default_rng(5)
    mask = rng.random(shape) < 0.7
    mask[..., :64, :128], mask[..., 64:, :64] = False, True
    mask[..., 3, :] = mask[..., :, 9] = False
    bias = rng.standard_normal(of_bias).astype(np.float32)
    if "part" in case:
        first = 1 if "1 byte" in case else 16
        whole = np.ones((*shape[:-1], n_k + 32), bool)
        whole[..., first : first + n_k] = mask
    paths, forwards = [], []
    takes = sm90_backward.Sm90Backward.takes

    def spied(self: Any, arguments: Any) -> bool:
        paths.append((self.dense.mask is not None, takes(self, arguments)))
        return paths[-1][-1]

    launch = sm90.Sm90Forward.launch

    def launched(self: Any, arguments: Any, geometry: Any, stream: int) -> None:
        forwards.append(self.dense.mask is not None)
        launch(self, arguments, geometry, stream)

    monkeypatch.setattr(sm90_backward.Sm90Backward, "takes", spied)
    monkeypatch.setattr(sm90.Sm90Forward, "launch", launched)
    if "packed" not in case:
        monkeypatch.setattr(sm90.Sm90Forward, "packed", staticmethod(lambda _: 1))
    dispatch.forget()

    def results(xp: Any, backend: str) -> list[np.ndarray]:
        own = xp.asarray(whole)[..., first : first + n_k] if "part" in case else xp.asarray(mask)
        if case == "of each pair" and xp is cupy:  # other libraries may have any byte for True
            own = xp.asarray((mask * rng.choice(np.array([1, 2, 128, 254], np.uint8), shape)).view(bool))
        given = {**options, **({"bias": xp.asarray(bias)} if of_bias else {})}
        with np.errstate(invalid="ignore"):
            out, vjp = flashkit.attention_vjp(*map(xp.asarray, (q, k, v)), mask=own, backend=backend, **given)
            return [cases.to_numpy(x).astype(np.float64) for x in (out, *vjp(xp.asarray(dout)))]

    for got, expected in zip(results(cupy, "cupy_raw"), results(np, "reference"), strict=True):
        assert np.isfinite(expected).all()
        assert np.abs(got - expected).max() <= np.abs(expected).max() * 2.0**-6
    assert staged == any(path == (True, True) for path in paths)
    assert forwards == [staged and "packed" not in case]


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["sm90"])
def test_tiles_of_a_mask_in_192_rows(generation: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 96 keys: the rest of a row of 128 bytes is of the next tile."""
    tiles, launch = set(), sm90.Sm90Forward.launch

    def launched(self: Any, *arguments: Any) -> None:
        tiles.add((self.tile.block_q, self.tile.block_k, self.tile.mask_bytes))
        launch(self, *arguments)

    monkeypatch.setattr(sm90.Sm90Forward, "launch", launched)
    monkeypatch.setattr(sm90.Sm90, "tile", lambda *_: sm90.Sm90Tile(192, 128, 3))
    mask = np.random.default_rng(5).random((1, 1, 300, 304)) < 0.7
    arrays = normal(ml_dtypes.bfloat16, (1, 2, 300, 64), (1, 2, 304, 64), (1, 2, 304, 64))
    check_arrays(*arrays, on_device=True, mask=mask)
    assert tiles == {(192, 96, 1)}


def by_exact_distance(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any, last: Any) -> Any:
    """A table that ends with the distances of the call."""
    return s + table[q - k + last, h]


def by_entry(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any) -> Any:
    """Batch entries have tables of their own, read twice."""
    return s - table[b, flashkit.minimum(abs(q - k), 20)] * 0.5 + table[b, flashkit.where(q < k, 0, 1 + (q - k) % 9)]


def clipped(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any) -> Any:
    """Linear in the distance, with a step that is no power of two, between two distances inside of tiles."""
    return s + table[h] * flashkit.clip(q - k, -75, 90) * 0.03


DISTANCES: dict[str, tuple[int, int, int, dict[str, Any]]] = {  # head dim, queries, keys, options
    "T5": (64, 150, 200, {}),
    "T5, causal, 128 columns": (128, 150, 200, {"causal": True, "q_offset": 37}),
    "T5, lengths": (32, 150, 200, {"kv_lengths": [33, 200], "window": (90, 40), "q_offset": 20}),
    "T5, offsets": (64, 150, 200, {"q_offset": [50, -20]}),
    "T5, packed": (64, 228, 256, {"cu_seqlens": ([0, 100, 228], [0, 130, 256]), "causal": True}),
    "exact": (64, 150, 200, {"q_offset": 0}),
    "exact, 128 columns": (128, 150, 200, {"q_offset": 50}),
    "by entry": (64, 150, 200, {}),
    "slopes": (64, 150, 200, {"causal": True}),
    "clipped": (64, 150, 290, {}),
    "clipped, 128 columns": (128, 150, 290, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("generation", ["sm90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", DISTANCES)
@pytest.mark.one_in(8)
def test_what_is_added_by_distance(case: str, dtype: str, generation: str, launched: list[str]) -> None:
    """Read from memory, and its gradient from sums of dS, where pairs that do not exist have neither."""
    dim, n_q, n_k, options = DISTANCES[case]
    packed, kind = "cu_seqlens" in options, case.partition(",")[0]
    kv_heads = 2 if kind == "exact" else 1
    sizes = (n_q, 2), (n_k, kv_heads), (n_k, kv_heads), (n_q, 2)
    shapes = ((n, heads, dim) if packed else (2, heads, n, dim) for n, heads in sizes)
    q, k, v, dout = normal(np.dtype(dtype), *shapes)
    last = n_k - 1 - (0 if kind != "exact" else options["q_offset"])
    shape = {"T5": (16, 2), "exact": (n_q + n_k - 1, 2), "by entry": (2, 21), "slopes": (2,), "clipped": (2,)}[kind]
    table = np.random.default_rng(5).random(shape).astype(np.float32)

    def results(xp: Any, backend: str) -> list[np.ndarray]:
        own = xp.asarray(table)
        added: dict[str, Any] = {"alibi_slopes": own} if kind == "slopes" else {"score_mod": {
            "T5": lambda: mods.t5_bias(own, max_distance=50),
            "exact": lambda: mods.score(by_exact_distance, table=own, last=last),
            "by entry": lambda: mods.score(by_entry, table=own),
            "clipped": lambda: mods.score(clipped, table=own),
        }[kind]()}  # fmt: skip
        out, vjp = flashkit.attention_vjp(*map(xp.asarray, (q, k, v)), backend=backend, **added, **options)
        wrt = ("q", "k", "v", "alibi_slopes" if kind == "slopes" else "score.table")
        found = [out, *vjp(xp.asarray(dout), wrt=wrt), *vjp(xp.asarray(dout))]
        return [cases.to_numpy(x).astype(np.float64) for x in found]

    unit = 2.0 ** (-4 if kind == "clipped" else -6)  # sums that cancel
    for got, expected in zip(results(cupy, "cupy_raw"), results(np, "reference"), strict=True):
        assert np.abs(got - expected).max() <= np.abs(expected).max() * unit
    read = [] if kind in ("slopes", "clipped") else ["fill_distances"]
    passes = [*read, "sm90_forward", "fill_distances", "sm90_backward", "add_distance_sums", *read, "sm90_backward"]
    assert [name for name in launched if "distance" in name or name.startswith("sm90_")][-len(passes) :] == passes
