"""Tables, plots and the list of goals from the result files of `flashkit bench`.

    flashkit bench --output benchmarks/results/cpu.jsonl     measure; with --device cuda on a GPU
    python benchmarks/report.py                              tables to docs/benchmarks.md, a summary to README.md
    python benchmarks/report.py --plots docs/plots           draw the plots as well (pip install ".[plot]")
    python benchmarks/report.py --check                      say which goals are met; exit status 1 if one is not

Of each file in benchmarks/results the last run counts. The tables hold ratios, errors and memory: a time measured on
one CPU says little about another; the ratio to a baseline that took turns in the same process says more. GPUs of one
name are alike, so their tables have rates too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import figures
import lengths
import traffic

from flashkit.tools.bench.run import Line, read

ROOT = Path(__file__).resolve().parents[1]
RESULTS, README, TABLES = ROOT / "benchmarks" / "results", ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
START, END = "<!-- bench:start -->", "<!-- bench:end -->"

PEERS = {"numpy": "plain NumPy", "torch": "PyTorch", "jax": "JAX", "onnxruntime": "ONNX Runtime"}
CUDA_PEERS = {
    "flash": "FlashAttention-2", "cudnn": "cuDNN", "efficient": "memory-efficient", "flex": "FlexAttention",
    "pallas": "Pallas",
}  # fmt: skip
"""PyTorch's and JAX's, on a GPU."""


def runs(results: Path = RESULTS) -> list[list[Line]]:
    """The last run of every result file."""
    return [lines for file in sorted(results.glob("*.jsonl")) if (lines := read(file))]


EXPLANATION = """On CPUs: a ratio is how many times as fast flashkit is as the baseline, the median over rounds in
which all of them took turns in one process. "Backward" is the pull-back alone. Four figures are head dims 64, 64
causal, 128 and 128 causal with 8 heads; one figure is their geometric mean. A share is of a rate measured in the same
rounds: sgemm is PyTorch's matrix product, dense is flashkit without the mask (per visible pair), read is a loop that
reads as many bytes. Memory is the growth of resident memory at its peak, results included, in a forward pass or in a
forward and a backward pass. An error is the root mean square of the difference from float64 over the root mean square
of the values, the largest over all sizes."""

CUDA_EXPLANATION = """On GPUs: TFLOP/s of flashkit, and how many times as fast it is as a kernel of PyTorch's
scaled_dot_product_attention or as JAX's attention in Pallas (float16), each in turns with the others in one process,
one figure per sequence length. All cases have 16,384 tokens in total and 2,048 columns over all heads. A share
relates two rates of flashkit: dense is without the mask (per visible pair), softcap and alibi are with that
modification, deterministic is with deterministic=True, tf32 is with that precision, numba_cuda is the backend in
Python. Decoding is one query for 32 query heads on 8 key/value heads; GB/s count keys and values. An error is the
root mean square of the difference from float64 over that of the values, the largest over all cases of 1,024 tokens
and of decoding, on the same inputs."""


# --- the tables -------------------------------------------------------------------------------------------------------

SHAPES = [(64, False), (64, True), (128, False), (128, True)]
"""Head dim and causality of the cases that share a row."""


def in_grid(line: Line) -> bool:
    """Whether it is a case of plain or causal self-attention in 8 heads, as the tables by length have them."""
    case = line.case
    plain = case.n_k is None and case.group == 1 and (case.batch, case.heads) == (1, 8) and not case.masked
    return plain and (case.head_dim, case.causal) in SHAPES and case.n_q >= 512


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    """The first `left` columns aligned to the left, the rest to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def table_by_length(lines: Sequence[Line]) -> str:
    """Self-attention: a row for each dtype, pass and length; four figures for PyTorch, a mean for other baselines."""
    groups: dict[tuple[str, str, int], list[Line]] = {}
    for line in filter(in_grid, lines):
        groups.setdefault((line.case.dtype, line.direction, line.case.n_q), []).append(line)
    peers = [name for name in PEERS if any(name in line.times_as_fast for line in lines if in_grid(line))]
    peers.sort(key=lambda name: name != "torch")
    rows = []
    for (dtype, direction, n), members in groups.items():
        row = [dtype, direction, str(n)]
        for peer in peers:
            ratios = {
                (x.case.head_dim, x.case.causal): x.times_as_fast[peer]["median"]
                for x in members if peer in x.times_as_fast
            }  # fmt: skip
            shown = [f"{ratios[s]:.2f}" if s in ratios else "-" for s in SHAPES] if peer == "torch" else []
            row.append(", ".join(shown) if shown else f"{mean(ratios.values()):.1f}" if ratios else "")
        sgemm = [x.yardsticks["sgemm"]["median"] for x in members if "sgemm" in x.yardsticks]
        rows.append([*row, f"{min(sgemm):.2f}" if sgemm else ""])
    head = ["dtype", "pass", "tokens", *(f"x {PEERS[name]}" for name in peers), "of sgemm, least"]
    return markdown_table(head, rows, 3) if rows else ""


def table_of_others(lines: Sequence[Line]) -> str:
    """A row for each case that is not in the table by length."""
    lines = [line for line in lines if not in_grid(line)]
    peers = [name for name in PEERS if any(name in line.times_as_fast for line in lines)]
    rows = []
    for line in lines:
        ratios = [f"{line.times_as_fast[name]['median']:.2f}" if name in line.times_as_fast else "" for name in peers]
        shares = ", ".join(f"{line.yardsticks[x]['median']:.2f} {x}" for x in SHOWN_SHARES if x in line.yardsticks)
        rows.append([line.case.label, line.direction, *ratios, shares])
    return markdown_table(["problem", "pass", *(f"x {PEERS[name]}" for name in peers), "share of"], rows, 2)


SHOWN_SHARES = ("dense", "read")


def table_of_errors(lines: Sequence[Line]) -> str:
    """A row for each dtype and result: the largest error of flashkit and of PyTorch, and the largest ratio of two."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in lines:
        ours, theirs = line.errors.get("flashkit", {}), line.errors.get("torch", {})
        for name in ours.keys() & theirs.keys():
            found.setdefault((line.case.dtype, name), []).append((ours[name], theirs[name]))
    order = {name: i for i, name in enumerate(("float32", "bfloat16", "float16", "float64", "out", "dq", "dk", "dv"))}
    rows = [
        [*key, *(f"{max(column):.2g}" for column in zip(*pairs)), f"{max(a / b for a, b in pairs):.2f}"]
        for key, pairs in sorted(found.items(), key=lambda item: [order[name] for name in item[0]])
    ]
    return markdown_table(["dtype", "result", "error", "PyTorch's", "largest ratio"], rows, 2) if rows else ""


def table_of_memory(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        if (ours := line.memory.get("flashkit")) is not None:
            plain = line.memory.get("numpy")
            theirs = "" if plain is None else f"{plain / 2**20:.0f} MiB, {plain / max(ours, 1):.0f} times"
            rows.append([line.case.label, line.direction, f"{ours / 2**20:.1f} MiB", theirs])
    return markdown_table(["problem", "pass", "memory", "plain NumPy's"], rows, 2) if rows else ""


# --- the tables of a GPU ----------------------------------------------------------------------------------------------


def cuda_table(lines: Sequence[Line]) -> str:
    """Self-attention: a row for each dtype, pass, head dim and mask, with a figure for each length."""
    groups: dict[tuple[str, str, int, bool], list[Line]] = {}
    for line in lines:
        case = line.case
        if case.n_k is None and not case.masked:
            groups.setdefault((case.dtype, line.direction, case.head_dim, case.causal), []).append(line)
    peers = [name for name in CUDA_PEERS if any(name in x.times_as_fast for xs in groups.values() for x in xs)]
    rows = []
    for (dtype, direction, d, causal), members in groups.items():
        members.sort(key=lambda line: line.case.n_q)
        tokens, rates = (
            ", ".join(texts)
            for texts in zip(*((str(x.case.n_q), f"{x.gflops('flashkit') / 1000:.0f}") for x in members))
        )
        rows.append([dtype, direction, f"{d}{', causal' if causal else ''}", tokens, rates, *_against(peers, members)])
    head = ["dtype", "pass", "head dim", "tokens", "TFLOP/s", *(f"x {CUDA_PEERS[name]}" for name in peers)]
    return markdown_table(head, rows, 4) if rows else ""


def cuda_table_of_masks(lines: Sequence[Line]) -> str:
    lines = [line for line in lines if line.case.masked]
    peers = [name for name in CUDA_PEERS if any(name in line.times_as_fast for line in lines)]
    rows = [
        [line.case.label, line.direction, f"{1e3 * line.timings['flashkit']['median']:.3g}", *_against(peers, [line]),
         f"{line.yardsticks['dense']['median']:.2f}" if "dense" in line.yardsticks else ""]
        for line in lines
    ]  # fmt: skip
    head = ["problem", "pass", "ms", *(f"x {CUDA_PEERS[name]}" for name in peers), "share of dense"]
    return markdown_table(head, rows, 2) if rows else ""


def cuda_table_of_shares(lines: Sequence[Line]) -> str:
    """A row for each yardstick, dtype and pass: the least and the greatest share of all cases."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for line in lines:
        for name, share in line.yardsticks.items():
            if name != "dense":
                found.setdefault((name, line.case.dtype, line.direction), []).append(share["median"])
    rows = [[*key, str(len(shares)), f"{min(shares):.2f} to {max(shares):.2f}"] for key, shares in found.items()]
    return markdown_table(["share of", "dtype", "pass", "cases", "share"], rows, 3) if rows else ""


def _against(peers: Sequence[str], lines: Sequence[Line]) -> list[str]:
    """For each baseline how many times as fast flashkit is, a figure a line; nothing where it can do none of them."""
    found = []
    for peer in peers:
        ratios = [f"{x.times_as_fast[peer]['median']:.2f}" if peer in x.times_as_fast else "-" for x in lines]
        found.append("" if set(ratios) == {"-"} else ", ".join(ratios))
    return found


def cuda_table_of_decoding(lines: Sequence[Line]) -> str:
    lines = [line for line in lines if line.case.n_q == 1]
    peers = [name for name in CUDA_PEERS if any(name in line.times_as_fast for line in lines)]
    rows = [
        [line.case.dtype, str(line.case.batch), str(line.case.keys),
         f"{line.bytes / line.timings['flashkit']['median'] / 1e9:.0f}", *_against(peers, [line])]
        for line in lines
    ]  # fmt: skip
    head = ["decoding", "batch", "keys", "GB/s", *(f"x {CUDA_PEERS[name]}" for name in peers)]
    return markdown_table(head, rows, 1) if rows else ""


def cuda_table_of_errors(lines: Sequence[Line]) -> str:
    """A row for each dtype and result: the largest errors of all, on inputs of their own each."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for line in lines:
        for who, errors in line.errors.items():
            for name, error in errors.items():
                worst = found.setdefault((line.case.dtype, name), {})
                worst[who] = max(worst.get(who, 0.0), error)
    peers = [name for name in CUDA_PEERS if any(name in worst for worst in found.values())]
    rows = [
        [*key, *(f"{worst[who]:.2g}" if who in worst else "" for who in ("flashkit", *peers))]
        for key, worst in found.items()
    ]
    head = ["dtype", "result", "error", *(f"{CUDA_PEERS[name]}'s" for name in peers)]
    return markdown_table(head, rows, 2) if rows else ""


# --- together ---------------------------------------------------------------------------------------------------------


def mean(ratios: Iterable[float]) -> float:
    """The geometric one."""
    logs = [math.log(x) for x in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def markdown(results: Path = RESULTS) -> str:
    """All tables: what stands between the markers of docs/benchmarks.md."""
    parts, explanations = [], dict[str, None]()
    for lines in runs(results):
        machine = lines[0].machine
        if machine["kind"] == "cuda":
            parts += [_cuda_heading(lines), *filter(None, (table(lines) for table in CUDA_TABLES))]
            explanations[CUDA_EXPLANATION] = None
            continue
        explanations[EXPLANATION] = None
        versions = machine["versions"]
        packages = [f"{name} {versions[name]}" for name in ("flashkit", *PEERS, "numba", "blas") if name in versions]
        heading = f"## {machine['device']}, {_vectors(machine['features'])}{machine['threads']} threads"
        tables = (table_by_length(lines), table_of_others(lines), table_of_errors(lines), table_of_memory(lines))
        parts += [heading, f"{', '.join(packages)}; {lines[0].run[:10]}.", *filter(None, tables)]
    return "\n\n".join([*explanations, *parts]) if parts else "No results are stored yet."


CUDA_TABLES = cuda_table, cuda_table_of_masks, cuda_table_of_shares, cuda_table_of_decoding, cuda_table_of_errors


def _cuda_heading(lines: Sequence[Line]) -> str:
    machine = lines[0].machine
    versions = {**machine["versions"], "driver": machine["clocks"].get("driver_version")}
    shown = ("flashkit", "cupy", "nvrtc", "torch", "cudnn", "driver")
    text = ", ".join(f"{name} {versions[name]}" for name in shown if versions.get(name))
    forced = "".join(f", {name}={value}" for name, value in machine.get("forced", {}).items())
    return f"## {machine['device']}{forced}, {lines[0].run[:10]}\n\n{text}."


def _vectors(features: Sequence[str]) -> str:
    """The widest vectors among a CPU's features, by their usual name."""
    names = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "asimd": "NEON"}
    return next((f"{name}, " for feature, name in names.items() if feature in features), "")


# --- the summary ------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A row of the README's table: which line of which kind of device, and the baselines that it names."""

    workload: str
    kind: str
    direction: str
    case: Mapping[str, object]
    baselines: Sequence[str]


_GPU = {"dtype": "bfloat16", "causal": True, "n_q": 4096, "window": None, "kept": None}
_CPU = {"causal": True, "n_q": 2048, "head_dim": 64, "window": None, "kept": None}
_DECODING = {"n_q": 1, "n_k": 32768, "dtype": "bfloat16", "batch": 1}
SUMMARY = (
    *(
        Row(f"{direction}, bfloat16, causal, 4,096 tokens, head dim {d}", "cuda", direction, {**_GPU, "head_dim": d},
            ("cudnn", "flash"))
        for direction in ("forward", "backward") for d in (64, 128)
    ),
    *(
        Row(f"forward, {dtype}, causal, 2,048 tokens, head dim 64", "cpu", "forward", {**_CPU, "dtype": dtype},
            ("torch",))
        for dtype in ("float32", "bfloat16")
    ),
    Row("decoding, bfloat16, 32,768 keys", "cuda", "forward", _DECODING, ("cudnn", "flash")),
    Row("decoding, bfloat16, 32,768 keys", "cpu", "forward", _DECODING, ("torch",)),
)  # fmt: skip


def summary(results: Path = RESULTS) -> str:
    """What stands between the README's markers: of each kind of device the latest run whose kernels nothing forced."""
    latest: dict[str, list[Line]] = {}
    for lines in sorted(runs(results), key=lambda lines: lines[0].run):
        if not lines[0].machine.get("forced"):
            latest[lines[0].machine["kind"]] = lines
    rows = []
    for row in SUMMARY:
        for line in latest.get(row.kind, ()):
            matches = all(getattr(line.case, name) == value for name, value in row.case.items())
            if matches and line.direction == row.direction:
                ratios = [
                    f"{line.times_as_fast[name]['median']:.2f} x {({**PEERS, **CUDA_PEERS})[name]}"
                    for name in row.baselines if name in line.times_as_fast
                ]  # fmt: skip
                device = line.machine["device"].removeprefix("NVIDIA ")
                rows.append([device, row.workload, _rate(line), ", ".join(ratios)])
    return markdown_table(["device", "workload", "flashkit", "times as fast"], rows, 2) if rows else "No results yet."


def _rate(line: Line) -> str:
    if line.case.n_q == 1:
        return f"{line.bytes / line.timings['flashkit']['median'] / 1e9:.0f} GB/s"
    gflops = line.gflops("flashkit")
    return f"{gflops / 1000:.0f} TFLOP/s" if gflops >= 10_000 else f"{gflops:.0f} GFLOP/s"


def insert(text: str, content: str) -> str:
    """The text with `content` between its markers. ValueError without them."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the text has no {START} ... {END}")
    return f"{before}{START}\n{content}\n{END}{after}"


# --- the goals --------------------------------------------------------------------------------------------------------


class Goal(NamedTuple):
    """A figure of some lines and its bound; every line's figure must keep it, or with `of_mean` their geometric mean.

    figure: None where the line has not what it takes.
    """

    what: str
    lines: Callable[[Line], bool]
    figure: Callable[[Line], float | None]
    bound: float
    at_most: bool = False
    of_mean: bool = False
    unit: str = ""

    def verdict(self, lines: Sequence[Line]) -> tuple[bool, str]:
        """Whether it is met, and a line that says so."""
        measured = [(x, line) for line in lines if self.lines(line) and (x := self.figure(line)) is not None]
        bound = f"{'at most' if self.at_most else 'at least'} {self.bound:g}{self.unit}"
        if not measured:
            return False, f"NOT MEASURED  {self.what}: {bound}"
        if self.of_mean:
            figure, where = mean(x for x, _ in measured), f"mean of {len(measured)}"
        else:
            figure, line = (max if self.at_most else min)(measured, key=lambda pair: pair[0])
            short = sum(x > self.bound if self.at_most else x < self.bound for x, _ in measured)
            where = f"{line.case.label}, {line.direction}; {len(measured) - short} of {len(measured)} cases keep it"
        met = figure <= self.bound if self.at_most else figure >= self.bound
        verdict = "met         " if met else "MISSED      "
        return met, f"{verdict}  {self.what}: {figure:.3g}{self.unit}, {bound} ({where})"


def _of(dtype: str, direction: str) -> Callable[[Line], bool]:
    return lambda line: in_grid(line) and (line.case.dtype, line.direction) == (dtype, direction)


def _torch(line: Line) -> float | None:
    return line.times_as_fast["torch"]["median"] if "torch" in line.times_as_fast else None


def _share(name: str) -> Callable[[Line], float | None]:
    return lambda line: line.yardsticks[name]["median"] if name in line.yardsticks else None


def _later(name: str, than: str) -> Callable[[Line], float | None]:
    """Microseconds by which one call takes longer than another."""

    def figure(line: Line) -> float | None:
        if not {name, than} <= line.timings.keys():
            return None
        return 1e6 * (line.timings[name]["median"] - line.timings[than]["median"])

    return figure


def _worse(line: Line) -> float | None:
    """The largest ratio of flashkit's error to PyTorch's."""
    ours, theirs = line.errors.get("flashkit", {}), line.errors.get("torch", {})
    return max((ours[name] / theirs[name] for name in ours if theirs.get(name)), default=None)


def _against_dense(line: Line) -> float | None:
    share = _share("dense")(line)
    return None if share is None else 1 / share


def _small(*lengths: int) -> Callable[[Line], bool]:
    return lambda line: line.case.n_q in lengths and line.case.n_k is None


def goals(features: Iterable[str]) -> list[Goal]:
    """What the CPU backend is to reach. Without AMX, bfloat16 is to be no slower than PyTorch."""
    amx = "amx_bf16" in features
    speed = [
        ("float32", "forward", 1.15, 1.4), ("float32", "backward", 1.15, 1.4),
        ("bfloat16", "forward", 1.3 if amx else 1.0, 1.8 if amx else 1.0),
        ("bfloat16", "backward", 3.0 if amx else 1.0, 3.0 if amx else 1.0),
        ("float16", "forward", 1.3, 1.3), ("float16", "backward", 1.3, 1.3),
        ("float64", "forward", 1.2, 1.2), ("float64", "backward", 1.2, 1.2),
    ]  # fmt: skip
    found = []
    for dtype, direction, each, together in speed:
        without = " without AMX" if dtype == "bfloat16" and not amx else ""
        what = f"{dtype} {direction}{without}, times as fast as PyTorch"
        found.append(Goal(what, _of(dtype, direction), _torch, each))
        found.append(Goal(what, _of(dtype, direction), _torch, together, of_mean=True))

    def masked(line: Line) -> bool:
        return line.case.masked

    def decoding(line: Line) -> bool:
        return line.case.n_q == 1

    def forward_of(*lengths: int) -> Callable[[Line], bool]:
        return lambda line: _small(*lengths)(line) and line.direction == "forward"

    microseconds = {"at_most": True, "unit": " us"}
    return [
        *found,
        Goal("float32 forward, share of PyTorch's sgemm", _of("float32", "forward"), _share("sgemm"), 0.85),
        Goal("masks, time over the visible fraction of dense time", masked, _against_dense, 1.25, at_most=True),
        Goal("masks, times as fast as PyTorch with the mask", masked, _torch, 3.0),
        Goal("decoding, share of a read loop's bandwidth", decoding, _share("read"), 0.95),
        Goal("decoding, times as fast as PyTorch", decoding, _torch, 3.0),
        Goal("64 and 128 tokens, times as fast as PyTorch", _small(64, 128), _torch, 1.0),
        Goal("16 tokens, later than PyTorch", forward_of(16), _later("flashkit", "torch"), 5.0, **microseconds),
        Goal("attention, later than its kernel", forward_of(16), _later("flashkit", "kernel"), 15.0, **microseconds),
        Goal("planned call, later than its kernel", forward_of(16), _later("planned", "kernel"), 4.0, **microseconds),
        Goal("error over PyTorch's error", lambda line: True, _worse, 1.0, at_most=True),
    ]  # fmt: skip


def cuda_goals(forced: Mapping[str, str]) -> list[Goal]:
    """What the CuPy backend is to reach on Hopper; where the generation sm80 is forced, what that one is to reach."""

    def of(dtype: str, direction: str) -> Callable[[Line], bool]:
        def chosen(line: Line) -> bool:
            case = line.case
            return case.n_q > 1 and not case.masked and (case.dtype, line.direction) == (dtype, direction)

        return chosen

    def against(*peers: str) -> Callable[[Line], float | None]:
        """The fastest of these."""
        return lambda line: min(
            (line.times_as_fast[peer]["median"] for peer in peers if peer in line.times_as_fast), default=None
        )

    def error_over(peer: str) -> Callable[[Line], float | None]:
        def figure(line: Line) -> float | None:
            ours, theirs = line.errors.get("flashkit", {}), line.errors.get(peer, {})
            return max((ours[name] / theirs[name] for name in ours if theirs.get(name)), default=None)

        return figure

    def error(line: Line) -> float | None:
        return max(line.errors.get("flashkit", {}).values(), default=None)

    def rate(line: Line) -> float:
        return line.gflops("flashkit") / 1000

    def masked(line: Line) -> bool:
        return line.case.masked

    older = "sm80" in forced.values()
    found = []
    for direction in ("forward", "backward"):
        if older:
            bounds, peers, name = (0.95, 1.0), ("flash",), "FlashAttention-2"
        else:
            bounds = (1.0, 1.05 if direction == "forward" else 1.06)
            peers, name = ("flash", "cudnn"), "the best of PyTorch's"
        what = f"bfloat16 {direction}, times as fast as {name}"
        found.append(Goal(what, of("bfloat16", direction), against(*peers), bounds[0]))
        found.append(Goal(what, of("bfloat16", direction), against(*peers), bounds[1], of_mean=True))
        what = f"float32 {direction}, times as fast as the memory-efficient kernels"
        found.append(Goal(what, of("float32", direction), against("efficient"), 1.0 if older else 2.0))
        what = f"float32 {direction}, relative error"
        found.append(Goal(what, of("float32", direction), error, 8e-7, at_most=True))
        if older:
            continue
        for d, least in ((64, 80.0), (128, 100.0)) if direction == "forward" else ((64, 70.0), (128, 70.0)):

            def long(line: Line, direction: str = direction, d: int = d) -> bool:
                return of("float32", direction)(line) and line.case.head_dim == d and line.case.n_q >= 4096

            found.append(Goal(f"float32 {direction}, head dim {d}, 4096 tokens", long, rate, least, unit=" TFLOP/s"))
    if not older:
        found += [
            Goal("blocks and windows, times as fast as FlexAttention", masked, against("flex"), 1.3),
            Goal("blocks and windows, time over the visible fraction of dense time", masked, _against_dense, 1.1,
                 at_most=True),
            Goal("time with softcap over plain", lambda line: True, _share("softcap"), 1.15, at_most=True),
            Goal("time with ALiBi over plain", lambda line: True, _share("alibi"), 1.15, at_most=True),
            Goal("time of a deterministic backward pass over the usual one's", lambda line: True,
                 _share("deterministic"), 1 / 0.9, at_most=True),
        ]  # fmt: skip
    what = "decoding, times as fast as cuDNN"
    found.append(Goal(what, lambda line: line.case.n_q == 1, against("cudnn"), 1.0))
    for peer in ("flash", "cudnn"):
        what = f"error over {CUDA_PEERS[peer]}'s"
        found.append(Goal(what, lambda line: True, error_over(peer), 1.0, at_most=True))
    return found


def check(results: Path = RESULTS) -> bool:
    """Print which goals are met; whether all are."""
    all_met = True
    for lines in runs(results):
        print(f"{lines[0].machine['device']}, {lines[0].run}")
        machine = lines[0].machine
        cuda = machine["kind"] == "cuda"
        for goal in cuda_goals(machine.get("forced", {})) if cuda else goals(machine["features"]):
            met, text = goal.verdict(lines)
            all_met &= met
            print(f"  {text}")
    return all_met


# --- plots ------------------------------------------------------------------------------------------------------------


CPU_PANELS = [("float32", "forward"), ("float32", "backward"), ("bfloat16", "forward"), ("bfloat16", "backward")]


def plots(folder: Path, results: Path = RESULTS) -> list[Path]:
    """All plots of the stored results, each named after its result file; returns what was written."""
    written = []
    for file in sorted(results.glob("*.jsonl")):
        lines = read(file)
        cuda = lines[0].machine["kind"] == "cuda"
        drawn = [("speed", _draw_cuda_speed)] if cuda else [("speed", _draw_speed), ("memory", _draw_memory)]
        for name, draw in drawn:
            if (figure := draw(lines)) is not None:
                written.append(figures.save(figure, folder / f"{file.stem}-{name}.svg"))
    for module in (lengths, traffic):
        written += [module.plot(file, folder) for file in sorted((results / module.RESULTS.name).glob("*.jsonl"))]
    return written


def _draw_cuda_speed(lines: Sequence[Line]):  # type: ignore[no-untyped-def]
    """TFLOP/s over the number of tokens, causal bfloat16: a panel for each pass and head dim. None where
    FlashAttention-2 did not run beside it, or an older generation of kernels was forced."""
    lines = [line for line in lines if line.case.n_k is None and line.case.causal and line.case.dtype == "bfloat16"]
    panels = [(direction, d) for direction in ("forward", "backward") for d in (64, 128)]
    if not any("flash" in line.times_as_fast for line in lines) or lines[0].machine.get("forced"):
        return None
    figure = figures.new(9, 2.9)
    handles = {}
    for axes, (direction, d) in zip(figure.subplots(1, len(panels), sharey=True), panels):
        for name, colour in (("flashkit", "C0"), ("cudnn", "C1"), ("flash", "C2")):
            points = sorted(
                (line.case.n_q, line.gflops(name) / 1000)
                for line in lines
                if (line.direction, line.case.head_dim) == (direction, d) and name in line.timings
            )
            if points:
                label = CUDA_PEERS.get(name, name)
                handles[label] = axes.plot(*zip(*points), "o-", color=colour, markersize=3)[0]
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_title(f"{direction}, head dim {d}")
        axes.set_xlabel("tokens")
    figure.axes[0].set_ylim(bottom=0)  # once: it ends the shared axis' own scaling
    figure.axes[0].set_ylabel("TFLOP/s")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    return figure


def _draw_speed(lines: Sequence[Line]):  # type: ignore[no-untyped-def]
    """How many times as fast as each baseline over the number of tokens: a row of panels for each dtype and pass, a
    column for each head dim and causality."""
    lines = [line for line in lines if in_grid(line)]
    rows = [key for key in CPU_PANELS if any((line.case.dtype, line.direction) == key for line in lines)]
    figure = figures.new(9, 1.7 * max(len(rows), 1) + 0.6)
    if not rows:
        return figure
    panels = figure.subplots(len(rows), len(SHAPES), sharex=True, sharey="row", squeeze=False)
    handles = {}
    for i, key in enumerate(rows):
        for j, (d, causal) in enumerate(SHAPES):
            axes = panels[i, j]
            for colour, peer in enumerate(PEERS):
                points = sorted(
                    (line.case.n_q, line.times_as_fast[peer]["median"])
                    for line in lines
                    if peer in line.times_as_fast
                    and (line.case.dtype, line.direction, line.case.head_dim, line.case.causal) == (*key, d, causal)
                )
                if points:
                    handles[PEERS[peer]] = axes.plot(*zip(*points), color=f"C{colour}")[0]
            axes.axhline(1, color="black", linewidth=0.8)
            figures.over_tokens(axes, base=2)
            axes.yaxis.set_major_formatter("{x:g}")
            if i == 0:
                axes.set_title(f"head dim {d}{', causal' if causal else ''}")
        panels[i, 0].set_ylabel(" ".join(key))
    figure.supxlabel("tokens")
    figure.supylabel("times as fast as")
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    return figure


def _draw_memory(lines: Sequence[Line]):  # type: ignore[no-untyped-def]
    """Growth of resident memory by the number of tokens, for each pass of the float32 cases without a mask."""
    figure = figures.new(5, 3.2)
    axes = figure.subplots()
    for direction, style in (("forward", "-"), ("backward", "--")):
        for name, colour in (("flashkit", "C0"), ("numpy", "C1")):
            points = sorted(
                (line.case.n_q, line.memory[name] / 2**20 / line.case.heads)
                for line in lines
                if line.direction == direction and name in line.memory and line.case.n_q == line.case.keys
                and (line.case.dtype, line.case.head_dim, line.case.causal) == ("float32", 64, False)
            )  # fmt: skip
            if points:
                label = f"{PEERS.get(name, name)}, {direction}"
                axes.plot([n for n, _ in points], [m for _, m in points], f"o{style}", color=colour, label=label)
    if axes.has_data():
        figures.over_tokens(axes, base=2)
        axes.legend()
    axes.set_xlabel("tokens")
    axes.set_ylabel("MiB per head at the peak")
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of result files")
    parser.add_argument("--readme", type=Path, default=README, help="file for the summary")
    parser.add_argument("--tables", type=Path, default=TABLES, help="file for all tables")
    parser.add_argument("--plots", type=Path, help="folder to draw plots into")
    parser.add_argument("--check", action="store_true", help="say which goals are met, and write nothing")
    options = parser.parse_args(arguments)
    if options.check:
        return 0 if check(options.results) else 1
    for file, content in ((options.readme, summary(options.results)), (options.tables, markdown(options.results))):
        try:
            file.write_text(insert(file.read_text(encoding="utf-8"), content), encoding="utf-8")
            print(f"tables written to {file}")
        except (OSError, ValueError) as error:
            print(f"{content}\n\nnot written to {file}: {error}", file=sys.stderr)
            return 1
    for file in plots(options.plots, options.results) if options.plots else ():
        print(f"plot written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
