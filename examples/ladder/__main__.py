"""All steps, one after the other."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import examples.ladder


def main() -> None:
    for module in sorted(
        pkgutil.iter_modules(examples.ladder.__path__), key=lambda m: (len(m.name.split("_")[0]), m.name)
    ):
        if module.name.startswith("step"):
            importlib.import_module(f"examples.ladder.{module.name}").main()


if __name__ == "__main__":
    sys.exit(main())
