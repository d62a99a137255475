"""Python text of a score and mask modification: the functions that kernels/common/tiles.py names.

Rendered from the graphs of the spec as in cupy_raw: the modified score, its slope for the backward pass, whether a pair
is visible, and the state of a tile from bounds of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...mods import codegen, expr
from ...mods.expr import Expr
from ...spec import AttentionSpec
from ..cuda_common.modification import places_of, sums_of

_STORED = {"bool": "uint8", "float16": "int16", "bfloat16": "int16"}
"""The types that elements of these dtypes are read as; others are read as themselves."""

_WIDENED = {"float16": "half_of({0})", "bfloat16": "single_of(np.int32({0}) << np.int32(16))"}
"""How the bits of an element become a float."""

_CORNERS = "b, h, row0, row1, q0, q1, k0, k1, p"


def text(spec: AttentionSpec) -> str:
    """The functions that kernels/common/tiles.py names; without a modification they are the identity and TRUE."""
    score = expr.S if spec.score is None else spec.score
    mask = expr.TRUE if spec.mask is None else spec.mask
    empty, full = spec.tile_state
    axes = {len(node.args) // 2 for node in expr.walk([empty, full]) if node.op in ("load_min", "load_max")}
    return "\n".join([
        *map(_extreme, sorted(axes)),
        _function(spec, "modified_score", "s, b, h, row, q, k, p", [score], "F({0})"),
        _function(spec, "score_slope", "s, b, h, row, q, k, p", [expr.derivative(score)], "F({0})"),
        _function(spec, "visible", "b, h, row, q, k, p", [mask]),
        _value_sums(spec),
        _function(spec, "classify", _CORNERS, [empty, full], "EMPTY if {0} else FULL if {1} else PARTIAL"),
    ])  # fmt: skip


def _value_sums(spec: AttentionSpec) -> str:
    """`add_values` and `flush_values`: a thread sums neighbours' terms of one element before it adds them to memory."""
    places, functions, adding = sums_of(spec), [], []
    for n, read in enumerate(spec.reads):
        at, slot = places[read.name]
        offset = " + ".join(f"({{{i}}}) * p.values[{at + 1 + i}]" for i in range(slot.ndim or 0)) or "I(0)"
        address = f"p.values[{at}] + ({offset}) * F_ITEMSIZE"
        functions += [
            _function(spec, f"value_slope{n}", "s, b, h, row, q, k, p", [read.slope], "F({0})"),
            _function(spec, f"value_at{n}", "b, h, row, q, k, p", read.indices, address),
        ]
        adding += [
            f"at = value_at{n}(b, h, row, q, k, p)",
            f"if at != last[{n}]:",
            f"    add_number(last[{n}], sums[{n}])",
            f"    last[{n}], sums[{n}] = at, ZERO",
            f"sums[{n}] += ds * value_slope{n}(s, b, h, row, q, k, p)",
        ]
    flushing = [f"add_number(last[{n}], sums[{n}]); last[{n}] = 0" for n in range(len(spec.reads))]
    return "\n".join([
        *functions,
        f"HAS_VALUES, READS = {bool(spec.sums)}, {max(len(spec.reads), 1)}",
        "\n    ".join(["@device\ndef add_values(ds, s, b, h, row, q, k, p, last, sums):", *adding, "return\n"]),
        "\n    ".join(["@device\ndef flush_values(last, sums):", *flushing, "return\n"]),
    ])  # fmt: skip


def _function(spec: AttentionSpec, name: str, parameters: str, graphs: Sequence[Expr], result: str = "{0}") -> str:
    places = places_of(spec)

    def load(node: Expr, index: list[str]) -> str:
        slot, place = places[node.value]
        stored = f"np.{_STORED.get(str(slot.dtype), str(slot.dtype))}"
        strides = [f"p.values[{place + 1 + axis}]" for axis in range(slot.ndim or 0)]
        if node.op != "load":
            of = {"int": str(slot.dtype).replace("uint64", "int64"), "bool": "uint8"}[node.kind]  # uint64 wraps
            is_min = node.op == "load_min"
            limit = np.iinfo(of).min if is_min else np.iinfo(of).max
            least = f"{is_min}, I({limit}), {stored}, p.values[{place}]"
            extreme = f"extreme{len(strides)}({', '.join([least, *strides, *index])})"
            return f"({extreme} != 0)" if node.kind == "bool" else extreme
        offset = " + ".join(f"({i}) * {stride}" for i, stride in zip(index, strides)) or "I(0)"
        element = _WIDENED.get(str(slot.dtype), "{0}").format(f"load({stored}, p.values[{place}], {offset})")
        return {"float": f"F({element})", "int": f"I({element})", "bool": f"({element} != 0)"}[node.kind]

    steps, results = codegen.assignments(graphs, "numba", load, spec.int32_arrays)
    used = {node.value for node in expr.walk(graphs) if node.op == "param"}
    lines = [
        f"{name} = {f'p.values[{place}]' if slot.kind == 'int' else f'F(double_of(p.values[{place}]))'}"
        for name, (slot, place) in places.items()
        if name in used
    ]
    lines += [f"{name} = {text}" for _, name, text in steps] + [f"return {result.format(*results)}"]
    return "\n    ".join([f"@device\ndef {name}({parameters}):", *lines]) + "\n"


def _extreme(axes: int) -> str:
    """Minimum or maximum within a box of inclusive corners, a loop per axis; `limit` of a box over MAX_BOX elements."""
    strides = ", ".join(f"stride{axis}" for axis in range(axes))
    corners = ", ".join(f"first{axis}, last{axis}" for axis in range(axes))
    offset = " + ".join(f"i{axis} * stride{axis}" for axis in range(axes))
    lines = [f"@device\ndef extreme{axes}(least, limit, kind, address, {strides}, {corners}):"]
    elements = " * ".join(f"(last{axis} - first{axis} + 1)" for axis in range(axes))
    lines += [f"    if {elements} > MAX_BOX:\n        return limit"]
    lines += ["    best = I(GREATEST_INTEGER) if least else I(LEAST_INTEGER)"]
    lines += [f"{'    ' * (axis + 1)}for i{axis} in range(first{axis}, last{axis} + 1):" for axis in range(axes)]
    inside = "    " * (axes + 1)
    lines += [
        f"{inside}value = I(load(kind, address, {offset}))",
        f"{inside}best = value if (value < best if least else value > best) else best",
        "    return best",
    ]
    return "\n".join(lines) + "\n"
