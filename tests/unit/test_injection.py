"""No text of a caller reaches generated code but names, numbers and operations that are known."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit import mods
from flashkit.backends.cupy_raw import specialise as cupy_raw
from flashkit.backends.numba_cuda import modify as numba_cuda
from flashkit.call.arguments import prepare
from flashkit.mods import codegen, expr
from flashkit.mods.expr import Expr

Q = np.random.default_rng(0).standard_normal((3, 1, 2, 24, 8), np.float32)

TEXTS = [
    "x): import os; os.system('touch {file}')\ndef g(y", "__import__('os').system('touch {file}')",
    "x\n    raise SystemExit",
    "x=open('{file}', 'w')", 'x"', "x'", "x;", "x #", "x // y", "x\\", '#include "/etc/passwd"', "x\n#include <a>\n",
    "/* x", "x */",
    "", " ", "x y", "1x", "x.y", "x[0]", "lambda", "class", "None", "True", "__class__", "__x", "\ufb01x", "\u212b",
    "x\u0000", "x\u2028y",
    "x-y", "é é", "{{x}}", "%s", "x" + "\r" + "y",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_names_of_values(text: str, tmp_path: Any) -> None:
    name = text.replace("{file}", str(tmp_path / "made"))
    for value in (1, 1.5, np.ones(2, np.float32)):
        with pytest.raises(ValueError, match="a Python identifier"):
            mods.score(lambda s, b, h, q, k, **values: s + 1, **{name: value})
        with pytest.raises(ValueError, match="a Python identifier"):
            mods.mask(lambda b, h, q, k, **values: k <= q, **{name: value})
    for make in (
        lambda: expr.param(name, "int"), lambda: Expr("load", (expr.K,), name, "int"), lambda: expr.symbol(name + "!"),
        lambda: Expr(f"{name}!", (expr.K,)), lambda: Expr("load", (expr.K,), "a", name), lambda: Expr("const", (),
        name, "int"),
        lambda: expr.Array(name, 1, "int")[expr.K], lambda: expr.rename([expr.param("n", "int")], {"n": name}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no node of an expression"):
            make()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["x", "_", "_x", "λ", "größe", "np", "F", "I", "s", "b", "k0", "t1", "float", "int",
    "fk_high_x",
                                  "load_min", "v0", "os", "self", "count", "values", "tile", "modify", "match",
                                  "x1_"])  # fmt: skip
def test_every_other_name_works(name: str) -> None:
    """Also those that generated code uses itself."""
    table = np.array([0.5, 2.0], np.float32)
    whole = mods.score(lambda s, b, h, q, k, /, **values: s * values[name][h], **{name: table})
    alone = mods.score(lambda s, b, h, q, k, /, **values: s * values[name], **{name: 2.0})
    assert whole.evaluate(b=0, h=1, q=0, k=0, s=3.0) == alone.evaluate(b=0, h=1, q=0, k=0, s=3.0) == 6.0
    expected = flashkit.attention(*Q, score_mod=mods.score(lambda s, b, h, q, k, *, x: s * x[h], x=table))
    np.testing.assert_array_equal(flashkit.attention(*Q, score_mod=whole), expected)


class Number(float):
    """A float whose text is not a number."""

    def __repr__(self) -> str:
        return "__import__('os').system('false')"

    __str__ = __repr__


class Integer(int):
    __repr__ = __str__ = Number.__repr__


class Name(str):
    def __str__(self) -> str:
        return "x); evil("

    __repr__ = __str__

    def isidentifier(self) -> bool:
        return True


def test_numbers_that_print_as_something_else() -> None:
    graph = mods.score(lambda s, b, h, q, k: s * Number(2.0) + Integer(3)).expr
    for language in ("cuda", "numba", "numpy"):
        assert "import" not in "\n".join(codegen.render([graph], language)[0])
    assert mods.score(lambda s, b, h, q, k, *, x: s * x, x=Number(2.0)).evaluate(b=0, h=0, q=0, k=0, s=4.0) == 8.0
    with pytest.raises(ValueError, match="no node"):
        Expr("const", (), Number(2.0), "float")
    number = expr.const(918273645)  # equal nodes that exist are returned as they are
    with pytest.raises(ValueError, match="no node"):
        expr.param(Name("not_interned"), "int")
    with pytest.raises(ValueError, match="no node"):
        Expr(Name("add"), (expr.Q, number), None, "int")


def test_a_dtype_with_a_name_of_its_own() -> None:
    """Arrays of other libraries are recognised by an attribute, and any object can have it."""
    dtype = SimpleNamespace(name="float32); evil(", kind="f", isnative=True)
    array = SimpleNamespace(__cuda_array_interface__={}, dtype=dtype, ndim=1, shape=(2,), strides=(4,))
    with pytest.raises(TypeError, match=r"dtype|lies on a CUDA device"):
        mods.score(lambda s, b, h, q, k, *, x: s * x[h], x=array)


def test_names_of_functions_and_files_are_not_compiled() -> None:
    function = lambda s, b, h, q, k: s * 2.0
    function.__name__ = function.__qualname__ = '"\n#include "/etc/passwd"\n"""'
    function.__code__ = function.__code__.replace(co_filename="\n#error\n", co_name="\n#error\n")
    plain = flashkit.attention(*Q, score_mod=lambda s, b, h, q, k: s * 2.0)
    np.testing.assert_array_equal(flashkit.attention(*Q, score_mod=function), plain)


def test_kernels_name_values_themselves() -> None:
    """No name of the caller is in the text of any backend, whatever it is."""
    name = "a_name_of_the_caller"
    mod = mods.score(lambda s, b, h, q, k, **v: s * v[name][h] + v[name + "2"], **{name: np.ones(2), name + "2": 3})
    problem, _, _ = prepare(*Q, score_mod=mod)
    spec = replace(problem.spec, dtype="float32")
    from flashkit.backends.cpu import modify

    texts = [
        modify._tile_function(spec, True, False), modify._classify_function(spec), numba_cuda.text(spec),
        cupy_raw.source("simt/forward", spec, {}).text,
    ]  # fmt: skip
    assert all((name not in text and "v0" in text) or "classify" in text for text in texts)
    assert not any(name in text for text in texts)
