"""The keyword arguments of attention() as types (PEP 692), and the error for a name that is none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

from ..errors import shown

Layout = Literal["bhnd", "bnhd"]
Precision = Literal["highest", "tf32", "fp8"]


class Options(TypedDict, total=False):
    """The keyword arguments that `attention`, `attention_vjp`, `plan` and `explain` share."""

    scale: float | None
    causal: bool
    q_offset: Any
    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Any
    bias: Any
    mask: Any
    block_mask: Any
    score_mod: Callable[..., Any] | Any
    mask_mod: Callable[..., Any] | Any
    kv_lengths: Any
    q_lengths: Any
    cu_seqlens: Any
    page_table: Any
    dropout_p: float
    seed: int | None
    sinks: Any
    layout: Layout
    deterministic: bool
    precision: Precision | None


_MEANT = {
    "mask": ("attn_mask", "attention_mask"),
    "mask=~key_padding_mask[:, None, None, :]": ("key_padding_mask",),  # PyTorch's is True where a key is ignored
    "causal": ("is_causal",),
    "bias": ("attn_bias",),
    "scale": ("softmax_scale", "sm_scale"),
    "window": ("window_size", "local_window_size", "sliding_window"),
    "softcap": ("soft_cap", "logits_soft_cap", "attn_logits_soft_cap"),
    "dropout_p": ("dropout", "dropout_rate"),
    "seed": ("generator", "rng", "dropout_rng"),
    "layout": ("tensor_layout", "qkv_layout", "qkv_format"),
    "kv_lengths": ("cache_seqlens", "seqused_k", "kv_seqlens", "key_value_seq_lengths", "seqlens_k"),
    "q_lengths": ("seqused_q", "query_seq_lengths", "seqlens_q"),
    "cu_seqlens=(of q, of k)": ("cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens_q", "cu_seqlens_kv"),
    "page_table": ("block_table", "block_tables", "page_indices"),
    "nothing: no longest sequence is needed": ("max_seqlen", "max_seqlen_q", "max_seqlen_k"),
    "sinks": ("s_aux", "attention_sinks"),
    "return_lse": ("return_softmax_lse", "return_residual"),
    "flashkit.weights(q, k, ...)": ("need_weights", "return_attn_probs", "return_weights"),
    "alibi_slopes": ("alibi", "slopes"),
    "nothing: grouped heads are recognised by their number": ("enable_gqa",),
}
"""What to write for an argument of PyTorch, JAX, FlashAttention, xFormers or cuDNN."""


def unknown(names: object) -> TypeError:
    """The error for keyword arguments that do not exist: it says which was probably meant.

    Examples
    --------
    >>> from flashkit.call import options
    >>> print(options.unknown(["is_causal"]))
    attention has no argument 'is_causal'; did you mean causal?
    """
    import difflib  # only for errors

    name = str(next(iter(names)))  # type: ignore[call-overload]
    known = [*Options.__annotations__, "out", "return_lse", "backend"]
    meant = next((ours for ours, theirs in _MEANT.items() if name.lower() in theirs), None)
    meant = meant or next(iter(difflib.get_close_matches(name.lower(), known, 1)), None)
    hint = f"did you mean {meant}?" if meant else f"{', '.join(known)} fit"
    return TypeError(f"attention has no argument {shown(name)}; {hint}")
