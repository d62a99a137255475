"""Plans: flashkit.plan(), and the plans that attention() caches."""

import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
from cases import near, same

import flashkit
from flashkit import attention, dispatch, mods, plan
from flashkit.call import plans
from flashkit.call.call import Call

rng = np.random.default_rng(0)


def operands(
    n_q: int = 40, n_k: int = 40, *, lead: tuple[int, ...] = (2, 4), kv: int = 4, d: int = 16, dtype: str = "float32"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    *batch, heads = lead
    q, k, v = ((*batch, h, n, d) for h, n in ((heads, n_q), (kv, n_k), (kv, n_k)))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in (q, k, v))  # type: ignore[return-value]


def as_bnhd(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.swapaxes(-3, -2))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "lse": {"return_lse": True, "causal": True},
    "window": {"window": (9, 2), "scale": 0.3},
    "scores": {"softcap": 3.0, "alibi_slopes": np.array([0.5, 0.25, 0.1, 0.05], np.float32)},
    "arrays": {"bias": rng.standard_normal((4, 40, 40)).astype("float16"), "mask": rng.random((40, 40)) < 0.8},
    "lengths": {"kv_lengths": [17, 33], "return_lse": True},
    "sinks": {"sinks": np.zeros(4, np.float32)},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "functions": {"score_mod": lambda s, b, h, q, k: s - 0.01 * abs(q - k), "mask_mod": mods.prefix_lm(5)},
    "table": {
        "score_mod": mods.score(lambda s, b, h, q, k, *, t, i: s + t[i[q % 40]], t=np.ones(3), i=np.arange(40) % 3)
    },
}


def full(*args: Any, **options: Any) -> Any:
    """attention() by its full path."""
    with mock.patch.object(plans, "key_of", return_value=None):
        return attention(*args, **options)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_planned_call_is_attention(name: str, backend: str) -> None:
    """The same bits, for other arrays than those it was planned with."""
    call = plan(*operands(), backend=backend, **OPTIONS[name])
    assert call.backend == backend
    for _ in range(3):
        given = operands()
        same(call(*given), full(*given, backend=backend, **OPTIONS[name]))


def pulled_back(vjp: Any, out: np.ndarray, lse: np.ndarray, number: int) -> Any:
    """Gradients for dout in rows of other strides at each number, and for dlse at every other one."""
    memory = np.random.default_rng(number).standard_normal((*out.shape[:-1], out.shape[-1] + number)).astype(out.dtype)
    return vjp(memory[..., number:], lse * 0.1 if number % 2 else None)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_repeated_pull_backs(name: str, backend: str) -> None:
    """The bits of the full path, for other arrays than those that a plan was made with, also after another call."""
    options = {"return_lse": True, "backend": backend} | OPTIONS[name]
    options["return_lse"] = True
    for number in range(3):
        given, more = operands(), {x: y * 0.5 if x == "bias" else y for x, y in options.items()}
        options |= more
        (out, lse), vjp = flashkit.attention_vjp(*given, **options)
        flashkit.attention_vjp(*operands(), **options)
        with mock.patch.object(plans, "key_of", return_value=None):
            exact, alone = flashkit.attention_vjp(*given, **options)
        same((out, lse), exact)
        same(pulled_back(vjp, out, lse, number), pulled_back(alone, out, lse, number))
        if number:  # PyTorch gives out back in memory of its own strides
            out = np.concatenate([out] * (number + 1), -1)[..., : out.shape[-1]]
        kept = flashkit.api.vjp_of(*given, out, lse, **{x: y for x, y in options.items() if x != "return_lse"})
        same(pulled_back(kept, out, lse, number), pulled_back(alone, out, lse, number))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_pull_backs_and_a_hidden_nan(dtype: str) -> None:
    """Of the gradients that of the last head's queries alone is not finite at first, by 0 times NaN."""
    q, k, v, dout = (rng.standard_normal((1, 2, n, 8)).astype(dtype) for n in (5, 9, 9, 5))
    for poisoned in (False, True):
        if poisoned:
            k[:, 1, 7] = np.nan
        options: dict[str, Any] = {"causal": True, "q_offset": 0, "backend": "cpu"}
        (out, lse), vjp = flashkit.attention_vjp(q, k, v, return_lse=True, **options)
        _, exact = flashkit.attention_vjp(q, np.nan_to_num(k), v, **options | {"backend": "reference"})
        wide, dlse = np.concatenate([out, out], -1)[..., :8], rng.standard_normal(lse.shape).astype(dtype)
        for pull_back, given in (
            (vjp, (dout,)), (flashkit.api.vjp_of(q, k, v, wide, lse, **options), (dout, dlse)), (vjp, (dout, dlse))
        ):  # fmt: skip
            near(pull_back(*given), exact(*given), atol=1e-5)


def test_pull_backs_of_other_lengths_do_not_meet() -> None:
    """Calls of few queries share plans for all lengths; a pull-back has its own."""
    q, k, v = operands(3, 44)
    for n in (44, 35, 44):
        given = q, k[:, :, :n], v[:, :, :n]
        out, vjp = flashkit.attention_vjp(*given, causal=True)
        with mock.patch.object(plans, "key_of", return_value=None):
            exact, alone = flashkit.attention_vjp(*given, causal=True)
        same(out, exact)
        same(vjp(out), alone(out))


def test_repeated_pull_backs_prepare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(options: dict[str, Any]) -> None:
        out, vjp = flashkit.attention_vjp(q, k, v, backend="cpu", **options)
        vjp(out)
        vjp(out, wrt=("q", "k", "v", *({"bias"} & options.keys())))
        flashkit.api.vjp_of(q, k, v, out, out[..., 0] * 0, backend="cpu", **options)(out)

    q, k, v = operands()
    bias = rng.standard_normal((40, 40)).astype("float32")
    for options in ({}, {"causal": True}, {"bias": bias}):
        once(options)
    with monkeypatch.context() as patch:
        patch.setattr(plans, "prepare", None)
        for options in ({}, {"causal": True}, {"bias": bias}):
            once(options)
        with pytest.raises(TypeError, match="not callable"):
            once({"bias": bias[None]})


# --- what does not fit ------------------------------------------------------------------------------------------------


def unaligned(x: np.ndarray) -> np.ndarray:
    memory = np.empty(x.nbytes + 1, np.uint8)
    array = memory[1:].view(x.dtype).reshape(x.shape)
    array[...] = x
    return array


@pytest.mark.parametrize(
    ("name", "change", "error", "says"),
    [
        ("q", lambda x: x[:, :, :39], ValueError, "shape (2, 4, 40, 16), as planned, got (2, 4, 39, 16)"),
        ("k", lambda x: x.astype("float64"), TypeError, "dtype float32, as planned, got float64"),
        ("v", lambda x: x.swapaxes(2, 3).copy().swapaxes(2, 3), ValueError, "strides"),
        ("q", lambda x: x.tolist(), TypeError, "list"),
        ("k", unaligned, ValueError, "not aligned"),
        ("v", lambda x: np.ma.masked_array(x), TypeError, "MaskedArray"),
        ("q", lambda x: x.astype(">f4"), TypeError, ">f4"),
        ("k", lambda x: None, TypeError, "NoneType"),
    ],
)
def test_arrays_that_do_not_fit(name: str, change: Any, error: type[Exception], says: str) -> None:
    given = dict(zip("qkv", operands(), strict=True))
    call = plan(**given)
    with pytest.raises(error) as caught:
        call(**(given | {name: change(given[name])}))
    assert str(caught.value).startswith(f"{name}: ") and says in str(caught.value)


def test_arrays_that_fit_all_the_same(tmp_path: Any) -> None:
    q, k, v = operands(1, lead=(1, 4))
    call = plan(q, k, v)
    expected = full(q, k, v)
    same(call(np.lib.stride_tricks.as_strided(q, q.shape, (999, *q.strides[1:])), k, v), expected)  # axes of length 1
    mapped = np.memmap(tmp_path / "k", k.dtype, "w+", shape=k.shape)
    mapped[...] = k
    same(np.asarray(call(q, mapped, v)), expected)


def test_options_that_do_not_fit() -> None:
    q, k, v = operands()
    with pytest.raises(TypeError, match="unexpected argument"):
        plan(q, k, v, out=q)
    with pytest.raises(ValueError, match="seed: expected an integer beside dropout_p"):
        plan(q, k, v, dropout_p=0.5)
    with pytest.raises(ValueError, match="window"):
        plan(q, k, v, window=(-1, 0))
    with pytest.raises(ValueError, match=r"expected one of .* got 'none'"):
        plan(q, k, v, backend="none")


# --- out --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True], ids=["planned", "cached"])
def test_out(kept: bool) -> None:
    given = q, k, v = operands(300, 300)  # tiles enough that some rows are written before others have read all keys
    expected = full(q, k, v, causal=True)
    call: Any = (lambda *a, **o: attention(*a, causal=True, **o)) if kept else plan(q, k, v, causal=True)
    out = np.empty_like(q)
    assert call(*given, out=out) is out
    same(out, expected)
    apart = np.zeros((2, 4, 300, 32), np.float32)[..., ::2]
    assert call(*given, out=apart) is apart
    same(apart.copy(), expected)
    for shared in range(3):  # an input as the result
        copies = tuple(x.copy() for x in given)
        same(call(*copies, out=copies[shared]), expected)
    memory = np.zeros((2, 4, 450, 16), np.float32)
    memory[:, :, :300] = q
    half = memory[:, :, :300]
    same((call if kept else plan(half, k, v, causal=True))(half, k, v, out=memory[:, :, 150:]), expected)
    read_only = np.empty_like(q)
    read_only.flags.writeable = False
    for wrong, error in (
        (q[:1], ValueError), (q.astype("f8"), TypeError), (q.tolist(), TypeError), (read_only, ValueError),
    ):  # fmt: skip
        with pytest.raises(error, match="out"):
            call(*given, out=wrong)


@pytest.mark.parametrize("kept", [False, True], ids=["planned", "cached"])
@pytest.mark.parametrize(("bias_at", "out_at"), [(0, 0), (0, 150), (150, 0)])
def test_out_that_is_a_bias(bias_at: int, out_at: int, kept: bool) -> None:
    """A row of the result lies over the same row of the bias, or over one that another tile has yet to read."""
    q, k, v = operands(300, 300, lead=(1, 1), kv=1, d=300)
    memory = rng.standard_normal((1, 1, 450, 300)).astype("float32")
    bias, out = memory[:, :, bias_at : bias_at + 300], memory[:, :, out_at : out_at + 300]
    expected = full(q, k, v, bias=bias)
    if kept:
        attention(q, k, v, bias=bias)
        same(attention(q, k, v, bias=bias, out=out), expected)
    else:
        same(plan(q, k, v, bias=bias)(q, k, v, out=out), expected)


# --- what a plan keeps alive, and what it reads -----------------------------------------------------------------------


def test_nothing_of_the_callers_is_kept_alive() -> None:
    """Neither by a planned call nor by the plans that attention() caches."""
    given = operands()
    call = plan(*given, causal=True)
    result = attention(*given, causal=True, out=np.empty_like(given[0]))
    kept = [weakref.ref(x) for x in (*given, result)]
    call(*given)
    del given, result
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
    assert call(*operands()).shape == (2, 4, 40, 16)


def test_arrays_are_kept_by_reference() -> None:
    q, k, v = operands()
    bias = np.zeros((40, 40), np.float32)
    call = plan(q, k, v, bias=bias)
    same(call(q, k, v), full(q, k, v))
    reference = weakref.ref(bias)
    del bias
    gc.collect()
    assert reference() is not None
    same(call(q, k, v), full(q, k, v, bias=np.zeros((40, 40), np.float32)))


# --- plans that attention() caches ------------------------------------------------------------------------------------


def test_equal_keys_of_other_types_are_other_calls() -> None:
    """True == 1 == 1.0, but an argument's type is checked."""
    q, k, v = operands()
    attention(q, k, v, causal=True, window=(1, 2), q_offset=1, seed=1)
    for wrong in ({"causal": 1}, {"deterministic": 0}, {"window": (True, 2)}, {"window": (1.0, 2)}, {"seed": True},
                  {"q_offset": 1.0}):  # fmt: skip
        with pytest.raises(TypeError):
            attention(q, k, v, **({"causal": True, "window": (1, 2), "q_offset": 1, "seed": 1} | wrong))


KEYED: dict[str, tuple[Any, Any]] = {
    "scale": (None, 0.5), "causal": (False, True), "q_offset": (None, 3), "window": (None, (3, 1)),
    "softcap": (None, 2.0), "alibi_slopes": (None, np.ones(4, np.float32)),
    "bias": (None, np.ones((40, 40), np.float32)), "mask": (None, np.ones((40, 40), bool)),
    "block_mask": (None, flashkit.BlockMask.local(40, 40, 1, block=8)), "seed": (None, 1), "layout": ("bhnd", "bnhd"),
    "return_lse": (False, True), "deterministic": (False, True), "precision": (None, "tf32"),
    "backend": (None, "reference"), "kv_lengths": (None, [40, 40]),
}  # fmt: skip
"""Two values of each option that a key holds."""

NOT_CACHED = {"score_mod", "mask_mod", "q_lengths", "page_table", "sinks", "dropout_p"}
"""A call that has one of these has no key."""


def test_every_option_is_part_of_the_key_or_prevents_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = set(inspect.signature(attention).parameters) - {"q", "k", "v", "out"}
    elsewhere = {"cu_seqlens", "return_stats"}  # packed calls are below, and statistics have no cached plan
    assert parameters == set(KEYED) | NOT_CACHED | elsewhere
    q, k, v = operands()
    keys: list[Any] = []
    make: Any = plans.key_of
    monkeypatch.setattr(plans, "key_of", lambda *a: (keys.append(make(*a)), None)[1])
    for name, (plain, other) in KEYED.items():
        keys.clear()
        for value in (plain, other):
            attention(q, k, v, **{name: value})
        assert len(keys) == 2 and None not in keys and keys[0] != keys[1], name
    keys.clear()
    for options in (
        {"score_mod": lambda s, b, h, q, k: s}, {"mask_mod": mods.document([0] * 40, [0] * 40)}, {"q_lengths": [3, 4]},
        {"kv_lengths": [3, 4], "mask": np.ones((40, 40), bool)},
        {"sinks": np.ones(4)}, {"dropout_p": 0.5}, {"q_offset": np.array([1, 2])}, {"window": [1, 2]},
    ):  # fmt: skip
        attention(q, k, v, **options)
    assert keys == [None] * 8


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "strides": lambda x: x.repeat(2, axis=-2)[..., ::2, :], "shape": lambda x: np.concatenate([x, x], axis=-2),
    "dtype": lambda x: x.astype("float64"), "alignment": unaligned,
}  # fmt: skip


@pytest.mark.parametrize("change", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "mask"])
def test_the_layout_of_each_array_is_part_of_the_key(which: str, change: str) -> None:
    given = dict(zip("qkv", operands(), strict=True)) | {"bias": pairwise(1, 40, 40), "mask": pairwise(2, 40, 40)}

    def key(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        with Call("attention", q, k, v, {"bias": bias, "mask": mask}) as call:
            return plans.key_of(call, None, False)

    assert key(**given) == key(**{name: x.copy() for name, x in given.items()})
    assert key(**given) != key(**given | {which: LAYOUTS[change](given[which])})


def test_values_that_change_are_seen() -> None:
    """Arrays among the options are read by each call of attention()."""
    q, k, v = operands()
    for name, values in {
        "kv_lengths": np.array([40, 40]), "q_offset": np.array([0, 0]), "mask": np.ones((40, 40), bool),
        "bias": np.zeros((40, 40), np.float32), "sinks": np.zeros(4, np.float32),
        "alibi_slopes": np.zeros(4, np.float32),
    }.items():  # fmt: skip
        options = {name: values, "causal": name == "q_offset"}
        before = attention(q, k, v, **options)
        values[0] = 7 if values.dtype.kind == "i" else not values.flat[0]
        after = attention(q, k, v, **options)
        assert (before != after).any(), name
        same(after, full(q, k, v, **{name: values.copy(), "causal": name == "q_offset"}))


def spied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends whose bound calls run from now on."""
    calls = []
    for name, backend in dispatch.registry().items():
        if hasattr(backend, "bind"):

            def bind(p: Any, o: Any, name: str = name, bind: Any = backend.bind) -> Any:
                bound = bind(p, o)
                return lambda *a: (calls.append(name), bound(*a))[1]

            monkeypatch.setattr(backend, "bind", bind, raising=False)

        def forward(p: Any, o: Any, name: str = name, run: Any = backend.forward) -> None:
            calls.append(f"{name}.forward")
            run(p, o)

        if not hasattr(backend, "bind"):
            monkeypatch.setattr(backend, "forward", forward)
    dispatch.forget()
    return calls


def test_what_chooses_the_backend_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = spied(monkeypatch)
    q, k, v = operands()
    for _ in range(2):
        attention(q, k, v)
        with flashkit.use_backend("reference"):
            attention(q, k, v)
            with flashkit.use_backend(None):
                attention(q, k, v)
            attention(q, k, v)
            attention(q, k, v, backend="cpu")  # a call goes before a block
        attention(q, k, v, backend="reference")
        monkeypatch.setenv("FLASHKIT_BACKEND", "reference")
        attention(q, k, v)
        with flashkit.use_backend("cpu"):
            attention(q, k, v)  # and a block before the process
        monkeypatch.setenv("FLASHKIT_BACKEND", "")
        attention(q, k, v)
        monkeypatch.setenv("FLASHKIT_BACKEND", "absent")
        with pytest.raises(ValueError, match="FLASHKIT_BACKEND"):
            attention(q, k, v)
        monkeypatch.delenv("FLASHKIT_BACKEND")
    kinds = {"c": "cpu", "r": "reference.forward"}
    assert calls == [kinds[x] for x in "crcrcrrcc"] * 2


def test_plans_are_cached_by_their_block_mask(calls_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mask itself: not by what it looks like, and not where it holds much."""
    from flashkit import BlockMask

    q, k, v = operands()
    grids = [np.eye(5, dtype=bool), ~np.eye(5, dtype=bool)]
    masks = [BlockMask.from_dense(grid, 8, 8) for grid in grids]
    expected = [full(q, k, v, mask=grid.repeat(8, 0).repeat(8, 1), return_lse=True) for grid in grids]
    dispatch.forget()
    prepared = calls_of(plans, "prepare")
    for _ in range(3):
        for block_mask, (out, lse) in zip(masks, expected, strict=True):
            got = attention(q, k, v, block_mask=block_mask, return_lse=True)
            np.testing.assert_allclose(got[0], out, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(got[1], lse, rtol=2e-5, atol=2e-6)
    assert len(prepared) == 2
    with pytest.raises(TypeError, match=r"block_mask: .* got list"):
        attention(q, k, v, block_mask=[True])
    prepared.clear()
    monkeypatch.setattr(plans, "_MAX_MASK_BYTES", 24)
    for _ in range(2):
        attention(q, k, v, block_mask=masks[0], return_lse=True)
    assert len(prepared) == 2


def pairwise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


WITH_ARRAYS: dict[str, Callable[[int], dict[str, Any]]] = {
    "slopes": lambda i: {"alibi_slopes": pairwise(i, 4) ** 2},
    "bias": lambda i: {"bias": pairwise(i, 40, 40)},
    "bias of rows": lambda i: {"bias": pairwise(i, 40, 80)[:, ::2], "softcap": 3.0},
    "bool mask": lambda i: {"mask": pairwise(i, 2, 1, 40, 40) > 0},
    "float mask": lambda i: {"mask": pairwise(i, 4, 1, 40), "causal": True},
    "table": lambda i: {"score_mod": mods.t5_bias(pairwise(i, 8, 4)), "bias": pairwise(i, 40, 40)},
    "all": lambda i: {"alibi_slopes": pairwise(i, 2, 4) ** 2, "bias": pairwise(i, 40), "mask": pairwise(i + 9, 40, 40)},
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", WITH_ARRAYS)
def test_plans_are_cached_by_layout(name: str, backend: str, calls_of: Any) -> None:
    """Other arrays of the same layout are read by each call; a result is written to `out`."""
    prepared = calls_of(plans, "prepare")
    for i in range(1, 4):
        q, k, v = operands()
        options = WITH_ARRAYS[name](i)
        expected = full(q, k, v, return_lse=True, backend=backend, **options)
        before = len(prepared)
        same(attention(q, k, v, return_lse=True, backend=backend, **options), expected)
        assert len(prepared) - before == (i == 1)
        changed = next(iter(options))
        array = options[changed].arrays["table"] if changed == "score_mod" else options[changed]
        array[..., 0] = 0  # the same array, with other contents
        expected = full(q, k, v, backend=backend, **options)
        same(attention(q, k, v, out=q, backend=backend, **options), expected)


def test_plans_are_cached_by_modifications(calls_of: Any) -> None:
    """By their graphs and numbers; not where the contents of an array are checked."""
    q, k, v = operands()
    prepared = calls_of(plans, "prepare")

    def calls(*given: Any) -> int:
        prepared.clear()
        for one in given:
            name = f"{one.kind}_mod"
            same(attention(q, k, v, **{name: one}), attention(q, k, v, backend="cpu", **{name: one}))
        return len(prepared)

    assert calls(*[mods.sliding_window(reach) for reach in (3, 5, 3, 5)]) == 2 * 2
    assert calls(*[mods.alibi(pairwise(i, 4)) for i in range(3)]) == 2
    assert calls(mods.causal(), mods.causal() & mods.sliding_window(3), mods.causal()) == 2 * 2
    assert calls(*[mods.document([0, 1] * 20, [0] * 40)] * 2) == 2 * 2
    _, vjp = flashkit.attention_vjp(q, k, v, score_mod=mods.t5_bias(pairwise(1, 8, 4)))
    dtable = vjp(q, wrt=("score.table",))[0]
    table = pairwise(2, 8, 4)
    prepared.clear()
    _, vjp = flashkit.attention_vjp(q, k, v, score_mod=mods.t5_bias(table))
    assert not prepared and np.abs(vjp(q, wrt=("score.table",))[0] - dtable).max() > 0
    _, exact = flashkit.attention_vjp(q, k, v, score_mod=mods.t5_bias(table), backend="reference")
    np.testing.assert_allclose(vjp(q, wrt=("score.table",))[0], exact(q, wrt=("score.table",))[0], rtol=1e-4, atol=1e-5)


def test_arrays_of_cached_plans() -> None:
    """They are not kept alive. A call with one array for two arguments is not cached; other layouts are other keys."""
    q, k, v = operands()
    table = np.zeros((40, 40), np.float32)
    attention(q, k, v, bias=table)
    reference = weakref.ref(table)
    del table
    gc.collect()
    assert reference() is None
    twice = pairwise(1, 40, 40)
    same(attention(q, k, v, bias=twice, mask=twice), full(q, k, v, bias=twice, mask=twice))
    bias, mask = pairwise(2, 40, 40), pairwise(3, 40, 40)
    same(attention(q, k, v, bias=bias, mask=mask), full(q, k, v, bias=bias, mask=mask))
    for other in (bias.astype(np.float64), bias[:1], bias.T, np.broadcast_to(bias, (4, 40, 40)), list(pairwise(4, 4))):
        name = "alibi_slopes" if isinstance(other, list) else "bias"
        same(attention(q, k, v, **{name: other}), full(q, k, v, **{name: other}))
    with pytest.raises(ValueError, match=r"bias: expected .* got \(40, 39\)"):
        attention(q, k, v, bias=pairwise(2, 40, 39))
    with pytest.raises(TypeError, match=r"bias: .* got a MaskedArray"):
        attention(q, k, v, bias=np.ma.masked_array(pairwise(2, 40, 40)))


def packed(n_q: int = 40, n_k: int = 40) -> tuple[np.ndarray, ...]:
    return tuple(as_bnhd(x) for x in operands(n_q, n_k, lead=(4,)))


def test_packed_calls_share_the_plan_of_their_offsets(calls_of: Any) -> None:
    """Offsets are the same where they hold the same numbers, whatever array they are in."""
    q, k, v = packed()
    prepared = calls_of(plans, "prepare")
    plans.clear()
    offsets = np.array([0, 9, 40])
    for first in (9, 30, 9):
        offsets[1] = first
        result = attention(q, k, v, causal=True, cu_seqlens=offsets)
        same(result, attention(q, k, v, causal=True, cu_seqlens=offsets.copy()))
        same(result, full(q, k, v, causal=True, cu_seqlens=[0, first, 40]))
    assert len(prepared) == 2 + 3  # for each plan, and by `full`
    assert len(plans._plans) == 2
    out = np.empty_like(q)
    for given in 2 * [(offsets, offsets), (offsets, np.array([0, 20, 33])), offsets[:-1], offsets.astype("u1")]:
        same(attention(q, k, v, causal=True, cu_seqlens=given, out=out), full(q, k, v, causal=True, cu_seqlens=given))
    assert len(plans._plans) == 6
    with pytest.raises(TypeError, match="tuple of 1"):
        attention(q, k, v, causal=True, cu_seqlens=(offsets,))
    with pytest.raises(ValueError, match=r"kv_lengths or cu_seqlens.*not both"):
        attention(q, k, v, causal=True, cu_seqlens=offsets, kv_lengths=[9, 31])


def test_packed_calls_whose_plans_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes beside offsets, and offsets that are no array, that no key can hold, or more than a key shall hold."""
    q, k, v = packed()
    plans.clear()
    numbers = [0, 9, 40]
    offsets, expected = np.array(numbers), full(q, k, v, cu_seqlens=numbers)
    same(attention(q, k, v, cu_seqlens=numbers), expected)
    floats = offsets.astype("f4")
    for given in (floats, floats.astype(object), offsets[None], offsets[:0]):
        with pytest.raises((TypeError, ValueError), match="cu_seqlens"):
            attention(q, k, v, cu_seqlens=given)
    for slopes in (np.ones(4, np.float32), np.zeros(4, np.float32)):
        options = {"alibi_slopes": slopes, "cu_seqlens": offsets}
        same(attention(q, k, v, **options), full(q, k, v, **options))
    monkeypatch.setattr(flashkit.call.call, "_MAX_OFFSET_BYTES", offsets.nbytes - 1)
    same(attention(q, k, v, cu_seqlens=offsets), expected)
    assert not plans._plans


def test_offsets_that_change_during_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has the offsets of its key."""
    q, k, v = packed()
    offsets, key_of = np.array([0, 9, 40]), plans.key_of
    expected = full(q, k, v, cu_seqlens=[0, 9, 40])

    def changes(*args: Any) -> Any:
        offsets[1] = 30
        return key_of(*args)

    plans.clear()
    monkeypatch.setattr(plans, "key_of", changes)
    for _ in range(2):
        offsets[1] = 9
        same(attention(q, k, v, cu_seqlens=offsets), expected)


def test_few_plans_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MAX_PLANS", 5)
    q, k, v = operands()
    for i in range(30):
        attention(q, k, v, scale=1 + i / 8)
    assert len(plans._plans) == 5
    attention(q, k, v, scale=1 + 25 / 8)  # most recently used
    attention(q, k, v, scale=9.0)
    assert (1 + 25 / 8) in [part for key in plans._plans for part in key[1]]
    for i in range(30):
        same(attention(q, k, v, scale=1 + i / 8), full(q, k, v, scale=1 + i / 8))


# --- lengths of each call ---------------------------------------------------------------------------------------------


VARIED: dict[str, dict[str, Any]] = {
    "decoding": {"n_q": 1, "window": (20, 0), "return_lse": True},
    "few queries at positions": {"n_q": 3, "causal": True, "q_offset": [5, 90]},
    "window": {"n_q": 9, "window": (20, 0), "softcap": 2.0, "q_offset": 3},
    "queries of each": {"n_q": 9, "q_lengths": [4, 9], "causal": True},
    "function": {"n_q": 2, "score_mod": lambda s, b, h, q, k: s - 0.01 * abs(q - k), "sinks": np.ones(4, np.float32)},
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", VARIED)
def test_a_planned_call_takes_lengths(name: str, backend: str) -> None:
    """The bits of `attention` for them; a call without lengths has the plan's, and so has a plan from a pickle."""
    options = {"backend": backend, **VARIED[name]}
    given = operands(options.pop("n_q"), 150)
    call = plan(*given, kv_lengths=[150, 150], **options)
    for planned in (call, pickle.loads(pickle.dumps(call))) if name != "function" else (call,):
        for lengths in ([150, 9], [17, 150], np.array([64, 65], "u1"), np.array([[20], [90]], "i2")[:, 0]):
            same(planned(*given, kv_lengths=lengths), full(*given, kv_lengths=lengths, **options))
            other = {**options, "q_offset": [7, 11]}
            same(planned(*given, kv_lengths=lengths, q_offset=[7, 11]), full(*given, kv_lengths=lengths, **other))
        same(planned(*given), full(*given, kv_lengths=[150, 150], **options))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("n_q", [1, 9])
def test_a_planned_call_takes_pages(n_q: int, backend: str) -> None:
    k, v = pairwise(1, 12, 16, 2, 8), pairwise(2, 12, 16, 2, 8)
    q, table = pairwise(3, 2, 4, n_q, 8), np.array([[3, 1, 0, 7], [2, 4, -1, -1]])
    options: dict[str, Any] = {"causal": True, "backend": backend}
    call = plan(q, k, v, page_table=table, kv_lengths=[60, 30], **options)
    for lengths in ([50, 32], [33, 17], [3, 2]):
        same(call(q, k, v, kv_lengths=lengths), full(q, k, v, page_table=table, kv_lengths=lengths, **options))
        other = np.array([[5, 6, 8, 9], [11, 10, 0, 0]], "i4")
        expected = full(q, k, v, page_table=other, kv_lengths=lengths, **options)
        same(call(q, k, v, kv_lengths=lengths, page_table=other), expected)
    with pytest.raises(ValueError, match=r"page_table\[1, 2\]: expected .* got -1"):  # the plan's own
        call(q, k, v, kv_lengths=[50, 33])
    for wrong, says in ((table[:, :3], "as planned"), (table + 6, "got 13"), (table[0], "shape"), (table / 2, "float")):
        with pytest.raises((TypeError, ValueError), match=says):
            call(q, k, v, kv_lengths=[60, 30], page_table=wrong)


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"kv_lengths": [151, 3]}, ValueError, "kv_lengths: expected .* got values from 3 to 151"),
        ({"kv_lengths": [-1, 3]}, ValueError, "kv_lengths: expected .* got values from -1 to 3"),
        ({"kv_lengths": [2**63, 3]}, (TypeError, ValueError), "kv_lengths"),
        ({"kv_lengths": [5, 5, 5]}, ValueError, r"kv_lengths: .* got shape \(3,\)"),
        ({"kv_lengths": [5.0, 5.0]}, TypeError, "kv_lengths: expected"),
        ({"kv_lengths": np.array([True, True])}, TypeError, "kv_lengths: expected"),
        ({"kv_lengths": [9, 2]}, ValueError, "kv_lengths has 2, less than the 3 queries"),
        ({"q_offset": [2**49, 0]}, ValueError, "q_offset"),
        ({"q_offset": [1, 2, 3]}, ValueError, "q_offset: .* got shape"),
        ({"page_table": [[0], [0]]}, TypeError, "page_table: expected None"),
    ],
)
def test_lengths_that_do_not_fit(given: dict[str, Any], error: Any, says: str) -> None:
    q, k, v = operands(3, 150)
    call = plan(q, k, v, kv_lengths=[150, 150], causal=True)
    expected = call(q, k, v)
    with pytest.raises(error, match=says):
        call(q, k, v, **given)
    same(call(q, k, v), expected)


def test_plans_that_take_no_lengths() -> None:
    q, k, v = operands()
    packed = plan(q[0].swapaxes(0, 1), k[0].swapaxes(0, 1), v[0].swapaxes(0, 1), cu_seqlens=[0, 40])
    for call, tensors in ((plan(q, k, v), (q, k, v)), (packed, [x[0].swapaxes(0, 1) for x in (q, k, v)])):
        for given in ({"kv_lengths": [5, 5]}, {"q_offset": 3}, {"page_table": [[0]]}):
            with pytest.raises(TypeError, match="expected None for a plan without kv_lengths"):
                call(*tensors, **given)


@pytest.mark.parametrize("n_q", [1, 9])
def test_lengths_that_change_during_a_call(n_q: int) -> None:
    """They are copied before they are checked, by planned and by cached calls."""
    given = operands(n_q, 150)
    call, seen = plan(*given, kv_lengths=[150, 150]), []
    for function in (call, attention):
        lengths = np.array([50, 60])
        expected = function(*given, kv_lengths=lengths)

        def changes(x: np.ndarray, lengths: np.ndarray = lengths, start: Any = np.ndarray) -> Any:
            lengths[:] = 1 << 40  # when the result is allocated, all checks are done
            seen.append(x)
            return start(x, np.float32)

        for planned in [call, *(plans._plans.values() if function is attention else ())]:
            planned._empty = lambda shape, dtype: changes(shape)
        same(function(*given, kv_lengths=lengths), expected)
        assert lengths[0] == 1 << 40
    assert len(seen) >= 4


def test_indices_are_checked_for_the_positions_of_each_call() -> None:
    """A modification that reads by position is in range for the plan's lengths, and not for all."""
    q, k, v = operands(1, 40)
    score = mods.score(lambda s, b, h, q, k, *, t: s + t[q], t=np.zeros(20))
    call = plan(q, k, v, kv_lengths=[20, 20], score_mod=score)
    for lengths in ([5, 20], [1, 1]):
        same(call(q, k, v, kv_lengths=lengths), full(q, k, v, kv_lengths=lengths, score_mod=score))
    for given in ({"kv_lengths": [21, 5]}, {"kv_lengths": [0, 5]}, {"q_offset": [20, 0]}, {"q_offset": -1}):
        with pytest.raises(ValueError, match="from 0 to 19 of axis 0"):
            call(q, k, v, **given)


GROWING: dict[str, dict[str, Any]] = {
    "one query": {"n_q": 1}, "causal": {"n_q": 3, "causal": True, "return_lse": True},
    "bnhd": {"n_q": 2, "layout": "bnhd"}, "window at": {"n_q": 7, "window": (20, 1), "q_offset": 30},
    "two axes": {"n_q": 1, "lead": (), "softcap": 3.0},
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_a_cache_that_grows_shares_plans(name: str) -> None:
    """Slices of one cache: a plan for each power of two of keys, and the bits of a call without cached plans."""
    options = dict(GROWING[name])
    q, k, v = operands(options.pop("n_q"), 1100, lead=(2, 4) if "lead" not in options else (1, 1), kv=1)
    if options.pop("lead", None) is not None:
        q, k, v = (x[0, 0] for x in (q, k, v))
    if options.get("layout") == "bnhd":
        q, k, v = (as_bnhd(x) for x in (q, k, v))
    cut = (slice(None),) * (1 if options.get("layout") else k.ndim - 2)
    plans.clear()
    for n in (16, 17, 31, 32, 33, 63, 64, 511, 512, 1023, 1024, 1100):
        few = (*cut, slice(n))
        same(attention(q, k[few], v[few], **options), full(q, k[few], v[few], **options))
    assert len(plans._plans) == 6  # for numbers of 5, 6, 7, 9, 10 and 11 bits
    with pytest.raises(ValueError, match=r"v: expected .* tokens .* got 40"):
        attention(q, k[(*cut, slice(41))], v[(*cut, slice(40))], **options)


def test_few_queries_of_plans_that_grow_are_decoded() -> None:
    """A kernel that has tiles of queries would compute other bits for a plan of more keys."""
    from flashkit.backends.cpu import plan as cpu_plan

    assert plans.FEW_QUERIES <= cpu_plan.DECODE_QUERIES and plans.MIN_KEYS >= cpu_plan.DECODE_MIN_KEYS


# --- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [24, 300], ids=["serial", "parallel"])
def test_one_planned_call_from_many_threads(n: int) -> None:
    """Each call in flight has an argument block and scratch memory of its own."""
    given = [operands(n, n, d=32) for _ in range(6)]
    call = plan(*given[0], causal=True, backend="cpu")
    expected = [call(*x) for x in given]
    barrier = threading.Barrier(len(given))

    def work(i: int) -> None:
        barrier.wait()
        out = np.empty_like(expected[i])
        for round in range(40):
            same(call(*given[i], out=out if round % 2 else None), expected[i])

    with ThreadPoolExecutor(len(given)) as pool:
        list(pool.map(work, range(len(given))))


def test_a_changed_number_of_threads_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashkit.backends.cpu import threads

    if threads.count() < 2:
        pytest.skip("needs two threads")
    seen: list[int] = []
    entry: Any = threads.entry
    monkeypatch.setattr(
        threads,
        "entry",
        lambda name: lambda *a: (seen.append(a[2]), entry(name)(*a))[1] if name == "call" else entry(name),
    )
    given = operands(300, 300, d=64)
    call = plan(*given, backend="cpu")
    expected = call(*given)
    for wanted in ("1", "2", "1"):
        monkeypatch.setenv("FLASHKIT_NUM_THREADS", wanted)
        same(call(*given), expected)
    assert seen[1:] == [1, 2, 1]
    monkeypatch.setenv("FLASHKIT_NUM_THREADS", "none")
    with pytest.raises(ValueError, match="FLASHKIT_NUM_THREADS"):
        call(*given)


def test_a_call_within_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler or a finaliser may call attention while a call is being made."""
    from flashkit.backends.cpu import scratch_pool

    given, others = operands(64, 64), operands(64, 64)
    call = plan(*given, backend="cpu")
    expected, within = call(*given), call(*others)
    taken, results = [], []
    acquire, release = scratch_pool.acquire, scratch_pool.release

    def interrupted(taking: bool, step: Any, argument: Any) -> Any:
        result = step(argument)
        taken.append(taking)
        if len(taken) < 6:
            results.append(call(*others))
        return result

    monkeypatch.setattr(scratch_pool, "acquire", lambda size: interrupted(True, acquire, size))
    monkeypatch.setattr(scratch_pool, "release", lambda memory: interrupted(False, release, memory))
    same(call(*given), expected)
    assert len(results) == 5 and len(taken) == 12
    for result in results:
        same(result, within)


@pytest.mark.parametrize("return_lse", [False, True])
def test_no_memory_for_a_log_sum_exp_that_nobody_wants(return_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that says that it can do without gets None, one that does not always gets an array."""
    dispatch.forget()  # plans of another object of the backend
    backend, got = type(dispatch.registry()["cpu"]), []
    q, k, v = operands()

    def bind(self: Any, p: Any, o: Any) -> Any:
        return lambda q, k, v, out, lse: got.append(lse)

    monkeypatch.setattr(backend, "bind", bind)
    for spares in (False, True):
        monkeypatch.setattr(backend, "spares_lse", spares, raising=False)
        plan(q, k, v, return_lse=return_lse, backend="cpu")(q, k, v)
    assert got[0] is not None
    assert (got[1] is None) == (not return_lse)
