"""Time and peak memory against the number of tokens: the figure of the FlashAttention paper, to 65,536 tokens.

    python benchmarks/lengths.py measure    needs a CUDA device and CuPy
    python benchmarks/lengths.py plot       docs/plots/<name>-lengths.svg, from stored results

float16, batch 1, 12 heads, head dim 64, without a mask: flashkit, and standard attention in plain CuPy (plain.py) as
far as it fits in memory. Memory is the peak of CuPy's pool beyond the inputs. The field "who" of a stored line is the
method.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import figures

RESULTS = Path(__file__).resolve().parent / "results" / "lengths"
HEADS, DIM = 12, 64
LENGTHS = tuple(1 << i for i in range(9, 17))
METHODS = "standard", "flashkit"
PASSES = "forward", "forward and backward"


def measure(output: Path | None) -> Path:
    """Measure and store all lengths; returns the result file."""
    import cupy
    import plain

    import flashkit
    from flashkit.devices import timing
    from flashkit.tools.bench.environment import cuda_machine

    machine = cuda_machine()
    target = output or RESULTS / f"{machine['device'].split()[-1].lower()}.jsonl"
    target.parent.mkdir(parents=True, exist_ok=True)
    pool, rng = cupy.get_default_memory_pool(), cupy.random.default_rng(0)
    lines = []
    for n in LENGTHS:
        shape = 1, HEADS, n, DIM
        q, k, v, dout = (rng.standard_normal(shape, dtype=cupy.float32).astype(cupy.float16) for _ in range(4))

        def both(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout) -> Any:
            out, vjp = flashkit.attention_vjp(q, k, v)
            return out, vjp(dout)

        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("standard", PASSES[0]): lambda q=q, k=k, v=v: plain.forward(q, k, v),
            ("flashkit", PASSES[0]): lambda q=q, k=k, v=v: flashkit.attention(q, k, v),
            ("standard", PASSES[1]): lambda q=q, k=k, v=v, dout=dout: plain.forward_and_backward(q, k, v, dout),
            ("flashkit", PASSES[1]): both,
        }
        peaks = {key: peak(call, pool) for key, call in calls.items()}
        fits = {key: calls[key] for key, bytes_ in peaks.items() if bytes_ is not None}
        synchronize = cupy.cuda.runtime.deviceSynchronize
        taken = timing.interleaved(fits, rounds=7, budget=4.0, min_rounds=3, synchronize=synchronize)
        for (method, passes), bytes_ in peaks.items():
            seconds = taken[method, passes].as_dict() if (method, passes) in taken else None
            line = {"tokens": n, "who": method, "pass": passes, "seconds": seconds, "memory": bytes_}
            lines.append({**line, "machine": machine})
        target.write_text("".join(json.dumps(line) + "\n" for line in lines))
        pool.free_all_blocks()
    return target


def peak(call: Callable[[], Any], pool: Any) -> int | None:
    """The peak of the pool during a call, in bytes beyond what is in use before; None if memory does not suffice."""
    import cupy

    most = before = pool.used_bytes()

    class Watch(cupy.cuda.memory_hook.MemoryHook):  # type: ignore[misc, name-defined]
        name = "watch"

        def malloc_postprocess(self, **_: Any) -> None:
            nonlocal most
            most = max(most, pool.used_bytes())

    pool.free_all_blocks()
    try:
        call()  # compiles
        with Watch():
            call()
    except cupy.cuda.memory.OutOfMemoryError:
        return None
    finally:
        cupy.cuda.runtime.deviceSynchronize()
        pool.free_all_blocks()
    return int(most - before)


def plot(file: Path, folder: Path | None = None) -> Path:
    """Draw a result file; returns the plot, in docs/plots or in this folder."""
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    figure = figures.new(9, 4)
    left, right = figure.subplots(1, 2)
    for method, colour in zip(METHODS, ("C3", "C0")):
        for passes, style in zip(PASSES, ("o-", "o--")):
            own = [line for line in lines if (line["who"], line["pass"]) == (method, passes)]
            timed, held = ([line for line in own if line[what] is not None] for what in ("seconds", "memory"))
            label = f"{method}, {passes}"
            times = [1e3 * line["seconds"]["median"] for line in timed]
            left.plot([line["tokens"] for line in timed], times, style, color=colour, label=label, markersize=3)
            sizes = [line["memory"] / 2**20 for line in held]
            right.plot([line["tokens"] for line in held], sizes, style, color=colour, markersize=3)
    left.set_ylabel("ms")
    right.set_ylabel("MiB at the peak, beyond the inputs")
    for axes in (left, right):
        figures.over_tokens(axes)
        axes.set_xlabel("tokens")
    left.legend()
    return figures.save(figure, (folder or figures.PLOTS) / f"{file.stem}-lengths.svg")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "plot"))
    parser.add_argument("--output", type=Path, help="result file to write")
    options: Any = parser.parse_args(arguments)
    if options.what == "measure":
        print(f"written to {measure(options.output)}")
    else:
        for file in sorted(RESULTS.glob("*.jsonl")):
            print(f"plot written to {plot(file)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
