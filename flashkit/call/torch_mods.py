"""`Mods`: modifications and a block mask as text and tensors, which operators and compilers can take."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ..errors import shown
from ..mods import Mod, ModKind
from ..mods.block_mask import BlockMask
from ..mods.expr import Expr
from ..mods.expr.graph import from_rows
from ..mods.tracing import check_traced
from . import interop
from .compose import is_checked_once
from .torch_tracing import from_block_mask, trace

Parts = dict[str, Any]
"""The arguments score_mod, mask_mod and block_mask of a call. Values of mods may be tensors."""

Content = tuple[str, tuple[Any, ...]]
"""What parts are, as canonical text, and the tensors that the text names in its order."""


NO_GRADIENT = "{} of a mask_mod requires grad, and has no gradient: pass its detach()"


class Mods:
    """Modifications and a block mask of calls, for functions that `torch.compile` compiles.

    Operators cannot take functions, and tracing a function is nothing that a compiler can record. So make this object
    once, outside of what is compiled, and pass it as `mods`. Operators get it as text and tensors, so it can be copied,
    pickled and exported; tensors that the functions use are read at each call.

    Parameters
    ----------
    score_mod, mask_mod
        As for `flashkit.attention`. So are functions of `flex_attention`, with PyTorch's operations and
        indexed tensors.
    block_mask
        A flashkit.BlockMask, or one of torch.nn.attention.flex_attention, whose mask_mod is traced.

    Examples
    --------
    >>> import torch
    >>> from flashkit.torch import Mods, attention
    >>> near = Mods(mask_mod=lambda b, h, q, k: abs(q - k) <= 8)
    >>> q = torch.ones(1, 2, 32, 16)
    >>> attention(q, q, q, mods=near).shape
    torch.Size([1, 2, 32, 16])
    """

    _parts: Parts
    _content: Content | None

    def __init__(
        self, *, score_mod: Mod | Callable[..., Any] | None = None, mask_mod: Mod | Callable[..., Any] | None = None,
        block_mask: Any = None,
    ) -> None:  # fmt: skip
        self._parts = _traced(score_mod, mask_mod, block_mask)
        self._content = _described(self._parts)

    @classmethod
    def of_call(cls, score_mod: Any, mask_mod: Any, block_mask: Any) -> Mods:
        """Those of one call, whose content is made only if an operator needs it."""
        made = cls.__new__(cls)
        made._parts, made._content = _traced(score_mod, mask_mod, block_mask), None
        return made

    @classmethod
    def of_content(cls, text: str, tensors: Iterable[Any]) -> Mods:
        """The modifications with this content; ValueError if it is none that `content` gives."""
        made = cls.__new__(cls)
        made._content = text, tuple(tensors)
        made._parts = _from_content(*made._content)
        return made

    def __reduce__(self) -> Any:
        return Mods.of_content, self.content

    @property
    def content(self) -> Content:
        """Text and tensors, equal for equal modifications."""
        if self._content is None:
            self._content = _described(self._parts)
        return self._content

    def detached(self) -> Mods:
        """The same of tensors without marks of autograd and of transforms."""
        text, tensors = self.content
        return Mods.of_content(text, (x.detach() for x in tensors))

    @property
    def captured(self) -> dict[str, Any]:
        """The tensors that the functions use, as they are, by names as of `value_names`."""
        parts = [part for part in self._parts.values() if isinstance(part, Mod)]
        named = {f"{part.kind}.{name}": x for part in parts for name, x in _named(part)}
        return {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}

    @property
    def form(self) -> Any:
        """All but the captured tensors, equal for modifications that share plans; None where a plan depends on what is
        in these tensors.
        """
        found = []
        for name, part in self._parts.items():
            if not (isinstance(part, Mod) and is_checked_once(part)):
                return None
            if not all(isinstance(x, torch.Tensor) for x in part.arrays.values()):
                return None
            if any(isinstance(x, torch.Tensor) for x in part.params.values()):
                return None
            found.append((name, part.expr, *((key, type(x), x) for key, x in part.params.items())))
        return tuple(found)

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor that a function uses requires grad."""
        return any(x.requires_grad for x in (self.captured.values() if self._content is None else self._content[1]))

    def check_differentiable(self) -> None:
        """Refuse tensors of a mask that require grad: none has a gradient by them."""
        for name, x in self.captured.items():
            if name.startswith("mask.") and x.requires_grad:
                raise NotImplementedError(NO_GRADIENT.format(name.partition(".")[2]))

    def options(self) -> Parts:
        """The arguments of `flashkit.attention`, with today's values of the tensors."""
        return {name: _native(part) if isinstance(part, Mod) else part for name, part in self._parts.items()}


def _traced(score_mod: Any, mask_mod: Any, block_mask: Any) -> Parts:
    parts: Parts = {}
    if score_mod is not None:
        parts["score_mod"] = trace(score_mod, "score")
    if mask_mod is not None:
        parts["mask_mod"] = trace(mask_mod, "mask")
    if isinstance(block_mask, BlockMask):
        parts["block_mask"] = block_mask
    elif block_mask is not None:
        inner = from_block_mask(block_mask)
        parts["mask_mod"] = parts["mask_mod"] & inner if "mask_mod" in parts else inner
    return parts


def _native(mod: Mod) -> Mod:
    """The modification with numbers, and arrays of NumPy or CuPy, in place of tensors."""
    params = {name: _number(x.item()) if isinstance(x, torch.Tensor) else x for name, x in mod.params.items()}
    arrays = {name: interop.native(f"{name} of a {mod.kind} mod", x) for name, x in mod.arrays.items()}
    return Mod(mod.kind, mod.expr, params, arrays)


def _number(x: float) -> float:
    return int(x) if isinstance(x, bool) else x


def _named(mod: Mod) -> list[tuple[str, Any]]:
    """Its tensors and arrays with their names, in the order of its text."""
    return [*((name, x) for name, x in mod.params.items() if isinstance(x, torch.Tensor)), *mod.arrays.items()]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def value_names(text: str | None) -> list[str]:
    """Names of the tensors of a text, in its order: "score.NAME" or "mask.NAME", as of `Vjp.__call__`."""
    return [
        f"{'score' if part == 'score_mod' else 'mask'}.{name}"
        for part, _, params, arrays, *_ in _parsed(text or "{}")
        for name in (*(name for name, x in params.items() if x is None), *arrays)
    ]


# --- content ----------------------------------------------------------------------------------------------------------

_block_masks: weakref.WeakValueDictionary[str, BlockMask] = weakref.WeakValueDictionary()
"""Block masks by a digest of their content: a call finds the plan of a block mask by its identity."""

_recent: deque[BlockMask] = deque(maxlen=32)
"""Block masks made of content, which nothing else may hold."""


def _described(parts: Parts) -> Content:
    texts: dict[str, Any] = {}
    tensors: list[Any] = []
    for name, part in parts.items():
        mod = part.mod if isinstance(part, BlockMask) else part
        texts[name], values = _text(mod), [_tensor(x) for _, x in _named(mod)]
        if isinstance(part, BlockMask):
            texts[name]["sizes"] = sizes = _sizes(part)
            texts[name]["digest"] = digest = _digest(mod, sizes)
            _block_masks.setdefault(digest, part)
        tensors += values
    return json.dumps(texts, separators=(",", ":")), tuple(tensors)


def _text(mod: Mod) -> dict[str, Any]:
    params = {name: None if isinstance(x, torch.Tensor) else x for name, x in mod.params.items()}
    return {"graph": mod.expr.__reduce__()[1][0], "params": params, "arrays": list(mod.arrays)}


def _sizes(mask: BlockMask) -> list[int]:
    return [mask.n_q, mask.n_k, mask.block_q, mask.block_k, mask.batch, mask.heads]


def _digest(mod: Mod, sizes: list[int]) -> str:
    made = hashlib.sha256(json.dumps([_text(mod), sizes]).encode())
    for array in mod.arrays.values():
        host = np.ascontiguousarray(array.get() if hasattr(array, "get") else array)
        made.update(f"{host.dtype} {host.shape} ".encode())
        made.update(host.tobytes())
    return made.hexdigest()


def _tensor(array: Any) -> Any:
    """An array as a tensor of the same memory where PyTorch can have one, and of a copy otherwise."""
    if isinstance(array, np.ndarray):
        if not array.dtype.isnative or not array.flags.writeable or any(n < 0 for n in array.strides):
            array = array.astype(array.dtype.newbyteorder("="), order="C")
        return interop.TORCH.own(array, None)
    return array if isinstance(array, torch.Tensor) else interop.TORCH.own(array, None)


def _from_content(text: str, tensors: tuple[Any, ...]) -> Parts:
    parsed = _parsed(text)
    wanted = sum(sum(x is None for x in params.values()) + len(arrays) for _, _, params, arrays, *_ in parsed)
    if wanted != len(tensors):
        raise ValueError(f"modifications: expected {wanted} tensors, got {len(tensors)}")
    parts: Parts = {}
    rest = iter(tensors)
    for name, graph, params, arrays, sizes, digest in parsed:
        kind: ModKind = "score" if name == "score_mod" else "mask"
        own = {key: next(rest) if x is None else x for key, x in params.items()}
        mod = Mod(kind, graph, own, {key: next(rest) for key in arrays})
        parts[name] = mod if sizes is None else _block_mask(mod, sizes, digest)
    return parts


def _block_mask(mod: Mod, sizes: list[int], digest: str) -> BlockMask:
    known = _block_masks.get(digest)
    if known is None:
        mod = _native(mod)
        if _digest(mod, sizes) != digest:
            raise ValueError("a block mask: the tensors are not those that it was made with")
        known = _block_masks.setdefault(digest, BlockMask(mod, *sizes))
        _recent.append(known)
    return known


@lru_cache(maxsize=256)
def _parsed(text: str) -> tuple[tuple[str, Expr, Mapping[str, Any], list[str], list[int] | None, str], ...]:
    """(argument, graph, params, names of arrays, sizes of a block mask, its digest) for each part."""
    try:
        parts = []
        for name, part in json.loads(text).items():
            if name not in ("score_mod", "mask_mod", "block_mask"):
                raise ValueError(f"no argument {shown(name)}")
            graph = from_rows(tuple((op, tuple(at), value, kind) for op, at, value, kind in part["graph"]))
            check_traced(graph, "score" if name == "score_mod" else "mask")
            sizes = part["sizes"] if name == "block_mask" else None
            parts.append((name, graph, part["params"], part["arrays"], sizes, part.get("digest", "")))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"no text of modifications: {error}") from error
    return tuple(parts)
