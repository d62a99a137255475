"""GPT-2 trained by examples/gpt beside the same model in PyTorch: same initial weights, same batches, in turns.

    python benchmarks/gpt.py [--device cuda] [--layers 12 --heads 12 --width 768] [--context 1024] [--tokens 16384]
        [--steps 300] [--ways arrays sdpa flashkit naive] [--seconds 240] [--profile] [--out results.jsonl]

Ways: `arrays` is examples/gpt, `eager` that without CUDA graphs, `window1024` with a window of so many tokens, and
`sparse` with a block mask. The others are PyTorch (compiled and with fused AdamW on a GPU): `sdpa` with its own
attention, `flashkit` with flashkit.torch's, `naive` by the formula. A turn is `--turn` steps of each, none begins
after `--seconds`. Losses are of the same steps. `memory` is what the process took from the GPU for arrays or for
PyTorch, where there is one way of the kind.
With `--profile` each way's kernels are listed with their milliseconds a step, and the host's time to enqueue a step.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flashkit
from examples.gpt.data import END, Text, standard_library
from examples.gpt.model import GPT, Batch, Config
from examples.gpt.parameters import AdamW

Tensor = torch.Tensor
TORCH = "sdpa", "flashkit", "naive"
GRAPH_POOLS: list[Any] = []  # of CuPy's memory


def attention_of(way: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal attention of (B, H, N, D)."""
    if way == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if way == "flashkit":
        flashkit_torch = importlib.import_module("flashkit.torch")
        return lambda q, k, v: flashkit_torch.scaled_dot_product_attention(q, k, v, is_causal=True)

    def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
        return s.masked_fill(hidden, float("-inf")).softmax(-1) @ v

    return naive


class TorchGPT(torch.nn.Module):
    """The model of examples/gpt, with its parameters."""

    def __init__(self, config: Config, state: dict[str, Any], way: str, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.attention = config, attention_of(way)
        for name in config.shapes():
            value = torch.from_numpy(np.array(state[name])).to(device, dtype)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The loss of sequences (B, N)."""
        p, c = self, self.config
        b, n = ids.shape
        x = F.embedding(ids, p.wte_weight) + p.wpe_weight[:n]
        for i in range(c.layers):

            def of(name: str, i: int = i) -> tuple[Tensor, Tensor]:
                return getattr(p, f"h_{i}_{name}_weight"), getattr(p, f"h_{i}_{name}_bias")

            def linear(x: Tensor, name: str, of: Any = of) -> Tensor:
                weight, bias = of(name)
                return F.linear(x, weight.T, bias)

            a = F.layer_norm(x, (c.width,), *of("ln_1"))
            q, k, v = linear(a, "attn_c_attn").view(b, n, 3, c.heads, -1).permute(2, 0, 3, 1, 4)
            x = x + linear(self.attention(q, k, v).transpose(1, 2).reshape(b, n, -1), "attn_c_proj")
            f = F.gelu(linear(F.layer_norm(x, (c.width,), *of("ln_2")), "mlp_c_fc"), approximate="tanh")
            x = x + linear(f, "mlp_c_proj")
        y = F.layer_norm(x, (c.width,), p.ln_f_weight, p.ln_f_bias)
        logits = F.linear(y, p.wte_weight)
        return F.cross_entropy(logits.view(b * n, -1).float() if y.dtype != torch.float64 else logits.view(b * n, -1),
                               targets.view(-1), ignore_index=-1)  # fmt: skip


class Way(NamedTuple):
    """step: makes a step of training, of this number, and returns its loss, not yet read; test: a batch's loss."""

    step: Callable[[Batch, int], Any]
    test: Callable[[Batch], float]


def torch_way(config: Config, state: dict[str, Any], way: str, device: str, optimizer: AdamW) -> Way:
    model, cuda = TorchGPT(config, state, way, device, torch.float32), device == "cuda"
    groups = [
        {"params": [x for x in model.parameters() if x.dim() > 1], "weight_decay": optimizer.decay},
        {"params": [x for x in model.parameters() if x.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.rate, betas=optimizer.betas, fused=True)
    forward = torch.compile(model) if cuda else model

    def loss_of(batch: Batch) -> Tensor:
        ids, targets = (
            torch.from_numpy(x.reshape(len(batch.cu_seqlens) - 1, -1).astype(np.int64)).to(device, non_blocking=True)
            for x in (batch.ids, batch.targets)
        )
        with torch.autocast(device, torch.bfloat16, enabled=cuda):
            return forward(ids, targets)

    def step(batch: Batch, number: int) -> Any:
        for group in adamw.param_groups:
            group["lr"] = optimizer.rate_at(number)
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.clip)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return loss.detach()

    @torch.no_grad()
    def test(batch: Batch) -> float:
        return float(loss_of(batch))

    return Way(step, test)


def array_way(config: Config, way: str, device: str, dtype: str, optimizer: AdamW) -> Way:
    ops = importlib.import_module("examples.gpt." + ("gpu" if device == "cuda" else "cpu"))
    options: dict[str, Any] = {}
    if way.startswith("window"):
        options = {"window": (int(way.removeprefix("window")) - 1, 0)}
    elif way == "sparse":
        options = {"block_mask": flashkit.BlockMask.fixed(config.context, config.context, stride_blocks=8)}
    model = GPT(config, ops, dtype, **options)
    if way == "eager":
        model.replay = None
    if model.replay:
        GRAPH_POOLS.append(model.replay.pool)

    def step(batch: Batch, number: int) -> Any:
        with threadpool_limits(1, "blas"):
            loss = model.add_gradients(batch)
            optimizer.update(model.parameters, number, ops)
        return loss

    return Way(step, model.loss)


def profile(step: Callable[[int], Any], steps: int) -> dict[str, Any]:
    """Milliseconds a step: of kernels by name, all of them, and of the host until the step is enqueued."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for i in range(2):
        step(i)
    torch.cuda.synchronize()
    host, wall = [], []
    for i in range(steps):
        start = time.perf_counter()
        step(i)
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        wall.append(1e3 * (time.perf_counter() - start))
    functions = cProfile.Profile()
    functions.runcall(step, 0)
    torch.cuda.synchronize()
    pstats.Stats(functions).sort_stats("tottime").print_stats(16)
    with torch.profiler.profile(activities=activities) as found:
        for i in range(steps):
            step(i)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            each = kernels.setdefault(event.name[:80], [0, 0.0])
            each[0] += 1 / steps
            each[1] += event.device_time_total / 1e3 / steps
    largest = sorted(kernels.items(), key=lambda x: -x[1][1])
    return {
        "device_ms": round(sum(ms for _, (_, ms) in largest), 3), "host_ms": round(float(np.median(host)), 2),
        "wall_ms": round(float(np.median(wall)), 2),
        "kernels": [(name, round(count, 1), round(ms, 3)) for name, (count, ms) in largest[:40]],
    }  # fmt: skip


def memory(ways: list[str]) -> dict[str, int]:
    """Bytes, by way."""
    of_torch, found = [way for way in ways if way in TORCH], {}
    of_arrays = [way for way in ways if way not in TORCH]
    if len(of_arrays) == 1:
        pools = importlib.import_module("cupy").get_default_memory_pool(), *GRAPH_POOLS
        found[of_arrays[0]] = sum(pool.total_bytes() for pool in pools)
    if len(of_torch) == 1:
        found[of_torch[0]] = torch.cuda.max_memory_reserved()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, default in (
        ("layers", 4), ("heads", 4), ("width", 128), ("context", 256), ("tokens", 4096), ("steps", 60), ("turn", 10),
        ("vocabulary", 0), ("warmup", 10),
    ):  # fmt: skip
        add(f"--{name}", type=int, default=default)
    add("--rate", type=float, default=2e-3)
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--ways", nargs="*", default=["arrays", "sdpa"])
    add("--seconds", type=float, default=float("inf"), help="no turn begins later")
    add("--each", type=float, default=float("inf"), help="seconds of training of each way")
    add("--test", type=int, default=0, help="batches for the test loss at the end")
    add("--profile", action="store_true")
    add("--out", type=Path)
    args = parser.parse_args()
    text = Text.of_documents(standard_library())
    config = Config(args.vocabulary or END + 1, args.context, args.layers, args.heads, args.width)
    optimizer = AdamW(args.steps, args.rate, args.warmup)
    cuda = args.device == "cuda"
    dtype = "bfloat16" if cuda else "float32"
    initial = GPT(config, importlib.import_module("examples.gpt.cpu")).parameters.state()
    makers = {
        way: (lambda way=way: torch_way(config, initial, way, args.device, optimizer))
        if way in TORCH
        else (lambda way=way: array_way(config, way, args.device, dtype, optimizer))
        for way in args.ways
    }  # fmt: skip
    made = {way: make() for way, make in makers.items()}
    losses: dict[str, list[float]] = {way: [] for way in args.ways}
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    batches = [text.batch(i, args.tokens // args.context, args.context) for i in range(args.steps)]

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    begin = time.perf_counter()
    for turn in range(0, args.steps, args.turn):
        if time.perf_counter() - begin > args.seconds:
            print(f"the time is over after {turn} steps", flush=True)
            break
        for way in args.ways if turn // args.turn % 2 else args.ways[::-1]:
            if sum(seconds[way]) * args.turn > args.each:
                continue
            wait()
            start, found = time.perf_counter(), []
            for number in range(turn, min(turn + args.turn, args.steps)):
                found.append(made[way].step(batches[number], number))
            wait()
            seconds[way].append((time.perf_counter() - start) / len(found))
            losses[way] += map(float, found)
    tests = text.tests(args.tokens // args.context, args.context)[: args.test]
    device, taken = torch.cuda.get_device_name() if cuda else "cpu", memory(args.ways) if cuda else {}
    for way in args.ways:
        line = {
            "part": "training", "way": way, "device": device, "dtype": dtype, "config": vars(config),
            "tokens": args.tokens, "steps": len(losses[way]),
            "tokens_per_second": round(args.tokens / float(np.median(seconds[way][1:] or seconds[way]))),
            "losses": [round(x, 4) for x in losses[way]], "memory": taken.get(way), "torch": torch.__version__,
            "seconds": round(sum(seconds[way]) * args.turn, 1),
            "test": round(float(np.mean([made[way].test(batch) for batch in tests])), 4) if tests else None,
        }  # fmt: skip
        print(
            way,
            line["tokens_per_second"],
            "tokens/s; last losses",
            losses[way][-3:],
            line["seconds"],
            "s; test",
            line["test"],
        )
        write(args.out, line)
    for way in args.ways if args.profile and cuda else ():
        found = profile(lambda i, way=way: made[way].step(batches[i], args.steps - 1), 5)
        print(way, *(f"{name} {found[name]}" for name in ("device_ms", "host_ms", "wall_ms")))
        for name, count, ms in found["kernels"][:24]:
            print(f"  {ms:8.3f} {count:6.1f} {name}")
        write(args.out, {"part": "profile", "way": way, "device": device, "config": vars(config), **found})


def write(out: Path | None, line: dict[str, Any]) -> None:
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
