"""The Llama architecture (Touvron et al., arXiv:2302.13971) on NumPy or CuPy arrays, its attention by flashkit.

All tokens of a step are rows of one matrix, whichever sequences they belong to: T tokens of width E, Hq query heads and
Hkv heads of keys and values, head dim D. The KV cache knows which row is which token of which sequence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashkit

from .checkpoint import Checkpoint, Codes, stacked

Array = Any
Linear = Callable[[Array], Array]
PAGE = 64


@dataclass(frozen=True)
class Block:
    """A layer. Products of the same input are one product."""

    attention_norm: Array  # (E,)
    qkv: Linear  # E -> (Hq + 2 Hkv) * D
    attended: Linear  # Hq * D -> E
    mlp_norm: Array  # (E,)
    gate_up: Linear  # E -> 2 F
    down: Linear  # F -> E


class Dense:
    """x @ weight.T, with the weight (out, in) in the dtype of x."""

    def __init__(self, weight: Array) -> None:
        self._transposed = weight.T

    def __call__(self, x: Array) -> Array:
        return (x @ self._transposed).astype(x.dtype, copy=False)  # the product of bfloat16 is float32


class Llama:
    """The model of a checkpoint.

    `xp` is numpy or cupy; activations are in `dtype`. On a CPU weights stay in their 4 and 8 bits and products are in
    float32, unless `quantized` is False; on a GPU weights are dense, in `dtype`.
    """

    def __init__(self, checkpoint: Checkpoint, xp: Any = np, dtype: str = "float32", quantized: bool = True) -> None:
        if dtype == "bfloat16":
            importlib.import_module("ml_dtypes")  # makes it a dtype
        self.xp, self.dtype = xp, np.dtype(dtype)
        size = {name: checkpoint.field(f"llama.{name}") for name in ("block_count", "context_length")}
        self.layers, self.context = size["block_count"], size["context_length"]
        self.heads: int = checkpoint.field("llama.attention.head_count")
        self.kv_heads: int = checkpoint.field("llama.attention.head_count_kv")
        self.dim: int = checkpoint.field("llama.rope.dimension_count")
        self.eps: float = checkpoint.field("llama.attention.layer_norm_rms_epsilon")
        if quantized and xp is np:
            linear: Callable[[Codes], Linear] = importlib.import_module(".quantized", __package__).Quantized
        else:
            linear = lambda codes: Dense(self.array(codes.dense()))

        def block(i: int) -> Block:
            def vector(name: str) -> Array:
                return self.array(checkpoint.vector(f"blk.{i}.{name}.weight"))

            def matrix(*names: str) -> Linear:
                return linear(stacked(*(checkpoint.matrix(f"blk.{i}.{name}.weight") for name in names)))

            return Block(
                vector("attn_norm"), matrix("attn_q", "attn_k", "attn_v"), matrix("attn_output"), vector("ffn_norm"),
                matrix("ffn_gate", "ffn_up"), matrix("ffn_down"),
            )  # fmt: skip

        self.blocks = [block(i) for i in range(self.layers)]
        self.words = checkpoint.matrix("token_embd.weight")
        self.head = linear(self.words)  # the embedding is the output matrix too
        self.norm = self.array(checkpoint.vector("output_norm.weight"))
        base = checkpoint.field("llama.rope.freq_base")
        self.table = flashkit.rotary_table(self.context, self.dim, base=base, like=self.norm)

    def array(self, values: Any) -> Array:
        return self.xp.asarray(np.asarray(values, self.dtype))

    def cache(self, sequences: int, tokens: int) -> flashkit.KVCache:
        """A cache for sequences of at most so many tokens."""
        pages = sequences * -(-tokens // PAGE)
        return flashkit.KVCache(
            sequences, self.kv_heads, self.dim, pages=pages, page=PAGE, layers=self.layers, like=self.norm
        )

    def __call__(self, tokens: Any, cu_seqlens: Any, cache: flashkit.KVCache) -> Array:
        """Logits (S, V), float32, for the token after the last one of each sequence that has new tokens.

        tokens: integers (T,), the new tokens of all sequences; cu_seqlens: (B + 1,), where those of each begin.
        """
        cu_seqlens = np.asarray(cu_seqlens)
        taken, rows = np.unique(np.asarray(tokens), return_inverse=True)
        words = Codes(self.words.code[taken], self.words.scale[taken], self.words.minimum[taken], self.words.bits)
        x = self.array(words.dense()[rows])
        q_width, kv_width = self.heads * self.dim, self.kv_heads * self.dim
        for block, layer in zip(self.blocks, cache, strict=True):
            qkv = block.qkv(self.normed(x, block.attention_norm))
            q = qkv[:, :q_width].reshape(-1, self.heads, self.dim)
            k = qkv[:, q_width : q_width + kv_width].reshape(-1, self.kv_heads, self.dim)
            v = qkv[:, q_width + kv_width :].reshape(-1, self.kv_heads, self.dim)
            # The file's queries and keys are ordered for pairs of neighbours.
            layer.append(k, v, cu_seqlens, rotary=self.table, rotary_interleaved=True)
            out = layer.attend(q, causal=True, rotary=self.table, rotary_interleaved=True)
            x = x + block.attended(out.reshape(-1, q_width))
            gate_up = block.gate_up(self.normed(x, block.mlp_norm))
            width = gate_up.shape[1] // 2
            x = x + block.down(self.silu(gate_up[:, :width]) * gate_up[:, width:])
        last = cu_seqlens[1:][np.diff(cu_seqlens) > 0] - 1
        return self.head(self.normed(x[self.xp.asarray(last)], self.norm)).astype(np.float32)

    def normed(self, x: Array, weight: Array) -> Array:
        """Root mean square normalisation (Zhang and Sennrich, arXiv:1910.07467), in float32."""
        wide = x.astype(np.float32, copy=False)
        square = self.xp.einsum("te,te->t", wide, wide)[:, None] * np.float32(1 / x.shape[1])
        return (wide / self.xp.sqrt(square + np.float32(self.eps))).astype(x.dtype, copy=False) * weight

    def silu(self, x: Array) -> Array:
        """x * sigmoid(x) (Elfwing et al., arXiv:1702.03118), in float32."""
        wide = x.astype(np.float32, copy=False)
        with np.errstate(over="ignore"):  # exp(-x) = inf gives the limit, 0
            return (wide / (1 + self.xp.exp(-wide))).astype(x.dtype, copy=False)
