"""The tables of a CPU's results: ratios, errors and memory, but no times, which say little about another CPU."""

from __future__ import annotations

from collections.abc import Sequence

from stored import CPU_BASELINES, SHAPES, geometric_mean, in_grid, markdown_table, present

from flashkit.tools.bench.results import Result

EXPLANATION = """On CPUs: a ratio is how many times as fast flashkit is as the baseline, the median over rounds in
which all of them took turns in one process. "Backward" is that pass alone. Four figures are head dims 64, 64
causal, 128 and 128 causal with 8 heads; one figure is their geometric mean. A share is of a rate measured in the same
rounds: sgemm is PyTorch's matrix product, dense is flashkit without the mask (per visible pair), read is a loop that
reads as many bytes. Memory is the growth of resident memory at its peak, results included, in a forward pass or in a
forward and a backward pass. An error is the root mean square of the difference from float64 over the root mean square
of the values, the largest over all sizes."""


def table_by_length(results: Sequence[Result]) -> str:
    """Self-attention: a row for each dtype, pass and length; four figures for PyTorch, a mean for other baselines."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for result in filter(in_grid, results):
        groups.setdefault((result.case.dtype, result.direction, result.case.n_q), []).append(result)
    baselines = present(CPU_BASELINES, filter(in_grid, results))
    baselines.sort(key=lambda name: name != "torch")
    rows = []
    for (dtype, direction, n), members in groups.items():
        row = [dtype, direction, str(n)]
        for baseline in baselines:
            ratios = {
                (x.case.head_dim, x.case.causal): x.times_as_fast[baseline]["median"]
                for x in members if baseline in x.times_as_fast
            }  # fmt: skip
            shown = [f"{ratios[s]:.2f}" if s in ratios else "-" for s in SHAPES] if baseline == "torch" else []
            row.append(", ".join(shown) if shown else f"{geometric_mean(ratios.values()):.1f}" if ratios else "")
        sgemm = [x.yardsticks["sgemm"]["median"] for x in members if "sgemm" in x.yardsticks]
        rows.append([*row, f"{min(sgemm):.2f}" if sgemm else ""])
    head = ["dtype", "pass", "tokens", *(f"x {CPU_BASELINES[name]}" for name in baselines), "of sgemm, least"]
    return markdown_table(head, rows, 3)


SHOWN_SHARES = ("dense", "read")


def table_of_others(results: Sequence[Result]) -> str:
    """A row for each case that is not in the table by length."""
    results = [result for result in results if not in_grid(result)]
    baselines = present(CPU_BASELINES, results)
    rows = []
    for result in results:
        times = result.times_as_fast
        ratios = [f"{times[name]['median']:.2f}" if name in times else "" for name in baselines]
        shares = ", ".join(f"{result.yardsticks[x]['median']:.2f} {x}" for x in SHOWN_SHARES if x in result.yardsticks)
        rows.append([result.case.label, result.direction, *ratios, shares])
    return markdown_table(["problem", "pass", *(f"x {CPU_BASELINES[name]}" for name in baselines), "share of"], rows, 2)


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
            theirs = "" if plain is None else f"{plain / 2**20:.0f} MiB, {plain / max(ours, 1):.0f} times"
            rows.append([result.case.label, result.direction, f"{ours / 2**20:.1f} MiB", theirs])
    return markdown_table(["problem", "pass", "memory", "plain NumPy's"], rows, 2)


TABLES = table_by_length, table_of_others, table_of_errors, table_of_memory
