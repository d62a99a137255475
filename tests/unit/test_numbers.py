"""Every number that a public function takes: what is no number is refused, and integers are read as they are meant,
whatever their dtype and the order of their bytes.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashkit
from flashkit import BlockMask, mods
from flashkit.numeric import integer, number

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((2, 2, 9, 8)).astype(np.float32)
T = RNG.standard_normal((9, 2, 8)).astype(np.float32)  # packed
POOL = RNG.standard_normal((4, 3, 2, 8)).astype(np.float32)
CAUSAL = mods.causal()


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError("has no text")


NO_NUMBER: dict[str, Any] = {
    "no text": "", "digits": "1", "NumPy's digits": np.str_("1"), "bytes": b"1", "true": True, "false": False,
    "NumPy's bool": np.True_, "bool without axes": np.array(True), "complex": 1 + 0j, "NumPy's complex":
    np.complex64(1), "list": [1], "one element": np.ones(1), "text without axes": np.array("1"),
    "object": np.array(1, object), "date": np.datetime64(1, "s"), "masked": np.ma.masked, "type": int, "dict": {},
    "ragged": [[1, 2], [3]], "slice": slice(1), "without text": Nameless(), "generator": iter([1]),
}  # fmt: skip
NO_FINITE: dict[str, Any] = {
    "NaN": float("nan"), "infinity": float("inf"), "-infinity": np.float32(-np.inf), "10^400": 10**400,
    "10^5000": 10**5000, "beyond float64": np.longdouble("1e4000"),
}  # fmt: skip
NO_INTEGER: dict[str, Any] = NO_NUMBER | {
    "float": 1.0, "NumPy's float": np.float64(1), "float without axes": np.array(1.0), "NaN": float("nan"),
}  # fmt: skip


def scaled(kind: str) -> Callable[[Any], Any]:
    return lambda x: flashkit.rotary_table(9, 8, scaling={"rope_type": "linear", kind: x})


def onnx(**options: Any) -> Any:
    from flashkit.onnx import attention

    return attention(T, T, T, **{"q_num_heads": 2, "kv_num_heads": 2} | options)


def jax(**options: Any) -> Any:
    pytest.importorskip("jax")
    from flashkit.jax import attention

    return attention(Q, Q, Q, **options)


def dask(**options: Any) -> Any:
    da = pytest.importorskip("dask.array")
    from flashkit.dask import attention

    return attention(*[da.from_array(Q)] * 3, **options).compute()


def torch(**options: Any) -> Any:
    found = pytest.importorskip("torch")
    from flashkit.torch import attention

    return attention(*[found.from_numpy(Q)] * 3, **options)


REAL: dict[str, Callable[[Any], Any]] = {
    **{
        f"{name} of {entry.__name__}": lambda x, name=name, entry=entry: entry(Q, Q, Q, seed=1, **{name: x})
        for name in ("scale", "softcap", "dropout_p")
        for entry in (flashkit.attention, flashkit.attention_vjp, flashkit.plan, flashkit.explain)
    },
    "scale of weights": lambda x: flashkit.weights(Q, Q, scale=x),
    "scale of mla": lambda x: flashkit.mla(Q, Q, Q[:, 0], Q[:, 0], scale=x),
    "softcap of mods": mods.softcap,
    "base of rotary": lambda x: flashkit.rotary(Q, base=x),
    "base of rotary_table": lambda x: flashkit.rotary_table(9, 8, base=x),
    "base beside rope_theta": lambda x: flashkit.rotary_table(9, 8, base=x, scaling={"rope_theta": 3.0}),
    "factor of rotary_table": scaled("factor"),
    "scale of onnx": lambda x: onnx(scale=x),
    "softcap of onnx": lambda x: onnx(softcap=x),
    "scale of jax": lambda x: jax(scale=x),
    "softcap of jax": lambda x: jax(softcap=x),
    "dropout_p of jax": lambda x: jax(dropout_p=x, seed=1),
    "scale of torch": lambda x: torch(scale=x),
    "softcap of torch": lambda x: torch(softcap=x),
    "dropout_p of torch": lambda x: torch(dropout_p=x),
    "scale of dask": lambda x: dask(scale=x),
    "softcap of dask": lambda x: dask(softcap=x),
}
"""By name of the argument, which the error begins with."""

INTEGERS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "seed of attention": (3, lambda x: flashkit.attention(Q, Q, Q, dropout_p=0.5, seed=x)),
    "seed of quantize": (3, lambda x: flashkit.quantize(Q, rotate=True, seed=x).dequantize()),
    "window[0] of attention": (3, lambda x: flashkit.attention(Q, Q, Q, window=(x, 0))),
    "window[1] of attention": (3, lambda x: flashkit.attention(Q, Q, Q, window=(None, x))),
    "left of mods": (3, lambda x: flashkit.attention(Q, Q, Q, mask_mod=mods.sliding_window(x))),
    "right of mods": (3, lambda x: flashkit.attention(Q, Q, Q, mask_mod=mods.sliding_window(2, x))),
    "step of mods": (3, lambda x: flashkit.attention(Q, Q, Q, mask_mod=mods.dilated(x))),
    "block of quantize": (3, lambda x: flashkit.quantize(Q, per="block", block=x).dequantize()),
    "block of Quantized": (
        8, lambda x: flashkit.Quantized(np.ones((9, 8), np.int8), np.ones((2, 1), np.float32), per="block", block=x
        ).dequantize(),
    ),
    "n of rotary_table": (3, lambda x: flashkit.rotary_table(x, 8)[0]),
    "dims of rotary_table": (4, lambda x: flashkit.rotary_table(9, x)[0]),
    "dims of rotary": (4, lambda x: flashkit.rotary(Q, dims=x)),
    "n_q of BlockMask": (9, lambda x: BlockMask.from_mod(CAUSAL, x, 9, 4, 4).to_dense()),
    "n_k of BlockMask": (9, lambda x: BlockMask.from_mod(CAUSAL, 9, x, 4, 4).to_dense()),
    "block_q of BlockMask": (4, lambda x: BlockMask.from_mod(CAUSAL, 9, 9, x, 4).to_dense()),
    "left_blocks of BlockMask": (1, lambda x: BlockMask.local(9, 9, x, block=4).to_dense()),
    "qk_matmul_output_mode of onnx": (3, lambda x: onnx(qk_matmul_output_mode=x).qk_matmul_output),
    "left_window_size of onnx": (3, lambda x: onnx(left_window_size=x).Y),
    "q_num_heads of onnx": (2, lambda x: onnx(q_num_heads=x).Y),
    "split_every of dask": (3, lambda x: dask(split_every=x)),
}  # fmt: skip
"""With a value that fits."""

ARRAYS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "q_offset of attention": ([1, 3], lambda x: flashkit.attention(Q, Q, Q, causal=True, q_offset=x)),
    "q_offset of BlockMask": ([1, 3], lambda x: BlockMask.from_mod(CAUSAL, 9, 9, 4, 4, x, batch=2).to_dense()),
    "kv_lengths of attention": ([5, 9], lambda x: flashkit.attention(Q, Q, Q, kv_lengths=x)),
    "kv_lengths of explain": (
        [5, 9], lambda x: np.array(flashkit.explain(Q, Q, Q, kv_lengths=x).flops["forward"])
    ),
    "q_lengths of attention": ([5, 9], lambda x: flashkit.attention(Q, Q, Q, q_lengths=x)),
    "cu_seqlens of attention": ([0, 4, 9], lambda x: flashkit.attention(T, T, T, cu_seqlens=x)),
    "cu_seqlens of gradients": ([0, 4, 9], lambda x: flashkit.attention_vjp(T, T, T, cu_seqlens=x)[1](T)[0]),
    "cu_seqlens[1] of attention": (
        [0, 4, 9], lambda x: flashkit.attention(T, T, T, cu_seqlens=(np.array([0, 4, 9]), x))
    ),
    "cu_seqlens of weights": ([0, 4, 9], lambda x: flashkit.weights(T, T, cu_seqlens=x)),
    "page_table of attention": (
        [[3, 1], [0, 2]], lambda x: flashkit.attention(Q, POOL, POOL, page_table=x, kv_lengths=[4, 6])
    ),
    "positions of rotary": ([4, 3, 1, 0, 2, 7, 8, 5, 6], lambda x: flashkit.rotary(Q, positions=x)),
    "positions of rotary_vjp": (
        [4, 3, 1, 0, 2, 7, 8, 5, 6], lambda x: flashkit.rotary_vjp(Q, *flashkit.rotary_table(9, 8), positions=x)
    ),
    "rows of weights": ([4, 3, 1], lambda x: flashkit.weights(Q, Q, rows=x)),
    "heads of weights": ([1, 0], lambda x: flashkit.weights(Q, Q, heads=x)),
}  # fmt: skip

DTYPES = [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]


def refused(errors: Any, call: Callable[[Any], Any], value: Any, argument: str, case: str) -> None:
    try:
        call(value)
    except errors as error:
        text = str(error)
        assert text.startswith(argument.partition(" ")[0]) or f"scaling['{argument.partition(' ')[0]}']" in text, text
        of_another_library = "torch" in argument and "one library" in text
        assert ("expected" in text and "got" in text) or of_another_library, (argument, case, text)
        assert len(text) < 300, (argument, case)
    else:
        pytest.fail(f"{argument} takes {case}")


def is_refused(errors: Any, call: Callable[[Any], Any], value: Any, name: str = "") -> bool:
    try:
        call(value)
    except errors as error:
        return name in str(error)
    return False


@pytest.mark.parametrize("argument", REAL)
def test_what_is_no_number(argument: str) -> None:
    for case, value in NO_NUMBER.items():
        refused(TypeError, REAL[argument], value, argument, case)
    for case, value in NO_FINITE.items():
        refused(ValueError, REAL[argument], value, argument, case)


@pytest.mark.parametrize("argument", INTEGERS)
def test_what_is_no_integer(argument: str) -> None:
    good, call = INTEGERS[argument]
    for case, value in NO_INTEGER.items():
        refused(TypeError, call, value, argument, case)
    for value in (-2, -(2**63), -(2**70), -(10**5000)):
        refused(ValueError, call, value, argument, str(value.bit_length()))
    right = call(good)
    for dtype in DTYPES:
        np.testing.assert_array_equal(call(np.array(good, dtype)), right)
        np.testing.assert_array_equal(call(np.dtype(dtype).type(good)), right)


@pytest.mark.parametrize("argument", ARRAYS)
def test_arrays_of_integers(argument: str) -> None:
    """Every dtype and order of bytes gives the same; what int64 does not hold, or is negative, is no number."""
    good, call = ARRAYS[argument]
    right = call(np.array(good))
    for dtype in DTYPES:
        np.testing.assert_array_equal(call(np.array(good, dtype)), right, err_msg=dtype)
        np.testing.assert_array_equal(call(np.repeat(np.array(good, dtype), 2, -1)[..., ::2]), right, err_msg=dtype)
    np.testing.assert_array_equal(call(good), right)
    for case, value in {
        "text": np.array(good).astype(str), "bools": np.array(good) > 0, "floats": np.array(good, float),
        "objects": np.array(good, object), "complex": np.array(good, complex),
        "dates": np.array(good).astype("M8[s]"), "bfloat16": np.array(good).astype(ml_dtypes.bfloat16),
        "masked": np.ma.masked_array(good, mask=np.zeros(np.shape(good))),
    }.items():  # fmt: skip
        assert is_refused((TypeError, ValueError), call, value), (argument, case)
    names = argument.partition(" ")[0].partition("[")[0]
    for at in np.ndindex(np.shape(good)):
        for dtype, numbers in {
            "<u8": [2**63, 2**64 - 1, 2**64 - 5, 2**63 + 9], ">u8": [2**63, 2**64 - 1, 2**64 - 5, 2**63 + 9],
            "<i8": [-(2**63), 2**63 - 1, -(2**63) + 9, 2**62, -(2**62)], ">i8": [-(2**63), 2**63 - 1, -(2**62)],
            "<u4": [2**32 - 1], ">i4": [-(2**31), 2**31 - 1],
        }.items():  # fmt: skip
            if (names, dtype) in {("q_offset", "<u4"), ("q_offset", ">i4")}:  # positions
                continue
            for n in numbers:
                given = np.array(good, dtype)
                given[at] = n
                if names == "positions" and 0 <= n < 2**48 and "vjp" not in argument:
                    continue
                assert is_refused(ValueError, call, given, names), (argument, n, dtype, at)


WRAPPING = [
    [0, 2**63 - 1, -(2**63) + 9], [0, 2**63 - 1, -2, 9], [-(2**63), 0, 9], [2**63 - 1, -(2**63), 9], [0, -(2**63), 9],
    [0, 2**62, 9], [0, 9, -(2**63)], [0, -1, 9], [1, 4, 9], [0, 4, 10], [0, 10, 9], [0, 5, 4, 9], [9], [-(2**63)],
]  # fmt: skip


@pytest.mark.parametrize("offsets", WRAPPING, ids=str)
@pytest.mark.parametrize("dtype", ["list", "<i8", ">i8"])
def test_offsets_whose_differences_wrap(offsets: list[int], dtype: str) -> None:
    """The last one is compared with the number of tokens, and each with the one before it."""
    given: Any = offsets if dtype == "list" else np.array(offsets, dtype)
    good = np.array([0] * (len(offsets) - 1) + [0])
    for cu_seqlens in (given, (given, good), (good, given)):
        for call in (flashkit.attention, flashkit.attention_vjp, flashkit.plan, flashkit.explain):
            with pytest.raises(ValueError, match="cu_seqlens"):
                call(T, T, T, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="cu_seqlens"):
        flashkit.attention(
            T, POOL, POOL, cu_seqlens=given, page_table=np.zeros((max(len(offsets) - 1, 1), 2), int),
            kv_lengths=[3] * max(len(offsets) - 1, 1),
        )  # fmt: skip


@pytest.mark.parametrize(
    "value", [2, 2.0, np.float16(2), np.array(2), np.array(2.0, ">f8"), np.int8(2), ml_dtypes.bfloat16(2)], ids=repr
)
def test_numbers_of_every_library_count(value: Any) -> None:
    assert number("x", value) == 2.0
    right = flashkit.attention(Q, Q, Q, scale=2.0, softcap=2.0)
    np.testing.assert_array_equal(flashkit.attention(Q, Q, Q, scale=value, softcap=value), right)
    for library in ("torch", "jax.numpy"):
        found = pytest.importorskip(library)
        assert number("x", found.asarray(2.0)) == integer("x", found.asarray(2), 0) == 2
        with pytest.raises(TypeError, match="x: expected a number, got"):
            number("x", found.asarray(True))
