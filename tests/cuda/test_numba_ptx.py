"""Instructions of PTX in Numba's kernels: each compiles to what it says and assembles. No device is needed."""

import re

import pytest

pytest.importorskip("numba_cuda")

PRODUCTS = """
    wgmma_fence(); s = fresh(l, l); s = more(s, l, l, 1); wgmma_commit(); wgmma_wait(0); s = fence_operand(s)
    o = filled(x[0], 32); w = packed(s); wgmma_fence(); o = weigh(o, w, l, 0); wgmma_commit()
    wgmma_wait(0); o = fence_operand(o); w = fence_operand(w); x[0] = o[0] + o[31]
"""
HEAD = """
from flashkit.backends.numba_cuda.fragments import *
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
    from flashkit.backends.numba_cuda import fragments, memory, ptx, specialise

    own = {name for module in vars(ptx).values() for name in getattr(module, "__all__", ())} | set(fragments.__all__)
    others = set(memory.__all__)
    for part in ("common/scalar", "common/tiles"):
        found = re.findall(r"^(?: {4})?def (\w+)|^(\w+) = ", specialise._part(part), re.MULTILINE)
        others |= {function or constant for function, constant in found}
    assert own
    assert not own & others
