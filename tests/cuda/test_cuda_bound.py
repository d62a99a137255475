"""What a bound call of the CUDA backends hands to its kernels, word by word. No device is needed: NumPy's memory stands
for a device's.
"""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from operands import OnDevice, on_device
from tiles import MODELS

from flashkit import BlockMask
from flashkit.backends.cuda_common import arguments, backend, launch
from flashkit.backends.cuda_common.arguments import Arguments
from flashkit.backends.cuda_common.params import AT, VALUES
from flashkit.backends.cupy_raw.backend import CupyRawBackend
from flashkit.backends.numba_cuda import sm80 as numbas_sm80
from flashkit.call import plans
from flashkit.call.arguments import prepare
from flashkit.call.vjp import Backward
from flashkit.spec import Gradients


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Memory that is kept for graphs, where any records; all else of CuPy that binding asks for is put in place."""
    found: list[Any] = []
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cuda = SimpleNamespace(runtime=runtime, Event=lambda **_: SimpleNamespace(record=lambda: None, done=True))
    cupy = SimpleNamespace(cuda=cuda)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(launch, "_cupy", lambda: cupy)  # which would remember it
    monkeypatch.setattr(arguments, "on_device", on_device)
    monkeypatch.setattr(backend, "_check_device", lambda plan, operands: None)
    monkeypatch.setattr(launch, "stream", lambda: 7)
    monkeypatch.setattr(launch, "keep", lambda stream, *memory: found.extend(memory))
    monkeypatch.setattr(arguments, "dummy_slot", lambda ordinal, size: OnDevice(np.zeros(8, np.int8)))
    return found


SHAPE = 2, 4, 128, 64
BLOCKS = BlockMask.from_dense(np.array([[True, False], [True, True]]), 64, 64)


def operands_of(**options: Any) -> tuple[Any, Any]:
    """A problem, and operands of which the five tensors lie on the device."""
    problem, operands, _ = prepare(*(np.zeros(SHAPE, np.float16) for _ in range(3)), **options)
    tensors = {name: on_device(getattr(operands, name)) for name in ("q", "k", "v", "out", "lse")}
    return problem, replace(operands, **tensors)


def five() -> list[Any]:
    """q, k, v, out and lse of another call."""
    return [*(OnDevice(np.zeros(SHAPE, np.float16)) for _ in range(4)), OnDevice(np.zeros(SHAPE[:3], np.float32))]


def watched(problem: Any) -> tuple[Any, list[list[int]]]:
    """A plan, and the words that its kernels have got."""
    seen: list[list[int]] = []
    made = SimpleNamespace(run=lambda block, stream: seen.append(list(block.words)))
    device = replace(MODELS["sm_90a"], ordinal=0)
    return SimpleNamespace(problem=problem, device=device, forward=(made, None), backward=(made, None)), seen


def given(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bias, slopes = (rng.standard_normal(shape, dtype=np.float32) for shape in ((4, 1, 128), 4))
    return {"alibi_slopes": slopes, "bias": bias, "mask": rng.random((2, 1, 128, 128)) < 0.8}


def test_arrays_that_come_anew(kept: list[Any]) -> None:
    """Their addresses take the place of the first ones', which are not kept alive; nothing else differs."""
    arrays = given(0)
    problem, operands = operands_of(block_mask=BLOCKS, **arrays)
    names = plans.names_of(list(arrays.values()), operands)
    assert names is not None
    plan, seen = watched(problem)
    bound = CupyRawBackend().bind(plan, operands, names)
    own = [weakref.ref(operands.arrays[name]) for name in names]
    of_blocks = [array for name, array in operands.arrays.items() if name not in names]
    operands.arrays = {}
    kept.clear()
    gc.collect()
    assert [ref() for ref in own] == [None] * 3

    for seed in (1, 2, 1):
        arrays = given(seed)
        tensors = five()
        others = [on_device(array) for array in arrays.values()]
        bound(*tensors, *others)
        assert set(map(id, kept[-1])) == set(map(id, others)), "a graph needs them as long as it lives"

        _, alone = operands_of(block_mask=BLOCKS, **arrays)
        placed = dict(zip(names, others, strict=True))
        rest = iter(of_blocks)
        named = {name: placed.get(name) or next(rest) for name in alone.arrays}
        alone = replace(alone, **dict(zip(("q", "k", "v", "out", "lse"), tensors, strict=True)), arrays=named)
        assert seen[-1] == list(Arguments(problem.spec, alone).words)
        assert {x.data.ptr for x in others} <= set(seen[-1][VALUES:])


@pytest.mark.parametrize("change", [lambda x: x[None], lambda x: x[:, :64], lambda x: x.view(np.int32)])
def test_arrays_of_another_layout_are_refused(change: Any, kept: list[Any]) -> None:
    bias = np.zeros((4, 128, 128), np.float32)
    problem, operands = operands_of(bias=bias)
    plan, seen = watched(problem)
    bound = CupyRawBackend().bind(plan, operands, list(operands.arrays))
    bound(*five(), OnDevice(bias))
    with pytest.raises(ValueError, match="array of a modification: expected the layout"):
        bound(*five(), OnDevice(change(bias)))
    assert len(seen) == 1


def test_an_lse_that_was_not_requested(kept: list[Any]) -> None:
    problem, operands = operands_of()
    plan, seen = watched(problem)
    bound, tensors = CupyRawBackend().bind(plan, operands), five()
    bound(*tensors)
    bound(*tensors[:4], None)
    wanted, unread = (words[AT["lse"] : AT["lse"] + 4] for words in seen)
    assert wanted[0] == tensors[4].data.ptr != unread[0]
    assert unread[1:] == [0, 8, 0], "one dummy slot for each head"
    bound(*tensors)
    assert seen[2] == seen[0]


def test_a_pull_back_finds_what_was_sent(kept: list[Any]) -> None:
    """Arguments put the copies that they make into the operands."""
    problem, operands = operands_of(block_mask=BLOCKS, kv_lengths=np.array([100, 128]))
    first = Arguments(problem.spec, operands)
    sent = operands.kv_lengths, operands.q_offset, *operands.arrays.values()
    assert len(sent) > 2 and all(isinstance(array, OnDevice) for array in sent)
    assert list(Arguments(problem.spec, operands).words) == list(first.words)


def test_partial_results_of_splits_have_places_of_their_own(kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `combine` reads them: splits follow one another by batch entries."""
    problem, operands = operands_of()
    block, splits = Arguments(problem.spec, operands), 3
    memory = np.zeros(0, np.float32)

    def scratch(shape: tuple[int], dtype: str, empty: Any) -> Any:
        memory.resize(shape, refcheck=False)
        return OnDevice(memory)

    monkeypatch.setattr(arguments, "scratch", scratch)
    block.allocate_partials(splits)
    at_o, at_lse = AT["o_partial"], AT["lse_partial"]
    begin, *of_o, columns = *block.words[at_o : at_o + 4], SHAPE[3]
    begin_lse, *of_lse = block.words[at_lse : at_lse + 4]
    each = list(itertools.product(range(splits * SHAPE[0]), range(SHAPE[1]), range(SHAPE[2])))
    places = [begin + 4 * (np.dot(where, of_o) + i) for where in each for i in range(columns)]
    places += [begin_lse + 8 * np.dot(where, of_lse) + half for where in each for half in (0, 4)]
    assert begin_lse % 8 == begin % 8
    assert len(set(places)) == len(places)
    assert min(places) >= memory.ctypes.data and max(places) + 4 <= memory.ctypes.data + memory.nbytes


def test_scales_that_are_positive(kept: list[Any]) -> None:
    for scale, positive in ((2.0, True), (1e-6, True), (0.0, False), (1e-40, False), (-0.3, False)):
        problem, operands = operands_of(scale=scale)
        assert Arguments(problem.spec, operands).positive_scale is positive


def test_offsets_that_differ_are_an_array(kept: list[Any]) -> None:
    for offsets, one in (([3, 3], True), ([3, 5], False), ([5, 3], False)):
        problem, operands = operands_of(causal=True, q_offset=np.array(offsets))
        words = Arguments(problem.spec, operands).words
        assert (words[AT["q_offsets"]] == 0) is one and words[AT["q_offset"]] == (3 if one else 0)


def test_strides_of_a_modifications_arrays_are_of_elements(kept: list[Any]) -> None:
    bias = np.zeros((1, 4, 128, 128), np.float32)
    problem, operands = operands_of(bias=bias)
    assert list(Arguments(problem.spec, operands).words[VALUES:])[1:] == [4 * 128 * 128, 128 * 128, 128, 1]


NAMES = "q", "k", "v", "out", "dout", "dq", "dk", "dv"


def placed(first: str = "", stride: str = "", scale: float = 1.0) -> Arguments:
    """The block of a backward pass; the tensor `first` begins on 8 bytes, rows of `stride` are apart by as many."""
    problem, operands = operands_of(scale=scale)
    block = Arguments(problem.spec, operands)
    for name in NAMES:
        row = SHAPE[3] + 4 * (name == stride)
        strides = SHAPE[1] * SHAPE[2] * row, SHAPE[2] * row, row
        block.words[AT[name] : AT[name] + 4] = [1 << 20 | 8 * (name == first), *strides]
    return block


def test_numbas_tensor_cores_take_rows_of_whole_vectors(kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tensor that a pass reads or writes in vectors; the forward pass also a positive scale alone."""
    monkeypatch.setattr(numbas_sm80.MmaBackward, "geometry", lambda *_: "its own")
    monkeypatch.setattr(numbas_sm80.MmaBackward, "launch", lambda *_: ran.append("sm80"))
    older, ran = SimpleNamespace(run=lambda *_: ran.append("older")), list[str]()
    passes: dict[str, Any] = {"forward": numbas_sm80.Forward, "backward": numbas_sm80.Backward}
    for direction, kind in passes.items():
        one = object.__new__(kind)
        one._addresses = arguments.addresses(kind.addressed)
        one.fallback, one._kernel = older, SimpleNamespace(launch=lambda *_: ran.append("sm80"))
        one.tile = SimpleNamespace(block_q=128)
        used = NAMES[:4] if direction == "forward" else [name for name in NAMES if name != "out"]
        for name in NAMES:
            for where in ("first", "stride"):
                one.run(placed(**{where: name}), 0)
                assert ran.pop() == ("older" if name in used else "sm80"), (direction, name, where)
        if direction == "forward":
            for scale in (0.0, -0.5):
                one.run(placed(scale=scale), 0)
                assert ran.pop() == "older"


# --- the backward pass ------------------------------------------------------------------------------------------------


def of_another_call(
    first: Any, wide_out: int = 0, wide_dout: int = 0, dlse: bool = False, dsinks: bool = False, **named: Any
) -> tuple[Any, Gradients]:
    """Operands of the same plan and gradients, where rows of out and dout have so many more columns in memory."""
    tensors = dict(zip(("q", "k", "v", "out", "lse"), five(), strict=True))
    operands = replace(first, **tensors, arrays=first.arrays | named)
    operands.out, dout = (
        OnDevice(np.zeros((*SHAPE[:3], SHAPE[3] + more), np.float16)[..., : SHAPE[3]]) for more in (wide_out, wide_dout)
    )
    statistics, of_sinks = (OnDevice(np.zeros(shape, np.float32)) for shape in (SHAPE[:3], 4))
    return operands, Gradients(dout, statistics if dlse else None, *five()[:3], of_sinks if dsinks else None)


def words_alone(problem: Any, operands: Any, gradients: Gradients) -> list[int]:
    block = Arguments(problem.spec, operands)
    block.gradients(gradients)
    return list(block.words)


def test_pull_backs_of_other_layouts(kept: list[Any]) -> None:
    """Each has the words of a block made for it alone, whatever the one before had."""
    arrays = given(0)
    problem, operands = operands_of(block_mask=BLOCKS, sinks=np.zeros(4, np.float32), **arrays)
    operands.sinks = on_device(operands.sinks)
    names = plans.names_of(list(arrays.values()), operands)
    assert names is not None
    plan, seen = watched(problem)
    bound = Backward((CupyRawBackend(), plan), problem, None, names, binds=True)
    some = [*itertools.product((0, 8), (0, 8), (False, True), (False, True))]
    for number, form in enumerate([*some, *some, *((8 * n, 0, False, False) for n in range(40)), *some]):
        others = {name: on_device(x) for name, x in zip(names, given(number).values(), strict=True)}
        call = of_another_call(operands, *form, **others)
        kept.clear()
        bound(*call)
        assert seen[-1] == words_alone(problem, *call)
        assert any(x is call[0] for x in kept) and any(x is call[1] for x in kept), "a graph needs them"
    call[0].arrays[names[0]] = OnDevice(np.zeros((3, 3), np.float32))
    with pytest.raises(ValueError, match="array of a modification: expected the layout"):
        bound(*call)


def test_pull_backs_at_the_same_time(kept: list[Any]) -> None:
    """Each has a block of its own until its kernels are enqueued."""
    problem, operands = operands_of()
    plan, seen = watched(problem)
    inner, outer = of_another_call(operands), of_another_call(operands)
    blocks: list[Any] = []

    def run(block: Any, stream: int) -> None:
        blocks.append(block)
        if len(blocks) == 1:
            bound(*inner)
        seen.append(list(block.words))

    plan.backward = SimpleNamespace(run=run), None
    bound = CupyRawBackend().bind_backward(plan, *outer)
    bound(*outer)
    assert seen == [words_alone(problem, *inner), words_alone(problem, *outer)] and seen[0] != seen[1]
    for _ in range(3):
        bound(*outer)
    assert len({id(block) for block in blocks}) == 2, "blocks are used again"


def test_a_pull_back_keeps_no_tensors_alive(kept: list[Any]) -> None:
    problem, operands = operands_of()
    plan, _ = watched(problem)
    call = of_another_call(operands, dlse=True, dsinks=True)
    bound = CupyRawBackend().bind_backward(plan, *call)
    bound(*call)
    gradients = (x for name, x in vars(call[1]).items() if name != "values")  # a dict
    tensors = [weakref.ref(x) for x in (call[0].q, call[0].out, call[0].lse, *gradients)]
    gradients.close()
    kept.clear()
    del call, operands
    gc.collect()
    assert [ref() for ref in tensors] == [None] * len(tensors)


def test_a_pull_back_on_another_device(kept: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here = [0]
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "getDevice", lambda: here[0])
    problem, operands = operands_of()
    plan, seen = watched(problem)
    call = of_another_call(operands)
    bound = CupyRawBackend().bind_backward(plan, *call)
    here[0] = 1
    with pytest.raises(ValueError, match="current CUDA device, 1, got one on device 0"):
        bound(*call)
    assert not seen
