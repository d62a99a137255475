"""The attention problems of the benchmark, and the suites that `flashkit bench --suite` names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...spec import Direction

Arrays = tuple[np.ndarray, ...]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")

MAX_TOKENS = 1 << 24
"""The largest number of tokens, and of anything else, of a case."""

BLOCK = 128
"""Queries and keys of a block of the random block mask."""


@dataclass(frozen=True)
class Case:
    """One attention problem; arrays are (batch, heads, tokens, head_dim).

    n_k, heads_kv, head_dim_v: by default as n_q, heads and head_dim. window: keys that a query sees, the last one at
    its own position. kept: share of the blocks of BLOCK x BLOCK pairs that a random block mask keeps.
    """

    n_q: int
    head_dim: int = 64
    heads: int = 8
    dtype: str = "float32"
    causal: bool = False
    batch: int = 1
    n_k: int | None = None
    heads_kv: int | None = None
    window: int | None = None
    kept: float | None = None
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_q", "head_dim", "heads", "batch", "n_k", "heads_kv", "window", "head_dim_v"):
            n = getattr(self, name)
            if n is not None and not 1 <= n <= MAX_TOKENS:
                raise ValueError(f"{name} of a case: expected 1 to {MAX_TOKENS}, got {n}")

    @property
    def keys(self) -> int:
        return self.n_q if self.n_k is None else self.n_k

    @property
    def columns(self) -> int:
        """Columns of the values."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of q, k, v and dout."""
        rows, keys = (self.batch, self.heads, self.n_q), (self.batch, self.heads // self.group, self.keys)
        return (*rows, self.head_dim), (*keys, self.head_dim), (*keys, self.columns), (*rows, self.columns)

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // (self.heads_kv or self.heads)

    @property
    def masked(self) -> bool:
        """Whether there is a window or a block mask."""
        return self.window is not None or self.kept is not None

    @property
    def grid(self) -> np.ndarray:
        """The blocks that the random block mask keeps: as many in each row of blocks, the diagonal one among them."""
        assert self.kept is not None
        rows, columns = -(-self.n_q // BLOCK), -(-self.keys // BLOCK)
        order = np.random.default_rng(1).random((rows, columns))
        order[np.arange(rows), np.arange(rows) * columns // rows] = -1
        return order.argsort(1).argsort(1) < max(1, round(self.kept * columns))

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `attention`."""
        from ...mods.block_mask import BlockMask

        options: dict[str, Any] = {"causal": self.causal}
        if self.window is not None:
            options["window"] = (self.window - 1, 0)
        if self.kept is not None:
            options["block_mask"] = BlockMask.from_dense(self.grid, BLOCK, BLOCK, self.n_q, self.keys)
        return options

    @property
    def visible(self) -> np.ndarray | None:
        """The visible pairs as a Boolean array (queries, keys); None if all are."""
        if not (self.causal or self.masked):
            return None
        positions, keys = np.arange(self.n_q)[:, None] + self.keys - self.n_q, np.arange(self.keys)
        causal = self.causal or self.window is not None
        visible = keys <= positions if causal else np.ones((self.n_q, self.keys), bool)
        if self.window is not None:
            visible &= keys > positions - self.window
        if self.kept is not None:
            visible &= self.grid.repeat(BLOCK, 0)[: self.n_q].repeat(BLOCK, 1)[:, : self.keys]
        return visible

    def arrays(self, seed: int = 0) -> Arrays:
        """q, k, v and dout, normally distributed."""
        import ml_dtypes

        rng = np.random.default_rng(seed)
        kind = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        return tuple(rng.standard_normal(shape, np.float32).astype(kind) for shape in self.shapes)

    @property
    def label(self) -> str:
        heads = f"{self.heads}" if self.group == 1 else f"{self.heads}:{self.heads // self.group}"
        batch = f"batch {self.batch}, " if self.batch > 1 else ""
        mask = ", causal" if self.causal else ""
        mask += f", window {self.window}" if self.window is not None else ""
        mask += f", {self.kept:.0%} of blocks" if self.kept is not None else ""
        dims = f"{self.head_dim}" if self.head_dim_v is None else f"{self.head_dim}/{self.head_dim_v}"
        return f"{batch}heads {heads}, {self.n_q} x {self.keys}, head dim {dims}, {self.dtype}{mask}"


def dense(case: Case) -> Case:
    """The case without a mask."""
    return replace(case, window=None, kept=None, causal=False)


def resized(case: Case, tokens: int) -> Case:
    """The case with another number of tokens, of keys in decoding, and about as many tokens over all batch entries."""
    if case.n_q == 1:
        return replace(case, n_k=tokens)
    return replace(case, n_q=tokens, n_k=None, batch=max(1, case.batch * case.n_q // tokens) if case.batch > 1 else 1)


def dense_flops(case: Case, direction: Direction) -> float:
    """FLOPs of the case without a mask."""
    pairs = case.batch * case.heads * case.n_q * case.keys
    return 2.0 * pairs * (case.head_dim + case.columns) * (1 if direction == "forward" else 2.5)


def directions(case: Case) -> tuple[Direction, ...]:
    """The passes that are timed: decoding, a single query, has no backward pass."""
    return ("forward",) if case.n_q == 1 else DIRECTIONS


# --- suites -----------------------------------------------------------------------------------------------------------

LENGTHS = (512, 2048, 8192)


def _grid(dtype: str, lengths: Sequence[int]) -> list[Case]:
    return [Case(n, d, dtype=dtype, causal=causal) for n in lengths for d in (64, 128) for causal in (False, True)]


SUITES: dict[str, list[Case]] = {
    "float32": _grid("float32", LENGTHS),
    "bfloat16": _grid("bfloat16", LENGTHS),
    "float16": _grid("float16", LENGTHS[:2]),
    "float64": _grid("float64", LENGTHS[:2]),
    "masks": [Case(8192, causal=True, window=512), Case(8192, kept=0.25)],
    "decode": [
        Case(1, 128, heads=32, heads_kv=8, n_k=32768, dtype=dtype) for dtype in ("float32", "bfloat16")
    ],
    "small": [Case(n) for n in (16, 64, 128)],
    "shapes": [
        Case(n, d, dtype=dtype, causal=causal)
        for dtype in ("float32", "bfloat16")
        for n, d, causal in ((777, 64, False), (1536, 96, False), (3000, 128, True), (384, 80, False), (384, 80, True))
    ],
}  # fmt: skip
"""The suites on a CPU, by name."""

QUICK = [case for case in SUITES["float32"] if case.n_q <= 2048 and case.head_dim == 64]

CUDA_SUITES: dict[str, list[Case]] = {
    **{
        dtype: [
            Case(n, d, 2048 // d, dtype, causal, batch=16384 // n)
            for d in dims for causal in (False, True) for n in lengths
        ]
        for dtype, dims, lengths in (
            ("bfloat16", (64, 128, 256), (1024, 4096, 16384)),
            ("float16", (64, 128), (1024,)),
            ("float32", (64, 128), (1024, 4096)),
        )
    },
    "decode": [
        Case(1, 128, 32, "bfloat16", heads_kv=8, n_k=n_k, batch=batch)
        for batch, n_k in ((1, 32768), (16, 32768), (1, 131072))
    ],
    "masks": [
        *(Case(16384, 128, 16, "bfloat16", kept=kept) for kept in (0.5, 0.25, 0.1)),
        Case(16384, 128, 16, "bfloat16", window=1024),
    ],
    "shapes": [
        Case(128, 64, 12, "bfloat16", batch=256),                    # BERT
        Case(197, 64, 12, "bfloat16", batch=64),                     # ViT
        Case(4096, 64, 16, "bfloat16", batch=4, n_k=77),             # Stable Diffusion, text
        Case(1024, 40, 8, "bfloat16", batch=8),                      # and image
        Case(512, 64, 16, "bfloat16", batch=32),
        Case(512, 128, 16, "bfloat16", causal=True, batch=32),
        Case(1024, 64, 1, "bfloat16"),
        Case(64, 128, 32, "bfloat16", causal=True, n_k=16384),       # chunked prefill
        Case(4096, 192, 16, "bfloat16", causal=True, head_dim_v=128),
        Case(4096, 192, 16, "bfloat16", head_dim_v=128),
        Case(1000, 96, 16, "bfloat16", batch=16),
        Case(2049, 80, 24, "bfloat16", causal=True, batch=8),
        Case(129, 128, 16, "bfloat16", causal=True, batch=64),
        Case(4096, 128, 2, "bfloat16", causal=True),
        Case(300, 256, 8, "bfloat16", batch=32),
    ],
}  # fmt: skip
"""The suites on a CUDA device: 16,384 tokens in all and heads times head dim of 2048, as in the benchmark of the
FlashAttention-2 paper."""

CUDA_QUICK = [case for case in CUDA_SUITES["bfloat16"] if case.n_q == 4096 and case.head_dim == 128]
