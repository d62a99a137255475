"""flashkit in Hugging Face transformers: attention and masks under the name `fkit`.

    import flashkit.transformers
    flashkit.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="fkit")

A model of transformers makes its mask once a forward pass, and every layer gets it. Here the mask is kept as its rule
(`PositionMask`): causal masks, windows and padding become options of `flashkit.torch.attention`, other rules are traced
to a modification, and nothing of size Nq x Nk is stored unless a rule cannot be traced or the model asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from .call import torch_tracing
from .errors import shown
from .options import OPTIONS, ours
from .torch import Mods, attention

__all__ = ["PositionMask", "attention_forward", "mask", "register"]


def register(name: str = "fkit") -> None:
    """Make flashkit an attention implementation of transformers.

    Parameters
    ----------
    name
        For `attn_implementation=` of from_pretrained and `model.set_attn_implementation`. Names with "flash" in them
        are taken by transformers, which looks for a package of that name then.

    Returns
    -------
    None

    Raises
    ------
    ValueError
        The name has "flash" in it, or is empty.

    Examples
    --------
    >>> import flashkit.transformers
    >>> flashkit.transformers.register()
    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    ...                      num_attention_heads=2, attn_implementation="fkit")
    >>> LlamaModel(config).config._attn_implementation
    'fkit'
    """
    if not isinstance(name, str) or not name or "flash" in name.lower():
        raise ValueError(f'name: expected a name without "flash", such as "fkit", got {shown(name)}')
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, mask)


class PositionMask:
    """A mask of transformers, bool (B, 1, Nq, Nk), as its rule. Any operation of PyTorch on it makes the dense mask.

    Attributes
    ----------
    shape : torch.Size
        (B, 1, Nq, Nk).
    options : dict
        What `flashkit.torch.attention` gets instead of the mask.

    Examples
    --------
    >>> from flashkit.transformers import mask
    >>> rule = mask(batch_size=1, q_length=3, kv_length=3)
    >>> rule.options
    {'causal': True, 'q_offset': 0}
    >>> rule[0, 0]
    tensor([[ True, False, False],
            [ True,  True, False],
            [ True,  True,  True]])
    """

    def __init__(self, shape: tuple[int, ...], options: dict[str, Any], make: Callable[[], Any]) -> None:
        self.shape, self.options, self._make = torch.Size(shape), options, make

    @cached_property
    def dense(self) -> Any:
        """The mask as a tensor."""
        return self._make()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_dense(args), **_dense(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.dense, name)

    def __getitem__(self, index: Any) -> Any:
        return self.dense[index]

    def __repr__(self) -> str:
        return f"<PositionMask of shape {tuple(self.shape)}: {', '.join(self.options) or 'all'}>"


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "rand", "or", "ror", "eq", "ne", "invert"):

    def _operation(self: PositionMask, *other: Any, name: str = f"__{_name}__") -> Any:
        return getattr(self.dense, name)(*_dense(other))

    setattr(PositionMask, f"__{_name}__", _operation)
PositionMask.__hash__ = object.__hash__  # type: ignore[method-assign]


def _dense(x: Any) -> Any:
    """The same with dense masks in place of rules, inside of lists, tuples and dicts too."""
    if isinstance(x, PositionMask):
        return x.dense
    if isinstance(x, (list, tuple)):
        return type(x)(map(_dense, x))
    return {name: _dense(each) for name, each in x.items()} if isinstance(x, dict) else x


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function, attention_mask: Any = None,
    local_size: int | None = None, allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False, device: Any = "cpu", **others: Any,
) -> Any:  # fmt: skip
    """The mask function of transformers' AttentionMaskInterface.

    Parameters
    ----------
    batch_size, q_length, kv_length
        Sizes of the mask.
    q_offset, kv_offset
        Positions of the first query and the first key; those of static caches are tensors.
    mask_function
        `mask_function(batch, head, q_position, kv_position) -> bool`, of tensors.
    attention_mask
        (B, tokens so far): False where a token is padding.
    local_size
        Size of the window or chunk, if there is one.
    allow_is_causal_skip, allow_is_bidirectional_skip
        Whether a mask may be left out that the layer's own `is_causal` replaces.
    use_vmap
        Whether the rule is only defined for one pair at a time.
    device, **others
        Of the dense mask.

    Returns
    -------
    PositionMask, torch.Tensor or None
        A tensor in compiled and exported models, None where all is visible.

    Examples
    --------
    >>> import torch
    >>> from flashkit.transformers import mask
    >>> padded = mask(batch_size=1, q_length=3, kv_length=3, attention_mask=torch.tensor([[False, True, True]]))
    >>> list(padded.options)
    ['causal', 'q_offset', 'mask']
    """
    if isinstance(attention_mask, PositionMask):
        return attention_mask  # generate() has prepared it

    def make(skip_causal: bool = False, skip_bidirectional: bool = False) -> Any:
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=skip_causal, allow_is_bidirectional_skip=skip_bidirectional, use_vmap=use_vmap,
            device=device, **others,
        )  # fmt: skip

    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return make(allow_is_causal_skip, allow_is_bidirectional_skip)
    start, end = int(q_offset) - kv_offset, int(q_offset) - kv_offset + q_length
    rule = _options_of(mask_function, local_size, start, kv_offset)
    if rule is None:
        return make()
    seen = min(end, kv_length) if rule.get("causal") else kv_length
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(device=device, dtype=torch.bool)
        if not padding[:, :seen].all():
            rule["mask"] = padding[:, None, None, :]
    if not rule or (q_length == 1 and list(rule) == ["causal", "q_offset"] and seen == kv_length):
        # Nothing is hidden. A causal layer with several queries would take None for its own mask.
        return None if allow_is_bidirectional_skip or q_length == 1 else PositionMask(
            (batch_size, 1, q_length, kv_length), {}, make
        )  # fmt: skip
    return PositionMask((batch_size, 1, q_length, kv_length), rule, make)


def _options_of(
    function: Callable[..., Any], local_size: int | None, start: int, kv_offset: int
) -> dict[str, Any] | None:
    """A rule as options of attention(), from position `start` on; None if it cannot be traced."""
    if function is masking_utils.causal_mask_function:
        return {"causal": True, "q_offset": start}
    if function is masking_utils.bidirectional_mask_function:
        return {}

    def shifted(function: Callable[..., Any]) -> Any:
        return torch_tracing.trace_torch(lambda b, h, q, k: function(b, h, q + kv_offset, k + kv_offset), "mask")

    try:
        traced = shifted(function)
    except TypeError:
        return None
    if local_size is not None:
        if traced.key == shifted(masking_utils.sliding_window_causal_mask_function(local_size)).key:
            return {"causal": True, "q_offset": start, "window": (local_size - 1, None)}
        if traced.key == shifted(masking_utils.sliding_window_bidirectional_mask_function(local_size)).key:
            return {"q_offset": start, "window": (local_size, local_size)}
    return {"q_offset": start, "mods": Mods(mask_mod=traced)}


def attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, dropout: float = 0.0,
    is_causal: bool | None = None, position_bias: Any = None, s_aux: Any = None, **others: Any,
) -> tuple[Any, None]:  # fmt: skip
    """The attention function of transformers' AttentionInterface.

    Parameters
    ----------
    module
        The layer; `module.is_causal` says what no mask means.
    query, key, value
        (B, Hq, Nq, D), (B, Hkv, Nk, D) and (B, Hkv, Nk, Dv).
    attention_mask
        PositionMask, tensor or None.
    dropout
        As dropout_p of `flashkit.attention`.
    is_causal
        In place of `module.is_causal`.
    position_bias
        Added to the scores (T5).
    s_aux
        Sinks (gpt-oss).
    **others
        Options of `flashkit.attention` that do not depend on positions, by any library's names, such as `scaling`; and
        what masks have taken into account already, such as `sliding_window`.

    Returns
    -------
    out : torch.Tensor
        (B, Nq, Hq, Dv).
    weights : None
        They are not computed.

    Raises
    ------
    ValueError
        Weights or a paged cache are asked for.

    Examples
    --------
    >>> import torch
    >>> from flashkit.transformers import attention_forward
    >>> q = torch.randn(1, 2, 5, 8)
    >>> attention_forward(torch.nn.Module(), q, q, q, None)[0].shape
    torch.Size([1, 5, 2, 8])
    """
    if others.get("output_attentions"):
        raise ValueError('output_attentions: fkit does not store the weights; attn_implementation="eager" returns them')
    if others.get("cache") is not None:
        raise ValueError("cache: fkit has no continuous batching; call generate() without it")
    options: dict[str, Any] = {}
    n_q, n_k = query.shape[2], key.shape[2]
    if isinstance(attention_mask, PositionMask):
        same_size = attention_mask.shape[2:] == (n_q, n_k)
        # The gradient of a bias knows options, and no modifications.
        if same_size and not (position_bias is not None and "mods" in attention_mask.options):
            options = dict(attention_mask.options)
            if n_q == 1 and options.get("causal") and "window" not in options and "mask" not in options:
                # The last keys of a static cache, which are not written yet, are left out.
                seen = options["q_offset"] + 1
                key, value, options = key[:, :, :seen], value[:, :, :seen], {}
        else:
            options = {"mask": attention_mask.dense[..., :n_k]}
    elif attention_mask is not None:
        options = {"mask": attention_mask[..., :n_k]}
    elif n_q > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        options = {"causal": True, "q_offset": 0}
    if position_bias is not None:
        options["bias"] = position_bias[..., : key.shape[2]]
    constants = {name: x for name, x in ours(others).items() if not OPTIONS[name].by_position}
    out = attention(query, key, value, dropout_p=dropout, sinks=s_aux, **constants, **options)
    return out.transpose(1, 2).contiguous(), None
