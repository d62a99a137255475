"""The examples in public docstrings run, and every public name has the sections of numpydoc."""

import doctest
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flashkit
from flashkit import mods
from flashkit.api import Vjp
from flashkit.call.explanation import Explanation

MODULES = [
    "api", "call.merge", "call.planned", "call.explanation", "call.weights", "dispatch", "errors", "mods.block_mask",
    "mods.expr.functions", "mods.library", "mods.mod", "mods.patterns", "devices.io_model",
    "reference.algorithms", "reference.definition", "rope.apply", "rope.tables",
]  # fmt: skip
MASK = flashkit.BlockMask


def public() -> Iterator[tuple[str, Any]]:
    """Every public function, class and constructor by name."""
    for module in (flashkit, mods):
        for name in module.__all__:
            member = getattr(module, name)
            if callable(member) and name not in ("ModKind", "after"):
                yield name, member
    yield "Vjp.__call__", Vjp.__call__
    yield "Planned.__call__", flashkit.Planned.__call__
    for name in ("append", "attend", "fork", "trim", "free"):
        yield f"KVCache.{name}", getattr(flashkit.KVCache, name)
    yield "Mod.then", mods.Mod.then
    yield "Mod.evaluate", mods.Mod.evaluate
    constructors = (name for name in vars(MASK.__mro__[1]) if not name.startswith("_"))
    for name in ("from_mod", "from_dense", "rows", *(n for n in constructors if inspect.ismethod(getattr(MASK, n)))):
        yield f"BlockMask.{name}", getattr(MASK, name)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"flashkit.{module}")).failed == 0


@pytest.mark.parametrize(("name", "member"), [pytest.param(*each, id=each[0]) for each in public()])
def test_public_names_have_numpydoc_sections(name: str, member: Any) -> None:
    text = inspect.getdoc(member) or ""
    assert text.split("\n\n")[0].endswith(".") and "Examples\n--------\n>>> " in text
    if inspect.isclass(member):
        return
    parameters = [p for p in inspect.signature(member).parameters if p not in ("self", "cls")]
    assert "Returns\n-------\n" in text or inspect.signature(member).return_annotation in ("Mod", "None", "Prediction")
    assert not parameters or "Parameters\n----------\n" in text
    described = text.partition("Parameters\n----------\n")[2].partition("\n\n")[0]
    heads = "\n".join(line for line in described.splitlines() if not line.startswith(" "))
    assert [parameter for parameter in parameters if parameter not in re.findall(r"\w+", heads)] == []
    section = re.split(r"\n\n[A-Z]\w+\n-+\n", text.partition("Parameters\n----------\n")[2])[0]
    sentences = [line for line in section.splitlines() if re.match(r"\S.*( \w+ \w+ |\.$)", line)]
    assert sentences == []  # the site shows what is not indented as a name


@pytest.mark.parametrize("library", ["jax", "dask", "onnx", "torch", "transformers"])
def test_modules_for_other_libraries(library: str) -> None:
    if library != "onnx":
        pytest.importorskip(library)
    test_examples_run(library)
    module = importlib.import_module(f"flashkit.{library}")
    for name in module.__all__:
        if name != "Outputs":
            test_public_names_have_numpydoc_sections(name, getattr(module, name))


def test_distributed() -> None:
    pytest.importorskip("mpi4py")
    from flashkit import distributed

    test_examples_run("distributed.comm")
    test_examples_run("distributed.explanation")
    test_public_names_have_numpydoc_sections("predict", distributed.predict)
    text = inspect.getdoc(distributed.Prediction) or ""
    assert [name for name in distributed.Prediction.__annotations__ if name not in text] == []


def test_explanations_describe_every_attribute() -> None:
    text = inspect.getdoc(Explanation) or ""
    assert [name for name in Explanation.__annotations__ if name not in text] == []


def test_the_site_shows_the_types_of_parameters() -> None:
    conf = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "conf.py"))
    add_types, shown = conf["add_types"], conf["name_modules"](*[None] * 5, "(x, xp=<module 'numpy' from '/a'>)", None)
    assert shown == ("(x, xp=numpy)", None)  # no path of the machine that builds it
    for function, shown in (
        (flashkit.attention, {"q, k, v : array", "scale : float | None", "causal : bool", "return_lse : bool",
                              "window : tuple[int | None, int | None] | None", "out : array", "kv_lengths : array"}),
        (mods.softcap, {"cap : float", "Returns", "Mod"}),
    ):  # fmt: skip
        lines = (inspect.getdoc(function) or "").splitlines()
        add_types(None, "function", "", function, None, lines)
        assert shown <= set(lines), shown - set(lines)
