"""From a problem to a backend and its plan: ask every backend, rank those that support it, plan once, cache the plan.

Backends are found by the entry points of the group `flashkit.backends`. A backend can be forced for a call
(`backend=`), for a block (`with flashkit.use_backend(name)`) or for a process (FLASHKIT_BACKEND). If the forced backend
does not support the problem, that is an error; there is no fallback.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import settings
from .backends.base import Backend, refused
from .devices import forking
from .errors import UnsupportedError, shown
from .spec import Direction, Problem, Verdict

ENTRY_POINTS = "flashkit.backends"
_MAX_PLANS = 512
"""A plan keeps its kernels loaded, those of a modification up to 0.2 MB."""

_generation = 0  # counts calls of forget()
_forced: ContextVar[str | None] = ContextVar("flashkit_backend", default=None)
_plans: OrderedDict[Any, tuple[Backend, Any]] = OrderedDict()
_plans_lock = forking.inner_lock()


@cache
def registry() -> dict[str, Backend]:
    """Every installed backend by name, except those whose import fails; `flashkit doctor` reports why."""
    return {name: loaded for name, loaded in load_all().items() if not isinstance(loaded, Exception)}


@cache
def load_all() -> dict[str, Backend | Exception]:
    """Every entry point with its backend, or with the exception that importing it raised."""
    loaded: dict[str, Backend | Exception] = {}
    with forking.imports:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS):
            try:
                loaded[point.name] = point.load()()
            except Exception as error:  # another package may fail in any way, which must not disable other backends
                loaded[point.name] = error
    return loaded


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Within the `with` block, attention runs on this backend, in this thread or asyncio task.

    `backend=` of a call takes precedence over it, and it takes precedence over FLASHKIT_BACKEND.

    Parameters
    ----------
    name
        Name of an installed backend: "cpu", "cupy_raw", "numba_cuda", "reference", or of another package. None: the
        fastest, as without the block.

    Returns
    -------
    context manager

    Raises
    ------
    ValueError
        No installed backend has this name.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8))
    >>> with flashkit.use_backend("reference"):
    ...     right = flashkit.attention(q, k, v)
    >>> np.allclose(flashkit.attention(q, k, v), right)
    True
    """
    if name is not None:
        _known(name, "use_backend")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def _known(name: str, source: str) -> str:
    if not isinstance(name, str) or name not in registry():
        raise ValueError(f"{source}: expected one of {', '.join(sorted(registry()))}, got {shown(name)}")
    return name


def state() -> tuple[Any, ...]:
    """What a plan depends on besides the arguments of the call; equal states give equal plans."""
    return _generation, _forced.get(), settings.BACKEND.raw(), settings.DETERMINISTIC.raw()


def forced(backend: str | None = None) -> str | None:
    """The backend that the call, the `with` block or the process forces; None if none does."""
    if backend is not None:
        return _known(backend, "backend")
    if (block := _forced.get()) is not None:
        return block
    process = settings.BACKEND.read()
    return _known(process, settings.BACKEND.name) if process else None


@dataclass(frozen=True)
class Candidate:
    """The answer of a backend to a problem, and the time of the call by the profile."""

    name: str
    verdict: Verdict
    seconds: float = float("inf")
    last_resort: bool = False  # ranks behind all others that support the problem


def candidates(problem: Problem, direction: Direction = "forward", only: str | None = None) -> list[Candidate]:
    """The answer of every backend: the fastest first, then those of last resort, then those without support."""
    answers = [_ask(backend, problem, direction) for name, backend in registry().items() if only in (None, name)]
    return sorted(answers, key=lambda c: (not c.verdict.ok, c.last_resort, c.seconds, c.name))


def _ask(backend: Backend, problem: Problem, direction: Direction) -> Candidate:
    if problem.array_kind not in backend.array_kinds:
        return Candidate(
            backend.name, Verdict(False, f"takes {' and '.join(backend.array_kinds)} arrays, not {problem.array_kind}")
        )
    if reason := refused(backend, problem.spec):
        return Candidate(backend.name, Verdict(False, reason))
    try:
        verdict = backend.available() and backend.supports(problem)
    except Exception as error:  # a failing backend must not disable the others
        verdict = Verdict(False, f"it failed when asked: {error!r}")
    if not verdict:
        return Candidate(backend.name, verdict)
    profile = _profile(backend)
    if hasattr(backend, "rate"):
        rate = backend.rate(problem, profile, direction)
    else:
        rate = profile.rate(f"{backend.name}.{direction}", **problem.facts)
    last_resort = rate is None and getattr(backend, "last_resort", False)
    if rate is None:
        # Without a measurement: the share of the device's peak that the backend usually reaches, and without a known
        # peak, that of a common core.
        rate = backend.efficiency * (profile.peak(problem.spec.dtype) or 0.1) * 1e12
    return Candidate(backend.name, Verdict(True), problem.flops(direction) / rate, last_resort)


def _profile(backend: Backend) -> Any:
    with forking.imports:
        from .devices import profiles
    return profiles.for_device(backend.device_kind)


def _device(kind: str) -> int | None:
    """The number of the current CUDA device, which a plan for arrays of CuPy is for; None without one."""
    if kind == "cupy":
        with suppress(Exception):  # a missing driver or device raises different exceptions; backends say so
            return int(sys.modules["cupy"].cuda.runtime.getDevice())
    return None


def plan(problem: Problem, backend: str | None = None) -> tuple[Backend, Any]:
    """The backend for the problem and its plan, cached by spec and by size to the next power of two."""
    only = forced(backend)
    key = (
        problem.spec, problem.array_kind, problem.batch.bit_length(), problem.heads, problem.n_q.bit_length(),
        problem.n_k.bit_length(), _device(problem.array_kind), only,
    )  # fmt: skip
    with _plans_lock:
        known = _plans.get(key)
        if known is not None:
            _plans.move_to_end(key)
            return known
    ranked = candidates(problem, only=only)
    if not ranked or not ranked[0].verdict.ok:
        answers = "; ".join(f"{c.name}: {c.verdict.reason}" for c in ranked) or "none is installed"
        raise UnsupportedError(f"no backend can compute attention of {problem.describe()}. {answers}")
    chosen = registry()[ranked[0].name]
    planned = chosen, chosen.plan(problem, _profile(chosen))
    with _plans_lock:
        _plans[key] = planned
        while len(_plans) > _MAX_PLANS:
            _plans.popitem(last=False)
    return planned


def forget() -> None:
    """Drop all plans, so that the next call reads a changed profile."""
    global _generation
    with _plans_lock:
        _generation += 1
        _plans.clear()
