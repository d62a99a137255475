"""Expressions, modifications, block masks and plans are pickled and copied, and malformed pickles are refused."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import same

import flashkit
from flashkit import mods
from flashkit.call.arguments import prepare
from flashkit.mods import expr
from flashkit.mods.expr import Expr
from flashkit.mods.expr.graph import KINDS, from_rows
from flashkit.mods.mod import _restored

RNG = np.random.default_rng(0)
COPIES = {
    **{f"pickle{n}": lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in (2, pickle.HIGHEST_PROTOCOL)},
    "copy": copy.copy, "deepcopy": copy.deepcopy,
}  # fmt: skip
MODS = {
    "causal": mods.causal(),
    "window": mods.sliding_window(3, 1),
    "document": mods.document(np.repeat([0, 1], [20, 20])),
    "joined": (mods.causal() & ~mods.dilated(3)) | mods.prefix_lm(2),
    "wide": mods.mask(lambda b, h, q, k, *, n: k * n % 3 != q, n=2**62 + 1),
    "alibi": mods.alibi([0.5, 0.25]),
    "function": mods.score(lambda s, b, h, q, k, *, t: flashkit.tanh(s * t[h]), t=[1.0, 0.5]),
}  # fmt: skip


@pytest.fixture(params=COPIES)
def copied(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return COPIES[request.param]


def test_an_expression_of_another_process(program: Callable[..., str]) -> None:
    """Where nothing of it is interned yet."""
    mod = mods.mask(lambda b, h, q, k, *, unusual: (k * 1234567 < unusual) | (q == k), unusual=5)
    program(f"""
        import pickle
        from flashkit import mods
        mod = pickle.loads({pickle.dumps(mod)!r})
        assert mod.key == {mod.key!r} and mod.params == {{"unusual": 5}}
        assert mod.expr is mods.mask(lambda b, h, q, k, *, unusual: (k * 1234567 < unusual) | (q == k), unusual=9).expr
    """)


def test_deep_graphs(copied: Callable[[Any], Any]) -> None:
    """No recursion: a chain of a thousand terms is a thousand nodes deep."""
    graph = expr.K
    for i in range(1000):
        graph = expr.maximum(graph * 3, expr.Q + i)
    assert copied(graph) is graph


@pytest.mark.parametrize("name", MODS)
def test_mods(name: str, copied: Callable[[Any], Any]) -> None:
    mod = MODS[name]
    again = copied(mod)
    assert again.expr is mod.expr and again.params == mod.params and again.kind == mod.kind
    at = {"b": 0, "h": 1, "q": np.arange(12)[:, None], "k": np.arange(12)}
    scores = {"s": 1.5} if mod.kind == "score" else {}
    np.testing.assert_array_equal(again.evaluate(**at, **scores), mod.evaluate(**at, **scores))
    for array in again.arrays:
        assert mod.arrays[array].dtype == again.arrays[array].dtype


def test_a_deep_copy_has_arrays_of_its_own() -> None:
    mod = mods.alibi(np.array([0.5, 0.25]))
    again = copy.deepcopy(mod)
    mod.arrays["slopes"][:] = 9
    assert again.arrays["slopes"].tolist() == [0.5, 0.25]


def test_block_masks(copied: Callable[[Any], Any]) -> None:
    mask = flashkit.BlockMask.from_mod(MODS["document"] & mods.causal(), 40, 40, 8, 16)
    mask.rows()  # found lists are no part of it
    again = copied(mask)
    np.testing.assert_array_equal(again.to_dense(), mask.to_dense())
    assert (again.block_q, again.block_k, again.n_q) == (8, 16, 40)
    assert not any(array.flags.writeable for array in again.mod.arrays.values())
    q, k, v = RNG.standard_normal((3, 2, 40, 8))
    same(flashkit.attention(q, k, v, block_mask=again), flashkit.attention(q, k, v, block_mask=mask))


def test_found_tile_lists_are_not_pickled() -> None:
    """Kernels read them without checks."""
    mask = flashkit.BlockMask.from_mod(mods.causal(), 4096, 4096, 8, 8)
    small = len(pickle.dumps(mask))
    mask.rows()
    assert len(pickle.dumps(mask)) == small
    assert "_rows" not in vars(copy.copy(mask))


PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "return_lse": True, "scale": 0.3, "backend": "cpu"},
    "scores": {"softcap": 3.0, "alibi_slopes": np.array([0.5, 0.25, 0.1, 0.05], np.float32), "window": (9, 2)},
    "arrays": {"bias": RNG.standard_normal((4, 40, 40)).astype("float16"), "mask": RNG.random((40, 40)) < 0.8},
    "lengths": {"kv_lengths": [17, 33], "q_offset": [3, 5], "causal": True},
    "queries": {"kv_lengths": [17, 33], "q_lengths": [9, 40], "causal": True},
    "sinks": {"sinks": np.ones(4, np.float32), "deterministic": True},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "functions": {"score_mod": lambda s, b, h, q, k: s - 0.01 * abs(q - k), "mask_mod": MODS["document"]},
    "blocks": {"block_mask": flashkit.BlockMask.local(40, 40, left_blocks=1, block=8)},
    "reference": {"backend": "reference", "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("how", ["pickle2", "deepcopy"])
def test_plans(name: str, how: str) -> None:
    q, k, v = RNG.standard_normal((3, 2, 4, 40, 16), dtype=np.float32)
    planned = flashkit.plan(q, k, v, **PLANS[name])
    again = COPIES[how](planned)
    same(again(q, k, v), planned(q, k, v))
    assert again.backend == planned.backend and again.problem.describe() == planned.problem.describe()
    assert pickle.dumps(again) == pickle.dumps(COPIES[how](again))  # nothing is lost on the way


PACKED = {"cu_seqlens": [0, 10, 10, 37], "causal": True, "score_mod": lambda s, b, h, q, k: s * (b + 1.0)}
PAGED = {"page_table": np.array([[3, 0, -1], [1, 2, 4]]), "kv_lengths": [9, 24], "causal": True}


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(40, 4, 16), (40, 2, 16), (40, 2, 16)], PACKED),
        ([(40, 4, 16), (60, 2, 16), (60, 2, 8)], PACKED | {"cu_seqlens": ([0, 10, 10, 37], [0, 5, 50, 60])}),
        ([(2, 4, 5, 16), (5, 8, 2, 16), (5, 8, 2, 16)], PAGED),
        ([(2, 5, 4, 16), (5, 8, 2, 16), (5, 8, 2, 16)], PAGED | {"layout": "bnhd", "return_lse": True}),
        ([(6, 4, 16), (5, 8, 2, 16), (5, 8, 2, 16)], PAGED | {"cu_seqlens": [0, 1, 5]}),
    ],
    ids=["packed", "pair", "paged", "bnhd", "packed and paged"],
)
def test_plans_of_sequences(shapes: Any, options: dict[str, Any]) -> None:
    q, k, v = (RNG.standard_normal(shape, dtype=np.float32) for shape in shapes)
    planned = flashkit.plan(q, k, v, **options)
    again = pickle.loads(pickle.dumps(planned))
    same(again(q, k, v), planned(q, k, v))
    assert again.problem.describe() == planned.problem.describe()


def test_plans_keep_the_layout_that_they_are_for() -> None:
    import ml_dtypes

    wide = RNG.standard_normal((3, 2, 40, 4, 24)).astype(ml_dtypes.bfloat16)
    q, k, v = wide[:, ..., ::-1, 3:19]  # rows backwards, at odd distances
    memory = np.zeros(q.nbytes + 1, np.uint8)[1:]
    shifted = np.ndarray(q.shape, q.dtype, memory)
    shifted[...] = q
    for tensors in ((q, k, v), (shifted, k, v)):
        planned = flashkit.plan(*tensors, layout="bnhd", causal=True)
        again = pickle.loads(pickle.dumps(planned))
        same(again(*tensors), planned(*tensors))
    with pytest.raises(ValueError, match="q: expected an array like the planned one, got one that is aligned"):
        again(np.ascontiguousarray(q), k, v)
    with pytest.raises(ValueError, match="k: expected strides"):
        again(shifted, np.ascontiguousarray(k), v)


def test_a_pickle_of_a_plan_is_what_was_asked_for_then() -> None:
    """Whatever happens to the caller's arrays of integers and sinks."""
    q, k, v = RNG.standard_normal((3, 2, 4, 40, 16), dtype=np.float32)
    given: dict[str, Any] = {"kv_lengths": np.array([17, 33]), "q_offset": np.array([3, 5]), "sinks": np.ones(4, "f4")}
    planned = flashkit.plan(q, k, v, causal=True, **given)
    expected = planned(q, k, v)
    for array in given.values():
        array[...] = 2
    same(planned(q, k, v), expected)
    same(pickle.loads(pickle.dumps(planned))(q, k, v), expected)


def test_specs(copied: Callable[[Any], Any], program: Callable[..., str]) -> None:
    """Equal in another process too: what a spec keeps for comparisons holds in its own process alone."""
    q = np.zeros((1, 1, 4, 8), np.float32)
    spec = prepare(q, q, q, causal=True, softcap=2.0)[0].spec
    known = {spec: 1}
    assert copied(spec) == spec and known[copied(spec)] == 1
    if copied is COPIES["deepcopy"]:
        program(f"""
            import pickle
            import numpy as np
            from flashkit.call.arguments import prepare
            spec = pickle.loads({pickle.dumps(spec)!r})
            q = np.zeros((1, 1, 4, 8), np.float32)
            other = prepare(q, q, q, causal=True, softcap=2.0)[0].spec
            assert spec == other and hash(spec) == hash(other) and spec is not other
        """)


def test_every_operation_says_what_it_takes() -> None:
    assert set(KINDS) == set(expr.OPS)


# --- malformed pickles ------------------------------------------------------------------------------------------------

K = "symbol", (), "k", "int"
BAD_ROWS = [
    (), (K, 5), (("symbol", "k"),), (K, ("neg", (1,), None, "int")), (K, ("neg", (-1,), None, "int")),
    (K, ("neg", (True,), None, "int")), (K, ("neg", (0, 0), None, "int")), (K, ("neg", (0,), None, "float")),
    (K, ("neg", (0,), None, "bool")), (K, ("not", (0,), None, "bool")), (K, ("and", (0, 0), None, "bool")),
    (K, ("system", (0,), None, "int")), (K, ("load", (), "a", "int")), (K, ("load", (0,), "a)", "int")),
    (K, ("lt", (0, 0), None, "bool"), ("load", (1,), "a", "int")), (("param", (), "import", "int"),),
    (("const", (), "x", "int"),), (("const", (), 1.5, "int"),), (("const", (), True, "int"),),
    (K, ("const", (0,), 1, "int")), (("symbol", (), "k;", "int"),), (K, ("where", (0, 0, 0), None, "int")),
    (K, ("exp", (0,), None, "float")), (K, ("add", (0, 0), "x", "int")), (K, ("div", (0, 0), None, "float")),
]  # fmt: skip


@pytest.mark.parametrize("rows", BAD_ROWS, ids=str)
def test_malformed_expressions(rows: Any) -> None:
    with pytest.raises(ValueError, match="expression"):
        from_rows(rows)


def load(name: str, *indices: Expr) -> Expr:
    return Expr("load", indices, name, "int")


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (("mask", expr.K, {}, {}), ValueError),  # an int is no mask
        (("score", expr.TRUE, {}, {}), ValueError),
        (("mask", expr.to_float(expr.K) > expr.S, {}, {}), ValueError),
        (("mask", expr.Q0 < expr.K, {}, {}), ValueError),
        (("mask", expr.symbol("p.values[3]") < expr.K, {}, {}), ValueError),
        (("both", expr.TRUE, {}, {}), ValueError),
        ((["mask"], expr.TRUE, {}, {}), ValueError),
        (("mask", "k <= q", {}, {}), ValueError),
        (("mask", Expr("load_min", (expr.K, expr.K), "a", "int") < 3, {}, {"a": np.arange(3)}), ValueError),
        (("mask", load("a", expr.K) < load("a", expr.K, expr.Q), {}, {"a": np.arange(3)}), ValueError),
        (("mask", load("a", expr.K) < 3, {}, {}), TypeError),  # no array
        (("mask", load("a", expr.K) < 3, {}, {"a": np.zeros(3)}), TypeError),  # floats
        (("mask", load("a", expr.K) < 3, {}, {"a": np.zeros((3, 3), int)}), TypeError),
        (("mask", load("a", expr.K) < 3, {}, {"a": np.array([None])}), TypeError),
        (("mask", expr.param("n", "int") < expr.K, {}, {}), TypeError),
        (("mask", expr.param("n", "int") < expr.K, {"n": 1.5}, {}), TypeError),
        (("mask", expr.param("n", "int") < expr.K, {"n": 2**62}, {}), ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_malformed_mods(state: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _restored(*state)


def test_a_malformed_block_mask() -> None:
    mask = flashkit.BlockMask.from_mod(mods.causal(), 8, 8)
    make, arguments = mask.__reduce__()
    for change in ({1: -1}, {3: 0}, {2: 2.5}, {0: mods.causal()}):
        with pytest.raises((TypeError, ValueError)):
            make(*(change.get(i, x) for i, x in enumerate(arguments)))


def test_malformed_plans() -> None:
    q, k, v = RNG.standard_normal((3, 2, 16, 8), dtype=np.float32)
    planned = flashkit.plan(q, k, v, kv_lengths=[16])
    make, (tensors, options, *rest) = planned.__reduce__()
    kind, shape, strides, dtype, place = tensors[0]
    bad_tensors = [
        [], tensors[:2], [(kind, (-1, 16, 8), strides, dtype, place), *tensors[1:]],
        [(kind, shape, strides[:2], dtype, place), *tensors[1:]], [(kind, shape, strides, "O", place), *tensors[1:]],
        [(kind, (2, 15, 7), strides, dtype, place), *tensors[1:]],
    ]  # fmt: skip
    for each in bad_tensors:
        with pytest.raises((TypeError, ValueError)):
            make(each, options, *rest)
    for change in (
        {"kv_lengths": np.array([17])}, {"kv_lengths": np.array([-1])}, {"scale": "x"}, {"score_mod": 5},
        {"dropout_p": 1.5}, {"layout": "nd"}, {"other": 1},
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            make(tensors, options | change, *rest)
    with pytest.raises(ValueError, match="pickled plan"):
        make(tensors, list(options), *rest)
    with pytest.raises(ValueError, match="backend: expected one of"):
        make(tensors, options, "nonsense", *rest[1:])
    for follows in ([17], [-1], [1, 1], [0.5], "x"):
        with pytest.raises((TypeError, ValueError)):
            make(tensors, options, *rest[:2], follows, False)
