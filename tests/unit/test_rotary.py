"""Rotary embedding against its definition in float64, tables against those of transformers, and what it refuses."""

from typing import Any

import numpy as np
import pytest
from operands import numbers

import flashkit
from flashkit.rope.apply import checked_table, rotated

DTYPES = ("float64", "float32", "float16", "bfloat16")
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0, "original_max_position_embeddings": 512},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
    "yarn of DeepSeek": {
        "factor": 40.0, "original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 0.707,
        "beta_fast": 24.0, "beta_slow": 2.0,
    },
    "yarn of gpt-oss": {"factor": 32.0, "original_max_position_embeddings": 512, "truncate": False},
}  # fmt: skip


def definition(x: np.ndarray, positions: np.ndarray, dims: int, interleaved: bool, sign: int = 1) -> np.ndarray:
    """Each pair as a complex number, multiplied by e^(i * position * base^(-2j / dims)). x (..., N, D), float64."""
    out = x.astype("f8")
    turn = np.exp(1j * sign * positions[..., None] * 10000.0 ** (-np.arange(0, dims, 2) / dims))
    first, second = (np.s_[0:dims:2], np.s_[1:dims:2]) if interleaved else (np.s_[: dims // 2], np.s_[dims // 2 : dims])
    z = (x[..., first].astype("f8") + 1j * x[..., second].astype("f8")) * turn
    out[..., first], out[..., second] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dims", [16, 12, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_turn_by_their_positions(dtype: str, dims: int, interleaved: bool) -> None:
    x = numbers(2, 3, 20, 16, dtype=dtype)
    positions = np.random.default_rng(1).integers(0, 300, (2, 20))
    eps = {"float64": 2e-16, "float32": 6e-8, "float16": 5e-4, "bfloat16": 4e-3}[dtype]
    for sign, function in ((1, flashkit.rotary), (-1, flashkit.rotary_vjp)):
        exact = definition(x, positions[:, None], dims, interleaved, sign)
        tables = flashkit.rotary_table(300, dims, dtype="float64")
        for out in (
            function(x, *tables, positions=positions, interleaved=interleaved),
            function(x, positions=positions, dims=dims, interleaved=interleaved),
        ):
            assert out.dtype == x.dtype
            # Three roundings, of angles' functions and of products, and that of the result.
            limit = (eps + 3 * (2e-14 if dtype == "float64" else 6e-8)) * np.abs(exact).max()
            np.testing.assert_allclose(out.astype("f8"), exact, rtol=0, atol=limit)
            assert np.array_equal(out[..., dims:], x[..., dims:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_computes_the_expressions(dtype: str, interleaved: bool) -> None:
    """CuPy arrays are rotated by `rotated`, NumPy arrays by the kernel."""
    x, tables = numbers(2, 3, 37, 24, dtype=dtype), flashkit.rotary_table(37, 20)
    table = checked_table(*tables, interleaved, x, dtype)
    found = flashkit.rotary(x, *tables, interleaved=interleaved).astype("f8")
    expected = rotated(x, table, np.arange(37)).astype("f8")
    # One rounding: a compiler may fuse a product and a sum.
    eps = float(np.finfo("f8" if dtype == "float64" else "f4").eps) if "6" not in dtype[:7] else 1e-2
    np.testing.assert_allclose(found, expected, rtol=0, atol=4 * eps)


def test_layouts_shapes_and_strides_are_the_same_numbers() -> None:
    cos_sin = flashkit.rotary_table(50, 16)
    x = numbers(2, 3, 20, 16)
    positions = np.arange(7, 27)
    whole = flashkit.rotary(x, *cos_sin, positions=positions)
    same = [
        flashkit.rotary(x.swapaxes(1, 2), *cos_sin, positions=positions, layout="bnhd").swapaxes(1, 2),
        flashkit.rotary(x[None], *cos_sin, positions=positions)[0],
        np.stack([flashkit.rotary(each, *cos_sin, positions=positions) for each in x]),
        flashkit.rotary(np.asfortranarray(x), *cos_sin, positions=positions),
        flashkit.rotary(x[..., ::-1].copy()[..., ::-1], *cos_sin, positions=positions),
        flashkit.rotary(np.concatenate([x, x], -1)[..., :16], *cos_sin, positions=positions),
        flashkit.rotary(x, *cos_sin, positions=np.stack([positions, positions]).astype(np.uint8)),
        flashkit.rotary(x, *cos_sin, positions=positions.tolist()),
        flashkit.rotary(x, *(table[7:] for table in cos_sin)),
    ]
    for each in same:
        assert np.array_equal(each, whole)
    assert np.array_equal(flashkit.rotary(x[0, 0], *cos_sin, positions=positions), whole[0, 0])
    packed = flashkit.rotary(x[0].swapaxes(0, 1), *cos_sin, positions=positions, layout="bnhd")
    assert np.array_equal(packed.swapaxes(0, 1), whole[0])
    broadcast = flashkit.rotary(np.broadcast_to(x[:1], x.shape), *cos_sin, positions=positions)
    assert np.array_equal(broadcast, np.stack([whole[0], whole[0]]))


def test_out_may_be_the_array_itself_or_overlap_it() -> None:
    cos_sin = flashkit.rotary_table(50, 16)
    for interleaved in (False, True):
        x = numbers(2, 3, 20, 16)
        whole = flashkit.rotary(x, *cos_sin, interleaved=interleaved)
        out = np.full_like(x, np.nan)
        assert flashkit.rotary(x, *cos_sin, interleaved=interleaved, out=out) is out
        assert np.array_equal(out, whole)
        gaps = np.full((2, 3, 20, 32), np.nan, np.float32)[..., ::2]
        flashkit.rotary(x, *cos_sin, interleaved=interleaved, out=gaps)
        assert np.array_equal(gaps, whole)
        five = np.full((20, 1, 2, 3, 16), np.nan, np.float32).transpose(1, 2, 3, 0, 4)
        flashkit.rotary(x[None], *cos_sin, interleaved=interleaved, out=five)
        assert np.array_equal(five[0], whole)
        memory = np.empty(x.size + 8, np.float32)
        source, target = memory[: x.size].reshape(x.shape), memory[8:].reshape(x.shape)
        source[...] = x
        flashkit.rotary(source, *cos_sin, interleaved=interleaved, out=target)
        assert np.array_equal(target, whole)
        assert flashkit.rotary(x, *cos_sin, interleaved=interleaved, out=x) is x
        assert np.array_equal(x, whole)


def test_the_gradient_is_the_transposed_rotation() -> None:
    """<rotary(x), y> = <x, rotary_vjp(y)>, with tables of a factor too."""
    scaling = {"rope_type": "yarn", **SCALINGS["yarn"]}
    x, y = numbers(2, 9, 16, dtype="float64"), numbers(2, 9, 16, seed=1, dtype="float64")
    cos_sin = flashkit.rotary_table(9, 12, scaling=scaling, dtype="float64")
    assert cos_sin[0][0, 0] == pytest.approx(0.1 * np.log(4) + 1)
    left, right = (flashkit.rotary(x, *cos_sin) * y).sum(), (x * flashkit.rotary_vjp(y, *cos_sin)).sum()
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_are_those_of_transformers(name: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed: nothing to compare with")
    pytest.importorskip("transformers", reason="transformers is not installed: nothing to compare with")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = name.split()[0]
    scaling = {"rope_type": kind, **SCALINGS[name]}
    trained = 512
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=trained,
        rope_parameters={**scaling, "rope_theta": 50000.0},
    )  # fmt: skip
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=2000)
    angles = np.arange(2000)[:, None] * inverse.numpy().astype("f8")
    given: dict[str, Any]
    for given in ({"base": 50000.0, "scaling": scaling}, {"scaling": {**scaling, "rope_theta": 50000.0}}):
        cos, sin = flashkit.rotary_table(2000, 64, dtype="float64", **given)
        # Theirs are float32 frequencies: the angle's error grows with the position.
        np.testing.assert_allclose(cos, np.cos(angles) * factor, atol=2000 * 3e-7)
        np.testing.assert_allclose(sin, np.sin(angles) * factor, atol=2000 * 3e-7)
        np.testing.assert_allclose(sin[:3], np.sin(angles[:3]) * factor, atol=2e-6)


def test_ntk_scales_the_base() -> None:
    scaled = flashkit.rotary_table(100, 32, base=10000.0, scaling={"type": "ntk", "factor": 4.0})
    assert all(map(np.array_equal, scaled, flashkit.rotary_table(100, 32, base=10000.0 * 4 ** (32 / 30))))
    # The slowest pair turns as if positions were interpolated.
    linear = flashkit.rotary_table(100, 32, scaling={"type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled[1][:, -1], linear[1][:, -1], rtol=1e-5)


@pytest.mark.parametrize("longest", [8, 9, 10, 300])
def test_a_scaling_by_the_positions_in_use_counts_them(longest: int) -> None:
    """From 0 to the greatest one: "dynamic" changes the base behind 9 positions."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}
    x, positions = numbers(3, 4, 16, dtype="float64"), np.array([0, longest - 1, 3, 2])
    tables = flashkit.rotary_table(longest, 16, scaling=scaling, dtype="float64")
    found = flashkit.rotary(x, positions=positions, scaling=scaling)
    np.testing.assert_allclose(found, flashkit.rotary(x, *tables, positions=positions), atol=1e-12)


X = numbers(2, 3, 5, 16)
COS, SIN = flashkit.rotary_table(9, 16)
YARN = {"rope_type": "yarn", **SCALINGS["yarn"]}
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": (lambda: flashkit.rotary([1.0]), TypeError, "x: expected .* got a builtins.list"),
    "integers": (lambda: flashkit.rotary(np.zeros((3, 4), int)), TypeError, "x: expected .* got int64"),
    "one axis": (lambda: flashkit.rotary(X[0, 0, 0]), ValueError, r"x: .* got \(16,\)"),
    "dout": (lambda: flashkit.rotary_vjp([1.0]), TypeError, "dout: expected .* got a builtins.list"),
    "cos alone": (lambda: flashkit.rotary(X, COS), TypeError, "sin: .* got None"),
    "whole rows": (lambda: flashkit.rotary(X, np.tile(COS, 2), np.tile(SIN, 2)), ValueError, r"pass cos\[:, : 8\]"),
    "unequal": (lambda: flashkit.rotary(X, COS, SIN[1:]), ValueError, "sin: expected the shape of cos"),
    "integer tables": (lambda: flashkit.rotary(X, COS.astype(int), SIN), TypeError, "cos: .* got int64"),
    "base with tables": (lambda: flashkit.rotary(X, COS, SIN, base=3.0), TypeError, "not both"),
    "a position too far": (lambda: flashkit.rotary(X, COS, SIN, positions=[0, 1, 2, 3, 9]), ValueError, "from 0 to 9"),
    "a negative position": (lambda: flashkit.rotary(X, COS, SIN, positions=[-1, 1, 2, 3, 4]), ValueError, "from -1"),
    "no table for N": (lambda: flashkit.rotary(X, COS[:4], SIN[:4]), ValueError, "0 to 3, the table's rows"),
    "positions' shape": (lambda: flashkit.rotary(X, COS, SIN, positions=[0, 1]), ValueError, "positions: .* shape"),
    "positions of floats": (lambda: flashkit.rotary(X, COS, SIN, positions=np.arange(5.0)), TypeError, "got an array"),
    "odd dims": (lambda: flashkit.rotary(X, dims=7), ValueError, "dims: .* even .* got 7"),
    "many dims": (lambda: flashkit.rotary(X, dims=18), ValueError, "cos: expected shape"),
    "layout": (lambda: flashkit.rotary(X, layout="hnd"), ValueError, "layout: expected .* got 'hnd'"),
    "interleaved": (lambda: flashkit.rotary(X, interleaved=1), TypeError, "interleaved: .* got 1"),
    "out's shape": (lambda: flashkit.rotary(X, out=X[0]), ValueError, "out: expected .*shape"),
    "out's dtype": (lambda: flashkit.rotary(X, out=X.astype("f8")), TypeError, "out: expected dtype"),
    "n": (lambda: flashkit.rotary_table(-1, 16), ValueError, "n, .* got -1"),
    "base": (lambda: flashkit.rotary_table(9, 16, base=0.5), ValueError, "base: .* got 0.5"),
    "table's dtype": (lambda: flashkit.rotary_table(9, 16, dtype="float16"), TypeError, "dtype: .* got 'float16'"),
    "scaling": (lambda: flashkit.rotary_table(9, 16, scaling=2.0), TypeError, "scaling: .* got 2.0"),
    "a type": (lambda: flashkit.rotary_table(9, 16, scaling={"type": "longrope"}), ValueError, "got 'longrope'"),
    "no type": (lambda: flashkit.rotary_table(9, 16, scaling={"factor": 2.0}), ValueError, "rope_type.*got None"),
    "no factor": (lambda: flashkit.rotary_table(9, 16, scaling={"type": "linear"}), ValueError, "'factor'.*got none"),
    "a factor of 0": (
        lambda: flashkit.rotary_table(9, 16, scaling={"type": "linear", "factor": 0}), ValueError, "'factor'.*got 0"
    ),
    "another's number": (lambda: flashkit.rotary_table(9, 16, scaling={**YARN, "low_freq_factor": 1.0}), ValueError,
                         "unexpected 'low_freq_factor'"),
    "two bases": (
        lambda: flashkit.rotary_table(9, 16, base=2.0, scaling={"rope_theta": 3.0}), ValueError, "base: .* 3.0, .* 2.0"
    ),
    "low above high": (
        lambda: flashkit.rotary_table(9, 16, scaling={"type": "llama3", **SCALINGS["llama3"], "low_freq_factor": 5}),
        ValueError, "low_freq_factor.*expected less than",
    ),
    "dynamic of a pair": (
        lambda: flashkit.rotary_table(9, 2, scaling={"type": "ntk", "factor": 2}), ValueError, "dims: .* got 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_an_error_that_names_it(name: str) -> None:
    call, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        call()
