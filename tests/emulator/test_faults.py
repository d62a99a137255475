"""Missing waits, planted in kernels, are found in one of a few orders of events. tests/mutants has other faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from flashkit.backends.cuda_common import backend as cuda_backend

from . import device as emulated_device
from .calls import PLAIN, check, generations
from .errors import EmulationError

if TYPE_CHECKING:
    from .device import Device

pytestmark = pytest.mark.slow

SEEDS = 4


@dataclass(frozen=True)
class Fault:
    """What replaces a text of a kernel file."""

    name: str
    backend: str
    generation: str
    file: str
    text: str
    instead: str = ""
    marks: Any = ()


_CUPY, _NUMBA = "cupy_raw", "numba_cuda"
_SM90, _SM80 = (_CUPY, "sm90"), (_CUPY, "sm80")

FAULTS = [
    Fault("V is not awaited", *_SM90, "sm90/mainloop.cuh", "pipe_v.consumer_wait(n);"),
    Fault("V is not released", *_SM90, "sm90/mainloop.cuh", "pipe_v.consumer_release(n);"),
    Fault("dO is not awaited", *_SM90, "sm90/bwd_mainloop.cuh", "pipe_dout.consumer_wait(n);"),
    Fault("dP is not awaited", *_SM90, "sm90/bwd_mainloop.cuh", "wgmma_wait<1>();  // dP"),
    Fault("Q is not released", *_SM90, "sm90/bwd_mainloop.cuh", "pipe_q.consumer_release(n, lane), "),
    Fault(
        "dQ is converted early", *_SM90, "sm90/bwd_preprocess.cuh", " wait_for_dq(p, at.b, at.h, at.tile);", ";",
    ),
    Fault("P and dS are not awaited", *_SM80, "sm80/backward.cu", "__syncthreads();  // all threads see P and dS"),
    Fault(
        "V is not awaited", _NUMBA, "sm90", "sm90/mainloop.py",
        "    consumer_wait(base + AT_V_PIPE, n, STAGES)\n    if HAS_LENGTHS:", "    if HAS_LENGTHS:",
    ),
    Fault(
        "dP is not awaited", _NUMBA, "sm90", "sm90/bwd_mainloop.py", "    wgmma_wait(1)  # dP\n",
        marks=pytest.mark.exhaustive,
    ),
]  # fmt: skip


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault], None]]:
    """Replaces the text that a fault names, in what the backend compiles."""
    from flashkit.backends.cuda_common import compiler, launch
    from flashkit.backends.cupy_raw import specialise as cupy_raw
    from flashkit.backends.numba_cuda import specialise as numba_cuda

    def forget() -> None:
        launch._shared.clear()  # kernels that are loaded, by what their texts are made from

    def changed(fault: Fault, text: str) -> str:
        assert text.count(fault.text), f"{fault.file} has no {fault.text!r}: give FAULTS its present text"
        return text.replace(fault.text, fault.instead, 1)

    def plant(fault: Fault) -> None:
        monkeypatch.setenv(cuda_backend.VARIABLE, fault.generation)
        forget()
        if fault.backend == _CUPY:
            texts = dict(compiler.headers(cupy_raw.FOLDER))
            texts[fault.file] = changed(fault, texts[fault.file])
            monkeypatch.setattr(compiler, "headers", lambda folder: tuple(texts.items()))
        else:
            read, name = numba_cuda._part, fault.file.removesuffix(".py")
            text = changed(fault, read(name))
            monkeypatch.setattr(numba_cuda, "_part", lambda part: text if part == name else read(part))

    yield plant
    forget()


@pytest.mark.parametrize(
    "fault", [pytest.param(x, id=f"{x.backend}-{x.generation}-{x.name}", marks=x.marks) for x in FAULTS]
)
@pytest.mark.one_in(6)
def test_a_fault_is_found(fault: Fault, plant: Callable[[Fault], None], device: Device, monkeypatch: Any) -> None:
    monkeypatch.setattr(emulated_device, "PATIENCE", 5)
    plant(fault)
    for seed in range(SEEDS):
        device.seed(seed)
        try:
            check(PLAIN, fault.backend)
        except (AssertionError, EmulationError):
            return
    pytest.fail(f"{fault.name}: the results of {SEEDS} orders of events are right")


@pytest.mark.parametrize(("backend", "generation"), [_SM90, _SM80])
def test_kernels_are_right_in_any_order_of_events(
    backend: str, generation: str, device: Device, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cuda_backend.VARIABLE, generation)
    for seed in range(SEEDS):
        device.seed(seed)
        check(PLAIN, backend)
    assert generations(launched) == {generation}
