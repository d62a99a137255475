"""Packed batches and decoding on a CPU, beside rectangular batches, dense caches, PyTorch and plain NumPy.

    python benchmarks/sequences.py measure [--threads 1] [--rounds 9]
    python benchmarks/sequences.py report     ratios of the stored results

All contenders of a case take turns in one process. float32. The threads of NumPy's products are those of
OPENBLAS_NUM_THREADS, which has to be set outside. A line of a result file is one contender of one case; `pairs` is the
work of its call, visible pairs of queries and keys of all heads, so that batches of the same tokens and other lengths
compare by their rates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from stored import geometric_mean, markdown_table

import flashkit
from flashkit.devices import timing
from flashkit.tools.bench.environment import machine

RESULTS = Path(__file__).resolve().parent / "results" / "sequences"

HEADS, DIMS, TOKENS = 8, (64, 128), 4096
MIXES: dict[str, list[int]] = {
    "8 x 512": [512] * 8,
    "64 x 64": [64] * 64,
    "64 ... 960": [64, 192, 320, 448, 576, 704, 832, 960],
    "2048, 32 x 64": [2048, *[64] * 32],
}
"""Lengths of sequences, TOKENS in all."""

MAX_PADDING = 4
"""Padded tokens, in those that there are, up to which padding is timed."""

SIZES = (4, 32), (8, 64), (32, 128)
BATCHES = 1, 4, 16
LENGTHS = 16, 128, 1024, 8192, 32768
MAX_BYTES = 1 << 28  # of a case's keys and values; each contender has its own, so that none finds them in cache

Calls = dict[str, tuple[Callable[[], Any], float]]
"""Contenders by name: the call and its pairs."""


class Case(NamedTuple):
    what: str  # "packed" or "decode"
    label: str
    make: Callable[[], Calls]


def cases() -> Iterator[Case]:
    for mix in MIXES:
        for dim in DIMS:
            for both in (False, True):
                passes = "forward and backward" if both else "forward"
                yield Case("packed", f"{mix}, head dim {dim}, {passes}", partial(packed, MIXES[mix], dim, both))
    for heads, dim in SIZES:
        for batch in BATCHES:
            for n in LENGTHS:
                if 8 * batch * heads * dim * n <= MAX_BYTES:
                    label = f"{heads} heads of {dim}, batch {batch}, {n} keys"
                    yield Case("decode", label, partial(decode, heads, dim, batch, n))


# --- packed batches ---------------------------------------------------------------------------------------------------


def packed(lengths: list[int], dim: int, both: bool) -> Calls:
    """Causal self-attention of sequences, and of as many of the mean length."""
    tokens, batch, most = sum(lengths), len(lengths), max(lengths)
    rng, offsets = np.random.default_rng(0), np.cumsum([0, *lengths])
    q, k, v, dout = (rng.standard_normal((tokens, HEADS, dim), dtype=np.float32) for _ in range(4))
    mean = tokens // batch
    rectangles = [x[: batch * mean].reshape(batch, mean, HEADS, dim) for x in (q, k, v, dout)]

    def ours(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Any:
        if not both:
            return flashkit.attention(q, k, v, causal=True, **options)
        return flashkit.attention_vjp(q, k, v, causal=True, **options)[1](dout)

    pairs = HEADS * sum(n * (n + 1) // 2 for n in lengths)
    calls: Calls = {
        "packed": (lambda: ours(q, k, v, dout, cu_seqlens=offsets), pairs),
        "rectangular": (lambda: ours(*rectangles, layout="bnhd"), HEADS * batch * mean * (mean + 1) // 2),
    }
    return calls | {name: (call, pairs) for name, call in packed_torch(q, k, v, dout, offsets, most, both).items()}


def packed_torch(
    q: Any, k: Any, v: Any, dout: Any, offsets: Any, most: int, both: bool
) -> dict[str, Callable[[], Any]]:  # fmt: skip
    """PyTorch's ways: a call each, and padding on the right. On a CPU nested tensors take no causal mask."""
    import torch

    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))

    def each(x: Any) -> list[Any]:
        return [torch.from_numpy(x[a:b]).swapaxes(0, 1)[None] for a, b in spans]

    def padded(x: Any) -> Any:
        out = torch.zeros(len(spans), HEADS, most, x.shape[-1])
        for row, part in zip(out, each(x), strict=True):
            row[:, : part.shape[2]] = part[0]
        return out

    def call(tensors: Sequence[Any], douts: Any, function: Callable[..., Any]) -> Callable[[], Any]:
        if not both:
            return lambda: function(*tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        return lambda: torch.autograd.grad(function(*leaves), leaves, douts)

    parts = [list(x) for x in zip(each(q), each(k), each(v), each(dout), strict=True)]
    loop = [call(x[:3], x[3], sdpa) for x in parts]
    found: dict[str, Callable[[], Any]] = {"torch, a call each": lambda: [one() for one in loop]}
    if most * len(spans) <= MAX_PADDING * len(q):
        found["torch, padded"] = call([padded(x) for x in (q, k, v)], padded(dout), sdpa)
    return found


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(heads: int, dim: int, batch: int, n: int) -> Calls:
    """One query for each sequence over n keys, in pages, in a dense cache of which they are a slice, and otherwise."""
    import torch

    rng = np.random.default_rng(0)
    room = n + 64
    k, v = (rng.standard_normal((batch, heads, room, dim), dtype=np.float32) for _ in range(2))
    k_dense, v_dense, k_numpy, v_numpy = k.copy(), v.copy(), k.copy(), v.copy()
    q = rng.standard_normal((batch, heads, 1, dim), dtype=np.float32)
    cache = flashkit.KVCache(batch, heads, dim, pages=batch * -(-room // 64))
    cache.append(k[:, :, :n], v[:, :, :n])
    planned, lengths = flashkit.plan(q, k, v, kv_lengths=[room] * batch), np.full(batch, n)
    tensors = [torch.from_numpy(x.copy()) for x in (q, k, v)]
    sdpa, scale = torch.nn.functional.scaled_dot_product_attention, np.float32(dim**-0.5)

    def plain() -> Any:
        s = (q * scale) @ k_numpy[:, :, :n].swapaxes(-1, -2)
        s -= s.max(-1, keepdims=True)
        np.exp(s, out=s)
        s /= s.sum(-1, keepdims=True)
        return s @ v_numpy[:, :, :n]

    calls: dict[str, Callable[[], Any]] = {
        "paged": lambda: cache.attend(q),
        "dense": lambda: planned(q, k_dense, v_dense, kv_lengths=lengths),
        "slices": lambda: flashkit.attention(q, k[:, :, :n], v[:, :, :n]),
        "torch": lambda: sdpa(tensors[0], tensors[1][:, :, :n], tensors[2][:, :, :n]),
        "numpy": plain,
    }
    return {name: (call, batch * heads * n) for name, call in calls.items()}


# --- measuring, and what the results say ------------------------------------------------------------------------------


def measure(rounds: int, threads: int, output: Path | None, only: str) -> Path:
    """Measure all cases whose kind begins with `only`; returns the result file."""
    import torch

    torch.set_num_threads(threads)
    os.environ["FLASHKIT_NUM_THREADS"] = str(threads)
    described = machine("torch")
    target = output or RESULTS / f"cpu-{threads}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for case in cases():
        if not case.what.startswith(only):
            continue
        calls = case.make()
        wait_idle = timing.until_idle if threads > 1 else None
        taken = timing.interleaved(
            {name: call for name, (call, _) in calls.items()}, rounds=rounds, budget=20.0, min_rounds=3,
            wait_idle=wait_idle,
        )  # fmt: skip
        for who, (_, pairs) in calls.items():
            line = {"what": case.what, "case": case.label, "who": who, "pairs": pairs, "rounds": taken[who].rounds}
            lines.append(line | {"seconds": taken[who].as_dict(), "machine": described})
        target.write_text("".join(json.dumps(line) + "\n" for line in lines))
        print(case.what, case.label, {who: f"{1e6 * taken[who].best:.0f}" for who in calls}, flush=True)
    return target


RATIOS = {
    "packed": (("packed", "rectangular"), ("packed", "torch")),
    "decode": (("paged", "dense"), ("paged", "torch"), ("paged", "numpy"), ("dense", "numpy"), ("slices", "numpy")),
}
"""Rates to compare; "torch" is the fastest of PyTorch's ways."""


def report(file: Path) -> str:
    """The rates of some contenders over those of others: a table with the mean of all cases, the least, and where."""
    by_case: dict[tuple[str, str], dict[str, Any]] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        by_case.setdefault((line["what"], line["case"]), {})[line["who"]] = line
    rows = []
    for what, ratios in RATIOS.items():
        for ours, other in ratios:
            found = {case: ratio(lines, ours, other) for (kind, case), lines in by_case.items() if kind == what}
            if found:
                least = min(found, key=lambda case: found[case])
                mean = f"{geometric_mean(found.values()):.2f}"
                rows.append((what, f"{ours} over {other}", str(len(found)), mean, f"{found[least]:.2f}", least))
    return markdown_table(("what", "rates", "cases", "mean", "least", "of"), rows, 2)


def ratio(lines: dict[str, Any], ours: str, other: str) -> float:
    """The rate of one contender over the best of those whose name begins with `other`, by their best rounds."""

    def rate(who: str) -> float:
        return float(lines[who]["pairs"] / lines[who]["seconds"]["best"])

    return rate(ours) / max(rate(who) for who in lines if who.startswith(other))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "report"))
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of all contenders")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="packed or decode")
    parser.add_argument("--output", type=Path, help="result file to write")
    options: Any = parser.parse_args(arguments)
    if options.what == "measure":
        print(f"written to {measure(options.rounds, options.threads, options.output, options.only)}")
    else:
        for file in sorted(RESULTS.glob("*.jsonl")):
            print(f"{file.stem}\n\n{report(file)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
