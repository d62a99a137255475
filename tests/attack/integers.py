"""Random integers in every argument that takes some: extremes, sums that wrap, other dtypes and orders of bytes.

A rule in Python's integers says what fits. What fits has the bits of the same call with int64; anything else is an
error of a known class.
"""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import cases
import numpy as np

import flashkit
from flashkit import BlockMask, mods

ERRORS = (TypeError, ValueError, flashkit.UnsupportedError)
EXTREMES = [
    -(2**63), -(2**63) + 1, -(2**63) + 9, -(2**62), -(2**48) - 1, -(2**48), -(2**32), -(2**31), -2, -1, 0, 1, 2**31 - 1,
    2**31, 2**32 - 1, 2**32, 2**48, 2**48 + 1, 2**62, 2**63 - 10, 2**63 - 1, 2**63, 2**63 + 9, 2**64 - 5, 2**64 - 1,
    2**64, 2**70, -(2**70), 10**30,
]  # fmt: skip
DTYPES = [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]
Rule = Callable[[list[int]], bool]


class Argument(NamedTuple):
    """Where integers go, some that fit, whether others do, and the call with them, whose result has bits."""

    name: str
    good: Any
    fits: Rule
    call: Callable[[Any], Any]


def attack(call: cases.Call, r: Random) -> list[str]:
    """What is wrong, in words."""
    wrong = []
    for _ in range(3):
        known = of_call(call) + of_others(call, r)
        wrong += integers(r.choice(known), r) if known else []
    return wrong


def integers(argument: Argument, r: Random) -> list[str]:
    plain = np.asarray(argument.good)
    numbers = [int(x) for x in plain.ravel()]
    for _ in range(r.choice([0, 1, 1, 1, 2, 3])):
        if numbers:
            at = r.randrange(len(numbers))
            numbers[at] = r.choice([*EXTREMES, *EXTREMES, numbers[at] + r.choice([-1, 1, 2**32, 2**64, -(2**64)])])
    if len(numbers) > 2 and r.random() < 0.3:  # a difference of neighbours that wraps
        at = r.randrange(len(numbers) - 1)
        numbers[at : at + 2] = 2**63 - 1 - r.randrange(9), -(2**63) + r.randrange(9)
    given, whole = stored(numbers, plain.shape, r)
    found, wanted, held = outcome(argument.call, given), "an error", held_by_int64(given)
    if held and whole and (np.shape(given) != plain.shape or argument.fits(numbers)):
        wanted = outcome(argument.call, np.array(given, np.int64))
    if found == wanted or (isinstance(found, str) and isinstance(wanted, str)):
        return []
    said = ["an error" if isinstance(x, str) else f"a result of {len(x)} bytes" for x in (found, wanted)]
    return [f"{argument.name} = {given!r:.300}: {said[0]}, not {said[1]} ({found if isinstance(found, str) else ''})"]


def held_by_int64(given: Any) -> bool:
    return all(isinstance(x, int) and -(2**63) <= x < 2**63 for x in np.array(given, object).ravel().tolist())


def stored(numbers: list[int], shape: tuple[int, ...], r: Random) -> tuple[Any, bool]:
    """The numbers in some form, and whether they are integers there."""
    kind = r.random()
    if kind < 0.15:
        return nested(numbers, shape), True
    if kind < 0.25:
        dtype = r.choice(["f8", "f4", "O", "U8", "?", "c16", "M8[s]"])
        return np.zeros(shape, dtype), False
    held = [d for d in DTYPES if all(np.iinfo(d).min <= x <= np.iinfo(d).max for x in numbers)]
    if not held:
        return nested(numbers, shape), True
    array = np.array(numbers, r.choice(held)).reshape(shape)
    kind = r.random()
    if kind < 0.2:
        array = np.repeat(array, 2, -1)[..., ::2] if array.ndim else array
    elif kind < 0.4:
        array = np.ascontiguousarray(array[..., ::-1])[..., ::-1] if array.ndim else array
    elif kind < 0.5:
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(shape)
        memory[...] = array
        array = memory
    elif kind < 0.6:
        return r.choice([array[None], array[..., None], array.reshape(-1)[:-1]]), True
    return array, True


def nested(numbers: list[int], shape: tuple[int, ...]) -> Any:
    """Lists of Python's integers."""
    made: Any = np.array(numbers, object).reshape(shape).tolist()
    return made


def outcome(call: Callable[[Any], Any], given: Any) -> bytes | str:
    """The bits of a result, or the error."""
    try:
        found = call(given)
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"
    parts = found if isinstance(found, tuple) else (found,)
    return b"".join(cases.to_numpy(x).tobytes() for x in parts)


# --- arguments of attention -------------------------------------------------------------------------------------------


def of_call(call: cases.Call) -> list[Argument]:
    """Those that the call has, and offsets."""
    options = {name: x for name, x in call.options.items() if name != "out"}
    if "dropout_p" in options:
        options.setdefault("seed", 3)
    layout = options.get("layout", "bhnd")
    packed, paged = "cu_seqlens" in options, "page_table" in options
    tokens = -3 if packed or (layout == "bnhd" and call.q.ndim > 2) else -2
    n_q, n_k = call.q.shape[tokens], call.k.shape[1] * np.shape(options["page_table"])[1] if paged else (
        call.k.shape[tokens])  # fmt: skip
    counts: dict[str, int] = {"kv_lengths": n_k, "q_lengths": n_q}
    found = []

    def runs(name: str, place: int | None = None) -> Callable[[Any], Any]:
        def run(value: Any) -> Any:
            given = value
            if place is not None:
                given = tuple(value if i == place else x for i, x in enumerate(options[name]))
            return flashkit.attention(call.q, call.k, call.v, return_lse=True, **(options | {name: given}))

        return run

    for name, most in counts.items():
        if name in options:
            rule: Rule = lambda x, most=most: all(0 <= n <= most for n in x)  # type: ignore[misc]
            found.append(Argument(name, options[name], rule, runs(name)))
    if packed:
        given = options["cu_seqlens"]
        for place, one in enumerate(given) if isinstance(given, tuple) else [(None, given)]:
            most = len(call.k) if place == 1 else len(call.q) if paged else min(len(call.q), len(call.k))
            most = len(call.q) if place == 0 else most
            rule = lambda x, most=most: x[0] == 0 and x[-1] <= most and x == sorted(x)  # type: ignore[misc]
            found.append(Argument("cu_seqlens", one, rule, runs("cu_seqlens", place)))
    elif "q_offset" not in options and call.options.get("block_mask") is None:
        entries = int(np.prod(call.q.shape[:-3])) if call.q.ndim > 2 else 1
        far: Rule = lambda x: all(abs(n) <= 2**48 for n in x)
        if call.choice.get("score_mod", "no") == "no" == call.choice.get("mask_mod", "no"):
            found.append(Argument("q_offset", [3] * entries, far, runs("q_offset")))
    if paged:
        table, lengths = np.asarray(options["page_table"]), np.asarray(options["kv_lengths"])
        seen = np.broadcast_to(np.arange(table.shape[1]) * call.k.shape[1] < lengths.reshape(-1, 1), table.shape)
        pages: Rule = lambda x: all(0 <= n < len(call.k) for n, read in zip(x, seen.ravel(), strict=True) if read)
        found.append(Argument("page_table", table, pages, runs("page_table")))
    return found


# --- arguments of other functions -------------------------------------------------------------------------------------


def of_others(call: cases.Call, r: Random) -> list[Argument]:
    x, layout = call.q, call.options.get("layout", "bhnd")
    if not isinstance(x, np.ndarray):
        return []
    tokens = -3 if layout == "bnhd" and x.ndim > 2 else -2
    n, rows = x.shape[tokens], x.shape[tokens] + r.randint(0, 3)
    found = []
    if n and x.shape[-1] > 1 and "cu_seqlens" not in call.options:
        tables = flashkit.rotary_table(rows, x.shape[-1] // 2 * 2)
        turned = r.choice([flashkit.rotary, flashkit.rotary_vjp])
        found += [
            Argument(
                "positions in tables", list(range(n)), lambda p: all(0 <= i < rows for i in p),
                lambda p: turned(x, *tables, positions=p, layout=layout),
            ),
            Argument(
                "positions", list(range(n)), lambda p: all(0 <= i < 2**48 for i in p),
                lambda p: turned(x, positions=p, layout=layout, dims=x.shape[-1] // 2 * 2),
            ),
        ]  # fmt: skip
    q = np.ones((2, 3, 7, 4), np.float32)
    found += [
        Argument(
            "rows", [1, 4, -2], lambda i: all(-7 <= n < 7 for n in i), lambda i: flashkit.weights(q, q, rows=i)
        ),
        Argument(
            "heads", [1, 2], lambda i: all(-3 <= n < 3 for n in i), lambda i: flashkit.weights(q, q, heads=i)
        ),
        Argument(
            "q_offset of a block mask", [1, 3], lambda i: all(abs(n) <= 2**48 for n in i),
            lambda i: BlockMask.from_mod(mods.causal(), 70, 90, 16, 16, i, batch=2).to_dense(),
        ),
    ]  # fmt: skip
    return found


# --- signals ----------------------------------------------------------------------------------------------------------


def interrupted(call: cases.Call, r: Random, run: Callable[[], Any]) -> list[str]:
    """Calls during which handlers raise, once or several times. The next call gives the same bits as before."""
    import signal
    import sys
    import threading

    from flashkit.backends.cpu import threads
    from flashkit.call import plans

    from . import memory

    if not isinstance(call.q, np.ndarray) or threading.current_thread() is not threading.main_thread():
        return []

    class Raised(Exception):
        pass

    state = {"armed": False, "left": 0}

    def handler(number: int, frame: Any) -> None:
        if not state["armed"]:
            return
        while frame is not None:  # the guards' own code must not be broken off
            if frame.f_code.co_filename == memory.__file__:
                signal.setitimer(signal.ITIMER_REAL, 2e-4)
                return
            frame = frame.f_back
        state["left"] -= 1
        if state["left"] > 0:
            signal.setitimer(signal.ITIMER_REAL, r.choice([1e-6, 1e-4, 1e-3, 1e-2]))
        raise Raised

    def disturbed() -> None:
        state["left"] = r.choice([1, 2, 2, 2, 3, 4])
        with mock.patch.object(threads, "LONG_FLOPS", 0):
            if r.random() < 0.7:
                plans.clear()
            try:
                state["armed"] = True
                signal.setitimer(signal.ITIMER_REAL, r.choice([1e-6, 2e-5, 1e-4, 5e-4, 2e-3, 1e-2]) * r.random() + 1e-6)
                run()
            except ERRORS:
                pass
            finally:
                state["armed"] = False

    before = outcome(lambda _: run(), None)
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    old = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(6):
            try:
                disturbed()
            except Raised:
                state["armed"] = False
    finally:
        state["armed"] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        sys.unraisablehook = hook
    after = outcome(lambda _: run(), None)
    return [] if before == after else ["a call has other bits after calls that handlers broke off"]


def runs(call: cases.Call, r: Random) -> Callable[[], Any]:
    """The call, or its gradient, with results in new memory."""
    options = {name: x for name, x in call.options.items() if name != "out"}
    if "dropout_p" in options:
        options.setdefault("seed", 3)
    if "page_table" in options or r.random() < 0.3:
        return lambda: flashkit.attention(call.q, call.k, call.v, return_lse=True, **options)

    def both() -> Any:
        out, vjp = flashkit.attention_vjp(call.q, call.k, call.v, **options)
        return (out, *vjp(call.dout))

    return both
