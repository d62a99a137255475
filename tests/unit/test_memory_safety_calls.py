"""What a kernel computes addresses from is what was checked, whatever becomes of the caller's arrays: shapes of five
axes, integers that change between the check and the use, arrays of a modification that are exchanged.
"""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import same
from operands import on_device

import flashkit
from flashkit import BlockMask, attention, attention_vjp, dispatch, mods, plan
from flashkit.backends.cuda_common.arguments import Arguments
from flashkit.call import arguments, arrays, plans
from flashkit.call.arguments import prepare
from flashkit.call.checks import can_write, check_out
from flashkit.spec import Gradients, Operands, Problem

rng = np.random.default_rng(0)


def tensors(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def close(got: Any, right: Any) -> None:
    np.testing.assert_allclose(got, right, rtol=0, atol=1e-12)


# --- several batch axes -----------------------------------------------------------------------------------------------

HEADS, N_Q, N_K, D = 4, 5, 37, 16

SHAPES = [
    (batch, own)
    for batch, leading in {
        (1, 1): [(1, 1), (1,), ()], (1, 3): [(1, 3), (1, 1), (3,), (1,)], (2, 1): [(2, 1), (1, 1), (1,)],
        (2, 3): [(2, 3), (2, 1), (1, 3), (1, 1), (3,), (1,), ()],
        (2, 1, 3): [(2, 1, 3), (1, 1, 3), (2, 1, 1), (1, 1, 1), (1, 3)],
        (0, 3): [(0, 3), (1, 3), (0, 1), (1, 1), (3,), ()], (2, 0): [(2, 0), (2, 1), (1, 1), ()],
    }.items()
    for own in leading
]  # fmt: skip


def of_pairs(name: str, own: tuple[int, ...]) -> np.ndarray:
    shape = (*own, *((HEADS,) if own else ()), N_Q, N_K)
    return rng.random(shape) < 0.6 if name == "mask" else rng.standard_normal(shape)


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize(("batch", "own"), SHAPES, ids=str)
def test_several_batch_axes(batch: tuple[int, ...], own: tuple[int, ...], name: str) -> None:
    """Each entry alone, by the reference, is the measure: of first and repeated calls, planned or not, and vjp."""
    plans.clear()
    wide, narrow = (*batch, HEADS, N_Q, D), (*batch, 2, N_K, D)
    q, k, v, dout = tensors(wide, narrow, narrow, wide)
    array = of_pairs(name, own)
    every = np.broadcast_to(array, (*batch, HEADS, N_Q, N_K))
    out, grads = np.empty_like(q), [np.empty_like(x) for x in (q, k, v)]
    for i in np.ndindex(*batch):
        given = {name: every[i], "backend": "reference"}
        out[i], vjp = attention_vjp(q[i], k[i], v[i], **given)
        for target, gradient in zip(grads, vjp(dout[i]), strict=True):
            target[i] = gradient
    for _ in range(3):
        close(attention(q, k, v, **{name: array}, backend="cpu"), out)
    call = plan(q, k, v, **{name: array}, backend="cpu")
    for _ in range(2):
        close(call(q, k, v), out)
    got, vjp = attention_vjp(q, k, v, **{name: array}, backend="cpu")
    close(got, out)
    for gradient, right in zip(vjp(dout), grads, strict=True):
        close(gradient, right)


def test_what_a_kernel_may_address() -> None:
    """Rows anywhere, of elements that follow each other and are aligned; of anything else it gets a copy."""
    memory = np.arange(2.0 * 6 * 8).reshape(2, 6, 8)
    one = np.lib.stride_tricks.as_strided(memory, (2, 6, 1), (384, 64, 24))
    for fits in (memory, memory[:, ::2, :5], memory[:, ::-1], memory[:1], one):
        assert arrays.addressable(fits) is fits
    misaligned = np.zeros(memory.nbytes + 1, np.uint8)[1:].view(float).reshape(memory.shape)
    misaligned[...] = memory
    for other in (memory[..., ::2], memory[..., ::-1], memory.swapaxes(1, 2), misaligned):
        copy = arrays.addressable(other)
        assert copy is not other and copy.flags.carray
        np.testing.assert_array_equal(copy, other)


def test_where_a_kernel_may_write() -> None:
    """Rows in gaps or in reverse; not elements apart, elements that are several at once, or an input."""
    memory, q = np.zeros((2, 3, 8, 10)), np.zeros((2, 3, 4, 5))
    strided = np.lib.stride_tricks.as_strided
    views = {
        "packed": memory[..., :4, :5].copy(), "gaps": memory[..., ::2, :5],
        "reversed": memory[..., 4:, :5][:, :, ::-1], "one token of a head": memory[:, :, 1:2, :5],
        "axis of length 1": strided(q, (2, 3, 1, 5), (*q.strides[:2], 0, 8)),
    }  # fmt: skip
    assert all(can_write(view) for view in views.values())
    for axis in range(3):
        strides = [s * (i != axis) for i, s in enumerate(q.strides)]
        with pytest.raises(ValueError, match="out: expected memory for each element"):
            check_out(strided(q, q.shape, strides), "numpy", "float64", q.shape)
    assert not can_write(memory[..., :4, ::2])
    assert not can_write(np.zeros((2, 2, 3, 8, 5))[..., ::2, :]) and can_write(np.zeros((2, 2, 3, 4, 5)))
    assert can_write(q, memory) and not can_write(q, memory, q[:, :, 3:])


def test_a_repeated_call_takes_arrays_of_the_form_it_was_made_for() -> None:
    """An array that was reshaped has the address of the operands' own, and not its form."""
    (q,) = tensors((1, 1, HEADS, N_K, D))
    bias = of_pairs("bias", (1, 1))[..., :1, :]
    _, operands, _ = prepare(q, q, q, bias=bias)
    assert plans.names_of([bias], operands) is None
    assert plans.names_of([bias[0]], operands) == tuple(operands.arrays)
    for other in (bias[0].swapaxes(-1, -2), bias[0].view(np.int64), bias[0, :, :2], bias[0, ..., ::2]):
        assert plans.names_of([other], operands) is None


# --- arrays that do not fit their slots -------------------------------------------------------------------------------

OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "more axes": lambda x: x[None], "fewer axes": lambda x: x[0], "another dtype": lambda x: x.astype(np.float32),
    "other elements": lambda x: x.view(np.int64),
}  # fmt: skip


@pytest.mark.parametrize("change", OTHERS)
def test_an_argument_block_refuses_what_its_slot_is_not(change: str) -> None:
    (q,) = tensors((2, HEADS, N_Q, D))
    problem, operands, _ = prepare(q, q, q, bias=rng.standard_normal((HEADS, N_Q, N_Q)))
    backend, made = dispatch.plan(problem, "cpu")
    backend.forward(made, operands)
    operands.arrays = {name: OTHERS[change](array) for name, array in operands.arrays.items()}
    there = {name: on_device(getattr(operands, name)) for name in ("q", "k", "v", "out", "lse")}
    there["arrays"] = {name: on_device(array) for name, array in operands.arrays.items()}
    gradients = Gradients(q, None, *(np.empty_like(q) for _ in range(3)))
    for block in (
        lambda: backend.forward(made, operands),
        lambda: backend.backward(made, operands, gradients),
        lambda: Arguments(problem.spec, replace(operands, **there)),
    ):
        with pytest.raises(ValueError, match="axes of float64, for which the kernel was compiled"):
            block()


def exchanged() -> dict[str, tuple[mods.Mod, str, Any, type[Exception] | None]]:
    """Modifications for 40 keys, one value of each with another in its place, and the error that this is."""
    table, index, flags = rng.standard_normal(40), np.arange(40), np.arange(40) % 2 == 0

    def looked_up(s: Any, b: Any, h: Any, q: Any, k: Any, *, t: Any, i: Any) -> Any:
        return s + t[i[k]]

    def chosen(s: Any, b: Any, h: Any, q: Any, k: Any, *, t: Any, f: Any) -> Any:
        return s + t[flashkit.where(f[k], 39, 0)]

    def moved(s: Any, b: Any, h: Any, q: Any, k: Any, *, t: Any, n: Any) -> Any:
        return s + t[(k + n) % 40]

    def made(function: Any, **values: Any) -> mods.Mod:
        return mods.score(function, t=table.copy(), **values)

    return {
        "more axes": (made(looked_up, i=index), "t", table[None], TypeError),
        "fewer axes": (made(looked_up, i=index), "i", np.array(3), TypeError),
        "integers for floats": (made(looked_up, i=index), "t", index, TypeError),
        "floats for integers": (made(looked_up, i=index), "i", table, TypeError),
        "integers for bools": (made(chosen, f=flags), "f", index, TypeError),
        "no array": (made(looked_up, i=index), "t", table.tolist(), TypeError),
        "nothing": (made(looked_up, i=index), "t", None, TypeError),
        "a float for an integer": (made(moved, n=3), "n", 3.5, TypeError),
        "a shorter table": (made(looked_up, i=index), "t", table[:30], ValueError),
        "fewer indices": (made(looked_up, i=index), "i", index[:30], ValueError),
        "indices too great": (made(looked_up, i=index), "i", index + 1, ValueError),
        "indices too small": (made(looked_up, i=index), "i", index - 1, ValueError),
        "narrower floats": (made(looked_up, i=index), "t", table.astype(np.float32), None),
        "narrower integers": (made(looked_up, i=index), "i", index[::-1].astype(np.uint8), None),
        "integers of swapped bytes": (made(looked_up, i=index), "i", index[::-1].astype(">i8"), None),
        "floats of swapped bytes": (made(looked_up, i=index), "t", table.astype(">f8"), None),
        "strided": (made(looked_up, i=index), "i", np.repeat(index[::-1], 2)[::2], None),
        "other bools": (made(chosen, f=flags), "f", ~flags, None),
        "another integer": (made(moved, n=3), "n", 7, None),
        "an integer that may overflow": (made(moved, n=3), "n", 2**61, ValueError),
        "the least integer": (made(moved, n=3), "n", -(2**63), ValueError),
    }


@pytest.mark.parametrize("what", exchanged())
def test_exchanged_values_of_a_modification(what: str) -> None:
    """An error, or what a modification made of them computes."""
    q, k, v, dout = tensors((2, HEADS, N_Q, D), (2, 2, 40, D), (2, 2, 40, D), (2, HEADS, N_Q, D))
    mod, name, value, error = exchanged()[what]
    attention(q, k, v, score_mod=mod, backend="cpu")
    (mod.params if name in mod.params else mod.arrays)[name] = value  # type: ignore[index]
    calls = [
        lambda **to: attention(q, k, v, score_mod=mod, **to),
        lambda **to: plan(q, k, v, score_mod=mod, **to)(q, k, v),
        lambda **to: attention_vjp(q, k, v, score_mod=mod, **to)[1](dout)[0],
    ]
    for call in calls:
        if error is not None:
            with pytest.raises(error, match=r"score[_ ]mod"):
                call(backend="cpu")
        else:
            close(call(backend="cpu"), call(backend="reference"))


@pytest.mark.parametrize(
    ("other", "error"), [(np.zeros((64, 64), int), TypeError), (np.zeros(64), TypeError), (np.arange(20), ValueError)]
)
def test_exchanged_arrays_of_a_block_mask(other: np.ndarray, error: type[Exception]) -> None:
    (q,) = tensors((1, 2, 64, D))
    mask = BlockMask.from_mod(mods.document(np.arange(64) // 9), 64, 64)
    mask.mod.arrays["ids"] = other  # type: ignore[index]
    with pytest.raises(error, match="ids"):
        attention(q, q, q, block_mask=mask, backend="cpu")


# --- integers that change after they were checked ---------------------------------------------------------------------


class Changing:
    """A call all of whose integers the caller holds, and changes."""

    def __init__(self, n_q: int = N_Q) -> None:
        self.integers = {
            "lengths": np.array([17, 33]), "offsets": np.array([3, 1]), "index": np.arange(40) % 7,
            "short": (np.arange(40) % 5).astype(np.int16),
        }  # fmt: skip
        self.flags = np.zeros(40, bool)

        def score(s: Any, b: Any, h: Any, q: Any, k: Any, *, t: Any, i: Any, j: Any, f: Any) -> Any:
            return s + t[i[k]] + t[j[k] + flashkit.where(f[k], 10**8, 0)]

        index, short = self.integers["index"], self.integers["short"]
        self.mod = mods.score(score, t=rng.standard_normal(7), i=index, j=short, f=self.flags)
        self.qkv = tensors((2, HEADS, n_q, D), (2, 2, 40, D), (2, 2, 40, D))
        self.dout = tensors((2, HEADS, n_q, D))[0]

    @property
    def options(self) -> dict[str, Any]:
        given = {"kv_lengths": self.integers["lengths"], "q_offset": self.integers["offsets"]}
        return {**given, "causal": True, "score_mod": self.mod, "backend": "cpu"}

    def change(self) -> None:
        for array in self.integers.values():
            array += 200
        self.flags[:] = True


@pytest.mark.parametrize("n_q", [1, N_Q, 40])
def test_integers_that_change_after_the_call(n_q: int) -> None:
    call = Changing(n_q)
    out, vjp = attention_vjp(*call.qkv, **call.options)
    repeated, right = plan(*call.qkv, **call.options), vjp(call.dout)
    call.change()
    same(vjp(call.dout), right)
    np.testing.assert_array_equal(repeated(*call.qkv), out)
    with pytest.raises(ValueError, match="kv_lengths"):
        attention(*call.qkv, **call.options)
    with pytest.raises(ValueError, match="score_mod"):
        attention(*call.qkv, **{**call.options, "kv_lengths": None})


@pytest.mark.parametrize("entry", [attention, attention_vjp, plan], ids=lambda f: f.__name__)
@pytest.mark.parametrize("place", ["before it is checked", "before it is run"])
def test_integers_that_another_thread_changes_during_the_call(entry: Any, place: str, monkeypatch: Any) -> None:
    """What is checked is what is used. The other thread comes in at two places of the call."""
    call = Changing()

    def computed() -> tuple[Any, ...]:
        result = entry(*call.qkv, **call.options)
        if entry is plan:
            return (result(*call.qkv),)
        return (result[0], *result[1](call.dout)) if entry is attention_vjp else (result,)

    right = computed()
    module, name = (arguments, "check_indices") if place == "before it is checked" else (dispatch, "plan")
    original: Any = getattr(module, name)
    changes = iter([call.change])

    def interrupted(*args: Any) -> Any:
        for change in changes:
            change()
        return original(*args)

    monkeypatch.setattr(module, name, interrupted)
    same(computed(), right)
    assert call.integers["lengths"][0] == 217


def test_a_block_mask_has_its_arrays_to_itself() -> None:
    """Its tiles are found once; arrays that it was made from may change afterwards, its own cannot."""
    ids, grid, table = np.arange(64) // 9, np.tri(4, dtype=bool), np.linspace(0, 1, 64)
    masks = [
        BlockMask.from_mod(mods.document(ids), 64, 64, 16, 16),
        BlockMask.from_dense(grid, 16, 16),
        BlockMask.from_mod(mods.mask(lambda b, h, q, k, *, t: t[q] * 0.5 >= t[k], t=table), 64, 64, 16, 16),
    ]
    masks += [masks[0] & masks[1], ~masks[0], masks[0].with_blocks(32, 32)]
    (q,) = tensors((1, 2, 64, D))
    right = [(mask.to_dense(), attention(q, q, q, block_mask=mask, backend="reference")) for mask in masks]
    ids += 10**9
    grid[:], table[:] = True, 0
    for mask, (states, out) in zip(masks, right, strict=True):
        np.testing.assert_array_equal(mask.with_blocks(mask.block_q, mask.block_k).to_dense(), states)
        close(attention(q, q, q, block_mask=mask, backend="cpu"), out)
        for array in mask.mod.arrays.values():
            assert array.flags.owndata and not array.flags.writeable


def test_forms_that_change_after_the_call() -> None:
    """An array object whose shape is set anew is read as it was."""
    given = [*tensors((2, HEADS, N_Q, D), (2, 2, N_K, D), (2, 2, N_K, D)), of_pairs("bias", (2,))]
    given.append(np.linspace(0, 3, 2 * N_K))
    q, k, v, bias, table = given
    (dout,) = tensors(q.shape)
    of_keys = mods.score(lambda b, h, q, k, s, *, table: s + table[k], table=table)
    _, vjp = attention_vjp(q, k, v, bias=bias, score_mod=of_keys, backend="cpu")
    right = vjp(dout)
    for array in given:
        array.resize(array.size // 2, 2, refcheck=False)  # of the same size: its memory stays
    same(vjp(dout), right)


# --- kernels bound lengths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("n_q", [1, N_Q, 40])
def test_kernels_bound_lengths(n_q: int, dtype: str) -> None:
    """Lengths that no check let through; what lies beyond the keys is not read, nor written in the backward pass."""
    q, dout, k, v = tensors((3, 1, n_q, D), (3, 1, n_q, D), (3, 1, N_K, D), (3, 1, N_K, D), dtype=dtype)
    room = [np.full((5, *x.shape[1:]), np.nan, dtype) for x in (k, v, k, v)]  # an entry before, one after
    apart = [x[1:4] for x in room]
    apart[0][...], apart[1][...] = k, v

    def computed(k: np.ndarray, v: np.ndarray, dk: np.ndarray, dv: np.ndarray, lengths: Any) -> list[np.ndarray]:
        problem, operands, _ = prepare(q, k, v, kv_lengths=[N_K, 0, N_K])
        operands.kv_lengths[:] = lengths
        problem, dq = replace(problem), np.empty_like(q)
        run(problem, operands, Gradients(dout, None, dq, dk, dv))
        return [operands.out, operands.lse, dq, dk, dv]

    def run(problem: Problem, operands: Operands, gradients: Gradients) -> None:
        backend, made = dispatch.plan(problem, "cpu")
        backend.forward(made, operands)
        backend.backward(made, operands, gradients)

    right = computed(k, v, np.empty_like(k), np.empty_like(v), [N_K, 0, N_K])
    got = computed(*apart, [N_K + 20, -(2**40), N_K + 30])  # type: ignore[call-arg, misc]
    same(got, right)
    assert all(np.isnan(x[[0, 4]]).all() for x in room)


# --- calls that a signal handler breaks off ---------------------------------------------------------------------------


@pytest.mark.parametrize("n_q", [1, N_Q], ids=["decode", "forward"])
@pytest.mark.parametrize("backward", [False, True], ids=["out", "gradients"])
def test_what_a_long_call_uses_stays_while_it_runs(n_q: int, backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may leave before the kernels have ended. Here it leaves before they have begun."""
    from flashkit.backends.cpu import threads

    kept: list[Any] = []

    class Left(Exception):
        pass

    def leave(launch: Any) -> None:
        kept.append(launch)
        raise Left

    def left() -> list[weakref.ref[np.ndarray]]:
        q, dout, k, v = tensors((2, HEADS, n_q, D), (2, HEADS, n_q, D), (2, HEADS, N_K, D), (2, HEADS, N_K, D))
        vjp = attention_vjp(q, k, v, backend="cpu")[1] if backward else None
        monkeypatch.setattr(threads, "is_long", lambda *_: True)
        monkeypatch.setattr(threads, "interruptible", leave)
        monkeypatch.setattr(threads, "SERIAL_FLOPS", 0)
        plans.clear()
        with suppress(Left):
            attention(q, k, v, backend="cpu") if vjp is None else vjp(dout)
        return [weakref.ref(x) for x in (q, k, v, *([dout] if backward else []))]

    alive = left()
    gc.collect()
    assert len(kept) == 1 and all(array() is not None for array in alive)
    kept.pop()(0)
    gc.collect()
    assert not any(array() is not None for array in alive)
