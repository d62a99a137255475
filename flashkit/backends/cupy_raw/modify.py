"""CUDA C++ text of a score and mask modification: the functions that kernels/common/tiles.cuh names.

Rendered from the graphs of the spec: the modified score, its slope for the backward pass, whether a pair is visible,
and the state of a tile from bounds of the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...mods import codegen, expr
from ...mods.expr import Expr
from ...spec import AttentionSpec
from ..cuda_common.affine_score import AffineScore, affine_score, in_distance, of_head
from ..cuda_common.modification import dense_mask, places_of, shifts, slope_is_one, sums_of, way_of_adding

_ELEMENTS = {
    "bool": "unsigned char", "int8": "signed char", "uint8": "unsigned char", "int16": "short",
    "uint16": "unsigned short", "int32": "int", "uint32": "unsigned", "int64": "long long",
    "uint64": "unsigned long long", "float16": "half_t", "bfloat16": "bfloat16_t", "float32": "float",
    "float64": "double",
}  # fmt: skip

_SCORE = "fk_float s, I b, I h, I row, I q, I k, I distance, const Params& p"
_HEAD = "long long b, long long h, const Params& p"
_ROW = "long long b, long long h, I row, I q, const Head& head"
_PAIR = "long long b, long long h, long long row, long long q, long long k, const Params& p"
_OF_PAIR = "I b, I h, I row, I q, I k, const Params& p"
_ARGUMENTS = "b, h, row, q, k, p"
_CORNERS = (
    "long long b, long long h, long long row0, long long row1, long long q0, long long q1, long long k0, long long k1, "
    "const Params& p"
)

STATE = "{0} ? EMPTY : {1} ? FULL : PARTIAL"
"""The state of a tile from what `spec.tile_state` says of it."""


def text(spec: AttentionSpec) -> str:
    """The functions that kernels/common/tiles.cuh names; without a modification they are the identity and TRUE.

    The parts of an affine score modification (cuda_common/affine_score.py) are functions of their own; a `Head` holds
    what they read from arrays once for a head. `I` is the type of the integers in a score modification, which
    `modification.positions` chooses.
    """
    score = expr.S if spec.score is None else spec.score
    mask = expr.TRUE if spec.mask is None else spec.mask
    dense, element = dense_mask(spec), expr.symbol("shown", "bool")
    (shown,) = expr.substitute([mask], lambda node: element if dense and node is dense.load else node)
    affine = affine_score(score)
    parts = affine or AffineScore()
    facts = {
        "IS_AFFINE": affine is not None, "CAPPED": parts.capped, "SLOPED": parts.sloped, "EVEN": parts.even,
        "BIASED": parts.biased, "DIAGONAL": parts.diagonal, "UNIT_SLOPE": parts.unit_slope, "PER_HEAD": parts.per_head,
        "SHIFTS": shifts(mask),
    }  # fmt: skip
    numbers, (gain, rate, bias, straight) = of_head([parts.gain, parts.rate, parts.bias, parts.straight])
    read = "{{" + ", ".join(f"{{{i}}}" for i in range(len(numbers))) + "}}"
    return "\n".join([
        *_value_sums(spec),
        _template(spec, "fk_float modified_score", _SCORE, [in_distance(score)]),
        f"constexpr bool {', '.join(f'{name} = {int(value)}' for name, value in facts.items())};",
        f"struct Head {{ {f'fk_float number[{len(numbers)}];' if numbers else ''} }};",
        _function(spec, "Head head_of", _HEAD, numbers, read),
        _template(spec, "fk_float score_gain", f"{_ROW}, const Params& p", [gain]),
        _template(spec, "fk_float score_rate", f"{_ROW}, const Params& p", [rate]),
        _template(spec, "fk_float score_bias", f"{_ROW}, I k, const Params& p", [bias]),
        _template(spec, "bool bias_is_straight", f"{_ROW}, I k0, I k1, const Params& p", [straight]),
        _function(spec, "fk_float score_slope", f"fk_float s, {_PAIR}", [expr.derivative(score)]),
        _function(spec, "bool visible", _PAIR, [mask]),
        _function(spec, "bool visible_where", f"bool shown, {_PAIR}", [shown]),
        _function(spec, "int classify", _CORNERS, list(spec.tile_state), STATE),
    ])  # fmt: skip


def _value_sums(spec: AttentionSpec) -> list[str]:
    """`ValueSums` of common/values.cuh: how a thread sums the gradients by values of the modification. enter() is for
    all threads of a warp together, before the pairs of a head, and leave() after the last ones. term(): what a pair
    reads, of READS, and the derivative. FIRST and first_at(): where the first read's address is among Params::values,
    and its offset in elements.
    """
    places = sums_of(spec)
    functions, members, terms, adding, flushing = [], [], [], [], []
    for n, read in enumerate(spec.reads):
        at, slot = places[read.name]
        offset = " + ".join(f"(long long)({{{i}}}) * p.values[{at + 1 + i}]" for i in range(slot.ndim or 0)) or "0"
        functions += [
            _template(spec, f"fk_float value_slope{n}", f"fk_float s, {_OF_PAIR}", [read.slope]),
            _template(spec, f"long long value_at{n}", _OF_PAIR, read.indices, offset),
        ]
        way = way_of_adding(read)
        members.append(f"    {way}<{at}> sum{n};")
        terms.append(
            f"        if (read == {n}) at = value_at{n}<I>({_ARGUMENTS}), slope = value_slope{n}<I>(s, {_ARGUMENTS});"
        )
        adding.append(f"        sum{n}.add(p, value_at{n}<I>({_ARGUMENTS}), ds * value_slope{n}<I>(s, {_ARGUMENTS}));")
        where = ", value_at{n}<long long>(own_b, own_h, 0, 0, 0, p)" if way == "OfHead" else ""
        flushing.append(f"        sum{n}.flush(p{where.format(n=n)});")
    reads_score = any(expr.uses(read.slope, expr.S) for read in spec.reads)
    facts = {
        "HAS_VALUES": bool(spec.sums), "VALUES_READ_SCORE": reads_score, "SLOPE_IS_ONE": slope_is_one(spec),
        "VALUES_BY_DISTANCE": all(read.of_distance() is not None for read in spec.reads),
    }  # fmt: skip
    return [
        f"constexpr bool {', '.join(f'{name} = {int(value)}' for name, value in facts.items())};",
        *functions,
        "struct ValueSums {",
        f"    static constexpr int READS = {len(spec.reads)};",
        f"    static constexpr int FIRST = {places[spec.reads[0].name][0] if spec.reads else 0};",
        f"    static __device__ __forceinline__ long long first_at({_PAIR}) {{",
        f"        return {f'value_at0<long long>({_ARGUMENTS})' if spec.reads else 0};",
        "    }",
        "    template <typename I>",
        "    static __device__ __forceinline__ void term(",
        f"        int read, long long& at, fk_float& slope, fk_float s, {_OF_PAIR}) {{",
        *terms,
        "    }",
        "    int own_b = -1, own_h = -1;",
        *members,
        f"    template <typename I> __device__ __forceinline__ void add(fk_float ds, fk_float s, {_OF_PAIR}) {{",
        *adding,
        "    }",
        f"    __device__ __forceinline__ void enter({_HEAD}) {{",
        "        if (b == own_b && h == own_h) return;",
        "        leave(p);",
        "        own_b = (int)b, own_h = (int)h;",
        "    }",
        "    __device__ __forceinline__ void leave(const Params& p) {",
        "        if (own_b < 0) return;",
        *flushing,
        "    }",
        "};",
    ]


def _template(spec: AttentionSpec, name: str, parameters: str, graphs: Sequence[Expr], result: str = "{0}") -> str:
    """The same function with another type of integers."""
    text = _function(spec, name, parameters, graphs, result)
    return "template <typename I>\n" + text.replace("const long long t", "const I t")


def _function(spec: AttentionSpec, name: str, parameters: str, graphs: Sequence[Expr], result: str = "{0}") -> str:
    used = {node.value for node in expr.walk(graphs) if node.op == "param" or node.op.startswith("load")}
    lines, results = codegen.render(graphs, "cuda", "    ", spec.int32_arrays)
    body = [*_prelude(spec, used), *lines, f"    return {result.format(*results)};"]
    return "\n".join([f"DEVICE {name}({parameters}) {{", *body, "}", ""])


def _prelude(spec: AttentionSpec, used: set[str]) -> list[str]:
    """Lines that bind each param and array that is used to its name."""
    lines = []
    for slot, at in places_of(spec).values():
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
    return lines
