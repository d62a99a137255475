"""The order of transfers, on a transport that is as late as it may be. Ranks are threads of this process."""

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import near

import flashkit
from flashkit.distributed import Comm


class Late:
    """Arrays arrive, as they are in the sender's memory by then, when the receiver waits; until then they are NaN."""

    def __init__(self, rank: int, ranks: int, shared: dict[str, Any]) -> None:
        self.rank, self.ranks, self._shared = rank, ranks, shared
        self.messages: list[tuple[int, int]] = []

    def exchange(self, sends: Any, receives: Any) -> Any:
        for _, x in receives:
            x.view(np.uint8)[...] = 255
        for rank, x in sends:
            self.messages.append((rank, x.nbytes))
            self._shared["boxes"][self.rank, rank].put(x)
        return _Late(self, sends, receives)

    def agree(self, item: Any) -> list[Any]:
        barrier, items = self._shared["barrier"], self._shared["items"]
        items[self.rank] = item
        barrier.wait(60)
        found = list(items)
        barrier.wait(60)
        return found


class _Late:
    def __init__(self, transport: Late, sends: Any, receives: Any) -> None:
        self._transport, self._sends, self._receives = transport, sends, receives

    def wait(self) -> None:
        own, boxes, taken = self._transport.rank, self._transport._shared["boxes"], self._transport._shared["taken"]
        for rank, x in self._receives:
            x[...] = boxes[rank, own].get(timeout=60)
            taken[rank, own].put(None)
        for rank, _ in self._sends:
            taken[own, rank].get(timeout=60)


def on_ranks(n: int, call: Callable[[Comm, Late], Any]) -> list[Any]:
    """What each rank gives."""
    shared: dict[str, Any] = {"barrier": threading.Barrier(n), "items": [None] * n}
    shared |= {"boxes": defaultdict(queue.Queue), "taken": defaultdict(queue.Queue)}
    found: list[Any] = [None] * n

    def run(rank: int) -> None:
        transport = Late(rank, n, shared)
        try:
            found[rank] = call(Comm(transport), transport)
        except BaseException as error:
            found[rank] = error
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def tensors(n: int = 26) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((1, heads, n, 8)) for heads in (4, 4, 4, 4))


@pytest.mark.parametrize("method", ["ring", "heads", "gather"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_no_array_is_read_or_written_while_it_travels(method: str, ranks: int) -> None:
    q, k, v, dout = tensors()
    out, vjp = flashkit.attention_vjp(q, k, v, causal=True)
    expected = [out, *vjp(dout)]

    def call(comm: Comm, _: Late) -> list[Any]:
        parts = [comm.shard(x, order="zigzag") for x in (q, k, v, dout)]
        out, vjp = comm.attention_vjp(*parts[:3], causal=True, order="zigzag", method=method)
        return [comm.gather(x, order="zigzag") for x in (out, *vjp(parts[3]))]

    for found in on_ranks(ranks, call):
        near(found, expected, rtol=1e-10, atol=1e-10)


def test_a_ring_ends_where_no_window_reaches() -> None:
    q, k, v, dout = tensors(80)
    out, vjp = flashkit.attention_vjp(q, k, v, window=(12, 0))
    expected = [out, *vjp(dout)]

    def call(comm: Comm, transport: Late) -> Any:
        parts = [comm.shard(x) for x in (q, k, v, dout)]
        out, vjp = comm.attention_vjp(*parts[:3], window=(12, 0))
        sent = len(transport.messages)
        gradients = vjp(parts[3])
        sent = sent, len(transport.messages) - sent
        return sent, [comm.gather(x) for x in (out, *gradients)]

    for sent, found in on_ranks(8, call):
        assert sent == (2 * 2, 2 * 2 + 3 * 2)  # two steps of k and v; these, and three of their gradients
        near(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_cache_that_is_spread_equals_one_cache(ranks: int) -> None:
    rng = np.random.default_rng(4)
    slopes, sinks = rng.random(4), rng.standard_normal(4)
    every: list[dict[str, Any]] = [
        {},
        {"causal": True, "softcap": 2.0, "window": (20, 0)},
        {"alibi_slopes": slopes, "sinks": sinks, "mask_mod": lambda b, h, q, k: (q - k) % 3 != b},
        {"score_mod": lambda s, b, h, q, k: s - 0.1 * k, "causal": True},
    ]
    appended = [rng.standard_normal((2, 2, 2, n, 8)) for n in (37, 1, 3, 30)]
    uneven = rng.standard_normal((2, 5, 2, 8))
    queries = [rng.standard_normal((2, 4, n, 8)) for n in (1, 3)]

    def trace(cache: Any) -> list[Any]:
        found = []
        for step, (k, v) in enumerate([*appended, uneven]):
            cache.append(k, v, **({"cu_seqlens": np.array([0, 4, 5])} if k.ndim == 3 else {}))
            for options in every:
                found += [*cache.attend(queries[step % 2], return_lse=True, **options)]
            if step == 2:
                cache.trim(1, 2)
        return [*found, np.asarray(cache.lengths)]

    expected = trace(flashkit.KVCache(2, kv_heads=2, dim=8, pages=40, page=4, dtype=np.float64))
    call = lambda comm, _: trace(comm.cache(2, kv_heads=2, dim=8, pages=40, page=4, dtype=np.float64))
    for found in on_ranks(ranks, call):
        for number, (x, y) in enumerate(zip(found, expected, strict=True)):
            np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10, err_msg=str(number))


def test_a_prediction_has_the_bytes_that_are_sent() -> None:
    from flashkit.distributed import predict

    q, k, v, dout = tensors(64)

    for method in ("ring", "heads", "gather"):

        def call(comm: Comm, transport: Late, method: str = method) -> Any:
            parts = [comm.shard(x) for x in (q, k, v, dout)]
            _, vjp = comm.attention_vjp(*parts[:3], method=method)
            first = sum(size for _, size in transport.messages)
            vjp(parts[3])
            return first, sum(size for _, size in transport.messages) - first

        found = predict(q, k, v, ranks=4, method=method).bytes
        lse = 4 * 64 * 8 * 3 // 4 // 4 if method == "heads" else 0
        for sent in on_ranks(4, call):
            assert sent == (found["forward"] + lse, found["backward"] + lse)


def test_predictions_follow_the_model() -> None:
    from flashkit.distributed import predict

    q, k, v = (np.broadcast_to(np.float32(0), (1, heads, 1 << 14, 64)) for heads in (8, 2, 2))
    seconds = {"forward": 1.0, "backward": 3.0}

    def efficiency(**options: Any) -> float:
        return float(predict(q, k, v, seconds=seconds, causal=True, memory_gbs=1e9, **options).efficiency["forward"])

    fast = {"bandwidth_gbs": 1e6}
    assert efficiency(ranks=1, **fast) == pytest.approx(1)
    assert efficiency(ranks=4, order="contiguous", **fast) == pytest.approx(4 / 7, rel=0.01)  # the last rank: 7 / 16
    assert efficiency(ranks=4, order="zigzag", **fast) == pytest.approx(1, rel=0.01)
    of_kv = 2 * (1 << 14) * 2 * 64 * 4 / 4
    slow = {"bandwidth_gbs": of_kv / 1e9}  # a transfer takes a second
    assert efficiency(ranks=4, order="zigzag", **slow) == pytest.approx(1 / (3 + 1 / 16) / 4, rel=0.01)
    assert efficiency(ranks=4, method="gather", order="zigzag", **slow) == pytest.approx(1 / (3 + 1 / 4) / 4, rel=0.01)
    merged = 3 * (1 << 14) * 8 * 64 * 12 / 4  # bytes of three steps
    found = predict(q, k, v, ranks=4, order="zigzag", causal=True, seconds=seconds, memory_gbs=merged / 1e9, **fast)
    assert found.seconds["forward"] == pytest.approx(1 / 4 + 1, rel=0.01)
    found = predict(q, k, v, ranks=4, window=(100, 0))
    assert len(found.share) == 2
    assert "not known" in str(found)
