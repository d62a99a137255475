"""The text to search: paragraphs of this project's documents and of the docstrings of Python's standard library.

Docstrings are read from the source files with `ast`; no module of the library is imported, so nothing is run.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # the repository, or the package that the demo is installed in
LIBRARY = Path(sysconfig.get_path("stdlib"))

MIN_CHARACTERS = 40
MIN_LETTERS = 0.7  # of all characters but blanks; below it a paragraph is mostly a table, a diagram or code
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "turtledemo",
    "lib2to3",
    "distutils",
    "encodings",
    "ensurepip",
    "pydoc_data",
    "_pyrepl",
}
SKIPPED |= {"site-packages", "dist-packages", "__pycache__", "__phello__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Passage:
    """A paragraph on one line, and where it stands: `json.dumps`, or `README.md: Heading`."""

    source: str
    text: str


def gather(limit: int | None = None) -> list[Passage]:
    """The whole corpus without repeats, always in the same order: documents, then the library by module name. With a
    limit, that many passages spread evenly over it, at most half of them from documents (which are few, and stay)."""
    unique: dict[str, Passage] = {}
    for passage in documents():
        unique.setdefault(passage.text, passage)
    n_documents = len(unique)
    for passage in docstrings():
        unique.setdefault(passage.text, passage)
    passages = list(unique.values())
    if limit is None or limit >= len(passages):
        return passages
    chosen = _spread(passages[:n_documents], limit // 2)
    return chosen + _spread(passages[n_documents:], limit - len(chosen))


def _spread(passages: list[Passage], n: int) -> list[Passage]:
    n = min(n, len(passages))
    return [passages[i * len(passages) // n] for i in range(n)]


def documents(root: Path = ROOT) -> Iterator[Passage]:
    """Paragraphs of README.md and docs/*.md under root. Without README.md there, the description of the installed
    package, which is the same text, takes its place."""
    files = [*root.glob("README.md"), *sorted(root.glob("docs/**/*.md"))]
    for file in files:
        yield from markdown(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
    if not any(file.name == "README.md" for file in files):
        try:
            description = importlib.metadata.metadata("flashkit-attention").get_payload()  # type: ignore[attr-defined]
        except importlib.metadata.PackageNotFoundError:
            return
        yield from markdown("README.md", str(description))


def markdown(name: str, text: str) -> Iterator[Passage]:
    """Paragraphs and list items of a Markdown text; code blocks, tables and headings are not prose."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    source = name
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+\.)\s)|\n(?=#)|(?<=\n)(?=\|)", text):
        if heading := re.match(r"#+\s+(.*)", block.strip()):
            source = f"{name}: {heading[1].strip()}"
            block = block.strip()[heading.end() :]
        if not block.lstrip().startswith(("|", "<", "![", "[![")) and not re.match(r" {4}|\t", block):
            yield from _paragraph(source, re.sub(r"^\s*(?:[-*+]|\d+\.)\s+", "", block))


def docstrings(modules: Iterable[str] | None = None, root: Path = LIBRARY) -> Iterator[Passage]:
    """Paragraphs of the docstrings of the library under root: all of it, or only the packages and modules of these
    names. Modules whose name begins with an underscore come last: what they repeat is kept under its public name."""
    wanted = None if modules is None else set(modules)
    files: list[tuple[bool, str, Path]] = []
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED.intersection(parts) or any("-" in part for part in parts):
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if wanted is None or wanted.intersection((parts[0], name)):
            files.append((name.startswith("_"), name, file))
    for _, name, file in sorted(files):
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # templates and files of another Python version
            continue
        yield from _docstrings(name, tree)


def _docstrings(name: str, node: ast.Module | ast.ClassDef | Function) -> Iterator[Passage]:
    for block in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
        if ">>>" not in block:
            yield from _paragraph(name, block)
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in node.body:
            if isinstance(child, ast.ClassDef | Function) and child.name[0] != "_":
                yield from _docstrings(f"{name}.{child.name}", child)


def _paragraph(source: str, block: str) -> Iterator[Passage]:
    text = " ".join(block.split())
    solid = text.replace(" ", "")
    if len(text) >= MIN_CHARACTERS and sum(map(str.isalpha, solid)) >= MIN_LETTERS * len(solid):
        yield Passage(source, text)
