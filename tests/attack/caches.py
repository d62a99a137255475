"""Traces of caches: appends, forks, trims and paths that are kept, against lists of tokens. Between them are calls that
are refused, calls that an exception stops anywhere, queries older than the last append, and integers of any size in the
place of each.
"""

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import cases
import numpy as np

import flashkit
from flashkit.call.arguments import prepare

from . import hostile

LEEWAY = 8.0
"""Results in units of the tolerance of one call: the error is measured on few rows."""

REFUSALS = (*hostile.ERRORS, flashkit.OutOfPagesError)

WIDE = [2**63 - 1, 2**63, 2**64 - 5, -(2**64)]
"""Integers beside those of `hostile`: the greatest of 64 bits, and wider ones."""

PACKAGE = str(Path(flashkit.__file__).parent)

MAX_EVENTS = 300
"""Of a call, after any of which it may be stopped."""


class Found(NamedTuple):
    """What a function gave: results of attention, to be held against the definition, and what is wrong already."""

    results: list[tuple[str, np.ndarray]]
    wrong: list[str]


class Stop(BaseException):
    """What a signal handler raises."""


def stopped(call: Callable[[], Any], at: int) -> bool:
    """Whether the call was stopped after so many events of Python's profiler, where signal handlers run too."""
    events = itertools.count()

    def profile(frame: Any, _: str, __: Any) -> None:
        if frame.f_code.co_filename.startswith(PACKAGE) and next(events) == at:
            raise Stop

    sys.setprofile(profile)
    try:
        call()
    except Stop:
        return True
    finally:
        sys.setprofile(None)
    return False


class Trace:
    """A cache, and the same sequences as arrays of tokens."""

    def __init__(self, call: cases.Call, r: Random) -> None:
        plain, page = call.plain, int(call.choice["page"])
        self.r, self.draw, self.wrong = r, np.random.default_rng(r.randrange(10**6)), list[str]()
        self.dtype, (self.heads, d), (heads_kv, dv) = plain["q"].dtype, plain["q"].shape[1::2], plain["v"].shape[1::2]
        self.shapes, self.sequences = ((heads_kv, d), (heads_kv, dv)), r.randint(1, 4)
        self.left, self.rollback = r.choice([None, None, r.randint(0, 20)]), r.choice([0, 0, r.randint(1, 9)])
        self.reach, self.was_stopped = (self.left or 0) + self.rollback, False
        self.kv_format = r.choice([None, None, "e4m3", "int8"]) if self.dtype == np.float32 else None
        self.cache = flashkit.KVCache(
            self.sequences, heads_kv, d, dv, pages=r.choice([-(-200 // page), -(-60 // page)]), page=page,
            dtype=self.kv_format or self.dtype, like=np.empty(0, self.dtype), rollback=self.rollback,
            window=None if self.left is None else (self.left, 0), cascade=r.choice([None, True]),
        )  # fmt: skip
        for pool in self.cache._steps.memory:
            pool.view(np.uint8)[...] = 255  # NaN
        self.table = flashkit.rotary_table(400, d // 2 * 2) if d > 1 and r.random() < 0.5 else None
        self.tokens = [[np.empty((0, *shape), self.dtype) for shape in self.shapes] for _ in range(self.sequences)]
        self.settled = [0] * self.sequences  # lengths before the last append
        self.held = [0] * self.sequences  # the first token that a window has to leave

    def lengths(self) -> list[int]:
        return [len(k) for k, _ in self.tokens]

    def change(self, call: Callable[[], Any], done: Callable[[], Any], what: str) -> bool:
        """A call that changes the cache and, if it is not refused, the lists; sometimes it is stopped and repeated."""
        before = self.lengths()
        if self.r.random() < 0.3:
            try:
                was_stopped = stopped(call, self.r.randrange(MAX_EVENTS))
            except REFUSALS:
                was_stopped = True
            self.was_stopped |= was_stopped  # an append that takes pages behind the window does not give them back
            if was_stopped and self.cache.lengths.tolist() == before:
                with suppress(*REFUSALS):
                    self.attend_old()  # the cache is what it was
            elif was_stopped and what == "keep":
                return self.stopped_in_keep(done)
            else:
                done()
                return True
        try:
            call()
        except REFUSALS as error:
            known = isinstance(error, flashkit.OutOfPagesError) or "window has dropped" in str(error)
            self.wrong += [] if known or what == "any" else [f"{what}: {error}"]
            return False
        done()
        return True

    def stopped_in_keep(self, done: Callable[[], Any]) -> bool:
        """The tokens that do not move are left, or all."""
        found, before = self.cache.lengths.tolist(), [list(x) for x in self.tokens]
        done()
        if found != self.lengths():
            for i, n in enumerate(found):
                self.tokens[i] = [x[:n] for x in before[i]]
        return True

    def turned(self, x: Any, first: int) -> Any:
        """Rotated by the positions from `first` on, if the trace rotates."""
        where = np.arange(first, first + len(x))
        return x if self.table is None else flashkit.rotary(x, *self.table, positions=where, layout="bnhd")

    def append(self) -> None:
        r, counts = self.r, self.draw.integers(0, 30, self.sequences)
        if r.random() < 0.4:
            counts = np.ones(self.sequences, np.int64)
        offsets, before = np.concatenate([[0], np.cumsum(counts)]), self.lengths()
        k, v, q = (
            self.draw.standard_normal((offsets[-1], *shape)).astype(self.dtype)
            for shape in (*self.shapes, (self.heads, self.shapes[0][1]))
        )
        kinds = [f"strides {r.randrange(1000)}" for _ in "kvq"]
        given = [cases.stored(np, x, kind, -2, -3) for x, kind in zip((k, v, q), kinds)]
        spans = [slice(a, b) for a, b in pairwise(offsets)]

        def done() -> None:
            self.settled = before
            self.held = [max(h, n - self.reach if c else 0) for h, n, c in zip(self.held, before, counts)]
            for tokens, span in zip(self.tokens, spans):
                tokens[:] = [np.concatenate([tokens[0], self.turned(k[span], len(tokens[0]))]),
                             np.concatenate([tokens[1], v[span]])]  # fmt: skip

        rotary = self.table
        if not self.change(lambda: self.cache.append(*given[:2], cu_seqlens=offsets, rotary=rotary), done, "append"):
            return
        out, lse = self.cache.attend(given[2], causal=True, return_lse=True, rotary=rotary)
        for i, span in enumerate(spans):
            self.compare(i, self.turned(q[span], before[i]), out[span], lse[:, span], before[i])

    def compare(self, i: int, q: Any, out: Any, lse: Any, first: int) -> None:
        """Queries (N, Hq, D) of sequence i from position `first` on, against the definition."""
        held = self.tokens[i]
        if self.kv_format is not None:
            codes = [flashkit.quantize(x, self.kv_format, "token", layout="bnhd") for x in held]
            held = [x.dequantize(self.dtype.name) for x in codes]
        one = {name: x.swapaxes(0, 1)[None] for name, x in zip("qkv", (q, *held))}
        one |= {"causal": True, "q_offset": first} | ({} if self.left is None else {"window": (self.left, 0)})
        self.wrong += off_definition(one, out.swapaxes(0, 1)[None], lse[None])

    def attend_old(self) -> None:
        """Queries at the end of sequences, more of them than the last append had."""
        n, lengths = self.r.randint(1, 12), self.lengths()
        q = self.draw.standard_normal((self.sequences, self.heads, n, self.shapes[0][1])).astype(self.dtype)
        options: dict[str, Any] = {}
        if self.r.random() < 0.3:
            options["q_offset"] = np.array(lengths) - n
        try:
            out, lse = self.cache.attend(q, causal=True, return_lse=True, **options)
        except ValueError as error:
            first = [max(0, m - n - (self.left or 0)) for m in lengths]
            fits = all(a >= b for a, b in zip(first, self.held)) and not self.was_stopped
            self.wrong += [f"old queries: {error}"] if fits or "window has dropped" not in str(error) else []
            return
        for i in range(self.sequences):
            if lengths[i] and out[i].size:
                self.compare(i, q[i].swapaxes(0, 1), out[i].swapaxes(0, 1), lse[i], lengths[i] - n)

    def fork(self) -> None:
        i = self.r.randrange(self.sequences)
        if all(self.lengths()):
            return
        into = self.lengths().index(0)

        def done() -> None:
            self.tokens[into], self.settled[into] = list(self.tokens[i]), self.settled[i]
            self.held[into] = self.held[i]

        self.change(lambda: self.cache.fork(i), done, "fork")

    def trim(self, i: Any = None, n: Any = None, what: str = "trim") -> None:
        i = self.r.randrange(self.sequences) if i is None else i
        n = self.r.randint(0, min(9, self.lengths()[i])) if n is None else n

        def done() -> None:
            length = len(self.tokens[i][0])
            if not 0 <= n <= length:
                self.wrong.append(f"trim takes {n} of {length} tokens")
            self.tokens[i] = [x[: length - int(n)] for x in self.tokens[i]]
            self.settled[i] = min(self.settled[i], length - int(n))
            self.held[i] = self.held[i] if self.settled[i] else 0

        self.change(lambda: self.cache.trim(i, n), done, what)

    def free(self) -> None:
        i = self.r.randrange(self.sequences)
        done: Callable[[], Any] = lambda: self.tokens.__setitem__(i, [x[:0] for x in self.tokens[i]])
        if self.change(lambda: self.cache.free(i), done, "free"):
            self.settled[i] = self.held[i] = 0

    def keep(self, positions: Any = None, n: Any = None, what: str = "keep") -> None:
        i = self.r.randrange(self.sequences)
        length, begin = self.lengths()[i], min(self.settled[i], self.lengths()[i])
        if positions is None:
            n = self.r.choice([None, self.r.randint(0, min(9, length))])
            first = begin if n is None else length - n
            positions = [p for p in range(first, length) if self.r.random() < 0.6]
            n = length - first if len(positions) == length - first else n  # so that the call may be repeated

        def done() -> None:
            first = begin if n is None else length - int(n)
            kept = [int(p) for p in positions]
            if kept != sorted(set(kept)) or not all(first <= p < length for p in kept):
                self.wrong.append(f"keep takes {positions} of the positions from {first} to {length - 1}")
                return
            self.tokens[i] = [np.concatenate([x[:first], x[kept]]) for x in self.tokens[i]]
            self.settled[i] = len(self.tokens[i][0])
            self.held[i] = max(self.held[i], self.settled[i] - self.reach) if self.settled[i] else 0

        self.change(lambda: self.cache.keep(i, positions, n), done, what)

    def any_integers(self) -> None:
        """Integers, and what is none, in the place of each; what they do not fit is refused."""
        r = self.r
        some = lambda: r.choice([*hostile.NUMBERS, *WIDE, np.uint64(2**64 - 5), np.int8(-1), 1.0, True, None, "1", [1]])
        i, x = r.randrange(self.sequences), np.ones((2, *self.shapes[0]), self.dtype)
        q = np.ones((self.sequences, self.heads, 2, self.shapes[0][1]), self.dtype)
        v = np.ones((2, *self.shapes[1]), self.dtype)
        which = r.randrange(8)
        if which == 0:
            self.trim(i, r.choice([some(), -1, 10**4]), "any")
        elif which == 1:
            self.keep([some() for _ in range(r.randint(1, 3))], r.choice([None, some()]), "any")
        else:
            offsets = [0, *(some() for _ in range(self.sequences - 1)), r.choice([some(), 2])]
            outside = r.choice([-1, self.sequences, 10**9, 2**63, -(2**64), np.uint64(2**64 - 1), None, 0.0, "0"])
            calls: list[Callable[[], Any]] = [
                lambda: self.cache.fork(outside), lambda: self.cache.free(outside),
                lambda: self.cache.trim(outside, 0), lambda: self.cache.keep(outside, []),
                lambda: self.cache.append(x, v, cu_seqlens=[1, *offsets[1:]]),
                lambda: self.cache.attend(q, q_offset=some(), causal=True),
                lambda: self.cache.attend(q[:, :, 0], cu_seqlens=offsets, causal=True),
                lambda: flashkit.KVCache(some(), 1, 8, pages=r.choice([some(), 1]), page=r.choice([0, 65537, 2**63])),
            ]  # fmt: skip
            with suppress(*REFUSALS):
                r.choice(calls)()
            for array in (self.cache.lengths, self.cache.page_table):
                array[...] = 10**9  # copies


def trace(call: cases.Call, r: Random) -> Found:
    """A trace, with attention after each append."""
    made = Trace(call, r)
    steps = [made.append, made.append, made.append, made.fork, made.trim, made.keep, made.free, made.attend_old]
    for _ in range(r.randint(3, 12)):
        r.choice([*steps, made.any_integers])()
        if made.cache.lengths.tolist() != made.lengths():
            made.wrong.append(f"lengths are {made.cache.lengths.tolist()}, not {made.lengths()}")
        if made.wrong:
            break
    return Found([], made.wrong)


def off_definition(options: dict[str, Any], out: np.ndarray, lse: np.ndarray, of: str = "a cache") -> list[str]:
    """Whether a call's results differ from the definition."""
    problem, operands, _ = prepare(**options)
    ratios = cases.ratios(cases.Results(out, lse, *[None] * 4), *cases.by_definition(problem.spec, operands))
    return [f"{name} of {of} is {x:.3g} times the tolerance off" for name, x in ratios.items() if not x <= LEEWAY]
