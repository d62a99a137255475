"""Semantic search with a real pretrained transformer in plain NumPy and flashkit: `flashkit demo`, or, from a checkout,
`python -m examples.semantic_search "how do I parse JSON?"`."""

from __future__ import annotations

from .search import main

__all__ = ["main"]
