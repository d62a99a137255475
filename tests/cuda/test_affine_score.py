"""Score modifications of a known form: the parts together are the modification, and what has another form has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashkit import mods
from flashkit.backends.cuda_common.affine_score import AffineScore, affine_score, of_head
from flashkit.call.compose import compose
from flashkit.mods import codegen, expr
from flashkit.mods.expr import where

N = 300
SLOPES = np.linspace(-0.5, 0.5, 4).astype(np.float32)


def _windows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return where((q - k > 20) & (k >= 7) | (k == 50), s - 1.0, s + 0.25 * expr.to_float(q - k))


def _clipped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - expr.minimum(expr.maximum(expr.to_float(q - k), -30.0), 100.0) * 0.5


FORMS = {
    "alibi": [mods.alibi(SLOPES)],
    "softcap": [mods.softcap(3.0)],
    "both": [mods.softcap(3.0), mods.alibi(SLOPES)],
    "affine": [mods.score(lambda s, b, h, q, k: 1.1 * s - 0.5)],
    "negative": [mods.score(lambda s, b, h, q, k: 0.5 - s)],
    "by row": [mods.score(lambda s, b, h, q, k: where(q > 100, s * 2.0, s) / (1.0 + abs(expr.to_float(q))))],
    "windows": [mods.score(_windows)],
    "clipped": [mods.score(_clipped)],
    "steep": [mods.score(lambda s, b, h, q, k: s - abs(abs(3 * q - 2 * k) - 40) * 1.5 + k)],
    "capped twice": [mods.score(lambda s, b, h, q, k: 2.0 * expr.tanh(s * 0.5) + where(k < 9, 1.0, 2.0))],
}
OTHERS = {
    "product with a key": lambda s, b, h, q, k: s * expr.to_float(k),
    "square": lambda s, b, h, q, k: s * s,
    "sign": lambda s, b, h, q, k: where(s > 0, s, 0.1 * s),
    "jump at a score": lambda s, b, h, q, k: where(s > 0, s + 1.0, s - 1.0),
    "absolute": lambda s, b, h, q, k: abs(s),
    "tanh and more": lambda s, b, h, q, k: expr.tanh(s) + s,
    "two caps": lambda s, b, h, q, k: expr.tanh(s) + expr.tanh(2.0 * s),
    "cap of a sum": lambda s, b, h, q, k: expr.tanh(s + 1.0),
    "capped by key": lambda s, b, h, q, k: expr.tanh(s / (1.0 + expr.to_float(k * k))),
    "curved": lambda s, b, h, q, k: s - expr.log(1.0 + abs(expr.to_float(q - k))),
    "bent": lambda s, b, h, q, k: s + expr.to_float((q - k) * (q - k)),
    "in steps": lambda s, b, h, q, k: s + expr.to_float(k // 16),
    "bits": lambda s, b, h, q, k: s + expr.to_float(k & 15),
    "rounded jump": lambda s, b, h, q, k: where(0.1 * expr.to_float(k) < 5.0, s, s - 1.0),
}


def _parts(scores: list[mods.Mod]) -> tuple[expr.Expr, AffineScore | None, dict[str, Any]]:
    score, _, _, params, arrays, _ = compose(dict(zip(map(str, range(9)), scores)), [])
    return score, affine_score(score), {**params, **arrays}


@pytest.mark.parametrize("name", FORMS)
def test_the_parts_are_the_modification(name: str) -> None:
    score, found, values = _parts(FORMS[name])
    assert found is not None and found.capped == ("cap" in name or name == "both")
    rng = np.random.default_rng(0)
    q, k, h = np.arange(N)[:, None, None], np.arange(N)[None, :, None], np.arange(4)
    env = {**values, "s": rng.standard_normal((N, N, 4)), "b": 0, "h": h, "q": q + 5, "row": q, "k": k}
    gain, rate, bias = (codegen.evaluate(part, env) for part in (found.gain, found.rate, found.bias))
    core = np.tanh(rate * env["s"]) if found.capped else rate * env["s"]
    np.testing.assert_allclose(gain * core + bias, codegen.evaluate(score, env), rtol=1e-9, atol=1e-9)
    assert found.even == (name != "by row")


@pytest.mark.parametrize("name", FORMS)
def test_where_it_is_straight_the_bias_is_a_line(name: str) -> None:
    _, found, values = _parts(FORMS[name])
    assert found is not None
    shape, length, straight = np.ones((N, 4)), 32, 0
    for first in range(0, N - length, 13):
        env = {**values, "b": 0, "h": np.arange(4), "q": np.arange(N)[:, None] + 5, "row": np.arange(N)[:, None]}
        whole = shape * codegen.evaluate(found.straight, {**env, "k0": first, "k1": first + length}) > 0
        biases = [shape * codegen.evaluate(found.bias, {**env, "k": first + i}) for i in range(length + 1)]
        for i, bias in enumerate(biases):
            line = biases[0] + (biases[-1] - biases[0]) * (i / length)
            np.testing.assert_allclose(line[whole], bias[whole], rtol=1e-9, atol=1e-9)
        if not found.sloped:
            assert all((bias == biases[0]).all() for bias in biases) and whole.all()
        straight += whole.mean() > 0.5
    assert straight > 5


@pytest.mark.parametrize("name", OTHERS)
def test_other_modifications_have_no_form(name: str) -> None:
    assert _parts([mods.score(OTHERS[name])])[1] is None


def test_a_score_that_is_not_read_has_no_form() -> None:
    """A gain of 0 would multiply NaN, which the modification drops."""
    for function in (
        lambda s, b, h, q, k: 1.5 + q, lambda s, b, h, q, k: where(k < 5, s, 1.0),
        lambda s, b, h, q, k: where(k < 5, 1.0, s * 2.0) + 3.0, lambda s, b, h, q, k: where(k < 5, expr.tanh(s), 0.5),
    ):  # fmt: skip
        assert _parts([mods.score(function)])[1] is None
    assert _parts([mods.score(lambda s, b, h, q, k: where(h < 2, s * 2.0, s * 3.0 + 1.0))])[1] is not None


def test_biases_from_arrays_have_no_form() -> None:
    assert _parts([mods.bias(np.zeros((1, 1, 8, 8), np.float32))])[1] is None
    found: Any = _parts([mods.bias(np.zeros((1, 4, 8, 1), np.float32))])[1]
    assert vars(found) == vars(AffineScore(bias=found.bias))


@pytest.mark.parametrize(
    ("name", "unit_slope", "per_head"),
    [
        ("softcap", True, False), ("alibi", True, True), ("both", True, True), ("affine", False, False),
        ("by row", False, False),
    ],
)  # fmt: skip
def test_what_is_known_of_slopes_and_heads(name: str, unit_slope: bool, per_head: bool) -> None:
    known = _parts(FORMS[name])[1]
    assert known is not None
    assert known.unit_slope == unit_slope and known.per_head == per_head


def test_what_is_read_once_for_a_head() -> None:
    """Slopes of heads are; what is read by position stays where it is."""
    known = _parts(FORMS["both"])[1]
    assert known is not None
    numbers, (gain, bias) = of_head([known.gain, known.bias])
    assert [node.op for node in numbers] == ["load"] and gain is known.gain
    assert not any(node.op == "load" for node in expr.walk([bias]))
    array = expr.Array("w", 1, "float")
    numbers, (left,) = of_head([array[expr.H] + array[expr.K]])
    assert len(numbers) == 1 and [node.args for node in expr.walk([left]) if node.op == "load"] == [(expr.K,)]
