"""Instructions of PTX in Numba's kernels: each compiles to what it says and assembles. No device is needed."""

import re

import pytest

pytest.importorskip("numba_cuda")

AMPERE = {
    "ex2.approx.ftz.f32": "x[0] = exp2_fast(x[1])",
    "rcp.approx.ftz.f32": "x[0] = reciprocal(x[1])",
    "max.f32": "x[0] = greater(x[1], x[2])",
    "fma.rn.f32": "x[0] = fma(x[1], x[2], x[3])",
    "cvt.rn.f16x2.f32": "i[0] = pack_float16(x[0], x[1])",
    "cvt.rn.bf16x2.f32": "i[0] = pack_bfloat16(x[0], x[1])",
    "shfl.sync.idx": "i[0] = from_lane(i[1], 3); i[1] = opaque(i[2]); x[0] = from_lane_float(x[1], 1)",
    "shfl.sync.bfly": "x[0] = across(x[1], 2)",
    "vote.sync.ballot": "i[0] = vote(x[0] > x[1])",
    "vote.sync.all": "i[0] = all_lanes(x[0] > x[1])",
    "vote.sync.any": "i[0] = any_lane(x[0] > x[1])",
    "redux.sync.or": "i[0] = or_lanes(i[1])",
    "popc.b32": "i[0] = ones(i[1])",
    "bfind.shiftamt": "i[0] = lowest_set_bit(i[1])",
    "bar.warp.sync": "lanes_sync()",
    "bar.sync": "threads_sync(); named_barrier_sync(i[0], 64)",
    "bar.arrive": "named_barrier_arrive(i[0], 64)",
    "%tid.x": "i[0] = thread()",
    "%ctaid.x": "i[0] = block()",
    "%nctaid.x": "i[0] = blocks()",
    "%clock64": "i[0] = clock()",
    "atom.global.add.u32": "i[0] = fetch_add(l, 1)",
    "@p atom.global.inc.u32": "i[0] = count_if(l, i[0])",
    "red.relaxed.gpu.global.add.f32": "red_add(l, x[0])",
    "red.relaxed.gpu.global.or": "red_or(l, i[0])",
    "red.release.gpu.global.or": "red_or_release(l, i[0])",
    "ld.relaxed.gpu.global": "i[0] = load_relaxed(l)",
    "ld.shared.b32": "i[0] = load_word(shared_address() + 4)",
    "st.shared.b32": "store_word(shared_address(), i[0])",
    "st.shared.v4.b32": "store_zeros(shared_address(), 0)",
    "@q cp.async.cg.shared.global": "cp_async_if(shared_address(), l, i[0], i[1], i[0])",
    "ld.shared.v4.b32": "store_vec(l, load_vec(shared_address()))",
    "st.global.v4.b32": "store_vec(l, load_vec(shared_address()))",
    "cp.async.commit_group": "cp_async_commit()",
    "cp.async.wait_group 1": "cp_async_wait(1)",
    "ldmatrix.sync.aligned.m8n8.x4.shared": "r = ldmatrix_x4(shared_address()); i[0] = r[0] + r[3]",
    "ldmatrix.sync.aligned.m8n8.x4.trans": "r = ldmatrix_x4_trans(shared_address()); i[0] = r[0] + r[3]",
    "m16n8k16.row.col.f32.bf16": "x[0] = mma_bf16(filled(x[0], 4), ldmatrix_x4(0), i[0], i[1])[3]",
    "m16n8k16.row.col.f32.f16": "x[0] = mma_f16(filled(x[0], 4), ldmatrix_x4(0), i[0], i[1])[3]",
}
HOPPER = {
    "red.relaxed.gpu.global.add.v4.f32": "red_add_four(l, filled(x[0], 4))",
    "elect.sync": "i[0] = elect_one()",
    "mbarrier.init": "mbarrier_init(shared_address(), 1)",
    "fence.mbarrier_init": "fence_mbarrier_init()",
    "mbarrier.arrive.shared": "mbarrier_arrive(shared_address()); mbarrier_arrive_once(shared_address())",
    "mbarrier.arrive.expect_tx": "mbarrier_arrive_expect_tx(shared_address(), 128)",
    "mbarrier.try_wait.parity": (
        "mbarrier_wait_spin(shared_address(), 0)\n    while not mbarrier_try_wait(0, 1): nap(1000)"
    ),
    "fence.proxy.async": "fence_proxy_async()",
    "setmaxnreg.dec.sync.aligned.u32 24": "setmaxnreg_dec(24)",
    "setmaxnreg.inc.sync.aligned.u32 240": "setmaxnreg_inc(240)",
    "cp.async.bulk.tensor.5d.shared": "tma_load(shared_address(), l, shared_address(), 0, 1, 2, 3, 4)",
    "cp.async.bulk.tensor.5d.global": "tma_store(l, shared_address(), 0, 1, 2, 3, 4)",
    "cp.async.bulk.commit_group": "bulk_commit()",
    "cp.async.bulk.wait_group.read 1": "bulk_wait_read(1)",
    "cp.async.bulk.wait_group 0": "bulk_wait()",
    "cp.async.bulk.shared::cluster.global.mbarrier": "load_bulk(shared_address(), l, 256, shared_address())",
    "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": (
        "add_bulk_once(l, shared_address(), 1024); bulk_commit()"
    ),
    "st.shared.v4.f32": "store_four(shared_address(), filled(x[0], 4))",
    "stmatrix.sync.aligned.m8n8.x4.shared": "stmatrix_x4(shared_address(), i[0], i[1], i[2], i[3])",
    "stmatrix.sync.aligned.m8n8.x4.trans": "stmatrix_x4_trans(shared_address(), i[0], i[1], i[2], i[3])",
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16": (
        "wgmma_fence(); s = fresh(l, l); s = more(s, l, l, 1); wgmma_commit(); wgmma_wait(0); s = fence_operand(s)\n"
        "    o = filled(x[0], 32); w = packed(s); wgmma_fence(); o = weigh(o, w, l, 0); wgmma_commit()\n"
        "    wgmma_wait(0); o = fence_operand(o); w = fence_operand(w); x[0] = o[0] + o[31]"
    ),
}  # fmt: skip
HEAD = """
from flashkit.backends.numba_cuda.fragments import *
from flashkit.backends.numba_cuda.ptx import *
mma_bf16, mma_f16 = mma("bfloat16"), mma("float16")
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


@pytest.mark.parametrize(
    ("instruction", "body", "capability"),
    [(*each, (8, 0)) for each in AMPERE.items()] + [(*each, (9, 0, "a")) for each in HOPPER.items()],
    ids=[*AMPERE, *HOPPER],
)
def test_an_instruction_is_what_it_says(instruction, body, capability):
    from flashkit.backends.numba_cuda import assemble

    text = ptx_of(body, capability)
    assert instruction in text
    code, _ = assemble.machine_code("instruction", [text], "sm_" + "".join(map(str, capability)))
    assert code.startswith(b"\x7fELF")


def test_sums_of_products_stay_where_they_are():
    """A chain of products names the same registers, and what is between them moves none."""
    from flashkit.backends.numba_cuda import assemble

    text = ptx_of(HOPPER["wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16"], (9, 0, "a"))
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
