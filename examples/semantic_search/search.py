"""The command: embed a corpus, embed the queries, print what lies nearest."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from . import corpus
from .encoder import Encoder, Floats, ModelNotFoundError

QUERIES = (
    "read and write JSON",
    "run another program and capture its output",
    "exact attention without storing the score matrix",
    "how similar are two pieces of text",
)


@dataclass(frozen=True)
class Match:
    """A passage found for a query; score is the cosine of the angle between their vectors."""

    score: float
    source: str
    text: str


def nearest(query: Floats, vectors: Floats, passages: Sequence[corpus.Passage], top: int) -> list[Match]:
    """The `top` passages whose vectors (len(passages), E) are closest to query (E,), the best first."""
    scores = vectors @ query
    best = np.argsort(-scores, kind="stable")[:top]
    return [Match(float(scores[i]), passages[i].source, passages[i].text) for i in best]


def embed_corpus(encoder: Encoder, passages: Sequence[corpus.Passage], batch_size: int) -> Floats:
    """Unit vectors (len(passages), E), with a progress bar on stderr. What is embedded is the text after its source's
    name: a paragraph from the middle of a docstring rarely says what it is about."""
    with _progress() as progress:
        task = progress.add_task("embedding", total=len(passages))
        texts = [f"{passage.source}: {passage.text}" for passage in passages]
        return encoder.encode(texts, batch_size, progress=lambda done: progress.advance(task, done))


def main(argv: Sequence[str]) -> int:
    """Run the demo with these command-line arguments; returns the exit status, 0 or 1 (something is missing)."""
    options = _parser().parse_args(argv)
    queries: list[str] = options.queries or list(QUERIES)
    try:
        encoder = Encoder(options.model)
    except ModelNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    passages = corpus.gather(options.limit)
    if not passages:
        print("error: no text to search: this Python has no source files of its standard library", file=sys.stderr)
        return 1

    started = time.perf_counter()
    asked = encoder.encode(queries, options.batch_size)  # first, so that the rate below has no kernel compilation in it
    warm = time.perf_counter()
    vectors = embed_corpus(encoder, passages, options.batch_size)
    seconds = time.perf_counter() - warm
    found = [nearest(vector, vectors, passages, options.top) for vector in asked]

    rate = len(passages) / seconds
    if options.json:
        report = {
            "passages": len(passages),
            "seconds": round(seconds, 3),
            "sentences_per_second": round(rate, 1),
            "queries": [
                {"query": query, "matches": [vars(match) for match in matches]}
                for query, matches in zip(queries, found, strict=True)
            ],
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    for query, matches in zip(queries, found, strict=True):
        print(_listing(query, matches))
    print(f"{len(passages)} passages in {seconds:.1f} s: {rate:.0f} sentences/s; queries: {warm - started:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashkit demo",
        description="Search this project's documents and the docstrings of Python's standard library by meaning: "
        "all-MiniLM-L6-v2 in NumPy, its attention by flashkit.",
    )
    limit_help = "search N passages, spread over the corpus of about 8000 (default: %(default)s)"
    parser.add_argument("queries", nargs="*", metavar="QUERY", help="what to look for (default: a few examples)")
    parser.add_argument("--limit", type=_positive, default=4000, metavar="N", help=limit_help)
    parser.add_argument("--top", type=_positive, default=3, metavar="K", help="matches a query (default: %(default)s)")
    parser.add_argument("--batch-size", type=_positive, default=16, metavar="B", help="default: %(default)s sentences")
    parser.add_argument("--model", metavar="DIR", help="weights and tokenizer (default: the installed package's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _listing(query: str, matches: Sequence[Match]) -> str:
    width = max(60, min(shutil.get_terminal_size((110, 24)).columns, 140))
    lines = [query]
    for match in matches:
        lines.append(f"  {match.score:.3f}  {match.source}")
        lines.append(textwrap.indent(textwrap.shorten(match.text, width - 9, placeholder=" ..."), " " * 9))
    return "\n".join(lines) + "\n"


class _Rate(ProgressColumn):
    """Mean rate since the start; rich's own is that of the last steps, and the sentences get shorter on the way."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.completed / task.elapsed:.0f} sentences/s" if task.elapsed else "")


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))
