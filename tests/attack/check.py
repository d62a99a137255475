"""One call: made, run, repeated, and compared with the definition. Returns what is wrong with it, in words."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from random import Random
from typing import Any, Protocol
from unittest import mock

import cases
import numpy as np

import flashkit
from flashkit import reference
from flashkit.call.arguments import prepare
from flashkit.spec import AttentionSpec

from . import draw, entries, hostile

DRAWS = (1, 24, 200)
"""Calls that the error of plain computation is measured on, where the ones before do not suffice."""

HOPELESS = 100.0
"""An error in units of the tolerance that no luck explains."""

LARGE_LSE = 8.0
"""A log-sum-exp from which its rounding, of half a unit, is several roundings of a weight."""

LEEWAY = {"float64": 4.0}
"""By dtype, 1 for others: the tolerance of float64 is scaled from float32, whose functions have other errors and whose
products are summed in another order.
"""


class Memory(Protocol):
    """Guards around the arrays of one library."""

    xp: Any

    def guarded(self, seed: int) -> AbstractContextManager[Any]:
        """Within the block, arrays of this library are guarded."""

    def read_only(self, but: Any) -> AbstractContextManager[Any]:
        """Within the block, existing arrays but one must not be written."""

    def seen_damage(self) -> list[str]:
        """What was written out of bounds since the last call of this."""


class Gaps:
    """Bytes between the elements of an array; they must stay as they are."""

    def __init__(self, array: Any) -> None:
        base = self.array = array
        while isinstance(getattr(base, "base", None), type(array)):
            base = base.base
        self.memory = base.reshape(-1)
        self.before = self.memory.copy()

    def changed(self) -> bool:
        """Whether memory has changed that belongs to no element."""
        elements = self.array.copy()
        self.array[...] = 0
        after = cases.to_numpy(self.memory).tobytes()
        self.memory[...] = self.before
        self.array[...] = 0
        before = cases.to_numpy(self.memory).tobytes()
        self.array[...] = elements
        return after != before


def problems(choice: draw.Choice, backend: str, memory: Memory) -> list[str]:
    """What is wrong with a call. UnsupportedError where the backend refuses it."""
    build, own = draw.split(choice)
    with environment("FLASHKIT_NUM_THREADS", own["threads"]), flashkit.use_backend(backend):
        found = []
        with memory.guarded(int(own["seed"])):
            call = cases.build(build, memory.xp, int(own["seed"]))
            call.options["deterministic"] = own["deterministic"] == "yes"
            if own["hostile"] != "no":
                found = hostile.attack(call, own["hostile"], int(own["seed"]))
                return found + memory.seen_damage()
            if own["entry"] != "attention":
                with memory.read_only(None):
                    named, found = entries.ENTRIES[own["entry"]](call, Random(own["seed"]))
                return found + memory.seen_damage() + (wrong(call, backend, dict(named)) if named else [])
            gaps = Gaps(call.options["out"]) if choice.get("out", "new") not in ("new", "poisoned") else None
            with memory.read_only(call.options.get("out")):
                got = results(call, own["passes"])
                exact_bits = same_bits(backend, choice, set(dict(got)))
                for name, x in repeated(call, own["again"], own["passes"]):
                    if name in exact_bits and dict(got)[name].tobytes() != x.tobytes():
                        found.append(f"{name} has other bits when the call is repeated ({own['again']})")
        if gaps is not None and gaps.changed():
            found.append("the gaps of out were written")
        del gaps
        found += memory.seen_damage()
        if not found:
            found += wrong(call, backend, dict(got))
    return found


def same_bits(backend: str, choice: draw.Choice, names: set[str]) -> set[str]:
    """The results that have the same bits when the call is repeated. On a GPU gradients need not have them, and where
    out has other strides than the plan's, a planned call copies its result while other calls choose a kernel that
    writes to such strides.
    """
    if backend in draw.ON_CPU:
        return names
    if choice["again"] == "plan" and choice["out"] not in ("new", "poisoned"):
        return set()
    return names if choice["deterministic"] == "yes" else names & {"out", "lse"}


Named = list[tuple[str, np.ndarray]]
"""Results by name, in plain form, as copies."""


def results(call: cases.Call, passes: str) -> Named:
    """Output and log-sum-exp, and, of both passes, the gradients."""
    if "page_table" in call.options:
        return rows(call, *flashkit.attention(call.q, call.k, call.v, return_lse=True, **call.options))
    wrt = ("q", "k", "v") + (("sinks",) if "sinks" in call.options else ())
    (out, lse), vjp = flashkit.attention_vjp(call.q, call.k, call.v, return_lse=True, **call.options)
    found = rows(call, out, lse)
    if passes == "both":
        for name, gradient in zip(wrt, vjp(call.dout, call.dlse, wrt=wrt)):
            like = call.options["sinks"] if name == "sinks" else getattr(call, name)
            assert (gradient.shape, gradient.dtype) == (like.shape, like.dtype)
            of = "q" if name == "q" else "k"
            plain = cases.to_numpy(gradient) if name == "sinks" else call.to_plain(gradient, of)
            found.append((f"d{name}", plain.copy()))
    return found


def rows(call: cases.Call, out: Any, lse: Any) -> Named:
    return [("out", call.to_plain(out).copy()), ("lse", call.rows_to_plain(lse).copy())]


def repeated(call: cases.Call, how: str, passes: str) -> Named:
    """Results of the same call, in another way."""
    if how == "vjp":
        return results(call, passes)
    options = dict(call.options)
    if how == "plan":
        out = options.pop("out", None)
        planned = flashkit.plan(call.q, call.k, call.v, return_lse=True, **options)
        made: Callable[[], Any] = lambda: planned(call.q, call.k, call.v, out=out)
    else:
        made = lambda: flashkit.attention(call.q, call.k, call.v, return_lse=True, **options)
    return rows(call, *made()) + rows(call, *made())  # the first call makes a plan, the next one finds it


def wrong(call: cases.Call, backend: str, named: dict[str, np.ndarray]) -> list[str]:
    """The results against the definition, within the tolerance of the conformance tests: an error that is measured, and
    a rounding unit.

    Measuring takes many times as long as the call. So the unit alone is tried first, then the error of the call itself,
    and last that of more and more calls that differ in their random numbers: the greatest error of a few rows is luck,
    and where calls are many, some have no luck.
    """
    problem, operands, _ = prepare(**call.plain)
    given = problem.spec, operands, call.plain_dout, call.plain_dlse
    exact = cases.computed(*given, np.float64)
    got = cases.Results(**{name: named.get(name, getattr(exact, name)) for name in cases.NAMES})
    if call.choice["data"] == "nonfinite":
        least = exact
        if multiplies_zero_weights(problem.spec, backend):
            with (
                mock.patch.object(reference.definition, "weighted_sum", reference.matmul),
                mock.patch.object(reference.steps, "weighted_sum", reference.matmul),
            ):
                least = cases.computed(*given, np.float64)
        with mock.patch.object(reference.definition, "softmax", softmax_without_small):
            return misplaced(got, least, cases.computed(*given, np.float64))
    sums = cases.magnitudes(*given)
    allowed = cases.Yardstick(call.choice["dtype"]).tolerance(sums)
    for draws in DRAWS:
        ratios = in_units(call, got, exact, with_large_lse(call, exact, allowed, sums))
        if all(ratio <= 1 for ratio in ratios.values()):
            return []
        if any(ratio > HOPELESS for ratio in ratios.values()) and draws > DRAWS[1]:
            break
        exact, allowed = cases.expected(call, draws)
    ratios = in_units(call, got, exact, with_large_lse(call, exact, allowed, sums))
    found = {name: ratio for name, ratio in ratios.items() if not ratio <= 1}
    return [
        f"{ratio:.3g} times the tolerance: {cases.describe(name, getattr(got, name), getattr(exact, name))}"
        for name, ratio in found.items()
    ]


def with_large_lse(
    call: cases.Call, exact: cases.Results, allowed: cases.Results, sums: cases.Results
) -> cases.Results:
    """The backward pass recomputes P from the log-sum-exp, whose rounding is a relative error of P. Where scores are
    large that is more than the error of the plain computation, which keeps P (numerics.md).
    """
    lse = np.abs(exact.lse[np.isfinite(exact.lse)]).max(initial=0)
    if lse < LARGE_LSE:
        return allowed
    share = cases.epsilon("float64" if call.choice["dtype"] == "float64" else "float32") * lse
    more = {n: getattr(allowed, n) + share * cases.extent(getattr(sums, n)) for n in ("dq", "dk", "dv")}
    return replace(allowed, **more)


def in_units(call: cases.Call, got: cases.Results, exact: cases.Results, allowed: cases.Results) -> dict[str, float]:
    """Errors in units of what is allowed."""
    leeway = LEEWAY.get(call.choice["dtype"], 1.0)
    return {name: ratio / leeway for name, ratio in cases.ratios(got, exact, allowed).items()}


def misplaced(got: cases.Results, least: cases.Results, most: cases.Results) -> list[str]:
    """Whether out or the log-sum-exp is finite where the definition's is not, or the reverse. Small weights count as 0
    or not, as numerics.md says, so a NaN that they alone see may be in a result or not: what is finite in `least` has
    to be finite, and what is not finite in `most` must not be.
    """
    found = []
    for name in ("out", "lse"):
        x, may, must = (np.isfinite(getattr(each, name).astype(np.float64)) for each in (got, most, least))
        if (x & ~may).any() or (~x & must).any():
            found.append(f"{name} is finite elsewhere than by the definition")
    return found


def multiplies_zero_weights(spec: AttentionSpec, backend: str) -> bool:
    """Whether kernels may multiply a weight of 0 by its value, as GPUs do where nothing is hidden (numerics.md)."""
    return backend not in draw.ON_CPU and spec.mask is None and spec.score is None and not spec.dropout


def softmax_without_small(s: np.ndarray, sink: Any) -> tuple[np.ndarray, np.ndarray]:
    """reference.softmax, where weights that float32 may take for 0 are 0."""
    p, lse = _softmax(s, sink)
    return np.where(p < SMALL, 0, p), lse


_softmax = reference.softmax
SMALL = 1e-30


def environment(name: str, value: str) -> AbstractContextManager[Any]:
    """A variable set within the block."""
    return mock.patch.dict(os.environ, {name: value})
