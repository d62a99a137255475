"""The IO model against the reference's counted traffic; which tiles are possible, and which come first."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operands import make

from flashkit import mods, reference
from flashkit.devices import io_model, profiles
from flashkit.devices.io_model import CpuTile
from flashkit.reference import Traffic
from flashkit.spec import AttentionSpec, Operands

CPUS = [  # lanes, L1d, L2 in bytes
    (16, 32 << 10, 1 << 20), (16, 48 << 10, 2 << 20), (8, 32 << 10, 256 << 10), (4, 128 << 10, 12 << 20),
]  # fmt: skip


# --- the IO model -----------------------------------------------------------------------------------------------------


def counted(order: int, direction: str, spec: AttentionSpec, operands: Operands, block_q: int, block_k: int) -> Traffic:
    traffic = Traffic()
    forward = (reference.flash_attention_1, reference.flash_attention_2)[order - 1]
    if direction == "forward":
        forward(spec, operands, block_q, block_k, traffic=traffic)
    else:
        operands.out, operands.lse = forward(spec, operands, block_q, block_k)
        dout = np.ones_like(operands.out)
        reference.flash_attention_backward(spec, operands, dout, None, block_q, block_k, traffic=traffic, order=order)
    return traffic


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("order", [1, 2])
@settings(max_examples=25, deadline=None)
@given(
    n_q=st.integers(1, 20), n_k=st.integers(1, 20), d=st.integers(1, 5), dv=st.integers(1, 5),
    block_q=st.integers(1, 24), block_k=st.integers(1, 24), kv_heads=st.integers(1, 2), group=st.integers(1, 3),
)  # fmt: skip
def test_counted_traffic_equals_the_formula(
    order: Any, direction: Any, n_q: int, n_k: int, d: int, dv: int, block_q: int, block_k: int,
    kv_heads: int, group: int,
) -> None:  # fmt: skip
    spec, operands = make(2, kv_heads * group, n_q, n_k, d, dv, group)
    traffic = counted(order, direction, spec, operands, block_q, block_k)
    formula = io_model.traffic(order, direction, n_q, n_k, d, dv, block_q, block_k, group=group)
    assert traffic.reads + traffic.writes == {name: 2 * kv_heads * n for name, n in formula.items()}


BLOCK_MASKS = {
    "causal": lambda rng: mods.causal(),
    "window": lambda rng: mods.sliding_window(16, 0),
    "random blocks": lambda rng: block_mask(rng.random((8, 8)) < 0.4),
    "nothing": lambda rng: mods.mask(lambda b, h, q, k: k < 0),
}


def block_mask(grid: np.ndarray) -> mods.Mod:
    """Tiles of 8 x 8 of which `grid` says whether they are visible."""
    return mods.mask(lambda b, h, q, k, *, grid: grid[q // 8, k // 8], grid=grid)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", BLOCK_MASKS)
def test_counted_traffic_equals_the_formula_under_a_block_mask(name: str, order: Any, direction: Any) -> None:
    spec, operands = make(1, 1, 64, 64, 4, 3, mask=BLOCK_MASKS[name](np.random.default_rng(3)))
    head = next(reference.groups(spec, operands, np.float64))[0]
    kept = float((reference.tile_states(head, 8, 8) != reference.EMPTY).mean())
    assert kept < 1
    traffic = counted(order, direction, spec, operands, 8, 8)
    formula = io_model.traffic(order, direction, 64, 64, 4, 3, 8, 8, kept)
    assert traffic.reads + traffic.writes == {name: n for name, n in formula.items() if n}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("order", [1, 2])
def test_traffic_falls_as_one_over_the_memory(order: Any, direction: Any) -> None:
    """Counted, with the paper's tile: twice the fast memory, half the traffic beyond what moves once in any case."""
    n, d = 512, 16
    spec, operands = make(1, 1, n, n, d, d)
    memories = (1024, 2048, 4096, 8192)
    growing = []
    for memory in memories:
        # Both papers have K and V outside in the backward pass.
        block_q, block_k = io_model.paper_tile(memory, d, order if direction == "forward" else 1)
        assert max(block_q, block_k) == memory // (4 * d)
        once = sum(io_model.traffic(order, direction, n, n, d, d, block_q, block_k, kept=0).values())
        growing.append(counted(order, direction, spec, operands, block_q, block_k).total - once)
        assert once < 12 * n * d
    # The asymptotic law, Theta(N^2 d^2 / M), with one constant for all sizes of memory.
    constants = [x * memory / (n * n * d * d) for x, memory in zip(growing, memories)]
    np.testing.assert_allclose(constants, constants[0])
    assert 4 < constants[0] < 30


def test_paper_tile() -> None:
    assert io_model.paper_tile(100_000, 64) == (64, 391)
    assert io_model.paper_tile(1_000, 64) == (4, 4)
    assert io_model.paper_tile(100_000, 64, order=2) == (391, 64)
    with pytest.raises(ValueError, match=r"memory, head_dim: .* got 0 and 64"):
        io_model.paper_tile(0, 64)


# --- tiles ------------------------------------------------------------------------------------------------------------


def test_working_set() -> None:
    tile = CpuTile(192, 96, 16, 8, 3)
    l1, l2 = tile.working_set("forward", 64, 64)
    assert l1 == 4 * (96 * 48 + 64 * 48)
    assert l2 == 4 * (96 * 48 + (192 + 96) * 128)
    l1, l2 = tile.working_set("backward", 64, 32, itemsize=8)
    assert l1 == 8 * 2 * 192 * 96
    keys, queries = 64 + 32 + 64 + 64 + 32, 64 + 32 + 64  # K^T, V^T, K, dK, dV; Q, dO, dQ
    assert l2 == l1 + 8 * (96 * keys + 192 * queries)


# --- candidates -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CPUS), st.sampled_from(["float64", "float32", "float16", "bfloat16"]), st.integers(1, 512),
    st.integers(1, 512), st.sampled_from(["forward", "backward"]),
)  # fmt: skip
def test_cpu_candidates(cpu: tuple[int, int, int], dtype: str, d: int, dv: int, direction: Any) -> None:
    lanes, l1, l2 = cpu
    found = io_model.candidates(dtype, d, dv, direction, lanes=lanes, l1d=l1, l2=l2)
    assert found == io_model.candidates(dtype, d, dv, direction, lanes=lanes, l1d=l1, l2=l2)
    assert len(set(found)) == len(found)
    itemsize = 8 if dtype == "float64" else 4
    for tile in found:
        assert tile.lanes == lanes
        assert tile.block_q % tile.panel() == 0
        assert tile.registers_used <= tile.registers
        if direction == "forward":
            assert tile.block_k * tile.panel(itemsize) * itemsize <= l1
        assert tile.working_set(direction, d, dv, itemsize)[1] <= l2 or tile.block_k == 32


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("d", "dv"), [(1, 1), (64, 64), (80, 80), (128, 128), (512, 512), (1024, 1024)])
def test_amx_candidates(d: int, dv: int, direction: Any) -> None:
    memory = {"l1d": 48 << 10, "l2": 2 << 20}
    found = io_model.amx_candidates(d, dv, direction, **memory)
    assert found == io_model.amx_candidates(d, dv, direction, **memory) and len(set(found)) == len(found) > 0
    for tile in found:
        assert tile.block_q % tile.panel() == 0 and tile.block_k % 32 == 0
        assert tile.working_set(direction, d, dv)[1] <= 2 << 20 or tile == found[-1]
    in_use = profiles.by_name("cpu_amx").tile(f"cpu_amx.{direction}", dtype="bfloat16", head_dim=d)
    assert d > 128 or (in_use.block_q, in_use.block_k) in {(tile.block_q, tile.block_k) for tile in found}


def test_the_model_prefers_what_was_measured_to_be_fast() -> None:
    """AVX-512, head dim 64: register blocks 8x3 with hundreds of queries and about a hundred keys; AVX2: 4x3."""
    best = io_model.candidates("float32", 64, 64, lanes=16, l1d=48 << 10, l2=2 << 20)[0]
    assert (best.rows, best.vectors) in ((8, 3), (6, 4))
    assert 96 <= best.block_q <= 384
    assert 64 <= best.block_k <= 192
    best = io_model.candidates("float32", 64, 64, lanes=8, l1d=32 << 10, l2=512 << 10)[0]
    assert (best.rows, best.vectors) in ((4, 3), (6, 2))


def test_default_for_a_profile() -> None:
    def profile(features: list[str] | None, l1d: int | None, l2: int | None) -> Any:
        return SimpleNamespace(device=SimpleNamespace(features=features), memory=SimpleNamespace(l1d=l1d, l2=l2))

    avx512 = profile(["avx2", "fma", "avx512f", "avx512vl"], 48 << 10, 2 << 20)
    assert io_model.default_cpu(avx512, "float32", 64, 64).lanes == 16
    assert io_model.default_cpu(profile(["avx2", "fma"], 32768, 1 << 20), "float64", 64, 64).lanes == 8
    assert io_model.default_cpu(profile(None, None, None), "bfloat16", 512, 512, "backward").lanes == 4


def test_no_tile_fits_a_tiny_cache() -> None:
    with pytest.raises(ValueError, match="no tile of float32, head dims 64/48, fits a CPU with l1d=512, l2=1024"):
        io_model.candidates("float32", 64, 48, l1d=512, l2=1024)
