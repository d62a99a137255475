"""Generation: prompts as one packed prefill, then all sequences a token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .model import Llama


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits. Temperature 0 is greedy: always the most likely one.

    Otherwise one of the most likely tokens, whose probabilities sum up to top_p (nucleus sampling: Holtzman et al.,
    arXiv:1904.09751), is drawn.
    """

    temperature: float = 0.0
    top_p: float = 0.9
    seed: int | None = None

    def chooser(self) -> Chooser:
        return Chooser(self, np.random.default_rng(self.seed))


class Chooser:
    def __init__(self, sampling: Sampling, rng: np.random.Generator) -> None:
        self._sampling, self._rng = sampling, rng

    def __call__(self, logits: Any) -> list[int]:
        """A token for each row of logits (S, V)."""
        if self._sampling.temperature == 0:
            return list(logits.argmax(axis=1).tolist())
        rows = logits if isinstance(logits, np.ndarray) else logits.get()
        return [self._draw(row.astype(np.float64) / self._sampling.temperature) for row in rows]

    def _draw(self, row: Any) -> int:
        weights = np.exp(row - row.max())
        order = np.argsort(-weights, kind="stable")
        total = np.cumsum(weights[order])
        kept = int(np.searchsorted(total, self._sampling.top_p * total[-1])) + 1
        return int(order[np.searchsorted(total[:kept], self._rng.random() * total[min(kept, len(total)) - 1])])


def generate(
    model: Llama, prompts: Sequence[Sequence[int]], most: int, end: int | None, sampling: Sampling | None = None
) -> Iterator[list[tuple[int, int]]]:
    """Continue prompts by at most `most` tokens each, up to the token `end`.

    Yields, for each step of the model, the pairs (prompt, token) of the sequences that are not at their end.
    """
    choose = (sampling or Sampling()).chooser()
    lengths = np.array([len(prompt) for prompt in prompts])
    if not lengths.size or not lengths.all() or most < 1:
        return
    if lengths.max() + most > model.context:
        raise ValueError(f"{lengths.max()} tokens and {most} more are over the model's context, {model.context}")
    cache = model.cache(len(prompts), int(lengths.max()) + most)
    tokens, counts = np.concatenate([np.asarray(prompt) for prompt in prompts]), lengths
    for done in range(1, most + 1):
        logits = model(tokens, np.concatenate([[0], np.cumsum(counts)]), cache)
        step = list(zip(np.flatnonzero(counts).tolist(), choose(logits), strict=True))
        yield step
        step = [(i, token) for i, token in step if token != end]
        if not step or done == most:
            return
        tokens = np.array([token for _, token in step])
        counts = np.zeros(len(prompts), np.int64)
        counts[[i for i, _ in step]] = 1
