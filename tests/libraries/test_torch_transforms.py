"""flashkit.torch under torch.func and torch.vmap: the derivatives of PyTorch's own function, or an error."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from flashkit import torch as ft  # noqa: E402
from flashkit.call import torch_autograd, torch_operators, torch_passes  # noqa: E402

SHAPE = (2, 4, 6, 8)
Function = Callable[..., Any]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def qkv(shape: tuple[int, ...] = SHAPE) -> list[Any]:
    return [torch.randn(shape, dtype=torch.float64) for _ in range(3)]


def plain(q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None) -> Any:
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = s if bias is None else s + bias
    return torch.softmax(s if mask is None else torch.where(mask, s, -math.inf), -1) @ v


def weighted(f: Function) -> Function:
    """A number of several results."""

    def loss(*x: Any) -> Any:
        out = f(*x)
        return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()

    return loss


func, vmap = torch.func, torch.vmap
TRANSFORMS: dict[str, Callable[[Function, Any, Any, Any], Any]] = {
    "grad": lambda f, *x: func.grad(weighted(f), (0, 1, 2))(*x),
    "vjp": lambda f, *x: func.vjp(f, *x)[1](torch.ones_like(x[0])),
    "jacrev": lambda f, *x: func.jacrev(f, (0, 1, 2))(*(each[:1, :2, :3] for each in x)),
    "vmap": lambda f, *x: vmap(f)(*x),
    "vmap of other axes": lambda f, q, k, v: vmap(f, (1, None, 2), 1)(q[:, :2], k[:, 0], v[:, :2].movedim(1, 2)),
    "vmap of one": lambda f, q, k, v: vmap(f, (None, None, 0))(q, k, torch.stack([v, 2 * v])),
    "vmap twice": lambda f, *x: vmap(vmap(f))(*x),
    "grad of vmap twice": lambda f, *x: func.grad(lambda *y: weighted(vmap(vmap(f)))(*y), (0, 1, 2))(*x),
    "vmap of grad": lambda f, q, k, v: vmap(func.grad(weighted(f), (0, 1, 2)), (0, 0, None))(q, k, v[0]),
    "grad of vmap": lambda f, q, k, v: func.grad(lambda *y: weighted(vmap(f, (0, 0, None)))(*y), (0, 1, 2))(q, k, v[0]),
    "compiled vmap": lambda f, *x: torch.compile(vmap(f), fullgraph=True, backend="aot_eager")(*x),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str) -> None:
    torch.compiler.reset()
    x, own = qkv(), TRANSFORMS[name]
    torch.testing.assert_close(own(ft.attention, *x), own(plain, *x))


BATCHED: dict[str, tuple[tuple[Any, ...], Callable[..., Any]]] = {
    "bias": ((0, 0, 0, 0), lambda *x: ft.attention(*x[:3], bias=x[3][:, :1])),
    "shared bias": ((0, 0, 0, None), lambda *x: ft.attention(*x[:3], bias=x[3][0])),
    "bias alone": ((None, None, None, 0), lambda *x: ft.attention(*x[:3], bias=x[3][0, :1])),
    "mask": ((0, 1, 2, 0), lambda *x: ft.attention(*x[:3], mask=x[3][0, 0, :4, :4] > -0.5, causal=True, layout="bnhd")),
    "lengths": ((0, 0, 0, 0), lambda *x: ft.attention(*x[:3], kv_lengths=x[3][:, 0, 0, 0].abs().long(), q_offset=0)),
    "a length": ((0, 0, 0, 0), lambda *x: ft.attention(*x[:3], kv_lengths=x[3][0, 0, 0, 0].abs().long(), q_offset=0)),
    "offsets": ((0, 0, 0, 0), lambda *x: ft.attention(*x[:3], q_offset=x[3][:, 0, 0, 0].long(), causal=True)),
    "sinks": ((0, 0, 0, 0), lambda *x: ft.attention(*x[:3], sinks=x[3][0, :, 0, 0])),
    "shared sinks": ((0, 0, 0, None), lambda *x: ft.attention(*x[:3], sinks=x[3][0, :, 0, 0])),
    "slopes": ((0, 0, 0, 0), lambda *x: ft.attention(*x[:3], alibi_slopes=x[3][0, :, 0, 0].detach().abs())),
    "dropout": ((0, 0, 0, None), lambda *x: ft.attention(*x[:3], dropout_p=0.5, seed=3)),
    "functions": ((0, 0, 0, 0), lambda *x: ft.attention(
        *x[:3], score_mod=lambda s, b, h, q, k: s * x[3].detach()[0, 0, 0][k] + b)),
    "packed": ((0, 0, 0, None), lambda *x: ft.attention(
        *(y[0].transpose(0, 1) for y in x[:3]), cu_seqlens=torch.tensor([0, 2, 6]))),
    "without heads": ((0, 0, 0, 0), lambda *x: ft.attention(
        *(y[0, 0] for y in x[:3]), bias=x[3][0, 0], layout="bnhd", return_lse=True)[0]),
    "lse": ((0, 0, 0, None), lambda *x: ft.attention(*x[:3], return_lse=True)[1]),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.one_in(2)
def test_vmap_is_a_loop(name: str) -> None:
    """Both passes, of each entry alone and of all."""
    axes, function = BATCHED[name]
    x = [torch.randn(3, *SHAPE, dtype=torch.float64).movedim(0, axis or 0) for axis in axes]
    x = [each if axis is not None else each[0] for each, axis in zip(x, axes)]
    x[3] = torch.randn((3, 2, 4, 6, 6) if axes[3] == 0 else (2, 4, 6, 6), dtype=torch.float64)
    entries = [[y if axis is None else y.select(axis, i) for y, axis in zip(x, axes)] for i in range(3)]
    torch.testing.assert_close(vmap(function, axes)(*x), torch.stack([function(*each) for each in entries]))
    if name in ("lengths", "a length", "offsets", "mask", "slopes", "functions"):  # no gradient by x[3]
        own, wrt = (lambda *y: function(*y[:3], y[3].detach())), (0, 1, 2)
    else:
        own, wrt = function, (0, 1, 2, 3)
    expected = [torch.autograd.grad(weighted(own)(*(leaves := [y.clone().requires_grad_() for y in each])),
                                    leaves, allow_unused=True, materialize_grads=True) for each in entries]  # fmt: skip
    found = vmap(func.grad(weighted(own), wrt), axes)(*x)
    for at in wrt:
        torch.testing.assert_close(found[at], torch.stack([each[at] for each in expected]))


def test_a_batching_rule_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (torch_autograd, torch_operators):
        for name in ("forward", "backward"):
            run = getattr(torch_passes, name)
            monkeypatch.setattr(module, name, lambda *x, run=run, name=name: calls.append(name) or run(*x))
    x = qkv()
    vmap(func.grad(weighted(ft.attention), (0, 1, 2)), (0, 0, None))(*x[:2], x[2][0])
    vmap(ft.attention)(*x)
    assert calls == ["forward", "backward", "forward"]


def refusals() -> dict[str, tuple[str, Callable[..., Any]]]:
    second = "expected a plain tensor, got one of a transform"
    grad = func.grad(weighted(ft.attention))
    return {
        "grad of grad": (second, lambda *x: func.grad(lambda q: grad(q, *x[1:]).sum())(x[0])),
        "jacrev of grad": (second, lambda *x: func.jacrev(lambda q: grad(q, *x[1:]))(x[0])),
        "grad of vmap of grad": (second, lambda *x: func.grad(lambda q: vmap(grad)(q, *x[1:]).sum())(x[0])),
        "jacfwd": ("vmap", lambda *x: func.jacfwd(lambda q: ft.attention(q, *x[1:]))(x[0])),
        "compiled grad": ("setup_context|no gradient by themselves", lambda *x: torch.compile(
            grad, fullgraph=True, backend="aot_eager")(*x)),
        "a mask's tensor": ("of a mask_mod requires grad", lambda *x: func.grad(lambda t: vmap(vmap(
            lambda *y: ft.attention(*y, mask_mod=lambda b, h, q, k: q - k < t[h])))(
                *(y[None, None] for y in x)).sum())(x[0][0, :, 0, 0])),
        "an operator alone": ("no gradient by themselves", lambda *x: torch.autograd.grad(
            torch.ops.flashkit.attention(True, x[0].requires_grad_(), *x[1:], [])[0].sum(), x[0])),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals())
def test_what_has_no_derivative_says_so(name: str) -> None:
    """Where a missing one would pass for 0."""
    message, call = refusals()[name]
    with pytest.raises((NotImplementedError, RuntimeError, TypeError), match=message):
        call(*qkv())


def test_a_functions_tensor_alone_is_batched_and_constant() -> None:
    q, k, v = qkv()
    factors = torch.rand(3, q.shape[1], dtype=q.dtype)

    def scaled(by: Any, q: Any) -> Any:
        return ft.attention(q, k, v, score_mod=lambda s, b, h, q, k: s * by[h])

    torch.testing.assert_close(vmap(scaled, (0, None))(factors, q), torch.stack([scaled(by, q) for by in factors]))
    found = vmap(func.grad(weighted(scaled)), (0, None))(factors, q)
    torch.testing.assert_close(found, torch.stack([func.grad(weighted(scaled))(by, q) for by in factors]))
    moved = func.jvp(partial(scaled, factors[0]), (q,), (v,))[1]
    by_scale = func.jvp(lambda q: plain(q * factors[0][:, None, None], k, v), (q,), (v,))[1]
    torch.testing.assert_close(moved, by_scale)


def test_slopes_and_a_functions_tensor_under_transforms() -> None:
    """The same gradient by a tensor that all entries share as without vmap."""
    q, k, v = (x.detach() for x in qkv())
    factor = torch.rand(q.shape[1], dtype=q.dtype)

    def of_slopes(t: Any, *x: Any) -> Any:
        return ft.attention(*x, alibi_slopes=t)

    def of_function(t: Any, *x: Any) -> Any:
        return ft.attention(*x, score_mod=lambda s, b, h, q, k: s * t[h])

    def check(each: Any) -> None:
        expected = func.grad(lambda t: each(t, q, k, v).square().sum())(factor)
        mapped = vmap(each, (None, 0, 0, 0))
        found = func.grad(lambda t: mapped(t, *(x[:, None] for x in (q, k, v))).square().sum())(factor)
        torch.testing.assert_close(found, expected)
        leaf = factor.clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(each(leaf, q, k, v).square().sum(), leaf)[0], expected)

    check(of_slopes)
    check(of_function)


@pytest.mark.parametrize("backward", [False, True])
def test_a_tensor_may_be_passed_twice_to_what_is_compiled(backward: bool) -> None:
    torch.compiler.reset()
    a, cu = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=backward), torch.tensor([0, 2])
    calls: list[Function] = [
        lambda a: ft.scaled_dot_product_attention(a, a, a),
        lambda a: ft.attention(a, a, a, cu_seqlens=(cu, cu), bias=None, kv_lengths=None),
    ]
    for call in calls:
        found, expected = torch.compile(call, fullgraph=True, backend="aot_eager")(a), call(a)
        torch.testing.assert_close(found, expected)
        if backward:
            torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), a) for x in (found, expected)))


def test_tensors_kept_beyond_their_transform() -> None:
    """They are wrappers without a level."""
    kept: list[Any] = []
    x = qkv()
    func.grad(lambda q: (kept.append(q), (q * 1).sum())[1])(x[0])
    for _ in range(2):
        torch.testing.assert_close(ft.attention(kept[0], *x[1:]), ft.attention(*x))
        leaf = x[1].clone().requires_grad_()
        torch.testing.assert_close(ft.attention(kept[0], leaf, x[2]).detach(), ft.attention(*x))
