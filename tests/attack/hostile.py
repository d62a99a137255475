"""Calls whose arguments change while or after they are used, or do not fit. Results are not looked at: the process must
go on, no byte outside of an array may change, and what does not fit is an error of a known class.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import cases
import numpy as np

import flashkit

from . import integers

INTEGERS = ("kv_lengths", "q_lengths", "cu_seqlens", "page_table")
ERRORS = (TypeError, ValueError, flashkit.UnsupportedError)
NUMBERS = [0, 1, -1, 7, 200, 10**6, -(10**6), 2**31, -(2**31), 2**62, -(2**63)]


def attack(call: cases.Call, how: str, seed: int) -> list[str]:
    """What is wrong, in words, beside the damage that the guards see."""
    r = Random(seed)
    if how == "numbers":
        return integers.attack(call, r)
    if how == "signals":
        return integers.interrupted(call, r, integers.runs(call, r))
    given = integers_by_the_caller(call, r)
    if how == "writer":
        with writer(changed(call, given), r):
            for _ in range(4):
                run(call, r)
        return []
    if how == "overlap":
        call.options["out"] = overlapping(call, r)
    with suppress(*ERRORS):
        again = repeatable(call)
        disturb(call, how, given, r)
        for _ in range(2):
            with suppress(*ERRORS):
                again()
    run(call, r)
    return []


def repeatable(call: cases.Call) -> Callable[[], Any]:
    """What reads the arguments again: the gradient, or, where there is none, a planned call."""
    if call.options.get("page_table") is None:
        vjp = flashkit.attention_vjp(call.q, call.k, call.v, return_lse=True, **call.options)[1]
        return lambda: vjp(call.dout, call.dlse)
    options = {name: x for name, x in call.options.items() if name != "out"}
    planned = flashkit.plan(call.q, call.k, call.v, **options)
    return lambda: planned(call.q, call.k, call.v, out=call.options.get("out"))


def run(call: cases.Call, r: Random) -> None:
    """The call again, in one of the three ways."""
    options = dict(call.options)
    with suppress(*ERRORS):
        way = r.randrange(3)
        if way == 0:
            flashkit.attention(call.q, call.k, call.v, **options)
        elif way == 1:
            flashkit.attention_vjp(call.q, call.k, call.v, **options)[1](call.dout)
        else:
            out = options.pop("out", None)
            flashkit.plan(call.q, call.k, call.v, **options)(call.q, call.k, call.v, out=out)


def integers_by_the_caller(call: cases.Call, r: Random) -> list[Any]:
    """Give the call lengths and offsets in arrays that the caller holds; returns all arrays of integers."""
    xp = library(call.q) if r.random() < 0.7 else np
    lengths = [name for name in INTEGERS if name in call.options]
    for name in lengths:
        given = call.options[name]
        own = tuple(xp.asarray(x.copy()) for x in (given if isinstance(given, tuple) else (given,)))
        call.options[name] = own if isinstance(given, tuple) else own[0]
    if r.random() < 0.5 and len(call.plain_dout):
        call.options["q_offset"] = xp.asarray([r.randint(-5, 40) for _ in call.plain_dout], np.int64)
    arrays = []
    for name in (*lengths, "q_offset"):
        x = call.options.get(name)
        arrays += list(x) if isinstance(x, tuple) else [x] if hasattr(x, "dtype") else []
    for mod in mods_of(call):
        arrays += [x for x in mod.arrays.values() if x.dtype.kind in "iub"]
    return arrays


def library(array: Any) -> Any:
    """The module of an array's library."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def mods_of(call: cases.Call) -> list[Any]:
    return [x for n in ("score_mod", "mask_mod") if hasattr(x := call.options.get(n), "arrays")]


def changed(call: cases.Call, integers: list[Any]) -> list[Any]:
    """Every array that another thread may write: integers first."""
    floats = [x for x in call.options.values() if hasattr(x, "dtype")]
    return [x for x in (*integers, call.q, call.k, call.v, call.dout, *floats) if is_writable(x)]


def is_writable(x: Any) -> bool:
    return not isinstance(x, np.ndarray) or x.flags.writeable


def scribble(x: Any, r: Random) -> None:
    with np.errstate(all="ignore"), suppress(OverflowError, ValueError):
        if x.dtype.kind in "iu":
            x[...] = np.int64(r.choice(NUMBERS)).astype(x.dtype)
        elif x.dtype.kind == "b":
            x[...] = r.random() < 0.5
        else:
            x[...] = r.choice([np.nan, np.inf, -np.inf, 0.0, 1e30, -3.0])


@contextmanager
def writer(arrays: list[Any], r: Random) -> Iterator[None]:
    """Another thread writes to the arrays within the block."""
    end = threading.Event()

    def write() -> None:
        own = Random(r.random())
        while arrays and not end.is_set():
            scribble(own.choice(arrays), own)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def disturb(call: cases.Call, how: str, integers: list[Any], r: Random) -> None:
    """Change what the gradient reads again."""
    if how in ("contents", "integers"):
        for x in integers if how == "integers" else changed(call, integers):
            if is_writable(x):
                scribble(x, r)
    elif how == "forms":  # of the same size: the memory stays
        for x in changed(call, integers):
            if isinstance(x, np.ndarray) and x.base is None and x.size:
                with suppress(ValueError):
                    x.resize(r.choice([(x.size,), (1, x.size), (x.size, 1)]), refcheck=False)
    elif how == "exchange":
        for mod in mods_of(call):
            for name, x in list(mod.arrays.items()):
                mod.arrays[name] = other(x, r)
            for name in list(mod.params):
                mod.params[name] = r.choice([*NUMBERS, 0.5, None])


def other(x: Any, r: Random) -> Any:
    """Another array in the place of one that a modification was made with."""
    return r.choice([
        lambda: x[:0], lambda: x[..., :1], lambda: x[None], lambda: x.astype(np.int8), lambda: x.astype(np.float32),
        lambda: x + x.dtype.type(1) if x.dtype.kind != "b" else ~x, lambda: x[::-1], lambda: None,
    ])()  # fmt: skip


def overlapping(call: cases.Call, r: Random) -> Any:
    """An out that shares memory with an input, where one of its shape can."""
    width = call.v.shape[-1]
    if r.random() < 0.5 and call.q.shape[-1] >= width and is_writable(call.q):
        return call.q[..., :width]
    xp = library(call.q)
    out = xp.full((*call.q.shape[:-1], width), np.nan, call.q.dtype)
    return xp.broadcast_to(out[..., :1], out.shape) if r.random() < 0.3 else xp.flip(out, -1)
