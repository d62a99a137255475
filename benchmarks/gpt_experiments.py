"""What longer contexts and block-sparse attention do for a GPT: the arrays of examples/gpt alone, without PyTorch.

    python benchmarks/gpt_experiments.py contexts [--small] [--device cuda] [--seconds 150] [--out results.jsonl]
    python benchmarks/gpt_experiments.py paths ...

`contexts` trains the same model on the same number of tokens of Python's standard library (its source files, by
characters) with contexts from 1,024 to 16,384 tokens, and with block-sparse attention at the longest. Every model
predicts the same tokens for its loss.

`paths` is a task after Pathfinder (Linsley et al. 2018; Tay et al. 2021): an image, row by row, of curves that wander
from the first row, where each has a colour, to the last. What is asked is the colour of a curve in a row; at the
end, of the last row, as far from the colours as the image is long. A model whose context is half the image cannot
know: it gives the right colour a probability of 1 / 8.

A line of JSON for each model, written when it is trained; no model begins after --seconds. --small: sizes for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flashkit
from examples.gpt.data import Text, batch_of
from examples.gpt.model import GPT, Batch, Config
from examples.gpt.parameters import AdamW

COLOURS, CURVES, BLANK, INK = 8, 4, 0, 1  # colours are the tokens from 2 on
NO_SOURCES = {"test", "tests", "site-packages", "dist-packages"}


class Device:
    """Array functions, and what tells time and memory."""

    def __init__(self, name: str) -> None:
        self.ops = importlib.import_module("examples.gpt." + ("gpu" if name == "cuda" else "cpu"))
        self.cuda, self.dtype = name == "cuda", "bfloat16" if name == "cuda" else "float32"
        if self.cuda:
            importlib.import_module("ml_dtypes")
            self.pool = self.ops.xp.get_default_memory_pool()
            self.name = self.ops.xp.cuda.runtime.getDeviceProperties(0)["name"].decode()
        else:
            self.name = "cpu"

    def wait(self) -> None:
        if self.cuda:
            self.ops.xp.cuda.runtime.deviceSynchronize()

    def memory(self) -> int | None:
        """Bytes taken from the device since the last `forget`."""
        return self.pool.total_bytes() if self.cuda else None

    def forget(self) -> None:
        """Give back what no array has."""
        gc.collect()
        if self.cuda:
            self.pool.free_all_blocks()


def train(
    device: Device, model: GPT, batch: Callable[[int], Batch], steps: int, rate: float, test: Callable[[], float]
) -> dict[str, Any]:
    """Train, test eight times, and time the steps between the tests, without the first few."""
    device.forget()
    optimizer, seconds, tokens, curve = AdamW(steps, rate, warmup=steps // 10), 0.0, 0, []
    marks = {steps * i // 8 for i in range(1, 9)} | {min(5, steps // 16)}
    start, seen = None, 0
    for step in range(steps):
        made = batch(step)
        model.add_gradients(made)
        optimizer.update(model.parameters, step, device.ops)
        seen += len(made.ids)
        if step + 1 in marks:
            device.wait()
            if start is not None:
                seconds += time.perf_counter() - start[0]
                tokens += seen - start[1]
            if step + 1 != min(marks):
                curve.append((seen, round(test(), 4)))
                print(f"  {seen:,} tokens: {curve[-1][1]}", flush=True)
            device.wait()
            start = time.perf_counter(), seen
    return {
        "steps": steps, "tokens": seen, "tokens_per_second": round(tokens / seconds), "curve": curve,
        "memory": device.memory(),
    }  # fmt: skip


# --- contexts ---------------------------------------------------------------------------------------------------------


def sources() -> list[str]:
    """The files of the standard library without its tests, in the order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(f for f in root.rglob("*.py") if not NO_SOURCES & set(f.relative_to(root).parts))
    return [f.read_text(encoding="utf-8", errors="ignore") for f in files]


def contexts(device: Device, small: bool) -> Iterator[dict[str, Any]]:
    lengths = (64, 128, 256, 1024) if small else (1024, 2048, 4096, 16384)
    layers, heads, width = (2, 2, 64) if small else (6, 8, 512)
    tokens, tests, total = (2048, 1 << 15, 1 << 18) if small else (1 << 16, 1 << 20, 1 << 25)
    text = Text.of_documents(sources())
    longest = max(lengths)
    tests = min(tests, (len(text.test) - 1) // longest * longest)
    # The paper's block-sparse attention in causal form: the own segment, and a block of each earlier one.
    sparse = flashkit.BlockMask.fixed(longest, longest, stride_blocks=8, block=32 if small else 128)
    sparse &= flashkit.mods.causal()
    for context, mask in [*((n, None) for n in lengths), (longest, sparse)]:
        options = {} if mask is None else {"block_mask": mask}
        sequences = tokens // context
        config = Config(128, context, layers, heads, width)  # 97 tokens; products are faster so
        model = GPT(config, device.ops, device.dtype, **options)
        windows = [
            batch_of(text.test, np.arange(i, min(i + sequences * context, tests), context), context, False)
            for i in range(0, tests, sequences * context)
        ]
        print(f"context {context:,}{', block-sparse' if mask is not None else ''}", flush=True)

        def test(model: GPT = model, windows: list[Batch] = windows) -> float:
            return float(np.mean([model.loss(x) for x in windows]))

        def batch(step: int, sequences: int = sequences, context: int = context) -> Batch:
            return text.batch(step, sequences, context)

        found = train(device, model, batch, total // (sequences * context), 1e-3, test)
        yield {
            "part": "contexts", "context": context, "block_sparse": mask is not None,
            "density": mask.density if mask is not None else 1.0, "config": vars(config), **found,
        }  # fmt: skip
        del model, test


# --- paths ------------------------------------------------------------------------------------------------------------


def images(rng: np.random.Generator, count: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, rows * columns), and the tokens to say for each, -1 for none: a curve's colour, below the first
    row. Curves move by at most a column from row to row, and keep one between them.
    """
    ids = np.full((count, rows, columns), BLANK)
    targets = np.full_like(ids, -1)
    colours = rng.integers(2, 2 + COLOURS, (count, CURVES))
    free = columns - 2 * (CURVES - 1)
    at = np.sort(rng.integers(0, free, (count, CURVES)), axis=1) + 2 * np.arange(CURVES)
    each = np.arange(count)
    for row in range(rows):
        for curve in range(CURVES):
            ids[each, row, at[:, curve]] = INK if row else colours[:, curve]
            if row:
                targets[each, row, at[:, curve]] = colours[:, curve]
        moved = at + rng.integers(-1, 2, at.shape)
        for curve in range(CURVES):
            least = at[:, curve - 1] + 2 if curve else 0
            at[:, curve] = np.clip(moved[:, curve], least, columns - 1 - 2 * (CURVES - 1 - curve))
    return ids.reshape(count, -1), targets.reshape(count, -1)


def paths(device: Device, small: bool) -> Iterator[dict[str, Any]]:
    columns, lengths = (16, (128, 256)) if small else (32, (1024, 2048, 4096))
    layers, heads, width = (2, 2, 64) if small else (4, 4, 256)
    tokens, steps = (2048, 300) if small else (1 << 15, 800)
    for length in lengths:
        for context in (length, length // 2):
            config = Config(16, context, layers, heads, width)
            model = GPT(config, device.ops, device.dtype)

            def batch(step: int, last: bool = False, length: int = length, context: int = context) -> Batch:
                """last: what is asked is the last row alone."""
                rng = np.random.default_rng([length, step])
                ids, targets = images(rng, tokens // length, length // columns, columns)
                if last:
                    targets[:, :-columns] = -1
                return Batch(ids.ravel(), targets.ravel(), np.arange(0, ids.size + 1, context, dtype=np.int32))

            def test(model: GPT = model, batch: Callable[..., Batch] = batch) -> float:
                return float(np.mean([model.loss(batch(1_000_000 + i, last=True)) for i in range(4)]))

            print(f"images of {length:,} tokens, context {context:,}", flush=True)
            found = train(device, model, batch, steps, 1e-3, test)
            yield {
                "part": "paths", "length": length, "context": context, "config": vars(config), **found,
                "probability": round(float(np.exp(-found["curve"][-1][1])), 4), "chance": 1 / COLOURS,
            }  # fmt: skip
            del model, test


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("contexts", "paths"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    start, device = time.perf_counter(), Device(args.device)
    with threadpool_limits(1, "blas"):
        for line in {"contexts": contexts, "paths": paths}[args.part](device, args.small):
            found = {"device": device.name, "dtype": device.dtype, "small": args.small, **line}
            print({name: x for name, x in found.items() if name not in ("curve", "config")}, flush=True)
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            if time.perf_counter() - start > args.seconds:
                print("the time is over", flush=True)
                return


if __name__ == "__main__":
    main()
