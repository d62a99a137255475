"""Integers of a modification wrap on overflow, as int64 does: what is derived from them holds where they do.

The oracle is every operation computed on Python's integers and wrapped, pair by pair, without any bounds.
"""

import ast
import ctypes
import operator
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import cpp
import numpy as np
import operands as operands_
import pytest
import random_exprs as random_
from attack import graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashkit
from flashkit import BlockMask, mods, reference
from flashkit.backends.cuda_common import affine_score, modification, verify
from flashkit.call.arguments import prepare
from flashkit.mods import Mod, codegen, expr
from flashkit.mods.expr import INT64, Array, Expr
from flashkit.spec import AttentionSpec, Operands

LEAST, GREATEST = INT64
random_mask = random_.wide_mask
randoms = st.randoms(use_true_random=False)
quick = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))

# --- the oracle -------------------------------------------------------------------------------------------------------

MEANING: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": abs, "min": min,
    "max": max, "floordiv": lambda x, y: x // y if y else 0, "mod": lambda x, y: x % y if y else 0,
    "where": lambda c, x, y: x if c else y, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": operator.not_,
}  # fmt: skip


def value_of(mod: Mod, b: int, h: int, row: int, q: int, k: int) -> Any:
    known: dict[Expr, Any] = {}
    symbols = {"b": b, "h": h, "row": row, "q": q, "k": k}
    for node in expr.walk([mod.expr]):
        args = [known[a] for a in node.args]
        if node.op == "const":
            value = node.value
        elif node.op in ("symbol", "param"):
            value = {**symbols, **mod.params}[node.value]
        else:
            value = mod.arrays[node.value][tuple(args)].item() if node.op == "load" else MEANING[node.op](*args)
        known[node] = (value + 2**63) % 2**64 - 2**63 if node.kind == "int" else value
    return known[mod.expr]


def visible(mod: Mod, offset: int, rows: range, keys: range, b: int = 0, h: int = 0) -> np.ndarray:
    return np.array([[value_of(mod, b, h, row, row + offset, k) for k in keys] for row in rows])


def assert_states(mod: Mod, states: Any, seen: np.ndarray, block_q: int, block_k: int) -> int:
    """EMPTY tiles have no visible pair, FULL ones have all; the number of tiles that are either."""
    for i, j in np.ndindex(states.shape):
        tile = seen[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k]
        assert states[i, j] in (reference.EMPTY, reference.PARTIAL, reference.FULL)
        assert states[i, j] != reference.EMPTY or not tile.any(), f"visible pairs would be skipped: {mod}"
        assert states[i, j] != reference.FULL or tile.all(), f"hidden pairs would be shown: {mod}"
    return int((states != reference.PARTIAL).sum())


OFFSETS = [0, -5, 3, 2**31, 2**48 - 20, -(2**48)]
SIZES = [(1, 1), (2, 3), (4, 4), (7, 9)]
N_Q, N_K = 7, 9


def problem_of(mod: Mod, offset: int = 0) -> tuple[AttentionSpec, Operands]:
    return operands_.make(1, 1, N_Q, N_K, mask=mod, q_offset=offset)


def words_of(spec: AttentionSpec, operands: Operands, of_array: Callable[[np.ndarray, Any], list[Any]]) -> list[Any]:
    """What generated functions read: a number as it is, an array as `of_array` says."""
    words: list[Any] = []
    for slot in spec.slots:
        if slot.ndim is None:
            words.append(np.int64(operands.params[slot.name]))
        else:
            words += of_array(operands.arrays[slot.name], slot.dtype)
    return words


# --- values and bounds ------------------------------------------------------------------------------------------------


@settings(quick, max_examples=200)
@given(r=randoms)
def test_block_masks_classify_tiles_of_every_size(r: Random) -> None:
    mod, offset = random_mask(r), r.choice(OFFSETS)
    mask = BlockMask.from_mod(mod, N_Q, N_K, 1, 1, q_offset=offset, batch=1, heads=1)
    seen = visible(mod, offset, range(N_Q), range(N_K))
    np.testing.assert_array_equal(mask.to_dense_mask()[0, 0], seen)
    for size in SIZES:
        assert_states(mod, mask.with_blocks(*size).to_dense()[0, 0], seen, *size)


BOUNDS_THAT_WRAP: dict[str, Callable[..., Any]] = {
    "less than the limit of bits": lambda q, k: expr.minimum((q ^ k) // 2, 7) - k * 4096 >= -9000,
    "more than the limit of bits": lambda q, k: expr.maximum((q ^ k) // 2, 3) + k <= 7,
    "product of a remainder of bits": lambda q, k: (q ^ k) % 5 * 2**61 > 0,
    "remainder by the least number": lambda q, k: k % LEAST + 5 <= 0,
    "remainder by the greatest number": lambda q, k: (q - 3) % GREATEST + 2 <= 0,
    "choice of bits": lambda q, k: expr.where(q < k, expr.minimum(q | k, 5), 2) - 3 <= 0,
    "negated limit": lambda q, k: -expr.minimum(q ^ k, 3) - 5 >= 0,
    "absolute limit": lambda q, k: abs(expr.minimum(q ^ k, 3)) > 4,
    "quotient of a limit": lambda q, k: expr.minimum(q ^ k, 3) // -1 + 1 >= 0,
    "divisors that round to one": lambda q, k: LEAST // expr.minimum((q - k) | 3, LEAST + 1) <= 0,
}


@pytest.mark.parametrize("name", BOUNDS_THAT_WRAP)
def test_bounds_that_wrap_prove_nothing(name: str) -> None:
    """No node wraps here, or few do; the ends of their bounds would."""
    mod = mods.mask(lambda b, h, q, k: BOUNDS_THAT_WRAP[name](q, k))
    states = expr.classify(mod.expr)

    def classify(*at: int) -> int:
        env = dict(zip(("row0", "row1", "q0", "q1", "k0", "k1"), at))
        empty, full = (codegen.evaluate(state, env) for state in states)
        return reference.EMPTY if empty else reference.FULL if full else reference.PARTIAL

    assert_classifies(mod, classify)


def test_random_bounds_hold() -> None:
    """`python -m tests.attack --proofs` looks at more of them."""
    found = list(graphs.checked(seed=0, first=0, last=80))
    assert not [each for each in found if each["problem"]]
    assert sum(each["proven"] for each in found) > 80


def corners() -> list[tuple[int, int, int, int]]:
    """Rows row0 ... row1 and keys k0 ... k1 of tiles within N_Q x N_K."""
    r = Random(3)
    tiles = [(0, N_Q - 1, 0, N_K - 1)]
    for _ in range(12):
        row0, k0 = r.randrange(N_Q), r.randrange(N_K)
        tiles.append((row0, min(row0 + r.randrange(3), N_Q - 1), k0, min(k0 + r.randrange(3), N_K - 1)))
    return tiles


def assert_classifies(mod: Mod, classify: Callable[..., int]) -> int:
    """classify(row0, row1, q0, q1, k0, k1); how many tiles are not PARTIAL."""
    proofs = 0
    for offset in OFFSETS:
        seen = visible(mod, offset, range(N_Q), range(N_K))
        for row0, row1, k0, k1 in corners():
            state = classify(row0, row1, row0 + offset, row1 + offset, k0, k1)
            tile = seen[row0 : row1 + 1, k0 : k1 + 1]
            proofs += assert_states(mod, np.array([[state]]), tile, *tile.shape)
    return proofs


def some_masks() -> list[Mod]:
    hashed = [mods.mask(f) for f in HASHES.values()]
    unsigned = mods.mask(lambda b, h, q, k, *, a: a[expr.clip(k, 0, 5)] >= 0, a=random_.WIDE_ARRAYS["ulong"])
    return [unsigned, *hashed, *(random_mask(Random(seed), 1 + seed % 3) for seed in range(36))]


HASHES: dict[str, Callable[..., Any]] = {
    "below": lambda b, h, q, k: (q * 6364136223846793005 + k * 1442695040888963407) < (1 << 62),
    "above": lambda b, h, q, k: (k * 6364136223846793005 - q * 1442695040888963407) >= -(2**61),
    "remainder": lambda b, h, q, k: (q * 6364136223846793005 + k * 1442695040888963407) % 5 < 3,
    "shifted": lambda b, h, q, k: (q * 6364136223846793005 ^ k * 1442695040888963407) // 2**61 >= 1,
    "near the end": lambda b, h, q, k: (q + (GREATEST - 20)) < (k + (GREATEST - 20)),
    "negated": lambda b, h, q, k: -(q + (LEAST + 12) - 12) > k * 2**58,
    "absolute": lambda b, h, q, k: abs((q - k) * 2**62) < 5,
    "divided": lambda b, h, q, k: (q - k + LEAST) // (-1) > 0,
}  # fmt: skip


@pytest.mark.slow
def test_the_cpu_classifies_tiles() -> None:
    pytest.importorskip("numba")
    from flashkit.backends.cpu import modify, objects

    entry = ctypes.CFUNCTYPE(ctypes.c_longlong, *[ctypes.c_longlong] * 9)
    proofs = 0
    for mod in some_masks()[:24:2]:
        spec, operands = problem_of(mod)
        alive: list[np.ndarray] = []

        def placed(array: np.ndarray, dtype: Any, alive: list[np.ndarray] = alive) -> list[Any]:
            alive.append(array.astype(modify.stored_dtype(str(dtype))))
            return [alive[-1].ctypes.data, *alive[-1].shape, *alive[-1].strides]

        values = np.array(words_of(spec, operands, placed), np.int64)
        functions = objects.functions(modify.classify_source(spec))
        function = entry(functions["classify"])
        found = lambda *at, f=function, values=values: f(0, 0, *at, values.ctypes.data if values.size else 0)
        state = {modify.EMPTY: reference.EMPTY, modify.PARTIAL: reference.PARTIAL, modify.FULL: reference.FULL}
        proofs += assert_classifies(mod, lambda *at, f=found, state=state: state[f(*at)])
    assert proofs > 25


def test_cuda_text_classifies_and_wraps(tmp_path: Path) -> None:
    """Compiled as C++, in which overflow of signed integers means nothing: the compiler traps where one happens."""
    from flashkit.backends.cupy_raw import modify

    masks, texts = some_masks(), ["enum { EMPTY, PARTIAL, FULL };\nstruct Params { const long long *values; };"]
    for n, mod in enumerate(masks):
        spec, _ = problem_of(mod)
        of = modify._function(spec, "int classify", modify._CORNERS, list(spec.tile_state), modify.STATE)
        seen = modify._function(spec, "bool visible", modify._PAIR, [spec.mask])
        texts.append(f"namespace m{n} {{\n{of}{seen}}}\n")
        texts.append(
            f'extern "C" int classify{n}(long long row0, long long row1, long long q0, long long q1, long long k0, '
            f"long long k1, Params p) {{ return m{n}::classify(0, 0, row0, row1, q0, q1, k0, k1, p); }}\n"
            f'extern "C" int visible{n}(long long row, long long q, long long k, Params p) '
            f"{{ return m{n}::visible(0, 0, row, q, k, p); }}\n"
        )
    flags = ["-ftrapv", "-fsanitize=signed-integer-overflow", "-fsanitize-undefined-trap-on-error"]
    functions, proofs = cpp.compiled("\n".join(texts), tmp_path, *flags), 0
    for n, mod in enumerate(masks):
        spec, operands = problem_of(mod)
        words = words_of(spec, operands, lambda x, _: [x.ctypes.data, *(s // x.itemsize for s in x.strides)])
        values = np.array([*words, 0], np.int64)
        integers = lambda *at, values=values: [ctypes.c_longlong(x) for x in (*at, values.ctypes.data)]
        classify, seen = getattr(functions, f"classify{n}"), getattr(functions, f"visible{n}")
        proofs += assert_classifies(mod, lambda *at, f=classify, integers=integers: f(*integers(*at)))
        for offset in OFFSETS:
            found = [[seen(*integers(row, row + offset, k)) for k in range(N_K)] for row in range(N_Q)]
            np.testing.assert_array_equal(found, visible(mod, offset, range(N_Q), range(N_K)), str(mod))
    assert proofs > 100


class Wide(ast.NodeTransformer):
    """Makes literals int64, which they are in Numba: Python's own do not divide by zero."""

    def visit_Constant(self, node: ast.Constant) -> Any:
        return ast.Call(ast.Name("I", ast.Load()), [node], []) if type(node.value) is int else node


def test_numba_cuda_text_classifies_and_wraps() -> None:
    """Its Python text, run as Python on NumPy's integers."""
    from flashkit.backends.numba_cuda import modify

    proofs = 0
    for mod in some_masks():
        spec, operands = problem_of(mod)
        words = words_of(spec, operands, lambda x, _: [x.ravel(), *(np.int64(s // x.itemsize) for s in x.strides)])
        scope = {
            "np": np, "F": np.float64, "I": lambda x: np.asarray(x).astype(np.int64)[()], "device": lambda f: f,
            "load": lambda _, array, at: array[at], "EMPTY": reference.EMPTY, "PARTIAL": reference.PARTIAL,
            "FULL": reference.FULL, "LEAST_INTEGER": LEAST, "GREATEST_INTEGER": GREATEST, "MAX_BOX": 1024,
            "minimum": np.minimum, "maximum": np.maximum,
        }  # fmt: skip
        exec(compile(ast.fix_missing_locations(Wide().visit(ast.parse(modify.text(spec)))), "mask", "exec"), scope)
        p = SimpleNamespace(values=words)
        integers = lambda *at: [np.int64(x) for x in (0, 0, *at)]
        with np.errstate(all="ignore"):
            proofs += assert_classifies(
                mod, lambda *at, f=scope["classify"], integers=integers, p=p: f(*integers(*at), p)
            )
            for offset in OFFSETS[:3]:
                found = [
                    [bool(scope["visible"](*integers(row, row + offset, k), p)) for k in range(N_K)]
                    for row in range(N_Q)
                ]
                np.testing.assert_array_equal(found, visible(mod, offset, range(N_Q), range(N_K)), str(mod))
    assert proofs > 100


# --- attention --------------------------------------------------------------------------------------------------------


def inputs(n_q: int = 150, n_k: int = 210) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, n, 16)) for n in (n_q, n_k, n_k)]


def test_a_fresh_kernel_is_held_against_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not against an algorithm with tiles, which could be wrong about them as the kernel is."""
    monkeypatch.setattr(reference.algorithms, "tile_states", None)
    spec, _ = problem_of(mods.mask(HASHES["below"]))
    problem = verify.sample_problem(spec)
    out, _ = reference.standard(spec, problem)
    np.testing.assert_array_equal(verify._expected(spec, problem, "forward")["out"], out)
    assert set(verify._expected(spec, problem, "backward")) == {"dq", "dk", "dv"}


# --- ready-made masks lose nothing ------------------------------------------------------------------------------------


def ready_made() -> dict[str, Mod]:
    ids = np.repeat(np.arange(8), 64)
    blocks = {
        "local": BlockMask.local(512, 512, 2), "dilated blocks": BlockMask.dilated(512, 512, 2, 3),
        "strided": BlockMask.strided(512, 512, 2), "fixed": BlockMask.fixed(512, 512, 2),
        "butterfly": BlockMask.butterfly(1024, 1024), "bigbird": BlockMask.bigbird(1024, 1024),
        "longformer": BlockMask.longformer(512, 512, 32, [1, 5], 2),
        "causal blocks": BlockMask.from_mod(mods.causal(), 256, 300),
        "window blocks": BlockMask.from_mod(mods.sliding_window(5, 3), 256, 300),
        "window blocks of entries": BlockMask.from_mod(mods.sliding_window(5, 3), 256, 300, q_offset=[1, -2], batch=2),
        "grid": BlockMask.from_dense(np.ones((2, 4, 4), bool), 64, 64),
    }  # fmt: skip
    return {
        "causal": mods.causal(), "window": mods.sliding_window(5, 3), "left": mods.sliding_window(5, None),
        "right": mods.sliding_window(None, 3), "all": mods.sliding_window(None, None), "prefix": mods.prefix_lm(7),
        "dilated": mods.dilated(3), "documents": mods.document(ids), "documents of keys": mods.document(ids, ids + 0),
        "documents of entries": mods.document(ids[None]), "array": mods.visible(np.ones((2, 1, 9, 9), bool)),
        "joined": mods.causal() & mods.sliding_window(5, 3) | ~mods.prefix_lm(3),
        **{name: block.mod for name, block in blocks.items()},
    }  # fmt: skip


@pytest.mark.parametrize("name", ready_made())
def test_ready_made_masks_cannot_overflow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tiles are classified by the same graph and text as if there were no overflow."""
    mod = ready_made()[name]
    narrow = expr.int32_arrays({n: array.dtype for n, array in mod.arrays.items()})
    found = expr.classify(mod.expr, narrow)
    languages: list[codegen.Language] = ["cuda", "numba", "numpy"]
    texts = [codegen.render(graphs, language, "", narrow) for language in languages for graphs in (found, [mod.expr])]
    assert not expr.reaches([mod.expr, *found], narrow)[1]
    monkeypatch.setattr(expr.intervals, "_where_sure", lambda *found: found)
    monkeypatch.setattr(codegen, "reaches", lambda *_: ({}, set()))
    plain = expr.classify.__wrapped__, expr.bounds.__wrapped__
    monkeypatch.setattr(expr.intervals, "bounds", plain[1])
    empty, full = plain[0](mod.expr)
    assert empty is found[0] and full is found[1]
    assert texts == [codegen.render(graphs, lang, "", narrow) for lang in languages for graphs in (found, [mod.expr])]


def test_what_is_found_at_run_time() -> None:
    """Sums of int64 elements and products of numbers may overflow; where they don't, their bounds are as tight."""
    starts = np.array([0, 40, 80])
    q, k = expr.Q, expr.K
    graphs = {
        "element": k <= q + Array("starts", 1, "int")[expr.B],
        "product": k * expr.param("few", "int") <= q * expr.param("several", "int"),
    }
    for graph in graphs.values():
        assert expr.reaches([graph])[1]
        empty, full = (
            codegen.evaluate(
                e, {"b": 1, "q0": 0, "q1": 9, "k0": np.array([0, 30, 60, 900]), "k1": np.array([9, 55, 70, 999]),
                    "starts": starts, "few": 3, "several": 10},
            )
            for e in expr.classify(graph)
        )  # fmt: skip
        assert empty.tolist() == [False, False, True, True]
        assert full.tolist() == [graph is graphs["element"], False, False, False]
    assert not expr.reaches([graphs["element"]], expr.int32_arrays({"starts": np.int32}))[1]


def test_wide_numbers_are_exact() -> None:
    for number in (2**60, 2**60 + 1, GREATEST, -(2**60) - 1, LEAST, -1):
        mod = mods.mask(lambda b, h, q, k, *, n: k + n < q, n=number)
        wide = abs(number) > expr.MAX_PARAM
        assert len(mod.params) == 1 + wide
        assert all(abs(x) <= expr.MAX_PARAM for x in mod.params.values())
        k = np.arange(-9, 9)
        assert [bool(x) for x in mod.evaluate(0, 0, -3, k)] == [expr.wrapped(int(x) + number) < -3 for x in k]


# --- what assumes that nothing wraps ----------------------------------------------------------------------------------


def test_no_shift_is_assumed_where_one_wraps() -> None:
    for graph in (expr.Q + GREATEST < expr.K + GREATEST, expr.Q - LEAST <= expr.K - LEAST):
        assert not modification.shifts(graph)
        states = [bool(codegen.evaluate(graph, {"q": n, "k": n + 1})) for n in (-1, 0, 1)]
        assert len(set(states)) == 2
    assert modification.shifts(expr.Q + 7 < expr.K + 7)


def test_no_line_is_assumed_where_one_wraps() -> None:
    s = expr.S
    assert affine_score.affine_score(s + expr.to_float(expr.K * 3)) is not None
    assert affine_score.affine_score(s + expr.to_float(expr.K * 2**62)) is None
    assert affine_score.affine_score(s + expr.to_float((expr.Q - expr.K) * expr.param("n", "int"))) is None


# --- errors -----------------------------------------------------------------------------------------------------------

TABLE = np.arange(10.0)
N = 8
BEYOND: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "product": (lambda t, q, k, n: t[k * n], {"n": 2**61}),
    "product of a constant": (lambda t, q, k, n: t[k * 2**61], {}),
    "product of positions": (lambda t, q, k, n: t[q * k * q * k * n], {"n": 2**59}),
    "sum": (lambda t, q, k, n: t[k + n], {"n": GREATEST}),
    "sum that returns": (lambda t, q, k, n: t[(k + n) - n], {"n": GREATEST}),
    "sum of parts": (lambda t, q, k, n: t[n + n + k], {"n": -(2**63)}),
    "difference": (lambda t, q, k, n: t[n - k], {"n": LEAST + 2}),
    "constant difference": (lambda t, q, k, n: t[(LEAST + 2) - k], {}),
    "negation": (lambda t, q, k, n: t[-(k * 0 + n)], {"n": LEAST}),
    "absolute": (lambda t, q, k, n: t[abs(n + k * 0)], {"n": LEAST}),
    "quotient": (lambda t, q, k, n: t[(n + k * 0) // -1], {"n": LEAST}),
    "least": (lambda t, q, k, n: t[expr.minimum(k * n, 5)], {"n": 2**61}),
    "greatest": (lambda t, q, k, n: t[expr.maximum(k * n, 5)], {"n": 2**61}),
    "choice": (lambda t, q, k, n: t[expr.where(q < k, k * n, 5)], {"n": 2**61}),
    "bits": (lambda t, q, k, n: t[k & n], {"n": 2**62}),
    "limit of bits": (lambda t, q, k, n: t[expr.minimum((q ^ k) // 2, 7) - k * 4096], {}),
    "element": (lambda t, q, k, n: t[n[k] + k], {"n": np.full(N, GREATEST)}),
    "unsigned element": (lambda t, q, k, n: t[n[k]], {"n": np.full(N, 2**63 + 3, np.uint64)}),
    "unsigned sum": (lambda t, q, k, n: t[n[k] + k], {"n": np.full(N, 2**64 - 4, np.uint64)}),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_an_index_that_overflows_is_refused(name: str) -> None:
    of, values = BEYOND[name]
    q, k, v = inputs(N, N)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any, n: Any = 0) -> Any:
        return s + of(table, q, k, n)

    with pytest.raises(ValueError, match=r"score_mod: .* 0 to 9 of axis 0 of table \(shape \(10,\)\)"):
        flashkit.attention(q, k, v, score_mod=mods.score(mod, table=TABLE, **values), backend="reference")


WITHIN: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "clip of a hash": (lambda t, q, k, n: t[expr.clip(q * n + k, 0, 9)], {"n": 6364136223846793005}),
    "remainder of a hash": (lambda t, q, k, n: t[(q * n + k) % 10], {"n": 6364136223846793005}),
    "clip of bits": (lambda t, q, k, n: t[expr.clip(k & n, 0, 9)], {"n": 2**62 + 5}),
    "remainder by a number": (lambda t, q, k, n: t[q * k % n], {"n": 10}),
    "product": (lambda t, q, k, n: t[k * n // n], {"n": 2**55}),
    "element": (lambda t, q, k, n: t[n[k] - 2**40], {"n": np.arange(N) + 2**40}),
    "unsigned element": (lambda t, q, k, n: t[n[k] + 1], {"n": np.arange(N, dtype=np.uint64)}),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", WITHIN)
def test_an_index_within_its_array_is_taken(name: str, backend: str) -> None:
    if backend == "cpu":
        pytest.importorskip("numba")
    of, values = WITHIN[name]
    q, k, v = inputs(N, N)

    def mod(s: Any, b: Any, h: Any, q: Any, k: Any, *, table: Any, n: Any) -> Any:
        return s + of(table, q, k, n)

    traced = mods.score(mod, table=TABLE, **values)
    problem, operands, _ = prepare(q, k, v, score_mod=traced)
    right, _ = reference.standard(problem.spec, operands)
    np.testing.assert_allclose(flashkit.attention(q, k, v, score_mod=traced, backend=backend), right, atol=1e-12)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70, np.uint64(2**63)])
def test_numbers_beyond_int64_are_refused(number: Any) -> None:
    with pytest.raises(ValueError, match=rf"limit of a modification: expected an integer within int64, got .*{number}"):
        mods.mask(lambda b, h, q, k, *, limit: k < limit, limit=number)


def far(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k + 2**70 < q


def test_constants_beyond_int64_are_refused() -> None:
    with pytest.raises(ValueError, match=rf"expected integers within int64, got {2**70}"):
        mods.mask(far)
    assert mods.score(lambda s, b, h, q, k: s * 2**70).expr is expr.S * 2.0**70


def test_constants_are_folded_as_kernels_compute() -> None:
    c = expr.const
    assert c(2**62) * 4 is c(0)
    assert c(GREATEST) + 1 is c(LEAST)
    assert -c(LEAST) is c(LEAST)
    assert abs(c(LEAST)) is c(LEAST)
    assert c(LEAST) // -1 is c(LEAST)
    assert c(LEAST) % -1 is c(0)


FAR = [LEAST, np.array([LEAST]), np.uint64(2**63), 2**48 + 1, np.array([2**64 - 1], np.uint64)]


@pytest.mark.parametrize("offset", FAR)
def test_positions_too_far_are_refused(offset: Any) -> None:
    q, k, v = inputs(N, N)
    with pytest.raises(ValueError, match="q_offset"):
        flashkit.attention(q, k, v, causal=True, q_offset=offset, backend="reference")
    with pytest.raises(ValueError, match=r"q_offset|2\^48"):
        BlockMask.from_mod(mods.causal(), N, N, q_offset=offset)


def test_block_masks_too_large_are_refused() -> None:
    with pytest.raises(ValueError, match="n_k: expected an integer from 0 to 281474976710656, got"):
        BlockMask.from_mod(mods.causal(), 8, 2**50, 128, 2**40, q_offset=0)


@pytest.mark.parametrize("dtype", ["bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))])
def test_arrays_are_narrow_up_to_32_bits(dtype: str) -> None:
    """A sum with an element of 64 bits may overflow, whatever its sign."""
    assert expr.int32_arrays({"a": np.dtype(dtype)}) == (frozenset() if dtype.endswith("64") else {"a"})
