"""Autotuning on a CUDA device: candidates are verified, a profile is written and then used."""

from typing import Any

import cases
import numpy as np
import pytest

import flashkit
from flashkit import dispatch
from flashkit.devices import profiles
from flashkit.tools.autotune import command
from flashkit.tools.autotune.targets import DECODE_ROWS, Effort

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_profiles")]

SMALL = Effort(("bfloat16",), (64,), tokens=2048, blocks=3, shapes=0, rounds=4, budget=60.0)


@pytest.fixture(autouse=True)
def device() -> None:
    if "cupy_raw" not in dispatch.registry():
        pytest.skip("cupy_raw cannot be imported")
    cases.skip_unless("cupy_raw")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_wrong_results_are_found(direction: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    runner: Any = command.tuners("cupy_raw")[0]
    (target, *_) = [t for t in runner.targets(SMALL, None) if t.direction == direction]
    runner.begin(SMALL, [target])
    tile = runner.in_use(target)
    assert runner.candidates(target)[0].generation == target.generation
    assert runner.verify(target, tile) == ""
    made = runner.made(target, tile)
    run = type(made).run

    def spoilt(self: Any, arguments: Any, stream: int) -> None:
        run(self, arguments, stream)
        array = next(iter(runner.task(target, small=True).results.values()))
        array[0, -1, -1] += cupy.ones(64, array.dtype)

    monkeypatch.setattr(type(made), "run", spoilt)
    assert "is off by" in runner.verify(target, tile)


def test_autotune_writes_a_profile_that_is_used_and_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from flashkit.tools.autotune import cuda

    monkeypatch.setattr(cuda, "QUICK", SMALL)
    shape = 8, 8, 2048, 64  # fills the device, as what is timed
    x = cupy.asarray(np.random.default_rng(0).standard_normal(shape).astype("bfloat16"))
    right = flashkit.attention(x, x, x, causal=True).astype("float32")  # a plan by the old profile is cached
    found = command.autotune(quick=True, backend="cupy_raw")
    assert {f.target.direction for f in found} == {"forward", "backward"}
    assert any(f.target.few for f in found)
    (file,) = profiles.user_dir().glob("*.yaml")
    causal = [f for f in found if f.target.problem == ("forward", "bfloat16", "64", "causal")]
    best = max(causal, key=lambda f: f.gflops)
    explanation = flashkit.explain(x, x, x, causal=True)
    assert str(file) in str(explanation.row)
    assert (explanation.tile["block_q"], explanation.tile["block_k"]) == (best.tile.block_q, best.tile.block_k)
    assert explanation.why.startswith(best.target.generation)
    assert float(cupy.abs(flashkit.attention(x, x, x, causal=True).astype("float32") - right).max()) < 0.02
    profile = profiles.for_device("cuda")
    assert 100 < profile.bandwidth_gbs < 1e5
    assert profile.memory.sram_bandwidth_gbs.measured > profile.bandwidth_gbs
    assert profile.peak_tflops["bfloat16"].measured > 1
    (few,) = {row.max_rows for row in profile.tiles["cupy_raw.forward"] if row.max_rows is not None}
    assert few == DECODE_ROWS
