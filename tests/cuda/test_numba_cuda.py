"""The Numba CUDA kernels, compiled for the architectures in use, within their registers; their instructions of PTX.

tests/emulator runs them without a device, test_cuda_devices.py and test_conformance.py on one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_cuda_kernels import MASKS, SCORES, disassembled, spec_of
from tiles import MODELS

from flashkit.backends.cuda_common import compiler, simt
from flashkit.backends.cuda_common import params as fields
from flashkit.backends.numba_cuda import assemble, modify, specialise
from flashkit.backends.numba_cuda import compile as numbas
from flashkit.spec import AttentionSpec

pytestmark = pytest.mark.skipif(not find_spec("numba_cuda"), reason="numba-cuda is not installed")

FOLDER = Path(specialise.__file__).parent
PARTS = "forward", "dkdv", "dq"


def defined(text: str) -> Iterator[str]:
    """Names that a module's text gives a meaning to."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name))


KERNELS = sorted(
    str(path.relative_to(specialise.FOLDER).with_suffix(""))
    for path in specialise.FOLDER.rglob("*.py")
    if "\n@kernel(" in path.read_text()
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_name_means_one_thing_in_a_kernel(name: str) -> None:
    """Files and generated functions are one module: a second meaning would be that of the first file's functions."""
    generated = modify.text(spec_of(list(SCORES.values()), list(MASKS.values())))
    files = [(specialise.FOLDER / f"{part}.py").read_text() for part in ("common/scalar", *specialise.parts(name))]
    found = Counter(name for text in [generated, *files] for name in defined(text))
    assert [name for name, times in found.items() if times > 1] == []


# --- compiled ---------------------------------------------------------------------------------------------------------


def simt_kernel(part: simt.Part, spec: AttentionSpec, arch: str) -> tuple[compiler.Binary, compiler.Resources]:
    tile = simt.choose(part, spec, MODELS[arch])
    name = "simt/forward" if part == "forward" else "simt/backward"
    found = compiler.binary(specialise.source(name, spec, dict(tile.constants(part, spec))), arch)
    return found, found.resources[name.replace("/", "_")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("dtype", "d", "arch"),
    [("float32", 64, "sm_90a"), ("float32", 128, "sm_80"), ("float16", 96, "sm_90a"), ("bfloat16", 64, "sm_80")],
)
def test_simt_does_not_spill(dtype: str, d: int, part: simt.Part, arch: str) -> None:
    """Local arrays are registers, which a stack frame would belie; products are fused."""
    binary, found = simt_kernel(part, AttentionSpec(dtype, d, d), arch)
    assert 0 < found.registers <= 255
    assert found.spills <= (80 if part == "dkdv" else 0)  # bytes: addresses and bounds
    assert found.stack <= (80 if part == "dkdv" else 0)
    sass = disassembled(binary.path)
    assert len(re.findall(r"\bFFMA\b", sass)) > 200
    assert len(re.findall(r"\bLDS\.128\b", sass)) > 4


# --- from text to machine code ----------------------------------------------------------------------------------------

TINY = """
from numba import cuda, types
from flashkit.backends.numba_cuda.compile import kernel
from flashkit.backends.numba_cuda.memory import *
import numpy as np

@device
def double(x):
    return FACTOR * x

@kernel(64, 2, maps=("map_k",))
def tiny(p):
    i = np.int64(cuda.threadIdx.x)
    store(np.float64, p.q.data, i, double(load(np.float64, p.k.data, i)) * p.softmax_scale)
"""


def tiny(factor: int) -> numbas.PythonSource:
    return numbas.PythonSource("tiny", f"FACTOR = {factor}\n{TINY}", 1)


def test_a_kernel_takes_one_structure_and_its_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path))
    (function,) = numbas.kernels_of(numbas.module_of("tiny", tiny(2).text)).values()
    text = numbas._ptx(function, 1, "sm_90a")
    size = 8 * (fields.VALUES + 1)
    entry = f"tiny(.param .align 64 .b8 tiny_params[{size}], .param .align 64 .b8 map_k[128])"
    assert f".visible .entry {entry}" in text
    assert f"[tiny_params+{8 * fields.AT['k']}]" in text
    assert f"[tiny_params+{8 * fields.AT['softmax_scale']}]" in text
    assert ".maxntid 64" in text and ".target sm_90a" in text
    found = compiler.binary(tiny(2), "sm_90a")
    assert found.resources["tiny"].registers > 0
    monkeypatch.setattr(numbas.PythonSource, "compile", lambda *_: pytest.fail("compiled again"))
    assert compiler.binary(tiny(2), "sm_90a") == found


def test_a_changed_text_helper_layout_or_compiler_is_another_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [repr(tiny(2).made_from()), repr(tiny(3).made_from())]
    monkeypatch.setattr(numbas, "_helpers", lambda: (("memory.py", "changed"),))
    made.append(repr(tiny(2).made_from()))
    monkeypatch.setattr(numbas, "FIELDS", fields.FIELDS[1:])  # where a kernel finds its parameters
    made.append(repr(tiny(2).made_from()))
    monkeypatch.setattr(assemble, "program", lambda: Path(sys.executable))
    numbas._versions.cache_clear()
    made.append(repr(tiny(2).made_from()))
    numbas._versions.cache_clear()
    assert len(set(made)) == len(made)


def test_errors_have_the_compilers_words() -> None:
    with pytest.raises(compiler.CompileError, match=r"tiny does not compile for sm_80(?s:.*)nonsense"):
        compiler.binary(numbas.PythonSource("tiny", tiny(2).text.replace("FACTOR * x", "nonsense(x)"), 1), "sm_80")
    with pytest.raises(compiler.CompileError, match=r"wrong does not assemble for sm_80(?s:.*)syntax error"):
        assemble.machine_code("wrong", [".version 8.0\n.target sm_80\n.address_size 64\nnonsense"], "sm_80")


def test_without_an_assembler_the_sentence_says_what_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "_places", lambda: iter([Path("/nowhere/ptxas")]))
    assemble.program.cache_clear()
    try:
        with pytest.raises(compiler.CompileError, match="pip install nvidia-cuda-nvcc"):
            assemble.program()
    finally:
        assemble.program.cache_clear()


# --- instructions of PTX ----------------------------------------------------------------------------------------------

PRODUCTS = """
    wgmma_fence(); s = fresh(l, l); s = more(s, l, l, 1); wgmma_commit(); wgmma_wait(0); s = fence_operand(s)
    o = filled(x[0], 32); w = packed(s); wgmma_fence(); o = weigh(o, w, l, 0); wgmma_commit()
    wgmma_wait(0); o = fence_operand(o); w = fence_operand(w); x[0] = o[0] + o[31]
"""
HEAD = """
from flashkit.backends.numba_cuda.ptx import *
fresh = wgmma("bfloat16", 128, (0, 2), (0, 4), fresh=True)
more = wgmma("bfloat16", 128, (0, 2), (0, 4), trans_a=True, trans_b=True)
weigh = wgmma_registers("bfloat16", 64, tuple(range(0, 1024, 128)), trans_b=True)
from numba import cuda
device = cuda.jit(device=True, forceinline=True)
@device
def packed(s):
    return join(pack_bfloat16, s)
@device
def is_less(j, so_far, x):
    return so_far and x[j] < x[2]
"""


def ptx_of(body: str, capability: tuple) -> str:
    from numba import cuda
    from numba.cuda import types

    from flashkit.backends.numba_cuda import compile as ours

    names: dict = {}
    exec(f"{HEAD}\ndef kernel(x, i, l):\n    {body}\n", names)
    arguments = types.float32[::1], types.uint32[::1], types.int64
    with ours._for_capability(capability[:2]):
        return cuda.compile_ptx(names["kernel"], arguments, cc=capability)[0]


def test_sums_of_products_stay_where_they_are():
    """A chain of products names the same registers, and what is between them moves none."""
    from flashkit.backends.numba_cuda import assemble

    text = ptx_of(PRODUCTS.strip(), (9, 0, "a"))
    assert text.count("wgmma.mma_async") == 2 + 2 + 8
    _, report = assemble.machine_code("products", [text], "sm_90a")
    assert "C75" not in report
    assert "0 bytes spill stores" in report


def test_a_product_of_a_shape_that_there_is_not_is_refused():
    from flashkit.backends.numba_cuda import ptx

    with pytest.raises(ValueError, match="a multiple of 8"):
        ptx.wgmma("bfloat16", 100, (0,), (0,))


@pytest.mark.parametrize("n", [64, 128])
def test_operations_on_tiles_become_straight_code(n):
    """No loops, no calls, no local memory."""
    text = ptx_of(
        f"t = filled(x[thread()], {n}); m = across_row(greater, row_max(scaled(t, x[1]), (x[3], x[4])))\n"
        "    t = exponentials(t, m, x[2]); s = across_row(add, row_sum(rows_scaled(t, m), m)); x[0] = s[0] + s[1]",
        (8, 0),
    )
    assert text.count("shfl.sync.bfly") == 8
    for unwanted in ("call", ".local", ".func"):
        assert unwanted not in text


def test_steps_that_begin_with_a_constant_are_taken():
    """True is not what a condition over all steps is, only what it begins with."""
    text = ptx_of("x[0] = x[3] if all_lanes(repeat(is_less, 2, True, (x[0], x[1], x[2]))) else x[4]", (8, 0))
    assert len(re.findall(r"setp\.\w+\.f32", text)) == 2


def test_names_do_not_take_those_of_the_kernels_head():
    """Kernels' text has these names beside those of memory.py and of its other parts."""
    from flashkit.backends.numba_cuda import memory, ptx, specialise

    own = {name for module in vars(ptx).values() for name in getattr(module, "__all__", ())}
    others = set(memory.__all__)
    for part in ("common/scalar", "common/tiles"):
        found = re.findall(r"^(?: {4})?def (\w+)|^(\w+) = ", specialise._part(part), re.MULTILINE)
        others |= {function or constant for function, constant in found}
    assert own
    assert not own & others
