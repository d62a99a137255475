"""The cases of sequences_cuda.py: packed sequences, keys in pages and latent keys, as flashkit and others compute them.

Arrays are bfloat16 and normally distributed. A case is made on the device, with the exact values of parts of its
results. Contenders whose names begin with "flashkit" are this library's ways to make the call: by default `attention`
with int32 offsets, lengths and tables on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import sequence_baselines as others
from sequence_baselines import Call

import flashkit

Direction = Literal["forward", "backward"]
Where = tuple[int, Any]

TOKENS = 65536
CHECKED_TOKENS = 4096
"""Tokens of a packed sequence up to which it is compared: all its weights are stored in float64."""

HEADS = (16, 16, 128, True), (16, 16, 128, False), (16, 4, 128, True), (32, 32, 64, True), (32, 32, 64, False)
"""Query heads, key heads, head dim and causality of packed sequences."""

CACHES = {"1 x 32k": [32768], "16 x 8k": [8192] * 16, "64 x 4k": [4096] * 64}
CACHES["128 of 512 to 16k"] = np.random.RandomState(0).randint(512, 16385, 128).tolist()
DECODING = 32, 8, 128
"""Query heads, key heads and head dim."""

CHUNKS = ("1 x 32k", 4096, 64), ("16 x 8k", 512, 64), ("16 x 8k", 512, 16), ("64 x 4k", 4, 64)
"""Cache, queries of a sequence and tokens of a page."""

LATENT, ROTARY, LATENT_SCALE = 512, 64, (128 + 64) ** -0.5
MLA = (128, 4096, 128, 1), (128, 4096, 128, 2), (128, 4096, 16, 1), (32, 8192, 128, 1), (32, 8192, 16, 1), \
    (1, 32768, 128, 1), (1, 32768, 16, 1)  # fmt: skip
"""Sequences, keys of each, query heads and queries."""

TRAINING_TOKENS = 16384


class Work(NamedTuple):
    """A case on the device. expected: (which result, which part of it) and its exact values."""

    amount: float
    unit: Literal["FLOP", "byte"]
    expected: list[tuple[Where, Any]]
    contenders: dict[str, Callable[[], Call]]
    graph: bool


class Case(NamedTuple):
    what: str
    label: str
    make: Callable[[dict[str, str]], Work]  # of flashkit's backends by the names of their contenders


def mixes() -> dict[str, list[int]]:
    """Lengths of packed sequences, TOKENS in all; those of the second are log-uniform."""
    rng, mixed = np.random.RandomState(0), []
    while sum(mixed) < TOKENS:
        mixed.append(int(math.exp(rng.uniform(math.log(64), math.log(16384)))))
    mixed[-1] -= sum(mixed) - TOKENS
    return {"16 x 4096": [4096] * 16, f"{len(mixed)} of {min(mixed)} to {max(mixed)}": mixed, "512 x 128": [128] * 512}


def cases() -> Iterator[Case]:
    directions: tuple[Direction, ...] = "forward", "backward"
    for mix, lengths in mixes().items():
        for heads, kv_heads, dim, causal in HEADS:
            for direction in directions:
                label = f"{mix}, {heads}:{kv_heads} x {dim}, {masked(causal)}, {direction}"
                yield Case("packed", label, partial(packed, lengths, heads, kv_heads, dim, causal, direction))
    for name, lengths in CACHES.items():
        for page in (64, 16, 0):
            label = f"{name}, pages of {page}" if page else f"{name}, dense"
            yield Case("decode", label, partial(cached, lengths, page, 1))
    for name, queries, page in CHUNKS:
        label = f"{queries} queries, {name}, pages of {page}"
        yield Case("prefill", label, partial(cached, CACHES[name], page, queries))
    for batch, keys, heads, queries in MLA:
        for page in (64, 0):
            label = f"{batch} x {keys}, {heads} heads, queries {queries}, {f'pages of {page}' if page else 'dense'}"
            yield Case("mla", label, partial(latent, batch, keys, heads, queries, page))
    for n in (4096, 16384):
        for causal in (False, True):
            for direction in directions:
                label = f"{TRAINING_TOKENS // n} x {n}, 16 x 192/128, {masked(causal)}, {direction}"
                yield Case("training", label, partial(training, n, causal, direction))


def masked(causal: bool) -> str:
    return "causal" if causal else "full"


# --- the cases --------------------------------------------------------------------------------------------------------


def packed(
    lengths: list[int], heads: int, kv_heads: int, dim: int, causal: bool, direction: Direction, ours: dict[str, str]
) -> Work:
    """Self-attention of sequences that follow each other. The backward pass is timed alone."""
    import cupy

    starts = np.cumsum([0, *lengths])
    tokens, group, offsets = int(starts[-1]), heads // kv_heads, cupy.asarray(starts, np.int32)
    q, k, v, dout = (random(seed, tokens, n, dim) for seed, n in enumerate((heads, kv_heads, kv_heads, heads)))
    expected: list[tuple[Where, Any]] = []
    moderate = max((n, i) for i, n in enumerate(lengths) if n <= CHECKED_TOKENS)[1]
    for i in {moderate, len(lengths) - 1}:
        rows = slice(int(starts[i]), int(starts[i + 1]))
        of_head = (x[rows, :n] for x, n in ((q, group), (k, 1), (v, 1), (dout, group)))
        expected += compared(exact(direction, dim**-0.5, causal, *of_head), direction, (rows,), group)

    contenders: dict[str, Callable[[], Call]] = {}
    for name, backend in ours.items():
        for label, cu_seqlens in ((name, offsets), (f"{name}, offsets on the host", starts)):
            options = {"causal": causal, "cu_seqlens": cu_seqlens, "backend": backend}
            contenders[label] = partial(flashkit_call, direction, (q, k, v), dout, **options)

    def theirs(function: Callable[..., Call]) -> Call:
        *qkv, dout_, offsets_ = tensors(q, k, v, dout, offsets)
        options = {"causal": causal, "offsets": offsets_, "longest": max(lengths)}
        if function is others.fa3:
            return others.fa3(*qkv, dim**-0.5, **options)
        return function(*qkv, dout_, direction, **options)

    contenders |= {"cuDNN": partial(theirs, others.cudnn_packed), "FA-2": partial(theirs, others.fa2)}
    if direction == "forward":  # its library has no backward pass
        contenders["FA-3"] = partial(theirs, others.fa3)
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths)
    return Work(flops(pairs * heads, 2 * dim, direction), "FLOP", expected, contenders, False)


def cached(lengths: list[int], page: int, queries: int, ours: dict[str, str]) -> Work:
    """Queries at the ends of sequences, whose keys are in pages, or padded (page 0)."""
    import cupy

    heads, kv_heads, dim = DECODING
    batch, group, causal, scale = len(lengths), heads // kv_heads, queries > 1, dim**-0.5
    q, (k, v), table = random(0, batch, queries, heads, dim), *memory(lengths, page, kv_heads, (dim, dim))
    counts = cupy.asarray(lengths, np.int32)
    expected = []
    for i in {0, batch - 1}:
        keys, values = (sequence(x, table, i, lengths[i])[:, :1] for x in (k, v))
        parts = exact("forward", scale, causal, q[i, :, :group], keys, values)
        expected += compared(parts, "forward", (i, slice(None)), group)

    contenders: dict[str, Callable[[], Call]] = {}
    for name, backend in ours.items():
        options = {"causal": causal, "layout": "bnhd", "backend": backend}
        contenders |= ways(name, q, k, v, table, counts, options)
        if page and queries == 1:
            contenders[f"{name}, KVCache"] = partial(from_kv_cache, q, k, v, table, lengths, options)

    def theirs(function: Callable[..., Call], **options: Any) -> Call:
        on_device = dict(zip(("lengths", "table"), tensors(counts) if table is None else tensors(counts, table)))
        return function(*tensors(q, k, v), scale=scale, causal=causal, **on_device, **options)

    contenders["cuDNN"] = lambda: theirs(others.cudnn_lengths)
    contenders["FA-3"] = lambda: theirs(others.fa3, splits=0)
    if queries <= 16:
        return Work(2.0 * sum(lengths) * kv_heads * 2 * dim, "byte", expected, contenders, True)
    pairs = sum(queries * n - queries * (queries - 1) // 2 for n in lengths)
    return Work(flops(pairs * heads, 2 * dim, "forward"), "FLOP", expected, contenders, True)


def latent(batch: int, keys: int, heads: int, queries: int, page: int, ours: dict[str, str]) -> Work:
    """Decoding with latent keys, whose first columns are the values."""
    import cupy

    width, causal, scale = LATENT + ROTARY, queries > 1, LATENT_SCALE
    lengths = [keys] * batch
    q, (kv,), table = random(0, batch, queries, heads, width), *memory(lengths, page, 1, (width,))
    counts, few = cupy.asarray(lengths, np.int32), min(heads, 16)
    expected = []
    for i in {0, batch - 1}:
        own = sequence(kv, table, i, keys)
        parts = exact("forward", scale, causal, q[i, :, :few], own, own[..., :LATENT])
        expected += compared(parts, "forward", (i, slice(None)), few)

    contenders: dict[str, Callable[[], Call]] = {}
    for name, backend in ours.items():
        options = {"causal": causal, "layout": "bnhd", "scale": scale, "backend": backend}
        contenders |= ways(name, q, kv, kv[..., :LATENT], table, counts, options)
        contenders[f"{name}, mla"] = partial(from_mla, q, kv, table, counts, options)

    def parts_apart() -> Call:
        (q_v, q_pe), (c, k_pe) = ([x[..., :LATENT].copy(), x[..., LATENT:].copy()] for x in (q, kv))
        on_device = dict(zip(("lengths", "table"), tensors(counts) if table is None else tensors(counts, table)))
        q_v, *rest = tensors(q_v, q_pe, k_pe, c)
        return others.fa3(*rest, scale, causal=causal, q_v=q_v, splits=0, **on_device)

    def in_pages() -> Call:
        pages, numbers = kv, table
        if table is None:  # a padded batch is one of pages in order
            pages = kv.reshape(-1, 64, 1, width)
            numbers = cupy.arange(len(pages), dtype=np.int32).reshape(batch, -1)
        return others.flash_mla(*tensors(q, pages, counts, numbers), scale, causal)

    contenders |= {"FlashMLA": in_pages, "FA-3": parts_apart}
    pairs = batch * (queries * keys - queries * (queries - 1) // 2)
    return Work(flops(pairs * heads, width + LATENT, "forward"), "FLOP", expected, contenders, True)


def training(n: int, causal: bool, direction: Direction, ours: dict[str, str]) -> Work:
    """Multi-head latent attention as it is trained: head dims 192 and 128."""
    batch, heads, dims = TRAINING_TOKENS // n, 16, (192, 192, 128, 128)
    q, k, v, dout = (random(seed, batch, n, heads, dim) for seed, dim in enumerate(dims))
    parts = exact(direction, 192**-0.5, causal, *(x[0, :, :1] for x in (q, k, v, dout)))
    contenders: dict[str, Callable[[], Call]] = {
        name: partial(flashkit_call, direction, (q, k, v), dout, causal=causal, layout="bnhd", backend=backend)
        for name, backend in ours.items()
    }
    contenders["cuDNN"] = lambda: others.sdpa_cudnn(*tensors(q, k, v, dout), direction, causal)
    if direction == "forward":
        contenders["FA-3"] = lambda: others.fa3(*tensors(q, k, v), 192**-0.5, causal=causal)
    pairs = batch * heads * (n * (n + 1) // 2 if causal else n * n)
    expected = compared(parts, direction, (0, slice(None)), 1)
    return Work(flops(pairs, 192 + 128, direction), "FLOP", expected, contenders, False)


def flops(pairs: int, columns: int, direction: Direction) -> float:
    """Of two matrix products with `columns` in all, or of the five of a backward pass, as others count."""
    return 2.0 * pairs * columns * (2.5 if direction == "backward" else 1)


# --- flashkit's calls -------------------------------------------------------------------------------------------------


def flashkit_call(direction: Direction, arrays: Sequence[Any], dout: Any, **options: Any) -> Call:
    if direction == "backward":
        return partial(flashkit.attention_vjp(*arrays, **options)[1], dout)
    import cupy

    out = cupy.empty((*arrays[0].shape[:-1], arrays[2].shape[-1]), arrays[0].dtype)
    return lambda: (flashkit.attention(*arrays, out=out, **options),)


def ways(
    name: str, q: Any, k: Any, v: Any, table: Any, lengths: Any, options: dict[str, Any]
) -> dict[str, Callable[[], Call]]:
    """attention with integers of 32 and of 64 bits, and a plan, which has read the lengths: its kernel alone."""
    import cupy

    def given(kind: Any) -> dict[str, Any]:
        pages = {} if table is None else {"page_table": table.astype(kind)}
        return at_ends(q, lengths.astype(kind), options) | pages

    def planned() -> Call:
        plan, out = flashkit.plan(q, k, v, **given(np.int64)), cupy.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
        return lambda: (plan(q, k, v, out=out),)

    return {
        name: lambda: flashkit_call("forward", (q, k, v), None, **given(np.int32)),
        f"{name}, int64": lambda: flashkit_call("forward", (q, k, v), None, **given(np.int64)),
        f"{name}, planned": planned,
    }


def from_mla(q: Any, kv: Any, table: Any, lengths: Any, options: dict[str, Any]) -> Call:
    """The same with the two parts of the queries and of the keys, which are views of one array."""
    keys = kv[..., 0, :]
    q_nope, q_pe, ckv, k_pe = q[..., :LATENT], q[..., LATENT:], keys[..., :LATENT], keys[..., LATENT:]
    given = at_ends(q, lengths, options) | ({} if table is None else {"page_table": table})
    return lambda: (flashkit.mla(q_nope, q_pe, ckv, k_pe, **given),)


def at_ends(q: Any, lengths: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options with lengths, and with offsets where a mask needs them."""
    return options | {"kv_lengths": lengths} | ({"q_offset": lengths - q.shape[1]} if options["causal"] else {})


def from_kv_cache(q: Any, k: Any, v: Any, table: Any, lengths: list[int], options: dict[str, Any]) -> Call:
    import cupy

    kv_heads, dim, page = *k.shape[2:], k.shape[1]
    pages = sum(-(-n // page) for n in lengths)
    cache = flashkit.KVCache(len(lengths), kv_heads, dim, pages=pages, page=page, like=q)
    for i, n in enumerate(lengths):
        offsets = [0] * (i + 1) + [n] * (len(lengths) - i)
        cache.append(sequence(k, table, i, n), sequence(v, table, i, n), offsets)
    out = cupy.empty_like(q)
    return lambda: (cache.attend(q, out=out, **options),)


# --- arrays -----------------------------------------------------------------------------------------------------------


def random(seed: int, *shape: int) -> Any:
    """bfloat16 on the device, made piece by piece: float32 of it all would take twice the memory."""
    import cupy
    import ml_dtypes

    rng, made = cupy.random.default_rng(seed), cupy.empty(shape, ml_dtypes.bfloat16)
    flat, step = made.reshape(-1), 1 << 27
    for start in range(0, len(flat), step):
        piece = flat[start : start + step]
        piece[...] = rng.standard_normal(len(piece), dtype=cupy.float32).astype(made.dtype)
    return made


def memory(lengths: list[int], page: int, heads: int, dims: Sequence[int]) -> tuple[list[Any], Any]:
    """Keys (and values) of these sequences: pools of pages in random order with their table, or padded and None."""
    import cupy

    if not page:
        return [random(seed, len(lengths), max(lengths), heads, dim) for seed, dim in enumerate(dims, 1)], None
    counts = [-(-n // page) for n in lengths]
    order, table = np.random.default_rng(0).permutation(sum(counts)), np.zeros((len(lengths), max(counts)), np.int32)
    for row, end, count in zip(table, np.cumsum(counts), counts, strict=True):
        row[:count] = order[end - count : end]
    return [random(seed, sum(counts), page, heads, dim) for seed, dim in enumerate(dims, 1)], cupy.asarray(table)


def sequence(x: Any, table: Any, i: int, n: int) -> Any:
    """The first n tokens of a sequence, (n, heads, head_dim)."""
    if table is None:
        return x[i, :n]
    pages = x.view(np.uint16)[table[i, : -(-n // x.shape[1])]]  # a copy of bits: indexing may not know bfloat16
    return pages.reshape(-1, *x.shape[2:])[:n].view(x.dtype)


def tensors(*arrays: Any) -> list[Any]:
    """Arrays as tensors of PyTorch, in the same memory."""
    import torch

    return [torch.from_dlpack(x) for x in arrays]


def exact(direction: Direction, scale: float, causal: bool, *arrays: Any) -> tuple[Any, ...]:
    """(out,) or (dq, dk, dv) in float64 of q, k, v (and dout), (tokens, heads, head_dim) with one key head. The last
    query sees every key.
    """
    from flashkit.call.arrays import kind_of, namespace

    xp: Any = namespace(kind_of(arrays[0]))
    q, k, v, *douts = (x.astype(np.float32).astype(np.float64).swapaxes(0, 1) for x in arrays)
    p = scale * (q @ k.swapaxes(1, 2))
    n_q, n_k = p.shape[1:]
    if causal:
        p = xp.where(xp.arange(n_k) <= xp.arange(n_q)[:, None] + n_k - n_q, p, -math.inf)
    p -= p.max(-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    if direction == "forward":
        return (out.swapaxes(0, 1),)
    (dout,) = douts
    dv = (p.swapaxes(1, 2) @ dout).sum(0, keepdims=True)
    p *= dout @ v.swapaxes(1, 2) - (dout * out).sum(-1, keepdims=True)  # now the gradients of scores
    dq, dk = scale * (p @ k), scale * (p.swapaxes(1, 2) @ q).sum(0, keepdims=True)
    return tuple(x.swapaxes(0, 1) for x in (dq, dk, dv))


def compared(parts: Sequence[Any], direction: Direction, rows: tuple[Any, ...], heads: int) -> list[tuple[Where, Any]]:
    """Which parts of a call's results are these of `exact`: in these rows, of the first heads."""
    counts = (heads,) if direction == "forward" else (heads, 1, 1)
    return [((i, (*rows, slice(n))), x) for i, (x, n) in enumerate(zip(parts, counts, strict=True))]
