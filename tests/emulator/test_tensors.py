"""Tensors of PyTorch on the emulated device: calls that find a plan run on their addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import cases
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import flashkit  # noqa: E402
from flashkit import torch as ft  # noqa: E402
from flashkit.backends.cuda_common.backend import VARIABLE  # noqa: E402
from flashkit.call import interop, plans, torch_autograd, torch_passes, views  # noqa: E402
from flashkit.call.planned import Planned  # noqa: E402

from .calls import cupy  # noqa: E402
from .device import BASE  # noqa: E402

if TYPE_CHECKING:
    from .device import Device

SHAPE = (1, 2, 12, 8)
STATE = SimpleNamespace(stream=0, held=[], arrays=0)
"""PyTorch's current stream, memory of tensors, arrays of CuPy that were made of tensors."""


class Tensor(torch.Tensor):
    """Memory of the emulated device, as a tensor that says it is there."""

    is_cuda, is_cpu = True, False
    device = torch.device("cuda", 0)

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        from . import cupy

        return super().data_ptr() - cupy.DEVICE.memory.bytes.ctypes.data + BASE

    def new_empty(self, shape: Any, *, dtype: Any = None) -> Any:
        return on_device(torch.full(tuple(shape), torch.nan, dtype=dtype or self.dtype))

    def clone(self, **options: Any) -> Any:
        return on_device_as_it_is(on_host(self).clone(**options))

    def contiguous(self) -> Any:
        return self if self.is_contiguous() else self.clone(memory_format=torch.contiguous_format)

    def to(self, *form: Any, **options: Any) -> Any:
        return on_device(on_host(self).to(*form, **options))

    def sum(self, *axes: Any) -> Any:
        return on_device(on_host(self).sum(*axes))

    def resolve_neg(self) -> Any:
        return on_device(on_host(self).resolve_neg())

    def untyped_storage(self) -> Any:
        STATE.arrays += 1
        return SimpleNamespace(data_ptr=self.data_ptr, nbytes=super().untyped_storage().nbytes)


def allocate(shape: Any, strides: Any, dtype: Any) -> Any:
    """Memory without values, as PyTorch gives it: bytes of -1 are NaN."""
    made = on_device(torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype))
    assert made.stride() == strides
    return made


def over(array: Any) -> Any:
    """An array of the emulated device as a tensor of the same memory."""
    STATE.held.append(array)
    return torch.from_numpy(array._view).as_subclass(Tensor)


def on_device(x: Any) -> Any:
    from . import cupy

    return over(cupy.asarray(x.detach().numpy())).requires_grad_(x.requires_grad)


def on_host(x: Any) -> Any:
    from . import cupy

    cupy.DEVICE.flush()
    return x.detach().as_subclass(torch.Tensor)


def tagged(x: Any) -> Any:
    """Autograd gives back what it has saved as plain tensors."""
    from . import cupy

    if isinstance(x, dict):
        return {name: tagged(each) for name, each in x.items()}
    if type(x) in (tuple, list):
        return type(x)(map(tagged, x))
    memory = cupy.DEVICE.memory.bytes
    here = isinstance(x, torch.Tensor) and 0 <= torch.Tensor.data_ptr(x) - memory.ctypes.data < len(memory)
    return x.as_subclass(Tensor) if here and type(x) is not Tensor else x


@pytest.fixture(autouse=True)
def torch_on_the_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "simt")  # whose kernels compile fast
    monkeypatch.setattr(torch, "from_dlpack", over)
    monkeypatch.setattr(views, "_allocator", lambda: allocate)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STATE.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plain = frozenset({Tensor, torch.Tensor})
    monkeypatch.setattr(torch_autograd, "PLAIN", plain)
    monkeypatch.setattr(torch_passes, "PLAIN", plain)
    torch.manual_seed(0)

    def tagging(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            # `torch.autograd.grad` disables it, so that results are plain tensors.
            with torch._C._EnableTorchFunction():
                return function(*map(tagged, given))

        return wrapped

    for name in ("backward", "known_plan"):
        monkeypatch.setattr(torch_autograd, name, tagging(getattr(torch_autograd, name)))
    monkeypatch.setattr(torch_passes.Known, "pull_back", tagging(torch_passes.Known.pull_back))
    yield
    STATE.held.clear()
    STATE.stream = 0
    plans.clear()


def qkv(shape: tuple[int, ...] = SHAPE, make: Callable[..., Any] = torch.randn) -> list[Any]:
    return [make(shape, requires_grad=True) for _ in range(3)]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(on_host(found), on_host(expected), atol=1e-5, rtol=1e-5)


def check(inputs: list[Any], known: bool = True, since: int = 1, **options: Any) -> None:
    """Both passes are those on a CPU. known: whether calls since the second, or a later one, make no array of CuPy."""
    host = [x.detach().requires_grad_() for x in inputs]
    expected, lse = ft.attention(*host, **options, return_lse=True)
    lent = {name: on_device(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    of_rows, of_a_sum = torch.randn_like(lse), torch.ones(()).expand(expected.shape)
    columns, rows_expanded = torch.randn(expected.mT.shape).mT, of_rows[..., :1].expand(lse.shape)
    for turn, (dout, dlse) in enumerate(((columns, None), (torch.randn(expected.shape), rows_expanded),
                                         (of_a_sum, of_rows), (columns, None))):  # fmt: skip
        results = 1 if dlse is None else 2
        wanted = torch.autograd.grad([expected, lse][:results], host, [dout, dlse][:results], retain_graph=True)
        given = [on_device_as_it_is(x.detach()).requires_grad_() for x in inputs]
        assert [x.stride() for x in given] == [x.stride() for x in inputs]
        STATE.arrays = 0
        with torch.no_grad():
            same(ft.attention(*given, **lent), expected)
        out, lse_ = ft.attention(*given, **lent, return_lse=True)
        same(out, expected)
        same(lse_, lse)
        assert type(out) is Tensor and out.stride() == expected.stride()
        towards = [on_device_as_it_is(x) for x in (dout, dlse)[:results]]
        for gradient, wanted_ in zip(torch.autograd.grad([out, lse_][:results], given, towards), wanted, strict=True):
            same(gradient, wanted_)
            assert gradient.stride() == wanted_.stride()
        assert turn < since or (STATE.arrays == 0) == known


def test_calls_of_one_layout_make_no_arrays() -> None:
    check(qkv())
    check(qkv(), causal=True)
    check([x.detach().transpose(1, 2) for x in qkv((1, 12, 2, 8))], causal=True, q_offset=0)
    check(qkv((1, 12, 2, 8)), layout="bnhd")
    check([x.detach() for x in qkv((2, 12, 8))], scale=0.3)
    check([x.detach() for x in qkv((12, 8))], softcap=2.0, window=(3, None))
    check(qkv(), since=3, bias=torch.randn(2, 12, 12))  # one with such results was before
    check(qkv(), since=3, mask=torch.randn(1, 1, 12, 12) > 0, alibi_slopes=torch.rand(2), causal=True)


def test_gradients_by_biases() -> None:
    """In the shape and dtype of the caller's tensor, of a call that finds a plan, too."""
    q, k, v = (x.detach() for x in qkv((2, 2, 12, 8)))
    for shape, dtype in ((2, 12, 12), torch.float32), ((1, 1, 12, 12), torch.float64), ((12, 12), torch.float32):
        bias = torch.randn(shape).to(dtype)
        host, dout = bias.clone().requires_grad_(), torch.randn(q.shape)
        (wanted,) = torch.autograd.grad(ft.attention(q, k, v, bias=host), host, dout)
        for turn in range(3):
            given = on_device(bias).requires_grad_()
            STATE.arrays = 0
            (found,) = torch.autograd.grad(
                ft.attention(*map(on_device, (q, k, v)), bias=given), given, on_device_as_it_is(dout)
            )
            assert found.dtype == dtype and (turn < 2 or STATE.arrays == 0)
            cases.within_a_unit(on_host(found).numpy(), wanted.numpy(), "float16")


def test_other_calls_make_them() -> None:
    check(qkv(), known=False, sinks=torch.zeros(2), causal=True)
    packed = [x.detach() for x in qkv((12, 2, 8))]
    check(packed, known=False, cu_seqlens=torch.tensor([0, 5, 12]), causal=True)


def on_device_as_it_is(x: Any) -> Any:
    """With its strides and its negation."""
    if x.is_neg():
        return torch._neg_view(on_device_as_it_is(torch._neg_view(x)))
    if 0 in x.stride():
        one = x[tuple(slice(None) if stride else slice(1) for stride in x.stride())]
        return on_device_as_it_is(one.clone(memory_format=torch.contiguous_format)).expand(x.shape)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
    memory = on_device(torch.full((max(size, 1),), torch.nan, dtype=x.dtype))
    made = memory.as_strided(x.shape, x.stride())
    on_host(made).copy_(x)
    return made


def test_the_callers_stream_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    given, streams, run = [on_device(x.detach()) for x in qkv()], [], Planned.run_on
    current = cupy.cuda.get_current_stream
    monkeypatch.setattr(Planned, "run_on", lambda *args: streams.append(current().ptr) or run(*args))
    expected = ft.attention(*given)
    for stream in (0, 7, 9, 7):
        STATE.stream = stream
        same(ft.attention(*given), expected)
    with cupy.cuda.Stream() as other:
        STATE.stream = 0
        same(ft.attention(*given), expected)
        assert cupy.cuda.get_current_stream() is other
    assert streams[1:] == [0, 7, 9, 7, 0] and cupy.cuda.get_current_stream().ptr == 0


def test_functions_of_arrays_take_tensors() -> None:
    q, k, v = (x.detach() for x in qkv())
    given = [on_device(x) for x in (q, k, v)]
    expected, planned = flashkit.attention(q, k, v, causal=True), flashkit.plan(*given, causal=True)
    out = on_device(torch.zeros(SHAPE))
    for _ in range(2):
        same(flashkit.attention(*given, causal=True), expected)
        assert flashkit.attention(*given, causal=True, out=out) is out
        same(out, expected)
        same(planned(*given), expected)
    assert planned(*given, out=out) is out
    STATE.arrays = 0
    flashkit.attention(*given, causal=True)
    planned(*given)
    assert STATE.arrays == 0
    dout = torch.randn(SHAPE)
    wanted = flashkit.attention_vjp(q, k, v, causal=True)[1](dout)
    for gradient, other in zip(flashkit.attention_vjp(*given, causal=True)[1](on_device(dout)), wanted, strict=True):
        same(gradient, other)
    with pytest.raises(TypeError, match=r"k: expected .* cuda:0, got a torch tensor on cpu"):
        flashkit.attention(given[0], k, given[2])


def test_a_view_is_as_an_array_of_cupy() -> None:
    x = on_device(torch.randn(3, 4, 5)).transpose(0, 1)
    view, array = views.View(x), interop.native("x", x)
    assert type(array) is cupy.ndarray
    from flashkit.call import arrays

    assert arrays.layout(view) == arrays.layout(array) and arrays.same_address(view, array)
    assert arrays.kind_of(view) == "cupy" and not arrays.contiguous(view) and len(view) == len(array) == 4
    for change in (lambda y: y.swapaxes(0, 2), lambda y: y[None], lambda y: y[1], lambda y: y.copy(),
                   lambda y: y.reshape((4, 15)), lambda y: y.view()):  # fmt: skip
        mine, other = change(view), change(array)
        assert mine.shape == other.shape and mine.dtype == other.dtype and mine.ndim == other.ndim
        np.testing.assert_array_equal(on_host(mine.tensor).numpy(), other.get())
