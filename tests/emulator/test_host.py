"""What host code decides on the emulated device: which kernels take a call, what a graph keeps, what is verified."""

from __future__ import annotations

import gc
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import mods
from flashkit.api import vjp_of
from flashkit.backends.cuda_common import backend as cuda_backend
from flashkit.backends.cuda_common import compiler, modification, tensor_maps, verify
from flashkit.backends.cuda_common import device as devices
from flashkit.backends.cuda_common.cu_seqlens import derive
from flashkit.backends.cuda_common.memory import Workspace
from flashkit.backends.cuda_common.params import AT
from flashkit.call import arrays, plans
from flashkit.call.arrays import share_memory
from flashkit.reference import standard, standard_gradients
from flashkit.spec import AttentionSpec

from . import hardware
from .calls import FEATURES, PLAIN, build, check, check_forward, cupy, expected, generations

if TYPE_CHECKING:
    from .device import Device

pytestmark = pytest.mark.slow
CHECK = verify.check
"""Before the fixture of the device replaces it."""


@pytest.fixture(autouse=True)
def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generation that a test is parametrized with is the only one that the backend may plan with."""
    if generation := request.node.callspec.params.get("generation") if hasattr(request.node, "callspec") else None:
        monkeypatch.setenv(cuda_backend.VARIABLE, generation)


# --- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8])
def test_any_offsets_on_the_device(dtype: Any, device: Device) -> None:
    """They ascend afterwards, within the tokens, as kernels count on it; more of them than a CTA has threads, too."""
    rng, info = np.random.default_rng(0), np.iinfo(dtype)
    low, high = max(info.min, -50), min(info.max, 1000)
    for batch in (0, 1, 255, 256, 600):
        given_q, given_k = (rng.integers(low, high, batch + 1).astype(dtype) for _ in range(2))
        given_q[-1:], lengths = info.max, rng.integers(low, high, batch).astype(dtype)

        def ascending(given: np.ndarray, tokens: int) -> np.ndarray:
            clamped = np.array([min(max(int(x), 0), tokens) for x in given])
            clamped[0] = 0
            return np.maximum.accumulate(clamped)

        q, k = ascending(given_q, 500), ascending(given_k, 700)
        backwards = cupy.asarray(given_k[::-1].copy())[::-1]
        found = derive(cupy.asarray(given_q), 500, backwards, 700)
        for got, right in zip(found, ([*q, 500], [*k, k[-1]], [*np.diff(k), 0], [*np.diff(k) - np.diff(q), 0])):
            np.testing.assert_array_equal(got.get(), right)
        found = derive(cupy.asarray(given_q), 500, cupy.asarray(lengths), 60, keys_are_lengths=True)
        n_k = np.clip(lengths.astype(np.float64), 0, 60)
        np.testing.assert_array_equal(found.lengths.get(), [*n_k, 0])
        np.testing.assert_array_equal(found.positions.get(), [*n_k - np.diff(q), 0])


@pytest.mark.parametrize("q_offset", [None, 3])
def test_packed_calls_share_a_plan(q_offset: int | None, launched: list[str], monkeypatch: Any) -> None:
    """Whatever their offsets are, if these lie on the device: then a call is two launches."""
    rng, options = np.random.default_rng(0), {"causal": True, "q_offset": q_offset, "return_lse": True}
    q, k, v = (rng.standard_normal((n, 2, 16)).astype(np.float16) for n in (100, 120, 120))
    wide, on_device = [x.astype(np.float64) for x in (q, k, v)], [*map(cupy.asarray, (q, k, v))]
    offsets = [
        tuple(np.array(x, np.int32) for x in pair)
        for pair in (([0, 30, 30, 90], [0, 10, 60, 100]), ([0, 1, 70, 80], [0, 0, 90, 119]))
    ]
    rights = [flashkit.attention(*wide, cu_seqlens=each, backend="reference", **options) for each in offsets]
    for begins, right in zip(offsets, rights, strict=True):
        launched.clear()
        found = flashkit.attention(*on_device, cu_seqlens=tuple(map(cupy.asarray, begins)), **options)
        cases.near(found, right, atol=2.0**-8)
        monkeypatch.setattr("flashkit.api.prepare", None)  # the next call has a plan
    assert launched[0] == "derive_cu_seqlens" and len(launched) == 2


# --- which kernels ----------------------------------------------------------------------------------------------------

OLDER = [("cupy_raw", "sm90", "sm80"), ("numba_cuda", "sm80", "simt")]
CUPY_OFTEN = [pytest.param(*each, marks=[pytest.mark.exhaustive] * (each[0] == "numba_cuda")) for each in OLDER]
"""The host code that decides is the same for both; Numba's kernels take long to compile."""


def rows_on_8_bytes(x: np.ndarray, first: int) -> Any:
    """x on the device, in rows of 8 more elements, from element `first` of these on; or of 4 more."""
    pitch = 4 if first == 0 else 8
    memory = cupy.asarray(np.full((*x.shape[:-1], x.shape[-1] + pitch), np.nan, x.dtype))
    view = memory[..., first : first + x.shape[-1]]
    view[...] = cupy.asarray(x)
    return view


@pytest.mark.parametrize(("backend", "generation", "older"), CUPY_OFTEN)
@pytest.mark.parametrize("first", [0, 4], ids=["strides", "addresses"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.one_in(3)
def test_rows_on_8_bytes(name: str, first: int, backend: str, generation: str, older: str, launched: list[str]) -> None:
    """They go to older kernels, gradients where dO alone is so."""
    choice = {**FEATURES, "sizes": "70x130", "batch": "1"}
    call = build(choice)
    setattr(call, name, rows_on_8_bytes(getattr(call, name).get(), first))
    exact, allowed = expected(choice)
    if name == "dout":
        cases.assert_conforms(cases.run(call, backend), exact, allowed)
        assert older in generations(launched)
    else:
        out, lse = flashkit.attention(call.q, call.k, call.v, return_lse=True, backend=backend, **call.options)
        got = cases.Results(call.to_plain(out), call.rows_to_plain(lse), exact.dq, exact.dk, exact.dv, exact.dsinks)
        cases.assert_conforms(got, exact, allowed)
        assert generations(launched) == {older}


@pytest.mark.parametrize("storage", ["shared heads", "reversed"])
@pytest.mark.parametrize("generation", ["sm90"])
def test_rows_that_tma_does_not_address(storage: str, generation: str, launched: list[str]) -> None:
    check_forward({**PLAIN, "sizes": "70x130", "storage": storage}, "cupy_raw")
    assert generations(launched) == {"sm80"}


@pytest.mark.parametrize(("backend", "generation", "older"), CUPY_OFTEN)
@pytest.mark.parametrize("scale", [pytest.param("-0.3", marks=pytest.mark.exhaustive), "0"])
def test_scales_that_are_not_positive(
    scale: str, backend: str, generation: str, older: str, launched: list[str]
) -> None:
    """They turn the maximum of a row into its minimum, and -inf of a masked pair or of one past the end into inf."""
    check_forward({**FEATURES, "sizes": "140x170", "batch": "2", "scale": scale}, backend)
    if backend == "cupy_raw":
        check({**PLAIN, "sizes": "140x170", "scale": scale}, backend)
    assert generations(launched) == {older}


@pytest.mark.parametrize(("backend", "generation", "older"), CUPY_OFTEN)
def test_no_keys(backend: str, generation: str, older: str, launched: list[str]) -> None:
    call = build({**FEATURES, "sizes": "70x130", "batch": "1", "kv_lengths": "no"})
    call.options["q_offset"] = 0
    k, v = call.k[:, :, :0], call.v[:, :, :0]
    call.options.pop("sinks")
    out, lse = flashkit.attention(call.q, k, v, return_lse=True, backend=backend, **call.options)
    assert not out.get().any()
    assert (lse.get() == -np.inf).all()
    assert generations(launched) == {older}


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("generation", ["simt"])
def test_other_streams_wait_for_what_a_plan_has_copied(generation: str, device: Device, monkeypatch: Any) -> None:
    """Lengths on the host are copied once, on the stream of the plan."""
    if isinstance(device, hardware.Hardware):
        pytest.skip("events of a real device do not say who waited for them")
    monkeypatch.setenv(cuda_backend.VARIABLE, generation)
    made: list[Any] = []

    class Event(cupy.cuda.Event):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            made.append(self)

    monkeypatch.setattr(cupy.cuda, "Event", Event)
    x = np.random.default_rng(0).standard_normal((2, 1, 20, 16), np.float32)
    q, lengths = cupy.asarray(x), np.array([7, 20])
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    with streams[0]:
        planned = flashkit.plan(q, q, q, kv_lengths=lengths, backend="cupy_raw")
        planned(q, q, q)
    (copied,) = made
    for stream, waited in zip((*streams[:2], streams[1]), ([], [streams[1].ptr], [streams[1].ptr] * 2), strict=True):
        with stream:
            out = planned(q, q, q)
        assert copied.waited == waited
    with streams[2]:  # a graph cannot wait for a stream that it does not capture
        streams[2].begin_capture()
        planned(q, q, q, out=out)
        streams[2].end_capture()
    assert copied.waited == [streams[1].ptr] * 2 + [0]
    copied.done = True
    with streams[2]:
        out = planned(q, q, q)
    assert len(copied.waited) == 3
    right = flashkit.attention(x, x, x, kv_lengths=lengths, backend="reference")
    np.testing.assert_allclose(out.get(), right, atol=1e-5)


# --- repeated pull-backs ----------------------------------------------------------------------------------------------

GENERATIONS = [
    pytest.param(*each, marks=[pytest.mark.exhaustive] * (each[0] == "numba_cuda"))
    for each in (("cupy_raw", "sm90"), ("cupy_raw", "sm80"), ("cupy_raw", "simt"), ("numba_cuda", "sm80"))
]


@pytest.mark.parametrize(("backend", "generation"), GENERATIONS)
def test_repeated_pull_backs(
    backend: str, generation: str, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of a call without a plan, for other arrays, strides and dlse; known layouts prepare nothing."""
    monkeypatch.setenv(cuda_backend.VARIABLE, generation)
    rng, made, allocate = np.random.default_rng(0), list[Any](), Workspace.allocate

    def allocated(workspace: Workspace, *arguments: Any) -> Any:
        made.append(allocate(workspace, *arguments))
        if generation == "sm80":  # NaN would be taken for sums that have to be computed again
            assert not made[-1].get()[workspace.parts["dq_accum"][0] :].any()
        return made[-1]

    monkeypatch.setattr(Workspace, "allocate", allocated)

    def drawn(*shape: int) -> Any:
        return cupy.asarray(rng.standard_normal(shape).astype("float16"))

    for number in range(4):
        q, k, v = (drawn(1, 2, n, 16) for n in (70, 90, 90))
        options: dict[str, Any] = {"causal": True, "q_offset": 20, "bias": drawn(70, 90), "deterministic": True}
        out, lse = flashkit.attention(q, k, v, return_lse=True, backend=backend, **options)
        odd = number % 2
        wide = drawn(1, 2, 70, 16 + 8 * odd)[..., :16]
        wide[...] = out
        dout, dlse = drawn(1, 2, 70, 32 + 16 * odd)[..., 8 : 8 + 16], lse * 0.1 if odd else None
        with monkeypatch.context() as patch:
            if number > 1:
                patch.setattr(cuda_backend, "Arguments", None)
                patch.setattr(Workspace, "__init__", None)
                patch.setattr(tensor_maps, "strides_fit", None)
            made.clear(), launched.clear()
            found = vjp_of(q, k, v, wide, lse, backend=backend, **options)(dout, dlse)
            assert len(made) == 1 and generations(launched) == {generation}
        with monkeypatch.context() as patch:
            patch.setattr(plans, "key_of", lambda *_: None)
            _, alone = flashkit.attention_vjp(q, k, v, backend=backend, **options)
        cases.same(found, alone(dout, dlse))


def test_a_pull_back_of_unaligned_rows_after_others(launched: list[str]) -> None:
    """The layout may be the same: whether the newest kernels take a call depends on its addresses, too."""
    call = build({**PLAIN, "sizes": "70x130"})
    memory = cupy.empty(call.dout.size + 4, call.dout.dtype)
    _, vjp = flashkit.attention_vjp(call.q, call.k, call.v, backend="cupy_raw")
    found = []
    for first, generation in ((0, "sm90"), (4, "sm80"), (0, "sm90")):
        dout = memory[first : first + call.dout.size].reshape(call.dout.shape)
        dout[...] = call.dout
        launched.clear()
        found.append([x.get() for x in vjp(dout)])
        assert generations(launched) == {generation}
    for got in found[1:]:
        cases.within_a_unit(got, found[0])


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "choice"), [("sm90", PLAIN), ("sm80", {**FEATURES, "sizes": "7x1100"})])
def test_a_captured_call_replays(generation: str, choice: cases.Choice, device: Device, launched: list[str]) -> None:
    """With what its arrays then hold; what it allocated is in place, whatever else was freed."""
    device.sms = 3 if generation == "sm90" else 16
    call = build(choice)

    def compute() -> list[Any]:
        out, vjp = flashkit.attention_vjp(call.q, call.k, call.v, backend="cupy_raw", **call.options)
        return [out, *(vjp(call.dout, call.dlse) if generation == "sm90" else [])]

    with cupy.cuda.Stream(non_blocking=True) as stream:
        compute()  # compiles
        stream.begin_capture()
        results = compute()
        graph = stream.end_capture()
        gc.collect()
        device.flush()
        launched.clear()
        for _ in range(2):
            call.q[...] = call.q[:, ::-1].copy()
            for x in results:
                x[...] = np.nan
            graph.launch()
            replayed = [x.get() for x in results]
            cases.within_a_unit(replayed, compute())
    assert generations(launched) == {generation}
    assert ("combine" in launched) == (generation == "sm80")


def test_a_captured_call_writes_to_out(device: Device) -> None:
    """Whether it shares memory with what the gradient reads follows from addresses: nothing is read from the device."""
    call = build({**PLAIN, "sizes": "70x70", "dims": "8", "heads": "1:1", "dtype": "float32"})
    out, results = cupy.empty_like(call.q), list[Any]()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        flashkit.attention_vjp(call.q, call.k, call.v, backend="cupy_raw")[1](call.dout)  # compiles
        stream.begin_capture()
        try:
            flashkit.attention(call.q, call.k, call.v, out=out, backend="cupy_raw")
            _, vjp = flashkit.attention_vjp(call.q, call.k, call.v, out=out, backend="cupy_raw")
            results += vjp(call.dout, wrt=("k", "v"))  # a graph writes dq, too, that no one holds
            with pytest.raises(ValueError, match="out must not share memory with k"):
                flashkit.attention_vjp(call.q, call.k, call.v, out=call.k, backend="cupy_raw")
        finally:
            graph = stream.end_capture()
        gc.collect()
        device.flush()
        graph.launch()
        device.flush()
    right, vjp = flashkit.attention_vjp(call.q, call.k, call.v, backend="cupy_raw")
    cases.same((out, *results), (right, *vjp(call.dout)[1:]))


@pytest.mark.parametrize(
    ("part", "shares"),
    [
        (np.s_[:4], False), (np.s_[3:5], True), (np.s_[4:], True), (np.s_[4::-1], True), (np.s_[5::2], False),
        (np.s_[6:4:-2], True), (np.s_[8:], False), (np.s_[4:4], False),
    ],
)  # fmt: skip
def test_shared_memory_on_the_device(part: Any, shares: bool, device: Device) -> None:
    """By elements, as for NumPy arrays."""
    x, nowhere = cupy.zeros((9, 3), "float16"), SimpleNamespace(ptr=0)
    assert not share_memory(x, SimpleNamespace(data=nowhere, shape=(0, 3), strides=(6, 2), dtype=x.dtype))
    assert share_memory(x[4:8:2], x[part]) is shares
    assert not share_memory(x, cupy.zeros((9, 3), "float16"))


@pytest.mark.parametrize("backend", ["cupy_raw", pytest.param("numba_cuda", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("generation", ["sm90"])
def test_tile_counters_serve_again(backend: str, generation: str, launched: list[str], monkeypatch: Any) -> None:
    """A kernel leaves a pair of counters as the next one expects it."""
    monkeypatch.setattr(tensor_maps.TileCounters, "COUNT", 4)
    monkeypatch.setattr(tensor_maps, "_tile_counters", cache(lambda ordinal: tensor_maps.TileCounters()))
    call, found, in_order = build({**PLAIN, "sizes": "140x130"}), [], backend == "cupy_raw"
    for _ in range(5):
        out, vjp = flashkit.attention_vjp(call.q, call.k, call.v, deterministic=in_order, backend=backend)
        found.append([x.get().astype(np.float64) for x in (out, *vjp(call.dout))])
    for results in found:
        assert all(np.isfinite(x).all() for x in results)
        cases.near(results, found[0], rtol=0, atol=0 if in_order else 2.0**-7)
    assert generations(launched) == {generation}


def test_a_captured_launch_has_a_tile_counter_of_its_own(device: Device) -> None:
    from flashkit.backends.cuda_common.tensor_maps import TileCounters

    counters = TileCounters()
    shared = {counters.next(0) for _ in range(2 * counters.COUNT)}
    assert len(shared) == counters.COUNT
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        assert counters.next(stream.ptr) not in shared
        stream.end_capture()


def test_only_another_device_is_entered(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cupy.asarray(np.ones(3, np.float32))
    for current, enters in ((0, False), (1, True)):
        monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda current=current: current)
        assert isinstance(arrays.scope(x), cupy.cuda.Device) == enters


def test_a_numpy_array_in_a_captured_call_is_an_error(device: Device) -> None:
    call = build({**PLAIN, "sizes": "70x70", "dims": "8", "heads": "1:1", "dtype": "float32"})
    document = mods.document(np.zeros(70, np.int32))
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="expected a CuPy array"):
                flashkit.attention(call.q, call.k, call.v, mask_mod=document, backend="cupy_raw")
        finally:
            stream.end_capture()


# --- verification -----------------------------------------------------------------------------------------------------


class Computed:
    """A pass without kernels: it writes what the definition gives, changed by `change`, a function of each result."""

    tile = "its tile"
    dense, values_in_keys = modification.NOT_DENSE, False

    def __init__(self, spec: AttentionSpec, direction: str, change: Any) -> None:
        self.spec, self.direction, self.change = spec, direction, change
        self.binary = compiler.Binary("none", b"", {})
        self.libraries = [self]

    def run(self, arguments: Any, stream: int) -> None:
        problem = verify.sample_problem(self.spec)
        out, lse = standard(self.spec, problem)
        names = {"out": out, "lse": lse}
        if self.direction == "backward":
            problem.out, problem.lse = out, lse
            names = standard_gradients(self.spec, problem, verify._dout(self.spec))._asdict()
        for name, x in names.items():
            if x is not None:
                x = np.ascontiguousarray(self.change(name, x.astype(np.float32)))
                memory = cupy.cuda.UnownedMemory(arguments.words[AT[name]], x.nbytes, self, 0)
                cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0))[...] = cupy.asarray(x)


RESULTS = [("forward", "out"), ("forward", "lse"), *(("backward", name) for name in ("dq", "dk", "dv", "dsinks"))]


@pytest.mark.parametrize(("direction", "name"), RESULTS)
@pytest.mark.parametrize("wrong", ["one", "all but one", "NaN"])
def test_a_wrong_element_of_fresh_kernels_is_an_error(
    direction: str, name: str, wrong: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.Binary, "checked", False)
    marked: list[bool] = []
    monkeypatch.setattr(compiler.Binary, "mark_checked", lambda self: marked.append(True))
    spec = AttentionSpec("float32", 16, 16, 2, sinks=True)

    def change(which: str, x: np.ndarray) -> np.ndarray:
        if which == name:
            if wrong == "all but one":
                x.flat[1:] += 1
            else:
                x.flat[x.size // 2] = np.nan if wrong == "NaN" else x.flat[x.size // 2] + 1
        return x

    here = devices.current()
    CHECK(Computed(spec, direction, lambda _, x: x), spec, here, direction)
    assert marked == [True]
    with pytest.raises(verify.MiscompiledError, match=f"{name} of the freshly compiled {direction} pass its tile"):
        CHECK(Computed(spec, direction, change), spec, here, direction)
    assert marked == [True]


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_partial_results_merge_on_the_device(device: Device, dtype: str) -> None:
    """Into arrays of CuPy's kind, equal to NumPy's."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 8, 16)).astype(dtype)
    parts = [
        flashkit.attention(q, k[:, i], v[:, i], return_lse=True, backend="reference")
        for i in (slice(0, 3), slice(3, 8))
    ]
    parts[0][0][0, 1], parts[0][1][0, 1] = np.nan, -np.inf
    expected = flashkit.merge(*parts)
    found = flashkit.merge(*(tuple(map(cupy.asarray, part)) for part in parts))
    for on_device, on_host in zip(found, expected):
        assert type(on_device) is cupy.ndarray and on_device.dtype == on_host.dtype
        np.testing.assert_allclose(on_device.get(), on_host, rtol=1e-3)


def test_weights_of_arrays_on_the_device(device: Device) -> None:
    """Of CuPy's kind, equal to those of NumPy arrays, whatever lies on the device."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, 4, 9, 16), dtype=np.float32)
    options: dict[str, Any] = {
        "rows": [7, -9], "heads": slice(1, 3), "causal": True, "q_offset": np.array([0, 2]),
        "kv_lengths": np.array([9, 5]), "bias": rng.standard_normal((9, 9), dtype=np.float32),
        "alibi_slopes": np.ones(4, np.float32),
    }  # fmt: skip
    expected = flashkit.weights(q, k, **options)
    placed = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    found = flashkit.weights(cupy.asarray(q), cupy.asarray(k), **placed)
    assert type(found) is cupy.ndarray and found.dtype == expected.dtype
    np.testing.assert_array_equal(found.get(), expected)


# --- quantised arrays -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["e4m3", "int8"])
def test_quantised_arrays(device: Device, dtype: Any) -> None:
    """The numbers of the host, where e4m3 has the dtype of its codes."""
    x = np.random.default_rng(0).standard_normal((1, 2, 20, 16)).astype("float16")
    x[0, 0, 3, 2], x[0, 0, 5, 2] = np.nan, 300
    for per in ("tensor", "head", "block", "token"):
        for rotate in (False, True):
            more: dict[str, Any] = {"per": per, "rotate": rotate, "smooth": rotate, "block": 8}
            host, own = (flashkit.quantize(each, dtype, **more) for each in (x, cupy.asarray(x)))
            assert own.data.dtype == ("int8" if dtype == "int8" else "uint8") and own.scale.shape == host.scale.shape
            # Rotation is a matrix product, whose last bits differ: they decide where a number lies between two codes.
            bits, differ = {"rtol": 1e-6 * rotate}, np.count_nonzero(own.data.get() != host.data.view(own.data.dtype))
            assert differ <= 2 * rotate
            np.testing.assert_allclose(own.scale.get(), host.scale, **bits)
            wide = own.dequantize().get().astype(np.float64) - host.dequantize().astype(np.float64)
            assert np.count_nonzero(abs(wide) > 1e-2 * rotate) <= 16 * differ


@pytest.mark.parametrize("generation", ["simt"])
def test_attention_of_quantised_arrays(device: Device, generation: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 1, 2, 20, 16)).astype("float16")
    q, k, v = map(cupy.asarray, x)
    k8 = flashkit.quantize(k, "e4m3", "block", rotate=True)
    out, vjp = flashkit.attention_vjp(q, k8, v, precision="fp8", causal=True, backend="cupy_raw")
    expected, right = flashkit.attention_vjp(*x, precision="fp8", causal=True, backend="reference")
    for found, wanted in zip((out, *vjp(out)), (expected, *right(expected)), strict=True):
        assert found.dtype == np.float16
        np.testing.assert_allclose(found.get().astype(np.float64), wanted.astype(np.float64), rtol=2e-3, atol=1e-3)
    with pytest.raises(TypeError, match="v: expected a cupy array, as q is, got a numpy array"):
        flashkit.attention(q, k8, flashkit.quantize(x[2]))
