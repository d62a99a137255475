"""Modifications of flashkit.torch are text and tensors: copies, pickles and compiled functions keep what they compute,
and values stay live.
"""

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import within_a_unit

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import flashkit  # noqa: E402
from flashkit import torch as ft  # noqa: E402
from flashkit.backends.cpu import specialise  # noqa: E402
from flashkit.call import torch_mods  # noqa: E402

SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])


def qkv(requires_grad: bool = False) -> list[Any]:
    return [torch.randn(2, 4, 8, 16, requires_grad=requires_grad) for _ in range(3)]


def compiled(mods: Any) -> Callable[..., Any]:
    return torch.compile(lambda *x: ft.attention(*x, mods=mods), fullgraph=True, backend="aot_eager")


def documents() -> Any:
    return flashkit.mods.document(np.array([0, 0, 0, 1, 1, 1, 2, 2]))


def kinds() -> dict[str, Callable[[], Any]]:
    factor = torch.tensor(0.5)
    return {
        "slopes": lambda: ft.Mods(score_mod=lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(q - k)),
        "scalars": lambda: ft.Mods(score_mod=lambda s, b, h, q, k: s * factor + torch.tensor(0.25) * (q - k)),
        "flag": lambda: ft.Mods(mask_mod=lambda b, h, q, k: torch.tensor(True) & (q >= k)),
        "values": lambda: ft.Mods(
            score_mod=flashkit.mods.score(lambda s, b, h, q, k, *, t, c: s * t[h] - c, t=np.ones(4) / 3, c=-0.0),
            mask_mod=lambda b, h, q, k: q >= k,
        ),
        "blocks": lambda: ft.Mods(
            block_mask=flashkit.BlockMask.from_mod(documents(), 8, 8, 4, 4), mask_mod=lambda b, h, q, k: q >= k
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.one_in(2)
def test_copies_compute_the_same(kind: str) -> None:
    """Also when what they were made of is gone."""
    mods, given = kinds()[kind](), qkv()
    expected, text = ft.attention(*given, mods=mods), mods.content[0]
    assert not torch.equal(expected, ft.attention(*given))
    copies = copy.copy(mods), copy.deepcopy(mods), pickle.loads(pickle.dumps(mods))
    del mods
    gc.collect()
    for each in copies:
        assert each.content[0] == text
        assert torch.equal(ft.attention(*given, mods=each), expected)
    torch.compiler.reset()
    assert torch.equal(compiled(copies[-1])(*given), expected)


def test_another_process_computes_the_same(tmp_path: Path) -> None:
    """Where other modifications were made first."""
    given = qkv()
    mods = ft.Mods(score_mod=lambda s, b, h, q, k: s - SLOPES[h] * torch.abs(q - k))
    torch.export.save(torch.export.export(Module(mods), tuple(given)), tmp_path / "program.pt2")
    (tmp_path / "data").write_bytes(pickle.dumps((mods, given, ft.attention(*given, mods=mods))))
    code = (
        "import pickle, sys, torch; from flashkit import torch as ft; "
        "others = [ft.Mods(mask_mod=lambda b, h, q, k: q - k >= n) for n in range(3)]; "
        "mods, given, expected = pickle.load(open('data', 'rb')); "
        "assert torch.equal(ft.attention(*given, mods=mods), expected); "
        "assert torch.equal(torch.export.load('program.pt2').module()(*given), expected)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Module(torch.nn.Module):
    def __init__(self, mods: Any) -> None:
        super().__init__()
        self.mods = mods

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return ft.attention(q, k, v, mods=self.mods)


def test_a_compiled_backward_keeps_its_modifications() -> None:
    given, mods = qkv(True), kinds()["slopes"]()
    expected = torch.autograd.grad(ft.attention(*given, mods=mods).sum(), given)
    torch.compiler.reset()
    out, own = compiled(mods)(*given), weakref.ref(mods)
    del mods
    torch.compiler.reset()
    gc.collect()
    assert own() is None
    torch.testing.assert_close(torch.autograd.grad(out.sum(), given), expected)


def test_nothing_is_kept_beyond_its_use() -> None:
    given, mods = qkv(True), kinds()["blocks"]()
    out = ft.attention(*given, mods=mods)
    blocks, own = weakref.ref(mods.options()["block_mask"]), weakref.ref(mods)
    del mods
    gc.collect()
    assert own() is not None, "for the backward pass"
    out.sum().backward()
    del out
    gc.collect()
    assert own() is None
    if blocks() is not None:  # as part of a cached plan
        flashkit.call.plans.clear()
        gc.collect()
        assert blocks() is None


def test_values_stay_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are read at each call, compiled or not, and no value is compiled anew."""
    given, factor, shift = qkv(), torch.tensor(1.0), torch.zeros(4)

    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor + shift[h] * (q - k)

    mods = ft.Mods(score_mod=scaled)
    torch.compiler.reset()
    function, results = compiled(mods), []
    ft.attention(*given, mods=mods)
    monkeypatch.setattr(specialise, "compiled", lambda *_: pytest.fail("a kernel is compiled"))
    for value in (1.0, 2.0, 0.3):
        factor.fill_(value)
        shift.fill_(value - 1)
        for found in (function(*given), ft.attention(*given, mods=mods), ft.attention(*given, score_mod=scaled)):
            expected = ft.attention(*given, scale=value / 4) if value == 1 else None
            results.append(found)
            assert expected is None or torch.allclose(found, expected, atol=1e-6)
        assert torch.equal(results[-1], results[-2]) and torch.equal(results[-1], results[-3])
    assert not torch.equal(results[0], results[3]) and not torch.equal(results[3], results[6])


@pytest.mark.parametrize("way", ["mods", "functions", "compiled"])
def test_what_changes_before_backward_is_noticed(way: str) -> None:
    given, factor = qkv(True), torch.tensor(1.0)

    def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * factor

    mods = ft.Mods(score_mod=scaled)
    torch.compiler.reset()
    out = compiled(mods)(*given) if way == "compiled" else ft.attention(
        *given, **({"mods": mods} if way == "mods" else {"score_mod": scaled})
    )  # fmt: skip
    factor.fill_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def learned() -> dict[str, Callable[[Any], dict[str, Any]]]:
    return {
        "of a mask": lambda x: {"mask_mod": lambda b, h, q, k: q - k < x},
        "made before": lambda x: {"mods": ft.Mods(mask_mod=lambda b, h, q, k: q - k < torch.exp(x))},
        "a keyword": lambda x: {"score_mod": flashkit.mods.score(lambda s, b, h, q, k, *, x: s * x[0], x=x[None])},
        "softcap": lambda x: {"softcap": x},
        "dropout_p": lambda x: {"dropout_p": x * 0.1, "seed": 1},
    }  # fmt: skip


@pytest.mark.parametrize("way", learned())
@pytest.mark.parametrize("recorded", [False, True])
def test_a_gradient_that_there_is_none_of_is_refused(way: str, recorded: bool) -> None:
    parameter = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises((NotImplementedError, TypeError), match="requires grad"):
        ft.attention(*qkv(recorded), **learned()[way](parameter))
    with torch.no_grad():
        found = ft.attention(*qkv(), **learned()[way](parameter.detach()))
    assert not found.requires_grad


@pytest.mark.parametrize("way", ["eager", "compiled", "autocast"])
def test_a_scale_may_be_learned(way: str) -> None:
    given, scale = [x.bfloat16().double() for x in qkv()], torch.nn.Parameter(torch.tensor(0.3))
    q, k, v = (x.bfloat16() if way == "autocast" else x for x in given)
    function = torch.compile(lambda q, scale: ft.attention(q, k, v, scale=scale), fullgraph=True, backend="aot_eager")
    for value in (0.3, 0.0, -2.0):
        scale.data.fill_(value)
        call = function if way == "compiled" else lambda q, scale: ft.attention(q, k, v, scale=scale)
        found = call(q, scale)
        expected = torch.softmax(scale * (given[0] @ given[1].mT), -1) @ given[2]
        (own,), (wanted,) = (torch.autograd.grad(x.square().sum(), scale) for x in (found, expected))
        within_a_unit(found.detach().double(), expected.detach(), "bfloat16" if way == "autocast" else "float32")
        torch.testing.assert_close(own, wanted, atol=0, rtol=0.02 if way == "autocast" else 1e-6)
    for wrong in (torch.ones(4), torch.tensor(True)):
        with pytest.raises(TypeError, match="scale: expected a number, or a tensor of one"):
            ft.attention(q, k, v, scale=wrong)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("{", 0), ("[]", 0), ('{"q":{}}', 0), ('{"mask_mod":{"graph":[],"params":{},"arrays":[]}}', 0),
        ('{"mask_mod":{"graph":[["symbol",[],"q","int"]],"params":{},"arrays":[]}}', 0), ("slopes", 2), ("blocks", 1),
    ],
)  # fmt: skip
def test_other_content_is_refused(text: str, count: int) -> None:
    """A block mask is one of the tensors that it was made with."""
    if text in kinds():
        text, tensors = kinds()[text]().content
        torch_mods._block_masks.clear()
        count -= len(tensors)
        values = [*(x + 1 for x in tensors), *[torch.zeros(1)] * count]
    else:
        values = []
    with pytest.raises(ValueError, match=r"modifications|block mask"):
        ft.Mods.of_content(text, values)


# --- FlexAttention's way of writing -----------------------------------------------------------------------------------

F = torch.nn.functional
BOXES = torch.randn(16, 2)
TABLE, OFFSETS, CHOSEN = torch.randn(24), torch.tensor([0, 3, 9, 16]), torch.tensor([0, 2, 5])

WRITTEN: dict[str, Callable[..., Any]] = {
    "abs": lambda s, b, h, q, k: s - (q - k).abs(),
    "clamp": lambda s, b, h, q, k: s.clamp(-1.0, 1.0) + (q - k).clamp(min=0, max=5),
    "clamp_": lambda s, b, h, q, k: s + TABLE[torch.clamp(q - k + 8, 0, 23)],
    "clamp_min": lambda s, b, h, q, k: s.clamp_min(0.5) + torch.clamp_max(q - k, 2),
    "tanh": lambda s, b, h, q, k: 5.0 * (s / 5.0).tanh(),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, -1e4),
    "masked_fill function": lambda s, b, h, q, k: torch.masked_fill(s, (q - k).abs() > 3, -7.0),
    "logical_and": lambda s, b, h, q, k: torch.where((q >= k).logical_and(q - k < 4), s, s - 9.0),
    "logical_or": lambda s, b, h, q, k: torch.where(torch.logical_or(q < 2, (k % 2)), s, 0.0),
    "logical_xor": lambda s, b, h, q, k: torch.where(torch.logical_xor(q < 4, k < 4), s, s * 2.0),
    "logical_not": lambda s, b, h, q, k: torch.where((q % 2).logical_not(), s, -s),
    "eq": lambda s, b, h, q, k: torch.where(q.eq(k), s + 1.0, s),
    "ge": lambda s, b, h, q, k: s * q.ge(k) + s * q.lt(k) * 0.5,
    "int": lambda s, b, h, q, k: s + (q >= k).int(),
    "long": lambda s, b, h, q, k: s + TABLE[(q >= k).long()],
    "float": lambda s, b, h, q, k: s + q.float() / 7.0 - k.double() / 3.0,
    "to": lambda s, b, h, q, k: s + (q > k).to(torch.float32) * 2,
    "square": lambda s, b, h, q, k: s - 0.01 * (q - k).square() + torch.square(s),
    "zeros_like": lambda s, b, h, q, k: torch.where(q < k, torch.zeros_like(s), s),
    "full_like": lambda s, b, h, q, k: torch.where(q < k, torch.full_like(s, -3.5), s),
    "ones_like": lambda s, b, h, q, k: s * torch.ones_like(s) + torch.ones_like(q),
    "new_full": lambda s, b, h, q, k: s + q.new_full((), 2),
    "new_ones": lambda s, b, h, q, k: s * s.new_ones(size=()) + q.new_full((), 2),
    "shifts": lambda s, b, h, q, k: s + ((q >> 1) ^ (k << 2)) + torch.bitwise_right_shift(k, 1),
    "shift method": lambda s, b, h, q, k: s - q.bitwise_left_shift(3),
    "tan": lambda s, b, h, q, k: torch.tan(s) + torch.tan(b),
    "activations": lambda s, b, h, q, k: F.silu(s) - F.gelu(s) + F.softplus(30 * s) + F.leaky_relu(s) * s.sigmoid(),
    "gelu": lambda s, b, h, q, k: F.gelu(s, approximate="tanh") + F.elu(s, 0.5) + F.logsigmoid(s),
    "rows": lambda s, b, h, q, k: s + BOXES[q][0] * BOXES[k % 4, 1] - BOXES[h][1],
    "rows taken apart": lambda s, b, h, q, k: (lambda low, high: s.clamp(low.clamp_max(0.0), high.abs()))(*BOXES[q]),
    "relu": lambda s, b, h, q, k: torch.relu(s) + s.relu() + torch.nn.functional.relu(q - k),
    "pow": lambda s, b, h, q, k: torch.pow(s, 2) + s.pow(3) + (q - k).pow(2) + s**2.0,
    "log1p": lambda s, b, h, q, k: s - torch.log1p((q - k).abs().float()),
    "rsqrt": lambda s, b, h, q, k: s * torch.rsqrt(1.0 + q),
    "expm1": lambda s, b, h, q, k: torch.expm1(s),
    "erf": lambda s, b, h, q, k: torch.erf(s) + s.erf(),
    "reciprocal": lambda s, b, h, q, k: s * (1 + q).float().reciprocal(),
    "maximum": lambda s, b, h, q, k: torch.maximum(s, s.new_zeros(())) - torch.minimum(q, k),
    "fmod": lambda s, b, h, q, k: s + torch.fmod(q - k, 3) + torch.fmod(s, 0.7),
    "remainder": lambda s, b, h, q, k: s + torch.remainder(q - k, 3),
    "isin": lambda s, b, h, q, k: torch.where(torch.isin(k, CHOSEN), s, -4.0),
    "isin inverted": lambda s, b, h, q, k: torch.where(torch.isin(k, CHOSEN, invert=True), s, -4.0),
    "floor division": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="floor"),
    "truncating division": lambda s, b, h, q, k: s + torch.div(q - k, 3, rounding_mode="trunc"),
    "true division": lambda s, b, h, q, k: s + torch.div(q - k, 3) + (q - k).div(5) + torch.true_divide(q, 3),
    "floor_divide": lambda s, b, h, q, k: s + torch.floor_divide(q, 4) - k.floor_divide(3),
    "float floor": lambda s, b, h, q, k: s + torch.div(s, 0.3, rounding_mode="floor"),
    "ceil": lambda s, b, h, q, k: torch.ceil(s) + torch.trunc(s * 3.0) + s.floor(),
    "base": lambda s, b, h, q, k: s - 2.0 ** (-(h + 1.0)) * (q - k).abs() + 1.5**h,
    "exp2": lambda s, b, h, q, k: s - torch.exp2(-(h + 1.0)) * (q - k),
    "sigmoid": lambda s, b, h, q, k: s.sigmoid() * s.sign() + torch.cos(s) + s.sin(),
    "names": lambda s, b, h, q, k: torch.add(s, q).subtract(k).multiply(0.5).divide(3.0).negative(),
    "other=": lambda s, b, h, q, k: torch.maximum(input=s, other=s * 2.0) + torch.add(s, other=q),
    "where method": lambda s, b, h, q, k: s.where(q >= k, s - 1.0),
    "documents": lambda s, b, h, q, k: torch.where(OFFSETS[h] <= q, s, -2.0),
    "bitwise": lambda s, b, h, q, k: torch.where((q & 3).bitwise_xor(k & 1).eq(0), s, -s),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_functions_as_they_are_written_for_flex_attention(name: str) -> None:
    """Traced and evaluated, and computed by PyTorch on tensors: the same numbers."""
    function, generator = WRITTEN[name], torch.Generator().manual_seed(0)
    q, k, h = (torch.randint(0, n, (200,), generator=generator) for n in (16, 16, 4))
    s = torch.randn(200, generator=generator)
    # FlexAttention calls it by vmap, with tensors of one element.
    expected = torch.stack([function(*each) for each in zip(s, 0 * q, h, q, k)])
    native = torch_mods._native(torch_mods.trace(function, "score"))
    found = native.evaluate(b=0, h=h.numpy(), q=q.numpy(), k=k.numpy(), s=s.numpy())
    np.testing.assert_allclose(found, expected.numpy(), rtol=2e-5, atol=1e-5)


def test_a_mask_that_is_made_of_nothing_shows_all() -> None:
    from torch.nn.attention.flex_attention import noop_mask

    assert torch_mods._native(torch_mods.trace(noop_mask, "mask")).evaluate(b=0, h=0, q=1, k=5)


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda s, b, h, q, k: s.add_(1.0), "'add_'"),
     (lambda s, b, h, q, k: torch.lgamma(s), "lgamma of a position or the score has no counterpart"),
     (lambda s, b, h, q, k: s if q > k else -s, "use torch.where"),
     (lambda s, b, h, q, k: torch.where(q == BOXES, s, 0.0), "expected a tensor of one element"),
     (lambda s, b, h, q, k: torch.where(torch.isin(k, torch.arange(65)), s, 0.0), "at most 64 elements"),
     (lambda s, b, h, q, k: torch.dot(BOXES[q], BOXES[k]), "expected 2 positions"),
     (lambda s, b, h, q, k: s + BOXES[q], "expected 2 positions .* got 1"),
     (lambda s, b, h, q, k: torch.where(BOXES[q] == 1.0, s, 0.0), "expected 2 positions"),
     (lambda s, b, h, q, k: s if BOXES[q] != s else -s, "expected 2 positions"),
     (lambda s, b, h, q, k: BOXES[q], "expected 2 positions"),
     (lambda s, b, h, q, k: s + (q >> k), "a number of bits from 0 to 62"),
     (lambda s, b, h, q, k: s << 1, "expected an integer and a number of bits")],
)  # fmt: skip
def test_what_has_no_counterpart_is_named(function: Callable[..., Any], message: str) -> None:
    """Methods that write to their tensor among it: a symbol is not changed."""
    with pytest.raises(TypeError, match=message):
        ft.Mods(score_mod=function)
