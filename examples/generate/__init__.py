"""A language model in NumPy or CuPy and flashkit: `flashkit generate "What is the capital of France?"`, or, from a
checkout, `python -m examples.generate "What is the capital of France?"`."""

from __future__ import annotations

from .command import main

__all__ = ["main"]
