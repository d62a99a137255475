"""Text to learn from: the documentation strings of Python's standard library, as characters."""

from __future__ import annotations

import ast
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .model import Batch

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
END = len(CHARACTERS)  # the token between two documents
TOKENS = np.array([CHARACTERS.find(chr(i)) for i in range(128)], np.int32)


def standard_library() -> list[str]:
    """The documentation strings of modules, classes and functions, in the order of their names."""
    root, found = Path(sysconfig.get_path("stdlib")), []
    for name in sorted(sys.stdlib_module_names):
        files = [root / f"{name}.py"] if (root / f"{name}.py").exists() else sorted((root / name).glob("*.py"))
        for file in files:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(file.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                    found.append(text)
    return found


def encode(text: str) -> np.ndarray:
    """The tokens of the characters that the model knows."""
    found = TOKENS[np.frombuffer(text.encode("ascii", "ignore"), np.uint8)]
    return found[found >= 0]


def decode(ids: np.ndarray) -> str:
    return "".join("\n" if i >= END else CHARACTERS[i] for i in ids)


@dataclass(frozen=True)
class Text:
    """Tokens to learn from, and others to test with; documents end with `END`."""

    train: np.ndarray
    test: np.ndarray

    @classmethod
    def of_documents(cls, documents: list[str], seed: int = 0) -> Text:
        """A tenth of the documents is for testing."""
        tokens = [np.append(encode(text), np.int32(END)) for text in documents]
        order = np.random.default_rng(seed).permutation(len(tokens))
        cut = max(1, len(tokens) // 10)
        return cls(*(np.concatenate([tokens[i] for i in part]) for part in (order[cut:], order[:cut])))

    def batch(self, step: int, sequences: int, context: int, packed: bool = False, seed: int = 0) -> Batch:
        """Windows at places that depend on the seed and the step alone, so that training can go on anywhere.

        packed: whether tokens see their own document alone.
        """
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - context, sequences)
        return batch_of(self.train, starts, context, packed)

    def tests(self, sequences: int, context: int, packed: bool = False) -> list[Batch]:
        """All of the test's tokens, in windows beside each other."""
        starts = np.arange(0, len(self.test) - context - 1, context)
        parts = [starts[i : i + sequences] for i in range(0, len(starts), sequences)]
        return [batch_of(self.test, part, context, packed) for part in parts]


def batch_of(tokens: np.ndarray, starts: np.ndarray, context: int, packed: bool) -> Batch:
    """Windows of `context` tokens from these places on."""
    ids, targets = (np.concatenate([tokens[s + i : s + i + context] for s in starts]) for i in (0, 1))
    begins = np.zeros(len(ids), bool)
    begins[::context] = True
    if packed:
        begins[1:] |= ids[:-1] == END
    return Batch(ids, targets, np.append(np.flatnonzero(begins), len(ids)).astype(np.int32))
