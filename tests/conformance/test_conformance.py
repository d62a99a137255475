"""Every backend against the definition: pairs of features, each feature alone, head dims, sizes of many tiles, finite
differences.

What may vary, how a call is built and how near is near enough is in cases.py. A backend that is not available is
skipped with its own reason.
"""

import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cases
import numpy as np
import pytest
from cases import FACTORS, PLAIN, with_

import flashkit

THREADS = int(os.environ.get("FLASHKIT_TEST_THREADS", "1"))
DESIGN = cases.pairwise(FACTORS)
ALONE = [
    (factor, level) for factor, levels in FACTORS.items() if factor not in ("dtype", "dims") for level in levels[1:]
]
COMPILED = [backend for backend in cases.backends() if backend.values[0] != "reference"]
HEAD_DIMS = (
    1, 2, 3, 5, 7, 12, 15, 16, 17, 24, 31, 33, 40, 47, 48, 49, 65, 72, 95, 100, 112, 127, 129, 144, 160, 191, 192, 224,
    255, 256, 257, 288, 320, 383, 400, 448, 509, 511, 512,
)  # fmt: skip


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that a call makes for its results and its scratch are full of NaN: what nobody writes shows."""
    import numba.np.arrayobj  # noqa: F401  # Numba knows np.empty by identity, from the time of this import on

    for library in filter(None, (np, sys.modules.get("cupy"))):
        empty = library.empty

        def full_of_nan(*args: Any, empty: Any = empty, **kwargs: Any) -> Any:
            array = empty(*args, **kwargs)
            if array.dtype.kind == "f":
                array.fill(np.nan)
            return array

        monkeypatch.setattr(library, "empty", full_of_nan)


def check(backend: str, choice: cases.Choice, seed: int = 0) -> None:
    """The call that the choice describes conforms on the backend: forward, lse and all gradients.

    FLASHKIT_TEST_THREADS: Python threads that make the call at the same time, each with arrays of its own.
    """
    cases.skip_unless(backend)
    calls = [cases.build(choice, cases.array_library(backend), seed) for _ in range(THREADS)]
    cases.skip_unless(backend, calls[0])
    expected = cases.expected(calls[0])
    with ThreadPoolExecutor(THREADS) as pool:
        for results in pool.map(lambda call: cases.run(call, backend), calls):
            cases.assert_conforms(results, *expected)
            cases.assert_rounded_once(results, expected[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_is_missing_does_not_conform(dtype: str) -> None:
    """A key of 500, a query of 160, or a hundredth of the scale: more than rounding is allowed in each result."""
    call = cases.build(with_(dtype=dtype, sizes="160x500", dims="64"))
    exact, allowed = cases.expected(call, draws=1)
    q, k, v, dout = (x.astype(np.float64) for x in (*(call.plain[name] for name in "qkv"), call.plain_dout))
    fewer = np.where(np.arange(160)[:, None] == 80, 0, dout)
    for options, of_rows, names in (
        ({"mask": np.arange(500) != 250}, dout, ("out", "lse", "dq", "dk", "dv")), ({}, fewer, ("dk", "dv")),
        ({"scale": 1.01 / 8}, dout, ("out", "lse", "dq", "dk", "dv")),
    ):  # fmt: skip
        (out, lse), vjp = flashkit.attention_vjp(q, k, v, return_lse=True, backend="reference", **options)
        found = cases.ratios(cases.Results(out, lse, *vjp(of_rows), None), exact, allowed)
        assert all(found[name] > 1 for name in names), found
    with pytest.raises(AssertionError, match="mean error"):
        cases.within_a_unit(1.01 * exact.dq, exact.dq, dtype)


def slow_if(condition: bool) -> list[Any]:
    return [pytest.mark.slow] if condition else []


def takes_seconds(choice: cases.Choice) -> bool:
    return choice["dtype"] in ("float16", "bfloat16") or choice["sizes"] == "130x200"


def features_of(choice: cases.Choice) -> int:
    """With more than twelve, kernels compile for half a minute."""
    return sum(choice[factor] != PLAIN[factor] for factor in choice)


# --- the design -------------------------------------------------------------------------------------------------------


def test_the_design_holds_every_pair() -> None:
    held = {frozenset(pair) for row in DESIGN for pair in itertools.combinations(row.items(), 2)}
    assert cases.pairs(FACTORS) <= held
    assert all(cases.possible(*pair) for pair in held)
    assert len(DESIGN) < 2 * 8 * 9  # the two longest factors alone take 8 x 9


def test_the_design_leaves_keys_to_see() -> None:
    """A check of rows without keys alone would check little."""
    shares = [cases.visible_share(tuple(row.items())) for row in DESIGN if row["sizes"] != "130x200"]
    assert np.mean([share > 0.1 for share in shares]) > 0.8


def test_poison_between_the_elements() -> None:
    x = np.arange(24.0).reshape(2, 3, 4)
    for how in FACTORS["storage"]:
        np.testing.assert_array_equal(cases.stored(np, x, how), x[:1].repeat(2, 0) if how == "shared heads" else x)
    assert np.isnan(cases.stored(np, x, "gaps").base).any()


# --- conformance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "row"),
    [
        pytest.param(
            *backend.values,
            i,
            marks=[
                *backend.marks,
                *slow_if(i % 3 > 0 or takes_seconds(choice)),
                *[pytest.mark.exhaustive] * (backend.values[0] == "cpu" and features_of(choice) > 12),
            ],
        )
        for backend in cases.backends()
        for i, choice in enumerate(DESIGN)
        if backend.values[0] != "reference" or i % 4 == 0  # test_reference.py holds it against the definition
    ],
)
@pytest.mark.one_in(8, slow=48)
def test_pairs_of_features(row: int, backend: str) -> None:
    """Rows of a pairwise design over all factors; cases.name(DESIGN[row]) says which."""
    check(backend, DESIGN[row])


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", [pytest.param(d, marks=slow_if(d != "float32")) for d in FACTORS["dtype"]])
@pytest.mark.parametrize(
    ("factor", "level"), [pytest.param(f, x, marks=slow_if(x not in FACTORS[f][1:3])) for f, x in ALONE]
)
@pytest.mark.one_in(4, slow=24)
def test_a_feature_alone(factor: str, level: str, dtype: str, backend: str) -> None:
    choice = {**PLAIN, "sizes": "45x107", "dims": "40", "heads": "4:2", "dtype": dtype, factor: level}
    if choice["layout"] in ("three axes", "two axes"):
        choice["batch"] = "1"
    if choice["layout"] == "two axes":
        choice["heads"] = "1:1"
    check(backend, choice)


@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("d", [pytest.param(d, marks=slow_if(i % 3 != 0)) for i, d in enumerate(HEAD_DIMS)])
def test_head_dims(d: int, backend: str) -> None:
    """From 1 to 512, v's the same and another one; 16 bits for every third."""
    other = HEAD_DIMS[(HEAD_DIMS.index(d) * 7 + 3) % len(HEAD_DIMS)]
    check(backend, with_(dims=f"{d}", sizes="21x30", batch="1"))
    check(backend, with_(dims=f"{d}/{other}", sizes="21x30", batch="1", causal="yes"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
@pytest.mark.parametrize("dims", ["1", "17", "96", "256", "512", "192/128", "3/300"])
def test_head_dims_of_other_dtypes(dims: str, dtype: str, backend: str) -> None:
    check(backend, with_(dims=dims, sizes="21x30", batch="1", dtype=dtype, causal="yes"))


MANY_TILES = {
    "plain": {}, "causal, grouped": {"causal": "yes", "heads": "4:1"}, "window": {"window": "left", "causal": "yes"},
    "documents": {"mask_mod": "document", "kv_lengths": "yes"}, "bool mask": {"mask": "full", "storage": "gaps"},
    "blocks": {"block_mask": "bigbird", "sinks": "yes"},
    "dropout": {"dropout": "yes", "score_mod": "array by distance"},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("sizes", ["700x900", "3x2500", "1500x2"])
@pytest.mark.parametrize("what", MANY_TILES)
@pytest.mark.one_in(4)
def test_many_tiles(what: str, sizes: str, backend: str) -> None:
    """Sizes beyond a tile in both axes, in one and in the other; these take the threaded paths."""
    check(backend, {**with_(batch="1", dims="64", sizes=sizes, heads="1:1"), **MANY_TILES[what]})


BOUNDARIES = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (40, 0)},
    "window to the right": {"window": (3, 20)},
}


@pytest.mark.parametrize("backend", [b for b in cases.backends() if not b.marks])
@pytest.mark.parametrize("what", BOUNDARIES)
def test_every_place_of_a_boundary(what: str, backend: str) -> None:
    """A mask's boundary at every place within the tiles of a kernel: one pair too many or too few in a corner shows."""
    cases.skip_unless(backend)
    rng = np.random.default_rng(0)
    n_q, n_k = 130, 210
    q, k, v = (rng.standard_normal((1, 1, n, 4)) for n in (n_q, n_k, n_k))
    scores = q[0, 0] @ k[0, 0].T / 2
    step = 7 if backend == "reference" else 1 if what == "causal" else 3
    for offset in range(-n_q - 5, n_k + 5, step):
        options = {**BOUNDARIES[what], "q_offset": offset}
        (out, lse), vjp = flashkit.attention_vjp(q, k, v, **options, return_lse=True, backend=backend)
        dq, dk, dv = (x[0, 0] for x in vjp(out))
        left, right = options.get("window", (None, None))
        distance = np.arange(n_k) - (np.arange(n_q)[:, None] + offset)
        shown = distance <= (0 if "causal" in options else right)
        if left is not None:
            shown &= distance >= -left
        p = np.where(shown, np.exp(scores), 0)
        total = p.sum(1, keepdims=True)
        p = np.divide(p, total, out=np.zeros_like(p), where=total > 0)
        expected = p @ v[0, 0]
        ds = p * (expected @ v[0, 0].T - (expected**2).sum(1, keepdims=True)) / 2
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[0, 0], np.log(total[:, 0]), rtol=1e-12, atol=1e-13)
        for got, x in ((out[0, 0], expected), (dq, ds @ k[0, 0]), (dk, ds.T @ q[0, 0]), (dv, p.T @ expected)):
            np.testing.assert_allclose(got, x, rtol=1e-10, atol=1e-12, err_msg=f"q_offset {offset}")
