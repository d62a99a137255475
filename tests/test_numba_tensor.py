"""The Numba CUDA kernels for tensor cores without a device: compiled, they hold their tiles in registers and use the
instructions meant; the one for Ampere is run as Python too, lane by lane. On a device they run with
test_cuda_devices.py and test_conformance.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import lanes
import numpy as np
import pytest
from test_cuda_kernels import disassembled

import flashkit
from flashkit.arguments import prepare
from flashkit.backends.cuda_common import arguments as block
from flashkit.backends.cuda_common import compiler
from flashkit.backends.cuda_common.device import MODELS
from flashkit.backends.numba_cuda import sm80, sm90, specialise
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
        pytest.param("float16", 64, {"causal": True, "sinks": np.zeros(2)}, 1024, marks=pytest.mark.slow),
        pytest.param("bfloat16", 256, {"kv_lengths": np.array([9])}, 512, marks=pytest.mark.slow),
        pytest.param("bfloat16", 80, {"softcap": 5.0, "dropout_p": 0.1, "seed": 1}, 512, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_hoppers_forward_pass(dtype: str, d: int, options: dict, spilled: int) -> None:
    """Products are not serialised (or `binary` raises); little is spilled, in code that runs once an item."""
    spec = spec_of(dtype, d, **options)
    constants = sm90.forward_tile(spec).constants(spec, 1)
    binary = compiler.binary(specialise.source("sm90_forward", spec, constants), "sm_90a")
    resources = binary.resources["sm90_forward"]
    assert resources.registers in (128, 168)
    assert resources.spills <= spilled
    code = disassembled(binary.path)
    for instruction in ("HGMMA.64x", "UTMALDG.5D", "UTMASTG.5D", "SYNCS.PHASECHK", "USETMAXREG", "STSM"):
        assert instruction in code


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "d", "options"), [("bfloat16", 64, {}), ("float16", 128, {"causal": True})])
def test_the_forward_pass_by_mma(dtype: str, d: int, options: dict, arch: str) -> None:
    spec, device = spec_of(dtype, d, **options), MODELS[arch]
    tile = sm80.forward_tile(spec, device)
    assert tile is not None
    binary = compiler.binary(specialise.source("sm80_forward", spec, tile.constants(spec, device)), arch)
    assert binary.resources["sm80_forward"].spills <= 192
    code = disassembled(binary.path)
    for instruction in ("HMMA.16816.F32", "LDSM.16.M88.4", "LDSM.16.MT88.4", "LDGSTS"):
        assert instruction in code


def problem(**changes: object) -> Problem:
    sizes = {"batch": 1, "heads": 64, "n_q": 4096, "n_k": 4096, **changes}
    spec = AttentionSpec(str(sizes.pop("dtype", "bfloat16")), int(sizes.pop("d", 128)), 128)  # type: ignore[call-overload]
    return Problem(spec, **sizes)  # type: ignore[arg-type]


REFUSALS = [
    ({"dtype": "float32"}, "float32 is not for these tensor cores"),
    ({"d": 84}, "not whole 16 bytes"),
    ({"n_q": 9}, "empty"),
    ({"heads": 2, "n_q": 300, "n_k": 9000}, "the keys should be split"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSALS)
@pytest.mark.parametrize("generation", ["sm80", "sm90"])
def test_what_a_generation_cannot_do_is_refused(changes: dict, reason: str, generation: str) -> None:
    from flashkit.backends.numba_cuda.backend import NumbaCudaBackend

    (chosen,) = (each for each in NumbaCudaBackend.generations if each.name == generation)
    assert chosen.supports(problem(), HOPPER, "forward")
    verdict = chosen.supports(problem(**changes), HOPPER, "forward")
    assert not verdict
    assert reason in verdict.reason
    assert not chosen.supports(problem(), HOPPER, "backward")


def test_tiles_are_checked() -> None:
    with pytest.raises(ValueError, match="block_q is 64, 128 or 192"):
        sm90.Tile(100, 128)
    with pytest.raises(ValueError, match="block_k is a multiple of 16"):
        sm80.Tile(24)
    spec = AttentionSpec("bfloat16", 128, 128)
    assert sm90.forward_candidates(spec, HOPPER)[0] == sm90.forward_tile(spec)
    assert all(tile.shared_memory(spec) <= HOPPER.shared_per_block for tile in sm90.forward_candidates(spec, HOPPER))


def test_the_tutorial_shows_the_kernels_own_lines() -> None:
    root = Path(__file__).resolve().parents[1]
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
    "plain": ((1, 1, 1, 70, 50, 32, 32), {}),
    "causal, two blocks": ((1, 2, 1, 140, 140, 16, 24), {"causal": True}),
    "bfloat16, padded": ((1, 1, 1, 66, 70, 72, 64), {"dtype": "bfloat16"}),
    "window": ((1, 1, 1, 140, 150, 16, 16), {"window": (20, 5)}),
    "lengths": ((2, 1, 1, 65, 80, 16, 16), {"kv_lengths": np.array([0, 37]), "causal": True}),
    "sinks": ((1, 2, 2, 65, 40, 16, 16), {"sinks": np.array([0.5, 1.0])}),
    "growing maxima": ((1, 1, 1, 65, 130, 16, 16), {"growing": True}),
    "a hidden NaN": ((1, 1, 1, 70, 70, 16, 16), {"hidden_nan": True, "causal": True}),
    "dropout": ((1, 1, 1, 65, 70, 16, 16), {"dropout_p": 0.3, "seed": 5}),
    "scores": ((1, 2, 2, 65, 70, 16, 16), {"alibi_slopes": np.array([0.1, 0.5], np.float32), "softcap": 3.0}),
    "bias": ((1, 2, 2, 65, 70, 16, 16), {"bias": np.cos(np.arange(9100.0)).reshape(1, 2, 65, 70).astype(np.float32)}),
    "a mask of groups": ((1, 4, 2, 65, 70, 16, 16), {"mask": np.sin(np.arange(65 * 70)).reshape(65, 70) < 0.5}),
}


class Device:
    """An array as Arguments reads CuPy's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.strides, self.dtype, self.shape = array, array.strides, array.dtype, array.shape
        self.data = SimpleNamespace(ptr=array.ctypes.data)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if i in (0, 4) else pytest.mark.slow) for i, name in enumerate(BY_LANES)]
)
def test_the_forward_pass_by_mma_lane_by_lane(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel as Python (lanes.py), in tiles of 16 keys, against the definition in float64."""
    (batch, heads, heads_kv, n_q, n_k, d, dv), given = BY_LANES[name]
    options: dict = dict(given)
    dtype = options.pop("dtype", "float16")
    rng, stored = np.random.default_rng(0), lanes.NUMPYS[dtype]
    shapes = (batch, heads, n_q, d), (batch, heads_kv, n_k, d), (batch, heads_kv, n_k, dv)
    q, k, v = (rng.standard_normal(shape) for shape in shapes)
    if options.pop("growing", False):
        q, k = q * 3, k * np.linspace(0.1, 40, n_k)[:, None]
    if options.pop("hidden_nan", False):
        v[:, :, -1, 3] = np.nan
    q, k, v = (x.astype(stored) for x in (q, k, v))
    out, lse = np.full((batch, heads, n_q, dv), 0x7E01, np.uint16), np.full((batch, heads, n_q), np.nan, np.float32)

    problem, operands, _ = prepare(*(x.astype(np.float16) for x in (q, k, v)), **options)
    spec = replace(problem.spec, dtype=dtype)
    on_device = lambda x, dtype=None: x if isinstance(x, Device) else Device(np.ascontiguousarray(x, dtype))
    monkeypatch.setattr(block, "_on_device", on_device)
    placed = dict(zip(("q", "k", "v", "out", "lse"), map(Device, (q, k, v, out, lse))))
    arrays = {name: Device(np.asarray(x)) for name, x in operands.arrays.items()}
    sinks = Device(operands.sinks.astype(np.float32)) if spec.sinks else None
    arguments = block.Arguments(spec, replace(operands, **placed, sinks=sinks, arrays=arrays))
    arguments.set(splits=batch * heads)
    lanes.launch(
        "sm80_forward",
        spec,
        sm80.Tile(16).constants(spec, HOPPER),
        list(arguments.words),
        -(-n_q // 128) * batch * heads,
    )

    wide = [x.astype(np.float64) for x in (q, k, v)]
    truth, true_lse = flashkit.attention(*wide, **options, return_lse=True, backend="reference")
    scale = {"float16": 1e-3, "bfloat16": 8e-3}[dtype]
    np.testing.assert_allclose(out.view(stored).astype(np.float64), truth, rtol=4 * scale, atol=4 * scale)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-4, atol=1e-4)
