"""The command: answer questions, printing tokens as they come."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from .checkpoint import Checkpoint, ModelNotFoundError
from .model import Llama
from .sampling import Sampling, generate
from .tokens import SYSTEM, Tokenizer

QUESTION = "What is the capital of France?"


class Answers:
    """Prints answers in the order of their questions: the first that is not complete as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, questions: Sequence[str], silent: bool) -> None:
        self.tokens: list[list[int]] = [[] for _ in questions]
        self._tokenizer, self._questions, self._silent = tokenizer, questions, silent
        self._complete = [False] * len(questions)
        self._at, self._printed = 0, ""
        self._live: Any = None
        if not silent and len(questions) > 1 and sys.stdout.isatty():
            self._live = importlib.import_module("rich.live").Live(auto_refresh=False)
            self._live.start()
        self._heading()

    def add(self, i: int, token: int) -> None:
        if token == self._tokenizer.end:
            self._complete[i] = True
        else:
            self.tokens[i].append(token)
        self._print()

    def finish(self) -> None:
        self._complete = [True] * len(self._complete)
        self._print()
        if self._live is not None:
            self._live.stop()

    def text(self, i: int) -> str:
        return self._tokenizer.decode(self.tokens[i])

    def _print(self) -> None:
        if self._live is not None:  # all of them
            texts = (f"> {question}\n{self.text(i)}\n" for i, question in enumerate(self._questions))
            self._live.update(importlib.import_module("rich.text").Text("\n".join(texts)), refresh=True)
            return
        while self._at < len(self._questions):
            text, complete = self.text(self._at), self._complete[self._at]
            # The bytes of a character may come with several tokens.
            if not self._silent and (complete or not text.endswith("\ufffd")):
                print(text[len(self._printed) :], end="", flush=True)
                self._printed = text
            if not complete:
                return
            if not self._silent:
                print("\n", flush=True)
            self._at, self._printed = self._at + 1, ""
            self._heading()

    def _heading(self) -> None:
        if not self._silent and self._live is None and len(self._questions) > 1 and self._at < len(self._questions):
            print(f"> {self._questions[self._at]}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Run the example with these command-line arguments; returns the exit status, 0 or 1 (something is missing)."""
    options = _parser().parse_args(argv)
    questions: list[str] = options.questions or [QUESTION]
    started = time.perf_counter()
    try:
        checkpoint = Checkpoint(options.model)
        tokenizer = Tokenizer(checkpoint)
        model = Llama(checkpoint, _library(options.device), options.dtype)
    except (ModelNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    prompts = [tokenizer.chat(question, options.system) for question in questions]
    if (longest := max(map(len, prompts)) + options.max_tokens) > model.context:
        print(
            f"error: the longest prompt and --max-tokens are {longest} tokens; the model reads {model.context}",
            file=sys.stderr,
        )
        return 1
    list(generate(model, [prompts[0][:8]], 2, None))  # compiles what is not yet compiled
    loaded = time.perf_counter()

    answers = Answers(tokenizer, questions, options.json)
    sampling = Sampling(options.temperature, options.top_p, options.seed)
    first: float | None = None
    count = 0
    begun = time.perf_counter()
    try:
        for step in generate(model, prompts, options.max_tokens, tokenizer.end, sampling):
            if first is None:
                first = time.perf_counter()
            else:
                count += len(step)
            for i, token in step:
                answers.add(i, token)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ended = time.perf_counter()
    answers.finish()

    prompt_tokens = sum(map(len, prompts))
    prefill, decode = (first or ended) - begun, ended - (first or ended)
    rate = count / decode if count else 0.0
    if options.json:
        report = {
            "answers": [
                {"question": question, "answer": answers.text(i), "tokens": answers.tokens[i]}
                for i, question in enumerate(questions)
            ],
            "prompt_tokens": prompt_tokens, "prefill_seconds": round(prefill, 3), "decode_seconds": round(decode, 3),
            "tokens_per_second": round(rate, 1),
        }  # fmt: skip
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    print(
        f"{prompt_tokens} tokens read in {prefill:.2f} s, then {rate:.0f} tokens/s; "
        f"ready after {loaded - started:.1f} s",
        file=sys.stderr,
    )
    return 0


def _library(device: str) -> Any:
    if device == "cpu":
        return np
    try:
        import cupy
    except ImportError as error:
        raise ValueError(f'--device cuda needs CuPy ({error}); pip install "cupy-cuda13x[ctk]"') from error
    return cupy


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashkit generate",
        description="Answer questions by SmolLM2-135M-Instruct, a small language model, in NumPy or CuPy, with "
        "flashkit's attention and KV cache. Several questions are answered at once.",
    )
    tokens_help = "longest answer, in tokens (default: %(default)s)"
    temperature_help = "0: always the most likely token (default: %(default)s)"
    nucleus_help = "draw from the most likely tokens of this probability (default: %(default)s)"
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"default: {QUESTION}")
    parser.add_argument("--max-tokens", type=_positive, default=256, metavar="N", help=tokens_help)
    parser.add_argument("--temperature", type=_number, default=0.0, metavar="T", help=temperature_help)
    parser.add_argument("--top-p", type=_probability, default=0.9, metavar="P", help=nucleus_help)
    parser.add_argument("--seed", type=_whole, metavar="N", help="of the draws (default: other ones each time)")
    parser.add_argument("--system", default=SYSTEM, metavar="TEXT", help="what the model is told first")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32", help="of activations")
    parser.add_argument("--model", metavar="FILE", help="a GGUF file (default: the installed package's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _whole(text: str, least: int = 0) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9) or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _probability(text: str) -> float:
    if not 0 < (number := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"expected a probability above 0 and at most 1, got {text!r}")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return number
