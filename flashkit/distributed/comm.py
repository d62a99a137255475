"""`Comm`: attention of arrays whose tokens are spread over ranks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np

from ..cache.kv_cache import KVCache
from ..call import arrays, interop
from ..call.checks import choice
from ..call.merge import merge
from ..numeric import number
from ..options import DEFAULTS, OPTIONS, Options, documented, unknown
from .agreement import Header, check_sizes, compare, fingerprint
from .all_to_all import AllToAll, finished
from .cache import SpreadCache
from .collected import Collected
from .explanation import Prediction, predict
from .passes import Attempt, sink_gradient
from .placement import ORDERS, along, count, places, ranges_of
from .ring import RingAttention
from .transport import Mpi, Staged, Transport
from .whole import Axes, Whole

METHODS: dict[str, Any] = {
    "ring": RingAttention, "heads": partial(Collected, spreads_heads=True),
    "gather": partial(Collected, spreads_heads=False),
}  # fmt: skip


class RankError(RuntimeError):
    """Another rank failed in the same call. The message says which one, and how."""


class Comm:
    """Ranks that hold the tokens of sequences together.

    Parameters
    ----------
    communicator
        Of mpi4py, such as MPI.COMM_WORLD, a process group of torch.distributed, or a `Transport` of your own. All its
        ranks call each method, with equal arguments but for their arrays.
    timeout
        Seconds that a rank waits for others. A process group has a limit of its own.

    Examples
    --------
    >>> import numpy as np, flashkit
    >>> from mpi4py import MPI
    >>> from flashkit.distributed import Comm
    >>> comm = Comm(MPI.COMM_WORLD)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 64, 32), dtype=np.float32)
    >>> parts = [comm.shard(x, order="zigzag") for x in (q, k, v)]
    >>> out = comm.attention(*parts, causal=True, order="zigzag")
    >>> whole = comm.gather(out, order="zigzag")
    >>> bool(abs(whole - flashkit.attention(q, k, v, causal=True)).max() < 1e-5)
    True
    """

    def __init__(self, communicator: Any, *, timeout: float = 300.0) -> None:
        timeout = number("timeout", timeout)
        if hasattr(communicator, "Iallgatherv"):
            self._control: Any = Mpi(communicator, timeout)
        elif hasattr(communicator, "exchange"):
            self._control = communicator
        else:
            from .process_group import ProcessGroup

            self._control = ProcessGroup(communicator)
        self._on_devices: Transport | None = None

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        return self._control.rank

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self._control.ranks

    def __repr__(self) -> str:
        return f"<Comm rank {self.rank} of {self.ranks}>"

    def close(self) -> None:
        """Free threads and communicators. Every rank calls it, and nothing after it."""
        every: list[Any] = [self._on_devices, self._control]
        for transport in every:
            if hasattr(transport, "close"):
                transport.close()

    def shard(self, x: Any, axis: int = -2, *, order: str = "contiguous") -> Any:
        """The tokens of this rank, of an array that every rank has. Nothing is sent.

        Parameters
        ----------
        x
            Array of any library that `flashkit.attention` takes.
        axis
            That of the tokens.
        order
            "contiguous": a block for each rank. "zigzag": one block from the beginning and one from the end, so that
            a causal mask leaves every rank as much to do. "striped": every n-th token.

        Returns
        -------
        array
            New, of x's library.
        """
        choice("order", order, ORDERS)
        adapter = interop.adapter_of(x)
        with adapter.scope():
            native = adapter.to_native(x=x)["x"]
            xp: Any = arrays.namespace(arrays.require("x", native))
            own = ranges_of(order, native.shape[axis], self.rank, self.ranks)
            shape = list(native.shape)
            shape[axis] = count(own)
            part = xp.empty(tuple(shape), native.dtype)
            for where, place in zip(own, places(own), strict=True):
                along(part, axis, place)[...] = along(native, axis, where)
            return adapter.from_native("x", part)

    def gather(self, x: Any, axis: int = -2, *, order: str = "contiguous") -> Any:
        """The array whose parts the ranks have, on every rank: the inverse of `shard`.

        Parameters
        ----------
        x, axis, order
            As for `shard`; x is this rank's part.

        Returns
        -------
        array
            New, of x's library.
        """
        adapter = interop.adapter_of(x)
        with adapter.scope():
            attempt = Attempt()
            native: Any
            native, header = attempt(self._header_of_part, adapter, x, axis, order) or (None, None)
            headers = self._share(attempt, header)
            compare(headers)
            ranges = check_sizes([each.tokens[0] for each in headers], order, "x")
            kind = arrays.require("x", native)
            transport, xp = self._transport(kind, headers), arrays.namespace(kind)
            move: Any = attempt(AllToAll, xp, transport, native.shape, native.dtype, axis % native.ndim, ranges)
            self._share(attempt)
            found = move.collect(attempt, native)()
            self._share(attempt)
            return adapter.from_native("x", found)

    @documented("page_table")
    def attention(
        self, q: Any, k: Any, v: Any, *, method: str = "ring", order: str = "contiguous", return_lse: bool = False,
        backend: str | None = None, **options: Unpack[Options],
    ) -> Any:  # fmt: skip
        """`flashkit.attention` of the tokens of all ranks: what one device gives, to rounding.

        Parameters
        ----------
        q, k, v
            This rank's tokens, as `shard` gives them; shapes and dtypes as for `flashkit.attention`.
        method
            "ring": keys and values go round, each transfer behind attention. "heads": an all-to-all gives each rank
            all tokens of some heads. "gather": every rank gets all keys and values.
        order
            How tokens are spread; see `shard`.
        return_lse
            Return (out, lse).
        backend
            As for `flashkit.attention`.
        {options}

        Returns
        -------
        out : array
            Of this rank's queries.
        lse : array
            If return_lse.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid, or the ranks differ in it.
        flashkit.UnsupportedError
            No backend can compute it, the heads cannot be spread, or the option is not taken. The message says why.
        flashkit.distributed.RankError
            Another rank failed.
        TimeoutError
            A rank did not come in time. The Comm is of no use after that.

        Notes
        -----
        Positions, lengths, offsets and cu_seqlens are those of the whole, the same on all ranks. bias and mask have
        this rank's rows, or one row, and all keys.
        """
        run = _Run(self, q, k, v, method, order, backend, {**options})
        with run.adapter.scope():
            out, lse = run.forward()
            return run.to_caller(out, lse, return_lse)

    def attention_vjp(
        self, q: Any, k: Any, v: Any, *, method: str = "ring", order: str = "contiguous", return_lse: bool = False,
        backend: str | None = None, **options: Unpack[Options],
    ) -> tuple[Any, Callable[..., tuple[Any, ...]]]:  # fmt: skip
        """Attention of the tokens of all ranks, and its vector-Jacobian product.

        Parameters
        ----------
        q, k, v, method, order, return_lse, backend, options
            As for `attention`.

        Returns
        -------
        out : array or (array, array)
            What `attention` returns.
        vjp : callable
            `vjp(dout, dlse=None, wrt=("q", "k", "v"))` gives this rank's gradients; all ranks call it. Those of sinks
            are sums over all ranks. It reads q, k, v, out and the arrays among the options again.
        """
        run = _Run(self, q, k, v, method, order, backend, {**options})
        with run.adapter.scope():
            out, lse = run.forward()

            def vjp(dout: Any, dlse: Any = None, *, wrt: Sequence[str] = ("q", "k", "v")) -> tuple[Any, ...]:
                with run.adapter.scope():
                    return run.backward(out, lse, dout, dlse, wrt)

            return run.to_caller(out, lse, return_lse), vjp

    def explain(
        self, q: Any, k: Any, v: Any, *, method: str = "ring", order: str = "contiguous", return_lse: bool = False,
        backend: str | None = None, **options: Unpack[Options],
    ) -> Prediction:  # fmt: skip
        """Predict what a call of `attention` costs: bytes, time and efficiency. Nothing is sent.

        Parameters
        ----------
        q, k, v, method, order, backend, **options
            As for `attention`. All ranks are taken to have as many tokens as this one.
        return_lse
            Accepted so that the arguments of a call can be passed.

        Returns
        -------
        Prediction
            See `predict`.
        """
        adapter = interop.adapter_of(q)
        with adapter.scope():
            given: dict[str, Any] = adapter.to_native(**options)
            tensors, wholes = adapter.to_native(q=q, k=k, v=v), []
            for x in tensors.values():
                shape = list(x.shape)
                shape[Axes.of(tensors["q"], given).tokens] *= self.ranks
                wholes.append(arrays.stand_in(arrays.require("q", x), shape, x.dtype))
            return predict(*wholes, ranks=self.ranks, method=method, order=order, backend=backend, **given)

    def cache(
        self, sequences: int, kv_heads: int, dim: int, value_dim: int | None = None, *, pages: int, page: int = 64,
        dtype: Any = None, like: Any = None,
    ) -> SpreadCache:  # fmt: skip
        """A KV cache whose tokens are spread over the ranks, page by page.

        Parameters
        ----------
        sequences, kv_heads, dim, value_dim, page, dtype, like
            As of `flashkit.KVCache`.
        pages
            Of this rank.

        Examples
        --------
        >>> import numpy as np
        >>> from mpi4py import MPI
        >>> from flashkit.distributed import Comm
        >>> cache = Comm(MPI.COMM_WORLD).cache(1, kv_heads=2, dim=16, pages=4)
        >>> k, v = np.ones((2, 1, 2, 100, 16), np.float32)
        >>> cache.append(k, v)
        >>> cache.attend(np.ones((1, 4, 1, 16), np.float32)).shape
        (1, 4, 1, 16)
        """
        own = KVCache(sequences, kv_heads, dim, value_dim, pages=pages, page=page, dtype=dtype, like=like)
        return SpreadCache(self._merged, self.rank, self.ranks, own, sequences)

    def _merged(self, q: Any, sinks: Any, attend: Callable[[], Any]) -> tuple[Any, Any]:
        """What attend() gives on each rank for the same queries, (B, Hq, N, D), merged; the same on all ranks."""
        attempt = Attempt()
        kind = arrays.require("q", q)
        found = attempt(attend)
        headers = self._share(attempt, Header({"shape of q": str(q.shape)}, (), 0, self._device(kind)))
        compare(headers)
        transport, xp = self._transport(kind, headers), arrays.namespace(kind)
        one = [[range(rank, rank + 1)] for rank in range(self.ranks)]
        found = [xp.ascontiguousarray(x)[None] for x in found]
        every = finished(AllToAll(xp, transport, x.shape, x.dtype, 0, one).collect(attempt, x) for x in found)
        parts = list(zip(*every, strict=True))
        if sinks is not None:  # a part whose values are 0
            out, lse = parts[0]
            of_row = xp.asarray(sinks, lse.dtype)[:, None]
            parts.append((xp.zeros_like(out), xp.broadcast_to(of_row, lse.shape)))
        return merge(*parts)

    def bandwidth_gbs(self, size: int = 1 << 26, xp: Any = np, rounds: int = 5) -> float:
        """Measure what a rank sends to the next one while it receives as much, in 1e9 bytes/s: the slowest rank's.

        Parameters
        ----------
        size
            Bytes of a message.
        xp
            The module whose arrays travel, numpy or cupy.
        rounds
            Messages of each of three measurements, of which the median counts; the first message is not timed.
        """
        attempt = Attempt()
        kind = "numpy" if xp is np else "cupy"
        headers = self._share(attempt, attempt(lambda: Header({}, (), 0, self._device(kind))))
        transport = self._transport(kind, headers)
        outgoing, incoming = attempt(lambda: (xp.zeros(size, np.uint8), xp.zeros(size, np.uint8))) or (None, None)
        self._share(attempt)
        taken = []
        sends, receives = [((self.rank + 1) % self.ranks, outgoing)], [((self.rank - 1) % self.ranks, incoming)]
        for count_of in (1, rounds, rounds, rounds):
            self._share(attempt)
            begin = time.perf_counter()
            for _ in range(count_of):
                transport.exchange(sends, receives).wait()
            if kind == "cupy":
                xp.cuda.get_current_stream().synchronize()
            taken.append((time.perf_counter() - begin) / count_of)
        return size / max(self._share(attempt, sorted(taken[1:])[1])) / 1e9

    # --- agreement ----------------------------------------------------------------------------------------------------

    def _share(self, attempt: Attempt, item: Any = None) -> list[Any]:
        """Each rank's item; an error on all ranks if one of them had one."""
        error = attempt.error
        text = "" if error is None else f"{type(error).__name__}: {error}"
        answers = (self._on_devices or self._control).agree((text, item))
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]:
            raise RankError("; ".join(failed))
        return [item for _, item in answers]

    def _header_of_part(self, adapter: Any, x: Any, axis: int, order: str) -> tuple[Any, Header]:
        choice("order", order, ORDERS)
        native = adapter.to_native(x=x)["x"]
        kind, axis = arrays.require("x", native), axis % native.ndim
        rest = native.shape[:axis] + native.shape[axis + 1 :]
        facts = {"call": "gather", "order": order, "axis": str(axis), "other axes": str(rest)}
        facts |= {"dtype": native.dtype.name, "library": kind}
        xp: Any = arrays.namespace(kind)
        return xp.ascontiguousarray(native), Header(facts, (native.shape[axis],), 0, self._device(kind))

    def _device(self, kind: str) -> Any:
        """What tells which ranks share a GPU, and rank 0's identity for NCCL, until there is a transport for GPUs."""
        if kind == "numpy" or self._on_devices is not None or not isinstance(self._control, Mpi):
            return None
        import platform

        import cupy

        from . import nccl

        place = platform.node(), cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id)
        return place, nccl.unique_id() if self.rank == 0 else None

    def _transport(self, kind: str, headers: Sequence[Header]) -> Transport:
        """The transport for arrays of this kind, on which the ranks have agreed."""
        if kind == "numpy" or not isinstance(self._control, Mpi):
            return self._control
        if self._on_devices is None:
            places, identities = zip(*(each.device for each in headers), strict=True)
            if identities[0] is None or len(set(places)) < self.ranks:
                self._on_devices = Staged(self._control)
            else:
                from .nccl import Nccl

                self._on_devices = Nccl(self._control, identities[0])
        return self._on_devices


class _Run:
    """One call on all ranks: agreed upon, then run by its method."""

    def __init__(
        self, comm: Comm, q: Any, k: Any, v: Any, method: str, order: str, backend: str | None, options: dict[str, Any]
    ) -> None:  # fmt: skip
        self._comm, self.adapter = comm, interop.adapter_of(q)
        with self.adapter.scope():
            attempt = Attempt()
            header = attempt(self._prepare, q, k, v, method, order, backend, options)
            headers = comm._share(attempt, header)
            compare(headers)
            kind = arrays.require("q", self.q)
            self.transport = comm._transport(kind, headers)
            self._headers = headers
            attempt(self._plan)
            comm._share(attempt)

    def _prepare(
        self, q: Any, k: Any, v: Any, method: str, order: str, backend: str | None, options: dict[str, Any]
    ) -> Header:  # fmt: skip
        if not OPTIONS.keys() >= options.keys():
            raise unknown("Comm.attention", [name for name in options if name not in OPTIONS])
        choice("method", method, tuple(METHODS))
        choice("order", order, ORDERS)
        native = self.adapter.to_native(q=q, k=k, v=v)
        self.q, self.k, self.v = native.values()
        kind = arrays.require("q", self.q)
        for name, x in (("k", self.k), ("v", self.v)):
            arrays.require(name, x, kind)
        self.options = {name: x for name, x in self.adapter.to_native(**options).items() if x is not DEFAULTS[name]}
        self._method, self._order, self._backend = METHODS[method], order, backend
        axes = Axes.of(self.q, self.options)
        facts = {"method": method, "order": order, "library": kind, "backend": str(backend)}
        for name, x in native.items():
            axis = axes.tokens % x.ndim
            facts[f"dtype of {name}"] = x.dtype.name
            facts[f"shape of {name}, without tokens"] = str((*x.shape[:axis], *x.shape[axis + 1 :]))
        for name, x in self.options.items():
            if name != "seed":
                facts[name] = fingerprint(name, x)
        seed = self.options.get("seed")
        facts["seed"] = str(seed)
        tokens = tuple(x.shape[axes.tokens] for x in native.values())
        return Header(facts, tokens, secrets.randbits(62) if seed is None else seed, self._comm._device(kind))

    def _plan(self) -> None:
        """What can fail before the first transfer: checks of all options, and memory."""
        sizes = list(zip(*(each.tokens for each in self._headers), strict=True))
        for name, of_ranks in zip("qkv", sizes, strict=True):
            check_sizes(of_ranks, self._order, name)
        options = dict(self.options)
        if options.get("dropout_p"):
            options["seed"] = self._headers[0].seed
        self.whole = Whole(self.q, self.k, self.v, options, (sum(sizes[0]), sum(sizes[1])), self._backend)
        self._prepared = self._method(self.whole, self.transport, self._order, self.q, self.k, self.v)

    def forward(self) -> tuple[Any, Any]:
        """out and lse of the rank's queries, arrays of NumPy or CuPy."""
        attempt = Attempt()
        found = attempt(self._prepared.forward(attempt))
        del self._prepared
        self._comm._share(attempt)
        return found

    def backward(self, out: Any, lse: Any, dout: Any, dlse: Any, wrt: Sequence[str]) -> tuple[Any, ...]:
        """The gradients, as arrays of the caller's library."""
        attempt, method = Attempt(), None

        def prepare() -> dict[str, str]:
            nonlocal dout, dlse, method
            known = ("q", "k", "v", "sinks")[: 3 if self.whole.sinks is None else 4]
            for name in wrt:
                choice("wrt", name, known)
            dout, dlse = self.adapter.to_native(dout=dout, dlse=dlse).values()
            for name, x, like in (("dout", dout, out), ("dlse", dlse, lse)):
                if x is not None and (x.shape != like.shape or x.dtype != like.dtype):
                    raise ValueError(
                        f"{name}: expected shape {like.shape} and dtype {like.dtype}, got {x.shape} and {x.dtype}"
                    )
            method = self._method(self.whole, self.transport, self._order, self.q, self.k, self.v, gradients=True)
            return {"call": "vjp", "dlse": str(dlse is None), "wrt": str(tuple(wrt))}

        facts = attempt(prepare)
        compare([Header(each, (), 0, None) for each in self._comm._share(attempt, facts)])
        assert method is not None
        result = method.backward(attempt, out, lse, dout, dlse)
        found = attempt(result)
        dsinks = attempt(sink_gradient, self.whole, out, lse, dout, dlse) if "sinks" in wrt else None
        of_ranks = self._comm._share(attempt, dsinks)
        named = dict(zip("qkv", found, strict=True))
        if dsinks is not None:
            named["sinks"] = self.whole.xp.asarray(sum(of_ranks)).astype(self.options["sinks"].dtype)
        inputs = {"q": self.q, "k": self.k, "v": self.v}
        cast = {name: x.astype(inputs[name].dtype, copy=False) if name in inputs else x for name, x in named.items()}
        return tuple(self.adapter.from_native(f"d{name}", cast[name]) for name in wrt)

    def to_caller(self, out: Any, lse: Any, return_lse: bool) -> Any:
        """Results as arrays of the caller's library."""
        own = self.adapter.from_native("out", out)
        return (own, self.adapter.from_native("lse", lse)) if return_lse else own
