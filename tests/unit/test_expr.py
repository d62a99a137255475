"""Expression graphs: every rendering, the derivative and the bounds against what the expression means."""

import ctypes
import gc
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import cpp
import numpy as np
import pytest
import random_exprs as random_
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashkit.mods import codegen, expr
from flashkit.mods.expr import FALSE, ROW, TRUE, Array, B, Expr, H, K, Q, S, const, param, where

randoms = st.randoms(use_true_random=False)
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
more = [pytest.mark.slow, pytest.mark.exhaustive]
N, M, CAP = param("n", "int"), param("m", "int"), param("cap", "float")


def evaluate(graph: Expr, env: dict) -> object:
    return codegen.evaluate(graph, {**env, **random_.ARRAYS})


def agree(kind: str, result: object, wanted: object) -> bool:
    """Integers, bools and exactly rounded floats are equal; smooth functions are to the last few bits."""
    if kind == "smooth":
        return math.isclose(float(result), wanted, rel_tol=1e-11, abs_tol=1e-11)  # type: ignore[arg-type]
    return result == wanted


# --- values -----------------------------------------------------------------------------------------------------------


def check_numpy(kind: str, r: Random) -> None:
    case = random_.MAKERS[kind](r, r.randint(1, 4))
    envs = [random_.environment(r) for _ in range(8)]
    wanted = [case.value(env) for env in envs]
    assert case.graph.kind == ("float" if kind == "smooth" else kind)
    # Position by position, and all at once as arrays.
    for env, value in zip(envs, wanted):
        assert agree(kind, evaluate(case.graph, env), value), (case.graph, env)
    arrays = {
        name: np.array([env[name] for env in envs]) if name not in random_.PARAMS else value
        for name, value in envs[0].items()
    }
    together = np.broadcast_to(evaluate(case.graph, arrays), len(envs))
    assert together.dtype.kind == {"int": "i", "bool": "b"}.get(kind, "f")
    for result, value in zip(together, wanted):
        assert agree(kind, result, value), case.graph


@pytest.mark.parametrize("kind", random_.MAKERS)
@quick
@given(r=randoms)
def test_numpy_text_means_what_python_says(kind, r):
    check_numpy(kind, r)


def some_cases(seed: int, count: int, depth: int = 3) -> list[tuple[str, random_.Case]]:
    r = Random(seed)
    return [(kind, random_.MAKERS[kind](r, depth)) for _ in range(count) for kind in random_.MAKERS]


NUMBA_PRELUDE = """
from math import exp, log, log2, sqrt, tanh, sin, cos, floor
import numpy as np
from numba import njit
F, I = np.float64, np.int64
@njit
def exp2(x): return 2.0 ** x
@njit
def minimum(x, y): return x if x < y else y
@njit
def maximum(x, y): return x if x > y else y
"""


@pytest.mark.parametrize(("seed", "count"), [(0, 12), *(pytest.param(seed, 25, marks=more) for seed in range(1, 6))])
def test_numba_text_means_the_same(seed, count):
    """One compiled function for all expressions: it is compiling that takes the time."""
    pytest.importorskip("numba")
    cases = some_cases(seed, count)
    lines, results = codegen.render([case.graph for _, case in cases], "numba", "    ")
    arguments = ["b", "h", "q", "k", "row", "s", *random_.PARAMS, *random_.ARRAYS]
    stores = [
        f"    out{'_float' if case.graph.kind == 'float' else ''}[{n}] = {text}"
        for n, ((_, case), text) in enumerate(zip(cases, results))
    ]
    scope: dict = {}
    exec("\n".join([NUMBA_PRELUDE, f"@njit\ndef f({', '.join(arguments)}, out, out_float):", *lines, *stores]), scope)
    check_compiled(scope["f"], seed, cases)


def check_compiled(function, seed: int, cases) -> None:
    r = Random(seed + 1)
    for _ in range(20):
        env = random_.environment(r)
        out, out_float = np.zeros(len(cases), np.int64), np.zeros(len(cases))
        function(
            *(env[name] for name in ("b", "h", "q", "k", "row", "s")),
            *random_.PARAMS.values(),
            *random_.ARRAYS.values(),
            out,
            out_float,
        )
        for n, (kind, case) in enumerate(cases):
            assert agree(kind, (out_float if case.graph.kind == "float" else out)[n], case.value(env)), (
                case.graph,
                env,
            )


C_TYPES = {"int64": "long long", "int32": "int", "bool": "unsigned char", "float64": "double"}


def compile_cpp(tmp_path, cases):
    lines, results = codegen.render([case.graph for _, case in cases], "cuda", "    ")
    integers = [f"long long {name}" for name in ("b", "h", "q", "k", "row")]
    params = [
        f"{'double' if isinstance(value, float) else 'long long'} {name}" for name, value in random_.PARAMS.items()
    ]
    arrays = [f"const {C_TYPES[a.dtype.name]} *{name}_data" for name, a in random_.ARRAYS.items()]
    views = [
        f"    const View<{C_TYPES[a.dtype.name]}, {a.ndim}> {name} = {{{name}_data}};"
        for name, a in random_.ARRAYS.items()
    ]
    strides = [
        f"    const long long {name}_stride{axis} = {step // a.itemsize};"
        for name, a in random_.ARRAYS.items()
        for axis, step in enumerate(a.strides)
    ]
    stores = [
        f"    {'out_float' if case.graph.kind == 'float' else 'out'}[{n}] = {text};"
        for n, ((_, case), text) in enumerate(zip(cases, results))
    ]
    arguments = [*integers, "double s", *params, *arrays, "long long *out", "double *out_float"]
    head = f'extern "C" void f({", ".join(arguments)}) {{'
    text = "\n".join([head, *views, *strides, *lines, *stores, "}"])
    function = cpp.compiled(text, tmp_path, "-ffp-contract=off").f
    scalar = lambda value: ctypes.c_double if isinstance(value, float) else ctypes.c_longlong
    pointers = [np.ctypeslib.ndpointer(a.dtype) for a in random_.ARRAYS.values()]
    outs = [np.ctypeslib.ndpointer(np.int64), np.ctypeslib.ndpointer(np.float64)]
    function.argtypes = [ctypes.c_longlong] * 5 + [
        ctypes.c_double, *map(scalar, random_.PARAMS.values()), *pointers, *outs,
    ]  # fmt: skip
    return function


@pytest.mark.parametrize(
    ("seed", "count", "depth"), [(11, 25, 3), *(pytest.param(seed, 100, 4, marks=more) for seed in range(20, 24))]
)
def test_cuda_text_means_the_same(tmp_path, seed, count, depth):
    cases = some_cases(seed, count, depth)
    check_compiled(compile_cpp(tmp_path, cases), seed, cases)


@pytest.mark.parametrize("divisor", [1, 2, 128, 2**40, 100, -128])
def test_cuda_text_divides_by_powers_of_two_as_python_does(tmp_path, divisor):
    graphs = [(Q - K) // divisor, (Q - K) % divisor]
    values = [lambda env: (env["q"] - env["k"]) // divisor, lambda env: (env["q"] - env["k"]) % divisor]
    text = "\n".join(codegen.render(graphs, "cuda")[0])
    assert (">>" in text and "&" in text) == (divisor not in (100, -128)) == ("fk_" not in text)
    cases = [("int", random_.Case(graph, value)) for graph, value in zip(graphs, values)]
    check_compiled(compile_cpp(tmp_path, cases), 5, cases)


def test_shared_parts_are_computed_once():
    shared = expr.exp(S)
    lines, results = codegen.render([shared + 1.0, shared * shared], "numpy")
    assert sum("exp" in line for line in lines) == 1
    assert len(results) == 2


def test_floats_have_the_precision_asked_for():
    graph = expr.tanh(S * 0.1) + expr.to_float(Q) / 3.0
    assert codegen.evaluate(graph, {"s": np.float32(2), "q": 1}, np.float32).dtype == np.float32
    assert codegen.evaluate(graph, {"s": np.float32(2), "q": 1}).dtype == np.float64


def test_integers_are_64_bits_wide():
    assert codegen.evaluate(Q * Q, {"q": np.int32(1 << 20)}) == 1 << 40
    assert codegen.evaluate(Q - K, {"q": np.uint8(1), "k": np.uint8(2)}) == -1


def test_scalars_alone_behave_as_in_kernels():
    """Python's own numbers would invert a bool to -2 and refuse to divide by zero."""
    assert codegen.evaluate(~(N < M), {"n": 1, "m": 2}) == False  # noqa: E712
    assert codegen.evaluate(CAP / param("other", "float"), {"cap": 1.0, "other": 0.0}) == math.inf
    assert codegen.evaluate(N // M, {"n": 1, "m": 0}) == 0


def test_specials():
    for value in (math.inf, -math.inf):
        assert codegen.evaluate(where(K <= Q, S, value), {"k": 1, "q": 0, "s": 1.0}) == value
    assert math.isnan(codegen.evaluate(S + math.nan, {"s": 1.0}))


def test_missing_values_are_named():
    with pytest.raises(KeyError, match="no value given for k, n"):
        codegen.evaluate(K + N + Q, {"q": 1})


# --- derivative -------------------------------------------------------------------------------------------------------


def slope(graph: Expr, env: dict, step: float) -> float:
    high, low = (float(evaluate(graph, {**env, "s": env["s"] + d})) for d in (step, -step))  # type: ignore[arg-type]
    return (high - low) / (2 * step)


def test_a_factor_that_is_constant_in_the_score_may_be_infinite():
    """Its slope is 0: not 0 times infinity, which is NaN."""
    key = expr.to_float(K + 1)
    for graph, slope in ((S / (1e-200 * key), 1e200), (S + expr.tanh(expr.exp(1000.0 * key)), 1.0)):
        assert float(evaluate(expr.derivative(graph), {"s": 0.5, "k": 0})) == pytest.approx(slope)


DERIVATIVES = {
    "add": lambda s: s + 2.0 * s, "sub": lambda s: 3.0 - s, "mul": lambda s: s * s, "div": lambda s: s / (s * s + 1.0),
    "mod": lambda s: s % (0.3 * s + 2.0), "neg": lambda s: -s, "abs": lambda s: abs(s),
    "min": lambda s: expr.minimum(s, 0.5 * s + 0.2), "max": lambda s: expr.maximum(s * s, s),
    "where": lambda s: where(s < 0.5, s * s, 3.0 * s), "exp": expr.exp, "exp2": expr.exp2,
    "log": lambda s: expr.log(s + 9.0), "log2": lambda s: expr.log2(s + 9.0), "sqrt": lambda s: expr.sqrt(s + 9.0),
    "tanh": expr.tanh, "sin": expr.sin, "cos": expr.cos, "erf": expr.erf,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("f", [expr.sigmoid, expr.tanh, expr.erf], ids=lambda f: f.__name__)
def test_bounded_functions_are_so_everywhere(f, dtype):
    """With their derivative, also where an exponential in it overflows."""
    s = np.array([-np.inf, -1e30, -1e4, -800, -100, -50, 0, 50, 100, 800, 1e4, 1e30, np.inf], dtype)
    value, slope = (codegen.evaluate(graph, {"s": s}, dtype) for graph in (f(S), expr.derivative(f(S))))
    right = {expr.sigmoid: lambda x: 0.5 + 0.5 * np.tanh(x / 2)}.get(f, np.tanh)(s.astype(np.float64))
    np.testing.assert_allclose(value, right, atol=1e-7, rtol=1e-6)
    at_zero = {expr.sigmoid: 0.25, expr.tanh: 1.0, expr.erf: 2 / np.pi**0.5}[f]
    np.testing.assert_allclose(slope, np.where(s == 0, at_zero, 0), atol=1e-20)


def test_every_derivative_rule_is_tried():
    assert {name for name, op in expr.OPS.items() if op.derivative} == set(DERIVATIVES)


@pytest.mark.parametrize("s", [-3.3, -0.7, 0.2, 1.9, 4.4])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative_of_each_operation(name, s):
    graph = DERIVATIVES[name](S)
    assert codegen.evaluate(expr.derivative(graph), {"s": s}) == pytest.approx(
        slope(graph, {"s": s}, 1e-6), rel=1e-6, abs=1e-6
    )


@pytest.mark.parametrize(
    ("graph", "wanted"),
    [
        (abs(S), 1.0), (expr.minimum(S, 0.0), 1.0), (expr.maximum(S, 0.0), 1.0), (where(S < 0, S, 2.0 * S), 2.0),
        (expr.floor(S), 0.0), (expr.sign(S) * S, 0.0),
    ],
)  # fmt: skip
def test_derivative_at_a_kink_is_that_of_the_side_taken(graph, wanted):
    assert codegen.evaluate(expr.derivative(graph), {"s": 0.0}) == wanted


def test_derivative_of_what_does_not_vary_is_zero():
    for graph in (
        const(3.0), expr.to_float(Q), expr.exp(expr.to_float(K)), CAP, where(Q < K, 1.0, -math.inf),
        Array("a", 1, "float")[K],
    ):  # fmt: skip
        assert expr.derivative(graph) is const(0.0)
    assert expr.derivative(S) is const(1.0)


def test_derivative_does_not_multiply_zero_by_infinity():
    assert codegen.evaluate(expr.derivative(where(K <= Q, S, -math.inf)), {"s": 1.0, "k": 2, "q": 1}) == 0.0
    assert (
        codegen.evaluate(expr.derivative(S * math.inf - S * math.inf * 0.0), {"s": 0.0}) != 0
    )  # the rule is the graph's own, not a guess


# --- bounds -----------------------------------------------------------------------------------------------------------


# Each position occurs once in these, so their bounds are not only true but the best there are.
ONE_OF_EACH = {
    "add": Q + K, "sub": Q - K, "mul": Q * K, "mul by a constant": Q * -2, "floordiv": Q // 3,
    "floordiv negative": Q // -3, "mod": Q % 3, "mod negative": Q % -3, "floordiv by keys": Q // (2 * K + 1), "neg": -K,
    "abs": abs(Q), "abs of a difference": abs(Q - K), "min": expr.minimum(Q, K), "max": expr.maximum(Q, K),
    "clip": expr.clip(Q, -1, 2), "sign": expr.sign(Q), "where": where(Q < 1, K, 7), "lt": Q < K, "le": Q <= K,
    "eq": Q == K, "ne": Q != K, "and": (Q < 1) & (K < 2), "or": (Q < 1) | (K < 2), "xor": (Q < 1) ^ (K < 2),
    "not": ~(Q < 1), "same": (Q < 1) == (K < 2), "where of bools": where(Q < 1, K < 2, TRUE),
    "number of a bool": (Q < 1) + 3,
}  # fmt: skip
LOOSE = {"mod", "mod negative", "floordiv by keys"}  # all remainders where the turn ends within the tile; any divisor


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_bounds_of_each_operation_on_every_small_tile(name):
    graph = ONE_OF_EACH[name]
    q, k = np.ogrid[-4:5, -4:5]
    values = np.broadcast_to(codegen.evaluate(graph, {"q": q, "k": k}), (9, 9))
    q0, q1, k0, k1 = (x.ravel() - 4 for x in np.indices((9, 9, 9, 9)))
    some = (q0 <= q1) & (k0 <= k1)
    corners = dict(zip(("q0", "q1", "k0", "k1"), (x[some] for x in (q0, q1, k0, k1))))
    bounds = [np.broadcast_to(codegen.evaluate(e, corners), some.sum()) for e in expr.bounds(graph)]
    for a, b, c, d, low, high in zip(*corners.values(), *bounds):
        inside = values[a + 4 : b + 5, c + 4 : d + 5]
        if name in LOOSE:
            assert low <= inside.min() <= inside.max() <= high
        else:
            assert (low, high) == (inside.min(), inside.max()), (a, b, c, d)


def test_a_remainder_is_exact_within_one_turn():
    assert [int(codegen.evaluate(e, {"q0": 33, "q1": 37})) for e in expr.bounds(Q % 16)] == [1, 5]


def test_floats_have_no_bounds():
    """A bound that rounds differently from the kernel could hide a pair, so a comparison of floats is left open."""
    assert expr.bounds(expr.to_float(Q)) is None
    assert expr.bounds(Q & K) is None
    assert [e is known for e, known in zip(expr.bounds(expr.to_float(Q) < 3.0), (FALSE, TRUE))] == [True, True]
    assert [e is known for e, known in zip(expr.classify(TRUE), (FALSE, TRUE))] == [True, True]
    assert [e is known for e, known in zip(expr.classify(FALSE), (TRUE, FALSE))] == [True, True]


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_a_bool_with_itself():
    seen = Q < K
    for q in (0, 2):
        values = [bool(evaluate(graph, {"q": q, "k": 1})) for graph in (seen & seen, seen | seen, seen ^ seen)]
        assert values == [q < 1, q < 1, False]


def test_equal_graphs_are_one_object():
    assert (S + 1.0) * Q is (S + 1.0) * Q
    assert (S + 0.5) is not (S - -0.5)
    assert const(1) is not const(1.0)
    assert const(True) is not const(1)
    assert const(0.0) is not const(-0.0)
    assert param("n", "int") is not param("n", "float")
    assert Array("a", 1, "int")[K] is not Array("a", 1, "float")[K]
    assert hash(S) == hash(expr.symbol("s", "float"))


def test_threads_make_the_same_object():
    start = threading.Barrier(8)

    def make(_: int) -> list[Expr]:
        start.wait()
        return [(Q * i + K) % (i + 2) == 0 for i in range(200)]

    with ThreadPoolExecutor(8) as pool:
        first, *others = pool.map(make, range(8))
    assert all(a is b for other in others for a, b in zip(first, other))


def test_what_nobody_uses_is_let_go():
    gc.collect()
    before = len(expr.graph._interned)
    graph = Q * 123457 + K * 765431
    assert len(expr.graph._interned) > before
    del graph
    gc.collect()
    assert len(expr.graph._interned) <= before


def test_expressions_do_not_change():
    for name in ("op", "args", "value", "kind", "other"):
        with pytest.raises(AttributeError, match="immutable"):
            setattr(S + 1.0, name, None)


def test_key_is_canonical_text():
    assert expr.key(K <= Q) == "t0=le(k,q)"
    assert expr.key(S) == "s"
    assert expr.key(S - Array("slopes", 1, "float")[H] * abs(Q - K)) == (
        "t0=load[slopes:float](h);t1=sub(q,k);t2=abs(t1);t3=float(t2);t4=mul(t0,t3);t5=sub(s,t4)"
    )
    assert repr(K <= Q) == expr.key(K <= Q)


@quick
@given(r=randoms)
def test_key_tells_graphs_apart(r):
    x, y = (random_.integer(r, 3).graph for _ in range(2))
    assert (expr.key(x) == expr.key(y)) == (x is y)


def test_constants_are_folded_exactly():
    assert const(7) // const(-2) is const(-4)
    assert const(-7) % const(3) is const(2)
    assert (const(3) < const(4)) is TRUE
    assert ~TRUE is FALSE
    assert (const(6) & const(3)) is const(2)
    assert (const(0.1) + const(0.2)).op == "add"  # a float is rounded where the kernel rounds it
    assert expr.minimum(const(3), const(-3)) is const(-3)
    with pytest.raises(ZeroDivisionError, match="floordiv of 1 by 0"):
        const(1) // const(0)


def test_what_changes_nothing_is_left_out():
    condition = K <= Q
    assert Q + 0 is Q
    assert 0 + Q is Q
    assert Q - 0 is Q
    assert S * 1 is S
    assert 1.0 * S is S
    assert +S is S
    assert ~~condition is condition
    assert (condition & True) is condition
    assert (condition & False) is FALSE
    assert (condition | True) is TRUE
    assert (False | condition) is condition
    assert (condition ^ False) is condition
    assert (condition ^ True) is ~condition
    assert (condition & condition) is condition
    assert where(True, Q, K) is Q
    assert where(condition, Q, Q) is Q
    assert Q**0 is const(1)
    assert S**1 is S
    assert S**0.5 is expr.sqrt(S)
    assert S ** np.int64(2) is S**2
    assert S ** np.float32(0.5) is S**0.5


def test_kinds_mix_as_in_python():
    assert (Q + 1).kind == "int"
    assert (Q + 1.0).kind == "float"
    assert (Q / 2).kind == "float"
    assert (Q // 2).kind == "int"
    assert (S // 2).kind == "float"
    assert ((K <= Q) + 1).kind == "int"
    assert ((K <= Q) * 0.5).kind == "float"
    assert (K != Q).kind == "bool"
    assert where(K <= Q, 1, 0.5).kind == "float"
    assert where(K <= Q, True, 2).kind == "int"
    assert expr.sqrt(Q).kind == "float"


def test_shifts_are_products_and_quotients_of_powers_of_two():
    assert (Q << 3) is Q * 8 and (Q >> 3) is Q // 8 and (Q >> np.int64(0)) is Q // 1
    for wrong in (lambda: S << 1, lambda: Q >> 63, lambda: Q << -1, lambda: Q << K, lambda: Q >> 1.0):
        with pytest.raises(TypeError, match="a number of bits from 0 to 62"):
            wrong()


def test_numpy_functions_mean_flashkits_own():
    assert np.tanh(S) is expr.tanh(S)
    assert np.exp(S) is expr.exp(S)
    assert np.minimum(Q, 3) is expr.minimum(Q, 3)
    assert np.clip(S, -1, 2) is expr.clip(S, -1, 2)
    assert np.clip(Q - K, 0, None) is expr.maximum(Q - K, 0)
    assert np.abs(Q - K) is abs(Q - K)
    assert (np.float64(2.0) * S) is 2.0 * S
    assert (np.int64(3) <= Q) is (Q >= 3)
    assert np.logical_and(K <= Q, Q < 3) is ((K <= Q) & (Q < 3))
    assert np.logical_not(K <= Q) is ~(K <= Q)


def test_rename_and_substitute():
    a = Array("a", 1, "int")
    graph = a[K] + N * a[Q]
    renamed = expr.rename([graph], {"a": "other", "n": "number"})[0]
    assert renamed is Array("other", 1, "int")[K] + param("number", "int") * Array("other", 1, "int")[Q]
    moved = expr.substitute([graph], lambda node: ROW + 4 if node is Q else node)[0]
    assert moved is a[K] + N * a[ROW + 4]
    assert expr.uses(graph, Q)
    assert not expr.uses(moved, Q)
    assert expr.substitute([graph], lambda node: node)[0] is graph


def test_a_thousand_terms_are_no_trouble():
    graph = FALSE
    for i in range(3000):
        graph = graph | (K == 3 * i)  # noqa: SIM300
    assert codegen.evaluate(graph, {"k": np.arange(5)}).tolist() == [True, False, False, True, False]
    assert len(expr.key(graph)) > 3000
    assert expr.derivative(where(graph, S, 0.0)).kind == "float"
    assert bool(codegen.evaluate(expr.classify(graph)[0], {"k0": 1, "k1": 2}))
    assert bool(codegen.evaluate(expr.classify(graph)[1], {"k0": 3, "k1": 3}))


# --- errors -----------------------------------------------------------------------------------------------------------

CONDITION = K <= Q
TABLE = Array("table", 2, "float")
ERRORS: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    TypeError: [
        ("no truth value.*where", lambda: 1 if CONDITION else 0),
        ("operators &, |, ~", lambda: CONDITION and Q < 3),
        ("chained comparisons", lambda: 0 <= Q < 3),
        ("truth value", lambda: Q in [1, 2]),
        ("every position at once", lambda: list(Q)),
        ("single value", lambda: int(Q)),
        ("single value", lambda: float(S)),
        ("single value", lambda: len(Q)),
        ("keyword arguments", lambda: Q + np.arange(3)),
        ("a: expected 1 indices.* got none", lambda: Array("a", 1, "int") == Q),
        ("NoneType cannot be part", lambda: Q + None),
        ("index of table: .* got float", lambda: TABLE[B, S]),
        ("index of table: .* got bool", lambda: TABLE[B, CONDITION]),
        ("slice cannot be part", lambda: TABLE[B, 1:]),
        ("two bools or two integers, got bool and float", lambda: CONDITION & S),
        ("got int and bool", lambda: Q | CONDITION),
        ("~: expected a bool, got int", lambda: ~Q),
        ("bools have no order", lambda: (Q < 3) > CONDITION),
        ("condition of where\\(\\): expected a bool, got int", lambda: where(Q, 1, 2)),
        ("numpy.arctan cannot be traced; known: .*tanh", lambda: np.arctan(S)),
        ("numpy.add cannot be traced", lambda: np.add.reduce(Q)),
        ("numpy.logical_and: .* got int", lambda: np.logical_and(Q, K)),
        ("numpy.logical_or: .* got int", lambda: np.logical_or(CONDITION, K)),
    ],
    ValueError: [
        ("table: expected 2 indices.*got 1", lambda: TABLE[Q]),
        ("table: expected 2 indices.*got 3", lambda: TABLE[B, Q, K]), ("exponent from 0 to 8.*got -1", lambda: S**-1),
        ("exp\\(y \\* log\\(x\\)\\)", lambda: S**S), ("got 1.5", lambda: S**1.5),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("error", "text", "make"), [(error, *row) for error, rows in ERRORS.items() for row in rows])
def test_errors_say_what_would_fit(error, text, make):
    with pytest.raises(error, match=text):
        make()
