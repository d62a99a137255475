"""Errors of attention on quantised arrays, as the tables of docs/quantized.md, and a search for a needle.

    python benchmarks/quantized.py                    # the tables, minutes
    python benchmarks/quantized.py needle             # one key among 131,072

The arrays are bfloat16. Errors are root mean squares, relative to that of out, against float64 on the arrays before
they were quantised. The floor is float64 on the dequantised arrays: what exact arithmetic on the same numbers gives.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import ml_dtypes
import numpy as np

import flashkit
from flashkit.call.quantized import LARGEST, PER

TOKENS, HEADS = 4096, 2
FORMS = {"plain": {}, "rotated": {"rotate": True}, "smooth": {"smooth": True},
         "both": {"rotate": True, "smooth": True}}  # fmt: skip
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


def needle(keys: int = 1 << 17, dim: int = 128, queries: int = 64) -> None:
    """Keys of noise, and one for each query that matches it.

    A needle is found if its value is, of all values, the one whose product with the row of out is the greatest.
    """
    rng = np.random.default_rng(0)
    q, noise, v = (rng.standard_normal((1, 1, n, dim)).astype(ml_dtypes.bfloat16) for n in (queries, keys, keys))
    places = rng.choice(keys, queries, replace=False)
    values, own = v[0, 0].astype(np.float32), v[0, 0, places].astype(np.float64)
    forms = [("bfloat16", "", {})]
    forms += [(dtype, per, FORMS[n]) for dtype, per, n in itertools.product(LARGEST, PER, ("plain", "rotated"))]
    found = np.empty((len(forms), len(STRENGTHS), 2))
    for column, strength in enumerate(STRENGTHS):
        k = noise.copy()
        k[0, 0, places] = (strength * q[0, 0].astype(np.float32)).astype(k.dtype)
        for row, (dtype, per, form) in enumerate(forms):
            given = quantised(q, k, v, dtype, per, form) if per else (q, k, v)
            out = flashkit.attention(*given)[0, 0].astype(np.float64)
            cosines = (out * own).sum(-1) / np.linalg.norm(out, axis=-1) / np.linalg.norm(own, axis=-1)
            nearest = (values @ out.T.astype(np.float32)).argmax(0)
            found[row, column] = (nearest == places).sum(), cosines.mean()
    print(
        f"{queries} needles among {keys} keys, D = {dim}: found, and the mean cosine of out with the needle's value\n"
    )
    print("| strength | " + " | ".join(map(str, STRENGTHS)) + " |\n|---|" + "---|" * len(STRENGTHS))
    for (dtype, per, form), line in zip(forms, found, strict=True):
        name = f"{dtype} per {per}{', rotated' * bool(form)}" if per else dtype
        print(f"| {name} | " + " | ".join(f"{n:.0f}, {cosine:.3f}" for n, cosine in line) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("tables", "needle"), default="tables")
    {"tables": tables, "needle": needle}[parser.parse_args().what]()
