"""Another thread sets the shape of an array at any moment of a call: one form is read, or an error says what came.

A hook that Python calls at each line of what checks arguments takes the thread's part.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit.call import plans

rng = np.random.default_rng(0)
PLACES = tuple(flashkit.__file__.removesuffix("__init__.py") + part for part in ("api", "latent", "call/", "rope/"))
MOMENTS = 10
"""Of those of a call, that are tried for each array and each form; others in turn."""
BATCH, HEADS, N_Q, N_K, D = 2, 4, 6, 32, 16
Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Any]


def made(**shapes: tuple[int, ...]) -> Arrays:
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


OF_ATTENTION = {"q": (BATCH, HEADS, N_Q, D), "k": (BATCH, 2, N_K, D), "v": (BATCH, 2, N_K, D)}
OF_DECODING = {"q": (BATCH, HEADS, 1, D), "k": (BATCH, 2, N_K, D), "v": (BATCH, 2, N_K, D)}
SLOPES = np.ones(HEADS, np.float32)


def attention(**options: Any) -> Call:
    return lambda x: flashkit.attention(x["q"], x["k"], x["v"], backend="cpu", **options)


def with_out(x: Arrays) -> Any:
    flashkit.attention(x["q"], x["k"], x["v"], backend="cpu", out=x["out"])
    return x["out"].ravel().copy()


def gradients(x: Arrays) -> Any:
    _, vjp = flashkit.attention_vjp(x["q"], x["k"], x["v"], backend="cpu")
    return np.concatenate([each.ravel() for each in vjp(x["dout"])])


def planned(x: Arrays) -> Any:
    return PLANNED(x["q"], x["k"], x["v"])


PLANNED = flashkit.plan(*made(**OF_ATTENTION).values(), backend="cpu")

CALLS: dict[str, tuple[dict[str, tuple[int, ...]], Call]] = {
    "attention": (OF_ATTENTION, attention(causal=True)),
    "decoding": (OF_DECODING, attention()),
    "lengths": (OF_DECODING, attention(kv_lengths=np.array([3, 30]))),
    "out": (OF_ATTENTION | {"out": (BATCH, HEADS, N_Q, D)}, with_out),
    "sequences": ({"q": (9, 4, 8), "k": (9, 2, 8), "v": (9, 2, 8)}, attention(cu_seqlens=np.array([0, 4, 9]))),
    "bias": (
        OF_ATTENTION | {"bias": (BATCH, HEADS, N_Q, N_K)},
        lambda x: flashkit.attention(x["q"], x["k"], x["v"], bias=x["bias"], backend="cpu"),
    ),
    "sinks": (
        OF_ATTENTION | {"sinks": (HEADS,), "slopes": (BATCH, HEADS)},
        lambda x: flashkit.attention(x["q"], x["k"], x["v"], sinks=x["sinks"], alibi_slopes=x["slopes"], backend="cpu"),
    ),
    "gradients": (OF_ATTENTION | {"dout": (BATCH, HEADS, N_Q, D)}, gradients),
    "planned": (OF_ATTENTION, planned),
    "explain": (OF_ATTENTION, lambda x: np.array(flashkit.explain(x["q"], x["k"], x["v"]).flops["forward"])),
    "weights": (OF_ATTENTION, lambda x: flashkit.weights(x["q"], x["k"])),
    "merge": (
        {"a": (2, 4, 6, 8), "la": (2, 4, 6), "b": (2, 4, 6, 8), "lb": (2, 4, 6)},
        lambda x: flashkit.merge((x["a"], x["la"]), (x["b"], x["lb"]))[0],
    ),
    "rotary": ({"x": (2, 4, 6, 8)}, lambda x: flashkit.rotary(x["x"])),
    "rotary by tables": (
        {"x": (2, 4, 6, 8), "cos": (12, 4), "sin": (12, 4)},
        lambda x: flashkit.rotary(x["x"], x["cos"], x["sin"]),
    ),
    "mla": (
        {"q": (2, 4, 3, 8), "r": (2, 4, 3, 4), "c": (2, 9, 8), "e": (2, 9, 4)},
        lambda x: flashkit.mla(x["q"], x["r"], x["c"], x["e"], scale=0.3),
    ),
    "quantize": ({"x": (2, 4, 6, 8)}, lambda x: flashkit.quantize(x["x"], per="token").dequantize()),
    "quantised": (
        OF_DECODING,
        lambda x: flashkit.attention(x["q"], *(flashkit.quantize(x[n], "int8", "token") for n in "kv"), backend="cpu"),
    ),
}


def others(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Forms of as many elements: two axes exchanged, one halved, all in one."""
    found = [(*shape[:-2], shape[-1], shape[-2])] if len(shape) > 1 else []
    found += [(shape[0] * 2, *shape[1:-2], shape[-2] // 2, shape[-1])] if len(shape) > 2 and shape[-2] % 2 == 0 else []
    found += [(*shape[:1], shape[2], shape[1], *shape[3:])] if len(shape) > 3 else []
    return [*found, (int(np.prod(shape)),)]


@contextmanager
def at_moment(number: int, act: Callable[[], None]) -> Iterator[list[int]]:
    """`act` is called at this moment of what the package does in the block. Yields how many there were."""
    count = [0]

    def hook(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        count[0] += 1
        if count[0] == number:
            act()
        return hook

    before = sys.gettrace()
    sys.settrace(hook)
    try:
        yield count
    finally:
        sys.settrace(before)


def reshape(array: np.ndarray, shape: tuple[int, ...]) -> None:
    with warnings.catch_warnings(action="ignore"):
        array.shape = shape


@pytest.mark.filterwarnings("ignore:q has")
@pytest.mark.parametrize("cached", [False, True], ids=["new", "cached"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.one_in(4)
def test_a_form_that_another_thread_sets(name: str, cached: bool) -> None:
    shapes, call = CALLS[name]
    given, turns = made(**shapes), itertools.count()
    for array in given:
        for shape in others(shapes[array]):
            check(call, given, array, shape, cached, next(turns))


def check(call: Call, given: Arrays, array: str, shape: tuple[int, ...], cached: bool, turn: int) -> None:
    """Change one array to another shape at moments of the call."""

    def computed() -> Any:
        try:
            return np.array(call(given))
        except (TypeError, ValueError, flashkit.UnsupportedError):
            return None

    def run(number: int) -> tuple[Any, int]:
        plans.clear()
        if cached:
            call(given)
        with at_moment(number, lambda: reshape(given[array], shape)) as count:
            found = computed()
        reshape(given[array], own)
        return found, count[0]

    own = given[array].shape
    right = computed()
    reshape(given[array], shape)
    other = computed()
    reshape(given[array], own)
    _, moments = run(0)
    assert moments > 5
    step = -(-moments // MOMENTS)
    for number in range(1 + turn % step, moments + 1, step):
        found, _ = run(number)
        if found is not None:
            fits = [x.ravel() for x in (right, other) if x is not None and x.size == found.size]
            assert any(np.allclose(x, found.ravel(), atol=1e-5) for x in fits), (array, shape, number)
