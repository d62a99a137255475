"""Errors of attention on quantised arrays, as the tables of docs/quantized.md, and a search for a needle.

    python benchmarks/quantized.py                    # the tables, minutes
    python benchmarks/quantized.py needle             # one key among 131,072
    python benchmarks/quantized.py device             # errors and times of the kernel for e4m3 on a Hopper GPU

The arrays are bfloat16. Errors are root mean squares, relative to that of out, against float64 on the arrays before
they were quantised. The floor is float64 on the dequantised arrays: what exact arithmetic on the same numbers gives.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import flashkit
from flashkit.call.quantized import LARGEST, PER

TOKENS, HEADS = 4096, 2
FORMS = {"plain": {}, "rotated": {"rotate": True}, "smooth": {"smooth": True}, "both": {"rotate": True, "smooth": True}}
"""Options of quantize: `smooth` for k alone, `rotate` for q and k, and with int8 for v as well."""


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def outliers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) + N(0, 100) Bernoulli(0.001): Shah et al., FlashAttention-3, arXiv 2407.08608, section 4.3."""
    return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)


def offset(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1), and an offset for each channel, N(0, 9): keys of models have such (SageAttention, arXiv 2410.02367)."""
    return rng.standard_normal(shape) + 3 * rng.standard_normal((*shape[:-2], 1, shape[-1]))


def quantised(q: Any, k: Any, v: Any, dtype: Any, per: Any, form: dict[str, bool]) -> list[flashkit.Quantized]:
    """q, k and v for attention."""
    turned = {"rotate": form.get("rotate", False)}
    return [
        flashkit.quantize(q, dtype, per, **turned),
        flashkit.quantize(k, dtype, per, **form),
        flashkit.quantize(v, dtype, per, **(turned if dtype == "int8" else {})),
    ]


def relative(out: Any, exact: Any) -> float:
    return float(np.sqrt(np.mean((out.astype(np.float64) - exact) ** 2) / np.mean(exact**2)))


def table(q: Any, k: Any, v: Any, causal: bool) -> float:
    """Print the errors of each setting; the greatest ratio to the floor."""
    exact = flashkit.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=causal)
    print(f"rms of out {np.sqrt(np.mean(exact**2)):.3g}")
    for precision in (None, "fp8"):
        error = relative(flashkit.attention(q, k, v, causal=causal, precision=precision), exact)
        print(f"bfloat16, precision={precision!r}: {error:.2e}")
    print("\n| format, scales | " + " | ".join(FORMS) + " |\n|---|" + "---|" * len(FORMS))
    worst = 0.0
    for dtype, per in itertools.product(LARGEST, PER):
        row = []
        for form in FORMS.values():
            given = quantised(q, k, v, dtype, per, form)
            error = relative(flashkit.attention(*given, causal=causal), exact)
            exact_on_them = flashkit.attention(*(x.dequantize("float64") for x in given), causal=causal)
            worst = max(worst, error / relative(exact_on_them, exact))
            row.append(f"{error:.2e}")
        print(f"| {dtype} per {per} | " + " | ".join(row) + " |", flush=True)
    print(f"\nat most {worst:.4f} times the floor", flush=True)
    return worst


def tables() -> None:
    worst = 0.0
    for data, dim in itertools.product((normal, outliers, offset), (128, 64)):
        rng = np.random.default_rng(0)
        of_keys = {"k": data} if data is offset else dict.fromkeys("qkv", data)
        shape = 1, HEADS, TOKENS, dim
        q, k, v = (of_keys.get(name, normal)(rng, shape).astype(ml_dtypes.bfloat16) for name in "qkv")
        for causal in (False, True):
            print(f"\n{data.__name__}, D = {dim}, {'causal' if causal else 'full'}: ", end="")
            worst = max(worst, table(q, k, v, causal))
    print(f"\nAll: at most {worst:.4f} times the floor")


STRENGTHS = (0.45, 0.55, 0.65, 0.8)
"""A needle's key is its query by this factor. With 1.09 it has as much weight as 131,072 keys of noise together."""


@dataclass(frozen=True)
class Haystack:
    """Keys of noise, one for each query that matches it, and values of noise. (1, 1, N, dim), bfloat16."""

    q: np.ndarray
    noise: np.ndarray
    v: np.ndarray
    places: np.ndarray  # of the needles among the keys

    @classmethod
    def of(cls, queries: int, keys: int = 1 << 17, dim: int = 128) -> Haystack:
        rng = np.random.default_rng(0)
        arrays = (rng.standard_normal((1, 1, n, dim)).astype(ml_dtypes.bfloat16) for n in (queries, keys, keys))
        return cls(*arrays, rng.choice(keys, queries, replace=False))

    def keys(self, strength: float) -> np.ndarray:
        k = self.noise.copy()
        k[0, 0, self.places] = (strength * self.q[0, 0].astype(np.float32)).astype(k.dtype)
        return k

    def found(self, out: Any) -> tuple[int, float]:
        """How many needles are found, and the mean cosine of out with the needle's value. A needle is found if of all
        values its own has the greatest product with the row of out."""
        out, v = out[0, 0].astype(np.float32), self.v[0, 0].astype(np.float32)
        own = v[self.places]
        cosines = (out * own).sum(-1) / np.linalg.norm(out, axis=-1) / np.linalg.norm(own, axis=-1)
        nearest = [(v @ row).argmax() for row in out]
        return int((nearest == self.places).sum()), float(cosines.mean())


def needle_table(stack: Haystack, forms: list[Any], found: Callable[..., tuple[int, float]]) -> None:
    """A row of each (format, scales, options of quantize). found: from (q, k, v), quantised where there are scales."""
    print(f"{len(stack.places)} needles among {len(stack.v[0, 0])} keys: found, and the mean cosine\n")
    print("| strength | " + " | ".join(map(str, STRENGTHS)) + " |\n|---|" + "---|" * len(STRENGTHS))
    keys = [stack.keys(strength) for strength in STRENGTHS]
    for dtype, per, form in forms:
        cells = [found(stack.q, k, stack.v, dtype, per, form) for k in keys]
        name = f"{dtype} per {per}{', rotated' * bool(form)}" if per else dtype
        print(f"| {name} | " + " | ".join(f"{n}, {cosine:.3f}" for n, cosine in cells) + " |", flush=True)


def needle_forms(formats: Iterable[str]) -> list[Any]:
    every = itertools.product(formats, PER, ("plain", "rotated"))
    return [("bfloat16", "", {}), *((dtype, per, FORMS[name]) for dtype, per, name in every)]


def needle(queries: int = 64) -> None:
    """Each format among keys of noise."""
    stack = Haystack.of(queries)

    def found(q: Any, k: Any, v: Any, dtype: Any, per: str, form: dict[str, bool]) -> tuple[int, float]:
        return stack.found(flashkit.attention(*(quantised(q, k, v, dtype, per, form) if per else (q, k, v))))

    needle_table(stack, needle_forms(LARGEST), found)


def device_needle(queries: int = 4096, seen: int = 64) -> None:
    """The same with the kernel for e4m3, which takes many queries; the first of them are looked at."""
    import cupy

    stack = Haystack.of(queries)
    first = replace(stack, q=stack.q[:, :, :seen], places=stack.places[:seen])

    def found(*arguments: Any) -> tuple[int, float]:
        *arrays, dtype, per, form = arguments
        given = tuple(map(cupy.asarray, arrays))
        out = flashkit.attention(*(quantised(*given, dtype, per, form) if per else given), backend="cupy_raw")
        return first.found(out[:, :, :seen].get())

    needle_table(stack, needle_forms(["e4m3"]), found)


DEVICE_TOKENS, DEVICE_COLUMNS = 16384, 2048
"""Of all batch entries, and of all heads, where the kernel is timed: the cases of other libraries' benchmarks."""


def device(dims: tuple[int, ...] = (128, 64, 256), lengths: tuple[int, ...] = (1024, 4096, 16384)) -> None:
    """Errors of the kernel for e4m3, and times of its tiles beside those of bfloat16, on CuPy arrays."""
    device_errors()
    device_needle()
    print("\n| head dim | mask | tokens | bfloat16 | scales | " + "tile: TFLOP/s |\n|" + "---|" * 6)
    for dim, causal, n in itertools.product(dims, (False, True), lengths):
        device_times(dim, causal, n, DEVICE_TOKENS // n, DEVICE_COLUMNS // dim)


def on_device(x: flashkit.Quantized) -> flashkit.Quantized:
    """The same numbers in arrays of CuPy."""
    import cupy

    data = cupy.asarray(x.data.view(np.uint8))
    return replace(x, data=data, scale=cupy.asarray(x.scale))


def device_errors(tokens: int = TOKENS, dims: tuple[int, ...] = (128, 64)) -> None:
    """Relative root mean squares: the kernel's, and the floor, exact arithmetic on the same numbers."""
    print("| data | head dim | mask | scales | kernel | floor | ratio |\n|" + "---|" * 7)
    for data, dim, causal in itertools.product((normal, outliers), dims, (False, True)):
        rng = np.random.default_rng(0)
        q, k, v = (data(rng, (1, HEADS, tokens, dim)).astype(ml_dtypes.bfloat16) for _ in range(3))
        exact = flashkit.attention(*(x.astype(np.float64) for x in (q, k, v)), causal=causal)
        for per, rotated in itertools.product(PER, (False, True)):
            given = quantised(q, k, v, "e4m3", per, {"rotate": rotated})
            out = flashkit.attention(*map(on_device, given), causal=causal, backend="cupy_raw")
            floor = flashkit.attention(*(x.dequantize("float64") for x in given), causal=causal)
            error, least = relative(out.get(), exact), relative(floor, exact)
            name = f"{per}{', rotated' * rotated}"
            mask = "causal" if causal else "full"
            line = f"{error:.2e} | {least:.2e} | {error / least:.3f}"
            print(f"| {data.__name__} | {dim} | {mask} | {name} | {line} |", flush=True)


def device_times(dim: int, causal: bool, n: int, batch: int, heads: int) -> None:
    """One line: kernels alone, each of them in turns."""
    import cupy

    from flashkit import dispatch
    from flashkit.backends.cuda_common import device, launch
    from flashkit.backends.cuda_common.arguments import Arguments
    from flashkit.backends.cuda_common.generation import Choice, TileTables
    from flashkit.backends.cupy_raw.backend import CupyRawBackend
    from flashkit.call.arguments import prepare
    from flashkit.call.call import Call
    from flashkit.call.codes import on_codes
    from flashkit.devices import profiles, timing

    shape = batch, heads, n, dim
    given = [cupy.asarray(np.random.default_rng(i).standard_normal(shape, np.float32)) for i in range(3)]
    given = [x.astype(ml_dtypes.bfloat16) for x in given]
    problem, operands, _ = prepare(*given, causal=causal)
    chosen, plan = dispatch.plan(problem, "cupy_raw")
    calls: dict[Any, Any] = {("bfloat16", ""): partial(chosen.forward, plan, operands)}
    tables = TileTables("cupy_raw", profiles.for_device("cuda"), device.current(), "forward")
    kept = []  # arguments of kernels hold addresses
    for per in ("head", "block", "token"):
        codes = [flashkit.quantize(x, "e4m3", per, transpose=i == 2) for i, x in enumerate(given)]
        with Call("attention", *codes, {"causal": causal}) as call:
            assert call.quantised is not None
            made = on_codes(call.quantised, call.q, call.k, call.v, call.options, None, False, "cupy_raw")
        assert not isinstance(made, str), made
        kept.append(made)
        sm90 = CupyRawBackend.generations[0]
        for tile in sm90.candidates(made[0], device.current(), "forward"):
            run = sm90.plan(made[0], Choice(tile, None, "tried"), tables).run
            arguments = Arguments(made[0].spec, made[1])
            name = f"{tile.block_q} x {tile.block_k}, {tile.stages} stages, Q {tile.q_buffers}"
            calls[per, name] = partial(run, arguments, launch.stream())
    wait = cupy.cuda.runtime.deviceSynchronize
    taken = timing.interleaved(calls, rounds=7, budget=4.0, min_rounds=3, synchronize=wait)
    flops = problem.flops() * (0.5 if causal else 1)
    rates = {key: flops / found.median / 1e12 for key, found in taken.items()}
    for per in ("head", "block", "token"):
        tiles = "; ".join(f"{tile}: {rate:.0f}" for (of, tile), rate in rates.items() if of == per)
        mask, wide = "causal" if causal else "full", rates["bfloat16", ""]
        print(f"| {dim} | {mask} | {n} | {wide:.0f} | {per} | {tiles} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("tables", "needle", "device"), default="tables")
    {"tables": tables, "needle": needle, "device": device}[parser.parse_args().what]()
