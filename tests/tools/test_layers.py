"""Imports point one way and without circles, as docs/architecture.md draws them; TYPE_CHECKING imports included."""

import ast
import functools
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its name below flashkit; a package's own file by the package's name."""
    found = {}
    for file in ROOT.glob("flashkit/**/*.py"):
        parts = file.relative_to(ROOT / "flashkit").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def imports() -> dict[str, dict[str, int]]:
    """What each module imports of the package, and on which line: module names, not the names in them."""
    known = modules()
    found: dict[str, dict[str, int]] = {name: {} for name in known}
    for name, file in known.items():
        package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
        package = [part for part in package if part]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = package[: len(package) - (node.level - 1)] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                if alias.name == "__version__":
                    continue
                whole = ".".join([*base, alias.name])
                found[name][whole if whole in known else ".".join(base)] = node.lineno
        found[name].pop(name, None)
    return found


def layers() -> dict[str, int]:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"^```text layers\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    return {name: number for number, line in enumerate(block[1].splitlines()) for name in line.split()}


def place(name: str, known: dict[str, int]) -> str | None:
    """The longest prefix of a module's name that the list has."""
    parts = name.split(".")
    return next((p for n in range(len(parts), 0, -1) if (p := ".".join(parts[:n])) in known), None)


def test_imports_point_the_way_that_the_document_says() -> None:
    known, wrong = layers(), []
    for name, imported in imports().items():
        if name in ("", "__main__") or (not imported and modules()[name].name == "__init__.py"):
            continue  # the package's surface and the program import everything, an empty package nothing
        here = place(name, known)
        assert here is not None, f"{name} takes its place in the list of docs/architecture.md"
        for other, line in imported.items():
            there = place(other, known)
            one_way = there is not None and (there == here or known[there] < known[here])
            if not one_way:
                wrong.append(f"flashkit/{name.replace('.', '/')}:{line} imports {other}")
    assert not wrong, wrong


def test_every_module_of_a_divided_package_has_a_place() -> None:
    """Else a new module would silently take the place of its package."""
    known = layers()
    divided = {name.rpartition(".")[0] for name in known} | {""}
    assert {"mods", "call", "devices"} <= divided
    for name in set(modules()) - {"", "__main__"}:
        if name.rpartition(".")[0] in divided:
            assert name in known or name in divided, f"{name} takes its place in the list of docs/architecture.md"


def test_the_list_names_what_exists() -> None:
    assert set(layers()) <= set(modules())


def test_there_are_no_circles() -> None:
    graph = {name: set(found) for name, found in imports().items() if name}
    assert len(graph) > 100
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle
