"""Faults in expression graphs, their code, ready-made modifications and how they are traced."""

from __future__ import annotations

from . import Fault

TESTS = (
    "tests/unit/test_mods.py tests/unit/test_expr.py",
    "tests/unit/test_dropout.py",
    "tests/unit/test_wrapping.py",
    "tests/unit/test_reference.py",
    "tests/unit/test_memory_safety_calls.py",
    "tests/unit/test_planned.py",
)

MODS = "flashkit/mods"
GRAPH, OPS, RULES, INTERVALS = (
    f"{MODS}/expr/{name}.py" for name in ("graph", "operations", "interval_rules", "intervals")
)

FAULTS = (
    Fault("sub: bounds", OPS, "lambda a, b: (a[0] - b[1], a[1] - b[0])", "lambda a, b: (a[0] - b[0], a[1] - b[1])"),
    Fault(
        "div: derivative", OPS,
        "- _product(_product(d[1], a[0]), 1.0 / (a[1] * a[1]))",
        "+ _product(_product(d[1], a[0]), 1.0 / (a[1] * a[1]))",
    ),
    Fault("mod: derivative", OPS, "lambda a, d: d[0] - _product(d[1], floor(a[0] / a[1]))", "lambda a, d: d[0]"),
    Fault("abs: the side at 0", OPS, "where(a[0] < 0, -1.0, 1.0)", "where(a[0] <= 0, -1.0, 1.0)"),
    Fault("abs: bounds", OPS, "rules.greatest(rules.greatest(a[0], -a[1]), 0)", "rules.greatest(a[0], -a[1])"),
    Fault(
        "min: the side of a tie", OPS,
        "lambda a, d: where(a[1] < a[0], d[1], d[0])",
        "lambda a, d: where(a[1] <= a[0], d[1], d[0])",
    ),
    Fault("le: bounds", OPS, "lambda a, b: (a[1] <= b[0], a[0] <= b[1])", "lambda a, b: (a[1] <= b[0], a[0] < b[1])"),
    Fault("eq: bounds", OPS, "(a[0] <= b[1]) & (b[0] <= a[1])", "(a[0] <= b[1])"),
    Fault(
        "xor: bounds", OPS,
        "(rules.negation(a[1]) & rules.negation(b[1]))",
        "(rules.negation(a[1]) & rules.negation(b[0]))",
    ),
    Fault("tanh: derivative", OPS, "_product(1.0 - tanh(a[0]) * tanh(a[0]), d[0])", "_product(1.0 - tanh(a[0]), d[0])"),
    Fault(
        "derivative: 0 times infinity", OPS,
        "return const(0.0) if is_const(x, 0) or is_const(y, 0) else x * y",
        "return x * y",
    ),
    Fault(
        "mul: two of four corners", RULES,
        "hull([x * y for x in _ends(a) for y in _ends(b)])",
        "hull([a[0] * b[0], a[1] * b[1]])",
    ),
    Fault(
        "floordiv: a divisor below 0", RULES,
        "return hull([a[0] // b[0], a[1] // b[0]])",
        "return a[0] // b[0], a[1] // b[0]",
    ),
    Fault(
        "floordiv: any divisor", RULES,
        "least(least(a[0], -a[1]), 0), greatest(greatest(a[1], -a[0]), 0)",
        "least(a[0], 0), greatest(a[1], 0)",
    ),
    Fault(
        "mod: a remainder of one turn", RULES,
        "same_quotient = _turn(a[0], divisor) == _turn(a[1], divisor)",
        "same_quotient = a[0] <= a[1]",
    ),
    Fault(
        "mod: the greatest remainder", RULES,
        "low, high = least(b[0] + 1, 0), greatest(b[1] - 1, 0)",
        "low, high = least(b[0] + 1, 0), greatest(b[1] - 2, 0)",
    ),
    Fault(
        "where: the side that is sure", RULES,
        "choose(c[0], x[i], choose(c[1], either, y[i]))",
        "choose(c[1], x[i], choose(c[0], either, y[i]))",
    ),
    Fault(
        "overflow is not seen", INTERVALS,
        "if result[0] < INT64[0] or result[1] > INT64[1]:",
        "if result[0] < INT64[0]:",
    ),
    Fault(
        "narrow arrays are wide", INTERVALS,
        'if str(dtype) not in ("int64", "uint64")',
        'if str(dtype) != "int64"',
        "tests/unit/test_wrapping.py -k narrow",
    ),
    Fault(
        "bounds of a load at two points", INTERVALS,
        "if all(map(is_point, ranges)):",
        "if any(map(is_point, ranges)):",
    ),
    Fault(
        "where nothing can overflow", INTERVALS,
        "sure = sure & (doubt >= -_SURE) & (doubt <= _SURE)",
        "sure = sure & (doubt <= _SURE)",
    ),
    Fault(
        "an end that wraps is not seen", RULES,
        "if INT64[0] <= exact[0] and exact[1] <= INT64[1]:",
        "if INT64[0] <= exact[0]:",
    ),
    Fault(
        "an unknown operand of min and max is small", INTERVALS,
        "(INT64[0], INT64[0])), End(const(INT64[1])",
        "(0, 0)), End(const(INT64[1])",
    ),
    Fault(
        "interned nodes without the kind", GRAPH,
        "identity = (op, tuple(map(id, args)), repr(value), kind)",
        "identity = (op, tuple(map(id, args)), repr(value))",
    ),
    Fault(
        "keys of graphs without a parameter's kind", GRAPH,
        '"param": f"{node.value}:{node.kind}"}',
        '"param": str(node.value)}',
    ),
    Fault(
        "keys of graphs without an array's kind", GRAPH,
        'f"{node.op}[{node.value}:{node.kind}]"',
        'f"{node.op}[{node.value}]"',
    ),
    Fault(
        "greater is less", GRAPH,
        'def __gt__(self, other: Any) -> Expr: return comparison("lt", other, self)',
        'def __gt__(self, other: Any) -> Expr: return comparison("le", other, self)',
    ),
    Fault(
        "reflected subtraction", GRAPH,
        'def __rsub__(self, other: Any) -> Expr: return arithmetic("sub", other, self)',
        'def __rsub__(self, other: Any) -> Expr: return arithmetic("sub", self, other)',
    ),
    Fault(
        "folded numbers do not wrap", GRAPH,
        'return const(wrapped(value) if node.kind == "int" else value)',
        "return const(value)",
    ),
    Fault("x and x", GRAPH, 'return a if a is b and op != "xor" else', "return a if a is b else"),
    Fault(
        "rename leaves arrays", GRAPH,
        'named = node.op in ("param", "load") and node.value in names',
        'named = node.op == "param" and node.value in names',
    ),
    Fault(
        "numba: wrapping abs", f"{MODS}/codegen.py",
        'f"{_NEGATED} if {{0}} < 0 else I({{0}})"',
        'f"{_NEGATED} if {{0}} > 0 else I({{0}})"',
    ),
    Fault("cuda: the least int64", f"{MODS}/codegen.py", 'f"({v + 1}ll - 1)"', 'f"({v + 1}ll)"'),
    Fault(
        "cuda: remainders of powers of two", f"{MODS}/codegen.py",
        "{operands[0]} & {2**bits - 1}",
        "{operands[0]} & {2**bits}",
    ),
    Fault(
        "window: the left end", f"{MODS}/library.py",
        "return (q - left <= k) & (k <= q + right)",
        "return (q - left < k) & (k <= q + right)",
        core="mask edge",
    ),
    Fault("window: left alone", f"{MODS}/library.py", "return q - left <= k\n", "return q - left < k\n"),
    Fault("causal: the diagonal", f"{MODS}/library.py", "    return k <= q\n", "    return k < q\n", core="mask edge"),
    Fault("prefix: one key too many", f"{MODS}/library.py", "return (k < n) | (k <= q)", "return (k <= n) | (k <= q)"),
    Fault(
        "alibi: the sign", f"{MODS}/library.py",
        "return s - expr.to_float(_at(slopes, b, h)) * abs(q - k)",
        "return s + expr.to_float(_at(slopes, b, h)) * abs(q - k)",
    ),
    Fault(
        "alibi: keys after the query", f"{MODS}/library.py",
        "_at(slopes, b, h)) * abs(q - k)",
        "_at(slopes, b, h)) * (q - k)",
    ),
    Fault(
        "bias: positions for rows", f"{MODS}/library.py",
        "indices = (b, h, expr.ROW, k)[4 - len(axes) :]",
        "indices = (b, h, expr.Q, k)[4 - len(axes) :]",
    ),
    Fault(
        "bias: graphs without the axes", f"{MODS}/library.py",
        "return _with_axes(function, tuple(n == 1 for n in array.shape))",
        "return _with_axes(function, tuple(n <= 2 for n in array.shape))",
    ),
    Fault("windows without a bound", f"{MODS}/library.py", "if n < 4 * expr.MAX_POSITION}", "if n < 2**63}"),
    Fault(
        "then: in the other order", f"{MODS}/mod.py",
        'return combine(after, "score", self, other)',
        'return combine(after, "score", other, self)',
    ),
    Fault("combine: equal names", f"{MODS}/mod.py", "while new in params or new in arrays:", "while new in params:"),
    Fault(
        "snapshot: integers are not copied", f"{MODS}/mod.py",
        'copied = whole or kind == "int" or',
        "copied = whole or",
    ),
    Fault(
        "snapshot: unsigned integers are not copied", f"{MODS}/mod.py",
        'copied = whole or kind == "int" or',
        'copied = whole or (kind == "int" and "u" not in str(getattr(arrays.get(name), "dtype", ""))) or',
    ),
    Fault(
        "snapshot: bools of an index are not copied", f"{MODS}/mod.py",
        ' or (kind == "bool" and name in indexing)',
        "",
    ),
    Fault("snapshot: the caller's own array", f"{MODS}/mod.py", "own = array.view()", "own = array"),
    Fault(
        "wide integers lose their upper half", f"{MODS}/mod.py",
        "number >> 32, number & (2**32 - 1)",
        "0, number & (2**32 - 1)",
    ),
    Fault(
        "partials of positions", f"{MODS}/mod.py",
        "if isinstance(function, partial) and not function.args else function",
        "if isinstance(function, partial) else function",
    ),
    Fault(
        "defaults win over values", f"{MODS}/mod.py",
        "values = {**_keyword_defaults(plain), **values}",
        "values = {**values, **_keyword_defaults(plain)}",
    ),
    Fault(
        "pure functions and others", f"{MODS}/mod.py",
        "make = trace_pure if is_pure else trace_graph",
        "make = trace_pure",
    ),
    Fault(
        "reserved names", f"{MODS}/tracing.py",
        'return name + "_" if _RESERVED.fullmatch(name.rstrip("_")) else name',
        'return name + "_" if _RESERVED.fullmatch(name) else name',
    ),
    Fault(
        "dropout: the threshold", f"{MODS}/dropout.py",
        "return np.choose(lane, words) >= np.uint32(threshold(p))",
        "return np.choose(lane, words) > np.uint32(threshold(p))",
    ),
    Fault(
        "dropout: batch and head", f"{MODS}/dropout.py",
        "words = philox((k // 4, row, h, b), seed)",
        "words = philox((k // 4, row, b, h), seed)",
    ),
    Fault(
        "dropout: a probability near 1", f"{MODS}/dropout.py",
        "return min(round(p * 2**32), 2**32 - 1)",
        "return round(p * 2**32)",
    ),
)  # fmt: skip
