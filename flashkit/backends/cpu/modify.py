"""Generated functions for one score modification and mask. Kernels call them by address, so a new modification compiles
some lines and no kernel.

    classify    a tile's corners: EMPTY, PARTIAL or FULL
    modify      a tile of scores in place; in the backward pass also the slopes d score / d s
    visit_ds    a tile of dS in place, once per tile of the backward pass: dS *= slope; and before that the gradients by
                values of the modification (`AttentionSpec.reads`)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...mods import codegen, expr
from ...mods.expr import Expr
from ...spec import AttentionSpec, Read, Slot
from . import specialise
from .arguments import EMPTY, FULL, PARTIAL, STRIP
from .objects import Source

MAX_NDIM = 4
TRANSPOSED_SIZES = (1, 4, 8)
TRANSPOSERS = tuple(f"transpose{size}" for size in TRANSPOSED_SIZES)
"""Micro-kernels that transpose elements of these sizes; their addresses follow the slots in VALUES."""
_VIEWS = {0: "vector", 1: "vector", 2: "matrix", 3: "tensor3", 4: "tensor4"}
_STORED = {"bool": "uint8", "uint64": "int64", "bfloat16": "float32", "float16": "float32"}
"""The dtypes that arrays of other dtypes are passed as. Modifications compute with int64, so uint64 wraps."""


def stored_dtype(dtype: str) -> str:
    return _STORED.get(dtype, dtype)


def entries(slot: Slot) -> int:
    """64-bit words of a slot in VALUES: the scalar, or address, extents and byte strides."""
    return 1 if slot.ndim is None else 1 + 2 * slot.ndim


VALUE_WORDS = 5
"""Words in VALUES behind those of the transposers, where the backward pass differentiates by values: bits of the scale,
BLOCK_K, NUM_SPLITS, GROUP and key/value heads. For each of `AttentionSpec.sums` then come the address of the sums, the
bytes between those of two work tiles, 0 where all share them, and the byte strides of each axis.
"""


def value_entries(slot: Slot) -> int:
    """64-bit words of the sums of a slot."""
    return 2 + (slot.ndim or 0)


def separating_axes(spec: AttentionSpec, name: str) -> set[Expr]:
    """Of the batch entry, the head and the key those of which different ones always read different elements."""
    indices = [read.indices for read in spec.reads if read.name == name]
    return {x for x in (expr.B, expr.H, expr.K) if any(all(i is x for i in axis) for axis in zip(*indices))}


def _prelude(spec: AttentionSpec, used: set[str]) -> list[str]:
    """Lines that bind each used scalar and array to its name."""
    lines, at = [], 0
    for slot in spec.slots:
        if slot.name in used:
            fields = [f"integer_at(values + {8 * (at + i)})" for i in range(entries(slot))]
            if slot.ndim == 0:
                fields = [fields[0], "1", "8"]  # one element, read as name[0]
            if slot.ndim is None:
                value = fields[0] if slot.kind == "int" else f"F(double_from_bits({fields[0]}))"
            else:
                value = f"{_VIEWS[slot.ndim]}({', '.join(fields)}, np.{stored_dtype(str(slot.dtype))})"
            lines.append(f"    {slot.name} = {value}")
        at += entries(slot)
    return lines


def _names(exprs: list[Expr]) -> set[str]:
    return {node.value for node in expr.walk(exprs) if node.op == "param" or node.op.startswith("load")}


def _depths(graphs: Sequence[Expr], outer: tuple[Expr, ...]) -> dict[int, int]:
    """The loop depth of each node, by its id: 0 outside both loops, 1 in the outer one, 2 in the inner one."""
    depth: dict[int, int] = {}
    fixed = (expr.B, expr.H)
    for node in expr.walk(graphs):
        if node.op == "symbol":
            depth[id(node)] = 0 if any(node is s for s in fixed) else 1 if any(node is s for s in outer) else 2
        else:
            depth[id(node)] = max((depth[id(a)] for a in node.args), default=0)
    return depth


def _at_depth(steps: list[tuple[Expr, str, str]], depth: dict[int, int]) -> list[list[str]]:
    """The lines of each depth, indented."""
    lines = [(depth[id(node)], f"{name} = {text}") for node, name, text in steps]
    return [[f"{'    ' * (d + 1)}{line}" for at, line in lines if at == d] for d in range(3)]


def _results(spec: AttentionSpec) -> list[Expr]:
    score = expr.S if spec.score is None else spec.score
    return [score] if spec.mask is None else [score, spec.mask]


def transposed_loads(spec: AttentionSpec) -> list[Expr]:
    """Loads [..., row, key]: contiguous along keys, unlike forward tiles, so their tiles are transposed first."""
    return [node for node in expr.walk(_results(spec)) if node.op == "load" and _by_row_and_key(node.args)]


def _by_row_and_key(index: tuple[Expr, ...]) -> bool:
    if len(index) < 2 or index[-1] is not expr.K or not (index[-2] is expr.ROW or index[-2] is expr.Q):
        return False
    moving = {id(expr.Q), id(expr.ROW), id(expr.K)}
    return all(id(node) not in moving for node in expr.walk(index[:-2]))


def _tile_function(spec: AttentionSpec, keys_outside: bool, with_slope: bool) -> str:
    """The text of `modify`, for axes (keys, rows) or (rows, keys). With sums by values, scores are kept for slopes."""
    wanted = _results(spec)
    if with_slope:
        wanted.append(expr.S if spec.sums else expr.derivative(wanted[0]))
    transposed = transposed_loads(spec) if keys_outside else []
    before: list[str] = []
    dtypes = {slot.name: np.dtype(stored_dtype(str(slot.dtype))) for slot in spec.slots if slot.ndim is not None}
    transposers = 8 * sum(map(entries, spec.slots))

    def load(node: Expr, operands: list[str]) -> str:
        """The text of a load; tiles of transposed arrays are made before the loops."""
        text = codegen.load_text(node, operands, "numba")
        if not any(node is one for one in transposed):
            return text
        tile, dtype, (*leading, last, _) = f"transposed{len(before) // 3}", dtypes[node.value], operands
        rows = ", ".join([*leading, f"{last}0 : {last}0 + width", "k0 : k0 + count"])
        before.extend([
            f"{tile} = matrix(extra_at, count, width, width * {dtype.itemsize}, {dtype.itemsize}, np.{dtype})",
            "extra_at += count * width * 8",
            f"transpose(integer_at(values + {transposers + 8 * TRANSPOSED_SIZES.index(dtype.itemsize)}), "
            f"{node.value}[{rows}], {tile})",
        ])  # fmt: skip
        return text.replace(f"{node.value}[{', '.join(operands)}]", f"{tile}[j, i]")

    steps, results = codegen.assignments(wanted, "numba", load, spec.int32_arrays)
    at_depth = _at_depth(steps, _depths(wanted, (expr.K,) if keys_outside else (expr.Q, expr.ROW)))
    row, key = ("i", "j") if keys_outside else ("j", "i")
    positions = {"row": f"row = row0 + {row}; q = q0 + {row}", "key": f"k = k0 + {key}"}
    outer, inner = (positions["key"], positions["row"]) if keys_outside else (positions["row"], positions["key"])
    visible = results[0] if spec.mask is None else f"({results[0]}) if ({results[1]}) else HIDDEN"
    slopes = ["    slopes = matrix(extra_at, count, width, row_stride, F_SIZE, F)"] if with_slope else []
    if with_slope and keys_outside:
        slopes.append("    extra_at += count * row_stride")
    slope = [f"            slopes[j, i] = {results[-1]}"] if with_slope else []
    return "\n".join([
        "@entry(types.void(*[types.int64] * 11))",
        "def modify(tile_at, extra_at, row_stride, count, width, b, h, row0, q0, k0, values):",
        "    tile = matrix(tile_at, count, width, row_stride, F_SIZE, F)",
        *slopes,
        *_prelude(spec, _names(wanted)),
        *at_depth[0],
        *(f"    {line}" for line in before),
        "    for j in range(count):",
        f"        {outer}",
        *at_depth[1],
        "        for i in range(width):",
        f"            {inner}",
        "            s = tile[j, i]",
        *at_depth[2],
        f"            tile[j, i] = {visible}",
        *slope,
    ])  # fmt: skip


_VISIT_DS = """@entry(types.void(*[types.int64] * 13))
def visit_ds(p_at, ds_at, slopes_at, row_stride, count, width, b, h, row0, q0, k0, values, again):
    p = matrix(p_at, count, width, row_stride, F_SIZE, F)
    ds = matrix(ds_at, count, width, row_stride, F_SIZE, F)
    slopes = matrix(slopes_at, count, width, row_stride, F_SIZE, F)
    for j in range(count):
        for i in range(width):
            ds[j, i] = ds[j, i] * slopes[j, i] if p[j, i] != 0 else F(0)
"""


def _visit_function(spec: AttentionSpec) -> str:
    """The text of `visit_ds` where values are differentiated by. again: the fallback computes the tile once more."""
    first = sum(map(entries, spec.slots)) + len(TRANSPOSERS)
    places, at = {}, first + VALUE_WORDS
    for slot in spec.sums:
        places[slot.name] = at
        at += value_entries(slot)
    functions, calls = [], []
    for n, read in enumerate(spec.reads):
        calls.append(f"        add{n}({_VISITED}, part)")
        of_distance = read.of_distance()
        if of_distance is None:
            functions += _add_pairs(spec, f"add{n}", read, places[read.name])
        else:
            functions += _add_diagonals(spec, f"add{n}", of_distance, places[read.name])
    assert spec.score is not None
    slope = expr.derivative(spec.score)
    steps, (factor,) = codegen.assignments([slope], "numba", None, spec.int32_arrays)
    body = [f"ds[j, i] = scale * (ds[j, i] * {factor} if p[j, i] != 0 else F(0))"]
    functions += _loops(spec, f"apply_slope({_VISITED}, scale)", [slope], steps, [], body, [])
    word = [f"integer_at(values + {8 * (first + i)})" for i in range(VALUE_WORDS)]
    return "\n".join([
        *functions,
        "@entry(types.void(*[types.int64] * 13))",
        "def visit_ds(p_at, ds_at, scores_at, row_stride, count, width, b, h, row0, q0, k0, values, again):",
        *(f"    {x} = matrix({x}_at, count, width, row_stride, F_SIZE, F)" for x in ("p", "ds", "scores")),
        "    diagonals = vector(scores_at + count * row_stride, count + width - 1, F_SIZE, F)",
        f"    part = (b * {word[4]} + h // {word[3]}) * {word[2]} + k0 // {word[1]} % {word[2]}",
        "    if again == 0:",
        *calls,
        f"    apply_slope({_VISITED}, F(double_from_bits({word[0]})))",
        "",
    ])  # fmt: skip


_VISITED = "p, ds, scores, diagonals, b, h, row0, q0, k0, values"


def _sums(index: Sequence[str], place: int) -> str:
    """The text of the address of an element of the sums."""
    strides = (f"I({i}) * integer_at(values + {8 * (place + 2 + axis)})" for axis, i in enumerate(index))
    part = f"part * integer_at(values + {8 * (place + 1)})"
    return " + ".join([f"integer_at(values + {8 * place})", part, *strides])


def _adding(address: str, term: str) -> list[str]:
    """Lines that add a term. Terms for the same element are summed first, as long as they follow each other."""
    flush = "        vector(at, 1, F_SIZE, F)[0] += total"
    return [f"here = {address}", "if here != at:", "    if at != 0:", flush, "    total, at = F(0), here",
            f"total += {term}"]  # fmt: skip


_NOTHING, _REST = "total, at = F(0), I(0)", "vector(at, 1, F_SIZE, F)[0] += total"


def _add_pairs(spec: AttentionSpec, name: str, read: Read, place: int) -> list[str]:
    """The text of a function that adds dS times the slope of a read to the sums, for each pair of a tile."""
    graphs = [read.slope, *read.indices]
    steps, (factor, *index) = codegen.assignments(graphs, "numba", None, spec.int32_arrays)
    depth, term = _depths(graphs, (expr.Q, expr.ROW)), f"ds[j, i] * {factor} if p[j, i] != 0 else F(0)"
    along_keys = bool(read.indices) and read.indices[-1] is expr.K
    if along_keys:
        index[-1] = "k0"
    if along_keys and max((depth[id(graph)] for graph in read.indices[:-1]), default=0) < 2:
        before = [f"sums = vector({_sums(index, place)}, p.shape[1], F_SIZE, F)"]
        body, after = [f"sums[i] += {term}"], list[str]()
    else:
        address = _sums(index, place) + (" + i * F_SIZE" if along_keys else "")
        before, body, after = [_NOTHING], _adding(address, term), [_REST]
    return _loops(spec, f"{name}({_VISITED}, part)", graphs, steps, before, body, after)


def _add_diagonals(spec: AttentionSpec, name: str, read: Read, place: int) -> list[str]:
    """The same for a read by distance: dS is summed along the diagonals of the tile first."""
    graphs = [read.slope, *read.indices]
    steps, (factor, *index) = codegen.assignments(graphs, "numba", None, spec.int32_arrays)
    lines = [f"{name} = {text}" for _, name, text in steps]
    return [
        "@njit(**options)",
        f"def {name}({_VISITED}, part):",
        *_prelude(spec, _names(graphs)),
        "    diagonals[:] = 0",
        "    for j in range(p.shape[0]):",
        "        own = vector(diagonals[p.shape[0] - 1 - j :].ctypes.data, p.shape[1], F_SIZE, F)",
        "        for i in range(p.shape[1]):",
        "            own[i] += ds[j, i] if p[j, i] != 0 else F(0)",
        f"    {_NOTHING}",
        "    for n in range(len(diagonals)):",
        "        distance = q0 - k0 + p.shape[0] - 1 - n",
        *(f"        {line}" for line in (*lines, *_adding(_sums(index, place), f"diagonals[n] * {factor}"))),
        f"    {_REST}",
        "\n",
    ]  # fmt: skip


def _loops(
    spec: AttentionSpec, head: str, graphs: Sequence[Expr], steps: list[tuple[Expr, str, str]], before: list[str],
    body: list[str], after: list[str],
) -> list[str]:  # fmt: skip
    """The text of a function that loops over the pairs of a tile, with lines before and after those of a row."""
    at_depth = _at_depth(steps, _depths(graphs, (expr.Q, expr.ROW)))
    return [
        "@njit(**options)",
        f"def {head}:",
        *_prelude(spec, _names(list(graphs))),
        *at_depth[0],
        "    for j in range(p.shape[0]):",
        "        row, q = row0 + j, q0 + j",
        *at_depth[1],
        *(f"        {line}" for line in before),
        "        for i in range(p.shape[1]):",
        "            k, s = k0 + i, scores[j, i]",
        *at_depth[2],
        *(f"            {line}" for line in body),
        *(f"        {line}" for line in after),
        "\n",
    ]


def _classify_function(spec: AttentionSpec) -> str:
    empty, full = spec.tile_state
    lines, (is_empty, is_full) = codegen.render([empty, full], "numba", "    ", spec.int32_arrays)
    return "\n".join([
        "@entry(types.int64(*[types.int64] * 9))",
        "def classify(b, h, row0, row1, q0, q1, k0, k1, values):",
        *_prelude(spec, _names([empty, full])),
        *lines,
        f"    return {int(EMPTY)} if {is_empty} else ({int(FULL)} if {is_full} else {int(PARTIAL)})",
    ])  # fmt: skip


def _head(dtype: str) -> str:
    """dtype: of floats."""
    return f"""import numpy as np
from numba import njit, types
from flashkit.backends.cpu.functions import *
from flashkit.backends.cpu.tile_ops import transpose
from flashkit.backends.cpu.views import double_from_bits, integer_at, matrix, tensor3, tensor4, vector
F, F_SIZE, I = np.{dtype}, {np.dtype(dtype).itemsize}, np.int64
HIDDEN = F(-np.inf)

"""


def _source(kind: str, spec: AttentionSpec, keys_outside: bool, with_slope: bool = False, visit_ds: str = "") -> Source:
    """`modify` for score tiles (keys, rows) if keys_outside, else (rows, keys), perhaps with slopes and `visit_ds`."""
    parts = [_tile_function(spec, keys_outside=keys_outside, with_slope=with_slope) + "\n", visit_ds]
    return specialise.source(kind, _head(spec.lse_dtype) + "\n\n".join(filter(None, parts)))


def forward_source(spec: AttentionSpec) -> Source:
    return _source("modify", spec, keys_outside=True)


def decode_source(spec: AttentionSpec) -> Source:
    return _source("modify_decode", spec, keys_outside=False)


def backward_source(spec: AttentionSpec) -> Source:
    visit_ds = "" if spec.score is None else _visit_function(spec) if spec.sums else _VISIT_DS
    return _source("modify_backward", spec, keys_outside=False, with_slope=True, visit_ds=visit_ds)


def jvp_source(spec: AttentionSpec) -> Source:
    """`visit_ds` is for tangents of scores."""
    has_score = spec.score is not None
    return _source("modify_jvp", spec, keys_outside=True, with_slope=has_score, visit_ds=_VISIT_DS * has_score)


def classify_source(spec: AttentionSpec) -> Source:
    """`classify`, in integers, and in float64 where these may overflow: for all dtypes."""
    return specialise.source("classify", _head("float64") + _classify_function(spec) + "\n")


def max_group(spec: AttentionSpec) -> int:
    """Tiles or strips that are classified at once. Bounds of an array take time in proportion to the group."""
    if spec.mask is None:
        return 1 << 40
    loads = [node for node in expr.walk([spec.mask]) if node.op == "load"]
    dense = [sum(_moves_densely(index) for index in node.args) for node in loads]
    return 1 << 40 if not loads else 32 if max(dense) < 2 else 1


def _moves_densely(index: Expr) -> bool:
    """Whether an index moves by an element or so from one query or key to the next."""
    if index.op == "floordiv" and index.args[1].op == "const" and index.args[1].value >= STRIP:
        return False
    moving = (expr.Q, expr.ROW, expr.K)
    return any(node is symbol for node in expr.walk([index]) for symbol in moving)
