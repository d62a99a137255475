"""The Numba CUDA kernels for tensor cores without a device: compiled, they hold their tiles in registers and use the
instructions meant; the one for Ampere is run as Python too, lane by lane. On a device they run with
test_cuda_devices.py and test_conformance.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lanes
import lanes_hopper
import numpy as np
import pytest
from operands import OnDevice, on_device
from test_cuda_kernels import disassembled

import flashkit
from flashkit.backends.cuda_common import arguments as block
from flashkit.backends.cuda_common import compiler, sm90_bwd_launch
from flashkit.backends.cuda_common.device import MODELS
from flashkit.backends.numba_cuda import sm80, sm80_decode, sm90, specialise
from flashkit.backends.numba_cuda.sm90 import backward_kernel
from flashkit.call.arguments import prepare
from flashkit.spec import AttentionSpec, Problem

pytestmark = pytest.mark.skipif(not find_spec("numba_cuda"), reason="numba-cuda is not installed")

HOPPER = MODELS["sm_90a"]


def spec_of(dtype: str, d: int, **options: object) -> AttentionSpec:
    q = np.zeros((1, 2, 300, d), np.float16)
    problem, _, _ = prepare(q, q, q, **options)
    return replace(problem.spec, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "d", "options", "spilled"),
    [
        ("bfloat16", 128, {}, 64),
        pytest.param("float16", 64, {"causal": True, "sinks": np.zeros(2)}, 1024, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 256, {"kv_lengths": np.array([9])}, 512, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 80, {"softcap": 5.0, "dropout_p": 0.1, "seed": 1}, 512, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_hoppers_forward_pass(dtype: str, d: int, options: dict, spilled: int) -> None:
    """Products are not serialised (or `binary` raises); little is spilled, in code that runs once an item."""
    spec = spec_of(dtype, d, **options)
    constants = sm90.forward_tile(Problem(spec, 1, 2, 300, 300)).constants(spec, 1)
    binary = compiler.binary(specialise.source("sm90/forward", spec, constants), "sm_90a")
    resources = binary.resources["sm90_forward"]
    assert resources.registers in (128, 168)
    assert resources.spills <= spilled
    code = disassembled(binary.path)
    for instruction in ("HGMMA.64x", "UTMALDG.5D", "UTMASTG.5D", "SYNCS.PHASECHK", "USETMAXREG", "STSM"):
        assert instruction in code


@pytest.mark.parametrize(
    ("dtype", "d", "options"),
    [
        ("bfloat16", 128, {}),
        pytest.param("bfloat16", 64, {}, marks=pytest.mark.exhaustive),
        pytest.param("float16", 128, {"causal": True}, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 64, {"causal": True, "deterministic": True}, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 96, {"kv_lengths": np.array([9])}, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 80, {"softcap": 5.0, "dropout_p": 0.1, "seed": 1}, marks=pytest.mark.exhaustive),
        ("bfloat16", 256, {}),
        pytest.param("float16", 192, {"causal": True, "deterministic": True}, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_hoppers_backward_pass(dtype: str, d: int, options: dict) -> None:
    """The wgmmas that the text asks for and no more, none serialised (or `binary` raises), no wait added by ptxas, and
    few spills in the loop over query tiles; the rest is in code that runs once a work tile, or in the producer warp
    group.
    """
    spec = spec_of(dtype, d, **options)
    tile = sm90_bwd_launch.backward_tile(spec)
    binary = compiler.binary(specialise.source(backward_kernel(spec), spec, tile.constants(spec)), "sm_90a")
    assert binary.resources["bwd_preprocess"].spills == binary.resources["bwd_postprocess"].spills == 0
    assert binary.resources["sm90_backward"].spills <= (128 if not options else 640)
    code = disassembled(binary.path)
    code = code[code.index(".text.sm90_backward:") :]
    lines = code[: code.find(".section", 10)].splitlines()
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    # S twice, of the first tile and of the next one; dQ twice, in the loop and after it. In a cluster dQ of half the
    # columns, from the keys of both CTAs.
    cluster, chunks = sm90_bwd_launch.cluster_size(spec) > 1, -(-d // 64)
    of_queries = (chunks + 1) // 2 if cluster else 2
    expected = 3 * -(-d // 16) + 2 * tile.block_q // 16 + of_queries * tile.block_k // 16
    assert len(products) == expected
    assert sum("WARPGROUP.DEPBAR" in line for line in lines) == (8 if cluster else 6)
    assert not any("MEMBAR.ALL.GPU" in line for line in lines[products[0] : products[-1]])
    spilled = [line for line in lines[products[0] : products[-1]] if re.search(r"\b(STL|LDL)", line)]
    assert len(spilled) <= 60
    stores = ["UTMASTG.5D", *([] if cluster else ["UBLKRED"]), *([] if spec.deterministic else ["REDG.E.ADD.F32"])]
    dsmem = ["UBLKCP.S.S", "UCGABAR_ARV", "SYNCS.ARRIVE.TRANS64.RED"] if cluster else []
    for instruction in ("HGMMA.64x", "UTMALDG.5D", "UBLKCP", *stores, *dsmem, "SYNCS.PHASECHK", "USETMAXREG", "STSM"):
        assert instruction in code


ARCHS = "sm_80", pytest.param("sm_90a", marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "d", "options"),
    [
        ("bfloat16", 64, {}),
        ("float16", 128, {"causal": True}),
        pytest.param("bfloat16", 256, {}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_forward_pass_by_mma(dtype: str, d: int, options: dict, arch: str) -> None:
    spec, device = spec_of(dtype, d, **options), MODELS[arch]
    tile, *_ = sm80.forward_tiles(spec, device)
    binary = compiler.binary(specialise.source("sm80/forward", spec, tile.constants(spec, device)), arch)
    assert binary.resources["sm80_forward"].spills <= 192
    code = disassembled(binary.path)
    for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS"):
        assert instruction in code


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "d", "options"), [("bfloat16", 64, {}), ("float16", 128, {"causal": True})])
def test_few_queries_by_mma(dtype: str, d: int, options: dict, arch: str) -> None:
    spec, device = spec_of(dtype, d, **options), MODELS[arch]
    tile, *_ = sm80_decode.decode_tiles(spec, device)
    binary = compiler.binary(specialise.source("sm80/decode", spec, tile.constants(spec, device)), arch)
    assert [binary.resources[kernel].spills for kernel in ("sm80_decode", "combine")] == [0, 0]
    code = disassembled(binary.path)
    for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS"):
        assert instruction in code


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "d", "options", "spilled"),
    [
        ("bfloat16", 128, {}, 96),
        pytest.param("float16", 128, {"causal": True}, 128, marks=pytest.mark.exhaustive),
        pytest.param("float16", 64, {"causal": True, "sinks": np.zeros(2)}, 96, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 80, {"softcap": 5.0, "dropout_p": 0.1, "seed": 1}, 1200, marks=pytest.mark.exhaustive),
        pytest.param("bfloat16", 256, {}, 64, marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_the_backward_pass_by_mma(dtype: str, d: int, options: dict, spilled: int, arch: str) -> None:
    if d > 128 and arch == "sm_80":
        pytest.skip("its shared memory holds a small tile alone, whose sums are spilled")
    spec, device = spec_of(dtype, d, **options), MODELS[arch]
    tile, *_ = sm80.backward_tiles(spec, device)
    binary = compiler.binary(specialise.source("sm80/backward", spec, tile.constants(spec, device)), arch)
    assert binary.resources["sm80_backward"].spills <= spilled
    # The rare part, where a hidden pair may have met NaN, makes do with what leaves room for many threads.
    assert binary.resources["bwd_postprocess"].spills <= (192 if options else 0)
    code = disassembled(binary.path)
    for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS"):
        assert instruction in code
    assert ("ADD.F32x4" in code) == (arch == "sm_90a")


def problem(**changes: object) -> Problem:
    sizes = {"batch": 1, "heads": 64, "n_q": 4096, "n_k": 4096, **changes}
    spec = AttentionSpec(str(sizes.pop("dtype", "bfloat16")), int(sizes.pop("d", 128)), 128)  # type: ignore[call-overload]
    return Problem(spec, **sizes)  # type: ignore[arg-type]


REFUSALS = [
    ({"d": 84}, "not whole 16 bytes"),
    ({"d": 264}, "head dim 264 is over 256"),
]


def generation(name: str) -> Any:
    from flashkit.backends.numba_cuda.backend import NumbaCudaBackend

    (chosen,) = (each for each in NumbaCudaBackend.generations if each.name == name)
    return chosen


NO_FLOAT32 = {"dtype": "float32"}, "float32 is not for these tensor cores"


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_what_a_generation_cannot_do_is_refused(changes: dict, reason: str, name: str) -> None:
    assert generation(name).supports(problem(), HOPPER, "forward")
    assert generation(name).supports(problem(), HOPPER, "backward")
    assert reason in generation(name).supports(problem(**changes), HOPPER, "forward").reason


def test_float32_is_split_where_it_repays_and_is_exact() -> None:
    def answer(**changes: object) -> Any:
        return generation("sm80").supports(problem(dtype="float32", **changes), HOPPER, "forward")

    assert answer() and answer(d=84)
    assert "few queries" in answer(n_q=9).reason
    assert "exacter without TF32" in answer(d=8).reason
    assert "not by fours" in answer(d=82).reason
    assert "float32 is not for these" in generation("sm90").supports(problem(dtype="float32"), HOPPER, "forward").reason


@pytest.mark.parametrize("changes", [{"n_q": 9}, {"heads": 2, "n_q": 300, "n_k": 9000}])
def test_keys_are_split_where_queries_would_leave_the_device_idle(changes: dict) -> None:
    few = problem(**changes)
    assert not generation("sm90").supports(few, HOPPER, "forward")
    assert generation("sm80").supports(few, HOPPER, "forward")
    assert isinstance(generation("sm80").candidates(few, HOPPER, "forward")[0], sm80_decode.DecodeTile)
    assert isinstance(generation("sm80").candidates(problem(), HOPPER, "forward")[0], sm80.Tile)


def test_what_the_backward_pass_by_mma_cannot_do_is_refused() -> None:
    chosen = generation("sm80")
    for changes, reason in (*REFUSALS, NO_FLOAT32):
        assert reason in chosen.supports(problem(**changes), HOPPER, "backward").reason
    assert chosen.supports(problem(n_q=9), HOPPER, "backward")
    assert chosen.supports(problem(heads=2, n_q=300, n_k=9000), HOPPER, "backward"), "it has blocks enough, by keys"
    assert chosen.supports(problem(d=256), HOPPER, "backward")
    small = replace(HOPPER, shared_per_block=20_000)
    assert "no tile fits in 20000 bytes" in chosen.supports(problem(), small, "backward").reason


def test_what_hoppers_backward_pass_cannot_do_is_refused() -> None:
    chosen = generation("sm90")
    for changes, reason in (*REFUSALS, NO_FLOAT32):
        assert reason in chosen.supports(problem(**changes), HOPPER, "backward").reason
    assert "not sm_90" in chosen.supports(problem(), MODELS["sm_80"], "backward").reason


def test_tiles_are_checked() -> None:
    with pytest.raises(ValueError, match="block_q is 64, 128 or 192"):
        sm90.Tile(100, 128)
    with pytest.raises(ValueError, match="block_k a multiple of 16"):
        sm80.Tile(128, 24)
    with pytest.raises(ValueError, match="stages are one or two"):
        sm80.Tile(64, 64, 3)
    with pytest.raises(ValueError, match="in groups of 32 rows"):
        sm80.BackwardTile(32, 32)
    tiles = sm90.forward_candidates(problem(), HOPPER)
    assert tiles[0] == sm90.forward_tile(problem())
    assert all(tile.shared_memory(problem().spec) <= HOPPER.shared_per_block for tile in tiles)


def test_the_tutorial_shows_the_kernels_own_lines() -> None:
    root = Path(__file__).resolve().parents[2]
    folder = root / "flashkit" / "backends" / "numba_cuda"
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    excerpts = re.findall(r"^```python excerpt\n(.*?)^```$", (root / "docs/numba_hopper.md").read_text(), re.S | re.M)
    assert len(excerpts) > 5
    for excerpt in excerpts:
        missing = [line for line in excerpt.splitlines() if not any(line in text for text in texts)]
        assert not missing, missing
        together = excerpt in "\n".join(texts) or len(excerpt.splitlines()) <= 2
        assert together, excerpt


# --- lane by lane -----------------------------------------------------------------------------------------------------

BY_LANES = {
    "short": ((1, 1, 1, 20, 40, 16, 24), {"causal": True}),
    "plain": ((1, 1, 1, 70, 50, 32, 32), {}),
    "causal, two blocks": ((1, 2, 1, 140, 140, 16, 24), {"causal": True}),
    "bfloat16, padded": ((1, 1, 1, 66, 70, 72, 64), {"dtype": "bfloat16"}),
    "window": ((1, 1, 1, 140, 150, 16, 16), {"window": (20, 5)}),
    "lengths": ((2, 1, 1, 65, 80, 16, 16), {"kv_lengths": np.array([0, 37]), "causal": True}),
    "sinks": ((1, 2, 2, 65, 40, 16, 16), {"sinks": np.array([0.5, 1.0])}),
    "growing maxima": ((1, 1, 1, 65, 130, 16, 16), {"growing": True}),
    "a hidden NaN": ((1, 1, 1, 70, 70, 16, 16), {"hidden_nan": True, "causal": True}),
    "a hidden NaN beside nothing": ((1, 1, 1, 20, 20, 16, 16), {
        "hidden_nan": True, "mask": np.tri(20, dtype=bool) & (np.arange(20) != 5)[:, None],
    }),
    "dropout": ((1, 1, 1, 65, 70, 16, 16), {"dropout_p": 0.3, "seed": 5}),
    "scores": ((1, 2, 2, 65, 70, 16, 16), {"alibi_slopes": np.array([0.1, 0.5], np.float32), "softcap": 3.0}),
    "bias": ((1, 2, 2, 65, 70, 16, 16), {"bias": np.cos(np.arange(9100.0)).reshape(1, 2, 65, 70).astype(np.float32)}),
    "a mask of groups": ((1, 4, 2, 65, 70, 16, 16), {"mask": np.sin(np.arange(65 * 70)).reshape(65, 70) < 0.5}),
    "wide": ((1, 1, 1, 66, 40, 136, 200), {"causal": True}),
}

OF_FLOAT32 = {
    "float32": ((1, 1, 1, 66, 50, 40, 36), {"dtype": "float32", "kv_lengths": np.array([37])}),
    "infinity": ((1, 1, 1, 20, 40, 16, 20), {"dtype": "float32", "causal": True, "infinite": True}),
}


GRADIENTS = BY_LANES | {
    "hidden NaN": ((1, 2, 1, 70, 70, 16, 24), {
        "mask": np.tri(70, dtype=bool) & (np.arange(70) != 60), "nan": {"k": 60, "v": 60, "dout": 0, "q": 1},
    }),
    "all at once": ((1, 2, 1, 66, 70, 24, 72), {
        "causal": True, "softcap": 3.0, "dropout_p": 0.2, "seed": 7, "kv_lengths": np.array([57]),
        "sinks": np.array([0.5, -1.0]), "dtype": "bfloat16",
    }),
}  # fmt: skip


@dataclass
class Call:
    """A case's arrays by name, all results poisoned, its arguments, and the same in float64 for the definition."""

    arrays: dict[str, np.ndarray]
    spec: AttentionSpec
    arguments: block.Arguments
    options: dict
    wide: list[np.ndarray]

    def stored(self, name: str) -> np.ndarray:
        return self.arrays[name].view(lanes.NUMPYS[self.spec.dtype]).astype(np.float64)


def call_of(case: tuple, monkeypatch: pytest.MonkeyPatch) -> Call:
    (batch, heads, heads_kv, n_q, n_k, d, dv), given = case
    options: dict = dict(given)
    dtype = options.pop("dtype", "float16")
    rng, stored = np.random.default_rng(0), lanes.NUMPYS[dtype]
    shapes = (batch, heads, n_q, d), (batch, heads_kv, n_k, d), (batch, heads_kv, n_k, dv), (batch, heads, n_q, dv)
    named = dict(zip(("q", "k", "v", "dout"), (rng.standard_normal(shape) for shape in shapes)))
    if options.pop("growing", False):
        named["q"], named["k"] = named["q"] * 3, named["k"] * np.linspace(0.1, 40, n_k)[:, None]
    if options.pop("hidden_nan", False):
        named["v"][:, :, -1, 3] = np.nan
    if options.pop("infinite", False):  # rows that see key 10 have a weight of 0 there, or NaN
        named["k"][:, :, 10, 3] = -np.inf
        named["q"][..., 3] = np.abs(named["q"][..., 3])
    for name, row in options.pop("nan", {}).items():
        named[name][:, :, row, 3] = np.nan
    arrays = {name: x.astype(stored) for name, x in named.items()}
    like = np.uint32 if dtype == "float32" else np.uint16
    poison = 0x7FC00001 if dtype == "float32" else 0x7E01
    gradients = {f"d{name}": np.full(arrays[name].shape, poison, like) for name in ("q", "k", "v")}
    arrays |= gradients | {"out": np.full(shapes[3], poison, like), "lse": np.full(shapes[3][:3], np.nan, "f4")}

    given_dtype = np.float32 if dtype == "float32" else np.float16
    problem, operands, _ = prepare(*(arrays[name].astype(given_dtype) for name in ("q", "k", "v")), **options)
    spec = replace(problem.spec, dtype=dtype)
    monkeypatch.setattr(block, "_on_device", on_device)
    placed = {name: OnDevice(arrays[name]) for name in ("q", "k", "v", "out", "lse")}
    of_mods = {name: OnDevice(np.asarray(x)) for name, x in operands.arrays.items()}
    sinks = OnDevice(operands.sinks.astype(np.float32)) if spec.sinks else None
    arguments = block.Arguments(spec, replace(operands, **placed, sinks=sinks, arrays=of_mods))
    arguments.set(splits=batch * heads)
    return Call(arrays, spec, arguments, options, [arrays[name].astype(np.float64) for name in ("q", "k", "v")])


def some(names: Iterable[str], often: Sequence[str]) -> list[Any]:
    """A kernel takes half a minute so, lane by lane: the others run where all are asked for."""
    return [pytest.param(name, marks=[] if name in often else pytest.mark.exhaustive) for name in names]


@pytest.mark.parametrize("name", some(BY_LANES | OF_FLOAT32, ("plain", "lengths")))
def test_the_forward_pass_by_mma_lane_by_lane(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as Python (lanes.py), in tiles of 16 keys, against the definition in float64."""
    call = call_of((BY_LANES | OF_FLOAT32)[name], monkeypatch)
    tile = sm80.Tile(64, 16, 1 if name == "wide" else 2) if name in (*OF_FLOAT32, "wide") else sm80.Tile(128, 16)
    constants, shared = tile.constants(call.spec, HOPPER), tile.shared_memory(call.spec)
    batch, heads, n_q, _ = call.arrays["q"].shape
    words = list(call.arguments.words)
    lanes.launch("sm80_forward", call.spec, constants, shared, words, -(-n_q // tile.block_q) * batch * heads)

    truth, true_lse = flashkit.attention(*call.wide, **call.options, return_lse=True, backend="reference")
    scale = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 5e-7}[call.spec.dtype]
    np.testing.assert_allclose(call.stored("out"), truth, rtol=4 * scale, atol=4 * scale)
    np.testing.assert_allclose(call.arrays["lse"], true_lse, rtol=1e-4, atol=1e-4)


DECODED = {
    "plain": ((1, 2, 2, 1, 70, 32, 32), {}),
    "groups": ((2, 4, 2, 3, 70, 16, 40), {"causal": True, "dtype": "bfloat16"}),
    "window": ((1, 6, 1, 5, 150, 72, 16), {"window": (20, 5)}),
    "lengths": ((3, 2, 1, 2, 80, 16, 16), {"kv_lengths": np.array([0, 37, 80]), "sinks": np.array([0.5, 1.0])}),
    "a hidden NaN": ((1, 2, 1, 4, 70, 16, 16), {"hidden_nan": True, "causal": True}),
    "wide": ((1, 2, 1, 3, 70, 136, 200), {"causal": True, "sinks": np.array([0.5, 1.0])}),
    "all at once": ((1, 2, 1, 6, 66, 24, 72), {
        "causal": True, "softcap": 3.0, "dropout_p": 0.2, "seed": 7, "kv_lengths": np.array([57]),
        "sinks": np.array([0.5, -1.0]), "alibi_slopes": np.array([0.1, 0.5], np.float32),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", some(DECODED, ("plain",)))
def test_few_queries_by_mma_lane_by_lane(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts of the keys in tiles of 16, and the kernel that joins them, against the definition in float64."""
    call, tile, parts = call_of(DECODED[name], monkeypatch), sm80_decode.DecodeTile(16, 1, 2), 3
    constants, shared = tile.constants(call.spec, HOPPER), tile.shared_memory(call.spec)
    (batch, heads, n_q, _), (_, heads_kv, _, _) = call.arrays["q"].shape, call.arrays["k"].shape
    partial = np.full((parts * batch, heads, n_q, call.spec.head_dim_v), np.nan, np.float32)
    partial_lse = partial[..., 0].copy()
    call.arguments.tensors(partial=OnDevice(partial), partial_lse=OnDevice(partial_lse))
    call.arguments.set(splits=parts)
    items, shares = -(-n_q * (heads // heads_kv) // 16) * heads_kv * batch, -(-call.spec.head_dim_v // 128)
    for kernel, blocks in (("sm80_decode", items * parts), ("combine", batch * heads * n_q * shares)):
        room = shared if kernel == "sm80_decode" else sm80_decode.COMBINED_BYTES
        lanes.launch("sm80_decode", call.spec, constants, room, list(call.arguments.words), blocks, kernel)

    truth, true_lse = flashkit.attention(*call.wide, **call.options, return_lse=True, backend="reference")
    scale = {"float16": 1e-3, "bfloat16": 8e-3}[call.spec.dtype]
    np.testing.assert_allclose(call.stored("out"), truth, rtol=4 * scale, atol=4 * scale)
    np.testing.assert_allclose(call.arrays["lse"], true_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", some(GRADIENTS, ("short",)))
def test_the_backward_pass_by_mma_lane_by_lane(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the one that rounds dQ as Python, in tiles of 64 x 64, against the definition in float64."""
    call = call_of(GRADIENTS[name], monkeypatch)
    tile = sm80.BackwardTile(64, 64, 8 if name == "wide" else 4)
    (batch, heads, n_q, _), (_, heads_kv, n_k, _) = call.arrays["q"].shape, call.arrays["k"].shape
    dout, dlse = call.arrays["dout"].astype(np.float64), np.random.default_rng(1).standard_normal((batch, heads, n_q))
    (out, lse), vjp = flashkit.attention_vjp(*call.wide, **call.options, return_lse=True, backend="reference")
    # What kernels/rows makes of them.
    tiles = -(-n_q // tile.block_q)
    rows = batch, heads, tiles * tile.block_q
    shift, delta = np.full(rows, 1e30, np.float32), np.zeros(rows, np.float32)
    shift[:, :, :n_q] = np.where(lse == -np.inf, np.inf, lse)
    delta[:, :, :n_q] = np.where(lse == -np.inf, 0, (dout * out).sum(-1) - dlse)
    sums = np.zeros((batch, heads, tiles, tile.block_q * 64 * -(-call.spec.head_dim // 64)), np.float32)
    marks = np.zeros(4 + batch * heads * tiles, np.int32)
    tensors = {name: call.arrays[name] for name in ("dout", "dq", "dk", "dv")} | {"shift": shift, "delta": delta}
    tensors |= {"partial": sums, "partial_lse": marks[4:].reshape(batch, heads, tiles, 1)}
    call.arguments.tensors(**{name: OnDevice(x) for name, x in tensors.items()})
    call.arguments.set(splits=1)  # heads at a time; the last one goes the other way round
    constants, shared = tile.constants(call.spec, HOPPER), tile.shared_memory(call.spec)
    of_keys, of_queries = -(-n_k // 64) * heads_kv * batch, tiles * heads * batch
    for kernel, blocks in (("sm80_backward", of_keys), ("bwd_postprocess", of_queries)):
        lanes.launch("sm80_backward", call.spec, constants, shared, list(call.arguments.words), blocks, kernel)

    precision = {"float16": 1e-3, "bfloat16": 8e-3}[call.spec.dtype]
    for name, right in zip(("dq", "dk", "dv"), vjp(dout, dlse)):
        off = 4 * precision * max(1.0, np.nanmax(np.abs(right), initial=0))
        np.testing.assert_allclose(call.stored(name), right, rtol=4 * precision, atol=off, err_msg=name)


# With more than 16 tiles of keys the next item is taken near the end of this one, which may be hidden from all or have
# no keys; more tiles than 192 take a second list, which may be left without any.
MANY_KEYS = {
    "many keys": ((1, 1, 1, 140, 530, 16, 16), {"causal": True}),
    "many keys, lengths": ((2, 1, 1, 140, 520, 16, 16), {"kv_lengths": np.array([37, 520])}),
    "many keys of the last rows": ((1, 2, 1, 280, 520, 16, 16), {"mask": np.arange(280)[:, None] >= np.full(520, 200)}),
    "two lists": ((1, 1, 1, 20, 8000, 16, 16), {"mask": np.arange(8000) > 1700}),
}


def hoppers_forward_pass(call: Call, pack: int = 1) -> None:
    """The kernel as Python (lanes_hopper.py), one block, in tiles of 32 keys, against the definition in float64."""
    tile, ticket = sm90.Tile(128, 32), np.zeros(2, np.int32)
    call.arguments.set(ticket=ticket.ctypes.data)
    for of, rows, heads in (("q", 64, pack), ("k", 32, 1), ("v", 32, 1), ("out", 64, pack)):
        lanes_hopper.maps[f"map_{of}"] = lanes_hopper.Map(call.arrays[of].view(np.uint16), rows, heads)
    constants, shared = tile.constants(call.spec, pack), tile.shared_memory(call.spec)
    own = "sm90_forward", "lanes_hopper"
    lanes.launch("sm90_forward", call.spec, constants, shared, list(call.arguments.words), 1, *own)

    assert not ticket.any(), "the counters are left as they were found"
    truth, true_lse = flashkit.attention(*call.wide, **call.options, return_lse=True, backend="reference")
    scale = {"float16": 1e-3, "bfloat16": 8e-3}[call.spec.dtype]
    np.testing.assert_allclose(call.stored("out"), truth, rtol=4 * scale, atol=4 * scale)
    np.testing.assert_allclose(call.arrays["lse"], true_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", some(BY_LANES | MANY_KEYS, ("many keys",)))
def test_hoppers_forward_pass_lane_by_lane(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hoppers_forward_pass(call_of((BY_LANES | MANY_KEYS)[name], monkeypatch), 2 if name == "a mask of groups" else 1)


def test_tiles_that_an_array_hides_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, boxes = np.array([[True, False, False, True, False, False, True]]), []
    mask = flashkit.BlockMask.from_dense(grid, 128, 32, 70, 200)
    box = lanes_hopper.Map.box
    monkeypatch.setattr(lanes_hopper.Map, "box", lambda own, *at: boxes.append((own, at)) or box(own, *at))
    hoppers_forward_pass(call_of(((1, 1, 1, 70, 200, 16, 16), {"block_mask": mask}), monkeypatch))
    loaded = {token for own, (_, token, *_) in boxes if own is lanes_hopper.maps["map_k"]}
    assert loaded == {0, 96, 192}


# Where a row's delta is NaN its weights are taken for NaN too, as in CUDA C++: dv is NaN where it need not be.
LEFT_OUT = "a hidden NaN", "a hidden NaN beside nothing", "wide"
HOPPERS = {name: case for name, case in GRADIENTS.items() if name not in LEFT_OUT}


@pytest.mark.parametrize("name", some(HOPPERS, ("causal, two blocks",)))
@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_hoppers_backward_pass_lane_by_lane(name: str, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    hoppers_backward_pass(HOPPERS[name], sm90_bwd_launch.BackwardTile(64), ordered, monkeypatch)


def wide(case: tuple, dv: int) -> tuple:
    """The same of more columns."""
    (*sizes, _, _), options = case
    return (*sizes, 136, dv), options


@pytest.mark.parametrize("name", some(HOPPERS, ("short",)))
@pytest.mark.parametrize("ordered", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("dv", [200, pytest.param(72, marks=pytest.mark.exhaustive)])
def test_hoppers_backward_pass_of_wide_heads_lane_by_lane(
    name: str, ordered: bool, dv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks at an item, both warp groups at its keys: with three chunks of columns and four, or three and two."""
    tile = sm90_bwd_launch.BackwardTile(64, key_buffers=1)
    hoppers_backward_pass(wide(HOPPERS[name], dv), tile, ordered, monkeypatch)


def hoppers_backward_pass(
    case: tuple, tile: sm90_bwd_launch.BackwardTile, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its three kernels as Python (lanes_hopper.py) against the definition in float64."""
    call = call_of(case, monkeypatch)
    spec = replace(call.spec, deterministic=ordered)
    (batch, heads, n_q, _), n_k = call.arrays["q"].shape, call.arrays["k"].shape[2]
    dlse = np.random.default_rng(1).standard_normal((batch, heads, n_q)).astype(np.float32)
    (out, lse), vjp = flashkit.attention_vjp(*call.wide, **call.options, return_lse=True, backend="reference")
    call.arrays["out"][...] = out.astype(lanes.NUMPYS[spec.dtype]).view(np.uint16)
    call.arrays["lse"][...] = lse

    tiles, rows = -(-n_q // 64), (batch, heads, -(-n_q // 64) * 64)
    together, held = sm90_bwd_launch.cluster_size(spec), tile.cta_keys(spec)
    tensors = {name: call.arrays[name] for name in ("dout", "dq", "dk", "dv")} | {
        "dlse": dlse, "shift": np.full(rows, np.nan, np.float32), "delta": np.full(rows, np.nan, np.float32),
        "partial": np.full((batch, heads, tiles, tile.dq_accum_bytes(spec) // 4), np.nan, np.float32),
        "partial_lse": np.full((batch, heads, tiles, 1 + together * -(-n_k // tile.block_k // 32)), -1, np.int32),
    }  # fmt: skip
    ticket = np.zeros(2, np.int32)
    call.arguments.tensors(**{name: OnDevice(x) for name, x in tensors.items()})
    call.arguments.set(ticket=ticket.ctypes.data, splits=batch * heads)
    boxes = ("q", 64), ("dout", 64), ("k", held), ("v", held), ("dk", 16), ("dv", 16)
    for name, count in boxes:
        lanes_hopper.maps[f"map_{name}"] = lanes_hopper.Map(call.arrays[name].view(np.uint16), count)

    words, shared, every = list(call.arguments.words), tile.shared_memory(spec), tiles * heads * batch
    for kernel, blocks in (("bwd_preprocess", every), ("sm90_backward", together), ("bwd_postprocess", every)):
        own = kernel, "lanes_hopper"
        lanes.launch(backward_kernel(spec), spec, tile.constants(spec), shared, words, blocks, *own)

    assert not ticket.any(), "the counters are left as they were found"
    precision = {"float16": 1e-3, "bfloat16": 8e-3}[spec.dtype]
    for name, right in zip(("dq", "dk", "dv"), vjp(call.arrays["dout"].astype(np.float64), dlse.astype(np.float64))):
        off = 4 * precision * max(1.0, np.nanmax(np.abs(right), initial=0))
        np.testing.assert_allclose(call.stored(name), right, rtol=4 * precision, atol=off, err_msg=name)
