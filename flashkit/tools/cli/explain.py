"""`flashkit explain`: what a call would do, described by options instead of arrays."""

from __future__ import annotations

import inspect
import math
import re
from typing import Annotated, Any

import numpy as np
import typer

from ... import api
from ...call.shape import HEADS_AND_TOKENS, LAYOUTS
from ...call.views import cupy_for
from ...options import OPTIONS, TYPES, with_axes
from ...spec import DTYPES, dtype_of
from ..doctor.text import wrapped
from .common import Json, fail, numbers, print_json, warnings_on_stderr

ARRAYS = ("numpy", "cupy")


def _with_flags(command: Any) -> Any:
    """The command with the options of `attention` that have a flag, between its own --layout and --backend."""
    own = inspect.signature(command, eval_str=True)
    parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    at = [p.name for p in parameters].index("backend")
    parameters[at:at] = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False if hint is bool else option.default,
            annotation=Annotated[hint, typer.Option(option.flag[0], help=option.flag[1])],
        )
        for name, option in OPTIONS.items() if option.flag for hint in [_hint(name)]
    ]  # fmt: skip
    command.__signature__ = own.replace(parameters=parameters)
    return command


def _hint(name: str) -> Any:
    """The type of an option on the command line: arrays other than integers are there or not."""
    if OPTIONS[name].axes:
        return int | None if OPTIONS[name].is_integers else bool
    return TYPES[name] if TYPES[name] in (bool, float, float | None) else str | None


@_with_flags
def explain(
    shape: Annotated[str, typer.Option(help="Of q: batch, heads, queries, head dim (or fewer axes).")] = "1,8,2048,64",
    keys: Annotated[int | None, typer.Option(help="Number of keys (default: as many as queries).", min=0)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of k and v (default: as many as q).", min=1)] = None,
    value_dim: Annotated[int | None, typer.Option(help="Head dim of v and out (default: as q).", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="float64, float32, float16 or bfloat16.")] = "float32",
    array: Annotated[str, typer.Option(help="numpy or cupy.")] = "numpy",
    layout: Annotated[str, typer.Option(help="bhnd or bnhd, the order of the axes in --shape.")] = "bhnd",
    backend: Annotated[str | None, typer.Option(help="Only this backend.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Time both passes, on random NumPy arrays.")] = False,
    as_json: Json = False,
    **flags: Any,
) -> None:
    """What would run a call, why, and a lower bound of its time.

    The answer of each backend, the tile, and the row of the profile that chose it.

    Example: flashkit explain --shape 4,32,1,128 --kv-heads 8 --keys 16384 --dtype bfloat16
    """
    choices = ("--dtype", dtype, (*DTYPES,)), ("--array", array, ARRAYS), ("--layout", layout, LAYOUTS)
    for name, value, known in choices:
        if value not in known:
            expected = f"{', '.join(known[:-1])} or {known[-1]}"
            raise typer.BadParameter(f"got {value!r}, expected {expected}", param_hint=name)
    q_shape, k_shape, v_shape = _shapes(shape, keys, kv_heads, value_dim, layout)
    given = {name: x for name, x in flags.items() if x is not None and x is not False}
    options: dict[str, Any] = {"layout": layout, **given}
    if "window" in given:
        options["window"] = tuple(numbers(given["window"], "--window", count=2))
    if given["dropout_p"]:
        options["seed"] = 0
    if backend is not None:
        options["backend"] = backend

    try:
        if measure:
            q, k, v = (_random(each, dtype, array) for each in (q_shape, k_shape, v_shape))
        else:
            q, k, v = (_stand_in(each, dtype, array) for each in (q_shape, k_shape, v_shape))
        of_heads, of_pairs = _broad_shapes(q_shape, k_shape, layout)
        for name in given.keys() & with_axes("heads", "pairs"):
            of_array = of_heads if OPTIONS[name].axes == "heads" else of_pairs
            options[name] = _stand_in(of_array, "bool" if name == "mask" else "float32", array)
        with warnings_on_stderr():
            explanation = api.explain(q, k, v, measure=measure, **options)
    except (ImportError, TypeError, ValueError, NotImplementedError, OverflowError) as error:
        raise fail(error) from None
    if as_json:
        print_json(explanation.as_dict())
    else:
        for line in str(explanation).splitlines():
            label, value = re.fullmatch(r"(\s+(?:-> )?\S+\s{2,})?(.*)", line).groups("")  # type: ignore[union-attr]
            print("\n".join(wrapped(label, value)))
    if explanation.backend is None:
        raise fail("no backend can compute this call; the reasons are above")


def _broad_shapes(q: tuple[int, ...], k: tuple[int, ...], layout: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of numbers for each head, and for each pair."""
    head_axis, row_axis = HEADS_AND_TOKENS[layout]
    heads = q[head_axis] if len(q) > 2 else 1
    batch = q[:-2] if layout == "bhnd" else (q[0], heads)
    return (heads,), (*batch, q[row_axis], k[row_axis])


def _shapes(
    shape: str, keys: int | None, kv_heads: int | None, value_dim: int | None, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The shapes of q, k and v."""
    q = tuple(int(n) for n in numbers(shape, "--shape") if n is not None)
    if not 2 <= len(q) <= 4:
        raise typer.BadParameter(f"got {len(q)} axes, expected 2 to 4", param_hint="--shape")
    if layout == "bnhd" and len(q) != 4:
        raise typer.BadParameter("bnhd has four axes", param_hint="--shape")
    if kv_heads is not None and len(q) < 3:
        raise typer.BadParameter("a shape of two axes has no heads", param_hint="--kv-heads")
    head_axis, row_axis = HEADS_AND_TOKENS[layout]
    k = list(q)
    k[row_axis] = q[row_axis] if keys is None else keys
    if kv_heads is not None:
        k[head_axis] = kv_heads
    return q, tuple(k), (*k[:-1], value_dim or q[-1])


def _stand_in(shape: tuple[int, ...], dtype: str, kind: str) -> Any:
    """An array of this shape that occupies the memory of one element; ValueError if no array is so large."""
    xp: Any = np if kind == "numpy" else cupy_for(f"--array {kind}")
    if math.prod(shape) >= 2**60:
        raise ValueError(f"an array of shape {shape} has more elements than can be addressed")
    return xp.broadcast_to(xp.ones((), dtype_of(dtype)), shape)


def _random(shape: tuple[int, ...], dtype: str, kind: str) -> Any:
    """A normally distributed array of this shape."""
    if kind != "numpy":
        raise ValueError(f"--measure: expected NumPy arrays, got --array {kind}")
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype_of(dtype))
