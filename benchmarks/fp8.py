"""FP8 on a Hopper GPU: speed and errors beside FlashAttention-3's and cuDNN's, as JSON lines on standard output.

    python benchmarks/fp8.py speed      # TFLOP/s of 18 cells, about a minute
    python benchmarks/fp8.py errors     # relative to float64 on the same codes
    python benchmarks/fp8.py needles    # the weight of one key among 131,072

Times are medians of calls in turns, in random order, with an L2 cache that was flushed before each call. Both peers run
through PyTorch: FlashAttention-3 where FA3_SO names the library of the PyPI package fa3-fwd, and cuDNN where
nvidia-cudnn-frontend is installed. All read the same codes; errors are those of scales per tensor, which all of them
take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cupy
import ml_dtypes
import numpy as np

import flashkit

TOKENS, COLUMNS = 16384, 2048
"""Of all batch entries, and of all heads."""

DIMS, LENGTHS = (64, 128, 256), (1024, 4096, 16384)
KEYS = 131072
Calls = dict[str, Callable[[], Any]]


def normal(shape: tuple[int, ...], seed: int, scale: float = 1, mean: float = 0) -> Any:
    """bfloat16, of layout bnhd."""
    x = cupy.random.RandomState(seed).standard_normal(shape, dtype=np.float32)
    return (x * np.float32(scale) + np.float32(mean)).astype(ml_dtypes.bfloat16)


def codes(arrays: list[Any], per: Any, transpose: bool = True, rotate: bool = False) -> list[flashkit.Quantized]:
    return [
        flashkit.quantize(x, "e4m3", per, rotate=rotate and i < 2, transpose=transpose and i == 2, layout="bnhd")
        for i, x in enumerate(arrays)
    ]


def ours(arrays: list[Any], causal: bool) -> Calls:
    """flashkit's calls: scales per head and per block, V as it lies, with the log-sum-exp, quantisation included, and
    16-bit elements.
    """
    head, block, row = codes(arrays, "head"), codes(arrays, "block"), codes(arrays, "head", transpose=False)
    given: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "head": (head, {}), "block": (block, {}), "row": (row, {}), "lse": (block, {"return_lse": True}),
        "call": (arrays, {"precision": "fp8"}), "bf16": (arrays, {}),
    }  # fmt: skip
    options = {"causal": causal, "layout": "bnhd", "backend": "cupy_raw"}
    return {name: lambda x=x, more=more: flashkit.attention(*x, **options, **more) for name, (x, more) in given.items()}


# --- peers ------------------------------------------------------------------------------------------------------------


def tensors(given: list[flashkit.Quantized]) -> tuple[list[Any], list[Any]]:
    """Codes and scales per head as PyTorch's tensors, on the stream of CuPy."""
    import torch

    batch, _, heads, _ = given[0].shape
    data = [torch.as_tensor(x.data, device="cuda").view(torch.float8_e4m3fn) for x in given]
    scales = [torch.as_tensor(x.scale, device="cuda").reshape(-1).expand(batch * heads) for x in given]
    return data, [x.reshape(batch, heads).contiguous() for x in scales]


def peers(given: list[flashkit.Quantized], causal: bool, cudnn_too: bool = True) -> Calls:
    """FlashAttention-3 and cuDNN on codes with a scale per tensor, those that are there."""
    try:
        import torch
    except ImportError:
        return {}
    assert torch.cuda.current_stream().cuda_stream == cupy.cuda.get_current_stream().ptr == 0
    found: Calls = {}
    for name, make in (("fa3", flash_attention_3), ("cudnn", cudnn))[: 1 + cudnn_too]:
        try:
            run = make(*tensors(given), causal)
            run()
        except Exception as error:  # whatever it is, a line says so, and the others are timed
            print(json.dumps({"missing": name, "why": f"{type(error).__name__}: {str(error)[:200]}"}), file=sys.stderr)
        else:
            found[name] = run
    return found


def flash_attention_3(data: list[Any], scales: list[Any], causal: bool) -> Callable[[], Any]:
    import torch

    torch.ops.load_library(os.environ["FA3_SO"])
    q, k, v = data
    names = (
        "q_v k_new v_new cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k "
        "page_table kv_batch_idx leftpad_k rotary_cos rotary_sin seqlens_rotary scheduler_metadata pack_gqa"
    )
    out = torch.empty(q.shape, dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = dict.fromkeys(names.split()) | {
        "q": q, "k": k, "v": v, "out": out, "q_descale": scales[0], "k_descale": scales[1], "v_descale": scales[2],
        "softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "window_size_left": -1, "window_size_right": -1,
        "softcap": 0.0, "is_rotary_interleaved": False, "num_splits": 1, "sm_margin": 0,
    }  # fmt: skip
    return lambda: torch.ops.fa3_fwd.fwd(**options)[0]


def cudnn(data: list[Any], scales: list[Any], causal: bool) -> Callable[[], Any]:
    """On Hopper its output is e4m3 as well, here without a scale: it is for times alone."""
    import cudnn as frontend
    import torch

    kind, weights = frontend.data_type, 256.0
    handle = frontend.create_handle()
    graph = frontend.pygraph(
        io_data_type=kind.FP8_E4M3, intermediate_data_type=kind.FLOAT, compute_data_type=kind.FLOAT, handle=handle
    )
    memory: dict[int, Any] = {}
    kinds = {torch.float8_e4m3fn: kind.FP8_E4M3, torch.float32: kind.FLOAT}

    def described(x: Any) -> dict[str, Any]:
        return {"dim": list(x.shape), "stride": list(x.stride()), "data_type": kinds[x.dtype]}

    def tensor(x: Any) -> Any:
        memory[len(memory) + 1] = x
        return graph.tensor(uid=len(memory), **described(x))

    def number(x: Any) -> Any:
        return tensor(torch.as_tensor(float(x), device="cuda").reshape(1, 1, 1, 1))

    q, k, v = (x.transpose(1, 2) for x in data)
    of_q, of_k, of_v = (number(x.flatten()[0]) for x in scales)
    results = graph.sdpa_fp8(
        q=tensor(q), k=tensor(k), v=tensor(v), descale_q=of_q, descale_k=of_k, descale_v=of_v,
        descale_s=number(1 / weights), scale_s=number(weights), scale_o=number(1), generate_stats=True,
        attn_scale=q.shape[-1] ** -0.5, use_causal_mask=causal,
    )  # fmt: skip
    out = torch.empty_like(data[0])
    one = torch.empty(1, 1, 1, 1, device="cuda")
    for symbol, x in zip(results, (out.transpose(1, 2), torch.empty(*q.shape[:3], 1, device="cuda"), one, one.clone())):
        memory[len(memory) + 1] = x
        shape = described(x)
        symbol.set_uid(len(memory)).set_output(True).set_dim(shape["dim"]).set_stride(shape["stride"])
        symbol.set_data_type(shape["data_type"])
    graph.validate(), graph.build_operation_graph()
    graph.create_execution_plans([frontend.heur_mode.A, frontend.heur_mode.FALLBACK])
    graph.check_support(), graph.build_plans()
    scratch = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def run() -> Any:
        frontend.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(memory, scratch, handle=handle)
        return out

    return run


# --- speed ------------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], spent: float = 25) -> float:
    """The median of calls for about so many milliseconds."""
    flushed = cupy.empty(256 << 20, np.int8)

    def times(count: int) -> list[float]:
        events = [[cupy.cuda.Event() for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            flushed.fill(0)
            begin.record()
            call()
            end.record()
        cupy.cuda.runtime.deviceSynchronize()
        return [cupy.cuda.get_elapsed_time(begin, end) for begin, end in events]

    return statistics.median(times(max(3, min(60, int(spent / max(min(times(2)), 1e-3))))))


def in_turns(calls: Mapping[str, Callable[[], Any]], rounds: int = 4, spent: float = 25) -> dict[str, float]:
    """Milliseconds of each, medians over rounds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(), call()
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            found[name].append(milliseconds(calls[name], spent))
    return {name: statistics.median(times) for name, times in found.items()}


def flops(dim: int, causal: bool, n: int) -> float:
    return 4.0 * TOKENS * n * COLUMNS * (0.5 if causal else 1)


def cell(dim: int, n: int, seed: int = 0) -> list[Any]:
    return [normal((TOKENS // n, n, COLUMNS // dim, dim), seed + i) for i in range(3)]


def speed(dims: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    for dim, causal, n in itertools.product(dims, (False, True), LENGTHS):
        arrays = cell(dim, n)
        taken = in_turns(ours(arrays, causal) | peers(codes(arrays, "tensor"), causal))
        rates = {name: round(flops(dim, causal, n) / ms / 1e9, 1) for name, ms in taken.items()}
        yield {"cell": [dim, int(causal), n], "tflops": rates}


# --- errors -----------------------------------------------------------------------------------------------------------


def exact(given: list[flashkit.Quantized], causal: bool, rows: Any) -> tuple[Any, Any]:
    """Rows of the last head of the last batch entry in float64; and with weights rounded to e4m3, relative to 2^8."""
    q, k, v = (x.dequantize("float64")[-1, :, -1] for x in given)
    plain, rounded = [], []
    for some in cupy.array_split(rows, max(1, len(rows) * len(k) // (1 << 25))):
        scores = q[some] @ k.T * q.shape[1] ** -0.5
        if causal:
            scores[cupy.arange(len(k)) > some[:, None]] = -np.inf
        weights = cupy.exp(scores - scores.max(1, keepdims=True))
        total = weights.sum(1, keepdims=True)
        plain.append(weights @ v / total), rounded.append(in_e4m3(256 * weights) @ v / (256 * total))
    return cupy.concatenate(plain), cupy.concatenate(rounded)


def in_e4m3(x: Any) -> Any:
    """Numbers up to 448, rounded to those of e4m3."""
    unit = cupy.ldexp(1.0, cupy.maximum(cupy.frexp(x)[1] - 1, -6) - 3)
    return cupy.rint(x / unit) * unit


def relative(found: Any, right: Any) -> float:
    return float(cupy.linalg.norm(found - right) / cupy.linalg.norm(right))


def last_head(out: Any, rows: Any) -> Any:
    out = cupy.asarray(out.float() if hasattr(out, "float") else out.astype(np.float32))
    return out[-1, :, -1][rows].astype(np.float64)


DATA: dict[str, dict[str, Any]] = {
    "normal": {}, "outliers": {"outliers": True}, "scores times 3": {"scale": 3}, "scores times 4": {"scale": 4},
    "V of mean 1": {"mean": 1},
}  # fmt: skip
ERRORS = [
    *itertools.product((False, True), (200, 1000, 4096), ("normal", "outliers", "scores times 3")),
    (False, 777, "scores times 4"), (False, 16384, "normal"), (True, 16384, "normal"),
    (False, 4096, "V of mean 1"), (False, KEYS, "V of mean 1"), (True, KEYS, "V of mean 1"),
]  # fmt: skip


def made(n: int, dim: int, outliers: bool = False, scale: float = 1, mean: float = 0) -> list[Any]:
    arrays = [normal((1, n, 2, dim), 7 + i, scale if i == 0 else 1, mean if i == 2 else 0) for i in range(3)]
    if outliers:
        state = cupy.random.RandomState(1)
        for i, x in enumerate(arrays):
            far = normal(x.shape, 20 + i, 10).astype(np.float32) * (state.random_sample(x.shape) < 1e-3)
            arrays[i] = (x.astype(np.float32) + far.astype(np.float32)).astype(x.dtype)
    return arrays


def errors(dims: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Root mean squares, relative to that of the output."""
    for dim, (causal, n, data) in itertools.product(dims, ERRORS):
        arrays = made(n, dim, **DATA[data])
        rows = cupy.arange(n) if n <= 4096 else cupy.arange(n - 256, n)
        options = {"causal": causal, "layout": "bnhd", "backend": "cupy_raw"}
        found = {}
        for per in ("tensor", "block"):
            given = codes(arrays, per, rotate=per == "block")
            right, rounded = exact(given, causal, rows)
            suffix = "" if per == "tensor" else " per block"
            out = flashkit.attention(*given, **options)
            found[f"ours{suffix}"] = relative(last_head(out, rows), right)
            found[f"p_e4m3{suffix}"] = relative(rounded, right)
            if per == "tensor":
                others = peers(given, causal, cudnn_too=False)
                found |= {name: relative(last_head(run(), rows), right) for name, run in others.items()}
        found = {name: round(x, 5) for name, x in found.items()}
        yield {"errors": data, "D": dim, "mask": "causal" if causal else "full", "N": n, **found}


def needles(dims: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Mean weights of 128 needles among KEYS keys, one for each query, whose scores are so many nats; V tells them."""
    count = 128
    for dim, strength in itertools.product(dims, range(8, 15)):
        q, k, v = (normal((1, n, 1, dim), i) for i, n in enumerate((count, KEYS, KEYS)))
        places = cupy.asarray(np.random.default_rng(0).choice(KEYS, count, replace=False))
        wide = q.astype(np.float32)
        size = (wide**2).sum(-1, keepdims=True)
        k[:, places] = (wide * (strength * dim**0.5) / size).astype(k.dtype)
        v = (v.astype(np.float32) * np.float32(1e-3)).astype(v.dtype)
        v[:, places] = (cupy.sign(v[:, places].astype(np.float32))).astype(v.dtype)
        given = codes([q, k, v], "tensor")
        own = given[2].dequantize("float32")[0, places, 0]

        def weight(out: Any, own: Any = own) -> float:
            return float(((last_head(out, slice(None)) * own).sum(1) / (own**2).sum(1)).mean())

        out = flashkit.attention(*given, layout="bnhd", backend="cupy_raw")
        right = exact(given, False, cupy.arange(count))[0]
        found = {"ours": weight(out), "exact": weight(right[None, :, None])}
        found |= {name: weight(run()) for name, run in peers(given, False, cudnn_too=False).items()}
        yield {"needle": strength, "D": dim, **{name: round(x, 4) for name, x in found.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "errors", "needles"))
    parser.add_argument("--dims", type=lambda text: tuple(map(int, text.split(","))), default=DIMS)
    given = parser.parse_args()
    for line in {"speed": speed, "errors": errors, "needles": needles}[given.what](given.dims):
        print(json.dumps(line), flush=True)
