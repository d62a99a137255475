"""Small faults, put into the code one at a time: the tests must find each. `python -m tests.mutants` runs them.

A fault takes away a part of the algorithm, `CORE`, and its failure would be silent: some result is wrong. It names a
place and what replaces an expression or a statement there:

    "reference.steps:softmax"   a function or class of a module of flashkit, or all of it, "reference.steps:"; old and
                                new are Python, compared as syntax, so the fault survives edits around it
    "sm90/mainloop.cuh"         a file of cupy_raw's kernels; old and new are text

The old code occurs exactly once in its place. tests/tools/test_mutants.py holds every fault to this. Choose faults by
reading the code, not the tests.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

CORE = (
    "scale", "rescale", "mask edge", "ragged tile", "gradient", "sink", "lengths", "offset", "heads", "lse", "score",
    "dropout", "non-finite", "packed", "pages", "quantised", "latent", "splits", "order", "bounds", "keys of plans",
    "memory",
)  # fmt: skip
"""Parts of the algorithm and of what a call relies on."""


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` at a place; tests: arguments of pytest, whose tests must find it."""

    core: str
    place: str
    old: str
    new: str
    tests: str

    def __str__(self) -> str:
        return f"{self.core}: {self.place}: {' '.join(self.old.split())}"

    @property
    def file(self) -> str:
        """The file, from the root of the checkout."""
        module, colon, _ = self.place.partition(":")
        if colon:
            return f"flashkit/{module.replace('.', '/')}.py"
        return f"flashkit/backends/cupy_raw/kernels/{self.place}"

    def applied(self, text: str) -> str:
        """The file's text with the fault; ValueError unless the old code occurs exactly once."""
        _, colon, name = self.place.partition(":")
        data, old = text.encode(), self.old.encode()
        if colon:
            found = [_extent(data, node) for node in _alike(_inner(ast.parse(text), name), self.old)]
        else:
            found = [(at, at + len(old)) for at in range(len(data)) if data.startswith(old, at)]
        if len(found) != 1:
            raise ValueError(f"{self.place} has {self.old!r} {len(found)} times; a fault needs it once")
        start, stop = found[0]
        return (data[:start] + self.new.encode() + data[stop:]).decode()


def _inner(tree: ast.AST, name: str) -> ast.AST:
    """The function or class of a dotted name."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for part in filter(None, name.split(".")):
        tree = next((node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == part), ast.Module())
    return tree


def _alike(tree: ast.AST, code: str) -> Iterator[ast.AST]:
    """The expressions, or the statements, of a tree that say what the code says."""
    (wanted,) = ast.parse(code).body
    node = wanted.value if isinstance(wanted, ast.Expr) else wanted
    shape = ast.dump(node)
    return (each for each in ast.walk(tree) if type(each) is type(node) and ast.dump(each) == shape)


def _extent(data: bytes, node: ast.AST) -> tuple[int, int]:
    """From where to where a node goes; Python counts bytes of UTF-8 in a line."""
    lines = [0, *(at + 1 for at, byte in enumerate(data) if byte == ord("\n"))]
    assert isinstance(node, ast.expr | ast.stmt) and node.end_lineno and node.end_col_offset is not None
    return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
