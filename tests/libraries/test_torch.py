"""flashkit.torch: the same numbers as PyTorch's functions, derivatives included, eager and compiled."""

import contextlib
import math
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import flashkit  # noqa: E402
from flashkit import torch as ft  # noqa: E402

F = torch.nn.functional
SHAPE = (2, 4, 21, 16)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def qkv(shape: tuple[int, ...] = SHAPE, dtype: Any = torch.float64, heads_kv: int | None = None) -> list[Any]:
    kv = shape if heads_kv is None else (*shape[:-3], heads_kv, *shape[-2:])
    return [torch.randn(x, dtype=dtype, requires_grad=True) for x in (shape, kv, kv)]


def both(function: Callable[..., Any], inputs: list[Any], *args: Any, **options: Any) -> list[Any]:
    """The result and the gradients by all inputs that have one."""
    out = function(*inputs[:3], *args, **options)
    leaves = [x for x in (*inputs, *args, *options.values()) if isinstance(x, torch.Tensor) and x.requires_grad]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


def same(found: list[Any], expected: list[Any], ulps: float = 64) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert (x - y).abs().max() <= ulps * torch.finfo(y.dtype).eps * y.abs().max().clamp(min=1)


def masks() -> dict[str, Callable[[], dict[str, Any]]]:
    def floating() -> Any:
        made = torch.randn(4, 21, 21, dtype=torch.float64)
        made[:, :, 3] = -math.inf
        return made.requires_grad_()

    return {
        "none": dict, "causal": lambda: {"is_causal": True}, "scaled": lambda: {"scale": 0.3},
        "bool": lambda: {"attn_mask": torch.rand(2, 1, 21, 21) < 0.7}, "floating": lambda: {"attn_mask": floating()},
        "flat": lambda: {"attn_mask": torch.rand(21, 21) < 0.7},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in masks()), ("causal", True), ("floating", True)]
)
def test_it_is_torchs_function(name: str, compiled: bool) -> None:
    own, inputs, options = ft.scaled_dot_product_attention, qkv(), masks()[name]()
    if compiled:
        torch.compiler.reset()
        own = torch.compile(own, fullgraph=True, backend="aot_eager")
    same(both(own, inputs, **options), both(F.scaled_dot_product_attention, inputs, **options))


def test_heads_batches_and_axes_as_torch_takes_them() -> None:
    for shape, heads in (((5, 2, 4, 7, 8), 4), ((4, 7, 8), 4), (SHAPE, 2)):
        inputs = qkv(shape, heads_kv=heads)
        options = {"enable_gqa": True} if heads != shape[-3] else {}
        same(both(ft.scaled_dot_product_attention, inputs, **options),
             both(F.scaled_dot_product_attention, inputs, **options))  # fmt: skip
    flat = [torch.randn(7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    same(both(ft.scaled_dot_product_attention, flat), both(F.scaled_dot_product_attention, flat))
    q, k, v = qkv()
    same(both(ft.scaled_dot_product_attention, [q, k[:1], v]), both(F.scaled_dot_product_attention, [q, k[:1], v]))
    with pytest.raises(ValueError, match="enable_gqa"):
        ft.scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="attn_mask or is_causal=True, not both"):
        ft.scaled_dot_product_attention(q, k, v, torch.ones(21, 21, dtype=torch.bool), is_causal=True)
    # More keys than queries: top-left, unlike flashkit's own default.
    same(both(ft.scaled_dot_product_attention, [q[:, :, :5], k, v], is_causal=True),
         both(F.scaled_dot_product_attention, [q[:, :, :5], k, v], is_causal=True))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_is_as_small_as_torchs(dtype: Any) -> None:
    inputs = qkv(dtype=dtype)
    exact = both(F.scaled_dot_product_attention, [x.detach().double().requires_grad_() for x in inputs])
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = both(F.scaled_dot_product_attention, inputs)
    for found, other, wanted in zip(both(ft.attention, inputs), plain, exact, strict=True):
        assert found.dtype == dtype
        error, yardstick = ((x.double() - wanted).abs().max() for x in (found, other))
        assert error <= 2 * yardstick + torch.finfo(dtype).eps * wanted.abs().max()


def test_gradcheck_of_everything_differentiable() -> None:
    gradcheck = partial(torch.autograd.gradcheck, fast_mode=True)  # along random directions
    inputs = qkv((2, 2, 4, 2))
    bias = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    options = {
        "causal": True, "window": (1, None), "softcap": 2.0, "return_lse": True, "q_offset": 0,
        "alibi_slopes": torch.tensor([0.5, 0.25]), "kv_lengths": torch.tensor([4, 2]),
        "mask": torch.rand(2, 1, 1, 4) < 0.8,
    }  # fmt: skip

    def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
        out, lse = ft.attention(q, k, v, bias=bias, sinks=sinks, **options)
        return out, lse

    assert gradcheck(call, (*inputs, bias, sinks))
    assert gradcheck(lambda *x: ft.attention(*x, return_lse=True), inputs)
    assert gradcheck(lambda x: ft.attention(*(y.detach() for y in inputs), sinks=x), (sinks,))
    several = qkv((2, 3, 2, 4, 2))
    own = {"kv_lengths": torch.tensor([[4, 2, 3], [1, 4, 4]]), "mask": torch.rand(2, 1, 1, 4, 4) < 0.8}
    for shape in ((2, 3, 2, 1, 4), (1, 3, 1, 4, 1), ()):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert gradcheck(lambda bias: ft.attention(*several, bias=bias, **own), (bias,))
    bias = torch.randn((2, 1, 4, 4), dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda bias: ft.attention(*inputs, bias=bias), (bias,))
    assert gradcheck(lambda *x: ft.attention(*x, layout="bnhd", causal=True, q_offset=0), inputs)


def test_the_derivative_ends_with_the_second() -> None:
    q, k, v = qkv()
    (gradient,) = torch.autograd.grad(ft.attention(q, k, v).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), k, create_graph=True)
    assert second.any()
    with pytest.raises(RuntimeError, match=r"does not require grad|once_differentiable"):
        torch.autograd.grad(second.sum(), k)
    bias, sinks = (torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in ((21, 21), 4))
    compiled = torch.compile(lambda q, bias, sinks: ft.attention(q, k, v, bias=bias, sinks=sinks), backend="aot_eager")
    for function in (lambda q, bias, sinks: ft.attention(q, k, v, bias=bias, sinks=sinks), compiled):
        out = function(q, bias, sinks)
        (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        for leaf in (bias, sinks):
            with pytest.raises((NotImplementedError, RuntimeError), match=r"second derivatives|double backward"):
                torch.autograd.grad(gradient.norm() + leaf.sum(), leaf, retain_graph=True)
    with torch.no_grad():
        assert not ft.attention(q, k, v, bias=bias, score_mod=_alibi).requires_grad


@pytest.mark.parametrize("way", ["directly", "operators", "compiled", "flex_attention"])
def test_biases_slopes_and_captured_tensors_are_learned(way: str) -> None:
    """All at once, whatever looks at the call; against the same formulas in PyTorch."""
    q, k, v = qkv()
    bias, slopes, table = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((4, 21, 21), 4, (5, 4)))
    factor = torch.tensor(0.7, requires_grad=True)

    def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * factor + table[torch.log(1.0 + torch.abs(i - j)).to(torch.long).clamp(0, 4), h]

    def plain(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> Any:
        distance = (torch.arange(21)[:, None] - torch.arange(21)).abs()
        s = q @ k.mT * q.shape[-1] ** -0.5
        if way != "flex_attention":
            s = s - slopes[:, None, None] * distance + bias
        return torch.softmax(s * factor + table[torch.log(1.0 + distance).long().clamp(0, 4)].permute(2, 0, 1), -1) @ v

    mods = ft.Mods(score_mod=score_mod)

    def ours(q: Any, k: Any, v: Any, bias: Any, slopes: Any) -> Any:
        if way == "flex_attention":
            return ft.flex_attention(q, k, v, score_mod)
        return ft.attention(q, k, v, bias=bias, alibi_slopes=slopes, mods=mods)

    inputs = [q, k, v, table, factor, *([bias, slopes] if way != "flex_attention" else [])]
    function = torch.compile(ours, backend="aot_eager", fullgraph=True) if way == "compiled" else ours
    with Seen() if way == "operators" else contextlib.nullcontext():
        found = torch.autograd.grad(function(q, k, v, bias, slopes).square().sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(plain(q, k, v, bias, slopes).square().sum(), inputs))


def test_packed_sequences_and_pages() -> None:
    q, k, v = (torch.randn(30, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 11, 30])
    found = both(ft.attention, [q, k, v], cu_seqlens=cu, causal=True)

    def apart(q: Any, k: Any, v: Any) -> Any:
        pieces = zip(*(x.transpose(0, 1).split([11, 19], 1) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*each, is_causal=True) for each in pieces], 1).transpose(0, 1)

    same(found, both(apart, [q, k, v]))
    compiled = torch.compile(lambda q, k, v: ft.attention(q, k, v, cu_seqlens=cu, causal=True), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    same(both(compiled, [q, k, v]), found)
    q, k, v = (x.detach() for x in qkv())
    k_pages, v_pages = (torch.stack([x[b, :, p * 7 : p * 7 + 7].transpose(0, 1) for b in (0, 1) for p in range(3)])
                        for x in (k, v))  # fmt: skip
    table = torch.arange(6).reshape(2, 3)
    paged = ft.attention(q, k_pages, v_pages, page_table=table, kv_lengths=torch.tensor([21, 21]))
    same([paged], [F.scaled_dot_product_attention(q, k, v)])


def test_results_lie_in_memory_as_the_queries() -> None:
    """Models make (B, H, N, D) as a view of (B, N, H, D) and turn the result back: no copy is needed for that."""
    q, k, v = (torch.randn(2, 21, 4, 16).transpose(1, 2) for _ in range(3))
    out = ft.scaled_dot_product_attention(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, ft.scaled_dot_product_attention(q.contiguous(), k, v))
    assert ft.scaled_dot_product_attention(q.contiguous(), k, v).is_contiguous()


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "turned"])
def test_the_operators_keep_torchs_rules(layout: str) -> None:
    """Fake results have the shapes and strides of real ones, nothing is written that is not said to be."""
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    if layout == "turned":
        q = q.transpose(1, 2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    options = {"layout": "bnhd"} if layout == "bnhd" else {"sinks": torch.zeros(q.shape[1])}
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.flashkit.attention.default, (True, q, k, v, []), options, test_utils=checks)
    out, lse = torch.ops.flashkit.attention(True, q, k, v, [], **options)
    arguments = (torch.randn_like(out), None, out, lse, [] if layout == "bnhd" else ["sinks"], q, k, v, [])
    torch.library.opcheck(torch.ops.flashkit.attention_backward.default, arguments, options, test_utils=checks)


class Seen(TorchDispatchMode):
    """Names of the operators that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("flashkit::"))
        return func(*args, **(kwargs or {}))


def test_what_looks_at_operators_sees_them() -> None:
    inputs = qkv()
    expected = both(ft.attention, inputs)
    with Seen() as seen:
        same(both(ft.attention, inputs), expected, ulps=0)
    assert {"attention", "attention_backward"} <= set(seen.names)
    with torch.profiler.profile() as profile:
        both(ft.attention, inputs)
    assert {"flashkit::attention", "flashkit::attention_backward"} <= {event.name for event in profile.events()}
    plain = [x.detach() for x in inputs]
    assert type(ft.attention(*(TwoTensor(x, x) for x in plain))) is TwoTensor
    with pytest.raises(NotImplementedError, match="SparseCPU"):
        ft.attention(plain[0].to_sparse(), *plain[1:])
    out = ft.attention(*inputs)
    weights = torch.randn(3, *out.shape, dtype=out.dtype)
    batched = torch.autograd.grad(out, inputs, weights, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, inputs, weight, retain_graph=True) for weight in weights]
    same(list(batched), [torch.stack(x) for x in zip(*each, strict=True)])


@pytest.mark.parametrize("n", [1, 21], ids=["decoding", "several queries"])
def test_tangents(n: int) -> None:
    """Also where the call without them has a plan: a tangent that is dropped would pass for one that is zero."""
    q, k, v, sinks = torch.randn(2, 4, n, 16), *torch.randn(2, 2, 4, 21, 16), torch.randn(4)
    plain, tangents = (q, k, v), [torch.randn_like(x) for x in (q, k, v, sinks)]
    for _ in range(2):
        ft.attention(*plain)
    with torch.autograd.forward_ad.dual_level():
        for i, x in enumerate(plain):
            dual = torch.autograd.forward_ad.make_dual(x, tangents[i])
            out = torch.autograd.forward_ad.unpack_dual(ft.attention(*plain[:i], dual, *plain[i + 1 :]))
            given: Any = {f"d{'qkv'[i]}": tangents[i]}
            same([out.primal, out.tangent], list(flashkit.attention_jvp(*plain, **given)), ulps=64)
        with torch.no_grad():
            dual = torch.autograd.forward_ad.make_dual(sinks, tangents[3])
            assert torch.autograd.forward_ad.unpack_dual(ft.attention(*plain, sinks=dual)).tangent.any()
        bias = torch.autograd.forward_ad.make_dual(torch.zeros(21), torch.ones(21))
        with pytest.raises(NotImplementedError, match="forward mode AD"):
            ft.attention(*plain, bias=bias)
        assert torch.autograd.forward_ad.unpack_dual(ft.attention(*plain)).tangent is None
    out, moved = torch.func.jvp(lambda *x: ft.attention(*x), plain, tuple(tangents[:3]))
    same([out, moved], list(flashkit.attention_jvp(*plain, *tangents[:3])), ulps=64)


def test_second_derivatives() -> None:
    """Both modes of the second derivative by finite differences; every layout, GQA, masks, sinks, functions."""
    inputs, sinks = qkv((2, 4, 5, 3), heads_kv=2), torch.randn(4, dtype=torch.float64)
    options: dict[str, Any] = {
        "causal": {"causal": True, "sinks": sinks, "return_lse": True},
        "score": {"score_mod": lambda s, b, h, q, k: s + 0.1 * s * s, "softcap": 3.0, "window": (3, 1)},
    }
    for given in options.values():
        attend = partial(ft.attention, **given)
        assert torch.autograd.gradcheck(attend, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(attend, inputs)
    tangents = [torch.randn_like(x) for x in inputs]

    def gradient(*x: Any) -> Any:
        return torch.autograd.grad((ft.attention(*x, causal=True) ** 2).sum(), x[0], create_graph=True)[0]

    with torch.autograd.forward_ad.dual_level():
        moved = gradient(*map(torch.autograd.forward_ad.make_dual, inputs, tangents))
        found = torch.autograd.forward_ad.unpack_dual(moved).tangent
    step = 1e-6
    after, before = (
        gradient(*((x + sign * step * d).detach().requires_grad_() for x, d in zip(inputs, tangents, strict=True)))
        for sign in (1, -1)
    )
    torch.testing.assert_close(found, (after - before) / (2 * step), atol=1e-6, rtol=1e-6)


def test_saved_tensors_are_watched_and_may_move() -> None:
    inputs = qkv()
    expected = both(ft.attention, inputs, causal=True)
    turned = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs]
    with torch.autograd.graph.save_on_cpu():  # what comes back is contiguous
        same(both(ft.attention, turned, causal=True), expected)
    causal = partial(ft.attention, causal=True)
    same(both(lambda *x: torch.utils.checkpoint.checkpoint(causal, *x, use_reentrant=False), inputs), expected)
    changes: list[tuple[Callable[..., Any], str]] = [
        (lambda x: x.detach()[:, :, :7], "dout: .*shape"), (lambda x: x.detach().float(), "dout: .*dtype"),
        (lambda x: x.detach().float() if x.dim() == 3 else x.detach(), "stored out and lse: expected"),
    ]  # fmt: skip
    for change, message in changes:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, change):
            out = ft.attention(*inputs, causal=True)
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                out.sum().backward(retain_graph=True)
    for index in range(4):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        given = [x * 1 for x in leaves]
        out = ft.attention(*given)
        with torch.no_grad():
            (*given, out)[index].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_autocast() -> None:
    q, k, v = (x.detach().float() for x in qkv())
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = ft.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
        compiled = torch.compile(ft.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")(q, k, v)
    assert found.dtype == theirs.dtype == compiled.dtype == torch.bfloat16
    assert torch.equal(found, ft.attention(*(x.bfloat16() for x in (q, k, v)))) and torch.equal(found, compiled)


def test_dropout_follows_torchs_generator() -> None:
    inputs = [x.detach() for x in qkv()]
    torch.manual_seed(1)
    first, second = (ft.scaled_dot_product_attention(*inputs, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(ft.scaled_dot_product_attention(*inputs, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    inputs = qkv((1, 2, 5, 4))
    bias = torch.zeros(2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: ft.attention(*x[:3], bias=x[3], dropout_p=0.5, seed=7), (*inputs, bias))
    compiled = torch.compile(lambda *x: ft.attention(*x, dropout_p=0.5, seed=7), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), ft.attention(*inputs, dropout_p=0.5, seed=7))


def test_seeds_are_integers_of_64_bits() -> None:
    inputs = [x.detach() for x in qkv((1, 2, 5, 4))]
    drop = partial(ft.attention, *inputs, dropout_p=0.5)
    for seed in (3, 2**63 + 3, 2**64 - 1):
        assert torch.equal(drop(seed=seed), flashkit.attention(*inputs, dropout_p=0.5, seed=seed))
    assert torch.equal(drop(seed=torch.tensor(3)), drop(seed=3))
    for wrong in (1.5, True, "3", torch.tensor(1.5), torch.tensor([1, 2])):
        with pytest.raises(TypeError, match="seed: expected an integer"):
            drop(seed=wrong)
    compiled = torch.compile(
        lambda seed, left: ft.attention(*inputs, dropout_p=0.5, seed=seed, window=(left, 0)), fullgraph=True,
        backend="aot_eager",
    )  # fmt: skip
    for seed in (4, 5, 6):  # from the second on they are symbols
        assert torch.equal(compiled(seed, seed - 3), drop(seed=seed, window=(seed - 3, 0)))


# --- flex_attention ---------------------------------------------------------------------------------------------------

SLOPES, DOCUMENT = torch.tensor([0.5, 0.25, 0.125, 1.0]), torch.tensor([[0] * 8 + [1] * 13, [0] * 3 + [1] * 18])


def _alibi(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return score - SLOPES[h] * torch.abs(q - k)


def _piecewise(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    capped = 2 * torch.tanh(score / 2)
    return torch.where((q - k) % 3 == 0, capped, torch.clamp(score, min=-1.0)) + (3 - k) * 0.1 * (h == 1)


def _documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENT[b, q] == DOCUMENT[b, k]) & torch.ge(q, k)


@pytest.mark.parametrize(("score_mod", "masked"), [(_alibi, False), (_piecewise, True)])
def test_functions_of_flex_attention(score_mod: Any, masked: bool) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    inputs = qkv(dtype=torch.float32)
    blocks = create_block_mask(_documents, 2, None, 21, 21, device="cpu") if masked else None
    b, h, q, k = (torch.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
                  for i, n in enumerate((2, 4, 21, 21)))  # fmt: skip

    def dense(*tensors: Any) -> Any:
        q_, k_, v_ = tensors
        s = q_ @ k_.mT / 4
        s = s if score_mod is None else score_mod(s, b, h, q, k)
        return torch.where(_documents(b, h, q, k) if masked else torch.tensor(True), s, -math.inf).softmax(-1) @ v_

    exact = both(dense, [x.detach().double().requires_grad_() for x in inputs])
    plain = flex_attention(*(x.detach() for x in inputs), score_mod, blocks)
    torch.testing.assert_close(plain, exact[0].float(), atol=1e-5, rtol=1e-4)
    found = both(ft.flex_attention, inputs, score_mod, blocks)
    same([x.double() for x in found], exact, ulps=2**29 * 64)  # of float32
    mods = ft.Mods(score_mod=score_mod, block_mask=blocks)
    compiled = torch.compile(lambda q, k, v: ft.flex_attention(q, k, v, mods=mods), fullgraph=True, backend="aot_eager")
    same(both(compiled, inputs), found, ulps=0)


def test_where_functions_are_taken() -> None:
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"block_mask: .* got a builtins.int"):
        ft.attention(q, k, v, block_mask=3)
    with pytest.raises(TypeError, match=r"expected mods, or score_mod.*not both"):
        ft.attention(q, k, v, mods=ft.Mods(), score_mod=_alibi)
    with pytest.raises(Exception, match=r"Mods"):
        torch.compile(lambda q: ft.attention(q, k, v, score_mod=_alibi), fullgraph=True, backend="aot_eager")(q)


# --- a model ----------------------------------------------------------------------------------------------------------


def test_the_example_of_the_gallery() -> None:
    """Which asserts that it learns, and that gradients are those of scaled_dot_product_attention."""
    runpy.run_path(str(Path(__file__).parents[2] / "docs" / "examples" / "torch_training.py"))


def test_what_is_no_tensor_says_so() -> None:
    q, *_ = qkv(dtype=torch.float32)
    q = q.detach()
    quantized = flashkit.quantize(q.numpy(), "e4m3", per="token")
    for at, (name, x, fits) in enumerate(
        (("q", quantized, r"flashkit\.attention"), ("k", q.numpy(), r"from_numpy"), ("v", quantized, r"Quantized"))
    ):
        given: list[Any] = [q, q, q]
        given[at] = x
        with pytest.raises(TypeError, match=f"^{name}: expected a torch.Tensor, got ") as raised:
            ft.attention(*given)
        assert raised.match(fits)
    options: dict[str, Any]
    for options in {"bias": (1, 2)}, {"mask": 3}, {"kv_lengths": [4]}, {"cu_seqlens": (torch.arange(2), 3)}:
        with pytest.raises(TypeError, match=f"^{next(iter(options))}: expected a torch.Tensor, got "):
            ft.attention(q, q, q, **options)
    wrong: Any = ({"window": 3}, r"\(left, right\)"), ({"window": (3,)}, "numbers of keys"), ({"mods": 3}, "Mods")
    for options, fits in wrong:
        with pytest.raises(TypeError, match=f"^{next(iter(options))}: expected .*{fits}"):
            ft.attention(q, q, q, **options)


def test_ranks_refuse_gradients_that_they_do_not_have(tmp_path: Path) -> None:
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        comm, (q, k, v) = ft.Comm(distributed.group.WORLD), qkv()
        slopes = torch.ones(4, dtype=torch.float64, requires_grad=True)
        scaled = partial(lambda s, b, h, q, k, *, by: s * by[h], by=slopes)
        for options in {"alibi_slopes": slopes}, {"score_mod": scaled}, {"scale": slopes[0]}:
            with pytest.raises(TypeError, match="requires grad"):
                comm.attention(q, k, v, **options)
        comm.attention(q, k, v, alibi_slopes=slopes.detach(), sinks=slopes).sum().backward()
        assert slopes.grad is not None
    finally:
        distributed.destroy_process_group()


def test_the_gradient_of_an_infinite_sink_without_queries() -> None:
    q, k = torch.zeros(1, 1, 0, 8), torch.zeros(1, 1, 3, 8)
    sinks = torch.tensor([-torch.inf], requires_grad=True)
    ft.attention(q, k, k, sinks=sinks).sum().backward()
    assert sinks.grad is not None and sinks.grad.tolist() == [0]
