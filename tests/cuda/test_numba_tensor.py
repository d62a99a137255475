"""The Numba CUDA kernels for tensor cores, compiled: they hold their tiles in registers and use the instructions meant.

tests/emulator runs them without a device, test_cuda_devices.py and test_conformance.py on one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from test_cuda_kernels import disassembled
from tiles import MODELS, tile_of

from flashkit.backends.cuda_common import compiler
from flashkit.backends.numba_cuda import specialise
from flashkit.backends.numba_cuda.backend import NumbaCudaBackend
from flashkit.call.arguments import prepare
from flashkit.devices import profiles
from flashkit.spec import AttentionSpec, Problem

pytestmark = pytest.mark.skipif(not find_spec("numba_cuda"), reason="numba-cuda is not installed")

HOPPER, NUMBA = MODELS["sm_90a"], NumbaCudaBackend()


def spec_of(dtype: str, d: int, **options: object) -> AttentionSpec:
    q = np.zeros((1, 2, 300, d), np.float16)
    problem, _, _ = prepare(q, q, q, **options)
    return replace(problem.spec, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "d", "options"),
    [
        ("bfloat16", 128, {}), ("bfloat16", 64, {}), ("float16", 128, {"causal": True}),
        ("bfloat16", 64, {"causal": True}), ("bfloat16", 96, {"kv_lengths": np.array([9])}),
        ("bfloat16", 80, {"softcap": 5.0, "dropout_p": 0.1, "seed": 1}),
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_hoppers_backward_pass(dtype: str, d: int, options: dict) -> None:
    """The wgmmas that the text asks for and no more, none serialised (or `binary` raises), no wait added by ptxas, and
    few spills in the loop over query tiles; the rest is in code that runs once a work tile, or in the producer warp
    group.
    """
    spec = spec_of(dtype, d, **options)
    tile = tile_of(spec, "sm90", "backward", backend=NUMBA)
    binary = compiler.binary(specialise.source("sm90/backward", spec, tile.constants(spec)), "sm_90a")
    assert binary.resources["bwd_preprocess"].spills == 0
    # The rare part, where a hidden pair may have met NaN, makes do with what leaves room for many threads.
    assert binary.resources["bwd_postprocess"].spills <= (192 if options else 0)
    assert binary.resources["sm90_backward"].spills <= (128 if not options else 640)
    code = disassembled(binary.path)
    code = code[code.index(".text.sm90_backward:") :]
    lines = code[: code.find(".section", 10)].splitlines()
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    # S twice, of the first tile and of the next one; dQ twice, in the loop and after it.
    assert len(products) == 3 * -(-d // 16) + 2 * tile.block_q // 16 + 2 * tile.block_k // 16
    assert sum("WARPGROUP.DEPBAR" in line for line in lines) == 6
    assert not any("MEMBAR.ALL.GPU" in line for line in lines[products[0] : products[-1]])
    spilled = [line for line in lines[products[0] : products[-1]] if re.search(r"\b(STL|LDL)", line)]
    assert len(spilled) <= 60
    for instruction in (
        "HGMMA.64x", "UTMALDG.5D", "UBLKCP", "UTMASTG.5D", "UBLKRED", "REDG.E.ADD.F32", "SYNCS.PHASECHK", "USETMAXREG",
        "STSM",
    ):  # fmt: skip
        assert instruction in code


ARCHS = "sm_80", pytest.param("sm_90a", marks=pytest.mark.exhaustive)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "d", "options", "spilled"),
    [
        ("bfloat16", 128, {}, 96), ("float16", 128, {"causal": True}, 128),
        ("float16", 64, {"causal": True, "sinks": np.zeros(2)}, 96),
        ("bfloat16", 80, {"softcap": 5.0, "dropout_p": 0.1, "seed": 1}, 1200), ("bfloat16", 256, {}, 64),
    ],
)  # fmt: skip
@pytest.mark.exhaustive
def test_the_backward_pass_by_mma(dtype: str, d: int, options: dict, spilled: int, arch: str) -> None:
    if d > 128 and arch == "sm_80":
        pytest.skip("its shared memory holds a small tile alone, whose sums are spilled")
    spec, device = spec_of(dtype, d, **options), MODELS[arch]
    tile = tile_of(spec, "sm80", "backward", device, NUMBA)
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


REFUSALS = [({"d": 84}, "not whole 16 bytes"), ({"d": 264}, "head dim 264 is over 256")]


def generation(name: str) -> Any:
    (chosen,) = (each for each in NumbaCudaBackend.generations if each.name == name)
    return chosen


NO_FLOAT32 = {"dtype": "float32"}, "float32 is not for these tensor cores"


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_what_a_generation_cannot_do_is_refused(changes: dict, reason: str, name: str) -> None:
    assert generation(name).supports(problem(), HOPPER, "forward")
    assert generation(name).supports(problem(), HOPPER, "backward")
    assert reason in generation(name).supports(problem(**changes), HOPPER, "forward").reason


def test_what_the_backward_pass_by_mma_cannot_do_is_refused() -> None:
    chosen = generation("sm80")
    for changes, reason in (*REFUSALS, NO_FLOAT32):
        assert reason in chosen.supports(problem(**changes), HOPPER, "backward").reason
    assert chosen.supports(problem(n_q=9), HOPPER, "backward")
    assert chosen.supports(problem(heads=2, n_q=300, n_k=9000), HOPPER, "backward"), "it has blocks enough, by keys"
    assert chosen.supports(problem(d=256), HOPPER, "backward")
    small = replace(HOPPER, shared_per_block=20_000)
    profile = profiles.by_name("generic_cuda")
    assert "sm80: no tile of the profile fits" in NUMBA.choose(problem(), profile, small, "backward").rejected


def test_what_hoppers_backward_pass_cannot_do_is_refused() -> None:
    chosen = generation("sm90")
    for changes, reason in (*REFUSALS, NO_FLOAT32):
        assert reason in chosen.supports(problem(**changes), HOPPER, "backward").reason
    assert "not sm_90" in chosen.supports(problem(), MODELS["sm_80"], "backward").reason
    assert "more than 128 columns" in chosen.supports(problem(d=136), HOPPER, "backward").reason
    assert chosen.supports(problem(d=136), HOPPER, "forward")


WHERE = [
    ({}, "sm90", "sm90", ""),
    ({"kv_lengths": True, "dropout": True, "sinks": True}, "sm90", "sm90", ""),
    ({"d": 256}, "sm90", "sm80", "gradients of more than 128 columns run on the sm80 kernels"),
    ({"n_q": 9}, "sm80", "sm90", "rows share keys"),
    ({"deterministic": True}, "sm90", "simt", "deterministic gradients run on the simt kernels"),
    ({"packed": True}, "simt", "simt", "packed sequences run on the simt kernels"),
    ({"packed": True, "paged": True}, "simt", "simt", "packed sequences run on the simt kernels"),
    ({"paged": True}, "simt", "simt", "paged keys run on the simt kernels"),
    ({"dtype": "float32"}, "simt", "simt", "float32 is not for these tensor cores"),
]


@pytest.mark.parametrize(("changes", "forward", "backward", "reason"), WHERE, ids=lambda x: str(x))
def test_which_kernels_take_a_call(changes: dict, forward: str, backward: str, reason: str) -> None:
    """What tensor cores do not take here runs on older kernels, and each refusal says why."""
    flags = {name: x for name, x in changes.items() if isinstance(x, bool)}
    asked = problem(**{name: x for name, x in changes.items() if name not in flags})
    asked = replace(asked, spec=replace(asked.spec, **flags))
    profile, rejected = profiles.by_name("generic_cuda"), list[str]()
    for direction, name in (("forward", forward), ("backward", backward)):
        choice = NUMBA.choose(asked, profile, HOPPER, direction)
        assert choice.generation is not None and choice.generation.name == name
        rejected += choice.rejected
    assert all(reason in line for line in rejected) and bool(rejected) == bool(reason)
