"""`python -m examples.gpt`: train, save, test, and write a sample. A checkpoint is one file of safetensors."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from threadpoolctl import threadpool_limits

import flashkit

from .data import END, Text, decode, standard_library
from .model import GPT, Config
from .parameters import AdamW


def sample(model: GPT, prompt: np.ndarray, tokens: int, temperature: float, seed: int = 0) -> Iterator[int]:
    """Tokens drawn one after the other, each in the time of one token: keys of earlier ones are in a cache."""
    config, rng = model.config, np.random.default_rng(seed)
    cache = flashkit.KVCache(
        1, config.heads, config.width // config.heads, pages=-(-config.context // 64), page=64, layers=config.layers,
        like=model.parameters["ln_f.weight"],
    )  # fmt: skip
    ids = prompt
    for _ in range(min(tokens, config.context - len(prompt))):
        s = on_host(model.next_logits(ids, cache)).astype(np.float64) / temperature
        p = np.exp(s - s.max())
        ids = np.array([rng.choice(len(p), p=p / p.sum())])
        yield int(ids[0])


def test_loss(model: GPT, text: Text, sequences: int, packed: bool) -> float:
    """Nats a token over all of the test's tokens."""
    batches = text.tests(sequences, model.config.context, packed)
    return float(np.average([model.loss(b) for b in batches], weights=[len(b.ids) for b in batches]))


def on_host(x: Any) -> np.ndarray:
    """A NumPy array of one of NumPy or CuPy."""
    return x if isinstance(x, np.ndarray) else x.get()


def save(path: Path, model: GPT, step: int) -> None:
    """Write the file, or leave the one before as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    arrays = {name: np.ascontiguousarray(on_host(x)) for name, x in model.parameters.state().items()}
    save_file(arrays, partial, metadata={"step": str(step)})
    os.replace(partial, path)


def load(path: Path, model: GPT) -> int:
    """Set the model's parameters and the averages; the number of steps done, 0 for a published model's file."""
    with safe_open(path, "np") as file:
        model.parameters.load({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return int((file.metadata() or {}).get("step", 0))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m examples.gpt", description=__doc__)
    add = made.add_argument
    for name, default, meaning in (
        ("layers", 4, ""), ("heads", 4, ""), ("width", 128, ""), ("context", 256, "tokens of a sequence"),
        ("sequences", 16, "of a batch"), ("accumulate", 1, "batches of a step"), ("steps", 1000, "in all"),
        ("every", 250, "steps between two tests, which save"), ("sample", 400, "tokens to write at the end"),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=default, help=f"{meaning} (default {default})")
    add("--rate", type=float, default=2e-3, help="the largest learning rate (default 0.002)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="NumPy or CuPy (default cpu)")
    add("--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="of activations")
    add("--packed", action="store_true", help="tokens see their own document alone")
    add("--file", type=Path, default=Path("build/gpt.safetensors"), help="the checkpoint; training goes on from it")
    return made


def main(arguments: list[str]) -> int:
    args = parser().parse_args(arguments)
    if args.dtype == "bfloat16":
        if args.device == "cpu":
            parser().error("--dtype bfloat16 needs --device cuda: NumPy has no products of it")
        importlib.import_module("ml_dtypes")  # makes it a dtype
    try:
        ops = importlib.import_module(".cpu" if args.device == "cpu" else ".gpu", __package__)
    except ModuleNotFoundError as error:
        parser().error(f'--device cuda needs CuPy ({error}); pip install "cupy-cuda13x[ctk]"')
    text = Text.of_documents(standard_library())
    config = Config(END + 1, args.context, args.layers, args.heads, args.width)
    model, optimizer = GPT(config, ops, args.dtype), AdamW(args.steps, args.rate, warmup=args.steps // 10)
    step = load(args.file, model) if args.file.exists() else 0
    print(f"{len(text.train):,} characters of documentation; {model.parameters.masters.size:,} parameters", flush=True)
    if step:
        print(f"{args.file} has {step} steps; training goes on from there", flush=True)
    start, tokens, mean = perf_counter(), 0, None
    interrupted: list[int] = []

    def note(number: int, _: object) -> None:
        """Ctrl-C does not break off a step; a second one raises as usual."""
        interrupted.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    with threadpool_limits(1, "blas"):
        while step < args.steps and not interrupted:
            for part in range(args.accumulate):
                batch = text.batch(step * args.accumulate + part, args.sequences, args.context, args.packed)
                loss = model.add_gradients(batch, 1 / args.accumulate)
                tokens += len(batch.ids)
            optimizer.update(model.parameters, step, ops)
            step += 1
            if step % 10 == 0 or step == args.steps:  # reading the loss waits for a GPU
                mean = float(loss) if mean is None else 0.8 * mean + 0.2 * float(loss)
                seconds = perf_counter() - start
                left = seconds / tokens * (args.steps - step) * args.accumulate * args.sequences * args.context
                line = f"step {step:5}  loss {mean:.3f}  {tokens / seconds:9,.0f} tokens/s  {left:4.0f} s left"
                print("\r" + line, end="", flush=True)
            if step % args.every == 0 or step == args.steps:
                print(f"  test {test_loss(model, text, args.sequences, args.packed):.4f}", flush=True)
                save(args.file, model, step)
    signal.signal(signal.SIGINT, before)
    if interrupted:
        save(args.file, model, step)
        print(f"\n{args.file} has {step} steps; the same command goes on from there")
        return 130
    written = sample(model, np.array([END]), args.sample, temperature=0.8)
    print("\na sample:\n" + decode(np.array([END, *written])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
