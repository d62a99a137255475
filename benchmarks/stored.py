"""The stored results of `flashkit bench`, and what their tables, goals and plots share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flashkit.tools.bench.results import Result, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

CPU_BASELINES = {"numpy": "plain NumPy", "torch": "PyTorch", "jax": "JAX", "onnxruntime": "ONNX Runtime"}
CUDA_BASELINES = {
    "flash": "FlashAttention-2", "cudnn": "cuDNN", "efficient": "memory-efficient", "flex": "FlexAttention",
    "fa3": "FlashAttention-3", "pallas": "Pallas",
}  # fmt: skip
"""Names of baselines in the tables. On a GPU they are kernels of PyTorch, and Pallas is JAX's."""

SHAPES = [(64, False), (64, True), (128, False), (128, True)]
"""Head dim and causality of the cases that share a row or a panel."""


def runs(folder: Path = RESULTS) -> list[list[Result]]:
    """The last run of every result file."""
    return [results for file in sorted(folder.glob("*.jsonl")) if (results := read(file))]


def in_grid(result: Result) -> bool:
    """Whether it is plain or causal self-attention with 8 heads, one of SHAPES and at least 512 tokens."""
    case = result.case
    plain = case.n_k is None and case.group == 1 and (case.batch, case.heads) == (1, 8) and not case.masked
    return plain and (case.head_dim, case.causal) in SHAPES and case.n_q >= 512


def present(baselines: Mapping[str, str], results: Iterable[Result]) -> list[str]:
    """The baselines that were timed in any of these results."""
    timed = {name for result in results for name in result.times_as_fast}
    return [name for name in baselines if name in timed]


def median(found: Mapping[str, Mapping[str, float]], name: str) -> str:
    """That of a baseline or yardstick as text; empty if it was not timed."""
    return f"{found[name]['median']:.2f}" if name in found else ""


def geometric_mean(ratios: Iterable[float]) -> float:
    """NaN without ratios."""
    logs = [math.log(x) for x in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """The first `left` columns aligned to the left, the rest to the right; empty without rows."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows)) if rows else ""
