"""Affine score modifications: gain * f(rate * s) + bias, where f is tanh or the identity.

ALiBi, soft-capping, temperatures, windows with other weights and sums of these are affine. Gain and rate must not
depend on the key. Where the bias is linear in the key, which `straight` decides for a range of keys, two values per
row describe it in a tile. The exponent of P then costs a kernel one or two instructions more than without a
modification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...mods import expr
from ...mods.expr import Expr
from ...spec import Read

_ONE, _ZERO = expr.const(1.0), expr.const(0.0)


@dataclass(frozen=True, eq=False)
class AffineScore:
    """The parts of an affine score modification, as graphs."""

    gain: Expr = _ONE
    rate: Expr = _ONE
    capped: bool = False
    """Whether f is tanh."""
    bias: Expr = _ZERO
    sloped: bool = False
    """Whether the bias depends on the key."""
    even: bool = True
    """Whether gain and rate are the same for all rows."""
    diagonal: bool = False
    """Whether the bias is the same for all pairs of one distance q - k."""
    straight: Expr = expr.TRUE
    """Whether the bias is linear in the key for keys k0 ... k1."""

    @property
    def biased(self) -> bool:
        """Whether there is a bias."""
        return self.bias is not _ZERO

    @property
    def unit_slope(self) -> bool:
        """Whether gain * rate is known to be 1."""
        return self.gain * self.rate is _ONE or self.rate is 1.0 / self.gain

    @property
    def per_head(self) -> bool:
        """Whether a part depends on the head."""
        return any(expr.uses(part, expr.H) for part in (self.gain, self.rate, self.bias))


@lru_cache(maxsize=512)
def affine_score(score: Expr) -> AffineScore | None:
    """The parts of a score modification, or None where it is not affine."""
    caps = [node for node in expr.walk([score]) if node.op == "tanh" and expr.uses(node, expr.S)]
    rate = _ONE
    if len(caps) > 1:
        return None
    if caps:
        inner = _linear(caps[0].args[0])
        if inner is None or inner[1] is not _ZERO:
            return None
        rate = inner[0]
        score = expr.substitute([score], _outside)[0]
    parts = _linear(score)
    if parts is None or any(expr.uses(part, expr.K, _OUTSIDE) for part in (parts[0], rate)):
        return None
    gain, bias = parts
    if gain is _ZERO:  # the score is not read, and 0 * NaN would show it
        return None
    straight = _straight(bias)
    if straight is None or expr.uses(bias, _OUTSIDE):
        return None
    even = not any(expr.uses(part, expr.ROW, expr.Q) for part in (gain, rate))
    diagonal = not expr.uses(in_distance(bias), expr.ROW, expr.Q, expr.K)
    return AffineScore(gain, rate, bool(caps), bias, expr.uses(bias, expr.K), even, diagonal, straight)


def adds_distance_bias(score: Expr | None) -> bool:
    """Whether a score modification adds what depends on q - k, the batch entry and the head alone."""
    gain, bias = (None if score is None else _linear(score)) or (_ZERO, _ZERO)
    return gain is _ONE and bias is not _ZERO and Read("", (), bias).of_distance() is not None


def of_head(graphs: Sequence[Expr]) -> tuple[list[Expr], list[Expr]]:
    """Loads that are constant over a head, which a kernel reads once, and the graphs with head.number[i] for load i."""
    positions = [expr.S, expr.ROW, expr.Q, expr.K, expr.K0, expr.K1]
    loads = [node for node in expr.walk(graphs) if node.op == "load" and node.kind == "float"]
    numbers = [node for node in loads if not expr.uses(node, *positions)]
    places = {id(node): expr.symbol(f"head.number[{i}]", "float") for i, node in enumerate(numbers)}
    return numbers, expr.substitute(graphs, lambda node: places.get(id(node), node))


def in_distance(graph: Expr) -> Expr:
    """The graph with one symbol for q - k."""
    distance = expr.symbol("distance")
    known = {expr.Q - expr.K: distance, expr.K - expr.Q: -distance}
    return expr.substitute([graph], lambda node: known.get(node, node))[0]


_OUTSIDE = expr.symbol("outside", "float")


def _outside(node: Expr) -> Expr:
    """Puts s in place of the tanh, and another symbol in place of s."""
    return _OUTSIDE if node is expr.S else expr.S if node.op == "tanh" and expr.uses(node, _OUTSIDE) else node


def _linear(graph: Expr) -> tuple[Expr, Expr] | None:
    """(gain, bias) of a graph that is gain * s + bias, else None."""
    known: dict[int, tuple[Expr, Expr] | None] = {}
    for node in expr.walk([graph]):
        known[id(node)] = (_ONE, _ZERO) if node is expr.S else _combined(node, [known[id(a)] for a in node.args])
    return known[id(graph)]


def _combined(node: Expr, parts: list[tuple[Expr, Expr] | None]) -> tuple[Expr, Expr] | None:
    if any(part is None for part in parts):
        return None
    gains, biases = [part[0] for part in parts if part], [part[1] for part in parts if part]
    if all(gain is _ZERO for gain in gains) and not expr.uses(node, expr.S):
        return _ZERO, node
    if node.op == "where" and (gains[0] is not _ZERO or (gains[1] is _ZERO) != (gains[2] is _ZERO)):
        return None  # where only one side has the score, 0 * NaN would show it on the other
    if node.op in ("add", "sub", "neg", "where"):
        shared = [node.args[0]] if node.op == "where" else []
        return _joined(node.op, shared, gains[len(shared) :]), _joined(node.op, shared, biases[len(shared) :])
    if node.op == "mul":
        if gains[1] is not _ZERO:
            gains, biases = gains[::-1], biases[::-1]
        return (_times(gains[0], biases[1]), _times(biases[0], biases[1])) if gains[1] is _ZERO else None
    if node.op == "div" and gains[1] is _ZERO:
        return _times(gains[0], 1.0 / biases[1]), _times(biases[0], 1.0 / biases[1])
    return None


def _joined(op: str, shared: list[Expr], parts: list[Expr]) -> Expr:
    joins: dict[str, Callable[..., Expr]] = {
        "add": lambda x, y: x + y, "where": expr.where, "neg": lambda x: x if x is _ZERO else -x,
        "sub": lambda x, y: x if y is _ZERO else -y if x is _ZERO else x - y,
    }  # fmt: skip
    return joins[op](*shared, *parts)


def _times(x: Expr, y: Expr) -> Expr:
    return _ZERO if x is _ZERO else x * y


def _straight(bias: Expr) -> Expr | None:
    """Whether the bias is linear in k from k0 to k1; None where it never is. A piecewise linear bias is linear in a
    range where none of its conditions changes. A condition compares linear terms, so it changes at most once, and
    comparing its value at both ends is enough.
    """
    first, last = (lambda node, at=at: at if node is expr.K else node for at in (expr.K0, expr.K1))
    varies: dict[int, bool] = {}
    straight, overflowing = expr.TRUE, expr.reaches([bias])[1]
    for node in expr.walk([bias]):
        varying = [varies[id(a)] for a in node.args]
        varies[id(node)] = node is expr.K or any(varying)
        if not any(varying):
            continue
        kinks = _KINKS.get(node.op)
        if kinks is None or node in overflowing:
            return None
        if (node.op == "mul" and all(varying)) or (node.op == "div" and varying[1]):
            return None
        if node.op in ("lt", "le", "eq") and node.args[0].kind == "float":
            return None  # rounding must not decide which side of a jump a key is on
        if node.op in ("and", "or", "xor") and node.kind == "int":
            return None
        for kink in kinks(*node.args):
            at_first, at_last = expr.substitute([kink], first)[0], expr.substitute([kink], last)[0]
            straight = straight & ~(at_first ^ at_last)
    return straight


_KINKS: dict[str, Callable[..., list[Expr]]] = {
    **dict.fromkeys(("add", "sub", "neg", "mul", "div", "float", "and", "or", "xor", "not", "where"), lambda *_: []),
    "abs": lambda x: [x < 0], "min": lambda x, y: [x < y], "max": lambda x, y: [x < y],
    "lt": lambda x, y: [x < y], "le": lambda x, y: [x <= y], "eq": lambda x, y: [x < y, y < x],
}  # fmt: skip
"""Operations that keep a piece linear, and the conditions that separate its pieces."""
