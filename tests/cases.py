"""Calls of attention() for tests: what may vary, a pairwise design over it, how a call is built, and how near is near
enough.

A choice names one level of every factor in `FACTORS`. `build(choice)` makes the arrays and keyword arguments of the
call, twice: as the caller of attention() would hold them (layout, strides, array library) and in the one plain form
from which `expected` computes the definition. So a mistake in reading layouts or strides cannot hide in both.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import forms
import ml_dtypes  # noqa: F401  # gives NumPy its bfloat16
import numpy as np

import flashkit
from flashkit import dispatch, mods, reference, settings
from flashkit.call.arguments import prepare
from flashkit.devices import kernel_cache, trust
from flashkit.mods import expr
from flashkit.spec import AttentionSpec, Operands, Problem

Choice = Mapping[str, str]

FACTORS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "float64", "float16", "bfloat16"),
    "layout": ("bhnd", "bnhd", "three axes", "two axes", "five axes", "five axes, bnhd"),
    "batch": ("2", "1", "3"),
    "heads": ("2:2", "4:2", "4:1", "1:1", "3:3"),
    "sizes": ("33x33", "1x70", "77x50", "16x128", "130x200", "5x257", "97x1", "64x64"),
    "dims": ("8", "1", "40", "64", "80", "96", "128", "192/128", "7/13"),
    "storage": ("packed", "swapped", "gaps", "reversed", "shared heads", "misaligned", "last axis apart"),
    "out": ("new", "poisoned", "poisoned, with gaps"),
    "scale": ("default", "0.3"),
    "causal": ("no", "yes"),
    "q_offset": ("default", "0", "array"),
    "window": ("no", "both", "left", "right"),
    "softcap": ("no", "yes"),
    "alibi": ("no", "(Hq,)", "(B, Hq)"),
    "bias": ("no", "full", "(Nq, Nk)", "(Hq, 1, Nk)", "(B, 1, Nq, 1)", "()", "with -inf"),
    "mask": ("no", "full", "(Nk,)", "(B, 1, 1, Nk)", "(Hq, Nq, 1)", "float", "float with -inf"),
    "block_mask": ("no", "from_mod", "from_dense", "bigbird", "longformer", "strided"),
    "score_mod": ("no", "plain", "array by head", "array by distance"),
    "mask_mod": ("no", "plain", "array", "document"),
    "kv_lengths": ("no", "yes"),
    "sequences": ("batch", "padded", "packed", "paged"),
    "dropout": ("no", "yes"),
    "sinks": ("no", "yes"),
    "dlse": ("no", "yes"),
}
"""What may vary in a call; the first level of each is the plain one."""

MORE: dict[str, str] = {"arrays": "packed", "data": "normal", "behind": "numbers", "page": str(forms.PAGE)}
"""What calls of tests/attack/ vary besides: the memory of arrays of modifications (as `stored` has it), what q, k, v
and dout hold ("normal", "large", "nonfinite"), what lies behind lengths ("numbers", "nan"), and keys of a page. These
calls also have levels that the pairwise design leaves out: other sizes, "three axes, bnhd" and "two axes, bnhd",
storage of q/k/v/dout by itself, q_offset as a number, any kv_lengths, and keys in pages beside q_lengths or packed
queries ("padded, paged" and "packed, paged").
"""

PLAIN: dict[str, str] = {factor: levels[0] for factor, levels in FACTORS.items()} | MORE


def with_(**changes: str) -> dict[str, str]:
    """The plain choice with some factors changed."""
    for factor, level in changes.items():
        assert factor == "dims" or factor == "sizes" or level in FACTORS[factor], (factor, level)
    return {**PLAIN, **changes}


# --- pairwise design --------------------------------------------------------------------------------------------------


@cache
def possible(one: tuple[str, str], two: tuple[str, str]) -> bool:
    """Whether a call can have both levels: arrays of few axes have one batch entry, or one head."""
    pair = dict((one, two))
    layout = pair.get("layout")
    if layout in ("two axes", "three axes") and pair.get("batch", "1") != "1":
        return False
    if layout == "two axes" and (
        pair.get("heads", "1:1") != "1:1" or pair.get("storage") in ("swapped", "shared heads")
    ):
        return False
    form = pair.get("sequences", "batch")
    if form in ("packed", "paged") and {"bias", "mask"} & {factor for factor, level in (one, two) if level != "no"}:
        return False
    if form == "packed" and (pair.get("layout", "bhnd") != "bhnd" or pair.get("kv_lengths") == "yes"):
        return False
    if form == "paged" and (pair.get("layout", "bhnd") not in ("bhnd", "bnhd") or pair.get("storage", "") in NO_POOL):
        return False
    return not (pair.get("heads") == "1:1" and pair.get("storage") == "shared heads")


NO_POOL = ("shared heads", "last axis apart", "misaligned")
"""Storage that pools of pages cannot have: their last axis is contiguous, and they are not copied."""

Pair = frozenset[tuple[str, str]]


def pairs(factors: Mapping[str, tuple[str, ...]]) -> set[Pair]:
    """All pairs of levels of two factors that one call can have."""
    found = set()
    for a, b in itertools.combinations(factors, 2):
        for one, two in itertools.product(((a, x) for x in factors[a]), ((b, x) for x in factors[b])):
            if possible(one, two):
                found.add(frozenset((one, two)))
    return found


def pairwise(factors: Mapping[str, tuple[str, ...]], seed: int = 0, tries: int = 6) -> list[dict[str, str]]:
    """Few choices that together hold every possible pair of levels (greedy: each choice takes in as many new pairs as
    it finds).

    Where nothing is to be gained, a factor takes its first level: features that are off leave the others more to see.
    """
    return [dict(row) for row in _pairwise(tuple(factors.items()), seed, tries)]


@cache  # two files of tests have the same
def _pairwise(items: tuple[tuple[str, tuple[str, ...]], ...], seed: int, tries: int) -> list[dict[str, str]]:
    factors, rng, rows = dict(items), random.Random(seed), []
    levels = sorted((factor, level) for factor in factors for level in factors[factor])
    at = {level: i for i, level in enumerate(levels)}
    # Of each level, as the bits of an integer: with which others it can be, and has not been yet.
    fits = [sum(1 << j for j, other in enumerate(levels) if possible(level, other)) for level in levels]
    left = [0] * len(levels)
    for i, j in (sorted(at[level] for level in pair) for pair in pairs(factors)):
        left[i], left[j] = left[i] | 1 << j, left[j] | 1 << i
    while any(left):
        best: dict[str, str] = {}
        most = 0
        open_pairs = [(i, j) for i, new in enumerate(left) for j in range(i + 1, len(levels)) if new >> j & 1]
        for _ in range(tries):
            first = rng.choice(open_pairs)
            row, taken, gain = dict(levels[i] for i in first), sum(1 << i for i in first), 1
            for factor in rng.sample(list(factors), len(factors)):
                if factor not in row:
                    able = (at[factor, level] for level in factors[factor] if not taken & ~fits[at[factor, level]])
                    chosen = max(able, key=lambda i: (left[i] & taken).bit_count())
                    gain += (left[chosen] & taken).bit_count()
                    row[factor], taken = levels[chosen][1], taken | 1 << chosen
            if gain > most:
                best, most = row, gain
        held = sum(1 << at[level] for level in best.items())
        for i in map(at.__getitem__, best.items()):
            left[i] &= ~held
        rows.append({factor: best[factor] for factor in factors})
    return rows


def name(choice: Choice) -> str:
    """What is special about a choice, as a test's name."""
    return ", ".join([choice["dtype"], *(f"{f} {x}" for f, x in choice.items() if f != "dtype" and x != PLAIN[f])])


# --- backends and their arrays ----------------------------------------------------------------------------------------


def array_library(backend: str) -> Any:
    """NumPy, or CuPy for a backend that takes CuPy arrays alone."""
    if "numpy" in dispatch.registry()[backend].array_kinds:
        return np
    import cupy

    return cupy


def backends() -> list[Any]:
    """Every registered backend as a parameter of a test, those without NumPy arrays marked `gpu`."""
    import pytest

    return [
        pytest.param(n, marks=[] if "numpy" in b.array_kinds else pytest.mark.gpu)
        for n, b in sorted(dispatch.registry().items())
    ]


def skip_unless(backend: str, call: Call | None = None, problem: Problem | None = None) -> None:
    """Skip the test, with the backend's reason, where it is not available or does not support the call."""
    import pytest

    found = dispatch.registry()[backend]
    verdict = found.available()
    if call is not None:
        problem = prepare(q=call.q, k=call.k, v=call.v, **call.options)[0]
    if verdict and problem is not None:
        verdict = found.supports(dataclasses.replace(problem, array_kind=found.array_kinds[0]))
    if not verdict:
        pytest.skip(f"{backend}: {verdict.reason}")


def arbitrary_dq_order(monkeypatch: Any) -> None:
    """Make Hopper's backward kernels accumulate dQ in arbitrary order for short sequences, too."""
    from flashkit.backends.cupy_raw import sm90_backward

    monkeypatch.setattr(sm90_backward, "ORDERED_MAX_TOKENS", 0)
    monkeypatch.setattr(sm90_backward, "ORDERED_MAX_TOKENS_NARROW", 0)
    monkeypatch.setattr(sm90_backward, "ORDERED_MAX_KEYS", 0)
    dispatch.forget()


def fused_preprocess(monkeypatch: Any, sms: int = 0) -> None:
    """Make Hopper's backward kernels preprocess all but the first head; sms: as if the device had so many."""
    from flashkit.backends.cuda_common import sm90_bwd_launch

    begin = sm90_bwd_launch.Backward.__init__

    def begin_small(self: Any, generation: Any, problem: Any, choice: Any, tables: Any, *others: Any) -> None:
        device = dataclasses.replace(tables.device, sms=sms or tables.device.sms)
        begin(self, generation, problem, choice, dataclasses.replace(tables, device=device), *others)

    monkeypatch.setattr(sm90_bwd_launch.Backward, "__init__", begin_small)
    monkeypatch.setattr(sm90_bwd_launch.Backward, "kv_heads_in_flight", lambda *_: 1)
    monkeypatch.setattr(sm90_bwd_launch, "has_long_work_tiles", lambda *_, **named: True)
    monkeypatch.setattr(sm90_bwd_launch, "_LEAD", 0)
    dispatch.forget()


@cache
def compiled(backend: str, dtype: str) -> None:
    """Have a backend's kernels for a dtype compiled once, not by each worker of a parallel run at the same time.

    A worker that finds another one compiling that dtype compiles some other one meanwhile.
    """
    if backend != "cpu":
        return
    from filelock import FileLock, Timeout

    def compile_(other: str, timeout: float) -> None:
        folder = trust.directory(kernel_cache.path(), make=True)
        with FileLock(folder / f"tests-{other}.lock", timeout=timeout):
            x = np.ones((1, 1, 1, 1), np.dtype(other))
            out, vjp = flashkit.attention_vjp(x, x, x, backend=backend)
            vjp(out)

    for other in (dtype, *(d for d in FACTORS["dtype"] if d != dtype)):
        try:
            compile_(other, 0)
        except Timeout:
            continue
        if other == dtype:
            return
    compile_(dtype, 120)


def to_numpy(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _pairs(found: Any, expected: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of arrays anywhere, or of lists and tuples of some."""
    both = ([*map(to_numpy, x)] if isinstance(x, (list, tuple)) else [to_numpy(x)] for x in (found, expected))
    return list(zip(*both, strict=True))


def same(found: Any, expected: Any) -> None:
    for x, y in _pairs(found, expected):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_array_equal(x, y)


def near(found: Any, expected: Any, rtol: float = 1e-7, atol: float = 0.0) -> None:
    for x, y in _pairs(found, expected):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), rtol, atol)


def within_a_unit(found: Any, expected: Any, dtype: str = "") -> None:
    """The root mean square of errors is at most half a rounding unit of that of the numbers, and the greatest error two
    units of the greatest number; 32 times as much in float32 and float64, to which the terms of sums are rounded, too.
    dtype: of the computation; that of what is found by default.
    """
    for x, y in _pairs(found, expected):
        of, x, y = dtype or x.dtype.name, x.astype(np.float64), y.astype(np.float64)
        assert x.shape == y.shape
        with np.errstate(invalid="ignore"):  # infinities may be equal
            error = np.where(x == y, 0, x - y)
        error, size = (extent(each[None, None]) for each in (error, np.where(np.isfinite(y), y, 0)))
        single = 32 * min(epsilon(of), epsilon("float32"))
        allowed = np.array([2, 0.5]) * max(epsilon(of), single) * size + single
        assert (error <= allowed).all(), f"greatest and mean error {error}, allowed {allowed}"


# --- building a call --------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One call of attention() and the same call in plain form.

    q, k, v, options, dout, dlse: what the caller passes. plain: the arguments of `prepare` with arrays of four axes,
    packed. plain_dout, plain_dlse: as (B, H, N, D) and (B, H, N). to_plain, rows_to_plain: results as NumPy arrays in
    plain form; the former also gets "q" or "k", whose rows they have.
    """

    choice: Choice
    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    dout: Any
    dlse: Any
    plain: dict[str, Any]
    plain_dout: np.ndarray
    plain_dlse: np.ndarray | None
    to_plain: Callable[..., np.ndarray]
    rows_to_plain: Callable[[Any], np.ndarray]
    seed: int


def build(choice: Choice, xp: Any = np, seed: int = 0) -> Call:
    """The call that a choice describes; the same for the same choice and seed."""
    rng = np.random.default_rng(np.asarray([seed, *name(choice).encode()], np.uint32))  # a list takes 1 ms
    choice = PLAIN | dict(choice)
    layout, dtype = choice["layout"].partition(",")[0], np.dtype(choice["dtype"])
    five, two, bnhd = layout == "five axes", layout == "two axes", choice["layout"].endswith("bnhd")
    tokens_outside = bnhd and not two
    batch_axes = () if layout in ("three axes", "two axes") else (2,) * five + (int(choice["batch"]),)
    batch = int(np.prod(batch_axes))
    heads, heads_kv = map(int, choice["heads"].split(":"))
    n_q, n_k = map(int, choice["sizes"].split("x"))
    d, dv = map(int, (choice["dims"] + "/" + choice["dims"]).split("/")[:2])

    form, drawn = choice["sequences"], np.random.default_rng([seed, n_q, n_k, batch])
    packed = forms.Packed.of(drawn, batch, n_q, n_k) if "packed" in form else None

    def to_user(x: np.ndarray) -> np.ndarray:
        """(B, H, N, D) in the caller's axes."""
        x = x[0, 0] if two else x.reshape((*batch_axes, *x.shape[1:]))
        return x.swapaxes(-3, -2) if tokens_outside else x

    def to_plain(x: Any, of: str = "q") -> np.ndarray:
        x = to_numpy(x)
        if packed is not None:
            return packed.square(of, x)
        if tokens_outside:
            x = x.swapaxes(-3, -2)
        return x[None, None] if two else x.reshape((batch, *x.shape[-3:]))

    def rows_to_user(x: np.ndarray) -> np.ndarray:
        return x[0, 0] if two else x.reshape((*batch_axes, *x.shape[1:]))

    def rows_to_plain(x: Any) -> np.ndarray:
        if packed is not None:
            unseen = plain["sinks"][:, None] if "sinks" in plain else -np.inf
            return packed.square("q", to_numpy(x).swapaxes(0, 1), unseen)
        return to_numpy(x).reshape((batch, heads, -1))

    storage = (choice["storage"].split("/") * 4)[:4]
    axes = (-2, -3) if tokens_outside else (-3, -2)

    def tensor(h: int, n: int, width: int, how: str) -> tuple[np.ndarray, Any]:
        """A random tensor: plain, and as the caller stores it."""
        x = of_kind(choice["data"], rng.standard_normal((batch, h, n, width)), rng).astype(dtype)
        if how == "shared heads":
            x[:] = x[:, :1]
        user = stored(xp, to_user(x), how, *axes)
        return np.ascontiguousarray(to_plain(user)) if how.startswith("aliased") else x, user

    shapes = (heads, n_q, d), (heads_kv, n_k, d), (heads_kv, n_k, dv), (heads, n_q, dv)
    tensors = [tensor(*shape, how) for shape, how in zip(shapes, storage)]
    (q, user_q), (k, user_k), (v, user_v), (dout, user_dout) = tensors
    dlse = user_dlse = None
    if choice["dlse"] == "yes":
        dlse = rng.standard_normal((batch, heads, n_q)).astype(np.float64 if dtype == np.float64 else np.float32)
        if packed is not None:  # rows that do not exist have no gradient, which a sink would get
            dlse *= np.arange(n_q) < packed.counts["q"][:, None, None]
        user_dlse = xp.asarray(rows_to_user(dlse))

    def pairwise_to_user(x: np.ndarray) -> Any:
        """A bias or mask: its axes before the last three become the caller's batch axes."""
        if x.ndim == 4:
            if layout in ("three axes", "two axes"):
                x = x[0]
            elif five:
                x = x.reshape((*(batch_axes if len(x) > 1 else (1, 1)), *x.shape[1:]))
        return xp.asarray(x)

    plain = features(choice, rng, batch, heads, n_q, n_k)
    options = {}
    plain_form, room, tail = {}, n_k, np.nan if choice["behind"] == "nan" else 0
    of_rows = 0 if "sinks" in plain else tail  # a sink's gradient is a sum over all rows of dout * out, where 0 * nan
    if packed is not None:
        user_q, user_dout = (
            stored(xp, packed.flat("q", x, fill), how, -2, -3)
            for x, fill, how in ((q, tail, storage[0]), (dout, of_rows, storage[3]))
        )
        user_dlse = None if dlse is None else xp.asarray(packed.flat("q", dlse, 0).swapaxes(0, 1).copy())
        plain_form = {"q_lengths": packed.counts["q"], "kv_lengths": packed.counts["k"]}
    elif "padded" in form:
        plain_form = {"q_lengths": forms.lengths_of(drawn, batch, n_q)}
        plain_form["kv_lengths"] = plain.get("kv_lengths", forms.lengths_of(drawn, batch, n_k))
        options |= plain_form
    if "paged" in form:
        lengths = plain.get("kv_lengths", plain_form.get("kv_lengths", forms.lengths_of(drawn, batch, n_k)))
        if form == "paged":
            plain_form = {"q_offset": plain.get("q_offset", lengths - n_q)}
        plain_form["kv_lengths"] = lengths
        given, pool = forms.paged(drawn, lengths, n_k, int(choice["page"]))
        room = given["page_table"].shape[1] * int(choice["page"])
        user_k, user_v = (stored(xp, pool(x), how, -2, -3) for x, how in ((k, storage[1]), (v, storage[2])))
        options |= given | ({} if packed is None else {"cu_seqlens": packed.begins["q"]})
    elif packed is not None:
        user_k, user_v = (
            stored(xp, packed.flat("k", x, np.nan), how, -2, -3) for x, how in ((k, storage[1]), (v, storage[2]))
        )
        options["cu_seqlens"] = tuple(packed.begins.values())
    for key, x in plain.items():
        if key in ("bias", "mask", "alibi_slopes", "sinks"):
            x = stored(xp, x, choice["arrays"]) if x.ndim else xp.asarray(x)
            plain[key] = to_numpy(x).copy()
            options[key] = pairwise_to_user(with_room(xp, x, n_k, room)) if key in ("bias", "mask") else x
        elif isinstance(x, mods.Mod) and choice["arrays"] != "packed":
            arrays = {n: stored(xp, a, choice["arrays"]) for n, a in x.arrays.items()}
            options[key] = mods.Mod(x.kind, x.expr, x.params, arrays)
            plain[key] = mods.Mod(x.kind, x.expr, x.params, {n: to_numpy(a).copy() for n, a in arrays.items()})
        else:
            options[key] = x
    if choice["behind"] == "nan" and form in ("batch", "padded"):  # what lies behind a length does not exist
        fills = ("q_lengths", user_q), ("kv_lengths", user_k), ("kv_lengths", user_v), ("q_lengths", user_dout)
        for (which, user), how in zip(fills[:3] if "sinks" in plain else fills, storage):
            for b, n in enumerate((plain | plain_form).get(which, ()) if not how.startswith(("al", "shared")) else ()):
                entry = user[tuple(map(int, np.unravel_index(b, batch_axes)))] if batch_axes else user
                entry.swapaxes(0, -3 if tokens_outside else -2)[int(n) :] = np.nan
    plain |= plain_form
    if bnhd:
        options["layout"] = "bnhd"
    if choice["out"] != "new":
        empty = np.full((batch, heads, n_q, dv), np.nan, dtype)
        how = choice["out"] if choice["out"].startswith("strides") else "gaps" if "gaps" in choice["out"] else "packed"
        options["out"] = stored(xp, to_user(empty) if packed is None else packed.flat("q", empty, 0), how)
    user = (user_q, user_k, user_v, options, user_dout, user_dlse)
    return Call(choice, *user, {"q": q, "k": k, "v": v, **plain}, dout, dlse, to_plain, rows_to_plain, seed)


def with_room(xp: Any, x: Any, n_k: int, room: int) -> Any:
    """A bias or mask for the keys that a table of pages has room for, which do not exist."""
    if room == n_k or not x.ndim or x.shape[-1] != n_k or n_k == 1:
        return x
    behind = xp.full((*x.shape[:-1], room - n_k), True if x.dtype.kind == "b" else np.nan, x.dtype)
    return xp.concatenate([x, behind], axis=-1)


def of_kind(data: str, x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Numbers of a tensor: "normal" leaves them as they are, "large" and "nonfinite" make some so."""
    if data == "large":
        return x * 8
    if data == "nonfinite":
        x[rng.random(x.shape) < 1 / (x.size + 1)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def strided(xp: Any, x: np.ndarray, seed: int, kind: str) -> Any:
    """A view of memory that ends with its last element, with random strides: axes in any order, gaps, some axes
    backwards, the last one contiguous as a rule, and always where kind is "rows". "aliased": some elements share
    memory, by strides that are 0 or small.
    """
    r, aliased = random.Random(seed), kind == "aliased"
    order = list(range(x.ndim))
    last = order.pop()
    r.shuffle(order)
    order.insert(len(order) if r.random() < 0.85 or kind == "rows" else r.randint(0, len(order)), last)
    strides, extent = [0] * x.ndim, 1
    for axis in reversed(order):
        gap = r.choice([0, 0, 1, 3, r.randint(1, 40)]) if axis != last else 0
        step = extent + (gap if x.size < 1 << 20 else min(gap, 1))  # memory may be larger by as many times
        if aliased and axis != last and r.random() < 0.5:
            step = r.choice([0, 0, r.randint(1, max(1, extent))])
        strides[axis] = step
        extent += step * max(x.shape[axis] - 1, 0)
    backwards = 0 if kind == "rows" else 0.03
    signs = [-1 if r.random() < (backwards if axis == last else 0.15) else 1 for axis in range(x.ndim)]
    memory = xp.full(extent, np.nan if x.dtype.kind not in "iub" else 0, x.dtype)
    view = xp.lib.stride_tricks.as_strided(memory, x.shape, [step * x.itemsize for step in strides])
    view = view[tuple(slice(None, None, sign) for sign in signs)]
    view[...] = xp.asarray(x)
    return view


def stored(xp: Any, x: np.ndarray, how: str, head_axis: int = -3, token_axis: int = -2) -> Any:
    """The values of x in another place of memory. What lies between the elements is NaN, so reading it shows."""
    kind, _, seed = how.partition(" ")
    if kind in ("strides", "rows", "aliased") and seed.isdigit():
        return strided(xp, x, int(seed), kind)
    if how == "shared heads":
        return xp.broadcast_to(xp.asarray(x.take([0], axis=head_axis)), x.shape)
    if how == "swapped":  # heads and tokens, for instance a (B, H, N, D) view of (B, N, H, D)
        return xp.array(xp.asarray(x).swapaxes(head_axis, token_axis), order="C").swapaxes(head_axis, token_axis)
    if how == "misaligned" and xp is np:
        memory = np.empty(x.nbytes + 1, np.uint8)
        odd = 1 - memory.ctypes.data % 2
        view = memory[odd : odd + x.nbytes].view(x.dtype).reshape(x.shape)
        assert not view.flags.aligned or view.size == 0 or x.dtype.itemsize == 1
    elif how == "gaps":
        view = xp.full((*(2 * n for n in x.shape[:-1]), x.shape[-1] + 3), np.nan, x.dtype)[
            (*[slice(None, None, 2)] * (x.ndim - 1), slice(x.shape[-1]))
        ]
    elif how == "reversed":
        view = xp.flip(xp.empty(x.shape, x.dtype), token_axis)
    elif how == "last axis apart":
        view = xp.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan, x.dtype)[..., ::2]
    else:
        view = xp.empty(x.shape, x.dtype)
    view[...] = xp.asarray(x)
    return view


def features(choice: Choice, rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> dict[str, Any]:
    """Keyword arguments of `prepare` for the features of a choice. Masks hide little, so that several together leave
    something."""
    options: dict[str, Any] = {}
    if choice["scale"] != "default":
        options["scale"] = float(choice["scale"])
    if choice["causal"] == "yes":
        options["causal"] = True
    if choice["q_offset"] == "0":
        options["q_offset"] = 0
    elif choice["q_offset"] == "array":
        options["q_offset"] = n_k - n_q + rng.integers(-3, 4, batch)
    elif choice["q_offset"] != "default":
        options["q_offset"] = int(choice["q_offset"])
    reach = max(n_k * 2 // 3, 1)
    if choice["window"] != "no":
        options["window"] = {"both": (reach, reach // 2), "left": (reach, None), "right": (None, reach // 4)}[
            choice["window"]
        ]
    if choice["softcap"] == "yes":
        options["softcap"] = 2.5
    if choice["alibi"] != "no":
        options["alibi_slopes"] = rng.uniform(
            0.01, 0.2, (batch, heads) if choice["alibi"] == "(B, Hq)" else (heads,)
        ).astype(np.float32)
    full = (batch, heads, n_q, n_k)
    shapes: dict[str, tuple[int, ...]] = {
        "full": full, "with -inf": full, "(Nq, Nk)": (n_q, n_k), "(Hq, 1, Nk)": (heads, 1, n_k),
        "(B, 1, Nq, 1)": (batch, 1, n_q, 1), "(B, 1, 1, Nk)": (batch, 1, 1, n_k), "(Hq, Nq, 1)": (heads, n_q, 1),
        "(Nk,)": (n_k,), "()": (), "float": (1, 1, n_q, n_k), "float with -inf": (batch, 1, n_q, n_k),
    }  # fmt: skip
    if choice["bias"] != "no":
        options["bias"] = _floats(rng, shapes[choice["bias"]], choice["dtype"], choice["bias"] == "with -inf")
    if choice["mask"].startswith("float"):
        options["mask"] = _floats(rng, shapes[choice["mask"]], choice["dtype"], "-inf" in choice["mask"])
    elif choice["mask"] != "no":
        options["mask"] = rng.random(shapes[choice["mask"]]) < 0.85
    if choice["block_mask"] != "no":
        options["block_mask"] = block_mask(choice["block_mask"], rng, batch, heads, n_q, n_k)
    if choice["score_mod"] != "no":
        options["score_mod"] = score_mod(choice["score_mod"], rng, heads, n_k)
    if choice["mask_mod"] != "no":
        options["mask_mod"] = mask_mod(choice["mask_mod"], rng, batch, n_q, n_k)
    if choice["kv_lengths"] == "yes":
        options["kv_lengths"] = rng.integers(n_k // 2, n_k + 1, batch)
    elif choice["kv_lengths"] == "any":
        options["kv_lengths"] = rng.integers(0, n_k + 1, batch)
    if choice["kv_lengths"] != "no" and (options["kv_lengths"] < n_q).any():
        # The default, which has to be given where it is negative.
        options.setdefault("q_offset", options["kv_lengths"] - n_q)
    if choice["dropout"] == "yes":
        options |= {"dropout_p": 0.25, "seed": int(rng.integers(2**62))}
    if choice["sinks"] == "yes":
        options["sinks"] = rng.standard_normal(heads).astype(np.float64 if choice["dtype"] == "float64" else np.float32)
    return options


def _floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, with_inf: bool) -> np.ndarray:
    x = np.asarray(rng.standard_normal(shape)).astype(dtype)
    if with_inf:
        x[rng.random(shape) < 0.1] = -np.inf
    return x


def block_mask(kind: str, rng: np.random.Generator, batch: int, heads: int, n_q: int, n_k: int) -> flashkit.BlockMask:
    if kind == "from_mod":
        return flashkit.BlockMask.from_mod(mods.prefix_lm(n_k // 3) | mods.sliding_window(n_k // 2), n_q, n_k, 32, 16)
    if kind == "from_dense":
        grid = rng.random((batch, heads, -(-n_q // 16), -(-n_k // 24))) < 0.8
        return flashkit.BlockMask.from_dense(grid, 16, 24, n_q, n_k)
    if kind == "bigbird":
        return flashkit.BlockMask.bigbird(n_q, n_k, block=16)
    if kind == "longformer":
        return flashkit.BlockMask.longformer(n_q, n_k, window_tokens=n_k, global_tokens=[0, n_k // 2], block=32)
    return flashkit.BlockMask.strided(n_q, n_k, stride_blocks=3, block=16)


def score_mod(kind: str, rng: np.random.Generator, heads: int, n_k: int) -> Any:
    def plain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return flashkit.where((q + k) % 3 == 0, s * 0.5, s - 0.01 * abs(q - k))

    def by_head(s: Any, b: Any, h: Any, q: Any, k: Any, *, gains: Any) -> Any:
        return gains[h] * s + 0.3 * flashkit.sigmoid(s)

    def by_distance(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any, reach: Any) -> Any:
        return s + table[flashkit.clip(q - k, -reach, reach) + reach]

    def by_array(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any, index: Any) -> Any:
        return s + table[index[k]]

    if kind.startswith("random"):
        return random_mod("score", int(kind.split()[1]))
    if kind == "plain":
        return plain
    if kind == "array by array":
        index = rng.integers(0, 7, max(n_k, 1)).astype(rng.choice([np.int8, np.uint16, np.int32, np.int64]))
        return mods.score(by_array, table=rng.standard_normal(7).astype(np.float32), index=index)
    if kind == "array by head":
        return mods.score(by_head, gains=rng.uniform(0.5, 1.5, heads).astype(np.float32))
    return mods.score(by_distance, table=rng.standard_normal(21).astype(np.float32), reach=10)


def random_mod(kind: Any, seed: int) -> mods.Mod:
    """A graph of random_exprs.py. Its values stay small where positions are."""
    import random_exprs

    r = random.Random(seed)
    graph = (random_exprs.smooth if kind == "score" else random_exprs.boolean)(r, r.randint(1, 4)).graph
    names = {node.value for node in expr.walk([graph]) if node.op in ("param", "load")}
    params = {n: x for n, x in random_exprs.PARAMS.items() if n in names}
    return mods.Mod(kind, graph, params, {n: x for n, x in random_exprs.ARRAYS.items() if n in names})


def mask_mod(kind: str, rng: np.random.Generator, batch: int, n_q: int, n_k: int) -> Any:
    def kept(b: Any, h: Any, q: Any, k: Any, *, keep: Any) -> Any:
        return keep[b, k]

    if kind.startswith("random"):
        return random_mod("mask", int(kind.split()[1]))
    if kind == "plain":
        return lambda b, h, q, k: (7 * k + 3 * q + h) % 5 != 0
    if kind == "array":
        return mods.mask(kept, keep=rng.random((batch, n_k)) < 0.85)
    ids = rng.integers(0, 2, (batch, max(n_k, 1)))
    return mods.document(np.sort(ids, axis=1)) | mods.dilated(2)


# --- what is expected, and how near is near enough --------------------------------------------------------------------

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass
class Results:
    """What attention and its vjp gave, as NumPy arrays in plain form; dsinks is None without sinks, and all gradients
    are where the call has none."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None
    dk: np.ndarray | None
    dv: np.ndarray | None
    dsinks: np.ndarray | None

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((n, getattr(self, n)) for n in NAMES if getattr(self, n) is not None)


def run(call: Call, backend: str) -> Results:
    """The call's results from a backend."""
    compiled(backend, call.choice["dtype"])
    wrt = ("q", "k", "v") + (("sinks",) if "sinks" in call.options else ())
    paged = "page_table" in call.options  # has no gradients
    results = (flashkit.attention if paged else flashkit.attention_vjp)(
        call.q, call.k, call.v, return_lse=True, backend=backend, **call.options
    )
    (out, lse), vjp = (results, None) if paged else results
    if "out" in call.options:
        assert out is call.options["out"]
    for got, like in ((out, call.q), (lse, call.q)):
        assert type(got) is type(like)
    forward_only = Results(call.to_plain(out), call.rows_to_plain(lse), None, None, None, None)
    if vjp is None:
        return forward_only
    try:
        dq, dk, dv, *dsinks = vjp(call.dout, call.dlse, wrt=wrt)
    except flashkit.UnsupportedError:
        if not settings.CUDA_GENERATION.text():
            raise
        return forward_only  # the one generation that is allowed has no backward pass of it
    for got, like in ((out, call.q), (dq, call.q), (dk, call.k), (dv, call.v)):
        assert got.dtype == like.dtype
    for got, like in ((dq, call.q), (dk, call.k), (dv, call.v)):
        assert got.shape == like.shape
    gradients = map(call.to_plain, (dq, dk, dv), "qkk")
    return Results(call.to_plain(out), call.rows_to_plain(lse), *gradients, to_numpy(dsinks[0]) if dsinks else None)


def computed(
    spec: AttentionSpec, operands: Operands, dout: np.ndarray | None, dlse: np.ndarray | None, dtype: Any
) -> Results:
    """The plain computation, in `dtype` throughout; in float64 it is the definition. Without dout no gradients."""
    out, lse = reference.standard(spec, operands, dtype)
    if dout is None:
        return Results(out, lse, None, None, None, None)
    return Results(out, lse, *reference.standard_gradients(spec, operands, dout, dlse, dtype))


def definition(*tensors: Any, **options: Any) -> tuple[tuple[np.ndarray, np.ndarray], Callable[..., Any]]:
    """(out, lse) by the definition, which evaluates a mask at every pair, and the function that gives gradients."""
    problem, operands, _ = prepare(*tensors, **options)
    gradients = partial(reference.standard_gradients, problem.spec, operands)
    return reference.standard(problem.spec, operands), gradients


def expected(call: Call, draws: int | None = None, gradients: bool = True) -> tuple[Results, Results]:
    """The definition's results, and the tolerance for each of them (see `Yardstick`).

    The greatest error in a few dozen rows is luck: where there are few, more calls are drawn to measure it, or as many
    as draws says.
    """
    yardstick = Yardstick(call.choice["dtype"])
    rows = call.plain_dout[..., 0].size
    by_rows = next(n for most, n in ((100, 24), (500, 8), (1500, 2), (rows + 1, 1)) if rows < most)
    for draw in range(by_rows if draws is None else draws):
        drawn = build(call.choice, seed=call.seed + draw) if draw else call
        problem, operands, _ = prepare(**drawn.plain)
        of_results = (drawn.plain_dout, drawn.plain_dlse) if gradients else (None, None)
        results = yardstick.measure(problem.spec, operands, *of_results)
        if draw == 0:
            exact, sums = results, magnitudes(problem.spec, operands, drawn.plain_dout, drawn.plain_dlse)
    return exact, yardstick.tolerance(sums)


def by_definition(
    spec: AttentionSpec, operands: Operands, dout: np.ndarray | None = None, dlse: np.ndarray | None = None,
    dtype: str = "",
) -> tuple[Results, Results]:  # fmt: skip
    """As `expected`, of operands. dtype: of the plain computation, that of q by default."""
    spec = dataclasses.replace(spec, dtype=dtype or spec.dtype)
    yardstick = Yardstick(spec.dtype)
    return yardstick.measure(spec, operands, dout, dlse), yardstick.tolerance(magnitudes(spec, operands, dout, dlse))


class Yardstick:
    """How far a result may lie from the exact one, by both numbers of `extent`: twice the error of the plain
    computation in the same precision, plus one rounding unit (the distance from 1 to the next number of its dtype) of
    the magnitude that its sum has.

    "Plain" is reference.standard and standard_gradients with every intermediate result in the dtype of q and matrix
    products as three loops give them, for BLAS adds in an order of its own on each machine. The error is the greatest
    of a few calls that differ in their random numbers alone. The magnitude of a sum is what it comes to when its terms
    do not cancel (`magnitudes`): where a gradient is exactly 0, one order of adding gives 0 and another some units.
    Sums of 16-bit numbers are added in float32, so only their terms are rounded to units, each by itself: the magnitude
    is the root of the sum of the terms' squares. In the mean of many rows units cancel likewise.

    An error of another precision than the result's counts by the ratio of the rounding units. In float64 the plain
    computation is the definition itself and its error cannot be seen; it is taken from float32, on operands that
    float32 holds exactly. With 16 bits the plain log-sum-exp has 16, that of kernels is float32.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.errors = {name: np.zeros(2) for name in NAMES}

    def measure(
        self, spec: AttentionSpec, operands: Operands, dout: np.ndarray | None, dlse: np.ndarray | None
    ) -> Results:
        """Take in the plain computation's error on one call; returns the exact results."""
        exact = ideal = computed(spec, operands, dout, dlse, np.float64)
        if self.dtype == "float64":
            operands = Operands(
                **{**vars(operands), **{n: to_float32(getattr(operands, n)) for n in ("q", "k", "v", "sinks")}}
            )
            dout, dlse = to_float32(dout), to_float32(dlse)
            ideal = computed(spec, operands, dout, dlse, np.float64)
        with mock.patch.object(reference.steps, "matmul", product_in_order):
            plain = computed(
                spec, operands, dout, dlse, np.float32 if self.dtype == "float64" else np.dtype(self.dtype)
            )
        for n, x in plain:
            with np.errstate(invalid="ignore"):
                error = x.astype(np.float64) - getattr(ideal, n)
            # Equal infinities, or an overflow of the plain computation, are no error to measure by.
            self.errors[n] = np.maximum(self.errors[n], extent(np.where(np.isfinite(error), error, 0)))
        return exact

    def tolerance(self, sums: Results) -> Results:
        allowed, plain = {}, epsilon("float32" if self.dtype == "float64" else self.dtype)
        for n, x in sums:
            unit = min(epsilon(self.dtype), epsilon("float32")) if n == "lse" else epsilon(self.dtype)
            cancel = unit > epsilon("float32") and x.ndim == 4 and self.errors[n].any()
            by_rows = np.array([1, x.shape[2] ** -0.5 if cancel else 1])
            allowed[n] = 2 * unit / plain * self.errors[n] + unit * by_rows * extent(x)
        return Results(**{n: allowed.get(n) for n in NAMES})  # type: ignore[arg-type]


def extent(x: np.ndarray) -> np.ndarray:
    """The greatest size of all elements, and the root mean square of the head where that is greatest."""
    if x.size == 0:
        return np.zeros(2)
    return np.array([np.abs(x).max(), np.sqrt(np.square(x).mean(tuple(range(2, x.ndim)) or None).max())])


@reference.quiet
def magnitudes(
    spec: AttentionSpec, operands: Operands, dout: np.ndarray | None, dlse: np.ndarray | None
) -> Results:
    """Each result with the terms of its sums taken by their absolute values, scores included.

    A weight in out and dv counts 1 + t fold: one unit for itself, and t for its score, which changes it by as many
    units as the score is off. t is the size of the score and of the partial sums on the way to it, which are about
    the root of the sum of its terms' squares.

    The backward pass recomputes a weight from the modified score and the log-sum-exp, which are rounded to units of
    their own size. The plain computation shows that error where a row sees several keys. Where it sees one it subtracts
    a number from itself, so in dv the weight of a lone key counts the size of the modified score, or how far the
    modification's own roundings move that, if these are larger.

    The log-sum-exp of 16-bit arrays counts a 64th of their unit besides, for exponentials are as exact as weights of 16
    bits need (numerics.md). With tanh it counts an eighth of the scores', and a quarter for weights that are summed as
    rounded.
    """
    sums = {
        n: np.zeros(getattr(operands, m).shape)
        for n, m in zip(NAMES, ("out", "lse", "q", "k", "v", "sinks"))
        if getattr(operands, m) is not None
    }
    dout = np.zeros(sums["out"].shape) if dout is None else dout
    unit = epsilon(spec.lse_dtype) / epsilon(spec.dtype)  # of the log-sum-exp
    power = 2 if epsilon(spec.dtype) > epsilon("float32") else 1
    has_tanh = spec.score is not None and any(node.op == "tanh" for node in expr.walk([spec.score]))

    def total(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (np.abs(a) ** power @ np.abs(b) ** power) ** (1 / power)

    for head in itertools.chain.from_iterable(reference.groups(spec, operands, np.float64, dout=dout, dlse=dlse)):
        at, kv = (head.b, head.h), (head.b, head.kv_head, slice(head.n_k))
        q, k, v, do = (head.memory[n].astype(np.float64) for n in ("q", "k", "v", "dout"))
        s = reference.scores(q, k, head.scale)
        slope = (
            np.ones(s.shape)
            if spec.score is None
            else np.abs(head.evaluate(expr.derivative(spec.score), *head.everything, s))
        )
        modified = reference.modify(head, s, *head.everything)
        p, lse = reference.softmax(modified, head.sink)
        seen = p != 0
        terms = np.maximum(np.abs(q) @ np.abs(k).T * abs(head.scale), np.abs(modified))
        size = np.abs(s) + np.sqrt(q**2 @ (k**2).T) * abs(head.scale)
        folds = 1 + size * slope
        weights = reference.drop(head, np.where(seen, p * folds, 0), *head.everything)
        lone = seen.sum(axis=1, keepdims=True) == 1
        if lone.any():
            lone = np.where(lone, np.maximum(np.abs(modified) * unit, rounded(head, s)), 0)
        recomputed = reference.drop(head, np.where(seen, p * np.maximum(folds, 1 + lone), 0), *head.everything)
        sums["out"][at] = total(weights, v)
        sums["lse"][at] = np.maximum(np.abs(reference.finite(lse)), np.where(seen, terms, 0).max(axis=1, initial=0))
        if power == 2:
            largest = np.where(seen, np.abs(modified), 0).max(axis=1, initial=0)
            sums["lse"][at] += (1 / 4 + largest / 8 if has_tanh else 1 / 64) / unit
        delta = reference.row_sum(np.abs(do * sums["out"][at]) ** power) ** (1 / power)
        delta = delta + (0 if dlse is None else np.abs(head.memory["dlse"]))
        dp = reference.drop(head, total(do, v.T), *head.everything)
        ds = np.where(seen, p * (dp + delta[:, None]) * slope, 0) * abs(head.scale)
        sums["dq"][at] = total(ds, k)
        sums["dk"][kv] += total(ds.T, q)
        sums["dv"][kv] += total(recomputed.T, do)
        if spec.sinks:
            of_sink = np.where(lse > -np.inf, np.exp(head.sink - lse), 0)
            sums["dsinks"][head.h] += reference.row_sum((of_sink * delta) ** power) ** (1 / power)
    return Results(**{n: sums.get(n) for n in NAMES})  # type: ignore[arg-type]


def rounded(head: reference.Head, s: np.ndarray) -> np.ndarray:
    """Units of q's dtype by which roundings within a score modification may change its result between two passes."""
    if head.spec.score is None or head.spec.dtype == "float64":
        return np.zeros(s.shape)
    moved = np.zeros(s.shape)
    for nudge in np.linspace(-4e-6, 4e-6, 16):
        near = s + nudge * np.maximum(np.abs(s), 1)
        of = [dataclasses.replace(head, dtype=np.dtype(x)) for x in (np.float32, np.float64)]
        single, double = (each.evaluate(each.spec.score, *each.everything, near.astype(np.float32)) for each in of)
        with np.errstate(invalid="ignore"):  # infinities
            moved = np.fmax(moved, np.abs(single - double))
    return np.where(np.isfinite(moved), 2 * moved / epsilon(head.spec.dtype), 0)


def product_in_order(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """reference.matmul with the sums taken in the order of the indices."""
    total = np.zeros((len(a), b.shape[1]), np.promote_types(a.dtype, np.float32))
    _add_in_order()(*(np.ascontiguousarray(x, total.dtype) for x in (a, b)), total)
    return total.astype(a.dtype)


@cache
def _add_in_order() -> Callable[..., None]:
    """total += a @ b by three loops, as compiled code: each product and each sum is rounded."""
    from numba import njit

    @njit
    def add(a: Any, b: Any, total: Any) -> None:
        for i in range(a.shape[0]):
            for k in range(a.shape[1]):
                for j in range(b.shape[1]):
                    total[i, j] += a[i, k] * b[k, j]

    return add  # type: ignore[no-any-return]


def epsilon(dtype: str) -> float:
    if dtype == "bfloat16":
        return 2.0**-7
    return float(np.finfo(dtype).eps)


def to_float32(x: Any) -> Any:
    """x in numbers that float32 holds."""
    return None if x is None else x.astype(np.float32).astype(x.dtype)


def ratios(got: Results, exact: Results, allowed: Results) -> dict[str, float]:
    """The error of each result in units of what is allowed; infinite where a NaN or infinity is out of place."""
    found = {}
    for n, x in got:
        e, x = getattr(exact, n), x.astype(np.float64)
        assert x.shape == e.shape, (n, x.shape, e.shape)
        finite = np.isfinite(e)
        in_place = np.array_equal(x[~finite], e[~finite], equal_nan=True) and np.isfinite(x[finite]).all()
        error, limit = extent(np.subtract(x, e, out=np.zeros(e.shape), where=finite)), getattr(allowed, n)
        if not in_place or (error > 0)[limit == 0].any():
            found[n] = float("inf")
        else:
            found[n] = float(np.divide(error, limit, out=np.zeros(2), where=limit > 0).max())
    return found


def assert_conforms(got: Results, exact: Results, allowed: Results) -> None:
    found = ratios(got, exact, allowed)
    wrong = {n: r for n, r in found.items() if not r <= 1}
    assert not wrong, f"error in units of the tolerance: {wrong}; " + "; ".join(
        describe(n, getattr(got, n), getattr(exact, n)) for n in wrong
    )


def assert_rounded_once(got: Results, exact: Results) -> None:
    """Kernels add in float32 and round a term once, and the result: with random numbers of 16 bits they are nearer than
    they have to be, unless there are so few that their mean is luck.
    """
    for n, x in got:
        if x.dtype.itemsize == 2 and x.size > 256:
            within_a_unit(x, getattr(exact, n))


def describe(n: str, got: np.ndarray, exact: np.ndarray) -> str:
    got = got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = np.where((got == exact) | (np.isnan(got) & np.isnan(exact)), 0, np.abs(got - exact))
    error = np.where(np.isnan(error), np.inf, error)
    at = tuple(map(int, np.unravel_index(np.argmax(error), error.shape)))
    alike = f"{np.count_nonzero(error > error.max() / 2)} of {error.size} are about as far off"
    return f"{n}{list(at)} is {got[at]}, expected {exact[at]}; {alike}"


@cache
def visible_share(key: tuple[tuple[str, str], ...]) -> float:
    """The share of all pairs that a choice leaves visible, for a check that the design does not test empty rows
    alone."""
    problem, operands, _ = prepare(**build(dict(key)).plain)
    head_shares = []
    for head in itertools.chain.from_iterable(reference.groups(problem.spec, operands, np.float64)):
        s = reference.modify(head, np.zeros((head.n_q, head.n_k)), *head.everything)
        head_shares.append(np.count_nonzero(s > -np.inf) / max(problem.n_q * problem.n_k, 1))
    return float(np.mean(head_shares))
