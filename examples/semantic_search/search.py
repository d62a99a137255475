"""The command: embed a corpus, embed the queries, print what lies nearest.

Passages and vectors stay on disk, so that only the first answer waits for them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import textwrap
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from flashkit import settings

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


def stored_index(model: Path, limit: int) -> Path:
    """The file of the corpus and its vectors; its name depends on all that they are made of."""
    files = [*corpus.ROOT.glob("README.md"), *corpus.ROOT.glob("docs/**/*.md"), *Path(__file__).parent.glob("*.py")]
    files = sorted([*files, *model.iterdir()])
    state = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr((sys.version, str(corpus.LIBRARY), limit, state)).encode()).hexdigest()[:20]
    return Path(settings.CACHE_DIR.read() or platformdirs.user_cache_dir()) / "flashkit-demo" / f"{digest}.npz"


def read_index(path: Path) -> tuple[list[corpus.Passage], Floats] | None:
    """Passages and vectors, if the file has them whole."""
    try:
        with np.load(path) as stored:
            passages = [corpus.Passage(*each) for each in json.loads(stored["passages"].tobytes())]
            vectors: Floats = stored["vectors"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return (passages, vectors) if vectors.shape[:1] == (len(passages),) else None


def write_index(path: Path, passages: Sequence[corpus.Passage], vectors: Floats) -> None:
    """Replace all earlier files: they are of other documents. A cache that cannot be written is no error."""
    text = json.dumps([(passage.source, passage.text) for passage in passages]).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{os.getpid()}.npz")
        np.savez(new, passages=np.frombuffer(text, np.uint8), vectors=vectors)
        for old in path.parent.glob("*.npz"):
            if old != new:
                old.unlink(missing_ok=True)
        new.replace(path)
    except OSError as error:
        print(f"warning: the embedded passages are not kept: {error}", file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Run the demo with these command-line arguments; returns the exit status, 0 or 1 (something is missing)."""
    options = _parser().parse_args(argv)
    queries: list[str] = options.queries or list(QUERIES)
    try:
        encoder = Encoder(options.model)
    except ModelNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    path = stored_index(encoder.path, options.limit)
    index = read_index(path)
    passages = index[0] if index else corpus.gather(options.limit)
    if not passages:
        print("error: no text to search: this Python has no source files of its standard library", file=sys.stderr)
        return 1

    started = time.perf_counter()
    asked = encoder.encode(queries, options.batch_size)  # first, so that the rate below has no kernel compilation in it
    warm = time.perf_counter()
    if index is None:
        vectors = embed_corpus(encoder, passages, options.batch_size)
        write_index(path, passages, vectors)
    else:
        vectors = index[1]
    seconds = time.perf_counter() - warm
    found = [nearest(vector, vectors, passages, options.top) for vector in asked]

    rate = None if index else len(passages) / seconds
    if options.json:
        report = {
            "passages": len(passages),
            "seconds": round(seconds, 3),
            "sentences_per_second": None if rate is None else round(rate, 1),  # None: they were on disk
            "queries": [
                {"query": query, "matches": [vars(match) for match in matches]}
                for query, matches in zip(queries, found, strict=True)
            ],
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
        return 0
    for query, matches in zip(queries, found, strict=True):
        print(_listing(query, matches))
    embedded = f"in {seconds:.1f} s: {rate:.0f} sentences/s" if rate else f"embedded before, in {path}"
    print(f"{len(passages)} passages {embedded}; queries: {warm - started:.1f} s")
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
