"""Which backend runs a call: asked for, ranked by the profile, refused with a reason, brought by another package."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import near

import flashkit
from flashkit import attention, attention_vjp, dispatch, use_backend
from flashkit.call.arguments import prepare
from flashkit.devices import profiles
from flashkit.errors import UnsupportedError
from flashkit.reference import standard, standard_gradients
from flashkit.spec import AttentionSpec, Direction, Gradients, Operands, Problem, Verdict


@dataclass
class Plan:
    spec: AttentionSpec
    tile: str = "no tile"
    why: str = "there is only one way"


class FakeBackend:
    """Someone else's backend: the definition, with a record of what was asked of it."""

    name = "fake"
    array_kinds = ("numpy",)
    device_kind = "cpu"
    efficiency = 0.01
    last_resort = False
    verdict = Verdict(True)
    here = Verdict(True)

    def __init__(self) -> None:
        self.calls: list[str] = []

    def available(self) -> Verdict:
        return self.here

    def supports(self, problem: Problem) -> Verdict:
        return self.verdict

    def plan(self, problem: Problem, profile: Any) -> Plan:
        self.calls.append("plan")
        return Plan(problem.spec)

    def forward(self, plan: Plan, operands: Operands) -> None:
        self.calls.append("forward")
        operands.out[...], operands.lse[...] = standard(plan.spec, operands)

    def backward(self, plan: Plan, operands: Operands, gradients: Gradients) -> None:
        self.calls.append("backward")
        found = standard_gradients(plan.spec, operands, gradients.dout, gradients.dlse)
        gradients.dq[...], gradients.dk[...], gradients.dv[...] = found.dq, found.dk, found.dv


class Point:
    """Stands in for an entry point."""

    def __init__(self, name: str, load: Any) -> None:
        self.name, self.load = name, load


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice from outside, no plan from before, and the backends as installed afterwards."""
    monkeypatch.delenv("FLASHKIT_BACKEND", raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Put backends beside the installed ones, or in their place, through entry points."""
    from importlib import metadata

    ask = metadata.entry_points
    real = list(ask(group=dispatch.ENTRY_POINTS))

    def put(points: dict[str, Any], alone: bool = False) -> None:
        made = [Point(name, load) for name, load in points.items()]

        def entry_points(**selection: str) -> Any:
            if selection != {"group": "flashkit.backends"}:
                return ask(**selection)  # other packages have extensions too
            return made if alone else [*real, *made]

        monkeypatch.setattr(metadata, "entry_points", entry_points)
        for function in (dispatch.registry, dispatch.load_all):
            function.cache_clear()

    yield put
    monkeypatch.undo()
    for function in (dispatch.registry, dispatch.load_all):
        function.cache_clear()


@pytest.fixture
def fake(install: Any) -> FakeBackend:
    backend = FakeBackend()
    install({"fake": lambda: lambda: backend})
    return backend


def x(n: int = 9, d: int = 8, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(n).standard_normal((1, 2, n, d)).astype(dtype)


def problem(**options: Any) -> Problem:
    return prepare(x(), x(), x(), **options)[0]


def chosen(**options: Any) -> str:
    return dispatch.plan(problem(), **options)[0].name


# --- asking for one ---------------------------------------------------------------------------------------------------


def test_the_installed_backends() -> None:
    assert {"cpu", "reference"} <= set(dispatch.registry())
    for name, backend in dispatch.registry().items():
        assert backend.name == name
        assert backend.array_kinds and set(backend.array_kinds) <= {"numpy", "cupy"}
        assert backend.device_kind in ("cpu", "cuda")


def test_a_block_that_ends_in_an_error_asks_no_longer() -> None:
    with pytest.raises(RuntimeError), use_backend("reference"):
        raise RuntimeError
    assert chosen() == "cpu"


def test_a_block_is_of_its_thread() -> None:
    with use_backend("reference"), ThreadPoolExecutor() as pool:
        assert pool.submit(chosen).result() == "cpu"


def test_the_process_may_ask_for_repeatable_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls that are kept too: the variable belongs to what they are kept by."""
    x = np.ones((1, 1, 4, 8), np.float32)
    plain, before = prepare(x, x, x)[0].spec, dispatch.state()
    assert not plain.deterministic
    monkeypatch.setenv("FLASHKIT_DETERMINISTIC", "1")
    assert prepare(x, x, x)[0].spec == prepare(x, x, x, deterministic=True)[0].spec != plain
    assert dispatch.state() != before
    monkeypatch.setenv("FLASHKIT_DETERMINISTIC", "0")
    assert prepare(x, x, x)[0].spec == plain


@pytest.mark.parametrize("source", ["backend", "use_backend", "FLASHKIT_BACKEND"])
def test_unknown_names(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    def ask() -> None:
        with use_backend("tpu" if source == "use_backend" else None):
            attention(x(), x(), x(), backend="tpu" if source == "backend" else None)

    if source == "FLASHKIT_BACKEND":
        monkeypatch.setenv("FLASHKIT_BACKEND", "tpu")
    with pytest.raises(ValueError) as caught:
        ask()
    assert all(word in str(caught.value) for word in (source, "'tpu'", "cpu, ", "reference"))


# --- refusing ---------------------------------------------------------------------------------------------------------


def test_what_is_asked_for_is_not_replaced(fake: FakeBackend) -> None:
    """A forced backend that cannot do it is an error, with its reason and the problem, and not a silent fallback."""
    fake.verdict = Verdict(False, "head dim 8 is not my favourite")
    assert chosen() == "cpu"
    for ask in ({"backend": "fake"}, {}):
        with pytest.raises(UnsupportedError) as caught, use_backend("fake"):
            attention(x(), x(), x(), causal=True, **ask)
        text = str(caught.value)
        assert "fake: head dim 8 is not my favourite" in text and "cpu:" not in text
        assert all(
            word in text
            for word in ("float32", "batch 1", "heads 2", "queries 9", "keys 9", "head dim 8", "mask", "numpy")
        )
    assert isinstance(caught.value, NotImplementedError)


def test_every_refusal_is_listed(install: Any) -> None:
    class NotHere(FakeBackend):
        name, here = "not_here", Verdict(False, "no such device")

    class OfAnotherLibrary(FakeBackend):
        name, array_kinds = "of_another_library", ("cupy",)

    class Unwilling(FakeBackend):
        name, verdict = "unwilling", Verdict(False, "not today")

    backends = (NotHere, OfAnotherLibrary, Unwilling)
    install({b.name: lambda b=b: b for b in backends}, alone=True)
    with pytest.raises(UnsupportedError) as caught:
        attention(x(), x(), x())
    for said in (
        "not_here: no such device",
        "of_another_library: takes cupy arrays, not numpy",
        "unwilling: not today",
    ):
        assert said in str(caught.value)


def test_nothing_installed(install: Any) -> None:
    install({}, alone=True)
    with pytest.raises(UnsupportedError, match="none is installed"):
        attention(x(), x(), x())


# --- someone else's backend -------------------------------------------------------------------------------------------


def test_another_package_brings_a_backend(fake: FakeBackend) -> None:
    """Found by its entry point, used when asked for, forward and backward."""
    assert "fake" in dispatch.registry()
    q = x(dtype=np.float64)
    out, vjp = attention_vjp(q, q, q, causal=True, backend="fake")
    expected, vjp_expected = attention_vjp(q, q, q, causal=True, backend="cpu")
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    near(vjp(out), vjp_expected(out), rtol=1e-10, atol=1e-12)
    assert fake.calls == ["plan", "forward", "backward"]


def test_a_backend_that_does_not_know_a_result_is_not_asked_for_it(fake: FakeBackend) -> None:
    """It may compute the plain results of such a problem."""
    fake.efficiency, q, bias = 0.99, x(), np.zeros((9, 9), np.float32)
    calls: list[Callable[[], Any]] = [
        lambda: attention(q, q, q, return_stats=("entropy",)), lambda: flashkit.attention_jvp(q, q, q, q),
        lambda: attention_vjp(q, q, q, bias=bias)[1](q, wrt=("bias",)),
    ]  # fmt: skip
    for call in calls:
        assert np.isfinite(call()[0]).all()
        with use_backend("fake"), pytest.raises(UnsupportedError, match="fake: "):
            call()
    assert "backward" not in fake.calls


def test_a_backend_that_cannot_be_imported(install: Any) -> None:
    def broken() -> Any:
        raise ImportError("libgone.so.1: cannot open shared object file")

    install({"broken": broken})
    assert "broken" not in dispatch.registry() and chosen() == "cpu"
    error = dispatch.load_all()["broken"]
    assert isinstance(error, ImportError) and "libgone" in str(error)


@pytest.mark.parametrize("method", ["available", "supports"])
def test_a_backend_that_fails_to_answer(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """It is passed over, and its error is its answer."""

    def fail(*args: Any) -> Verdict:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(fake, method, fail)
    assert chosen() == "cpu"
    with pytest.raises(UnsupportedError, match=r"fake: .*RuntimeError.*driver too old"):
        attention(x(), x(), x(), backend="fake")


# --- ranking ----------------------------------------------------------------------------------------------------------


def test_ranked_by_what_they_usually_reach(fake: FakeBackend) -> None:
    fake.efficiency = 0.99
    assert [c.name for c in dispatch.candidates(problem())][:2] == ["fake", "cpu"]
    fake.efficiency = 1e-6
    assert dispatch.candidates(problem())[0].name == "cpu"


def test_a_last_resort_comes_after_all_others(fake: FakeBackend) -> None:
    fake.efficiency, fake.last_resort = 0.99, True
    able = [c for c in dispatch.candidates(problem()) if c.verdict]
    assert able[0].name == "cpu" and able[-1].name == "fake"
    assert able[-1].seconds < able[0].seconds, "it is not said to be slow"


def test_ranked_by_the_rates_in_the_profile(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A measured row goes before a guess, even a last resort's, for its problems; its rate gives the time."""
    fake.last_resort = True
    row = "{{dtype: {}, head_dim: 8, block_q: 16, block_k: 16, why: measured here, measured: {{gflops: {}}}}}"
    (tmp_path / "mine.yaml").write_text(
        "schema: 1\ndevice: {kind: cpu}\ntiles:\n"
        f"  fake.forward: [{row.format('float32', 90000)}]\n"
        f"  fake.backward: [{row.format('float32', 0.001)}]\n"
    )
    monkeypatch.setenv("FLASHKIT_PROFILE_DIR", str(tmp_path))
    try:
        first = dispatch.candidates(problem())[0]
        assert first.name == "fake"
        assert first.seconds == pytest.approx(problem().flops("forward") / 90000e9)
        assert dispatch.candidates(problem(), "backward")[0].name == "cpu"
        other = prepare(x(dtype=np.float64), x(dtype=np.float64), x(dtype=np.float64))[0]
        assert dispatch.candidates(other)[0].name == "cpu"
        assert chosen() == "fake"
    finally:
        profiles.forget()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_those_that_cannot_come_last(fake: FakeBackend, direction: Direction) -> None:
    fake.efficiency, fake.verdict = 1e6, Verdict(False, "no")
    ranked = dispatch.candidates(problem(), direction)
    last = next(c for c in ranked if c.name == "fake")
    assert not last.verdict and last.seconds == float("inf")
    assert not any(c.verdict for c in ranked[ranked.index(last) :])
    assert [c.seconds for c in ranked] == sorted(c.seconds for c in ranked)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_is_made_once(fake: FakeBackend) -> None:
    with use_backend("fake"):
        for _ in range(3):
            attention(x(), x(), x(), causal=True)
        assert fake.calls.count("plan") == 1
        attention(x(), x(), x())  # another spec
        assert fake.calls.count("plan") == 2
        attention(x(300), x(300), x(300), causal=True)  # another size
        assert fake.calls.count("plan") == 3
        attention(x(), x(), x(), causal=True, q_offset=3)  # given at run time
        attention(x(10), x(10), x(10), causal=True)  # about the same size
        assert fake.calls.count("plan") == 3
        dispatch.forget()
        attention(x(), x(), x(), causal=True)
        assert fake.calls.count("plan") == 4


def test_flops_and_bytes_of_a_problem() -> None:
    """Five products against two; each operand read once, each result written once."""
    q, k, v = (np.zeros((2, h, n, d), np.float32) for h, n, d in ((6, 10, 8), (3, 20, 8), (3, 20, 5)))
    problem = prepare(q, k, v)[0]
    forward = 2 * (8 + 5) * q.shape[0] * 6 * 10 * 20
    assert problem.flops() == forward and problem.flops("backward") == 2.5 * forward
    assert problem.flops(pairs=7) == 2 * (8 + 5) * 7
    out = 2 * 6 * 10 * 5 * 4
    lse = 2 * 6 * 10 * 4
    assert problem.bytes() == q.nbytes + k.nbytes + v.nbytes + out + lse
    assert problem.bytes("backward") == 2 * (q.nbytes + k.nbytes + v.nbytes + out) + lse


def test_every_part_of_a_problem_is_part_of_the_key(fake: FakeBackend) -> None:
    fake.array_kinds = ("numpy", "cupy")
    problem = prepare(x(), x(), x())[0]
    others = {
        "spec": replace(problem.spec, deterministic=True), "batch": 4 * problem.batch, "heads": 2 * problem.heads,
        "n_q": 4 * problem.n_q, "n_k": 4 * problem.n_k, "array_kind": "cupy",
    }  # fmt: skip
    # `tokens` is what the other sizes leave open, which no plan depends on.
    assert set(others) == {field.name for field in fields(Problem)} - {"tokens"}
    dispatch.plan(problem, "fake")
    for made, (name, other) in enumerate(others.items(), 1):
        dispatch.plan(replace(problem, **{name: other}), "fake")
        assert fake.calls.count("plan") == made + 1, name
    assert dispatch.plan(problem)[0].name != "fake"


def test_values_given_at_run_time_make_no_new_spec() -> None:
    """Equal features with other numbers and arrays run the same code."""
    rng = np.random.default_rng(0)

    def spec(**options: Any) -> Any:
        return prepare(x(), x(), x(), **options)[0].spec

    for one, two in (
        ({"softcap": 2.0}, {"softcap": 3.0}),
        ({"window": (3, 0)}, {"window": (5, 1)}),
        ({"bias": rng.random((9, 9))}, {"bias": rng.random((9, 9))}),
        ({"mask": rng.random((9, 9)) < 0.5}, {"mask": rng.random((9, 9)) < 0.5}),
        ({"dropout_p": 0.1, "seed": 1}, {"dropout_p": 0.2, "seed": 2}),
        ({"scale": 1.0}, {"q_offset": 2}),
        ({"score_mod": lambda s, b, h, q, k: s + q}, {"score_mod": lambda s, b, h, q, k: s + q}),
    ):
        assert spec(**one) == spec(**two) and spec(**one).key == spec(**two).key
    different = [
        {}, {"causal": True}, {"softcap": 2.0}, {"window": (3, 0)}, {"window": (3, None)}, {"bias": rng.random((9, 9))},
        {"bias": rng.random((1, 9))}, {"bias": rng.random((9, 9), np.float32)}, {"mask": rng.random((9, 9)) < 0.5},
        {"dropout_p": 0.1}, {"sinks": rng.random(2)}, {"kv_lengths": [3]}, {"deterministic": True},
        {"precision": "tf32"}, {"score_mod": lambda s, b, h, q, k: s + q},
        {"score_mod": lambda s, b, h, q, k: s + k},
    ]  # fmt: skip
    specs = [spec(**options) for options in different]
    assert len({s.key for s in specs}) == len(set(specs)) == len(different)
    assert all((one == two) == (one is two) for one in specs for two in specs)  # a truth value, whatever their graphs
    assert specs[0] != specs[0].key


def test_plans_are_forgotten_oldest_first(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 2)
    with use_backend("fake"):
        for options in ({}, {"causal": True}, {}, {"softcap": 1.0}, {}):
            dispatch.plan(prepare(x(), x(), x(), **options)[0])
        assert fake.calls.count("plan") == 3  # {} was used again in between, and so kept
        dispatch.plan(prepare(x(), x(), x(), causal=True)[0])
        assert fake.calls.count("plan") == 4


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_says_what_would_run(fake: FakeBackend) -> None:
    fake.verdict = Verdict(False, "not with this hat")
    told = flashkit.explain(x(), x(), x(), causal=True)
    assert fake.calls == []
    facts, page = told.as_dict(), str(told)
    assert facts["backend"] == "cpu" and facts["tile"]["block_q"] > 0
    assert facts["candidates"][0]["name"] == "cpu"
    assert facts["flops"]["forward"] > 0 and facts["bytes"]["backward"] > facts["bytes"]["forward"]
    assert 0.5 < facts["visible_fraction"] < 0.6
    for word in ("cpu", "fake", "not with this hat", "float32", "forward", "backward"):
        assert word in page


def test_explain_predicts_no_less_than_reading_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles.Profile, "bandwidth_gbs", 1.0)
    q, k = np.zeros((1, 1, 1, 64), np.float32), np.zeros((1, 1, 4096, 64), np.float32)
    assert flashkit.explain(q, k, k, backend="cpu").predicted_seconds == pytest.approx(2 * k.nbytes / 1e9, rel=1e-3)


def test_explain_of_what_nobody_can_do(fake: FakeBackend) -> None:
    fake.verdict = Verdict(False, "never")
    told = flashkit.explain(x(), x(), x(), backend="fake")
    assert told.as_dict()["backend"] is None and told.as_dict()["tile"] is None
    assert "never" in str(told)
