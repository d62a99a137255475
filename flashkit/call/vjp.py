"""`Vjp`: the vector-Jacobian product of one call of attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

from ..errors import shown
from ..spec import Gradients
from . import arrays
from .call import Adapter
from .planned import Recorded

WRT = ("q", "k", "v", "sinks")

A = TypeVar("A")
"""The array type of the call."""


class Vjp(Generic[A]):
    """The vector-Jacobian product of one call of attention; see `flashkit.attention_vjp`."""

    def __init__(self, recorded: Recorded, sinks: Any = None, adapters: Sequence[Adapter] = ()) -> None:
        """sinks: the caller's. adapters: of the call, the outermost first."""
        self.problem, self.operands, self.shape, self._run = recorded
        self._sinks_dtype = getattr(sinks, "dtype", None)
        self._adapters = adapters

    def __repr__(self) -> str:
        problem = self.problem
        q, k = self.operands.q.shape, self.operands.k.shape
        return f"<Vjp of attention: q {tuple(q)}, k {tuple(k)} (batch, heads, tokens, dim), {problem.spec.dtype}>"

    def __call__(self, dout: Any, dlse: Any = None, *, wrt: tuple[str, ...] = ("q", "k", "v")) -> tuple[A, ...]:
        """Gradients of sum(out * dout) + sum(lse * dlse).

        Parameters
        ----------
        dout
            Array of out's shape and dtype.
        dlse
            Array of lse's shape and dtype; None is 0.
        wrt
            Inputs to differentiate by: any of "q", "k", "v" and "sinks".

        Returns
        -------
        tuple of array
            One gradient for each name in `wrt`, in this order, of the shape and dtype of the input.

        Raises
        ------
        TypeError, ValueError
            An argument is invalid. The message names it and says what was expected.

        Examples
        --------
        >>> import numpy as np, flashkit
        >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 16, 8), dtype=np.float32)
        >>> sinks = np.zeros(2, np.float32)
        >>> (out, lse), vjp = flashkit.attention_vjp(q, k, v, sinks=sinks, return_lse=True)
        >>> dv, dsinks = vjp(np.ones_like(out), np.ones_like(lse), wrt=("v", "sinks"))
        >>> dv.shape, dsinks.shape
        ((1, 2, 16, 8), (2,))
        """
        known = WRT[: 3 if self.operands.sinks is None else 4]
        if not isinstance(wrt, tuple | list):
            raise TypeError(f"wrt: expected a tuple of {', '.join(map(repr, known))}, got {shown(wrt)}")
        for name in wrt:
            if not isinstance(name, str) or name not in known:
                raise ValueError(f"wrt: expected {', '.join(map(repr, known))}, got {shown(name)}")
        with ExitStack() as scopes:
            for adapter in self._adapters:
                scopes.enter_context(adapter.scope())
                native = adapter.to_native(dout=dout, dlse=dlse)
                dout, dlse = native["dout"], native["dlse"]
            gradients = self.gradients(dout, dlse, tuple(wrt))
            for adapter in reversed(self._adapters):
                gradients = tuple(adapter.from_native(f"d{name}", x) for name, x in zip(wrt, gradients, strict=True))
            return gradients

    def gradients(self, dout: Any, dlse: Any, wrt: tuple[str, ...], empty: Any = None) -> tuple[Any, ...]:
        """The gradients of arrays as backends read them. empty: f(shape, dtype) makes an array; by default that of the
        arrays' library.
        """
        op, shape = self.operands, self.shape
        dtype = op.q.dtype
        dout = self._checked("dout", dout, shape.sizes(op.out.shape), dtype)
        xp: Any = arrays.namespace(self.problem.array_kind)
        if dlse is not None:
            dlse = self._checked("dlse", dlse, shape.sizes_of_rows(op.lse.shape), op.lse.dtype)
            dlse = (dlse if arrays.contiguous(dlse) else dlse.copy()).reshape(op.lse.shape)
        empty = empty or xp.ndarray  # faster than the library's `empty`
        dq, dk, dv = empty(op.q.shape, dtype), empty(op.k.shape, dtype), empty(op.v.shape, dtype)
        dsinks = xp.empty_like(op.sinks) if "sinks" in wrt else None
        self.fill(Gradients(shape.to_four(dout), dlse, dq, dk, dv, dsinks))
        if dsinks is not None and self._sinks_dtype is not None:
            dsinks = dsinks.astype(self._sinks_dtype, copy=False)
        tensors = {"q": dq, "k": dk, "v": dv}
        return tuple([dsinks if name == "sinks" else shape.like(tensors[name]) for name in wrt])

    def fill(self, gradients: Gradients) -> None:
        """Compute these gradients."""
        if self._run is None:
            for tensor in (gradients.dq, gradients.dk, gradients.dv, gradients.dsinks):
                if tensor is not None:
                    tensor[...] = 0
        else:
            self._run(self.operands, gradients)

    def _checked(self, name: str, array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """A view of the array, whose form no other thread changes, checked."""
        array = arrays.own_form(name, array, self.problem.array_kind)
        if array.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, got {array.dtype}")
        if array.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {array.shape}")
        return array
