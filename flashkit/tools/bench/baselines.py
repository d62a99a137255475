"""The same attention by others, for `flashkit bench`: plain NumPy, PyTorch, JAX, ONNX Runtime; and yardsticks.

A peer is a function of a case and its arrays that gives two callables, or None where it cannot do the case: one that is
timed, and one that brings its result into NumPy, so that what is compared is known to be the same. Libraries are
imported inside the functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np

from ...api import attention, attention_vjp, plan
from ...spec import Direction

Arrays = tuple[np.ndarray, ...]

BLOCK = 128
"""Queries and keys of a tile of the random block mask."""


@dataclass(frozen=True)
class Case:
    """One attention problem; arrays are (batch, heads, tokens, head_dim)."""

    n_q: int
    head_dim: int = 64
    heads: int = 8
    dtype: str = "float32"
    causal: bool = False
    batch: int = 1
    n_k: int | None = None  # as n_q
    heads_kv: int | None = None  # as heads
    window: int | None = None  # keys that a query sees, the one at its own position the last of them
    kept: float | None = None  # share of the tiles of BLOCK x BLOCK pairs that a random block mask keeps

    @property
    def keys(self) -> int:
        return self.n_q if self.n_k is None else self.n_k

    @property
    def group(self) -> int:
        return self.heads // (self.heads_kv or self.heads)

    @property
    def masked(self) -> bool:
        """Whether more than a causal mask hides keys."""
        return self.window is not None or self.kept is not None

    @property
    def grid(self) -> np.ndarray:
        """Tiles that the random block mask keeps, in each row of tiles as many and the one on the diagonal among
        them.
        """
        assert self.kept is not None
        rows, columns = -(-self.n_q // BLOCK), -(-self.keys // BLOCK)
        order = np.random.default_rng(1).random((rows, columns))
        order[np.arange(rows), np.arange(rows) * columns // rows] = -1
        return order.argsort(1).argsort(1) < max(1, round(self.kept * columns))

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        from ...mods.block_mask import BlockMask

        options: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            options["window"] = (self.window - 1, 0)
        if self.kept is not None:
            options["block_mask"] = BlockMask.from_dense(self.grid, BLOCK, BLOCK, self.n_q, self.keys)
        return options

    @property
    def visible(self) -> np.ndarray | None:
        """The pairs that are not hidden, (queries, keys); None where all are seen."""
        if not (self.causal or self.masked):
            return None
        at, keys = np.arange(self.n_q)[:, None] + self.keys - self.n_q, np.arange(self.keys)
        seen = keys <= at if self.causal or self.window is not None else np.ones((self.n_q, self.keys), bool)
        if self.window is not None:
            seen &= keys > at - self.window
        if self.kept is not None:
            seen &= self.grid.repeat(BLOCK, 0)[: self.n_q].repeat(BLOCK, 1)[:, : self.keys]
        return seen

    def arrays(self, seed: int = 0) -> Arrays:
        """q, k, v and dout, normally distributed."""
        import ml_dtypes

        rng = np.random.default_rng(seed)
        kind = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        queries = self.batch, self.heads, self.n_q, self.head_dim
        keys = self.batch, self.heads // self.group, self.keys, self.head_dim
        return tuple(rng.standard_normal(shape, np.float32).astype(kind) for shape in (queries, keys, keys, queries))

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}:{self.heads // self.group}"
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        mask = ", causal" if self.causal else ""
        mask += f", window {self.window}" if self.window is not None else ""
        mask += f", {self.kept:.0%} of blocks" if self.kept is not None else ""
        return f"{batch}heads {heads}, {self.n_q} x {self.keys}, head dim {self.head_dim}, {self.dtype}{mask}"


class Entry(NamedTuple):
    """`call` is timed; `result` computes the same once more as NumPy arrays: (out,) or (dq, dk, dv)."""

    call: Callable[[], object]
    result: Callable[[], Arrays]


class Yardstick(NamedTuple):
    """`call` does `work`, FLOPs or bytes (None: as many as the case), that flashkit's own rate is held against."""

    call: Callable[[], object]
    work: float | None = None
    unit: Literal["FLOP", "byte"] = "FLOP"


Peer = Callable[[Case, Arrays, Direction, int], Entry | None]
"""(case, (q, k, v, dout), direction, threads) -> Entry, or None where the peer cannot do it."""


def dense(case: Case) -> Case:
    """The same without a mask."""
    return replace(case, window=None, kept=None, causal=False)


def dense_flops(case: Case, direction: Direction) -> float:
    return 4.0 * case.batch * case.heads * case.n_q * case.keys * case.head_dim * (1 if direction == "forward" else 2.5)


def with_flashkit(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry:
    """The backward pass is timed alone: the pull-back of a forward pass made before."""
    q, k, v, dout = arrays
    if direction == "forward":
        forward = partial(attention, q, k, v, **case.options)
        return Entry(forward, lambda: (forward(),))
    _, vjp = attention_vjp(q, k, v, **case.options)
    return Entry(partial(vjp, dout), lambda: vjp(dout))


MOST_SCORES = 1 << 30
"""Bytes of one score matrix (all heads) beyond which those are not asked that store up to three of them."""


def _scores_bytes(case: Case) -> int:
    return case.batch * case.heads * case.n_q * case.keys * (8 if case.dtype == "float64" else 4)


def with_numpy(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """matmul, softmax, matmul, in place where NumPy can; 16-bit inputs in float32, for NumPy has nothing narrower."""
    q, k, v, dout = arrays
    compute = np.float64 if case.dtype == "float64" else np.float32
    if _scores_bytes(case) > MOST_SCORES:
        return None
    scale, group = compute(case.head_dim**-0.5), case.group
    seen = case.visible
    hidden = None if seen is None else ~seen

    def wide(x: np.ndarray) -> np.ndarray:
        return x.astype(compute, copy=False)

    def expand(x: np.ndarray) -> np.ndarray:
        return wide(x) if group == 1 else np.repeat(wide(x), group, axis=1)

    def weights() -> np.ndarray:
        s = (wide(q) * scale) @ expand(k).swapaxes(-1, -2)
        if hidden is not None:
            np.copyto(s, -np.inf, where=hidden)
        s -= s.max(axis=-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(axis=-1, keepdims=True)
        return s

    def forward() -> np.ndarray:
        return (weights() @ expand(v)).astype(q.dtype, copy=False)

    if direction == "forward":
        return Entry(forward, lambda: (forward(),))
    p = weights()  # kept from the forward pass

    def backward() -> Arrays:
        do = wide(dout)
        dp = do @ expand(v).swapaxes(-1, -2)
        dp -= np.sum(dp * p, axis=-1, keepdims=True)
        dp *= p
        dp *= scale
        dv, dk, dq = p.swapaxes(-1, -2) @ do, dp.swapaxes(-1, -2) @ wide(q), dp @ expand(k)
        if group > 1:
            dk, dv = (x.reshape(case.batch, -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
        return tuple(x.astype(q.dtype, copy=False) for x in (dq, dk, dv))

    return Entry(backward, backward)


def with_torch(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """scaled_dot_product_attention on tensors that share NumPy's memory."""
    import torch

    if case.causal and case.n_q != case.keys and not case.masked:
        return None  # its causal mask is aligned at the top left
    torch.set_num_threads(threads)
    half = case.dtype == "bfloat16"  # which torch and NumPy exchange as bits only

    def tensor(x: np.ndarray) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(x)

    def array(x: Any) -> np.ndarray:
        return x.detach().view(torch.int16).numpy().view(arrays[0].dtype) if half else x.detach().numpy()

    q, k, v, dout = map(tensor, arrays)
    if case.masked:
        mask: dict[str, Any] = {"attn_mask": torch.from_numpy(case.visible)}
    else:
        mask = {"is_causal": case.causal}
    attend = partial(torch.nn.functional.scaled_dot_product_attention, **mask, enable_gqa=case.group > 1)
    return torch_entry(attend, (q, k, v), dout, array, direction)


def torch_entry(
    attend: Callable[..., Any], tensors: tuple[Any, ...], dout: Any, array: Callable[[Any], np.ndarray],
    direction: Direction,
) -> Entry:  # fmt: skip
    """attend(q, k, v) without a graph, or its pull-back alone; array: from a tensor to NumPy."""
    import torch

    if direction == "forward":

        def forward() -> Any:
            with torch.inference_mode():
                return attend(*tensors)

        return Entry(forward, lambda: (array(attend(*tensors)),))
    inputs = tuple(x.clone().requires_grad_() for x in tensors)
    backward: Callable[[], Any] = partial(torch.autograd.grad, attend(*inputs), inputs, dout, retain_graph=True)
    return Entry(backward, lambda: tuple(map(array, backward())))


def with_jax(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """jax.nn.dot_product_attention, jitted. It stores the scores, and its thread pool cannot be limited."""
    import jax

    if case.dtype == "float64" or case.masked or (case.causal and case.n_q != case.keys):
        return None
    if _scores_bytes(case) > MOST_SCORES:
        return None
    q, k, v, dout = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in arrays)  # (batch, tokens, heads, head_dim)
    attend = jax.jit(partial(jax.nn.dot_product_attention, is_causal=case.causal))

    def array(x: Any) -> np.ndarray:
        return np.asarray(x).swapaxes(1, 2)

    if direction == "forward":
        return Entry(lambda: attend(q, k, v).block_until_ready(), lambda: (array(attend(q, k, v)),))
    _, pull = jax.vjp(attend, q, k, v)
    backward = jax.jit(pull)
    return Entry(lambda: jax.block_until_ready(backward(dout)), lambda: tuple(map(array, backward(dout))))


def with_onnxruntime(case: Case, arrays: Arrays, direction: Direction, threads: int) -> Entry | None:
    """com.microsoft.MultiHeadAttention, forward and float32 only; its inputs are (batch, tokens, heads * head_dim)."""
    onnx, runtime = import_module("onnx"), import_module("onnxruntime")
    if direction == "backward" or case.dtype != "float32" or case.group > 1 or case.masked:
        return None
    if case.causal and (case.n_q != case.keys or _scores_bytes(case) > MOST_SCORES):
        return None  # with a mask it stores the scores
    names, make = ("q", "k", "v"), onnx.helper
    node = make.make_node(
        "MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=case.heads,
        unidirectional=int(case.causal),
    )  # fmt: skip
    shape, kind = [None, None, case.heads * case.head_dim], onnx.TensorProto.FLOAT
    values = [make.make_tensor_value_info(name, kind, shape) for name in (*names, "out")]
    domains = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
    graph = make.make_graph([node], "attention", values[:3], values[3:])
    model = make.make_model(graph, opset_imports=domains, ir_version=8)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    # Idle threads would spin on the cores that the next one in turn needs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    flat = (np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.batch, x.shape[2], -1) for x in arrays)
    forward = partial(session.run, None, dict(zip(names, flat)))
    return Entry(forward, lambda: (forward()[0].reshape(case.batch, case.n_q, case.heads, -1).swapaxes(1, 2),))


# --- yardsticks -------------------------------------------------------------------------------------------------------

SMALL = 128
"""Queries and keys up to which it is measured what a call adds to its kernel."""

SGEMM = 2048
"""Rows, columns and depth of the matrix product that the rate of a float32 case is held against."""


def yardsticks(
    case: Case, arrays: Arrays, direction: Direction, peers: Collection[str], threads: int
) -> dict[str, Yardstick]:
    """What a case is timed in turns with besides its peers.

    sgemm: PyTorch's float32 matrix product, beside long float32 cases. dense: flashkit without the mask, beside masked
    cases. read: all threads read as many bytes as keys and values have, beside decoding. kernel: the call that
    `attention` makes once all is checked and planned, and planned: the call of `flashkit.plan`, beside small cases.
    """
    found: dict[str, Yardstick] = {}
    if "torch" in peers and case.dtype == "float32" and case.n_q >= 2048 and not case.masked:
        import torch

        a, b, out = torch.randn(3, SGEMM, SGEMM).unbind()
        found["sgemm"] = Yardstick(partial(torch.matmul, a, b, out=out), 2.0 * SGEMM**3)
    if case.masked:
        found["dense"] = Yardstick(
            with_flashkit(dense(case), arrays, direction, 0).call, dense_flops(case, direction)
        )
    if max(case.n_q, case.keys) <= SMALL and direction == "forward" and not case.masked:
        q, k, v, _ = arrays
        found["planned"] = Yardstick(partial(plan(q, k, v, **case.options), q, k, v))
        found["kernel"] = Yardstick(_kernel(case, q, k, v))
    if case.n_q == 1:
        found["read"] = Yardstick(_read(arrays[1:3], threads), float(arrays[1].nbytes + arrays[2].nbytes), "byte")
    return found


def _read(arrays: Arrays, threads: int) -> Callable[[], object]:
    """All threads read these arrays, a part each."""
    from ...backends.cpu.measured_peaks import reader
    from ...devices import host

    lanes = host.lanes_of(host.cpu_features())
    parts = [np.array_split(array.view(np.uint8).reshape(-1), threads) for array in arrays]
    loops = [[reader(part, lanes) for part in own] for own in zip(*parts)]
    pool = ThreadPoolExecutor(threads)

    def work(own: list[Callable[[], None]]) -> None:
        for loop in own:
            loop()

    return lambda: list(pool.map(work, loops))


def _kernel(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Callable[[], object]:
    """The start of the compiled kernel alone, with the argument block that a call has left in its scratch memory."""
    from ...backends.cpu import arguments, scratch_pool, threads

    out, planned = np.empty_like(q), plan(q, k, v, return_lse=True, backend="cpu", **case.options)
    expected, _ = planned(q, k, v)
    _, lse = planned(q, k, v, out=out)
    memory = scratch_pool.acquire(0)  # what was given back last
    block = (ctypes.c_int64 * int(arguments.SIZE)).from_address(memory.address)
    workers = threads.count() if block[int(arguments.PARALLEL_FOR)] else 1
    launch, address = threads.entry("launch"), memory.address
    out[...] = 0

    def start() -> object:
        launch(address, workers)
        return memory, planned, q, k, v, out, lse  # what the block points into lives as long as this

    start()
    if not np.array_equal(out, expected):
        raise RuntimeError("the argument block that a call leaves behind is not that of its kernel")
    return start


PEERS: dict[str, Peer] = {"numpy": with_numpy, "torch": with_torch, "jax": with_jax, "onnxruntime": with_onnxruntime}
REQUIRES = {"torch": ("torch",), "jax": ("jax",), "onnxruntime": ("onnxruntime", "onnx")}


def missing(name: str, requires: Mapping[str, tuple[str, ...]] = REQUIRES) -> list[str]:
    """Packages that a peer needs and that are not installed."""
    return [package for package in requires.get(name, ()) if find_spec(package) is None]
