"""GPT-2 (Radford et al. 2019), forward and backward by hand.

T tokens of all sequences are rows of one matrix of width E; cu_seqlens says where sequences begin. Activations have
the dtype of the parameters; sums, statistics and gradients of parameters are float32 or wider. Arrays and parameters
have the names of the published model, whose weights are (in, out).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkit

from .parameters import Parameters

Array = Any
Attend = Callable[..., tuple[Array, Any]]  # of a layer's number, q, k, v: out, and the way back
Saved = deque[tuple[Any, ...]]
NOT_SAVED: Saved = deque(maxlen=0)
HEAD_ROWS = 8192  # rows of logits that exist at once


@dataclass(frozen=True)
class Config:
    """Sizes of a model. GPT-2 124M is the default, with its vocabulary rounded up for the matrix product."""

    vocabulary: int = 50304
    context: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768

    def __post_init__(self) -> None:
        if self.width % (4 * self.heads):
            raise ValueError(f"width: expected a multiple of {4 * self.heads}, four for each head, got {self.width}")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, by name."""
        e = self.width
        products = ("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)  # times e
        found: dict[str, tuple[int, ...]] = {"wte.weight": (self.vocabulary, e), "wpe.weight": (self.context, e)}
        for i in range(self.layers):
            for name in ("ln_1", "ln_2"):
                found |= {f"h.{i}.{name}.weight": (e,), f"h.{i}.{name}.bias": (e,)}
            for name, rows, columns in products:
                found |= {f"h.{i}.{name}.weight": (rows * e, columns * e), f"h.{i}.{name}.bias": (columns * e,)}
        return found | {"ln_f.weight": (e,), "ln_f.bias": (e,)}


@dataclass(frozen=True)
class Batch:
    """Tokens of sequences, and what follows each.

    ids: integers (T,), on the host; targets: (T,), negative where no token is to be predicted; cu_seqlens: (B + 1,).
    """

    ids: np.ndarray
    targets: np.ndarray
    cu_seqlens: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """(T,): of each token in its sequence."""
        begins = np.repeat(self.cu_seqlens[:-1], np.diff(self.cu_seqlens))
        return np.arange(len(self.ids)) - begins


class GPT:
    """A model of these sizes, with its parameters.

    Parameters
    ----------
    config, ops
        Sizes; cpu.py or gpu.py.
    dtype
        Of activations: float32, float64, and on a GPU bfloat16.
    seed
        Of the initial parameters: normal, standard deviation 0.02, smaller where a layer adds to the residual stream.
    **options
        Of `flashkit.attention`, such as window=(1023, 0).
    """

    def __init__(self, config: Config, ops: Any, dtype: Any = np.float32, seed: int = 0, **options: Any) -> None:
        self.config, self.ops, self.options = config, ops, {"causal": True, **options}
        self.parameters = Parameters(config.shapes(), ops, np.dtype(dtype))
        rng, initial = np.random.default_rng(seed), {}
        for name, shape in config.shapes().items():
            if len(shape) > 1:
                deviation = 0.02 / np.sqrt(2 * config.layers) if "c_proj" in name else 0.02
                initial[name] = rng.normal(0, deviation, shape).astype(np.float32)
            else:
                initial[name] = np.full(shape, "ln_" in name and "weight" in name, np.float32)
        self.parameters.load(initial)
        self.replay = ops.Replay and ops.Replay()  # None: no CUDA graphs

    def _index(self, ids: np.ndarray, positions: np.ndarray) -> list[Array]:
        if positions.max(initial=0) >= self.config.context:
            raise ValueError(f"batch: expected sequences of at most {self.config.context} tokens")
        return [self.ops.index(x) for x in (ids, positions)]

    def _forward(self, ids: Array, positions: Array, attend: Attend, saved: Saved, tokens: Any = (-1,)) -> Array:
        """The last layer's normalised output (T, E). What the backward pass reads is appended to `saved`."""
        ops, p, heads = self.ops, self.parameters, self.config.heads
        x = ops.embed(ids, positions, p["wte.weight"], p["wpe.weight"])
        added, bias = None, None  # what the layer before adds to the residual stream
        for i in range(self.config.layers):
            h = f"h.{i}."
            x, a, stats = ops.add_norm(x, added, bias, p[h + "ln_1.weight"], p[h + "ln_1.bias"])
            qkv = ops.add_bias(ops.product(a, p[h + "attn.c_attn.weight"]), p[h + "attn.c_attn.bias"])
            qkv = qkv.reshape(*tokens, 3, heads, self.config.width // heads)
            out, vjp = attend(i, *(qkv[..., j, :, :] for j in range(3)))
            added = ops.product(out.reshape(x.shape), p[h + "attn.c_proj.weight"])
            saved.append((x, a, stats, out, vjp))
            x, b, stats = ops.add_norm(x, added, p[h + "attn.c_proj.bias"], p[h + "ln_2.weight"], p[h + "ln_2.bias"])
            f = ops.product(b, p[h + "mlp.c_fc.weight"])
            g = ops.gelu(f, p[h + "mlp.c_fc.bias"])
            added, bias = ops.product(g, p[h + "mlp.c_proj.weight"]), p[h + "mlp.c_proj.bias"]
            saved.append((x, b, stats, f, g))
        x, y, stats = ops.add_norm(x, added, bias, p["ln_f.weight"], p["ln_f.bias"])
        saved.append((x, stats))
        return y

    def loss(self, batch: Batch) -> float:
        """Mean cross-entropy in nats."""
        return float(self.add_gradients(batch, None))

    def next_logits(self, ids: np.ndarray, cache: flashkit.KVCache) -> Array:
        """Logits (V,), float32, behind new tokens of the one sequence of a cache, which takes their keys."""
        begin, layers = int(cache.lengths[0]), list(cache)

        def attend(i: int, q: Array, k: Array, v: Array) -> tuple[Array, None]:
            layers[i].append(k, v, [0, len(k)])
            return layers[i].attend(q, **self.options), None

        y = self._forward(*self._index(ids, np.arange(begin, begin + len(ids))), attend, NOT_SAVED)
        return self.ops.product(y[-1:], self.parameters["wte.weight"].T)[0].astype(np.float32)

    def _head(self, y: Array, targets: Array, scale: float | None) -> tuple[list[Array], Array]:
        """The cross-entropy of tokens, in parts, and the gradient by y of `scale` times its sum."""
        ops, words = self.ops, self.parameters["wte.weight"]
        dy, losses = None if scale is None else ops.xp.empty_like(y), []
        for begin in range(0, len(y), HEAD_ROWS):
            part = slice(begin, begin + HEAD_ROWS)
            logits = ops.product(y[part], words.T)
            losses.append(ops.cross_entropy(logits, targets[part], scale))
            if dy is not None:
                ops.product(logits, words, out=dy[part])
                ops.add_product(self.parameters.gradient("wte.weight"), logits.T, y[part])
        return losses, dy

    def add_gradients(self, batch: Batch, scale: float | None = 1.0) -> Array:
        """Add `scale` times the gradient of the batch's loss to the parameters' gradients, where there is a scale.

        Returns the loss, an array of no axes: reading it waits for a GPU, which replays a step whose sequences all have
        the same length.
        """
        count, lengths = max(int((batch.targets >= 0).sum()), 1), set(np.diff(batch.cu_seqlens).tolist())
        n = lengths.pop() if len(lengths) == 1 else None
        options = {"layout": "bnhd"} if n else {"cu_seqlens": batch.cu_seqlens}
        factor = None if scale is None else scale / count

        def run(*given: Array) -> list[Array]:
            return self._losses(*given, factor, (-1, n) if n else (-1,), {**options, **self.options})

        given = *self._index(batch.ids, batch.positions), self.ops.xp.asarray(batch.targets.astype(np.int32))
        repeats = n and scale and self.replay
        losses = self.replay(run, given, (len(batch.ids), n, factor)) if repeats else run(*given)
        return sum(x.sum(dtype=np.float64) for x in losses) / count

    def _losses(
        self, ids: Array, positions: Array, targets: Array, scale: float | None, tokens: tuple[int, ...], options: Any
    ) -> list[Array]:
        """Of tokens, in parts. With a scale, the gradients of `scale` times their sum are added. tokens: their axes."""
        ops, p = self.ops, self.parameters
        saved: Saved = deque(maxlen=0 if scale is None else None)

        def attend(_: int, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            if scale is None:
                return flashkit.attention(q, k, v, **options), None
            return flashkit.attention_vjp(q, k, v, **options)

        y = self._forward(ids, positions, attend, saved, tokens)
        losses, dy = self._head(y, targets, scale)
        if scale is None:
            return losses

        def norm(dy: Array, x: Array, stats: Array, name: str, dx: Array | None) -> Array:
            """The gradient by x, the input of a normalisation; dx: what arrives at x behind it."""
            totals = p.gradient(name + ".weight"), p.gradient(name + ".bias")
            return ops.norm_gradient(dy, x, stats, p[name + ".weight"], dx, totals)

        def product(dy: Array, x: Array, name: str) -> Array:
            """The gradient by x of a product with a weight, to which a bias was added."""
            ops.add_product(p.gradient(name + ".weight"), x.T, dy)
            ops.add_sum(p.gradient(name + ".bias"), dy)
            return ops.product(dy, p[name + ".weight"].T)

        x, stats = saved.pop()
        dx = norm(dy, x, stats, "ln_f", None)
        for i in reversed(range(self.config.layers)):
            h = f"h.{i}."
            x, b, stats, f, g = saved.pop()
            df = ops.gelu_gradient(product(dx, g, h + "mlp.c_proj"), f, p[h + "mlp.c_fc.bias"])
            dx = norm(product(df, b, h + "mlp.c_fc"), x, stats, h + "ln_2", dx)
            x, a, stats, out, vjp = saved.pop()
            dout = product(dx, out.reshape(x.shape), h + "attn.c_proj").reshape(out.shape)
            parts = [d.view(np.uint64) for d in vjp(dout)]  # CuPy copies element by element
            dqkv = ops.xp.stack(parts, axis=-3).view(dx.dtype).reshape(len(x), -1)
            dx = norm(product(dqkv, a, h + "attn.c_attn"), x, stats, h + "ln_1", dx)
        ops.add_rows(p.gradient("wte.weight"), ids, dx)
        ops.add_rows(p.gradient("wpe.weight"), positions, dx)
        return losses
