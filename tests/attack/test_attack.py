"""A part of the fuzzer's work for every change: fixed seeds, and one of the day."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest

from flashkit.spec import DTYPES

from . import campaign, draw

TODAY = datetime.date.today().toordinal()
CALLS, GRAPHS = 40 if os.environ.get("FLASHKIT_TEST_ALL") else 6, 1
ON_DEVICE = int(os.environ.get("FLASHKIT_ATTACK") or 100)


def lanes_here() -> int:
    from flashkit.devices import host

    return host.lanes_of(host.cpu_features())


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("lanes", "bf16", "dtype"),
    [(4, "", "float16"), (8, "", "float64"), (16, "", "float32"), (16, "emulate", "bfloat16")],
)
def test_random_calls(lanes: int, bf16: str, dtype: str) -> None:
    """Each width and each dtype once: most of the time is that of compiling."""
    if lanes > lanes_here():
        pytest.skip(f"this CPU has no vectors of {lanes} float32")
    settings = campaign.Settings(lanes=str(lanes), bf16=bf16, graphs=GRAPHS, fixed={"dtype": dtype})
    assert campaign.check(settings, 1, CALLS, first=1000 * lanes + 500 * bool(bf16)).refused == 0


@pytest.mark.slow
@pytest.mark.exhaustive
def test_random_calls_of_the_day() -> None:
    lanes = [n for n in (4, 8, 16) if n <= lanes_here()]
    fixed = {"dtype": list(DTYPES)[TODAY % len(DTYPES)]}
    campaign.check(campaign.Settings(lanes=str(lanes[TODAY % len(lanes)]), graphs=GRAPHS, fixed=fixed), TODAY, CALLS)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy_raw", "numba_cuda"])
@pytest.mark.parametrize("generation", ["simt", "sm80", "sm90"])
def test_random_calls_on_a_device(backend: str, generation: str) -> None:
    """FLASHKIT_ATTACK says how many."""
    from flashkit import dispatch

    found = dispatch.registry()[backend]
    if not (verdict := found.available()):
        pytest.skip(f"{backend}: {verdict.reason}")
    if generation not in [each.name for each in found.generations]:  # type: ignore[attr-defined]
        pytest.skip(f"the device has no {generation}")
    graphs = 20 if backend == "cupy_raw" else 4
    campaign.check(campaign.Settings(backend, generation=generation, graphs=graphs), TODAY, ON_DEVICE)


# --- the fuzzer itself ------------------------------------------------------------------------------------------------


def test_a_call_follows_from_its_seed_and_number() -> None:
    pool = draw.pool(3, 20, cuda=False)
    assert pool == draw.pool(3, 20, cuda=False) != draw.pool(4, 20, cuda=False)
    calls = [draw.call(3, n, pool) for n in range(500)]
    assert calls == [draw.call(3, n, pool) for n in range(500)]
    assert len({json.dumps(choice) for choice in calls}) == 500
    assert {choice["hostile"] for choice in calls} > {"no", "integers", "writer"}
    assert all(draw.PLAIN.keys() >= choice.keys() for choice in calls)


def test_every_form_and_function_is_drawn() -> None:
    """With everything that a form takes: a drawn call is refused by no backend for what it is."""
    for cuda in (False, True):
        pool = draw.pool(3, 200, cuda)
        calls = [draw.call(3, n, pool, cuda) for n in range(3000)]
        forms = {"batch", "padded", "packed", "paged", "padded, paged", "packed, paged"}
        drawn = {choice["sequences"] for choice in calls}
        assert drawn == forms, forms ^ drawn
        for form in forms - {"batch"}:
            own = [choice for choice in calls if choice["sequences"] == form]
            for factor in ("dtype", "kv_lengths", "dropout", "sinks", "again", "hostile", "behind", "page", "q_offset"):
                levels = {choice[factor] for choice in own}
                fixed = cuda and factor in draw.COMPILED_CUDA  # by a graph, of which few have the form
                assert len(levels) > 1 or fixed or (form, factor) == ("packed", "kv_lengths"), (form, factor, levels)
        entries = {choice.get("entry", "attention") for choice in calls}
        assert entries == {"attention", *(draw.ENTRIES_CUDA if cuda else draw.ENTRIES)}


def test_a_lone_weight_may_be_off_by_the_rounding_of_its_log_sum_exp() -> None:
    """It is recomputed from float32's log-sum-exp, about -100; the plain computation subtracts the score itself."""
    call = cases.build(cases.with_(sizes="70x1", alibi="(Hq,)") | {"q_offset": "700"})
    exact, allowed = cases.expected(call, 1)
    assert exact.dv is not None
    spacing = np.spacing(np.abs(exact.lse).astype(np.float32)).astype(np.float64)[..., None]
    for units, fits in ((0.5, True), (20, False)):
        dv = (np.exp(units * spacing) * call.plain_dout).sum(axis=2, keepdims=True)
        ratio = cases.ratios(dataclasses.replace(exact, dv=dv), exact, allowed)["dv"]
        assert (ratio <= 1) == fits, (units, ratio)


def test_a_finding_is_repeated_by_the_smallest_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a finding does not need is taken away, and the command makes the call that is left."""
    choice = draw.call(3, 5, draw.pool(3, 20, cuda=False)) | {"causal": "yes", "sizes": "7x9", "layout": "bnhd"}
    needs = {"causal": "yes", "sizes": "7x9"}
    monkeypatch.setattr(campaign, "problems_of", lambda _, c: ["wrong"] * (needs.items() <= c.items()))
    settings = campaign.Settings(lanes="8")
    smallest, found = campaign.smallest(settings, choice)
    assert found == ["wrong"]
    assert {f: x for f, x in smallest.items() if x != draw.PLAIN[f]} == needs | {"seed": choice["seed"]}
    words = shlex.split(campaign.command(settings, smallest))
    assert words[:5] == ["python", "-m", "tests.attack", "--backend", "cpu"]
    assert draw.split(draw.PLAIN | json.loads(words[-1])) == draw.split(smallest)


ENDINGS = {"crash": ("os.kill(os.getpid(), 11)", "exit status -11"), "hang": ("time.sleep(600)", "hung for 6 s")}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_call_that_ends_its_process_is_a_finding(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the calls after it are made. The clock runs from the moment on when the child hangs."""
    ending, says = ENDINGS[how]
    flag, ticks = tmp_path / "hangs", iter(range(1, 20))
    clock = lambda: next(ticks, 20) if flag.exists() else 0
    monkeypatch.setattr(campaign, "time", types.SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(campaign, "PATIENCE", 6)
    child = f"""
import json, os, pathlib, sys, time
task = json.loads(sys.argv[-1])
for n in range(task["first"], task["last"]):
    print(json.dumps(dict(begin=n, choice=dict(dtype="float32"))), flush=True)
    if n == 2:
        pathlib.Path({str(flag)!r}).touch()
        {ending}
    print(json.dumps(dict(end=n, problems=[])), flush=True)
"""
    settings, tally = campaign.Settings(sanitizer=shlex.join([sys.executable, "-c", child])), campaign.Tally()
    [found] = campaign.numbered(settings, 0, 0, 5, tally)
    assert (found["number"], found["problems"][0], tally.calls) == (2, says, 4)


PROBES = {
    "a read past the end": ("ctypes.string_at(x.ctypes.data + x.nbytes, 1)", False),
    "a read past the end of a view": ("ctypes.string_at(x[1:, 5:7].ctypes.data + 2 * 56, 57)", False),
    "a write to an input": ("ctypes.memset(x.ctypes.data, 0, 1)", True),
    "a read of what is gone": ("at = x.ctypes.data; del x; np.empty(1); ctypes.string_at(at, 1)", False),
}


@pytest.mark.parametrize("what", PROBES)
def test_guarded_memory_ends_the_process(what: str) -> None:
    """Each probe in a process of its own, at the guarded end."""
    probe, read_only = PROBES[what]
    text = f"""
import ctypes, numpy as np
from contextlib import nullcontext
from attack.memory import GUARD, guarded
with guarded(1):
    GUARD.random.random = lambda: 0.0
    x = np.ones((3, 7))
    assert ctypes.string_at(x.ctypes.data + x.nbytes - 1, 1)
    with GUARD.read_only() if {read_only} else nullcontext():
        print("so far", flush=True)
        {probe}
"""
    environment = campaign.Settings().environment()
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert done.stdout == "so far\n" and done.returncode < 0, done.stderr


def test_read_only_memory_is_writable_again_and_nothing_else() -> None:
    """An array that is gone within the block leaves its place to another, of another size."""
    import gc

    from .memory import _POOLS, _READ, GUARD, PAGE, _libc, guarded

    LARGE = (max(_POOLS) + 1) * PAGE  # given back to the system when it is freed

    with guarded(1):
        GUARD.random.random = lambda: 1.0  # type: ignore[method-assign]  # at the first page's begin
        big, kept = np.zeros(LARGE, np.uint8), np.zeros(10)
        place = big.ctypes.data
        with GUARD.read_only():
            del big
            gc.collect()
            GUARD.give_back()
            mapped = _libc.mmap(place, LARGE, _READ, 0x22, -1, 0)  # what a system puts there: not writable
            GUARD.blocks[place] = PAGE, PAGE
        kept[:] = 1
    del GUARD.blocks[place], GUARD.random.random
    assert mapped == place
    lines = Path("/proc/self/maps").read_text().splitlines()
    for line in lines:
        start, end = (int(x, 16) for x in line.split()[0].split("-"))
        if start <= place < end:
            assert line.split()[1] == "r--p", line
    _libc.munmap(place, LARGE)


def test_margins_on_a_device_tell_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CuPy whose memory is NumPy's."""

    class Pointer:
        def __init__(self, memory: np.ndarray, at: int = 0) -> None:
            self.mem, self.at = memory, at

        def __add__(self, n: int) -> Pointer:
            return Pointer(self.mem, self.at + n)

        def memset_async(self, value: int, n: int) -> None:
            self.mem[self.at : self.at + n] = value

    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        MemoryPool=lambda: types.SimpleNamespace(malloc=lambda n: Pointer(np.zeros(n, np.uint8))),
        using_allocator=lambda _: contextlib.nullcontext(),
        Device=lambda: types.SimpleNamespace(synchronize=lambda: None),
    )
    cupy.uint8, cupy.ndarray = np.uint8, lambda shape, _, memptr: memptr.mem[memptr.at : memptr.at + shape[0]]
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    from .device_memory import DeviceMemory

    memory = DeviceMemory(sanitized=False)
    with memory.guarded(1):
        array, out = memory.allocate(100), memory.allocate(7)
        assert (array.mem == 255).all()
        with memory.read_only(types.SimpleNamespace(data=out)):
            (out + 3).memset_async(1, 1)
        assert memory.seen_damage() == []
    for at, says in (
        (5, "an input of 100 bytes was written"),
        (100, "bytes after an array of 100 bytes were written"),
        (-1, "bytes before an array of 100 bytes were written"),
    ):
        with memory.guarded(1):
            array = memory.allocate(100)
            with memory.read_only(None):
                (array + at).memset_async(1, 1)
            assert memory.seen_damage() == [says]


def test_guarded_memory_tells_of_writes_beside_an_array() -> None:
    import ctypes

    from .memory import GUARD, guarded

    with guarded(5):
        arrays = [np.zeros(11) for _ in range(8)]
        assert GUARD.seen_damage() == []
        for x in arrays:
            if x.ctypes.data % 4096:
                ctypes.memset(x.ctypes.data - 1, 0, 1)
                assert GUARD.seen_damage() == ["bytes before an array of 88 bytes were written"]
                ctypes.memset(x.ctypes.data - 1, 255, 1)
            else:
                ctypes.memset(x.ctypes.data + x.nbytes, 0, 1)
                assert GUARD.seen_damage() == ["bytes after an array of 88 bytes were written"]
                ctypes.memset(x.ctypes.data + x.nbytes, 255, 1)
        del x, arrays
    assert GUARD.seen_damage() == []
