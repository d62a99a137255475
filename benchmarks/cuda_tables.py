"""The tables of a GPU's results, which include rates: GPUs of one name are alike."""

from __future__ import annotations

from collections.abc import Sequence

from stored import CUDA_BASELINES, markdown_table, median, present

from flashkit.tools.bench.results import Result

EXPLANATION = """On GPUs: TFLOP/s of flashkit, and how many times as fast it is as a kernel of PyTorch's
scaled_dot_product_attention or as JAX's attention in Pallas (float16), each in turns with the others in one process.
All cases have 16,384 tokens in total and 2,048 columns over all heads. A share
relates two rates of flashkit: dense is without the mask (per visible pair), softcap and alibi are with that
modification, deterministic is with deterministic=True, tf32 is with that precision, numba_cuda is the backend in
Python. Decoding is one query for 32 query heads on 8 key/value heads; GB/s count keys and values. An error is the
root mean square of the difference from float64 over that of the values, the largest over all cases of 1,024 tokens
and of decoding, on the same inputs."""


def table_by_length(results: Sequence[Result]) -> str:
    """Self-attention."""
    results = [result for result in results if result.case.n_k is None and not result.case.masked]
    baselines = present(CUDA_BASELINES, results)
    rows = [
        [x.case.dtype, x.direction, str(x.case.head_dim), "causal" if x.case.causal else "none", str(x.case.n_q),
         f"{x.gflops('flashkit') / 1000:.0f}", *(median(x.times_as_fast, name) for name in baselines)]
        for x in results
    ]  # fmt: skip
    head = ["dtype", "pass", "head dim", "mask", "tokens", "TFLOP/s"]
    return markdown_table([*head, *(f"x {CUDA_BASELINES[name]}" for name in baselines)], rows, 5)


def table_of_masks(results: Sequence[Result]) -> str:
    """A row for each case with a window or a block mask."""
    results = [result for result in results if result.case.masked]
    baselines = present(CUDA_BASELINES, results)
    rows = [
        [result.case.label, result.direction, f"{1e3 * result.timings['flashkit']['median']:.3g}",
         *(median(result.times_as_fast, name) for name in baselines), median(result.yardsticks, "dense")]
        for result in results
    ]  # fmt: skip
    head = ["problem", "pass", "ms", *(f"x {CUDA_BASELINES[name]}" for name in baselines), "share of dense"]
    return markdown_table(head, rows, 2)


def table_of_shares(results: Sequence[Result]) -> str:
    """A row for each yardstick, dtype and pass: the least and the greatest share of all cases."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for result in results:
        for name, share in result.yardsticks.items():
            if name != "dense":
                found.setdefault((name, result.case.dtype, result.direction), []).append(share["median"])
    rows = [[*key, str(len(shares)), f"{min(shares):.2f}", f"{max(shares):.2f}"] for key, shares in found.items()]
    return markdown_table(["share of", "dtype", "pass", "cases", "least", "greatest"], rows, 3)


def table_of_decoding(results: Sequence[Result]) -> str:
    """A row for each case with one query."""
    results = [result for result in results if result.case.n_q == 1]
    baselines = present(CUDA_BASELINES, results)
    rows = [
        [result.case.dtype, str(result.case.batch), str(result.case.keys),
         f"{result.bytes / result.timings['flashkit']['median'] / 1e9:.0f}",
         *(median(result.times_as_fast, name) for name in baselines)]
        for result in results
    ]  # fmt: skip
    head = ["decoding", "batch", "keys", "GB/s", *(f"x {CUDA_BASELINES[name]}" for name in baselines)]
    return markdown_table(head, rows, 1)


def table_of_errors(results: Sequence[Result]) -> str:
    """A row for each dtype and output: the largest error of each contender."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for result in results:
        for name, errors in result.errors.items():
            for output, error in errors.items():
                worst = found.setdefault((result.case.dtype, output), {})
                worst[name] = max(worst.get(name, 0.0), error)
    baselines = [name for name in CUDA_BASELINES if any(name in worst for worst in found.values())]
    rows = [
        [*key, *(f"{worst[name]:.2g}" if name in worst else "" for name in ("flashkit", *baselines))]
        for key, worst in found.items()
    ]
    head = ["dtype", "result", "error", *(f"{CUDA_BASELINES[name]}'s" for name in baselines)]
    return markdown_table(head, rows, 2)


TABLES = table_by_length, table_of_masks, table_of_shares, table_of_decoding, table_of_errors
