"""flashkit.dask: chunks of any axis make the result of one call."""

import threading
import weakref
from typing import Any

import numpy as np
import pytest

import flashkit
from flashkit import mods
from flashkit.mods import expr

dask = pytest.importorskip("dask", reason="the extra `dask`")
import dask.array as da  # noqa: E402

from flashkit.call.chunks import moved  # noqa: E402
from flashkit.dask import attention  # noqa: E402

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
N_Q, N_K = 50, 70
CHUNKS = {
    "one": ((2, 4, N_Q, 16),) * 3,
    "keys": ((2, 4, N_Q, 16), (2, 2, 16, 16), (2, 2, 16, 16)),
    "all": ((1, 2, 20, 16), (2, 1, 30, 8), (2, 2, 25, 16)),
    "odd heads": ((2, 3, 17, 5), (1, 2, 70, 16), (2, 2, 9, 16)),
}
DOCUMENTS = np.arange(N_K) // 25


def tensors(lead: tuple[int, ...] = (2, 4), kv: int = 2, dtype: str = "float64", dv: int = 16) -> list[np.ndarray]:
    *batch, heads = lead
    shapes = (*batch, heads, N_Q, 16), (*batch, kv, N_K, 16), (*batch, kv, N_K, dv)
    return [RNG.standard_normal(shape).astype(dtype) for shape in shapes]


def chunked(arrays: Any, chunks: Any) -> list[da.Array]:
    return [da.from_array(x, chunks=each, name=False) for x, each in zip(arrays, chunks, strict=True)]


def same(found: Any, expected: Any, rtol: float = 1e-11) -> None:
    with dask.config.set(scheduler="threads"):
        results = dask.compute(*found)
    for got, wanted in zip(results, expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "offset": {"causal": True, "q_offset": [-5, 60]},
    "window": {"window": (9, 3), "softcap": 2.0},
    "lengths": {"kv_lengths": [17, 60], "q_offset": [0, 10], "causal": True},
    "queries": {"kv_lengths": [17, 60], "q_lengths": [9, 30], "causal": True},
    "no keys": {"kv_lengths": [0, 70]},
    "slopes": {"alibi_slopes": RNG.random(4), "causal": True},
    "slopes of entries": {"alibi_slopes": RNG.random((2, 4))},
    "sinks": {"sinks": RNG.standard_normal(4), "kv_lengths": [0, 33]},
    "arrays": {"bias": RNG.standard_normal((4, 1, N_K)), "mask": RNG.random((2, 1, N_Q, N_K)) < 0.5},
    "dask arrays": {"bias": da.from_array(RNG.standard_normal((2, 1, N_Q, 1)), chunks=(1, 1, 13, 1))},
    "score function": {"score_mod": lambda s, b, h, q, k: s + 0.1 * b - 0.2 * h + 0.01 * q * k},
    "table": {
        "score_mod": mods.score(
            lambda s, b, h, q, k, *, t: s + t[h, flashkit.clip(q - k, -8, 8) + 8], t=RNG.standard_normal((4, 17))
        )
    },
    "documents": {"mask_mod": mods.document(DOCUMENTS) & mods.causal()},
    "rows": {"mask_mod": mods.document(RNG.integers(3, size=(2, N_Q)), RNG.integers(3, size=(2, N_K)))},
    "blocks": {"block_mask": flashkit.BlockMask.local(N_Q, N_K, left_blocks=2, block=8), "mask_mod": mods.dilated(3)},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.one_in(8)
def test_chunks_make_the_whole(name: str, chunks: str) -> None:
    q, k, v = tensors()
    options = OPTIONS[name]
    plain = {name: x.compute() if isinstance(x, da.Array) else x for name, x in options.items()}
    found = attention(*chunked((q, k, v), CHUNKS[chunks]), return_lse=True, split_every=2, **options)
    same(found, flashkit.attention(q, k, v, return_lse=True, **plain))


def test_lengths_may_be_unsigned() -> None:
    q, k, v = tensors()
    lengths = {"kv_lengths": np.array([17, 60], np.uint8), "q_lengths": np.array([9, 30], np.uint8)}
    found = attention(*chunked((q, k, v), [(2, 4, 8, 16), (2, 2, 20, 16), (2, 2, 20, 16)]), return_lse=True, **lengths)
    same(found, flashkit.attention(q, k, v, return_lse=True, **lengths))


def test_the_chunks_of_the_result() -> None:
    q, k, v = tensors(dtype="float32", dv=24)
    out = attention(*chunked((q, k, v), CHUNKS["keys"]), causal=True)
    assert out.chunks == ((2,), (4,), (N_Q,), (24,)) and out.dtype == np.float32


@pytest.mark.parametrize("lead", [(), (4,), (2, 3, 4)], ids=["ND", "HND", "ABHND"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
def test_shapes_and_layouts(lead: tuple[int, ...], layout: str) -> None:
    q, k, v = tensors(lead) if lead else (x[0, 0] for x in tensors())
    if layout == "bnhd" and lead:
        q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    options: dict[str, Any] = {"layout": layout, "window": (30, 5)}
    if len(lead) > 1:
        options |= {"bias": RNG.standard_normal((*lead[:-1], 1, 1, N_K)), "q_offset": RNG.integers(0, 30, lead[:-1])}
    size = {1: 1, 2: 2, 3: 2, 4: 1, 16: 16, N_Q: 20, N_K: 30}
    found = attention(
        *chunked((q, k, v), [tuple(map(size.get, x.shape)) for x in (q, k, v)]), return_lse=True, **options
    )
    same(found, flashkit.attention(q, k, v, return_lse=True, **options))


def test_functions_of_entries_in_several_batch_axes() -> None:
    q, k, v = tensors((2, 3, 4))
    options = {"score_mod": lambda s, b, h, q, k: s * (b + 1)}
    fits = chunked((q, k, v), [(1, 3, 4, N_Q, 16), (2, 3, 2, 30, 16), (2, 3, 2, 30, 16)])
    same([attention(*fits, **options)], [flashkit.attention(q, k, v, **options)])
    apart = chunked((q, k, v), [(2, 2, 4, N_Q, 16), (2, 3, 2, 30, 16), (2, 3, 2, 30, 16)])
    same([attention(*apart)], [flashkit.attention(q, k, v)])
    with pytest.raises(ValueError, match="depends on b"):
        attention(*apart, **options)


def test_empty_arrays_and_chunks() -> None:
    q, k, v = tensors((2,))
    uneven = chunked((q, k, v), [(1, (0, 30, 0, 20), 16), (1, (40, 0, 30), 16), (1, (40, 0, 30), 16)])
    same([attention(*uneven, causal=True)], [flashkit.attention(q, k, v, causal=True)])
    none = chunked((q, k[:, :0], v[:, :0]), [(1, 30, 16), (1, 1, 16), (1, 1, 16)])
    out, lse = dask.compute(*attention(*none, return_lse=True))
    assert not out.any() and np.isneginf(lse).all()
    assert attention(*chunked((q[:, :0], k, v), [(1, 1, 16), (1, 30, 16), (1, 30, 16)])).compute().shape == (2, 0, 16)


# --- what is loaded ---------------------------------------------------------------------------------------------------


def loaded(chunks: int, loads: list[int], live: list[int], seen: list[int]) -> da.Array:
    """An array of chunks of 10 keys each, which counts what is loaded and what is in memory."""
    lock = threading.Lock()

    def release() -> None:
        with lock:
            live[0] -= 1

    def load(block: np.ndarray, block_info: Any = None) -> np.ndarray:
        place = block_info[0]["chunk-location"][1]
        made = np.full((1, 10, 16), place, np.float64)
        with lock:
            loads.append(place)
            live[0] += 1
            seen[0] = max(seen[0], live[0])
        weakref.finalize(made, release)
        return made

    return da.zeros((1, 10 * chunks, 16), chunks=(1, 10, 16)).map_blocks(load, dtype=float, meta=np.empty((0, 0, 0)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"causal": True}, [0]), ({"window": (5, 0)}, [0]), ({"window": (5, 0), "q_offset": 35}, [3, 4]),
        ({"mask_mod": mods.document(np.arange(80) // 20)}, [0, 1]), ({"kv_lengths": 25}, [0, 1, 2]),
        ({"block_mask": flashkit.BlockMask.from_dense(np.eye(1, 8, 6, dtype=bool), 10, 10)}, [6]), ({}, list(range(8))),
    ],
    ids=str,
)  # fmt: skip
def test_chunks_that_no_query_sees_are_not_loaded(options: dict[str, Any], expected: list[int]) -> None:
    loads: list[int] = []
    keys = loaded(8, loads, [0], [0])
    q = da.ones((1, 10, 16), chunks=(1, 10, 16))
    attention(q, keys, keys, **{"q_offset": 0, **options}).compute(scheduler="sync")
    assert sorted(loads) == expected


def test_keys_need_not_be_in_memory_together() -> None:
    loads, seen = [], [0]
    keys = loaded(24, loads, [0], seen)
    x = RNG.standard_normal((1, 60, 16))
    q = da.from_array(x, chunks=(1, 10, 16))
    found = attention(q, keys, keys, hold_kv=False, split_every=2).compute(scheduler="threads", num_workers=2)
    assert len(loads) == 6 * 24 and seen[0] <= 12, (len(loads), seen)
    values = keys.compute()
    np.testing.assert_allclose(found, flashkit.attention(x, values, values), rtol=1e-11)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (10, 0)}, {"mask_mod": mods.document(np.arange(60) // 20)}, {"q_offset": 20}],
    ids=str,
)
def test_rechunked_keys_are_loaded_anew(options: dict[str, Any]) -> None:
    """By tasks of their own, of which those that the masks hide are no part of the graph."""
    loads, x = list[int](), RNG.standard_normal((2, 60, 16))
    keys = loaded(6, loads, [0], [0]).rechunk((1, 15, 16)) + x[:1]  # tasks, pieces of chunks and blockwise layers
    q, v = da.from_array(x[:1], chunks=(1, 20, 16)), da.from_array(x[1:], chunks=(1, 25, 16))
    held = attention(q, keys, v, **options)
    loads.clear()
    expected = held.compute(scheduler="sync")
    assert sorted(loads) == list(range(6))
    loads.clear()
    found = attention(q, keys, v, hold_kv=False, **options).compute(scheduler="sync")
    assert len(loads) > 6 and (len(loads) == 18) is (options.keys() <= {"q_offset"}), loads
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, flashkit.attention(x[:1], keys.compute(), x[1:], **options), rtol=1e-11)


def test_a_tree_merges_so_many_at_a_time() -> None:
    q, k, v = tensors((1,), kv=1)
    arrays = chunked((q, k, v), [(1, N_Q, 16), (1, 2, 16), (1, 2, 16)])  # 35 chunks of keys
    for split_every, merges in ((2, 34), (8, 6), (35, 1)):
        graph = attention(*arrays, split_every=split_every).__dask_graph__()
        assert sum(str(key).startswith("_merged-") for key in graph) == merges


# --- on a cluster -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_a_cluster(tmp_path: Any) -> None:
    distributed = pytest.importorskip("distributed")
    q, k, v = tensors()
    options: dict[str, Any] = {
        "causal": True, "mask_mod": mods.document(DOCUMENTS) | (lambda b, h, q, k: k < 3),
        "score_mod": lambda s, b, h, q, k: s + 0.1 * h, "bias": RNG.standard_normal((4, 1, N_K)),
    }  # fmt: skip
    with (
        dask.config.set({"distributed.admin.log-format": "", "temporary-directory": str(tmp_path)}),
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, dashboard_address=None, local_directory=str(tmp_path), silence_logs=50
        ) as cluster,
        distributed.Client(cluster),
    ):
        out, lse = dask.compute(*attention(*chunked((q, k, v), CHUNKS["all"]), return_lse=True, **options))
    expected = flashkit.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(out, expected[0], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-11, atol=1e-11)


# --- parts ------------------------------------------------------------------------------------------------------------


def test_moved_modifications_agree_with_the_whole() -> None:
    """At every pair; also one that uses the names that a moved one adds."""
    function = lambda s, b, h, q, k, *, first_k, t: s + first_k * q - t[b, expr.ROW] * k + h
    mod = mods.score(function, first_k=3.5, t=RNG.random((3, 20)))
    symbols = expr.B, expr.H, expr.ROW, expr.K, expr.Q
    places = lambda *first: {symbol: (symbol, n, 1) for symbol, n in zip(symbols, first, strict=True)}
    part = moved(mod, places(1, 2, 7, 5, 5))
    b, h, row, k = np.ogrid[1:3, 2:4, 7:12, 5:30]
    whole = mod.evaluate(b, h, row + 11, k, row=row, s=0.5)
    np.testing.assert_array_equal(part.evaluate(b - 1, h - 2, row + 11 - 5, k - 5, row=row - 7, s=0.5), whole)
    assert moved(mod, places(0, 0, 1, 2, 2)).expr is part.expr  # chunks share their kernels


@pytest.mark.parametrize(
    ("change", "options", "error", "match"),
    [
        ({"q": [1.0]}, {}, TypeError, "q: expected .* got a builtins.list"),
        ({"k": lambda k: k[:, :, :60]}, {}, ValueError, "v: expected 60 tokens .* got 70"),
        ({}, {"kv_lengths": da.ones(2, dtype=int)}, TypeError, "kv_lengths: .* got a Dask array"),
        ({}, {"sinks": da.ones(4)}, TypeError, r"sinks: .* got a Dask array; .*sinks.compute\(\)"),
        ({}, {"kv_lengths": [5, 5], "causal": True}, ValueError, "q_offset"),
        ({}, {"bias": np.ones((3, 3))}, ValueError, "bias: expected .*shape"),
        ({}, {"split_every": 1}, ValueError, "split_every"),
        ({}, {"hold_kv": 1}, TypeError, "hold_kv"),
        ({}, {"dropout_p": 0.5}, TypeError, "dropout_p"),
        ({}, {"mask_mod": 3}, TypeError, "mask_mod"),
        ({"q": lambda q: q[q[:, 0, 0, 0] < 9]}, {}, ValueError, "q: expected chunks of known sizes"),
    ],
)  # fmt: skip
def test_errors_come_before_the_graph(change: Any, options: Any, error: type[Exception], match: str) -> None:
    given = dict(zip("qkv", chunked(tensors(), CHUNKS["all"])))
    for name, value in change.items():
        whole = given[name]
        given[name] = value(whole) if callable(value) else value
    with pytest.raises(error, match=match):
        attention(*given.values(), **options)
