"""flashkit.torch finds the plan of a call, and only of such a call."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases import within_a_unit

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.overrides import TorchFunctionMode  # noqa: E402

import flashkit  # noqa: E402
from flashkit import mods  # noqa: E402
from flashkit import torch as ft  # noqa: E402
from flashkit.call import plans, torch_autograd, torch_plans  # noqa: E402


def name() -> Any:
    """It has the state of the dispatcher, which other tests may have changed."""
    return torch_plans.name_of("a test", ("bias",), (("a", None), ("b", 1)))


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    torch.manual_seed(0)
    plans.clear()
    yield
    plans.clear()


def qkv(n: int = 21, dtype: Any = torch.float32) -> list[Any]:
    return [torch.randn(2, 4, n, 16, dtype=dtype) for _ in range(3)]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Backends of the calls that ran by a plan which was found."""
    found, find = list[str](), torch_plans.Layouts.find

    def spy(*given: Any) -> Any:
        known = find(*given)
        if known is not None:
            found.append(known.planned.backend)
        return known

    monkeypatch.setattr(torch_plans.Layouts, "find", spy)
    return found


OTHERS: dict[str, Callable[[Any], Any]] = {
    "dtype": lambda x: x.half(), "size": lambda x: x[:, :, :20], "axes": lambda x: x[0],
    "strides": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "stride of 0": lambda x: x[:, :1].expand(x.shape), "negated": torch._neg_view, "sparse": lambda x: x.to_sparse(),
    "device": lambda x: x.to("meta"), "class": lambda x: x.as_subclass(type("Subclass", (torch.Tensor,), {})),
    "requires grad": lambda x: x.clone().requires_grad_(), "no autograd": lambda x: torch.inference_mode()(x.clone)(),
    "address": lambda x: moved_by_a_byte(x),
}  # fmt: skip


def moved_by_a_byte(x: Any) -> Any:
    memory = np.frombuffer(bytearray(b"-" + x.numpy().tobytes()), np.uint8)[1:]
    made = torch.from_numpy(memory.view(np.float32)).reshape(x.shape)
    assert torch.equal(made, x) and made.data_ptr() % 4
    return made


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("change", OTHERS)
def test_a_plan_is_of_tensors_like_these(change: str, at: int) -> None:
    """What is compared is PyTorch's affair, so that a new version may change it."""
    given = qkv()
    torch_plans.keep(name(), tuple(given), "plan")
    assert torch_plans.find(name(), tuple(x.clone() for x in given)) == "plan"
    assert torch_plans.find(name(), tuple(torch.stack([x, x])[1] for x in given)) == "plan", "memory may begin anywhere"
    given[at] = OTHERS[change](given[at])
    assert torch_plans.find(name(), tuple(given)) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_have_no_plan() -> None:
    """PyTorch's guards end the process where one has no strides."""
    given = qkv()
    out, lse = ft.attention(*given, return_lse=True)
    nested = torch.nested.nested_tensor([x[:, :n] for x, n in zip(given[0], (3, 5), strict=True)])
    for at in range(5):
        mixed = [*given, out, lse]
        torch_plans.keep(name(), tuple(mixed), "plan")
        mixed[at] = nested
        assert torch_plans.find(name(), tuple(mixed)) is None
    for at in range(3):
        with pytest.raises(NotImplementedError, match="NestedTensorCPU"):
            ft.attention(*given[:at], nested, *given[at + 1 :])


def test_a_plan_is_of_threads_like_this() -> None:
    given = tuple(qkv())
    torch_plans.keep(name(), given, "plan")
    inside: list[Any] = []

    def look(x: Any) -> Any:
        inside.extend(torch_plans.find(name(), each) for each in ((x, *given[1:]), given))
        return x.sum()

    torch.vmap(look)(torch.stack(given))
    torch.func.grad(look)(given[0])
    torch.func.functionalize(look)(given[0])
    torch.jit.trace(look, given[0], check_trace=False)
    with torch.inference_mode():
        look(given[0])
    with torch.autocast("cpu", torch.bfloat16):
        look(given[0])
    assert inside == [None] * 12
    look(given[0])
    assert inside[12:] == ["plan", "plan"]


def test_a_plan_is_of_a_name() -> None:
    given = tuple(qkv())
    torch_plans.keep(name(), given, "plan")
    same = (("a", None), ("b", 1))
    for call, tensors, options in (
        ("another", ("bias",), same), ("a test", ("mask",), same), ("a test", ("bias",), (("a", None), ("b", 2))),
        ("a test", ("bias",), (("a", None), ("b", True))), ("a test", ("bias",), (("a", None), ("c", 1))),
    ):  # fmt: skip
        assert torch_plans.find(torch_plans.name_of(call, tensors, options), given) is None
    with flashkit.use_backend("reference"):
        assert torch_plans.find(name(), given) is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHKIT_DETERMINISTIC", "1")
        assert torch_plans.find(name(), given) is None
    assert torch_plans.find(name(), given) == "plan"
    for option in (torch.tensor(1.0), [1], (1, 2)):
        changing = torch_plans.name_of("a test", (), (("a", option),))
        torch_plans.keep(changing, given, "plan")
        assert torch_plans.find(changing, given) is None, "what can change is no part of a name"


def test_calls_find_their_plans(runs: list[str]) -> None:
    """From the second one on; a backward pass has its own."""
    q, k, v = qkv()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for given in ((q, k, v), (q, q, q), (q, k, k), turned):
        leaves = [x.detach().requires_grad_() for x in given]
        for turn in range(3):
            runs.clear()
            out = ft.attention(*leaves, causal=True, q_offset=0)
            (out * torch.ones(16)).sum().backward()
            torch.testing.assert_close(
                ft.attention(*given, causal=True, q_offset=0),
                torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True),
            )
            assert turn == 0 or runs == ["cpu"] * 3
    with flashkit.use_backend("reference"):
        runs.clear()
        ft.attention(q, k, v, causal=True, q_offset=0)
        assert not runs


def test_a_backward_pass_is_of_gradients_like_these(runs: list[str]) -> None:
    """Of other layouts, of memory that begins anywhere, with lse and without, and of the state of the dispatcher."""
    leaves = [x.requires_grad_() for x in qkv()]
    towards, rows = torch.randn(2, 4, 21, 16), torch.randn(2, 4, 21)
    douts = [towards, towards.mT.contiguous().mT, torch.ones(()).expand(towards.shape), moved_by_a_byte(towards),
             torch._neg_view(towards)]  # fmt: skip
    for turn in range(3):
        for dout in douts:
            for dlse in None, rows, rows.mT.contiguous().mT, torch._neg_view(rows):
                results = ft.attention(*leaves, return_lse=True)[: 1 if dlse is None else 2]
                given = (dout,) if dlse is None else (dout, dlse)
                runs.clear()
                found = torch.autograd.grad(results, leaves, given)
                copied = dout is douts[3] or any(x.is_neg() for x in given)
                assert turn == 0 or runs == ["cpu"] * (not copied)
                scores = leaves[0] @ leaves[1].mT / 4
                expected = [scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)][: len(given)]
                for gradient, right in zip(found, torch.autograd.grad(expected, leaves, given), strict=True):
                    torch.testing.assert_close(gradient, right, atol=1e-5, rtol=1e-5)
    out = ft.attention(*leaves)
    with flashkit.use_backend("reference"):
        runs.clear()
        torch.autograd.grad(out, leaves, towards)
        assert not runs


def test_calls_with_modifications_find_their_plans(runs: list[str]) -> None:
    """By graph and numbers; not with block masks, numbers in tensors, or integers, which are checked at each call."""
    q, k, v = qkv()

    def found(*given: Any) -> int:
        runs.clear()
        for options in given:
            ft.attention(q, k, v, **options)
        return len(runs)

    def window(reach: Any) -> dict[str, Any]:
        return {"mask_mod": lambda b, h, i, j: abs(i - j) < reach}

    assert found(window(3), window(4), window(3), window(4), window(3)) == 3
    assert found(window(torch.tensor(5)), window(torch.tensor(5))) == 0
    near = ft.Mods(score_mod=lambda s, b, h, i, j: s - 0.1 * abs(i - j))
    assert found({"mods": near}, {"mods": near}, *[{"score_mod": lambda s, b, h, i, j: s * 2.0}] * 2) == 2
    ids = torch.zeros(21, dtype=torch.int64)
    assert found(*[{"mask_mod": lambda b, h, i, j: ids[i] == ids[j]}] * 2) == 0
    assert found(*[{"block_mask": flashkit.BlockMask.from_mod(mods.causal(), 21, 21, 8, 8)}] * 2) == 0
    expected = flashkit.attention(*(x.numpy() for x in (q, k, v)), **window(4), backend="reference")
    np.testing.assert_allclose(ft.attention(q, k, v, **window(4)).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_modifications_of_the_same_form() -> None:
    def form(table: Any, gain: float = 1.0) -> Any:
        return ft.Mods(score_mod=lambda s, b, h, i, j: s + gain * table[h, abs(i - j)]).form

    found = {form(torch.zeros(4, 21)): "table"}
    assert form(torch.ones(4, 40)) in found and form(torch.zeros(4, 21), 2.0) not in found
    by_number = mods.score(lambda s, b, h, q, k, *, table: s + table[h], table=np.zeros(4, np.float32))
    assert ft.Mods(score_mod=by_number).form is None


def test_no_tensor_is_kept() -> None:
    given = [x.requires_grad_() for x in qkv()]
    for _ in range(2):
        ft.attention(*given).sum().backward()
    watched = list(map(weakref.ref, given))
    given.clear()
    gc.collect()
    assert [each() for each in watched] == [None] * 3


def test_other_versions_of_pytorch(monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> None:
    """Calls are right without its guards."""
    monkeypatch.setattr(torch._C._dynamo, "guards", SimpleNamespace())
    q, k, v = qkv()
    for _ in range(3):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(ft.attention(q, k, v), expected)
    assert not runs


class Functions(TorchFunctionMode):
    """Sees operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def watchers() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    return {
        "functions": Functions, "profiler": torch.profiler.profile, "tangents": torch.autograd.forward_ad.dual_level,
        "nothing": nullcontext,
    }  # fmt: skip


@pytest.mark.parametrize("watcher", watchers())
def test_a_known_plan_hides_no_call(watcher: str, calls_of: Any) -> None:
    given = qkv()
    for _ in range(2):
        expected = ft.attention(*given)
    calls = calls_of(torch_autograd, "forward_op")
    with watchers()[watcher]() as active:
        assert torch.equal(ft.attention(*given), expected)
    assert len(calls) == (watcher != "nothing")
    assert watcher != "functions" or "flashkit.attention.default" in active.seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_decoding_share_a_plan(dtype: Any, calls_of: Any) -> None:
    """Each has one key more, and views of a cache as models keep it: one call is prepared and checked."""
    prepared = calls_of(plans, "prepare")
    keys, values = torch.randn(2, 2, 2, 100, 16, dtype=dtype)
    for n in range(65, 100):
        q = torch.randn(2, 1, 4, 16, dtype=dtype).transpose(1, 2)
        out = ft.attention(q, keys[:, :, :n], values[:, :, :n], causal=True)
        right = flashkit.attention(
            *(x.double().numpy() for x in (q, keys[:, :, :n], values[:, :, :n])), backend="reference"
        )
        within_a_unit(out.double().numpy(), right, str(dtype).removeprefix("torch."))
    assert len([q for q, *_ in prepared if q.dtype != np.float64]) == 1  # the measure is computed in float64


def test_calls_with_biases_and_masks_find_their_plans(runs: list[str]) -> None:
    """Tensors of their own, with gradients by the bias; from the second call on no plan is looked for."""
    q, k, v = qkv()
    for turn in range(3):
        bias = torch.randn(4, q.shape[-2], k.shape[-2], requires_grad=True)
        mask = torch.rand(q.shape[-2], k.shape[-2]) < 0.8
        mask[:, 0] = True
        runs.clear()
        out = ft.attention(q, k, v, bias=bias, mask=mask)
        (gradient,) = torch.autograd.grad(out.square().sum(), bias)
        assert turn == 0 or runs == ["cpu"] * 2
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~mask, -torch.inf))
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(gradient, torch.autograd.grad(right.square().sum(), bias)[0])
