"""The tables of a CPU's results: ratios, errors and memory, but no times, which say little about another CPU."""

from __future__ import annotations

from collections.abc import Sequence

from stored import CPU_BASELINES, in_grid, markdown_table, median, present

from flashkit.tools.bench.results import Result

EXPLANATION = """On CPUs: a ratio is how many times as fast flashkit is as the baseline, the median over rounds in
which all of them took turns in one process. "Backward" is that pass alone. Cases without another number have 8 heads.
A share is of a rate measured in the same rounds: sgemm is PyTorch's matrix product, dense is flashkit without the mask
(per visible pair), read is a loop that reads as many bytes. Memory is the growth of resident memory at its peak,
results included, in a forward pass or in a forward and a backward pass. An error is the root mean square of the
difference from float64 over the root mean square of the values, the largest over all sizes."""


def table_by_length(results: Sequence[Result]) -> str:
    """Self-attention."""
    grid = [result for result in results if in_grid(result)]
    baselines = present(CPU_BASELINES, grid)
    baselines.sort(key=lambda name: name != "torch")
    rows = [
        [x.case.dtype, x.direction, str(x.case.n_q), str(x.case.head_dim), "causal" if x.case.causal else "none",
         *(median(x.times_as_fast, name) for name in baselines), median(x.yardsticks, "sgemm")]
        for x in grid
    ]  # fmt: skip
    head = ["dtype", "pass", "tokens", "head dim", "mask", *(f"x {CPU_BASELINES[name]}" for name in baselines)]
    return markdown_table([*head, "of sgemm"], rows, 5)


def table_of_others(results: Sequence[Result]) -> str:
    """A row for each case that is not in the table by length."""
    results = [result for result in results if not in_grid(result)]
    baselines = present(CPU_BASELINES, results)
    rows = [
        [x.case.label, x.direction, *(median(x.times_as_fast, name) for name in baselines),
         *(median(x.yardsticks, name) for name in ("dense", "read"))]
        for x in results
    ]  # fmt: skip
    head = ["problem", "pass", *(f"x {CPU_BASELINES[name]}" for name in baselines), "of dense", "of read"]
    return markdown_table(head, rows, 2)


def table_of_errors(results: Sequence[Result]) -> str:
    """A row for each dtype and output: the largest error of flashkit and of PyTorch, and the largest ratio of both."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for result in results:
        ours, theirs = result.errors.get("flashkit", {}), result.errors.get("torch", {})
        for name in ours.keys() & theirs.keys():
            found.setdefault((result.case.dtype, name), []).append((ours[name], theirs[name]))
    order = {name: i for i, name in enumerate(("float32", "bfloat16", "float16", "float64", "out", "dq", "dk", "dv"))}
    rows = [
        [*key, *(f"{max(column):.2g}" for column in zip(*pairs)), f"{max(a / b for a, b in pairs):.2f}"]
        for key, pairs in sorted(found.items(), key=lambda pair: [order[name] for name in pair[0]])
    ]
    return markdown_table(["dtype", "result", "error", "PyTorch's", "largest ratio"], rows, 2)


def table_of_memory(results: Sequence[Result]) -> str:
    """A row for each case whose memory was measured."""
    rows = []
    for result in results:
        if (ours := result.memory.get("flashkit")) is not None:
            plain = result.memory.get("numpy")
            theirs = "" if plain is None else f"{plain / 2**20:.0f}"
            rows.append([result.case.label, result.direction, f"{ours / 2**20:.1f}", theirs])
    return markdown_table(["problem", "pass", "memory, MiB", "plain NumPy's"], rows, 2)


TABLES = table_by_length, table_of_others, table_of_errors, table_of_memory
