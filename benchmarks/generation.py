"""`flashkit generate` beside transformers' generate with PyTorch, on the same GGUF file and CPU, in float32.

    python benchmarks/generation.py tokens            greedy tokens of 20 prompts, 64 each
    python benchmarks/generation.py speed             tokens per second, one prompt and eight, interleaved

transformers reads GGUF with the packages gguf and accelerate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.generate.checkpoint import Checkpoint, find_model
from examples.generate.model import Llama
from examples.generate.sampling import generate
from examples.generate.tokens import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 17 times 3?",
    "Who wrote Hamlet?",
    "Explain photosynthesis in two sentences.",
    "List three uses of copper.",
    "Translate 'good morning' into Spanish.",
    "What is the difference between a list and a tuple in Python?",
    "Tell me a story about a fox.",
    "How do I boil an egg?",
    "What is a prime number?",
    "Name the planets of the solar system.",
    "Why do we sleep?",
    "Write a function that adds two numbers.",
    "What causes the tides?",
    "Give me advice for a job interview.",
    "What is the boiling point of water?",
    "Summarize the plot of Romeo and Juliet.",
    "What does GPU stand for?",
)


class Theirs:
    """transformers' model of the same file."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        where = {"gguf_file": path.name}
        self._torch = torch
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **where)
        self.model = model.to(getattr(torch, dtype)).eval()

    def chat(self, question: str) -> list[int]:
        turns = [{"role": "user", "content": question}]
        found = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def continued(self, prompt: Sequence[int], most: int, to_the_end: bool = False) -> list[int]:
        """Greedy tokens; to_the_end: exactly `most`, whatever they are."""
        ids = self._torch.tensor([list(prompt)])
        least = {"min_new_tokens": most} if to_the_end else {}
        with self._torch.no_grad():
            out = self.model.generate(
                ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=most, do_sample=False, **least
            )
        return [int(token) for token in out[0, len(prompt) :]]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Of the token after these."""
        with self._torch.no_grad():
            return self.model(self._torch.tensor([list(tokens)])).logits[0, -1].double().numpy()


class Difference(NamedTuple):
    """A place where the most likely tokens differ."""

    prompt: int
    place: int
    ours: int
    theirs: int
    context: list[int]
    logits: np.ndarray  # ours


def differences(model: Llama, prompts: list[list[int]], expected: list[list[int]]) -> Iterator[Difference]:
    """Steps at which our most likely token is another than the expected one. The expected ones are fed, so that every
    step compares the same context.
    """
    most = max(map(len, expected))
    cache = model.cache(len(prompts), max(map(len, prompts)) + most)
    new = prompts
    for place in range(most):
        offsets = np.concatenate([[0], np.cumsum([len(tokens) for tokens in new])])
        logits = model(np.concatenate([np.asarray(tokens, np.int64) for tokens in new]), offsets, cache)
        present = [i for i, tokens in enumerate(new) if tokens]
        for i, row in zip(present, logits, strict=True):
            if place < len(expected[i]) and (ours := int(row.argmax())) != expected[i][place]:
                context = [*prompts[i], *expected[i][:place]]
                yield Difference(i, place, ours, expected[i][place], context, row)
        new = [tokens[place : place + 1] if place + 1 < len(tokens) else [] for tokens in expected]


def compare_tokens(path: Path, count: int, most: int) -> int:
    """Print where greedy tokens differ; the status is 1 if a difference is more than a tie."""
    ours, theirs = Checkpoint(path), Theirs(path)
    tokenizer, model = Tokenizer(ours), Llama(ours)
    questions = QUESTIONS[:count]
    prompts = [tokenizer.chat(question) for question in questions]
    if prompts != [theirs.chat(question) for question in questions]:
        print("the tokens of the questions differ")
        return 1
    expected = [theirs.continued(prompt, most) for prompt in prompts]
    found = list(differences(model, prompts, expected))
    exact = Theirs(path, "float64") if found else None
    worse = 0
    for each in found:
        assert exact is not None
        truth, plain = exact.logits(each.context), theirs.logits(each.context)
        gap = abs(truth[each.ours] - truth[each.theirs])
        error_ours, error_theirs = np.abs(each.logits - truth).max(), np.abs(plain - truth).max()
        tie = gap <= error_ours + error_theirs
        worse += not tie
        words = [repr(tokenizer.decode([token])) for token in (each.ours, each.theirs)]
        print(
            f"{questions[each.prompt]!r}, token {each.place}: {words[0]} here, {words[1]} there; "
            f"{'a tie' if tie else 'NO TIE'}: in float64 they are {gap:.1e} apart, errors in float32 "
            f"{error_ours:.1e} here, {error_theirs:.1e} there"
        )
    total = sum(map(len, expected))
    equal, ties = total - len(found), len(found) - worse
    print(f"{total} tokens of {len(prompts)} prompts: {equal} equal, {ties} ties, {worse} others")
    return int(worse > 0)


def measure_speed(path: Path, most: int, repeats: int) -> int:
    """Print tokens per second, interleaved, as medians: of prefill and decoding, and of our decoding alone."""
    import torch

    ours, theirs = Checkpoint(path), Theirs(path)
    tokenizer, model = Tokenizer(ours), Llama(ours)
    prompts = [tokenizer.chat(question) for question in QUESTIONS[:8]]

    def flashkit_rates(count: int) -> tuple[float, float]:
        start = time.perf_counter()
        steps = generate(model, prompts[:count], most, None)
        tokens, first = len(next(steps)), time.perf_counter()
        later = sum(map(len, steps))
        end = time.perf_counter()
        return (tokens + later) / (end - start), later / (end - first)

    def transformers_rates() -> tuple[float]:
        start = time.perf_counter()
        return (len(theirs.continued(prompts[0], most, to_the_end=True)) / (time.perf_counter() - start),)

    sides: dict[str, tuple[tuple[str, ...], Callable[[], tuple[float, ...]]]] = {
        "flashkit": (("one prompt", "one prompt, decoding"), lambda: flashkit_rates(1)),
        "transformers": (("transformers, one prompt",), transformers_rates),
        "flashkit, batch": (("eight prompts", "eight prompts, decoding"), lambda: flashkit_rates(8)),
    }
    rates: dict[str, list[float]] = {name: [] for names, _ in sides.values() for name in names}
    for run in range(repeats + 1):
        for names, side in sides.values():
            found = side()
            if run:  # the first warms up
                for name, rate in zip(names, found, strict=True):
                    rates[name].append(rate)
    medians = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    ratios = {
        "one prompt over transformers": medians["one prompt"] / medians["transformers, one prompt"],
        "eight prompts over one": medians["eight prompts"] / medians["one prompt"],
        "eight prompts over one, decoding": medians["eight prompts, decoding"] / medians["one prompt, decoding"],
    }
    report = {"tokens_per_second": medians, "ratios": {name: round(x, 2) for name, x in ratios.items()}}
    print(json.dumps({**report, "threads": torch.get_num_threads()}, indent=2))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tokens", "speed"))
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.what == "tokens":
        return compare_tokens(find_model(), options.prompts, options.tokens)
    return measure_speed(find_model(), options.tokens, options.repeats)


if __name__ == "__main__":
    sys.exit(main())
