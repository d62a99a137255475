"""The CUDA kernels without a device: every one compiles for the architectures in use, within its registers, and the
text of modifications says what the graphs say.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tiles import MODELS, tables, tile_of

from flashkit import BlockMask, errors, mods
from flashkit.backends.cuda_common import compiler, launch, memory, modification, simt, sm90_bwd_launch, sm90_launch
from flashkit.backends.cuda_common.backend import VARIABLE
from flashkit.backends.cuda_common.device import Device
from flashkit.backends.cuda_common.generation import Choice
from flashkit.backends.cupy_raw import sm80, sm90, sm90_backward, sm90_mla, specialise
from flashkit.backends.cupy_raw.backend import CupyRawBackend
from flashkit.call import arguments
from flashkit.call.compose import compose
from flashkit.devices import profiles, schema
from flashkit.devices.schema import TileRow
from flashkit.mods import codegen, expr
from flashkit.spec import AttentionSpec, Direction, Problem

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install cuda-bindings nvidia-cuda-nvrtc")

SMALL = Device("48 KB a block", (8, 6), 20, 49152, 102400)

AMPERE_OFTEN = [pytest.param(arch, marks=[pytest.mark.exhaustive] * (arch != "sm_80")) for arch in MODELS]
"""For kernels of simt and sm80, which Hopper runs only where its own refuse a call."""


def compiled(name: str, spec: AttentionSpec, constants: dict[str, int], arch: str) -> compiler.Resources:
    return compiler.binary(specialise.source(name.replace("_", "/", 1), spec, constants), arch).resources[name]


def simt_kernel(part: simt.Part, spec: AttentionSpec, device: Device) -> compiler.Resources:
    tile = simt.choose(part, spec, device)
    assert tile.shared_memory(part, spec) <= device.shared_per_block
    name = "simt_forward" if part == "forward" else "simt_backward"
    return compiled(name, spec, dict(tile.constants(part, spec)), compiler.target(device.capability))


@pytest.mark.slow
@pytest.mark.parametrize("arch", AMPERE_OFTEN)
@pytest.mark.parametrize("part", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.one_in(6)
def test_simt_float32_does_not_spill(d: int, part: simt.Part, arch: str) -> None:
    found = simt_kernel(part, AttentionSpec("float32", d, d), MODELS[arch])
    assert 0 < found.registers <= 255
    assert found.spills == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "dtype", "part"),
    [
        pytest.param(dims, dtype, part, marks=[pytest.mark.exhaustive] * ((i + j + k) % 3 > 0 or i != 2))
        for i, dims in enumerate(("3/300", "192/128", "512/512", "576/512"))
        for j, dtype in enumerate(("float32", "float64", "bfloat16"))
        for k, part in enumerate(("forward", "dkdv", "dq"))
    ],
)
def test_simt_compiles_for_every_dtype_and_head_dim(dims: str, dtype: str, part: simt.Part) -> None:
    d, dv = map(int, dims.split("/"))
    found = simt_kernel(part, AttentionSpec(dtype, d, dv, group=2, dropout=True, sinks=True), MODELS["sm_80"])
    assert found.spills <= 600  # bytes, outside of the products: dropout of many weights at once


def test_a_profiles_row_decides_where_it_fits() -> None:
    generation, problem = CupyRawBackend.generations[-1], Problem(AttentionSpec("float32", 64, 64), 1, 1, 99, 99)

    def chosen(block_q: int, **options: int) -> Choice:
        row = TileRow(block_q, 64, generation="simt", options=options, why="measured")
        profile = schema.Profile(schema.Device("cuda"), tiles={"cuda.forward": [row]})
        return next(tables(profile=profile).choices(generation, problem))

    tile, row, why = chosen(64, threads_x=8, threads_y=16)
    assert (tile.block_q, tile.threads, why) == (64, 128, "measured") and row is not None
    for wrong in ((65, {"threads_x": 8, "threads_y": 16}), (64, {"threads_x": 7, "threads_y": 16}), (64, {})):
        errors.forget_warnings()
        with pytest.warns(schema.ProfileWarning, match="no tile of SimtTile"):
            tile, row, why = chosen(wrong[0], **wrong[1])
        assert tile == simt.choose("forward", problem.spec, HOPPER) and row is None
        assert "least cost" in why


# --- modifications ----------------------------------------------------------------------------------------------------

SCORES = {
    "softcap": mods.softcap(3.0),
    "alibi": mods.alibi(np.ones((2, 4), np.float32)),
    "bias": mods.bias(np.ones((4, 1, 100), np.float16)),
    "bfloat16 bias": mods.bias(np.ones((1, 4, 50, 100), ml_dtypes.bfloat16)),
}
MASKS = {
    "causal": mods.causal(), "window": mods.sliding_window(5, 3),
    "document": mods.document(np.zeros((2, 100), np.int32)), "bool": mods.visible(np.ones((2, 1, 50, 100), bool)),
    "dilated": mods.dilated(3) & ~mods.prefix_lm(7),
}  # fmt: skip


def spec_of(scores: list[mods.Mod], masks: list[mods.Mod], d: int = 64, dtype: str = "float16") -> AttentionSpec:
    score, mask, slots, *_ = compose(dict(zip(map(str, range(9)), scores)), masks)
    return AttentionSpec(dtype, d, d, 1, score, mask, slots)


def modified(what: str, d: int, dtype: str) -> AttentionSpec:
    """Of a score or a mask by its name, or of neither."""
    return spec_of([SCORES[what]] if what in SCORES else [], [MASKS[what]] if what in MASKS else [], d, dtype)


def test_too_many_values_are_refused_with_a_sentence() -> None:
    names = [f"x{i}" for i in range(modification.MAX_VALUES + 1)]
    many = mods.score(lambda s, b, h, q, k, **x: sum(x.values(), s), **dict.fromkeys(names, 0.5))
    assert "up to 384 entries" in modification.unsupported(spec_of([many], []))


# --- the compiler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("remark", "refused"),
    [
        ("(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to a call", True),
        ("(C7519) warpgroup.arrive is injected in around line 7 by compiler to allow use of registers in GMMA", False),
    ],
)
def test_only_serialised_products_are_refused(remark: str, refused: bool, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FLASHKIT_CACHE_DIR", str(tmp_path))
    source = compiler.Source("tiny", 'extern "C" __global__ void tiny(float* x) { x[threadIdx.x] *= 2; }')
    code, log = source.compile("sm_80")
    monkeypatch.setattr(compiler.Source, "compile", lambda *_: (code, f"{log}\nptxas info    : {remark}\n"))
    with pytest.raises(compiler.CompileError, match="serialized") if refused else contextlib.nullcontext():
        assert compiler.binary(source, "sm_80").code == code


def test_an_error_has_the_compilers_words() -> None:
    with pytest.raises(compiler.CompileError, match="nonsense"):
        compiler.binary(compiler.Source("broken", "nonsense"), "sm_80")


def test_targets() -> None:
    assert compiler.target((8, 0)) == "sm_80"
    assert compiler.target((9, 0)) == "sm_90a"
    with pytest.raises(compiler.CompileError, match="sm_35"):
        compiler.target((3, 5))


# --- machine code -----------------------------------------------------------------------------------------------------


def disassembled(code: Path) -> str:
    """SASS of a binary; skips the test where nvdisasm is not installed."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    tool = shutil.which("nvdisasm") or next(map(str, folder.glob("cu*/bin/nvdisasm")), None)
    if tool is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    return subprocess.run([tool, "-c", str(code)], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_sm90_claims_do_not_wait() -> None:
    """ptxas combines what the lanes of a warp add, and hands the sum around at once."""
    sass = disassembled(sm90_binary(AttentionSpec("bfloat16", 128, 128)).path)
    claims = sass.split("ATOMG.E.INC")[1:]
    assert any("SYNCS.ARRIVE" in claim.partition("SHFL")[0] for claim in claims)  # a list is passed on meanwhile


@pytest.mark.slow
def test_simt_products_are_fused_and_copies_asynchronous() -> None:
    spec = AttentionSpec("float32", 128, 128)
    tile = simt.choose("forward", spec, MODELS["sm_80"])
    sass = disassembled(
        compiler.binary(specialise.source("simt/forward", spec, dict(tile.constants("forward", spec))), "sm_80").path
    )
    assert len(re.findall(r"\bFFMA\b", sass)) > 500
    assert "LDGSTS" in sass


SM80 = [("bfloat16", 64), ("bfloat16", 128), ("float32", 64), ("float32", 128), ("bfloat16", 256)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", AMPERE_OFTEN)
@pytest.mark.parametrize("name", ["sm80_forward", "sm80_backward"])
@pytest.mark.parametrize("what", ["all", "causal", "softcap", "alibi"])
@pytest.mark.parametrize(("dtype", "d"), SM80)
@pytest.mark.one_in(24)
def test_sm80_products_are_matrix_instructions(dtype: str, d: int, what: str, name: str, arch: str) -> None:
    """Both passes: their tiles fit, operands come 16 bytes at a time, and what is spilled is less than one of the
    smallest sums, some addresses and bounds, or is where the pairs of an affine score are looked at one by one.
    """
    spec, device = modified(what, d, dtype), MODELS[arch]
    tile = tile_of(spec, "sm80", "forward" if name == "sm80_forward" else "backward", device)
    assert tile.shared_memory(spec) <= device.shared_per_block
    constants = tile.constants(spec, device) if isinstance(tile, sm80.Sm80Tile) else tile.constants(spec)
    found = compiler.binary(specialise.source(name.replace("_", "/", 1), spec, constants), arch)
    assert found.resources[name].registers <= 255
    assert found.resources[name].spills <= (288 if what in SCORES else 240)
    sass = disassembled(found.path)
    assert len(re.findall(r"\bHMMA\b", sass)) >= 32
    assert len(re.findall(r"\bLDGSTS\S*\.128\b", sass)) >= 8
    assert "LDSM" in sass
    assert bool(re.search(r"\bREDG?\.E\.ADD", sass)) == (name == "sm80_backward")
    assert ("MUFU.TANH" in sass) == (what == "softcap")


# --- Hopper -----------------------------------------------------------------------------------------------------------

HOPPER = MODELS["sm_90a"]
SM90 = CupyRawBackend.generations[0]


def long(spec: AttentionSpec) -> Problem:
    return Problem(spec, 4, 16, 4096, 4096)


def sm90_binary(spec: AttentionSpec, tile: sm90.Sm90Tile | None = None, pack: int = 1) -> compiler.Binary:
    """A serialised wgmma makes this raise CompileError."""
    tile = tile or tile_of(long(spec), "sm90")
    assert tile.fits(spec, HOPPER)
    return compiler.binary(specialise.source("sm90/forward", spec, *tile.source(spec, pack)), "sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.one_in(5)
def test_sm90_products_run_beside_the_softmax(d: int, causal: bool) -> None:
    """Warp-group products, copies by the engine, registers handed over; no spills to speak of where tiles are usual."""
    spec = modified("causal" if causal else "", d, "bfloat16")
    found = sm90_binary(spec)
    assert found.resources["sm90_forward"].spills <= (640 if d == 64 else 128)  # in code that hardly ever runs
    sass = disassembled(found.path)
    steps = -(-d // 16)
    products = len(re.findall(r"\bHGMMA\b", sass))
    tile = tile_of(long(spec), "sm90")
    assert products == 3 * steps + 3 * tile.block_k // 16  # three kinds of steps, and what is pending by itself
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 6  # a wait for each: none was put in between
    for instruction in ("UTMALDG", "UTMASTG", "USETMAXREG", "SYNCS"):
        assert instruction in sass


LATENT = AttentionSpec("bfloat16", 576, 512, 128, kv_lengths=True, paged=True, page_run=64)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["", "causal", "softcap", "smaller"])
@pytest.mark.one_in(5)
def test_sm90_latent_keys_are_values(what: str) -> None:
    """Nothing spills. S of both warp groups' tiles, and products with V, transposed, of both kinds of P."""
    mod = modified(what, 64, "bfloat16")
    spec = replace(LATENT, score=mod.score, mask=mod.mask, slots=mod.slots)
    if what == "smaller":
        spec = replace(spec, dtype="float16", head_dim=328, head_dim_v=264, group=20, paged=False)
    tile = sm90_mla.Sm90MlaTile()
    assert tile.fits(spec, HOPPER)
    found = compiler.binary(specialise.source("sm90/mla_forward", spec, *tile.source(spec)), "sm_90a")
    assert all(kernel.spills == 0 for kernel in found.resources.values())
    sass, half, steps = disassembled(found.path), 64 * -(-(spec.head_dim_v // 2) // 64), -(-spec.head_dim // 16)
    assert len(re.findall(r"HGMMA\.64x64x16", sass)) == 2 * steps
    of_registers = re.findall(rf"HGMMA\.64x{half}x16\S* R\d+, R\d+, gdesc\[\S+\.tnspB", sass)
    of_memory = re.findall(rf"HGMMA\.64x{half}x16\S* R\d+, gdesc\[\S+\.tnspB", sass)
    assert len(of_registers) == 2 * 4 and len(of_memory) == 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "d"), [("bfloat16", 128), ("bfloat16", 64), ("bfloat16", 96), ("float16", 128)])
@pytest.mark.one_in(5)
def test_sm90_sums_capped_weights_with_the_values(dtype: str, d: int) -> None:
    """By eight columns more of a product with values, where these fill their chunks and weights may be of any size."""
    spec = spec_of([SCORES["softcap"]], [MASKS["causal"]], d, dtype)
    sass = disassembled(sm90_binary(spec).path)
    tile = tile_of(long(spec), "sm90")
    summed = dtype == "bfloat16" and d % 64 == 0
    assert sm90.sums_rows_by_mma(spec, tile) == summed
    with_values = re.findall(rf"HGMMA\.64x{d + 8 * summed}x16\.F32(?:\.BF16)? R\d+, R\d+", sass)
    assert len(with_values) == 3 * tile.block_k // 16
    assert not sm90.sums_rows_by_mma(replace(spec, dropout=True), tile)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("precision", [None, "tf32"])
@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.one_in(12)
def test_sm90_multiplies_float32_as_terms(d: int, precision: str | None, causal: bool) -> None:
    """Three products for one, of a tile into sums of its own: none waits for another. With "tf32" one product, and the
    steps of 16-bit elements, of three kinds.
    """
    spec = AttentionSpec("float32", d, d, mask=expr.K <= expr.Q if causal else None, precision=precision)
    found = sm90_binary(spec)
    assert found.resources["sm90_forward"].spills <= (800 if precision and d == 64 else 32)  # where tiles are loaded
    sass = disassembled(found.path)
    products = -(-d // 16) + tile_of(long(spec), "sm90").block_k // 16
    assert len(re.findall(r"\bHGMMA\b", sass)) == 3 * products
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == (6 if precision else 2)
    split = specialise.source("sm90/fp16x2_convert", spec, {"NUM_TERMS": 1 if precision else 2, "ROWS": 64})
    assert compiler.binary(split, "sm_90a").resources["fp16x2_convert"].spills <= 24  # of addresses


@pytest.mark.slow
@pytest.mark.parametrize("dq_kernel", [True, False])
@pytest.mark.parametrize(
    "spec",
    [
        AttentionSpec("float32", 128, 128),
        *(pytest.param(spec, marks=pytest.mark.slow) for spec in (
            AttentionSpec("float32", 64, 64, mask=expr.K <= expr.Q), AttentionSpec("float32", 96, 128, 4, dropout=True),
            AttentionSpec("float32", 128, 128, precision="tf32", kv_lengths=True, sinks=True),
            spec_of([SCORES["softcap"], SCORES["alibi"]], [MASKS["window"]], 64, "float32"),
        ))
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.one_in(12)
def test_sm90_gradients_in_float32(spec: AttentionSpec, dq_kernel: bool) -> None:
    """The sums of a tile and of all tiles lie in registers; what spills is what finds and loads tiles."""
    tile = tile_of(spec, "sm90", "backward")
    assert tile.shared_memory(spec, dq_kernel) <= HOPPER.shared_per_block
    found = compiler.binary(specialise.source("sm90/fp16x2_backward", spec, *tile.source(spec, dq_kernel)), "sm_90a")
    assert found.resources["fp16x2_backward"].spills <= 256
    dims = [spec.head_dim, spec.head_dim_v]  # summed over for S and dP; then those of the gradients, 64 columns at once
    slices = sum(-(-dim // 64) for dim in dims[: 1 if dq_kernel else 2])
    products = sum(-(-dim // 16) for dim in dims) + slices * tile.block_k // 16
    sass = disassembled(found.path)
    assert len(re.findall(r"\bHGMMA\b", sass)) == products * (1 if spec.precision else 3)
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) == 2 + slices


SM90_DIMS = ["8", "40", "64", "128", "192/128", "64/128", "256"]
SM90_MODIFIED = [  # the dilated mask takes as long as four others
    pytest.param(what, SM90_DIMS[i % len(SM90_DIMS)], marks=[pytest.mark.exhaustive] * (what == "dilated"))
    for i, what in enumerate([*SCORES, *MASKS])
]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "float64"}, "these tensor cores do not support float64"), ({"dtype": "float32"}, ""),
        ({"dtype": "float32", "head_dim": 192}, "over 128"),
        ({"dtype": "float32", "head_dim": 8}, "more accurate without FP16x2"),
        ({"dtype": "float32", "head_dim_v": 30}, "not a multiple of 16 bytes"),
        ({"head_dim": 20}, "not a multiple of 16 bytes"), ({"head_dim": 264, "head_dim_v": 264}, "over 256"),
        ({"n_q": 16}, "16 rows share keys"), ({"batch": 1, "heads": 1}, "the keys should be split"), ({}, ""),
    ],
)  # fmt: skip
def test_sm90_says_why_not(changes: dict[str, object], sentence: str) -> None:
    given = {"dtype": "bfloat16", "head_dim": 64, "head_dim_v": 64, "batch": 4, "heads": 16, "n_q": 2048, **changes}
    spec = AttentionSpec(*(given.pop(name) for name in ("dtype", "head_dim", "head_dim_v")))  # type: ignore[arg-type]
    verdict = SM90.supports(Problem(spec, **given, n_k=4096), HOPPER, "forward")  # type: ignore[arg-type]
    assert bool(verdict) == (not sentence) and sentence in verdict.reason
    assert "sm_80" in SM90.supports(Problem(spec, 4, 16, 2048, 4096), MODELS["sm_80"], "forward").reason
    backward = SM90.supports(Problem(spec, **given, n_k=4096), HOPPER, "backward")  # type: ignore[arg-type]
    if "n_q" not in changes and "heads" not in changes:  # the backward pass goes along the queries
        assert backward == verdict


def test_sm90_leaves_small_problems_in_float32_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    backend, profile = CupyRawBackend(), profiles.by_name("generic_cuda")

    def chosen(n: int, dim: int, direction: Direction, dtype: str = "float32") -> tuple[str, str]:
        problem = Problem(AttentionSpec(dtype, dim, dim), 2, 8, n, n)
        choice = backend.choose(problem, profile, HOPPER, direction)
        assert choice.generation is not None
        return choice.generation.name, "; ".join(choice.rejected)

    assert chosen(2048, 64, "forward")[0] == chosen(1024, 128, "backward")[0] == "sm90"
    name, said = chosen(512, 64, "backward")
    assert name == "sm80" and "4194304 scores are too few to convert" in said
    assert chosen(2048, 16, "forward")[0] == "sm80" and chosen(2048, 16, "backward")[0] == "sm90"
    assert chosen(512, 64, "backward", "bfloat16")[0] == "sm90"
    monkeypatch.setenv(VARIABLE, "sm90")
    assert chosen(512, 64, "backward")[0] == "sm90"


def test_sm90_adds_in_an_order_where_that_is_faster() -> None:
    def ordered(n_q: int, n_k: int, dim: int, **options: Any) -> bool:
        q, k = (np.zeros((1, 1, n, dim), np.float16) for n in (n_q, n_k))
        return sm90_backward.in_order(arguments.prepare(q, k, k, **options)[0])

    blocks = BlockMask.from_dense(np.eye(4, dtype=bool), 128, 128)
    assert ordered(2048, 2048, 128, causal=True) and ordered(512, 512, 64, causal=True, window=(70, 0))
    assert not ordered(2048, 2049, 128, causal=True) and not ordered(513, 512, 64, causal=True)
    assert not ordered(512, 512, 128) and not ordered(512, 512, 128, block_mask=blocks)
    assert ordered(4096, 4096, 64, deterministic=True)
    assert ordered(4096, 256, 128) and ordered(128, 128, 64, softcap=2.0) and not ordered(128, 257, 64)

    def ordered_packed(*lengths: int) -> bool:
        x = np.zeros((sum(lengths), 1, 128), np.float16)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return sm90_backward.in_order(arguments.prepare(x, x, x, causal=True, cu_seqlens=offsets)[0])

    assert ordered_packed(*[128] * 40, 2500) and not ordered_packed(2500, 2500)


def sm90_backward_binary(spec: AttentionSpec, fused: bool | None = None) -> compiler.Binary:
    """A serialised wgmma makes this raise CompileError. fused: with the preprocess; by default where it fits."""
    tile = tile_of(spec, "sm90", "backward")
    assert tile.fits(spec, HOPPER)
    fused = sm90_backward.can_fuse_preprocess(spec, tile) if fused is None else fused
    constants, functions = sm90_backward.source(spec, tile, fused)
    return compiler.binary(specialise.source("sm90/backward", spec, constants, functions), "sm_90a")


def backward_lines(binary: compiler.Binary) -> tuple[list[str], list[int]]:
    """SASS of the backward kernel, and which of its lines are products. Little is spilled beside them: in code that
    runs once a work tile, or in the producer warp group.
    """
    assert binary.resources["bwd_preprocess"].spills == binary.resources["bwd_postprocess"].spills == 0
    text = disassembled(binary.path)
    text = text[text.index(".text.sm90_backward:") :]
    lines = text[: text.find(".section", 10)].splitlines()
    return lines, [i for i, line in enumerate(lines) if "HGMMA" in line]


def spilled(lines: list[str]) -> int:
    return sum("Spill" in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "way"),
    [
        pytest.param(causal, way, id=f"{'causal' if causal else 'full'}-{way}", marks=marks)
        for causal in (False, True)
        for way, marks in (
            ("arbitrary order", []), ("deterministic", [pytest.mark.exhaustive] * (not causal)),
            ("fused preprocess", [pytest.mark.exhaustive] * causal), ("packed", [pytest.mark.exhaustive]), ("tf32", []),
        )
    ],
)  # fmt: skip
@pytest.mark.parametrize("dims", ["64", "96", "128", "192/128", "256", "16", "100/36", "33/128"])
@pytest.mark.one_in(15)
def test_sm90_gradients_are_warp_group_products(dims: str, causal: bool, way: str) -> None:
    """No serialised wgmma and few spills within the loop over query tiles."""
    d, dv = map(int, (dims.split("/") * 2)[:2])
    if (way == "tf32") != (dims in ("16", "100/36", "33/128")) and (way != "tf32" or max(d, dv) > 128):
        pytest.skip("of TF32, widths that are converted; of 16 bits, those that are not")
    mask = modified("causal", d, "bfloat16").mask if causal else None
    spec = AttentionSpec("bfloat16", d, dv, mask=mask, deterministic=way == "deterministic")
    if way == "tf32":
        spec = replace(spec, dtype="float32", precision="tf32")
    if way == "packed":
        spec = replace(spec, packed=True, kv_lengths=True)
    tile, cluster = tile_of(spec, "sm90", "backward"), sm90_bwd_launch.cluster_size(spec) > 1
    fused = way == "fused preprocess"
    if fused and not sm90_backward.can_fuse_preprocess(spec, tile):
        pytest.skip("there is no room")
    found = sm90_backward_binary(spec, fused or None if way == "tf32" else fused)
    assert found.resources["sm90_backward"].spills <= (320 if way != "packed" else 520 if cluster else 400)
    lines, products = backward_lines(found)
    steps, steps_v, keys, rows = -(-d // 16), -(-dv // 16), tile.block_k // 16, tile.block_q // 16
    if cluster:  # S twice, of the first tile and of the next one; dQ of half the columns, from the keys of both CTAs
        expected, waits = 2 * steps + steps_v + 2 * rows + -(-d // 128) * keys, 7
    else:  # S twice, of the first tile and of the next one; dQ twice, in the loop and after it
        expected, waits = 2 * steps + steps_v + 2 * rows + 2 * keys, 6
    assert len(products) == expected
    # Waits are those that are in the text: none was put in between.
    assert sum("WARPGROUP.DEPBAR" in line for line in lines) == waits
    loop = lines[products[0] : products[-1]]
    assert spilled(loop) <= {"packed": 40, "tf32": 4}.get(way, 24)  # where rows are hidden, too
    for instruction in ("UTMALDG", "USETMAXREG", "SYNCS", "STSM", "RED" if cluster else "UBLKRED"):
        assert any(instruction in line for line in lines)
    if way == "tf32":
        scaled = [line for line in loop if re.search(r"FFMA .*, 4\.656612873\d+e-10,", line)]
        assert len(scaled) >= tile.block_q // 2  # the unit of dP costs no instruction
        conversion = compiler.binary(specialise.source("sm90/tf32_convert", spec, {"NUM_TERMS": 1}), "sm_90a")
        assert [conversion.resources[name].spills for name in ("tf32_maxima", "tf32_convert")] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("what", ["softcap", "alibi"])
@pytest.mark.one_in(12)
def test_sm90_gradients_have_an_affine_path(what: str, d: int) -> None:
    """In tiles as large as without one, and hardly anything is spilled within the loop, least on the way of tiles whose
    pairs are all visible: that is the text between products, up to where it joins another way.
    """
    plain, spec = AttentionSpec("bfloat16", d, d), spec_of([SCORES[what]], [], d, "bfloat16")
    tile = tile_of(spec, "sm90", "backward")
    assert sm90_backward.takes_affine_path(spec) and tile == tile_of(plain, "sm90", "backward")
    lines, products = backward_lines(sm90_backward_binary(spec))
    parts = [lines[i:j] for i, j in pairwise(products)]
    if d > 128:  # the loops of two warp groups, between which items end
        parts = [part for part in parts if not any("UTMASTG" in line for line in part)]
    usual = [list(takewhile(lambda line: not re.search(r"/ +BRA", line), part)) for part in parts]
    assert sum("MUFU.EX2" in line for part in usual for line in part) == tile.block_q // 2  # each weight once
    assert sum(map(spilled, usual)) <= 12
    # Where other tiles are dealt with, too: what is kept for all tiles of an item is kept there as well.
    assert sum(map(spilled, parts)) <= (52 if what == "softcap" and d == 64 else 26)
    assert any("MUFU.TANH" in line for line in lines) == (what == "softcap")


def test_sm90_tf32_gradients_by_either_pass() -> None:
    """What is beyond the kernels of 16-bit elements keeps those of FP16x2, with one term."""

    def planned(**features: Any) -> tuple[str, list[str]]:
        spec = AttentionSpec(**{"dtype": "float32", "head_dim": 64, "head_dim_v": 64, "precision": "tf32"} | features)
        with launch.listing() as found:
            made = tables("backward").plan(SM90, long(spec))
        return type(made).__name__, [source.name for source, _ in found if isinstance(source, compiler.Source)]

    fast, slow = "Sm90Tf32Backward", "Sm90Float32Backward"
    name, kernels = planned()
    assert name == fast and {"sm90_backward", "sm90_tf32_convert", "sm90_fp16x2_backward"} <= set(kernels)
    assert planned(mask=expr.K <= expr.Q, group=4, kv_lengths=True, deterministic=True)[0] == fast
    for features in ({"precision": None}, {"dropout": True}, {"sinks": True}, {"score": expr.S * 2}):
        assert planned(**features)[0] == slow, features
    narrow = AttentionSpec("float32", 64, 64, precision="tf32")
    assert tile_of(narrow, "sm90", "backward") == sm90_bwd_launch.BackwardTile(128)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("what", "dims"), SM90_MODIFIED)
@pytest.mark.one_in(10)
def test_sm90_compiles_with_every_modification(what: str, dims: str, direction: Direction) -> None:
    """Head dims in turn."""
    d, dv = map(int, (dims.split("/") * 2)[:2])
    spec = replace(modified(what, d, "float16"), head_dim_v=dv)
    sm90_binary(spec) if direction == "forward" else sm90_backward_binary(spec)


def test_sm90_gradients_take_other_modifications_as_their_graphs_say() -> None:
    """Such as a bias that is not of the distance, or a gain of each row."""
    plain, affine = AttentionSpec("bfloat16", 64, 64), expr.S * 1.1 - 0.5
    for score in (None, expr.S * expr.S, expr.S + expr.K * 0.5, expr.S * (expr.Q * 0.5)):
        assert not sm90_backward.takes_affine_path(replace(plain, score=score))
    assert [sm90_backward.takes_affine_path(replace(plain, score=affine, dropout=x)) for x in (0, 1)] == [True, False]


def test_sms_are_reserved_for_the_postprocess_where_that_costs_little() -> None:
    reserved = sm90_bwd_launch.reserved_sms
    assert [reserved("full", 4096, work_tiles, 132) for work_tiles in (100, 132, 140, 2048, 4096)] == [0, 0, 0, 4, 0]
    assert [reserved("causal", n, 2048, 132) for n in (1, 512, 1024, 2048, 4096, 8192, 16384)] == [8, 8, 7, 3, 2, 1, 0]
    assert reserved("other", 1024, 2048, 132) == reserved("blocks", 1024, 2048, 132) == 0  # work tiles differ in length
    kinds: tuple[sm90_bwd_launch.MaskKind, ...] = "full", "causal"
    for kind, n, sms in itertools.product(kinds, (1, 99, 4096), range(1, 40)):
        assert 0 <= reserved(kind, n, 7, sms) < sms
    causal, windowed = (spec_of([], [mods.causal(), *more]) for more in ([], [mods.sliding_window(100, None)]))
    assert [sm90_bwd_launch.mask_kind(spec) for spec in (causal, windowed)] == ["causal", "other"]
    assert sm90_bwd_launch.mask_kind(replace(causal, mask=None, kv_lengths=True)) == "other"


def test_sm90_backward_tiles_of_all_head_dims_fit() -> None:
    specs = [AttentionSpec("bfloat16", d, dv) for d in range(8, 257, 8) for dv in {d, 264 - d}]
    assert [spec for spec in specs if not tile_of(spec, "sm90", "backward").fits(spec, HOPPER)] == []


def test_heads_of_a_group_are_packed_where_they_divide_a_box() -> None:
    def packed(group: int, n_q: int) -> int:
        return sm90_launch.Forward.packed(Problem(AttentionSpec("float16", 64, 64, group), 1, 2 * group, n_q, 4096))

    assert [packed(group, 70) for group in (1, 2, 3, 6, 8, 64, 128)] == [1, 2, 1, 1, 8, 64, 1]
    assert packed(2, 257) == 1


def test_groups_of_heads_for_the_l2_cache_are_alike() -> None:
    asked = (10, 4), (8, 100), (7, 1), (7, 0), (9, 8)
    assert [memory.heads_per_l2_group(heads, limit) for heads, limit in asked] == [4, 8, 1, 1, 5]


def test_a_grid_has_an_end() -> None:
    launch.check_grid(0, launch.MAX_GRID)
    with pytest.raises(ValueError, match=r"expected at most .* tiles in a launch, got 2147483648"):
        launch.check_grid(1, launch.MAX_GRID + 1)


def test_more_than_48_kib_of_shared_memory_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launch, "call", lambda *arguments: asked.append(arguments) or 7)
    library = object.__new__(launch.Library)
    library.handle, library._ordinals = 0, set()
    for size in (48 * 1024, 48 * 1024 + 16, 90 * 1024):
        asked.clear()
        assert library.kernel("any", HOPPER, size).shared == size
        assert [size for function, *rest in asked if function == "cuKernelSetAttribute" for size in rest[1:2]] == [
            size
        ] * (size > 48 * 1024)


def test_a_binary_depends_on_the_headers_that_it_includes() -> None:
    text = '#include "a.cuh"\nint x;'

    def made_from(**headers: str) -> str:
        named = tuple((f"{name}.cuh", text) for name, text in headers.items())
        return repr(compiler.Source("x", text, named).made_from())

    same = made_from(a='  #include "b.cuh"', b="int b;", c="int c;")
    assert same == made_from(a='  #include "b.cuh"', b="int b;", c="int d;")
    assert same != made_from(a='  #include "b.cuh"', b="int d;", c="int c;")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("direction", "mask", "tile"),
    [("forward", mods.causal(), 128), ("forward", mods.sliding_window(300), 128), ("backward", mods.causal(), 64)],
    ids=["forward, causal", "forward, window", "backward, causal"],
)
@pytest.mark.one_in(4)
def test_sm90_compares_hidden_pairs_with_numbers(direction: Direction, mask: mods.Mod, tile: int) -> None:
    """Which of a lane's pairs of a tile are hidden takes no instruction to find out where each of them is."""
    spec = spec_of([], [mask], 128, "bfloat16")
    binary = sm90_binary(spec) if direction == "forward" else sm90_backward_binary(spec)
    numbers = re.findall(r"ISETP\.\w+\.\w+ P\d, PT, R\d+(?:\.reuse)?, (0x\w+)", disassembled(binary.path))
    assert {int(x, 16) for x in numbers} >= {8 * n + c for n in range(1, tile // 8) for c in (0, 1)}


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (mods.causal(), True),
        (mods.sliding_window(5, 3) & mods.causal(), True),
        (mods.mask(lambda b, h, q, k, *, reach: abs(q - k) < reach[h], reach=np.arange(2, 9)), True),
        (mods.mask(lambda b, h, q, k: expr.minimum(q, k + 3) <= k), True),
        (mods.mask(lambda b, h, q, k: q + k < 30), False),
        (mods.mask(lambda b, h, q, k: (k < 5) | (k <= q)), False),
        (mods.mask(lambda b, h, q, k: 2 * k <= q), False),
        (mods.mask(lambda b, h, q, k: q // 8 == k // 8), False),
        (mods.mask(lambda b, h, q, k, *, document: document[q] == document[k], document=np.arange(40) // 7), False),
    ],
    ids=str,
)
def test_masks_of_positions_counted_from_elsewhere(mask: mods.Mod, known: bool) -> None:
    """Kernels count positions from a tile's first one where the mask is the same for these; it is, then."""
    assert modification.shifts(mask.expr) == known
    if known:
        q, k = np.ogrid[:20, :20]
        given = {"b": 0, "h": 3, "row": q, **mask.params, **mask.arrays}
        of = [codegen.evaluate(mask.expr, {**given, "q": q + n, "k": k + n}) for n in (0, 1, -50, 1000)]
        assert 0 < np.count_nonzero(of[0]) < 400 and all(np.array_equal(of[0], each) for each in of)


def test_what_positions_are_computed_with() -> None:
    """Floats where they hold every integer on the way; integers where arrays are looked up; 64 bits where in doubt."""

    def found(score: object) -> str:
        return modification.positions(spec_of([score], []))

    assert modification.positions(AttentionSpec("float16", 64, 64)) == "integers"
    assert found(mods.softcap(3.0)) == found(mods.alibi(np.ones((2, 4), np.float32))) == "floats"
    assert found(mods.score(lambda s, b, h, q, k: s - expr.minimum(8 * (q - k), 5))) == "floats"
    assert found(mods.score(lambda s, b, h, q, k: s - 9 * (q - k))) == "integers"
    assert found(mods.bias(np.ones((4, 50, 100), np.float16))) == "integers"
    assert found(mods.score(lambda s, b, h, q, k: s - 1025 * (q - k))) == "any"
    assert found(mods.score(lambda s, b, h, q, k, *, n=7: s - (q + n))) == "any"
    assert found(mods.score(lambda s, b, h, q, k: s - (q - k) // 2)) == "any"


def test_what_is_known_of_a_bias() -> None:
    """Hopper's kernels take a dense one in tiles, as a mask."""
    x = np.zeros((2, 4, 64, 32), np.float16)

    def spec_of(**options: Any) -> AttentionSpec:
        return arguments.prepare(x, x, x, **options)[0].spec

    def bias(*shape: int, dtype: Any = np.float16) -> np.ndarray:
        return np.zeros(shape, dtype)

    for shape, head, entry in ((1, 4, 64, 64), 1, None), ((2, 1, 64, 64), None, 0), ((4, 64, 64), 0, None):
        found = modification.dense_bias(spec_of(bias=bias(*shape)))
        assert found is not None and (found.head, found.entry) == (head, entry)
    for shape in (2, 4, 64, 1), (2, 4, 1, 64), (1,):  # not of pairs
        assert modification.dense_bias(spec_of(bias=bias(*shape))) is None
    assert modification.dense_bias(spec_of(bias=bias(4, 64, 64), softcap=3.0)) is None

    tile = sm90_bwd_launch.BackwardTile(128)
    device = MODELS["sm_90a"]
    narrow, exact = spec_of(bias=bias(4, 64, 64)), spec_of(bias=bias(4, 64, 64, dtype=np.float64))
    _, staged = sm90_backward.staged_arrays(narrow, tile, device)
    assert (staged.block_q, staged.key_buffers, staged.bias_bytes) == (64, 2, 2)
    for spec in exact, replace(narrow, dropout=True):
        assert sm90_backward.staged_arrays(spec, tile, device) == (modification.NOT_DENSE, tile)

    of_mask = spec_of(bias=bias(4, 64, 64), mask=np.ones((2, 1, 64, 64), bool), causal=True)
    dense, staged = sm90_backward.staged_arrays(of_mask, tile, device)
    assert dense.bias is not None and dense.mask is not None and (dense.mask.head, dense.mask.entry) == (None, 0)
    assert (staged.bias_bytes, staged.mask_bytes) == (2, 1)
    assert modification.dense_mask(spec_of(mask=np.ones((2, 1, 1, 64), bool))) is None  # not of pairs


@pytest.mark.slow
@pytest.mark.parametrize("way", ["without", "stored", "summed"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.one_in(4)
def test_sm90_backward_with_a_bias_spills_outside_of_its_loop(d: int, way: str) -> None:
    """From the products of S to those of dV, nothing but in tiles that are not of finite rows and keys."""
    x = np.zeros((1 if way == "stored" else 2, 4, 64, d), ml_dtypes.bfloat16)
    problem, _, _ = arguments.prepare(x, x, x, bias=np.zeros((1, 4, 64, 64), ml_dtypes.bfloat16))
    spec = problem.spec if way == "without" else replace(problem.spec, wrt=(problem.spec.slots[-1].name,))
    given, tile = sm90_backward.staged_arrays(spec, tile_of(spec, "sm90", "backward"), MODELS["sm_90a"])
    stores = sm90_backward.stores_ds(replace(problem, spec=spec), given.bias)
    assert given.bias is not None and stores == (way == "stored")
    constants, functions = sm90_backward.source(spec, tile, False, given, stores, entries_first=way == "summed")
    found = compiler.binary(specialise.source("sm90/backward", spec, constants, functions), "sm_90a")
    assert found.resources["sm90_backward"].spills <= 320
    lines, _ = backward_lines(found)
    weights = [i for i, line in enumerate(lines) if "MUFU.EX2" in line]
    usual = lines[weights[-1] - 200 : weights[-1]]  # of tiles whose pairs are all visible
    assert sum("MUFU.EX2" in line for line in usual) >= 30
    assert spilled(usual) <= 4
