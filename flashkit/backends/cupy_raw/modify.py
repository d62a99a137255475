"""CUDA C++ text of a score and mask modification: what kernels/tiles.cuh calls.

Rendered from the graphs of the spec: the modified score, its slope for the backward pass, whether a pair is visible,
and the state of a tile from bounds of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from ... import expr
from ...expr import Expr
from ...spec import AttentionSpec, Slot

MAX_NDIM = 8
MAX_VALUES = 384
"""64-bit entries: with the rest of the arguments they stay below the 4096 bytes that a launch takes."""

_ELEMENTS = {
    "bool": "unsigned char", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "uint16": "unsigned short", "int32": "int", "uint32": "unsigned", "int64": "long long",
    "uint64": "unsigned long long", "float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float",
    "float64": "double",
}  # fmt: skip

_PAIR = "long long b, long long h, long long row, long long q, long long k, const Params& p"
_CORNERS = (
    "long long b, long long h, long long row0, long long row1, long long q0, long long q1, long long k0, long long k1, "
    "const Params& p"
)


def entries(slot: Slot) -> int:
    """64-bit entries that a value takes among Params::values: the scalar, or the address and strides in elements."""
    return 1 if slot.ndim is None else 1 + slot.ndim


def values_of(spec: AttentionSpec) -> int:
    """Entries that all values of the spec take together."""
    return sum(map(entries, spec.slots))


def unsupported(spec: AttentionSpec) -> str:
    """Why no text can be made for the spec's modification, or nothing."""
    for slot in spec.slots:
        if slot.ndim is not None and str(slot.dtype) not in _ELEMENTS:
            return f"an array of a modification has dtype {slot.dtype}; {', '.join(_ELEMENTS)} fit"
        if (slot.ndim or 0) > MAX_NDIM:
            return f"an array of a modification has {slot.ndim} axes; up to {MAX_NDIM} fit"
    if values_of(spec) > MAX_VALUES:
        return f"the modification's arrays and numbers take {values_of(spec)} entries; up to {MAX_VALUES} fit"
    return ""


def looks_at_ranges(spec: AttentionSpec) -> bool:
    """Whether classifying a tile reads arrays over ranges, which takes time in proportion to the tile."""
    return spec.mask is not None and any(
        node.op in ("load_min", "load_max") for node in expr.walk(expr.classify(spec.mask))
    )


def text(spec: AttentionSpec) -> str:
    """The functions that kernels/tiles.cuh names; without a modification they say what goes without saying."""
    score = expr.S if spec.score is None else spec.score
    mask = expr.TRUE if spec.mask is None else spec.mask
    return "\n".join([
        _function(spec, "fk_float modified_score", f"fk_float s, {_PAIR}", [score]),
        _function(spec, "fk_float score_slope", f"fk_float s, {_PAIR}", [expr.derivative(score)]),
        _function(spec, "bool visible", _PAIR, [mask]),
        _function(spec, "int classify", _CORNERS, list(expr.classify(mask)), "{0} ? EMPTY : {1} ? FULL : PARTIAL"),
    ])  # fmt: skip


def _function(spec: AttentionSpec, name: str, parameters: str, graphs: Sequence[Expr], result: str = "{0}") -> str:
    used = {node.value for node in expr.walk(graphs) if node.op == "param" or node.op.startswith("load")}
    lines, results = expr.render(graphs, "cuda", "    ")
    body = [*_prelude(spec, used), *lines, f"    return {result.format(*results)};"]
    return "\n".join([f"DEVICE {name}({parameters}) {{", *body, "}", ""])


def _prelude(spec: AttentionSpec, used: set[str]) -> list[str]:
    """Lines that bind each param and array that is used to its name."""
    lines, at = [], 0
    for slot in spec.slots:
        value = f"p.values[{at}]"
        if slot.name in used and slot.ndim is None:
            if slot.kind == "int":
                lines.append(f"    const long long {slot.name} = {value};")
            else:
                lines.append(f"    const fk_float {slot.name} = (fk_float)__longlong_as_double({value});")
        elif slot.name in used:
            element, ndim = _ELEMENTS[str(slot.dtype)], slot.ndim or 0
            strides = [f"p.values[{at + 1 + axis}]" for axis in range(ndim)]
            lines.append(
                f"    const View<{element}, {ndim}> {slot.name}{{(const {element}*){value}, "
                f"{{{', '.join(strides) or '0'}}}}};"
            )
            lines += [f"    const long long {slot.name}_stride{axis} = {s};" for axis, s in enumerate(strides)]
        at += entries(slot)
    return lines
