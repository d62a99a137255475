"""Memory traffic of attention by the GPU's hardware counters, compared with the IO model.

    python benchmarks/traffic.py measure    needs a CUDA device, CuPy, and Nsight Compute (ncu) that may read counters
    python benchmarks/traffic.py plot       docs/plots/<name>-traffic.svg, from stored results

Forward pass, float16, head dim 64, tokens times heads constant; bytes are those of one head. Three methods are
measured: standard attention in plain CuPy (plain.py), and flashkit's sm80 kernels with a large and a small tile.
"memory" is the traffic with device memory, of kernels that start with empty caches; results that are still in L2 at the
end are not counted. "sram" is the traffic of the SMs with L2 and beyond, which the model calls the traffic between slow
and fast memory (flashkit.devices.io_model.traffic). The field "who" of a stored line is the method.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import figures

RESULTS = Path(__file__).resolve().parent / "results" / "traffic"

DIM, TOKENS_TIMES_HEADS, ITEMSIZE = 64, 131_072, 2
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TILES = {"128 x 64": (128, 64, 4, 2), "32 x 32": (32, 32, 2, 2)}
"""Queries, keys, warps and stages."""

COUNTERS = {
    "memory": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "sram": ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"),
}


def cases() -> list[tuple[int, str]]:
    """(tokens, method) of each case, in order."""
    return [(n, method) for n in LENGTHS for method in ("standard", *TILES)]


# --- measuring --------------------------------------------------------------------------------------------------------


def work() -> None:
    """Run every case once, under ncu; before each, a kernel called `mark` whose grid size is the case's number."""
    import cupy
    from plain import forward

    from flashkit.backends.cuda_common import device, launch
    from flashkit.backends.cuda_common.arguments import Arguments
    from flashkit.backends.cuda_common.generation import Choice, TileTables
    from flashkit.backends.cupy_raw.backend import CupyRawBackend
    from flashkit.backends.cupy_raw.sm80 import Sm80Tile
    from flashkit.call.arguments import prepare
    from flashkit.devices import profiles

    mark = cupy.RawKernel('extern "C" __global__ void mark() {}', "mark")
    rng = cupy.random.default_rng(0)
    tables = TileTables("cupy_raw", profiles.for_device("cuda"), device.current(), "forward")
    for number, (n, method) in enumerate(cases(), 1):
        shape = 1, TOKENS_TIMES_HEADS // n, n, DIM
        q, k, v = (rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(3))
        if method == "standard":
            mark((number,), (1,), ())
            forward(q, k, v)
        else:
            problem, operands, _ = prepare(q, k, v)
            made = CupyRawBackend.generations[1].plan(problem, Choice(Sm80Tile(*TILES[method]), None, method), tables)
            arguments = Arguments(problem.spec, operands)
            mark((number,), (1,), ())
            made.run(arguments, launch.stream())
        mark((len(cases()) + 1,), (1,), ())  # ends the case
        cupy.get_default_memory_pool().free_all_blocks()


def measure(output: Path | None) -> Path:
    """Run `work` under ncu and store its counters; returns the result file."""
    from flashkit.tools.bench.environment import cuda_machine

    wanted = ",".join(name for names in COUNTERS.values() for name in names)
    options = ["--clock-control", "none", "--cache-control", "all", "--csv", "--print-units", "base"]
    command = ["ncu", *options, "--metrics", wanted, sys.executable, __file__, "work"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    counted = read(done.stdout)
    if not counted:
        raise RuntimeError(f"ncu counted nothing:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    machine = cuda_machine()
    target = output or RESULTS / f"{machine['device'].split()[-1].lower()}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"tokens": n, "who": method, "shared_memory": shared_memory(method), **counted[number], **modelled(n, method)}
        for number, (n, method) in enumerate(cases(), 1)
        if number in counted
    ]
    target.write_text("".join(json.dumps({**line, "machine": machine}) + "\n" for line in lines))
    return target


def read(text: str) -> dict[int, dict[str, float]]:
    """Bytes per head by kind of traffic, for each case by its number, from the output of ncu."""
    start = text.find('"ID"')
    found: dict[int, dict[str, float]] = {}
    number = 0
    for row in csv.DictReader(io.StringIO(text[start:])) if start >= 0 else ():
        if row["Kernel Name"].startswith("mark"):
            number = int(row["Grid Size"].strip("()").split(",")[0])
        elif 0 < number <= len(cases()):
            heads = TOKENS_TIMES_HEADS // cases()[number - 1][0]
            for kind, names in COUNTERS.items():
                if row["Metric Name"] in names:
                    sums = found.setdefault(number, dict.fromkeys(COUNTERS, 0.0))
                    sums[kind] += float(row["Metric Value"].replace(",", "")) / heads
    return found


def shared_memory(method: str) -> int | None:
    """Bytes of a thread block; None for standard attention."""
    from flashkit.backends.cupy_raw.sm80 import Sm80Tile
    from flashkit.spec import AttentionSpec

    return Sm80Tile(*TILES[method]).shared_memory(AttentionSpec("float16", DIM, DIM)) if method in TILES else None


def modelled(n: int, method: str) -> dict[str, float]:
    """Bytes per head by the IO model."""
    from flashkit.devices import io_model

    if method == "standard":
        return {"model": ITEMSIZE * io_model.standard_traffic(n, n, DIM, DIM)}
    moved = io_model.traffic(2, "forward", n, n, DIM, DIM, *TILES[method][:2])
    return {"model": sum(elements * (4 if name == "lse" else ITEMSIZE) for name, elements in moved.items())}


# --- the plot ---------------------------------------------------------------------------------------------------------


def plot(file: Path, folder: Path | None = None) -> Path:
    """Draw a result file; returns the plot, in docs/plots or in this folder."""
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    figure = figures.new(9, 4)
    left, right = figure.subplots(1, 2, sharey=True)
    colours = dict(zip(("standard", *TILES), ("C3", "C0", "C2")))
    for method, colour in colours.items():
        own = [line for line in lines if line["who"] == method]
        n = [line["tokens"] for line in own]
        label = "standard" if method == "standard" else f"tile {method}, {own[0]['shared_memory'] / 1024:.0f} KiB"
        for axes, kind in ((left, "memory"), (right, "sram")):
            axes.plot(n, [line[kind] for line in own], "o-", color=colour, label=label, markersize=3)
        for axes in (left, right) if method == "standard" else (right,):
            axes.plot(n, [line["model"] for line in own], "--", color=colour, linewidth=0.9)
    left.set_title("device memory")
    right.set_title("SMs to L2; dashed: the IO model")
    for axes in (left, right):
        figures.over_tokens(axes)
        axes.set_xlabel("tokens")
    left.set_ylabel("bytes per head, forward, float16, head dim 64")
    left.legend()
    return figures.save(figure, (folder or figures.PLOTS) / f"{file.stem}-traffic.svg")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "plot", "work"))
    parser.add_argument("--output", type=Path, help="result file to write")
    options: Any = parser.parse_args(arguments)
    if options.what == "work":
        work()
    elif options.what == "measure":
        print(f"written to {measure(options.output)}")
    else:
        for file in sorted(RESULTS.glob("*.jsonl")):
            print(f"plot written to {plot(file)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
