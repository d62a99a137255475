"""flashkit: exact attention for NumPy and CuPy arrays, forward and backward, in linear memory, without PyTorch.

    out = flashkit.attention(q, k, v, causal=True)
    out, vjp = flashkit.attention_vjp(q, k, v);  dq, dk, dv = vjp(dout)

Importing this package imports NumPy and nothing heavier. Compilers and frameworks are imported by the first call that
needs them.
"""

from __future__ import annotations

from . import mods
from .api import attention, attention_jvp, attention_vjp, explain, plan
from .cache.kv_cache import KVCache
from .call.merge import merge
from .call.planned import Planned
from .call.quantized import Quantized, quantize
from .call.weights import plot_weights, weights
from .dispatch import use_backend
from .errors import OutOfPagesError, ProfileError, UnsupportedError
from .latent import mla
from .mods.block_mask import BlockMask
from .mods.expr.functions import *
from .rope.apply import rotary, rotary_vjp
from .rope.tables import rotary_table

__version__ = "0.1.0"

__all__ = [
    "BlockMask", "KVCache", "OutOfPagesError", "Planned", "ProfileError", "Quantized", "UnsupportedError",
    "__version__", "attention", "attention_jvp", "attention_vjp", "clip", "cos", "erf", "exp", "exp2", "explain",
    "floor", "log", "log2", "maximum", "merge", "minimum", "mla", "mods", "plan", "plot_weights", "quantize",
    "rotary", "rotary_table", "rotary_vjp", "sigmoid", "sign", "sin", "sqrt", "tanh", "to_int", "use_backend",
    "weights", "where",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
